"""Measures changes, churn, a rolling update, idling, audits and scrapes of the program, which runs in this process."""

import asyncio
import dataclasses
import gc
import pathlib
import resource
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple
from unittest import mock

from ipvsproxy.daemon.loop.reader import POLL_INTERVAL_S
from ipvsproxy.daemon.metrics import traffic
from ipvsproxy.translate.view import GRACE_S
from scripts.benchmark import api, connections, feeder, meter, pretence, program, workload
from scripts.benchmark import recording as recordings
from scripts.benchmark.figures import distribution

LATENCY_PERIOD_S = 0.06
"""The pause between single changes. The pause is longer than the longest pause after a sync, so that each change causes a
separate sync."""
CHURN_PER_S = 1000
CHURN_DELAY_S = 3.0
"""The time between the start of the feeder and its first line."""
LONGEST_SILENCE_S = 120.0
AUDITS = 5
"""The number of audits that are measured; the same number of polls is measured."""
RARE_POLL_S = 30.0
"""The interval in seconds at which all real servers are polled in the second minute of the measurement *idle*."""
SCRAPES = 5
SCRAPE_PAUSE_S = 0.2
SCRAPE_LEAD_S = 0.01
"""The time from the start of a scrape until the change that is made during this scrape. At the time of the change, the scrape
reads the kernel's counters."""
ROLLING = 999_000
"""The number that identifies the Service with a thousand endpoints."""

_READ_SIZE = 16384
_SERIES = b"\nipvsproxy_service_"
Figures = dict[str, Any]


def measure(
    *,
    pages: str,
    services: int,
    endpoints: int,
    parts: Sequence[str],
    churn_s: float,
    changes: int,
    flags: Sequence[str] = (),
    recording: str = "",
) -> Figures:
    """Run the program with additional ``flags``, and measure the given parts.

    ``recording`` names a file to which the messages of the start and of these parts are written. In *change*, *connection* and
    *churn*, the file also says to which step each message belongs.
    """
    measured = meter.Meter()
    if recording:
        measured.recording = recordings.Recording(pathlib.Path(recording))

    async def run() -> Figures:
        async with program.running(api.MemoryApi(pathlib.Path(pages)), *flags) as running:
            steadily = _Steady(running, measured, services, endpoints)
            figures: Figures = {"resident_mb": meter.resident_mb()}
            await asyncio.sleep(POLL_INTERVAL_S)
            await steadily.polled()  # waits for the poll that reads what the first sync has written
            known: dict[str, Callable[[], Awaitable[Figures]]] = {
                "change": lambda: steadily.change(changes),
                "service": lambda: steadily.service(changes),
                "connection": lambda: steadily.connection(changes),
                "rolling": steadily.rolling,
                "nodes": lambda: steadily.nodes(changes),
                "idle": steadily.idle,
                "audit": steadily.audit,
                "scrape": steadily.scrape,
                "churn": lambda: steadily.churn(churn_s),
            }
            figures |= {name: await part() for name, part in known.items() if name in parts}
            await _scraped()  # as on a real node, the figure includes the memory that a scrape needs
            figures["resident_after_mb"] = meter.resident_mb()
            return figures

    found = asyncio.run(run())
    if measured.recording:
        measured.recording.close()
    return found


