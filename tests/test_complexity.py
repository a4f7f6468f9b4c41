"""Covers how many messages and executed lines a change costs, from the watch line to the bytes for the kernel.

No test measures time.

The tests run the program's own code for decoding, translation, reconciliation and encoding; they replace only the sockets. The
number of messages must not depend on the number of Services, or on the number of endpoints of a Service. If a tenant writes a
field of length n, the number of executed lines may grow no faster than n log n. ``scripts/bench`` measures times.
"""

import collections
import contextlib
import json
import math
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest

import ipvsproxy
from ipvsproxy.daemon.ui.explanation import Explainer
from ipvsproxy.kernel.backends import Driver
from ipvsproxy.kernel.base import netlink
from ipvsproxy.kernel.ipset.ipset_driver import IpsetDriver
from ipvsproxy.kernel.ipvs.ipvs_driver import IpvsDriver
from ipvsproxy.kernel.nftables.nft_sets_driver import NftSetsDriver
from ipvsproxy.model.net import parse_address
from ipvsproxy.model.plan import Operation, Outcome
from ipvsproxy.model.rules import Backend
from ipvsproxy.model.service import ObjectKind, Put, Service, ServiceName
from ipvsproxy.model.sets import SetEntries
from ipvsproxy.model.steps import at_once
from ipvsproxy.model.virtual_servers import RealServers, VirtualServer
from ipvsproxy.store.objects import Store
from ipvsproxy.translate.api import decode
from ipvsproxy.translate.services import desired_state
from ipvsproxy.translate.translation_settings import Settings, TrafficScopes
from tests.support import builders, memory_node
from tests.support.fake_kernel import FakeKernel
from tests.support.fake_netlink import FakeSocket
from tests.support.memory_node import MemoryNode
from tests.support.virtual_time import in_virtual_time

FEW, MANY = 3, 1500
IPVS_FAMILY = 30
NEW_DESTINATION = 116
"""The number of bytes of a message that adds an IPv4 real server (netlink, generic netlink and IPVS attributes)."""


def _connect(_protocol: int) -> FakeSocket:
    return FakeSocket(lambda _data: ())


