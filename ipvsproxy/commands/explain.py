"""``ipvsproxy explain`` gives the reasons for everything that ipvsproxy programs for a Service, or at an address."""

import asyncio
import contextlib
import itertools
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from ipvsproxy.commands import inspection, service_checks
from ipvsproxy.commands.inspection import CommandAnswer, Comparison, Document, Inspected
from ipvsproxy.config.settings import Config
from ipvsproxy.daemon.ui.explanation import Explainer
from ipvsproxy.kernel import rivals
from ipvsproxy.kernel.rivals import Rivals
from ipvsproxy.model import steps
from ipvsproxy.model.net import Address, Family, Protocol, host_port, parse_host_port
from ipvsproxy.model.real_servers import NO_THRESHOLDS, Thresholds
from ipvsproxy.model.service import ObjectKind, Service, ServiceName
from ipvsproxy.model.virtual_servers import FirewallMark, VirtualServerKey
from ipvsproxy.store.objects import Complaint, Store
from ipvsproxy.translate.api.targets import Targets
from ipvsproxy.translate.view import NodeView

_NAME = re.compile(r"([^/\s:[\]]+/)?[^/\s:[\]]+")


class Place(NamedTuple):
    """An address and a port; a ``port`` of 0 means all ports of the address."""

    address: Address
    port: int

    def matches(self, key: VirtualServerKey) -> bool:
        """Whether a virtual server has the address and port of the subject."""
        return key.address == self.address and self.port in (0, key.port)

    def __str__(self) -> str:
        return host_port(self.address, self.port) if self.port else str(self.address)


Subject = ServiceName | Place


def parse_subject(text: str) -> Subject:
    """Parse ``namespace/name``, ``name``, ``address``, ``address:port`` or ``[v6]:port``.

    If only a name is given, the namespace is empty.

    Raises:
        ValueError: the text is neither a name nor an address. (An address may have a port.)
    """
    with contextlib.suppress(ValueError):
        return Place(*parse_host_port(text.strip("[]") if text.endswith("]") else text))
    if _NAME.fullmatch(text) and not re.fullmatch(r"[\d.]+", text):  # a text of only digits and dots is a mistyped address
        namespace, _, name = text.rpartition("/")
        return ServiceName(namespace, name)
    raise ValueError(f"{text[:80]!r} is not namespace/name, name, address:port or [IPv6 address]:port")


def _is_named(subject: Subject, name: str) -> bool:
    """Whether ``name``, in the form ``namespace/name``, is the name of the subject.

    A subject without a namespace matches every namespace.
    """
    return isinstance(subject, ServiceName) and name in (str(subject), f"{name.partition('/')[0]}/{subject}")


async def describe(
    node: Inspected,
    subject: Subject,
    read_rivals: Callable[[Collection[tuple[Protocol, int]]], Rivals] = lambda _ports: Rivals(),
    targets: Targets = MappingProxyType({}),
) -> Document:
    """The explanation as a JSON document. ``targets`` are the pods behind all endpoints.

    ``read_rivals`` finds the programs and rules on this host that intercept packets to the given ports.

    Raises:
        UnknownStateError: the kernel could not be read.
    """
    comparison = Comparison(node)
    changes = await comparison.read()
    survey = comparison.survey
    if isinstance(subject, ServiceName):
        names = sorted(name for name in node.store.services if _is_named(subject, str(name)))
        keys = [key for name in names for key in _keys_of(comparison, name)]
    else:
        keys = [key for key in survey.virtual_server_keys() if subject.matches(key)]
        names = sorted({desired.owner.service for key in keys if (desired := survey.sides(key).desired)})
        names = names or sorted(name for name, one in node.store.services.items() if subject.address in _addresses(one))
    scopes = [key for name in names for key in _keys_of(comparison, name) if isinstance(key, FirewallMark)]
    observed = [key for key in dict.fromkeys((*keys, *scopes)) if survey.sides(key).observed]
    counts = await node.kernel.call(lambda kernel: kernel.connections(observed))
    services = [node.store.services[name] for name in names]
    read = await asyncio.to_thread(read_rivals, service_checks.ports_of(services)) if services else Rivals()
    collisions = list(
        service_checks.collisions(services, comparison.view, comparison.interface_addresses, read, comparison.translation)
    )
    explainer = Explainer(
        survey=survey,
        store=node.store,
        translation=comparison.translation,
        view=comparison.view,
        connections=lambda key, real_server: (counts.get(key) or {}).get(real_server),
        is_carried=comparison.carried.__contains__,
        targets=targets,
    )
    behind = _behind(subject, node.store, targets)
    return {
        **inspection.head("explain", node.config.node_name),
        "zone": comparison.view.zone,
        "services": [
            {
                **steps.at_once(explainer.describing(name, set(keys))),
                "collisions": [{"text": one.text, "remedy": one.remedy} for one in collisions if one.service == name],
            }
            for name in names
        ],
        "pods": [
            {
                "target": pod or None,
                "address": str(address),
                "services": [_serving(name, pod, address, explainer, comparison) for name in sorted(services)],
            }
            for (pod, address), services in sorted(behind.items())
        ],
        "notUsed": [
            *_rejected(subject, changes.complaints, set(map(str, names))),
            *([] if keys else _unserved_loopback(subject, node.store.services.values(), comparison.view)),
        ],
        "unclaimed": [explainer.unclaimed(key) for key in keys if not survey.sides(key).desired],
    }


