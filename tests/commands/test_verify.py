"""``verify`` reports that the kernel equals the desired state, or prints each difference in one line."""

import copy
import itertools

import pytest

from ipvsproxy.commands import verify
from ipvsproxy.commands.inspection import Comparison, Document, UnknownStateError
from ipvsproxy.kernel.base.errors import KernelError
from ipvsproxy.model.kernel import Timeouts
from ipvsproxy.model.net import Family, Protocol, parse_address
from ipvsproxy.model.real_servers import TUNNELLED
from ipvsproxy.model.rules import ChainKey
from ipvsproxy.model.service import ServiceType
from ipvsproxy.model.sets import ForeignElement, SetEntry
from ipvsproxy.model.state import Observation
from ipvsproxy.model.virtual_servers import ConnectionCounts, VirtualServerSettings
from tests.support import builders
from tests.support.fake_kernel import FakeKernel, KernelVirtualServer
from tests.support.inspected_node import WEB, inspected, synced_kernel

NODE_PORT = (
    builders.node(),
    builders.service("web", builders.service_port(80, node_port=30080), kind=ServiceType.NODE_PORT),
    builders.endpoint_slice(builders.endpoint("10.244.0.1")),
)
CLUSTER, HERE, THERE = builders.frontend(builders.CLUSTER_IP, 80), builders.backend("10.244.0.1"), builders.backend("10.244.1.1")

UNUSED = "weight 0 (its endpoint is not used; its connections go on until they end)"


async def _verify(kernel: FakeKernel, *objects: object) -> Document:
    comparison = Comparison(inspected(kernel, *(objects or WEB)))  # type: ignore[arg-type]  # API objects of three kinds
    return verify.describe(builders.THIS_NODE, comparison, await verify.lasting_differences(comparison, 0, 0))


async def _lines(kernel: FakeKernel, *objects: object) -> list[str]:
    return list(verify.render(await _verify(kernel, *objects)))


async def test_verify_finds_no_difference_after_a_sync() -> None:
    kernel = await synced_kernel(*WEB)
    assert await _lines(kernel) == ["node-a: equal; compared 1 Service, 2 virtual servers"]
    assert kernel.applied == []


async def test_verify_reports_every_object_as_missing_on_an_empty_kernel() -> None:
    document = await _verify(FakeKernel())
    assert not document["equal"]
    assert {one["kind"] for one in document["differences"]} >= {
        "device",
        "set",
        "set_entry",
        "rules",
        "virtual_server",
        "address",
    }
    assert "real_server" not in {one["kind"] for one in document["differences"]}, (
        "they are counted in their virtual server's line"
    )


async def test_verify_prints_each_difference_in_one_line_with_its_service_desired_and_observed_value() -> None:
    kernel = await synced_kernel(*WEB)
    kernel.virtual_servers[CLUSTER].settings = VirtualServerSettings("wrr")
    kernel.virtual_servers[CLUSTER].real_servers[HERE] = 0
    del kernel.virtual_servers[CLUSTER].real_servers[THERE]
    kernel.virtual_servers[CLUSTER].real_servers[builders.backend("10.244.9.9")] = 1
    kernel.addresses.clear()
    kernel.sets["KUBE-CLUSTER-IP"].entries.clear()
    kernel.sets["KUBE-IPVS-IPS"].entries.add(SetEntry("KUBE-IPVS-IPS", parse_address("10.96.7.7")))
    kernel.sets["KUBE-EXTERNAL-IP"].entries.add(ForeignElement("KUBE-EXTERNAL-IP"))
    kernel.chains[Family.IPV4][ChainKey("nat", "KUBE-SERVICES")] = ()
    kernel.jumps[Family.IPV4].clear()
    kernel.sysctls["net/ipv4/ip_forward"] = "0"
    kernel.timeouts = Timeouts(1, 2, 3)
    lines = await _lines(kernel)
    assert {
        "-  sysctl net/ipv4/ip_forward: desired 1, observed 0",
        "-  timeouts tcp: desired 600 s, observed 1 s",
        "-  set entry KUBE-IPVS-IPS 10.96.7.7: desired nothing, observed present",
        "-  set entry KUBE-EXTERNAL-IP *: desired nothing, observed present",
        "-  rules IPv4 chain nat/KUBE-SERVICES rule 1: desired -s 127.0.0.0/8 -j RETURN, observed no rule",
        "-  rules IPv4 jump nat/OUTPUT -> KUBE-SERVICES: desired present, observed missing",
        "default/web  address 10.96.0.10: desired present, observed missing",
        "default/web  set entry KUBE-CLUSTER-IP 10.96.0.10,tcp:80: desired present, observed missing",
        "default/web  virtual server TCP 10.96.0.10:80: desired rr, real servers: 2, observed wrr, real servers: 2",
        f"default/web  real server {CLUSTER} -> {HERE}: desired weight 1, observed weight 0",
        f"default/web  real server {CLUSTER} -> {THERE}: desired weight 1, observed missing",
        f"default/web  real server {CLUSTER} -> 10.244.9.9:8080: desired {UNUSED}, observed weight 1",
    } <= set(lines)


