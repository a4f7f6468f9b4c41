"""From the API schema to the model: EndpointSlices. Services and Nodes: ``parse``.

The smallest invalid part, such as a port or an endpoint, is left out, with a ``Skipped(field, reason)``.
Field rules are those of the Kubernetes API reference (EndpointSlice discovery/v1).
Slices share equal ports and equal conditions as one object.
"""

import functools

import msgspec

from ipvsproxy.model.net import Address, Family, pack_address, pack_addresses
from ipvsproxy.model.service import Conditions, EndpointPort, EndpointSlice, EndpointSliceName, ServiceName, Skipped
from ipvsproxy.translate.api import annotations, fields, schema

MOST_ENDPOINTS = 1000
"""The most endpoints of one EndpointSlice (maxEndpoints, pkg/apis/discovery/validation in kubernetes/kubernetes)."""

_NO_METADATA = schema.SliceMetadata()
_NO_ANNOTATIONS = schema.SliceAnnotations()
_NO_LABELS = schema.ObjectLabels()
_NO_CONDITIONS = schema.EndpointConditions()
_NO_HINTS = schema.EndpointHints()
_FAMILIES = {family.label: family for family in Family}


def parse_endpoint_slice(
    raw: schema.EndpointSlice, name: EndpointSliceName, *, default_port_names: bool = False
) -> EndpointSlice:
    """An EndpointSlice. ``default_port_names``: an absent port name is the empty one, as the API server would write it."""
    metadata = raw.metadata or _NO_METADATA
    skipped: list[Skipped] = []
    labels = metadata.labels or _NO_LABELS
    service = labels.service if labels.headless is None else None
    if labels.headless is not None:
        skipped.append(Skipped("metadata.labels", "service.kubernetes.io/headless: not for proxies", invalid=False))
    elif not service:
        skipped.append(Skipped("metadata.labels", "kubernetes.io/service-name is missing: it belongs to no Service"))
    family = _FAMILIES.get(raw.address_type or "")
    if family is None:
        known = raw.address_type == "FQDN"
        reason = "FQDN has no addresses" if known else f"{fields.shown(raw.address_type)} is none of IPv4, IPv6"
        skipped.append(Skipped("addressType", reason, invalid=not known))
    raw_ports = raw.ports or ()
    if default_port_names:
        raw_ports = tuple(schema.EndpointPort(one.name or "", one.protocol, one.port) for one in raw_ports)
    ports, complaints = _endpoint_ports(raw_ports)
    skipped.extend(complaints)
    given = metadata.annotations or _NO_ANNOTATIONS
    weight = annotations.parse_slice_weight(given.weight, skipped) if given.weight is not None else None
    endpoints = _bounded(raw.endpoints or [], skipped)
    addresses, conditions = _endpoints(endpoints, family, skipped) if family else (b"", ())
    if weight is not None:
        conditions = tuple(_with_weight(one, weight) for one in conditions)
    return EndpointSlice(
        name=name,
        service=ServiceName(name.namespace, service) if service else None,
        family=family,
        ports=ports,
        addresses=addresses,
        conditions=conditions,
        trigger_s=fields.seconds(given.trigger_time),
        skipped=fields.bounded(skipped) if skipped else (),
    )


def _endpoint_ports(ports: tuple[schema.EndpointPort, ...]) -> tuple[tuple[EndpointPort, ...], tuple[Skipped, ...]]:
    """The ports that can be used, and why the others cannot."""
    return _shared_endpoint_ports(ports) if len(ports) <= fields.FEW_PORTS else _read_endpoint_ports(ports)


@functools.lru_cache(maxsize=1024)
def _shared_endpoint_ports(
    ports: tuple[schema.EndpointPort, ...],
) -> tuple[tuple[EndpointPort, ...], tuple[Skipped, ...]]:
    """One object for all slices with such ports."""
    return _read_endpoint_ports(ports)


