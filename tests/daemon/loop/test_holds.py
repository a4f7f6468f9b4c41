"""Measures how long one very large Service occupies the event loop; the unit is one executed step of Python code.

While a very large Service occupies the loop, no request is answered and no signal is handled.
"""

import asyncio
import concurrent.futures
import itertools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from ipvsproxy.model.service import ApiObject, EndpointSlice, Service
from tests.support import builders, steps
from tests.support.memory_node import InlineExecutor, MemoryNode
from tests.support.virtual_time import loop

ADDRESSES = 1000
STEP_S = 1e-6
"""The time in seconds by which each step of Python advances the clock of the event loop."""
LONGEST = 150 * ADDRESSES
"""The largest number of Python steps for which a Service may occupy the event loop without a pause. This number of steps suffices
for a few loops over all addresses. With 40,000 addresses, these loops take a fifth of a second."""
POD, OTHER_POD = "10.244.1.1", "10.244.1.2"


class Kernel(InlineExecutor):
    """Runs calls without counting their steps, because the real kernel thread does not occupy the event loop."""

    def submit(self, function: Callable[..., Any], /, *arguments: Any, **named: Any) -> concurrent.futures.Future[Any]:
        trace = sys.gettrace()
        sys.settrace(None)
        try:
            return super().submit(function, *arguments, **named)
        finally:
            sys.settrace(trace)


class CountedNode(MemoryNode):
    """A node whose clock advances by ``STEP_S`` for each counted step of Python code."""

    def __init__(self, counted: steps.Steps) -> None:
        self._counted = counted
        super().__init__(executor=Kernel())

    def _now(self) -> float:
        return super()._now() + self._counted.here * STEP_S


def addresses(first: int) -> tuple[str, ...]:
    return tuple(f"{first}.0.{number >> 8}.{number & 255}" for number in range(ADDRESSES))


def endpoints(*pods: str) -> EndpointSlice:
    return builders.endpoint_slice(*map(builders.endpoint, pods))


LARGE: Sequence[Service] = (
    builders.service(external=addresses(11)),
    builders.service(load_balancer=addresses(12), external_local=True),
)


@pytest.mark.parametrize("large", LARGE, ids=["external addresses", "load balancers with policy Local"])
async def test_a_very_large_service_occupies_the_event_loop_for_a_bounded_number_of_steps(large: Service) -> None:
    turns: list[int] = []
    with steps.counted() as counted:
        node = CountedNode(counted)

        async def take_turns() -> None:
            while True:
                turns.append(counted.here)
                loop().pass_time(STEP_S)
                await asyncio.sleep(0)

        async def sync(deliver: Callable[..., None], *objects: ApiObject) -> None:
            count = len(node.watcher.summaries)
            deliver(*objects)
            await node.watcher.until(lambda: len(node.watcher.summaries) > count)

        async with node.running():
            turning = asyncio.create_task(take_turns())
            await sync(node.begin_with, builders.node())
            await sync(node.put, large, endpoints(POD))
            await sync(node.put, endpoints(POD, OTHER_POD))
            await sync(node.put, endpoints(POD))
            await sync(node.remove, large)
            turning.cancel()
    assert node.watcher.summaries[-1].report.pending == 0
    assert max(later - earlier for earlier, later in itertools.pairwise(turns)) < LONGEST
