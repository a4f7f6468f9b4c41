"""Converts Services, Nodes and EndpointSlices from the API schema to the model.

The smallest invalid part of an object, such as a port, an address or an endpoint, is left out, and a ``Skipped(field, reason)``
is recorded. The rules for fields come from the Kubernetes API reference (Service v1, Node v1, EndpointSlice discovery/v1).
EndpointSlices with equal ports share one object for their ports, and equal conditions of endpoints are also one shared object.
"""

import functools
from collections.abc import Collection, Iterable, Mapping, Sequence

import msgspec

from ipvsproxy.model.annotations import NO_ANNOTATIONS, Annotation
from ipvsproxy.model.net import Address, Family, Network, Protocol, pack_address
from ipvsproxy.model.service import (
    USUAL_OPTIONS,
    Conditions,
    EndpointPort,
    EndpointSlice,
    EndpointSliceName,
    Node,
    Service,
    ServiceName,
    ServiceOptions,
    ServicePort,
    ServiceType,
    Skipped,
    bounded,
)
from ipvsproxy.translate.api import fields, schema

DEFAULT_AFFINITY_TIMEOUT_S = 10800
"""The API server's default for ``sessionAffinityConfig``, in seconds (core/v1)."""
LONGEST_AFFINITY_TIMEOUT_S = 86400
FEW_PORTS = 8
"""Objects with at most this number of ports share equal ports through a cache. Objects with more ports would fill
the cache."""
MOST_ENTRIES = 65536
"""The largest number of entries that one Service may have in one ipset.

The bound is the number of entries that kube-proxy's set holds for all Services together. The API does not limit the number of
entries. It limits only the size of the Service object.
"""
AUTOSCALER_TAINT = "ToBeDeletedByClusterAutoscaler"

SERVICE_NAME_LABEL = "kubernetes.io/service-name"
_NO_METADATA = schema.ObjectMetadata()
_NO_SPEC = schema.ServiceSpec()
_SERVICE_TYPES = {kind.value: kind for kind in ServiceType}


def parse_service(raw: schema.ServiceJson, name: ServiceName) -> Service:
    """A Service.

    Parts of the Service that cannot be used are in ``skipped``. If the whole Service cannot be served, ``not_served`` gives the
    reason.
    """
    metadata, spec = raw.metadata or _NO_METADATA, raw.spec or _NO_SPEC
    skipped: list[Skipped] = []
    kind = _service_type(spec.type, skipped)
    not_served = _why_not_served(kind, metadata.labels or {}, spec)
    if not_served:
        options = ServiceOptions(type=kind, not_served=not_served, skipped=tuple(skipped))
        return Service(name=name, uid=metadata.uid or "", options=options)
    # Nearly all Services lack the following fields, so the code spends no time on absent fields.
    external = fields.addresses("spec.externalIPs", spec.external_ips, skipped) if spec.external_ips else ()
    external_local = spec.external_traffic_policy == "Local" and (
        kind in {ServiceType.LOAD_BALANCER, ServiceType.NODE_PORT} or bool(external)
    )
    health_port = _port("spec.healthCheckNodePort", spec.health_check_node_port, skipped) if spec.health_check_node_port else 0
    cluster = _cluster_addresses(spec, skipped)
    ingress = raw.status and raw.status.load_balancer and raw.status.load_balancer.ingress
    usable = [entry.ip for entry in ingress or () if entry.ip and (entry.ip_mode or "VIP") == "VIP"]
    balanced = fields.addresses("status.loadBalancer.ingress", usable, skipped) if usable else ()
    if cluster and (external or balanced):
        skipped.extend(_left_alone("spec.externalIPs", external, cluster))
        skipped.extend(_left_alone("status.loadBalancer.ingress", balanced, cluster))
    ranges = spec.load_balancer_source_ranges
    source_ranges, admits_nobody = _source_ranges(ranges, skipped) if ranges else ((), False)
    raw_ports = spec.ports or ()
    ports, complaints = (_service_ports if len(raw_ports) <= FEW_PORTS else _service_ports.__wrapped__)(raw_ports)
    skipped.extend(complaints)
    ports = _bounded_ports(ports, (external, balanced), source_ranges, skipped)
    chosen = fields.parse_service_annotations(metadata.annotations, skipped) if metadata.annotations else NO_ANNOTATIONS
    options = ServiceOptions(
        type=kind,
        external_addresses=external,
        load_balancer_addresses=balanced,
        source_ranges=source_ranges,
        admits_nobody=admits_nobody,
        affinity_timeout_s=_affinity_timeout(spec, skipped) if spec.session_affinity == "ClientIP" else 0,
        internal_traffic_local=spec.internal_traffic_policy == "Local",
        external_traffic_local=external_local,
        health_check_node_port=health_port if kind is ServiceType.LOAD_BALANCER and external_local else 0,
        not_served=None if cluster else Skipped("spec.clusterIPs", "none is a usable address"),
        skipped=bounded(skipped) if skipped else (),
        annotations=chosen,
    )
    return Service(
        name=name,
        uid=metadata.uid or "",
        created_s=fields.seconds(metadata.creation_timestamp),
        ports=ports,
        cluster_addresses=cluster,
        options=USUAL_OPTIONS if options == USUAL_OPTIONS else options,
    )


