"""Runs the program on a real kernel as an operator does.

The tests cover preparation, missing privileges, a second instance, signals and changed files.

``tests/test_program.py`` checks the programmed objects.
"""

import functools
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

import pytest
import yaml

from ipvsproxy.kernel.iptables import process as iptables_process
from ipvsproxy.model.kernel import INDISPENSABLE_SETTINGS
from ipvsproxy.translate.translation_settings import TUNNEL_DEVICES
from tests.packets.three_nodes import load_tunnels
from tests.support import mains, patience
from tests.support.own_pages import health_status
from tests.support.program import STARTER, SYNCED_WITHIN_S, Program, run_in_turn
from tests.support.programs import make_program

pytestmark = [pytest.mark.kernel, pytest.mark.usefixtures("network_namespace")]

STOPPED_WITHIN_S = patience.seconds(60.0)
# The limit of tracked connections is writable only in the host's own network namespace.
FLAGS = ("--hostname-override=node-a", "--conntrack-max-per-core=0")
# If ipvsproxy was installed without a compiler, it also needs net_raw.
CAPABILITIES = "+net_admin" if iptables_process.LIBRARY.exists() else "+net_admin,+net_raw"
UNPRIVILEGED = (
    "unshare",
    "--mount",
    "sh",
    "-c",
    f'{mains.READ_ONLY_SETTINGS}; exec setpriv --no-new-privs --bounding-set=-all,{CAPABILITIES} --inh-caps=-all "$@"',
    "sh",
)
"""The restrictions of the serving container in manifests/base: one capability, no way to gain more privileges, and read-only
kernel settings."""
CLEANUP_JOB = pathlib.Path(__file__).parents[1] / "manifests/cleanup/job.yaml"
MANIFESTS = """
apiVersion: v1
kind: Node
metadata: {name: node-a}
status: {addresses: [{type: InternalIP, address: 10.1.1.1}]}
---
apiVersion: v1
kind: Service
metadata: {name: web}
spec: {clusterIP: 10.96.0.10, ports: [{port: 80}]}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: web-1, labels: {kubernetes.io/service-name: web}}
addressType: IPv4
endpoints: [{addresses: [10.1.1.1], nodeName: node-a}]
ports: [{port: 8080}]
"""
CONFIGURATION = """
apiVersion: kubeproxy.config.k8s.io/v1alpha1
kind: KubeProxyConfiguration
mode: ipvs
hostnameOverride: node-a
conntrack: {maxPerCore: 0}
"""
OWN_SYS = ("unshare", "--mount", "sh", "-c", f'{mains.OWN_SYS} && exec "$@"', "sh")
"""The words to put before a command, so that it gets a ``/sys`` that shows the network namespace of the test."""


