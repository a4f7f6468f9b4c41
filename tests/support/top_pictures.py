"""Builds example data for tests of ``top``. Most parameters of the functions have defaults.

The data are documents about a node and its Services, as the daemon sends them, and rows of endpoints.
"""

from collections.abc import Iterable
from typing import Any

from ipvsproxy.commands import top_data
from ipvsproxy.commands.top_data import ENDPOINT_COLUMNS, Picture, Row
from ipvsproxy.daemon.base.log import printable

HOSTILE = "demo/\x1b[31m[red]\n\x07[/nonsense]\u202e"
"""A name with an escape sequence, markup, and characters on which a terminal acts."""
SHOWN = "demo/\\x1b[31m[red]\\n\\x07[/nonsense]\\u202e"
"""The hostile name as ``top`` shows it."""
NODE: dict[str, Any] = {
    "node": "demo-node",
    "inForce": True,
    "reasons": [],
    "now": 102.5,
    "syncs": [{"endedAt": 100.0, "durationSeconds": 0.012}],
    "pending": {"total": 0},
    "drifted": {"total": 0},
    "failed": 0,
    "draining": 1,
    "connectionsPerSecond": 812.5,
    "packetsPerSecond": 12345.0,
    "bytesPerSecond": 9.9e6,
    "activeConnections": 31,
    "inactiveConnections": 64,
}


def service(name: str = "demo/web", *, connections_s: float | None = 1.5, problems: Iterable[str] = ()) -> dict[str, Any]:
    """The row of a Service with two addresses."""
    return {
        "name": name,
        "type": "ClusterIP",
        "addresses": ["10.96.0.80", "fd00:10:96::80"],
        "addressCount": 2,
        "ports": [{"protocol": "TCP", "port": 80, "nodePort": 0}],
        "portCount": 1,
        "endpoints": {"ready": 3, "draining": 1, "unused": 2},
        "activeConnections": 7,
        "connectionsPerSecond": connections_s,
        "packetsPerSecond": 100,
        "bytesPerSecond": 12_345,
        "problems": [*problems],
    }


def picture(*services: dict[str, Any], node: dict[str, Any] = NODE, page: int = 1, pages: int = 1) -> Picture:
    """The picture of a node with these Services, as ``ipvsproxy top`` shows it."""
    return top_data.picture(node, {"services": services, "matching": len(services), "page": page, "pages": pages})


def endpoint(address: str, *, node: str = "demo-node", reason: str = "") -> Row:
    """An endpoint; if a reason is given, the endpoint is unused."""
    state = f"OUT: {reason}" if reason else "in"
    texts = ("80/TCP http", "web-7d", address, node, "zone-a", "0" if reason else "1", "3", "4", "0.5", state)
    assert len(texts) == len(ENDPOINT_COLUMNS)
    return Row(address, list(map(printable, texts)))
