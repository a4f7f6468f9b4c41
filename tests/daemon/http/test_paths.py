"""Covers the pages of the health server and of the metrics server, byte for byte and over real HTTP.

``tests/test_golden.py`` compares the answers of both servers with the answers recorded from kube-proxy.
"""

import contextlib
import dataclasses
import importlib.metadata
import json
import re
from collections.abc import Coroutine
from unittest.mock import AsyncMock

import pytest

from ipvsproxy.config import file
from ipvsproxy.config.settings import ListenAddress, Servers
from ipvsproxy.daemon.base import log
from ipvsproxy.daemon.http import health_check_node_ports, paths, server
from ipvsproxy.daemon.http.health import Status
from ipvsproxy.daemon.http.paths import MetricsPaths
from ipvsproxy.daemon.metrics.figures import Sources
from ipvsproxy.daemon.metrics.metrics import Metrics
from ipvsproxy.model.net import Family, parse_address
from ipvsproxy.model.plan import Report
from ipvsproxy.model.service import ServiceName
from ipvsproxy.reconcile.reconciler import Policy, Reconciler
from ipvsproxy.store.objects import Store
from tests.config import loading
from tests.daemon.http.test_server import listening
from tests.support import builders, http_client, summaries
from tests.support.summaries import Clock, summary

BOTH = (Family.IPV4, Family.IPV6)
LOOPBACK = parse_address("127.0.0.1")
ANYWHERE = ListenAddress(LOOPBACK, 0)


class Node:
    """A node with servers on two loopback ports."""

    def __init__(self, servers: Servers | None = None, *flags: str, ui: server.Handler | None = None) -> None:
        self.clock = Clock()
        self.status = Status(families=BOTH, sync_period_s=30, clock=self.clock, wall_clock=lambda: 1_795_255_200.0)
        self.status.node = builders.node()
        self.metrics = Metrics()
        config = loading.from_flags("--ipvs-scheduler=wrr", *flags)
        self.config = dataclasses.replace(config, servers=servers or config.servers)
        self.answer_health = paths.health_server(lambda: self.config, self.status, self.metrics.health_answered)
        self.metrics_routes = MetricsPaths(lambda: self.config, self.metrics.expose, ui)
        reconciler = Reconciler(Policy())
        sources = Sources(survey=reconciler.survey, store=Store(started_s=0), status=self.status)
        self.metrics.show(sources)

    def sync(self) -> None:
        self.status.queued(self.clock.now)
        self.status.syncing(self.clock.now)
        self.status.synced(summary())

    def servers(self) -> list[Coroutine[None, None, None]]:
        return list(paths.servers(self.config.servers, self.answer_health, self.metrics_routes.answer))


def _health(node: Node) -> contextlib.AbstractAsyncContextManager[int]:
    return listening(node.answer_health)


def _metrics(node: Node) -> contextlib.AbstractAsyncContextManager[int]:
    return listening(node.metrics_routes.answer)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/healthz", b"ok"),
        ("/healthz/ping", b"ok"),
        ("/healthz?verbose", b"[+]ping ok\nhealthz check passed\n"),
        ("/proxyMode", b"ipvs"),
        ("/nothing", b"404 page not found\n"),
    ],
)
async def test_the_metrics_server_returns_the_same_simple_pages_and_404_page_as_kube_proxy(path: str, body: bytes) -> None:
    async with _metrics(Node()) as port:
        assert (await http_client.ask(port, path)).body == body


async def test_configz_shows_the_applied_configuration() -> None:
    async with _metrics(Node()) as port:
        document = json.loads((await http_client.ask(port, "/configz")).body)
    shown = document["kubeproxy.config.k8s.io"]
    assert (shown["apiVersion"], shown["kind"]) == ("kubeproxy.config.k8s.io/v1alpha1", "KubeProxyConfiguration")
    assert shown["ipvs"]["scheduler"] == "wrr"


async def test_answers_of_the_health_server_are_counted_in_the_scraped_metrics() -> None:
    node = Node()
    async with _health(node) as health, _metrics(node) as metrics:
        assert (await http_client.ask(health, "/healthz")).status == 503
        node.sync()
        assert (await http_client.ask(health, "/healthz")).status == 200
        assert (await http_client.ask(health, "/livez")).status == 200
        page = (await http_client.ask(metrics, "/metrics")).body.decode()
    assert 'kubeproxy_proxy_healthz_total{code="503"} 1.0' in page
    assert 'kubeproxy_proxy_healthz_total{code="200"} 1.0' in page
    assert 'kubeproxy_proxy_livez_total{code="200"} 1.0' in page


async def test_a_server_without_an_address_is_not_started() -> None:
    for address, count in ((ANYWHERE, 2), (None, 0)):
        servers = Node(Servers(health=address, metrics=address)).servers()
        for one in servers:
            one.close()
        assert len(servers) == count


