"""The command line: ``ipvsproxy [COMMAND] [flags]``. The default command is ``run``, so that kube-proxy's command lines work."""

import gc
import importlib
import importlib.metadata
import io
import os
import pathlib
import socket
import sys
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from types import ModuleType

from ipvsproxy.config import catalogue, commands, file, load
from ipvsproxy.config.option import ConfigError, Given, Problem, ValuePlace, quoted, suggestion
from ipvsproxy.config.settings import Config
from ipvsproxy.daemon.base.cannot_start import complain
from ipvsproxy.kernel import instance

_OF_COMMANDS = frozenset(option.key for option in catalogue.OF_COMMANDS)
OK = 0
WRONG_USE = 2
"""The exit status if the flags or the file are wrong. Nothing was programmed, and a restart does not help."""


def main(argv: Sequence[str] | None = None) -> int:
    """Execute the command in the given arguments, which do not include the program's name; returns the exit status."""
    _open_standard_streams()
    arguments = list(sys.argv[1:] if argv is None else argv)
    name = arguments.pop(0) if arguments and not arguments[0].startswith("-") else "run"
    if name not in (known := (*commands.COMMANDS, "completion")):
        return _refuse(Problem(ValuePlace(quoted(name)), f"is not a command{suggestion(name, known)}"))
    return complete(arguments) if name == "completion" else execute(commands.COMMANDS[name], arguments)


def execute(command: commands.Command, arguments: Sequence[str]) -> int:
    """Execute a command with the given arguments; returns the exit status."""
    parsed = load.parse(arguments, command.name, takes_words=bool(command.subject))
    given = parsed.given
    if text := _help_or_version(given, command):
        sys.stdout.write(text)
        return OK
    is_implied = command.implied == "--cleanup" or (command.implied and not {"mode", "config"} & given.keys())
    options = [command.implied, *arguments] if is_implied else arguments

    def read(options: Sequence[str] = options) -> Config:
        return load.load(
            options,
            hostname=socket.gethostname(),
            read_file=lambda path: pathlib.Path(path).read_bytes(),
            command=command.name,
            subject=command.subject,
        )

    try:
        config = _as_running(command, read, given, arguments) or read()
        if command.name == "run":
            return _run(config, read)
        module = load_module(f"ipvsproxy.commands.{command.name}")
        return int(module.run(config, *_subject(command, module, parsed.words)))
    except ConfigError as error:
        return _refuse(*error.problems)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # prevents Python from reporting the closed pipe when the process exits
        return OK


def _as_running(
    command: commands.Command, read: Callable[[Sequence[str]], Config], given: Collection[str], arguments: Sequence[str]
) -> Config | None:
    """The configuration of the running ipvsproxy process.

    The result is None if the command does not inspect the node, or if a flag of ``run`` is given.
    """
    if command.name == "fleet":  # ``fleet`` uses the caller's credentials, not the credentials of this node
        return None
    has_flags = not _OF_COMMANDS.issuperset(given)
    if command.implied != "--proxy-mode=ipvs" or has_flags or not (running := instance.running()):
        return None
    which = f"process {running.process}" if running.process else "in another container"
    if running.arguments is None:
        if command.name != "top":  # ``top`` reads no files of the running ipvsproxy
            complain(f"ipvsproxy runs in a container ({which}): give its flags and files, or run this command there")
        return None
    try:
        os.chdir(f"/proc/{running.process}/cwd")  # the flags of the running ipvsproxy may name files relative to this directory
        first = 1 if running.arguments[:1] == ["run"] else 0
        config = read([*running.arguments[first:], *arguments])
    except (ConfigError, OSError):
        complain(f"the flags of the ipvsproxy that runs here ({which}) cannot be used: give them to this command")
        return None
    complain(f"with the flags of the ipvsproxy that runs here ({which})")
    return config


def _subject(command: commands.Command, module: ModuleType, words: Sequence[str]) -> Sequence[object]:
    """The parsed arguments of the command; raises ConfigError if an argument cannot be parsed."""
    try:
        return [module.parse_subject(word) for word in words]
    except ValueError as error:
        raise ConfigError([Problem(ValuePlace(command.name), str(error))]) from error


def _run(config: Config, read_again: Callable[[], Config]) -> int:
    """Run the proxy, or do the task that a flag selects. Modules that only one task needs are imported only for this task."""
    if config.write_config_to:
        return _write_config(config)
    if config.cleanup:
        return int(load_module("ipvsproxy.commands.cleanup").run(config))
    if config.init_only:
        return _end(load_module("ipvsproxy.daemon.process.requirements").init_only(config))
    if config.dry_run:
        return _end(load_module("ipvsproxy.commands.dry_run").run(config))
    return _end(load_module("ipvsproxy.daemon.app").run(config, read_again))


def complete(arguments: Sequence[str]) -> int:
    """``ipvsproxy completion``: prints the script that lets a shell complete ipvsproxy's command line."""
    is_help = arguments[:1] in (["--help"], ["-h"])
    if not is_help and (len(arguments) != 1 or arguments[0] not in commands.SHELLS):
        sys.stderr.write(commands.COMPLETION_HELP)
        return WRONG_USE
    sys.stdout.write(commands.COMPLETION_HELP if is_help else commands.render_completion(arguments[0]))
    return OK


def _help_or_version(given: Mapping[str, Given], command: commands.Command) -> str:
    """The help text or the version, if a flag requests one of them; otherwise an empty string."""
    if "help" in given and given["help"].value:
        return command.help or commands.render_help()
    if "version" in given and given["version"].value != "false":
        return f"ipvsproxy {importlib.metadata.version('ipvsproxy')}\n"
    return ""


def load_module(name: str) -> ModuleType:
    """Import a module that most command lines do not need; this function is faster than a plain import.

    The garbage collector is off during the import, because collections would find no garbage, but would take a tenth of the
    import's time. The module rich is hidden during the import, because structlog would import rich to colour tracebacks, which
    ipvsproxy never prints. The import of rich takes 0.2 s, more than any other import.
    """
    # In ``sys.modules``, None means that a module cannot be imported. A module that is imported later, such as Textual, may need
    # rich.
    is_hidden = sys.modules.setdefault("rich", None) is None  # type: ignore[arg-type]
    gc.disable()
    try:
        return importlib.import_module(name)
    finally:
        gc.enable()
        if is_hidden:
            del sys.modules["rich"]


def _open_standard_streams() -> None:
    """Redirect closed standard streams to /dev/null.

    Otherwise, a new socket could get the file descriptor of a stream, and receive the output of the process. Characters
    that the locale's encoding lacks are written as escape sequences.
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
    """End the process at once, even if a thread hangs in a kernel call or waits for another program.

    If the reader of a pipe has closed the pipe early, this function prevents the BrokenPipeError that Python would report when
    the process exits.
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


def _write_config(config: Config) -> int:
    path = config.write_config_to
    complain(*config.notices)
    try:
        pathlib.Path(path).write_text(file.render(config), encoding="utf-8")
    except OSError as error:
        return _refuse(f"--write-config-to: {path!r} cannot be written: {error.strerror}")
    sys.stderr.write(f"Wrote configuration to {path}\n")  # not stdout, because the path may be /dev/stdout
    return OK


def _refuse(*reasons: object) -> int:
    complain(*reasons, "nothing was changed; ipvsproxy --help lists every flag and field")
    return WRONG_USE
