"""Covers the changes that each read of the IPVS table by ``getsockopt`` returns, on a fake kernel and on a real kernel."""

import contextlib
import errno
import socket
import struct
from collections.abc import Callable, Iterator, Mapping

import pytest

from ipvsproxy.kernel.base.errors import KernelError
from ipvsproxy.kernel.ipvs import ipvs_driver as ipvs
from ipvsproxy.kernel.ipvs import readings as ipvs_readings
from ipvsproxy.kernel.ipvs import rows as ipvs_rows
from ipvsproxy.model.net import Family, Protocol, parse_address
from ipvsproxy.model.plan import Verb
from ipvsproxy.model.real_servers import NOT_MASQUERADED, TUNNELLED, EvenWeights, RealServerKey, Thresholds
from ipvsproxy.model.virtual_servers import (
    PERSISTENT,
    SCHEDULER_PORT,
    ConnectionCounts,
    FirewallMark,
    ObservedVirtualServer,
    RealServers,
    VirtualServerKey,
    VirtualServerSettings,
)
from tests.kernel.drivers import apply, clean
from tests.kernel.ipvs.examples import changes, ipvsadm, real, refuse, server

WEB = VirtualServerKey(Protocol.TCP, parse_address("10.96.0.1"), 80)
DNS = VirtualServerKey(Protocol.UDP, parse_address("10.96.0.10"), 53)
MARK = FirewallMark.of(Family.IPV4, 0x4000)
RR = VirtualServerSettings("rr", 0, 0)
INFO, SERVICES, DESTINATIONS = 1153, 1154, 1156


def pod(number: int) -> RealServerKey:
    return RealServerKey.of(parse_address(f"10.244.0.{number}"), 8080)


class Table:
    """A fake IPVS table that counts the requests of each kind.

    ``failing`` has the error number of each kind of request that fails.
    """

    def __init__(self) -> None:
        self.content: dict[VirtualServerKey, tuple[VirtualServerSettings, dict[RealServerKey, tuple[int, int]]]] = {}
        self.limits: dict[VirtualServerKey, dict[RealServerKey, Thresholds]] = {}
        self.asked: list[int] = []
        self.failing: dict[int, int] = {}
        self.hidden = 0
        """The number of virtual servers that are added after the kernel has counted all virtual servers, but before it lists
        them."""
        self.foreign_protocol = 0
        self.on_destinations: Callable[[], None] = lambda: None
        self.clock_s = 0.0
        self.reader = ipvs_readings.SockoptReader(self._read_one, self._ask, self._clock)

    def _clock(self) -> float:
        self.clock_s += 1  # each query of the clock ends a part of a read, because the clock advances by more than ``PART_S``
        return self.clock_s

    def _read_one(self, key: VirtualServerKey) -> ObservedVirtualServer | None:
        if key not in self.content:
            return None
        settings, servers = self.content[key]
        return ObservedVirtualServer(settings, {name: weight for name, (_, weight) in servers.items()})

    def _ask(self, _asking: socket.socket, level: int, option: int, question: bytearray, action: str) -> int:
        assert level == socket.IPPROTO_IP
        self.asked.append(option)
        if option in self.failing:
            raise KernelError(action=action, errno=self.failing[option])
        match option:
            case ipvs_readings._GET_INFO:
                answer = struct.pack("=III", 0x10201, 4096, len(self.content) - self.hidden)
            case ipvs_readings._GET_SERVICES:
                (room,) = struct.unpack_from("=I", question)
                assert len(question) == 8 + 104 * room
                answer = bytes(question[:8]) + b"".join(map(self._entry, [*self.content][:room]))
            case _:
                answer = self._destinations(question)
        question[:] = answer.ljust(len(question), b"\0")
        return len(question)

    def _entry(self, key: VirtualServerKey) -> bytes:
        settings, servers = self.content[key]
        scheduler = settings.scheduler.encode().ljust(16, b"\0")
        netmask = (0xFFFFFFFF << (32 - (settings.prefix_length or 32)) & 0xFFFFFFFF).to_bytes(4, "big")
        numbers = struct.pack("=II4sI", settings.flags | 0x2, settings.timeout_s, netmask, len(servers))
        self.clock_s += 1
        counters = int(self.clock_s).to_bytes(56, "little")  # the counters differ at each read
        return self._name(key) + scheduler + numbers + counters

    def _name(self, key: VirtualServerKey) -> bytes:
        number = self.foreign_protocol if key == DNS and self.foreign_protocol else int(key.protocol)
        port, mark = (0, key.mark) if isinstance(key, FirewallMark) else (key.port, 0)
        return struct.pack("=H2x4s2s2xI", number, key.address, port.to_bytes(2, "big"), mark)

    def _destinations(self, question: bytearray) -> bytes:
        self.on_destinations()
        name, (room,) = question[:16], struct.unpack_from("=I", question, 16)
        assert len(question) == 24 + 96 * room
        for key, (_, servers) in self.content.items():
            if self._name(key) == name:
                limits = self.limits.get(key, {})
                entries = [
                    struct.pack("=6s2xIiII", name, *numbers, *limits.get(name, (0, 0)))
                    for name, numbers in reversed(servers.items())
                ]
                return bytes(question[:24]) + b"".join(entry.ljust(96, b"\7") for entry in entries[:room])
        raise KernelError(action="ask", errno=errno.ESRCH)

    def put(self, key: VirtualServerKey, *servers: RealServerKey, settings: VirtualServerSettings = RR) -> None:
        self.content[key] = settings, dict.fromkeys(servers, (0, 1))

    def read(self, *, whole: bool = True) -> ipvs_readings.Reading:
        return {key: observed for part in self.reader.read(whole=whole) for key, observed in part.items()}

    def added_up(self) -> ConnectionCounts | None:
        return self.reader.connections_of_all


