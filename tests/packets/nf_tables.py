"""The mark of tests that keep rules and sets in nftables."""

import contextlib

import pytest

from ipvsproxy.kernel.nftables.nft_rules_driver import NftRulesDriver
from ipvsproxy.model.net import Family


def is_missing() -> bool:
    """Whether this kernel's nf_tables lacks features that our rules need."""
    with contextlib.closing(NftRulesDriver(chains=(), jumps=())) as driver:
        return driver.try_writing(Family.IPV4) is not None


NEEDS_NF_TABLES = pytest.mark.skipif(is_missing(), reason="this kernel has no nf_tables for IPv4")
