"""What the kernel was found to hold, taken into the tables: whose it is, what drains in it, and what somebody else has changed.

Rule: what witnesses that a virtual server is ours stays until it is gone, until all was read at least once, and where it is
found by one part of a reading until all parts were.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping

from ipvsproxy.model.kernel import (
    IP_SETS,
    ObservedVirtualServer,
    RealServers,
    VirtualServer,
    VirtualServerKey,
)
from ipvsproxy.model.net import Address, Network
from ipvsproxy.model.plan import KINDS, Item, kind_of
from ipvsproxy.model.real_servers import RealServerKey, plain
from ipvsproxy.model.state import Observation
from ipvsproxy.reconcile import diff, ownership
from ipvsproxy.reconcile.drain import Drains
from ipvsproxy.reconcile.drift import Drifts, Place
from ipvsproxy.reconcile.table import KEYS_AT_ONCE
from ipvsproxy.reconcile.tables import Tables

_WITNESSES = frozenset({"set_entry", "address"})


class Observer:
    """Takes in observations of the whole kernel, or of parts of it.

    ``has_observed_all``: all that may witness whose a virtual server is was read at least once. ``newcomers`` are set entries and
    addresses that nobody wants and that appeared while the kernel was read in parts, until it is read to the end.
    """

    def __init__(self, tables: Tables, drains: Drains, drifts: Drifts) -> None:
        self.has_observed_all = False
        self.newcomers: set[object] = set()
        self._tables = tables
        self._drains = drains
        self._drifts = drifts
        self._unseen = {"sets", "addresses", "interface addresses"}
        """What witnesses that virtual servers are ours, as far as it could not be read yet."""
        self._host: frozenset[Address] = frozenset()
        self.node_port_ranges: tuple[Network, ...] = ownership.EVERYWHERE
        """Where node ports are served: on the addresses of this host in these ranges."""

    def observe(self, observed: Observation, now: float) -> None:
        """Replace what is believed of the kernel by what was seen; parts that could not be read stay as they were."""
        for _ in self.observing(observed, now):
            pass

    def observing(self, observed: Observation, now: float) -> Iterator[None]:
        """As ``observe``, with a pause every few hundred keys, in which nothing else may be done to the reconciler.

        An observation without all virtual servers is a part of a reading; ``concluding`` follows the last one.
        """
        tables = self._tables
        for described, found in observed.of_node:
            tables.of(described).observe(found, _ours)
        if observed.sets is not None:
            for name, table in tables.entries.items():
                yield from table.observing_all(observed.sets.get(name, frozenset()), True, _ours)
            self._unseen.discard("sets")
        for name, entries in observed.some_sets.items():
            yield from tables.sets.observing_some({IP_SETS[name]: None if entries is None else True}, _ours)
            yield from tables.entries[name].observing_all(entries or frozenset(), True, _ours)
        if observed.addresses is not None:
            yield from tables.addresses.observing_all(observed.addresses, True, _ours)
            self._unseen.discard("addresses")
        if observed.interface_addresses is not None:
            self._host = frozenset(item.address for item in observed.interface_addresses)
            self._unseen.discard("interface addresses")
        for family, image in observed.skeletons.items():
            tables.skeletons.notice(family, image)
        if observed.virtual_servers is not None:
            gone = [key for key in self._drains.virtual_servers if key not in observed.virtual_servers]
            yield from self._recall_drains(itertools.chain(dict.fromkeys(gone).items(), observed.virtual_servers.items()), now)
            left_behind = {} if self.has_observed_all else observed.virtual_servers
            yield from tables.virtual_servers.observing(observed.virtual_servers, self._is_ours(left_behind))
            self.has_observed_all |= not self._unseen
            self.newcomers.clear()
        if observed.some_virtual_servers:
            some = {key: self._as_known(key, one) for key, one in observed.some_virtual_servers.items()}
            yield from self._recall_drains(some.items(), now)
            yield from tables.virtual_servers.observing_some(some, self._is_ours({}))
        self._note_drift(now, in_parts=observed.virtual_servers is None)

    def _as_known(self, key: VirtualServerKey, observed: ObservedVirtualServer | None) -> ObservedVirtualServer | None:
        """The object that stands for a virtual server already, where a look shows nothing else: it shares what is wanted."""
        believed = self._tables.virtual_servers.observed.get(key)
        return believed if believed and observed and diff.shows_nothing_else(observed, believed) else observed

    def concluding(self, now: float) -> Iterator[None]:
        """The last part of a reading was observed: whose the virtual servers of others are is judged by all of it.

        Pauses as ``observing`` does.
        """
        virtual_servers = self._tables.virtual_servers
        theirs = {key: virtual_servers.observed[key] for key in virtual_servers.foreign}
        yield from virtual_servers.observing_some(theirs, self._is_ours({}))
        self.newcomers.clear()
        self._note_drift(now, in_parts=False)

    def _is_ours(self, left_behind: Mapping[VirtualServerKey, ObservedVirtualServer]) -> Callable[[VirtualServerKey], bool]:
        entries = {name: table.observed.keys() for name, table in self._tables.entries.items()}
        return ownership.owned_virtual_servers(
            entries, self._tables.addresses.observed, self._host, left_behind, self.node_port_ranges
        )

    def _recall_drains(
        self, observed_now: Iterable[tuple[VirtualServerKey, ObservedVirtualServer | None]], now: float
    ) -> Iterator[None]:
        """Take up drains that a former process began; drop those whose real server, or all (None), is gone."""
        virtual_servers = self._tables.virtual_servers.desired
        known = set(self._drains.virtual_servers)
        for number, (key, observed) in enumerate(observed_now, 1):
            desired = virtual_servers.get(key)
            if desired is None or observed is None:
                if key in known:
                    self._drains.end_all(key)
            elif key in known or observed.real_servers != desired.weights:
                weights, desired_weights = plain(observed.real_servers), desired.weights.plain()
                draining = {RealServerKey(one) for one, weight in weights.items() if not weight and one not in desired_weights}
                self._drains.keep_only(key, draining)
                for real_server in draining:
                    self._drains.begin(key, real_server, now)
            if number % KEYS_AT_ONCE == 0:
                yield

    def _note_drift(self, now: float, *, in_parts: bool) -> None:
        tables = self._tables
        self._drifts.forget_calm(now)
        for described, table in tables.by_class:
            kind = KINDS[described].name
            for key in table.take_drifted():
                desired = table.desired.get(key)
                self._drifts.note(Place(kind, key), desired, now)
                if in_parts and desired is None and kind in _WITNESSES:
                    self.newcomers.add(key)


def healed_place(tables: Tables, item: Item) -> tuple[Place, object]:
    """Where drift is noted that an operation on this item heals, and what is wished there."""
    table, key = tables.place(item)
    kind = kind_of(item) if not isinstance(item, RealServers) else KINDS[VirtualServer].name
    return Place(kind, key), table.desired.get(key)


def _ours(_: object) -> bool:
    return True
