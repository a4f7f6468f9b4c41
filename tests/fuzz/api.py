"""Fuzz target ``decoder``: decodes pages of lists and watch lines, and translates the objects in them."""

import json
from collections.abc import Iterable

from ipvsproxy.model.annotations import Annotation
from ipvsproxy.model.service import (
    MOST_SKIPPED,
    Endpoint,
    EndpointSlice,
    Event,
    Node,
    ObjectKind,
    Put,
    Rejected,
    Service,
    Skipped,
)
from ipvsproxy.store.objects import Store
from ipvsproxy.translate.api import decode, fields, parse
from ipvsproxy.translate.translation_settings import Settings
from tests.fuzz import documents
from tests.fuzz.chooser import Chooser
from tests.support import builders

MOST_REASONS = 2 * (MOST_SKIPPED + 1) + len(Annotation) + 4
"""The largest number of reasons (``Skipped``) that the translation of one Service may report. The reasons are about parsing,
refused addresses, annotations, disabled external IPs, two IP families that are not served, and weights."""
LONGEST_REASON = 600
"""The largest allowed number of characters in a reason. This limit prevents an object from filling the log."""
_KINDS = tuple(ObjectKind)
_TYPES = ("ADDED", "MODIFIED", "DELETED", "BOOKMARK", "ERROR")
_SETTINGS = Settings()
_VIEW = builders.node_view()


def decoder(data: bytes) -> None:
    """Decodes a page of a list, or a watch line. The decoded bytes are either raw, or built from objects.

    The decoder may raise only ``UndecodableError``.
    """
    chooser = Chooser(data)
    kind, is_page, is_made = chooser.one(_KINDS), chooser.chance(2), chooser.chance(2)
    if not is_made:
        body = chooser.rest()
    elif is_page:
        items = [documents.document(chooser, kind) for _ in range(chooser.integer(0, 3))]
        body = json.dumps({"metadata": {"resourceVersion": "1"}, "items": items}).encode()
    else:
        body = json.dumps({"type": chooser.text(_TYPES), "object": documents.document(chooser, kind)}).encode()
    try:
        if is_page:
            events: Iterable[Event] = decode.decode_list(kind, body).events
        else:
            event = decode.decode_watch_line(kind, body).event
            events = [event] if isinstance(event, Event) else []
    except decode.UndecodableError as error:
        _check_reason(str(error))
        return
    check(list(events))


def check(events: list[Event]) -> None:
    """Check that all values are within their bounds, and that store and translation accept the objects."""
    store = Store(0)
    store.deliver(events, 0)
    for event in events:
        match event:
            case Put(object=item):
                assert len(item.skipped) <= MOST_SKIPPED + 1
                _check_skipped(item.skipped)
                _check_object(item)
            case Rejected(reason=reason):
                _check_reason(reason)
            case _:
                pass
    for name, service in store.services.items():
        translated = builders.translate(service, store.slices_of(name), _VIEW, _SETTINGS)
        assert len(translated.rare.skipped) <= MOST_REASONS
        _check_skipped(translated.rare.skipped)


def _check_object(item: Service | EndpointSlice | Node) -> None:
    match item:
        case Service():
            assert all(0 < port.port <= fields.HIGHEST_PORT and 0 <= port.node_port <= fields.HIGHEST_PORT for port in item.ports)
            assert 0 <= item.options.affinity_timeout_s <= parse.LONGEST_AFFINITY_TIMEOUT_S
            assert 0 <= item.options.health_check_node_port <= fields.HIGHEST_PORT
            assert item.created_s >= 0
        case EndpointSlice():
            assert all(0 < port.port <= fields.HIGHEST_PORT for port in item.ports)
            assert all(isinstance(one, Endpoint) and one.address.family is item.family for one in item.endpoints)
            assert len(item.endpoints) <= parse.MOST_ENDPOINTS
        case Node():
            assert all(0 <= one.prefix_length <= one.family.bits for one in item.pod_networks)


def _check_skipped(skipped: tuple[Skipped, ...]) -> None:
    for one in skipped:
        _check_reason(str(one))


def _check_reason(text: str) -> None:
    assert len(text) <= LONGEST_REASON
    text.encode()  # a text that cannot be encoded as UTF-8 cannot be logged
