"""The iptables driver: ``iptables-save`` reads all rules of an IP family, and ``iptables-restore`` changes the rules.

All calls block.
"""

import collections
import contextlib
import dataclasses
import os
import pathlib
import re
import shutil
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from ipvsproxy.kernel.base.errors import KernelError
from ipvsproxy.kernel.iptables import process as iptables_process
from ipvsproxy.kernel.iptables import syntax as iptables_syntax
from ipvsproxy.kernel.iptables.syntax import Listing
from ipvsproxy.model.net import Family
from ipvsproxy.model.plan import Operation, Outcome, Verb
from ipvsproxy.model.rules import Backend, ChainKey, Jump, ObservedSkeleton, Skeleton

PUT_BACK_LIMIT = 3
"""The number of times that a jump is moved back above another program's rule. After that, the other program's order is
accepted."""
LOCK_WAIT_S = 5
"""The longest time for which iptables waits for its lock. All programs that write rules on this host share this lock."""

COMMANDS: Mapping[Family, str] = {Family.IPV4: "iptables", Family.IPV6: "ip6tables"}
"""The program of each family, in the default variant of this host.

The programs that read and write all rules have the same names with -save or -restore appended.
"""

_LOCK_WAIT_VERSION = (1, 4, 22)
_RESTORE_VERSION = (1, 6, 2)
"""The first version of iptables that has ``--random-fully`` for MASQUERADE, and ``-w`` for iptables-restore."""
_ALWAYS_USED = frozenset({"nat", "filter"})
"""The tables in which every skeleton has rules."""
_TRIED_CHAIN = "KUBE-IPVS-CANARY"  # kube-proxy's canary chains have other names, and must not be removed


_NO_TABLES = re.compile(
    r"Table does not exist|do you need to insmod|Operation not supported|Protocol not supported|Address family not supported"
)
"""The messages that the programs print if the kernel lacks the table or the IP family."""
_NO_PROGRAM = "is not in PATH"
"""A part of each error message that reports that a program is not installed.

Failures with any other message may be temporary, for example because the lock is held, memory is short, or a process cannot be
started.
"""


class Refusal(NamedTuple):
    """The reason why rules of an IP family cannot be written.

    ``is_certain`` means that every further attempt would fail, because the kernel or the host lacks something.
    """

    reason: str
    is_certain: bool


def refusal(error: KernelError) -> Refusal:
    """Converts an error of an iptables program to a ``Refusal``."""
    return Refusal(error.detail, is_certain=lacks_tables(error) or _NO_PROGRAM in error.detail)


def lacks_tables(error: KernelError) -> bool:
    """Whether an error of an iptables program means that the kernel has no tables of iptables, and therefore no rules."""
    return _NO_TABLES.search(error.detail) is not None


class Program(NamedTuple):
    """The writer of the rules: a program of iptables with its version and variant, or the kernel's nf_tables.

    ``variant`` is ``nf_tables`` or ``legacy``; if only the program's file name shows the variant, ``version`` is the oldest
    possible version. If no program is used, ``variant`` is ``nftables``, and ``version`` is the kernel's version.
    """

    version: tuple[int, ...]
    variant: str

    @property
    def backend(self) -> Backend:
        """The backend to which this program writes rules."""
        return Backend(self.variant) if self.variant in tuple(Backend) else Backend.IPTABLES

    @property
    def random_fully(self) -> bool:
        """Whether this program's MASQUERADE target accepts ``--random-fully``."""
        return self.version >= _RESTORE_VERSION

    def wait(self, since: tuple[int, ...]) -> tuple[str, ...]:
        """The arguments that make this program wait for the lock of iptables; none before version ``since``."""
        return ("-w", str(LOCK_WAIT_S)) if self.version >= since else ()


_OLDEST = (1, 8)
_FILES: Mapping[str, Program] = {
    "xtables-nft-multi": Program(_OLDEST, "nf_tables"),
    "xtables-legacy-multi": Program(_OLDEST, "legacy"),
}
"""The variant and its oldest possible version, by the name of the file that contains all programs of the variant. The files have
had these names since iptables 1.8.0 (iptables/Makefile.am)."""


