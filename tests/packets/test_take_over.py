"""Take-over from kube-proxy and hand-back, with kube-proxy's recorded kernel state, the same API objects, and permanent clients.

No object left by kube-proxy may be rewritten, and no client may notice the take-over. After ipvsproxy has stopped, the kernel
must have the state that kube-proxy left. Rows in ``golden/accepted.txt`` differ on purpose, and may be rewritten. Second scopes,
if enabled, are added to the recorded state; before the hand-back, second scopes are disabled, which removes them.

With the nftables backend, the take-over moves kube-proxy's rules and sets to nftables. Before the hand-back, a program with the
iptables backend moves rules and sets back to iptables, under the same load.
"""

import contextlib
import re
import urllib.request
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import pytest

from ipvsproxy.model.net import Family
from ipvsproxy.model.rules import Backend
from ipvsproxy.translate.translation_settings import TrafficScopes
from tests.chaos.take_overs import CLIENTS, add_second_address
from tests.packets.switching import holds
from tests.support import cluster, golden_fixtures, golden_state, lab, patience, program, scope_rows

pytestmark = [pytest.mark.kernel, pytest.mark.distribution]

RECORDED: Mapping[str, Any] = golden_fixtures.recording("default", "P0")
LONG_LIVED = ("p1", "TCP", "10.96.16.1", 80)
INTERVAL_S = patience.seconds(0.05)
LOOKED_THROUGH = frozenset({"flow"})
"""Each start reads the tracked flows of UDP ports, which is not a write."""
WRITTEN = frozenset({("set", "sysctl")})
"""The recording does not include the size of the table of flows."""
SCOPED_SECTIONS = ("virtual_servers", "real_servers", "ipsets", "iptables")
SCOPED = frozenset({("add", "virtual_server"), ("add", "real_server"), ("add", "set"), ("add", "set_entry"), ("set", "rules")})
"""Second scopes add objects, and chains to the rules."""
MOVES = cluster.BACKEND is Backend.NFTABLES
"""Whether the take-over moves rules and sets to nftables, so that it writes them and removes kube-proxy's."""


class Passage(NamedTuple):
    """The results of a take-over: operations by verb and kind, final kernel state, loads of clients, and the open connection."""

    operations: Mapping[tuple[str, str], int]
    state: golden_state.State
    loads: tuple[lab.Load, ...]
    backends: tuple[str, str]
    log: str
    scopes: TrafficScopes
    traces: int
    """The rows of second scopes while the program served."""


@pytest.fixture(
    scope="module", name="passage", params=[TrafficScopes.KUBE_PROXY, pytest.param(TrafficScopes.API, marks=patience.THOROUGH)]
)
def _passage(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Passage]:
    scopes: TrafficScopes = request.param
    directory = tmp_path_factory.mktemp("take-over")
    manifests = directory / "manifests"
    manifests.mkdir()
    golden_fixtures.World(manifests).apply("P0")
    chosen = () if scopes is TrafficScopes.KUBE_PROXY else (f"--ipvs-traffic-scopes={scopes}",)
    flags = ["--hostname-override=node-a", "-v=4", *golden_fixtures.profiles()["default"]["flags"].split()]
    with lab.Lab() as node:
        add_second_address(node)
        golden_state.restore_state(RECORDED)
        connection = node.open(*LONG_LIVED)
        with contextlib.ExitStack() as loads:
            results = [loads.enter_context(node.load(*one[:4], src=one.src, interval_s=INTERVAL_S)) for one in CLIENTS]
            log = directory / "log"
            with program.Program(manifests, log, *flags, *chosen, f"--rules-backend={cluster.BACKEND}") as running:
                running.wait_until_synced()
                if MOVES:
                    running.wait_until(
                        lambda: holds(node, Backend.NFTABLES) and not _left(node), "moved to nftables", program.SYNCED_WITHIN_S
                    )
                operations = dict(_operations())
                asked = connection.ask()
                traces = _traces()
            if MOVES or scopes is TrafficScopes.API:
                with program.Program(manifests, log, *flags) as running:
                    if MOVES:
                        running.wait_until(lambda: holds(node, Backend.IPTABLES), "moved back", program.SYNCED_WITHIN_S)
                    running.wait_until(lambda: not _traces(), "without second scopes", program.SYNCED_WITHIN_S)
        yield Passage(
            operations,
            golden_state.read_state(),
            tuple(one[0] for one in results),
            (connection.backend, connection.ask() if asked == connection.backend else asked),
            log.read_text(),
            scopes,
            traces,
        )
        cluster.clear()


