"""Tests the fixed rules: the chains, the rules for each set, and how rules recognise local pods."""

import pytest

from ipvsproxy.model.net import Family
from ipvsproxy.model.rules import TakeMark
from ipvsproxy.model.service import ServiceType
from ipvsproxy.model.sets import SCOPE_KINDS, IpSet, SetKind
from ipvsproxy.translate.skeleton import build_skeleton
from ipvsproxy.translate.translation_settings import Binding, LocalMode, Settings
from ipvsproxy.translate.view import NodeView
from tests.support import builders
from tests.translate import reading

CLUSTER_COMMENT = '-m comment --comment "Kubernetes service cluster ip + port for masquerade purpose"'


@pytest.mark.checklist(27)
@pytest.mark.parametrize(("fully", "option"), [({}, " --random-fully"), ({Family.IPV4: False}, "")])
def test_masquerading_chooses_fully_random_ports_if_iptables_supports_it(fully: dict[Family, bool], option: str) -> None:
    skeleton = reading.skeleton_of(settings=Settings(random_fully=fully))
    *_, last = reading.texts(skeleton, "nat", "KUBE-POSTROUTING")
    assert last == f'-m comment --comment "kubernetes service traffic requiring SNAT" -j MASQUERADE{option}'


@pytest.mark.checklist(28)
@pytest.mark.parametrize(("family", "network"), [(Family.IPV4, "127.0.0.0/8"), (Family.IPV6, "::1/128")])
def test_the_first_rule_of_the_services_chain_returns_traffic_from_loopback(family: Family, network: str) -> None:
    first, *_ = reading.texts(reading.skeleton_of(family=family), "nat", "KUBE-SERVICES")
    assert first == f"-s {network} -j RETURN"


@pytest.mark.checklist(29)
@pytest.mark.parametrize("family", Family)
def test_five_nat_chains_and_six_filter_chains_exist_in_the_order_of_kube_proxy(family: Family) -> None:
    assert [str(key) for key in reading.skeleton_of(family=family).chains] == [
        "nat/KUBE-SERVICES",
        "nat/KUBE-POSTROUTING",
        "nat/KUBE-NODE-PORT",
        "nat/KUBE-LOAD-BALANCER",
        "nat/KUBE-MARK-MASQ",
        "filter/KUBE-FORWARD",
        "filter/KUBE-NODE-PORT",
        "filter/KUBE-PROXY-FIREWALL",
        "filter/KUBE-SOURCE-RANGES-FIREWALL",
        "filter/KUBE-IPVS-FILTER",
        "filter/KUBE-IPVS-OUT-FILTER",
    ]


def test_nine_jumps_lead_from_built_in_chains_to_our_chains() -> None:
    assert [(jump.table, jump.source, jump.target, jump.comment) for jump in reading.skeleton_of().jumps] == [
        ("nat", "OUTPUT", "KUBE-SERVICES", "kubernetes service portals"),
        ("nat", "PREROUTING", "KUBE-SERVICES", "kubernetes service portals"),
        ("nat", "POSTROUTING", "KUBE-POSTROUTING", "kubernetes postrouting rules"),
        ("filter", "FORWARD", "KUBE-FORWARD", "kubernetes forwarding rules"),
        ("filter", "INPUT", "KUBE-NODE-PORT", "kubernetes health check rules"),
        ("filter", "INPUT", "KUBE-PROXY-FIREWALL", "kube-proxy firewall rules"),
        ("filter", "FORWARD", "KUBE-PROXY-FIREWALL", "kube-proxy firewall rules"),
        ("filter", "INPUT", "KUBE-IPVS-FILTER", "kubernetes ipvs access filter"),
        ("filter", "OUTPUT", "KUBE-IPVS-OUT-FILTER", "kubernetes ipvs access filter"),
    ]


@pytest.mark.checklist(30, 36)
def test_a_node_with_every_kind_of_service_address_has_exactly_the_expected_rules() -> None:
    view = builders.node_view()
    states = [
        reading.state_of(builders.service("clusterip", cluster=["10.96.0.1"], external=["50.60.70.81"]), view=view),
        reading.state_of(builders.service("lb", cluster=["10.96.0.2"], load_balancer=["1.2.3.4"]), view=view),
        reading.state_of(builders.service("np", builders.service_port(node_port=3001), cluster=["10.96.0.3"]), view=view),
    ]
    assert reading.outline(reading.skeleton_of(*states), "nat", "KUBE-SERVICES") == [
        ("", "RETURN"),
        ("KUBE-LOAD-BALANCER", "KUBE-LOAD-BALANCER"),
        ("KUBE-CLUSTER-IP", "KUBE-MARK-MASQ"),
        ("KUBE-EXTERNAL-IP", "KUBE-MARK-MASQ"),
        ("KUBE-EXTERNAL-IP", "ACCEPT"),
        ("KUBE-EXTERNAL-IP", "ACCEPT"),
        ("", "KUBE-NODE-PORT"),
        ("KUBE-CLUSTER-IP", "ACCEPT"),
        ("KUBE-LOAD-BALANCER", "ACCEPT"),
    ]


