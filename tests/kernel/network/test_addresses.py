"""The address driver on a real kernel, checked with the program ip. Errors of the netlink socket are tested with a fake socket.

Behaviour that the real kernel and the fake kernel share is tested in test_contract.py.
"""

import contextlib
import errno
import json
import socket
import struct
from collections.abc import Iterator
from typing import Any

import pytest

from ipvsproxy.kernel.base import netlink
from ipvsproxy.kernel.base.errors import KernelError
from ipvsproxy.kernel.network import addresses
from ipvsproxy.model.kernel import DEVICE, BoundAddresses, Device, InterfaceAddress
from ipvsproxy.model.net import Address, parse_address
from ipvsproxy.model.plan import Verb
from tests.kernel.drivers import apply, clean, operations, result, run
from tests.support import fake_netlink


@pytest.fixture
def driver(network_namespace: None) -> Iterator[addresses.AddressDriver]:
    with contextlib.closing(addresses.AddressDriver()) as made:
        yield made


def ip(*arguments: str) -> list[dict[str, Any]]:
    parsed: list[dict[str, Any]] = json.loads(run("ip", "-details", "-json", *arguments) or "[]")
    return parsed


def bound(text: str) -> BoundAddresses:
    return BoundAddresses.of(parse_address(text))


@pytest.mark.kernel
def test_observe_returns_the_addresses_of_our_device_and_of_all_other_interfaces(
    driver: addresses.AddressDriver,
) -> None:
    ip("link", "add", DEVICE, "type", "dummy")
    ip("link", "add", "other", "type", "dummy")
    ip("address", "add", "10.96.0.1/32", "dev", DEVICE)
    ip("address", "add", "10.0.0.7/24", "dev", "other")
    ip("address", "add", "10.5.0.1", "peer", "10.5.0.2", "dev", "other")
    ip("address", "add", "fd00::7/64", "dev", "other")
    observed = driver.observe()
    assert (observed.device, observed.addresses) == (True, frozenset({parse_address("10.96.0.1")}))
    assert set(observed.interface_addresses) == {
        InterfaceAddress("lo", parse_address("127.0.0.1"), 8),
        InterfaceAddress("lo", parse_address("::1"), 128),
        InterfaceAddress("other", parse_address("10.0.0.7"), 24),
        InterfaceAddress("other", parse_address("10.5.0.1"), 32),
        InterfaceAddress("other", parse_address("fd00::7"), 64),
    }


@pytest.mark.kernel
def test_unchanged_addresses_are_not_returned_again(driver: addresses.AddressDriver) -> None:
    apply(driver, Verb.ADD, Device(DEVICE), bound("10.96.0.1"))
    assert driver.observe() == driver.observe_changed()
    assert driver.observe_changed() is None
    for verb in (Verb.REMOVE, Verb.ADD):
        apply(driver, verb, bound("10.96.0.1"))
    assert driver.observe_changed() is not None, "our own write, although the addresses are the same as before"
    ip("address", "add", "172.18.0.9/16", "dev", "lo")
    observed = driver.observe_changed()
    assert observed is not None
    assert InterfaceAddress("lo", parse_address("172.18.0.9"), 16) in observed.interface_addresses
    ip("address", "delete", "10.96.0.1/32", "dev", DEVICE)
    assert driver.observe().addresses == frozenset()  # this read does not consume the notification
    observed = driver.observe_changed()
    assert observed is not None
    assert observed.addresses == frozenset()
    assert driver.observe_changed() is None
    ip("link", "delete", DEVICE)
    observed = driver.observe_changed()
    assert observed is not None
    assert not observed.device


