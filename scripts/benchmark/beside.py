"""A proxy as a process of its own, by HTTP, against the API server of the tests: kube-proxy and ipvsproxy alike.

What is watched is the kernel: ``/proc/net/ip_vs``, as seldom as the figures allow, since reading it costs the machine something.
"""

import asyncio
import contextlib
import os
import pathlib
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any, NamedTuple

from scripts.benchmark import workload
from tests.api_server import ApiServer, write_kubeconfig
from tests.api_store import ENDPOINT_SLICES, NODES, SERVICES

TABLE = pathlib.Path("/proc/net/ip_vs")
FIRST_POLL_S = 0.5
CHANGE_POLL_S = 0.02
LONGEST_S = 1200.0
CHANGES = 5
CHANGE_PAUSE_S = 2.0
"""Between two changes: longer than the shortest time between two syncs, which is a setting and no cost."""
IDLE_S = 35.0
"""Longer than kube-proxy's and our own sync period of 30 s, so that one of each is among it."""
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class Proxy(NamedTuple):
    """A proxy that runs."""

    process: asyncio.subprocess.Process
    log: pathlib.Path

    def processor_s(self) -> float:
        """What it has used, with the processes that it started and that have ended."""
        fields = pathlib.Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return sum(int(field) for field in fields[11:15]) / _TICKS_PER_S

    def demand_life(self) -> None:
        """Go on only while it runs.

        Raises:
            RuntimeError: it has ended.
        """
        if self.process.returncode is not None:
            raise RuntimeError(f"it ended with status {self.process.returncode}: {self.log.read_text()[-2000:]}")


def run(command: str, services: int, endpoints: int) -> dict[str, Any]:
    """Measure what ``command`` (a program, and what stands before kube-proxy's flags) makes of a cluster of this size."""
    return asyncio.run(_run(command or f"{sys.executable} -m ipvsproxy", services, endpoints))


async def _run(command: str, services: int, endpoints: int) -> dict[str, Any]:
    first = await asyncio.create_subprocess_exec(*shlex.split(command), "--version", stdout=asyncio.subprocess.DEVNULL)
    await first.wait()  # so that its files are in memory: who is measured first would pay for that
    async with ApiServer() as server:
        server.store.put(NODES, workload.node())
        pods = {number: list(range(number * endpoints, (number + 1) * endpoints)) for number in range(services)}
        for number in range(services):
            server.store.put(SERVICES, workload.service(number))
            server.store.put(ENDPOINT_SLICES, workload.endpoint_slice(number, 0, pods[number]))
        began_s = time.perf_counter()
        async with _running(command, server.url) as proxy:
            await _until(proxy, lambda table: table.count("\n") >= 3 + services * (1 + endpoints), FIRST_POLL_S)
            programmed_s, processor_s = time.perf_counter() - began_s, proxy.processor_s()
            changes_s = []
            for change in range(CHANGES):
                await asyncio.sleep(CHANGE_PAUSE_S)
                number, pod = change * 7 % services, services * endpoints + 1000 + change
                changed_s = time.perf_counter()
                server.put(ENDPOINT_SLICES, workload.endpoint_slice(number, 0, [*pods[number][1:], pod]))
                digits = "".join(f"{int(octet):02X}" for octet in workload.pod_address(pod).split("."))
                await _until(proxy, lambda table, digits=digits: digits in table, CHANGE_POLL_S)
                changes_s.append(time.perf_counter() - changed_s)
            before_s = proxy.processor_s()
            await asyncio.sleep(IDLE_S)
            idle_s = proxy.processor_s() - before_s
    return {
        "programmed_s": programmed_s,
        "processor_s": processor_s,
        "change_s": statistics.median(changes_s),
        "idle_percent": idle_s / IDLE_S * 100,
    }


@contextlib.asynccontextmanager
async def _running(command: str, url: str) -> AsyncIterator[Proxy]:
    with tempfile.TemporaryDirectory() as directory:
        folder = pathlib.Path(directory)
        flags = _flags(write_kubeconfig(folder / "kubeconfig", url))
        log = folder / "log"
        with log.open("w") as opened:
            environment = {**os.environ, "KUBE_FEATURE_WatchListClient": "false"}  # the API server of the tests only lists
            words = [*shlex.split(command), *flags]
            process = await asyncio.create_subprocess_exec(*words, stdout=opened, stderr=opened, env=environment)
        try:
            yield Proxy(process, log)
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            await process.wait()


def _flags(kubeconfig: str) -> Sequence[str]:
    return (
        "--proxy-mode=ipvs",
        f"--kubeconfig={kubeconfig}",
        f"--hostname-override={workload.NODE}",
        "--cluster-cidr=10.128.0.0/10",
        "--conntrack-max-per-core=0",  # may only be set in the host's first network namespace
        "--kube-api-content-type=application/json",
        "--healthz-bind-address=127.0.0.1:10256",
        "--metrics-bind-address=127.0.0.1:10249",
    )


async def _until(proxy: Proxy, holds: Any, poll_s: float) -> None:
    deadline_s = time.perf_counter() + LONGEST_S
    while not holds(TABLE.read_text()):  # noqa: ASYNC240 - nothing else is to be done meanwhile
        proxy.demand_life()
        if time.perf_counter() > deadline_s:
            raise RuntimeError(f"not programmed after {LONGEST_S:.0f} s: {proxy.log.read_text()[-2000:]}")
        await asyncio.sleep(poll_s)
