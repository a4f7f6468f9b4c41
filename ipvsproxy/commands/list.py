"""``ipvsproxy list``: prints the table that ``ipvsadm -Ln`` prints, with the names of Services and pods next to the addresses."""

import ipaddress
from collections.abc import Iterator
from typing import NamedTuple

from ipvsproxy.commands import inspection, top_data
from ipvsproxy.commands.inspection import CommandAnswer, Comparison, Document, Inspected
from ipvsproxy.config.settings import Config
from ipvsproxy.daemon.base.cannot_start import CannotStartError
from ipvsproxy.daemon.sources import source as sources
from ipvsproxy.daemon.ui.board import Query, parse_query
from ipvsproxy.kernel.base.errors import KernelError
from ipvsproxy.kernel.ipvs import rows as ipvs_rows
from ipvsproxy.kernel.ipvs.rows import MASQUERADED, TUNNEL, IpvsTable, RealServerRow, VirtualServerRow
from ipvsproxy.model.net import Family
from ipvsproxy.model.real_servers import TUNNELLED
from ipvsproxy.model.virtual_servers import PERSISTENT, FirewallMark, VirtualServerKey
from ipvsproxy.reconcile.survey import Survey
from ipvsproxy.store.objects import Store
from ipvsproxy.translate.api.targets import Targets

NAME_COLUMN = 70
"""The width, in characters, of ipvsadm's row for an IPv4 real server. Names of Kubernetes objects follow the row on the same
line."""


async def describe(node: Inspected, rows: IpvsTable, targets: Targets, text: str = "") -> Document:
    """The table of IPVS with the names of Services and pods, reduced to the virtual servers that match the filter ``text``.

    The caller must have read ``rows`` from the kernel a moment ago.

    Raises:
        UnknownStateError: a part of the kernel could not be read.
    """
    comparison = Comparison(node)
    await comparison.read()
    names = _Names(comparison.survey, comparison.store, targets)
    document, query = table(node.config.node_name, rows, names), _query(text)
    pairs = zip(rows.virtual_servers, document["virtualServers"], strict=True)
    return {**document, "virtualServers": [one for row, one in pairs if names.matches(row.key, one, query)]}


def _query(text: str) -> Query:
    given = top_data.parameters(text)
    namespace, kind, node = (given.get(name, "") for name in ("namespace", "type", "node"))
    return parse_query(given["query"])._replace(namespace=namespace, type=kind, node=node, only_problems="problems" in given)


class _Names(NamedTuple):
    """Finds the names of the Services and pods that belong to the rows of the table."""

    survey: Survey
    store: Store
    targets: Targets

    def matches(self, key: VirtualServerKey, one: Document, query: Query) -> bool:
        """Whether a virtual server passes a filter.

        A virtual server without a Service passes only an empty filter or the filter for problems.
        """
        desired = self.survey.sides(key).desired
        service = self.store.services.get(desired.owner.service) if desired else None
        has_problems = bool(one["problems"] or any(each["state"] in _WRONG for each in one["realServers"]))
        if service is None:
            return query == Query(only_problems=query.only_problems) and (has_problems or not query.only_problems)
        return query.matches(service, self.store.slices_of(service.name), has_problems=has_problems)

    def virtual_server(self, row: VirtualServerRow) -> Document:
        """The owner of a virtual server, and the virtual server's problem.

        If no Service owns the virtual server, all names are null.
        """
        key = row.key
        sides = self.survey.sides(key)
        name = sides.desired.owner.service if sides.desired else None
        service = self.store.services.get(name) if name else None
        port = self.survey.service_port(service, sides.desired) if service and sides.desired else None
        is_scope = isinstance(key, FirewallMark)
        return {
            "owner": "service" if name else "other" if sides.is_foreign else "stale" if sides.observed else "unknown",
            "service": str(name) if name else None,
            "servicePort": (port.name or str(port.port)) if port else str(key.port) if name and not is_scope else None,
            "secondScope": is_scope and name is not None,
            "problems": list(self._problems(row)),
        }

    def _problems(self, row: VirtualServerRow) -> Iterator[str]:
        sides = self.survey.sides(row.key)
        if sides.desired:
            found = {one.key for one in row.real_servers}
            if not found:
                yield "no real servers"
            yield from (f"{one} is missing" for one in sides.desired.real_servers if one not in found)
        elif sides.observed and not sides.is_foreign:
            yield "no Service desires it any more"

    def real_server(self, key: VirtualServerKey, row: RealServerRow) -> Document:
        """The name and the node of the pod (or other target) behind a real server, and the state of the real server."""
        desired = self.survey.sides(key).desired
        target = self.targets.get((desired.owner.service, row.key)) if desired else None
        return {
            "target": target.name or None if target else None,
            "node": target.node or None if target else None,
            "state": _state(row, desired.weights.unpacked().get(row.key)) if desired else None,
        }


_WRONG = ("not desired", "not masqueraded")
"""The states in which a real server counts as a problem."""


def _state(row: RealServerRow, desired: int | None) -> str:
    by_tunnel = row.method == TUNNEL if desired is None else desired >= TUNNELLED  # may be draining
    if row.method != (TUNNEL if by_tunnel else MASQUERADED):
        return "not masqueraded"
    if desired is not None:
        return "serving" if row.weight else "no new connections"
    return "not desired" if row.weight else "draining"


