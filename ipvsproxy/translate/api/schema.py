"""The schema of the API's JSON, limited to the fields that ipvsproxy reads.

Unknown fields are ignored; a null value counts as absent. Only the modules of this package use the types of the schema.
"""

import msgspec


class Schema(msgspec.Struct, rename="camel", frozen=True, gc=False):
    """The base of all types: camelCase in JSON, frozen, and not tracked by the garbage collector, because no cycles exist.

    A value that contains no lists can be the key of a dictionary, so equal values are parsed only once. A list cannot be a key,
    so the type of a list field is a tuple if many objects have the same value in the field.
    """


class Metadata(Schema, frozen=True):
    """``metadata`` of a list, of a bookmark, or of an object that may break the schema of its kind."""

    name: str | None = None
    namespace: str | None = None
    uid: str | None = None
    resource_version: str | None = None
    creation_timestamp: str | None = None
    deletion_timestamp: str | None = None


class ObjectMetadata(Metadata, frozen=True):
    """``metadata`` of an object."""

    labels: dict[str, str | None] | None = None
    annotations: dict[str, str | None] | None = None


class AnyObject(Schema, frozen=True):
    """An object that may break the schema of its kind. Only its API version, kind and metadata are read."""

    api_version: str | None = None
    kind: str | None = None
    metadata: Metadata | None = None


class ServicePortJson(Schema, frozen=True):
    """``spec.ports[]`` of a Service."""

    name: str | None = None
    protocol: str | None = None
    port: int | None = None
    node_port: int | None = None


class ClientIPConfig(Schema, frozen=True):
    """``spec.sessionAffinityConfig.clientIP``."""

    timeout_seconds: int | None = None


class SessionAffinityConfig(Schema, frozen=True):
    """``spec.sessionAffinityConfig``."""

    client_ip: ClientIPConfig | None = msgspec.field(name="clientIP", default=None)


class ServiceSpec(Schema, frozen=True):
    """``spec`` of a Service."""

    type: str | None = None
    cluster_ip: str | None = msgspec.field(name="clusterIP", default=None)
    cluster_ips: list[str] | None = msgspec.field(name="clusterIPs", default=None)
    external_ips: list[str] | None = msgspec.field(name="externalIPs", default=None)
    load_balancer_source_ranges: list[str] | None = None
    ports: tuple[ServicePortJson, ...] | None = None
    session_affinity: str | None = None
    session_affinity_config: SessionAffinityConfig | None = None
    internal_traffic_policy: str | None = None
    external_traffic_policy: str | None = None
    health_check_node_port: int | None = None


class LoadBalancerIngress(Schema, frozen=True):
    """``status.loadBalancer.ingress[]``."""

    ip: str | None = None
    ip_mode: str | None = None


class LoadBalancerStatus(Schema, frozen=True):
    """``status.loadBalancer``."""

    ingress: list[LoadBalancerIngress] | None = None


class ServiceStatus(Schema, frozen=True):
    """``status`` of a Service."""

    load_balancer: LoadBalancerStatus | None = None


class ServiceJson(Schema, frozen=True):
    """A core/v1 Service."""

    metadata: ObjectMetadata | None = None
    spec: ServiceSpec | None = None
    status: ServiceStatus | None = None


class EndpointPortJson(Schema, frozen=True):
    """``ports[]`` of an EndpointSlice."""

    name: str | None = None
    protocol: str | None = None
    port: int | None = None


class EndpointConditions(Schema, frozen=True):
    """``endpoints[].conditions``; an absent condition has the default value of the API."""

    ready: bool | None = None
    serving: bool | None = None
    terminating: bool | None = None


class Hint(Schema, frozen=True):
    """``endpoints[].hints.forZones[]`` or ``forNodes[]``."""

    name: str | None = None


class EndpointHints(Schema, frozen=True):
    """``endpoints[].hints``."""

    for_zones: tuple[Hint, ...] | None = None
    for_nodes: tuple[Hint, ...] | None = None


class EndpointJson(Schema, frozen=True):
    """``endpoints[]`` of an EndpointSlice."""

    addresses: list[str] | None = None
    conditions: EndpointConditions | None = None
    node_name: str | None = None
    hints: EndpointHints | None = None
    zone: str | None = None


class EndpointSliceJson(Schema, frozen=True):
    """A discovery.k8s.io/v1 EndpointSlice."""

    metadata: ObjectMetadata | None = None
    address_type: str | None = None
    ports: tuple[EndpointPortJson, ...] | None = None
    endpoints: tuple[EndpointJson, ...] | None = None


class Taint(Schema, frozen=True):
    """``spec.taints[]`` of a Node."""

    key: str | None = None


class NodeSpec(Schema, frozen=True):
    """``spec`` of a Node."""

    pod_cidr: str | None = msgspec.field(name="podCIDR", default=None)
    pod_cidrs: list[str] | None = msgspec.field(name="podCIDRs", default=None)
    taints: list[Taint] | None = None


class NodeAddress(Schema, frozen=True):
    """``status.addresses[]`` of a Node."""

    type: str | None = None
    address: str | None = None


class NodeStatus(Schema, frozen=True):
    """``status`` of a Node."""

    addresses: list[NodeAddress] | None = None


class NodeJson(Schema, frozen=True):
    """A core/v1 Node."""

    metadata: ObjectMetadata | None = None
    spec: NodeSpec | None = None
    status: NodeStatus | None = None


class StatusJson(Schema, frozen=True):
    """A ``Status`` object; an ERROR event, or the answer to a refused request, contains such an object."""

    code: int | None = None
    message: str | None = None
    reason: str | None = None
