"""Writes Kubernetes events (events.k8s.io/v1), which ``kubectl describe`` and ``kubectl get events`` show.

Rule 1: no part of the process waits until an event is written, or fails if an event cannot be written. An event that
cannot be written is dropped.
Rule 2: repetitions of an event are counted in one event object. Events have one rate limit for each object, and another rate
limit for the whole process.
Rule 3: if all nodes record the same event, its name is derived from its content, and each node waits for a random delay. The
first node creates the event. The API server rejects the event of every other node, because an event with this name already
exists.
"""

import asyncio
import dataclasses
import datetime as dt
import errno
import hashlib
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import NamedTuple

from ipvsproxy.daemon.base import timing
from ipvsproxy.daemon.base.log import log
from ipvsproxy.daemon.http.health import Status
from ipvsproxy.daemon.loop.summary import SyncSummary
from ipvsproxy.daemon.sources.source import ApiError, Post
from ipvsproxy.model.service import ObjectKind, ServiceName
from ipvsproxy.model.sets import SetEntries
from ipvsproxy.reconcile.tables.table import Conflict
from ipvsproxy.store.objects import Complaint, Store
from ipvsproxy.translate.services.refusal import WAYS_OUT

CONTROLLER = "kube-proxy"
"""The name of the controller in all events; operators and their tools know this name from kube-proxy. The name of the instance
also contains the name of the node."""
LONGEST_NOTE = 1024
"""The longest note of an event in bytes; the API server refuses longer notes (pkg/apis/core/validation in
kubernetes/kubernetes)."""
LONGEST_NAME = 253
BURST, REFILL_S = 25, 1.0
"""Rate limit of the process: ``BURST`` events at once, then one per ``REFILL_S``."""
OBJECT_BURST, OBJECT_REFILL_S = 5, 300.0
"""Rate limit for each API object: ``OBJECT_BURST`` events about the object at once, then one per ``OBJECT_REFILL_S`` seconds."""
MOST_OBJECTS = 1000
"""The largest number of objects whose rate limits are remembered, and the largest number of different events whose repetitions
are counted."""
MOST_PENDING = 500
SPREAD_S = 30.0
"""The longest random delay of an event that every node records."""
CONFLICT = "status 409"


class Regarding(NamedTuple):
    """The API object that an event is about. The namespace of a Node is empty; an empty ``uid`` means that the UID is unknown.

    For a Node, ``uid`` is the Node's name, as in events of kubelet and kube-proxy, because kubectl searches for the name.
    """

    kind: ObjectKind
    name: str
    namespace: str = ""
    uid: str = ""


class KubernetesEvent(NamedTuple):
    """One event. ``everywhere`` means that every node records the same event."""

    regarding: Regarding
    reason: str
    action: str
    note: str
    is_warning: bool = True
    everywhere: bool = False


