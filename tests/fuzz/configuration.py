"""Fuzz target ``config``: reads arbitrary flags and an arbitrary configuration file.

Only ``ConfigError`` may be raised; a configuration that is accepted can be written and read again.
"""

from ipvsproxy.config import file, load
from ipvsproxy.config.option import ConfigError

LONGEST_LINE = 600
_FILE = "/f"


def config(data: bytes) -> None:
    """The input has flags, one on each line, then an empty line, and then the configuration file, if there is one."""
    head, blank, content = data.partition(b"\n\n")
    arguments = [line.decode(errors="surrogateescape") for line in head.split(b"\n") if line]
    if blank:
        arguments.append(f"--config={_FILE}")
    try:
        loaded = load.load(arguments, hostname="node-a", read_file=lambda _: content)
    except ConfigError as error:
        assert error.problems  # noqa: PT017 - some inputs raise no error
        for problem in error.problems:
            _check_text(str(problem))
        return
    for notice in loaded.notices:
        _check_text(str(notice))
    if loaded.config_file == _FILE:
        text = file.render(loaded)
        again = load.load([f"--config={_FILE}"], hostname="node-a", read_file=lambda _: text.encode())
        assert file.render(again) == text


def _check_text(text: str) -> None:
    """Check that the text is one printable line."""
    assert text.strip()
    assert text.isprintable(), ascii(text)
    assert len(text) <= LONGEST_LINE, "a line that is too long"
