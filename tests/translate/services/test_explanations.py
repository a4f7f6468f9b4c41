"""The reason why each endpoint is used or not used; the reasons must agree with the desired state."""

import hypothesis
from hypothesis import strategies as st

from ipvsproxy.model.net import Family, Protocol
from ipvsproxy.model.real_servers import RealServerKey
from ipvsproxy.model.service import Endpoint, EndpointSlice, Service, ServiceOptions, ServiceType, Skipped
from ipvsproxy.model.steps import at_once
from ipvsproxy.model.virtual_servers import Role
from ipvsproxy.translate.services import explanations
from ipvsproxy.translate.translation_settings import Settings
from tests.support import builders
from tests.support.builders import OTHER_NODE, dead, draining, endpoint
from tests.translate import strategies


def _explain(service: Service, *slices: EndpointSlice, settings: Settings | None = None) -> explanations.Explanation:
    return at_once(explanations.explaining(service, slices, builders.node_view(), settings or Settings()))


def _codes(service: Service, *slices: EndpointSlice) -> dict[str, tuple[str, str]]:
    """For each endpoint's address: why the endpoint gets no internal traffic, and why it gets no external traffic.

    A reason is empty if the endpoint gets this traffic.
    """
    (port,) = _explain(service, *slices).ports
    return {
        str(use.endpoint.address): tuple(why.code if why else "" for why in (use.internal, use.external))  # type: ignore[misc]
        for use in port.endpoints
    }


def test_each_endpoint_that_is_not_used_has_its_reason() -> None:
    explanation = _codes(
        builders.service(),
        builders.endpoint_slice(
            endpoint("10.244.0.1"), endpoint("10.244.0.2", ready=False), draining("10.244.0.3"), dead("10.244.0.4")
        ),
    )
    assert explanation == {
        "10.244.0.1": ("", ""),
        "10.244.0.2": ("not_ready",) * 2,
        "10.244.0.3": ("terminating",) * 2,
        "10.244.0.4": ("not_ready",) * 2,
    }


def test_a_local_policy_for_internal_or_external_traffic_does_not_affect_the_other_kind_of_traffic() -> None:
    both = builders.endpoint_slice(endpoint("10.244.0.1"), endpoint("10.244.1.1", OTHER_NODE))
    local = builders.service("web", builders.service_port(80, node_port=30080), external_local=True)
    assert _codes(local, both)["10.244.1.1"] == ("", "other_node")
    assert _codes(builders.service(internal_local=True), both)["10.244.1.1"] == ("other_node", "")


def test_an_endpoint_is_reported_as_unused_if_its_endpoint_slice_lacks_the_service_port() -> None:
    (port,) = _explain(
        builders.service("web", builders.service_port(80, name="http")),
        builders.endpoint_slice(endpoint("10.244.0.1"), ports=[builders.endpoint_port(name="https")]),
    ).ports
    (use,) = port.endpoints
    assert use.internal is not None
    assert use.internal == use.external == ("no_such_port", "its EndpointSlice has no TCP port named 'http'")
    assert use.port == 0


def test_an_endpoint_is_reported_as_a_duplicate_if_another_endpoint_with_its_address_is_used() -> None:
    for other in (draining("10.244.0.1"), endpoint("10.244.0.1")):
        used, unused = builders.endpoint_slice(endpoint("10.244.0.1"), suffix="1"), builders.endpoint_slice(other, suffix="2")
        (port,) = _explain(builders.service(), used, unused).ports
        assert [use.internal and use.internal.code for use in port.endpoints] == [None, "duplicate"]


def test_endpoint_slices_of_a_family_without_a_cluster_ip_are_reported() -> None:
    item = builders.endpoint_slice(endpoint("fd00::1"))
    ((explanation, why),) = explanations.unserved_slices(builders.service(), [item], Settings())
    assert (explanation, why.code) == (item, "wrong_family")
    dual = builders.service(cluster=["10.96.0.10", "fd00:96::10"])
    ((_, why),) = explanations.unserved_slices(dual, [item], Settings(families=frozenset({Family.IPV4})))
    assert why.code == "family_not_served"
    assert list(explanations.unserved_slices(dual, [item], Settings())) == []


