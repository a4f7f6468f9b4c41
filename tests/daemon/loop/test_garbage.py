"""Tests that garbage collections run at the right times and are short; ``scripts/bench`` measures how much time this saves."""

import gc
import weakref
from collections.abc import Iterator, Mapping

import pytest

from ipvsproxy.daemon.loop import garbage


class Knot:
    """An object that refers to itself, so that only the garbage collector can free it."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)
    gc.enable()
    gc.unfreeze()


def test_objects_that_survive_a_full_garbage_collection_are_left_out_of_collections_for_a_day() -> None:
    now_s = 0.0
    with garbage.in_short_rounds(lambda: now_s) as thaw_if_due:
        knot = Knot()
        gc.collect()
        assert gc.get_freeze_count() > 0
        reference = weakref.ref(knot)
        del knot
        now_s = garbage.THAW_INTERVAL_S - 1
        thaw_if_due()
        gc.collect()
        assert reference() is not None
        now_s += 1
        thaw_if_due()
        assert reference() is None
        assert gc.get_freeze_count() > 0


def test_garbage_collections_are_short_after_frozen_objects_have_been_thawed() -> None:
    now_s = 0.0
    walked: list[int] = []
    kept = [[number] for number in range(40 * garbage.YOUNG_OBJECTS)]

    def note(phase: str, info: Mapping[str, int]) -> None:
        if phase == "start":
            walked.append(sum(len(gc.get_objects(age)) for age in range(info["generation"] + 1)))

    with garbage.in_short_rounds(lambda: now_s) as thaw_if_due:
        now_s = garbage.THAW_INTERVAL_S
        thaw_if_due()
        gc.callbacks.append(note)
        reference = weakref.ref(Knot())
        kept += [[number] for number in range(20 * garbage.YOUNG_OBJECTS)]
        gc.callbacks.remove(note)
    assert reference() is None, "young garbage is collected"
    assert len(walked) > 10
    assert max(walked) <= 3.2 * garbage.YOUNG_OBJECTS


def test_the_settings_of_the_garbage_collector_are_restored_at_the_end_of_the_block() -> None:
    before, callbacks = gc.get_threshold(), list(gc.callbacks)
    with garbage.in_short_rounds():
        assert gc.get_threshold() == (garbage.YOUNG_OBJECTS, garbage.ROUNDS_BETWEEN, garbage.ROUNDS_BETWEEN)
    with pytest.raises(KeyError), garbage.in_short_rounds():
        raise KeyError
    assert gc.get_threshold() == before
    assert list(gc.callbacks) == callbacks


def test_only_the_collection_threshold_of_young_objects_is_changed_on_python_3_14(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(garbage, "_ROUNDS_HAVE_AGES", False)
    _, *others = gc.get_threshold()
    with garbage.in_short_rounds():
        assert gc.get_threshold() == (garbage.YOUNG_OBJECTS, *others)
