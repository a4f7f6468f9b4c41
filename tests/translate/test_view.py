"""The roles of a node's addresses: the node's own address, addresses for node ports, addresses on other interfaces."""

import pytest

from ipvsproxy.model.kernel import DEVICE, TUNNEL_RECORD, Sysctl, render_record
from ipvsproxy.model.net import Family, parse_address
from ipvsproxy.model.plan import Operation, Outcome, Verb
from ipvsproxy.model.state import Observation
from ipvsproxy.translate.translation_settings import LocalMode, Settings
from ipvsproxy.translate.view import (
    GRACE_S,
    Lingering,
    are_tunnels_down,
    known_node_port_ranges,
    knows_direct_return,
    node_port_ranges,
    primary_family,
    view_node,
    without_direct_return,
    without_local_pods,
)
from tests.support import builders


def _node_port_addresses(
    interfaces: dict[str, list[str]], family: Family = Family.IPV4, settings: Settings | None = None
) -> list[str]:
    view = builders.node_view(interfaces, settings=settings)
    return [str(address) for address in view.node_port_addresses[family]]


def _case(number: int, four: str, six: str, **interfaces: str) -> object:
    """A test case of kube-proxy: the addresses of interfaces, and for each family the addresses where node ports answer."""
    return pytest.param(
        {DEVICE if name == "ours" else name: text.split() for name, text in interfaces.items()},
        four,
        six,
        marks=pytest.mark.checklist(number),
        id=f"{number}: {interfaces}",
    )


@pytest.mark.parametrize(
    ("interfaces", "four", "six"),
    [
        _case(1, "1.2.3.4", "", eth0="1.2.3.4", lo="127.0.0.1"),
        _case(2, "", ""),
        _case(2, "", "", lo="127.0.0.1 ::1"),
        _case(
            3,
            "1.2.3.4 172.17.0.1",
            "2001:db8::1 fd00::1",
            eth0="1.2.3.4 2001:db8::1",
            docker0="172.17.0.1 fd00::1",
            lo="127.0.0.1",
        ),
        _case(4, "1.2.3.4 100.200.201.1", "2001:db8::2", eth0="1.2.3.4", eth1="100.200.201.1 2001:db8::2"),
        _case(4, "10.1.0.5", "", eth0="10.1.0.5", vrf0="10.1.0.5"),
        _case(5, "1.2.3.4", "", eth0="1.2.3.4", ours="10.96.0.1 10.96.0.10"),
        _case(6, "", "", ours="10.96.0.1"),
        _case(6, "", "", ours="10.96.0.1", lo="127.0.0.1"),
        _case(7, "100.0.0.1", "", ours="1.2.3.4", eth5="100.0.0.1", lo="127.0.0.1"),
        _case(8, "1.2.3.4 100.0.0.1", "", ipvs0="1.2.3.4", eth0="100.0.0.1"),
        _case(
            9, "1.2.3.4", "2001:db8::1 fd00::1", eth0="1.2.3.4 fe80::1:2", eth1="2001:db8::1", docker0="fd00::1 fe80::3", lo="::1"
        ),
        _case(11, "8.8.8.8 192.168.0.1 169.254.0.0", "1000::", eth0="127.0.0.0 127.6.7.8 8.8.8.8 192.168.0.1 169.254.0.0 1000::"),
        _case(11, "169.254.0.0", "", eth0="::ffff:169.254.0.0"),
        _case(12, "8.8.8.8", "", eth0="::1 fe80::1 febf::1 ::ffff:8.8.8.8"),
    ],
)
def test_node_ports_answer_on_the_usable_addresses_of_every_interface_except_our_device(
    interfaces: dict[str, list[str]], four: str, six: str
) -> None:
    """An address of lo, of our device, of 127.0.0.0/8 or of fe80::/10 is not usable; an address of two interfaces counts once."""
    assert _node_port_addresses(interfaces) == four.split()
    assert _node_port_addresses(interfaces, Family.IPV6) == six.split()


@pytest.mark.checklist(10)
def test_node_ports_answer_on_an_address_of_an_interface_even_if_our_device_has_the_same_address() -> None:
    view = builders.node_view({"eth0": ["2001:db8::1"], DEVICE: ["2001:db8::1"]})
    assert view.node_port_addresses[Family.IPV6] == builders.addresses("2001:db8::1")
    assert parse_address("2001:db8::1") in view.elsewhere


