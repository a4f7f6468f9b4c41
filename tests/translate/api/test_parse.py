"""Tests which fields of a Service are used, and which reasons are given for unused fields. Nodes: ``test_parse_node.py``."""

from typing import Any

import hypothesis
import msgspec
import pytest

from ipvsproxy.model.net import Address, Protocol
from ipvsproxy.model.service import Service, ServiceName, ServicePort, ServiceType, Skipped
from ipvsproxy.translate.api import parse, schema
from tests.support import builders
from tests.translate import strategies

NAME = ServiceName("shop", "web")


def _service(
    spec: dict[str, Any] | None = None, status: dict[str, Any] | None = None, metadata: dict[str, Any] | None = None
) -> Service:
    """A Service whose spec has a cluster IP and one port, in addition to the given fields."""
    defaults = {"clusterIP": "10.96.0.10", "ports": [{"port": 80}]}
    document = {"metadata": metadata, "spec": defaults | (spec or {}), "status": status}
    return parse.parse_service(msgspec.convert(document, schema.ServiceJson), NAME)


def _reasons(parsed: Service) -> list[str]:
    return [str(skipped) for skipped in parsed.skipped]


def test_a_service_has_a_name_a_creation_time_and_a_type() -> None:
    service = _service({"type": "NodePort"}, metadata={"uid": "u-1", "creationTimestamp": "1970-01-02T00:00:00Z"})
    assert (service.name, service.uid, service.created_s, service.options.type) == (NAME, "u-1", 86400, ServiceType.NODE_PORT)
    assert service.not_served is None
    assert service.skipped == ()


def test_the_name_of_a_service_may_begin_with_a_digit() -> None:
    raw = msgspec.convert({"spec": {"clusterIP": "10.96.0.10", "ports": [{"port": 80}]}}, schema.ServiceJson)
    named = parse.parse_service(raw, ServiceName("shop", "9-lives"))
    assert (str(named.name), named.skipped, named.not_served) == ("shop/9-lives", (), None)
    assert named.cluster_addresses == _service().cluster_addresses


def test_a_service_that_is_not_served_still_has_its_name_uid_and_type() -> None:
    service = _service({"type": "ExternalName"}, metadata={"uid": "u-1"})
    assert (service.name, service.uid, service.options.type) == (NAME, "u-1", ServiceType.EXTERNAL_NAME)


def test_a_service_of_unknown_type_is_served_as_cluster_ip_and_its_unknown_type_is_reported() -> None:
    service = _service({"type": "Tunnel"})
    assert service.options.type is ServiceType.CLUSTER_IP
    assert service.cluster_addresses == builders.addresses("10.96.0.10")
    assert _reasons(service) == ["spec.type: 'Tunnel' is not known; served as ClusterIP"]


@pytest.mark.checklist(47)
@pytest.mark.parametrize("ports", [[{"port": 1234}], [], [{"port": 1234, "protocol": "SCTP"}]])
@pytest.mark.parametrize("where", [{"clusterIP": "None"}, {"clusterIP": None, "clusterIPs": ["None"]}])
def test_a_headless_service_is_valid_but_not_served(ports: list[Any], where: dict[str, Any]) -> None:
    service = _service({"ports": ports} | where)
    assert service.not_served == Skipped("spec.clusterIP", "headless: clients reach the endpoints directly", invalid=False)
    assert service.ports == ()


@pytest.mark.checklist(48)
def test_an_external_name_service_is_not_served_even_if_it_has_a_cluster_ip() -> None:
    service = _service({"type": "ExternalName", "clusterIP": "172.16.55.4", "externalName": "foo2.bar.com"})
    assert service.not_served == Skipped("spec.type", "ExternalName: resolved by DNS, not served by a proxy", invalid=False)


def test_a_service_whose_cluster_ip_has_not_been_allocated_is_not_served_yet() -> None:
    not_served = _service({"clusterIP": ""}).not_served
    assert not_served == Skipped("spec.clusterIP", "no cluster IP has been allotted", invalid=False)


