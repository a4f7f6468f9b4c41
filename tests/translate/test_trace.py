"""Tests of ``trace``, which follows a connection through the rules to determine whether the connection is masqueraded."""

import dataclasses

import pytest

from ipvsproxy.model.net import Family, Protocol
from ipvsproxy.model.rules import ChainKey, InterfaceMatch, JumpTo, Rule, SetMark, Skeleton, Verdict
from ipvsproxy.model.sets import SetEntry
from ipvsproxy.translate import trace
from ipvsproxy.translate.trace import TracedClient
from ipvsproxy.translate.translation_settings import LocalMode, Settings
from tests.support import builders
from tests.translate import reading

PODS = "10.244.0.0/16"
BY_CLUSTER = Settings(cluster_networks=builders.networks(PODS))


CLUSTER = builders.frontend(builders.CLUSTER_IP, 80)


KNOWING_OWN_PODS = (
    Settings(detect_local=LocalMode.NODE_CIDR),
    Settings(detect_local=LocalMode.BRIDGE_INTERFACE, local_interface="cbr0"),
    Settings(detect_local=LocalMode.INTERFACE_NAME_PREFIX, local_interface="veth"),
)


@pytest.mark.parametrize("client", TracedClient)
@pytest.mark.parametrize(
    ("settings", "masqueraded"),
    [
        (BY_CLUSTER, {TracedClient.HOST, TracedClient.OUTSIDE}),
        *((settings, {TracedClient.HOST, TracedClient.OUTSIDE, TracedClient.OTHER_POD}) for settings in KNOWING_OWN_PODS),
        (Settings(), {TracedClient.HOST}),
        (Settings(masquerade_all=True), set(TracedClient)),
    ],
)
def test_connections_to_a_cluster_ip_are_masqueraded_unless_they_come_from_recognised_pods(
    settings: Settings, masqueraded: set[TracedClient], client: TracedClient
) -> None:
    result = reading.traced(builders.service(), CLUSTER, client, settings)
    assert result.is_masqueraded is (client in masqueraded)
    last = result.applied_rules[-1].rule
    assert last.target == (JumpTo("KUBE-MARK-MASQ") if result.is_masqueraded else Verdict.ACCEPT)
    assert last.set is not None
    assert last.set.set == "KUBE-CLUSTER-IP"


@pytest.mark.parametrize("local", [False, True])
@pytest.mark.parametrize("protocol", list(Protocol))
@pytest.mark.parametrize(
    ("address", "port", "chain"),
    [(builders.NODE_ADDRESS, 30080, "KUBE-NODE-PORT"), ("192.0.2.80", 80, "KUBE-LOAD-BALANCER"), ("192.0.2.90", 80, "")],
)
def test_connections_to_an_exposed_address_are_masqueraded_unless_the_traffic_policy_is_local(
    address: str, port: int, chain: str, protocol: Protocol, *, local: bool
) -> None:
    key = builders.frontend(address, port, protocol)
    result = reading.traced(reading.exposed(protocol, is_local=local), key, TracedClient.OUTSIDE, BY_CLUSTER)
    assert result.is_masqueraded is not local
    if chain:
        assert [applied.chain.chain for applied in result.applied_rules][:2] == ["KUBE-SERVICES", chain]


@pytest.mark.parametrize(
    ("pods", "settings", "source"),
    [
        (["fd00:3::/64", "10.244.3.0/24"], Settings(), "10.244.3.1"),
        (["10.1.0.0/16", "10.244.3.0/24"], BY_CLUSTER, "10.244.3.1"),
        (["10.1.0.0/16"], BY_CLUSTER, "10.244.0.1"),
        (["10.1.0.0/16"], Settings(detect_local=LocalMode.NODE_CIDR, cluster_networks=builders.networks(PODS)), "10.1.0.1"),
        (["fd00:3::/64"], Settings(cluster_networks=builders.networks("fd00::/16")), "203.0.113.1"),
        ([], Settings(), "203.0.113.1"),
    ],
)
def test_the_example_address_of_a_local_pod_is_in_a_range_of_local_pods(pods: list[str], settings: Settings, source: str) -> None:
    view = builders.node_view(node_object=builders.node(pod_networks=pods), settings=settings)
    result = trace.connection_of(TracedClient.POD, CLUSTER, settings, view)
    assert (str(result.source), result.is_from_pod_interface, result.is_from_host) == (source, True, False)


