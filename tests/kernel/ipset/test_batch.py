"""Entries that go to the kernel together, on a fake socket."""

import errno

import msgspec
import pytest

from ipvsproxy.kernel.base import netlink
from ipvsproxy.kernel.ipset import batch as ipset_batch
from ipvsproxy.kernel.ipset import message as ipset_message
from ipvsproxy.model.net import Family, Protocol, parse_address
from ipvsproxy.model.plan import Operation, Outcome, Verb
from ipvsproxy.model.sets import IpSet, SetEntries, SetEntry, SetKind, SetType
from tests.support import fake_netlink

NAME = IpSet(SetKind.CLUSTER_IP, Family.IPV4).name


def entry(number: int) -> SetEntry:
    return SetEntry(NAME, parse_address(f"10.0.0.{number}"), Protocol.TCP, 80)


def test_a_run_is_of_one_set_and_one_verb() -> None:
    other = SetEntry("KUBE-NODE-PORT-TCP", port=80)
    several = SetEntries(NAME, (entry(5), entry(6)))
    added = [Operation(Verb.ADD, item) for item in (*map(SetEntries.of, (entry(1), entry(2), other, entry(3))), several)]
    assert list(ipset_batch.runs([*added, Operation(Verb.REMOVE, SetEntries.of(entry(4)))])) == [
        (Verb.ADD, [entry(1), entry(2)]),
        (Verb.ADD, [other]),
        (Verb.ADD, [entry(3), entry(5), entry(6)]),
        (Verb.REMOVE, [entry(4)]),
    ]
    assert not list(ipset_batch.runs([]))


def test_an_entry_that_cannot_be_encoded_does_not_keep_the_others_from_their_message() -> None:
    sent: list[bytes] = []

    def answer(data: bytes) -> list[fake_netlink.Answer]:
        """Refuse the message with both entries, and then the second of the messages with one each."""
        sent.append(data)
        *_, last = fake_netlink.sequences(data)
        return [fake_netlink.error(last, errno.EINVAL)]

    entries = [entry(1), msgspec.structs.replace(entry(2), protocol=None), entry(3)]
    _, wrong, refused = (Operation(Verb.ADD, SetEntries.of(one)) for one in entries)
    batch = ipset_batch.Batch(netlink.Channel(0, lambda _protocol: fake_netlink.FakeSocket(answer)))
    batch.add(Verb.ADD, entries)
    batch.flush()
    assert batch.reported == {
        wrong: Outcome(wrong, f"{wrong}: the protocol is missing", errno.EINVAL),
        refused: Outcome(refused, f"{refused}: Invalid argument", errno.EINVAL),
    }
    together, alone = sent
    codec = ipset_message.codec(NAME)
    assert together.endswith(codec.encode([entry(1), entry(3)]))
    assert codec.encode([entry(1)]) in alone
    assert alone.endswith(codec.encode([entry(3)]))


@pytest.mark.parametrize(
    ("number", "set_type", "text"),
    [
        (4352, SetType.ADDRESS_PORT, "the set is full: it holds at most 65536 entries"),
        (4352, SetType.PORT, "the port lies outside the set's range"),
        (4999, SetType.PORT, "ipset error 4999"),
        (errno.EPERM, None, "Operation not permitted"),
        (netlink.UNANSWERED, None, "the kernel's answer was lost, so this may or may not be in force"),
    ],
)
def test_error_numbers_have_readable_texts(number: int, set_type: SetType | None, text: str) -> None:
    assert ipset_batch.explain(number, set_type) == text