@pytest.fixture
def table() -> Iterator[Table]:
    made = Table()
    with contextlib.closing(made.reader):
        yield made


def test_the_first_read_returns_everything_and_later_reads_return_only_changes(table: Table) -> None:
    settings = VirtualServerSettings("mh", PERSISTENT | SCHEDULER_PORT, 10800)
    table.put(WEB, pod(1), pod(2))
    table.put(DNS, settings=settings)
    table.put(MARK, pod(3))
    assert table.read() == {
        WEB: ObservedVirtualServer(RR, EvenWeights.of([pod(1), pod(2)])),
        DNS: ObservedVirtualServer(settings, {}),
        MARK: ObservedVirtualServer(RR, EvenWeights.of([pod(3)])),
    }
    assert table.read() == {}
    table.content[WEB][1][pod(2)] = (0, 5)
    assert table.read() == {WEB: ObservedVirtualServer(RR, {pod(1): 1, pod(2): 5})}
    del table.content[MARK]
    assert table.read() == {MARK: None}
    assert table.read() == {}
    table.reader.forget()
    assert table.read().keys() == {WEB, DNS}


def test_real_servers_are_returned_in_the_order_in_which_they_were_added(table: Table) -> None:
    table.put(WEB, pod(3), pod(1), pod(2))
    observed = table.read()[WEB]
    assert observed is not None
    assert list(observed.real_servers) == [pod(3), pod(1), pod(2)]


def test_the_observed_weight_of_a_real_server_shows_whether_the_real_server_is_masqueraded(table: Table) -> None:
    table.put(WEB)
    table.content[WEB][1].update({pod(1): (3, 1), pod(2): (0x100, 1), pod(3): (2, 5)})
    assert table.read() == {WEB: ObservedVirtualServer(RR, {pod(1): NOT_MASQUERADED, pod(2): 1, pod(3): TUNNELLED + 5})}


CHANGES: Mapping[str, tuple[Callable[[Table], object], bool]] = {
    "a weight": (lambda table: table.content[WEB][1].update({pod(1): (0, 0)}), False),
    "a threshold": (lambda table: table.limits.update({WEB: {pod(1): Thresholds(9, 7)}}), False),
    "an exchanged real server": (lambda table: table.put(WEB, pod(1), pod(9)), False),
    "a real server more": (lambda table: table.put(WEB, pod(1), pod(2), pod(3)), True),
    "another scheduler": (lambda table: table.put(WEB, pod(1), pod(2), settings=VirtualServerSettings("wrr")), True),
    "a flag": (lambda table: table.put(WEB, pod(1), pod(2), settings=VirtualServerSettings("rr", SCHEDULER_PORT)), True),
    "a virtual server less": (lambda table: table.content.pop(WEB), True),
}
"""The changes that another program makes, and whether the cheap read sees each change."""


