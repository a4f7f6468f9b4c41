"""What the API says: Services, EndpointSlices and the Node, as far as a node's proxy needs them."""

import enum
import uuid
from typing import NamedTuple

import msgspec

from ipvsproxy.model.net import Address, Family, Network, Protocol


class ObjectKey(msgspec.Struct, frozen=True, order=True, gc=False):
    """What names one object of one kind; the namespace of a Node is empty. Names of two kinds never equal each other."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}" if self.namespace else self.name


class ServiceName(ObjectKey, frozen=True, order=True, gc=False):
    """Namespace and name of a Service."""


class Skipped(NamedTuple):
    """Why a part of an object is not used. An empty ``field`` means the object as a whole.

    ``invalid`` tells a part that breaks the API's rules (worth a warning) from one that is simply not for us (headless).
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
    """What nearly all Services of a cluster have alike, and therefore share: one value for all that are as these defaults.

    ``affinity_timeout_s`` 0 means no session affinity. ``load_balancer_addresses`` are those of ``status.loadBalancer.ingress``
    whose ``ipMode`` is VIP or absent. ``admits_nobody``: there are source ranges, but none that can be read; who may come in is
    not known, so nobody may.
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


USUAL_OPTIONS = ServiceOptions()

_UUID_LENGTH = 36


def short_uid(text: str) -> int | str:
    """A UUID as its number, which takes half as much memory; any other text, which no API server makes, as it is."""
    if len(text) != _UUID_LENGTH or text[8:24:5] != "----":
        return text
    digits = text.replace("-", "")
    try:
        number = int(digits, 16)
    except ValueError:
        return text
    return number if f"{number:032x}" == digits else text


class Service(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A Service. What it may not have (headless, ExternalName) is said in ``not_served``, and nothing of it is programmed.

    ``created_s`` is ``metadata.creationTimestamp`` in seconds since the epoch, 0 when unknown: of two Services that want one
    address and port the older one gets it. ``short_uid`` is what ``short_uid`` makes of ``metadata.uid``.
    """

    name: ServiceName
    short_uid: int | str = ""
    created_s: float = 0
    ports: tuple[ServicePort, ...] = ()
    cluster_addresses: tuple[Address, ...] = ()
    options: ServiceOptions = USUAL_OPTIONS

    @property
    def uid(self) -> str:
        """``metadata.uid``, which tells it from a former Service of its name."""
        return self.short_uid if isinstance(self.short_uid, str) else str(uuid.UUID(int=self.short_uid))

    @property
    def not_served(self) -> Skipped | None:
        """Why nothing of it is programmed; None when it is."""
        return self.options.not_served

    @property
    def skipped(self) -> tuple[Skipped, ...]:
        """What of it is not used."""
        return self.options.skipped


class Conditions(msgspec.Struct, frozen=True, gc=False):
    """What an EndpointSlice says of an endpoint but its addresses, with the API's defaults applied."""

    ready: bool = True
    serving: bool = True
    terminating: bool = False
    node_name: str = ""
    zone_hints: frozenset[str] = frozenset()
    node_hints: frozenset[str] = frozenset()


class Endpoint(NamedTuple):
    """One entry of ``endpoints`` of an EndpointSlice, by its first address."""

    address: Address
    conditions: Conditions = Conditions()


class EndpointPort(NamedTuple):
    """One entry of ``ports`` of an EndpointSlice; named target ports are resolved already."""

    name: str
    protocol: Protocol
    port: int


class EndpointSliceName(ObjectKey, frozen=True, order=True, gc=False):
    """Namespace and name of an EndpointSlice."""


class EndpointSlice(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """An EndpointSlice.

    ``service`` is None when it serves nobody: the label ``kubernetes.io/service-name`` is missing, or the label
    ``service.kubernetes.io/headless`` is there. ``family`` is None for an address type that has no addresses (FQDN).
    ``addresses`` are those of all endpoints, packed and one after the other, and ``conditions`` theirs, in the same order. An
    object for each endpoint would be most of what is to be made and kept in a large cluster; different conditions are few.
    ``trigger_s`` is the annotation ``endpoints.kubernetes.io/last-change-trigger-time`` in seconds since the epoch, 0 when
    absent; it says when the change began, not what is served, so two slices that differ only there are equal.
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
    def endpoints(self) -> tuple[Endpoint, ...]:
        """The endpoints one by one, made at each call."""
        size = self.family.bits // 8 if self.family else 0
        each = (Address(self.addresses[number * size : (number + 1) * size]) for number in range(len(self.conditions)))
        return tuple(map(Endpoint, each, self.conditions))


class Node(msgspec.Struct, frozen=True, kw_only=True):
    """The Node that this process runs on.

    ``addresses`` are its InternalIPs, then its ExternalIPs, in the API's order. ``zone`` is the label
    ``topology.kubernetes.io/zone``, empty when absent. ``leaving`` means deleted, or tainted for deletion by the cluster
    autoscaler: load balancers should stop sending.
    """

    name: str
    uid: str = ""
    zone: str = ""
    addresses: tuple[Address, ...] = ()
    pod_networks: tuple[Network, ...] = ()
    leaving: bool = False
    skipped: tuple[Skipped, ...] = ()


class ObjectKind(enum.StrEnum):
    """The kinds of API objects that are watched."""

    SERVICE = "Service"
    ENDPOINT_SLICE = "EndpointSlice"
    NODE = "Node"


ApiObject = Service | EndpointSlice | Node


class Put(NamedTuple):
    """An object was seen for the first time or has changed."""

    kind: ObjectKind
    key: ObjectKey
    object: ApiObject


class Gone(NamedTuple):
    """An object was deleted."""

    kind: ObjectKind
    key: ObjectKey


class Listing(NamedTuple):
    """A list of one kind begins: until ``Listed`` or another ``Listing``, whatever is told of this kind stands on it."""

    kind: ObjectKind


class Listed(NamedTuple):
    """A complete list of one kind has been delivered: what is not among ``keys`` does not exist any more."""

    kind: ObjectKind
    keys: frozenset[ObjectKey]


class Rejected(NamedTuple):
    """An object could not be read at all. What was known of it before stays in force: nothing is lost to a typing error."""

    kind: ObjectKind
    key: ObjectKey | None
    where: str
    reason: str


Event = Put | Gone | Listing | Listed | Rejected
