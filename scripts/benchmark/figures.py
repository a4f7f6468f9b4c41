"""What the figures of one measurement are called, and what is wanted of them."""

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
"""Figure, and what it is among counts."""


class Row(NamedTuple):
    """One figure. ``target`` is None where there is none; otherwise the figure must not be greater.

    ``value`` is None where it could not be measured, which is never ``ok``.
    """

    case: str
    figure: str
    value: float | None
    target: float | None = None

    @property
    def ok(self) -> bool:
        """Whether the target is reached."""
        return self.value is not None and (self.target is None or self.value <= self.target)


def unmeasured(case: str) -> Row:
    """The only row of a case that failed, or was not reached: without it a list of figures would look complete."""
    return Row(case, "could not be measured", None)


def counted(
    name: str, counts: Mapping[str, float], *, of: int = 1, before: str = "", after: str = "", most_processes: int | None = None
) -> Iterator[Row]:
    """What was asked of the kernel, divided by ``of``. Calls for files are known where the kernel keeps count of them."""
    for figure, key in COUNTED:
        target = most_processes if key == "processes" else None
        if key in counts or key not in ("reads", "writes"):
            yield Row(name, f"{before}{figure}{after}", counts.get(key, 0) / of, target)


def change(name: str, most_resident_mb: float | None, found: Sequence[Found]) -> Iterator[Row]:
    """Of one endpoint changing, again and again. Counts are of one change, medians."""
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
    """Of a thousand changes a second."""
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


def rolling(found: Sequence[Found]) -> Iterator[Row]:
    """Of a Service of a thousand endpoints, one of which changes in each event."""
    seen = found[0]["rolling"]
    yield Row("rolling", "operations per slice event, median", seen["operations_p50"], 3)
    yield Row("rolling", "operations per slice event, most", seen["operations_most"])
    yield Row("rolling", "processor ms per slice event", seen["cpu_ms"])
    yield from counted("rolling", seen["counts"], of=seen["events"], after=" per slice event")


def idle(found: Sequence[Found]) -> Iterator[Row]:
    """Of nothing changing."""
    yield Row("idle", "processor %", found[0]["idle"]["cpu_percent"], 0.2)
    yield Row("idle", "processor %, with the looks of a minute", found[0]["idle"]["looking_percent"])
    yield from counted("idle", found[0]["idle"]["counts"], most_processes=0)
    yield from counted("idle", found[0]["idle"]["looking"]["counts"], after=", with the looks of a minute")


def audit(found: Sequence[Found]) -> Iterator[Row]:
    """Of audits, and of looks. Counts are of one of them."""
    seen = found[0]["audit"]
    yield Row("audit", "wall s", seen["wall_s"], 2)
    yield Row("audit", "processor s", seen["cpu_s"])
    yield Row("audit", "loop held ms, longest of all", seen["held_most_ms"], 20)
    yield Row("audit", "loop held ms, median of the longest", seen["held_ms"])
    yield Row("audit", "loop held ms, best of the longest", seen["held_best_ms"])
    yield Row("audit", "operations", seen["operations"], 0)
    yield from counted("audit", seen["counts"], of=seen["times"], after=", each")
    look = seen["poll"]
    yield Row("audit", "a look: wall s", look["wall_s"])
    yield Row("audit", "a look: processor s", look["cpu_s"])
    yield Row("audit", "a look: loop held ms, longest of all", look["held_most_ms"], 20)
    yield Row("audit", "a look: loop held ms, median of the longest", look["held_ms"])
    yield from counted("audit", look["counts"], of=look["times"], before="a look: ", most_processes=0)


def scrape(found: Sequence[Found]) -> Iterator[Row]:
    """Of scrapes. Counts are of one of them."""
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
