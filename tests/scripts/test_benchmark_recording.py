"""The recording of a benchmark run has all messages of the run, without the fields that are valid only in that run."""

import pathlib

import pytest
from pyroute2.netlink import NETLINK_NETFILTER

from ipvsproxy.kernel.base import nft_message as nft
from scripts.benchmark import figures
from scripts.benchmark import recording as recordings

GENERIC = 16


def recorded(directory: pathlib.Path, protocol: int, messages: list[bytes]) -> bytes:
    made = recordings.Recording(directory / "run")
    made.add(protocol, messages)
    made.close()
    ((_, data, _),) = recordings.read(directory / "run").chunks
    return data


def test_an_nftables_transaction_is_recorded_without_its_generation_number(tmp_path: pathlib.Path) -> None:
    messages = [nft.table(), nft.chain("one")]
    data = recorded(tmp_path, NETLINK_NETFILTER, nft.transaction(messages, 1234))
    assert data == recorded(tmp_path, NETLINK_NETFILTER, nft.transaction(messages))
    assert int.from_bytes(data[:4], "little") == 20


def test_recorded_generic_netlink_messages_are_unchanged_but_the_last_one_requests_an_answer(
    tmp_path: pathlib.Path,
) -> None:
    one, two = bytes(16), bytes(20)
    for messages in ([two], [one, two]):
        asking = bytearray(two)
        asking[6] |= 0x4
        assert recorded(tmp_path, GENERIC, messages) == b"".join([*messages[:-1], asking])


def test_each_recorded_message_has_the_step_in_which_it_was_sent(tmp_path: pathlib.Path) -> None:
    made = recordings.Recording(tmp_path / "run")
    for step in ("", "change 0", "change 1", "change 1", ""):
        made.step = step
        made.add(GENERIC, [bytes(16)])
    made.close()
    assert [step for _, _, step in recordings.read(tmp_path / "run").chunks] == ["", "change 0", "change 1", "change 1", ""]


def test_the_times_of_all_steps_of_the_same_kind_are_combined() -> None:
    parts = figures.by_part({"": 9.0, "change 0": 0.001, "change 1": 0.003, "change 2": 0.002, "churn": 2.0})
    assert parts.keys() == {"change", "churn"}, "the start belongs to no part"
    assert parts["change"] == {"p50_ms": 2.0, "p99_ms": 3.0, "most_ms": 3.0, "sum_s": pytest.approx(0.006), "steps": 3}
    assert parts["churn"]["sum_s"] == 2.0
