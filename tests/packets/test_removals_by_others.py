"""Virtual servers that another program removes are added again, whatever ipvsproxy does at that time."""

import os
import signal
from collections.abc import Iterator

import pytest

from ipvsproxy.model.net import Family, host_port, parse_address
from tests.support import cluster, lab
from tests.support.cluster import Cluster, service

pytestmark = [pytest.mark.kernel]

AUDIT_INTERVAL_S = 2
FLAGS = (f"--ipvs-sync-period={AUDIT_INTERVAL_S}s",)


@pytest.fixture(name="running", scope="module")
def _running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with lab.Lab() as laboratory, Cluster(laboratory, tmp_path_factory.mktemp("removals"), *FLAGS) as running:
        yield running


OPTIONS = {"TCP": "-t", "UDP": "-u", "SCTP": "--sctp-service"}


def _remove(running: Cluster, protocol: str, address: str, port: int) -> None:
    running.lab.run("node", "ipvsadm", "-D", OPTIONS[protocol], host_port(parse_address(address), port))


def _of_one_family(name: str, number: int, pod: str, family: Family) -> list[cluster.Manifest]:
    address = cluster.address(f"cluster {number}", family)
    return service(name, number, pod, clusterIP=address, clusterIPs=[address], ipFamilies=[family.label])


def test_a_removed_virtual_server_is_restored_even_if_the_first_ipv6_service_is_created_before_the_next_poll(
    running: Cluster,
) -> None:
    """This test runs first, before the program has observed any IPv6 virtual server."""
    first = _of_one_family("web", 1, "p1", Family.IPV4)
    running.have(first)
    before = set(running.virtual_servers())
    _remove(running, "TCP", cluster.address("cluster 1", Family.IPV4), 80)
    running.have(first, _of_one_family("dns", 2, "p2", Family.IPV6))
    running.wait_until(lambda: before < set(running.virtual_servers()), "healed")


@pytest.mark.parametrize("removed", ["all", "IPv6"])
def test_removed_objects_are_restored_after_the_process_was_suspended_for_longer_than_the_audit_interval(
    running: Cluster, removed: str
) -> None:
    running.have(service("web", 1, "p1"), service("dns", 2, "p2"))
    before = set(running.virtual_servers())
    assert {":" in address for _, address, _ in before} == {True, False}, "of both families"
    os.kill(running.program.process_id, signal.SIGSTOP)
    for one in before:
        if removed == "all" or ":" in one[1]:
            _remove(running, *one)
    running.lab.run("node", "sleep", str(2 * AUDIT_INTERVAL_S))
    os.kill(running.program.process_id, signal.SIGCONT)
    running.wait_until(lambda: set(running.virtual_servers()) == before, "healed")
