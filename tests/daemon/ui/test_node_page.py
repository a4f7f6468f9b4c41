"""Covers which changes become an event of the node's page, the words of each event, and the history of the node's traffic."""

from collections.abc import Sequence

import pytest

from ipvsproxy.daemon.ui.node_page import EVENTS, LENGTH_S, LONGEST_TEXT, POINTS, EventLog, History, Point
from ipvsproxy.model.kernel import BoundAddresses
from ipvsproxy.model.net import parse_address
from ipvsproxy.model.plan import Operation, Outcome, Report, Verb
from ipvsproxy.model.service import ServiceName
from ipvsproxy.model.virtual_servers import ConnectionCounts, Counters
from ipvsproxy.store.objects import Changes
from tests.support import summaries

AT_S = 1_700_000_000.0
ADDRESS = Operation(Verb.ADD, BoundAddresses.of(parse_address("10.96.0.10")))


def _texts(log: EventLog) -> list[tuple[str, str]]:
    return [(event["kind"], event["text"]) for event in log.since(0)]


def _report(error: str = "", pending: int = 0, **done: int) -> Report:
    counted = {tuple(name.split("_", 1)): count for name, count in done.items()}
    errors = (Outcome(ADDRESS, error),) if error else ()
    return Report(done=counted, failed={("add", "address"): 1} if error else {}, errors=errors, pending=pending)  # type: ignore[arg-type]


def test_the_event_of_a_sync_contains_the_changed_services_and_the_operations_and_the_durations() -> None:
    log = EventLog()
    names = {ServiceName("shop", f"s{number}"): 0.0 for number in range(7)}
    changes = Changes(services=names)
    log.synced(
        summaries.summary(changes, report=_report(add_real_server=2, remove_virtual_server=1), waited_s=0.5, applied_s=0.25), AT_S
    )
    (event,) = log.since(0)
    assert event == {
        "id": 1,
        "firstId": 1,
        "at": AT_S,
        "kind": "sync",
        "text": "7 Services changed; added 2 real servers; removed 1 virtual server",
        "services": ("shop/s0", "shop/s1", "shop/s2", "shop/s3", "shop/s4"),
        "serviceCount": 7,
        "unchangedSyncs": 0,
        "endpoints": (),
        "operations": {"add real_server": 2, "remove virtual_server": 1},
        "durationSeconds": 0.25,
        "latencySeconds": 0.75,
    }


def test_the_text_of_an_event_about_one_service_begins_with_the_name_of_the_service() -> None:
    log = EventLog()
    log.synced(summaries.summary(is_audit=True), AT_S)
    assert log.last == 0
    log.synced(summaries.summary(Changes(services={ServiceName("demo", "web"): 0.0}), report=_report(add_virtual_server=1)), AT_S)
    assert _texts(log) == [("sync", "demo/web: added 1 virtual server")]


def test_successive_syncs_without_a_change_are_shown_as_one_event() -> None:
    log = EventLog()
    for number in range(3):
        log.synced(summaries.summary(Changes(services={ServiceName("demo", f"s{number}"): 0.0})), AT_S + number)
    (event,) = log.since(0)
    assert event["text"] == "nothing to change on this node, 3 times in a row"
    assert (event["id"], event["firstId"], event["at"], event["unchangedSyncs"]) == (3, 1, AT_S + 2, 3)
    assert event["services"] == ("demo/s2",)
    log.note("watch", "Service", "connected", AT_S)
    log.note("watch", "Service", "stale", AT_S)
    log.synced(summaries.summary(Changes(services={ServiceName("demo", "s"): 0.0})), AT_S)
    assert [(one["id"], one["firstId"], one["text"]) for one in log.since(3)] == [
        (5, 5, "nothing to change on this node"),
        (4, 4, "Service: stale"),
    ]


def test_an_event_of_drift_shows_whether_the_drift_was_repaired() -> None:
    log = EventLog()
    log.synced(summaries.summary(drifted={"real_server": 2}, report=_report(add_real_server=2)), AT_S)
    log.synced(summaries.summary(drifted={"real_server": 1}, report=_report(pending=1)), AT_S)
    assert _texts(log) == [
        ("drift", "1 real server changed by another program; 1 object is still to be repaired"),
        ("sync", "added 2 real servers"),
        ("drift", "2 real servers changed by another program; repaired"),
    ]


def test_a_repeated_failure_is_shown_as_one_event_until_the_operation_succeeds() -> None:
    log = EventLog()
    for _ in range(3):
        log.synced(summaries.summary(report=_report("no room", pending=1)), AT_S)
    failed = [text for kind, text in _texts(log) if kind == "failure"]
    assert failed == ["add address 10.96.0.10: no room"]
    log.synced(summaries.summary(report=_report(add_address=1)), AT_S)
    log.synced(summaries.summary(report=_report("no room", pending=1)), AT_S)
    assert len([kind for kind, _ in _texts(log) if kind == "failure"]) == 2


