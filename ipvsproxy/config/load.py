"""Makes one ``Config`` from a command line and from the configuration file that the command line names.

The functions have no side effects: the caller passes the host's name and a function that reads files. Flags are parsed by the
rules of Go's pflag, so that every kube-proxy command line has the same meaning in ipvsproxy.

The accepted forms are ``--name=value``, ``--name value``, ``--switch``, ``--switch=false``, ``-v=4``, ``-v 4`` and ``-v4``.
Dashes and underscores in a flag's name are equivalent. If a flag is repeated, its last value counts; the values of a repeated
list flag are joined. Arguments after ``--`` are not flags. Python's argparse cannot be used, because its rules differ.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from ipvsproxy.config import catalogue, file, validate
from ipvsproxy.config.option import ConfigError, Given, Kind, Option, Problem, ValuePlace, quoted, suggestion
from ipvsproxy.config.settings import Config
from ipvsproxy.config.validate import Values

_SHORTHANDS: Mapping[str, str] = {"v": "v", "h": "help", "o": "output", "n": "namespace"}


def parse(arguments: Sequence[str], command: str = "run", *, takes_words: bool = False) -> Values:
    """Parse all flags of a command. If the command takes no words, any word that is not a flag is a problem."""
    known = {name: option for name, option in catalogue.BY_FLAG.items() if option.is_of(command)}
    values = Values()
    given, problems = values.given, values.problems
    switch: Option | None = None
    rest = list(reversed(arguments))
    is_over = False
    while rest:
        argument = rest.pop()
        if argument == "--" and not is_over:
            switch, is_over = None, True
            continue
        if is_over or not argument.startswith("-") or argument == "-":
            if switch and argument.lower() in ("true", "false"):
                flag = f"--{switch.flag}"
                problems.append(Problem(ValuePlace(flag), f"takes its value after an equals sign: {flag}={argument}"))
            elif takes_words:
                values.words.append(argument)
            else:
                problems.append(Problem(ValuePlace(quoted(argument)), "is neither a flag nor a command"))
            continue
        name, value = _split(argument)
        option = catalogue.BY_FLAG.get(name)
        if option and value is None and not option.implied_value and rest:
            value = rest.pop()
        if option is None or name not in known:
            switch = None
            problems.append(_unknown_problem(argument, name, known))
            continue
        switch = option if option.implied_value else None
        source = ValuePlace(f"--{name}")
        if value is None and not option.implied_value:
            example = next(iter(option.choices), "") or option.default or option.shown
            problems.append(Problem(source, f"needs a value, such as --{name}={example}", option.key))
            continue
        text = option.implied_value if value is None else value
        if not text and option.empty_is_unset and option.kind is Kind.TEXT:
            continue
        try:
            new = option.parse(text)
        except ValueError as error:
            problems.append(Problem(source, f"{quoted(text)} must be {error}", option.key))
            continue
        before = given.get(option.key)
        given[option.key] = Given(_appended(option.kind, before.value, new) if before else new, source)
    return values


def _split(argument: str) -> tuple[str, str | None]:
    """The normalised name of the flag, and its value if the argument contains a value."""
    if not argument.startswith("--") and argument[1] in _SHORTHANDS:
        value = argument[2:].removeprefix("=")
        if argument[1] != "h" or not argument[2:]:
            return _SHORTHANDS[argument[1]], value if argument[2:] else None
    name, equals, value = argument.lstrip("-").partition("=")
    name = name.replace("_", "-")
    if not argument.startswith("--"):
        name = f"-{name}"  # only shorthands have a single dash, and no option's name begins with a dash
    return name, value if equals else None


def _appended(kind: Kind, before: Any, new: Any) -> Any:
    """The value of a repeated flag: lists and mappings are joined; otherwise the last value counts."""
    if kind is Kind.GATES:
        return before | new
    return before + new if kind in (Kind.LIST, Kind.PATTERNS) else new


def _unknown_problem(argument: str, name: str, known: Collection[str]) -> Problem:
    plain = name.lstrip("-")
    hint = f"; write --{plain}" if plain in known else suggestion(plain, known, "--")
    return Problem(ValuePlace(quoted(argument.partition("=")[0])), f"unknown flag{hint}")


def load(
    arguments: Sequence[str], *, hostname: str, read_file: Callable[[str], bytes], command: str = "run", subject: str = ""
) -> Config:
    """The configuration that results from a command line; ``arguments`` does not include the program and the command.

    A configuration file replaces all flags, as in kube-proxy, except ``--hostname-override``, the logging flags and the flags
    that select a task. The flags that kube-proxy does not have are exceptions too: they override the file, because kube-proxy may
    use the same file. With a configuration file, the defaults for files apply. Only ``ipvs.minSyncPeriod`` has different
    defaults: 0 in a file, and 1s for the flag. ``read_file`` may raise OSError. ``subject`` names the single argument that the
    command takes besides its flags, and is empty if the command takes no argument.

    Raises:
        ConfigError: the configuration has problems; the error contains all problems.
    """
    values = parse(arguments, command, takes_words=bool(subject))
    words = values.words
    if subject and len(words) != 1:
        text = f"takes one {subject}, not {len(words)}: {', '.join(map(quoted, words))}" if words else f"needs {subject}"
        values.problems.insert(0, Problem(ValuePlace(command), text))
    if "config" in values.given and (path := str(values.given["config"].value)):
        try:
            content = file.read(read_file(path), path)
        except OSError as error:
            text = f"{quoted(path)} cannot be read: {error.strerror or error}"
            content = Values(path, problems=[Problem(values.given["config"].source, text)])
        content.problems[:0] = values.problems
        if not all(problem.key for problem in content.problems[len(values.problems) :]):
            raise ConfigError(content.problems)
        flags = {key: flag for key, flag in values.given.items() if catalogue.BY_KEY[key].overrides_file}
        ignored = (flag.source for key, flag in values.given.items() if key not in flags and key != "config")
        content.notices += [f"{source}: not used, because --config is given" for source in ignored]
        for key in [key for key in flags.keys() & content.given if catalogue.BY_KEY[key].kind is Kind.PATTERNS]:
            flags[key] = Given(_appended(Kind.PATTERNS, flags[key].value, content.given[key].value), flags[key].source)
        content.given |= flags
        values = content
    return validate.resolve(values, hostname)
