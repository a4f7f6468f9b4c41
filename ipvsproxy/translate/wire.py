"""The shape of the API's JSON, as far as it is read. Unknown fields are passed over; null counts as absent.

These types live between the bytes and ``parse``, ``parse_endpoints``; nothing else sees them.
"""

import msgspec


class Wire(msgspec.Struct, rename="camel", frozen=True, gc=False):
    """Base of all: camelCase on the wire, no garbage-collector tracking, since none of these refers back, and frozen.

    Those without lists in them can be keys: what was made of one is found again for the next that is alike. What many objects
    have alike is therefore a tuple where the API has a list.
    """


_LABELS = {
    "service": "kubernetes.io/service-name",
    "zone": "topology.kubernetes.io/zone",
    "proxy_name": "service.kubernetes.io/service-proxy-name",
    "headless": "service.kubernetes.io/headless",
}


class ObjectLabels(Wire, frozen=True, rename=_LABELS):
    """The labels that mean something here. Of the last two only the presence counts, whatever the value."""

    service: str | None = None
    zone: str | None = None
    proxy_name: str | None = None
    headless: str | None = None


class ObjectAnnotations(Wire, frozen=True, rename={"trigger_time": "endpoints.kubernetes.io/last-change-trigger-time"}):
    """The annotations that mean something here."""

    trigger_time: str | None = None


class Metadata(Wire, frozen=True):
    """``metadata`` of any object, or of a list or bookmark."""

    name: str | None = None
    namespace: str | None = None
    uid: str | None = None
    resource_version: str | None = None
    creation_timestamp: str | None = None
    deletion_timestamp: str | None = None
    labels: ObjectLabels | None = None
    annotations: ObjectAnnotations | None = None


class AnyObject(Wire, frozen=True):
    """What is left to read of an object that does not have the shape of its kind: its name."""

    api_version: str | None = None
    kind: str | None = None
    metadata: Metadata | None = None


class ServicePortWire(Wire, frozen=True):
    """``spec.ports[]`` of a Service."""

    name: str | None = None
    protocol: str | None = None
    port: int | None = None
    node_port: int | None = None


class ClientIPConfig(Wire, frozen=True):
    """``spec.sessionAffinityConfig.clientIP``."""

    timeout_seconds: int | None = None


class SessionAffinityConfig(Wire, frozen=True):
    """``spec.sessionAffinityConfig``."""

    client_ip: ClientIPConfig | None = msgspec.field(name="clientIP", default=None)


class ServiceSpec(Wire, frozen=True):
    """``spec`` of a Service."""

    type: str | None = None
    cluster_ip: str | None = msgspec.field(name="clusterIP", default=None)
    cluster_ips: list[str] | None = msgspec.field(name="clusterIPs", default=None)
    external_ips: list[str] | None = msgspec.field(name="externalIPs", default=None)
    load_balancer_source_ranges: list[str] | None = None
    ports: tuple[ServicePortWire, ...] | None = None
    session_affinity: str | None = None
    session_affinity_config: SessionAffinityConfig | None = None
    internal_traffic_policy: str | None = None
    external_traffic_policy: str | None = None
    health_check_node_port: int | None = None


class LoadBalancerIngress(Wire, frozen=True):
    """``status.loadBalancer.ingress[]``."""

    ip: str | None = None
    ip_mode: str | None = None


class LoadBalancerStatus(Wire, frozen=True):
    """``status.loadBalancer``."""

    ingress: list[LoadBalancerIngress] | None = None


class ServiceStatus(Wire, frozen=True):
    """``status`` of a Service."""

    load_balancer: LoadBalancerStatus | None = None


class ServiceWire(Wire, frozen=True):
    """A core/v1 Service."""

    metadata: Metadata | None = None
    spec: ServiceSpec | None = None
    status: ServiceStatus | None = None


class EndpointPortWire(Wire, frozen=True):
    """``ports[]`` of an EndpointSlice."""

    name: str | None = None
    protocol: str | None = None
    port: int | None = None


class EndpointConditions(Wire, frozen=True):
    """``endpoints[].conditions``; an absent condition has the API's default."""

    ready: bool | None = None
    serving: bool | None = None
    terminating: bool | None = None


class Hint(Wire, frozen=True):
    """``endpoints[].hints.forZones[]`` or ``forNodes[]``."""

    name: str | None = None


class EndpointHints(Wire, frozen=True):
    """``endpoints[].hints``."""

    for_zones: tuple[Hint, ...] | None = None
    for_nodes: tuple[Hint, ...] | None = None


class EndpointWire(Wire, frozen=True):
    """``endpoints[]`` of an EndpointSlice."""

    addresses: list[str] | None = None
    conditions: EndpointConditions | None = None
    node_name: str | None = None
    hints: EndpointHints | None = None


class EndpointSliceWire(Wire, frozen=True):
    """A discovery.k8s.io/v1 EndpointSlice."""

    metadata: Metadata | None = None
    address_type: str | None = None
    ports: tuple[EndpointPortWire, ...] | None = None
    endpoints: list[EndpointWire] | None = None


class Taint(Wire, frozen=True):
    """``spec.taints[]`` of a Node."""

    key: str | None = None


class NodeSpec(Wire, frozen=True):
    """``spec`` of a Node."""

    pod_cidr: str | None = msgspec.field(name="podCIDR", default=None)
    pod_cidrs: list[str] | None = msgspec.field(name="podCIDRs", default=None)
    taints: list[Taint] | None = None


class NodeAddress(Wire, frozen=True):
    """``status.addresses[]`` of a Node."""

    type: str | None = None
    address: str | None = None


class NodeStatus(Wire, frozen=True):
    """``status`` of a Node."""

    addresses: list[NodeAddress] | None = None


class NodeWire(Wire, frozen=True):
    """A core/v1 Node."""

    metadata: Metadata | None = None
    spec: NodeSpec | None = None
    status: NodeStatus | None = None


class Status(Wire, frozen=True):
    """A ``Status`` object: what an ERROR event and a refused request carry."""

    code: int | None = None
    message: str | None = None
    reason: str | None = None
