"""The table of all Services; the table follows each change, can be searched and sorted, and is divided into pages.

Rule 1: the table exists only while the web page has a viewer, and is built in steps.
Rule 2: after a change, only the rows of the changed Services are built again. The result of a search is kept until a change may
affect the result.

A search finds Services by a part of the name, a port or node port, or the beginning of an address (``10.244.1.`` finds the pods
of a node). A search can also have the form ``address:port``, as in the output of ``ipvsadm -Ln``.
"""

import collections
import contextlib
import heapq
import itertools
import re
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec

from ipvsproxy.daemon.ui import counters
from ipvsproxy.daemon.ui.counters import CounterFollower, keys_of
from ipvsproxy.model import steps
from ipvsproxy.model.kind import counted
from ipvsproxy.model.net import Address, parse_host_port
from ipvsproxy.model.real_servers import PORT_SIZE, EvenWeights, RealServerKey, Weights
from ipvsproxy.model.service import EndpointSlice, Service, ServiceName
from ipvsproxy.model.state import Clients, ServiceState
from ipvsproxy.model.virtual_servers import VirtualServerKey
from ipvsproxy.reconcile.survey import Survey
from ipvsproxy.store.objects import Store

SEARCHES = 16
"""The number of searches whose results are kept."""
SORTED_AT_ONCE = 500
"""The number of names that are sorted without a pause, in about a millisecond."""
CONFLICTS_SEEN = 500
"""The largest number of conflicts between Services that all rows of the table together show."""
PENDING_SEEN = 5000
"""The largest number of pending objects whose Services are determined; the number is limited, because at a start all objects are
pending."""


LONGEST_QUERY = 253
"""The largest number of characters in the text of a search."""
_ADDRESS_START = re.compile(r"[0-9]+\.[0-9.]*|[0-9a-f]*:[0-9a-f:.]*")


class Query(NamedTuple):
    """The parsed text of a search.

    ``text`` is in lower case. If both ``address`` and ``port`` are set, the text was ``address:port``. The fields after
    ``address`` are filters, such as a namespace, the type of a Service, and the node of an endpoint. An empty filter matches
    every Service.
    """

    text: str = ""
    starts_address: bool = False
    port: int | None = None
    address: Address | None = None
    namespace: str = ""
    type: str = ""
    node: str = ""
    only_problems: bool = False

    def matches(self, service: Service, slices: Collection[EndpointSlice], *, has_problems: bool = False) -> bool:
        """Whether a Service with the given EndpointSlices matches the search."""
        return (
            self.namespace in ("", service.name.namespace)
            and self.type in ("", service.options.type.value)
            and (has_problems or not self.only_problems)
            and (not self.node or any(one.node_name == self.node for item in slices for one in item.conditions))
            and self._finds(service, slices)
        )

    def _finds(self, service: Service, slices: Iterable[EndpointSlice]) -> bool:
        if self.text in str(service.name):  # names of Services are in lower case
            return True
        if self.address is not None:
            return self._is_at(service, slices, self.address)
        if self.port is not None and any(self.port in (one.port, one.node_port) for one in service.ports):
            return True
        if not self.starts_address:
            return False
        pods = (endpoint.address for item in slices for endpoint in item.endpoints)
        return any(str(address).startswith(self.text) for address in (*service.addresses, *pods))

    def _is_at(self, service: Service, slices: Iterable[EndpointSlice], address: Address) -> bool:
        if address in service.addresses:
            return any(self.port == one.port for one in service.ports)
        if any(self.port == one.node_port for one in service.ports):
            return True  # a node port matches at every address, because the address may belong to the node
        return any(
            any(one.port == self.port for one in item.ports) and address in item.each_address
            for item in slices
            if item.family is address.family
        )


def parse_query(text: str) -> Query:
    """Parse the text of a search. Every text is a valid search."""
    text = text.strip().lower()
    with contextlib.suppress(ValueError):
        address, port = parse_host_port(text)
        if port:
            return Query(text, address=address, port=port)
    return Query(
        text,
        starts_address=_ADDRESS_START.fullmatch(text) is not None,
        port=int(text) if text.isascii() and text.isdecimal() and len(text) <= 5 else None,  # noqa: PLR2004 - 65535
    )


