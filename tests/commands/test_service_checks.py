"""Checks of ``doctor`` that find what disturbs Services on this node although every Service is programmed correctly."""

import dataclasses
import socket
from collections.abc import Collection
from typing import Any

import msgspec
import pytest

from ipvsproxy.commands import service_checks
from ipvsproxy.commands.service_checks import Level
from ipvsproxy.kernel.rivals import BoundSocket, PortRule, Rivals, port_rules, sockets
from ipvsproxy.kernel.sysctls import SysctlDriver
from ipvsproxy.model.kernel import InterfaceAddress
from ipvsproxy.model.net import Protocol, parse_address, parse_network
from ipvsproxy.model.rules import Backend
from ipvsproxy.model.service import Service
from ipvsproxy.translate.translation_settings import LocalMode, Settings, TrafficScopes
from tests.support import builders

SERVICES = (
    builders.service("api", cluster=["10.244.0.1", "fd00:96::1"]),
    builders.service("web", cluster=["10.244.0.80"]),
    builders.service("headless", cluster=[]),
)


def _settings(*cluster_cidr: str, masquerade_all: bool = False, mode: LocalMode = LocalMode.CLUSTER_CIDR) -> Settings:
    return Settings(cluster_networks=builders.networks(*cluster_cidr), masquerade_all=masquerade_all, detect_local=mode)


INSIDE = "10.244.0.0/16 of --cluster-cidr has 2 cluster IPs in it, such as 10.244.0.1 of default/api: this host"


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (_settings("10.244.0.0/16", "fd00:244::/56"), [(Level.WARN, INSIDE)]),
        (_settings("10.245.0.0/16", "fd00:244::/56"), [(Level.OK, "no cluster IP lies in --cluster-cidr")]),
        (_settings("10.244.0.0/16", masquerade_all=True), []),
        (_settings("10.244.0.0/16", mode=LocalMode.NODE_CIDR), []),
        (_settings(), []),
    ],
    ids=["inside", "outside", "all packets are masqueraded", "another mode", "no range"],
)
def test_doctor_reports_a_service_range_inside_the_cluster_cidr(settings: Settings, expected: list[tuple[Level, str]]) -> None:
    found = [one for one in service_checks.judge(SERVICES, settings, ()) if one.topic == "cluster-cidr"]
    assert [(one.level, one.text[: len(INSIDE)]) for one in found] == expected


@pytest.mark.parametrize(
    ("networks", "node_addresses", "expected"),
    [
        ((), ("172.18.0.2", "10.244.1.1"), ["IPv4", "IPv6"]),
        (("10.244.1.0/24", "fd00:244:0:1::/64"), ("172.18.0.2", "10.244.1.1"), ["IPv6"]),
        (("10.244.1.0/24", "fd00:244:0:1::/64"), ("172.18.0.2", "10.244.1.1", "fd00:244:0:1::1"), []),
    ],
)
def test_doctor_warns_about_traffic_scopes_of_a_family_if_no_range_identifies_the_local_pods(
    networks: tuple[str, ...], node_addresses: tuple[str, ...], expected: list[str]
) -> None:
    settings = dataclasses.replace(_settings("10.244.0.0/16", "fd00:244::/56"), scopes=TrafficScopes.API)
    view = dataclasses.replace(
        builders.node_view(),
        pod_networks=builders.networks(*networks),
        elsewhere=frozenset(map(parse_address, node_addresses)),
        connected=(),
    )
    found = list(service_checks.judge_scopes(settings, view))
    assert [(one.level, one.topic, one.text.split()[1]) for one in found] == [(Level.WARN, "scopes", label) for label in expected]
    for other in (
        dataclasses.replace(settings, scopes=TrafficScopes.KUBE_PROXY),
        dataclasses.replace(settings, detect_local=LocalMode.INTERFACE_NAME_PREFIX),
    ):
        assert not list(service_checks.judge_scopes(other, view))


