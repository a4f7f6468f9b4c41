"""Covers starts in which acts fail (see ``acts``), on the real kernel of a node that already serves.

If an act fails once, nothing is removed, and everything is programmed.

Several acts fail in the same start, because a separate start for each act would take too long. If an act fails at every attempt,
either everything is programmed nevertheless or a fault is reported. ``scripts/faults`` makes only one act fail in each start. It
tries each act with each kind of failure, at the first, the last and every occurrence.
"""

import subprocess
from collections.abc import Iterator

import pytest

from tests.faults import acts, starts

pytestmark = [pytest.mark.kernel]

STARTS = 10
"""The number of starts over which the failing acts are spread. A start repeats a failed step only a few times, so acts of the
same step should fail in different starts. Therefore each start gets every tenth act."""

ALWAYS = (
    "process iptables-legacy-save",
    "process iptables-legacy-restore -w --noflush",
    "send generic command 3",
    "send generic command 1",
    "file /proc/sys/net/ipv4/ip_forward",
    "send generic command 4 dump",
    "send netfilter type 1543 dump",
    "send netfilter type 1545",
    "send route type 20",
)
"""One act of each kind: a read and a write of each part of the kernel, a setting, and a step of the start.

``starts.judge`` has the rules that hold for each of these acts.
"""

READINGS = (
    "send route type 22 dump",
    "send route type 18 dump",
    "send generic command 4 dump",
)
"""The acts with which the loop reads the kernel before it programs anything. An earlier step of the start may already have made
these reads to check the kernel."""


@pytest.fixture(scope="module", name="node")
def _node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[starts.Node]:
    if "legacy" not in subprocess.run(("iptables", "--version"), capture_output=True, text=True, check=True).stdout:
        pytest.skip("the acts are those of a start with iptables-legacy")
    with starts.Node(tmp_path_factory.mktemp("faults")) as node:
        yield node


@pytest.fixture(scope="module", name="acts_of_a_start")
def _acts_of_a_start(node: starts.Node) -> list[str]:
    """The names of all acts of a start in which nothing fails."""
    ending = node.start()
    assert starts.judge([], ending) == []
    return list(dict.fromkeys(act.name for act in ending.acts))


@pytest.mark.parametrize("first", range(STARTS))
def test_a_start_removes_nothing_and_programs_everything_if_some_acts_fail_once(
    node: starts.Node, acts_of_a_start: list[str], first: int
) -> None:
    fail(node, *(acts.Order(name, acts.failures(name)[0], 1) for name in acts_of_a_start[first::STARTS]))


@pytest.mark.parametrize("name", ALWAYS)
def test_the_failure_is_reported_and_nothing_is_removed_if_an_act_always_fails(node: starts.Node, name: str) -> None:
    fail(node, acts.Order(name, acts.failures(name)[0], 0))


def test_nothing_is_removed_if_the_first_reading_succeeds_and_the_second_fails(node: starts.Node) -> None:
    fail(node, *(acts.Order(name, "refused", 2) for name in READINGS))


def fail(node: starts.Node, *orders: acts.Order) -> None:
    ending = node.start(*orders)
    assert {order.name for order in orders} - ending.failed == set(), "these acts have not come up"
    assert starts.judge(orders, ending) == [], ending.log
