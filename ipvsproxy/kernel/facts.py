"""Collects facts about this host for ``ipvsproxy doctor``.

Collecting these facts changes nothing on the host. Every call blocks.
"""

import contextlib
import dataclasses
import os
import pathlib
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import NamedTuple, TypeVar

from ipvsproxy.kernel import backends, host, rivals
from ipvsproxy.kernel.backends import BackendChoice, ChosenBackend
from ipvsproxy.kernel.base.errors import KernelError
from ipvsproxy.kernel.base.modules import ModuleState, module_state
from ipvsproxy.kernel.host import Lack, Missing
from ipvsproxy.kernel.iptables import iptables_driver as iptables
from ipvsproxy.kernel.iptables import iptables_tables
from ipvsproxy.kernel.iptables import variant as iptables_variant
from ipvsproxy.kernel.iptables.syntax import rules
from ipvsproxy.kernel.iptables.variant import Variant
from ipvsproxy.kernel.network.routes import LOOPBACK_INDEX
from ipvsproxy.kernel.nftables import nft_tables
from ipvsproxy.kernel.node_kernel import NodeKernel
from ipvsproxy.kernel.sysctls import SysctlDriver
from ipvsproxy.model.kernel import Timeouts
from ipvsproxy.model.net import Family, Protocol
from ipvsproxy.model.rules import Backend, ChainKey, Jump, NftTable
from ipvsproxy.model.sets import IP_SETS
from ipvsproxy.model.state import Observation

_UP = 0x1  # IFF_UP
ALL_BITS = 0xFFFFFFFF
_AFTER_IPVS = frozenset({"FORWARD", "POSTROUTING"})
"""The built-in chains through which a packet passes only after IPVS has seen the packet."""
_OURS = re.compile(r"KUBE-(IPVSPROXY-|MARK-|POSTROUTING$)")
"""Our chains and the chains of the kubelet. The mark bits that these chains write have a known meaning, or are written after IPVS
has seen the packet."""
_MARK = re.compile(r"-j (?:MARK --set-xmark|TPROXY .*--tproxy-mark) (0x[0-9a-f]+)/(0x[0-9a-f]+)")
_RESTORED = re.compile(r"-j CONNMARK --restore-mark(?: --nfmask (0x[0-9a-f]+))?")
_MAPPED = re.compile(r"-j SET --map-set \S+ \S+ .*--map-mark")


T = TypeVar("T")


class MarkRule(NamedTuple):
    """The text of the command that would add a rule, and the bits of the packet mark that the rule writes."""

    text: str
    bits: int


class Loopback(NamedTuple):
    """Whether ``lo`` is up, and how systemd-networkd manages ``lo`` (empty if unknown, or without networkd)."""

    is_up: bool = True
    networkd: str = ""


