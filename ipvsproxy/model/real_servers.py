"""The keys of real servers as packed bytes, and the weights of all real servers of one virtual server as packed bytes."""

import abc
import functools
import struct
from collections.abc import Collection, ItemsView, Iterator, KeysView, Mapping
from typing import Any, NamedTuple, cast

from ipvsproxy.model.net import Address, host_port

PORT_SIZE = 2
"""The number of bytes of a packed port."""
NOT_MASQUERADED = -1
"""The value in place of a weight if the real server has a forwarding method that no Service requests.

An operation that sets the weight of a real server also sets its forwarding method, and so corrects the method.
"""
TUNNELLED = 1 << 32
"""The bit that is added to the weight of a real server that gets its packets by tunnel. The bit is larger than the kernel's
largest weight."""
PLAIN_KEPT = 16
"""The number of virtual servers whose unpacked weights are cached.

One change needs the weights several times, and unpacking 1,000 keys takes 0.1 ms.
"""


def without_method(weight: int) -> int:
    """The weight of a real server, without the bit ``TUNNELLED``.

    The bit means that the real server gets packets by tunnel.
    """
    return weight - TUNNELLED if weight >= TUNNELLED else weight


def in_words(weight: int) -> str:
    """The weight of a real server as text, with the forwarding method unless the method is masquerading."""
    return f"weight {without_method(weight)}" + (" by tunnel" if weight >= TUNNELLED else "")


def pieces(packed: bytes, size: int) -> list[bytes]:
    """Split the bytes ``packed`` into a list of values of ``size`` bytes each."""
    return [piece for (piece,) in struct.iter_unpack(f"{size}s", packed)]


class RealServerKey(bytes):
    """The key of a real server within its virtual server: the packed address, then the port in network byte order.

    Messages to the kernel contain exactly the bytes of the key. A node of a large cluster has hundreds of thousands of keys. A
    key has 6 bytes for IPv4 and 18 bytes for IPv6, so keys of different IP families are never equal. Keys are ordered by address,
    then by port.
    """

    __slots__ = ()

    @classmethod
    def of(cls, address: Address, port: int) -> "RealServerKey":
        """The key for an address and a port.

        Raises:
            OverflowError: the port is outside 0..65535.
        """
        return cls(address + port.to_bytes(PORT_SIZE, "big"))

    @property
    def address(self) -> Address:
        """The real server's address; each call makes a new object."""
        return Address(self[:-PORT_SIZE])

    @property
    def port(self) -> int:
        """The port."""
        return int.from_bytes(self[-PORT_SIZE:], "big")

    def __str__(self) -> str:
        return host_port(self.address, self.port)

    def __repr__(self) -> str:
        return f"RealServerKey({str(self)!r})"


class Weights(Mapping[RealServerKey, int]):
    """The desired real servers of one virtual server in a fixed order, each with its weight.

    The order of real servers does not affect equality, as with other mappings.
    """

    __slots__ = ()

    @abc.abstractmethod
    def plain(self) -> Mapping[bytes, int]:
        """Maps the plain bytes of each key to the weight.

        The plain bytes of a key are equal to the key. Creating plain bytes takes a third of the time of creating a key. Callers
        must not change the result.
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

    __hash__ = None  # type: ignore[assignment]  # mappings are not hashable

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.unpacked()})"


class EvenWeights(Weights):
    """The real servers of one virtual server, all with weight 1; nearly all virtual servers have only such real servers.

    The keys are packed: a key takes 6 bytes for IPv4 or 18 bytes for IPv6, whereas a dictionary takes 100 bytes per key.
    """

    __slots__ = ("_size", "packed")

    def __init__(self, packed: bytes = b"", size: int = 1) -> None:
        """``packed`` holds all keys, which have ``size`` bytes each, one after the other and without duplicates."""
        self.packed = packed
        self._size = size

    @classmethod
    def of(cls, keys: Collection[bytes]) -> "EvenWeights":
        """The weights of these real servers; the real servers must be of one IP family, and must have no duplicates."""
        return cls(b"".join(keys), len(next(iter(keys)))) if keys else NO_REAL_SERVERS

    def plain(self) -> Mapping[bytes, int]:
        """As in ``Weights``."""
        return _plain(self.packed, self._size)

    def keys(self) -> KeysView[RealServerKey]:
        """The keys as a dictionary view. Each call creates a new dictionary with new key objects."""
        return self.unpacked().keys()

    def items(self) -> ItemsView[RealServerKey, int]:
        """The keys with their weights, in a view like the result of ``dict.items``. Each call makes new key objects."""
        return self.unpacked().items()

    def __len__(self) -> int:
        return len(self.packed) // self._size

    def __eq__(self, other: object) -> bool:
        return (isinstance(other, EvenWeights) and self.packed == other.packed) or super().__eq__(other)

    __hash__ = None  # mappings are not hashable


class UnevenWeights(Weights):
    """The real servers of one virtual server, possibly with different weights, for Services that request weights."""

    __slots__ = ("_weights",)

    def __init__(self, weights: Mapping[bytes, int]) -> None:
        """The keys of ``weights`` are the plain bytes of real-server keys; ``weights`` must not be changed afterwards."""
        self._weights = weights

    def plain(self) -> Mapping[bytes, int]:
        """As in ``Weights``."""
        return self._weights


class Thresholds(NamedTuple):
    """The connection thresholds of a real server.

    A real server with ``upper`` connections gets no new connections until it has fewer than ``lower`` connections. The kernel
    counts established and recently ended connections. An ``upper`` of 0 means that there is no threshold. If ``lower`` is 0, the
    real server gets new connections again when it has fewer than three quarters of ``upper`` connections
    (``ip_vs_dest_conn_overhead`` and ``ip_vs_unbind_dest`` in net/netfilter/ipvs/ip_vs_conn.c).
    """

    upper: int = 0
    lower: int = 0

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> "Thresholds":
        """The thresholds that a document describes; a field that is None in the document means a threshold of 0."""
        return cls(document["maxConnections"] or 0, document["resumeConnections"] or 0)

    @property
    def described(self) -> dict[str, int]:
        """The thresholds as the fields of a document."""
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
    """A mapping from the plain bytes of each real-server key to its weight.

    Looking up many keys in this mapping is faster than in ``weights``.
    """
    return weights.plain() if isinstance(weights, EvenWeights | UnevenWeights) else cast("Mapping[bytes, int]", weights)
