"""Turns the daemon's documents into the lines and columns of text that ``ipvsproxy top`` shows."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ipvsproxy.commands import explain
from ipvsproxy.commands.inspection import Document
from ipvsproxy.config.settings import Sort
from ipvsproxy.daemon.base.log import printable
from ipvsproxy.model.service import ServiceType

UNKNOWN = "-"
"""The text that is shown if the daemon does not know a figure, for example a rate in the first seconds after the daemon's
start."""


class Question(NamedTuple):
    """Says which Services are shown, and in which order: by traffic with the busiest Service first, by problems, or by name.

    The first page has number 1.
    """

    sort: Sort = Sort.CONNECTIONS
    is_reversed: bool = False
    filter: str = ""
    page: int = 1


_TYPES = {one.lower(): one.value for one in ServiceType}
_FILTER = re.compile(rf"(?i)(namespace|node):.+|type:({'|'.join(_TYPES)})|problems:only")


def parameters(text: str) -> Mapping[str, str]:
    """Translates the text of a filter into URL parameters of ``services.json``.

    Words such as ``namespace:demo``, ``type:nodeport``, ``node:node-b`` and ``problems:only`` each become a parameter. Words that
    are no filters form the search text.
    """
    found: dict[str, str] = {}
    rest: list[str] = []
    for word in text.split():
        if _FILTER.fullmatch(word):
            name, value = word.lower().split(":", 1)
            found[name] = _TYPES[value] if name == "type" else value
        else:
            rest.append(word)
    return {"query": " ".join(rest), **found}


class Row(NamedTuple):
    """A row of a table: the row's name, and the row's text in each column."""

    name: str
    texts: Sequence[str]


class Picture(NamedTuple):
    """A table and the lines above it, for one Service, or for the node and one page of matching Services."""

    lines: tuple[str, ...]
    rows: Sequence[Row]
    matching: int = 0
    page: int = 1
    pages: int = 1


class Column(NamedTuple):
    """A column of a table: the title, the function that returns the text for a row, and whether the texts are figures.

    Figures are aligned to the right. A column is omitted if the terminal has fewer than ``from_width`` columns. If a row is too
    wide, texts of the column are shortened, but keep at least ``gives_way`` characters. The widest column is shortened first. If
    ``gives_way`` is 0, the column's texts are never shortened.
    """

    title: str
    text: Callable[[Any], str]
    is_number: bool = False
    from_width: int = 0
    gives_way: int = 0


def count(value: float | None) -> str:
    """A figure as text of at most four characters and a letter, such as ``0``, ``9.5``, ``1234``, ``12.3k`` or ``4.0M``."""
    if value is None:
        return UNKNOWN
    if value < _SMALL and value != round(value):
        return f"{value:.1f}"
    if value < _LARGE:
        return f"{value:.0f}"
    for letter in "kMGT":
        value /= 1000
        if value < 999.95:  # noqa: PLR2004 - a larger value would be rounded to 1000.0
            return f"{value:.1f}{letter}"
    return f"{value:.0f}T"


_SMALL, _LARGE = 10, 10_000


def seconds(value: float | None) -> str:
    """A time span in a form that is easy to read, such as ``12 ms``, ``3.2 s``, ``5 min``, ``2 h`` or ``3 d``."""
    if value is None:
        return UNKNOWN
    if value < 1:
        return f"{value * 1000:.0f} ms"
    for limit, size, unit in ((60, 1, "s"), (7200, 60, "min"), (172_800, 3600, "h")):
        if value < limit:
            return f"{value / size:.1f} {unit}" if unit == "s" and value < _SMALL else f"{value / size:.0f} {unit}"
    return f"{value / 86_400:.0f} d"


def _counted(endpoints: Document) -> str:
    """The numbers of endpoints; for example, ``3+1d-2`` means that three get connections, one drains and two are unused."""
    text = str(endpoints["ready"])
    if endpoints["draining"]:
        text += f"+{endpoints['draining']}d"
    return f"{text}-{endpoints['unused']}" if endpoints["unused"] else text


SERVICE_COLUMNS = (
    Column("Service", lambda row: row["name"], gives_way=16),
    Column("Problem", lambda row: _first(row["problems"]), gives_way=8),
    Column("Type", lambda row: row["type"], from_width=110),
    Column("Address", lambda row: _first(_addresses(row)), from_width=70),
    Column("Ports", lambda row: _first(_ports(row)), from_width=100),
    Column("Ends", lambda row: _counted(row["endpoints"]), from_width=60),
    Column("Active", lambda row: count(row["activeConnections"]), is_number=True, from_width=90),
    Column("Conn/s", lambda row: count(row["connectionsPerSecond"]), is_number=True),
    Column("Pkt/s", lambda row: count(row["packetsPerSecond"]), is_number=True, from_width=100),
    Column("B/s", lambda row: count(row["bytesPerSecond"]), is_number=True, from_width=60),
)
ENDPOINT_COLUMNS = (
    Column("Port", lambda one: one["port"], from_width=60),
    Column("Pod", lambda one: one["pod"], from_width=60, gives_way=16),
    Column("Endpoint", lambda one: one["address"], gives_way=16),
    Column("Node", lambda one: one["node"], from_width=90),
    Column("Zone", lambda one: one["zone"], from_width=110),
    Column("Weight", lambda one: UNKNOWN if one["weight"] is None else str(one["weight"]), is_number=True, from_width=90),
    Column("Active", lambda one: count(one["active"]), is_number=True),
    Column("InAct", lambda one: count(one["inactive"]), is_number=True, from_width=90),
    Column("Conn/s", lambda one: count(one["connectionsPerSecond"]), is_number=True, from_width=60),
    Column("State", lambda one: one["state"]),
)


def _texts(columns: Sequence[Column], row: Any) -> list[str]:
    return [printable(one.text(row)) for one in columns]


def fitting(all_columns: Sequence[Column], rows: Sequence[Row], width: int) -> tuple[list[Column], list[list[str]]]:
    """The columns that a terminal of the given width shows, and the texts of the rows.

    Texts are shortened until every column except the last column fits.
    """
    columns = [one for one in all_columns if width >= one.from_width]
    table = [[text for text, one in zip(row.texts, all_columns, strict=True) if one in columns] for row in rows]
    widths = [max(map(len, texts)) for texts in zip([one.title for one in columns], *table, strict=True)]
    last = 0 if columns[-1].is_number else widths[-1] - LAST_SEEN
    over = sum(widths) + PADDING * len(widths) + SCROLL_BAR - max(0, last) - width
    for index in sorted(range(len(columns)), key=lambda at: -widths[at]):
        if columns[index].gives_way and over > 0:
            room = max(columns[index].gives_way, widths[index] - over)
            over -= max(0, widths[index] - room)
            for texts in table:
                if len(texts[index]) > room:
                    texts[index] = texts[index][: room - 1] + "…"
    return columns, table


PADDING = 2
"""The number of spaces that the screen adds to each text in a table: one on each side."""
SCROLL_BAR = 2
LAST_SEEN = 12
"""If a table is wider than the screen, at least this number of characters of the last column must stay visible."""


def _first(texts: Sequence[str]) -> str:
    return f"{texts[0]} +{len(texts) - 1}" if len(texts) > 1 else "".join(texts)


def table_lines(columns: Sequence[Column], rows: Sequence[Row]) -> Iterator[str]:
    """A table as plain text, not limited to any width."""
    table = [[one.title for one in columns], *(row.texts for row in rows)]
    widths = [max(map(len, texts)) for texts in zip(*table, strict=True)]
    for texts in table:
        cells = (
            text.rjust(width) if column.is_number else text.ljust(width)
            for text, width, column in zip(texts, widths, columns, strict=True)
        )
        yield "  ".join(cells).rstrip()


_UNITS = {"connections": "conn", "packets": "pkt", "bytes": "B"}


def picture(node: Document, services: Document) -> Picture:
    """The screen about the node, made from ``node.json`` and ``services.json``."""
    last = next(iter(node["syncs"]), None)
    synced_ago_s = max(0.0, node["now"] - last["endedAt"]) if last else None
    verdict = "in force" if node["inForce"] else "NOT IN FORCE"
    facts = (
        f"pending {node['pending']['total']}  failed {node['failed']}  drifted {node['drifted']['total']}",
        f"draining {node['draining']}",
        # an ipvsproxy older than this command does not send the two numbers of connections
        f"{count(node.get('activeConnections'))} active, {count(node.get('inactiveConnections'))} inactive",
        "  ".join(f"{count(node[f'{name}PerSecond'])} {unit}/s" for name, unit in _UNITS.items()),
        f"synced {seconds(synced_ago_s)} ago in {seconds(last['durationSeconds'] if last else None)}",
    )
    return Picture(
        (f"{node['node']}: {verdict}" + (f": {'; '.join(node['reasons'])}" if node["reasons"] else ""), "  ".join(facts)),
        [Row(row["name"], _texts(SERVICE_COLUMNS, row)) for row in services["services"]],
        services["matching"],
        services["page"],
        services["pages"],
    )


def _addresses(row: Document) -> list[str]:
    return _bounded(row["addresses"], row["addressCount"])


def _ports(row: Document) -> list[str]:
    return _bounded(list(map(_port, row["ports"])), row["portCount"])


def _bounded(texts: Sequence[str], count: int) -> list[str]:
    """The given texts.

    If ``count`` is larger than the number of these texts, one more text says how many texts the daemon has omitted.
    """
    return [*texts, f"and {count - len(texts)} more"] if count > len(texts) else [*texts]


def _port(one: Document) -> str:
    """A Service port as kubectl shows it, for example ``80:30080/TCP``."""
    node_port = f":{one['nodePort']}" if one["nodePort"] else ""
    return f"{one['port']}{node_port}/{one['protocol']}"


def details(document: Document) -> Picture:
    """The screen about one Service, made from ``service.json``."""
    row, explained = document["row"], document["service"]
    endpoints = [endpoint for port in explained["ports"] for endpoint in _endpoints(port)]
    return Picture(
        tuple(_lines(row, explained)),
        [Row(f"{one['port']} {one['address']} {number}", _texts(ENDPOINT_COLUMNS, one)) for number, one in enumerate(endpoints)],
    )


def _lines(row: Document, explained: Document) -> Iterator[str]:
    endpoints = row["endpoints"]
    yield f"{row['name']} ({row['type']}): {', '.join((*_addresses(row), *_ports(row)))}"
    yield (
        f"endpoints: {endpoints['ready']} ready, {endpoints['draining']} draining, {endpoints['unused']} unused; "
        f"{count(row['connectionsPerSecond'])} conn/s, {count(row['bytesPerSecond'])} B/s"
    )
    yield from (f"problem: {problem}" for problem in row["problems"])
    yield from explain.facts(explained)
    if explained["sourceRanges"]:
        yield f"only from {', '.join(explained['sourceRanges'])}"
    yield from map(str.strip, explain.not_used(explained))
    for port in explained["ports"]:
        for one in port["virtualServers"]:
            if not one["held"]:
                yield f"{one['virtualServer']}: not served, {one['owner']} has it"
            elif one["kernel"] is None:
                yield f"{one['virtualServer']}: not in the kernel"


def _endpoints(port: Document) -> Iterator[Document]:
    """The endpoints of a Service port, followed by the real servers that are no longer endpoints, such as draining real servers.

    The figures of an endpoint are the sums over all virtual servers of the port.
    """
    name = _port(port) + (f" {port['name']}" if port["name"] else "")
    kernels = [one["kernel"] for one in (*port["virtualServers"], port["clusterScope"] or {"kernel": None}) if one["kernel"]]
    missing = {one for kernel in kernels for one in kernel["missing"]}
    real_servers: dict[str, list[Document]] = {}
    for kernel in kernels:
        for one in kernel["realServers"]:
            real_servers.setdefault(one["realServer"], []).append(one)
    traffics = explain.traffics(port)
    for one in port["endpoints"]:
        address = f"[{one['address']}]:{one['port']}" if ":" in one["address"] else f"{one['address']}:{one['port']}"
        state = "MISSING: not in the kernel" if address in missing else explain.verdicts(one, traffics)
        is_other = one["internal"]["code"] == "duplicate"  # another row shows the figures of a duplicate
        shown = {"port": name, "pod": _pod(one), "address": address, "node": one["node"], "zone": one["zone"], "state": state}
        yield shown | _figures([] if is_other else real_servers.pop(address, []))
    for address, seen in real_servers.items():
        named = {"port": name, "pod": _pod(seen[0]), "address": address, "node": "", "zone": "", "state": seen[0]["state"]}
        yield named | _figures(seen)


def _pod(one: Document) -> str:
    """The name of the pod behind an endpoint or real server, without the namespace: the pod is in the Service's namespace."""
    return (one.get("target") or "").rpartition("/")[2]


def _figures(seen: Sequence[Document]) -> dict[str, Any]:
    """The weight of a real server, and the sums of its other figures over all virtual servers that have this real server."""
    sums = {name: _sum(each.get(name) for each in seen) for name in ("active", "inactive", "connectionsPerSecond")}
    return {"weight": next((each["weight"] for each in seen), None), **sums}


def _sum(figures: Iterable[float | None]) -> Any:
    """The sum of the known figures; None means that no figure is known."""
    known = [one for one in figures if one is not None]
    return sum(known) if known else None
