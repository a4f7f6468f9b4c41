"""Delivers each scenario of ``tests/scenarios`` in several ways; a scenario has phases, and each phase is a state of the API.

After each phase, no operation may be pending, whatever the way of delivery. The kernel must have the same objects as a kernel
that was empty before the phase was programmed. The method comes from ``testExpanders`` in projectcalico/calico.
"""

import itertools
import pathlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import pytest
import yaml

from ipvsproxy.model.service import Event, Gone, Listed, ObjectKey, ObjectKind, Put, Service
from ipvsproxy.model.steps import at_once
from ipvsproxy.store.objects import Store
from ipvsproxy.translate.api import decode
from ipvsproxy.translate.translation_settings import Settings, TrafficScopes
from tests.support import builders, fake_kernel, memory_node
from tests.support.memory_node import MemoryNode
from tests.support.virtual_time import in_virtual_time, loop

SCENARIOS = sorted(pathlib.Path(__file__).with_name("scenarios").glob("*.yaml"))
NODE = {
    "apiVersion": "v1",
    "kind": "Node",
    "metadata": {"name": builders.THIS_NODE, "labels": {"topology.kubernetes.io/zone": "zone-a"}},
    "status": {"addresses": [{"type": "InternalIP", "address": builders.NODE_ADDRESS}]},
}
SETTINGS = Settings(cluster_networks=builders.networks("10.244.0.0/16", "fd00:244::/64"), scopes=TrafficScopes.KUBE_PROXY)

State = Mapping[tuple[ObjectKind, ObjectKey], Put]
"""All objects of the API at one moment, in the order of delivery."""

Story = tuple[Sequence[State], bool]
"""A sequence of states, and whether the process is restarted before each state."""


def read_states(path: pathlib.Path) -> list[State]:
    content: Mapping[str, Any] = yaml.load(path.read_text(), Loader=yaml.CSafeLoader)
    return [read_state(phase["objects"], f"{path.name}: {phase['about']}") for phase in content["phases"]]


def read_state(documents: Sequence[Mapping[str, Any]], where: str) -> State:
    state: dict[tuple[ObjectKind, ObjectKey], Put] = {}
    has_node = any(document["kind"] == "Node" for document in documents)
    for document in documents if has_node else (NODE, *documents):
        event = decode.decode_document(document, where)
        assert isinstance(event, Put), event
        assert not (isinstance(event.object, Service) and event.object.skipped), f"{where}: {event.object.skipped}"
        assert (event.kind, event.key) not in state, f"{where}: {event.key} exists twice"
        state[event.kind, event.key] = event
    return state


def as_written(states: Sequence[State]) -> Iterator[Story]:
    yield states, False


def objects_reversed(states: Sequence[State]) -> Iterator[Story]:
    yield [dict(reversed([*state.items()])) for state in states], False


def phases_reversed(states: Sequence[State]) -> Iterator[Story]:
    yield states[::-1], False


def with_empty_phases_between(states: Sequence[State]) -> Iterator[Story]:
    # The Node object is not deleted, because ipvsproxy keeps the last known Node object after a deletion.
    pairs = [(state, {name: put for name, put in state.items() if put.kind is ObjectKind.NODE}) for state in states]
    yield list(itertools.chain.from_iterable(pairs)), False


def each_phase_alone(states: Sequence[State]) -> Iterator[Story]:
    for state in states:
        yield [state], False


def restarted_between_phases(states: Sequence[State]) -> Iterator[Story]:
    yield states, True


def transition(before: State, after: State) -> list[Event]:
    """The events of a change: the changed objects in the order of the new state, and then the deleted objects."""
    changed: list[Event] = [put for name, put in after.items() if before.get(name) != put]
    return [*changed, *(Gone(*name) for name in before if name not in after)]


def first_list(state: State) -> list[Event]:
    listed = [Listed(kind, frozenset(key for of_kind, key in state if of_kind is kind)) for kind in ObjectKind]
    return [*state.values(), *listed]


def assert_in_force(node: MemoryNode, state: Collection[Put]) -> None:
    alone = Store(started_s=0)
    alone.deliver(state, 0)
    assert memory_node.contents(node.kernel) == memory_node.from_scratch(alone, SETTINGS, node.kernel)
    reconciler = node.engine._reconciler
    assert reconciler.pending == 0
    assert not at_once(reconciler.planning(loop().time()))


async def deliver(states: Sequence[State], kernel: fake_kernel.FakeKernel, *, restarted: bool) -> None:
    """Deliver all states to one process, or each state to a new process; check the kernel after each state."""
    for part in [[state] for state in states] if restarted else [states]:
        node = MemoryNode(kernel, settings=SETTINGS)
        async with node.running():
            node.deliver(first_list(part[0]))
            await node.quiet()
            assert_in_force(node, part[0].values())
            for before, after in itertools.pairwise(part):
                node.deliver(transition(before, after))
                await node.quiet()
                assert_in_force(node, after.values())


@pytest.mark.parametrize(
    "expand",
    [as_written, objects_reversed, phases_reversed, with_empty_phases_between, each_phase_alone, restarted_between_phases],
    ids=lambda expand: expand.__name__,
)
@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
@in_virtual_time
async def test_the_kernel_matches_each_state_of_a_scenario_for_every_way_of_delivery(
    path: pathlib.Path, expand: Callable[[Sequence[State]], Iterator[Story]]
) -> None:
    for states, restarted in expand(read_states(path)):
        await deliver(states, memory_node.new_kernel(), restarted=restarted)


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
@in_virtual_time
async def test_the_state_of_the_last_phase_is_programmed_if_all_phases_are_delivered_at_once(path: pathlib.Path) -> None:
    states = read_states(path)
    node = MemoryNode(settings=SETTINGS)
    async with node.running():
        node.deliver([*first_list(states[0]), *itertools.chain(*itertools.starmap(transition, itertools.pairwise(states)))])
        await node.quiet()
        assert_in_force(node, states[-1].values())
        assert len(node.watcher.summaries) == 1