def test_service_ports_with_equal_numbers_have_only_their_own_virtual_servers() -> None:
    number = 30080
    service = builders.service(
        "web",
        builders.service_port(80, name="a", node_port=number),
        builders.service_port(80, Protocol.UDP, name="b"),
        builders.service_port(number, name="c"),
        kind=ServiceType.NODE_PORT,
    )
    explanation = [[(one.role, str(one.key)) for one in port.served.virtual_servers] for port in _explain(service).ports]
    assert explanation == [
        [(Role.CLUSTER_IP, "TCP 10.96.0.10:80"), (Role.NODE_PORT, "TCP 192.168.0.10:30080")],
        [(Role.CLUSTER_IP, "UDP 10.96.0.10:80")],
        [(Role.CLUSTER_IP, "TCP 10.96.0.10:30080")],
    ]


def test_an_explanation_shows_virtual_servers_and_endpoints_of_each_ip_family_separately() -> None:
    service = builders.service(cluster=["10.96.0.10", "fd00:96::10"])
    slices = [
        builders.endpoint_slice(endpoint("10.244.0.1"), suffix="4"),
        builders.endpoint_slice(endpoint("fd00::1"), suffix="6"),
    ]
    explanation = _explain(service, *slices)
    assert [port.served.family for port in explanation.ports] == [Family.IPV4, Family.IPV6]
    assert [[str(use.endpoint.address) for use in port.endpoints] for port in explanation.ports] == [["10.244.0.1"], ["fd00::1"]]
    assert [[str(one.key) for one in port.served.virtual_servers] for port in explanation.ports] == [
        ["TCP 10.96.0.10:80"],
        ["TCP [fd00:96::10]:80"],
    ]
    assert explanation.skipped == {}


def test_the_explanation_of_an_unserved_service_has_the_reason_but_no_ports() -> None:
    why = Skipped("spec.clusterIP", "headless: clients reach the endpoints directly", invalid=False)
    explanation = _explain(Service(name=builders.service().name, options=ServiceOptions(not_served=why)))
    assert explanation.ports == ()
    assert explanation.skipped == {"": (why,)}


@hypothesis.given(
    endpoints=st.lists(strategies.ENDPOINTS, max_size=5), internal_local=st.booleans(), external_local=st.booleans()
)
def test_an_explanation_shows_an_endpoint_as_used_exactly_if_it_is_a_real_server(
    *, endpoints: list[Endpoint], internal_local: bool, external_local: bool
) -> None:
    service = builders.service(external=["192.0.2.1"], internal_local=internal_local, external_local=external_local)
    explanation = _explain(service, builders.endpoint_slice(*endpoints, family=Family.IPV4))
    (port,) = explanation.ports
    for served in port.served.virtual_servers:
        reasons = [use.internal if served.role is Role.CLUSTER_IP else use.external for use in port.endpoints]
        used = {
            RealServerKey.of(use.endpoint.address, use.port)
            for use, why in zip(port.endpoints, reasons, strict=True)
            if why is None
        }
        assert used == served.real_servers


def test_the_explanation_of_many_endpoints_pauses_so_that_other_tasks_can_run() -> None:
    count = 3 * explanations.ENDPOINTS_AT_ONCE
    item = builders.endpoint_slice(*(endpoint(f"10.244.0.{number + 1}") for number in range(count)))
    pauses = len(list(explanations.explaining(builders.service(), [item], builders.node_view(), Settings())))
    assert pauses == 1 + count // explanations.ENDPOINTS_AT_ONCE
    (port,) = _explain(builders.service(), item).ports
    assert len(port.endpoints) == count
