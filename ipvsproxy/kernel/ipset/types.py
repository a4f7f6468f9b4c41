"""What this kernel's ipset can do: its protocol, and the revisions of each type of set.

The kernel loads the module of a type to answer (``ip_set_type`` in net/netfilter/ipset/ip_set_core.c).
"""

from typing import NamedTuple

from ipvsproxy.kernel.base import message, netlink
from ipvsproxy.kernel.base.errors import KernelError
from ipvsproxy.kernel.ipset import message as ipset_message
from ipvsproxy.model.net import Family
from ipvsproxy.model.sets import SetType

OWN_ERRORS = 4096
"""The first of ipset's own error numbers (include/uapi/linux/netfilter/ipset/ip_set.h)."""
NO_SUCH_TYPE = 4098
"""IPSET_ERR_FIND_TYPE."""


class Range(NamedTuple):
    """Versions of the protocol, or revisions of a type, from the oldest to the newest that the kernel takes."""

    oldest: int
    newest: int

    def __contains__(self, number: object) -> bool:
        return isinstance(number, int) and self.oldest <= number <= self.newest


def protocols(channel: netlink.Channel) -> Range:
    """The versions of the protocol. Before Linux 5.0 the kernel tells one version alone.

    Raises:
        KernelError: the kernel has no ipset, or did not answer.
    """
    action = "ask for the protocol of ipset"
    data, start, end = channel.ask(ipset_message.protocol_query(), action)
    with netlink.parsing(action):
        attributes = message.attributes(data, start + ipset_message.HEADER_SIZE, end)
        newest = _byte(data, attributes[ipset_message.PROTOCOL])
        oldest = attributes.get(ipset_message.OLDEST_PROTOCOL)
        return Range(newest if oldest is None else _byte(data, oldest), newest)


def revisions(channel: netlink.Channel, set_type: SetType, family: Family) -> Range | None:
    """The revisions of a type; None if the kernel neither has it nor can load it.

    Raises:
        KernelError: the kernel has no ipset, or did not answer.
    """
    action = f"find {set_type}"
    try:
        data, start, end = channel.ask(ipset_message.type_query(set_type, family), action)
    except KernelError as error:
        if error.errno < OWN_ERRORS:
            raise
        return None
    with netlink.parsing(action):
        attributes = message.attributes(data, start + ipset_message.HEADER_SIZE, end)
        newest = _byte(data, attributes[ipset_message.REVISION])
        return Range(_byte(data, attributes[ipset_message.LOWEST_REVISION]), newest)


def _byte(data: bytes, at: tuple[int, int]) -> int:
    """An attribute of one byte.

    Raises:
        ValueError: its length is not one byte.
    """
    (value,) = data[at[0] : at[1]]
    return value
