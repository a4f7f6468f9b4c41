"""Tests the notifications of nf_tables: with the real nf_tables of this machine, and with a socket whose reads fail."""

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from typing import Any, cast
from unittest.mock import Mock

import pytest

from ipvsproxy.kernel.base import message
from ipvsproxy.kernel.nftables.changes import NftChanges
from ipvsproxy.kernel.nftables.nftables_driver import NftDriver
from ipvsproxy.model.plan import Operation, Verb
from ipvsproxy.model.sets import IP_SETS, SetEntries
from ipvsproxy.translate import skeleton
from tests.kernel.nftables.examples import CLUSTER, entry, load, nft
from tests.support.polled_sets import observe_changed


def entries(*numbers: int) -> SetEntries:
    return SetEntries.of(*map(entry, numbers))


@pytest.fixture
def driver(network_namespace: None) -> Iterator[NftDriver]:
    if shutil.which("nft") is None:
        pytest.skip("nft is not installed")
    with contextlib.closing(NftDriver(chains=skeleton.CHAINS, jumps=skeleton.JUMPS, listen=True)) as made:
        made.apply([Operation(Verb.ADD, one) for one in IP_SETS.values()])
        yield made


def changes_of(driver: NftDriver) -> NftChanges:
    assert driver.changes is not None
    return driver.changes


def test_changes_that_we_make_ourselves_are_not_reported(driver: NftDriver) -> None:
    changes = changes_of(driver)
    assert not changes.read()
    driver.apply([Operation(Verb.ADD, entries(1, 2, 3))])
    driver.apply([Operation(Verb.REMOVE, entries(1)), Operation(Verb.ADD, entries(4))])
    assert not changes.read()
    assert changes.count == 0


@pytest.mark.parametrize(
    "harm",
    [
        "flush set inet ipvsproxy KUBE-CLUSTER-IP",
        "add element inet ipvsproxy KUBE-CLUSTER-IP { 10.9.9.9 . tcp . 80 }",
        "add chain inet ipvsproxy theirs",
        "delete table inet ipvsproxy",
        "flush ruleset",
    ],
)
def test_each_kind_of_change_to_our_table_by_other_programs_is_reported(driver: NftDriver, harm: str) -> None:
    driver.apply([Operation(Verb.ADD, entries(1))])
    changes = changes_of(driver)
    changes.read()
    nft(harm)
    assert changes.read()
    assert changes.count == 1
    assert not changes.read(), "it is told once"


def test_changes_in_other_tables_do_not_cause_a_read_of_our_sets(driver: NftDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    changes = changes_of(driver)
    assert set(observe_changed(driver.sets, IP_SETS)) == set(IP_SETS)
    load("table ip ipvsproxy { }\ntable inet theirs { set KUBE-CLUSTER-IP { type ipv4_addr; elements = { 10.0.0.1 }; }; }\n")
    assert not changes.read()

    monkeypatch.setattr(driver.sets, "_dump", Mock(side_effect=AssertionError("a set was read")))
    assert observe_changed(driver.sets, IP_SETS) == {}


def test_only_the_written_set_is_read_again_after_our_own_write(driver: NftDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    observe_changed(driver.sets, IP_SETS)
    driver.apply([Operation(Verb.ADD, entries(7))])
    dump = Mock(wraps=driver.sets._dump)
    monkeypatch.setattr(driver.sets, "_dump", dump)
    assert set(observe_changed(driver.sets, IP_SETS)) == {CLUSTER}
    assert [read.args for read in dump.mock_calls] == [(CLUSTER,)]


def test_a_set_that_another_program_changes_is_read_after_the_notification(driver: NftDriver) -> None:
    driver.apply([Operation(Verb.ADD, entries(1, 2))])
    observe_changed(driver.sets, IP_SETS)
    nft("flush set inet ipvsproxy KUBE-CLUSTER-IP")
    assert changes_of(driver).read()
    changed = observe_changed(driver.sets, IP_SETS)
    assert {name: found and found.entries for name, found in changed.items()} == {CLUSTER: frozenset()}


class Failing:
    """A socket whose reads fail with the errors in ``numbers``, one after the other. A read after the last error would block."""

    def __init__(self, *numbers: int) -> None:
        self.numbers = list(numbers)
        self.is_closed = False

    def fileno(self) -> int:
        return 77

    def recv(self, _size: int, _flags: int = 0) -> bytes:
        if self.numbers:
            number = self.numbers.pop(0)
            raise OSError(number, os.strerror(number))
        raise BlockingIOError

    def close(self) -> None:
        self.is_closed = True


def test_lost_notifications_count_as_a_change() -> None:
    changes = NftChanges((), lambda: cast("Any", Failing(errno.ENOBUFS)))
    assert changes.read()
    assert (changes.count, changes.fileno()) == (1, 77)


def test_every_query_reports_a_change_after_the_socket_broke_and_was_closed() -> None:
    failing = Failing(errno.EBADF)
    changes = NftChanges((), lambda: cast("Any", failing))
    assert changes.read()
    assert (changes.count, changes.fileno(), changes.reason) == (None, None, "Bad file descriptor")
    assert failing.is_closed
    assert changes.read(), "whoever still asks is told that anything may have changed"


def test_a_kernel_that_sends_no_notifications_causes_no_error() -> None:
    changes = NftChanges((), Mock(side_effect=PermissionError(errno.EPERM, os.strerror(errno.EPERM))))
    assert (changes.count, changes.fileno(), changes.reason) == (None, None, "Operation not permitted")
    changes.close()


def test_a_truncated_message_counts_as_a_change() -> None:
    class Cut(Failing):
        def recv(self, _size: int, _flags: int = 0) -> bytes:
            if self.numbers.pop():
                raise BlockingIOError
            return message.HEADER.pack(400, 10 << 8, 0, 0, 0) + bytes(40)

    assert NftChanges((), lambda: cast("Any", Cut(1, 0))).read()