WEB = builders.service("web", builders.service_port(80, node_port=30080), external=["192.168.0.10"])
DNS = builders.service("dns", builders.service_port(53, Protocol.UDP), cluster=["10.96.0.53"])
ADDRESSES = (builders.interface_address("eth0", "192.168.0.10"), builders.interface_address("kube-ipvs0", "10.96.0.53"))
VIEW = builders.node_view()
SAVED = """\
*raw
-A PREROUTING -d 10.96.0.53/32 -p udp -m udp --dport 53 -j CT --notrack
-A OUTPUT -s 10.96.0.53/32 -p udp -m udp --sport 53 -j CT --notrack
-A PREROUTING -s 10.0.0.0/8 -j NOTRACK
*nat
-A KUBE-SEP-A -p tcp -m tcp --dport 30080 -j DNAT --to-destination 10.244.0.5:80
-A CNI-HOSTPORT-DNAT -p tcp -m comment --comment "dnat" -m multiport --dports 30080,8443 -j CNI-DN-1
-A CNI-DN-1 -p tcp -m tcp --dport 30080 -j DNAT --to-destination 10.244.0.5:80
-A DOCKER ! -d 127.0.0.0/8 ! -i docker0 -p tcp -m multiport --dports 8080:8090,9000 -j REDIRECT --to-ports 80
"""


def _collisions(*services: Service, addresses: Collection[InterfaceAddress] = ADDRESSES, **rivals: Any) -> list[str]:
    found = service_checks.collisions(services, VIEW, addresses, Rivals(**rivals), Settings())
    return [f"{one.service.name}: {one.text}" for one in found]


def test_rules_of_other_programs_are_read_with_their_ports_and_destinations() -> None:
    notrack, portmap, docker = port_rules(SAVED)
    assert notrack == PortRule(
        "-t raw -A PREROUTING -d 10.96.0.53/32 -p udp -m udp --dport 53 -j CT --notrack",
        True,
        Protocol.UDP,
        parse_network("10.96.0.53/32"),
        (range(53, 54),),
    )
    assert (portmap.exempts, portmap.destination, portmap.ports) == (False, None, (range(30080, 30081),))
    assert (docker.destination, docker.ports) == (None, (range(8080, 8091), range(9000, 9001)))


def test_doctor_reports_a_rule_of_another_program_if_the_rule_concerns_packets_to_a_service() -> None:
    rules = tuple(port_rules(SAVED))
    untracked, redirected = _collisions(DNS, WEB, rules=rules)
    assert untracked.startswith("dns: a rule exempts packets to UDP 10.96.0.53:53 from connection tracking, so")
    assert redirected.startswith(
        "web: a rule sends packets to TCP 192.168.0.10:30080 elsewhere before the Service gets them: -t nat -A CNI-DN-1"
    )
    nftables = service_checks.collisions([WEB], VIEW, ADDRESSES, Rivals(rules=rules), Settings(backend=Backend.NFTABLES))
    assert [one.text[:45] for one in nftables] == ["a rule is about TCP 192.168.0.10:30080, too, "]


@pytest.mark.parametrize(
    ("address", "port", "named"),
    [
        ("0.0.0.0", 30080, "TCP 192.168.0.10:30080"),
        ("::", 30080, "TCP 192.168.0.10:30080"),
        ("192.168.0.10", 30080, "TCP 192.168.0.10:30080"),
        ("0.0.0.0", 80, "TCP 192.168.0.10:80"),
        ("127.0.0.1", 30080, ""),
        ("192.168.0.11", 30080, ""),
        ("0.0.0.0", 22, ""),
    ],
)
def test_doctor_reports_programs_that_listen_on_an_address_and_port_of_a_service(address: str, port: int, named: str) -> None:
    listening = BoundSocket(Protocol.TCP, parse_address(address), port, "nginx (process 7)")
    found = _collisions(WEB, DNS, sockets=(listening,))
    expected = [f"web: nginx (process 7) listens at {named}, too, and is out of reach there: the packets go to the Service"]
    assert found == (expected if named else [])


def test_doctor_reports_an_interface_that_has_a_cluster_ip() -> None:
    addresses = (*ADDRESSES, builders.interface_address("nodelocaldns", "10.96.0.53"))
    ports = (builders.service_port(53, Protocol.UDP, name="dns"), builders.service_port(53, name="dns-tcp"))
    (found,) = _collisions(builders.service("dns", *ports, cluster=["10.96.0.53"]), WEB, addresses=addresses)
    assert found.startswith("dns: the interface nodelocaldns has the cluster IP 10.96.0.53, too, but")


