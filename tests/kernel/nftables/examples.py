"""Examples for tests of the nftables drivers."""

import functools
import shutil

import pytest

from ipvsproxy.model.net import Address, Family, Protocol, parse_address
from ipvsproxy.model.sets import IpSet, MarkedEntry, SetEntry, SetType
from tests.kernel.drivers import run

REAL = [
    pytest.mark.usefixtures("network_namespace"),
    pytest.mark.skipif(shutil.which("nft") is None, reason="nft is not installed"),
]
"""The marks of test modules that use the real nf_tables of this machine, in a separate network namespace."""
CLUSTER = "KUBE-CLUSTER-IP"
nft = functools.partial(run, "nft")


def load(text: str) -> None:
    """Load a file in the syntax of nft."""
    nft("-f", "-", stdin=text)


def entry(number: int, name: str = CLUSTER) -> SetEntry:
    """An entry for a set of addresses and ports; each ``number`` gives a different address."""
    return SetEntry(name, Address((10 << 24 | number).to_bytes(4, "big")), Protocol.TCP, 80)


def an_entry_of(ip_set: IpSet) -> SetEntry:
    """An example entry for this set."""
    address, other = (
        (parse_address("10.96.0.1"), parse_address("10.0.0.0"))
        if ip_set.family is Family.IPV4
        else (parse_address("fd00::1"), parse_address("fd00:8000::"))
    )
    if ip_set.gives_marks:
        return MarkedEntry(ip_set.name, address, Protocol.SCTP, 80, mark=0x12, mask=0xFFF)
    match ip_set.type:
        case SetType.PORT:
            return SetEntry(ip_set.name, port=30001)
        case SetType.ADDRESS:
            return SetEntry(ip_set.name, address)
        case SetType.ADDRESS_PORT:
            return SetEntry(ip_set.name, address, Protocol.UDP, 53)
        case SetType.ADDRESS_PORT_ADDRESS:
            return SetEntry(ip_set.name, address, Protocol.UDP, 53, other)
        case SetType.ADDRESS_PORT_NETWORK:
            return SetEntry(ip_set.name, address, Protocol.UDP, 53, other, 17 if ip_set.family is Family.IPV6 else 8)
