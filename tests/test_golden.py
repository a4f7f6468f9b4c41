"""Compares ipvsproxy with recordings of kube-proxy: the kernel state row by row, HTTP answers, and the results of probes.

Each test compares one section in one phase of one profile; a failure lists the differing rows. The rows in
``golden/accepted.txt`` may differ. The phases of a profile follow each other in a single run of the program. kube-proxy has no
second scopes (``docs/scopes.md``), so the recordings do not contain any. Therefore one profile runs once more with second scopes
(``SCOPED``). Apart from the second scopes, everything in this run must equal the recording. Every recorded Service with
externalTrafficPolicy Local must have second scopes, and no other Service may have them.
"""

import functools
import ipaddress
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from ipvsproxy.model.net import Family
from ipvsproxy.model.rules import Backend
from ipvsproxy.model.sets import IpSet, SetKind
from tests.packets.test_scopes import API
from tests.support import cluster, golden_fixtures, golden_http, golden_state, lab, patience, program, scope_rows
from tests.support.programs import make_program

pytestmark = [pytest.mark.kernel]

SECTIONS = tuple(
    section for section in golden_state.KERNEL_SECTIONS if cluster.BACKEND is not Backend.NFTABLES or section != "iptables"
)
"""The sections of the kernel's state that are compared with the recordings. With nftables, the section ``iptables`` is left out,
because rules in nftables differ from the recorded iptables rules. Sets are compared entry by entry."""
PROFILES = [
    name
    for name, profile in golden_fixtures.profiles().items()
    if cluster.BACKEND is not Backend.NFTABLES or not profile.get("no_ip6tables")
]
"""With nftables, the profile without ip6tables is left out, because nftables serves IPv6 even without ip6tables."""
SCOPED = {"default with scopes": "default"}
"""For each run with second scopes: the name of the profile whose recording is compared with the run."""
PHASES = {"default": ("P0", "P1", "P2")}
"""The phases of each profile that has several phases; every other profile has only the phase P0."""
ALIKE = ("masquerade-all", "masquerade-bit", "nodeport-primary", "scheduler-mh", "scheduler-wrr")
"""Profiles that run only in thorough runs. They differ from the profile ``default`` only in translation. ``tests/translate`` also
compares the translation of each profile."""
CASES = [
    pytest.param(profile, phase, section, marks=[patience.THOROUGH] * (profile in ALIKE))
    for profile in (*PROFILES, *SCOPED)
    for phase in PHASES.get(profile, ("P0",))
    for section in (*SECTIONS, *golden_http.SECTIONS, *(("graceful_termination",) if phase == "P1" else ()))
]
PROBES: Mapping[str, Any] = golden_fixtures.recording("default", "probes")

SETTLED_WITHIN_S = 120.0
UNCHANGED_S = 15.0
"""A state that differs from the recording counts as final if it has not changed for this time."""

ATTEMPTS = 6
"""The number of requests of a probe. This number is large enough that every endpoint gets at least one request."""

State = dict[str, Any]

_QUESTION = frozenset({"from", "port", "proto", "scenario", "src", "to"})


@pytest.fixture(scope="module", name="node")
def _node(laboratory: lab.Lab) -> Iterator[lab.Lab]:
    yield laboratory
    golden_state.clear_state()


@pytest.fixture(scope="module", name="observed")
def _observed(node: lab.Lab, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], State]:
    """The state that the program reaches in a phase of a profile; each profile runs once, when its state is first requested."""

    @functools.cache
    def phases(profile: str) -> Mapping[str, State]:
        return dict(_run(node, profile, tmp_path_factory.mktemp("golden")))

    return lambda profile, phase: phases(profile)[phase]


def _recording(profile: str, name: str) -> Mapping[str, Any]:
    return golden_fixtures.recording(SCOPED.get(profile, profile), name)


def _start(profile: str, directory: Path) -> tuple[golden_fixtures.World, program.Program]:
    golden_state.clear_state()
    golden_state.unprepare_sysctls()
    manifests = directory / "manifests"
    manifests.mkdir()
    settings = golden_fixtures.profiles()[SCOPED.get(profile, profile)]
    has_ipv6 = not settings.get("no_ip6tables", False)
    world = golden_fixtures.World(manifests, node_has_ipv6=has_ipv6)
    world.apply("P0")
    flags = ["--hostname-override=node-a", f"--rules-backend={cluster.BACKEND}", *settings["flags"].split()]
    flags += API if profile in SCOPED else ()
    path = None if has_ipv6 else _programs_that_fail(directory / "bin")
    return world, program.Program(manifests, directory / "log", *flags, path=path)


