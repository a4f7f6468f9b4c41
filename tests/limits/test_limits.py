"""Covers a node under traffic and at one of its limits: it still serves Services, and applies their changes.

``/livez`` still answers, and SIGTERM ends the program.
"""

import contextlib
import functools
import http.client
import os
import resource
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ipvsproxy.model.net import Family
from ipvsproxy.model.rules import Backend
from tests.support import cluster, harm, lab, patience
from tests.support.cluster import Cluster, service
from tests.support.own_pages import ANSWERED_WITHIN_S, health_status, metrics

pytestmark = [pytest.mark.kernel]

WITHIN_S = patience.seconds(90.0)
STOPPED_WITHIN_S = patience.seconds(60.0)
"""The longest waits in seconds: ``WITHIN_S`` for an expected state, ``STOPPED_WITHIN_S`` for the end of the program. These waits
suffice even on a busy machine. scripts/bench measures how fast the program is on an idle machine."""
DESCRIPTORS = 256
SERVICES = 150
"""The number of Services. Each Service has two listeners, so all listeners need more file descriptors than the process may
have."""
CONNECTIONS = 300
FLOWS = 200
"""The number of connections that are held open: twice as many as fit into the connection table."""
CONNECTION_TABLE_SIZE = Path("/proc/sys/net/netfilter/nf_conntrack_max")
PORTS = (10256, 10249, 32001, 32002)
NEAR_LIMIT = (
    "-c",
    f"""
import resource, runpy
resource.setrlimit(resource.RLIMIT_NOFILE, ({DESCRIPTORS}, {DESCRIPTORS}))
runpy.run_module('ipvsproxy', run_name='__main__')""",
)
FULL_PIPE = (
    "-c",
    """
import fcntl, os, runpy
reader, writer = os.pipe()
fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)
os.dup2(writer, 2)
runpy.run_module('ipvsproxy', run_name='__main__')""",
)
Limit = Callable[[Cluster, Path], contextlib.AbstractContextManager[None]]


def _nothing(_running: Cluster, _directory: Path) -> contextlib.AbstractContextManager[None]:
    """Do nothing: the program already has this limit, because it was started with a log pipe that no process reads."""
    return contextlib.nullcontext()


@contextlib.contextmanager
def _descriptors(running: Cluster, _directory: Path) -> Iterator[None]:
    """The Services need more listening sockets than the program's limit of file descriptors allows.

    All HTTP pages are still served, and flushed rules and sets are restored.
    """
    assert metrics()["ipvsproxy_health_check_ports_unopened"] > 0
    _flush(running)
    running.wait_until(lambda: _has_rules(running), "restored", WITHIN_S)
    assert health_status() == 200
    assert metrics()["process_max_fds"] == DESCRIPTORS
    yield