def _service_type(text: str | None, skipped: list[Skipped]) -> ServiceType:
    kind = _SERVICE_TYPES.get(text or "ClusterIP")
    if kind is None:
        skipped.append(Skipped("spec.type", f"{fields.shown(text)} is not known; served as ClusterIP"))
    return kind or ServiceType.CLUSTER_IP


def _why_not_served(kind: ServiceType, labels: Mapping[str, str | None], spec: schema.ServiceSpec) -> Skipped | None:
    cluster_ip = spec.cluster_ip or (spec.cluster_ips[0] if spec.cluster_ips else "")
    proxy_name = labels.get("service.kubernetes.io/service-proxy-name")
    if proxy_name is not None:
        return Skipped("metadata.labels", f"service-proxy-name gives it to {fields.shown(proxy_name)}", invalid=False)
    if kind is ServiceType.EXTERNAL_NAME:
        return Skipped("spec.type", "ExternalName: resolved by DNS, not served by a proxy", invalid=False)
    if cluster_ip == "None":
        return Skipped("spec.clusterIP", "headless: clients reach the endpoints directly", invalid=False)
    if not cluster_ip:
        return Skipped("spec.clusterIP", "no cluster IP has been allotted", invalid=False)
    return None


def _cluster_addresses(spec: schema.ServiceSpec, skipped: list[Skipped]) -> tuple[Address, ...]:
    texts = spec.cluster_ips or ([spec.cluster_ip] if spec.cluster_ip else [])
    addresses = fields.addresses("spec.clusterIPs", texts, skipped)
    if len(addresses) == 1:
        return addresses
    first_of_family = {address.family: address for address in reversed(addresses)}
    more = (address for address in addresses if first_of_family[address.family] is not address)
    skipped.extend(Skipped("spec.clusterIPs", f"{address}: a second address of one family") for address in more)
    return tuple(address for address in addresses if first_of_family[address.family] is address)


def _left_alone(field: str, addresses: Iterable[Address], cluster: Iterable[Address]) -> Iterable[Skipped]:
    """Yields a ``Skipped`` for each address of an IP family in which the Service has no cluster IP.

    Like kube-proxy, ipvsproxy serves an IP family only if the Service has a cluster IP of this family.
    """
    families = {address.family for address in cluster}
    for address in addresses:
        if address.family not in families:
            yield Skipped(field, f"{address}: the Service has no cluster IP of {address.family.label}", invalid=False)


