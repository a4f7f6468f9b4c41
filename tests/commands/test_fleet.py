"""``fleet`` against an API server with 1,000 pods, some of which are silent and some hostile.

Covers the verdicts, the text and the exit statuses.

The tests assert limits on bytes and on parallel requests. No test asserts how fast a healthy node is queried.
"""

import asyncio
import contextlib
import gzip
import importlib.metadata
import json
import pathlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any

import pytest
from aiohttp import web

from ipvsproxy import cli
from ipvsproxy.commands import fleet
from ipvsproxy.commands.fleet import Fault, FleetNode
from ipvsproxy.config import file
from ipvsproxy.daemon.base import log as logs
from ipvsproxy.daemon.http import paths
from ipvsproxy.daemon.http.server import Request
from ipvsproxy.daemon.sources.watch import KubernetesSource
from ipvsproxy.model.net import Family
from ipvsproxy.model.service import ObjectKind
from tests.config import loading
from tests.support import api_server, summaries

NOW_S = 1_795_255_200.0
PATIENT_S = 100.0
ME: Mapping[str, object] = {
    "version": "1.0.0",
    "configuration": "0123456789ab",
    "pending": 0,
    "lastDrift": "0001-01-01T00:00:00Z",
}
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@pytest.fixture(autouse=True)
def _other_logs_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "set_up", lambda **_: None)


def healthz(*, healthy: bool = True, eligible: bool = True, me: Mapping[str, object] | None = None, **more: Any) -> Handler:
    """The answer of the health server on a node."""
    updated_s = NOW_S if healthy else NOW_S - 120
    late = () if healthy else (Family.IPV4,)
    health = summaries.status(NOW_S, {Family.IPV4: updated_s}, eligible=eligible, late=late, **more)
    answer = paths.healthz(health, **({} if me == {} else {"ipvsproxy": {**ME, **(me or {})}}))

    async def serve(request: web.Request) -> web.StreamResponse:
        assert "verbose" in request.query
        return web.Response(status=answer.status, body=answer.body, content_type="application/json")

    return serve


def says(body: bytes, status: int = 200, headers: Mapping[str, str] | None = None) -> Handler:
    async def serve(_: web.Request) -> web.StreamResponse:
        return web.Response(status=status, body=body, headers=headers)

    return serve


