"""Finds the pods behind the endpoints of EndpointSlices, for messages to people.

The proxy itself does not need the names of pods, so the module ``parse`` omits them.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import msgspec

from ipvsproxy.model.net import parse_address
from ipvsproxy.model.real_servers import RealServerKey
from ipvsproxy.model.service import ObjectKind, ServiceName
from ipvsproxy.translate.api import fields, schema
from ipvsproxy.translate.api.decode import UNREADABLE, read_page
from ipvsproxy.translate.api.parse import SERVICE_NAME_LABEL


class Target(NamedTuple):
    """The pod or other object that an endpoint represents.

    ``name`` is ``namespace/name`` of a pod; for an object of another kind, the kind precedes the name. A field is empty if the
    EndpointSlice does not have the field.
    """

    name: str
    node: str


Targets = Mapping[tuple[ServiceName, RealServerKey], Target]
"""The target of each endpoint; the key is the Service, and the address and port of the endpoint."""


class _Reference(schema.Schema, frozen=True):
    kind: str | None = None
    namespace: str | None = None
    name: str | None = None


class _Endpoint(schema.EndpointJson, frozen=True):
    target_ref: _Reference | None = None


class _Slice(schema.EndpointSliceJson, frozen=True):
    endpoints: tuple[_Endpoint, ...] | None = None


def of_list(body: bytes) -> Targets:
    """The targets of the endpoints in a list of EndpointSlices. An item that breaks the schema gets no targets.

    Raises:
        UndecodableError: the body is not a list.
    """
    items = read_page(ObjectKind.ENDPOINT_SLICE, body).items
    return _targets(lambda item: msgspec.json.decode(item, type=_Slice), items or ())


def of_documents(documents: Iterable[object]) -> Targets:
    """The targets of the endpoints in all EndpointSlices of ``documents``. The documents have been read from YAML or JSON."""

    def read(document: object) -> _Slice:
        is_slice = msgspec.convert(document, schema.AnyObject).kind == "EndpointSlice"
        return msgspec.convert(document, _Slice) if is_slice else _Slice()

    return _targets(read, documents)


def _targets(read: Callable[[Any], _Slice], items: Iterable[object]) -> Targets:
    targets: dict[tuple[ServiceName, RealServerKey], Target] = {}
    for item in items:
        with contextlib.suppress(*UNREADABLE):
            targets.update(_of_slice(read(item)))
    return targets


def _of_slice(raw: _Slice) -> Iterator[tuple[tuple[ServiceName, RealServerKey], Target]]:
    metadata = raw.metadata or schema.ObjectMetadata()
    namespace, label = metadata.namespace or "default", (metadata.labels or {}).get(SERVICE_NAME_LABEL)
    if not label:
        return
    service = ServiceName(namespace, label)
    for endpoint in raw.endpoints or ():
        target = Target(_name(endpoint.target_ref, namespace), endpoint.node_name or "")
        for port in raw.ports or ():
            key = _key(endpoint, port)
            if key and any(target):
                yield (service, key), target


def _name(reference: _Reference | None, namespace: str) -> str:
    if reference is None or not reference.name:
        return ""
    name = f"{reference.namespace or namespace}/{reference.name}"
    return name if reference.kind in (None, "Pod") else f"{reference.kind} {name}"


def _key(endpoint: _Endpoint, port: schema.EndpointPortJson) -> RealServerKey | None:
    """The result is None if the address or the port is absent or invalid."""
    if not endpoint.addresses or port.port is None or not 0 < port.port <= fields.HIGHEST_PORT:
        return None
    try:
        return RealServerKey.of(parse_address(endpoint.addresses[0]), port.port)
    except ValueError:
        return None
