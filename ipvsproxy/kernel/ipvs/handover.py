"""How a virtual server gets another scheduler while clients come.

The kernel takes the old scheduler away, waits until no processor uses it (``synchronize_rcu``: milliseconds with several
processors, nothing with one), and then installs the new one (``ip_vs_edit_service`` in net/netfilter/ipvs/ip_vs_ctl.c). Meanwhile
a new client is refused, except one with session affinity that is known already: its real server stands in a template, and no
scheduler is asked (``ip_vs_sched_persist`` in ip_vs_core.c). Flags change after the scheduler.

So everybody gets session affinity first, for a moment, in two halves of all addresses: the first client of each half makes the
template for all others. The edit that brings the new scheduler takes the affinity away, too.
"""

from collections.abc import Iterator, Sequence

from ipvsproxy.kernel.ipvs.operations import NO_SCHEDULER
from ipvsproxy.model.plan import Operation, Verb
from ipvsproxy.model.virtual_servers import PERSISTENT, FirewallMark, VirtualServer, VirtualServerSettings

PAUSE_S = 0.1
"""The time for clients to make templates.

So long, and during the edits after it, all new clients of a half go to one real server.
"""
AT_ONCE = 20
"""The most virtual servers that wait for each other's edits."""
MOST_PAUSES = 5
"""The most pauses in one call: after them, schedulers change without preparation. Anybody who may write Services causes them."""
_HALF = 1
"""The prefix length of half of all addresses; the kernel takes no shorter one for IPv6."""
_TIMEOUT_S = 2
"""Templates are forgotten so long after their last use."""


def may_change_scheduler(operation: Operation) -> bool:
    """Whether an operation may change the scheduler of a virtual server.

    Not by a firewall mark: there, the kernel ignores the ports of real servers with session affinity.
    """
    item = operation.item
    return operation.verb is Verb.SET and isinstance(item, VirtualServer) and not isinstance(item.key, FirewallMark)


def prepared(item: VirtualServer, present: VirtualServerSettings) -> Operation | None:
    """The operation that prepares a virtual server for its new settings; None if clients are served without it."""
    if present.scheduler in (item.settings.scheduler, NO_SCHEDULER, "") or present.flags & PERSISTENT:
        return None
    settings = present._replace(flags=present.flags | PERSISTENT, timeout_s=_TIMEOUT_S, prefix_length=_HALF)
    return Operation(Verb.SET, VirtualServer(item.key, settings))


def segments(operations: Sequence[Operation]) -> Iterator[tuple[int, int]]:
    """Cut operations into runs with at most ``AT_ONCE`` that may change a scheduler; all of them are one run if none does."""
    start = count = 0
    for position, operation in enumerate(operations):
        if may_change_scheduler(operation):
            count += 1
            if count > AT_ONCE:
                yield start, position
                start, count = position, 1
    yield start, len(operations)
