"""The endpoints of a service port, and which entry counts if slices have an address twice."""

import hypothesis
from hypothesis import strategies as st

from ipvsproxy.model.net import Protocol
from ipvsproxy.model.real_servers import RealServerKey
from ipvsproxy.model.service import Conditions, Endpoint, EndpointPort, EndpointSlice
from ipvsproxy.translate.services.endpoints import find_endpoints, slices_by_port
from tests.support import builders
from tests.support.builders import draining, endpoint

PORT = builders.service_port(80, name="http")
OTHERS = [EndpointPort("https", Protocol.TCP, 8443), EndpointPort("http", Protocol.UDP, 8081)]
ENDPOINTS = st.builds(
    lambda number, make: make(f"10.244.0.{number}"), st.integers(0, 5), st.sampled_from([endpoint, draining, builders.dead])
)
Some = list[tuple[list[Endpoint], list[EndpointPort]]]
PORTS = st.sampled_from([8080, 8080, 8080, 9090]).map(lambda number: EndpointPort("http", Protocol.TCP, number))


def _expected(slices: list[EndpointSlice]) -> dict[RealServerKey, Conditions]:
    """The same endpoints, computed one by one."""
    endpoints_found: dict[RealServerKey, Conditions] = {}
    for item in slices:
        for port in item.ports:
            for one in item.endpoints if (port.name, port.protocol) == ("http", Protocol.TCP) else ():
                key = RealServerKey.of(one.address, port.port)
                if key not in endpoints_found or not one.conditions.terminating:
                    endpoints_found[key] = one.conditions
    return endpoints_found


@hypothesis.given(st.lists(st.tuples(st.lists(ENDPOINTS, max_size=4), st.lists(PORTS, max_size=2)), max_size=3))
def test_endpoints_are_those_of_all_slices_with_the_port_each_once(some: Some) -> None:
    slices = [
        builders.endpoint_slice(*endpoints, suffix=str(number), ports=[*ports, *OTHERS])
        for number, (endpoints, ports) in enumerate(some)
    ]
    endpoints_found, expected = find_endpoints(slices_by_port(slices), PORT), _expected(slices)
    assert endpoints_found.by_key() == expected
    assert [stem + endpoints_found.suffix for stem in endpoints_found.stems] == list(expected), (
        "in the order in which the slices name them"
    )
    assert endpoints_found.split(endpoints_found.stems) == [(key.address, key.port) for key in expected], (
        "in the suffix or in each"
    )


def test_an_address_that_one_slice_names_twice_counts_once_and_the_pod_that_runs_counts() -> None:
    twice = [draining("10.244.0.1"), endpoint("10.244.0.1"), draining("10.244.0.1"), endpoint("10.244.0.2")]
    for endpoints, expected in ((twice, ["10.244.0.1", "10.244.0.2"]), (twice[:2], ["10.244.0.1"])):
        item = builders.endpoint_slice(*endpoints, ports=[EndpointPort("http", Protocol.TCP, 8080)])
        found = find_endpoints(slices_by_port([item]), PORT)
        assert [str(address) for address, _ in found.split(found.stems)] == expected
        assert not any(one.terminating for one in found.conditions)
