"""From the daemon's documents to what ``ipvsproxy top`` shows. ``docs/ui.md`` describes the documents."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from ipvsproxy.commands.top_data import Details, Endpoint, Node, Picture, Service

Document = Mapping[str, Any]

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
