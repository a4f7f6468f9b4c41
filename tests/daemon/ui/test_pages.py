"""Covers the page's API, and the requests that this API refuses, on an in-memory node in virtual time.

``tests/ui`` covers how the page looks, and ``test_cost`` covers the cost of the page.
"""

import asyncio
import contextlib
import errno
import re
from collections.abc import AsyncIterator, Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ipvsproxy.daemon.http.server import Answer, Request
from ipvsproxy.daemon.sources.source import ApiError, Trouble
from ipvsproxy.daemon.ui import counters, names, pages
from ipvsproxy.kernel.base.errors import KernelError
from ipvsproxy.model import steps
from ipvsproxy.model.service import ApiObject, Endpoint, ObjectKind, ServiceName, ServiceType, Skipped
from ipvsproxy.model.virtual_servers import ConnectionCounts, RealServers
from ipvsproxy.translate.api.targets import Target
from tests.support import builders
from tests.support.builders import OTHER_NODE, endpoint
from tests.support.page_node import PageNode
from tests.support.virtual_time import in_virtual_time

DOCUMENTED = (Path(__file__).parents[3] / "docs/ui.md").read_text()
CLUSTER = builders.frontend(builders.CLUSTER_IP, 80)
FIRST = builders.backend("10.244.0.1")
ENDPOINTS = (endpoint("10.244.0.1"), endpoint("10.244.0.2", ready=False), endpoint("10.244.1.1", OTHER_NODE))
WEB: tuple[ApiObject, ...] = (
    builders.node(),
    builders.service("web", builders.service_port(80, node_port=30080), kind=ServiceType.NODE_PORT),
    builders.endpoint_slice(*ENDPOINTS),
)
SAMPLE_S = counters.SAMPLE_S + 0.1
"""The longest time, in seconds, between two readings of the counters while the page has a viewer."""


def _node(*objects: ApiObject) -> PageNode:
    node = PageNode()
    node.begin_with(*(objects or WEB))
    return node


@contextlib.asynccontextmanager
async def _serving(*objects: ApiObject) -> AsyncIterator[PageNode]:
    """A node that has programmed these objects."""
    node = _node(*objects)
    async with node.reading():
        await node.quiet(1)
        yield node


async def _answer(node: PageNode, path: str, host: str = "localhost", method: str = "GET", **query: str) -> Answer:
    return await node.pages.answer(Request(path, query, {"host": host}, method))


async def _refusal(node: PageNode, what: str, **query: str) -> tuple[int, str]:
    answer = await _answer(node, f"/ui/api/{what}.json", **query)
    return answer.status, msgspec.json.decode(answer.body)["error"]


async def _watch(node: PageNode, what: str, **query: str) -> dict[str, Any]:
    """Requests the same data four times, and returns the last answer.

    Between every two requests, the node reads the traffic counters of IPVS.
    """
    for _ in range(3):
        await node.ask(what, **query)
        await node.quiet(SAMPLE_S)
    return await node.ask(what, **query)


# The node.


@in_virtual_time
async def test_the_node_page_shows_that_everything_is_programmed() -> None:
    async with _serving() as node:
        told = await node.ask("node")
    assert (told["inForce"], told["reasons"]) == (True, [])
    assert (told["node"], told["zone"], told["source"]) == (builders.THIS_NODE, builders.ZONE, "API server")
    assert (told["services"], told["virtualServers"], told["realServers"]) == (1, 2, 4)
    assert told["pending"] == {"total": 0, "byKind": {}, "text": ""}
    assert [sync["services"] for sync in told["syncs"]] == [1]
    assert {one["family"]: one["iptables"] for one in told["kernel"]["families"]} == {"IPv4": "nft", "IPv6": "nft"}
    assert {one["kind"]: one["connected"] for one in told["watches"]} == dict.fromkeys(ObjectKind, True)