class Wire(FakeKernel):
    """An in-memory kernel that also encodes every operation, and counts the messages that would be sent."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, backend: Backend) -> None:
        super().__init__()
        self.host_addresses = [builders.interface_address("eth0", builders.NODE_ADDRESS)]
        self.counted: collections.Counter[str] = collections.Counter()
        monkeypatch.setattr(netlink, "resolve_family", lambda *_: IPVS_FAMILY)
        monkeypatch.setattr(netlink.Channel, "run", self._run)
        self.sysctls = {setting.path: "0" for setting in memory_node.SYSCTLS}
        ipvs = IpvsDriver(_connect)
        sets = NftSetsDriver(_connect) if backend is Backend.NFTABLES else IpsetDriver(_connect)
        self._drivers: dict[type, Driver] = {VirtualServer: ipvs, RealServers: ipvs, SetEntries: sets}

    def _run(self, messages: Sequence[bytes], _refusal: int | None = None) -> dict[int, int]:
        self.counted.update(sends=1, messages=len(messages), bytes=sum(map(len, messages)))
        return {}

    def apply(self, operations: Sequence[Operation]) -> list[Outcome]:
        for kind, driver in self._drivers.items():
            chosen = [operation for operation in operations if type(operation.item) is kind]
            if chosen:
                driver.apply(chosen)
        return super().apply(operations)

    def observe(self, *arguments: object) -> object:  # type: ignore[override]  # the arguments are passed on unchanged
        self.counted["readings"] += 1
        return super().observe(*arguments)  # type: ignore[arg-type]  # the arguments are passed on unchanged


def service(number: int) -> Service:
    return builders.service(f"web-{number}", builders.service_port(name="p0"), cluster=[address(number + 1, 10)])


def deliver_slice(served: MemoryNode, number: int, endpoints: int) -> None:
    """Deliver the EndpointSlice of a Service that has this many endpoints, all of them on other nodes."""
    served.deliver([event_of(*sliced(service=f"web-{number}", endpoints=endpoints))])


@pytest.fixture(name="wire", params=[Backend.IPTABLES, Backend.NFTABLES])
def _wire(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Wire]:
    """A function that creates an in-memory kernel; this kernel encodes set entries for the backend of this test run."""
    return lambda: Wire(monkeypatch, request.param)


async def cost_of_one_more(monkeypatch: pytest.MonkeyPatch, wire: Wire, services: int, endpoints: int) -> dict[str, int]:
    """Counts translations and netlink messages while an endpoint is added to a Service that has ``endpoints`` endpoints.

    The node has ``services`` Services.
    """
    translated: collections.Counter[str] = collections.Counter()
    translating = desired_state.translating

    def counting(*arguments: object, **choices: object) -> object:
        translated["translated"] += 1
        return translating(*arguments, **choices)  # type: ignore[arg-type]  # the arguments are passed on unchanged

    monkeypatch.setattr(desired_state, "translating", counting)
    async with MemoryNode(wire).serving(*map(service, range(services))) as served:
        deliver_slice(served, 0, endpoints)
        await served.quiet()
        wire.counted.clear()
        translated.clear()
        deliver_slice(served, 0, endpoints + 1)
        await served.quiet()
    return dict(wire.counted + translated)


@in_virtual_time
async def test_adding_an_endpoint_costs_one_message_whatever_the_size_of_the_cluster(
    monkeypatch: pytest.MonkeyPatch, wire: Callable[[], Wire]
) -> None:
    expected = {"translated": 1, "sends": 1, "messages": 1, "bytes": NEW_DESTINATION}
    assert await cost_of_one_more(monkeypatch, wire(), FEW, 2) == expected
    assert await cost_of_one_more(monkeypatch, wire(), MANY, 2) == expected
    assert await cost_of_one_more(monkeypatch, wire(), FEW, 900) == expected


def cost_of_an_address_that_changes_hands(services: int) -> int:
    """The number of lines executed while another node takes, and then releases, an external IP of a Service."""
    stages: dict[str, Lines] = {}
    store, taken = Store(0), builders.NODE_ADDRESS
    store.deliver([memory_node.put(builders.service("hides", external=[taken]))], 0)
    for number in range(services):
        own = builders.service(f"web-{number}", external=[f"203.0.{number // 250}.{number % 250 + 1}"])
        pods = builders.endpoint_slice(builders.endpoint("10.244.1.9", builders.OTHER_NODE), service=f"web-{number}")
        store.deliver([memory_node.put(own), memory_node.put(pods)], 0)
    there = [builders.endpoint(address, builders.OTHER_NODE) for address in (taken, "10.244.1.8")]
    agents = [builders.endpoint_slice(one, service="agent") for one in there]
    assert not store.other_nodes
    store.take()
    with counting(stages, "change"):
        for agent, expected in zip(agents, (1, 0), strict=True):
            store.deliver([memory_node.put(agent)], 0)
            assert len(store.other_nodes) == expected
            store.touch_external([parse_address(taken)], 0)
    assert store.take().services.keys() == {ServiceName("default", name) for name in ("hides", "agent")}
    return stages["change"].total()


def test_a_node_takes_and_releases_a_service_address_at_a_cost_independent_of_the_cluster_size() -> None:
    assert cost_of_an_address_that_changes_hands(FEW) == cost_of_an_address_that_changes_hands(MANY)


async def cost_of_a_service(wire: Wire, services: int) -> dict[str, int]:
    """The counts for adding one Service and deleting it again, on a node with ``services`` Services, including this Service."""
    async with MemoryNode(wire).serving(*map(service, range(1, services))) as served:
        wire.counted.clear()
        served.put(service(0))
        await served.quiet()
        served.remove(service(0))
        await served.quiet()
    return dict(wire.counted)


@in_virtual_time
async def test_the_number_of_messages_for_adding_and_deleting_a_service_is_independent_of_the_cluster_size(
    wire: Callable[[], Wire],
) -> None:
    counted = await cost_of_a_service(wire(), FEW)
    assert counted["messages"] >= 4, "a virtual server and an entry of a set, added and removed"
    assert await cost_of_a_service(wire(), MANY) == counted


@in_virtual_time
async def test_the_objects_of_a_first_list_are_sent_to_the_kernel_in_few_large_messages(wire: Callable[[], Wire]) -> None:
    used = wire()
    async with MemoryNode(used).serving(*map(service, range(MANY))):
        pass
    assert MANY < used.counted["messages"] < 1.1 * MANY, "one for each virtual server; set entries share messages"
    assert used.counted["sends"] < MANY / 50
    assert used.counted["readings"] == 1


# The number of lines executed for a field of length n.

SHORT, LONG = 16, 48
MOST_GROWTH = 1.1 * LONG * math.log(LONG) / (SHORT * math.log(SHORT))
"""The largest factor by which the number of executed lines may grow if a field grows from the length ``SHORT`` to ``LONG``. It is
the growth of n log(n), plus ten percent."""
SHARE = 0.02
"""A function is checked only if its share of all executed lines exceeds this value. The share of a function with quadratic cost
grows with the length of a field, and soon reaches ``SHARE``. A function that always executes the same number of lines never
reaches it."""

Item = tuple[ObjectKind, dict[str, Any]]
Lines = collections.Counter[types.CodeType]


def address(number: int, first: int) -> str:
    return f"{first}.{number >> 16}.{number >> 8 & 255}.{number & 255}"


def exposed(
    name: str = "web",
    *,
    number: int = 0,
    ports: int = 1,
    protocol: str = "TCP",
    cluster: int = 1,
    external: int = 0,
    balanced: int = 0,
    ranges: int = 0,
    is_local: bool = False,
    node_ports: bool = False,
    labels: int = 0,
    **annotations: str,
) -> Item:
    """A Service as the API represents it."""
    addresses = [f"10.96.{number // 250}.{number % 250 + 1}", *(address(one, 12) for one in range(cluster - 1))]
    spec: dict[str, Any] = {
        "type": "LoadBalancer",
        "clusterIP": addresses[0],
        "clusterIPs": addresses,
        "externalIPs": [address(one + 1, 11) for one in range(external)],
        "loadBalancerSourceRanges": [f"{address(2 * one, 20)}/31" for one in range(ranges)],
        "ports": [
            {"name": f"p{one}", "port": one + 1, "protocol": protocol, "nodePort": 30000 + one if node_ports else 0}
            for one in range(ports)
        ],
    }
    if is_local:
        spec |= {"externalTrafficPolicy": "Local", "healthCheckNodePort": 32000 + number}
    metadata = {
        "name": name,
        "namespace": "default",
        "creationTimestamp": f"2026-01-01T00:{number // 60:02}:{number % 60:02}Z",
        "labels": {f"label-{one}": "x" for one in range(labels)},
        "annotations": {f"ipvsproxy.io/{one.replace('_', '-')}": text for one, text in annotations.items()},
    }
    ingress = [{"ip": address(one + 1, 13)} for one in range(balanced)]
    return ObjectKind.SERVICE, {"metadata": metadata, "spec": spec, "status": {"loadBalancer": {"ingress": ingress}}}


def sliced(
    name: str = "a",
    *,
    service: str = "web",
    endpoints: int = 2,
    first: int = 0,
    ports: int = 1,
    protocol: str = "TCP",
    addresses: int = 1,
    hints: int = 0,
    labels: int = 0,
    is_here: bool = False,
    is_one_pod: bool = False,
) -> Item:
    """An EndpointSlice of a Service, as the API represents it."""
    listed = [
        {
            "addresses": [
                address(first if is_one_pod else first + one, 100),
                *(address(more, 60) for more in range(addresses - 1)),
            ],
            "conditions": {"ready": True},
            "nodeName": builders.THIS_NODE if is_here else f"node-{one}",
            "zone": f"zone-{one}",
            "hints": {
                "forZones": [{"name": f"z{more}"} for more in range(hints)],
                "forNodes": [{"name": f"n{more}"} for more in range(hints)],
            },
        }
        for one in range(endpoints)
    ]
    metadata = {
        "name": f"{service}-{name}",
        "namespace": "default",
        "labels": {"kubernetes.io/service-name": service, **{f"label-{one}": "x" for one in range(labels)}},
    }
    numbers = [{"name": f"p{one}", "port": 8000 + one, "protocol": protocol} for one in range(ports)]
    return ObjectKind.ENDPOINT_SLICE, {"metadata": metadata, "addressType": "IPv4", "ports": numbers, "endpoints": listed}


def this_node(*, addresses: int = 1, ranges: int = 1, labels: int = 0) -> Item:
    """The Node as the API represents it."""
    listed = [builders.NODE_ADDRESS, *(address(one, 71) for one in range(addresses - 1))]
    metadata = {"name": builders.THIS_NODE, "labels": {f"label-{one}": "x" for one in range(labels)}}
    spec = {
        "podCIDRs": [f"{address(one << 8, 70)}/24" for one in range(ranges)],
        "taints": [{"key": f"t{one}"} for one in range(labels)],
    }
    return ObjectKind.NODE, {
        "metadata": metadata,
        "spec": spec,
        "status": {"addresses": [{"type": "InternalIP", "address": one} for one in listed]},
    }


def weights_of(kind: str, count: int) -> str:
    return ",".join(f"{kind}/{kind}-{one}={one % 99 + 1}" for one in range(count))


LONG_FIELDS: Mapping[str, Callable[[int], list[Item]]] = {
    "ports": lambda n: [exposed(ports=n), sliced(ports=n)],
    "ports of UDP": lambda n: [exposed(ports=n, protocol="UDP"), sliced(ports=n, protocol="UDP")],
    "node ports": lambda n: [exposed(ports=n, node_ports=True), sliced(ports=n)],
    "node ports of SCTP": lambda n: [exposed(ports=n, node_ports=True, protocol="SCTP"), sliced(ports=n, protocol="SCTP")],
    "node ports with policy Local": lambda n: [exposed(ports=n, node_ports=True, is_local=True), sliced(ports=n)],
    "external addresses": lambda n: [exposed(external=n), sliced()],
    "external addresses of UDP": lambda n: [exposed(external=n, protocol="UDP"), sliced(protocol="UDP")],
    "external addresses with policy Local": lambda n: [exposed(external=n, is_local=True), sliced()],
    "addresses of load balancers": lambda n: [exposed(balanced=n), sliced(is_here=True)],
    "addresses of load balancers for two ports with policy Local": lambda n: [
        exposed(ports=2, balanced=n, is_local=True),
        sliced(ports=2),
    ],
    "ports with policy Local for two load balancers": lambda n: [exposed(ports=n, balanced=2, is_local=True), sliced(ports=n)],
    "ports of UDP with policy Local": lambda n: [
        exposed(ports=n, balanced=1, is_local=True, protocol="UDP"),
        sliced(ports=n, protocol="UDP"),
    ],
    "addresses of load balancers with a source range": lambda n: [
        exposed(balanced=n, ranges=1, is_local=True, protocol="UDP"),
        sliced(protocol="UDP"),
    ],
    "source ranges": lambda n: [exposed(balanced=1, ranges=n), sliced()],
    "cluster addresses": lambda n: [exposed(cluster=n), sliced()],
    "labels of a Service": lambda n: [exposed(labels=n), sliced()],
    "weights of nodes": lambda n: [exposed(weights=weights_of("node", n)), sliced(endpoints=n)],
    "weights of zones with limits": lambda n: [
        exposed(weights=weights_of("zone", n), max_connections="500"),
        sliced(endpoints=n),
    ],
    "an unknown scheduler": lambda n: [exposed(scheduler="x" * n, scheduler_flags="sh-port," * n), sliced()],
    "endpoints with slow start": lambda n: [exposed(slow_start="30s"), sliced(endpoints=n)],
    "endpoints": lambda n: [exposed(), sliced(endpoints=n)],
    "endpoints of UDP": lambda n: [exposed(protocol="UDP"), sliced(protocol="UDP", endpoints=n)],
    "endpoints on this node": lambda n: [exposed(), sliced(endpoints=n, is_here=True)],
    "addresses of an endpoint": lambda n: [exposed(), sliced(addresses=n)],
    "ports of a slice": lambda n: [exposed(), sliced(ports=n)],
    "hints": lambda n: [exposed(), sliced(hints=n)],
    "labels of a slice": lambda n: [exposed(), sliced(labels=n)],
    "slices": lambda n: [exposed(), *(sliced(str(one), first=3 * one, endpoints=3) for one in range(n))],
    "slices with one pod": lambda n: [exposed(), *(sliced(str(one), endpoints=3) for one in range(n))],
    "endpoints with one pod": lambda n: [exposed(), sliced(endpoints=n, is_one_pod=True)],
    "addresses of the node": lambda n: [exposed(external=2, node_ports=True), sliced(), this_node(addresses=n)],
    "ranges of pods": lambda n: [exposed(external=2), sliced(), this_node(ranges=n)],
    "labels and taints of the node": lambda n: [exposed(), sliced(), this_node(labels=n)],
    "Services with one external address": lambda n: [exposed(f"s{one}", external=1, number=one) for one in range(n)],
    "Services with one node port": lambda n: [exposed(f"s{one}", node_ports=True, number=one) for one in range(n)],
    "two Services with the same addresses": lambda n: [exposed(external=n), exposed("other", external=n, number=1), sliced()],
    "two Services with the same node ports": lambda n: [
        exposed(ports=n, node_ports=True),
        exposed("other", ports=n, node_ports=True, number=1),
        sliced(ports=n),
    ],
}
"""For each field that may be long in a Service, an EndpointSlice or a Node: a function that makes objects with n values in the
field."""


@contextlib.contextmanager
def counting(stages: dict[str, Lines], stage: str) -> Iterator[None]:
    """Count the program's executed lines by function while the ``with`` block runs, and then store the counts in ``stages``."""
    counters: dict[int, _Counter] = {}  # the key is the ``id`` of a code object, because hashing the object itself is slow

    def calls(frame: types.FrameType, _event: str, _: object) -> Any:
        code = frame.f_code
        try:
            counter = counters[id(code)]
        except KeyError:
            counter = counters[id(code)] = _Counter(code)
        return counter.local if counter.is_ours else None

    before = sys.gettrace()
    sys.settrace(calls)
    try:
        yield
    finally:
        sys.settrace(before)
    stages[stage] = Lines({counter.code: counter.lines for counter in counters.values() if counter.is_ours})


