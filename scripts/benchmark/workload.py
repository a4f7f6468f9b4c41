"""Makes a cluster of a given size, as pages of lists and lines of watches.

    python -m scripts.benchmark.workload DIRECTORY SERVICES ENDPOINTS [NODES [FORM]]

writes the pages into a directory, so that the process that reads the pages does not keep them in memory. The objects have all
fields of real objects, including managed fields: an EndpointSlice with ten endpoints has about 4 kB. Pods are spread evenly over
the nodes; by default, there are as many nodes as the pods need, but at least ten. FORM is an index into ``FORMS``.
"""

import itertools
import json
import pathlib
import sys
from collections import deque
from collections.abc import Iterator
from typing import Any

NODE = "node-0"
PAGE_ITEMS = 500
SLICE_ENDPOINTS = 100
"""The largest number of endpoints that the EndpointSlice controller puts into one slice by default."""
PODS_PER_NODE = 110
"""Maximum of pods on a node: the kubelet's default (maxPods), and Kubernetes' limit for large clusters."""
FEWEST_NODES = 10
KINDS = ("services", "endpointslices", "nodes")
_NAMESPACES = 50
_CREATED = "2026-01-01T00:00:00Z"
_TRIGGER = "2026-01-01T00:00:05.123456Z"


def cluster_address(number: int) -> str:
    """The cluster IP of the Service with this number; the first addresses of the range are not used."""
    return f"10.{96 + (number + 10 >> 16)}.{number + 10 >> 8 & 255}.{number + 10 & 255}"


def balancer_address(number: int) -> str:
    """For the Service with this number: the address of its load balancer, if it has one."""
    return f"198.{18 + (number + 10 >> 16)}.{number + 10 >> 8 & 255}.{number + 10 & 255}"


def pod_address(number: int) -> str:
    """The address of the pod with this number."""
    return f"10.{128 + (number + 10 >> 16)}.{number + 10 >> 8 & 255}.{number + 10 & 255}"


def ipv6_cluster_address(number: int) -> str:
    """The cluster IP of the Service with this number, in IPv6."""
    return f"fd00:96::{number + 10 >> 16:x}:{number + 10 & 0xFFFF:x}"


def ipv6_pod_address(number: int) -> str:
    """The IPv6 address of the pod with this number. The address is inside ``program.CLUSTER_CIDR``."""
    return f"fd00:128::{number + 10 >> 16:x}:{number + 10 & 0xFFFF:x}"


def ipv6_service(number: int) -> dict[str, Any]:
    """The IPv6 form of the Service that ``service`` makes."""
    item, address = service(number), ipv6_cluster_address(number)
    item["spec"] |= {"clusterIP": address, "clusterIPs": [address], "ipFamilies": ["IPv6"]}
    return item


def ipv6_slices(number: int, endpoints: int, nodes: int) -> Iterator[dict[str, Any]]:
    """The IPv6 form of the EndpointSlices that ``slices`` makes."""
    first = number * endpoints
    for part, item in enumerate(slices(number, endpoints, nodes)):
        item["addressType"] = "IPv6"
        for place, endpoint in enumerate(item["endpoints"]):
            endpoint["addresses"] = [ipv6_pod_address(first + part * SLICE_ENDPOINTS + place)]
        yield item


def balanced(number: int) -> dict[str, Any]:
    """A Service with one port, a load balancer and externalTrafficPolicy Local."""
    item = service(number)
    item["spec"] |= {"type": "LoadBalancer", "externalTrafficPolicy": "Local", "allocateLoadBalancerNodePorts": False}
    item["status"] = {"loadBalancer": {"ingress": [{"ip": balancer_address(number), "ipMode": "VIP"}]}}
    return item


def direct(number: int) -> dict[str, Any]:
    """A Service with one port, a load balancer and direct return."""
    item = balanced(number)
    item["metadata"]["annotations"] = {"ipvsproxy.io/direct-return": "true"}
    item["spec"]["externalTrafficPolicy"] = "Cluster"
    return item


def annotated(number: int) -> dict[str, Any]:
    """A Service that chooses a scheduler, weights and slow start."""
    item = service(number)
    item["metadata"]["annotations"] = {
        "ipvsproxy.io/scheduler": "wlc",
        "ipvsproxy.io/weights": "zone/zone-a=10, zone/zone-b=1, other=5",
        "ipvsproxy.io/slow-start": "30s",
    }
    return item


