"""The IPVS driver on a real kernel, checked with ipvsadm.

Errors of the netlink socket are tested in test_faults.py, with a fake socket. Behaviour that the real kernel and the fake
kernel share is tested in test_contract.py.
"""

import contextlib
import errno
import socket
import time
from collections.abc import Callable

import msgspec
import pytest

from ipvsproxy.kernel.ipvs import ipvs_driver as ipvs
from ipvsproxy.kernel.ipvs import ipvs_message
from ipvsproxy.kernel.ipvs import operations as ipvs_operations
from ipvsproxy.model.kernel import Timeouts
from ipvsproxy.model.net import Family, Protocol, host_port, parse_address
from ipvsproxy.model.plan import Operation, Verb
from ipvsproxy.model.real_servers import NOT_MASQUERADED, TUNNELLED, EvenWeights, RealServerKey, UnevenWeights
from ipvsproxy.model.virtual_servers import (
    PERSISTENT,
    SCHEDULER_PORT,
    ConnectionCounts,
    Counters,
    FirewallMark,
    RealServers,
    VirtualServer,
    VirtualServerKey,
    VirtualServerSettings,
)
from ipvsproxy.reconcile.attempts import PATIENT_SCHEDULERS
from ipvsproxy.reconcile.kinds import virtual_server_kind
from tests.kernel.drivers import apply, clean, operations, result
from tests.kernel.ipvs.examples import changes, ipvsadm, real, server
from tests.support import patience


@pytest.mark.kernel
def test_virtual_servers_added_by_ipvsadm_are_observed(driver: ipvs.IpvsDriver) -> None:
    ipvsadm("-A", "-t", "10.96.0.1:80", "-s", "mh", "-p", "600", "-b", "mh-port,mh-fallback")
    ipvsadm("-a", "-t", "10.96.0.1:80", "-r", "10.1.0.1:8080", "-m", "-w", "7")
    ipvsadm("-A", "-u", "[fd00::1]:53", "-s", "wlc", "-o")
    ipvsadm("-A", "-f", "100", "-s", "rr")
    ipvsadm("-a", "-f", "100", "-r", "10.1.0.1", "-m")
    ipvsadm("-A", "-f", "101", "-6", "-s", "rr", "-p", "60")
    tcp, udp = server("10.96.0.1").key, server("fd00::1", 53, protocol=Protocol.UDP).key
    mark, mark6 = FirewallMark.of(Family.IPV4, 100), FirewallMark.of(Family.IPV6, 101)
    observed = driver.observe()
    assert {key: (value.settings, value.real_servers) for key, value in observed.items()} == {
        tcp: (VirtualServerSettings("mh", 0x19, 600), {RealServerKey.of(parse_address("10.1.0.1"), 8080): 7}),
        udp: (VirtualServerSettings("wlc", 0x4), {}),
        mark: (VirtualServerSettings("rr"), {RealServerKey.of(parse_address("10.1.0.1"), 0): 1}),
        mark6: (VirtualServerSettings("rr", PERSISTENT, 60), {}),
    }
    assert driver.foreign == 0
    assert changes(driver) == {}
    with contextlib.closing(ipvs.IpvsDriver()) as another:
        assert another.observe() == observed


DRIFT = {
    "other method": (("-e", "{pod}", "-g", "-w", "1", "-x", "9"), {"{pod}": NOT_MASQUERADED}, Verb.SET),
    "tunnel": (("-e", "{pod}", "-i", "-w", "1", "-x", "9"), {"{pod}": TUNNELLED + 1}, Verb.SET),
    "other family": (("-a", "{alien}", "-i"), {"{pod}": 1, "{alien}": TUNNELLED + 1}, Verb.REMOVE),
}
"""For each drift: the options of ipvsadm that cause the drift, the real servers afterwards, and the verb of the repair."""


