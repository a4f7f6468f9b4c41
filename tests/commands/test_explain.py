"""The command ``explain``: its argument, its JSON document, and its text."""

import copy
from collections.abc import Collection

import msgspec
import pytest

from ipvsproxy.commands import explain
from ipvsproxy.commands.inspection import Document
from ipvsproxy.kernel.rivals import BoundSocket, Rivals
from ipvsproxy.model.annotations import ALL_ANNOTATIONS, Annotation, ServiceAnnotations, WeightRules
from ipvsproxy.model.kernel import InterfaceAddress
from ipvsproxy.model.net import Protocol, parse_address
from ipvsproxy.model.real_servers import NOT_MASQUERADED, Thresholds
from ipvsproxy.model.service import ApiObject, ObjectKind, Rejected, Service, ServiceName, ServiceType, Skipped
from ipvsproxy.model.virtual_servers import SCHEDULER_FALLBACK, ConnectionCounts, VirtualServerSettings
from ipvsproxy.translate.api.targets import Target, Targets
from ipvsproxy.translate.translation_settings import Settings, TrafficScopes
from tests.support import builders, memory_node
from tests.support.builders import OTHER_NODE, endpoint
from tests.support.fake_kernel import FakeKernel, KernelVirtualServer
from tests.support.inspected_node import inspected, synced_kernel

WEB = (
    builders.node(),
    builders.service("web", builders.service_port(80, node_port=30080)),
    builders.endpoint_slice(endpoint("10.244.0.1"), endpoint("10.244.0.2", ready=False), endpoint("10.244.1.1", OTHER_NODE)),
)
CLUSTER = builders.frontend(builders.CLUSTER_IP, 80)
NO_TARGETS: Targets = {}
WEB_NAME = ServiceName("default", "web")
PODS: Targets = {
    (WEB_NAME, builders.backend("10.244.0.1")): Target("default/web-a", "node-a"),
    (WEB_NAME, builders.backend("10.244.0.2")): Target("default/web-b", "node-a"),
    (ServiceName("default", "hidden"), builders.backend("10.244.0.2")): Target("default/web-b", "node-a"),
}
"""The pods behind the endpoints of two Services; the Service ``hidden`` is headless."""


async def _explain(kernel: FakeKernel, subject: str, *objects: ApiObject) -> Document:
    return await explain.describe(inspected(kernel, *objects), explain.parse_subject(subject))


async def _text(
    kernel: FakeKernel,
    subject: str,
    *objects: ApiObject,
    targets: Targets = NO_TARGETS,
    translation: Settings | None = None,
) -> list[str]:
    node = inspected(kernel, *objects, translation=translation)
    return list(explain.render(await explain.describe(node, explain.parse_subject(subject), targets=targets), subject))


async def _synced_text(
    subject: str, *objects: ApiObject, targets: Targets = NO_TARGETS, translation: Settings | None = None
) -> list[str]:
    """The text that ``explain`` prints about a subject after these objects have been programmed."""
    kernel = await synced_kernel(*objects, translation=translation)
    return await _text(kernel, subject, *objects, targets=targets, translation=translation)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("demo/web", "demo/web"),
        ("web", "web"),
        ("10.96.0.1:443", "10.96.0.1:443"),
        ("10.96.0.1", "10.96.0.1"),
        ("[fd00::1]:443", "[fd00::1]:443"),
        ("[fd00::1]", "fd00::1"),
        ("fd00::1", "fd00::1"),
    ],
)
def test_explain_accepts_a_service_or_an_address_as_its_subject(text: str, shown: str) -> None:
    assert str(explain.parse_subject(text)) == shown


