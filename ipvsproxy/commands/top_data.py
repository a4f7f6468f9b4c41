"""What ``ipvsproxy top`` shows, as values, and as text in lines and columns."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from ipvsproxy.commands.inspection import Document, printable
from ipvsproxy.config.settings import Sort

UNKNOWN = "-"
"""Stands for a figure that the daemon does not know (yet): the rates of its first seconds, for example."""


class Node(NamedTuple):
    """The node at one moment. ``reasons`` say why not everything is in force; rates are per second, None if unknown."""

    name: str
    in_force: bool
    reasons: tuple[str, ...]
    services: int
    pending: int
    failed: int
    drifted: int
    draining: int
    synced_ago_s: float | None
    sync_s: float | None
    connections_s: float | None
    packets_s: float | None
    bytes_s: float | None


class Service(NamedTuple):
    """One Service. Endpoints are counted by what becomes of them; rates are per second, None if unknown."""

    name: str
    type: str
    addresses: tuple[str, ...]
    ports: tuple[str, ...]
    ready: int
    draining: int
    unused: int
    active: int | None
    connections_s: float | None
    packets_s: float | None
    bytes_s: float | None
    problems: tuple[str, ...]


class Question(NamedTuple):
    """Which Services to show, in which order: the busiest first, or by name. ``page`` counts from 1."""

    sort: Sort = Sort.CONNECTIONS
    is_reversed: bool = False
    filter: str = ""
    page: int = 1


class Picture(NamedTuple):
    """The node, and one page of the Services that match the filter."""

    node: Node
    services: tuple[Service, ...]
    matching: int
    page: int = 1
    pages: int = 1


class Endpoint(NamedTuple):
    """One endpoint of one Service port, with the figures of all virtual servers of this port.

    ``reason`` says why it gets no connections, empty if it does.
    """

    port: str
    address: str
    node: str
    zone: str
    weight: int | None
    active: int | None
    inactive: int | None
    connections_s: float | None
    state: str
    reason: str


class Details(NamedTuple):
    """One Service, its endpoints, and what is to be said of it."""

    service: Service
    endpoints: tuple[Endpoint, ...]
    notes: tuple[str, ...]


class Column(NamedTuple):
    """A column of a table: its title, its text for a row, and whether figures are aligned to the right.

    It is left out of a terminal with fewer than ``from_width`` columns. Where the rest of a row would not be seen, the text of
    one that ``gives_way`` is cut.
    """

    title: str
    text: Callable[[Any], str]
    is_number: bool = False
    from_width: int = 0
    gives_way: bool = False


def count(value: float | None) -> str:
    """A figure in at most four characters and a letter: ``0``, ``9.5``, ``1234``, ``12.3k``, ``4.0M``."""
    if value is None:
        return UNKNOWN
    if value < _SMALL and value != round(value):
        return f"{value:.1f}"
    if value < _LARGE:
        return f"{value:.0f}"
    for letter in "kMGT":
        value /= 1000
        if value < 999.95:  # noqa: PLR2004 - above, it would be rounded to 1000.0
            return f"{value:.1f}{letter}"
    return f"{value:.0f}T"


_SMALL, _LARGE = 10, 10_000


def seconds(value: float | None) -> str:
    """A time span for people: ``12 ms``, ``3.2 s``, ``5 min``, ``2 h``, ``3 d``."""
    if value is None:
        return UNKNOWN
    if value < 1:
        return f"{value * 1000:.0f} ms"
    for limit, size, unit in ((60, 1, "s"), (7200, 60, "min"), (172_800, 3600, "h")):
        if value < limit:
            return f"{value / size:.1f} {unit}" if unit == "s" and value < _SMALL else f"{value / size:.0f} {unit}"
    return f"{value / 86_400:.0f} d"


def endpoints(service: Service) -> str:
    """How many endpoints get connections, drain, and are not used: ``3``, ``3+1d``, ``3+1d-2``."""
    text = str(service.ready)
    if service.draining:
        text += f"+{service.draining}d"
    return f"{text}-{service.unused}" if service.unused else text


SERVICE_COLUMNS = (
    Column("!", lambda one: "!" if one.problems else ""),
    Column("Service", lambda one: one.name, gives_way=True),
    Column("Type", lambda one: one.type, from_width=110),
    Column("Address", lambda one: _first(one.addresses), from_width=70),
    Column("Ports", lambda one: _first(one.ports), from_width=100),
    Column("Ends", endpoints, from_width=60),
    Column("Active", lambda one: count(one.active), is_number=True, from_width=90),
    Column("Conn/s", lambda one: count(one.connections_s), is_number=True),
    Column("Pkt/s", lambda one: count(one.packets_s), is_number=True, from_width=100),
    Column("B/s", lambda one: count(one.bytes_s), is_number=True, from_width=60),
    Column("Wrong", lambda one: "; ".join(one.problems), from_width=70),
)
ENDPOINT_COLUMNS = (
    Column("Port", lambda one: one.port, from_width=60),
    Column("Endpoint", lambda one: one.address, gives_way=True),
    Column("Node", lambda one: one.node, from_width=90),
    Column("Zone", lambda one: one.zone, from_width=110),
    Column("Weight", lambda one: UNKNOWN if one.weight is None else str(one.weight), is_number=True, from_width=90),
    Column("Active", lambda one: count(one.active), is_number=True),
    Column("InAct", lambda one: count(one.inactive), is_number=True, from_width=90),
    Column("Conn/s", lambda one: count(one.connections_s), is_number=True, from_width=60),
    Column("State", lambda one: f"{one.state}: {one.reason}" if one.reason else one.state),
)


def columns(all_columns: Sequence[Column], width: int) -> list[Column]:
    """The columns for a terminal of this width."""
    return [one for one in all_columns if width >= one.from_width]


def cells(all_columns: Sequence[Column], rows: Sequence[Any], width: int) -> list[list[str]]:
    """The texts of these rows, cut so that all columns but the last one can be seen on a terminal of this width."""
    table = [[printable(one.text(row)) for one in all_columns] for row in rows]
    widths = [max(map(len, texts)) for texts in zip([one.title for one in all_columns], *table, strict=True)]
    last = 0 if all_columns[-1].is_number else widths[-1] - LAST_SEEN
    over = sum(widths) + PADDING * len(widths) + SCROLL_BAR - max(0, last) - width
    for index, one in enumerate(all_columns):
        if one.gives_way and over > 0:
            room = max(LEAST_CUT, widths[index] - over)
            for texts in table:
                if len(texts[index]) > room:
                    texts[index] = texts[index][: room - 1] + "…"
    return table


PADDING = 2
"""The spaces around each text in a table of the screen."""
SCROLL_BAR = 2
LAST_SEEN = 12
"""So much of a text in the last column is to be seen."""
LEAST_CUT = 16
"""A text is not cut to less than this."""


def _first(texts: Sequence[str]) -> str:
    return f"{texts[0]} +{len(texts) - 1}" if len(texts) > 1 else "".join(texts)


def node_lines(node: Node, width: int) -> Iterator[str]:
    """The node in a few lines of this width: whether all is in force, what is left to do, and its traffic."""
    verdict = "in force" if node.in_force else "NOT IN FORCE"
    yield f"{node.name}: {verdict}" + (f": {'; '.join(node.reasons)}" if node.reasons else "")
    parts = (
        f"pending {node.pending}  failed {node.failed}  drifted {node.drifted}",
        f"draining {node.draining}",
        f"{count(node.connections_s)} conn/s  {count(node.packets_s)} pkt/s  {count(node.bytes_s)} B/s",
        f"synced {seconds(node.synced_ago_s)} ago in {seconds(node.sync_s)}",
    )
    line = ""
    for part in parts:
        if line and len(line) + 2 + len(part) > width:
            yield line
            line = ""
        line += f"  {part}" if line else part
    yield line


def table_lines(all_columns: Sequence[Column], rows: Sequence[Any]) -> Iterator[str]:
    """A table as plain text, as wide as it has to be."""
    table = [[one.title for one in all_columns], *([one.text(row) for one in all_columns] for row in rows)]
    widths = [max(map(len, texts)) for texts in zip(*table, strict=True)]
    for texts in table:
        cells = (
            text.rjust(width) if column.is_number else text.ljust(width)
            for text, width, column in zip(texts, widths, all_columns, strict=True)
        )
        yield "  ".join(cells).rstrip()


def service_lines(details: Details) -> Iterator[str]:
    """One Service in a few lines, above its endpoints."""
    service = details.service
    yield f"{service.name} ({service.type}): {', '.join((*service.addresses, *service.ports))}"
    yield (
        f"{service.ready} endpoints get connections, {service.draining} drain, {service.unused} are not used; "
        f"{count(service.connections_s)} conn/s, {count(service.bytes_s)} B/s"
    )
    yield from (f"wrong: {problem}" for problem in service.problems)
    yield from details.notes


_TRAFFIC = {"internal": "the cluster IP", "external": "other addresses", "cluster": "this node's clients of other addresses"}


def picture(node: Document, services: Document) -> Picture:
    """A picture from ``node.json`` and ``services.json``."""
    shown = tuple(map(service, services["services"]))
    return Picture(_node(node), shown, services["matching"], services["page"], services["pages"])


def _node(document: Document) -> Node:
    last = next(iter(document["syncs"]), None)
    return Node(
        name=document["node"],
        in_force=document["inForce"],
        reasons=tuple(document["reasons"]),
        services=document["services"],
        pending=document["pending"]["total"],
        failed=document["failed"],
        drifted=document["drifted"]["total"],
        draining=document["draining"],
        synced_ago_s=max(0.0, document["now"] - last["endedAt"]) if last else None,
        sync_s=last["durationSeconds"] if last else None,
        connections_s=document["connectionsPerSecond"],
        packets_s=document["packetsPerSecond"],
        bytes_s=document["bytesPerSecond"],
    )


def service(row: Document) -> Service:
    """One row of ``services.json``."""
    return Service(
        name=row["name"],
        type=row["type"],
        addresses=_bounded(row["addresses"], row["addressCount"]),
        ports=_bounded([_port(one) for one in row["ports"]], row["portCount"]),
        ready=row["endpoints"]["ready"],
        draining=row["endpoints"]["draining"],
        unused=row["endpoints"]["unused"],
        active=row["activeConnections"],
        connections_s=row["connectionsPerSecond"],
        packets_s=row["packetsPerSecond"],
        bytes_s=row["bytesPerSecond"],
        problems=tuple(row["problems"]),
    )


def _bounded(texts: Sequence[str], count: int) -> tuple[str, ...]:
    """The texts that the daemon has named, and how many it has not."""
    return (*texts, f"and {count - len(texts)} more") if count > len(texts) else tuple(texts)


def _port(one: Document) -> str:
    """As kubectl shows it: ``80/TCP``, ``80:30080/TCP``."""
    node_port = f":{one['nodePort']}" if one["nodePort"] else ""
    return f"{one['port']}{node_port}/{one['protocol']}"


def details(document: Document) -> Details:
    """One Service from ``service.json``."""
    explained = document["service"]
    endpoints = [endpoint for port in explained["ports"] for endpoint in _endpoints(port)]
    return Details(service(document["row"]), tuple(endpoints), tuple(_notes(explained)))


def _notes(explained: Document) -> Iterator[str]:
    if explained["sessionAffinitySeconds"]:
        yield f"session affinity {explained['sessionAffinitySeconds']} s"
    for side in ("internal", "external"):
        if explained[f"{side}TrafficPolicy"] == "Local":
            yield f"{side}TrafficPolicy Local"
    if explained["sourceRanges"]:
        yield f"only from {', '.join(explained['sourceRanges'])}"
    for one in explained["notUsed"]:
        yield f"not used: {one['object']} {one['field']}: {one['reason']}"
    for one in explained["slicesNotUsed"]:
        yield f"not used: EndpointSlice {one['slice']}: {one['reason']}"
    for port in explained["ports"]:
        for one in port["virtualServers"]:
            if not one["held"]:
                yield f"{one['virtualServer']}: not served, {one['owner']} has it"
            elif one["kernel"] is None:
                yield f"{one['virtualServer']}: not in the kernel"


def _endpoints(port: Document) -> Iterator[Endpoint]:
    """The endpoints of a Service port, then real servers that are none of them: draining ones, for example."""
    name = _port(port) + (f" {port['name']}" if port["name"] else "")
    kernels = [one["kernel"] for one in (*port["virtualServers"], port["clusterScope"] or {"kernel": None}) if one["kernel"]]
    missing = {one for kernel in kernels for one in kernel["missing"]}
    real_servers: dict[str, list[Document]] = {}
    for kernel in kernels:
        for one in kernel["realServers"]:
            real_servers.setdefault(one["realServer"], []).append(one)
    traffics = list(dict.fromkeys(one["traffic"] for one in port["virtualServers"]))
    if port["clusterScope"] and port["clusterScope"]["virtualServer"]:
        traffics.append("cluster")
    for one in port["endpoints"]:
        address = f"[{one['address']}]:{one['port']}" if ":" in one["address"] else f"{one['address']}:{one['port']}"
        verdict = ("MISSING", "not in the kernel") if address in missing else _verdict(one, traffics)
        is_other = one["internal"]["code"] == "duplicate"  # its real server is shown with the entry that counts
        yield _endpoint(name, address, one, [] if is_other else real_servers.pop(address, []), verdict)
    for address, seen in real_servers.items():
        yield _endpoint(name, address, {"node": "", "zone": ""}, seen, (seen[0]["state"], ""))


def _verdict(endpoint: Document, traffics: Iterable[str]) -> tuple[str, str]:
    """Whether an endpoint gets connections of these kinds, and why not."""
    out = {traffic: endpoint[traffic]["reason"] for traffic in traffics if not endpoint[traffic]["used"]}
    used = [traffic for traffic in traffics if traffic not in out]
    if not out:
        return "in", ""
    reasons = "; ".join(dict.fromkeys(out.values()))
    if not used:
        return "out", reasons
    return f"in for {_TRAFFIC[used[0]]}", f"out for {_TRAFFIC[next(iter(out))]}: {reasons}"


def _endpoint(port: str, address: str, one: Document, seen: Sequence[Document], verdict: tuple[str, str]) -> Endpoint:
    return Endpoint(
        port=port,
        address=address,
        node=one["node"],
        zone=one["zone"],
        weight=next((each["weight"] for each in seen), None),
        active=_sum(each["active"] for each in seen),
        inactive=_sum(each["inactive"] for each in seen),
        connections_s=_sum(each.get("connectionsPerSecond") for each in seen),
        state=verdict[0],
        reason=verdict[1],
    )


def _sum(figures: Iterable[float | None]) -> Any:
    """The sum of those that are known; None if none is."""
    known = [one for one in figures if one is not None]
    return sum(known) if known else None
