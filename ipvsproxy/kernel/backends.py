"""Chooses the backend for this host's rules and sets, opens the backend's drivers, and finds our objects in the other backend."""

import contextlib
import errno
import pathlib
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple, Protocol, Self

import structlog
from pyroute2.netlink import NETLINK_NETFILTER

from ipvsproxy.kernel import host
from ipvsproxy.kernel.base import modules, netlink
from ipvsproxy.kernel.base import nft_message as nft
from ipvsproxy.kernel.base.errors import KernelError
from ipvsproxy.kernel.base.sets_driver import ObservedSet, SetsDriver
from ipvsproxy.kernel.ipset import ipset_driver as ipset
from ipvsproxy.kernel.ipset.ipset_driver import IpsetDriver
from ipvsproxy.kernel.iptables import iptables_driver as iptables
from ipvsproxy.kernel.iptables import iptables_tables
from ipvsproxy.kernel.iptables.leftover_rules import LeftoverRules
from ipvsproxy.kernel.iptables.rules_driver import RulesDriver
from ipvsproxy.kernel.nftables import nft_tables
from ipvsproxy.kernel.nftables.changes import NftChanges
from ipvsproxy.kernel.nftables.nft_rules_driver import NftRulesDriver
from ipvsproxy.kernel.nftables.nft_sets_driver import NftSetsDriver
from ipvsproxy.kernel.nftables.nftables_driver import NftDriver
from ipvsproxy.model.kind import counted
from ipvsproxy.model.net import Family
from ipvsproxy.model.plan import Operation, Outcome, Verb
from ipvsproxy.model.rules import Backend, ChainKey, Jump
from ipvsproxy.model.sets import IP_SETS, SetKind

log: structlog.typing.FilteringBoundLogger = structlog.get_logger()

_WITH_EXCEPTIONS = frozenset(
    {
        SetKind.IPVS_IPS,
        SetKind.LOAD_BALANCER_FIREWALL,
        SetKind.LOAD_BALANCER,
        SetKind.NODE_PORT_TCP,
        SetKind.NODE_PORT_UDP,
        SetKind.NODE_PORT_SCTP,
    }
)
"""Packets that match one of these sets are refused or masqueraded, unless a second set exempts them. Therefore these sets are
emptied before all other sets."""

MODULES: Mapping[Backend, Sequence[str]] = {Backend.IPTABLES: host.MODULES, Backend.NFTABLES: host.NFTABLES_MODULES}
"""For each backend: the kernel modules that IPVS and the backend need."""


class BackendChoice(NamedTuple):
    """The backend to use, which is never ``AUTO``, and the reason for this choice."""

    backend: Backend
    reason: str


def choose(asked: Backend) -> BackendChoice:
    """The backend to use if ``asked`` is configured.

    ``AUTO`` means nftables on a host that has no iptables or whose kernel lacks a type of ipset; otherwise ``AUTO`` means
    iptables.

    Raises:
        KernelError: the kernel did not answer this time; a later attempt may succeed.
    """
    if asked is not Backend.AUTO:
        return BackendChoice(asked, "it is configured")
    if shutil.which(iptables.COMMANDS[Family.IPV4]) is None:
        return BackendChoice(Backend.NFTABLES, "iptables is not in PATH")
    if missing := host.missing_set_types():
        return BackendChoice(Backend.NFTABLES, missing[0].what)
    return BackendChoice(Backend.IPTABLES, "this host has iptables and ipset")


def to_clean(chains: Collection[ChainKey], root: pathlib.Path = pathlib.Path("/")) -> tuple[Backend, ...]:
    """The backends that may hold our rules or sets; if there is no such backend, the backend that needs no additional module.

    ``chains`` are our chains.

    Raises:
        KernelError: the kernel did not answer whether our table exists.
    """
    found = [Backend.NFTABLES] if nft_tables.has_own_table() else []
    found += [Backend.IPTABLES] if _may_hold_iptables(chains, root) else []
    return tuple(found) or ((Backend.NFTABLES,) if _answers() else (Backend.IPTABLES,))