@pytest.mark.parametrize(
    "text",
    ["", "a/b/c", "10.96.0.1:x", "10.96.0:1:2:3:4", "1.2.3:80", "1.2.3", "10.96.0.300", "[10.96.0.300]", "[fd00::g]:1", "/web"],
)
def test_explain_refuses_a_subject_that_is_neither_a_service_nor_an_address(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not|is none of"):
        explain.parse_subject(text)


async def test_explain_shows_a_service_with_its_endpoints_and_its_kernel_objects() -> None:
    kernel = await synced_kernel(*WEB)
    kernel.connection_counts[CLUSTER, builders.backend("10.244.0.1")] = ConnectionCounts(3, 12)
    lines = await _text(kernel, "default/web", *WEB)
    assert lines[0] == "Service default/web (ClusterIP)"
    assert "    TCP 10.96.0.10:80 (cluster IP), rr" in lines
    assert "    TCP 192.168.0.10:30080 (node port), rr" in lines
    assert "        -> 10.244.0.1:8080 weight 1, connections: 3 active, 12 inactive" in lines
    assert "      10.244.0.1 port 8080 on node-a: in" in lines
    assert "      10.244.0.2 port 8080 on node-a: OUT: it is not ready" in lines
    assert "    a pod that reaches itself: masqueraded by KUBE-POSTROUTING, set KUBE-LOOP-BACK" in lines
    assert kernel.applied == []


async def test_explain_shows_only_the_virtual_servers_of_the_given_address() -> None:
    document = await _explain(await synced_kernel(*WEB), "192.168.0.10:30080", *WEB)
    (service,) = document["services"]
    assert [one["virtualServer"] for port in service["ports"] for one in port["virtualServers"]] == ["TCP 192.168.0.10:30080"]


async def test_explain_names_the_external_address_field_that_the_feature_gate_disables() -> None:
    objects = (WEB[0], builders.service("web", external=["203.0.113.9"]))
    gate = Settings(external_addresses=False)
    why = "  not used: Service default/web spec.externalIPs: the feature gate AllowServiceExternalIPs of this node is off"
    assert (await _synced_text("default/web", *objects, translation=gate))[:2] == ["Service default/web (ClusterIP)", why]
    nothing = ["Service default/web (ClusterIP)", why, "  no virtual server: nothing is served here"]
    for subject in ("203.0.113.9:80", "10.96.0.10:81"):
        assert await _synced_text(subject, *objects, translation=gate) == nothing


async def test_explain_shows_a_program_that_listens_at_an_address_and_port_of_the_service() -> None:
    listening = BoundSocket(Protocol.TCP, parse_address("0.0.0.0"), 30080, "nginx (process 7)")
    asked: list[object] = []

    def read(ports: Collection[tuple[Protocol, int]]) -> Rivals:
        asked.extend(ports)
        return Rivals(sockets=(listening,))

    node = inspected(await synced_kernel(*WEB), *WEB)
    lines = list(explain.render(await explain.describe(node, ServiceName("default", "web"), read), "default/web"))
    assert lines[1].startswith("  collides: nginx (process 7) listens at TCP 192.168.0.10:30080, too")
    assert set(asked) == {(Protocol.TCP, 80), (Protocol.TCP, 30080)}


async def test_explain_shows_endpoints_and_real_servers_with_the_names_of_their_pods() -> None:
    lines = await _synced_text("default/web", *WEB, targets=PODS)
    assert "        -> 10.244.0.1:8080 (default/web-a) weight 1, connections: 0 active, 0 inactive" in lines
    assert "      default/web-a 10.244.0.1 port 8080 on node-a: in" in lines
    assert "      10.244.1.1 port 8080 on node-b: in" in lines


async def test_explain_searches_all_namespaces_if_the_name_has_no_namespace() -> None:
    other = builders.service("web", namespace="other", cluster=["10.96.0.11"])
    lines = await _synced_text("web", *WEB, other)
    assert [line for line in lines if line.startswith("Service ")] == [
        "Service default/web (ClusterIP)",
        "Service other/web (ClusterIP)",
    ]
    assert await _synced_text("we", *WEB) == await _text(FakeKernel(), "we")


@pytest.mark.parametrize("subject", ["default/web-b", "web-b", "10.244.0.2", "10.244.0.2:8080"])
async def test_explain_shows_for_a_pod_which_services_use_it_and_why_other_services_do_not(subject: str) -> None:
    lines = await _synced_text(subject, *WEB, targets=PODS)
    assert lines[0] == "endpoint default/web-b (10.244.0.2) on node-a"
    assert lines[1].startswith("  default/hidden: OUT: the API server is not asked for headless Services")
    assert lines[2:] == ["  default/web port TCP 80, IPv4: OUT: it is not ready"]
    assert (await _synced_text("web-a", *WEB, targets=PODS))[1] == "  default/web port TCP 80, IPv4: in"
    assert await _synced_text("10.244.1.1", *WEB) == ["endpoint 10.244.1.1 on node-b", "  default/web port TCP 80, IPv4: in"]


async def test_explain_shows_an_ipv6_endpoint_as_unused_if_the_service_has_no_ipv6_cluster_ip() -> None:
    stray = builders.endpoint_slice(endpoint("fd00::1"), suffix="v6")
    why = "the Service has no cluster IP of IPv6"
    assert await _synced_text("fd00::1", *WEB, stray) == ["endpoint fd00::1", f"  default/web: OUT: {why}"]
    assert f"  not used: EndpointSlice default/web-v6: {why}" in await _synced_text("default/web", *WEB, stray)


async def test_explain_names_the_cluster_ip_field_if_a_service_is_not_used_because_of_this_field() -> None:
    headless = builders.with_options(
        builders.service("web", cluster=[]), not_served=Skipped("spec.clusterIP", "headless", invalid=False)
    )
    node = inspected(FakeKernel(), WEB[0], headless)
    node.store.deliver(
        [
            Rejected(ObjectKind.SERVICE, ServiceName("default", "bad"), "a.yaml, document 2", "is missing", "spec.clusterIP"),
            Rejected(ObjectKind.SERVICE, ServiceName("default", "other"), "", "is missing", "spec.clusterIP"),
        ],
        0,
    )
    lines = list(explain.render(await explain.describe(node, ServiceName("default", "bad")), "default/bad"))
    assert lines == ["  not used: Service default/bad spec.clusterIP: is missing (a.yaml, document 2)"]
    lines = await _text(FakeKernel(), "default/web", WEB[0], headless)
    assert lines == ["Service default/web (ClusterIP)", "  not used: Service default/web spec.clusterIP: headless"]


@pytest.mark.parametrize(
    ("subject", "instead"),
    [
        ("127.0.0.1:30080", "192.168.0.10:30080 or 10.96.0.10:80"),
        ("127.0.0.1", "192.168.0.10:30080 or 10.96.0.10:80"),
        ("[::1]:30080", "[fd00:168::10]:30080"),
    ],
)
async def test_explaining_a_node_port_on_loopback_shows_the_addresses_that_serve_the_node_port(
    subject: str, instead: str
) -> None:
    (line,) = await _synced_text(subject, *WEB)
    assert line.startswith(
        f"  not used: {explain.parse_subject(subject)}: node port 30080 of default/web: IPVS serves no node port"
    )
    assert line.endswith(f"; use {instead}")


@pytest.mark.parametrize("subject", ["default/none", "127.0.0.1:80"], ids=["a name", "a loopback port that is no node port"])
async def test_explain_reports_an_unknown_subject(subject: str) -> None:
    unknown, *hint = await _synced_text(subject, *WEB)
    assert unknown == f"{subject}: no Service or endpoint of this name, and no virtual server or endpoint at this address"
    assert ["spec.clusterIP None" in line for line in hint] == [True] * ("none" in subject)


async def test_explain_shows_the_cluster_ip_and_the_other_addresses_separately_if_their_endpoints_differ() -> None:
    local = builders.service("web", builders.service_port(80, node_port=30080), external_local=True)
    objects = (WEB[0], local, WEB[2])
    lines = await _synced_text("default/web", *objects)
    at = lines.index("    endpoints for traffic to all other addresses:")
    assert "      10.244.1.1 port 8080 on node-b: in" in lines[:at]
    assert lines[at + 3].startswith("      10.244.1.1 port 8080 on node-b: OUT: it is on another node")
    verdict = (await _synced_text("10.244.1.1", *objects))[1]
    assert verdict.startswith("  default/web port TCP 80, IPv4: in for traffic to the cluster IP; OUT: it is on another node")
    assert verdict.endswith("for traffic to all other addresses")


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (builders.service("other", created_s=builders.CREATED_S + 1), "is older and has it"),
        (
            builders.service("other", cluster=["10.96.0.99"], external=[builders.CLUSTER_IP], created_s=builders.CREATED_S - 1),
            "has it as its cluster IP",
        ),
    ],
    ids=["the older Service", "a cluster IP before an older external IP"],
)
async def test_explain_shows_why_an_address_belongs_to_one_service_if_two_services_desire_it(other: Service, reason: str) -> None:
    why = f"default/web {reason}"
    assert f"      also desired by default/other, which must wait: {why}" in await _synced_text("default/web", *WEB, other)
    assert f"      NOT SERVED for this Service: {why}" in await _synced_text("default/other", *WEB, other)


