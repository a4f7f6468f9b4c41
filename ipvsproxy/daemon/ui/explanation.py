"""All that is known about a Service or a virtual server, as a document for ``ipvsproxy explain`` and for the web page.

Rule: this module makes no decisions. The reasons come from the modules ``explanations`` and ``trace`` of ``translate``, and the
desired and observed state come from the survey.
"""

import dataclasses
from collections.abc import Callable, Collection, Generator, Iterable, Mapping
from typing import Any, NamedTuple

from ipvsproxy.model import steps
from ipvsproxy.model.kernel import DEVICE, BoundAddresses, LocalRoutes
from ipvsproxy.model.net import Address, Family, Protocol
from ipvsproxy.model.real_servers import NO_THRESHOLDS, NOT_MASQUERADED, TUNNELLED, RealServerKey, Thresholds, without_method
from ipvsproxy.model.rules import render
from ipvsproxy.model.service import Service, ServiceName
from ipvsproxy.model.sets import IP_SETS, SetEntry, SetKind
from ipvsproxy.model.state import Clients, ClusterScope
from ipvsproxy.model.virtual_servers import (
    PERSISTENT,
    ConnectionCounts,
    Role,
    VirtualServer,
    VirtualServerKey,
    VirtualServerSettings,
)
from ipvsproxy.reconcile.survey import Survey
from ipvsproxy.reconcile.tables.scopes import MarkedPort
from ipvsproxy.store.objects import Store
from ipvsproxy.translate import trace
from ipvsproxy.translate.api.targets import Targets
from ipvsproxy.translate.services import explanations
from ipvsproxy.translate.translation_settings import Settings
from ipvsproxy.translate.view import GRACE_S, NodeView

Document = dict[str, Any]


class _Indexed(NamedTuple):
    """The facts about a Service that are needed for each of its ports and virtual servers.

    For each endpoint that may connect to itself, ``hairpins`` has the name of the set with the endpoint's entry. ``scopes`` has
    the second scopes; the key is the IP family, the protocol, the port and the clients. ``scoped`` are the keys of the virtual
    servers whose packets get the mark of a second scope. ``refused`` are the virtual servers that this node itself may not use.
    """

    service: Service
    hairpins: Mapping[tuple[Protocol, RealServerKey], str]
    scopes: Mapping[tuple[Family, Protocol, int, Clients], ClusterScope]
    scoped: Collection[VirtualServerKey]
    refused: Collection[VirtualServerKey]


