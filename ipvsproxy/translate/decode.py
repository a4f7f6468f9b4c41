"""The API's bytes, to events. msgspec reads them, a list item by item; an object that breaks the shape costs itself only."""

import sys
from collections.abc import Callable, Mapping
from typing import Any, Generic, NamedTuple, TypeVar, assert_never

import msgspec

from ipvsproxy.model.service import ApiObject, EndpointSliceName, Gone, ObjectKey, ObjectKind, Put, Rejected, ServiceName
from ipvsproxy.translate import parse, parse_endpoints, wire

GONE = 410
"""HTTP status, and code of an ERROR event: the resource version is too old, list again."""

_MISSHAPEN = (msgspec.ValidationError, UnicodeDecodeError)
"""What msgspec raises for JSON that is not of the shape, or whose text is not UTF-8: perhaps in one object only."""
_UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""All that msgspec raises for bytes: also those that are no JSON, or nested deeper than the interpreter can follow."""

T = TypeVar("T", wire.ServiceWire, wire.EndpointSliceWire, wire.NodeWire)
K = TypeVar("K", bound=ObjectKey)


class UndecodableError(Exception):
    """The whole of a body or line is unusable; the message says why. The stream must be listed again."""


class ListPage(NamedTuple):
    """One page of a list. An empty ``continue_token`` means that it was the last one."""

    events: tuple[Put | Rejected, ...]
    resource_version: str
    continue_token: str


class Bookmark(NamedTuple):
    """Nothing changed up to this resource version."""


class Expired(NamedTuple):
    """The watch can not go on from where it was: list again."""

    message: str


class ServerError(NamedTuple):
    """The server ended the watch with an error."""

    code: int
    message: str


class WatchLine(NamedTuple):
    """One line of a watch. ``resource_version`` is empty where the line has none."""

    event: Put | Gone | Rejected | Bookmark | Expired | ServerError
    resource_version: str


class _ListMetadata(wire.Wire, frozen=True):
    resource_version: str | None = None
    continue_token: str | None = msgspec.field(name="continue", default=None)


class _Page(wire.Wire, frozen=True):
    metadata: _ListMetadata
    items: list[msgspec.Raw] | None = None


_PAGE = msgspec.json.Decoder(_Page)


class _Line(wire.Wire, Generic[T], frozen=True):
    type: str
    object: T


class _LooseLine(wire.Wire, frozen=True):
    type: str
    object: msgspec.Raw


class _Reader(Generic[T, K]):
    """What is different between the kinds: their shape, what names them, and how they are read."""

    def __init__(self, kind: ObjectKind, shape: type[T], key: type[K], read: Callable[[T, K], ApiObject]) -> None:
        self.kind = kind
        self._key = key
        self.line: msgspec.json.Decoder[_Line[T]] = msgspec.json.Decoder(_Line[shape])  # type: ignore[valid-type]  # made at run time
        self.one: msgspec.json.Decoder[T] = msgspec.json.Decoder(shape)
        self.read: Callable[[T, K], ApiObject] = read

    def key(self, metadata: wire.Metadata | None) -> K | None:
        """What names an object with this metadata. The object has the same one for its name, where it is more than a text."""
        if metadata is None or not metadata.name:
            return None
        return self._key("" if self.kind is ObjectKind.NODE else sys.intern(metadata.namespace or "default"), metadata.name)

    def event(self, raw: T, where: str = "") -> Put | Rejected:
        """The object with its key, or why it can not have one."""
        key = self.key(raw.metadata)
        if key is None:
            return Rejected(self.kind, None, where, "metadata.name is missing")
        return Put(self.kind, key, self.read(raw, key))

    def loose_event(self, raw: msgspec.Raw, where: str = "") -> Put | Rejected:
        """As ``event``, for one object that may break the shape of its kind."""
        try:
            return self.event(self.one.decode(raw), where)
        except _UNREADABLE as error:
            return Rejected(self.kind, _loose_key(self.kind, raw), where, _reason(error))


def _loose_key(kind: ObjectKind, raw: msgspec.Raw) -> ObjectKey | None:
    try:
        return _READERS[kind].key(msgspec.json.decode(raw, type=wire.AnyObject).metadata)
    except _UNREADABLE:
        return None


def _reason(error: Exception) -> str:
    """``spec.ports[0].port: expected int, got str`` from msgspec's wording."""
    text, _, path = str(error).partition(" - at `$")
    field = path.rstrip("`").lstrip(".")
    text = text.replace("`", "").rstrip(".")
    return f"{field}: {text[:1].lower()}{text[1:]}" if field else text


_READERS: Mapping[ObjectKind, _Reader[Any, Any]] = {
    ObjectKind.SERVICE: _Reader(ObjectKind.SERVICE, wire.ServiceWire, ServiceName, parse.parse_service),
    ObjectKind.ENDPOINT_SLICE: _Reader(
        ObjectKind.ENDPOINT_SLICE, wire.EndpointSliceWire, EndpointSliceName, parse_endpoints.parse_endpoint_slice
    ),
    ObjectKind.NODE: _Reader(ObjectKind.NODE, wire.NodeWire, ObjectKey, lambda raw, key: parse.parse_node(raw, key.name)),
}


def decode_list(kind: ObjectKind, body: bytes) -> ListPage:
    """One page of a list of this kind.

    Raises:
        UndecodableError: the body is not a list at all. One bad item in it is a ``Rejected`` instead.
    """
    try:
        page = _PAGE.decode(body)
    except _UNREADABLE as error:
        raise UndecodableError(f"list of {kind}s: {_reason(error)}") from error
    # One by one, though that passes over all of it first: what is made of five hundred at once does not stay in near caches.
    events = tuple(map(_READERS[kind].loose_event, page.items or ()))
    return ListPage(events, page.metadata.resource_version or "", page.metadata.continue_token or "")


