"""Translates one rule into expressions of nf_tables that have the same effect on packets as the rule has in iptables.

Most rules become one rule of nf_tables; a rule that matches a set of ranges or several protocols becomes several nf_tables rules.
Because expressions cannot be translated back into a rule, each rule of nf_tables carries the text of the original rule. Each rule
of nf_tables also carries a fingerprint of the expressions that this module made from the original rule. To find changes, the
driver compares the observed expressions with the fingerprint.

The following differences from iptables do not matter to packets:

* nf_tables has no equivalent of ``physdev``. Our rules use ``physdev`` only to accept a packet that the next rule accepts as
  well.
* ``ACCEPT`` in ``nat`` would not prevent other tables from translating the packet. Instead of ``ACCEPT``, a rule translates the
  packet's destination address to the same address, which ends the search for a translation.
* nf_tables has no equivalent of ``xt_ipvs``. Instead of ``xt_ipvs``, rules use connection tracking, which knows the destination
  of a connection's first packet and the direction of each packet.
* A rule with a set of marks writes the whole mark, and only for packets without a mark, because kernels before 6.13 cannot
  combine two registers.

The program ``nft`` can load these rules from its own output, so a saved ruleset with our table can be restored. ``nft`` rejects a
look-up key that contains a constant, so rules derive constants from the packet's mark. ``nft`` also rejects a rule that reads a
port from connection tracking before the rule has matched the protocol.
"""

import enum
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import assert_never

from ipvsproxy.kernel.base import message
from ipvsproxy.kernel.base import nft_message as nft
from ipvsproxy.kernel.base.message import attribute, integer, nested, string
from ipvsproxy.model.net import Family, Network, Protocol
from ipvsproxy.model.rules import (
    ConnectionState,
    InterfaceMatch,
    InvertMark,
    Jump,
    JumpTo,
    LimitSegments,
    Masquerade,
    Rule,
    SetMark,
    SetMatch,
    Side,
    TakeMark,
    Target,
    Verdict,
)
from ipvsproxy.model.sets import IP_SETS, SetType

Expressions = Sequence[bytes]

ENCODING = 1
"""A number that is part of each fingerprint. After a change of this number, rules that an earlier version has written are written
again.

Increase the number when the expressions of any rule change although its text stays the same.
"""

_VERDICT_REGISTER = 0


class Base(enum.IntEnum):
    """The packet header at which ``payload`` starts to count the offset."""

    NETWORK = 1
    TRANSPORT = 2


class Meta(enum.IntEnum):
    """The property of a packet that ``meta`` reads or writes."""

    MARK = 3
    INTERFACE_OF_ARRIVAL = 6
    FAMILY = 15
    PROTOCOL = 16


class VerdictCode(enum.IntEnum):
    """What a rule does with a packet."""

    DROP = 0
    ACCEPT = 1
    JUMP = -3
    RETURN = -5


_OFFSETS: Mapping[Family, Mapping[Side, int]] = {
    Family.IPV4: {Side.SOURCE: 12, Side.DESTINATION: 16},
    Family.IPV6: {Side.SOURCE: 8, Side.DESTINATION: 24},
}
"""The offset of each address in the network header, in bytes."""
_PORTS: Mapping[Side, int] = {Side.SOURCE: 0, Side.DESTINATION: 2}
"""The offsets of the ports in the transport header, in bytes. The offsets are the same in TCP, UDP and SCTP."""
_STATES: Mapping[ConnectionState, int] = {ConnectionState.ESTABLISHED: 2, ConnectionState.RELATED: 4, ConnectionState.NEW: 8}
_TUNNELS: Mapping[Family, int] = {Family.IPV4: 4, Family.IPV6: 41}  # IPPROTO_IPIP, IPPROTO_IPV6
_LOCAL = struct.pack("=I", 2)  # RTN_LOCAL
_NAME_SIZE = 16
_ALL = 0xFFFFFFFF


def chain_name(family: Family, table: str, chain: str) -> str:
    """The name that a chain in the iptables table ``table`` has in our table."""
    return f"{family.label}-{table}-{chain}"


