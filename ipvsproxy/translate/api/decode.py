"""Decodes bytes from the API to events, with msgspec. An object is rejected only if the object breaks the schema of its kind."""

import re
import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import msgspec

from ipvsproxy.model.service import ApiObject, EndpointSliceName, Gone, ObjectKey, ObjectKind, Put, Rejected, ServiceName, Skipped
from ipvsproxy.translate.api import parse, schema

UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""All errors that msgspec raises while it decodes bytes. Possible causes include bytes that are not JSON, and JSON that is nested
too deeply for the interpreter."""


class UndecodableError(Exception):
    """Raised if a whole body or a whole line cannot be decoded; the message gives the reason.

    After this error, all objects of the kind must be listed again.
    """


class ListPage(NamedTuple):
    """One page of a list. An empty ``continue_token`` means that the page is the last page."""

    events: tuple[Put | Rejected, ...]
    resource_version: str
    continue_token: str


class ServerError(NamedTuple):
    """The server ended the watch by sending an error."""

    code: int
    message: str


class WatchLine(NamedTuple):
    """One line of a watch. ``resource_version`` is empty if the line contains no resource version."""

    event: Put | Gone | Rejected | ServerError | None
    resource_version: str


class _ListMetadata(schema.Schema, frozen=True):
    resource_version: str | None = None
    continue_token: str | None = msgspec.field(name="continue", default=None)


class Page(schema.Schema, frozen=True):
    """One page of a list in the form in which the API writes it."""

    metadata: _ListMetadata
    items: list[msgspec.Raw] | None = None


_PAGE = msgspec.json.Decoder(Page)


class _Line(schema.Schema, frozen=True):
    type: str
    object: msgspec.Raw


_LINE = msgspec.json.Decoder(_Line)


class _Reader:
    """Decodes API objects of one kind; the schema, the key and the parser depend on the kind."""

    def __init__(self, kind: ObjectKind, shape: type, key: type[ObjectKey], read: Callable[[Any, Any], ApiObject]) -> None:
        self.kind, self.shape, self._key, self.read = kind, shape, key, read
        self.one: msgspec.json.Decoder[Any] = msgspec.json.Decoder(shape)

    def key(self, metadata: schema.Metadata | None) -> ObjectKey | None:
        """The key of the object that has the given metadata; None if the metadata contain no name.

        A parsed Service or EndpointSlice uses this key as its name.
        """
        if metadata is None or not metadata.name:
            return None
        return self._key("" if self.kind is ObjectKind.NODE else sys.intern(metadata.namespace or "default"), metadata.name)

    def event(self, raw: Any) -> Put | Rejected:
        """The parsed object with its key, or a ``Rejected`` if the object has no name."""
        key = self.key(raw.metadata)
        if key is None:
            return Rejected(self.kind, None, "", "is missing", "metadata.name")
        return Put(self.kind, key, self.read(raw, key))

    def loose_event(self, raw: msgspec.Raw) -> tuple[Put | Rejected, schema.Metadata | None]:
        """Does the same as ``event`` for an object that may break the schema of its kind.

        The object's metadata are also returned, as far as they can be read.
        """
        try:
            decoded = self.one.decode(raw)
            return self.event(decoded), decoded.metadata
        except UNREADABLE as error:
            metadata = _metadata(raw)
            return _rejected(self.kind, self.key(metadata), "", error), metadata


def _metadata(raw: msgspec.Raw) -> schema.Metadata | None:
    """The metadata of an object that may break the schema of its kind; None if even the metadata cannot be read."""
    try:
        return msgspec.json.decode(raw, type=schema.AnyObject).metadata
    except UNREADABLE:
        return None


def _why(error: Exception) -> Skipped:
    """The field and the problem in msgspec's message, for example ``spec.ports[0].port`` and ``expected int, got str``."""
    text, _, path = str(error).partition(" - at `$")
    field = path.rstrip("`").lstrip(".")
    text = text.replace("`", "").rstrip(".")
    return Skipped(field, f"{text[:1].lower()}{text[1:]}" if field else text)


def _rejected(kind: ObjectKind, key: ObjectKey | None, where: str, error: Exception) -> Rejected:
    why = _why(error)
    return Rejected(kind, key, where, why.reason, why.field)


