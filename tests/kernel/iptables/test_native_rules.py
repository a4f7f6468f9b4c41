"""Covers the iptables driver with the real programs, for a table that has our rules and also a native nft rule.

A native nft rule is a rule of another program that nft can show, but iptables cannot. ``iptables-nft-save`` reports a table with
a native nft rule as incompatible, and exits with status 0. In such a table, iptables can still insert rules (``-I``) and replace
whole chains, but cannot delete rules (``-D``).
"""

import contextlib
import json
import shutil
from collections import Counter

import pytest

from ipvsproxy.kernel.iptables import iptables_driver as iptables
from ipvsproxy.kernel.iptables.iptables_tables import RuleChanges
from ipvsproxy.model.net import Family
from ipvsproxy.model.plan import Verb
from ipvsproxy.model.rules import ObservedSkeleton
from tests.kernel.drivers import run
from tests.kernel.iptables.test_programs import (
    IPVS_FILTER,
    JUMPS,
    SERVICES,
    change,
    driver_beside_set,
    every_kind_of_rule,
    make_driver,
    variant,
)

__all__ = ["variant"]
pytestmark = [
    pytest.mark.usefixtures("variant"),
    pytest.mark.parametrize("variant", ["nft"], indirect=True),
    pytest.mark.skipif(shutil.which("nft") is None, reason="nft is not installed"),
]

NATIVE = "ct state established,related accept"


def insert_native_rule(chain: str = "INPUT") -> str:
    """Insert a native nft rule as the first rule of a chain of the table filter, and return the handle of the rule."""
    done = json.loads(run("nft", "--json", "--echo", "--handle", "insert", "rule", "ip", "filter", chain, *NATIVE.split()))
    return str(done["nftables"][-1]["insert"]["rule"]["handle"])


def delete_rule(handle: str) -> None:
    run("nft", "delete", "rule", "ip", "filter", "INPUT", "handle", handle)


def jumps_there() -> Counter[str]:
    """The number of jumps from the built-in chains to each of our chains, in all tables."""
    listed = json.loads(run("nft", "--json", "list", "ruleset", "ip"))["nftables"]
    targets = (
        part["jump"]["target"]
        for one in listed
        if "rule" in one and not one["rule"]["chain"].startswith("KUBE-")
        for part in one["rule"]["expr"]
        if "jump" in part
    )
    return Counter(targets)


def rules_in(chain: str) -> int:
    """The number of rules in a chain of the table filter."""
    listed = json.loads(run("nft", "--json", "list", "chain", "ip", "filter", chain))["nftables"]
    return sum("rule" in one for one in listed)


def assert_in_force() -> None:
    skeleton = every_kind_of_rule(Family.IPV4)
    assert set(jumps_there()) == {jump.target for jump in JUMPS}
    assert rules_in(IPVS_FILTER.chain) == len(skeleton.chains[IPVS_FILTER])
    assert NATIVE in run("nft", "list", "chain", "ip", "filter", "INPUT"), "what is somebody else's stays"


def observed(driver: iptables.IptablesDriver) -> ObservedSkeleton:
    return driver.observe(Family.IPV4)


def test_a_new_process_can_write_all_tables_but_cannot_read_a_table_with_a_native_rule() -> None:
    driver, skeleton = driver_beside_set()
    run("iptables", "-A", "INPUT", "-j", "ACCEPT")
    insert_native_rule()
    assert observed(driver).hidden == {"filter"}
    assert change(driver, Verb.SET, skeleton) == ""
    assert_in_force()
    assert observed(driver).chains[SERVICES] == skeleton.in_force.chains[SERVICES]


def test_a_native_rule_added_after_our_rules_does_not_prevent_changes_of_our_rules() -> None:
    driver, skeleton = driver_beside_set()
    assert change(driver, Verb.SET, skeleton) == ""
    handle = insert_native_rule()
    assert observed(driver) == skeleton.in_force
    for _ in range(3):
        assert change(driver, Verb.SET, skeleton) == ""
    assert_in_force()
    assert set(jumps_there().values()) == {1}, "a jump that cannot be seen is not written again and again"
    delete_rule(handle)
    assert observed(driver) == skeleton.in_force
    assert not observed(driver).hidden


def test_listing_a_table_that_iptables_cannot_show_does_not_change_the_fingerprint_of_the_rules() -> None:
    run("iptables", "-A", "INPUT", "-j", "ACCEPT")
    insert_native_rule()
    with contextlib.closing(RuleChanges()) as changes:
        before = changes.fingerprint(Family.IPV4, "nf_tables")
        assert observed(make_driver()).hidden == {"filter"}
        assert changes.fingerprint(Family.IPV4, "nf_tables") == before
        run("iptables", "-A", "INPUT", "-j", "ACCEPT")
        assert changes.fingerprint(Family.IPV4, "nf_tables") != before


def test_a_jump_of_an_earlier_process_is_not_duplicated_if_iptables_cannot_show_the_table() -> None:
    before, skeleton = driver_beside_set()
    assert change(before, Verb.SET, skeleton) == ""
    handle = insert_native_rule()
    restarted = make_driver()
    assert change(restarted, Verb.SET, skeleton) == ""
    assert_in_force()
    delete_rule(handle)
    assert change(restarted, Verb.SET, skeleton) == ""
    assert set(jumps_there().values()) == {1}


def test_a_native_rule_in_our_chain_is_replaced_by_our_rule() -> None:
    driver, skeleton = driver_beside_set()
    assert change(driver, Verb.SET, skeleton) == ""
    insert_native_rule(IPVS_FILTER.chain)
    assert change(driver, Verb.SET, skeleton) == ""
    assert observed(driver) == skeleton.in_force
    assert not observed(driver).hidden


def test_no_rule_is_removed_from_a_table_that_iptables_cannot_show() -> None:
    driver, skeleton = driver_beside_set()
    assert change(driver, Verb.SET, skeleton) == ""
    insert_native_rule()
    assert "table filter holds rules of nft" in change(driver, Verb.REMOVE, skeleton)
    assert_in_force()
