"""The contract that every kernel fulfils: the fake kernel, and the real kernel with either backend of rules and sets.

The tests cover only behaviour that operations can cause in the real kernel. For example, they do not cover lost
answers.
"""

import contextlib
import dataclasses
import errno
import functools
import itertools
import subprocess
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from typing import Protocol as Interface
from typing import TypeVar

import msgspec
import pytest

from ipvsproxy.commands import plan
from ipvsproxy.daemon.loop import reader as loop_kernel
from ipvsproxy.kernel import node_kernel
from ipvsproxy.kernel.backends import ChosenBackend
from ipvsproxy.kernel.base import modules
from ipvsproxy.model.kernel import DEVICE, BoundAddresses, Device, Flow, FlowCleaning, LocalRoutes, Sysctl, Timeouts
from ipvsproxy.model.net import Family, Network, Protocol, parse_address
from ipvsproxy.model.plan import Item, Operation, Outcome, Verb, one_by_one
from ipvsproxy.model.real_servers import EvenWeights, RealServerKey, Thresholds
from ipvsproxy.model.rules import Backend, ChainKey, Jump, Rule, SetMark, SetMatch, Side, Skeleton, Verdict
from ipvsproxy.model.sets import IP_SETS, ForeignElement, IpSet, MarkedEntry, SetEntries, SetEntry, SetKind
from ipvsproxy.model.state import Observation
from ipvsproxy.model.virtual_servers import (
    PERSISTENT,
    SCHEDULER_PORT,
    ConnectionCounts,
    FirewallMark,
    ObservedVirtualServer,
    RealServers,
    VirtualServer,
    VirtualServerKey,
    VirtualServerSettings,
)
from tests.kernel.drivers import apply, result
from tests.support import fake_kernel, fake_sets

K = TypeVar("K")
V = TypeVar("V")

WHOLE = ("set_copy", "device", "addresses", "routes", "interface_addresses", "sysctls")
"""The parts of an observation that a poll returns completely or not at all."""
CONNTRACK = "net/ipv4/vs/conntrack"
FILTER = ChainKey("filter", "KUBE-IPVS-OUT-FILTER")
MARK = ChainKey("nat", "KUBE-MARK-MASQ")
BACKENDS = (Backend.IPTABLES, Backend.NFTABLES)
JUMPS = (Jump("filter", "OUTPUT", FILTER.chain, "kubernetes ipvs access filter"),)


class Kernel(loop_kernel.Kernel, loop_kernel.ReadableKernel, Interface):
    """A real or fake kernel, with the interface that the reconcile loop and the commands use."""


@pytest.fixture(params=["fake", *(pytest.param(one.value, marks=pytest.mark.kernel) for one in BACKENDS)])
def kernel(request: pytest.FixtureRequest) -> Iterator[Kernel]:
    """A kernel without objects."""
    if request.param == "fake":
        fake = fake_kernel.FakeKernel()
        fake.sysctls = {CONNTRACK: "0"}
        yield fake
        return
    backend = Backend(request.param)
    if backend is Backend.NFTABLES:
        skip_without_nftables()
    request.getfixturevalue("network_namespace")
    with contextlib.closing(opened(backend)) as real:
        yield real


def skip_without_nftables() -> None:
    """Skip a test if the kernel's nf_tables refuses the rules of these tests."""
    if reason := _nftables_refusal():
        pytest.skip(reason)


@functools.cache
def _nftables_refusal() -> str:
    with contextlib.closing(opened(Backend.NFTABLES)) as real:
        found = real.rules.try_writing(Family.IPV4)
        return found.reason if found else ""


def opened(backend: Backend) -> node_kernel.NodeKernel:
    """A ``NodeKernel`` that uses the real kernel, with the chains and jumps of these tests."""
    return node_kernel.NodeKernel((FILTER, MARK), JUMPS, chosen=ChosenBackend(backend))


def uses_nftables(kernel: Kernel) -> bool:
    """Whether rules and sets are in nf_tables, whose error numbers and outcomes differ from those of ipset."""
    return isinstance(kernel, node_kernel.NodeKernel) and kernel.backend is Backend.NFTABLES


@pytest.fixture
def other(kernel: Kernel) -> Iterator[Kernel]:
    """Separate access to the same kernel, as another program on the host would have."""
    if not isinstance(kernel, node_kernel.NodeKernel):
        yield kernel
        return
    with contextlib.closing(opened(kernel.backend)) as made:
        yield made


@pytest.fixture(params=["itself", "planning"])
def given(request: pytest.FixtureRequest, kernel: Kernel) -> loop_kernel.Kernel:
    """The kernel object of a command: for ``run`` the given kernel, for ``plan`` one that only records operations."""
    return plan.PlanningKernel(kernel) if request.param == "planning" else kernel


