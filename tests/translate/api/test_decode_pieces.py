"""Lists that arrive in fragments: the result is the same as for the whole list.

Unlike decoding a whole list, decoding fragments needs memory for only a few items.
"""

import json
import tracemalloc
from collections.abc import Iterator
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest

from ipvsproxy.model.service import ObjectKind, Put, Rejected
from ipvsproxy.translate.api import decode
from ipvsproxy.translate.api.decode import ListReader
from tests.translate import strategies


def compact(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))


def service(name: str, **more: Any) -> dict[str, Any]:
    return {"metadata": {"name": name, "namespace": "shop", **more}, "spec": {"clusterIP": "10.96.0.10"}}


def body_of(*items: object, metadata: object = None) -> bytes:
    head = {"kind": "ServiceList", "apiVersion": "v1", "metadata": metadata or {"resourceVersion": "77", "continue": "next"}}
    return compact({**head, "items": list(items)}).encode()


def pieces_of(body: bytes, size: int) -> Iterator[bytes]:
    return (body[begin : begin + size] for begin in range(0, len(body), size))


def read(pieces: Iterator[bytes], kind: ObjectKind = ObjectKind.SERVICE) -> tuple[list[Put | Rejected], decode.ListPage]:
    """The events that the reader returns while pieces arrive, and the page that it returns at the end of the list."""
    reader = ListReader(kind)
    events = [event for piece in pieces for event in reader.feed(piece)]
    return events, reader.finish()


def names(events: list[Put | Rejected] | tuple[Put | Rejected, ...]) -> list[str | None]:
    return [event.key.name if event.key else None for event in events]


@pytest.mark.parametrize("size", [1, 7, 100, 10_000])
def test_all_items_but_the_last_are_returned_before_the_end_of_the_list(size: int) -> None:
    early, page = read(pieces_of(body_of(service("a"), service("b"), service("c")), size))
    assert (names(early), names(page.events)) == (["a", "b"], ["c"])
    assert (page.resource_version, page.continue_token) == ("77", "next")


def test_the_resource_version_of_a_list_is_known_when_the_first_item_is_returned() -> None:
    reader = ListReader(ObjectKind.SERVICE)
    pieces = pieces_of(body_of(service("a"), service("b")), 1)
    assert names(next(events for piece in pieces if (events := reader.feed(piece)))) == ["a"]
    assert reader.resource_version == "77"


@pytest.mark.parametrize("text", ['},{"metadata":', '"items":[{"metadata":', "]}", '\\"},{\\"metadata\\":', "\\"])
def test_a_json_string_that_looks_like_the_end_of_an_item_does_not_end_the_item(text: str) -> None:
    items = [service("a", annotations={text: text}), service("b", annotations={"x": text}), service("c")]
    early, page = read(pieces_of(body_of(*items, metadata={"resourceVersion": text}), 5))
    assert (names(early), names(page.events), page.resource_version) == (["a", "b"], ["c"], text)


