"""Service addresses that translation refused, as complaints; each is told once, and again when it has changed."""

from collections.abc import Collection

from ipvsproxy.model.service import ObjectKind, Service, ServiceName, Skipped
from ipvsproxy.model.state import ServiceState
from ipvsproxy.store.objects import Complaint


class Refusals:
    """Remembers what was refused."""

    def __init__(self) -> None:
        self._refused: dict[ServiceName, tuple[Skipped, ...]] = {}
        self._complaints: list[Complaint] = []

    def note(self, name: ServiceName, service: Service | None, wanted: ServiceState | None) -> None:
        """A Service was translated; what is skipped of it beyond what could not be read was refused."""
        before = self._refused.pop(name, ())
        if service is None or wanted is None or service.not_served or len(wanted.rare.skipped) == len(service.skipped):
            return
        refused = wanted.rare.skipped[len(service.skipped) :]
        self._refused[name] = refused
        if refused != before:
            self._complaints.append(Complaint(ObjectKind.SERVICE, str(name), refused))

    def take(self) -> Collection[Complaint]:
        """The complaints since this was called last."""
        complaints, self._complaints = self._complaints, []
        return complaints
