"""A table of any kind: who has a key, what is pending, what is foreign. Left out: what is in a table (``test_claims``)."""

from collections.abc import Callable, Collection, Mapping
from typing import Any

from ipvsproxy.model.kernel import Owner
from ipvsproxy.model.service import ServiceName
from ipvsproxy.reconcile.table import KEYS_AT_ONCE, Conflict, Table

OLD, MIDDLE, YOUNG = (Owner(age, ServiceName("ns", name)) for age, name in ((1, "old"), (2, "middle"), (3, "young")))


def table(is_protected: Callable[[str], bool] = lambda _: False) -> Table[str, tuple[Owner, int], int]:
    """Owners want numbers of keys."""
    return Table(lambda wanted: wanted[0], lambda wanted, seen: wanted[1] != seen, is_protected)


def ours(*keys: str) -> Callable[[str], bool]:
    return lambda key: key in keys


def pending(wishes: Table[str, tuple[Owner, int], int]) -> Collection[str]:
    return [*wishes.pending, *wishes.surplus]


def test_a_desired_key_is_pending_until_its_desired_value_is_observed() -> None:
    wishes = table()
    wishes.replace(OLD, {}, {"key": (OLD, 1)})
    assert pending(wishes) == ["key"]
    wishes.confirm("key", 2)
    assert pending(wishes) == ["key"]
    wishes.confirm("key", 1)
    assert pending(wishes) == []


def test_a_key_that_is_no_longer_desired_is_surplus_until_it_is_gone() -> None:
    wishes = table()
    wishes.replace(OLD, {}, {"key": (OLD, 1)})
    wishes.confirm("key", 1)
    wishes.replace(OLD, {"key": (OLD, 1)}, {})
    assert pending(wishes) == ["key"]
    wishes.confirm("key", None)
    assert (pending(wishes), dict(wishes.observed)) == ([], {})


def test_a_desired_value_given_up_before_it_was_in_force_leaves_nothing_to_do() -> None:
    wishes = table()
    wishes.replace(OLD, {}, {"key": (OLD, 1)})
    wishes.replace(OLD, {"key": (OLD, 1)}, {})
    assert pending(wishes) == []


def test_several_keys_that_are_confirmed_at_once_are_as_one_by_one() -> None:
    found = []
    for at_once in (True, False):
        unequal: dict[Table[Any, Any, Any], None] = {}
        wishes: Table[str, tuple[Owner, int], int] = Table(
            lambda wanted: wanted[0], lambda wanted, seen: wanted[1] != seen, lambda _: False, unequal
        )
        wishes.observe({"theirs": 3, "unwanted": 3}, lambda _: False)
        keys = ["new", "other value", "theirs", "unwanted", "in force"]
        wishes.replace(OLD, {}, {key: (OLD, 1 if key == "other value" else 2) for key in (*keys, "left") if key != "unwanted"})
        wishes.confirm("in force", 2)
        for together in (keys,) if at_once else ():
            wishes.confirm_all(together, 2)
        for key in () if at_once else keys:
            wishes.confirm(key, 2)
        before = pending(wishes), dict(wishes.observed), set(wishes.foreign), bool(unequal)
        for key in ("other value", "left"):
            wishes.replace(OLD, {key: (OLD, 1)}, {key: (OLD, 4)})
        wishes.confirm("unwanted", None)
        wishes.confirm_all(("other value", "left"), 4)
        found.append((before, pending(wishes), dict(wishes.observed), bool(unequal)))
    assert found[0] == found[1]
    (differing, *_, is_unequal), *_, is_unequal_at_last = found[0]
    assert (differing, is_unequal, is_unequal_at_last) == (["other value", "left", "unwanted"], True, False)


