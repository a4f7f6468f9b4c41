"""Changes as values: operations, the plan with their order, their outcomes, and the report of a sync."""

import dataclasses
import enum
import typing
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ipvsproxy.model import kind
from ipvsproxy.model.kernel import KernelObject, Several
from ipvsproxy.model.kind import KernelKind, counted
from ipvsproxy.model.real_servers import RealServerKey
from ipvsproxy.model.rules import Skeleton
from ipvsproxy.model.virtual_servers import RealServers, VirtualServerKey


class Verb(enum.StrEnum):
    """What an operation does to its object. Repeating it is no error.

    The members are strings, because a plain enum member's hash is computed in Python code: 0.1 µs more for each of a hundred
    thousand operations.
    """

    ADD = "add"
    SET = "set"
    REMOVE = "remove"


Item = KernelObject | Skeleton
WEIGHTS_SHOWN = 64
"""The most changes of real servers in a report."""


class Operation(NamedTuple):
    """One change of a kernel object, or the same change of several objects of one kind.

    An operation on a ``VirtualServer`` does not include its real servers. The real servers have their own operations, which
    follow that of the virtual server.
    """

    verb: Verb
    item: Item

    def __str__(self) -> str:
        return f"{self.verb} {kind_of(self.item)} {self.item}"


KINDS: Mapping[type, KernelKind] = {object_class: kind.of(object_class) for object_class in typing.get_args(Item)}
"""The kind of each class of kernel objects."""
_BY_NAME = {kind.name: kind for kind in KINDS.values()}
_SEVERAL = frozenset(typing.get_args(Several))


def kind_of(item: Item) -> str:
    """The name of an item's kind, as in log lines and metrics: ``virtual_server``, ``set_entry``."""
    return KINDS[type(item)].name


def counted_kinds(numbers: Mapping[str, int]) -> str:
    """Numbers of kernel objects, by the names of their kinds, in words: ``2 real servers, 1 virtual server``."""
    return ", ".join(counted(number, _BY_NAME[name].one, _BY_NAME[name].several) for name, number in numbers.items())


def one_by_one(operations: Iterable[Operation]) -> Iterator[Operation]:
    """Splits operations into operations on one kernel object each."""
    for operation in operations:
        verb, item = operation
        if isinstance(item, Several):
            only: Callable[[Any], Item] = item.only
            yield from (Operation(verb, only(key)) for key in item.keys)
        else:
            yield operation


def as_tried_again(operations: Iterable[Operation]) -> Iterator[Operation]:
    """The operations to try again after a failure: real servers stay together, all others become one operation per object."""
    for operation in operations:
        yield from (operation,) if isinstance(operation.item, RealServers) else one_by_one((operation,))


def count_objects(item: Item) -> int:
    """The number of kernel objects of an item."""
    several: Any = item
    return len(several.keys) if type(item) in _SEVERAL else 1


class Outcome(NamedTuple):
    """The outcome of an operation. ``error`` is empty if the change is in force, else one line for the operator.

    If an operation on several objects did not simply succeed for some of them, each of these objects has an outcome of its own,
    whose operation has this object alone. One more outcome stands for all the other objects, and its operation has only these.

    ``errno`` is the kernel's error number, 0 without one. ``surprise``: the object was present before an addition, or absent
    before a removal. The change is in force, but the observed state was outdated. ``removed`` is the number of kernel entries
    that a ``FlowCleaning`` removed.
    """

    operation: Operation
    error: str = ""
    errno: int = 0
    surprise: bool = False
    removed: int = 0


def outcomes(operations: Iterable[Operation], reported: Mapping[Operation, Outcome]) -> list[Outcome]:
    """The outcomes of all operations; an operation without an outcome in ``reported`` is in force.

    The keys of ``reported`` are operations on single objects. If one object of an operation on several has an outcome in
    ``reported``, each of the objects gets an outcome of its own.
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
    """Operations in their order."""

    operations: Sequence[Operation]

    @property
    def draining(self) -> Collection[VirtualServerKey]:
        """The virtual servers with a real server that begins to drain."""
        return {
            item.virtual_server
            for verb, item in self.operations
            if isinstance(item, RealServers) and item.drains and verb is Verb.SET
        }


class WeightChange(NamedTuple):
    """The weight of a real server before and after an operation; None where it does not exist."""

    virtual_server: VirtualServerKey
    key: RealServerKey
    before: int | None
    after: int | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The results of one sync.

    ``done`` and ``failed`` count changed objects by (verb, kind). ``errors`` are the first few failures in full, ``weights`` the
    first changes of real servers, up to ``WEIGHTS_SHOWN``. ``pending`` is
    the number of keys whose two sides still differ. ``surprises`` counts outcomes with a surprise: after one, the kernel is read
    again.
    """

    done: Mapping[tuple[str, str], int]
    failed: Mapping[tuple[str, str], int]
    errors: tuple[Outcome, ...]
    pending: int
    surprises: int = 0
    weights: tuple[WeightChange, ...] = ()
