"""The nftables driver of the sets, with the real nf_tables of this machine in a separate network namespace."""

import contextlib
import errno
import subprocess
import time
from collections.abc import Iterable, Iterator, Sequence
from unittest.mock import Mock

import pytest

from ipvsproxy.kernel.base import message, netlink, nft_message
from ipvsproxy.kernel.nftables import nft_sets_driver as nft_sets
from ipvsproxy.kernel.nftables.nft_sets_driver import NftSetsDriver
from ipvsproxy.model.net import Protocol, parse_address
from ipvsproxy.model.plan import Operation, Verb
from ipvsproxy.model.sets import IP_SETS, SET_COPY, ForeignElement, MarkedEntry, SetEntries, SetEntry
from tests.kernel.drivers import apply, operations, result
from tests.kernel.nftables.examples import CLUSTER, REAL, an_entry_of, entry, load, nft
from tests.support.polled_sets import observe_changed

pytestmark = REAL

SCOPE, RANGES = "KUBE-IPVSPROXY-SCOPE", "KUBE-LOAD-BALANCER-SOURCE-CIDR"
MANY = 8_000


@pytest.fixture
def driver(network_namespace: None) -> Iterator[NftSetsDriver]:
    with contextlib.closing(NftSetsDriver()) as made:
        yield made


def test_every_set_returns_the_entries_that_were_added(driver: NftSetsDriver) -> None:
    entries = [an_entry_of(ip_set) for ip_set in IP_SETS.values()]
    assert not [one for one in apply(driver, Verb.ADD, *IP_SETS.values(), *entries) if one.error or one.surprise]
    observed = driver.observe(tuple(IP_SETS))
    assert {name: set(one.entries) for name, one in observed.items()} == {one.set: {one} for one in entries}
    assert not [one.differs_from(IP_SETS[name]) for name, one in observed.items() if one.differs_from(IP_SETS[name])]


def test_nft_prints_entries_in_readable_form(driver: NftSetsDriver) -> None:
    name = "KUBE-LOOP-BACK"
    for one in (name, SCOPE, RANGES):
        apply(driver, Verb.ADD, IP_SETS[one], an_entry_of(IP_SETS[one]))
    assert "10.96.0.1 . udp . 53 . 10.0.0.0" in nft("list", "set", "inet", "ipvsproxy", name)
    assert "10.96.0.1 . udp . 53 . 10.0.0.0 . 0x00000008" in nft("list", "set", "inet", "ipvsproxy", RANGES)
    assert '10.96.0.1 . sctp . 80 comment "mask 0xfff" : 0x00000012' in nft("list", "map", "inet", "ipvsproxy", SCOPE)


def test_sets_that_do_not_exist_are_observed_as_absent(driver: NftSetsDriver) -> None:
    assert driver.observe([CLUSTER]) == {}
    assert observe_changed(driver, [CLUSTER]) == {CLUSTER: None}
    assert not driver.has_copy()
    assert result(driver, Verb.REMOVE, SET_COPY) == ("", True)


def test_a_set_of_another_type_does_not_count_as_one_of_our_sets(driver: NftSetsDriver) -> None:
    load(f"table inet ipvsproxy {{ set {CLUSTER} {{ type inet_service; }}; }}\n")
    (outcome,) = apply(driver, Verb.ADD, IP_SETS[CLUSTER])
    assert outcome.errno == errno.EEXIST
    assert "a set of this name exists, and it is a set of nf_tables with other keys (2 bytes)" in outcome.error
    assert driver.observe([CLUSTER])[CLUSTER].differs_from(IP_SETS[CLUSTER])


def test_all_other_entries_are_added_if_one_entry_is_refused(driver: NftSetsDriver) -> None:
    apply(driver, Verb.ADD, IP_SETS[CLUSTER])
    wrong = SetEntry(CLUSTER, parse_address("fd00::1"), Protocol.TCP, 80)
    without = SetEntry(CLUSTER, parse_address("10.0.0.9"), None, 80)
    outcomes = apply(driver, Verb.ADD, SetEntries.of(entry(1), wrong, entry(2), without))
    assert [bool(one.error) for one in outcomes] == [False, True, False, True]
    assert set(driver.observe([CLUSTER])[CLUSTER].entries) == {entry(1), entry(2)}


