"""Repeated readings of the IPVS table by ``getsockopt``, in parts: one call for all virtual servers, then one for each.

This older interface of IPVS copies numbers, where ``/proc/net/ip_vs`` prints text and walks the table from its beginning for each
page: 10,000 virtual servers of ten take 0.2 s instead of 0.5 to 1.5 on the test kernel, of which the system calls are nearly all,
and the time grows with the size of the table, not with its square. It leaves out no virtual server of this network namespace, and
shows scheduler flags and thresholds. But it only knows IPv4: ``table`` reads a table with virtual servers of IPv6. Layouts:
include/uapi/linux/ip_vs.h (``ip_vs_getinfo``, ``ip_vs_get_services``, ``ip_vs_get_dests``, and the entries of both).

Nothing tells of a change of the table: IPVS sends no notifications and counts no generations. The entries of the virtual servers,
a call of 5 ms for 10,000, show each change of a virtual server, and each added or removed real server by their number. A weight,
or a real server in place of another, only shows in the entries of real servers, and in the pages of the file: where these are
as before, the questions are spared (see ``pages``).

Other calls may write between two parts. A virtual server that was written meanwhile waits for the next reading.
"""

import collections
import errno
import itertools
import socket
import struct
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Final

from ipvsproxy.kernel.base import modules, sockopt
from ipvsproxy.kernel.base.errors import KernelError
from ipvsproxy.kernel.ipvs import message as ipvs_message
from ipvsproxy.kernel.ipvs import pages as ipvs_pages
from ipvsproxy.kernel.ipvs import table as ipvs_table
from ipvsproxy.kernel.ipvs.pages import PageReader
from ipvsproxy.model.net import Address, Family, Protocol
from ipvsproxy.model.real_servers import NOT_MASQUERADED, EvenWeights, RealServerKey, Thresholds
from ipvsproxy.model.virtual_servers import (
    HAS_THRESHOLDS,
    HASHED,
    PERSISTENT,
    FirewallMark,
    ObservedVirtualServer,
    VirtualServerKey,
    VirtualServerSettings,
)

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
_SCHEDULER_SIZE = 16
_FLAGS, _FLAGS_AT = struct.Struct("=I"), _NAME.size + _SCHEDULER_SIZE
_COUNT, _COUNT_AT = struct.Struct("=I"), _ROW.size - 4  # the number of real servers
_NO_NAME = bytes(_NAME.size)
_METHODS = 0x7
_PROTOCOLS = {int(protocol): protocol for protocol in Protocol}
_NOT_THERE = frozenset({errno.ENOPROTOOPT, errno.EOPNOTSUPP, errno.EINVAL})
"""The errors of a kernel without this interface, or with a different one."""

_WRITTEN: Final = -1
"""Stands for the hashes of a virtual server that was written since it was last returned."""
_BITS = 30
_SHORT = (1 << _BITS) - 1
"""Two hashes of so many bits fit in a number of two digits: of the entry of a virtual server, and of its real servers."""

Ask = Callable[[socket.socket, int, int, bytearray, str], int]


