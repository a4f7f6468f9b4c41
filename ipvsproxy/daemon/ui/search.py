"""Which Services match a search: by name, address, port or pod address.

Rule 1: a part of the name matches, in any case.
Rule 2: a beginning of an address matches, of a Service or of an endpoint. ``10.244.1.`` finds the pods of a node.
Rule 3: a number matches a port or a node port as a whole.
Rule 4: ``address:port`` asks for both, with the address as a whole: as ``ipvsadm -Ln`` prints it.
"""

import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from ipvsproxy.model.net import Address, parse_address
from ipvsproxy.model.service import EndpointSlice, Service

LONGEST = 200
"""The most characters of a query."""
_ADDRESS_START = re.compile(r"[0-9]+\.[0-9.]*|[0-9a-f]*:[0-9a-f:.]*")
_HOST_PORT = re.compile(r"\[([0-9a-f:.]+)\]:([0-9]{1,5})|([0-9.]+):([0-9]{1,5})")


class Query(NamedTuple):
    """A search, read once. ``text`` is in lower case; ``address`` with ``port`` is ``address:port``."""

    text: str
    starts_address: bool = False
    port: int | None = None
    address: Address | None = None

    def matches(self, service: Service, slices: Iterable[EndpointSlice]) -> bool:
        """Whether a Service with these EndpointSlices matches."""
        if self.text in str(service.name):  # names are in lower case
            return True
        if self.address is not None:
            return self._is_at(service, slices, self.address)
        if self.port is not None and any(self.port in (one.port, one.node_port) for one in service.ports):
            return True
        if not self.starts_address:
            return False
        return any(str(address).startswith(self.text) for address in (*_addresses(service), *_pods(slices)))

    def _is_at(self, service: Service, slices: Iterable[EndpointSlice], address: Address) -> bool:
        if address in _addresses(service):
            return any(self.port == one.port for one in service.ports)
        if any(self.port == one.node_port for one in service.ports):
            return True  # of any address of the node
        return any(
            any(one.port == self.port for one in item.ports) and _has(item, address)
            for item in slices
            if item.family is address.family
        )


def parse(text: str) -> Query:
    """Read a query. Every text is one."""
    text = text.strip().lower()
    if found := _HOST_PORT.fullmatch(text):
        try:
            address = parse_address(found[1] or found[3])
        except ValueError:
            return Query(text)
        return Query(text, address=address, port=int(found[2] or found[4]))
    return Query(
        text,
        starts_address=_ADDRESS_START.fullmatch(text) is not None,
        port=int(text) if text.isascii() and text.isdecimal() and len(text) <= 5 else None,  # noqa: PLR2004 - 65535
    )


def _addresses(service: Service) -> tuple[Address, ...]:
    options = service.options
    return (*service.cluster_addresses, *options.external_addresses, *options.load_balancer_addresses)


def _pods(slices: Iterable[EndpointSlice]) -> Iterator[Address]:
    return (endpoint.address for item in slices for endpoint in item.endpoints)


def _has(item: EndpointSlice, address: Address) -> bool:
    size, at = len(address), -1
    while (at := item.addresses.find(address, at + 1)) >= 0:
        if at % size == 0:  # else the bytes belong to two addresses
            return True
    return False
