"""The conntrack driver: deletes tracked flows to real servers that should no longer receive packets of these flows."""

import contextlib
import errno
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Never

from pyroute2.netlink import NETLINK_NETFILTER
from pyroute2.netlink.nfnetlink import NFNL_SUBSYS_CTNETLINK
from pyroute2.netlink.nfnetlink.nfctsocket import IPCTNL_MSG_CT_DELETE, IPCTNL_MSG_CT_GET, nfct_msg

from ipvsproxy.kernel.base import message, netlink
from ipvsproxy.kernel.base.errors import KernelError
from ipvsproxy.model.kernel import Flow, FlowCleaning
from ipvsproxy.model.net import Family
from ipvsproxy.model.plan import Operation, Outcome

BATCH_SIZE = 500
"""The largest number of flows that one ``send`` deletes."""
_REFUSALS = (errno.EINVAL, errno.EOPNOTSUPP)
_NO_FILTER = 1 << 31
"""A flag of ``CTA_FILTER`` that no kernel knows."""

_SUBSYSTEM = NFNL_SUBSYS_CTNETLINK << 8
_ORIGINAL, _REPLY, _ZONE = 1, 2, 18
_IP, _PROTO = 1, 2
_FILTER_DESTINATION, _FILTER_PROTOCOL, _FILTER_PORT = 0x02, 0x08, 0x20
"""The flags ``CTA_FILTER_F_CTA_IP_DST``, ``_PROTO_NUM`` and ``_PROTO_DST_PORT`` (net/netfilter/nf_internals.h)."""
_DESTINATIONS: Mapping[Family, int] = {Family.IPV4: 2, Family.IPV6: 4}
_SOURCES: Mapping[Family, int] = {Family.IPV4: 1, Family.IPV6: 3}


def filters_listings(connect: Callable[[int], netlink.Socket] = netlink.open_socket) -> bool | None:
    """Whether the kernel filters listings of connections; None means that the kernel's answer was not clear.

    The function sends one message with a filter flag that no kernel knows. A kernel that supports ``CTA_FILTER`` refuses the
    flag. An older kernel starts to list all flows, and only the first part of the listing is read.
    """
    channel = netlink.Channel(NETLINK_NETFILTER, connect)
    with contextlib.closing(channel):
        impossible = [["CTA_FILTER", {"attrs": [["CTA_FILTER_ORIG_FLAGS", _NO_FILTER]]}]]
        try:
            for _ in channel.dumping(_query(Family.IPV4, impossible), "ask for filtered listings of connections"):
                return False
        except KernelError as error:
            return error.errno in (*_REFUSALS, errno.ERANGE) or None
    return None


class ConntrackDriver:
    """Deletes flows in the network namespace of the thread that creates this object.

    Only the thread that creates this object may use it. The kernel lists flows in parts. The stale flows of each part are deleted
    through a second socket before the kernel produces the next part. Because only one part of the listing is in memory at a time,
    the memory that the driver uses does not grow with the number of flows.
    """

    def __init__(self, connect: Callable[[int], netlink.Socket] = netlink.open_socket) -> None:
        self._listing = netlink.Channel(NETLINK_NETFILTER, connect)
        self._deleting = netlink.Channel(NETLINK_NETFILTER, connect)

    def close(self) -> None:
        """Close the sockets."""
        self._listing.close()
        self._deleting.close()

    def apply(self, operations: Sequence[Operation]) -> list[Outcome]:
        """Delete the flows of each ``FlowCleaning``, except flows whose replies come from a real server in ``keep``.

        All operations on an IP family share one listing of flows. The outcomes have the same order as the operations, and contain
        the number of deleted flows. A flow that ends before it is deleted is not counted, and causes no error. An interrupted or
        inconsistent listing is started again; flows that were deleted before the new start are counted, too.
        """
        outcomes = list(map(Outcome, operations))
        for family in Family:
            cleanings = {
                position: operation.item
                for position, operation in enumerate(operations)
                if isinstance(operation.item, FlowCleaning) and operation.item.flow.family is family
            }
            if not cleanings:
                continue
            try:
                self._clean(family, cleanings, outcomes)
            except KernelError as error:
                for position in cleanings:
                    text = f"{operations[position]}: {error}"
                    outcomes[position] = outcomes[position]._replace(error=text, errno=error.errno)
        return outcomes

    def _clean(self, family: Family, cleanings: Mapping[int, FlowCleaning], outcomes: list[Outcome]) -> None:
        keeps = {position: cleaning.keep for position, cleaning in cleanings.items()}
        frontends = {
            (cleaning.flow.protocol, cleaning.flow.address, cleaning.flow.port.to_bytes(2, "big")): position
            for position, cleaning in cleanings.items()
        }
        layout, head = _layout(family), _head(family)

        def delete_stale(part: Iterable[netlink.Reply]) -> Iterable[Never]:
            stale: list[tuple[int, bytes]] = []
            for data, header, end in part:
                start = header + message.NETFILTER_HEADER
                values = layout.read(data, start, end)
                position = frontends.get(values[:3]) if values else None
                # The key of a real server has the same bytes as the real server's address and port in a flow.
                if values and position is not None and values[3] + values[4] not in keeps[position]:
                    stale.append((position, _deletion(head, data, start, end)))
            self._delete(stale, outcomes)
            return ()

        action = f"list the {family.label} connections"
        flows = [cleaning.flow for cleaning in cleanings.values()]
        try:
            try:
                self._listing.gather(_filtered_query(family, flows), action, delete_stale)
            except KernelError as error:
                if error.errno not in _REFUSALS:
                    raise
                self._listing.gather(_query(family, []), action, delete_stale)  # the kernel may have refused the filter
        except KernelError as error:
            if error.errno in _REFUSALS:
                detail = "the kernel cannot list connections: the module nf_conntrack_netlink is missing or cannot be loaded"
                raise KernelError(action=action, errno=error.errno, detail=detail) from error
            raise

    def _delete(self, stale: Sequence[tuple[int, bytes]], outcomes: list[Outcome]) -> None:
        """Send messages that delete flows; each message comes with the index of the flow's operation."""
        failed = self._deleting.run_all([deletion for _, deletion in stale], BATCH_SIZE)
        for index, (position, _) in enumerate(stale):
            number = failed.get(index, 0)
            outcome = outcomes[position]
            if number == 0:
                outcomes[position] = outcome._replace(removed=outcome.removed + 1)
            elif number != errno.ENOENT and not outcome.error:
                error = f"{outcome.operation}: {netlink.explain(number)}"
                outcomes[position] = outcome._replace(error=error, errno=max(number, 0))


