"""Covers Kubernetes Events: their causes, their form and rate, and failed writes. The tests use no real API server."""

import asyncio
import dataclasses
import errno
import pathlib
import random
from collections.abc import Mapping
from typing import Any

import pytest

from ipvsproxy.daemon.events import (
    BURST,
    OBJECT_BURST,
    OBJECT_REFILL_S,
    REFILL_S,
    SET_FULL,
    SPREAD_S,
    Announcer,
    KubernetesEvent,
    Recorder,
    Regarding,
)
from ipvsproxy.daemon.http.health import Status
from ipvsproxy.daemon.sources import watch
from ipvsproxy.daemon.sources.source import ApiError
from ipvsproxy.model.net import Family, parse_address
from ipvsproxy.model.plan import Operation, Outcome, Report, Verb
from ipvsproxy.model.service import ObjectKind, Owner, ServiceName, Skipped
from ipvsproxy.model.sets import SetEntries, SetEntry, SetKind
from ipvsproxy.model.state import ServiceState
from ipvsproxy.reconcile.tables.table import Conflict
from ipvsproxy.store.objects import Changes, Complaint, Store
from tests.support import api_server, builders
from tests.support.api_server import ApiServer
from tests.support.following import running_task
from tests.support.memory_node import put
from tests.support.summaries import Clock, summary

NODE = Regarding(ObjectKind.NODE, "node-a", uid="node-a")


def of_service(name: ServiceName, uid: str = "") -> Regarding:
    return Regarding(ObjectKind.SERVICE, name.name, name.namespace, uid)


WEB = ServiceName("shop", "web")


class Desk:
    """A recorder that appends Events to a list, and does not send them to an API server."""

    def __init__(self) -> None:
        self.clock = Clock(100.0)
        self.error: ApiError | None = None
        self.written: list[Any] = []
        self.outcomes: list[str] = []
        self.recorder = Recorder(
            node_name="node-a",
            post=self._post,
            on_outcome=self.outcomes.append,
            clock=self.clock,
            wall_clock=lambda: 1_800_000_000.000001,
            dice=random.Random(1),
        )

    async def _post(self, path: str, body: Mapping[str, object]) -> None:
        if self.error:
            raise self.error
        self.written.append({"path": path, **body})

    def record(self, note: str = "", regarding: Regarding = NODE, *, everywhere: bool = False) -> None:
        self.recorder.record(KubernetesEvent(regarding, "Reason", "Act", note, everywhere=everywhere))

    async def write(self, *event: Any, **more: Any) -> None:
        """Record an event, and write all events that are due."""
        self.record(*event, **more)
        await self.recorder.write_due()


async def test_an_event_is_written_in_the_form_that_kube_proxy_uses() -> None:
    desk = Desk()
    desk.recorder.record(KubernetesEvent(NODE, "Starting", "StartKubeProxy", "", is_warning=False))
    await desk.recorder.write_due()
    assert desk.written == [
        {
            "path": "/apis/events.k8s.io/v1/namespaces/default/events",
            "apiVersion": "events.k8s.io/v1",
            "kind": "Event",
            "metadata": {"name": "node-a.6651728988001", "namespace": "default"},
            "eventTime": "2027-01-15T08:00:00.000001Z",
            "reportingController": "kube-proxy",
            "reportingInstance": "kube-proxy-node-a",
            "action": "StartKubeProxy",
            "reason": "Starting",
            "regarding": {"apiVersion": "v1", "kind": "Node", "name": "node-a", "uid": "node-a"},
            "note": "",
            "type": "Normal",
        }
    ]
    assert desk.outcomes == ["posted"]


async def test_an_event_about_a_service_is_in_the_namespace_of_the_service() -> None:
    desk = Desk()
    await desk.write(regarding=of_service(WEB, "u1"))
    (event,) = desk.written
    assert event["path"] == "/apis/events.k8s.io/v1/namespaces/shop/events"
    assert event["regarding"] == {"apiVersion": "v1", "kind": "Service", "name": "web", "namespace": "shop", "uid": "u1"}


async def test_repetitions_of_a_waiting_event_are_written_as_one_event_with_a_count() -> None:
    desk = Desk()
    for _ in range(3):
        desk.record("same")
    await desk.recorder.write_due()
    (event,) = desk.written
    assert event["series"] == {"count": 3, "lastObservedTime": "2027-01-15T08:00:00.000001Z"}


