"""Covers how leftover rules and objects of the unused backend are examined, removed, logged and counted in metrics.

The kernel is a test double.
"""

import asyncio
import contextlib
import dataclasses
import itertools
import math
from collections.abc import AsyncIterator, Callable, Collection

import pytest
import structlog.testing
from structlog.typing import EventDict

from ipvsproxy.daemon.loop import leftover_removal
from ipvsproxy.daemon.loop.leftover_removal import (
    COMES_BACK,
    FOUND,
    GONE,
    OTHER_BACKEND_RESISTS,
    REMOVED,
    RESISTS,
    Examined,
    Leftovers,
)
from ipvsproxy.kernel.base.errors import KernelError
from ipvsproxy.model.net import Family
from ipvsproxy.model.rules import ChainKey, LeftRules, Reference
from ipvsproxy.reconcile.attempts import FIRST_DELAY_S
from ipvsproxy.reconcile.removal.leftovers import CALM_S, PATIENCE_S
from tests.support import left_rules, left_tables
from tests.support.following import running_task
from tests.support.left_rules import CHAIN, LEFT, OTHER, PLACES, USED, USED_V6, Tables
from tests.support.left_tables import IPV4, IPV6, MemoryTables
from tests.support.summaries import summary

AUDIT_S = 30.0
OURS = ChainKey("nat", "KUBE-SERVICES")
SERVICE = ChainKey("nat", left_rules.SERVICE)


class Scene:
    """A running node with the tables of iptables and nftables, and with its captured log."""

    def __init__(self, tables: Tables, logs: list[EventDict]) -> None:
        self.tables = tables
        self.of_kube_proxy = MemoryTables()
        self._logs = logs
        self.of_other_backend: list[Collection[str] | KernelError] = [()]
        self.removals_s: list[float] = []
        loop = asyncio.get_running_loop()

        async def inline(job: Callable[..., Examined], *arguments: object, **options: bool) -> Examined:
            return job(*arguments, **options)

        examinations = leftover_removal.of_iptables(tables, PLACES) | leftover_removal.of_nftables(self.of_kube_proxy)
        self.subject = Leftovers(examinations, self._remove_other_backend, loop.time, inline)

    async def sync(self, *not_in_force: Family, is_audit: bool = False) -> None:
        """Let a sync end, and then run all tasks that are due."""
        self.subject.synced(summary(not_in_force=not_in_force, is_audit=is_audit))
        await asyncio.sleep(0.001)

    async def _remove_other_backend(self) -> Collection[str]:
        """Return or raise the next element of ``of_other_backend``; the last element is returned or raised again and again."""
        self.removals_s.append(asyncio.get_running_loop().time())
        answer = self.of_other_backend.pop(0) if len(self.of_other_backend) > 1 else self.of_other_backend[0]
        if isinstance(answer, KernelError):
            raise answer
        return answer

    async def audits(self, duration_s: float = AUDIT_S) -> None:
        """Let time pass, with an audit every ``AUDIT_S`` seconds."""
        for _ in range(math.ceil(duration_s / AUDIT_S)):
            await asyncio.sleep(AUDIT_S)
            await self.sync(is_audit=True)

    @property
    def logged(self) -> list[tuple[str, str]]:
        """For each log line since the last call: its event, and its field ``rules`` or, without this field, ``error``."""
        logged = [(line["event"], line.get("rules") or line["error"]) for line in self._logs]
        self._logs.clear()
        return logged


@contextlib.asynccontextmanager
async def scene(**left: LeftRules) -> AsyncIterator[Scene]:
    """A running node. ``left`` maps the name of each table to the leftover rules in the table."""
    tables = Tables()
    for name, rules in left.items():
        tables.put({"used": USED, "other": OTHER, "used_v6": USED_V6}[name], rules)
    with structlog.testing.capture_logs() as logs:
        one = Scene(tables, logs)
        async with running_task(one.subject.run()):
            yield one


async def test_leftover_rules_of_a_family_are_removed_after_our_rules_of_this_family_are_programmed() -> None:
    async with scene(used=LEFT, other=LeftRules(chains={OURS: 3}), used_v6=LEFT) as node:
        await asyncio.sleep(100)
        assert not node.tables.reads, "nothing is in force yet"
        await node.sync(Family.IPV4, Family.IPV6)
        await node.sync(Family.IPV6)
        await node.sync(Family.IPV6, is_audit=True)
        await asyncio.sleep(100)
        assert node.tables.writes == [USED, OTHER]
        assert node.logged == [(REMOVED, "nf_tables IPv4"), (REMOVED, "legacy IPv4")]
        await node.sync()
        assert node.tables.writes == [USED, OTHER, USED_V6]
        assert node.tables.held == dict.fromkeys(PLACES, LeftRules())
        assert not any(node.subject.present.values())


