"""Addresses, networks and times, wherever they stand; and the bound on skipped parts."""

import pytest

from ipvsproxy.model.service import Skipped
from ipvsproxy.translate.api import fields
from tests.support import builders


def test_addresses_are_read_once_each_in_order_and_a_bad_one_costs_itself_only() -> None:
    skipped: list[Skipped] = []
    texts = ["192.0.2.2", " fd00::1 ", "", "x", "192.0.2.1", "192.0.2.2"]
    assert fields.addresses("spec.some", texts, skipped) == builders.addresses("192.0.2.2", "fd00::1", "192.0.2.1")
    assert skipped == [Skipped("spec.some", "'x' is not an IP address")]


def test_networks_are_read_once_each_in_order_and_a_bad_one_costs_itself_only() -> None:
    skipped: list[Skipped] = []
    texts = ["fd00::/64", " 10.1.2.3/8 ", " ", "10.0.0.0", "10.0.0.0/8"]
    assert fields.networks("spec.some", texts, skipped) == builders.networks("fd00::/64", "10.0.0.0/8")
    assert skipped == [Skipped("spec.some", "'10.0.0.0' is not a CIDR range such as 10.0.0.0/8")]


@pytest.mark.parametrize("count", [0, 1, fields.MOST_SKIPPED])
def test_as_many_skipped_parts_as_the_bound_allows_are_kept_one_by_one(count: int) -> None:
    parts = [Skipped(f"parts[{number}]", "is wrong") for number in range(count)]
    assert fields.bounded(parts) == tuple(parts)


@pytest.mark.parametrize("beyond", [1, 1000])
def test_unusable_parts_beyond_that_are_counted(beyond: int) -> None:
    parts = [Skipped(f"parts[{number}]", "is wrong") for number in range(fields.MOST_SKIPPED + beyond)]
    *first, last = fields.bounded(parts)
    assert first == parts[: fields.MOST_SKIPPED]
    assert last == Skipped("parts[20]", f"is wrong; {beyond} such parts from here on")


@pytest.mark.parametrize(("text", "shown"), [("x", "'x'"), ("x" * 65, f"'{'x' * 64}'"), ("a\nb", r"'a\nb'"), (None, "'None'")])
def test_of_a_bad_value_so_much_is_shown_as_fits_a_line(text: str | None, shown: str) -> None:
    assert fields.shown(text) == shown


def test_parts_that_are_counted_are_a_fault_if_one_of_them_is() -> None:
    parts_shown = fields.bounded([Skipped("labels", "not ours", invalid=False)] * 21)
    assert not parts_shown[-1].invalid
    assert fields.bounded([*parts_shown[:-1], Skipped("a", "not ours", invalid=False), Skipped("b", "wrong")])[-1].invalid


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("1970-01-01T00:00:01.123456789Z", 1.123456),
        ("1970-01-01T01:00:01.123456789+01:00", 1.123456),
        ("1970-01-01T01:00:01.123456789123456+01:00", 1.123456),
        pytest.param("x" * 100_000, 0, id="endless"),
        ("1970-01-01T01:00:00+01:00", 0),
        ("0001-01-01T00:00:00Z", 0),
        ("0001-01-01T00:00:00", 0),
        ("yesterday", 0),
        ("", 0),
        (None, 0),
    ],
)
def test_a_time_is_read_to_the_microsecond_and_nonsense_is_none(text: str | None, seconds: float) -> None:
    assert fields.seconds(text) == seconds
