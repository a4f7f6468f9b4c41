"""Which endpoints of a service port this node uses (pkg/proxy/topology.go in kubernetes/kubernetes).

Hints and traffic policies narrow the choice; endpoints that are terminating but still serve are the last resort.
"""

from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

from ipvsproxy.model.kernel import RealServerKey
from ipvsproxy.model.service import Endpoint


class Candidates(NamedTuple):
    """The real servers that one service port may use, by scope.

    ``cluster`` is for traffic that may go anywhere, ``local`` for traffic that must stay on this node. ``any_usable`` tells
    whether any endpoint anywhere could answer.
    """

    cluster: frozenset[RealServerKey]
    local: frozenset[RealServerKey]
    any_usable: bool


def choose(endpoints: Mapping[RealServerKey, Endpoint], node: str, zone: str) -> Candidates:
    """Sort the endpoints of one service port into scopes.

    Cluster scope: the ready ones that topology hints leave; if there is none, all that are terminating but serve, wherever
    they are. Local scope: the same among this node's endpoints, where hints never apply.
    """
    ready = {key: endpoint for key, endpoint in endpoints.items() if endpoint.ready}
    local = frozenset(key for key, endpoint in ready.items() if endpoint.node_name == node)
    prefers = _preference(ready.values(), node, zone)
    cluster = frozenset(key for key, endpoint in ready.items() if prefers(endpoint)) if prefers else frozenset(ready)
    if cluster and local:
        return Candidates(cluster, local, any_usable=True)
    draining = {key: endpoint for key, endpoint in endpoints.items() if endpoint.serving and endpoint.terminating}
    local = local or frozenset(key for key, endpoint in draining.items() if endpoint.node_name == node)
    return Candidates(cluster or frozenset(draining), local, any_usable=bool(ready or draining))


def _preference(ready: Collection[Endpoint], node: str, zone: str) -> Callable[[Endpoint], bool] | None:
    """What a ready endpoint must have to be preferred; None when hints are missing or point elsewhere.

    A hint counts only if every ready endpoint has one of its kind: a partly hinted list is one that is being rewritten.
    Hints for nodes (PreferSameNode) come before hints for zones (PreferSameZone, PreferClose, topology-mode).
    """
    if not ready:
        return None
    if all(endpoint.node_hints for endpoint in ready) and any(node in endpoint.node_hints for endpoint in ready):
        return lambda endpoint: node in endpoint.node_hints
    if zone and all(endpoint.zone_hints for endpoint in ready) and any(zone in endpoint.zone_hints for endpoint in ready):
        return lambda endpoint: zone in endpoint.zone_hints
    return None