def _layout(family: Family) -> message.Layout:
    size = f"{family.bits // 8}s"
    return message.Layout(
        (
            ((_ORIGINAL, _PROTO, 1), "B"),
            ((_ORIGINAL, _IP, _DESTINATIONS[family]), size),
            ((_ORIGINAL, _PROTO, 3), "2s"),
            ((_REPLY, _IP, _SOURCES[family]), size),
            ((_REPLY, _PROTO, 2), "2s"),
        )
    )


def _filtered_query(family: Family, flows: Sequence[Flow]) -> bytes:
    """The request for a listing of the flows of an IP family.

    Since Linux 5.8, the kernel leaves out most flows that are not in ``flows``; older kernels list all flows. The filter contains
    the protocol, port and address that all of ``flows`` have in common. The filter never contains an IPv6 address, because such a
    filter makes the kernel leave out exactly the flows that have this address (``ctnetlink_filter_match_tuple`` in
    net/netfilter/nf_conntrack_netlink.c).
    """
    protocols, ports, addresses = ({getattr(flow, name) for flow in flows} for name in ("protocol", "port", "address"))
    if len(protocols) > 1:
        return _query(family, [])
    flags = _FILTER_PROTOCOL
    protocol: list[Any] = [["CTA_PROTO_NUM", int(*protocols)]]
    original: list[Any] = [["CTA_TUPLE_PROTO", {"attrs": protocol}]]
    if len(ports) == 1:
        flags |= _FILTER_PORT
        protocol.append(["CTA_PROTO_DST_PORT", *ports])
    if len(addresses) == 1 and family is Family.IPV4:
        flags |= _FILTER_DESTINATION
        original.append(["CTA_TUPLE_IP", {"attrs": [["CTA_IP_V4_DST", str(*addresses)]]}])
    return _query(
        family, [["CTA_TUPLE_ORIG", {"attrs": original}], ["CTA_FILTER", {"attrs": [["CTA_FILTER_ORIG_FLAGS", flags]]}]]
    )


def _query(family: Family, attributes: list[Any]) -> bytes:
    query = nfct_msg()
    query["nfgen_family"] = int(family)
    query["attrs"] = attributes
    return message.encode(query, _SUBSYSTEM | IPCTNL_MSG_CT_GET, netlink.REQUEST | netlink.DUMP)


def _head(family: Family) -> bytes:
    request = nfct_msg()
    request["nfgen_family"] = int(family)
    return message.encode(request, _SUBSYSTEM | IPCTNL_MSG_CT_DELETE, netlink.REQUEST)


def _deletion(head: bytes, data: bytes, start: int, end: int) -> bytes:
    """The message that deletes a listed flow.

    The message contains a byte-for-byte copy of the flow's original tuple and, if the flow has a zone, of its zone.

    With a copy of the tuple, the same message works for every protocol. A deletion message without a tuple would delete all
    flows, so ``_layout`` accepts only flows with a tuple.
    """
    attributes = message.attributes(data, start, end)
    whole = bytearray(head)
    for kind in (_ORIGINAL, _ZONE):
        if kind in attributes:
            first, last = attributes[kind]
            whole += data[first - 4 : (last + 3) & ~3]
    struct.pack_into("=I", whole, 0, len(whole))
    return bytes(whole)
