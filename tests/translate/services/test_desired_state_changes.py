"""The effects of changes of a Service or its EndpointSlices: the states before and after the change.

The two states also determine which tracked flows must be cleaned, because each state names the real servers that may continue to
answer.
"""

import pytest

from ipvsproxy.model.kernel import HealthCheckPort
from ipvsproxy.model.net import Family, Protocol
from ipvsproxy.model.service import EndpointSlice, Service, ServicePort, ServiceType
from ipvsproxy.model.sets import SetKind
from ipvsproxy.model.state import ServiceState
from tests.support.builders import CLUSTER_IP, OTHER_NODE, endpoint, endpoint_port, endpoint_slice, service, service_port
from tests.translate.reading import backends, frontends, members, state_of


def _health_ports(*states: ServiceState) -> set[str]:
    return members(SetKind.HEALTH_CHECK_NODE_PORT, *states)


def _balancer(*ports: ServicePort, health_port: int = 30000, cluster: str = CLUSTER_IP) -> Service:
    return service(
        "lb",
        *ports,
        kind=ServiceType.LOAD_BALANCER,
        cluster=[cluster],
        load_balancer=["1.2.3.4"],
        external_local=True,
        health_check_node_port=health_port,
    )


THREE_PORTS = tuple(service_port(number, name=str(number)) for number in (81, 82, 83))


@pytest.mark.checklist(46, 74)
def test_ports_removed_from_a_service_leave_no_objects_behind() -> None:
    before, after = state_of(service("web", *THREE_PORTS)), state_of(service("web", *THREE_PORTS[:1]))
    assert frontends(before) - frontends(after) == {f"TCP {CLUSTER_IP}:82", f"TCP {CLUSTER_IP}:83"}
    assert members(SetKind.CLUSTER_IP, after) == {f"{CLUSTER_IP},tcp:81"}
    assert before.addresses == after.addresses
    assert _health_ports(after) == set()


@pytest.mark.checklist(40, 49, 51)
def test_a_service_gains_a_health_check_and_loses_nothing_when_it_becomes_a_load_balancer() -> None:
    plain, balancer = state_of(service("lb", *THREE_PORTS)), state_of(_balancer(*THREE_PORTS))
    assert members(SetKind.CLUSTER_IP, plain) == members(SetKind.CLUSTER_IP, balancer)
    assert frontends(plain) < frontends(balancer)
    assert (_health_ports(plain), _health_ports(balancer)) == (set(), {"30000"})
    assert (len(plain.rare.local_endpoints), len(balancer.rare.local_endpoints)) == (0, 1)


def test_the_health_check_counts_only_endpoints_that_serve_a_port_of_the_service() -> None:
    other = endpoint_slice(endpoint("10.0.1.1"), service="lb", suffix="other", ports=[endpoint_port(9090, name="other")])
    mine = endpoint_slice(endpoint("10.0.1.2"), service="lb", suffix="mine", ports=[endpoint_port(9090, name="81")])
    counts = [
        set(state_of(_balancer(*THREE_PORTS), *slices).rare.local_endpoints.values()) for slices in ([other], [other, mine])
    ]
    assert counts == [{0}, {1}]


@pytest.mark.checklist(25, 77)
def test_deleting_an_endpoint_slice_removes_real_servers_and_hairpin_entries_but_no_virtual_server() -> None:
    slices = endpoint_slice(endpoint("10.0.1.1"), endpoint("10.0.1.2", OTHER_NODE))
    before, after = state_of(service(), slices), state_of(service())
    assert backends(before, CLUSTER_IP) == {"10.0.1.1:8080", "10.0.1.2:8080"}
    assert members(SetKind.LOOP_BACK, before) == {"10.0.1.1,tcp:8080,10.0.1.1"}
    assert frontends(before) == frontends(after)
    assert backends(after, CLUSTER_IP) == set()
    assert members(SetKind.LOOP_BACK, after) == set()


