"""Decides which Service gets a virtual server that several Services desire.

Rule 1: addresses that the API server allocates take precedence: cluster IPs first, then node ports. The author of a Service
chooses the Service's external and load-balancer addresses, so these addresses never win against an allocated address, whatever
the age of the Service.
Rule 2: a listed Service takes precedence over a remembered Service (see ``Owner``).
Rule 3: the older Service takes precedence.
"""

import enum
from collections.abc import Collection
from typing import NamedTuple

from ipvsproxy.model.net import Family
from ipvsproxy.model.service import Owner
from ipvsproxy.model.sets import IpSet, SetEntry, SetKind
from ipvsproxy.model.virtual_servers import VirtualServerKey


class AddressRole(enum.IntEnum):
    """The role of a virtual server's address for its Service; the lower role takes precedence."""

    CLUSTER_IP = 0
    NODE_PORT = 1
    OTHER_ADDRESS = 2


class Rank(NamedTuple):
    """The rank of a Service for a virtual server; the Service with the lowest rank wins."""

    role: AddressRole
    owner: Owner


_CLUSTER_IPS = {family: IpSet(SetKind.CLUSTER_IP, family).name for family in Family}
_OTHERS = {
    family: tuple(IpSet(kind, family).name for kind in (SetKind.EXTERNAL_IP, SetKind.EXTERNAL_IP_LOCAL, SetKind.LOAD_BALANCER))
    for family in Family
}


def rank(owner: Owner, entries: Collection[SetEntry], key: VirtualServerKey) -> Rank:
    """The rank of a Service that desires this virtual server and has these set entries.

    The entries show the role of the address: entries of a node port do not name its address, or are in a set of node ports.
    """
    family = key.address.family

    def has_entry_in(name: str) -> bool:
        return SetEntry(name, key.address, key.protocol, key.port) in entries

    if has_entry_in(_CLUSTER_IPS[family]):
        role = AddressRole.CLUSTER_IP
    elif any(map(has_entry_in, _OTHERS[family])):
        role = AddressRole.OTHER_ADDRESS
    else:
        role = AddressRole.NODE_PORT
    return Rank(role, owner)


def reason(winner: Rank, other: Rank) -> str:
    """The reason why the winner takes precedence over the other Service, as a text that follows the winner's name."""
    if winner.role is not other.role:
        return "has it as its cluster IP" if winner.role is AddressRole.CLUSTER_IP else "has it as its node port"
    if other.owner.is_remembered and not winner.owner.is_remembered:
        return "is on the newest list, which lacks the other, and has it"
    return "is older and has it"
