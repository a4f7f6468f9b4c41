"""Queries about desired and observed state, on a node whose kernel has all desired objects."""

import pytest

from ipvsproxy.model.kernel import INDISPENSABLE_SETTINGS, BoundAddresses
from ipvsproxy.model.kind import KINDS
from ipvsproxy.model.net import Family, Protocol, parse_address
from ipvsproxy.model.plan import Operation, Verb
from ipvsproxy.model.service import ServiceName, ServicePort
from ipvsproxy.model.sets import IpSet, SetEntry, SetKind
from ipvsproxy.model.steps import at_once
from ipvsproxy.model.virtual_servers import (
    ConnectionCounts,
    FirewallMark,
    Role,
    VirtualServer,
    VirtualServerKey,
    VirtualServerSettings,
)
from ipvsproxy.reconcile.attempts import MOST_KEPT, Pace
from ipvsproxy.reconcile.kinds.declaration import Stage
from ipvsproxy.reconcile.reconciler import Policy, Reconciler
from ipvsproxy.reconcile.survey import Sides
from tests.reconcile import examples, simulation
from tests.reconcile.serving import KEY, ONE, TWO, running
from tests.support import builders

WEB = ServiceName(builders.NAMESPACE, "web")
ELSEWHERE = builders.frontend("203.0.113.9", 443)


@pytest.fixture
def node() -> simulation.SimulatedNode:
    """A node whose kernel has all objects of one Service with two endpoints."""
    made = running("10.244.0.1", "10.244.0.2")
    made.observe()
    return made


def test_the_survey_shows_the_owner_and_the_witness_of_a_programmed_virtual_server(
    node: simulation.SimulatedNode,
) -> None:
    survey = node.reconciler.survey
    desired, observed, is_foreign = survey.sides(KEY)
    assert desired == survey.virtual_servers[KEY]
    assert observed is not None
    assert (dict(observed.real_servers), is_foreign) == ({ONE: 1, TWO: 1}, False)
    assert list(survey.virtual_server_keys()) == [KEY]
    owner = survey.states[WEB].owner
    assert survey.has(owner, KEY)
    assert not survey.has(examples.OLD, KEY)
    assert survey.owner_of(VirtualServer(KEY, examples.ROUND_ROBIN)) == owner
    assert survey.witness(KEY) == BoundAddresses.of(KEY.address)
    assert list(survey.conflicts()) == []
    assert survey.conflict(KEY) is None
    assert survey.stage_of(Operation(Verb.ADD, VirtualServer(KEY, examples.ROUND_ROBIN))) is Stage.SERVERS


def test_an_observed_virtual_server_of_another_program_is_foreign_and_has_no_witness(node: simulation.SimulatedNode) -> None:
    node.kernel.virtual_servers[ELSEWHERE] = examples.observed()
    node.observe()
    survey = node.reconciler.survey
    assert survey.sides(ELSEWHERE) == Sides(None, examples.observed(), is_foreign=True)
    assert survey.witness(ELSEWHERE) is None
    assert set(survey.virtual_server_keys()) == {KEY, ELSEWHERE}
    assert list(survey.foreign()) == [(ELSEWHERE, examples.observed())]


def test_only_an_undesired_virtual_server_that_belongs_to_ipvsproxy_is_stale(
    node: simulation.SimulatedNode,
) -> None:
    node.kernel.virtual_servers[ELSEWHERE] = examples.observed()
    node.observe()
    survey = node.reconciler.survey
    assert not survey.stale()
    node.remove("web")
    assert list(survey.stale()) == [KEY]


def test_the_set_entry_is_the_witness_of_a_virtual_server_whose_address_is_missing(node: simulation.SimulatedNode) -> None:
    node.kernel.addresses.clear()
    node.observe()
    entry = examples.entry(SetKind.CLUSTER_IP, KEY)
    assert node.reconciler.survey.witness(KEY) == entry
    assert node.reconciler.survey.is_desired_entry(entry)
    assert not node.reconciler.survey.is_desired_entry(examples.entry(SetKind.CLUSTER_IP, ELSEWHERE))


