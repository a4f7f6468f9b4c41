"""Decides which Service addresses are refused because serving them would disconnect the node or a part of the cluster.

Rule 1: unspecified, multicast and IPv6 link-local addresses are refused. Loopback addresses are served, as by kube-proxy, because
these addresses affect only the node's own clients.
Rule 2: addresses in this node's pod ranges are refused. In the range of the whole cluster, only external addresses are refused,
because a ``--cluster-cidr`` often includes the range of the cluster IPs. An address on an interface of this node, such as the
bridge of its pods, does not count as the address of a pod.
Rule 3: a cluster IP that equals the node's own address is refused. A cluster IP that differs from the node's own address may be
on an interface on purpose, for example the address of a DNS cache on each node. Like kube-proxy, ipvsproxy serves an external
address even if an interface of this node has the address, except on the ports of the API server and the kubelet.
Rule 4: an external address that equals an API server's address is refused, because binding it on this node would hide the API
server. The known API servers are the endpoints of the API server's Service, and the addresses at which this process connects to
its API server. An address stays refused after its API server has disappeared, because the API server may come back at that
address. If an API server's address is an address of this node, or a loopback address, the address is refused only for a Service
that has the API server's port. A cluster IP that is an API server's address is not refused, because the API servers may be
reachable only by this cluster IP.
Rule 5: serving another node's address as an external address would make that node unreachable from this node. kube-proxy serves
the addresses of other nodes, so ipvsproxy refuses such an address only if the operator has chosen this.
"""

from collections.abc import Iterable

import msgspec

from ipvsproxy.model.net import Address, Network
from ipvsproxy.model.service import Service, ServiceName, Skipped, bounded
from ipvsproxy.translate.translation_settings import Settings
from ipvsproxy.translate.view import NodeView

KUBERNETES = ServiceName("default", "kubernetes")
"""The Service whose endpoints are the API servers; it is never refused."""
KUBELET_PORT = 10250

_WITH_BALANCER = "let the load balancer set ipMode: Proxy, or give the Service the annotation ipvsproxy.io/skip-load-balancer-ips"
_WITH_EXTERNAL = "take it out of spec.externalIPs, or turn external IPs off by the feature gate AllowServiceExternalIPs=false"
_REFUSING = "--ipvs-refuse-node-addresses refuses such addresses"
WAYS_OUT = f"for a load balancer's, {_WITH_BALANCER}; for an external IP, {_WITH_EXTERNAL}; {_REFUSING}"
"""What the operator can do if an external or load-balancer address belongs to another node."""
_API_SERVER = "is the address of an API server"
_FORMER_API_SERVER = "was the address of an API server, and is refused until ipvsproxy restarts"
_SPECIAL = "is an unspecified, multicast or link-local address"
_OWN_POD = "lies in the range of this node's pods"


def admit(service: Service, view: NodeView, settings: Settings) -> tuple[Service, tuple[Skipped, ...]]:
    """The Service without its refused addresses, and the reasons for the refusals.

    If there are too many reasons, a summary replaces the last ones (see ``bounded``).
    """
    if service.name == KUBERNETES:
        return service, ()
    options, allowed = service.options, settings.allowed_addresses
    others = (*options.external_addresses, *options.load_balancer_addresses)
    clusters = {
        one: why for one in service.cluster_addresses if (why := _why_not_cluster(one, view)) and not _is_in(one, allowed)
    }
    externals = {
        one: why for one in others if (why := _why_not_external(service, one, view, settings)) and not _is_in(one, allowed)
    }
    if not clusters and not externals:
        return service, ()
    without = msgspec.structs.replace(
        service,
        cluster_addresses=tuple(one for one in service.cluster_addresses if one not in clusters),
        options=msgspec.structs.replace(
            options,
            external_addresses=tuple(one for one in options.external_addresses if one not in externals),
            load_balancer_addresses=tuple(one for one in options.load_balancer_addresses if one not in externals),
        ),
    )
    fields = (
        ("spec.clusterIPs", service.cluster_addresses, clusters),
        ("spec.externalIPs", options.external_addresses, externals),
        ("status.loadBalancer", options.load_balancer_addresses, externals),
    )
    refused = [Skipped(field, f"{one} {why[one]}") for field, those, why in fields for one in those if one in why]
    return without, bounded(refused)


def ways_out(service: Service, address: Address) -> str:
    """The advice of ``WAYS_OUT`` for the fields in which a Service has the address."""
    ways = {
        _WITH_BALANCER: address in service.options.load_balancer_addresses,
        _WITH_EXTERNAL: address in service.options.external_addresses,
    }
    return "; ".join([*(way for way, helps in ways.items() if helps), _REFUSING])


def _why_not_cluster(address: Address, view: NodeView) -> str:
    """The reason why a cluster IP is refused; empty if the cluster IP is served."""
    if _is_special(address):
        return _SPECIAL
    if _is_in(address, view.pod_networks):
        return _OWN_POD
    return "is the address of this node" if address in view.primary_addresses.values() else ""


def _why_not_external(service: Service, address: Address, view: NodeView, settings: Settings) -> str:
    """The reason why an external or load-balancer address is refused; empty if the address is served."""
    if _is_special(address):
        return _SPECIAL
    ports = {server.port for server in view.api_servers if server.address == address}
    former_ports = {server.port for server in view.former_api_servers if server.address == address}
    if address in view.elsewhere or address.is_loopback:
        own = {KUBELET_PORT, *ports, *former_ports}
        taken = sorted({port.port for port in service.ports} & own)
        return f"is an address of this node, whose port {taken[0]} is its own" if taken else ""
    if _is_in(address, view.pod_networks):
        return _OWN_POD
    if _is_in(address, settings.cluster_networks):
        return "lies in the range of the cluster's pods"
    if ports or former_ports:
        return _API_SERVER if ports else _FORMER_API_SERVER
    node = view.other_nodes.get(address) if settings.refuses_node_addresses else None
    return f"is an address of the node {node} (--ipvs-refuse-node-addresses)" if node else ""


def _is_in(address: Address, networks: Iterable[Network]) -> bool:
    return any(network.contains(address) for network in networks)


def _is_special(address: Address) -> bool:
    is_multicast = address[0] == 0xFF if len(address) == 16 else address[0] & 0xF0 == 0xE0  # noqa: PLR2004 - ff00::/8, 224/4
    return is_multicast or address.is_unspecified or address.is_link_local_v6