@pytest.mark.parametrize("name", ["other-proxy", ""])
def test_a_service_with_the_label_for_another_proxy_is_not_served_even_if_the_label_is_empty(name: str) -> None:
    not_served = _service(metadata={"labels": {"service.kubernetes.io/service-proxy-name": name}}).not_served
    assert not_served == Skipped("metadata.labels", f"service-proxy-name gives it to {name!r}", invalid=False)


def test_the_headless_label_has_no_effect_on_a_service() -> None:
    assert _service(metadata={"labels": {"service.kubernetes.io/headless": ""}}).not_served is None


def test_a_reason_is_given_for_each_cluster_ip_if_no_cluster_ip_of_a_service_is_usable() -> None:
    service = _service({"clusterIP": "10.96.0.300", "clusterIPs": ["10.96.0.300", "fd00::x"], "externalIPs": ["192.0.2.1"]})
    assert service.not_served == Skipped("spec.clusterIPs", "none is a usable address")
    assert _reasons(service) == [
        "spec.clusterIPs: '10.96.0.300' is not an IP address",
        "spec.clusterIPs: 'fd00::x' is not an IP address",
    ]


def test_the_cluster_ips_of_a_dual_stack_service_keep_the_order_of_its_spec() -> None:
    service = _service({"clusterIPs": ["fd00:10:96::1", "10.96.0.10"]})
    assert service.cluster_addresses == builders.addresses("fd00:10:96::1", "10.96.0.10")


def test_an_address_is_skipped_but_not_reported_as_invalid_if_its_family_has_no_cluster_ip() -> None:
    spec = {"externalIPs": ["192.0.2.1", "2001:db8::1"]}
    status = {"loadBalancer": {"ingress": [{"ip": "2001:db8::2"}, {"ip": "192.0.2.2"}]}}
    assert _service(spec, status).skipped == (
        Skipped("spec.externalIPs", "2001:db8::1: the Service has no cluster IP of IPv6", invalid=False),
        Skipped("status.loadBalancer.ingress", "2001:db8::2: the Service has no cluster IP of IPv6", invalid=False),
    )
    assert [one.field for one in _service(spec).skipped] == ["spec.externalIPs"]
    assert [one.field for one in _service(None, status).skipped] == ["status.loadBalancer.ingress"]
    both = {"clusterIPs": ["10.96.0.10", "fd00:10:96::10"]}
    assert _service(spec | both, status).skipped == ()


def test_a_second_cluster_ip_of_one_family_is_not_used() -> None:
    service = _service({"clusterIPs": ["10.96.0.10", "10.96.0.11"]})
    assert service.cluster_addresses == builders.addresses("10.96.0.10")
    assert _reasons(service) == ["spec.clusterIPs: 10.96.0.11: a second address of one family"]
    service = _service({"clusterIPs": ["fd00:10:96::1", "10.96.0.10", "10.96.0.11"]})
    assert service.cluster_addresses == builders.addresses("fd00:10:96::1", "10.96.0.10")
    assert _reasons(service) == ["spec.clusterIPs: 10.96.0.11: a second address of one family"]


def test_ports_of_all_protocols_keep_their_order_and_absent_fields_have_the_defaults_of_the_api() -> None:
    ports = [
        {"port": 80},
        {"name": "dns", "port": 53, "protocol": "UDP", "nodePort": 30053},
        {"name": "dns-tcp", "port": 53, "protocol": "TCP"},
        {"name": "sig", "port": 53, "protocol": "SCTP"},
    ]
    assert _service({"ports": ports}).ports == (
        ServicePort(name="", protocol=Protocol.TCP, port=80, node_port=0),
        ServicePort(name="dns", protocol=Protocol.UDP, port=53, node_port=30053),
        ServicePort(name="dns-tcp", protocol=Protocol.TCP, port=53),
        ServicePort(name="sig", protocol=Protocol.SCTP, port=53),
    )


def test_services_with_equal_ports_share_one_object_for_their_ports() -> None:
    ports = [{"name": "http", "port": 80}, {"name": "https", "port": 443}]
    assert _service({"ports": ports}).ports is _service({"ports": ports}).ports


