"""Covers the results of transactions, with a fake socket. The tests of the drivers cover the answers of a real kernel."""

import errno
from collections.abc import Mapping

import pytest

from ipvsproxy.kernel.base import message, netlink, nft_message
from tests.support import fake_netlink
from tests.support.fake_netlink import Answer, FakeSocket, error, sequences

LOST, MESSAGES = netlink.UNANSWERED, [fake_netlink.message(0)] * 2


@pytest.mark.parametrize(
    ("answers", "result"),
    [
        ({2: 0}, {}),
        ({1: errno.EEXIST, 2: errno.EBUSY}, {0: errno.EEXIST, 1: errno.EBUSY}),
        # the answer to the last message is lost, but the last message does not count as refused
        ({1: errno.EEXIST}, {0: errno.EEXIST}),
        ({0: errno.EPERM}, {-1: errno.EPERM}),
        ({}, {-1: LOST, 0: LOST, 1: LOST}),
    ],
)
def test_a_transaction_returns_the_indexes_and_errors_of_refused_messages(
    answers: Mapping[int, int], result: Mapping[int, int]
) -> None:
    socket = FakeSocket(lambda data: [error(sequences(data)[index], number) for index, number in answers.items()])
    assert nft_message.run(netlink.Channel(0, lambda _: socket), MESSAGES) == result


@pytest.mark.parametrize("insists", [False, True])
def test_the_last_attempt_at_a_transaction_names_no_generation_if_insists_is_true(*, insists: bool) -> None:
    generation = message.integer(nft_message.NFTA_GEN_ID, 7)

    def answer(data: bytes) -> list[Answer]:
        numbers = sequences(data)
        return [error(numbers[0], nft_message.STALE) if generation in data else error(numbers[2])]

    socket = FakeSocket(answer)
    failed = nft_message.run_while_stale(netlink.Channel(0, lambda _: socket), lambda: (MESSAGES, 7), insists=insists)
    assert failed == ({} if insists else {-1: nft_message.STALE})
    assert [generation in data for data in socket.sent] == [True] * (nft_message.ATTEMPTS - 1) + [not insists]
    assert not socket.closed  # still usable, because the kernel sends only one answer to an outdated transaction