@functools.lru_cache(maxsize=1024)
def _service_ports(ports: tuple[schema.ServicePortJson, ...]) -> tuple[tuple[ServicePort, ...], tuple[Skipped, ...]]:
    """The usable ports, and the reason for each unusable port.

    Services with equal ports share one result, because results are cached.
    """
    usable: list[ServicePort] = []
    skipped: list[Skipped] = []
    names: set[tuple[str, Protocol]] = set()
    used: set[tuple[Protocol, int]] = set()
    for number, raw in enumerate(ports):
        field = f"spec.ports[{number}]"
        protocol = Protocol.__members__.get(raw.protocol or "TCP")
        port = raw.port or 0
        name = raw.name or ""
        if protocol is None:
            skipped.append(Skipped(f"{field}.protocol", f"{fields.shown(raw.protocol)} is none of TCP, UDP, SCTP"))
        elif not 0 < port <= fields.HIGHEST_PORT:
            skipped.append(Skipped(f"{field}.port", f"{port} is outside 1..{fields.HIGHEST_PORT}"))
        elif (name, protocol) in names:
            skipped.append(Skipped(f"{field}.name", f"{fields.shown(name)} is a duplicate"))
        elif (protocol, port) in used:
            skipped.append(Skipped(f"{field}.port", f"{protocol.name} {port} is a duplicate"))
        else:
            names.add((name, protocol))
            used.add((protocol, port))
            node_port = _port(f"{field}.nodePort", raw.node_port or 0, skipped)
            usable.append(ServicePort(name=name, protocol=protocol, port=port, node_port=node_port))
    return tuple(usable), tuple(skipped)


def _bounded_ports(
    ports: tuple[ServicePort, ...], addresses: Sequence[Sequence[Address]], ranges: Sequence[Network], skipped: list[Skipped]
) -> tuple[ServicePort, ...]:
    """The first ports of the list, as many as ``MOST_ENTRIES`` allows.

    ``addresses`` has the external addresses, and the addresses to which source ranges apply.
    """
    external, balanced = addresses
    if len(ports) * (1 + len(external) + len(balanced) * (1 + len(ranges))) <= MOST_ENTRIES:
        return ports
    # Each set has entries of one family only, and a range applies only to addresses of its own family.
    counts = [[sum(item.family is family for item in items) for items in (external, balanced, ranges)] for family in Family]
    most = MOST_ENTRIES // max(1, *(max(outside, inside * max(1, many)) for outside, inside, many in counts))
    if len(ports) > most:
        reason = f"{len(ports)} of them would be more than {MOST_ENTRIES} entries of an ipset; the first {most} are used"
        skipped.append(Skipped("spec.ports", reason))
    return ports[:most]


def _port(field: str, port: int, skipped: list[Skipped]) -> int:
    if 0 <= port <= fields.HIGHEST_PORT:
        return port
    skipped.append(Skipped(field, f"{port} is outside 1..{fields.HIGHEST_PORT}"))
    return 0


def _source_ranges(texts: Collection[str], skipped: list[Skipped]) -> tuple[tuple[Network, ...], bool]:
    """Returns the valid source ranges, and whether every given range is invalid.

    If every given range is invalid, no client is admitted, so that a typing error does not open a Service to all clients.
    """
    field = "spec.loadBalancerSourceRanges"
    ranges = fields.networks(field, texts, skipped)
    admits_nobody = not ranges and any(text.strip() for text in texts)
    if admits_nobody:
        skipped.append(Skipped(field, "none is valid, so the load balancer's addresses admit no client"))
    return ranges, admits_nobody


def _affinity_timeout(spec: schema.ServiceSpec, skipped: list[Skipped]) -> int:
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


def parse_node(raw: schema.NodeJson, name: str) -> Node:
    """A Node. InternalIPs come before ExternalIPs, because the first usable address is the primary address."""
    metadata, spec = raw.metadata or _NO_METADATA, raw.spec or schema.NodeSpec()
    skipped: list[Skipped] = []
    listed = (raw.status and raw.status.addresses) or ()
    texts = [entry.address or "" for kind in ("InternalIP", "ExternalIP") for entry in listed if entry.type == kind]
    pod_cidrs = spec.pod_cidrs or ([spec.pod_cidr] if spec.pod_cidr else [])
    return Node(
        name=name,
        uid=metadata.uid or "",
        zone=(metadata.labels or {}).get("topology.kubernetes.io/zone") or "",
        addresses=fields.addresses("status.addresses", texts, skipped),
        pod_networks=fields.networks("spec.podCIDRs", pod_cidrs, skipped),
        takes_direct_return=(metadata.annotations or {}).get(Annotation.DIRECT_RETURN.whole) == "true",
        leaving=bool(metadata.deletion_timestamp) or any(taint.key == AUTOSCALER_TAINT for taint in spec.taints or ()),
        skipped=bounded(skipped),
    )