class IptablesDriver:
    """Reads and writes the fixed rules of both IP families.

    Only the rules in ``chains`` and the rules in ``jumps`` belong to ipvsproxy: the driver never returns or removes other rules.
    ``commands`` has the name of the iptables program for each family; PATH is searched for the program. ``proc`` is the mount
    point of the proc file system.
    """

    def __init__(
        self,
        *,
        chains: Collection[ChainKey],
        jumps: Collection[Jump],
        commands: Mapping[Family, str] = COMMANDS,
        proc: pathlib.Path = pathlib.Path("/proc"),
    ) -> None:
        self._commands = commands
        self._chains = frozenset(chains)
        self._jumps = frozenset(jumps)
        self._proc = proc
        self._last_skeletons: dict[Family, Skeleton] = {}
        """The skeleton that this driver last wrote for each IP family. It is used in place of tables that cannot be listed."""
        self._programs: dict[str, Program] = {}
        self._below: dict[tuple[Family, Jump], frozenset[str]] = {}
        self._times_put_back: collections.Counter[tuple[Family, Jump]] = collections.Counter()

    def program(self, family: Family) -> Program:
        """The version and variant of the iptables program for a family.

        Each program file is run at most once; a program file whose name shows the variant is not run.

        Raises:
            KernelError: the program is missing, or prints no version.
        """
        if (known := self.known_program(family)) is not None:
            return known
        command = self._commands[family]
        file = _file(command)
        program = _FILES.get(pathlib.PurePath(file).name) or parse_version(iptables_process.run(command, "--version"))
        self._programs[file] = program
        return program

    def known_program(self, family: Family) -> Program | None:
        """The iptables program for a family, if the program's version is already known."""
        return self._programs.get(_file(self._commands[family]))

    def usable(self, family: Family) -> Refusal | None:
        """The reason why this host cannot serve the given IP family; None if no reason is found.

        This method only reads, so it does not find every reason.

        The conditions for an IP family are the same as in kube-proxy (cmd/kube-proxy/app/server_linux.go,
        ``platformCheckSupported``).
        """
        if reason := absent_family(family, self._proc):
            return Refusal(reason, is_certain=True)
        try:
            iptables_process.run(
                self._commands[family], *self.program(family).wait(_LOCK_WAIT_VERSION), "-t", "nat", "-S", "POSTROUTING"
            )
        except KernelError as error:
            return refusal(error)
        return None

    def try_writing(self, family: Family) -> Refusal | None:
        """The reason why the kernel accepts no rules of the given IP family.

        If the kernel accepts rules, both ``try_writing`` and ``usable`` return None. ``usable`` only reads. The nf_tables variant
        shows empty tables even if the kernel does not have the tables. Therefore, ``try_writing`` writes a chain, and deletes the
        chain in the same transaction.
        """
        if reason := absent_family(family, self._proc):
            return Refusal(reason, is_certain=True)
        try:
            self.restore(family, f"*nat\n:{_TRIED_CHAIN} - [0:0]\n-X {_TRIED_CHAIN}\nCOMMIT\n")
        except KernelError as error:
            return refusal(error)
        return None

    def observe(self, family: Family) -> ObservedSkeleton:
        """The observed rules of an IP family.

        For a table that iptables does not show, the result contains the rules that the driver wrote last.

        Raises:
            KernelError: iptables-save failed, or its output is incomplete.
        """
        moved = self._moved(family, listing := self._list(family))
        for jump in listing.jumps.keys() - moved:
            self._below[family, jump] = listing.below.get(jump, frozenset())
        chains = dict(listing.chains)
        put = self._last_skeletons.get(family)
        hidden_jumps: frozenset[Jump] = frozenset()
        if put and listing.hidden:
            chains |= {key: rules for key, rules in put.in_force.chains.items() if key.table in listing.hidden}
            hidden_jumps = frozenset(jump for jump in put.jumps if jump.table in listing.hidden)
        # A jump that exists twice counts as absent: the next write keeps one copy of the jump and removes all other copies.
        single = {jump for jump, count in listing.jumps.items() if count == 1}
        jumps = frozenset(single - moved) | hidden_jumps
        return ObservedSkeleton(family=family, chains=chains, jumps=jumps, hidden=listing.hidden)

    def _moved(self, family: Family, listing: Listing) -> frozenset[Jump]:
        """The jumps that have moved below a rule of another program since the last read.

        A rule that was already above the jump at the last read may stay above the jump.
        """
        return frozenset(
            jump
            for jump, above in listing.above.items()
            if above & self._below.get((family, jump), frozenset()) and self._times_put_back[family, jump] < PUT_BACK_LIMIT
        )

    def rules_with(self, text: str, families: Collection[Family]) -> list[str]:
        """All rules, of any program, whose line in the output of iptables-save contains the given text.

        A family whose rules cannot be read is skipped.
        """
        rules: list[str] = []
        for family in families:
            with contextlib.suppress(KernelError):
                rules += [line for line in self.save(family).splitlines() if text in line]
        return rules

    def apply(self, operations: Sequence[Operation]) -> list[Outcome]:
        """Program skeletons, or remove skeletons.

        Repeating an operation causes no error. Each table is changed either completely or not at all.
        """
        return [self._apply(operation, operation.item) for operation in operations if isinstance(operation.item, Skeleton)]

    def _apply(self, operation: Operation, skeleton: Skeleton) -> Outcome:
        try:
            if operation.verb is Verb.REMOVE:
                return Outcome(operation, error=self._remove(skeleton))
            self._put(skeleton)
        except KernelError as error:
            return Outcome(operation, error=str(error), errno=error.errno)
        return Outcome(operation)

    def _remove(self, skeleton: Skeleton) -> str:
        """Remove a skeleton; returns the reason why a part of it remains, or an empty text if nothing remains."""
        listing = self._list(skeleton.family)
        if listing.hidden:
            raise KernelError(action=f"{self._commands[skeleton.family]}-save", errno=0, detail=describe_hidden(listing.hidden))
        self.restore(skeleton.family, iptables_syntax.render_removal(skeleton, listing))
        return "; ".join(
            f"{key} is empty, but stays: the rule {listing.foreign_jumps[key]!r} leads to it"
            for key in skeleton.chains
            if key in listing.foreign_jumps
        )

    def _put(self, skeleton: Skeleton) -> None:
        family = skeleton.family
        listing = self._list_or_remember(family)
        moved = self._moved(family, listing)
        self.restore(family, iptables_syntax.render_restore(skeleton, listing, moved))
        self._times_put_back.update((family, jump) for jump in moved)
        self._last_skeletons[family] = skeleton

    def _list_or_remember(self, family: Family) -> Listing:
        """The listed rules. If jumps cannot be listed, the jumps of the driver's last write are used instead.

        If a jump of an earlier process cannot be listed, the jump is written a second time; the second copy changes nothing for
        packets. As soon as iptables lists both copies of a jump, the next write removes one copy.
        """
        put = self._last_skeletons.get(family)
        try:
            listing = self._list(family)
        except KernelError:
            return _with_jumps(put) if put else iptables_syntax.NOTHING_LISTED
        if put is None or not listing.hidden:
            return listing
        hidden = {jump: 1 for jump in put.jumps if jump.table in listing.hidden}
        return dataclasses.replace(listing, jumps={**listing.jumps, **hidden})

    def _list(self, family: Family) -> Listing:
        text = self.save(family)
        try:
            listing = iptables_syntax.parse_save(text, self._chains, self._jumps)
        except ValueError as error:
            raise KernelError(action=f"{self._commands[family]}-save", errno=0, detail=str(error)) from error
        # In a table that has none of our rules, it does not matter whether iptables shows all rules.
        put = self._last_skeletons.get(family)
        used = {key.table for key in (*(put.chains if put else ()), *listing.chains)} | _ALWAYS_USED
        return dataclasses.replace(listing, hidden=listing.hidden & used)

    def save(self, family: Family) -> str:
        """The output of ``iptables-save``.

        Raises:
            KernelError: the program of iptables failed.
        """
        return iptables_process.run(f"{self._commands[family]}-save")

    def restore(self, family: Family, text: str) -> None:
        """Pass a text to ``iptables-restore --noflush``; an empty text changes nothing.

        Raises:
            KernelError: the program of iptables failed. Each table has been changed either completely or not at all.
        """
        if text:
            iptables_process.run(
                f"{self._commands[family]}-restore", *self.program(family).wait(_RESTORE_VERSION), "--noflush", stdin=text
            )