def _traces() -> int:
    """The rows of second scopes in the kernel."""
    state = golden_state.read_state(SCOPED_SECTIONS)
    compared = golden_state.differences(scope_rows.without_scopes(state), state, SCOPED_SECTIONS)
    return sum(len(rows) for rows in compared.values())


def _left(node: lab.Lab) -> list[str]:
    """The chains of iptables and the sets of ipset that kube-proxy may have made."""
    saved = [node.run("node", save) for save in ("iptables-save", "ip6tables-save")]
    sets = node.run("node", "ipset", "list", "-name").split()
    return re.findall(r"^:KUBE-\S+", "\n".join(saved), re.MULTILINE) + [name for name in sets if name.startswith("KUBE-")]


def _operations() -> Iterator[tuple[tuple[str, str], int]]:
    """The operations since the start, read from the metrics."""
    with urllib.request.urlopen("http://127.0.0.1:10249/metrics", timeout=patience.seconds(60)) as answer:
        text = answer.read().decode()
    for labels, value in re.findall(r"^ipvsproxy_operations_total\{(.*)\} ([\d.e+]+)$", text, re.MULTILINE):
        given = dict(re.findall(r'(\w+)="(\w+)"', labels))
        if float(value):
            yield (given["verb"], given["kind"]), int(float(value))


@pytest.mark.skipif(MOVES, reason="rules and sets move to nftables")
def test_no_object_of_kube_proxy_is_written_again(passage: Passage) -> None:
    written = {(verb, kind): count for (verb, kind), count in passage.operations.items() if kind not in LOOKED_THROUGH}
    added = SCOPED if passage.scopes is TrafficScopes.API else frozenset[tuple[str, str]]()
    assert set(written) <= WRITTEN | added, passage.log
    assert max((count for one, count in written.items() if one not in added), default=0) <= len(Family)
    assert bool(passage.traces) is bool(added)


@pytest.mark.skipif(not MOVES, reason="kube-proxy's rules and sets are taken over")
def test_rules_and_sets_are_moved_to_nftables_and_virtual_servers_are_not_rewritten(passage: Passage) -> None:
    servers = {one: count for one, count in passage.operations.items() if one[1] in ("virtual_server", "real_server")}
    added = SCOPED if passage.scopes is TrafficScopes.API else frozenset[tuple[str, str]]()
    assert set(servers) <= added, passage.log
    assert bool(passage.traces) is bool(added)


def test_no_request_fails_during_take_over_and_hand_back(passage: Passage) -> None:
    unlucky = {client: load.failures for client, load in zip(CLIENTS, passage.loads, strict=True) if load.failed}
    assert unlucky == {}, passage.log
    assert all(load.outcomes["ok"] > 10 for load in passage.loads), "clients have sent requests throughout"


def test_an_open_connection_keeps_its_endpoint_during_take_over_and_hand_back(passage: Passage) -> None:
    before, after = passage.backends
    assert before == after


def test_the_state_after_the_hand_back_equals_the_state_that_kube_proxy_left(passage: Passage) -> None:
    differing = golden_state.differences(RECORDED, passage.state, golden_state.KERNEL_SECTIONS)
    assert golden_fixtures.unaccepted(differing) == []


def test_clients_with_the_same_address_do_not_share_an_endpoint() -> None:
    reached = {
        (client.from_, client.src, real_server.rpartition(" -> ")[2])
        for client in CLIENTS
        for real_server in RECORDED["real_servers"]
        if real_server.startswith(f"{client.protocol} {_printed(client.to)}:{client.port} ")
    }
    counted = sum(
        real_server.startswith(f"{client.protocol} {_printed(client.to)}:{client.port} ")
        for client in CLIENTS
        for real_server in RECORDED["real_servers"]
    )
    assert len(reached) == counted > len(CLIENTS), "if they used one port, IPVS would confuse their answers"


def _printed(address: str) -> str:
    return f"[{address}]" if ":" in address else address
