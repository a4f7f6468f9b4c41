"""One rule as expressions of nf_tables, with the same effect on a packet as in iptables.

Most rules become one rule of nf_tables; a match on one of three protocols, or on a set of ranges, becomes several. There is no
way back from expressions: each carries the text of its rule, and whoever reads one compares its expressions with those that this
module makes of the text.

The differences to iptables, and why a packet does not notice:

* ``physdev`` has no equal. Our rules only use it to accept a packet that the rule behind it accepts as well.
* ``ACCEPT`` in ``nat`` would not end the search of other tables. The destination is bound to itself instead, which does.
* ``xt_ipvs`` has no equal. Connection tracking knows the destination of a connection's first packet, and the direction of each.
* A set of marks writes the whole mark, since nothing in the kernel before 6.13 joins two registers: to packets without a mark.

The program ``nft`` can load again what it prints of these rules, so that a saved ruleset with our table can be restored. It takes
no constant within a key, and knows a port of connection tracking only where the protocol has been asked for.
"""

import socket
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import assert_never

from ipvsproxy.kernel.base import nft_message as nft
from ipvsproxy.kernel.base.nft_message import Base, Meta, VerdictCode
from ipvsproxy.model.net import Family, Network, Protocol
from ipvsproxy.model.rules import (
    ConnectionState,
    InterfaceMatch,
    InvertMark,
    Jump,
    JumpTo,
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

_OFFSETS: Mapping[Family, Mapping[Side, int]] = {
    Family.IPV4: {Side.SOURCE: 12, Side.DESTINATION: 16},
    Family.IPV6: {Side.SOURCE: 8, Side.DESTINATION: 24},
}
"""The places of the addresses in the network header."""
_PORTS: Mapping[Side, int] = {Side.SOURCE: 0, Side.DESTINATION: 2}
"""The places of the ports, which all three protocols have in common."""
_STATES: Mapping[ConnectionState, int] = {ConnectionState.ESTABLISHED: 2, ConnectionState.RELATED: 4, ConnectionState.NEW: 8}
_LOCAL = struct.pack("=I", 2)  # RTN_LOCAL
_FAMILY_NUMBERS: Mapping[Family, int] = {Family.IPV4: socket.AF_INET, Family.IPV6: socket.AF_INET6}
_NAME_SIZE = 16
_ALL = 0xFFFFFFFF
_VERDICTS: Mapping[Verdict, VerdictCode] = {
    Verdict.ACCEPT: VerdictCode.ACCEPT,
    Verdict.DROP: VerdictCode.DROP,
    Verdict.RETURN: VerdictCode.RETURN,
}


def chain_name(family: Family, table: str, chain: str) -> str:
    """The name in our table of a chain that iptables has in ``table``."""
    return f"{family.label}-{table}-{chain}"


def expand(rule: Rule, family: Family, table: str) -> list[Expressions]:
    """The rules of nf_tables for one rule of a chain of ``table``, in their order.

    Raises:
        ValueError: a set is unknown, or is not matched as it is made.
    """
    matches = (*_of_family(family), *_matches(rule, family))
    looked_up = rule.target.match if isinstance(rule.target, TakeMark) else rule.set
    keys = list(_lookups(looked_up, family, rule.protocol)) if looked_up else [()]
    target = tuple(_target(rule.target, family, table))
    return [(*matches, *key, *target) for key in keys]


def jump(to: Jump, family: Family) -> Expressions:
    """The rule that leads packets of a family from a base chain to a chain of ours."""
    return (*_of_family(family), nft.verdict(VerdictCode.JUMP, chain_name(family, to.table, to.target)))


def _of_family(family: Family) -> Expressions:
    """The match on a family, which jumps need; in all other rules it only tells programs how to print what follows."""
    return nft.meta(Meta.FAMILY), nft.compare(bytes([_FAMILY_NUMBERS[family]]))


def _matches(rule: Rule, family: Family) -> Iterator[bytes]:
    """The matches of a rule, except that on a set."""
    if rule.source:
        yield from _network(rule.source, Side.SOURCE)
    if rule.not_source:
        yield from _network(rule.not_source, Side.SOURCE, equal=False)
    if rule.interface:
        yield from _interface(rule.interface)
    if rule.not_interface:
        yield from _interface(rule.not_interface, equal=False)
    if rule.protocol:
        yield from _protocol(rule.protocol)
    yield from _marks(rule)
    if rule.connection_states:
        states = sum(_STATES[state] for state in rule.connection_states)
        yield nft.connection_state()
        yield nft.bitwise(struct.pack("=I", states), bytes(4))
        yield nft.compare(bytes(4), equal=False)
    if rule.original_destination:
        yield nft.original_destination(_FAMILY_NUMBERS[family])
        yield nft.compare(rule.original_destination)
    if rule.virtual_server:
        key = rule.virtual_server
        yield from _protocol(key.protocol)
        yield nft.original_destination(_FAMILY_NUMBERS[family])
        yield nft.compare(bytes(key.address))
        yield nft.original_port()
        yield nft.compare(struct.pack(">H", key.port))
        yield nft.direction()
        yield nft.compare(bytes(1))
    for is_asked, is_source, equal in (
        (rule.from_this_host, True, True),
        (rule.from_elsewhere, True, False),
        (rule.to_this_host, False, True),
    ):
        if is_asked:
            yield nft.address_type(is_source=is_source)
            yield nft.compare(_LOCAL, equal=equal)


def _network(network: Network, side: Side, *, equal: bool = True) -> Iterator[bytes]:
    family = network.family
    size = family.bits // 8
    yield nft.payload(Base.NETWORK, _OFFSETS[family][side], size)
    if network.prefix_length < family.bits:
        yield nft.bitwise(_mask(family, network.prefix_length), bytes(size))
    yield nft.compare(bytes(network.address), equal=equal)


def _mask(family: Family, prefix_length: int) -> bytes:
    ones = (1 << prefix_length) - 1
    return (ones << (family.bits - prefix_length)).to_bytes(family.bits // 8, "big")


def _interface(match: InterfaceMatch, *, equal: bool = True) -> Iterator[bytes]:
    name = match.name.encode()
    yield nft.meta(Meta.INTERFACE_OF_ARRIVAL)
    yield nft.compare(name if match.is_prefix else name.ljust(_NAME_SIZE, b"\0"), equal=equal)


def _protocol(protocol: Protocol) -> Iterator[bytes]:
    yield nft.meta(Meta.PROTOCOL)
    yield nft.compare(bytes([protocol]))


def _marks(rule: Rule) -> Iterator[bytes]:
    for bits, wanted, equal in (
        (rule.mark, rule.mark, True),
        (rule.not_mark, rule.not_mark, False),
        (rule.any_mark, 0, False),
        (rule.no_mark, 0, True),
    ):
        if bits is not None:
            yield nft.meta(Meta.MARK)
            yield nft.bitwise(struct.pack("=I", bits), bytes(4))
            yield nft.compare(struct.pack("=I", wanted or 0), equal=equal)


def _lookups(match: SetMatch, family: Family, protocol: Protocol | None) -> Iterator[Expressions]:
    """The ways to look up a packet in a set."""
    ip_set = IP_SETS.get(match.set)
    if ip_set is None or ip_set.family is not family:
        raise ValueError(f"no set {match.set} of {family.label}")
    size, words = family.bits // 8, family.bits // 32

    find = nft.lookup(match.set)
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
    key = (_address(match.sides[0], family, 0), nft.meta(Meta.PROTOCOL, words), _port(match.sides[1], words + 1))
    if ip_set.type is SetType.ADDRESS_PORT:
        if not ip_set.gives_marks:
            yield (*key, find)
            return
        unmarked = (nft.meta(Meta.MARK), nft.compare(bytes(4)))
        yield (*unmarked, *key, nft.lookup(match.set, maps_to=0), nft.meta_set(Meta.MARK))
        return
    other = _address(match.sides[2], family, words + 2)
    if ip_set.type is SetType.ADDRESS_PORT_ADDRESS:
        yield (*key, other, find)
        return
    for prefix_length in range(family.bits, 0, -1):  # as ipset: one look-up for each length; the narrowest first
        mask = nft.bitwise(_mask(family, prefix_length), bytes(size), words + 2)
        yield (*key, other, *(() if prefix_length == family.bits else (mask,)), *_constant(prefix_length, 2 * words + 2), find)


def _constant(number: int, register: int) -> Iterator[bytes]:
    """Load a number: as the mark of the packet, each bit of which is replaced."""
    yield nft.meta(Meta.MARK, register)
    yield nft.bitwise(bytes(4), struct.pack("=I", number), register)


def _address(side: Side, family: Family, register: int) -> bytes:
    """Load an address of a packet, or of its connection."""
    if side is Side.ORIGINAL_DESTINATION:
        return nft.original_destination(_FAMILY_NUMBERS[family], register)
    return nft.payload(Base.NETWORK, _OFFSETS[family][side], family.bits // 8, register)


def _port(side: Side, register: int) -> bytes:
    """Load a port of a packet, or of its connection."""
    if side is Side.ORIGINAL_DESTINATION:
        return nft.original_port(register)
    return nft.payload(Base.TRANSPORT, _PORTS[side], 2, register)


def _target(target: Target, family: Family, table: str) -> Iterator[bytes]:
    match target:
        case Verdict.REJECT:
            yield nft.reject()
        case Verdict.ACCEPT if table == "nat":
            yield nft.payload(Base.NETWORK, _OFFSETS[family][Side.DESTINATION], family.bits // 8)
            yield nft.destination_nat(_FAMILY_NUMBERS[family])
        case Verdict():
            yield nft.verdict(_VERDICTS[target])
        case JumpTo(chain):
            yield nft.verdict(VerdictCode.JUMP, chain_name(family, table, chain))
        case Masquerade(fully_random):
            yield nft.masquerade(fully_random=fully_random)
        case SetMark(bits):
            yield from _change_mark(_ALL & ~bits, bits)
        case InvertMark(bits):
            yield from _change_mark(_ALL, bits)
        case TakeMark():
            pass  # the look-up has written it
        case never:
            assert_never(never)


def _change_mark(mask: int, inverted: int) -> Iterator[bytes]:
    yield nft.meta(Meta.MARK)
    yield nft.bitwise(struct.pack("=I", mask), struct.pack("=I", inverted))
    yield nft.meta_set(Meta.MARK)
