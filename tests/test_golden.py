"""Compares the real program with the recorded kube-proxy: kernel state row by row, HTTP answers, and packets.

Each test is one section of one phase of one profile; a failure lists the rows that differ, each with its scenario. Rows in
``golden/accepted.txt`` may differ. The phases of one profile follow each other in one run of the program.
"""

import functools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.support import golden_fixtures, golden_http, golden_state, lab, program

pytestmark = [pytest.mark.kernel, pytest.mark.timeout(600)]

PHASES = {"default": ("P0", "P1", "P2")}
CASES = [
    (profile, phase, section)
    for profile in golden_fixtures.profiles()
    for phase in PHASES.get(profile, ("P0",))
    for section in (*golden_state.KERNEL_SECTIONS, *golden_http.SECTIONS, *(("graceful_termination",) if phase == "P1" else ()))
]
PROBES: Mapping[str, Any] = golden_fixtures.recording("default", "probes")

SETTLED_WITHIN_S = 45.0
EQUAL_READINGS = 4
"""After this many equal readings of a state that differs from the recording, the state is final."""

ATTEMPTS = 6
"""Enough to choose every endpoint at least once."""

State = dict[str, Any]

_QUESTION = frozenset({"from", "port", "proto", "scenario", "src", "to"})


@pytest.fixture(scope="module", name="node")
def _node() -> Iterator[lab.Lab]:
    with lab.Lab() as node:
        yield node
        golden_state.clear_state()


@pytest.fixture(scope="module", name="observed")
def _observed(node: lab.Lab, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], State]:
    """The state that the program reaches in each phase of a profile; each profile runs once, at the first request."""

    @functools.cache
    def phases(profile: str) -> Mapping[str, State]:
        return dict(_run(node, profile, tmp_path_factory.mktemp(profile)))

    return lambda profile, phase: phases(profile)[phase]


def _start(profile: str, directory: Path) -> tuple[golden_fixtures.World, program.Program]:
    golden_state.clear_state()
    golden_state.unprepare_sysctls()
    manifests = directory / "manifests"
    manifests.mkdir()
    settings = golden_fixtures.profiles()[profile]
    has_ipv6 = not settings.get("no_ip6tables", False)
    world = golden_fixtures.World(manifests, node_has_ipv6=has_ipv6)
    world.apply("P0")
    flags = ["--hostname-override=node-a", *settings["flags"].split()]
    path = None if has_ipv6 else _programs_that_fail(directory / "bin")
    return world, program.Program(manifests, directory / "log", *flags, path=path)


def _programs_that_fail(directory: Path) -> str:
    directory.mkdir()
    for variant in ("", "-legacy", "-nft"):
        for verb in ("", "-save", "-restore"):
            path = directory / f"ip6tables{variant}{verb}"
            path.write_text("#!/bin/sh\necho 'ip6tables: not on this machine' >&2\nexit 3\n")
            path.chmod(0o755)
    return str(directory)


def _run(node: lab.Lab, profile: str, directory: Path) -> Iterator[tuple[str, State]]:
    world, running = _start(profile, directory)
    with running:
        running.wait_until_synced()
        yield "P0", _settle(running, profile, "P0")
        if "P1" not in PHASES.get(profile, ()):
            return
        before = node.open("p1", "TCP", "10.96.16.1", 80)
        world.apply("P1")
        state = _settle(running, profile, "P1")
        new = node.probe("p1", "TCP", "10.96.16.1", 80)
        state["graceful_termination"] = {
            "before": {"backend": before.backend, "outcome": "ok"},
            "new connection": {"backend": "+".join(new.backends), "outcome": new.outcome},
            "open connection": "again" if before.ask() == before.backend else "moved",
            "weights with the connection open": {
                row: server["weight"] for row, server in state["real_servers"].items() if row.startswith("TCP 10.96.16.1:80 ")
            },
        }
        before.abort()
        yield "P1", state
        world.apply("P2")
        yield "P2", _settle(running, profile, "P2")