def test_thirty_seven_rules_exist_if_every_set_of_kube_proxy_has_an_entry() -> None:
    skeleton = build_skeleton(Family.IPV6, Settings(), builders.node_view(), set(SetKind) - SCOPE_KINDS, [])
    assert sum(map(len, skeleton.chains.values())) == 37


@pytest.mark.parametrize(("family", "name"), [(Family.IPV4, "icmp-port-unreachable"), (Family.IPV6, "icmp6-port-unreachable")])
def test_unserved_ports_of_service_addresses_are_rejected_with_the_icmp_message_of_the_family(family: Family, name: str) -> None:
    *returns, reject = reading.texts(reading.skeleton_of(family=family), "filter", "KUBE-IPVS-FILTER")
    assert all(rule.endswith("-j RETURN") for rule in returns)
    ips = IpSet(SetKind.IPVS_IPS, family).name
    assert reject == f"-m conntrack --ctstate NEW -m set --match-set {ips} dst -j REJECT --reject-with {name}"


def test_the_ipv6_rules_match_the_ipv6_sets() -> None:
    skeleton = build_skeleton(Family.IPV6, Settings(), builders.node_view(), set(SetKind), [])
    rules = [rule for rules in skeleton.chains.values() for rule in rules]
    marks = [rule.target for rule in rules if isinstance(rule.target, TakeMark)]
    names = {rule.set.set for rule in rules if rule.set} | {target.match.set for target in marks}
    # the sets NO_LOCAL and DIRECT are used only if pods can be recognised
    unnamed = {SetKind.MARKS, SetKind.NO_LOCAL, SetKind.DIRECT}
    assert names == {IpSet(kind, Family.IPV6).name for kind in SetKind if kind not in unnamed}
    assert "KUBE-6-LOAD-BALANCER-SOURCE-CID" in names


def test_a_rule_sets_the_masquerade_mark_and_another_rule_clears_it_before_masquerading() -> None:
    skeleton = reading.skeleton_of(settings=Settings(masquerade_bit=15))
    assert list(reading.texts(skeleton, "nat", "KUBE-MARK-MASQ")) == ["-j MARK --set-xmark 0x8000/0x8000"]
    unmarked, unmark, _ = reading.texts(skeleton, "nat", "KUBE-POSTROUTING")
    assert unmarked == "-m mark ! --mark 0x8000/0x8000 -j RETURN"
    assert unmark == "-j MARK --set-xmark 0x8000/0x0"
    accept_marked, _ = reading.texts(skeleton, "filter", "KUBE-FORWARD")
    assert accept_marked == '-m comment --comment "kubernetes forwarding rules" -m mark --mark 0x8000/0x8000 -j ACCEPT'


def _masquerade(settings: Settings, family: Family = Family.IPV4, view: NodeView | None = None) -> str:
    """The rule that selects traffic to cluster IPs for masquerading, without its comment."""
    node = view or builders.node_view(node_object=builders.node(pod_networks=["10.244.3.0/24"]))
    skeleton = build_skeleton(family, settings, node, {SetKind.CLUSTER_IP}, [])
    (rule,) = [text for text in reading.texts(skeleton, "nat", "KUBE-SERVICES") if "KUBE-MARK-MASQ" in text]
    assert CLUSTER_COMMENT in rule
    return rule.replace(f"{CLUSTER_COMMENT} ", "").removesuffix(" -j KUBE-MARK-MASQ")


BOTH = builders.networks("10.244.0.0/16", "10.245.0.0/16", "fd00:10:244::/56")


@pytest.mark.parametrize(
    ("settings", "rule"),
    [
        (Settings(masquerade_all=True, cluster_networks=BOTH), "-m set --match-set KUBE-CLUSTER-IP dst,dst"),
        (Settings(cluster_networks=BOTH), "! -s 10.244.0.0/16 -m set --match-set KUBE-CLUSTER-IP dst,dst"),
        (Settings(), "-m set --match-set KUBE-CLUSTER-IP src,dst"),
        (Settings(cluster_networks=BOTH[2:]), "-m set --match-set KUBE-CLUSTER-IP src,dst"),
        (Settings(detect_local=LocalMode.NODE_CIDR), "! -s 10.244.3.0/24 -m set --match-set KUBE-CLUSTER-IP dst,dst"),
        (
            Settings(detect_local=LocalMode.BRIDGE_INTERFACE, local_interface="cni0"),
            "! -i cni0 -m set --match-set KUBE-CLUSTER-IP dst,dst",
        ),
        (
            Settings(detect_local=LocalMode.INTERFACE_NAME_PREFIX, local_interface="veth"),
            "! -i veth+ -m set --match-set KUBE-CLUSTER-IP dst,dst",
        ),
    ],
)
def test_traffic_to_cluster_ips_is_masqueraded_unless_it_comes_from_local_pods(settings: Settings, rule: str) -> None:
    assert _masquerade(settings) == rule


