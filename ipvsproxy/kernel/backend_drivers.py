"""The drivers of one backend of the rules: they read and write rules and sets, and find rules that were left behind."""

import types
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple, Protocol, Self

from ipvsproxy.kernel.base.sets import SetsDriver
from ipvsproxy.kernel.ipset.driver import IpsetDriver
from ipvsproxy.kernel.iptables import driver as iptables
from ipvsproxy.kernel.iptables.driver import Program
from ipvsproxy.kernel.iptables.leftover_rules import LeftoverRules
from ipvsproxy.kernel.iptables.rules_driver import RulesDriver
from ipvsproxy.kernel.nftables.changes import NftChanges
from ipvsproxy.kernel.nftables.driver import NftDriver
from ipvsproxy.kernel.nftables.rules import NftRulesDriver
from ipvsproxy.model.net import Family
from ipvsproxy.model.plan import Operation, Outcome
from ipvsproxy.model.rules import Backend, ChainKey, Jump


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
