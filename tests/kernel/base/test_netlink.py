"""Failures of a netlink socket, tested with a fake socket.

The answers of a real kernel are covered by the tests of the drivers.
"""

import errno
import struct
from collections.abc import Callable, Iterable
from unittest.mock import Mock

import pytest

from ipvsproxy.kernel.base import netlink
from ipvsproxy.kernel.base.errors import KernelError
from tests.support import fake_netlink
from tests.support.fake_netlink import OVERRUN, Answer, FakeSocket, done, error, message, sequences

INTERRUPTED = 0x10


def channel(
    *answers: Callable[[list[int]], Iterable[Answer]], receive_buffer: int = 8 << 20
) -> tuple[netlink.Channel, list[FakeSocket]]:
    """Return a channel, and the list to which the channel adds each socket that it opens.

    The first function in ``answers`` answers for the first socket, the second function for the second socket, and so on. Each
    function is called with the sequence numbers of the messages that were sent.
    """
    opened: list[FakeSocket] = []

    def connect(_protocol: int) -> FakeSocket:
        answer = answers[min(len(opened), len(answers) - 1)]
        opened.append(FakeSocket(lambda data: answer(sequences(data)), receive_buffer))
        return opened[-1]

    return netlink.Channel(0, connect, lambda _pause_s: None), opened


def acknowledge(numbers: list[int]) -> list[Answer]:
    return [error(numbers[-1])]


def test_only_the_last_message_asks_for_an_acknowledgement() -> None:
    tested, opened = channel(acknowledge)
    assert tested.run([message(0)] * 3) == {}
    assert [flags & netlink.ACKNOWLEDGE for _, _, flags, _, _ in fake_netlink.split(opened[0].sent[0])] == [0, 0, 4]


def test_each_error_is_returned_for_the_message_that_caused_it() -> None:
    tested, _ = channel(lambda numbers: [error(numbers[1], errno.EEXIST), error(numbers[3], errno.ENOENT)])
    assert tested.run([message(0)] * 4) == {1: errno.EEXIST, 3: errno.ENOENT}


def test_if_the_last_message_is_not_acknowledged_all_messages_without_an_error_are_unanswered() -> None:
    tested, opened = channel(lambda numbers: [error(numbers[1], errno.EEXIST)], acknowledge)
    assert tested.run([message(0)] * 3) == {0: netlink.UNANSWERED, 1: errno.EEXIST, 2: netlink.UNANSWERED}
    assert opened[0].closed
    assert tested.run([message(0)] * 1) == {}
    assert len(opened) == 2


def test_after_an_overrun_messages_without_an_error_count_as_unanswered_even_if_acknowledged() -> None:
    def answer(numbers: list[int]) -> list[Answer]:
        return [error(numbers[0], errno.EEXIST), OVERRUN, error(numbers[1], errno.EPERM), error(numbers[-1])]

    tested, opened = channel(answer)
    assert tested.run([message(0)] * 4) == {0: errno.EEXIST, 1: errno.EPERM, 2: netlink.UNANSWERED, 3: netlink.UNANSWERED}
    assert opened[0].closed


def test_a_socket_that_reports_overruns_again_and_again_is_closed() -> None:
    tested, opened = channel(lambda numbers: [OVERRUN, OVERRUN, error(numbers[0], errno.EEXIST)], acknowledge)
    assert tested.run([message(0)] * 2) == {0: netlink.UNANSWERED, 1: netlink.UNANSWERED}
    assert opened[0].closed
    assert tested.run([message(0)] * 1) == {}


@pytest.mark.parametrize(
    "answer",
    [
        lambda _numbers: [bytes(netlink.RECEIVE_SIZE + 1)],
        lambda _numbers: [struct.pack("=IHHII", 400, 2, 0, 1, 0) + bytes(20)],
        lambda _numbers: [OSError(errno.EBADF, "closed")],
        Mock(side_effect=OSError(errno.EMSGSIZE, "too long")),
    ],
    ids=["cut off", "too long for its datagram", "broken socket", "not sent"],
)
def test_all_messages_count_as_unanswered_if_they_cannot_be_sent_or_their_answer_cannot_be_parsed(
    answer: Callable[[list[int]], list[Answer]],
) -> None:
    tested, opened = channel(answer)
    assert tested.run([message(0)] * 2) == {0: netlink.UNANSWERED, 1: netlink.UNANSWERED}
    assert opened[0].closed


