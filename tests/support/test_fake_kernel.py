"""Behaviour of the fake kernel alone. tests/kernel/test_contract.py has the behaviour that it shares with the real one."""

import errno

import pytest

from ipvsproxy.kernel.base.errors import KernelError
from ipvsproxy.model.kernel import BoundAddresses, Flow, FlowCleaning, InterfaceAddress, Sysctl
from ipvsproxy.model.net import Family, Protocol, parse_address
from ipvsproxy.model.plan import Operation, Verb
from ipvsproxy.model.real_servers import RealServerKey
from ipvsproxy.model.sets import IpSet, SetEntries, SetEntry, SetKind, SetType
from ipvsproxy.model.virtual_servers import Connections, RealServers, VirtualServer, VirtualServerKey, VirtualServerSettings
from tests.support import fake_kernel, fake_sets

KEY = VirtualServerKey(Protocol.TCP, parse_address("10.96.0.1"), 443)
SERVER = VirtualServer(KEY, VirtualServerSettings("rr"))
REAL = RealServers.of(KEY, RealServerKey.of(parse_address("10.244.0.9"), 6443))
CLUSTER_IP = IpSet(SetKind.CLUSTER_IP, Family.IPV4)


def add(*items: VirtualServer | RealServers | IpSet | SetEntry | Sysctl | BoundAddresses) -> list[Operation]:
    return [Operation(Verb.ADD, SetEntries.of(item) if isinstance(item, SetEntry) else item) for item in items]


def entry(port: int) -> SetEntry:
    return SetEntry(CLUSTER_IP.name, KEY.address, Protocol.TCP, port)


def test_a_failure_on_demand_changes_nothing_and_ends() -> None:
    kernel = fake_kernel.FakeKernel()
    kernel.fail(lambda operation: operation.item == SERVER, errno.ENOMEM, times=2)
    assert [kernel.apply(add(SERVER))[0].errno for _ in range(3)] == [errno.ENOMEM, errno.ENOMEM, 0]
    assert kernel.counts["add", "virtual_server"] == 3
    assert list(kernel.virtual_servers) == [KEY]


def test_all_operations_are_recorded_until_they_are_forgotten() -> None:
    kernel = fake_kernel.FakeKernel()
    operations = add(SERVER, REAL)
    kernel.apply(operations)
    assert kernel.applied == operations
    kernel.forget()
    assert (kernel.applied, kernel.counts) == ([], {})
    assert kernel.virtual_servers[KEY].real_servers == {REAL.key: 1}


def test_one_object_twice_in_one_call_is_an_error_of_the_caller() -> None:
    kernel = fake_kernel.FakeKernel()
    with pytest.raises(AssertionError, match="at most one operation per object"):
        kernel.apply([*add(REAL), Operation(Verb.REMOVE, REAL._replace(weight=0))])
    assert kernel.applied == []


def test_an_observation_does_not_change_with_the_kernel() -> None:
    kernel = fake_kernel.FakeKernel()
    kernel.apply(add(SERVER, CLUSTER_IP, entry(1)))
    before = kernel.observe()
    kernel.apply(add(REAL, entry(2)))
    assert before.virtual_servers is not None
    assert before.virtual_servers[KEY].real_servers == {}
    assert before.sets == {CLUSTER_IP.name: frozenset({entry(1)})}


def test_a_part_that_cannot_be_read_is_none_and_reported() -> None:
    kernel = fake_kernel.FakeKernel()
    kernel.unreadable = {"sets", "virtual_servers"}
    observation = kernel.observe()
    assert (observation.sets, observation.virtual_servers, observation.device) == (None, None, False)
    assert observation.errors == ("sets cannot be read", "virtual_servers cannot be read")


def test_connections_that_cannot_be_read_are_none() -> None:
    kernel = fake_kernel.FakeKernel()
    kernel.apply(add(SERVER))
    kernel.unreadable = {"connections"}
    assert kernel.connections([KEY]) == {KEY: None}


def test_addresses_of_the_host_are_those_of_the_test_unless_unreadable() -> None:
    kernel = fake_kernel.FakeKernel()
    kernel.host_addresses = [InterfaceAddress("eth0", KEY.address, 24)]
    assert kernel.interface_addresses() == kernel.observe().interface_addresses == tuple(kernel.host_addresses)
    kernel.unreadable = {"interface_addresses"}
    with pytest.raises(KernelError):
        kernel.interface_addresses()


def test_a_full_set_takes_no_more() -> None:
    kernel = fake_kernel.FakeKernel(set_capacity=2)
    outcomes = kernel.apply(add(CLUSTER_IP, entry(1), entry(2), entry(3)))
    assert [outcome.errno for outcome in outcomes] == [0, 0, 0, fake_sets.HASH_FULL]
    assert kernel.apply(add(entry(1)))[0].error == ""


def test_a_set_of_another_type_is_in_the_way() -> None:
    kernel = fake_kernel.FakeKernel()
    strange = SetEntry(CLUSTER_IP.name, KEY.address)
    kernel.sets[CLUSTER_IP.name] = fake_sets.KernelSet(SetType.ADDRESS, Family.IPV4, {strange})
    assert kernel.apply(add(CLUSTER_IP))[0].errno == errno.EEXIST
    assert kernel.observe().sets == {CLUSTER_IP.name: frozenset()}


def test_an_entry_must_have_the_fields_of_its_set() -> None:
    kernel = fake_kernel.FakeKernel()
    kernel.apply(add(CLUSTER_IP))
    wrong = (
        SetEntry(CLUSTER_IP.name, port=80),
        SetEntry(CLUSTER_IP.name, KEY.address),
        SetEntry(CLUSTER_IP.name, parse_address("fd00::1"), Protocol.TCP, 80),
        SetEntry(CLUSTER_IP.name, KEY.address, Protocol.TCP, 80, KEY.address),
        entry(65536),
    )
    assert [outcome.errno for outcome in kernel.apply(add(*wrong))] == [errno.EINVAL] * len(wrong)
    assert not kernel.sets[CLUSTER_IP.name].entries


def test_sets_of_a_wrong_type_exist_but_are_not_observed() -> None:
    kernel = fake_kernel.FakeKernel()
    kernel.sets["cali40all"] = fake_sets.KernelSet(SetType.ADDRESS, Family.IPV4)
    kernel.apply(add(CLUSTER_IP))
    assert kernel.observe().sets == {CLUSTER_IP.name: frozenset()}


def test_connections_are_those_of_the_test() -> None:
    kernel = fake_kernel.FakeKernel()
    kernel.apply(add(SERVER, REAL))
    kernel.connection_counts[KEY, REAL.key] = Connections(3, 1)
    assert kernel.connections([KEY]) == {KEY: {REAL.key: Connections(3, 1)}}
    kernel.apply([Operation(Verb.REMOVE, SERVER)])
    kernel.apply(add(SERVER, REAL))
    assert kernel.connections([KEY]) == {KEY: {REAL.key: Connections(0, 0)}}


def test_flows_are_cleaned_except_those_to_keep() -> None:
    kernel = fake_kernel.FakeKernel()
    flow = Flow(Family.IPV4, Protocol.UDP, KEY.address, 53)
    gone, kept = RealServerKey.of(parse_address("10.244.0.9"), 53), RealServerKey.of(parse_address("10.244.0.10"), 53)
    kernel.flows[flow] = {gone: 4, kept: 2}
    cleaning = Operation(Verb.REMOVE, FlowCleaning(flow, frozenset({kept})))
    assert [kernel.apply([cleaning])[0].removed for _ in range(2)] == [4, 0]
    assert kernel.flows == {flow: {kept: 2}}
