"""Covers the marks, set entries and virtual servers of direct return.

Also covers a restart of the program, and the removal of endpoints.
"""

import msgspec

from ipvsproxy.model.annotations import Annotation, ServiceAnnotations
from ipvsproxy.model.net import Family
from ipvsproxy.model.real_servers import TUNNELLED
from ipvsproxy.model.service import EndpointSlice, Service, ServiceName, ServiceType
from ipvsproxy.model.sets import DIRECT_KINDS, IP_SETS, IpSet, MarkedEntry, SetKind
from ipvsproxy.model.steps import ITEMS_AT_ONCE
from ipvsproxy.model.virtual_servers import ConnectionCounts, FirewallMark, VirtualServerKey
from ipvsproxy.translate.skeleton import SCOPE_CHAINS
from tests.reconcile.simulation import SimulatedNode
from tests.support import builders

HERE, ELSEWHERE, OTHER_ADDRESS = "10.244.0.5", "10.244.1.5", "172.18.0.3"
BALANCER = "192.0.2.12"


def shop(*endpoints: str, asks: bool = True) -> tuple[Service, EndpointSlice]:
    service = builders.service("shop", builders.service_port(80), load_balancer=[BALANCER], kind=ServiceType.LOAD_BALANCER)
    given = ServiceAnnotations(given=frozenset({Annotation.DIRECT_RETURN}), direct_return=asks)
    listed = [builders.endpoint(one, builders.OTHER_NODE if one == ELSEWHERE else builders.THIS_NODE) for one in endpoints]
    return builders.with_options(service, annotations=given), builders.endpoint_slice(*listed, service="shop")


def node_with(drain_deadline_s: float = 0) -> SimulatedNode:
    tunnel_ends = {builders.OTHER_NODE: builders.addresses(OTHER_ADDRESS)}
    node = SimulatedNode(tunnel_ends=tunnel_ends, drain_deadline_s=drain_deadline_s)
    node.kernel.schedulers |= {"mh"}
    return node


def serving(drain_deadline_s: float = 0) -> SimulatedNode:
    """A node that serves a Service with direct return. The Service has endpoints on this node and on another node."""
    node = node_with(drain_deadline_s)
    node.put(*shop(HERE, ELSEWHERE))
    node.sync()
    return node


def marks_of(node: SimulatedNode) -> dict[SetKind, int]:
    entries = [entry for one in node.kernel.sets.values() for entry in one.entries if isinstance(entry, MarkedEntry)]
    return {IP_SETS[entry.set].kind: entry.mark for entry in entries}


def key_of(node: SimulatedNode, kind: SetKind) -> VirtualServerKey:
    """The key of the IPv4 virtual server whose firewall mark is the mark of the entry in the set of this kind."""
    return FirewallMark.of(Family.IPV4, marks_of(node)[kind])


def weights_of(node: SimulatedNode, kind: SetKind) -> dict[str, int]:
    return {str(key): weight for key, weight in node.kernel.virtual_servers[key_of(node, kind)].real_servers.items()}


def test_packets_of_outside_clients_and_packets_from_tunnels_get_different_marks() -> None:
    node = serving()
    assert marks_of(node).keys() == {SetKind.DIRECT, SetKind.TUNNEL}
    assert len(set(marks_of(node).values())) == 2
    assert weights_of(node, SetKind.DIRECT) == {f"{HERE}:8080": 1, f"{OTHER_ADDRESS}:80": TUNNELLED + 1}
    assert weights_of(node, SetKind.TUNNEL) == {f"{HERE}:8080": 1}
    kinds = {IP_SETS[name].kind for name in node.kernel.sets}
    assert kinds > DIRECT_KINDS
    assert kinds.isdisjoint({SetKind.SCOPE, SetKind.NO_LOCAL})


def test_the_set_of_each_family_contains_the_addresses_of_nodes_whose_tunnels_are_accepted() -> None:
    node = SimulatedNode(tunnel_ends={builders.OTHER_NODE: builders.addresses(OTHER_ADDRESS, "fd00::3")}, families=Family)
    sets = {family: node.reconciler._tables.entries[IpSet(SetKind.NODES, family).name] for family in Family}
    found = [(family, str(entry.address)) for family, table in sets.items() for entry in table.desired]
    assert found == [(Family.IPV4, OTHER_ADDRESS), (Family.IPV6, "fd00::3")]
    node.reconciler.put_tunnel_sources(())
    assert not any(table.desired for table in sets.values())