@contextlib.contextmanager
def _connections(running: Cluster, _directory: Path) -> Iterator[None]:
    """An outside client holds many connections to each open port, and sends no request.

    Meanwhile, the program restores flushed rules and sets.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with contextlib.ExitStack() as held:
        for number in range(CONNECTIONS * len(PORTS)):
            client = held.enter_context(socket.socket())
            client.settimeout(patience.seconds(10))
            client.connect(("127.0.0.1", PORTS[number % len(PORTS)]))
            if number >= hard - 200:
                break
        _flush(running)
        running.wait_until(lambda: _has_rules(running), "restored", WITHIN_S)
        yield
    assert running.program.is_alive


@contextlib.contextmanager
def _full_disk(running: Cluster, directory: Path) -> Iterator[None]:
    """Inside the ``with`` block, the disk that has the log is full."""
    with (directory / "disk/filler").open("wb", buffering=0) as filler, contextlib.suppress(OSError):
        while True:
            filler.write(bytes(4096))
    yield
    (directory / "disk/filler").unlink()
    running.objects = running.objects[3:]
    running.show()  # the next line
    running.program.wait_until(lambda: bool(running.logged("event=log_lines_dropped")), "told of lost lines", WITHIN_S)


@contextlib.contextmanager
def _control_group(running: Cluster, directory: Path, file: str, value: Callable[[Path], int]) -> Iterator[None]:
    mount = directory / "cgroup"
    mount.mkdir(exist_ok=True)
    running.lab.run("node", "mount", "-t", "cgroup2", "none", str(mount))
    try:
        (mount / "cgroup.subtree_control").write_text(f"+{file.partition('.')[0]}")
        group = mount / "limited"
        group.mkdir()
        (group / "cgroup.procs").write_text(str(running.program.process_id))
        (group / file).write_text(str(value(group)))
        yield
        (mount / "cgroup.procs").write_text(str(running.program.process_id))
        group.rmdir()
    finally:
        running.lab.run("node", "umount", "-l", str(mount))


def _processes(running: Cluster, directory: Path) -> contextlib.AbstractContextManager[None]:
    """No process and no thread can be started."""
    return _control_group(running, directory, "pids.max", lambda _: 1)


def _memory(running: Cluster, directory: Path) -> contextlib.AbstractContextManager[None]:
    """The memory limit of the program is little more than the memory in use."""
    return _control_group(running, directory, "memory.max", lambda _: 8 << 20)


@contextlib.contextmanager
def _working_node(laboratory: lab.Lab, directory: Path, starter: tuple[str, ...], *flags: str) -> Iterator[Cluster]:
    """A node whose Services are served. The log of the program is on a separate disk."""
    (directory / "disk").mkdir()
    with contextlib.ExitStack() as leaving:
        laboratory.run("node", "mount", "-t", "tmpfs", "-o", "size=1m", "none", str(directory / "disk"))
        leaving.callback(laboratory.run, "node", "umount", "-l", str(directory / "disk"))
        (directory / "disk/log").touch()
        (directory / "log").symlink_to(directory / "disk/log")
        cluster.clear()
        running = Cluster(laboratory, directory, starter=starter)
        many = [_with_health_check(number) for number in range(1, SERVICES if starter is NEAR_LIMIT else 3)]
        running.objects = [*service("web-200", 200, "p1"), *(one for objects in many for one in objects)]
        running.begin("-v=4", *flags)
        leaving.callback(running.__exit__, None, None, None)
        running.wait_until(lambda: all(map(_listens, PORTS)) and health_status() == 200, "healthy", WITHIN_S)
        running.wait_until(lambda: _served(running, 200, "p1"), "served", WITHIN_S)
        yield running


@pytest.mark.parametrize(
    ("limits", "starter"),
    [
        pytest.param((_descriptors, _connections), NEAR_LIMIT, id="descriptors"),
        pytest.param((_nothing,), FULL_PIPE, id="full pipe"),
        pytest.param((_full_disk, _processes, _memory), (), id="disk, processes and memory"),
    ],
)
def test_at_a_limit_services_are_served_and_changed_and_livez_and_sigterm_still_work(
    laboratory: lab.Lab, limits: tuple[Limit, ...], starter: tuple[str, ...], tmp_path: Path
) -> None:
    """The limits are tested one after the other.

    Each limit is tested with a separate Service, because the Service of the previous limit drains.
    """
    with _working_node(laboratory, tmp_path, starter) as running:
        usual = running.objects[3:]
        for number, limit in zip(range(200, 240, 10), limits, strict=False):
            running.objects = [*service(f"web-{number}", number, "p1"), *usual]
            running.show()
            running.wait_until(functools.partial(_served, running, number, "p1"), "served", WITHIN_S)
            with limit(running, tmp_path):
                with running.lab.load(
                    "p2", "TCP", cluster.address(f"cluster {number}", Family.IPV4), 80, interval_s=0.1
                ) as loads:
                    _change(running, lambda: health_status("livez"), number)
                assert loads[0].failed == 0, loads[0]
        _stop(running)


def test_open_connections_continue_while_the_connection_table_is_full(laboratory: lab.Lab, tmp_path: Path) -> None:
    # The kernel itself drops new connections, also connections to /livez, so all assertions use connections that are already
    # open.
    with _working_node(laboratory, tmp_path, (), "--conntrack-max-per-core=0") as running, contextlib.ExitStack() as held:
        size = CONNECTION_TABLE_SIZE.read_text()
        asking = http.client.HTTPConnection("127.0.0.1", 10256, timeout=ANSWERED_WITHIN_S)
        asking.connect()
        held.callback(asking.close)
        served = [running.lab.open("p2", "TCP", cluster.address("cluster 200", family), 80) for family in Family]
        held.enter_context(_open_flows())
        held.callback(CONNECTION_TABLE_SIZE.write_text, size)
        CONNECTION_TABLE_SIZE.write_text(str(FLOWS // 2))
        assert _is_full(running)

        def answer() -> int:
            assert [one.ask() for one in served] == [cluster.address("p1", family) for family in Family]
            asking.request("GET", "/livez")
            with asking.getresponse() as response:
                response.read()
                return response.status

        _change(running, answer)
        assert _is_full(running), "the table is not full any more"
        assert int(CONNECTION_TABLE_SIZE.read_text()) == FLOWS // 2
        _stop(running)


def _is_full(running: Cluster) -> bool:
    """Whether the connection table refuses a new connection.

    Several connections are tried, because the kernel accepts one if it finds an old entry that it may drop (``early_drop`` in
    net/netfilter/nf_conntrack_core.c).
    """
    return any(running.lab.probe("p2", "TCP", "10.96.0.200", 80).outcome == "timeout" for _ in range(20))


@contextlib.contextmanager
def _open_flows() -> Iterator[None]:
    """Keeps ``FLOWS`` connections between sockets of this host open while the block runs.

    Each connection has an entry in the conntrack table.
    """
    with contextlib.ExitStack() as held:
        listener = held.enter_context(socket.create_server(("127.0.0.1", 0), backlog=FLOWS))
        for _ in range(FLOWS):
            held.enter_context(socket.create_connection(listener.getsockname()))
            held.enter_context(listener.accept()[0])
        yield


def _change(running: Cluster, answer: Callable[[], int], number: int = 200) -> None:
    """Change a Service, add a Service, and delete a virtual server; wait for each effect, while the program answers."""

    def is_in_force() -> bool:
        assert answer() == 200
        return _served(running, number, "p1", "r1") and _served(running, number + 1, "r1")

    changed = (*service(f"web-{number}", number, "p1", "r1"), *service(f"new-{number}", number + 1, "r1"))
    running.objects = [*changed, *running.objects[3:]]
    running.show()
    running.wait_until(is_in_force, "changed", WITHIN_S)
    running.lab.run("node", "ipvsadm", "-D", "-t", f"{cluster.address(f'cluster {number + 1}', Family.IPV4)}:80")
    running.wait_until(is_in_force, "restored", WITHIN_S)


def _stop(running: Cluster) -> None:
    os.kill(running.program.process_id, signal.SIGTERM)
    running.program.wait_for_end(STOPPED_WITHIN_S)


def _flush(running: Cluster) -> None:
    """Flush one of our chains and one of our sets."""
    running.lab.run("node", *harm.flush_chain("nat", "KUBE-SERVICES"))
    running.lab.run("node", *harm.flush_set("KUBE-CLUSTER-IP"))
    assert not _has_rules(running)


def _has_rules(running: Cluster) -> bool:
    """Whether both the chain ``KUBE-SERVICES`` and the set ``KUBE-CLUSTER-IP`` have contents."""
    command = "iptables -t nat -S KUBE-SERVICES"
    if cluster.BACKEND is Backend.NFTABLES:
        command = "nft list chain inet ipvsproxy IPv4-nat-KUBE-SERVICES"
    rules, entries = running.lab.run("node", *command.split()), running.set_contents("KUBE-CLUSTER-IP")
    return "KUBE-CLUSTER-IP" in rules and "10.96.0.1,tcp:80" in entries


def _with_health_check(number: int) -> list[cluster.Manifest]:
    return service(
        f"local-{number}",
        number,
        "p1",
        balancer=True,
        node_port=31000 + number,
        protocols=["TCP"],
        externalTrafficPolicy="Local",
        healthCheckNodePort=32000 + number,
    )


def _served(running: Cluster, number: int, *pods: str) -> bool:
    return all(
        running.real_servers("TCP", cluster.address(f"cluster {number}", family), 80)
        == dict.fromkeys((cluster.address(pod, family) for pod in pods), 1)
        for family in Family
    )


def _listens(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0
