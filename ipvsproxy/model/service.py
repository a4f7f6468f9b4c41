"""API objects and the owners of kernel objects, as values.

The values of Services, EndpointSlices and Nodes have only the fields that a node's proxy needs.
"""

import enum
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import NamedTuple

import msgspec

from ipvsproxy.model.annotations import NO_ANNOTATIONS, ServiceAnnotations
from ipvsproxy.model.net import Address, Family, Network, Protocol
from ipvsproxy.model.real_servers import RealServerKey, pieces

MOST_SKIPPED = 20
"""The largest number of skipped parts of one object that are reported individually. Further parts are only counted."""


class ObjectKey(msgspec.Struct, frozen=True, order=True, gc=False):
    """The key of an API object among the objects of its kind.

    The namespace of a Node is empty. The keys of objects of different kinds are never equal.
    """

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}" if self.namespace else self.name


class ServiceName(ObjectKey, frozen=True, order=True, gc=False):
    """The namespace and name of a Service."""


class Skipped(NamedTuple):
    """The reason why a field of an object is not used. An empty ``field`` means that the whole object is not used.

    ``invalid`` means that the field breaks the API's rules, so a warning is logged. If ``invalid`` is false, the object or field
    is not meant for a proxy (for example, a headless Service).
    """

    field: str
    reason: str
    invalid: bool = True

    def __str__(self) -> str:
        return f"{self.field}: {self.reason}" if self.field else self.reason


def bounded(skipped: Sequence[Skipped]) -> tuple[Skipped, ...]:
    """The first ``MOST_SKIPPED`` skipped parts of an object; if there are more, a summary gives the number of further parts.

    The summary counts as invalid if at least one of the further parts is invalid.
    """
    rest = skipped[MOST_SKIPPED:]
    if not rest:
        return tuple(skipped)
    more = Skipped(rest[0].field, f"{rest[0].reason}; {len(rest)} such parts from here on", any(one.invalid for one in rest))
    return (*skipped[:MOST_SKIPPED], more)


class ServiceType(enum.StrEnum):
    """``spec.type`` of a Service."""

    CLUSTER_IP = "ClusterIP"
    NODE_PORT = "NodePort"
    LOAD_BALANCER = "LoadBalancer"
    EXTERNAL_NAME = "ExternalName"


