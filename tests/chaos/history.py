"""Runs one history, which is a series of random steps. After each step, the kernel must have the state that the model expects.

The seed determines the steps; the times of the steps, and the state of the program at a kill, depend on the machine.
"""

import concurrent.futures
import contextlib
import itertools
import os
import random
import signal
import time
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import assert_never

from ipvsproxy.model.rules import Backend
from ipvsproxy.translate.translation_settings import Binding
from tests.chaos import (
    bad_moments,
    cluster,
    drift,
    foreign,
    harm,
    instrumented,
    kernel_state,
    moments,
    nft_drift,
    plan,
    usage,
)
from tests.chaos.clients import Clients
from tests.chaos.configuration import Configuration
from tests.chaos.faults import Faults, Order
from tests.chaos.figures import Figures
from tests.chaos.log_reader import LogReader
from tests.chaos.moments import Moment
from tests.chaos.world import Object, World, key_of
from tests.support import golden_state, lab, nft_state, patience, program

QUIET_WITHIN_S = patience.seconds(150.0)
"""The longest wait until everything is in force. The wait is long, because the kernel may be slow. The program may have to start
again during this time."""
HEALED_WITHIN_S = patience.seconds(60.0)
"""The longest wait until drift is repaired. On a node, a repair takes five seconds. On the test kernel, each reading of the
kernel takes a hundred times as long, and the suite reads the kernel too."""
VERIFIED_WITHIN_S = 300.0
SETTLE_S = 0.5
"""The wait before the suite's first reading of the kernel. After this wait, the slow reading rarely has to be repeated."""
POLL_S = 0.2
"""The pause between two checks of a condition."""
INJECTED_WITHIN_S = patience.seconds(60.0)
"""The longest wait, in seconds, until the ordered fault makes a message of the program fail. The program sends such a message
after a change, or at its next poll of the kernel."""
PATIENT = b"drift_returns"
"""The log event which says that the program delays the repair of drift."""
SYNCED = b"event=synced"
HARMFUL = {"drift", "harm"}
"""The kinds of steps in which requests may be lost."""
LIVES = itertools.count()
"""Numbers of processes."""


class Violation(Exception):  # noqa: N818 - not an error of the suite
    """Raised when the program broke a rule; the message is the report."""


