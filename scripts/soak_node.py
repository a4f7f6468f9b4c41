"""Runs the program with a cluster whose objects change all the time, and with clients.

Started by ``scripts/soak``. The exit status is 1 if a run or a take-over had a fault.
"""

import argparse
import itertools
import json
import random
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

from tests.chaos import cluster, instrumented, soak, take_overs, usage, world
from tests.chaos.clients import Clients
from tests.chaos.figures import Figures
from tests.support import api_store, golden_state, lab, program

BATCH_S = 0.1
FLAGS = (
    "--proxy-mode=ipvs",
    "--hostname-override=node-a",
    "--cluster-cidr=10.244.0.0/16,fd00:10:244::/56",
    "--conntrack-max-per-core=0",
)
WATCHES_CUT_S = 60.0
METRICS_PORT, HEALTHZ_PORT = 10249, 10256
METRICS = f"http://127.0.0.1:{METRICS_PORT}/metrics"
SETTLED_WITHIN_S = 60.0
TAKE_OVERS_AT_ONCE = 10
"""The number of take-overs in one round; the results of the clients are printed after each round."""
REQUESTS_S = 0.05
"""The time in seconds between two requests of a client."""


class Soak:
    """One run. ``wrong`` contains a sentence for each fault."""

    def __init__(self, node: lab.Lab, directory: Path, arguments: argparse.Namespace) -> None:
        self.wrong: list[str] = []
        self._arguments = arguments
        dice = random.Random(arguments.seed)  # noqa: S311 - the random numbers are seeded, and not used for secrets
        self._world = world.World(dice)
        self._churn = soak.Churn(dice, arguments.services, arguments.endpoints)
        self._figures = Figures()
        self._clients = Clients(node, self._figures)
        self._server = cluster.Server(directory)
        self._tasks = directory / instrumented.TASKS
        self._flags = (self._server.flag, *FLAGS)
        self._running = instrumented.program(directory, directory / "log", *self._flags)
        self._samples: list[usage.Usage] = []
        self._changes = 0
        self._began_s = 0.0

    def run(self) -> None:
        """Run the program, and print each sample of its resources."""
        self._server.apply([*self._world.objects.values(), *self._churn.objects()], ())
        try:
            with self._running:
                self._running.wait_until_synced()
                self._began_s = time.monotonic()
                with self._clients.asking(self._began_s) as unanswered:
                    self._live()
                    self._verify()
                    self._compare_ports()
                self._clients.close()
                self.wrong += unanswered
        finally:
            self._server.close()
        self.wrong += soak.growth(self._samples)
        print(json.dumps(self._summary()), flush=True)

    def _live(self) -> None:
        """Change objects, take samples and send requests until the time is over."""
        ends_s = self._began_s + self._arguments.minutes * 60
        sample_s = cut_s = self._began_s
        for number in itertools.count(1):
            now = time.monotonic()
            if now >= ends_s:
                return
            if now >= sample_s:
                sample_s += self._arguments.interval
                self._sample()
            if now >= cut_s:
                cut_s += WATCHES_CUT_S
                self._server.cut_and_forget(api_store.ENDPOINT_SLICES)
            due = round((now - self._began_s) * self._arguments.rate) - self._changes
            self._change(min(due, self._arguments.rate))
            time.sleep(max(0.0, self._began_s + number * BATCH_S - time.monotonic()))

    def _change(self, count: int) -> None:
        put: list[world.Object] = []
        for _ in range(count):
            added, gone = self._churn.change()
            put += added
            if gone:
                self._server.apply(put, gone)
                put = []
        self._server.apply(put, ())
        self._changes += count

    def _sample(self) -> None:
        what, put, gone = self._world.change()
        self._server.apply(put, gone)
        self.wrong += self._clients.ask_through_open()
        self._clients.open()
        with urllib.request.urlopen(METRICS, timeout=20) as answer:
            size = len(answer.read())
        sample = usage.read(self._running.process_id, self._tasks)
        self._samples.append(sample)
        line = {"seconds": round(time.monotonic() - self._began_s), "changes": self._changes, **sample._asdict()}
        print(json.dumps(line | {"metrics_bytes": size, "also": what}), flush=True)

    def _verify(self) -> None:
        """At the end the kernel must be in the desired state."""
        deadline_s = time.monotonic() + SETTLED_WITHIN_S
        while True:
            (verified,) = program.run_in_turn(["verify", *self._flags], within_s=SETTLED_WITHIN_S)
            if verified.status == 0:
                return
            if time.monotonic() > deadline_s:
                self.wrong.append(f"verify: status {verified.status}: {(verified.output + verified.error)[-2000:]}")
                return

    def _compare_ports(self) -> None:
        """At the end the program must listen on the Services' health-check ports and on its own ports, but on no other port."""
        observed = usage.listening_ports(self._running.process_id)
        expected = self._world.health_check_ports() | {METRICS_PORT, HEALTHZ_PORT}
        if observed != expected:
            self.wrong.append(f"it listens on the ports {sorted(observed)} instead of {sorted(expected)}")

    def _summary(self) -> dict[str, object]:
        first, last = self._samples[0], self._samples[-1]
        return {
            "minutes": self._arguments.minutes,
            "changes": self._changes,
            "first": first._asdict(),
            "last": last._asdict(),
            "most": {name: max(getattr(one, name) for one in self._samples) for name in first._fields},
            "requests": self._figures.probes,
            "unanswered": self._figures.lost,
            "through open connections": self._figures.asked,
            "wrong": self.wrong,
        }