class ServicePort(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One entry of a Service's ``spec.ports``. A ``node_port`` of 0 means that the Service port has no node port."""

    name: str
    protocol: Protocol
    port: int
    node_port: int = 0


class ServiceOptions(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The fields of a Service that have their default values in nearly all Services of a cluster.

    All Services that have only default values share one object. An ``affinity_timeout_s`` of 0 means that there is no session
    affinity. ``load_balancer_addresses`` are the addresses of ``status.loadBalancer.ingress`` whose ``ipMode`` is VIP or absent.
    ``admits_nobody`` means that the Service specifies source ranges, but every range is invalid. If every source range is
    invalid, it is unknown which clients to admit, so no client is admitted.
    """

    type: ServiceType = ServiceType.CLUSTER_IP
    external_addresses: tuple[Address, ...] = ()
    load_balancer_addresses: tuple[Address, ...] = ()
    source_ranges: tuple[Network, ...] = ()
    admits_nobody: bool = False
    affinity_timeout_s: int = 0
    internal_traffic_local: bool = False
    external_traffic_local: bool = False
    health_check_node_port: int = 0
    not_served: Skipped | None = None
    skipped: tuple[Skipped, ...] = ()
    annotations: ServiceAnnotations = NO_ANNOTATIONS


USUAL_OPTIONS = ServiceOptions()


class Service(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A Service. ``not_served`` is the reason why nothing is programmed for the Service (headless, ExternalName).

    ``created_s`` is ``metadata.creationTimestamp`` in seconds since the epoch, or 0 if the time is unknown. If two Services
    desire the same address and port, the older Service gets the address and port. ``uid`` is ``metadata.uid``, which differs from
    the UID of an earlier Service that had the same name.
    """

    name: ServiceName
    uid: str = ""
    created_s: float = 0
    ports: tuple[ServicePort, ...] = ()
    cluster_addresses: tuple[Address, ...] = ()
    options: ServiceOptions = USUAL_OPTIONS

    @property
    def not_served(self) -> Skipped | None:
        """The reason why nothing is programmed for the Service; None for a Service that is served."""
        return self.options.not_served

    @property
    def addresses(self) -> tuple[Address, ...]:
        """All addresses of the Service: cluster IPs, external IPs and load-balancer IPs."""
        return self.cluster_addresses + self.options.external_addresses + self.options.load_balancer_addresses

    @property
    def skipped(self) -> tuple[Skipped, ...]:
        """The fields of the Service that are not used, with reasons."""
        return self.options.skipped


class Conditions(msgspec.Struct, frozen=True, gc=False):
    """The fields of an endpoint except its addresses, with the API's defaults applied.

    ``weight`` is the value of the weight annotation on the EndpointSlice; None means that the annotation is absent.
    """

    ready: bool = True
    serving: bool = True
    terminating: bool = False
    node_name: str = ""
    zone_hints: frozenset[str] = frozenset()
    node_hints: frozenset[str] = frozenset()
    zone: str = ""
    weight: int | None = None


class Endpoint(NamedTuple):
    """One entry of ``endpoints`` of an EndpointSlice; only the first address of the entry is used."""

    address: Address
    conditions: Conditions = Conditions()


class EndpointPort(NamedTuple):
    """One entry of ``ports`` of an EndpointSlice.

    The API server has already replaced the name of each target port by the port's number.
    """

    name: str
    protocol: Protocol
    port: int


class EndpointSliceName(ObjectKey, frozen=True, order=True, gc=False):
    """The namespace and name of an EndpointSlice."""


class EndpointSlice(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """An EndpointSlice.

    ``service`` is None if the slice lacks the label ``kubernetes.io/service-name`` or has the label
    ``service.kubernetes.io/headless``. ``family`` is None if the slice's address type has no IP addresses (FQDN).

    ``addresses`` holds the packed addresses of all endpoints, one after the other, and ``conditions`` holds their conditions in
    the same order. In a large cluster, one object per endpoint would take most of the memory. Endpoints with equal conditions
    share one object, because there are only few different conditions.

    ``trigger_s`` is the annotation ``endpoints.kubernetes.io/last-change-trigger-time`` in seconds since the epoch; 0 means that
    the annotation is absent. The annotation gives the time at which a change of endpoints began; slices that differ only in
    ``trigger_s`` count as equal.
    """

    name: EndpointSliceName
    service: ServiceName | None
    family: Family | None
    ports: tuple[EndpointPort, ...] = ()
    addresses: bytes = b""
    conditions: tuple[Conditions, ...] = ()
    trigger_s: float = 0
    skipped: tuple[Skipped, ...] = ()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, EndpointSlice) and self._content == other._content

    def __hash__(self) -> int:
        return hash(self._content)

    @property
    def _content(self) -> tuple[object, ...]:
        return (self.name, self.service, self.family, self.ports, self.addresses, self.conditions, self.skipped)

    @property
    def each_address(self) -> list[bytes]:
        """The packed address of each endpoint; each call makes a new list."""
        return pieces(self.addresses, self.family.bits // 8 if self.family else 1)

    @property
    def endpoints(self) -> tuple[Endpoint, ...]:
        """The endpoints as objects; each call makes new objects."""
        return tuple(map(Endpoint, map(Address, self.each_address), self.conditions))


class Node(msgspec.Struct, frozen=True, kw_only=True):
    """A Node, either the Node on which this process runs or another Node.

    ``addresses`` are the Node's InternalIPs, followed by its ExternalIPs, in the API's order. ``zone`` is the value of the label
    ``topology.kubernetes.io/zone``, and is empty if the Node does not have the label. ``leaving`` means that the Node is being
    deleted, or has the cluster autoscaler's taint for deletion. ``takes_direct_return`` means that other nodes may send packets
    to the Node by tunnel.
    """

    name: str
    uid: str = ""
    zone: str = ""
    addresses: tuple[Address, ...] = ()
    pod_networks: tuple[Network, ...] = ()
    leaving: bool = False
    takes_direct_return: bool = False
    skipped: tuple[Skipped, ...] = ()


class ObjectKind(enum.StrEnum):
    """The kinds of API objects that ipvsproxy watches."""

    SERVICE = "Service"
    ENDPOINT_SLICE = "EndpointSlice"
    NODE = "Node"


ApiObject = Service | EndpointSlice | Node


class Put(NamedTuple):
    """The event that an object is new or has changed."""

    kind: ObjectKind
    key: ObjectKey
    object: ApiObject


class Gone(NamedTuple):
    """The event that an object was deleted."""

    kind: ObjectKind
    key: ObjectKey


class ListStarted(NamedTuple):
    """An event which reports that the list of all objects of one kind begins.

    Until a ``Listed`` or another ``ListStarted`` follows, all events of the same kind come from the list.
    """

    kind: ObjectKind


class Listed(NamedTuple):
    """An event which reports that the list of all objects of one kind is complete.

    Only objects whose keys are in ``keys`` still exist.
    """

    kind: ObjectKind
    keys: AbstractSet[ObjectKey]


class Rejected(NamedTuple):
    """An event which reports that an object could not be parsed.

    The last valid version of the object remains in use, so that a typing error does not interrupt a Service. ``field`` is empty
    if the reason does not concern one particular field.
    """

    kind: ObjectKind
    key: ObjectKey | None
    where: str
    reason: str
    field: str = ""


class ApiServersFound(NamedTuple):
    """An event which reports that this process now also tries to reach its API servers at the addresses and ports in ``servers``.

    The addresses and ports from earlier events remain valid.
    """

    servers: frozenset[RealServerKey]


Event = Put | Gone | ListStarted | Listed | Rejected | ApiServersFound


REMEMBERED_S = 2.0**40
"""The number of seconds that is added to the creation time of a remembered Service. It is larger than every Service's creation
time, because creation times are seconds since the epoch.

Floats of this size can still distinguish times that are less than 1 ms apart.
"""


class Owner(msgspec.Struct, frozen=True, order=True, gc=False):
    """The Service, or the node, that desires a kernel object. Owners are sorted by the creation time of their Services.

    If several owners of the same rank desire the same key, the owner that sorts first gets the key. A Service that is absent from
    the newest list is *remembered* until the list is confirmed. A remembered Service sorts after all listed Services, because its
    ``created_s`` is larger by ``REMEMBERED_S``; a separate field would take more memory.
    """

    created_s: float
    service: ServiceName

    @property
    def is_remembered(self) -> bool:
        """Whether the Service is only remembered, because it is absent from the newest list."""
        return self.created_s >= REMEMBERED_S

    @property
    def remembered(self) -> "Owner":
        """A copy of the owner, marked as remembered, because its Service is absent from the newest list."""
        return Owner(self.created_s + REMEMBERED_S, self.service)

    def __str__(self) -> str:
        return str(self.service) if self.service.namespace else self.service.name


NODE_OWNER = Owner(-1, ServiceName("", "(node)"))
"""The owner of objects that the node needs even if there is no Service: device, sets, rules, settings."""
