"""Parses the texts of fields and annotations to values. The module ``treatment`` decides how annotations affect a Service.

A parser of a list uses all valid values, and appends a ``Skipped`` with the field's name for each invalid value.

Rule 1: an invalid annotation affects only one setting, which keeps the node's default. A ``Skipped`` contains the reason.
Rule 2: every number has a lower and an upper bound, because anybody who may write a Service chooses the number.
"""

import datetime as dt
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, TypeVar

from ipvsproxy.model.annotations import (
    FIELDS,
    HIGHEST_WEIGHT,
    LONGEST_S,
    MOST_CONNECTIONS,
    NO_ANNOTATIONS,
    SCHEDULERS,
    Annotation,
    ServiceAnnotations,
    WeightRules,
    field,
)
from ipvsproxy.model.net import Address, Family, Network, parse_address, parse_network
from ipvsproxy.model.real_servers import NO_THRESHOLDS, Thresholds
from ipvsproxy.model.service import Skipped
from ipvsproxy.model.virtual_servers import SCHEDULER_FALLBACK, SCHEDULER_PORT

HIGHEST_PORT = 65535

_SHOWN = 64
"""A reason shows at most this many characters of an invalid value. The limit keeps log lines short."""

T = TypeVar("T")


def addresses(field: str, texts: Iterable[str], skipped: list[Skipped]) -> tuple[Address, ...]:
    """The addresses in their order, without duplicates. Blank texts are ignored, because the API allows blank texts."""
    return _parsed(field, texts, parse_address, skipped)


def networks(field: str, texts: Iterable[str], skipped: list[Skipped]) -> tuple[Network, ...]:
    """The CIDR ranges in their order, without duplicates."""
    return _parsed(field, texts, parse_network, skipped)


def _parsed(field: str, texts: Iterable[str], read: Callable[[str], T], skipped: list[Skipped]) -> tuple[T, ...]:
    values: dict[T, None] = {}
    for text in texts:
        bare = text.strip()
        if bare:
            try:
                values[read(bare)] = None
            except ValueError as error:
                skipped.append(Skipped(field, str(error)))
    return tuple(values)


def shown(text: str | None) -> str:
    """An invalid value as it appears in a reason: in quotation marks, and shortened to ``_SHOWN`` characters."""
    return repr(str(text)[:_SHOWN])


def seconds(text: str | None) -> float:
    """An RFC 3339 time as seconds since the epoch; 0 if the time is absent, unreadable, or before the epoch."""
    try:
        return max(0, dt.datetime.fromisoformat(text or "").timestamp())
    except ValueError:
        return 0


MOST_RULES = 1000
"""The most weights that one Service may give to nodes and zones."""

_SKIP_LOAD_BALANCER_IPS = "kube-router.io/service.skiplbips"
_NAMES: Mapping[str, Annotation] = {
    "kube-router.io/service.scheduler": Annotation.SCHEDULER,
    "kube-router.io/service.schedflags": Annotation.SCHEDULER_FLAGS,
    _SKIP_LOAD_BALANCER_IPS: Annotation.SKIP_LOAD_BALANCER_IPS,
    **{one.whole: one for one in Annotation if one is not Annotation.WEIGHT},
}
"""The names of the annotations that ipvsproxy reads from Services. Our annotations come after kube-router's and therefore
override them."""
_NUMBER = re.compile(r"[0-9]{1,9}", re.ASCII)
_DURATION = re.compile(r"(?:([0-9]{1,5})h)?(?:([0-9]{1,5})m)?(?:([0-9]{1,5})s)?", re.ASCII)
_FLAGS: Mapping[str, int] = {
    **dict.fromkeys(("fallback", "flag-1", "sh-fallback", "mh-fallback"), SCHEDULER_FALLBACK),
    **dict.fromkeys(("port", "flag-2", "sh-port", "mh-port"), SCHEDULER_PORT),
}
"""The scheduler flags; a key is our name, kube-router's name or ipvsadm's name of a flag."""


class _Given(NamedTuple):
    """The value of a Service's annotation, and the annotation's name in the Service."""

    annotation: Annotation
    text: str
    name: str


def parse_service_annotations(raw: Mapping[str, str | None], skipped: list[Skipped]) -> ServiceAnnotations:
    """Parses the annotations of a Service, except unknown ones; appends a ``Skipped`` for each invalid annotation."""
    given: dict[Annotation, _Given] = {}
    for name, annotation in () if raw.keys().isdisjoint(_NAMES) else _NAMES.items():
        text = raw.get(name)
        if text is not None:
            # kube-router obeys ``service.skiplbips`` whatever its value is, so every value counts as true
            given[annotation] = _Given(annotation, "true" if name == _SKIP_LOAD_BALANCER_IPS else text, name)
    if not given:
        return NO_ANNOTATIONS
    values: dict[str, Any] = {}
    for one in given.values():
        if parse := _PARSERS.get(one.annotation):
            try:
                values[FIELDS[one.annotation]] = parse(one.text.strip())
            except ValueError as error:
                skipped.append(Skipped(field(one.name), str(error)))
    values["thresholds"] = _thresholds(given, skipped)
    return ServiceAnnotations(given=frozenset(given), **values)


