"""What was done to the program and what its clients met with, counted over all histories."""

import dataclasses
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterator

from tests.chaos.usage import Usage


@dataclasses.dataclass(slots=True)
class Figures:
    """All counts. ``heals_s`` are the times from each drift until the kernel was right again, by kind of drift.

    Those where the program was patient, because the same had been undone before, are in ``patient_heals_s``. ``lost`` are
    requests without an answer while nothing but the API, the program's life and its sockets changed; those that drift cost are
    ``lost_to_drift``. ``broken`` and ``broken_by_drift`` are the same for connections that were open. ``used`` is what each
    process used, by its number.
    """

    histories: int = 0
    changes: int = 0
    kills: int = 0
    troubles: int = 0
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
    heals_s: list[tuple[float, str]] = dataclasses.field(default_factory=list)
    patient_heals_s: list[tuple[float, str]] = dataclasses.field(default_factory=list)
    used: defaultdict[int, list[Usage]] = dataclasses.field(default_factory=lambda: defaultdict(list))
    violations: list[str] = dataclasses.field(default_factory=list)

    def lines(self) -> list[str]:
        """The table of the report."""
        drifts = Counter(kind for _, kind in (*self.heals_s, *self.patient_heals_s))
        rows = {
            "histories": self.histories,
            "API changes": self.changes,
            "kills": self.kills,
            "troubles (API, files, xtables lock)": self.troubles,
            "kernel faults injected": _counted(self.injected),
            "drifts": f"{drifts.total()} of {len(drifts)} kinds",
            "drift healed after": _times(self.heals_s),
            "  with patience, as it returned": _times(self.patient_heals_s),
            "quiet points compared": self.quiet_points,
            "  verify had nothing to say": self.verified,
            "probes sent": self.probes,
            "probes lost": self.lost,
            "probes lost to drift": self.lost_to_drift,
            "slowest answer": f"{self.slowest_answer_s:.2f} s",
            "requests through open connections": self.asked,
            "open connections broken": self.broken,
            "open connections broken by drift": self.broken_by_drift,
            **dict(self._used()),
            "violations": len(self.violations),
        }
        kinds = [f"  {kind:34}{count}" for kind, count in sorted(drifts.items())]
        return [f"{name:36}{value}" for name, value in rows.items()] + ["drifts by kind:", *kinds]

    def _used(self) -> Iterator[tuple[str, str]]:
        samples = [one for life in self.used.values() for one in life]
        for name in ("resident_mb", "descriptors", "sockets", "threads", "tasks") if samples else ():
            values = [getattr(one, name) for one in samples]
            grown = max(getattr(life[-1], name) - getattr(life[0], name) for life in self.used.values())
            yield f"process: {name}", f"{min(values):g} to {max(values):g}, grown in one life by {grown:g} at most"


def _times(heals_s: list[tuple[float, str]]) -> str:
    if not heals_s:
        return "none"
    longest_s, kind = max(heals_s)
    median_s = statistics.median(one for one, _ in heals_s)
    return f"{median_s:.1f} s (median), {longest_s:.1f} s (longest: {kind}), {len(heals_s)} in all"


def _counted(counts: Counter[str]) -> str:
    return f"{counts.total()}: " + ", ".join(f"{name} {count}" for name, count in sorted(counts.items())) if counts else "0"
