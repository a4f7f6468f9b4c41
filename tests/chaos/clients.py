"""Clients that run without a pause: they repeat requests, and keep connections open."""

import contextlib
from collections.abc import Iterator

from tests.chaos.figures import Figures
from tests.chaos.world import HELD, QUESTIONS, Question
from tests.support import lab

INTERVAL_S = 0.2


class Clients:
    """Sends requests and counts the results. Failed requests and broken connections are reported as sentences."""

    def __init__(self, node: lab.Lab, figures: Figures) -> None:
        self._node = node
        self._figures = figures
        self._held: dict[Question, lab.Connection] = {}

    @contextlib.contextmanager
    def asking(self, began_s: float) -> Iterator[list[str]]:
        """Repeat all requests while the ``with`` block runs.

        After the block, the yielded list has a sentence for each kind of request that was not always answered. The times of the
        results are measured from ``began_s``.
        """
        report: list[str] = []
        with contextlib.ExitStack() as loads:
            results = {question: loads.enter_context(self._node.load(*question, interval_s=INTERVAL_S)) for question in QUESTIONS}
            yield report
        for question, (load,) in results.items():
            self._figures.probes += sum(load.outcomes.values())
            self._figures.lost += load.failed
            self._figures.slowest_answer_s = max(self._figures.slowest_answer_s, load.slowest_s)
            if load.failed:
                when = ", ".join(f"{outcome} at {at_s - began_s:.2f}" for at_s, outcome in load.failures)
                report.append(f"{question}: {dict(load.outcomes)}: {when}")

    def ask_once(self) -> None:
        """Send each request once, at a time when requests may be lost."""
        results = self._node.probe_all(lab.Probe(*question, timeout_s=0.5) for question in QUESTIONS)
        self._figures.lost_to_drift += sum(one.outcome != "ok" for one in results)

    def is_answered(self, question: Question) -> bool:
        """Send one more request; return whether the request was answered."""
        return self._node.probe(*question).outcome == "ok"

    def open_one(self, question: Question, source: str) -> lab.Connection:
        """Open one more connection from this source address."""
        return self._node.open(*question, src=source)

    def open(self) -> None:
        """Open a connection to each target in ``HELD`` that has no open connection."""
        for question in HELD:
            if question not in self._held:
                self._held[question] = self._node.open(*question)

    def ask_through_open(self) -> list[str]:
        """Send a request through each open connection; close broken connections, and return their names."""
        report = []
        for question, connection in list(self._held.items()):
            self._figures.asked += 1
            try:
                backend = connection.ask(5.0)
            except lab.LabError as error:
                del self._held[question]
                connection.abort()
                report.append(f"the connection {question} through {connection.backend} is broken: {error}")
            else:
                if backend != connection.backend:
                    report.append(f"the connection {question} through {connection.backend} is answered by {backend}")
        return report

    def close(self) -> None:
        """Close all connections."""
        for connection in self._held.values():
            connection.abort()
        self._held.clear()
