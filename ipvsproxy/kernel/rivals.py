"""Finds programs and rules on this host that intercept packets to Services. The search changes nothing on the host.

Every call blocks.
"""

import itertools
import pathlib
import re
import shutil
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from ipvsproxy.kernel.base.errors import KernelError
from ipvsproxy.kernel.iptables import iptables_driver
from ipvsproxy.kernel.iptables import process as iptables_process
from ipvsproxy.kernel.iptables import variant as iptables_variant
from ipvsproxy.kernel.iptables.syntax import rules
from ipvsproxy.kernel.nftables import nft_tables
from ipvsproxy.kernel.nftables import rule as nft_rule
from ipvsproxy.model.net import Address, Family, Network, Protocol, parse_network

_RECEIVING = {Protocol.TCP: ("tcp", "0A"), Protocol.UDP: ("udp", "07")}
"""For each protocol: the table in ``/proc/net``, and the state of a socket that receives packets from all clients (TCP_LISTEN,
TCP_CLOSE)."""
_MAPPED = bytes(10) + b"\xff\xff"
_OURS = re.compile(r"-A KUBE-")
"""Matches the beginning of a rule in a chain of ipvsproxy, of the kubelet or of kube-proxy."""
_TARGET = re.compile(r" -j (?:(DNAT|REDIRECT)|NOTRACK|CT .*--notrack)\b")
_DESTINATION = re.compile(r"(?<!!) -d (\S+)")
_PROTOCOL = re.compile(r" -p (tcp|udp|sctp)\b")
_PORTS = re.compile(r"(?<!!) --dports? (\S+)")
# These attributes are only tested for presence, because ``nft_rule.expressions`` leaves out attributes whose value is 0.
_IS_DESTINATION_NAT, _IS_UNEQUAL = (1,), (2,)
# The numbers of the attributes that say what is loaded: for ``meta``, the key; for ``payload``, the header, the offset and the
# length.
_LOADED = ((2,), (3,), (4,))
_DESTINATIONS = ((16, 4), (24, 16))  # The offset and length of the destination address, in the IPv4 and in the IPv6 header.
_DESTINATION_STARTS = {(nft_rule.Base.NETWORK, offset) for offset, _ in _DESTINATIONS}
_PROTOCOLS = {bytes([one]): one for one in Protocol}


class BoundSocket(NamedTuple):
    """A socket that receives packets from any client, and its program as ``name (process 123)``."""

    protocol: Protocol
    address: Address
    port: int
    program: str


class PortRule(NamedTuple):
    """A rule that redirects packets, or exempts packets from connection tracking.

    For a rule of iptables, ``text`` has the form of a command. The rule applies to packets to ``destination`` (None means any
    address) and to ``ports`` (if ``ports`` is empty, to all ports).
    """

    text: str
    exempts: bool
    protocol: Protocol | None
    destination: Network | None
    ports: tuple[range, ...]

    def has(self, protocol: Protocol, port: int) -> bool:
        """Whether the rule applies to packets to the given port."""
        return self.protocol in (None, protocol) and (not self.ports or any(port in one for one in self.ports))


class Rivals(NamedTuple):
    """The sockets and rules that intercept packets to Services, and a reason for each part that could not be read."""

    sockets: tuple[BoundSocket, ...] = ()
    rules: tuple[PortRule, ...] = ()
    unknown: tuple[str, ...] = ()


def read(ports: Collection[tuple[Protocol, int]]) -> Rivals:
    """Read the sockets that use the given ports, and the rules of iptables and nf_tables for all ports."""
    plain = [iptables_driver.COMMANDS] if shutil.which("iptables-save") else []
    listings, failures = listings_of_rules(iptables_variant.installed(), plain)
    rules = dict.fromkeys(rule for text in listings.values() for rule in port_rules(text))
    unread: tuple[str, ...] = ()
    try:
        rules |= dict.fromkeys(rule for one in nft_tables.rules() if (rule := nftables_rule(*one)))
    except KernelError as error:
        unread = (str(error),)
    return Rivals(tuple(sockets(ports)), tuple(rules), (*failures, *unread))


def listings_of_rules(
    variants: Collection[iptables_variant.Variant], otherwise: Sequence[Mapping[Family, str]] = ()
) -> tuple[Mapping[str, str], Sequence[str]]:
    """The output of the ``iptables-save`` programs of both families and the given variants.

    In the first result, each key is a program's name without its ending ``-save``, and the value is the program's output.

    The second result has the reason for each program that could not be run. A program that exits with an error is in neither
    result, because the error means that this kernel has no tables of the program's variant. ``otherwise`` are the programs to run
    if no variants are given.
    """
    listings: dict[str, str] = {}
    failures: list[str] = []
    for of_families in [iptables_variant.commands(variant) for variant in variants] or otherwise:
        for command in of_families.values():
            try:
                listings[command] = iptables_process.run(f"{command}-save")
            except KernelError as error:
                if error.errno:
                    failures.append(str(error))
    return listings, failures


