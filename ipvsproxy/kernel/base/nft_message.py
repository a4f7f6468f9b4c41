"""nf_tables messages as bytes: transactions on tables, chains, rules, sets and elements, and queries for them.

The numbers and layouts are from include/uapi/linux/netfilter/nf_tables.h and nfnetlink.h. Numbers are in network byte order,
except numbers that a register holds.
"""

import errno
import socket
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from ipvsproxy.kernel.base import message, netlink
from ipvsproxy.kernel.base.message import attribute, integer, nested, string
from ipvsproxy.model.rules import BaseChain

TABLE = "ipvsproxy"
"""Our table, of the family inet. ipvsproxy changes no other table, except tables that kube-proxy has left behind."""
TEXT_LIMIT = 240
"""The length of the longest text that a rule may carry. The kernel's limit is 256 bytes for the text, its NUL, the fingerprint,
and two headers."""
FINGERPRINT_SIZE = 8
"""The size of a rule's fingerprint in bytes."""
COMMENT_LIMIT = 128
"""The length of the longest comment that ``nft`` accepts, including the NUL (NFTNL_UDATA_COMMENT_MAXLEN in libnftnl).

The comment must not contain quotes.
"""
ATTEMPTS = 5
"""The largest number of attempts at a reading or a transaction while other programs change tables."""
STALE = 85
"""The error ERESTART: another program has changed the rules since the generation that a transaction names."""

NFTA_TABLE_NAME, NFTA_TABLE_FLAGS, NFTA_TABLE_USERDATA = 1, 2, 6
NFTA_CHAIN_TABLE, NFTA_CHAIN_NAME, NFTA_CHAIN_HOOK, NFTA_CHAIN_POLICY, NFTA_CHAIN_TYPE = 1, 3, 4, 5, 7
NFTA_HOOK_HOOKNUM, NFTA_HOOK_PRIORITY = 1, 2
NFTA_RULE_TABLE, NFTA_RULE_CHAIN, NFTA_RULE_HANDLE, NFTA_RULE_EXPRESSIONS, NFTA_RULE_USERDATA = 1, 2, 3, 4, 7
NFTA_SET_TABLE, NFTA_SET_NAME, NFTA_SET_FLAGS = 1, 2, 3
NFTA_SET_KEY_TYPE, NFTA_SET_KEY_LEN, NFTA_SET_DATA_TYPE, NFTA_SET_DATA_LEN = 4, 5, 6, 7
NFTA_SET_DESC, NFTA_SET_ID, NFTA_SET_USERDATA = 9, 10, 13
NFTA_SET_DESC_SIZE = 1
NFTA_SET_ELEM_LIST_TABLE, NFTA_SET_ELEM_LIST_SET, NFTA_SET_ELEM_LIST_ELEMENTS = 1, 2, 3
"""Attributes of messages. The constants have the kernel's names, which docs/compatibility.md uses as well."""
IS_DORMANT = 1
IS_MAP = 8
ACCEPT_POLICY = 1

HOOKS = ("prerouting", "input", "forward", "output", "postrouting")
"""The names of the hooks in the families ``inet``, ``ip`` and ``ip6``. The index of a name is the hook's number (NF_INET_*)."""

