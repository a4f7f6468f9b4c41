"""Covers operations that the kernel fails at random, with each possible error.

No operation is forgotten, and an operation that fails delays no other operation for long.

``tests/kernel/base/test_netlink.py`` covers broken netlink sockets and truncated dumps, which are simulated here as outcomes of
operations.
"""

import errno
import random

import pytest

from ipvsproxy.model.kernel import Sysctl
from ipvsproxy.model.plan import Operation, Verb
from ipvsproxy.model.rules import Skeleton
from ipvsproxy.model.sets import IpSet, SetEntry
from ipvsproxy.model.virtual_servers import RealServers, VirtualServer
from ipvsproxy.reconcile import attempts
from tests.daemon.loop.test_engine import assert_from_scratch
from tests.support import builders, patience
from tests.support.memory_node import MemoryNode
from tests.support.virtual_time import in_virtual_time

NUMBERS = (errno.ENOBUFS, errno.EBUSY, errno.ENOMEM, errno.EEXIST, errno.ENOENT, errno.EINVAL, errno.EPERM)
"""Without ESRCH, which means for a real server that its virtual server is gone."""
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
@in_virtual_time
async def test_everything_is_programmed_after_random_failures(number: int, seed: int) -> None:
    dice = random.Random(f"{number}:{seed}")
    node = MemoryNode()
    failing = True
    # Writes of kernel settings are not made to fail, because each setting is written only once.
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


@in_virtual_time
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


@pytest.mark.parametrize("kind", [VirtualServer, RealServers, SetEntry, IpSet])
@in_virtual_time
async def test_an_object_that_always_fails_does_not_delay_other_services(kind: type) -> None:
    node = MemoryNode()
    bad: list[object] = []

    def is_first(operation: Operation) -> bool:
        if isinstance(operation.item, kind) and operation.verb is Verb.ADD and not bad:
            bad.append(operation.item)
        return operation.item in bad

    node.kernel.fail(is_first, errno.ENOMEM, times=1_000_000)
    async with node.running():
        services = [builders.service(f"web-{number}", cluster=(f"10.96.1.{number}",)) for number in range(5)]
        slices = [builders.endpoint_slice(builders.endpoint("10.244.0.5"), service=one.name.name) for one in services]
        node.begin_with(*services, *slices, builders.node())
        await node.quiet(600)
        served = [key for key, server in node.kernel.virtual_servers.items() if server.real_servers]
        assert len(served) >= 4


@in_virtual_time
async def test_real_servers_whose_virtual_server_is_always_missing_do_not_block_the_loop() -> None:
    node = MemoryNode()
    (first,) = builders.addresses(builders.CLUSTER_IP)

    def belongs_to_the_first(operation: Operation) -> bool:
        assert len(node.kernel.applied) < 1000, "the sync does not end"
        return isinstance(operation.item, RealServers) and operation.item.virtual_server.address == first

    node.kernel.fail(belongs_to_the_first, errno.ESRCH, times=1_000_000)
    backends = (builders.endpoint("10.244.0.5"), builders.endpoint("10.244.0.6"))
    async with node.serving(builders.service(), builders.endpoint_slice(*backends), after_s=60):
        node.kernel.forget()
        other = builders.service("other", cluster=("10.96.0.20",))
        node.put(other, builders.endpoint_slice(*backends, service="other"))
        await node.quiet()
        assert set(node.kernel.virtual_servers[builders.frontend("10.96.0.20", 80)].real_servers.values()) == {1}
        await node.quiet(60)
        assert len(node.kernel.applied) < 60 * 10
