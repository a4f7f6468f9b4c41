"""Covers the health server and the metrics server over real HTTP."""

import contextlib
import dataclasses
import json
import re
from collections.abc import AsyncIterator, Coroutine

import pytest

from ipvsproxy.config.settings import ListenAddress, Servers
from ipvsproxy.daemon.base import log
from ipvsproxy.daemon.http import answers, routes, server
from ipvsproxy.daemon.http.health import Status
from ipvsproxy.daemon.http.routes import HealthRoutes, MetricsRoutes
from ipvsproxy.daemon.metrics.figures import Sources
from ipvsproxy.daemon.metrics.metrics import Metrics
from ipvsproxy.model.net import Family, parse_address
from ipvsproxy.reconcile.reconciler import Policy, Reconciler
from ipvsproxy.store.objects import Store
from tests.config import loading
from tests.support import builders, golden_fixtures, http_client
from tests.support.summaries import Clock, summary

pytestmark = pytest.mark.timeout(30)

BOTH = (Family.IPV4, Family.IPV6)
LOOPBACK = parse_address("127.0.0.1")
ANYWHERE = ListenAddress(LOOPBACK, 0)
RECORDED = golden_fixtures.recording("default", "P0")["health"]


class Node:
    """A node that serves two ports of loopback."""

    def __init__(self, servers: Servers | None = None) -> None:
        self.clock = Clock()
        self.status = Status(families=BOTH, sync_period_s=30, clock=self.clock, wall_clock=lambda: 1_795_255_200.0)
        self.status.node = builders.node()
        self.metrics = Metrics()
        config = loading.from_flags("--ipvs-scheduler=wrr")
        self.config = dataclasses.replace(config, servers=servers or config.servers)
        self.health_routes = HealthRoutes(self.status.health, self.metrics.healthz, self.metrics.livez)
        self.metrics_routes = MetricsRoutes(self.config, self.metrics.expose)
        reconciler = Reconciler(Policy())
        sources = Sources(survey=reconciler.survey, store=Store(started_s=0), status=self.status, clock=self.clock)
        self.metrics.show(BOTH, sources)

    def sync(self) -> None:
        self.status.queued(self.clock.now)
        self.status.syncing(self.clock.now)
        self.status.synced(summary())

    def servers(self) -> list[Coroutine[None, None, None]]:
        return list(routes.servers(self.config.servers, self.health_routes.answer, self.metrics_routes.answer))


@contextlib.asynccontextmanager
async def _health(node: Node) -> AsyncIterator[int]:
    listener = await server.listen(LOOPBACK, 0, node.health_routes.answer)
    yield listener.port
    await listener.close()


@contextlib.asynccontextmanager
async def _metrics(node: Node) -> AsyncIterator[int]:
    listener = await server.listen(LOOPBACK, 0, node.metrics_routes.answer)
    yield listener.port
    await listener.close()


@pytest.mark.parametrize("path", ["/healthz", "/livez", "/"])
async def test_the_health_server_answers_as_recorded(path: str) -> None:
    node = Node()
    node.sync()
    recorded = RECORDED[f"10256{path}"]
    async with _health(node) as port:
        response = await http_client.ask(port, path)
    assert (response.status, response.headers["Content-Type"]) == (recorded["code"], recorded["content_type"])
    if "body" in recorded:
        time = '"2026-11-21T10:00:00Z"'
        assert json.loads(response.body.decode().replace(time, '"TIME"')) == recorded["body"]
        assert response.headers["X-Content-Type-Options"] == "nosniff"


@pytest.mark.parametrize("path", ["/healthz", "/proxyMode", "/configz", "/nothing"])
async def test_the_metrics_server_answers_as_recorded(path: str) -> None:
    recorded = RECORDED[f"10249{path}"]
    async with _metrics(Node()) as port:
        response = await http_client.ask(port, path)
    assert (response.status, response.headers["Content-Type"]) == (recorded["code"], recorded["content_type"])
    if "body" in recorded:
        assert response.body.decode() == recorded["body"]


async def test_a_missing_page_has_gos_body() -> None:
    async with _metrics(Node()) as port:
        assert (await http_client.ask(port, "/nothing")).body == b"404 page not found\n"


@pytest.mark.parametrize(
    ("path", "body"), [("/healthz/ping", b"ok"), ("/healthz?verbose", b"[+]ping ok\nhealthz check passed\n")]
)
async def test_the_metrics_server_has_a_health_check(path: str, body: bytes) -> None:
    async with _metrics(Node()) as port:
        assert (await http_client.ask(port, path)).body == body