_READERS: Mapping[ObjectKind, _Reader] = {
    ObjectKind.SERVICE: _Reader(ObjectKind.SERVICE, schema.ServiceJson, ServiceName, parse.parse_service),
    ObjectKind.ENDPOINT_SLICE: _Reader(
        ObjectKind.ENDPOINT_SLICE, schema.EndpointSliceJson, EndpointSliceName, parse.parse_endpoint_slice
    ),
    ObjectKind.NODE: _Reader(ObjectKind.NODE, schema.NodeJson, ObjectKey, lambda raw, key: parse.parse_node(raw, key.name)),
}


def read_page(kind: ObjectKind, body: bytes) -> Page:
    """One page of a list; the items of the page are still unparsed JSON.

    Raises:
        UndecodableError: the body is not a list.
    """
    try:
        return _PAGE.decode(body)
    except UNREADABLE as error:
        raise UndecodableError(f"list of {kind}s: {_why(error)}") from error


def decode_list(kind: ObjectKind, body: bytes) -> ListPage:
    """One page of a list of the given kind.

    Raises:
        UndecodableError: the body is not a list. Each invalid item is represented by a ``Rejected`` in the page.
    """
    page = read_page(kind, body)
    # Items are parsed one at a time, because the values of five hundred items at once would not fit into the processor's fast
    # caches.
    events = tuple(_READERS[kind].loose_event(item)[0] for item in page.items or ())
    return ListPage(events, page.metadata.resource_version or "", page.metadata.continue_token or "")


def decode_item(kind: ObjectKind, item: bytes) -> Put | Rejected | None:
    """One item of a list, decoded separately.

    A result of None means that the bytes are not a complete JSON value, for example because they end in the middle of the value.
    """
    try:
        return _READERS[kind].loose_event(msgspec.json.decode(item, type=msgspec.Raw))[0]
    except UNREADABLE:
        return None


def decode_watch_line(kind: ObjectKind, line: bytes) -> WatchLine:
    """One line of a watch of the given kind.

    Raises:
        UndecodableError: the line is not a watch event. An invalid object is represented by a ``Rejected`` in the line.
    """
    try:
        decoded = _LINE.decode(line)
        status = msgspec.json.decode(decoded.object, type=schema.StatusJson) if decoded.type == "ERROR" else None
    except UNREADABLE as error:
        raise UndecodableError(f"watch of {kind}s: {_why(error)}") from error
    if status:
        message = (status.message or status.reason or "no message")[:500]
        return WatchLine(ServerError(status.code or 0, message), "")
    reader = _READERS[kind]
    event, metadata = reader.loose_event(decoded.object)
    version = (metadata and metadata.resource_version) or ""
    if decoded.type == "BOOKMARK" and metadata:
        return WatchLine(None, version)
    if decoded.type not in {"ADDED", "MODIFIED", "DELETED"}:
        raise UndecodableError(f"watch of {kind}s: event type {decoded.type[:32]!r} is not known")
    if decoded.type == "DELETED" and (key := reader.key(metadata)):
        return WatchLine(Gone(kind, key), version)
    return WatchLine(event, version)


_MANIFESTS: Mapping[tuple[str, str], ObjectKind] = {
    ("v1", "Service"): ObjectKind.SERVICE,
    ("discovery.k8s.io/v1", "EndpointSlice"): ObjectKind.ENDPOINT_SLICE,
    ("v1", "Node"): ObjectKind.NODE,
}


def decode_document(document: object, where: str) -> Put | Rejected | None:
    """One manifest that has already been read from YAML or JSON; None if ipvsproxy does not watch its kind.

    ``where`` names the file and the YAML document in it, so that people can find the Kubernetes object of a ``Rejected``. Absent
    fields (namespace, protocol, name of a single endpoint port, session affinity timeout) get the default values of the API
    server.
    """
    try:
        head = msgspec.convert(document, schema.AnyObject)
    except UNREADABLE as error:
        return _rejected(ObjectKind.SERVICE, None, where, error)
    kind = _MANIFESTS.get((head.api_version or "", head.kind or ""))
    if kind is None:
        return None
    key = _READERS[kind].key(head.metadata)
    if key is None:
        return Rejected(kind, None, where, "is missing", "metadata.name")
    try:
        return _manifest(kind, msgspec.convert(document, _READERS[kind].shape), key, where)
    except UNREADABLE as error:
        return _rejected(kind, key, where, error)


