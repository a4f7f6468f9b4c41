"""Covers tables of any kind: their owners, their pending keys, and keys of other programs.

``test_node_tables`` tests the contents of tables.
"""

from collections.abc import Callable, Collection, Mapping

from ipvsproxy.model.service import Owner, ServiceName
from ipvsproxy.model.steps import ITEMS_AT_ONCE
from ipvsproxy.reconcile.tables.table import Table

OLD, MIDDLE, YOUNG = (Owner(age, ServiceName("ns", name)) for age, name in ((1, "old"), (2, "middle"), (3, "young")))


def table(is_protected: Callable[[str], bool] = lambda _: False) -> Table[str, tuple[Owner, int], int]:
    """An empty table in which each owner can desire a number for each key."""
    return Table(lambda desired: desired[0], lambda desired, observed: desired[1] != observed, is_protected)


def desiring(**numbers: int) -> Table[str, tuple[Owner, int], int]:
    """A table in which the owner ``OLD`` desires the given number for each given key."""
    desired = table()
    desired.replace(OLD, {}, {key: (OLD, number) for key, number in numbers.items()})
    return desired


def ranked(ranks: Mapping[Owner, float]) -> Table[str, tuple[Owner, int], int]:
    """A table in which the owners with these ranks all desire one key."""
    numbers: Table[str, tuple[Owner, int], int] = Table(
        lambda desired: desired[0],
        lambda desired, observed: desired[1] != observed,
        lambda _: False,
        rank=lambda desired: ranks[desired[0]],
    )
    for owner in ranks:
        numbers.desire("key", owner, (owner, 1))
    return numbers


def ours(*keys: str) -> Callable[[str], bool]:
    return lambda key: key in keys


def pending(numbers: Table[str, tuple[Owner, int], int]) -> Collection[str]:
    return [*numbers.pending, *numbers.surplus]


def test_a_desired_key_is_pending_until_its_desired_value_is_observed() -> None:
    numbers = desiring(key=1)
    assert pending(numbers) == ["key"]
    numbers.confirm("key", 2)
    assert pending(numbers) == ["key"]
    numbers.confirm("key", 1)
    assert pending(numbers) == []


def test_a_key_that_is_no_longer_desired_is_surplus_until_it_is_absent() -> None:
    numbers = desiring(key=1)
    numbers.confirm("key", 1)
    numbers.replace(OLD, {"key": (OLD, 1)}, {})
    assert pending(numbers) == ["key"]
    numbers.confirm("key", None)
    assert (pending(numbers), dict(numbers.observed)) == ([], {})


def test_the_oldest_owner_has_the_key_even_if_a_younger_owner_desired_it_first() -> None:
    for first, second in ((OLD, YOUNG), (YOUNG, OLD)):
        numbers = table()
        numbers.replace(first, {}, {"key": (first, 1)})
        affected = numbers.replace(second, {}, {"key": (second, 2)})
        assert numbers.desired["key"][0] == OLD
        assert numbers.owner_of("key") == OLD
        assert (list(numbers.contested), numbers.owners_of("key")) == (["key"], (OLD, YOUNG))
        assert affected == ({YOUNG} if second == OLD else set())


def test_the_next_oldest_owner_gets_the_key_when_the_winner_releases_it() -> None:
    numbers = table()
    for owner in (MIDDLE, YOUNG, OLD):
        numbers.replace(owner, {}, {"key": (owner, int(owner.created_s))})
    assert numbers.replace(OLD, {"key": (OLD, 1)}, {}) == {MIDDLE}
    assert numbers.desired["key"] == (MIDDLE, 2)
    assert numbers.replace(MIDDLE, {"key": (MIDDLE, 2)}, {}) == {YOUNG}
    assert numbers.desired["key"] == (YOUNG, 3)
    assert not numbers.contested


def test_an_owner_that_stops_waiting_for_a_key_does_not_affect_the_winner() -> None:
    numbers = desiring(key=1)
    numbers.replace(YOUNG, {}, {"key": (YOUNG, 2)})
    assert numbers.replace(YOUNG, {"key": (YOUNG, 2)}, {}) == set()
    assert numbers.desired["key"] == (OLD, 1)
    assert not numbers.contested


def test_an_owner_may_change_its_desired_value_while_it_waits() -> None:
    numbers = desiring(key=1)
    numbers.replace(YOUNG, {}, {"key": (YOUNG, 2)})
    numbers.replace(YOUNG, {"key": (YOUNG, 2)}, {"key": (YOUNG, 3)})
    numbers.replace(OLD, {"key": (OLD, 1)}, {})
    assert numbers.desired["key"] == (YOUNG, 3)


def test_a_key_that_is_not_desired_has_no_owner() -> None:
    assert table().owner_of("key") is None
    assert list(table().owners_of("key")) == []