@pytest.mark.parametrize("count", [parse.FEW_PORTS, parse.FEW_PORTS + 1])
def test_few_ports_and_many_ports_are_parsed_in_the_same_manner(count: int) -> None:
    ports = [{"name": f"p{number}", "port": number + 1} for number in range(count)]
    service = _service({"ports": [*ports[:-1], {"name": "bad", "port": 0}, ports[-1]][1:]})
    assert service.ports == tuple(builders.service_port(number + 1, name=f"p{number}") for number in range(1, count))
    assert _reasons(service) == [f"spec.ports[{count - 2}].port: 0 is outside 1..65535"]


@pytest.mark.parametrize(
    ("port", "reason"),
    [
        ({"port": 80, "protocol": "tcp"}, "spec.ports[1].protocol: 'tcp' is none of TCP, UDP, SCTP"),
        ({"name": "b"}, "spec.ports[1].port: 0 is outside 1..65535"),
        ({"name": "b", "port": 65536}, "spec.ports[1].port: 65536 is outside 1..65535"),
        ({"name": "b", "port": -1}, "spec.ports[1].port: -1 is outside 1..65535"),
        ({"name": "a", "port": 81}, "spec.ports[1].name: 'a' is a duplicate"),
        ({"name": "b", "port": 80}, "spec.ports[1].port: TCP 80 is a duplicate"),
    ],
)
def test_an_invalid_port_of_a_service_does_not_affect_its_other_ports(port: dict[str, Any], reason: str) -> None:
    service = _service({"ports": [{"name": "a", "port": 80}, port, {"name": "z", "port": 82}]})
    assert [item.port for item in service.ports] == [80, 82]
    assert _reasons(service) == [reason]


@pytest.mark.parametrize("port", [1, 65535])
def test_the_lowest_and_the_highest_port_number_are_valid(port: int) -> None:
    service = _service({"ports": [{"port": port, "nodePort": port}]})
    assert service.ports == (ServicePort(name="", protocol=Protocol.TCP, port=port, node_port=port),)
    assert service.skipped == ()


def test_an_invalid_node_port_does_not_affect_the_port_of_the_service() -> None:
    service = _service({"ports": [{"port": 80, "nodePort": 70000}]})
    assert service.ports == (ServicePort(name="", protocol=Protocol.TCP, port=80, node_port=0),)
    assert _reasons(service) == ["spec.ports[0].nodePort: 70000 is outside 1..65535"]


def test_each_valid_external_address_is_parsed_once_and_each_invalid_address_is_reported() -> None:
    texts = ["192.0.2.1", " 192.0.2.2 ", "", "192.0.2.1", "nonsense", "2001:db8::1"]
    service = _service({"clusterIPs": ["10.96.0.10", "fd00:10:96::10"], "externalIPs": texts})
    assert service.options.external_addresses == builders.addresses("192.0.2.1", "192.0.2.2", "2001:db8::1")
    assert _reasons(service) == ["spec.externalIPs: 'nonsense' is not an IP address"]


@pytest.mark.checklist(39)
@pytest.mark.parametrize(
    ("mode", "served"), [({"ipMode": "VIP"}, True), ({}, True), ({"ipMode": "Proxy"}, False), ({"ipMode": "Magic"}, False)]
)
def test_a_load_balancer_address_is_served_if_its_ip_mode_is_vip_or_absent(mode: dict[str, str], *, served: bool) -> None:
    service = _service({"type": "LoadBalancer"}, {"loadBalancer": {"ingress": [{"ip": "1.2.3.4"} | mode]}})
    assert service.options.load_balancer_addresses == (builders.addresses("1.2.3.4") if served else ())


@pytest.mark.parametrize("status", [None, {}, {"loadBalancer": None}, {"loadBalancer": {"ingress": None}}])
def test_a_load_balancer_without_an_ingress_has_no_address(status: dict[str, Any] | None) -> None:
    assert _service(status=status).options.load_balancer_addresses == ()