INTERFACES = {"eth0": ["10.1.0.5", "2001:db8::5", "fe80::5"], "eth1": ["10.2.0.5"], "lo": ["127.0.0.1", "::1"]}


def _limited(*ranges: str) -> Settings:
    return Settings(node_port_networks=builders.networks(*ranges))


@pytest.mark.checklist(101)
@pytest.mark.parametrize(
    ("ranges", "four", "six"),
    [
        pytest.param("10.1.0.0/16 0.0.0.0/0", "10.1.0.5 10.2.0.5", "2001:db8::5", id="all addresses beside another range"),
        pytest.param("::/0", "10.1.0.5 10.2.0.5", "2001:db8::5", id="all addresses"),
        pytest.param("10.1.0.0/16", "10.1.0.5", "2001:db8::5", id="does not restrict the other family"),
        pytest.param("10.1.0.0/16 10.0.0.0/8", "10.1.0.5 10.2.0.5", "2001:db8::5", id="an address in two ranges is used once"),
        pytest.param("192.168.0.0/16", "", "2001:db8::5", id="no address is in the range"),
        pytest.param("127.0.0.0/8 10.2.0.0/24 ::1/128 fe80::/10", "10.2.0.5", "fe80::5", id="never loopback, but link-local"),
    ],
)
def test_node_ports_answer_on_the_addresses_in_the_configured_ranges(ranges: str, four: str, six: str) -> None:
    settings = _limited(*ranges.split())
    assert _node_port_addresses(INTERFACES, settings=settings) == four.split()
    assert _node_port_addresses(INTERFACES, Family.IPV6, settings) == six.split()


def test_health_check_ports_listen_on_all_addresses_unless_ranges_restrict_node_ports() -> None:
    assert builders.node_view({}).health_check_addresses == {
        Family.IPV4: builders.addresses("0.0.0.0"),
        Family.IPV6: builders.addresses("::"),
    }
    limited = builders.node_view(
        {"eth0": ["10.2.0.5", "10.9.0.5"], "lo": ["127.0.0.1"], "eth1": ["fe80::5"]},
        settings=_limited("10.2.0.0/16", "127.0.0.0/8", "fe80::/10"),
    )
    assert limited.health_check_addresses == {
        Family.IPV4: builders.addresses("10.2.0.5", "127.0.0.1"),
        Family.IPV6: (),  # the host can listen on a link-local address only if it names the interface
    }


def test_the_value_primary_means_the_address_that_the_node_object_has_in_each_family() -> None:
    node = builders.node("10.2.0.5", "2001:db8::5")
    view = builders.node_view(INTERFACES, node_object=node, settings=Settings(node_port_primary=True))
    assert view.node_port_addresses == {
        Family.IPV4: builders.addresses("10.2.0.5"),
        Family.IPV6: builders.addresses("2001:db8::5"),
    }


def test_primary_means_all_addresses_of_a_family_if_the_node_object_has_no_such_address() -> None:
    view = builders.node_view(INTERFACES, node_object=builders.node("2001:db8::5"), settings=Settings(node_port_primary=True))
    assert view.node_port_addresses[Family.IPV4] == builders.addresses("10.1.0.5", "10.2.0.5")


@pytest.mark.parametrize(("bind_address", "primary"), [("0.0.0.0", "10.0.0.1"), ("::", "10.0.0.1"), ("192.0.2.7", "192.0.2.7")])
def test_a_familys_first_node_address_is_primary_unless_the_family_has_a_specific_bind_address(
    bind_address: str, primary: str
) -> None:
    node = builders.node("10.0.0.1", "10.0.0.2", "2001:db8::1", "2001:db8::2")
    view = builders.node_view(node_object=node, settings=Settings(bind_address=parse_address(bind_address)))
    assert view.primary_addresses == {Family.IPV4: parse_address(primary), Family.IPV6: parse_address("2001:db8::1")}


def test_a_view_without_a_node_object_has_loopback_primary_addresses_and_no_zone_or_pod_ranges() -> None:
    view = view_node(Settings(), "node-a", None, [builders.interface_address("eth0", "10.1.0.5")], ())
    assert (view.name, view.zone, view.pod_networks) == ("node-a", "", ())
    assert view.primary_addresses == {Family.IPV4: parse_address("127.0.0.1"), Family.IPV6: parse_address("::1")}
    assert view.node_port_addresses[Family.IPV4] == builders.addresses("10.1.0.5")


