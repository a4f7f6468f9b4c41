"""What the annotations of a Service mean on this node: the operator may not allow them all, and a kernel may lack a scheduler.

Rule: a setting that cannot be had is the node's default, and a ``Skipped`` says why. The Service is served in any case.
"""

import functools
from collections.abc import Mapping

import msgspec

from ipvsproxy.model.annotations import (
    ALL_ANNOTATIONS,
    GRADUAL_SCHEDULERS,
    HASH_SCHEDULERS,
    NO_ANNOTATIONS,
    ORDERED_SCHEDULERS,
    WEIGHTED_SCHEDULERS,
    Annotation,
    ServiceAnnotations,
    WeightRules,
)
from ipvsproxy.model.net import Family
from ipvsproxy.model.real_servers import NO_THRESHOLDS, EvenWeights, Thresholds, UnevenWeights, Weights
from ipvsproxy.model.service import Conditions, EndpointSlice, Service, ServiceOptions, Skipped
from ipvsproxy.model.virtual_servers import PERSISTENT, SCHEDULER_PORT, VirtualServerSettings
from ipvsproxy.translate.services.topology import Endpoints
from ipvsproxy.translate.settings import Settings

SLOW_START_WEIGHT = 100
"""The weight of each endpoint with slow start, if no annotation gives one. From a weight of 1 there would be no way up."""

_FIELDS: Mapping[Annotation, str] = {
    Annotation.SCHEDULER: "scheduler",
    Annotation.SCHEDULER_FLAGS: "scheduler_flags",
    Annotation.WEIGHTS: "weights",
    Annotation.SLOW_START: "slow_start_s",
    Annotation.DRAIN_DEADLINE: "drain_deadline_s",
    Annotation.AFFINITY_NETMASK: "prefix_lengths",
    Annotation.SKIP_LOAD_BALANCER_IPS: "skips_load_balancer_ips",
}