def test_operations_on_a_missing_set_fail_without_affecting_other_sets(driver: NftSetsDriver) -> None:
    apply(driver, Verb.ADD, IP_SETS[CLUSTER])
    absent, there = apply(driver, Verb.ADD, entry(1, "KUBE-EXTERNAL-IP"), entry(1))
    assert (absent.errno, there.error) == (errno.ENOENT, "")
    assert set(driver.observe([CLUSTER])[CLUSTER].entries) == {entry(1)}


@pytest.fixture
def transaction(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """A mock of the function that sends a transaction. The mock counts the calls."""
    run = Mock(wraps=nft_message.run)
    monkeypatch.setattr(nft_message, "run", run)
    return run


def marked(numbers: Iterable[int], mark: int) -> SetEntries:
    entries = (MarkedEntry(SCOPE, entry(one).address, Protocol.TCP, 80, mark=mark, mask=0xFF) for one in numbers)
    return SetEntries(SCOPE, tuple(entries))


def test_thousands_of_entries_of_a_missing_set_are_not_sent_one_by_one(driver: NftSetsDriver, transaction: Mock) -> None:
    entries = tuple(map(entry, range(MANY)))
    for verb, is_failed in ((Verb.ADD, True), (Verb.REMOVE, False)):
        outcomes = driver.apply([Operation(verb, SetEntries(CLUSTER, entries))])
        assert {(bool(one.error), one.surprise) for one in outcomes} == {(is_failed, not is_failed)}
        assert len(outcomes) == MANY
    assert transaction.call_count < 20, "the kernel waits for its processors before it answers a refused one"


def test_removing_thousands_of_entries_takes_few_transactions_even_if_half_of_them_are_absent(
    driver: NftSetsDriver, transaction: Mock
) -> None:
    entries = tuple(map(entry, range(MANY)))
    driver.apply([Operation(Verb.ADD, IP_SETS[CLUSTER]), Operation(Verb.ADD, SetEntries(CLUSTER, entries[::2]))])
    outcomes = driver.apply([Operation(Verb.REMOVE, SetEntries(CLUSTER, entries[:-2]))])
    assert [one.error for one in outcomes if one.error] == []
    assert [one.surprise for one in outcomes] == [False, True] * (MANY // 2 - 1)
    assert driver.observe([CLUSTER])[CLUSTER].entries == {entries[-2]}
    assert transaction.call_count < 20


def test_changed_marks_of_thousands_of_entries_are_not_sent_one_by_one(driver: NftSetsDriver, transaction: Mock) -> None:
    driver.apply([Operation(Verb.ADD, IP_SETS[SCOPE]), Operation(Verb.ADD, marked(range(0, MANY, 2), 1))])
    outcomes = driver.apply([Operation(Verb.ADD, marked(range(MANY), 2))])
    assert [one.error for one in outcomes if one.error] == []
    assert set(driver.observe([SCOPE])[SCOPE].entries) == set(marked(range(MANY), 2).keys)
    assert transaction.call_count < 20


def test_an_absent_entry_is_added_if_one_run_of_operations_removes_and_then_adds_the_entry(driver: NftSetsDriver) -> None:
    apply(driver, Verb.ADD, IP_SETS[CLUSTER])
    changes = [*operations(Verb.REMOVE, entry(1)), *operations(Verb.ADD, entry(1))]
    assert [(one.error, one.surprise) for one in driver.apply(changes)] == [("", True), ("", False)]
    assert driver.observe([CLUSTER])[CLUSTER].entries == {entry(1)}


def test_changed_marks_are_written_even_if_another_program_empties_the_set_meanwhile(
    driver: NftSetsDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    apply(driver, Verb.ADD, IP_SETS[SCOPE], marked(range(2), 1))
    run = nft_message.run

    def emptied(channel: netlink.Channel, messages: Sequence[bytes], generation: int | None = None) -> dict[int, int]:
        if len(messages) > 1:  # the transaction with several messages replaces the existing marks
            monkeypatch.setattr(nft_message, "run", run)
            nft("flush", "map", "inet", "ipvsproxy", SCOPE)
        return run(channel, messages, generation)

    monkeypatch.setattr(nft_message, "run", emptied)
    assert not [one.error for one in apply(driver, Verb.ADD, marked(range(2), 2)) if one.error]
    assert nft_message.run is run
    assert set(driver.observe([SCOPE])[SCOPE].entries) == set(marked(range(2), 2).keys)


def test_thousands_of_entries_are_refused_in_few_transactions_if_another_process_owns_the_table(
    driver: NftSetsDriver, transaction: Mock
) -> None:
    with subprocess.Popen(("nft", "-i"), stdin=subprocess.PIPE, text=True) as owner:
        assert owner.stdin
        owner.stdin.write("add table inet ipvsproxy { flags owner; }\n")
        owner.stdin.flush()
        deadline = time.monotonic() + 60
        while "ipvsproxy" not in nft("list", "tables"):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        outcomes = driver.apply([Operation(Verb.ADD, SetEntries(CLUSTER, tuple(map(entry, range(MANY)))))])
        assert {one.errno for one in outcomes} == {errno.EPERM}
        assert "belongs to another process" in outcomes[0].error
        assert transaction.call_count < 20


def test_an_entry_with_a_new_mark_or_mask_replaces_the_old_entry(driver: NftSetsDriver) -> None:
    address = parse_address("10.96.0.1")
    for mark, mask in ((1, 0xFF), (2, 0xFF), (2, 0xFF), (2, 0xF)):
        one = MarkedEntry(SCOPE, address, Protocol.TCP, 80, mark=mark, mask=mask)
        assert [outcome.error for outcome in apply(driver, Verb.ADD, IP_SETS[SCOPE], one)] == ["", ""]
        assert set(driver.observe([SCOPE])[SCOPE].entries) == {one}


def test_the_mask_of_a_mark_is_not_read_from_a_comment_that_another_program_has_written(driver: NftSetsDriver) -> None:
    apply(driver, Verb.ADD, IP_SETS[SCOPE])
    nft("add", "element", "inet", "ipvsproxy", SCOPE, '{ 10.96.0.1 . tcp . 80 comment "mask 0xff or so" : 0x12 }')
    assert [str(found) for found in driver.observe([SCOPE])[SCOPE].entries] == ["10.96.0.1,tcp:80 skbmark 0x12/0x0"]


def test_overlapping_source_ranges_are_separate_entries(driver: NftSetsDriver) -> None:
    address, other = parse_address("10.96.0.1"), parse_address("10.0.0.0")
    ranges = [SetEntry(RANGES, address, Protocol.TCP, 80, other, length) for length in (8, 16, 9, 32)]
    apply(driver, Verb.ADD, IP_SETS[RANGES], *ranges)
    apply(driver, Verb.REMOVE, ranges[1])
    assert set(driver.observe([RANGES])[RANGES].entries) == {ranges[0], ranges[2], ranges[3]}


def test_a_large_set_is_dumped_until_two_successive_dumps_are_equal(
    driver: NftSetsDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    dumps = [[netlink.Reply(bytes(4) + bytes([number]), 0, 5)] * 2 for number in (1, 2, 1, 3, 3, 4)]
    coming = iter(dumps)
    pauses_s: list[float] = []
    monkeypatch.setattr(driver._channel, "dump", lambda *_: next(coming))
    monkeypatch.setattr(driver, "_sleep", pauses_s.append)
    assert driver._elements(CLUSTER, "list") is dumps[4]
    assert pauses_s == [one for one in nft_sets.PAUSES_S[:5] if one]


def test_a_set_is_removed_in_a_separate_transaction(driver: NftSetsDriver) -> None:
    assert driver.messages([Operation(Verb.REMOVE, IP_SETS[CLUSTER])]) is None


def test_a_poll_returns_only_changed_sets(driver: NftSetsDriver) -> None:
    names = [CLUSTER, "KUBE-EXTERNAL-IP"]
    apply(driver, Verb.ADD, *(IP_SETS[name] for name in names), entry(1))
    assert observe_changed(driver, names).keys() == set(names)
    assert observe_changed(driver, names) == {}
    nft("add", "table", "inet", "theirs")
    assert observe_changed(driver, names) == {}
    nft("add", "element", "inet", "ipvsproxy", "KUBE-EXTERNAL-IP", "{ 10.0.0.7 . tcp . 80 }")
    assert observe_changed(driver, names).keys() == {"KUBE-EXTERNAL-IP"}
    apply(driver, Verb.ADD, entry(1))
    assert observe_changed(driver, names).keys() == {CLUSTER}
    driver.forget()
    assert observe_changed(driver, names).keys() == set(names)


def test_a_poll_returns_a_set_that_was_destroyed_and_recreated_with_the_same_entries(driver: NftSetsDriver) -> None:
    apply(driver, Verb.ADD, IP_SETS[CLUSTER], IP_SETS["KUBE-EXTERNAL-IP"], entry(1))
    as_it_was = nft("list", "set", "inet", "ipvsproxy", CLUSTER)
    before = observe_changed(driver, [CLUSTER])
    nft("delete", "set", "inet", "ipvsproxy", CLUSTER)
    assert observe_changed(driver, [CLUSTER]) == {CLUSTER: None}
    nft(as_it_was)
    assert observe_changed(driver, [CLUSTER]) == before


@pytest.mark.parametrize(
    ("name", "element"),
    [
        (CLUSTER, "10.0.0.7 . dccp . 80"),
        (SCOPE, "10.0.0.7 . icmp . 80 : 0x12"),
        (RANGES, "10.0.0.7 . tcp . 80 . 10.0.0.5 . 24"),
        (RANGES, "10.0.0.7 . tcp . 80 . 10.0.0.0 . 0"),
        (RANGES, "10.0.0.7 . tcp . 80 . 10.0.0.0 . 200"),
        (RANGES, "10.0.0.7 . icmp . 80 . 10.0.0.0 . 24"),
        ("KUBE-LOOP-BACK", "10.0.0.7 . udplite . 80 . 10.0.0.7"),
    ],
)
def test_an_element_that_another_program_adds_to_our_set_is_observed_and_removed(
    driver: NftSetsDriver, name: str, element: str
) -> None:
    ours = an_entry_of(IP_SETS[name])
    apply(driver, Verb.ADD, IP_SETS[name], ours)
    nft("add", "element", "inet", "ipvsproxy", name, f"{{ {element} }}")
    (foreign,) = driver.observe([name])[name].entries - {ours}
    assert str(foreign).startswith("element 0a000007")
    assert [one.error for one in apply(driver, Verb.REMOVE, foreign)] == [""]
    assert driver.observe([name])[name].entries == {ours}


@pytest.mark.parametrize("own", ["size 2;", "flags interval;", "flags timeout;", "flags constant; elements = { 10.0.0.9 };"])
def test_a_set_with_unexpected_flags_or_size_does_not_count_as_one_of_our_sets(driver: NftSetsDriver, own: str) -> None:
    name = "KUBE-IPVS-IPS"
    load(f"table inet ipvsproxy {{ set {name} {{ type ipv4_addr; {own} }}; }}\n")
    assert "flags or a size of its own" in driver.observe([name])[name].differs_from(IP_SETS[name])
    assert driver.shaped_as_ours([IP_SETS[name], IP_SETS[CLUSTER]]) == {IP_SETS[name]: False}


def add_catch_all(name: str, value: str = "") -> None:
    """Add the catch-all element, as another program would."""
    command = ("nft", "add", "element", "inet", "ipvsproxy", name, f"{{ *{value} }}")
    added = subprocess.run(command, capture_output=True, check=False)
    if added.returncode:
        pytest.skip(f"this kernel has no such elements: {added.stderr.decode()}")


@pytest.mark.parametrize("name", {(one.type, one.family, one.gives_marks): one.name for one in IP_SETS.values()}.values())
def test_a_catch_all_element_is_observed_and_removed_like_an_entry(driver: NftSetsDriver, name: str) -> None:
    ours = an_entry_of(IP_SETS[name])
    apply(driver, Verb.ADD, IP_SETS[name], ours)
    observe_changed(driver, [name])
    add_catch_all(name, " : 0x1" if IP_SETS[name].gives_marks else "")
    assert driver.observe([name])[name].entries == {ours, ForeignElement(name)}
    changed = observe_changed(driver, [name])[name]
    assert changed is not None
    assert changed.entries == {ours, ForeignElement(name)}
    assert result(driver, Verb.REMOVE, ForeignElement(name)) == ("", False)
    assert driver.observe([name])[name].entries == {ours}
    assert result(driver, Verb.REMOVE, ForeignElement(name)) == ("", True)


def test_set_entries_are_read_even_if_the_kernel_lists_a_catch_all_element_before_them() -> None:
    """The kernel lists the catch-all element last, but does not promise this order."""
    encoded = nft_message.element_for_all_others() + nft_sets.encode(IP_SETS[CLUSTER], entry(1))
    described = nft_message.new_set(CLUSTER, nft_sets.shape(IP_SETS[CLUSTER]), 1)
    told = (described, nft_message.elements(CLUSTER, encoded, is_removal=False))
    parts = [netlink.Reply(one, message.HEADER.size, len(one)) for one in told]
    assert NftSetsDriver()._read(CLUSTER, parts).entries == {ForeignElement(CLUSTER), entry(1)}


def test_a_catch_all_element_is_removed_together_with_thousands_of_entries(driver: NftSetsDriver) -> None:
    """The catch-all element is shorter than an entry, but a message with this element must not exceed the limit, either."""
    many = [entry(number) for number in range(5000)]
    apply(driver, Verb.ADD, IP_SETS[CLUSTER], SetEntries.of(*many))
    add_catch_all(CLUSTER)
    assert result(driver, Verb.REMOVE, SetEntries.of(ForeignElement(CLUSTER), *many)) == ("", False)
    assert driver.observe([CLUSTER])[CLUSTER].entries == set()


def test_our_table_is_removed_together_with_its_last_set_unless_another_program_has_a_chain_in_the_table(
    driver: NftSetsDriver,
) -> None:
    apply(driver, Verb.ADD, IP_SETS[CLUSTER])
    apply(driver, Verb.REMOVE, IP_SETS[CLUSTER])
    assert nft("list", "tables") == ""
    apply(driver, Verb.ADD, IP_SETS[CLUSTER])
    nft("add", "chain", "inet", "ipvsproxy", "theirs")
    apply(driver, Verb.REMOVE, IP_SETS[CLUSTER])
    assert nft("list", "tables") == "table inet ipvsproxy\n"


@pytest.mark.parametrize("garbled", range(5, 8))
def test_an_element_whose_padding_bytes_are_not_zero_does_not_count_as_one_of_our_entries(garbled: int) -> None:
    ip_set = IP_SETS["KUBE-CLUSTER-IP"]
    entry = SetEntry(ip_set.name, parse_address("10.0.0.1"), Protocol.TCP, 80)
    encoded = nft_sets.encode(ip_set, entry)
    key, data, comment = nft_message.read_element(message.Attributes(encoded, 4, len(encoded)))
    assert nft_sets.decode(ip_set, key, data, comment) == entry
    strange = bytearray(key)
    strange[garbled] = 1
    assert str(nft_sets.decode(ip_set, bytes(strange), data, comment)) == f"element {strange.hex()}"
