"""The iptables driver with the real programs of both variants, in a separate network namespace.

The ipvs match is not tested here, because it needs a kernel with ip_vs; test_contract.py covers it.
"""

import os
import pathlib
import shutil
import sys

import pytest

from ipvsproxy.kernel.iptables import iptables_driver as iptables
from ipvsproxy.kernel.iptables import process as iptables_process
from ipvsproxy.model.net import Family, Protocol, parse_network
from ipvsproxy.model.plan import Operation, Verb
from ipvsproxy.model.rules import (
    ChainKey,
    ConnectionState,
    InterfaceMatch,
    InvertMark,
    Jump,
    JumpTo,
    Masquerade,
    Rule,
    SetMark,
    SetMatch,
    Side,
    Skeleton,
    Verdict,
    render_jump,
)
from tests.kernel.drivers import run

pytestmark = pytest.mark.usefixtures("variant")
SERVICES = ChainKey("nat", "KUBE-SERVICES")
POSTROUTING = ChainKey("nat", "KUBE-POSTROUTING")
MARK = ChainKey("nat", "KUBE-MARK-MASQ")
NODE_PORT = ChainKey("filter", "KUBE-NODE-PORT")
IPVS_FILTER = ChainKey("filter", "KUBE-IPVS-FILTER")
JUMPS = (
    Jump("nat", "OUTPUT", "KUBE-SERVICES", "kubernetes service portals"),
    Jump("nat", "POSTROUTING", "KUBE-POSTROUTING", "kubernetes postrouting rules"),
    Jump("filter", "INPUT", "KUBE-NODE-PORT", "kubernetes health check rules"),
    Jump("filter", "INPUT", "KUBE-IPVS-FILTER", "kubernetes ipvs access filter"),
)
SET_NAME = "IPVSPROXY-TEST"


def every_kind_of_rule(family: Family) -> Skeleton:
    """A skeleton with every match and target that ipvsproxy uses, except the ipvs match."""
    v4 = family is Family.IPV4
    known = ConnectionState.RELATED, ConnectionState.ESTABLISHED
    marking = JumpTo(MARK.chain)
    sides = SetMatch(SET_NAME, (Side.DESTINATION, Side.DESTINATION))
    return Skeleton(
        family=family,
        chains={
            SERVICES: (
                Rule(source=parse_network("127.0.0.0/8" if v4 else "::1/128"), target=Verdict.RETURN),
                Rule(not_source=parse_network("10.244.0.0/16" if v4 else "fd00:10::/48"), set=sides, target=marking),
                Rule(not_interface=InterfaceMatch("cni0"), comment="a bridge", set=sides, target=marking),
                Rule(not_interface=InterfaceMatch("veth", is_prefix=True), comment="all of a kind", set=sides, target=marking),
                Rule(comment="kept apart", set=sides, not_from_bridge_port=True, from_elsewhere=True, target=Verdict.ACCEPT),
                Rule(comment="to us", set=sides, to_this_host=True, target=Verdict.ACCEPT),
                *(
                    Rule(protocol=protocol, comment="with type 'hash ip:port'", set=sides, target=Verdict.RETURN)
                    for protocol in Protocol
                ),
            ),
            POSTROUTING: (
                Rule(set=SetMatch(SET_NAME, (Side.SOURCE, Side.DESTINATION)), target=Masquerade()),
                Rule(not_mark=0x4000, target=Verdict.RETURN),
                Rule(target=InvertMark(0x4000)),
                Rule(comment="masqueraded", target=Masquerade(fully_random=True)),
            ),
            MARK: (Rule(target=SetMark(0x80000000)),),
            NODE_PORT: (
                Rule(comment="marked", mark=0x1, target=Verdict.ACCEPT),
                Rule(comment="known", connection_states=known, target=Verdict.ACCEPT),
            ),
            IPVS_FILTER: (
                Rule(connection_states=(ConnectionState.NEW,), set=sides, target=Verdict.REJECT),
                Rule(target=Verdict.DROP),
            ),
        },
        jumps=JUMPS,
    )


