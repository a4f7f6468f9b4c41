"""The route driver on a real kernel, checked with the program ip in a separate network namespace.

Errors of the netlink socket are tested with a fake socket.

Behaviour that the real kernel and the fake kernel share is tested in test_contract.py.
"""

import contextlib
import errno
import functools
import json
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ipvsproxy.kernel.base.errors import KernelError
from ipvsproxy.kernel.network import routes
from ipvsproxy.model.kernel import LocalRoutes
from ipvsproxy.model.net import Address, Family, parse_address
from ipvsproxy.model.plan import Verb
from tests.kernel.drivers import apply, clean, run
from tests.support import fake_netlink

V4, OTHER_V4, V6 = (parse_address(text) for text in ("10.96.0.1", "10.96.0.2", "fd00:96::1"))
OURS = ("dev", "lo", "table", "local", "protocol", "251", "metric", "1024")
PATIENCE_S = 60
FOREIGN = (
    ("local", "10.97.0.1", "dev", "lo", "table", "local", "protocol", "250", "metric", "1024"),
    ("local", "10.97.0.1", "dev", "lo", "table", "local", "protocol", "251", "metric", "77"),
    ("local", "10.97.0.2", "dev", "lo", "table", "100", "protocol", "251", "metric", "1024"),
    ("local", "10.97.0.3", "dev", "other0", "table", "local", "protocol", "251", "metric", "1024"),
    ("local", "10.97.4.0/24", "dev", "lo", "table", "local", "protocol", "251", "metric", "1024"),
    ("blackhole", "10.97.0.5", "table", "local", "protocol", "251", "metric", "1024"),
    ("local", "fd00:97::1", "dev", "lo", "table", "local", "protocol", "250", "metric", "1024"),
    ("local", "fd00:97::1", "dev", "lo", "table", "local", "protocol", "251", "metric", "77"),
    ("local", "fd00:97::3", "dev", "other0", "table", "local", "protocol", "251", "metric", "1024"),
)
"""Routes that each differ from our routes in one property."""


run_ip = functools.partial(run, "ip")


def local_routes(family: Family) -> list[dict[str, Any]]:
    option = "-4" if family is Family.IPV4 else "-6"
    parsed: list[dict[str, Any]] = json.loads(run_ip("-json", "-details", option, "route", "show", "table", "local") or "[]")
    return [route for route in parsed if route["protocol"] == "251"]


def bind(address: str) -> None:
    """Add an address to the device other0, and wait until the kernel has added the route of this address."""
    run_ip("address", "add", address, "dev", "other0", *(("nodad",) if ":" in address else ()))
    deadline_s = time.monotonic() + PATIENCE_S
    while "dev other0" not in kernel_route(address):
        assert time.monotonic() < deadline_s, f"no route of {address}"


def kernel_route(address: str) -> str:
    lines = run_ip("-6" if ":" in address else "-4", "route", "show", "table", "local").splitlines()
    return "\n".join(line for line in lines if address.partition("/")[0] in line.split() and "251" not in line.split())


@pytest.fixture
def driver(network_namespace: None) -> Iterator[routes.RouteDriver]:
    run_ip("link", "add", "other0", "type", "bridge")
    run_ip("link", "set", "other0", "up")
    with contextlib.closing(routes.RouteDriver()) as made:
        yield made


def test_the_ip_command_shows_our_route_with_its_properties_but_no_preferred_source_address(
    driver: routes.RouteDriver,
) -> None:
    assert clean(apply(driver, Verb.ADD, LocalRoutes.of(V4, V6)))
    (v4,), (v6,) = local_routes(Family.IPV4), local_routes(Family.IPV6)
    same = {"type": "local", "dev": "lo", "protocol": "251", "metric": 1024, "prefsrc": None, "dst": "fd00:96::1"}
    assert {key: v4.get(key) for key in (*same, "scope")} == {**same, "dst": "10.96.0.1", "scope": "host"}
    assert {key: v6.get(key) for key in same} == same
    assert driver.observe() == {V4, V6}
    assert clean(apply(driver, Verb.REMOVE, LocalRoutes.of(V4, V6)))
    assert local_routes(Family.IPV4) == local_routes(Family.IPV6) == []