@in_virtual_time
async def test_the_node_page_shows_why_some_objects_are_not_programmed() -> None:
    node = _node()
    node.kernel.fail(lambda operation: isinstance(operation.item, RealServers), errno.ENOMEM, times=1000)
    async with node.reading():
        await node.quiet(0.1)
        told = await node.ask("node")
        assert not told["inForce"]
        assert told["failed"] > 0
        assert told["reasons"] == [
            f"{told['failed']} operations failed and will be tried again",
            "not yet as desired: 2 virtual servers",
        ]
        (row,) = (await node.ask("services"))["services"]
        assert any(problem.startswith("failed: ") for problem in row["problems"]), row
        events = (await node.ask("events"))["events"]
        assert "failure" in {event["kind"] for event in events}
        node.kernel._failures.clear()
        await node.quiet(120)
        assert (await node.ask("node"))["inForce"]
        (row,) = (await node.ask("services"))["services"]
        assert row["problems"] == []


@in_virtual_time
async def test_the_node_page_shows_that_the_first_lists_are_not_complete_yet() -> None:
    node = PageNode()
    async with node.reading():
        await node.quiet(1)
        told = await node.ask("node")
        assert told["reasons"] == [f"the first list of {kind} is not complete" for kind in ("EndpointSlice", "Node", "Service")]
        assert (await node.ask("services"))["total"] == 0


@in_virtual_time
async def test_the_page_and_its_events_show_that_a_watch_is_not_connected() -> None:
    async with _serving() as node:
        await node.ask("node")
        node.watches[ObjectKind.SERVICE].connected = False
        told = await node.ask("node")
        assert {one["kind"] for one in told["watches"] if not one["connected"]} == {"Service"}
        assert (await node.ask("events"))["events"][0]["text"] == "Service: not connected"


async def _targets(node: PageNode) -> list[str | None]:
    """The pod of each endpoint in the view of the Service ``web``; None if the view does not name the pod."""
    (port, *_) = (await node.ask("service", name="default/web"))["service"]["ports"]
    return [one["target"] for one in port["endpoints"]]


async def _put_endpoints(node: PageNode, *endpoints: Endpoint) -> None:
    """Replace the endpoints of the Service web, and wait until the change is programmed."""
    node.put(builders.endpoint_slice(*endpoints))
    await node.quiet(1)


async def _last_text(node: PageNode) -> str:
    return str((await node.ask("events"))["events"][0]["text"])


@in_virtual_time
async def test_the_text_of_an_event_says_what_happened_to_each_endpoint() -> None:
    async with _serving(*WEB[:2], builders.endpoint_slice(ENDPOINTS[0], ENDPOINTS[2])) as node:
        assert (await _last_text(node)).startswith(
            "default/web: 10.244.0.1 (node-a) added, weight 1; 10.244.1.1 (node-b) added, weight 1; added "
        )
        for key in node.kernel.virtual_servers:
            node.kernel.connection_counts[key, builders.backend("10.244.1.1")] = ConnectionCounts(10, 6)
        terminating = endpoint("10.244.1.1", OTHER_NODE, ready=False, terminating=True)
        await _put_endpoints(node, ENDPOINTS[0], terminating)
        assert await _last_text(node) == "default/web: 10.244.1.1 (node-b) weight 1 → 0, draining, 32 connections"
        (event,) = (await node.ask("events", since="1"))["events"]
        assert event["endpoints"] == [
            {
                "service": "default/web",
                "address": "10.244.1.1",
                "target": None,
                "node": "node-b",
                "weightBefore": 1,
                "weightAfter": 0,
                "draining": True,
                "connections": 32,
            }
        ]
        node.kernel.connection_counts.clear()
        node.put(builders.endpoint_slice(ENDPOINTS[0]))
        await node.quiet(60)
        assert await _last_text(node) == "default/web: 10.244.1.1 removed"
        await _put_endpoints(node)
        assert (await _last_text(node)).startswith("default/web: 10.244.0.1 removed; "), "at once, because it has no connections"


@in_virtual_time
async def test_an_event_names_the_first_endpoints_and_counts_the_other_endpoints() -> None:
    async with _serving(*WEB[:2]) as node:
        await _put_endpoints(node, *(endpoint(f"10.244.0.{number}") for number in range(1, 10)))
        text = await _last_text(node)
        assert "10.244.0.3 (node-a) added, weight 1; 6 more endpoints" in text
        assert "real server" not in text
        await _put_endpoints(node, *(endpoint(f"10.244.0.{number}") for number in range(1, 200)))
        assert "; added 380 real servers, " in await _last_text(node)


