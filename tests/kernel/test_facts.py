"""The facts about a host that ``doctor`` reads. The tests of the drivers cover reading from iptables and nftables."""

import os
import pathlib
import socket
import sys
from unittest.mock import Mock

import pytest

from ipvsproxy.kernel import facts, rivals
from ipvsproxy.kernel.base.errors import KernelError
from ipvsproxy.kernel.iptables.variant import Variant, VariantChoice
from ipvsproxy.model.net import Family
from tests.support import neighbours
from tests.support.programs import make_program


@pytest.mark.parametrize(("family", "address"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")])
def test_a_listening_socket_is_reported_with_the_name_of_its_process(family: socket.AddressFamily, address: str) -> None:
    with socket.socket(family, socket.SOCK_STREAM) as listening:
        try:
            listening.bind((address, 0))
        except OSError as error:
            pytest.skip(f"{address}: {error.strerror}")
        listening.listen()
        port = listening.getsockname()[1]
        assert str(os.getpid()) in facts.listeners([port])[port]
    assert facts.listeners([port]) == {}


def test_a_python_program_is_reported_by_the_name_of_its_script(tmp_path: pathlib.Path) -> None:
    for words, name in (
        (["/usr/bin/python3", "/usr/local/bin/ipvsproxy", "run"], "ipvsproxy"),
        (["/usr/local/bin/kube-proxy", "--config=/etc/x", "more"], "kube-proxy"),
        (["python3", "-m", "ipvsproxy"], "ipvsproxy"),
        (["python3", "-i"], "python3"),
        ([], "?"),
    ):
        (tmp_path / "cmdline").write_bytes("\0".join(words).encode())
        assert rivals._name(tmp_path) == name
    assert rivals._name(tmp_path / "ended") == "?"


@pytest.mark.skipif(sys.byteorder == "big", reason="there, the kernel shows other text")
@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("0100007F", "127.0.0.1"),
        ("0000000000000000FFFF00000100007F", "127.0.0.1"),
        ("B80D0120000000000000000001000000", "2001:db8::1"),
    ],
)
def test_the_address_of_a_socket_is_parsed_from_the_format_that_the_kernel_prints(text: str, address: str) -> None:
    assert str(rivals._address(text)) == address


def test_the_state_of_lo_is_read_from_the_kernel_and_from_networkd(tmp_path: pathlib.Path) -> None:
    assert facts.loopback(tmp_path) == facts.Loopback(is_up=True, networkd="")
    for folder in ("sys/class/net/lo", "run/systemd/netif/links"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "sys/class/net/lo/flags").write_text("0x8\n")
    (tmp_path / "run/systemd/netif/links/1").write_text("# private\nADMIN_STATE=unmanaged\nOPER_STATE=carrier\n")
    assert facts.loopback(tmp_path) == facts.Loopback(is_up=False, networkd="unmanaged")
    (tmp_path / "sys/class/net/lo/flags").write_text("0x9\n")
    (tmp_path / "run/systemd/netif/links/1").write_text("OPER_STATE=carrier\n")
    assert facts.loopback(tmp_path) == facts.Loopback(is_up=True, networkd="")


def test_an_interface_is_a_bridge_if_it_has_a_folder_named_bridge(tmp_path: pathlib.Path) -> None:
    for name in ("cni0/bridge", "eth0", "docker0/bridge"):
        (tmp_path / "sys/class/net" / name).mkdir(parents=True)
    assert facts.bridges(tmp_path) == ("cni0", "docker0")
    assert facts.bridges(tmp_path / "nothing") == ()


@pytest.mark.parametrize(
    ("program", "variant", "is_legacy"),
    [
        ("iptables", Variant.LEGACY, True),
        ("iptables", Variant.NF_TABLES, False),
        ("ip6tables-legacy", Variant.NF_TABLES, True),
        ("iptables-nft", Variant.LEGACY, False),
    ],
)
def test_the_output_of_an_iptables_program_is_read_only_if_the_program_lists_legacy_tables(
    program: str, variant: Variant, *, is_legacy: bool
) -> None:
    choice = VariantChoice(dict(zip(Family, ("iptables", "ip6tables"), strict=True)), variant, "")
    found = facts._legacy_tables({program: neighbours.DOCKER_IPTABLES}, choice)
    assert [str(table) for table in found] == ([f"{program} filter"] if is_legacy else [])


def test_facts_that_cannot_be_read_are_reported() -> None:
    fail = Mock(side_effect=KernelError(action="read the tables", detail="the answer is incomplete"))
    assert facts._attempt(fail, "") == ("", ("read the tables: the answer is incomplete",))


def test_an_iptables_program_that_cannot_be_started_is_reported_but_one_that_fails_is_not(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_program(tmp_path, "iptables-save", "echo '*nat'")
    make_program(tmp_path, "ip6tables-save", "exit 1")
    make_program(tmp_path, "other-save")
    (tmp_path / "other-save").write_text("of another machine")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    choice = VariantChoice({Family.IPV4: "iptables", Family.IPV6: "ip6tables"}, Variant.LEGACY, "")
    assert rivals.listings_of_rules([], [choice.commands]) == ({"iptables": "*nat\n"}, [])
    choice = VariantChoice({Family.IPV4: "iptables", Family.IPV6: "other"}, Variant.LEGACY, "")
    assert rivals.listings_of_rules([], [choice.commands]) == (
        {"iptables": "*nat\n"},
        [f"other-save: {tmp_path}/other-save: Exec format error"],
    )


SAVED = """\
*mangle
:PREROUTING ACCEPT [0:0]
:KUBE-IPVSPROXY-MARK - [0:0]
-A PREROUTING -i eni+ -m comment --comment "primary" -j CONNMARK --restore-mark --nfmask 0x80 --ctmask 0x80
-A PREROUTING -j KUBE-IPVSPROXY-ARRIVAL
-A KUBE-IPVSPROXY-MARK -j SET --map-set KUBE-IPVSPROXY-SCOPE dst,dst --map-mark
-A OUTPUT -j CONNMARK --restore-mark
-A PREROUTING -p tcp -m tcp --dport 80 -j TPROXY --on-port 8080 --on-ip 0.0.0.0 --tproxy-mark 0x1/0x1
-A POSTROUTING -j MARK --set-xmark 0x1/0x1
COMMIT
*filter
-A cali-INPUT -j MARK --set-xmark 0x0/0xfff00000
-A INPUT -m mark --mark 0x1/0x1 -j ACCEPT
COMMIT
*nat
-A KUBE-MARK-MASQ -j MARK --set-xmark 0x4000/0x4000
-A KUBE-POSTROUTING -j MARK --set-xmark 0x4000/0x0
-A OUTPUT -j SET --map-set others dst --map-mark
COMMIT
"""


def test_rules_that_may_change_marks_before_ipvs_are_found_with_the_bits_that_they_write() -> None:
    assert [(rule.text.split()[1], rule.text.split()[3], rule.bits) for rule in facts.mark_rules(SAVED)] == [
        ("mangle", "PREROUTING", 0x80),
        ("mangle", "OUTPUT", facts.ALL_BITS),
        ("mangle", "PREROUTING", 0x1),
        ("filter", "cali-INPUT", 0xFFF00000),
        ("nat", "OUTPUT", facts.ALL_BITS),
    ]