async def test_explain_reports_source_ranges_that_do_not_contain_this_node() -> None:
    service = builders.service(
        kind=ServiceType.LOAD_BALANCER, load_balancer=["192.0.2.80"], source_ranges=["203.0.113.0/24"], affinity_timeout_s=60
    )
    objects = (builders.node(), service)
    lines = await _synced_text("192.0.2.80:80", *objects)
    assert lines[0] == "Service default/web (LoadBalancer, session affinity 60 s)"
    assert "      only from 203.0.113.0/24" in lines
    assert any("this node itself is outside of these ranges" in line for line in lines)
    assert "      kernel: rr, session affinity 60 s, no real servers: clients are refused" in lines
    assert "    endpoints: none" in lines


async def test_explain_shows_the_zone_of_a_used_endpoint_and_the_hints_that_exclude_another_endpoint() -> None:
    ends = (endpoint("10.244.0.1", zone="zone-a", zones=["zone-a"]), endpoint("10.244.1.1", OTHER_NODE, zones=["zone-b"]))
    objects = (builders.node(), builders.service(), builders.endpoint_slice(*ends))
    lines = await _synced_text("default/web", *objects)
    assert "      10.244.0.1 port 8080 on node-a in zone-a: in" in lines
    assert "      10.244.1.1 port 8080 on node-b: OUT: its hints are for other zones (zone-b)" in lines


