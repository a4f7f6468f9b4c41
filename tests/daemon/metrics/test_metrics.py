"""Covers the numbers that the metrics show, and the formats of the page ``/metrics``.

``tests/test_golden.py`` checks that the page has exactly the series recorded from kube-proxy. ``tests/test_reference_pages.py``
checks that each series is declared.
"""

import asyncio
import errno
import gzip
import itertools
from collections.abc import Collection, Iterator, Mapping

import pytest
from prometheus_client import metrics_core

from ipvsproxy.daemon.http.health import Status
from ipvsproxy.daemon.metrics import metrics as metrics_module
from ipvsproxy.daemon.metrics.figures import Sources
from ipvsproxy.daemon.metrics.metrics import Metrics
from ipvsproxy.model.kernel import DEVICE, Device, Flow, FlowCleaning
from ipvsproxy.model.net import Family, Protocol, parse_address
from ipvsproxy.model.plan import Operation, Outcome, Report, Verb
from ipvsproxy.model.rules import Skeleton
from ipvsproxy.model.service import ObjectKind, ServiceName, Skipped
from ipvsproxy.model.virtual_servers import RealServers
from ipvsproxy.reconcile.reconciler import Policy, Reconciler
from ipvsproxy.store.objects import Changes, Complaint, Store
from tests.support import builders, golden_http, http_client
from tests.support.summaries import Clock, state, summary

BOTH = (Family.IPV4, Family.IPV6)
WALL_S = 1_800_000_000.0
SYNC = "kubeproxy_sync_proxy_rules"
WEB = ServiceName(builders.NAMESPACE, "web")


def _metrics(clock: Clock | None = None) -> Metrics:
    clock = clock or Clock()
    metrics = Metrics(clock=clock, wall_clock=lambda: WALL_S)
    status = Status(families=BOTH, sync_period_s=30, clock=clock, wall_clock=clock)
    reconciler = Reconciler(Policy())
    metrics.show(Sources(survey=reconciler.survey, store=Store(started_s=0), status=status))
    return metrics


async def _page(metrics: Metrics) -> str:
    return http_client.whole(await metrics.expose()).decode()


async def _rows(metrics: Metrics) -> Mapping[str, float]:
    """All samples of the metrics page, by name and labels."""
    lines = [line.rpartition(" ") for line in (await _page(metrics)).splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in lines}


async def test_the_network_programming_histogram_has_the_same_buckets_as_in_kube_proxy() -> None:
    series = golden_http.parse_metrics(await _page(_metrics()), ())
    bounds = [0.25, 0.5, *range(1, 60), *range(60, 120, 5), *range(120, 330, 30)]
    buckets = series['kubeproxy_network_programming_duration_seconds{ip_family="IPv4"}']["buckets"]
    assert buckets == [*(f"{bound:g}" for bound in bounds), "+Inf"]


@pytest.mark.parametrize("name", ["process_cpu_seconds_total", "process_resident_memory_bytes", "process_open_fds"])
async def test_the_metrics_page_has_the_process_metrics(name: str) -> None:
    assert (await _rows(_metrics()))[name] > 0


async def test_a_sync_is_counted_once_for_each_family() -> None:
    metrics = _metrics()
    metrics.synced(summary(applied_s=0.003))
    metrics.synced(summary(applied_s=0.1, lacking=[Family.IPV6]))
    rows = await _rows(metrics)
    for family in ("IPv4", "IPv6"):
        assert rows[f'{SYNC}_duration_seconds_count{{ip_family="{family}"}}'] == 2
        assert rows[f'{SYNC}_duration_seconds_sum{{ip_family="{family}"}}'] == pytest.approx(0.103)
        assert rows[f'{SYNC}_duration_seconds_bucket{{ip_family="{family}",le="0.004"}}'] == 1