class EntryReader:
    """Reads the table in the network namespace of the first thread that uses it. Only that thread may use it.

    ``foreign`` is the number of virtual servers that the last reading left out: those of another protocol.
    """

    def __init__(
        self,
        read_one: Callable[[VirtualServerKey], ObservedVirtualServer | None],
        ask: Ask = sockopt.ask_in,
        clock: Callable[[], float] = time.monotonic,
        scheduler_uses: Callable[[], Mapping[str, int] | None] = modules.scheduler_uses,
        pages: PageReader | None = None,
    ) -> None:
        """``read_one`` reads one virtual server by netlink; None if it does not exist. ``ask`` is as ``sockopt.ask_in``.

        ``scheduler_uses`` is as in ``modules``. ``pages`` spare questions.
        """
        self._pages = pages
        self._scheduler_uses = scheduler_uses
        self.foreign = 0
        self._read_one = read_one
        self._ask = ask
        self._clock = clock
        self._socket: socket.socket | None = None
        self._known: dict[bytes, int] = {}
        """The hashes of each virtual server when it was last returned, by its name in an entry."""
        self._written: dict[VirtualServerKey, bool] = {}
        self._passed: set[bytes] = set()
        """The names of virtual servers that were written since the reading under way began."""

    def close(self) -> None:
        """Close the socket. The next question opens another."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    @property
    def size(self) -> int:
        """The known number of virtual servers."""
        return max(len(self._known), len(self._written))

    def is_there(self) -> bool:
        """Whether the kernel has this interface. Other errors prove nothing, and are met again by a reading."""
        try:
            self._answer(_GET_INFO, bytearray(_INFO.size))
        except KernelError as error:
            if error.errno in _NOT_THERE:
                self.close()
                return False
        return True

    def shows_all(self) -> bool:
        """Whether the kernel certainly has no virtual servers but those of this interface: they are all uses of schedulers.

        One of IPv6 without a scheduler, which takes no new connections, does not show. False where that is unknown, and also if
        another network namespace has virtual servers.
        """
        uses = self._scheduler_uses()
        if uses is None:
            return False
        try:
            shown = collections.Counter(row[_NAME.size : _NAME.size + _SCHEDULER_SIZE] for row in self._rows())
        except KernelError:
            return False
        names = {name.split(b"\0", 1)[0].decode(errors="replace"): count for name, count in shown.items()}
        return names == {name: count for name, count in uses.items() if count}

    def note(self, key: VirtualServerKey, *, is_there: bool) -> None:
        """Note that a virtual server of IPv4, or a real server of it, has perhaps been written; or that it was removed."""
        self._written[key] = is_there

    def forget(self) -> None:
        """Make the next whole reading return every virtual server, and every reading those that are gone."""
        self._note_written()
        self._known = dict.fromkeys(self._known, _WRITTEN)

    def read(self, *, whole: bool) -> Iterator[ipvs_table.Reading]:
        """Read, part by part, the virtual servers that have changed since they were last returned, or were written meanwhile.

        Unless ``whole``, real servers are only read where the number of real servers, or anything else of the virtual server,
        has changed; and what was written here waits for a whole reading.

        Raises:
            KernelError: the table could not be read. The parts before it are valid.
        """
        self._note_written()
        self._passed.clear()
        before, met, foreign = len(self._known), 0, 0
        rows = self._rows()
        spared: set[bytes] = set()
        if whole and self._pages is not None:
            yield from self._read_pages(self._pages, rows, spared)
        reading: ipvs_table.Reading = {}
        ends_s = self._clock() + ipvs_table.PART_S
        for number, row in enumerate(rows, 1):
            name = row[: _NAME.size]
            known = self._known.get(name)
            met += known is not None
            is_same = known is not None and known != _WRITTEN and known >> _BITS == hash(row) & _SHORT
            if is_same and whole:
                is_same = name in spared and not _has_thresholds(row)
            elif known == _WRITTEN:
                is_same = not whole
            if name not in self._passed and not is_same:
                key = _key(name)
                if key is None:
                    foreign += 1
                elif (entries := self._entries(row)) is not None:
                    hashes = (hash(row) & _SHORT) << _BITS | hash(entries) & _SHORT
                    if hashes != known:
                        observed = self._interpret(key, row, entries)
                        self._known[name] = hashes if observed else _WRITTEN
                        reading[key] = observed
            if (number % ROOM == 0 and self._clock() >= ends_s) or number == len(rows):
                yield reading
                self._note_written()
                reading, ends_s = {}, self._clock() + ipvs_table.PART_S
        self.foreign = foreign
        if whole and self._pages is not None:
            self._pages.keep()
        if met < before:
            yield from self._gone(rows)

    def _read_pages(self, pages: PageReader, rows: list[bytes], spared: set[bytes]) -> Iterator[ipvs_table.Reading]:
        """Gather the names of virtual servers that need not be asked for, with pauses for other calls."""
        if not self._known:  # a start reads everything once, and does not wait for pages as well
            pages.forget()
            return
        if not ipvs_pages.are_cheaper(len(rows), sum(_COUNT.unpack_from(row, _COUNT_AT)[0] for row in rows)):
            pages.forget()
            return
        ends_s = self._clock() + ipvs_table.PART_S
        for names in pages.read():
            spared.update(names)
            if self._clock() >= ends_s:
                yield {}
                self._note_written()
                ends_s = self._clock() + ipvs_table.PART_S

    def _gone(self, rows: list[bytes]) -> Iterator[ipvs_table.Reading]:
        gone = self._known.keys() - {row[: _NAME.size] for row in rows} - self._passed
        for name in gone:
            del self._known[name]
        yield {key: None for name in gone if (key := _key(name)) is not None}

    def _note_written(self) -> None:
        for key, is_there in self._written.items():
            name = name_of(key)
            self._passed.add(name)
            if is_there:
                self._known[name] = _WRITTEN
            else:
                self._known.pop(name, None)
        self._written.clear()

    def _rows(self) -> list[bytes]:
        """The entries of all virtual servers of IPv4."""
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

    def _entries(self, row: bytes) -> bytes | None:
        """The entries of a virtual server's real servers; None if it is gone."""
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

    def _interpret(self, key: VirtualServerKey, row: bytes, entries: bytes) -> ObservedVirtualServer | None:
        _, scheduler, flags, timeout_s, netmask, _ = _ROW.unpack(row)
        servers = list(_REAL_SERVER.iter_unpack(entries))
        if servers and not any(servers[-1][0]):
            # There are fewer than a moment ago; or some are of IPv6, which only tunnels can have.
            return self._read_one(key)
        prefix_length = ipvs_message.network_length(Family.IPV4, netmask) if flags & PERSISTENT else 0
        name = scheduler.split(b"\0", 1)[0].decode(errors="replace")
        settings = VirtualServerSettings(name, flags & ~HASHED, timeout_s, prefix_length)
        servers.reverse()  # the kernel has the last added one first
        has_limits = flags & HAS_THRESHOLDS
        if not has_limits and all(weight == 1 and not method & _METHODS for _, method, weight, *_ in servers):
            return ObservedVirtualServer(settings, EvenWeights.of([server[0] for server in servers]))
        weights = {RealServerKey(key): NOT_MASQUERADED if method & _METHODS else weight for key, method, weight, *_ in servers}
        limits = {}
        if has_limits:  # without the flag, no way of reading shows them
            limits = {RealServerKey(key): Thresholds(upper, lower) for key, _, _, upper, lower in servers if upper or lower}
        return ObservedVirtualServer(settings, weights, thresholds=limits or None)

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


def _has_thresholds(row: bytes) -> bool:
    """Whether the real servers of this entry of a virtual server may have thresholds."""
    (flags,) = _FLAGS.unpack_from(row, _FLAGS_AT)
    return bool(flags & HAS_THRESHOLDS)


def name_of(key: VirtualServerKey) -> bytes:
    """How the entry of a virtual server begins."""
    if isinstance(key, FirewallMark):
        return _NAME.pack(key.protocol, key.address, bytes(2), key.mark)
    return _NAME.pack(key.protocol, key.address, key.port.to_bytes(2, "big"), 0)


def _key(name: bytes) -> VirtualServerKey | None:
    """The virtual server with this name; None for one of another protocol."""
    number, address, port, mark = _NAME.unpack(name)
    if mark:
        return FirewallMark.of(Family.IPV4, mark)
    protocol = _PROTOCOLS.get(number)
    return VirtualServerKey(protocol, Address(address), int.from_bytes(port, "big")) if protocol else None
