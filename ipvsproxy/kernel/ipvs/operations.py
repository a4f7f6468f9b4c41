"""Operations on virtual and real servers in the form in which they are sent, and the meaning of the kernel's refusals.

A virtual server gets another scheduler while clients come.
The kernel takes the old scheduler away, waits until no processor uses it (``synchronize_rcu``: milliseconds with several
processors, nothing with one), and then installs the new one (``ip_vs_edit_service`` in net/netfilter/ipvs/ip_vs_ctl.c). Meanwhile
a new client is refused, except one with session affinity that is known already: its real server stands in a template, and no
scheduler is asked (``ip_vs_sched_persist`` in ip_vs_core.c). Flags change after the scheduler.

So everybody gets session affinity first, for a moment, in two halves of all addresses: the first client of each half makes the
template for all others. The edit that brings the new scheduler takes the affinity away, too.
"""

import errno
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from ipvsproxy.kernel.base import netlink
from ipvsproxy.model.plan import Operation, Outcome, Verb
from ipvsproxy.model.real_servers import RealServerKey
from ipvsproxy.model.virtual_servers import PERSISTENT, FirewallMark, RealServers, VirtualServer, VirtualServerSettings

PREPARED_SCHEDULERS = frozenset({"mh"})
"""Schedulers that rebuild a large table for each added real server. A new virtual server gets such a scheduler after its real
servers.
"""
NO_SCHEDULER = "none"
"""The kernel's name for no scheduler. A virtual server without one refuses connections, as one without real servers does."""

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


class Failure(NamedTuple):
    """A failure: the kernel's error number, and a ``detail`` if the number does not explain it."""

    number: int
    detail: str = ""


class MessagePlace(NamedTuple):
    """The position of an operation, and the real server, if it is an operation on real servers."""

    position: int
    real_server: RealServerKey | None = None


def places(operations: Sequence[Operation], positions: Sequence[int]) -> list[MessagePlace]:
    """The place of each message of these operations."""
    result: list[MessagePlace] = []
    for (_, item), position in zip(operations, positions, strict=True):
        result += (
            [MessagePlace(position, key) for key in item.keys] if isinstance(item, RealServers) else [MessagePlace(position)]
        )
    return result


def messages(operations: Iterable[Operation]) -> int:
    """The number of messages of these operations."""
    return sum(len(item.keys) if isinstance(item, RealServers) else 1 for _, item in operations)


def chunks(operations: Sequence[Operation], limit: int) -> Iterator[tuple[int, int]]:
    """Cut operations into chunks of at most ``limit`` messages. An operation with more messages is a chunk of its own.

    The messages of a chunk are deleted before the next one is encoded, because messages of all chunks together cost many page
    faults.
    """
    start = count = 0
    for position, (_, item) in enumerate(operations):
        size = len(item.keys) if isinstance(item, RealServers) else 1
        if count + size > limit and start < position:
            yield start, position
            start, count = position, 0
        count += size
    if start < len(operations):
        yield start, len(operations)


def single(operations: Sequence[Operation], place: MessagePlace) -> Operation:
    """The operation at this place, on one object alone."""
    operation = operations[place.position]
    if isinstance(operation.item, RealServers) and place.real_server is not None:
        return Operation(operation.verb, operation.item._replace(keys=(place.real_server,)))
    return operation


def outcomes(operations: Sequence[Operation], reported: Mapping[MessagePlace, Outcome]) -> list[Outcome]:
    """The outcomes of all operations; one without an outcome in ``reported`` is in force.

    An operation on several real servers is split if some of them have an outcome in ``reported``.
    """
    if not reported:
        return list(map(Outcome, operations))
    of_several: dict[int, dict[RealServerKey, Outcome]] = {}
    for place, outcome in reported.items():
        if place.real_server is not None:
            of_several.setdefault(place.position, {})[place.real_server] = outcome
    results: list[Outcome] = []
    for position, operation in enumerate(operations):
        others = of_several.get(position, {})
        if isinstance(operation.item, RealServers) and others:
            added = [key for key in operation.item.keys if key not in others]
            if added:
                results.append(Outcome(Operation(operation.verb, operation.item._replace(keys=tuple(added)))))
            results += others.values()
        else:
            results.append(reported.get(MessagePlace(position)) or Outcome(operation))
    return results


def opposite(operation: Operation, number: int) -> Verb | None:
    """The verb that puts an operation in force if this error means that the object is unexpectedly present or absent.

    A virtual server by firewall mark that is unexpectedly present is another program's: marks are given to us by nobody.
    """
    if operation.verb is Verb.ADD and number == errno.EEXIST:
        return None if _is_by_mark(operation.item) else Verb.SET
    missing = errno.ENOENT if isinstance(operation.item, RealServers) else errno.ESRCH
    return Verb.ADD if operation.verb is Verb.SET and number == missing else None


def is_absent(operation: Operation, number: int) -> bool:
    """Whether this error means that the object of a removal is absent.

    For a virtual server, only ESRCH does (``ip_vs_genl_set_cmd`` in net/netfilter/ipvs/ip_vs_ctl.c). ENOENT, which says nothing
    about it, would have its witnesses removed, and then nobody knows that it is ours.
    """
    return number == errno.ESRCH or (number == errno.ENOENT and isinstance(operation.item, RealServers))


def _is_by_mark(item: object) -> bool:
    return isinstance(item, VirtualServer) and isinstance(item.key, FirewallMark)


def as_sent(operations: Sequence[Operation]) -> tuple[Sequence[Operation], Sequence[int]]:
    """The operations to send, and for each the position of the one that it is for: see ``PREPARED_SCHEDULERS``."""
    positions = range(len(operations))
    new = {
        item.key: position
        for position, (verb, item) in enumerate(operations)
        if isinstance(item, VirtualServer) and verb is Verb.ADD and item.settings.scheduler in PREPARED_SCHEDULERS
    }
    if not new:
        return operations, positions
    last = {
        item.virtual_server: position
        for position, (verb, item) in enumerate(operations)
        if isinstance(item, RealServers) and verb is Verb.ADD and new.get(item.virtual_server, position) < position
    }
    finished = {position: new[key] for key, position in last.items()}
    sent: list[Operation] = []
    positions_of_sent: list[int] = []
    for position, operation in enumerate(operations):
        item = operation.item
        if isinstance(item, VirtualServer) and new.get(item.key) == position and item.key in last:
            bare = VirtualServer(item.key, item.settings._replace(scheduler=NO_SCHEDULER), item.weights, item.owner)
            sent.append(Operation(Verb.ADD, bare))
        else:
            sent.append(operation)
        positions_of_sent.append(position)
        if position in finished:
            sent.append(Operation(Verb.SET, operations[finished[position]].item))
            positions_of_sent.append(finished[position])
    return sent, positions_of_sent


def explain(operation: Operation, failure: Failure) -> str:
    """The reason why the kernel refused an operation, in words."""
    if failure.detail:
        return failure.detail
    item = operation.item
    if operation.verb is Verb.ADD and failure.number == errno.EEXIST and _is_by_mark(item):
        return "another program has made a virtual server by this mark"
    if isinstance(item, VirtualServer) and failure.number == errno.ENOENT:
        return describe_missing(item.settings.scheduler)
    if isinstance(item, RealServers) and failure.number == errno.ESRCH:
        return "its virtual server is missing"
    return netlink.explain(failure.number)


def describe_missing(scheduler: str) -> str:
    """The reason why a scheduler that the kernel lacks is unusable."""
    return f"the kernel has no scheduler {scheduler!r}: the module ip_vs_{scheduler} is missing or cannot be loaded"


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