async def test_explain_shows_a_virtual_server_that_is_missing_from_the_kernel() -> None:
    assert "      kernel: NOT THERE" in await _text(memory_node.new_kernel(), "default/web", *WEB)


async def test_explain_shows_missing_and_draining_real_servers() -> None:
    kernel = await synced_kernel(*WEB)
    weights = kernel.virtual_servers[CLUSTER].real_servers
    del weights[builders.backend("10.244.1.1")]
    weights[builders.backend("10.244.9.9")] = 0
    weights[builders.backend("10.244.0.1")] = NOT_MASQUERADED
    lines = await _text(kernel, "10.96.0.10:80", *WEB)
    assert "        -> 10.244.0.1:8080, connections: 0 active, 0 inactive, not masqueraded" in lines
    assert "        -> 10.244.1.1:8080 MISSING" in lines
    assert "        -> 10.244.9.9:8080 weight 0, connections: 0 active, 0 inactive, draining" in lines


async def test_explain_shows_a_virtual_server_as_stale_or_foreign_if_no_service_desires_it() -> None:
    kernel = await synced_kernel(*WEB)
    kernel.virtual_servers[builders.frontend("192.0.2.1", 80)] = KernelVirtualServer(VirtualServerSettings("wlc"), {})
    foreign, _ = await _text(kernel, "192.0.2.1:80", *WEB)
    assert foreign.startswith("TCP 192.0.2.1:80: it is not ours")
    stale = await _text(kernel, "10.96.0.10:80", builders.node())
    assert (
        stale[0]
        == "TCP 10.96.0.10:80: no Service desires it any more; its witness is its address on kube-ipvs0, so run removes it"
    )
    kernel.addresses, kernel.routes = set(), set(kernel.addresses)
    (routed, *_) = await _text(kernel, "10.96.0.10:80", builders.node())
    assert "its witness is its local route, so run removes it" in routed
    port = await _text(kernel, "192.168.0.10:30080", builders.node())
    assert "its witness is KUBE-NODE-PORT-TCP, so run removes it" in port[0]
    assert "lost its address" not in port[0]


