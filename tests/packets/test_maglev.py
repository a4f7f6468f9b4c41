"""The scheduler ``mh``, tested with packets: no client is refused while endpoints are replaced or flags of kube-proxy change.

When the weight of a real server becomes 0, the kernel keeps the real server in the lookup table of ``mh``.
"""

import pytest

from ipvsproxy.model.net import Family, host_port, parse_address
from tests.packets.bindings import mainly_ipv4, mainly_ipv6, with_addresses
from tests.packets.test_annotations import PODS, TCP, scheduled
from tests.support import cluster
from tests.support.cluster import Cluster, service

pytestmark = [pytest.mark.kernel, with_addresses]

FLAGS = ("--ipvs-scheduler=mh",)
REQUESTS = 100


def _virtual_server(running: Cluster, shown: str) -> str:
    """The line of a virtual server in the output of ``ipvsadm --save``."""
    saved = running.lab.run("node", "ipvsadm", "--save", "--numeric")
    return next(line for line in saved.splitlines() if line.startswith(f"-A -t {shown} "))


@mainly_ipv4
def test_no_client_of_the_scheduler_mh_is_refused_while_endpoints_are_replaced_one_by_one(
    running: Cluster, family: Family
) -> None:
    running.have(service("web", 1, "p1", "p2", protocols=TCP))
    to = cluster.address("cluster 1", family)
    # The scheduler chooses by the client's port, so random ports might all lead to one endpoint.
    client = cluster.address("client", family)
    opened = [running.lab.open("client", "TCP", to, 80, src=f"{client}#{port}") for port in range(40000, 40008)]
    assert {one.backend for one in opened} == {cluster.address(pod, family) for pod in ("p1", "p2")}, "both will drain"
    with running.lab.load("p2", "TCP", to, 80) as loads:
        for pods in (("p1", "p2", "r1"), ("p2", "r1"), ("p2", "r1", "r2"), ("r1", "r2")):
            running.have(service("web", 1, *pods, protocols=TCP))
            requests = running.lab.repeat("client", "TCP", to, 80, count=REQUESTS)
            assert requests.outcomes == {"ok": REQUESTS}
            assert set(requests.backends) <= {cluster.address(pod, family) for pod in pods}
        weights = running.real_servers("TCP", to, 80)
        assert {weights[cluster.address(pod, family)] for pod in ("p1", "p2")} == {0}, "they still drain"
    (load,) = loads
    assert load.failures == []
    assert load.outcomes["ok"] > 20
    for one in opened:
        assert one.ask() == one.backend
        one.abort()


@mainly_ipv6
def test_a_virtual_server_with_the_mh_flags_of_kube_proxy_gets_new_flags_without_being_removed(
    running: Cluster, family: Family
) -> None:
    running.have(service("web", 1, *PODS, protocols=TCP))
    to = cluster.address("cluster 1", family)
    shown = host_port(parse_address(to), 80)
    running.program.kill()
    running.lab.run("node", "ipvsadm", "-E", "-t", shown, "-s", "mh", "-b", "mh-port")
    assert _virtual_server(running, shown).endswith("-s mh -b mh-port")
    opened = [running.lab.open("client", "TCP", to, 80) for _ in range(4)]
    with running.lab.load("p2", "TCP", to, 80) as loads:
        running.start()
    assert _virtual_server(running, shown).endswith("-s mh -b mh-fallback,mh-port")
    assert loads[0].failures == []
    assert loads[0].outcomes["ok"] > 5
    # If the virtual server were removed and added again, its counter would start at 0 and never exceed the number of answers.
    running.wait_until(lambda: scheduled(running, to) > loads[0].outcomes["ok"], "the same virtual server as before")
    for one in opened:
        assert one.ask() == one.backend
        one.abort()
