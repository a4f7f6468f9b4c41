"""The API's objects, from the wire's shape to our values.

Untyped in; typed out, with a ``Skipped(field, reason)`` for the smallest part that is wrong: a port, an address, an endpoint.
Field rules are those of the Kubernetes API reference (Service v1, EndpointSlice discovery/v1, Node v1).
"""

import datetime as dt
import functools
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TypeVar

from ipvsproxy.model.net import Address, Family, Network, Protocol, pack_address, pack_addresses, parse_address, parse_network
from ipvsproxy.model.service import (
    Conditions,
    EndpointPort,
    EndpointSlice,
    EndpointSliceName,
    Node,
    Service,
    ServiceName,
    ServicePort,
    ServiceType,
    Skipped,
)
from ipvsproxy.translate import wire

DEFAULT_AFFINITY_TIMEOUT_S = 10800
"""What the API server writes into ``sessionAffinityConfig`` when it is absent (core/v1 defaults)."""
LONGEST_AFFINITY_TIMEOUT_S = 86400
HIGHEST_PORT = 65535
MOST_ENDPOINTS = 1000
"""In one EndpointSlice (maxEndpoints, pkg/apis/discovery/validation in kubernetes/kubernetes)."""
MOST_ENTRIES = 65536
"""Of one Service in one ipset, as many as kube-proxy has room for of all. The API bounds a Service by its size alone."""
MOST_SKIPPED = 20
"""How many unusable parts of one object are told one by one: a log has other readers too."""
AUTOSCALER_TAINT = "ToBeDeletedByClusterAutoscaler"

_NO_METADATA = wire.Metadata()
_NO_LABELS = wire.ObjectLabels()
_NO_SPEC = wire.ServiceSpec()
_NO_CONDITIONS = wire.EndpointConditions()
_NO_HINTS = wire.EndpointHints()
_PROTOCOLS = {protocol.name: protocol for protocol in Protocol}
_SERVICE_TYPES = {kind.value: kind for kind in ServiceType}
_FAMILIES = {family.label: family for family in Family}
_FEW_PORTS = 8
"""So many ports of an object are looked up as a whole, as most objects have the ports of others; more would fill the caches."""
_LONGEST_TIME = 35
"""Of a time as the API writes it, to the nanosecond. An annotation may hold any text: longer ones would fill the cache."""
_SHOWN = 64
"""How much of a bad value is repeated in a reason, in characters: reasons end in log lines."""

T = TypeVar("T")


def parse_service(raw: wire.ServiceWire, name: ServiceName) -> Service:
    """A Service; what of it can not be used stands in its ``skipped`` or, for the whole, in ``not_served``."""
    metadata, spec = raw.metadata or _NO_METADATA, raw.spec or _NO_SPEC
    skipped: list[Skipped] = []
    kind = _service_type(spec.type, skipped)
    not_served = _why_not_served(kind, metadata.labels or _NO_LABELS, spec)
    if not_served:
        return Service(name=name, uid=metadata.uid or "", type=kind, not_served=not_served, skipped=tuple(skipped))
    # Nearly all of ten thousand Services have none of the following: what is absent is not looked into.
    external = _addresses("spec.externalIPs", spec.external_ips, skipped) if spec.external_ips else ()
    external_local = spec.external_traffic_policy == "Local" and (
        kind in {ServiceType.LOAD_BALANCER, ServiceType.NODE_PORT} or bool(external)
    )
    health_port = _port("spec.healthCheckNodePort", spec.health_check_node_port, skipped) if spec.health_check_node_port else 0
    cluster = _cluster_addresses(spec, skipped)
    ingress = raw.status and raw.status.load_balancer and raw.status.load_balancer.ingress
    balanced = _load_balancer_addresses(ingress, skipped) if ingress else ()
    if cluster and (external or balanced):
        skipped.extend(_left_alone("spec.externalIPs", external, cluster))
        skipped.extend(_left_alone("status.loadBalancer.ingress", balanced, cluster))
    ranges = spec.load_balancer_source_ranges
    source_ranges, admits_nobody = _source_ranges(ranges, skipped) if ranges else ((), False)
    ports, complaints = _service_ports(spec.ports or ())
    skipped.extend(complaints)
    return Service(
        name=name,
        uid=metadata.uid or "",
        created_s=_seconds(metadata.creation_timestamp),
        type=kind,
        ports=_bounded_ports(ports, (external, balanced), source_ranges, skipped),
        cluster_addresses=cluster,
        external_addresses=external,
        load_balancer_addresses=balanced,
        source_ranges=source_ranges,
        admits_nobody=admits_nobody,
        affinity_timeout_s=_affinity_timeout(spec, skipped) if spec.session_affinity == "ClientIP" else 0,
        internal_traffic_local=spec.internal_traffic_policy == "Local",
        external_traffic_local=external_local,
        health_check_node_port=health_port if kind is ServiceType.LOAD_BALANCER and external_local else 0,
        not_served=None if cluster else Skipped("spec.clusterIPs", "none is a usable address"),
        skipped=_told(skipped) if skipped else (),
    )


