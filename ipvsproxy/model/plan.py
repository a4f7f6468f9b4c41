"""A change as a value: operations, the plan that orders them, what became of them, and the report of a sync."""

import dataclasses
import enum
import typing
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from ipvsproxy.model import kind
from ipvsproxy.model.kernel import BoundAddresses, KernelObject, RealServers, SetEntries, VirtualServer, VirtualServerKey
from ipvsproxy.model.kind import Kind
from ipvsproxy.model.rules import Skeleton


class Verb(enum.StrEnum):
    """What is done to a kernel object. Doing it twice is no error.

    A text, because a plain member's hash is computed in Python, for each of a hundred thousand operations.
    """

    ADD = "add"
    SET = "set"
    REMOVE = "remove"


Item = KernelObject | Skeleton


class Operation(NamedTuple):
    """One change of kernel objects of one kind: of one, or of several that get the same.

    A ``VirtualServer`` is added or set without its real servers: those have an operation of their own, which follows it.
    """

    verb: Verb
    item: Item

    def __str__(self) -> str:
        match self.item:
            case VirtualServer(key=key):
                name = str(key)
            case item:
                name = str(item)
        return f"{self.verb} {kind_of(self.item)} {name}"


KINDS: Mapping[type, Kind] = {described: kind.of(described) for described in typing.get_args(Item)}
"""The kind of each class of kernel objects."""


def kind_of(item: Item) -> str:
    """The name of an item's kind in log lines and metrics: ``virtual_server``, ``set_entry``."""
    return KINDS[type(item)].name


def one_by_one(operations: Iterable[Operation]) -> Iterator[Operation]:
    """The same, with an operation of its own for each kernel object."""
    for operation in operations:
        verb, item = operation
        match item:
            case RealServers():
                yield from (Operation(verb, RealServers.of(item.virtual_server, key, item.weight)) for key in item.keys)
            case SetEntries() if len(item.entries) > 1:
                yield from (Operation(verb, SetEntries.of(entry)) for entry in item.entries)
            case BoundAddresses() if len(item.addresses) > 1:
                yield from (Operation(verb, BoundAddresses.of(address)) for address in item.addresses)
            case _:
                yield operation


def as_tried_again(operations: Iterable[Operation]) -> Iterator[Operation]:
    """The same as they are tried again after a failure: real servers of a new virtual server together, all else one by one."""
    for operation in operations:
        yield from (operation,) if type(operation.item) is RealServers else one_by_one((operation,))


def objects(item: Item) -> int:
    """How many kernel objects an item is about."""
    match item:
        case RealServers() | SetEntries() | BoundAddresses():
            return len(item.keys)
        case _:
            return 1


class Outcome(NamedTuple):
    """What became of an operation. ``error`` is empty when the kernel holds what was asked, else one line for the operator.

    That of several objects is about those of them that were added; each other one has an outcome of its own, as an operation on
    it alone.

    ``errno`` is the kernel's number where there is one, else 0. ``surprise`` means that the kernel held something else than
    we believed (an add found the object there, a removal found it gone): what was asked is in force, but the view is old.
    ``removed`` says how many kernel entries a cleaning removed.
    """

    operation: Operation
    error: str = ""
    errno: int = 0
    surprise: bool = False
    removed: int = 0


def outcomes(operations: Iterable[Operation], reported: Mapping[Operation, Outcome]) -> list[Outcome]:
    """One for each operation: what is told of it, or that it is in force.

    ``reported`` has operations on one object alone. Where it has one of several, each of these has an outcome of its own.
    """
    if not reported:
        return list(map(Outcome, operations))
    results: list[Outcome] = []
    for operation in operations:
        alone = [reported.get(one) for one in one_by_one([operation])]
        if any(alone):
            results += [outcome or Outcome(one) for one, outcome in zip(one_by_one([operation]), alone, strict=True)]
        else:
            results.append(Outcome(operation))
    return results


class Plan(NamedTuple):
    """Operations in the order in which they must be done."""

    operations: Sequence[Operation]

    @property
    def draining(self) -> Collection[VirtualServerKey]:
        """The virtual servers of which a real server gets no new connections any more."""
        return {
            item.virtual_server
            for verb, item in self.operations
            if type(item) is RealServers and item.weight == 0 and verb is Verb.SET
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
