"""A real Prometheus scrapes our page over HTTP: each query of the dashboard returns series, each alert is evaluated.

The page is that of a node on which every event happens (tests/test_monitoring.py); the program's own server answers.
"""

import asyncio
import contextlib
import math
import pathlib
import re
import shutil
import socket
import subprocess
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
import yaml

from ipvsproxy.daemon.http import server
from ipvsproxy.daemon.http.server import Answer
from ipvsproxy.model.net import parse_address
from tests.test_monitoring import DASHBOARD, MONITORING, PANELS, ROOT, RULES, OurNode

LOOPBACK = parse_address("127.0.0.1")
SCRAPES = 4
WITHIN_S = 60
QUERIES = [(panel["title"], target["refId"], target["expr"]) for panel in PANELS for target in panel["targets"]]
QUIET = {"Entries of sets"}
"""Panels that are intentionally empty in a quiet cluster."""
COMPARED = re.compile(r" (?:>|==) [^>=]+$")

Object = dict[str, Any]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


class Prometheus:
    """Queries a Prometheus on this port."""

    def __init__(self, port: int) -> None:
        self._port = port

    async def get(self, path: str, **parameters: str) -> Any:
        url = f"http://127.0.0.1:{self._port}/api/v1/{path}"
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
                with contextlib.suppress(aiohttp.ClientError, ValueError):  # not listening yet, or without data
                    (row,) = await self.query("count_over_time(ipvsproxy_build_info[1h])")
                    if int(row["value"][1]) >= SCRAPES:
                        return
                await asyncio.sleep(0.2)


@pytest.fixture
async def prometheus(tmp_path: pathlib.Path) -> AsyncIterator[Prometheus]:
    """A Prometheus with our alerts that has scraped our page several times."""
    program = shutil.which("prometheus", path=f"{ROOT / 'build'}:/usr/bin:/usr/local/bin")
    if program is None:
        pytest.skip("prometheus is not installed; scripts/promtool fetches that of Debian")
    ours, port, node = free_port(), free_port(), OurNode()

    async def answer(request: server.Request) -> Answer:
        node.happen()
        return await node.metrics.expose(request.headers.get("accept", ""), request.headers.get("accept-encoding", ""))

    (tmp_path / "rules.yml").write_text(yaml.safe_dump(yaml.safe_load((MONITORING / "rules.yaml").read_text())["spec"]))
    scrape = {"job_name": "kube-system/ipvsproxy", "static_configs": [{"targets": [f"127.0.0.1:{ours}"]}]}
    timing = {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"}
    configuration = {"global": timing, "rule_files": ["rules.yml"], "scrape_configs": [scrape]}
    (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(configuration))
    flags = ("--config.file=prometheus.yml", "--storage.tsdb.path=data", f"--web.listen-address=127.0.0.1:{port}")
    serving = asyncio.create_task(server.serve("metrics", LOOPBACK, ours, answer, hard_fail=True))
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen((program, *flags), cwd=tmp_path, stdout=log, stderr=log)  # noqa: ASYNC220 - not waited for
    try:
        asked = Prometheus(port)
        await asked.wait_for_scrapes()
        yield asked
    finally:
        process.kill()
        await asyncio.to_thread(process.wait)
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)


async def test_every_query_of_the_dashboard_returns_series_and_every_alert_is_evaluated(prometheus: Prometheus) -> None:
    (variable,) = (one for one in DASHBOARD["templating"]["list"] if one["name"] == "instance")
    series, label = re.fullmatch(r"label_values\((\w+), (\w+)\)", variable["query"]).groups()  # type: ignore[union-attr]
    (node,) = await prometheus.get(f"label/{label}/values", **{"match[]": series})
    for title, reference, expression in QUERIES:
        for chosen in (node, variable["allValue"]):
            rows = await prometheus.query(expression.replace("$__rate_interval", "30s").replace("$instance", chosen))
            if title in QUIET:
                rows = await prometheus.query(COMPARED.sub("", expression.replace("$instance", chosen)))
            assert rows, f"{title} {reference}: {expression}"
            assert any(math.isfinite(float(row["value"][1])) for row in rows), f"{title} {reference} has no figures"

    for rule in RULES:
        plain = COMPARED.sub("", rule["expr"])
        assert plain != rule["expr"]
        assert await prometheus.query(plain), f"{rule['alert']} would never fire: {plain} gives nothing"
    (group,) = (await prometheus.get("rules"))["groups"]
    assert [(rule["name"], rule["health"], rule.get("lastError", "")) for rule in group["rules"]] == [
        (rule["alert"], "ok", "") for rule in RULES
    ]
    (target,) = (await prometheus.get("targets"))["activeTargets"]
    assert (target["health"], target["lastError"]) == ("up", "")
