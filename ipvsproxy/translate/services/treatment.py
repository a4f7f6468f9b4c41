"""What the annotations of a Service mean on this node: the operator may forbid some, and the kernel may lack a scheduler.

Rule: a setting that is not possible gets the node's default, and a ``Skipped`` says why. The Service is served in any case.
"""

import functools
from collections.abc import Iterable, Mapping

import msgspec

from ipvsproxy.model.annotations import (
    FIELDS,
    GRADUAL_SCHEDULERS,
    HASH_SCHEDULERS,
    NO_ANNOTATIONS,
    ORDERED_SCHEDULERS,
    WEIGHTED_SCHEDULERS,
    Annotation,
    ServiceAnnotations,
)
from ipvsproxy.model.net import Family
from ipvsproxy.model.real_servers import NO_THRESHOLDS, EvenWeights, Thresholds, UnevenWeights, Weights
from ipvsproxy.model.service import Conditions, EndpointSlice, Service, Skipped
from ipvsproxy.model.virtual_servers import PERSISTENT, SCHEDULER_FALLBACK, SCHEDULER_PORT, VirtualServerSettings
from ipvsproxy.translate.services.topology import Endpoints
from ipvsproxy.translate.settings import Settings

SLOW_START_WEIGHT = 100
"""The weight of each endpoint with slow start, if no annotation gives one. A weight of 1 could not grow in steps."""


class Treatment(msgspec.Struct, frozen=True, gc=False):
    """How a Service is served, as far as annotations may choose it.

    ``flags`` are the flags of the scheduler. ``chosen`` has the settings that the annotations ask for and that are possible on
    this node. ``knows_slices``: weights of EndpointSlices count.
    """

    scheduler: str
    flags: int
    chosen: ServiceAnnotations
    knows_slices: bool

    def settings(self, family: Family, affinity_timeout_s: int) -> VirtualServerSettings:
        """The settings of the Service's virtual servers of a family."""
        return _settings(self.scheduler, self.flags, affinity_timeout_s, self.chosen.prefix_lengths[family is Family.IPV6])

    def settings_by_mark(self, hash_scheduler: str, affinity_timeout_s: int, *, by_hash: bool = False) -> VirtualServerSettings:
        """The settings of virtual servers of second scopes. ``by_hash``: by a hash unless the Service has chosen a scheduler.

        The kernel ignores the port of a real server where affinity and a mark meet (net/netfilter/ipvs/ip_vs_core.c,
        ``ip_vs_sched_persist``), so a scheduler by the client's address is used instead of affinity.
        """
        by_hash = by_hash and self.scheduler != self.chosen.scheduler
        if not affinity_timeout_s:
            return (
                _settings(hash_scheduler, SCHEDULER_FALLBACK | SCHEDULER_PORT, 0, 0)
                if by_hash
                else _settings(self.scheduler, self.flags, 0, 0)
            )
        scheduler = self.scheduler if self.scheduler in HASH_SCHEDULERS else hash_scheduler
        flags = self.flags if self.scheduler in HASH_SCHEDULERS else SCHEDULER_FALLBACK
        return _settings(scheduler, flags & ~SCHEDULER_PORT, 0, 0)

    def weighs(self, slices: Iterable[EndpointSlice]) -> bool:
        """Whether endpoints of these slices may have other weights than 1."""
        if self.chosen.weights is not None or self.chosen.slow_start_s:
            return True
        # All endpoints of a slice have the same weight.
        return self.knows_slices and any(item.conditions and item.conditions[0].weight is not None for item in slices)

    def weigh(self, endpoints: Endpoints, skipped: dict[Skipped, None]) -> Mapping[bytes, int]:
        """The weight of each endpoint of a port by the bytes of its key; adds the reason for weights that are not possible."""
        explicit = {key: weight for key, one in endpoints.items() if (weight := self._explicit(one)) is not None}
        default = SLOW_START_WEIGHT if self.chosen.slow_start_s and not explicit else 1
        weights = {key: explicit.get(key, default) for key in endpoints}
        if self.scheduler in WEIGHTED_SCHEDULERS:
            return weights
        if len(set(weights.values()) - {0}) > 1:
            field = Annotation.WEIGHTS.field if self.chosen.weights is not None else Annotation.WEIGHT.field
            skipped[Skipped(field, f"the scheduler {self.scheduler} knows no weights but 0 and 1; wrr and wlc know them")] = None
        return {key: min(1, weight) for key, weight in weights.items()}

    def _explicit(self, conditions: Conditions) -> int | None:
        if self.knows_slices and conditions.weight is not None:
            return conditions.weight
        weights = self.chosen.weights
        return weights.weight(conditions.node_name, conditions.zone) if weights is not None else None

    def weighed(self, weights: EvenWeights, by_key: Mapping[bytes, int] | None) -> Weights:
        """The real servers of a route with their weights; None stands for weight 1 of each.

        If the order of real servers decides which one a client gets, they are ordered by address, the same on all nodes.
        """
        if self.scheduler in ORDERED_SCHEDULERS:
            weights = EvenWeights.of(sorted(weights.plain()))
        if by_key is None:
            return weights
        chosen = {key: by_key[key] for key in weights.plain()}
        return weights if all(weight == 1 for weight in chosen.values()) else UnevenWeights(chosen)


