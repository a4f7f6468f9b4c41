"""The known API objects, and the names of the Services that must be translated again.

Rule 1: an object that equals the known object changes nothing.
Rule 2: a complete list replaces all objects of its kind.
Rule 3: if an object cannot be parsed, the last valid version of the object stays in use.

A list that lacks many known objects is doubted, because an API server that has just started may return an empty list (``Guard``).

Rule 4: if more than a given share of all known objects is missing from one complete list, none of the objects is removed.
Rule 5: a doubted list is confirmed if a second complete list arrives at least ``CONFIRMED_AFTER_S`` after it, and also lacks more
than the given share of all known objects.
Rule 6: an empty first list is doubted, because every API server has at least the Service ``kubernetes``. Until a doubted list is
confirmed, the kernel objects of missing API objects stay.
Rule 7: a deletion that a watch reports for a single object is always accepted.
Rule 8: lists of Nodes are doubted only if all Nodes are watched. If only the Node of this process is watched, an empty list means
that this Node does not exist.
"""

import dataclasses
import itertools
from collections import Counter
from collections.abc import Collection, Generator, Iterable, Mapping
from typing import Any, NamedTuple, assert_never

import msgspec

from ipvsproxy.model.net import Address, Family
from ipvsproxy.model.real_servers import RealServerKey
from ipvsproxy.model.service import (
    ApiObject,
    ApiServersFound,
    EndpointSlice,
    EndpointSliceName,
    Event,
    Gone,
    Listed,
    ListStarted,
    Node,
    ObjectKey,
    ObjectKind,
    Put,
    Rejected,
    Service,
    ServiceName,
    Skipped,
)
from ipvsproxy.model.steps import each
from ipvsproxy.store.guard import Doubt, Guard
from ipvsproxy.store.node_addresses import NodeAddresses


class Complaint(NamedTuple):
    """An object, and the fields of the object that are not used; each change of an object causes at most one ``Complaint``.

    ``where`` is the name of the file that contains the object; empty if no file is known.
    """

    kind: ObjectKind
    name: str
    skipped: tuple[Skipped, ...]
    where: str = ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """The changes since the last call of ``take``.

    The keys of ``services`` are the Services that must be translated again. The value is the time at which the Service's first
    untranslated change arrived. An annotation of an EndpointSlice may give the time at which a change of endpoints began, in
    seconds since the epoch. ``triggers`` holds this time and the IP family for each such change. The changed endpoints belong to
    Services in ``services``. ``counts`` holds the number of changed objects by kind.
    """

    services: Mapping[ServiceName, float] = dataclasses.field(default_factory=dict)
    triggers: tuple[tuple[Family, float], ...] = ()
    complaints: tuple[Complaint, ...] = ()
    counts: Mapping[ObjectKind, int] = dataclasses.field(default_factory=dict)


