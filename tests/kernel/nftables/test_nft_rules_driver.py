"""The nftables driver of the rules, with the real nf_tables of this machine in a separate network namespace."""

import contextlib
import dataclasses
import errno
import itertools
import pathlib
import re
import shutil
from collections.abc import Iterator
from unittest.mock import Mock

import pytest

from ipvsproxy.kernel import backends, host
from ipvsproxy.kernel.backends import ChosenBackend
from ipvsproxy.kernel.base import netlink, nft_message
from ipvsproxy.kernel.base.errors import KernelError
from ipvsproxy.kernel.iptables import iptables_tables
from ipvsproxy.kernel.iptables.iptables_driver import Refusal
from ipvsproxy.kernel.nftables import nft_tables
from ipvsproxy.kernel.nftables import rule as nft_rule
from ipvsproxy.kernel.nftables.nft_rules_driver import NftRulesDriver
from ipvsproxy.kernel.nftables.nft_sets_driver import NftSetsDriver
from ipvsproxy.kernel.node_kernel import NodeKernel
from ipvsproxy.model.net import Family, Protocol, parse_address
from ipvsproxy.model.plan import Operation, Outcome, Verb
from ipvsproxy.model.rules import Backend, ChainKey, Rule, SetMatch, Side, Skeleton, Verdict, render
from ipvsproxy.model.sets import IP_SETS, SetEntries, SetKind
from ipvsproxy.model.virtual_servers import VirtualServerKey
from ipvsproxy.translate import skeleton
from ipvsproxy.translate.translation_settings import LocalMode, Settings
from tests.kernel.nftables.examples import REAL, an_entry_of, load, nft
from tests.support import builders, fake_netlink

pytestmark = REAL

FAMILIES = pytest.mark.parametrize("family", Family, ids=lambda family: family.label)
NETWORKS = builders.networks("10.244.0.0/16", "fd00:10:244::/56")
LONG = VirtualServerKey(Protocol.SCTP, parse_address("fd00:1234:5678:9abc:def0:1234:5678:9abc"), 65535)
REFUSED = [*(VirtualServerKey(Protocol.TCP, parse_address(text), 80) for text in ("192.0.2.1", "2001:db8::1")), LONG]
SETTINGS = (
    Settings(backend=Backend.NFTABLES, cluster_networks=NETWORKS),
    Settings(backend=Backend.NFTABLES, detect_local=LocalMode.BRIDGE_INTERFACE, local_interface="br0"),
    Settings(backend=Backend.NFTABLES, detect_local=LocalMode.INTERFACE_NAME_PREFIX, local_interface="cali"),
    Settings(backend=Backend.NFTABLES, masquerade_all=True, random_fully=dict.fromkeys(Family, False)),
)


def every_rule(family: Family, settings: Settings = SETTINGS[0]) -> Skeleton:
    """The rules of a node on which every set has entries."""
    own = ["10.244.3.0/24", "fd00:10:244:3::/64"]
    view = dataclasses.replace(builders.node_view(node_object=builders.node(pod_networks=own)), connected=builders.networks(*own))
    return skeleton.build_skeleton(family, settings, view, set(SetKind), REFUSED, routed={REFUSED[0]})


def few_rules(family: Family) -> Skeleton:
    return skeleton.build_skeleton(family, Settings(backend=Backend.NFTABLES), builders.node_view(), set(), [])


@pytest.fixture
def driver(network_namespace: None) -> Iterator[NftRulesDriver]:
    """A driver in a namespace in which all sets exist."""
    with contextlib.closing(NftSetsDriver()) as sets:
        assert not [one for one in sets.apply([Operation(Verb.ADD, ip_set) for ip_set in IP_SETS.values()]) if one.error]
    with contextlib.closing(NftRulesDriver(chains=skeleton.CHAINS, jumps=skeleton.JUMPS)) as made:
        yield made


