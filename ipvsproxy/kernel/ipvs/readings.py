"""Reads the IPVS table in parts: one query for all virtual servers of a family, then one query for each virtual server.

IPv4 is read by ``getsockopt``: each query takes one system call, and the answers contain scheduler flags and thresholds. IPv6 is
read by netlink, and so is IPv4 if the kernel has no ``getsockopt`` interface for IPVS. Each family keeps the same reader until
the process ends. The layouts of answers are from include/uapi/linux/ip_vs.h (``ip_vs_getinfo``, ``ip_vs_get_services`` and
``ip_vs_get_dests``).

The kernel does not report changes of the IPVS table, because IPVS neither sends notifications nor counts generations. The list of
all virtual servers shows each change of a virtual server and, for IPv4, the number of its real servers. Only the query for a
single virtual server shows changes of the weights of its real servers.

Other methods may write to the table after one part has been read and before the next part is read. A virtual server that was
written between two parts is read again next time.
"""

import abc
import errno
import itertools
import socket
import struct
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, Generic, TypeVar

from ipvsproxy.kernel.base import sockets
from ipvsproxy.kernel.base.errors import KernelError, Tolerated
from ipvsproxy.kernel.ipvs import rows as ipvs_rows
from ipvsproxy.model.net import PROTOCOL_BY_NUMBER, Address, Family
from ipvsproxy.model.real_servers import RealServerKey
from ipvsproxy.model.virtual_servers import (
    ConnectionCounts,
    FirewallMark,
    ObservedVirtualServer,
    VirtualServerKey,
)

PART_S = 0.003
"""The longest time for which one part of the table is read; the kernel thread may run other calls between two parts."""
CHECKED_EVERY = 16
"""The number of virtual servers that are read before the clock is read again."""
ROOM = 16
"""The number of virtual servers for which the buffer has room beyond the kernel's count. This room is needed because virtual
servers may be added before the kernel answers."""
FIRST_ROOM = 32
"""The number of real servers for which the first query about connections has room. If the answer fills the buffer, the query is
repeated with a larger buffer.
"""

_GET_INFO, _GET_SERVICES, _GET_DESTINATIONS = 64 + 1024 + 64 + 1, 64 + 1024 + 64 + 2, 64 + 1024 + 64 + 4
_INFO = struct.Struct("=8xI")  # the number of IPv4 virtual servers
_ROOM = struct.Struct("=I4x")
_ENTRY = struct.Struct("=48s56x")  # The entry of a virtual server, without its counters.
_NAME = struct.Struct("=H2x4s2s2xI")  # Protocol, address, port and mark, at the start of entries and queries.
_ROW = struct.Struct("=16s16sII4sI")  # Name, scheduler, flags, timeout in seconds, netmask, number of real servers.
_REAL_SERVER_ENTRY = struct.Struct("=24s72x")  # The entry of a real server, without its connections and counters.
_COUNTED_ENTRY = struct.Struct("=6s18xII64x")  # Address and port, then active and inactive connections.
_CONNECTIONS = struct.Struct("=24xII64x")  # The numbers of active and inactive connections.
_SERVERS_AT = _NAME.size + _ROOM.size
_REAL_SERVER = struct.Struct("=6s2xIiII")  # Address and port, forwarding method in flags, weight, both thresholds.
_NOT_THERE = frozenset({errno.ENOPROTOOPT, errno.EOPNOTSUPP, errno.EINVAL})
"""The errors of a kernel that does not have this ``getsockopt`` interface, or that has a different version of the interface."""

_WRITTEN: Final = -1
"""A value that is stored instead of a virtual server's hashes. It means that the next ``read`` with ``whole`` must return the
virtual server, usually because this process has written the virtual server."""
_BITS = 30
_SHORT = (1 << _BITS) - 1
"""The mask for one hash of 30 bits. The hash of a virtual server's row and the hash of its real servers together fit into a
Python integer of two internal digits."""

Ask = Callable[[socket.socket, int, int, bytearray, str], int]
Reading = dict[VirtualServerKey, ObservedVirtualServer | None]
"""Virtual servers that were read; None for a virtual server that does not exist."""
Row = TypeVar("Row", bound=Hashable)


