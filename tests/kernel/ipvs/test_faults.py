"""Tests, with a fake socket, how the IPVS driver handles answers that are lost or cannot be parsed."""

import errno
import functools
import struct
from collections.abc import Callable
from unittest.mock import Mock

import pytest

from ipvsproxy.kernel.base import netlink
from ipvsproxy.kernel.base.errors import KernelError
from ipvsproxy.kernel.ipvs import ipvs_driver as ipvs
from ipvsproxy.kernel.ipvs import operations as ipvs_operations
from ipvsproxy.model.kernel import Timeouts
from ipvsproxy.model.net import Family
from ipvsproxy.model.plan import Item, Operation, Verb
from ipvsproxy.model.virtual_servers import FirewallMark, VirtualServer, VirtualServerKey
from tests.kernel.drivers import apply, clean, operations, result
from tests.kernel.ipvs.examples import real, refuse, server
from tests.support import fake_netlink


class Kernel:
    """A fake kernel. It knows the netlink family of IPVS, and dumps are empty. Other requests get ``answers`` or ``answer``."""

    def __init__(self) -> None:
        self.answers: list[fake_netlink.Answer] | None = None
        self.answer: Callable[[int], fake_netlink.Answer] = fake_netlink.error
        self.number = 33

    def __call__(self, data: bytes) -> list[fake_netlink.Answer]:
        _, kind, flags, sequence, _ = fake_netlink.split(data)[-1]
        if kind == 16:
            return [fake_netlink.message(sequence, bytes(4) + fake_netlink.attribute(1, struct.pack("=H", self.number)))]
        if kind != self.number:
            return [fake_netlink.error(sequence, errno.ENOENT)]
        if flags & netlink.DUMP:
            return [fake_netlink.done(sequence)]
        return [self.answer(sequence)] if self.answers is None else self.answers


def fake() -> tuple[ipvs.IpvsDriver, Kernel]:
    kernel = Kernel()
    return ipvs.IpvsDriver(lambda _protocol: fake_netlink.FakeSocket(kernel), ask=refuse), kernel


def test_an_operation_whose_answer_is_lost_fails_but_later_operations_succeed_on_a_new_socket() -> None:
    driver, kernel = fake()
    one = server("10.96.0.1")
    kernel.answers = []
    outcomes = apply(driver, Verb.ADD, one, real(one, "10.1.0.1"))
    assert all("answer was lost" in outcome.error for outcome in outcomes)
    assert [outcome.errno for outcome in outcomes] == [0, 0]
    kernel.answers = None
    assert clean(apply(driver, Verb.ADD, one, real(one, "10.1.0.1")))


def test_a_removal_does_not_count_as_done_if_the_answer_is_lost() -> None:
    driver, kernel = fake()
    kernel.answers = [fake_netlink.OVERRUN]
    assert "answer was lost" in result(driver, Verb.REMOVE, server("10.96.0.1"))[0]


@pytest.mark.parametrize(
    ("number", "is_left", "was_absent"),
    [(0, False, False), (errno.ESRCH, False, True), (errno.ENOENT, True, False), (errno.EPERM, True, False)],
    ids=["removed", "ESRCH", "ENOENT", "EPERM"],
)
def test_a_virtual_server_is_read_again_after_each_write_unless_the_write_shows_that_the_virtual_server_is_gone(
    monkeypatch: pytest.MonkeyPatch, number: int, *, is_left: bool, was_absent: bool
) -> None:
    driver, kernel = fake()
    kernel.answer = lambda sequence: fake_netlink.error(sequence, number)
    noted: dict[VirtualServerKey, bool] = {}
    monkeypatch.setattr(driver, "_note", lambda key, *, is_there: noted.update({key: is_there}))
    gone, changed, scaled = map(server, ("10.96.0.1", "10.96.0.2", "10.96.0.3"))
    driver.apply([*operations(Verb.REMOVE, gone), *operations(Verb.ADD, changed, real(scaled, "10.1.0.1"))])
    (outcome,) = apply(driver, Verb.REMOVE, gone)
    assert (bool(outcome.error), outcome.surprise) == (is_left, was_absent)
    assert noted == {gone.key: is_left, changed.key: True, scaled.key: True}


def test_the_messages_of_many_operations_are_built_and_sent_in_parts_to_save_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver, _ = fake()
    run_all = Mock(wraps=driver._channel.run_all)
    monkeypatch.setattr(driver._channel, "run_all", run_all)
    many = [server(f"10.96.{number >> 8}.{number & 0xFF}") for number in range(2000)]
    assert clean(apply(driver, Verb.ADD, *many))
    sent = [len(call.args[0]) for call in run_all.mock_calls]
    assert sum(sent) == len(many)
    assert max(sent) <= driver._channel.limit < len(many)


