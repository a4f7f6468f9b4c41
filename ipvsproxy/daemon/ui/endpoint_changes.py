"""The changes that a sync has made to endpoints, as documents and as text.

An endpoint has a real server in each virtual server of its Service. This module shows all real servers of an endpoint as one
endpoint with the sum of their connections.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from ipvsproxy.model.kind import counted
from ipvsproxy.model.net import Address, parse_address
from ipvsproxy.model.plan import WeightChange
from ipvsproxy.model.service import Conditions, ServiceName
from ipvsproxy.reconcile.survey import Survey
from ipvsproxy.store.objects import Store
from ipvsproxy.translate.api.targets import Targets

SHOWN = 3
"""The largest number of endpoints that an event describes."""

Document = dict[str, Any]


def describe(changes: Iterable[WeightChange], survey: Survey, store: Store) -> tuple[list[Document], int]:
    """The first changed endpoints, and the number of further changed endpoints."""
    grouped: dict[tuple[ServiceName | None, Address], list[WeightChange]] = {}
    for one in changes:
        desired = survey.virtual_servers.get(one.virtual_server)
        service = desired.owner.service if desired else None
        grouped.setdefault((service, one.key.address), []).append(one)
    shown = sorted(grouped.items(), key=lambda one: (str(one[0][0] or ""), one[0][1]))[:SHOWN]
    return [_endpoint(*subject, of_one, survey, store) for subject, of_one in shown], len(grouped) - len(shown)


def _endpoint(
    service: ServiceName | None, address: Address, changes: Sequence[WeightChange], survey: Survey, store: Store
) -> Document:
    before = {(one.virtual_server, one.key): one.before for one in reversed(changes)}
    after = {(one.virtual_server, one.key): one.after for one in changes}
    counts = [counted for server, key in after if (counted := survey.draining_of(server).get(key))]
    conditions = _conditions(address, service, store)
    return {
        "service": str(service) if service else None,
        "address": str(address),
        "target": None,
        "node": conditions.node_name if conditions else "",
        "weightBefore": max((one for one in before.values() if one is not None), default=None),
        "weightAfter": max((one for one in after.values() if one is not None), default=None),
        "draining": any(key in survey.draining_of(virtual_server) for virtual_server, key in after),
        "connections": sum(one.active + one.inactive for one in counts) if counts else None,
    }


def _conditions(address: Address, service: ServiceName | None, store: Store) -> Conditions | None:
    for item in store.slices_of(service) if service else ():
        if address in (every := item.each_address):
            return item.conditions[every.index(address)]
    return None


def words(endpoint: Document) -> str:
    """A changed endpoint as text, such as ``10.244.1.12 (web-7d, node-b) weight 1 → 0, draining, 32 connections``."""
    pod = (endpoint["target"] or "").rpartition("/")[2]
    place = ", ".join(filter(None, (pod, endpoint["node"])))
    return f"{endpoint['address']}{f' ({place})' if place else ''} {_what(endpoint)}"


def _what(endpoint: Document) -> str:
    before, after, connections = endpoint["weightBefore"], endpoint["weightAfter"], endpoint["connections"]
    if after is None:
        return "removed"
    text = f"added, weight {after}" if before is None else f"weight {before} → {after}"
    if not endpoint["draining"]:
        return text if after else f"{text}, no new connections"
    return f"{text}, draining" + ("" if connections is None else f", {counted(connections, 'connection')}")


def name(events: Iterable[Document], targets: Targets) -> None:
    """Add the names of pods to events, as far as the names are known."""
    if not targets:
        return
    found = {(str(service), key.address): target for (service, key), target in targets.items()}
    for event in events:
        for one in event["endpoints"]:
            target = found.get((one["service"], parse_address(one["address"])))
            if target and not one["target"]:
                before = words(one)
                one["target"], one["node"] = target.name or None, one["node"] or target.node
                event["text"] = event["text"].replace(before, words(one), 1)


def sentence(endpoints: Iterable[Document], more: int) -> str:
    """A text that lists the endpoints, and names each Service once, before its endpoints.

    ``more`` is the number of further endpoints, which the text only counts.
    """
    parts: list[str] = []
    service = None
    for one in endpoints:
        parts.append((f"{one['service']}: " if one["service"] not in (None, service) else "") + words(one))
        service = one["service"]
    return "; ".join([*parts, *([counted(more, "more endpoint")] if more else [])])
