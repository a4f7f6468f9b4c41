"""Tests the build of user-mode Linux with nf_tables. A small program takes the place of ``make``.

Covers what is built, when it is built, and the printed lines. The kernel itself is not tested here; tests/scripts/test_kernel.py
starts it if it has been built.
"""

import contextlib
import fcntl
import io
import multiprocessing
import os
import pathlib
import shutil
import signal
import subprocess
import tarfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from scripts.kernels import building, control, errors, processes, uml

CONFIGURATION = "CONFIG_NF_TABLES=m\n# CONFIG_NF_TABLES_IPV4 is not set\nCONFIG_XFS_FS=y\nCONFIG_XFS_FS_QUOTA=y\nCONFIG_NET=y\n"
PRODUCTS = ["nf-tables-kernel", "nf-tables-kernel.lock", "nf-tables-kernel.log"]
MAKE = """
import pathlib, sys
folder, *words = sys.argv[2:]
with open({calls!r}, "a") as calls:
    calls.write(" ".join(words) + "\\n")
if {failing!r} in words:
    sys.exit("  no space left")
if "linux" in words:
    print("  CC      init/main.o\\n  CC [M]  net/x.o")
    pathlib.Path(folder, "linux").write_text("the kernel")
for word in words:
    if word.startswith("INSTALL_MOD_PATH="):
        made = pathlib.Path(word.partition("=")[2], "lib/modules/6.1.0")
        made.mkdir(parents=True)
        made.joinpath("build").symlink_to(folder)
        made.joinpath("modules.order").write_text("".join(f"kernel/{{name}}.ko\\n" for name in {modules!r}))
        made.joinpath("modules.builtin").write_text("kernel/br-netfilter.ko\\n")
"""


