"""The endpoints of one service port, out of the EndpointSlices of its Service."""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, TypeVar

from ipvsproxy.model.net import Address, Protocol
from ipvsproxy.model.packed import pieces
from ipvsproxy.model.real_servers import PORT_SIZE, split
from ipvsproxy.model.service import Conditions, EndpointSlice, ServicePort

K = TypeVar("K", bound=bytes)
SlicesByPort = Mapping[tuple[str, Protocol], Sequence[tuple[EndpointSlice, int]]]
"""Slices by name and protocol of a port, each with its number of that port."""


class Endpoints(NamedTuple):
    """The endpoints of a service port, each once.

    A stem and the suffix together are the bytes of a real server's key. If all endpoints have one port, as nearly always, that
    port is the suffix, and each stem is a packed address; else the suffix is empty. ``conditions`` are in the order of ``stems``.
    """

    stems: Sequence[bytes] = ()
    conditions: Sequence[Conditions] = ()
    suffix: bytes = b""

    @classmethod
    def of(cls, by_key: Mapping[K, Conditions]) -> "Endpoints":
        """Endpoints from the bytes of their keys."""
        return cls(tuple(by_key), tuple(by_key.values()))

    def split(self, stems: Iterable[bytes]) -> Sequence[tuple[Address, int]]:
        """Address and port of these stems."""
        if not self.suffix:
            return list(map(split, stems))
        port = int.from_bytes(self.suffix, "big")
        return [(Address(stem), port) for stem in stems]

    def by_key(self) -> Mapping[bytes, Conditions]:
        """The endpoints by the bytes of their keys, made at each call."""
        return {stem + self.suffix: conditions for stem, conditions in zip(self.stems, self.conditions, strict=True)}


def slices_by_port(slices: Iterable[EndpointSlice]) -> SlicesByPort:
    """The slices that have a port of a name and protocol, each with the number of that port."""
    by_port: dict[tuple[str, Protocol], list[tuple[EndpointSlice, int]]] = {}
    for item in slices:
        for one in item.ports:
            by_port.setdefault((one.name, one.protocol), []).append((item, one.port))
    return by_port


def find_endpoints(by_port: SlicesByPort, port: ServicePort) -> Endpoints:
    """The endpoints of a service port: those of slices that have a port of its name and protocol, with that port's number.

    The slices must be of one family. An address counts once: a later entry replaces an earlier one, unless the later one is
    terminating. A new pod may have the address of a terminating one.
    """
    matching = by_port.get((port.name, port.protocol), ())
    numbers = {number for _, number in matching}
    if len(numbers) == 1:
        stems, conditions = _joined([item for item, _ in matching])
        if len(set(stems)) == len(stems):
            return Endpoints(stems, conditions, numbers.pop().to_bytes(PORT_SIZE, "big"))
    return _one_by_one(matching)


def _joined(slices: Sequence[EndpointSlice]) -> tuple[Sequence[bytes], Sequence[Conditions]]:
    if len(slices) == 1:
        return _addresses(slices[0]), slices[0].conditions
    return [address for item in slices for address in _addresses(item)], [one for item in slices for one in item.conditions]


def _addresses(item: EndpointSlice) -> Sequence[bytes]:
    return pieces(item.addresses, item.family.bits // 8) if item.family else ()


def _one_by_one(slices_and_ports: Iterable[tuple[EndpointSlice, int]]) -> Endpoints:
    by_key: dict[bytes, Conditions] = {}
    for item, number in slices_and_ports:
        suffix = number.to_bytes(PORT_SIZE, "big")
        for address, conditions in zip(_addresses(item), item.conditions, strict=True):
            key = address + suffix
            if not conditions.terminating or key not in by_key:
                by_key[key] = conditions
    return Endpoints.of(by_key)
