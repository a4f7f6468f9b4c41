"""The clean-up of a node: the objects that it removes, reports and keeps.

Most tests use an in-memory kernel. A test on a real kernel shows that nothing of kube-proxy remains after a clean-up.

The tests of the command line are in ``tests/test_cli.py``.
"""

import contextlib
import dataclasses
import errno
import json
import pathlib
import shutil
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import pytest

from ipvsproxy import cli
from ipvsproxy.commands import cleanup
from ipvsproxy.config import load
from ipvsproxy.daemon.loop import leftover_removal
from ipvsproxy.kernel.base.errors import KernelError
from ipvsproxy.kernel.instance import Instance
from ipvsproxy.kernel.iptables import process as iptables_process
from ipvsproxy.kernel.iptables.iptables_driver import IptablesDriver
from ipvsproxy.kernel.iptables.variant import Variant, commands
from ipvsproxy.kernel.nftables.nft_rules_driver import NftRulesDriver
from ipvsproxy.model.kernel import TUNNEL_RECORD, Sysctl, render_record
from ipvsproxy.model.net import Family
from ipvsproxy.model.plan import Operation, Outcome, Verb
from ipvsproxy.model.rules import ChainKey, LeftRules, Reference, Rule, Verdict
from ipvsproxy.model.sets import IpSet, SetKind
from ipvsproxy.model.state import Observation
from ipvsproxy.model.virtual_servers import VirtualServer, VirtualServerSettings
from ipvsproxy.reconcile.virtual_servers.ownership import EVERYWHERE
from ipvsproxy.translate import skeleton
from ipvsproxy.translate.translation_settings import Settings, device_flags
from tests.support import builders, golden_fixtures, golden_state, lab, left_rules, left_tables, memory_node
from tests.support.fake_kernel import FakeKernel, KernelVirtualServer
from tests.support.left_rules import CHAIN, OTHER, USED, Tables, run
from tests.support.left_tables import IPV4, LEFT, MemoryTables
from tests.support.program import Ended, run_in_turn
from tests.support.virtual_time import in_virtual_time

FOREIGN = builders.frontend("192.0.2.1", 80)
CLUSTER_IP = builders.frontend(builders.CLUSTER_IP, 80)


@pytest.fixture
def kernel() -> FakeKernel:
    """A kernel that ipvsproxy has programmed, and that also has a virtual server of another program."""
    node = memory_node.MemoryNode()

    async def serve() -> None:
        async with node.running():
            node.begin_with(builders.service(), builders.endpoint_slice(builders.endpoint("10.244.0.5")), builders.node())
            await node.quiet()

    in_virtual_time(serve)()
    assert CLUSTER_IP in node.kernel.virtual_servers
    node.kernel.virtual_servers[FOREIGN] = KernelVirtualServer(VirtualServerSettings("rr"), {})
    node.kernel.forget()
    return node.kernel


def clean(
    kernel: FakeKernel,
    left: Tables | None = None,
    tables: MemoryTables | None = None,
    *,
    unlike_sets: Callable[[], Collection[IpSet]] = tuple,
    dry_run: bool = False,
    excluded: Sequence[str] = (),
) -> cleanup.Result:
    places = leftover_removal.of_iptables(left or Tables(), (USED, OTHER)) | leftover_removal.of_nftables(
        tables or MemoryTables()
    )
    node, result = cleanup.NodeToClean(kernel, [], places, unlike_sets=unlike_sets), cleanup.Result()
    cleanup.clean(node, builders.networks(*excluded), EVERYWHERE, result, dry_run=dry_run)
    return result


def test_a_cleanup_removes_all_our_objects_and_keeps_the_objects_of_other_programs(kernel: FakeKernel) -> None:
    result = clean(kernel)
    assert result.is_fine
    assert set(kernel.virtual_servers) == {FOREIGN}
    assert (kernel.sets, kernel.device, kernel.addresses) == ({}, False, set())
    assert not any(kernel.chains.values())
    assert not any(kernel.jumps.values())
    assert cleanup.render_text(result, dry_run=False) == "removed: 1 virtual server, 34 sets, 1 device, IPv4 rules, IPv6 rules\n"