class Machine:
    """A machine whose programs are stand-ins that do nothing real."""

    def __init__(self, root: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls = root / "calls"
        self.begun = root / "begun"
        self.built = root / "build/nf-tables-kernel"
        self._bin = root / "bin"
        self._bin.mkdir()
        monkeypatch.setattr(control, "ROOT", root)
        monkeypatch.setattr(building, "BUILT", self.built)
        monkeypatch.setattr(building, "SOURCE", root / "source.tar")
        monkeypatch.setattr(building, "DEBIANS", self._bin / "linux.uml")
        monkeypatch.setattr(processes, "SYSTEM_PATH", f"{self._bin}:{os.environ['PATH']}")
        monkeypatch.setenv("PATH", processes.SYSTEM_PATH)
        with tarfile.open(root / "source.tar", "w") as archive:
            for name in ("Makefile", "drivers/gpu/Kconfig", "drivers/gpu/drm/card.c", "net/socket.c"):
                member = tarfile.TarInfo(f"linux-source-6.1/{name}")
                archive.addfile(member, io.BytesIO())
        self.have("linux.uml", f"printf '{CONFIGURATION}'")
        self.has_version("6.1.1-1")
        self.makes()

    def have(self, program: str, shell: str) -> None:
        control.write_program(self._bin / program, f"#!/bin/sh\n{shell}\n")

    def has_version(self, version: str) -> None:
        self.have("dpkg-query", f"printf '{version}'")

    def makes(self, *, failing: str = "", without: str = "br_netfilter") -> None:
        modules = [name for name in building.modules() if name != without]
        text = MAKE.format(calls=str(self.calls), failing=failing, modules=modules)
        control.write_program(self._bin / "make", f"#!/usr/bin/env -S python3 -I -S\n{text}")

    def compiles_for_long(self) -> None:
        """Let make start a compiler that never ends.

        The process numbers of make and the compiler are written to the file `begun`.
        """
        self.have("make", f"sleep 300 >/dev/null & echo $$ $! >{self.begun}.new; mv {self.begun}.new {self.begun}; wait")

    def made(self) -> list[str]:
        """The targets with which make was called since the last call of this method."""
        words = [line.split()[-1] for line in self.calls.read_text().splitlines()] if self.calls.exists() else []
        self.calls.unlink(missing_ok=True)
        return words


@pytest.fixture
def machine(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path, monkeypatch)


def test_the_kernel_is_built_only_once_for_each_version_and_configuration(
    machine: Machine, capfd: pytest.CaptureFixture[str]
) -> None:
    assert building.main() == 0
    assert machine.made() == ["olddefconfig", "localmodconfig", "modules", "modules_install"]
    assert (machine.built / "linux").read_text() == "the kernel"
    assert [path.name for path in (machine.built / "lib/modules/6.1.0").iterdir() if path.is_symlink()] == []
    assert "from linux-source-6.1 6.1.1-1 into build/nf-tables-kernel" in capfd.readouterr().out
    assert sorted(path.name for path in machine.built.parent.iterdir()) == PRODUCTS
    assert building.main() == 0
    assert machine.made() == []
    assert capfd.readouterr() == ("", "")
    machine.has_version("6.1.2-1")
    assert building.main() == 0
    assert "modules" in machine.made()
    machine.have("linux.uml", "echo CONFIG_NET=y")
    assert building.main() == 0
    assert "modules" in machine.made()


def test_a_failed_build_says_where_the_error_is_logged_and_keeps_the_previous_kernel(
    machine: Machine, capfd: pytest.CaptureFixture[str]
) -> None:
    building.main()
    machine.has_version("6.1.2-1")
    machine.makes(failing="modules")
    capfd.readouterr()
    assert building.main() == 1
    assert capfd.readouterr().err == (
        "scripts/setup: make failed (status 1); the reason is at the end of build/nf-tables-kernel.log; "
        "mend it, and run scripts/setup --with-nf-tables-kernel again\n"
    )
    assert machine.built.with_name("nf-tables-kernel.log").read_text().endswith("  no space left\n")
    assert (machine.built / "linux").exists()
    assert sorted(path.name for path in machine.built.parent.iterdir()) == PRODUCTS, "nothing half-built is left"


def of_setup() -> None:
    """What scripts/setup starts."""
    errors.raise_on_signals()
    raise SystemExit(building.main())


def until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 100
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def is_running(process: int) -> bool:
    """Whether a process is running and is not a zombie."""
    with contextlib.suppress(FileNotFoundError):
        return "\nState:\tZ" not in pathlib.Path(f"/proc/{process}/status").read_text()
    return False


@contextlib.contextmanager
def compiling(machine: Machine) -> Iterator[tuple[multiprocessing.process.BaseProcess, int, int]]:
    """Start a build in another process; yield the build, and the process numbers of make and of the started compiler."""
    machine.compiles_for_long()
    build = multiprocessing.get_context("fork").Process(target=of_setup)
    build.start()
    until(machine.begun.exists)
    make, compiler = map(int, machine.begun.read_text().split())
    try:
        yield build, make, compiler
    finally:
        build.kill()
        build.join()
        for process in (make, compiler):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)


def test_an_interrupt_of_the_build_also_ends_the_compiler(machine: Machine) -> None:
    with compiling(machine) as (build, _, compiler):
        assert build.pid is not None
        os.kill(build.pid, signal.SIGINT)
        build.join(100)
        assert build.exitcode == 128 + signal.SIGINT
        until(lambda: not is_running(compiler))


