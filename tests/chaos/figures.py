"""Sums over all histories: changes, faults, drift, and the results of the clients' requests."""

import dataclasses
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from tests.chaos.usage import Usage

Heals = list[tuple[float, str]]


@dataclasses.dataclass(slots=True)
class Figures:
    """All counts. ``heals_s`` are the times from each drift until its repair, by kind of drift.

    ``patient_heals_s`` has the times of repairs that the program delayed because the same drift had returned; ``readings_s`` has
    the duration of each read of the kernel. ``lost`` counts requests that failed without drift; ``lost_to_drift`` counts requests
    that failed during drift. ``broken`` counts connections lost without drift, and ``broken_by_drift`` counts connections lost
    during drift. ``used`` has the measurements of each process's resource usage. Each key of ``used`` is the number of a process;
    processes are numbered in the order in which they start.
    """

    histories: int = 0
    harms: Counter[str] = dataclasses.field(default_factory=Counter)
    changes: int = 0
    kills: int = 0
    locks: int = 0
    moves: int = 0
    troubles: Counter[str] = dataclasses.field(default_factory=Counter)
    moments: Counter[str] = dataclasses.field(default_factory=Counter)
    injected: Counter[str] = dataclasses.field(default_factory=Counter)
    quiet_points: int = 0
    verified: int = 0
    probes: int = 0
    lost: int = 0
    lost_to_drift: int = 0
    slowest_answer_s: float = 0
    asked: int = 0
    broken: int = 0
    broken_by_drift: int = 0
    heals_s: Heals = dataclasses.field(default_factory=list)
    patient_heals_s: Heals = dataclasses.field(default_factory=list)
    readings_s: list[float] = dataclasses.field(default_factory=list)
    used: defaultdict[int, list[Usage]] = dataclasses.field(default_factory=lambda: defaultdict(list))
    violations: list[str] = dataclasses.field(default_factory=list)

    def report(self) -> dict[str, Any]:
        """All counts by name, as values for JSON; times in seconds."""
        drifts = Counter(kind for _, kind in (*self.heals_s, *self.patient_heals_s))
        return {
            "histories": self.histories,
            "API changes": self.changes,
            "kills": self.kills,
            "xtables lock held": self.locks,
            "moves to the other backend": self.moves,
            "troubles (API, files)": _counted(self.troubles),
            "bad moments": _counted(self.moments),
            "kernel faults injected": _counted(self.injected),
            "drifts": _counted(drifts),
            "harms": _counted(self.harms),
            "drift healed after": _times([seconds for seconds, _ in self.heals_s]),
            "  with patience, as it returned": _times([seconds for seconds, _ in self.patient_heals_s]),
            "  one reading takes": _times(self.readings_s),
            "quiet points compared": self.quiet_points,
            "  verify had nothing to say": self.verified,
            "probes sent": self.probes,
            "probes lost": self.lost,
            "probes lost to drift": self.lost_to_drift,
            "slowest answer": round(self.slowest_answer_s, 2),
            "requests through open connections": self.asked,
            "open connections broken": self.broken,
            "open connections broken by drift": self.broken_by_drift,
            **dict(self._used()),
            "violations": len(self.violations),
            "healed after, by kind of drift": {kind: _times(times) for kind, times in _by_kind(self.heals_s).items()},
        }

    def lines(self) -> list[str]:
        """The report as text."""
        lines = []
        for name, value in self.report().items():
            if isinstance(value, dict) and any(isinstance(one, dict) for one in value.values()):
                lines += [f"{name}:", *(f"  {kind:34}{_in_one_line(one)}" for kind, one in value.items())]
            else:
                lines.append(f"{name:36}{_in_one_line(value)}")
        return lines

    def _used(self) -> Iterator[tuple[str, Mapping[str, float]]]:
        samples = [one for life in self.used.values() for one in life]
        for name in ("resident_mb", "descriptors", "sockets", "threads", "tasks") if samples else ():
            values = [getattr(one, name) for one in samples]
            grown = max(getattr(life[-1], name) - getattr(life[0], name) for life in self.used.values())
            yield f"process: {name}", {"least": min(values), "most": max(values), "grown in one life by at most": round(grown, 2)}


def _by_kind(heals_s: Heals) -> dict[str, list[float]]:
    times: defaultdict[str, list[float]] = defaultdict(list)
    for seconds, kind in sorted(heals_s, key=lambda one: one[1]):
        times[kind].append(seconds)
    return times


def _times(times_s: Sequence[float]) -> dict[str, float]:
    if not times_s:
        return {"times": 0}
    summary = {"median": statistics.median(times_s), "95 %": percentile(times_s, 95), "longest": max(times_s)}
    return {"times": len(times_s)} | {name: round(seconds, 2) for name, seconds in summary.items()}


def percentile(values: Iterable[float], percent: int) -> float:
    """Returns the smallest of the values such that at least ``percent`` % of all values are less than or equal to it."""
    ordered = sorted(values)
    return ordered[max(0, -(-len(ordered) * percent // 100) - 1)]


def _counted(counts: Counter[str]) -> dict[str, int]:
    return {"all": counts.total(), **dict(sorted(counts.items()))}


def _in_one_line(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {one:g}" for name, one in value.items())
    return str(value)