def test_an_ingress_with_a_host_name_is_valid_but_not_used() -> None:
    service = _service(status={"loadBalancer": {"ingress": [{"hostname": "lb.example"}, {"ip": "1.2.3.4"}]}})
    assert service.options.load_balancer_addresses == builders.addresses("1.2.3.4")
    assert service.skipped == ()


def test_source_ranges_are_stored_without_blanks_or_host_bits_or_duplicates() -> None:
    ranges = [" 10.0.0.0/8", "10.1.2.3/8", "", "203.0.113.7/32", "2001:db8::/32", "10.0.0.0"]
    service = _service({"loadBalancerSourceRanges": ranges})
    assert service.options.source_ranges == builders.networks("10.0.0.0/8", "203.0.113.7/32", "2001:db8::/32")
    assert _reasons(service) == ["spec.loadBalancerSourceRanges: '10.0.0.0' is not a CIDR range such as 10.0.0.0/8"]


def test_source_ranges_without_a_valid_range_admit_no_client() -> None:
    service = _service({"loadBalancerSourceRanges": ["10.0.0.0", " "]})
    assert service.options.source_ranges == ()
    assert service.options.admits_nobody
    assert _reasons(service)[-1] == (
        "spec.loadBalancerSourceRanges: none is valid, so the load balancer's addresses admit no client"
    )


@pytest.mark.parametrize("ranges", [None, [], ["", " "], ["10.0.0.0", "192.0.2.0/24"], ["0.0.0.0/0"]])
def test_clients_are_admitted_if_source_ranges_are_absent_or_if_at_least_one_of_them_is_valid(ranges: list[str] | None) -> None:
    assert not _service({"loadBalancerSourceRanges": ranges}).options.admits_nobody


@pytest.mark.parametrize(
    ("spec", "timeout_s"),
    [
        ({}, 0),
        ({"sessionAffinity": "None", "sessionAffinityConfig": {"clientIP": {"timeoutSeconds": 5}}}, 0),
        ({"sessionAffinity": "ClientIP"}, 10800),
        ({"sessionAffinity": "ClientIP", "sessionAffinityConfig": {}}, 10800),
        ({"sessionAffinity": "ClientIP", "sessionAffinityConfig": {"clientIP": {}}}, 10800),
        ({"sessionAffinity": "ClientIP", "sessionAffinityConfig": {"clientIP": {"timeoutSeconds": 1}}}, 1),
        ({"sessionAffinity": "ClientIP", "sessionAffinityConfig": {"clientIP": {"timeoutSeconds": 86400}}}, 86400),
    ],
)
def test_session_affinity_lasts_three_hours_by_default(spec: dict[str, Any], timeout_s: int) -> None:
    assert _service(spec).options.affinity_timeout_s == timeout_s


@pytest.mark.parametrize("timeout_s", [86401, 0, -1])
def test_an_affinity_timeout_of_zero_or_of_more_than_a_day_is_replaced_by_the_default(timeout_s: int) -> None:
    service = _service({"sessionAffinity": "ClientIP", "sessionAffinityConfig": {"clientIP": {"timeoutSeconds": timeout_s}}})
    assert service.options.affinity_timeout_s == 10800
    assert _reasons(service) == [
        f"spec.sessionAffinityConfig.clientIP.timeoutSeconds: {timeout_s} is outside 1..86400; 10800 is used"
    ]


@pytest.mark.parametrize(
    ("spec", "is_local"),
    [
        ({"type": "LoadBalancer"}, True),
        ({"type": "NodePort"}, True),
        ({"type": "ClusterIP", "externalIPs": ["192.0.2.1"]}, True),
        ({"type": "ClusterIP"}, False),
    ],
)
def test_external_traffic_policy_is_only_used_for_services_that_can_be_reached_from_outside(
    spec: dict[str, Any], *, is_local: bool
) -> None:
    assert _service(spec | {"externalTrafficPolicy": "Local"}).options.external_traffic_local is is_local
    assert _service(spec | {"externalTrafficPolicy": "Cluster"}).options.external_traffic_local is False


