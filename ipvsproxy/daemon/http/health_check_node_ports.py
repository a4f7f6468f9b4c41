"""The listeners of health-check node ports, and the answers that they give.

Rule 1: in each IP family, a port answers for the Service that owns the port in the table of desired objects. If the Service has
no addresses in one family, the port gives the answer of the other family.
Rule 2: a change of the answer needs no restart of a listener, because each request looks up the current answer.
Rule 3: if an address cannot be bound, the attempt is repeated after growing pauses, during which other addresses can be bound.
Rule 4: all listeners together use at most half of this process's file descriptors, and all of their connections together at most
a quarter. The remaining descriptors are for the kernel, started programs, the API server and the servers of this node.
"""

import asyncio
import dataclasses
import errno
import json
import random
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import NamedTuple

from ipvsproxy.config.settings import ListenAddress
from ipvsproxy.daemon.base import log as logs
from ipvsproxy.daemon.base.log import log
from ipvsproxy.daemon.base.timing import Backoff, comes_within
from ipvsproxy.daemon.http import server
from ipvsproxy.daemon.http.server import JSON, OK, TEXT, UNAVAILABLE, Answer, Listener
from ipvsproxy.model.kernel import HealthCheck, HealthCheckPort
from ipvsproxy.model.net import Address, Family
from ipvsproxy.model.service import ServiceName

NOT_DESIRED = Answer(UNAVAILABLE, b"", TEXT)
FIRST_DELAY_S = 1.0
LONGEST_DELAY_S = 60.0
CONNECTIONS = 256
"""The largest number of connections that all health-check node ports have together."""

Open = Callable[[Address, int, Callable[[], Answer]], Awaitable[Listener]]
"""A function that opens a listener on an address and port of one IP family. The listener answers each request with the result of
the given callable. The function raises OSError if the listener cannot be opened."""