WEB_NAME = ServiceName("default", "web")
PODS = {
    (WEB_NAME, builders.backend("10.244.0.1")): Target("default/web-a", "node-a"),
    (WEB_NAME, builders.backend("10.244.1.1")): Target("default/web-c", "node-b"),
}


@in_virtual_time
async def test_events_name_the_pods_of_added_and_deleted_endpoints_while_the_page_has_a_viewer() -> None:
    async with _serving(*WEB[:2], builders.endpoint_slice(ENDPOINTS[0], ENDPOINTS[2])) as node:
        node.targets.update(PODS)
        assert (await _last_text(node)).startswith(
            "default/web: 10.244.0.1 (web-a, node-a) added, weight 1; 10.244.1.1 (web-c, node-b) added, weight 1; added "
        )
        del node.targets[WEB_NAME, builders.backend("10.244.1.1")]
        await _put_endpoints(node, ENDPOINTS[0])
        assert await _last_text(node) == "default/web: 10.244.1.1 (web-c, node-b) removed"


@in_virtual_time
async def test_the_pod_names_of_a_viewed_service_are_read_again_only_after_its_endpoints_change() -> None:
    async with _serving() as node:
        node.targets.update(PODS)
        assert node.names_read == []
        for _ in range(5):
            assert await _targets(node) == ["default/web-a", None, "default/web-c"]
            await node.quiet(1)
        (port,) = (await node.ask("service", name="default/web"))["service"]["ports"]
        servers = port["virtualServers"][0]["kernel"]["realServers"]
        assert {one["realServer"]: one["target"] for one in servers} == {
            "10.244.0.1:8080": "default/web-a",
            "10.244.1.1:8080": "default/web-c",
        }
        assert node.names_read == [WEB_NAME]
        node.targets[WEB_NAME, builders.backend("10.244.0.2")] = Target("default/web-b", "node-a")
        await _put_endpoints(node, *ENDPOINTS, endpoint("10.244.0.9"))
        assert await _targets(node) == ["default/web-a", "default/web-b", "default/web-c", None]
        assert node.names_read == [WEB_NAME] * 2
        await node.quiet(200)
        assert node.pages._names._readings == {}, "nobody looks any more"


@in_virtual_time
async def test_pod_names_that_cannot_be_read_are_requested_rarely_and_the_view_names_no_pod() -> None:
    async with _serving() as node:
        node.names_error = ApiError(Trouble.UNREACHABLE, "no route")
        for _ in range(19):
            assert await _targets(node) == [None, None, None]
            await node.quiet(1)
        assert len(node.names_read) == 2


@in_virtual_time
async def test_only_the_first_answer_waits_for_pod_names_that_do_not_arrive() -> None:
    async with _serving() as node:
        node.names_delay_s = 30
        node.targets.update(PODS)
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        for _ in range(5):
            await node.ask("service", name="default/web")
        assert loop.time() - began_s == pytest.approx(names.WAIT_S, abs=0.5)
        await node.quiet(30)
        assert (await _targets(node))[0] == "default/web-a"


@in_virtual_time
async def test_a_slow_api_server_does_not_delay_answers_that_need_no_pod_names() -> None:
    many = [builders.service(f"s{number}", cluster=[f"10.96.1.{number}"]) for number in range(1, 5)]
    node = _node(WEB[0], *many)
    node.names_delay_s = 30
    async with node.reading(), asyncio.TaskGroup() as viewers:
        await node.quiet(1)
        for service in many:
            viewers.create_task(node.ask("service", name=str(service.name)))
        await asyncio.sleep(0)
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        await node.ask("node")
        assert loop.time() - began_s < names.WAIT_S / 2


@in_virtual_time
async def test_pod_names_are_kept_for_only_a_few_services() -> None:
    many = [builders.service(f"s{number}", cluster=[f"10.96.1.{number}"]) for number in range(1, names.MOST + 10)]
    async with _serving(WEB[0], *many) as node:
        for service in many:
            await node.ask("service", name=str(service.name))
        assert len(node.pages._names._readings) == names.MOST
        assert len(node.names_read) == names.BURST, "the others wait for the rate limit"
        await node.quiet(names.REFILL_S + 0.1)
        await node.ask("service", name=str(many[-1].name))
        assert node.names_read[names.BURST :] == [many[-1].name]


