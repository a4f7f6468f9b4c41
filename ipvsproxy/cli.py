"""The command line: ``ipvsproxy [COMMAND] [flags]``. Without a command it runs, so that kube-proxy's command lines fit."""

import importlib
import importlib.metadata
import pathlib
import socket
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import assert_never

from ipvsproxy.config import flags, load, usage, write
from ipvsproxy.config.given import ConfigError
from ipvsproxy.config.settings import Command, Config

OK = 0
WRONG_USE = 2
"""Exit status when flags or file are wrong: nothing was programmed, and a restart will not help."""


def main(argv: Sequence[str] | None = None) -> int:
    """Do what the command line asks (without the program's name); returns the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    command = arguments.pop(0) if arguments and arguments[0] in _COMMANDS else "run"
    return _COMMANDS[command](arguments)


def run(arguments: Sequence[str]) -> int:
    """``ipvsproxy run``: serve, or what a flag asks for instead."""
    given, _ = flags.parse(arguments)
    if "help" in given and given["help"].value:
        sys.stdout.write(usage.render())
        return OK
    if "version" in given and given["version"].value != "false":
        sys.stdout.write(f"ipvsproxy {importlib.metadata.version('ipvsproxy')}\n")
        return OK
    try:
        config = load.load(arguments, hostname=socket.gethostname(), read_file=_read_file)
    except ConfigError as error:
        return _refuse(map(str, error.problems))
    match config.command:
        case Command.RUN:
            return _serve(config)
        case Command.WRITE_CONFIG:
            return _write_config(config)
        case Command.CLEANUP | Command.INIT_ONLY as command:
            return _refuse([f"--{command.value}: not available in this version of ipvsproxy"])
        case never:
            assert_never(never)


_COMMANDS: Mapping[str, Callable[[Sequence[str]], int]] = {"run": run}


def _serve(config: Config) -> int:
    app = importlib.import_module("ipvsproxy.daemon.app")  # as late as this: --help and errors need no API client
    return int(app.run(config))


def _read_file(path: str) -> bytes:
    return pathlib.Path(path).read_bytes()


def _write_config(config: Config) -> int:
    path = config.write_config_to
    for notice in config.notices:
        sys.stderr.write(f"ipvsproxy: {notice}\n")
    try:
        pathlib.Path(path).write_text(write.render(config), encoding="utf-8")
    except OSError as error:
        return _refuse([f"--write-config-to: {path!r} cannot be written: {error.strerror}"])
    sys.stdout.write(f"Wrote configuration to {path}\n")
    return OK


def _refuse(sentences: Iterable[str]) -> int:
    for sentence in sentences:
        sys.stderr.write(f"ipvsproxy: {sentence}\n")
    sys.stderr.write("ipvsproxy: nothing was changed; ipvsproxy --help lists every flag and field\n")
    return WRONG_USE