def test_routes_of_other_programs_are_neither_observed_nor_changed(driver: routes.RouteDriver) -> None:
    for route in FOREIGN:
        run_ip("route", "add", *route)
    bind("10.97.0.9/32")
    bind("fd00:97::9/128")
    before = all_routes()
    assert driver.observe() == set()
    strangers = [parse_address(text) for text in ("10.97.0.2", "10.97.0.3", "10.97.0.5", "10.97.4.0", "10.97.0.9", "fd00:97::9")]
    for outcome in apply(driver, Verb.REMOVE, *map(LocalRoutes.of, strangers)):
        assert (outcome.error, outcome.surprise) == ("", True)
    assert all_routes() == before


def all_routes() -> list[str]:
    """Every route of the namespace, except routes of link-local addresses.

    The kernel may add routes of link-local addresses at any time.
    """
    lines = (line for option in ("-4", "-6") for line in run_ip(option, "route", "show", "table", "all").splitlines())
    return [line for line in lines if "fe80:" not in line]


def test_an_address_and_its_local_route_can_coexist_and_each_stays_when_the_other_is_removed(driver: routes.RouteDriver) -> None:
    bind("10.96.0.1/32")
    bind("fd00:96::1/128")
    before = [kernel_route(address) for address in ("10.96.0.1", "fd00:96::1")]
    assert clean(apply(driver, Verb.ADD, LocalRoutes.of(V4, V6, OTHER_V4)))
    bind("10.96.0.2/32")
    assert driver.observe() == {V4, V6, OTHER_V4}
    assert clean(apply(driver, Verb.REMOVE, LocalRoutes.of(V4, V6)))
    assert [outcome.surprise for outcome in apply(driver, Verb.REMOVE, LocalRoutes.of(V4, V6))] == [True, True]
    assert [kernel_route(address) for address in ("10.96.0.1", "fd00:96::1")] == before
    run_ip("link", "del", "other0")
    assert driver.observe() == {OTHER_V4}, "it is not on the device that went"


@pytest.mark.parametrize("address", ["10.96.0.1", "fd00:96::1"])
def test_the_error_says_what_to_remove_if_a_route_of_another_program_prevents_our_route(
    driver: routes.RouteDriver, address: str
) -> None:
    run_ip("route", "add", "local", address, "dev", "lo", "table", "local", "protocol", "250", "metric", "1024")
    run_ip("route", "add", "local", "10.96.0.2", *OURS)
    failed, known = apply(driver, Verb.ADD, LocalRoutes.of(parse_address(address)), LocalRoutes.of(OTHER_V4))
    assert failed.error == (
        f"add route {address}: another program has a local route to it with the metric 1024; "
        f"ip route show table local {address} shows it: remove it"
    )
    assert (failed.errno, known.surprise, known.error) == (errno.EEXIST, True, "")
    assert driver.observe() == {OTHER_V4}


def test_drivers_with_different_protocol_numbers_observe_and_change_only_their_own_routes(driver: routes.RouteDriver) -> None:
    apply(driver, Verb.ADD, LocalRoutes.of(V4))
    with contextlib.closing(routes.RouteDriver(route_protocol=77)) as other:
        assert other.observe() == set()
        assert clean(apply(other, Verb.ADD, LocalRoutes.of(V6)))
        assert (other.observe(), driver.observe()) == ({V6}, {V4})


def test_the_error_says_how_to_set_lo_up_when_our_route_is_refused_because_lo_is_down(network_namespace: None) -> None:
    run_ip("link", "set", "lo", "down")
    with contextlib.closing(routes.RouteDriver()) as driver:
        v4, v6 = apply(driver, Verb.ADD, LocalRoutes.of(V4, V6))
        assert v4.error == "", "the kernel does not mind for IPv4"
        assert v6.error == "add route fd00:96::1: the interface lo is down: set it up with ip link set lo up"
        assert v6.errno == errno.ENETDOWN


def test_the_error_says_how_to_enable_ipv6_if_a_route_is_refused_because_lo_has_no_ipv6(driver: routes.RouteDriver) -> None:
    Path("/proc/sys/net/ipv6/conf/lo/disable_ipv6").write_text("1")
    v4, v6 = apply(driver, Verb.ADD, LocalRoutes.of(V4), LocalRoutes.of(V6))
    assert v4.error == ""
    assert v6.error == "add route fd00:96::1: IPv6 is disabled on lo: set net.ipv6.conf.lo.disable_ipv6 to 0"