@pytest.mark.kernel
def test_many_addresses_are_removed_at_once_by_deleting_and_recreating_kube_ipvs0(driver: addresses.AddressDriver) -> None:
    many = [Address(b"\xfd" + number.to_bytes(15, "big")) for number in range(addresses.MANY_REMOVALS)]
    absent = parse_address("fd00:96::1")
    assert clean(apply(driver, Verb.ADD, Device(DEVICE), BoundAddresses(tuple(many))))
    (before,) = ip("link", "show", DEVICE)
    outcomes = apply(driver, Verb.REMOVE, BoundAddresses((*many, absent)))
    assert {outcome.operation.item.key for outcome in outcomes if outcome.surprise} == {absent}
    assert not any(outcome.error for outcome in outcomes)
    (after,) = ip("link", "show", DEVICE)
    assert after["ifindex"] != before["ifindex"]
    assert driver.observe().addresses == set()


@pytest.mark.kernel
def test_kube_ipvs0_is_not_deleted_if_one_of_its_addresses_must_stay(driver: addresses.AddressDriver) -> None:
    many = [Address((0x0A600000 + number).to_bytes(4, "big")) for number in range(addresses.MANY_REMOVALS + 1)]
    apply(driver, Verb.ADD, Device(DEVICE), BoundAddresses(tuple(many)))
    (before,) = ip("link", "show", DEVICE)
    assert clean(apply(driver, Verb.REMOVE, BoundAddresses(tuple(many[1:]))))
    (after,) = ip("link", "show", DEVICE)
    assert (after["ifindex"], driver.observe().addresses) == (before["ifindex"], {many[0]})


def link(name: bytes) -> bytes:
    """A message about an interface with the index 7."""
    return bytes(4) + (7).to_bytes(4, "little") + bytes(8) + fake_netlink.attribute(3, name)


OUR_LINK = link(DEVICE.encode() + b"\0") + fake_netlink.attribute(18, fake_netlink.attribute(1, b"dummy\0"))


@pytest.mark.parametrize("refused", [17, 16], ids=["removal", "addition"])
def test_the_removal_of_many_addresses_fails_if_kube_ipvs0_cannot_be_recreated(refused: int) -> None:
    many = [Address((0x0A600000 + number).to_bytes(4, "big")) for number in range(addresses.MANY_REMOVALS)]
    is_there = True

    def answer(data: bytes) -> list[fake_netlink.Answer]:
        nonlocal is_there
        ((_, kind, flags, sequence, _),) = fake_netlink.split(data)
        if kind in (16, 17) and kind == refused:
            return [fake_netlink.error(sequence, errno.EBUSY)]
        if kind == 17:
            is_there = False
            return [fake_netlink.error(sequence)]
        if flags & netlink.DUMP == netlink.DUMP:
            found = [fake_netlink.message(sequence, OUR_LINK)] if kind == 18 else []
            return [*found, fake_netlink.done(sequence)]
        return [fake_netlink.message(sequence, OUR_LINK) if is_there else fake_netlink.error(sequence, errno.ENODEV)]

    driver = addresses.AddressDriver(lambda _protocol: fake_netlink.FakeSocket(answer))
    outcomes = apply(driver, Verb.REMOVE, BoundAddresses(tuple(many)))
    assert len(outcomes) == len(many)
    assert {(outcome.errno, "device kube-ipvs0" in outcome.error) for outcome in outcomes} == {(errno.EBUSY, True)}


@pytest.mark.kernel
def test_operations_on_addresses_and_on_kube_ipvs0_itself_keep_their_order(driver: addresses.AddressDriver) -> None:
    changes = [
        *operations(Verb.ADD, bound("10.96.0.1")),
        *operations(Verb.REMOVE, bound("10.96.0.1")),
        *operations(Verb.ADD, Device(DEVICE), bound("10.96.0.1")),
        *operations(Verb.REMOVE, Device(DEVICE)),
        *operations(Verb.ADD, Device(DEVICE), bound("10.96.0.2")),
    ]
    outcomes = driver.apply(changes)
    assert [outcome.operation for outcome in outcomes] == changes
    assert outcomes[0].error == "add address 10.96.0.1: the device kube-ipvs0 is missing"
    assert outcomes[1].surprise
    assert clean(outcomes[2:])
    assert driver.observe().addresses == {parse_address("10.96.0.2")}


