"""Covers reading the iptables tables of both variants directly from the kernel, without an iptables program.

The fingerprint of the rules changes when any program changes a rule, but not when packets are counted.
"""

import errno
import itertools
import pathlib
import socket
import subprocess
from unittest.mock import Mock

import pytest

from ipvsproxy.kernel.base import modules, netlink, nft_message, sockets
from ipvsproxy.kernel.base.errors import KernelError
from ipvsproxy.kernel.iptables import iptables_tables
from ipvsproxy.kernel.iptables import variant as iptables_variant
from ipvsproxy.kernel.iptables.iptables_tables import RuleChanges
from ipvsproxy.kernel.iptables.variant import Variant
from ipvsproxy.model.net import Family
from ipvsproxy.model.rules import ChainKey
from tests.support.left_rules import run

STRANGE = ChainKey("nat", "STRANGE")


@pytest.mark.usefixtures("network_namespace")
@pytest.mark.parametrize("family", Family)
def test_a_chain_is_found_only_in_the_family_that_has_the_chain(family: Family) -> None:
    change(family, Variant.NF_TABLES, "nat", "-N", "STRANGE")
    other = Family.IPV6 if family is Family.IPV4 else Family.IPV4
    assert iptables_tables.has_chain(family, lambda key: key == STRANGE)
    assert not iptables_tables.has_chain(family, lambda key: key == ChainKey("filter", "STRANGE"))
    assert not iptables_tables.has_chain(other, lambda _: True)


def test_a_truncated_answer_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets, "ask", lambda *_: b"nat\0")
    with pytest.raises(KernelError, match="the answer is incomplete"):
        iptables_tables.digest(Family.IPV4, "nat")


def test_an_unreadable_list_of_table_names_is_an_error_but_an_absent_list_means_no_tables(tmp_path: pathlib.Path) -> None:
    (tmp_path / "thread-self/net/ip_tables_names").mkdir(parents=True)
    with pytest.raises(KernelError, match="ip_tables_names"):
        iptables_tables.names(Family.IPV4, tmp_path)
    assert iptables_tables.names(Family.IPV6, tmp_path) == ()


CASES = list(itertools.product(Family, Variant))


def change(family: Family, variant: Variant, *arguments: str) -> None:
    """Change a table with an iptables program. Skip the test if the program or the table is not available."""
    run(iptables_variant.commands(variant)[family], "-t", *arguments)


HOST_PORTS = ("CNI-HOSTPORT-DNAT", "CNI-HOSTPORT-SETMARK", "CNI-DN-0123456789abcdef01234", "KUBE-HOSTPORTS", "KUBE-HP-ABCDEFGHIJ")


@pytest.mark.usefixtures("network_namespace")
@pytest.mark.parametrize(("family", "variant"), CASES)
def test_host_port_rules_in_the_variant_that_we_do_not_use_are_reported(family: Family, variant: Variant) -> None:
    ours = next(one for one in Variant if one != variant)
    for chain in HOST_PORTS:
        change(family, variant, "nat", "-N", f"MY-{chain}"[:28])
        change(family, variant, "nat", "-A", "OUTPUT", "-m", "comment", "--comment", chain, "-j", "ACCEPT")
        change(family, variant, "filter", "-N", chain)
    assert iptables_tables.host_ports_before_services(dict.fromkeys(Family, ours)) == ()
    for chain in HOST_PORTS:
        change(family, variant, "nat", "-N", chain)
        assert iptables_tables.host_ports_before_services(dict.fromkeys(Family, ours)) == (f"{variant} {family.label}",)
        change(family, variant, "nat", "-X", chain)
    change(family, variant, "nat", "-N", HOST_PORTS[0])
    assert iptables_tables.host_ports_before_services(dict.fromkeys(Family, variant)) == ()
    assert iptables_tables.host_ports_before_services(dict.fromkeys(Family, "nftables")) == ()


