"""Covers the path from an API server over real HTTP to an in-memory kernel, through the real source, store and loop.

After any trouble on this path, the kernel equals the state that is computed from scratch from the objects of the server.
"""

import asyncio
import contextlib
import dataclasses
import json
import pathlib
from collections.abc import AsyncIterator, Mapping
from typing import Any

import pytest

from ipvsproxy.daemon.sources import watch
from ipvsproxy.daemon.sources.source import Trouble
from ipvsproxy.model.service import ObjectKind
from ipvsproxy.model.steps import at_once
from ipvsproxy.store.objects import Store
from ipvsproxy.translate.api import decode
from tests.support import api_server, api_store, builders, memory_node
from tests.support.api_server import ApiServer, Refusal
from tests.support.api_store import ENDPOINT_SLICES, NODES, RESOURCES, SERVICES, Object
from tests.support.following import pace, running_task

KIND_OF: Mapping[api_store.Resource, ObjectKind] = {resource: ObjectKind(resource.kind) for resource in RESOURCES}
SELECTORS: Mapping[api_store.Resource, Mapping[str, str]] = {
    SERVICES: {"labelSelector": "!service.kubernetes.io/service-proxy-name", "fieldSelector": "spec.clusterIP!=None"},
    ENDPOINT_SLICES: {"labelSelector": "!service.kubernetes.io/headless"},
    NODES: {"fieldSelector": f"metadata.name={builders.THIS_NODE}"},
}
DEADLINE_S = 60


def service(name: str, number: int, **spec: Any) -> Object:
    ports = [{"name": "http", "port": 80, "protocol": "TCP"}, {"name": "dns", "port": 53, "protocol": "UDP"}]
    addresses = [f"10.96.0.{number}", f"fd00:96::{number}"]
    return {
        "metadata": {"name": name},
        "spec": {"type": "ClusterIP", "clusterIP": addresses[0], "clusterIPs": addresses, "ports": ports} | spec,
    }


def endpoint_slice(service_name: str, suffix: str, *addresses: str, **labels: str) -> Object:
    return {
        "metadata": {"name": f"{service_name}-{suffix}", "labels": {"kubernetes.io/service-name": service_name} | labels},
        "addressType": "IPv6" if ":" in "".join(addresses) else "IPv4",
        "endpoints": [{"addresses": [address], "conditions": {"ready": True}, "nodeName": "node-a"} for address in addresses],
        "ports": [{"name": "http", "port": 8080, "protocol": "TCP"}, {"name": "dns", "port": 5353, "protocol": "UDP"}],
    }


def node(zone: str = "zone-a", *addresses: str) -> Object:
    texts = addresses or (builders.NODE_ADDRESS, memory_node.NODE_ADDRESS_V6)
    return {
        "metadata": {"name": builders.THIS_NODE, "labels": {"topology.kubernetes.io/zone": zone}},
        "status": {"addresses": [{"type": "InternalIP", "address": text} for text in texts]},
    }


@dataclasses.dataclass
class World:
    """An API server, a node that follows the server, and the troubles that the node's source reported."""

    server: ApiServer
    node: memory_node.MemoryNode
    troubles: list[Trouble]

    async def watched(self) -> None:
        """Objects of all kinds are watched."""
        for resource in RESOURCES:
            await self.server.watched(resource)

    def desired(self) -> memory_node.Contents:
        """The kernel objects that the current objects of the server require."""
        store = Store(started_s=0)
        for resource, kind in KIND_OF.items():
            matches = api_store.selector(SELECTORS[resource])
            page = decode.decode_list(kind, json.dumps(self.server.store.page(resource, matches)).encode())
            store.deliver(page.events, 0)
        return memory_node.from_scratch(store, self.node.settings, self.node.kernel)

    async def in_force(self) -> None:
        """Whether the kernel equals the state for the server's objects, and no operation is pending."""
        async with asyncio.timeout(DEADLINE_S):
            await self.node.watcher.until(lambda: memory_node.contents(self.node.kernel) == self.desired())
        assert self.node.engine._reconciler.pending == 0
        assert not at_once(self.node.engine._reconciler.planning(asyncio.get_running_loop().time())).operations


