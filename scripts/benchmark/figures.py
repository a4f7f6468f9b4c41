"""The names and targets of the figures of each measurement, and functions that combine durations."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

Found = Mapping[str, Any]
COUNTED = (
    ("netlink messages", "messages"),
    ("netlink calls", "calls"),
    ("reads of files", "reads"),
    ("writes of files", "writes"),
    ("system calls", "system calls"),
    ("processes started", "processes"),
)
"""The name of each figure, and the key of the figure's count."""


class Row(NamedTuple):
    """One figure. The value must not be greater than ``target``; a target of None means that there is no target.

    A ``value`` of None means that the figure could not be measured, and then ``ok`` is false.
    """

    case: str
    figure: str
    value: float | None
    target: float | None = None

    @property
    def ok(self) -> bool:
        """Whether the value meets the target."""
        return self.value is not None and (self.target is None or self.value <= self.target)


def unmeasured(case: str) -> Row:
    """The only row of a case that failed or did not run; without this row, a list of figures would look complete."""
    return Row(case, "could not be measured", None)


def distribution(values_s: Sequence[float]) -> dict[str, float]:
    """Percentiles of durations, in milliseconds."""
    ordered = sorted(values_s)
    return {
        "p50_ms": statistics.median(ordered) * 1e3,
        "p99_ms": ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))] * 1e3,
        "most_ms": ordered[-1] * 1e3,
    }


def by_part(steps: Mapping[str, float]) -> Mapping[str, Mapping[str, float]]:
    """The number of steps in each part of a recording, with the distribution and the sum of their durations."""
    parts: dict[str, list[float]] = {}
    for step, spent_s in steps.items():
        if step:
            parts.setdefault(step.split()[0], []).append(spent_s)
    return {part: {**distribution(times_s), "sum_s": sum(times_s), "steps": len(times_s)} for part, times_s in parts.items()}


def counted(
    name: str, counts: Mapping[str, float], *, of: int = 1, before: str = "", after: str = "", most_processes: int | None = None
) -> Iterator[Row]:
    """The numbers of messages, calls and processes; each number is divided by ``of``.

    System calls on files are included if the kernel counts them.
    """
    for figure, key in COUNTED:
        target = most_processes if key == "processes" else None
        if key in counts or key not in ("reads", "writes"):
            yield Row(name, f"{before}{figure}{after}", counts.get(key, 0) / of, target)


def change(name: str, most_resident_mb: float | None, found: Sequence[Found]) -> Iterator[Row]:
    """The table rows of the benchmark of single changes.

    Each count is the median over all changes, except the total number of started processes.
    """
    seen = found[0]["change"]
    yield Row(name, "p50 ms", seen["p50_ms"])
    yield Row(name, "p99 ms", seen["p99_ms"])
    yield Row(name, "p50 ms without the kernel's part", seen["own"]["p50_ms"], 2)
    yield Row(name, "p99 ms without the kernel's part", seen["own"]["p99_ms"], 10)
    yield Row(name, "processor ms", seen["cpu_ms"])
    yield Row(name, "of it the kernel, ms", seen["kernel_ms"])
    yield Row(name, "page faults", seen["page_faults"])
    yield Row(name, "netlink messages", seen["messages"])
    yield Row(name, "netlink calls", seen["calls"])
    yield Row(name, "system calls", seen["system_calls"])
    yield Row(name, "processes started in all", seen["processes"])
    yield Row(name, "resident MB", found[0]["resident_after_mb"], most_resident_mb)


def churn(name: str, found: Sequence[Found]) -> Iterator[Row]:
    """The table rows of the benchmark with a thousand changes per second."""
    seen = found[0]["churn"]
    yield Row(name, "p50 ms", seen["p50_ms"])
    yield Row(name, "p99 ms", seen["p99_ms"], 250)
    yield Row(name, "processor %", seen["cpu_percent"], 50)
    yield Row(name, "wall s", seen["wall_s"])
    yield Row(name, "of it the kernel, s", seen["kernel_s"])
    yield Row(name, "processor % without the kernel's part", seen["own_percent"])
    yield Row(name, "s behind at the end", max(0.0, seen["wall_s"] - seen["fed_s"]), 0.25)
    yield Row(name, "largest backlog, changes", seen["backlog"])
    yield Row(name, "waiting removals at the end", seen["waiting"])
    yield Row(name, "syncs", seen["syncs"])
    yield Row(name, "resident MB", found[0]["resident_after_mb"], 250)
    yield Row(name, "resident MB grown", seen["grown_mb"])
    yield from counted(name, seen["counts"])


