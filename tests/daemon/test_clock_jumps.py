"""Covers jumps of the machine's clock by days in both directions: the program continues, removes nothing, and stays healthy.

The tests run only on a separate kernel, because a test must not change the clock of the host.
"""

import contextlib
import pathlib
import subprocess
import time
import urllib.request
from collections.abc import Iterator

import pytest

from tests.chaos import cluster, world
from tests.support import patience, program

DAY_S = 86400.0
WITHIN_S = patience.seconds(90.0)
FLAGS = ("--hostname-override=node-a", "--cluster-cidr=10.244.0.0/16", "--conntrack-max-per-core=0")

pytestmark = [
    pytest.mark.kernel,
    pytest.mark.usefixtures("network_namespace"),
    pytest.mark.skipif("User Mode Linux" not in pathlib.Path("/proc/cpuinfo").read_text(), reason="it would be the host's clock"),
]


@contextlib.contextmanager
def jumped(by_s: float) -> Iterator[None]:
    """Set the clock ahead or back by this many seconds."""
    time.clock_settime(time.CLOCK_REALTIME, time.time() + by_s)
    try:
        yield
    finally:
        time.clock_settime(time.CLOCK_REALTIME, time.time() - by_s)


def is_served(address: str) -> bool:
    return f"-A -t {address} " in subprocess.run(["ipvsadm", "-Sn"], capture_output=True, text=True, check=True).stdout


def is_healthy() -> bool:
    with urllib.request.urlopen("http://127.0.0.1:10256/healthz", timeout=patience.seconds(60)) as answer:
        return bool(answer.status == 200)


def test_changes_are_programmed_and_drift_is_repaired_while_the_clock_is_wrong(tmp_path: pathlib.Path) -> None:
    objects = list(world.anchors())
    web = next(item for item in objects if item["metadata"]["name"] == "anchor")
    with contextlib.ExitStack() as running:
        server = cluster.Server(tmp_path)
        running.callback(server.close)
        server.apply(objects, ())
        here = running.enter_context(program.Program(None, tmp_path / "log", server.flag, *FLAGS))
        here.wait_until_synced()
        for number, by_s in enumerate((DAY_S, -DAY_S), start=50):
            with jumped(by_s):
                address = f"10.96.0.{number}"
                spec = web["spec"] | {"clusterIP": address, "clusterIPs": [address]}
                server.apply([web | {"metadata": {"name": f"s{number}", "namespace": "default"}, "spec": spec}], ())
                here.wait_until(lambda place=f"{address}:80": is_served(place), "served", WITHIN_S)  # type: ignore[misc]  # mypy cannot infer lambdas
                subprocess.run(["ipvsadm", "-D", "-t", "10.96.0.20:80"], check=True)
                here.wait_until(lambda: is_served("10.96.0.20:80"), "repaired", WITHIN_S)
                assert is_healthy()
        assert is_served("10.96.0.10:80")
        assert "level=error" not in (tmp_path / "log").read_text()
