"""The objects of a random cluster: Services of all kinds, and their endpoints. Services are added, changed and deleted.

The readiness of the endpoints changes often.

Each Service has its own addresses and node ports, so that no two Services desire the same virtual server. The *anchors* never
change, and their clients must not notice changes of other Services. The *flapping* Service keeps its ports while its endpoints
come and go. Open connections to the *flapping* Service must not break, because a removed endpoint is drained.
"""

import random
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

Object = dict[str, Any]

SERVICES = 8
LOCAL_PODS, REMOTE_PODS = ("11", "12"), ("11", "12")
ANSWERING = (*(f"10.244.0.{pod}" for pod in LOCAL_PODS), *(f"10.244.1.{pod}" for pod in REMOTE_PODS))
SILENT = tuple(f"10.244.1.{number}" for number in range(100, 110))
"""Addresses of endpoints without a pod."""
TARGETS: Mapping[str, int] = {"TCP": 8080, "UDP": 8053, "SCTP": 8080}
PORT_NAMES: Mapping[str, str] = {"TCP": "http", "UDP": "dns"}
NODE = "node-a"
OTHER_NODES: Mapping[str, tuple[str, ...]] = {
    "node-b": ("172.18.0.3", "fc00:f853:ccd::3"),
    "node-c": ("172.18.0.4", "fc00:f853:ccd::4"),
}
DIRECT_RETURN = "ipvsproxy.io/direct-return"


class Key(NamedTuple):
    """The kind and name of an object; all objects are in the namespace ``default``."""

    kind: str
    name: str


class Question(NamedTuple):
    """A request that must always be answered, because the anchors never change."""

    from_: str
    protocol: str
    to: str
    port: int

    def __str__(self) -> str:
        return f"{self.protocol} {self.from_} -> {self.to}:{self.port}"


QUESTIONS = (
    Question("p2", "TCP", "10.96.0.10", 80),
    Question("client", "TCP", "172.18.0.2", 30080),
    Question("p1", "UDP", "10.96.0.11", 53),
    Question("p2", "TCP", "fd00:96::10", 80),
    Question("client", "TCP", "203.0.113.12", 80),
    Question("p2", "TCP", "203.0.113.13", 80),
)
CLOSED = Question("client", "TCP", "203.0.113.30", 80)
"""A request that is answered only while the source ranges of ``closed_service`` include the client."""
FIRST_CHECKED_PORT = 32200
HELD = (*(question for question in QUESTIONS if question.protocol == "TCP"), Question("p1", "TCP", "10.96.0.20", 80))
"""The targets of the connections that stay open; the last target is an address of the flapping Service."""


def anchors() -> Iterator[Object]:
    """The Node and the Services that never change, with their endpoints.

    If a client sends requests to several Services, these Services share no endpoint. To find the connection to which an answer
    belongs, IPVS uses the client's address and port, and the endpoint. If two connections from one client port went through two
    virtual servers to one endpoint, one of them would lose its answers.
    """
    addresses = [{"type": "InternalIP", "address": address} for address in ("172.18.0.2", "fc00:f853:ccd::2")]
    yield _object("v1", "Node", {"name": NODE}, status={"addresses": addresses}, spec={"podCIDR": "10.244.0.0/24"})
    yield _service("anchor", ["10.96.0.10", "fd00:96::10"], [_port("http", "TCP", 80)])
    yield _slice("anchor-a", "anchor", ["TCP"], {"10.244.0.11": {}, "10.244.1.11": {}})
    yield _slice("anchor-b", "anchor", ["TCP"], {"fd00:10:244::11": {}, "fd00:10:244:1::11": {}})
    yield _service(
        "anchor-node", ["10.96.0.11"], [_port("http", "TCP", 80, 30080), _port("dns", "UDP", 53, 30053)], type="NodePort"
    )
    yield _slice("anchor-node-a", "anchor-node", ["TCP", "UDP"], {"10.244.0.12": {}, "10.244.1.12": {}})
    balanced = {"type": "LoadBalancer", "loadBalancerSourceRanges": ["172.18.0.0/24", "10.244.0.0/16"]}
    balanced_ports = [_port("http", "TCP", 80, 30081)]
    item = _service("anchor-balanced", ["10.96.0.12"], balanced_ports, **balanced)
    yield item | {"status": {"loadBalancer": {"ingress": [{"ip": "203.0.113.12"}]}}}
    yield _slice("anchor-balanced-a", "anchor-balanced", ["TCP"], {"10.244.0.11": {}, "10.244.1.11": {}})
    local = {"type": "LoadBalancer", "externalTrafficPolicy": "Local"}
    item = _service("anchor-local", ["10.96.0.13"], [_port("http", "TCP", 80, 30082)], **local)
    yield item | {"status": {"loadBalancer": {"ingress": [{"ip": "203.0.113.13"}]}}}
    yield _slice("anchor-local-a", "anchor-local", ["TCP"], {"10.244.1.12": {}})
    yield _service("flapping", ["10.96.0.20"], [_port("http", "TCP", 80)])
    yield _slice("flapping-a", "flapping", ["TCP"], {address: {} for address in ANSWERING})


