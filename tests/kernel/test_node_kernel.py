"""Tests all drivers together: which driver gets each operation, in which order, and how a failing driver affects the others.

The drivers are fakes in these tests; ``test_contract`` runs the real drivers on a real kernel.
"""

import dataclasses
import errno
import socket
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import pytest
import structlog

from ipvsproxy.kernel import backends, host, node_kernel
from ipvsproxy.kernel.base.errors import KernelError
from ipvsproxy.kernel.iptables import iptables_driver as iptables
from ipvsproxy.kernel.network.addresses import ObservedAddresses
from ipvsproxy.model.kernel import Sysctl, Timeouts
from ipvsproxy.model.net import Family, Protocol
from ipvsproxy.model.plan import Item, Operation, Outcome, Verb
from ipvsproxy.model.rules import Backend, ObservedSkeleton
from ipvsproxy.model.sets import IP_SETS, SET_COPY, IpSet, SetEntries, SetEntry, SetKind, SetType
from ipvsproxy.model.state import Observation
from ipvsproxy.model.virtual_servers import (
    ConnectionCounts,
    ObservedVirtualServer,
    RealServers,
    VirtualServer,
    VirtualServerKey,
    VirtualServerSettings,
)
from ipvsproxy.translate import skeleton
from ipvsproxy.translate.translation_settings import Settings
from tests.support import builders

KEY = builders.frontend("10.96.0.1", 80)
OTHER_KEY = builders.frontend("10.96.0.2", 80)
BACKEND = builders.backend("10.244.0.5")
ENTRY = SetEntry("KUBE-CLUSTER-IP", KEY.address, Protocol.TCP, 80)
ENTRIES = SetEntries.of(ENTRY)
SETTINGS = VirtualServerSettings("rr")
SEEN = ObservedVirtualServer(SETTINGS, {BACKEND: 1})
POLLED = ObservedVirtualServer(SETTINGS, {BACKEND: 2})
ON_ETH0 = builders.interface_address("eth0", builders.NODE_ADDRESS)
IMAGES = {family: ObservedSkeleton(family=family, chains={}, jumps=frozenset()) for family in Family}
ITEMS: Mapping[str, Sequence[Item]] = {
    "ipvs": (VirtualServer(KEY, SETTINGS), RealServers.of(KEY, BACKEND), Timeouts(1, 2, 3)),
    "ipset": (ENTRIES, IpSet(SetKind.CLUSTER_IP, Family.IPV4), SET_COPY),
    "sysctls": (Sysctl("net/ipv4/ip_forward", "1"),),
    "iptables": (
        skeleton.build_skeleton(Family.IPV4, Settings(), builders.node_view(), occupied=frozenset(), refused=frozenset()),
    ),
}


class Held(NamedTuple):
    """An observed set, with the fields that these tests need."""

    entries: frozenset[SetEntry]
    type: SetType = SetType.ADDRESS_PORT

    def differs_from(self, ip_set: IpSet) -> str:
        return "" if self.type is ip_set.type else f"it is {self.type}"


class Kernel:
    """The contents and answers of the fake drivers, and the calls that the fake drivers get.

    Fake drivers in ``broken`` can neither read nor apply.
    """

    def __init__(self) -> None:
        self.applied: list[tuple[str, list[Item]]] = []
        self.asked: dict[str, object] = {}
        self.closed: list[str] = []
        self.forgotten: list[str] = []
        self.broken: set[str] = set()
        self.marks = dict.fromkeys(Family, 1)

    def check(self, name: str) -> None:
        if name in self.broken:
            raise KernelError(action=f"use {name}", errno=errno.ENOBUFS)