@pytest.mark.parametrize(("change", "is_seen"), CHANGES.values(), ids=CHANGES)
def test_the_cheap_read_sees_all_changes_except_weights_thresholds_and_replaced_real_servers(
    table: Table, change: Callable[[Table], object], *, is_seen: bool
) -> None:
    table.put(WEB, pod(1), pod(2))
    table.put(DNS, pod(4))
    table.read()
    table.asked.clear()
    assert table.read(whole=False) == {}
    assert table.asked == [INFO, SERVICES], "no question for each virtual server"
    change(table)
    assert table.read(whole=False).keys() == ({WEB} if is_seen else set())
    assert table.read(whole=True).keys() == (set() if is_seen else {WEB})


def test_only_a_read_of_the_whole_table_returns_changes_that_our_own_writes_have_made(table: Table) -> None:
    table.put(WEB, pod(1))
    table.read()
    table.put(WEB, pod(1), pod(2))
    table.reader.note(WEB, is_there=True)
    assert table.read(whole=False) == {}
    assert table.read().keys() == {WEB}
    del table.content[WEB]
    table.reader.note(WEB, is_there=False)
    assert table.read() == {}


def test_a_read_returns_a_change_that_undoes_our_own_write(table: Table) -> None:
    table.reader.note(WEB, is_there=True)
    assert table.read(whole=False) == {WEB: None}


def test_a_virtual_server_that_is_written_during_a_read_is_returned_only_by_the_next_read(table: Table) -> None:
    """If the current read returned the virtual server, the result would combine its old settings with its new real servers."""
    table.put(WEB, pod(1))
    table.read()
    for number in range(2, 40):
        table.put(VirtualServerKey(Protocol.TCP, parse_address(f"10.96.1.{number}"), 80))
    late = VirtualServerKey(Protocol.TCP, parse_address("10.96.1.39"), 80)
    reading = table.reader.read(whole=True)
    assert len(next(reading)) == ipvs_readings.CHECKED_EVERY - 1
    table.put(late, pod(1))
    table.reader.note(late, is_there=True)
    del table.content[WEB]
    table.reader.note(WEB, is_there=False)
    assert all(late not in part and WEB not in part for part in reading)
    assert table.read() == {late: ObservedVirtualServer(RR, EvenWeights.of([pod(1)]))}


def test_a_virtual_server_that_is_removed_during_a_read_is_reported_as_removed_by_the_next_read(table: Table) -> None:
    table.put(WEB, pod(1))
    table.read()
    table.on_destinations = lambda: table.content.pop(WEB) and None
    assert table.read() == {}
    assert table.read() == {WEB: None}


def test_a_virtual_server_is_read_again_by_netlink_if_a_real_server_is_removed_during_a_read(
    table: Table,
) -> None:
    table.put(WEB, pod(1), pod(2))
    table.on_destinations = lambda: table.content[WEB][1].pop(pod(2), None) and None
    assert table.read() == {WEB: ObservedVirtualServer(RR, {pod(1): 1})}


def test_all_virtual_servers_are_read_even_if_their_number_has_grown_since_the_kernel_counted_them(table: Table) -> None:
    for number in range(1, 101):
        table.put(VirtualServerKey(Protocol.TCP, parse_address(f"10.96.1.{number}"), 80))
    table.hidden = 60
    assert len(table.read()) == 100
    assert table.asked.count(SERVICES) == 2


def test_a_virtual_server_is_counted_but_not_returned_if_no_service_can_have_its_protocol(table: Table) -> None:
    table.put(WEB)
    table.put(DNS, pod(1))
    table.foreign_protocol = 99
    assert table.read().keys() == {WEB}
    assert table.reader.foreign == 1


def test_the_virtual_servers_of_a_failed_read_are_returned_by_the_next_read(table: Table) -> None:
    table.put(WEB, pod(1))
    table.put(DNS, pod(2))
    table.on_destinations = lambda: table.failing.update({DESTINATIONS: errno.ENOMEM})
    with pytest.raises(KernelError):
        table.read()
    table.failing.clear()
    table.on_destinations = lambda: None
    assert table.read().keys() == {WEB, DNS}