async def test_the_program_ends_if_bind_address_hard_fail_is_set_and_a_server_address_is_in_use() -> None:
    async with _health(Node()) as taken:
        node = Node(Servers(health=ListenAddress(LOOPBACK, taken), metrics=None, bind_hard_fail=True))
        (health,) = node.servers()
        with pytest.raises(server.BindError, match=f"the health server cannot listen on 127.0.0.1:{taken}"):
            await health


async def test_the_metrics_server_counts_its_health_checks_until_a_delete_request_resets_the_count() -> None:
    async with _metrics(Node()) as port:
        assert (await http_client.ask(port, "/metrics/slis")).body == b""
        for path in ("/healthz", "/healthz/ping", "/healthz?verbose"):
            await http_client.ask(port, path)
        response = await http_client.ask(port, "/metrics/slis")
        assert b'\nkubernetes_healthchecks_total{name="ping",status="success",type="healthz"} 3\n' in response.body
        assert b'\nkubernetes_healthcheck{name="ping",type="healthz"} 1\n' in response.body
        assert (await http_client.ask(port, "/metrics/slis", method="DELETE")).body == b""


async def test_the_index_page_of_the_metrics_server_has_links_to_the_other_pages() -> None:
    show = AsyncMock(return_value=paths.OK_PAGE)
    async with _metrics(Node(ui=show)) as port:
        first = (await http_client.ask(port, "/")).body.decode()
        links = re.findall('href="(.*?)">/', first)
        assert "ui/" in links
        assert "metrics/slis" in links
        assert {(await http_client.ask(port, f"/{path}")).status for path in links} == {200}
    async with _metrics(Node(None, "--ui=false", ui=show)) as port:
        assert "ui/" not in (await http_client.ask(port, "/")).body.decode()


async def test_the_pages_flagz_and_statusz_are_readable_plain_text() -> None:
    async with _metrics(Node()) as port:
        flags = (await http_client.ask(port, "/flagz")).body.decode()
        status = (await http_client.ask(port, "/statusz")).body.decode()
    assert "\nipvs-scheduler=wrr\n" in flags
    assert "\nipvs-sync-period=30s\n" in flags
    assert re.search(r"\nUp: 0 hr 00 min 0\d sec\n", status)
    assert "/metrics/slis" in status


@pytest.mark.parametrize(
    ("flag", "method", "level", "code"),
    [
        ("--profiling", "PUT", "5", 200),
        *(("--profiling", "PUT", level, 400) for level in ("much", "-1", "2147483648")),
        ("--profiling", "GET", "", 406),
        ("--profiling=false", "PUT", "5", 404),
    ],
)
async def test_a_put_request_sets_the_verbosity_only_if_profiling_is_enabled(
    monkeypatch: pytest.MonkeyPatch, flag: str, method: str, level: str, code: int
) -> None:
    put: list[int] = []
    monkeypatch.setattr(log, "set_up", lambda *, json, verbosity: put.append(verbosity))
    async with _metrics(Node(Servers(health=None, metrics=ANYWHERE), flag)) as port:
        headers = f"Content-Length: {len(level)}\r\n\r\n{level}"
        response = await http_client.ask(port, "/debug/flags/v", method=method, headers=headers)
    assert (response.status, put) == (code, [5] if code == 200 else [])


async def test_the_page_of_the_node_is_served_unless_the_configuration_turns_it_off() -> None:
    show = AsyncMock(return_value=paths.OK_PAGE)
    node = Node(ui=show)
    requests = [server.Request(path, {}, {}) for path in ("/ui", "/ui/", "/ui/page.js", "/ui/api/node.json", "/uix", "/healthz")]
    for is_served in (True, False):
        node.config = loading.from_flags(f"--ui={str(is_served).lower()}")
        statuses = [(await node.metrics_routes.answer(request)).status for request in requests]
        assert statuses == [*[200 if is_served else 404] * 4, 404, 200]
    assert [awaited.args for awaited in show.await_args_list] == [(request,) for request in requests[:4]]


NOW_S = 1_795_255_200.25
UPDATED_S = NOW_S - 10
NOW = "2026-11-21T10:00:00.25Z"
UPDATED = "2026-11-21T09:59:50.25Z"
HEADERS = {"Content-Type": "application/json", "X-Content-Type-Options": "nosniff"}


UPDATES = {Family.IPV6: UPDATED_S - 1, Family.IPV4: UPDATED_S}


def test_the_health_answer_gives_the_current_time_as_last_update_if_the_node_has_no_faults() -> None:
    assert paths.healthz(summaries.status(NOW_S, UPDATES))[:3] == (
        200,
        (
            f'{{"lastUpdated":"{NOW}","currentTime":"{NOW}","nodeEligible":true,"healthy":true,"status":{{'
            f'"IPv4":{{"lastUpdated":"{UPDATED}","healthy":true}},'
            '"IPv6":{"lastUpdated":"2026-11-21T09:59:49.25Z","healthy":true}}}'
        ).encode(),
        HEADERS,
    )