def test_a_traced_connection_from_the_host_has_the_same_source_and_destination_address() -> None:
    result = trace.connection_of(TracedClient.HOST, CLUSTER, Settings(), builders.node_view())
    assert result == trace.TracedConnection(CLUSTER.address, CLUSTER, is_from_host=True)
    assert trace.connection_of(TracedClient.OUTSIDE, CLUSTER, Settings(), builders.node_view()).is_from_host is False


def _follow(*chains: tuple[str, tuple[Rule, ...]], client: TracedClient = TracedClient.OUTSIDE) -> trace.Trace:
    rules = Skeleton(family=Family.IPV4, chains={ChainKey("nat", name): those for name, those in chains}, jumps=())
    connection = trace.connection_of(client, CLUSTER, Settings(), builders.node_view())
    return trace.follow(rules, frozenset[SetEntry]().__contains__, connection, has_scopes=False)


MARK, TO_OTHER = Rule(target=JumpTo("KUBE-MARK-MASQ")), Rule(target=JumpTo("OTHER"))


def test_an_accepted_connection_does_not_reach_later_rules_of_any_chain() -> None:
    accept = Rule(target=Verdict.ACCEPT)
    applied = (trace.AppliedRule(ChainKey("nat", "KUBE-SERVICES"), accept),)
    assert _follow(("KUBE-SERVICES", (accept, MARK))) == trace.Trace(is_masqueraded=False, applied_rules=applied)
    result = _follow(("KUBE-SERVICES", (TO_OTHER, MARK)), ("OTHER", (accept, MARK)))
    assert (result.is_masqueraded, [applied.rule for applied in result.applied_rules]) == (False, [TO_OTHER, accept])


@pytest.mark.parametrize("client", [TracedClient.OUTSIDE, TracedClient.HOST])
def test_a_rule_for_packets_from_elsewhere_does_not_apply_to_packets_that_this_host_sends(client: TracedClient) -> None:
    rules = Rule(target=Verdict.ACCEPT, from_elsewhere=True), MARK
    assert _follow(("KUBE-SERVICES", rules), client=client).is_masqueraded is (client is TracedClient.HOST)


def test_a_trace_shows_a_jump_only_if_a_rule_of_the_target_chain_applied() -> None:
    nothing = _follow(("KUBE-SERVICES", (TO_OTHER, MARK)), ("OTHER", (Rule(target=Verdict.ACCEPT, protocol=Protocol.UDP),)))
    assert (nothing.is_masqueraded, [applied.rule for applied in nothing.applied_rules]) == (True, [MARK])
    back = Rule(target=Verdict.RETURN)
    ended = _follow(("KUBE-SERVICES", (TO_OTHER, MARK)), ("OTHER", (back, MARK)))
    assert (ended.is_masqueraded, [applied.rule for applied in ended.applied_rules]) == (True, [TO_OTHER, back, MARK])


def test_a_trace_does_not_show_a_rule_whose_target_decides_nothing() -> None:
    result = _follow(("KUBE-SERVICES", (Rule(target=SetMark(0x8)), MARK)))
    assert (result.is_masqueraded, [applied.rule for applied in result.applied_rules]) == (True, [MARK])


@pytest.mark.parametrize("client", [TracedClient.OUTSIDE, TracedClient.POD])
def test_a_rule_for_the_interfaces_of_pods_applies_only_to_pods(client: TracedClient) -> None:
    rules = Rule(target=Verdict.ACCEPT, interface=InterfaceMatch("cni0")), MARK
    assert _follow(("KUBE-SERVICES", rules), client=client).is_masqueraded is (client is TracedClient.OUTSIDE)


def test_an_example_pod_of_another_node_has_an_address_outside_the_ranges_of_local_pods() -> None:
    view = dataclasses.replace(builders.node_view(), pod_networks=builders.networks("10.244.0.0/24"))
    ranges = builders.networks("fd00:244::/56", "10.244.0.0/24", "10.245.0.0/24")
    found = trace.connection_of(TracedClient.OTHER_POD, CLUSTER, Settings(cluster_networks=ranges), view)
    assert str(found.source) == "10.245.0.254"
