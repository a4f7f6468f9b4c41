"""Covers clients of each kind that send UDP datagrams larger than the MTU. The results must be as docs/running.md describes.

IPVS does not fragment packets that routers must not fragment: all IPv6 packets, and IPv4 packets with DF set, which is the
default. If such a packet is larger than the MTU, IPVS drops the packet, and reports the MTU to the sender. If the Service address
is local on the host of the sender, IPVS gets the packet unfragmented.
"""

import enum
import time

import pytest

from ipvsproxy.model.net import Family
from ipvsproxy.translate.translation_settings import Binding
from tests.packets.bindings import by_family, with_addresses
from tests.support import cluster, patience
from tests.support.cluster import Cluster, service

pytestmark = [pytest.mark.kernel]

UDP = ("UDP",)
NODE_PORT, POD_PORT = 30001, 8053
MTU = 1500
HEADERS = {Family.IPV4: 20 + 8, Family.IPV6: 40 + 8}
LARGE = 4000
DATAGRAMS = 12
BRIDGED = "net/bridge/bridge-nf-call-ip6tables"
DISCOVERY = "net/ipv4/ip_no_pmtu_disc"


class Arrived(enum.Enum):
    """Which datagrams of one socket arrive at the backend."""

    ALL = enum.auto()
    ALL_BUT_THE_FIRST = enum.auto()
    NONE = enum.auto()


@pytest.fixture(scope="module", name="running")
def _running(running: Cluster) -> Cluster:
    for family in Family:
        running.lab.mute("remote", cluster.address("r1", family), POD_PORT)
    # The kernel remembers the MTU of an address for ten minutes, so each test uses different addresses.
    running.have(*(service(f"web-{number}", number, "r1", node_port=NODE_PORT + number, protocols=UDP) for number in range(1, 8)))
    return running


def _arrived(running: Cluster, family: Family, from_: str, to: str, *, port: int = 53, size: int = LARGE) -> Arrived:
    """Which datagrams of a new socket arrive at the backend."""
    pod = cluster.address("r1", family)
    before, _ = running.lab.heard("remote", pod, POD_PORT)
    with running.lab.sending(from_, cluster.address(to, family), port, size=size) as sent:
        running.wait_until(lambda: sum(sent().values()) >= DATAGRAMS, "sent")
    time.sleep(patience.seconds(0.2))
    count, _ = running.lab.heard("remote", pod, POD_PORT)
    heard = count - before
    lost = sent()["sent"] - heard
    assert lost == 0 or heard == 0 or lost <= 2, "some arrive, and some do not"
    return Arrived.ALL if not lost else Arrived.NONE if not heard else Arrived.ALL_BUT_THE_FIRST


@by_family
def test_datagrams_up_to_the_mtu_arrive(running: Cluster, family: Family) -> None:
    size = MTU - HEADERS[family]
    for from_ in ("host", "p2", "client"):
        to, port = ("node", NODE_PORT + 1) if from_ == "client" else ("cluster 1", 53)
        assert _arrived(running, family, from_, to, port=port, size=size) is Arrived.ALL


def test_the_binding_determines_which_large_ipv4_datagrams_of_a_host_socket_arrive(running: Cluster, binding: Binding) -> None:
    to, first = ("cluster 2", Arrived.NONE) if binding is Binding.ADDRESSES else ("cluster 7", Arrived.ALL_BUT_THE_FIRST)
    assert _arrived(running, Family.IPV4, "host", to) is first
    assert _arrived(running, Family.IPV4, "host", to) is Arrived.ALL, "the kernel remembers the MTU of the address"


def test_all_large_datagrams_of_the_host_arrive_if_path_mtu_discovery_is_off(running: Cluster) -> None:
    before = running.lab.call("sysctl", namespace="node", values={DISCOVERY: "1"})
    try:
        assert _arrived(running, Family.IPV4, "host", "cluster 3") is Arrived.ALL
    finally:
        running.lab.call("sysctl", namespace="node", values=before)


def test_large_datagrams_of_the_host_do_not_arrive_over_ipv6(running: Cluster) -> None:
    for _ in range(2):
        assert _arrived(running, Family.IPV6, "host", "cluster 4") is Arrived.NONE


@with_addresses
def test_large_datagrams_of_pods_are_lost_only_over_ipv6_and_only_if_netfilter_sees_bridged_packets(running: Cluster) -> None:
    assert _arrived(running, Family.IPV4, "p2", "cluster 5") is Arrived.ALL
    assert _arrived(running, Family.IPV6, "p2", "cluster 5") is Arrived.NONE
    before = running.lab.call("sysctl", namespace="node", values={BRIDGED: "0"})
    try:
        assert _arrived(running, Family.IPV6, "p2", "cluster 5") is Arrived.ALL
    finally:
        running.lab.call("sysctl", namespace="node", values=before)


@by_family
def test_large_datagrams_of_outside_clients_arrive(running: Cluster, family: Family) -> None:
    assert _arrived(running, family, "client", "node", port=NODE_PORT + 6) is Arrived.ALL