FAMILIES = pytest.mark.parametrize("family", Family, ids=lambda family: family.label)
SERVICE = {Family.IPV4: parse_address("10.96.0.1"), Family.IPV6: parse_address("fd00:96::1")}
POD = {Family.IPV4: parse_address("10.244.0.9"), Family.IPV6: parse_address("fd00:244::9")}


def server(
    family: Family = Family.IPV4, *, protocol: Protocol = Protocol.TCP, scheduler: str = "rr", flags: int = 0, timeout_s: int = 0
) -> VirtualServer:
    key = VirtualServerKey(protocol, SERVICE[family], 80)
    return VirtualServer(key, VirtualServerSettings(scheduler, flags, timeout_s))


def real_server(virtual_server: VirtualServer, *, port: int = 8080, weight: int = 1) -> RealServers:
    return RealServers.of(virtual_server.key, RealServerKey.of(POD[virtual_server.key.address.family], port), weight)


def add(kernel: Kernel, *items: Item | SetEntry) -> None:
    """Add objects that do not exist yet, and expect no error."""
    for outcome in apply(kernel, Verb.ADD, *items):
        assert outcome.error == ""
        assert not outcome.surprise


def refusal(kernel: Kernel, verb: Verb, item: Item | SetEntry) -> int:
    """The error number with which the kernel refuses an operation that it must refuse."""
    (outcome,) = apply(kernel, verb, item)
    assert outcome.error, f"not refused: {outcome.operation}"
    assert "\n" not in outcome.error
    assert not outcome.surprise
    return outcome.errno


def observe(kernel: Kernel) -> Observation:
    """All kernel objects that these tests may have created."""
    return kernel.observe(tuple(IP_SETS), tuple(Family), (CONNTRACK,))


def virtual_servers(kernel: Kernel) -> Mapping[VirtualServerKey, ObservedVirtualServer]:
    found = observe(kernel).virtual_servers
    assert found is not None
    return found


def sets(kernel: Kernel) -> Mapping[str, AbstractSet[SetEntry]]:
    found = observe(kernel).sets
    assert found is not None
    return found


def polled(kernel: loop_kernel.Kernel, before: Observation, *, thorough: bool) -> Observation:
    """The result of a poll as one observation. Objects that the poll does not return are taken from ``before``."""
    observed = before
    for part in kernel.poll(tuple(IP_SETS), tuple(Family), (CONNTRACK,), thorough=thorough, whole=True):
        assert part.errors == ()
        whole = {name: value for name in WHOLE if (value := getattr(part, name)) is not None}
        observed = dataclasses.replace(
            observed,
            **whole,
            sets=_without_none({**(observed.sets or {}), **part.some_sets}),
            virtual_servers=_without_none({**(observed.virtual_servers or {}), **part.some_virtual_servers}),
            skeletons={**observed.skeletons, **part.skeletons},
        )
    return observed


def _without_none(found: Mapping[K, V | None]) -> dict[K, V]:
    return {key: value for key, value in found.items() if value is not None}


def fill(kernel: Kernel) -> VirtualServer:
    """Add an object of nearly every kind, and return the virtual server, which has two real servers."""
    desired, entry = server(), entries(Family.IPV4)[1]
    add(kernel, desired, real_server(desired, port=1), real_server(desired, port=2))
    add(kernel, IpSet(SetKind.CLUSTER_IP, Family.IPV4), entry, Device(DEVICE), BoundAddresses.of(desired.key.address))
    add(kernel, LocalRoutes.of(POD[Family.IPV4]))
    assert [outcome.error for outcome in apply(kernel, Verb.SET, skeleton(Family.IPV4))] == [""]
    return desired


def test_a_thorough_poll_returns_the_same_state_as_an_observation(kernel: Kernel) -> None:
    fill(kernel)
    assert polled(kernel, Observation(), thorough=True) == observe(kernel)


def test_a_poll_returns_the_changes_that_another_program_has_made_since_the_last_poll(kernel: Kernel, other: Kernel) -> None:
    gone = fill(kernel)
    changed = server(Family.IPV6)
    add(kernel, changed, real_server(changed))
    before = polled(kernel, Observation(), thorough=True)
    assert (set(before.virtual_servers or ()), before.addresses) == ({gone.key, changed.key}, {gone.key.address})
    apply(other, Verb.REMOVE, gone)
    apply(other, Verb.SET, real_server(changed, weight=0))
    apply(other, Verb.REMOVE, BoundAddresses.of(gone.key.address))
    apply(other, Verb.REMOVE, LocalRoutes.of(POD[Family.IPV4]))
    apply(other, Verb.REMOVE, entries(Family.IPV4)[1])
    apply(other, Verb.REMOVE, skeleton(Family.IPV4))
    observed, now = polled(kernel, before, thorough=False), observe(kernel)
    assert (observed.addresses, observed.sets, observed.skeletons) == (now.addresses, now.sets, now.skeletons)
    assert observed.routes == now.routes == frozenset()
    assert (observed.addresses, observed.skeletons[Family.IPV4].chains) == (frozenset(), {})
    assert {key: one.real_servers for key, one in (observed.virtual_servers or {}).items()} == {
        changed.key: {real_server(changed).key: 0}
    }