@pytest.mark.parametrize("method", [0, TUNNELLED], ids=["masqueraded", "by tunnel"])
async def test_a_draining_real_server_is_not_a_difference(method: int) -> None:
    kernel = await synced_kernel(*WEB)
    draining = builders.backend("10.244.9.9")
    kernel.virtual_servers[CLUSTER].real_servers[draining] = method
    kernel.connection_counts[CLUSTER, draining] = ConnectionCounts(2, 0)
    assert await _lines(kernel) == ["node-a: equal; compared 1 Service, 2 virtual servers, 1 draining real server"]


async def test_an_undesired_udp_real_server_is_a_difference_even_with_weight_0() -> None:
    port = builders.service_port(53, Protocol.UDP)
    objects = (
        builders.node(),
        builders.service("dns", port),
        builders.endpoint_slice(builders.endpoint("10.244.0.1"), service="dns", ports=[builders.endpoint_port(53, Protocol.UDP)]),
    )
    kernel = await synced_kernel(*objects)
    kernel.virtual_servers[builders.frontend(builders.CLUSTER_IP, 53, Protocol.UDP)].real_servers[
        builders.backend("10.9.9.9", 53)
    ] = 0
    lines = await _lines(kernel, *objects)
    assert lines[0] == "default/dns  real server UDP 10.96.0.10:53 -> 10.9.9.9:53: desired nothing, observed weight 0"


async def test_virtual_servers_of_other_programs_are_listed_but_are_not_a_difference() -> None:
    kernel = await synced_kernel(*WEB)
    kernel.virtual_servers[builders.frontend("192.0.2.1", 80)] = KernelVirtualServer(VirtualServerSettings("wlc"), {HERE: 1})
    document = await _verify(kernel)
    assert document["equal"]
    assert document["foreign"] == [{"virtualServer": "TCP 192.0.2.1:80", "scheduler": "wlc", "realServers": 1}]
    assert "of another program, left alone: TCP 192.0.2.1:80 wlc, 1 real server" in verify.render(document)


@pytest.mark.parametrize(
    ("address", "gone_at", "is_equal", "readings"),
    [
        ("172.16.0.9", 2, True, 2),
        ("172.16.0.9", 3, True, 3),
        ("172.16.0.9", 99, False, 3),
        (builders.CLUSTER_IP, 99, False, 2),
    ],
    ids=["gone at the second reading", "gone within the grace", "still there", "on an address of this node"],
)
async def test_verify_waits_for_the_grace_period_only_if_a_node_port_remains_on_a_lost_address(
    address: str, gone_at: int, *, is_equal: bool, readings: int
) -> None:
    kernel = await synced_kernel(*NODE_PORT)
    (kept,) = (key for key in kernel.virtual_servers if key.port == 30080)
    lost = builders.frontend(address, 30080)
    kernel.virtual_servers[lost] = copy.deepcopy(kernel.virtual_servers[kept])
    observe, looks = kernel.observe, itertools.count(1)

    def give_up(*arguments: object) -> Observation:
        if next(looks) == gone_at:
            del kernel.virtual_servers[lost]
        return observe(*arguments)  # type: ignore[arg-type]  # the wrapper passes on its arguments

    kernel.observe = give_up  # type: ignore[assignment]  # the wrapper removes the virtual server, as run does
    document = await _verify(kernel, *NODE_PORT)
    assert document["equal"] is is_equal, document["differences"]
    assert next(looks) == readings + 1


@pytest.mark.parametrize("part", ["virtual_servers", "timeouts"])
async def test_verify_reports_neither_equal_nor_different_if_the_kernel_cannot_be_read_completely(part: str) -> None:
    kernel = await synced_kernel(*WEB)
    kernel.unreadable.add(part)
    with pytest.raises((UnknownStateError, KernelError)):
        await _verify(kernel)
