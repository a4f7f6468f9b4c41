"""``ipvsproxy explain``: the reasons for all that is programmed for a Service, or at an address."""

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from ipvsproxy.commands import explain_text, inspection
from ipvsproxy.commands.comparison import Comparison
from ipvsproxy.commands.inspection import Document, Inspected
from ipvsproxy.config.settings import Config
from ipvsproxy.kernel import iptables_rule
from ipvsproxy.model.kernel import (
    PERSISTENT,
    Connections,
    FirewallMark,
    IpSet,
    SetEntry,
    SetKind,
    VirtualServer,
    VirtualServerKey,
    VirtualServerSettings,
)
from ipvsproxy.model.net import Address, host_port, parse_address
from ipvsproxy.model.real_servers import NO_THRESHOLDS, NOT_MASQUERADED, RealServerKey, Thresholds
from ipvsproxy.model.service import EndpointSlice, Service, ServiceName
from ipvsproxy.reconcile.marks import MarkedPort
from ipvsproxy.translate import explain, trace
from ipvsproxy.translate.lingering import GRACE_S

FOUND = 0
UNKNOWN = 1
"""Exit status if there is no such Service, and no virtual server at the address."""

_NAME = re.compile(r"[^/\s]+/[^/\s]+")


class Place(NamedTuple):
    """An address and a port, or all of its ports if ``port`` is 0."""

    address: Address
    port: int

    def matches(self, key: VirtualServerKey) -> bool:
        """Whether a virtual server has this address and port."""
        return key.address == self.address and self.port in (0, key.port)

    def __str__(self) -> str:
        return host_port(self.address, self.port) if self.port else str(self.address)


Subject = ServiceName | Place


def parse_subject(text: str) -> Subject:
    """Read ``namespace/name``, ``address``, ``address:port`` or ``[v6]:port``.

    Raises:
        ValueError: it is none of these.
    """
    bracketed = re.fullmatch(r"\[([^\]]+)\](?::(\d{1,5}))?", text)
    plain = re.fullmatch(r"([\d.]+)(?::(\d{1,5}))?", text)
    match = bracketed or plain
    if match:
        return Place(parse_address(match[1]), int(match[2] or 0))
    if text.count(":") > 1:
        return Place(parse_address(text), 0)
    if _NAME.fullmatch(text):
        return ServiceName(*text.split("/"))
    raise ValueError(f"{text[:80]!r} is none of namespace/name, address:port, [IPv6 address]:port")


async def describe(node: Inspected, subject: Subject) -> Document:
    """The explanation as a document.

    Raises:
        UnknownStateError: the kernel could not be read.
    """
    comparison = node.comparison()
    await comparison.read()
    survey = comparison.survey
    if isinstance(subject, ServiceName):
        keys = list(_keys_of(comparison, subject))
        names = [subject] if subject in node.store.services else []
    else:
        keys = [key for key in survey.virtual_server_keys() if subject.matches(key)]
        names = sorted({desired.owner.service for key in keys if (desired := survey.sides(key).desired)})
    scopes = [key for name in names for key in _keys_of(comparison, name) if isinstance(key, FirewallMark)]
    observed = [key for key in dict.fromkeys((*keys, *scopes)) if survey.sides(key).observed]
    counts = await node.kernel.call(lambda kernel: kernel.connections(observed))
    reader = _Reader(comparison, counts)
    return {
        "version": inspection.JSON_VERSION,
        "command": "explain",
        "node": node.config.node_name,
        "zone": comparison.view.zone,
        "services": [reader.service(name, set(keys)) for name in names],
        "unclaimed": [reader.unclaimed(key) for key in keys if not survey.sides(key).desired],
    }


def _keys_of(comparison: Comparison, name: ServiceName) -> Iterable[VirtualServerKey]:
    state = comparison.survey.states.get(name)
    return state.virtual_servers if state else ()


