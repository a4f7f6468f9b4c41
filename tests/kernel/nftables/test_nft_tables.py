"""Covers what ipvsproxy finds out from nf_tables about rules of other programs: how these rules treat packets to Services.

Tests with the mark ``real`` use the nf_tables of this machine.
"""

import shutil
import subprocess

import pytest
from pyroute2.netlink import NETLINK_NETFILTER

from ipvsproxy.kernel import rivals
from ipvsproxy.kernel.base import modules, netlink
from ipvsproxy.kernel.base.errors import KernelError
from ipvsproxy.kernel.nftables import nft_tables
from ipvsproxy.model.net import Protocol
from ipvsproxy.model.rules import BaseChain, NftTable
from tests.kernel.nftables.examples import load
from tests.support import fake_netlink, neighbours

real = pytest.mark.skipif(shutil.which("nft") is None, reason="nft is not installed")


def read() -> dict[str, NftTable]:
    return {str(table): table for table in nft_tables.read_tables()}


@real
@pytest.mark.usefixtures("network_namespace")
@pytest.mark.parametrize(
    ("definition", "is_closed"),
    [
        ("type filter hook input priority 10; policy drop; accept", True),
        ("type filter hook input priority 10; policy drop;", True),
        ("type filter hook input priority 10; ct state established accept; reject with icmpx admin-prohibited", True),
        ("type filter hook input priority 10; counter log drop", True),
        ("type filter hook input priority 10; tcp dport 22 drop", False),
        ("type filter hook input priority 10; limit rate 3/second drop", False),
        ("type filter hook input priority 10; drop; accept", False),
        ("type filter hook input priority 10; jump other", False),
        ("type filter hook input priority 10;", False),
        ("type nat hook prerouting priority -100; policy drop;", False),
        ("tcp dport 22 accept; drop", False),
    ],
)
def test_a_chain_with_policy_drop_refuses_packets_that_no_rule_accepts(definition: str, *, is_closed: bool) -> None:
    load(f"table inet firewall {{ chain other {{ }}\n chain one {{ {definition}\n }}\n }}\n")
    assert read()["inet firewall"].closed == (("one",) if is_closed else ())


@pytest.mark.parametrize(("target", "is_closed"), [("DROP", True), ("REJECT", True), ("LOG", False)])
def test_a_chain_of_iptables_nft_counts_as_closed_if_its_last_rule_drops_or_rejects_every_packet(
    target: str, *, is_closed: bool
) -> None:
    rule: list[nft_tables.Expression] = [("counter", {(1,): bytes(8)}), ("target", {(1,): f"{target}\0".encode()})]
    assert nft_tables._is_closed(BaseChain("filter", "input", 0), rule) is is_closed


def test_an_answer_about_a_table_is_refused_as_unparsable_if_the_answer_has_no_header() -> None:
    def answer(sent: bytes) -> list[fake_netlink.Answer]:
        sequence = fake_netlink.sequences(sent)[-1]
        return [fake_netlink.message(sequence, b""), fake_netlink.done(sequence)]

    channel = netlink.Channel(NETLINK_NETFILTER, lambda _: fake_netlink.FakeSocket(answer), lambda _: None)
    with pytest.raises(KernelError, match="cannot be parsed"):
        nft_tables.names(channel)


@pytest.mark.parametrize(
    ("chains", "sets", "has_others", "has_ours"),
    [(["IPv4-nat"], [], True, True), ([], ["KUBE-LOOP-BACK"], True, True), ([], [], True, False), ([], [], False, True)],
)
def test_a_table_counts_as_ours_if_it_is_empty_or_has_our_chains_or_sets(
    chains: list[str], sets: list[str], *, has_others: bool, has_ours: bool
) -> None:
    assert nft_tables.TableContent(chains, sets, has_others=has_others).has_ours is has_ours


@real
@pytest.mark.usefixtures("network_namespace")
def test_our_own_chains_are_left_out_when_tables_are_read() -> None:
    ours = "chain IPv4-filter-INPUT { type filter hook input priority -5; policy drop; }\n"
    load(f"table inet ipvsproxy {{ {ours} }}\n")
    assert read() == {}
    load("table inet ipvsproxy { chain theirs { type filter hook input priority 10; policy drop; }\n }\ntable ip ipvsproxy { }\n")
    load("table inet other { chain own { }\n }\n")
    assert {name: (set(table.chains), table.closed) for name, table in read().items()} == {
        "inet ipvsproxy": ({"theirs"}, ("theirs",)),
        "inet other": ({"own"}, ()),
        "ip ipvsproxy": (set(), ()),
    }


