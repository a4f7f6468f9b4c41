"""The used fields of a Service, and the reasons of unused ones. Nodes: ``test_parse_node.py``."""

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
    """A Service whose spec has, besides what is given, a cluster IP and one port."""
    defaults = {"clusterIP": "10.96.0.10", "ports": [{"port": 80}]}
    document = {"metadata": metadata, "spec": defaults | (spec or {}), "status": status}
    return parse.parse_service(msgspec.convert(document, schema.ServiceJson), NAME)


def _reasons(parsed: Service) -> list[str]:
    return [str(skipped) for skipped in parsed.skipped]


def test_a_service_is_named_dated_and_typed() -> None:
    service = _service({"type": "NodePort"}, metadata={"uid": "u-1", "creationTimestamp": "1970-01-02T00:00:00Z"})
    assert (service.name, service.uid, service.created_s, service.options.type) == (NAME, "u-1", 86400, ServiceType.NODE_PORT)
    assert service.not_served is None
    assert service.skipped == ()


def test_the_name_of_a_service_may_begin_with_a_digit() -> None:
    raw = msgspec.convert({"spec": {"clusterIP": "10.96.0.10", "ports": [{"port": 80}]}}, schema.ServiceJson)
    named = parse.parse_service(raw, ServiceName("shop", "9-lives"))
    assert (str(named.name), named.skipped, named.not_served) == ("shop/9-lives", (), None)
    assert named.cluster_addresses == _service().cluster_addresses


def test_list_names_a_service_that_is_not_served() -> None:
    service = _service({"type": "ExternalName"}, metadata={"uid": "u-1"})
    assert (service.name, service.uid, service.options.type) == (NAME, "u-1", ServiceType.EXTERNAL_NAME)


def test_a_service_without_a_type_is_a_cluster_ip() -> None:
    assert _service().options.type is ServiceType.CLUSTER_IP


def test_a_service_of_an_unknown_type_is_served_as_cluster_ip_with_a_reason() -> None:
    service = _service({"type": "Tunnel"})
    assert service.options.type is ServiceType.CLUSTER_IP
    assert service.cluster_addresses == builders.addresses("10.96.0.10")
    assert _reasons(service) == ["spec.type: 'Tunnel' is not known; served as ClusterIP"]


@pytest.mark.checklist(47)
@pytest.mark.parametrize("ports", [[{"port": 1234}], [], [{"port": 1234, "protocol": "SCTP"}]])
@pytest.mark.parametrize("where", [{"clusterIP": "None"}, {"clusterIP": None, "clusterIPs": ["None"]}])
def test_a_headless_service_is_not_served_and_is_no_fault(ports: list[Any], where: dict[str, Any]) -> None:
    service = _service({"ports": ports} | where)
    assert service.not_served == Skipped("spec.clusterIP", "headless: clients reach the endpoints directly", invalid=False)
    assert service.ports == ()


@pytest.mark.checklist(48)
def test_an_external_name_is_not_served_even_with_a_cluster_ip() -> None:
    service = _service({"type": "ExternalName", "clusterIP": "172.16.55.4", "externalName": "foo2.bar.com"})
    assert service.not_served == Skipped("spec.type", "ExternalName: a DNS matter", invalid=False)


def test_a_service_without_a_cluster_ip_is_not_served_yet() -> None:
    not_served = _service({"clusterIP": ""}).not_served
    assert not_served == Skipped("spec.clusterIP", "no cluster IP has been allotted", invalid=False)


@pytest.mark.parametrize("name", ["other-proxy", ""])
def test_a_service_labelled_for_another_proxy_is_not_served_whatever_the_labels_value(name: str) -> None:
    not_served = _service(metadata={"labels": {"service.kubernetes.io/service-proxy-name": name}}).not_served
    assert not_served == Skipped("metadata.labels", f"service-proxy-name gives it to {name!r}", invalid=False)


def test_the_headless_label_on_a_service_means_nothing_to_a_proxy() -> None:
    assert _service(metadata={"labels": {"service.kubernetes.io/headless": ""}}).not_served is None