@dataclasses.dataclass(eq=False, kw_only=True)
class Recorder:
    """Accepts events at any time, and writes them to the API server in the background.

    If ``post`` is None, all events are dropped. ``on_outcome`` is called with the outcome of each event, which is ``posted``,
    ``failed``, or ``dropped`` (by a rate limit).
    """

    node_name: str
    post: Post | None
    on_outcome: Callable[[str], None] = lambda _outcome: None
    clock: Callable[[], float] = time.monotonic
    wall_clock: Callable[[], float] = time.time
    dice: random.Random = dataclasses.field(default_factory=random.Random)

    def __post_init__(self) -> None:
        self._all = timing.Bucket(BURST, REFILL_S, self.clock())
        self._objects: timing.RateLimits[Regarding] = timing.RateLimits(OBJECT_BURST, OBJECT_REFILL_S, MOST_OBJECTS)
        self._repeats: Counter[KubernetesEvent] = Counter()
        """The number of repetitions of each event since the event was last written. The repetitions were dropped by a rate limit,
        or were recorded while the event waited."""
        self._pending: dict[KubernetesEvent, float] = {}
        """The time at which each waiting event is due."""
        self._wake = asyncio.Event()

    def record(self, event: KubernetesEvent) -> None:
        """Queue an event for writing."""
        if self.post is None:
            return
        event = event._replace(note=event.note.encode()[:LONGEST_NOTE].decode(errors="ignore"))
        if event in self._pending:
            self._repeats[event] += 1
            return
        now = self.clock()
        if len(self._pending) >= MOST_PENDING or not self._objects.take(event.regarding, now) or not self._all.take(now):
            if event in self._repeats or len(self._repeats) < MOST_OBJECTS:
                self._repeats[event] += 1
            self.on_outcome("dropped")
            return
        self._pending[event] = now + (self.dice.uniform(0, SPREAD_S) if event.everywhere else 0)
        self._wake.set()

    async def run(self) -> None:
        """Write events until this task is cancelled."""
        while True:
            self._wake.clear()
            due_s = min(self._pending.values(), default=None)
            if not await timing.comes_within(None if due_s is None else max(0.0, due_s - self.clock()), self._wake.wait()):
                await self.write_due()

    async def write_due(self) -> None:
        """Write all events whose time has come."""
        now = self.clock()
        for event in [event for event, due_s in self._pending.items() if due_s <= now]:
            del self._pending[event]
            await self._write(event, 1 + self._repeats.pop(event, 0))

    async def _write(self, event: KubernetesEvent, count: int) -> None:
        if self.post is None:
            return
        namespace = event.regarding.namespace or "default"
        try:
            await self.post(f"/apis/events.k8s.io/v1/namespaces/{namespace}/events", self._body(event, namespace, count))
        except ApiError as error:
            if not (event.everywhere and str(error).startswith(CONFLICT)):
                log.debug("event_not_written", reason=event.reason, error=str(error))
                self.on_outcome("failed")
                return
        self.on_outcome("posted")

    def _body(self, event: KubernetesEvent, namespace: str, count: int) -> Mapping[str, object]:
        regarding, now_s = event.regarding, self.wall_clock()
        if event.everywhere:
            mark = hashlib.sha256(f"{regarding.uid} {event.reason} {event.note}".encode()).hexdigest()[:16]
        else:
            mark = f"{round(now_s * 1e6):x}"
        return {
            "apiVersion": "events.k8s.io/v1",
            "kind": "Event",
            "metadata": {"name": f"{regarding.name[: LONGEST_NAME - len(mark) - 1]}.{mark}", "namespace": namespace},
            "eventTime": _render_time(now_s),
            **({"series": {"count": count, "lastObservedTime": _render_time(now_s)}} if count > 1 else {}),
            "reportingController": CONTROLLER,
            "reportingInstance": f"{CONTROLLER}-{self.node_name}"[:128],
            "action": event.action,
            "reason": event.reason,
            "regarding": {
                "apiVersion": "discovery.k8s.io/v1" if regarding.kind is ObjectKind.ENDPOINT_SLICE else "v1",
                "kind": regarding.kind.value,
                "name": regarding.name,
                **({"namespace": regarding.namespace} if regarding.namespace else {}),
                **({"uid": regarding.uid} if regarding.uid else {}),
            },
            "note": event.note,
            "type": "Warning" if event.is_warning else "Normal",
        }


def _render_time(epoch_s: float) -> str:
    """The time as a MicroTime of the API, which always has six digits after the decimal point."""
    return f"{dt.datetime.fromtimestamp(epoch_s, dt.UTC):%Y-%m-%dT%H:%M:%S.%fZ}"


SET_FULL = (4352, errno.ENOSPC)
"""The error numbers for a full set: IPSET_ERR_HASH_FULL, and ENOSPC if the kernel has no memory for the set."""
NODE_HIDDEN = "NodeAddressHidden"
STARTING = "StartKubeProxy"
"""The action that kube-proxy writes in all of its events about the Node."""


