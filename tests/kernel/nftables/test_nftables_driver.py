"""Tests transactions in which the nftables driver writes rules and sets together, in the real nf_tables of this machine.

``test_nft_rules_driver`` and ``test_nft_sets_driver`` test what the drivers of rules and of sets write and read.
"""

import contextlib
from collections.abc import Iterator

import pytest
from pyroute2.netlink import NETLINK_NETFILTER

from ipvsproxy.kernel.base import netlink, nft_message
from ipvsproxy.kernel.nftables import nft_sets_driver as nft_sets
from ipvsproxy.kernel.nftables.nftables_driver import NftDriver
from ipvsproxy.model.net import Family, Protocol, parse_address
from ipvsproxy.model.plan import Operation, Outcome, Verb
from ipvsproxy.model.rules import Backend, Rule, SetMatch, Side, Skeleton, Verdict
from ipvsproxy.model.sets import IP_SETS, SetEntries, SetEntry, SetKind
from ipvsproxy.translate import skeleton
from ipvsproxy.translate.translation_settings import Settings
from tests.kernel.nftables.examples import CLUSTER, REAL, entry, load, nft
from tests.support import builders
from tests.support.polled_sets import observe_changed

pytestmark = REAL

SETS = [Operation(Verb.ADD, ip_set) for ip_set in IP_SETS.values()]
NFT = Settings(backend=Backend.NFTABLES)


def rules(family: Family) -> Operation:
    return Operation(Verb.SET, skeleton.build_skeleton(family, NFT, builders.node_view(), set(), []))


def entries(verb: Verb, *numbers: int) -> Operation:
    return Operation(verb, SetEntries.of(*map(entry, numbers)))


EVERYTHING = [*SETS, entries(Verb.ADD, 1, 2, 3), *map(rules, Family)]


@pytest.fixture
def driver(network_namespace: None) -> Iterator[NftDriver]:
    with contextlib.closing(NftDriver(chains=skeleton.CHAINS, jumps=skeleton.JUMPS)) as made:
        yield made


def generation() -> int:
    with contextlib.closing(netlink.Channel(NETLINK_NETFILTER)) as channel:
        return nft_message.generation(channel)


def held(driver: NftDriver) -> set[SetEntry]:
    return set(driver.sets.observe([CLUSTER])[CLUSTER].entries)


def test_one_transaction_writes_sets_and_their_entries_and_the_rules_of_both_families(driver: NftDriver) -> None:
    before = generation()
    assert driver.apply(EVERYTHING) == [Outcome(one) for one in EVERYTHING]
    assert generation() == before + 1
    assert held(driver) == {entry(1), entry(2), entry(3)}
    for operation in map(rules, Family):
        assert isinstance(operation.item, Skeleton)
        assert driver.rules.observe(operation.item.family) == operation.item.in_force


def test_additions_and_removals_that_do_not_depend_on_each_other_are_sent_in_one_transaction(driver: NftDriver) -> None:
    driver.apply(EVERYTHING)
    before = generation()
    changes = [entries(Verb.ADD, 4), entries(Verb.REMOVE, 1, 2)]
    assert driver.apply(changes) == [Outcome(one) for one in changes]
    assert generation() == before + 1
    assert held(driver) == {entry(3), entry(4)}


def test_each_operation_of_a_refused_transaction_gets_a_separate_outcome(driver: NftDriver) -> None:
    driver.apply(EVERYTHING)
    absent, present, wanted = entries(Verb.REMOVE, 9), entries(Verb.REMOVE, 1), entries(Verb.ADD, 5)
    outcomes = driver.apply([wanted, absent, present])
    assert [(one.error, one.surprise) for one in outcomes] == [("", False), ("", True), ("", False)]
    assert held(driver) == {entry(2), entry(3), entry(5)}


def test_a_rule_that_the_kernel_refuses_does_not_prevent_adding_entries_to_sets(driver: NftDriver) -> None:
    driver.apply(EVERYTHING)
    unknown = Rule(set=SetMatch("KUBE-NOTHING", (Side.SOURCE,)), target=Verdict.DROP)
    wrong = Operation(Verb.SET, Skeleton(family=Family.IPV4, chains={skeleton.CHAINS[0]: (unknown,)}, jumps=()))
    of_entries, of_rules = driver.apply([entries(Verb.ADD, 6), wrong])
    assert of_entries.error == ""
    assert "KUBE-NOTHING" in of_rules.error
    assert entry(6) in held(driver)
    kept = rules(Family.IPV4).item
    assert isinstance(kept, Skeleton)
    assert driver.rules.observe(Family.IPV4) == kept.in_force


