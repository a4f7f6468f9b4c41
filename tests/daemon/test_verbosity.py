"""Covers the log lines at each verbosity (``-v``) that a Service causes between the source and the kernel."""

from collections.abc import Iterator, MutableMapping
from typing import Any

import pytest
from structlog.testing import capture_logs

from ipvsproxy.daemon.base import log
from ipvsproxy.daemon.loop import journal
from ipvsproxy.model.kernel import BoundAddresses
from ipvsproxy.model.plan import Operation, Outcome, Verb
from ipvsproxy.model.service import Event, Gone, Listed, ObjectKind, Rejected, ServiceName
from tests.daemon.http.test_health_check_node_ports import Ports
from tests.support import builders
from tests.support.memory_node import MemoryNode, put
from tests.support.summaries import state
from tests.support.virtual_time import in_virtual_time

Lines = list[MutableMapping[str, Any]]
ADDRESS = BoundAddresses.of(builders.addresses("10.96.0.10")[0])


@pytest.fixture(autouse=True)
def quiet_again() -> Iterator[None]:
    """Restore the verbosity, which the whole process shares."""
    before = log.verbosity()
    yield
    log._Process.verbosity = before


def _without_level(lines: Lines) -> Lines:
    return [{key: value for key, value in line.items() if key != "log_level"} for line in lines]


@in_virtual_time
async def test_at_verbosity_4_a_service_can_be_followed_from_the_watch_to_the_sync() -> None:
    log._Process.verbosity = 4
    async with MemoryNode().serving() as node:
        events: list[Event] = [put(builders.service("web")), put(builders.endpoint_slice(builders.endpoint("10.244.0.5")))]
        with capture_logs() as lines:
            journal.log_received(events)
            node.deliver(events)
            await node.quiet()
    logged = [(line["event"], line.get("name") or line.get("service") or line.get("operation")) for line in lines]
    assert logged == [
        ("received", "default/web"),
        ("received", "default/web-1"),
        ("translated", "default/web"),
        *(("operation", str(operation)) for operation in node.kernel.applied[-len(logged) + 4 :]),
        ("synced", None),
    ]
    assert ("operation", "add virtual_server TCP 10.96.0.10:80") in logged
    (translated,) = (line for line in lines if line["event"] == "translated")
    assert translated["virtual_servers"] == ["TCP 10.96.0.10:80(1)"]


@pytest.mark.parametrize("level", [0, 2, 3])
@in_virtual_time
async def test_below_verbosity_4_a_change_is_logged_as_one_line(level: int) -> None:
    log._Process.verbosity = level
    node = MemoryNode()
    async with node.running():
        first, second = builders.endpoint("10.244.0.5"), builders.endpoint("10.244.0.6")
        node.begin_with(builders.node(), builders.service("web"), builders.endpoint_slice(first))
        await node.quiet()
        with capture_logs() as lines:
            node.put(builders.endpoint_slice(first, second))
            await node.quiet()
    assert [line["event"] for line in lines] == ["synced"]


def test_every_kind_of_change_event_is_logged() -> None:
    log._Process.verbosity = 4
    key = ServiceName("default", "web")
    with capture_logs() as lines:
        journal.log_received(
            [
                Gone(ObjectKind.SERVICE, key),
                Listed(ObjectKind.SERVICE, frozenset({key})),
                Rejected(ObjectKind.SERVICE, key, "", "no JSON"),
            ]
        )
        journal.log_desired(builders.service("web").name, None)
    assert _without_level(lines) == [
        {"event": "received", "change": "deleted", "kind": "Service", "name": "default/web"},
        {"event": "received", "change": "listed", "kind": "Service", "objects": 1},
        {"event": "received", "change": "rejected", "kind": "Service", "name": "default/web", "reason": "no JSON"},
        {"event": "translated", "service": "default/web", "wants": "nothing"},
    ]


@pytest.mark.parametrize(("level", "expected"), [(0, []), (2, ["remove address 10.96.0.10"]), (4, ["add", "remove", "failed"])])
def test_from_verbosity_2_on_removed_addresses_are_logged(level: int, expected: list[str]) -> None:
    log._Process.verbosity = level
    done, failed = Outcome(Operation(Verb.REMOVE, ADDRESS)), Outcome(Operation(Verb.REMOVE, ADDRESS), "busy", 16)
    with capture_logs() as lines:
        journal.log_outcomes([Outcome(Operation(Verb.ADD, ADDRESS)), done, failed])
    if level < 4:
        assert [line["operation"] for line in lines] == expected
    else:
        assert len(lines) == len(expected)
        assert lines[-1]["error"] == "busy"


@pytest.mark.parametrize(("level", "expected"), [(1, []), (2, ["health_check_port_opened", "health_check_port_closed"])])
async def test_from_verbosity_2_on_health_check_ports_are_logged(level: int, expected: list[str]) -> None:
    log._Process.verbosity = level
    ports = Ports()
    with capture_logs() as lines:
        ports.put(state(ports={30000: 1}))
        await ports.checks.adjust()
        ports.remove("web")
        await ports.checks.adjust()
    assert [line["event"] for line in lines] == expected
