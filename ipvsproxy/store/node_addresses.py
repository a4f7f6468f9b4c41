"""Determines from EndpointSlices and Nodes which external and load-balancer addresses of Services belong to nodes.

An endpoint in the host network has the address and the name of its node, so no watch of all Nodes is needed. The address of a
node without an endpoint in the host network stays unknown.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet

from ipvsproxy.model.net import Address
from ipvsproxy.model.service import EndpointSlice, Node, Service, ServiceName

FEW = 8
"""If at most this many addresses are new, all slices are searched for them, and only matching slices are read. With more new
addresses, reading all slices is faster."""


class NodeAddresses:
    """Follows changes of Services, EndpointSlices and Nodes. Memory is needed only for addresses that Services request.

    The cost of a change depends only on the size of the changed object. In a look-up, only new addresses cause a search of all
    EndpointSlices: addresses that no Service requested at the last look-up.
    """

    def __init__(self) -> None:
        self._services: dict[Address, dict[ServiceName, None]] = {}  # a dictionary, because a set would not keep the order
        self._new: set[Address] = set()
        # for each address and each node: how many endpoints and Nodes show that the address belongs to that node
        self._nodes: dict[Address, Counter[str]] = {}

    def services_with(self, addresses: Iterable[Address]) -> Iterator[ServiceName]:
        """The Services that request these addresses."""
        for address in addresses:
            yield from self._services.get(address, ())

    def note_service(self, before: Service | None, after: Service | None) -> None:
        """Record a change of a Service; ``before`` is None for a new Service, and ``after`` is None for a deleted Service."""
        former, present = _addresses(before), _addresses(after)
        self._new |= present - self._services.keys()
        if after:
            for address in present - former:
                self._services.setdefault(address, {})[after.name] = None
        if before:
            for address in former - present:
                del self._services[address][before.name]
                if not self._services[address]:
                    del self._services[address]
                    self._nodes.pop(address, None)

    def note_slice(self, before: EndpointSlice | None, after: EndpointSlice | None) -> None:
        """Record a change of an EndpointSlice; ``before`` is None for a new slice, and ``after`` is None for a deleted slice."""
        for item, step in ((before, -1), (after, 1)):
            if item and not self._services.keys().isdisjoint(item.each_address):
                self._count(_of_slice(item), step)

    def note_node(self, before: Node | None, after: Node | None) -> None:
        """Record a change of a Node; ``before`` is None for a new Node, and ``after`` is None for a deleted Node."""
        for node, step in ((before, -1), (after, 1)):
            self._count(((address, node.name) for address in node.addresses) if node else (), step)

    def of_others(self, here: str, slices: Collection[EndpointSlice], nodes: Iterable[Node]) -> Mapping[Address, str]:
        """Find the node's name for each requested address that belongs to another node; leave out all other addresses."""
        asked = self._new & self._services.keys()
        self._new = set()
        for address in asked:
            self._nodes.pop(address, None)
        for item in slices if asked else ():
            if len(asked) > FEW or any(item.addresses.find(address) >= 0 for address in asked):
                self._count((place for place in _of_slice(item) if place[0] in asked), 1)
        for node in nodes if asked else ():
            self._count(((address, node.name) for address in asked.intersection(node.addresses)), 1)
        return {address: min(names) for address, names in self._nodes.items() if here not in names}

    def _count(self, places: Iterable[tuple[bytes, str]], step: int) -> None:
        for piece, name in places:
            if name and piece in self._services:
                names = self._nodes.setdefault(Address(piece), Counter())
                names[name] += step
                if not names[name]:
                    del names[name]
                if not names:
                    del self._nodes[Address(piece)]


def _of_slice(item: EndpointSlice) -> Iterator[tuple[bytes, str]]:
    return ((piece, conditions.node_name) for piece, conditions in zip(item.each_address, item.conditions, strict=True))


def _addresses(service: Service | None) -> AbstractSet[Address]:
    options = service.options if service else None
    return {*options.external_addresses, *options.load_balancer_addresses} if options else set()
