"""Tests that option values are parsed by Go's rules.

``test_load.py`` (flags) and ``test_file.py`` (the file) test the texts of errors.
"""

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, strategies

from ipvsproxy.config import option
from ipvsproxy.config.option import Kind, Option


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        *(("0", 0), ("-0", 0), ("0s", 0), ("0.0000000001s", 0), ("30s", 30), ("+5s", 5), ("1m30s", 90), ("1h", 3600)),
        *(("2h22m", 8520), ("1.5h", 5400), ("-1.5h", -5400), (".5s", 0.5), ("1.s", 1), ("1s1s", 2), ("1s1h", 3601)),
        *(("100ms", 0.1), ("1us", 1e-6), ("1µs", 1e-6), ("1μs", 1e-6), ("3ns", 3e-9)),
        ("2562047h47m16.854775807s", 9223372036.854775807),
    ],
)
def test_a_duration_has_the_same_meaning_as_in_go(text: str, seconds: float) -> None:
    assert option.parse_duration(text) == pytest.approx(seconds, abs=1e-12)


_NO_DURATIONS = "|s|30|1|-|+|.s|1 s| 1s|1s |1h 30m|1d|1S|1,5s|--1s|1s-1s|٣s|2562048h"
REFUSED: Sequence[tuple[Callable[[str], object], str, Sequence[str]]] = [
    (
        option.parse_duration,
        "a duration such as 30s, 1m30s or 1h",
        ("9" * 300 + "s", *_NO_DURATIONS.split("|")),
    ),
    (
        option.parse_integer,
        r"a whole number in -2147483648\.\.2147483647",
        ("", "-", "1.0", "1e3", "a", "ff", "08", "0x", "2147483648", "-2147483649", "1__0", " 1", "٣", "1" * 5000),
    ),
    (option.parse_boolean, "true or false", ("", "yes", "on", "tRUE", "2")),
    (option.parse_gates, "true or false|a list such as", ("A", "=true", "A=maybe")),
    (
        option.parse_patterns,
        "a list such as pattern=2",
        ("proxier", "proxier=", "=2", "proxier=-1", "a=b=2", "proxier=2147483648"),
    ),
    (option.parse_quantity, "a number of bytes", ("", "x", "1K", "1 k", "1kB", "Ki")),
    (option.parse_number, "a number", ("", "nan", "inf", "-Infinity", "1e999", "x", "٣")),
]


@pytest.mark.parametrize(("parse", "rule", "text"), [(parse, rule, text) for parse, rule, texts in REFUSED for text in texts])
def test_a_value_that_go_would_refuse_causes_an_error_that_says_which_values_are_allowed(
    parse: Callable[[str], object], rule: str, text: str
) -> None:
    with pytest.raises(ValueError, match=rule):
        parse(text)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        *((0, "0s"), (30, "30s"), (60, "1m0s"), (90, "1m30s"), (-90, "-1m30s"), (3600, "1h0m0s"), (86400, "24h0m0s")),
        *((1.5, "1.5s"), (0.1, "100ms"), (0.0015, "1.5ms"), (1.5e-6, "1.5µs"), (3e-9, "3ns"), (3660.001, "1h1m0.001s")),
    ],
)
def test_a_duration_is_printed_in_the_format_that_go_uses(seconds: float, text: str) -> None:
    assert option.render_duration(seconds) == text


@given(nanoseconds=strategies.integers(-(2**52), 2**52))
def test_a_printed_duration_is_parsed_to_the_same_value(nanoseconds: int) -> None:
    seconds = nanoseconds / 1e9
    assert option.parse_duration(option.render_duration(seconds)) == seconds


@pytest.mark.parametrize(
    ("text", "number"),
    [
        *(("0", 0), ("14", 14), ("-999", -999), ("+7", 7), ("1_000", 1000)),
        *(("0x1f", 31), ("0X_1F", 31), ("0b101", 5), ("0o17", 15), ("017", 15)),
    ],
)
def test_an_integer_may_have_any_base_that_go_accepts(text: str, number: int) -> None:
    assert option.parse_integer(text) == number


@pytest.mark.parametrize("spelling", ["1 0", "t f", "T F", "true false", "TRUE FALSE", "True False"])
def test_a_boolean_may_have_any_spelling_that_go_accepts(spelling: str) -> None:
    assert [option.parse_boolean(text) for text in spelling.split()] == [True, False]


def test_a_list_is_parsed_as_one_line_of_csv() -> None:
    assert option.parse_list("") == ()
    assert option.parse_list("a,b") == ("a", "b")
    assert option.parse_list('"a,b",c') == ("a,b", "c")


def test_feature_gates_allow_spaces_around_names_and_values() -> None:
    assert option.parse_gates(" A=true, B = false ,") == {"A": True, "B": False}


def test_empty_elements_of_a_list_of_patterns_are_dropped() -> None:
    assert option.parse_patterns("proxier=4,,ipset*=2,") == ("proxier=4", "ipset*=2")


@pytest.mark.parametrize("text", ["0", "512", "1k", "2Ki", "1.5M", "1e3"])
def test_a_quantity_keeps_its_original_text(text: str) -> None:
    assert option.parse_quantity(text) == text


@given(kind=strategies.sampled_from(Kind), text=strategies.text())
def test_parsing_any_text_raises_no_error_except_value_error(kind: Kind, text: str) -> None:
    try:
        Option(kind, "x", "").parse(text)
    except ValueError as error:
        assert str(error)  # noqa: PT017 - some texts raise no error