def _addresses(service: Service) -> Sequence[Address]:
    """All addresses that a Service has, whether or not this node serves them."""
    options = service.options
    return (*service.cluster_addresses, *options.external_addresses, *options.load_balancer_addresses)


def _behind(subject: Subject, store: Store, targets: Targets) -> Mapping[tuple[str, Address], set[ServiceName]]:
    """The Services of each endpoint with the given name or address.

    A key is the endpoint's name (empty if unknown) and address.
    """
    address = subject.address if isinstance(subject, Place) else None
    found: dict[tuple[str, Address], set[ServiceName]] = {}
    for (service, key), target in targets.items():
        if key.address == address or _is_named(subject, target.name):
            found.setdefault((target.name, key.address), set()).add(service)
    named = set().union(*found.values())
    if address is not None:
        for service in store.services:
            if service not in named and any(address in one.each_address for one in store.slices_of(service)):
                found.setdefault(("", address), set()).add(service)
    return found


def _serving(name: ServiceName, pod: str, address: Address, explainer: Explainer, comparison: Comparison) -> Document:
    """The Service's ports with the pod as a used or unused endpoint; if there are none, ``reason`` says why."""
    if name not in comparison.store.services:
        return {"service": str(name), "ports": [], "reason": _NOT_ASKED_FOR}
    document = steps.at_once(explainer.describing(name, set(_keys_of(comparison, name))))
    ports = [
        {**{field: port[field] for field in ("name", "protocol", "port", "family")}, "endpoint": one, "traffics": traffics(port)}
        for port in document["ports"]
        for one in port["endpoints"]
        if one["address"] == str(address) and one["target"] in (pod or None, None)
    ]
    reasons = [one["reason"] for one in (*document["notUsed"], *document["slicesNotUsed"])]
    return {"service": str(name), "ports": ports, "reason": "" if ports else "; ".join(reasons)}


def _rejected(subject: Subject, complaints: Iterable[Complaint], known: Collection[str]) -> Iterator[Document]:
    """The reason why ipvsproxy uses no part of the object with this name.

    The unused parts of a known Service are shown together with the Service.
    """
    for complaint in complaints:
        is_shown = complaint.name in known and not complaint.where
        if complaint.kind is ObjectKind.SERVICE and _is_named(subject, complaint.name) and not is_shown:
            for one in complaint.skipped:
                yield {"object": f"Service {complaint.name}", "field": one.field, "reason": one.reason, "where": complaint.where}


