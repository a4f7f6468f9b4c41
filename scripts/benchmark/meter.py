"""Measures, from inside the program's process, how the program spends its time and what it sends to the kernel.

A phase is a function of the program whose calls are timed, by wall-clock time and by the processor time of its thread. Phases run
once per page, chunk or sync, never once per object.
"""

import asyncio
import dataclasses
import functools
import pathlib
import subprocess
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Generator, Sequence
from typing import Any

from ipvsproxy.daemon.loop import engine, reader, translator
from ipvsproxy.kernel import node_kernel
from ipvsproxy.kernel.base import netlink
from ipvsproxy.kernel.iptables import process as iptables_process
from ipvsproxy.kernel.ipvs import ipvs_driver as ipvs
from ipvsproxy.kernel.ipvs import ipvs_message
from ipvsproxy.reconcile import reconciler
from ipvsproxy.store import objects
from ipvsproxy.translate.api import decode
from scripts.benchmark import calls, recording

PROTOCOLS = {0: "addresses", 12: "ipset and conntrack", 16: "ipvs"}
"""The names of netlink protocols, by the number of the protocol."""


@dataclasses.dataclass
class Phase:
    """The number of calls of one function, and their time in seconds."""

    calls: int = 0
    wall_s: float = 0.0
    cpu_s: float = 0.0