def apply(driver: NftRulesDriver, verb: Verb, rules: Skeleton) -> Outcome:
    (outcome,) = driver.apply([Operation(verb, rules)])
    return outcome


def chain(family: Family, table: str, name: str) -> str:
    return nft("list", "chain", "inet", "ipvsproxy", nft_rule.chain_name(family, table, name))


@FAMILIES
@pytest.mark.parametrize("settings", SETTINGS, ids=("ClusterCIDR", "BridgeInterface", "InterfaceNamePrefix", "all"))
def test_written_rules_are_read_back_unchanged(driver: NftRulesDriver, family: Family, settings: Settings) -> None:
    wanted = every_rule(family, settings)
    assert apply(driver, Verb.SET, wanted).error == ""
    assert driver.observe(family) == wanted.in_force
    assert apply(driver, Verb.SET, few_rules(family)).error == ""
    assert driver.observe(family) == few_rules(family).in_force


@FAMILIES
def test_the_text_of_the_longest_rule_fits_into_the_comment_of_a_rule(family: Family) -> None:
    texts = [render(rule, family) for rules in every_rule(family).chains.values() for rule in rules]
    assert max(map(len, texts)) <= nft_message.TEXT_LIMIT
    assert not [text for text in texts if '"' in text], "nft takes no such comment"


@FAMILIES
@pytest.mark.parametrize("settings", SETTINGS, ids=("ClusterCIDR", "BridgeInterface", "InterfaceNamePrefix", "all"))
def test_no_two_successive_rules_of_a_chain_are_equal(family: Family, settings: Settings) -> None:
    chains = every_rule(family, settings).chains.values()
    assert not [one for rules in chains for one, other in itertools.pairwise(rules) if one == other]


@pytest.mark.parametrize("settings", SETTINGS, ids=("ClusterCIDR", "BridgeInterface", "InterfaceNamePrefix", "all"))
def test_loading_a_saved_ruleset_restores_all_sets_and_the_next_write_repairs_the_rules(
    driver: NftRulesDriver, settings: Settings
) -> None:
    wanted = {family: every_rule(family, settings) for family in Family}
    assert [apply(driver, Verb.SET, one).error for one in wanted.values()] == ["", ""]
    entries = [an_entry_of(ip_set) for ip_set in IP_SETS.values()]
    with contextlib.closing(NftSetsDriver()) as sets:
        sets.apply([Operation(Verb.ADD, SetEntries.of(entry)) for entry in entries])
        before = sets.observe(tuple(IP_SETS))
        saved = nft("list", "ruleset")
        nft("flush", "ruleset")
        load(saved)  # a booting host loads saved rules in the same way
        assert sets.observe(tuple(IP_SETS)) == before
        assert {one.set for one in entries} == {name for name, one in before.items() if one.entries}
    for family, one in wanted.items():
        observed = driver.observe(family)
        assert observed.chains.keys() == one.chains.keys()
        assert apply(driver, Verb.SET, one).error == ""
        assert driver.observe(family) == one.in_force


HARMS = (
    "flush chain inet ipvsproxy IPv6-nat-KUBE-SERVICES",
    "insert rule inet ipvsproxy IPv6-nat-KUBE-SERVICES accept",
    'insert rule inet ipvsproxy IPv6-nat-KUBE-SERVICES drop comment "-j ACCEPT"',
    "flush chain inet ipvsproxy IPv6-nat-POSTROUTING",
    "add rule inet ipvsproxy IPv6-nat-OUTPUT meta nfproto ipv6 jump IPv6-nat-KUBE-SERVICES",
    "insert rule inet ipvsproxy IPv6-filter-INPUT accept",
    "add rule inet ipvsproxy IPv6-nat-POSTROUTING masquerade",
    "flush table inet ipvsproxy",
    "add table inet ipvsproxy { flags dormant ; }",
    "flush chain inet ipvsproxy IPv6-nat-PREROUTING ; delete chain inet ipvsproxy IPv6-nat-PREROUTING",
    "chain inet ipvsproxy IPv6-filter-INPUT { policy drop ; }",
    "delete table inet ipvsproxy",
)