def port_rules(saved: str) -> Iterator[PortRule]:
    """Rules of other programs that redirect packets to ports, or exempt packets from connection tracking.

    Rules in user-defined chains are included, even if no packet reaches these chains.
    """
    for (table, chain), rule in rules(saved, may_be_cut=True):
        line = f"-A {chain} {rule}"
        target = _TARGET.search(line)
        if target is None or _OURS.match(line):
            continue
        destination, protocol, ports = _DESTINATION.search(line), _PROTOCOL.search(line), _PORTS.search(line)
        if ports or (destination and not target[1]):
            yield PortRule(
                f"-t {table} {line}",
                not target[1],
                Protocol[protocol[1].upper()] if protocol else None,
                parse_network(destination[1]) if destination else None,
                tuple(_port_range(one) for one in ports[1].split(",")) if ports else (),
            )


def nftables_rule(where: str, rule: Sequence[nft_tables.Expression]) -> PortRule | None:
    """The ``PortRule`` for an nf_tables rule that redirects packets to one port.

    None means that the rule does something else, or matches a range or a set of ports or addresses. The result for a
    rule of iptables-nft is None, because iptables-nft redirects packets by targets of iptables.
    """
    if not any(name == "redir" or (name == "nat" and _IS_DESTINATION_NAT in values) for name, values in rule):
        return None
    compared = {
        (before, *_numbers(loaded)): values.get((3, 1), b"")
        for (before, loaded), (name, values) in itertools.pairwise(rule)
        if name == "cmp" and _IS_UNEQUAL not in values
    }
    number = compared.get(("meta", nft_rule.Meta.PROTOCOL, 0, 0), b"")
    port = int.from_bytes(compared.get(("payload", nft_rule.Base.TRANSPORT, 2, 2), b""), "big")
    if number not in _PROTOCOLS or not port:
        return None
    to = b"".join(compared.get(("payload", nft_rule.Base.NETWORK, *place), b"") for place in _DESTINATIONS)
    if not to and any(name == "payload" and _numbers(loaded)[:2] in _DESTINATION_STARTS for name, loaded in rule):
        return None  # the rule matches a range or a set of addresses
    protocol = _PROTOCOLS[number]
    network = Network(Address(to), len(to) * 8) if to else None
    text = f"{where}: {f'to {network}, ' if network else ''}{protocol.name.lower()} dport {port}"
    return PortRule(text, exempts=False, protocol=protocol, destination=network, ports=(range(port, port + 1),))


def _numbers(loaded: Mapping[tuple[int, ...], bytes]) -> tuple[int, ...]:
    return tuple(int.from_bytes(loaded.get(part, b""), "big") for part in _LOADED)


def _port_range(text: str) -> range:
    first, _, last = text.partition(":")
    return range(int(first), int(last or first) + 1)


def sockets(ports: Collection[tuple[Protocol, int]], proc: pathlib.Path = pathlib.Path("/proc")) -> Iterator[BoundSocket]:
    """The sockets of this network namespace that receive packets to the given TCP and UDP ports."""
    found: dict[str, BoundSocket] = {}
    for protocol, (table, receiving) in _RECEIVING.items():
        for path in (proc / "thread-self/net" / table, proc / "thread-self/net" / f"{table}6"):
            for line in path.read_text().splitlines()[1:] if path.exists() else ():
                fields = line.split()
                address, _, port = fields[1].partition(":")
                if fields[3] == receiving and (protocol, int(port, 16)) in ports:
                    hidden = "a process that is not visible here"
                    found[f"socket:[{fields[9]}]"] = BoundSocket(protocol, _address(address), int(port, 16), hidden)
    for process, target in _open_sockets(proc) if found else ():
        if target in found:
            found[target] = found[target]._replace(program=f"{_name(process)} (process {process.name})")
    yield from found.values()


def _address(text: str) -> Address:
    """Parses an address from ``/proc``, where each 32 bits of the address are a hexadecimal number in host byte order."""
    raw = bytes.fromhex(text)
    if sys.byteorder == "little":
        raw = b"".join(raw[place : place + 4][::-1] for place in range(0, len(raw), 4))
    return Address(raw.removeprefix(_MAPPED))


def _name(process: pathlib.Path) -> str:
    """The name of a process or, if the process runs a Python program, the name of its script."""
    try:
        words = (process / "cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return "?"
    names = [pathlib.PurePath(word).name for word in words if word and not word.startswith("-")]
    return names[1] if len(names) > 1 and names[0].startswith("python") else "".join(names[:1]) or "?"


def _open_sockets(proc: pathlib.Path) -> Iterator[tuple[pathlib.Path, str]]:
    for process in proc.iterdir():
        if not process.name.isdecimal():
            continue
        try:
            for descriptor in (process / "fd").iterdir():
                yield process, str(descriptor.readlink())
        except OSError:  # the process has ended, or belongs to another user
            continue
