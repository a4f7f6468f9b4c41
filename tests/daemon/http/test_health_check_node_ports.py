"""Covers health-check node ports: when they are open, which Service answers on them, and ports that another program uses.

Listeners are test doubles in virtual time, except in one test with real sockets.
"""

import asyncio
import contextlib
import json
from collections.abc import Callable, Mapping
from typing import Any
from unittest.mock import Mock

import pytest
import structlog.testing

from ipvsproxy.daemon.http import health_check_node_ports, paths, server
from ipvsproxy.daemon.http.health_check_node_ports import HealthChecks
from ipvsproxy.daemon.http.server import Answer
from ipvsproxy.model.kernel import HealthCheck, HealthCheckPort
from ipvsproxy.model.net import Address, Family, host_port
from ipvsproxy.model.service import Owner, ServiceName
from ipvsproxy.model.state import ServiceState
from ipvsproxy.model.steps import at_once
from ipvsproxy.reconcile.kinds.node_tables import NodeTables
from ipvsproxy.reconcile.virtual_servers.drain import Drains
from tests.support import builders, descriptors, http_client, loopback
from tests.support.following import running_task
from tests.support.summaries import Clock, state

EVERYWHERE = {Family.IPV4: builders.addresses("0.0.0.0"), Family.IPV6: builders.addresses("::")}
IPV4 = {Family.IPV4: EVERYWHERE[Family.IPV4]}
BOTH = (Family.IPV4, Family.IPV6)


class Ports:
    """The health checks of a node, and the listeners that are open."""

    def __init__(self, addresses: Mapping[Family, tuple[Address, ...]] = IPV4) -> None:
        self.answers: dict[str, Callable[[], Answer]] = {}
        self.log: list[str] = []
        self.opened: asyncio.Queue[str] = asyncio.Queue()
        self.taken: set[str] = set()
        self.is_healthy = True
        self.clock = Clock()
        self.checks = HealthChecks(is_healthy=lambda: self.is_healthy, open_listener=self._open, clock=self.clock)
        self.addresses = addresses
        self._tables = NodeTables(Drains())

    async def _open(self, address: Address, port: int, answer: Callable[[], Answer]) -> Any:
        async def close() -> None:
            del self.answers[where]
            self.log.append(f"close {where}")

        where = host_port(address, port)
        self.log.append(f"open {where}")
        if where in self.taken or where in self.answers:
            raise OSError(98, "Address already in use")
        self.answers[where] = answer
        self.opened.put_nowait(where)
        return Mock(close=close)

    def put(self, *states: ServiceState) -> None:
        for one in states:
            at_once(self._tables.putting(one.owner.service, one))
        self.checks.put(self._tables.health_checks.desired, self.addresses)

    def remove(self, name: str) -> None:
        at_once(self._tables.putting(ServiceName(builders.NAMESPACE, name), None))
        self.checks.put(self._tables.health_checks.desired, self.addresses)

    async def show(self, *states: ServiceState) -> float | None:
        """Set the states of Services, adjust the listeners, and return the seconds until the next attempt to open one."""
        self.put(*states)
        return await self.checks.adjust()

    async def withdraw(self, name: str) -> float | None:
        self.remove(name)
        return await self.checks.adjust()

    def ask(self, where: str) -> tuple[int, str, int]:
        """The HTTP status of the answer, and the Service's name and number of local endpoints in the body of the answer."""
        answer = self.answers[where]()
        document = json.loads(answer.body)
        return answer.status, document["service"]["name"], document["localEndpoints"]


async def test_one_listener_is_opened_for_each_health_check_port_in_each_family() -> None:
    ports = Ports(EVERYWHERE)
    assert await ports.show(state("web", ports={30001: 1}, families=BOTH), state("dns", ports={30002: 0})) is None
    assert ports.answers.keys() == {"0.0.0.0:30001", "[::]:30001", "0.0.0.0:30002", "[::]:30002"}
    assert ports.ask("0.0.0.0:30001") == (200, "web", 1)
    assert ports.ask("0.0.0.0:30002") == (503, "dns", 0)


