"""Covers Service addresses that the node refuses: such an address is not served, and is logged once.

Also covers how the tunnels of direct return follow changes of Nodes.
"""

from collections.abc import Callable

import msgspec
from structlog.typing import EventDict

from ipvsproxy.model.annotations import Annotation, ServiceAnnotations
from ipvsproxy.model.net import Family, Protocol, parse_address
from ipvsproxy.model.plan import one_by_one
from ipvsproxy.model.rules import Skeleton
from ipvsproxy.model.service import ApiObject, ApiServersFound, Node, Skipped
from ipvsproxy.model.sets import SetKind
from ipvsproxy.model.virtual_servers import VirtualServerKey
from ipvsproxy.translate.translation_settings import Settings, device_flags, direct_return_sysctls
from tests.daemon.loop.test_engine import KUBERNETES
from tests.support import builders
from tests.support.memory_node import AUDIT_INTERVAL_S, MemoryNode, new_kernel

API_SERVER = "192.168.0.99"
KEY = VirtualServerKey(Protocol.TCP, parse_address(API_SERVER), 80)
HIJACKER = builders.service("web", cluster=("10.96.0.10",), external=(API_SERVER,))


def assert_not_served(node: MemoryNode) -> None:
    assert KEY not in node.kernel.virtual_servers
    assert KEY.address not in node.kernel.addresses


async def test_an_external_ip_is_refused_and_logged_once_if_it_is_the_address_of_an_api_server(
    logs: list[EventDict],
) -> None:
    servers = builders.endpoint_slice(builders.endpoint(API_SERVER), service="kubernetes")
    async with MemoryNode().serving(KUBERNETES, servers, HIJACKER) as node:
        node.put(builders.endpoint_slice(builders.endpoint("10.244.0.5")))
        await node.quiet()
        assert [(line["name"], line["field"], line["reason"]) for line in logs if line["event"] == "part_not_used"] == [
            ("default/web", "spec.externalIPs", f"{API_SERVER} is the address of an API server")
        ]
        assert_not_served(node)
        node.put(builders.endpoint_slice(service="kubernetes"))  # as when the API server shuts down gracefully
        await node.quiet()
        assert_not_served(node)
        assert [line["reason"] for line in logs if line["event"] == "part_not_used"][1:] == [
            f"{API_SERVER} was the address of an API server, and is refused until ipvsproxy restarts"
        ]


async def test_an_external_address_is_no_longer_served_after_an_api_server_was_found_at_this_address() -> None:
    async with MemoryNode().serving(KUBERNETES, HIJACKER) as node:
        assert KEY.address in node.kernel.addresses
        node.deliver([ApiServersFound(frozenset({builders.backend(API_SERVER, 6443)}))])
        await node.quiet()
        assert_not_served(node)
        assert builders.frontend("10.96.0.10", 80) in node.kernel.virtual_servers


async def test_a_refused_address_is_logged_even_if_the_service_also_has_two_equal_invalid_values(
    logs: list[EventDict],
) -> None:
    invalid = Skipped("spec.externalIPs", "'x' is not an IP address")
    web = builders.with_options(builders.service("web", external=("224.0.0.1",)), skipped=(invalid, invalid))
    async with MemoryNode().serving(web):
        pass
    reasons = {line["reason"] for line in logs if line["event"] == "part_not_used"}
    assert reasons == {invalid.reason, "224.0.0.1 is an unspecified, multicast or link-local address"}


OTHER = parse_address("192.168.0.11")
USES_OTHER = builders.service("web", external=(str(OTHER),))
ON_OTHER = builders.endpoint_slice(builders.endpoint(str(OTHER), builders.OTHER_NODE), service="agent")


async def test_an_external_address_is_not_served_while_it_is_known_as_an_address_of_another_node(
    logs: list[EventDict],
) -> None:
    agent = builders.service("agent", cluster=("10.96.0.11",))
    async with MemoryNode(settings=Settings(refuses_node_addresses=True)).serving(USES_OTHER, agent) as node:
        assert OTHER in node.kernel.addresses
        logs.clear()
        node.put(ON_OTHER)
        await node.quiet()
        assert OTHER not in node.kernel.addresses
        assert "node_changed" not in {line["event"] for line in logs}, "this node has not changed"
        node.put(builders.endpoint_slice(service="agent"))
        await node.quiet()
        assert OTHER in node.kernel.addresses