@pytest.mark.kernel
def test_an_address_that_the_kernel_refuses_does_not_prevent_adding_other_addresses(driver: addresses.AddressDriver) -> None:
    outcomes = apply(driver, Verb.ADD, Device(DEVICE), bound("10.96.0.1"), bound("ff02::1"), bound("fd00:96::1"))
    assert [bool(outcome.error) for outcome in outcomes] == [False, False, True, False]
    assert outcomes[2].errno != 0


@pytest.mark.kernel
def test_an_interface_with_our_name_that_is_not_a_dummy_device_is_not_changed(driver: addresses.AddressDriver) -> None:
    ip("link", "add", DEVICE, "type", "bridge")
    reason = "kube-ipvs0 is a bridge device, not a dummy: remove or rename it"
    with pytest.raises(KernelError, match=reason):
        driver.observe()
    for verb in (Verb.ADD, Verb.REMOVE):
        for outcome in apply(driver, verb, Device(DEVICE), bound("10.96.0.1")):
            assert outcome.error == f"{outcome.operation}: {reason}"
            assert outcome.errno == errno.EEXIST
    (shown,) = ip("address", "show", DEVICE)
    assert (shown["linkinfo"]["info_kind"], shown["addr_info"]) == ("bridge", [])


def test_adding_or_removing_an_address_fails_if_the_answer_is_lost() -> None:
    def answer(data: bytes) -> list[fake_netlink.Answer]:
        (_, kind, _, sequence, _), *_ = fake_netlink.split(data)
        return [fake_netlink.message(sequence, OUR_LINK)] if kind == 18 else [fake_netlink.OVERRUN]

    driver = addresses.AddressDriver(lambda _protocol: fake_netlink.FakeSocket(answer))
    for verb in (Verb.ADD, Verb.REMOVE):
        outcomes = apply(driver, verb, bound("10.96.0.1"), bound("fd00::1"))
        assert all("answer was lost" in outcome.error for outcome in outcomes)


@pytest.mark.parametrize("body", [b"", bytes(4)])
def test_a_truncated_message_about_an_interface_or_address_raises_a_kernel_error(body: bytes) -> None:
    def answer(data: bytes) -> list[fake_netlink.Answer]:
        ((_, _, _, sequence, _),) = fake_netlink.split(data)
        return [fake_netlink.message(sequence, body), fake_netlink.done(sequence)]

    driver = addresses.AddressDriver(lambda _protocol: fake_netlink.FakeSocket(answer))
    with pytest.raises(KernelError, match="cannot be parsed"):
        driver.observe()


def test_an_address_whose_length_does_not_match_its_family_is_ignored() -> None:
    def answer(data: bytes) -> list[fake_netlink.Answer]:
        ((_, kind, _, sequence, _),) = fake_netlink.split(data)
        head = struct.pack("=BBBBI", socket.AF_INET, 32, 0, 0, 7)
        found = [link(b"eth0\0")] if kind == 18 else [head + fake_netlink.attribute(2, bytes(length)) for length in (2, 4, 16)]
        return [*(fake_netlink.message(sequence, one) for one in found), fake_netlink.done(sequence)]

    driver = addresses.AddressDriver(lambda _protocol: fake_netlink.FakeSocket(answer))
    assert [str(other.address) for other in driver.observe().interface_addresses] == ["0.0.0.0"]


def test_the_error_says_what_is_missing_if_the_kernel_has_no_dummy_devices() -> None:
    def answer(data: bytes) -> list[fake_netlink.Answer]:
        ((_, kind, _, sequence, _),) = fake_netlink.split(data)
        return [fake_netlink.error(sequence, errno.ENODEV if kind == 18 else errno.EOPNOTSUPP)]

    driver = addresses.AddressDriver(lambda _protocol: fake_netlink.FakeSocket(answer))
    assert "the module dummy is missing or cannot be loaded" in result(driver, Verb.ADD, Device(DEVICE))[0]