def decode_item(kind: ObjectKind, item: bytes) -> Put | Rejected | None:
    """One item of a list by itself; None where the bytes are not a whole JSON value, as when they were cut in the middle."""
    reader = _READERS[kind]
    try:
        return reader.event(reader.one.decode(item))
    except _UNREADABLE:
        return reader.loose_event(msgspec.Raw(item)) if _is_whole(item) else None


def _is_whole(text: bytes) -> bool:
    try:
        msgspec.json.decode(text, type=msgspec.Raw)
    except _UNREADABLE:
        return False
    return True


def decode_watch_line(kind: ObjectKind, line: bytes) -> WatchLine:
    """One line of a watch of this kind.

    Raises:
        UndecodableError: the line is not a watch event. A bad object in it is a ``Rejected`` instead.
    """
    reader = _READERS[kind]
    try:
        decoded = reader.line.decode(line)
        raw, what = decoded.object, decoded.type
    except _MISSHAPEN:
        return _loose_line(kind, line)
    except _UNREADABLE as error:
        raise UndecodableError(f"watch of {kind}s: {_reason(error)}") from error
    version = (raw.metadata and raw.metadata.resource_version) or ""
    if what in {"ADDED", "MODIFIED"}:
        return WatchLine(reader.event(raw), version)
    if what == "DELETED":
        key = reader.key(raw.metadata)
        return WatchLine(Gone(kind, key) if key else Rejected(kind, None, "", "metadata.name is missing"), version)
    if what == "BOOKMARK":
        return WatchLine(Bookmark(), version)
    return _loose_line(kind, line)


def _loose_line(kind: ObjectKind, line: bytes) -> WatchLine:
    try:
        decoded = msgspec.json.decode(line, type=_LooseLine)
    except _UNREADABLE as error:
        raise UndecodableError(f"watch of {kind}s: {_reason(error)}") from error
    if decoded.type == "ERROR":
        try:
            status = msgspec.json.decode(decoded.object, type=wire.Status)
        except _UNREADABLE as error:
            raise UndecodableError(f"watch of {kind}s: {_reason(error)}") from error
        message = (status.message or status.reason or "no message")[:500]
        return WatchLine(Expired(message) if status.code == GONE else ServerError(status.code or 0, message), "")
    try:
        metadata = msgspec.json.decode(decoded.object, type=wire.AnyObject).metadata
    except _UNREADABLE:
        metadata = None
    version = (metadata and metadata.resource_version) or ""
    key = _READERS[kind].key(metadata)
    if decoded.type == "DELETED" and key:
        return WatchLine(Gone(kind, key), version)
    if decoded.type not in {"ADDED", "MODIFIED", "DELETED"}:
        raise UndecodableError(f"watch of {kind}s: event type {decoded.type[:32]!r} is not known")
    return WatchLine(_READERS[kind].loose_event(decoded.object), version)


_MANIFESTS: Mapping[tuple[str, str], ObjectKind] = {
    ("v1", "Service"): ObjectKind.SERVICE,
    ("discovery.k8s.io/v1", "EndpointSlice"): ObjectKind.ENDPOINT_SLICE,
    ("v1", "Node"): ObjectKind.NODE,
}


def decode_document(document: object, where: str) -> Put | Rejected | None:
    """One manifest that has been read from YAML or JSON already; None when it is of a kind that is not ours.

    ``where`` names file and document for the reader of a ``Rejected``. What an API server would fill in is filled in: the
    namespace ``default``, the protocol TCP, the empty name of a single endpoint port, the session affinity timeout.
    """
    try:
        head = msgspec.convert(document, wire.AnyObject)
    except _UNREADABLE as error:
        return Rejected(ObjectKind.SERVICE, None, where, _reason(error))
    kind = _MANIFESTS.get((head.api_version or "", head.kind or ""))
    if kind is None:
        return None
    key = _READERS[kind].key(head.metadata)
    if key is None:
        return Rejected(kind, None, where, "metadata.name is missing")
    try:
        return _manifest(kind, document, key, where)
    except _UNREADABLE as error:
        return Rejected(kind, key, where, _reason(error))


def _manifest(kind: ObjectKind, document: object, key: ObjectKey, where: str) -> Put | Rejected:
    match kind:
        case ObjectKind.SERVICE:
            return _manifest_service(msgspec.convert(document, wire.ServiceWire), key, where)
        case ObjectKind.ENDPOINT_SLICE:
            raw = msgspec.convert(document, wire.EndpointSliceWire)
            name = EndpointSliceName(key.namespace, key.name)
            return Put(kind, key, parse_endpoints.parse_endpoint_slice(raw, name, default_port_names=True))
        case ObjectKind.NODE:
            return Put(kind, key, parse.parse_node(msgspec.convert(document, wire.NodeWire), key.name))
        case never:
            assert_never(never)


def _manifest_service(raw: wire.ServiceWire, key: ObjectKey, where: str) -> Put | Rejected:
    service = parse.parse_service(raw, ServiceName(key.namespace, key.name))
    spec = raw.spec or wire.ServiceSpec()
    if spec.type != "ExternalName" and not spec.cluster_ip and not spec.cluster_ips:
        reason = "spec.clusterIP: is missing, and without an API server nobody allots one"
        return Rejected(ObjectKind.SERVICE, key, where, reason)
    return Put(ObjectKind.SERVICE, key, service)
