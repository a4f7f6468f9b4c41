"""How the parts of a process end: together, and those who answer for its health last."""

import asyncio

import pytest

from ipvsproxy.daemon import process


async def test_a_failing_part_stops_the_others_and_servers_tell_before_they_stop() -> None:
    order: list[str] = []

    class Status:
        def stop(self) -> None:
            order.append("told")

    async def work(name: str) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            order.append(name)

    async def fail() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await process.until_stopped(asyncio.Event(), Status(), [work("work"), fail()], [work("server")])  # type: ignore[arg-type]  # a double
    assert order == ["told", "work", "server"]


async def test_a_part_that_ends_by_itself_ends_nothing() -> None:
    stopping = asyncio.Event()

    class Status:
        def stop(self) -> None:
            assert stopping.is_set()

    async def end() -> None:
        asyncio.get_running_loop().call_later(0.01, stopping.set)

    await process.until_stopped(stopping, Status(), [end()], [])  # type: ignore[arg-type]  # a double
