"""Covers the lines that the loop logs, and how their rate is limited.

``test_engine`` covers the events after which the loop logs these lines.
"""

import pytest
from structlog.typing import EventDict

from ipvsproxy.daemon.loop import journal as journals
from ipvsproxy.daemon.loop.journal import Journal
from ipvsproxy.daemon.loop.summary import SyncSummary
from ipvsproxy.model.kernel import Sysctl
from ipvsproxy.model.plan import Operation, Outcome, Report, Verb
from ipvsproxy.model.service import ObjectKind, Owner, ServiceName, Skipped
from ipvsproxy.model.steps import at_once
from ipvsproxy.reconcile.tables.table import Conflict
from ipvsproxy.store.objects import Changes, Complaint
from tests.reconcile import examples
from tests.support import builders, summaries
from tests.support.summaries import Clock

KEY = builders.frontend("10.96.0.10", 80)
OLD, YOUNG, YOUNGEST = (Owner(age, ServiceName("default", name)) for age, name in ((1, "old"), (2, "young"), (3, "youngest")))


def summary(report: Report, *services: str) -> SyncSummary:
    changes = Changes(services={ServiceName("default", name): 0 for name in services})
    return summaries.summary(changes, report=report, applied_s=0.123)


def report(*, done: int = 0, errors: tuple[Outcome, ...] = ()) -> Report:
    return Report(
        done={("add", "address"): done} if done else {},
        failed={("add", "address"): len(errors)} if errors else {},
        errors=errors,
        pending=len(errors),
    )


def test_a_conflict_is_logged_once_while_it_lasts_and_again_when_it_returns_or_grows(logs: list[EventDict]) -> None:
    journal = Journal()
    two, three = Conflict(KEY, OLD, (YOUNG,)), Conflict(KEY, OLD, (YOUNG, YOUNGEST))
    for conflicts in ([two], [two], [three], [], [three]):
        at_once(journal.logging_conflicts(conflicts))
    assert [line["waiting"] for line in logs] == [
        ["default/young"],
        ["default/young", "default/youngest"],
        ["default/young", "default/youngest"],
    ]
    assert {(line["key"], line["served"], line["log_level"]) for line in logs} == {
        ("TCP 10.96.0.10:80", "default/old", "warning")
    }


def test_each_change_of_the_problem_that_makes_a_node_ineligible_is_logged_once(logs: list[EventDict]) -> None:
    for before, trouble in (("", "unknown"), ("unknown", "unknown"), ("unknown", "leaving"), ("leaving", ""), ("", "")):
        journals.log_node("node-a", before, trouble)
    assert [(line["log_level"], line.get("reason")) for line in logs] == [
        ("warning", "unknown"),
        ("warning", "leaving"),
        ("info", None),
    ]


@pytest.mark.parametrize(("invalid", "level"), [(True, "warning"), (False, "debug")])
@pytest.mark.parametrize("where", ["", "web.yaml"])
def test_an_unused_object_or_field_is_logged_with_its_name_and_the_reason(
    where: str, level: str, logs: list[EventDict], *, invalid: bool
) -> None:
    skipped = (Skipped("spec.ports[0]", "no port", invalid),)
    Journal().log_complaints([Complaint(ObjectKind.SERVICE, "default/web", skipped, where)])
    assert logs == [
        {
            "event": "part_not_used",
            "log_level": level,
            "kind": "Service",
            "name": "default/web",
            "field": "spec.ports[0]",
            "reason": "no port",
        }
        | ({"where": where} if where else {})
    ]


def test_a_sync_with_nothing_to_do_is_not_logged(logs: list[EventDict]) -> None:
    Journal().log_sync(summary(report()), draining=4)
    assert logs == []


def test_the_log_has_one_line_for_a_sync_and_one_more_line_for_each_failure(logs: list[EventDict]) -> None:
    operation = Operation(Verb.ADD, examples.virtual_server(KEY))
    Journal().log_sync(summary(report(done=2, errors=(Outcome(operation, "no memory", 12),)), "web"), draining=4)
    failed, synced = logs
    assert failed == {
        "event": "operation_failed",
        "log_level": "error",
        "operation": "add virtual_server TCP 10.96.0.10:80",
        "error": "no memory",
        "errno": 12,
    }
    assert synced == {
        "event": "synced",
        "log_level": "info",
        "services": 1,
        "operations": 2,
        "failed": 1,
        "pending": 1,
        "draining": 4,
        "duration_s": 0.123,
    }