class _Counter:
    """Counts the executed lines of one function, including its returns.

    Keeps a reference to the code object of the function, so that no other code object gets the same ``id``.
    """

    def __init__(self, code: types.CodeType) -> None:
        self.code = code
        self.is_ours = code.co_filename.startswith(ipvsproxy.__path__[0])
        self.lines = 0

    def local(self, _frame: types.FrameType, _event: str, _: object) -> Any:
        self.lines += 1
        return self.local


def event_of(kind: ObjectKind, item: dict[str, Any]) -> Put:
    event = decode.decode_watch_line(kind, json.dumps({"type": "MODIFIED", "object": item}).encode()).event
    assert isinstance(event, Put)
    return event


async def steps_of(kernel: Wire, items: Sequence[Item]) -> Mapping[str, Lines]:
    """The lines executed in each stage of the life of these objects, from decoding to deletion."""
    stages: dict[str, Lines] = {}
    served = MemoryNode(kernel, settings=Settings(scopes=TrafficScopes.API))
    items = items if any(kind is ObjectKind.NODE for kind, _ in items) else [*items, this_node()]
    async with served.running():
        with counting(stages, "decode"):
            objects = [event_of(*item).object for item in items]
        with counting(stages, "program"):
            served.begin_with(*objects)
            await served.quiet()
        services = [one for one in objects if isinstance(one, Service)]
        survey, name = served.engine.survey, services[0].name
        with counting(stages, "explain"):
            list(survey.differences())
            view = served.watcher.summaries[-1].view
            explainer = Explainer(
                survey=survey, store=served.store, translation=served.settings, view=view, connections=lambda *_: None
            )
            keys_of_name = {item.key for item in survey.states[name].served} & survey.virtual_servers.keys()
            at_once(explainer.describing(name, keys_of_name))
        kind, item = items[-2]
        if kind is ObjectKind.ENDPOINT_SLICE:
            added = {"addresses": ["10.222.1.1"], "conditions": {"ready": True}, "nodeName": "other"}
            with counting(stages, "add an endpoint"):
                served.deliver([event_of(kind, {**item, "endpoints": [*item["endpoints"], added]})])
                await served.quiet()
        kernel.virtual_servers.clear()
        kernel.addresses.clear()
        for ip_set in kernel.sets.values():
            ip_set.entries.clear()
        with counting(stages, "heal"):
            served.engine.kernel_changed()
            await served.quiet(memory_node.DRIFT_CHECK_INTERVAL_S)
            list(survey.differences())
        assert not list(survey.differences())
        with counting(stages, "remove"):
            served.remove(*services)
            await served.quiet(2)
    return stages


@pytest.mark.parametrize("field", LONG_FIELDS)
@in_virtual_time
async def test_the_number_of_executed_lines_grows_at_most_in_proportion_to_the_length_of_a_field(
    monkeypatch: pytest.MonkeyPatch, field: str
) -> None:
    short, long = [await steps_of(Wire(monkeypatch, Backend.IPTABLES), LONG_FIELDS[field](length)) for length in (SHORT, LONG)]
    for stage, lines in long.items():
        total = lines.total()
        assert total <= MOST_GROWTH * short[stage].total(), (stage, lines.most_common(5))
        worse = {
            code.co_qualname: (short[stage][code], count)
            for code, count in lines.items()
            if count > SHARE * total and count > MOST_GROWTH * max(short[stage][code], SHORT)
        }
        assert not worse, (stage, worse)