def test_a_service_without_a_usable_cluster_ip_says_what_is_wrong_with_each() -> None:
    service = _service({"clusterIP": "10.96.0.300", "clusterIPs": ["10.96.0.300", "fd00::x"], "externalIPs": ["192.0.2.1"]})
    assert service.not_served == Skipped("spec.clusterIPs", "none is a usable address")
    assert _reasons(service) == [
        "spec.clusterIPs: '10.96.0.300' is not an IP address",
        "spec.clusterIPs: 'fd00::x' is not an IP address",
    ]


def test_cluster_ips_of_both_families_are_used_in_order() -> None:
    service = _service({"clusterIPs": ["fd00:10:96::1", "10.96.0.10"]})
    assert service.cluster_addresses == builders.addresses("fd00:10:96::1", "10.96.0.10")


def test_addresses_of_a_family_without_a_cluster_ip_are_named_and_are_no_fault() -> None:
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


def test_a_port_has_the_apis_defaults() -> None:
    assert _service({"ports": [{"port": 80}]}).ports == (ServicePort(name="", protocol=Protocol.TCP, port=80, node_port=0),)


def test_ports_of_all_protocols_are_used_in_order() -> None:
    ports = [
        {"name": "dns", "port": 53, "protocol": "UDP", "nodePort": 30053},
        {"name": "dns-tcp", "port": 53, "protocol": "TCP"},
        {"name": "sig", "port": 53, "protocol": "SCTP"},
    ]
    assert _service({"ports": ports}).ports == (
        ServicePort(name="dns", protocol=Protocol.UDP, port=53, node_port=30053),
        ServicePort(name="dns-tcp", protocol=Protocol.TCP, port=53),
        ServicePort(name="sig", protocol=Protocol.SCTP, port=53),
    )


def test_services_with_the_same_ports_share_them() -> None:
    ports = [{"name": "http", "port": 80}, {"name": "https", "port": 443}]
    assert _service({"ports": ports}).ports is _service({"ports": ports}).ports


@pytest.mark.parametrize("count", [parse.FEW_PORTS, parse.FEW_PORTS + 1])
def test_few_ports_and_many_are_read_alike(count: int) -> None:
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
def test_a_bad_port_costs_itself_only(port: dict[str, Any], reason: str) -> None:
    service = _service({"ports": [{"name": "a", "port": 80}, port, {"name": "z", "port": 82}]})
    assert [item.port for item in service.ports] == [80, 82]
    assert _reasons(service) == [reason]


@pytest.mark.parametrize("port", [1, 65535])
def test_the_first_and_the_last_port_are_ports(port: int) -> None:
    service = _service({"ports": [{"port": port, "nodePort": port}]})
    assert service.ports == (ServicePort(name="", protocol=Protocol.TCP, port=port, node_port=port),)
    assert service.skipped == ()


def test_a_bad_node_port_costs_the_node_port_only() -> None:
    service = _service({"ports": [{"port": 80, "nodePort": 70000}]})
    assert service.ports == (ServicePort(name="", protocol=Protocol.TCP, port=80, node_port=0),)
    assert _reasons(service) == ["spec.ports[0].nodePort: 70000 is outside 1..65535"]


def test_external_addresses_are_read_once_each_and_bad_ones_named() -> None:
    texts = ["192.0.2.1", " 192.0.2.2 ", "", "192.0.2.1", "nonsense", "2001:db8::1"]
    service = _service({"clusterIPs": ["10.96.0.10", "fd00:10:96::10"], "externalIPs": texts})
    assert service.options.external_addresses == builders.addresses("192.0.2.1", "192.0.2.2", "2001:db8::1")
    assert _reasons(service) == ["spec.externalIPs: 'nonsense' is not an IP address"]


@pytest.mark.checklist(39)
@pytest.mark.parametrize(
    ("mode", "served"), [({"ipMode": "VIP"}, True), ({}, True), ({"ipMode": "Proxy"}, False), ({"ipMode": "Magic"}, False)]
)
def test_a_load_balancer_address_is_served_in_mode_vip_or_without_a_mode(mode: dict[str, str], *, served: bool) -> None:
    service = _service({"type": "LoadBalancer"}, {"loadBalancer": {"ingress": [{"ip": "1.2.3.4"} | mode]}})
    assert service.options.load_balancer_addresses == (builders.addresses("1.2.3.4") if served else ())


@pytest.mark.parametrize("status", [None, {}, {"loadBalancer": None}, {"loadBalancer": {"ingress": None}}])
def test_without_an_ingress_there_is_no_load_balancer_address(status: dict[str, Any] | None) -> None:
    assert _service(status=status).options.load_balancer_addresses == ()


