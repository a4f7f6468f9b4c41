"""A node at each of its limits, under traffic: Services go on being served and changed, ``/livez`` answers, SIGTERM ends it."""

import contextlib
import os
import resource
import signal
import socket
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ipvsproxy.model.net import Family
from tests.support import cluster, lab, patience
from tests.support.cluster import Cluster, service

pytestmark = [pytest.mark.kernel, pytest.mark.timeout(300)]

WITHIN_S = patience.seconds(90.0)
ANSWERED_WITHIN_S = patience.seconds(1.0)
STOPPED_WITHIN_S = patience.seconds(2.0)
DESCRIPTORS = 256
SERVICES = 150
"""They desire two listeners each: more than there are descriptors."""
CONNECTIONS = 1000
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


@contextlib.contextmanager
def _nothing(_running: Cluster, _directory: Path) -> Iterator[None]:
    """The program has been started at its limit."""
    yield


@contextlib.contextmanager
def _connections(running: Cluster, _directory: Path) -> Iterator[None]:
    """An outsider holds this many connections to each open port, and begins no request."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with contextlib.ExitStack() as held:
        for number in range(CONNECTIONS * len(PORTS)):
            client = held.enter_context(socket.socket())
            client.settimeout(patience.seconds(10))
            client.connect(("127.0.0.1", PORTS[number % len(PORTS)]))
            if number >= hard - 200:
                break
        yield
    assert running.program.is_alive


@contextlib.contextmanager
def _full_disk(running: Cluster, directory: Path) -> Iterator[None]:
    """The disk of the log has no byte left."""
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
    mount.mkdir()
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
    """No program and no thread can be started."""
    return _control_group(running, directory, "pids.max", lambda _: 1)


def _memory(running: Cluster, directory: Path) -> contextlib.AbstractContextManager[None]:
    """Little more memory than is in use."""
    return _control_group(running, directory, "memory.max", lambda _: 8 << 20)


@contextlib.contextmanager
def _lost_notifications(running: Cluster, _directory: Path) -> Iterator[None]:
    """More notifications than the socket holds come while the program is stopped: ENOBUFS."""
    os.kill(running.program.process_id, signal.SIGSTOP)
    for verb in ("add", "delete"):
        running.lab.ip("node", *(f"address {verb} 10.99.{number // 250}.{number % 250 + 1}/32 dev lo" for number in range(3000)))
    os.kill(running.program.process_id, signal.SIGCONT)
    yield


@pytest.mark.parametrize(
    ("limit", "starter"),
    [
        pytest.param(_nothing, NEAR_LIMIT, id="descriptors"),
        pytest.param(_connections, NEAR_LIMIT, id="connections at the limit of descriptors"),
        pytest.param(_connections, ("-m", "ipvsproxy"), id="connections"),
        pytest.param(_nothing, FULL_PIPE, id="full pipe"),
        pytest.param(_full_disk, ("-m", "ipvsproxy"), id="full disk"),
        pytest.param(_processes, ("-m", "ipvsproxy"), id="processes"),
        pytest.param(_memory, ("-m", "ipvsproxy"), id="memory"),
        pytest.param(_lost_notifications, ("-m", "ipvsproxy"), id="lost notifications"),
    ],
)
def test_a_node_at_a_limit_serves_changes_answers_and_stops(limit: Limit, starter: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    with lab.Lab() as laboratory, contextlib.ExitStack() as leaving:
        laboratory.run("node", "mount", "-t", "tmpfs", "-o", "size=1m", "none", str(tmp_path / "disk"))
        leaving.callback(laboratory.run, "node", "umount", "-l", str(tmp_path / "disk"))
        (tmp_path / "disk/log").touch()
        (tmp_path / "log").symlink_to(tmp_path / "disk/log")
        cluster.clear()
        running = Cluster(laboratory, tmp_path, starter=starter)
        many = [_with_health_check(number) for number in range(1, SERVICES if starter is NEAR_LIMIT else 3)]
        running.objects = [*service("web", 200, "p1"), *(one for objects in many for one in objects)]
        running.begin("-v=4")
        leaving.callback(running.__exit__, None, None, None)
        _wait(running, lambda: all(map(_listens, PORTS)) and _status("healthz") == 200 and _served(running, 200, "p1"))
        with limit(running, tmp_path):
            with laboratory.load("p2", "TCP", "10.96.0.200", 80, interval_s=0.1) as loads:
                running.objects = [*service("web", 200, "p1", "r1"), *service("new", 201, "r1"), *running.objects[3:]]
                running.show()
                _wait(running, lambda: _served(running, 200, "p1", "r1") and _served(running, 201, "r1"))
                assert _status("livez") == 200
                running.lab.run("node", "ipvsadm", "-D", "-t", "10.96.0.201:80")
                _wait(running, lambda: _served(running, 201, "r1"))
                assert _status("livez") == 200
            assert loads[0].failed == 0, loads[0]
        began_s = time.monotonic()
        os.kill(running.program.process_id, signal.SIGTERM)
        running.program.wait_for_end(WITHIN_S)
        assert time.monotonic() - began_s < STOPPED_WITHIN_S


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


def _status(page: str) -> int:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:10256/{page}", timeout=ANSWERED_WITHIN_S) as answer:
            return int(answer.status)
    except OSError:
        return 0


def _wait(running: Cluster, reached: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WITHIN_S
    while not reached():
        assert running.program.is_alive, running.program.log_tail()
        assert time.monotonic() < deadline, running.program.log_tail()
        time.sleep(0.2)
