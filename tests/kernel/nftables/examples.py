"""Examples for tests of the nftables drivers."""

from ipvsproxy.model.net import Family, Protocol, parse_address
from ipvsproxy.model.sets import IpSet, MarkedEntry, SetEntry, SetType


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