def _unserved_loopback(subject: Subject, services: Iterable[Service], view: NodeView) -> Iterator[Document]:
    """A text that says why node ports do not answer on a loopback address, and on which addresses node ports answer."""
    if not isinstance(subject, Place) or not subject.address.is_loopback:
        return
    family = subject.address.family
    for service in sorted(services, key=lambda one: one.name):
        for port in service.ports:
            if port.node_port and subject.port in (0, port.node_port):
                cluster = [host_port(one, port.port) for one in service.cluster_addresses if one.family is family]
                instead = [host_port(one, port.node_port) for one in view.node_port_addresses[family]] + cluster
                where = f"node port {port.node_port} of {service.name}"
                use = f"use {' or '.join(instead)}" if instead else f"this node has no address of {family.label} for it"
                yield {"object": str(subject), "field": "", "reason": f"{where}: {_LOOPBACK}; {use}", "where": ""}


def _keys_of(comparison: Comparison, name: ServiceName) -> Iterable[VirtualServerKey]:
    state = comparison.survey.states.get(name)
    return state.virtual_servers if state else ()


def run(config: Config, subject: Subject) -> int:
    """Run ``ipvsproxy explain``; returns the exit status."""

    async def answer(node: Inspected) -> CommandAnswer:
        targets, problems = await node.targets()
        document = await describe(node, subject, rivals.read, targets)
        is_known = document["notUsed"] or document["unclaimed"] or document["pods"]
        is_served = any(one["ports"] or isinstance(subject, ServiceName) for one in document["services"])
        return CommandAnswer(document, inspection.WELL if is_known or is_served else inspection.NOT_WELL, problems)

    return inspection.run(config, answer, lambda document: render(document, str(subject)))


_LOOPBACK = (
    "IPVS serves no node port on loopback addresses, nor with kube-proxy, because packets from them may not leave this host"
)
_WHOLE = frozenset(family.bits for family in Family)
"""The prefix lengths of single addresses."""
_TRAFFIC = {
    "internal": "the cluster IP",
    "external": "all other addresses",
    "cluster": "all other addresses, of clients of this node",
}


_NOT_ASKED_FOR = (
    "the API server is not asked for headless Services (spec.clusterIP None), nor for those of another proxy "
    "(label service.kubernetes.io/service-proxy-name)"
)


def render(document: Document, subject: str) -> Iterator[str]:
    """The document as lines of text."""
    if not any(document[part] for part in ("services", "pods", "notUsed", "unclaimed")):
        yield f"{subject}: no Service or endpoint of this name, and no virtual server or endpoint at this address"
        if _NAME.fullmatch(subject):
            yield f"  {_NOT_ASKED_FOR}"
    yield from _not_used(document["notUsed"])
    for service in document["services"]:
        yield from _service(service)
    for pod in document["pods"]:
        yield from _pod(pod)
    for one in document["unclaimed"]:
        yield f"{one['virtualServer']}: {one['reason']}"
        yield from _kernel(one["kernel"], "  ")


def facts(service: Document) -> list[str]:
    """The settings of a Service that differ from their default values."""
    found = [f"{side} traffic Local" for side in ("internal", "external") if service[f"{side}TrafficPolicy"] == "Local"]
    if service["sessionAffinitySeconds"]:
        found.append(f"session affinity {service['sessionAffinitySeconds']} s")
    if service["slowStartSeconds"]:
        found.append(f"slow start {service['slowStartSeconds']} s")
    if service["drainDeadlineSeconds"]:
        found.append(f"drain deadline {service['drainDeadlineSeconds']} s")
    return found


def not_used(service: Document) -> Iterator[str]:
    """The parts of a Service, and of its EndpointSlices, that ipvsproxy does not use."""
    yield from _not_used(service["notUsed"])
    for one in service["slicesNotUsed"]:
        yield f"  not used: EndpointSlice {one['slice']}: {one['reason']}"


def _service(service: Document) -> Iterator[str]:
    yield f"Service {service['service']} ({', '.join([service['type'], *facts(service)])})"
    yield from not_used(service)
    for one in service["collisions"]:
        yield f"  collides: {one['text']}; {one['remedy']}"
    if service["served"] and not service["ports"]:
        yield "  no virtual server: nothing is served here"
    for port in service["ports"]:
        yield from _port(service["service"], port, service["sourceRanges"])


