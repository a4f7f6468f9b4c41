"""The collector's pauses. What they gain is measured by scripts/bench, not here."""

import gc
from collections.abc import Iterator

import pytest

from ipvsproxy.daemon import garbage


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)
    gc.enable()
    gc.unfreeze()


def test_nothing_is_collected_inside_the_block_and_what_it_made_is_passed_over_afterwards() -> None:
    frozen = gc.get_freeze_count()
    with garbage.postponed():
        assert not gc.isenabled()
        made = [[number] for number in range(1000)]
    assert gc.isenabled()
    assert gc.get_freeze_count() >= frozen + len(made)
    assert gc.get_threshold()[0] == garbage.YOUNG_OBJECTS


def test_a_failed_start_leaves_the_collector_at_work() -> None:
    frozen = gc.get_freeze_count()
    with pytest.raises(KeyError), garbage.postponed():
        raise KeyError
    assert gc.isenabled()
    assert gc.get_freeze_count() == frozen
