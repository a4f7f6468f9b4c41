"""The guarantees of scripts/kernel: exit status, output, environment, and that no processes or files remain.

Each run of a guest takes seconds, so one run checks several guarantees. The host's kernel is tested even if it has no ip_vs,
because none of these tests uses ip_vs. Debian's kernel and user-mode Linux with nf_tables are tested if they are installed
(scripts/setup --with-debian-kernel, --with-nf-tables-kernel). Two cases have no test: stdout is a terminal, and scripts/kernel is
killed.
"""

import os
import pathlib
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator

import pytest

from scripts.kernels import control

ROOT = pathlib.Path(__file__).parents[2]
SCRIPT = ROOT / "scripts/kernel"
LONGEST_S = 120

# The beginning of a program that loads scripts/kernel as the module ``kernel``, so that the program can replace functions before
# it calls ``main``.
LOAD = f"""
import importlib.machinery, importlib.util, sys
loader = importlib.machinery.SourceFileLoader("kernel", {str(SCRIPT)!r})
kernel = importlib.util.module_from_spec(importlib.util.spec_from_loader("kernel", loader))
loader.exec_module(kernel)
"""
# In this program, scripts/kernel does not check whether the host has ip_vs.
ON_HOST = f"""{LOAD}
kernel.host.why_not = lambda: ""
sys.exit(kernel.main())
"""

uses_uml = pytest.mark.skipif(
    not pathlib.Path("/usr/bin/linux.uml").exists() or pathlib.Path("/proc/net/ip_vs").exists(),
    reason="the host's own ip_vs is used here, not user-mode Linux",
)

uses_debian = pytest.mark.skipif(
    not pathlib.Path("/usr/bin/qemu-system-x86_64").exists() or not (ROOT / "build/debian-kernel").exists(),
    reason="Debian's kernel or QEMU is not installed: scripts/setup --with-debian-kernel",
)

uses_nf_tables = pytest.mark.skipif(
    not (ROOT / "build/nf-tables-kernel").exists(),
    reason="user-mode Linux with nf_tables is not installed: scripts/setup --with-nf-tables-kernel",
)

GUESTS = {
    "uml": ([str(SCRIPT), "--kernel", "uml"], "the user-mode Linux"),
    "nf-tables": ([str(SCRIPT), "--kernel", "nf-tables"], "the user-mode Linux with nf_tables"),
    "debian": ([str(SCRIPT), "--kernel", "debian"], "Debian's kernel"),
}
# Both kinds of user-mode Linux are started by the same code, so tests of the start need only one of them.
INSTALLED = [pytest.param("uml", marks=uses_uml), pytest.param("debian", marks=uses_debian)]
guests = pytest.mark.parametrize("kind", INSTALLED)


@pytest.fixture(params=["host", *INSTALLED])
def launcher(request: pytest.FixtureRequest) -> list[str]:
    """The command line that starts scripts/kernel with one kind of kernel."""
    if request.param in GUESTS:
        return GUESTS[request.param][0]
    if os.geteuid() != 0:
        pytest.skip("namespaces of the host need root")
    return [sys.executable, "-B", "-c", ON_HOST, "--kernel", "host"]


@pytest.fixture
def place() -> Iterator[pathlib.Path]:
    """A directory below /tmp whose name has a space."""
    with tempfile.TemporaryDirectory(prefix="a place ", dir="/tmp") as name:
        yield pathlib.Path(name)


def run(launcher: list[str], script: str, place: pathlib.Path, *options: str) -> subprocess.CompletedProcess[bytes]:
    command = [*launcher, *options, "bash", "-c", script]
    environment = os.environ | {"IPVSPROXY_WORD": "it's a word", "UNRELATED": "1"}
    return subprocess.run(command, cwd=place, env=environment, capture_output=True, check=False, timeout=LONGEST_S)


