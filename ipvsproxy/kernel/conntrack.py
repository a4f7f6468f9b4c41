"""The conntrack driver: deletes tracked flows that go on to real servers which should no longer have them."""

import errno
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Never

from pyroute2.netlink import NETLINK_NETFILTER
from pyroute2.netlink.nfnetlink import NFNL_SUBSYS_CTNETLINK
from pyroute2.netlink.nfnetlink.nfctsocket import IPCTNL_MSG_CT_DELETE, IPCTNL_MSG_CT_GET, nfct_msg

from ipvsproxy.kernel import message, netlink
from ipvsproxy.kernel.errors import KernelError
from ipvsproxy.model.kernel import Flow, FlowCleaning
from ipvsproxy.model.net import Family
from ipvsproxy.model.plan import Operation, Outcome

BATCH_SIZE = 500
"""Flows deleted in one ``send``."""
_REFUSALS = (errno.EINVAL, errno.EOPNOTSUPP)

_SUBSYSTEM = NFNL_SUBSYS_CTNETLINK << 8
_HEADER_SIZE = 4
_ORIGINAL, _REPLY, _ZONE = 1, 2, 18
_IP, _PROTO = 1, 2
_FILTER_DESTINATION, _FILTER_PROTOCOL, _FILTER_PORT = 0x02, 0x08, 0x20
"""``CTA_FILTER_F_CTA_IP_DST``, ``_PROTO_NUM`` and ``_PROTO_DST_PORT`` (net/netfilter/nf_internals.h)."""
_DESTINATIONS: Mapping[Family, int] = {Family.IPV4: 2, Family.IPV6: 4}
_SOURCES: Mapping[Family, int] = {Family.IPV4: 1, Family.IPV6: 3}


class _Stale(NamedTuple):
    position: int
    deletion: bytes


class ConntrackDriver:
    """Deletes flows in the network namespace of the thread that made it, and belongs to that thread.

    Flows are judged in the parts in which the kernel lists them, and stale ones are deleted before the next part is made, over a
    socket of their own. So memory does not depend on how many flows there are, nor on how many of them are stale.
    """

    def __init__(self, connect: Callable[[int], netlink.Socket] = netlink.open_socket) -> None:
        self._listing = netlink.Channel(NETLINK_NETFILTER, connect)
        self._deleting = netlink.Channel(NETLINK_NETFILTER, connect)

    def close(self) -> None:
        """Close the sockets."""
        self._listing.close()
        self._deleting.close()

    def apply(self, operations: Sequence[Operation]) -> list[Outcome]:
        """Delete the flows of each ``FlowCleaning`` whose replies come from none of the real servers to be kept.

        All operations of a family share one listing. Outcomes come in the operations' order and say how many flows were
        deleted; one that ends by itself meanwhile does not count, and is no error. A listing that breaks off, or that the kernel
        calls inconsistent, is begun again; what was deleted by then was stale and counts.
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
        judge = _Judge(family, cleanings)

        def delete_stale(part: Iterable[netlink.Found]) -> Iterable[Never]:
            self._delete(judge.stale(part), outcomes)
            return ()

        action = f"list the {family.label} connections"
        flows = [cleaning.flow for cleaning in cleanings.values()]
        try:
            try:
                self._listing.gather(_filtered_query(family, flows), action, delete_stale)
            except KernelError as error:
                if error.errno not in _REFUSALS:
                    raise
                self._listing.gather(_query(family, []), action, delete_stale)  # perhaps it was the filter
        except KernelError as error:
            if error.errno in _REFUSALS:
                detail = "the kernel cannot list connections: the module nf_conntrack_netlink is not there or cannot be loaded"
                raise KernelError(action=action, errno=error.errno, detail=detail) from error
            raise

    def _delete(self, stale: Sequence[_Stale], outcomes: list[Outcome]) -> None:
        step = min(BATCH_SIZE, self._deleting.limit) if stale else 1
        for start in range(0, len(stale), step):
            chunk = stale[start : start + step]
            sequences = self._deleting.sequences(len(chunk))
            messages = [message.numbered(flow.deletion, sequence) for flow, sequence in zip(chunk, sequences, strict=True)]
            failed = self._deleting.run(messages)
            for index, flow in enumerate(chunk):
                number = failed.get(index, 0)
                outcome = outcomes[flow.position]
                if number == 0:
                    outcomes[flow.position] = outcome._replace(removed=outcome.removed + 1)
                elif number != errno.ENOENT and not outcome.error:
                    error = f"{outcome.operation}: {netlink.explain(number)}"
                    outcomes[flow.position] = outcome._replace(error=error, errno=max(number, 0))


class _Judge:
    """Finds the stale ones among listed flows of a family. ``cleanings`` are by the positions of their operations."""

    def __init__(self, family: Family, cleanings: Mapping[int, FlowCleaning]) -> None:
        self._keeps = {position: cleaning.keep for position, cleaning in cleanings.items()}
        self._frontends = {
            (cleaning.flow.protocol, cleaning.flow.address, cleaning.flow.port.to_bytes(2, "big")): position
            for position, cleaning in cleanings.items()
        }
        self._layout = _layout(family)
        self._head = _head(family)

    def stale(self, part: Iterable[netlink.Found]) -> list[_Stale]:
        """One message that deletes each stale flow, and the position of the operation that wants it."""
        found: list[_Stale] = []
        read, position_of = self._layout.read, self._frontends.get
        for data, start, end in part:
            values = read(data, start + _HEADER_SIZE, end)
            if values is None:
                continue
            position = position_of(values[:3])
            # A real server's key is its address and port, as they stand here.
            if position is not None and values[3] + values[4] not in self._keeps[position]:
                found.append(_Stale(position, _deletion(self._head, data, start + _HEADER_SIZE, end)))
        return found


def _layout(family: Family) -> message.Layout:
    size = f"{family.bits // 8}s"
    return message.Layout(
        (
            message.Field((_ORIGINAL, _PROTO, 1), "B"),
            message.Field((_ORIGINAL, _IP, _DESTINATIONS[family]), size),
            message.Field((_ORIGINAL, _PROTO, 3), "2s"),
            message.Field((_REPLY, _IP, _SOURCES[family]), size),
            message.Field((_REPLY, _PROTO, 2), "2s"),
        )
    )


def _filtered_query(family: Family, flows: Sequence[Flow]) -> bytes:
    """The listing of a family's flows without what the kernel can tell to be none of these (since 5.8; older ones list all).

    It leaves out what does not have the protocol, port and address that all of these have in common. No IPv6 address is given to
    it: it would leave out what has it (``ctnetlink_filter_match_tuple`` in net/netfilter/nf_conntrack_netlink.c).
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
    """Deletes a listed flow: its original tuple, and its zone if it has one, stand in the message as they were listed.

    That serves every protocol. A deletion without a tuple would delete all flows; the layout has seen to it that there is one.
    """
    attributes = message.attributes(data, start, end)
    whole = bytearray(head)
    for kind in (_ORIGINAL, _ZONE):
        if kind in attributes:
            first, last = attributes[kind]
            whole += data[first - 4 : (last + 3) & ~3]
    struct.pack_into("=I", whole, 0, len(whole))
    return bytes(whole)
