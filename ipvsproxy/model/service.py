"""API objects as values: Services, EndpointSlices and the Node, with the fields that the proxy of a node needs; and owners."""

import enum
import uuid
from collections.abc import Set as AbstractSet
from typing import NamedTuple

import msgspec

from ipvsproxy.model.annotations import NO_ANNOTATIONS, ServiceAnnotations
from ipvsproxy.model.net import Address, Family, Network, Protocol
from ipvsproxy.model.real_servers import RealServerKey, pieces


class ObjectKey(msgspec.Struct, frozen=True, order=True, gc=False):
    """The key of an object of one kind. The namespace of a Node is empty. Keys of different kinds are never equal."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}" if self.namespace else self.name


class ServiceName(ObjectKey, frozen=True, order=True, gc=False):
    """Namespace and name of a Service."""


class Skipped(NamedTuple):
    """The reason why a field of an object is not used. An empty ``field`` means the whole object.

    ``invalid``: the field breaks the API's rules, and deserves a warning. Otherwise the object or field is not meant for a proxy
    (headless).
    """

    field: str
    reason: str
    invalid: bool = True

    def __str__(self) -> str:
        return f"{self.field}: {self.reason}" if self.field else self.reason


class ServiceType(enum.StrEnum):
    """``spec.type`` of a Service."""

    CLUSTER_IP = "ClusterIP"
    NODE_PORT = "NodePort"
    LOAD_BALANCER = "LoadBalancer"
    EXTERNAL_NAME = "ExternalName"


class ServicePort(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One entry of ``spec.ports``. ``node_port`` 0 means none."""

    name: str
    protocol: Protocol
    port: int
    node_port: int = 0


