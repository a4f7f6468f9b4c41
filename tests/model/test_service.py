"""Names and reasons in log lines, the limit on the number of reasons, endpoints of an EndpointSlice, and the order of owners."""

import pytest

from ipvsproxy.model.net import Family
from ipvsproxy.model.service import (
    MOST_SKIPPED,
    NODE_OWNER,
    EndpointSlice,
    EndpointSliceName,
    ObjectKey,
    Owner,
    ServiceName,
    Skipped,
    bounded,
)
from tests.support import builders

NAME = ServiceName("shop", "web")


@pytest.mark.parametrize(
    ("item", "text"),
    [
        (NAME, "shop/web"),
        (EndpointSliceName("shop", "web-1"), "shop/web-1"),
        (ObjectKey("shop", "web"), "shop/web"),
        (ObjectKey("", "node-a"), "node-a"),
        (Skipped("spec.ports[0].port", "0 is outside 1..65535"), "spec.ports[0].port: 0 is outside 1..65535"),
        (Skipped("", "is not wanted"), "is not wanted"),
    ],
)
def test_names_and_reasons_have_the_text_that_log_lines_show(item: object, text: str) -> None:
    assert str(item) == text


@pytest.mark.parametrize("count", [0, 1, MOST_SKIPPED])
def test_each_skipped_part_is_listed_if_the_number_of_parts_does_not_exceed_the_limit(count: int) -> None:
    parts = [Skipped(f"parts[{number}]", "is wrong") for number in range(count)]
    assert bounded(parts) == tuple(parts)


@pytest.mark.parametrize("beyond", [1, 1000])
def test_skipped_parts_beyond_the_limit_are_only_counted(beyond: int) -> None:
    parts = [Skipped(f"parts[{number}]", "is wrong") for number in range(MOST_SKIPPED + beyond)]
    *first, last = bounded(parts)
    assert first == parts[:MOST_SKIPPED]
    assert last == Skipped("parts[20]", f"is wrong; {beyond} such parts from here on")


def test_a_summary_of_skipped_parts_counts_as_invalid_if_any_of_the_parts_is_invalid() -> None:
    parts_shown = bounded([Skipped("labels", "not ours", invalid=False)] * 21)
    assert not parts_shown[-1].invalid
    assert bounded([*parts_shown[:-1], Skipped("a", "not ours", invalid=False), Skipped("b", "wrong")])[-1].invalid


def test_names_of_objects_of_different_kinds_are_never_equal() -> None:
    names = {kind("shop", "web") for kind in (ObjectKey, ServiceName, EndpointSliceName) for _ in range(2)}
    assert len(names) == 3


@pytest.mark.parametrize("texts", [("10.244.0.1", "10.244.0.2"), ("fd00::1", "fd00::2"), ()])
def test_the_endpoints_of_an_endpoint_slice_keep_their_addresses_and_conditions(texts: tuple[str, ...]) -> None:
    makers = (builders.endpoint, builders.draining)
    endpoints = tuple(make(text) for make, text in zip(makers, texts, strict=False))
    assert builders.endpoint_slice(*endpoints).endpoints == endpoints


def test_an_endpoint_slice_without_an_address_family_has_no_endpoints() -> None:
    assert EndpointSlice(name=EndpointSliceName("shop", "web-1"), service=NAME, family=None).endpoints == ()


def test_endpoint_slices_with_different_addresses_or_conditions_are_not_equal() -> None:
    first, other, gone = builders.endpoint("10.0.0.1"), builders.endpoint("10.0.0.2"), builders.draining("10.0.0.1")
    assert len({builders.endpoint_slice(one, family=Family.IPV4) for one in (first, other, gone, first)}) == 3


def test_the_node_comes_first_when_owners_are_sorted_by_age_and_then_by_name() -> None:
    older, younger, namesake = (Owner(age, ServiceName(*name)) for age, name in ((1, "bb"), (2, "aa"), (2, "ab")))
    assert sorted([namesake, younger, older, NODE_OWNER]) == [NODE_OWNER, older, younger, namesake]
    assert older.service == ServiceName("b", "b")