@in_virtual_time
async def test_a_search_for_services_with_problems_finds_a_service_only_while_it_has_a_problem() -> None:
    async with _serving() as node:
        for ready, found in ((True, []), (False, ["default/web"]), (True, [])):
            await _put_endpoints(node, endpoint("10.244.0.1", ready=ready))
            assert (await node.ask("services", query="web", problems="only"))["names"] == found


@in_virtual_time
async def test_the_answer_for_the_node_has_rates_and_only_history_points_later_than_the_given_time() -> None:
    async with _serving() as node:
        node.traffic.per_second[CLUSTER] = 100.0
        for _ in range(12):
            told = await node.ask("node")
            await node.quiet(1)
        told = await node.ask("node")
        assert told["connectionsPerSecond"] == pytest.approx(100, rel=0.8)
        assert told["bytesPerSecond"] == pytest.approx(10_000 * told["connectionsPerSecond"])
        assert (told["activeConnections"], told["inactiveConnections"]) == (0, 0)
        assert told["history"]["columns"][0] == "at"
        points = told["history"]["points"]
        assert len(points) > 3
        again = await node.ask("node", since=str(points[-2][0]))
        assert again["history"]["points"] == [points[-1]]


# Services.


@in_virtual_time
async def test_the_row_of_a_service_shows_addresses_ports_endpoints_and_traffic() -> None:
    async with _serving() as node:
        node.kernel.connection_counts[CLUSTER, FIRST] = ConnectionCounts(7, 1)
        told = await node.ask("services")
        node.traffic.per_second[CLUSTER] = 10.0
        (row,) = told["services"]
        assert row | {"history": None} == {
            "name": "default/web",
            "type": "NodePort",
            "served": True,
            "notServed": "",
            "addresses": [builders.CLUSTER_IP],
            "addressCount": 1,
            "ports": [{"name": "", "protocol": "TCP", "port": 80, "nodePort": 30080}],
            "portCount": 1,
            "endpoints": {"ready": 2, "draining": 0, "unused": 1},
            "problems": [],
            "connectionsPerSecond": None,
            "packetsPerSecond": None,
            "bytesPerSecond": None,
            "activeConnections": None,
            "inactiveConnections": None,
            "history": None,
        }
        told = await _watch(node, "services")
        (row,) = told["services"]
        assert row["connectionsPerSecond"] == pytest.approx(10, rel=0.9)
        assert (row["activeConnections"], row["inactiveConnections"]) == (7, 1)
        assert len(row["history"]["bytesPerSecond"]) > 0
        assert told["sampleSeconds"] > 0


@in_virtual_time
async def test_the_page_shows_added_services_and_no_longer_shows_removed_services() -> None:
    async with _serving() as node:
        await node.ask("services", query="default/")
        node.put(builders.service("more", cluster=["10.96.1.1"]))
        node.remove(WEB[1])
        await node.quiet(0.1)
        assert (await node.ask("services", query="default/"))["names"] == ["default/more"]
        assert (await node.ask("services", sort="name", order="desc"))["total"] == 1
        assert (await _refusal(node, "service", name="default/web"))[0] == 404


@in_virtual_time
async def test_the_server_sorts_services_and_divides_them_into_pages() -> None:
    rates = {number: float(number * 7 % 25) for number in range(25)}
    services = [builders.service(f"s{number:02}", cluster=[f"10.96.1.{number}"]) for number in range(25)]
    async with _serving(builders.node(), *services) as node:
        for number, rate in rates.items():
            node.traffic.per_second[builders.frontend(f"10.96.1.{number}", 80)] = 100 * rate
        told = await _watch(node, "services", sort="bytes", size="10", page="2")
        assert (told["matching"], told["page"], told["pages"], told["size"]) == (25, 2, 3, 10)
        by_rate = sorted(rates, key=lambda number: -rates[number])
        assert told["names"] == [f"default/s{number:02}" for number in by_rate[10:20]]
        told = await node.ask("services", sort="connections", order="asc", size="3")
        assert told["names"][0] == f"default/s{by_rate[-1]:02}"
        beyond = await node.ask("services", size="10", page="99")
        assert (beyond["page"], len(beyond["names"])) == (3, 5)
        backwards = await node.ask("services", order="desc", size="2")
        assert backwards["names"] == ["default/s24", "default/s23"]


