"""Addresses are added to the node and removed.

Node ports are served on the new addresses. A Service address is unbound while another device of the node has the address.
"""

import time
from collections.abc import Iterable

import pytest

from ipvsproxy.model.net import Family
from ipvsproxy.translate.translation_settings import Binding
from ipvsproxy.translate.view import GRACE_S
from tests.packets.bindings import with_routes
from tests.support import cluster
from tests.support.cluster import Cluster, service

pytestmark = [pytest.mark.kernel, with_routes]

ACKNOWLEDGED_S = 0.5
"""The number of seconds after which a client has certainly acknowledged an answer. Linux delays acknowledgements by 40 ms
(TCP_DELACK_MIN) to 200 ms."""
NODE_PORT = 30001
NEW = {Family.IPV4: "172.18.7.7/16", Family.IPV6: "fc00:f853:ccd::77/64"}
ADDED = [f"address add {text} dev eth0 {'nodad' if ':' in text else ''}" for text in NEW.values()]
DELETED = [f"address delete {text} dev eth0" for text in NEW.values()]
ELSEWHERE = {Family.IPV4: "203.0.113.9/24", Family.IPV6: "2001:db8:9::9/64"}
SERVICES = service("web", 1, "p1", external=True, node_port=NODE_PORT, protocols=["TCP", "SCTP"])


@pytest.fixture(scope="module", name="running")
def _running(running: Cluster) -> Cluster:
    """A cluster with ``SERVICES``.

    The service addresses have local routes here; in ``test_reported.py``, they are on ``kube-ipvs0``.
    """
    running.have(SERVICES)
    return running


def _node_port_addresses(running: Cluster, protocol: str = "TCP") -> set[str]:
    """The addresses on which the node port is served."""
    return {address for name, address, port in running.virtual_servers() if (name, port) == (protocol, NODE_PORT)}


def _wait_until_served(running: Cluster, *addresses: str) -> None:
    """Wait until the node port is served on exactly these addresses of the node.

    The time limit is longer than the grace period, in which node ports are still served on addresses that the host has lost.
    """
    within_s = GRACE_S + cluster.CHANGED_WITHIN_S
    running.wait_until(lambda: _node_port_addresses(running) == {*addresses}, f"served on {addresses}", within_s)


def _bare(addresses: Iterable[str]) -> set[str]:
    return {text.partition("/")[0] for text in addresses}


OWN = {"172.18.0.2", "10.244.0.1", "fc00:f853:ccd::2", "fd00:10:244::1"}


def test_node_ports_are_served_on_the_present_addresses_of_the_node(running: Cluster) -> None:
    assert _node_port_addresses(running) == _node_port_addresses(running, "SCTP") == OWN

    running.lab.ip("node", *ADDED)
    new = _bare(NEW.values())
    _wait_until_served(running, *OWN, *new)
    assert _node_port_addresses(running, "SCTP") == OWN | new
    assert all(running.lab.probe("client", "TCP", address, NODE_PORT).outcome == "ok" for address in sorted(new))
    sets = [running.set_contents(name) for name in ("KUBE-NODE-PORT-SCTP-HASH", "KUBE-6-NODE-PORT-SCTP-HASH")]
    assert all(f"{address},sctp:{NODE_PORT}" in "".join(sets) for address in new)

    running.lab.ip("node", *DELETED)
    _wait_until_served(running, *OWN)
    running.lab.ip(
        "node",
        "link add extra type dummy",
        *(f"address add {text} dev extra" for text in ELSEWHERE.values()),
        "link set extra up",
    )
    _wait_until_served(running, *OWN, *_bare(ELSEWHERE.values()))
    running.lab.ip("node", "link delete extra")
    _wait_until_served(running, *OWN)


def test_connections_through_a_node_port_survive_a_short_absence_of_the_node_address(running: Cluster) -> None:
    """If netplan, a DHCP client or keepalived removes an address for a moment, connections through the address must not end.

    While the address is missing, the client must not send a packet, so the test first waits for the last acknowledgement. A
    packet that is sent while the address is missing would take another route than earlier packets of its connection. The kernel
    would delete the connection of such a packet (``nf_nat_oif_changed``), with or without this program.
    """
    assert running.lab.run("node", "sysctl", "-n", "net.ipv4.vs.expire_nodest_conn").strip() == "1"
    new = _bare(NEW.values())
    running.lab.ip("node", *ADDED)
    running.wait_until(lambda: new <= _node_port_addresses(running), "addresses that came")
    connections = [running.lab.open("client", "TCP", address, NODE_PORT) for address in new]
    for away_s in (0.3, 2.0):
        time.sleep(ACKNOWLEDGED_S)
        running.lab.ip("node", *DELETED)
        ends = time.monotonic() + away_s
        while time.monotonic() < ends:
            assert new <= _node_port_addresses(running)
            time.sleep(0.1)
        running.lab.ip("node", *ADDED)
        assert [one.ask() for one in connections] == [one.backend for one in connections]
    time.sleep(GRACE_S)
    for one in connections:
        assert one.ask() == one.backend
        one.close()
    running.lab.ip("node", *DELETED)
    _wait_until_served(running, *OWN)


def test_a_service_address_is_not_bound_again_if_another_device_of_the_node_has_the_address(running: Cluster) -> None:
    external = {cluster.address("external 1", family): family.bits for family in Family}

    def are_served() -> bool:
        return all(running.lab.probe("client", "TCP", one, 80).outcome == "ok" for one in external)

    assert external.keys() <= running.local_addresses(Binding.ROUTES)
    running.lab.ip("node", *(f"address add {one}/{bits} dev eth0" for one, bits in external.items()))
    running.wait_until(lambda: external.keys().isdisjoint(running.local_addresses(Binding.ROUTES)), "made room")
    assert are_served()
    running.wait_until(lambda: external.keys() <= _node_port_addresses(running), "are addresses of the node now")
    running.lab.ip("node", *(f"address delete {one}/{bits} dev eth0" for one, bits in external.items()))
    running.wait_until(lambda: external.keys() <= running.local_addresses(Binding.ROUTES), "came back")
    assert are_served()
    _wait_until_served(running, *OWN)


def test_node_ports_are_served_only_on_addresses_in_the_configured_ranges(running: Cluster) -> None:
    """The recordings of kube-proxy in ``tests/test_golden.py`` do not cover these values of ``--nodeport-addresses``."""
    running.program.kill()
    running.start("--nodeport-addresses=203.0.113.0/24,2001:db8:9::/64")
    assert _node_port_addresses(running) == set(), "the node ports of the start before are removed"
    elsewhere, new = ELSEWHERE[Family.IPV4], NEW[Family.IPV4]
    running.lab.ip("node", f"address add {elsewhere} dev eth0", f"address add {new} dev eth0")
    _wait_until_served(running, *_bare([elsewhere]))
    running.lab.ip("node", f"address delete {elsewhere} dev eth0", f"address delete {new} dev eth0")
    _wait_until_served(running)
