"""Covers ``list``, which prints the IPVS table with Service names beside the rows, or without names if no names are known.

``tests/kernel/ipvs/test_rows.py`` shows that the rows equal ipvsadm's rows.
"""

from collections.abc import Iterator

import pytest

from ipvsproxy.commands import inspection
from ipvsproxy.commands import list as listing
from ipvsproxy.commands.inspection import Document
from ipvsproxy.daemon.base import log as logs
from ipvsproxy.kernel import host
from ipvsproxy.kernel.ipvs.rows import METHODS, IpvsTable, RealServerRow, VirtualServerRow
from ipvsproxy.model.net import Protocol
from ipvsproxy.model.real_servers import NOT_MASQUERADED, TUNNELLED
from ipvsproxy.model.service import ApiObject, ServiceName, ServiceType
from ipvsproxy.model.virtual_servers import ConnectionCounts, VirtualServerSettings
from ipvsproxy.translate.api.targets import Target, Targets
from ipvsproxy.translate.translation_settings import Settings, TrafficScopes
from tests.config import loading
from tests.support import builders
from tests.support.builders import OTHER_NODE, endpoint
from tests.support.fake_kernel import FakeKernel, KernelVirtualServer
from tests.support.inspected_node import inspected, synced_kernel

WEB = (
    builders.node(),
    builders.service("web", builders.service_port(80, name="http", node_port=30080)),
    builders.endpoint_slice(
        endpoint("10.244.0.1"), endpoint("10.244.1.1", OTHER_NODE), ports=[builders.endpoint_port(8080, name="http")]
    ),
)
CLUSTER = builders.frontend(builders.CLUSTER_IP, 80)
NAME = ServiceName("default", "web")
TARGETS: Targets = {
    (NAME, builders.backend("10.244.0.1")): Target("default/web-1", builders.THIS_NODE),
    (NAME, builders.backend("10.244.1.1")): Target("", OTHER_NODE),
}


def _rows(kernel: FakeKernel) -> IpvsTable:
    """The IPVS table of a kernel, in the form in which ``ipvs.rows`` returns it."""
    return IpvsTable("1.2.1", 4096, tuple(_virtual_servers(kernel)))


def _virtual_servers(kernel: FakeKernel) -> Iterator[VirtualServerRow]:
    for key, held in sorted(kernel.virtual_servers.items(), key=lambda item: (item[0].port, str(item[0]))):
        real_servers = [
            RealServerRow(one, 3 if weight == NOT_MASQUERADED else 0, max(weight, 0), connections=ConnectionCounts(2, 3))
            for one, weight in sorted(held.real_servers.items())
        ]
        yield VirtualServerRow(key, held.settings, key.address.family.bits, real_servers=tuple(real_servers))


async def _list(
    kernel: FakeKernel, *objects: ApiObject, targets: Targets = TARGETS, translation: Settings | None = None, text: str = ""
) -> Document:
    return await listing.describe(inspected(kernel, *objects, translation=translation), _rows(kernel), targets, text)


async def _lines(kernel: FakeKernel, *objects: ApiObject, targets: Targets = TARGETS) -> list[str]:
    return list(listing.render(await _list(kernel, *objects, targets=targets)))


async def test_the_command_list_shows_the_service_port_or_the_pod_and_node_at_the_end_of_each_row() -> None:
    kernel = await synced_kernel(*WEB)
    assert await _lines(kernel, *WEB) == [
        "IP Virtual Server version 1.2.1 (size=4096)",
        "Prot LocalAddress:Port Scheduler Flags                                  Service port",
        "  -> RemoteAddress:Port           Forward Weight ActiveConn InActConn   pod, node",
        "TCP  10.96.0.10:80 rr                                                   default/web:http",
        "  -> 10.244.0.1:8080              Masq    1      2          3           default/web-1 on node-a",
        "  -> 10.244.1.1:8080              Masq    1      2          3           on node-b",
        "TCP  192.168.0.10:30080 rr                                              default/web:http",
        "  -> 10.244.0.1:8080              Masq    1      2          3           default/web-1 on node-a",
        "  -> 10.244.1.1:8080              Masq    1      2          3           on node-b",
    ]
    assert kernel.applied == []