async def test_explain_says_that_a_node_port_on_a_lost_address_will_be_removed_after_the_grace_period() -> None:
    kernel = await synced_kernel(*WEB)
    (kept,) = (key for key in kernel.virtual_servers if key.port == 30080)
    kernel.virtual_servers[builders.frontend("172.16.0.9", 30080)] = copy.deepcopy(kernel.virtual_servers[kept])
    lines = await _text(kernel, "172.16.0.9:30080", *WEB)
    assert lines[0].endswith("its witness is KUBE-NODE-PORT-TCP, so run removes it, 8 s after the node lost its address")


SHOP = (
    builders.node(),
    builders.service(
        "shop", kind=ServiceType.LOAD_BALANCER, cluster=["10.96.0.7"], load_balancer=["192.0.2.7"], external_local=True
    ),
    builders.endpoint_slice(endpoint("10.244.0.1"), endpoint("10.244.1.1", OTHER_NODE), service="shop"),
)
BOTH_SCOPES = Settings(cluster_networks=builders.networks("10.244.0.0/16"), scopes=TrafficScopes.API)


@pytest.mark.parametrize("has_bridge", [True, False], ids=["a bridge shows which pods are here", "nothing shows it"])
async def test_explain_shows_which_endpoints_serve_local_clients_and_which_serve_external_clients(*, has_bridge: bool) -> None:
    kernel = await synced_kernel(*SHOP, translation=BOTH_SCOPES)
    if has_bridge:
        kernel.host_addresses.append(InterfaceAddress("cni0", parse_address("10.244.0.1"), 24))
    lines = await _text(kernel, "default/shop", *SHOP, translation=BOTH_SCOPES)
    assert "    mark 0x3fff (IPv4) (clients of this node at TCP 192.0.2.7:80), rr" in lines
    at = lines.index("    endpoints for traffic to all other addresses, of clients of this node:")
    assert lines[at + 1 :] == ["      10.244.0.1 port 8080 on node-a: in", "      10.244.1.1 port 8080 on node-b: in"] or lines[
        at + 2
    ].endswith("in")
    text = "\n".join(lines)
    assert ("from pod of this node: to the second scope, the source address is kept" in text) is has_bridge
    assert "from this host: to the second scope, masqueraded" in text
    assert "from outside of the cluster: the source address is kept" in text


async def test_explain_says_that_packets_of_external_clients_to_an_address_without_local_endpoints_are_dropped() -> None:
    objects = (*SHOP[:2], builders.endpoint_slice(endpoint("10.244.1.1", OTHER_NODE), service="shop"))
    text = "\n".join(await _synced_text("192.0.2.7:80", *objects, translation=BOTH_SCOPES))
    assert "from outside of the cluster: dropped, since only other nodes have endpoints" in text
    assert "  -> 10.244.1.1:8080 weight 1" in text


