"""The fields of an EndpointSlice that are used, and the reasons why other fields are not used."""

from typing import Any

import hypothesis
import msgspec
import pytest
from hypothesis import strategies as st

from ipvsproxy.model.net import Family, Protocol, parse_address
from ipvsproxy.model.service import Conditions, Endpoint, EndpointPort, EndpointSlice, EndpointSliceName, ServiceName, Skipped
from ipvsproxy.translate.api import parse, schema
from tests.support import builders
from tests.translate import strategies

NAME = ServiceName("shop", "web")


def _reasons(parsed: EndpointSlice) -> list[str]:
    return [str(skipped) for skipped in parsed.skipped]


def _slice(document: dict[str, Any], **choices: bool) -> EndpointSlice:
    defaults = {"metadata": {"labels": {"kubernetes.io/service-name": "web"}}, "addressType": "IPv4"}
    raw = msgspec.convert(defaults | document, schema.EndpointSliceJson)
    return parse.parse_endpoint_slice(raw, EndpointSliceName("shop", "web-1"), **choices)


def _wide_slice(addresses: list[str]) -> EndpointSlice:
    return _slice({"endpoints": [{"addresses": [address]} for address in addresses]})


@pytest.mark.parametrize("beyond", [0, 1])
def test_only_the_first_1000_endpoints_of_a_slice_are_used_because_the_api_allows_no_more(beyond: int) -> None:
    parsed = _wide_slice([f"10.{number >> 8}.{number & 255}.1" for number in range(parse.MOST_ENDPOINTS + beyond)])
    assert len(parsed.endpoints) == 1000
    assert parsed.endpoints[-1].address == parse_address("10.3.231.1")
    assert _reasons(parsed) == ["endpoints: 1001 of them; the first 1000 are used, the API allows no more"] * beyond


@pytest.mark.parametrize(
    ("count", "last"), [(20, "endpoints[19].addresses[0]: 'x19' is not an IP address"), (21, None), (500, None)]
)
def test_the_first_20_unusable_parts_of_a_slice_are_reported_and_further_parts_are_only_counted(
    count: int, last: str | None
) -> None:
    reasons = _reasons(_wide_slice([f"x{number}" for number in range(count)]))
    assert reasons[0] == "endpoints[0].addresses[0]: 'x0' is not an IP address"
    counted = f"endpoints[20].addresses[0]: 'x20' is not an IP address; {count - 20} such parts from here on"
    assert reasons[-1] == (last or counted)
    assert len(reasons) == min(count, 21)


@pytest.mark.parametrize("port", [1, 65535])
def test_the_lowest_and_the_highest_port_number_are_valid(port: int) -> None:
    assert [one.port for one in _slice({"ports": [{"name": "", "port": port}]}).ports] == [port]


def test_an_endpoint_slice_belongs_to_the_service_that_its_label_names() -> None:
    parsed = _slice({})
    assert (parsed.name, parsed.service) == (EndpointSliceName("shop", "web-1"), NAME)
    assert parsed.skipped == ()


@pytest.mark.parametrize("metadata", [None, {}, {"labels": None}, {"labels": {"kubernetes.io/service-name": ""}}])
def test_an_endpoint_slice_without_the_service_name_label_belongs_to_no_service(metadata: dict[str, Any] | None) -> None:
    parsed = _slice({"metadata": metadata})
    assert parsed.service is None
    assert _reasons(parsed) == ["metadata.labels: kubernetes.io/service-name is missing: it belongs to no Service"]


def test_an_endpoint_slice_with_the_headless_label_is_ignored() -> None:
    labels = {"kubernetes.io/service-name": "web", "service.kubernetes.io/headless": ""}
    parsed = _slice({"metadata": {"labels": labels}})
    assert parsed.service is None
    assert parsed.skipped == (Skipped("metadata.labels", "service.kubernetes.io/headless: not for proxies", invalid=False),)


def test_the_proxy_name_label_has_no_effect_on_an_endpoint_slice() -> None:
    labels = {"kubernetes.io/service-name": "web", "service.kubernetes.io/service-proxy-name": "other-proxy"}
    assert _slice({"metadata": {"labels": labels}}).service == NAME


@pytest.mark.parametrize(
    ("address_type", "skipped"),
    [
        ("FQDN", Skipped("addressType", "FQDN has no addresses", invalid=False)),
        ("IPv9", Skipped("addressType", "'IPv9' is none of IPv4, IPv6")),
        (None, Skipped("addressType", "'None' is none of IPv4, IPv6")),
    ],
)
def test_an_endpoint_slice_with_an_address_type_other_than_ipv4_and_ipv6_has_no_endpoints(
    address_type: str | None, skipped: Skipped
) -> None:
    parsed = _slice({"addressType": address_type, "endpoints": [{"addresses": ["10.244.0.5"]}]})
    assert (parsed.family, parsed.endpoints, parsed.skipped) == (None, (), (skipped,))