class Meter:
    """Counts what the program calls and sends, since this object was created or since the last ``reset``.

    A process has only one ``Meter``.

    Without ``times``, only the kernel's part is timed: the system calls that send changes and receive answers. Timing further
    parts would add 10 % to the measured time of a single change, or 25 % on the test kernel, where each reading of the clock
    takes 17 µs. ``acknowledged_s`` contains, for each batch, the time at which the batch's last system call ended.
    """

    def __init__(self) -> None:
        self.times = True
        self.phases: dict[str, Phase] = defaultdict(Phase)
        self.counts: Counter[str] = Counter()
        self.acknowledged_s: list[float] = []
        self.recording: recording.Recording | None = None
        self._handling: Phase | None = None
        """Counts of the batch that the kernel thread applies at present."""
        self._answered_s = 0.0
        self._asks = False
        """Whether the program is sending a test message, which looks like a change, but which the kernel always refuses."""
        self._file_calls = calls.file_calls()
        self._cover()

    def reset(self) -> None:
        """Forget all counts."""
        self.phases.clear()
        self.counts.clear()
        self.acknowledged_s.clear()
        self._file_calls = calls.file_calls()

    def step(self, name: str = "") -> None:
        """Begin this step of the recording, if the measurement has a recording."""
        if self.recording is not None:
            self.recording.step = name

    def kernel_s(self) -> float:
        """The wall-clock time of the system calls that sent changes to the kernel."""
        return sum(phase.wall_s for name, phase in self.phases.items() if name.startswith("kernel"))

    def figures(self) -> dict[str, Any]:
        """Returns all figures as a JSON-serializable value."""
        return {
            "phases": {name: dataclasses.asdict(phase) for name, phase in self.phases.items()},
            "counts": self.all_counts(),
        }

    def all_counts(self) -> dict[str, int]:
        """All counts.

        ``calls`` is the number of calls on netlink sockets. ``reads`` and ``writes`` of files are included if the kernel counts
        them.

        The figure ``system calls`` is the sum of the calls on sockets and on files.
        """
        before, now = self._file_calls, calls.file_calls()
        files = {name: now[name] - before.get(name, 0) for name in now}
        on_netlink = sum(self.counts[name] for name in calls.NETLINK)
        return {**self.counts, **files, "calls": on_netlink, "system calls": on_netlink + sum(files.values())}

    def _cover(self) -> None:
        owner: type
        for owner, function, name in (
            (decode.ListReader, "feed", "decode"),
            (decode.ListReader, "finish", "decode"),
            (objects.Store, "deliver", "store"),
            (translator.Translator, "put_skeletons", "rules"),
            (node_kernel.NodeKernel, "observe", "read"),
            (node_kernel.NodeKernel, "apply", "apply"),
            (ipvs_message.Encoder, "encode", "encode IPVS"),
        ):
            setattr(owner, function, self._timed(getattr(owner, function), name))
        for owner, function, name in (
            (engine.Engine, "_update_view", "view"),
            (reader.KernelReader, "observe", "audit"),
        ):
            setattr(owner, function, self._timed_whole(getattr(owner, function), name))
        for owner, function, name in (
            (translator.Translator, "putting", "translate and desire"),
            (reconciler.Reconciler, "planning", "plan"),
            (reconciler.Reconciler, "settling", "settle"),
        ):
            setattr(owner, function, self._timed_steps(getattr(owner, function), name))
        netlink.Channel.run = self._run(netlink.Channel.run)  # type: ignore[method-assign]  # to count it
        netlink.Channel.gather = self._counted(  # type: ignore[method-assign]  # to count it
            self._timed(netlink.Channel.gather, "dump"), "dumps"
        )
        ipvs.IpvsDriver.refusal_with = self._asking(ipvs.IpvsDriver.refusal_with)  # type: ignore[method-assign]  # to count it
        iptables_process.run = self._rules(iptables_process.run)
        subprocess.Popen.__init__ = self._counted(  # type: ignore[method-assign]  # to count it
            subprocess.Popen.__init__, "processes"
        )
        calls.cover(self._made, self.counts)

    def _timed(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        @functools.wraps(function)
        def timed(*arguments: Any, **named: Any) -> Any:
            if not self.times:
                return function(*arguments, **named)
            began = self._now()
            try:
                return function(*arguments, **named)
            finally:
                self._book(name, began)

        return timed

    def _timed_whole(self, function: Callable[..., Awaitable[Any]], name: str) -> Callable[..., Awaitable[Any]]:
        @functools.wraps(function)
        async def timed(*arguments: Any, **named: Any) -> Any:
            if not self.times:
                return await function(*arguments, **named)
            began = self._now()
            try:
                return await function(*arguments, **named)
            finally:
                self._book(name, began)

        return timed

    def _timed_steps(
        self, function: Callable[..., Generator[None, None, Any]], name: str
    ) -> Callable[..., Generator[None, None, Any]]:
        @functools.wraps(function)
        def timed(*arguments: Any, **named: Any) -> Generator[None, None, Any]:
            if not self.times:
                return (yield from function(*arguments, **named))
            began = self._now()
            try:
                return (yield from function(*arguments, **named))
            finally:
                self._book(name, began)

        return timed

    @staticmethod
    def _now() -> tuple[float, float]:
        return time.perf_counter(), time.thread_time()

    def _book(self, name: str, began: tuple[float, float]) -> None:
        wall, cpu = began
        phase = self.phases[name]
        phase.calls += 1
        phase.wall_s += time.perf_counter() - wall
        phase.cpu_s += time.thread_time() - cpu

    def _run(self, run: Callable[..., dict[int, int]]) -> Callable[..., dict[int, int]]:
        @functools.wraps(run)
        def measured(channel: netlink.Channel, messages: Sequence[bytes], refusal: int | None = None) -> dict[int, int]:
            protocol = channel._protocol
            if self.recording is not None:
                self.recording.add(protocol, messages)
            self._handling, self._answered_s = self.phases[f"kernel: {PROTOCOLS[protocol]}"], 0.0
            try:
                failed = run(channel, messages, refusal)
            finally:
                self._handling = None
            self.acknowledged_s.append(self._answered_s or time.perf_counter())  # without a kernel, no call sets _answered_s
            self.counts["messages"] += len(messages)
            self.counts["refused"] += len(failed)
            # A refused message has written nothing; some of the refused messages only test which features the kernel has.
            self.counts["written"] += 0 if self._asks else len(messages) - len(failed)
            self.counts["bytes"] += sum(map(len, messages))
            return failed

        return measured

    def _made(self, name: str, call: Callable[..., Any], *arguments: Any) -> Any:
        """Make a system call, and count it, on the thread that owns the channels.

        If the call belongs to a batch of changes, the clock is read before and after the call.
        """
        self.counts[name] += 1
        phase = self._handling
        if phase is None:
            self.counts["messages"] += name == calls.SENDS
            return call(*arguments)
        cpu_s = time.thread_time() if self.times else 0.0
        began_s = time.perf_counter()
        try:
            return call(*arguments)
        finally:
            self._answered_s = time.perf_counter()
            phase.calls += 1
            phase.wall_s += self._answered_s - began_s
            phase.cpu_s += time.thread_time() - cpu_s if self.times else 0.0

    def _asking(self, ask: Callable[..., int]) -> Callable[..., int]:
        @functools.wraps(ask)
        def asking(*arguments: Any) -> int:
            self._asks = True
            try:
                return ask(*arguments)
            finally:
                self._asks = False

        return asking

    def _rules(self, run: Callable[..., str]) -> Callable[..., str]:
        @functools.wraps(run)
        def measured(command: str, *arguments: str, stdin: str = "") -> str:
            if self.recording is not None and stdin and "KUBE-SERVICES" in stdin:
                self.recording.rules.append((command, *arguments, stdin))
            began = self._now()
            try:
                return run(command, *arguments, stdin=stdin)
            finally:
                self._book("processes", began)

        return measured

    def _counted(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        @functools.wraps(function)
        def counted(*arguments: Any, **named: Any) -> Any:
            self.counts[name] += 1
            return function(*arguments, **named)

        return counted


class Heartbeat:
    """Measures how long the event loop was blocked: the longest delay of a timer that should fire every two milliseconds."""

    PERIOD_S = 0.002

    def __init__(self) -> None:
        self.delays_s: list[float] = []

    async def run(self) -> None:
        """Beat for ever."""
        while True:
            due_s = time.perf_counter() + self.PERIOD_S
            await asyncio.sleep(self.PERIOD_S)
            self.delays_s.append(max(0.0, time.perf_counter() - due_s))

    def longest_s(self) -> float:
        """Returns the longest time that the loop was blocked since the last call of this method."""
        longest = max(self.delays_s, default=0.0)
        self.delays_s.clear()
        return longest


def resident_mb(field: str = "VmRSS") -> float:
    """Memory of this process in MB (10^6 bytes); ``VmHWM`` is the peak."""
    for line in pathlib.Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024 / 1e6
    return 0.0
