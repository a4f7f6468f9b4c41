"""How many nf_tables transactions a sync of the whole program needs, counted by the kernel's generation number."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyroute2.netlink import NETLINK_NETFILTER

from ipvsproxy.kernel.base import netlink
from ipvsproxy.kernel.base import nft_message as nft
from tests.packets.nf_tables import NEEDS_NF_TABLES
from tests.packets.test_scopes import API
from tests.support import lab
from tests.support.cluster import Cluster, Manifest, service

pytestmark = [pytest.mark.kernel, NEEDS_NF_TABLES]

RANGES = ["172.18.0.50/32", "fc00:f853:ccd::50/128"]


def plain(name: str, number: int) -> list[Manifest]:
    """A Service with every kind of address."""
    return service(name, number, "p1", "r1", balancer=True, external=True, node_port=30000 + number)


def special(*numbers: int) -> list[Manifest]:
    """Services with source ranges and Services with a second scope; two Services for each number."""
    return [
        manifest
        for number in numbers
        for manifest in (
            *service(f"ranges-{number}", number, "p1", balancer=True, loadBalancerSourceRanges=RANGES),
            *service(f"local-{number}", 100 + number, "p1", "r1", balancer=True, externalTrafficPolicy="Local"),
        )
    ]


@pytest.fixture(name="running")
def _running(tmp_path: Path) -> Iterator[Cluster]:
    with lab.Lab() as laboratory, Cluster(laboratory, tmp_path, *API, "--rules-backend=nftables") as running:
        yield running


def transactions(running: Cluster, *manifests: list[Manifest]) -> int:
    """How many generations a sync with these objects needs. Only our program writes, and each transaction is one generation."""
    with contextlib.closing(netlink.Channel(NETLINK_NETFILTER)) as channel:
        before, syncs = nft.generation(channel), running.synced_services
        running.have(*manifests)
        assert running.synced_services == syncs + 1
        return nft.generation(channel) - before


def test_a_sync_needs_two_transactions_if_it_adds_and_removes_objects_and_otherwise_one(running: Cluster) -> None:
    first = plain("first", 1)
    assert transactions(running, first) == 1
    assert transactions(running, first, *(plain(f"other-{number}", number) for number in range(2, 8))) == 1
    assert transactions(running, first, plain("one-more", 9)) == 2
    assert transactions(running, first) == 1
    assert running.logged("level=error|Traceback") == []


def test_the_number_of_transactions_does_not_depend_on_the_number_of_source_ranges_and_scopes(
    running: Cluster,
) -> None:
    """Clients outside the source ranges are refused before a virtual server can serve them.

    Packets get a mark only after the virtual server of the mark has been added.
    """
    running.have(special(1))
    assert transactions(running, special(1, 2)) == 3
    assert transactions(running, special(*range(1, 9))) == 3
    assert running.logged("level=error|Traceback") == []