class _Steady:
    def __init__(self, running: program.Running, measured: meter.Meter, services: int, endpoints: int) -> None:
        self._running = running
        self._meter = measured
        self._services = services
        self._endpoints = endpoints
        self._version = 3_000_000
        self._replacements = workload.Replacements(services, endpoints)
        self._heart = meter.Heartbeat()

    async def _send_and_wait(self, line: bytes, kind: str = "endpointslices") -> None:
        """Send the line to the watch, and wait until its change is programmed."""
        awaited = self._running.api.sent_lines + 1
        self._running.api.send(kind, line, 1)
        while (await self._running.synced()).sent_lines < awaited:
            pass

    async def change(self, changes: int) -> Figures:
        """Changes one endpoint repeatedly, with a pause between two changes."""
        lines = [self._replacements.line(number * 7919 % self._services) for number in range(changes)]
        gc.collect()
        self._meter.times = False
        self._meter.reset()
        latencies_s, own_s, cpu_s, faults = [], [], [], []
        counted: list[dict[str, int]] = []
        for number, line in enumerate(lines):
            await asyncio.sleep(LATENCY_PERIOD_S)
            self._meter.step(f"change {number}")
            before = self._meter.all_counts()
            faulted = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            self._meter.acknowledged_s.clear()
            kernel_s = self._meter.kernel_s()
            cpu, began_s = time.process_time(), time.perf_counter()
            await self._send_and_wait(line)
            cpu_s.append(time.process_time() - cpu)
            latencies_s.append(self._meter.acknowledged_s[-1] - began_s)
            own_s.append(latencies_s[-1] - (self._meter.kernel_s() - kernel_s))
            faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faulted)
            after = self._meter.all_counts()
            counted.append({name: after[name] - before.get(name, 0) for name in after})
            self._meter.step()
        self._meter.times = True
        return {
            **distribution(latencies_s),
            "page_faults": statistics.median(faults),
            "own": distribution(own_s),
            "cpu_ms": statistics.fmean(cpu_s) * 1e3,
            "kernel_ms": self._meter.kernel_s() / changes * 1e3,
            "messages": statistics.median(one["messages"] for one in counted),
            "calls": statistics.median(one["calls"] for one in counted),
            "system_calls": statistics.median(one["system calls"] for one in counted),
            "processes": self._meter.counts["processes"],
            **self._meter.figures(),
        }

    async def service(self, changes: int) -> Figures:
        """Repeatedly adds a Service and then its EndpointSlice, and waits between two changes.

        The latencies include changes of Services and of EndpointSlices.
        """
        latencies_s, messages = [], []
        for number in range(changes):
            before, latency_s = self._meter.all_counts()["messages"], 0.0
            for kind, added in self._new_service(self._services + 1_000 + number).items():
                await asyncio.sleep(LATENCY_PERIOD_S)
                self._meter.acknowledged_s.clear()
                began_s = time.perf_counter()
                await self._send_and_wait(added, kind)
                latency_s += self._meter.acknowledged_s[-1] - began_s
            latencies_s.append(latency_s)
            messages.append(self._meter.all_counts()["messages"] - before)
        return {**distribution(latencies_s), "messages": statistics.median(messages)}

    def _new_service(self, number: int) -> dict[str, bytes]:
        """The watch lines, by kind of object, that add Service ``number`` and its EndpointSlice.

        The endpoint is not on the node under test.
        """
        self._version += 1
        pod = self._services * self._endpoints + 500_000 + number * workload.FEWEST_NODES + 1
        return {
            "services": workload.line("ADDED", workload.service(number, self._version)),
            "endpointslices": workload.line("ADDED", workload.endpoint_slice(number, 0, [pod], self._version)),
        }

    async def connection(self, services: int) -> Figures:
        """Repeatedly adds a Service with its EndpointSlice; another process connects to the Service as soon as possible.

        ``connect_ms`` is the median time of the successful attempts to connect, without the wait for the Service.
        """
        latencies_s, took_s = [], []
        self._meter.times = False
        async with connections.client() as client:
            for number in range(self._services + 2_000, self._services + 2_000 + services):
                lines = self._new_service(number)
                await asyncio.sleep(LATENCY_PERIOD_S)
                self._meter.step(f"connection {number}")
                connecting = asyncio.create_task(client.connect(workload.cluster_address(number)))
                await asyncio.sleep(0)  # the client tries to connect from now on
                began_s = time.perf_counter()
                for kind, line in lines.items():
                    self._running.api.send(kind, line, 1)
                connected = await connecting
                latencies_s.append(connected.at_s - began_s)
                took_s.append(connected.took_s)
                self._meter.step()
        self._meter.times = True
        # When the client ends, its address is removed from the node, and after the grace period all Services are translated once
        # more.
        await asyncio.sleep(GRACE_S)
        await self._running.synced()
        return {**distribution(latencies_s), "connect_ms": statistics.median(took_s) * 1e3}

    async def rolling(self) -> Figures:
        """Replaces 100 endpoints of one Service, one endpoint at a time. The Service has 1,000 endpoints in ten slices."""
        number, first = ROLLING, 3_000_000
        service = workload.service(number, self._version + 1)
        service["spec"] |= {"clusterIP": "10.111.255.254", "clusterIPs": ["10.111.255.254"]}
        slices = [list(range(first + part * 100, first + part * 100 + 100)) for part in range(10)]
        self._running.api.send("services", workload.line("ADDED", service), 1)
        for part, pods in enumerate(slices):
            await self._send_and_wait(
                workload.line("ADDED", workload.endpoint_slice(number, part, pods, self._version + part + 1))
            )
        self._version += 100
        lines = []
        for step in range(100):
            pods = slices[step % 10]
            pods[step // 10] = first + 100_000 + step
            self._version += 1
            lines.append(workload.line("MODIFIED", workload.endpoint_slice(number, step % 10, pods, self._version)))
        self._meter.reset()
        operations, cpu_s = [], []
        for line in lines:
            synced, cpu = len(self._running.watching.syncs), time.process_time()
            await self._send_and_wait(line)
            cpu_s.append(time.process_time() - cpu)
            reports = [sync.summary.report for sync in self._running.watching.syncs[synced:]]
            operations.append(sum(sum(report.done.values()) for report in reports))
        return {
            "operations_p50": statistics.median(operations),
            "operations_most": max(operations),
            "cpu_ms": statistics.fmean(cpu_s) * 1e3,
            "events": len(lines),
            **self._meter.figures(),
        }

    async def nodes(self, changes: int) -> Figures:
        """Measures repeated deletions and additions of two Nodes.

        One Node has endpoints of each Service, and the other Node has no endpoints.

        Both Nodes take part in direct return.
        """
        beating = asyncio.create_task(self._heart.run())
        found: Figures = {}
        verbs = ("DELETED", "ADDED") * changes
        for name, number, turns in (("with endpoints", 1, verbs), ("without endpoints", 60_000, verbs[::-1])):
            walls_s, cpus_s, held_s, operations = [], [], [], []
            for what in turns:
                self._version += 1
                line = workload.line(what, workload.other_node(number, self._version))
                await asyncio.sleep(LATENCY_PERIOD_S)
                gc.collect()
                self._heart.longest_s()
                synced, cpu, began_s = len(self._running.watching.syncs), time.process_time(), time.perf_counter()
                await self._send_and_wait(line, "nodes")
                walls_s.append(time.perf_counter() - began_s)
                cpus_s.append(time.process_time() - cpu)
                await asyncio.sleep(self._heart.PERIOD_S)
                held_s.append(self._heart.longest_s())
                reports = [sync.summary.report for sync in self._running.watching.syncs[synced:]]
                operations.append(sum(sum(report.done.values()) for report in reports))
            found[name] = {
                "wall_s": statistics.median(walls_s),
                "cpu_s": statistics.median(cpus_s),
                "held_ms": statistics.median(held_s) * 1e3,
                "operations": statistics.median(operations),
            }
        beating.cancel()
        return found

    async def polled(self) -> None:
        """Wait for the end of the poll that is due or running."""
        while self._running.engine._reader.next_part_s <= time.monotonic():  # noqa: ASYNC110 - there is no event to wait for
            await asyncio.sleep(0.005)

    async def idle(self) -> Figures:
        """Measures a node on which nothing changes.

        There is one minute with the usual polls, one minute with rare polls of all real servers, and a period without audits and
        polls.
        """
        await asyncio.sleep(1)
        reader = self._running.engine._reader
        await self._nothing_read()
        reader._audit_due_s = time.monotonic() + 3600
        self._meter.reset()
        share, polling = await self._processor_share(60), self._meter.figures()
        await self._nothing_read()
        settings = dataclasses.replace(reader.choices.settings, drift_check_interval_s=RARE_POLL_S)
        reader.choices, reader._whole_poll_due_s = reader.choices._replace(settings=settings), time.monotonic() + RARE_POLL_S / 2
        rare_share = await self._processor_share(2 * RARE_POLL_S)
        await self._nothing_read()
        reader._poll_due_s = reader._whole_poll_due_s = reader._audit_due_s
        self._running.engine.changed(time.monotonic())  # this wakes the event loop, which then waits until the times set above
        await self._running.synced()
        self._meter.reset()
        return {
            "cpu_percent": await self._processor_share(10) * 100,
            "polling_percent": share * 100,
            "rarely_polling_percent": rare_share * 100,
            "polling": polling,
            **self._meter.figures(),
        }

    async def _nothing_read(self) -> None:
        """Wait until the running audit or poll has ended and has set the times of the next audit and poll."""
        while self._running.engine._reader._reading:  # noqa: ASYNC110 - there is no event to wait for
            await asyncio.sleep(0.005)

    async def _processor_share(self, seconds: float) -> float:
        cpu_s, began_s = time.process_time(), time.perf_counter()
        await asyncio.sleep(seconds)
        return (time.process_time() - cpu_s) / (time.perf_counter() - began_s)

    async def audit(self) -> Figures:
        """Measures several audits, one after the other, and then several polls."""
        beating = asyncio.create_task(self._heart.run())
        found: Figures = {"poll": {}}
        for whole in (True, False):
            walls_s, cpus_s, held_s = [], [], []
            self._meter.reset()
            for _ in range(AUDITS):
                await asyncio.sleep(0.5)
                self._heart.longest_s()
                cpu_s, began_s = time.process_time(), time.perf_counter()
                reader = self._running.engine._reader
                reader._rest_ends_s = 0.0
                if whole:
                    reader._audit_due_s = 0.0
                self._running.engine.kernel_changed()
                await (self._running.synced() if whole else self.polled())
                walls_s.append(time.perf_counter() - began_s)
                cpus_s.append(time.process_time() - cpu_s)
                await asyncio.sleep(0.05)
                held_s.append(self._heart.longest_s())
            (found if whole else found["poll"]).update(
                {
                    "wall_s": statistics.median(walls_s),
                    "cpu_s": statistics.median(cpus_s),
                    "held_ms": statistics.median(held_s) * 1e3,
                    "held_best_ms": min(held_s) * 1e3,
                    "held_most_ms": max(held_s) * 1e3,
                    "times": AUDITS,
                    "operations": sum(self._running.watching.syncs[-1].summary.report.done.values()),
                    **self._meter.figures(),
                }
            )
        beating.cancel()
        return found

    async def scrape(self) -> Figures:
        """Measures scrapes, with traffic for each Service between two scrapes, and then measures changes during scrapes."""
        lines = [self._replacements.line(number) for number in range(SCRAPES)]
        beating = asyncio.create_task(self._heart.run())
        walls_s, held_s, changes_s, page = [], [], [], _Page(0, 0)
        served = tuple(self._running.engine._reconciler._tables.virtual_servers.desired)
        self._meter.reset()
        with pretence.traffic(served), mock.patch.object(traffic, "FRESH_S", 0.0):  # each scrape reads the kernel
            for _ in range(SCRAPES):
                await asyncio.sleep(SCRAPE_PAUSE_S)
                self._heart.longest_s()
                began_s = time.perf_counter()
                page = await _scraped()
                walls_s.append(time.perf_counter() - began_s)
                held_s.append(self._heart.longest_s())
            counted = self._meter.figures()
            for line in lines:
                await asyncio.sleep(SCRAPE_PAUSE_S)
                self._meter.acknowledged_s.clear()
                scraping = asyncio.create_task(_scraped())
                await asyncio.sleep(SCRAPE_LEAD_S)
                began_s = time.perf_counter()
                await self._send_and_wait(line)
                changes_s.append(self._meter.acknowledged_s[-1] - began_s)
                await scraping
        beating.cancel()
        return {
            "wall_s": statistics.median(walls_s),
            "held_ms": statistics.median(held_s) * 1e3,
            "held_best_ms": min(held_s) * 1e3,
            "held_most_ms": max(held_s) * 1e3,
            "change_ms": statistics.median(changes_s) * 1e3,
            "bytes": page.size,
            "series": page.series,
            "times": SCRAPES,
            **counted,
        }

    async def churn(self, seconds: float) -> Figures:
        """Measures the program while a thousand changes of endpoints arrive per second.

        Another process sends the changes on time, even if the program is slower.
        """
        count = int(seconds * CHURN_PER_S)
        with tempfile.TemporaryFile() as lines:  # a file, because lines in memory would count as the program's memory
            for number in range(count):
                lines.write(self._replacements.line(number * 7919 % self._services))
            lines.seek(0)
            self._replacements.forget()
            begins_s = time.perf_counter() + CHURN_DELAY_S
            ours, process = feeder.start(lines, begins_s=begins_s, per_s=CHURN_PER_S)
            reader, writer = await asyncio.open_connection(sock=ours)
            await asyncio.sleep(begins_s - time.perf_counter())
            self._meter.step("churn")
            self._running.api.feed("endpointslices", reader)
            try:
                return await self._churn(begins_s, count)
            finally:
                self._meter.step()
                writer.close()
                process.kill()  # without this kill, wait() would block the event loop until the feeder ends
                process.wait()

    async def _churn(self, began_s: float, count: int) -> Figures:
        resident_mb = meter.resident_mb()
        self._meter.times = False
        self._meter.reset()
        watching = self._running.watching
        watching.syncs.clear()
        sent_before = self._running.api.sent_lines
        cpu_s = time.process_time()
        while not watching.syncs or watching.syncs[-1].sent_lines - sent_before < count:
            async with asyncio.timeout(LONGEST_SILENCE_S):  # the wait must also end if the feeder has failed
                await self._running.synced()
        cpu_s = time.process_time() - cpu_s
        fed_s, wall_s = count / CHURN_PER_S, time.perf_counter() - began_s
        latencies_s: list[float] = []
        backlog = 0
        for sync in watching.syncs:
            due = min(count, int((sync.ended_s - began_s) * CHURN_PER_S) + 1)
            backlog = max(backlog, due - len(latencies_s))
            upto = sync.sent_lines - sent_before
            latencies_s += [sync.ended_s - began_s - number / CHURN_PER_S for number in range(len(latencies_s), upto)]
        return {
            **distribution(latencies_s),
            "fed_s": fed_s,
            "wall_s": wall_s,
            "cpu_percent": cpu_s / wall_s * 100,
            "kernel_s": self._meter.kernel_s(),
            "own_percent": (cpu_s - self._meter.kernel_s()) / fed_s * 100,
            "backlog": backlog,
            "syncs": len(watching.syncs),
            "waiting": len(self._running.engine._reconciler._drains),
            "grown_mb": meter.resident_mb() - resident_mb,
            **self._meter.figures(),
        }


class _Page(NamedTuple):
    """The size of a metrics page in bytes, and the number of its time series that concern Services."""

    size: int
    series: int


async def _scraped() -> _Page:
    """Scrape the metrics.

    Each chunk is counted as it arrives, so that only the program, and not this function, blocks the event loop.
    """
    reader, writer = await asyncio.open_connection("127.0.0.1", program.METRICS_PORT)
    writer.write(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
    size, series, rest = 0, 0, b""
    while part := await reader.read(_READ_SIZE):
        size += len(part)
        series += (rest + part).count(_SERIES)
        rest = part[1 - len(_SERIES) :]
    writer.close()
    return _Page(size, series)