async def test_a_single_family_service_answers_health_checks_on_node_addresses_of_both_families() -> None:
    ports = Ports(EVERYWHERE)
    await ports.show(state("web", ports={30001: 2}))
    assert ports.ask("[::]:30001") == ports.ask("0.0.0.0:30001") == (200, "web", 2)
    await ports.show(state("web", ports={30001: 1}, families=BOTH))
    assert ports.ask("[::]:30001") == (200, "web", 1)
    await ports.show(state("web", ports={30001: 3}, families=(Family.IPV6,)))
    assert ports.ask("[::]:30001") == ports.ask("0.0.0.0:30001") == (200, "web", 3)
    assert ports.log == ["open 0.0.0.0:30001", "open [::]:30001"], "no listener was restarted"
    answer = ports.answers["[::]:30001"]
    ports.remove("web")
    assert answer().status == 503
    await ports.checks.adjust()
    assert ports.answers == {}


async def test_a_listener_is_closed_only_if_its_port_is_changed_or_removed() -> None:
    ports = Ports()
    await ports.show(state("web", ports={30001: 1}), state("dns", ports={30003: 1}))
    ports.is_healthy = False
    assert ports.ask("0.0.0.0:30001") == (503, "web", 1)
    ports.is_healthy = True
    await ports.show(state("web", ports={30001: 0}))
    assert ports.ask("0.0.0.0:30001") == (503, "web", 0)
    assert ports.log == ["open 0.0.0.0:30001", "open 0.0.0.0:30003"]
    await ports.show(state("web", ports={30002: 1}))
    assert ports.log[2:] == ["close 0.0.0.0:30001", "open 0.0.0.0:30002"]
    ports.remove("web")
    await ports.show(state("dns"))
    assert ports.answers == {}


async def test_the_older_of_two_services_with_the_same_health_check_port_answers_until_its_deletion() -> None:
    ports = Ports()
    await ports.show(state("young", ports={30001: 2}, created_s=2), state("old", ports={30001: 1}, created_s=1))
    assert ports.ask("0.0.0.0:30001") == (200, "old", 1)
    await ports.withdraw("old")
    assert ports.ask("0.0.0.0:30001") == (200, "young", 2)
    assert ports.log == ["open 0.0.0.0:30001"]


async def test_listeners_are_opened_and_closed_as_the_node_gains_and_loses_addresses() -> None:
    ports = Ports()
    ports.addresses = {Family.IPV4: builders.addresses("192.168.0.10", "192.168.1.10"), Family.IPV6: ()}
    await ports.show(state(ports={30001: 1}, families=BOTH))
    assert ports.answers.keys() == {"192.168.0.10:30001", "192.168.1.10:30001"}
    ports.addresses = {Family.IPV4: builders.addresses("192.168.1.10", "192.168.2.10"), Family.IPV6: ()}
    await ports.show()
    assert ports.answers.keys() == {"192.168.1.10:30001", "192.168.2.10:30001"}
    assert ports.log[2:] == ["close 192.168.0.10:30001", "open 192.168.2.10:30001"]


async def test_a_port_in_use_is_tried_again_after_growing_pauses_and_does_not_delay_other_ports() -> None:
    ports = Ports()
    ports.taken.add("0.0.0.0:30001")
    ports.put(state("web", ports={30001: 1}), state("dns", ports={30002: 1}))
    with structlog.testing.capture_logs() as logs:
        first_s = await ports.checks.adjust()
        assert ports.answers.keys() == {"0.0.0.0:30002"}
        assert first_s is not None
        assert 0.5 <= first_s <= 1
        # A change of another Service does not shorten the pause before the next attempt.
        await ports.show(state("dns", ports={30002: 2}))
        assert ports.log.count("open 0.0.0.0:30001") == 1
        delays = [first_s]
        for _ in range(12):
            ports.clock.now += delays[-1]
            delay_s = await ports.checks.adjust()
            assert delay_s is not None
            delays.append(delay_s)
    assert 30 <= delays[-1] <= 60
    assert [line["error"] for line in logs if line["log_level"] == "error"] == ["Address already in use"]
    ports.taken.clear()
    ports.clock.now += delays[-1]
    assert await ports.checks.adjust() is None
    assert ports.ask("0.0.0.0:30001") == (200, "web", 1)
    ports.taken.add("0.0.0.0:30004")
    assert await ports.show(state("web", ports={30004: 1})) is not None
    assert await ports.withdraw("web") is None, "a port that is no longer desired is not tried again"