class World:
    """All objects by key. A change consists of the objects to put, and the keys of the objects to delete."""

    def __init__(self, dice: random.Random, *, direct_return: bool = False) -> None:
        """With ``direct_return``, other Nodes come and go, and some Nodes and Services have the annotation for direct return."""
        self._dice = dice
        self._direct_return = direct_return
        self.objects: dict[Key, Object] = {key_of(item): item for item in anchors()}

    def change(self) -> tuple[str, list[Object], list[Key]]:
        """Make one random change; return its description, the objects to put, and the keys to delete."""
        number = self._dice.randrange(SERVICES)
        name = f"s{number}"
        known = Key("Service", name) in self.objects
        choices = [
            "flap",
            *["node"] * (2 if self._direct_return else 0),
            *(["endpoints", "endpoints", "split", "change", "delete"] if known else ["create"] * 3),
        ]
        match self._dice.choice(choices):
            case "flap":
                what, after = "endpoints of flapping", self._slices("flapping", ["TCP"], ANSWERING, 1)
                return self._replace(what, "flapping", after)
            case "node":
                return self._change_node()
            case ("create" | "change") as what:
                service = self._random_service(number)
                return self._replace(f"{what} {name}", name, self._random_slices(name, service), service)
            case "delete":
                gone = [key for key in self.objects if key == Key("Service", name) or key.name.startswith(f"{name}-")]
                for key in gone:
                    del self.objects[key]
                return f"delete {name}", [], gone
            case what:
                service = self.objects[Key("Service", name)]
                return self._replace(f"{what} of {name}", name, self._random_slices(name, service))

    def _change_node(self) -> tuple[str, list[Object], list[Key]]:
        """Add or delete one of ``OTHER_NODES``, or change its annotation."""
        name = self._dice.choice(list(OTHER_NODES))
        what = self._dice.choice(["with direct return", "with direct return", "without direct return", "deleted"])
        key = Key("Node", name)
        if what == "deleted":
            return f"Node {name} {what}", [], [key] if self.objects.pop(key, None) else []
        addresses = [{"type": "InternalIP", "address": address} for address in OTHER_NODES[name]]
        metadata = {"name": name, "annotations": {DIRECT_RETURN: str(what.startswith("with ")).lower()}}
        item = self.objects[key] = _object("v1", "Node", metadata, status={"addresses": addresses})
        return f"Node {name} {what}", [item], []

    def ipv6_objects(self) -> list[Object]:
        """All Services with an IPv6 cluster IP, and their EndpointSlices."""
        names = {
            key.name
            for key, item in self.objects.items()
            if key.kind == "Service" and any(":" in address for address in item["spec"].get("clusterIPs", ()))
        }
        return [item for key, item in self.objects.items() if (key.name if key.kind == "Service" else _service_of(item)) in names]

    def put(self, items: Iterable[Object]) -> None:
        """Add or replace objects."""
        self.objects |= {key_of(item): item for item in items}

    def health_check_ports(self) -> frozenset[int]:
        """The health-check node ports of the present Services."""
        ports = (item["spec"].get("healthCheckNodePort") for item in self.objects.values() if item["kind"] == "Service")
        return frozenset(port for port in ports if port)

    def _replace(self, what: str, name: str, slices: list[Object], *service: Object) -> tuple[str, list[Object], list[Key]]:
        """Put these EndpointSlices, and delete all other EndpointSlices of the Service.

        If the Service itself is given, put it, too.
        """
        put = [*service, *slices]
        kept = {key_of(item) for item in put}
        gone = [
            key for key in self.objects if key.kind == "EndpointSlice" and key.name.startswith(f"{name}-") and key not in kept
        ]
        for key in gone:
            del self.objects[key]
        self.objects |= {key_of(item): item for item in put}
        return what, put, gone

    def _random_service(self, number: int) -> Object:
        dice = self._dice
        kind = dice.choice(["ClusterIP", "NodePort", "LoadBalancer", "ClusterIP", "headless", "ExternalName"])
        families = dice.choice([["10.96.1.{}"], ["10.96.1.{}", "fd00:96::1:{}"], ["fd00:96::1:{}"]])
        addresses = [text.format(number) for text in families]
        protocols = dice.sample(["TCP", "UDP", "SCTP"], dice.randint(1, 3))
        has_node_ports = kind in ("NodePort", "LoadBalancer")
        ports = [
            _port(protocol.lower(), protocol, 100 + place, 31000 + 10 * number + place if has_node_ports else 0)
            for place, protocol in enumerate(protocols)
        ]
        name = f"s{number}"
        if kind == "headless":
            return _service(name, ["None"], ports)
        if kind == "ExternalName":
            return _object("v1", "Service", {"name": name}, spec={"type": kind, "externalName": "example.org"})
        more: Object = {"type": kind, "internalTrafficPolicy": dice.choice(["Cluster", "Cluster", "Local"])}
        if dice.random() < 0.3:
            more |= {
                "sessionAffinity": "ClientIP",
                "sessionAffinityConfig": {"clientIP": {"timeoutSeconds": dice.choice([10, 600])}},
            }
        if dice.random() < 0.3:
            more["externalIPs"] = [f"198.51.100.{number}"]
        asks = self._direct_return and dice.random() < 0.7
        if has_node_ports:
            more["externalTrafficPolicy"] = dice.choice(["Cluster", "Local"])
        item = _service(name, addresses, ports, **more)
        item["metadata"] |= {"annotations": {DIRECT_RETURN: "true"}} if asks else {}
        if kind == "LoadBalancer":
            item["status"] = {"loadBalancer": {"ingress": [{"ip": f"203.0.113.{100 + number}"}]}}
            ranges = dice.choice([[], ["172.18.0.0/24"], ["192.0.2.1/32", "172.18.0.0/16"], ["0.0.0.0/0"]])
            item["spec"] |= {"loadBalancerSourceRanges": ranges} if ranges else {}
            if item["spec"]["externalTrafficPolicy"] == "Local":
                item["spec"]["healthCheckNodePort"] = 32000 + number
        return item

    def _random_slices(self, name: str, service: Object) -> list[Object]:
        protocols = [port["protocol"] for port in service["spec"].get("ports", [])]
        return self._slices(name, protocols, (*ANSWERING, *SILENT), 0) if protocols else []

    def _slices(self, name: str, protocols: list[str], addresses: tuple[str, ...], least: int) -> list[Object]:
        """Returns one to three EndpointSlices with a random choice of the addresses; an address may be in two EndpointSlices."""
        dice = self._dice
        chosen = dice.sample(addresses, dice.randint(least, min(6, len(addresses))))
        parts: list[dict[str, Object]] = [{} for _ in range(dice.randint(1, 3))]
        for address in chosen:
            for part in dice.sample(parts, 2 if len(parts) > 1 and dice.random() < 0.1 else 1):
                part[address] = (
                    {}
                    if least
                    else dice.choice([{}, {}, {}, {"ready": False}, {"ready": False, "serving": True, "terminating": True}])
                )
        return [_slice(f"{name}-{chr(ord('a') + place)}", name, protocols, part) for place, part in enumerate(parts)]


