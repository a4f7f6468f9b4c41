"""Tests of the comparison of kernel states with recordings.

The tests in ``tests/packets`` restore recordings into a kernel, and read the state back from the kernel.
"""

import copy

from tests.support import golden_fixtures, golden_state


def test_the_comparison_with_a_recording_finds_every_kind_of_difference() -> None:
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
