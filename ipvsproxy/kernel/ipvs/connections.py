"""The connections of one virtual server's real servers, by one system call.

A netlink dump takes three calls, and its answer is three times as long. In a storm of replaced endpoints, these dumps took most
of the time of the kernel thread. The older interface only knows IPv4, and may vanish one day: netlink answers every question that
it cannot. It leaves out a real server of IPv6 in a virtual server of IPv4; only tunnels have these, and ours never do. Layouts:
include/uapi/linux/ip_vs.h (``ip_vs_get_dests``, ``ip_vs_dest_entry``).
"""

import errno
import itertools
import socket
import struct
from collections.abc import Callable, Iterator, Mapping

from ipvsproxy.kernel.base import sockopt
from ipvsproxy.kernel.base.errors import KernelError
from ipvsproxy.model.net import Family
from ipvsproxy.model.real_servers import RealServerKey
from ipvsproxy.model.virtual_servers import Connections, FirewallMark, VirtualServerKey

FIRST_ROOM = 32
"""The first question has room for so many real servers. If the answer fills it, the next question has more."""
MOST_ROOM = 2048
"""For a virtual server with more real servers netlink is faster: a question must be as long as its answer."""

_GET_DESTINATIONS = 64 + 1024 + 64 + 4  # IP_VS_SO_GET_DESTS
_QUESTION = struct.Struct("=H2x4s2s2xII4x")  # protocol, address, port, firewall mark, the number of entries with room
_ENTRY = struct.Struct("=6s18xII64x")  # address and port, active and inactive connections
_COUNTS = struct.Struct("=24xII")
_NO_NAME = bytes(6)
"""No real server has this name: the kernel has not written the entries from here on."""
_NOT_THERE = frozenset({errno.ENOPROTOOPT, errno.EOPNOTSUPP, errno.EINVAL})
"""The errors of a kernel without this interface, or with a different one."""

Ask = Callable[[socket.socket, int, int, bytes, str], bytes]


class _Counted(Mapping[RealServerKey, Connections]):
    """An answer. Its entries are read on demand, mostly a single one: this takes 4 µs instead of 18 for fifteen."""

    __slots__ = ("_entries",)

    def __init__(self, entries: bytes) -> None:
        """``entries``: the entries, and zeros behind them."""
        self._entries = entries

    def __getitem__(self, key: RealServerKey) -> Connections:
        at = self._entries.find(key)
        while at > 0 and at % _ENTRY.size:  # the bytes of another entry, by chance
            at = self._entries.find(key, at + 1)
        if at < 0:
            raise KeyError(key)
        return Connections(*_COUNTS.unpack_from(self._entries, at))

    def __iter__(self) -> Iterator[RealServerKey]:
        names = (name for name, _, _ in _ENTRY.iter_unpack(self._entries))
        return map(RealServerKey, itertools.takewhile(_NO_NAME.__ne__, names))

    def __len__(self) -> int:
        return sum(1 for _ in self)


def _question(key: VirtualServerKey, room: int) -> bytes:
    if isinstance(key, FirewallMark):
        return _QUESTION.pack(key.protocol, key.address, bytes(2), key.mark, room)
    return _QUESTION.pack(key.protocol, key.address, key.port.to_bytes(2, "big"), 0, room)


class ConnectionReader:
    """Reads connections in the network namespace of the first thread that uses it. Only that thread may use it."""

    def __init__(self, ask: Ask = sockopt.ask) -> None:
        """``ask`` has the signature of ``sockopt.ask``."""
        self._ask = ask
        self._socket: socket.socket | None = None
        self._is_there = True

    def close(self) -> None:
        """Close the socket. The next question opens another."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def read(self, key: VirtualServerKey) -> Mapping[RealServerKey, Connections] | None:
        """The connections by real server, empty for a virtual server that does not exist; None: this interface cannot answer."""
        if not self._is_there or key.address.family is not Family.IPV4:
            return None
        action = f"count the connections of {key}"
        room = FIRST_ROOM
        while room <= MOST_ROOM:
            question = _question(key, room) + bytes(room * _ENTRY.size)
            try:
                answer = self._ask(self._open(), socket.IPPROTO_IP, _GET_DESTINATIONS, question, action)
            except (KernelError, OSError) as error:
                self._is_there = error.errno not in _NOT_THERE
                return {} if error.errno == errno.ESRCH else None
            if len(answer) != len(question):
                return None
            if not any(answer[-_ENTRY.size :]):  # the answer has left room, so it is complete
                return _Counted(answer[_QUESTION.size :])
            room *= 8
        return None

    def _open(self) -> socket.socket:
        if self._socket is None:
            self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        return self._socket
