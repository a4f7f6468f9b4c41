"""Observes a proxy from outside, by the kernel's IPVS table, the proxy's HTTP servers, and ``/proc``.

Operations, netlink messages, and waiting times inside the process are not visible from outside.
"""

import asyncio
import compileall
import contextlib
import datetime as dt
import os
import pathlib
import re
import shlex
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from typing import NamedTuple, Self

import aiohttp

import ipvsproxy
from scripts.benchmark import workload
from tests.support.api_server import write_kubeconfig

PACKAGE = pathlib.Path(ipvsproxy.__file__).parent
LONGEST_S = 1200.0
ANSWERED_WITHIN_S = 120.0
STOPPED_WITHIN_S = 30.0
_SERVING = re.compile(r"-> ([0-9A-F]{8}):[0-9A-F]{4} +\w+ +[1-9]")
"""Matches a real server with a weight above 0 in ``/proc/net/ip_vs``. The group captures the real server's address, in
hexadecimal."""
_LAST_SYNC = re.compile(r"^kubeproxy_sync_proxy_rules_last_timestamp_seconds(\{[^}]*\})? (\S+)$", re.MULTILINE)
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class Places(NamedTuple):
    """The places at which a proxy is observed: a file like ``/proc/net/ip_vs``, and the proxy's ports on 127.0.0.1."""

    table: pathlib.Path = pathlib.Path("/proc/net/ip_vs")
    metrics_port: int = 10249
    health_port: int = 10256


class Spent(NamedTuple):
    """The resources used up to a certain moment; only differences between two moments are meaningful.

    ``processor_s`` is the processor time of the process and of its finished children. ``started`` counts processes and threads of
    the whole machine, because the parent of a finished process is not known.
    """

    at_s: float
    processor_s: float
    started: int

    def since(self, before: Self) -> "Spent":
        """Returns the resources that were used since an earlier moment."""
        return Spent(self.at_s - before.at_s, self.processor_s - before.processor_s, self.started - before.started)


class Proxy:
    """A running proxy."""

    def __init__(self, process: asyncio.subprocess.Process, log: pathlib.Path, places: Places) -> None:
        self.began = Spent(time.perf_counter(), 0.0, _started())
        self._began_wall_s = time.time()
        self._process = process
        self._log = log
        self._places = places

    def logged_s(self, event: str) -> list[float]:
        """The times at which ipvsproxy logged this event, in seconds since ipvsproxy started."""
        stamps = re.findall(rf"^timestamp=(\S+) level=\w+ event={event}\b", self._log.read_text(), re.MULTILINE)
        return [dt.datetime.fromisoformat(stamp).timestamp() - self._began_wall_s for stamp in stamps]

    def spent(self) -> Spent:
        """The resources that the proxy has used until now.

        Raises:
            RuntimeError: the proxy has ended.
        """
        fields = self._read("stat").rpartition(")")[2].split()
        return Spent(time.perf_counter(), sum(int(field) for field in fields[11:15]) / _TICKS_PER_S, _started())

    def resident_mb(self) -> float:
        """Memory of the process without its children, in MB (10^6 bytes).

        Raises:
            RuntimeError: the proxy has ended.
        """
        return int(self._read("status").partition("VmRSS:")[2].split()[0]) * 1024 / 1e6

    def _read(self, name: str) -> str:
        try:
            return pathlib.Path(f"/proc/{self._process.pid}/{name}").read_text()
        except (FileNotFoundError, ProcessLookupError) as error:
            raise RuntimeError(f"it has ended: {self._last_words()}") from error

    async def until(self, holds: Callable[[str], bool], poll_s: float) -> None:
        """Read the kernel's IPVS table until the condition is true. Each read costs time, so choose a long ``poll_s``.

        Raises:
            RuntimeError: the proxy has ended, or the condition is not true after ``LONGEST_S``.
        """
        deadline_s = time.perf_counter() + LONGEST_S
        while not holds(self._places.table.read_text() if self._places.table.exists() else ""):
            self._demand_life(deadline_s, "programmed")
            await asyncio.sleep(poll_s)

    async def until_in_sync(self, poll_s: float) -> None:
        """Poll until the proxy's metrics show a finished IPv4 sync, and ``/healthz`` answers that it is healthy.

        Raises:
            RuntimeError: for the same reasons as ``until``.
        """
        deadline_s = time.perf_counter() + LONGEST_S
        while not await self._is_in_sync():
            self._demand_life(deadline_s, "in sync")
            await asyncio.sleep(poll_s)

    async def _is_in_sync(self) -> bool:
        try:
            # kube-proxy reports that it is healthy even before its first sync, so health alone is not sufficient.
            synced = has_synced(await self.scrape())
            await self._ask(self._places.health_port, "/healthz")
        except RuntimeError:
            return False  # the proxy's servers do not listen yet, or the proxy is not healthy
        return synced

    async def scrape(self) -> str:
        """Scrape the proxy's metrics as Prometheus does.

        Raises:
            RuntimeError: the server does not answer, or answers with a status other than 200.
        """
        return await self.get("/metrics")

    async def get(self, path: str, session: aiohttp.ClientSession | None = None) -> str:
        """An answer of the proxy's metrics server, such as a document of ipvsproxy's page.

        A ``session`` keeps its connections open, like a browser. Without a ``session``, a connection is opened for this answer
        only.

        Raises:
            RuntimeError: for the same reasons as ``scrape``.
        """
        return await self._ask(self._places.metrics_port, path, session)

    async def _ask(self, port: int, path: str, session: aiohttp.ClientSession | None = None) -> str:
        timeout = aiohttp.ClientTimeout(total=ANSWERED_WITHIN_S)
        try:
            async with contextlib.AsyncExitStack() as stack:
                if session is None:
                    session = await stack.enter_async_context(aiohttp.ClientSession())
                answer = await stack.enter_async_context(session.get(f"http://127.0.0.1:{port}{path}", timeout=timeout))
                answer.raise_for_status()
                return await answer.text()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise RuntimeError(f"no good answer to {path}: {error!r}; {self._last_words()}") from error

    def _demand_life(self, deadline_s: float, what: str) -> None:
        if self._process.returncode is not None:
            raise RuntimeError(f"it ended with status {self._process.returncode}: {self._last_words()}")
        if time.perf_counter() > deadline_s:
            raise RuntimeError(f"not {what} after {LONGEST_S:.0f} s: {self._last_words()}")

    def _last_words(self) -> str:
        return self._log.read_text()[-2000:]


