"""User-mode Linux: an ordinary program that is a Linux kernel with one processor. Debian has a package of user-mode Linux.

Debian's kernel has no nf_tables for IPv4 and IPv6; scripts/setup --with-nf-tables-kernel builds a kernel that has both
(building.py).
"""

import contextlib
import dataclasses
import itertools
import os
import pathlib
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import IO

from scripts.kernels import building, guest, output, processes
from scripts.kernels.errors import NoKernelError

SHARED_MEMORY = pathlib.Path("/dev/shm")  # noqa: S108 - the kernel makes an unlinked file there
MOST_MAPPINGS = pathlib.Path("/proc/sys/vm/max_map_count")
MAPPINGS = 1048576
CPUINFO = pathlib.Path("/proc/cpuinfo")
REGISTERS = pathlib.Path(__file__).resolve().with_name("registers.c")

# When the first process of a process namespace ends, all other processes of the namespace end. The first process ends when this
# program ends, even if this program is killed by SIGKILL. When user-mode Linux panics, it sends a signal to itself. The first
# process of a namespace would not get this signal, so a shell is the first process.
CONTAINED = (*processes.IN_NAMESPACES, "/bin/sh", "-c", '"$@"; exit $?', "sh")


@dataclasses.dataclass
class UserModeLinux:
    """Consoles 1 and 2 carry the command's stdout and stderr, and console 0 carries the kernel's log.

    Attributes:
        name: see guest.Guest.
        variants: see guest.Guest.
        program: the program that is the kernel.
        files: the directory of the kernel's modules, with a folder for each version; it is outside /tmp and /run.
        remedy: what to do if the program or the modules are missing or outdated.
        is_outdated: whether the remedy would replace the present kernel.
    """

    name: str
    variants: tuple[str, ...]
    program: pathlib.Path
    files: pathlib.Path
    remedy: str
    is_outdated: Callable[[], bool] = bool
    consoles: tuple[str, str] = ("tty1", "tty2")
    memory: str = "1024M"
    processors: int = 1

    def why_not(self) -> str:
        """See guest.Guest."""
        if not (self.program.exists() and self.files.is_dir()):
            return f"{self.name} is not installed: {self.remedy}"
        return f"{self.name} was built of something else than it would be now: {self.remedy}" if self.is_outdated() else ""

    def modules(self) -> pathlib.Path:
        """See guest.Guest."""
        return self.files

    @contextlib.contextmanager
    def start(self, directory: pathlib.Path, size: guest.Size, log: IO[bytes]) -> Iterator[guest.Started]:
        """See guest.Guest."""
        if size.processors != 1:
            raise NoKernelError(f"--processors {size.processors}: {self.name} has one processor")
        allow_many_mappings()
        with on_one_processor():
            registers = room_for_registers(directory)
            (stdout, guest_stdout), (stderr, guest_stderr) = os.pipe(), os.pipe()
            process = subprocess.Popen(
                [
                    *(() if processes.why_no_namespaces() else CONTAINED),
                    str(self.program), f"mem={size.memory // 2**10}K", "root=/dev/root", "rootfstype=hostfs", "rootflags=/", "rw",
                    "quiet", "panic=1", "noreboot", f"init={directory}/init", f"uml_dir={directory}/", "umid=kernel",
                    "con=null", "con0=null,fd:1", f"con1=null,fd:{guest_stdout}", f"con2=null,fd:{guest_stderr}",
                ],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, pass_fds=(guest_stdout, guest_stderr),
                env={"PATH": processes.SYSTEM_PATH, "TMPDIR": memory_directory(directory, size.memory), **registers},
                start_new_session=True,
                preexec_fn=processes.die_with_parent,  # noqa: PLW1509 - see die_with_parent
            )  # fmt: skip
            os.close(guest_stdout)
            os.close(guest_stderr)
            routes = {stdout: sys.stdout.fileno(), stderr: sys.stderr.fileno()}
            yield guest.Started(process, lambda deadline: output.pass_on(routes, deadline))


OF_DEBIAN = UserModeLinux(
    name="the user-mode Linux",
    variants=("legacy",),  # this kernel lacks nf_tables for IPv4 and IPv6, so Debian's default variant (nft) finds no table
    program=pathlib.Path("/usr/bin/linux.uml"),
    files=pathlib.Path("/usr/lib/uml/modules"),
    remedy="apt-get install user-mode-linux kmod (Debian)",
)
WITH_NF_TABLES = UserModeLinux(
    name="the user-mode Linux with nf_tables",
    variants=("nft", "legacy"),
    program=building.BUILT / "linux",
    files=building.BUILT / "lib/modules",
    remedy="scripts/setup --with-nf-tables-kernel",
    is_outdated=building.is_outdated,
)


def allow_many_mappings() -> None:
    """Raise the host's limit of memory mappings per process, if permitted.

    Each page of a guest's process may be a separate mapping. At the usual limit of 65,530 mappings, which is about 250 MB, the
    guest kills the process silently.
    """
    try:
        if int(MOST_MAPPINGS.read_text()) < MAPPINGS:
            MOST_MAPPINGS.write_text(str(MAPPINGS))
    except OSError:
        pass  # some containers do not permit a higher limit; small processes also work with the usual limit


@contextlib.contextmanager
def on_one_processor() -> Iterator[None]:
    """Pin the guest to one processor that runs as few other guests as possible.

    At each system call and page fault, a process of the guest wakes the guest's kernel, and then the kernel wakes the process. On
    two processors, each wake-up is an interrupt between the processors. In a virtual machine, these interrupts increase the time
    of a system call from 17 us to 150 us.
    """
    available = sorted(os.sched_getaffinity(0))
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as claim:
        for place in itertools.count():
            processor = available[place % len(available)]
            try:
                claim.bind(f"\0test-kernel-{place}")
            except OSError:  # another guest uses this processor until that guest ends
                continue
            break
        os.sched_setaffinity(0, {processor})
        yield


def room_for_registers(directory: pathlib.Path) -> dict[str, str]:
    """Return the environment that user-mode Linux needs on a processor with AMX: see registers.c.

    Raises:
        NoKernelError: no C compiler is installed.
    """
    if "amx_tile" not in CPUINFO.read_text().split():
        return {}
    library = directory / "registers.so"
    try:
        subprocess.run(["/usr/bin/cc", "-shared", "-fPIC", "-O2", "-o", str(library), str(REGISTERS)], check=True)
    except (FileNotFoundError, subprocess.CalledProcessError) as error:
        why = "user-mode Linux needs a C compiler on this processor (Debian: apt-get install gcc libc6-dev)"
        raise NoKernelError(why) from error
    return {"LD_PRELOAD": str(library)}


def memory_directory(directory: pathlib.Path, memory: int) -> str:
    """Choose the directory for the guest's memory.

    The result is /dev/shm, unless /dev/shm is too small or mounted noexec, which is common in containers.
    """
    try:
        state = os.statvfs(SHARED_MEMORY)
    except FileNotFoundError:
        return str(directory)
    fits = state.f_bavail * state.f_frsize >= memory
    usable = fits and not state.f_flag & os.ST_NOEXEC and os.access(SHARED_MEMORY, os.W_OK)
    return str(SHARED_MEMORY if usable else directory)
