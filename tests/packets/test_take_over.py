"""Take-over from kube-proxy and hand-back, with kube-proxy's recorded kernel state, the same API objects, and clients under load.

ipvsproxy must not rewrite any object of kube-proxy, and no client may notice the take-over. After ipvsproxy has stopped, the
kernel must have the state that kube-proxy left. The objects listed in ``golden/accepted.txt`` differ from kube-proxy's objects on
purpose, and ipvsproxy may rewrite them. With ``--ipvs-traffic-scopes=api``, ipvsproxy adds the objects of second scopes to the
recorded state. Before the hand-back, ipvsproxy is started without this flag, and removes these objects.

With the nftables backend, the take-over moves kube-proxy's rules and sets to nftables. Before the hand-back, ipvsproxy is started
with the iptables backend, and moves rules and sets back to iptables, under the same load.
"""

import contextlib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from ipvsproxy.model.net import Family
from ipvsproxy.model.rules import Backend
from ipvsproxy.translate.translation_settings import TrafficScopes
from tests.chaos.take_overs import add_second_address, undisturbed
from tests.packets.switching import holds, iptables_is_empty
from tests.support import cluster, golden_fixtures, golden_state, lab, own_pages, patience, program, scope_rows

pytestmark = [pytest.mark.kernel, pytest.mark.distribution]

RECORDED: Mapping[str, Any] = golden_fixtures.recording("default", "P0")
LONG_LIVED = ("p1", "TCP", "10.96.16.1", 80)
INTERVAL_S = patience.seconds(0.05)
LOOKED_THROUGH = frozenset({"flow"})
"""The kinds of operations that do not count as writes. At a start, operations of the kind ``flow`` only read the tracked flows of
UDP ports."""
WRITTEN = frozenset({("set", "sysctl")})
"""The operations that a take-over may always do. ipvsproxy sets the size of the flow table, because kube-proxy's recorded state
does not include this size."""
SCOPED_SECTIONS = ("virtual_servers", "real_servers", "ipsets", "iptables")
SCOPED = frozenset({("add", "virtual_server"), ("add", "real_server"), ("add", "set"), ("add", "set_entry"), ("set", "rules")})
"""The operations that add the objects of second scopes or write their chains of rules."""
MOVES = cluster.BACKEND is Backend.NFTABLES
"""Whether the take-over writes our rules and sets to nftables, and removes kube-proxy's rules and sets from iptables and
ipset."""


@pytest.mark.parametrize("scopes", [TrafficScopes.KUBE_PROXY, pytest.param(TrafficScopes.API, marks=patience.THOROUGH)])
def test_a_take_over_rewrites_no_object_and_clients_notice_neither_the_take_over_nor_the_return(
    tmp_path: Path, scopes: TrafficScopes
) -> None:
    manifests, log = tmp_path / "manifests", tmp_path / "log"
    manifests.mkdir()
    golden_fixtures.World(manifests).apply("P0")
    flags = ("--hostname-override=node-a", "-v=4", *golden_fixtures.profiles()["default"]["flags"].split())
    has_scopes = scopes is TrafficScopes.API
    chosen = (f"--ipvs-traffic-scopes={scopes}",) if has_scopes else ()
    with lab.Lab() as node, contextlib.ExitStack() as leaving:
        leaving.callback(cluster.clear)
        add_second_address(node)
        golden_state.restore_state(RECORDED)
        with undisturbed(node, [node.open(*LONG_LIVED)], interval_s=INTERVAL_S) as check_held:
            with program.Program(manifests, log, *flags, *chosen, f"--rules-backend={cluster.BACKEND}") as running:
                running.wait_until_synced()
                if MOVES:
                    running.wait_until(lambda: holds(node, Backend.NFTABLES), "moved to nftables", program.SYNCED_WITHIN_S)
                    running.wait_until(iptables_is_empty, "gone from iptables", program.SYNCED_WITHIN_S)
                _check_operations(dict(_operations()), has_scopes=has_scopes)
                check_held()
                assert bool(_traces()) is has_scopes
            if MOVES or has_scopes:
                with program.Program(manifests, log, *flags) as running:
                    if MOVES:
                        running.wait_until(lambda: holds(node, Backend.IPTABLES), "moved back", program.SYNCED_WITHIN_S)
                    running.wait_until(lambda: not _traces(), "without second scopes", program.SYNCED_WITHIN_S)
            check_held()
        differing = golden_state.differences(RECORDED, golden_state.read_state(), golden_state.KERNEL_SECTIONS)
        assert golden_fixtures.unaccepted(differing) == []


def _check_operations(operations: Mapping[tuple[str, str], int], *, has_scopes: bool) -> None:
    """Check that no object of kube-proxy was written again.

    If rules and sets move to nftables, check only virtual and real servers.
    """
    added = SCOPED if has_scopes else frozenset[tuple[str, str]]()
    if MOVES:
        assert {one for one in operations if one[1] in ("virtual_server", "real_server")} <= added
    else:
        written = {one: count for one, count in operations.items() if one[1] not in LOOKED_THROUGH}
        assert written.keys() <= WRITTEN | added
        assert max((count for one, count in written.items() if one not in added), default=0) <= len(Family)


def _traces() -> int:
    """The number of rows in the kernel's state that belong to second scopes."""
    state = golden_state.read_state(SCOPED_SECTIONS)
    compared = golden_state.differences(scope_rows.without_scopes(state), state, SCOPED_SECTIONS)
    return sum(len(rows) for rows in compared.values())


def _operations() -> Iterator[tuple[tuple[str, str], int]]:
    """The number of operations since the start for each verb and kind of object, read from the metrics."""
    for series, value in own_pages.metrics().items():
        if value and series.startswith("ipvsproxy_operations_total{"):
            labels = dict(re.findall(r'(\w+)="(\w+)"', series))
            yield (labels["verb"], labels["kind"]), int(value)