class Store:
    """The known objects.

    ``started_s`` is a time in seconds since the epoch; trigger times before ``started_s`` are ignored. ``guard`` decides whether
    a complete list is accepted; without a guard, every list is accepted. ``here`` is the name of the Node of this process; the
    store keeps this Node even after its deletion.
    """

    def __init__(self, started_s: float, guard: Guard | None = None, *, here: str = "") -> None:
        self._started_s = started_s
        self._here = here
        self._guard = guard or Guard(0)
        self.services: dict[ServiceName, Service] = {}
        """Every known Service. Only ``deliver`` changes this dictionary."""
        self._slices: dict[ObjectKey, EndpointSlice] = {}
        self._slices_of: dict[ServiceName, tuple[EndpointSlice, ...]] = {}
        self._nodes: dict[ObjectKey, Node] = {}
        self._known: Mapping[ObjectKind, dict[Any, Any]] = {
            ObjectKind.SERVICE: self.services,
            ObjectKind.ENDPOINT_SLICE: self._slices,
            ObjectKind.NODE: self._nodes,
        }
        self._tunnels: tuple[Mapping[str, tuple[Address, ...]], frozenset[Address]] | None = None
        """The cached result of ``tunnels``; None before the first call of ``tunnels``, and after a Node has changed."""
        self._with_direct_return: dict[ServiceName, None] = {}
        """The Services that ask for direct return. A dictionary is used instead of a set, because a dictionary keeps the
        order."""
        self.schedulers: set[str] = set()
        """The schedulers that annotations of Services have named so far."""
        self.api_servers: frozenset[RealServerKey] = frozenset()
        """The addresses and ports by which this process has tried to reach API servers so far."""
        self._rejected: dict[ObjectKind, dict[ObjectKey, Rejected]] = {kind: {} for kind in ObjectKind}
        self._node_addresses = NodeAddresses()
        self._listed: set[ObjectKind] = set()
        # EndpointSlices with fewer endpoints than before, from a list that is not complete yet
        self._shrunk: dict[EndpointSliceName, EndpointSlice] | None = None
        self.remembered: set[ServiceName] = set()
        """The known Services that the newest list does not contain, if this list is in doubt. Services that the list contains
        have precedence over these Services."""
        self._dirty: dict[ServiceName, float] = {}
        self._triggers: dict[tuple[ServiceName, Family], list[float]] = {}
        self._complaints: list[Complaint] = []
        self.untaken: Counter[ObjectKind] = Counter()
        """The number of changes that ``take`` has not returned yet, by kind of object."""

    def slices_of(self, name: ServiceName) -> tuple[EndpointSlice, ...]:
        """The EndpointSlices of a Service, in no particular order."""
        return self._slices_of.get(name, ())

    def node(self, name: str) -> Node | None:
        """The Node with this name, if the Node is known."""
        return self._nodes.get(ObjectKey("", name))

    @property
    def other_nodes(self) -> Mapping[Address, str]:
        """The external and load-balancer addresses that are known to belong to other nodes, each with its node."""
        return self._node_addresses.of_others(self._here, self._slices.values(), self._nodes.values())

    @property
    def tunnels(self) -> tuple[Mapping[str, tuple[Address, ...]], frozenset[Address]]:
        """The addresses of each remote node that accepts packets of direct return, and the addresses of all remote nodes.

        A node that is ``leaving`` and accepts no packets of direct return is left out.
        """
        if self._tunnels is None:
            nodes = self._nodes.values()
            others = [one for one in nodes if one.name != self._here and (one.takes_direct_return or not one.leaving)]
            ends = {one.name: one.addresses for one in others if one.takes_direct_return}
            self._tunnels = ends, frozenset(itertools.chain.from_iterable(one.addresses for one in others))
        return self._tunnels

    @property
    def is_complete(self) -> bool:
        """Whether all kinds of objects have been listed. Before all kinds have been listed, nothing may be programmed."""
        return len(self._listed) == len(ObjectKind)

    @property
    def missing(self) -> Collection[ObjectKind]:
        """The kinds of objects that have not been listed yet."""
        return [kind for kind in ObjectKind if kind not in self._listed]

    def deliver(self, events: Iterable[Event], now: float) -> None:
        """Apply events in their order; ``now`` is the time of a monotonic clock that the caller chooses."""
        for event in events:
            match event:
                case Put():
                    if rejected := self._rejected[event.kind]:
                        rejected.pop(event.key, None)
                    self._put(event.object, now)
                case Gone():
                    self._remove(event.kind, event.key, now)
                case ListStarted(kind=ObjectKind.ENDPOINT_SLICE):
                    self._shrunk = {}
                case ListStarted():
                    pass
                case Listed():
                    self._take_list(event, now)
                    self._listed.add(event.kind)
                case Rejected():
                    self._reject(event)
                case ApiServersFound(servers):
                    self.api_servers |= servers
                case never:
                    assert_never(never)

    @property
    def doubts(self) -> Mapping[ObjectKind, Doubt]:
        """The doubted lists by kind; objects that are missing from a doubted list are still in the store."""
        return self._guard.doubts

    @property
    def may_lack_all(self) -> bool:
        """Whether, for at least one kind of object, the first list was empty and is not confirmed yet.

        Until then, a kernel object may be needed although no known Service desires the object.
        """
        return any(doubt.is_first for doubt in self.doubts.values())

    def _take_list(self, event: Listed, now: float) -> None:
        kind = event.kind
        # The keys are tested one by one, because a set difference would reserve memory for all keys: 4 MB for 100,000 keys.
        missing = {key for key in itertools.chain(self._known[kind], self._rejected[kind]) if key not in event.keys}
        shrunk: Mapping[EndpointSliceName, EndpointSlice] = {}
        if kind is ObjectKind.ENDPOINT_SLICE:
            shrunk, self._shrunk = self._shrunk or {}, None
        if kind is not ObjectKind.NODE or self._guard.all_nodes:
            lost, of = self._size(kind, missing), self._size(kind, self._known[kind])
            lost += sum(len(self._slices[name].conditions) - len(item.conditions) for name, item in shrunk.items())
            is_first, is_empty = kind not in self._listed, not event.keys
            is_accepted = self._guard.accepts(kind, missing=lost, known=of, now=now, is_first=is_first, is_empty=is_empty)
            if kind is ObjectKind.SERVICE:
                self._only_remember(() if is_accepted else missing, now)
            if not is_accepted:
                return
        for item in shrunk.values():
            self._put(item, now)
        for key in missing:
            self._remove(kind, key, now)

    def _only_remember(self, missing: Iterable[ObjectKey], now: float) -> None:
        lacking = self.services.keys() & missing
        for name in lacking ^ self.remembered:
            self._dirty.setdefault(name, now)
        self.remembered = lacking

    def _size(self, kind: ObjectKind, keys: Collection[ObjectKey]) -> int:
        """The number of Services or Nodes with these keys, or, for EndpointSlices, the number of their endpoints."""
        if kind is not ObjectKind.ENDPOINT_SLICE:
            return len(keys)
        return sum(len(item.conditions) for item in map(self._slices.get, keys) if item)

    def take(self) -> Changes:
        """Returns all changes since the last call of ``take``."""
        changes = Changes(
            services=self._dirty,
            triggers=tuple((family, at_s) for (_, family), times in self._triggers.items() for at_s in times),
            complaints=tuple(self._complaints),
            counts=self.untaken,
        )
        self._dirty, self.untaken = {}, Counter()
        self._triggers.clear()
        self._complaints.clear()
        return changes

    def touch_external(self, addresses: Collection[Address], now: float) -> None:
        """Request the translation of all Services that have one of these external or load-balancer addresses."""
        for name in self._node_addresses.services_with(addresses):
            self._dirty.setdefault(name, now)

    def touching_direct_return(self, nodes: Collection[str], now: float) -> Generator[None, None, None]:
        """Requests, in steps, the translation of all Services with direct return that have endpoints on one of these nodes.

        If a Service changes between two steps, the change itself requests the translation.
        """

        def touch(item: EndpointSlice) -> None:
            if item.service and any(one.node_name in nodes for one in item.conditions):
                self._dirty.setdefault(item.service, now)

        yield from each(touch, itertools.chain.from_iterable(map(self.slices_of, tuple(self._with_direct_return))))

    def touch_all(self, now: float) -> None:
        """Request the translation of every Service."""
        for name in self.services:
            self._dirty.setdefault(name, now)

    def _put(self, item: ApiObject, now: float) -> None:
        match item:
            case Service():
                known = self.services.get(item.name)
                if self.remembered and item.name in self.remembered:
                    self.remembered.discard(item.name)
                    self._dirty.setdefault(item.name, now)
                if known != item:
                    self._node_addresses.note_service(known, item)
                    self.services[item.name] = item
                    self._note_change(ObjectKind.SERVICE, item.name, now)
                    self._with_direct_return.pop(item.name, None)
                    if item.options.annotations.direct_return:
                        self._with_direct_return[item.name] = None
                    if item.options.annotations.scheduler:
                        self.schedulers.add(item.options.annotations.scheduler)
                    if item.skipped:
                        self._complain(ObjectKind.SERVICE, item, known)
            case EndpointSlice():
                self._put_slice(item, now)
            case Node():
                key = ObjectKey("", item.name)
                before = self._nodes.get(key)
                self._nodes[key] = item
                if before is None or before != item:
                    self._node_addresses.note_node(before, item)
                    self._note_change(ObjectKind.NODE, None, now)
                    if item.skipped:
                        self._complain(ObjectKind.NODE, item, before)
            case never:
                assert_never(never)

    def _put_slice(self, item: EndpointSlice, now: float) -> None:
        before = self._slices.get(item.name)
        if before is not None:
            if self._shrunk is not None and len(item.conditions) < len(before.conditions):
                # The slice in the list has fewer endpoints than before. The store applies the slice only after the list is
                # complete, because only then the sum of all missing endpoints shows whether the list is plausible.
                self._shrunk[item.name] = item
                return
            if before == item:
                return
            if before.service:
                self._forget_slice(before.service, item.name)
        self._node_addresses.note_slice(before, item)
        self._slices[item.name] = item
        if item.service:
            self._slices_of[item.service] = (*self.slices_of(item.service), item)
        self._note_change(ObjectKind.ENDPOINT_SLICE, item.service, now)
        if before is not None and before.service:
            self._dirty.setdefault(before.service, now)
        if item.trigger_s > self._started_s and item.family and item.service:
            self._triggers.setdefault((item.service, item.family), []).append(item.trigger_s)
        if item.skipped:
            self._complain(ObjectKind.ENDPOINT_SLICE, item, before)

    def _complain(self, kind: ObjectKind, item: ApiObject, before: ApiObject | None) -> None:
        if before is None or before.skipped != item.skipped:
            self._complaints.append(Complaint(kind, str(item.name), item.skipped))

    def _reject(self, event: Rejected) -> None:
        if event.key and not event.where:
            # An API server sends an invalid object again with each list, whereas a directory reports each change of a file once.
            if self._rejected[event.kind].get(event.key) == event:
                return
            self._rejected[event.kind][event.key] = event
        self._complaints.append(Complaint(event.kind, str(event.key or ""), (Skipped(event.field, event.reason),), event.where))

    def _forget_slice(self, service: ServiceName, name: EndpointSliceName) -> None:
        others = tuple(item for item in self.slices_of(service) if item.name != name)
        if others:
            self._slices_of[service] = others
        else:
            del self._slices_of[service]

    def _remove(self, kind: ObjectKind, key: ObjectKey, now: float) -> None:
        self._rejected[kind].pop(key, None)
        gone = self._known[kind].get(key)
        if gone is None:
            return
        if kind is ObjectKind.NODE and gone.name == self._here:
            # The last known addresses and zone of the deleted Node still apply, but load balancers must learn that the Node is
            # leaving.
            if not gone.leaving:
                self._nodes[key] = msgspec.structs.replace(gone, leaving=True, takes_direct_return=False)
                self._note_change(kind, None, now)
            return
        del self._known[kind][key]
        match gone:
            case Service():
                self._node_addresses.note_service(gone, None)
                self._with_direct_return.pop(gone.name, None)
                self.remembered.discard(gone.name)
                self._note_change(kind, gone.name, now)
            case EndpointSlice():
                self._node_addresses.note_slice(gone, None)
                if gone.service:
                    self._forget_slice(gone.service, gone.name)
                    if gone.family:
                        # The trigger time belongs to an earlier change, which will never be programmed; kube-proxy's
                        # EndpointsChangeTracker drops the time, too.
                        self._triggers.pop((gone.service, gone.family), None)
                self._note_change(kind, gone.service, now)
            case _:  # a Node
                self._node_addresses.note_node(gone, None)
                self._note_change(kind, None, now)

    def _note_change(self, kind: ObjectKind, service: ServiceName | None, now: float) -> None:
        self.untaken[kind] += 1
        if kind is ObjectKind.NODE:
            self._tunnels = None
        if service:
            self._dirty.setdefault(service, now)