_SUBSYSTEM = 10 << 8
NFT_MSG_NEWTABLE, NFT_MSG_GETTABLE, NFT_MSG_DELTABLE = range(3)
NFT_MSG_NEWCHAIN, NFT_MSG_GETCHAIN, NFT_MSG_DELCHAIN = range(3, 6)
NFT_MSG_NEWRULE, NFT_MSG_GETRULE, NFT_MSG_DELRULE = range(6, 9)
NFT_MSG_NEWSET, NFT_MSG_GETSET, NFT_MSG_DELSET = range(9, 12)
NFT_MSG_NEWSETELEM, NFT_MSG_GETSETELEM, NFT_MSG_DELSETELEM = range(12, 15)
NFT_MSG_GETGEN = 16
_BEGIN, _END = 16, 17
NFTA_GEN_ID = 1
_APPEND = 0x800
INET = 1  # The family NFPROTO_INET.
_DATA_OF_THE_HOST = struct.pack("=BBI", 1, 4, 1)  # NFTNL_UDATA_SET_DATABYTEORDER with the value for host byte order.
_COMMENT = 0  # NFTNL_UDATA_RULE_COMMENT: programs such as nft print a text of this type as a comment.
_LONG_TEXT, _FINGERPRINT = 0x69, 0x6A  # Only ipvsproxy uses these two types; other programs ignore them.
NFTA_LIST_ELEM = 1
NFTA_EXPR_NAME, NFTA_EXPR_DATA = 1, 2
NFTA_DATA_VALUE, NFTA_DATA_VERDICT, NFTA_VERDICT_CODE, NFTA_VERDICT_CHAIN = 1, 2, 1, 2
NFTA_SET_ELEM_KEY, NFTA_SET_ELEM_DATA, NFTA_SET_ELEM_FLAGS, NFTA_SET_ELEM_USERDATA = 1, 2, 3, 6
_FOR_ALL_OTHERS = 0x2


def _message(kind: int, flags: int, payload: bytes, family: int = INET) -> bytes:
    return message.netfilter(_SUBSYSTEM | kind, netlink.REQUEST | flags, family, payload)


def transaction(messages: Sequence[bytes], generation: int | None = None) -> list[bytes]:
    """The messages of a transaction, which the kernel applies either completely or not at all.

    The caller must send all messages by one call of ``Channel.run``. The result begins with the message that starts the
    transaction. Because kernels before 6.10 do not acknowledge the end of a transaction, the end is not a separate message, but
    is appended to the last message. If ``generation`` is given and is not the kernel's generation any more, the kernel refuses
    the transaction with ``STALE``.
    """
    named = integer(NFTA_GEN_ID, generation) if generation is not None else b""
    begin, end = (
        message.netfilter(kind, netlink.REQUEST, socket.AF_UNSPEC, attributes, resource=_SUBSYSTEM >> 8)
        for kind, attributes in ((_BEGIN, named), (_END, b""))
    )
    return [begin, *messages[:-1], messages[-1] + end]


def run(channel: netlink.Channel, messages: Sequence[bytes], generation: int | None = None) -> dict[int, int]:
    """Have the kernel apply messages as one transaction, either completely or not at all.

    Returns the error number of each refused message by the index of the message; index -1 means the whole transaction. An
    empty result means that all messages have been applied.
    """
    failed = channel.run(transaction(messages, generation), STALE)
    if failed.get(0) == STALE:
        return {-1: STALE}
    refused = {index - 1: number for index, number in failed.items() if number != netlink.UNANSWERED}
    return refused or {index - 1: number for index, number in failed.items()}


def run_while_stale(
    channel: netlink.Channel, make: Callable[[], tuple[Sequence[bytes], int | None]], *, insists: bool = False
) -> dict[int, int]:
    """Run a transaction with the messages and the generation that ``make`` returns; the result is the same as that of ``run``.

    If other programs change tables before the transaction ends, ``make`` is called again, in at most ``ATTEMPTS`` attempts. With
    ``insists``, the last attempt names no generation, so the attempt succeeds even if other programs change tables all the time.
    If ``make`` returns no messages, the transaction counts as successful.
    """
    for attempt in range(ATTEMPTS):
        messages, generation = make()
        is_forced = insists and attempt == ATTEMPTS - 1
        failed = run(channel, messages, None if is_forced else generation) if messages else {}
        if STALE not in failed.values():
            break
    return failed


