"""Notifications about other programs' changes of this host's interfaces, addresses, or local routes to service addresses.

The kernel notifies only about addresses, interfaces and routes; polls find changes of IPVS, ipsets and iptables. If the kernel
removes routes together with an address or an interface, there is no notification about the routes. The listener has a separate
socket, because a notification has the sequence number of the request that caused it. On the socket of the request, the
notification could be mistaken for the reply. The layouts of messages are from
include/uapi/linux/{netlink,rtnetlink,if_link,if_addr}.h.
"""

import contextlib
import ctypes
import dataclasses
import enum
import errno
import itertools
import socket
import struct
from collections.abc import Callable, Collection, Iterator

from ipvsproxy.kernel.base import message, sockets
from ipvsproxy.kernel.base.errors import KernelError
from ipvsproxy.kernel.network.routes import LOOPBACK_INDEX
from ipvsproxy.model.kernel import DEVICE, ROUTE_PROTOCOL

RECEIVE_BUFFER = 16 << 20
"""The size in bytes of the queue of events. Each event takes about 1 KiB of the queue, so 10,000 addresses at once cause no
overrun."""

_GROUPS = (1, 5, 9, 7, 11)  # the rtnetlink groups LINK, IPV4_IFADDR, IPV6_IFADDR, IPV4_ROUTE and IPV6_ROUTE
_NEWLINK, _DELLINK, _NEWADDR, _DELADDR = 16, 17, 20, 21
_NEWROUTE, _DELROUTE = 24, 25
_LINK = struct.Struct("=BxHiII")  # The fields of ifinfomsg: family, type, index, flags, change.
_ROUTE = struct.Struct("=BBBBBBBBI")  # The fields of rtmsg, from family to flags.
_ROUTE_PROTOCOL = 5
_UP = 0x1  # The flag IFF_UP.
_ADDRESS = struct.Struct("=BBBBI")  # The fields of ifaddrmsg: family, prefix length, flags, scope, index.
_SO_ATTACH_FILTER, _EQUALS = 26, 0x15
_FILTER_STEP = struct.Struct("=HBBI")  # The fields of sock_filter: code, steps to skip if true, steps to skip if false, operand.
_IFLA_IFNAME = 3
_DATAGRAM = 1 << 16


class Change(enum.Enum):
    """The kinds of objects that other programs have changed.

    OURS: our device, its addresses or our local routes have changed. OURS is also reported if ``lo`` went down or lost an
    address, or if notifications were lost, because our objects may have changed. OTHER_ADDRESSES: addresses of another interface
    have changed; a new lifetime or state of an IPv6 address counts, too.
    """

    OURS = enum.auto()
    OTHER_ADDRESSES = enum.auto()


def open_socket() -> socket.socket:
    """A socket that receives notifications about interfaces, addresses and routes.

    Raises:
        OSError: the kernel refused the socket.
    """
    return sockets.open_event_socket(socket.NETLINK_ROUTE, _GROUPS, RECEIVE_BUFFER)


