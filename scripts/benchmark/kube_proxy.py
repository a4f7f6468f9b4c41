"""Finds the kube-proxy to measure beside ipvsproxy, and defines the names of the figures of both programs.

Imports the standard library only, because scripts/bench imports this module without the packages in .venv.
"""

import os
import pathlib
import shlex
import shutil
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[2]
EMPTY = tuple(pathlib.Path(name) for name in ("/tmp", "/run", "/dev/shm"))  # noqa: S108 - the path is only compared, not used
"""The directories that scripts/kernel replaces by empty directories. Of their contents, only this repository (``ROOT``) is
kept."""
FIGURES = (
    ("programmed_s", "s from its start until all is programmed"),
    ("processor_s", "processor s until then"),
    ("started", "processes and threads started until then"),
    ("resident_mb", "resident MB then"),
    ("change_s", "s from a change until it is programmed, median"),
    ("change_processor_s", "processor s for each change"),
    ("change_started", "processes and threads started for each change"),
    ("churn_s", "churn: s from the last change until all is programmed"),
    ("churn_p50_s", "churn: s from a change until it is seen, p50"),
    ("churn_p99_s", "churn: s from a change until it is seen, p99"),
    ("churn_processor_s", "churn: processor s"),
    ("churn_started", "churn: processes and threads started"),
    ("churn_resident_mb", "churn: resident MB after it"),
    ("rolling_s", "rolling: s from the last change until all is programmed"),
    ("rolling_p50_s", "rolling: s from a change until it is seen, p50"),
    ("rolling_p99_s", "rolling: s from a change until it is seen, p99"),
    ("rolling_processor_s", "rolling: processor s"),
    ("rolling_started", "rolling: processes and threads started"),
    ("scrape_s", "scrape: s, median"),
    ("scrape_processor_s", "scrape: processor s for each"),
    ("scrape_bytes", "scrape: bytes"),
    ("idle_percent", "processor % when nothing changes"),
    ("idle_started", "processes and threads started in a minute when nothing changes"),
    ("restart_s", "restart: s from its start until it is in sync"),
    ("restart_processor_s", "restart: processor s until then"),
    ("restart_started", "restart: processes and threads started until then"),
)
"""For each result of ``beside``: its key, and its description in a row of the report."""


class UnusableError(Exception):
    """The program cannot be measured; the message is one sentence that says what to do."""


def find(command: str, *, directory: pathlib.Path, empty: Sequence[pathlib.Path] = EMPTY) -> str:
    """Return the command with the absolute path of its program; an empty command is returned unchanged.

    A relative path starts at ``directory``. A name without a slash is looked up in PATH.

    Raises:
        UnusableError: the command is malformed, or the program is missing, not executable, or not visible on the test kernel.
    """
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise UnusableError(f"KUBE_PROXY={command}: no command: {str(error).lower()}") from error
    if not words:
        return ""
    named = directory / words[0] if "/" in words[0] else pathlib.Path(shutil.which(words[0]) or "")
    if not named.is_absolute():
        raise UnusableError(f"KUBE_PROXY={command}: there is no {words[0]} in PATH")
    if not named.is_file():
        raise UnusableError(f"KUBE_PROXY={command}: {named} is no file")
    if not os.access(named, os.X_OK):
        raise UnusableError(f"KUBE_PROXY={command}: {named} is not executable; chmod +x helps")
    program = pathlib.Path(os.path.abspath(named))  # noqa: PTH100 - keeps the name of a link, which some programs depend on
    for path in (program, *(pathlib.Path(word) for word in words[1:] if word.startswith("/"))):
        for place in (path, path.resolve()):
            hidden = next((one for one in empty if place.is_relative_to(one)), None)
            if hidden and not place.is_relative_to(ROOT):
                advice = f"put it elsewhere, /usr/local/bin or {ROOT / 'build'} for example"
                raise UnusableError(
                    f"KUBE_PROXY={command}: {place} does not exist on the test kernel, where {hidden} is empty: {advice}"
                )
    return shlex.join([str(program), *words[1:]])


def compared(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """For each figure, yields ipvsproxy's number, kube-proxy's number, and the ratio of the two, each with a name.

    The ratio is kube-proxy's figure divided by ipvsproxy's figure.
    """
    for key, figure in FIGURES:
        yield f"ipvsproxy: {figure}", ours[key]
        yield f"kube-proxy: {figure}", theirs[key]
        if ours[key]:
            yield f"kube-proxy relative to ipvsproxy: {figure}", theirs[key] / ours[key]