def expand(rule: Rule, family: Family, table: str) -> list[Expressions]:
    """The ordered nf_tables rules that replace one rule of a chain in the iptables table ``table``.

    Raises:
        ValueError: a set is unknown, or a match does not fit the type of its set.
    """
    matches = (*_of_family(family), *_matches(rule, family))
    looked_up = rule.set
    if isinstance(rule.target, TakeMark):
        looked_up, matches = rule.target.match, (*matches, meta(Meta.MARK), compare(bytes(4)))
    keys = list(_lookups(looked_up, family, rule.protocol)) if looked_up else [()]
    target = tuple(_target(rule.target, family, table))
    return [(*matches, *key, *target) for key in keys]


def jump(to: Jump, family: Family) -> Expressions:
    """The rule by which packets of an IP family jump from a base chain to one of our chains."""
    return (*_of_family(family), verdict(VerdictCode.JUMP, chain_name(family, to.table, to.target)))


def _of_family(family: Family) -> Expressions:
    """The match on an IP family.

    Jumps need the match on the IP family; in all other rules, the match only tells programs how to print the rest of the rule.
    """
    return meta(Meta.FAMILY), compare(bytes([family]))


def _matches(rule: Rule, family: Family) -> Iterator[bytes]:
    """The matches of a rule, except the match against a set."""
    if rule.source:
        yield from _network(rule.source, Side.SOURCE)
    if rule.not_source:
        yield from _network(rule.not_source, Side.SOURCE, equal=False)
    if rule.interface:
        yield from _interface(rule.interface)
    if rule.not_interface:
        yield from _interface(rule.not_interface, equal=False)
    yield from _transport(rule, family)
    yield from _marks(rule)
    if rule.connection_states:
        states = sum(_STATES[state] for state in rule.connection_states)
        yield connection_state()
        yield bitwise(struct.pack("=I", states), bytes(4))
        yield compare(bytes(4), equal=False)
    if rule.original_destination:
        yield original_destination(family)
        yield compare(rule.original_destination)
    if rule.virtual_server:
        key = rule.virtual_server
        yield from _protocol(key.protocol)
        yield original_destination(family)
        yield compare(bytes(key.address))
        yield original_port()
        yield compare(struct.pack(">H", key.port))
        yield direction()
        yield compare(bytes(1))
    for is_asked, is_source, equal in (
        (rule.from_this_host, True, True),
        (rule.from_elsewhere, True, False),
        (rule.to_this_host, False, True),
    ):
        if is_asked:
            yield address_type(is_source=is_source)
            yield compare(_LOCAL, equal=equal)


def _transport(rule: Rule, family: Family) -> Iterator[bytes]:
    if rule.protocol or rule.tunnel:
        yield from _protocol(rule.protocol or _TUNNELS[family])
    if rule.syn:
        yield payload(Base.TRANSPORT, 13, 1)
        yield bitwise(b"\6", b"\0")  # SYN and RST
        yield compare(b"\2")


def _network(network: Network, side: Side, *, equal: bool = True) -> Iterator[bytes]:
    family = network.family
    size = family.bits // 8
    yield payload(Base.NETWORK, _OFFSETS[family][side], size)
    if network.prefix_length < family.bits:
        yield bitwise(_mask(family, network.prefix_length), bytes(size))
    yield compare(bytes(network.address), equal=equal)