# From here on: Services with the UDP ports p11 and p12, whose endpoints listen on 11 and 12.
P11, P12 = (service_port(number, Protocol.UDP, name=f"p{number}") for number in (11, 12))


def _slice(*addresses: str, ports: dict[str, int] | None = None, node: str = OTHER_NODE, suffix: str = "1") -> EndpointSlice:
    """An EndpointSlice with these addresses; by default, it has only the port p11."""
    desired = [endpoint_port(number, Protocol.UDP, name=name) for name, number in (ports or {"p11": 11}).items()]
    return endpoint_slice(*(endpoint(address, node) for address in addresses), suffix=suffix, ports=desired, family=Family.IPV4)


def _answering(*slices: EndpointSlice, ports: tuple[ServicePort, ...] = (P11,)) -> dict[int, set[str]]:
    """The real servers whose flows may continue; the key is the service port.

    If a service port is missing in the result, no flow of this port is deleted.
    """
    state = state_of(service("dns", *ports), *slices)
    for flow, keep in state.rare.flows.items():
        assert {str(key) for key in keep} == backends(state, CLUSTER_IP, flow.port, Protocol.UDP)
    return {flow.port: {str(key) for key in keep} for flow, keep in state.rare.flows.items()}


def _local_count(*slices: EndpointSlice, ports: tuple[ServicePort, ...]) -> int:
    """Translates a load balancer with these slices and ports.

    Returns the number of local endpoints that its health check reports.
    """
    desired = service("dns", *ports, kind=ServiceType.LOAD_BALANCER, external_local=True, health_check_node_port=30000)
    return state_of(desired, *slices).rare.local_endpoints[HealthCheckPort(Family.IPV4, 30000)]


BOTH_PORTS = {"p11": 11, "p12": 12}


@pytest.mark.checklist(56)
def test_an_address_with_two_ports_counts_as_one_local_endpoint() -> None:
    assert _local_count(_slice("1.1.1.1", ports=BOTH_PORTS, node="node-a"), ports=(P11, P12)) == 1
    apart = _slice("1.1.1.1", node="node-a"), _slice("1.1.1.1", node="node-a", suffix="2", ports={"p12": 12})
    assert _local_count(*apart, ports=(P11, P12)) == 1


ONE, ONE_P12 = {11: {"1.1.1.1:11"}}, _slice("1.1.1.2", suffix="2", ports={"p12": 12})


@pytest.mark.checklist(53, 54, 55, 58, 59, 60, 61, 62, 63, 64, 65, 66)
@pytest.mark.parametrize(
    ("slices", "ports", "answering"),
    [
        ([], [P11], {}),
        ([_slice()], [P11], {}),
        ([_slice("1.1.1.1")], [P11], ONE),
        ([_slice("1.1.1.1")], [P11, P12], ONE),
        ([_slice("1.1.1.1"), _slice("1.1.1.2", suffix="2")], [P11], {11: {"1.1.1.1:11", "1.1.1.2:11"}}),
        ([_slice("1.1.1.1"), ONE_P12], [P11, P12], {**ONE, 12: {"1.1.1.2:12"}}),
        ([_slice("1.1.1.1", ports=BOTH_PORTS), ONE_P12], [P11, P12], {**ONE, 12: {"1.1.1.1:12", "1.1.1.2:12"}}),
        ([_slice("1.1.1.1", ports={"p11-2": 11})], [P11], {}),
        ([_slice("1.1.1.1", ports={"p11-2": 11})], [service_port(11, Protocol.UDP, name="p11-2")], ONE),
        ([_slice("1.1.1.1", ports={"p11": 22})], [P11], {11: {"1.1.1.1:22"}}),
    ],
)
def test_current_slices_and_their_port_names_determine_which_real_servers_may_keep_flows(
    slices: list[EndpointSlice], ports: list[ServicePort], answering: dict[int, set[str]]
) -> None:
    assert _answering(*slices, ports=tuple(ports)) == answering