@real
@pytest.mark.usefixtures("network_namespace")
def test_only_rules_that_redirect_a_single_port_are_recognised_as_host_ports() -> None:
    load(neighbours.PORTMAP_NFTABLES)
    load(neighbours.DOCKER_NFTABLES)
    others = (
        "tcp sport 80 redirect to 1",
        "tcp dport != 80 redirect to 1",
        "tcp dport 80 accept",
        "tcp dport { 80, 81 } redirect to 1",
        "tcp dport 80-90 redirect to 1",
        "tcp dport 80 snat to 10.0.0.1",
        "dnat to 10.0.0.1",
        "ip daddr 192.0.2.0/24 tcp dport 80 redirect to 1",
        "ip daddr 192.0.2.0/25 tcp dport 80 redirect to 1",
        "ip daddr { 192.0.2.1, 192.0.2.2 } tcp dport 80 redirect to 1",
        "udplite dport 80 redirect to 1",
        "dccp dport 80 redirect to 1",
    )
    load("".join(f"table ip other {{ chain c{number} {{ {one}\n }}\n }}\n" for number, one in enumerate(others)))
    load("table ip6 own { chain one { ip6 daddr fd00::1 udp dport 53 redirect to 1053\n }\n }\n")
    load("table inet ipvsproxy { chain one { tcp dport 80 redirect to 1\n }\n }\n")
    found = [rule for one in nft_tables.rules() if (rule := rivals.nftables_rule(*one))]
    assert {rule.text for rule in found} == {
        "table ip cni_hostport chain hostports: tcp dport 80",
        "table ip docker-bridges chain nat-prerouting-and-output: tcp dport 8080",
        "table ip6 own chain one: to fd00::1/128, udp dport 53",
    }
    assert {str(rule.destination) for rule in found} == {"None", "fd00::1/128"}
    assert [rule for rule in found if rule.has(Protocol.TCP, 8080)] == [rule for rule in found if "docker" in rule.text]
    assert set(found) <= set(rivals.read([]).rules)


@real
@pytest.mark.usefixtures("network_namespace")
def test_rules_of_iptables_nft_are_read_without_running_iptables() -> None:
    subprocess.run(("iptables-nft-restore",), input=neighbours.DOCKER_IPTABLES, check=True, text=True)
    assert read()["ip filter"].closed == ("FORWARD",)


@real
@pytest.mark.usefixtures("network_namespace")
def test_the_tables_of_other_programs_in_all_families_are_listed_but_our_table_is_not() -> None:
    load("table inet ipvsproxy { }\ntable arp one { }\ntable bridge two { }\ntable netdev three { }\ntable ip6 four { }\n")
    assert set(read()) == {"arp one", "bridge two", "netdev three", "ip6 four"}


def test_no_tables_are_read_if_nf_tables_is_not_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modules, "may_have_nf_tables", lambda: False)
    assert nft_tables.read_tables() == ()


def test_tables_of_iptables_legacy_are_read_from_the_output_of_iptables_save() -> None:
    (filtering,) = nft_tables.legacy_filters("iptables-legacy", neighbours.DOCKER_IPTABLES)
    assert str(filtering) == "iptables-legacy filter"
    assert filtering.chains["FORWARD"] == BaseChain("filter", "forward", 0, drops=True)
    assert filtering.closed == ("FORWARD",)
    refusing = (
        "*filter\n:INPUT ACCEPT [0:0]\n-A INPUT -i lo -j ACCEPT\n-A INPUT -j REJECT --reject-with icmp-port-unreachable\nCOMMIT\n"
    )
    (table,) = nft_tables.legacy_filters("iptables-legacy", refusing)
    assert table.closed == ("INPUT",)
    (table,) = nft_tables.legacy_filters("iptables-legacy", refusing.replace("-A INPUT -j", "-A INPUT -p tcp -j"))
    assert table.closed == ()
