"""A change as a value: operations, the plan that orders them, what became of them, and the report of a sync."""

import dataclasses
import enum
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from ipvsproxy.model.kernel import (
    BoundAddress,
    Device,
    FlowCleaning,
    IpSet,
    RealServer,
    RealServers,
    SetEntry,
    Sysctl,
    Timeouts,
    VirtualServer,
    VirtualServerKey,
)
from ipvsproxy.model.rules import Skeleton


class Verb(enum.StrEnum):
    """What is done to a kernel object. Doing it twice is no error.

    A text, because a plain member's hash is computed in Python, for each of a hundred thousand operations.
    """

    ADD = "add"
    SET = "set"
    REMOVE = "remove"


Item = (
    VirtualServer
    | RealServer
    | RealServers
    | SetEntry
    | IpSet
    | BoundAddress
    | Device
    | Sysctl
    | Timeouts
    | Skeleton
    | FlowCleaning
)


class Operation(NamedTuple):
    """One change of one kernel object, or the addition of all real servers of a new virtual server.

    A ``VirtualServer`` is added or set without its real servers: those are operations of their own, and follow it.
    ``RealServers`` are only ever added.
    """

    verb: Verb
    item: Item

    def __str__(self) -> str:
        match self.item:
            case VirtualServer(key=key):
                name = str(key)
            case SetEntry(set=set_name):
                name = f"{set_name} {self.item}"
            case item:
                name = str(item)
        return f"{self.verb} {kind_of(self.item)} {name}"


_KINDS: Mapping[type, str] = {
    VirtualServer: "virtual_server",
    RealServer: "real_server",
    RealServers: "real_server",
    SetEntry: "set_entry",
    IpSet: "set",
    BoundAddress: "address",
    Device: "device",
    Sysctl: "sysctl",
    Timeouts: "timeouts",
    Skeleton: "rules",
    FlowCleaning: "flow",
}


def kind_of(item: Item) -> str:
    """The name of an item's kind in log lines and metrics: ``virtual_server``, ``set_entry``."""
    return _KINDS[type(item)]


def one_by_one(operations: Iterable[Operation]) -> Iterator[Operation]:
    """The same, with an operation of its own for each real server."""
    for operation in operations:
        if isinstance(operation.item, RealServers):
            for key in operation.item.keys:
                yield Operation(operation.verb, RealServer(operation.item.virtual_server, key))
        else:
            yield operation


class Outcome(NamedTuple):
    """What became of an operation. ``error`` is empty when the kernel holds what was asked, else one line for the operator.

    That of ``RealServers`` is about those of them that were added; each other one has an outcome of its own, as ``RealServer``.

    ``errno`` is the kernel's number where there is one, else 0. ``surprise`` means that the kernel held something else than
    we believed (an add found the object there, a removal found it gone): what was asked is in force, but the view is old.
    ``removed`` says how many kernel entries a cleaning removed.
    """

    operation: Operation
    error: str = ""
    errno: int = 0
    surprise: bool = False
    removed: int = 0


class Plan(NamedTuple):
    """Operations in the order in which they must be done."""

    operations: Sequence[Operation]

    @property
    def draining(self) -> Collection[VirtualServerKey]:
        """The virtual servers of which a real server gets no new connections any more."""
        return {
            item.virtual_server
            for verb, item in self.operations
            if type(item) is RealServer and item.weight == 0 and verb is Verb.SET
        }


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What one sync did.

    ``done`` and ``failed`` count operations by (verb, kind). ``errors`` holds the first few failures in full, ``pending`` is
    how many keys still differ. ``surprises`` counts what was found otherwise than believed: look again.
    """

    done: Mapping[tuple[str, str], int]
    failed: Mapping[tuple[str, str], int]
    errors: tuple[Outcome, ...]
    pending: int
    surprises: int = 0