def table(node_name: str, rows: IpvsTable, names: _Names | None = None) -> Document:
    """The table as a JSON document.

    ``names`` is None if the node's Services are not known; the document then names no Services.
    """
    return {
        **inspection.head("list", node_name),
        "ipvs": {"version": rows.version, "connectionTableSize": rows.size},
        "named": names is not None,
        "virtualServers": [_virtual_server(one, names) for one in rows.virtual_servers],
    }


def _virtual_server(row: VirtualServerRow, names: _Names | None) -> Document:
    key = row.key
    is_mark = isinstance(key, FirewallMark)
    return {
        "virtualServer": str(key),
        "family": key.address.family.label,
        "protocol": None if is_mark else key.protocol.name,
        "address": None if is_mark else str(key.address),
        "port": None if is_mark else key.port,
        "mark": key.mark if isinstance(key, FirewallMark) else None,
        "scheduler": row.settings.scheduler,
        "schedulerFlags": row.scheduler_flags,
        "persistentSeconds": row.settings.timeout_s if row.settings.flags & PERSISTENT else None,
        "persistencePrefixLength": row.prefix_length,
        "persistenceEngine": row.engine or None,
        "onePacket": bool(row.settings.flags & ipvs_rows.ONE_PACKET),
        **(names.virtual_server(row) if names else {}),
        "realServers": [
            {
                "realServer": str(one.key),
                "forward": one.method,
                "weight": one.weight,
                "active": one.connections.active,
                "inactive": one.connections.inactive,
                **(names.real_server(key, one) if names else {}),
            }
            for one in row.real_servers
        ],
    }


def render(document: Document) -> Iterator[str]:
    """The table as ipvsadm prints it, with names at the end of the rows."""
    ipvs = document["ipvs"]
    yield f"IP Virtual Server version {ipvs['version']} (size={ipvs['connectionTableSize']})"
    titles = ("Service port", "pod, node") if document["named"] else ("", "")
    yield _beside("Prot LocalAddress:Port Scheduler Flags", titles[0])
    yield _beside("  -> RemoteAddress:Port           Forward Weight ActiveConn InActConn", titles[1])
    for one in document["virtualServers"]:
        yield _beside(_heading(one), _service(one))
        for each in one["realServers"]:
            row = f"  -> {each['realServer']:<28} {each['forward']:<7} {each['weight']:<6} "
            yield _beside(f"{row}{each['active']:<10} {each['inactive']:<10}", _target(each))


def _beside(row: str, name: str) -> str:
    return f"{row:<{NAME_COLUMN}}  {name}" if name else row


def _heading(one: Document) -> str:
    """The table row of a virtual server, as text."""
    if one["mark"] is not None:
        name = f"FWM  {one['mark']}" + (" IPv6" if one["family"] == "IPv6" else "")
    else:
        name = f"{one['protocol']:<4} {one['virtualServer'].partition(' ')[2]}"
    words = [name, one["scheduler"]]
    if one["schedulerFlags"]:
        words.append(f"({','.join(one['schedulerFlags'])})")
    if one["persistentSeconds"] is not None:
        words.append(f"persistent {one['persistentSeconds']}")
        words += _netmask(one["family"], one["persistencePrefixLength"])
    if one["persistenceEngine"]:
        words.append(f"pe {one['persistenceEngine']}")
    if one["onePacket"]:
        words.append("ops")
    return " ".join(words)


def _netmask(family: str, prefix_length: int) -> list[str]:
    """The netmask of session affinity as text; empty if session affinity compares whole addresses of clients."""
    if family == Family.IPV6.label:
        return [f"mask {prefix_length}"] if prefix_length != Family.IPV6.bits else []
    return [f"mask {ipaddress.ip_network((0, prefix_length)).netmask}"] if prefix_length != Family.IPV4.bits else []


_NO_SERVICE = {"other": "(not ours)", "stale": "(no Service desires it any more)", "unknown": "(removed meanwhile)"}


def _service(one: Document) -> str:
    if one.get("owner") != "service":
        return _NO_SERVICE.get(str(one.get("owner")), "")
    name = f"{one['service']}:{one['servicePort']}" if one["servicePort"] else one["service"]
    remarks = ["second scope"] * one["secondScope"] + one["problems"]
    return f"{name} ({'; '.join(remarks)})" if remarks else str(name)


def _target(one: Document) -> str:
    state = one.get("state")
    words = [one["target"] or "" if state else "", f"on {one['node']}" if state and one["node"] else ""]
    if state not in (None, "serving"):
        words.append(f"({state})")
    return " ".join(filter(None, words))


def run(config: Config) -> int:
    """Run ``ipvsproxy list``; returns the exit status."""
    return inspection.execute(config, _read(config), render, "nothing can be said about this node, and nothing was changed")


async def _read(config: Config) -> CommandAnswer:
    """The table of IPVS, and the reasons why it lacks names of Services or pods.

    Raises:
        CannotStartError: the process lacks a privilege, or the kernel has no IPVS.
        KernelError: the table could not be read.
    """
    async with inspection.readable_kernel(config) as kernel:
        try:
            source = await sources.make(config)
            node = await inspection.inspect(config, kernel, source)
            async with inspection.following(source, node.store):
                targets, problems = await node.targets()
                rows = await kernel.call(lambda _: ipvs_rows.read())
                document = await describe(node, rows, targets, config.top.filter)
        except (CannotStartError, KernelError) as error:
            problems = inspection.reasons_of(error)
            document = table(config.node_name, await kernel.call(lambda _: ipvs_rows.read()))
    if not problems:
        return CommandAnswer(document)
    return CommandAnswer(document, inspection.CANNOT_TELL, (*problems, "names are missing above; the kernel's table is complete"))