def _programs_that_fail(directory: Path) -> str:
    directory.mkdir()
    for variant in ("", "-legacy", "-nft"):
        for verb in ("", "-save", "-restore"):
            make_program(directory, f"ip6tables{variant}{verb}", "echo 'ip6tables: not on this machine' >&2\nexit 3")
    return str(directory)


def _run(node: lab.Lab, profile: str, directory: Path) -> Iterator[tuple[str, State]]:
    world, running = _start(profile, directory)
    with running:
        running.wait_until_synced()
        yield "P0", _settle(world, running, profile, "P0")
        if "P1" not in PHASES.get(profile, ()):
            return
        before = node.open("p1", "TCP", "10.96.16.1", 80)
        world.apply("P1")
        state = _settle(world, running, profile, "P1")
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
        yield "P2", _settle(world, running, profile, "P2")


def _settle(world: golden_fixtures.World, running: program.Program, profile: str, phase: str) -> State:
    """Wait until the state equals the recording, or until no real server drains and the state no longer changes.

    Returns the state.

    ``read_state`` runs several programs one after the other, and a sync may change the kernel in the meantime. A state counts as
    equal only if it also has exactly the second scopes that follow from the recorded Services. Otherwise the wait could end too
    early, because a sync programs the second scopes last.
    """
    recorded = _recording(profile, phase)
    recorded_scopes = dict(_recorded_scopes(world, recorded)) if profile in SCOPED else {}
    state: State = {}
    changed_s = time.monotonic()
    deadline_s = changed_s + SETTLED_WITHIN_S

    def is_settled() -> bool:
        nonlocal state, changed_s
        before, state = state, golden_state.read_state(backend=cluster.BACKEND)
        now_s = time.monotonic()
        changed_s = changed_s if state == before else now_s
        if dict(_observed_scopes(state)) == recorded_scopes and not _report(profile, phase, state, SECTIONS):
            return True
        draining = any(
            server["weight"] == 0 and row not in recorded["real_servers"] for row, server in state["real_servers"].items()
        )
        return now_s > deadline_s or (not draining and now_s > changed_s + UNCHANGED_S)

    running.wait_until(is_settled, f"settled in {phase}", 2 * SETTLED_WITHIN_S)
    answers: State = {}

    def is_readable() -> bool:
        """True unless the health answer reports an unreadable part of the kernel.

        A part is unreadable if a poll stopped waiting for a slow program.
        """
        nonlocal answers
        answers = golden_http.read_answers(recorded)
        return "unreadable" not in str(answers["health"])

    running.wait_until(is_readable, f"readable in {phase}", SETTLED_WITHIN_S)
    return state | answers


def _report(profile: str, phase: str, observed: State, sections: Iterable[str]) -> list[str]:
    """The rows that differ from the recording, except the rows that ``golden/accepted.txt`` lists."""
    if profile in SCOPED:
        observed = scope_rows.without_scopes(observed)
    desired = golden_fixtures.desired(SCOPED.get(profile, profile), phase)
    differences = golden_state.differences(desired, observed, sections)
    return [
        f"{part} | {row} | {kind}\n    recorded {recorded}\n    observed {value}"
        for part, row, kind, recorded, value in golden_fixtures.unaccepted(differences, phase)
    ]


@pytest.mark.parametrize(("profile", "phase", "section"), CASES)
def test_the_state_of_the_kernel_equals_the_recording(
    observed: Callable[[str, str], State], profile: str, phase: str, section: str
) -> None:
    report = _report(profile, phase, observed(profile, phase), [section])
    assert not report, f"{len(report)} rows differ\n" + "\n".join(report)


