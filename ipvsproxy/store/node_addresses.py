"""Which external and load-balancer addresses of Services are addresses of nodes, according to EndpointSlices and Nodes.

An endpoint in the host's network has the address and the name of its node. So no watch of all Nodes is needed; a node without an
endpoint in its network stays unknown.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping

from ipvsproxy.model.net import Address
from ipvsproxy.model.service import EndpointSlice, Node, Service

FEW = 8
"""For at most so many addresses, a search of each slice for each address takes less time than indexing the slices."""


class NodeAddresses:
    """Follows Services, EndpointSlices and Nodes. Only addresses that Services ask for take memory."""

    def __init__(self) -> None:
        self._asked: Counter[Address] = Counter()
        self._unknown: set[Address] = set()
        self._nodes: dict[Address, set[str]] = {}

    def note_service(self, before: Service | None, after: Service | None) -> None:
        """A Service has changed; None stands for a Service that does not exist."""
        former, present = _addresses(before), _addresses(after)
        if former == present:
            return
        self._asked.update(present)
        self._asked.subtract(former)
        for address in former:
            if self._asked[address] <= 0:
                del self._asked[address]
                self._nodes.pop(address, None)
        self._unknown.update(present)

    def note_slice(self, before: EndpointSlice | None, after: EndpointSlice | None) -> None:
        """An EndpointSlice has changed; None before it came, and after it went."""
        for one in (before, after) if self._asked else ():
            self.note_addresses(one.each_address if one else ())

    def note_addresses(self, addresses: Iterable[bytes]) -> None:
        """These addresses of endpoints or nodes were added, changed or removed."""
        if self._asked:
            self._unknown.update(map(Address, self._asked.keys() & addresses))

    def of_others(self, here: str, slices: Collection[EndpointSlice], nodes: Iterable[Node]) -> Mapping[Address, str]:
        """For each given address that belongs to another node, the name of that node."""
        if self._unknown:
            asked = self._unknown & self._asked.keys()
            self._unknown = set()
            for address in asked:
                self._nodes.pop(address, None)
            for item in slices if asked else ():
                if len(asked) > FEW or any(item.addresses.find(address) >= 0 for address in asked):
                    for piece, conditions in zip(item.each_address, item.conditions, strict=True):
                        if piece in asked and conditions.node_name:
                            self._nodes.setdefault(Address(piece), set()).add(conditions.node_name)
            for node in nodes:
                for address in asked.intersection(node.addresses):
                    self._nodes.setdefault(address, set()).add(node.name)
        return {address: min(names) for address, names in self._nodes.items() if here not in names}


def _addresses(service: Service | None) -> tuple[Address, ...]:
    options = service.options if service else None
    return (*options.external_addresses, *options.load_balancer_addresses) if options else ()
