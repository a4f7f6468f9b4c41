"""Rules of others that write packet marks, as ``iptables-save`` prints them."""

from ipvsproxy.kernel.iptables.mark_rules import ALL_BITS, mark_rules

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


def test_rules_before_ipvs_are_found_with_the_bits_that_they_write() -> None:
    assert [(rule.text.split()[1], rule.text.split()[3], rule.bits) for rule in mark_rules(SAVED)] == [
        ("mangle", "PREROUTING", 0x80),
        ("mangle", "OUTPUT", ALL_BITS),
        ("mangle", "PREROUTING", 0x1),
        ("filter", "cali-INPUT", 0xFFF00000),
        ("nat", "OUTPUT", ALL_BITS),
    ]
