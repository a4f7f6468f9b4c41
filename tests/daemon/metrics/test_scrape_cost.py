"""Covers how the cost of a scrape grows with the number of Services, in steps of the interpreter. Seconds are scripts/bench's."""

import asyncio
import concurrent.futures
import dataclasses
import itertools
from collections.abc import Collection, Container, Hashable, Iterator
from typing import Any

import pytest

from ipvsproxy.daemon.base import timing
from ipvsproxy.daemon.metrics import traffic
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


async def grows_too_fast(monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the second half of the Services takes clearly more steps than the first half.

    Steps that every scrape takes do not count.
    """
    await scrape(1, monkeypatch)  # this scrape imports modules, so that no later scrape imports them
    few, half, whole = [(await scrape(services, monkeypatch)).all for services in (FEW, (FEW + MANY) // 2, MANY)]
    return whole - half > 1.2 * (half - few)


async def holds_the_loop(monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the longest run of steps without a pause grows clearly with the number of Services."""
    await scrape(1, monkeypatch)  # this scrape imports modules, so that no later scrape imports them
    few, many = [(await scrape(services, monkeypatch)).longest for services in (FEW, MANY)]
    return many - few > (MANY - FEW) * 2


async def test_the_steps_of_a_scrape_grow_in_proportion_to_its_series(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not await grows_too_fast(monkeypatch)
    assert (await scrape(MANY, monkeypatch)).all > MANY, "the scrape counts nothing"


async def test_a_larger_scrape_lets_other_tasks_run_more_often(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not await holds_the_loop(monkeypatch)


async def test_a_scrape_that_scans_all_rows_for_each_row_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    book = traffic.Ledger.booking

    def book_slowly(booked: traffic.Ledger, rows: Collection[Any], ownerless: Container[Hashable]) -> Iterator[None]:
        for row in rows:
            next(1 for other in rows if other[1] == row[1])
        return book(booked, rows, ownerless)

    monkeypatch.setattr(traffic.Ledger, "booking", book_slowly)
    assert await grows_too_fast(monkeypatch)


async def test_a_scrape_that_works_without_pauses_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ipvsproxy.model.steps.ITEMS_AT_ONCE", 10**9)
    assert await holds_the_loop(monkeypatch)