def test_the_compiler_ends_if_a_signal_reaches_the_build_while_make_is_being_started(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Interrupted(subprocess.Popen[str]):
        """Starts ``make``, and sends SIGTERM to the build before the build knows the process number of ``make``."""

        def __init__(self, command: list[str], **arguments: Any) -> None:
            super().__init__(command, **arguments)
            if command[0] == "make":
                until(machine.begun.exists)
                os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(subprocess, "Popen", Interrupted)
    with compiling(machine) as (build, _, compiler):
        build.join(100)
        assert build.exitcode == 128 + signal.SIGTERM
        until(lambda: not is_running(compiler))


def test_the_next_build_waits_for_the_compiler_of_a_killed_build(machine: Machine) -> None:
    with compiling(machine) as (build, make, compiler):
        build.kill()
        build.join()
        until(lambda: not is_running(make))
        with machine.built.with_name("nf-tables-kernel.lock").open("w") as lock:
            with pytest.raises(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.kill(compiler, signal.SIGKILL)
            fcntl.flock(lock, fcntl.LOCK_EX)
    machine.makes()
    assert building.main() == 0
    assert sorted(path.name for path in machine.built.parent.iterdir()) == PRODUCTS, "nothing half-built is left"


def test_a_build_that_waits_for_another_build_prints_that_it_waits(machine: Machine, capfd: pytest.CaptureFixture[str]) -> None:
    with compiling(machine) as (build, *_):
        waiting = multiprocessing.get_context("fork").Process(target=of_setup)
        waiting.start()
        until(lambda: "Waiting for another build" in capfd.readouterr().out)
        waiting.kill()
        waiting.join()
        assert build.is_alive()


def test_an_unusable_tool_is_reported_in_one_sentence(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(building, "made_by", lambda *_: ["absent-make"])
    assert building.main() == 1
    assert capfd.readouterr().err == (
        "scripts/setup: [Errno 2] No such file or directory: 'absent-make'; mend it, and run scripts/setup "
        "--with-nf-tables-kernel again\n"
    )


def test_an_outdated_test_kernel_is_used_only_if_it_cannot_be_built_again(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = uml.UserModeLinux(
        name="the kernel",
        variants=(),
        program=machine.built / "linux",
        files=machine.built / "lib/modules",
        remedy="build it",
        is_outdated=uml.WITH_NF_TABLES.is_outdated,
    )
    assert kernel.why_not() == "the kernel is not installed: build it"
    assert building.main() == 0
    assert kernel.why_not() == ""
    monkeypatch.setattr(control, "MODULES", (*control.MODULES, "nft_more"))
    assert kernel.why_not() == "the kernel was built of something else than it would be now: build it"
    machine.have("dpkg-query", "exit 1")
    assert kernel.why_not() == "", "it cannot be built again here"


@pytest.mark.skipif(os.geteuid() != 0, reason="scripts/setup needs root if a package is missing")
def test_setup_builds_no_kernel_if_it_installs_only_packages(tmp_path: pathlib.Path) -> None:
    (tmp_path / "scripts").mkdir()
    (tmp_path / "bin").mkdir()
    shutil.copy(building.__file__.replace("kernels/building.py", "setup"), tmp_path / "scripts")
    control.write_program(tmp_path / "bin/apt-get", "#!/bin/sh\n")
    control.write_program(tmp_path / "bin/python3", f'#!/bin/sh\necho "$*" >>{tmp_path}/calls\n')
    command = [str(tmp_path / "scripts/setup"), "--packages-only", "--with-nf-tables-kernel"]
    environment = {"PATH": f"{tmp_path / 'bin'}:{processes.SYSTEM_PATH}"}
    subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
    assert "building" not in (tmp_path / "calls").read_text()
    assert not (tmp_path / ".venv").exists()


def test_a_kernel_built_without_a_required_module_is_refused(machine: Machine, capfd: pytest.CaptureFixture[str]) -> None:
    machine.makes(without="nft_fib_inet")
    assert building.main() == 1
    assert "has been built without nft_fib_inet;" in capfd.readouterr().err
    assert not machine.built.exists()


def test_setup_prints_the_missing_packages_on_a_distribution_other_than_debian(
    machine: Machine, capfd: pytest.CaptureFixture[str]
) -> None:
    machine.have("dpkg-query", "exit 1")
    assert building.main() == 1
    assert "is this Debian 12, with the packages user-mode-linux and linux-source-6.1?" in capfd.readouterr().err


def test_the_built_kernel_is_configured_as_in_debian_but_with_nf_tables_for_ipv4_and_ipv6() -> None:
    lines = building.configured(CONFIGURATION).splitlines()
    assert len({line.removeprefix("# ").replace(" ", "=").split("=")[0] for line in lines}) == len(lines), "each option once"
    assert {"CONFIG_NF_TABLES_IPV4=y", "CONFIG_NF_TABLES_IPV6=y", "CONFIG_XFS_FS=n"} <= set(lines)
    assert {"CONFIG_XFS_FS_QUOTA=y", "CONFIG_NET=y"} <= set(lines)


def test_only_configuration_files_are_unpacked_from_directories_that_are_never_compiled(
    machine: Machine, tmp_path: pathlib.Path
) -> None:
    building.unpack(tmp_path / "tree", tmp_path / "log")
    found = {str(path.relative_to(tmp_path / "tree")) for path in (tmp_path / "tree").rglob("*") if path.is_file()}
    assert found == {"Makefile", "drivers/gpu/Kconfig", "net/socket.c"}