def test_a_command_gets_a_clean_environment_and_the_caller_gets_exit_status_output_and_files(
    launcher: list[str], place: pathlib.Path
) -> None:
    data = bytes(range(256)) * 4000
    (place / "bytes").write_bytes(data)
    beside = pathlib.Path(tempfile.mkdtemp(dir="/tmp"))
    script = f"""
        cat bytes
        id -u; cat; echo "$IPVSPROXY_WORD/$UNRELATED"; test -t 1 || echo no terminal; ls -A $HOME
        ip -brief address; date +%s; ip link add name d type dummy 2>/dev/null && echo device
        echo "a line for stderr" >&2
        echo written >result
        touch {shlex.quote(str(beside))}/file 2>/dev/null && echo "/tmp is the host's" >&2
        sleep 300 &  # left behind
        exit 7
    """
    began_s = time.time()
    ended = run(launcher, script, place)
    assert ended.stdout.startswith(data)
    user, word, terminal, loopback, clock, *rest = ended.stdout.removeprefix(data).decode().splitlines()
    assert (user, word, terminal) == ("0", "it's a word/", "no terminal")
    assert loopback.split() == ["lo", "UNKNOWN", "127.0.0.1/8", "::1/128"]
    assert began_s - 10 < int(clock) < time.time() + 10
    if launcher in [command for command, _ in GUESTS.values()]:
        assert rest == ["device"]
    assert ended.stderr == b"a line for stderr\n"
    assert ended.returncode == 7
    assert (place / "result").read_text() == "written\n"
    beside.rmdir()


def test_the_exit_status_is_127_as_in_a_shell_if_the_command_does_not_exist(launcher: list[str], place: pathlib.Path) -> None:
    ended = subprocess.run([*launcher, "no-such-command"], cwd=place, capture_output=True, check=False, timeout=LONGEST_S)
    assert ended.returncode == 127
    assert b"no-such-command: not found" in ended.stderr


def test_a_command_that_exceeds_the_time_limit_is_stopped_and_reported(launcher: list[str], place: pathlib.Path) -> None:
    ended = run(launcher, "sleep 300", place, "--timeout", "1")
    assert ended.returncode == 124
    assert ended.stderr == b"scripts/kernel: stopped: not finished after 1 s\n"