def _manifest(kind: ObjectKind, raw: Any, key: Any, where: str) -> Put | Rejected:
    match raw:
        case schema.EndpointSliceJson():
            return Put(kind, key, parse.parse_endpoint_slice(raw, key, default_port_names=True))
        case schema.ServiceJson(spec=schema.ServiceSpec(type="ExternalName")):
            pass
        case schema.ServiceJson(spec=spec) if spec is None or not (spec.cluster_ip or spec.cluster_ips):
            return Rejected(kind, key, where, "is missing, and only an API server allots one", "spec.clusterIP")
    return Put(kind, key, _READERS[kind].read(raw, key))


MOST_BYTES_BEFORE_ITEMS = 1 << 16
"""The items of a list must begin within this number of bytes; otherwise, the list is parsed as a whole. An API
server writes only ``kind``, ``apiVersion`` and ``metadata`` before the items."""

_BEFORE_ITEMS = re.compile(rb'"items":\[')
_BEGINNING = re.compile(rb'\{"[^"\\]{1,64}":')


class ListReader:
    """Decodes a list while it arrives, item by item.

    The needed memory depends on the size of an item and not on the size of the list. Call ``feed`` with each fragment of the
    answer, in the order of the fragments, and then call ``finish``.

    An API server writes a list without spaces, and all items begin with the same bytes (``{"metadata":`` in k8s.io/api). The
    bytes between two items, ``},{"metadata":``, cannot occur inside a JSON string, because quotation marks are escaped in
    strings. The same bytes may occur between nested objects, but then the bytes since the beginning of the item are not a
    complete JSON value. A list that cannot be split at these bytes is stored, and parsed as a whole at the end, with the same
    result.
    """

    def __init__(self, kind: ObjectKind) -> None:
        self.resource_version = ""
        """The resource version of the list, which is known before ``feed`` returns an item."""
        self._kind = kind
        self._buffer = bytearray()
        self._before_items = b""
        self._end_of_item = b""  # Empty until the first item has begun.
        self._searched = 0  # The search for the end of an item continues at this position of the buffer.
        self._is_in_one_piece = False

    def feed(self, piece: bytes) -> list[Put | Rejected]:
        """The items that are complete after the arrival of a fragment.

        An item that breaks the schema of its kind is returned as a ``Rejected``.
        """
        self._buffer += piece
        if self._is_in_one_piece or not (self._end_of_item or self._begin()):
            return []
        events: list[Put | Rejected] = []
        begin = 0
        while (end := self._buffer.find(self._end_of_item, self._searched)) >= 0:
            self._searched = end + 1
            event = decode_item(self._kind, bytes(self._buffer[begin : end + 1]))
            if event is None:
                self._is_in_one_piece = True
                break
            events.append(event)
            begin = self._searched = end + 2
        else:
            self._searched = max(begin, len(self._buffer) - len(self._end_of_item) + 1)
        del self._buffer[:begin]
        self._searched -= begin
        return events

    def finish(self) -> ListPage:
        """The remaining items, with the resource version and the continue token of the list.

        Raises:
            UndecodableError: the answer was not a list, or the answer ended before the list was complete. After an error, the
                items that ``feed`` has returned remain valid.
        """
        return decode_list(self._kind, self._before_items + self._buffer)

    def _begin(self) -> bool:
        """Remove the bytes before the first item from the buffer; returns False if the first item was not found."""
        before_items = _BEFORE_ITEMS.search(self._buffer, 0, MOST_BYTES_BEFORE_ITEMS)
        item = _BEGINNING.match(self._buffer, before_items.end()) if before_items else None
        if before_items is None or item is None:
            self._is_in_one_piece = len(self._buffer) > MOST_BYTES_BEFORE_ITEMS
            return False
        before = bytes(self._buffer[: before_items.end()])
        try:
            self.resource_version = decode_list(self._kind, before + b"]}").resource_version
        except UndecodableError:
            # The found items belong to a nested list, or the metadata of the list come after its items.
            self._is_in_one_piece = True
            return False
        self._before_items = before
        self._end_of_item = b"}," + item[0]
        del self._buffer[: before_items.end()]
        return True
