"""Which of several Services that want one virtual server gets it.

Rule 1: what the API server allots goes first: a cluster IP, then a node port. An external or load-balancer address is asked for
by whoever writes the Service, so it never takes an address that was allotted, whatever the age.
Rule 2: a Service that has been seen goes before one that is only remembered (see ``Owner``).
Rule 3: the older Service goes first.
"""

import enum
from typing import NamedTuple

from ipvsproxy.model.kernel import IpSet, Owner, SetEntry, SetKind, VirtualServerKey
from ipvsproxy.model.net import Family
from ipvsproxy.model.state import ServiceState


class Role(enum.IntEnum):
    """By what right a Service wants a virtual server; the lower one goes first."""

    CLUSTER_IP = 0
    NODE_PORT = 1
    OTHER_ADDRESS = 2


class Rank(NamedTuple):
    """One Service's claim on a virtual server; the lowest one wins."""

    role: Role
    owner: Owner


_CLUSTER_IPS = {family: IpSet(SetKind.CLUSTER_IP, family).name for family in Family}
_OTHERS = {
    family: tuple(IpSet(kind, family).name for kind in (SetKind.EXTERNAL_IP, SetKind.EXTERNAL_IP_LOCAL, SetKind.LOAD_BALANCER))
    for family in Family
}


def rank(state: ServiceState, key: VirtualServerKey) -> Rank:
    """The claim of a Service that wants this virtual server.

    Its set entries tell the role: a node port's do not name its address, or stand in a set of node ports.
    """
    family = key.address.family

    def has_entry_in(name: str) -> bool:
        return SetEntry(name, key.address, key.protocol, key.port) in state.entries

    if has_entry_in(_CLUSTER_IPS[family]):
        role = Role.CLUSTER_IP
    elif any(map(has_entry_in, _OTHERS[family])):
        role = Role.OTHER_ADDRESS
    else:
        role = Role.NODE_PORT
    return Rank(role, state.owner)


def reason(winner: Rank, other: Rank) -> str:
    """Why the winner goes before the other, to be put after its name."""
    if winner.role is not other.role:
        return "has it as its cluster IP" if winner.role is Role.CLUSTER_IP else "has it as its node port"
    if other.owner.is_remembered and not winner.owner.is_remembered:
        return "is on the newest list, which lacks the other, and has it"
    return "is older and has it"