async def test_listeners_are_adjusted_after_changes_and_closed_at_the_end_of_the_process() -> None:
    ports = Ports()
    async with running_task(ports.checks.run()):
        for port in (30001, 30002):
            ports.put(state(ports={port: 1}))
            assert await ports.opened.get() == f"0.0.0.0:{port}"
            assert len(ports.answers) == 1
    assert ports.answers == {}


async def test_a_health_check_port_on_a_real_socket_answers_any_path_and_method() -> None:
    (port,) = loopback.free_ports(1)
    checks = HealthChecks(is_healthy=lambda: True)
    owner = Owner(builders.CREATED_S, ServiceName(builders.NAMESPACE, "web"))
    checks.put({HealthCheckPort(Family.IPV4, port): HealthCheck(owner, 3)}, {Family.IPV4: builders.addresses(loopback.HOST)})
    await checks.adjust()
    expected = health_check_node_ports.service_health(owner.service, 3, is_healthy=True)
    for path, method in (("/", "GET"), ("/healthz", "POST")):
        response = await http_client.ask(port, path, host=loopback.HOST, method=method)
        assert (response.status, response.body) == (200, expected.body)
        assert response.headers.items() >= expected.headers.items()
    await checks.close()


async def test_a_health_check_port_is_opened_later_if_the_ports_would_use_more_than_half_of_the_descriptors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server, "descriptors", lambda: 4)
    ports = Ports()
    ports.put(*(state(f"web-{number}", ports={30000 + number: 1}) for number in range(3)))
    with structlog.testing.capture_logs() as logs:
        delay_s = await ports.checks.adjust()
    assert len(ports.answers) == 2
    assert ports.checks.unopened == 1
    assert [line["event"] for line in logs] == ["health_check_port_not_opened"]
    assert "2 ports are open" in logs[0]["error"]
    ports.remove("web-0")
    assert delay_s is not None
    ports.clock.now += delay_s
    assert await ports.checks.adjust() is None
    assert ports.answers.keys() == {"0.0.0.0:30001", "0.0.0.0:30002"}
    assert ports.checks.unopened == 0


async def test_idle_connections_are_closed_first_if_all_health_check_ports_reach_their_shared_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A client with many connections to each port cannot keep probes out, and cannot cause a connection in use to be closed."""
    monkeypatch.setattr(health_check_node_ports, "CONNECTIONS", 8)
    open_listener = health_check_node_ports.opener()
    ports, (address,) = loopback.free_ports(3), builders.addresses(loopback.HOST)
    listeners = [await open_listener(address, port, lambda: paths.OK_PAGE) for port in ports]
    before = len(descriptors.opened())
    async with contextlib.AsyncExitStack() as held:
        asker, writer = await held.enter_async_context(http_client.connection(ports[0], loopback.HOST))
        for _ in range(10):
            for port in ports:
                await held.enter_async_context(http_client.connection(port, loopback.HOST))
            writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            assert (await http_client.read_answer(asker)).status == 200
        for port in ports:
            assert (await http_client.ask(port, "/", host=loopback.HOST)).status == 200
        assert len(descriptors.opened()) <= before + 31 + 8, "31 clients and 8 connections"
    for listener in listeners:
        await listener.close()