def test_every_message_and_every_dump_fails_if_no_socket_can_be_opened() -> None:
    def connect(_protocol: int) -> FakeSocket:
        raise OSError(errno.EPROTONOSUPPORT, "no such protocol")

    tested = netlink.Channel(12, connect)
    assert tested.limit == netlink.CHUNK_LIMIT
    assert tested.run([message(0)] * 1) == {0: netlink.UNANSWERED}
    with pytest.raises(KernelError, match="open a netlink socket") as caught:
        tested.dump(message(0), "list")
    assert caught.value.errno == errno.EPROTONOSUPPORT


def test_answers_to_earlier_requests_are_ignored() -> None:
    tested, _ = channel(lambda numbers: [error(7_000_000, errno.EPERM) + error(numbers[-1])])
    assert tested.run([message(0)] * 2) == {}


def test_all_messages_get_the_same_error_if_the_kernel_stops_at_a_refused_message() -> None:
    tested, opened = channel(lambda numbers: [error(numbers[0], errno.EBUSY)])
    assert tested.run([message(0)] * 3, errno.EBUSY) == dict.fromkeys(range(3), errno.EBUSY)
    assert not opened[0].closed


def test_messages_are_sent_in_small_chunks_if_the_receive_buffer_is_small() -> None:
    tested, _ = channel(acknowledge, receive_buffer=212992)
    assert 200 <= tested.limit <= 277
    tested, _ = channel(acknowledge)
    assert tested.limit == netlink.CHUNK_LIMIT


def test_an_error_in_a_later_chunk_has_the_index_of_its_message_among_all_messages() -> None:
    tested, _ = channel(lambda numbers: [error(numbers[1], errno.EEXIST), error(numbers[-1])])
    assert tested.run_all([message(0)] * 6, at_once=3) == dict.fromkeys((1, 4), errno.EEXIST)


def test_sequence_numbers_start_again_before_they_overflow() -> None:
    tested, _ = channel(acknowledge)
    tested._next = (1 << 32) - 2
    assert tested.run([message(0)] * 3) == {}


def test_a_dump_can_be_read_step_by_step_even_if_objects_change_in_between() -> None:
    def answer(numbers: list[int]) -> list[Answer]:
        (number,) = numbers
        disturbed = message(number, b"two.", flags=INTERRUPTED)
        return [message(number + 9, b"xxxx") + message(number, b"one."), disturbed, done(number)]

    tested, opened = channel(answer)
    parts = [[data[start:end] for data, start, end in found] for found in tested.dumping(message(0), "list")]
    assert parts == [[b"one."], [b"two."], []]
    assert len(opened[0].sent) == 1


def test_a_dump_yields_the_objects_that_it_reads_before_it_fails() -> None:
    tested, opened = channel(lambda numbers: [message(numbers[0], b"one.")])
    parts = tested.dumping(message(0), "list the things")
    assert len(next(parts)) == 1
    with pytest.raises(KernelError, match="list the things"):
        next(parts)
    assert opened[0].closed
    tested, _ = channel(lambda numbers: [error(numbers[0], errno.ENOENT)])
    with pytest.raises(KernelError) as caught:
        list(tested.dumping(message(0), "list"))
    assert caught.value.errno == errno.ENOENT


def test_an_interrupted_dump_is_discarded_and_requested_again() -> None:
    answers = iter(
        (
            lambda number: [message(number, b"old.", flags=INTERRUPTED), message(number, b"more"), done(number)],
            lambda number: [message(number, b"old."), done(number, flags=INTERRUPTED)],
            lambda number: [message(number, b"new."), done(number)],
        )
    )
    tested, opened = channel(lambda numbers: next(answers)(*numbers))
    assert [data[start:end] for data, start, end in tested.dump(message(0), "list")] == [b"new."]
    assert len(opened) == 1
    assert len(set(sequences(b"".join(opened[0].sent)))) == 3


def test_a_dump_that_is_interrupted_at_each_attempt_is_an_error() -> None:
    tested, opened = channel(lambda numbers: [done(numbers[0], flags=INTERRUPTED)])
    pauses_s: list[float] = []
    tested._sleep = pauses_s.append
    with pytest.raises(KernelError, match="list the things: the data changed during each attempt") as caught:
        tested.dump(message(0), "list the things")
    assert caught.value.errno == errno.EINTR
    assert len(opened[0].sent) == len(netlink.DUMP_PAUSES_S)
    assert (0.0, *pauses_s) == netlink.DUMP_PAUSES_S