def absent_family(family: Family, proc: pathlib.Path) -> str:
    """The reason why the kernel does not have the given IP family; empty if the kernel has the family."""
    if family is Family.IPV6:
        if not (proc / "thread-self/net/if_inet6").exists():
            return "the kernel has no IPv6"
        with contextlib.suppress(OSError):  # if the sysctl cannot be read, IPv6 may be enabled
            if (proc / "sys/net/ipv6/conf/all/disable_ipv6").read_text().strip() == "1":
                return "IPv6 is disabled by net.ipv6.conf.all.disable_ipv6 = 1"
    return ""


def describe_hidden(tables: Collection[str]) -> str:
    """One sentence for the operator about tables whose rules iptables does not show."""
    names = " and ".join(sorted(tables))
    return f"table {names} holds rules of nft that iptables cannot show: list them with nft list ruleset, and remove them there"


def _with_jumps(skeleton: Skeleton) -> Listing:
    """A substitute for the output of iptables: the skeleton's chains without their rules, and one copy of each jump."""
    return Listing(chains=dict.fromkeys(skeleton.chains, ()), jumps=dict.fromkeys(skeleton.jumps, 1), foreign_jumps={})


def _file(command: str) -> str:
    return os.path.realpath(shutil.which(command) or command)


def parse_version(text: str) -> Program:
    """Parse a version text such as ``iptables v1.8.9 (nf_tables)``.

    Versions before 1.8 have only the legacy variant, and do not print its name.

    Raises:
        KernelError: the text contains no version.
    """
    match = re.search(r"v(\d+)\.(\d+)(?:\.(\d+))?", text)
    if match is None:
        raise KernelError(action="iptables --version", errno=0, detail=f"its output {text[:80]!r} contains no version")
    return Program(
        version=tuple(int(number or 0) for number in match.groups()),
        variant="nf_tables" if "nf_tables" in text else "legacy",
    )
