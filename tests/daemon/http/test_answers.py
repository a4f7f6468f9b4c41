"""Covers bodies, codes and headers, byte for byte."""

import dataclasses
import json

import pytest

from ipvsproxy.daemon.http import answers
from ipvsproxy.daemon.http.health import FamilyHealth, Health
from ipvsproxy.model.net import Family
from ipvsproxy.model.service import ServiceName
from tests.support import golden_fixtures

NOW_S = 1_795_255_200.25
UPDATED_S = NOW_S - 10
NOW = "2026-11-21T10:00:00.25Z"
UPDATED = "2026-11-21T09:59:50.25Z"
HEADERS = {"Content-Type": "application/json", "X-Content-Type-Options": "nosniff"}


def _health(*, healthy: bool = True, eligible: bool = True, second: bool = True) -> Health:
    return Health(
        now_s=NOW_S,
        is_healthy=healthy,
        is_eligible=eligible,
        families={
            Family.IPV6: FamilyHealth(updated_s=UPDATED_S - 1, is_healthy=second),
            Family.IPV4: FamilyHealth(updated_s=UPDATED_S, is_healthy=True),
        },
    )


def test_a_node_that_is_fine_is_up_to_date_now() -> None:
    assert answers.healthz(_health())[:3] == (
        200,
        (
            f'{{"lastUpdated":"{NOW}","currentTime":"{NOW}","nodeEligible":true,"healthy":true,"status":{{'
            f'"IPv4":{{"lastUpdated":"{UPDATED}","healthy":true}},'
            '"IPv6":{"lastUpdated":"2026-11-21T09:59:49.25Z","healthy":true}}}'
        ).encode(),
        HEADERS,
    )


def test_unreadable_parts_and_unmet_settings_are_in_the_body() -> None:
    health = dataclasses.replace(_health(), unreadable=("list sets: EIO",), unmet_settings={"net/ipv4/ip_forward": "0"})
    document = json.loads(answers.healthz(health).body)
    assert document["unreadable"] == ["list sets: EIO"]
    assert document["unmetSettings"] == {"net/ipv4/ip_forward": "0"}


def test_leftovers_are_in_the_body_and_turn_nobody_away() -> None:
    answer = answers.healthz(dataclasses.replace(_health(), leftovers=("what the other backend holds of ours stays: EBUSY",)))
    assert answer.status == 200
    assert json.loads(answer.body)["leftovers"] == ["what the other backend holds of ours stays: EBUSY"]


def test_livez_does_not_say_whether_the_node_is_eligible() -> None:
    answer = answers.livez(_health(eligible=False))
    assert answer.status == 200
    assert answer.body.startswith(f'{{"lastUpdated":"{NOW}","currentTime":"{NOW}","healthy":true,"status":'.encode())


def test_a_node_that_is_not_eligible_is_unavailable_for_load_balancers_though_healthy() -> None:
    answer = answers.healthz(_health(eligible=False))
    assert answer.status == 503
    assert answer.body.startswith(
        f'{{"lastUpdated":"{UPDATED}","currentTime":"{NOW}","nodeEligible":false,"healthy":true,'.encode()
    )


def test_a_late_node_shows_its_last_update_and_the_late_family() -> None:
    for page in (answers.healthz, answers.livez):
        answer = page(_health(healthy=False, second=False))
        document = json.loads(answer.body)
        assert answer.status == 503
        assert (document["lastUpdated"], document["healthy"]) == (UPDATED, False)
        assert [document["status"][family]["healthy"] for family in ("IPv4", "IPv6")] == [True, False]


def test_before_the_first_sync_there_is_no_status() -> None:
    health = Health(now_s=NOW_S, is_healthy=True, is_eligible=False, families={})
    assert answers.healthz(health).body == (
        f'{{"lastUpdated":"0001-01-01T00:00:00Z","currentTime":"{NOW}","nodeEligible":false,"healthy":true}}'.encode()
    )


def test_a_health_check_port_answers_with_tabs_and_a_weight() -> None:
    assert answers.service_health(ServiceName("ns1", "svc1"), 2, is_healthy=True)[:3] == (
        200,
        (
            b'{\n\t"service": {\n\t\t"namespace": "ns1",\n\t\t"name": "svc1"\n\t},\n'
            b'\t"localEndpoints": 2,\n\t"serviceProxyHealthy": true\n}'
        ),
        HEADERS | {"X-Load-Balancing-Endpoint-Weight": "2"},
    )


@pytest.mark.parametrize(("count", "healthy"), [(0, True), (1, False), (0, False)])
def test_a_health_check_port_sends_load_balancers_away_without_endpoints_or_health(count: int, *, healthy: bool) -> None:
    answer = answers.service_health(ServiceName("ns1", "svc1"), count, is_healthy=healthy)
    assert answer.status == 503
    assert answer.headers["X-Load-Balancing-Endpoint-Weight"] == str(count)
    assert json.loads(answer.body)["serviceProxyHealthy"] is healthy


def test_health_check_ports_answer_as_recorded() -> None:
    recorded = golden_fixtures.recording("default", "P0")["health_check_node_ports"]
    answered = [row for row in recorded.values() if row["code"] != "refused"]
    assert answered
    for row in answered:
        body = row["body"]
        answer = answers.service_health(
            ServiceName(body["service"]["namespace"], body["service"]["name"]),
            body["localEndpoints"],
            is_healthy=body["serviceProxyHealthy"],
        )
        assert (answer.status, json.loads(answer.body), answer.headers) == (row["code"], body, row["headers"])


@pytest.mark.parametrize(
    ("epoch_s", "text"),
    [
        (0, "1970-01-01T00:00:00Z"),
        (NOW_S, NOW),
        (1_795_255_199.999, "2026-11-21T09:59:59.999Z"),
        (1_795_255_199.000001, "2026-11-21T09:59:59.000001Z"),
        (1_795_255_199.9999999, "2026-11-21T10:00:00Z"),
    ],
)
def test_times_have_as_many_digits_as_they_need(epoch_s: float, text: str) -> None:
    assert answers.render_time(epoch_s) == text