def trial(family: int, table: str) -> list[bytes]:
    """Creates a table with a chain, then removes a chain that does not exist.

    The kernel refuses this removal (ENOENT), and so undoes the whole transaction.
    """
    chain_name, absent = "ipvsproxy-trial", "ipvsproxy-absent"
    return [
        _message(NFT_MSG_NEWTABLE, netlink.CREATE, string(1, table), family),
        _message(NFT_MSG_NEWCHAIN, netlink.CREATE, string(NFTA_CHAIN_TABLE, table) + string(NFTA_CHAIN_NAME, chain_name), family),
        _message(NFT_MSG_DELCHAIN, 0, string(NFTA_CHAIN_TABLE, table) + string(NFTA_CHAIN_NAME, absent), family),
    ]


def table() -> bytes:
    """Creates our table, or makes the existing table active if it is dormant."""
    return _message(NFT_MSG_NEWTABLE, netlink.CREATE, string(1, TABLE) + integer(NFTA_TABLE_FLAGS, 0))


def table_removal(name: str = TABLE, family: int = INET) -> bytes:
    """Removes a table and everything in it."""
    return _message(NFT_MSG_DELTABLE, 0, string(NFTA_TABLE_NAME, name), family)


def chain(name: str, place: BaseChain | None = None) -> bytes:
    """Creates a chain; an existing chain is not changed."""
    payload = string(NFTA_CHAIN_TABLE, TABLE) + string(NFTA_CHAIN_NAME, name)
    if place is not None:
        number = integer(NFTA_HOOK_HOOKNUM, HOOKS.index(place.hook))
        payload += nested(NFTA_CHAIN_HOOK, number, integer(NFTA_HOOK_PRIORITY, place.priority))
        payload += integer(NFTA_CHAIN_POLICY, ACCEPT_POLICY) + string(NFTA_CHAIN_TYPE, place.kind)
    return _message(NFT_MSG_NEWCHAIN, netlink.CREATE, payload)


def chain_removal(name: str) -> bytes:
    """Removes a chain that is empty and to which no rule jumps."""
    return _message(NFT_MSG_DELCHAIN, 0, string(NFTA_CHAIN_TABLE, TABLE) + string(NFTA_CHAIN_NAME, name))


def flushing(name: str) -> bytes:
    """Removes all rules of a chain."""
    return _message(NFT_MSG_DELRULE, 0, string(NFTA_RULE_TABLE, TABLE) + string(NFTA_RULE_CHAIN, name))


def rule(name: str, expressions: Sequence[bytes], carried: str, fingerprint: bytes = b"") -> bytes:
    """Appends a rule to a chain.

    The rule carries a text and, unless ``fingerprint`` is empty, a fingerprint of ``FINGERPRINT_SIZE`` bytes. If the text of the
    rule is short enough for a comment, programs such as nft print the text as the rule's comment.
    """
    marked = bytes((_FINGERPRINT, len(fingerprint))) + fingerprint if fingerprint else b""
    return rule_again(name, b"".join(expressions), _user_data(carried) + marked)


def rule_again(name: str, expressions: bytes, user_data: bytes) -> bytes:
    """Appends a rule with the given expressions and user data to a chain."""
    payload = string(NFTA_RULE_TABLE, TABLE) + string(NFTA_RULE_CHAIN, name) + nested(NFTA_RULE_EXPRESSIONS, expressions)
    payload += attribute(NFTA_RULE_USERDATA, user_data)
    return _message(NFT_MSG_NEWRULE, netlink.CREATE | _APPEND, payload)


def _user_data(carried: str) -> bytes:
    encoded = carried.encode()[:TEXT_LIMIT] + b"\0"
    return bytes((_COMMENT if len(encoded) <= COMMENT_LIMIT else _LONG_TEXT, len(encoded))) + encoded


def read(part: netlink.Reply) -> message.Attributes:
    """The attributes of one message in an answer."""
    data, start, end = part
    return message.Attributes(data, start + message.NETFILTER_HEADER, end)