class Double:
    """A fake that can replace any driver."""

    foreign = 3

    def __init__(self, name: str, kernel: Kernel, answer: Callable[..., Any]) -> None:
        self._name = name
        self._kernel = kernel
        self._answer = answer

    def observe(self, *arguments: Any) -> Any:
        self._kernel.check(self._name)
        if self._name == "ipset":
            for name in arguments[0]:
                self._kernel.check(name)
        self._kernel.asked[self._name] = arguments
        return self._answer(*arguments)

    def observe_changed(self, *arguments: Any, **named: Any) -> Any:
        if self._name == "ipvs":
            return self._parts(POLLED)
        return self.observe(arguments) if self._name == "ipset" else self.observe()

    def observe_in_parts(self, _families: object) -> Iterator[Any]:
        return self._parts(SEEN)

    def _parts(self, observed: ObservedVirtualServer) -> Iterator[Any]:
        yield {KEY: observed}
        self._kernel.check(self._name)
        yield {OTHER_KEY: None}

    def has_copy(self) -> bool:
        self._kernel.check(self._name)
        return True

    def forget(self) -> None:
        self._kernel.forgotten.append(self._name)

    def known_program(self, _family: Family) -> iptables.Program:
        return iptables.Program((1, 8, 9), "legacy")

    def fingerprint(self, family: Family, variant: str) -> int:
        self._kernel.check(self._name)
        assert variant == "legacy"
        return self._kernel.marks[family]

    def connections(self, keys: Collection[VirtualServerKey]) -> Any:
        self._kernel.check(self._name)
        return {KEY: {BACKEND: ConnectionCounts(2, 1)}}

    def apply(self, operations: Sequence[Operation]) -> list[Outcome]:
        self._kernel.applied.append((self._name, [operation.item for operation in operations]))
        self._kernel.check(self._name)
        return [Outcome(operation, surprise=self._name == "ipset") for operation in operations]

    def close(self) -> None:
        self._kernel.closed.append(self._name)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    """The fake kernel shared by all drivers of the nodes that a test creates."""
    kernel = Kernel()
    answers: Mapping[str, Callable[..., Any]] = {
        "Iptables": lambda family: IMAGES[family],
        "Ipvs": lambda _families: {KEY: SEEN},
        "Ipset": lambda names: {name: Held(frozenset({ENTRY})) for name in names},
        "Address": lambda: ObservedAddresses(True, frozenset({KEY.address}), (ON_ETH0,)),
        "Route": lambda: frozenset({OTHER_KEY.address}),
        "Sysctl": lambda paths: dict.fromkeys(paths, "1"),
        "Conntrack": lambda: None,
    }
    names = {"Address": "addresses", "Route": "routes", "Sysctl": "sysctls"}
    for driver, answer in answers.items():
        double = Double(names.get(driver, driver.lower()), kernel, answer)
        name = "RulesDriver" if driver == "Iptables" else f"{driver}Driver"
        place = backends if driver in {"Iptables", "Ipset"} else node_kernel
        monkeypatch.setattr(place, name, lambda *_, double=double, **__: double)
    changes = Double("rule_changes", kernel, lambda: None)
    monkeypatch.setattr(node_kernel, "RuleChanges", lambda: changes)
    return kernel


def new_node() -> node_kernel.NodeKernel:
    return node_kernel.NodeKernel(skeleton.CHAINS, skeleton.JUMPS)


def observe(target: node_kernel.NodeKernel) -> Observation:
    return target.observe(["KUBE-CLUSTER-IP"], list(Family), ["net/ipv4/ip_forward"])


def poll(target: node_kernel.NodeKernel, *, thorough: bool = False) -> Observation:
    """The results of all steps of a poll, combined."""
    parts = list(target.poll(["KUBE-CLUSTER-IP"], list(Family), ["net/ipv4/ip_forward"], thorough=thorough, whole=True))
    whole: dict[str, Any] = {"errors": ()}
    for part in parts:
        for field in dataclasses.fields(part):
            value, before = getattr(part, field.name), whole.get(field.name)
            if field.name == "errors":
                whole["errors"] += value
            elif field.name != "is_of_rules" and value not in (field.default, {}):
                assert before is None or field.name in {"skeletons", "some_virtual_servers", "some_sets"}
                whole[field.name] = {**before, **value} if before else value
    return Observation(**whole)


def operations(*items: Item) -> list[Operation]:
    return [Operation(Verb.ADD, item) for item in items]


