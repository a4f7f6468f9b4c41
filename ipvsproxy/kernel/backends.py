"""The two backends of rules and sets: which one this host uses, its drivers, and what the other one still holds of ours."""

import contextlib
import errno
import pathlib
import shutil
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple, Protocol, Self

import structlog
from pyroute2.netlink import NETLINK_NETFILTER

from ipvsproxy.kernel import host
from ipvsproxy.kernel.base import modules, netlink
from ipvsproxy.kernel.base import nft_message as nft
from ipvsproxy.kernel.base.errors import KernelError
from ipvsproxy.kernel.base.sets import ObservedSet, SetsDriver
from ipvsproxy.kernel.ipset import ipset_driver as ipset
from ipvsproxy.kernel.ipset.ipset_driver import IpsetDriver
from ipvsproxy.kernel.iptables import iptables_driver as iptables
from ipvsproxy.kernel.iptables import tables as iptables_tables
from ipvsproxy.kernel.iptables.iptables_driver import Program
from ipvsproxy.kernel.iptables.leftover_rules import LeftoverRules
from ipvsproxy.kernel.iptables.rules_driver import RulesDriver
from ipvsproxy.kernel.nftables import tables as nft_tables
from ipvsproxy.kernel.nftables.changes import NftChanges
from ipvsproxy.kernel.nftables.nftables_driver import NftDriver
from ipvsproxy.kernel.nftables.rules import NftRulesDriver
from ipvsproxy.kernel.nftables.sets import NftSetsDriver
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
"""Sets by which a packet is refused or masqueraded, unless another set has it as well: they are emptied before those."""

MODULES: Mapping[Backend, Sequence[str]] = {Backend.IPTABLES: host.MODULES, Backend.NFTABLES: host.NFTABLES_MODULES}
"""The modules that IPVS and each backend need."""

ATTEMPTS = 5
"""How often the removal of the table is tried anew because other programs have changed their rules meanwhile."""


class BackendChoice(NamedTuple):
    """The backend to use, never ``AUTO``, and the reason."""

    backend: Backend
    reason: str


def choose(asked: Backend) -> BackendChoice:
    """The backend for ``asked``. ``AUTO`` is nftables on a host without iptables, or whose kernel lacks a type of ipset.

    Raises:
        KernelError: the kernel did not answer just now.
    """
    if asked is not Backend.AUTO:
        return BackendChoice(asked, "it is configured")
    if shutil.which(iptables.COMMANDS[Family.IPV4]) is None:
        return BackendChoice(Backend.NFTABLES, "iptables is not in PATH")
    if missing := host.missing_set_types():
        return BackendChoice(Backend.NFTABLES, missing[0].what)
    return BackendChoice(Backend.IPTABLES, "this host has iptables and ipset")


def to_clean(chains: Collection[ChainKey], root: pathlib.Path = pathlib.Path("/")) -> tuple[Backend, ...]:
    """The backends that may hold something of ours; where none does, the one that needs no module that is not loaded.

    iptables and ipset are not loaded to find out. ``chains`` are ours.

    Raises:
        KernelError: the kernel did not say whether it has our table.
    """
    found = [Backend.NFTABLES] if nft_tables.has_own_table() else []
    found += [Backend.IPTABLES] if _may_hold_iptables(chains, root) else []
    return tuple(found) or ((Backend.NFTABLES,) if _answers() else (Backend.IPTABLES,))


def _may_hold_iptables(chains: Collection[ChainKey], root: pathlib.Path) -> bool:
    """Whether there may be sets, or rules in either variant of iptables, that are ours."""
    if (root / "sys/module/ip_set").exists():
        return True
    try:
        return any(iptables_tables.names(family, root / "proc") for family in Family) or (
            modules.may_have_nf_tables(root) and any(iptables_tables.has_chain(family, chains.__contains__) for family in Family)
        )
    except KernelError as error:
        return error.errno != errno.EINVAL  # no module has registered this subsystem


def _answers() -> bool:
    """Whether this kernel has nf_tables."""
    with contextlib.closing(netlink.Channel(NETLINK_NETFILTER)) as channel:
        try:
            nft.generation(channel)
        except KernelError:
            return False
        return True