class History:
    """One history; ``diary`` has the events so far, with the time of each in seconds since the start of the history."""

    def __init__(
        self,
        drawn: plan.Plan,
        seed: str,
        node: lab.Lab,
        directory: Path,
        figures: Figures,
        *,
        quick: bool = False,
        without: Moment | None = None,
        backend: Backend = Backend.IPTABLES,
        direct_return: bool = False,
    ) -> None:
        """``backend`` is the backend that has the rules and sets at the beginning.

        With ``quick``, ``verify`` runs only at the end of the history.

        ``direct_return`` says whether direct return is on; if it is on, Services and Nodes choose direct return by annotations.
        If ``without`` is given, the program runs without the fix for this bad moment.
        """
        self.diary: list[str] = []
        self._steps = list(drawn.steps)
        self._drifts = iter(drawn.drifts)
        self._harms = iter(drawn.harms)
        self._kinds = iter(drawn.faults)
        self._troubles = iter(drawn.troubles)
        self._moments = iter(drawn.moments)
        self._without = without
        self._first_backend = backend
        self._expressions = nft_state.Expressions()
        self._has_server = drawn.has_server
        self._dice = random.Random(seed)
        self._binding = random.Random(f"{seed}:binding").choice(list(Binding))
        self.faults = Faults(directory)
        self.figures = figures
        self._is_quick = quick
        self._directory = directory
        self.log = directory / "log"
        self.log_reader: LogReader | None = None
        self.native_rules = moments.NativeRules(directory)
        self._direct_return = direct_return
        self._world = World(self._dice, direct_return=direct_return)
        self.clients = Clients(node, figures)
        self.cluster: cluster.Cluster
        self._running: program.Program
        self._began_s = time.monotonic()

    def run(self) -> None:
        """Run all steps.

        Raises:
            Violation: the program broke a rule.
        """
        with contextlib.ExitStack() as cleaning:
            golden_state.clear_state()
            cleaning.callback(golden_state.clear_state)
            foreign.add()
            cleaning.callback(foreign.remove)
            self._foreign = foreign.read()
            self.cluster = self._make_cluster()
            cleaning.callback(self.cluster.close)
            self.configuration = Configuration(
                self._directory, self.cluster.flag, self._binding, self._first_backend, direct_return=self._direct_return
            )
            self.note(f"Service addresses are local by {self._binding}{', direct return is on' if self._direct_return else ''}")
            self.cluster.apply(self._world.objects.values(), ())
            self._start()
            cleaning.callback(self._end)
            self.wait_until_quiet(QUIET_WITHIN_S)
            self.clients.open()
            cleaning.callback(self.clients.close)
            while self._steps:
                self._live_calmly()
                self._live_with_drift()
            if self._is_quick:
                self._verify()
            self._running.__exit__()
            self._check_kernel("after the end")

    def _live_calmly(self) -> None:
        """Run all steps up to the next harmful step while clients send requests; no request may be lost."""
        if self._steps[0] in HARMFUL:
            return
        acts = {
            "change": self.change,
            "kill": self._kill,
            "trouble": self._trouble,
            "lock": self._lock,
            "fault": self._fault,
            "moment": self._moment,
            "move": self._move,
        }
        with self.clients.asking(self._began_s) as unanswered:
            while self._steps and self._steps[0] not in HARMFUL:
                acts[self._steps.pop(0)]()
                self.wait_until_quiet(QUIET_WITHIN_S)
                broken = self.clients.ask_through_open()
                if broken:
                    self.figures.broken += len(broken)
                    raise self.violation("an open connection", broken)
                self.clients.open()
        if unanswered:
            raise self.violation("unanswered requests", unanswered)

    def change(self) -> None:
        """Change the cluster, one to four times."""
        for _ in range(self._dice.randint(1, 4)):
            what, put, gone = self._world.change()
            self.note(what)
            self.cluster.apply(put, gone)
            self.figures.changes += 1
            time.sleep(self._dice.choice([0, 0, 0.05, 0.3]))

    def put(self, items: Iterable[Object]) -> None:
        """Add or replace objects."""
        added = list(items)
        self._world.put(added)
        self.cluster.apply(added, ())

    def delete(self, items: Iterable[Object]) -> None:
        """Delete objects."""
        keys = [key_of(item) for item in items]
        for key in keys:
            del self._world.objects[key]
        self.cluster.apply((), keys)

    def _kill(self) -> None:
        """Kill the program during changes, once or several times, possibly while it starts."""
        for _ in range(self._dice.choice([1, 1, 2, 3])):
            self.change()
            time.sleep(self._dice.uniform(0, 1.5))
            self.note("kill")
            self._running.kill()
            self.figures.kills += 1
            if self._dice.random() < 0.5:
                self.change()
            self._start()

    def _trouble(self) -> None:
        kind = next(self._troubles)
        self.note(f"trouble: {kind.value}")
        self.cluster.trouble(kind, self._dice)
        self.figures.troubles[kind.value] += 1
        self.change()

    def _fault(self) -> None:
        """Make a single netlink request fail, or a small or large share of the requests."""
        order = Order(next(self._kinds), self._dice.choice([0.1, 0.6]), once=self._dice.random() < 0.4)
        self.note(f"netlink fails: {order.kind.value}, {'once' if order.once else f'share {order.share}'}")
        before = self.faults.injected()
        self.faults.order(order)
        self.change()
        deadline_s = time.monotonic() + INJECTED_WITHIN_S
        while self.faults.injected() == before and time.monotonic() < deadline_s:
            time.sleep(0.1)
        self.change()
        self.faults.end()
        injected = self.faults.injected() - before
        self.figures.injected += injected
        self.note(f"netlink has failed: {injected.total()} times")

    def _lock(self) -> None:
        """Hold the xtables lock while objects change, and for up to 7 s after that."""
        self.note("the xtables lock is held")
        self.figures.locks += 1
        with moments.held_lock():
            self.change()
            time.sleep(self._dice.uniform(0, 7))
        self.note("the xtables lock is free")

    def _moment(self) -> None:
        """Run the next bad moment, before the usual checks."""
        kind = next(self._moments)
        self.note(f"moment: {kind.value}")
        self.figures.moments[kind.value] += 1
        bad_moments.ACTS[kind](self)

    def _move(self) -> None:
        """Move rules and sets to the other backend during changes: by one start, by several starts, or with a kill halfway."""
        way = self._dice.choice(["once", "there and back", "killed"])
        backends = [kernel_state.OTHER_BACKEND[self.configuration.backend]]
        backends = [*backends, self.configuration.backend, *backends] if way == "there and back" else backends
        self.figures.moves += 1
        for backend in backends:
            self.note(f"{way}:")
            self.restart(backend)
            time.sleep(self._dice.choice([0, 0.3, 1.0, 3.0]))
        self.change()
        if way == "killed":
            time.sleep(self._dice.uniform(0, 1.5))
            self.restart()
            self.figures.kills += 1

    def restart(self, backend: Backend | None = None, *, descriptors: int = 0) -> None:
        """Kill the program, change the cluster, and start the program with this backend and this limit of descriptors."""
        self.note(f"kill, start with {backend or 'the same backend'}{f' and {descriptors} descriptors' if descriptors else ''}")
        self._running.kill()
        if backend:
            self.configuration.move(backend)
        self.change()
        self._start(descriptors)

    def stop_and_start(self) -> None:
        """Send SIGTERM, wait until the program has ended, and start the program again."""
        self.note("SIGTERM, start")
        self._running.__exit__()
        self._start()

    def stall_log(self) -> None:
        """Fill the log's pipe and let no process read it until the next start."""
        assert self.log_reader
        self.log_reader.stall(self._running.process_id)

    def wait_until(self, reached: Callable[[], bool], what: str, within_s: float) -> None:
        """Wait until a condition holds; it is a violation if this takes longer than ``within_s``."""
        deadline_s = time.monotonic() + within_s
        while not reached():
            if not self._running.is_alive:
                raise self.violation("the program has ended", [f"not reached: {what}"])
            if time.monotonic() > deadline_s:
                raise self.violation(f"not within {within_s:.0f} s: {what}", [])
            time.sleep(POLL_S)

    def desired(self) -> kernel_state.State:
        """The desired state of the kernel."""
        chosen = self.configuration
        return kernel_state.desired(
            self._world.objects.values(),
            chosen.scheduler,
            chosen.binding,
            chosen.backend,
            direct_return=chosen.direct_return,
        )

    def _live_with_drift(self) -> None:
        """Run all drift steps that come before the next step of another kind. Clients may lose requests during these steps."""
        while self._steps and self._steps[0] in HARMFUL:
            if self._steps.pop(0) == "drift":
                self._drift(next(self._drifts))
            else:
                self._harm(*next(self._harms))
            self.wait_until_quiet(HEALED_WITHIN_S)
            self.figures.broken_by_drift += len(self.clients.ask_through_open())
            self.clients.open()

    def _drift(self, spoil: drift.Drift) -> None:
        desired = self.desired()
        logged = self.log.stat().st_size
        name = self._spoil(spoil)
        began_s = time.monotonic()
        with concurrent.futures.ThreadPoolExecutor(1) as asker:
            asker.submit(self.clients.ask_once)
            self._wait_until_healed(drift.SPOILED[spoil], desired)
            healed_s = time.monotonic() - began_s
        was_patient = PATIENT in self.log.read_bytes()[logged:]
        self.note(f"healed after {healed_s:.1f} s{', with patience' if was_patient else ''}")
        (self.figures.patient_heals_s if was_patient else self.figures.heals_s).append((healed_s, name))

    def _spoil(self, spoil: drift.Drift) -> str:
        """Cause this drift in the kernel; return the name of the drift."""
        state = golden_state.read_state(drift.SPOILED[spoil], self.configuration.backend)
        act = nft_drift.TWINS.get(spoil, spoil) if self._uses_nftables else spoil
        self.note(f"drift {act.__name__}: {act(state, self._dice)}")
        return act.__name__

    def _harm(self, when: harm.When, spoil: drift.Drift) -> None:
        """Cause this drift in the kernel at this moment; ``wait_until_quiet`` must be called afterwards."""
        self.note(f"harm {when.value}")
        self.figures.harms[f"{spoil.__name__} {when.value}"] += 1
        match when:
            case harm.When.STOPPED:
                os.kill(self._running.process_id, signal.SIGSTOP)
                self._spoil(spoil)
                time.sleep(harm.STOPPED_S)
                os.kill(self._running.process_id, signal.SIGCONT)
            case harm.When.FIRST_IPV6:
                items = self._world.ipv6_objects()
                self.delete(items)
                self.wait_until_quiet(QUIET_WITHIN_S)
                self._running.kill()
                self._start()  # this process has never observed an IPv6 object
                self.wait_until_quiet(QUIET_WITHIN_S)
                self._spoil(spoil)
                self.put(items)
            case harm.When.LAST_IPV6:
                items = self._world.ipv6_objects()
                self._spoil(spoil)
                self.delete(items)
                self.wait_until_quiet(HEALED_WITHIN_S)
                self.put(items)
            case never:
                assert_never(never)

    def _wait_until_healed(self, sections: Collection[str], desired: kernel_state.State) -> None:
        deadline_s = time.monotonic() + HEALED_WITHIN_S
        while True:
            began_s = time.monotonic()
            differences = kernel_state.differences(desired, kernel_state.observed(sections, self.configuration.backend))
            is_right = not differences and ("iptables" not in sections or not self._misplaced())
            self.figures.readings_s.append(time.monotonic() - began_s)
            if is_right:
                return
            if began_s > deadline_s:
                raise self.violation(f"drift was not healed within {HEALED_WITHIN_S:.0f} s", differences)
            time.sleep(POLL_S)

    def _make_cluster(self) -> cluster.Cluster:
        if self._has_server:
            return cluster.Server(self._directory)
        return cluster.Directory(self._directory / "manifests")

    def _end(self) -> None:
        if self._running.is_alive:
            self._running.kill()

    def _start(self, descriptors: int = 0) -> None:
        if self.log_reader:
            self.log_reader.finish()
        self._logged_before = self.log.stat().st_size if self.log.exists() else 0
        self.log_reader = LogReader(self.log)
        self._running = instrumented.program(
            self._directory,
            self.log,
            *self.configuration.flags,
            path=str(self.native_rules.path),
            without=self._without,
            descriptors=descriptors,
            output=self.log_reader.descriptor,
            forks=self._is_quick,
        )
        self._running.__enter__()
        self._life = next(LIVES)

    def wait_until_quiet(self, within_s: float) -> None:
        """Wait until the kernel equals the model; objects of other programs must be unchanged."""
        desired = self.desired()
        deadline_s = time.monotonic() + within_s
        # A start would be slower if the kernel were read at the same time.
        self._running.wait_until(lambda: SYNCED in self.log.read_bytes()[self._logged_before :], "synced", within_s)
        time.sleep(SETTLE_S)
        began_s = time.monotonic()
        while differences := self._differences(desired):
            if not self._running.is_alive:
                raise self.violation("the program has ended", differences)
            began_s, before_s = time.monotonic(), began_s
            if before_s > deadline_s:  # the deadline is for the start of the read, because a read may take long on a busy machine
                raise self.violation(f"the kernel differs from the model after {within_s:.0f} s", differences)
            time.sleep(POLL_S)
        self.figures.quiet_points += 1
        if not self._is_quick:
            self._verify()
        self.figures.used[self._life].append(usage.read(self._running.process_id, self._directory / instrumented.TASKS))

    def _verify(self) -> None:
        """``ipvsproxy verify`` must find no difference."""
        (verified,) = program.run_in_turn(["verify", *self.configuration.flags], within_s=VERIFIED_WITHIN_S)
        if verified.status != 0:
            raise self.violation(f"verify ends with status {verified.status}", (verified.output + verified.error).splitlines())
        self.figures.verified += 1

    def _differences(self, desired: kernel_state.State) -> list[str]:
        differences = kernel_state.differences(desired, kernel_state.observed(backend=self.configuration.backend))
        if not differences and foreign.read() != self._foreign:
            raise self.violation("foreign objects were touched", [*self._foreign, "is now", *foreign.read()])
        return differences or self._misplaced()

    @property
    def _uses_nftables(self) -> bool:
        return self.configuration.backend is Backend.NFTABLES

    def _misplaced(self) -> list[str]:
        """The differences from the desired state that cannot be seen in the text of the rules, one line each."""
        if self._uses_nftables:
            return self._expressions.changed(nft_state.listing())
        return [] if drift.is_jump_in_place() else ["a jump of ours in nat/OUTPUT is behind a foreign one"]

    def _check_kernel(self, when: str) -> None:
        differences = self._differences(self.desired())
        if differences:
            raise self.violation(f"the kernel differs from the model {when}", differences)

    def note(self, what: str) -> None:
        """Write an event to the diary."""
        self.diary.append(f"{time.monotonic() - self._began_s:7.2f}  {what}")

    def violation(self, what: str, details: list[str]) -> Violation:
        """Make the exception for a violation."""
        tail = self._running.log_tail(40)
        return Violation("\n".join([what, *(f"    {line}" for line in details[:20]), "  diary:", *self.diary, "  log:", tail]))