def test_settings_that_cannot_be_written_are_logged_once_as_one_warning(logs: list[EventDict]) -> None:
    journal = Journal()
    operation = Operation(Verb.SET, Sysctl("a", "1"))
    journal.log_settings({"a": "a = 1: read-only", "b": "b = 1: read-only"})
    journal.log_sync(summary(report(errors=(Outcome(operation, "a = 1: read-only", 30),))), draining=0)
    journal.log_settings({"a": "a = 1: read-only"})
    journal.log_settings({"a": "a = 1: read-only", "b": "b = 1: refused"})
    warning = {"event": "kernel_settings_not_writable", "log_level": "warning"}
    assert [line for line in logs if line["event"] != "synced"] == [
        warning | {"settings": ["a", "b"], "error": "a = 1: read-only"},
        warning | {"settings": ["b"], "error": "b = 1: refused"},
    ]


def _broken(name: str, reason: str, parts: int = 1) -> Complaint:
    return Complaint(ObjectKind.SERVICE, name, tuple(Skipped(f"spec.ports[{part}]", reason) for part in range(parts)))


def test_an_object_whose_faults_change_a_thousand_times_a_second_does_not_fill_the_log(logs: list[EventDict]) -> None:
    clock = Clock()
    journal = Journal(clock)
    for change in range(60_000):
        clock.now = change / 1000
        journal.log_complaints([_broken("default/web", f"wrong in way {change % 7}", parts=3)])
        if change == 30_000:
            journal.log_complaints([_broken("default/other", "wrong")])
    assert len(logs) == 3 * journals.SUBJECT_BURST + 1
    assert logs[-1]["name"] == "default/other", "other objects are logged"
    assert logs[-1]["untold"] == 3 * (30_001 - journals.SUBJECT_BURST)
    clock.now += journals.SUBJECT_REFILL_S
    journal.log_complaints([_broken("default/web", "still wrong")])
    assert logs[-1]["untold"] == 3 * 29_999


def test_many_broken_objects_do_not_fill_the_log(logs: list[EventDict]) -> None:
    clock = Clock()
    journal = Journal(clock)
    for now_s, lines in ((0, journals.BURST), (10, 10 / journals.REFILL_S)):
        clock.now = now_s
        logs.clear()
        for number in range(3_000):
            journal.log_complaints([_broken(f"default/web-{number}", "wrong", parts=20)])
        assert len(logs) == lines


def test_an_object_with_a_thousand_faults_does_not_fill_the_log(logs: list[EventDict]) -> None:
    journal = Journal(Clock())
    journal.log_complaints([_broken("default/web", "wrong", parts=1000), _broken("default/other", "wrong")])
    assert len(logs) == journals.PARTS_SHOWN + 1
    assert logs[-1]["untold"] == 1000 - journals.PARTS_SHOWN


def test_a_recurring_conflict_does_not_fill_the_log_but_is_reported_to_the_caller_each_time(logs: list[EventDict]) -> None:
    journal = Journal(Clock())
    returned = 0
    for _ in range(1000):
        returned += len(at_once(journal.logging_conflicts([Conflict(KEY, OLD, (YOUNG,))])))
        at_once(journal.logging_conflicts([]))
    assert len(logs) == journals.SUBJECT_BURST
    assert returned == 1000


def test_syncs_in_quick_succession_are_logged_together(logs: list[EventDict]) -> None:
    clock = Clock()
    journal = Journal(clock)
    for number in range(10_000):
        clock.now = number / 100
        journal.log_sync(summary(report(done=1), "web"), draining=0)
    allowed = journals.SYNCS_BURST + 100 / journals.SYNCS_REFILL_S
    assert allowed - 2 <= len(logs) <= allowed
    assert sum(line.get("untold", 0) for line in logs) + len(logs) >= 10_000 - 100
