"""The annotations by which a Service chooses how ipvsproxy handles it, and the parsed values of these annotations."""

import enum
from collections.abc import Mapping

import msgspec

from ipvsproxy.model.real_servers import NO_THRESHOLDS, Thresholds

PREFIX = "ipvsproxy.io/"
"""The prefix of our annotations."""
HIGHEST_WEIGHT = 65535
"""The highest weight that an annotation can give to an endpoint. ipvsadm has the same limit."""
LONGEST_S = 3600
"""The longest time that an annotation may ask for, in seconds."""
MOST_CONNECTIONS = 1_000_000
"""The highest threshold."""

WEIGHTED_SCHEDULERS = frozenset({"wrr", "wlc", "lblc", "lblcr", "sed", "nq", "sh", "mh", "fo", "ovf"})
"""The schedulers that use weights. All other schedulers ignore weights, except that an endpoint with weight 0 gets no new
connections."""
GRADUAL_SCHEDULERS = frozenset({"wrr", "wlc", "lblc", "lblcr", "sed", "nq"})
"""The schedulers that give a real server of low weight a small share of new connections.

``fo`` and ``ovf`` choose the real server of the highest weight; with ``sh`` and ``mh``, each change of a weight moves clients to
other real servers.
"""
HASH_SCHEDULERS = frozenset({"sh", "mh"})
"""The schedulers that support the scheduler flags ``port`` and ``fallback``."""
ORDERED_SCHEDULERS = HASH_SCHEDULERS | {"dh"}
"""The schedulers whose hash table depends on the order in which the real servers were added (``ip_vs_sh_reassign`` in
net/netfilter/ipvs/ip_vs_sh.c)."""
SCHEDULERS = ("rr", "wrr", "lc", "wlc", "lblc", "lblcr", "dh", "sh", "sed", "nq", "fo", "ovf", "mh")
"""All schedulers that an annotation may name: every scheduler of Linux 6.1 except ``twos``, which is newer than the others."""


class Annotation(enum.StrEnum):
    """The project's own annotations, without their prefix.

    ``WEIGHT`` is an annotation of EndpointSlices; all other members are annotations of Services.
    """

    SCHEDULER = "scheduler"
    SCHEDULER_FLAGS = "scheduler-flags"
    WEIGHTS = "weights"
    WEIGHT = "weight"
    SLOW_START = "slow-start"
    MAX_CONNECTIONS = "max-connections"
    RESUME_CONNECTIONS = "resume-connections"
    DRAIN_DEADLINE = "drain-deadline"
    AFFINITY_NETMASK = "affinity-netmask"
    SKIP_LOAD_BALANCER_IPS = "skip-load-balancer-ips"
    DIRECT_RETURN = "direct-return"

    @property
    def whole(self) -> str:
        """The annotation's name with its prefix."""
        return f"{PREFIX}{self.value}"

    @property
    def field(self) -> str:
        """The field path of this annotation, for the attribute ``field`` of a ``Skipped``."""
        return field(self.whole)


ALL_ANNOTATIONS = frozenset(Annotation)


def field(name: str) -> str:
    """The field path of the annotation with this name, for the attribute ``field`` of a ``Skipped``."""
    return f"metadata.annotations[{name}]"


class WeightRules(msgspec.Struct, frozen=True, gc=False):
    """The weight of an endpoint by its node and zone; a rule for the endpoint's node has precedence over a rule for the zone."""

    nodes: Mapping[str, int] = {}
    zones: Mapping[str, int] = {}
    other: int = 1

    def weight(self, node: str, zone: str) -> int:
        """The weight of an endpoint with this node and zone.

        An empty ``node`` or ``zone`` means that the endpoint's node or zone is unknown.
        """
        if node in self.nodes:
            return self.nodes[node]
        return self.zones.get(zone, self.other)


class ServiceAnnotations(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The values of a Service's annotations; if an annotation is absent or invalid, its value is the default.

    ``given`` names every annotation of this project that the Service has. ``scheduler_flags`` are bits of a virtual server's
    flags; None means that the Service has no annotation for scheduler flags. ``prefix_lengths`` are the prefix lengths of session
    affinity for IPv4 and IPv6; 0 means single addresses. Times are in seconds; a time of 0 means that its annotation is absent.
    """

    given: frozenset[Annotation] = frozenset()
    scheduler: str = ""
    scheduler_flags: int | None = None
    weights: WeightRules | None = None
    slow_start_s: int = 0
    thresholds: Thresholds = NO_THRESHOLDS
    drain_deadline_s: int = 0
    prefix_lengths: tuple[int, int] = (0, 0)
    skips_load_balancer_ips: bool = False
    direct_return: bool = False


NO_ANNOTATIONS = ServiceAnnotations()
"""The value for a Service without any of our annotations. Nearly all Services have none of them."""
FIELDS: Mapping[Annotation, str] = {
    Annotation.SCHEDULER: "scheduler",
    Annotation.SCHEDULER_FLAGS: "scheduler_flags",
    Annotation.WEIGHTS: "weights",
    Annotation.SLOW_START: "slow_start_s",
    Annotation.DRAIN_DEADLINE: "drain_deadline_s",
    Annotation.AFFINITY_NETMASK: "prefix_lengths",
    Annotation.SKIP_LOAD_BALANCER_IPS: "skips_load_balancer_ips",
    Annotation.DIRECT_RETURN: "direct_return",
}
"""For each annotation that has a field of its own in ``ServiceAnnotations``: the name of this field."""
