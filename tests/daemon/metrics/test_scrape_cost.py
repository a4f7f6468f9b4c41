"""Checks how a scrape's number of interpreter steps grows with the number of Services. ``scripts/bench`` measures seconds."""

import asyncio
import concurrent.futures
import dataclasses
import itertools

import pytest

from ipvsproxy.daemon.base import timing
from ipvsproxy.daemon.metrics.metrics import Metrics
from ipvsproxy.model.net import Protocol
from ipvsproxy.model.virtual_servers import Counters, VirtualServerKey
from tests.daemon.metrics.test_traffic import Scene
from tests.support import builders, http_client
from tests.support.steps import counted

FEW, MANY = 500, 2000


@dataclasses.dataclass
class Scraped:
    """The number of steps of a scrape, and the longest run of steps during which the event loop runs no other task."""

    all: int
    longest: int


async def scrape(services: int, monkeypatch: pytest.MonkeyPatch) -> Scraped:
    """Count the steps of one scrape of a node with traffic on this many Services.

    The loop yields to other tasks as often as possible.
    """
    addresses = [f"10.96.{number // 250}.{number % 250 + 1}" for number in range(services)]
    executor = concurrent.futures.ThreadPoolExecutor(1)
    scene = Scene(
        *(builders.service(f"web-{at}", cluster=[one]) for at, one in enumerate(addresses)), limit=2 * services, executor=executor
    )
    keys = [VirtualServerKey(Protocol.TCP, builders.addresses(one)[0], 80) for one in addresses]
    scene.kernel.counters = dict.fromkeys(keys, Counters(1, 2, 3, 4, 5))
    metrics = Metrics(clock=scene.clock)
    metrics.show(scene.sources, scene.traffic)
    pauses = [0]

    async def pause(_: float) -> None:
        pauses.append(steps.here)

    with monkeypatch.context() as patched, counted() as steps:
        patched.setattr(timing, "SLICE_S", 0.0)
        patched.setattr(asyncio, "sleep", pause)
        answer = await metrics.expose()
        pauses.append(steps.here)
    executor.shutdown()
    assert http_client.whole(answer).count(b"ipvsproxy_service_bytes_total{") == 2 * services
    return Scraped(steps.all, max(later - earlier for earlier, later in itertools.pairwise(pauses)))


async def test_the_number_of_steps_of_a_scrape_grows_in_proportion_to_the_number_of_its_series(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of the Services beyond the first ``FEW``, the second half costs about as many steps as the first half."""
    await scrape(1, monkeypatch)  # this scrape imports modules, so that no later scrape imports them
    few, half, whole = [(await scrape(services, monkeypatch)).all for services in (FEW, (FEW + MANY) // 2, MANY)]
    assert whole > MANY, "the scrape counts nothing"
    assert whole - half <= 1.2 * (half - few)


async def test_other_tasks_wait_hardly_longer_during_a_larger_scrape(monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest number of steps between two pauses hardly grows with the number of Services."""
    await scrape(1, monkeypatch)  # this scrape imports modules, so that no later scrape imports them
    few, many = [(await scrape(services, monkeypatch)).longest for services in (FEW, MANY)]
    assert many - few <= (MANY - FEW) * 2