def test_a_scheduler_is_not_reported_as_missing_after_the_ipvs_module_was_loaded_again() -> None:
    driver, kernel = fake()
    kernel.answer = lambda sequence: fake_netlink.error(sequence, errno.EINVAL)
    kernel.number = 34
    assert driver.why_unusable("wlc") == ""


def test_ipvs_has_ipv6_unless_the_kernel_reports_the_family_as_unsupported() -> None:
    driver, kernel = fake()
    for number, has_ipv6 in ((errno.EINVAL, True), (errno.EAFNOSUPPORT, False)):
        kernel.answer = functools.partial(fake_netlink.error, number=number)
        assert driver.has_ipv6() == has_ipv6
    kernel.answers = []
    assert driver.has_ipv6(), "the answer was lost"


def test_timeouts_are_read_only_from_a_complete_answer() -> None:
    driver, kernel = fake()
    attributes = [fake_netlink.attribute(kind, struct.pack("=I", value)) for kind, value in ((4, 900), (5, 120), (6, 300))]
    kernel.answer = lambda sequence: fake_netlink.message(sequence, bytes(4) + b"".join(attributes))
    assert driver.read_timeouts() == Timeouts(900, 120, 300)
    attributes.pop()
    with pytest.raises(KernelError, match="the answer is incomplete"):
        driver.read_timeouts()


def test_reading_connections_fails_if_a_real_server_in_the_answer_has_no_address_family() -> None:
    one = server("fd00:96::1")
    values = ((1, bytes(16)), (2, bytes(2)), (3, bytes(4)), (4, bytes(4)), (7, bytes(4)), (8, bytes(4)))
    destination = b"".join(fake_netlink.attribute(number, value) for number, value in values)

    def answer(data: bytes) -> list[fake_netlink.Answer]:
        _, kind, flags, sequence, _ = fake_netlink.split(data)[-1]
        if kind == 16 or not flags & netlink.DUMP:
            return [fake_netlink.message(sequence, bytes(4) + fake_netlink.attribute(1, struct.pack("=H", 33)))]
        told = bytes(4) + fake_netlink.attribute(2, destination)
        return [fake_netlink.message(sequence, told), fake_netlink.done(sequence)]

    driver = ipvs.IpvsDriver(lambda _protocol: fake_netlink.FakeSocket(answer), ask=refuse)
    with pytest.raises(KernelError, match=r"lacks an attribute: use Linux 3\.18 or later"):
        driver.connections([one.key])


WEB = server("10.96.0.1")
BY_MARK = VirtualServer(FirewallMark.of(Family.IPV4, 8), WEB.settings)


@pytest.mark.parametrize(
    ("verb", "item", "number", "opposite"),
    [
        (Verb.ADD, WEB, errno.EEXIST, Verb.SET),
        (Verb.ADD, BY_MARK, errno.EEXIST, None),
        (Verb.ADD, real(WEB, "10.1.0.1"), errno.EEXIST, Verb.SET),
        (Verb.ADD, real(WEB, "10.1.0.1"), errno.ENOENT, None),
        (Verb.SET, WEB, errno.ESRCH, Verb.ADD),
        (Verb.SET, WEB, errno.ENOENT, None),
        (Verb.SET, real(WEB, "10.1.0.1"), errno.ENOENT, Verb.ADD),
        (Verb.SET, real(WEB, "10.1.0.1"), errno.ESRCH, None),
        (Verb.REMOVE, WEB, errno.ESRCH, None),
    ],
)
def test_add_becomes_set_only_if_the_object_exists_and_set_becomes_add_only_if_it_is_absent(
    verb: Verb, item: Item, number: int, opposite: Verb | None
) -> None:
    assert ipvs_operations.opposite(Operation(verb, item), number) is opposite


@pytest.mark.parametrize(
    ("item", "number", "is_absent"),
    [
        (WEB, errno.ESRCH, True),
        (WEB, errno.ENOENT, False),
        (WEB, errno.EPERM, False),
        (real(WEB, "10.1.0.1"), errno.ESRCH, True),
        (real(WEB, "10.1.0.1"), errno.ENOENT, True),
        (real(WEB, "10.1.0.1"), errno.EPERM, False),
    ],
)
def test_a_failed_removal_counts_as_done_only_if_the_error_shows_that_the_object_is_absent(
    item: Item, number: int, *, is_absent: bool
) -> None:
    assert ipvs_operations.is_absent(Operation(Verb.REMOVE, item), number) is is_absent