def _pod(pod: Document) -> Iterator[str]:
    """The kinds of traffic that an endpoint serves, and the reason why the endpoint does not serve the other kinds."""
    where = next((_where(port["endpoint"]) for service in pod["services"] for port in service["ports"]), "")
    yield (f"endpoint {pod['target']} ({pod['address']})" if pod["target"] else f"endpoint {pod['address']}") + where
    for service in pod["services"]:
        for port in service["ports"]:
            name = f" {port['name']!r}" if port["name"] else ""
            verdict = verdicts(port["endpoint"], port["traffics"])
            yield f"  {service['service']} port{name} {port['protocol']} {port['port']}, {port['family']}: {verdict}"
        if not service["ports"]:
            yield f"  {service['service']}: OUT: {service['reason'] or 'no virtual server of this Service is on this node'}"


def verdicts(endpoint: Document, traffics: Iterable[str]) -> str:
    """Whether an endpoint gets connections of the given kinds of traffic, and the reason if it gets no connections."""
    by_traffic = {traffic: _verdict(endpoint, traffic) for traffic in traffics}
    if len(set(by_traffic.values())) > 1:
        by_traffic = {traffic: f"{verdict} for traffic to {_TRAFFIC[traffic]}" for traffic, verdict in by_traffic.items()}
    return "; ".join(dict.fromkeys(by_traffic.values()))


def _not_used(parts: Iterable[Document]) -> Iterator[str]:
    for one in parts:
        field = f" {one['field']}" if one["field"] else ""
        where = f" ({one['where']})" if one.get("where") else ""
        yield f"  not used: {one['object']}{field}: {one['reason']}{where}"


def _port(service: str, port: Document, source_ranges: Sequence[str]) -> Iterator[str]:
    name = f" {port['name']!r}" if port["name"] else ""
    node_port = f", node port {port['nodePort']}" if port["nodePort"] else ""
    yield ""
    yield f"  port{name} {port['protocol']} {port['port']}{node_port}, {port['family']}"
    for one in port["virtualServers"]:
        yield from _virtual_server(service, one, source_ranges)
    for scope, clients in _SCOPES.items():
        if port.get(scope):
            yield from _scope(port[scope], clients)
    yield from _endpoints(port)
    if port["hairpinSet"]:
        yield f"    a pod that reaches itself: masqueraded by KUBE-POSTROUTING, set {port['hairpinSet']}"


_SCOPES: Mapping[str, str] = {
    "clusterScope": "clients of this node",
    "directReturn": "clients outside, whom endpoints of other nodes answer directly,",
    "fromTunnels": "packets that other nodes have sent here by tunnel",
}
"""The text that names the clients of each second scope. The key is the scope's field in a port's document."""


def _scope(scope: Document, clients: str) -> Iterator[str]:
    addresses = ", ".join(scope["addresses"])
    if scope["virtualServer"] is None:
        yield f"    NO SECOND SCOPE: no packet mark is left, so {clients.rstrip(',')} are served like all others at {addresses}"
        return
    yield f"    {scope['virtualServer']} ({clients} at {addresses}), {_choices(scope)}"
    yield from _kernel(scope["kernel"], "      ")
    if nodes := scope.get("masqueradedNodes"):
        yield f"      endpoints on {', '.join(nodes)}: masqueraded, since no tunnel leads there (annotation of the Node)"


def _virtual_server(service: str, one: Document, source_ranges: Sequence[str]) -> Iterator[str]:
    yield f"    {one['virtualServer']} ({one['role']}), {_choices(one)}"
    if not one["held"]:
        reasons = dict(zip(one["waiting"], one["reasons"], strict=True))
        yield f"      NOT SERVED for this Service: {one['owner']} {reasons[service]}"
    else:
        for waiting, reason in zip(one["waiting"], one["reasons"], strict=True):
            yield f"      also desired by {waiting}, which must wait: {service} {reason}"
    if one["sourceRangesApply"]:
        yield f"      only from {', '.join(source_ranges)}"
        if not one["usableByThisNode"]:
            yield "      this node itself is outside of these ranges and cannot use it (KUBE-IPVS-OUT-FILTER)"
    for (outcome, rules), ways in itertools.groupby(one["masquerade"], key=lambda way: (_outcome(way), way["rules"])):
        clients = " and ".join(f"from {way['from']}" for way in ways)
        yield f"      {clients}: {outcome}"
        yield from (f"        {rule}" for rule in rules)
    yield from _kernel(one["kernel"], "      ")