async def test_the_last_sync_time_of_a_family_is_set_only_by_a_complete_sync_of_this_family() -> None:
    metrics = _metrics()
    metrics._wall_clock = lambda: WALL_S + 1
    metrics.synced(summary(lacking=[Family.IPV6]))
    rows = await _rows(metrics)
    assert rows[f'{SYNC}_last_timestamp_seconds{{ip_family="IPv4"}}'] == WALL_S + 1
    assert rows[f'{SYNC}_last_timestamp_seconds{{ip_family="IPv6"}}'] == 0
    assert rows[f'{SYNC}_last_queued_timestamp_seconds{{ip_family="IPv6"}}'] == WALL_S
    metrics.queued()
    assert (await _rows(metrics))[f'{SYNC}_last_queued_timestamp_seconds{{ip_family="IPv4"}}'] == WALL_S + 1


async def test_metrics_count_changes_per_object_kind_and_measure_programming_latency_per_ip_family() -> None:
    metrics = _metrics()
    counts = {ObjectKind.SERVICE: 2, ObjectKind.ENDPOINT_SLICE: 3, ObjectKind.NODE: 1}
    metrics.synced(summary(Changes(counts=counts, triggers=((Family.IPV6, WALL_S - 0.4), (Family.IPV6, WALL_S + 5)))))
    rows = await _rows(metrics)
    assert rows[f"{SYNC}_service_changes_total"] == 2
    assert rows[f"{SYNC}_endpoint_changes_total"] == 3
    latency = "kubeproxy_network_programming_duration_seconds"
    assert rows[f'{latency}_count{{ip_family="IPv4"}}'] == 0
    # If the clock of another host is ahead of this host's clock, the latency must not become negative.
    assert rows[f'{latency}_bucket{{ip_family="IPv6",le="0.25"}}'] == 1
    assert rows[f'{latency}_bucket{{ip_family="IPv6",le="0.5"}}'] == 2
    assert rows[f'{latency}_sum{{ip_family="IPv6"}}'] == pytest.approx(0.4)


async def test_services_without_local_endpoints_are_counted_until_they_have_local_endpoints() -> None:
    metrics = _metrics()
    metrics.synced(
        summary(
            states=[
                state("web", without_local=[("external", family) for family in BOTH]),
                state("dns", without_local=[("internal", Family.IPV4), ("external", Family.IPV4)]),
            ]
        )
    )
    counts = {
        (policy, family): f'{SYNC}_no_local_endpoints_total{{ip_family="{family}",traffic_policy="{policy}"}}'
        for policy in ("internal", "external")
        for family in ("IPv4", "IPv6")
    }
    rows = await _rows(metrics)
    assert [rows[counts[key]] for key in counts] == [1, 0, 2, 1]
    metrics.synced(summary(states=[state("web", without_local=[("external", Family.IPV4)])]))
    rows = await _rows(metrics)
    assert [rows[counts[key]] for key in counts] == [1, 0, 2, 0]
    metrics.synced(summary(Changes(services={WEB: 0.0, ServiceName(builders.NAMESPACE, "dns"): 0.0})))
    rows = await _rows(metrics)
    assert [rows[counts[key]] for key in counts] == [0, 0, 0, 0]


async def test_failed_writes_of_rules_are_counted_by_family() -> None:
    metrics = _metrics()
    skeletons = [Operation(Verb.SET, Skeleton(family=family, chains={}, jumps=())) for family in BOTH]
    metrics.applied([Outcome(skeletons[0]), Outcome(skeletons[1], error="line 3 failed")], 0.02)
    rows = await _rows(metrics)
    assert rows[f'{SYNC}_iptables_restore_failures_total{{ip_family="IPv4"}}'] == 0
    assert rows[f'{SYNC}_iptables_restore_failures_total{{ip_family="IPv6"}}'] == 1
    assert rows['ipvsproxy_apply_duration_seconds_count{driver="iptables"}'] == 1