async def test_a_table_of_iptables_is_read_again_only_by_an_audit_and_only_if_it_has_changed() -> None:
    async with scene() as node:
        await node.sync()
        assert node.tables.reads == list(PLACES)
        await node.audits(300)
        assert node.tables.reads == list(PLACES)
        node.tables.put(OTHER, LeftRules())
        await node.sync()
        assert node.tables.reads == list(PLACES)
        await node.audits()
        assert node.tables.reads == [*PLACES, OTHER]
        assert not node.logged


async def test_each_audit_reads_the_tables_if_the_kernel_has_no_change_counters() -> None:
    async with scene() as node:
        node.tables.has_marks = False
        await node.sync()
        await node.audits()
        assert node.tables.reads == [*PLACES, *PLACES]


@pytest.mark.parametrize("call", ["read", "remove"])
async def test_a_failed_removal_is_retried_after_growing_pauses_but_logged_only_once(call: str) -> None:
    async with scene(used=LEFT, used_v6=LEFT) as node:
        node.tables.failing = {(call, USED)}
        await node.sync()
        assert sorted(node.logged) == [(RESISTS, "nf_tables IPv4"), (REMOVED, "nf_tables IPv6")]
        assert node.subject.present == {USED: True, OTHER: False, USED_V6: False, IPV4: False, IPV6: False}
        assert list(node.subject.reasons) == [f"leftover rules stay (nf_tables IPv4): iptables-{call}: the lock is held"]
        assert node.tables.held[USED] == LEFT
        node.tables.reads.clear()
        await asyncio.sleep(FIRST_DELAY_S * (1 + 2 + 4) + 0.1)
        assert node.tables.reads == [USED] * 3
        await node.audits(600)
        assert len(node.tables.reads) < 20
        assert not node.logged
        node.tables.failing.clear()
        await node.audits(60)
        assert node.logged == [(REMOVED, "nf_tables IPv4"), (GONE, "nf_tables IPv4")]
        assert node.tables.held[USED] == LeftRules()
        assert not any(node.subject.present.values())
        assert list(node.subject.reasons) == []


async def test_a_table_that_cannot_be_read_counts_as_having_leftover_rules_even_if_it_is_clean() -> None:
    async with scene() as node:
        await node.sync()
        node.tables.failing = {("read", OTHER)}
        node.tables.put(OTHER, LeftRules())
        await node.audits()
        assert node.logged == [(RESISTS, "legacy IPv4")]
        assert node.subject.present[OTHER]
        node.tables.failing.clear()
        await asyncio.sleep(FIRST_DELAY_S)
        assert node.logged == [(GONE, "legacy IPv4")]


async def test_failed_removals_are_not_retried_while_our_rules_are_not_programmed() -> None:
    async with scene(used=LEFT) as node:
        node.tables.failing = {("remove", USED)}
        await node.sync()
        await node.sync(Family.IPV4)
        node.tables.failing.clear()
        node.tables.writes.clear()
        await asyncio.sleep(100)
        assert not node.tables.writes
        await node.sync()
        assert node.tables.writes == [USED]


async def test_leftover_chains_stay_while_our_chain_still_jumps_to_the_leftover_chains() -> None:
    reference = Reference(OURS, f"-j {SERVICE.chain}", SERVICE)
    async with scene(used=LeftRules(chains={SERVICE: 1, CHAIN: 1}, references=(reference,))) as node:
        await node.sync()
        assert not node.tables.writes
        assert node.logged == [(RESISTS, "nf_tables IPv4")]
        node.tables.put(USED, LeftRules(chains={SERVICE: 1, CHAIN: 1}))
        await asyncio.sleep(FIRST_DELAY_S)
        assert node.tables.held[USED] == LeftRules()
        assert node.logged == [(REMOVED, "nf_tables IPv4"), (GONE, "nf_tables IPv4")]


async def test_a_table_that_iptables_cannot_show_is_reported_while_other_tables_are_cleaned() -> None:
    async with scene(other=LeftRules(chains={CHAIN: 1}, hidden=frozenset({"nat"}))) as node:
        await node.sync()
        assert sorted(node.logged) == [(RESISTS, "legacy IPv4"), (REMOVED, "legacy IPv4")]
        assert node.tables.held[OTHER].chains == {}
        await node.audits(300)
        assert node.tables.reads.count(OTHER) == 2, "no rule has changed since"
        assert node.subject.present[OTHER]
        node.tables.put(OTHER, LeftRules())
        await node.audits()
        assert node.logged == [(GONE, "legacy IPv4")]


async def test_a_table_that_iptables_cannot_show_is_ignored_if_it_does_not_affect_packets_of_services() -> None:
    async with scene(used=LeftRules(hidden=frozenset({"raw"}))) as node:
        await node.sync()
        assert not node.logged


