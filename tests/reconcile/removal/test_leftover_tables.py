"""Which tables are recognised as tables that kube-proxy's nftables mode has left behind."""

import dataclasses

import pytest

from ipvsproxy.model.rules import BaseChain, ChainKey, NftTable, Removal
from ipvsproxy.reconcile.removal import leftovers
from tests.support.left_tables import LEFT


def without(chain: str) -> NftTable:
    return dataclasses.replace(LEFT, chains={name: place for name, place in LEFT.chains.items() if name != chain})


def test_a_leftover_nftables_table_of_kube_proxy_is_removed_as_a_whole() -> None:
    keys = tuple(ChainKey("kube-proxy", name) for name in LEFT.chains)
    assert leftovers.why_foreign(LEFT) == ""
    assert leftovers.removal_of_table(LEFT) == Removal(emptied=keys, deleted=keys)
    assert leftovers.removal_of_table(LEFT).is_needed


def test_a_kube_proxy_table_without_a_comment_is_recognised_because_old_versions_of_nft_write_no_comment() -> None:
    assert leftovers.why_foreign(dataclasses.replace(LEFT, comment="")) == ""


def test_no_removal_is_needed_if_no_table_exists() -> None:
    assert leftovers.removal_of_table(None) == Removal()


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
def test_a_table_is_not_removed_if_its_comment_differs_or_if_it_lacks_a_chain_or_map_of_kube_proxy(
    table: NftTable, why: str
) -> None:
    assert leftovers.why_foreign(table) == why
    assert leftovers.removal_of_table(table) == Removal()