def dripping(data: bytes, pause_s: float = 0) -> Handler:
    """An answer that never ends."""

    async def serve(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        with contextlib.suppress(ConnectionError):
            while True:
                await response.write(data)
                await asyncio.sleep(pause_s)
        return response

    return serve


async def silent(_: web.Request) -> web.StreamResponse:
    await asyncio.Event().wait()
    return web.Response()


WELL = healthz()


class Cluster:
    """An API server with one pod for each handler; each pod runs on a node that has the handler's name.

    ``paths`` lists the paths of all requests, in order. If ``forbidden`` is true, the caller may not list pods.
    """

    def __init__(self, handlers: Mapping[str, Handler], *, forbidden: bool = False) -> None:
        self.handlers = handlers
        self.forbidden = forbidden
        self.paths: list[str] = []
        self.well_answered = 0
        self.open, self.most_open = 0, 0
        self.changed = asyncio.Event()
        self.more_pods: list[dict[str, Any]] = []

    async def answer(self, request: web.Request) -> web.StreamResponse:
        assert request.headers.get("Authorization", "Bearer abc") == "Bearer abc"
        self.paths.append(request.path_qs)
        if self.forbidden and request.path.endswith("/pods"):
            message = 'pods is forbidden: User "bob" cannot list resource "pods"'
            return web.json_response({"kind": "Status", "status": "Failure", "message": message}, status=403)
        if request.path.endswith("/pods"):
            pods = [*(pod(name) for name in self.handlers), *self.more_pods]
            return web.json_response({"kind": "PodList", "metadata": {"resourceVersion": "7"}, "items": pods})
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        try:
            name = request.path.split("/pods/")[1].partition(":")[0]
            return await self.handlers[name](request)
        finally:
            self.open -= 1
            self.well_answered += self.handlers[name] is WELL
            self.changed.set()

    async def until_well_answered(self, number: int) -> None:
        while self.well_answered < number:
            self.changed.clear()
            await self.changed.wait()


def pod(name: str, phase: str = "Running", node: str = "", **metadata: str) -> dict[str, Any]:
    return {"metadata": {"name": name, **metadata}, "spec": {"nodeName": node or name}, "status": {"phase": phase}}


@contextlib.asynccontextmanager
async def serving(cluster: Cluster) -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", cluster.answer)
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def asked(cluster: Cluster, timeout_s: float = PATIENT_S) -> dict[str, FleetNode]:
    async with serving(cluster) as url, KubernetesSource(node_name="", master=url).connect() as connection:
        pods = await fleet.list_pods(connection, "kube-system", "app=x")
        return {node.name: node for node in await fleet.ask(connection, "kube-system", pods, 10256, timeout_s)}


def rows(document: Mapping[str, Any]) -> dict[str, list[str]]:
    return {one["node"]: [row["problem"] for row in one["problems"]] for one in document["nodes"] if one["problems"]}


async def test_fleet_reports_exactly_the_nodes_with_a_problem_among_a_thousand_nodes() -> None:
    well = {f"n{number:03}": WELL for number in range(959)}
    cluster = Cluster({})

    async def silent_until_others_answered(_: web.Request) -> web.StreamResponse:
        await cluster.until_well_answered(len(well))
        raise ConnectionResetError

    hostile: dict[str, Handler] = {
        **{f"silent{number}": silent_until_others_answered for number in range(20)},
        **{f"endless{number}": dripping(b'{"healthy":' * 1000) for number in range(5)},
        "huge": says(b'{"healthy":"' + b"x" * (5 << 20) + b'"}'),
        "bomb": says(gzip.compress(b"1" * (64 << 20)), headers={"Content-Encoding": "gzip"}),
        "deep": says(b"[" * 60_000),
        "deep-field": says(b'{"more":' + b"[" * 60_000),
        "garbage": says(b"\xff\xfe\x00garbage"),
        "kube-proxy": says(b'{"lastUpdated":"2026-11-21T10:00:00Z","currentTime":"2026-11-21T10:00:00Z","nodeEligible":true}'),
        "types": says(b'{"currentTime":7,"healthy":"yes","nodeEligible":[]}'),
        "redirect": says(b"", 307, {"Location": "/api/v1/namespaces/kube-system/secrets"}),
        "refused": says(b'{"kind":"Status","status":"Failure","message":"dial tcp: connection refused"}', 503),
        "escapes": healthz(unreadable=("\x1b[2Jlist sets: EIO",)),
        "long": healthz(unreadable=("x" * 10_000,)),
        "old": healthz(me={}),
        "new": healthz(me={"version": "1.1.0"}),
        "edited": healthz(me={"configuration": "ffffffffffff"}),
        "drifting": healthz(me={"lastDrift": paths.render_time(NOW_S - 60)}),
        "late": healthz(healthy=False),
    }
    cluster.handlers = {**hostile, **well}
    nodes = await asked(cluster)
    assert len(nodes) == 1000 == len(well) + len(hostile)
    document = fleet.describe("kube-system", list(nodes.values()))
    no_answer = {"huge", "bomb", "deep", "deep-field", "garbage", "kube-proxy", "types", "redirect", "refused"}
    assert rows(document) == {
        **{name: ["no answer"] for name in hostile if name in no_answer or name.startswith(("silent", "endless"))},
        "escapes": ["not in force"],
        "long": ["not in force"],
        "old": ["other version"],
        "new": ["other version"],
        "edited": ["other configuration"],
        "drifting": ["drifting"],
        "late": ["late"],
    }
    assert document["differing"] == len(hostile)
    assert nodes["refused"].troubles == ((Fault.NO_ANSWER, "status 503: dial tcp: connection refused"),)
    assert nodes["huge"].troubles == ((Fault.NO_ANSWER, "the answer is longer than 65536 bytes"),)
    assert not any("secrets" in path for path in cluster.paths), "no redirect is followed"
    text = "\n".join(fleet.render(document))
    assert "\x1b" not in text
    assert max(map(len, text.splitlines())) < 400
    assert cluster.most_open <= fleet.PARALLEL


async def test_fleet_stops_waiting_for_silent_nodes_after_the_timeout_even_if_it_cannot_query_all_nodes_at_once() -> None:
    handlers = {f"n{number}": silent if number % 2 else dripping(b" ", 0.01) for number in range(fleet.PARALLEL * 2)}
    nodes = await asked(Cluster(handlers), timeout_s=0.2)
    assert {node.troubles for node in nodes.values()} == {((Fault.NO_ANSWER, "no complete answer within 0.2 s"),)}


async def test_a_pod_that_does_not_run_is_reported_unless_another_pod_runs_on_its_node() -> None:
    cluster = Cluster({"n1": WELL, "n2": WELL})
    cluster.more_pods = [
        pod("leaving", node="n1", deletionTimestamp="2026-11-21T10:00:00Z"),
        pod("evicted", "Failed", node="n2"),
        pod("gone", node="n3", deletionTimestamp="2026-11-21T10:00:00Z"),
        pod("waiting", "Pending", node="n4"),
        {"metadata": {"name": "unscheduled"}, "spec": {}, "status": {"phase": "Pending"}},
    ]
    nodes = await asked(cluster)
    assert {name: [text for _, text in node.troubles] for name, node in nodes.items()} == {
        "(pod unscheduled)": ["its pod is Pending"],
        "n1": [],
        "n2": [],
        "n3": ["its pod is being deleted"],
        "n4": ["its pod is Pending"],
    }


async def test_the_command_fleet_queries_labelled_pods_by_the_proxy_path_of_the_api_server() -> None:
    cluster = Cluster({"n1": WELL})
    await asked(cluster)
    assert cluster.paths == [
        "/api/v1/namespaces/kube-system/pods?labelSelector=app%3Dx",
        "/api/v1/namespaces/kube-system/pods/n1:10256/proxy/healthz?verbose",
    ]


@pytest.mark.parametrize(
    ("handler", "expected"),
    [
        (
            healthz(me={"pending": 1}, unreadable=("list sets: EIO",), unmet_settings={"net/ipv4/ip_forward": "0"}),
            (Fault.NOT_IN_FORCE, "list sets: EIO; the kernel setting net/ipv4/ip_forward is 0; 1 kernel object not as desired"),
        ),
        (healthz(me={"pending": 3}), (Fault.NOT_IN_FORCE, "3 kernel objects not as desired")),
        (healthz(eligible=False, missing=(ObjectKind.NODE,)), (Fault.NOT_IN_FORCE, "the first list of Node is not complete")),
        (healthz(healthy=False), (Fault.LATE, "IPv4 was last in force at 2026-11-21T09:58:00Z")),
        (healthz(eligible=False), (Fault.NO_TRAFFIC, "load balancers are turned away")),
        (healthz(stale=(ObjectKind.SERVICE,)), (Fault.STALE, "no news of Service from the API server")),
        (healthz(leftovers=("rules of kube-proxy stay: EBUSY",)), (Fault.LEFTOVERS, "rules of kube-proxy stay: EBUSY")),
        (
            healthz(me={"lastDrift": paths.render_time(NOW_S - 599)}),
            (Fault.DRIFTING, "another program changed kernel objects, last found at 2026-11-21T09:50:01Z"),
        ),
        pytest.param(healthz(me={"lastDrift": paths.render_time(NOW_S - 601)}), None, id="drift more than ten minutes ago"),
    ],
)
async def test_each_fault_in_the_health_answer_of_a_node_is_reported(
    handler: Handler, expected: tuple[Fault, str] | None
) -> None:
    assert (await asked(Cluster({"n1": handler})))["n1"].troubles == ((expected,) if expected else ())


async def test_fleet_understands_the_real_health_answer_of_ipvsproxy() -> None:
    config = loading.from_flags("--ipvs-scheduler=wrr")
    server = paths.health_server(lambda: config, summaries.status(NOW_S, {}), lambda _path, _status: None)
    answer = await server(Request("/healthz", {"verbose": ""}, {}))
    (node,) = (await asked(Cluster({"n1": says(answer.body, answer.status)}))).values()
    assert node == ("n1", "n1", importlib.metadata.version("ipvsproxy"), file.digest(config), ())


def test_configurations_are_compared_only_among_nodes_of_the_same_version() -> None:
    nodes = [
        FleetNode("a", "a", "1", "x"),
        FleetNode("b", "b", "1", "x"),
        FleetNode("c", "c", "2", "y"),
        FleetNode("d", "d", "1", "y"),
    ]
    document = fleet.describe("kube-system", nodes)
    assert rows(document) == {"c": ["other version"], "d": ["other configuration"]}
    assert document["usual"] == {"version": "1", "configuration": "x"}


def test_fleet_prints_one_line_for_each_problem_and_then_a_summary() -> None:
    nodes = [FleetNode("node-1", "p1", "1.0", "aa"), FleetNode("node-20", "p2", troubles=((Fault.NO_ANSWER, "silence"),))]
    assert list(fleet.render(fleet.describe("kube-system", nodes))) == [
        "NODE     PROBLEM    DETAIL",
        "node-20  no answer  silence",
        "2 nodes: 1 with a problem; version 1.0, configuration aa",
    ]


# The command


async def _run(cluster: Cluster, path: pathlib.Path, *flags: str, by_environment: bool = False) -> int:
    async with serving(cluster) as url:
        kubeconfig = api_server.write_kubeconfig(path / "kubeconfig", url)
        return await asyncio.to_thread(cli.main, ["fleet", *(() if by_environment else (f"--kubeconfig={kubeconfig}",)), *flags])


async def test_the_exit_status_of_fleet_shows_whether_nodes_differ(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await _run(Cluster({"n1": WELL, "n2": WELL}), tmp_path) == 0
    assert capsys.readouterr().out == "2 nodes: all in force and alike; version 1.0.0, configuration 0123456789ab\n"
    assert await _run(Cluster({"n1": WELL, "n2": healthz(healthy=False)}), tmp_path, "--output=json") == 1
    document = json.loads(capsys.readouterr().out)
    assert (document["command"], document["differing"], rows(document)) == ("fleet", 1, {"n2": ["late"]})


async def test_fleet_needs_no_right_to_list_pods_if_its_flag_names_the_pods(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster = Cluster({"n1": WELL, "n2": healthz(healthy=False), "n3": WELL}, forbidden=True)
    assert await _run(cluster, tmp_path, "--pods=n1,n2,n1", "--output=json") == 1
    assert rows(json.loads(capsys.readouterr().out)) == {"(pod n2)": ["late"]}
    place = "/api/v1/namespaces/kube-system/pods"
    assert sorted(cluster.paths) == [f"{place}/{name}:10256/proxy/healthz?verbose" for name in ("n1", "n2")]


async def test_fleet_finds_the_kubeconfig_in_the_same_environment_variable_and_directory_as_kubectl(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", f"{tmp_path / 'kubeconfig'}:/nothing")
    assert await _run(Cluster({"n1": WELL}), tmp_path, by_environment=True) == 0
    monkeypatch.delenv("KUBECONFIG")
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".kube").mkdir()
    (tmp_path / ".kube/config").symlink_to(tmp_path / "kubeconfig")
    assert await _run(Cluster({"n1": WELL}), tmp_path, by_environment=True) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("cluster", "flags", "reasons"),
    [
        (Cluster({}, forbidden=True), [], ['ipvsproxy: status 403: pods is forbidden: User "bob" cannot list', "has a Role"]),
        (Cluster({}), ["-n", "proxies"], ["no pod in namespace proxies has the labels app.kubernetes.io/name=ipvsproxy"]),
        (Cluster({"n1": says(b'{"message":"no"}', 403)}), [], ["none of 1 pod answers; n1: status 403: no", "has a Role"]),
        (
            Cluster({"n1": says(b"bad gateway", 502)}),
            [],
            ["none of 1 pod answers; n1: status 502: not the answer of an ipvsproxy"],
        ),
        (Cluster({}), ["--healthz-port=0"], ["needs an API server, and the port"]),
    ],
)
async def test_the_exit_status_of_fleet_is_2_if_the_nodes_cannot_be_queried(
    cluster: Cluster,
    flags: Sequence[str],
    reasons: Sequence[str],
    tmp_path: pathlib.Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert await _run(cluster, tmp_path, *flags) == 2
    out, err = capsys.readouterr()
    assert (out, [reason for reason in reasons if reason not in err]) == ("", [])
    assert ("has a Role" in err) is ("status 403" in err), "only where a right is missing"
