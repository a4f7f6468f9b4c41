"""The alerts pass promtool, the dashboard can be loaded, and every queried series exists.

The PodMonitor selects our pods and a port that they define.

A Prometheus operator and Grafana are not tested.
"""

import asyncio
import functools
import json
import pathlib
import re
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import yaml

from ipvsproxy.daemon.http.health import LATE_PERIODS, Status
from ipvsproxy.daemon.loop.leftover_removal import AnyPlace
from ipvsproxy.daemon.metrics.figures import Sources
from ipvsproxy.daemon.metrics.metrics import Metrics
from ipvsproxy.daemon.sources.source import Trouble, WatchStatus
from ipvsproxy.kernel.iptables.leftover_rules import RulesPlace
from ipvsproxy.kernel.iptables.variant import Variant
from ipvsproxy.kernel.ipvs.rows import EndpointTraffic
from ipvsproxy.model.net import Family
from ipvsproxy.model.plan import Report
from ipvsproxy.model.service import ObjectKind
from ipvsproxy.model.virtual_servers import ConnectionCounts, Counters
from ipvsproxy.store.objects import Changes
from tests.daemon.metrics.test_traffic import CLUSTER, POD, WEB, Scene
from tests.support import http_client
from tests.support.summaries import Clock, state, summary

ROOT = pathlib.Path(__file__).parents[1]
MONITORING = ROOT / "manifests" / "monitoring"
ADDED_BY_PROMETHEUS = {"cluster", "instance", "job", "node", "le"}
OF_PROMETHEUS = {"up"}
SERIES = re.compile(r"\b((?:ipvsproxy|kubeproxy|process|rest_client)_\w+|up)\b(?:\{([^}]*)\})?")
WORD = re.compile(r"[a-zA-Z_]\w*")

Object = dict[str, Any]


def _read(name: str) -> Object:
    document: Object = yaml.safe_load((MONITORING / name).read_text())
    return document


RULES = [rule for group in _read("rules.yaml")["spec"]["groups"] for rule in group["rules"]]
DASHBOARD: Object = json.loads((MONITORING / "dashboard.json").read_text())
PANELS: list[Object] = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
VARIABLES = [variable for variable in DASHBOARD["templating"]["list"] if variable["type"] == "query"]
EXPRESSIONS = {rule["alert"]: rule["expr"] for rule in RULES} | {
    f"{panel['title']} {target['refId']}": target["expr"] for panel in PANELS for target in panel["targets"]
}


class OurNode:
    """A node whose metrics page has every series of ipvsproxy.

    ``happen`` causes each kind of event that a series counts.
    """

    def __init__(self) -> None:
        self._scene = Scene(WEB, of_endpoints=True)
        self._passed = 0
        self.metrics, clock = Metrics(), Clock()
        status = Status(families=tuple(Family), sync_period_s=30, clock=clock, wall_clock=clock)
        self._watches = {kind: WatchStatus(contact_s=0) for kind in ObjectKind}
        reconciler = self._scene.reconciler
        reconciler.put_node(tuple(Family), (), None)
        left: dict[AnyPlace, bool] = {
            RulesPlace(variant, family, is_used=False): True for variant in Variant for family in Family
        }
        sources = Sources(
            survey=reconciler.survey,
            store=self._scene.store,
            status=status,
            watches=lambda: self._watches,
            leftovers=lambda: left,
            other_backend=lambda: True,
        )
        self.metrics.show(sources, self._scene.traffic)
        self.happen()

    def happen(self) -> None:
        """Cause a change, a failure, requests of all kinds, and traffic."""
        self._passed += 1
        self._scene.clock.now += 10
        self._scene.kernel.counters = {CLUSTER: Counters(*(self._passed * number for number in (1, 2, 3, 4, 5)))}
        counted = Counters(*(self._passed * number for number in (1, 2, 3, 4, 5)))
        self._scene.kernel.of_endpoints = {CLUSTER: {POD: EndpointTraffic(ConnectionCounts(1, 1), counted)}}
        self.metrics.requested("api:6443", "200", 0.1, "GET")
        self._watches[ObjectKind.SERVICE].restarts[Trouble.ENDED] += 1
        done = Report(done={("add", "address"): 1}, failed={("add", "set_entry"): 1}, errors=(), pending=0)
        triggers = tuple((family, time.time() - 0.1) for family in Family)
        self.metrics.synced(summary(Changes(triggers=triggers), states=[state()], report=done))
        for path in ("/healthz", "/livez"):
            self.metrics.health_answered(path, 200)


