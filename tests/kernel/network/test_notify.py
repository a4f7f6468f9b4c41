"""Covers notifications from the kernel: real events, lost events, and rare messages built by hand."""

import contextlib
import functools
import select
import socket
import struct
from collections.abc import Iterator

import pytest

from ipvsproxy.kernel.base.errors import KernelError
from ipvsproxy.kernel.network import notify, routes
from ipvsproxy.model.kernel import LocalRoutes
from ipvsproxy.model.net import parse_address
from ipvsproxy.model.plan import Operation, Verb
from tests.kernel.drivers import run
from tests.support import fake_netlink

ip = functools.partial(run, "ip")
OURS, OTHER = notify.Change.OURS, notify.Change.OTHER_ADDRESSES


@pytest.fixture
def device(network_namespace: None) -> str:
    """The device that the listener watches. The device is a bridge, because some test hosts have no dummy devices."""
    ip("link", "add", "kube-test0", "type", "bridge")
    return "kube-test0"


@pytest.fixture
def listener(device: str) -> Iterator[notify.ChangeListener]:
    """A listener that has already read all earlier events."""
    with contextlib.closing(notify.ChangeListener(device=device)) as listener:
        assert listener.read() == ()
        yield listener


def test_events_distinguish_addresses_of_the_watched_device_from_addresses_of_other_interfaces(
    listener: notify.ChangeListener,
) -> None:
    ip("address", "add", "192.0.2.1/24", "dev", "lo")
    assert listener.read() == (OTHER,)
    ip("address", "del", "192.0.2.1/24", "dev", "lo")
    assert listener.read() == (OTHER, OURS)  # the event may mean that lo has lost its last address
    ip("address", "add", "2001:db8::1/64", "dev", "kube-test0", "nodad")
    assert select.select([listener], [], [], 60)[0]  # the kernel reports a new IPv6 address later, from a work queue
    assert listener.read() == (OURS,)
    assert listener.read() == ()


def test_deleting_an_interface_is_an_event_only_if_it_is_the_watched_device(listener: notify.ChangeListener, device: str) -> None:
    ip("link", "add", "other0", "type", "bridge")
    ip("link", "del", "other0")
    assert listener.read() == ()
    ip("address", "add", "192.0.2.1/32", "dev", device)
    ip("link", "del", device)
    assert listener.read() == (OURS, OURS, OURS)  # for the added address, the removed address, and the deleted device


def test_after_the_watched_device_was_deleted_its_replacement_is_watched_and_lo_is_not(
    listener: notify.ChangeListener, device: str
) -> None:
    ip("link", "del", device)
    ip("address", "add", "192.0.2.1/32", "dev", "lo")
    assert listener.read() == (OURS, OTHER)
    assert listener._find_device() == 0
    ip("link", "add", device, "type", "bridge")
    ip("address", "add", "192.0.2.2/32", "dev", device)
    assert listener.read() == (OURS,)


def test_the_watched_device_counts_as_deleted_after_it_was_renamed(listener: notify.ChangeListener, device: str) -> None:
    ip("link", "set", device, "name", "other0")
    assert listener.read() == (OURS,)


def test_our_own_changes_of_addresses_are_not_reported_as_events(device: str) -> None:
    own_ports: set[int] = set()
    with (
        contextlib.closing(notify.ChangeListener(own_ports=own_ports, device=device)) as listener,
        socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as others,
        socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as ours,
    ):
        others.bind((0, 0))
        ours.bind((0, 0))
        own_ports.add(ours.getsockname()[0])
        assert listener.read() == ()
        ours.send(new_address_request(device, "192.0.2.1"))
        assert select.select([listener], [], [], 0)[0] == [], "nor do they wake the loop"
        others.send(new_address_request(device, "192.0.2.2"))
        assert listener.read() == (OURS,)
        ip("link", "del", device)
        assert listener.read()[-1] is OURS


def test_a_change_of_routes_by_another_program_is_an_event_only_if_the_routes_are_ours(
    listener: notify.ChangeListener,
) -> None:
    ip("link", "set", "lo", "up")
    listener.read()
    for action in ("add", "del"):
        for protocol in ("2", "3", "252"):
            ip("route", action, "local", "192.0.2.7", "dev", "lo", "table", "local", "protocol", protocol, "metric", protocol)
        assert select.select([listener], [], [], 0)[0] == [], "the kernel drops what a routing daemon may send by the million"
        for address in ("192.0.2.8", "2001:db8::8"):
            ip("route", action, "local", address, "dev", "lo", "table", "local", "protocol", "251", "metric", "1024")
            assert listener.read() == (OURS,)