async def test_leftover_rules_that_a_program_writes_again_are_logged_once_and_removed_every_ten_minutes() -> None:
    async with scene(used=LEFT) as node:
        await node.sync()
        for _ in range(2):
            node.tables.put(USED, LEFT)
            await node.audits()
        assert node.tables.writes == [USED] * 2
        assert node.logged == [(REMOVED, "nf_tables IPv4"), (REMOVED, "nf_tables IPv4"), (COMES_BACK, "nf_tables IPv4")]
        assert node.subject.present[USED]
        assert list(node.subject.reasons) == ["leftover rules stay (nf_tables IPv4): a kube-proxy writes them again and again"]
        for times in (3, 4):
            await node.audits(PATIENCE_S)
            assert node.tables.writes == [USED] * times
            node.tables.put(USED, LEFT)
            assert node.subject.present[USED], "it may return"
        assert not node.logged
        await node.audits(PATIENCE_S)
        await node.audits(CALM_S + AUDIT_S)
        assert node.logged == [(GONE, "nf_tables IPv4")], "that kube-proxy was stopped"
        assert not node.subject.present[USED]
        assert node.tables.writes == [USED] * 5


# Tests of the tables of kube-proxy's nftables mode.


async def test_kube_proxys_nftables_table_of_a_family_is_removed_after_our_rules_of_this_family_are_programmed() -> None:
    async with scene() as node:
        for place in (IPV4, IPV6):
            node.of_kube_proxy.put(place, left_tables.LEFT)
        await asyncio.sleep(100)
        await node.sync(*Family, is_audit=True)
        assert set(node.of_kube_proxy.held) == {IPV4, IPV6}, "they are what serves"
        await node.sync(Family.IPV6)
        assert set(node.of_kube_proxy.held) == {IPV6}
        assert node.logged == [(REMOVED, "nftables IPv4")]
        await node.sync()
        assert node.of_kube_proxy.held == {}
        assert node.logged == [(REMOVED, "nftables IPv6")]
        assert not any(node.subject.present.values())


async def test_a_foreign_table_with_the_name_of_kube_proxys_table_is_kept_and_logged_once() -> None:
    async with scene() as node:
        foreign = dataclasses.replace(left_tables.LEFT, comment="somebody else's")
        node.of_kube_proxy.put(IPV4, foreign)
        await node.sync()
        await node.audits(300)
        assert node.of_kube_proxy.held == {IPV4: foreign}
        assert node.logged == [(RESISTS, "nftables IPv4")]
        assert node.subject.present[IPV4]


def test_the_start_logs_kube_proxys_tables_but_does_not_change_them(logs: list[EventDict]) -> None:
    tables = MemoryTables({IPV6: left_tables.LEFT})
    tables.failing = {("read", IPV4)}
    leftover_removal.announce(leftover_removal.of_nftables(tables))
    assert [(line["event"], line["rules"]) for line in logs] == [(FOUND, "nftables IPv6")]
    assert "the table ip6 kube-proxy" in logs[0]["hint"]
    assert tables.held == {IPV6: left_tables.LEFT}


# The other backend.


async def test_objects_of_the_unused_backend_are_removed_after_all_families_are_programmed() -> None:
    async with scene() as node:
        node.of_other_backend = [KernelError(action="remove", detail="busy"), ["KUBE-CLUSTER-IP"], ()]
        await node.sync(Family.IPV4)
        await node.sync(Family.IPV6)
        assert node.removals_s == []
        assert not node.subject.reasons
        await node.sync()
        reason = "our objects in the other backend stay: remove: busy"
        assert (node.subject.other_backend_resists, *node.subject.reasons) == (True, reason)
        for _ in range(20):
            await node.sync()
        assert len(node.removals_s) == 1, "syncs do not shorten the pause"
        await asyncio.sleep(AUDIT_S)
        assert (node.subject.other_backend_resists, *node.subject.reasons) == (False,)
        pauses = [round(later - earlier) for earlier, later in itertools.pairwise(node.removals_s)]
        assert pauses == [1, 2], "without another sync"
        assert node.logged == [(OTHER_BACKEND_RESISTS, "remove: busy")]


async def test_sets_of_the_other_backend_are_logged_only_once_while_they_stay_in_use() -> None:
    used = "a rule still uses A, B"
    async with scene() as node:
        node.of_other_backend = [("A", "B")]
        await node.sync()
        await asyncio.sleep(AUDIT_S / 3)
        assert not node.subject.reasons, "the rules that use them go at the same time"
        await node.audits(20 * AUDIT_S)
        assert node.subject.reasons == (f"our objects in the other backend stay: {used}",)
        assert node.logged == [(OTHER_BACKEND_RESISTS, used)]


async def test_after_an_audit_the_unused_backend_is_cleaned_again_once_all_families_are_programmed() -> None:
    removals: list[int] = []
    async with scene() as node:
        for not_in_force, is_audit in (((), False), ((), True), ((), False), ((Family.IPV6,), True), ((), False), ((), False)):
            await node.sync(*not_in_force, is_audit=is_audit)
            removals.append(len(node.removals_s))
    assert removals == [1, 2, 2, 2, 3, 3], "after an audit that found rules missing, once they are in force"
