"""Covers which log lines a Service causes on its way from the source to the kernel, at each verbosity (``-v``)."""

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

ADDRESS = BoundAddresses.of(builders.addresses("10.96.0.10")[0])


@in_virtual_time
async def test_all_steps_of_a_service_from_the_watch_to_the_sync_are_logged_if_the_verbosity_is_4(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(log._Process, "verbosity", 4)
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
async def test_a_change_is_logged_as_one_line_if_the_verbosity_is_below_4(monkeypatch: pytest.MonkeyPatch, level: int) -> None:
    monkeypatch.setattr(log._Process, "verbosity", level)
    node = MemoryNode()
    async with node.running():
        first, second = builders.endpoint("10.244.0.5"), builders.endpoint("10.244.0.6")
        node.begin_with(builders.node(), builders.service("web"), builders.endpoint_slice(first))
        await node.quiet()
        with capture_logs() as lines:
            node.put(builders.endpoint_slice(first, second))
            await node.quiet()
    assert [line["event"] for line in lines] == ["synced"]


def test_every_kind_of_change_event_is_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log._Process, "verbosity", 4)
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
    received = {"event": "received", "log_level": "debug", "kind": "Service"}
    assert lines == [
        received | {"change": "deleted", "name": "default/web"},
        received | {"change": "listed", "objects": 1},
        received | {"change": "rejected", "name": "default/web", "reason": "no JSON"},
        {"event": "translated", "log_level": "debug", "service": "default/web", "wants": "nothing"},
    ]


ADDED, REMOVED = "add address 10.96.0.10", "remove address 10.96.0.10"


@pytest.mark.parametrize(
    ("level", "expected"),
    [(0, []), (2, [(REMOVED, None)]), (4, [(ADDED, None), (REMOVED, None), (REMOVED, "busy")])],
)
def test_removed_addresses_are_logged_at_verbosity_2_and_higher(
    monkeypatch: pytest.MonkeyPatch, level: int, expected: list[tuple[str, str | None]]
) -> None:
    monkeypatch.setattr(log._Process, "verbosity", level)
    done, failed = Outcome(Operation(Verb.REMOVE, ADDRESS)), Outcome(Operation(Verb.REMOVE, ADDRESS), "busy", 16)
    with capture_logs() as lines:
        journal.log_outcomes([Outcome(Operation(Verb.ADD, ADDRESS)), done, failed])
    assert [(line["operation"], line.get("error")) for line in lines] == expected


@pytest.mark.parametrize(("level", "expected"), [(1, []), (2, ["health_check_port_opened", "health_check_port_closed"])])
async def test_opening_and_closing_a_health_check_port_is_logged_if_the_verbosity_is_at_least_2(
    monkeypatch: pytest.MonkeyPatch, level: int, expected: list[str]
) -> None:
    monkeypatch.setattr(log._Process, "verbosity", level)
    ports = Ports()
    with capture_logs() as lines:
        await ports.show(state(ports={30000: 1}))
        await ports.withdraw("web")
    assert [line["event"] for line in lines] == expected
