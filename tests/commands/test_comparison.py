"""Covers that each table has the same desired state in ``run`` and in the commands that inspect a node.

The tables are compared after ``run`` has programmed the kernel.
"""

import itertools
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from ipvsproxy.commands import plan
from ipvsproxy.commands.inspection import Comparison
from ipvsproxy.model.service import ApiObject, Gone, ObjectKind
from ipvsproxy.reconcile.kinds.node_tables import NodeTables
from tests.support import builders, memory_node
from tests.support.inspected_node import inspected
from tests.support.memory_node import MemoryNode
from tests.support.virtual_time import in_virtual_time
from tests.test_scenarios import SCENARIOS, SETTINGS, read_states

API_SERVER, API_SERVER_PORT = "172.18.0.77", 7443

State = Sequence[ApiObject]


API_SERVERS: State = (
    builders.service("kubernetes", builders.service_port(443, name="https"), cluster=["10.96.0.1"]),
    builders.endpoint_slice(
        builders.endpoint(builders.NODE_ADDRESS),
        builders.endpoint(API_SERVER, builders.OTHER_NODE),
        service="kubernetes",
        ports=[builders.endpoint_port(API_SERVER_PORT, name="https")],
    ),
    builders.service("greedy", cluster=["10.96.7.1"], external=[API_SERVER]),
    builders.service(
        "near",
        builders.service_port(API_SERVER_PORT),
        cluster=["10.96.7.2"],
        external=[builders.NODE_ADDRESS, "192.0.2.7"],
    ),
)
"""API servers, one of which runs on this node, and Services with external IPs that are addresses of these API servers."""


def desired(tables: NodeTables) -> Mapping[str, Mapping[Any, Any]]:
    """The desired state of every table except the table of tracked flows, which no command reads."""
    return {
        **{f"entries of {name}": table.desired for name, table in tables.entries.items()},
        "virtual servers": tables.virtual_servers.desired,
        "addresses": tables.addresses.desired,
        "sets": tables.sets.desired,
        "devices": tables.devices.desired,
        "sysctls": tables.sysctls.desired,
        "timeouts": tables.timeouts.desired,
        "rules": tables.skeletons.desired,
    }


async def tell(node: MemoryNode, before: State, after: State) -> None:
    """Replace the API objects of one phase with the API objects of the next phase, and let the node program the change."""
    kept = {memory_node.key_of(item) for item in after}
    node.put(*(item for item in after if item not in before))
    node.remove(*(item for item in before if memory_node.key_of(item) not in kept))
    await node.quiet(after_s=1)


async def assert_all_agree(node: MemoryNode, objects: State) -> None:
    seen = inspected(node.kernel, *objects, translation=node.settings)
    comparison = Comparison(seen)
    for _ in range(2):  # if a command reads the objects twice, the second result must equal the first one
        await comparison.read()
        assert list(map(str, comparison.differences())) == []
        found, wanted = desired(comparison._reconciler._tables), desired(node.engine._reconciler._tables)
        for name, table in wanted.items():
            assert dict(found[name]) == dict(table), name
    operations, survey = await plan.plan(inspected(node.kernel, *objects, translation=node.settings))
    assert [str(one) for one in operations if not str(one).startswith("remove flow")] == []
    assert dict(desired(survey._tables)) == dict(desired(node.engine._reconciler._tables))


async def assert_all_agree_through(states: Sequence[State], node: MemoryNode) -> None:
    node.begin_with(*states[0])
    async with node.running():
        await node.quiet()
        await assert_all_agree(node, states[0])
        for before, after in itertools.pairwise(states):
            await tell(node, before, after)
            await assert_all_agree(node, after)


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
@in_virtual_time
async def test_commands_and_the_daemon_desire_the_same_state_after_each_phase_of_a_scenario(path: pathlib.Path) -> None:
    states = [[put.object for put in state.values()] for state in read_states(path)]
    await assert_all_agree_through(states, MemoryNode(settings=SETTINGS))


@in_virtual_time
async def test_commands_and_the_daemon_desire_the_same_state_if_addresses_of_api_servers_are_refused() -> None:
    objects = (builders.node(), *API_SERVERS)
    await assert_all_agree_through([objects], MemoryNode())
    comparison = Comparison(inspected(memory_node.new_kernel(), *objects))
    changes = await comparison.read()
    assert {str(key) for key in comparison._reconciler._tables.virtual_servers.desired} == {
        "TCP 10.96.0.1:443",
        "TCP 10.96.7.1:80",
        "TCP 10.96.7.2:7443",
        "TCP 192.0.2.7:7443",
    }
    assert [(one.name, [skipped.field for skipped in one.skipped]) for one in changes.complaints] == [
        ("default/greedy", ["spec.externalIPs"]),
        ("default/near", ["spec.externalIPs"]),
    ]


@in_virtual_time
async def test_a_second_read_after_the_deletion_of_a_service_finds_the_same_differences_as_the_first() -> None:
    restricted = builders.service("web", load_balancer=["192.0.2.1"], source_ranges=["198.51.100.0/24"])
    node = MemoryNode()
    node.begin_with(builders.node(), restricted)
    async with node.running():
        await node.quiet()
        seen = inspected(node.kernel, builders.node(), restricted)
        comparison = Comparison(seen)
        await comparison.read()
        assert comparison.differences() == []
        seen.store.deliver([Gone(ObjectKind.SERVICE, restricted.name)], 0)
        told = []
        for _ in range(2):
            await comparison.read()
            told.append({(one.kind, one.name) for one in comparison.differences()})
    assert ("virtual_server", "TCP 192.0.2.1:80") in told[0]
    assert [name for kind, name in told[0] if kind == "rules" and "KUBE-IPVS-OUT-FILTER" in name]
    assert told[0] == told[1]