def test_an_error_text_that_contains_its_operation_is_shown_unchanged() -> None:
    log = EventLog()
    log.synced(summaries.summary(report=_report("add address 10.96.0.10: no room", pending=1)), AT_S)
    assert _texts(log) == [("sync", "1 operation failed; 1 object waits"), ("failure", "add address 10.96.0.10: no room")]


def test_the_log_returns_one_event_for_each_change_of_a_state_with_the_newest_event_first() -> None:
    log = EventLog()
    for state in "aabcd":
        log.note("health", "x", state, AT_S)
    assert _texts(log) == [("health", "x: d"), ("health", "x: c"), ("health", "x: b")]
    assert [event["text"] for event in log.since(1)] == ["x: d", "x: c"]


def test_the_number_and_length_of_events_are_bounded() -> None:
    log = EventLog()
    for number in range(EVENTS + 10):
        log.note("health", "this node", f"{number}" + "x" * 1000, AT_S)
    events = list(log.since(0))
    assert (len(events), log.last) == (EVENTS, EVENTS + 9)
    assert max(len(event["text"]) for event in events) == LONGEST_TEXT


BEGAN_S = 1_700_000_000.0


def _add(history: History, now: float, connections: int | None) -> None:
    counted = None if connections is None else Counters(*(times * connections for times in range(1, 6)))
    history.add(counted, None, now, BEGAN_S + now)


@pytest.mark.parametrize(
    ("counted", "rates"),
    [
        pytest.param(((0, 7),), [None], id="the first point has no rate"),
        # Here, the kernel has updated its counters late.
        pytest.param(((0, 0), (2, 0), (4, 40)), [None, 0, 10], id="short intervals are combined"),
        pytest.param(((0, 1000), (10, 20)), [None, 2], id="a reset counts from zero"),
        pytest.param(((0, 0), (10, 10), (20, None), (30, 30)), [None, 1, None, None], id="unreadable counters are a gap"),
    ],
)
def test_the_points_of_the_history_have_the_rates_of_connections(
    counted: Sequence[tuple[float, int | None]], rates: list[float | None]
) -> None:
    history = History()
    assert history.last is None
    for now, connections in counted:
        _add(history, now, connections)
    assert [point.connections_per_second for point in history.since(0)] == rates


def test_a_point_of_the_history_has_the_rates_since_the_previous_point() -> None:
    history = History()
    _add(history, 0, 0)
    _add(history, 30, 60)
    assert history.last == Point(BEGAN_S + 30, 2, 4, 6, 8, 10, 0, None)


def test_a_point_of_the_history_has_the_active_and_inactive_connections_of_that_moment() -> None:
    history = History()
    for now, connections in ((0, ConnectionCounts(3, 5)), (2, None), (4, ConnectionCounts(4, 0))):
        history.add(None, connections, now, BEGAN_S + now)
    assert [(point.active_connections, point.inactive_connections) for point in history.since(0)] == [
        (3, 5),
        (None, None),
        (4, 0),
    ]


def test_a_point_of_the_history_has_the_number_of_changes_since_the_previous_point_and_their_longest_latency() -> None:
    history = History()
    history.note_changes(2, 0.5)
    history.note_changes(1, 0.2)
    history.note_changes(0, 9.0)
    _add(history, 0, 0)
    _add(history, 10, 0)
    assert [(point.changes, point.latency_seconds) for point in history.since(0)] == [(3, 0.5), (0, None)]


def test_the_history_is_bounded_in_time_and_number_of_points() -> None:
    history = History()
    for number in range(2 * POINTS):
        _add(history, number * 2.0, number)
    kept = list(history.since(0))
    assert len(kept) == POINTS
    _add(history, 4 * POINTS + LENGTH_S, 0)
    assert len(list(history.since(0))) == 1


def test_only_points_later_than_the_requested_time_are_returned() -> None:
    history = History()
    for now in (0, 2, 4):
        _add(history, now, 0)
    assert [point.at - BEGAN_S for point in history.since(BEGAN_S)] == [2, 4]


def test_the_history_begins_again_after_the_clock_was_set_back() -> None:
    history = History()
    for now in (0.0, 10.0, 20.0):
        _add(history, now, 0)
    history.add(Counters(0, 0, 0, 0, 0), None, 30.0, BEGAN_S - 3570)
    assert [point.at - BEGAN_S for point in history.since(0)] == [-3570]


def test_old_points_of_the_history_are_dropped_after_the_clock_was_set_far_ahead() -> None:
    history = History()
    _add(history, 0, 0)
    history.add(Counters(5, 5, 5, 5, 5), None, 5.0, BEGAN_S + 1e6)
    assert [(point.at, point.connections_per_second) for point in history.since(0)] == [(BEGAN_S + 1e6, 1.0)]
