"""The command line: ``ipvsproxy [COMMAND] [flags]``. The default command is ``run``, so that kube-proxy's command lines work."""

import functools
import importlib
import importlib.metadata
import io
import os
import pathlib
import socket
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import ModuleType
from typing import assert_never

from ipvsproxy.config import commands, file, flags, load
from ipvsproxy.config.option import ConfigError, Given, Problem, Source, quoted
from ipvsproxy.config.settings import Command, Config
from ipvsproxy.daemon.loop import garbage

OK = 0
WRONG_USE = 2
"""Exit status when flags or file are wrong: nothing was programmed, and a restart does not help."""


def main(argv: Sequence[str] | None = None) -> int:
    """Execute a command line, given without the program's name; returns the exit status."""
    _open_standard_streams()
    arguments = list(sys.argv[1:] if argv is None else argv)
    command = arguments.pop(0) if arguments and arguments[0] in _COMMANDS else "run"
    return _COMMANDS[command](arguments)


def run(arguments: Sequence[str]) -> int:
    """``ipvsproxy run``: serve, or do the task that a flag selects."""
    own, arguments = commands.take_output(arguments)
    given, _ = flags.parse(arguments)
    if text := _help_or_version(given, commands.render_help()):
        sys.stdout.write(text)
        return OK
    try:
        config = _load(arguments, own.problems)
    except ConfigError as error:
        return _refuse(map(str, error.problems))
    match config.command:
        case Command.RUN:
            return _run_dry(config) if own.dry_run else _serve(config, lambda: _load(arguments, ()))
        case Command.WRITE_CONFIG:
            return _write_config(config)
        case Command.CLEANUP:
            return _clean(config, dry_run=own.dry_run, as_json=own.as_json)
        case Command.INIT_ONLY:
            return _init_only(config)
        case never:
            assert_never(never)


def cleanup(arguments: Sequence[str]) -> int:
    """``ipvsproxy cleanup``: do what ``--cleanup`` does, or report it only, as text or as JSON."""
    own, others = commands.take_output(arguments)
    given, _ = flags.parse(others)
    if text := _help_or_version(given, _CLEANUP_HELP):
        sys.stdout.write(text)
        return OK
    try:
        config = _load(["--cleanup", *others], own.problems)
    except ConfigError as error:
        return _refuse(map(str, error.problems))
    return _clean(config, dry_run=own.dry_run, as_json=own.as_json)


_CLEANUP_HELP = """\
ipvsproxy cleanup [--dry-run] [--output=text|json] [flags]

Removes everything of ipvsproxy, or of a kube-proxy in IPVS or iptables mode, from this network namespace: virtual
servers, iptables rules of both variants, ipsets, the nftables table inet ipvsproxy, local routes, kube-ipvs0; of both IP
families. Objects of other programs stay. No API server is needed.

  --dry-run
        Only report what would be removed.
  --output text|json
        Text for people, or one JSON object (default text).

Of the other flags --config, --ipvs-exclude-cidrs and --ipvs-route-protocol matter: virtual servers in those ranges stay,
and local routes are ours by that number.
Exit status: 0 clean (or a dry run), 1 something is left, 2 wrong flags.
"""


def inspect(command: commands.Command, arguments: Sequence[str]) -> int:
    """A command that only inspects this node."""
    own, others = commands.take_output(arguments)
    words, others = flags.take_words(others) if command.subject else ([], others)
    given, _ = flags.parse(others)
    if text := _help_or_version(given, command.help):
        sys.stdout.write(text)
        return OK
    problems = list(own.problems)
    if command.subject and len(words) != 1:
        problems.append(Problem(Source(command.name), _wrong_number(command, words)))
    try:
        config = _load_beside_run(others, given, problems)
        return _inspect(command, config, "".join(words), as_json=own.as_json)
    except ConfigError as error:
        return _refuse(map(str, error.problems))


def top(arguments: Sequence[str]) -> int:
    """``ipvsproxy top``: show a running ipvsproxy in the terminal."""
    own, others = commands.take_output(arguments)
    options, others, problems = commands.take_top_options(others)
    given, _ = flags.parse(others)
    if text := _help_or_version(given, commands.COMMANDS["top"].help):
        sys.stdout.write(text)
        return OK
    try:
        config = _load_beside_run(others, given, (*own.problems, *problems))
    except ConfigError as error:
        return _refuse(map(str, error.problems))
    module = importlib.import_module("ipvsproxy.commands.top")
    return int(module.run(config, options, as_json=own.as_json))


def _load_beside_run(arguments: Sequence[str], given: Mapping[str, Given], problems: Sequence[Problem]) -> Config:
    """As ``_load``; without a file or a mode, the mode is ipvs."""
    return _load(arguments if "mode" in given or "config" in given else ["--proxy-mode=ipvs", *arguments], problems)


def _wrong_number(command: commands.Command, words: Sequence[str]) -> str:
    """The problem of missing or extra words of a command that takes one."""
    if not words:
        return f"needs {command.subject}"
    return f"takes one {command.subject}, not {len(words)}: {', '.join(map(quoted, words))}"


