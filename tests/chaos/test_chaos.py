"""Tests of the chaos suite itself: a seed reproduces its history, a short history passes, and a wrong kernel state is reported.

``scripts/chaos`` runs long histories; their figures are in ``docs/reliability.md``.
"""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from ipvsproxy.model.rules import Backend
from tests.chaos import drift, harm, kernel_state, nft_drift, plan
from tests.chaos.cluster import Trouble
from tests.chaos.faults import Kind
from tests.chaos.figures import Figures, percentile
from tests.chaos.history import History
from tests.chaos.moments import Moment
from tests.chaos.world import Key, World
from tests.support import golden_state, lab, nft_state
from tests.support.cluster import BACKEND

SEED = 10
"""The seed from which ``plan.draw`` makes a history with a kill of the program, a kernel fault, a trouble (see ``Trouble``) and
drifts."""
LENGTH = {Backend.IPTABLES: 6, Backend.NFTABLES: 9}
"""For each backend, the number of steps in the history that is made from ``SEED``. With nftables, the steps include a switch to
iptables and back."""
MOMENTS = (Moment.FULL_RELOAD, Moment.LOCKED_RESTART, Moment.SILENT_PROXY)
"""The temporary conditions (see ``Moment``) that this history causes on the node. The first condition replaces the condition that
was drawn from the seed. Each of the remaining conditions adds one step at the end of the history."""
QUIET_POINTS = {Backend.IPTABLES: 11, Backend.NFTABLES: 14}
"""The number of calls of ``wait_until_quiet``: one at the beginning, one after each step, one in ``FULL_RELOAD``, and one in
``SILENT_PROXY``."""


def test_the_same_seed_gives_the_same_history_and_another_seed_gives_another_history() -> None:
    def live(seed: int) -> list[object]:
        world = World(random.Random(seed))
        return [world.change() for _ in range(50)]

    assert live(1) == live(1)
    assert live(1) != live(2)


def test_all_changes_of_a_world_applied_to_its_initial_objects_give_its_current_objects() -> None:
    world = World(random.Random(3))
    objects = dict(world.objects)
    for _ in range(200):
        _, put, gone = world.change()
        objects |= {Key(item["kind"], item["metadata"]["name"]): item for item in put}
        for key in gone:
            del objects[key]
    assert objects == world.objects


@pytest.mark.parametrize("direct_return", [True, False])
def test_tunnels_occur_and_nodes_change_only_in_a_world_with_direct_return(
    monkeypatch: pytest.MonkeyPatch, *, direct_return: bool
) -> None:
    monkeypatch.setattr(kernel_state, "_interface_addresses", list)
    world, forwards, nodes = World(random.Random(3), direct_return=direct_return), set(), set()
    for _ in range(60):
        world.change()
        desired = kernel_state.desired(world.objects.values(), direct_return=direct_return)
        forwards |= {(row.partition(" ")[0], one["forward"]) for row, one in desired["real_servers"].items()}
        nodes.add(tuple(desired["ipsets"].get("KUBE-IPVSPROXY-NODES", {"members": ()})["members"]))
    assert (("FWM", "tunnel") in forwards) == direct_return
    others = {("172.18.0.3",), ("172.18.0.4",), ("172.18.0.3", "172.18.0.4")}
    assert nodes == ({(), *others} if direct_return else {()})


def test_a_few_histories_together_have_all_kinds_of_drift_harm_faults_troubles_and_bad_moments() -> None:
    drawn = [plan.draw(1, number, 15) for number in range(7)]
    assert {kind for one in drawn[:5] for kind in one.drifts} == set(drift.DRIFTS)
    assert {kind for one in drawn[:4] for kind in one.faults} == set(Kind)
    assert {kind for one in drawn for kind in one.troubles} == set(Trouble)
    assert {kind for one in drawn[:5] for kind in one.moments} == set(plan.MOMENTS[Backend.IPTABLES])
    assert {kind for number in range(8) for kind in plan.draw(1, number, 15).harms} == set(harm.HARMS)
    kinds = {"drift": "drifts", "harm": "harms", "fault": "faults", "trouble": "troubles", "moment": "moments"}
    for step, name in kinds.items():
        assert all(one.steps.count(step) == len(getattr(one, name)) for one in drawn)
    assert all(bool(set(plan.DIRECTORY_TROUBLES) & set(one.troubles)) is not one.has_server for one in drawn)
    assert all(one.has_server for one in drawn if Moment.SILENT_PROXY in one.moments)
    assert plan.draw(1, 3, 15) == drawn[3]
    assert plan.draw(2, 3, 15) != drawn[3]


def test_a_history_switches_backends_if_and_only_if_it_starts_with_nftables() -> None:
    drawn = [plan.draw(1, number, 15, Backend.NFTABLES) for number in range(7)]
    assert [one.steps.count("move") for one in drawn] == [plan.MOVES] * 7
    assert all(len(one.steps) == 15 for one in drawn)
    assert {kind for one in drawn for kind in one.moments} == set(plan.MOMENTS[Backend.NFTABLES])
    assert not any("move" in plan.draw(1, number, 15).steps for number in range(7))


def test_each_kind_of_drift_of_rules_and_sets_has_an_equivalent_in_nftables() -> None:
    assert set(nft_drift.TWINS) == {kind for kind, sections in drift.SPOILED.items() if {"ipsets", "iptables"} & set(sections)}
    assert len(set(nft_drift.TWINS.values())) == len(nft_drift.TWINS)


