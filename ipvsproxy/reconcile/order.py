"""The order of operations, as a table.

Additions come before removals, and what restricts comes before what it restricts:

* rules name sets, so sets come first; a rule on an empty set does nothing, so entries come before rules;
* source ranges are in force before the address that they guard is reachable, and nobody whom they let in is shut out:
  ranges, then rules, then the set that sends packets to them, then the virtual server;
* a virtual server and its real servers come before its address, or clients would be refused in between;
* on removal the virtual server goes first, its entries and address after it: they are also what tells a later process that
  the virtual server is ours.
"""

from collections.abc import Mapping

from ipvsproxy.model.kernel import (
    IP_SETS,
    BoundAddress,
    BoundAddresses,
    Device,
    FlowCleaning,
    IpSet,
    RealServer,
    RealServers,
    SetCopy,
    SetEntries,
    SetEntry,
    SetKind,
    Sysctl,
    Timeouts,
    VirtualServer,
)
from ipvsproxy.model.plan import Operation, Verb
from ipvsproxy.model.rules import Skeleton

RANGE_SETS = frozenset(
    name
    for name, ip_set in IP_SETS.items()
    if ip_set.kind in {SetKind.LOAD_BALANCER_SOURCE_CIDR, SetKind.LOAD_BALANCER_SOURCE_IP}
)
"""Sets of the sources that are let in."""
FIREWALL_SETS = frozenset(name for name, ip_set in IP_SETS.items() if ip_set.kind is SetKind.LOAD_BALANCER_FIREWALL)
"""Sets of the virtual servers that let in certain sources only."""
LOCAL_SETS = frozenset(
    name
    for name, ip_set in IP_SETS.items()
    if ip_set.kind
    in {
        SetKind.LOAD_BALANCER_LOCAL,
        SetKind.NODE_PORT_LOCAL_TCP,
        SetKind.NODE_PORT_LOCAL_UDP,
        SetKind.NODE_PORT_LOCAL_SCTP,
    }
)
"""Sets of what is not masqueraded because it is to stay on this node."""

_RANGES, _ENTRIES, _FIREWALL_ENTRIES, _DRAINING, _FIREWALL_REMOVALS, _ENTRY_REMOVALS = 4, 5, 7, 10, 12, 13
_RANKS: Mapping[tuple[Verb, type], int] = {
    (Verb.SET, Sysctl): 0,
    (Verb.SET, Timeouts): 1,
    (Verb.ADD, Device): 2,
    (Verb.ADD, IpSet): 3,
    (Verb.SET, Skeleton): 6,
    (Verb.ADD, VirtualServer): 8,
    (Verb.SET, VirtualServer): 8,
    (Verb.ADD, RealServers): 8,
    (Verb.ADD, RealServer): 8,
    (Verb.SET, RealServer): 8,
    (Verb.ADD, BoundAddress): 9,
    (Verb.ADD, BoundAddresses): 9,
    (Verb.REMOVE, RealServer): 10,
    (Verb.REMOVE, VirtualServer): 11,
    (Verb.REMOVE, SetCopy): 14,
    (Verb.REMOVE, BoundAddress): 14,
    (Verb.REMOVE, FlowCleaning): 15,
}
_RANKS_OF_ENTRIES: Mapping[tuple[Verb, str], int] = (
    {(Verb.ADD, name): _ENTRIES for name in IP_SETS}
    | {(Verb.REMOVE, name): _ENTRY_REMOVALS for name in IP_SETS}
    | {(Verb.ADD, name): _RANGES for name in RANGE_SETS}
    | {(Verb.ADD, name): _FIREWALL_ENTRIES for name in FIREWALL_SETS}
    | {(Verb.REMOVE, name): _FIREWALL_REMOVALS for name in FIREWALL_SETS}
)


def rank(operation: Operation) -> int:
    """The place of an operation: lower ones come first; equal ones keep the order in which they were planned.

    Raises:
        KeyError: nobody ever plans such an operation.
    """
    verb, item = operation
    if isinstance(item, SetEntry | SetEntries):
        return _RANKS_OF_ENTRIES[verb, item.set]
    if verb is Verb.SET and type(item) is RealServer and item.weight == 0:
        return _DRAINING
    return _RANKS[verb, type(item)]


def is_removal(operation: Operation) -> bool:
    """Whether an operation takes something away from somebody: a removal, or the weight of a real server."""
    return operation.verb is Verb.REMOVE or rank(operation) == _DRAINING