def test_a_listener_reports_only_routes_with_its_own_protocol_number(device: str) -> None:
    ip("link", "set", "lo", "up")
    with contextlib.closing(notify.ChangeListener(device=device, route_protocol=77)) as listener:
        listener.read()
        ip("route", "add", "local", "192.0.2.7", "dev", "lo", "table", "local", "protocol", "251")
        ip("route", "add", "local", "192.0.2.8", "dev", "lo", "table", "local", "protocol", "77")
        assert listener.read() == (OURS,)


def test_our_own_changes_of_routes_are_not_reported_as_events(device: str) -> None:
    ip("link", "set", "lo", "up")
    ports: set[int] = set()

    def connect(protocol: int) -> socket.socket:
        opened = routes.open_socket(protocol)
        ports.add(opened.getsockname()[0])
        return opened

    driver = routes.RouteDriver(connect)
    with contextlib.closing(driver), contextlib.closing(notify.ChangeListener(device=device, own_ports=ports)) as listener:
        driver.observe()
        listener.read()
        (outcome,) = driver.apply([Operation(Verb.ADD, LocalRoutes.of(parse_address("192.0.2.7")))])
        assert outcome.error == ""
        assert select.select([listener], [], [], 0)[0] == []


def new_address_request(device: str, text: str) -> bytes:
    """RTM_NEWADDR with REQUEST, ACK, CREATE and EXCL for one IPv4 address."""
    body = struct.pack("=BBBBI", socket.AF_INET, 32, 0, 0, socket.if_nametoindex(device))
    body += struct.pack("=HH4s", 8, 2, parse_address(text))
    return struct.pack("=IHHII", 16 + len(body), 20, 0x605, 1, 0) + body


def test_the_listener_reports_changes_of_a_recreated_device_even_if_events_were_lost(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notify, "RECEIVE_BUFFER", 4096)
    with contextlib.closing(notify.ChangeListener(device=device)) as listener:
        listener.read()
        ip("link", "del", device)
        ip("link", "add", device, "type", "bridge")
        for number in range(40):
            ip("address", "add", f"192.0.2.{number}/32", "dev", device)
        assert listener.read()[0] == OURS
        assert listener.read() == ()
        listener._socket.setsockopt(socket.SOL_SOCKET, 33, 1 << 20)  # SO_RCVBUFFORCE
        ip("link", "del", device)
        assert set(listener.read()) == {OURS}


def test_after_lost_events_old_notifications_do_not_restore_the_index_of_the_former_device(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notify, "RECEIVE_BUFFER", 4096)
    with contextlib.closing(notify.ChangeListener(device=device)) as listener:
        listener.read()
        for number in range(40):
            ip("link", "set", device, "mtu", str(1400 + number))  # only the first events fit into the receive buffer
        ip("link", "del", device)
        ip("link", "add", device, "type", "bridge")
        assert listener.read()[-1] == OURS
        listener._socket.setsockopt(socket.SOL_SOCKET, 33, 1 << 20)  # SO_RCVBUFFORCE
        ip("link", "del", device)
        assert set(listener.read()) == {OURS}


def test_reading_from_a_closed_listener_is_an_error(listener: notify.ChangeListener) -> None:
    listener.close()
    with pytest.raises(KernelError, match="listen for changes"):
        listener.read()


def test_an_address_change_on_an_unknown_interface_is_reported_as_other_addresses(
    listener: notify.ChangeListener,
) -> None:
    body = struct.pack("=BBBBI", socket.AF_INET, 32, 0, 0, 999) + struct.pack("=HH4s", 8, 2, bytes(4))
    assert list(listener._decode(fake_netlink.message(0, body, kind=20))) == [OTHER]


@pytest.mark.parametrize(
    ("flags", "changed", "events"),
    [(0, 1, [OURS]), (1, 1, []), (0, 2, []), (2, 3, [OURS])],
    ids=["down", "up", "still down", "both"],
)
def test_a_change_of_lo_is_an_event_only_if_lo_went_down(
    listener: notify.ChangeListener, flags: int, changed: int, events: list[notify.Change]
) -> None:
    body = struct.pack("=BxHiII", socket.AF_UNSPEC, 1, 1, flags, changed)
    assert list(listener._decode(fake_netlink.message(0, body, kind=16))) == events


def test_a_message_that_cannot_be_parsed_counts_as_a_change_of_our_objects(listener: notify.ChangeListener) -> None:
    assert list(listener._decode(bytes(17))) == [OURS]


@pytest.mark.parametrize("kind", [16, 20, 24], ids=["link", "address", "route"])
def test_a_notification_with_an_incomplete_header_is_ignored(listener: notify.ChangeListener, kind: int) -> None:
    assert list(listener._decode(fake_netlink.message(0, bytes(4), kind=kind))) == []