def complete(arguments: Sequence[str]) -> int:
    """``ipvsproxy completion``: print the script with which a shell completes our command line."""
    completion = importlib.import_module("ipvsproxy.config.completion")  # no other command needs its imports
    match arguments:
        case ["--help" | "-h"]:
            sys.stdout.write(completion.HELP)
        case [shell] if shell in completion.SHELLS:
            sys.stdout.write(completion.render(shell, list(_COMMANDS)))
        case _:
            sys.stderr.write("usage: ipvsproxy completion bash|zsh|fish\n")
            return WRONG_USE
    return OK


_COMMANDS: Mapping[str, Callable[[Sequence[str]], int]] = {
    "run": run,
    "cleanup": cleanup,
    "completion": complete,
    **{command.name: functools.partial(inspect, command) for command in commands.COMMANDS.values()},
    "top": top,
}


def _help_or_version(given: Mapping[str, Given], usage_text: str) -> str:
    """The help text or the version, if a flag requests one; else empty."""
    if "help" in given and given["help"].value:
        return usage_text
    if "version" in given and given["version"].value != "false":
        return f"ipvsproxy {importlib.metadata.version('ipvsproxy')}\n"
    return ""


def _load(arguments: Sequence[str], problems: Sequence[Problem]) -> Config:
    """Raises ConfigError, also for ``problems`` that are known already."""
    try:
        config = load.load(arguments, hostname=socket.gethostname(), read_file=_read_file)
    except ConfigError as error:
        raise ConfigError((*problems, *error.problems)) from None
    if problems:
        raise ConfigError(problems)
    return config


def load_module(name: str) -> ModuleType:
    """Import a module that most command lines do not need, quickly.

    Nothing that is imported is garbage, so a collection of cycles would be in vain: a tenth of the time. structlog would import
    rich, if it is installed, to colour tracebacks that this program never prints: 0.2 s, more than anything else.
    """
    # None is the language's way to say that a module cannot be imported. What is imported later may need rich: Textual does.
    is_hidden = sys.modules.setdefault("rich", None) is None  # type: ignore[arg-type]
    try:
        with garbage.postponed():
            return importlib.import_module(name)
    finally:
        if is_hidden:
            del sys.modules["rich"]


def _clean(config: Config, *, dry_run: bool, as_json: bool) -> int:
    module = load_module("ipvsproxy.commands.cleanup")
    return int(module.run(config, dry_run=dry_run, as_json=as_json))


def _inspect(command: commands.Command, config: Config, subject: str, *, as_json: bool) -> int:
    """Raises ConfigError if the subject cannot be parsed."""
    module = load_module(f"ipvsproxy.commands.{command.name}")
    if not command.subject:
        return int(module.run(config, as_json=as_json))
    try:
        parsed = module.parse_subject(subject)
    except ValueError as error:
        raise ConfigError([Problem(Source(command.name), str(error))]) from error
    return int(module.run(config, parsed, as_json=as_json))


def _run_dry(config: Config) -> int:
    module = load_module("ipvsproxy.commands.dry_run")
    return _end(int(module.run(config)))


def _serve(config: Config, read_again: Callable[[], Config]) -> int:
    module = load_module("ipvsproxy.daemon.app")  # imported here, because --help and errors need no API client
    return _end(int(module.run(config, read_again)))


def _init_only(config: Config) -> int:
    module = load_module("ipvsproxy.daemon.process.init_only")
    return _end(int(module.run(config)))


def _open_standard_streams() -> None:
    """Redirect closed standard streams to /dev/null; else a socket would get their number, and receive the output.

    Characters that the locale has not got are written escaped, as standard error does by itself.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != number:
                os.dup2(opened, number)
                os.close(opened)
            setattr(sys, name, os.fdopen(number, "w" if number else "r", closefd=False))
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def _end(status: int) -> int:
    """End now: a thread that hangs in the kernel or in a program must not delay the end of the process.

    A closed pipe behind the last output is no error, although the interpreter would report one at its end.
    """
    is_read = True
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            is_read = False
    if threading.active_count() > 1 or not is_read:
        os._exit(status)
    return status


def _read_file(path: str) -> bytes:
    return pathlib.Path(path).read_bytes()


def _write_config(config: Config) -> int:
    path = config.write_config_to
    for notice in config.notices:
        sys.stderr.write(f"ipvsproxy: {notice}\n")
    try:
        pathlib.Path(path).write_text(file.render(config), encoding="utf-8")
    except OSError as error:
        return _refuse([f"--write-config-to: {path!r} cannot be written: {error.strerror}"])
    sys.stderr.write(f"Wrote configuration to {path}\n")  # standard output may be that file
    return OK


def _refuse(sentences: Iterable[str]) -> int:
    for sentence in sentences:
        sys.stderr.write(f"ipvsproxy: {sentence}\n")
    sys.stderr.write("ipvsproxy: nothing was changed; ipvsproxy --help lists every flag and field\n")
    return WRONG_USE
