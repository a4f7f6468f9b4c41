"""Covers lines from chunks, and new, repeated and outdated changes."""

import itertools
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ipvsproxy.daemon.sources import reflector
from ipvsproxy.model.service import ServiceName

WEB = ServiceName("default", "web")
DNS = ServiceName("kube-system", "dns")


@given(st.binary(max_size=60).map(lambda data: data.replace(b"a", b"\n")), st.lists(st.integers(0, 60), max_size=8))
def test_lines_do_not_depend_on_the_bounds_of_chunks(data: bytes, cuts: list[int]) -> None:
    buffer = reflector.LineBuffer()
    bounds = [0, *sorted(cuts), len(data)]
    lines = [line for start, end in itertools.pairwise(bounds) for line in buffer.feed(data[start:end])]
    *whole, rest = data.split(b"\n")
    assert lines == [line for line in whole if line]
    assert buffer.pending_bytes == len(rest)


class Joining(reflector.LineBuffer):
    """The wrong way: each chunk copies the whole line so far."""

    def feed(self, chunk: bytes) -> list[bytes]:
        lines = super().feed(chunk)
        self._pieces = [b"".join(self._pieces)]
        return lines


def allocated_bytes(buffer: reflector.LineBuffer, chunks: int, chunk: bytes) -> int:
    """The sum of all memory that a line of so many chunks takes. Each copy takes memory."""
    total = 0
    tracemalloc.start()
    try:
        for data in (*[chunk] * chunks, b"\n"):
            tracemalloc.reset_peak()
            before, _ = tracemalloc.get_traced_memory()
            lines = buffer.feed(data)
            total += tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
    assert list(map(len, lines)) == [chunks * len(chunk)]
    return total


def test_each_byte_of_a_line_of_many_megabytes_is_copied_once() -> None:
    chunk = b"x" * 4096
    assert allocated_bytes(reflector.LineBuffer(), 8192, chunk) < 1.5 * (32 << 20)
    assert allocated_bytes(Joining(), 256, chunk) > 100 * (1 << 20), "the test cannot show copies"


def test_a_line_beyond_the_bound_is_refused_before_it_is_complete() -> None:
    buffer = reflector.LineBuffer(longest_bytes=8)
    assert buffer.feed(b"12345678\n1234") == [b"12345678"]
    with pytest.raises(reflector.LineTooLongError, match="longer than 8 bytes"):
        buffer.feed(b"56789")


def test_a_repeated_change_and_an_older_one_are_not_new() -> None:
    freshness = reflector.Freshness()
    freshness.has_all_up_to("100")
    assert freshness.is_new(WEB, "105")
    assert not freshness.is_new(WEB, "105")
    assert not freshness.is_new(WEB, "103")
    assert not freshness.is_new(DNS, "100")
    assert freshness.is_new(WEB, "106")


def test_a_late_change_of_another_object_is_new() -> None:
    freshness = reflector.Freshness()
    freshness.has_all_up_to("100")
    assert freshness.is_new(WEB, "105")
    assert freshness.is_new(DNS, "102")


def test_changes_from_before_a_bookmark_are_not_new() -> None:
    freshness = reflector.Freshness()
    freshness.is_new(WEB, "105")
    freshness.has_all_up_to("110")
    assert not freshness.is_new(DNS, "109")
    assert freshness.is_new(DNS, "111")


def test_a_list_with_a_lower_version_lowers_the_bound() -> None:
    freshness = reflector.Freshness()
    freshness.has_all_up_to("5000")
    freshness.has_all_up_to("20")
    assert freshness.is_new(WEB, "21")


@pytest.mark.parametrize("version", ["", "abc", "9" * 5000])
def test_a_change_with_a_version_that_is_no_number_is_always_new(version: str) -> None:
    freshness = reflector.Freshness()
    freshness.has_all_up_to("100")
    assert freshness.is_new(WEB, version)
    assert freshness.is_new(WEB, version)
