"""A node for screenshots of the web page: ten thousand Services, some with faults, and one with hostile names."""

import itertools
import math
from collections.abc import Iterator

import msgspec

from ipvsproxy.model.real_servers import RealServerKey
from ipvsproxy.model.service import ApiObject, Endpoint, Service, ServiceName, ServiceType, Skipped
from ipvsproxy.model.virtual_servers import ConnectionCounts
from ipvsproxy.translate.api.targets import Target
from tests.support import builders
from tests.support.builders import OTHER_NODE, THIS_NODE, endpoint, service_port
from tests.support.page_node import PageNode

HOSTILE = "<img src=x onerror=document.title='hacked'>"
"""Text that a browser would run if the page did not escape it."""
WEB = "shop/web"
ZONES = {THIS_NODE: "zone-a", OTHER_NODE: "zone-b"}


def in_zone(item: Endpoint, zone: str = "") -> Endpoint:
    """Returns the endpoint with the given zone, by default with the zone of its node."""
    zone = zone or ZONES.get(item.conditions.node_name, "zone-c")
    return item._replace(conditions=msgspec.structs.replace(item.conditions, zone=zone))


def web_slice(*more: Endpoint, without: str = "") -> ApiObject:
    """The endpoints of ``shop/web``."""
    usual = (
        endpoint("10.244.0.11"),
        endpoint("10.244.0.12"),
        endpoint("10.244.1.11", OTHER_NODE),
        endpoint("10.244.1.12", OTHER_NODE),
        endpoint("10.244.2.11", "node-c", ready=False),
        builders.draining("10.244.2.12", "node-c"),
    )
    kept = (in_zone(one) for one in (*usual, *more) if str(one.address) != without)
    return builders.endpoint_slice(*kept, namespace="shop", service="web", ports=[builders.endpoint_port(8080, name="http")])


def pods() -> Iterator[tuple[tuple[ServiceName, RealServerKey], Target]]:
    """Pairs of an endpoint and its pod, for some endpoints of ``shop/web``, and for one endpoint whose pod has a hostile name.

    The first endpoint of ``shop/web`` is left out.
    """
    for number, address in enumerate(("10.244.0.12", "10.244.0.13", "10.244.1.11", "10.244.1.12", "10.244.1.13", "10.244.2.11")):
        yield (
            (ServiceName("shop", "web"), builders.backend(address)),
            Target(f"shop/web-7d9f5c8b64-{'bcdfgh'[number] * 2}4kx", ""),
        )
    yield (ServiceName("shop", HOSTILE), builders.backend("10.244.0.66")), Target(f"shop/{HOSTILE}", "")


def web() -> Service:
    """A Service with a node port."""
    return builders.service(
        "web",
        service_port(80, name="http", node_port=30080),
        namespace="shop",
        kind=ServiceType.NODE_PORT,
        cluster=["10.96.0.80"],
    )


def notable() -> Iterator[ApiObject]:
    """The Services with faults or notable traffic."""
    yield builders.node(zone="zone-a")
    yield web()
    yield web_slice()
    yield builders.service(
        "checkout",
        service_port(443, name="https", node_port=30443),
        namespace="shop",
        kind=ServiceType.LOAD_BALANCER,
        cluster=["10.96.0.44"],
        load_balancer=["203.0.113.44"],
        source_ranges=["198.51.100.0/24"],
        external_local=True,
    )
    yield builders.endpoint_slice(
        in_zone(endpoint("10.244.0.31")),
        in_zone(endpoint("10.244.1.31", OTHER_NODE)),
        namespace="shop",
        service="checkout",
        ports=[builders.endpoint_port(8443, name="https")],
    )
    yield builders.service("empty", namespace="shop", cluster=["10.96.0.70"])
    ports = [service_port(9090, name="metrics-scraper"), service_port(8443, name="grpc-management")]
    yield builders.service("late", *ports, namespace="shop", cluster=["10.96.0.71"])
    yield builders.endpoint_slice(in_zone(endpoint("10.244.0.71", ready=False)), namespace="shop", service="late")
    yield builders.service(
        "thief", namespace="shop", cluster=["10.96.0.72"], external=["203.0.113.44"], created_s=builders.CREATED_S + 9
    )
    hidden = builders.service("peers", namespace="shop", cluster=[])
    yield builders.with_options(hidden, not_served=Skipped("spec.clusterIP", "headless", invalid=False))
    yield builders.service(HOSTILE, service_port(80, name=HOSTILE), namespace="shop", cluster=["10.96.0.66"])
    yield builders.endpoint_slice(
        in_zone(endpoint("10.244.0.66", HOSTILE), HOSTILE),
        namespace="shop",
        service=HOSTILE,
        ports=[builders.endpoint_port(8080, name=HOSTILE)],
    )


def many(count: int) -> Iterator[ApiObject]:
    """Services with two endpoints. One endpoint of every hundredth Service is on this node."""
    for number in range(count):
        high, low = divmod(number, 250)
        name = f"service-{number:05}"
        yield builders.service(name, namespace=f"team-{number % 40:02}", cluster=[f"10.100.{high}.{low + 1}"])
        near = endpoint(f"10.210.{high}.{low + 1}", THIS_NODE if number % 100 == 0 else OTHER_NODE)
        far = endpoint(f"10.220.{high}.{low + 1}", OTHER_NODE)
        yield builders.endpoint_slice(near, far, namespace=f"team-{number % 40:02}", service=name)


def begin(node: PageNode, count: int = 10_000) -> None:
    """Let the node have this many Services, including the Services with faults or notable traffic."""
    known = list(notable())
    services = sum(isinstance(one, Service) for one in known)
    node.targets.update(pods())
    node.begin_with(*known, *many(count - services))


def add_past(node: PageNode, length_s: int = 880) -> None:
    """Let traffic and changes happen for a while. There are few changes, and one change takes long."""
    history, now, at_s = node.pages.node.history, node.traffic._now(), node.wall_clock()
    node.traffic.began_s = now - length_s
    history._points.clear()
    history._samples.clear()
    for age_s in range(0, length_s, 2):
        if age_s % 38 == 0:
            history.note_changes(1 + age_s * 7 % 9, 2.4 if age_s == 38 * 12 else 0.05 + age_s * 3 % 7 / 20)
        swing = 1 + 0.4 * math.sin(age_s / 60)
        connections = ConnectionCounts(int(172 * swing), int(332 * swing))  # on average as many as ``add_traffic`` causes
        history.add(node.traffic.totals_at(age_s), connections, now - length_s + age_s, at_s - length_s + age_s)


def add_traffic(node: PageNode) -> None:
    """Let clients use every seventh virtual server, and send the most traffic to the web shop."""
    node.traffic.swing = 0.7
    for number, key in enumerate(node.kernel.virtual_servers):
        if number % 7 == 0:
            node.traffic.per_second[key] = 1 + number % 50
    web_keys = [
        key
        for key in node.kernel.virtual_servers
        if key.port in (80, 30080) and str(key.address).startswith(("10.96.0.80", "192"))
    ]
    for key, rate in zip(web_keys, itertools.chain([420.0], itertools.repeat(150.0))):  # noqa: B905 - the second iterable has no end
        node.traffic.per_second[key] = rate
        for number, one in enumerate(node.kernel.virtual_servers[key].real_servers):
            node.kernel.connection_counts[key, one] = ConnectionCounts(20 + number, 40 + number)
