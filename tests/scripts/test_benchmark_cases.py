"""How the rows of a case follow from its measurements."""

from typing import Any

import pytest

from scripts.benchmark import cases, figures, flows


def test_ratios_of_a_start_use_medians_and_best_values_so_that_a_slow_replay_does_not_improve_them() -> None:
    found = [_start(99.0), _start(4.0), _replay(2.0), _start(5.0), _replay(2.0), _start(12.0, pending=2), _replay(9.0)]
    rows = _rows("start 10000x10", found)
    assert rows["ratio to replay"].value == 2.5
    assert rows["ratio to replay, best"].value == 2.0
    assert rows["ratio without addresses"].value == 4.0
    assert (rows["resident MB"].value, rows["resident MB, peak"].value) == (80.0, 90.0)
    assert (rows["failed or pending"].value, rows["failed or pending"].ok) == (2, False)


def test_another_size_is_relative_to_the_main_one_in_the_same_rounds() -> None:
    rounds = [
        [_start(4.0), _replay(2.0), _start(6.0), _replay(2.0)],
        [_start(9.0), _replay(2.0), _start(6.0), _replay(2.0)],  # one slow start
        [_start(5.0), _replay(2.0), _start(6.0, pending=1), _replay(4.0)],  # one slow replay
    ]
    rows = _rows("start 5000x50", [_start(88.0), _start(99.0), *(one for of_round in rounds for one in of_round)])
    relative = rows["ratio, relative to that of 10000x10"]
    assert (relative.value, relative.target, relative.ok) == (1.2, 1.2, True), "3 and 2.5"
    assert rows["ratio, relative to that of 10000x10, best"].value == 1.5, "3 and 2"
    without = rows["ratio without addresses, relative to that of 10000x10"]
    assert (without.value, without.target) == (1.25, None), "5 and 4"
    assert (rows["ratio to replay"].value, rows["wall s, median"].value) == (3.0, 6.0), "of its own pairs"
    assert (rows["processor s: all"].value, rows["failed or pending"].value) == (99.0, 1)


def test_a_node_with_impossibly_many_pods_is_measured_without_a_target() -> None:
    one_round = [_start(4.0), _replay(2.0), _start(12.0), _replay(4.0)]
    row = _rows("start 5000x50 crowded", [_start(88.0), _start(99.0), *one_round])["ratio, relative to that of 10000x10"]
    assert (row.value, row.target) == (1.5, None)


def test_both_backends_take_turns_and_a_start_with_nftables_may_start_no_process() -> None:
    one_round = [_start(9.0), _replay(2.0), _start(4.0), _replay(1.0)]
    one_round[2]["counts"] = {"processes": 1}
    rows = _rows("backends 1000x10", [_start(99.0), _start(99.0), *one_round * 3])
    assert rows["a start with nftables, relative to one with iptables"].value == 4 / 9
    assert (rows["ratio to replay, nftables"].value, rows["ratio to replay, nftables"].target) == (4.0, 2.5)
    assert rows["ratio to replay, iptables"].target is None
    assert (rows["processes started, nftables"].value, rows["processes started, nftables"].ok) == (1, False)
    assert rows["processes started, iptables"].target is None


def test_without_a_kernel_the_best_processor_time_of_each_backend_counts() -> None:
    times = [{**_start(1.0), "cpu_s": spent} for spent in (2.0, 3.0, 4.0, 2.5)]
    rows = _rows("backends without a kernel", times)
    assert rows["processor of nftables, relative to iptables"].value == 1.25
    assert (rows["failed or pending"].value, rows["failed or pending"].target) == (0, 0)