def _take_over(node: lab.Lab, directory: Path, arguments: argparse.Namespace) -> int:
    """Take over from kube-proxy repeatedly, and print a line per round.

    Returns the number of unanswered requests plus the number of differences.
    """
    run = take_overs.TakeOvers(node, directory, interval_s=REQUESTS_S)
    remaining = arguments.take_overs
    while remaining:
        count = min(remaining, TAKE_OVERS_AT_ONCE)
        run.run(count)
        remaining -= count
        print(
            json.dumps({"take_overs": len(run.durations_s), "answered": run.answered, "unanswered": len(run.unanswered)}),
            flush=True,
        )
    for one in run.unanswered:
        print(json.dumps(one._asdict()), flush=True)
    wrong = run.differences()
    durations_s = sorted(run.durations_s)
    summary = {
        "take_overs": len(durations_s),
        "answered": run.answered,
        "unanswered": len(run.unanswered),
        "slowest_answer_s": round(run.slowest_s, 3),
        "median_s": round(durations_s[len(durations_s) // 2], 3),
        "longest_s": round(durations_s[-1], 3),
        "wrong": wrong,
    }
    print(json.dumps(summary), flush=True)
    return len(run.unanswered) + len(wrong)


def main() -> int:
    """Run the soak test in a separate network lab."""
    arguments = _parse()
    if arguments.take_overs:
        with tempfile.TemporaryDirectory() as name, lab.Lab() as node:
            return 1 if _take_over(node, Path(name), arguments) else 0
    with tempfile.TemporaryDirectory() as name, lab.Lab() as node:
        golden_state.clear_state()
        run = Soak(node, Path(name), arguments)
        run.run()
    return 1 if run.wrong else 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/soak", description="Change objects without a pause, and check that nothing grows."
    )
    parser.add_argument("--minutes", type=float, default=60, help="duration (default: %(default)s)")
    parser.add_argument("--services", type=int, default=1000, help="number of Services (default: %(default)s)")
    parser.add_argument("--endpoints", type=int, default=10, help="endpoints of each Service (default: %(default)s)")
    parser.add_argument("--rate", type=int, default=50, help="changes per second (default: %(default)s)")
    parser.add_argument("--interval", type=float, default=30, help="seconds between samples (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="determines the changes (default: %(default)s)")
    parser.add_argument(
        "--take-overs", type=int, default=0, metavar="N", help="instead: take over from kube-proxy N times, under traffic"
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
