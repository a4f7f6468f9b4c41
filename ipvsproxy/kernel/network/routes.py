"""The route driver: manages local routes on ``lo`` to service addresses.

A route belongs to ipvsproxy if it is in the table ``local``, has the type ``local``, is on ``lo``, and has ipvsproxy's protocol
number and metric. The kernel's own route to an address has the protocol number 2 and the metric 0, so both routes can exist at
the same time. A removal names the protocol number and the metric, because a removal without these two numbers would remove the
kernel's route.

The routes are on ``lo``, because any other device loses its routes when it goes down or loses its last IPv4 address. ``lo`` loses
its routes only if 127.0.0.1 is deleted (IPv4) or if ``lo`` goes down (IPv6).

The layouts of messages are from include/uapi/linux/rtnetlink.h. The kernel's code for routes is in net/ipv4/fib_trie.c and
net/ipv6/route.c.
"""

import errno
import functools
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import cast

from pyroute2.netlink import NETLINK_ROUTE
from pyroute2.netlink.rtnl import RTM_DELROUTE, RTM_GETROUTE, RTM_NEWROUTE
from pyroute2.netlink.rtnl.rtmsg import rtmsg

from ipvsproxy.kernel.base import message, netlink
from ipvsproxy.kernel.base.errors import KernelError, Tolerated
from ipvsproxy.model.kernel import ROUTE_PROTOCOL
from ipvsproxy.model.net import Address, Family
from ipvsproxy.model.plan import Operation, Outcome, Verb, one_by_one, outcomes

BATCH_SIZE = 500
"""The largest number of routes in one ``send``. During a ``send``, the kernel holds the lock that guards all network
configuration."""
TABLE = 255
"""The table ``local``, in which the kernel looks up addresses before it uses any other table."""
METRIC = 1024
"""The metric of our routes. The kernel's route to an address of an interface has the metric 0, and therefore takes precedence."""
LOOPBACK_INDEX = 1
"""The index of ``lo`` in every network namespace (LOOPBACK_IFINDEX in include/net/flow.h)."""

_LOCAL = 2  # The route type RTN_LOCAL.
_SCOPES: Mapping[Family, int] = {Family.IPV4: 254, Family.IPV6: 0}  # RT_SCOPE_HOST for IPv4; IPv6 routes have no scope.
_HEADER = 12
_PLACE = message.Layout((((1,), "s"), ((4,), "I"), ((6,), "I")))
"""The layout of three attributes of a route: the destination, the index of the device, and the metric."""
_SOL_NETLINK, _GET_STRICT_CHK = 270, 12  # include/uapi/linux/netlink.h


def open_socket(protocol: int) -> socket.socket:
    """A socket on which the kernel filters dumps of routes, if the kernel supports filters for dumps.

    If the kernel does not support filters, each dump contains all routes.
    """
    opened = netlink.open_socket(protocol)
    ask_to_filter(opened)
    return opened


def ask_to_filter(opened: socket.socket) -> bool:
    """Request filtered dumps from the kernel.

    Returns whether the kernel can filter dumps; a kernel before Linux 4.20 cannot, and answers ENOPROTOOPT.
    """
    try:
        opened.setsockopt(_SOL_NETLINK, _GET_STRICT_CHK, 1)
    except OSError:
        return False
    return True


