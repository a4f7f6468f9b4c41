"""The scheduler ``mh``, tested with packets: no client is refused while endpoints are replaced or flags of kube-proxy change.

The kernel keeps a real server in the lookup table of ``mh`` when its weight becomes 0.
"""

from collections.abc import Iterator

import pytest

from ipvsproxy.model.net import Family
from tests.packets.bindings import mainly_ipv4, mainly_ipv6
from tests.support import cluster, lab
from tests.support.cluster import Cluster, Manifest, service

pytestmark = [pytest.mark.kernel]

PODS = ("p1", "p2", "r1", "r2")
REQUESTS = 100


@pytest.fixture(scope="module", name="running")
def _running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    directory = tmp_path_factory.mktemp("maglev")
    with lab.Lab() as laboratory, Cluster(laboratory, directory, "--ipvs-scheduler=mh") as running:
        yield running


def _web(*endpoints: str) -> list[Manifest]:
    return service("web", 1, *endpoints, protocols=("TCP",))


def _shown(family: Family) -> str:
    host = cluster.address("cluster 1", family)
    return f"[{host}]:80" if family is Family.IPV6 else f"{host}:80"


def _virtual_server(running: Cluster, family: Family) -> str:
    """The line of a virtual server in the output of ``ipvsadm --save``."""
    saved = running.lab.run("node", "ipvsadm", "--save", "--numeric")
    return next(line for line in saved.splitlines() if line.startswith(f"-A -t {_shown(family)} "))


@mainly_ipv4
def test_no_client_is_refused_while_endpoints_are_replaced_one_by_one(running: Cluster, family: Family) -> None:
    running.have(_web("p1", "p2"))
    to = cluster.address("cluster 1", family)
    # The scheduler chooses by the client's port, so random ports might all lead to one endpoint.
    client = cluster.address("client", family)
    opened = [running.lab.open("client", "TCP", to, 80, src=f"{client}#{port}") for port in range(40000, 40008)]
    assert {one.backend for one in opened} == {cluster.address(pod, family) for pod in ("p1", "p2")}, "both will drain"
    with running.lab.load("p2", "TCP", to, 80) as loads:
        for pods in (("p1", "p2", "r1"), ("p2", "r1"), ("p2", "r1", "r2"), ("r1", "r2")):
            running.have(_web(*pods))
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
def test_changed_flags_of_kube_proxy_for_mh_are_applied_without_removing_the_virtual_server(
    running: Cluster, family: Family
) -> None:
    running.have(_web(*PODS))
    to = cluster.address("cluster 1", family)
    running.program.kill()
    running.lab.run("node", "ipvsadm", "-E", "-t", _shown(family), "-s", "mh", "-b", "mh-port")
    assert _virtual_server(running, family).endswith("-s mh -b mh-port")
    opened = [running.lab.open("client", "TCP", to, 80) for _ in range(4)]
    with running.lab.load("p2", "TCP", to, 80) as loads:
        running.start()
    assert _virtual_server(running, family).endswith("-s mh -b mh-fallback,mh-port")
    assert loads[0].failures == []
    assert loads[0].outcomes["ok"] > 5

    def counted() -> int:
        """The number of connections that the kernel has counted, which is updated every two seconds."""
        statistics = running.lab.run("node", "ipvsadm", "-Ln", "--stats", "--exact").splitlines()
        return next(int(line.split()[2]) for line in statistics if line.startswith(f"TCP  {_shown(family)} "))

    # If the virtual server were removed and added again, its counter would start at 0 and never reach this number.
    running.wait_until(lambda: counted() > loads[0].outcomes["ok"], "the same virtual server as before")
    for one in opened:
        assert one.ask() == one.backend
        one.abort()