def serving(table: str) -> set[str]:
    """The addresses of real servers that get new connections, in the kernel's hexadecimal notation."""
    return set(_SERVING.findall(table))


def has_synced(metrics: str) -> bool:
    """Whether an IPv4 sync has finished.

    The metric of older kube-proxies has no label for the IP family, so a sync of any family counts.
    """
    return any(float(at) for labels, at in _LAST_SYNC.findall(metrics) if "IPv6" not in labels)


async def start_once(command: str) -> None:
    """Load the proxy's files into the page cache, so that reading the files does not slow down the first measurement.

    This function also compiles the Python modules of ipvsproxy: an installation by pip has compiled modules, but a checkout may
    lack them.
    """
    compileall.compile_dir(PACKAGE, quiet=1)
    first = await asyncio.create_subprocess_exec(*shlex.split(command), "--version", stdout=asyncio.subprocess.DEVNULL)
    await first.wait()


@contextlib.asynccontextmanager
async def running(command: str, url: str, places: Places, *more_flags: str) -> AsyncIterator[Proxy]:
    """Start the proxy, and stop it at the end of the block.

    ``command`` is a program, and any arguments that precede kube-proxy's flags.
    """
    with tempfile.TemporaryDirectory() as directory:
        folder = pathlib.Path(directory)
        flags = (
            "--proxy-mode=ipvs",
            f"--kubeconfig={write_kubeconfig(folder / 'kubeconfig', url)}",
            f"--hostname-override={workload.NODE}",
            "--cluster-cidr=10.128.0.0/10",
            "--conntrack-max-per-core=0",  # this sysctl is writable only in the host's first network namespace
            "--kube-api-content-type=application/json",
            f"--healthz-bind-address=127.0.0.1:{places.health_port}",
            f"--metrics-bind-address=127.0.0.1:{places.metrics_port}",
            *more_flags,
        )
        log = folder / "log"
        with log.open("w") as opened:
            environment = {**os.environ, "KUBE_FEATURE_WatchListClient": "false"}  # the tests' API server has no streaming lists
            words = [*shlex.split(command), *flags]
            process = await asyncio.create_subprocess_exec(*words, stdout=opened, stderr=opened, env=environment)
        try:
            yield Proxy(process, log, places)
        finally:
            await _stop(process)


async def _stop(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    try:
        await asyncio.wait_for(process.wait(), STOPPED_WITHIN_S)
    except TimeoutError:
        process.kill()
        await process.wait()


def _started() -> int:
    return int(pathlib.Path("/proc/stat").read_text().partition("\nprocesses ")[2].split(maxsplit=1)[0])