NO_TROUBLE = Loopback()
"""The state of ``lo`` on nearly every host: ``lo`` is up, and is not known to be managed by systemd-networkd."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """The facts about a host.

    ``unserved`` has a reason for each IP family that this host cannot serve. ``iptables_choice`` is None if the host has no
    iptables. ``chains`` are all chains that iptables shows, in both IP families and both variants. ``tables`` are the tables of
    nf_tables and iptables-legacy that can be read; for our own table, only the chains of other programs are included.
    ``listeners`` are the programs that listen on the TCP ports that ipvsproxy needs. If IPVS cannot be read, ``observation`` is
    empty, ``timeouts`` is None, and ``unreadable`` has the reason. ``bridges`` are the names of the Linux bridges. ``mark_rules``
    are rules of other programs that write a packet's mark before IPVS sees the packet. ``backend`` is the backend that holds
    rules and sets; None means that the kernel did not answer. ``other_backend`` describes our objects in the unused backend; it
    is empty if there are no such objects, or if the unused backend could not be read. ``unread_tables`` has a reason for each
    part of ``chains`` and ``tables`` that could not be read. ``unread_backend`` says why the unused backend could not be read; it
    is empty if the unused backend could be read. ``lacks`` are the optional features that this kernel does not have.
    ``host_ports`` says where hostPort rules have precedence over our rules.
    """

    release: str
    version: tuple[int, int]
    privileges: tuple[Missing, ...]
    features: tuple[Missing, ...]
    modules: Mapping[str, ModuleState]
    sysctls: Mapping[str, str]
    sysctls_writable: bool
    iptables_choice: iptables_variant.VariantChoice | None
    unserved: Mapping[Family, str]
    chains: frozenset[ChainKey]
    tables: tuple[NftTable, ...]
    listeners: Mapping[int, str]
    observation: Observation
    timeouts: Timeouts | None
    unreadable: str
    bridges: tuple[str, ...] = ()
    mark_rules: tuple[MarkRule, ...] = ()
    loopback: Loopback = NO_TROUBLE
    backend: BackendChoice | None = None
    other_backend: str = ""
    unread_tables: tuple[str, ...] = ()
    unread_backend: str = ""
    lacks: tuple[Lack, ...] = ()
    host_ports: tuple[str, ...] = ()


def gather(
    *,
    scheduler: str,
    sysctls: Iterable[str],
    ports: Collection[int],
    chains: Collection[ChainKey],
    jumps: Collection[Jump],
    route_protocol: int,
    backend: Backend = Backend.IPTABLES,
    by_interface: bool = False,
) -> Facts:
    """Gather all facts. ``sysctls`` are paths below ``/proc/sys``.

    ``chains``, ``jumps`` and ``route_protocol`` are ipvsproxy's own values; ``backend`` and ``scheduler`` are the configured
    values. ``by_interface`` means that this node's pods are recognised by their interface.

    Raises:
        KernelError: the kernel version cannot be read.
    """
    runs_iptables = backend in (Backend.IPTABLES, Backend.AUTO)
    privileges, features = host.missing_privileges(runs_iptables=runs_iptables), host.missing_features()
    choice: iptables_variant.VariantChoice | None = None
    chosen: BackendChoice | None = None
    observation = Observation()
    timeouts: Timeouts | None = None
    unserved: Mapping[Family, str] = {}
    unreadable = "; ".join(map(str, (*privileges, *features)))
    lacks: tuple[Lack, ...] = ()
    try:
        chosen = backends.choose(backend)
        if chosen.backend is Backend.IPTABLES:
            choice = iptables_variant.choose(chains)
        if not unreadable:
            commands = choice.commands if choice else iptables.COMMANDS
            kernel = NodeKernel(chains, jumps, chosen=ChosenBackend(chosen.backend, commands), route_protocol=route_protocol)
            try:
                refusals = {family: kernel.rules.usable(family) for family in Family}
                unserved = {family: refusal.reason for family, refusal in refusals.items() if refusal}
                observation = kernel.observe(list(IP_SETS), [family for family in Family if family not in unserved], ())
                unreadable = "; ".join(observation.errors)
                timeouts = kernel.read_timeouts()
                lacks = kernel.lacking(by_interface=by_interface)
            finally:
                kernel.close()
    except KernelError as error:
        unreadable = str(error)
    modules = backends.MODULES[chosen.backend if chosen else Backend.IPTABLES]
    listings, unread_listings = rivals.listings_of_rules(iptables_variant.installed(), [choice.commands] if choice else [])
    foreign_tables, unread_nft_tables = _attempt(nft_tables.read_tables, tuple[NftTable, ...]())
    other_backend, unread_backend = _attempt(lambda: backends.describe_other(chosen.backend) if chosen else "", "")
    variants = dict.fromkeys(Family, choice.variant) if choice else {}
    host_ports, unread_host_ports = _attempt(lambda: iptables_tables.host_ports_before_services(variants), tuple[str, ...]())
    return Facts(
        release=os.uname().release,
        version=host.kernel_version(),
        privileges=privileges,
        features=features,
        modules={name: module_state(name) for name in (*modules, f"ip_vs_{scheduler}")},
        sysctls=SysctlDriver().observe(sysctls),
        sysctls_writable=os.access("/proc/sys/net/ipv4/ip_forward", os.W_OK),
        iptables_choice=choice,
        unserved=unserved,
        chains=frozenset(key for text in listings.values() for key, rule in rules(text, may_be_cut=True) if rule is None),
        tables=(*foreign_tables, *_legacy_tables(listings, choice)),
        listeners=listeners(ports),
        observation=observation,
        timeouts=timeouts,
        unreadable=unreadable,
        bridges=bridges(),
        mark_rules=tuple(dict.fromkeys(rule for text in listings.values() for rule in mark_rules(text))),
        loopback=loopback(),
        backend=chosen,
        other_backend=other_backend,
        unread_tables=(*unread_listings, *unread_nft_tables, *unread_host_ports),
        unread_backend="".join(unread_backend),
        lacks=lacks,
        host_ports=host_ports,
    )


def _attempt(read: Callable[[], T], otherwise: T) -> tuple[T, tuple[str, ...]]:
    """Returns the result of ``read`` and an empty tuple; if ``read`` fails, returns ``otherwise`` and a tuple with the error.

    ``read`` can fail because another program changes tables during every attempt.
    """
    try:
        return read(), ()
    except KernelError as error:
        return otherwise, (str(error),)


def bridges(root: pathlib.Path = pathlib.Path("/")) -> tuple[str, ...]:
    """The names of the Linux bridges in this network namespace."""
    return tuple(sorted(path.parent.name for path in (root / "sys/class/net").glob("*/bridge")))


def loopback(root: pathlib.Path = pathlib.Path("/")) -> Loopback:
    """The state of ``lo``. systemd-networkd writes the state of each interface into a file named by the interface's index."""
    flags, networkd = "0x1", ""
    with contextlib.suppress(OSError):
        flags = (root / "sys/class/net/lo/flags").read_text().strip()
    with contextlib.suppress(OSError):
        lines = (root / f"run/systemd/netif/links/{LOOPBACK_INDEX}").read_text().splitlines()
        networkd = next((line.partition("=")[2] for line in lines if line.startswith("ADMIN_STATE=")), "")
    return Loopback(bool(int(flags, 16) & _UP), networkd)