def _service_type(text: str | None, skipped: list[Skipped]) -> ServiceType:
    kind = _SERVICE_TYPES.get(text or "ClusterIP")
    if kind is None:
        skipped.append(Skipped("spec.type", f"{str(text)[:_SHOWN]!r} is not known; served as ClusterIP"))
    return kind or ServiceType.CLUSTER_IP


def _why_not_served(kind: ServiceType, labels: wire.ObjectLabels, spec: wire.ServiceSpec) -> Skipped | None:
    cluster_ip = spec.cluster_ip or (spec.cluster_ips[0] if spec.cluster_ips else "")
    if labels.proxy_name is not None:
        return Skipped("metadata.labels", f"service-proxy-name gives it to {labels.proxy_name[:_SHOWN]!r}", invalid=False)
    if kind is ServiceType.EXTERNAL_NAME:
        return Skipped("spec.type", "ExternalName: a DNS matter", invalid=False)
    if cluster_ip == "None":
        return Skipped("spec.clusterIP", "headless: clients reach the endpoints directly", invalid=False)
    if not cluster_ip:
        return Skipped("spec.clusterIP", "no cluster IP has been allotted", invalid=False)
    return None


def _cluster_addresses(spec: wire.ServiceSpec, skipped: list[Skipped]) -> tuple[Address, ...]:
    texts = spec.cluster_ips or ([spec.cluster_ip] if spec.cluster_ip else [])
    found = _addresses("spec.clusterIPs", texts, skipped)
    if len(found) == 1:
        return found
    first = {address.family: address for address in reversed(found)}
    more = [address for address in found if first[address.family] is not address]
    skipped.extend(Skipped("spec.clusterIPs", f"{address}: a second address of one family") for address in more)
    return tuple(address for address in found if address not in more)


def _left_alone(field: str, addresses: Iterable[Address], cluster: Iterable[Address]) -> Iterable[Skipped]:
    """Addresses of a family of which there is no cluster IP: kube-proxy serves a Service by family, and so do we."""
    families = {address.family for address in cluster}
    for address in addresses:
        if address.family not in families:
            yield Skipped(field, f"{address}: the Service has no cluster IP of {address.family.label}", invalid=False)


def _service_ports(ports: tuple[wire.ServicePortWire, ...]) -> tuple[tuple[ServicePort, ...], tuple[Skipped, ...]]:
    """The ports that can be used, and why the others can not."""
    return _shared_service_ports(ports) if len(ports) <= _FEW_PORTS else _read_service_ports(ports)


@functools.lru_cache(maxsize=1024)
def _shared_service_ports(ports: tuple[wire.ServicePortWire, ...]) -> tuple[tuple[ServicePort, ...], tuple[Skipped, ...]]:
    """One object for all Services with such ports: most of them call them the same."""
    return _read_service_ports(ports)