async def test_configz_shows_the_configuration_in_force() -> None:
    async with _metrics(Node()) as port:
        document = json.loads((await http_client.ask(port, "/configz")).body)
    shown = document["kubeproxy.config.k8s.io"]
    assert (shown["apiVersion"], shown["kind"]) == ("kubeproxy.config.k8s.io/v1alpha1", "KubeProxyConfiguration")
    assert shown["ipvs"]["scheduler"] == "wrr"


async def test_answers_of_the_health_server_can_be_scraped() -> None:
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


async def test_a_process_that_is_about_to_stop_is_unavailable_on_both_paths() -> None:
    node = Node()
    node.sync()
    node.status.stop()
    async with _health(node) as port:
        for path in ("/healthz", "/livez"):
            assert (await http_client.ask(port, path)).status == 503


async def test_a_server_without_an_address_does_not_exist() -> None:
    both, none = Node(Servers(health=ANYWHERE, metrics=ANYWHERE)), Node(Servers(health=None, metrics=None))
    assert [_count(node) for node in (both, none)] == [2, 0]


async def test_an_address_in_use_is_fatal_if_the_configuration_says_so() -> None:
    async with _health(Node()) as taken:
        node = Node(Servers(health=ListenAddress(LOOPBACK, taken), metrics=None, bind_hard_fail=True))
        (health,) = node.servers()
        with pytest.raises(server.BindError, match=f"the health server cannot listen on 127.0.0.1:{taken}"):
            await health


async def test_health_checks_of_the_metrics_server_are_counted_and_delete_resets_the_count() -> None:
    async with _metrics(Node()) as port:
        assert (await http_client.ask(port, "/metrics/slis")).body == b""
        for path in ("/healthz", "/healthz/ping", "/healthz?verbose"):
            await http_client.ask(port, path)
        response = await http_client.ask(port, "/metrics/slis")
        assert b'\nkubernetes_healthchecks_total{name="ping",status="success",type="healthz"} 3\n' in response.body
        assert b'\nkubernetes_healthcheck{name="ping",type="healthz"} 1\n' in response.body
        assert (await http_client.ask(port, "/metrics/slis", method="DELETE")).body == b""


async def test_flagz_and_statusz_are_for_people() -> None:
    async with _metrics(Node()) as port:
        flags = (await http_client.ask(port, "/flagz")).body.decode()
        status = (await http_client.ask(port, "/statusz")).body.decode()
    assert "\nipvs-scheduler=wrr\n" in flags
    assert "\nipvs-sync-period=30s\n" in flags
    assert re.search(r"\nUp: 0 hr 00 min 0\d sec\n", status)
    assert "/metrics/slis" in status


@pytest.mark.parametrize(
    ("method", "level", "code"),
    [("PUT", "5", 200), ("PUT", "much", 400), ("PUT", "-1", 400), ("PUT", "2147483648", 400), ("GET", "", 406)],
)
async def test_with_profiling_a_put_sets_the_verbosity(
    monkeypatch: pytest.MonkeyPatch, method: str, level: str, code: int
) -> None:
    put: list[int] = []
    monkeypatch.setattr(log, "set_up", lambda *, json, verbosity: put.append(verbosity))
    async with _metrics(Node(Servers(health=None, metrics=ANYWHERE, profiling=True))) as port:
        headers = f"Content-Length: {len(level)}\r\n\r\n{level}"
        response = await http_client.ask(port, "/debug/flags/v", method=method, headers=headers)
    assert (response.status, put) == (code, [5] if code == 200 else [])


async def test_without_profiling_the_verbosity_cannot_be_set() -> None:
    async with _metrics(Node()) as port:
        response = await http_client.ask(port, "/debug/flags/v", method="PUT", headers="Content-Length: 1\r\n\r\n5")
    assert response.status == 404


def _count(node: Node) -> int:
    """The number of servers. None of them runs."""
    servers = node.servers()
    for one in servers:
        one.close()
    return len(servers)


async def test_the_page_of_the_node_is_there_unless_the_configuration_turns_it_off() -> None:
    asked: list[str] = []

    async def show(request: server.Request) -> answers.Answer:
        asked.append(request.path)
        return answers.OK_PAGE

    node = Node()
    node.metrics_routes.ui = show
    paths = ("/ui", "/ui/", "/ui/page.js", "/ui/api/node.json")
    for path in paths:
        assert (await node.metrics_routes.answer(server.Request(path, {}, {}))).status == 200
    assert asked == list(paths)
    assert (await node.metrics_routes.answer(server.Request("/uix", {}, {}))).status == 404
    node.metrics_routes.reconfigure(loading.from_flags("--ui=false"))
    for path in paths:
        assert (await node.metrics_routes.answer(server.Request(path, {}, {}))).status == 404
    assert (await node.metrics_routes.answer(server.Request("/healthz", {}, {}))).status == 200
    assert asked == list(paths)