def test_zone_and_pod_ranges_come_from_the_node_object() -> None:
    view = builders.node_view(node_object=builders.node(zone="zone-7", pod_networks=["10.244.3.0/24", "fd00:3::/64"]))
    assert view.zone == "zone-7"
    assert view.pod_networks == builders.networks("10.244.3.0/24", "fd00:3::/64")


def test_field_elsewhere_omits_link_local_ipv6_addresses_and_addresses_of_lo_and_our_device() -> None:
    interfaces = {
        "eth0": ["10.1.0.5", "169.254.1.1", "fe80::1", "2001:db8::5"],
        "lo": ["127.0.0.1", "::1"],
        DEVICE: ["10.96.0.1"],
    }
    view = builders.node_view(interfaces)
    assert view.elsewhere == frozenset(builders.addresses("10.1.0.5", "169.254.1.1", "2001:db8::5"))


def test_the_masquerade_mark_is_the_bit_that_the_operator_chose() -> None:
    assert Settings().mark == 0x4000
    assert Settings(masquerade_bit=31).mark == 0x80000000


@pytest.mark.parametrize(
    ("bind_address", "addresses", "expected"),
    [
        (None, (), None),
        (None, ("fd00:10::10", "192.168.0.10"), Family.IPV6),
        ("0.0.0.0", ("fd00:10::10",), Family.IPV6),
        ("192.168.0.10", ("fd00:10::10",), Family.IPV4),
    ],
)
def test_the_first_node_address_determines_the_primary_family_unless_the_bind_address_is_specific(
    bind_address: str | None, addresses: tuple[str, ...], expected: Family | None
) -> None:
    settings = Settings(bind_address=parse_address(bind_address) if bind_address else None)
    node = builders.node(*addresses) if addresses else None
    assert primary_family(settings, node) is expected


@pytest.mark.parametrize(
    ("settings", "ranges"),
    [
        (Settings(), ["0.0.0.0/0", "::/0"]),
        (Settings(node_port_networks=builders.networks("172.18.0.0/16")), ["172.18.0.0/16", "::/0"]),
        (Settings(node_port_networks=builders.networks("172.18.0.0/16", "0.0.0.0/0", "fc00::/7")), ["0.0.0.0/0", "fc00::/7"]),
        (Settings(node_port_primary=True), [f"{builders.NODE_ADDRESS}/32", "::/0"]),
    ],
)
def test_node_port_ranges_depend_only_on_the_settings_and_the_node_object(settings: Settings, ranges: list[str]) -> None:
    seen = builders.node()
    assert node_port_ranges(settings, seen) == builders.networks(*ranges)


@pytest.mark.parametrize(
    ("mode", "cluster", "pods", "expected"),
    [
        (LocalMode.CLUSTER_CIDR, (), (), set()),
        (LocalMode.CLUSTER_CIDR, ("10.244.0.0/16",), (), {Family.IPV6}),
        (LocalMode.CLUSTER_CIDR, ("10.244.0.0/16", "fd00:10:244::/56"), (), set()),
        (LocalMode.NODE_CIDR, ("10.244.0.0/16",), ("fd00:10:244::/64",), {Family.IPV4}),
        (LocalMode.NODE_CIDR, (), (), set()),
        (LocalMode.BRIDGE_INTERFACE, ("10.244.0.0/16",), (), set()),
    ],
)
def test_local_pods_cannot_be_recognised_in_a_family_without_pod_ranges(
    mode: LocalMode, cluster: tuple[str, ...], pods: tuple[str, ...], expected: set[Family]
) -> None:
    settings = Settings(detect_local=mode, cluster_networks=builders.networks(*cluster), local_interface="cni0")
    assert without_local_pods(settings, builders.networks(*pods)) == expected


ONE, TWO, THREE = builders.addresses("172.18.0.2", "172.18.0.3", "fc00::2")


def test_an_address_that_was_never_lost_has_no_grace_period() -> None:
    assert Lingering().next_s is None
    observed = Lingering().after([ONE, TWO], 10)
    assert (list(observed.addresses), observed.next_s, observed.is_due(1e9)) == ([], None, False)


def test_a_lost_address_is_kept_until_its_grace_period_ends() -> None:
    lost = Lingering().after([ONE, TWO, THREE], 10).after([ONE], 20)
    assert list(lost.addresses) == [TWO, THREE]
    assert lost.next_s == 20 + GRACE_S
    assert not lost.is_due(20 + GRACE_S - 0.001)
    assert lost.is_due(20 + GRACE_S)
    assert list(lost.after([ONE], 20 + GRACE_S - 0.001).addresses) == [TWO, THREE]
    assert list(lost.after([ONE], 20 + GRACE_S).addresses) == []