def test_a_draining_real_server_is_shown_with_its_connections_after_the_connections_were_read(
    node: simulation.SimulatedNode,
) -> None:
    node.kernel.connection_counts[KEY, TWO] = ConnectionCounts(2, 1)
    node.put(builders.service("web"), builders.endpoint_slice(builders.endpoint("10.244.0.1")))
    node.sync()
    survey = node.reconciler.survey
    assert survey.draining == 1
    assert survey.draining_connections() == [(KEY, TWO, ConnectionCounts(2, 1))]
    assert list(survey.draining_virtual_servers) == [KEY]
    assert survey.draining_of(KEY) == {TWO: ConnectionCounts(2, 1)}
    assert not survey.draining_of(ELSEWHERE)
    assert survey.statistics(node.now + 5).drains == 1


def test_a_pending_object_is_shown_with_its_owner(node: simulation.SimulatedNode) -> None:
    survey = node.reconciler.survey
    assert not list(survey.pending_owners())
    del node.kernel.virtual_servers[KEY]
    node.observe()
    assert list(survey.pending_owners()) == [survey.states[WEB].owner]


def test_statistics_are_a_snapshot_of_the_counts_for_each_kind_of_object(node: simulation.SimulatedNode) -> None:
    before = node.reconciler.survey.statistics(node.now)
    assert (before.virtual_servers, before.addresses, before.foreign) == ([KEY], [KEY.address], frozenset())
    assert before.set_entries[IpSet(SetKind.CLUSTER_IP, Family.IPV4).name] == 1
    assert set(before.pending) == {kind.name for kind in KINDS.values()} - {"real_server"}
    assert set(before.pending.values()) == {0}
    assert (before.conflicts, before.drains, before.waiting_removals, before.oldest_drain_age_s) == (0, 0, 0, 0)
    node.kernel.virtual_servers.clear()
    node.observe()
    after = node.reconciler.survey.statistics(node.now)
    assert (after.pending["virtual_server"], after.drifted["virtual_server"]) == (1, 1)
    assert before.virtual_servers == [KEY]
    node.sync()
    node.remove("web")
    undesired = node.reconciler.survey.statistics(node.now).pending
    assert (undesired["virtual_server"], undesired["address"]) == (1, 1)


def test_the_survey_shows_rules_and_the_families_that_lack_rules(node: simulation.SimulatedNode) -> None:
    reconciler = node.reconciler
    assert reconciler.survey.rules(Family.IPV4).family is Family.IPV4
    assert reconciler.survey.lacking(tuple(Family)) == frozenset()
    node.kernel.chains[Family.IPV4].clear()
    node.observe()
    node.plan()
    assert reconciler.survey.lacking(tuple(Family)) == {Family.IPV4}


def test_a_family_is_unserved_while_more_than_half_of_its_virtual_servers_are_absent(node: simulation.SimulatedNode) -> None:
    unserved = node.reconciler.survey.unserved
    assert unserved(tuple(Family)) == frozenset()
    for number in (11, 12, 13):
        node.put(builders.service(f"web-{number}", cluster=(f"10.96.0.{number}",)))
        node.sync()
    for server in node.kernel.virtual_servers.values():
        server.settings = server.settings._replace(scheduler="wlc")
    node.observe()
    assert unserved(tuple(Family)) == frozenset(), "a wrong scheduler is no absence"
    for number in (11, 12):
        del node.kernel.virtual_servers[builders.frontend(f"10.96.0.{number}", 80)]
    node.observe()
    assert unserved(tuple(Family)) == frozenset()
    del node.kernel.virtual_servers[KEY]
    node.observe()
    assert unserved(tuple(Family)) == {Family.IPV4}
    assert unserved([Family.IPV6]) == frozenset()


def test_a_family_lacks_entries_until_the_missing_set_entry_has_been_added_again(node: simulation.SimulatedNode) -> None:
    assert node.reconciler.survey.lacking_entries(tuple(Family)) == frozenset()
    node.kernel.sets["KUBE-CLUSTER-IP"].entries.clear()
    node.observe()
    assert node.reconciler.survey.lacking_entries(tuple(Family)) == {Family.IPV4}
    node.sync()
    assert node.reconciler.survey.lacking_entries(tuple(Family)) == frozenset()
    node.kernel.sets["KUBE-CLUSTER-IP"].entries.add(SetEntry("KUBE-CLUSTER-IP", parse_address("10.96.9.9"), Protocol.TCP, 80))
    node.observe()
    assert node.reconciler.survey.lacking_entries(tuple(Family)) == frozenset(), "one too many is not missing"