def test_only_consecutive_operations_of_one_driver_are_applied_together(kernel: Kernel) -> None:
    (server, real_server, _), (entry, ip_set, _) = ITEMS["ipvs"], ITEMS["ipset"]
    last = SetEntries.of(msgspec.structs.replace(ENTRY, port=81))
    asked = operations(entry, ip_set, server, real_server, last)
    outcomes = new_node().apply(asked)
    assert kernel.applied == [("ipset", [entry, ip_set]), ("ipvs", [server, real_server]), ("ipset", [last])]
    assert [outcome.operation for outcome in outcomes] == asked
    assert [outcome.surprise for outcome in outcomes] == [True, True, False, False, True], "outcomes are the drivers' own"


def test_if_a_driver_raises_an_exception_only_the_operations_of_this_driver_fail(kernel: Kernel) -> None:
    kernel.broken = {"ipset"}
    outcomes = new_node().apply(operations(ITEMS["ipvs"][0], ENTRIES, ITEMS["ipset"][1], ITEMS["sysctls"][0]))
    assert [bool(outcome.error) for outcome in outcomes] == [False, True, True, False]
    assert {outcome.errno for outcome in outcomes if outcome.error} == {errno.ENOBUFS}
    assert all("use ipset" in outcome.error for outcome in outcomes[1:3])


def test_each_call_of_a_driver_is_reported_with_its_outcomes_and_its_duration(kernel: Kernel) -> None:
    kernel.broken = {"ipset"}
    reported: list[tuple[list[bool], float]] = []
    target = node_kernel.NodeKernel(
        skeleton.CHAINS, skeleton.JUMPS, lambda outcomes, took_s: reported.append(([bool(one.error) for one in outcomes], took_s))
    )
    target.apply(operations(*ITEMS["ipvs"], ENTRIES))
    assert [failed for failed, _ in reported] == [[False] * 3, [True]]
    assert all(took_s >= 0 for _, took_s in reported)


@pytest.mark.parametrize("backend", [Backend.IPTABLES, Backend.NFTABLES])
@pytest.mark.parametrize("by_interface", [True, False])
def test_arrival_behind_ipvs_is_reported_as_missing_only_if_nftables_rules_need_this_feature(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch, backend: Backend, *, by_interface: bool
) -> None:
    del kernel
    monkeypatch.setattr(host, "kernel_version", lambda: (5, 4))
    target = new_node()
    monkeypatch.setattr(target, "backend", backend)
    names = [one.name for one in target.lacking(by_interface=by_interface)]
    assert ("arrival-behind-ipvs" in names) == (by_interface and backend is Backend.NFTABLES)
    assert "prompt-reuse" in names


def test_a_poll_reads_only_rules_that_changed_since_the_rules_were_last_read(kernel: Kernel) -> None:
    target = new_node()
    assert poll(target).skeletons == IMAGES, "never read before"
    assert poll(target).skeletons == {}
    kernel.marks[Family.IPV6] = 2
    assert poll(target).skeletons == {Family.IPV6: IMAGES[Family.IPV6]}
    kernel.marks = dict.fromkeys(Family, 3)
    observe(target)
    assert poll(target).skeletons == {}


def test_the_first_poll_after_a_write_reads_the_rules_even_if_their_fingerprint_is_unchanged(kernel: Kernel) -> None:
    target = new_node()
    poll(target)
    target.apply(operations(*ITEMS["iptables"]))
    assert poll(target).skeletons == {Family.IPV4: IMAGES[Family.IPV4]}
    assert poll(target).skeletons == {}