def test_changes_by_other_programs_are_observed_and_repaired(driver: NftRulesDriver) -> None:
    wanted = every_rule(Family.IPV6)
    apply(driver, Verb.SET, wanted)
    for harm in HARMS:
        nft(harm)
        assert driver.observe(Family.IPV6) != wanted.in_force, harm
        if "delete table" in harm:  # the sets must be restored before the rules
            with contextlib.closing(NftSetsDriver()) as sets:
                sets.apply([Operation(Verb.ADD, ip_set) for ip_set in IP_SETS.values()])
        assert apply(driver, Verb.SET, wanted).error == "", harm
        assert driver.observe(Family.IPV6) == wanted.in_force, harm


@FAMILIES
def test_rules_of_other_programs_in_our_base_chain_are_reported_together_with_our_jumps(
    driver: NftRulesDriver, family: Family
) -> None:
    wanted = every_rule(family)
    apply(driver, Verb.SET, wanted)
    name = f"{family.label}-filter-INPUT"
    number = "ipv4" if family is Family.IPV4 else "ipv6"
    twice = f"{family.label}-filter-KUBE-NODE-PORT"
    nft("insert", "rule", "inet", "ipvsproxy", name, "counter", "accept", "comment", '"let all in"')
    nft("add", "rule", "inet", "ipvsproxy", name, "tcp", "dport", "22", "drop")
    nft("add", "rule", "inet", "ipvsproxy", name, "meta", "nfproto", number, "jump", twice)
    observed = driver.observe(family)
    assert observed.jumps == frozenset(wanted.jumps)
    assert observed.chains == wanted.in_force.chains
    ((key, rules),) = observed.strange_rules.items()
    handles = re.findall("# handle ([0-9]+)", nft("--handle", "list", "chain", "inet", "ipvsproxy", name))
    assert key == ChainKey("filter", "INPUT")
    assert list(rules) == [
        f"counter, accept, with the comment 'let all in' (inet ipvsproxy {name} handle {handles[1]})",
        f"meta, cmp, payload, cmp, drop (inet ipvsproxy {name} handle {handles[-2]})",
        f"meta, cmp, jump {twice} (inet ipvsproxy {name} handle {handles[-1]})",
    ]
    nft("delete", "rule", "inet", "ipvsproxy", name, "handle", handles[1])
    assert driver.observe(family).strange_rules[key] == rules[1:]
    assert apply(driver, Verb.SET, wanted).error == ""
    assert driver.observe(family) == wanted.in_force


@pytest.mark.parametrize(
    ("harm", "reason"),
    [
        ("add table inet ipvsproxy { flags dormant ; }", "the table inet ipvsproxy is dormant"),
        ("chain inet ipvsproxy IPv4-filter-INPUT { policy drop ; }", "its base chain has another type, hook, priority or policy"),
    ],
)
def test_a_jump_that_packets_cannot_reach_is_reported_with_the_reason(driver: NftRulesDriver, harm: str, reason: str) -> None:
    wanted = every_rule(Family.IPV4)
    apply(driver, Verb.SET, wanted)
    nft(harm)
    observed = driver.observe(Family.IPV4)
    assert observed.jumps | observed.idle_jumps.keys() == frozenset(wanted.jumps)
    assert set(observed.idle_jumps.values()) == {reason}
    assert observed != wanted.in_force


def test_a_rule_without_our_comment_in_our_chain_is_reported_with_its_expressions(driver: NftRulesDriver) -> None:
    apply(driver, Verb.SET, few_rules(Family.IPV4))
    name = "IPv4-nat-KUBE-LOAD-BALANCER"
    nft("add", "rule", "inet", "ipvsproxy", name, "counter", "return")
    (handle,) = re.findall("return # handle ([0-9]+)", nft("--handle", "list", "chain", "inet", "ipvsproxy", name))
    rules = driver.observe(Family.IPV4).chains[ChainKey("nat", "KUBE-LOAD-BALANCER")]
    assert rules[-1] == f"a rule without a text of ours: counter, return (inet ipvsproxy {name} handle {handle})"