class _Reader:
    """Describes Services and virtual servers after a reading of the kernel."""

    def __init__(
        self, comparison: Comparison, counts: Mapping[VirtualServerKey, Mapping[RealServerKey, Connections] | None]
    ) -> None:
        self._comparison = comparison
        self._survey = comparison.survey
        self._counts = counts

    def service(self, name: ServiceName, keys: set[VirtualServerKey]) -> Document:
        """A Service, with these of its virtual servers."""
        store, translation, view = self._comparison.store, self._comparison.translation, self._comparison.view
        service, slices = store.services[name], store.slices_of(name)
        explained = explain.explain(service, slices, view, translation)
        ports = [self._port(explained, use, keys) for use in explained.ports]
        return {
            "service": str(name),
            "type": service.options.type.value,
            "served": service.not_served is None,
            "internalTrafficPolicy": "Local" if service.options.internal_traffic_local else "Cluster",
            "externalTrafficPolicy": "Local" if service.options.external_traffic_local else "Cluster",
            "sessionAffinitySeconds": service.options.affinity_timeout_s,
            "slowStartSeconds": explained.desired.rare.slow_start_s,
            "drainDeadlineSeconds": explained.desired.rare.drain_deadline_s or None,
            "sourceRanges": [str(one) for one in service.options.source_ranges],
            "notUsed": [
                {"object": where or f"Service {name}", "field": one.field, "reason": one.reason, "invalid": one.invalid}
                for where, skipped in explained.skipped.items()
                for one in skipped
            ],
            "slicesNotUsed": self._slices_not_used(service, slices),
            "ports": [port for port in ports if port["virtualServers"]],
        }

    def _slices_not_used(self, service: Service, slices: Iterable[EndpointSlice]) -> list[Document]:
        unserved = explain.unserved_slices(service, slices, self._comparison.translation)
        return [{"slice": str(item.name), "code": why.code, "reason": why.reason} for item, why in unserved]

    def _port(self, explained: explain.Explanation, use: explain.PortUse, keys: set[VirtualServerKey]) -> Document:
        frontends = [one for one in use.frontends if one.virtual_server.key in keys]
        return {
            "name": use.port.name,
            "protocol": use.port.protocol.name,
            "port": use.port.port,
            "nodePort": use.port.node_port,
            "family": use.family.label,
            "virtualServers": [self._frontend(explained, one) for one in frontends],
            "clusterScope": self._cluster_scope(explained, use),
            "endpoints": [_endpoint(one) for one in use.endpoints],
            "hairpinSet": next((one.set for one in explained.desired.entries if _is_hairpin(one, use)), ""),
        }

    def _cluster_scope(self, explained: explain.Explanation, use: explain.PortUse) -> Document | None:
        """The second scope of the port's external addresses; None without one."""
        port = (use.family, use.port.protocol, use.port.port)
        scopes = explained.desired.rare.scopes
        scope = next((one for one in scopes if (one.family, one.protocol, one.port) == port), None)
        if scope is None:
            return None
        key = self._survey.scope(MarkedPort(explained.service.name, scope.protocol, scope.port), scope.family)
        return {
            "virtualServer": str(key) if key else None,
            "addresses": [str(one) for one in scope.virtual_servers],
            **_choices(scope.settings, scope.thresholds),
            "kernel": self._kernel(key, self._survey.sides(key).desired) if key else None,
        }

    def _has_scope(self, explained: explain.Explanation, key: VirtualServerKey) -> bool:
        """Whether packets to an address get the mark of a second scope."""
        scopes = (one for one in explained.desired.rare.scopes if key in one.virtual_servers)
        name = explained.service.name
        return any(self._survey.scope(MarkedPort(name, one.protocol, one.port), one.family) for one in scopes)

    def _frontend(self, explained: explain.Explanation, frontend: explain.Frontend) -> Document:
        desired = frontend.virtual_server
        key, owner = desired.key, self._survey.states[explained.service.name].owner
        conflict = next((one for one in self._survey.conflicts() if one.key == key), None)
        is_restricted = frontend.role is explain.Role.LOAD_BALANCER_IP and bool(explained.service.options.source_ranges)
        return {
            "virtualServer": str(key),
            "role": frontend.role.value,
            "traffic": "internal" if frontend.role is explain.Role.CLUSTER_IP else "external",
            "held": self._survey.has(owner, key),
            "owner": str(self._survey.virtual_servers[key].owner),
            "waiting": [str(one) for one in conflict.waiting] if conflict else [],
            "reasons": list(conflict.reasons) if conflict else [],
            **_choices(desired.settings, desired.thresholds),
            "sourceRangesApply": is_restricted,
            "usableByThisNode": key not in explained.desired.rare.refused,
            "masquerade": [self._masquerade(client, key, has_scopes=self._has_scope(explained, key)) for client in trace.Client],
            "kernel": self._kernel(key, desired),
        }

    def _masquerade(self, client: trace.Client, key: VirtualServerKey, *, has_scopes: bool) -> Document:
        comparison = self._comparison
        connection = trace.connection_of(client, key, comparison.translation, comparison.view)
        rules = self._survey.rules(key.address.family)
        way = trace.follow(rules, self._survey.is_desired_entry, connection, has_scopes=has_scopes)
        return {
            "from": client.value,
            "masqueraded": way.is_masqueraded,
            "marked": way.is_marked,
            "dropped": way.is_dropped,
            "rules": [
                f"-t {applied.chain.table} -A {applied.chain.chain} {iptables_rule.render(applied.rule, key.address.family)}"
                for applied in way.applied_rules
            ],
            "sets": [applied.rule.set.set for applied in way.applied_rules if applied.rule.set],
        }

    def _kernel(self, key: VirtualServerKey, desired: VirtualServer | None) -> Document | None:
        """The observed virtual server; None if the kernel has none."""
        observed = self._survey.sides(key).observed
        if observed is None:
            return None
        counts = self._counts.get(key) or {}
        real_servers = desired.real_servers if desired else frozenset(observed.real_servers)
        weights = desired.weights if desired else observed.real_servers
        return {
            "scheduler": observed.settings.scheduler,
            "schedulerFlags": observed.settings.flag_names,
            "sessionAffinitySeconds": observed.settings.timeout_s if observed.settings.flags & PERSISTENT else 0,
            "sessionAffinityPrefixLength": observed.settings.prefix_length or key.address.family.bits,
            "realServers": [
                _real_server(one, weight, counts.get(one), weights) | _limits((observed.thresholds or {}).get(one, NO_THRESHOLDS))
                for one, weight in observed.real_servers.items()
            ],
            "missing": sorted(str(one) for one in real_servers - observed.real_servers.keys()),
        }

    def unclaimed(self, key: VirtualServerKey) -> Document:
        """A virtual server that is desired by no Service."""
        is_foreign = self._survey.sides(key).is_foreign
        return {
            "virtualServer": str(key),
            "foreign": is_foreign,
            "reason": "it is not ours: no set entry and no address of ours is its witness; it is left alone"
            if is_foreign
            else f"no Service desires it any more; its witness is {self._witness(key)}, so run removes it{self._when(key)}",
            "kernel": self._kernel(key, None),
        }

    def _when(self, key: VirtualServerKey) -> str:
        return "" if self._comparison.is_carried(key.address) else f", {GRACE_S:.0f} s after the node lost its address"

    def _witness(self, key: VirtualServerKey) -> str:
        match self._survey.witness(key):
            case SetEntry() as entry:
                return entry.set
            case None:
                return "a set"
            case _:
                return "its address on kube-ipvs0"


