"""What a scrape costs by the number of Services: steps in all, and those that hold the loop. Seconds are scripts/bench's."""

import asyncio
import concurrent.futures
from collections.abc import Callable, Collection
from typing import Any

import pytest

from ipvsproxy.daemon import traffic
from ipvsproxy.daemon.measure import Sources
from ipvsproxy.daemon.metrics import Metrics
from ipvsproxy.daemon.status import Status
from ipvsproxy.kernel.thread import ThreadWorker
from ipvsproxy.model.kernel import Counters, VirtualServerKey
from ipvsproxy.model.net import Family, Protocol
from tests import builders
from tests.daemon.test_traffic import Scene
from tests.steps import Steps, counted

FEW, MANY = 100, 1000


async def scrape(services: int) -> Steps:
    """What one scrape takes that shows traffic of this many Services."""
    addresses = [f"10.96.{number // 250}.{number % 250 + 1}" for number in range(services)]
    worker = ThreadWorker()
    scene = Scene(
        *(builders.service(f"web-{at}", cluster=[one]) for at, one in enumerate(addresses)), limit=2 * services, worker=worker
    )
    keys = [VirtualServerKey(Protocol.TCP, builders.addresses(one)[0], 80) for one in addresses]
    scene.kernel.counters = dict.fromkeys(keys, Counters(1, 2, 3, 4, 5))
    status = Status(families=tuple(Family), sync_period_s=30, clock=scene.clock, wall_clock=scene.clock)
    sources = Sources(reconciler=scene.reconciler, store=scene.store, status=status, clock=scene.clock)
    metrics = Metrics()
    metrics.show(tuple(Family), sources, scene.traffic)
    with counted() as steps, concurrent.futures.ThreadPoolExecutor() as threads:
        asyncio.get_running_loop().set_default_executor(threads)  # threads of a scrape before would go on counting for that one
        answer = await metrics.expose()
    worker.stop()
    assert answer.body.count(b"ipvsproxy_service_bytes_total{") == 2 * services
    return steps


async def grows_too_fast() -> bool:
    """Whether the second half of the Services takes more steps than the first one, what any scrape takes not counted."""
    await scrape(1)  # imports what is imported when it is first needed
    none, half, whole = [(await scrape(services)).all for services in (FEW, (FEW + MANY) // 2, MANY)]
    return whole - half > 1.2 * (half - none)


async def holds_the_loop() -> bool:
    """Whether more Services take more steps in the loop's own thread; a few, that depend on who is first, do not count."""
    await scrape(1)  # as above
    return (await scrape(MANY)).here - (await scrape(FEW)).here > (MANY - FEW) / 10


async def test_a_scrape_takes_steps_in_proportion_to_its_series() -> None:
    assert not await grows_too_fast()
    assert (await scrape(MANY)).all > MANY, "or nothing was counted"


async def test_a_scrape_takes_as_many_steps_of_the_loop_whatever_the_number_of_services() -> None:
    assert not await holds_the_loop()


async def test_what_looks_through_all_for_each_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    book = traffic.Ledger.book

    def book_slowly(ledger: traffic.Ledger, rows: Collection[Any]) -> None:
        for row in rows:
            next(1 for other in rows if other.labels == row.labels)
        book(ledger, rows)

    monkeypatch.setattr(traffic.Ledger, "book", book_slowly)
    assert await grows_too_fast()


async def test_what_is_done_in_the_loop_at_one_go_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    async def here(function: Callable[..., object], *arguments: object) -> object:
        return function(*arguments)

    monkeypatch.setattr(asyncio, "to_thread", here)
    assert await holds_the_loop()