ENDPOINTS_AT_ONCE = 50
"""The number of endpoints that are described between two pauses. Describing them takes less than a millisecond."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Explainer:
    """Describes Services and virtual servers.

    The desired state in the survey was made from ``view``, the view of this node. ``is_carried`` returns whether a given
    address is present on the node. ``connections`` returns the connections of a real server, as far as they are known. ``rates``
    returns the traffic rates of a real server as fields of the document; by default, no fields. ``targets`` are the pods behind
    the described endpoints, as far as they are known.
    """

    survey: Survey
    store: Store
    translation: Settings
    view: NodeView
    connections: Callable[[VirtualServerKey, RealServerKey], ConnectionCounts | None]
    is_carried: Callable[[Address], bool] = lambda _: True
    rates: Callable[[VirtualServerKey, RealServerKey], Document] = lambda _key, _real_server: {}
    targets: Targets = dataclasses.field(default_factory=dict)

    def describing(self, name: ServiceName, keys: Collection[VirtualServerKey]) -> Generator[None, None, Document]:
        """Describes a known Service that has been translated, and its virtual servers with the given ``keys``.

        Yields so that other tasks can run.
        """
        service, slices = self.store.services[name], self.store.slices_of(name)
        explained = yield from explanations.explaining(service, slices, self.view, self.translation)
        yield
        document: Document = {
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
            "slicesNotUsed": [
                {"slice": str(item.name), "code": why.code, "reason": why.reason}
                for item, why in explanations.unserved_slices(service, slices, self.translation)
            ],
            "ports": [],
        }
        indexed = self._index(explained)
        for use in explained.ports:
            served = [one for one in use.served.virtual_servers if one.key in keys]
            if served:
                document["ports"].append((yield from self._describing_port(indexed, use, served)))
        return document

    def _describing_port(
        self, indexed: _Indexed, use: explanations.PortUse, served: Iterable[VirtualServer]
    ) -> Generator[None, None, Document]:
        port: Document = {
            "name": use.served.port.name,
            "protocol": use.served.port.protocol.name,
            "port": use.served.port.port,
            "nodePort": use.served.port.node_port,
            "family": use.served.family.label,
            "virtualServers": [],
            "clusterScope": (yield from self._scope(indexed, use, Clients.OF_NODE)),
            "endpoints": [],
            "hairpinSet": "",
        }
        for name, clients in (("directReturn", Clients.OUTSIDE), ("fromTunnels", Clients.BY_TUNNEL)):
            if scope := (yield from self._scope(indexed, use, clients)):
                port[name] = scope
        if "directReturn" in port:
            nodes = {one.endpoint.conditions.node_name for one in use.endpoints if one.external is None}
            port["directReturn"]["masqueradedNodes"] = sorted(nodes - {self.view.name, *self.view.tunnel_ends})
        for one in served:
            if one.key in self.survey.virtual_servers:  # while this generator pauses, the virtual server may be removed
                port["virtualServers"].append(described := self._virtual_server(indexed, one))
                described["kernel"] = yield from self._kernel(one.key, one)
            yield
        for number, used in enumerate(use.endpoints, 1):
            endpoint = RealServerKey.of(used.endpoint.address, used.port)
            port["endpoints"].append(_endpoint(used) | {"target": self._target(indexed.service.name, endpoint)})
            port["hairpinSet"] = port["hairpinSet"] or indexed.hairpins.get((use.served.port.protocol, endpoint), "")
            if number % ENDPOINTS_AT_ONCE == 0:
                yield
        return port

    def _index(self, explained: explanations.Explanation) -> _Indexed:
        name, rare = explained.service.name, explained.desired.rare
        scopes = {(one.family, one.protocol, one.port, one.clients): one for one in rare.scopes}
        marked = (
            one for one in rare.scopes if self.survey.scope(MarkedPort(name, one.protocol, one.port, one.clients), one.family)
        )
        return _Indexed(
            service=explained.service,
            hairpins={
                (one.protocol, RealServerKey.of(one.address, one.port)): one.set
                for one in explained.desired.entries
                if one.protocol and one.address and IP_SETS[one.set].kind is SetKind.LOOP_BACK
            },
            scopes=scopes,
            scoped=frozenset(key for one in marked for key in one.virtual_servers),
            refused=frozenset(rare.refused),
        )

    def _scope(self, indexed: _Indexed, use: explanations.PortUse, clients: Clients) -> Generator[None, None, Document | None]:
        """Describes the second scope that serves only ``clients`` at the external addresses of a port.

        None if the port has no such scope.
        """
        scope = indexed.scopes.get((use.served.family, use.served.port.protocol, use.served.port.port, clients))
        if scope is None:
            return None
        key = self.survey.scope(MarkedPort(indexed.service.name, scope.protocol, scope.port, clients), scope.family)
        return {
            "virtualServer": str(key) if key else None,
            "addresses": [str(one) for one in scope.virtual_servers],
            **_choices(scope.settings, scope.thresholds),
            "kernel": (yield from self._kernel(key, self.survey.sides(key).desired)) if key else None,
        }

    def _virtual_server(self, indexed: _Indexed, desired: VirtualServer) -> Document:
        key = desired.key
        conflict = self.survey.conflict(key)
        is_restricted = desired.role is Role.LOAD_BALANCER_IP and bool(indexed.service.options.source_ranges)
        return {
            "virtualServer": str(key),
            "role": desired.role.value,
            "traffic": "internal" if desired.role is Role.CLUSTER_IP else "external",
            "held": self.survey.has(desired.owner, key),
            "owner": str(self.survey.virtual_servers[key].owner),
            "waiting": [str(one) for one in conflict.waiting] if conflict else [],
            "reasons": list(conflict.reasons) if conflict else [],
            **_choices(desired.settings, desired.thresholds),
            "sourceRangesApply": is_restricted,
            "usableByThisNode": key not in indexed.refused,
            "masquerade": [
                self._masquerade(client, key, has_scopes=key in indexed.scoped)
                for client in trace.TracedClient
                if key in indexed.scoped or client is not trace.TracedClient.OTHER_POD
            ],
        }

    def _masquerade(self, client: trace.TracedClient, key: VirtualServerKey, *, has_scopes: bool) -> Document:
        connection = trace.connection_of(client, key, self.translation, self.view)
        rules = self.survey.rules(key.address.family)
        way = trace.follow(rules, self.survey.is_desired_entry, connection, has_scopes=has_scopes)
        return {
            "from": client.value,
            "masqueraded": way.is_masqueraded,
            "marked": way.is_marked,
            "dropped": way.is_dropped,
            "rules": [
                f"-t {applied.chain.table} -A {applied.chain.chain} {render(applied.rule, key.address.family)}"
                for applied in way.applied_rules
            ],
            "sets": [applied.rule.set.set for applied in way.applied_rules if applied.rule.set],
        }

    def _kernel(self, key: VirtualServerKey, desired: VirtualServer | None) -> Generator[None, None, Document | None]:
        """Describes the observed virtual server; yields so that other tasks can run.

        Returns None if the kernel does not have the virtual server.
        """
        observed = self.survey.sides(key).observed
        if observed is None:
            return None
        real_servers = desired.real_servers if desired else frozenset(observed.real_servers)
        weights = desired.weights if desired else observed.real_servers
        owned = self.survey.sides(key).desired
        ends = {address: name for name, addresses in self.view.tunnel_ends.items() for address in addresses}
        described: list[Document] = []
        for number, (one, weight) in enumerate(list(observed.real_servers.items()), 1):
            described.append(
                _real_server(one, weight, self.connections(key, one), weights)
                | _limits((observed.thresholds or {}).get(one, NO_THRESHOLDS))
                | self.rates(key, one)
                | {"target": self._target(owned.owner.service, one) if owned else None}
                | {"tunnelTo": ends.get(one.address) if weight >= TUNNELLED else None}
            )
            if number % ENDPOINTS_AT_ONCE == 0:
                yield
        return {
            "scheduler": observed.settings.scheduler,
            "schedulerFlags": observed.settings.flag_names,
            "sessionAffinitySeconds": observed.settings.timeout_s if observed.settings.flags & PERSISTENT else 0,
            "sessionAffinityPrefixLength": observed.settings.prefix_length or key.address.family.bits,
            "realServers": described,
            "missing": sorted(str(one) for one in real_servers - observed.real_servers.keys()),
        }

    def _target(self, service: ServiceName, key: RealServerKey) -> str | None:
        """The name of the pod behind an endpoint; None if the name is not known."""
        target = self.targets.get((service, key))
        return target.name or None if target else None

    def unclaimed(self, key: VirtualServerKey) -> Document:
        """The explanation of a virtual server that no Service desires."""
        is_foreign = self.survey.sides(key).is_foreign
        when = "" if self.is_carried(key.address) else f", {GRACE_S:.0f} s after the node lost its address"
        return {
            "virtualServer": str(key),
            "foreign": is_foreign,
            "reason": "it is not ours: no set entry and no address of ours is its witness; it is left alone"
            if is_foreign
            else f"no Service desires it any more; its witness is {self._witness(key)}, so run removes it{when}",
            "kernel": steps.at_once(self._kernel(key, None)),
        }

    def _witness(self, key: VirtualServerKey) -> str:
        match self.survey.witness(key):
            case SetEntry() as entry:
                return entry.set
            case BoundAddresses():
                return f"its address on {DEVICE}"
            case LocalRoutes():
                return "its local route"
            case None:
                return "a set"


def _choices(settings: VirtualServerSettings, thresholds: Thresholds) -> Document:
    """The scheduler, scheduler flags and limits of a virtual server; the Service may choose these values."""
    return {"scheduler": settings.scheduler, "schedulerFlags": settings.flag_names, **_limits(thresholds)}


def _limits(thresholds: Thresholds) -> Document:
    return {name: value or None for name, value in thresholds.described.items()}


def _real_server(
    key: RealServerKey, weight: int, counts: ConnectionCounts | None, desired: Mapping[RealServerKey, int]
) -> Document:
    """Describes a real server.

    ``desired`` has the full weight of each desired real server; slow start may reduce the weight for a while.
    """
    is_ours, by_tunnel = weight != NOT_MASQUERADED, weight >= TUNNELLED
    weight, desired = without_method(weight), {key: without_method(desired[key])} if key in desired else {}
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
        "state": f"{state} by tunnel" if by_tunnel else state if is_ours else "not masqueraded",
    }


def _endpoint(use: explanations.EndpointUse) -> Document:
    address, conditions = use.endpoint
    return {
        "address": str(address),
        "port": use.port,
        "node": conditions.node_name,
        "zone": conditions.zone,
        "slice": str(use.slice),
        "ready": conditions.ready,
        "serving": conditions.serving,
        "terminating": conditions.terminating,
        "zoneHints": sorted(conditions.zone_hints),
        "nodeHints": sorted(conditions.node_hints),
        **{
            scope: {"used": why is None, "code": why.code if why else "", "reason": why.reason if why else ""}
            for scope, why in (("internal", use.internal), ("external", use.external), ("cluster", use.cluster))
        },
    }
