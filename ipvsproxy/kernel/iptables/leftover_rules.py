"""Reads and removes the rules that a proxy has left behind in either variant of iptables. All calls block.

Rule 1: a table that cannot be read is an error, and never counts as clean. A table that this kernel or host certainly does not
have counts as clean.
Rule 2: if the fingerprint of the rules of an IP family and variant is the same as before, none of these rules has changed.
Therefore, no program of iptables is run.
Rule 3: reading rules creates no table and loads no module. There is one exception: nf_tables may be loaded once if this host's
module files are not visible.
Rule 4: a program of iptables reads nf_tables only if the kernel has a chain that may contain leftover rules, or if the chains
cannot be read.
Rule 5: if our rules are in nftables, each iptables chain that has the name of one of our chains is a leftover. Our jumps to these
chains are leftovers too.
Rule 6: no rule is removed if the variant of the program in PATH has changed since ipvsproxy started, because our rules will move
to the new variant.
"""

import contextlib
import errno
import pathlib
from collections.abc import Callable, Mapping
from typing import NamedTuple

from ipvsproxy.kernel.base import modules
from ipvsproxy.kernel.base.errors import KernelError
from ipvsproxy.kernel.iptables import iptables_driver as iptables
from ipvsproxy.kernel.iptables import iptables_tables
from ipvsproxy.kernel.iptables import syntax as iptables_syntax
from ipvsproxy.kernel.iptables import variant as iptables_variant
from ipvsproxy.kernel.iptables.iptables_driver import IptablesDriver, Program
from ipvsproxy.kernel.iptables.iptables_tables import TABLES, RuleChanges
from ipvsproxy.kernel.iptables.variant import Variant
from ipvsproxy.model.net import Family
from ipvsproxy.model.rules import Backend, ChainKey, LeftRules, Removal

NO_SUBSYSTEM = "this kernel has no nf_tables"


class RulesPlace(NamedTuple):
    """The rules of one IP family in one variant of iptables. ``is_used`` means that this variant holds our own rules."""

    variant: Variant
    family: Family
    is_used: bool

    @property
    def where(self) -> str:
        """The readable name of this variant, without the IP family."""
        return str(self.variant)

    def __str__(self) -> str:
        return f"{self.variant} {self.family.label}"


