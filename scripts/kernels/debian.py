"""Debian's generic kernel, in a virtual machine of QEMU: several processors, preemption, and nf_tables.

QEMU translates every instruction, so everything takes 10 to 25 times as long. The virtual machine uses the host's files through
9p: the root file system is read-only, with an overlay in memory. The working directory and the control directory are mounted on
the root file system, and are writable. The guest may not see changes that the host makes in the working directory, because the
guest caches files.
"""

import contextlib
import os
import pathlib
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from typing import IO

from scripts.kernels import control, guest, output, processes
from scripts.kernels.errors import NoKernelError

FILES = control.ROOT / "build/debian-kernel"
"""The unpacked package of the kernel; scripts/setup --with-debian-kernel unpacks it."""

QEMU = pathlib.Path("/usr/bin/qemu-system-x86_64")
BUSYBOX = pathlib.Path("/bin/busybox")
INITRAMFS_INIT = control.INIT.with_name("initramfs-init")
MODULES = ("virtio_pci", "9pnet_virtio", "9p", "overlay", "virtio_console")
"""The modules that the machine needs before it finds the host's files."""


class DebianKernel:
    """The virtio consoles 0 and 1 carry the command's stdout and stderr, and the serial line carries the kernel's log."""

    name = "Debian's kernel"
    consoles = ("hvc0", "hvc1")
    variants: tuple[str, ...] = ("nft", "legacy")
    memory = "2048M"
    processors = 2  # a single processor would hide races that occur on a real node

    def why_not(self) -> str:
        """See guest.Guest."""
        if platform.machine() != "x86_64":
            return "Debian's kernel runs here on amd64 only: the virtual machine of another architecture has other devices"
        if not QEMU.exists() or not BUSYBOX.exists() or len(list(FILES.glob("boot/vmlinuz-*"))) != 1:
            return "Debian's kernel or QEMU is not installed: scripts/setup --with-debian-kernel"
        return ""

    def modules(self) -> pathlib.Path:
        """See guest.Guest."""
        return FILES / "lib/modules"

    @contextlib.contextmanager
    def start(self, directory: pathlib.Path, size: guest.Size, log: IO[bytes]) -> Iterator[guest.Started]:
        """See guest.Guest.

        QEMU writes the output to files, because QEMU would discard output whenever a pipe was full.
        """
        initramfs = make_initramfs(directory)
        (kernel,) = FILES.glob("boot/vmlinuz-*")
        process = subprocess.Popen(
            [
                # KVM is not used even if it seems to be available: inside another virtual machine KVM may not work, and then QEMU
                # crashes.
                str(QEMU), "-accel", "tcg,thread=multi", "-cpu", "max",
                "-smp", str(size.processors), "-m", f"{size.memory // 2**20}M",
                "-nodefaults", "-no-user-config", "-no-reboot", "-display", "none",
                "-kernel", str(kernel), "-initrd", str(initramfs),
                "-append", "console=ttyS0 quiet panic=-1 mitigations=off",
                *written("log", directory / "kernel.log"), "-serial", "chardev:log", "-device", "virtio-serial-pci",
                *written("stdout", directory / "stdout"), "-device", "virtconsole,chardev=stdout",
                *written("stderr", directory / "stderr"), "-device", "virtconsole,chardev=stderr",
                *shared("root", pathlib.Path("/"), "readonly=on"),
                *shared("working", pathlib.Path.cwd()),
                *shared("control", directory),
            ],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, env={"PATH": processes.SYSTEM_PATH}, start_new_session=True,
            preexec_fn=processes.die_with_parent,  # noqa: PLW1509 - see die_with_parent
        )  # fmt: skip
        routes = {}
        for name, target in (("stdout", sys.stdout), ("stderr", sys.stderr)):
            (directory / name).touch()
            routes[os.open(directory / name, os.O_RDONLY)] = target.fileno()
        yield guest.Started(process, lambda deadline: output.follow(routes, process, deadline))


def written(name: str, path: pathlib.Path) -> list[str]:
    """Return the arguments of QEMU for a device that appends to a file."""
    return ["-chardev", f"file,id={name},path={quoted(path)},append=on"]


def shared(name: str, path: pathlib.Path, *more: str) -> list[str]:
    """Return the arguments with which QEMU shares the directory ``path`` of the host.

    The guest mounts the directory by the tag ``name``.
    """
    # With security_model=none, QEMU ignores a failure to set a file's owner: if the caller is not root, new files belong to the
    # caller.
    options = ("local", f"id={name}", f"path={quoted(path)}", "security_model=none", "multidevs=remap", *more)
    return ["-fsdev", ",".join(options), "-device", f"virtio-9p-pci,fsdev={name},mount_tag={name}"]


def quoted(path: pathlib.Path) -> str:
    """Escape a path for an option of QEMU."""
    return str(path).replace(",", ",,")


def make_initramfs(directory: pathlib.Path) -> pathlib.Path:
    """Create the initramfs of the virtual machine, an archive in the control directory.

    The archive contains busybox, modules, and the list of mounts.

    Raises:
        NoKernelError: modprobe does not find a module.
    """
    files = directory / "initramfs"
    (files / "modules").mkdir(parents=True)
    shutil.copy(BUSYBOX, files / "busybox")
    shutil.copy(INITRAMFS_INIT, files / "init")
    for number, module in enumerate(first_modules()):
        shutil.copy(module, files / f"modules/{number:02}-{module.name}")
    (files / "place-of-working").write_text(f"{pathlib.Path.cwd()}\n")
    (files / "place-of-control").write_text(f"{directory}\n")
    names = "\n".join(str(path.relative_to(files)) for path in sorted(files.rglob("*")))
    archive = directory / "initramfs.cpio"
    with archive.open("wb") as opened:
        subprocess.run(
            [str(BUSYBOX), "cpio", "-o", "-H", "newc"],
            cwd=files,
            input=names.encode(),
            stdout=opened,
            stderr=subprocess.DEVNULL,
            check=True,
        )
    return archive


def first_modules() -> list[pathlib.Path]:
    """List the files of MODULES and of their dependencies, in the order in which they can be loaded."""
    (version,) = (path.name for path in (FILES / "lib/modules").iterdir())
    command = ["modprobe", "--dirname", str(FILES), "--set-version", version, "--show-depends", "--all", *MODULES]
    asked = subprocess.run(command, env={"PATH": processes.SYSTEM_PATH}, capture_output=True, text=True, check=False)
    if asked.returncode != 0:
        raise NoKernelError(
            f"{FILES} lacks a module: {asked.stderr.strip()}; remove it, and run scripts/setup --with-debian-kernel"
        )
    lines = [line.split() for line in asked.stdout.splitlines()]
    return [pathlib.Path(path) for path in dict.fromkeys(words[1] for words in lines if words[0] == "insmod")]