@dataclasses.dataclass(eq=False, kw_only=True)
class ChangeListener:
    """A socket that becomes readable when an interface, an address or one of our routes changes.

    The socket receives changes of the network namespace in which it was created. ``read`` never waits. An event loop watches
    ``fileno()`` to learn when to call ``read``. Changes made through sockets with a port ID in ``own_ports`` are left out.
    ``route_protocol`` is the protocol number of our routes.
    """

    own_ports: Collection[int] = ()
    device: str = DEVICE
    route_protocol: int = ROUTE_PROTOCOL
    connect: Callable[[], socket.socket] = open_socket

    def __post_init__(self) -> None:
        try:
            self._socket = self.connect()
        except OSError as error:
            raise _broken(error) from error
        self._filter()
        self._index = self._find_device()
        """The index of the device; 0 if the device does not exist."""
        self._has_lost = False
        """Whether notifications were lost and the rest of the queue has not been read yet."""

    def fileno(self) -> int:
        """The file descriptor to watch for reading."""
        return self._socket.fileno()

    def close(self) -> None:
        """Stop listening."""
        self._socket.close()

    def read(self) -> tuple[Change, ...]:
        """The changes since the last call, in their order; empty if nothing has changed.

        Raises:
            KernelError: the socket is broken.
        """
        changes: list[Change] = []
        if len(self.own_ports) != len(self._filtered):
            self._filter()
        is_empty = False
        for _ in range(sockets.READS_AT_ONCE):
            try:
                changes += self._decode(self._socket.recv(_DATAGRAM))
            except BlockingIOError:
                is_empty = True
                break
            except OSError as error:
                if error.errno != errno.ENOBUFS:
                    raise _broken(error) from error
                self._has_lost = True
        if self._has_lost:
            # The kernel reports lost notifications only once, ahead of the notifications that are already in the queue. Until the
            # queue has been read, the kernel loses further notifications (netlink_overrun in net/netlink/af_netlink.c), so a
            # notification in the queue may name an index that the device no longer has.
            self._index = self._find_device()
            self._has_lost = not is_empty
            changes.append(Change.OURS)
        return tuple(changes)

    def _filter(self) -> None:
        """Let the kernel drop notifications about ipvsproxy's own changes, and about routes with other protocol numbers.

        A start of ipvsproxy causes one notification for each Service, and a routing daemon may change a million routes. The
        filter is in classic BPF (include/uapi/linux/filter.h), which reads numbers in network byte order. ``_decode`` would
        ignore these notifications anyway, but without the filter they might fill the queue, and needed notifications would be
        lost.
        """
        load_kind, load_port, load_protocol = (
            (0x28, 0, 0, 4),
            (0x20, 0, 0, 12),
            (0x30, 0, 0, message.HEADER.size + _ROUTE_PROTOCOL),
        )
        take, drop = (0x06, 0, 0, 0xFFFFFFFF), (0x06, 0, 0, 0)
        self._filtered = tuple(self.own_ports)
        steps = [load_kind]
        for kind in (_NEWLINK, _DELLINK):
            steps += [(_EQUALS, 0, 1, socket.htons(kind)), take]
        steps.append(load_port)
        for port in self._filtered:
            steps += [(_EQUALS, 0, 1, socket.htonl(port)), drop]
        steps += [load_kind, (_EQUALS, 1, 0, socket.htons(_NEWROUTE)), (_EQUALS, 0, 2, socket.htons(_DELROUTE))]
        steps += [load_protocol, (_EQUALS, 0, 1, self.route_protocol), take, drop]
        code = b"".join(itertools.starmap(_FILTER_STEP.pack, steps))
        instructions = ctypes.create_string_buffer(code, len(code))
        with contextlib.suppress(OSError):
            program = struct.pack("@HP", len(steps), ctypes.addressof(instructions))
            self._socket.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)

    def _find_device(self) -> int:
        try:
            return socket.if_nametoindex(self.device)
        except OSError:
            return 0

    def _decode(self, data: bytes) -> Iterator[Change]:
        try:
            for kind, _, _, port, body, end in message.messages(data):
                if kind in (_NEWLINK, _DELLINK) and end - body >= _LINK.size:
                    yield from self._link(kind, port, data, body, end)
                elif kind in (_NEWADDR, _DELADDR) and end - body >= _ADDRESS.size:
                    yield from self._address(kind, port, data, body)
                elif (
                    kind in (_NEWROUTE, _DELROUTE)
                    and end - body >= _ROUTE.size
                    and data[body + _ROUTE_PROTOCOL] == self.route_protocol
                    and port not in self.own_ports
                ):
                    yield Change.OURS
        except OSError:
            yield Change.OURS  # the unreadable message may have been about anything

    def _link(self, kind: int, port: int, data: bytes, body: int, end: int) -> Iterator[Change]:
        _, _, index, flags, changed = _LINK.unpack_from(data, body)
        attributes = message.attributes(data, body + _LINK.size, end)
        name = message.text(data, attributes.get(_IFLA_IFNAME, (end, end)))
        if kind == _NEWLINK and name == self.device:
            self._index = index
        elif index == self._index:  # another program has removed or renamed the device
            self._index = 0
            if port not in self.own_ports:
                yield Change.OURS
        if index == LOOPBACK_INDEX and changed & _UP and not flags & _UP:
            yield Change.OURS

    def _address(self, kind: int, port: int, data: bytes, body: int) -> Iterator[Change]:
        if port not in self.own_ports:
            *_, index = _ADDRESS.unpack_from(data, body)
            yield Change.OURS if index == self._index else Change.OTHER_ADDRESSES
            if index == LOOPBACK_INDEX and kind == _DELADDR:
                yield Change.OURS


def _broken(error: OSError) -> KernelError:
    return KernelError(action="listen for changes of interfaces", errno=error.errno or 0)
