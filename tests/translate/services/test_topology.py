"""Which endpoints of a service port are used for traffic to any node, and for traffic that must stay on this node."""

import collections
import itertools

import hypothesis
import pytest
from hypothesis import strategies as st

from ipvsproxy.model.net import Protocol
from ipvsproxy.model.real_servers import RealServerKey
from ipvsproxy.model.service import Conditions, Endpoint, EndpointPort
from ipvsproxy.translate.services import topology
from ipvsproxy.translate.services.topology import find_endpoints, slices_by_port
from tests.support import builders
from tests.support.builders import OTHER_NODE, THIS_NODE, dead, draining, endpoint
from tests.translate import strategies

HERE, HERE_TOO, THERE, THERE_TOO = "10.244.0.1", "10.244.0.2", "10.244.1.1", "10.244.1.2"


def _scopes(*endpoints: Endpoint, zone: str) -> tuple[topology.Scope, topology.Scope]:
    """The endpoints for traffic that may leave this node, and those for traffic that must stay on it."""
    keyed: dict[bytes, Conditions] = {RealServerKey.of(item.address, 8080): item.conditions for item in endpoints}
    cluster, local = (
        topology.choose_routes(keyed, THIS_NODE, zone, internal_local=internal_local, external_local=False).internal.scope
        for internal_local in (False, True)
    )
    return cluster, local


def _address(key: bytes) -> str:
    return str(RealServerKey(key).address)


def _choose(*endpoints: Endpoint, zone: str = builders.ZONE) -> tuple[set[str], set[str]]:
    """The addresses of the endpoints in the scope for the whole cluster, and in the scope for this node."""
    keyed: dict[bytes, Conditions] = {RealServerKey.of(item.address, 8080): item.conditions for item in endpoints}
    cluster_used, local_used = (scope.used(keyed) for scope in _scopes(*endpoints, zone=zone))
    return {_address(key) for key in cluster_used}, {_address(key) for key in local_used}


@pytest.mark.parametrize(
    ("endpoints", "cluster", "local"),
    [
        pytest.param([], set(), set(), id="no endpoint"),
        pytest.param([endpoint(HERE), endpoint(THERE, OTHER_NODE)], {HERE, THERE}, {HERE}, id="all ready"),
        pytest.param([dead(HERE), dead(THERE, OTHER_NODE)], set(), set(), id="neither ready nor serving"),
        pytest.param([endpoint(HERE, ready=False, serving=True)], set(), set(), id="unready but not terminating"),
        pytest.param([draining(HERE), endpoint(THERE, OTHER_NODE)], {THERE}, {HERE}, id="only this node's terminating"),
        pytest.param([endpoint(HERE), draining(HERE_TOO), draining(THERE, OTHER_NODE)], {HERE}, {HERE}, id="one ready"),
        pytest.param([draining(HERE), draining(THERE, OTHER_NODE)], {HERE, THERE}, {HERE}, id="all terminating"),
    ],
)
def test_a_terminating_endpoint_that_serves_is_used_only_if_no_endpoint_is_ready(
    endpoints: list[Endpoint], cluster: set[str], local: set[str]
) -> None:
    assert _choose(*endpoints) == (cluster, local)


NEAR, FAR = endpoint(HERE, zones=["zone-a"]), endpoint(THERE, OTHER_NODE, zones=["zone-b"])
ON_NODE = endpoint(HERE, nodes=[THIS_NODE], zones=["zone-a"])


@pytest.mark.checklist(97, 98)
@pytest.mark.parametrize(
    ("endpoints", "zone", "used"),
    [
        ([NEAR, FAR], "zone-a", {HERE}),
        ([NEAR, FAR], "zone-b", {THERE}),
        ([NEAR, FAR], "zone-c", {HERE, THERE}),
        ([NEAR, FAR], "", {HERE, THERE}),
        ([NEAR, endpoint(THERE, OTHER_NODE)], "zone-a", {HERE, THERE}),
        ([NEAR, FAR, dead(THERE_TOO, OTHER_NODE)], "zone-a", {HERE}),
        ([FAR, endpoint(HERE, ready=False, zones=["zone-a"])], "zone-a", {THERE}),
        ([endpoint(THERE, OTHER_NODE, zones=["zone-b", "zone-a"]), endpoint(HERE, zones=["zone-b"])], "zone-a", {THERE}),
        ([draining(HERE), draining(THERE, OTHER_NODE, zones=["zone-b"])], "zone-a", {HERE, THERE}),
        ([ON_NODE, endpoint(THERE, OTHER_NODE, nodes=[OTHER_NODE], zones=["zone-a"])], "zone-a", {HERE}),
        ([ON_NODE, endpoint(HERE_TOO, zones=["zone-a"]), FAR], "zone-a", {HERE, HERE_TOO}),
        (
            [
                endpoint(THERE, OTHER_NODE, nodes=[OTHER_NODE], zones=["zone-a"]),
                endpoint(THERE_TOO, "node-c", nodes=["node-c"], zones=["zone-b"]),
            ],
            "zone-a",
            {THERE},
        ),
    ],
)
def test_hints_of_a_kind_count_if_all_ready_endpoints_have_them_and_node_hints_take_precedence(
    endpoints: list[Endpoint], zone: str, used: set[str]
) -> None:
    assert _choose(*endpoints, zone=zone)[0] == used


@pytest.mark.checklist(99)
def test_a_local_endpoint_is_used_with_policy_local_even_if_its_hints_name_another_zone() -> None:
    hinted = endpoint(HERE, zones=["zone-b"]), endpoint(THERE, OTHER_NODE, zones=["zone-a"])
    assert _choose(*hinted) == ({THERE}, {HERE})