def closed_service(*, is_open: bool = False) -> list[Object]:
    """A load balancer; its source ranges include the client if ``is_open`` is true, and exclude the client otherwise.

    The client of ``CLOSED`` sends requests to this load balancer.
    """
    ranges = ["192.0.2.1/32", *(["172.18.0.0/16"] if is_open else [])]
    more = {"type": "LoadBalancer", "loadBalancerSourceRanges": ranges}
    item = _service("closed", ["10.96.0.30"], [_port("http", "TCP", 80, 30090)], **more)
    item |= {"status": {"loadBalancer": {"ingress": [{"ip": CLOSED.to}]}}}
    return [item, _slice("closed-a", "closed", ["TCP"], {"10.244.0.12": {}})]


def checked_services(count: int) -> list[Object]:
    """Returns this many Services, each with a health-check node port; the ports are numbered from ``FIRST_CHECKED_PORT`` on."""
    services = []
    for number in range(count):
        more = {
            "type": "LoadBalancer",
            "externalTrafficPolicy": "Local",
            "healthCheckNodePort": FIRST_CHECKED_PORT + number,
        }
        ports = [_port("http", "TCP", 80, FIRST_CHECKED_PORT + 100 + number)]
        item = _service(f"checked-{number}", [f"10.96.2.{number}"], ports, **more)
        services.append(item | {"status": {"loadBalancer": {"ingress": [{"ip": f"203.0.113.{200 + number}"}]}}})
    return services