def test_keys_of_other_programs_are_not_removed() -> None:
    numbers = table()
    list(numbers.observing({"ours": 1, "theirs": 1}, ours("ours")))
    assert pending(numbers) == ["ours"]
    assert set(numbers.foreign) == {"theirs"}


def test_a_key_of_another_program_stays_foreign_if_it_was_desired_but_never_programmed() -> None:
    numbers = table()
    list(numbers.observing({"theirs": 1}, ours()))
    numbers.replace(OLD, {}, {"theirs": (OLD, 2)})
    assert pending(numbers) == ["theirs"]
    numbers.replace(OLD, {"theirs": (OLD, 2)}, {})
    assert pending(numbers) == []


def test_a_key_of_another_program_stays_foreign_even_if_its_value_equals_the_desired_value() -> None:
    numbers = desiring(theirs=1)
    list(numbers.observing({"theirs": 1}, ours()))
    numbers.replace(OLD, {"theirs": (OLD, 1)}, {})
    assert pending(numbers) == []


def test_a_foreign_key_belongs_to_ipvsproxy_after_ipvsproxy_has_set_the_value_of_the_key() -> None:
    numbers = table()
    list(numbers.observing({"theirs": 1}, ours()))
    numbers.replace(OLD, {}, {"theirs": (OLD, 2)})
    numbers.confirm("theirs", 2)
    assert not numbers.foreign
    numbers.replace(OLD, {"theirs": (OLD, 2)}, {})
    assert pending(numbers) == ["theirs"]


def test_a_virtual_server_still_belongs_to_ipvsproxy_if_its_witness_is_lost() -> None:
    numbers = desiring(key=1)
    numbers.confirm("key", 1)
    numbers.replace(OLD, {"key": (OLD, 1)}, {})
    list(numbers.observing({"key": 1}, ours()))
    assert pending(numbers) == ["key"]


def test_whether_a_key_belongs_to_ipvsproxy_is_decided_again_after_the_key_vanished_and_returned() -> None:
    numbers = table()
    list(numbers.observing({"key": 1}, ours("key")))
    list(numbers.observing({}, ours("key")))
    list(numbers.observing({"key": 1}, ours()))
    assert set(numbers.foreign) == {"key"}


def test_a_protected_key_is_never_removed_but_is_changed_if_its_desired_value_differs() -> None:
    numbers = table(lambda key: key == "protected")
    list(numbers.observing({"protected": 1}, ours("protected")))
    assert pending(numbers) == []
    numbers.replace(OLD, {}, {"protected": (OLD, 2)})
    assert pending(numbers) == ["protected"]


def test_the_result_for_a_large_observation_does_not_depend_on_the_number_of_steps() -> None:
    desired = {str(number): (OLD, number) for number in range(ITEMS_AT_ONCE)}
    listing = {str(number): 1 for number in range(2 * ITEMS_AT_ONCE)}
    at_once, in_parts = table(), table()
    for numbers in (at_once, in_parts):
        numbers.replace(OLD, {}, desired)
    list(at_once.observing(listing, ours(*desired)))
    assert sum(1 for _ in in_parts.observing(listing, ours(*desired))) == 2 + 2, "what was shown; which of all keys are gone"
    assert list(at_once.pending) == list(in_parts.pending) == [key for key in desired if key != "1"]
    assert set(at_once.foreign) == set(in_parts.foreign) == listing.keys() - desired.keys()
    assert sum(1 for _ in in_parts.observing(dict(listing), ours(*desired))) == 2 + 2
    almost = {str(number): 1 for number in range(ITEMS_AT_ONCE - 1)}
    assert list(table().observing(almost, ours())) == []


def observe_some(numbers: Table[str, tuple[Owner, int], int], observed: Mapping[str, int | None], *known: str) -> None:
    for _ in numbers.observing_some(observed, ours(*known)):
        pass


def test_reading_some_keys_does_not_change_other_keys() -> None:
    numbers = desiring(kept=1, lost=1, changed=1)
    list(numbers.observing({"kept": 1, "lost": 1, "changed": 1, "left": 1}, ours("kept", "lost", "changed")))
    observe_some(numbers, {"lost": None, "changed": 2, "stray": 1, "never": None, "left": None}, "stray")
    assert numbers.observed == {"kept": 1, "changed": 2, "stray": 1}
    assert set(numbers.pending) == {"lost", "changed"}
    assert set(numbers.surplus) == {"stray"}
    assert set(numbers.foreign) == set()
    assert set(numbers.take_drifted()) == {"lost", "changed", "stray"}


def test_the_table_keeps_the_stored_object_if_an_equal_value_is_observed() -> None:
    held, equal = [1], [1]
    numbers: Table[str, Owner, list[int]] = Table(
        lambda owner: owner, lambda _wanted, observed: observed != [1], lambda _key: False
    )
    list(numbers.observing({"key": held}, lambda _key: True))
    list(numbers.observing({"key": equal}, lambda _key: True))
    assert numbers.observed["key"] is held