@contextlib.asynccontextmanager
async def following(server: ApiServer, kubeconfig: str) -> AsyncIterator[World]:
    node_here = memory_node.MemoryNode()
    troubles: list[Trouble] = []
    source = watch.KubernetesSource(
        node_name=builders.THIS_NODE,
        kubeconfig=kubeconfig,
        on_restart=lambda _, trouble: troubles.append(trouble),
        pace=pace([]),
    )
    async with node_here.running(), running_task(source.run(node_here.deliver)):
        yield World(server, node_here, troubles)


def fill(server: ApiServer) -> None:
    server.put(NODES, node())
    for number in range(1, 8):
        server.put(SERVICES, service(f"web-{number}", number))
        server.put(ENDPOINT_SLICES, endpoint_slice(f"web-{number}", "v4", f"10.244.0.{number}", f"10.244.1.{number}"))
        server.put(ENDPOINT_SLICES, endpoint_slice(f"web-{number}", "v6", f"fd00:244::{number}"))


@pytest.fixture
async def world(tmp_path: pathlib.Path) -> AsyncIterator[World]:
    """A node on which seven Services are programmed and all watches are open."""
    async with ApiServer() as server:
        fill(server)
        async with following(server, api_server.write_kubeconfig(tmp_path / "kubeconfig", server.url)) as world:
            await world.in_force()
            await world.watched()
            assert len(world.node.kernel.virtual_servers) == 7 * 2 * 2
            yield world


async def test_added_changed_and_deleted_objects_are_programmed(world: World) -> None:
    server = world.server
    server.put(SERVICES, service("new", 20))
    server.put(ENDPOINT_SLICES, endpoint_slice("new", "v4", "10.244.0.20"))
    await world.in_force()
    server.put(SERVICES, service("new", 20, sessionAffinity="ClientIP"))
    server.put(ENDPOINT_SLICES, endpoint_slice("new", "v4", "10.244.0.20", "10.244.0.21"))
    await world.in_force()
    server.delete(SERVICES, "new")
    server.delete(ENDPOINT_SLICES, "web-1-v4")
    await world.in_force()
    server.put(SERVICES, service("web-2", 2, type="ExternalName", externalName="example.org", clusterIP="", clusterIPs=[]))
    await world.in_force()


async def test_node_ports_follow_the_node_object_of_the_server(world: World) -> None:
    ports = [{"name": "http", "port": 80, "protocol": "TCP", "nodePort": 30080}]
    world.server.put(SERVICES, service("web-1", 1, type="NodePort", ports=ports))
    await world.in_force()
    assert builders.frontend(builders.NODE_ADDRESS, 30080) in world.node.kernel.virtual_servers
    world.server.put(NODES, node("zone-b"))
    world.server.put(SERVICES, service("web-3", 3, externalIPs=["203.0.113.3"]))
    await world.in_force()


async def test_nothing_is_removed_while_the_server_is_absent(world: World) -> None:
    before = memory_node.contents(world.node.kernel)
    world.node.kernel.forget()
    world.server.refuse(*[Refusal(500)] * 30)
    for resource in RESOURCES:
        world.server.cut_watches(resource)
    await world.watched()
    assert memory_node.contents(world.node.kernel) == before
    world.server.put(SERVICES, service("new", 20))
    await world.in_force()
    assert not [line for line in world.node.done if line.startswith("remove")]


async def test_an_object_that_can_no_longer_be_read_stays_programmed_as_before(world: World) -> None:
    before = memory_node.contents(world.node.kernel)
    world.server.put(SERVICES, service("web-1", 1, ports="http"))
    world.server.put(SERVICES, service("new", 20))
    await world.node.watcher.until(lambda: builders.frontend("10.96.0.20", 80) in world.node.kernel.virtual_servers)
    world.server.expire_watches(SERVICES)
    world.server.delete(SERVICES, "new")
    await world.node.watcher.until(lambda: memory_node.contents(world.node.kernel) == before)
    world.server.put(SERVICES, service("web-1", 1))
    world.server.delete(SERVICES, "web-2")
    await world.in_force()