def test_a_dump_gets_only_one_attempt_if_each_attempt_at_the_previous_dump_lost_an_answer() -> None:
    loses, number = True, 0
    tested, opened = channel(lambda numbers: [OVERRUN if loses else done(numbers[0], number)])

    def attempts() -> int:
        before = sum(len(each.sent) for each in opened)
        with pytest.raises(KernelError, match="list: the dump broke off: No buffer space available") as caught:
            tested.dump(message(0), "list")
        assert caught.value.errno == errno.ENOBUFS
        return sum(len(each.sent) for each in opened) - before

    often = len(netlink.DUMP_PAUSES_S)
    assert [attempts(), attempts(), attempts()] == [often, 1, 1]
    loses = False
    assert tested.dump(message(0), "list") == []
    loses = True
    assert [attempts(), attempts()] == [often, 1]
    loses, number = False, errno.ENOENT
    with pytest.raises(KernelError, match="No such file"):
        tested.dump(message(0), "list")
    loses = True
    assert attempts() == often, "a refusal is an answer"


def cut_within_a_message(numbers: list[int]) -> list[Answer]:
    """Answer with a datagram that is cut off so that one whole message remains, and then with the end of the dump."""
    (number,) = numbers
    left = message(number, bytes(netlink.RECEIVE_SIZE - fake_netlink.HEADER.size))
    return [left + message(number, b"lost"), done(number)]


@pytest.mark.parametrize(
    "truncated",
    [
        cut_within_a_message,
        lambda numbers: [message(numbers[0], b"one.") + message(numbers[0], b"two.")[:7], done(numbers[0])],
        lambda numbers: [message(numbers[0], b"one.")],
    ],
    ids=["within a message", "within a header", "before the end"],
)
def test_a_truncated_dump_is_requested_again_on_a_new_socket(truncated: Callable[[list[int]], list[Answer]]) -> None:
    tested, opened = channel(truncated, lambda numbers: [message(numbers[0], b"one."), done(numbers[0])])
    assert [data[start:end] for data, start, end in tested.dump(message(0), "list")] == [b"one."]
    assert [socket.closed for socket in opened] == [True, False]


def test_the_last_message_of_a_dump_may_have_no_error_number() -> None:
    tested, _ = channel(lambda numbers: [message(numbers[0], b"one.") + message(numbers[0], kind=fake_netlink.DONE)])
    assert len(tested.dump(message(0), "list")) == 1


@pytest.mark.parametrize("answer", [lambda _numbers: [], lambda _numbers: [error(7_000_000)], lambda _numbers: [OVERRUN]])
def test_a_query_without_an_answer_is_an_error(answer: Callable[[list[int]], list[Answer]]) -> None:
    tested, opened = channel(answer)
    with pytest.raises(KernelError, match="ask"):
        tested.ask(message(0), "ask")
    assert opened[0].closed


@pytest.mark.parametrize(
    "answer",
    [
        lambda numbers: [message(numbers[0], bytes(8))[:-4]],
        lambda numbers: [message(numbers[0], bytes(4))],
        lambda numbers: [message(numbers[0], kind=fake_netlink.ERROR)],
        lambda numbers: [message(numbers[0], bytes(4) + fake_netlink.attribute(1, b"x"))],
    ],
    ids=["cut off", "without a number", "an error without its number", "half a number"],
)
def test_an_answer_that_cannot_be_parsed_raises_a_kernel_error(answer: Callable[[list[int]], list[Answer]]) -> None:
    tested, _ = channel(answer)
    with pytest.raises(KernelError, match=r"find IPVS: .*(parsed|Bad message)"):
        netlink.resolve_family(tested, "IPVS", "ip_vs")


def test_the_error_for_an_unknown_netlink_family_contains_the_name_of_its_kernel_module() -> None:
    tested, _ = channel(lambda numbers: [error(numbers[0], errno.ENOENT)])
    with pytest.raises(KernelError, match="this kernel has no IPVS: the module ip_vs is missing or cannot be loaded"):
        netlink.resolve_family(tested, "IPVS", "ip_vs")


def test_a_real_netlink_socket_receives_an_answer_without_blocking() -> None:
    with netlink.open_socket(0) as opened:
        assert not opened.getblocking()
        opened.send(struct.pack("=IHHIIB15x", 32, 18, netlink.REQUEST | netlink.DUMP, 5, 0, 0))  # RTM_GETLINK
        assert struct.unpack_from("=IHHI", opened.recv(netlink.RECEIVE_SIZE))[3] == 5