def _settle(running: program.Program, profile: str, phase: str) -> State:
    """The state, once it equals the recording, or has stopped changing and drains nothing."""
    recorded = golden_fixtures.recording(profile, phase)
    states: list[State] = []
    deadline = time.monotonic() + SETTLED_WITHIN_S

    def is_settled() -> bool:
        states.append(golden_state.read_state())
        if not _report(profile, phase, states[-1], golden_state.KERNEL_SECTIONS) or time.monotonic() > deadline:
            return True
        draining = any(
            server["weight"] == 0 and row not in recorded["real_servers"] for row, server in states[-1]["real_servers"].items()
        )
        return not draining and len(states) > EQUAL_READINGS and all(state == states[-1] for state in states[-EQUAL_READINGS:])

    running.wait_until(is_settled, f"settled in {phase}", 2 * SETTLED_WITHIN_S)
    return states[-1] | golden_http.read_answers(recorded)


def _report(profile: str, phase: str, observed: State, sections: Iterable[str]) -> list[str]:
    """The rows that differ and are not accepted, each with its scenario."""
    differences = golden_state.differences(golden_fixtures.recording(profile, phase), observed, sections)
    return [
        f"{golden_fixtures.scenario_of(row)} | {part} | {row} | {kind}\n    recorded {recorded}\n    observed {value}"
        for part, rows in differences.items()
        for row, kind, recorded, value in rows
        if not golden_fixtures.is_accepted(phase, part, row)
    ]


@pytest.mark.parametrize(("profile", "phase", "section"), CASES)
def test_state_equals_the_recording(observed: Callable[[str, str], State], profile: str, phase: str, section: str) -> None:
    report = _report(profile, phase, observed(profile, phase), [section])
    assert not report, f"{len(report)} rows differ\n" + "\n".join(report)


@pytest.fixture(scope="module", name="answers")
def _answers(node: lab.Lab, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, lab.Result]:
    """All probes after P0 of the default profile."""
    _, running = _start("default", tmp_path_factory.mktemp("probes"))
    with running:
        running.wait_until_synced()
        _settle(running, "default", "P0")
        return _probe_all(node)


def _probe_all(node: lab.Lab) -> Mapping[str, lab.Result]:
    """Run all probes. Those recorded as unanswered run together, because they mostly wait, and choose no endpoint.

    The others run one by one: the endpoints of a probe are certain only while no other client takes turns.
    """
    together = [name for name, recorded in PROBES.items() if "ok" not in recorded["outcome"]]
    answers = dict(zip(together, node.probe_all(map(_probe, together)), strict=True))
    return answers | {name: node.probe_all([_probe(name)])[0] for name in PROBES if name not in answers}


def _probe(name: str) -> lab.Probe:
    recorded = PROBES[name]
    return lab.Probe(
        recorded["from"], recorded["proto"], recorded["to"], recorded["port"], src=recorded.get("src"), count=ATTEMPTS
    )


@pytest.mark.parametrize("name", PROBES)
def test_probes_have_the_recorded_results(answers: Mapping[str, lab.Result], name: str) -> None:
    if golden_fixtures.is_accepted("probes", "probes", name):
        pytest.skip("differs on purpose, see accepted.txt")
    assert _in_recorded_form(name, answers[name]) == PROBES[name]


def _in_recorded_form(name: str, result: lab.Result) -> Mapping[str, Any]:
    asked = {key: value for key, value in PROBES[name].items() if key in _QUESTION}
    if "distinct_backends" in PROBES[name]:
        return asked | {"outcome": result.outcome, "distinct_backends": len(result.backends)}
    return asked | {"outcome": result.outcome, "backends": list(result.backends), "source_seen": list(result.sources)}


def test_the_lab_answers_like_the_recorded_node(node: lab.Lab) -> None:
    """Tests the lab: with kube-proxy's own state in the kernel, every probe has its recorded result."""
    golden_state.restore_state(golden_fixtures.recording("default", "P0"))
    answers = _probe_all(node)
    assert {name: _in_recorded_form(name, result) for name, result in answers.items()} == PROBES