async def test_explain_shows_the_settings_that_a_service_chooses_by_annotations() -> None:
    given = ServiceAnnotations(
        given=ALL_ANNOTATIONS,
        scheduler="mh",
        scheduler_flags=SCHEDULER_FALLBACK,
        weights=WeightRules({OTHER_NODE: 0}, {}, 5),
        thresholds=Thresholds(10, 5),
        drain_deadline_s=60,
        prefix_lengths=(24, 0),
        slow_start_s=30,
    )
    service = builders.service("web", affinity_timeout_s=600)
    ready = builders.endpoint_slice(endpoint("10.244.0.1"), endpoint("10.244.1.1", OTHER_NODE))
    objects = (WEB[0], builders.with_options(service, annotations=given), ready)
    lines = await _synced_text("default/web", *objects)
    assert lines[0] == "Service default/web (ClusterIP, session affinity 600 s, drain deadline 60 s)"
    assert lines[1].startswith("  not used: Service default/web metadata.annotations[ipvsproxy.io/slow-start]: the scheduler mh")
    limits = "connections at most 10, again below 5 of each endpoint"
    assert f"    TCP 10.96.0.10:80 (cluster IP), mh (fallback), {limits}" in lines
    assert "      kernel: mh (fallback), session affinity 600 s by /24" in lines
    assert "        -> 10.244.0.1:8080 weight 5, connections: 0 active, 0 inactive" in lines
    assert "        -> 10.244.1.1:8080 weight 0, connections: 0 active, 0 inactive, no new connections" in lines


async def test_explain_shows_the_slow_start_of_an_endpoint() -> None:
    given = ServiceAnnotations(given=ALL_ANNOTATIONS, scheduler="wlc", slow_start_s=30)
    objects = (WEB[0], builders.with_options(builders.service("web"), annotations=given), WEB[2])
    kernel = await synced_kernel(*objects)
    kernel.virtual_servers[CLUSTER].real_servers[builders.backend("10.244.0.1")] = 25
    lines = await _text(kernel, "default/web", *objects)
    assert lines[0] == "Service default/web (ClusterIP, slow start 30 s)"
    found = "        -> 10.244.0.1:8080 weight 25 of 100, connections: 0 active, 0 inactive, on its way to its own weight"
    assert found in lines


async def test_explain_shows_the_path_of_a_connection_over_two_nodes() -> None:
    asking = ServiceAnnotations(given=frozenset({Annotation.DIRECT_RETURN}), direct_return=True)
    shop = builders.service("shop", kind=ServiceType.LOAD_BALANCER, load_balancer=["192.0.2.80"])
    ends = (endpoint("10.244.0.1"), endpoint("10.244.1.1", OTHER_NODE), endpoint("10.244.1.2", OTHER_NODE))
    far = msgspec.structs.replace(builders.node("172.18.0.3", name=OTHER_NODE), takes_direct_return=True)
    slices = builders.endpoint_slice(*ends, endpoint("10.244.2.1", "apart"), service="shop")
    objects = (builders.node(), far, builders.with_options(shop, annotations=asking), slices)
    settings = Settings(direct_return=True, cluster_networks=builders.networks("10.244.0.0/16"))
    lines = await _synced_text("default/shop", *objects, translation=settings)
    first = next(number for number, line in enumerate(lines) if "clients outside, whom endpoints of other nodes answer" in line)
    last = next(number for number, line in enumerate(lines) if "packets that other nodes have sent here by tunnel" in line)
    counts = "connections: 0 active, 0 inactive"
    assert sorted(lines[first + 2 : last]) == [
        f"        -> 10.244.0.1:8080 weight 1, {counts}",
        f"        -> 10.244.2.1:8080 weight 1, {counts}",
        f"        -> 172.18.0.3:80 weight 2, {counts}, serving by tunnel to node-b, whose endpoints answer past this node",
        "      endpoints on apart: masqueraded, since no tunnel leads there (annotation of the Node)",
    ]
    assert lines[last + 2 : last + 3] == [f"        -> 10.244.0.1:8080 weight 1, {counts}"]
