"""Covers the requests that the tests' API server must refuse.

The page "Kubernetes API Concepts" of the Kubernetes documentation says which requests a real API server refuses.

If the tests' API server accepted requests that a real API server refuses, it would hide faults of the program. Answers to
accepted requests need no test in this module, because the tests that use the server would fail without the answers.
"""

import json
from collections.abc import AsyncIterator, Mapping
from typing import Any

import aiohttp
import pytest

from tests.support.api_server import ApiServer
from tests.support.api_store import NODES, SERVICES, Object

TIMEOUT_S = 60


def service(name: str, **labels: str) -> Object:
    return {"metadata": {"name": name, "labels": labels}, "spec": {"clusterIP": "10.0.0.1"}}


@pytest.fixture
async def server() -> AsyncIterator[ApiServer]:
    async with ApiServer() as started:
        yield started


@pytest.fixture
async def http(server: ApiServer) -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(server.url, timeout=aiohttp.ClientTimeout(total=TIMEOUT_S)) as session:
        yield session


async def answer(http: aiohttp.ClientSession, query: Mapping[str, str]) -> tuple[int, Any]:
    async with http.get(SERVICES.path, params=query) as response:
        return response.status, await response.json()


async def event(watch: aiohttp.ClientResponse) -> tuple[str, Any]:
    sent = json.loads(await watch.content.readline())
    return sent["type"], sent["object"]


@pytest.mark.parametrize(
    ("query", "status", "text"),
    [
        ({"watch": "1", "resourceVersion": "{past}"}, 410, "too old resource version"),
        ({"watch": "1", "resourceVersion": "{future}"}, 504, "Too large resource version"),
        ({"resourceVersion": "{past}", "limit": "1"}, 410, "is too old"),
        ({"resourceVersion": "{future}"}, 504, "Timeout: Too large resource version: {future}, current: {present}"),
        ({"resourceVersion": "x"}, 400, "invalid resource version"),
        ({"limit": "1", "continue": "{token}"}, 410, "too old"),
        ({"limit": "1", "continue": "{token}", "resourceVersion": "7"}, 400, "not allowed"),
        ({"limit": "1", "continue": "rubbish"}, 400, "not valid"),
        ({"fieldSelector": "spec.colour=red"}, 400, "not supported"),
    ],
)
async def test_the_server_for_tests_refuses_each_request_that_a_real_api_server_refuses(
    server: ApiServer, http: aiohttp.ClientSession, query: Mapping[str, str], status: int, text: str
) -> None:
    server.waits_for_revision = False
    for name in "abc":
        server.put(SERVICES, service(name))
    past, (_, first) = server.store.revision - 1, await answer(http, {"limit": "2"})
    server.store.forget_history()
    known = {"past": past, "present": past + 1, "future": past + 9, "token": first["metadata"]["continue"]}
    code, body = await answer(http, {key: value.format_map(known) for key, value in query.items()})
    assert (code, body["kind"], body["code"]) == (status, "Status", status)
    assert text.format_map(known) in body["message"]


async def test_a_watch_gets_bookmarks_only_on_request_and_a_bookmark_has_only_kind_and_revision(
    server: ApiServer, http: aiohttp.ClientSession
) -> None:
    query = {"watch": "1", "resourceVersion": str(server.store.revision)}
    async with (
        http.get(SERVICES.path, params=query | {"allowWatchBookmarks": "true"}) as asking,
        http.get(SERVICES.path, params=query) as silent,
    ):
        server.put(NODES, {"metadata": {"name": "elsewhere"}})
        server.bookmark()
        server.end_watches(SERVICES)
        metadata = {"resourceVersion": str(server.store.revision)}
        assert await event(asking) == ("BOOKMARK", {"kind": "Service", "apiVersion": "v1", "metadata": metadata})
        assert await silent.read() == b""


async def test_a_watch_with_a_selector_gets_an_event_when_an_object_begins_or_ceases_to_match(
    server: ApiServer, http: aiohttp.ClientSession
) -> None:
    query = {"watch": "1", "labelSelector": "!proxy", "resourceVersion": str(server.store.revision)}
    async with http.get(SERVICES.path, params=query) as watch:
        for labels in ({}, {"proxy": "other"}, {"proxy": "another"}, {}):
            server.put(SERVICES, service("web", **labels))
        assert [(await event(watch))[0] for _ in range(3)] == ["ADDED", "DELETED", "ADDED"]


# The rules for new events: pkg/apis/core/validation/events.go in kubernetes/kubernetes

EVENT: Object = {
    "apiVersion": "events.k8s.io/v1",
    "kind": "Event",
    "metadata": {"name": "n1.1", "namespace": "default"},
    "eventTime": "2026-11-21T10:00:00.000001Z",
    "reportingController": "kube-proxy",
    "reportingInstance": "kube-proxy-n1",
    "action": "StartKubeProxy",
    "reason": "Starting",
    "regarding": {"apiVersion": "v1", "kind": "Node", "name": "n1", "uid": "n1"},
    "type": "Normal",
}


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({}, 201),
        ({"series": {"count": 2, "lastObservedTime": "2026-11-21T10:00:00.000001Z"}}, 201),
        ({"eventTime": "2026-11-21T10:00:00Z"}, 422),
        ({"action": ""}, 422),
        ({"reason": "x" * 129}, 422),
        ({"note": "x" * 1025}, 422),
        ({"type": "Error"}, 422),
        ({"regarding": {"kind": "Service", "name": "web", "namespace": "shop"}}, 422),
        ({"series": {"count": 0, "lastObservedTime": "2026-11-21T10:00:00.000001Z"}}, 422),
    ],
)
async def test_an_event_is_refused_if_it_is_invalid_or_if_its_name_is_already_in_use(
    server: ApiServer, http: aiohttp.ClientSession, change: Object, code: int
) -> None:
    for status in (code, 409 if code == 201 else code):
        path = "/apis/events.k8s.io/v1/namespaces/default/events"
        async with http.post(path, json=EVENT | change) as response:
            assert response.status == status
    assert len(server.events) == (code == 201)