def test_an_ingress_that_is_a_host_name_is_a_dns_matter_and_no_fault() -> None:
    service = _service(status={"loadBalancer": {"ingress": [{"hostname": "lb.example"}, {"ip": "1.2.3.4"}]}})
    assert service.options.load_balancer_addresses == builders.addresses("1.2.3.4")
    assert service.skipped == ()


def test_source_ranges_are_trimmed_masked_and_read_once_each() -> None:
    ranges = [" 10.0.0.0/8", "10.1.2.3/8", "", "203.0.113.7/32", "2001:db8::/32", "10.0.0.0"]
    service = _service({"loadBalancerSourceRanges": ranges})
    assert service.options.source_ranges == builders.networks("10.0.0.0/8", "203.0.113.7/32", "2001:db8::/32")
    assert _reasons(service) == ["spec.loadBalancerSourceRanges: '10.0.0.0' is not a CIDR range such as 10.0.0.0/8"]


def test_source_ranges_without_any_valid_one_admit_no_client() -> None:
    service = _service({"loadBalancerSourceRanges": ["10.0.0.0", " "]})
    assert service.options.source_ranges == ()
    assert service.options.admits_nobody
    assert _reasons(service)[-1] == (
        "spec.loadBalancerSourceRanges: none is valid, so the load balancer's addresses admit no client"
    )


@pytest.mark.parametrize("ranges", [None, [], ["", " "], ["10.0.0.0", "192.0.2.0/24"], ["0.0.0.0/0"]])
def test_no_source_ranges_or_some_valid_ones_admit_clients(ranges: list[str] | None) -> None:
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
def test_an_affinity_longer_than_a_day_or_of_no_time_is_replaced_by_the_default(timeout_s: int) -> None:
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
def test_external_traffic_policy_counts_for_services_that_can_be_reached_from_outside(
    spec: dict[str, Any], *, is_local: bool
) -> None:
    assert _service(spec | {"externalTrafficPolicy": "Local"}).options.external_traffic_local is is_local
    assert _service(spec | {"externalTrafficPolicy": "Cluster"}).options.external_traffic_local is False


def test_internal_traffic_policy_is_cluster_unless_it_is_local() -> None:
    assert _service({"internalTrafficPolicy": "Local"}).options.internal_traffic_local
    assert not _service({"internalTrafficPolicy": "Cluster"}).options.internal_traffic_local
    assert not _service().options.internal_traffic_local


@pytest.mark.parametrize(
    ("kind", "policy", "port"),
    [("LoadBalancer", "Local", 30000), ("LoadBalancer", "Cluster", 0), ("NodePort", "Local", 0)],
)
def test_a_health_check_port_belongs_to_a_load_balancer_with_local_traffic(kind: str, policy: str, port: int) -> None:
    spec = {"type": kind, "externalTrafficPolicy": policy, "healthCheckNodePort": 30000}
    assert _service(spec).options.health_check_node_port == port
    assert _service(spec | {"healthCheckNodePort": None}).options.health_check_node_port == 0


def test_a_health_check_port_with_an_invalid_number_is_named() -> None:
    service = _service({"type": "LoadBalancer", "externalTrafficPolicy": "Local", "healthCheckNodePort": 65536})
    assert service.options.health_check_node_port == 0
    assert _reasons(service) == ["spec.healthCheckNodePort: 65536 is outside 1..65535"]


def test_of_a_bad_value_so_much_is_repeated_as_fits_a_line() -> None:
    service = _service({"type": "x" * 1000, "ports": [{"port": 80, "protocol": "y" * 1000}]})
    assert _reasons(service) == [
        f"spec.type: '{'x' * 64}' is not known; served as ClusterIP",
        f"spec.ports[0].protocol: '{'y' * 64}' is none of TCP, UDP, SCTP",
    ]


def test_an_empty_service_object_is_not_served() -> None:
    assert parse.parse_service(schema.ServiceJson(), NAME).not_served is not None


@hypothesis.given(strategies.documents(schema.ServiceJson))
def test_no_service_is_too_strange_to_parse(document: dict[str, Any]) -> None:
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
def test_a_service_that_multiplies_is_bounded_by_its_ports(number: int, addresses: dict[str, int], used: int) -> None:
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