def test_starts_are_measured_in_several_pairs_except_the_one_that_takes_minutes() -> None:
    measured = {
        case.name: [
            len([1 for what, given in case.measurements if what == "replay" and given["recording"] == f"recording-{size}"])
            for size in sizes
        ]
        for case in _all()
        for sizes in [("10000-10", case.name.removeprefix("start ").replace("x", "-").replace(" crowded", "-10"))]
    }
    assert {name: pairs for name, pairs in measured.items() if name.startswith("start")} == {
        "start 10000x10": [3, 3],
        "start 100x10": [0, 7],
        "start 1000x10": [0, 7],
        "start 44125x2": [3, 3],
        "start 100000x1": [1, 1],
        "start 5000x50": [5, 5],
        "start 5000x50 crowded": [3, 3],
    }


def test_routes_have_targets_and_addresses_beside_them_none() -> None:
    with_routes = [_start(99.0, pending=1), _start(6.0), _replay(4.0)]
    rows = _rows("binding 100000x1 IPv4", [*with_routes, _start(99.0), _start(60.0), _replay(40.0)])
    assert (rows["wall s, median, routes"].value, rows["wall s, median, routes"].target) == (6.0, 8.0)
    assert (rows["ratio to replay, routes"].value, rows["ratio to replay, routes"].target) == (1.5, 2.5)
    assert (rows["wall s, median, addresses"].value, rows["wall s, median, addresses"].target) == (60.0, None)
    assert rows["a start with routes, relative to one with addresses"].value == 0.1
    assert (rows["failed or pending, addresses"].ok, rows["failed or pending, routes"].ok) == (True, False)


def test_a_way_that_was_stopped_has_one_row_that_says_after_how_many_seconds() -> None:
    with_routes = [_start(99.0), _start(6.0), _replay(4.0)]
    stopped = {"stopped_s": cases.START_LIMIT_S}
    rows = _rows("binding 44125x2 IPv6", [*with_routes, stopped, stopped, stopped])
    assert [figure for figure in rows if "addresses" in figure] == [
        "more than so many s, then stopped, addresses",
        "replay: addresses and routes s, routes",
    ]
    assert rows["more than so many s, then stopped, addresses"].value == cases.START_LIMIT_S
    assert rows["ratio to replay, routes"].value == 1.5


def test_both_ways_are_measured_in_turn_in_one_boot_with_the_recordings_of_their_own() -> None:
    (case,) = [case for case in _all() if case.name == "binding 10000x10 IPv6"]
    replays = [given["recording"] for what, given in case.measurements if what == "replay"]
    assert replays == ["recording-10000-10-0-3-addresses", "recording-10000-10-0-3-routes"] * 3
    assert {given["recording"] for what, given in case.measurements if what == "cold" and "recording" in given} == set(replays)


def test_memory_after_changes_has_a_target_if_the_case_sets_one() -> None:
    spread = {"p50_ms": 1.0, "p99_ms": 2.0}
    counts = {"page_faults": 0, "messages": 3, "calls": 6, "system_calls": 9, "processes": 0}
    found = [{"change": {**spread, "own": spread, "cpu_ms": 1.0, "kernel_ms": 0.2, **counts}, "resident_after_mb": 251.0}]
    for name, target in (("change 10000x10", 250), ("change 100000x1", 250), ("change 100x10", None)):
        row = _rows(name, found)["resident MB"]
        assert (row.value, row.target) == (251.0, target)


def test_a_restart_that_sends_existing_objects_counts_as_writing() -> None:
    quiet, loud = _start(3.0), _start(3.0)
    loud = {**loud, "failed": 1, "counts": {**loud["counts"], "written": 7, "refused": 7}}
    found = [
        _start(4.0),
        {**quiet, "operations": 0},
        _start(4.0),
        {**loud, "operations": 0},
        _start(4.0),
        {**quiet, "operations": 0},
    ]
    rows = _rows("restart", found)
    assert (rows["netlink messages that wrote"].value, rows["netlink messages that wrote"].ok) == (7, False)
    assert (rows["failed operations"].value, rows["failed operations"].ok) == (1, False)