def test_the_commands_plan_and_run_read_the_same_kernel_state(kernel: Kernel, given: loop_kernel.Kernel) -> None:
    desired = fill(kernel)
    asked = tuple(IP_SETS), tuple(Family), (CONNTRACK,)
    assert given.observe(*asked) == kernel.observe(*asked)
    assert given.interface_addresses() == kernel.interface_addresses()
    assert given.connections([desired.key]) == {
        desired.key: {real_server(desired, port=port).key: ConnectionCounts(0, 0) for port in (1, 2)}
    }


def test_apply_returns_one_outcome_for_each_object_in_the_order_of_the_operations(given: loop_kernel.Kernel) -> None:
    desired, entry = server(), entries(Family.IPV4)[1]
    ip_set = IpSet(SetKind.CLUSTER_IP, Family.IPV4)
    items = (
        Device(DEVICE),
        BoundAddresses.of(POD[Family.IPV4]),
        LocalRoutes.of(*POD.values()),
        ip_set,
        SetEntries.of(entry),
        desired,
        all_at_once(desired, 1, 2),
    )
    operations = [Operation(Verb.ADD, item) for item in items]
    outcomes = given.apply(operations)
    assert [outcome.error for outcome in outcomes] == [""] * len(outcomes)
    assert list(one_by_one(outcome.operation for outcome in outcomes)) == list(one_by_one(operations))


def test_a_kernel_in_which_nothing_was_programmed_has_no_objects(kernel: Kernel) -> None:
    observed = observe(kernel)
    assert observed.errors == ()
    assert (observed.virtual_servers, observed.sets, observed.device, observed.addresses) == ({}, {}, False, frozenset())
    assert observed.routes == frozenset()
    assert [(image.chains, image.jumps) for image in observed.skeletons.values()] == [({}, frozenset())] * 2


def test_virtual_and_real_servers_of_all_protocols_and_families_are_read_back_unchanged(kernel: Kernel) -> None:
    flags = PERSISTENT | SCHEDULER_PORT
    desired = [
        server(family, protocol=one, scheduler="mh", flags=flags, timeout_s=10800) for family in Family for one in Protocol
    ]
    for one in desired:
        add(kernel, one, real_server(one, port=1), real_server(one, port=2, weight=0))
    observed = virtual_servers(kernel)
    assert {key: one.settings for key, one in observed.items()} == {one.key: one.settings for one in desired}
    for key, found in observed.items():
        pod = POD[key.address.family]
        assert found.real_servers == {RealServerKey.of(pod, 1): 1, RealServerKey.of(pod, 2): 0}


def test_adding_an_existing_virtual_server_changes_its_settings_and_keeps_its_real_servers(kernel: Kernel) -> None:
    before, after = server(scheduler="rr"), server(scheduler="wrr", flags=PERSISTENT, timeout_s=60)
    add(kernel, before, real_server(before))
    assert result(kernel, Verb.ADD, after) == ("", True)
    observed = virtual_servers(kernel)[before.key]
    assert (observed.settings, observed.real_servers) == (after.settings, {real_server(before).key: 1})


@pytest.mark.parametrize(
    ("verb", "is_there", "is_surprise"), [(Verb.SET, False, True), (Verb.ADD, True, True), (Verb.SET, True, False)]
)
def test_a_real_server_gets_its_new_weight_whether_or_not_it_existed_before(
    kernel: Kernel, verb: Verb, *, is_there: bool, is_surprise: bool
) -> None:
    desired = server()
    assert result(kernel, Verb.SET, desired) == ("", True)
    add(kernel, *([real_server(desired)] if is_there else []))
    assert result(kernel, verb, real_server(desired, weight=0)) == ("", is_surprise)
    assert virtual_servers(kernel)[desired.key].real_servers == {real_server(desired).key: 0}