def text_of(user_data: bytes) -> str:
    """The text in the user data of a rule, a table or an element; empty if the user data has no text."""
    return _value(user_data, _COMMENT, _LONG_TEXT).split(b"\0", 1)[0].decode(errors="replace")


def fingerprint_of(user_data: bytes) -> bytes:
    """The fingerprint in the user data of a rule; empty if there is none."""
    return _value(user_data, _FINGERPRINT)


def _value(user_data: bytes, *kinds: int) -> bytes:
    while len(user_data) > 2:  # noqa: PLR2004 - each item has a byte for its type and a byte for its length
        kind, length = user_data[:2]
        if kind in kinds:
            return user_data[2 : 2 + length]
        user_data = user_data[2 + length :]
    return b""


class SetShape(NamedTuple):
    """The parameters of a set: the type and length of its keys and, if the set is a map, of its values.

    A type is a number with six bits for each field of a key; the program ``nft`` interprets this number, and the kernel only
    stores it. ``is_plain`` means that the set has no flag except possibly the map flag, and has no size limit.
    """

    key_type: int
    key_length: int
    data_type: int = 0
    data_length: int = 0
    is_plain: bool = True


def _set(name: str) -> bytes:
    return string(NFTA_SET_TABLE, TABLE) + string(NFTA_SET_NAME, name)


def new_set(name: str, shape: SetShape, number: int) -> bytes:
    """Creates a set.

    Creating a set fails if a set with the same name exists. Each set that a transaction creates needs a different ``number``.
    """
    payload = _set(name) + integer(NFTA_SET_FLAGS, IS_MAP if shape.data_length else 0)
    payload += integer(NFTA_SET_KEY_TYPE, shape.key_type) + integer(NFTA_SET_KEY_LEN, shape.key_length)
    if shape.data_length:
        payload += integer(NFTA_SET_DATA_TYPE, shape.data_type) + integer(NFTA_SET_DATA_LEN, shape.data_length)
        payload += attribute(NFTA_SET_USERDATA, _DATA_OF_THE_HOST)
    return _message(NFT_MSG_NEWSET, netlink.CREATE | netlink.EXCLUSIVE, payload + integer(NFTA_SET_ID, number))


def set_removal(name: str) -> bytes:
    """Removes a set and its elements; the removal fails while a rule uses the set."""
    return _message(NFT_MSG_DELSET, 0, _set(name))


def element(key: bytes, data: bytes = b"", comment: str = "") -> bytes:
    """One element of a set, or of a map."""
    mapped = nested(NFTA_SET_ELEM_DATA, attribute(NFTA_DATA_VALUE, data)) if data else b""
    commented = attribute(NFTA_SET_ELEM_USERDATA, _user_data(comment)) if comment else b""
    return nested(NFTA_LIST_ELEM, nested(NFTA_SET_ELEM_KEY, attribute(NFTA_DATA_VALUE, key)), mapped, commented)


def element_for_all_others() -> bytes:
    """A catch-all element (NFT_SET_ELEM_CATCHALL), encoded for its removal; it matches every key that is not in the set."""
    return nested(NFTA_LIST_ELEM, integer(NFTA_SET_ELEM_FLAGS, _FOR_ALL_OTHERS))


def _elements(name: str, encoded: bytes = b"") -> bytes:
    listed = nested(NFTA_SET_ELEM_LIST_ELEMENTS, encoded) if encoded else b""
    return string(NFTA_SET_ELEM_LIST_TABLE, TABLE) + string(NFTA_SET_ELEM_LIST_SET, name) + listed


def elements(name: str, encoded: bytes, *, is_removal: bool, is_exclusive: bool = False) -> bytes:
    """Adds elements to a set, or removes elements from the set.

    If ``is_exclusive`` is false, an addition succeeds even if the element is already present with the same data. The element then
    keeps its old comment. Removing an element that is absent fails.
    """
    flags = 0 if is_removal else netlink.CREATE | netlink.EXCLUSIVE * is_exclusive
    return _message(NFT_MSG_DELSETELEM if is_removal else NFT_MSG_NEWSETELEM, flags, _elements(name, encoded))


