"""How long node ports outlive an address that this host has lost."""

from ipvsproxy.model.net import parse_address
from ipvsproxy.translate.node.lingering import GRACE_S, Lingering
from ipvsproxy.translate.node.view import view_node
from ipvsproxy.translate.settings import Settings
from tests.support import builders

ONE, TWO, THREE = builders.addresses("172.18.0.2", "172.18.0.3", "fc00::2")


def test_what_has_never_gone_does_not_linger() -> None:
    assert Lingering().next_s is None
    observed = Lingering().after([ONE, TWO], 10)
    assert (list(observed.addresses), observed.next_s, observed.is_due(1e9)) == ([], None, False)


def test_an_address_that_goes_lingers_for_a_grace_and_no_longer() -> None:
    lost = Lingering().after([ONE, TWO, THREE], 10).after([ONE], 20)
    assert list(lost.addresses) == [TWO, THREE]
    assert lost.next_s == 20 + GRACE_S
    assert not lost.is_due(20 + GRACE_S - 0.001)
    assert lost.is_due(20 + GRACE_S)
    assert list(lost.after([ONE], 20 + GRACE_S - 0.001).addresses) == [TWO, THREE]
    assert list(lost.after([ONE], 20 + GRACE_S).addresses) == []


def test_each_address_has_its_own_grace() -> None:
    lost = Lingering().after([ONE, TWO], 10).after([ONE], 20).after([], 23)
    assert dict(lost.until_s) == {TWO: 20 + GRACE_S, ONE: 23 + GRACE_S}
    assert lost.next_s == 20 + GRACE_S


def test_an_address_that_comes_back_has_a_whole_grace_when_it_goes_again() -> None:
    back = Lingering().after([ONE], 10).after([], 20).after([ONE], 21)
    assert list(back.addresses) == []
    assert back.after([], 25).next_s == 25 + GRACE_S


def test_a_failed_reading_gives_no_address_up() -> None:
    lost = Lingering().after([ONE], 10).after([], 20).postponed(20 + GRACE_S)
    assert not lost.is_due(20 + GRACE_S)
    assert (list(lost.addresses), lost.next_s) == ([ONE], 20 + 2 * GRACE_S)


def test_node_ports_and_health_checks_stay_on_lingering_addresses_and_service_addresses_are_bound_at_once() -> None:
    settings = Settings(node_port_networks=builders.networks("172.18.0.0/16"))
    carried = [builders.interface_address("eth0", str(ONE))]
    view = view_node(settings, "node-a", None, carried, (), lingering=[TWO, parse_address("203.0.113.9")])
    assert view.node_port_addresses[ONE.family] == view.health_check_addresses[ONE.family] == (ONE, TWO)
    assert view.elsewhere == {ONE}
