"""Covers which Service gets a virtual server that several Services desire.

The decision depends on the roles and the age of the Services, and on whether each Service is in the newest list.
"""

import itertools

import msgspec
import pytest

from ipvsproxy.model.service import Owner, ServiceName
from ipvsproxy.model.sets import SetKind
from ipvsproxy.model.state import ServiceState
from ipvsproxy.model.steps import at_once
from ipvsproxy.model.virtual_servers import Role
from ipvsproxy.reconcile.kinds.node_tables import NodeTables
from ipvsproxy.reconcile.survey import Survey
from tests.reconcile import examples
from tests.reconcile.examples import OLD, YOUNG
from tests.reconcile.kinds.test_node_tables import entries, new_claims, put
from tests.support import builders

KEY = builders.frontend("10.96.0.200", 80)
NODE_PORT = examples.port_entry(SetKind.NODE_PORT_TCP, KEY.port)
OTHERS = (SetKind.EXTERNAL_IP, SetKind.EXTERNAL_IP_LOCAL, SetKind.LOAD_BALANCER)
ROLES = {
    SetKind.CLUSTER_IP: Role.CLUSTER_IP,
    SetKind.NODE_PORT_TCP: Role.NODE_PORT,
    SetKind.EXTERNAL_IP: Role.EXTERNAL_IP,
    SetKind.EXTERNAL_IP_LOCAL: Role.EXTERNAL_IP,
    SetKind.LOAD_BALANCER: Role.LOAD_BALANCER_IP,
}
OLDEST = Owner(0.5, ServiceName("default", "oldest"))


def by(owner: Owner, kind: SetKind) -> ServiceState:
    """The state of a Service that desires the virtual server ``KEY``; ``kind`` determines role and set entry of ``KEY``."""
    entry = NODE_PORT if kind is SetKind.NODE_PORT_TCP else examples.entry(kind, KEY)
    state = examples.state(owner, KEY, real_servers=[builders.backend("10.244.0.1")], entries=[entry])
    (served,) = state.served
    return state.with_objects((msgspec.structs.replace(served, role=ROLES[kind]),), state.entries)


def owner_of(tables: NodeTables) -> Owner:
    return tables.virtual_servers.desired[KEY].owner


@pytest.mark.parametrize("asked_for", OTHERS)
@pytest.mark.parametrize("allotted", [SetKind.CLUSTER_IP, SetKind.NODE_PORT_TCP])
@pytest.mark.parametrize("is_first", [True, False])
def test_an_address_allocated_by_the_api_server_wins_over_the_external_address_of_an_older_service(
    asked_for: SetKind, allotted: SetKind, *, is_first: bool
) -> None:
    tables = new_claims()
    states = (by(OLD, asked_for), by(YOUNG, allotted))
    put(tables, *(states if is_first else reversed(states)))
    assert owner_of(tables) == YOUNG
    assert entries(tables, YOUNG) == set(by(YOUNG, allotted).entries)
    assert entries(tables, OLD) == set()
    (conflict,) = Survey(tables).conflicts()
    assert (conflict.winner, conflict.waiting) == (YOUNG, (OLD,))
    address = "cluster IP" if allotted is SetKind.CLUSTER_IP else "node port"
    assert conflict.reasons == (f"has it as its {address}",)
    at_once(tables.putting(YOUNG.service, None))
    assert owner_of(tables) == OLD
    assert entries(tables, OLD) == set(by(OLD, asked_for).entries)


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_services_that_wait_for_a_virtual_server_are_ordered_by_the_rule_that_picks_its_owner(order: tuple[int, ...]) -> None:
    tables = new_claims()
    states = (by(YOUNG, SetKind.CLUSTER_IP), by(OLDEST, SetKind.EXTERNAL_IP), by(OLD, SetKind.NODE_PORT_TCP))
    put(tables, *(states[number] for number in order))
    (conflict,) = Survey(tables).conflicts()
    assert (conflict.winner, *conflict.waiting) == (YOUNG, OLD, OLDEST)
    assert tables.virtual_servers.owners_of(KEY) == (YOUNG, OLD, OLDEST)
    at_once(tables.putting(YOUNG.service, None))
    assert owner_of(tables) == OLD


@pytest.mark.parametrize(("old", "young"), [(OLD, YOUNG), (OLD.remembered, YOUNG.remembered)], ids=["listed", "remembered"])
@pytest.mark.parametrize("kind", [SetKind.CLUSTER_IP, *OTHERS])
def test_the_older_of_two_services_with_equal_precedence_wins(old: Owner, young: Owner, kind: SetKind) -> None:
    tables = new_claims(by(young, kind), by(old, kind))
    assert owner_of(tables) == old
    assert [conflict.reasons for conflict in Survey(tables).conflicts()] == [("is older and has it",)]


def test_the_owner_of_a_virtual_server_is_chosen_again_when_the_role_of_a_service_changes() -> None:
    tables = new_claims(by(OLD, SetKind.EXTERNAL_IP), by(YOUNG, SetKind.LOAD_BALANCER))
    assert owner_of(tables) == OLD
    put(tables, by(YOUNG, SetKind.CLUSTER_IP))
    assert owner_of(tables) == YOUNG
    assert entries(tables, YOUNG) == set(by(YOUNG, SetKind.CLUSTER_IP).entries)
    assert entries(tables, OLD) == set()
    put(tables, by(YOUNG, SetKind.LOAD_BALANCER))
    assert owner_of(tables) == OLD
    assert entries(tables, OLD) == set(by(OLD, SetKind.EXTERNAL_IP).entries)
    assert entries(tables, YOUNG) == set()


def test_a_service_in_the_newest_list_takes_precedence_over_a_service_missing_from_the_list() -> None:
    tables = new_claims(by(OLD, SetKind.CLUSTER_IP), by(YOUNG, SetKind.CLUSTER_IP))
    put(tables, by(OLD.remembered, SetKind.CLUSTER_IP))
    assert owner_of(tables) == YOUNG
    (conflict,) = Survey(tables).conflicts()
    assert conflict.waiting == (OLD.remembered,)
    assert conflict.reasons == ("is on the newest list, which lacks the other, and has it",)
    put(tables, by(OLD, SetKind.CLUSTER_IP))
    assert owner_of(tables) == OLD


def test_the_cluster_ip_of_an_unlisted_service_takes_precedence_over_an_external_address() -> None:
    tables = new_claims(by(OLD.remembered, SetKind.CLUSTER_IP), by(YOUNG, SetKind.EXTERNAL_IP))
    assert owner_of(tables) == OLD.remembered