def test_the_oldest_owner_has_the_key_in_any_order() -> None:
    for first, second in ((OLD, YOUNG), (YOUNG, OLD)):
        wishes = table()
        wishes.replace(first, {}, {"key": (first, 1)})
        affected = wishes.replace(second, {}, {"key": (second, 2)})
        assert wishes.desired["key"][0] == OLD
        assert wishes.is_owned_by("key", OLD)
        assert not wishes.is_owned_by("key", YOUNG)
        assert list(wishes.conflicts()) == [Conflict("key", OLD, (YOUNG,))]
        assert affected == ({YOUNG} if second == OLD else set())


def test_the_next_oldest_takes_over_when_the_winner_goes() -> None:
    wishes = table()
    for owner in (MIDDLE, YOUNG, OLD):
        wishes.replace(owner, {}, {"key": (owner, int(owner.created_s))})
    assert wishes.replace(OLD, {"key": (OLD, 1)}, {}) == {MIDDLE}
    assert wishes.desired["key"] == (MIDDLE, 2)
    assert wishes.replace(MIDDLE, {"key": (MIDDLE, 2)}, {}) == {YOUNG}
    assert wishes.desired["key"] == (YOUNG, 3)
    assert list(wishes.conflicts()) == []


def test_an_owner_that_goes_while_it_waits_changes_nothing_for_the_winner() -> None:
    wishes = table()
    wishes.replace(OLD, {}, {"key": (OLD, 1)})
    wishes.replace(YOUNG, {}, {"key": (YOUNG, 2)})
    assert wishes.replace(YOUNG, {"key": (YOUNG, 2)}, {}) == set()
    assert wishes.desired["key"] == (OLD, 1)
    assert list(wishes.conflicts()) == []


def test_an_owner_that_waits_may_change_its_desired_value_meanwhile() -> None:
    wishes = table()
    wishes.replace(OLD, {}, {"key": (OLD, 1)})
    wishes.replace(YOUNG, {}, {"key": (YOUNG, 2)})
    wishes.replace(YOUNG, {"key": (YOUNG, 2)}, {"key": (YOUNG, 3)})
    wishes.replace(OLD, {"key": (OLD, 1)}, {})
    assert wishes.desired["key"] == (YOUNG, 3)


def test_a_key_without_an_owner_is_owned_by_none() -> None:
    assert not table().is_owned_by("key", OLD)
    assert list(table().owners_of("key")) == []


def test_what_is_not_ours_is_not_removed() -> None:
    wishes = table()
    wishes.observe({"ours": 1, "theirs": 1}, ours("ours"))
    assert pending(wishes) == ["ours"]
    assert set(wishes.foreign) == {"theirs"}


def test_a_foreign_key_stays_when_a_desired_value_is_given_up_before_it_was_in_force() -> None:
    wishes = table()
    wishes.observe({"theirs": 1}, ours())
    wishes.replace(OLD, {}, {"theirs": (OLD, 2)})
    assert pending(wishes) == ["theirs"]
    wishes.replace(OLD, {"theirs": (OLD, 2)}, {})
    assert pending(wishes) == []


def test_a_foreign_key_stays_though_it_was_desired_when_it_was_observed() -> None:
    wishes = table()
    wishes.replace(OLD, {}, {"theirs": (OLD, 1)})
    wishes.observe({"theirs": 1}, ours())
    wishes.replace(OLD, {"theirs": (OLD, 1)}, {})
    assert pending(wishes) == []


def test_what_we_changed_is_ours() -> None:
    wishes = table()
    wishes.observe({"theirs": 1}, ours())
    wishes.replace(OLD, {}, {"theirs": (OLD, 2)})
    wishes.confirm("theirs", 2)
    assert not wishes.foreign
    wishes.replace(OLD, {"theirs": (OLD, 2)}, {})
    assert pending(wishes) == ["theirs"]


def test_what_was_ours_stays_ours_when_nothing_witnesses_it_any_more() -> None:
    wishes = table()
    wishes.replace(OLD, {}, {"key": (OLD, 1)})
    wishes.confirm("key", 1)
    wishes.replace(OLD, {"key": (OLD, 1)}, {})
    wishes.observe({"key": 1}, ours())
    assert pending(wishes) == ["key"]