def opener() -> Open:
    """Opens real listeners, all of which share one limit on the number of connections."""
    room = server.Room(max(1, min(CONNECTIONS, server.descriptors() // 4)))

    async def open_listener(address: Address, port: int, answer: Callable[[], Answer]) -> Listener:
        async def respond(_request: server.Request) -> Answer:
            return answer()

        return await server.listen(address, port, respond, one_family=True, room=room)

    return open_listener


class _Failure(NamedTuple):
    backoff: Backoff
    due_s: float
    reason: str


@dataclasses.dataclass(eq=False, kw_only=True)
class HealthChecks:
    """The health-check node ports of all Services. ``is_healthy`` returns whether the node is healthy.

    ``on_failure`` is called with the Service, its port that could not be opened, and the reason.
    """

    is_healthy: Callable[[], bool]
    open_listener: Open = dataclasses.field(default_factory=opener)
    on_failure: Callable[[ServiceName, int, str], None] | None = None
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._dice = random.Random()  # noqa: S311 - for random delays
        self._desired: Mapping[HealthCheckPort, HealthCheck] = {}
        self._addresses: Mapping[Family, tuple[Address, ...]] = {}
        self._open: dict[ListenAddress, Listener] = {}
        self._failures: dict[ListenAddress, _Failure] = {}
        self._changed = asyncio.Event()

    def put(self, checks: Mapping[HealthCheckPort, HealthCheck], addresses: Mapping[Family, tuple[Address, ...]]) -> None:
        """Set the desired health checks of all Services and, for each IP family, the addresses on which all ports listen.

        The caller may change the mapping ``checks``, and pass the same mapping again. The unspecified address means all addresses
        of its family.
        """
        self._desired, self._addresses = checks, addresses
        self._changed.set()

    @property
    def unopened(self) -> int:
        """The number of desired listeners that could not be opened."""
        return len(self._failures)

    async def run(self) -> None:
        """Open and close listeners until this task is cancelled. When the task is cancelled, all listeners are closed."""
        try:
            while True:
                self._changed.clear()
                retry_in_s = await self.adjust()
                await comes_within(retry_in_s, self._changed.wait())
        finally:
            await self.close()

    async def close(self) -> None:
        """Close all listeners."""
        while self._open:
            _, listener = self._open.popitem()
            await listener.close()

    async def adjust(self) -> float | None:
        """Open the desired listeners, and close all other listeners.

        Returns the seconds until the next attempt, or None if all listeners could be opened.
        """
        desired = {
            ListenAddress(address, port): None
            for port in dict.fromkeys(port for _, port in self._desired)
            for addresses in self._addresses.values()
            for address in addresses
        }
        for endpoint in self._open.keys() - desired.keys():
            await self._open.pop(endpoint).close()
            self._log_change("health_check_port_closed", endpoint)
        for endpoint in self._failures.keys() - desired.keys():
            del self._failures[endpoint]
        for endpoint in desired:
            if endpoint not in self._open:
                await self._try_to_open(endpoint)
        return min((max(0.0, failure.due_s - self.clock()) for failure in self._failures.values()), default=None)

    def _check_at(self, endpoint: ListenAddress) -> HealthCheck | None:
        """The health check that a listener answers: the check of its own IP family, or else the check of the other IP family.

        None means that the port is not desired.
        """
        own = endpoint.address.family
        checks = (self._desired.get(HealthCheckPort(family, endpoint.port)) for family in sorted(Family, key=own.__ne__))
        return next(filter(None, checks), None)

    async def _try_to_open(self, endpoint: ListenAddress) -> None:
        failure = self._failures.get(endpoint)
        if failure and self.clock() < failure.due_s:
            return
        try:
            await self._open_within_share(endpoint)
        except OSError as error:
            backoff = failure.backoff if failure else Backoff(first_s=FIRST_DELAY_S, longest_s=LONGEST_DELAY_S, dice=self._dice)
            delay_s = backoff.next_s()
            reason = error.strerror or str(error)
            self._failures[endpoint] = _Failure(backoff, self.clock() + delay_s, reason)
            if failure is None or failure.reason != reason:
                log.error("health_check_port_not_opened", address=str(endpoint), error=reason, retry_in_s=round(delay_s, 1))
            if self.on_failure and (check := self._check_at(endpoint)):
                self.on_failure(check.owner.service, endpoint.port, reason)
        else:
            self._failures.pop(endpoint, None)
            self._log_change("health_check_port_opened", endpoint)

    async def _open_within_share(self, endpoint: ListenAddress) -> None:
        if len(self._open) >= (most := server.descriptors() // 2):
            raise OSError(errno.EMFILE, f"{most} ports are open, which have half of this process's descriptors")
        self._open[endpoint] = await self.open_listener(*endpoint, lambda: self._answer(endpoint))

    def _log_change(self, event: str, endpoint: ListenAddress) -> None:
        if logs.shows(logs.CHANGES_VERBOSITY):
            log.info(event, address=str(endpoint))

    def _answer(self, endpoint: ListenAddress) -> Answer:
        check = self._check_at(endpoint)
        if check is None:  # the health check was removed a moment ago
            return NOT_DESIRED
        return service_health(check.owner.service, check.local_endpoints, is_healthy=self.is_healthy())


def service_health(service: ServiceName, local_endpoints: int, *, is_healthy: bool) -> Answer:
    """The answer of a ``healthCheckNodePort``: whether the node has endpoints of the Service, and whether the node is healthy."""
    document = {
        "service": {"namespace": service.namespace, "name": service.name},
        "localEndpoints": local_endpoints,
        "serviceProxyHealthy": is_healthy,
    }
    headers = {**JSON, "X-Load-Balancing-Endpoint-Weight": str(local_endpoints)}
    return Answer(OK if local_endpoints and is_healthy else UNAVAILABLE, json.dumps(document, indent="\t").encode(), headers)
