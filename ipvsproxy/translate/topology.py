"""Which endpoints of a service port this node uses (pkg/proxy/topology.go in kubernetes/kubernetes).

Hints and traffic policies narrow the choice; endpoints that are terminating but still serve are the last resort.

Rule: whether an endpoint is used, and why not, is one question: ``Scope.why_not``.
"""

import enum
import functools
import operator
import zlib
from collections.abc import Callable, Collection, KeysView, Sequence
from typing import NamedTuple

from ipvsproxy.model.real_servers import EvenWeights, RealServerKey
from ipvsproxy.model.service import Conditions
from ipvsproxy.translate.endpoints import Endpoints

FEW = 256
"""Shuffles of fewer real servers than these are kept, one for each number of them."""


class WhyNot(enum.StrEnum):
    """Why an endpoint is not used."""

    NOT_READY = "it is not ready"
    TERMINATING = "it is terminating, and there are ready ones"
    NOT_SERVING = "it is terminating and does not serve any more"
    OTHER_NODE = "it is not on this node, where the traffic policy keeps the traffic"
    HINT_FOR_OTHER_NODE = "its hints are for other nodes"
    HINT_FOR_OTHER_ZONE = "its hints are for other zones"

    @property
    def code(self) -> str:
        """The reason as programs should compare it."""
        return self.name.lower()


class Scope(NamedTuple):
    """Which endpoints of a service port some traffic may go to.

    ``last_resort``: no ready one is there, so those that are terminating but serve are taken. ``node`` not empty: only those on
    it. ``node_hint`` and ``zone_hint`` not empty: only those with such a hint.
    """

    last_resort: bool
    node: str = ""
    node_hint: str = ""
    zone_hint: str = ""

    def why_not(self, endpoint: Conditions) -> WhyNot | None:
        """Why an endpoint is not used; None when it is."""
        if self.node and endpoint.node_name != self.node:
            return WhyNot.OTHER_NODE
        if self.last_resort or not endpoint.ready:
            if not endpoint.terminating:
                return WhyNot.NOT_READY
            if not endpoint.serving:
                return WhyNot.NOT_SERVING
            return None if self.last_resort else WhyNot.TERMINATING
        return self._hinted_away(endpoint) if self.node_hint or self.zone_hint else None

    def _hinted_away(self, endpoint: Conditions) -> WhyNot | None:
        if self.node_hint and self.node_hint not in endpoint.node_hints:
            return WhyNot.HINT_FOR_OTHER_NODE
        if self.zone_hint and self.zone_hint not in endpoint.zone_hints:
            return WhyNot.HINT_FOR_OTHER_ZONE
        return None

    def used(self, endpoints: Endpoints) -> Sequence[bytes]:
        """The stems of those endpoints that are used."""
        each = zip(endpoints.stems, endpoints.conditions, strict=True)
        return [stem for stem, conditions in each if self.why_not(conditions) is None]


_EVERY_READY_ONE = Scope(last_resort=False)


class Scopes(NamedTuple):
    """``cluster`` is for traffic that may go anywhere, ``local`` for traffic that must stay on this node."""

    cluster: Scope
    local: Scope


class Route(NamedTuple):
    """A scope, and the real servers that it takes, in this node's order."""

    scope: Scope
    weights: EvenWeights

    @property
    def real_servers(self) -> KeysView[RealServerKey]:
        """The real servers alone."""
        return self.weights.keys()


class Choice(NamedTuple):
    """Where the traffic of one service port goes: that to the cluster IP, and that to all other addresses.

    ``lacks_local``: a policy asks for endpoints on this node, and there are usable ones, but elsewhere.
    """

    internal: Route
    external: Route
    lacks_local: bool


def find_scopes(endpoints: Collection[Conditions], node: str, zone: str) -> Scopes:
    """The scopes of one service port with these endpoints.

    Cluster scope: the ready ones that topology hints leave; if there is none, all that are terminating but serve, wherever
    they are. Local scope: the same among this node's endpoints, where hints never apply.
    """
    return Scopes(_cluster_scope(_ready(endpoints), node, zone), _local_scope(endpoints, node))


def _ready(endpoints: Collection[Conditions]) -> list[Conditions]:
    return [endpoint for endpoint in endpoints if endpoint.ready]


def _cluster_scope(ready: Sequence[Conditions], node: str, zone: str) -> Scope:
    node_hint, zone_hint = _hints(ready, node, zone)
    if ready and not (node_hint or zone_hint):
        return _EVERY_READY_ONE
    return Scope(last_resort=not ready, node_hint=node_hint, zone_hint=zone_hint)