def remove_table() -> bool:
    """Remove the table ``inet ipvsproxy``; if others have a part in it, only what is ours. Returns whether anything was there.

    nf_tables is not loaded for that, unless the files of this host's modules are not visible: then the kernel may load it to
    answer. A kernel that could not is not asked again before the module shows.

    Raises:
        KernelError: something of ours is there, and the kernel did not remove it.
    """
    if not modules.may_have_nf_tables():
        return False
    with contextlib.closing(netlink.Channel(NETLINK_NETFILTER)) as channel:
        for _ in range(ATTEMPTS):
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
                nft.run(channel, content.emptying(), generation)  # what others still use is to decide about no packet
                break
        raise KernelError(action="remove the table inet ipvsproxy", errno=max(number, 0), detail=nft.explain(number))


def held_by_other(used: Backend, names: Collection[str], root: pathlib.Path = pathlib.Path("/")) -> Mapping[str, ObservedSet]:
    """The named sets that the backend that is not ``used`` holds, without loading ipset or nf_tables for that.

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
    """What the backend that is not ``used`` holds of ours, for people; empty if nothing. Loads neither ipset nor nf_tables.

    Raises:
        KernelError: it could not be read.
    """
    if used is Backend.IPTABLES:
        return "nftables still holds the table inet ipvsproxy" if modules.may_have_nf_tables(root) and _table_has_ours() else ""
    count = len(held_by_other(used, list(IP_SETS), root))
    return f"iptables still holds {count} ipset{'s' if count > 1 else ''} of ours" if count else ""


def _table_has_ours() -> bool:
    """Whether the table ``inet ipvsproxy`` has anything of ours, or nothing of anybody.

    Raises:
        KernelError: it could not be read.
    """
    with contextlib.closing(netlink.Channel(NETLINK_NETFILTER)) as channel:
        content = nft_tables.own_table(channel)
    return content is not None and content.has_ours


def remove_ipsets(sys: pathlib.Path = pathlib.Path("/sys")) -> tuple[str, ...]:
    """Remove the ipsets that have the names of ours, without loading ipset for that. Returns those that stay in use by a rule.

    Those are emptied: a rule that cannot be removed now, because another program holds the lock of iptables, is not to decide
    about packets by entries that nobody keeps current.

    Raises:
        KernelError: one stays for another reason.
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
    """Remove what the backend that is not ``used`` holds of ours: ipsets, or the table. Returns the sets that rules still use.

    Rules of iptables are ``LeftoverRules``; while they use a set, it stays.

    Raises:
        KernelError: something is there, and could not be removed.
    """
    if used is not Backend.IPTABLES:
        return remove_ipsets()
    remove_table()
    return ()


def sets_to_keep_current(used: Backend) -> SetsDriver | None:
    """The driver of sets of the other backend whose rules decide about packets until those of ``used`` are in force, if any."""
    return NftSetsDriver() if used is Backend.IPTABLES else None


class Driver(Protocol):
    """Applies operations of some kinds, in order, with one outcome for each."""

    def apply(self, operations: Sequence[Operation]) -> list[Outcome]:
        """Apply all operations. A failure does not stop the others."""


RulesBackend = RulesDriver | NftRulesDriver
"""What reads and writes rules. Other rooms only see ``model.rules``."""


class ChosenBackend(NamedTuple):
    """A backend, never ``AUTO``, and for iptables its programs.

    ``commands`` are the names of the programs, ``programs`` those whose version is known, by file.
    """

    backend: Backend
    commands: Mapping[Family, str] = iptables.COMMANDS
    programs: Mapping[str, Program] = types.MappingProxyType({})


IPTABLES_IN_PATH = ChosenBackend(Backend.IPTABLES)
"""The programs of iptables in PATH, whatever their variant."""


class BackendDrivers(NamedTuple):
    """The drivers of a backend. ``writes_sets`` and ``writes_rules`` are one object where both are one transaction.

    ``changes`` are changes of our table by others; None if nobody watches them, or if the backend has no notifications.
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
        """Open the drivers, in the network namespace of the calling thread, which alone may use them.

        ``listen``: the caller watches ``changes`` of nftables.
        ``patience_s`` and ``on_late_end`` are as for ``RulesDriver``.
        """
        leftover_rules = LeftoverRules(chosen.commands, programs=chosen.programs, backend=chosen.backend)
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
            programs=chosen.programs,
        )
        return cls(chosen.backend, rules, sets, sets, rules, leftover_rules, None, (rules.close, sets.close))

    def close(self) -> None:
        """Close all sockets."""
        for close in self.closing:
            close()