def test_routes_that_the_kernel_removes_without_a_notification_are_missing_from_the_next_read(driver: routes.RouteDriver) -> None:
    apply(driver, Verb.ADD, LocalRoutes.of(V4, V6))
    assert driver.observe_changed() == {V4, V6}
    assert driver.observe_changed() is None
    run_ip("address", "del", "127.0.0.1/8", "dev", "lo")
    assert driver.observe_changed() == {V6}
    assert clean(apply(driver, Verb.ADD, LocalRoutes.of(V4)))
    assert driver.observe_changed() == {V4, V6}, "an addition needs no address on lo"
    run_ip("link", "set", "lo", "down")
    assert driver.observe_changed() == {V4}
    assert driver.observe_changed() is None


def test_only_the_first_poll_after_a_complete_read_or_a_write_returns_the_routes(driver: routes.RouteDriver) -> None:
    apply(driver, Verb.ADD, LocalRoutes.of(V4))
    for _ in range(2):
        assert driver.observe() == {V4}
        assert driver.observe_changed() == {V4}
        assert driver.observe_changed() is None
    apply(driver, Verb.ADD, LocalRoutes.of(V6))
    assert driver.observe_changed() == {V4, V6}


def test_thousands_of_routes_are_added_and_removed(driver: routes.RouteDriver) -> None:
    some = [Address((0x0A600000 + number).to_bytes(4, "big")) for number in range(1700)]
    some += [Address(b"\xfd" + number.to_bytes(15, "big")) for number in range(1700)]
    assert clean(apply(driver, Verb.ADD, LocalRoutes(tuple(some))))
    assert driver.observe() == set(some)
    outcomes = apply(driver, Verb.ADD, LocalRoutes(tuple(some[:1000])))
    assert len(outcomes) == 1000
    assert all(outcome.surprise and not outcome.error for outcome in outcomes)
    assert clean(apply(driver, Verb.REMOVE, LocalRoutes(tuple(some[:300] + some[2000:]))))
    assert driver.observe() == set(some[300:2000])


def test_adding_or_removing_a_route_fails_if_the_answer_is_lost() -> None:
    driver = routes.RouteDriver(lambda _protocol: fake_netlink.FakeSocket(lambda _: [fake_netlink.OVERRUN]))
    for verb in (Verb.ADD, Verb.REMOVE):
        outcomes = apply(driver, verb, LocalRoutes.of(V4, V6))
        assert all("answer was lost" in outcome.error for outcome in outcomes)


def test_adding_an_existing_route_fails_if_routes_cannot_be_listed() -> None:
    def answer(data: bytes) -> list[fake_netlink.Answer]:
        (_, kind, _, sequence, _), *_ = fake_netlink.split(data)
        return [fake_netlink.error(sequence, errno.EIO if kind == 26 else errno.EEXIST)]

    driver = routes.RouteDriver(lambda _protocol: fake_netlink.FakeSocket(answer))
    (outcome,) = apply(driver, Verb.ADD, LocalRoutes.of(V4))
    assert (outcome.errno, outcome.surprise) == (errno.EEXIST, False)


def header(family: int = socket.AF_INET, *, protocol: int = 251) -> bytes:
    return struct.pack("=BBBBBBBBI", family, 32, 0, 0, 255, protocol, 254, 2, 0)


def place(address: Address, index: int = 1, metric: int = 1024) -> bytes:
    attributes = ((1, address), (4, struct.pack("=I", index)), (6, struct.pack("=I", metric)))
    return b"".join(fake_netlink.attribute(kind, payload) for kind, payload in attributes)


@pytest.mark.parametrize("number", [errno.ENOENT, errno.EAFNOSUPPORT])
def test_the_driver_observes_only_our_ipv4_routes_if_ipv6_has_no_routing_table(
    number: int,
) -> None:
    found = [
        header() + place(V4),
        header() + place(OTHER_V4, index=2),
        header() + place(OTHER_V4, metric=1),
        header(protocol=2) + place(OTHER_V4),
        header() + fake_netlink.attribute(1, OTHER_V4),
    ]

    def answer(data: bytes) -> list[fake_netlink.Answer]:
        ((_, _, _, sequence, payload),) = fake_netlink.split(data)
        if payload[0] == Family.IPV6:
            return [fake_netlink.error(sequence, number)]
        return [*(fake_netlink.message(sequence, one) for one in found), fake_netlink.done(sequence)]

    driver = routes.RouteDriver(lambda _protocol: fake_netlink.FakeSocket(answer))
    assert driver.observe() == {V4}


def test_an_error_is_raised_if_the_routes_cannot_be_listed() -> None:
    driver = routes.RouteDriver(fake_netlink.refusing(errno.EPERM))
    for observe in (driver.observe, driver.observe_changed):
        with pytest.raises(KernelError, match="list the IPv4 routes"):
            observe()
