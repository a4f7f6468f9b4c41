"""Which texts are valid as addresses, networks, times and annotations.

``test_treatment.py`` tests what annotations mean on a node.
"""

import pytest

from ipvsproxy.model.annotations import NO_ANNOTATIONS, Annotation, ServiceAnnotations, WeightRules
from ipvsproxy.model.real_servers import NO_THRESHOLDS, Thresholds
from ipvsproxy.model.service import Skipped
from ipvsproxy.model.virtual_servers import SCHEDULER_FALLBACK, SCHEDULER_PORT
from ipvsproxy.translate.api import fields


@pytest.mark.parametrize(("text", "shown"), [("x", "'x'"), ("x" * 65, f"'{'x' * 64}'"), ("a\nb", r"'a\nb'"), (None, "'None'")])
def test_an_invalid_value_is_shown_in_shortened_form(text: str | None, shown: str) -> None:
    assert fields.shown(text) == shown


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("1970-01-01T00:00:01.123456789Z", 1.123456),
        ("1970-01-01T01:00:01.123456789+01:00", 1.123456),
        ("1970-01-01T01:00:01.123456789123456+01:00", 1.123456),
        pytest.param("x" * 100_000, 0, id="endless"),
        ("1970-01-01T01:00:00+01:00", 0),
        ("0001-01-01T00:00:00Z", 0),
        ("0001-01-01T00:00:00", 0),
        ("yesterday", 0),
        ("", 0),
        (None, 0),
    ],
)
def test_a_time_is_parsed_to_the_microsecond_and_an_invalid_time_counts_as_absent(text: str | None, seconds: float) -> None:
    assert fields.seconds(text) == seconds


def parse(**given: str) -> tuple[ServiceAnnotations, list[Skipped]]:
    """The annotations of a Service, given by our annotation names without their prefix."""
    named = {f"ipvsproxy.io/{name.replace('_', '-')}": value for name, value in given.items()}
    return parse_named(named)


def parse_named(named: dict[str, str]) -> tuple[ServiceAnnotations, list[Skipped]]:
    skipped: list[Skipped] = []
    return fields.parse_service_annotations(named, skipped), skipped


THOUSAND = [f"n{number}" for number in range(1000)]


def test_annotations_of_other_programs_are_silently_ignored() -> None:
    parsed, skipped = parse_named({"kubectl.kubernetes.io/last-applied-configuration": "{}"})
    assert parsed is NO_ANNOTATIONS
    assert skipped == []