def _is_hairpin(entry: SetEntry, use: explain.PortUse) -> bool:
    """Whether the entry lets an endpoint of the port on this node reach itself."""
    if entry.set != IpSet(SetKind.LOOP_BACK, use.family).name or entry.protocol is not use.port.protocol:
        return False
    return any((entry.address, entry.port) == (one.endpoint.address, one.port) for one in use.endpoints)


def _choices(settings: VirtualServerSettings, thresholds: Thresholds) -> dict[str, object]:
    """The settings that a Service may choose."""
    return {"scheduler": settings.scheduler, "schedulerFlags": settings.flag_names, **_limits(thresholds)}


def _limits(thresholds: Thresholds) -> dict[str, object]:
    return {"maxConnections": thresholds.upper or None, "resumeConnections": thresholds.lower or None}


def _real_server(
    key: RealServerKey, weight: int, counts: Connections | None, desired: Mapping[RealServerKey, int]
) -> dict[str, object]:
    """A real server; ``desired`` has the own weight of each that is desired: with slow start, it may have less for a while."""
    is_ours = weight != NOT_MASQUERADED
    if key in desired and 0 < weight < desired[key]:
        state = "on its way to its own weight"
    elif key in desired and (weight or not desired[key]):
        state = "serving" if weight else "no new connections"
    else:
        state = "draining" if weight == 0 else "not desired"
    return {
        "realServer": str(key),
        "weight": weight if is_ours else None,
        "ownWeight": desired.get(key),
        "active": counts.active if counts else None,
        "inactive": counts.inactive if counts else None,
        "state": state if is_ours else "not masqueraded",
    }


def _endpoint(use: explain.EndpointUse) -> Document:
    address, conditions = use.endpoint
    return {
        "address": str(address),
        "port": use.port,
        "node": conditions.node_name,
        "slice": str(use.slice),
        "ready": conditions.ready,
        "serving": conditions.serving,
        "terminating": conditions.terminating,
        "zoneHints": sorted(conditions.zone_hints),
        "nodeHints": sorted(conditions.node_hints),
        **{scope: _use(why) for scope, why in (("internal", use.internal), ("external", use.external), ("cluster", use.cluster))},
    }


def _use(why_not: explain.NotUsed | None) -> Document:
    return {"used": why_not is None, "code": why_not.code if why_not else "", "reason": why_not.reason if why_not else ""}


def run(config: Config, subject: Subject, *, as_json: bool) -> int:
    """``ipvsproxy explain``; returns the exit status."""

    async def read(node: Inspected) -> int:
        document = await describe(node, subject)
        inspection.show(document, explain_text.render(document, str(subject)), as_json=as_json)
        return FOUND if document["services"] or document["unclaimed"] else UNKNOWN

    return inspection.run(config, read)