def test_a_restart_keeps_both_marks_of_direct_return() -> None:
    node = serving()
    before = marks_of(node)
    node.restart()
    assert [str(one) for one in node.sync() if "timeouts" not in str(one)] == []
    assert marks_of(node) == before


def test_the_tunnel_to_a_node_drains_when_the_last_endpoint_of_the_node_is_removed() -> None:
    node = serving()
    key = key_of(node, SetKind.DIRECT)
    tunnel = builders.backend(OTHER_ADDRESS, 80)
    node.kernel.connection_counts[key, tunnel] = ConnectionCounts(1, 0)
    node.put(*shop(HERE))
    node.sync()
    assert weights_of(node, SetKind.DIRECT) == {f"{HERE}:8080": 1, f"{OTHER_ADDRESS}:80": TUNNELLED}
    del node.kernel.connection_counts[key, tunnel]
    for _ in range(3):
        node.sync(after_s=60)
    assert weights_of(node, SetKind.DIRECT) == {f"{HERE}:8080": 1}
    node.put(*shop(HERE, ELSEWHERE))
    node.sync()
    assert weights_of(node, SetKind.DIRECT) == {f"{HERE}:8080": 1, f"{OTHER_ADDRESS}:80": TUNNELLED + 1}


def test_a_complete_read_changes_neither_a_draining_tunnel_nor_the_deadline_of_the_drain() -> None:
    node = serving(drain_deadline_s=60)
    key = key_of(node, SetKind.DIRECT)
    node.kernel.connection_counts[key, builders.backend(OTHER_ADDRESS, 80)] = ConnectionCounts(1, 0)
    node.put(*shop(HERE))
    node.sync()
    node.now += 40
    node.observe()
    assert [str(one) for one in node.reconciler.survey.differences() if one.kind == "real_server"] == []
    assert node.sync() == []
    assert node.reconciler.survey.statistics(node.now).oldest_drain_age_s == 40
    node.sync(after_s=20)
    assert weights_of(node, SetKind.DIRECT) == {f"{HERE}:8080": 1}, "the deadline has passed"


def test_direct_return_fills_only_the_set_of_nodes_if_no_service_requests_direct_return() -> None:
    node = serving()
    node.put(*shop(HERE, ELSEWHERE, asks=False))
    for _ in range(4):
        node.sync(after_s=60)
    assert marks_of(node) == {}
    assert not [key for key in node.kernel.virtual_servers if isinstance(key, FirewallMark)]
    assert [str(one) for one in node.kernel.sets["KUBE-IPVSPROXY-NODES"].entries] == [OTHER_ADDRESS]


def sets_of_direct_return(node: SimulatedNode) -> set[SetKind]:
    return {IP_SETS[name].kind for name in node.reconciler.survey.subjects()[0]} & DIRECT_KINDS


def test_if_no_set_of_direct_return_exists_only_the_first_reading_looks_for_these_sets() -> None:
    node = SimulatedNode()
    assert sets_of_direct_return(node) == DIRECT_KINDS, "a former process may have left them"
    node.sync()
    assert sets_of_direct_return(node) == set()


def test_sets_of_direct_return_are_read_as_long_as_they_are_desired_or_exist_in_the_kernel() -> None:
    node = node_with()
    node.sync()
    assert sets_of_direct_return(node) == DIRECT_KINDS
    off = SimulatedNode(node.kernel)
    off.kernel.fail(lambda operation: operation.item == IpSet(SetKind.NODES, Family.IPV4), times=1)
    off.sync()
    assert sets_of_direct_return(off) == {SetKind.NODES}
    # The test itself removes the chain, because the in-memory kernel keeps the last chains of a table.
    off.kernel.chains[Family.IPV4].pop(SCOPE_CHAINS[0])
    off.sync(after_s=60)
    assert sets_of_direct_return(off) == set()


def test_marks_for_many_services_are_assigned_in_steps() -> None:
    node = node_with()
    node.sync()
    for number in range(2 * ITEMS_AT_ONCE):
        service, slices = shop(HERE)
        service = msgspec.structs.replace(service, name=ServiceName(service.name.namespace, f"s{number}"))
        node.put(service, slices)
    assert sum(1 for _ in node.reconciler._tables.scopes.tending(may_close=True)) >= 2
    assert not node.reconciler._tables.scopes.marks.waiting
