"""SCTP clients with several addresses, served by IPVS: an association continues when its client changes its address.

IPVS treats a packet from an unknown address as a new connection, and by default only an INIT chunk may open a connection. If a
packet from an unknown address has no INIT chunk, IPVS leaves the packet to the node itself, which answers with an ABORT. The
ABORT ends the association (loxilb-io/loxilb #384).
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from ipvsproxy.model.net import Family
from tests.support import cluster, lab
from tests.support.cluster import Cluster, service

pytestmark = [pytest.mark.kernel]

FIRST, SECOND = "172.18.0.50", "172.18.1.51"
WEB = service("web", 1, "p1", external=True, protocols=("SCTP",), externalTrafficPolicy="Local")
TO = cluster.address("external 1", Family.IPV4)
SETTING = Path("/proc/sys/net/ipv4/vs/sloppy_sctp")


@pytest.fixture(name="association")
def _association(laboratory: lab.Lab) -> Iterator[None]:
    """The client uses its first address for the Service until :func:`_move` is called."""
    laboratory.ip("client", f"route add {TO} via 172.18.0.2 src {FIRST}")
    try:
        yield
    finally:
        laboratory.ip("client", f"route del {TO}")


def _move(running: Cluster) -> lab.Connection:
    """Open an association from the client's first address, and then make the client continue from its second address."""
    running.have(WEB)
    opened = running.lab.open("client", "SCTP", TO, 80, src=f"{FIRST},{SECOND}")
    assert opened.backend == cluster.address("p1", Family.IPV4)
    assert _clients(running) == {FIRST}
    running.lab.ip("client", f"route replace {TO} via 172.18.0.2 src {SECOND}")
    return opened


def _clients(running: Cluster) -> set[str]:
    """The client addresses of the SCTP connections in IPVS."""
    rows = [line.split() for line in running.lab.run("node", "ipvsadm", "-Lnc").splitlines()]
    return {row[3].partition(":")[0] for row in rows if row[0] == "SCTP"}


@pytest.mark.usefixtures("association")
def test_an_association_ends_if_the_client_changes_addresses_while_sloppy_sctp_is_off(
    laboratory: lab.Lab, tmp_path: Path
) -> None:
    with Cluster(laboratory, tmp_path) as running:
        assert SETTING.read_text() == "0\n"
        opened = _move(running)
        with pytest.raises(lab.LabError, match="ConnectionResetError"):
            opened.ask(timeout_s=6)
        assert _clients(running) == {FIRST}
        opened.close()


@pytest.mark.usefixtures("association")
def test_an_association_continues_after_its_client_has_changed_its_address(laboratory: lab.Lab, tmp_path: Path) -> None:
    with Cluster(laboratory, tmp_path, "--ipvs-sysctls=sloppy_sctp=1") as running:
        running.wait_until(lambda: SETTING.read_text() == "1\n", "sloppy")
        opened = _move(running)
        assert opened.ask(timeout_s=6) == cluster.address("p1", Family.IPV4)
        assert _clients(running) == {FIRST, SECOND}
        opened.close()