class Selection(NamedTuple):
    """The rows that a viewer requests, and the order of the rows.

    ``page`` is the number of the page; the first page has number 1.
    """

    query: Query = Query()
    sort: str = "name"
    descending: bool = False
    page: int = 1
    size: int = 50


SORTS = ("name", "connections", "packets", "bytes", "endpoints", "problems")


class Board:
    """The rows of all Services."""

    def __init__(self, store: Store, survey: Survey, counted: CounterFollower, troubles: "Troubles") -> None:
        self._store = store
        self._survey = survey
        self._counted = counted
        self._troubles = troubles
        self._rows: dict[ServiceName, BoardRow] = {}
        self._dirty: dict[ServiceName, None] = {}
        """The names of the Services whose rows must be built again."""
        self._sorted: dict[tuple[Query, str, bool], tuple[tuple[int, int], Sequence[ServiceName]]] = {}
        self._names = 0
        """The revision in which a Service was last added or removed."""
        self._revision = 0
        self.changed(store.services)

    def changed(self, names: Iterable[ServiceName]) -> None:
        """Called when the given Services may have changed."""
        self._dirty.update(dict.fromkeys(names))

    def refreshing(self) -> Generator[None, None, None]:
        """Update all rows, and yield in between so that other tasks can run."""
        yield from self._troubles.refreshing(self.changed)
        revision = self._revision + 1
        # Each name stays in ``_dirty`` until the step that builds its row, because the request may time out between two steps.
        for number, name in enumerate(tuple(self._dirty), 1):
            del self._dirty[name]
            if self._refresh(name, revision):
                self._revision = revision
            if number % steps.ITEMS_AT_ONCE == 0:
                yield

    def _refresh(self, name: ServiceName, revision: int) -> bool:
        """Build the row of a Service again. Returns whether the table has changed."""
        service = self._store.services.get(name)
        if service is None:
            if self._rows.pop(name, None) is None:
                return False
            self._names = revision
            return True
        slices, state = self._store.slices_of(name), self._survey.states.get(name)
        endpoints = count_endpoints(slices, state, self._survey.draining_of, keys_of(self._survey, name, outside=False))
        found = (*self._troubles.of(name), *_own_problems(service, state, endpoints))
        problems = tuple(dict.fromkeys(found))[:PROBLEMS]
        known = self._rows.get(name)
        if known is None:
            self._names = revision
        elif known.service is service and known.slices is slices and (known.endpoints, known.problems) == (endpoints, problems):
            return False
        self._rows[service.name] = BoardRow(service, slices, endpoints, problems)
        return True

    def finding(self, selection: Selection) -> Generator[None, None, Sequence[ServiceName]]:
        """Finds all Services that match the search, in the requested order; yields so that other tasks can run."""
        key = (selection.query, selection.sort, selection.descending)
        stamp = self._stamp(selection)
        known = self._sorted.pop(key, None)
        if known is None or known[0] != stamp:
            matching = list(self._rows)
            if selection.query != Query():
                matching = yield from steps.choosing(lambda name: self._matches(selection.query, name), matching)
            known = stamp, (yield from self._sorting(matching, selection))
        self._sorted[key] = known
        if len(self._sorted) > SEARCHES:
            del self._sorted[next(iter(self._sorted))]
        return known[1]

    def _stamp(self, selection: Selection) -> tuple[int, int]:
        """A value that changes whenever the order of the rows may have changed."""
        if selection.sort in ("connections", "packets", "bytes"):
            return self._revision, self._counted.rates.readings
        if selection.sort == "name" and selection.query == Query():
            return self._names, 0
        return self._revision, 0

    def _matches(self, query: Query, name: ServiceName) -> bool:
        service, row = self._store.services.get(name), self._rows.get(name)
        slices = self._store.slices_of(name)
        return service is not None and query.matches(service, slices, has_problems=bool(row and row.problems))

    def _sorting(self, names: Sequence[ServiceName], selection: Selection) -> Generator[None, None, Sequence[ServiceName]]:
        rank = self._rank(selection.sort)
        sign = -1 if selection.descending else 1
        chunks: list[list[tuple[float, ServiceName]]] = []
        for first in range(0, len(names), SORTED_AT_ONCE):
            chunks.append(sorted((sign * rank(name), name) for name in names[first : first + SORTED_AT_ONCE]))
            yield
        result: list[ServiceName] = []
        yield from steps.each(lambda ranked: result.append(ranked[1]), heapq.merge(*chunks))
        if selection.sort == "name" and selection.descending:
            result.reverse()
        return result

    def _rank(self, sort: str) -> Callable[[ServiceName], float]:
        match sort:
            case "connections" | "packets" | "bytes":
                return lambda name: getattr(self._counted.rates.of(name), sort, 0.0)
            case "endpoints":
                return lambda name: row.endpoints.ready if (row := self._rows.get(name)) else 0
            case "problems":
                return lambda name: len(row.problems) if (row := self._rows.get(name)) else 0
            case _:
                return lambda _: 0

    def answer(self, selection: Selection, found: Sequence[ServiceName]) -> tuple[Sequence[ServiceName], dict[str, Any]]:
        """The names of the Services on one page of the table, and the page as a document."""
        pages = max(1, -(-len(found) // selection.size))
        page = min(selection.page, pages)
        names = [name for name in found[(page - 1) * selection.size : page * selection.size] if name in self._store.services]
        return names, {
            "total": len(self._rows),
            "matching": len(found),
            "page": page,
            "pages": pages,
            "size": selection.size,
            "names": list(map(str, names)),
            "services": [self.describe(name) for name in names],
            "sampleSeconds": self._counted.rates.interval_s,
        }

    def describe(self, name: ServiceName) -> dict[str, Any]:
        """The row for a known Service in the table of Services, in the form for JSON."""
        service = self._store.services[name]
        row = self._rows.get(name) or BoardRow(service, (), Endpoints(), ())
        connections, traffic = self._counted.rates.line(name)
        active = self._counted.active.get(name)
        return {
            "name": str(service.name),
            "type": service.options.type.value,
            "served": service.not_served is None,
            "notServed": str(service.not_served) if service.not_served else "",
            "addresses": [str(address) for address in service.addresses[:ADDRESSES]],
            "addressCount": len(service.addresses),
            "ports": [
                {"name": one.name, "protocol": one.protocol.name, "port": one.port, "nodePort": one.node_port}
                for one in service.ports[:PORTS]
            ],
            "portCount": len(service.ports),
            "endpoints": row.endpoints._asdict(),
            "problems": row.problems,
            **counters.described(self._counted.rates.of(name)),
            "activeConnections": active.active if active else None,
            "inactiveConnections": active.inactive if active else None,
            "history": {"connectionsPerSecond": connections, "bytesPerSecond": traffic},
        }


class Troubles:
    """The problems that this node has found with Services, apart from the problems that follow from the Service objects alone."""

    def __init__(self, survey: Survey) -> None:
        self._survey = survey
        self._failures: dict[ServiceName, str] = {}
        self._texts: dict[ServiceName, tuple[str, ...]] = {}
        self._draining: set[ServiceName] = set()

    def failed(self, name: ServiceName, text: str) -> None:
        """Record that an operation for a Service has failed; the failure is shown until the Service has been programmed."""
        self._failures[name] = text

    def of(self, name: ServiceName) -> tuple[str, ...]:
        """The problems of a Service, as sentences."""
        return self._texts.get(name, ())

    def refreshing(self, changed: Callable[[Iterable[ServiceName]], None]) -> Iterator[None]:
        """Query the survey for problems; yields between two queries.

        Calls ``changed`` with the Services whose problems have changed, and with the Services that have, or had, draining
        endpoints.
        """
        found = collections.defaultdict[ServiceName, list[str]](list)
        owners = itertools.islice(self._survey.pending_owners(), PENDING_SEEN)
        pending = collections.Counter(owner.service for owner in owners)
        self._failures = {name: text for name, text in self._failures.items() if name in pending}
        for name, count in pending.items():
            if text := self._failures.get(name):
                found[name].append(f"failed: {text}")
            found[name].append(f"not in force yet: {counted(count, 'kernel object')}")
        yield
        for conflict in itertools.islice(self._survey.conflicts(), CONFLICTS_SEEN):
            reasons = conflict.reasons or ("has it already",) * len(conflict.waiting)
            for waiting, reason in zip(conflict.waiting, reasons, strict=False):
                found[waiting.service].append(f"{conflict.key} is served for {conflict.winner}, which {reason}")
        yield
        for port in self._survey.without_scope[: steps.ITEMS_AT_ONCE]:
            text = f"port {port.port} has no second scope: all packet marks are in use (--ipvs-scope-mark-bits)"
            found[port.service].append(text)
        texts = {name: tuple(sentences[:PROBLEMS]) for name, sentences in found.items()}
        changed(name for name in {*texts, *self._texts} if texts.get(name) != self._texts.get(name))
        self._texts = texts
        yield
        servers = map(self._survey.virtual_servers.get, self._survey.draining_virtual_servers)
        draining = {desired.owner.service for desired in servers if desired}
        changed(draining | self._draining)
        self._draining = draining


PROBLEMS = 8
"""The largest number of sentences about the problems of a Service."""
ADDRESSES = 16
PORTS = 16


class Endpoints(NamedTuple):
    """How many of a Service's endpoint addresses are ready, draining or unused.

    This node uses the ``ready`` addresses; each address is counted once.
    """

    ready: int = 0
    draining: int = 0
    unused: int = 0


class BoardRow(msgspec.Struct, frozen=True, gc=False):
    """The stored data about a Service, and the objects from which the data was made."""

    service: Service
    slices: tuple[EndpointSlice, ...]
    endpoints: Endpoints
    problems: tuple[str, ...]


def count_endpoints(
    slices: Iterable[EndpointSlice],
    state: ServiceState | None,
    draining_of: Callable[[VirtualServerKey], Collection[RealServerKey]],
    keys: Iterable[VirtualServerKey],
) -> Endpoints:
    """Count the endpoints of a Service; ``keys`` are the keys of its virtual servers."""
    known = {one for item in slices for one in item.each_address}
    used: set[bytes] = set()
    for weights in _weights(state):
        # An endpoint with weight 0 does not count as used, because the weight 0 keeps new connections away from the endpoint.
        chosen = weights if isinstance(weights, EvenWeights) else (one for one, weight in weights.items() if weight)
        used.update(bytes(one[:-PORT_SIZE]) for one in chosen)
    draining = {bytes(one[:-PORT_SIZE]) for key in keys for one in draining_of(key)}
    return Endpoints(len(used), len(draining - used), len(known - used - draining))


def _weights(state: ServiceState | None) -> Collection[Weights]:
    """The weights of a Service's virtual servers. A ``Weights`` object that several virtual servers share is returned once.

    Virtual servers for clients outside the cluster are left out, because some of their real servers are the ends of tunnels to
    other nodes.
    """
    if state is None:
        return ()
    scopes = (one.weights for one in state.rare.scopes if one.clients is not Clients.OUTSIDE)
    every: tuple[Weights, ...] = (*(one.weights for one in state.served), *scopes)
    return {id(weights): weights for weights in every}.values()


def _own_problems(service: Service, state: ServiceState | None, endpoints: Endpoints) -> Iterator[str]:
    for one in (*service.skipped, *(state.rare.skipped if state else ())):
        if one.invalid:
            yield f"not used: {one}"
    if service.not_served and service.not_served.invalid:
        yield f"not served: {service.not_served}"
    if service.not_served or not service.ports:
        return
    if not endpoints.ready:
        match endpoints.unused:
            case 0:
                yield "it has no endpoints"
            case 1:
                yield "its only endpoint is not used"
            case several:
                yield f"none of its {several} endpoints is used"
    elif state and any(policy == "internal" for policy, _ in state.rare.without_local):
        yield "its cluster IP has no endpoint on this node, where internalTrafficPolicy Local keeps the traffic"
