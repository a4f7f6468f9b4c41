"""Covers sums of counters, forgotten labels, and pauses for the loop. Series are in test_traffic.py."""

import hypothesis
from hypothesis import strategies as st

from ipvsproxy.daemon.metrics.counter_totals import ROWS_AT_ONCE, Ledger, Row
from ipvsproxy.model.virtual_servers import Counters

MANY = 10 * ROWS_AT_ONCE


def rows(count: int) -> list[Row]:
    return [Row(number, f"label {number}", Counters(1)) for number in range(count)]


def pauses(ledger: Ledger, some: list[Row]) -> int:
    return sum(1 for _ in ledger.booking(some))


def test_a_booking_pauses_while_many_rows_come_stay_or_go() -> None:
    ledger = Ledger(MANY)
    assert pauses(ledger, rows(MANY)) == 20, "marking, and booking"
    assert pauses(ledger, rows(MANY)) == 40, "and scanning totals and objects that stay"
    assert pauses(ledger, []) == 40, "scanning, and forgetting"
    assert not ledger.totals
    assert not ledger._last


@hypothesis.given(st.lists(st.dictionaries(st.integers(0, 4), st.integers(0, 3)), max_size=8))
def test_a_total_grows_by_new_counts_and_is_forgotten_with_the_last_object_of_its_labels(
    rounds: list[dict[int, int]],
) -> None:
    """Two objects for each label; each round adds connections to its objects."""
    ledger = Ledger(10)
    counted: dict[int, int] = {}
    expected: dict[str, int] = {}
    for added in rounds:
        counted = {key: counted.get(key, 0) + more for key, more in added.items()}
        labels = {key: f"label {key // 2}" for key in added}
        expected = {label: total for label, total in expected.items() if label in labels.values()}
        for key, more in added.items():
            if more:
                expected[labels[key]] = expected.get(labels[key], 0) + more
        list(ledger.booking([Row(key, labels[key], Counters(count)) for key, count in counted.items()]))
        assert {label: total.counts[0] for label, total in ledger.totals.items()} == expected
    assert ledger._last.keys() == counted.keys()
