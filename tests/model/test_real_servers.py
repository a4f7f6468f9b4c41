"""The keys of real servers, and the two forms in which weights are stored: a dictionary, or packed."""

import copy
import operator

import hypothesis
import pytest
from hypothesis import strategies as st

from ipvsproxy.model import real_servers
from ipvsproxy.model.net import Address, parse_address
from ipvsproxy.model.real_servers import NO_REAL_SERVERS, EvenWeights, RealServerKey, Thresholds, UnevenWeights, plain
from tests.support import builders

ONE, TWO = builders.backend("10.244.0.1"), builders.backend("10.244.0.2")


@pytest.mark.parametrize("text", ["10.0.0.1", "fd00::1"])
def test_a_real_server_key_keeps_its_address_and_port_when_it_is_copied(text: str) -> None:
    key = RealServerKey.of(parse_address(text), 80)
    assert (key.address, key.port) == (parse_address(text), 80)
    assert key.address.family is parse_address(text).family
    again = copy.deepcopy(key)
    assert (type(again), again) == (RealServerKey, key)


def test_real_server_keys_are_ordered_by_family_then_address_then_port() -> None:
    first, second = builders.backend("10.0.0.1", 0x0250), builders.backend("10.0.0.2", 0x0150)
    assert sorted([second, builders.backend("10.0.0.1", 0x0301), first]) == [first, builders.backend("10.0.0.1", 0x0301), second]
    mapped = RealServerKey.of(Address(bytes(10) + b"\xff\xff" + first.address), 0x0250)
    assert len({first, second, mapped, first.address, mapped.address}) == 5


@pytest.mark.parametrize("port", [-1, 65536])
def test_an_invalid_port_of_a_real_server_is_rejected(port: int) -> None:
    with pytest.raises(OverflowError):
        RealServerKey.of(parse_address("10.0.0.1"), port)


def keys_of(size: int) -> st.SearchStrategy[list[RealServerKey]]:
    return st.lists(st.binary(min_size=size, max_size=size).map(RealServerKey), max_size=12, unique=True)


@hypothesis.given(keys_of(6) | keys_of(18), st.data())
def test_evenweights_behaves_like_a_dictionary_in_which_each_key_has_the_weight_one(
    keys: list[RealServerKey], data: st.DataObject
) -> None:
    expected, packed = dict.fromkeys(keys, 1), EvenWeights.of(keys)
    assert list(packed) == keys
    assert {type(key) for key in packed} <= {RealServerKey}
    assert (len(packed), bool(packed)) == (len(keys), bool(keys))
    assert packed == expected == packed
    assert packed.unpacked() == packed.plain() == dict(packed) == expected
    assert (packed.keys(), packed.items(), list(packed.values())) == (expected.keys(), expected.items(), list(expected.values()))
    other = data.draw(keys_of(6) | keys_of(18) | st.sampled_from([[*keys[1:]], [*reversed(keys)]]))
    for key in (*keys, *other):
        assert (key in packed, packed.get(key)) == (key in expected, expected.get(key))
    assert (packed == dict.fromkeys(other, 1)) is (expected == dict.fromkeys(other, 1))
    assert (packed == EvenWeights.of(other)) is (set(keys) == set(other))
    if keys:
        assert packed != {**expected, keys[0]: 2}


def test_a_change_of_unpacked_weights_does_not_affect_the_packed_weights() -> None:
    packed = EvenWeights.of([builders.backend("10.0.0.1")])
    packed.unpacked().clear()
    assert len(packed) == 1
    assert len(NO_REAL_SERVERS) == 0


def test_an_even_weights_object_cannot_be_hashed_and_never_equals_a_list() -> None:
    packed = EvenWeights.of([builders.backend("10.0.0.1")])
    assert not operator.eq(packed, [builders.backend("10.0.0.1")])
    with pytest.raises(TypeError):
        hash(packed)
    with pytest.raises(KeyError):
        packed[builders.backend("10.0.0.2")]
    assert repr(packed) == "EvenWeights({RealServerKey('10.0.0.1:8080'): 1})"


def test_the_function_plain_turns_packed_weights_into_a_dictionary_and_returns_a_dictionary_unchanged() -> None:
    key = builders.backend("10.0.0.1")
    uneven = {key: 7}
    assert plain(uneven) is uneven
    assert plain(EvenWeights.of([key])) == {bytes(key): 1}


def test_uneven_weights_behave_like_the_dictionary_from_which_they_were_made() -> None:
    weights = UnevenWeights({TWO: 5, ONE: 0})
    assert (list(weights), len(weights), weights[TWO]) == ([TWO, ONE], 2, 5)
    assert dict(weights) == weights.unpacked() == {ONE: 0, TWO: 5}
    assert weights == {ONE: 0, TWO: 5} == weights
    assert weights != {ONE: 0, TWO: 4}
    assert weights != EvenWeights.of([ONE, TWO])
    assert UnevenWeights({ONE: 1, TWO: 1}) == EvenWeights.of([TWO, ONE])
    assert EvenWeights.of([TWO, ONE]) == UnevenWeights({ONE: 1, TWO: 1})
    assert weights != "weights"
    assert plain(weights) == {ONE: 0, TWO: 5}
    assert repr(weights) == "UnevenWeights({RealServerKey('10.244.0.2:8080'): 5, RealServerKey('10.244.0.1:8080'): 0})"
    with pytest.raises(TypeError):
        hash(weights)


def test_thresholds_are_explained_in_words() -> None:
    assert str(Thresholds(10)) == "connections at most 10"
    assert str(Thresholds(10, 5)) == "connections at most 10, again below 5"


@hypothesis.given(st.lists(st.binary(min_size=3, max_size=3), max_size=5))
def test_joined_byte_strings_of_equal_length_are_split_into_the_original_strings(values: list[bytes]) -> None:
    assert real_servers.pieces(b"".join(values), 3) == values
