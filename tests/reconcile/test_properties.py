"""After any sequence of events, the kernel equals an initially empty kernel that got only the final objects.

The simulated world is very small, so that all of its objects interact. ``test_preconditions`` tests source ranges during failures
of single operations.
"""

import copy
import errno
from collections.abc import Mapping

import hypothesis
from hypothesis import stateful
from hypothesis import strategies as st

from ipvsproxy.model.kernel import BoundAddresses, LocalRoutes
from ipvsproxy.model.net import Protocol
from ipvsproxy.model.plan import Operation, Verb
from ipvsproxy.model.real_servers import RealServerKey
from ipvsproxy.model.rules import Skeleton
from ipvsproxy.model.service import EndpointSlice, Service
from ipvsproxy.model.sets import SetEntries, SetEntry, SetKind
from ipvsproxy.model.steps import at_once
from ipvsproxy.model.virtual_servers import ConnectionCounts, RealServers, VirtualServer, VirtualServerKey
from ipvsproxy.reconcile.kinds.node_tables import NodeTables
from ipvsproxy.reconcile.survey import Survey
from ipvsproxy.reconcile.virtual_servers.drain import Drains
from ipvsproxy.translate.translation_settings import Binding
from tests.reconcile import examples, simulation
from tests.support import builders, fake_kernel, patience

NAMES = ("a", "b", "c")
CLUSTER_IPS = ("10.96.0.1", "10.96.0.2")
LOAD_BALANCER = "192.0.2.10"
PORTS = (builders.service_port(80, node_port=30080), builders.service_port(53, Protocol.UDP, name="dns"))
ENDPOINTS = ("10.244.0.1", "10.244.0.2", "10.244.9.3")
SOURCE_RANGE = "10.0.0.0/8"
STRANGER = "203.0.113.5"
FOREIGN = builders.frontend("203.0.113.9", 25)
EXCLUDED = builders.frontend("198.51.100.7", 80)
KEYS = tuple(builders.frontend(address, port.port, port.protocol) for address in (*CLUSTER_IPS, LOAD_BALANCER) for port in PORTS)
REAL_SERVERS = tuple(builders.backend(address) for address in ENDPOINTS)
KINDS = (VirtualServer, RealServers, SetEntries, BoundAddresses, LocalRoutes, Skeleton)
PARTS = ("virtual_servers", "sets", "addresses", "routes", "interface_addresses", "device")
CHANGES_OF_OTHERS = (
    "flush a set",
    "unbind",
    "flush the routes",
    "add a route",
    "flush the rules",
    "remove the device",
    "forbid forwarding",
)
DEADLINE_S = 100.0


@st.composite
def services(draw: st.DrawFn, names: tuple[str, ...] = NAMES) -> tuple[Service, EndpointSlice]:
    """One of three Services, older or younger than the other Services, with a random selection of all possible fields."""
    name = draw(st.sampled_from(names))
    ports = draw(st.sets(st.sampled_from(PORTS), min_size=1))
    has_load_balancer = draw(st.booleans())
    service = builders.service(
        name,
        *sorted(ports, key=lambda port: port.port),
        cluster=(draw(st.sampled_from(CLUSTER_IPS)),),
        load_balancer=(LOAD_BALANCER,) if has_load_balancer else (),
        source_ranges=(SOURCE_RANGE,) if has_load_balancer and draw(st.booleans()) else (),
        affinity_timeout_s=draw(st.sampled_from((0, 10800))),
        created_s=draw(st.sampled_from((1.0, 2.0))),
    )
    chosen = draw(st.sets(st.sampled_from(ENDPOINTS)))
    slices = builders.endpoint_slice(
        *(builders.endpoint(address) for address in sorted(chosen)),
        service=name,
        ports=(builders.endpoint_port(), builders.endpoint_port(protocol=Protocol.UDP, name="dns")),
    )
    return service, slices


def contents(kernel: fake_kernel.FakeKernel) -> Mapping[str, object]:
    """All our objects in a kernel. TCP real servers that drain (weight 0) are left out."""
    return {
        "virtual servers": {
            key: (server.settings, {one: weight for one, weight in server.real_servers.items() if weight or not _is_tcp(key)})
            for key, server in kernel.virtual_servers.items()
            if key not in (FOREIGN, EXCLUDED)
        },
        "entries": {name: contents.entries for name, contents in kernel.sets.items()},
        "addresses": kernel.addresses - {EXCLUDED.address},
        "routes": kernel.routes,
        "device": kernel.device,
        "chains": kernel.chains,
        "jumps": kernel.jumps,
        "sysctls": kernel.sysctls,
    }


