"""The command line, read as Go's pflag reads it, so that every kube-proxy command line means the same here.

``--name=value``, ``--name value``, ``--switch``, ``--switch=false``, ``-v=4``, ``-v 4``, ``-v4``; dashes and underscores in a
name are one; of a repeated flag the last value counts, of a repeated list all. argparse differs in each of the finer points
(a switch would eat the next word, a value may not begin with a dash, the first error ends it), hence our own loop.
"""

import difflib
from collections.abc import Mapping, Sequence

from ipvsproxy.config import catalogue, syntax
from ipvsproxy.config.given import Given, Problem, Source, Value, quoted
from ipvsproxy.config.option import Kind, Option

_SHORTHANDS: Mapping[str, str] = {"v": "v", "h": "help"}
_APPENDED = frozenset((Kind.LIST, Kind.GATES, Kind.PATTERNS))


def parse(arguments: Sequence[str]) -> tuple[Mapping[str, Given], tuple[Problem, ...]]:
    """Read all flags. What was given comes by ``Option.key``, beside all that is wrong."""
    given: dict[str, Given] = {}
    problems: list[Problem] = []
    rest = list(reversed(arguments))
    previous: Option | None = None
    while rest:
        argument = rest.pop()
        if argument == "--":
            problems.extend(_word_problem(word, None) for word in reversed(rest))
            break
        if not argument.startswith("-") or argument == "-":
            problems.append(_word_problem(argument, previous))
            continue
        name, value = _split(argument)
        source = Source(f"--{name}")
        option = previous = catalogue.BY_FLAG.get(name)
        if option is None:
            problems.append(_unknown_problem(argument, name))
            continue
        if value is None and not option.alone and not rest:
            problems.append(Problem(source, f"needs a value, such as --{name}={_example(option)}", option.key))
            continue
        text = value if value is not None else option.alone or rest.pop()
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


def _word_problem(word: str, previous: Option | None) -> Problem:
    if previous is not None and previous.alone and word.lower() in ("true", "false"):
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
