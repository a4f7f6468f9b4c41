"""Changes as values: operations, their outcomes, and the report of a sync."""

import dataclasses
import enum
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from ipvsproxy.model.kernel import KernelObject, Several
from ipvsproxy.model.kind import KINDS, counted
from ipvsproxy.model.real_servers import RealServerKey
from ipvsproxy.model.rules import Skeleton
from ipvsproxy.model.virtual_servers import RealServers, VirtualServerKey


class Verb(enum.StrEnum):
    """What an operation does to its object. Repeating an operation causes no error.

    Each verb is a string, because the hash of a plain enum member is computed in Python code. Hashing plain members would take
    0.1 µs more for each of a hundred thousand operations.
    """

    ADD = "add"
    SET = "set"
    REMOVE = "remove"


Item = KernelObject | Skeleton
WEIGHTS_SHOWN = 64
"""The maximum number of weight changes of real servers that a report describes."""


class Operation(NamedTuple):
    """One change of a kernel object, or the same change of several kernel objects of one kind.

    An operation on a ``VirtualServer`` does not include its real servers. The real servers have separate operations, which follow
    the operation on the virtual server.
    """

    verb: Verb
    item: Item

    def __str__(self) -> str:
        return f"{self.verb} {kind_of(self.item)} {self.item}"


_BY_NAME = {kind.name: kind for kind in KINDS.values()}


def kind_of(item: Item) -> str:
    """The kind of an operation's item, as named in log lines and metrics, such as ``virtual_server`` or ``set_entry``."""
    return KINDS[type(item)].name


def counted_kinds(numbers: Mapping[str, int]) -> str:
    """A text with the number of kernel objects of each kind, such as ``2 real servers, 1 virtual server``."""
    return ", ".join(counted(number, _BY_NAME[name].one, _BY_NAME[name].several) for name, number in numbers.items())


def one_by_one(operations: Iterable[Operation]) -> Iterator[Operation]:
    """Splits each operation into operations on single kernel objects."""
    for operation in operations:
        verb, item = operation
        if isinstance(item, Several):
            only: Callable[[Any], Item] = item.only
            yield from (Operation(verb, only(key)) for key in item.keys)
        else:
            yield operation


def as_tried_again(operations: Iterable[Operation]) -> Iterator[Operation]:
    """The operations to try again after a failure.

    Real servers stay together in one operation, and every other object gets a separate operation.
    """
    for operation in operations:
        yield from (operation,) if isinstance(operation.item, RealServers) else one_by_one((operation,))


def count_objects(item: Item) -> int:
    """The number of kernel objects that an operation's item contains."""
    return len(item.keys) if isinstance(item, Several) else 1


class Outcome(NamedTuple):
    """The outcome of an operation.

    ``error`` is empty if the change has been applied; otherwise ``error`` is one line of text for the operator. An operation on
    several objects may fail, or have a ``surprise``, for only some of the objects. Each of these objects then has a separate
    outcome, whose operation contains only this object. One more outcome covers the remaining objects, and the operation of this
    outcome contains only these objects.

    ``errno`` is the kernel's error number, or 0 if the kernel reported no error. ``surprise`` means that the object already
    existed before an addition, or was already absent before a removal. After a surprise, the change has been applied, but the
    observed state was out of date. ``removed`` is the number of conntrack entries that a ``FlowCleaning`` removed.
    """

    operation: Operation
    error: str = ""
    errno: int = 0
    surprise: bool = False
    removed: int = 0


def outcomes(operations: Iterable[Operation], reported: Mapping[Operation, Outcome]) -> list[Outcome]:
    """The outcomes of all operations; every operation without an outcome in ``reported`` has been applied.

    The keys of ``reported`` are operations on single objects. If ``reported`` has an outcome for one object of an operation, each
    object of this operation gets a separate outcome.
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


class WeightChange(NamedTuple):
    """The weight of a real server before and after an operation; None means that the real server does not exist at that time."""

    virtual_server: VirtualServerKey
    key: RealServerKey
    before: int | None
    after: int | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The results of one sync.

    ``done`` and ``failed`` map a verb and a kind to the number of objects whose change succeeded or failed. ``errors`` holds the
    outcomes of the first few failures, and ``weights`` holds the first ``WEIGHTS_SHOWN`` weight changes of real servers.
    ``pending`` is the number of keys whose desired and observed state still differ. ``surprises`` is the number of outcomes whose
    ``surprise`` is true; after such an outcome, the kernel is read again.
    """

    done: Mapping[tuple[str, str], int]
    failed: Mapping[tuple[str, str], int]
    errors: tuple[Outcome, ...]
    pending: int
    surprises: int = 0
    weights: tuple[WeightChange, ...] = ()
