"""The contract of the tests' API server, against the page "Kubernetes API Concepts" of the Kubernetes documentation.

Each test names its section. The faults on demand are covered by the tests that use them. Not tested, because the program does not
use them: verbs other than list and watch, single namespaces, protobuf and tables.
"""

import contextlib
import copy
import json
from collections.abc import AsyncIterator, Mapping
from typing import Any

import aiohttp
import pytest

from tests.support.api_server import ApiServer
from tests.support.api_store import ENDPOINT_SLICES, NODES, SERVICES, Object, Resource

TIMEOUT_S = 60


def service(name: str, **spec: Any) -> Object:
    return {"metadata": {"name": name}, "spec": {"clusterIP": "10.0.0.1"} | spec}


@pytest.fixture
async def server() -> AsyncIterator[ApiServer]:
    async with ApiServer() as started:
        yield started


class Watch:
    """The client side of a watch, without any logic."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self.response = response

    async def event(self) -> tuple[str, Any]:
        event = json.loads(await self.response.content.readline())
        return event["type"], event["object"]

    async def ended(self) -> bool:
        return await self.response.content.read() == b""


class Client:
    """Sends requests as any HTTP client does."""

    def __init__(self, session: aiohttp.ClientSession, closing: contextlib.AsyncExitStack) -> None:
        self.get = session.get
        self._closing = closing

    async def list(self, resource: Resource = SERVICES, query: Mapping[str, str] | None = None) -> tuple[int, Any]:
        async with self.get(resource.path, params=query) as response:
            return response.status, await response.json()

    async def watch(self, resource: Resource = SERVICES, query: Mapping[str, str] | None = None) -> Watch:
        request = self.get(resource.path, params={"watch": "1", **(query or {})})
        return Watch(await self._closing.enter_async_context(request))


@pytest.fixture
async def http(server: ApiServer) -> AsyncIterator[Client]:
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
    async with aiohttp.ClientSession(server.url, timeout=timeout) as session, contextlib.AsyncExitStack() as closing:
        yield Client(session, closing)


def names(page: Any) -> list[str]:
    return [item["metadata"]["name"] for item in page["items"]]


# Section "Efficient detection of changes"


async def test_a_watch_sends_all_changes_after_its_revision_in_order(server: ApiServer, http: Client) -> None:
    _, page = await http.list()
    server.put(SERVICES, service("web"))
    watch = await http.watch(SERVICES, {"resourceVersion": page["metadata"]["resourceVersion"]})
    server.put(SERVICES, service("web", clusterIP="10.0.0.2"))
    server.delete(SERVICES, "web")
    events = [await watch.event() for _ in range(3)]
    assert [kind for kind, _ in events] == ["ADDED", "MODIFIED", "DELETED"]
    versions = [int(item["metadata"]["resourceVersion"]) for _, item in events]
    assert versions == sorted(set(versions))
    assert events[2][1]["metadata"]["resourceVersion"] == str(server.store.revision)


async def test_a_watch_from_a_revision_older_than_the_history_gets_status_410(server: ApiServer, http: Client) -> None:
    old = str(server.store.revision)
    server.put(SERVICES, service("web"))
    server.store.forget_history()
    status, body = await http.list(SERVICES, {"watch": "1", "resourceVersion": old})
    assert (status, body["kind"], body["code"], body["reason"]) == (410, "Status", 410, "Expired")


async def test_status_410_may_also_come_as_an_event_in_a_stream_with_status_200(server: ApiServer, http: Client) -> None:
    server.gone_by_event = True
    watch = await http.watch(SERVICES, {"resourceVersion": "1"})
    kind, body = await watch.event()
    assert (watch.response.status, kind, body["code"]) == (200, "ERROR", 410)
    assert await watch.ended()


# Section "Watch bookmarks"


async def test_a_bookmark_has_only_kind_and_revision_and_is_sent_only_on_request(server: ApiServer, http: Client) -> None:
    version = str(server.store.revision)
    asking = await http.watch(SERVICES, {"allowWatchBookmarks": "true", "resourceVersion": version})
    silent = await http.watch(SERVICES, {"resourceVersion": version})
    server.put(NODES, {"metadata": {"name": "elsewhere"}})
    server.bookmark()
    server.end_watches(SERVICES)
    assert await asking.event() == (
        "BOOKMARK",
        {"kind": "Service", "apiVersion": "v1", "metadata": {"resourceVersion": str(server.store.revision)}},
    )
    assert await silent.ended()


# Section "Retrieving large results sets in chunks"


async def test_all_pages_of_a_list_show_the_same_snapshot(server: ApiServer, http: Client) -> None:
    for number in range(5):
        server.put(SERVICES, service(f"s{number}"))
    _, first = await http.list(SERVICES, {"limit": "2"})
    server.put(SERVICES, service("s3-later"))
    server.delete(SERVICES, "s4")
    _, second = await http.list(SERVICES, {"limit": "2", "continue": first["metadata"]["continue"]})
    _, third = await http.list(SERVICES, {"limit": "2", "continue": second["metadata"]["continue"]})
    assert names(first) + names(second) + names(third) == ["s0", "s1", "s2", "s3", "s4"]
    assert {page["metadata"]["resourceVersion"] for page in (first, second, third)} == {first["metadata"]["resourceVersion"]}
    assert not third["metadata"].get("continue")
    assert first["metadata"]["remainingItemCount"] == 3


async def test_an_expired_continue_token_gets_status_410(server: ApiServer, http: Client) -> None:
    for number in range(3):
        server.put(SERVICES, service(f"s{number}"))
    _, first = await http.list(SERVICES, {"limit": "2"})
    server.store.forget_history()
    status, body = await http.list(SERVICES, {"limit": "2", "continue": first["metadata"]["continue"]})
    assert (status, body["reason"]) == (410, "Expired")


async def test_a_continue_token_with_a_revision_is_a_bad_request(server: ApiServer, http: Client) -> None:
    for number in range(2):
        server.put(SERVICES, service(f"s{number}"))
    _, first = await http.list(SERVICES, {"limit": "1"})
    query = {"continue": first["metadata"]["continue"], "resourceVersion": "7"}
    assert (await http.list(SERVICES, {"limit": "1", **query}))[0] == 400
    assert (await http.list(SERVICES, {"limit": "1", "continue": "rubbish"}))[0] == 400


# Section "Resource Versions"


async def test_a_list_at_revision_zero_is_one_page_and_may_be_old(server: ApiServer, http: Client) -> None:
    for number in range(3):
        server.put(SERVICES, service(f"s{number}"))
    server.cache = copy.deepcopy(server.store)
    server.put(SERVICES, service("s3"))
    _, old = await http.list(SERVICES, {"limit": "2", "resourceVersion": "0"})
    assert (names(old), old["metadata"]) == (["s0", "s1", "s2"], {"resourceVersion": str(server.store.revision - 1)})
    _, latest = await http.list(SERVICES)
    assert names(latest) == ["s0", "s1", "s2", "s3"]


async def test_a_list_is_not_older_than_the_requested_revision_and_with_a_limit_has_exactly_that_revision(
    server: ApiServer, http: Client
) -> None:
    server.put(SERVICES, service("s0"))
    revision = str(server.store.revision)
    server.cache = copy.deepcopy(server.store)
    server.put(SERVICES, service("s1"))
    assert names((await http.list(SERVICES, {"resourceVersion": revision}))[1]) == ["s0"]
    status, body = await http.list(SERVICES, {"resourceVersion": str(server.store.revision)})
    assert (status, "Too large resource version" in body["message"]) == (504, True)
    server.cache = None
    assert names((await http.list(SERVICES, {"resourceVersion": revision}))[1]) == ["s0", "s1"]
    assert (await http.list(SERVICES, {"resourceVersion": revision, "limit": "1"}))[0] == 410


async def test_a_watch_without_a_revision_starts_with_an_added_event_for_each_object(server: ApiServer, http: Client) -> None:
    server.put(SERVICES, service("web"))
    watch = await http.watch()
    kind, item = await watch.event()
    assert (kind, item["metadata"]["name"]) == ("ADDED", "web")


async def test_all_resources_share_one_revision_counter_and_an_object_keeps_the_revision_of_its_change(
    server: ApiServer, http: Client
) -> None:
    server.put(SERVICES, service("web"))
    server.put(ENDPOINT_SLICES, {"metadata": {"name": "web-1"}})
    _, page = await http.list()
    assert page["items"][0]["metadata"]["resourceVersion"] == str(server.store.revision - 1)
    assert page["metadata"]["resourceVersion"] == str(server.store.revision)


async def test_an_update_keeps_the_uid_and_the_creation_time(server: ApiServer) -> None:
    before = server.put(SERVICES, service("web"))["metadata"]
    after = server.put(SERVICES, service("web", clusterIP="10.0.0.2"))["metadata"]
    assert (before["uid"], before["creationTimestamp"]) == (after["uid"], after["creationTimestamp"])
    assert before["resourceVersion"] != after["resourceVersion"]


async def test_a_list_at_a_future_revision_times_out_and_at_an_invalid_one_is_a_bad_request(
    server: ApiServer, http: Client
) -> None:
    status, body = await http.list(SERVICES, {"resourceVersion": "999999"})
    assert (status, body["message"]) == (504, f"Timeout: Too large resource version: 999999, current: {server.store.revision}")
    assert (await http.list(SERVICES, {"resourceVersion": "x"}))[0] == 400


async def test_a_watch_from_a_future_revision_waits_for_that_revision(server: ApiServer, http: Client) -> None:
    watch = await http.watch(SERVICES, {"resourceVersion": str(server.store.revision + 2), "allowWatchBookmarks": "true"})
    for name in ("a", "b", "c"):
        server.put(SERVICES, service(name))
        server.bookmark()
    events = [await watch.event() for _ in range(3)]
    assert [(kind, item["metadata"].get("name")) for kind, item in events] == [
        ("BOOKMARK", None),
        ("ADDED", "c"),
        ("BOOKMARK", None),
    ]


async def test_a_watch_from_a_future_revision_may_be_refused_instead(server: ApiServer, http: Client) -> None:
    server.waits_for_revision = False
    watch = await http.watch(SERVICES, {"resourceVersion": str(server.store.revision + 1)})
    assert watch.response.status == 504
    assert "Too large resource version" in (await watch.response.json())["message"]


# Pages "Labels and Selectors" and "Field Selectors"


async def test_selectors_match_the_absence_of_a_label_and_the_values_of_fields(server: ApiServer, http: Client) -> None:
    server.put(SERVICES, service("web"))
    server.put(SERVICES, service("headless", clusterIP="None"))
    server.put(SERVICES, service("foreign") | {"metadata": {"name": "foreign", "labels": {"proxy": ""}}})
    server.put(NODES, {"metadata": {"name": "n1"}})
    server.put(NODES, {"metadata": {"name": "n2"}})
    assert names((await http.list(SERVICES, {"labelSelector": "!proxy"}))[1]) == ["headless", "web"]
    assert names((await http.list(SERVICES, {"labelSelector": "proxy"}))[1]) == ["foreign"]
    assert names((await http.list(SERVICES, {"labelSelector": "!proxy", "fieldSelector": "spec.clusterIP!=None"}))[1]) == ["web"]
    assert names((await http.list(NODES, {"fieldSelector": "metadata.name=n2"}))[1]) == ["n2"]
    assert (await http.list(SERVICES, {"fieldSelector": "spec.colour=red"}))[0] == 400


async def test_an_object_that_begins_or_ceases_to_match_a_selector_is_added_or_deleted_for_its_watchers(
    server: ApiServer, http: Client
) -> None:
    watch = await http.watch(SERVICES, {"labelSelector": "!proxy", "resourceVersion": str(server.store.revision)})
    server.put(SERVICES, service("web"))
    server.put(SERVICES, service("web") | {"metadata": {"name": "web", "labels": {"proxy": "other"}}})
    server.put(SERVICES, service("web", clusterIP="10.0.0.3") | {"metadata": {"name": "web", "labels": {"proxy": "other"}}})
    server.put(SERVICES, service("web"))
    assert [(await watch.event())[0] for _ in range(3)] == ["ADDED", "DELETED", "ADDED"]


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
async def test_an_event_that_violates_a_validation_rule_is_not_created(server: ApiServer, change: Object, code: int) -> None:
    path = f"{server.url}/apis/events.k8s.io/v1/namespaces/default/events"
    async with aiohttp.ClientSession() as session, session.post(path, json=EVENT | change) as response:
        assert response.status == code
    assert len(server.events) == (code == 201)


async def test_creating_an_event_with_a_name_in_use_is_a_conflict(server: ApiServer) -> None:
    path = f"{server.url}/apis/events.k8s.io/v1/namespaces/default/events"
    async with aiohttp.ClientSession() as session:
        codes = []
        for _ in range(2):
            async with session.post(path, json=EVENT) as response:
                codes.append(response.status)
    assert codes == [201, 409]


# KEP-5958, "Accept Parameter"


@pytest.mark.parametrize("knows_drop", [True, False])
async def test_managed_fields_are_omitted_on_request_if_the_server_supports_that(
    server: ApiServer, http: Client, *, knows_drop: bool
) -> None:
    server.knows_drop = knows_drop
    managed = service("web")
    managed["metadata"]["managedFields"] = [{"manager": "kubectl"}]
    server.put(SERVICES, managed)
    dropping = {"Accept": "application/json;drop=metadata.managedFields, application/json"}
    for headers, is_there in (({"Accept": "application/json"}, True), (dropping, not knows_drop)):
        async with http.get(SERVICES.path, headers=headers) as response:
            (item,) = (await response.json())["items"]
        async with http.get(SERVICES.path, params={"watch": "1"}, headers=headers) as response:
            watch = Watch(response)
            _, added = await watch.event()
            server.put(SERVICES, managed)
            _, modified = await watch.event()
        for one in (item, added, modified):
            assert ("managedFields" in one["metadata"]) is is_there
            assert one["metadata"]["name"] == "web"