def _firewall(key: VirtualServerKey) -> SetEntry:
    return examples.entry(SetKind.LOAD_BALANCER_FIREWALL, key)


def _is_tcp(key: VirtualServerKey) -> bool:
    return key.protocol is Protocol.TCP


class AnyHistory(stateful.RuleBasedStateMachine):
    """Services are created, changed and deleted, operations fail, other programs interfere, and the process is restarted."""

    def __init__(self) -> None:
        super().__init__()
        kernel = simulation.new_kernel()
        kernel.virtual_servers[FOREIGN] = examples.observed({REAL_SERVERS[0]: 7, REAL_SERVERS[1]: 0})
        kernel.virtual_servers[EXCLUDED] = examples.observed({REAL_SERVERS[2]: 0})
        kernel.device = True
        kernel.addresses.add(EXCLUDED.address)
        self.alien = {key: copy.deepcopy(kernel.virtual_servers[key]) for key in (FOREIGN, EXCLUDED)}
        self.services: dict[str, tuple[Service, EndpointSlice]] = {}
        self.weightless_since_s: dict[tuple[VirtualServerKey, RealServerKey], float] = {}
        self.live: set[tuple[VirtualServerKey, RealServerKey]] = set()
        self.is_disturbed = False
        self.are_witnesses_lost = False
        self.has_read_only_a_part = False
        self.node = simulation.SimulatedNode(
            kernel, drain_deadline_s=DEADLINE_S, excluded=("198.51.100.0/24",), after_each=self._look
        )

    # Events.

    @stateful.initialize(changes=st.tuples(*(services((name,)) for name in NAMES)))
    def begin_with_all_services(self, changes: tuple[tuple[Service, EndpointSlice], ...]) -> None:
        for change in changes:
            self.put(change)
        self.node.sync()

    @stateful.rule(change=services())
    def put(self, change: tuple[Service, EndpointSlice]) -> None:
        service, slices = change
        self.services[service.name.name] = change
        self.node.put(service, slices)

    @stateful.rule(name=st.sampled_from(NAMES))
    def remove(self, name: str) -> None:
        self.services.pop(name, None)
        self.node.remove(name)

    @stateful.rule(binding=st.sampled_from(Binding))
    def switch_the_binding(self, binding: Binding) -> None:
        self.node.switch(binding)

    @stateful.rule()
    def sync(self) -> None:
        self.node.sync()

    @stateful.rule(seconds=st.sampled_from((1.0, 20.0, 90.0)))
    def pass_time(self, seconds: float) -> None:
        self.node.sync(after_s=seconds)

    @stateful.rule(verb=st.sampled_from(Verb), kind=st.sampled_from(KINDS), times=st.integers(1, 4))
    def let_operations_fail(self, verb: Verb, kind: type, times: int) -> None:
        self.node.kernel.fail(
            lambda operation: operation.verb is verb and isinstance(operation.item, kind), errno.ENOMEM, times=times
        )

    @stateful.precondition(lambda self: not self.are_witnesses_lost)
    @stateful.rule(number=st.integers(0, 8), gone=st.sets(st.sampled_from(NAMES)), unreadable=st.sets(st.sampled_from(PARTS)))
    def die_in_the_middle_of_a_plan(self, number: int, gone: set[str], unreadable: set[str]) -> None:
        """At first, the next process can read only some kernel objects; some Services were deleted while no process ran."""
        self.node.apply(self.node.plan()[:number])
        for name in gone:
            self.remove(name)
        self.node.kernel.unreadable = unreadable
        self.has_read_only_a_part = bool(unreadable)
        self.node.restart()
        self.node.sync()
        self.node.kernel.unreadable = set()
        self.is_disturbed = True

    @stateful.rule()
    def connections_cannot_be_read(self) -> None:
        self.node.kernel.unreadable = {"connections"}
        self.node.sync(after_s=1)
        self.node.kernel.unreadable = set()

    @stateful.precondition(lambda self: self._serving())
    @stateful.rule(data=st.data())
    def a_client_connects(self, data: st.DataObject) -> None:
        pair = data.draw(st.sampled_from(self._serving()))
        self.live.add(pair)
        self.node.kernel.connection_counts[pair] = ConnectionCounts(1, 0)

    @stateful.precondition(lambda self: self.live)
    @stateful.rule(data=st.data())
    def a_client_goes(self, data: st.DataObject) -> None:
        pair = data.draw(st.sampled_from(sorted(self.live)))
        self.live.discard(pair)
        self.node.kernel.connection_counts.pop(pair, None)

    # Changes by other programs.

    @stateful.rule(key=st.sampled_from(KEYS))
    def somebody_removes_a_virtual_server(self, key: VirtualServerKey) -> None:
        self.is_disturbed = True
        self.node.kernel.virtual_servers.pop(key, None)
        self._forget(key)

    @stateful.rule(key=st.sampled_from(KEYS), real_server=st.sampled_from(REAL_SERVERS), weight=st.sampled_from((None, 0, 5)))
    def somebody_changes_a_real_server(self, key: VirtualServerKey, real_server: RealServerKey, weight: int | None) -> None:
        self.is_disturbed = True
        server = self.node.kernel.virtual_servers.get(key)
        if server is None:
            return
        if weight is None:
            server.real_servers.pop(real_server, None)
            self._forget(key, real_server)
        elif (key, real_server) not in self.weightless_since_s:
            server.real_servers[real_server] = weight

    # Until a process has read the virtual servers, it knows them only by their witnesses, so until then the test does not remove
    # both witnesses.
    @stateful.precondition(lambda self: not self.has_read_only_a_part)
    @stateful.rule(data=st.data())
    def somebody_changes_the_rest(self, data: st.DataObject) -> None:
        self.is_disturbed = True
        self.are_witnesses_lost = True
        kernel = self.node.kernel
        match data.draw(st.sampled_from(CHANGES_OF_OTHERS)):
            case "flush a set":
                for contents in kernel.sets.values():
                    if data.draw(st.booleans()):
                        contents.entries.clear()
            case "unbind":
                kernel.addresses.clear()
            case "flush the routes":
                kernel.routes.clear()
            case "add a route":
                kernel.routes.add(EXCLUDED.address)
            case "flush the rules":
                for family in kernel.chains:
                    kernel.chains[family].clear()
                    kernel.jumps[family].clear()
            case "remove the device":
                kernel.device = False
                kernel.addresses.clear()
            case _:
                kernel.sysctls[simulation.SYSCTL.path] = "0"

    # Properties that must hold.

    def _look(self, operation: Operation) -> None:
        kernel, item = self.node.kernel, operation.item
        match item:
            case RealServers(virtual_server=key, key=real_server):
                pair = key, real_server
                if operation.verb is Verb.SET and item.weight == 0:
                    self.weightless_since_s.setdefault(pair, self.node.now)
                elif operation.verb is Verb.REMOVE and not self._holds(key, real_server):
                    if pair in self.live and self._is_wanted(key):
                        assert self.node.now - self.weightless_since_s.get(pair, self.node.now) >= DEADLINE_S, operation
                    self._forget(*pair)
                elif self._holds(key, real_server) and kernel.virtual_servers[key].real_servers[real_server]:
                    self.weightless_since_s.pop(pair, None)
            case BoundAddresses(keys=(address,)) | LocalRoutes(keys=(address,)):
                is_desired = any(address in (*state.addresses, *state.routes) for state in self.node.states.values())
                if operation.verb is Verb.REMOVE and is_desired and not self.is_disturbed:
                    assert address in kernel.addresses | kernel.routes, operation
            case VirtualServer(key=key):
                assert key not in (FOREIGN, EXCLUDED)
                if operation.verb is Verb.REMOVE and key not in kernel.virtual_servers:
                    assert not self._is_wanted(key), operation
                    self._forget(key)
                elif operation.verb is Verb.ADD and self._is_restricted(key) and not self.is_disturbed:
                    assert not simulation.lets_in(kernel, key, STRANGER), operation

    @stateful.invariant()
    def what_differs_is_known_by_its_table(self) -> None:
        tables = self.node.reconciler._tables
        assert set(tables.unequal) == {table for table in examples.tables_of(tables) if table.pending or table.surplus}

    @stateful.invariant()
    def what_is_not_ours_is_as_it_was(self) -> None:
        for key, server in self.alien.items():
            assert self.node.kernel.virtual_servers[key] == server

    @stateful.rule()
    def come_to_rest(self) -> None:
        node = self.node
        node.kernel._failures.clear()
        for _ in range(3):
            if self.is_disturbed or node.has_failed:
                node.observe()
                self.is_disturbed = False
            node.sync(after_s=61)
        self.are_witnesses_lost = self.has_read_only_a_part = False
        assert not node.plan()
        assert node.reconciler.pending == 0
        assert contents(node.kernel) == contents(self._from_nothing())
        self._assert_oldest_wins()

    def teardown(self) -> None:
        self.come_to_rest()
        self.node.sync(after_s=DEADLINE_S)
        assert len(self.node.reconciler._drains) == 0
        assert self.node.reconciler.next_s() is None
        for key, server in self.node.kernel.virtual_servers.items():
            assert key in self.alien or all(server.real_servers.values()), key

    # Helpers of the state machine's rules and checks.

    def _from_nothing(self) -> fake_kernel.FakeKernel:
        other = simulation.SimulatedNode(binding=self.node.binding)
        for service, slices in self.services.values():
            other.put(service, slices)
        other.sync()
        return other.kernel

    def _assert_oldest_wins(self) -> None:
        for key, server in self.node.kernel.virtual_servers.items():
            states = [state for state in self.node.states.values() if key in state.virtual_servers]
            if states:
                desired = min(states, key=lambda state: state.owner).virtual_servers[key]
                assert server.settings == desired.settings
                assert {one for one, weight in server.real_servers.items() if weight} == desired.real_servers
                assert self._is_restricted(key) is (_firewall(key) in self.node.kernel.sets[_firewall(key).set].entries)

    def _serving(self) -> list[tuple[VirtualServerKey, RealServerKey]]:
        return sorted(
            (key, one)
            for key, server in self.node.kernel.virtual_servers.items()
            for one, weight in server.real_servers.items()
            if weight and _is_tcp(key) and key not in (FOREIGN, EXCLUDED) and self._wants(key, one)
        )

    def _wants(self, key: VirtualServerKey, real_server: RealServerKey) -> bool:
        desired = self.node.reconciler._tables.virtual_servers.desired.get(key)
        return desired is not None and real_server in desired.real_servers

    def _is_wanted(self, key: VirtualServerKey) -> bool:
        return any(key in state.virtual_servers for state in self.node.states.values())

    def _is_restricted(self, key: VirtualServerKey) -> bool:
        owner = min((state.owner, name) for name, state in self.node.states.items() if key in state.virtual_servers)[0]
        entries = self.node.states[owner.service].entries
        return _firewall(key) in entries

    def _holds(self, key: VirtualServerKey, real_server: RealServerKey) -> bool:
        server = self.node.kernel.virtual_servers.get(key)
        return server is not None and real_server in server.real_servers

    def _forget(self, key: VirtualServerKey, real_server: RealServerKey | None = None) -> None:
        for pair in [*self.live, *self.weightless_since_s]:
            if pair[0] == key and real_server in (None, pair[1]):
                self.live.discard(pair)
                self.weightless_since_s.pop(pair, None)
                self.node.kernel.connection_counts.pop(pair, None)


