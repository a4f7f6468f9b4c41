"""Measurements of other processes: a small fake proxy, and ipvsproxy on the test kernel.

The real kube-proxy is not tested here; it runs only in ``KUBE_PROXY=… scripts/bench --case beside``.
"""

import contextlib
import json
import pathlib
import shlex
import socket
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import pytest

from ipvsproxy.daemon.http.health import Status
from ipvsproxy.daemon.metrics.figures import Sources
from ipvsproxy.daemon.metrics.metrics import Metrics
from ipvsproxy.model.net import Family
from ipvsproxy.reconcile.reconciler import Policy, Reconciler
from ipvsproxy.store.objects import Store
from scripts.benchmark import beside, cases, kube_proxy, outside
from tests.support import http_client, summaries

ROOT = pathlib.Path(__file__).parents[2]
FAKE = pathlib.Path(__file__).with_name("fake_proxy.py")
TINY: Mapping[str, Any] = {
    "services": 4,
    "endpoints": 3,
    "changes": 2,
    "change_pause_s": 0.05,
    "churn_changes": 20,
    "churn_per_s": 100,
    "rolling_endpoints": 120,
    "rolling_changes": 6,
    "rolling_per_s": 50,
    "scrapes": 2,
    "scrape_pause_s": 0.05,
    "idle_s": 0.2,
}


@pytest.fixture
def places(tmp_path: pathlib.Path) -> outside.Places:
    """The places at which the benchmark observes a proxy: free ports, and a file that stands in for the kernel's IPVS table."""
    with contextlib.ExitStack() as opened:
        sockets = [opened.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(2)]
        ports = [one.getsockname()[1] for one in sockets]
    return outside.Places(tmp_path / "ip_vs", *ports)


def _fake(places: outside.Places) -> str:
    return shlex.join([sys.executable, str(FAKE), f"--table={places.table}"])


def test_the_benchmark_measures_a_fake_proxy_in_each_phase(places: outside.Places) -> None:
    found = beside.run(_fake(places), places=places, **TINY)
    figures = dict(kube_proxy.compared(found, found))
    assert {key for key, _ in kube_proxy.FIGURES} == found.keys(), "each figure has a name, and each name a figure"
    assert json.loads(json.dumps(found)) == found
    assert found["started"] >= 1
    assert found["churn_started"] >= TINY["churn_changes"], "each change has a process started"
    assert found["rolling_started"] >= TINY["rolling_changes"]
    assert found["restart_started"] >= 1
    for key in ("programmed_s", "resident_mb", "change_s", "churn_p50_s", "scrape_s", "restart_s", "churn_processor_s"):
        assert found[key] > 0, key
    assert found["churn_p50_s"] <= found["churn_p99_s"]
    assert found["scrape_bytes"] > 50
    assert figures["kube-proxy relative to ipvsproxy: scrape: bytes"] == 1
    table = places.table.read_text()
    assert len(outside.serving(table)) == TINY["services"] * TINY["endpoints"] + TINY["rolling_endpoints"]


def test_a_measured_process_that_ends_is_reported_with_its_last_output(places: outside.Places) -> None:
    command = shlex.join([sys.executable, "-c", "raise SystemExit('no such table')"])
    with pytest.raises(RuntimeError, match="it ended with status 1: no such table"):
        beside.run(command, places=places, **TINY)


async def test_a_measured_process_that_ends_between_two_readings_is_reported_with_its_last_output(places: outside.Places) -> None:
    async with outside.running("sh -c 'echo no such table; exit 3'", "http://127.0.0.1:1", places) as proxy:
        await proxy._process.wait()
        for look in (proxy.spent, proxy.resident_mb):
            with pytest.raises(RuntimeError, match="it has ended: no such table"):
                look()
        with pytest.raises(RuntimeError, match=r"no good answer to /metrics: .*; no such table"):
            await proxy.scrape()


