"""Runs the image of scripts/image on a real kernel as the DaemonSet does.

A first run prepares the node; a second run has only one capability.

A build takes minutes and downloads packages of Debian and PyPI, so these tests use the image that scripts/image left in
build/image. The tests use no container runtime; they enter the root file system of the image by chroot.
"""

import pathlib
import subprocess
import time
from collections.abc import Sequence

import pytest

from tests.packets.nf_tables import NEEDS_NF_TABLES
from tests.test_manifests import _instructions

ROOT = pathlib.Path(__file__).parents[1]
IMAGE = ROOT / "build/image/root"
FLAGS = (
    "--proxy-mode=ipvs",
    "--manifests=/tmp/demo",
    "--hostname-override=demo-node",
    "--cluster-cidr=10.244.0.0/16,fd00:10:244::/56",
    "--conntrack-max-per-core=0",  # this limit is writable only in the host's own network namespace
)
STARTED_WITHIN_S = 90

pytestmark = [
    pytest.mark.kernel,
    pytest.mark.skipif(
        not (IMAGE / "opt/ipvsproxy").exists(), reason="there is no image in build/image; scripts/image builds it"
    ),
]

PREPARE = """
mount -t tmpfs tmpfs /mnt && mkdir /mnt/root && mount --bind $1 /mnt/root && mount -o remount,bind,ro /mnt/root || exit 9
for each in proc dev sys; do mount --rbind /$each /mnt/root/$each || exit 9; done
for each in tmp run; do mount -t tmpfs tmpfs /mnt/root/$each || exit 9; done
cp -r $2 /mnt/root/tmp/demo && mkdir /mnt/root/run/netns
shift 2
PATH=/opt/ipvsproxy/bin:/usr/sbin:/usr/bin:/sbin:/bin exec chroot /mnt/root "$@"
"""
"""Runs a command in the root file system of the image, which is read-only except for a new /tmp and a new /run."""
WITHOUT_PROGRAMS = """
import os, sys
os.environ["PATH"] = "/opt/ipvsproxy/bin"
os.execv("/opt/ipvsproxy/bin/ipvsproxy", ["ipvsproxy", *sys.argv[1:]])
"""
"""Starts ipvsproxy with a PATH on which it finds no other program, such as iptables or modprobe."""
UNPRIVILEGED = ("setpriv", "--no-new-privs", "--bounding-set=-all,+net_admin", "--inh-caps=-all")


def inside(*command: str) -> Sequence[str]:
    return ("unshare", "--mount", "sh", "-c", PREPARE, "sh", str(IMAGE), str(ROOT / "manifests/demo"), *command)


def _wait_until_synced(process: subprocess.Popen[bytes], log: pathlib.Path) -> None:
    deadline_s = time.monotonic() + STARTED_WITHIN_S
    while "event=synced" not in log.read_text() and process.poll() is None and time.monotonic() < deadline_s:
        time.sleep(0.5)
    assert "event=synced" in log.read_text(), log.read_text()


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture
def node(network_namespace: None) -> None:
    """A node whose kubelet uses legacy iptables, which every test kernel supports."""
    assert run("iptables-legacy", "-t", "mangle", "-N", "KUBE-IPTABLES-HINT").returncode == 0
    for command in ("link add eth0 type dummy", "address add 172.18.0.2/16 dev eth0", "link set eth0 up"):
        assert run("ip", *command.split()).returncode == 0


@pytest.mark.usefixtures("node")
def test_one_capability_suffices_to_serve_a_service_after_a_run_with_the_flag_init_only(tmp_path: pathlib.Path) -> None:
    prepared = run(*inside("ipvsproxy", "--init-only", *FLAGS))
    assert prepared.returncode == 0, prepared.stderr
    assert "failed=0" in prepared.stderr
    log = tmp_path / "log"
    with log.open("wb") as output, subprocess.Popen(inside(*UNPRIVILEGED, "ipvsproxy", *FLAGS), stderr=output) as process:
        try:
            _wait_until_synced(process, log)
            assert "10.96.0.80:80" in run("ipvsadm", "-Sn").stdout
            (check,) = (argument for name, argument in _instructions() if name == "HEALTHCHECK")
            code = check[check.index('"-c", "') + len('"-c", "') : check.rindex('"')]
            assert run(*inside("python3", "-c", code)).returncode == 0
            verified = run(*inside("ipvsproxy", "verify", *FLAGS))
            assert verified.returncode == 0, verified.stdout + verified.stderr
        finally:
            process.terminate()
        assert process.wait(10) == 0


@NEEDS_NF_TABLES
@pytest.mark.usefixtures("network_namespace")
def test_the_image_serves_with_one_capability_and_without_external_programs_if_it_uses_nftables(tmp_path: pathlib.Path) -> None:
    flags = (*FLAGS, "--rules-backend=nftables")
    prepared = run(*inside("ipvsproxy", "--init-only", *flags))
    assert prepared.returncode == 0, prepared.stderr
    log = tmp_path / "log"
    alone = inside(*UNPRIVILEGED, "/opt/ipvsproxy/bin/python", "-c", WITHOUT_PROGRAMS, *flags)
    with log.open("wb") as output, subprocess.Popen(alone, stderr=output) as process:
        try:
            _wait_until_synced(process, log)
            assert "iptables=nftables" in log.read_text()
            assert "10.96.0.80:80" in run("ipvsadm", "-Sn").stdout
            found = run("nft", "get", "element", "inet", "ipvsproxy", "KUBE-CLUSTER-IP", "{ 10.96.0.80 . tcp . 80 }")
            assert found.returncode == 0, found.stderr
        finally:
            process.terminate()
        assert process.wait(10) == 0


@pytest.mark.parametrize(
    "command",
    [
        ("iptables-nft", "--version"),
        ("ip6tables-legacy-restore", "--version"),
        ("modprobe", "--version"),
        ("ipvsproxy", "--help"),
        ("python3", "-c", "import textual.app, rich.text"),
    ],
)
def test_the_image_contains_every_program_that_its_pods_start(command: Sequence[str]) -> None:
    done = run(*inside(*command))
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("path", ["opt/ipvsproxy/bin/pip", "usr/bin/gcc", "source", "wheels"])
def test_the_image_contains_no_build_tools(path: str) -> None:
    assert not (IMAGE / path).exists()