AnyHistory.TestCase.settings = hypothesis.settings(
    max_examples=100, stateful_step_count=30, deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
test_any_history_ends_in_the_state_computed_from_scratch = AnyHistory.TestCase


def _desired_by(changes: list[tuple[str, Service | None, EndpointSlice | None]]) -> Mapping[str, object]:
    """The desired state that results from these changes, and the owners that wait for a key of another owner."""
    tables = NodeTables(Drains())
    node = simulation.SimulatedNode()
    for name, service, slices in changes:
        if service and slices:
            node.put(service, slices)
        at_once(tables.putting(builders.service(name).name, node.states[service.name] if service else None))
    return {
        "desired": [table.desired for table in examples.tables_of(tables)],
        "owners": {key: desired.owner for key, desired in tables.virtual_servers.desired.items()},
        "waiting": {(key, table.owners_of(key)) for table in examples.tables_of(tables) for key in table.contested},
        "refused": Survey(tables).refused(),
    }


@hypothesis.given(
    history=st.lists(
        services().map(lambda made: (made[0].name.name, *made)) | st.sampled_from([(name, None, None) for name in NAMES])
    ),
    data=st.data(),
)
@hypothesis.settings(max_examples=150 if patience.IS_THOROUGH else 80, deadline=None)
def test_the_tables_hold_the_last_desired_states_whatever_the_order_of_the_changes(
    history: list[tuple[str, Service | None, EndpointSlice | None]], data: st.DataObject
) -> None:
    last = {name: (name, service, slices) for name, service, slices in history}
    others = data.draw(st.permutations([change for change in last.values() if change[1]]))
    assert _desired_by(history) == _desired_by(others)
