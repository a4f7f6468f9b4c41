"""Readings of the IPVS table in parts: one question for all virtual servers of a family, then one for each.

IPv4 is read by ``getsockopt``: one system call for each question, and an answer that shows scheduler flags and thresholds. That
interface knows no other family, so IPv6 is read by netlink; and IPv4 as well on a kernel without the interface. Each family keeps
its reader for the life of the process. Layouts: include/uapi/linux/ip_vs.h (``ip_vs_getinfo``, ``ip_vs_get_services``,
``ip_vs_get_dests``, and the entries of both).

Nothing tells of a change of the table: IPVS sends no notifications and counts no generations. The list of all virtual servers
shows each change of a virtual server, and for IPv4 the number of its real servers. Weights only show in the answer about one.

Other calls may write between two parts. A virtual server that was written meanwhile waits for the next reading.
"""

import abc
import errno
import functools
import itertools
import socket
import struct
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, Final, Generic, TypeVar

from ipvsproxy.kernel.base import message, sockopt
from ipvsproxy.kernel.base.errors import KernelError
from ipvsproxy.kernel.ipvs import message as ipvs_message
from ipvsproxy.model.net import Address, Family, Protocol
from ipvsproxy.model.real_servers import NOT_MASQUERADED, EvenWeights, RealServerKey, Thresholds
from ipvsproxy.model.virtual_servers import (
    HASHED,
    PERSISTENT,
    FirewallMark,
    ObservedVirtualServer,
    VirtualServerKey,
    VirtualServerSettings,
)

PART_S = 0.003
"""The longest time of a part; the kernel thread may have other calls between two parts."""
CHECKED_EVERY = 16
"""The number of virtual servers between two looks at the clock."""
ROOM = 16
"""The first question has room for so many virtual servers more than there are."""

_GET_INFO, _GET_SERVICES, _GET_DESTINATIONS = 64 + 1024 + 64 + 1, 64 + 1024 + 64 + 2, 64 + 1024 + 64 + 4
_INFO = struct.Struct("=8xI")  # the number of virtual servers of IPv4
_ROOM = struct.Struct("=I4x")
_ENTRY = struct.Struct("=48s56x")  # all but the counters
_NAME = struct.Struct("=H2x4s2s2xI")  # protocol, address, port, firewall mark: how an entry and a question begin
_ROW = struct.Struct("=16s16sII4sI")  # name, scheduler, flags, timeout in seconds, netmask, number of real servers
_REAL_SERVER_ENTRY = struct.Struct("=24s72x")  # all but connections and counters
_SERVERS_AT = _NAME.size + _ROOM.size
_REAL_SERVER = struct.Struct("=6s2xIiII")  # address and port, forwarding method in flags, weight, upper and lower threshold
_METHODS = 0x7
"""The bits of a real server's flags that are its forwarding method; 0 is masquerading (include/uapi/linux/ip_vs.h,
IP_VS_CONN_F_FWD_MASK).
"""
_PROTOCOLS = {int(protocol): protocol for protocol in Protocol}
_NOT_THERE = frozenset({errno.ENOPROTOOPT, errno.EOPNOTSUPP, errno.EINVAL})
"""The errors of a kernel without this interface, or with a different one."""

_SERVICE = 1
# One layout for all dumps: a new layout has to walk its first message, which takes as long as a dump.
_SETTINGS = message.Layout(
    [
        message.Field((_SERVICE, kind), code)
        for kind, code in ((1, "H"), (2, "H"), (3, "16s"), (4, "2s"), (6, "s"), (7, "I"), (8, "I"), (9, "4s"))
    ]
)
_MARKED_SETTINGS = message.Layout(
    [message.Field((_SERVICE, kind), code) for kind, code in ((1, "H"), (5, "I"), (6, "s"), (7, "I"), (8, "I"), (9, "4s"))]
)

_WRITTEN: Final = -1
"""Stands for the hashes of a virtual server that was written since it was last returned."""
_BITS = 30
_SHORT = (1 << _BITS) - 1
"""Two hashes of so many bits fit in a number of two digits: of the row of a virtual server, and of its real servers."""

Ask = Callable[[socket.socket, int, int, bytearray, str], int]
Reading = dict[VirtualServerKey, ObservedVirtualServer | None]
"""Virtual servers that were read; None for one that does not exist."""
RealServerValues = tuple[RealServerKey, int, int, int, int]
"""A real server: key, flags with its forwarding method, weight, upper and lower threshold."""
Row = TypeVar("Row", bound=Hashable)


