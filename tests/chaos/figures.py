"""What was done to the program and what its clients met with, counted over all histories."""

import dataclasses
from collections import Counter


@dataclasses.dataclass(slots=True)
class Figures:
    """All counts. ``heals_s`` is how long each drift took to be healed, with the time that one look at the kernel takes.

    ``lost`` are requests without an answer while nothing but the API and the program's life changed; those that drift cost are
    ``lost_to_drift``. ``broken`` and ``broken_by_drift`` are the same for connections that were open.
    """

    histories: int = 0
    changes: int = 0
    kills: int = 0
    faults: int = 0
    drifts: Counter[str] = dataclasses.field(default_factory=Counter)
    quiet_points: int = 0
    probes: int = 0
    lost: int = 0
    lost_to_drift: int = 0
    slowest_answer_s: float = 0
    asked: int = 0
    broken: int = 0
    broken_by_drift: int = 0
    heals_s: list[float] = dataclasses.field(default_factory=list)
    violations: list[str] = dataclasses.field(default_factory=list)

    def lines(self) -> list[str]:
        """The table of the report."""
        heals = sorted(self.heals_s) or [0.0]
        rows = {
            "histories": self.histories,
            "API changes": self.changes,
            "kills": self.kills,
            "faults": self.faults,
            "drifts": f"{self.drifts.total()} of {len(self.drifts)} kinds",
            "drift healed after": f"{heals[len(heals) // 2]:.1f} s (median), {heals[-1]:.1f} s (longest)",
            "quiet points compared": self.quiet_points,
            "probes sent": self.probes,
            "probes lost": self.lost,
            "probes lost to drift": self.lost_to_drift,
            "slowest answer": f"{self.slowest_answer_s:.2f} s",
            "requests through open connections": self.asked,
            "open connections broken": self.broken,
            "open connections broken by drift": self.broken_by_drift,
            "violations": len(self.violations),
        }
        return [f"{name:36}{value}" for name, value in rows.items()]