@pytest.mark.kernel
@pytest.mark.parametrize(
    ("address", "pod", "alien"),
    [("10.96.0.1", "10.244.0.1:80", "[fd01::1]:80"), ("fd00:96::1", "[fd00:244::1]:80", "10.1.0.1:80")],
)
@pytest.mark.parametrize("name", DRIFT)
def test_a_real_server_with_another_forwarding_method_is_observed_and_repaired(
    driver: ipvs.IpvsDriver, address: str, pod: str, alien: str, name: str
) -> None:
    bare = server(address)
    keys = {text: RealServerKey.of(parse_address(text[:-3].strip("[]")), 80) for text in (pod, alien)}
    desired = VirtualServer(bare.key, bare.settings, EvenWeights.of([keys[pod]]))
    assert clean(apply(driver, Verb.ADD, desired, RealServers(desired.key, desired.weights)))
    driver.observe()
    (option, real_server, *rest), left, verb = DRIFT[name]
    ipvsadm(option, "-t", host_port(desired.key.address, 80), "-r", real_server.format(pod=pod, alien=alien), *rest)
    observed, by_netlink = changes(driver)[desired.key], driver._table.virtual_server(desired.key)
    assert observed is not None
    assert by_netlink is not None
    weights = {keys[text.format(pod=pod, alien=alien)]: weight for text, weight in left.items()}
    assert (observed.real_servers, by_netlink.real_servers) == (weights, weights)
    mended = list(virtual_server_kind.virtual_server_operations(desired.key, desired, observed, lambda *_: None))
    assert [operation.verb for operation in mended] == [verb]
    assert clean(driver.apply(mended))
    assert driver.observe()[desired.key].real_servers == {keys[pod]: 1}
    assert ipvsadm("-Sn").splitlines()[-1].split()[-3:] == ["-m", "-w", "1"], "and no threshold is left"


@pytest.mark.kernel
@pytest.mark.parametrize(
    ("address", "pod", "end"), [("10.96.0.1", "10.244.0.1", "10.0.0.3"), ("fd00:96::1", "fd00:244::1", "fd01::3")]
)
def test_a_virtual_server_may_have_both_tunnelled_and_masqueraded_real_servers(
    driver: ipvs.IpvsDriver, address: str, pod: str, end: str
) -> None:
    bare = server(address)
    key, tunnel = RealServerKey.of(parse_address(pod), 8080), RealServerKey.of(parse_address(end), 80)
    desired = VirtualServer(bare.key, bare.settings, UnevenWeights({key: 1, tunnel: TUNNELLED + 3}))
    assert clean(driver.apply(list(virtual_server_kind.virtual_server_operations(desired.key, desired, None, lambda *_: None))))
    assert driver.observe()[desired.key].real_servers == desired.weights
    shown = {tuple(line.split()[5:8]) for line in ipvsadm("-Sn").splitlines()[1:]}
    assert shown == {("-m", "-w", "1"), ("-i", "-w", "3")}
    gone = msgspec.structs.replace(desired, weights=UnevenWeights({key: 1}))
    draining = list(
        virtual_server_kind.virtual_server_operations(desired.key, gone, driver.observe()[desired.key], lambda *_: None)
    )
    assert clean(driver.apply(draining))
    assert driver.observe()[desired.key].real_servers == {key: 1, tunnel: TUNNELLED}, "a draining tunnel stays one"


@pytest.mark.kernel
@pytest.mark.parametrize(("address", "pod"), [("10.96.0.1", "10.244.0.{}"), ("fd00:96::1", "fd00:244::{}")])
def test_a_new_virtual_server_has_all_settings_and_real_servers_if_its_scheduler_is_set_last(
    driver: ipvs.IpvsDriver, address: str, pod: str
) -> None:
    one = server(address, scheduler="mh", flags=SCHEDULER_PORT | PERSISTENT, timeout_s=60)
    pods = [real(one, pod.format(number)) for number in range(1, 4)]
    assert clean(apply(driver, Verb.ADD, one, server(address, 81, scheduler="mh"), *pods))
    observed = driver.observe()[one.key]
    assert (observed.settings, observed.real_servers) == (one.settings, {item.key: 1 for item in pods})
    assert result(driver, Verb.ADD, one) == ("", True)
    assert driver.observe()[one.key].settings == one.settings


@pytest.mark.kernel
def test_adding_a_virtual_server_fails_if_its_scheduler_is_set_last_and_the_kernel_lacks_it(
    driver: ipvs.IpvsDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ipvs_operations, "PREPARED_SCHEDULERS", frozenset({"dice"}))
    one = server("10.96.0.1", scheduler="dice")
    first, second = apply(driver, Verb.ADD, one, real(one, "10.1.0.1"))
    assert (first.errno, second.error) == (errno.ENOENT, "")
    reason = "the kernel has no scheduler 'dice': the module ip_vs_dice is missing or cannot be loaded"
    assert first.error == f"add virtual_server TCP 10.96.0.1:80: {reason}"