class RouteDriver:
    """Reads and writes our routes in the network namespace of the thread that creates this object.

    Only the thread that creates this object may use it.
    """

    def __init__(self, connect: Callable[[int], netlink.Socket] = open_socket, route_protocol: int = ROUTE_PROTOCOL) -> None:
        """``route_protocol`` is the protocol number of our routes, from 5 to 255."""
        self._protocol = route_protocol
        self._channel = netlink.Channel(NETLINK_ROUTE, connect)
        self._template = functools.cache(self._make_template)
        self._digest = b""
        """The digest of the last reading; empty if the next reading must return everything."""

    def close(self) -> None:
        """Close the socket."""
        self._channel.close()

    def observe(self) -> AbstractSet[Address]:
        """The destination addresses of our routes, read with one dump for each IP family.

        Raises:
            KernelError: the kernel did not return all of our routes.
        """
        self._digest = b""  # the next call of ``observe_changed`` must return all routes
        return self._read(self._dump())

    def observe_changed(self) -> AbstractSet[Address] | None:
        """Reads all of our routes; None means that no route has changed since the last call of this method.

        After a call of ``observe`` or ``apply``, all routes count as changed.

        Raises:
            KernelError: the kernel did not return all of our routes.
        """
        replies = self._dump()
        digest = netlink.digest(replies)
        if digest == self._digest:
            return None
        observed = self._read(replies)
        self._digest = digest
        return observed

    def _dump(self) -> list[netlink.Reply]:
        replies: list[netlink.Reply] = []
        for family in Family:
            with Tolerated(errno.ENOENT, errno.EAFNOSUPPORT):  # the routing table or the IP family does not exist
                replies += self._channel.dump(self._query(family), f"list the {family.label} routes")
        return replies

    def _read(self, replies: Iterable[netlink.Reply]) -> AbstractSet[Address]:
        ours: dict[Address, None] = {}
        starts = frozenset(map(self._start, Family))
        with netlink.parsing("list the routes"):
            for data, start, end in replies:
                if data[start : start + 8] not in starts:
                    continue
                place = _PLACE.read(data, start + _HEADER, end)
                if place is not None and place[1:] == (LOOPBACK_INDEX, METRIC):
                    ours[Address(place[0])] = None
        return ours.keys()

    def _start(self, family: Family) -> bytes:
        """The bytes with which each message about our routes begins: a ``struct rtmsg`` without its flags."""
        return bytes((family, family.bits, 0, 0, TABLE, self._protocol, _SCOPES[family], _LOCAL))

    def apply(self, operations: Sequence[Operation]) -> list[Outcome]:
        """Add and remove local routes, in the given order. Repeating an operation causes no error.

        The outcomes have the same order as the operations.
        """
        self._digest = b""
        single = list(one_by_one(operations))
        numbers = self._channel.run_all(list(map(self._encode, single)), BATCH_SIZE)
        failed = {single[place]: number for place, number in numbers.items()}
        # A route that is already present may belong to another program.
        present = self._present() if errno.EEXIST in failed.values() else frozenset()
        return outcomes(operations, {one: _outcome(one, number, present) for one, number in failed.items()})

    def _encode(self, operation: Operation) -> bytes:
        address = cast("Address", operation.item.key)
        return self._template(operation.verb is Verb.REMOVE, address.family)((address,))

    def _present(self) -> AbstractSet[Address]:
        """Our present routes; empty if the routes cannot be read, so that operations are reported as failed and are repeated."""
        try:
            return self._read(self._dump())
        except KernelError:
            return frozenset()

    def _query(self, family: Family) -> bytes:
        request = rtmsg()
        request["family"] = int(family)
        request["table"] = TABLE
        request["proto"] = self._protocol
        request["type"] = _LOCAL
        request["attrs"] = [["RTA_OIF", LOOPBACK_INDEX]]
        return message.encode(request, RTM_GETROUTE, netlink.REQUEST | netlink.DUMP)

    def _make_template(self, is_removal: bool, family: Family) -> message.Encode:  # noqa: FBT001 - positional, so that ``functools.cache`` sees equal calls
        """The template of a message about a route.

        The message names no preferred source address, because the route would keep that address even after the host had lost it.
        """

        def build(address: str) -> bytes:
            request = rtmsg()
            request["family"] = int(family)
            request["dst_len"] = family.bits
            request["table"] = TABLE
            request["proto"] = self._protocol
            request["scope"] = _SCOPES[family]
            request["type"] = _LOCAL
            request["attrs"] = [["RTA_DST", address], ["RTA_OIF", LOOPBACK_INDEX], ["RTA_PRIORITY", METRIC]]
            if is_removal:
                return message.encode(request, RTM_DELROUTE, netlink.REQUEST)
            return message.encode(request, RTM_NEWROUTE, netlink.REQUEST | netlink.CREATE | netlink.EXCLUSIVE)

        return message.template(build, {"address": message.ADDRESSES[family]})


def _outcome(operation: Operation, number: int, present: AbstractSet[Address]) -> Outcome:
    expected: tuple[int, ...] = (errno.EEXIST,) if operation.item.key in present else ()
    if operation.verb is Verb.REMOVE:
        expected = (errno.ESRCH, errno.ENODEV)
    return netlink.outcome(operation, number, expected, _reason(operation, number))


def _reason(operation: Operation, number: int) -> str:
    match number:
        case errno.EEXIST:
            command = f"ip route show table local {operation.item}"
            return f"another program has a local route to it with the metric {METRIC}; {command} shows it: remove it"
        case errno.ENETDOWN:
            return "the interface lo is down: set it up with ip link set lo up"
        case errno.EACCES:
            return "IPv6 is disabled on lo: set net.ipv6.conf.lo.disable_ipv6 to 0"
        case _:
            return ""