def test_each_lost_address_has_its_own_grace_period() -> None:
    lost = Lingering().after([ONE, TWO], 10).after([ONE], 20).after([], 23)
    assert dict(lost.until_s) == {TWO: 20 + GRACE_S, ONE: 23 + GRACE_S}
    assert lost.next_s == 20 + GRACE_S


def test_an_address_that_returns_has_a_full_grace_period_when_it_is_lost_again() -> None:
    back = Lingering().after([ONE], 10).after([], 20).after([ONE], 21)
    assert list(back.addresses) == []
    assert back.after([], 25).next_s == 25 + GRACE_S


def test_the_grace_periods_of_lost_addresses_begin_again_after_a_failed_read() -> None:
    lost = Lingering().after([ONE], 10).after([], 20).postponed(20 + GRACE_S)
    assert not lost.is_due(20 + GRACE_S)
    assert (list(lost.addresses), lost.next_s) == ([ONE], 20 + 2 * GRACE_S)


def test_only_node_ports_and_health_checks_still_use_an_address_that_the_node_has_just_lost() -> None:
    settings = Settings(node_port_networks=builders.networks("172.18.0.0/16"))
    carried = [builders.interface_address("eth0", str(ONE))]
    view = view_node(settings, "node-a", None, carried, (), lingering=[TWO, parse_address("203.0.113.9")])
    assert view.node_port_addresses[ONE.family] == view.health_check_addresses[ONE.family] == (ONE, TWO)
    assert view.elsewhere == {ONE}


@pytest.mark.parametrize(("bind_address", "is_known"), [(None, False), ("0.0.0.0", False), ("192.0.2.1", True)])
def test_the_primary_address_for_node_ports_needs_no_node_object_if_the_bind_address_is_specific(
    bind_address: str | None, *, is_known: bool
) -> None:
    settings = Settings(node_port_primary=True, bind_address=parse_address(bind_address) if bind_address else None)
    assert bool(known_node_port_ranges(settings)) is is_known
    assert known_node_port_ranges(Settings())


def test_recorded_settings_of_direct_return_are_restored_after_the_tunnel_devices_are_down() -> None:
    former = {"net/ipv4/conf/all/rp_filter": "2", "net/ipv4/ip_forward": "0", "/sys/class/net/tunl0/flags": "0x80"}
    observed = Observation(sysctls={TUNNEL_RECORD: render_record(former)}, interface_addresses=())
    assert [(one.verb, one.item.key) for one in without_direct_return(observed)] == [
        (Verb.REMOVE, "/sys/class/net/tunl0/flags"),
        (Verb.REMOVE, "net/ipv4/conf/all/rp_filter"),
    ], "and no setting that is not one of direct return"


def test_direct_return_settings_stay_if_no_record_exists_or_another_program_may_use_the_tunnel() -> None:
    record = {TUNNEL_RECORD: render_record({"/sys/class/net/tunl0/flags": "0x80"})}
    shared = (builders.interface_address("tunl0", "10.244.3.0"),)
    for observed in (
        Observation(sysctls={}, interface_addresses=()),
        Observation(sysctls={TUNNEL_RECORD: "uplink"}, interface_addresses=()),
        Observation(sysctls=record, interface_addresses=shared),
        Observation(sysctls=record),
    ):
        assert without_direct_return(observed) == ()


def test_changes_by_direct_return_are_unknown_if_settings_or_recorded_tunnels_are_unreadable() -> None:
    record = {TUNNEL_RECORD: render_record({"/sys/class/net/tunl0/flags": "0x80"})}
    assert knows_direct_return(Observation(sysctls={}))
    assert knows_direct_return(Observation(sysctls=record, interface_addresses=()))
    assert not knows_direct_return(Observation(sysctls=record))
    assert not knows_direct_return(Observation(interface_addresses=()))


def test_only_a_failure_to_restore_a_tunnel_device_makes_tunnels_count_as_up() -> None:
    device, other = (
        Operation(Verb.REMOVE, Sysctl(path, "1")) for path in ("/sys/class/net/ip6tnl0/flags", "net/ipv4/vs/sloppy_tcp")
    )
    assert are_tunnels_down([Outcome(device), Outcome(other, error="read-only")])
    assert not are_tunnels_down([Outcome(device, error="read-only"), Outcome(other)])
