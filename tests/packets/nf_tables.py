"""A pytest mark for tests that need rules and sets in nftables, and a function that lists our table."""

import contextlib

import pytest

from ipvsproxy.kernel.nftables.nft_rules_driver import NftRulesDriver
from ipvsproxy.model.net import Family
from tests.support import lab


def is_missing() -> bool:
    """Whether this kernel's nf_tables lacks features that our rules need."""
    with contextlib.closing(NftRulesDriver(chains=(), jumps=())) as driver:
        return driver.try_writing(Family.IPV4) is not None


NEEDS_NF_TABLES = pytest.mark.skipif(is_missing(), reason="this kernel has no nf_tables for IPv4")


def own_table(laboratory: lab.Lab) -> list[str]:
    """The lines of our table, sorted and without handles; lines with several set elements are split at the commas.

    The list is empty if there is no table.
    """
    if "table inet ipvsproxy" not in laboratory.run("node", "nft", "list", "tables").splitlines():
        return []
    text = laboratory.run("node", "nft", "list", "table", "inet", "ipvsproxy")
    return sorted(word for line in text.splitlines() for word in line.strip().split(", "))