def test_local_pods_of_each_family_are_recognised_by_the_cluster_range_of_this_family() -> None:
    settings = Settings(cluster_networks=BOTH)
    assert _masquerade(settings, Family.IPV6) == "! -s fd00:10:244::/56 -m set --match-set KUBE-6-CLUSTER-IP dst,dst"


@pytest.mark.checklist(104)
def test_the_pod_ranges_of_the_node_affect_the_masquerade_rule_only_in_node_cidr_mode() -> None:
    before = builders.node_view(node_object=builders.node(pod_networks=["10.244.3.0/24"]))
    after = builders.node_view(node_object=builders.node(pod_networks=["10.244.4.0/24"]))
    by_node = Settings(detect_local=LocalMode.NODE_CIDR)
    assert _masquerade(by_node, view=before) != _masquerade(by_node, view=after)
    by_cluster = Settings(cluster_networks=BOTH)
    assert _masquerade(by_cluster, view=before) == _masquerade(by_cluster, view=after)


def test_a_load_balancer_address_that_refuses_this_node_causes_a_drop_rule_only_in_its_own_family() -> None:
    service = builders.service(
        cluster=["10.96.0.10", "fd00:10:96::10"],
        kind=ServiceType.LOAD_BALANCER,
        load_balancer=["192.0.2.10", "2001:db8::10"],
        source_ranges=["203.0.113.0/24", "2001:db8:1::/48"],
    )
    state = reading.state_of(service)
    assert list(reading.texts(reading.skeleton_of(state), "filter", "KUBE-IPVS-OUT-FILTER")) == [
        "-s 192.0.2.10/32 -m ipvs --vproto 6 --vaddr 192.0.2.10 --vport 80 -j DROP"
    ]
    assert list(reading.texts(reading.skeleton_of(state, family=Family.IPV6), "filter", "KUBE-IPVS-OUT-FILTER")) == [
        "-s 2001:db8::10/128 -m ipvs --vproto 6 --vaddr 2001:db8::10 --vport 80 -j DROP"
    ]


def test_a_rule_drops_packets_from_all_host_addresses_to_a_refused_address_that_has_a_route() -> None:
    routed, bound = builders.frontend("2001:db8::10", 80), builders.frontend("2001:db8::11", 80)
    skeleton = build_skeleton(Family.IPV6, Settings(), builders.node_view(), set(), [bound, routed], routed=frozenset({routed}))
    assert set(reading.texts(skeleton, "filter", "KUBE-IPVS-OUT-FILTER")) == {
        "-m addrtype --src-type LOCAL -m ipvs --vproto 6 --vaddr 2001:db8::10 --vport 80 --vdir ORIGINAL -j DROP",
        "-s 2001:db8::11/128 -m ipvs --vproto 6 --vaddr 2001:db8::11 --vport 80 -j DROP",
    }


@pytest.mark.parametrize(
    ("family", "settings", "expected"),
    [
        (Family.IPV6, Settings(binding=Binding.ROUTES), True),
        (Family.IPV4, Settings(binding=Binding.ROUTES), False),
        (Family.IPV6, Settings(), False),
        (Family.IPV6, Settings(binding=Binding.ROUTES, masquerade_all=True), False),
    ],
)
def test_a_rule_masquerades_ipv6_connections_of_this_host_if_service_addresses_have_routes(
    family: Family, settings: Settings, *, expected: bool
) -> None:
    service = builders.service(cluster=["10.96.0.10", "fd00:10:96::10"])
    skeleton = reading.skeleton_of(reading.state_of(service), family=family, settings=settings)
    name = IpSet(SetKind.CLUSTER_IP, family).name
    rule = f"{CLUSTER_COMMENT} -m set --match-set {name} dst,dst -m addrtype --src-type LOCAL -j KUBE-MARK-MASQ"
    assert (rule in reading.texts(skeleton, "nat", "KUBE-SERVICES")) is expected


def test_the_order_of_rules_for_refused_addresses_does_not_depend_on_the_order_of_services() -> None:
    keys = [builders.frontend("192.0.2.2", 80), builders.frontend("192.0.2.1", 80), builders.frontend("192.0.2.1", 443)]
    view = builders.node_view()
    one, other = (build_skeleton(Family.IPV4, Settings(), view, set(), refused) for refused in (keys, keys[::-1]))
    assert one == other
