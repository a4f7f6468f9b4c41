"""Makes the desired state; no other module may make desired state.

The module takes the store, the node and the operator's settings, and passes the desired state to a reconciler.

Rule 1: ``run`` and all commands use this module to make the desired state, so that their desired states cannot differ. No other
module calls ``translate`` for the view of the node, the desired state of a Service, or the rules. Only this module gives a
reconciler the objects that the node itself needs.
Rule 2: a Service is translated after a change of the Service, of its endpoints or of the view of the node.
"""

import dataclasses
from collections.abc import Generator, Iterable, Iterator
from collections.abc import Set as AbstractSet

from ipvsproxy.config.settings import Choices
from ipvsproxy.daemon.base.log import log
from ipvsproxy.daemon.loop import journal
from ipvsproxy.model.kernel import DEVICE, InterfaceAddress
from ipvsproxy.model.net import Family
from ipvsproxy.model.real_servers import RealServerKey
from ipvsproxy.model.service import Node, ObjectKind, Service, ServiceName, Skipped
from ipvsproxy.model.state import ServiceState
from ipvsproxy.reconcile.reconciler import Reconciler
from ipvsproxy.store.objects import Changes, Complaint, Store
from ipvsproxy.translate import skeleton, view
from ipvsproxy.translate.services import desired_state, refusal
from ipvsproxy.translate.translation_settings import LocalMode
from ipvsproxy.translate.view import Lingering


