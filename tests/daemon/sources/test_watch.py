"""Covers the Kubernetes source over real HTTP: lists, watches, and each kind of trouble that ``api_server`` can cause.

``test_reflector`` covers in detail how the source reacts to each kind of trouble, and ``test_credentials`` covers the
credentials.
"""

import asyncio
import collections
import copy
import json
import pathlib
import socket
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import pytest
import structlog
import structlog.testing

from ipvsproxy.daemon.sources import credentials, watch
from ipvsproxy.daemon.sources.source import ApiError, Trouble
from ipvsproxy.model.service import ApiServersFound, Event, ObjectKind, ServiceName
from tests.support import api_server
from tests.support.api_server import ApiServer, Refusal
from tests.support.api_store import ENDPOINT_SLICES, NODES, SERVICES, Object
from tests.support.following import (
    KIND_OF,
    Setup,
    Sink,
    endpoint_slice,
    eventually,
    following,
    running_task,
    service,
    wait_for_trouble,
)


@pytest.fixture
async def setup(tmp_path: pathlib.Path) -> AsyncIterator[Setup]:
    async with ApiServer() as server:
        server.put(SERVICES, service("web"))
        async with following(server, tmp_path) as running:
            await running.sink.until(running.sink.has_all_lists)
            for resource in KIND_OF.values():
                await server.watched(resource)
            yield running


# List and watch


async def test_each_request_is_counted_with_its_host_and_its_status_code_and_its_duration(tmp_path: pathlib.Path) -> None:
    requests: list[tuple[str, str, float]] = []
    async with ApiServer() as server:
        source = watch.KubernetesSource(
            node_name="n1",
            kubeconfig=api_server.write_kubeconfig(tmp_path / "kubeconfig", server.url),
            on_request=lambda host, code, duration_s, _method: requests.append((host, code, duration_s)),
        )
        sink = Sink()
        async with running_task(source.run(sink.deliver)):
            await sink.until(sink.has_all_lists)
    assert {(host, code) for host, code, _ in requests} == {(server.url.rpartition("/")[2], "200")}
    assert all(0 <= duration_s < 60 for _, _, duration_s in requests)


@pytest.mark.parametrize("knows_drop", [True, False])
async def test_objects_are_read_even_if_the_server_ignores_the_request_to_omit_managed_fields(
    setup: Setup, *, knows_drop: bool
) -> None:
    setup.server.knows_drop = knows_drop
    managed: dict[str, Any] = {"managedFields": [{"manager": "kubectl", "fieldsV1": {"f:spec": {}}}]}
    setup.server.expire_watches(SERVICES)  # after this, the source requests a list and a watch again
    await setup.server.asked(SERVICES, watch=True, times=2)
    setup.server.put(SERVICES, service("api", **managed))
    await setup.sink.until(setup.sink.has("web", "api"))
    setup.server.expire_watches(SERVICES)
    await setup.server.asked(SERVICES, watch=True, times=3)
    assert setup.sink.has("web", "api")()
    asked = {(request.watch, request.headers["Accept"]) for request in setup.server.requests}
    accept = "application/json;drop=metadata.managedFields, application/json"
    assert asked == {(False, accept), (True, accept)}
    assert setup.troubles() == [Trouble.EXPIRED] * 2


def servers_of(events: Sequence[Event]) -> set[str]:
    return {str(one) for event in events if isinstance(event, ApiServersFound) for one in event.servers}


