"""Health-check ports: which are wanted, where they listen, and who answers there.

Rule 1: a port of a family answers for one Service; of several that want it the oldest has it. In a family that the Service has no
addresses of, the port answers as in the other one: load balancers ask a node at whatever address they know.
Rule 2: a listener is opened and closed, never restarted: what it answers is looked up at each request.
Rule 3: an address that can not be bound is tried again, with growing patience, and troubles nobody else.
"""

import asyncio
import contextlib
import random
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import NamedTuple, Protocol

import structlog

from ipvsproxy.daemon.base import log as logs
from ipvsproxy.daemon.base.backoff import Backoff
from ipvsproxy.daemon.http import answers, server
from ipvsproxy.daemon.http.answers import Answer
from ipvsproxy.model.kernel import Owner
from ipvsproxy.model.net import Address, Family, host_port
from ipvsproxy.model.service import ServiceName
from ipvsproxy.model.state import ServiceState
from ipvsproxy.reconcile.table import Table

NOT_WANTED = Answer(answers.UNAVAILABLE, b"", answers.TEXT)
FIRST_DELAY_S = 1.0
LONGEST_DELAY_S = 60.0

log: structlog.typing.FilteringBoundLogger = structlog.get_logger()


class HealthCheckPort(NamedTuple):
    """A port of a family."""

    family: Family
    port: int


class HealthCheck(NamedTuple):
    """Who wants a port, and how many endpoints it has on this node."""

    owner: Owner
    local_endpoints: int


class Endpoint(NamedTuple):
    """Where a listener is bound."""

    address: Address
    port: int

    def __str__(self) -> str:
        return host_port(self.address, self.port)


class Listener(Protocol):
    """An open listener."""

    async def close(self) -> None:
        """Close it, and its connections."""


Open = Callable[[Address, int, Callable[[], Answer]], Awaitable[Listener]]
"""Opens a listener on an address and port of one family that gives this answer; raises OSError."""


async def open_listener(address: Address, port: int, answer: Callable[[], Answer]) -> Listener:
    """Listen on an address and port of one family, with one answer for any request; raises OSError."""

    async def respond(_request: server.Request) -> Answer:
        return answer()

    return await server.listen(address, port, respond, one_family=True)


class _Failure(NamedTuple):
    backoff: Backoff
    due_s: float


class HealthChecks:
    """The health-check ports of all Services. ``is_healthy`` tells whether this node can be relied upon at all."""

    def __init__(
        self,
        *,
        is_healthy: Callable[[], bool],
        open_listener: Open = open_listener,
        on_failure: Callable[[ServiceName, int, str], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``on_failure`` is told which Service's port could not be opened, and why."""
        self._is_healthy = is_healthy
        self._open_listener = open_listener
        self._on_failure = on_failure
        self._clock = clock
        self._dice = random.Random()  # noqa: S311  # no secret
        self._states: dict[ServiceName, ServiceState] = {}
        self._wanted: Table[HealthCheckPort, HealthCheck, bool] = Table(
            lambda check: check.owner, lambda _wanted, _seen: False, lambda _: False
        )
        self._addresses: Mapping[Family, tuple[Address, ...]] = {}
        self._open: dict[Endpoint, Listener] = {}
        self._failures: dict[Endpoint, _Failure] = {}
        self._changed = asyncio.Event()

    def put(self, names: Iterable[ServiceName], states: Mapping[ServiceName, ServiceState]) -> None:
        """What these Services want now; those that have no state are gone."""
        for name in names:
            state = states.get(name)
            before = self._states.pop(name, None)
            if state and state.rare.local_endpoints:
                self._states[name] = state
            if before and (state is None or before.owner != state.owner):
                self._wanted.claim(before.owner, _checks(before), {})
                before = None
            if state:
                self._wanted.claim(state.owner, _checks(before) if before else {}, _checks(state))
        self._changed.set()

    def listen_on(self, addresses: Mapping[Family, tuple[Address, ...]]) -> None:
        """The addresses of this node on which all ports listen, by family; the unspecified address stands for all of a family."""
        if addresses != self._addresses:
            self._addresses = addresses
            self._changed.set()

    async def run(self) -> None:
        """Open and close listeners for ever; all are closed in the end."""
        try:
            while True:
                self._changed.clear()
                retry_in_s = await self.adjust()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(retry_in_s):
                        await self._changed.wait()
        finally:
            await self.close()

    async def close(self) -> None:
        """Close all listeners."""
        while self._open:
            _, listener = self._open.popitem()
            await listener.close()

    async def adjust(self) -> float | None:
        """Open what is wanted and close what is not; returns after how many seconds to try again what failed, if anything."""
        wanted = {
            Endpoint(address, port): self._answering(HealthCheckPort(family, port))
            for port in dict.fromkeys(port for _, port in self._wanted.desired)
            for family, addresses in self._addresses.items()
            for address in addresses
        }
        for endpoint in self._open.keys() - wanted.keys():
            await self._open.pop(endpoint).close()
            self._tell("health check port closed", endpoint)
        for endpoint in self._failures.keys() - wanted.keys():
            del self._failures[endpoint]
        for endpoint, port in wanted.items():
            if endpoint not in self._open:
                await self._try_to_open(endpoint, port)
        return min((max(0.0, failure.due_s - self._clock()) for failure in self._failures.values()), default=None)

    def _answering(self, port: HealthCheckPort) -> HealthCheckPort:
        """The port whose Service answers there: that of the other family where this one has none."""
        if port in self._wanted.desired:
            return port
        return next(other for other in self._wanted.desired if other.port == port.port)

    async def _try_to_open(self, endpoint: Endpoint, port: HealthCheckPort) -> None:
        failure = self._failures.get(endpoint)
        if failure and self._clock() < failure.due_s:
            return
        try:
            own = HealthCheckPort(endpoint.address.family, endpoint.port)
            self._open[endpoint] = await self._open_listener(endpoint.address, endpoint.port, lambda: self._answer(own))
        except OSError as error:
            backoff = failure.backoff if failure else Backoff(first_s=FIRST_DELAY_S, longest_s=LONGEST_DELAY_S, dice=self._dice)
            delay_s = backoff.next_s()
            self._failures[endpoint] = _Failure(backoff, self._clock() + delay_s)
            reason = error.strerror or str(error)
            log.error("health check port can not be opened", address=str(endpoint), error=reason, retry_in_s=round(delay_s, 1))
            if self._on_failure:
                self._on_failure(self._wanted.desired[port].owner.service, port.port, reason)
        else:
            self._failures.pop(endpoint, None)
            self._tell("health check port opened", endpoint)

    def _tell(self, what: str, endpoint: Endpoint) -> None:
        if logs.tells(logs.CHANGES_VERBOSITY):
            log.info(what, address=str(endpoint))

    def _answer(self, port: HealthCheckPort) -> Answer:
        try:
            check = self._wanted.desired[self._answering(port)]
        except StopIteration:  # It was given up a moment ago.
            return NOT_WANTED
        return answers.service_health(check.owner.service, check.local_endpoints, is_healthy=self._is_healthy())


def _checks(state: ServiceState) -> Mapping[HealthCheckPort, HealthCheck]:
    return {
        HealthCheckPort(listener.family, listener.port): HealthCheck(state.owner, count)
        for listener, count in state.rare.local_endpoints.items()
    }
