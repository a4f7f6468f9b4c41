"""Decides how the annotations of a Service affect the Service on this node.

The operator may forbid some annotations, and the kernel may have no module for a scheduler. Rule: the node's default replaces a
setting that is not possible, and a ``Skipped`` gives the reason. The Service is served in every case.
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
from ipvsproxy.translate.translation_settings import Settings

SLOW_START_WEIGHT = 100
"""The full weight of each endpoint with slow start, if no annotation gives a weight. A full weight of 1 could not be reached in
steps."""


class Treatment(msgspec.Struct, frozen=True, gc=False):
    """How a Service is served, as far as annotations may decide.

    ``flags`` are the flags of the Service's scheduler. ``chosen`` has the settings that the annotations request and that are
    possible on this node. ``knows_slices`` means that weights of EndpointSlices are used.
    """

    scheduler: str
    flags: int
    chosen: ServiceAnnotations
    knows_slices: bool

    def settings(self, family: Family, affinity_timeout_s: int) -> VirtualServerSettings:
        """The settings of the Service's virtual servers of one family."""
        return _settings(self.scheduler, self.flags, affinity_timeout_s, self.chosen.prefix_lengths[family is Family.IPV6])

    def settings_by_mark(self, hash_scheduler: str, affinity_timeout_s: int, *, by_hash: bool = False) -> VirtualServerSettings:
        """The settings of the Service's virtual servers that have a firewall mark instead of an address.

        These virtual servers serve second scopes and direct return.

        With ``by_hash``, the scheduler is a hash scheduler, unless the Service has chosen a scheduler. Instead of session
        affinity, a virtual server by firewall mark gets a scheduler that chooses by the client's address. With session affinity,
        the kernel would ignore the port of a real server (``ip_vs_sched_persist`` in net/netfilter/ipvs/ip_vs_core.c).
        """
        if affinity_timeout_s:
            if self.scheduler in HASH_SCHEDULERS:
                return _settings(self.scheduler, self.flags & ~SCHEDULER_PORT, 0, 0)
            return _settings(hash_scheduler, SCHEDULER_FALLBACK, 0, 0)
        if by_hash and self.scheduler != self.chosen.scheduler:
            return _settings(hash_scheduler, SCHEDULER_FALLBACK | SCHEDULER_PORT, 0, 0)
        return _settings(self.scheduler, self.flags, 0, 0)

    def weighs(self, slices: Iterable[EndpointSlice]) -> bool:
        """Whether endpoints of the given EndpointSlices may have weights other than 1."""
        if self.chosen.weights is not None or self.chosen.slow_start_s:
            return True
        # All endpoints of an EndpointSlice have the same weight.
        return self.knows_slices and any(item.conditions and item.conditions[0].weight is not None for item in slices)

    def weigh(self, endpoints: Endpoints, skipped: dict[Skipped, None]) -> Mapping[bytes, int]:
        """Maps the key of each endpoint of a port, as bytes, to the weight of the endpoint.

        If the scheduler does not support a weight, the reason is added to ``skipped``.
        """
        explicit = {key: weight for key, one in endpoints.items() if (weight := self._explicit(one)) is not None}
        default = SLOW_START_WEIGHT if self.chosen.slow_start_s and not explicit else 1
        weights = {key: explicit.get(key, default) for key in endpoints}
        if self.scheduler in WEIGHTED_SCHEDULERS:
            return weights
        if len(set(weights.values()) - {0}) > 1:
            field = Annotation.WEIGHTS.field if self.chosen.weights is not None else Annotation.WEIGHT.field
            skipped[Skipped(field, f"the scheduler {self.scheduler} takes only weights 0 and 1; wrr and wlc take others")] = None
        return {key: min(1, weight) for key, weight in weights.items()}

    def _explicit(self, conditions: Conditions) -> int | None:
        if self.knows_slices and conditions.weight is not None:
            return conditions.weight
        weights = self.chosen.weights
        return weights.weight(conditions.node_name, conditions.zone) if weights is not None else None

    def weighed(self, weights: EvenWeights, by_key: Mapping[bytes, int] | None) -> Weights:
        """The real servers of a route with their weights. If ``by_key`` is None, each weight is 1.

        If the order of real servers decides which real server a client gets, all nodes order the real servers by address.
        """
        if self.scheduler in ORDERED_SCHEDULERS:
            weights = EvenWeights.of(sorted(weights.plain()))
        if by_key is None:
            return weights
        chosen = {key: by_key[key] for key in weights.plain()}
        return weights if all(weight == 1 for weight in chosen.values()) else UnevenWeights(chosen)


def treat(service: Service, settings: Settings) -> tuple[Treatment, Service, tuple[Skipped, ...]]:
    """Returns how a Service is treated, the Service as its annotations change it, and the annotations without effect."""
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
        skipped.append(Skipped(Annotation.SLOW_START.field, "the Service has direct return, with which weights belong to nodes"))
        chosen = msgspec.structs.replace(chosen, slow_start_s=0)
    if chosen.slow_start_s and scheduler not in GRADUAL_SCHEDULERS:
        others = ", ".join(sorted(GRADUAL_SCHEDULERS))
        reason = f"the scheduler {scheduler} gives no small share to a low weight; one of {others} does"
        skipped.append(Skipped(Annotation.SLOW_START.field, reason))
        chosen = msgspec.structs.replace(chosen, slow_start_s=0)
    return Treatment(scheduler, flags, chosen, Annotation.WEIGHT in settings.annotations), service, tuple(skipped)


def _why_no_direct_return(service: Service, settings: Settings) -> Skipped | None:
    """The reason why a Service that requests direct return has no direct return on this node."""
    if not settings.direct_return:
        reason = "--ipvs-direct-return (ipvsproxy.directReturn) of this node is off"
        return Skipped(Annotation.DIRECT_RETURN.field, reason, invalid=False)
    if service.options.external_traffic_local:
        return Skipped(Annotation.DIRECT_RETURN.field, "externalTrafficPolicy Local leads to endpoints of this node alone")
    return None


def _allowed(chosen: ServiceAnnotations, settings: Settings, skipped: list[Skipped]) -> ServiceAnnotations:
    """The annotations of the Service, without those that the operator does not allow."""
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

    Without an annotation for flags, ``mh`` gets the fall-back flag. The kernel keeps a real server in the lookup table of ``mh``
    when the real server's weight becomes 0 (``last_weight`` in net/netfilter/ipvs/ip_vs_mh.c). Without the fall-back flag, the
    kernel refuses clients that are mapped to a real server of weight 0 (kubernetes/kubernetes #139497). If the node's scheduler
    is ``mh``, virtual servers also get the flag ``mh-port``, as with kube-proxy.
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
    """Virtual servers with equal settings share one object."""
    persistent = PERSISTENT if affinity_timeout_s else 0
    return VirtualServerSettings(scheduler, flags | persistent, affinity_timeout_s, prefix_length)
