"""Pieces of equal length, cut from one."""

import hypothesis
import pytest
from hypothesis import strategies as st

from ipvsproxy.model import packed


@hypothesis.given(st.lists(st.binary(min_size=3, max_size=3), max_size=5))
def test_joined_pieces_are_cut_at_the_same_places(values: list[bytes]) -> None:
    assert packed.pieces(b"".join(values), 3) == tuple(values)


@pytest.mark.parametrize("count", [packed.AT_ONCE - 1, packed.AT_ONCE, packed.AT_ONCE + 1, 2 * packed.AT_ONCE, 1000])
def test_more_pieces_than_one_call_cuts_are_cut_at_the_same_places(count: int) -> None:
    values = [number.to_bytes(4, "big") for number in range(count)]
    found = packed.pieces(b"".join(values), 4)
    assert found == tuple(values)
    assert {type(value) for value in found} == {bytes}


@pytest.mark.parametrize("length", [1, 5, 4 * packed.AT_ONCE + 1])
def test_bytes_that_are_no_whole_number_of_pieces_are_refused(length: int) -> None:
    with pytest.raises(ValueError, match=rf"{length} bytes cannot be cut into pieces of 4"):
        packed.pieces(bytes(length), 4)