def test_the_removal_of_an_absent_object_causes_no_error_but_counts_as_a_surprise(kernel: Kernel) -> None:
    items: tuple[Item, ...] = (
        server(),
        real_server(server()),
        SetEntries.of(entries(Family.IPV4)[1]),
        IpSet(SetKind.CLUSTER_IP, Family.IPV4),
        Device(DEVICE),
        *map(LocalRoutes.of, SERVICE.values()),
    )
    for item in items:
        assert result(kernel, Verb.REMOVE, item) == ("", True), item
    add(kernel, Device(DEVICE))
    assert result(kernel, Verb.REMOVE, BoundAddresses.of(SERVICE[Family.IPV4])) == ("", True)


def test_removing_a_virtual_server_removes_its_real_servers(kernel: Kernel) -> None:
    desired = server()
    add(kernel, desired, real_server(desired))
    assert [outcome.error for outcome in apply(kernel, Verb.REMOVE, desired)] == [""]
    assert virtual_servers(kernel) == {}
    assert refusal(kernel, Verb.SET, real_server(desired)) == errno.ESRCH


def test_a_real_server_is_refused_if_its_address_is_invalid_or_its_lower_threshold_is_too_high(kernel: Kernel) -> None:
    desired = server()
    add(kernel, desired)
    for text in ("0.0.0.0", "224.0.0.1", "fd00:244::9"):
        impossible = RealServers.of(desired.key, RealServerKey.of(parse_address(text), 8080))
        assert refusal(kernel, Verb.ADD, impossible) == errno.EINVAL, text
    assert refusal(kernel, Verb.ADD, real_server(desired)._replace(thresholds=Thresholds(3, 4))) == errno.ERANGE
    assert virtual_servers(kernel)[desired.key].real_servers == {}


def test_an_unknown_scheduler_is_refused(kernel: Kernel) -> None:
    assert refusal(kernel, Verb.ADD, server(scheduler="dice")) == errno.ENOENT
    assert virtual_servers(kernel) == {}


def test_connection_counts_are_zero_for_idle_real_servers_and_empty_for_unknown_virtual_servers(kernel: Kernel) -> None:
    four, six, unknown = server(), server(Family.IPV6), server(protocol=Protocol.UDP)
    add(kernel, four, real_server(four), six, real_server(six))
    assert kernel.connections([four.key, six.key, unknown.key]) == {
        **{one.key: {real_server(one).key: ConnectionCounts(0, 0)} for one in (four, six)},
        unknown.key: {},
    }


def entries(family: Family) -> list[SetEntry]:
    """One entry for a set of each type."""
    name = {kind: IpSet(kind, family).name for kind in SetKind}
    address, pod = SERVICE[family], POD[family]
    return [
        SetEntry(name[SetKind.IPVS_IPS], address),
        SetEntry(name[SetKind.CLUSTER_IP], address, Protocol.SCTP, 65535),
        SetEntry(name[SetKind.LOOP_BACK], pod, Protocol.UDP, 53, pod),
        SetEntry(name[SetKind.LOAD_BALANCER_SOURCE_CIDR], address, Protocol.TCP, 80, pod, family.bits),
        SetEntry(name[SetKind.LOAD_BALANCER_SOURCE_CIDR], address, Protocol.TCP, 80, type(pod)(pod[:1] + bytes(len(pod) - 1)), 8),
        SetEntry(name[SetKind.NODE_PORT_TCP], port=30080),
    ]


@FAMILIES
def test_entries_of_every_type_are_read_back_unchanged_until_they_are_removed(kernel: Kernel, family: Family) -> None:
    every_set = [IpSet(kind, family) for kind in SetKind]
    desired = entries(family)
    add(kernel, *every_set, *desired)
    assert sets(kernel) == {
        ip_set.name: frozenset(entry for entry in desired if entry.set == ip_set.name) for ip_set in every_set
    }
    assert [outcome.error for outcome in apply(kernel, Verb.REMOVE, *desired)] == [""] * len(desired)
    assert not any(sets(kernel).values())
    assert [outcome.error for outcome in apply(kernel, Verb.REMOVE, *every_set)] == [""] * len(every_set)
    assert sets(kernel) == {}


def test_in_each_backend_it_is_no_error_to_add_or_remove_an_entry_twice(kernel: Kernel) -> None:
    entry = entries(Family.IPV4)[1]
    add(kernel, IP_SETS[entry.set], entry)
    add(kernel, entry)
    assert result(kernel, Verb.ADD, IP_SETS[entry.set]) == ("", True)
    assert sets(kernel) == {entry.set: frozenset({entry})}
    assert result(kernel, Verb.REMOVE, entry) == ("", False)
    assert result(kernel, Verb.REMOVE, entry) == ("", uses_nftables(kernel)), "ipset does not tell whether an entry was there"
    assert sets(kernel) == {entry.set: frozenset()}