def _mask(family: Family, prefix_length: int) -> bytes:
    ones = (1 << prefix_length) - 1
    return (ones << (family.bits - prefix_length)).to_bytes(family.bits // 8, "big")


def _interface(match: InterfaceMatch, *, equal: bool = True) -> Iterator[bytes]:
    name = match.name.encode()
    yield meta(Meta.INTERFACE_OF_ARRIVAL)
    yield compare(name if match.is_prefix else name.ljust(_NAME_SIZE, b"\0"), equal=equal)


def _protocol(protocol: int) -> Iterator[bytes]:
    yield meta(Meta.PROTOCOL)
    yield compare(bytes([protocol]))


def _marks(rule: Rule) -> Iterator[bytes]:
    for bits, wanted, equal in (
        (rule.mark, rule.mark, True),
        (rule.not_mark, rule.not_mark, False),
        (rule.any_mark, 0, False),
        (rule.no_mark, 0, True),
    ):
        if bits is not None:
            yield meta(Meta.MARK)
            yield bitwise(struct.pack("=I", bits), bytes(4))
            yield compare(struct.pack("=I", wanted or 0), equal=equal)


def _lookups(match: SetMatch, family: Family, protocol: Protocol | None) -> Iterator[Expressions]:
    """Alternative sequences of expressions; a packet matches the set if one of the sequences matches the packet."""
    ip_set = IP_SETS.get(match.set)
    if ip_set is None or ip_set.family is not family:
        raise ValueError(f"no set {match.set} of {family.label}")
    size, words = family.bits // 8, family.bits // 32

    find = lookup(match.set)
    if ip_set.type is SetType.ADDRESS:
        yield _address(match.sides[0], family, 0), find
        return
    if ip_set.type is SetType.PORT:
        for one in Protocol if protocol is None else (protocol,):
            narrowed = () if protocol else tuple(_protocol(one))
            yield (*narrowed, _port(match.sides[0], 0), find)
        return
    if match.sides[1] is Side.ORIGINAL_DESTINATION and protocol is None:
        for one in Protocol:
            yield from ((*_protocol(one), *found) for found in _lookups(match, family, one))
        return
    key = (_address(match.sides[0], family, 0), meta(Meta.PROTOCOL, words), _port(match.sides[1], words + 1))
    if ip_set.type is SetType.ADDRESS_PORT:
        yield (*key, lookup(match.set, maps_to=0) if ip_set.gives_marks else find)
        return
    other = _address(match.sides[2], family, words + 2)
    if ip_set.type is SetType.ADDRESS_PORT_ADDRESS:
        yield (*key, other, find)
        return
    for prefix_length in range(family.bits, 0, -1):  # one look-up for each prefix length, the longest first, as in ipset
        mask = bitwise(_mask(family, prefix_length), bytes(size), words + 2)
        yield (*key, other, *(() if prefix_length == family.bits else (mask,)), *_constant(prefix_length, 2 * words + 2), find)


def _constant(number: int, register: int) -> Iterator[bytes]:
    """Load a constant by loading the packet's mark and then replacing all bits of the loaded value."""
    yield meta(Meta.MARK, register)
    yield bitwise(bytes(4), struct.pack("=I", number), register)


def _address(side: Side, family: Family, register: int) -> bytes:
    """Load an address of a packet, or of the packet's connection."""
    if side is Side.ORIGINAL_DESTINATION:
        return original_destination(family, register)
    return payload(Base.NETWORK, _OFFSETS[family][side], family.bits // 8, register)


def _port(side: Side, register: int) -> bytes:
    """Load a port of a packet, or of the packet's connection."""
    if side is Side.ORIGINAL_DESTINATION:
        return original_port(register)
    return payload(Base.TRANSPORT, _PORTS[side], 2, register)


def _target(target: Target, family: Family, table: str) -> Iterator[bytes]:
    match target:
        case Verdict.REJECT:
            yield reject()
        case Verdict.ACCEPT if table == "nat":
            yield payload(Base.NETWORK, _OFFSETS[family][Side.DESTINATION], family.bits // 8)
            yield _expression(
                "nat", integer(1, 1), integer(2, family), integer(3, _register())
            )  # the first of the registers into which the address was loaded
        case Verdict():
            yield verdict(VerdictCode[target.name])
        case JumpTo(chain):
            yield verdict(VerdictCode.JUMP, chain_name(family, table, chain))
        case Masquerade(fully_random):
            yield masquerade(fully_random=fully_random)
        case SetMark(bits):
            yield from _change_mark(_ALL & ~bits, bits)
        case InvertMark(bits):
            yield from _change_mark(_ALL, bits)
        case TakeMark():
            yield meta_set(Meta.MARK)  # the look-up in the set has loaded the mark into the register
        case LimitSegments(size):
            yield _expression("immediate", integer(1, _register()), nested(2, _value(struct.pack(">H", size))))
            yield segment_size()
        case never:
            assert_never(never)


def _change_mark(mask: int, inverted: int) -> Iterator[bytes]:
    yield meta(Meta.MARK)
    yield bitwise(struct.pack("=I", mask), struct.pack("=I", inverted))
    yield meta_set(Meta.MARK)


# Expressions of rules. Registers are numbered from 0, in units of four bytes.


def _register(place: int = 0) -> int:
    """The number by which the kernel identifies one of the sixteen registers of four bytes.

    If ``place`` is a multiple of 4, the result is the number of the 16-byte register that begins there, because the kernel
    reports this number.
    """
    return 1 + place // 4 if place % 4 == 0 else 8 + place


def _expression(name: str, *attributes: bytes) -> bytes:
    return nested(nft.NFTA_LIST_ELEM, string(nft.NFTA_EXPR_NAME, name), nested(nft.NFTA_EXPR_DATA, *attributes))


def payload(base: Base, offset: int, length: int, register: int = 0) -> bytes:
    """Load some bytes of the packet."""
    place = integer(2, base) + integer(3, offset) + integer(4, length)
    return _expression("payload", integer(1, _register(register)), place)


def meta(key: Meta, register: int = 0) -> bytes:
    """Load a property of the packet, in host byte order."""
    return _expression("meta", integer(1, _register(register)), integer(2, key))


def meta_set(key: Meta, register: int = 0) -> bytes:
    """Set a property of the packet from a register."""
    return _expression("meta", integer(2, key), integer(3, _register(register)))


def connection_state() -> bytes:
    """Load the bit for the packet's state in connection tracking, in host byte order."""
    return _expression("ct", integer(1, _register()), integer(2, 0))


def original_destination(family: Family, register: int = 0) -> bytes:
    """Load the destination address that the connection's first packet had on arrival."""
    key = 20 if family is Family.IPV4 else 22  # NFT_CT_DST_IP, NFT_CT_DST_IP6
    return _expression("ct", integer(1, _register(register)), integer(2, key), attribute(3, b"\0"))


def original_port(register: int = 0) -> bytes:
    """Load the destination port that the connection's first packet had on arrival."""
    return _expression("ct", integer(1, _register(register)), integer(2, 12), attribute(3, b"\0"))


def direction() -> bytes:
    """Load the direction of the packet in its connection: 0 for packets from the client."""
    return _expression("ct", integer(1, _register()), integer(2, 1))


def address_type(*, is_source: bool) -> bytes:
    """Load the type of the route to an address of the packet, in host byte order."""
    return _expression("fib", integer(1, _register()), integer(2, 3), integer(3, 1 if is_source else 2))


def _value(value: bytes) -> bytes:
    return attribute(nft.NFTA_DATA_VALUE, value)


def compare(value: bytes, *, equal: bool = True) -> bytes:
    """Continue the rule if the first registers hold the given value.

    If ``equal`` is false, continue the rule if the registers hold any other value.
    """
    return _expression("cmp", integer(1, _register()), integer(2, 0 if equal else 1), nested(3, _value(value)))


def bitwise(mask: bytes, inverted: bytes, register: int = 0) -> bytes:
    """Clear all bits of a register that are not in ``mask``, then invert the bits that are in ``inverted``."""
    registers = integer(1, _register(register)) + integer(2, _register(register)) + integer(3, len(mask))
    return _expression("bitwise", registers, nested(4, _value(mask)), nested(5, _value(inverted)))


def verdict(code: VerdictCode, target: str = "") -> bytes:
    """Set the verdict of the rule; ``target`` is the chain of a jump."""
    parts = integer(nft.NFTA_VERDICT_CODE, code) + (string(nft.NFTA_VERDICT_CHAIN, target) if target else b"")
    return _expression("immediate", integer(1, _VERDICT_REGISTER), nested(2, nested(nft.NFTA_DATA_VERDICT, parts)))


def lookup(name: str, *, maps_to: int | None = None) -> bytes:
    """Continue the rule if a set has the key that is in the first registers.

    If the set is a map, load the value of the key.
    """
    destination = integer(3, _register(maps_to)) if maps_to is not None else b""
    return _expression("lookup", string(1, name), integer(2, _register()), destination)


def reject() -> bytes:
    """Reject the packet with the "port unreachable" message of its IP family."""
    return _expression("reject", integer(1, 2), attribute(2, b"\1"))  # NFT_REJECT_ICMPX_UNREACH, NFT_REJECT_ICMPX_PORT_UNREACH


def masquerade(*, fully_random: bool) -> bytes:
    """Replace the packet's source address (masquerade)."""
    return _expression("masq", integer(1, 1 << 4) if fully_random else b"")


def segment_size() -> bytes:
    """Lower a TCP packet's maximum segment size to the number in the first register. A smaller size stays unchanged."""
    option = attribute(2, b"\2") + integer(3, 2) + integer(4, 2) + integer(6, 1)  # TCPOPT_MSS by NFT_EXTHDR_OP_TCPOPT
    return _expression("exthdr", option, integer(7, _register()))


def expressions(data: bytes) -> list[tuple[str, Mapping[tuple[int, ...], bytes]]]:
    """The expressions of a rule: the name of each expression, and the payload of each of its attributes.

    The key of a payload is a tuple of attribute numbers, from the outermost attribute to the attribute that has the payload.

    The result leaves out attributes that only the kernel adds to a rule: attributes that are 0, and the register for the end of a
    range of addresses.
    """
    found: list[tuple[str, Mapping[tuple[int, ...], bytes]]] = []
    for _, first, last in message.walk(data, 0, len(data)):
        parts = message.attributes(data, first, last)
        if nft.NFTA_EXPR_NAME not in parts:
            continue
        name = message.text(data, parts[nft.NFTA_EXPR_NAME])
        values = dict(_values(data, parts[nft.NFTA_EXPR_DATA], name, ())) if nft.NFTA_EXPR_DATA in parts else {}
        found.append((name, {path: value for path, value in values.items() if any(value)}))
    return found


def sent_again(data: bytes) -> bytes:
    """The expressions of a rule that was read, in a form that the kernel accepts: the flags of each ``exthdr`` are removed.

    The kernel shows the flags of an ``exthdr``, but refuses them in an ``exthdr`` that writes (``nft_exthdr_tcp_set_init`` in
    net/netfilter/nft_exthdr.c).
    """
    sent: list[bytes] = []
    for _, start, end in message.walk(data, 0, len(data)):
        found = message.Attributes(data, start, end)
        name, content = found.text(nft.NFTA_EXPR_NAME), found.payload(nft.NFTA_EXPR_DATA, b"")
        if name == "exthdr":
            parts = message.walk(content, 0, len(content))
            content = b"".join(content[first - 4 : (last + 3) & ~3] for number, first, last in parts if number != _EXTHDR_FLAGS)
        sent.append(_expression(name, content))
    return b"".join(sent)


_EXTHDR_FLAGS = 5
_NESTS = {("cmp", (3,)), ("bitwise", (4,)), ("bitwise", (5,)), ("immediate", (2,)), ("immediate", (2, nft.NFTA_DATA_VERDICT))}
_IGNORED = {("nat", (4,)), ("nat", (7,)), ("lookup", (4,))}


def _values(data: bytes, at: tuple[int, int], name: str, path: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], bytes]]:
    for number, start, end in message.walk(data, *at):
        here = (*path, number)
        if (name, here) in _NESTS:
            yield from _values(data, (start, end), name, here)
        elif (name, here) not in _IGNORED:
            yield here, data[start:end]


def decision(name: str, values: Mapping[tuple[int, ...], bytes]) -> str:
    """The expression's verdict in the words of ``nft``, and the chain if the verdict has one.

    If the expression has no verdict: the name of the expression.
    """
    if name != "immediate" or (2, nft.NFTA_DATA_VALUE) in values:
        return name
    code = int.from_bytes(
        values.get((2, nft.NFTA_DATA_VERDICT, nft.NFTA_VERDICT_CODE), b""), "big", signed=True
    )  # the kernel leaves out attributes whose value is 0
    chain = values.get((2, nft.NFTA_DATA_VERDICT, nft.NFTA_VERDICT_CHAIN), b"").rstrip(b"\0").decode(errors="replace")
    return f"{_VERDICT_NAMES.get(code, name)} {chain}".rstrip()


_VERDICT_NAMES: Mapping[int, str] = {-4: "goto", -2: "break", -1: "continue", **{code: code.name.lower() for code in VerdictCode}}