@pytest.mark.parametrize("profile", SCOPED)
def test_second_scopes_exist_exactly_for_the_services_with_external_traffic_policy_local(
    observed: Callable[[str, str], State], tmp_path: Path, profile: str
) -> None:
    """The cluster scope of a Service port has the endpoints that kube-proxy gave to the cluster IP of the port."""
    world = golden_fixtures.World(tmp_path)
    world.apply("P0")
    state = observed(profile, "P0")
    recorded = _recording(profile, "P0")
    scopes = dict(_recorded_scopes(world, recorded))
    assert scopes
    assert dict(_observed_scopes(state)) == scopes
    no_local = {member for family in Family for member in _members(state, SetKind.NO_LOCAL, family)}
    assert no_local == {_as_member(row) for row in scopes if _has_remote_endpoints_only(recorded, row)}


def _recorded_scopes(world: golden_fixtures.World, recorded: Mapping[str, Any]) -> Iterator[tuple[str, frozenset[str]]]:
    """Yields each recorded external virtual server with policy Local, and the endpoints of its Service's cluster IP."""
    for service in world.services():
        spec = service["spec"]
        if spec.get("externalTrafficPolicy") != "Local":
            continue
        assert spec.get("internalTrafficPolicy", "Cluster") == "Cluster", "its cluster IP has other endpoints"
        addresses = [entry["ip"] for entry in service.get("status", {}).get("loadBalancer", {}).get("ingress", [])]
        addresses += spec.get("externalIPs", [])
        cluster_addresses = {ipaddress.ip_address(one).version: one for one in spec.get("clusterIPs", [spec["clusterIP"]])}
        for port in spec["ports"]:
            protocol = port.get("protocol", "TCP")
            external = {f"{protocol} {_host(address)}:{port['port']}" for address in addresses}
            for row in recorded["virtual_servers"]:
                host, _, number = row.partition(" ")[2].rpartition(":")
                is_node_port = row.startswith(f"{protocol} ") and number == str(port.get("nodePort"))
                address = cluster_addresses.get(ipaddress.ip_address(host.strip("[]")).version)
                if address and (is_node_port or row in external):
                    yield row, _recorded_endpoints(recorded, f"{protocol} {_host(address)}:{port['port']}")


def _recorded_endpoints(recorded: Mapping[str, Any], server: str) -> frozenset[str]:
    rows = (row.split(" -> ") for row, value in recorded["real_servers"].items() if value["weight"])
    return frozenset(endpoint for one, endpoint in rows if one == server)


def _observed_scopes(state: State) -> Iterator[tuple[str, frozenset[str] | None]]:
    """Each destination whose packets get a mark, with the endpoints of the mark's virtual server.

    The endpoints are None if this virtual server does not exist.
    """
    for family in Family:
        for mark, members in scope_rows.marks_of(state["ipsets"], family).items():
            server = scope_rows.server_row(mark, family)
            endpoints = _recorded_endpoints(state, server) if server in state["virtual_servers"] else None
            for member in members:
                address, _, port = member.partition(",")
                protocol, _, number = port.partition(":")
                yield f"{protocol.upper()} {_host(address)}:{number}", endpoints


def _has_remote_endpoints_only(recorded: Mapping[str, Any], row: str) -> bool:
    endpoints = _recorded_endpoints(recorded, row)
    return bool(endpoints) and not any(endpoint.startswith(("10.244.0.", "[fd00:10:244::")) for endpoint in endpoints)


def _members(state: State, kind: SetKind, family: Family) -> list[str]:
    members: list[str] = state["ipsets"].get(IpSet(kind, family).name, {}).get("members", [])
    return members


def _as_member(row: str) -> str:
    protocol, _, address = row.partition(" ")
    host, _, port = address.rpartition(":")
    return f"{host.strip('[]')},{protocol.lower()}:{port}"


def _host(address: str) -> str:
    return f"[{address}]" if ":" in address else address


@pytest.fixture(scope="module", name="answers")
def _answers(node: lab.Lab, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, lab.Result]:
    """The results of all probes after phase P0 of the default profile.

    The probes have a separate run of the program, because phase P1 drains connections.
    """
    world, running = _start("default", tmp_path_factory.mktemp("probes"))
    with running:
        running.wait_until_synced()
        _settle(world, running, "default", "P0")
        return _probe_all(node)


def _probe_all(node: lab.Lab) -> Mapping[str, lab.Result]:
    """Run all probes.

    Probes that got no answer in the recording all run at the same time, because such a probe mostly waits, and reaches no
    endpoint.

    All other probes run one by one, because the endpoints of a probe are predictable only while no other client sends requests.
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
