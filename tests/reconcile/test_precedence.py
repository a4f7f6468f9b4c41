"""Who gets a virtual server that several Services want: by what right, seen or remembered, by age."""

import itertools

import pytest

from ipvsproxy.model.kernel import IpSet, Owner, SetEntry, SetKind
from ipvsproxy.model.net import Family, Protocol, parse_address
from ipvsproxy.model.service import ServiceName
from ipvsproxy.model.state import ServiceState
from ipvsproxy.reconcile import precedence
from ipvsproxy.reconcile.claims import Claims
from ipvsproxy.reconcile.precedence import Role
from tests.reconcile import examples
from tests.reconcile.examples import OLD, YOUNG
from tests.reconcile.test_claims import entries, new_claims, put
from tests.support import builders

KEY = builders.frontend("10.96.0.200", 80)
NODE_PORT = examples.port_entry(SetKind.NODE_PORT_TCP, KEY.port)
OTHERS = (SetKind.EXTERNAL_IP, SetKind.EXTERNAL_IP_LOCAL, SetKind.LOAD_BALANCER)
OLDEST = Owner(0.5, ServiceName("default", "oldest"))


def by(owner: Owner, kind: SetKind) -> ServiceState:
    """A Service that wants the virtual server with an entry of this kind."""
    entry = NODE_PORT if kind is SetKind.NODE_PORT_TCP else examples.entry(kind, KEY)
    return examples.state(owner, KEY, real_servers=[builders.backend("10.244.0.1")], entries=[entry])


def holder(claims: Claims) -> Owner:
    return claims.virtual_servers.desired[KEY].owner


@pytest.mark.parametrize(
    ("kind", "role"),
    [
        (SetKind.CLUSTER_IP, Role.CLUSTER_IP),
        (SetKind.NODE_PORT_TCP, Role.NODE_PORT),
        *((kind, Role.OTHER_ADDRESS) for kind in OTHERS),
    ],
)
def test_entries_tell_by_what_right_a_service_wants_a_virtual_server(kind: SetKind, role: Role) -> None:
    assert precedence.claim(by(OLD, kind), KEY) == (role, OLD)


def test_a_node_port_of_sctp_names_its_address_and_is_one_all_the_same() -> None:
    key = builders.frontend("172.18.0.2", 30080, Protocol.SCTP)
    state = examples.state(OLD, key, entries=[examples.entry(SetKind.NODE_PORT_SCTP, key)])
    assert precedence.claim(state, key).role is Role.NODE_PORT


def test_an_ipv6_cluster_ip_is_one_too() -> None:
    key = builders.frontend("fd00:10:96::a", 80)
    entry = SetEntry(IpSet(SetKind.CLUSTER_IP, Family.IPV6).name, parse_address("fd00:10:96::a"), Protocol.TCP, 80)
    assert precedence.claim(examples.state(OLD, key, entries=[entry]), key).role is Role.CLUSTER_IP


@pytest.mark.parametrize("asked_for", OTHERS)
@pytest.mark.parametrize("allotted", [SetKind.CLUSTER_IP, SetKind.NODE_PORT_TCP])
@pytest.mark.parametrize("is_first", [True, False])
def test_what_was_allotted_goes_before_an_older_external_address(
    asked_for: SetKind, allotted: SetKind, *, is_first: bool
) -> None:
    claims = new_claims()
    states = (by(OLD, asked_for), by(YOUNG, allotted))
    put(claims, *(states if is_first else reversed(states)))
    assert holder(claims) == YOUNG
    assert entries(claims, YOUNG) == set(by(YOUNG, allotted).entries)
    assert entries(claims, OLD) == set()
    (conflict,) = claims.conflicts()
    assert (conflict.winner, conflict.waiting) == (YOUNG, (OLD,))
    assert conflict.reasons[0].startswith("has it as its")
    claims.put(YOUNG.service, None)
    assert holder(claims) == OLD
    assert entries(claims, OLD) == set(by(OLD, asked_for).entries)


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_those_that_wait_wait_by_the_same_rule(order: tuple[int, ...]) -> None:
    claims = new_claims()
    states = (by(YOUNG, SetKind.CLUSTER_IP), by(OLDEST, SetKind.EXTERNAL_IP), by(OLD, SetKind.NODE_PORT_TCP))
    put(claims, *(states[number] for number in order))
    (conflict,) = claims.conflicts()
    assert (conflict.winner, *conflict.waiting) == (YOUNG, OLD, OLDEST)
    assert claims.virtual_servers.wanting(KEY) == (YOUNG, OLD, OLDEST)
    claims.put(YOUNG.service, None)
    assert holder(claims) == OLD