@pytest.mark.parametrize(
    ("name", "text", "field", "value"),
    [
        ("scheduler", "wrr", "scheduler", "wrr"),
        ("scheduler", " mh ", "scheduler", "mh"),
        ("scheduler-flags", "port", "scheduler_flags", SCHEDULER_PORT),
        ("scheduler-flags", "port, fallback", "scheduler_flags", SCHEDULER_PORT | SCHEDULER_FALLBACK),
        ("scheduler-flags", "flag-1,flag-2", "scheduler_flags", SCHEDULER_PORT | SCHEDULER_FALLBACK),
        ("scheduler-flags", "", "scheduler_flags", 0),
        (
            "weights",
            "zone/eu-1a=10, zone/eu-1b=1, node/n7=0, other=5",
            "weights",
            WeightRules({"n7": 0}, {"eu-1a": 10, "eu-1b": 1}, 5),
        ),
        ("weights", "node/n7=65535", "weights", WeightRules({"n7": 65535}, {}, 1)),
        ("weights", ",".join(f"node/n{one}=1" for one in range(1000)), "weights", WeightRules(dict.fromkeys(THOUSAND, 1), {}, 1)),
        ("slow-start", "1s", "slow_start_s", 1),
        ("slow-start", "30s", "slow_start_s", 30),
        ("slow-start", "1m30s", "slow_start_s", 90),
        ("slow-start", "1h", "slow_start_s", 3600),
        ("drain-deadline", "60m", "drain_deadline_s", 3600),
        ("max-connections", "100", "thresholds", Thresholds(100, 0)),
        ("affinity-netmask", "ipv4=24", "prefix_lengths", (24, 0)),
        ("affinity-netmask", "IPv4=/16, IPv6=64", "prefix_lengths", (16, 64)),
        ("affinity-netmask", "ipv4=32, ipv6=128", "prefix_lengths", (0, 0)),
        ("skip-load-balancer-ips", "true", "skips_load_balancer_ips", True),
        ("skip-load-balancer-ips", "false", "skips_load_balancer_ips", False),
    ],
)
def test_the_text_of_each_annotation_is_converted_to_a_value(name: str, text: str, field: str, value: object) -> None:
    parsed, skipped = parse_named({f"ipvsproxy.io/{name}": text})
    assert skipped == []
    assert getattr(parsed, field) == value
    assert parsed.given == {Annotation(name)}


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("scheduler", "fastest", "'fastest' is none of rr, wrr, lc,"),
        ("scheduler", "", "'' is none of"),
        ("scheduler-flags", "ports", "'ports' is none of port, fallback"),
        ("weights", " , ", "is empty; an example is"),
        ("weights", "zone/a", "'' is not a number in 0..65535"),
        ("weights", "zone/a=65536", "'65536' is not a number in 0..65535"),
        ("weights", "zone/a=-1", "'-1' is not a number in 0..65535"),
        ("weights", "zone/a=\u0663", "'\u0663' is not a number"),
        ("weights", "rack/a=1", "'rack/a=1' is none of node/NAME=WEIGHT, zone/NAME=WEIGHT, other=WEIGHT"),
        ("weights", "zone/=1", "'zone/=1' is none of"),
        ("weights", "zone/a=1,zone/a=2", "'zone/a' has two weights"),
        ("weights", "other=1,other=2", "'other' has two weights"),
        ("weights", ",".join(f"node/n{number}=1" for number in range(1001)), "has 1001 weights, more than 1000"),
        ("slow-start", "30", "'30' is not a duration in 1s..1h"),
        ("slow-start", "0s", "'0s' is not a duration in 1s..1h"),
        ("slow-start", "1h1s", "'1h1s' is not a duration"),
        ("drain-deadline", "-5s", "'-5s' is not a duration"),
        ("max-connections", "0", "'0' is not a number in 1..1000000"),
        ("max-connections", "1000001", "'1000001' is not a number in 1..1000000"),
        ("max-connections", "9" * 5000, f"'{'9' * 64}' is not a number"),
        ("resume-connections", "5", "needs a valid ipvsproxy.io/max-connections"),
        ("affinity-netmask", "24", "'24' is none of ipv4=LENGTH, ipv6=LENGTH"),
        ("affinity-netmask", "ipv4=33", "'33' is not a number in 1..32"),
        ("affinity-netmask", "ipv6=0", "'0' is not a number in 1..128"),
        ("affinity-netmask", "", "is empty; an example is ipv4=24, ipv6=64"),
        ("skip-load-balancer-ips", "yes", "'yes' is none of true, false"),
    ],
)
def test_the_default_is_used_and_the_reason_is_reported_if_an_annotation_is_invalid(name: str, text: str, reason: str) -> None:
    parsed, skipped = parse_named({f"ipvsproxy.io/{name}": text})
    (one,) = skipped
    assert one.field == f"metadata.annotations[ipvsproxy.io/{name}]"
    assert one.reason.startswith(reason)
    assert one.invalid
    assert parsed == ServiceAnnotations(given=frozenset({Annotation(name)}))


def test_an_invalid_annotation_does_not_affect_other_annotations() -> None:
    parsed, skipped = parse(scheduler="wrr", weights="all=1", max_connections="5", resume_connections="x")
    assert (parsed.scheduler, parsed.weights, parsed.thresholds) == ("wrr", None, Thresholds(5, 0))
    assert {one.field for one in skipped} == {Annotation.WEIGHTS.field, Annotation.RESUME_CONNECTIONS.field}


def test_the_resume_connections_annotation_sets_the_lower_threshold() -> None:
    parsed, skipped = parse(max_connections="10", resume_connections="8")
    assert (parsed.thresholds, skipped) == (Thresholds(10, 8), [])
    assert parsed.given == {Annotation.MAX_CONNECTIONS, Annotation.RESUME_CONNECTIONS}
    parsed, skipped = parse(max_connections="10", resume_connections="11")
    assert parsed.thresholds == Thresholds(10, 0)
    assert [one.reason for one in skipped] == ["11 is more than the 10 of max-connections"]
    parsed, skipped = parse(max_connections="x", resume_connections="11")
    assert parsed.thresholds == NO_THRESHOLDS
    assert len(skipped) == 2


def test_annotations_of_kube_router_are_aliases_that_our_annotations_override() -> None:
    aliases = {
        "kube-router.io/service.scheduler": "sh",
        "kube-router.io/service.schedflags": "flag-2",
        "kube-router.io/service.skiplbips": "",
    }
    parsed, skipped = parse_named(aliases)
    assert (parsed.scheduler, parsed.scheduler_flags, parsed.skips_load_balancer_ips) == ("sh", SCHEDULER_PORT, True)
    assert skipped == []
    parsed, skipped = parse_named(aliases | {"ipvsproxy.io/scheduler": "mh", "ipvsproxy.io/skip-load-balancer-ips": "false"})
    assert (parsed.scheduler, parsed.skips_load_balancer_ips) == ("mh", False)
    _, skipped = parse_named({"kube-router.io/service.scheduler": "fastest"})
    assert skipped[0].field == "metadata.annotations[kube-router.io/service.scheduler]"
