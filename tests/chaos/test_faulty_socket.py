"""Faults at netlink sockets: each kind of fault reaches the program's channel as if it came from the kernel."""

import errno
import random
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from ipvsproxy.kernel.base import netlink
from ipvsproxy.kernel.base.errors import KernelError
from tests.chaos.faults import Faults, Kind, Order
from tests.chaos.faulty_socket import FaultySocket
from tests.support.fake_netlink import FakeSocket, done, error, message, split

LISTING = message(0, flags=netlink.REQUEST | netlink.DUMP)


def _kernel(data: bytes) -> Iterable[bytes]:
    """A fake kernel, which answers with a listing of two datagrams, or with the requested acknowledgements."""
    for _, _, flags, sequence, _ in split(data):
        if flags & netlink.DUMP == netlink.DUMP:
            yield message(sequence, b"one!") + message(sequence, b"two!")
            yield done(sequence)
        elif flags & netlink.ACKNOWLEDGE:
            yield error(sequence)


class _Node:
    def __init__(self, directory: Path) -> None:
        self.faults = Faults(directory)
        self.received: list[bytes] = []
        self.channel = netlink.Channel(0, self._connect, lambda _pause_s: None)

    def _connect(self, _protocol: int) -> FaultySocket:
        return FaultySocket(FakeSocket(self._answer), self.faults, random.Random(1))

    def _answer(self, data: bytes) -> Iterable[bytes]:
        self.received += [payload for *_, payload in split(data)]
        return _kernel(data)

    def change(self, *payloads: bytes) -> dict[int, int]:
        return self.channel.run([message(0, one) for one in payloads])


@pytest.fixture(name="node")
def _node(tmp_path: Path) -> _Node:
    return _Node(tmp_path)


@pytest.mark.parametrize("kind", [Kind.ENOBUFS, Kind.EBUSY, Kind.ENOMEM, Kind.EEXIST, Kind.ENOENT])
def test_a_change_with_an_injected_error_does_not_reach_the_kernel(node: _Node, kind: Kind) -> None:
    node.faults.order(Order(kind, 1, once=True))
    assert node.change(b"1...", b"2...", b"3...") == {0: getattr(errno, kind.value)}
    assert node.received == [b"2...", b"3..."]
    assert node.change(b"1...") == {}
    assert node.faults.injected() == {kind.value: 1}


def test_several_changes_that_are_sent_together_can_all_be_refused(node: _Node) -> None:
    node.faults.order(Order(Kind.EBUSY, 1, once=False))
    assert node.change(b"1...", b"2...") == {0: errno.EBUSY, 1: errno.EBUSY}
    assert node.received == []


@pytest.mark.parametrize(("kind", "received"), [(Kind.LOST, [b"1..."]), (Kind.UNSENT, [])])
def test_a_change_without_an_answer_counts_as_unanswered_even_if_the_kernel_applied_it(
    node: _Node, kind: Kind, received: list[bytes]
) -> None:
    node.faults.order(Order(kind, 1, once=True))
    assert node.change(b"1...") == {0: netlink.UNANSWERED}
    assert node.received == received


@pytest.mark.parametrize("kind", [Kind.UNSENT, Kind.LOST, Kind.CUT, Kind.INTERRUPTED])
def test_a_listing_that_fails_once_is_requested_again(node: _Node, kind: Kind) -> None:
    for _ in range(20):
        node.faults.order(Order(kind, 1, once=True))
        assert [part.data[part.start : part.end] for part in node.channel.dump(LISTING, "list")] == [b"one!", b"two!"]
    assert node.faults.injected() == {kind.value: 20}


@pytest.mark.parametrize("kind", [Kind.ENOMEM, Kind.CUT, Kind.INTERRUPTED])
def test_a_listing_that_always_fails_raises_an_error_instead_of_returning_an_incomplete_list(node: _Node, kind: Kind) -> None:
    node.faults.order(Order(kind, 1, once=False))
    with pytest.raises(KernelError):
        node.channel.dump(LISTING, "list")


@pytest.mark.parametrize("kind", [Kind.EEXIST, Kind.ENOENT, Kind.CUT, Kind.INTERRUPTED])
def test_some_faults_affect_only_changes_and_others_affect_only_listings(node: _Node, kind: Kind) -> None:
    node.faults.order(Order(kind, 1, once=False))
    attempt: Callable[[], object] = (
        (lambda: node.channel.dump(LISTING, "list")) if kind in (Kind.EEXIST, Kind.ENOENT) else (lambda: node.change(b"1..."))
    )
    attempt()
    assert node.faults.injected() == {}