@dataclasses.dataclass(eq=False, kw_only=True)
class Translator:
    """Passes the desired state to a reconciler. Before the first call of ``updating_view``, no Service has a desired state.

    The caller calls ``put_node`` and ``updating_view``, then ``putting`` with the names of the changed Services. The caller calls
    ``put_skeletons`` last, because rules depend on the desired state of the Services.
    """

    choices: Choices
    store: Store
    reconciler: Reconciler

    def __post_init__(self) -> None:
        self.settings = self.choices.translation
        """The operator's settings for Services and rules, and which schedulers the kernel lacks."""
        self._node_name = self.choices.settings.node_name
        self._known_schedulers: set[str] = set()
        self._refused: dict[ServiceName, tuple[Skipped, ...]] = {}
        """For each Service: the parts that translation has refused."""
        self._complaints: list[Complaint] = []
        self._view: view.NodeView | None = None
        self._unknown_pods: frozenset[Family] = frozenset()
        """The IP families in which, at the last check, local pods could not be distinguished from other clients."""
        self._view_inputs: tuple[object, ...] = (None, ())
        self._api_servers: frozenset[RealServerKey] = frozenset()
        """All API servers that were known at any time."""
        self.lingering = Lingering()
        """The lost addresses on which node ports are still served; at the end of each grace period, the addresses must be read
        again."""
        self._shared_tunnel = ""
        """The tunnel device that belongs to another program; empty if there is none."""
        self._skeleton_inputs: dict[Family, tuple[object, ...]] = {}
        """The values, besides the settings, that determine the rules of an IP family."""

    @property
    def unknown_schedulers(self) -> AbstractSet[str]:
        """The schedulers that annotations name and for which ``note_scheduler`` has not recorded a final answer yet."""
        return self.store.schedulers - self._known_schedulers

    def note_scheduler(self, name: str, why_missing: str, now: float, *, for_now: bool = False) -> None:
        """Record that the kernel has a scheduler, or the reason why the kernel does not have the scheduler.

        With ``for_now``, the answer is not final, so the scheduler stays among the ``unknown_schedulers``.
        """
        missing = {other: reason for other, reason in self.settings.missing_schedulers.items() if other != name}
        if why_missing:
            missing[name] = why_missing
        if missing != self.settings.missing_schedulers:
            self.settings = dataclasses.replace(self.settings, missing_schedulers=missing)
            self.store.touch_all(now)
        if not for_now:
            self._known_schedulers.add(name)

    def adopt(self, choices: Choices) -> None:
        """Use other settings, beginning with the next ``put_node`` and ``updating_view``.

        The old and the new settings must be for the same Node.
        """
        self.choices, self.settings = choices, choices.translation
        self._known_schedulers.clear()
        self._view = None
        self._skeleton_inputs.clear()

    def put_node(self) -> None:
        """Pass to the reconciler the addresses for node ports, and the objects that the node needs even without Services."""
        self._put_node_port_ranges(self.store.node(self._node_name))
        sysctls = [one for one in self.choices.settings.sysctls if not (one.for_tunnels and self._shared_tunnel)]
        self.reconciler.put_node(self.settings.families, sysctls, self.choices.settings.timeouts)

    def updating_view(self, addresses: tuple[InterfaceAddress, ...], now: float) -> Generator[None, None, view.NodeView]:
        """Create the view of the node from the addresses of its interfaces; yields after each piece of work. Returns the view.

        If the view differs from the last view, all Services in the store are marked as changed at ``now``. Node ports are still
        served for a while on an address that the node has lost.
        """
        node = self.store.node(self._node_name)
        api_servers = self.store.api_servers.union(self._endpoints_of_api_servers())
        self._api_servers |= api_servers
        other_nodes = self.store.other_nodes
        shared_tunnel = view.shared_tunnel(addresses) if self.settings.direct_return else ""
        if shared_tunnel != self._shared_tunnel:
            self._shared_tunnel = shared_tunnel
            self.put_node()
        takes_part = self.settings.direct_return and not shared_tunnel
        tunnel_ends, tunnel_sources = self.store.tunnels if takes_part else ({}, frozenset())
        inputs = (node, addresses, api_servers, other_nodes, tunnel_ends, tunnel_sources)
        is_due = self.lingering.is_due(now)
        if self._view is not None and self._view_inputs == inputs and not is_due:
            return self._view
        if self._view_inputs[1] != addresses or is_due:
            self.lingering = self.lingering.after((item.address for item in addresses if item.interface != DEVICE), now)
        self._view_inputs = inputs
        self._put_node_port_ranges(node)
        self.reconciler.put_tunnel_sources(tunnel_sources)
        node_view = view.view_node(
            self.settings,
            self._node_name,
            node,
            addresses,
            api_servers,
            former_api_servers=self._api_servers - api_servers,
            lingering=self.lingering.addresses,
            other_nodes=other_nodes,
            tunnel_ends=tunnel_ends,
        )
        before = self._view
        if before is not None and before.other_nodes != other_nodes:
            self.store.touch_external(before.other_nodes.keys() | other_nodes.keys(), now)
            self._view = before = dataclasses.replace(before, other_nodes=other_nodes)
        if before is not None and before.tunnel_ends != tunnel_ends:
            changed = {name for name, _ in before.tunnel_ends.items() ^ tunnel_ends.items()}
            yield from self.store.touching_direct_return(changed, now)
            self._view = dataclasses.replace(before, tunnel_ends=tunnel_ends)
        if node_view != self._view:
            if self._view is not None:
                log.info(
                    "node_changed", zone=node_view.zone, addresses=[str(one) for one in node_view.primary_addresses.values()]
                )
            self._view = node_view
            self._log_unknown_pods(node_view)
            self.store.touch_all(now)
        return node_view

    def _put_node_port_ranges(self, node: Node | None) -> None:
        self.reconciler.observer.node_port_ranges = view.node_port_ranges(self.settings, node)

    def _log_unknown_pods(self, node_view: view.NodeView) -> None:
        """Log the IP families in which local pods cannot be distinguished from other clients.

        The families are not logged if they are the same as at the previous call.
        """
        unknown = frozenset() if self.settings.masquerade_all else view.without_local_pods(self.settings, node_view.pod_networks)
        before, self._unknown_pods = self._unknown_pods, unknown
        if unknown and unknown != before:
            field = "spec.podCIDRs of the Node" if self.settings.detect_local is LocalMode.NODE_CIDR else "clusterCIDR"
            hint = "add ranges of these families, or their traffic is masqueraded as without local detection"
            log.warning("local_pods_unknown", field=field, families=sorted(family.label for family in unknown), hint=hint)

    def _endpoints_of_api_servers(self) -> Iterator[RealServerKey]:
        """The API servers, taken from the endpoints of the Service ``kubernetes``."""
        for item in self.store.slices_of(refusal.KUBERNETES):
            for port in item.ports:
                yield from (RealServerKey.of(endpoint.address, port.port) for endpoint in item.endpoints)

    def putting(self, names: Iterable[ServiceName]) -> Generator[None, None, None]:
        """Pass the desired state of Services to the reconciler.

        Yields after each Service, and several times within a large Service.
        """
        for name in names:
            service, desired = self.store.services.get(name), None
            if service is not None and self._view is not None:
                slices, remembered = self.store.slices_of(name), name in self.store.remembered
                desired = yield from desired_state.translating(service, slices, self._view, self.settings, remembered=remembered)
            journal.log_desired(name, desired)
            self._note_refusals(name, service, desired)
            yield from self.reconciler.putting(name, desired)
            yield

    def with_refusals(self, changes: Changes) -> Changes:
        """The changes from the store, together with complaints about the parts that were refused in translation."""
        complaints, self._complaints = self._complaints, []
        return dataclasses.replace(changes, complaints=(*changes.complaints, *complaints))

    def _note_refusals(self, name: ServiceName, service: Service | None, desired: ServiceState | None) -> None:
        """Complain about the refused parts of a Service once, and again after each change of the Service.

        A refused part is a part that translation has skipped after parsing has accepted it.
        """
        before = self._refused.pop(name, ())
        if service is None or desired is None or service.not_served:
            return
        if refused := tuple(one for one in desired.rare.skipped if one not in service.skipped):
            self._refused[name] = refused
            if refused != before:
                self._complaints.append(Complaint(ObjectKind.SERVICE, str(name), refused))

    def put_skeletons(self, *, settled: bool = False) -> None:
        """Pass to the reconciler the rules that are needed now, for desired objects and for objects that must still be removed.

        With ``settled``, the method passes only the rules that are needed when all other objects are as desired.
        """
        if self._view is None:
            return
        survey = self.reconciler.survey
        refused = survey.refused(settled=settled)
        routed = survey.routed(refused, settled=settled)
        for family in self.settings.families:
            occupied = survey.occupied(family, settled=settled)
            inputs = (self._view, occupied, refused, routed)
            if self._skeleton_inputs.get(family) != inputs:
                self._skeleton_inputs[family] = inputs
                rules = skeleton.build_skeleton(family, self.settings, self._view, occupied, refused, routed=routed)
                self.reconciler.put_skeleton(rules)