def test_replacing_desired_values_compares_only_the_keys_that_changed() -> None:
    compared: list[int] = []

    def differs(desired: tuple[Owner, int], _seen: int) -> bool:
        compared.append(desired[1])
        return False

    numbers: Table[str, tuple[Owner, int], int] = Table(lambda desired: desired[0], differs, lambda _: False)
    before = {str(number): (OLD, number) for number in range(100)}
    numbers.replace(OLD, {}, before)
    list(numbers.observing({str(number): number for number in range(100)}, ours()))
    compared.clear()
    numbers.replace(OLD, before, before | {"7": (OLD, 700)})
    assert compared == [700]


def test_drift_after_the_first_read_is_counted_once() -> None:
    numbers = desiring(kept=1, lost=1, changed=1, never=1)
    list(numbers.observing({"kept": 1, "lost": 1, "changed": 1, "old": 1}, ours("kept", "lost", "changed", "old")))
    assert numbers.drifted == 0, "what a former process left is no drift"
    numbers.confirm("old", None)
    after = {"kept": 1, "changed": 2, "intruder": 1, "theirs": 1}
    list(numbers.observing(after, ours("kept", "changed", "intruder")))
    assert numbers.drifted == 3, "lost, changed, intruder"
    list(numbers.observing(after, ours("kept", "changed", "intruder")))
    assert numbers.drifted == 3


def test_further_drift_of_a_key_that_already_differs_is_counted_but_not_reported_again() -> None:
    numbers = desiring(key=1)
    list(numbers.observing({"key": 1}, ours("key")))
    list(numbers.observing({"key": 2, "stray": 1}, ours("key", "stray")))
    assert (numbers.drifted, sorted(numbers.take_drifted())) == (2, ["key", "stray"])
    list(numbers.observing({"key": 3, "stray": 2}, ours("key", "stray")))
    assert (numbers.drifted, numbers.take_drifted()) == (4, [])
    numbers.notice("key", 4)
    numbers.notice("stray", 3)
    assert (numbers.drifted, numbers.take_drifted()) == (6, [])
    numbers.confirm("key", 1)
    numbers.notice("key", 2)
    assert (numbers.drifted, numbers.take_drifted()) == (7, ["key"])


def test_a_newly_observed_value_that_equals_the_desired_value_is_no_drift() -> None:
    numbers = table()
    list(numbers.observing({}, ours()))
    numbers.replace(OLD, {}, {"key": (OLD, 1)})
    list(numbers.observing({"key": 1}, ours()))  # the key was added, but the kernel's answer was lost
    assert numbers.drifted == 0


def test_a_value_that_ipvsproxy_wrote_itself_is_no_drift_even_if_it_is_no_longer_desired() -> None:
    numbers = desiring(key=1)
    numbers.notice("key", 1)
    numbers.confirm("key", 2)
    assert (numbers.drifted, pending(numbers)) == (0, ["key"])


def test_an_owner_that_wins_the_key_by_a_new_rank_is_removed_from_the_waiting_owners() -> None:
    ranks: dict[Owner, float] = {OLD: 1, MIDDLE: 2, YOUNG: 3}
    numbers = ranked(ranks)
    ranks[YOUNG] = 0
    assert numbers.desire("key", YOUNG, (YOUNG, 2)) == OLD
    assert list(numbers.owners_of("key")) == [YOUNG, OLD, MIDDLE]
    ranks[OLD] = 4
    assert numbers.desire("key", OLD, (OLD, 2)) is None
    assert numbers.release("key", YOUNG) == MIDDLE
    assert list(numbers.owners_of("key")) == [MIDDLE, OLD]


def test_the_first_waiting_owner_gets_the_key_when_the_rank_of_the_winner_falls() -> None:
    ranks: dict[Owner, float] = {OLD: 1, MIDDLE: 2, YOUNG: 3}
    numbers = ranked(ranks)
    ranks[OLD] = 2.5
    assert numbers.desire("key", OLD, (OLD, 2)) == MIDDLE
    assert list(numbers.owners_of("key")) == [MIDDLE, OLD, YOUNG]
    assert numbers.desired["key"] == (MIDDLE, 1)


def test_waiting_owners_stay_sorted_by_rank_after_repeated_changes_of_rank() -> None:
    ranks: dict[Owner, float] = {OLD: 1, MIDDLE: 2, YOUNG: 3}
    numbers = ranked(ranks)
    for rank in (4, 3.5, 5, 3.5, 2.5, 3.5, 4, 6):
        ranks[MIDDLE] = rank
        assert numbers.desire("key", MIDDLE, (MIDDLE, 2)) is None
    assert numbers.release("key", OLD) == YOUNG