async def test_list_shows_the_port_number_if_the_port_has_no_name() -> None:
    objects = (builders.node(), builders.service("dns", builders.service_port(53, Protocol.UDP, node_port=30053)))
    lines = await _lines(await synced_kernel(*objects), *objects)
    assert [line[72:] for line in lines[3:]] == ["default/dns:53 (no real servers)"] * 2


async def test_list_does_not_mistake_a_node_port_for_a_service_port_with_the_same_number() -> None:
    ports = (builders.service_port(30080, name="high"), builders.service_port(80, name="low", node_port=30080))
    objects = (builders.node(), builders.service("web", *ports, kind=ServiceType.NODE_PORT))
    document = await _list(await synced_kernel(*objects), *objects)
    assert {one["virtualServer"]: one["servicePort"] for one in document["virtualServers"]} == {
        "TCP 10.96.0.10:80": "low",
        "TCP 10.96.0.10:30080": "high",
        "TCP 192.168.0.10:30080": "low",
    }


async def test_list_shows_the_port_name_of_a_node_port_on_an_address_of_the_load_balancer() -> None:
    """k3s ServiceLB, for example, writes the node's own address to the status of the load balancer."""
    port = builders.service_port(80, name="http", node_port=30080)
    objects = (builders.node(), builders.service("web", port, load_balancer=[builders.NODE_ADDRESS]))
    document = await _list(await synced_kernel(*objects), *objects)
    names = {one["virtualServer"]: one["servicePort"] for one in document["virtualServers"]}
    assert names["TCP 192.168.0.10:80"] == names["TCP 192.168.0.10:30080"] == "http"


async def test_the_list_marks_rows_of_other_programs_and_rows_that_no_service_desires() -> None:
    kernel = await synced_kernel(*WEB)
    kernel.virtual_servers[builders.frontend("192.0.2.1", 7)] = KernelVirtualServer(
        VirtualServerSettings("wlc"), {builders.backend("10.9.9.9"): 1}
    )
    lines = await _lines(kernel, builders.node())
    assert [line[72:] for line in lines[3:] if line.startswith("TCP")] == [
        "(not ours)",
        "(no Service desires it any more)",
        "(no Service desires it any more)",
    ]
    assert {line[72:] for line in lines[3:] if line.startswith("  ->")} == {""}


async def test_list_marks_a_row_as_removed_if_the_row_vanishes_while_the_table_is_read() -> None:
    kernel = await synced_kernel(*WEB)
    rows = _rows(kernel)
    kernel.virtual_servers.clear()
    document = await listing.describe(inspected(kernel, builders.node()), rows, {})
    assert {line[72:] for line in listing.render(document) if line.startswith("TCP")} == {"(removed meanwhile)"}


async def test_list_shows_a_remark_beside_a_real_server_that_differs_from_the_desired_state() -> None:
    kernel = await synced_kernel(*WEB)
    weights = kernel.virtual_servers[CLUSTER].real_servers
    weights[builders.backend("10.244.0.1")] = 0
    weights[builders.backend("10.244.1.1")] = NOT_MASQUERADED
    weights[builders.backend("10.244.9.8")] = 0
    weights[builders.backend("10.244.9.9")] = 1
    lines = await _lines(kernel, *WEB)
    assert [line[72:] for line in lines[4:8]] == [
        "default/web-1 on node-a (no new connections)",
        "on node-b (not masqueraded)",
        "(draining)",
        "(not desired)",
    ]


@pytest.mark.parametrize(
    ("method", "weight", "desired", "state"),
    [
        ("Tunnel", 2, TUNNELLED + 2, "serving"),
        ("Tunnel", 0, None, "draining"),
        ("Tunnel", 1, None, "not desired"),
        ("Tunnel", 1, 1, "not masqueraded"),
        ("Masq", 1, TUNNELLED + 1, "not masqueraded"),
        ("Route", 0, None, "not masqueraded"),
    ],
)
def test_list_shows_a_tunnelled_real_server_as_serving_only_if_a_tunnel_is_desired(
    method: str, weight: int, desired: int | None, state: str
) -> None:
    number = next(number for number, name in METHODS.items() if name == method)
    row = RealServerRow(builders.backend("172.18.0.3", 80), number, weight, connections=ConnectionCounts(0, 0))
    assert listing._state(row, desired) == state


