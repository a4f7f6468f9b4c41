"""Measures kube-proxy and ipvsproxy from outside, both in the same way.

Each proxy runs as a separate process, and gets its objects from the tests' API server.

Only the kernel's IPVS table (``/proc/net/ip_vs``) shows when a change is done. The table is read as rarely as the precision of
the figures allows.
"""

import asyncio
import functools
import itertools
import statistics
import sys
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

from scripts.benchmark import outside, workload
from tests.support.api_server import ApiServer
from tests.support.api_store import ENDPOINT_SLICES, NODES, SERVICES

Figures = dict[str, Any]
FIRST_POLL_S = 0.5
CHANGE_POLL_S = 0.02
STORM_POLL_S = 0.25
"""The interval between two readings in bursts of changes. The error of a latency is at most this interval plus the time of
reading the table."""
RESTART_POLL_S = 0.25
LAUNCHES = 3
MODULES = """
import os
from ipvsproxy import cli
cli.load_module("ipvsproxy.daemon.app")
cli.load_module("ipvsproxy.daemon.sources.watch")
os._exit(0)
"""
"""A program that imports the same modules as a start of ipvsproxy, and then ends at once."""
_NEVER_BEFORE = 20_000
"""The gap between the numbers of the first pods and of new pods, so that a new pod never gets a first pod's address."""


class Size(NamedTuple):
    """The size of the cluster, and the number of changes."""

    services: int
    endpoints: int
    changes: int = 5
    change_pause_s: float = 2.0
    """The pause between two changes. The pause is longer than the minimum time between two syncs. Otherwise the measured
    latencies would include this minimum time, which is a setting."""
    churn_changes: int = 300
    churn_per_s: float = 50.0
    rolling_endpoints: int = 1000
    rolling_changes: int = 100
    """The number of changes. Each change affects one slice, and all changes together replace nearly all endpoints."""
    rolling_per_s: float = 10.0
    scrapes: int = 3
    scrape_pause_s: float = 2.5
    """The pause between two scrapes. The pause is longer than the time for which ipvsproxy reuses the kernel's counters."""
    idle_s: float = 35.0
    """The duration of the measurement. It is longer than the sync period of both proxies, 30 s, so that it includes a periodic
    sync of each proxy."""


def run(command: str, services: int, endpoints: int, places: outside.Places | None = None, **others: float) -> Figures:
    """Measure ``command``, or ipvsproxy if ``command`` is empty, with a cluster of this size; ``others`` are fields of ``Size``.

    Raises:
        RuntimeError: the process has ended, or a phase was not finished in time.
    """
    size = Size(services, endpoints, **others)  # type: ignore[arg-type]  # callers know which values are whole numbers
    return asyncio.run(_run(command or f"{sys.executable} -m ipvsproxy", size, places or outside.Places()))


def launch(services: int, endpoints: int, places: outside.Places | None = None) -> Figures:
    """Measure the phases of ipvsproxy's start, from ``execve`` until everything is programmed.

    All times are in seconds since ``execve``.

    The time to start Python and to import all modules is measured separately; it is the shortest time of ``LAUNCHES`` runs.

    Raises:
        RuntimeError: for the same reasons as ``run``.
    """
    return asyncio.run(_launch(Size(services, endpoints), places or outside.Places()))


async def _launch(size: Size, places: outside.Places) -> Figures:
    command = f"{sys.executable} -m ipvsproxy"
    await outside.start_once(command)
    imported_s = [await _seconds(sys.executable, "-c", MODULES) for _ in range(LAUNCHES)]
    async with ApiServer() as server:
        cluster = Cluster(server, size)
        async with outside.running(command, server.url, places) as proxy:
            figures = await _Measured(proxy, cluster, size).start()
            return figures | {
                "imported_s": min(imported_s),
                "prepared_s": proxy.logged_s("starting")[0],
                "listed_s": max(proxy.logged_s("listed")),
            }


async def _seconds(*command: str) -> float:
    began_s = time.perf_counter()
    process = await asyncio.create_subprocess_exec(*command)
    if await process.wait():
        raise RuntimeError(f"{command[-1]} ended with status {process.returncode}")
    return time.perf_counter() - began_s


