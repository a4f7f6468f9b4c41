"""The conntrack driver: deletes tracked flows that go on to real servers which should no longer have them."""

import errno
import struct
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from pyroute2.netlink import NETLINK_NETFILTER
from pyroute2.netlink.nfnetlink import NFNL_SUBSYS_CTNETLINK
from pyroute2.netlink.nfnetlink.nfctsocket import IPCTNL_MSG_CT_DELETE, IPCTNL_MSG_CT_GET, nfct_msg

from ipvsproxy.kernel import message, netlink
from ipvsproxy.kernel.errors import KernelError
from ipvsproxy.model.kernel import FlowCleaning
from ipvsproxy.model.net import Family, Protocol
from ipvsproxy.model.plan import Operation, Outcome

BATCH_SIZE = 500
"""Flows deleted in one ``send``."""

_SUBSYSTEM = NFNL_SUBSYS_CTNETLINK << 8
_HEADER_SIZE = 4
_ORIGINAL, _REPLY, _ZONE = 1, 2, 18
_IP, _PROTO = 1, 2
_FILTER_PROTOCOL = 8  # CTA_FILTER_F_CTA_PROTO_NUM
_DESTINATIONS: Mapping[Family, int] = {Family.IPV4: 2, Family.IPV6: 4}
_SOURCES: Mapping[Family, int] = {Family.IPV4: 1, Family.IPV6: 3}


class _Stale(NamedTuple):
    position: int
    deletion: bytes


class ConntrackDriver:
    """Deletes flows in the network namespace of the thread that made it, and belongs to that thread."""

    def __init__(self, connect: Callable[[int], netlink.Socket] = netlink.open_socket) -> None:
        self._channel = netlink.Channel(NETLINK_NETFILTER, connect)

    def close(self) -> None:
        """Close the socket."""
        self._channel.close()

    def apply(self, operations: Sequence[Operation]) -> list[Outcome]:
        """Delete the flows of each ``FlowCleaning`` whose replies come from none of the real servers to be kept.

        All operations of a family share one listing. Outcomes come in the operations' order and say how many flows were
        deleted; one that ends by itself meanwhile does not count, and is no error.
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
                stale = self._stale(family, cleanings)
            except KernelError as error:
                for position in cleanings:
                    outcomes[position] = Outcome(operations[position], f"{operations[position]}: {error}", error.errno)
                continue
            self._delete(stale, outcomes)
        return outcomes

    def _stale(self, family: Family, cleanings: Mapping[int, FlowCleaning]) -> list[_Stale]:
        """One message that deletes each stale flow, and the position of the operation that wants it."""
        frontends: dict[tuple[int, bytes, bytes], int] = {}
        for position, cleaning in cleanings.items():
            flow, port = cleaning.flow, cleaning.flow.port.to_bytes(2, "big")
            frontends[flow.protocol, flow.address, port] = position
        layout = _layout(family)
        head = _head(family)
        found: list[_Stale] = []
        for data, start, end in self._list(family, {cleaning.flow.protocol for cleaning in cleanings.values()}):
            values = layout.read(data, start, end)
            if values is None:
                continue
            protocol, address, port, source, source_port = values
            position = frontends.get((protocol, address, port), -1)
            # A real server's key is its address and port, as they stand here.
            if position >= 0 and source + source_port not in cleanings[position].keep:
                found.append(_Stale(position, _deletion(head, data, start, end)))
        return found

    def _list(self, family: Family, protocols: Collection[Protocol]) -> list[tuple[bytes, int, int]]:
        action = f"list the {family.label} connections"
        try:
            found = self._channel.dump(_query(family, protocols), action)
        except KernelError as error:
            if error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
                detail = "the kernel cannot list connections: the module nf_conntrack_netlink is not there or cannot be loaded"
                raise KernelError(action=action, errno=error.errno, detail=detail) from error
            raise
        return [(data, start + _HEADER_SIZE, end) for data, start, end in found]

    def _delete(self, stale: Sequence[_Stale], outcomes: list[Outcome]) -> None:
        step = min(BATCH_SIZE, self._channel.limit)
        for start in range(0, len(stale), step):
            chunk = stale[start : start + step]
            sequences = self._channel.sequences(len(chunk))
            messages = [message.numbered(flow.deletion, sequence) for flow, sequence in zip(chunk, sequences, strict=True)]
            failed = self._channel.run(messages)
            for index, flow in enumerate(chunk):
                number = failed.get(index, 0)
                outcome = outcomes[flow.position]
                if number == 0:
                    outcomes[flow.position] = outcome._replace(removed=outcome.removed + 1)
                elif number != errno.ENOENT and not outcome.error:
                    error = f"{outcome.operation}: {netlink.explain(number)}"
                    outcomes[flow.position] = outcome._replace(error=error, errno=max(number, 0))


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


def _query(family: Family, protocols: Collection[Protocol]) -> bytes:
    """The listing of a family; the kernel leaves out other protocols where one is wanted (since 5.8; older ones list all)."""
    query = nfct_msg()
    query["nfgen_family"] = int(family)
    if len(protocols) == 1:
        attributes: list[Any] = [
            ["CTA_TUPLE_ORIG", {"attrs": [["CTA_TUPLE_PROTO", {"attrs": [["CTA_PROTO_NUM", int(*protocols)]]}]]}],
            ["CTA_FILTER", {"attrs": [["CTA_FILTER_ORIG_FLAGS", _FILTER_PROTOCOL]]}],
        ]
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