def test_a_rule_counts_as_changed_if_one_of_its_several_nftables_rules_is_missing(driver: NftRulesDriver) -> None:
    wanted = every_rule(Family.IPV6)
    apply(driver, Verb.SET, wanted)
    ranges = ChainKey("filter", "KUBE-SOURCE-RANGES-FIREWALL")
    name = nft_rule.chain_name(Family.IPV6, ranges.table, ranges.chain)
    listed = nft("--handle", "list", "chain", "inet", "ipvsproxy", name)
    handles = re.findall("SOURCE-CID .*# handle ([0-9]+)", listed)
    nft("delete", "rule", "inet", "ipvsproxy", name, "handle", handles[1])
    changed = [text for text in driver.observe(Family.IPV6).chains[ranges] if text.endswith(" (changed)")]
    assert (len(handles), len(changed)) == (Family.IPV6.bits, Family.IPV6.bits - 1)


@pytest.mark.parametrize(
    "text",
    [
        "-j RETURN",
        "-s",
        "--match-set KUBE-CLUSTER-IP",
        "-m set --match-set KUBE-LOOP-BACK dst,dst -j ACCEPT",
        "-m mark --mark 0x1ffffffff/0x1ffffffff -j ACCEPT",
    ],
)
def test_a_rule_whose_comment_differs_from_the_text_of_the_rule_counts_as_changed(driver: NftRulesDriver, text: str) -> None:
    apply(driver, Verb.SET, few_rules(Family.IPV4))
    nft("add", "rule", "inet", "ipvsproxy", "IPv4-nat-KUBE-SERVICES", "counter", "comment", f'"{text}"')
    assert driver.observe(Family.IPV4).chains[ChainKey("nat", "KUBE-SERVICES")][-1] == f"{text} (changed)"


def test_tables_and_chains_of_other_programs_are_neither_observed_nor_changed(driver: NftRulesDriver) -> None:
    load("table inet theirs { chain IPv4-nat-KUBE-SERVICES { accept; }; }\ntable inet ipvsproxy { chain theirs { }; }\n")
    before = nft("list", "table", "inet", "theirs")
    assert driver.observe(Family.IPV4).chains == {}
    for verb in (Verb.SET, Verb.REMOVE):
        assert apply(driver, verb, few_rules(Family.IPV4)).error == ""
    assert nft("list", "table", "inet", "theirs") == before
    assert re.findall("chain .*", nft("list", "table", "inet", "ipvsproxy")) == ["chain theirs {"]


def test_rules_of_one_family_are_written_and_removed_without_changing_the_other_family(driver: NftRulesDriver) -> None:
    for family in Family:
        apply(driver, Verb.SET, every_rule(family))
    assert apply(driver, Verb.REMOVE, every_rule(Family.IPV4)).error == ""
    assert driver.observe(Family.IPV4).chains == {}
    assert driver.observe(Family.IPV6) == every_rule(Family.IPV6).in_force


def test_a_failed_write_changes_nothing(driver: NftRulesDriver) -> None:
    apply(driver, Verb.SET, few_rules(Family.IPV4))
    with contextlib.closing(NftSetsDriver()) as sets:
        assert sets.apply([Operation(Verb.REMOVE, IP_SETS["KUBE-CLUSTER-IP"])])[0].error.endswith("in use by a rule")
    apply(driver, Verb.REMOVE, few_rules(Family.IPV4))
    nft("delete", "set", "inet", "ipvsproxy", "KUBE-CLUSTER-IP")
    outcome = apply(driver, Verb.SET, few_rules(Family.IPV4))
    assert "does not exist" in outcome.error
    assert driver.observe(Family.IPV4).chains == {}