class Started(Program):
    """A program that a signal can stop.

    The command ``by``, if it is given, starts the program. The function ``main``, if it is given, replaces the program's main
    function.
    """

    def __init__(
        self,
        folder: pathlib.Path,
        *flags: str,
        by: Sequence[str] = (),
        main: Callable[[Sequence[str]], int] | None = None,
        output: int | None = None,
    ) -> None:
        starter = STARTER if by else ()
        super().__init__(folder / "manifests", folder / "log", *flags, starter=starter, main=main, output=output)
        self._command = [*by, *self._command]

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Send a signal and wait until the program has ended; returns its exit status."""
        os.kill(self.process_id, number)
        return self._process.wait(STOPPED_WITHIN_S)


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
    (tmp_path / "manifests").mkdir()
    (tmp_path / "manifests/web.yaml").write_text(MANIFESTS)
    (tmp_path / "log").touch()
    run("ip", "address", "add", "10.1.1.1/32", "dev", "lo")
    return tmp_path


def run(*command: str, status: int = 0) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr


def virtual_servers() -> list[str]:
    return [line for line in run("ipvsadm", "-Sn").splitlines() if line.startswith("-A")]


def ipvsproxy(folder: pathlib.Path, *flags: str, status: int = 0, main: Callable[[Sequence[str]], int] | None = None) -> str:
    """Run the program, which must end by itself with this status; return its log."""
    log = folder / "ended"
    log.unlink(missing_ok=True)
    with Program(folder / "manifests", log, *flags, main=main) as program:
        program.wait_for_end(SYNCED_WITHIN_S)
    assert program.status == status, program.log_tail()
    return log.read_text()


def warnings(folder: pathlib.Path) -> list[str]:
    return [line for line in (folder / "log").read_text().splitlines() if "level=info" not in line]


def test_one_capability_suffices_and_no_sysctl_is_written_once_init_only_has_prepared_the_node(folder: pathlib.Path) -> None:
    prepared = ipvsproxy(folder, "--init-only", *FLAGS)
    assert "path=net/ipv4/vs/conntrack value=1 before=0" in prepared
    assert "event=node_prepared" in prepared
    assert "written=0 failed=0" in ipvsproxy(folder, "--init-only", *FLAGS)
    assert virtual_servers() == []
    with Started(folder, *FLAGS, by=UNPRIVILEGED) as program:
        program.wait_until_synced()
        assert virtual_servers() == ["-A -t 10.96.0.10:80 -s rr"]
        assert health_status() == 200
        assert program.stop() == 0
    assert warnings(folder) == []


def test_an_unwritable_setting_causes_only_one_warning_unless_the_setting_is_indispensable(
    folder: pathlib.Path,
) -> None:
    refusal = ipvsproxy(folder, *FLAGS, status=2, main=mains.with_read_only_settings)
    assert "net.ipv4.vs.conntrack is off, and this process cannot switch it on" in refusal
    assert "ipvsproxy: nothing was programmed" in refusal
    assert virtual_servers() == []
    for path in INDISPENSABLE_SETTINGS:
        (pathlib.Path("/proc/sys") / path).write_text("1")
    with Started(folder, *FLAGS, "--ipvs-sync-period=1s", main=mains.with_read_only_settings) as program:
        program.wait_until_synced()
        program.wait_until(lambda: (folder / "log").read_text().count("net/ipv4/vs/expire") > 0, "warned", SYNCED_WITHIN_S)
        time.sleep(2.5)  # this time is longer than two audit intervals
        assert health_status() == 200
        assert program.stop() == 0
    (warning,) = [line for line in warnings(folder) if "kernel_settings_not_writable" in line]
    assert "settings=net/ipv4/vs/expire_nodest_conn," in warning
    assert "Read-only file system" in warning
    assert "--init-only" in warning


def test_a_second_instance_and_the_cleanup_job_are_refused_only_while_the_program_runs(
    folder: pathlib.Path,
) -> None:
    pod = yaml.safe_load(CLEANUP_JOB.read_text())["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    name, *words = container["command"]
    assert name == "ipvsproxy"
    (folder / "config.conf").write_text(CONFIGURATION + "ipvsproxy: {vipBinding: routes, routeProtocol: 99}\n")
    mounted = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}["config"]
    arguments = [one.replace(mounted, str(folder)) for one in container["args"]]
    routes = ("ip", "route", "show", "table", "local", "protocol", "99")
    with Started(folder, f"--config={folder / 'config.conf'}", main=mains.with_own_sys) as program:
        program.wait_until_synced()
        before = virtual_servers()
        assert "10.96.0.10" in run(*routes)
        reason, outcome = ipvsproxy(folder, *FLAGS, status=2).splitlines()[-2:]
        other = f"another ipvsproxy (process {program.process_id})"
        assert reason == f"ipvsproxy: {other} is running in this network namespace; stop it first"
        assert outcome == "ipvsproxy: nothing was programmed"
        (refused,) = run_in_turn([*words, *arguments], within_s=SYNCED_WITHIN_S)
        assert refused.status == 1
        assert "is running in this network namespace" in refused.output
        assert virtual_servers() == before != []
        assert program.stop() == 0
    run(*OWN_SYS, *UNPRIVILEGED, sys.executable, "-m", name, *words, *arguments)
    assert virtual_servers() == []
    assert run(*routes) == ""
    assert "kube-ipvs0" not in run("ip", "link", "show")
    assert "KUBE-" not in run("ipset", "list", "-name") + run("iptables-save")


DIRECT_RETURN = ("net/ipv4/conf/all/rp_filter", "net/ipv4/vs/sloppy_tcp")


def direct_return() -> list[str]:
    """The kernel settings of direct return, and the tunnel devices that are up."""
    links = run("ip", "-json", "link", "show")
    up = [one["ifname"] for one in json.loads(links) if "UP" in one["flags"] and one["ifname"] in TUNNEL_DEVICES.values()]
    return [pathlib.Path("/proc/sys", path).read_text().strip() for path in DIRECT_RETURN] + sorted(up)


def test_the_cleanup_job_succeeds_only_after_a_start_without_direct_return_has_restored_settings(folder: pathlib.Path) -> None:
    load_tunnels()
    clean = (*OWN_SYS, *UNPRIVILEGED, sys.executable, "-m", "ipvsproxy", "cleanup", "--only=own")
    prepare = functools.partial(ipvsproxy, folder, "--init-only", *FLAGS, main=mains.with_own_sys)
    pathlib.Path("/proc/sys", DIRECT_RETURN[0]).write_text("2")
    pathlib.Path("/proc/sys", DIRECT_RETURN[1]).write_text("0")
    on = "--ipvs-direct-return=on"
    prepare(on)
    with Started(folder, *FLAGS, on, main=mains.unprivileged_with_own_sys) as program:
        program.wait_until(
            lambda: direct_return() == ["0", "1", *sorted(TUNNEL_DEVICES.values())], "direct return", SYNCED_WITHIN_S
        )
        assert program.stop() == 0
    failed = run(*clean, status=1)
    assert all(f"failed: {path} = " in failed for path in DIRECT_RETURN)
    assert direct_return() == ["0", "1"], "the Job takes the tunnel devices down, and cannot write kernel settings"
    assert "event=kernel_setting_restored path=net/ipv4/vs/sloppy_tcp" in prepare()
    assert direct_return() == ["2", "0"]
    run(*clean)


def test_a_run_with_init_only_reports_unwritable_settings_and_exits_with_status_1(folder: pathlib.Path) -> None:
    # A new network namespace inherits the value of the first namespace, which may be 1.
    pathlib.Path("/proc/sys/net/ipv4/ip_forward").write_text("0")
    output = ipvsproxy(folder, "--init-only", *FLAGS, status=1, main=mains.with_read_only_settings)
    assert 'event=kernel_setting_not_written error="net/ipv4/ip_forward = 1: Read-only file system' in output


def test_a_stopping_program_answers_503_at_healthz_and_does_not_change_the_kernel(folder: pathlib.Path) -> None:
    with Started(folder, *FLAGS, main=mains.answering_long) as program:
        program.wait_until_synced()
        assert health_status() == 200
        before = virtual_servers()
        began_s = time.monotonic()
        os.kill(program.process_id, signal.SIGTERM)
        answers = []
        while program.is_alive:
            answers.append(health_status())
            time.sleep(0.1)
        assert time.monotonic() - began_s < STOPPED_WITHIN_S
        assert program.status == 0
    assert 503 in answers
    assert 200 not in answers[answers.index(503) :]
    assert virtual_servers() == before != []
    assert "the kernel stays as it is" in (folder / "log").read_text()


@pytest.mark.parametrize(("flag", "status"), [("--init-only", 1), ("--hostname-override=node-a", 0)])
def test_the_program_stops_on_a_signal_without_waiting_for_a_hanging_modprobe(
    folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch, flag: str, status: int
) -> None:
    make_program(folder, "modprobe", f"touch {folder}/asked\nexec sleep 600")
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    with Started(folder, *FLAGS, flag, main=mains.first_process_without_modules) as program:
        program.wait_until((folder / "asked").exists, "at modprobe", SYNCED_WITHIN_S)
        (inner,) = run("pgrep", "--parent", str(program.process_id)).split()
        os.kill(int(inner), signal.SIGTERM)
        program.wait_for_end(STOPPED_WITHIN_S)
        assert program.status == status
    assert virtual_servers() == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_program_whose_log_nobody_reads_runs_until_a_stop_signal(folder: pathlib.Path, number: signal.Signals) -> None:
    by, output = ("bash", "-c", 'exec "$@" >&- 2>&-', "bash"), None
    if number is signal.SIGINT:
        reader, output = os.pipe()
        os.close(reader)
    with Started(folder, *FLAGS, by=() if output else by, output=output) as program:
        # The test waits until the program is healthy, because the test cannot read event=synced in the log. Waiting for virtual
        # servers is not enough, because they exist before the rules do.
        program.wait_until(lambda: health_status() == 200, "healthy", SYNCED_WITHIN_S)
        assert program.stop(number) == 0
    assert virtual_servers() != []


def carries(client: socket.socket, server: socket.socket, text: bytes) -> bool:
    """Whether a connection carries this text to the server and back."""
    client.sendall(text)
    server.sendall(server.recv(99))
    return client.recv(99) == text


STRICT_ARP = pathlib.Path("/proc/sys/net/ipv4/conf/all/arp_ignore")


def swap(folder: pathlib.Path, name: str, text: str) -> pathlib.Path:
    """Write a file to a volume as the kubelet writes a ConfigMap, and return the path of the file."""
    (folder / name).mkdir(parents=True)
    (folder / name / "config.conf").write_text(text)
    (folder / "..data_tmp").symlink_to(name)
    (folder / "..data_tmp").rename(folder / "..data")
    path = folder / "config.conf"
    if not path.is_symlink():
        path.symlink_to("..data/config.conf")
    return path


def test_open_connections_continue_if_a_replaced_config_map_changes_the_scheduler(folder: pathlib.Path) -> None:
    volume = folder / "volume"
    path = swap(volume, "..1", CONFIGURATION)
    with Started(folder, f"--config={path}") as program, socket.create_server(("10.1.1.1", 8080)) as server:
        program.wait_until_synced()
        with socket.create_connection(("10.96.0.10", 80), timeout=patience.seconds(60)) as client, server.accept()[0] as peer:
            peer.settimeout(patience.seconds(60))
            assert carries(client, peer, b"before")
            swap(volume, "..2", CONFIGURATION + "ipvs: {scheduler: wrr}\nmetricsBindAddress: 127.0.0.1:1\n")
            program.wait_until(lambda: virtual_servers() == ["-A -t 10.96.0.10:80 -s wrr"], "reconfigured", SYNCED_WITHIN_S)
            assert carries(client, peer, b"after")
            (row,) = [line.split() for line in run("ipvsadm", "-Ln").splitlines() if "10.1.1.1:8080" in line]
            assert row[-2:] == ["1", "0"], "the connection is still counted"
        log = folder / "log"
        assert "event=configuration_changed applied=ipvs.scheduler" in log.read_text()
        assert "event=restart_needed settings=metricsBindAddress" in log.read_text()
        assert "kernel_settings_left" not in log.read_text()

        swap(volume, "..2a", CONFIGURATION + "ipvs: {scheduler: wrr, strictARP: true}\n")
        program.wait_until(lambda: STRICT_ARP.read_text() == "1\n", "strict", SYNCED_WITHIN_S)
        swap(volume, "..2b", CONFIGURATION + "ipvs: {scheduler: wrr}\n")
        program.wait_until(lambda: "kernel_settings_left" in log.read_text(), "strict no more", SYNCED_WITHIN_S)
        left = "settings=net/ipv4/conf/all/arp_ignore,net/ipv4/conf/all/arp_announce"
        assert f"event=kernel_settings_left {left}" in log.read_text()
        assert STRICT_ARP.read_text() == "1\n"
        assert program.stop() == 0
