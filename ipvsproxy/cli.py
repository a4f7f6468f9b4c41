"""The command line: ``ipvsproxy [COMMAND] [flags]``. The default command is ``run``, so that kube-proxy's command lines work."""

import importlib
import importlib.metadata
import io
import os
import pathlib
import socket
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import assert_never

from ipvsproxy.config import commands, file, load
from ipvsproxy.config.option import ConfigError, Given, Problem, Source, quoted
from ipvsproxy.config.settings import Command, Config
from ipvsproxy.daemon.base.errors import complain
from ipvsproxy.daemon.loop import garbage

OK = 0
WRONG_USE = 2
"""Exit status when flags or file are wrong: nothing was programmed, and a restart does not help."""


def main(argv: Sequence[str] | None = None) -> int:
    """Execute a command line, given without the program's name; returns the exit status."""
    _open_standard_streams()
    arguments = list(sys.argv[1:] if argv is None else argv)
    is_named = bool(arguments) and (arguments[0] == "completion" or arguments[0] in commands.COMMANDS)
    name = arguments.pop(0) if is_named else "run"
    return complete(arguments) if name == "completion" else execute(commands.COMMANDS[name], arguments)


def execute(command: commands.Command, arguments: Sequence[str]) -> int:
    """Execute a command with these arguments; returns the exit status."""
    words, options = load.take_words(arguments) if command.subject else ([], list(arguments))
    given, _ = load.parse(options, command.name)
    if text := _help_or_version(given, command):
        sys.stdout.write(text)
        return OK
    if command.implied == "--cleanup" or (command.implied and not {"mode", "config"} & given.keys()):
        options.insert(0, command.implied)
    try:
        config = _load(command, options, words)
        if command.name == "run":
            return _run(config, lambda: _load(command, options, words))
        return _clean(config) if command.name == "cleanup" else _inspect(command, config, "".join(words))
    except ConfigError as error:
        return _refuse(*error.problems)


def _run(config: Config, read_again: Callable[[], Config]) -> int:
    """Serve, or do the task that a flag selects."""
    match config.command:
        case Command.RUN:
            return _run_dry(config) if config.dry_run else _serve(config, read_again)
        case Command.WRITE_CONFIG:
            return _write_config(config)
        case Command.CLEANUP:
            return _clean(config)
        case Command.INIT_ONLY:
            return _init_only(config)
        case never:
            assert_never(never)


def complete(arguments: Sequence[str]) -> int:
    """``ipvsproxy completion``: print the script with which a shell completes our command line."""
    match arguments:
        case ["--help" | "-h"]:
            sys.stdout.write(commands.COMPLETION_HELP)
        case [shell] if shell in commands.SHELLS:
            sys.stdout.write(commands.render_completion(shell))
        case _:
            sys.stderr.write("usage: ipvsproxy completion bash|zsh|fish\n")
            return WRONG_USE
    return OK


def _help_or_version(given: Mapping[str, Given], command: commands.Command) -> str:
    """The help text or the version, if a flag requests one; else empty."""
    if "help" in given and given["help"].value:
        return command.help or commands.render_help()
    if "version" in given and given["version"].value != "false":
        return f"ipvsproxy {importlib.metadata.version('ipvsproxy')}\n"
    return ""


def _load(command: commands.Command, arguments: Sequence[str], words: Sequence[str]) -> Config:
    """Raises ConfigError, also for missing or extra words of a command that takes one."""
    problems: list[Problem] = []
    if command.subject and len(words) != 1:
        text = f"takes one {command.subject}, not {len(words)}: {', '.join(map(quoted, words))}"
        problems.append(Problem(Source(command.name), text if words else f"needs {command.subject}"))
    try:
        config = load.load(arguments, hostname=socket.gethostname(), read_file=_read_file, command=command.name)
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


def _clean(config: Config) -> int:
    return int(load_module("ipvsproxy.commands.cleanup").run(config))


def _inspect(command: commands.Command, config: Config, subject: str) -> int:
    """Raises ConfigError if the subject cannot be parsed."""
    module = load_module(f"ipvsproxy.commands.{command.name}")
    if not command.subject:
        return int(module.run(config))
    try:
        parsed = module.parse_subject(subject)
    except ValueError as error:
        raise ConfigError([Problem(Source(command.name), str(error))]) from error
    return int(module.run(config, parsed))


def _run_dry(config: Config) -> int:
    return _end(int(load_module("ipvsproxy.commands.dry_run").run(config)))


def _serve(config: Config, read_again: Callable[[], Config]) -> int:
    module = load_module("ipvsproxy.daemon.app")  # imported here, because --help and errors need no API client
    return _end(int(module.run(config, read_again)))


def _init_only(config: Config) -> int:
    return _end(int(load_module("ipvsproxy.daemon.process.requirements").init_only(config)))


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
    complain(*config.notices)
    try:
        pathlib.Path(path).write_text(file.render(config), encoding="utf-8")
    except OSError as error:
        return _refuse(f"--write-config-to: {path!r} cannot be written: {error.strerror}")
    sys.stderr.write(f"Wrote configuration to {path}\n")  # standard output may be that file
    return OK


def _refuse(*reasons: object) -> int:
    complain(*reasons, "nothing was changed; ipvsproxy --help lists every flag and field")
    return WRONG_USE