class FamilyReader(abc.ABC, Generic[Row]):
    """Reads the virtual servers of some families in the network namespace of the thread that uses this object.

    ``foreign`` is the number of virtual servers that the last reading left out: those of another protocol.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.foreign = 0
        self._clock = clock
        self._known: dict[Hashable, int] = {}
        """The hashes of each virtual server when it was last returned, by its name in a row."""
        self._written: dict[VirtualServerKey, bool] = {}
        self._passed: set[Hashable] = set()
        """The names of virtual servers that were written since the reading under way began."""

    @abc.abstractmethod
    def _rows(self) -> list[Row]:
        """Lists all virtual servers."""

    @abc.abstractmethod
    def _name(self, row: Row) -> Hashable:
        """Returns the name of a row's virtual server."""

    @abc.abstractmethod
    def _name_of(self, key: VirtualServerKey) -> Hashable:
        """Returns the name that a virtual server has in its row."""

    @abc.abstractmethod
    def _key(self, name: Any) -> VirtualServerKey | None:
        """Returns the virtual server with this name; None for one of another protocol."""

    @abc.abstractmethod
    def _real_servers(self, row: Row) -> Hashable | None:
        """Reads the real servers of a virtual server, as the kernel has them; None if the virtual server is gone."""

    @abc.abstractmethod
    def _interpret(self, key: VirtualServerKey, row: Row, real_servers: Any) -> ObservedVirtualServer | None:
        """Interprets what was read of a virtual server; None if it is gone."""

    def note(self, key: VirtualServerKey, *, is_there: bool) -> None:
        """Notes that a virtual server, or a real server of it, has perhaps been written; or that it was removed."""
        self._written[key] = is_there

    def forget(self) -> None:
        """Makes the next whole reading return every virtual server."""
        self._note_written()
        self._known = dict.fromkeys(self._known, _WRITTEN)

    def read(self, *, whole: bool) -> Iterator[Reading]:
        """Reads, part by part, the virtual servers that have changed since they were last returned, or were written meanwhile.

        Unless ``whole``, real servers are only read where the row of their virtual server has changed; and what was written here
        waits for a whole reading.

        Raises:
            KernelError: the table could not be read. The parts before it are valid.
        """
        self._note_written()
        self._passed.clear()
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
            if (number % CHECKED_EVERY == 0 and self._clock() >= ends_s) or number == len(rows):
                self._known |= hashes  # only now: after an error, what it shows must be read again
                yield reading
                self._note_written()
                reading, hashes = {}, {}
                ends_s = self._clock() + PART_S
        if met < before:
            yield self._take_gone({self._name(row) for row in rows})

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
    """Reads the virtual servers of IPv4 by ``getsockopt``. ``ask`` is as ``sockopt.ask_in``.

    ``read_one`` reads one virtual server by netlink; None if it does not exist.
    """

    def __init__(
        self,
        read_one: Callable[[VirtualServerKey], ObservedVirtualServer | None],
        ask: Ask = sockopt.ask_in,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(clock)
        self._read_one = read_one
        self._ask = ask
        self._socket: socket.socket | None = None

    def close(self) -> None:
        """Closes the socket. The next question opens another."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def is_there(self) -> bool:
        """Whether the kernel has this interface. Other errors prove nothing, and are met again by a reading."""
        try:
            self._answer(_GET_INFO, bytearray(_INFO.size))
        except KernelError as error:
            if error.errno in _NOT_THERE:
                self.close()
                return False
        return True

    def _rows(self) -> list[bytes]:
        (count,) = _INFO.unpack(self._answer(_GET_INFO, bytearray(_INFO.size)))
        room = count + ROOM
        while True:
            question = bytearray(_ROOM.size + room * _ENTRY.size)
            _ROOM.pack_into(question, 0, room)
            answer = self._answer(_GET_SERVICES, question)
            rows = [row for (row,) in _ENTRY.iter_unpack(answer[_ROOM.size :])]
            if not any(rows[-1]):  # there was room left, so the answer is complete
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
        protocol = _PROTOCOLS.get(number)
        return VirtualServerKey(protocol, Address(address), int.from_bytes(port, "big")) if protocol else None

    def _real_servers(self, row: bytes) -> bytes | None:
        *_, count = _ROW.unpack(row)
        if not count:
            return b""
        question = bytearray(_SERVERS_AT + count * _REAL_SERVER_ENTRY.size)
        question[: _NAME.size] = row[: _NAME.size]
        _ROOM.pack_into(question, _NAME.size, count)
        try:
            answer = self._answer(_GET_DESTINATIONS, question)
        except KernelError as error:
            if error.errno == errno.ESRCH:
                return None
            raise
        return b"".join([entry for (entry,) in _REAL_SERVER_ENTRY.iter_unpack(answer[_SERVERS_AT:])])

    def _interpret(self, key: VirtualServerKey, row: bytes, real_servers: bytes) -> ObservedVirtualServer | None:
        _, scheduler, flags, timeout_s, netmask, _ = _ROW.unpack(row)
        servers = list(_REAL_SERVER.iter_unpack(real_servers))
        if servers and not any(servers[-1][0]):
            # There are fewer than a moment ago; or some are of IPv6, which only tunnels can have.
            return self._read_one(key)
        settings = settings_of(Family.IPV4, scheduler, flags, timeout_s, netmask)
        servers.reverse()  # the kernel has the last added one first
        return observed(settings, [(RealServerKey(name), *values) for name, *values in servers])

    def _answer(self, option: int, question: bytearray) -> memoryview:
        """The answer, which is written over the question."""
        if self._socket is None:
            try:
                self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            except OSError as error:
                raise KernelError(action="read the IPVS table", errno=error.errno or errno.EIO) from error
        if self._ask(self._socket, socket.IPPROTO_IP, option, question, "read the IPVS table") != len(question):
            raise KernelError(action="read the IPVS table", detail="the answer is incomplete")
        return memoryview(question)


NetlinkName = tuple[int, int, bytes, bytes] | tuple[int, int]
"""Family, protocol, address and port of a virtual server; or its family and mark."""
NetlinkRow = tuple[NetlinkName, bytes, int, int, bytes]
"""The name of a virtual server, and its scheduler, flags, timeout in seconds and netmask."""


class NetlinkReader(FamilyReader[NetlinkRow]):
    """Reads the virtual servers of some families by netlink.

    ``list_rows`` lists those of all families, ``read_real_servers`` those of one; none if it does not exist.
    """

    def __init__(
        self,
        families: frozenset[Family],
        list_rows: Callable[[], Iterable[NetlinkRow]],
        read_real_servers: Callable[[VirtualServerKey], Iterable[RealServerValues]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(clock)
        self._families = families
        self._list_rows = list_rows
        self._read_real_servers = read_real_servers

    def _rows(self) -> list[NetlinkRow]:
        return [row for row in self._list_rows() if row[0][0] in self._families]

    def _name(self, row: NetlinkRow) -> NetlinkName:
        return row[0]

    def _name_of(self, key: VirtualServerKey) -> NetlinkName:
        family = int(key.address.family)
        if isinstance(key, FirewallMark):
            return family, key.mark
        return family, int(key.protocol), bytes(key.address).ljust(16, b"\0"), key.port.to_bytes(2, "big")

    def _key(self, name: NetlinkName) -> VirtualServerKey | None:
        return key_of(name)

    def _real_servers(self, row: NetlinkRow) -> Sequence[RealServerValues] | None:
        key = key_of(row[0])
        return tuple(self._read_real_servers(key)) if key is not None else None

    def _interpret(
        self, key: VirtualServerKey, row: NetlinkRow, real_servers: Sequence[RealServerValues]
    ) -> ObservedVirtualServer | None:
        return observed(settings_of(key.address.family, *row[1:]), real_servers)


def rows_of(parts: Iterable[tuple[bytes, int, int]]) -> Iterator[NetlinkRow]:
    """The rows in messages about virtual servers."""
    for part in parts:
        if (values := _SETTINGS.read(*part)) is not None:
            yield values[:4], *values[4:]
        elif (values := _MARKED_SETTINGS.read(*part)) is not None:
            yield values[:2], *values[2:]


def key_of(name: NetlinkName) -> VirtualServerKey | None:
    """The virtual server with this name in a message; None for one of another protocol."""
    match name:
        case (family, mark):
            return FirewallMark.of(Family(family), mark)
        case (family, number, packed, port):
            protocol = _PROTOCOLS.get(number)
            return VirtualServerKey(protocol, address_of(family, packed), int.from_bytes(port, "big")) if protocol else None


def address_of(family: int, packed: bytes) -> Address:
    """The address in the attribute of a message, which has 16 bytes in both families."""
    return Address(packed[:4] if family == Family.IPV4 else packed)


@functools.lru_cache(maxsize=1024)
def settings_of(family: Family, scheduler: bytes, flags: int, timeout_s: int, netmask: bytes) -> VirtualServerSettings:
    """The settings in a row; one object for all virtual servers with equal settings."""
    name = scheduler.split(b"\0", 1)[0].decode(errors="replace")
    prefix_length = ipvs_message.network_length(family, netmask) if flags & PERSISTENT else 0
    return VirtualServerSettings(name, flags & ~HASHED, timeout_s, prefix_length)


def observed(settings: VirtualServerSettings, real_servers: Sequence[RealServerValues]) -> ObservedVirtualServer:
    """The virtual server with these real servers, in their order."""
    if all((method & _METHODS, weight, upper, lower) == (0, 1, 0, 0) for _, method, weight, upper, lower in real_servers):
        return ObservedVirtualServer(settings, EvenWeights.of([server[0] for server in real_servers]))
    weights = {key: NOT_MASQUERADED if method & _METHODS else weight for key, method, weight, *_ in real_servers}
    thresholds = {key: Thresholds(upper, lower) for key, _, _, upper, lower in real_servers if upper or lower}
    return ObservedVirtualServer(settings, weights, thresholds=thresholds or None)