def test_a_catch_all_element_of_another_program_is_observed_until_the_element_is_removed(kernel: Kernel) -> None:
    entry = ForeignElement(IpSet(SetKind.CLUSTER_IP, Family.IPV4).name)
    add(kernel, IP_SETS[entry.set])
    if isinstance(kernel, fake_kernel.FakeKernel):
        kernel.sets[entry.set].entries.add(entry)
    elif uses_nftables(kernel):
        command = ("nft", "add", "element", "inet", "ipvsproxy", entry.set, "{ * }")
        if subprocess.run(command, capture_output=True, check=False).returncode:
            pytest.skip("this kernel has no such elements")
    else:
        pytest.skip("an ipset takes no such entry")
    assert set((kernel.observe([entry.set], (), ()).sets or {})[entry.set]) == {entry}
    assert result(kernel, Verb.REMOVE, entry) == ("", False)
    assert not (kernel.observe([entry.set], (), ()).sets or {})[entry.set]


def test_a_set_entry_for_the_range_of_all_addresses_is_refused(kernel: Kernel) -> None:
    add(kernel, IpSet(SetKind.LOAD_BALANCER_SOURCE_CIDR, Family.IPV4))
    everything = msgspec.structs.replace(entries(Family.IPV4)[4], other=parse_address("0.0.0.0"), prefix_length=0)
    assert refusal(kernel, Verb.ADD, everything) == (errno.EINVAL if uses_nftables(kernel) else fake_sets.INVALID_PREFIX)


@FAMILIES
def test_addresses_exist_only_while_the_device_kube_ipvs0_exists(kernel: Kernel, family: Family) -> None:
    address = BoundAddresses.of(SERVICE[family])
    assert refusal(kernel, Verb.ADD, address) == errno.ENODEV
    add(kernel, Device(DEVICE), address)
    observed = observe(kernel)
    assert (observed.device, observed.addresses) == (True, frozenset({address.key}))
    assert observed.interface_addresses == kernel.interface_addresses()
    assert address.key not in {item.address for item in kernel.interface_addresses()}
    assert result(kernel, Verb.ADD, address) == ("", True)
    assert [outcome.error for outcome in apply(kernel, Verb.REMOVE, Device(DEVICE))] == [""]
    observed = observe(kernel)
    assert (observed.device, observed.addresses) == (False, frozenset())


def skeleton(family: Family) -> Skeleton:
    """Rules that refer to a set and to a virtual server."""
    refused = server(family).key
    source, name = Network(refused.address, family.bits), IpSet(SetKind.CLUSTER_IP, family).name
    return Skeleton(
        family=family,
        chains={
            MARK: (Rule(target=SetMark(0x4000)),),
            FILTER: (
                Rule(comment="on a set", set=SetMatch(name, (Side.DESTINATION, Side.DESTINATION)), target=Verdict.RETURN),
                *(
                    Rule(source=source, virtual_server=VirtualServerKey(protocol, refused.address, 80), target=Verdict.DROP)
                    for protocol in Protocol
                ),
                Rule(from_this_host=True, virtual_server=refused, to_virtual_server=True, target=Verdict.DROP),
            ),
        },
        jumps=JUMPS,
    )


@FAMILIES
def test_rules_are_read_back_unchanged_until_they_are_removed(kernel: Kernel, family: Family) -> None:
    add(kernel, IpSet(SetKind.CLUSTER_IP, family))
    desired = skeleton(family)
    for _ in range(2):
        assert [outcome.error for outcome in apply(kernel, Verb.SET, desired)] == [""]
        assert observe(kernel).skeletons[family] == desired.in_force
    for _ in range(2):
        assert [outcome.error for outcome in apply(kernel, Verb.REMOVE, desired)] == [""]
        observed = observe(kernel).skeletons[family]
        assert (observed.chains, observed.jumps) == ({}, frozenset())


def test_rules_that_refer_to_a_missing_set_are_refused_and_their_table_does_not_change(kernel: Kernel) -> None:
    assert refusal(kernel, Verb.SET, skeleton(Family.IPV4)) == (errno.ENOENT if uses_nftables(kernel) else 0)
    observed = observe(kernel).skeletons[Family.IPV4]
    assert FILTER not in observed.chains
    assert observed.jumps == frozenset()


def test_a_set_that_a_rule_refers_to_cannot_be_removed(kernel: Kernel) -> None:
    ip_set = IpSet(SetKind.CLUSTER_IP, Family.IPV4)
    add(kernel, ip_set)
    apply(kernel, Verb.SET, skeleton(Family.IPV4))
    assert refusal(kernel, Verb.REMOVE, ip_set) == (errno.EBUSY if uses_nftables(kernel) else fake_sets.SET_BUSY)
    apply(kernel, Verb.REMOVE, skeleton(Family.IPV4))
    assert [outcome.error for outcome in apply(kernel, Verb.REMOVE, ip_set)] == [""]


