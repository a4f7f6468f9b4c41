"""The endpoints of one service port, out of the EndpointSlices of its Service."""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, TypeVar

from ipvsproxy.model.net import Address
from ipvsproxy.model.packed import pieces
from ipvsproxy.model.real_servers import PORT_SIZE, split
from ipvsproxy.model.service import Conditions, EndpointSlice, ServicePort

K = TypeVar("K", bound=bytes)


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


NO_ENDPOINTS = Endpoints()


def find_endpoints(slices: Sequence[EndpointSlice], port: ServicePort) -> Endpoints:
    """The endpoints of a service port: those of slices that have a port of its name and protocol, with that port's number.

    The slices must be of one family. An address counts once: a later entry replaces an earlier one, unless the later one is
    terminating. A new pod may have the address of a terminating one.
    """
    if len(slices) == 1 and len(slices[0].ports) == 1:  # nearly all Services
        (item,) = slices
        (one,) = item.ports
        if one.name != port.name or one.protocol is not port.protocol:
            return NO_ENDPOINTS
        stems = _addresses(item)
        if len(stems) == 1 or len(set(stems)) == len(stems):
            return Endpoints(stems, item.conditions, one.port.to_bytes(PORT_SIZE, "big"))
    matching = [
        (item, one.port) for item in slices for one in item.ports if one.name == port.name and one.protocol is port.protocol
    ]
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
