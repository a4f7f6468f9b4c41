"""Complaints about Service addresses that translation refused: each once, and again after a change."""

from collections.abc import Collection

from ipvsproxy.model.service import ObjectKind, Service, ServiceName, Skipped
from ipvsproxy.model.state import ServiceState
from ipvsproxy.store.objects import Complaint


class Refusals:
    """Remembers the refused parts of each Service."""

    def __init__(self) -> None:
        self._refused: dict[ServiceName, tuple[Skipped, ...]] = {}
        self._complaints: list[Complaint] = []

    def note(self, name: ServiceName, service: Service | None, desired: ServiceState | None) -> None:
        """Take note of a translated Service: parts skipped by translation, and not by parsing, were refused."""
        before = self._refused.pop(name, ())
        if service is None or desired is None or service.not_served or len(desired.rare.skipped) == len(service.skipped):
            return
        refused = desired.rare.skipped[len(service.skipped) :]
        self._refused[name] = refused
        if refused != before:
            self._complaints.append(Complaint(ObjectKind.SERVICE, str(name), refused))

    def take(self) -> Collection[Complaint]:
        """The complaints since the last call."""
        complaints, self._complaints = self._complaints, []
        return complaints