def test_only_a_known_setting_can_be_written_and_read_back(kernel: Kernel) -> None:
    assert [outcome.error for outcome in apply(kernel, Verb.SET, Sysctl(CONNTRACK, "1"))] == [""]
    assert observe(kernel).sysctls == {CONNTRACK: "1"}
    assert refusal(kernel, Verb.SET, Sysctl("net/ipv4/vs/none", "1")) == errno.ENOENT


def test_each_timeout_is_set_unless_the_desired_timeout_is_zero(kernel: Kernel) -> None:
    assert [outcome.error for outcome in apply(kernel, Verb.SET, Timeouts(0, 0, 250))] == [""]
    assert kernel.read_timeouts() == Timeouts(900, 120, 250)


def test_the_removal_of_stale_flows_succeeds_even_if_no_flow_is_tracked(kernel: Kernel) -> None:
    flow = Flow(Family.IPV4, Protocol.UDP, SERVICE[Family.IPV4], 53)
    (outcome,) = apply(kernel, Verb.REMOVE, FlowCleaning(flow, frozenset()))
    assert (outcome.error, outcome.removed) == ("", 0)


def several(virtual_server: VirtualServer, *ports: int) -> RealServers:
    return RealServers(virtual_server.key, tuple(real_server(virtual_server, port=port).key for port in ports))


def all_at_once(virtual_server: VirtualServer, *ports: int) -> RealServers:
    """Several real servers as one item, to be added together with their new virtual server."""
    return RealServers(virtual_server.key, EvenWeights.of(several(virtual_server, *ports).keys))


@pytest.mark.parametrize(("family", "scheduler"), [(Family.IPV4, "rr"), (Family.IPV6, "mh")])
def test_several_real_servers_are_added_together_with_their_virtual_server(
    kernel: Kernel, family: Family, scheduler: str
) -> None:
    desired = server(family, scheduler=scheduler, flags=SCHEDULER_PORT if scheduler == "mh" else 0)
    items = desired, all_at_once(desired, 1, 2, 3)
    outcomes = apply(kernel, Verb.ADD, *items)
    assert outcomes == [Outcome(Operation(Verb.ADD, item)) for item in items]
    observed = virtual_servers(kernel)[desired.key]
    assert (observed.settings, observed.real_servers) == (desired.settings, dict.fromkeys(items[1].keys, 1))


def test_adding_several_real_servers_reports_an_existing_one_in_a_separate_outcome(kernel: Kernel) -> None:
    desired = server()
    add(kernel, desired, real_server(desired, port=2, weight=0))
    others, there = apply(kernel, Verb.ADD, all_at_once(desired, 1, 2, 3))
    assert others == Outcome(Operation(Verb.ADD, several(desired, 1, 3)))
    assert there == Outcome(Operation(Verb.ADD, real_server(desired, port=2)), surprise=True)
    assert set(virtual_servers(kernel)[desired.key].real_servers.values()) == {1}


def test_a_refused_real_server_and_the_added_real_servers_get_separate_outcomes(kernel: Kernel) -> None:
    desired = server()
    impossible = RealServerKey.of(parse_address("224.0.0.1"), 80)
    items = several(desired, 1, 2)
    first, last = items.keys
    _, added, refused = apply(kernel, Verb.ADD, desired, RealServers(desired.key, EvenWeights.of([first, impossible, last])))
    assert added == Outcome(Operation(Verb.ADD, items))
    assert refused.operation == Operation(Verb.ADD, RealServers.of(desired.key, impossible))
    assert (refused.errno, bool(refused.error)) == (errno.EINVAL, True)
    assert virtual_servers(kernel)[desired.key].real_servers == dict.fromkeys(items.keys, 1)


def test_each_of_several_entries_has_a_separate_outcome_if_one_entry_is_refused(kernel: Kernel) -> None:
    ip_set = IpSet(SetKind.IPVS_IPS, Family.IPV4)
    fitting, unfit = SetEntry(ip_set.name, SERVICE[Family.IPV4]), SetEntry(ip_set.name, SERVICE[Family.IPV6])
    _, added, refused = apply(kernel, Verb.ADD, ip_set, SetEntries(ip_set.name, (fitting, unfit)))
    assert added == Outcome(Operation(Verb.ADD, SetEntries.of(fitting)))
    assert (refused.operation, bool(refused.error)) == (Operation(Verb.ADD, SetEntries.of(unfit)), True)
    assert sets(kernel)[ip_set.name] == {fitting}


