"""Connection counts by one question: the question, and how answers are parsed. Real counts are in ``test_ipvs``."""

import contextlib
import errno
import socket
import struct

import pytest

from ipvsproxy.kernel.base.errors import KernelError
from ipvsproxy.kernel.ipvs import driver as ipvs
from ipvsproxy.kernel.ipvs.connections import FIRST_ROOM, MOST_ROOM, ConnectionReader
from ipvsproxy.model.net import Protocol, parse_address
from ipvsproxy.model.plan import Operation, Verb
from ipvsproxy.model.real_servers import EvenWeights, RealServerKey
from ipvsproxy.model.virtual_servers import Connections, RealServers, VirtualServer
from ipvsproxy.model.virtual_servers import VirtualServerSettings as Settings
from tests.support import builders

KEY = builders.frontend("10.96.0.10", 443, Protocol.UDP)
HEADER, ENTRY = 24, 96


class Answers:
    """The answers of a kernel in turn: counts, or an error number."""

    def __init__(self, *answers: list[tuple[RealServerKey, int, int]] | int) -> None:
        self.answers = list(answers)
        self.asked: list[bytes] = []

    def __call__(self, asking: socket.socket, level: int, option: int, question: bytes, action: str) -> bytes:
        assert (asking.family, level, option) == (socket.AF_INET, socket.IPPROTO_IP, 1156)
        self.asked.append(question)
        answer = self.answers.pop(0)
        if isinstance(answer, int):
            raise KernelError(action=action, errno=answer)
        entries = b"".join(key + bytes(18) + struct.pack("=II", *counts) + bytes(64) for key, *counts in answer)
        room = struct.unpack_from("=I", question, 16)[0]
        assert len(question) == HEADER + room * ENTRY
        return (question[:HEADER] + entries + question[HEADER + len(entries) :])[: len(question)]


def counts(number: int) -> list[tuple[RealServerKey, int, int]]:
    return [(builders.backend(f"10.244.{one >> 8}.{one & 255}"), one, 2 * one) for one in range(1, number + 1)]


def test_the_question_names_the_virtual_server_and_the_answer_ends_at_the_first_empty_entry() -> None:
    answers = Answers(counts(3))
    reader = ConnectionReader(answers)
    assert reader.read(KEY) == {key: Connections(active, inactive) for key, active, inactive in counts(3)}
    (question,) = answers.asked
    assert question[:HEADER] == struct.pack("=H2x4s2s6xI4x", 17, bytes((10, 96, 0, 10)), (443).to_bytes(2, "big"), FIRST_ROOM)
    reader.close()


@pytest.mark.parametrize("number", [FIRST_ROOM - 1, FIRST_ROOM, FIRST_ROOM + 1])
def test_where_all_room_is_filled_it_asks_again_with_more(number: int) -> None:
    answers = Answers(*[counts(number)] * 2)
    reader = ConnectionReader(answers)
    connections = reader.read(KEY)
    assert connections == {key: Connections(active, inactive) for key, active, inactive in counts(number)}
    assert len(answers.asked) == (1 if number < FIRST_ROOM else 2)
    reader.close()


def test_what_stands_inside_an_entry_is_no_real_server() -> None:
    first, second = builders.backend("10.244.0.1", 1), builders.backend("10.244.0.2", 2)
    inside = struct.unpack("=I", first[:4])[0], struct.unpack("=I", first[4:] + bytes(2))[0]
    reader = ConnectionReader(Answers([(second, *inside), (first, 5, 6)], [(second, *inside)]))
    connections, only_inside = reader.read(KEY), reader.read(KEY)
    assert connections is not None
    assert only_inside is not None
    assert (connections[first], connections[second]) == (Connections(5, 6), Connections(*inside))
    assert (list(connections), len(connections)) == ([second, first], 2)
    assert builders.backend("10.244.0.3", 3) not in connections
    assert first not in only_inside
    reader.close()


def test_room_has_an_end() -> None:
    asked: list[int] = []

    def full(_socket: socket.socket, _level: int, _option: int, question: bytes, _action: str) -> bytes:
        asked.append(len(question) // ENTRY)
        return bytes((1,)) * len(question)

    reader = ConnectionReader(full)
    assert reader.read(KEY) is None, "netlink is quicker"
    assert asked == [FIRST_ROOM, 256, MOST_ROOM]
    reader.close()


def test_an_answer_that_is_cut_off_is_not_used() -> None:
    reader = ConnectionReader(lambda _socket, _level, _option, question, _action: question[:100])
    assert reader.read(KEY) is None
    reader.close()


def test_a_virtual_server_that_is_not_there_has_no_real_servers() -> None:
    reader = ConnectionReader(Answers(errno.ESRCH, counts(1)))
    assert reader.read(KEY) == {}
    assert reader.read(KEY)
    reader.close()


@pytest.mark.parametrize("number", [errno.ENOPROTOOPT, errno.EINVAL])
def test_a_kernel_that_does_not_know_the_question_is_asked_once(number: int) -> None:
    answers = Answers(number)
    reader = ConnectionReader(answers)
    assert [reader.read(KEY), reader.read(KEY)] == [None, None]
    assert len(answers.asked) == 1
    reader.close()


def test_after_another_error_it_is_asked_again() -> None:
    reader = ConnectionReader(Answers(errno.EINTR, counts(1)))
    assert reader.read(KEY) is None
    assert reader.read(KEY) == {builders.backend("10.244.0.1"): Connections(1, 2)}
    reader.close()


def test_without_a_socket_it_is_asked_again_later(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(*_: object) -> socket.socket:
        raise OSError(errno.EMFILE, "too many open files")

    reader = ConnectionReader(Answers(counts(1)))
    with monkeypatch.context() as patched:
        patched.setattr(socket, "socket", none_left)
        assert reader.read(KEY) is None
    assert reader.read(KEY) == {builders.backend("10.244.0.1"): Connections(1, 2)}
    reader.close()


def test_ipv6_is_not_asked_for() -> None:
    assert ConnectionReader(Answers()).read(builders.frontend("fd00::1", 80)) is None


@pytest.mark.kernel
@pytest.mark.usefixtures("network_namespace")
@pytest.mark.parametrize("number", [0, 1, FIRST_ROOM - 1, FIRST_ROOM, FIRST_ROOM + 1, 600])
def test_the_connections_are_the_same_as_by_netlink(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    keys = [RealServerKey.of(parse_address(f"10.1.{one >> 8}.{one & 255}"), 8080) for one in range(1, number + 1)]
    with (
        contextlib.closing(ipvs.IpvsDriver()) as driver,
        contextlib.closing(ipvs.IpvsDriver(counts=ConnectionReader(Answers(errno.ENOPROTOOPT)))) as plain,
        contextlib.closing(ConnectionReader()) as reader,
    ):
        driver.apply([Operation(Verb.ADD, VirtualServer(KEY, Settings("rr")))])
        if keys:
            driver.apply([Operation(Verb.ADD, RealServers(KEY, EvenWeights.of(keys)))])
            driver.apply([Operation(Verb.SET, RealServers.of(KEY, keys[0], 0))])
        connections = driver.connections([KEY])
        assert connections == plain.connections([KEY]) == {KEY: dict.fromkeys(keys, Connections(0, 0))}
        read = reader.read(KEY)
        assert read is not None, "this kernel knows the question"
        assert len(read) == number
