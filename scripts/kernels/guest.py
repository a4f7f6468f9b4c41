"""A guest: a program that is, or runs, a separate Linux kernel, with the host's files as its root file system."""

import contextlib
import dataclasses
import os
import pathlib
import re
import subprocess
import sys
from collections.abc import Callable
from typing import IO, Protocol

from scripts.kernels import control, processes
from scripts.kernels.errors import NoKernelError

MOUNTS = [
    "sysfs /sys sysfs defaults 0 0",
    "devpts /dev/pts devpts X-mount.mkdir,gid=5,mode=620,ptmxmode=666 0 0",
    "tmpfs /dev/shm tmpfs X-mount.mkdir,mode=1777 0 0",
]
UNITS = {"K": 2**10, "M": 2**20, "G": 2**30}
STARTS = 3
TIME_IN_LOG = re.compile(r"^\[ *\d+\.\d+\] ")


@dataclasses.dataclass(frozen=True)
class Size:
    """Memory in bytes, and the number of processors."""

    memory: int
    processors: int


@dataclasses.dataclass(frozen=True)
class Started:
    """A running guest: its process, and a function that copies the command's output.

    The function returns when the command ends, or raises TimeoutError.
    """

    process: subprocess.Popen[bytes]
    pass_on: Callable[[float | None], None]


@dataclasses.dataclass(frozen=True)
class Ended:
    """How a guest ended.

    The fields are the command's exit status (None if the guest crashed), the last lines of the guest's log, and whether only the
    guest's program crashed.
    """

    status: int | None
    words: str
    crashed_early: bool


class Guest(Protocol):
    """One kind of guest.

    Attributes:
        name: the name of this kind of guest in messages.
        consoles: the devices that carry the command's stdout and stderr.
        variants: the variants of iptables that work in the guest, the default one first.
        memory: the default memory of the guest.
        processors: the default number of processors.
    """

    name: str
    consoles: tuple[str, str]
    variants: tuple[str, ...]
    memory: str
    processors: int

    def why_not(self) -> str:
        """Return the reason why this guest cannot be started; empty if it can be started."""

    def modules(self) -> pathlib.Path:
        """Return the host's directory that the guest's modprobe uses as /lib/modules."""

    def start(self, directory: pathlib.Path, size: Size, log: IO[bytes]) -> contextlib.AbstractContextManager[Started]:
        """Start the kernel, with `init` of the control directory as its first process.

        Args:
            directory: the control directory.
            size: the size of the machine.
            log: the file for messages of the kernel and the program, opened to append.

        Raises:
            NoKernelError: a needed file is missing, or this kind of guest cannot have the given size.
        """


def run(
    guest: Guest,
    command: list[str],
    deadline: float | None,
    iptables: str | None,
    *,
    memory: str | None = None,
    processors: int | None = None,
) -> int:
    """Run a command on a guest, and return the command's exit status.

    If a signal ends the guest's program before the command has begun, the guest is started again, because the QEMU of Debian 12
    sometimes crashes.

    Args:
        guest: the kind of guest.
        command: the command and its arguments.
        deadline: a time of time.monotonic; None means no limit.
        iptables: a variant of iptables; None means the guest's default.
        memory: the guest's memory, a number with a unit; None means the guest's default.
        processors: the guest's number of processors; None means the guest's default.

    Raises:
        NoKernelError: the guest cannot be started, or died.
        TimeoutError: the deadline has passed.
    """
    if reason := guest.why_not():
        raise NoKernelError(reason)
    variant = iptables or guest.variants[0]
    if variant not in guest.variants:
        raise NoKernelError(f"iptables-{variant} does not work on {guest.name}: it works with {' or '.join(guest.variants)}")
    size = Size(memory_size(memory or guest.memory), processors or guest.processors)
    for left in reversed(range(STARTS)):
        ended = run_once(guest, command, deadline, variant, size)
        if ended.status is not None:
            return ended.status
        if not left or not ended.crashed_early:
            break
        print(f"scripts/kernel: {guest.name} died before the command began, and is started again: {ended.words}", file=sys.stderr)
    raise NoKernelError(f"{guest.name} died: {ended.words}")


def run_once(guest: Guest, command: list[str], deadline: float | None, variant: str, size: Size) -> Ended:
    """Start a guest and wait for its end. See run."""
    with control.directory(command, MOUNTS, variant) as directory, (directory / "kernel.log").open("a+b") as log:
        write_inputs(guest, directory, variant)
        with guest.start(directory, size, log) as started, processes.killed_at_the_end(started.process):
            started.pass_on(deadline)
            code = started.process.wait()
        try:
            status = int((directory / "status").read_text())
        except (FileNotFoundError, ValueError):
            status = None
        words = last_words(log) or f"its status is {code}, and its log is empty"
        return Ended(status, words, crashed_early=code < 0 and not (directory / "began").exists())


def write_inputs(guest: Guest, directory: pathlib.Path, variant: str) -> None:
    """Write the files that `init` needs in a guest but not on the host."""
    (directory / "consoles").write_text(" ".join(guest.consoles))
    (directory / "modules").write_text(" ".join(control.modules(variant)))
    (directory / "lib").mkdir()
    (directory / "lib/modules").symlink_to(guest.modules())
    (directory / "dev").mkdir()
    for link, target in (("fd", ""), ("stdin", "/0"), ("stdout", "/1"), ("stderr", "/2")):
        (directory / "dev" / link).symlink_to(f"/proc/self/fd{target}")
    # The modules are not in the usual directory of modprobe, and /lib/modules may not exist. The kernel, too, runs the script
    # below when it loads a module.
    control.write_program(directory / "bin/modprobe", f'#!/bin/sh\nexec /sbin/modprobe -d {control.INSIDE} "$@"\n')
    if sys.stdout.isatty():
        size = os.get_terminal_size(sys.stdout.fileno())
        (directory / "terminal").write_text(f"rows {size.lines} columns {size.columns}")


def memory_size(memory: str) -> int:
    """Convert a number with a unit, such as 512M, to a number of bytes.

    Raises:
        NoKernelError: the text has no unit, or is not a number.
    """
    factor = UNITS.get(memory[-1:].upper(), 0)
    if not factor or not memory[:-1].isdigit():
        raise NoKernelError(f"--memory {memory}: must be a number followed by K, M or G")
    return int(memory[:-1]) * factor


def last_words(log: IO[bytes]) -> str:
    """Find the line of the kernel's log that best explains why the kernel ended; empty if the log is empty."""
    log.seek(0)
    lines = [TIME_IN_LOG.sub("", line.strip()) for line in log.read().decode(errors="replace").splitlines() if line.strip()]
    for sign in ("scripts/kernel:", "Kernel panic", "Out of memory"):
        for line in lines:
            if sign in line:
                return line.removeprefix("scripts/kernel: ")
    return lines[-1] if lines else ""