def treat(service: Service, settings: Settings) -> tuple[Treatment, Service, tuple[Skipped, ...]]:
    """The treatment of a Service with annotations, the Service as it must be served, and its unused annotations."""
    options = service.options
    skipped: list[Skipped] = []
    chosen = _allowed(options.annotations, settings, skipped)
    if chosen.skips_load_balancer_ips:
        service = msgspec.structs.replace(service, options=msgspec.structs.replace(options, load_balancer_addresses=()))
    scheduler, flags = _scheduler(chosen, settings, skipped)
    if any(chosen.prefix_lengths) and not options.affinity_timeout_s:
        reason = "the Service has no session affinity (sessionAffinity: ClientIP)"
        skipped.append(Skipped(Annotation.AFFINITY_NETMASK.field, reason))
        chosen = msgspec.structs.replace(chosen, prefix_lengths=NO_ANNOTATIONS.prefix_lengths)
    if chosen.direct_return and (why_not := _why_no_direct_return(service, settings)):
        skipped.append(why_not)
        chosen = msgspec.structs.replace(chosen, direct_return=False)
    if chosen.slow_start_s and chosen.direct_return:
        skipped.append(Skipped(Annotation.SLOW_START.field, "the Service has direct return, by which weights are of nodes"))
        chosen = msgspec.structs.replace(chosen, slow_start_s=0)
    if chosen.slow_start_s and scheduler not in GRADUAL_SCHEDULERS:
        others = ", ".join(sorted(GRADUAL_SCHEDULERS))
        reason = f"the scheduler {scheduler} gives no small share to a low weight; one of {others} does"
        skipped.append(Skipped(Annotation.SLOW_START.field, reason))
        chosen = msgspec.structs.replace(chosen, slow_start_s=0)
    return Treatment(scheduler, flags, chosen, Annotation.WEIGHT in settings.annotations), service, tuple(skipped)


def _why_no_direct_return(service: Service, settings: Settings) -> Skipped | None:
    """Why a Service that asks for direct return has none on this node."""
    if not settings.direct_return:
        reason = "--ipvs-direct-return (ipvsproxy.directReturn) of this node is off"
        return Skipped(Annotation.DIRECT_RETURN.field, reason, invalid=False)
    if service.options.external_traffic_local:
        return Skipped(Annotation.DIRECT_RETURN.field, "externalTrafficPolicy Local leads to endpoints of this node alone")
    return None


def _allowed(chosen: ServiceAnnotations, settings: Settings, skipped: list[Skipped]) -> ServiceAnnotations:
    """The annotations that the operator allows."""
    forbidden = chosen.given - settings.annotations
    if not forbidden:
        return chosen
    for annotation in sorted(forbidden):
        reason = "--service-annotations (ipvsproxy.serviceAnnotations) of this node does not allow it"
        skipped.append(Skipped(annotation.field, reason))
    fields = {field: getattr(NO_ANNOTATIONS, field) for one in forbidden if (field := FIELDS.get(one))}
    if Annotation.MAX_CONNECTIONS in forbidden:
        fields["thresholds"] = NO_THRESHOLDS
    elif Annotation.RESUME_CONNECTIONS in forbidden:
        fields["thresholds"] = Thresholds(chosen.thresholds.upper)
    return msgspec.structs.replace(chosen, **fields)


def _scheduler(chosen: ServiceAnnotations, settings: Settings, skipped: list[Skipped]) -> tuple[str, int]:
    """Scheduler and flags.

    Without an annotation for flags, ``mh`` has the fall-back flag: the kernel leaves a real server in its table when its weight
    becomes 0 (``last_weight`` in net/netfilter/ipvs/ip_vs_mh.c), and refuses the clients that it finds there
    (kubernetes/kubernetes #139497). Like kube-proxy's, the node's ``mh`` also has the port flag.
    """
    why_missing = settings.missing_schedulers.get(chosen.scheduler, "")
    if why_missing:
        skipped.append(Skipped(Annotation.SCHEDULER.field, f"{why_missing}; {settings.scheduler} is used"))
    is_chosen = bool(chosen.scheduler) and not why_missing
    scheduler = chosen.scheduler if is_chosen else settings.scheduler
    if chosen.scheduler_flags is None:
        if scheduler != "mh":
            return scheduler, 0
        return scheduler, SCHEDULER_FALLBACK | (0 if is_chosen else SCHEDULER_PORT)
    if scheduler not in HASH_SCHEDULERS:
        skipped.append(Skipped(Annotation.SCHEDULER_FLAGS.field, f"the scheduler {scheduler} has no flags; sh and mh have them"))
        return scheduler, 0
    return scheduler, chosen.scheduler_flags


@functools.lru_cache(maxsize=1024)
def _settings(scheduler: str, flags: int, affinity_timeout_s: int, prefix_length: int) -> VirtualServerSettings:
    """All virtual servers with equal settings share one object."""
    persistent = PERSISTENT if affinity_timeout_s else 0
    return VirtualServerSettings(scheduler, flags | persistent, affinity_timeout_s, prefix_length)
