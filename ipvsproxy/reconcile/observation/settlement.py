"""From the successful operations of one plan to the tables."""

from collections.abc import Callable, Mapping

from ipvsproxy.model.kernel import BoundAddresses, FlowCleaning, LocalRoutes, Sysctl, Timeouts
from ipvsproxy.model.plan import Operation, Verb
from ipvsproxy.model.real_servers import NO_THRESHOLDS, EvenWeights, RealServerKey, UnevenWeights
from ipvsproxy.model.rules import Skeleton
from ipvsproxy.model.sets import SetEntries
from ipvsproxy.model.virtual_servers import ObservedVirtualServer, RealServers, VirtualServer, VirtualServerKey
from ipvsproxy.reconcile.tables.node import Tables
from ipvsproxy.reconcile.virtual_servers.drain import Drains


class Settlement:
    """Settles one operation after the other. Virtual servers are compared with desired state after the last one."""

    def __init__(self, tables: Tables, drains: Drains, now: float, may_wait: Callable[[VirtualServerKey], int]) -> None:
        """``may_wait`` is the number of real servers of a virtual server that may drain with unread connections."""
        self._tables = tables
        self._drains = drains
        self._now = now
        self._may_wait = may_wait
        self._changed: dict[VirtualServerKey, dict[RealServerKey, int] | None] = {}
        """The virtual servers to compare, with weights of their own once a weight has changed."""
        self.gone_with = 0
        """The number of real servers that were removed with their virtual server."""

    def settle(self, operation: Operation) -> None:
        """Settle an operation that the kernel has done."""
        verb, item = operation
        tables = self._tables
        match item:
            case RealServers():
                self._real_servers(verb, item)
            case VirtualServer():
                self._virtual_server(verb, item)
            case SetEntries() | BoundAddresses() | LocalRoutes():
                table = tables.table(item)
                for key in item.keys:
                    table.confirm(key, True if verb is not Verb.REMOVE else None)
            case Sysctl() | Timeouts() | Skeleton() | FlowCleaning():
                tables.table(item).confirm(item.key, item.in_force)
            case _:
                tables.table(item).confirm(item.key, True if verb is not Verb.REMOVE else None)

    def close(self) -> None:
        """Finish, after the last operation of the plan."""
        table = self._tables.virtual_servers
        for key in self._changed:
            desired, observed = table.desired.get(key), table.observed.get(key)
            if (
                desired is not None
                and observed is not None
                and observed.real_servers is not desired.weights
                and observed.real_servers == desired.weights
            ):
                observed = observed.has(desired.weights)
            table.confirm(key, observed)

    def _virtual_server(self, verb: Verb, item: VirtualServer) -> None:
        table = self._tables.virtual_servers
        observed = table.observed.get(item.key)
        if verb is Verb.REMOVE:
            self.gone_with += len(observed.real_servers) if observed else 0
            self._drains.end_all(item.key)
            table.confirm(item.key, None)
        else:
            real_servers = observed.real_servers if observed else {}
            thresholds = observed.thresholds if observed else None
            table.exchange(item.key, ObservedVirtualServer(item.settings, real_servers, thresholds=thresholds))
            self._changed.setdefault(item.key, None)

    def _real_servers(self, verb: Verb, item: RealServers) -> None:
        """Settle real servers. If they are all desired and all observed ones, both sides share one object."""
        table, key, keys = self._tables.virtual_servers, item.virtual_server, item.keys
        desired, observed = table.desired.get(key), table.observed.get(key)
        if observed is None:
            return
        if desired is not None and not observed.real_servers and keys == desired.weights:
            self._changed[key] = None
            table.exchange(key, observed.has(desired.weights))
            return
        weights = self._weights_to_change(key, observed)
        if item.thresholds != NO_THRESHOLDS or observed.thresholds:
            self._thresholds(verb, item)
        if verb is Verb.REMOVE:
            for real_server in keys:
                weights.pop(real_server, None)
        else:
            weights.update(dict.fromkeys(keys, item.weight))
        if verb is Verb.SET and item.drains:
            may_wait = self._may_wait(key)
            for real_server in keys:
                self._drains.begin(key, real_server, self._now, may_wait=may_wait)
        elif self._drains:
            for real_server in keys:
                self._drains.end(key, real_server)

    def _thresholds(self, verb: Verb, item: RealServers) -> None:
        """Settle the thresholds of real servers, into an object that is not shared."""
        table, key = self._tables.virtual_servers, item.virtual_server
        observed = table.observed[key]
        thresholds = {one: value for one, value in (observed.thresholds or {}).items() if one not in item.keys}
        if verb is not Verb.REMOVE and item.thresholds != NO_THRESHOLDS:
            thresholds |= dict.fromkeys(item.keys, item.thresholds)
        changed = ObservedVirtualServer(observed.settings, observed.real_servers, thresholds or None)
        table.exchange(key, changed)

    def _weights_to_change(self, key: VirtualServerKey, observed: ObservedVirtualServer) -> dict[RealServerKey, int]:
        """The observed weights, as an object that is not shared."""
        weights = self._changed.get(key)
        if weights is None:
            # The observed object does not change: the next reading may show it again.
            weights = self._changed[key] = _changeable(observed.real_servers)
            self._tables.virtual_servers.exchange(key, observed.has(weights))
        return weights


def _changeable(weights: Mapping[RealServerKey, int]) -> dict[RealServerKey, int]:
    return weights.unpacked() if isinstance(weights, EvenWeights | UnevenWeights) else dict(weights)
