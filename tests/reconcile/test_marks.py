"""Second scopes of external addresses: marks, their virtual servers and entries, on a kernel in memory."""

import pytest

from ipvsproxy.model.kernel import (
    IP_SETS,
    SCOPE_KINDS,
    FirewallMark,
    MarkedEntry,
    SetEntries,
    VirtualServer,
    VirtualServerSettings,
)
from ipvsproxy.model.net import Family
from ipvsproxy.model.plan import Operation, Verb, one_by_one
from ipvsproxy.model.service import EndpointSlice, Service, ServiceType
from ipvsproxy.reconcile.marks import spread
from ipvsproxy.reconcile.reconciler import Policy
from ipvsproxy.translate.view import TrafficScopes
from tests.reconcile.simulation import SimulatedNode
from tests.support import builders

HERE, ELSEWHERE = "10.244.0.5", "10.244.1.5"
BALANCER = "192.0.2.12"


def shop(name: str = "shop", *, local: bool = True, number: int = 12, created_s: float = 1.0) -> tuple[Service, EndpointSlice]:
    service = builders.service(
        name,
        builders.service_port(80),
        cluster=[f"10.96.1.{number}"],
        load_balancer=[f"192.0.2.{number}"],
        kind=ServiceType.LOAD_BALANCER,
        external_local=local,
        created_s=created_s,
    )
    slices = builders.endpoint_slice(builders.endpoint(HERE), builders.endpoint(ELSEWHERE, builders.OTHER_NODE), service=name)
    return service, slices


def node_with(*bits: int, **options: object) -> SimulatedNode:
    return SimulatedNode(scopes=TrafficScopes.API, scope_bits=bits[0] if bits else 0x3FFF, **options)  # type: ignore[arg-type]


def marks_of(node: SimulatedNode) -> dict[str, int]:
    """The mark of each address in the kernel."""
    entries = [entry for name, held in node.kernel.sets.items() if IP_SETS[name].gives_marks for entry in held.entries]
    return {str(entry.address): entry.mark for entry in entries if isinstance(entry, MarkedEntry)}


def scopes_of(node: SimulatedNode) -> dict[int, set[str]]:
    """The endpoints behind each mark in the kernel."""
    return {
        key.mark: {str(one.address) for one in server.real_servers}
        for key, server in node.kernel.virtual_servers.items()
        if isinstance(key, FirewallMark)
    }


def traces_of(node: SimulatedNode) -> list[str]:
    sets = [name for name in node.kernel.sets if IP_SETS[name].kind in SCOPE_KINDS]
    return [*sets, *(str(key) for key in node.kernel.virtual_servers if isinstance(key, FirewallMark))]


def test_a_balancer_with_policy_local_has_local_endpoints_by_address_and_all_by_mark() -> None:
    node = node_with()
    node.put(*shop())
    node.sync()
    plain = node.kernel.virtual_servers[builders.frontend(BALANCER, 80)]
    assert {str(one.address) for one in plain.real_servers} == {HERE}
    assert marks_of(node) == {BALANCER: 1}
    assert scopes_of(node) == {1: {HERE, ELSEWHERE}}


def test_without_policy_local_there_is_no_trace_of_scopes() -> None:
    node = node_with()
    node.put(*shop(local=False))
    node.sync()
    assert traces_of(node) == []


def test_packets_get_a_mark_after_its_virtual_server_has_its_real_servers_and_lose_it_before() -> None:
    steps: list[str] = []

    def note(operation: Operation) -> None:
        item = operation.item
        if isinstance(item, SetEntries) and IP_SETS[item.set].gives_marks:
            steps.append(f"{operation.verb} entry")
        elif isinstance(item, VirtualServer) and isinstance(item.key, FirewallMark):
            steps.append(f"{operation.verb} virtual server")

    node = node_with(after_each=note)
    node.put(*shop())
    node.sync()
    assert steps == ["add virtual server", "add entry"]
    node.put(*shop(local=False))
    node.sync()
    node.sync(after_s=60)
    assert steps[2:] == ["remove entry", "remove virtual server"]
    node.sync(after_s=60)
    assert traces_of(node) == []


def test_a_restart_keeps_every_mark() -> None:
    node = node_with()
    for number, name in enumerate(("one", "two", "three"), 20):
        node.put(*shop(name, number=number))
    node.sync()
    before = marks_of(node)
    node.remove("one")
    node.sync()
    node.sync(after_s=60)
    node.restart()
    assert [str(one) for one in node.sync() if "timeouts" not in str(one)] == []
    assert marks_of(node) == {address: mark for address, mark in before.items() if address != "192.0.2.20"}


def test_the_youngest_services_go_without_a_mark_and_the_oldest_of_them_gets_the_next_free_one() -> None:
    node = node_with(0x3)
    for number in range(5):
        node.put(*shop(f"s{number}", number=20 + number, created_s=100.0 - number))
    node.sync()
    node.sync(after_s=60)
    assert marks_of(node).keys() == {"192.0.2.22", "192.0.2.23", "192.0.2.24"}
    assert [port.service.name for port in node.reconciler.survey.without_scope] == ["s1", "s0"]
    node.remove("s4")
    node.sync()
    for _ in range(3):
        node.sync(after_s=60)
    assert marks_of(node).keys() == {"192.0.2.21", "192.0.2.22", "192.0.2.23"}


def test_a_mark_of_somebody_else_is_left_alone_and_not_given() -> None:
    node = node_with()
    theirs = VirtualServer(FirewallMark.of(Family.IPV4, 1), VirtualServerSettings("wlc"))
    node.kernel.schedulers |= {"wlc"}
    node.kernel.apply([Operation(Verb.ADD, theirs)])
    node.observe()
    node.put(*shop())
    node.sync()
    assert marks_of(node) == {BALANCER: 2}
    node.remove("shop")
    node.sync()
    node.sync(after_s=60)
    assert theirs.key in node.kernel.virtual_servers


def test_another_mark_in_an_entry_is_drift_and_is_mended() -> None:
    node = node_with()
    node.put(*shop())
    node.sync()
    (name,) = (name for name in node.kernel.sets if IP_SETS[name].gives_marks)
    (entry,) = node.kernel.sets[name].entries
    assert isinstance(entry, MarkedEntry)
    held = node.kernel.sets[name].entries
    held.clear()
    held.add(MarkedEntry(entry.set, entry.address, entry.protocol, entry.port, mark=7, mask=entry.mask))
    node.observe()
    operations = [str(one) for one in one_by_one(node.sync()) if "SCOPE" in str(one)]
    assert [one.split()[0] for one in operations] == ["remove", "add"]
    assert marks_of(node) == {BALANCER: 1}


def test_other_bits_give_every_scope_another_mark() -> None:
    node = node_with()
    node.put(*shop())
    node.sync()
    node.reconciler.adopt(Policy(scope_bits=0xFF0000))
    node.sync()
    node.sync(after_s=60)
    node.sync(after_s=60)
    assert marks_of(node) == {BALANCER: 0x10000}
    assert scopes_of(node) == {0x10000: {HERE, ELSEWHERE}}


@pytest.mark.parametrize(("number", "bits", "mark"), [(1, 0x3FFF, 1), (0x3FFF, 0x3FFF, 0x3FFF), (5, 0xF0, 0x50), (3, 0x11, 0x11)])
def test_a_mark_has_the_bits_of_its_number_in_the_places_that_may_be_used(number: int, bits: int, mark: int) -> None:
    assert spread(number, bits) == mark
