"""What has happened on the node: the last events, bounded."""

import collections
import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ipvsproxy.daemon.loop.summary import SyncSummary
from ipvsproxy.model.plan import KINDS, Outcome

EVENTS = 500
SERVICES_NAMED = 5
"""The most Services that an event names."""
LONGEST_TEXT = 500
"""The most characters of a sentence: an error may quote names of objects."""
_KINDS = {kind.name: kind for kind in KINDS.values()}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Happening:
    """One event. ``number`` counts from 1; ``at_s`` is in seconds since the epoch.

    ``latency_s`` is the time from the arrival of the oldest change to the end of the sync.
    """

    number: int
    at_s: float
    kind: str
    text: str
    services: tuple[str, ...] = ()
    service_count: int = 0
    operations: Mapping[str, int] = dataclasses.field(default_factory=dict)
    duration_s: float | None = None
    latency_s: float | None = None


class EventLog:
    """The last events."""

    def __init__(self) -> None:
        self._events: collections.deque[Happening] = collections.deque(maxlen=EVENTS)
        self._failing: frozenset[str] = frozenset()
        self._states: dict[tuple[str, str], str] = {}

    @property
    def last(self) -> int:
        """The number of the newest event; 0 without any."""
        return self._events[-1].number if self._events else 0

    def since(self, number: int) -> Iterator[Happening]:
        """The events after this one, the newest first."""
        return itertools.takewhile(lambda event: event.number > number, reversed(self._events))

    def synced(self, summary: SyncSummary, at_s: float) -> None:
        """A sync has ended."""
        report, names = summary.report, summary.changes.services
        if summary.drifted:
            left = f"{report.pending} object{'s are' if report.pending != 1 else ' is'} still to be repaired"
            verdict = left if report.pending else "repaired"
            self._add("drift", at_s, f"{_list(summary.drifted)} changed by another program; {verdict}")
        failures = frozenset(map(_failure, report.errors))
        for text in sorted(failures - self._failing):
            self._add("failure", at_s, text)
        self._failing = failures if report.failed or report.pending else frozenset()
        if names or report.done or report.failed:
            self._add(
                "sync",
                at_s,
                _sentence(summary),
                services=tuple(map(str, itertools.islice(names, SERVICES_NAMED))),
                service_count=len(names),
                operations={f"{verb} {kind}": count for (verb, kind), count in report.done.items()},
                duration_s=summary.duration_s,
                latency_s=summary.waited_s + summary.duration_s if names else None,
            )

    def note(self, kind: str, subject: str, state: str, at_s: float) -> None:
        """Note the state of something, in words. It is an event when it differs from the last one; the first one is not."""
        before = self._states.get((kind, subject))
        self._states[kind, subject] = state
        if before is not None and before != state:
            self._add(kind, at_s, f"{subject}: {state}")

    def _add(self, kind: str, at_s: float, text: str, **more: Any) -> None:
        self._events.append(Happening(number=self.last + 1, at_s=at_s, kind=kind, text=text[:LONGEST_TEXT], **more))


def describe(event: Happening) -> dict[str, Any]:
    """An event as a document."""
    return {
        "id": event.number,
        "at": event.at_s,
        "kind": event.kind,
        "text": event.text,
        "services": event.services,
        "serviceCount": event.service_count,
        "operations": event.operations,
        "durationSeconds": event.duration_s,
        "latencySeconds": event.latency_s,
    }


def _failure(outcome: Outcome) -> str:
    """What failed and why. Some errors name their operation themselves."""
    operation = str(outcome.operation)
    return outcome.error if outcome.error.startswith(operation) else f"{operation}: {outcome.error}"


def _sentence(summary: SyncSummary) -> str:
    report, count = summary.report, len(summary.changes.services)
    parts: list[str] = []
    if count:
        parts.append(f"{count} Service{'s' if count != 1 else ''} changed")
    by_verb: dict[str, dict[str, int]] = {}
    for (verb, kind), number in report.done.items():
        by_verb.setdefault(verb, {})[kind] = number
    parts += [f"{_DONE[verb]} {_list(kinds)}" for verb, kinds in sorted(by_verb.items())]
    if report.failed:
        failed = sum(report.failed.values())
        parts.append(f"{failed} operation{'s' if failed != 1 else ''} failed")
    if report.pending:
        parts.append(f"{report.pending} object{'s wait' if report.pending != 1 else ' waits'}")
    return "; ".join(parts)


_DONE = {"add": "added", "set": "set", "remove": "removed"}


def _list(kinds: Mapping[str, int]) -> str:
    """``2 real servers, 1 virtual server``."""
    return ", ".join(_count(number, kind) for kind, number in sorted(kinds.items()))


def _count(number: int, kind: str) -> str:
    words = _KINDS.get(kind)
    several: Sequence[str] = (words.one, words.several) if words else (kind, kind)
    return f"{number} {several[number != 1]}"