@pytest.fixture(params=["nft", "legacy"])
def variant(request: pytest.FixtureRequest, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """PATH contains only one variant of the iptables programs, and the tables are empty."""
    request.getfixturevalue("network_namespace")
    program = shutil.which(f"xtables-{request.param}-multi")
    if program is None:
        pytest.skip(f"xtables-{request.param}-multi is not installed")
    for command in ("iptables", "ip6tables"):
        for ending in ("", "-save", "-restore"):
            (tmp_path / f"{command}{ending}").symlink_to(program)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    if refusal := make_driver().try_writing(Family.IPV4):
        pytest.skip(f"this kernel does not do it: {refusal.reason}")
    return str(request.param)


def make_driver() -> iptables.IptablesDriver:
    skeleton = every_kind_of_rule(Family.IPV4)
    return iptables.IptablesDriver(chains=skeleton.chains, jumps=JUMPS)


def create_set(family: Family) -> None:
    run("ipset", "create", SET_NAME, "hash:ip,port", "family", "inet" if family is Family.IPV4 else "inet6")


def driver_beside_set(family: Family = Family.IPV4) -> tuple[iptables.IptablesDriver, Skeleton]:
    """Returns a driver and rules; creates the set that the rules refer to, so that the kernel accepts the rules."""
    create_set(family)
    return make_driver(), every_kind_of_rule(family)


def change(driver: iptables.IptablesDriver, verb: Verb, skeleton: Skeleton) -> str:
    (outcome,) = driver.apply([Operation(verb, skeleton)])
    return outcome.error


def built_in_rules(command: str) -> list[str]:
    return [line for line in run(f"{command}-save").splitlines() if line.startswith("-A ") and not line.startswith("-A KUBE-")]


@pytest.mark.parametrize("family", Family)
def test_written_rules_are_read_back_unchanged(variant: str, family: Family) -> None:
    driver, skeleton = driver_beside_set(family)
    assert driver.program(family).variant == {"nft": "nf_tables", "legacy": "legacy"}[variant]
    for _ in range(2):
        assert change(driver, Verb.SET, skeleton) == ""
        assert driver.observe(family) == skeleton.in_force


@pytest.mark.parametrize("family", Family)
def test_a_jump_that_another_program_deletes_between_two_writes_is_restored_by_the_second_write(family: Family) -> None:
    driver, skeleton = driver_beside_set(family)
    assert change(driver, Verb.SET, skeleton) == change(driver, Verb.SET, skeleton) == ""
    command = iptables.COMMANDS[family]
    assert len(built_in_rules(command)) == len(JUMPS), "each jump once"
    before = built_in_rules(command)
    run(command, "-t", "nat", "-D", "OUTPUT", "1")
    assert change(driver, Verb.SET, skeleton) == ""
    assert built_in_rules(command) == before
    assert driver.observe(family) == skeleton.in_force


@pytest.mark.skipif(
    not iptables_process.LIBRARY.exists(), reason="ipvsproxy was installed without a C compiler, and needs CAP_NET_RAW"
)
@pytest.mark.parametrize("family", Family)
def test_cap_net_admin_alone_suffices_to_write_and_read_every_kind_of_rule(family: Family) -> None:
    create_set(family)
    alone = ("setpriv", "--no-new-privs", "--bounding-set=-all,+net_admin", "--inh-caps=-all")
    there = (
        "from tests.kernel.iptables.test_programs import *\n"
        f"driver, skeleton = make_driver(), every_kind_of_rule(Family({family.value!r}))\n"
        "assert change(driver, Verb.SET, skeleton) == ''\n"
        f"assert driver.observe(Family({family.value!r})) == skeleton.in_force\n"
        "print('done')"
    )
    assert run(*alone, sys.executable, "-c", there) == "done\n"


@pytest.mark.parametrize("family", Family)
def test_jumps_on_a_new_host_are_in_the_same_order_as_the_jumps_of_kube_proxy(family: Family) -> None:
    driver, skeleton = driver_beside_set(family)
    command = iptables.COMMANDS[family]
    run(command, "-A", "INPUT", "-j", "ACCEPT")
    assert change(driver, Verb.SET, skeleton) == ""
    assert [line for line in built_in_rules(command) if line.startswith("-A INPUT")] == [
        '-A INPUT -m comment --comment "kubernetes ipvs access filter" -j KUBE-IPVS-FILTER',
        '-A INPUT -m comment --comment "kubernetes health check rules" -j KUBE-NODE-PORT',
        "-A INPUT -j ACCEPT",
    ]


def test_existing_jumps_keep_their_position_and_missing_jumps_are_inserted_at_the_top() -> None:
    driver, skeleton = driver_beside_set()
    change(driver, Verb.SET, skeleton)
    run("iptables", "-I", "INPUT", "-j", "ACCEPT")
    run("iptables", "-D", "INPUT", "-m", "comment", "--comment", "kubernetes health check rules", "-j", "KUBE-NODE-PORT")
    again = ("-m", "comment", "--comment", "kubernetes ipvs access filter", "-j", "KUBE-IPVS-FILTER")
    run("iptables", "-I", "INPUT", *again)
    assert change(driver, Verb.SET, skeleton) == ""
    assert [line.rsplit(" ", 1)[1] for line in built_in_rules("iptables") if line.startswith("-A INPUT")] == [
        "KUBE-NODE-PORT",
        "ACCEPT",
        "KUBE-IPVS-FILTER",
    ]


def test_chains_and_rules_of_other_programs_stay_when_our_rules_are_written_and_removed() -> None:
    driver, skeleton = driver_beside_set()
    run("iptables", "-N", "STRANGE")
    run("iptables", "-A", "STRANGE", "-j", "DROP")
    run("iptables", "-t", "nat", "-A", "POSTROUTING", "-j", "MASQUERADE")
    before = run("iptables", "-S"), run("iptables", "-t", "nat", "-S")
    assert change(driver, Verb.SET, skeleton) == ""
    assert change(driver, Verb.REMOVE, skeleton) == ""
    assert (run("iptables", "-S"), run("iptables", "-t", "nat", "-S")) == before
    assert change(driver, Verb.REMOVE, skeleton) == ""


def test_our_chain_is_emptied_and_reported_but_not_deleted_if_a_foreign_rule_jumps_to_it() -> None:
    driver, skeleton = driver_beside_set()
    change(driver, Verb.SET, skeleton)
    run("iptables", "-t", "nat", "-A", "OUTPUT", "-p", "tcp", "-j", MARK.chain)
    assert change(driver, Verb.REMOVE, skeleton) == (
        "nat/KUBE-MARK-MASQ is empty, but stays: the rule '-A OUTPUT -p tcp -j KUBE-MARK-MASQ' leads to it"
    )
    assert driver.observe(Family.IPV4).chains == {MARK: ()}


@pytest.mark.parametrize("family", Family)
def test_a_successful_trial_write_leaves_no_rules_behind(family: Family) -> None:
    driver = make_driver()
    assert driver.usable(family) is None
    assert driver.try_writing(family) is None
    assert "KUBE" not in run(f"{iptables.COMMANDS[family]}-save")


def move_behind(jump: Jump, rule: str) -> None:
    """Remove a jump, and append the jump again behind a rule of another program."""
    ours = render_jump(jump)
    sent = [f"-{verb} {jump.source} {text}\n" for verb, text in (("D", ours), ("D", rule), ("A", rule), ("A", ours))]
    run("iptables-restore", "--noflush", stdin=f"*{jump.table}\n{''.join(sent)}COMMIT\n")


def test_our_jump_is_put_back_only_a_few_times_if_another_program_keeps_moving_it() -> None:
    driver, skeleton = driver_beside_set()
    change(driver, Verb.SET, skeleton)
    jump, strange = JUMPS[0], "-d 192.0.2.1/32 -j RETURN"
    run("iptables", "-t", "nat", "-A", jump.source, *strange.split())
    assert jump in driver.observe(Family.IPV4).jumps
    for _ in range(iptables.PUT_BACK_LIMIT):
        move_behind(jump, strange)
        assert jump not in driver.observe(Family.IPV4).jumps
        change(driver, Verb.SET, skeleton)
        rules = [rule for rule in built_in_rules("iptables") if rule.startswith(f"-A {jump.source} ")]
        assert rules.index(f"-A {jump.source} {render_jump(jump)}") < rules.index(f"-A {jump.source} {strange}")
        assert jump in driver.observe(Family.IPV4).jumps
    move_behind(jump, strange)
    assert jump in driver.observe(Family.IPV4).jumps, "somebody wants it so"