def parse_slice_weight(raw: Mapping[str, str | None], skipped: list[Skipped]) -> int | None:
    """The weight that annotations give to all endpoints of an EndpointSlice; None if there is no valid weight.

    An invalid weight adds a ``Skipped``. Cilium's annotation (cilium/cilium #46061) counts only if ipvsproxy's annotation is
    absent. Only the weight 0 means the same in both annotations, because the default weight is 100 in Cilium, but 1 in ipvsproxy.
    """
    text, alias = raw.get(Annotation.WEIGHT.whole), raw.get("service.cilium.io/weight")
    if text is None:
        if alias is None or alias.strip() == "0":
            return None if alias is None else 0
        reason = f"only 0 means the same as {Annotation.WEIGHT.whole}, which other weights need"
        skipped.append(Skipped(field("service.cilium.io/weight"), reason, invalid=False))
        return None
    try:
        return _number(text.strip(), 0, HIGHEST_WEIGHT)
    except ValueError as error:
        skipped.append(Skipped(Annotation.WEIGHT.field, str(error)))
        return None


def _number(text: str, lowest: int, highest: int) -> int:
    if not _NUMBER.fullmatch(text) or not lowest <= int(text) <= highest:
        raise ValueError(f"{shown(text)} is not a number in {lowest}..{highest}")
    return int(text)


def _scheduler(text: str) -> str:
    if text not in SCHEDULERS:
        raise ValueError(f"{shown(text)} is none of {', '.join(SCHEDULERS)}")
    return text


def _scheduler_flags(text: str) -> int:
    flags = 0
    for word in _words(text):
        if word not in _FLAGS:
            raise ValueError(f"{shown(word)} is none of port, fallback")
        flags |= _FLAGS[word]
    return flags


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _weights(text: str) -> WeightRules:
    words = _words(text)
    if not words:
        raise ValueError("is empty; an example is zone/eu-1a=10, node/n7=0, other=5")
    if len(words) > MOST_RULES:
        raise ValueError(f"has {len(words)} weights, more than {MOST_RULES}")
    nodes: dict[str, int] = {}
    zones: dict[str, int] = {}
    other: dict[str, int] = {}
    for word in words:
        where, _, number = word.partition("=")
        kind, slash, name = where.strip().partition("/")
        rules = {"node": nodes, "zone": zones}.get(kind) if slash and name else other if where.strip() == "other" else None
        if rules is None:
            raise ValueError(f"{shown(word)} is none of node/NAME=WEIGHT, zone/NAME=WEIGHT, other=WEIGHT")
        if name in rules:
            raise ValueError(f"{shown(where)} has two weights")
        rules[name] = _number(number.strip(), 0, HIGHEST_WEIGHT)
    return WeightRules(nodes, zones, other.get("", 1))


def _duration(text: str) -> int:
    match = _DURATION.fullmatch(text)
    hours, minutes, seconds = (int(part or 0) for part in match.groups()) if match else (0, 0, 0)
    total_s = hours * 3600 + minutes * 60 + seconds
    if not 1 <= total_s <= LONGEST_S:
        raise ValueError(f"{shown(text)} is not a duration in 1s..1h, such as 30s or 1m30s")
    return total_s


def _prefix_lengths(text: str) -> tuple[int, int]:
    lengths: dict[Family, int] = {}
    for word in _words(text):
        name, _, number = word.partition("=")
        family = Family.__members__.get(name.strip().upper())
        if family is None:
            raise ValueError(f"{shown(word)} is none of ipv4=LENGTH, ipv6=LENGTH")
        lengths[family] = _number(number.strip().removeprefix("/"), 1, family.bits)
    if not lengths:
        raise ValueError("is empty; an example is ipv4=24, ipv6=64")
    of_ipv4, of_ipv6 = (lengths.get(family, family.bits) % family.bits for family in (Family.IPV4, Family.IPV6))
    return of_ipv4, of_ipv6


def _switch(text: str) -> bool:
    if text not in ("true", "false"):
        raise ValueError(f"{shown(text)} is none of true, false")
    return text == "true"


def _thresholds(given: Mapping[Annotation, _Given], skipped: list[Skipped]) -> Thresholds:
    """The connection thresholds; no thresholds if the upper threshold is invalid or absent."""
    numbers = dict.fromkeys((Annotation.MAX_CONNECTIONS, Annotation.RESUME_CONNECTIONS), 0)
    for annotation in numbers:
        if one := given.get(annotation):
            try:
                numbers[annotation] = _number(one.text.strip(), 1, MOST_CONNECTIONS)
            except ValueError as error:
                skipped.append(Skipped(annotation.field, str(error)))
    upper, lower = numbers.values()
    if lower and not upper:
        skipped.append(Skipped(Annotation.RESUME_CONNECTIONS.field, f"needs a valid {Annotation.MAX_CONNECTIONS.whole}"))
    elif lower > upper:
        skipped.append(Skipped(Annotation.RESUME_CONNECTIONS.field, f"{lower} is more than the {upper} of max-connections"))
        lower = 0
    return Thresholds(upper, lower) if upper else NO_THRESHOLDS


_PARSERS: Mapping[Annotation, Callable[[str], Any]] = {
    Annotation.SCHEDULER: _scheduler,
    Annotation.SCHEDULER_FLAGS: _scheduler_flags,
    Annotation.WEIGHTS: _weights,
    Annotation.SLOW_START: _duration,
    Annotation.DRAIN_DEADLINE: _duration,
    Annotation.AFFINITY_NETMASK: _prefix_lengths,
    Annotation.SKIP_LOAD_BALANCER_IPS: _switch,
    Annotation.DIRECT_RETURN: _switch,
}
"""The parser of each annotation whose value does not depend on another annotation."""