@pytest.mark.kernel
def test_a_failed_operation_does_not_prevent_other_operations_of_its_chunk(driver: ipvs.IpvsDriver) -> None:
    one = server("10.96.0.1")
    misfits = real(one, "10.1.0.2", weight=1 << 31), real(one, "10.1.0.3", weight=-1), real(one, "fd00::1")
    outcomes = apply(driver, Verb.ADD, one, real(one, "10.1.0.1"), *misfits, real(one, "10.1.0.4"))
    assert [outcome.errno for outcome in outcomes] == [0, 0, errno.ERANGE, errno.EINVAL, errno.EINVAL, 0]
    assert {str(key.address) for key in driver.observe()[one.key].real_servers} == {"10.1.0.1", "10.1.0.4"}


@pytest.mark.kernel
def test_if_real_servers_fill_several_chunks_only_the_invalid_real_server_is_refused(
    driver: ipvs.IpvsDriver,
) -> None:
    one, other = server("10.96.0.1"), server("10.96.0.2")
    keys = [RealServerKey.of(parse_address(f"10.{number >> 8}.{number & 255}.7"), 80) for number in range(256, 256 + 2500)]
    unfit = RealServerKey.of(parse_address("224.0.0.7"), 80)
    some = RealServers(other.key, EvenWeights.of([keys[0], unfit]))
    desired = [*operations(Verb.ADD, one, RealServers(one.key, EvenWeights.of(keys)), other, some)]
    *outcomes, refused = driver.apply(desired)
    assert clean(outcomes)
    assert [outcome.operation for outcome in outcomes] == [*desired[:3], Operation(Verb.ADD, RealServers.of(other.key, keys[0]))]
    assert (refused.errno, refused.operation.item) == (errno.EINVAL, RealServers.of(other.key, unfit))
    observed = driver.observe()
    assert observed[one.key].real_servers == dict.fromkeys(keys, 1)
    assert observed[other.key].real_servers == {keys[0]: 1}


@pytest.mark.kernel
def test_virtual_servers_in_another_network_namespace_do_not_hide_our_virtual_servers(
    new_network_namespace: Callable[[], None],
) -> None:
    """On Linux 6.1, the kernel's list omits half of our virtual servers if another namespace also has virtual servers."""
    servers = [server(f"10.96.{number // 250}.{number % 250 + 1}") for number in range(600)]
    desired = [operation for one in servers for operation in operations(Verb.ADD, one, real(one, "10.1.0.1"))]
    with contextlib.ExitStack() as drivers:
        for _ in range(2):
            new_network_namespace()
            driver = drivers.enter_context(contextlib.closing(ipvs.IpvsDriver()))
            assert driver.observe() == {}
            assert clean(driver.apply(desired))
            assert None not in changes(driver).values()
        first = driver.observe()
        assert {key: dict(observed.real_servers) for key, observed in first.items()} == {
            one.key: {real(one, "10.1.0.1").key: 1} for one in servers
        }
        for key, again in changes(driver).items():
            assert again is not None
            assert again.real_servers == first[key].real_servers
        assert clean(apply(driver, Verb.REMOVE, servers[0]))
        after = changes(driver)
        assert servers[0].key not in after
        assert None not in after.values()
        counted = driver.connections(first.keys())
        assert {len(counts) for key, counts in counted.items() if key != servers[0].key} == {1}


def counters(driver: ipvs.IpvsDriver, *always: VirtualServerKey) -> dict[VirtualServerKey, Counters]:
    return {key: counted for part in driver.traffic.services(always) for key, counted in part.items()}


