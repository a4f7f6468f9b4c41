"""A simulated node: the reconciler, translation and rules are those of a real node, but the kernel is in memory.

The node applies one operation at a time to an in-memory kernel. The loop equals the loop of ``ipvsproxy/daemon/loop/engine.py``,
but never waits: the test sets the time.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence

from ipvsproxy.model.kernel import Sysctl, Timeouts
from ipvsproxy.model.net import Address, Family, Network, parse_address
from ipvsproxy.model.plan import Operation, Outcome, Report, one_by_one
from ipvsproxy.model.rules import ChainKey, JumpTo, Rule, SetMatch, Side, Verdict
from ipvsproxy.model.service import EndpointSlice, Service, ServiceName
from ipvsproxy.model.sets import SetEntry
from ipvsproxy.model.state import ServiceState
from ipvsproxy.model.steps import at_once
from ipvsproxy.model.virtual_servers import VirtualServerKey
from ipvsproxy.reconcile.reconciler import Policy, Reconciler
from ipvsproxy.translate import skeleton
from ipvsproxy.translate.translation_settings import Binding, Settings, TrafficScopes
from tests.support import builders, fake_kernel

MOST_ROUNDS = 12
"""The largest number of plans in one sync. A sync that needs more plans fails, because it would probably never end."""
SYSCTL = Sysctl("net/ipv4/vs/conntrack", "1")
TIMEOUTS = Timeouts(900, 120, 300)


class SimulatedNode:
    """A node. ``after_each`` is called after each single operation; ``applied`` holds the operations of the last sync.

    With ``tunnel_ends``, the node takes part in direct return.
    """

    def __init__(
        self,
        kernel: fake_kernel.FakeKernel | None = None,
        *,
        drain_deadline_s: float = 0,
        excluded: Iterable[str] = (),
        scheduler: str = "rr",
        scopes: TrafficScopes = TrafficScopes.KUBE_PROXY,
        scope_bits: int = 0x3FFF,
        families: Iterable[Family] = (Family.IPV4,),
        binding: Binding = Binding.ADDRESSES,
        tunnel_ends: Mapping[str, tuple[Address, ...]] | None = None,
        after_each: Callable[[Operation], None] = lambda _: None,
    ) -> None:
        self.kernel = kernel or new_kernel()
        self.after_each = after_each
        self.now = 1000.0
        self.applied: list[Operation] = []
        self.reports: list[Report] = []
        self.states: dict[ServiceName, ServiceState] = {}
        self._families = frozenset(families)
        self._settings = Settings(
            families=self._families,
            scheduler=scheduler,
            scopes=scopes,
            scope_bits=scope_bits,
            binding=binding,
            direct_return=tunnel_ends is not None,
        )
        self._translated: dict[ServiceName, tuple[Service, tuple[EndpointSlice, ...], bool]] = {}
        self.kernel.schedulers |= {scheduler}
        self._view = dataclasses.replace(builders.node_view(), tunnel_ends=tunnel_ends or {})
        self._policy = Policy(drain_deadline_s=drain_deadline_s, excluded=builders.networks(*excluded), scope_bits=scope_bits)
        self.reconciler = self._new_reconciler()

    def _new_reconciler(self) -> Reconciler:
        reconciler = Reconciler(self._policy)
        reconciler.put_node(self._families, (SYSCTL,), TIMEOUTS)
        reconciler.put_tunnel_sources([*itertools.chain.from_iterable(self._view.tunnel_ends.values())])
        at_once(reconciler.observer.observing(self.kernel.observe(), self.now))
        return reconciler

    def restart(self) -> None:
        """Replace the process by a new process, which knows only the API objects and the state of the kernel."""
        self.reconciler = self._new_reconciler()
        for name, desired in self.states.items():
            at_once(self.reconciler.putting(name, desired))

    def put(self, service: Service, *slices: EndpointSlice, remembered: bool = False) -> None:
        """Translate a changed Service, and set its desired state."""
        self._translated[service.name] = (service, slices, remembered)
        self.put_state(builders.translate(service, slices, self._view, self._settings, remembered=remembered))

    @property
    def binding(self) -> Binding:
        """The method by which addresses become local."""
        return self._settings.binding

    def switch(self, binding: Binding) -> None:
        """Change the method by which addresses become local, as a reload does, and translate every Service again."""
        self._settings = dataclasses.replace(self._settings, binding=binding)
        for service, slices, remembered in list(self._translated.values()):
            self.put(service, *slices, remembered=remembered)

    def put_state(self, desired: ServiceState) -> None:
        """Inform the reconciler of a changed desired state of a Service."""
        self.states[desired.owner.service] = desired
        at_once(self.reconciler.putting(desired.owner.service, desired))

    def remove(self, name: str) -> None:
        """Inform the reconciler that a Service is deleted."""
        key = ServiceName(builders.NAMESPACE, name)
        self.states.pop(key, None)
        self._translated.pop(key, None)
        at_once(self.reconciler.putting(key, None))

    def observe(self, **changes: object) -> None:
        """Give the reconciler the present state of the kernel, with the fields in ``changes`` replaced."""
        at_once(self.reconciler.observer.observing(dataclasses.replace(self.kernel.observe(), **changes), self.now))  # type: ignore[arg-type]  # the keys are names of fields

    def plan(self) -> Sequence[Operation]:
        """The operations that are possible at the present simulated time."""
        reconciler = self.reconciler
        for family in self._families:
            refused = reconciler.survey.refused()
            inputs, routed = (reconciler.survey.occupied(family), refused), reconciler.survey.routed(refused)
            reconciler.put_skeleton(skeleton.build_skeleton(family, self._settings, self._view, *inputs, routed=routed))
        return at_once(reconciler.planning(self.now))

    def sync(self, *, after_s: float = 0) -> list[Operation]:
        """Plan and apply operations and report their outcomes, until no operation is possible now. Returns the operations."""
        self.now += after_s
        self.applied, self.reports = [], []
        for _ in range(MOST_ROUNDS):
            if operations := self.plan():
                self.reports.append(at_once(self.reconciler.settling(self.apply(operations), self.now)))
            elif due := self.reconciler.drains_due(self.now):
                list(self.reconciler.noting_connections(self.kernel.connections(due), self.now))
            else:
                wake_s = self.reconciler.next_s()
                assert wake_s is None or wake_s > self.now, "woken for nothing, the loop would not rest"
                return self.applied
        raise AssertionError(f"still not done after {MOST_ROUNDS} rounds: {self.plan()}")

    def apply(self, operations: Sequence[Operation]) -> list[Outcome]:
        """Apply the planned operations to the kernel, without reporting their outcomes to the reconciler."""
        identities = [fake_kernel._identity(operation.item) for operation in one_by_one(operations)]
        assert len(set(identities)) == len(identities), "one plan, one operation per object"
        outcomes = []
        for operation in operations:
            outcomes += self.kernel.apply([operation])
            for one in one_by_one([operation]):
                self.applied.append(one)
                self.after_each(one)
        return outcomes

    @property
    def has_failed(self) -> bool:
        """Whether an operation of the last sync failed or had an unexpected result."""
        return any(report.failed or report.surprises for report in self.reports)


def new_kernel() -> fake_kernel.FakeKernel:
    """The fake kernel of a node, with the node's address on eth0."""
    kernel = fake_kernel.FakeKernel()
    kernel.host_addresses = [builders.interface_address("eth0", builders.NODE_ADDRESS)]
    kernel.sysctls = {SYSCTL.path: "0"}
    return kernel