def is_for_all_others(found: message.Attributes) -> bool:
    """Whether an element is the catch-all element of its set; a catch-all element has no key."""
    return bool(found.number(NFTA_SET_ELEM_FLAGS, 0) & _FOR_ALL_OTHERS)


def read_element(found: message.Attributes) -> tuple[bytes, bytes, str]:
    """The key, the mapped value and the comment of an element.

    Raises:
        KeyError: the element is a catch-all element, which has no key.
    """
    key = found.inside(NFTA_SET_ELEM_KEY).payload(NFTA_DATA_VALUE)
    mapped = found.inside(NFTA_SET_ELEM_DATA).payload(NFTA_DATA_VALUE, b"")
    return key, mapped, text_of(found.payload(NFTA_SET_ELEM_USERDATA, b""))


def table_query(name: str = TABLE, family: int = INET) -> bytes:
    """The query for a table; the kernel answers ENOENT if the table does not exist."""
    return _message(NFT_MSG_GETTABLE, 0, string(NFTA_TABLE_NAME, name), family)


def tables_query() -> bytes:
    """The request for a dump of the tables of all families."""
    return _message(NFT_MSG_GETTABLE, netlink.DUMP, b"", socket.AF_UNSPEC)


def chains_query(family: int = INET) -> bytes:
    """The request for a dump of the chains of all tables of one family: inet (our table), or a family of iptables-nft."""
    return _message(NFT_MSG_GETCHAIN, netlink.DUMP, b"", family)


def rules_query(table: str = TABLE, family: int = INET) -> bytes:
    """The request for a dump of the rules of a table."""
    return _message(NFT_MSG_GETRULE, netlink.DUMP, string(NFTA_RULE_TABLE, table), family)


def set_query(name: str) -> bytes:
    """The query for the parameters of a set; the kernel answers ENOENT if the set does not exist."""
    return _message(NFT_MSG_GETSET, 0, _set(name))


def sets_query(table: str = TABLE, family: int = INET) -> bytes:
    """The request for a dump of the parameters of a table's sets."""
    return _message(NFT_MSG_GETSET, netlink.DUMP, string(NFTA_SET_TABLE, table), family)


def elements_query(name: str) -> bytes:
    """The request for a dump of the elements of a set."""
    return _message(NFT_MSG_GETSETELEM, netlink.DUMP, _elements(name))


def element_query(name: str, encoded: bytes) -> bytes:
    """The query for an element; the kernel answers ENOENT if the element or its set does not exist."""
    return _message(NFT_MSG_GETSETELEM, 0, _elements(name, encoded))


def generation(channel: netlink.Channel) -> int:
    """The number of the current generation; the number changes whenever any table in this network namespace changes.

    Raises:
        KernelError: the kernel has no nf_tables (EINVAL), or the kernel did not answer.
    """
    action = "read the generation of nf_tables"
    answer = channel.ask(_message(NFT_MSG_GETGEN, 0, b"", socket.AF_UNSPEC), action)
    with netlink.parsing(action):
        return read(answer).number(NFTA_GEN_ID)


def explain(number: int) -> str:
    """What an error number from a transaction means."""
    return _MEANINGS.get(number) or netlink.explain(number)


_MEANINGS: Mapping[int, str] = {
    errno.ENOENT: "the table, chain, set or element does not exist, or this kernel lacks a module of nf_tables",
    errno.EPERM: "this process lacks the capability NET_ADMIN, or the table belongs to another process (its flag owner)",
    errno.EBUSY: "it is in use, or exists with another content",
    errno.EOPNOTSUPP: "this kernel lacks this feature of nf_tables",
    STALE: "other programs keep changing the rules of nf_tables",
}