def test_the_longest_hold_has_a_target_whatever_the_median() -> None:
    held = {"held_ms": 9.0, "held_best_ms": 8.0, "held_most_ms": 31.0, "wall_s": 0.5, "cpu_s": 0.5, "times": 5, "counts": {}}
    scrape = {**held, "change_ms": 2.0, "series": 5, "bytes": 100}
    audit = {**held, "operations": 0, "poll": held}
    missed = [
        (row.case, row.figure)
        for row in (*figures.audit([{"audit": audit}]), *figures.scrape([{"scrape": scrape, "resident_after_mb": 100.0}]))
        if not row.ok
    ]
    assert missed == [
        ("audit", "loop held ms, longest of all"),
        ("audit", "a poll: loop held ms, longest of all"),
        ("scrape", "loop held ms, longest of all"),
    ]


def _all() -> list[cases.Case]:
    return cases.all_cases(quick=False)


def _rows(name: str, found: list[dict[str, Any]]) -> dict[str, figures.Row]:
    (case,) = (one for one in _all() if one.name == name)
    return {row.figure: row for row in case.rows(found)}


def _start(wall_s: float, *, pending: int = 0) -> dict[str, Any]:
    return {
        "wall_s": wall_s,
        "cpu_s": wall_s,
        "phases": {},
        "counts": {"messages": 10, "calls": 4, "system calls": 4},
        "failed": 0,
        "pending": pending,
        "resident_mb": 80.0,
        "peak_mb": 90.0,
        "imported_mb": 50.0,
    }


def _replay(wall_s: float) -> dict[str, float]:
    return {"wall_s": wall_s, "addresses": 1.0}


def test_time_for_each_flow_and_memory_have_targets_of_their_own() -> None:
    tenth = {"flows": 100_000, "removed": 500, "wall_s": 0.1, "grown_mb": 0.2}
    everything = {"flows": 1_000_000, "removed": 5_000, "wall_s": 2.0, "grown_mb": 119.0}
    (case,) = [case for case in cases.all_cases(quick=True) if case.name == "flows"]
    rows = {row.figure: row for row in case.rows([{"tenth": tenth, "all": everything}])}
    assert rows["µs per flow"].value == pytest.approx(2)
    assert {figure for figure, row in rows.items() if not row.ok} == {
        "µs per flow, relative to a tenth of the flows",
        "memory grown MB",
    }


def test_the_played_kernel_lists_the_given_number_of_flows_and_some_are_deleted() -> None:
    found = flows.clean(1_000)
    assert 1_000 <= found["flows"] < 1_000 + flows.PART_SIZE / 100
    assert 0 < found["removed"] < found["flows"] / 50


def test_annotations_are_compared_with_the_same_start_where_they_are_ignored() -> None:
    found = [_start(wall_s) for wall_s in (2.0, 2.1, 2.5) * 3]
    rows = _rows("annotations", found)
    assert rows["processor, counted and none there, relative to ignored"].value == pytest.approx(1.05)
    assert rows["processor, three on each Service, relative to ignored"].value == pytest.approx(1.25)
    assert rows["failed or pending"].ok


def test_one_more_of_everything_is_compared_with_a_tenth_of_the_services() -> None:
    few = {"one endpoint, p50 ms": 2.0, "one Service, p50 ms": 3.0, "restart s": 0.5, "audit s": 0.2}
    many = {"one endpoint, p50 ms": 2.2, "one Service, p50 ms": 6.0, "restart s": 5.0, "audit s": 2.0}
    rows = [
        *(figures.Row("one more 10000x1", figure, value) for figure, value in few.items()),
        *(figures.Row("one more 100000x1", figure, value) for figure, value in many.items()),
    ]
    found = {row.figure: (round(row.value or 0, 3), row.ok) for row in cases.related(rows)}
    assert found == {
        "one endpoint, relative to 10000 Services": (1.1, True),
        "one Service, relative to 10000 Services": (2, False),
        "restart, each Service, relative to 10000 Services": (1, True),
        "audit, each Service, relative to 10000 Services": (1, True),
    }