async def _run(command: str, size: Size, places: outside.Places) -> Figures:
    await outside.start_once(command)
    async with ApiServer() as server:
        cluster = Cluster(server, size)
        async with outside.running(command, server.url, places) as proxy:
            measured = _Measured(proxy, cluster, size)
            figures = await measured.start()
            figures |= await measured.change()
            figures |= await measured.scrape()
            figures |= await measured.idle()  # measured before bursts of changes, because removals after a burst may take minutes
            figures |= await measured.churn()
            figures |= await measured.rolling()
        async with outside.running(command, server.url, places) as proxy:
            await proxy.until_in_sync(RESTART_POLL_S)
            spent = proxy.spent().since(proxy.began)
            pod_addresses = cluster.pod_addresses()
            await proxy.until(lambda table: outside.serving(table) >= pod_addresses, FIRST_POLL_S)
    return figures | {
        "restart_s": spent.at_s,
        "restart_processor_s": spent.processor_s,
        "restart_started": spent.started,
    }


class _Replaced(NamedTuple):
    """The addresses of removed endpoints and of their replacements, in the notation of ``/proc/net/ip_vs``."""

    gone: set[str]
    come: set[str]


class Cluster:
    """The objects of the API server, namely Services with one EndpointSlice each, and later one Service with many slices."""

    def __init__(self, server: ApiServer, size: Size) -> None:
        self._server = server
        self._new_pods = itertools.count(size.services * size.endpoints + _NEVER_BEFORE)
        self._pods: dict[tuple[int, int], list[int]] = {}
        """The numbers of the pods in each slice; the key is the number of the Service and the number of the slice."""
        server.store.put(NODES, workload.node())
        for number in range(size.services):
            first = number * size.endpoints
            self._pods[number, 0] = list(range(first, first + size.endpoints))
            server.store.put(SERVICES, workload.service(number))
            server.store.put(ENDPOINT_SLICES, workload.endpoint_slice(number, 0, self._pods[number, 0]))

    def add(self, number: int, endpoints: int) -> int:
        """Add the Service ``number`` with this number of ``endpoints``, and return the number of its slices."""
        self._server.put(SERVICES, workload.service(number))
        parts = -(-endpoints // workload.SLICE_ENDPOINTS)
        for part in range(parts):
            there = min(workload.SLICE_ENDPOINTS, endpoints - part * workload.SLICE_ENDPOINTS)
            self._pods[number, part] = list(itertools.islice(self._new_pods, there))
            self._server.put(ENDPOINT_SLICES, workload.endpoint_slice(number, part, self._pods[number, part]))
        return parts

    def replace(self, number: int, part: int, count: int) -> _Replaced:
        """Replace the ``count`` oldest pods of a slice by new pods."""
        pods = self._pods[number, part]
        gone, come = pods[:count], list(itertools.islice(self._new_pods, len(pods[:count])))
        pods[:] = [*pods[count:], *come]
        self._server.put(ENDPOINT_SLICES, workload.endpoint_slice(number, part, pods))
        return _Replaced(set(map(_digits, gone)), set(map(_digits, come)))

    def pod_addresses(self) -> set[str]:
        """The addresses of all pods."""
        return {_digits(pod) for pods in self._pods.values() for pod in pods}


class _Measured:
    """One proxy process that is measured in several phases."""

    def __init__(self, proxy: outside.Proxy, cluster: Cluster, size: Size) -> None:
        self._proxy = proxy
        self._cluster = cluster
        self._size = size

    async def start(self) -> Figures:
        """Measure the process from its start until everything is programmed."""
        lines = 3 + self._size.services * (1 + self._size.endpoints)
        await self._proxy.until(lambda table: table.count("\n") >= lines, FIRST_POLL_S)
        spent = self._proxy.spent().since(self._proxy.began)
        return {
            "programmed_s": spent.at_s,
            "processor_s": spent.processor_s,
            "started": spent.started,
            "resident_mb": self._proxy.resident_mb(),
        }

    async def change(self) -> Figures:
        """Replace one endpoint repeatedly, with a pause between two changes."""
        before, changes_s = self._proxy.spent(), []
        for change in range(self._size.changes):
            await asyncio.sleep(self._size.change_pause_s)
            changed_s = time.perf_counter()
            (come,) = self._cluster.replace(change * 7 % self._size.services, 0, 1).come
            await self._proxy.until(functools.partial(_shows, come), CHANGE_POLL_S)
            changes_s.append(time.perf_counter() - changed_s)
        spent = self._proxy.spent().since(before)
        return {
            "change_s": statistics.median(changes_s),
            "change_processor_s": spent.processor_s / self._size.changes,
            "change_started": spent.started / self._size.changes,
        }

    async def scrape(self) -> Figures:
        """Metrics are scraped."""
        before, scrapes_s, text = self._proxy.spent(), [], ""
        for _ in range(self._size.scrapes):
            await asyncio.sleep(self._size.scrape_pause_s)
            began_s = time.perf_counter()
            text = await self._proxy.scrape()
            scrapes_s.append(time.perf_counter() - began_s)
        spent = self._proxy.spent().since(before)
        return {
            "scrape_s": statistics.median(scrapes_s),
            "scrape_processor_s": spent.processor_s / self._size.scrapes,
            "scrape_bytes": len(text.encode()),
        }

    async def idle(self) -> Figures:
        """Nothing changes."""
        before = self._proxy.spent()
        await asyncio.sleep(self._size.idle_s)
        spent = self._proxy.spent().since(before)
        return {"idle_percent": spent.processor_s / spent.at_s * 100, "idle_started": spent.started / spent.at_s * 60}

    async def churn(self) -> Figures:
        """Replace endpoints of many Services at a fixed rate."""
        numbers = (number * 7 % self._size.services for number in range(self._size.churn_changes))
        seen = await self._storm(((number, 0, 1) for number in numbers), self._size.churn_per_s)
        return {f"churn_{key}": value for key, value in seen.items()} | {"churn_resident_mb": self._proxy.resident_mb()}

    async def rolling(self) -> Figures:
        """Replace all endpoints of a large Service, a few endpoints of one slice at a time."""
        number = self._size.services
        parts = self._cluster.add(number, self._size.rolling_endpoints)
        pod_addresses = self._cluster.pod_addresses()
        await self._proxy.until(lambda table: outside.serving(table) >= pod_addresses, FIRST_POLL_S)
        each = -(-self._size.rolling_endpoints // self._size.rolling_changes)
        changes = ((number, change % parts, each) for change in range(self._size.rolling_changes))
        seen = await self._storm(changes, self._size.rolling_per_s)
        return {f"rolling_{key}": value for key, value in seen.items()}

    async def _storm(self, changes: Iterator[tuple[int, int, int]], per_s: float) -> Figures:
        """Make these changes, and wait until the kernel has all new endpoints and no replaced endpoint."""
        before, began_s = self._proxy.spent(), time.perf_counter()
        made_s: dict[str, float] = {}
        gone: set[str] = set()
        latencies_s: list[float] = []

        async def make() -> float:
            for number, (service, part, count) in enumerate(changes):
                await asyncio.sleep(began_s + number / per_s - time.perf_counter())
                replaced = self._cluster.replace(service, part, count)
                gone.update(replaced.gone)
                for address in replaced.gone:
                    made_s.pop(address, None)  # this endpoint was replaced before the kernel showed the endpoint
                made_s.update(dict.fromkeys(replaced.come, time.perf_counter()))
            return time.perf_counter()

        making = asyncio.create_task(make())

        def is_over(table: str) -> bool:
            now_s, at_work = time.perf_counter(), outside.serving(table)
            latencies_s.extend(now_s - made_s.pop(address) for address in made_s.keys() & at_work)
            return making.done() and making.result() > 0 and not made_s and not gone & at_work  # result() raises make's error

        try:
            await self._proxy.until(is_over, STORM_POLL_S)
        finally:
            making.cancel()
        spent = self._proxy.spent().since(before)
        ranked = sorted(latencies_s)
        return {
            "s": time.perf_counter() - making.result(),
            "p50_s": statistics.median(ranked),
            "p99_s": ranked[len(ranked) * 99 // 100],
            "processor_s": spent.processor_s,
            "started": spent.started,
        }


def _shows(pod: str, table: str) -> bool:
    return pod in table


def _digits(pod: int) -> str:
    return "".join(f"{int(octet):02X}" for octet in workload.pod_address(pod).split("."))