@pytest.mark.parametrize("kind", [BoundAddresses, LocalRoutes])
def test_each_added_address_or_route_has_its_own_outcome_even_if_one_of_them_already_existed(
    kernel: Kernel, kind: type[BoundAddresses | LocalRoutes]
) -> None:
    """When the kernel removes a primary address, it removes the secondary addresses of the same range, too.

    A /32 is a range of one address, so no address here is secondary.
    """
    addresses = (*SERVICE.values(), *POD.values())
    add(kernel, Device(DEVICE), kind(addresses[:2]))
    outcomes = apply(kernel, Verb.ADD, kind(addresses[1:]))
    assert outcomes == [Outcome(Operation(Verb.ADD, kind((one,))), surprise=one is addresses[1]) for one in addresses[1:]]
    assert apply(kernel, Verb.REMOVE, kind(addresses[:1])) == [Outcome(Operation(Verb.REMOVE, kind(addresses[:1])))]
    observed = observe(kernel)
    left = frozenset(addresses[1:])
    assert (observed.addresses, observed.routes) == ((left, set()) if kind is BoundAddresses else (set(), left))
    apply(kernel, Verb.REMOVE, Device(DEVICE))
    assert (observe(kernel).addresses, observe(kernel).routes) == (set(), observed.routes)


MISSING: Mapping[int, Item] = {
    errno.ESRCH: RealServers(server().key, tuple(RealServerKey.of(POD[Family.IPV4], port) for port in (1, 2))),
    errno.ENOENT: SetEntries.of(*(SetEntry("KUBE-IPVS-IPS", one[Family.IPV4]) for one in (SERVICE, POD))),
    errno.ENODEV: BoundAddresses(tuple(SERVICE.values())),
}
"""For each error number: objects that the kernel refuses with this number, because another object that they need does not
exist."""


@pytest.mark.parametrize("number", MISSING, ids=errno.errorcode.get)
def test_an_operation_is_refused_for_each_of_its_objects_if_the_object_they_need_is_missing(kernel: Kernel, number: int) -> None:
    outcomes = apply(kernel, Verb.ADD, MISSING[number])
    assert [outcome.operation for outcome in outcomes] == list(one_by_one([Operation(Verb.ADD, MISSING[number])]))
    assert {outcome.errno for outcome in outcomes} == {number}


@FAMILIES
def test_an_address_and_its_local_route_can_exist_together_and_be_removed_separately(kernel: Kernel, family: Family) -> None:
    both = BoundAddresses.of(SERVICE[family]), LocalRoutes.of(SERVICE[family])
    add(kernel, Device(DEVICE), *both)
    apply(kernel, Verb.REMOVE, both[0])
    assert (observe(kernel).addresses, observe(kernel).routes) == (frozenset(), {SERVICE[family]})
    add(kernel, both[0])
    apply(kernel, Verb.REMOVE, both[1])
    assert (observe(kernel).addresses, observe(kernel).routes) == ({SERVICE[family]}, frozenset())


@FAMILIES
def test_thresholds_are_read_back_unchanged(kernel: Kernel, family: Family) -> None:
    virtual = server(family)
    one, two = real_server(virtual), real_server(virtual, port=8081, weight=65535)
    add(kernel, virtual, one._replace(thresholds=Thresholds(1_000_000, 65536)), two)
    (observed,) = virtual_servers(kernel).values()
    assert observed == ObservedVirtualServer(
        virtual.settings, {one.key: 1, two.key: 65535}, thresholds={one.key: Thresholds(1_000_000, 65536)}
    )
    apply(kernel, Verb.SET, one, two._replace(thresholds=Thresholds(3)))
    (observed,) = virtual_servers(kernel).values()
    assert observed.thresholds == {two.key: Thresholds(3)}
    apply(kernel, Verb.REMOVE, two)
    (observed,) = virtual_servers(kernel).values()
    assert not observed.thresholds


@FAMILIES
def test_the_netmask_of_session_affinity_is_read_back_unchanged(kernel: Kernel, family: Family) -> None:
    virtual = server(family, flags=PERSISTENT, timeout_s=600)
    add(kernel, virtual)
    for length in (0, 1, 24, 31):
        wider = VirtualServer(virtual.key, virtual.settings._replace(prefix_length=length))
        apply(kernel, Verb.SET, wider)
        (observed,) = virtual_servers(kernel).values()
        assert observed.settings == wider.settings
        for part in kernel.poll((), tuple(Family), (), thorough=False, whole=True):
            for polled in part.some_virtual_servers.values():
                assert polled is not None
                assert polled.settings.prefix_length == length