def test_a_rule_is_reported_if_its_expressions_change_although_its_comment_stays_the_same() -> None:
    def table(verdict: str) -> list[tuple[str, Any]]:
        rule = {"chain": "IPv4-nat-KUBE-SERVICES", "comment": "-j RETURN", "expr": [{verdict: None}]}
        return [("chain", {"name": "IPv4-nat-KUBE-SERVICES", "handle": 1}), ("rule", rule)]

    expressions = nft_state.Expressions()
    assert expressions.changed(table("return")) == []
    assert expressions.changed(table("return")) == []
    (changed,) = expressions.changed(table("accept"))
    assert "accept" in changed
    assert nft_state.read_rules(table("accept")) == {"v4/nat/KUBE-SERVICES": ["-A KUBE-SERVICES -j RETURN"]}


def test_sets_in_nftables_are_read_in_the_same_form_as_sets_of_ipset() -> None:
    marked: dict[str, Any] = {"name": "KUBE-M", "type": ["ipv4_addr", "inet_proto", "inet_service"]}
    keys = [{"concat": [f"192.0.2.{number}", "tcp", 80]} for number in (1, 2)]
    marked["elem"] = [[{"elem": {"val": keys[0], "comment": "mask 0xff"}}, 16], [keys[1], 17]]
    ranges: dict[str, Any] = {"name": "KUBE-R", "type": ["ipv6_addr", "inet_proto", "inet_service", "ipv6_addr", "mark"]}
    ranges["elem"] = [{"concat": ["fd00::1", "udp", 53, "fd00::", 8]}, {"concat": ["fd00::1", "udp", 53, "fd00::9", 128]}]
    found = nft_state.read_sets(
        [("map", marked), ("set", ranges), ("set", {"name": "KUBE-P", "type": "inet_service", "elem": [80]})]
    )
    assert found == golden_state.parse_sets(
        "create KUBE-M hash:ip,port family inet maxelem 65536 skbinfo\nadd KUBE-M 192.0.2.1,tcp:80 skbmark 0x10/0xff\n"
        "add KUBE-M 192.0.2.2,tcp:80 skbmark 0x11/0x0\n"
        "create KUBE-R hash:ip,port,net family inet6 maxelem 65536\nadd KUBE-R fd00::1,udp:53,fd00::/8\n"
        "add KUBE-R fd00::1,udp:53,fd00::9\n"
        "create KUBE-P bitmap:port range 0-65535\nadd KUBE-P 80\n"
    )


def test_each_kind_of_drift_affects_a_section_of_the_compared_state() -> None:
    assert {section for sections in drift.SPOILED.values() for section in sections} <= set(kernel_state.SECTIONS)


def test_the_report_has_separate_counts_for_each_kind_of_drift_and_for_delayed_repairs() -> None:
    figures = Figures(heals_s=[(2.0, "flush_set"), (3.0, "add_rule"), (7.0, "add_rule")], patient_heals_s=[(9.0, "add_rule")])
    figures.injected["EBUSY"] = 2
    report = json.loads(json.dumps(figures.report()))
    assert report["drifts"] == {"all": 4, "add_rule": 3, "flush_set": 1}
    assert report["kernel faults injected"] == {"all": 2, "EBUSY": 2}
    assert report["drift healed after"] == {"times": 3, "median": 3.0, "95 %": 7.0, "longest": 7.0}
    assert report["healed after, by kind of drift"]["add_rule"] == {"times": 2, "median": 5.0, "95 %": 7.0, "longest": 7.0}
    assert "  with patience, as it returned     times 1, median 9, 95 % 9, longest 9" in figures.lines()
    assert figures.lines()[-1] == "  flush_set                         times 1, median 2, 95 % 2, longest 2"


def test_a_percentile_is_always_one_of_the_values() -> None:
    assert [percentile(range(1, 101), percent) for percent in (50, 95, 100)] == [50, 95, 100]
    assert percentile([4.0], 95) == 4.0


def test_only_a_desired_tcp_virtual_server_may_have_a_draining_real_server() -> None:
    servers = ["TCP 10.96.0.1:80", "UDP 10.96.0.1:53"]
    assert kernel_state.is_draining("TCP 10.96.0.1:80 -> 10.244.0.1:8080", {"weight": 0}, servers)
    assert not kernel_state.is_draining("TCP 10.96.0.1:80 -> 10.244.0.1:8080", {"weight": 1}, servers)
    assert not kernel_state.is_draining("TCP 10.96.0.2:80 -> 10.244.0.1:8080", {"weight": 0}, servers)
    assert not kernel_state.is_draining("UDP 10.96.0.1:53 -> 10.244.0.1:8053", {"weight": 0}, servers)


@pytest.mark.kernel
def test_a_short_history_passes(tmp_path: Path) -> None:
    figures = Figures()
    drawn = plan.draw(SEED, 0, LENGTH[BACKEND], BACKEND)
    drawn = drawn._replace(steps=[*drawn.steps, *["moment"] * (len(MOMENTS) - 1)], moments=MOMENTS)
    with lab.Lab() as node:
        History(drawn, str(SEED), node, tmp_path, figures, quick=True, backend=BACKEND).run()
    assert figures.kills > 0
    assert figures.injected["ENOBUFS"] > 0
    assert figures.troubles.total() == 1
    assert figures.moments == {kind.value: 1 for kind in MOMENTS}
    assert len(figures.heals_s) == len(drawn.drifts)
    assert (figures.quiet_points, figures.verified) == (QUIET_POINTS[BACKEND], 1)
    assert figures.probes > 50
    assert (figures.lost, figures.broken) == (0, 0)
