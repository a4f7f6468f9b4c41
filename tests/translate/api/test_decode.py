"""Lists, watch lines and manifests that are valid, partly broken, or broken as a whole."""

import contextlib
import json
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies as st

from ipvsproxy.model.service import (
    EndpointSlice,
    EndpointSliceName,
    Gone,
    Node,
    ObjectKey,
    ObjectKind,
    Put,
    Rejected,
    Service,
    ServiceName,
)
from ipvsproxy.translate.api import decode, schema
from ipvsproxy.translate.api.decode import ServerError, UndecodableError
from tests.support import builders
from tests.translate import strategies

SERVICE = {"metadata": {"name": "web", "namespace": "shop"}, "spec": {"clusterIP": "10.96.0.10", "ports": [{"port": 80}]}}
BROKEN = {"metadata": {"name": "bad", "namespace": "shop"}, "spec": {"clusterIP": "10.96.0.11", "ports": [{"port": "http"}]}}
KEY, BROKEN_KEY = ServiceName("shop", "web"), ServiceName("shop", "bad")
REASON, FIELD = "expected int | null, got str", "spec.ports[0].port"
TOO_DEEP = "[" * 100_000


def _list(*items: Any, kind: ObjectKind = ObjectKind.SERVICE, version: str = "") -> decode.ListPage:
    body = {"kind": "List", "metadata": {"resourceVersion": version}, "items": items}
    return decode.decode_list(kind, json.dumps(body).encode())


def _page(body: str) -> decode.ListPage:
    """A list of Services; each question mark in the text is replaced by a byte that is not valid UTF-8."""
    return decode.decode_list(ObjectKind.SERVICE, body.encode().replace(b"?", b"\xff"))


def _line(what: str, item: Any, kind: ObjectKind = ObjectKind.SERVICE) -> decode.WatchLine:
    return decode.decode_watch_line(kind, json.dumps({"type": what, "object": item}).encode())


def test_a_decoded_page_of_a_list_has_the_objects_the_version_and_the_continue_token() -> None:
    body = {"metadata": {"resourceVersion": "77", "continue": "next"}, "items": [SERVICE]}
    page = decode.decode_list(ObjectKind.SERVICE, json.dumps(body).encode())
    (event,) = page.events
    assert isinstance(event, Put)
    assert (event.kind, event.key) == (ObjectKind.SERVICE, KEY)
    assert isinstance(event.object, Service)
    assert event.object.name == ServiceName("shop", "web")
    assert event.object.name is event.key, "a hundred thousand are not named twice"
    assert event.object.cluster_addresses == builders.addresses("10.96.0.10")
    assert (page.resource_version, page.continue_token) == ("77", "next")


def test_an_item_of_a_list_becomes_an_event_only_when_the_item_is_complete() -> None:
    item = json.dumps(SERVICE).encode()
    event = decode.decode_item(ObjectKind.SERVICE, item)
    assert isinstance(event, Put)
    assert event.key == KEY
    assert decode.decode_item(ObjectKind.SERVICE, item[:-1]) is None
    assert decode.decode_item(ObjectKind.SERVICE, json.dumps(BROKEN).encode()) == Rejected(
        ObjectKind.SERVICE, BROKEN_KEY, "", REASON, FIELD
    )


def test_objects_of_each_kind_are_parsed_by_the_schema_of_their_kind() -> None:
    slices = _list({"metadata": {"name": "web-1", "namespace": "shop"}, "addressType": "IPv6"}, kind=ObjectKind.ENDPOINT_SLICE)
    nodes = _list({"metadata": {"name": "node-a"}}, kind=ObjectKind.NODE)
    assert isinstance(slices.events[0], Put)
    assert isinstance(slices.events[0].object, EndpointSlice)
    assert slices.events[0].object.name == EndpointSliceName("shop", "web-1")
    assert isinstance(nodes.events[0], Put)
    assert isinstance(nodes.events[0].object, Node)
    assert nodes.events[0].key == ObjectKey("", "node-a")


def test_one_invalid_object_of_a_list_does_not_affect_the_other_objects() -> None:
    page = _list(SERVICE, BROKEN, {"metadata": {"name": "c"}}, version="77")
    first, second, third = page.events
    assert isinstance(first, Put)
    assert second == Rejected(ObjectKind.SERVICE, BROKEN_KEY, "", REASON, FIELD)
    assert isinstance(third, Put)
    assert third.key == ServiceName("default", "c")
    assert page.resource_version == "77"


@pytest.mark.parametrize("item", [{}, {"metadata": None}, {"metadata": {"name": ""}}])
def test_the_rejection_of_an_object_without_a_name_has_no_key(item: dict[str, Any]) -> None:
    assert _list(item).events == (Rejected(ObjectKind.SERVICE, None, "", "is missing", "metadata.name"),)