@pytest.mark.kernel
@pytest.mark.parametrize("loopback", ["127.0.0.1", "::1"])
def test_traffic_is_counted_for_each_virtual_server_and_each_real_server(driver: ipvs.IpvsDriver, loopback: str) -> None:
    virtual, idle = server(loopback), server("10.96.0.2", protocol=Protocol.UDP)
    with socket.create_server((loopback, 0), family=socket.AF_INET6 if ":" in loopback else socket.AF_INET) as listening:
        backend = real(virtual, loopback, listening.getsockname()[1])
        assert clean(apply(driver, Verb.ADD, virtual, idle, backend, real(virtual, loopback, 9, 0)))
        with socket.create_connection((loopback, 80), timeout=60) as client, listening.accept()[0] as accepted:
            client.sendall(b"x" * 1000)
            accepted.recv(1000, socket.MSG_WAITALL)
            counted = counters(driver, virtual.key, idle.key)
            deadline_s = time.monotonic() + patience.seconds(60)
            while counted[virtual.key].bytes_in < 1000 and time.monotonic() < deadline_s:
                time.sleep(0.1)  # the kernel sums up the counters of all processors every two seconds
                counted = counters(driver, virtual.key, idle.key)
            of_endpoints = driver.traffic.endpoints([virtual.key, idle.key, server("10.96.0.3").key])
            assert driver.traffic.open_connections(is_wanted=True) is None
            driver.observe()
            assert driver.traffic.open_connections(is_wanted=False) == ConnectionCounts(1, 0)
    assert counted[idle.key] == Counters()
    assert counters(driver).keys() == {virtual.key}, "what has counted nothing is told only where it is asked for"
    assert counted[virtual.key].connections == 1
    assert counted[virtual.key].packets_in >= 3
    assert counted[virtual.key].bytes_in > 1000 > counted[virtual.key].bytes_out > 0
    assert of_endpoints[virtual.key][backend.key].connections == ConnectionCounts(1, 0)
    assert of_endpoints[virtual.key][backend.key].counters.bytes_in > 1000
    assert of_endpoints[virtual.key][real(virtual, loopback, 9).key].counters == Counters()
    assert of_endpoints[idle.key] == of_endpoints[server("10.96.0.3").key] == {}


@pytest.mark.kernel
@pytest.mark.parametrize("scheduler", sorted(PATIENT_SCHEDULERS | {"sh", "mh"}))
def test_real_servers_of_weight_0_are_chosen_by_sh_and_mh_but_not_by_schedulers_that_permit_delayed_removals(
    driver: ipvs.IpvsDriver, scheduler: str
) -> None:
    virtual = server("127.0.0.1", scheduler=scheduler)
    serving, emptied = real(virtual, "127.0.0.2"), real(virtual, "127.0.0.3")
    assert clean(apply(driver, Verb.ADD, virtual, serving, emptied))
    assert clean(apply(driver, Verb.SET, emptied._replace(weight=0)))
    refused = 0
    with socket.create_server(("127.0.0.2", 8080), backlog=50), socket.create_server(("127.0.0.3", 8080), backlog=50):
        for number in range(1, 25):
            try:
                socket.create_connection(("127.0.0.1", 80), timeout=60, source_address=(f"127.0.1.{number}", 0)).close()
            except ConnectionRefusedError:
                refused += 1
    assert refused == 0 if scheduler in PATIENT_SCHEDULERS else 0 < refused < 24


@pytest.mark.kernel
def test_an_audit_looks_up_the_new_netlink_family_number_after_the_ipvs_module_was_loaded_again(driver: ipvs.IpvsDriver) -> None:
    """A reloaded kernel module gets another family number, so the kernel no longer knows the number that the driver has."""
    driver._table.encoder = ipvs_message.Encoder(999)
    one = server("10.96.0.1")
    assert not clean(apply(driver, Verb.ADD, one))
    assert driver.observe() == {}
    assert clean(apply(driver, Verb.ADD, one, real(one, "10.1.0.1")))


def test_nothing_is_observed_and_every_operation_is_refused_if_the_kernel_has_no_ipvs() -> None:
    absent = ipvs.AbsentIpvs()
    assert absent.observe(Family) == {}
    assert list(absent.observe_in_parts(Family)) == list(absent.observe_changed(Family, whole=True)) == []
    assert absent.foreign == 0
    (outcome,) = absent.apply([Operation(Verb.SET, Timeouts(900, 120, 300))])
    assert (outcome.errno, outcome.error) == (errno.ENOENT, "set timeouts timeouts 900 120 300: this kernel has no IPVS")
    absent.close()
