"""The connections of one virtual server's real servers, by one system call.

A netlink dump of the same takes three, and its answer is three times as long; in a storm of replaced endpoints these questions
were the largest part of what the kernel's thread did. The older interface knows IPv4 only, and may not be there one day: netlink
answers whatever this does not. A real server of IPv6 in a virtual server of IPv4, which only a tunnel has and never is ours, is
left out. Layouts: include/uapi/linux/ip_vs.h (``ip_vs_get_dests``, ``ip_vs_dest_entry``).
"""

import errno
import itertools
import socket
import struct
from collections.abc import Callable, Iterator, Mapping

from ipvsproxy.kernel import sockopt
from ipvsproxy.kernel.errors import KernelError
from ipvsproxy.model.kernel import Connections, VirtualServerKey
from ipvsproxy.model.net import Family
from ipvsproxy.model.real_servers import RealServerKey

FIRST_ROOM = 32
"""For so many real servers there is room in the first question; where that is filled, it is asked again with more."""
MOST_ROOM = 2048
"""Of a virtual server with more than these netlink is the quicker one: a question holds all the room that the answer needs."""

_GET_DESTINATIONS = 64 + 1024 + 64 + 4  # IP_VS_SO_GET_DESTS
_QUESTION = struct.Struct("=H2x4s2s6xI4x")  # protocol, address, port; no firewall mark; how many there is room for
_ENTRY = struct.Struct("=6s18xII64x")  # address and port, active and inactive connections
_COUNTS = struct.Struct("=24xII")
_NO_NAME = bytes(6)
"""No real server has this address: what follows was not written."""
_NOT_THERE = frozenset({errno.ENOPROTOOPT, errno.EOPNOTSUPP, errno.EINVAL})
"""Of a kernel that has no such interface, or another one."""

Ask = Callable[[socket.socket, int, int, bytes, str], bytes]


class _Counted(Mapping[RealServerKey, Connections]):
    """An answer, of which no more is read than somebody asks for: nearly always one real server of ten or more."""

    __slots__ = ("_entries",)

    def __init__(self, entries: bytes) -> None:
        """``entries``: behind them is nothing but zeros."""
        self._entries = entries

    def __getitem__(self, key: RealServerKey) -> Connections:
        at = self._entries.find(key)
        while at > 0 and at % _ENTRY.size:  # it stands inside an entry by chance
            at = self._entries.find(key, at + 1)
        if at < 0:
            raise KeyError(key)
        return Connections(*_COUNTS.unpack_from(self._entries, at))

    def __iter__(self) -> Iterator[RealServerKey]:
        names = (name for name, _, _ in _ENTRY.iter_unpack(self._entries))
        return map(RealServerKey, itertools.takewhile(_NO_NAME.__ne__, names))

    def __len__(self) -> int:
        return sum(1 for _ in self)


class ConnectionReader:
    """Asks in the network namespace of the thread that asks first, and belongs to that thread."""

    def __init__(self, ask: Ask = sockopt.ask) -> None:
        """``ask`` is as ``sockopt.ask``."""
        self._ask = ask
        self._socket: socket.socket | None = None
        self._is_there = True

    def close(self) -> None:
        """Close the socket; the next question opens another."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def read(self, key: VirtualServerKey) -> Mapping[RealServerKey, Connections] | None:
        """The connections by real server, empty for a virtual server that does not exist; None: ask in another way."""
        if not self._is_there or key.address.family is not Family.IPV4:
            return None
        action = f"count the connections of {key}"
        room = FIRST_ROOM
        while room <= MOST_ROOM:
            question = _QUESTION.pack(key.protocol, key.address, key.port.to_bytes(2, "big"), room) + bytes(room * _ENTRY.size)
            try:
                answer = self._ask(self._open(), socket.IPPROTO_IP, _GET_DESTINATIONS, question, action)
            except (KernelError, OSError) as error:
                self._is_there = error.errno not in _NOT_THERE
                return {} if error.errno == errno.ESRCH else None
            if len(answer) != len(question):
                return None
            if not any(answer[-_ENTRY.size :]):  # there was room for all of them
                return _Counted(answer[_QUESTION.size :])
            room *= 8
        return None

    def _open(self) -> socket.socket:
        if self._socket is None:
            self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        return self._socket
