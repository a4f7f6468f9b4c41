"""The options of commands that only tell, or can: ``--dry-run`` and ``--output``. They are no settings, so no file has them."""

from collections.abc import Sequence
from typing import NamedTuple

from ipvsproxy.config import flags, syntax
from ipvsproxy.config.given import Problem, Source, quoted
from ipvsproxy.config.option import Kind

FORMATS = ("text", "json")
_FORM = ("output", "-o")
"""The names of the flag that takes one of them."""


class Output(NamedTuple):
    """Whether only to tell, in which form, and what is wrong with what was asked for."""

    dry_run: bool = False
    as_json: bool = False
    problems: tuple[Problem, ...] = ()


def take(arguments: Sequence[str]) -> tuple[Output, list[str]]:
    """Pick these options out of a command line; returns the rest of it, too. ``-o`` is short for ``--output``."""
    dry_run, form = False, FORMATS[0]
    problems: list[Problem] = []
    others: list[str] = []
    for raw, name, value in flags.pieces(arguments, valued=_FORM):
        if name == "dry-run":
            text = "true" if value is None else value
            try:
                dry_run = bool(syntax.parse(Kind.BOOLEAN, text))
            except ValueError as error:
                problems.append(Problem(Source("--dry-run"), f"{quoted(text)} must be {error}", "dry-run"))
        elif name in _FORM:
            form = value or ""
            if form not in FORMATS:
                problems.append(Problem(Source("--output"), f"{quoted(form)} must be one of {', '.join(FORMATS)}", "output"))
        else:
            others += raw
    return Output(dry_run, form == "json", tuple(problems)), others