def _choices(one: Document) -> str:
    """The scheduler, the scheduler's flags, and the connection thresholds."""
    flags = [name for name in one["schedulerFlags"] if name != "thresholds"]
    limits = Thresholds.of(one)
    words = one["scheduler"] + (f" ({', '.join(flags)})" if flags else "")
    return f"{words}, {limits} of each endpoint" if limits != NO_THRESHOLDS else words


def _outcome(way: Document) -> str:
    if way["dropped"]:
        return "dropped, since only other nodes have endpoints"
    source = "masqueraded" if way["masqueraded"] else "the source address is kept"
    return f"to the second scope, {source}" if way["marked"] else source


def _kernel(kernel: Document | None, indent: str) -> Iterator[str]:
    if kernel is None:
        yield f"{indent}kernel: NOT THERE"
        return
    affinity = f", session affinity {kernel['sessionAffinitySeconds']} s" if kernel["sessionAffinitySeconds"] else ""
    if affinity and kernel["sessionAffinityPrefixLength"] not in _WHOLE:
        affinity += f" by /{kernel['sessionAffinityPrefixLength']}"
    flags = f" ({', '.join(kernel['schedulerFlags'])})" if kernel["schedulerFlags"] else ""
    nothing = "" if kernel["realServers"] else ", no real servers: clients are refused"
    yield f"{indent}kernel: {kernel['scheduler']}{flags}{affinity}{nothing}"
    for one in kernel["realServers"]:
        counts = "" if one["active"] is None else f", connections: {one['active']} active, {one['inactive']} inactive"
        state = "" if one["state"] == "serving" else f", {one['state']}"
        if one["tunnelTo"]:
            state += f" to {one['tunnelTo']}, whose endpoints answer past this node"
        weight = "" if one["weight"] is None else f" weight {one['weight']}"
        if weight and one["ownWeight"] not in (None, one["weight"]):
            weight += f" of {one['ownWeight']}"
        name = f" ({one['target']})" if one["target"] else ""
        yield f"{indent}  -> {one['realServer']}{name}{weight}{counts}{state}"
    for name in kernel["missing"]:
        yield f"{indent}  -> {name} MISSING"


def _endpoints(port: Document) -> Iterator[str]:
    """One list of endpoints for each kind of traffic, or a single list if all kinds have the same endpoints."""
    endpoints, separate = port["endpoints"], traffics(port)
    if all(one["internal"] == one[traffic] for one in endpoints for traffic in separate):
        separate = separate[:1]
    if not endpoints:
        yield "    endpoints: none"
    for traffic in separate if endpoints else ():
        to = _TRAFFIC[traffic]
        yield "    endpoints:" if len(separate) == 1 else f"    endpoints for traffic to {to}:"
        for one in endpoints:
            name = f"{one['target']} " if one["target"] else ""
            number = f" port {one['port']}" if one["port"] else ""
            yield f"      {name}{one['address']}{number}{_where(one)}: {_verdict(one, traffic)}"


def _where(endpoint: Document) -> str:
    """The node and zone of an endpoint as text, each preceded by a space; an unknown node or zone is left out."""
    node, zone = endpoint["node"], endpoint["zone"]
    return (f" on {node}" if node else "") + (f" in {zone}" if zone else "")


def traffics(port: Document) -> list[str]:
    """The kinds of traffic that a Service port receives."""
    found = sorted({one["traffic"] for one in port["virtualServers"]}, reverse=True)
    return [*found, "cluster"] if port["clusterScope"] and port["clusterScope"]["virtualServer"] else found


def _verdict(endpoint: Document, traffic: str) -> str:
    use = endpoint[traffic]
    return "in" if use["used"] else f"OUT: {use['reason']}{_hints(endpoint, use['code'])}"


def _hints(one: Document, code: str) -> str:
    hints = {"hint_for_other_zone": one["zoneHints"], "hint_for_other_node": one["nodeHints"]}.get(code)
    return f" ({', '.join(hints)})" if hints else ""