def test_an_object_that_is_not_valid_utf8_does_not_affect_the_other_objects() -> None:
    page = _page('{"metadata": {}, "items": [{"metadata": {"name": "a"}}, {"metadata": {"name": "?"}}]}')
    first, second = page.events
    assert isinstance(first, Put)
    assert isinstance(second, Rejected)
    assert (second.key, "can't decode byte 0xff" in second.reason) == (None, True)


def test_the_rejection_of_an_object_with_an_invalid_name_has_no_key() -> None:
    (event,) = _list({"metadata": {"name": ["web"]}}).events
    assert event == Rejected(ObjectKind.SERVICE, None, "", "expected str | null, got array", "metadata.name")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"<html>502</html>",
        b"[]",
        b'{"metadata": {}, "items": {}}',
        b'{"items": []}',
        b'{"metadata": {"resourceVersion": 77}, "items": [{"spec": 1}]}',
        b'{"metadata": {}, "items": [] ',
        f'{{"metadata": {{}}, "items": [], "x": {TOO_DEEP}'.encode(),
        b'{"metadata": {"resourceVersion": "\xff"}, "items": []}',
    ],
)
def test_the_error_about_a_body_that_is_not_a_list_names_the_expected_list(body: bytes) -> None:
    with pytest.raises(UndecodableError, match=r"^list of Services: "):
        decode.decode_list(ObjectKind.SERVICE, body)


@pytest.mark.parametrize("what", ["ADDED", "MODIFIED"])
def test_an_added_or_modified_object_becomes_a_put_event(what: str) -> None:
    line = _line(what, SERVICE | {"metadata": {"name": "web", "namespace": "shop", "resourceVersion": "78"}})
    assert isinstance(line.event, Put)
    assert (line.event.key, line.resource_version) == (KEY, "78")


AT_80 = {"metadata": {"name": "bad", "namespace": "shop", "resourceVersion": "80"}}
NO_OBJECT = "expected object | null, got {}"
NAMELESS = Rejected(ObjectKind.SERVICE, None, "", "is missing", "metadata.name")


@pytest.mark.parametrize(
    ("what", "item", "event", "version"),
    [
        ("DELETED", SERVICE, Gone(ObjectKind.SERVICE, KEY), ""),
        ("DELETED", BROKEN, Gone(ObjectKind.SERVICE, BROKEN_KEY), ""),
        ("DELETED", {"metadata": {}}, NAMELESS, ""),
        (
            "DELETED",
            {"metadata": {}, "spec": 1},
            Rejected(ObjectKind.SERVICE, None, "", "expected object | null, got int", "spec"),
            "",
        ),
        ("BOOKMARK", {"kind": "Service", "metadata": {"resourceVersion": "99", "uid": None}, "spec": {}}, None, "99"),
        ("MODIFIED", BROKEN | AT_80, Rejected(ObjectKind.SERVICE, BROKEN_KEY, "", REASON, FIELD), "80"),
        ("ADDED", {"metadata": "web"}, NAMELESS._replace(reason=NO_OBJECT.format("str"), field="metadata"), ""),
    ],
)
def test_a_line_of_a_watch_becomes_one_event_with_its_resource_version(
    what: str, item: Any, event: Gone | Rejected | None, version: str
) -> None:
    assert _line(what, item) == decode.WatchLine(event, version)


@pytest.mark.parametrize(
    ("status", "event"),
    [
        ({"code": 410, "message": "too old resource version"}, ServerError(410, "too old resource version")),
        ({"code": 500, "message": "etcd is away"}, ServerError(500, "etcd is away")),
        ({"code": 500, "reason": "InternalError"}, ServerError(500, "InternalError")),
        ({}, ServerError(0, "no message")),
        ({"code": 500, "message": "x" * 1000}, ServerError(500, "x" * 500)),
    ],
)
def test_a_server_error_on_a_watch_keeps_the_code_and_at_most_500_characters_of_the_message(
    status: dict[str, Any], event: ServerError
) -> None:
    assert _line("ERROR", {"kind": "Status", "metadata": {}, "status": "Failure"} | status) == decode.WatchLine(event, "")


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"\x00",
        b'{"type": "ADDED"}',
        b'{"object": {}}',
        b'{"type": "SURPRISE", "object": {"metadata": {"name": "web"}}}',
        b'{"type": "SURPRISE", "object": 7}',
        b'{"type": "BOOKMARK", "object": 7}',
        b'{"type": "ERROR", "object": {"code": "410"}}',
        b'{"type": 1, "object": {}}',
        b'{"type": "ADDED", "object": {"metadata": {"name": "we',
        f'{{"type": "ADDED", "object": {TOO_DEEP}'.encode(),
        f'{{"type": "ADDED", "object": {{"spec": 1, "x": {TOO_DEEP}'.encode(),
    ],
)
def test_the_error_names_the_watch_if_a_line_is_not_a_watch_event(line: bytes) -> None:
    with pytest.raises(UndecodableError, match=r"^watch of Services: "):
        decode.decode_watch_line(ObjectKind.SERVICE, line)