def test_output_is_printed_while_the_command_runs_and_an_interrupt_ends_the_command(
    launcher: list[str], place: pathlib.Path
) -> None:
    command = [*launcher, "bash", "-c", "echo ready; sleep 300"]
    with subprocess.Popen(command, cwd=place, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == b"ready\n"
        process.send_signal(signal.SIGINT)
        # The output ends when all processes that could write to it have ended.
        assert process.stdout.read() == b""
        assert process.stderr.read() == b"scripts/kernel: stopped by SIGINT\n"
        assert process.wait() == 128 + signal.SIGINT


@guests
def test_a_kernel_panic_is_reported_in_one_line_with_a_separate_exit_status(kind: str, place: pathlib.Path) -> None:
    launcher, name = GUESTS[kind]
    ended = run(launcher, "echo c >/proc/sysrq-trigger; sleep 300", place)
    assert ended.returncode == 125
    assert ended.stderr.decode() == f"scripts/kernel: {name} died: Kernel panic - not syncing: sysrq triggered crash\n"


def test_tmp_itself_is_refused_as_the_working_directory_because_the_guest_would_hide_it() -> None:
    ended = run([str(SCRIPT)], "true", pathlib.Path("/tmp"))  # noqa: S108 - the test needs the directory /tmp itself
    assert ended.returncode == 125
    assert b"the working directory cannot be /tmp itself" in ended.stderr


# A program that runs scripts/kernel with a shell instead of a guest. At its first start, the shell crashes: either before it has
# started the command of scripts/kernel, or afterwards.
CRASHING = f"""{LOAD}
import contextlib, pathlib, subprocess

class Crashing:
    name, consoles, variants, memory = "the guest", ("a", "b"), ("legacy",), "1M"
    processors = 1

    def why_not(self):
        return ""

    def modules(self):
        return pathlib.Path("/")

    @contextlib.contextmanager
    def start(self, directory, size, log):
        script = "[ -e ran ] || {{ touch ran $3; kill -SEGV $$; }}; echo 7 >$1/status; echo $2"
        words = [str(directory), "output", str(directory / "began") if "late" in sys.argv else "ran"]
        process = subprocess.Popen(["sh", "-c", script, "sh", *words], start_new_session=True)
        yield kernel.guest.Started(process, lambda deadline: None)

kernel.GUESTS["uml"] = Crashing()
sys.exit(kernel.main())
"""


@pytest.mark.parametrize(
    ("when", "status", "output", "said"),
    [
        ("early", 7, b"output\n", b"the guest died before the command began, and is started again"),
        ("late", 125, b"", b"the guest died"),
    ],
)
def test_a_guest_that_crashes_is_started_again_only_if_the_command_has_not_started(
    when: str, status: int, output: bytes, said: bytes, place: pathlib.Path
) -> None:
    ended = run([sys.executable, "-B", "-c", CRASHING, "--kernel", "uml"], when, place)
    assert (ended.returncode, ended.stdout) == (status, output)
    assert ended.stderr == b"scripts/kernel: " + said + b": its status is -11, and its log is empty\n"


@guests
def test_a_memory_size_without_a_unit_is_refused(kind: str, place: pathlib.Path) -> None:
    ended = run(GUESTS[kind][0], "true", place, "--memory", "1024")
    assert ended.returncode == 125
    assert ended.stderr == b"scripts/kernel: --memory 1024: must be a number followed by K, M or G\n"


# Writes an IPv4 and an IPv6 rule. Then prints the variant of iptables, and the names of the legacy IPv4 tables; the nft variant
# has no legacy tables.
WRITE_RULES = """
    set -e
    iptables -t nat -A POSTROUTING -m comment --comment "a word" -j MASQUERADE
    ip6tables -t filter -A INPUT -m conntrack --ctstate NEW -j REJECT
    iptables-save -t nat | grep -c 'a word'
    iptables --version | grep -o '(.*)'
    cat /proc/net/ip_tables_names
"""


@uses_uml
def test_user_mode_linux_supports_only_the_legacy_variant_of_iptables(place: pathlib.Path) -> None:
    launcher, name = GUESTS["uml"]
    assert run(launcher, WRITE_RULES, place, "--iptables", "legacy").stdout == b"1\n(legacy)\nnat\n"
    refused = run(launcher, "true", place, "--iptables", "nft")
    assert refused.returncode == 125
    assert refused.stderr.decode() == f"scripts/kernel: iptables-nft does not work on {name}: it works with legacy\n"


@pytest.mark.parametrize("kind", [pytest.param("nf-tables", marks=uses_nf_tables), pytest.param("debian", marks=uses_debian)])
def test_guests_other_than_user_mode_linux_support_both_variants_of_iptables(kind: str, place: pathlib.Path) -> None:
    launcher, _ = GUESTS[kind]
    assert run(launcher, WRITE_RULES, place).stdout == b"1\n(nf_tables)\n"
    assert run(launcher, WRITE_RULES, place, "--iptables", "legacy").stdout == b"1\n(legacy)\nnat\n"


@uses_nf_tables
def test_every_module_that_is_loaded_on_demand_can_be_loaded_and_a_rule_can_use_fib(place: pathlib.Path) -> None:
    launcher, _ = GUESTS["nf-tables"]
    names = shlex.join(["modprobe", "--all", *control.ON_DEMAND])
    chain = "nft add table inet t && nft add chain inet t c '{ type nat hook output priority 0; }'"
    rule = "nft add rule inet t c fib daddr type local"
    ended = run(launcher, f"{names} && {chain} && {rule} && nft list table inet t", place)
    assert (ended.returncode, ended.stderr) == (0, b"")
    assert b"fib daddr type local" in ended.stdout


@uses_debian
def test_debians_kernel_has_two_processors_and_its_writes_do_not_reach_files_of_the_host(place: pathlib.Path) -> None:
    launcher, _ = GUESTS["debian"]
    script = "nproc; echo changed >/etc/hostname && cat /etc/hostname"
    before = pathlib.Path("/etc/hostname").read_bytes()
    assert run(launcher, script, place).stdout == b"2\nchanged\n"
    assert pathlib.Path("/etc/hostname").read_bytes() == before
