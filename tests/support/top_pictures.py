"""Nodes, Services and endpoints as ``top`` shows them, with defaults."""

from collections.abc import Iterable

from ipvsproxy.commands.top_data import Endpoint, Node, Service

HOSTILE = "demo/\x1b[31m[red]\n\x07[/nonsense]\u202e"
"""A name with an escape sequence, markup, and characters on which a terminal acts."""
SHOWN = "demo/\\x1b[31m[red]\\n\\x07[/nonsense]\\u202e"
"""The same as it is shown."""
NODE = Node(
    name="demo-node",
    in_force=True,
    reasons=(),
    services=4,
    pending=0,
    failed=0,
    drifted=0,
    draining=1,
    synced_ago_s=2.5,
    sync_s=0.012,
    connections_s=812.5,
    packets_s=12345.0,
    bytes_s=9.9e6,
)


def service(name: str = "demo/web", *, connections_s: float | None = 1.5, problems: Iterable[str] = ()) -> Service:
    """A Service with two addresses."""
    return Service(
        name=name,
        type="ClusterIP",
        addresses=("10.96.0.80", "fd00:10:96::80"),
        ports=("80/TCP",),
        ready=3,
        draining=1,
        unused=2,
        active=7,
        connections_s=connections_s,
        packets_s=100,
        bytes_s=12_345,
        problems=tuple(problems),
    )


def endpoint(address: str, *, node: str = "demo-node", reason: str = "") -> Endpoint:
    """An endpoint, which is out if there is a reason."""
    return Endpoint(
        port="80/TCP http",
        address=address,
        node=node,
        zone="zone-a",
        weight=0 if reason else 1,
        active=3,
        inactive=4,
        connections_s=0.5,
        state="out" if reason else "in",
        reason=reason,
    )