def service(number: int, version: int = 1) -> dict[str, Any]:
    """A ClusterIP Service with one port."""
    name = _name(number)
    spec = {
        "clusterIP": cluster_address(number),
        "clusterIPs": [cluster_address(number)],
        "internalTrafficPolicy": "Cluster",
        "ipFamilies": ["IPv4"],
        "ipFamilyPolicy": "SingleStack",
        "ports": [{"name": "http", "protocol": "TCP", "port": 80, "targetPort": 8080}],
        "selector": {"app": name},
        "sessionAffinity": "None",
        "type": "ClusterIP",
    }
    metadata = _metadata(name, number, {"app": name}, {"f:spec": {"f:ports": {}, "f:selector": {}, "f:type": {}}}, version)
    return {"metadata": metadata, "spec": spec, "status": {"loadBalancer": {}}}


def nodes_for(pods: int) -> int:
    """The number of nodes that this number of pods needs, but at least ``FEWEST_NODES``."""
    return max(FEWEST_NODES, -(-pods // PODS_PER_NODE))


def endpoint_slice(number: int, part: int, pods: list[int], version: int = 1, nodes: int = FEWEST_NODES) -> dict[str, Any]:
    """One slice of a Service, with these pods as endpoints, in a cluster of this number of nodes."""
    name = _name(number)
    labels = {
        "app": name,
        "endpointslice.kubernetes.io/managed-by": "endpointslice-controller.k8s.io",
        "kubernetes.io/service-name": name,
    }
    metadata = _metadata(f"{name}-{part:05x}", number, labels, {"f:endpoints": {}, "f:ports": {}, "f:addressType": {}}, version)
    metadata["annotations"] = {"endpoints.kubernetes.io/last-change-trigger-time": _TRIGGER}
    return {
        "metadata": metadata,
        "addressType": "IPv4",
        "endpoints": [_endpoint(pod, metadata["namespace"], nodes) for pod in pods],
        "ports": [{"name": "http", "port": 8080, "protocol": "TCP"}],
    }


def node() -> dict[str, Any]:
    """Our Node."""
    return {
        "metadata": {"name": NODE, "resourceVersion": "1", "labels": {"topology.kubernetes.io/zone": "zone-a"}},
        "spec": {"podCIDR": "10.128.0.0/24", "podCIDRs": ["10.128.0.0/24"]},
        "status": {"addresses": [{"type": "InternalIP", "address": "172.18.0.2"}, {"type": "Hostname", "address": NODE}]},
    }


def other_node(number: int, version: int = 1) -> dict[str, Any]:
    """The Node object of another node than the node under test. The other node takes part in direct return."""
    addresses = [{"type": "InternalIP", "address": f"172.{19 + (number >> 16)}.{number >> 8 & 255}.{number & 255}"}]
    metadata = {"name": f"node-{number}", "resourceVersion": str(version), "annotations": {"ipvsproxy.io/direct-return": "true"}}
    return {"metadata": metadata, "spec": {}, "status": {"addresses": addresses}}


def slices(number: int, endpoints: int, nodes: int) -> Iterator[dict[str, Any]]:
    """The EndpointSlices of the Service ``number``, which has ``endpoints`` endpoints, in a cluster of ``nodes`` nodes."""
    first = number * endpoints
    for start in range(0, endpoints, SLICE_ENDPOINTS):
        pods = range(first + start, first + min(start + SLICE_ENDPOINTS, endpoints))
        yield endpoint_slice(number, start // SLICE_ENDPOINTS, list(pods), nodes=nodes)


def node_of(pod: int, nodes: int) -> str:
    """The name of the node on which the pod with this number runs; the first node is the node under test."""
    return f"node-{pod % nodes}"


class Replacements:
    """Makes watch lines for a cluster of this size. Each line replaces one endpoint by another endpoint.

    Both endpoints are on nodes other than the node under test. Changes of local endpoints would take more work, because local
    endpoints also have set entries.
    """

    def __init__(self, services: int, endpoints: int) -> None:
        self._services = services
        self._endpoints = endpoints
        self._version = 2_000_000
        self._nodes = nodes_for(services * endpoints)
        self._new_pods = itertools.filterfalse(self._is_local, itertools.count(services * endpoints + 20_000))
        self._pods: dict[int, deque[int]] = {}

    def line(self, number: int) -> bytes:
        """Replace the oldest remote endpoint in the first slice of this Service.

        If this slice has no remote endpoint, replace the oldest remote endpoint of the next Service instead.

        Raises:
            ValueError: the next Service also has no remote endpoint.
        """
        for service_number in (number, (number + 1) % self._services):
            first = service_number * self._endpoints
            pods = self._pods.setdefault(service_number, deque(range(first, first + min(self._endpoints, SLICE_ENDPOINTS))))
            replaced = next(itertools.filterfalse(self._is_local, pods), None)
            if replaced is not None:
                pods.remove(replaced)
                pods.append(next(self._new_pods))
                self._version += 1
                return line("MODIFIED", endpoint_slice(service_number, 0, list(pods), self._version, self._nodes))
        raise ValueError(f"neither Service {number} nor the next one has an endpoint on another node")

    def _is_local(self, pod: int) -> bool:
        return node_of(pod, self._nodes) == NODE

    def forget(self) -> None:
        """Free the memory of replaced endpoints. After this call, ``line`` must not be called."""
        self._pods.clear()


FORMS = (service, balanced, annotated, ipv6_service, direct)
"""The forms of Services: plain Services, load balancers with externalTrafficPolicy Local, Services with annotations, IPv6
Services with IPv6 endpoints, and Services with direct return in a cluster in which all other Nodes take part.
"""


def line(what: str, item: dict[str, Any]) -> bytes:
    """Returns one line of a watch."""
    return json.dumps({"type": what, "object": item}, separators=(",", ":")).encode() + b"\n"


def write(directory: pathlib.Path, services: int, endpoints: int, nodes: int = 0, form: int = 0) -> None:
    """Write the pages of the lists into files: ``services-0``, ``services-1``…, ``endpointslices-0``…, ``nodes-0``….

    If ``nodes`` is 0, there are as many nodes as the pods need. ``form`` is an index into ``FORMS``.
    """
    nodes = nodes or nodes_for(services * endpoints)
    make_slices = ipv6_slices if FORMS[form] is ipv6_service else slices
    others = map(other_node, range(1, nodes)) if FORMS[form] is direct else ()
    lists: tuple[tuple[str, Iterator[dict[str, Any]]], ...] = (
        ("services", map(FORMS[form], range(services))),
        ("endpointslices", (one for number in range(services) for one in make_slices(number, endpoints, nodes))),
        ("nodes", itertools.chain((node(),), others)),
    )
    for kind, items in lists:
        pages, page = 0, list(itertools.islice(items, PAGE_ITEMS))
        while True:
            following = list(itertools.islice(items, PAGE_ITEMS))
            metadata = {"resourceVersion": "1000000"} | ({"continue": str(pages + 1)} if following else {})
            body = json.dumps({"kind": "List", "metadata": metadata, "items": page}, separators=(",", ":"))
            (directory / f"{kind}-{pages}").write_text(body)
            if not following:
                break
            pages, page = pages + 1, following


def _name(number: int) -> str:
    return f"service-{number:06d}"


def _metadata(name: str, number: int, labels: dict[str, str], fields: dict[str, Any], version: int = 1) -> dict[str, Any]:
    managed = {
        "apiVersion": "v1",
        "fieldsType": "FieldsV1",
        "fieldsV1": {"f:metadata": {"f:labels": {".": {}, **{f"f:{label}": {} for label in labels}}}, **fields},
        "manager": "kube-controller-manager",
        "operation": "Update",
        "time": _CREATED,
    }
    return {
        "name": name,
        "namespace": f"namespace-{number % _NAMESPACES}",
        "uid": f"00000000-0000-0000-0000-{number:012x}",
        "resourceVersion": str(version),
        "creationTimestamp": _CREATED,
        "generation": version,
        "labels": labels,
        "managedFields": [managed],
    }


def _endpoint(pod: int, namespace: str, nodes: int) -> dict[str, Any]:
    return {
        "addresses": [pod_address(pod)],
        "conditions": {"ready": True, "serving": True, "terminating": False},
        "nodeName": node_of(pod, nodes),
        "targetRef": {
            "kind": "Pod",
            "name": f"pod-{pod}",
            "namespace": namespace,
            "uid": f"00000000-0000-0000-0001-{pod:012x}",
        },
        "zone": "zone-a",
    }


if __name__ == "__main__":
    write(pathlib.Path(sys.argv[1]), *map(int, sys.argv[2:]))