def _read_service_ports(ports: tuple[wire.ServicePortWire, ...]) -> tuple[tuple[ServicePort, ...], tuple[Skipped, ...]]:
    found: list[ServicePort] = []
    skipped: list[Skipped] = []
    seen: set[tuple[str, Protocol]] = set()
    used: set[tuple[Protocol, int]] = set()
    for number, raw in enumerate(ports):
        field = f"spec.ports[{number}]"
        protocol = _PROTOCOLS.get(raw.protocol or "TCP")
        port = raw.port or 0
        name = raw.name or ""
        if protocol is None:
            skipped.append(Skipped(f"{field}.protocol", f"{str(raw.protocol)[:_SHOWN]!r} is none of TCP, UDP, SCTP"))
        elif not 0 < port <= HIGHEST_PORT:
            skipped.append(Skipped(f"{field}.port", f"{port} is outside 1..{HIGHEST_PORT}"))
        elif (name, protocol) in seen:
            skipped.append(Skipped(f"{field}.name", f"{name[:_SHOWN]!r} stands there twice"))
        elif (protocol, port) in used:
            skipped.append(Skipped(f"{field}.port", f"{protocol.name} {port} stands there twice"))
        else:
            seen.add((name, protocol))
            used.add((protocol, port))
            node_port = _port(f"{field}.nodePort", raw.node_port or 0, skipped)
            found.append(ServicePort(name=name, protocol=protocol, port=port, node_port=node_port))
    return tuple(found), tuple(skipped)


def _bounded_ports(
    ports: tuple[ServicePort, ...], addresses: Sequence[Sequence[Address]], ranges: Sequence[Network], skipped: list[Skipped]
) -> tuple[ServicePort, ...]:
    """As many ports as ``MOST_ENTRIES`` allows. ``addresses``: the external ones, and those that the ranges are for."""
    external, balanced = addresses
    if len(ports) * (1 + len(external) + len(balanced) * (1 + len(ranges))) <= MOST_ENTRIES:
        return ports
    counts = [[sum(item.family is family for item in items) for items in (external, balanced, ranges)] for family in Family]
    each = max(max(1, externals, load_balancers * max(1, many)) for externals, load_balancers, many in counts)
    most = MOST_ENTRIES // each
    if len(ports) > most:
        reason = f"{len(ports)} of them would be more than {MOST_ENTRIES} entries of an ipset; the first {most} are used"
        skipped.append(Skipped("spec.ports", reason))
    return ports[:most]


def _port(field: str, port: int, skipped: list[Skipped]) -> int:
    if 0 <= port <= HIGHEST_PORT:
        return port
    skipped.append(Skipped(field, f"{port} is outside 1..{HIGHEST_PORT}"))
    return 0


def _load_balancer_addresses(ingress: Iterable[wire.LoadBalancerIngress], skipped: list[Skipped]) -> tuple[Address, ...]:
    texts = [entry.ip for entry in ingress if entry.ip and (entry.ip_mode or "VIP") == "VIP"]
    return _addresses("status.loadBalancer.ingress", texts, skipped)


def _source_ranges(texts: Collection[str], skipped: list[Skipped]) -> tuple[tuple[Network, ...], bool]:
    """Who may come in, and whether that is nobody: a typing error must not open what somebody wanted closed."""
    field = "spec.loadBalancerSourceRanges"
    found = _networks(field, texts, skipped)
    admits_nobody = not found and any(text.strip() for text in texts)
    if admits_nobody:
        skipped.append(Skipped(field, "none can be read: nobody is let in by the load balancer's addresses"))
    return found, admits_nobody


def _affinity_timeout(spec: wire.ServiceSpec, skipped: list[Skipped]) -> int:
    config = spec.session_affinity_config.client_ip if spec.session_affinity_config else None
    if config is None or config.timeout_seconds is None:
        return DEFAULT_AFFINITY_TIMEOUT_S
    timeout_s = config.timeout_seconds
    if 0 < timeout_s <= LONGEST_AFFINITY_TIMEOUT_S:
        return timeout_s
    field = "spec.sessionAffinityConfig.clientIP.timeoutSeconds"
    skipped.append(
        Skipped(field, f"{timeout_s} is outside 1..{LONGEST_AFFINITY_TIMEOUT_S}; {DEFAULT_AFFINITY_TIMEOUT_S} is used")
    )
    return DEFAULT_AFFINITY_TIMEOUT_S


