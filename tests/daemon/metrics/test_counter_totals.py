"""What is added up of counters, what is forgotten, and that the loop has its turn meanwhile. Series are in test_traffic.py."""

import hypothesis
from hypothesis import strategies as st

from ipvsproxy.daemon.metrics.counter_totals import ROWS_AT_ONCE, Ledger, Row
from ipvsproxy.model.kernel import Counters

MANY = 10 * ROWS_AT_ONCE


def rows(count: int) -> list[Row]:
    return [Row(number, f"label {number}", Counters(1)) for number in range(count)]


def pauses(ledger: Ledger, some: list[Row]) -> int:
    return sum(1 for _ in ledger.booking(some))


def test_who_waits_has_a_turn_while_much_comes_stays_or_goes() -> None:
    ledger = Ledger(MANY)
    assert pauses(ledger, rows(MANY)) == 20, "marked, and booked"
    assert pauses(ledger, rows(MANY)) == 40, "and what is kept is looked through: totals, and objects"
    assert pauses(ledger, []) == 40, "looked through, and forgotten"
    assert not ledger.totals
    assert not ledger._last


@hypothesis.given(st.lists(st.dictionaries(st.integers(0, 4), st.integers(0, 3)), max_size=8))
def test_a_total_grows_by_what_was_counted_since_and_is_forgotten_with_the_last_that_has_its_labels(
    steps: list[dict[int, int]],
) -> None:
    """Two objects for each label; each step adds so many connections to those that are there."""
    ledger = Ledger(10)
    counted: dict[int, int] = {}
    expected: dict[str, int] = {}
    for step in steps:
        counted = {key: counted.get(key, 0) + more for key, more in step.items()}
        labels = {key: f"label {key // 2}" for key in step}
        expected = {label: total for label, total in expected.items() if label in labels.values()}
        for key, more in step.items():
            if more:
                expected[labels[key]] = expected.get(labels[key], 0) + more
        list(ledger.booking([Row(key, labels[key], Counters(count)) for key, count in counted.items()]))
        assert {label: total.counts[0] for label, total in ledger.totals.items()} == expected
    assert ledger._last.keys() == counted.keys()