async def test_the_next_event_about_an_object_counts_the_events_that_its_rate_limit_dropped() -> None:
    desk = Desk()
    for number in range(OBJECT_BURST + 3):
        await desk.write()
        desk.clock.now += number and 0.001
    assert len(desk.written) == OBJECT_BURST
    assert desk.outcomes.count("dropped") == 3
    await desk.write(regarding=of_service(WEB))
    assert len(desk.written) == OBJECT_BURST + 1, "each object has its own rate limit"
    desk.clock.now += OBJECT_REFILL_S
    await desk.write()
    assert desk.written[-1]["series"]["count"] == 4


async def test_the_rate_of_all_events_of_the_process_is_limited() -> None:
    desk = Desk()
    for number in range(BURST + 10):
        desk.record(regarding=of_service(ServiceName("shop", f"s{number}")))
    await desk.recorder.write_due()
    assert len(desk.written) == BURST
    desk.clock.now += 3 * REFILL_S
    for number in range(10):
        desk.record(regarding=of_service(ServiceName("shop", f"t{number}")))
    await desk.recorder.write_due()
    assert len(desk.written) == BURST + 3


async def test_an_event_that_all_nodes_post_is_delayed_and_has_the_same_name_on_each_node() -> None:
    names = set()
    for _ in range(2):
        desk = Desk()
        await desk.write("wrong", everywhere=True)
        assert desk.written == []
        desk.clock.now += SPREAD_S
        await desk.recorder.write_due()
        names.add(desk.written[0]["metadata"]["name"])
    assert len(names) == 1
    desk.error = ApiError.of_status(409, "exists")
    desk.record("wrong", everywhere=True)
    desk.clock.now += SPREAD_S
    await desk.recorder.write_due()
    assert desk.outcomes == ["posted", "posted"]


async def test_an_event_is_dropped_if_it_cannot_be_written() -> None:
    desk = Desk()
    desk.error = ApiError.of_status(403, "no")
    await desk.write()
    desk.error = None
    await desk.recorder.write_due()
    assert (desk.written, desk.outcomes) == ([], ["failed"])


async def test_events_are_not_queued_if_there_is_no_api_server() -> None:
    outcomes: list[str] = []
    recorder = Recorder(node_name="node-a", post=None, on_outcome=outcomes.append)
    recorder.record(KubernetesEvent(NODE, "Starting", "StartKubeProxy", ""))
    await recorder.write_due()
    assert outcomes == []


async def test_a_long_note_of_an_event_is_truncated_between_characters() -> None:
    desk = Desk()
    await desk.write("x" + "ü" * 1000)
    assert desk.written[0]["note"] == "x" + "ü" * 511


async def test_recorded_events_reach_an_api_server(tmp_path: pathlib.Path) -> None:
    async with ApiServer(token="t") as server:
        kubeconfig = api_server.write_kubeconfig(tmp_path / "kubeconfig", server.url, user={"token": "t"})
        source = watch.KubernetesSource(node_name="node-a", kubeconfig=kubeconfig)
        recorder = Recorder(node_name="node-a", post=source.post)
        async with running_task(recorder.run()), asyncio.timeout(60):
            recorder.record(KubernetesEvent(NODE, "Starting", "StartKubeProxy", "", is_warning=False))
            recorder.record(KubernetesEvent(of_service(WEB, "u1"), "Other", "Listen", "port 80: in use"))
            await server.event_count(2)
    assert [event["reason"] for event in server.events] == ["Starting", "Other"]


# Tests of what causes an event.


class Stage:
    """An event announcer with the recorder that it uses."""

    def __init__(self) -> None:
        self.desk = Desk()
        self.store = Store(started_s=0)
        self.store.deliver([put(builders.service("web", namespace="shop"))], 0)
        clock = self.desk.clock
        self.status = Status(families=[Family.IPV4], sync_period_s=30, clock=clock, wall_clock=clock)
        self.announcer = Announcer(self.desk.recorder, self.store, self.status)

    async def written(self) -> list[tuple[str, str, str]]:
        self.desk.clock.now += SPREAD_S
        await self.desk.recorder.write_due()
        written = self.desk.written
        return [(event["regarding"]["name"], event["reason"], event["note"]) for event in written]