async def test_removed_conntrack_flows_are_counted_by_family() -> None:
    metrics = _metrics()
    cleaning = FlowCleaning(Flow(Family.IPV4, Protocol.UDP, parse_address("10.96.0.10"), 53), frozenset())
    metrics.applied([Outcome(Operation(Verb.REMOVE, cleaning), removed=7)] * 2, 0.02)
    rows = await _rows(metrics)
    reconciler = "kubeproxy_conntrack_reconciler"
    assert rows[f'{reconciler}_deleted_entries_total{{ip_family="IPv4"}}'] == 14
    assert rows[f'{reconciler}_sync_duration_seconds_count{{ip_family="IPv4"}}'] == 1
    assert rows[f'{reconciler}_sync_duration_seconds_count{{ip_family="IPv6"}}'] == 0


async def test_operations_are_counted_by_verb_and_kind_and_outcome() -> None:
    metrics = _metrics()
    report = Report(done={("add", "real_server"): 10}, failed={("add", "address"): 1}, errors=(), pending=1, surprises=2)
    metrics.synced(summary(report=report))
    rows = await _rows(metrics)
    assert rows['ipvsproxy_operations_total{kind="real_server",outcome="done",verb="add"}'] == 10
    assert rows['ipvsproxy_operations_total{kind="address",outcome="failed",verb="add"}'] == 1
    assert rows["ipvsproxy_surprises_total"] == 2


async def test_each_sync_records_its_apply_time_and_only_a_sync_with_changes_records_a_waiting_time() -> None:
    metrics = _metrics()
    metrics.synced(summary(states=[state()], waited_s=0.9, applied_s=0.05))
    metrics.synced(summary())
    rows = await _rows(metrics)
    phases = "ipvsproxy_sync_phase_duration_seconds"
    assert rows[f'{phases}_count{{phase="waiting"}}'] == 1
    assert rows[f'{phases}_sum{{phase="waiting"}}'] == 0.9
    assert rows[f'{phases}_count{{phase="apply"}}'] == 2
    assert rows[f'{phases}_sum{{phase="apply"}}'] == 0.05


async def test_only_invalid_objects_and_invalid_parts_of_objects_are_counted() -> None:
    metrics = _metrics()
    complaints = (
        Complaint(ObjectKind.SERVICE, "default/web", (Skipped("spec.ports[0]", "no"), Skipped("", "headless", invalid=False))),
        Complaint(ObjectKind.ENDPOINT_SLICE, "default/web-1", (Skipped("", "not an object"),)),
    )
    metrics.synced(summary(Changes(complaints=complaints)))
    rows = await _rows(metrics)
    invalid = {key: value for key, value in rows.items() if key.startswith("ipvsproxy_invalid_objects_total")}
    assert [key for key, value in invalid.items() if value] == [
        'ipvsproxy_invalid_objects_total{extent="part",kind="Service"}',
        'ipvsproxy_invalid_objects_total{extent="object",kind="EndpointSlice"}',
    ]
    assert sum(invalid.values()) == 2


async def test_requests_to_the_api_server_are_counted() -> None:
    metrics = _metrics()
    metrics.requested("10.0.0.1:6443", "200", 0.02, "GET")
    metrics.requested("10.0.0.1:6443", "<error>", 60.0, "GET")
    rows = await _rows(metrics)
    assert rows['rest_client_requests_total{code="200",host="10.0.0.1:6443",method="GET"}'] == 1
    assert rows['rest_client_requests_total{code="<error>",host="10.0.0.1:6443",method="GET"}'] == 1
    assert rows['rest_client_request_duration_seconds_bucket{host="10.0.0.1:6443",le="0.025",verb="GET"}'] == 1
    assert rows['rest_client_request_duration_seconds_count{host="10.0.0.1:6443",verb="GET"}'] == 2


async def test_the_metrics_show_from_the_start_whether_the_configuration_file_is_applied() -> None:
    metrics = _metrics()
    shown = [(await _rows(metrics))["ipvsproxy_config_in_force"]]
    for is_in_force in (False, True):
        metrics.configured(is_in_force)
        shown.append((await _rows(metrics))["ipvsproxy_config_in_force"])
    assert shown == [1, 0, 1]


