"""The schema of the API's JSON, limited to the fields that are read. Unknown fields are ignored; a null value counts as absent.

Only the modules of this package use these types.
"""

import msgspec

from ipvsproxy.model.annotations import Annotation


class Schema(msgspec.Struct, rename="camel", frozen=True, gc=False):
    """The base of all types: camelCase in JSON, frozen, and not tracked by the garbage collector, because there are no cycles.

    A value that contains no lists can be the key of a dictionary, so equal values are parsed only once. Therefore fields that
    many objects share are tuples where the API has lists.
    """


_LABELS = {
    "service": "kubernetes.io/service-name",
    "zone": "topology.kubernetes.io/zone",
    "proxy_name": "service.kubernetes.io/service-proxy-name",
    "headless": "service.kubernetes.io/headless",
}


class ObjectLabels(Schema, frozen=True, rename=_LABELS):
    """The labels that are read. For the last two labels, only their presence counts."""

    service: str | None = None
    zone: str | None = None
    proxy_name: str | None = None
    headless: str | None = None


_SERVICE_ANNOTATIONS = {
    **{item.name.lower(): item.whole for item in Annotation},
    "alias_scheduler": "kube-router.io/service.scheduler",
    "alias_scheduler_flags": "kube-router.io/service.schedflags",
    "alias_skip_load_balancer_ips": "kube-router.io/service.skiplbips",
}
"""The names of the annotations of Services that are read, by field."""


class ServiceAnnotationsJson(Schema, frozen=True, rename=_SERVICE_ANNOTATIONS):
    """The annotations of Services that are read from the API. An ``alias`` is the name that kube-router uses."""

    scheduler: str | None = None
    scheduler_flags: str | None = None
    weights: str | None = None
    slow_start: str | None = None
    max_connections: str | None = None
    resume_connections: str | None = None
    drain_deadline: str | None = None
    affinity_netmask: str | None = None
    skip_load_balancer_ips: str | None = None
    direct_return: str | None = None
    alias_scheduler: str | None = None
    alias_scheduler_flags: str | None = None
    alias_skip_load_balancer_ips: str | None = None


_SLICE_ANNOTATIONS = {
    "trigger_time": "endpoints.kubernetes.io/last-change-trigger-time",
    "weight": Annotation.WEIGHT.whole,
    "alias_weight": "service.cilium.io/weight",
}


class SliceAnnotations(Schema, frozen=True, rename=_SLICE_ANNOTATIONS):
    """The annotations of EndpointSlices that are read from the API. The alias is the name that Cilium uses."""

    trigger_time: str | None = None
    weight: str | None = None
    alias_weight: str | None = None


class Metadata(Schema, frozen=True):
    """``metadata`` of an object of any kind, of a list, or of a bookmark."""

    name: str | None = None
    namespace: str | None = None
    uid: str | None = None
    resource_version: str | None = None
    creation_timestamp: str | None = None
    deletion_timestamp: str | None = None
    labels: ObjectLabels | None = None


class ServiceMetadata(Metadata, frozen=True):
    """``metadata`` of a Service."""

    annotations: ServiceAnnotationsJson | None = None


class SliceMetadata(Metadata, frozen=True):
    """``metadata`` of an EndpointSlice."""

    annotations: SliceAnnotations | None = None


class NodeAnnotations(Schema, frozen=True, rename={"direct_return": Annotation.DIRECT_RETURN.whole}):
    """The annotation of Nodes that is read."""

    direct_return: str | None = None


class NodeMetadata(Metadata, frozen=True):
    """``metadata`` of a Node."""

    annotations: NodeAnnotations | None = None


class AnyObject(Schema, frozen=True):
    """An object that breaks the schema of its kind: only its name is read."""

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

    metadata: ServiceMetadata | None = None
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

    metadata: SliceMetadata | None = None
    address_type: str | None = None
    ports: tuple[EndpointPortJson, ...] | None = None
    endpoints: list[EndpointJson] | None = None


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

    metadata: NodeMetadata | None = None
    spec: NodeSpec | None = None
    status: NodeStatus | None = None


class StatusJson(Schema, frozen=True):
    """A ``Status`` object, which is contained in an ERROR event or in the answer to a refused request."""

    code: int | None = None
    message: str | None = None
    reason: str | None = None