def test_every_family_counts_as_lacking_an_object_while_the_device_is_missing(node: simulation.SimulatedNode) -> None:
    node.kernel.device = False
    node.observe()
    assert node.reconciler.survey.lacking(tuple(Family)) == frozenset(Family)


def test_a_family_counts_as_lacking_an_object_if_its_indispensable_setting_has_a_wrong_value(
    node: simulation.SimulatedNode,
) -> None:
    path = simulation.SYSCTL.path
    assert path in INDISPENSABLE_SETTINGS
    assert node.reconciler.survey.unmet_settings() == node.reconciler.survey.settings_given_up == {}
    node.kernel.sysctls[path] = "0"
    node.observe()
    assert node.reconciler.survey.unmet_settings() == {path: "0"}
    assert node.reconciler.survey.lacking([Family.IPV4]) == {Family.IPV4} & set(INDISPENSABLE_SETTINGS[path])


def test_statistics_count_conflicts_and_draining_real_servers_and_waiting_removals_separately(
    node: simulation.SimulatedNode,
) -> None:
    node.put(builders.service("other", created_s=builders.CREATED_S + 1), builders.endpoint_slice(service="other"))
    node.put(builders.service("web"), builders.endpoint_slice(builders.endpoint("10.244.0.1")))
    node.kernel.connection_counts[KEY, TWO] = ConnectionCounts(2, 1)
    node.sync()
    node.reconciler._pace.note(added=0, removed=MOST_KEPT, now=node.now)
    node.put(builders.service("web"), builders.endpoint_slice(builders.endpoint("10.244.0.3")))
    node.sync()
    statistics = node.reconciler.survey.statistics(node.now)
    assert (statistics.conflicts, statistics.drains, statistics.waiting_removals) == (1, 1, 1)
    assert node.reconciler.survey.draining_connections() == [(KEY, TWO, ConnectionCounts(2, 1))]
    assert node.reconciler.survey.draining_of(KEY)[TWO] == ConnectionCounts(2, 1)
    node.reconciler._pace = Pace()
    node.sync(after_s=60)
    node.put(builders.service("web"), builders.endpoint_slice(builders.endpoint("10.244.0.1")))
    node.kernel.connection_counts[KEY, builders.backend("10.244.0.3", 8080)] = ConnectionCounts(1, 0)
    at_once(node.reconciler.settling(node.apply(node.plan()), node.now))
    assert node.reconciler.survey.draining_connections() == [(KEY, TWO, ConnectionCounts(2, 1))], "the others are unknown"


def test_the_survey_finds_the_service_port_of_virtual_servers_for_addresses_and_node_ports() -> None:
    first, second = builders.service_port(80, name="http", node_port=30080), builders.service_port(443, name="https")
    service = builders.service("web", first, second, cluster=["10.96.0.1"], load_balancer=["192.168.0.11"])

    def port_of(key: VirtualServerKey, role: Role) -> ServicePort | None:
        served = VirtualServer(key, VirtualServerSettings("rr"), role=role)
        return Reconciler(Policy()).survey.service_port(service, served)

    assert port_of(builders.frontend("10.96.0.1", 443), Role.CLUSTER_IP) == second
    assert port_of(builders.frontend("192.168.0.10", 30080), Role.NODE_PORT) == first
    assert port_of(builders.frontend("192.168.0.11", 80), Role.LOAD_BALANCER_IP) == first
    assert port_of(builders.frontend("10.96.0.1", 30080), Role.CLUSTER_IP) is None
    assert port_of(builders.frontend("10.96.0.1", 80, Protocol.UDP), Role.CLUSTER_IP) is None
    assert port_of(FirewallMark.of(Family.IPV4, 7), Role.CLUSTER_IP) is None