class Announcer:
    """Receives the results of syncs from the event loop, and records events about the results."""

    def __init__(self, recorder: Recorder, store: Store, status: Status) -> None:
        self._node = Regarding(ObjectKind.NODE, recorder.node_name, uid=recorder.node_name)
        self._recorder = recorder
        self._store = store
        self._status = status
        self._announced: Mapping[str, str] = {}
        self._hiding: dict[ServiceName, str] = {}

    def start(self) -> None:
        """Record the start of this process."""
        self._recorder.record(KubernetesEvent(self._node, "Starting", STARTING, "", is_warning=False))
        self._announce_notices()

    def synced(self, summary: SyncSummary) -> None:
        """Called when a sync has ended."""
        self._find_hidden_nodes(summary)
        self._announce_notices()
        for complaint in summary.changes.complaints:
            self._announce_complaint(complaint)
        for conflict in summary.conflicts:
            self._announce_conflict(conflict)
        for port in summary.without_scope:
            note = f"port {port.port} {port.protocol.name}: no packet mark is left, so it is served as by kube-proxy"
            regarding = self._regard(port.service)
            self._recorder.record(KubernetesEvent(regarding, "TrafficScopeNotServed", "Sync", note, everywhere=True))
        full = {
            outcome.operation.item.set: outcome.error
            for outcome in summary.report.errors
            if isinstance(outcome.operation.item, SetEntries) and outcome.errno in SET_FULL
        }
        for name, error in full.items():
            self._recorder.record(KubernetesEvent(self._node, "SetFull", "Sync", f"{name}: {error}"))

    def port_failed(self, service: ServiceName, port: int, reason: str) -> None:
        """Record that the health-check port of a Service could not be opened."""
        note = f'node {self._node.name} failed to start healthcheck "{service}" on port {port}: {reason}'
        self._recorder.record(KubernetesEvent(self._regard(service), "FailedToStartServiceHealthcheck", "Listen", note))

    def _announce_notices(self) -> None:
        for reason, message in self._status.notices.items():
            if self._announced.get(reason) != message:
                self._recorder.record(KubernetesEvent(self._node, reason, STARTING, message))
        self._announced = dict(self._status.notices)

    def _find_hidden_nodes(self, summary: SyncSummary) -> None:
        """Warn about the Services whose addresses make other nodes unreachable.

        Each node treats a Service's address as its own address, so no node can reach another node that has the same address.
        """
        others = summary.view.other_nodes
        for name in summary.changes.services if others or self._hiding else ():
            state = summary.states.get(name)
            named = (
                sorted(f"{one} of {others[one]}" for one in (*state.addresses, *state.routes) if one in others) if state else []
            )
            hidden = ", ".join(named)
            if hidden and self._hiding.get(name) != hidden:
                note = f"{hidden}: external or load-balancer IPs that are addresses of nodes make these unreachable; {WAYS_OUT}"
                self._recorder.record(KubernetesEvent(self._regard(name), NODE_HIDDEN, "Sync", note, everywhere=True))
                log.warning("node_address_hidden", service=str(name), addresses=named, hint=WAYS_OUT)
            self._hiding.pop(name, None)
            if hidden:
                self._hiding[name] = hidden
        told = [f"{name} has {hidden}" for name, hidden in sorted(self._hiding.items())[:5]]
        message = f"nodes are unreachable from this one, because their addresses are those of Services: {'; '.join(told)}"
        self._status.note(NODE_HIDDEN, message if told else "")

    def _announce_complaint(self, complaint: Complaint) -> None:
        namespace, slash, name = complaint.name.rpartition("/")
        if complaint.kind is ObjectKind.SERVICE:
            regarding = self._regard(ServiceName(namespace, name))
        else:
            regarding = Regarding(complaint.kind, name, namespace)
        reasons = [str(skipped) for skipped in complaint.skipped if skipped.invalid]
        if reasons and (slash or complaint.kind is ObjectKind.NODE):
            note = f"not used: {'; '.join(reasons)}"
            self._recorder.record(KubernetesEvent(regarding, "InvalidObject", "Read", note, everywhere=True))

    def _announce_conflict(self, conflict: Conflict) -> None:
        for owner, reason in zip(conflict.waiting, conflict.reasons, strict=True):
            note = f"{conflict.key}: {conflict.winner} {reason}; this Service has to wait for it"
            event = KubernetesEvent(self._regard(owner.service), "AddressConflict", "Sync", note, everywhere=True)
            self._recorder.record(event)

    def _regard(self, service: ServiceName) -> Regarding:
        known = self._store.services.get(service)
        return Regarding(ObjectKind.SERVICE, service.name, service.namespace, known.uid if known else "")
