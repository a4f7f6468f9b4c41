"""Notifications of nf_tables, which show whether another program has changed our table.

The generation of nf_tables changes whenever any table of the network namespace changes. A notification names the changed table,
so our sets are not read again when another program changes a different table. A notification arrives immediately, whereas the
generation has to be polled. The layouts of messages are from nfnetlink.h and nf_tables.h in include/uapi/linux/netfilter. The
first attribute of each message about a table or its content is the table's name.
"""

import errno
import socket
from collections.abc import Callable, Collection

from pyroute2.netlink import NETLINK_NETFILTER

from ipvsproxy.kernel.base import message, netlink, sockets
from ipvsproxy.kernel.base import nft_message as nft

RECEIVE_BUFFER = 4 << 20
"""The size in bytes of the queue of notifications. An overrun of the queue counts as a change."""

_GROUP = 7  # NFNLGRP_NFTABLES
_SUBSYSTEM = 10  # NFNL_SUBSYS_NFTABLES
_NAME = 1
_DATAGRAM = 1 << 17


def open_socket() -> socket.socket:
    """A socket that receives notifications of nf_tables, in the network namespace of the calling thread.

    Raises:
        OSError: the kernel refused the socket.
    """
    return sockets.open_event_socket(NETLINK_NETFILTER, (_GROUP,), RECEIVE_BUFFER)


class NftChanges:
    """Counts changes that other programs make in our table. Any thread may call ``read`` and use ``count``.

    ``count`` is None if the kernel sends no notifications; only the generation then shows changes. ``own_ports`` are the port
    IDs of the sockets through which ipvsproxy changes the table; the caller may add port IDs later.
    """

    def __init__(self, own_ports: Collection[int], connect: Callable[[], socket.socket] = open_socket) -> None:
        self.count: int | None = 0
        self.reason = ""
        """The reason why the kernel sends no notifications; empty if the kernel sends notifications."""
        self._own_ports = own_ports
        self._socket: socket.socket | None = None
        try:
            self._socket = connect()
        except OSError as error:
            self._give_up(error)

    def fileno(self) -> int | None:
        """The file descriptor to watch for reading; None means that the kernel sends no notifications."""
        return None if self._socket is None else self._socket.fileno()

    def close(self) -> None:
        """Stop listening."""
        opened, self._socket = self._socket, None
        if opened is not None:
            opened.close()

    def read(self) -> bool:
        """Count the notifications that have arrived.

        Returns true if another program has changed our table, or may have changed it. Never waits.
        """
        is_changed = False
        for _ in range(sockets.READS_AT_ONCE):
            if self._socket is None:
                return True
            try:
                is_changed |= self._concerns_us(self._socket.recv(_DATAGRAM))
            except BlockingIOError:
                break
            except OSError as error:
                is_changed = True
                if error.errno != errno.ENOBUFS:
                    self._give_up(error)
        if is_changed and self.count is not None:
            self.count += 1
        return is_changed

    def _give_up(self, error: OSError) -> None:
        self.close()
        self.count, self.reason = None, error.strerror or str(error)

    def _concerns_us(self, data: bytes) -> bool:
        try:
            return any(self._is_of_others(data, *header) for header in message.messages(data))
        except OSError:
            return True  # the unreadable message may have been about our table

    def _is_of_others(self, data: bytes, kind: int, _flags: int, _sequence: int, port: int, start: int, end: int) -> bool:
        if kind >> 8 != _SUBSYSTEM or port in self._own_ports or start == end or data[start] != nft.INET:
            return False
        return nft.read(netlink.Reply(data, start, end)).text(_NAME, "") == nft.TABLE