async def test_the_duration_of_writes_is_measured_for_every_kernel_driver() -> None:
    metrics = _metrics()
    metrics.applied([Outcome(Operation(Verb.ADD, Device(DEVICE)))], 0.01)
    rows = await _rows(metrics)
    drivers = {key: value for key, value in rows.items() if key.startswith("ipvsproxy_apply_duration_seconds_count")}
    assert len(drivers) == 7
    assert sum(drivers.values()) == 1


async def test_netlink_batches_are_counted_per_driver_and_netlink_errors_per_driver_and_error_name() -> None:
    metrics = _metrics()
    operation = Operation(Verb.ADD, RealServers.of(builders.frontend("10.96.0.10", 80), builders.backend("10.244.0.5")))
    refused = Outcome(operation, error="no memory", errno=errno.ENOMEM)
    metrics.applied([Outcome(operation), refused, refused, Outcome(operation, error="no answer")], 0.01)
    metrics.applied([Outcome(Operation(Verb.SET, Skeleton(family=Family.IPV4, chains={}, jumps=())), error="bad rule")], 0.01)
    rows = {key: value for key, value in (await _rows(metrics)).items() if key.startswith("ipvsproxy_netlink")}
    assert rows == {
        'ipvsproxy_netlink_batches_total{driver="ipvs"}': 1,
        'ipvsproxy_netlink_batches_total{driver="ipset"}': 0,
        'ipvsproxy_netlink_batches_total{driver="addresses"}': 0,
        'ipvsproxy_netlink_batches_total{driver="conntrack"}': 0,
        'ipvsproxy_netlink_errors_total{driver="ipvs",error="ENOMEM"}': 2,
        'ipvsproxy_netlink_errors_total{driver="ipvs",error="other"}': 1,
    }


# The page.


@pytest.mark.parametrize(
    ("accept", "content_type", "is_openmetrics"),
    [
        ("text/html, */*;q=0.1", "text/plain; version=0.0.4; charset=utf-8", False),
        (
            "application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.2",
            "application/openmetrics-text; version=1.0.0; charset=utf-8",
            True,
        ),
    ],
    ids=["text", "openmetrics"],
)
async def test_a_client_gets_the_format_that_it_accepts(accept: str, content_type: str, *, is_openmetrics: bool) -> None:
    """``test_traffic`` covers that Prometheus can parse both formats."""
    answer = await _metrics().expose(accept)
    assert answer.headers == {"Content-Type": content_type}
    assert http_client.whole(answer).endswith(b"# EOF\n") is is_openmetrics


async def test_a_client_that_accepts_gzip_gets_a_compressed_page() -> None:
    answer = await _metrics().expose(accept_encoding="gzip, deflate")
    assert answer.headers["Content-Encoding"] == "gzip"
    assert b"kubeproxy_proxy_healthz_total" in gzip.decompress(http_client.whole(answer))


async def test_the_metrics_page_can_be_read_before_the_served_families_are_known() -> None:
    assert "ipvsproxy_build_info" in await _page(Metrics())


async def test_a_scrape_that_is_cancelled_while_counting_does_not_affect_the_next_scrape(monkeypatch: pytest.MonkeyPatch) -> None:
    begun = asyncio.Event()
    count = metrics_module.gauges

    def pause(sources: Sources, families: Collection[Family]) -> Iterator[metrics_core.Metric | None]:
        yield from itertools.islice(count(sources, families), 3)
        begun.set()
        clock.now += 1
        yield None
        pytest.fail("the scrape goes on after its cancellation")

    clock = Clock()
    metrics = _metrics(clock)
    with monkeypatch.context() as patched:
        patched.setattr(metrics_module, "gauges", pause)
        cancelled = asyncio.create_task(metrics.expose())
        await begun.wait()
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
    assert 'ipvsproxy_pending{kind="virtual_server"}' in await _page(metrics)
