"""Real servers by address and port, and the weights of all that one virtual server has."""

import functools
from collections.abc import Collection, ItemsView, Iterator, KeysView, Mapping
from typing import cast

from ipvsproxy.model.net import Address, host_port
from ipvsproxy.model.packed import pieces

PORT_SIZE = 2
"""Bytes of a packed port."""
NOT_MASQUERADED = -1
"""In the place of a weight: packets go to it by another method than to all of ours. To set its weight mends that."""
PORTS_KEPT = 1024
"""So many numbers of ports are shared."""
PLAIN_KEPT = 16
"""Of so many virtual servers the last unpacking is kept: for one change it is asked for again and again."""


class RealServerKey(bytes):
    """What names a real server inside its virtual server: its packed address, and behind it its port in network order.

    Bytes, because the kernel's messages want these, and a node of a large cluster holds hundreds of thousands of them. One of
    IPv4 has 6 bytes and one of IPv6 has 18, so they never equal each other, or an address. Those of one family are ordered by
    address, then port.
    """

    __slots__ = ()

    @classmethod
    def of(cls, address: Address, port: int) -> "RealServerKey":
        """The real server at this address and port.

        Raises:
            OverflowError: the port is outside 0..65535.
        """
        return cls(address + port.to_bytes(PORT_SIZE, "big"))

    @classmethod
    def at_each(cls, addresses: bytes, size: int, port: int) -> list["RealServerKey"]:
        """The real servers on one port of all these packed addresses, of ``size`` bytes each, in their order.

        Raises:
            OverflowError: the port is outside 0..65535.
            ValueError: the last address is shorter.
        """
        packed_port = port.to_bytes(PORT_SIZE, "big")
        return [cls(address + packed_port) for address in pieces(addresses, size)] if addresses else []

    @property
    def address(self) -> Address:
        """Its address, made at each call."""
        return Address(self[:-PORT_SIZE])

    @property
    def port(self) -> int:
        """Its port."""
        return _port(self[-PORT_SIZE:])

    def __str__(self) -> str:
        return host_port(self.address, self.port)

    def __repr__(self) -> str:
        return f"RealServerKey({str(self)!r})"


@functools.lru_cache(maxsize=PORTS_KEPT)
def _port(packed: bytes) -> int:
    """One number for all that have this port: what is made of a hundred thousand endpoints has few different ones."""
    return int.from_bytes(packed, "big")


def split(key: bytes) -> tuple[Address, int]:
    """Address and port of a real server, given by its key or the plain bytes of it."""
    return Address(key[:-PORT_SIZE]), _port(key[-PORT_SIZE:])


class EvenWeights(Mapping[RealServerKey, int]):
    """Real servers of one virtual server, in an order that stays, each with weight 1, packed: this is what nearly all have.

    A dictionary with its keys takes 100 bytes for each real server, this takes 6 for one of IPv4, and 18 for one of IPv6. As
    with other mappings, equality does not ask for the order.
    """

    __slots__ = ("_size", "packed")

    def __init__(self, packed: bytes = b"", size: int = 1) -> None:
        """``packed``: all keys, none of them twice, of ``size`` bytes each, one after the other."""
        self.packed = packed
        self._size = size

    @classmethod
    def of(cls, keys: Collection[bytes]) -> "EvenWeights":
        """Of these, which are of one family, and none of which is there twice."""
        return cls(b"".join(keys), len(next(iter(keys)))) if keys else NO_REAL_SERVERS

    def plain(self) -> Mapping[bytes, int]:
        """As a dictionary of plain bytes, which equal the keys and take a third of the time to make. It is not to be changed."""
        return _plain(self.packed, self._size)

    def unpacked(self) -> dict[RealServerKey, int]:
        """As a dictionary that is the caller's own."""
        return dict.fromkeys(self, 1)

    def keys(self) -> KeysView[RealServerKey]:
        """As those of a dictionary, made at each call."""
        return self.unpacked().keys()

    def items(self) -> ItemsView[RealServerKey, int]:
        """As those of a dictionary, made at each call."""
        return self.unpacked().items()

    def __iter__(self) -> Iterator[RealServerKey]:
        return map(RealServerKey, pieces(self.packed, self._size))

    def __len__(self) -> int:
        return len(self.packed) // self._size

    def __getitem__(self, key: RealServerKey) -> int:
        return self.plain()[key]

    def __eq__(self, other: object) -> bool:
        if isinstance(other, EvenWeights):
            if self.packed == other.packed:
                return True
            return len(self.packed) == len(other.packed) and self.plain() == other.plain()
        return isinstance(other, Mapping) and len(self) == len(other) and self.plain() == other

    __hash__ = None  # type: ignore[assignment]  # as no mapping has one

    def __repr__(self) -> str:
        return f"EvenWeights.of({list(self)})"


NO_REAL_SERVERS = EvenWeights()
"""The one that has none."""


@functools.lru_cache(maxsize=PLAIN_KEPT)
def _plain(packed: bytes, size: int) -> Mapping[bytes, int]:
    return dict.fromkeys(pieces(packed, size), 1)


def plain(weights: Mapping[RealServerKey, int]) -> Mapping[bytes, int]:
    """Weights by the bytes of their keys, for those who ask more than once."""
    return weights.plain() if isinstance(weights, EvenWeights) else cast("Mapping[bytes, int]", weights)
