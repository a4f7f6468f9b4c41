"""Rules that look into one of our sets: their comments, and the sides of a packet that they look up."""

from collections.abc import Mapping

from ipvsproxy.model.net import Family, Protocol
from ipvsproxy.model.rules import Rule, SetMatch, Side, Target
from ipvsproxy.model.sets import IpSet, SetKind

COMMENTS: Mapping[SetKind, str] = {
    SetKind.LOOP_BACK: "Kubernetes endpoints dst ip:port, source ip for solving hairpin purpose",
    SetKind.CLUSTER_IP: "Kubernetes service cluster ip + port for masquerade purpose",
    SetKind.EXTERNAL_IP: "Kubernetes service external ip + port for masquerade and filter purpose",
    SetKind.EXTERNAL_IP_LOCAL: "Kubernetes service external ip + port with externalTrafficPolicy=local",
    SetKind.LOAD_BALANCER: "Kubernetes service lb portal",
    SetKind.LOAD_BALANCER_FIREWALL: "Kubernetes service load balancer ip + port for load balancer with sourceRange",
    SetKind.LOAD_BALANCER_LOCAL: "Kubernetes service load balancer ip + port with externalTrafficPolicy=local",
    SetKind.LOAD_BALANCER_SOURCE_IP: "Kubernetes service load balancer ip + port + source IP for packet filter purpose",
    SetKind.LOAD_BALANCER_SOURCE_CIDR: "Kubernetes service load balancer ip + port + source cidr for packet filter purpose",
    SetKind.NODE_PORT_TCP: "Kubernetes nodeport TCP port for masquerade purpose",
    SetKind.NODE_PORT_LOCAL_TCP: "Kubernetes nodeport TCP port with externalTrafficPolicy=local",
    SetKind.NODE_PORT_UDP: "Kubernetes nodeport UDP port for masquerade purpose",
    SetKind.NODE_PORT_LOCAL_UDP: "Kubernetes nodeport UDP port with externalTrafficPolicy=local",
    SetKind.NODE_PORT_SCTP: "Kubernetes nodeport SCTP port for masquerade purpose with type 'hash ip:port'",
    SetKind.NODE_PORT_LOCAL_SCTP: "Kubernetes nodeport SCTP port with externalTrafficPolicy=local with type 'hash ip:port'",
    SetKind.HEALTH_CHECK_NODE_PORT: "Kubernetes health check node port",
    SetKind.IPVS_IPS: "Addresses on the ipvs interface",
}
"""The purpose of each set, in kube-proxy's words."""

TO = (Side.DESTINATION,)
TO_PORT = (Side.DESTINATION, Side.DESTINATION)
TO_PORT_FROM = (*TO_PORT, Side.SOURCE)
FROM_PORT = (Side.SOURCE, Side.DESTINATION)
"""One side of a packet for each field of an entry, as in iptables' ``--match-set NAME dst,dst,src`` (``TO_PORT_FROM``).

``TO`` is the destination address, or the port for a set of ports; ``TO_PORT`` is address and port of the destination. These four
go by the destination of a packet as a rule meets it.
"""
ORIGINALLY_TO = (Side.ORIGINAL_DESTINATION,)
ORIGINALLY_TO_PORT = (Side.ORIGINAL_DESTINATION, Side.ORIGINAL_DESTINATION)
FROM_ORIGINAL_PORT = (Side.SOURCE, Side.ORIGINAL_DESTINATION)
"""The same by the destination that the client has chosen, also once IPVS has replaced it by an endpoint."""


def on_set(
    kind: SetKind,
    family: Family,
    sides: tuple[Side, ...],
    target: Target,
    protocol: Protocol | None = None,
    *,
    from_this_host: bool = False,
) -> Rule:
    """A rule that matches one of our sets, with the comment that names the set's purpose."""
    looked_up, comment = match(kind, family, sides), COMMENTS[kind]
    return Rule(protocol=protocol, comment=comment, set=looked_up, from_this_host=from_this_host, target=target)


def match(kind: SetKind, family: Family, sides: tuple[Side, ...]) -> SetMatch:
    """A match on the set of this kind."""
    return SetMatch(IpSet(kind, family).name, sides)