async def our_page() -> str:
    """A metrics page with every series of this program."""
    return http_client.whole(await OurNode().metrics.expose()).decode()


async def our_series() -> Mapping[str, set[str]]:
    """Maps the name of each series on the metrics page to the names of its labels."""
    labels: dict[str, set[str]] = {}
    for line in (await our_page()).splitlines():
        if not line.startswith("#"):
            name, _, rest = line.rpartition(" ")[0].partition("{")
            labels.setdefault(name, set()).update(re.findall(r'(\w+)="', rest))
    return labels


@pytest.fixture
def promtool() -> str:
    path = shutil.which("promtool", path=f"{ROOT / 'build'}:/usr/bin:/usr/local/bin")
    if not path:
        pytest.skip("promtool is not installed; scripts/promtool fetches Debian's")
    return path


def _run(promtool: str, *arguments: str, folder: pathlib.Path) -> None:
    done = subprocess.run([promtool, *arguments], cwd=folder, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_alert_rules_pass_promtools_check_and_their_own_tests(promtool: str, tmp_path: pathlib.Path) -> None:
    (tmp_path / "rules.yml").write_text(yaml.safe_dump(_read("rules.yaml")["spec"]))
    shutil.copy(MONITORING / "rules.test.yaml", tmp_path)
    _run(promtool, "check", "rules", "--lint-fatal", "rules.yml", folder=tmp_path)
    _run(promtool, "test", "rules", "rules.test.yaml", folder=tmp_path)


async def test_promtool_finds_no_fault_in_our_traffic_series(promtool: str) -> None:
    scene = Scene(WEB)
    scene.kernel.counters = {CLUSTER: Counters(1, 2, 3, 4, 5)}
    await scene.scrape()
    page = b"".join(scene.traffic.render(openmetrics=False))
    check = functools.partial(subprocess.run, [promtool, "check", "metrics"], capture_output=True, timeout=60, check=False)
    done = await asyncio.to_thread(check, input=page)
    assert done.returncode == 0
    assert not done.stderr


def _used(expression: str) -> Iterator[tuple[str, set[str]]]:
    """Yields the name and the labels of each series in an expression.

    The labels are those in the selector of the series and in every ``by`` of the expression.
    """
    grouped = {word for inside in re.findall(r"by \(([^)]*)\)", expression) for word in WORD.findall(inside)}
    for name, chosen in SERIES.findall(expression):
        yield name, set(re.findall(r"(\w+)=", chosen)) | grouped


@pytest.mark.parametrize("where", EXPRESSIONS)
async def test_every_queried_series_and_label_exists(where: str) -> None:
    ours = await our_series()
    used = list(_used(EXPRESSIONS[where]))
    assert used
    for name, labels in used:
        assert name in ours or name in OF_PROMETHEUS, name
        assert labels - ours.get(name, set()) <= ADDED_BY_PROMETHEUS, f"{name} has no such label"


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: str(rule["alert"]))
def test_every_alert_has_a_severity_a_summary_a_test_and_a_runbook_section(rule: Object) -> None:
    assert rule["labels"]["severity"] in {"critical", "warning", "info"}
    assert rule["annotations"]["summary"]
    tested = {case["alertname"] for test in _read("rules.test.yaml")["tests"] for case in test["alert_rule_test"]}
    assert rule["alert"] in tested
    assert len(rule["annotations"]["description"]) > len(rule["annotations"]["summary"]) / 2
    address, _, anchor = rule["annotations"]["runbook_url"].partition("#")
    assert address.startswith("https://")
    headings = re.findall(r"^### (.+)$", (ROOT / "docs/runbook.md").read_text(), re.MULTILINE)
    assert anchor in [heading.lower() for heading in headings]


