"""Real servers by address and port, and the weights of all real servers of one virtual server, as packed bytes."""

import abc
import functools
import struct
from collections.abc import Collection, ItemsView, Iterator, KeysView, Mapping
from typing import Any, NamedTuple, cast

from ipvsproxy.model.net import Address, host_port

PORT_SIZE = 2
"""The bytes of a packed port."""
NOT_MASQUERADED = -1
"""Stands in place of a weight: the real server has a forwarding method that no Service asks for.

Setting a weight also sets the forwarding method.
"""
TUNNELLED = 1 << 32
"""Added to the weight of a real server that gets its packets by tunnel: more than the kernel's largest weight."""
PORTS_KEPT = 1024
"""The most port numbers that are kept as shared objects."""
PLAIN_KEPT = 16
"""The number of virtual servers whose unpacked weights are cached.

One change needs the weights several times, and unpacking 1,000 keys takes 0.1 ms.
"""


def without_method(weight: int) -> int:
    """The weight of a real server, whether or not it gets its packets by tunnel."""
    return weight - TUNNELLED if weight >= TUNNELLED else weight


def in_words(weight: int) -> str:
    """The weight of a real server, and its forwarding method unless that is masquerading."""
    return f"weight {without_method(weight)}" + (" by tunnel" if weight >= TUNNELLED else "")


def pieces(packed: bytes, size: int) -> list[bytes]:
    """Cut ``packed``, which holds values of one length one after the other, into pieces of ``size`` bytes."""
    return [piece for (piece,) in struct.iter_unpack(f"{size}s", packed)]


class RealServerKey(bytes):
    """The key of a real server in its virtual server: the packed address, then the port in network order.

    Messages to the kernel contain these bytes, and a node of a large cluster has hundreds of thousands of keys. A key has 6 bytes
    for IPv4 and 18 for IPv6, so keys of two families are never equal, and no key equals an address. The order is by address, then
    by port.
    """

    __slots__ = ()

    @classmethod
    def of(cls, address: Address, port: int) -> "RealServerKey":
        """The key of an address and a port.

        Raises:
            OverflowError: the port is outside 0..65535.
        """
        return cls(address + port.to_bytes(PORT_SIZE, "big"))

    @property
    def address(self) -> Address:
        """The address; a new object at each call."""
        return Address(self[:-PORT_SIZE])

    @property
    def port(self) -> int:
        """The port."""
        return _port(self[-PORT_SIZE:])

    def __str__(self) -> str:
        return host_port(self.address, self.port)

    def __repr__(self) -> str:
        return f"RealServerKey({str(self)!r})"


@functools.lru_cache(maxsize=PORTS_KEPT)
def _port(packed: bytes) -> int:
    """The port number, as one shared object for equal ports: a hundred thousand endpoints have few different ports."""
    return int.from_bytes(packed, "big")


class Weights(Mapping[RealServerKey, int]):
    """The desired real servers of one virtual server in a fixed order, each with its weight.

    As with other mappings, the order does not matter for equality.
    """

    __slots__ = ()

    @abc.abstractmethod
    def plain(self) -> Mapping[bytes, int]:
        """The weights by the plain bytes of each key, which equal the key and are made in a third of the time.

        Do not change the result.
        """

    def unpacked(self) -> dict[RealServerKey, int]:
        """The weights as a new dictionary, which the caller may change."""
        return {RealServerKey(key): weight for key, weight in self.plain().items()}

    def __iter__(self) -> Iterator[RealServerKey]:
        return map(RealServerKey, self.plain())

    def __len__(self) -> int:
        return len(self.plain())

    def __getitem__(self, key: RealServerKey) -> int:
        return self.plain()[key]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mapping) and len(self) == len(other) and self.plain() == plain(other)

    __hash__ = None  # type: ignore[assignment]  # no mapping has a hash

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.unpacked()})"


class EvenWeights(Weights):
    """The real servers of one virtual server whose weights are all 1, as they nearly always are.

    Keys are packed: each takes 6 bytes for IPv4 and 18 for IPv6, instead of 100 in a dictionary.
    """

    __slots__ = ("_size", "packed")

    def __init__(self, packed: bytes = b"", size: int = 1) -> None:
        """``packed`` has all keys, of ``size`` bytes each, one after the other and without duplicates."""
        self.packed = packed
        self._size = size

    @classmethod
    def of(cls, keys: Collection[bytes]) -> "EvenWeights":
        """The weights of these real servers, all of one family and without duplicates."""
        return cls(b"".join(keys), len(next(iter(keys)))) if keys else NO_REAL_SERVERS

    def plain(self) -> Mapping[bytes, int]:
        """As in ``Weights``."""
        return _plain(self.packed, self._size)

    def keys(self) -> KeysView[RealServerKey]:
        """The keys, as a dictionary returns them; new objects at each call."""
        return self.unpacked().keys()

    def items(self) -> ItemsView[RealServerKey, int]:
        """The items, as a dictionary returns them; new objects at each call."""
        return self.unpacked().items()

    def __len__(self) -> int:
        return len(self.packed) // self._size

    def __eq__(self, other: object) -> bool:
        return (isinstance(other, EvenWeights) and self.packed == other.packed) or super().__eq__(other)

    __hash__ = None  # no mapping has a hash


class UnevenWeights(Weights):
    """The real servers of one virtual server, each with its weight: for Services that ask for weights."""

    __slots__ = ("_weights",)

    def __init__(self, weights: Mapping[bytes, int]) -> None:
        """``weights`` has the plain bytes of each key as its keys; nobody changes it afterwards."""
        self._weights = weights

    def plain(self) -> Mapping[bytes, int]:
        """As in ``Weights``."""
        return self._weights


class Thresholds(NamedTuple):
    """The thresholds of a real server: from ``upper`` connections on, it gets no new ones until it has fewer than ``lower``.

    The kernel counts established and recently ended connections. ``upper`` 0 means no threshold. With ``lower`` 0, the kernel
    resumes below three quarters of ``upper`` (``ip_vs_dest_conn_overhead`` and ``ip_vs_unbind_dest`` in
    net/netfilter/ipvs/ip_vs_conn.c).
    """

    upper: int = 0
    lower: int = 0

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> "Thresholds":
        """The thresholds in a document, where None stands for 0."""
        return cls(document["maxConnections"] or 0, document["resumeConnections"] or 0)

    @property
    def described(self) -> dict[str, int]:
        """The thresholds as fields of a document."""
        return {"maxConnections": self.upper, "resumeConnections": self.lower}

    def __str__(self) -> str:
        return f"connections at most {self.upper}" + (f", again below {self.lower}" if self.lower else "")


NO_THRESHOLDS = Thresholds()
NO_REAL_SERVERS = EvenWeights()
"""The weights of a virtual server without real servers."""


@functools.lru_cache(maxsize=PLAIN_KEPT)
def _plain(packed: bytes, size: int) -> Mapping[bytes, int]:
    return dict.fromkeys(pieces(packed, size), 1)


def plain(weights: Mapping[RealServerKey, int]) -> Mapping[bytes, int]:
    """The weights by the plain bytes of each key: faster than ``weights`` for more than one look-up."""
    return weights.plain() if isinstance(weights, EvenWeights | UnevenWeights) else cast("Mapping[bytes, int]", weights)