def test_an_endpoint_port_has_a_number_a_name_and_a_protocol() -> None:
    ports = [{"name": "http", "port": 8080}, {"name": "", "port": 53, "protocol": "UDP"}]
    assert _slice({"ports": ports}).ports == (EndpointPort("http", Protocol.TCP, 8080), EndpointPort("", Protocol.UDP, 53))


@pytest.mark.parametrize(
    ("port", "reason"),
    [
        ({"port": 80}, "ports[0].name: is missing"),
        ({"name": "", "port": None}, "ports[0].port: None is outside 1..65535"),
        ({"name": "", "port": 0}, "ports[0].port: 0 is outside 1..65535"),
        ({"name": "", "port": 65536}, "ports[0].port: 65536 is outside 1..65535"),
        ({"name": "", "port": 80, "protocol": "ICMP"}, "ports[0].protocol: 'ICMP' is none of TCP, UDP, SCTP"),
    ],
)
def test_an_invalid_port_of_an_endpoint_slice_does_not_affect_its_other_ports(port: dict[str, Any], reason: str) -> None:
    parsed = _slice({"ports": [port, {"name": "good", "port": 81}]})
    assert parsed.ports == (EndpointPort("good", Protocol.TCP, 81),)
    assert _reasons(parsed) == [reason]


def test_endpoint_slices_with_equal_ports_share_one_object_for_their_ports() -> None:
    ports = [{"name": "http", "port": 8080}]
    assert _slice({"ports": ports}).ports is _slice({"ports": ports}).ports


@pytest.mark.parametrize("count", [parse.FEW_PORTS, parse.FEW_PORTS + 1])
def test_the_number_of_ports_does_not_change_how_they_are_parsed(count: int) -> None:
    ports = [{"name": f"p{number}", "port": number} for number in range(count)]
    parsed = _slice({"ports": ports})
    assert parsed.ports == tuple(builders.endpoint_port(number, name=f"p{number}") for number in range(1, count))
    assert _reasons(parsed) == ["ports[0].port: 0 is outside 1..65535"]


def test_an_absent_port_name_in_a_manifest_counts_as_the_empty_name() -> None:
    assert _slice({"ports": [{"port": 80}]}, default_port_names=True).ports == (EndpointPort("", Protocol.TCP, 80),)


@pytest.mark.parametrize(
    ("conditions", "expected"),
    [
        (None, (True, True, False)),
        ({}, (True, True, False)),
        ({"ready": None, "serving": None, "terminating": None}, (True, True, False)),
        ({"ready": False}, (False, True, False)),
        ({"ready": False, "serving": False}, (False, False, False)),
        ({"ready": False, "serving": True, "terminating": True}, (False, True, True)),
    ],
)
def test_absent_conditions_of_an_endpoint_have_the_defaults_of_the_api(
    conditions: dict[str, Any] | None, expected: tuple[bool, bool, bool]
) -> None:
    (endpoint,) = _slice({"endpoints": [{"addresses": ["10.244.0.5"], "conditions": conditions}]}).endpoints
    found = endpoint.conditions
    assert (found.ready, found.serving, found.terminating) == expected


def test_equal_endpoints_of_one_node_share_one_object_for_their_conditions() -> None:
    entries = [{"addresses": [f"10.244.0.{number}"], "nodeName": f"node-{number % 2}"} for number in range(4)]
    first, second, third, fourth = _slice({"endpoints": entries}).conditions
    assert first is third
    assert second is fourth
    assert (first.node_name, second.node_name) == ("node-0", "node-1")


def test_parsing_an_endpoint_keeps_its_first_address_and_its_node_and_its_zone_and_its_hints() -> None:
    hints = {"forZones": [{"name": "zone-a"}, {"name": ""}, {}], "forNodes": [{"name": "node-a"}]}
    entry = {"addresses": ["010.244.0.5", "10.244.0.6"], "nodeName": "node-a", "hints": hints, "zone": "zone-b"}
    expected = Conditions(node_name="node-a", zone_hints=frozenset({"zone-a"}), node_hints=frozenset({"node-a"}), zone="zone-b")
    assert _slice({"endpoints": [entry]}).endpoints == (Endpoint(parse_address("10.244.0.5"), expected),)


