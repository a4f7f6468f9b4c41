"""Takes readings of the kernel into the tables: ownership, drains, and drift.

Rule: a witness of a virtual server stays until the virtual server is gone, and until everything was read at least once. A witness
that one part of a reading has found stays until the whole reading is done.
"""

import itertools
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping

from ipvsproxy.model.net import Address, Network
from ipvsproxy.model.plan import Item
from ipvsproxy.model.real_servers import RealServerKey, plain
from ipvsproxy.model.state import Observation
from ipvsproxy.model.steps import ITEMS_AT_ONCE
from ipvsproxy.model.virtual_servers import ObservedVirtualServer, VirtualServerKey
from ipvsproxy.reconcile.kinds.node_tables import NodeTables
from ipvsproxy.reconcile.observation.drift import DriftPlace, Drifts
from ipvsproxy.reconcile.virtual_servers import ownership
from ipvsproxy.reconcile.virtual_servers.drain import Drains


class Observer:
    """Takes in observations of the whole kernel, or of parts of it.

    ``has_observed_all``: every kind of witness was read at least once. ``newcomers`` are undesired set entries, addresses and
    local routes that have appeared during a reading in parts, until its end.
    """

    def __init__(self, tables: NodeTables, drains: Drains, drifts: Drifts) -> None:
        self.has_observed_all = False
        self.newcomers: set[object] = set()
        self._tables = tables
        self._drains = drains
        self._drifts = drifts
        self._unread = {"sets", "addresses", "routes", "interface_addresses"}
        """The fields of an ``Observation`` that show which virtual servers are ours and have not been read yet."""
        self._host: frozenset[Address] = frozenset()
        self.node_port_ranges: tuple[Network, ...] = ownership.EVERYWHERE
        """The ranges in which the addresses of this host serve node ports."""

    def observing(self, observed: Observation, now: float) -> Generator[None, None, None]:
        """Replaces the observed state by a reading, in steps. Parts that could not be read do not change.

        An observation without all virtual servers is a part of a reading; ``concluding`` follows the last part.
        """
        tables = self._tables
        for kind in tables.kinds:
            yield from kind.take_in(observed)
        self._unread = {name for name in self._unread if getattr(observed, name) is None}
        if observed.interface_addresses is not None:
            self._host = frozenset(item.address for item in observed.interface_addresses)
        if observed.virtual_servers is not None:
            gone = [key for key in self._drains.virtual_servers if key not in observed.virtual_servers]
            yield from self._recall_drains(itertools.chain(dict.fromkeys(gone).items(), observed.virtual_servers.items()), now)
            # A twin proves nothing before the addresses of this host are known: node ports on them may be desired.
            needs_twins = not self.has_observed_all and "interface_addresses" not in self._unread
            left_behind = observed.virtual_servers if needs_twins else {}
            yield from tables.virtual_servers.observing(observed.virtual_servers, self._is_ours(left_behind))
            if not self.has_observed_all and not self._unread:
                self.has_observed_all = True
            self.newcomers.clear()
        yield from self._take_in(observed.some_virtual_servers, now)
        if observed.has_shown_virtual_servers:
            unshown = yield from tables.virtual_servers.ending_reading()
            yield from self._take_in(unshown, now)
        self._note_drift(now, in_parts=observed.virtual_servers is None)

    def begin_audit(self) -> None:
        """Begins an audit in parts."""
        self._tables.virtual_servers.begin_reading()

    def _take_in(self, some: Mapping[VirtualServerKey, ObservedVirtualServer | None], now: float) -> Iterator[None]:
        yield from self._recall_drains(some.items(), now)
        yield from self._tables.virtual_servers.observing_some(some, self._is_ours({}))

    def concluding(self, now: float) -> Generator[None, None, None]:
        """Conclude a reading after its last part, in steps. Only the whole reading shows which virtual servers are foreign.

        With pauses as in ``observing``.
        """
        virtual_servers = self._tables.virtual_servers
        foreign = {key: virtual_servers.observed[key] for key in virtual_servers.foreign}
        yield from virtual_servers.observing_some(foreign, self._is_ours({}))
        self.newcomers.clear()
        self._note_drift(now, in_parts=False)

    def _is_ours(self, left_behind: Mapping[VirtualServerKey, ObservedVirtualServer]) -> Callable[[VirtualServerKey], bool]:
        entries = {name: table.observed.keys() for name, table in self._tables.entries.items()}
        is_ours = ownership.owned_virtual_servers(entries, self._tables.local, self._host, left_behind, self.node_port_ranges)
        return lambda key: is_ours(key) and not self._tables.scopes.is_refused(key)

    def _recall_drains(
        self, observed_now: Iterable[tuple[VirtualServerKey, ObservedVirtualServer | None]], now: float
    ) -> Iterator[None]:
        """Adopt drains of a former process, and end drains whose real server or virtual server (None) is gone."""
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
            if number % ITEMS_AT_ONCE == 0:
                yield

    def _note_drift(self, now: float, *, in_parts: bool) -> None:
        tables = self._tables
        self._drifts.forget_calm(now)
        for kind in tables.kinds:
            for table in kind.tables:
                for key in table.take_drifted():
                    desired = table.desired.get(key)
                    self._drifts.note(DriftPlace(kind.name, key), desired, now)
                    if in_parts and desired is None and kind.is_witness:
                        self.newcomers.add(key)


def healed_place(tables: NodeTables, item: Item) -> tuple[DriftPlace, object]:
    """The place of the drift that an operation on this item repairs, and the desired value there."""
    kind = tables.by_class[type(item)]
    table, key = kind.place(item)
    return DriftPlace(kind.name, key), table.desired.get(key)
