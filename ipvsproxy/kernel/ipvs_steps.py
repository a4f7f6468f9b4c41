"""Which steps programming virtual and real servers takes, and what it means when the kernel refuses one."""

import errno
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from ipvsproxy.kernel import netlink
from ipvsproxy.model.kernel import RealServers, VirtualServer
from ipvsproxy.model.plan import Operation, Outcome, Verb
from ipvsproxy.model.real_servers import RealServerKey

PREPARED_SCHEDULERS = frozenset({"mh"})
"""Schedulers that build a large table again for each real server: a new virtual server gets them after its real servers."""
NO_SCHEDULER = "none"
"""The kernel's name for none. Until it is replaced, the virtual server refuses connections, as one without real servers does."""


class Failure(NamedTuple):
    """The kernel's error number; ``detail`` where there is more to say than that."""

    number: int
    detail: str = ""


class Place(NamedTuple):
    """The position of an operation, and which of its real servers, where it is about some."""

    position: int
    real_server: RealServerKey | None = None


def places(steps: Sequence[Operation], positions: Sequence[int]) -> list[Place]:
    """The place of each message that these steps take."""
    found: list[Place] = []
    for (_, item), position in zip(steps, positions, strict=True):
        found += [Place(position, key) for key in item.keys] if type(item) is RealServers else [Place(position)]
    return found


def messages(steps: Iterable[Operation]) -> int:
    """How many messages these steps take."""
    return sum(len(item.keys) if type(item) is RealServers else 1 for _, item in steps)


def chunks(steps: Sequence[Operation], limit: int) -> Iterator[tuple[int, int]]:
    """Where to cut, so that each part takes at most ``limit`` messages; a step that alone takes more is a part of its own.

    What is encoded for a part is gone before the next one: Python gives memory back that was free for a moment, and has to
    fetch it again.
    """
    start = count = 0
    for position, (_, item) in enumerate(steps):
        size = len(item.keys) if type(item) is RealServers else 1
        if count + size > limit and start < position:
            yield start, position
            start, count = position, 0
        count += size
    if start < len(steps):
        yield start, len(steps)


def single(operations: Sequence[Operation], place: Place) -> Operation:
    """The operation at this place, as one on a single object."""
    operation = operations[place.position]
    if type(operation.item) is RealServers and place.real_server is not None:
        return Operation(operation.verb, operation.item._replace(keys=(place.real_server,)))
    return operation


def outcomes(operations: Sequence[Operation], told: Mapping[Place, Outcome]) -> list[Outcome]:
    """One for each operation: what is told of it, or that it is in force; of several real servers, each one that is told of."""
    if not told:
        return list(map(Outcome, operations))
    of_several: dict[int, dict[RealServerKey, Outcome]] = {}
    for place, outcome in told.items():
        if place.real_server is not None:
            of_several.setdefault(place.position, {})[place.real_server] = outcome
    found: list[Outcome] = []
    for position, operation in enumerate(operations):
        others = of_several.get(position, {})
        if type(operation.item) is RealServers and others:
            added = [key for key in operation.item.keys if key not in others]
            if added:
                found.append(Outcome(Operation(operation.verb, operation.item._replace(keys=tuple(added)))))
            found += others.values()
        else:
            found.append(told.get(Place(position)) or Outcome(operation))
    return found


def opposite(operation: Operation, number: int) -> Verb | None:
    """The verb that does what was asked after all, when this error means that the object is there, or is not, unexpectedly."""
    if operation.verb is Verb.ADD and number == errno.EEXIST:
        return Verb.SET
    missing = errno.ENOENT if isinstance(operation.item, RealServers) else errno.ESRCH
    return Verb.ADD if operation.verb is Verb.SET and number == missing else None


def steps(operations: Sequence[Operation]) -> tuple[Sequence[Operation], Sequence[int]]:
    """What is to be done, and the position of the operation that each step belongs to: see ``PREPARED_SCHEDULERS``."""
    positions = range(len(operations))
    new = {
        item.key: position
        for position, (verb, item) in enumerate(operations)
        if type(item) is VirtualServer and verb is Verb.ADD and item.settings.scheduler in PREPARED_SCHEDULERS
    }
    if not new:
        return operations, positions
    last = {
        item.virtual_server: position
        for position, (verb, item) in enumerate(operations)
        if isinstance(item, RealServers) and verb is Verb.ADD and new.get(item.virtual_server, position) < position
    }
    finished = {position: new[key] for key, position in last.items()}
    steps: list[Operation] = []
    owners: list[int] = []
    for position, operation in enumerate(operations):
        item = operation.item
        if type(item) is VirtualServer and new.get(item.key) == position and item.key in last:
            bare = VirtualServer(item.key, item.settings._replace(scheduler=NO_SCHEDULER), item.weights, item.owner)
            steps.append(Operation(Verb.ADD, bare))
        else:
            steps.append(operation)
        owners.append(position)
        if position in finished:
            steps.append(Operation(Verb.SET, operations[finished[position]].item))
            owners.append(finished[position])
    return steps, owners


def explain(operation: Operation, failure: Failure) -> str:
    """Why the kernel did not take it, in words."""
    if failure.detail:
        return failure.detail
    item = operation.item
    if isinstance(item, VirtualServer) and failure.number == errno.ENOENT:
        name = item.settings.scheduler
        return f"the kernel has no scheduler {name!r}: the module ip_vs_{name} is not there or cannot be loaded"
    if isinstance(item, RealServers) and failure.number == errno.ESRCH:
        return "its virtual server is missing"
    return netlink.explain(failure.number)
