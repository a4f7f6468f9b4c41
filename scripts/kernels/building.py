"""Builds, for scripts/setup, a user-mode Linux with nf_tables for IPv4 and IPv6, and without features that no test uses.

The source is Debian's package linux-source-6.1. The kernel has the configuration of Debian's user-mode Linux, so that both
kernels behave in the same way. However, nf_tables is added, and features that no test uses are removed, so that the build is
faster. This module runs before .venv exists, so it uses only the standard library.
"""

import contextlib
import fcntl
import hashlib
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

from scripts.kernels import control, processes
from scripts.kernels.errors import STOPS, InterruptedRun, raise_on_signals

BUILT = control.ROOT / "build/nf-tables-kernel"
"""The folder of the built kernel: the file `linux` is the kernel, and lib/modules has its modules."""

PACKAGE = "linux-source-6.1"
SOURCE = pathlib.Path("/usr/src", f"{PACKAGE}.tar.xz")
DEBIANS = pathlib.Path("/usr/bin/linux.uml")

CHOSEN = {
    "y": "NF_TABLES_INET NF_TABLES_IPV4 NF_TABLES_IPV6 DEBUG_INFO_NONE",
    "m": "NF_TABLES NFT_NAT NFT_FIB_IPV4 NFT_FIB_IPV6 NFT_FIB_INET NFT_REJECT_INET NFT_COMPAT",
    "n": "UML_NET_VDE UML_NET_PCAP "  # they need libraries
    "DEBUG_INFO_DWARF_TOOLCHAIN_DEFAULT EXT2_FS EXT3_FS EXT4_FS REISERFS_FS JFS_FS XFS_FS BTRFS_FS MD SCSI BPFILTER "
    "SECURITY_SELINUX SECURITY_SMACK SECURITY_TOMOYO SECURITY_APPARMOR",
}
"""The kernel options that differ from Debian's configuration, grouped by their value: built in (`y`), module (`m`), off (`n`).
The function `modules` lists the modules that are built."""

UNUSED = (
    "drivers/gpu",
    "drivers/media",
    "drivers/net/ethernet",
    "drivers/net/wireless",
    "drivers/staging",
    "drivers/infiniband",
    "sound",
)
"""Directories that are never compiled. They contain half of the source. The build system reads only the Kconfig and Makefile in
each of them."""

REPORTED_EVERY_S = 30.0
ABOUT_FILES = 1350


class BuildError(Exception):
    """The kernel could not be built; the message is one sentence for a person, with the next step."""


def main() -> int:
    """Build the kernel unless it exists; returns the exit status."""
    try:
        build()
    except BuildError as error:
        print(f"scripts/setup: {error}", file=sys.stderr)
        return 1
    except InterruptedRun as interrupted:
        print(f"scripts/setup: stopped by {interrupted}", file=sys.stderr)
        return interrupted.status
    return 0


def build() -> None:
    """Build the kernel into BUILT, unless the kernel there has the same version and configuration.

    Raises:
        BuildError: the kernel could not be built; the former kernel is still there.
    """
    version, configuration = source()
    made_of = digest(version, configuration, *modules())
    try:
        BUILT.parent.mkdir(exist_ok=True)
        with only_build():
            if not is_current(BUILT, made_of):
                print(
                    f"Building user-mode Linux with nf_tables from {PACKAGE} {version} into {shown(BUILT)}, once; "
                    "this takes minutes",
                    flush=True,
                )
                replace(configuration, made_of)
    except OSError as error:
        raise BuildError(f"{error}; mend it, and run scripts/setup --with-nf-tables-kernel again") from error


def is_outdated() -> bool:
    """Say whether a build would replace the kernel in BUILT. The result is also False if the sources are not installed."""
    try:
        version, configuration = source()
    except BuildError:
        return False
    return not is_current(BUILT, digest(version, configuration, *modules()))


def source() -> tuple[str, str]:
    """Find the version of the source, and the configuration to build it with.

    Raises:
        BuildError: the Debian package of the source, or of user-mode Linux, is not installed.
    """
    version = output_of("dpkg-query", "--show", "--showformat=${Version}", PACKAGE)
    return version, configured(output_of(DEBIANS, "--showconfig"))