class LeftoverRules:
    """Reads and removes leftover rules in the network namespace of the calling thread. Any thread may call the methods."""

    def __init__(
        self,
        commands: Mapping[Family, str],
        proc: pathlib.Path = pathlib.Path("/proc"),
        *,
        backend: Backend = Backend.IPTABLES,
        has_chain: Callable[[Family, Callable[[ChainKey], bool]], bool] = iptables_tables.has_chain,
    ) -> None:
        """``commands`` are the names of the iptables programs of the variant in use.

        ``backend`` is the backend that holds our own rules. ``has_chain`` asks the kernel whether an IP family has a chain for
        which the given function returns true.
        """
        self._has_chain = has_chain
        self._proc = proc
        self._backend = backend
        self._used = IptablesDriver(chains=(), jumps=(), commands=commands)
        self._others = {
            variant: IptablesDriver(chains=(), jumps=(), commands=iptables_variant.commands(variant)) for variant in Variant
        }

    def places(self, programs: Mapping[Family, Program]) -> tuple[RulesPlace, ...]:
        """The variants in which a proxy may have left rules of the given families.

        The result has the variant in use, and each installed variant. If our rules are in nftables, no variant is in use. The
        result then has the variant of the program named ``iptables`` in PATH, and each installed variant.

        ``programs`` has the iptables program of each family; ``__init__`` got the names of these programs as ``commands``.
        """
        if self._backend is not Backend.IPTABLES:
            return tuple(
                RulesPlace(variant, family, is_used=False)
                for family in programs
                for variant in Variant
                if variant in iptables_variant.installed() or variant == self._variant_in_path(family)
            )
        has_both = len(iptables_variant.installed()) == len(Variant)
        return tuple(
            RulesPlace(variant, family, is_used)
            for family, program in programs.items()
            for variant in Variant
            if (is_used := variant == program.variant) or has_both
        )

    def fingerprint(self, place: RulesPlace) -> object:
        """The fingerprint of the rules of one family in one variant; None means that the kernel does not show a fingerprint."""
        if _is_surely_empty(place):
            return NO_SUBSYSTEM
        try:
            tables = () if place.variant is Variant.NF_TABLES else iptables_tables.names(place.family, self._proc)
            with contextlib.closing(RuleChanges()) as changes:
                return tables, changes.fingerprint(place.family, place.variant, [name for name in TABLES if name in tables])
        except KernelError as error:
            if place.variant is not Variant.NF_TABLES or error.errno != errno.EINVAL:
                return None
            modules.note_no_nf_tables()
            return NO_SUBSYSTEM

    def read(self, place: RulesPlace, concerns: Callable[[ChainKey], bool]) -> LeftRules:
        """The chains for which ``concerns`` returns true, and the rules that jump to these chains.

        Raises:
            KernelError: the rules could not be read this time.
        """
        if _is_surely_empty(place) or (place.variant is Variant.LEGACY and not iptables_tables.names(place.family, self._proc)):
            return LeftRules()
        if place.variant is Variant.NF_TABLES and not self._may_have_chain(place.family, concerns):
            return LeftRules()
        try:
            text = self._driver(place).save(place.family)
        except KernelError as error:
            if iptables.lacks_tables(error):
                return LeftRules()
            raise
        try:
            return iptables_syntax.parse_left(text, concerns)
        except ValueError as error:
            raise KernelError(action=f"iptables-save of {place}", errno=0, detail=str(error)) from error

    def remove(self, place: RulesPlace, removal: Removal) -> None:
        """Remove leftover rules.

        Raises:
            KernelError: at least one table has not been changed. Each table has been changed either completely or not at all.
        """
        self._driver(place).restore(place.family, iptables_syntax.render_left_removal(removal))

    def _driver(self, place: RulesPlace) -> IptablesDriver:
        """The driver that reads and writes the rules of one family in one variant.

        Raises KernelError if the variant in use is not known, or has changed.
        """
        if self._backend is not Backend.IPTABLES and place.variant in iptables_variant.installed():
            return self._others[place.variant]
        program = self._used.program(place.family)
        # If ``is_in_path`` is true, the program in PATH must have the variant ``place.variant``. If not, it must have the other
        # variant.
        is_in_path = place.is_used or self._backend is not Backend.IPTABLES
        if (program.variant == place.variant) is not is_in_path:
            detail = f"the iptables in PATH has become that of {program.variant}; restart ipvsproxy, so that its rules follow"
            raise KernelError(action=f"read the rules of {place}", detail=detail)
        return self._used if is_in_path else self._others[place.variant]

    def _variant_in_path(self, family: Family) -> str:
        """The variant of the program named ``iptables`` in PATH; empty if PATH has no program with this name."""
        try:
            return self._used.program(family).variant
        except KernelError:
            return ""

    def _may_have_chain(self, family: Family, concerns: Callable[[ChainKey], bool]) -> bool:
        """Whether nf_tables may have a chain for which ``concerns`` returns true, so that iptables must be run.

        Raises:
            KernelError: the chains could not be read.
        """
        try:
            return self._has_chain(family, concerns)
        except KernelError:
            if self._backend is not Backend.IPTABLES:  # if the backend is nftables, the host may lack iptables
                raise
            return True


def _is_surely_empty(place: RulesPlace) -> bool:
    """Whether a variant of iptables certainly has no rules, because it uses nf_tables and the kernel has no nf_tables."""
    return place.variant is Variant.NF_TABLES and not modules.may_have_nf_tables()
