"""The command line, read as Go's pflag reads it, so that every kube-proxy command line means the same here.

``--name=value``, ``--name value``, ``--switch``, ``--switch=false``, ``-v=4``, ``-v 4``, ``-v4``; dashes and underscores in a
name are one; of a repeated flag the last value counts, of a repeated list all; what follows ``--`` is no flag. argparse differs
in each of the finer points (a switch would eat the next word, a value may not begin with a dash, the first error ends it), hence
our own loop.
"""

import difflib
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from ipvsproxy.config import catalogue, syntax
from ipvsproxy.config.given import Given, Problem, Source, Value, quoted
from ipvsproxy.config.option import Kind, Option

_SHORTHANDS: Mapping[str, str] = {"v": "v", "h": "help"}
END = "--"
"""What follows it is no flag, whatever it begins with."""
_APPENDED = frozenset((Kind.LIST, Kind.GATES, Kind.PATTERNS))


class Piece(NamedTuple):
    """A flag with its value, a word, or the two dashes that end the flags; ``raw`` is how it was written.

    A word has no ``name``. A flag's is normalised; its ``value`` is None where it was given none.
    """

    raw: tuple[str, ...]
    name: str | None
    value: str | None


def pieces(arguments: Sequence[str], valued: Collection[str] = ()) -> Iterator[Piece]:
    """Take a command line apart. Flags of these names take a value, too, beside those of the catalogue."""
    rest = list(reversed(arguments))
    while rest:
        argument = rest.pop()
        if argument == END:
            yield Piece((END,), END, None)
            yield from (Piece((word,), None, None) for word in reversed(rest))
            return
        if not argument.startswith("-") or argument == "-":
            yield Piece((argument,), None, None)
            continue
        name, value = _split(argument)
        option = catalogue.BY_FLAG.get(name)
        takes_value = name in valued or (option is not None and not option.alone)
        if value is None and takes_value and rest:
            value = rest.pop()
            yield Piece((argument, value), name, value)
        else:
            yield Piece((argument,), name, value)


def take_words(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """The words among the flags of a command line, wherever they stand, and the flags.

    A word that looks like a switch's value stays with the flags, so that ``parse`` says how to write it.
    """
    words: list[str] = []
    others: list[str] = []
    switch: Option | None = None
    for raw, name, _ in pieces(arguments):
        if name == END:
            switch = None
        elif name is not None:
            switch = catalogue.BY_FLAG.get(name)
            others += raw
        elif _is_value_of(switch, raw[0]):
            others += raw
        else:
            words += raw
    return words, others


def parse(arguments: Sequence[str]) -> tuple[Mapping[str, Given], tuple[Problem, ...]]:
    """Read all flags. What was given comes by ``Option.key``, beside all that is wrong."""
    given: dict[str, Given] = {}
    problems: list[Problem] = []
    previous: Option | None = None
    for raw, name, value in pieces(arguments):
        if name == END:
            previous = None
            continue
        if name is None:
            problems.append(_word_problem(raw[0], previous))
            continue
        source = Source(f"--{name}")
        option = previous = catalogue.BY_FLAG.get(name)
        if option is None:
            problems.append(_unknown_problem(raw[0], name))
            continue
        if value is None and not option.alone:
            problems.append(Problem(source, f"needs a value, such as --{name}={_example(option)}", option.key))
            continue
        text = option.alone if value is None else value
        if not text and option.empty_is_unset:
            continue
        try:
            new = syntax.parse(option.kind, text)
        except ValueError as error:
            problems.append(Problem(source, f"{quoted(text)} must be {error}", option.key))
            continue
        before = given.get(option.key)
        given[option.key] = Given(_appended(option.kind, before.value, new) if before else new, source)
    return given, tuple(problems)


def _split(argument: str) -> tuple[str, str | None]:
    """The flag's normalised name, and its value if the argument holds one."""
    if not argument.startswith("--") and argument[1] in _SHORTHANDS:
        value = argument[2:].removeprefix("=")
        if argument[1] == "v":
            return "v", value if argument[2:] else None
        if not argument[2:]:
            return _SHORTHANDS[argument[1]], None
    name, equals, value = argument.lstrip("-").partition("=")
    name = name.replace("_", "-")
    if not argument.startswith("--"):
        name = f"-{name}"  # one dash is for the shorthands only; no option's name begins with a dash
    return name, value if equals else None


def _appended(kind: Kind, before: Value, new: Value) -> Value:
    if kind not in _APPENDED:
        return new
    if isinstance(before, tuple) and isinstance(new, tuple):
        return before + new
    if isinstance(before, Mapping) and isinstance(new, Mapping):
        return {**before, **new}
    raise TypeError(kind)


def _example(option: Option) -> str:
    return option.choices[0] if option.choices else option.default or option.placeholder or option.kind.value


def _is_value_of(switch: Option | None, word: str) -> bool:
    """Whether a word was meant as the value of the switch before it."""
    return switch is not None and bool(switch.alone) and word.lower() in ("true", "false")


def _word_problem(word: str, previous: Option | None) -> Problem:
    if previous is not None and _is_value_of(previous, word):
        return Problem(Source(f"--{previous.flag}"), f"takes its value after an equals sign: --{previous.flag}={word}")
    return Problem(Source(quoted(word)), "is neither a flag nor a command")


def _unknown_problem(argument: str, name: str) -> Problem:
    written = argument.partition("=")[0]
    plain = name.lstrip("-")
    if plain in catalogue.BY_FLAG:
        return Problem(Source(quoted(written)), f"unknown flag; write --{plain}")
    close = difflib.get_close_matches(plain[:60], catalogue.BY_FLAG, n=1)
    hint = f"; did you mean --{close[0]}?" if close else ""
    return Problem(Source(quoted(written)), f"unknown flag{hint}")