async def test_by_default_as_in_kube_proxy_an_external_address_of_another_node_is_served() -> None:
    async with MemoryNode().serving(USES_OTHER, ON_OTHER) as node:
        assert OTHER in node.kernel.addresses
        assert node.watcher.summaries[-1].view.other_nodes == {OTHER: builders.OTHER_NODE}


def with_direct_return() -> MemoryNode:
    families = frozenset({Family.IPV4})
    sysctls = tuple(direct_return_sysctls(families))
    kernel = new_kernel()
    kernel.sysctls |= {one.path: "x" for one in sysctls}
    return MemoryNode(kernel, settings=Settings(direct_return=True, families=families), sysctls=sysctls)


async def test_rules_that_guard_the_tunnel_device_are_written_before_the_device_comes_up() -> None:
    node = with_direct_return()
    async with node.serving():
        pass
    kinds = [type(one.item).__name__ for one in node.kernel.applied if getattr(one.item, "for_tunnels", True)]
    assert kinds.index("Skeleton") < kinds.index("Sysctl")
    assert node.kernel.sysctls[device_flags(Family.IPV4)] == "0x81"


async def test_no_setting_for_tunnels_is_written_while_another_program_has_an_address_on_the_tunnel_device() -> None:
    node = with_direct_return()
    node.kernel.host_addresses.append(builders.interface_address("tunl0", "10.244.3.0"))
    async with node.serving():
        assert {node.kernel.sysctls[one.path] for one in direct_return_sysctls(frozenset({Family.IPV4}))} == {"x"}
        node.kernel.host_addresses.pop()
        await node.quiet(AUDIT_INTERVAL_S)
        await node.quiet()
        assert "x" not in node.kernel.sysctls.values()


async def test_tunnelled_packets_from_every_other_node_are_accepted_until_that_node_is_deleted() -> None:
    node = with_direct_return()
    plain = Node(name="plain", addresses=(parse_address("172.18.0.8"),))
    annotated = Node(name="annotated", addresses=(parse_address("172.18.0.9"),), takes_direct_return=True)

    def accepted() -> list[str]:
        return sorted(map(str, node.kernel.sets[SetKind.NODES].entries))

    async with node.serving(builders.node(), plain, annotated):
        assert accepted() == ["172.18.0.8", "172.18.0.9"], "other programs have tunnels between nodes, too"
        node.remove(plain)
        await node.quiet()
        assert accepted() == ["172.18.0.9"]


async def test_a_changed_node_changes_only_a_few_objects_of_each_service_with_endpoints_on_the_node() -> None:
    """The test counts objects and measures no time.

    The number of changed objects does not depend on the number of Nodes, or on the number of Services without endpoints on the
    changed Node.
    """
    given = ServiceAnnotations(given=frozenset({Annotation.DIRECT_RETURN}), direct_return=True)
    services, there = 20, 8
    objects: list[ApiObject] = []
    for number in range(services):
        one = builders.service(f"s{number}", cluster=[f"10.96.1.{number}"], load_balancer=[f"192.0.2.{number}"])
        place = builders.OTHER_NODE if number < there else builders.THIS_NODE
        ends = builders.endpoint(f"10.244.1.{number}", place)
        objects += [builders.with_options(one, annotations=given), builders.endpoint_slice(ends, service=f"s{number}")]
    node = with_direct_return()
    node.kernel.schedulers |= {"mh"}
    other = msgspec.structs.replace(builders.node(str(OTHER), name=builders.OTHER_NODE), takes_direct_return=True)
    changes: tuple[tuple[Callable[[], None], int, int], ...] = (
        (lambda: node.put(msgspec.structs.replace(other, name="node-c", addresses=builders.addresses("192.168.0.12"))), 1, 0),
        # Three objects of each Service change: a tunnel, the endpoint that the tunnel replaces, and the set entry that
        # masquerades the endpoint.
        (lambda: node.put(other), 3 * there + 1, there),
        # the Service loses its endpoint at two addresses and at one firewall mark
        (lambda: node.put(builders.endpoint_slice(service="s1")), 3, 1),
        (lambda: node.remove(other), 3 * (there - 1) + 1, there - 1),
    )
    async with node.serving(builders.node(), *objects):
        for change, count, concerned in changes:
            node.kernel.applied.clear()
            syncs = len(node.watcher.summaries)
            change()
            await node.quiet()
            changed = {
                str(one).partition(" ")[2] for one in one_by_one(node.kernel.applied) if not isinstance(one.item, Skeleton)
            }
            assert len(changed) == count
            assert sum(len(one.changes.services) for one in node.watcher.summaries[syncs:]) == concerned
