"""The stage of each operation in a plan; ``model/kind.py`` has the reasons."""

from collections.abc import Mapping

from ipvsproxy.model.kind import Stage
from ipvsproxy.model.plan import KINDS, Operation, Verb
from ipvsproxy.model.sets import IP_SETS, SetEntries, SetKind
from ipvsproxy.model.virtual_servers import RealServers

RANGE_SETS = frozenset(
    name
    for name, ip_set in IP_SETS.items()
    if ip_set.kind in {SetKind.LOAD_BALANCER_SOURCE_CIDR, SetKind.LOAD_BALANCER_SOURCE_IP}
)
"""Sets of admitted sources."""
FIREWALL_SETS = frozenset(name for name, ip_set in IP_SETS.items() if ip_set.kind is SetKind.LOAD_BALANCER_FIREWALL)
"""Sets of virtual servers that admit only certain sources."""
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
"""Sets of traffic that is not masqueraded because it stays on this node."""
SCOPE_SETS = frozenset(name for name, ip_set in IP_SETS.items() if ip_set.gives_marks)
"""Sets that give packets their mark."""

_STAGES: Mapping[tuple[Verb, type], Stage] = {
    (Verb(verb), object_class): stage for object_class, kind in KINDS.items() for verb, stage in kind.stages.items()
}
_STAGES_OF_ENTRIES: Mapping[tuple[Verb, str], Stage] = (
    {(Verb.ADD, name): Stage.SOURCE_RANGES for name in RANGE_SETS}
    | {(Verb.ADD, name): Stage.FIREWALL_ENTRIES for name in FIREWALL_SETS}
    | {(Verb.REMOVE, name): Stage.FIREWALL_REMOVALS for name in FIREWALL_SETS}
    | {(Verb.ADD, name): Stage.MARKS for name in SCOPE_SETS}
    | {(Verb.REMOVE, name): Stage.MARK_REMOVALS for name in SCOPE_SETS}
)
"""The stages of entries, by set."""


def stage_of(operation: Operation) -> Stage:
    """The stage of an operation. Lower stages come first; operations of one stage keep their planned order.

    Raises:
        KeyError: such an operation is never planned.
    """
    verb, item = operation
    if isinstance(item, SetEntries):
        return _STAGES_OF_ENTRIES.get((verb, item.set)) or _STAGES[verb, type(item)]
    if verb is Verb.SET and isinstance(item, RealServers) and item.weight == 0:
        return Stage.REAL_SERVER_REMOVALS
    return _STAGES[verb, type(item)]


def is_removal(operation: Operation) -> bool:
    """Whether an operation takes something away: a removal, or weight 0 for a real server."""
    return operation.verb is Verb.REMOVE or stage_of(operation) is Stage.REAL_SERVER_REMOVALS