@in_virtual_time
async def test_services_can_be_sorted_by_the_number_of_endpoints_or_by_the_number_of_problems() -> None:
    async with _serving(*WEB, builders.service("empty", cluster=["10.96.1.1"])) as node:
        assert (await node.ask("services", sort="endpoints"))["names"] == ["default/web", "default/empty"]
        assert (await node.ask("services", sort="problems"))["names"] == ["default/empty", "default/web"]


@in_virtual_time
async def test_the_row_of_a_service_shows_its_problems() -> None:
    headless = builders.with_options(
        builders.service("headless", cluster=[]), not_served=Skipped("spec.clusterIP", "headless", invalid=False)
    )
    first = builders.service("first", cluster=["10.96.1.1"], external=["192.0.2.1"], created_s=1)
    second = builders.service("second", cluster=["10.96.1.2"], external=["192.0.2.1"], created_s=2)
    late = builders.service("late", cluster=["10.96.1.3"])
    here = builders.service("here", cluster=["10.96.1.4"], internal_local=True)
    broken = builders.with_options(builders.service("broken", cluster=["10.96.1.5"]), skipped=(Skipped("spec.x", "is odd"),))
    slices = [
        builders.endpoint_slice(endpoint("10.244.0.5", ready=name != "late", node=OTHER_NODE), service=name)
        for name in ("first", "second", "late", "here", "broken")
    ]
    async with _serving(builders.node(), headless, first, second, late, here, broken, *slices) as node:
        rows = {row["name"].partition("/")[2]: row for row in (await node.ask("services"))["services"]}
    assert rows["headless"]["notServed"] == "spec.clusterIP: headless"
    assert {name: one["problems"] for name, one in rows.items()} == {
        "headless": [],
        "first": [],
        "second": ["TCP 192.0.2.1:80 is served for default/first, which is older and has it"],
        "late": ["its only endpoint is not used"],
        "broken": ["not used: spec.x: is odd"],
        "here": ["its only endpoint is not used"],
    }


@in_virtual_time
async def test_a_draining_endpoint_is_counted_until_its_connections_have_ended() -> None:
    async with _serving() as node:
        node.kernel.connection_counts[CLUSTER, FIRST] = ConnectionCounts(2, 0)
        await node.ask("services")
        node.put(builders.endpoint_slice(*ENDPOINTS[1:]))
        await node.quiet(0.1)
        (row,) = (await node.ask("services"))["services"]
        assert row["endpoints"] == {"ready": 1, "draining": 1, "unused": 1}
        assert (await node.ask("node"))["draining"] == 1
        node.kernel.connection_counts.clear()
        await node.quiet(100)
        told = await node.ask("services")
        assert told["services"][0]["endpoints"] == {"ready": 1, "draining": 0, "unused": 1}


# One Service.


@in_virtual_time
async def test_the_page_of_a_service_has_the_output_of_explain_plus_rates_and_zones() -> None:
    zoned = endpoint("10.244.0.1")
    zoned = zoned._replace(conditions=msgspec.structs.replace(zoned.conditions, zone="zone-b"))
    async with _serving(*WEB[:2], builders.endpoint_slice(zoned, *ENDPOINTS[1:])) as node:
        node.kernel.connection_counts[CLUSTER, FIRST] = ConnectionCounts(3, 4)
        node.traffic.per_second[CLUSTER] = 50.0
        told = await _watch(node, "service", name="default/web")
    (port,) = told["service"]["ports"]
    assert [one["zone"] for one in port["endpoints"]] == ["zone-b", "", ""]
    cluster = next(one for one in port["virtualServers"] if one["virtualServer"] == str(CLUSTER))
    first = next(one for one in cluster["kernel"]["realServers"] if one["realServer"] == str(FIRST))
    assert (first["active"], first["inactive"], first["state"]) == (3, 4, "serving")
    assert first["connectionsPerSecond"] == pytest.approx(25, rel=0.9)
    assert {one["from"] for one in cluster["masquerade"]} == {"pod of this node", "this host", "outside of the cluster"}
    row = told["row"]
    assert (row["name"], row["activeConnections"], row["inactiveConnections"]) == ("default/web", 3, 4)