def test_the_error_about_an_unknown_watch_event_quotes_only_the_beginning_of_the_event_type() -> None:
    with pytest.raises(UndecodableError, match=r"event type 'S{32}' is not known$"):
        _line("S" * 1000, SERVICE)


MANIFEST = {"apiVersion": "v1", "kind": "Service"} | SERVICE


def test_a_manifest_is_parsed_as_an_object_of_its_kind() -> None:
    assert isinstance(decode.decode_document(MANIFEST, "web.yaml"), Put)
    node = decode.decode_document({"apiVersion": "v1", "kind": "Node", "metadata": {"name": "node-a"}}, "node.yaml")
    assert isinstance(node, Put)
    assert (node.kind, node.key) == (ObjectKind.NODE, ObjectKey("", "node-a"))


def test_an_absent_port_name_in_an_endpoint_slice_manifest_gets_the_default_of_the_api_server() -> None:
    document = {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {"name": "web-1", "labels": {"kubernetes.io/service-name": "web"}},
        "addressType": "IPv4",
        "ports": [{"port": 8080}],
    }
    put = decode.decode_document(document, "web.yaml")
    assert isinstance(put, Put)
    assert isinstance(put.object, EndpointSlice)
    assert (put.key, put.object.ports) == (EndpointSliceName("default", "web-1"), (builders.endpoint_port(8080),))


@pytest.mark.parametrize(
    "head", [{"apiVersion": "v1", "kind": "Pod"}, {"apiVersion": "v1beta1", "kind": "EndpointSlice"}, {"kind": "Service"}, {}]
)
def test_a_manifest_of_another_kind_is_ignored(head: dict[str, str]) -> None:
    assert decode.decode_document(head | {"metadata": {"name": "web"}}, "web.yaml") is None


@pytest.mark.parametrize(
    ("document", "key", "reason", "field"),
    [
        ("web", None, "Expected object, got str", ""),
        (None, None, "Expected object, got null", ""),
        ({"apiVersion": "v1", "kind": "Service", "spec": {}}, None, "is missing", "metadata.name"),
        (MANIFEST | BROKEN, BROKEN_KEY, REASON, FIELD),
        (
            MANIFEST | {"spec": {"ports": [{"port": 80}]}},
            KEY,
            "is missing, and only an API server allots one",
            "spec.clusterIP",
        ),
    ],
)
def test_the_rejection_of_a_manifest_names_the_file_and_the_reason(
    document: Any, key: ObjectKey | None, reason: str, field: str
) -> None:
    assert decode.decode_document(document, "web.yaml") == Rejected(ObjectKind.SERVICE, key, "web.yaml", reason, field)


@pytest.mark.parametrize("spec", [{"type": "ExternalName"}, {"clusterIP": "None"}, {"clusterIPs": ["10.96.0.10"]}])
def test_a_manifest_is_valid_if_only_cluster_ips_has_an_address_or_if_no_address_is_needed(
    spec: dict[str, Any],
) -> None:
    assert isinstance(decode.decode_document(MANIFEST | {"spec": spec}, "web.yaml"), Put)


_BYTES = st.binary(max_size=64) | strategies.JSON.map(lambda value: json.dumps(value).encode())


@hypothesis.given(st.sampled_from(ObjectKind), _BYTES)
def test_decoding_arbitrary_bytes_succeeds_or_raises_undecodable_error(kind: ObjectKind, data: bytes) -> None:
    with contextlib.suppress(UndecodableError):
        decode.decode_list(kind, data)
    with contextlib.suppress(UndecodableError):
        decode.decode_watch_line(kind, data)


@hypothesis.given(strategies.JSON | strategies.documents(schema.ServiceJson).map(lambda document: MANIFEST | document))
def test_any_document_is_decoded_without_an_unexpected_error(document: Any) -> None:
    event = decode.decode_document(document, "web.yaml")
    assert event is None or event.kind is ObjectKind.SERVICE
    assert not isinstance(event, Rejected) or event.reason


@hypothesis.given(st.lists(strategies.documents(schema.ServiceJson) | strategies.JSON, max_size=4))
def test_a_list_yields_one_event_for_each_item_whatever_the_items_contain(items: list[Any]) -> None:
    events = _list(*items).events
    assert len(events) == len(items)
    assert all(isinstance(event, Rejected) or event.key.name for event in events)