def test_a_second_cleanup_finds_nothing_to_remove(kernel: FakeKernel) -> None:
    clean(kernel)
    kernel.forget()
    result = clean(kernel)
    assert result == cleanup.Result()
    assert kernel.applied == []
    assert cleanup.render_text(result, dry_run=False) == "removed: nothing, there was nothing of ours\n"
    assert cleanup.render_text(result, dry_run=True) == "would remove: nothing, there is nothing of ours\n"


@pytest.mark.parametrize("flag", [(), ("--dry-run",)], ids=["removal", "dry run"])
def test_a_cleanup_without_privileges_reports_only_the_missing_privileges(
    flag: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(iptables_process, "capabilities", lambda _: 0)
    lacking = "this process may not change the network (it has no CAP_NET_ADMIN)"
    assert cli.main(["cleanup", *flag]) == cleanup.NOT_CLEAN
    problem, removed = capsys.readouterr().out.splitlines()
    assert (lacking in problem, removed) == (True, "would remove: not known" if flag else "removed: nothing")
    assert cli.main(["cleanup", *flag, "--output=json"]) == cleanup.NOT_CLEAN
    document = json.loads(capsys.readouterr().out)
    assert (document["clean"], document["operations"], lacking in document["problems"][0]) == (False, [], True)


def test_a_dry_run_of_the_cleanup_lists_all_objects_and_changes_nothing(kernel: FakeKernel) -> None:
    before = memory_node.contents(kernel)
    result = clean(kernel, dry_run=True)
    assert memory_node.contents(kernel) == before
    lines = cleanup.render_text(result, dry_run=True).splitlines()
    assert lines[0] == f"would remove virtual server {CLUSTER_IP}"
    assert "would remove set KUBE-6-CLUSTER-IP" in lines
    assert lines[-1] == "would remove: 1 virtual server, 34 sets, 1 device, IPv4 rules, IPv6 rules"
    document = json.loads(cleanup.render_json(result, dry_run=True))
    assert document["operations"][0] == {"verb": "remove", "kind": "virtual_server", "name": "TCP 10.96.0.10:80", "error": ""}
    assert (document["dryRun"], document["clean"], document["problems"]) == (True, False, [])
    assert json.loads(cleanup.render_json(clean(kernel), dry_run=False))["clean"]


def test_virtual_servers_in_excluded_ranges_are_kept_and_reported(kernel: FakeKernel) -> None:
    result = clean(kernel, excluded=["10.96.0.0/16"])
    assert set(kernel.virtual_servers) == {FOREIGN, CLUSTER_IP}
    assert result.is_fine
    assert result.notes == ["virtual servers in excluded ranges: 1 stay"]


def test_cleanup_keeps_sets_and_addresses_while_one_of_our_virtual_servers_cannot_be_removed(kernel: FakeKernel) -> None:
    kernel.fail(lambda operation: isinstance(operation.item, VirtualServer))
    result = clean(kernel)
    assert [one.operation.item for one in result.outcomes.values() if one.error] == [
        VirtualServer(CLUSTER_IP, VirtualServerSettings("rr"))
    ]
    assert (kernel.device, len(kernel.sets)) == (True, 34)
    assert not any(kernel.chains.values()), "rules need no witnesses"
    assert result.problems == [
        "sets, device and local routes stay, because only they show which virtual servers are ours; run cleanup again"
    ]
    assert clean(kernel).is_fine
    assert set(kernel.virtual_servers) == {FOREIGN}


@pytest.mark.parametrize("part", ["virtual_servers", "addresses", "interface_addresses", "sets"])
def test_cleanup_reports_unreadable_kernel_objects_and_keeps_sets_and_device(kernel: FakeKernel, part: str) -> None:
    kernel.unreadable = {part}
    result = clean(kernel)
    assert f"{part} cannot be read" in result.problems
    assert len(kernel.sets) == 34
    assert kernel.device


def test_cleanup_fails_if_one_of_the_two_backends_cannot_remove_a_set(kernel: FakeKernel) -> None:
    result = clean(kernel)
    removal = Operation(Verb.REMOVE, IpSet(SetKind.CLUSTER_IP, Family.IPV4))
    assert not result.outcomes[str(removal)].error
    result.add([Outcome(removal, error="the set is in use")])
    result.add([Outcome(removal)])
    assert result.failures == ["the set is in use"]


OTHER_RULES = LeftRules(chains={skeleton.CHAINS[0]: 2})
MODE_RULES = LeftRules(chains={CHAIN: 2})


def test_a_node_that_has_only_leftover_rules_is_not_clean() -> None:
    left = Tables()
    left.put(USED, MODE_RULES)
    document = json.loads(cleanup.render_json(clean(FakeKernel(), left, dry_run=True), dry_run=True))
    assert not document["clean"]


@pytest.mark.parametrize("step", ["read", "remove"])
def test_cleanup_reports_rules_that_it_cannot_read_or_remove_but_still_removes_all_other_rules(
    kernel: FakeKernel, step: str
) -> None:
    left = Tables()
    left.put(OTHER, OTHER_RULES)
    left.put(USED, MODE_RULES)
    left.failing = {(step, OTHER)}
    result = clean(kernel, left)
    assert not result.is_fine
    assert left.held == {OTHER: OTHER_RULES, USED: LeftRules()}
    assert "the lock is held" in cleanup.render_text(result, dry_run=False)
    assert not kernel.device


def test_cleanup_reports_a_leftover_chain_and_names_the_foreign_rule_that_jumps_to_it(kernel: FakeKernel) -> None:
    left = Tables()
    reference = Reference(ChainKey("filter", "MINE"), f"-j {CHAIN.chain}", CHAIN)
    left.put(USED, LeftRules(chains={CHAIN: 2}, references=(reference,)))
    (failure,) = clean(kernel, left).failures
    assert failure == (
        "IPv4 rules left in nf_tables: filter/KUBE-SERVICES stays: the rule '-t filter -A MINE -j KUBE-SERVICES' leads to it"
    )


def test_a_table_that_iptables_cannot_print_is_reported_as_a_problem(kernel: FakeKernel) -> None:
    left = Tables()
    left.put(OTHER, LeftRules(hidden=frozenset({"nat"})))
    (problem,) = clean(kernel, left).problems
    assert "table nat holds rules of nft" in problem


def test_cleanup_asks_whether_a_proxy_still_runs_if_a_removed_object_comes_back(kernel: FakeKernel) -> None:
    class Restless(FakeKernel):
        def apply(self, operations: Sequence[Operation]) -> list[Outcome]:
            outcomes = super().apply(operations)
            self.device = True
            return outcomes

    result = clean(Restless())
    assert result.problems == ["kube-ipvs0 is back: is a kube-proxy or ipvsproxy still running here?"]


# Tests on a real kernel.


def run_program(*arguments: str) -> Ended:
    (ended,) = run_in_turn(arguments, within_s=300)
    return ended


@pytest.fixture
def node(network_namespace: None) -> Iterator[lab.Lab]:
    with lab.Lab() as node:
        yield node


def shell(*lines: str) -> None:
    for line in lines:
        subprocess.run(line.split(), check=True, capture_output=True)


def shown(command: str) -> list[str]:
    """The output of a program, without comment lines."""
    done = subprocess.run(command.split(), check=True, capture_output=True, text=True)
    return [line.strip() for line in done.stdout.splitlines() if not line.startswith("#")]


def test_cleanup_removes_sets_with_our_names_even_if_another_program_has_defined_them_differently(
    kernel: FakeKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = IpSet(SetKind.LOAD_BALANCER, Family.IPV6)
    kernel.apply([Operation(Verb.ADD, there)])
    observe = kernel.observe

    def without(names: Sequence[str], *others: Any) -> Observation:
        """The observation, without the set that another program has defined differently."""
        return observe([name for name in names if name != there.name], *others)

    monkeypatch.setattr(kernel, "observe", without)
    shown = clean(kernel, unlike_sets=lambda: [there], dry_run=True)
    assert [name for name, one in shown.outcomes.items() if one.operation.item == there] == [f"remove set {there.name}"]
    result = clean(kernel, unlike_sets=lambda: [there])
    assert result.outcomes.keys() == shown.outcomes.keys()
    assert kernel.sets == {}


@pytest.mark.parametrize("dry_run", [True, False])
def test_sets_that_cannot_be_read_are_reported_as_a_problem(kernel: FakeKernel, *, dry_run: bool) -> None:
    def unread() -> list[IpSet]:
        raise KernelError(action="list the set KUBE-CLUSTER-IP", errno=errno.EIO)

    result = clean(kernel, unlike_sets=unread, dry_run=dry_run)
    assert any("KUBE-CLUSTER-IP" in one for one in result.problems)


STRANGE = (
    "ipvsadm -A -t 192.0.2.9:80 -s rr",
    "ipvsadm -A -f 7 -s rr",
    "ipset create STRANGE hash:ip",
    "iptables -N KUBE-FIREWALL",
    "iptables -A KUBE-FIREWALL -m mark --mark 0x8000/0x8000 -j DROP",
    "iptables -A INPUT -j KUBE-FIREWALL",
    "iptables -t mangle -N KUBE-IPTABLES-HINT",
    "ip6tables -t mangle -N KUBE-KUBELET-CANARY",
)


def rules(program: str) -> set[str]:
    """All rules, and all chains except the built-in chains."""
    return {line.removesuffix(" [0:0]") for line in shown(f"{program}-save") if line.startswith("-A") or " - [" in line}


@pytest.mark.checklist(96)
@pytest.mark.kernel
@pytest.mark.usefixtures("node")
def test_all_leftovers_of_kube_proxy_are_removed_and_everything_else_stays() -> None:
    golden_state.restore_state(golden_fixtures.recording("default", "P0"))
    shell(*STRANGE)
    planned = run_program("cleanup", "--dry-run", "--output=json")
    assert planned.status == 0, planned.output
    assert "-A KUBE-FORWARD" in "".join(shown("iptables-save"))
    cleaned = run_program("--cleanup")
    assert cleaned.status == 0, cleaned.output + cleaned.error

    assert shown("ipvsadm -Sn") == ["-A -t 192.0.2.9:80 -s rr", "-A -f 7 -s rr"]
    assert [line.split()[1] for line in shown("ipset save")] == ["STRANGE"]
    assert rules("iptables") == {
        ":KUBE-FIREWALL -",
        ":KUBE-IPTABLES-HINT -",
        "-A INPUT -j KUBE-FIREWALL",
        "-A KUBE-FIREWALL -m mark --mark 0x8000/0x8000 -j DROP",
    }
    assert rules("ip6tables") == {":KUBE-KUBELET-CANARY -"}
    assert "kube-ipvs0" not in "".join(shown("ip -o link"))

    document = json.loads(planned.output)
    assert {operation["kind"] for operation in document["operations"]} == {"virtual_server", "rules", "set", "device"}
    again = run_program("cleanup", "--output=json")
    assert (again.status, json.loads(again.output)["operations"]) == (0, [])


@pytest.mark.kernel
@pytest.mark.usefixtures("network_namespace")
def test_cleanup_keeps_a_set_and_reports_the_reason_if_a_rule_of_another_program_uses_the_set() -> None:
    shell(
        "ipset create KUBE-CLUSTER-IP hash:ip,port",
        "ipset create KUBE-6-CLUSTER-IP hash:ip,port family inet6",
        "iptables -A INPUT -m set --match-set KUBE-CLUSTER-IP dst,dst -j ACCEPT",
    )
    cleaned = run_program("--cleanup")
    assert cleaned.status == 1
    assert "removed: 1 set\n" in cleaned.output
    assert (
        "failed: remove set KUBE-CLUSTER-IP: the set is in use by a rule: "
        "-A INPUT -m set --match-set KUBE-CLUSTER-IP dst,dst -j ACCEPT\n"
    ) in cleaned.output
    shell("iptables -F INPUT")
    assert run_program("--cleanup").status == 0


@pytest.mark.usefixtures("network_namespace")
def test_ipvsproxy_can_start_during_a_dry_run_of_the_cleanup(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(*_: object) -> tuple[()]:
        Instance().close()
        return ()

    monkeypatch.setattr("ipvsproxy.kernel.backends.to_clean", start)
    config = load.load(["--cleanup", "--dry-run"], hostname="node-1", read_file=lambda _: b"", command="cleanup")
    assert cleanup.run(config) == cleanup.CLEAN
    assert cleanup.run(dataclasses.replace(config, dry_run=False)) == cleanup.NOT_CLEAN


@pytest.mark.usefixtures("network_namespace")
@pytest.mark.parametrize("variant", Variant)
def test_cleanup_lists_and_removes_only_the_rules_of_kube_proxys_iptables_mode(variant: Variant) -> None:
    families = commands(variant)
    for family, program in families.items():
        run(f"{program}-restore", "--noflush", stdin=left_rules.iptables_mode(family))
    name = {Variant.NF_TABLES: "nf_tables", Variant.LEGACY: "legacy"}[variant]
    planned = run_program("cleanup", "--dry-run")
    assert f"would remove IPv4 rules left in {name}\nwould remove IPv6 rules left in {name}\n" in planned.output
    removed = f"removed: IPv4 rules left in {name}, IPv6 rules left in {name}"
    assert run_program("--cleanup").output.splitlines()[-1] == removed
    assert all(rules(program) == left_rules.OF_OTHERS for program in families.values())
    assert run_program("--cleanup").output.splitlines()[-1] == "removed: nothing, there was nothing of ours"


@pytest.mark.parametrize("dry_run", [False, True])
def test_a_table_that_has_kube_proxys_name_but_other_contents_is_kept_and_reported(kernel: FakeKernel, *, dry_run: bool) -> None:
    foreign = dataclasses.replace(LEFT, maps=frozenset())
    tables = MemoryTables({IPV4: foreign})
    result = clean(kernel, tables=tables, dry_run=dry_run)
    assert tables.held == {IPV4: foreign}
    assert result.is_fine
    assert result.left == {}
    assert result.notes == ["the table ip kube-proxy is not kube-proxy's, since it has no map service-ips"]


@pytest.mark.usefixtures("network_namespace")
def test_kube_proxys_nftables_tables_are_removed_from_a_real_kernel_without_the_nft_program(tmp_path: pathlib.Path) -> None:
    programs = {name: shutil.which(name) for name in ("nft", "iptables")}
    if programs["nft"] is None:
        pytest.skip("nft is not installed")
    with contextlib.closing(NftRulesDriver(chains=(), jumps=())) as driver:
        if refusal := driver.try_writing(Family.IPV4):
            pytest.skip(refusal.reason)
    foreign = "table inet kube-proxy { }\ntable ip6 kube-proxy { chain services { }\n }\n"
    run(
        "nft", "-f", "-", stdin=left_tables.nftables_mode(Family.IPV4, served={("10.96.0.1", 443): ("192.0.2.1", 6443)}) + foreign
    )
    environment = {"PATH": str(tmp_path)}
    command = (sys.executable, "-m", "ipvsproxy", "cleanup")
    planned, done = (
        subprocess.run((*command, *flags), capture_output=True, text=True, check=False, env=environment)
        for flags in (["--dry-run", "--output=json"], [])
    )
    assert [one["name"] for one in json.loads(planned.stdout)["operations"]] == ["IPv4 rules left in the table ip kube-proxy"]
    assert done.stdout.splitlines()[-1] == "removed: IPv4 rules left in the table ip kube-proxy", done
    assert "left out: the table ip6 kube-proxy is not kube-proxy's, since it has no chain nat-prerouting" in done.stdout
    listing = run("nft", "list", "tables").splitlines()
    assert "table ip kube-proxy" not in listing
    assert {"table inet kube-proxy", "table ip6 kube-proxy"} <= set(listing)


@pytest.mark.usefixtures("network_namespace")
@pytest.mark.parametrize("variant", Variant)
def test_cleanup_removes_rules_of_both_iptables_variants_if_the_kernel_supports_both_variants(variant: Variant) -> None:
    drivers = [IptablesDriver(chains=skeleton.CHAINS, jumps=skeleton.JUMPS, commands=commands(one)) for one in Variant]
    if refusal := next(filter(None, (driver.try_writing(Family.IPV4) for driver in drivers)), None):
        pytest.skip(f"this kernel does not do both: {refusal.reason}")
    nothing = skeleton.build_skeleton(Family.IPV4, Settings(), builders.node_view(), occupied=frozenset(), refused=())
    plain = {key: tuple(rule for rule in rules if not rule.set) for key, rules in nothing.chains.items()}
    for driver in drivers:
        (outcome,) = driver.apply([Operation(Verb.SET, dataclasses.replace(nothing, chains=plain))])
        assert outcome.error == ""
    shell(f"{commands(variant)[Family.IPV4]} -t mangle -N KUBE-IPTABLES-HINT")
    other = {Variant.NF_TABLES: "legacy", Variant.LEGACY: "nf_tables"}[variant]
    assert run_program("--cleanup").output.splitlines()[-1] == f"removed: IPv4 rules, IPv4 rules left in {other}"
    for driver in drivers:
        assert driver.observe(Family.IPV4).chains == {}


def test_cleanup_restores_the_settings_of_direct_return_before_it_removes_the_rules_of_direct_return() -> None:
    kernel, path = memory_node.new_kernel(), device_flags(Family.IPV4)
    kernel.sysctls |= {path: "0x81", "net/ipv4/conf/all/rp_filter": "0", "net/ipv4/vs/sloppy_tcp": "1"}
    kernel.sysctls[TUNNEL_RECORD] = render_record({"net/ipv4/conf/all/rp_filter": "2", path: "0x80"})
    kernel.chains[Family.IPV4][skeleton.SCOPE_CHAINS[0]] = (Rule(tunnel=True, target=Verdict.DROP),)
    clean(kernel)
    assert type(kernel.applied[0].item) is Sysctl
    assert (kernel.sysctls[path], kernel.sysctls["net/ipv4/conf/all/rp_filter"]) == ("0x80", "2")
    assert (kernel.sysctls["net/ipv4/vs/sloppy_tcp"], kernel.sysctls[TUNNEL_RECORD]) == ("1", ""), "no record, no change"


def test_cleanup_keeps_rules_and_sets_while_the_tunnel_device_that_they_guard_may_be_up() -> None:
    kernel, path = memory_node.new_kernel(), device_flags(Family.IPV4)
    guard = {skeleton.SCOPE_CHAINS[0]: (Rule(tunnel=True, target=Verdict.DROP),)}
    other = "net/ipv4/vs/sloppy_tcp"
    kernel.sysctls |= {path: "0x81", other: "1", TUNNEL_RECORD: render_record({path: "0x80", other: "0"})}
    kernel.chains[Family.IPV4] |= guard
    stays = "rules and sets stay, because a tunnel device of direct return may still be up; run cleanup again"
    kernel.fail(lambda operation: isinstance(operation.item, Sysctl), times=2)
    result = clean(kernel)
    assert (result.problems, len(result.failures)) == ([stays], 2)
    for unread in ("sysctls", "interface_addresses"):
        kernel.unreadable = {unread}
        assert clean(kernel).problems == [f"{unread} cannot be read", stays]
    assert (kernel.sysctls[path], kernel.chains[Family.IPV4]) == ("0x81", guard)
    kernel.unreadable = set()
    kernel.fail(lambda operation: operation.item.key == other)
    result = clean(kernel)
    assert (result.problems, len(result.failures)) == ([], 1), "a setting that is read-only in a container opens nothing"
    assert (kernel.sysctls[path], kernel.chains[Family.IPV4]) == ("0x80", {})
    assert clean(kernel).is_fine