def _may_hold_iptables(chains: Collection[ChainKey], root: pathlib.Path) -> bool:
    """Whether our ipsets, or our rules in either variant of iptables, may exist."""
    if (root / "sys/module/ip_set").exists():
        return True
    try:
        return any(iptables_tables.names(family, root / "proc") for family in Family) or (
            modules.may_have_nf_tables(root) and any(iptables_tables.has_chain(family, chains.__contains__) for family in Family)
        )
    except KernelError as error:
        return error.errno != errno.EINVAL  # EINVAL: no kernel module has registered nf_tables


def _answers() -> bool:
    """Whether this kernel has nf_tables."""
    with contextlib.closing(netlink.Channel(NETLINK_NETFILTER)) as channel:
        try:
            nft.generation(channel)
        except KernelError:
            return False
        return True


def remove_table() -> bool:
    """Remove the table ``inet ipvsproxy``; if other programs use the table, remove only our chains and sets from the table.

    Returns whether any of our objects existed.

    If the files of this host's modules are visible, the removal does not load nf_tables; otherwise the kernel may load nf_tables
    to answer the request. If the kernel could not load nf_tables, no further query is sent to the kernel until the module
    appears.

    Raises:
        KernelError: one of our objects exists, and the kernel did not remove it.
    """
    if not modules.may_have_nf_tables():
        return False
    with contextlib.closing(netlink.Channel(NETLINK_NETFILTER)) as channel:
        for _ in range(nft.ATTEMPTS):
            try:
                generation = nft.generation(channel)
                content = nft_tables.own_table(channel)
            except KernelError as error:
                if error.errno == errno.EINVAL:
                    modules.note_no_nf_tables()
                if error.errno in nft_tables.ABSENT:
                    return False
                raise
            if content is None or not content.has_ours:
                return False
            failed = nft.run(channel, content.removal(), generation)
            if not failed:
                log.info("other_backend_removed", backend="nftables")
                return True
            number = failed[min(failed)]
            if number != nft.STALE:
                nft.run(channel, content.emptying(), generation)  # keeps our chains, because another program may jump to them
                break
        raise KernelError(action="remove the table inet ipvsproxy", errno=max(number, 0), detail=nft.explain(number))


def held_by_other(used: Backend, names: Collection[str], root: pathlib.Path = pathlib.Path("/")) -> Mapping[str, ObservedSet]:
    """The sets with these names that exist in the backend that is not in use.

    ``used`` is the backend in use. This function loads neither ipset nor nf_tables.

    Raises:
        KernelError: a set could not be read.
    """
    if used is not Backend.IPTABLES:
        if not (root / "sys/module/ip_set").exists():
            return {}
        with contextlib.closing(IpsetDriver()) as driver:
            return driver.observe(names)
    if not modules.may_have_nf_tables(root) or not nft_tables.has_own_table():
        return {}
    with contextlib.closing(NftSetsDriver()) as native:
        return native.observe(names)


def describe_other(used: Backend, root: pathlib.Path = pathlib.Path("/")) -> str:
    """A description of our objects in the backend other than ``used``; empty if that backend has none of our objects.

    This function loads neither ipset nor nf_tables.

    Raises:
        KernelError: the backend could not be read.
    """
    if used is Backend.IPTABLES:
        if not modules.may_have_nf_tables(root):
            return ""
        with contextlib.closing(netlink.Channel(NETLINK_NETFILTER)) as channel:
            content = nft_tables.own_table(channel)
        return "nftables still holds the table inet ipvsproxy" if content is not None and content.has_ours else ""
    count = len(held_by_other(used, list(IP_SETS), root))
    return f"iptables still holds {counted(count, 'ipset')} of ours" if count else ""