def lets_in(kernel: fake_kernel.FakeKernel, key: VirtualServerKey, source: str) -> bool:
    """Whether the rules for source ranges let a client reach a virtual server."""
    return key in kernel.virtual_servers and _passes(kernel, skeleton.PROXY_FIREWALL, key, parse_address(source))


def lets_node_in(kernel: fake_kernel.FakeKernel, key: VirtualServerKey) -> bool:
    """Whether the node itself reaches a virtual server; the source of the node's packets is the virtual server's address."""
    out = kernel.chains[key.address.family].get(ChainKey("filter", skeleton.IPVS_OUT_FILTER), ())
    is_dropped = any(isinstance(rule, Rule) and rule.virtual_server == key and rule.target is Verdict.DROP for rule in out)
    return lets_in(kernel, key, str(key.address)) and not is_dropped


def _passes(kernel: fake_kernel.FakeKernel, chain: str, key: VirtualServerKey, source: Address) -> bool:
    for rule in kernel.chains[key.address.family].get(ChainKey("filter", chain), ()):
        assert isinstance(rule, Rule)
        if rule.set and not any(_matches(entry, rule.set, key, source) for entry in kernel.sets[rule.set.set].entries):
            continue
        if isinstance(rule.target, JumpTo):
            return _passes(kernel, rule.target.chain, key, source)
        return rule.target is Verdict.RETURN
    return True


def _matches(entry: SetEntry, match: SetMatch, key: VirtualServerKey, source: Address) -> bool:
    if (entry.protocol, entry.address, entry.port) != (key.protocol, key.address, key.port):
        return False
    if Side.SOURCE not in match.sides or entry.other is None:
        return True
    return Network(entry.other, entry.prefix_length or entry.other.family.bits).contains(source)