@pytest.mark.parametrize("question", [INFO, SERVICES, DESTINATIONS])
def test_a_refused_request_is_an_error_and_the_next_read_succeeds(table: Table, question: int) -> None:
    table.put(WEB, pod(1))
    table.failing[question] = errno.ENOMEM
    with pytest.raises(KernelError, match="read the IPVS table"):
        table.read()
    assert table.reader.is_there()
    table.failing.clear()
    assert table.read().keys() == {WEB}


def test_an_answer_of_unexpected_length_is_an_error() -> None:
    reader = ipvs_readings.SockoptReader(lambda _: None, lambda *_: 0)
    with contextlib.closing(reader), pytest.raises(KernelError, match="incomplete"):
        list(reader.read(whole=True))


def test_a_kernel_without_the_getsockopt_interface_is_recognised(table: Table) -> None:
    assert table.reader.is_there()
    table.failing[INFO] = errno.ENOPROTOOPT
    assert not table.reader.is_there()


# Tests on a real kernel.


ONE = server("10.96.0.1", 80)
TWO = server("10.96.0.2", 80, scheduler="mh", flags=PERSISTENT | SCHEDULER_PORT, timeout_s=600)
V6 = server("fd00:96::1", 80)
DRIFT: dict[str, tuple[tuple[str, ...], bool]] = {
    "a weight": (("-e", "-t", "10.96.0.1:80", "-r", "10.244.0.1:80", "-m", "-w", "7"), False),
    "a forwarding method": (("-e", "-t", "10.96.0.1:80", "-r", "10.244.0.1:80", "-g", "-w", "1"), False),
    "a real server more": (("-a", "-t", "10.96.0.1:80", "-r", "10.244.0.9:8080", "-m"), True),
    "a real server less": (("-d", "-t", "10.96.0.1:80", "-r", "10.244.0.1:80"), True),
    "another scheduler": (("-E", "-t", "10.96.0.1:80", "-s", "wrr"), True),
    "another timeout": (("-E", "-t", "10.96.0.1:80", "-s", "rr", "-p", "60"), True),
    "a scheduler flag": (("-E", "-t", "10.96.0.1:80", "-s", "rr", "-b", "flag-2"), True),
    "a virtual server less": (("-D", "-t", "10.96.0.1:80"), True),
}
"""For each change that another program makes to ``ONE``: the arguments of ipvsadm, and whether the cheap read sees the change."""


@pytest.mark.kernel
@pytest.mark.parametrize("name", DRIFT)
def test_each_kind_of_drift_is_seen_by_the_cheap_read_or_by_the_read_of_the_whole_table(
    driver: ipvs.IpvsDriver, name: str
) -> None:
    servers = (real(ONE, "10.244.0.1", 80), real(ONE, "10.244.0.2"), real(TWO, "10.244.0.3"))
    assert clean(apply(driver, Verb.ADD, ONE, TWO, *servers))
    before = driver.observe()
    assert (changes(driver, whole=False), changes(driver)) == ({}, {})
    arguments, is_cheap = DRIFT[name]
    ipvsadm(*arguments)
    assert changes(driver, whole=False).keys() == ({ONE.key} if is_cheap else set())
    changes(driver)
    assert changes(driver) == {}
    assert driver.observe() != before
    with contextlib.closing(ipvs.IpvsDriver(ask=refuse)) as plain:
        assert driver.observe() == plain.observe(), "by netlink it is the same"


@pytest.mark.kernel
def test_the_cheap_read_sees_drift_of_ipv6_virtual_servers_but_not_of_their_real_servers(driver: ipvs.IpvsDriver) -> None:
    assert clean(apply(driver, Verb.ADD, ONE, V6, real(ONE, "10.244.0.1"), real(V6, "fd00:244::1")))
    driver.observe()
    ipvsadm("-E", "-t", "[fd00:96::1]:80", "-s", "wrr")
    assert changes(driver, whole=False).keys() == {V6.key}
    ipvsadm("-e", "-t", "[fd00:96::1]:80", "-r", "[fd00:244::1]:8080", "-m", "-w", "7")
    assert changes(driver, whole=False) == {}
    assert changes(driver).keys() == {V6.key}
    ipvsadm("-D", "-t", "[fd00:96::1]:80")
    assert changes(driver, whole=False) == {V6.key: None}
    assert driver.observe().keys() == {ONE.key}