@pytest.mark.usefixtures("network_namespace")
@pytest.mark.parametrize("variant", Variant)
def test_host_port_rules_in_a_separate_nftables_table_are_reported_whichever_iptables_variant_we_use(variant: Variant) -> None:
    change(Family.IPV6, Variant.NF_TABLES, "nat", "-N", "SOME")
    subprocess.run(["nft", "add table ip6 cni_hostport; add chain ip6 cni_hostport hostports"], check=True)
    assert iptables_tables.host_ports_before_services(dict.fromkeys(Family, variant)) == ("nf_tables IPv6",)
    assert iptables_tables.host_ports_before_services(dict.fromkeys(Family, "nftables")) == ()


def test_no_chain_is_found_in_nf_tables_if_the_kernel_has_no_nf_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    noted = Mock()
    monkeypatch.setattr(modules, "note_no_nf_tables", noted)
    monkeypatch.setattr(netlink.Channel, "dump", Mock(side_effect=KernelError(action="read", errno=errno.EINVAL)))
    assert not iptables_tables.has_chain(Family.IPV4, lambda _: True)
    noted.assert_called_once_with()


def send_packet(family: Family) -> None:
    with socket.socket(socket.AF_INET if family is Family.IPV4 else socket.AF_INET6, socket.SOCK_DGRAM) as sending:
        sending.sendto(b"x", ("127.0.0.1" if family is Family.IPV4 else "::1", 9))


@pytest.mark.usefixtures("network_namespace")
@pytest.mark.parametrize(("family", "variant"), CASES)
def test_the_fingerprint_changes_if_a_rule_changes_but_not_if_a_packet_is_counted(family: Family, variant: Variant) -> None:
    change(family, variant, "nat", "-A", "OUTPUT", "-m", "comment", "--comment", "counts", "-j", "ACCEPT")
    change(family, variant, "filter", "-N", "SOME")
    changes = RuleChanges()
    before = changes.fingerprint(family, variant)
    send_packet(family)
    assert changes.fingerprint(family, variant) == before
    observed = [before]
    for arguments in (
        ("nat", "-I", "OUTPUT", "-j", "RETURN"),
        ("filter", "-A", "SOME", "-j", "RETURN"),
        ("filter", "-F", "SOME"),
        ("nat", "-N", "OTHER"),
    ):
        change(family, variant, *arguments)
        mark = changes.fingerprint(family, variant)
        assert mark not in observed[-1:]
        observed.append(mark)
    changes.close()


@pytest.mark.parametrize("family", Family)
def test_reading_the_fingerprint_of_a_table_fails_if_no_socket_can_be_opened(
    family: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "socket", Mock(side_effect=OSError(errno.EMFILE, "Too many open files")))
    with pytest.raises(KernelError, match=r"table nat: Too many open files") as caught:
        RuleChanges().fingerprint(family, "legacy")
    assert caught.value.errno == errno.EMFILE


def test_reading_the_fingerprint_of_a_table_fails_if_the_table_cannot_be_read() -> None:
    with pytest.raises(KernelError, match="read the IPv4 table no-such-table"):
        RuleChanges().fingerprint(Family.IPV4, "legacy", ("no-such-table",))


@pytest.mark.usefixtures("network_namespace")
@pytest.mark.parametrize("family", Family)
def test_a_trial_of_nf_tables_leaves_no_rule_or_table_behind(family: Family) -> None:
    run("nft", "list", "tables")  # skips the test if this kernel or host has no nf_tables
    assert iptables_tables.take_rules(family, "nf_tables")
    assert run("nft", "list", "tables") == ""
    assert ":" not in run(f"{iptables_variant.commands(Variant.NF_TABLES)[family]}-save")


def test_the_check_of_nf_tables_fails_if_the_trial_does_not_end_with_the_expected_error(monkeypatch: pytest.MonkeyPatch) -> None:
    for failed in ({}, {0: errno.EOPNOTSUPP}, {2: errno.EPERM}, {-1: errno.ENOENT}):
        monkeypatch.setattr(nft_message, "run", lambda *_, failed=failed: failed)
        assert not iptables_tables.take_rules(Family.IPV4, "nf_tables")
