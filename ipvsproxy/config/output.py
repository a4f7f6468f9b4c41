"""The options of commands that only tell, or can: ``--dry-run`` and ``--output``. They are no settings, so no file has them."""

from collections.abc import Sequence
from typing import NamedTuple

from ipvsproxy.config import syntax
from ipvsproxy.config.given import Problem, Source, quoted
from ipvsproxy.config.option import Kind

FORMATS = ("text", "json")


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
    rest = list(reversed(arguments))
    while rest:
        argument = rest.pop()
        name, equals, text = argument.partition("=")
        if name == "--dry-run":
            try:
                dry_run = bool(syntax.parse(Kind.BOOLEAN, text if equals else "true"))
            except ValueError as error:
                problems.append(Problem(Source(name), f"{quoted(text)} must be {error}", "dry-run"))
        elif name in ("--output", "-o"):
            form = text if equals or not rest else rest.pop()
            if form not in FORMATS:
                problems.append(Problem(Source("--output"), f"{quoted(form)} must be one of {', '.join(FORMATS)}", "output"))
        else:
            others.append(argument)
    return Output(dry_run, form == "json", tuple(problems)), others
