"""The options ``--dry-run`` and ``--output`` of the commands that report. They are no settings, so no file has them."""

from collections.abc import Sequence
from typing import NamedTuple

from ipvsproxy.config import flags, syntax
from ipvsproxy.config.given import Problem, Source, quoted
from ipvsproxy.config.option import Kind

FORMATS = ("text", "json")
_FORMAT_FLAGS = ("output", "-o")
"""The names of the flag that takes one of ``FORMATS``."""


class Output(NamedTuple):
    """Whether to report only, whether as JSON, and problems of these options."""

    dry_run: bool = False
    as_json: bool = False
    problems: tuple[Problem, ...] = ()


def take(arguments: Sequence[str]) -> tuple[Output, list[str]]:
    """Split these options from the rest of a command line. ``-o`` is short for ``--output``."""
    dry_run, chosen = False, FORMATS[0]
    problems: list[Problem] = []
    others: list[str] = []
    for raw, name, value in flags.pieces(arguments, valued=_FORMAT_FLAGS):
        if name == "dry-run":
            text = "true" if value is None else value
            try:
                dry_run = bool(syntax.parse(Kind.BOOLEAN, text))
            except ValueError as error:
                problems.append(Problem(Source("--dry-run"), f"{quoted(text)} must be {error}", "dry-run"))
        elif name in _FORMAT_FLAGS:
            chosen = value or ""
            if chosen not in FORMATS:
                problems.append(Problem(Source("--output"), f"{quoted(chosen)} must be one of {', '.join(FORMATS)}", "output"))
        else:
            others += raw
    return Output(dry_run, chosen == "json", tuple(problems)), others
