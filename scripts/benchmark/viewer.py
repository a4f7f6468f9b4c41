"""Measures, from outside of ipvsproxy's process, the processor time and memory that a viewer of the web page costs it.

Each Service gets a packet every few seconds, with and without the viewer, because a viewer costs ipvsproxy nothing for Services
without traffic. The viewer sends the same requests, at the same intervals, as the page of all Services in a browser.
"""

import asyncio
import contextlib
import json
import random
import socket
import struct
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import aiohttp

from scripts.benchmark import outside, workload
from scripts.benchmark.beside import FIRST_POLL_S, Cluster, Size
from tests.support.api_server import ApiServer

Figures = dict[str, Any]
PAGE_S = 1.0
HEAD_S = 3.0
"""``page.js`` requests the Services every ``PAGE_S`` seconds, and the state of the node every ``HEAD_S`` seconds."""
PACKET_S = 4.0
"""The number of seconds between two packets to the same Service."""
BURSTS_PER_S = 50
SETTLED_S = 30.0
"""The time from the start until the first phase. After the first sync, ipvsproxy reads the kernel, and completes these readings
within this time."""
FLAGS = ("--ipvs-sync-period=24h",)
"""Prevents audits. An audit costs several times as much as a viewer. If one phase had more audits, the two phases could not be
compared."""
WARM_S = 30.0
"""The time from the first request until the second phase. After this time, ipvsproxy has stored as many readings as the page
shows."""
COUNTED_S = 120.0
_SOURCE_PORT = 40_000
_SYN = struct.pack("!HHIIBBHHH", _SOURCE_PORT, 80, 1, 0, 5 << 4, 0x02, 1024, 0, 0)


def measure(services: int, endpoints: int, seconds: float, warm_s: float = WARM_S, settled_s: float = SETTLED_S) -> Figures:
    """Measure ipvsproxy with this number of Services, first without a viewer, and then for the same time with a viewer.

    Raises:
        RuntimeError: the process has ended, or does not answer.
    """
    return asyncio.run(_measure(Size(services, endpoints), seconds, warm_s, settled_s))


async def _measure(size: Size, seconds: float, warm_s: float, settled_s: float) -> Figures:
    command, places = f"{sys.executable} -m ipvsproxy", outside.Places()
    await outside.start_once(command)
    async with ApiServer() as server:
        Cluster(server, size)
        async with outside.running(command, server.url, places, *FLAGS) as proxy:
            lines = 3 + size.services * (1 + size.endpoints)
            await proxy.until(lambda table: table.count("\n") >= lines, FIRST_POLL_S)
            with _traffic([workload.cluster_address(number) for number in range(size.services)]):
                await asyncio.sleep(settled_s)
                alone = await _phase(proxy, seconds)
                viewing = asyncio.create_task(_view(proxy))
                try:
                    await asyncio.sleep(warm_s)
                    watched = await _phase(proxy, seconds)
                finally:
                    viewing.cancel()
                    await asyncio.wait([viewing])
                if not viewing.cancelled():
                    viewing.result()
                busy = await _busy(proxy, min(50, size.services))
    return {"alone": alone, "watched": watched, "busy": busy}


async def _phase(proxy: outside.Proxy, seconds: float) -> Figures:
    before = proxy.spent()
    await asyncio.sleep(seconds)
    spent = proxy.spent().since(before)
    return {"processor_percent": spent.processor_s / spent.at_s * 100, "resident_mb": proxy.resident_mb()}


async def _view(proxy: outside.Proxy) -> None:
    """Request what ``page.js`` and ``services.js`` request, until this task is cancelled."""

    async def repeat(path: str, pause_s: float) -> None:
        while True:
            await proxy.get(f"/ui/api/{path}&viewer=benchmark", session)
            await asyncio.sleep(pause_s)

    async with aiohttp.ClientSession() as session, asyncio.TaskGroup() as group:
        group.create_task(repeat("services.json?sort=connections&order=desc&page=1&size=50", PAGE_S))
        group.create_task(repeat("node.json?since=1e12", HEAD_S))


async def _busy(proxy: outside.Proxy, expected: int) -> int:
    """The number of Services that have recent traffic, counted among the 50 busiest Services.

    This number shows whether ipvsproxy has counted the packets that the benchmark sends.
    Waits at most ``COUNTED_S`` for the expected number.
    """
    for _ in range(round(COUNTED_S / PAGE_S)):
        document = json.loads(await proxy.get("/ui/api/services.json?sort=packets&size=50&viewer=benchmark"))
        busy = sum(any(row["history"]["bytesPerSecond"]) for row in document["services"])
        if busy >= expected:
            break
        await asyncio.sleep(PAGE_S)
    return busy


@contextlib.contextmanager
def _traffic(addresses: Sequence[str]) -> Iterator[None]:
    """Send a packet to each of these addresses every ``PACKET_S``, while the block runs."""
    ended = threading.Event()
    sender = threading.Thread(target=_send, args=(addresses, ended))
    sender.start()
    try:
        yield
    finally:
        ended.set()
        sender.join()


def _send(addresses: Sequence[str], ended: threading.Event) -> None:
    order = random.sample(addresses, len(addresses))
    burst = max(1, round(len(order) / PACKET_S / BURSTS_PER_S))
    place = 0
    with socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_TCP) as raw:
        while not ended.wait(1 / BURSTS_PER_S):
            for _ in range(burst):
                with contextlib.suppress(OSError):  # no endpoint is reachable, but IPVS counts each packet first
                    raw.sendto(_SYN, (order[place], 0))
                place = (place + 1) % len(order)