async def test_the_start_and_each_notice_cause_one_event_on_the_node() -> None:
    stage = Stage()
    stage.status.note("SchedulerMissing", "no mh")
    stage.announcer.start()
    stage.announcer.synced(summary())
    assert await stage.written() == [("node-a", "Starting", ""), ("node-a", "SchedulerMissing", "no mh")]


async def test_a_health_check_port_that_cannot_be_opened_causes_the_same_event_as_in_kube_proxy() -> None:
    stage = Stage()
    stage.announcer.port_failed(WEB, 30001, "address already in use")
    note = 'node node-a failed to start healthcheck "shop/web" on port 30001: address already in use'
    assert await stage.written() == [("web", "FailedToStartServiceHealthcheck", note)]
    assert stage.desk.written[0]["regarding"]["uid"] == "uid-of-web"


async def test_invalid_fields_cause_an_event_on_their_object() -> None:
    stage = Stage()
    wrong, not_ours = Skipped("spec.clusterIPs", "'x' is no address"), Skipped("spec", "headless", invalid=False)
    complaints = (
        Complaint(ObjectKind.SERVICE, "shop/web", (wrong, not_ours)),
        Complaint(ObjectKind.SERVICE, "shop/headless", (not_ours,)),
        Complaint(ObjectKind.ENDPOINT_SLICE, "shop/web-1", (Skipped("endpoints[0]", "no address"),)),
        Complaint(ObjectKind.SERVICE, "", (Skipped("", "not JSON"),)),
    )
    stage.announcer.synced(summary(Changes(complaints=complaints)))
    assert sorted(await stage.written()) == [
        ("web", "InvalidObject", "not used: spec.clusterIPs: 'x' is no address"),
        ("web-1", "InvalidObject", "not used: endpoints[0]: no address"),
    ]
    assert {event["regarding"]["apiVersion"] for event in stage.desk.written} == {"v1", "discovery.k8s.io/v1"}


async def test_a_service_with_the_address_of_another_node_causes_an_event_and_a_notice() -> None:
    stage = Stage()
    address = parse_address("192.168.0.11")
    view = dataclasses.replace(builders.node_view(), other_nodes={address: "node-b"})
    bound = ServiceState(owner=Owner(1, WEB), addresses=(address,))
    for _ in range(2):
        stage.announcer.synced(summary(states=[bound], view=view))
    service, notice = sorted(await stage.written(), reverse=True)
    assert service[:2] == ("web", "NodeAddressHidden")
    assert service[2].startswith(
        "192.168.0.11 of node-b: external or load-balancer IPs that are addresses of nodes make these unreach"
    )
    assert all(
        way in service[2] for way in ("ipMode: Proxy", "ipvsproxy.io/skip-load-balancer-ips", "AllowServiceExternalIPs=false")
    )
    assert notice[:2] == ("node-a", "NodeAddressHidden")
    assert "shop/web has 192.168.0.11 of node-b" in notice[2]
    stage.announcer.synced(summary(states=[ServiceState(owner=Owner(1, WEB))], view=view))
    assert stage.status.notices == {}


async def test_an_address_conflict_causes_an_event_on_each_service_that_does_not_get_the_address() -> None:
    stage = Stage()
    old = Owner(1, ServiceName("shop", "old"))
    conflict = Conflict(builders.frontend("10.96.0.10", 80), old, (Owner(2, WEB),), ("is older",))
    stage.announcer.synced(summary(conflicts=[conflict]))
    ((name, reason, note),) = await stage.written()
    assert (name, reason) == ("web", "AddressConflict")
    assert "TCP 10.96.0.10:80: shop/old is older" in note


@pytest.mark.parametrize(("number", "times"), [(SET_FULL[0], 1), (errno.EIO, 0)])
async def test_a_full_set_causes_an_event_on_the_node(number: int, times: int) -> None:
    stage = Stage()
    entries = [SetEntry(SetKind.CLUSTER_IP.value, builders.addresses(f"10.0.0.{one}")[0]) for one in (1, 2)]
    errors = tuple(Outcome(Operation(Verb.ADD, SetEntries.of(entry)), "the set is full", number) for entry in entries)
    stage.announcer.synced(summary(report=Report(done={}, failed={}, errors=errors, pending=2)))
    assert await stage.written() == [("node-a", "SetFull", "KUBE-CLUSTER-IP: the set is full")] * times