async def test_the_source_delivers_the_resolved_addresses_of_the_api_server_only_once(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def getaddrinfo(_host: object, port: int, *_: object) -> list[Any]:
        return [
            (socket.AF_INET, socket.SOCK_STREAM, 0, "", ("127.0.0.1", port)),
            (socket.AF_INET, socket.SOCK_STREAM, 0, "", ("192.0.2.9", port)),
            (socket.AF_INET6, socket.SOCK_STREAM, 0, "", ("2001:db8::9", port, 0, 0)),
            (socket.AF_INET6, socket.SOCK_STREAM, 0, "", ("fe80::9%eth0", port, 0, 2)),
        ]

    async with ApiServer() as server:
        monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
        port = server.url.rpartition(":")[2]
        kubeconfig = api_server.write_kubeconfig(tmp_path / "kubeconfig", f"http://api.example:{port}")
        async with following(server, kubeconfig) as running:
            await running.sink.until(running.sink.has_all_lists)
            events = running.sink.events
    expected = {f"127.0.0.1:{port}", f"192.0.2.9:{port}", f"[2001:db8::9]:{port}", f"[fe80::9]:{port}"}
    assert isinstance(events[0], ApiServersFound), "before the first list, which may need them"
    assert servers_of(events) == expected
    assert sum(isinstance(event, ApiServersFound) for event in events) == 1


async def test_the_address_of_an_open_connection_is_delivered_if_name_resolution_yields_no_address(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def no_addresses(_: object) -> tuple[()]:
        return ()

    monkeypatch.setattr(watch, "_addresses_of", no_addresses)
    async with ApiServer() as server, following(server, tmp_path) as running:
        await running.sink.until(lambda: bool(servers_of(running.sink.events)))
        assert servers_of(running.sink.events) == {server.url.rpartition("/")[2]}


@pytest.mark.parametrize(
    ("host", "proxy_url", "environment", "expected"),
    [
        ("https://192.0.2.9", None, {}, {("192.0.2.9", 443)}),
        ("http://[2001:db8::9]:8080", None, {}, {("2001:db8::9", 8080)}),
        ("https://192.0.2.9:6443", "http://192.0.2.1:3128", {}, {("192.0.2.9", 6443), ("192.0.2.1", 3128)}),
        ("https://192.0.2.9:6443", None, {"https_proxy": "http://192.0.2.1"}, {("192.0.2.9", 6443), ("192.0.2.1", 80)}),
        ("https://192.0.2.9:6443", None, {"https_proxy": "http://192.0.2.1", "no_proxy": "192.0.2.9"}, {("192.0.2.9", 6443)}),
        ("https://192.0.2.9:6443", None, {"http_proxy": "http://192.0.2.1"}, {("192.0.2.9", 6443)}),
        ("https://192.0.2.9:99999", None, {}, set()),
        ("https://name.invalid:6443", None, {}, set()),
    ],
)
async def test_the_addresses_of_the_api_server_and_of_the_http_proxy_are_found(
    host: str,
    proxy_url: str | None,
    environment: Mapping[str, str],
    expected: set[tuple[str, int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("http_proxy", "https_proxy", "no_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    configuration = credentials.Configuration(host=host)
    configuration.proxy = proxy_url
    assert set(await watch._addresses_of(configuration)) == expected


async def test_a_request_that_gets_no_answer_is_counted_as_an_error(tmp_path: pathlib.Path) -> None:
    requests: asyncio.Queue[tuple[str, str]] = asyncio.Queue()
    source = watch.KubernetesSource(
        node_name="n1",
        kubeconfig=api_server.write_kubeconfig(tmp_path / "kubeconfig", "http://127.0.0.1:9"),
        on_request=lambda host, code, *_: requests.put_nowait((host, code)),
    )
    async with running_task(source.run(lambda _: None)):
        assert await requests.get() == ("127.0.0.1:9", "<error>")


async def test_each_kind_is_listed_with_its_selectors_and_then_watched(setup: Setup) -> None:
    asked = {kind: setup.server.queries(resource, watch=False)[0] for kind, resource in KIND_OF.items()}
    assert asked == {
        ObjectKind.SERVICE: {
            "labelSelector": "!service.kubernetes.io/service-proxy-name",
            "fieldSelector": "spec.clusterIP!=None",
            "limit": "500",
            "resourceVersion": "0",
        },
        ObjectKind.ENDPOINT_SLICE: {"labelSelector": "!service.kubernetes.io/headless", "limit": "500", "resourceVersion": "0"},
        ObjectKind.NODE: {"fieldSelector": "metadata.name=n1", "limit": "500", "resourceVersion": "0"},
    }
    (query,) = setup.server.queries(SERVICES, watch=True)
    assert query["allowWatchBookmarks"] == "true"
    assert query["resourceVersion"] == str(setup.server.store.revision)


async def test_only_changes_of_selected_objects_arrive(setup: Setup) -> None:
    setup.server.put(SERVICES, service("other", labels={"service.kubernetes.io/service-proxy-name": "other"}))
    setup.server.put(SERVICES, service("headless", "None"))
    setup.server.put(NODES, {"metadata": {"name": "n2"}})
    setup.server.put(NODES, {"metadata": {"name": "n1"}})
    setup.server.put(ENDPOINT_SLICES, endpoint_slice("headless-1", **{"service.kubernetes.io/headless": ""}))
    setup.server.put(ENDPOINT_SLICES, endpoint_slice("web-1"))
    setup.server.put(SERVICES, service("dns"))
    setup.server.delete(SERVICES, "web")
    objects = setup.sink.objects
    await setup.sink.until(
        lambda: setup.sink.has("dns")() and bool(objects[ObjectKind.NODE] and objects[ObjectKind.ENDPOINT_SLICE])
    )
    assert {kind: list(present) for kind, present in objects.items()} == {
        ObjectKind.SERVICE: ["dns"],
        ObjectKind.ENDPOINT_SLICE: ["web-1"],
        ObjectKind.NODE: ["n1"],
    }


async def test_a_restarted_server_can_answer_all_requests_from_its_watch_cache(setup: Setup) -> None:
    server = setup.server
    for resource in KIND_OF.values():
        await server.watched(resource)
    assert [request.query.get("resourceVersion") for request in server.requests if not request.watch] == ["0"] * 3
    at_the_start = len(server.requests)
    server.put(NODES, {"metadata": {"name": "n2"}})  # a new revision that changes no object of this source
    server.store.forget_history()
    for resource in KIND_OF.values():
        server.cut_watches(resource)
    await setup.sink.until(lambda: all(setup.sink.lists(kind) == 2 for kind in ObjectKind))
    for resource in KIND_OF.values():
        await server.watched(resource)
    asked = server.requests[at_the_start:]
    assert collections.Counter(request.watch for request in asked) == {True: 6, False: 6}, "probe, gone, list, watch"
    assert all(int(request.query["resourceVersion"]) and "limit" not in request.query for request in asked)


async def test_a_watch_line_of_several_megabytes_is_read(setup: Setup) -> None:
    setup.server.put(SERVICES, service("large", annotations={"note": "x" * (5 << 20)}))
    await setup.sink.until(setup.sink.has("web", "large"))
    assert setup.troubles() == []


# Trouble with connections


@pytest.mark.parametrize("waits", [True, False])
async def test_all_objects_are_listed_again_after_a_server_is_restored_to_an_older_revision(setup: Setup, *, waits: bool) -> None:
    server, sink = setup.server, setup.sink
    backup = copy.deepcopy(server.store)
    server.put(SERVICES, service("late"))
    await sink.until(sink.has("web", "late"))
    server.waits_for_revision = waits
    server.restore(backup)
    await sink.until(sink.has("web"))
    assert sink.lists() == 2
    assert setup.troubles() == [Trouble.DROPPED, Trouble.EXPIRED]
    await server.watched(SERVICES)
    server.put(SERVICES, service("new"))
    await sink.until(sink.has("web", "new"))


async def test_a_silent_watch_stream_is_abandoned_and_opened_again(tmp_path: pathlib.Path) -> None:
    async with ApiServer() as server, following(server, tmp_path, idle_s=0.1) as running:
        await server.watched(SERVICES)
        server.stall()
        server.put(SERVICES, service("web"))
        await server.asked(SERVICES, watch=True, times=2)
        assert Trouble.SILENT in running.troubles()
        server.resume()
        await running.sink.until(running.sink.has("web"))


async def test_no_request_is_sent_before_the_end_of_the_pause_that_a_throttling_server_requests(setup: Setup) -> None:
    setup.server.refuse(Refusal(429, resource=SERVICES, retry_after="17"))
    setup.server.cut_watches(SERVICES)
    setup.server.put(SERVICES, service("dns"))
    await setup.sink.until(setup.sink.has("web", "dns"))
    assert setup.troubles() == [Trouble.DROPPED, Trouble.THROTTLED]
    assert 17 <= max(setup.sleeps) < 19


async def test_the_lists_of_different_kinds_do_not_wait_for_each_other(setup: Setup) -> None:
    setup.server.cut_watches(ENDPOINT_SLICES)
    setup.server.refuse(*[Refusal(500, resource=ENDPOINT_SLICES)] * 3)
    setup.server.put(SERVICES, service("dns"))
    await setup.sink.until(setup.sink.has("web", "dns"))
    assert setup.troubles() == []


# Pods behind endpoints


def slice_with_pod(name: str, address: str, pod: str) -> Object:
    endpoint = {"addresses": [address], "targetRef": {"kind": "Pod", "name": pod}}
    return {**endpoint_slice(name), "endpoints": [endpoint], "ports": [{"name": "", "port": 80}]}


async def test_the_pods_behind_all_endpoints_are_listed(setup: Setup) -> None:
    for number in range(600):
        setup.server.put(
            ENDPOINT_SLICES, slice_with_pod(f"web-{number}", f"10.244.{number >> 8}.{number & 255}", f"pod-{number}")
        )
    assert {target.name for target in (await setup.source.targets()).values()} == {f"default/pod-{n}" for n in range(600)}


async def test_listing_the_pods_of_one_service_does_not_list_other_pods(setup: Setup) -> None:
    for name, labels in (("web-1", {}), ("web-2", {"service.kubernetes.io/headless": ""}), ("dns-1", {})):
        item = slice_with_pod(name, "10.244.0.1", f"pod-{name}")
        item["metadata"]["labels"] = {"kubernetes.io/service-name": name[:3], **labels}
        setup.server.put(ENDPOINT_SLICES, item)
    found = await setup.source.targets(ServiceName("default", "web"))
    assert {target.name for target in found.values()} == {"default/pod-web-1"}


async def test_an_error_is_raised_if_the_pods_cannot_be_listed(setup: Setup) -> None:
    setup.server.refuse(Refusal(500, resource=ENDPOINT_SLICES))
    with pytest.raises(ApiError, match="refused with 500"):
        await setup.source.targets()


# An absent API server


async def test_requests_to_an_unreachable_server_are_repeated_but_the_failure_is_logged_only_once(tmp_path: pathlib.Path) -> None:
    async with ApiServer() as server:
        url = server.url
    kubeconfig = api_server.write_kubeconfig(tmp_path / "kubeconfig", url)
    async with ApiServer() as reborn:
        with structlog.testing.capture_logs() as logs:
            async with following(reborn, kubeconfig) as running:
                await wait_for_trouble(running, Trouble.UNREACHABLE)
                assert running.source.describe().startswith(f"API server {url}: Cannot connect to host 127.0.0.1:")
                await eventually(lambda: len(running.sleeps) >= 12)
                reborn.put(SERVICES, service("web"))
                api_server.write_kubeconfig(tmp_path / "kubeconfig", reborn.url)
                await running.sink.until(running.sink.has("web"))
                await reborn.watched(SERVICES)
                await eventually(lambda: [line["event"] for line in logs].count("watch_resumed") == len(ObjectKind))
    assert running.source.describe() == f"API server {reborn.url}"
    failures = [line for line in logs if line["event"] == "watch_failed"]
    assert len(failures) == 1
    assert failures[0]["server"] == url
    assert "Connect call failed" in failures[0]["error"]
    assert "check address, port and certificate" in failures[0]["hint"]


async def test_a_message_of_the_server_is_logged_in_one_line(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    text = json.dumps({"kind": "Status", "code": 500, "message": "evil\n2026-01-01 level=info all is well\x1b[2J"})
    with structlog.testing.capture_logs() as logs:
        setup.server.send(SERVICES, f'{{"type": "ERROR", "object": {text}}}\n'.encode())
        await wait_for_trouble(setup, Trouble.SERVER_ERROR)
    assert logs[0]["error"] == "status 500: evil 2026-01-01 level=info all is well [2J"
