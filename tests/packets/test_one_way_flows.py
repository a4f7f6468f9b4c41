"""UDP clients that send from one port and expect no answer, while their Service loses its endpoints or is recreated.

In the iptables and nftables modes of kube-proxy, only connection tracking determines which pod gets the packets of such a client,
and the pod may have been removed (kubernetes/kubernetes #139628, #141371). IPVS decides for each packet where the
packet goes, and deletes an IPVS connection together with its tracked flow. In most cases of these tests, the kernel alone does
the right thing. ipvsproxy must delete tracked flows when a Service gets its first endpoint, because packets to an address that
belongs to no Service are tracked as well.
"""

import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from ipvsproxy.model.net import Family, host_port, parse_address
from tests.packets.bindings import each_family, mainly_ipv6, with_addresses
from tests.support import cluster, patience
from tests.support.cluster import Cluster, Manifest, service

pytestmark = [pytest.mark.kernel, with_addresses]

UDP = ("UDP",)
NODE_PORT, POD_PORT = 30001, 8053
WAITED_S = patience.seconds(30.0)
SOME = 10
"""The number of packets after which a client counts as served, or as refused."""
NAMESPACES = {"p1": "p1", "r1": "remote", "r2": "remote"}


@pytest.fixture(scope="module", name="running")
def _running(running: Cluster) -> Cluster:
    # As in a cluster, the node has a default route. So packets to an address that no machine has are tracked, and leave the node.
    running.lab.ip("node", "route replace default via 172.18.0.50", "route replace default via fc00:f853:ccd::50")
    for pod, namespace in NAMESPACES.items():
        for family in Family:
            running.lab.mute(namespace, cluster.address(pod, family), POD_PORT)
    return running


def _web(*pods: str) -> list[Manifest]:
    return service("web", 1, *pods, node_port=NODE_PORT, protocols=UDP)


def _other(*pods: str) -> list[Manifest]:
    """Another Service with the addresses of the Service ``web``."""
    manifests = service("other", 1, *pods, node_port=NODE_PORT, protocols=UDP)
    manifests[0]["metadata"]["uid"] = "other"
    return manifests


UNRELATED = service("unrelated", 9, "p2", protocols=UDP)


class Client:
    """A client that sends packets all the time, and the pods that may receive these packets."""

    def __init__(self, running: Cluster, family: Family, from_: str, sent: Callable[[], Mapping[str, int]]) -> None:
        self._running, self._family, self._from, self._sent = running, family, from_, sent

    def heard(self) -> Mapping[str, int]:
        """The number of packets that each pod has received."""
        return {pod: self._ask(pod)[0] for pod in NAMESPACES}

    def _ask(self, pod: str) -> tuple[int, str]:
        return self._running.lab.heard(NAMESPACES[pod], cluster.address(pod, self._family), POD_PORT)

    def _packets(self) -> int:
        return sum(self._sent().values())

    def _errors(self) -> int:
        """The number of packets that the kernel refused to send, for example because an earlier packet caused an ICMP error."""
        return self._packets() - self._sent().get("sent", 0)

    def _wait_until(self, reached: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + WAITED_S
        while not reached():
            assert time.monotonic() < deadline, f"not {what} within {WAITED_S} s: {self._sent()}, {self.heard()}"
            time.sleep(0.05)

    def is_served_by(self, pod: str) -> None:
        """Check that packets of the client arrive at this pod, and that no other pod receives a packet during the check."""
        before = self.heard()
        self._wait_until(lambda: self.heard()[pod] > before[pod], f"served by {pod}")
        first, packets = self.heard(), self._packets()
        self._wait_until(lambda: self._packets() >= packets + SOME, "sent")
        self._wait_until(lambda: self.heard()[pod] >= first[pod] + SOME, f"heard by {pod}")
        assert {**self.heard(), pod: before[pod]} == before
        if self._from == "client":
            assert self._ask(pod)[1] != cluster.address("client", self._family), "masqueraded, or its answers would not come back"

    def is_served_by_nobody(self, *, refused: bool) -> None:
        """Check that from now on no packet arrives at any pod. With ``refused``, the client must get errors."""
        before, packets, errors = self.heard(), self._packets(), self._errors()
        self._wait_until(lambda: self._packets() >= packets + 2 * SOME, "sent")
        if refused:
            self._wait_until(lambda: self._errors() >= errors + SOME, "refused")
        assert self.heard() == before


WAYS = {"pod": ("p2", "cluster 1", 53), "host": ("host", "cluster 1", 53), "outside": ("client", "node", NODE_PORT)}
USUAL = {Family.IPV4: ("pod", "outside"), Family.IPV6: ("host",)}
"""For each IP family, the clients that the usual test run covers."""


@each_family
@pytest.mark.parametrize("way", WAYS)
def test_no_packet_is_sent_to_a_wrong_pod_when_endpoints_or_the_service_are_removed(
    running: Cluster, family: Family, way: str
) -> None:
    if way not in USUAL[family] and not patience.IS_THOROUGH:
        pytest.skip("takes long; .ci/full runs it")
    from_, to, port = WAYS[way]
    running.have(_web("p1"))
    with running.lab.sending(from_, cluster.address(to, family), port) as sent:
        client = Client(running, family, from_, sent)
        client.is_served_by("p1")
        running.have(_web())
        client.is_served_by_nobody(refused=True)
        running.have(_web("r1"))
        client.is_served_by("r1")
        running.have(UNRELATED)
        client.is_served_by_nobody(refused=to == "node")
        running.have(_other("r2"))
        client.is_served_by("r2")
        running.have(_web("p1"))
        client.is_served_by("p1")


@mainly_ipv6
def test_if_the_kernel_keeps_a_connection_to_a_removed_real_server_a_packet_ends_it(running: Cluster, family: Family) -> None:
    """Kernels before 5.9, and later kernels without ``expire_nodest_conn``, do not look for connections to a removed real server.

    With ``expire_nodest_conn``, a packet of such a connection is dropped, and ends the connection (``ip_vs_in_hook`` in
    net/netfilter/ipvs/ip_vs_core.c). The test ends the program first, because the program would write the setting again. The
    kernel handles all clients with the same function, so one client is enough.
    """
    running.have(_web("p1"))
    to = cluster.address("cluster 1", family)
    with running.lab.sending("p2", to, 53) as sent:
        client = Client(running, family, "p2", sent)
        client.is_served_by("p1")
        running.program.kill()
        frontend, pod = (
            host_port(parse_address(one), port) for one, port in ((to, 53), (cluster.address("p1", family), POD_PORT))
        )
        setting = Path("/proc/sys/net/ipv4/vs/expire_nodest_conn")
        setting.write_text("0")
        running.lab.run("node", "ipvsadm", "--delete-server", "--udp-service", frontend, "--real-server", pod)
        assert f" {POD_PORT:04X} UDP" in Path("/proc/net/ip_vs_conn").read_text(), "the kernel has kept the connection"
        setting.write_text("1")
        client.is_served_by_nobody(refused=True)
        running.objects = _other("r1")
        running.start()
        client.is_served_by("r1")