@in_virtual_time
async def test_the_description_of_a_deleted_service_shows_no_virtual_server_as_held() -> None:
    first, second = (
        builders.service(name, cluster=[f"10.96.1.{number}"], external=["192.0.2.1"], created_s=number)
        for number, name in enumerate(("first", "second"), 1)
    )
    async with _serving(builders.node(), first, second) as node:
        describing = node.describing(second.name)
        next(describing)
        node.remove(second)
        await node.quiet(1)
        (port,) = steps.at_once(describing)["ports"]
    assert [(one["virtualServer"], one["held"], one["owner"]) for one in port["virtualServers"]] == [
        ("TCP 192.0.2.1:80", False, "default/first")
    ]


@in_virtual_time
async def test_a_request_without_a_usable_service_name_is_refused() -> None:
    node = PageNode()
    node.put(WEB[1])
    async with node.reading():
        await node.quiet(1)
        assert await _refusal(node, "service", name="default/web") == (
            503,
            "the Service default/web has not been looked at yet; ask again in a moment",
        )
        assert (await _refusal(node, "service", name="web"))[0] == 400
        assert await _refusal(node, "service", name="default/x") == (404, "there is no Service default/x")


@in_virtual_time
async def test_an_answer_with_many_endpoints_is_reused_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    async with _serving() as node:
        ages = []
        for many in (300, 0.1):
            monkeypatch.setattr(pages, "ENDPOINTS_PER_S", many)
            first = (await node.ask("service", name="default/web"))["now"]
            for wait_s in (0.5, pages.LONGEST_KEPT_S - 1, 1.0):
                await node.quiet(wait_s)
                ages.append(round((await node.ask("service", name="default/web"))["now"] - first, 1))
        assert ages == [0.5, 9.5, 10.5, 0, 0, 10.5]
        await node.quiet(counters.IDLE_S + 40)
        assert not node.pages._told


@in_virtual_time
async def test_the_numbers_of_remembered_services_and_answers_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "SHORTEST_KEPT_S", 0)
    services = [builders.service(f"s{number}", cluster=[f"10.96.1.{number}"]) for number in range(counters.OPENED + 3)]
    async with _serving(builders.node(), *services) as node:
        for one in services:
            await node.ask("service", name=str(one.name))
        assert (len(node.pages._told), len(node.pages._counters._opened)) == (pages.ANSWERS_KEPT, counters.OPENED)


@in_virtual_time
async def test_the_page_works_and_shows_unknown_figures_if_the_counters_cannot_be_read() -> None:
    async with _serving() as node:
        node.traffic.error = KernelError(action="read the counters of IPVS", errno=errno.EPERM)
        assert (await _watch(node, "node"))["connectionsPerSecond"] is None
        assert (await node.ask("services"))["services"][0]["connectionsPerSecond"] is None
        node.traffic.error = None
        assert (await _watch(node, "node"))["connectionsPerSecond"] == 0


@in_virtual_time
async def test_with_many_virtual_servers_the_counters_are_read_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counters, "READ_PER_S", 0.1)  # the counters of two virtual servers are read every 20 s
    async with _serving() as node:
        for _ in range(60):
            await node.ask("node")
            await node.quiet(1)
        assert 3 <= node.traffic.readings <= 4


# Nobody looks.


@in_virtual_time
async def test_each_audit_reads_only_the_total_counters_of_the_node_while_nobody_views_the_page() -> None:
    node = _node()
    async with node.reading():
        await node.quiet(600)
        assert node.traffic.readings == 0
        assert not any(node.traffic.connections_wanted)
        assert 15 <= node.traffic.totals_read <= 25
        told = await node.ask("node")
        assert 15 <= len(told["history"]["points"]) <= 25


@in_virtual_time
async def test_the_page_frees_its_data_some_time_after_its_last_viewer() -> None:
    async with _serving() as node:
        await _watch(node, "services")
        assert node.traffic.readings > 2
        await node.quiet(counters.IDLE_S + 70)
        readings = node.traffic.readings
        assert node.pages._board is None
        await node.quiet(300)
        assert node.traffic.readings == readings
        assert not node.traffic.connections_wanted[-1]
        (row,) = (await node.ask("services"))["services"]
        assert row["connectionsPerSecond"] is None


