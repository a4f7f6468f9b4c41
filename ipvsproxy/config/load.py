"""From flags and file to one ``Config``. Pure: the caller passes the host's name and a function that reads files."""

from collections.abc import Callable, Mapping, Sequence

from ipvsproxy.config import catalogue, file, flags, validate
from ipvsproxy.config.option import ConfigError, Given, Kind, Notice, Problem, quoted
from ipvsproxy.config.settings import Config


def load(arguments: Sequence[str], *, hostname: str, read_file: Callable[[str], bytes], command: str = "run") -> Config:
    """The configuration of a command line, which is given without program and command.

    As in kube-proxy, a file replaces all flags but ``--hostname-override``, the logging flags and those that select a task.
    The file's defaults then apply; they differ from those of flags in ``ipvs.minSyncPeriod``, 0 instead of 1s.
    ``read_file`` may raise OSError.

    Raises:
        ConfigError: the configuration has problems; the error holds all of them.
    """
    given, problems = flags.parse(arguments, command)
    notices: tuple[Notice, ...] = ()
    readable = True
    path = str(given["config"].value) if "config" in given else ""
    if path:
        content = _read(path, given["config"], read_file)
        problems += content.problems
        readable = all(problem.key for problem in content.problems)
        notices = (*content.notices, *_ignored(given))
        given = _merged(given, content.given)
    broken = {problem.key for problem in problems if problem.key}
    config, broken_rules = validate.resolve(given, broken, hostname=hostname, config_file=path)
    if problems or broken_rules:
        raise ConfigError((*problems, *(broken_rules if readable else ())))
    return config.with_notices(notices)


def _read(path: str, flag: Given, read_file: Callable[[str], bytes]) -> file.Content:
    try:
        return file.read(read_file(path), path)
    except OSError as error:
        return file.Content({}, (Problem(flag.source, f"{quoted(path)} cannot be read: {error.strerror or error}"),))


def _ignored(given: Mapping[str, Given]) -> list[Notice]:
    return [
        Notice(value.source, "not used, because --config is given")
        for key, value in given.items()
        if key != "config" and not catalogue.BY_KEY[key].overrides_file
    ]


def _merged(given: Mapping[str, Given], from_file: Mapping[str, Given]) -> Mapping[str, Given]:
    merged = dict(from_file)
    for key, flag in given.items():
        if not catalogue.BY_KEY[key].overrides_file:
            continue
        below = from_file.get(key)
        if (
            catalogue.BY_KEY[key].kind is Kind.PATTERNS
            and below
            and isinstance(flag.value, tuple)
            and isinstance(below.value, tuple)
        ):
            flag = flag._replace(value=flag.value + below.value)  # noqa: PLW2901 - both count, the flag's patterns first
        merged[key] = flag
    return merged