def _local_scope(endpoints: Collection[Conditions], node: str) -> Scope:
    return Scope(node=node, last_resort=not any(endpoint.ready and endpoint.node_name == node for endpoint in endpoints))


def choose(endpoints: Endpoints, node: str, zone: str, *, internal_local: bool, external_local: bool) -> Choice:
    """Where the traffic of one service port goes, by its traffic policies.

    With internalTrafficPolicy Local the cluster IP never leads off this node. With externalTrafficPolicy Local and no
    endpoint here, all endpoints serve: a virtual server can not tell clients in the cluster, which may go anywhere, from
    those outside, and the latter are sent elsewhere by the load balancer's health check.
    """
    ready = _ready(endpoints.conditions)
    cluster = _cluster_scope(ready, node, zone)
    used = endpoints.stems
    if cluster is not _EVERY_READY_ONE or len(ready) != len(used):  # nearly never, and then each is asked
        used = cluster.used(endpoints)
    everywhere = Route(cluster, in_order(used, node, endpoints.suffix))
    if not (internal_local or external_local):
        return Choice(everywhere, everywhere, lacks_local=False)
    local = _local_scope(endpoints.conditions, node)
    here = Route(local, in_order(local.used(endpoints), node, endpoints.suffix))
    return Choice(
        here if internal_local else everywhere,
        here if external_local and here.weights else everywhere,
        lacks_local=bool(everywhere.weights) and not here.weights,
    )


def in_order(stems: Collection[bytes], node: str, suffix: bytes = b"") -> EvenWeights:
    """Real servers, by the stems of their keys and the suffix of all, in an order of this node's.

    It depends on the node's name and on which they are, and on nothing else: the same at every start. In one order for all nodes,
    the first connection of each would go to the same one (kubernetes/kubernetes #121591). Which comes first is drawn for each of
    them all; after it they are shuffled as all of that number are on this node.
    """
    count = len(stems)
    if count < 2:  # noqa: PLR2004 - one has no order
        return EvenWeights.of([stem + suffix for stem in stems])
    shuffle = _shuffle_of_few if count < FEW else _shuffle
    packed = suffix.join(shuffle(node, count)(sorted(stems))) + suffix
    size = len(packed) // count
    begin = _mark(_seed(node), zlib.crc32(packed)) % count * size
    return EvenWeights(packed[begin:] + packed[:begin], size)


def _shuffle(node: str, count: int) -> Callable[[Sequence[bytes]], tuple[bytes, ...]]:
    """Shuffles so many, which are two or more, on this node always in the same way."""
    return operator.itemgetter(*[place for place in _places(node, (count - 1).bit_length()) if place < count])


_shuffle_of_few = functools.lru_cache(maxsize=FEW)(_shuffle)


@functools.lru_cache(maxsize=32)
def _places(node: str, bits: int) -> Sequence[int]:
    """All numbers of so many bits, shuffled: to mark each of them anew takes ten times as long as to leave out what is too much.

    All of these together are as long as the longest, twice: no number of real servers takes more memory by being another one.
    """
    return sorted(range(1 << bits), key=functools.partial(_mark, _seed(node)))


@functools.lru_cache(maxsize=1)
def _seed(node: str) -> int:
    return zlib.crc32(node.encode())


def _mark(seed: int, number: int) -> int:
    """Some number, the same in each process.

    A checksum alone would not do: it is linear, so that what differs early would be the same on half of the nodes. The hash of
    two numbers is not; twice, it is even.
    """
    return hash((hash((seed, number)), seed))


def _hints(ready: Sequence[Conditions], node: str, zone: str) -> tuple[str, str]:
    """The node and the zone that a ready endpoint must be hinted for, empty where it need not.

    A hint counts only if every ready endpoint has one of its kind (a partly hinted list is one that is being rewritten) and
    one of them is for us. Hints for nodes (PreferSameNode) come before hints for zones (PreferSameZone, PreferClose,
    topology-mode).
    """
    if not ready:
        return "", ""
    first = ready[0]  # nearly always it has none, and then the others need not be asked
    if first.node_hints and all(one.node_hints for one in ready) and any(node in one.node_hints for one in ready):
        return node, ""
    if first.zone_hints and zone and all(one.zone_hints for one in ready) and any(zone in one.zone_hints for one in ready):
        return "", zone
    return "", ""