def _read_endpoint_ports(
    ports: tuple[schema.EndpointPort, ...],
) -> tuple[tuple[EndpointPort, ...], tuple[Skipped, ...]]:
    usable: list[EndpointPort] = []
    skipped: list[Skipped] = []
    for number, raw in enumerate(ports):
        protocol = fields.PROTOCOLS.get(raw.protocol or "TCP")
        port = raw.port or 0
        if protocol is None:
            skipped.append(Skipped(f"ports[{number}].protocol", f"{fields.shown(raw.protocol)} is none of TCP, UDP, SCTP"))
        elif raw.name is None:
            skipped.append(Skipped(f"ports[{number}].name", "is missing"))
        elif not 0 < port <= fields.HIGHEST_PORT:
            skipped.append(Skipped(f"ports[{number}].port", f"{raw.port} is outside 1..{fields.HIGHEST_PORT}"))
        else:
            usable.append(EndpointPort(raw.name, protocol, port))
    return tuple(usable), tuple(skipped)


def _bounded(endpoints: list[schema.Endpoint], skipped: list[Skipped]) -> list[schema.Endpoint]:
    if len(endpoints) <= MOST_ENDPOINTS:
        return endpoints
    skipped.append(Skipped("endpoints", f"{len(endpoints)} of them; the first {MOST_ENDPOINTS} are used, the API allows no more"))
    return endpoints[:MOST_ENDPOINTS]


def _endpoints(endpoints: list[schema.Endpoint], family: Family, skipped: list[Skipped]) -> tuple[bytes, tuple[Conditions, ...]]:
    # Faster for a first list of a hundred thousand endpoints, because all endpoints of nearly all slices are valid.
    packed = pack_addresses(family, [raw.addresses[0] if raw.addresses else "" for raw in endpoints])
    if packed is not None:
        conditions = [_shared_conditions(raw.conditions, raw.node_name, raw.hints, raw.zone) for raw in endpoints]
        return packed, _alone(conditions[0]) if len(conditions) == 1 else tuple(conditions)
    addresses: list[bytes] = []
    conditions = []
    length = family.bits // 8
    for number, raw in enumerate(endpoints):
        if not raw.addresses:
            skipped.append(Skipped(f"endpoints[{number}].addresses", "is empty"))
            continue
        try:
            address = pack_address(raw.addresses[0])
        except ValueError as error:
            skipped.append(Skipped(f"endpoints[{number}].addresses[0]", str(error)))
            continue
        if len(address) != length:
            reason = f"{Address(address)} is not an {family.label} address"
            skipped.append(Skipped(f"endpoints[{number}].addresses[0]", reason))
            continue
        addresses.append(address)
        conditions.append(_shared_conditions(raw.conditions, raw.node_name, raw.hints, raw.zone))
    return b"".join(addresses), tuple(conditions)


@functools.lru_cache(maxsize=16384)
def _shared_conditions(
    given: schema.EndpointConditions | None,
    node_name: str | None,
    hints: schema.EndpointHints | None,
    zone: str | None,
) -> Conditions:
    """One object for all equal endpoints of a node. Nil counts as true, true, false (discovery/v1)."""
    given, hints = given or _NO_CONDITIONS, hints or _NO_HINTS
    return Conditions(
        given.ready is not False,
        given.serving is not False,
        given.terminating is True,
        node_name or "",
        _names(hints.for_zones),
        _names(hints.for_nodes),
        zone or "",
    )


@functools.lru_cache(maxsize=1024)
def _with_weight(conditions: Conditions, weight: int) -> Conditions:
    """One object for all equal endpoints of weighty slices."""
    return msgspec.structs.replace(conditions, weight=weight)


@functools.lru_cache(maxsize=4096)
def _alone(conditions: Conditions) -> tuple[Conditions, ...]:
    """One tuple for all slices of one endpoint with equal conditions: a cluster may have a hundred thousand."""
    return (conditions,)


def _names(hints: tuple[schema.Hint, ...] | None) -> frozenset[str]:
    return frozenset(hint.name for hint in hints or () if hint.name)
