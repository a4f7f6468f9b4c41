"""Which tables are those that kube-proxy's nftables mode has left behind."""

import dataclasses

import pytest

from ipvsproxy.model.rules import BaseChain, ChainKey, NftTable, Removal
from ipvsproxy.reconcile.removal import leftover_tables
from tests.support.left_tables import LEFT


def without(chain: str) -> NftTable:
    return dataclasses.replace(LEFT, chains={name: place for name, place in LEFT.chains.items() if name != chain})


def test_a_table_of_kube_proxy_goes_as_a_whole() -> None:
    keys = tuple(ChainKey("kube-proxy", name) for name in LEFT.chains)
    assert leftover_tables.why_foreign(LEFT) == ""
    assert leftover_tables.removal(LEFT) == Removal(emptied=keys, deleted=keys)
    assert leftover_tables.removal(LEFT).is_needed


def test_versions_of_nft_that_write_no_comment_make_kube_proxys_table_as_well() -> None:
    assert leftover_tables.why_foreign(dataclasses.replace(LEFT, comment="")) == ""


def test_where_no_table_is_there_is_nothing_to_remove() -> None:
    assert leftover_tables.removal(None) == Removal()


@pytest.mark.parametrize(
    ("table", "why"),
    [
        (dataclasses.replace(LEFT, comment="my own proxy"), "its comment is 'my own proxy'"),
        (without("nat-output"), "it has no chain nat-output of type nat at the hook output"),
        (
            dataclasses.replace(LEFT, chains={**LEFT.chains, "nat-output": BaseChain("filter", "output", 0)}),
            "it has no chain nat-output of type nat at the hook output",
        ),
        (
            dataclasses.replace(LEFT, chains={**LEFT.chains, "nat-prerouting": None}),
            "it has no chain nat-prerouting of type nat at the hook prerouting",
        ),
        (without("services"), "it has no chain services"),
        (dataclasses.replace(LEFT, maps=frozenset({"service-ips"})), "it has no map service-nodeports"),
    ],
)
def test_a_table_of_another_shape_is_left_alone(table: NftTable, why: str) -> None:
    assert leftover_tables.why_foreign(table) == why
    assert leftover_tables.removal(table) == Removal()
