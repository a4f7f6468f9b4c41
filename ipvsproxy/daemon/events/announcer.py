"""Makes Kubernetes events from the syncs and notices of this node."""

import errno
from collections.abc import Collection

from ipvsproxy.daemon.events.recorder import KubernetesEvent, Recorder, Regarding, of_node, of_service
from ipvsproxy.daemon.http.health import Notice, Status
from ipvsproxy.daemon.loop.summary import SyncSummary
from ipvsproxy.model.service import ObjectKind, ServiceName
from ipvsproxy.model.sets import SetEntries
from ipvsproxy.reconcile.tables.table import Conflict
from ipvsproxy.store.objects import Complaint, Store

SET_FULL = (4352, errno.ENOSPC)
"""IPSET_ERR_HASH_FULL, and the error of a set without memory."""
STARTING = "StartKubeProxy"
"""The action in all of kube-proxy's events about its Node."""


class Announcer:
    """Follows the syncs of the loop, and records events about them."""

    def __init__(self, *, node_name: str, recorder: Recorder, store: Store, status: Status) -> None:
        self._node = of_node(node_name)
        self._node_name = node_name
        self._recorder = recorder
        self._store = store
        self._status = status
        self._announced: Collection[Notice] = ()

    def start(self) -> None:
        """Record the start of this process."""
        self._recorder.record(KubernetesEvent(self._node, "Starting", STARTING, "", is_warning=False))
        self._announce_notices()

    def synced(self, summary: SyncSummary) -> None:
        """A sync has ended."""
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
        note = f'node {self._node_name} failed to start healthcheck "{service}" on port {port}: {reason}'
        self._recorder.record(KubernetesEvent(self._regard(service), "FailedToStartServiceHealthcheck", "Listen", note))

    def _announce_notices(self) -> None:
        for notice in self._status.notices:
            if notice not in self._announced:
                self._recorder.record(KubernetesEvent(self._node, notice.reason, STARTING, notice.message))
        self._announced = tuple(self._status.notices)

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
        return of_service(service, known.uid if known else "")