OTHERS = (
    builders.service("dns", namespace="kube-system", cluster=["10.96.0.53"]),
    builders.service("api", cluster=["10.96.0.99"]),
    builders.endpoint_slice(endpoint("10.244.0.7"), service="api", suffix="a"),
)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", ["web", "dns", "api", "web", None, None]),
        ("web", ["web", "web"]),
        ("type:nodeport", []),
        ("10.244.0.7", ["api"]),
        ("problems:only", ["dns", "api", None]),
        ("problems:only type:clusterip namespace:default", ["api"]),
    ],
)
async def test_list_shows_only_rows_of_services_that_match_the_filter(text: str, found: list[str | None]) -> None:
    kernel = await synced_kernel(*WEB, *OTHERS)
    kernel.virtual_servers[builders.frontend("192.0.2.1", 30081)] = KernelVirtualServer(VirtualServerSettings("wlc"), {})
    stale = builders.frontend("10.96.0.99", 30082)
    kernel.virtual_servers[stale] = KernelVirtualServer(VirtualServerSettings("rr"), {})
    kernel.virtual_servers[builders.frontend("10.96.0.99", 80)].real_servers.clear()
    document = await _list(kernel, *WEB, *OTHERS, text=text)
    names = [one["service"] and one["service"].partition("/")[2] for one in document["virtualServers"]]
    assert sorted(map(str, names)) == sorted(map(str, found))


async def test_list_shows_which_endpoints_are_missing_from_the_kernel() -> None:
    kernel = await synced_kernel(*WEB)
    del kernel.virtual_servers[CLUSTER].real_servers[builders.backend("10.244.1.1")]
    document = await _list(kernel, *WEB)
    assert [one["problems"] for one in document["virtualServers"]] == [["10.244.1.1:8080 is missing"], []]
    assert "default/web:http (10.244.1.1:8080 is missing)" in [line[72:] for line in listing.render(document)]


async def test_list_shows_a_firewall_mark_with_its_service_and_the_words_second_scope() -> None:
    objects = (
        builders.node(),
        builders.service("shop", kind=ServiceType.LOAD_BALANCER, load_balancer=["192.0.2.7"], external_local=True),
        builders.endpoint_slice(endpoint("10.244.0.1"), endpoint("10.244.1.1", OTHER_NODE), service="shop"),
    )
    settings = Settings(cluster_networks=builders.networks("10.244.0.0/16"), scopes=TrafficScopes.API)
    kernel = await synced_kernel(*objects, translation=settings)
    lines = list(listing.render(await _list(kernel, *objects, targets={}, translation=settings)))
    (line,) = (line for line in lines if line.startswith("FWM"))
    assert line.split(maxsplit=3) == ["FWM", "16383", "rr", "default/shop:80 (second scope)"]


async def test_list_prints_hostile_names_as_escaped_text(capsys: pytest.CaptureFixture[str]) -> None:
    kernel = await synced_kernel(*WEB)
    hostile = {key: Target("default/\x1b[31m[red]\nTCP", "node\x07\u202e") for key in TARGETS}
    document = await _list(kernel, *WEB, targets=hostile)
    capsys.readouterr()  # this call drops the log lines of the sync
    inspection.show(document, listing.render(document), as_json=False)
    output = capsys.readouterr().out
    assert "default/\\x1b[31m[red]\\nTCP on node\\x07\\u202e" in output
    assert len(output.splitlines()) == 9
    assert all(character.isprintable() for character in output.replace("\n", ""))


async def test_if_service_names_are_unknown_list_prints_no_names_and_named_is_false_in_json() -> None:
    rows = _rows(await synced_kernel(*WEB))
    document = listing.table("node-a", rows)
    assert not document["named"]
    assert list(listing.render(document))[1:4] == [
        "Prot LocalAddress:Port Scheduler Flags",
        "  -> RemoteAddress:Port           Forward Weight ActiveConn InActConn",
        "TCP  10.96.0.10:80 rr",
    ]


def test_list_reports_a_kernel_that_cannot_be_read(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(logs, "set_up", lambda **_: None)  # ``list`` must not change the log configuration of the tests
    monkeypatch.setattr(host, "missing_privileges", lambda **_: ("CAP_NET_ADMIN is missing",))
    monkeypatch.setattr(host, "missing_features", lambda: ())
    assert listing.run(loading.from_flags("--manifests=.")) == 2
    output, error = capsys.readouterr()
    assert output == ""
    assert error.splitlines()[0] == "ipvsproxy: CAP_NET_ADMIN is missing"
