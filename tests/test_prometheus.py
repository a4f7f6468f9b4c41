"""A real Prometheus scrapes our metrics page, returns series for each query of the dashboard, and evaluates each alert.

The program's own HTTP server sends the metrics page of a node. Each kind of event that a series counts has happened on this node
at least once (see tests/test_monitoring.py). Two jobs scrape the page: our own job, and the job kube-proxy. Both jobs set the
labels that the Prometheus operator would set. The queries and alerts of kubernetes-mixin are evaluated for the job kube-proxy.
"""

import asyncio
import contextlib
import math
import pathlib
import re
import shutil
import subprocess
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
import yaml

from ipvsproxy.daemon.http import server
from ipvsproxy.daemon.http.server import Answer
from ipvsproxy.model.net import parse_address
from tests.support import loopback
from tests.test_monitoring import MONITORING, PANELS, ROOT, RULES, VARIABLES, OurNode

SCRAPES = 4
WITHIN_S = 300
QUERIES = [(panel["title"], target["refId"], target["expr"]) for panel in PANELS for target in panel["targets"]]
QUIET = {"Entries of sets", "Which nodes, and why"}
"""Panels that show nothing while a cluster has no problem."""
COMPARED = re.compile(r" (?:>|==) [^>=]+$")
JOBS = ("kube-system/ipvsproxy", "kube-proxy")
LABELS = {
    "cluster": "one",
    "node": "worker-1",
    "namespace": "kube-system",
    "pod": "p",
    "container": "ipvsproxy",
    "endpoint": "metrics",
}
"""The labels of the target. Relabelling adds ``node``, a Prometheus server that scrapes several clusters needs ``cluster``, and a
PodMonitor adds all other labels."""
OF_KUBE_PROXY = 'cluster="one", job="kube-proxy"'
MIXIN = {
    "Up": "sum(up{S})",
    "Rules Sync Rate": 'sum(rate(kubeproxy_sync_proxy_rules_duration_seconds_count{S, instance=~".*"}[W]))',
    "Rule Sync Latency 99th Quantile": (
        'histogram_quantile(0.99,rate(kubeproxy_sync_proxy_rules_duration_seconds_bucket{S, instance=~".*"}[W]))'
    ),
    "Network Programming Rate": 'sum(rate(kubeproxy_network_programming_duration_seconds_count{S, instance=~".*"}[W]))',
    "Network Programming Latency 99th Quantile": (
        "histogram_quantile(0.99, sum(rate("
        'kubeproxy_network_programming_duration_seconds_bucket{S, instance=~".*"}[W])) by (instance, le))'
    ),
    "Kube API Request Rate 2xx": 'sum(rate(rest_client_requests_total{S, instance=~".*",code=~"2.."}[W]))',
    "Kube API Request Rate 3xx": 'sum(rate(rest_client_requests_total{S, instance=~".*",code=~"3.."}[W]))',
    "Kube API Request Rate 4xx": 'sum(rate(rest_client_requests_total{S, instance=~".*",code=~"4.."}[W]))',
    "Kube API Request Rate 5xx": 'sum(rate(rest_client_requests_total{S, instance=~".*",code=~"5.."}[W]))',
    "Post Request Latency 99th Quantile": (
        'histogram_quantile(0.99, sum(rate(rest_client_request_duration_seconds_bucket{S,instance=~".*",verb="POST"}[W]))'
        " by (verb, url, le))"
    ),
    "Get Request Latency 99th Quantile": (
        'histogram_quantile(0.99, sum(rate(rest_client_request_duration_seconds_bucket{S, instance=~".*", verb="GET"}[W]))'
        " by (verb, url, le))"
    ),
    "Memory": 'process_resident_memory_bytes{S,instance=~".*"}',
    "CPU usage": 'rate(process_cpu_seconds_total{S,instance=~".*"}[W])',
}
"""The queries of the dashboard "Kubernetes / Proxy" of kubernetes-mixin (dashboards/proxy.libsonnet). S stands for the selectors
of a query, and W for the range 5m. The panel "Goroutines" is left out, because a program in Python has no goroutines."""

Object = dict[str, Any]


class Prometheus:
    """Sends queries to the Prometheus on this port."""

    def __init__(self, port: int) -> None:
        self._port = port

    async def get(self, path: str, **parameters: str) -> Any:
        url = f"http://{loopback.HOST}:{self._port}/api/v1/{path}"
        async with aiohttp.ClientSession() as session, session.get(url, params=parameters) as response:
            answer = await response.json(content_type=None)
        assert answer["status"] == "success", answer
        return answer["data"]

    async def query(self, expression: str) -> list[Object]:
        rows: list[Object] = (await self.get("query", query=expression))["result"]
        return rows

    async def wait_for_scrapes(self) -> None:
        async with asyncio.timeout(WITHIN_S):
            while True:
                with contextlib.suppress(aiohttp.ClientError, ValueError):  # Prometheus does not listen yet, or has no data yet
                    rows = await self.query("count_over_time(ipvsproxy_build_info[1h])")
                    if len(rows) == len(JOBS) and all(int(row["value"][1]) >= SCRAPES for row in rows):
                        return
                await asyncio.sleep(0.2)

    async def wait_until_up(self) -> None:
        """Wait until the last scrape of each target has succeeded; on a busy machine, a scrape may take longer than a second."""
        async with asyncio.timeout(WITHIN_S):
            while True:
                targets = (await self.get("targets"))["activeTargets"]
                if [(target["health"], target["lastError"]) for target in targets] == [("up", "")] * len(JOBS):
                    return
                await asyncio.sleep(0.2)