def test_every_alert_says_which_node_of_which_cluster_it_is_about() -> None:
    for rule in RULES:
        for labels in re.findall(r"\bby \(([^)]*)\)", rule["expr"]):
            assert {"cluster", "node"} <= set(WORD.findall(labels)), rule["alert"]
        for labels in re.findall(r"\bon \(([^)]*)\)", rule["expr"]):
            assert "cluster" in WORD.findall(labels), rule["alert"]
        assert "or $labels.node $labels.instance" in rule["annotations"]["summary"], rule["alert"]


def test_every_query_of_the_dashboard_uses_the_variables_of_the_dashboard_to_select_series() -> None:
    assert [variable["name"] for variable in VARIABLES] == ["cluster", "job", "node", "namespace", "service"]
    for panel in PANELS:
        for target in panel["targets"]:
            for name, chosen in SERIES.findall(target["expr"]):
                used = {"cluster", "job", "node"} | ({"namespace", "service"} if "namespace" in target["expr"] else set())
                # this series needs no filter, because each query joins it to a filtered series
                if name != "ipvsproxy_build_info":
                    assert set(re.findall(r'(\w+)=~"\$\1"', chosen)) == used, panel["title"]


def test_the_alert_about_a_late_process_fires_before_the_kubelet_restarts_the_process() -> None:
    (rule,) = (rule for rule in RULES if rule["alert"] == "IpvsproxyProgrammingLate")
    (age_s,), (wait_m,) = re.findall(r"> (\d+)$", rule["expr"]), re.findall(r"^(\d+)m$", rule["for"])
    (scrape_s,) = re.findall(r"^(\d+)s$", _read("podmonitor.yaml")["spec"]["podMetricsEndpoints"][0]["interval"])
    evaluation_s = 60
    (container,) = yaml.safe_load((ROOT / "manifests/base/daemonset.yaml").read_text())["spec"]["template"]["spec"]["containers"]
    probe = container["livenessProbe"]
    unhealthy_s = LATE_PERIODS * 30
    ends_s = unhealthy_s + probe["periodSeconds"] * probe["failureThreshold"]
    assert unhealthy_s < int(age_s)
    assert int(age_s) + int(wait_m) * 60 + int(scrape_s) + evaluation_s <= ends_s


def test_grafana_can_load_the_dashboard() -> None:
    assert {"title", "uid", "schemaVersion", "panels", "templating"} <= DASHBOARD.keys()
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert [panel["title"] for panel in panels if panel["type"] == "row"] == ["Nodes not in force", "All nodes"]
    places = [tuple(panel["gridPos"][side] for side in "xywh") for panel in panels]
    for x, y, width, height in places:
        assert x + width <= 24
        others = [place for place in places if place != (x, y, width, height)]
        assert not any(x < a + c and a < x + width and y < b + d and b < y + height for a, b, c, d in others), "they overlap"
    variables = {variable["name"] for variable in DASHBOARD["templating"]["list"]} | {"__rate_interval"}
    for panel in PANELS:
        assert panel["datasource"]["uid"] == "${datasource}"
        for target in panel["targets"]:
            assert set(re.findall(r"\$(\w+)", target["expr"])) <= variables
            assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= set(WORD.findall(target["expr"]))


def test_the_pod_monitor_selects_our_pods_and_a_port_that_they_define() -> None:
    monitor = _read("podmonitor.yaml")["spec"]
    pods = yaml.safe_load((ROOT / "manifests/base/daemonset.yaml").read_text())["spec"]["template"]
    assert monitor["selector"]["matchLabels"].items() <= pods["metadata"]["labels"].items()
    (endpoint,) = monitor["podMetricsEndpoints"]
    assert endpoint["honorLabels"] is True, "otherwise namespace and endpoint would be those of the scraped pod"
    (container,) = pods["spec"]["containers"]
    assert endpoint["port"] in {port["name"] for port in container["ports"]}