def test_a_virtual_server_can_change_to_every_scheduler_without_being_removed(kernel: Kernel) -> None:
    schedulers = ("rr", "wrr", "lc", "wlc", "lblc", "lblcr", "dh", "sh", "sed", "nq", "fo", "ovf", "mh")
    assert [kernel.why_unusable(scheduler) for scheduler in schedulers] == [""] * len(schedulers)
    virtual = server()
    one, two = real_server(virtual, weight=5), real_server(virtual, port=8081, weight=0)
    add(kernel, virtual, one, two)
    for scheduler, flags in itertools.product(schedulers, (0x8, 0x18, 0)):
        chosen = server(scheduler=scheduler, flags=flags)
        assert result(kernel, Verb.SET, chosen) == ("", False)
        (observed,) = virtual_servers(kernel).values()
        assert (observed.settings, observed.real_servers) == (chosen.settings, {one.key: 5, two.key: 0}), scheduler


def test_a_scheduler_that_does_not_exist_is_unusable(kernel: Kernel) -> None:
    assert "no scheduler 'fastest'" in kernel.why_unusable("fastest")


def test_a_scheduler_whose_module_does_not_exist_counts_as_missing(kernel: Kernel) -> None:
    is_real = isinstance(kernel, node_kernel.NodeKernel)
    if is_real and modules.module_state("ip_vs_fastest") is modules.ModuleState.UNKNOWN:
        pytest.skip("the files of this kernel's modules are not visible")
    assert "no scheduler 'fastest'" in kernel.why_missing("fastest")
    assert kernel.why_missing("rr") == ""


def test_a_virtual_server_of_another_program_is_not_changed_if_a_firewall_mark_identifies_it(kernel: Kernel) -> None:
    theirs = VirtualServer(FirewallMark.of(Family.IPV4, 0x3FFF), VirtualServerSettings("wrr"))
    apply(kernel, Verb.ADD, theirs)
    (outcome,) = apply(kernel, Verb.ADD, VirtualServer(theirs.key, VirtualServerSettings("rr")))
    assert (outcome.errno, outcome.surprise) == (errno.EEXIST, False)
    assert "another program" in outcome.error
    assert virtual_servers(kernel)[theirs.key].settings == theirs.settings


@pytest.mark.kernel
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_new_backend_copies_the_old_sets_and_iptables_also_updates_the_old_nftables_sets(
    network_namespace: None, backend: Backend
) -> None:
    skip_without_nftables()
    marked = MarkedEntry(IpSet(SetKind.SCOPE, Family.IPV4).name, SERVICE[Family.IPV4], Protocol.TCP, 80, mark=0x10, mask=0x3FFF)
    node_port, of_addresses = entries(Family.IPV4)[5], entries(Family.IPV4)[1]
    other = next(one for one in BACKENDS if one is not backend)
    with contextlib.closing(opened(other)) as former, contextlib.closing(opened(backend)) as real:
        assert real.inherit_sets(tuple(Family)) == 0
        add(former, Device(DEVICE))
        kinds = (SetKind.SCOPE, SetKind.NODE_PORT_TCP, SetKind.CLUSTER_IP)
        add(former, *(IpSet(kind, Family.IPV4) for kind in kinds), marked, node_port, of_addresses)
        assert real.inherit_sets([Family.IPV6]) == len(real.former_entries([Family.IPV6])) == 0
        assert set(real.former_entries([Family.IPV4])) == {marked, node_port, of_addresses}
        expected = {marked.set: {marked}, node_port.set: {node_port}}
        if backend is Backend.IPTABLES:  # the nftables rules apply until the iptables rules are written, which may be delayed
            expected[of_addresses.set] = {of_addresses}
        assert real.inherit_sets(tuple(Family)) == len(expected)
        assert sets(real) == expected
        for verb in (Verb.REMOVE, Verb.ADD):
            apply(real, verb, SetEntries.of(node_port))
            kept = verb is Verb.ADD or backend is Backend.NFTABLES
            assert sets(former)[node_port.set] == ({node_port} if kept else set())
        apply(former, Verb.ADD, msgspec.structs.replace(marked, mark=0x20))
        if other is Backend.NFTABLES:
            command = ("nft", "add", "element", "inet", "ipvsproxy", node_port.set, "{ * }")
            subprocess.run(command, capture_output=True, check=False)
        assert real.inherit_sets(tuple(Family)) == 0
        assert sets(real)[marked.set] == {marked}, "a mark in use stays"
        apply(former, Verb.REMOVE, Device(DEVICE))
        assert real.inherit_sets(tuple(Family)) == 0
        assert not any(sets(real).values()), "entries from before this boot"
        assert sets(former)[of_addresses.set] == {of_addresses}