def beside_kernel(name: str, found: Sequence[Found]) -> Iterator[Row]:
    """The table rows that compare the program's time for single changes, churn and new Services with the time of a replay.

    A replay sends the program's recorded netlink messages again from a file, while the program does not run.

    The replay of a first connection includes the time of connecting.
    """
    change, connection, churn = (found[0][part] for part in ("change", "connection", "churn"))
    replay = found[1]["parts"]
    yield from (Row(name, f"change, {figure} ms", change[f"{figure}_ms"]) for figure in ("p50", "p99"))
    yield from (Row(name, f"change, {figure} ms: replay", replay["change"][f"{figure}_ms"]) for figure in ("p50", "p99"))
    yield Row(name, "change, netlink messages", change["messages"])
    yield Row(name, "change, system calls", change["system_calls"])
    yield from (Row(name, f"churn, {figure} ms", churn[f"{figure}_ms"]) for figure in ("p50", "p99"))
    for figure in ("p50", "p99"):
        yield Row(name, f"first connection, {figure} ms", connection[f"{figure}_ms"])
        replayed_ms = replay["connection"][f"{figure}_ms"] + connection["connect_ms"]
        yield Row(name, f"first connection, {figure} ms: replay", replayed_ms)
    yield Row(name, "processor s for 1,000 changes", change["cpu_ms"])
    yield Row(name, "processor s for 1,000 changes: replay", replay["change"]["sum_s"] / replay["change"]["steps"] * 1_000)
    yield Row(name, "processor s for 1,000 of churn", churn["cpu_percent"] / 100 * churn["wall_s"] / churn["fed_s"])
    yield Row(name, "processor s for 1,000 of churn: replay", replay["churn"]["sum_s"] / churn["fed_s"])


def rolling(found: Sequence[Found]) -> Iterator[Row]:
    """The table rows of the case "rolling": each event changes one of the thousand endpoints of a Service."""
    seen = found[0]["rolling"]
    yield Row("rolling", "operations per slice event, median", seen["operations_p50"], 3)
    yield Row("rolling", "operations per slice event, most", seen["operations_most"])
    yield Row("rolling", "processor ms per slice event", seen["cpu_ms"])
    yield from counted("rolling", seen["counts"], of=seen["events"], after=" per slice event")


def idle(found: Sequence[Found]) -> Iterator[Row]:
    """The table rows of the benchmark that measures a period without changes."""
    yield Row("idle", "processor %", found[0]["idle"]["cpu_percent"], 0.2)
    yield Row("idle", "processor %, with the polls of a minute", found[0]["idle"]["polling_percent"])
    yield Row("idle", "processor %, with polls of everything every 30 s", found[0]["idle"]["rarely_polling_percent"])
    yield from counted("idle", found[0]["idle"]["counts"], most_processes=0)
    yield from counted("idle", found[0]["idle"]["polling"]["counts"], after=", with the polls of a minute")


def audit(found: Sequence[Found]) -> Iterator[Row]:
    """The table rows of the benchmark of audits and polls. The counts are per audit or poll."""
    seen = found[0]["audit"]
    yield Row("audit", "wall s", seen["wall_s"], 2)
    yield Row("audit", "processor s", seen["cpu_s"])
    yield Row("audit", "loop held ms, longest of all", seen["held_most_ms"], 20)
    yield Row("audit", "loop held ms, median of the longest", seen["held_ms"])
    yield Row("audit", "loop held ms, best of the longest", seen["held_best_ms"])
    yield Row("audit", "operations", seen["operations"], 0)
    yield from counted("audit", seen["counts"], of=seen["times"], after=", each")
    poll = seen["poll"]
    yield Row("audit", "a poll: wall s", poll["wall_s"])
    yield Row("audit", "a poll: processor s", poll["cpu_s"])
    yield Row("audit", "a poll: loop held ms, longest of all", poll["held_most_ms"], 20)
    yield Row("audit", "a poll: loop held ms, median of the longest", poll["held_ms"])
    yield from counted("audit", poll["counts"], of=poll["times"], before="a poll: ", most_processes=0)


def scrape(found: Sequence[Found]) -> Iterator[Row]:
    """The table rows of the benchmark of scrapes. The counts are per scrape."""
    seen = found[0]["scrape"]
    yield Row("scrape", "wall s", seen["wall_s"], 1)
    yield Row("scrape", "loop held ms, longest of all", seen["held_most_ms"], 20)
    yield Row("scrape", "loop held ms, median of the longest", seen["held_ms"])
    yield Row("scrape", "loop held ms, best of the longest", seen["held_best_ms"])
    yield Row("scrape", "a change meanwhile: ms, median", seen["change_ms"])
    yield from counted("scrape", seen["counts"], of=seen["times"], after=", each")
    yield Row("scrape", "series of Services", seen["series"])
    yield Row("scrape", "bytes", seen["bytes"])
    yield Row("scrape", "resident MB", found[0]["resident_after_mb"], 250)
