"""Kernel objects of other programs on the same node: keepalived's virtual servers, docker's rules and sets.

One of the virtual servers has a firewall mark.

If the kernel has nf_tables, there is also a table of another program in nf_tables.
"""

import re

from tests.support import golden_state, nft_state
from tests.support.commands import run

DEVICE = "foreign0"
SET = "FOREIGN-SET"
CHAIN = "FOREIGN"
JUMP = f"-j {CHAIN}"

_IPVS = """\
-A -t 192.0.2.200:80 -s wlc
-a -t 192.0.2.200:80 -r 10.244.1.11:8080 -m -w 7
-A -u 192.0.2.200:53 -s sh -p 300
-a -u 192.0.2.200:53 -r 10.244.1.11:8053 -m -w 0
-A -f 7 -s wlc
-a -f 7 -r 10.244.1.11:8080 -m -w 3
"""
VIRTUAL_SERVERS, REAL_SERVERS = golden_state.parse_ipvs(_IPVS)
_SETS = f"create {SET} hash:ip,port family inet maxelem 128\nadd {SET} 10.96.0.10,tcp:80\n"
RULES = f"""\
*nat
:{CHAIN} - [0:0]
-A {CHAIN} -d 192.0.2.201/32 -j RETURN
-I PREROUTING {JUMP}
-A OUTPUT {JUMP}
COMMIT
*filter
:{CHAIN} - [0:0]
-A {CHAIN} -m set --match-set {SET} dst,dst -j RETURN
-A FORWARD {JUMP}
COMMIT
"""
TABLE = ("inet", "foreign")
_NFT_RULES = """\
table inet foreign {
  set KUBE-CLUSTER-IP { type ipv4_addr; elements = { 192.0.2.201 } }
  chain KUBE-SERVICES { type filter hook input priority -4; policy accept; ip daddr @KUBE-CLUSTER-IP return; }
}
"""
_LINKS = f"link add {DEVICE} type dummy\naddress add 192.0.2.200/32 dev {DEVICE}\n"


def add(*, virtual_servers_only: bool = False) -> None:
    """Add all objects of the other programs; with ``virtual_servers_only``, add only their virtual servers."""
    run("ipvsadm", "--restore", stdin=_IPVS)
    if virtual_servers_only:
        return
    run("ipset", "restore", stdin=_SETS)
    run("iptables-restore", "--noflush", stdin=RULES)
    run("ip", "-batch", "-", stdin=_LINKS)
    run("nft", "-f", "-", stdin=_NFT_RULES, check=False)  # fails without nf_tables


def put_back_after_flush() -> None:
    """After ``nft flush ruleset``, add the rules of the other programs again.

    If iptables keeps its rules in nf_tables, the flush has removed these rules too, and they are added again.
    """
    run("nft", "-f", "-", stdin=_NFT_RULES)
    if f":{CHAIN} " not in run("iptables-save"):
        run("iptables-restore", "--noflush", stdin=RULES)


def remove() -> None:
    """Remove the network device of the other programs; clearing the tables does not remove this device."""
    run("ip", "link", "delete", DEVICE)


def read() -> tuple[str, ...]:
    """All objects of the other programs except the virtual servers, as text for comparison."""
    rules = [line for line in run("iptables-save").splitlines() if re.search(rf"\b{CHAIN}\b", line)]
    sets = run("ipset", "save", SET).splitlines()
    addresses = [
        line.split()[3] for line in run("ip", "-oneline", "address", "show", "dev", DEVICE).splitlines() if "inet " in line
    ]
    tables = [str((kind, {**one, "handle": 0})) for kind, one in nft_state.listing(TABLE)]
    return (*(re.sub(r"\[\d+:\d+\]", "", line) for line in rules), *sets[1:], *addresses, *tables)