def test_what_vanished_and_came_back_is_judged_anew() -> None:
    wishes = table()
    wishes.observe({"key": 1}, ours("key"))
    wishes.observe({}, ours("key"))
    wishes.observe({"key": 1}, ours())
    assert set(wishes.foreign) == {"key"}


def test_protected_keys_are_never_removed_but_changed_when_desired() -> None:
    wishes = table(lambda key: key == "protected")
    wishes.observe({"protected": 1}, ours("protected"))
    assert pending(wishes) == []
    wishes.replace(OLD, {}, {"protected": (OLD, 2)})
    assert pending(wishes) == ["protected"]


def test_drift_is_pending_in_both_directions() -> None:
    wishes = table()
    wishes.replace(OLD, {}, {"changed": (OLD, 1), "lost": (OLD, 1), "kept": (OLD, 1)})
    for key in ("changed", "lost", "kept"):
        wishes.confirm(key, 1)
    wishes.observe({"changed": 2, "kept": 1, "stray": 1}, ours("stray"))
    assert set(pending(wishes)) == {"changed", "lost", "stray"}


def test_a_long_listing_is_compared_with_pauses_and_to_the_same_end() -> None:
    wanted = {str(number): (OLD, number) for number in range(KEYS_AT_ONCE)}
    listing = {str(number): 1 for number in range(2 * KEYS_AT_ONCE)}
    at_once, in_parts = table(), table()
    for wishes in (at_once, in_parts):
        wishes.replace(OLD, {}, wanted)
    at_once.observe(listing, ours(*wanted))
    assert sum(1 for _ in in_parts.observing(listing, ours(*wanted))) == 4
    assert list(at_once.pending) == list(in_parts.pending) == [key for key in wanted if key != "1"]
    assert set(at_once.foreign) == set(in_parts.foreign) == listing.keys() - wanted.keys()
    again = sum(1 for _ in in_parts.observing(dict(listing), ours(*wanted)))
    assert again == 2 + 2 + 1, "which are gone, which differ; and what is not ours may have become so"
    almost = {str(number): 1 for number in range(KEYS_AT_ONCE - 1)}
    assert list(table().observing(almost, ours())) == []


def test_keys_of_one_value_are_compared_as_a_listing_is() -> None:
    keys = {str(number) for number in range(2 * KEYS_AT_ONCE)}
    by_listing, by_keys = table(), table()
    for wishes in (by_listing, by_keys):
        wishes.replace(OLD, {}, {"0": (OLD, 1), "1": (OLD, 2), "missing": (OLD, 1)})
        wishes.observe({"0": 1, "gone": 1, "theirs": 1}, ours("0", "gone"))
    by_listing.observe(dict.fromkeys(keys, 1), ours("1"))
    pauses = sum(1 for _ in by_keys.observing_all(keys, 1, ours("1")))
    assert pauses == 1 + 2 + 2, "which are gone, which differ; those are compared"
    for wishes in (by_listing, by_keys):
        assert set(wishes.pending) == {"1", "missing"}
        assert wishes.surplus == {}
        assert wishes.foreign == keys - {"0", "1"}
        assert wishes.observed == dict.fromkeys(keys, 1)


def observe_some(wishes: Table[str, tuple[Owner, int], int], seen: Mapping[str, int | None], *known: str) -> None:
    for _ in wishes.observing_some(seen, ours(*known)):
        pass


def test_what_is_read_by_itself_says_nothing_of_others() -> None:
    wishes = table()
    wishes.replace(OLD, {}, {"kept": (OLD, 1), "lost": (OLD, 1), "changed": (OLD, 1)})
    wishes.observe({"kept": 1, "lost": 1, "changed": 1, "left": 1}, ours("kept", "lost", "changed"))
    observe_some(wishes, {"lost": None, "changed": 2, "stray": 1, "never": None, "left": None}, "stray")
    assert wishes.observed == {"kept": 1, "changed": 2, "stray": 1}
    assert set(wishes.pending) == {"lost", "changed"}
    assert set(wishes.surplus) == {"stray"}
    assert set(wishes.foreign) == set()
    assert set(wishes.take_drifted()) == {"lost", "changed", "stray"}


