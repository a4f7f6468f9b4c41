"""Tests that a ``PresenceTable`` behaves like a ``Table``, which stores desired and observed values in two dictionaries.

The properties that all tables share are tested in ``test_table``.
"""

from collections.abc import Mapping, Sequence

import hypothesis
import pytest
from hypothesis import stateful
from hypothesis import strategies as st

from ipvsproxy.model.service import Owner, ServiceName
from ipvsproxy.reconcile.tables.table import PresenceTable, Table, presence

OWNERS = tuple(Owner(age, ServiceName("ns", name)) for age, name in ((1, "old"), (2, "middle"), (3, "young")))
OLD = OWNERS[0]
KEYS = st.sampled_from("abcdef")
SOME_KEYS = st.frozensets(KEYS)


def test_a_key_that_is_desired_and_observed_takes_no_additional_memory() -> None:
    table: PresenceTable[str] = PresenceTable(lambda _: False)
    table.replace(OLD, {}, presence("abc", OLD))
    for key in "ab":
        table.confirm(key, True)
    assert (list(table.observed), list(table.pending)) == (["a", "b"], ["c"])
    assert (table._present.undesired, len(table.observed)) == ({}, 2)
    table.replace(OLD, presence("abc", OLD), {})
    assert (table._present.undesired, list(table.surplus), list(table.pending)) == ({"a": None, "b": None}, ["a", "b"], [])


def test_a_key_that_was_removed_from_the_kernel_stays_absent_when_its_owners_release_it() -> None:
    table: PresenceTable[str] = PresenceTable(lambda _: False)
    table.confirm("a", True)
    for owner in OWNERS:
        table.desire("a", owner, owner)
    for owner in OWNERS:
        assert (list(table.observed), len(table.observed)) == (["a"], 1)
        table.release("a", owner)
    assert list(table.surplus) == ["a"]
    for owner in OWNERS:
        table.desire("a", owner, owner)
    table.release("a", OLD)
    table.confirm("a", None)
    for owner in OWNERS[1:]:
        table.release("a", owner)
    assert (list(table.observed), len(table.observed), list(table.surplus)) == ([], 0, [])


def test_reading_or_deleting_an_absent_key_raises_an_error() -> None:
    table: PresenceTable[str] = PresenceTable(lambda _: False)
    table.replace(OLD, {}, presence("a", OLD))
    for key in "ab":
        assert table.observed.get(key) is None
        with pytest.raises(KeyError, match=key):
            table.observed[key]
        with pytest.raises(KeyError, match=key):
            del table._present[key]
    assert list(table.pending) == ["a"]


class BothTables(stateful.RuleBasedStateMachine):
    """Applies each change to a ``PresenceTable``, and to a ``Table``, which stores desired keys and observed keys separately."""

    @stateful.initialize(is_protected=st.booleans())
    def make(self, *, is_protected: bool) -> None:
        self.unequal: tuple[dict[Table[str, Owner, bool], None], ...] = ({}, {})
        self.table: PresenceTable[str] = PresenceTable(lambda _: is_protected, self.unequal[0])
        self.model: Table[str, Owner, bool] = Table(
            lambda owner: owner, lambda _wanted, _seen: False, lambda _: is_protected, self.unequal[1]
        )
        self.both: Sequence[Table[str, Owner, bool]] = (self.table, self.model)
        self.claimed: dict[Owner, Mapping[str, Owner]] = {owner: {} for owner in OWNERS}

    @stateful.rule(owner=st.sampled_from(OWNERS), keys=SOME_KEYS)
    def replace(self, owner: Owner, keys: frozenset[str]) -> None:
        after = presence(sorted(keys), owner)
        affected = [table.replace(owner, self.claimed[owner], after) for table in self.both]
        assert affected[0] == affected[1]
        self.claimed[owner] = after

    @stateful.rule(owner=st.sampled_from(OWNERS), key=KEYS)
    def desire(self, owner: Owner, key: str) -> None:
        losers = [table.desire(key, owner, owner) for table in self.both]
        assert losers[0] == losers[1]
        self.claimed[owner] = {**self.claimed[owner], key: owner}

    @stateful.rule(owner=st.sampled_from(OWNERS), data=st.data())
    def release(self, owner: Owner, data: st.DataObject) -> None:
        for key in data.draw(st.sets(st.sampled_from(sorted(self.claimed[owner])))) if self.claimed[owner] else ():
            heirs = [table.release(key, owner) for table in self.both]
            assert heirs[0] == heirs[1]
            self.claimed[owner] = presence(self.claimed[owner].keys() - {key}, owner)

    @stateful.rule(there=SOME_KEYS, ours=SOME_KEYS)
    def observe(self, there: frozenset[str], ours: frozenset[str]) -> None:
        for table in self.both:
            list(table.observing(dict.fromkeys(sorted(there), True), ours.__contains__))

    @stateful.rule(seen=st.dictionaries(KEYS, st.sampled_from((True, None))), ours=SOME_KEYS)
    def observe_some(self, seen: Mapping[str, bool | None], ours: frozenset[str]) -> None:
        for table in self.both:
            assert list(table.observing_some(seen, ours.__contains__)) == []

    @stateful.rule(key=KEYS)
    def notice(self, key: str) -> None:
        for table in self.both:
            table.notice(key, True)

    @stateful.rule(key=KEYS, value=st.sampled_from((True, None)))
    def confirm(self, key: str, *, value: bool | None) -> None:
        for table in self.both:
            table.confirm(key, value)

    @stateful.rule(data=st.data())
    def exchange(self, data: st.DataObject) -> None:
        if self.model.observed:
            key = data.draw(st.sampled_from(sorted(self.model.observed)))
            for table in self.both:
                table.exchange(key, True)

    @stateful.rule(key=KEYS)
    def touch(self, key: str) -> None:
        for table in self.both:
            table.touch(key)

    @stateful.rule()
    def take_drifted(self) -> None:
        assert sorted(self.table.take_drifted()) == sorted(self.model.take_drifted())

    @stateful.invariant()
    def they_agree(self) -> None:
        table, model = self.both
        assert table.observed == model.observed
        for key in "abcdef":
            assert (key in table.observed, table.observed.get(key)) == (key in model.observed, model.observed.get(key))
            assert table.owners_of(key) == model.owners_of(key)
            assert table.owner_of(key) == model.owner_of(key)
        assert len(table.observed) == len(model.observed)
        assert sorted(table.observed) == sorted(model.observed)
        assert table.observed.keys() == model.observed.keys()
        assert table.observed.items() == model.observed.items()
        assert table.desired == model.desired
        # The order of keys that vanished at the same time may differ.
        assert sorted(table.pending) == sorted(model.pending)
        assert sorted(table.surplus) == sorted(model.surplus)
        assert set(table.foreign) == set(model.foreign)
        assert table.drifted == model.drifted
        assert table.contested == model.contested
        assert [bool(tables) for tables in self.unequal] == [bool([*model.pending, *model.surplus])] * 2


BothTables.TestCase.settings = hypothesis.settings(max_examples=150, stateful_step_count=30, deadline=None)
test_any_history_leaves_what_two_dictionaries_hold = BothTables.TestCase
