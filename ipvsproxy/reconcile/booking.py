"""What the kernel was made to hold, on its way into the tables: all operations of one plan that were done."""

from collections.abc import Callable, Mapping

from ipvsproxy.model.kernel import (
    BoundAddresses,
    FlowCleaning,
    ObservedVirtualServer,
    RealServers,
    SetEntries,
    Sysctl,
    Timeouts,
    VirtualServer,
    VirtualServerKey,
)
from ipvsproxy.model.plan import Operation, Verb
from ipvsproxy.model.real_servers import EvenWeights, RealServerKey
from ipvsproxy.model.rules import Skeleton
from ipvsproxy.reconcile.claims import Claims
from ipvsproxy.reconcile.drain import Drains


class Booking:
    """Books one operation after the other; virtual servers are compared with what is wanted when all of them are booked."""

    def __init__(self, claims: Claims, drains: Drains, now: float, may_wait: Callable[[VirtualServerKey], int]) -> None:
        """``may_wait`` is how many real servers of a virtual server may drain and not be looked at."""
        self._claims = claims
        self._drains = drains
        self._now = now
        self._may_wait = may_wait
        self._changed: dict[VirtualServerKey, dict[RealServerKey, int] | None] = {}
        """The virtual servers to compare, with their weights as an object that nobody else has, as soon as there is one."""
        self.gone_with = 0
        """How many real servers went with their virtual server."""

    def book(self, operation: Operation) -> None:
        """The kernel has done this."""
        verb, item = operation
        claims = self._claims
        match item:
            case RealServers():
                self._real_servers(verb, item)
            case VirtualServer():
                self._virtual_server(verb, item)
            case SetEntries() | BoundAddresses():
                table = claims.table(item)
                if verb is Verb.REMOVE:
                    for key in item.keys:
                        table.confirm(key, None)
                else:
                    table.confirm_all(item.keys, True)
            case Sysctl() | Timeouts() | Skeleton() | FlowCleaning():
                claims.table(item).confirm(item.key, item.in_force)
            case _:
                claims.table(item).confirm(item.key, True if verb is not Verb.REMOVE else None)

    def close(self) -> None:
        """All operations of the plan have been booked."""
        table = self._claims.virtual_servers
        for key in self._changed:
            wanted, seen = table.desired.get(key), table.observed.get(key)
            if (
                wanted is not None
                and seen is not None
                and seen.real_servers is not wanted.weights
                and seen.real_servers == wanted.weights
            ):
                seen = ObservedVirtualServer(seen.settings, wanted.weights, seen.flags_known)
            table.confirm(key, seen)

    def _virtual_server(self, verb: Verb, item: VirtualServer) -> None:
        table = self._claims.virtual_servers
        seen = table.observed.get(item.key)
        if verb is Verb.REMOVE:
            self.gone_with += len(seen.real_servers) if seen else 0
            self._drains.end_all(item.key)
            table.confirm(item.key, None)
        else:
            table.exchange(item.key, ObservedVirtualServer(item.settings, seen.real_servers if seen else {}))
            self._changed.setdefault(item.key, None)

    def _real_servers(self, verb: Verb, item: RealServers) -> None:
        """Where these are all that are wanted, and all that are there, one object stands for both."""
        table, key, keys = self._claims.virtual_servers, item.virtual_server, item.keys
        wanted, seen = table.desired.get(key), table.observed.get(key)
        if seen is None:
            return
        if wanted is not None and not seen.real_servers and keys == wanted.weights:
            self._changed[key] = None
            table.exchange(key, ObservedVirtualServer(seen.settings, wanted.weights, seen.flags_known))
            return
        weights = self._weights_to_change(key, seen)
        if verb is Verb.REMOVE:
            for real_server in keys:
                weights.pop(real_server, None)
        else:
            weights.update(dict.fromkeys(keys, item.weight))
        if verb is Verb.SET and item.weight == 0:
            may_wait = self._may_wait(key)
            for real_server in keys:
                self._drains.begin(key, real_server, self._now, may_wait=may_wait)
        elif self._drains:
            for real_server in keys:
                self._drains.end(key, real_server)

    def _weights_to_change(self, key: VirtualServerKey, seen: ObservedVirtualServer) -> dict[RealServerKey, int]:
        """The weights that are believed to be there, as an object that nobody else has."""
        weights = self._changed.get(key)
        if weights is None:
            # What was observed stays as it is: who reads the kernel shows it again where nothing has changed.
            weights = self._changed[key] = _changeable(seen.real_servers)
            self._claims.virtual_servers.exchange(key, ObservedVirtualServer(seen.settings, weights, seen.flags_known))
        return weights


def _changeable(weights: Mapping[RealServerKey, int]) -> dict[RealServerKey, int]:
    return weights.unpacked() if isinstance(weights, EvenWeights) else dict(weights)