def test_doctor_suggests_a_suitable_remedy_if_a_service_address_belongs_to_another_node() -> None:
    other = parse_address("192.168.0.11")
    view = dataclasses.replace(VIEW, other_nodes={other: "node-b"})
    external = builders.service("web", external=[str(other)])
    balanced = builders.service("web", load_balancer=[str(other)])
    for service, way, other_way in ((external, "spec.externalIPs", "ipMode"), (balanced, "ipMode: Proxy", "externalIPs")):
        (found,) = service_checks.collisions([service], view, ADDRESSES, Rivals(), Settings())
        assert found.text.startswith(
            "192.168.0.11 is an address of the node node-b, which this node and its pods can no longer reach"
        )
        assert way in found.remedy
        assert other_way not in found.remedy
        assert not list(service_checks.collisions([service], view, ADDRESSES, Rivals(), Settings(refuses_node_addresses=True)))
    assert not list(service_checks.collisions([external], view, ADDRESSES, Rivals(), Settings(external_addresses=False)))


def test_doctor_reports_each_collision_and_reports_ok_if_there_is_none() -> None:
    one = service_checks.Collision(WEB.name, "a rule", "remove it")
    (finding,) = service_checks.judge([WEB], Settings(), [one])
    assert finding == (Level.WARN, "collisions", "default/web: a rule", "remove it")
    (finding,) = service_checks.judge([WEB], Settings(), [])
    assert finding.level is Level.OK
    assert not list(service_checks.judge([WEB], Settings(), [], ["iptables-save hangs"]))
    *_, more = service_checks.judge([WEB], Settings(), [one] * 25)
    assert more.text == "5 more of them"


def test_listening_sockets_are_read_with_their_addresses() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as tcp, socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp:
        tcp.bind(("127.0.0.1", 0))
        udp.bind(("127.0.0.1", 0))
        tcp.listen()
        ports = [(Protocol.TCP, tcp.getsockname()[1]), (Protocol.UDP, udp.getsockname()[1])]
        found = [(one.protocol, str(one.address), one.port) for one in sockets(ports)]
    assert found == [(protocol, "127.0.0.1", port) for protocol, port in ports]
    assert not list(sockets(ports))


PARTS = "ok this node and 1 other node take part|note whether the network lets"


@pytest.mark.parametrize(
    ("is_on", "takes_part", "shared_tunnel", "mtu", "expected"),
    [
        (False, False, "", 1500, ""),
        (False, True, "", 1500, "warn this node's Node has the annotation"),
        (True, True, "tunl0", 1500, "warn tunl0 has an address"),
        (True, False, "", 1500, "warn this node's Node lacks the annotation"),
        (True, True, "", 1500, PARTS),
        (True, True, "", 1450, f"{PARTS}|note the node's interface has the MTU 1450"),
    ],
)
def test_doctor_reports_what_prevents_or_limits_direct_return_on_this_node(
    *, is_on: bool, takes_part: bool, shared_tunnel: str, mtu: int, expected: str
) -> None:
    ends = {builders.OTHER_NODE: builders.addresses("172.18.0.3")}
    view = dataclasses.replace(builders.node_view(), tunnel_ends=ends, shared_tunnel=shared_tunnel)
    node = msgspec.structs.replace(builders.node(), takes_direct_return=takes_part)
    found = list(service_checks.judge_direct_return(Settings(direct_return=is_on), view, node, mtu))
    for finding, text in zip(found, filter(None, expected.split("|")), strict=True):
        assert finding.topic == "direct-return"
        assert f"{finding.level} {finding.text}".startswith(text)


@pytest.mark.parametrize(("mtus", "expected"), [({"eth0": "1450", "eth1": "1400"}, 1450), ({}, 1500)])
def test_doctor_uses_the_mtu_of_the_interface_that_has_the_nodes_address(
    mtus: dict[str, str], expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {f"/sys/class/net/{name}/mtu": mtu for name, mtu in mtus.items()}
    monkeypatch.setattr(SysctlDriver, "observe", lambda _, paths: {path: files[path] for path in paths if path in files})
    carried = [builders.interface_address("eth0", builders.NODE_ADDRESS), builders.interface_address("eth1", "172.19.0.2")]
    assert service_checks.mtu_of(builders.node_view(), carried) == expected