def remove_ipsets(sys: pathlib.Path = pathlib.Path("/sys")) -> tuple[str, ...]:
    """Remove the ipsets that have our names, without loading the module of ipset.

    Returns the names of the sets that could not be removed because rules still use them. A set that a rule still uses is emptied,
    so that the rule does not match packets against outdated entries. A rule of iptables cannot be removed while another program
    holds the lock of iptables.

    Raises:
        KernelError: a set that no rule uses could not be removed.
    """
    if not (sys / "module/ip_set").exists():
        return ()
    with contextlib.closing(IpsetDriver()) as driver:
        ordered = sorted(IP_SETS.values(), key=lambda ip_set: ip_set.kind not in _WITH_EXCEPTIONS)
        outcomes = driver.apply([Operation(Verb.REMOVE, ip_set) for ip_set in ordered])
        for one in outcomes:
            if one.errno == ipset.IN_USE:
                driver.empty(str(one.operation.item))
    removed = [one.operation.item for one in outcomes if not one.error and not one.surprise]
    if removed:
        log.info("other_backend_removed", backend="iptables")
    failed = [one for one in outcomes if one.error]
    for one in failed:
        if one.errno != ipset.IN_USE:
            raise KernelError(action="remove the ipsets of ours", errno=one.errno, detail=one.error)
    return tuple(str(one.operation.item) for one in failed)


def remove_other(used: Backend) -> Collection[str]:
    """Remove our ipsets or our nftables table from the backend other than ``used``.

    Returns the names of the sets that could not be removed because rules still use them. This function does not remove our rules
    in iptables; ``LeftoverRules`` removes them.

    Raises:
        KernelError: one of our objects exists, and could not be removed.
    """
    if used is not Backend.IPTABLES:
        return remove_ipsets()
    remove_table()
    return ()


class Driver(Protocol):
    """Applies operations on certain kinds of objects, in the order of the operations; returns one outcome for each operation."""

    def apply(self, operations: Sequence[Operation]) -> list[Outcome]:
        """Apply all operations. If an operation fails, the later operations are applied nevertheless."""


RulesBackend = RulesDriver | NftRulesDriver
"""The drivers that read and write rules. Other packages exchange rules with these drivers only as objects of ``model.rules``."""


class ChosenBackend(NamedTuple):
    """The backend in use (never ``AUTO``), and the names of the iptables programs if the backend is iptables."""

    backend: Backend
    commands: Mapping[Family, str] = iptables.COMMANDS


IPTABLES_IN_PATH = ChosenBackend(Backend.IPTABLES)
"""The iptables backend with the iptables programs in PATH, whatever their variant."""


class BackendDrivers(NamedTuple):
    """The drivers of a backend.

    ``writes_sets`` and ``writes_rules`` are the same object if one transaction writes both sets and rules.

    ``changes`` reports changes that other programs make in our table; None means that no caller watches for changes, or that the
    backend has no notifications.
    """

    backend: Backend
    rules: RulesBackend
    sets: SetsDriver
    writes_sets: Driver
    writes_rules: Driver
    leftover_rules: LeftoverRules
    changes: NftChanges | None
    closing: Sequence[Callable[[], None]]

    @classmethod
    def open(
        cls,
        chains: Collection[ChainKey],
        jumps: Collection[Jump],
        chosen: ChosenBackend,
        *,
        patience_s: float | None = None,
        on_late_end: Callable[[], None] = lambda: None,
        listen: bool = False,
    ) -> Self:
        """Open the drivers in the network namespace of the calling thread; only the calling thread may use the drivers.

        ``listen`` means that the caller watches ``changes`` of nftables.
        ``patience_s`` and ``on_late_end`` have the same meaning as in ``RulesDriver``.
        """
        leftover_rules = LeftoverRules(chosen.commands, backend=chosen.backend)
        if chosen.backend is Backend.NFTABLES:
            both = NftDriver(chains=chains, jumps=jumps, listen=listen)
            return cls(chosen.backend, both.rules, both.sets, both, both, leftover_rules, both.changes, (both.close,))
        sets = IpsetDriver()
        rules = RulesDriver(
            chains=chains,
            jumps=jumps,
            commands=chosen.commands,
            patience_s=patience_s,
            on_late_end=on_late_end,
        )
        return cls(chosen.backend, rules, sets, sets, rules, leftover_rules, None, (rules.close, sets.close))

    def close(self) -> None:
        """Close all sockets."""
        for close in self.closing:
            close()
