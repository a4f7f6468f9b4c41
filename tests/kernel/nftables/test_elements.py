"""Entries of sets as elements of nf_tables, and back."""

import pytest

from ipvsproxy.kernel.base import nft_message
from ipvsproxy.kernel.nftables import elements
from ipvsproxy.model.net import Protocol, parse_address
from ipvsproxy.model.sets import IP_SETS, SetEntry
from tests.kernel.nftables.examples import an_entry_of


@pytest.mark.parametrize("garbled", range(5, 8))
def test_a_key_with_other_padding_is_no_entry_of_ours(garbled: int) -> None:
    ip_set = IP_SETS["KUBE-CLUSTER-IP"]
    entry = SetEntry(ip_set.name, parse_address("10.0.0.1"), Protocol.TCP, 80)
    encoded = elements.encode(ip_set, entry)
    key, data, comment = nft_message.read_element(encoded, 4, len(encoded))
    assert elements.decode(ip_set, key, data, comment) == entry
    strange = bytearray(key)
    strange[garbled] = 1
    assert str(elements.decode(ip_set, bytes(strange), data, comment)) == f"element {strange.hex()}"


def test_every_key_has_the_length_that_the_kernel_is_told() -> None:
    for ip_set in IP_SETS.values():
        encoded = elements.encode(ip_set, an_entry_of(ip_set))
        key, data, comment = nft_message.read_element(encoded, 4, len(encoded))
        assert (len(key), len(data)) == (elements.shape(ip_set).key_length, elements.shape(ip_set).data_length)
        assert elements.decode(ip_set, key, data, comment) == an_entry_of(ip_set)