def listeners(ports: Collection[int], proc: pathlib.Path = pathlib.Path("/proc")) -> Mapping[int, str]:
    """The programs that listen on the given TCP ports of this network namespace, each as ``name (process 123)``."""
    return {one.port: one.program for one in rivals.sockets([(Protocol.TCP, port) for port in ports], proc)}


def _legacy_tables(listings: Mapping[str, str], choice: iptables_variant.VariantChoice | None) -> Iterator[NftTable]:
    legacy = {*iptables_variant.commands(Variant.LEGACY).values()}
    if choice and choice.variant is Variant.LEGACY:
        legacy.update(choice.commands.values())
    for command, text in listings.items():
        if command in legacy:
            yield from nft_tables.legacy_filters(command, text)


def mark_rules(saved: str) -> Iterator[MarkRule]:
    """The rules of other programs that may change a packet's mark before IPVS sees the packet.

    Rules in user-defined chains are included, even if no packet reaches these chains.
    """
    for (table, chain), rule in rules(saved, may_be_cut=True):
        bits = _bits_written(rule or "")
        if bits and chain not in _AFTER_IPVS and not _OURS.match(chain):
            yield MarkRule(f"-t {table} -A {chain} {rule}", bits)


def _bits_written(rule: str) -> int:
    if found := _MARK.search(rule):
        return int(found[1], 16) | int(found[2], 16)
    if found := _RESTORED.search(rule):
        return int(found[1], 16) if found[1] else ALL_BITS
    return ALL_BITS if _MAPPED.search(rule) else 0
