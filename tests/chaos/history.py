"""One history: the program lives through chance, and after each step the kernel must equal the model.

All that happens follows from the seed; when it happens, and in which state a kill meets the program, is up to the machine.
"""

import contextlib
import fcntl
import random
import time
from collections.abc import Mapping
from pathlib import Path

from tests import golden_state, lab, program
from tests.chaos import cluster, drift, foreign, kernel_state
from tests.chaos.clients import Clients
from tests.chaos.figures import Figures
from tests.chaos.world import World

FLAGS = (
    "--proxy-mode=ipvs",
    "--hostname-override=node-a",
    "--cluster-cidr=10.244.0.0/16,fd00:10:244::/56",
    "--conntrack-max-per-core=0",
)
QUIET_WITHIN_S = 150.0
"""Until everything is in force: on a slow kernel, with another start of the program in it."""
HEALED_WITHIN_S = 60.0
"""Until drift is healed: five seconds on a node; here all readings, also ours, take a hundred times as long."""
LOCK = Path("/run/xtables.lock")

STEPS: Mapping[str, int] = {"change": 5, "kill": 4, "fault": 2, "lock": 1, "drift": 5}
"""What a history is made of, with weights."""


class Violation(Exception):  # noqa: N818 - not an error of the suite
    """What must not be; the message is the report."""


class History:
    """One history; ``diary`` is what has happened so far, with the seconds since its beginning."""

    def __init__(self, seed: str, node: lab.Lab, directory: Path, figures: Figures) -> None:
        self.diary: list[str] = []
        self._dice = random.Random(seed)
        self._figures = figures
        self._directory = directory
        self._log = directory / "log"
        self._world = World(self._dice)
        self._clients = Clients(node, figures)
        self._cluster: cluster.Cluster
        self._running: program.Program
        self._began_s = time.monotonic()

    def run(self, steps: int) -> None:
        """Live through it.

        Raises:
            Violation: something is as it must not be.
        """
        with contextlib.ExitStack() as cleaning:
            golden_state.clear_state()
            cleaning.callback(golden_state.clear_state)
            foreign.add()
            cleaning.callback(foreign.remove)
            self._foreign = foreign.read()
            self._cluster = self._make_cluster()
            cleaning.callback(self._cluster.close)
            self._cluster.apply(self._world.objects.values(), ())
            self._start()
            cleaning.callback(self._end)
            self._wait_until_quiet(QUIET_WITHIN_S)
            self._clients.open()
            cleaning.callback(self._clients.close)
            plan = self._dice.choices(list(STEPS), list(STEPS.values()), k=steps)
            while plan:
                self._live_calmly(plan)
                self._drift(plan)
            self._running.__exit__(None, None, None)
            self._check_kernel("after the end")

    def _live_calmly(self, plan: list[str]) -> None:
        """All steps up to the next drift, while clients ask: nothing may be lost."""
        if plan[0] == "drift":
            return
        with self._clients.asking(self._began_s) as unanswered:
            while plan and plan[0] != "drift":
                {"change": self._change, "kill": self._kill, "fault": self._fault, "lock": self._lock}[plan.pop(0)]()
                self._wait_until_quiet(QUIET_WITHIN_S)
                broken = self._clients.ask_through_open()
                if broken:
                    self._figures.broken += len(broken)
                    raise self._violation("an open connection", broken)
                self._clients.open()
        if unanswered:
            raise self._violation("unanswered requests", unanswered)

    def _change(self) -> None:
        for _ in range(self._dice.randint(1, 4)):
            what, put, gone = self._world.change()
            self._note(what)
            self._cluster.apply(put, gone)
            self._figures.changes += 1
            time.sleep(self._dice.choice([0, 0, 0.05, 0.3]))

    def _kill(self) -> None:
        """Once in the middle of changes, or several times, also while it starts."""
        for _ in range(self._dice.choice([1, 1, 2, 3])):
            self._change()
            time.sleep(self._dice.uniform(0, 1.5))
            self._note("kill")
            self._running.kill()
            self._figures.kills += 1
            if self._dice.random() < 0.5:
                self._change()
            self._start()

    def _fault(self) -> None:
        self._note(self._cluster.trouble(self._dice))
        self._figures.faults += 1
        self._change()

    def _lock(self) -> None:
        """Somebody holds the lock of all writers of rules."""
        self._note("the xtables lock is held")
        self._figures.faults += 1
        with LOCK.open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            self._change()
            time.sleep(self._dice.uniform(0, 7))
        self._note("the xtables lock is free")

    def _drift(self, plan: list[str]) -> None:
        while plan and plan[0] == "drift":
            plan.pop(0)
            for one in self._dice.sample(drift.DRIFTS, self._dice.choice([1, 1, 1, 2])):
                said = one(golden_state.read_state(), self._dice)
                self._note(f"drift {one.__name__}: {said}")
                self._figures.drifts[one.__name__] += 1
            began_s = time.monotonic()
            self._clients.ask_once()
            self._wait_until_quiet(HEALED_WITHIN_S)
            self._figures.heals_s.append(time.monotonic() - began_s)
            self._figures.broken_by_drift += len(self._clients.ask_through_open())
            self._clients.open()

    def _make_cluster(self) -> cluster.Cluster:
        if self._dice.random() < 0.5:
            return cluster.Server(self._directory)
        return cluster.Directory(self._directory / "manifests")

    def _end(self) -> None:
        if self._running.is_alive:
            self._running.kill()

    def _start(self) -> None:
        self._running = program.Program(None, self._log, self._cluster.flag, *FLAGS)
        self._running.__enter__()

    def _wait_until_quiet(self, within_s: float) -> None:
        """Wait until the kernel equals the model; nothing foreign may have been touched."""
        wanted = kernel_state.wanted(self._world.objects.values())
        deadline_s = time.monotonic() + within_s
        looked_s = time.monotonic()
        while found := self._differences(wanted):
            if not self._running.is_alive:
                raise self._violation("the program has ended", found)
            looked_s, before_s = time.monotonic(), looked_s
            if before_s > deadline_s:  # when that look began: on a busy machine it may take long itself
                raise self._violation(f"the kernel differs from the model after {within_s:.0f} s", found)
        self._figures.quiet_points += 1

    def _differences(self, wanted: kernel_state.State) -> list[str]:
        found = kernel_state.differences(wanted, kernel_state.held())
        if foreign.read() != self._foreign:
            raise self._violation("something foreign was touched", [*self._foreign, "is now", *foreign.read()])
        return found or ([] if drift.is_jump_in_place() else ["a jump of ours in nat/OUTPUT stands behind somebody else's"])

    def _check_kernel(self, when: str) -> None:
        found = self._differences(kernel_state.wanted(self._world.objects.values()))
        if found:
            raise self._violation(f"the kernel differs from the model {when}", found)

    def _note(self, what: str) -> None:
        self.diary.append(f"{time.monotonic() - self._began_s:7.2f}  {what}")

    def _violation(self, what: str, details: list[str]) -> Violation:
        tail = self._running.log_tail(40)
        return Violation("\n".join([what, *(f"    {line}" for line in details[:20]), "  diary:", *self.diary, "  log:", tail]))