class FamilyReader(abc.ABC, Generic[Row]):
    """Reads the virtual servers of some IP families in the network namespace of the thread that uses this object.

    ``foreign`` is the number of virtual servers that were left out at the last read, because no Service can have their protocol.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.foreign = 0
        self.adds_connections = False
        """Whether each reading with ``whole`` adds up the connections of all real servers."""
        self.connections_of_all: ConnectionCounts | None = None
        """The sum of the connections of all real servers, from the last call of ``read`` in which ``whole`` was true. None means
        that this call did not add up connections."""
        self._added: list[int] | None = None
        """The active and the inactive connections that the reading in progress has added up so far."""
        self._clock = clock
        self._known: dict[Hashable, int] = {}
        """The hashes that each virtual server had when it was last returned; the key is the name in the virtual server's row."""
        self._written: dict[VirtualServerKey, bool] = {}
        self._passed: set[Hashable] = set()
        """The names of virtual servers that were written since the current reading began."""

    @abc.abstractmethod
    def connections(self, key: VirtualServerKey) -> Mapping[RealServerKey, ConnectionCounts]:
        """The connections of a virtual server's real servers; the result is empty if the virtual server does not exist.

        Raises:
            KernelError: the connections could not be read.
        """

    @abc.abstractmethod
    def _rows(self) -> list[Row]:
        """Lists all virtual servers."""

    @abc.abstractmethod
    def _name(self, row: Row) -> Hashable:
        """Returns the name of the virtual server that a row describes."""

    @abc.abstractmethod
    def _name_of(self, key: VirtualServerKey) -> Hashable:
        """Returns the name by which a row identifies the given virtual server."""

    @abc.abstractmethod
    def _key(self, name: Any) -> VirtualServerKey | None:
        """Returns the key of the virtual server with the given name; None if no Service can have its protocol."""

    @abc.abstractmethod
    def _real_servers(self, row: Row) -> Hashable | None:
        """Reads the real servers of a virtual server, in the kernel's format; None means that the virtual server is gone."""

    @abc.abstractmethod
    def _interpret(self, key: VirtualServerKey, row: Row, real_servers: Any) -> ObservedVirtualServer | None:
        """Converts the kernel's data about a virtual server; None means that the virtual server has been removed."""

    def note(self, key: VirtualServerKey, *, is_there: bool) -> None:
        """Records that a virtual server may have been written or, if ``is_there`` is false, that it was removed."""
        self._written[key] = is_there

    def forget(self) -> None:
        """Makes the next call of ``read(whole=True)`` return every virtual server."""
        self._note_written()
        self._known = dict.fromkeys(self._known, _WRITTEN)

    def read(self, *, whole: bool) -> Iterator[Reading]:
        """Reads, in parts, each virtual server that has changed, or was written by us, since ``read`` last returned it.

        If ``whole`` is false, real servers are read only if the row of their virtual server has changed. A virtual server that
        this process has written is returned only by a later call whose ``whole`` is true.

        Raises:
            KernelError: the table could not be read. The parts of the table that were returned before the error are valid.
        """
        self._note_written()
        self._passed.clear()
        if whole:
            if self._added is not None:
                self.connections_of_all = None  # the previous read was not completed
            self._added = [0, 0] if self.adds_connections else None
        before, met, self.foreign = len(self._known), 0, 0
        rows = self._rows()
        reading, hashes = Reading(), dict[Hashable, int]()
        ends_s = self._clock() + PART_S
        for number, row in enumerate(rows, 1):
            name = self._name(row)
            known = self._known.get(name)
            met += known is not None
            short = hash(row) & _SHORT
            waits = not whole and known is not None and (known == _WRITTEN or known >> _BITS == short)
            if not waits and name not in self._passed:
                key = self._key(name)
                if key is None:
                    self.foreign += 1
                elif (real_servers := self._real_servers(row)) is not None:
                    both = short << _BITS | hash(real_servers) & _SHORT
                    if both != known:
                        reading[key] = self._interpret(key, row, real_servers)
                        hashes[name] = both if reading[key] else _WRITTEN
            elif not waits and self._added is not None:
                self._real_servers(row)  # the result is not needed: this call only adds connections to the total
            if (number % CHECKED_EVERY == 0 and self._clock() >= ends_s) or number == len(rows):
                self._known |= hashes  # hashes are recorded only at the end of a part, so that a part with an error is read again
                yield reading
                self._note_written()
                reading, hashes = {}, {}
                ends_s = self._clock() + PART_S
        if met < before:
            yield self._take_gone({self._name(row) for row in rows})
        if whole:
            self.connections_of_all = ConnectionCounts(*self._added) if self._added else None
            self._added = None

    def _add(self, connections: Iterable[tuple[int, ...]]) -> None:
        """Adds the active and inactive connections of a virtual server's real servers to the total, if a total was requested."""
        if (added := self._added) is not None:
            for active, inactive in connections:
                added[0] += active
                added[1] += inactive

    def _take_gone(self, present: set[Hashable]) -> Reading:
        gone = self._known.keys() - present - self._passed
        for name in gone:
            del self._known[name]
        return {key: None for name in gone if (key := self._key(name)) is not None}

    def _note_written(self) -> None:
        for key, is_there in self._written.items():
            name = self._name_of(key)
            self._passed.add(name)
            if is_there:
                self._known[name] = _WRITTEN
            else:
                self._known.pop(name, None)
        self._written.clear()