@pytest.mark.parametrize(
    ("addresses", "reason"),
    [
        ([], "endpoints[0].addresses: is empty"),
        (None, "endpoints[0].addresses: is empty"),
        (["10.244.0"], "endpoints[0].addresses[0]: '10.244.0' is not an IP address"),
        (["fd00::5"], "endpoints[0].addresses[0]: fd00::5 is not an IPv4 address"),
    ],
)
def test_an_invalid_endpoint_does_not_affect_the_other_endpoints(addresses: list[str] | None, reason: str) -> None:
    parsed = _slice({"endpoints": [{"addresses": addresses}, {"addresses": ["10.244.0.6"]}]})
    assert [endpoint.address for endpoint in parsed.endpoints] == [parse_address("10.244.0.6")]
    assert _reasons(parsed) == [reason]


def test_an_ipv6_slice_has_ipv6_endpoints() -> None:
    parsed = _slice({"addressType": "IPv6", "endpoints": [{"addresses": ["fd00::5"]}]})
    assert (parsed.family, parsed.endpoints[0].address) == (Family.IPV6, parse_address("fd00::5"))


def test_the_trigger_time_of_an_endpoint_slice_is_the_time_in_its_annotation() -> None:
    annotations = {"endpoints.kubernetes.io/last-change-trigger-time": "1970-01-01T00:00:01.123456789Z"}
    assert _slice({"metadata": {"annotations": annotations}}).trigger_s == 1.123456
    assert _slice({"metadata": {"annotations": {}}}).trigger_s == 0
    assert _slice({}).trigger_s == 0


def test_parsed_endpoint_slices_that_differ_only_in_their_trigger_time_are_equal() -> None:
    annotations = {"endpoints.kubernetes.io/last-change-trigger-time": "2026-01-02T03:04:05Z"}
    labels = {"kubernetes.io/service-name": "web"}
    assert _slice({"metadata": {"labels": labels, "annotations": annotations}}) == _slice({"metadata": {"labels": labels}})


@hypothesis.given(strategies.documents(schema.EndpointSliceJson), st.booleans())
def test_any_endpoint_slice_document_is_parsed_without_an_error(document: dict[str, Any], default_port_names: bool) -> None:  # noqa: FBT001 - drawn
    parsed = _slice(document, default_port_names=default_port_names)
    assert all(endpoint.address.family is parsed.family for endpoint in parsed.endpoints)
    assert all(0 < port.port <= 65535 for port in parsed.ports)


_USUAL = st.fixed_dictionaries({"addresses": st.sampled_from([["10.244.0.5"], ["10.244.0.6", "10.244.0.7"], ["fd00::5"]])})


@hypothesis.given(st.sampled_from(["IPv4", "IPv6"]), st.lists(_USUAL | strategies.documents(schema.EndpointJson), max_size=4))
def test_the_result_for_an_endpoint_does_not_depend_on_the_other_endpoints_of_its_slice(
    family: str, endpoints: list[dict[str, Any]]
) -> None:
    parsed = _slice({"addressType": family, "endpoints": endpoints})
    alone = [_slice({"addressType": family, "endpoints": [one]}) for one in endpoints]
    assert parsed.addresses == b"".join(one.addresses for one in alone)
    assert parsed.conditions == tuple(conditions for one in alone for conditions in one.conditions)
    assert [skipped.reason for skipped in parsed.skipped] == [skipped.reason for one in alone for skipped in one.skipped]


OURS, CILIUM = "ipvsproxy.io/weight", "service.cilium.io/weight"
IGNORED = Skipped(f"metadata.annotations[{CILIUM}]", f"only 0 means the same as {OURS}, which other weights need", invalid=False)


@pytest.mark.parametrize(
    ("annotations", "weight", "skipped"),
    [
        ({OURS: "7"}, 7, ()),
        ({OURS: "70000"}, None, (Skipped(f"metadata.annotations[{OURS}]", "'70000' is not a number in 0..65535"),)),
        ({CILIUM: " 0"}, 0, ()),
        *(({CILIUM: text}, None, (IGNORED,)) for text in ("1", "50", "none", "")),
        *(({OURS: "7", CILIUM: text}, 7, ()) for text in ("0", "50")),
    ],
)
def test_our_annotation_sets_the_weight_of_a_slices_endpoints_and_ciliums_can_only_set_0(
    annotations: dict[str, str], weight: int | None, skipped: tuple[Skipped, ...]
) -> None:
    endpoints = [{"addresses": [address], "nodeName": node} for address, node in (("10.244.0.1", "a"), ("10.244.0.2", "b"))]
    metadata = {"labels": {"kubernetes.io/service-name": "web"}, "annotations": annotations}
    parsed = _slice({"metadata": metadata, "endpoints": endpoints})
    assert [(one.conditions.weight, one.conditions.node_name) for one in parsed.endpoints] == [(weight, "a"), (weight, "b")]
    assert parsed.skipped == skipped