def test_an_equal_observed_value_keeps_the_known_object() -> None:
    held, equal = [1], [1]
    wishes: Table[str, Owner, list[int]] = Table(lambda owner: owner, lambda _wanted, seen: seen != [1], lambda _key: False)
    wishes.observe({"key": held}, lambda _key: True)
    wishes.observe({"key": equal}, lambda _key: True)
    assert wishes.observed["key"] is held


def test_a_claim_compares_only_the_keys_it_changes() -> None:
    compared: list[int] = []

    def differs(wanted: tuple[Owner, int], _seen: int) -> bool:
        compared.append(wanted[1])
        return False

    wishes: Table[str, tuple[Owner, int], int] = Table(lambda wanted: wanted[0], differs, lambda _: False)
    before = {str(number): (OLD, number) for number in range(100)}
    wishes.replace(OLD, {}, before)
    wishes.observe({str(number): number for number in range(100)}, ours())
    compared.clear()
    wishes.replace(OLD, before, before | {"7": (OLD, 700)})
    assert compared == [700]


def test_drift_is_counted_once_and_not_at_the_first_reading() -> None:
    wishes = table()
    wishes.replace(OLD, {}, {"kept": (OLD, 1), "lost": (OLD, 1), "changed": (OLD, 1), "never": (OLD, 1)})
    wishes.observe({"kept": 1, "lost": 1, "changed": 1, "old": 1}, ours("kept", "lost", "changed", "old"))
    assert wishes.drifted == 0, "what a former process left is no drift"
    wishes.confirm("old", None)
    after = {"kept": 1, "changed": 2, "intruder": 1, "theirs": 1}
    wishes.observe(after, ours("kept", "changed", "intruder"))
    assert wishes.drifted == 3, "lost, changed, intruder"
    wishes.observe(after, ours("kept", "changed", "intruder"))
    assert wishes.drifted == 3


def test_what_differed_already_is_counted_when_it_changes_and_is_not_named_again() -> None:
    wishes = table()
    wishes.replace(OLD, {}, {"key": (OLD, 1)})
    wishes.observe({"key": 1}, ours("key"))
    wishes.observe({"key": 2, "stray": 1}, ours("key", "stray"))
    assert (wishes.drifted, sorted(wishes.take_drifted())) == (2, ["key", "stray"])
    wishes.observe({"key": 3, "stray": 2}, ours("key", "stray"))
    assert (wishes.drifted, wishes.take_drifted()) == (4, [])
    wishes.notice("key", 4)
    wishes.notice("stray", 3)
    assert (wishes.drifted, wishes.take_drifted()) == (6, [])
    wishes.confirm("key", 1)
    wishes.notice("key", 2)
    assert (wishes.drifted, wishes.take_drifted()) == (7, ["key"])


def test_a_change_to_the_desired_value_is_no_drift() -> None:
    wishes = table()
    wishes.observe({}, ours())
    wishes.replace(OLD, {}, {"key": (OLD, 1)})
    wishes.observe({"key": 1}, ours())  # it was added, and the answer was lost
    assert wishes.drifted == 0


def test_a_key_that_is_noticed_alone_counts_as_well() -> None:
    wishes = table()
    wishes.replace(OLD, {}, {"key": (OLD, 1)})
    wishes.notice("key", 3)
    assert (wishes.drifted, pending(wishes)) == (0, ["key"])
    wishes.confirm("key", 1)
    wishes.notice("key", 2)
    assert (wishes.drifted, pending(wishes)) == (1, ["key"])