def test_our_rules_are_written_even_if_other_rules_change_all_the_time(
    driver: NftRulesDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    generations = itertools.count(1)
    monkeypatch.setattr(nft_message, "generation", lambda _: next(generations))
    assert apply(driver, Verb.SET, few_rules(Family.IPV4)).error == ""
    with pytest.raises(KernelError, match="keep changing"):
        driver.observe(Family.IPV4)
    monkeypatch.undo()
    assert driver.observe(Family.IPV4) == few_rules(Family.IPV4).in_force


def test_a_rule_that_refers_to_an_unknown_set_causes_an_error_only_for_its_own_family(driver: NftRulesDriver) -> None:
    rule = Rule(set=SetMatch("THEIRS", (Side.DESTINATION,)), target=Verdict.DROP)
    wrong = Skeleton(family=Family.IPV4, chains={skeleton.CHAINS[0]: (rule,)}, jumps=())
    outcomes = driver.apply([Operation(Verb.SET, wrong), Operation(Verb.SET, few_rules(Family.IPV6))])
    assert [one.error for one in outcomes] == ["no set THEIRS of IPv4", ""]


@FAMILIES
def test_no_rules_remain_after_the_check_whether_a_family_is_usable(family: Family) -> None:
    with contextlib.closing(NftRulesDriver(chains=(), jumps=())) as made:
        assert made.try_writing(family) is None
        assert made.usable(family) is None
    assert nft("list", "ruleset") == ""


def test_rules_are_refused_if_the_kernel_does_not_support_their_family(tmp_path: pathlib.Path) -> None:
    with contextlib.closing(NftRulesDriver(chains=(), jumps=(), proc=tmp_path)) as made:
        assert made.try_writing(Family.IPV6) == ("the kernel has no IPv6", True)


def test_rules_are_found_by_their_text(driver: NftRulesDriver) -> None:
    apply(driver, Verb.SET, every_rule(Family.IPV6))
    found = driver.rules_with(" KUBE-6-NODE-PORT-UDP ", tuple(Family))
    assert len(found) == 1
    assert found[0].startswith("IPv6-nat-KUBE-NODE-PORT ")
    assert driver.rules_with(" KUBE-6-NODE-PORT-UDP ", [Family.IPV4]) == []


def put_theirs(more: str = "") -> str:
    """Add a chain and a set of another program to our table; return the text of a table with only this chain and this set."""
    content = "type filter hook input priority 10; policy accept; ip saddr @their-set drop;"
    load(f"table inet ipvsproxy {{ set their-set {{ type ipv4_addr; }}; chain theirs {{ {content} }}; }}\n")
    if more:
        nft(f"add rule inet ipvsproxy theirs {more}")
    shown = nft("list", "set", "inet", "ipvsproxy", "their-set") + nft("list", "chain", "inet", "ipvsproxy", "theirs")
    return "".join(line for line in shown.splitlines(keepends=True) if line[0] == "\t").replace("\n\tchain", "\n\n\tchain")


def test_switching_to_the_iptables_backend_keeps_chains_and_sets_of_other_programs(
    driver: NftRulesDriver, tmp_path: pathlib.Path
) -> None:
    for family in Family:
        apply(driver, Verb.SET, every_rule(family))
    theirs = put_theirs()
    (tmp_path / "sys/module/nf_tables").mkdir(parents=True)
    assert backends.describe_other(Backend.IPTABLES, tmp_path) == "nftables still holds the table inet ipvsproxy"
    assert backends.remove_table()
    assert nft("list", "ruleset") == f"table inet ipvsproxy {{\n{theirs}}}\n"
    assert not backends.remove_table(), "nothing of ours is left"
    assert backends.describe_other(Backend.IPTABLES, tmp_path) == ""


def test_our_chain_is_emptied_but_kept_while_another_program_jumps_to_it(driver: NftRulesDriver) -> None:
    apply(driver, Verb.SET, every_rule(Family.IPV4))
    put_theirs("jump IPv4-filter-KUBE-FORWARD")
    with pytest.raises(KernelError, match="it is in use"):
        backends.remove_table()
    assert re.findall("jump [^ \n]+", nft("list", "table", "inet", "ipvsproxy")) == ["jump IPv4-filter-KUBE-FORWARD"]


def test_a_table_that_changes_during_its_removal_is_read_again(driver: NftRulesDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    apply(driver, Verb.SET, few_rules(Family.IPV4))
    read, readings = nft_tables.own_table, itertools.count(1)

    def disturbed(channel: netlink.Channel) -> nft_tables.TableContent | None:
        found = read(channel)
        if next(readings) == 1:
            put_theirs()
        return found

    monkeypatch.setattr(nft_tables, "own_table", disturbed)
    assert backends.remove_table()
    assert next(readings) == 3
    assert "chain theirs" in nft("list", "ruleset")


@pytest.mark.parametrize(
    ("count", "expected"), [(0, ""), (1, "iptables still holds 1 ipset of ours"), (2, "iptables still holds 2 ipsets of ours")]
)
def test_the_nftables_backend_reports_how_many_of_our_ipsets_still_exist(
    count: int, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backends, "held_by_other", lambda *_: dict.fromkeys(list(IP_SETS)[:count]))
    assert backends.describe_other(Backend.NFTABLES) == expected


def test_cleanup_covers_only_the_backends_that_may_hold_our_objects(tmp_path: pathlib.Path) -> None:
    def to_clean() -> tuple[Backend, ...]:
        return backends.to_clean(skeleton.CHAINS, tmp_path)

    (tmp_path / "sys/module/nf_tables").mkdir(parents=True)
    assert to_clean() == (Backend.NFTABLES,), "there is nothing, and ipset is not loaded"
    load("table ip nat { chain DOCKER { }; }\n")
    assert to_clean() == (Backend.NFTABLES,)
    nft("add", "chain", "ip", "nat", "KUBE-SERVICES")
    assert to_clean() == (Backend.IPTABLES,)
    nft("add", "table", "inet", "ipvsproxy")
    assert to_clean() == (Backend.NFTABLES, Backend.IPTABLES), "a move was not finished"
    nft("delete", "table", "ip", "nat")
    assert to_clean() == (Backend.NFTABLES,)
    (tmp_path / "sys/module/ip_set").mkdir()
    assert to_clean() == (Backend.NFTABLES, Backend.IPTABLES)


@pytest.mark.parametrize(
    ("number", "reason", "is_certain"),
    [
        (errno.EINVAL, "this kernel has no nf_tables", True),
        (errno.ENOBUFS, "read the generation of nf_tables: No buffer space available", False),
    ],
)
def test_the_rules_of_nftables_are_not_usable_if_the_generation_of_nf_tables_cannot_be_read(
    number: int, reason: str, *, is_certain: bool
) -> None:
    made = NftRulesDriver(chains=(), jumps=(), connect=fake_netlink.refusing(number))
    assert made.usable(Family.IPV4) == Refusal(reason, is_certain=is_certain)


@pytest.mark.parametrize(
    ("failed", "reason", "is_certain"),
    [
        ({0: errno.EINVAL, 5: errno.ENOENT}, "the nf_tables of this kernel has no tables of the family inet", True),
        ({-1: errno.EPERM}, "the kernel refuses rules of nf_tables: this process lacks the capability NET_ADMIN", False),
        ({0: errno.ENOMEM}, "the kernel refuses rules of nf_tables: Cannot allocate memory", False),
    ],
)
def test_a_trial_write_returns_the_reason_if_the_kernel_refuses_the_rules(
    monkeypatch: pytest.MonkeyPatch, failed: dict[int, int], reason: str, *, is_certain: bool
) -> None:
    monkeypatch.setattr(nft_message, "run", lambda *_: failed)
    with contextlib.closing(NftRulesDriver(chains=(), jumps=())) as made:
        refusal = made.try_writing(Family.IPV4)
    assert refusal is not None
    assert refusal.reason.startswith(reason)
    assert refusal.is_certain is is_certain


@pytest.mark.parametrize("number", [errno.ENOBUFS, errno.EAGAIN, errno.EMFILE, 0])
def test_a_table_that_cannot_be_read_does_not_count_as_absent(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, number: int
) -> None:
    (tmp_path / "sys/module/nf_tables").mkdir(parents=True)
    monkeypatch.setattr(netlink.Channel, "ask", Mock(side_effect=KernelError(action="", errno=number, detail="lost")))
    with pytest.raises(KernelError, match="lost"):
        backends.to_clean(skeleton.CHAINS, tmp_path)
    with pytest.raises(KernelError, match="lost"):
        backends.held_by_other(Backend.IPTABLES, list(IP_SETS), tmp_path)


@pytest.mark.parametrize(
    ("number", "has_nf_tables", "backend"),
    [(errno.EINVAL, True, Backend.NFTABLES), (errno.EINVAL, False, Backend.IPTABLES), (errno.ENOBUFS, True, Backend.IPTABLES)],
)
def test_cleanup_skips_iptables_only_if_iptables_certainly_has_no_chains_and_the_kernel_has_nf_tables(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, number: int, backend: Backend, *, has_nf_tables: bool
) -> None:
    refuse = Mock(side_effect=KernelError(action="", errno=number))
    (tmp_path / "sys/module/nf_tables").mkdir(parents=True)
    monkeypatch.setattr(iptables_tables, "has_chain", refuse)
    if not has_nf_tables:
        monkeypatch.setattr(nft_message, "generation", refuse)
    assert backends.to_clean(skeleton.CHAINS, tmp_path) == (backend,)


@pytest.mark.parametrize("family", Family, ids=lambda family: family.label)
def test_cleanup_covers_iptables_if_a_legacy_table_of_iptables_exists(tmp_path: pathlib.Path, family: Family) -> None:
    (tmp_path / "proc/thread-self/net").mkdir(parents=True)
    name = "ip_tables_names" if family is Family.IPV4 else "ip6_tables_names"
    (tmp_path / "proc/thread-self/net" / name).write_text("nat\n")
    assert backends.to_clean(skeleton.CHAINS, tmp_path) == (Backend.IPTABLES,)


def test_a_node_with_the_nftables_backend_writes_its_rules_to_nftables_and_uses_no_iptables_table(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("ipvsproxy.kernel.node_kernel.IpvsDriver", lambda: None)
    node = NodeKernel(skeleton.CHAINS, skeleton.JUMPS, chosen=ChosenBackend(Backend.NFTABLES))
    program = node.rules.program(Family.IPV4)
    assert (program.variant, program.random_fully) == ("nftables", True)
    assert all(not place.is_used for place in node.leftover_rules.places({Family.IPV4: program}))
    node.rules.close()


@pytest.mark.parametrize(
    ("asked", "has_iptables", "missing", "expected"),
    [
        (Backend.IPTABLES, False, (), Backend.IPTABLES),
        (Backend.NFTABLES, True, (), Backend.NFTABLES),
        (Backend.AUTO, False, (), Backend.NFTABLES),
        (Backend.AUTO, True, (), Backend.IPTABLES),
        (Backend.AUTO, True, (host.Missing("hash:ip", ""),), Backend.NFTABLES),
    ],
)
def test_the_backend_is_chosen_from_the_flag_and_the_state_of_the_node(
    asked: Backend, missing: tuple[host.Missing, ...], expected: Backend, monkeypatch: pytest.MonkeyPatch, *, has_iptables: bool
) -> None:
    monkeypatch.setattr(host, "missing_set_types", lambda: missing)
    monkeypatch.setattr(shutil, "which", lambda _: "/sbin/iptables" if has_iptables else None)
    assert backends.choose(asked).backend is expected