class Treatment(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """How a Service is served, as far as annotations may choose it.

    ``flags`` are the scheduler's. ``prefix_lengths`` are those of session affinity, of IPv4 and IPv6, 0 for single addresses.
    ``slow_start_s`` is 0 without slow start, ``drain_deadline_s`` without a deadline of the Service. ``knows_slices``: weights of
    EndpointSlices count. ``is_usual``: no annotation of the Service asks for anything, and the scheduler needs no order.
    ``common`` are the settings for both families where they are the same in any case.
    """

    scheduler: str
    flags: int = 0
    weights: WeightRules | None = None
    slow_start_s: int = 0
    thresholds: Thresholds = NO_THRESHOLDS
    drain_deadline_s: int = 0
    prefix_lengths: tuple[int, int] = (0, 0)
    knows_slices: bool
    is_usual: bool = False
    common: VirtualServerSettings | None = None

    def settings(self, family: Family, affinity_timeout_s: int) -> VirtualServerSettings:
        """The settings of the Service's virtual servers of a family."""
        return _settings(self.scheduler, self.flags, affinity_timeout_s, self.prefix_lengths[family is Family.IPV6])

    def settings_by_mark(self, hash_scheduler: str, affinity_timeout_s: int) -> VirtualServerSettings:
        """Those of the virtual servers of second scopes.

        The kernel ignores the port of a real server where affinity and a mark meet (net/netfilter/ipvs/ip_vs_core.c,
        ``ip_vs_sched_persist``), so a scheduler that goes by the client's address has to do.
        """
        if not affinity_timeout_s:
            return _settings(self.scheduler, self.flags, 0, 0)
        scheduler = self.scheduler if self.scheduler in HASH_SCHEDULERS else hash_scheduler
        flags = self.flags if self.scheduler in HASH_SCHEDULERS else 0
        return _settings(scheduler, flags & ~SCHEDULER_PORT, 0, 0)

    @property
    def is_ordered(self) -> bool:
        """Whether the order of real servers decides to which of them a client goes, so that it must be the same on all nodes."""
        return self.scheduler in ORDERED_SCHEDULERS

    def weighs(self, slices: list[EndpointSlice]) -> bool:
        """Whether endpoints of these slices may have other weights than 1."""
        if not self.is_usual and (self.weights is not None or self.slow_start_s):
            return True
        if not self.knows_slices:
            return False
        for item in slices:
            conditions = item.conditions
            if conditions and conditions[0].weight is not None:  # all endpoints of a slice have the same one
                return True
        return False

    def weigh(self, endpoints: Endpoints, skipped: dict[Skipped, None]) -> Mapping[bytes, int]:
        """The weight of each endpoint of a port by the bytes of its key; adds the reason for weights that cannot be had."""
        by_key = endpoints.by_key()
        explicit = {key: weight for key, one in by_key.items() if (weight := self._explicit(one)) is not None}
        default = SLOW_START_WEIGHT if self.slow_start_s and not explicit else 1
        weights = {key: explicit.get(key, default) for key in by_key}
        if self.scheduler in WEIGHTED_SCHEDULERS:
            return weights
        if len(set(weights.values()) - {0}) > 1:
            field = Annotation.WEIGHTS.field if self.weights is not None else Annotation.WEIGHT.field
            skipped[Skipped(field, f"the scheduler {self.scheduler} knows no weights but 0 and 1; wrr and wlc know them")] = None
        return {key: min(1, weight) for key, weight in weights.items()}

    def _explicit(self, conditions: Conditions) -> int | None:
        if self.knows_slices and conditions.weight is not None:
            return conditions.weight
        return self.weights.weight(conditions.node_name, conditions.zone) if self.weights is not None else None


def treat(service: Service, settings: Settings) -> tuple[Treatment, Service, tuple[Skipped, ...]]:
    """The treatment of a Service with annotations, the Service as it is to be served, and what of its annotations is not used."""
    options = service.options
    skipped: list[Skipped] = []
    chosen = _allowed(options.annotations, settings, skipped)
    if chosen.skips_load_balancer_ips:
        service = msgspec.structs.replace(service, options=msgspec.structs.replace(options, load_balancer_addresses=()))
    scheduler, flags = _scheduler(chosen, settings, skipped)
    treatment = Treatment(
        scheduler=scheduler,
        flags=flags,
        weights=chosen.weights,
        slow_start_s=_slow_start_s(chosen, scheduler, skipped),
        thresholds=chosen.thresholds,
        drain_deadline_s=chosen.drain_deadline_s,
        prefix_lengths=_prefix_lengths(chosen, options, skipped),
        knows_slices=Annotation.WEIGHT in settings.annotations,
    )
    return treatment, service, tuple(skipped)


def usual(options: ServiceOptions, settings: Settings) -> Treatment:
    """The treatment of a Service without annotations: the same object for all Services with one session affinity."""
    knows_slices = settings.annotations is ALL_ANNOTATIONS or Annotation.WEIGHT in settings.annotations
    return _usual(settings.scheduler, options.affinity_timeout_s, knows_slices)


@functools.lru_cache(maxsize=1024)
def _usual(scheduler: str, affinity_timeout_s: int, knows_slices: bool) -> Treatment:  # noqa: FBT001 - a key of the cache
    """As by kube-proxy: the flag ``mh-port`` with the scheduler mh, else none."""
    flags = _usual_flags(scheduler)
    return Treatment(
        scheduler=scheduler,
        flags=flags,
        knows_slices=knows_slices,
        is_usual=scheduler not in ORDERED_SCHEDULERS,
        common=_settings(scheduler, flags, affinity_timeout_s, 0),
    )


def _usual_flags(scheduler: str) -> int:
    return SCHEDULER_PORT if scheduler == "mh" else 0


def _allowed(chosen: ServiceAnnotations, settings: Settings, skipped: list[Skipped]) -> ServiceAnnotations:
    """The annotations that the operator allows."""
    forbidden = chosen.given - settings.annotations
    if not forbidden:
        return chosen
    for annotation in sorted(forbidden):
        reason = "--service-annotations (ipvsproxy.serviceAnnotations) of this node does not allow it"
        skipped.append(Skipped(annotation.field, reason))
    fields = {field: getattr(NO_ANNOTATIONS, field) for one in forbidden if (field := _FIELDS.get(one))}
    if Annotation.MAX_CONNECTIONS in forbidden:
        fields["thresholds"] = NO_THRESHOLDS
    elif Annotation.RESUME_CONNECTIONS in forbidden:
        fields["thresholds"] = Thresholds(chosen.thresholds.upper)
    return msgspec.structs.replace(chosen, **fields)


def _scheduler(chosen: ServiceAnnotations, settings: Settings, skipped: list[Skipped]) -> tuple[str, int]:
    """Scheduler and flags. A scheduler that an annotation names has only the flags that an annotation names."""
    why_missing = settings.missing_schedulers.get(chosen.scheduler, "")
    if why_missing:
        skipped.append(Skipped(Annotation.SCHEDULER.field, f"{why_missing}; {settings.scheduler} is used"))
    is_chosen = bool(chosen.scheduler) and not why_missing
    scheduler = chosen.scheduler if is_chosen else settings.scheduler
    if chosen.scheduler_flags is None:
        return scheduler, 0 if is_chosen else _usual_flags(scheduler)
    if scheduler not in HASH_SCHEDULERS:
        skipped.append(Skipped(Annotation.SCHEDULER_FLAGS.field, f"the scheduler {scheduler} has no flags; sh and mh have them"))
        return scheduler, 0
    return scheduler, chosen.scheduler_flags


def _slow_start_s(chosen: ServiceAnnotations, scheduler: str, skipped: list[Skipped]) -> int:
    if chosen.slow_start_s and scheduler not in GRADUAL_SCHEDULERS:
        reason = (
            f"the scheduler {scheduler} gives no small share to a low weight; one of {', '.join(sorted(GRADUAL_SCHEDULERS))} does"
        )
        skipped.append(Skipped(Annotation.SLOW_START.field, reason))
        return 0
    return chosen.slow_start_s


def _prefix_lengths(chosen: ServiceAnnotations, options: ServiceOptions, skipped: list[Skipped]) -> tuple[int, int]:
    if any(chosen.prefix_lengths) and not options.affinity_timeout_s:
        skipped.append(
            Skipped(Annotation.AFFINITY_NETMASK.field, "the Service has no session affinity (sessionAffinity: ClientIP)")
        )
        return NO_ANNOTATIONS.prefix_lengths
    return chosen.prefix_lengths


def weighed(weights: EvenWeights, by_key: Mapping[bytes, int]) -> Weights:
    """Real servers with these weights, in the same order."""
    chosen = {key: by_key[key] for key in weights.plain()}
    return weights if all(weight == 1 for weight in chosen.values()) else UnevenWeights(chosen)


def in_order_of_addresses(weights: EvenWeights) -> EvenWeights:
    """The same real servers in the order of their addresses."""
    return EvenWeights.of(sorted(weights.plain()))


@functools.lru_cache(maxsize=1024)
def _settings(scheduler: str, flags: int, affinity_timeout_s: int, prefix_length: int) -> VirtualServerSettings:
    """One object for all virtual servers with equal settings."""
    persistent = PERSISTENT if affinity_timeout_s else 0
    return VirtualServerSettings(scheduler, flags | persistent, affinity_timeout_s, prefix_length)
