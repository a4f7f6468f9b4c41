"""How operations on virtual and real servers are ordered and divided for sending, and what the kernel's error numbers mean."""

import errno
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from ipvsproxy.kernel.base import netlink
from ipvsproxy.model.plan import Operation, Outcome, Verb, count_objects
from ipvsproxy.model.virtual_servers import FirewallMark, RealServers, VirtualServer

PREPARED_SCHEDULERS = frozenset({"mh"})
"""Schedulers that rebuild a large table for each added real server. A new virtual server gets such a scheduler only after its
real servers have been added.
"""
NO_SCHEDULER = "none"
"""The scheduler name with which the kernel adds a virtual server without a scheduler.

A virtual server without scheduler refuses connections, just as a virtual server without real servers does.
"""


class Failure(NamedTuple):
    """A failure: the kernel's error number, and a ``detail`` if the error number alone does not explain the failure."""

    number: int
    detail: str = ""


def outcomes(operations: Iterable[Operation], reported: Mapping[int, Outcome]) -> list[Outcome]:
    """The outcomes of all operations.

    ``reported`` has outcomes by object number; every object without an outcome in ``reported`` has been programmed. If
    ``reported`` has only some real servers of an operation, all other real servers of the operation share one outcome.
    """
    results: list[Outcome] = []
    first = 0
    for operation in operations:
        item = operation.item
        objects = range(first, first + count_objects(item))
        first = objects.stop
        if reported.keys().isdisjoint(objects):
            results.append(Outcome(operation))
            continue
        apart = {place: reported[number] for place, number in enumerate(objects) if number in reported}
        if isinstance(item, RealServers) and len(apart) < len(objects):
            others = tuple(key for place, key in enumerate(item.keys) if place not in apart)
            results.append(Outcome(Operation(operation.verb, item._replace(keys=others))))
        results += apart.values()
    return results


def opposite(operation: Operation, number: int) -> Verb | None:
    """The verb with which the operation is repeated after the given error; None if another verb would not help.

    If a virtual server with a firewall mark already exists, it belongs to another program, because no firewall mark is reserved
    for ipvsproxy.
    """
    if operation.verb is Verb.ADD and number == errno.EEXIST:
        return None if _is_by_mark(operation.item) else Verb.SET
    missing = errno.ENOENT if isinstance(operation.item, RealServers) else errno.ESRCH
    return Verb.ADD if operation.verb is Verb.SET and number == missing else None


def is_absent(operation: Operation, number: int) -> bool:
    """Whether the given error means that the object that was to be removed is absent.

    For a virtual server, only ESRCH means that the object is absent (``ip_vs_genl_set_cmd`` in net/netfilter/ipvs/ip_vs_ctl.c).
    ENOENT does not mean that a virtual server is absent. If ENOENT counted as proof of absence, ipvsproxy would remove the set
    entries which show that the virtual server belongs to ipvsproxy.
    """
    return number == errno.ESRCH or (number == errno.ENOENT and isinstance(operation.item, RealServers))


def _is_by_mark(item: object) -> bool:
    return isinstance(item, VirtualServer) and isinstance(item.key, FirewallMark)


def as_sent(operations: Sequence[Operation]) -> tuple[Sequence[Operation], Sequence[int]]:
    """The operations in the order in which they are sent.

    Also returns, for each operation, the position of its first object among all objects of ``operations``.

    For a scheduler in ``PREPARED_SCHEDULERS``, the real servers of a new virtual server are added before the scheduler is set.
    """
    firsts = list(itertools.accumulate((count_objects(item) for _, item in operations), initial=0))[:-1]
    new = {
        item.key: position
        for position, (verb, item) in enumerate(operations)
        if isinstance(item, VirtualServer) and verb is Verb.ADD and item.settings.scheduler in PREPARED_SCHEDULERS
    }
    if not new:
        return operations, firsts
    last = {
        item.virtual_server: position
        for position, (verb, item) in enumerate(operations)
        if isinstance(item, RealServers) and verb is Verb.ADD and new.get(item.virtual_server, position) < position
    }
    finished = {position: new[key] for key, position in last.items()}
    sent: list[tuple[Operation, int]] = []
    for position, (operation, first) in enumerate(zip(operations, firsts, strict=True)):
        item = operation.item
        if isinstance(item, VirtualServer) and new.get(item.key) == position and item.key in last:
            bare = VirtualServer(item.key, item.settings._replace(scheduler=NO_SCHEDULER), item.weights, item.owner)
            sent.append((Operation(Verb.ADD, bare), first))
        else:
            sent.append((operation, first))
        if position in finished:
            sent.append((Operation(Verb.SET, operations[finished[position]].item), firsts[finished[position]]))
    return [one for one, _ in sent], [first for _, first in sent]


def explain(operation: Operation, failure: Failure) -> str:
    """A text with the reason why the kernel refused an operation."""
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
    """A text with the reason why a virtual server cannot have a scheduler that the kernel lacks."""
    return f"the kernel has no scheduler {scheduler!r}: the module ip_vs_{scheduler} is missing or cannot be loaded"
