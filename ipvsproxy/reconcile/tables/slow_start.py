"""Slow start: the weight of a new endpoint rises from 1 to its full weight, like ``slowstart`` of HAProxy.

Rule 1: an endpoint counts as new if the kernel's virtual server lacks the endpoint, but has another real server that gets
connections. If no other real server could take the endpoint's share, the endpoint gets its full weight at once.
Rule 2: the weight rises in at most ``STEPS`` steps of equal duration. Each step is one edit of the endpoint.
Rule 3: a new process continues from the weights that it finds in the kernel. The new process assumes that an endpoint with less
than its full weight is in slow start. If the kernel already has an endpoint, the slow start of this endpoint never begins again.
"""

import math
from collections.abc import Callable, Generator, Iterator, Mapping

from ipvsproxy.model.real_servers import RealServerKey, UnevenWeights
from ipvsproxy.model.service import ServiceName
from ipvsproxy.model.state import ServiceState
from ipvsproxy.model.steps import ITEMS_AT_ONCE
from ipvsproxy.model.virtual_servers import ObservedVirtualServer, VirtualServer, VirtualServerKey
from ipvsproxy.reconcile.tables.table import Table

STEPS = 8
"""The largest number of steps from weight 1 to an endpoint's own weight."""


def weight_at(elapsed_s: float, own: int, duration_s: float) -> int:
    """The weight of an endpoint whose slow start began ``elapsed_s`` seconds ago.

    The weight is 1 at the beginning, and is the endpoint's full weight ``own`` after ``duration_s``.
    """
    steps = _steps(own)
    done = min(steps, int(elapsed_s * steps / duration_s))
    return 1 + (own - 1) * done // steps


def next_step_s(elapsed_s: float, own: int, duration_s: float) -> float:
    """The time of the next step, in seconds since the beginning of the slow start."""
    steps = _steps(own)
    return (int(elapsed_s * steps / duration_s) + 1) * duration_s / steps


def elapsed_at(weight: int, own: int, duration_s: float) -> float:
    """The shortest time after which an endpoint has at least the given weight; this weight is between 1 and the full weight."""
    steps = _steps(own)
    done = next(number for number in range(steps + 1) if 1 + (own - 1) * number // steps >= weight)
    return done * duration_s / steps


def _steps(own: int) -> int:
    return max(1, min(STEPS, own - 1))


class SlowStarts:
    """The Services with slow start, each with its desired state, in which endpoints have their full weights.

    ``putting`` is the function that writes the desired state of a Service into the tables.
    """

    def __init__(
        self,
        virtual_servers: Table[VirtualServerKey, VirtualServer, ObservedVirtualServer],
        putting: Callable[[ServiceName, ServiceState], Generator[None, None, None]],
    ) -> None:
        self._virtual_servers = virtual_servers
        self._putting = putting
        self._states: dict[ServiceName, ServiceState] = {}
        self._fresh: dict[ServiceName, bool] = {}
        """The Services to compute again; the value is true if this process had no earlier state of the Service."""
        self._began_s: dict[ServiceName, dict[VirtualServerKey, Mapping[RealServerKey, float]]] = {}
        self._due_s: dict[ServiceName, float] = {}

    def note(self, name: ServiceName, state: ServiceState | None, *, is_known: bool) -> None:
        """Record the desired state of a Service.

        ``is_known`` means that this process already had a desired state of this Service.
        """
        if state is not None and state.rare.slow_start_s:
            self._states[name] = state
            self._fresh.setdefault(name, not is_known)
        elif self._states.pop(name, None) is not None:
            for table in (self._fresh, self._due_s, self._began_s):
                table.pop(name, None)

    def tending(self, now: float, *, afresh: bool = False) -> Generator[None, None, None]:
        """Gives the next weight to each endpoint whose next step is due; yields so that other tasks can run.

        ``afresh`` discards the start times of all slow starts, so that the weights become the same as after a restart of the
        process.
        """
        if afresh:
            self._began_s.clear()
            self._fresh = dict.fromkeys(self._states, True)
        if not (self._fresh or self._due_s):
            return
        due = [name for name, due_s in self._due_s.items() if due_s <= now]
        for name in dict.fromkeys((*self._fresh, *due)):
            yield from self._reweighing(name, now)

    def next_s(self) -> float | None:
        """The time of the next step; None if no endpoint is in slow start."""
        return min(self._due_s.values(), default=None)

    def _reweighing(self, name: ServiceName, now: float) -> Iterator[None]:
        state = self._states[name]
        is_fresh = self._fresh.pop(name, False)
        known, duration_s = self._began_s.pop(name, {}), state.rare.slow_start_s
        began_s: dict[VirtualServerKey, Mapping[RealServerKey, float]] = {}
        served: list[VirtualServer] = []
        due_s = math.inf
        for number, item in enumerate(state.served, 1):
            climbing = self._climbing(item, known.get(item.key, {}), duration_s, now, is_fresh=is_fresh)
            for key, since_s in climbing.items():
                due_s = min(due_s, since_s + next_step_s(now - since_s, item.weights[key], duration_s))
            if climbing:
                began_s[item.key] = climbing
            served.append(_lowered(item, climbing, duration_s, now))
            if number % ITEMS_AT_ONCE == 0:
                yield
        self._due_s.pop(name, None)
        if began_s:
            self._began_s[name] = began_s
            self._due_s[name] = due_s
        yield from self._putting(name, state.with_objects(tuple(served), state.entries))

    def _climbing(
        self, item: VirtualServer, known: Mapping[RealServerKey, float], duration_s: float, now: float, *, is_fresh: bool
    ) -> Mapping[RealServerKey, float]:
        """The endpoints of a virtual server that are in slow start now, each with the time when its slow start began.

        ``known`` has the endpoints that were in slow start at the previous call, each with the time when its slow start began.
        """
        observed = self._virtual_servers.observed.get(item.key)
        weights = observed.real_servers if observed else {}
        began_s: dict[RealServerKey, float] = {}
        for key, own in item.weights.items():
            if own <= 1:
                continue
            weight = weights.get(key)
            if key in known:
                since_s = known[key]
            elif weight is None or weight <= 0:
                if not any(share > 0 for share in weights.values()):
                    continue
                since_s = now
            elif is_fresh and weight < own:
                since_s = now - elapsed_at(weight, own, duration_s)
            else:
                continue
            if now - since_s < duration_s:
                began_s[key] = since_s
        return began_s


def _lowered(item: VirtualServer, began_s: Mapping[RealServerKey, float], duration_s: float, now: float) -> VirtualServer:
    """The virtual server with the weights that its endpoints in slow start have at a given moment."""
    if not began_s:
        return item
    weights: dict[bytes, int] = {
        key: weight_at(now - began_s[key], own, duration_s) if key in began_s else own for key, own in item.weights.items()
    }
    return item.with_weights(UnevenWeights(weights))