@contextlib.contextmanager
def only_build() -> Iterator[None]:
    """Wait until any other build has ended, and prevent other builds from starting during the block.

    The programs of a build inherit its lock, so the lock of a killed build is released only when its last compiler has ended.
    """
    with BUILT.with_name("nf-tables-kernel.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("Waiting for another build of user-mode Linux, or for the compilers that a killed one has left", flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        os.set_inheritable(lock.fileno(), True)
        yield


def replace(configuration: str, made_of: str) -> None:
    """Build the kernel and its modules. They replace the result of the former build."""
    unfinished = BUILT.with_name("nf-tables-kernel.unfinished")
    if unfinished.exists():  # a killed build left this folder behind
        shutil.rmtree(unfinished)
    try:
        made = build_in(unfinished, configuration)
        (made / "made-of").write_text(made_of)
        shutil.rmtree(BUILT, ignore_errors=True)
        made.rename(BUILT)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def build_in(folder: pathlib.Path, configuration: str) -> pathlib.Path:
    """Build in a new folder, and return the paths of the kernel and its modules in this folder."""
    tree, made = folder / "source", folder / "made"
    log = BUILT.with_name("nf-tables-kernel.log")
    log.unlink(missing_ok=True)
    unpack(tree, log)
    compile_kernel(tree, configuration, log)
    make(tree, log, f"INSTALL_MOD_PATH={made}", "modules_install")
    for link in made.glob("lib/modules/*/*"):
        if link.is_symlink():  # to the source
            link.unlink()
    if missing := missing_modules(made):
        raise BuildError(f"{PACKAGE} has been built without {' '.join(missing)}; CHOSEN in {shown(__file__)} must choose them")
    shutil.copy(tree / "linux", made)
    return made


def modules() -> tuple[str, ...]:
    """List the modules that are built, with their dependencies."""
    variants = (name for _, names in control.VARIANTS.values() for name in names)
    return tuple(dict.fromkeys((*control.MODULES, *variants, *control.ON_DEMAND)))


def configured(debians: str) -> str:
    """Return the text of the kernel's .config: Debian's configuration, changed by the options in CHOSEN."""
    options = {f"CONFIG_{name}": value for value, names in CHOSEN.items() for name in names.split()}
    kept = [line for line in debians.splitlines() if line.removeprefix("# ").replace(" ", "=").split("=")[0] not in options]
    return "\n".join([*kept, *(f"{name}={value}" for name, value in options.items())]) + "\n"


def digest(*parts: str) -> str:
    """Return a short digest of these strings."""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def is_current(built: pathlib.Path, made_of: str) -> bool:
    """Say whether the built kernel is complete, and was made from this version and configuration."""
    stamp = built / "made-of"
    return stamp.exists() and stamp.read_text() == made_of


def unpack(tree: pathlib.Path, log: pathlib.Path) -> None:
    """Unpack the source, without directories that are never compiled."""
    tree.mkdir(parents=True)
    unused = [f"--exclude={PACKAGE}/{folder}/*.[ch]" for folder in UNUSED]
    command = ["tar", "--extract", "--file", str(SOURCE), "--directory", str(tree), "--strip-components=1", *unused]
    for _ in lines_of(command, log):
        pass


def compile_kernel(tree: pathlib.Path, configuration: str, log: pathlib.Path) -> None:
    """Configure and compile the kernel, and print the progress from time to time."""
    (tree / ".config").write_text(configuration)
    make(tree, log, "olddefconfig")
    listed = tree.with_name("modules")  # a list of modules in the notation of lsmod
    listed.write_text("".join(f"{name} 0 0\n" for name in ("Module", *modules())))
    make(tree, log, f"LSMOD={listed}", "localmodconfig")
    began = reported = time.monotonic()
    files = 0
    for line in lines_of(made_by(tree, f"-j{len(os.sched_getaffinity(0))}", "linux", "modules"), log):
        files += line.split()[:1] == ["CC"] or line.split()[:2] == ["CC", "[M]"]
        if time.monotonic() - reported > REPORTED_EVERY_S:
            reported = time.monotonic()
            print(f"  {files} of about {ABOUT_FILES} files compiled in {reported - began:.0f} s", flush=True)


def made_by(tree: pathlib.Path, *words: str) -> list[str]:
    """Return the command line that runs make in ``tree`` with the arguments ``words``."""
    return ["make", "-C", str(tree), "ARCH=um", *words]


def make(tree: pathlib.Path, log: pathlib.Path, *words: str) -> None:
    """Run make in the source."""
    for _ in lines_of(made_by(tree, *words), log):
        pass


def missing_modules(made: pathlib.Path) -> list[str]:
    """List the needed modules that are neither built as modules nor built in."""
    text = " ".join(
        path.read_text() for name in ("modules.order", "modules.builtin") for path in made.glob(f"lib/modules/*/{name}")
    )
    there = {pathlib.Path(word).stem.replace("-", "_") for word in text.split()}
    return [name for name in modules() if name not in there]


def lines_of(command: list[str], log: pathlib.Path) -> Iterator[str]:
    """Run a command, yield the lines that it prints, and append these lines to the log.

    All processes of the command have ended when this function returns.

    Raises:
        BuildError: the command failed.
        OSError: the command is not installed.
    """
    environment = {"PATH": processes.SYSTEM_PATH, "LC_ALL": "C.UTF-8"}

    def begin() -> None:
        processes.die_with_parent()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)

    with log.open("a") as kept, contextlib.ExitStack() as running:
        with deferred_stops():
            process = running.enter_context(subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                close_fds=False,  # the lock is inherited: see only_build
                start_new_session=True,
                preexec_fn=begin,  # noqa: PLW1509 - see processes.die_with_parent
            ))  # fmt: skip
            running.callback(kill_group, process.pid)
        for line in process.stdout or ():
            kept.write(line)
            yield line
        process.wait()
    if process.returncode != 0:
        raise BuildError(
            f"{pathlib.Path(command[0]).name} failed (status {process.returncode}); the reason is at the end of {shown(log)}; "
            "mend it, and run scripts/setup --with-nf-tables-kernel again"
        )


@contextlib.contextmanager
def deferred_stops() -> Iterator[None]:
    """Until the ``with`` block ends, delay the signals that stop this program.

    A signal during Popen would leave a running program that is not known to the caller. If this process ends, the started program
    ends as well, but the compilers that ``make`` has started continue.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)


def kill_group(leader: int) -> None:
    """Kill a program and all that it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


def output_of(*command: str | pathlib.Path) -> str:
    """Run a command, and return its output.

    Raises:
        BuildError: the command failed.
    """
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise BuildError(f"{error}; is this Debian 12, with the packages user-mode-linux and {PACKAGE}?") from error


def shown(path: pathlib.Path | str) -> str:
    """Return the path relative to the project's root."""
    return os.path.relpath(path, control.ROOT)


if __name__ == "__main__":
    raise_on_signals()
    sys.exit(main())