@hypothesis.given(st.lists(strategies.ENDPOINTS, max_size=6), st.sampled_from(["zone-a", "zone-b", ""]))
def test_traffic_goes_only_to_usable_endpoints_and_is_refused_only_if_no_endpoint_is_usable(
    endpoints: list[Endpoint], zone: str
) -> None:
    keyed: dict[bytes, Conditions] = {RealServerKey.of(item.address, 8080): item.conditions for item in endpoints}
    usable = {key for key, item in keyed.items() if item.ready or (item.serving and item.terminating)}
    choice = topology.choose_routes(keyed, THIS_NODE, zone, internal_local=True, external_local=False)
    cluster, local = choice.external.weights.keys(), choice.internal.weights.keys()
    assert cluster <= usable
    assert local == {key for key in local if keyed[key].node_name == THIS_NODE}
    assert bool(usable) == bool(cluster)
    assert choice.lacks_local == (bool(usable) and not local)
    assert bool(local) == any(keyed[key].node_name == THIS_NODE for key in usable)
    for scope in (cluster, local):
        assert len({keyed[key].ready for key in scope}) <= 1, "ready and draining endpoints serve together"


@pytest.mark.parametrize(
    ("item", "reason"),
    [
        (endpoint(HERE_TOO, ready=False), topology.WhyNot.NOT_READY),
        (draining(HERE_TOO), topology.WhyNot.TERMINATING),
        (endpoint(HERE_TOO, ready=False, serving=False, terminating=True), topology.WhyNot.NOT_SERVING),
        (endpoint(HERE_TOO, zones=["zone-b"]), topology.WhyNot.HINT_FOR_OTHER_ZONE),
    ],
)
def test_each_unused_endpoint_has_a_reason(item: Endpoint, reason: topology.WhyNot) -> None:
    cluster, _ = _scopes(endpoint(HERE, zones=["zone-a"]), item, zone="zone-a")
    assert cluster.why_not(item.conditions) is reason


def test_for_an_unready_endpoint_of_another_node_the_local_scope_gives_the_node_as_the_reason() -> None:
    there = dead(THERE, OTHER_NODE)
    _, local = _scopes(endpoint(HERE), there, zone="")
    assert local.why_not(there.conditions) is topology.WhyNot.OTHER_NODE


def test_the_reason_why_an_endpoint_is_unused_says_that_its_node_hint_names_another_node() -> None:
    there = endpoint(THERE, OTHER_NODE, nodes=[OTHER_NODE])
    cluster, _ = _scopes(endpoint(HERE, nodes=[THIS_NODE]), there, zone="")
    assert cluster.why_not(there.conditions) is topology.WhyNot.HINT_FOR_OTHER_NODE


def test_each_real_server_whatever_its_address_comes_first_on_about_the_same_number_of_nodes() -> None:
    keys = [builders.backend(text) for text in (*(f"10.244.7.{number}" for number in range(1, 10)), "10.244.200.1")]
    first = collections.Counter(next(iter(topology.in_order(keys, f"node-{number}"))) for number in range(2000))
    assert len(first) == 10
    assert all(120 < count < 300 for count in first.values()), "of ten, each comes first on a tenth of them"


def test_a_node_rarely_orders_two_endpoints_of_the_same_host_next_to_each_other() -> None:
    """If endpoints of one host were adjacent, a few consecutive connections would all go to the same host."""
    keys = [builders.backend(f"10.244.{host}.{number}") for host in range(4) for number in range(1, 6)]
    neighbours = 0
    for number in range(100):
        hosts = [key.address[2] for key in topology.in_order(keys, f"node-{number}")]
        neighbours += sum(one == other for one, other in itertools.pairwise(hosts))
    assert neighbours / 100 < 6, "of 19 pairs, 4 by chance; sorted, it would be 15 or 16"


def test_the_real_server_that_comes_first_on_a_node_differs_from_service_to_service() -> None:
    first: collections.Counter[int] = collections.Counter()
    for service in range(2000):
        keys = [builders.backend(f"10.{service >> 8}.{service & 255}.{number}") for number in range(1, 11)]
        first[keys.index(next(iter(topology.in_order(keys, "node-1"))))] += 1
    assert len(first) == 10
    assert all(120 < count < 300 for count in first.values()), "each rank comes first in a tenth of them"


@pytest.mark.parametrize("count", [0, 1, 2, 3, 512])
def test_the_order_has_every_endpoint_once_and_does_not_depend_on_the_input_order(count: int) -> None:
    keys = [builders.backend(f"10.244.{number >> 8}.{number & 255}") for number in range(count)]
    found = list(topology.in_order(keys, THIS_NODE))
    assert sorted(found) == sorted(keys)
    assert list(topology.in_order(keys[::-1], THIS_NODE)) == found


PORT = builders.service_port(80, name="http")


def test_the_running_pod_is_used_if_an_endpoint_slice_contains_an_address_twice() -> None:
    twice = [draining("10.244.0.1"), endpoint("10.244.0.1"), draining("10.244.0.1"), endpoint("10.244.0.2")]
    for endpoints, expected in ((twice, ["10.244.0.1", "10.244.0.2"]), (twice[:2], ["10.244.0.1"])):
        item = builders.endpoint_slice(*endpoints, ports=[EndpointPort("http", Protocol.TCP, 8080)])
        found = find_endpoints(slices_by_port([item]), PORT)
        assert [_address(key) for key in found] == expected
        assert not any(one.terminating for one in found.values())
