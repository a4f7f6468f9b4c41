"""Covers operations that fail in the kernel at random, with each possible error.

Every failed operation is tried again. While rules cannot be written, only operations that need these rules wait.

``tests/kernel/base/test_netlink.py`` covers broken netlink sockets and truncated dumps; in this module, such faults are simulated
by failed operations and by unreadable parts of the kernel.
"""

import errno
import random

import pytest

from ipvsproxy.model.kernel import Sysctl
from ipvsproxy.model.rules import Skeleton
from ipvsproxy.reconcile import attempts
from tests.daemon.loop.test_engine import assert_from_scratch
from tests.support import builders, patience
from tests.support.memory_node import MemoryNode

NUMBERS = (errno.ENOBUFS, errno.EBUSY, errno.ENOMEM, errno.EEXIST, errno.ENOENT, errno.EINVAL, errno.EPERM)
"""The error numbers with which the fake kernel refuses operations. ESRCH is left out: for a real server, this error means that
the virtual server does not exist."""
LOCK_HELD_S = 60
WHOLE_S = 2 * attempts.LONGEST_DELAY_S
PARTS = ("virtual_servers", "sets", "addresses", "skeletons")


def change(node: MemoryNode, dice: random.Random) -> None:
    """Change one of a few Services at random."""
    name = f"web-{dice.randrange(6)}"
    item = builders.service(
        name, builders.service_port(node_port=dice.choice([0, 30000 + int(name[-1])])), cluster=(f"10.96.0.{1 + int(name[-1])}",)
    )
    if dice.random() < 0.3:
        node.remove(item)
    else:
        addresses = dice.sample([f"10.244.0.{number}" for number in range(5)], dice.randint(0, 4))
        node.put(item, builders.endpoint_slice(*map(builders.endpoint, addresses), service=name))


@pytest.mark.parametrize("seed", range(2 if patience.IS_THOROUGH else 1))
@pytest.mark.parametrize("number", NUMBERS)
async def test_everything_is_programmed_after_random_failures(number: int, seed: int) -> None:
    dice = random.Random(f"{number}:{seed}")
    node = MemoryNode()
    failing = True
    # The test does not let a write of a kernel setting fail, because each setting is written only once.
    node.kernel.fail(
        lambda operation: failing and not isinstance(operation.item, Sysctl) and dice.random() < 0.3, number, times=1_000_000
    )
    async with node.running():
        node.begin_with(builders.node())
        for _ in range(40):
            change(node, dice)
            node.kernel.unreadable = {dice.choice(PARTS)} if dice.random() < 0.1 else set()
            await node.quiet(dice.choice([0, 0.1, 3, 20]))
        failing = False
        node.kernel.unreadable = set()
        await node.quiet(WHOLE_S)
        assert_from_scratch(node)
        node.kernel.forget()
        await node.quiet(WHOLE_S)
        assert node.done == [], "nothing is done twice"


async def test_operations_without_iptables_continue_while_another_program_holds_the_iptables_lock() -> None:
    node = MemoryNode()
    is_locked = False
    node.kernel.fail(lambda operation: is_locked and isinstance(operation.item, Skeleton), 0, times=1_000_000)
    async with node.serving(builders.service("web")):
        is_locked = True
        node.put(builders.service("other", cluster=("10.96.0.20",)))
        restricted = builders.service(
            "guarded", cluster=("10.96.0.30",), load_balancer=("203.0.113.1",), source_ranges=("192.0.2.0/24",)
        )
        node.put(restricted)
        await node.quiet(LOCK_HELD_S)
        there = {str(key) for key in node.kernel.virtual_servers}
        assert {"TCP 10.96.0.20:80", "TCP 10.96.0.30:80"} <= there
        assert "TCP 203.0.113.1:80" not in there, "not before its source ranges are in force"
        is_locked = False
        await node.quiet(attempts.LONGEST_DELAY_S)
        assert_from_scratch(node)
