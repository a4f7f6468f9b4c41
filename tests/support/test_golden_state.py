"""Reading the kernel's state in the form of the recordings. ``tests/packets`` reads restored recordings from a kernel."""

import copy

from tests.support import golden_fixtures, golden_state


def test_every_kind_of_difference_is_found() -> None:
    recorded = golden_fixtures.recording("default", "P0")
    changed = copy.deepcopy(dict(recorded))
    changed["virtual_servers"]["TCP 10.96.9.1:80"]["persistent"] = 1
    del changed["real_servers"]["TCP 10.96.1.1:80 -> 10.244.1.11:8080"]
    changed["ipsets"]["KUBE-IPVS-IPS"]["members"].append("10.9.9.9")
    changed["iptables"]["v4/nat/KUBE-SERVICES"].reverse()
    changed["sysctls"]["net.ipv4.vs.conntrack"] = "0"
    differing = golden_state.differences(recorded, changed, golden_state.KERNEL_SECTIONS)
    assert {section: [(row, kind) for row, kind, _, _ in rows] for section, rows in differing.items()} == {
        "virtual_servers": [("TCP 10.96.9.1:80", "different")],
        "real_servers": [("TCP 10.96.1.1:80 -> 10.244.1.11:8080", "missing")],
        "ipset KUBE-IPVS-IPS": [("10.9.9.9", "extra")],
        "iptables v4/nat/KUBE-SERVICES": [("(order)", "different")],
        "sysctls": [("net.ipv4.vs.conntrack", "different")],
    }


def test_all_options_in_a_line_of_ipvsadm_are_parsed() -> None:
    virtual_servers, real_servers = golden_state.parse_ipvs(
        "-A --sctp-service [fd00::1]:80 -s mh -p 600 -M 64 -b mh-port\n-a --sctp-service [fd00::1]:80 -r [fd00::2]:8080 -g -w 0\n"
    )
    assert virtual_servers == {"SCTP [fd00::1]:80": {"scheduler": "mh", "persistent": 600, "netmask": "64", "flags": "mh-port"}}
    assert real_servers == {"SCTP [fd00::1]:80 -> [fd00::2]:8080": {"forward": "route", "weight": 0}}


def test_rules_of_other_programs_are_omitted_and_empty_chains_are_kept() -> None:
    text = "*nat\n:OUTPUT ACCEPT [0:0]\n:KUBE-A - [0:0]\n:B - [0:0]\n-A OUTPUT -j KUBE-A\n-A OUTPUT -j B\n-A B -j LOG\n"
    assert golden_state.parse_rules("v4", text) == {"v4/nat/KUBE-A": [], "v4/nat/OUTPUT": ["-A OUTPUT -j KUBE-A"]}