def key_of(item: Object) -> Key:
    """The key of an object."""
    return Key(item["kind"], item["metadata"]["name"])


def _service_of(item: Object) -> str:
    """The Service of an EndpointSlice."""
    return str(item["metadata"].get("labels", {}).get("kubernetes.io/service-name", ""))


def _object(version: str, kind: str, metadata: Object, **rest: Any) -> Object:
    return {"apiVersion": version, "kind": kind, "metadata": metadata, **rest}


def _port(name: str, protocol: str, port: int, node_port: int = 0) -> Object:
    return {"name": name, "protocol": protocol, "port": port} | ({"nodePort": node_port} if node_port else {})


def _service(name: str, addresses: list[str], ports: list[Object], **more: Any) -> Object:
    spec = {"type": "ClusterIP", "clusterIP": addresses[0], "clusterIPs": addresses, "ports": ports} | more
    return _object("v1", "Service", {"name": name, "namespace": "default"}, spec=spec)


def _slice(name: str, service: str, protocols: list[str], endpoints: Mapping[str, Object]) -> Object:
    is_random = service.startswith("s")
    ports = [{"name": one.lower() if is_random else PORT_NAMES[one], "protocol": one, "port": TARGETS[one]} for one in protocols]
    ipv6 = any(":" in address for address in endpoints)
    entries = [
        {"addresses": [address], "conditions": dict(conditions), "nodeName": _node_of(address)}
        for address, conditions in endpoints.items()
    ]
    metadata = {"name": name, "namespace": "default", "labels": {"kubernetes.io/service-name": service}}
    rest = {"addressType": "IPv6" if ipv6 else "IPv4", "ports": ports, "endpoints": entries}
    return _object("discovery.k8s.io/v1", "EndpointSlice", metadata, **rest)


def _node_of(address: str) -> str:
    if address.startswith(("10.244.0.", "fd00:10:244::")):
        return NODE
    return "node-c" if address[-1] in "02468" else "node-b"