def test_an_entry_that_cannot_be_encoded_does_not_prevent_other_operations(driver: NftDriver) -> None:
    driver.apply(EVERYTHING)
    wrong = Operation(Verb.ADD, SetEntries.of(SetEntry(CLUSTER, parse_address("fd00::1"), Protocol.TCP, 80)))
    good, bad = driver.apply([entries(Verb.ADD, 7), wrong])
    assert good.error == ""
    assert "family" in bad.error
    assert entry(7) in held(driver)


def test_operations_that_exceed_the_limit_of_a_transaction_are_split_into_several_transactions(
    driver: NftDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver.apply(EVERYTHING)
    monkeypatch.setattr(nft_sets.NftSetsDriver, "most_at_once", 200)
    before = generation()
    many = [entries(Verb.ADD, *range(10, 20)), entries(Verb.REMOVE, 1)]
    assert driver.apply(many) == [Outcome(one) for one in many]
    assert generation() > before + 1
    assert held(driver) == {entry(2), entry(3), *map(entry, range(10, 20))}


def test_a_change_by_another_program_during_a_write_is_not_an_error(driver: NftDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    driver.apply(EVERYTHING)
    listing, harms = driver.rules.listing, ["add table inet theirs", "delete table inet theirs"]

    def disturbed() -> object:
        found = listing()
        if harms:
            nft(harms.pop())
        return found

    monkeypatch.setattr(driver.rules, "listing", disturbed)
    nft("add table inet theirs")
    operations = [entries(Verb.ADD, 8), rules(Family.IPV4)]
    assert driver.apply(operations) == [Outcome(one) for one in operations]
    assert not harms
    assert entry(8) in held(driver)


def test_the_next_poll_notices_if_another_program_deletes_an_entry_written_together_with_rules(
    driver: NftDriver,
) -> None:
    driver.apply([*SETS, entries(Verb.ADD, 1)])
    before = observe_changed(driver.sets, [CLUSTER])
    driver.apply([entries(Verb.ADD, 2), rules(Family.IPV4)])
    nft("delete", "element", "inet", "ipvsproxy", CLUSTER, "{ 10.0.0.2 . tcp . 80 }")
    assert observe_changed(driver.sets, [CLUSTER]) == before


def test_the_socket_stays_open_if_a_transaction_with_an_outdated_generation_is_refused(driver: NftDriver) -> None:
    driver.apply(EVERYTHING)
    ports = set(driver._ports)
    for _ in range(3):
        assert nft_message.run(driver._channel, [nft_message.table()], generation() - 1) == {-1: nft_message.STALE}
    assert driver._ports == ports
    assert nft_message.run(driver._channel, [nft_message.table()], generation()) == {}


def every_rule(family: Family) -> Skeleton:
    return skeleton.build_skeleton(family, NFT, builders.node_view(), set(SetKind), [])


def load_with(*replaced: tuple[str, str]) -> None:
    """Load the rule set again with a changed text, as an administrator or another version of ipvsproxy may do."""
    text = nft("list", "ruleset")
    for before, after in replaced:
        assert text.count(before) == 1
        text = text.replace(before, after)
    nft("flush", "ruleset")
    load(text)


FIELDS = "\t\ttype ipv4_addr . inet_proto . inet_service\n"
SMALL_SET = f"table inet ipvsproxy {{ set {CLUSTER} {{ type ipv4_addr . inet_proto . inet_service; size 2; }}; }}\n"
OTHER_SETS = [one for one in SETS if one.item is not IP_SETS[CLUSTER]]
UNLIKE = (f"set {CLUSTER} {{\n{FIELDS}", f"set {CLUSTER} {{\n{FIELDS}\t\tsize 2\n")


def test_a_set_whose_definition_is_not_ours_is_replaced_together_with_its_entries_and_rules(driver: NftDriver) -> None:
    wanted, other = [Operation(Verb.SET, every_rule(family)) for family in Family], entry(7, "KUBE-EXTERNAL-IP")
    driver.apply([*SETS, entries(Verb.ADD, 1), Operation(Verb.ADD, SetEntries.of(other)), *wanted])
    load_with(UNLIKE)
    created = [Operation(Verb.ADD, IP_SETS[name]) for name in (CLUSTER, other.set)]
    operations = [*created, entries(Verb.ADD, 1, 2, 3), wanted[0]]
    driver._replace_unlike(operations)
    assert held(driver) == {entry(1), entry(2), entry(3)}, "the new set never exists without its entries"
    driver.apply(operations)
    assert set(driver.sets.shaped_as_ours(IP_SETS.values()).items()) == {(ip_set, True) for ip_set in IP_SETS.values()}
    assert held(driver) == {entry(1), entry(2), entry(3)}
    assert driver.sets.observe([other.set])[other.set].entries == {other}, "this set had our definition"
    assert driver.rules.observe(Family.IPV4) == every_rule(Family.IPV4).in_force


def test_replacing_a_set_without_writing_rules_keeps_the_rules_that_use_the_set(driver: NftDriver) -> None:
    wanted = Operation(Verb.SET, every_rule(Family.IPV4))
    driver.apply([*SETS, wanted])
    nft("flush", "ruleset")
    load(SMALL_SET)
    driver.apply([*OTHER_SETS, wanted])
    assert [one.error for one in driver.apply([Operation(Verb.ADD, IP_SETS[CLUSTER]), entries(Verb.ADD, 1)])] == ["", ""]
    assert set(driver.sets.shaped_as_ours(IP_SETS.values()).items()) == {(ip_set, True) for ip_set in IP_SETS.values()}
    assert held(driver) == {entry(1)}
    assert driver.rules.observe(Family.IPV4) == every_rule(Family.IPV4).in_force


def test_a_set_is_reported_if_a_rule_of_another_program_prevents_its_replacement(driver: NftDriver) -> None:
    content = f"set {CLUSTER} {{ type ipv4_addr; size 2; }}; chain theirs {{ ip daddr @{CLUSTER} drop; }}"
    load(f"table inet ipvsproxy {{ {content}; }}\n")
    (outcome,) = driver.apply([Operation(Verb.ADD, IP_SETS[CLUSTER])])
    assert "a set of this name exists, and it is a set of nf_tables with flags or a size of its own" in outcome.error
    assert "theirs" in nft("list", "ruleset")


def assert_set_waits_for_rules(driver: NftDriver) -> None:
    """A set with another definition is replaced only in a transaction that also writes the rules that use the set."""
    before = nft("--stateless", "list", "ruleset")
    (outcome,) = driver.apply([Operation(Verb.ADD, IP_SETS[CLUSTER])])
    assert "a set of this name exists" in outcome.error
    assert nft("--stateless", "list", "ruleset") == before
    written = driver.apply([Operation(Verb.ADD, IP_SETS[CLUSTER]), Operation(Verb.SET, every_rule(Family.IPV4))])
    assert not [one.error for one in written if one.error]
    assert driver.rules.observe(Family.IPV4) == every_rule(Family.IPV4).in_force


def test_a_set_is_not_replaced_if_the_rules_that_use_it_cannot_be_written_again(driver: NftDriver) -> None:
    wanted = Operation(Verb.SET, every_rule(Family.IPV4))
    driver.apply([*SETS, wanted])
    load_with(UNLIKE)
    nft("add rule inet ipvsproxy IPv4-filter-KUBE-SOURCE-RANGES-FIREWALL counter")
    assert_set_waits_for_rules(driver)


@pytest.mark.parametrize(
    "harm",
    [
        "insert rule inet ipvsproxy IPv4-filter-INPUT counter",
        "chain inet ipvsproxy IPv4-filter-INPUT { policy drop ; }",
        "add table inet ipvsproxy { flags dormant ; }",
    ],
)
def test_a_set_is_not_replaced_if_that_would_delete_a_base_chain_changed_by_another_program(driver: NftDriver, harm: str) -> None:
    wanted = Operation(Verb.SET, every_rule(Family.IPV4))
    load(SMALL_SET)
    driver.apply([*OTHER_SETS, wanted])
    nft(harm)
    assert_set_waits_for_rules(driver)