def _addresses(field: str, texts: Iterable[str], skipped: list[Skipped]) -> tuple[Address, ...]:
    return _parsed(field, texts, parse_address, skipped)


def _networks(field: str, texts: Iterable[str], skipped: list[Skipped]) -> tuple[Network, ...]:
    return _parsed(field, texts, parse_network, skipped)


def _parsed(field: str, texts: Iterable[str], read: Callable[[str], T], skipped: list[Skipped]) -> tuple[T, ...]:
    """Each text read once, in order; blank ones are passed over, as the API allows them."""
    found: dict[T, None] = {}
    for text in texts:
        bare = text.strip()
        if bare:
            try:
                found[read(bare)] = None
            except ValueError as error:
                skipped.append(Skipped(field, str(error)))
    return tuple(found)


def _told(skipped: list[Skipped]) -> tuple[Skipped, ...]:
    rest = skipped[MOST_SKIPPED:]
    if not rest:
        return tuple(skipped)
    more = Skipped(rest[0].field, f"{rest[0].reason}; {len(rest)} such parts from here on", any(one.invalid for one in rest))
    return (*skipped[:MOST_SKIPPED], more)


def parse_endpoint_slice(
    raw: wire.EndpointSliceWire, name: EndpointSliceName, *, default_port_names: bool = False
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
        reason = "FQDN has no addresses" if known else f"{str(raw.address_type)[:_SHOWN]!r} is none of IPv4, IPv6"
        skipped.append(Skipped("addressType", reason, invalid=not known))
    raw_ports = raw.ports or ()
    if default_port_names:
        raw_ports = tuple(wire.EndpointPortWire(one.name or "", one.protocol, one.port) for one in raw_ports)
    ports, complaints = _endpoint_ports(raw_ports)
    skipped.extend(complaints)
    addresses, conditions = _endpoints(_bounded(raw.endpoints or [], skipped), family, skipped) if family else (b"", ())
    return EndpointSlice(
        name=name,
        service=ServiceName(name.namespace, service) if service else None,
        family=family,
        ports=ports,
        addresses=addresses,
        conditions=conditions,
        trigger_s=_seconds(metadata.annotations.trigger_time if metadata.annotations else None),
        skipped=_told(skipped) if skipped else (),
    )


def _endpoint_ports(ports: tuple[wire.EndpointPortWire, ...]) -> tuple[tuple[EndpointPort, ...], tuple[Skipped, ...]]:
    """As ``_service_ports``."""
    return _shared_endpoint_ports(ports) if len(ports) <= _FEW_PORTS else _read_endpoint_ports(ports)


@functools.lru_cache(maxsize=1024)
def _shared_endpoint_ports(ports: tuple[wire.EndpointPortWire, ...]) -> tuple[tuple[EndpointPort, ...], tuple[Skipped, ...]]:
    """One object for all slices with such ports."""
    return _read_endpoint_ports(ports)


def _read_endpoint_ports(ports: tuple[wire.EndpointPortWire, ...]) -> tuple[tuple[EndpointPort, ...], tuple[Skipped, ...]]:
    found: list[EndpointPort] = []
    skipped: list[Skipped] = []
    for number, raw in enumerate(ports):
        protocol = _PROTOCOLS.get(raw.protocol or "TCP")
        port = raw.port or 0
        if protocol is None:
            skipped.append(Skipped(f"ports[{number}].protocol", f"{str(raw.protocol)[:_SHOWN]!r} is none of TCP, UDP, SCTP"))
        elif raw.name is None:
            skipped.append(Skipped(f"ports[{number}].name", "is missing"))
        elif not 0 < port <= HIGHEST_PORT:
            skipped.append(Skipped(f"ports[{number}].port", f"{raw.port} is outside 1..{HIGHEST_PORT}"))
        else:
            found.append(EndpointPort(raw.name, protocol, port))
    return tuple(found), tuple(skipped)


def _bounded(endpoints: list[wire.EndpointWire], skipped: list[Skipped]) -> list[wire.EndpointWire]:
    if len(endpoints) <= MOST_ENDPOINTS:
        return endpoints
    skipped.append(Skipped("endpoints", f"{len(endpoints)} of them; the first {MOST_ENDPOINTS} are used, the API allows no more"))
    return endpoints[:MOST_ENDPOINTS]


def _endpoints(
    endpoints: list[wire.EndpointWire], family: Family, skipped: list[Skipped]
) -> tuple[bytes, tuple[Conditions, ...]]:
    # A hundred thousand endpoints of a first list come through here, and in nearly all slices each has what it should have.
    packed = pack_addresses(family, [raw.addresses[0] if raw.addresses else "" for raw in endpoints])
    if packed is not None:
        conditions = [_shared_conditions(raw.conditions, raw.node_name, raw.hints) for raw in endpoints]
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
        conditions.append(_shared_conditions(raw.conditions, raw.node_name, raw.hints))
    return b"".join(addresses), tuple(conditions)


@functools.lru_cache(maxsize=16384)
def _shared_conditions(
    given: wire.EndpointConditions | None, node_name: str | None, hints: wire.EndpointHints | None
) -> Conditions:
    """One object for all endpoints of a node that are alike. Nil counts as true, true, false (discovery/v1)."""
    given, hints = given or _NO_CONDITIONS, hints or _NO_HINTS
    return Conditions(
        given.ready is not False,
        given.serving is not False,
        given.terminating is True,
        node_name or "",
        _names(hints.for_zones),
        _names(hints.for_nodes),
    )


@functools.lru_cache(maxsize=4096)
def _alone(conditions: Conditions) -> tuple[Conditions, ...]:
    """One tuple for all slices of one endpoint that is alike: a cluster may have a hundred thousand of these."""
    return (conditions,)


def _names(hints: tuple[wire.Hint, ...] | None) -> frozenset[str]:
    return frozenset(hint.name for hint in hints or () if hint.name)


def parse_node(raw: wire.NodeWire, name: str) -> Node:
    """A Node. InternalIPs come before ExternalIPs, as the first usable one is the node's own."""
    metadata, spec = raw.metadata or _NO_METADATA, raw.spec or wire.NodeSpec()
    skipped: list[Skipped] = []
    listed = (raw.status and raw.status.addresses) or ()
    texts = [entry.address or "" for kind in ("InternalIP", "ExternalIP") for entry in listed if entry.type == kind]
    pod_cidrs = spec.pod_cidrs or ([spec.pod_cidr] if spec.pod_cidr else [])
    return Node(
        name=name,
        uid=metadata.uid or "",
        zone=(metadata.labels and metadata.labels.zone) or "",
        addresses=_addresses("status.addresses", texts, skipped),
        pod_networks=_networks("spec.podCIDRs", pod_cidrs, skipped),
        leaving=bool(metadata.deletion_timestamp) or any(taint.key == AUTOSCALER_TAINT for taint in spec.taints or ()),
        skipped=_told(skipped),
    )


def _seconds(text: str | None) -> float:
    """An RFC 3339 time as seconds since the epoch; 0 where there is none, none that can be read, or an earlier one."""
    if not text:
        return 0
    return _shared_seconds(text) if len(text) <= _LONGEST_TIME else _read_seconds(text)


@functools.lru_cache(maxsize=1024)
def _shared_seconds(text: str) -> float:
    """One number for all that was made, or began, in the same second."""
    return _read_seconds(text)


def _read_seconds(text: str) -> float:
    try:
        return max(0, dt.datetime.fromisoformat(text).timestamp())
    except ValueError:
        return 0