def test_healthz_of_a_healthy_node_lists_unreadable_parts_and_unmet_settings_and_leftovers() -> None:
    unread, left, unmet = ("list sets: EIO",), ("our objects in the other backend stay: EBUSY",), {"net/ipv4/ip_forward": "0"}
    answer = paths.healthz(summaries.status(NOW_S, UPDATES, unreadable=unread, leftovers=left, unmet_settings=unmet))
    document = json.loads(answer.body)
    assert answer.status == 200
    assert (document["unreadable"], document["leftovers"], document["unmetSettings"]) == (list(unread), list(left), unmet)


async def test_the_health_answer_has_the_field_ipvsproxy_only_if_the_query_is_verbose() -> None:
    node = Node()
    node.sync()
    async with _health(node) as port:
        plain = json.loads((await http_client.ask(port, "/healthz")).body)
        first = json.loads((await http_client.ask(port, "/healthz?verbose")).body)
        node.status.synced(
            dataclasses.replace(summary(report=Report(done={}, failed={}, errors=(), pending=2)), drifted={"address": 1})
        )
        second = json.loads((await http_client.ask(port, "/livez?verbose")).body)
    me = first.pop("ipvsproxy")
    assert plain == first
    assert me == {
        "version": importlib.metadata.version("ipvsproxy"),
        "configuration": file.digest(node.config),
        "pending": 0,
        "lastDrift": "0001-01-01T00:00:00Z",
    }
    assert second["ipvsproxy"] == me | {"pending": 2, "lastDrift": "2026-11-21T10:00:00Z"}


def test_only_healthz_answers_503_if_a_healthy_node_is_not_eligible() -> None:
    answer = paths.livez(summaries.status(NOW_S, UPDATES, eligible=False))
    assert answer.status == 200
    assert answer.body.startswith(f'{{"lastUpdated":"{NOW}","currentTime":"{NOW}","healthy":true,"status":'.encode())
    answer = paths.healthz(summaries.status(NOW_S, UPDATES, eligible=False))
    assert answer.status == 503
    assert answer.body.startswith(
        f'{{"lastUpdated":"{UPDATED}","currentTime":"{NOW}","nodeEligible":false,"healthy":true,'.encode()
    )


def test_if_a_family_is_late_health_answers_show_the_last_update_and_the_unhealthy_family() -> None:
    for page in (paths.healthz, paths.livez):
        answer = page(summaries.status(NOW_S, UPDATES, late=[Family.IPV6]))
        document = json.loads(answer.body)
        assert answer.status == 503
        assert (document["lastUpdated"], document["healthy"]) == (UPDATED, False)
        assert [document["status"][family]["healthy"] for family in ("IPv4", "IPv6")] == [True, False]


def test_the_health_answer_has_no_family_status_before_the_first_sync() -> None:
    health = summaries.status(NOW_S, {}, eligible=False)
    assert paths.healthz(health).body == (
        f'{{"lastUpdated":"0001-01-01T00:00:00Z","currentTime":"{NOW}","nodeEligible":false,"healthy":true}}'.encode()
    )


def test_the_answer_of_a_health_check_port_is_indented_json_with_a_weight_header() -> None:
    assert health_check_node_ports.service_health(ServiceName("ns1", "svc1"), 2, is_healthy=True)[:3] == (
        200,
        (
            b'{\n\t"service": {\n\t\t"namespace": "ns1",\n\t\t"name": "svc1"\n\t},\n'
            b'\t"localEndpoints": 2,\n\t"serviceProxyHealthy": true\n}'
        ),
        HEADERS | {"X-Load-Balancing-Endpoint-Weight": "2"},
    )


@pytest.mark.parametrize(("count", "healthy"), [(0, True), (1, False), (0, False)])
def test_a_health_check_port_answers_503_if_no_endpoint_is_local_or_the_node_is_unhealthy(count: int, *, healthy: bool) -> None:
    answer = health_check_node_ports.service_health(ServiceName("ns1", "svc1"), count, is_healthy=healthy)
    assert answer.status == 503
    assert answer.headers["X-Load-Balancing-Endpoint-Weight"] == str(count)
    assert json.loads(answer.body)["serviceProxyHealthy"] is healthy


@pytest.mark.parametrize(
    ("epoch_s", "text"),
    [
        (0, "1970-01-01T00:00:00Z"),
        (NOW_S, NOW),
        (1_795_255_199.999, "2026-11-21T09:59:59.999Z"),
        (1_795_255_199.000001, "2026-11-21T09:59:59.000001Z"),
        (1_795_255_199.9999999, "2026-11-21T10:00:00Z"),
    ],
)
def test_times_are_printed_with_only_the_digits_that_they_need(epoch_s: float, text: str) -> None:
    assert paths.render_time(epoch_s) == text