class ServiceOptions(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The fields that have their defaults in nearly all Services of a cluster. All such Services share one object.

    ``affinity_timeout_s`` 0 means no session affinity. ``load_balancer_addresses`` are the addresses of
    ``status.loadBalancer.ingress`` whose ``ipMode`` is VIP or absent. ``admits_nobody``: the Service has source ranges, but no
    valid one. The admitted clients are unknown, so no client is admitted.
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

_UUID_LENGTH = 36


def short_uid(text: str) -> int | str:
    """A UUID as a number, which takes half the memory of its text.

    A text that is no UUID stays as it is; no API server makes such a uid.
    """
    if len(text) != _UUID_LENGTH or text[8:24:5] != "----":
        return text
    digits = text.replace("-", "")
    try:
        number = int(digits, 16)
    except ValueError:
        return text
    return number if f"{number:032x}" == digits else text


class Service(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A Service. Nothing is programmed for a Service with ``not_served`` (headless, ExternalName).

    ``created_s`` is ``metadata.creationTimestamp`` in seconds since the epoch, 0 if unknown: of two Services that desire one
    address and port, the older one gets it. ``short_uid`` is the result of the function ``short_uid`` for ``metadata.uid``.
    """

    name: ServiceName
    short_uid: int | str = ""
    created_s: float = 0
    ports: tuple[ServicePort, ...] = ()
    cluster_addresses: tuple[Address, ...] = ()
    options: ServiceOptions = USUAL_OPTIONS

    @property
    def uid(self) -> str:
        """``metadata.uid``, which differs from the UID of a former Service with the same name."""
        return self.short_uid if isinstance(self.short_uid, str) else str(uuid.UUID(int=self.short_uid))

    @property
    def not_served(self) -> Skipped | None:
        """The reason why nothing is programmed for the Service; None if it is served."""
        return self.options.not_served

    @property
    def addresses(self) -> tuple[Address, ...]:
        """All addresses: cluster IPs, external IPs, load-balancer IPs."""
        return self.cluster_addresses + self.options.external_addresses + self.options.load_balancer_addresses

    @property
    def skipped(self) -> tuple[Skipped, ...]:
        """The fields that are not used, with reasons."""
        return self.options.skipped


class Conditions(msgspec.Struct, frozen=True, gc=False):
    """The fields of an endpoint in an EndpointSlice, except its addresses, with the API's defaults applied.

    ``weight`` is the value of its EndpointSlice's annotation, None without the annotation.
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
    """One entry of ``endpoints`` of an EndpointSlice, with its first address."""

    address: Address
    conditions: Conditions = Conditions()


class EndpointPort(NamedTuple):
    """One entry of ``ports`` of an EndpointSlice. The API server has resolved named target ports."""

    name: str
    protocol: Protocol
    port: int


class EndpointSliceName(ObjectKey, frozen=True, order=True, gc=False):
    """Namespace and name of an EndpointSlice."""


class EndpointSlice(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """An EndpointSlice.

    ``service`` is None if the slice belongs to no Service that is served: it lacks the label ``kubernetes.io/service-name``, or
    has the label ``service.kubernetes.io/headless``. ``family`` is None for an address type without addresses (FQDN).

    ``addresses`` are the packed addresses of all endpoints, one after the other, and ``conditions`` are their conditions in the
    same order. An object for each endpoint would take most of the memory in a large cluster; different conditions are few.

    ``trigger_s`` is the annotation ``endpoints.kubernetes.io/last-change-trigger-time`` in seconds since the epoch, 0 if absent.
    This is the time at which the change began; slices that differ in this time alone are equal.
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
        """The packed address of each endpoint, in a new list at each call."""
        return pieces(self.addresses, self.family.bits // 8 if self.family else 1)

    @property
    def endpoints(self) -> tuple[Endpoint, ...]:
        """The endpoints as objects, new at each call."""
        return tuple(map(Endpoint, map(Address, self.each_address), self.conditions))


class Node(msgspec.Struct, frozen=True, kw_only=True):
    """The Node of this process, or another one.

    ``addresses`` are its InternalIPs, then its ExternalIPs, in the API's order. ``zone`` is the label
    ``topology.kubernetes.io/zone``, empty if absent. ``leaving``: the Node is deleted, or has the cluster autoscaler's taint
    for deletion, so load balancers should send it no more traffic. ``takes_direct_return``: other nodes may send it packets by
    tunnel.
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
    """The kinds of API objects that are watched."""

    SERVICE = "Service"
    ENDPOINT_SLICE = "EndpointSlice"
    NODE = "Node"


ApiObject = Service | EndpointSlice | Node


class Put(NamedTuple):
    """An object is new, or has changed."""

    kind: ObjectKind
    key: ObjectKey
    object: ApiObject


class Gone(NamedTuple):
    """An object was deleted."""

    kind: ObjectKind
    key: ObjectKey


class ListStarted(NamedTuple):
    """A list of one kind begins. Until ``Listed`` or another ``ListStarted``, all events of this kind come from the list."""

    kind: ObjectKind


class Listed(NamedTuple):
    """A list of one kind is complete: objects with other ``keys`` do not exist any more."""

    kind: ObjectKind
    keys: AbstractSet[ObjectKey]


class Rejected(NamedTuple):
    """An object could not be parsed. The object's former version stays in force, so that a typing error interrupts no Service.

    ``field`` is empty if no single field is the reason.
    """

    kind: ObjectKind
    key: ObjectKey | None
    where: str
    reason: str
    field: str = ""


class ApiServersFound(NamedTuple):
    """The addresses and ports by which this process reaches its API servers, or tries to.

    Addresses of earlier events still count.
    """

    servers: frozenset[RealServerKey]


Event = Put | Gone | ListStarted | Listed | Rejected | ApiServersFound


REMEMBERED_S = 2.0**40
"""A time in seconds since the epoch, later than the creation of any Service.

A float of this size still resolves less than 1 ms.
"""


class Owner(msgspec.Struct, frozen=True, order=True, gc=False):
    """The Service, or the node, that desires a kernel object. Owners are in the order in which their Services were created.

    If several owners of one rank desire one key, the lowest owner gets it. A remembered Service is absent from the newest list,
    which is not confirmed yet. A remembered Service comes after all listed Services: its ``created_s`` is larger by
    ``REMEMBERED_S``. A separate field would take memory.
    """

    created_s: float
    service: ServiceName

    @property
    def is_remembered(self) -> bool:
        """Whether the Service is only remembered: the newest list lacks it."""
        return self.created_s >= REMEMBERED_S

    @property
    def remembered(self) -> "Owner":
        """The same owner, marked as remembered: the newest list lacks its Service."""
        return Owner(self.created_s + REMEMBERED_S, self.service)

    def __str__(self) -> str:
        return str(self.service) if self.service.namespace else self.service.name


NODE_OWNER = Owner(-1, ServiceName("", "(node)"))
"""The owner of objects that the node needs whatever Services exist: device, sets, rules, settings."""