def test_the_rest_of_a_list_is_decoded_in_one_piece_if_objects_inside_an_item_look_like_items(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tried: list[bytes] = []
    whole = decode.decode_item
    monkeypatch.setattr(decode, "decode_item", lambda kind, item: tried.append(item) or whole(kind, item))  # type: ignore[func-returns-value]
    inner: dict[str, Any] = {
        "managedFields": [{"metadata": {"name": "x"}}] * 1000,
        "z": [{"items": [{"metadata": 1}]}],
    }
    early, page = read(pieces_of(body_of(service("a"), service("b", **inner), service("c")), 5000))
    assert (names(early), names(page.events)) == (["a"], ["b", "c"])
    assert len(tried) == 2


def test_a_list_that_cannot_be_split_into_items_is_not_decoded_again_for_each_fragment(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[bytes] = []
    whole = decode.decode_list
    monkeypatch.setattr(decode, "decode_list", lambda kind, body: tried.append(body) or whole(kind, body))  # type: ignore[func-returns-value]
    monkeypatch.setattr(decode, "decode_item", lambda kind, item: pytest.fail(f"{kind} {item!r}"))
    body = b'{"x":{"items":[{"metadata":{}}]},' + body_of(service("a"), service("b"))[1:]
    assert names(read(pieces_of(body, 10))[1].events) == ["a", "b"]
    assert len(tried) == 2


@pytest.mark.parametrize(
    "body",
    [
        b'{"metadata":{"resourceVersion":"77"},"items":[]}',
        b'{"metadata":{"resourceVersion":"77"},"items":null}',
        b'{"metadata":{"resourceVersion":"77"}}',
        b'{"items":[],"metadata":{"resourceVersion":"77"}}',
    ],
)
@pytest.mark.parametrize("size", [1, 1000])
def test_a_list_without_items_still_has_a_resource_version(body: bytes, size: int) -> None:
    assert read(pieces_of(body, size)) == ([], decode.ListPage((), "77", ""))


@pytest.mark.parametrize(
    "body",
    [
        json.dumps(json.loads(body_of(service("a"), service("b"))), indent=2).encode(),
        compact({"items": [service("a"), service("b")], "metadata": {"resourceVersion": "77", "continue": "next"}}).encode(),
        b'{"x":{"items":[{"metadata":{}}]},' + body_of(service("a"), service("b"))[1:],
        b'{"x":"' + b"-" * decode.MOST_BYTES_BEFORE_ITEMS + b'",' + body_of(service("a"), service("b"))[1:],
    ],
    ids=["with spaces", "metadata behind the items", "other items before", "much before the items"],
)
def test_a_list_is_read_as_a_whole_if_its_format_differs_from_that_of_an_api_server(body: bytes) -> None:
    early, page = read(pieces_of(body, 4096))
    assert (names(early), names(page.events)) == ([], ["a", "b"])
    assert (page.resource_version, page.continue_token) == ("77", "next")


@pytest.mark.parametrize("cut", [1, 40, 120, 260, -1, -2])
def test_an_answer_that_ends_too_early_is_an_error_whatever_items_came_before(cut: int) -> None:
    reader = ListReader(ObjectKind.SERVICE)
    reader.feed(body_of(service("a"), service("b"), service("c"))[:cut])
    with pytest.raises(decode.UndecodableError, match=r"^list of Services: "):
        reader.finish()


@pytest.mark.parametrize("garbage", [b"", b"<html>502</html>", b'{"kind":"Status","code":500}', b"]}", b'{"items":[{"metadata":'])
def test_a_body_that_is_not_a_list_is_an_error(garbage: bytes) -> None:
    reader = ListReader(ObjectKind.SERVICE)
    assert reader.feed(garbage) == []
    with pytest.raises(decode.UndecodableError, match=r"^list of Services: "):
        reader.finish()


def test_invalid_json_in_an_item_is_an_error_but_earlier_items_stay_valid() -> None:
    body = body_of(service("a"), service("b"), service("c")).replace(b'"b"', b'b"')
    reader = ListReader(ObjectKind.SERVICE)
    assert names(reader.feed(body)) == ["a"]
    with pytest.raises(decode.UndecodableError):
        reader.finish()


def test_a_long_list_is_read_without_keeping_all_its_items_in_memory() -> None:
    head, item = body_of(service("a"))[:-2], b"," + compact(service("a", annotations={"x": "y" * 4000})).encode()
    reader = ListReader(ObjectKind.SERVICE)
    reader.feed(head)
    tracemalloc.start()
    try:
        for _ in range(2000):
            reader.feed(item)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 20 * len(item)


@hypothesis.given(
    st.sampled_from(ObjectKind), st.lists(strategies.JSON | st.builds(service, st.text()), max_size=5), st.integers(1, 200)
)
def test_each_item_becomes_one_event_whether_the_list_arrives_whole_or_in_fragments(
    kind: ObjectKind, items: list[Any], size: int
) -> None:
    body = body_of(*items)
    early, page = read(pieces_of(body, size), kind)
    assert (*early, *page.events) == decode.decode_list(kind, body).events