@pytest.mark.parametrize("kind", [SetKind.CLUSTER_IP, *OTHERS])
def test_of_two_with_the_same_right_the_older_one_goes_first(kind: SetKind) -> None:
    claims = new_claims()
    put(claims, by(YOUNG, kind), by(OLD, kind))
    assert holder(claims) == OLD
    assert [conflict.reasons for conflict in claims.conflicts()] == [("is older and has it",)]


def test_a_service_whose_right_has_changed_gains_or_loses_what_it_wants_still() -> None:
    claims = new_claims()
    put(claims, by(OLD, SetKind.EXTERNAL_IP), by(YOUNG, SetKind.LOAD_BALANCER))
    assert holder(claims) == OLD
    put(claims, by(YOUNG, SetKind.CLUSTER_IP))
    assert holder(claims) == YOUNG
    assert entries(claims, YOUNG) == set(by(YOUNG, SetKind.CLUSTER_IP).entries)
    assert entries(claims, OLD) == set()
    put(claims, by(YOUNG, SetKind.LOAD_BALANCER))
    assert holder(claims) == OLD
    assert entries(claims, OLD) == set(by(OLD, SetKind.EXTERNAL_IP).entries)
    assert entries(claims, YOUNG) == set()


def test_what_one_service_alone_wants_is_its_own_while_others_are_at_odds() -> None:
    claims = new_claims()
    put(claims, by(OLD, SetKind.CLUSTER_IP), by(YOUNG, SetKind.EXTERNAL_IP))
    alone = builders.frontend("10.96.0.201", 80)
    put(claims, examples.state(OLDEST, alone))
    assert claims.virtual_servers.rank_again(alone) == set()
    assert claims.virtual_servers.desired[alone].owner == OLDEST


def test_one_that_has_been_seen_goes_before_one_that_is_only_remembered() -> None:
    claims = new_claims()
    put(claims, by(OLD, SetKind.CLUSTER_IP), by(YOUNG, SetKind.CLUSTER_IP))
    put(claims, by(OLD.remembered, SetKind.CLUSTER_IP))
    assert holder(claims) == YOUNG
    (conflict,) = claims.conflicts()
    assert conflict.waiting == (OLD.remembered,)
    assert conflict.reasons == ("is on the newest list, which lacks the other, and has it",)
    put(claims, by(OLD, SetKind.CLUSTER_IP))
    assert holder(claims) == OLD


def test_of_two_that_are_only_remembered_the_older_one_stays_first() -> None:
    claims = new_claims()
    put(claims, by(OLD.remembered, SetKind.CLUSTER_IP), by(YOUNG.remembered, SetKind.CLUSTER_IP))
    assert holder(claims) == OLD.remembered
    assert [conflict.reasons for conflict in claims.conflicts()] == [("is older and has it",)]


def test_a_remembered_cluster_ip_is_not_taken_by_an_external_address() -> None:
    claims = new_claims()
    put(claims, by(OLD.remembered, SetKind.CLUSTER_IP), by(YOUNG, SetKind.EXTERNAL_IP))
    assert holder(claims) == OLD.remembered