MOST_ENDPOINTS = 1000
"""The largest number of endpoints in one EndpointSlice (maxEndpoints, pkg/apis/discovery/validation in kubernetes/kubernetes)."""

_NO_CONDITIONS = schema.EndpointConditions()
_NO_HINTS = schema.EndpointHints()
_FAMILIES = {family.label: family for family in Family}


def parse_endpoint_slice(
    raw: schema.EndpointSliceJson, name: EndpointSliceName, *, default_port_names: bool = False
) -> EndpointSlice:
    """An EndpointSlice.

    With ``default_port_names``, an absent port name becomes the empty name; the API server sets the same default.
    """
    metadata = raw.metadata or _NO_METADATA
    skipped: list[Skipped] = []
    labels, annotations = metadata.labels or {}, metadata.annotations or {}
    is_headless = labels.get("service.kubernetes.io/headless") is not None
    service = None if is_headless else labels.get(SERVICE_NAME_LABEL)
    if is_headless:
        skipped.append(Skipped("metadata.labels", "service.kubernetes.io/headless: not for proxies", invalid=False))
    elif not service:
        skipped.append(Skipped("metadata.labels", f"{SERVICE_NAME_LABEL} is missing: it belongs to no Service"))
    family = _FAMILIES.get(raw.address_type or "")
    if family is None:
        known = raw.address_type == "FQDN"
        reason = "FQDN has no addresses" if known else f"{fields.shown(raw.address_type)} is none of IPv4, IPv6"
        skipped.append(Skipped("addressType", reason, invalid=not known))
    raw_ports = raw.ports or ()
    if default_port_names:
        raw_ports = tuple(schema.EndpointPortJson(one.name or "", one.protocol, one.port) for one in raw_ports)
    ports, complaints = (_endpoint_ports if len(raw_ports) <= FEW_PORTS else _endpoint_ports.__wrapped__)(raw_ports)
    skipped.extend(complaints)
    weight = fields.parse_slice_weight(annotations, skipped)
    endpoints = raw.endpoints or ()
    if len(endpoints) > MOST_ENDPOINTS:
        reason = f"{len(endpoints)} of them; the first {MOST_ENDPOINTS} are used, the API allows no more"
        skipped.append(Skipped("endpoints", reason))
    addresses, conditions = _endpoints(endpoints[:MOST_ENDPOINTS], family, skipped) if family else (b"", ())
    if weight is not None:
        conditions = tuple(_with_weight(one, weight) for one in conditions)
    return EndpointSlice(
        name=name,
        service=ServiceName(name.namespace, service) if service else None,
        family=family,
        ports=ports,
        addresses=addresses,
        conditions=conditions,
        trigger_s=fields.seconds(annotations.get("endpoints.kubernetes.io/last-change-trigger-time")),
        skipped=bounded(skipped) if skipped else (),
    )


@functools.lru_cache(maxsize=1024)
def _endpoint_ports(ports: tuple[schema.EndpointPortJson, ...]) -> tuple[tuple[EndpointPort, ...], tuple[Skipped, ...]]:
    """The usable ports, and the reason for each unusable port.

    EndpointSlices with equal ports share one result, because results are cached.
    """
    usable: list[EndpointPort] = []
    skipped: list[Skipped] = []
    for number, raw in enumerate(ports):
        protocol = Protocol.__members__.get(raw.protocol or "TCP")
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


def _endpoints(
    endpoints: Sequence[schema.EndpointJson], family: Family, skipped: list[Skipped]
) -> tuple[bytes, tuple[Conditions, ...]]:
    addresses: list[bytes] = []
    conditions: list[Conditions] = []
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
    """The conditions of an endpoint; endpoints of one node share one object if their conditions are equal.

    Absent conditions count as ready, serving and not terminating (discovery/v1).
    """
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
    """The given conditions with the weight of the endpoint's EndpointSlice.

    Endpoints with equal conditions and weights share one object.
    """
    return msgspec.structs.replace(conditions, weight=weight)


def _names(hints: tuple[schema.Hint, ...] | None) -> frozenset[str]:
    return frozenset(hint.name for hint in hints or () if hint.name)