def test_the_benchmark_stops_waiting_if_the_kernel_is_not_programmed_within_the_time_limit(
    places: outside.Places, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outside, "LONGEST_S", 0.2)
    with pytest.raises(RuntimeError, match="not programmed after 0 s"):
        beside.run(shlex.join(["sh", "-c", 'test "$1" = --version || exec sleep 60', "sh"]), places=places, **TINY)


def test_a_real_server_that_gets_no_new_connections_does_not_count_as_serving() -> None:
    lines = (
        "TCP  0A60000A:0050 rr\n"
        "  -> 0A80000A:1F90      Masq    1      0          0         \n"
        "  -> 0A80000B:1F90      Masq    0      1          0         \n"
        "  -> 0A80000C:1F90      Masq    100    0          0         \n"
    )
    assert outside.serving(lines) == {"0A80000A", "0A80000C"}


def test_the_rows_of_a_measurement_name_the_measured_proxy() -> None:
    (case,) = (one for one in cases.all_cases(quick=True, kube_proxy="kube-proxy") if one.name == "beside 100x10")
    assert [arguments["command"] for _, arguments in case.measurements] == ["", "kube-proxy"]
    ours, theirs = ({key: value for key, _ in kube_proxy.FIGURES} for value in (2, 6))
    rows = {row.figure: row.value for row in case.rows([ours, theirs])}
    name = "restart: s from its start until it is in sync"
    assert rows[f"ipvsproxy: {name}"] == 2
    assert rows[f"kube-proxy: {name}"] == 6
    assert rows[f"kube-proxy relative to ipvsproxy: {name}"] == 3


async def test_a_proxy_has_synced_if_its_metrics_show_the_time_of_the_last_sync() -> None:
    metrics, now_s = Metrics(), 1.75e9
    status = Status(families=tuple(Family), sync_period_s=30, clock=lambda: now_s, wall_clock=lambda: now_s)
    sources = Sources(survey=Reconciler(Policy()).survey, store=Store(started_s=0), status=status)
    metrics.show(sources)
    assert not outside.has_synced(http_client.whole(await metrics.expose()).decode())
    metrics.synced(summaries.summary())
    assert outside.has_synced(http_client.whole(await metrics.expose()).decode())
    assert outside.has_synced("kubeproxy_sync_proxy_rules_last_timestamp_seconds 1.75e+09\n")
    assert not outside.has_synced('kubeproxy_sync_proxy_rules_last_timestamp_seconds{ip_family="IPv6"} 1.75e+09\n')
    assert not outside.has_synced("kubeproxy_sync_proxy_rules_last_timestamp_seconds 0\n")


def test_the_cost_of_a_viewer_is_the_difference_between_the_costs_with_and_without_a_viewer() -> None:
    (case,) = (one for one in cases.all_cases(quick=False) if one.name == "viewer")
    alone, watched = (
        {"processor_percent": percent, "resident_mb": megabytes} for percent, megabytes in ((5.0, 90.0), (6.5, 101.0))
    )
    rows = {row.figure: row for row in case.rows([{"alone": alone, "watched": watched, "busy": 50}])}
    assert rows["processor %, one viewer more than nobody"].value == 1.5
    assert rows["processor, one viewer, relative to nobody"].value == 1.3
    assert rows["resident MB, one viewer more than nobody"].value == 11
    assert [figure for figure, row in rows.items() if not row.ok] == ["resident MB, one viewer more than nobody"]


@pytest.mark.kernel
def test_the_cost_of_a_viewer_is_measured_while_all_services_have_traffic() -> None:
    arguments = json.dumps({"services": 20, "endpoints": 2, "seconds": 1, "warm_s": 8, "settled_s": 1})
    inside = 'mount -t sysfs sys /sys && ip link set lo up && exec "$@"'
    measure = (sys.executable, "-m", "scripts.benchmark.measure", "viewer", arguments)
    command = ("unshare", "--net", "--mount", "sh", "-c", inside, "sh", *measure)
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found.keys() == {"alone", "watched", "busy"}
    assert found["busy"] == 20
    assert found["watched"]["resident_mb"] > 0