class SockoptReader(FamilyReader[bytes]):
    """Reads the IPv4 virtual servers by ``getsockopt``. ``ask`` has the same arguments and result as ``sockets.ask_in``.

    ``read_one`` reads one virtual server by netlink, and returns None if the virtual server does not exist.
    """

    def __init__(
        self,
        read_one: Callable[[VirtualServerKey], ObservedVirtualServer | None],
        ask: Ask = sockets.ask_in,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(clock)
        self._read_one = read_one
        self._ask = ask
        self._socket: socket.socket | None = None

    def close(self) -> None:
        """Closes the socket. The next query after this call opens a new socket."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def is_there(self) -> bool:
        """Whether the kernel supports this ``getsockopt`` interface.

        Only an error in ``_NOT_THERE`` proves that the interface is missing; any other error is reported when the table is read
        next.
        """
        try:
            self._answer(_GET_INFO, bytearray(_INFO.size))
        except KernelError as error:
            if error.errno in _NOT_THERE:
                self.close()
                return False
        return True

    def connections(self, key: VirtualServerKey) -> Mapping[RealServerKey, ConnectionCounts]:
        """As in ``FamilyReader``.

        IPv6 real servers are left out. An IPv4 virtual server can have an IPv6 real server only with forwarding by tunnel, and
        ipvsproxy never adds such a real server.
        """
        room = FIRST_ROOM
        while (entries := self._destinations(self._name_of(key), room)) is not None:
            if not any(entries[-_COUNTED_ENTRY.size :]):  # the last entry is empty, so the answer is complete
                counted = itertools.takewhile(lambda one: any(one[0]), _COUNTED_ENTRY.iter_unpack(entries))
                return {RealServerKey(name): ConnectionCounts(*counts) for name, *counts in counted}
            room *= 8
        return {}

    def _rows(self) -> list[bytes]:
        (count,) = _INFO.unpack(self._answer(_GET_INFO, bytearray(_INFO.size)))
        room = count + ROOM
        while True:
            question = bytearray(_ROOM.size + room * _ENTRY.size)
            _ROOM.pack_into(question, 0, room)
            answer = self._answer(_GET_SERVICES, question)
            rows = [row for (row,) in _ENTRY.iter_unpack(answer[_ROOM.size :])]
            if not any(rows[-1]):  # the last entry is empty, so the answer is complete
                return list(itertools.takewhile(any, rows))
            room *= 2

    def _name(self, row: bytes) -> bytes:
        return row[: _NAME.size]

    def _name_of(self, key: VirtualServerKey) -> bytes:
        if isinstance(key, FirewallMark):
            return _NAME.pack(key.protocol, key.address, bytes(2), key.mark)
        return _NAME.pack(key.protocol, key.address, key.port.to_bytes(2, "big"), 0)

    def _key(self, name: bytes) -> VirtualServerKey | None:
        number, address, port, mark = _NAME.unpack(name)
        if mark:
            return FirewallMark.of(Family.IPV4, mark)
        protocol = PROTOCOL_BY_NUMBER.get(number)
        return VirtualServerKey(protocol, Address(address), int.from_bytes(port, "big")) if protocol else None

    def _real_servers(self, row: bytes) -> bytes | None:
        *_, count = _ROW.unpack(row)
        if not count:
            return b""
        entries = self._destinations(row[: _NAME.size], count)
        if entries is None:
            return None
        self._add(_CONNECTIONS.iter_unpack(entries))
        return b"".join([entry for (entry,) in _REAL_SERVER_ENTRY.iter_unpack(entries)])

    def _destinations(self, name: bytes, room: int) -> memoryview | None:
        """The entries of at most ``room`` real servers, followed by zeros; None means that the virtual server does not exist."""
        question = bytearray(_SERVERS_AT + room * _REAL_SERVER_ENTRY.size)
        question[: _NAME.size] = name
        _ROOM.pack_into(question, _NAME.size, room)
        with Tolerated(errno.ESRCH):
            return self._answer(_GET_DESTINATIONS, question)[_SERVERS_AT:]
        return None

    def _interpret(self, key: VirtualServerKey, row: bytes, real_servers: bytes) -> ObservedVirtualServer | None:
        _, scheduler, flags, timeout_s, netmask, _ = _ROW.unpack(row)
        servers = list(_REAL_SERVER.iter_unpack(real_servers))
        if servers and not any(servers[-1][0]):
            # Either the virtual server has fewer real servers than a moment ago, or some real servers have IPv6 addresses, which
            # is possible only with tunnels.
            return self._read_one(key)
        settings = ipvs_rows.settings_of(Family.IPV4, scheduler, flags, timeout_s, netmask)
        servers.reverse()  # the kernel lists the most recently added real server first
        return ipvs_rows.observed(settings, [(RealServerKey(name), *values) for name, *values in servers])

    def _answer(self, option: int, question: bytearray) -> memoryview:
        """Sends a query to the kernel, and returns the answer. The answer overwrites the query in ``question``."""
        if self._socket is None:
            try:
                self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            except OSError as error:
                raise KernelError(action="read the IPVS table", errno=error.errno or errno.EIO) from error
        if self._ask(self._socket, socket.IPPROTO_IP, option, question, "read the IPVS table") != len(question):
            raise KernelError(action="read the IPVS table", detail="the answer is incomplete")
        return memoryview(question)


class NetlinkReader(FamilyReader[ipvs_rows.NetlinkRow]):
    """Reads the virtual servers of some IP families by netlink."""

    def __init__(
        self, families: frozenset[Family], table: ipvs_rows.NetlinkTable, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(clock)
        self._families = families
        self._table = table

    def connections(self, key: VirtualServerKey) -> Mapping[RealServerKey, ConnectionCounts]:
        """As in ``FamilyReader``."""
        return {row.key: row.connections for row in self._table.real_servers(key)}

    def _rows(self) -> list[ipvs_rows.NetlinkRow]:
        return [row for row in self._table.rows() if row[0][0] in self._families]

    def _name(self, row: ipvs_rows.NetlinkRow) -> ipvs_rows.NetlinkName:
        return row[0]

    def _name_of(self, key: VirtualServerKey) -> ipvs_rows.NetlinkName:
        family = int(key.address.family)
        if isinstance(key, FirewallMark):
            return family, key.mark
        return family, int(key.protocol), bytes(key.address).ljust(16, b"\0"), key.port.to_bytes(2, "big")

    def _key(self, name: ipvs_rows.NetlinkName) -> VirtualServerKey | None:
        return ipvs_rows.key_of(name)

    def _real_servers(self, row: ipvs_rows.NetlinkRow) -> Sequence[ipvs_rows.RealServerValues] | None:
        key = ipvs_rows.key_of(row[0])
        if key is None:
            return None
        real_servers = self._table.real_servers(key)
        self._add(one.connections for one in real_servers)
        return tuple(one[:5] for one in real_servers)

    def _interpret(
        self, key: VirtualServerKey, row: ipvs_rows.NetlinkRow, real_servers: Sequence[ipvs_rows.RealServerValues]
    ) -> ObservedVirtualServer | None:
        return ipvs_rows.observed(ipvs_rows.settings_of(key.address.family, *row[1:]), real_servers)