@pytest.mark.kernel
def test_a_family_that_was_not_requested_is_not_read(driver: ipvs.IpvsDriver) -> None:
    assert clean(apply(driver, Verb.ADD, ONE, V6))
    assert driver.observe([Family.IPV4]).keys() == {ONE.key}
    assert driver.observe([Family.IPV6]).keys() == {V6.key}


@pytest.mark.parametrize("number", [0, 1, ipvs_readings.FIRST_ROOM - 1, ipvs_readings.FIRST_ROOM, 300])
def test_connections_are_read_for_any_number_of_real_servers(table: Table, number: int) -> None:
    pods = [RealServerKey.of(parse_address(f"10.1.{one >> 8}.{one & 255}"), 8080) for one in range(1, number + 1)]
    table.put(WEB, *pods)
    counted = ConnectionCounts(0x07070707, 0x07070707)  # the fake kernel fills the fields behind the thresholds with 7
    assert table.reader.connections(WEB) == dict.fromkeys(pods, counted)
    assert table.asked == [DESTINATIONS] * (1 if number < ipvs_readings.FIRST_ROOM else 3 if number > 256 else 2)


def test_a_removed_virtual_server_has_no_connections(table: Table) -> None:
    assert table.reader.connections(WEB) == {}


def test_a_failed_reading_of_connections_raises_an_error_instead_of_returning_zero_connections(table: Table) -> None:
    table.failing[DESTINATIONS] = errno.EINTR
    with pytest.raises(KernelError):
        table.reader.connections(WEB)


def test_a_read_of_the_whole_table_needs_no_additional_system_calls_to_sum_all_connections(table: Table) -> None:
    table.put(WEB, pod(1), pod(2))
    table.put(DNS, pod(3))
    table.read()
    asked = [*table.asked]
    assert table.added_up() is None
    table.reader.adds_connections = True
    table.asked.clear()
    assert table.read() == {}
    assert table.asked == asked
    assert table.added_up() == ConnectionCounts(3 * 0x07070707, 3 * 0x07070707)
    table.put(DNS)
    table.read(whole=False)
    assert table.added_up() == ConnectionCounts(3 * 0x07070707, 3 * 0x07070707), "until the next whole reading"
    table.reader.adds_connections = False
    table.read()
    assert table.added_up() is None


def test_a_virtual_server_that_is_written_during_a_read_counts_once_in_the_sum_of_connections(table: Table) -> None:
    table.reader.adds_connections = True
    for number in range(1, 40):
        table.put(VirtualServerKey(Protocol.TCP, parse_address(f"10.96.1.{number}"), 80), pod(1))
    reading = table.reader.read(whole=True)
    next(reading)
    table.reader.note(VirtualServerKey(Protocol.TCP, parse_address("10.96.1.39"), 80), is_there=True)
    assert list(reading)
    assert table.added_up() == ConnectionCounts(39 * 0x07070707, 39 * 0x07070707)


def test_the_sum_of_all_connections_is_unknown_if_the_table_can_no_longer_be_read(table: Table) -> None:
    table.reader.adds_connections = True
    table.put(WEB, pod(1))
    table.read()
    assert table.added_up()
    table.failing[SERVICES] = errno.ENOMEM
    for _ in range(2):
        with pytest.raises(KernelError):
            table.read()
    assert table.added_up() is None


@pytest.mark.kernel
@pytest.mark.parametrize(
    "number", [0, 1, ipvs_readings.FIRST_ROOM - 1, ipvs_readings.FIRST_ROOM, ipvs_readings.FIRST_ROOM + 1, 600]
)
def test_getsockopt_and_netlink_return_the_same_connections(driver: ipvs.IpvsDriver, number: int) -> None:
    one = server("10.96.0.1")
    keys = [RealServerKey.of(parse_address(f"10.1.{one >> 8}.{one & 255}"), 8080) for one in range(1, number + 1)]
    clean(apply(driver, Verb.ADD, one))
    if keys:
        clean(apply(driver, Verb.ADD, RealServers(one.key, EvenWeights.of(keys))))
        clean(apply(driver, Verb.SET, RealServers.of(one.key, keys[0], 0)))
    with contextlib.closing(ipvs_rows.NetlinkTable()) as table:
        by_netlink = ipvs_readings.NetlinkReader(frozenset(Family), table).connections(one.key)
    assert driver.connections([one.key]) == {one.key: by_netlink} == {one.key: dict.fromkeys(keys, ConnectionCounts(0, 0))}