def test_every_internal_traffic_policy_except_local_counts_as_cluster() -> None:
    assert _service({"internalTrafficPolicy": "Local"}).options.internal_traffic_local
    assert not _service({"internalTrafficPolicy": "Cluster"}).options.internal_traffic_local
    assert not _service().options.internal_traffic_local


@pytest.mark.parametrize(
    ("kind", "policy", "port"),
    [("LoadBalancer", "Local", 30000), ("LoadBalancer", "Cluster", 0), ("NodePort", "Local", 0)],
)
def test_only_a_load_balancer_with_external_traffic_policy_local_has_a_health_check_port(
    kind: str, policy: str, port: int
) -> None:
    spec = {"type": kind, "externalTrafficPolicy": policy, "healthCheckNodePort": 30000}
    assert _service(spec).options.health_check_node_port == port
    assert _service(spec | {"healthCheckNodePort": None}).options.health_check_node_port == 0


def test_a_health_check_port_with_an_invalid_number_is_reported() -> None:
    service = _service({"type": "LoadBalancer", "externalTrafficPolicy": "Local", "healthCheckNodePort": 65536})
    assert service.options.health_check_node_port == 0
    assert _reasons(service) == ["spec.healthCheckNodePort: 65536 is outside 1..65535"]


@hypothesis.given(strategies.documents(schema.ServiceJson))
def test_any_service_document_is_parsed_without_an_error(document: dict[str, Any]) -> None:
    service = parse.parse_service(msgspec.convert(document, schema.ServiceJson), NAME)
    assert service.not_served or service.cluster_addresses
    assert service.created_s >= 0
    assert all(0 < port.port <= 65535 and 0 <= port.node_port <= 65535 for port in service.ports)
    assert len({(port.protocol, port.port) for port in service.ports}) == len(service.ports)


@pytest.mark.parametrize(
    ("number", "addresses", "used"),
    [
        (20_000, {}, 20_000),
        (20_000, {"externalIPs": 3}, 20_000),
        (20_000, {"externalIPs": 4}, 16_384),
        (16_384, {"externalIPs": 4}, 16_384),
        (3, {"externalIPs": 40_000}, 1),
        (3, {"externalIPs": 70_000}, 0),
        (1_000, {"ingress": 10, "loadBalancerSourceRanges": 100}, 65),
        (500, {"ingress": 100, "loadBalancerSourceRanges": 10}, 65),
        (60_000, {"ingress": 1}, 60_000),
    ],
)
def test_only_the_first_ports_of_a_service_are_used_if_all_ports_need_too_many_set_entries(
    number: int, addresses: dict[str, int], used: int
) -> None:
    texts = {name: [str(Address((10 << 24 | one).to_bytes(4))) for one in range(count)] for name, count in addresses.items()}
    ranges = [f"{text}/32" for text in texts.get("loadBalancerSourceRanges", ())]
    service = _service(
        {
            "type": "LoadBalancer",
            "ports": [{"name": str(port), "port": port} for port in range(1, number + 1)],
            "externalIPs": texts.get("externalIPs"),
            "loadBalancerSourceRanges": ranges,
        },
        {"loadBalancer": {"ingress": [{"ip": text} for text in texts.get("ingress", ())]}},
    )
    assert len(service.ports) == used
    told = f"spec.ports: {number} of them would be more than 65536 entries of an ipset; the first {used} are used"
    assert _reasons(service) == ([] if used == number else [told])


def test_source_ranges_of_one_family_do_not_limit_the_number_of_ports_of_the_other_family() -> None:
    ranges = [f"10.{one >> 8}.{one & 255}.0/24" for one in range(1000)] + [f"2001:db8:{one:x}::/48" for one in range(1000)]
    ports = [{"name": str(port), "port": port} for port in range(1, 31)]
    spec = {"type": "LoadBalancer", "ports": ports, "loadBalancerSourceRanges": ranges, "clusterIPs": ["10.96.0.1", "fd00::1"]}
    service = _service(spec, {"loadBalancer": {"ingress": [{"ip": "192.0.2.1"}, {"ip": "2001:db8::1"}]}})
    assert len(service.ports) == 30