def test_each_poll_reports_an_error_for_a_table_that_iptables_cannot_list(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = IMAGES[Family.IPV4]
    monkeypatch.setitem(IMAGES, Family.IPV4, dataclasses.replace(shown, hidden=frozenset({"filter"})))
    target = new_node()
    for _ in range(3):
        assert "IPv4: table filter holds rules of nft" in "".join(poll(target).errors)
    kernel.asked.clear()
    assert "IPv4: table filter holds rules of nft" in "".join(poll(target, thorough=True).errors)
    assert "iptables" not in kernel.asked, "no program runs again"
    monkeypatch.setitem(IMAGES, Family.IPV4, shown)
    kernel.marks[Family.IPV4] = 2
    assert [poll(target).errors for _ in range(2)] == [(), ()]


def test_a_thorough_poll_returns_everything_except_rules_that_did_not_change(kernel: Kernel) -> None:
    target = new_node()
    whole = observe(target)
    for number in (2, 3):
        assert poll(target, thorough=True).skeletons == {}
        kernel.marks = dict.fromkeys(Family, number)
        assert poll(target, thorough=True) == dataclasses.replace(
            whole,
            virtual_servers=None,
            foreign_virtual_servers=0,
            some_virtual_servers={KEY: SEEN, OTHER_KEY: None},
            has_shown_virtual_servers=True,
            sets=None,
            some_sets={"KUBE-CLUSTER-IP": frozenset({ENTRY})},
        )
    assert kernel.forgotten == ["ipset"] * 4


def test_a_poll_is_split_into_steps_so_that_objects_can_be_written_in_between(kernel: Kernel) -> None:
    target = new_node()
    names = [ip_set.name for ip_set in IP_SETS.values()]
    parts = list(target.poll(names, list(Family), [], thorough=False, whole=True))
    asked = [set(part.some_sets) for part in parts if part.some_sets]
    assert set().union(*asked) == set(names)
    assert max(map(len, asked)) == node_kernel.SETS_AT_ONCE
    assert [part.some_virtual_servers for part in parts[-2:]] == [{KEY: POLLED}, {OTHER_KEY: None}]
    assert kernel.applied == []


def test_the_poll_reports_only_one_error_if_no_set_can_be_read(kernel: Kernel) -> None:
    kernel.broken = {"ipset"}
    parts = list(new_node().poll([ip_set.name for ip_set in IP_SETS.values()], list(Family), [], thorough=False, whole=True))
    assert [error for part in parts for error in part.errors] == ["use ipset: No buffer space available"]
    assert parts[-1].some_virtual_servers == {OTHER_KEY: None}, "the others are looked at"


def test_all_other_sets_are_read_even_if_one_set_cannot_be_read(kernel: Kernel) -> None:
    names = [ip_set.name for ip_set in IP_SETS.values()]
    kernel.broken = {names[2]}
    for thorough in (False, True):
        parts = list(new_node().poll(names, [], [], thorough=thorough, whole=True))
        assert set().union(*(part.some_sets for part in parts)) == set(names) - kernel.broken
        assert len([error for part in parts for error in part.errors]) == 1


def test_a_poll_returns_the_virtual_servers_that_it_has_read_before_an_error(kernel: Kernel) -> None:
    parts = new_node().poll([], [], [], thorough=False, whole=True)
    for part in parts:
        if part.some_virtual_servers:
            kernel.broken = {"ipvs"}
    assert (part.some_virtual_servers, part.errors) == ({}, ("use ipvs: No buffer space available",))


def test_rules_that_could_not_be_read_are_read_by_the_next_poll(kernel: Kernel) -> None:
    target = new_node()
    kernel.broken = {"iptables"}
    assert len(poll(target).errors) == len(Family)
    kernel.broken = set()
    assert poll(target).skeletons == IMAGES


def test_a_poll_skips_rules_whose_fingerprint_cannot_be_read(kernel: Kernel) -> None:
    kernel.broken = {"rule_changes"}
    target = new_node()
    assert observe(target).skeletons == IMAGES
    with structlog.testing.capture_logs() as logged:
        for _ in range(2):
            observed = poll(target)
            assert (observed.skeletons, observed.errors) == ({}, ())
        assert poll(target, thorough=True).skeletons == IMAGES
    assert logged == [], "the first reading has logged it"


def test_an_unreadable_fingerprint_of_rules_is_logged_again_only_after_it_was_readable(kernel: Kernel) -> None:
    target = new_node()
    with structlog.testing.capture_logs() as logged:
        for broken in ({"rule_changes"}, {"rule_changes"}, set(), {"rule_changes"}):
            kernel.broken = broken
            observe(target)
    assert [line["event"] for line in logged] == ["rule_changes_unseen"] * len(Family) * 2


def test_all_objects_in_the_kernel_are_observed(kernel: Kernel) -> None:
    assert observe(new_node()) == Observation(
        virtual_servers={KEY: SEEN},
        foreign_virtual_servers=3,
        sets={"KUBE-CLUSTER-IP": frozenset({ENTRY})},
        set_copy=True,
        device=True,
        addresses=frozenset({KEY.address}),
        routes=frozenset({OTHER_KEY.address}),
        interface_addresses=(ON_ETH0,),
        skeletons=IMAGES,
        sysctls={"net/ipv4/ip_forward": "1"},
    )


@pytest.mark.parametrize(
    ("name", "lacking"),
    [
        ("ipvs", {"virtual_servers": None}),
        ("ipset", {"sets": None, "set_copy": None}),
        ("addresses", {"device": None, "addresses": None, "interface_addresses": None}),
        ("iptables", {"skeletons": {}}),
        ("sysctls", {"sysctls": None}),
    ],
)
def test_an_observation_contains_all_parts_that_can_be_read_and_the_reason_for_each_unreadable_part(
    kernel: Kernel, name: str, lacking: Mapping[str, object]
) -> None:
    complete = observe(new_node())
    kernel.broken = {name}
    observed = observe(new_node())
    for field in ("virtual_servers", "sets", "set_copy", "device", "addresses", "interface_addresses", "skeletons", "sysctls"):
        assert getattr(observed, field) == lacking.get(field, getattr(complete, field))
    parts = {"iptables": 2, "ipset": 2}  # one error per family of rules; one error for our sets and one for the copy of a set
    assert len(observed.errors) == parts.get(name, 1), "one line per part"
    assert all(f"use {name}" in error for error in observed.errors)


def test_a_set_with_our_name_but_other_parameters_does_not_count_as_one_of_our_sets(kernel: Kernel) -> None:
    observed = new_node().observe(["KUBE-CLUSTER-IP", "KUBE-LOOP-BACK"], list(Family), [])
    assert observed.sets == {"KUBE-CLUSTER-IP": frozenset({ENTRY})}, "the double says that either is hash:ip,port"
    assert observed.errors == ()


def test_only_the_requested_sets_and_settings_and_the_rules_of_the_requested_families_are_read(kernel: Kernel) -> None:
    target = new_node()
    observed = target.observe(["KUBE-LOOP-BACK"], [Family.IPV6], [])
    assert kernel.asked["ipset"] == (["KUBE-LOOP-BACK"],)
    assert kernel.asked["sysctls"] == ([],)
    assert observed.skeletons == {Family.IPV6: IMAGES[Family.IPV6]}


def test_interface_addresses_can_be_read_alone_and_a_failed_reading_raises_an_error(kernel: Kernel) -> None:
    target = new_node()
    assert target.interface_addresses() == (ON_ETH0,)
    assert set(kernel.asked) == {"addresses"}
    kernel.broken = {"addresses"}
    with pytest.raises(KernelError, match="use addresses"):
        target.interface_addresses()


def test_connections_are_unknown_if_they_cannot_be_read(kernel: Kernel) -> None:
    target = new_node()
    assert target.connections([KEY, OTHER_KEY]) == {KEY: {BACKEND: ConnectionCounts(2, 1)}, OTHER_KEY: None}
    kernel.broken = {"ipvs"}
    assert target.connections([KEY]) == {KEY: None}


def test_closing_the_node_kernel_closes_all_its_sockets(kernel: Kernel) -> None:
    new_node().close()
    assert sorted(kernel.closed) == ["addresses", "conntrack", "ipset", "iptables", "ipvs", "routes", "rule_changes"]


def test_the_node_kernel_knows_the_netlink_port_of_the_socket_that_changes_addresses(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[socket.socket] = []

    def make_driver(open_socket: Callable[[int], socket.socket]) -> None:
        opened.append(open_socket(socket.NETLINK_ROUTE))

    monkeypatch.setattr(node_kernel, "AddressDriver", make_driver)
    target = new_node()
    with opened[0]:
        assert target.ports == {opened[0].getsockname()[0]}