@pytest.fixture
async def prometheus(tmp_path: pathlib.Path) -> AsyncIterator[Prometheus]:
    """A Prometheus that has our alerts, and has scraped our page several times."""
    program = shutil.which("prometheus", path=f"{ROOT / 'build'}:/usr/bin:/usr/local/bin")
    if program is None:
        pytest.skip("prometheus is not installed; scripts/promtool fetches that of Debian")
    (ours, port), node = loopback.free_ports(2), OurNode()

    async def answer(request: server.Request) -> Answer:
        node.happen()
        for code, verb in (("304", "GET"), ("404", "GET"), ("500", "GET"), ("201", "POST")):
            node.metrics.requested("api:6443", code, 0.1, verb)
        return await node.metrics.expose(request.headers.get("accept", ""), request.headers.get("accept-encoding", ""))

    (tmp_path / "rules.yml").write_text(yaml.safe_dump(yaml.safe_load((MONITORING / "rules.yaml").read_text())["spec"]))
    (endpoint,) = yaml.safe_load((MONITORING / "podmonitor.yaml").read_text())["spec"]["podMetricsEndpoints"]
    targets = [{"targets": [f"{loopback.HOST}:{ours}"], "labels": LABELS}]
    scrapes = [{"job_name": job, "honor_labels": endpoint["honorLabels"], "static_configs": targets} for job in JOBS]
    timing = {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"}
    configuration = {"global": timing, "rule_files": ["rules.yml"], "scrape_configs": scrapes}
    (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(configuration))
    flags = ("--config.file=prometheus.yml", "--storage.tsdb.path=data", f"--web.listen-address={loopback.HOST}:{port}")
    serving = asyncio.create_task(server.serve("metrics", parse_address(loopback.HOST), ours, answer, hard_fail=True))
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen((program, *flags), cwd=tmp_path, stdout=log, stderr=log)  # noqa: ASYNC220 - the test does not wait for this process
    try:
        asked = Prometheus(port)
        await asked.wait_for_scrapes()
        yield asked
    finally:
        process.kill()
        await asyncio.to_thread(process.wait)
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)


CHOSEN = {"cluster": "one", "job": "|".join(sorted(JOBS)), "node": "worker-1", "namespace": "default", "service": "web"}
"""For each variable of the dashboard, a value that selects all series of this test."""


def filled(expression: str, chosen: str | None) -> str:
    """The expression with ``chosen`` in place of every variable, or with the values of ``CHOSEN`` if ``chosen`` is None."""
    return re.sub(r"\$(\w+)", lambda name: chosen or CHOSEN[name[1]], expression.replace("$__rate_interval", "30s"))


async def test_every_query_of_the_dashboard_returns_series_and_every_alert_is_evaluated(prometheus: Prometheus) -> None:
    for variable in VARIABLES:
        series, label = re.fullmatch(r"label_values\((\w+(?:\{.*\})?), (\w+)\)", variable["query"]).groups()  # type: ignore[union-attr]
        values = await prometheus.get(f"label/{label}/values", **{"match[]": filled(series, ".*")})
        assert set(values) == set(CHOSEN[variable["name"]].split("|")), variable["name"]
    for title, reference, expression in QUERIES:
        for chosen in (None, ".*"):
            query = filled(expression, chosen)
            rows = await prometheus.query(COMPARED.sub("", query) if title in QUIET else query)
            assert rows, f"{title} {reference}: {query}"
            assert any(math.isfinite(float(row["value"][1])) for row in rows), f"{title} {reference} has no figures"

    for rule in RULES:
        plain = COMPARED.sub("", rule["expr"])
        assert plain != rule["expr"]
        assert await prometheus.query(plain), f"{rule['alert']} would never fire: {plain} gives nothing"
    (group,) = (await prometheus.get("rules"))["groups"]
    assert [(rule["name"], rule["health"], rule.get("lastError", "")) for rule in group["rules"]] == [
        (rule["alert"], "ok", "") for rule in RULES
    ]
    await prometheus.wait_until_up()


async def test_the_dashboard_and_alerts_of_kubernetes_mixin_find_our_series_under_the_job_kube_proxy(
    prometheus: Prometheus,
) -> None:
    for title, expression in MIXIN.items():
        query = expression.replace("{S", "{" + OF_KUBE_PROXY).replace("[W]", "[30s]")
        rows = await prometheus.query(query)
        assert rows, f"{title}: {query}"
        assert all(math.isfinite(float(row["value"][1])) for row in rows), title
    await prometheus.wait_until_up()
    assert await prometheus.query('absent(up{job="kube-proxy"} == 1)') == [], "KubeProxyDown would fire"
    assert await prometheus.query('absent(up{job="kube-proxies"} == 1)') != [], "and does for a job that is absent"
