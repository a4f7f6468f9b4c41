"""Enlarging a full set: a larger copy is filled beside it, then swapped in. So no packet ever meets an incomplete set.

The kernel cannot change ``maxelem`` of a set. After the swap, rules look into the copy under the old name
(include/uapi/linux/netfilter/ipset/ip_set.h, ``IPSET_CMD_SWAP``).
"""

import struct
from collections.abc import Collection

import structlog

from ipvsproxy.kernel.base import netlink
from ipvsproxy.kernel.base.errors import KernelError
from ipvsproxy.kernel.ipset import message as ipset_message
from ipvsproxy.model.plan import Verb
from ipvsproxy.model.sets import SET_COPY, IpSet, SetEntry

LARGEST = 1 << 24
"""The largest capacity, in entries."""

_COPY = SET_COPY.name

log: structlog.typing.FilteringBoundLogger = structlog.get_logger()


def enlarge(channel: netlink.Channel, ip_set: IpSet, revision: int, entries: Collection[SetEntry], capacity: int) -> None:
    """Replace a set by one with twice the capacity. ``entries`` are its present entries, ``capacity`` is its present limit.

    Raises:
        KernelError: it failed, and the set is unchanged.
    """
    action = f"enlarge {ip_set}"
    if capacity * 2 > LARGEST:
        raise KernelError(action=action, detail=f"its capacity is already {capacity} entries")
    channel.do(ipset_message.destruction(_COPY))  # the copy of a process that was killed here
    _do(channel, ipset_message.creation(ip_set, revision, name=_COPY, capacity=capacity * 2), action)
    try:
        _fill(channel, ip_set, entries, action)
        _do(channel, ipset_message.swap(_COPY, ip_set.name), action)
    finally:
        channel.do(ipset_message.destruction(_COPY))
    log.warning("set_enlarged", set=ip_set.name, entries=len(entries), capacity=capacity * 2)


def _fill(channel: netlink.Channel, ip_set: IpSet, entries: Collection[SetEntry], action: str) -> None:
    codec = ipset_message.EntryCodec(ip_set, _COPY)
    try:
        encoded = codec.encode(list(entries)) if entries else b""
    except (ValueError, struct.error) as error:
        raise KernelError(action=action, detail=str(error)) from error
    step = codec.entries_per_message * codec.entry_size
    for start in range(0, len(encoded), step):
        (sequence,) = channel.sequences(1)
        for number in channel.run([codec.request(Verb.ADD, encoded[start : start + step], sequence)]).values():
            raise KernelError(action=action, errno=max(number, 0), detail=netlink.explain(number))


def _do(channel: netlink.Channel, request: bytes, action: str) -> None:
    number = channel.do(request)
    if number:
        raise KernelError(action=action, errno=max(number, 0), detail=netlink.explain(number))