# What is refused.


@in_virtual_time
async def test_viewers_beyond_the_limit_get_an_error_that_names_the_limit() -> None:
    async with _serving() as node:
        for number in range(counters.MOST_VIEWERS):
            await node.ask("events", viewer=f"v{number:031}")
        assert await _refusal(node, "events", viewer="late") == (503, "16 viewers look at this node already; close one of them")
        for name in ("<b>", "a" * 33):
            assert (await _refusal(node, "events", viewer=name))[0] == 400


@in_virtual_time
async def test_the_page_answers_a_request_only_if_the_method_is_get_and_the_host_header_names_this_node() -> None:
    node = _node()
    for host in ("localhost", "LOCALHOST:10249", "127.0.0.1:10249", "[::1]:10249", "10.0.0.7", builders.THIS_NODE):
        for path, content_type in (("/ui/", "text/html; charset=utf-8"), ("/ui/api/node.json", "application/json")):
            answer = await _answer(node, path, host)
            assert answer.status == 200, host
            assert answer.headers.items() >= {"Content-Type": content_type, "Cache-Control": "no-store"}.items()
    for host in ("", "evil.example", "127.0.0.1.evil.example", "localhost.evil.example", "[::1", "a:b:c"):
        for path in ("/ui/", "/ui/api/node.json", "/ui"):
            assert (await _answer(node, path, host)).status == 421, host
    for method in ("POST", "PUT", "DELETE", "OPTIONS"):
        answer = await _answer(node, "/ui/api/node.json", method=method)
        assert (answer.status, answer.headers["Allow"]) == (405, "GET, HEAD")
    for path in ("/ui/api/", "/ui/api/x.json", "/ui/api/node", "/ui/x", "/ui/../pages.py", "/ui/static/page.js"):
        assert (await _answer(node, path)).status == 404, path
    answer = await _answer(node, "/ui")
    assert (answer.status, answer.headers["Location"]) == (308, "ui/"), "relative to its URL"


@in_virtual_time
async def test_a_query_parameter_that_cannot_be_parsed_is_refused() -> None:
    long, node = "x" * 254, _node()
    of_services = f"sort=age order=up page=0 size=201 size=x page=٣ query={long} namespace={long} type=Other problems=none"
    asked = [("services", word) for word in of_services.split()]
    asked += [("node", "since=x"), ("node", "since=nan"), ("events", "since=inf"), ("service", "name=")]
    for what, word in asked:
        name, _, value = word.partition("=")
        status, sentence = await _refusal(node, what, **{name: value})
        assert (status, bool(sentence)) == (400, True), word


# The files.


@in_virtual_time
async def test_every_file_of_the_page_is_served_with_a_header_that_forbids_content_of_other_hosts() -> None:
    node = _node()
    static = Path(pages.__file__).parent / "static"
    assert {path.name for path in static.iterdir()} == set(pages.FILES)
    for name in pages.FILES:
        answer = await _answer(node, f"/ui/{name}")
        text = answer.body.decode()
        assert answer.status == 200
        assert answer.headers["Content-Security-Policy"].startswith("default-src 'none'; script-src 'self'; style-src 'self';")
        assert "unsafe" not in answer.headers["Content-Security-Policy"]
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
        assert "://" not in text.replace("http://www.w3.org/2000/svg", ""), name
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function", text), name
        assert name.endswith(".js") or not re.search(r"<script(?![^>]*src=)|\son\w+=|style=", text), name


# The description.


def _fields(documents: Iterable[Mapping[str, Any]]) -> set[str]:
    return {name for document in documents for name in document}


@in_virtual_time
async def test_every_field_of_the_page_api_is_documented() -> None:
    async with _serving() as node:
        told = await node.ask("node")
        services = await node.ask("services")
        service = await node.ask("service", name="default/web")
        events = await node.ask("events")
    names = _fields([told, *told["syncs"], *told["watches"], told["kernel"], services, *services["services"], service, events])
    names |= _fields([*events["events"], *(one for event in events["events"] for one in event["endpoints"])])
    names |= set(told["history"]["columns"])
    assert {name for name in names if f"`{name}`" not in DOCUMENTED} == set()
