"""Rules of other programs on the same node, in the form in which the other programs write them.

The rules of Docker are the listings that Docker's own tests generate (moby/moby,
integration/network/bridge/iptablesdoc/generated/usernet-portmap.md and nftablesdoc/generated/usernet-portmap.md). In these
listings, the host port 8080 leads to a container at 192.0.2.2:80.

The rules of kindnet are the rules that kindnet's tests expect (package ``masq`` of kindnet), for the ranges of the lab's pods.

The rules of portmap, the CNI plug-in for host ports, are the rules that portmap's source describes for iptables and for nftables
(containernetworking/plugins, plugins/meta/portmap).

The rules of Felix, Calico's program on each node, are the rules that its source describes for IPVS (projectcalico/calico,
felix/rules). The rules contain no policies, and the workloads are behind the interface ``cni0``. A match on the network
10.244.0.0/16 replaces Calico's match on its set of pod pools.
"""

DOCKER_IPTABLES = """\
*nat
:PREROUTING ACCEPT [0:0]
:INPUT ACCEPT [0:0]
:OUTPUT ACCEPT [0:0]
:POSTROUTING ACCEPT [0:0]
:DOCKER - [0:0]
-A PREROUTING -m addrtype --dst-type LOCAL -j DOCKER
-A OUTPUT ! -d 127.0.0.0/8 -m addrtype --dst-type LOCAL -j DOCKER
-A POSTROUTING -s 192.0.2.0/24 ! -o bridge1 -j MASQUERADE
-A DOCKER ! -i bridge1 -p tcp -m tcp --dport 8080 -j DNAT --to-destination 192.0.2.2:80
COMMIT
*filter
:INPUT ACCEPT [0:0]
:FORWARD DROP [0:0]
:OUTPUT ACCEPT [0:0]
:DOCKER - [0:0]
:DOCKER-BRIDGE - [0:0]
:DOCKER-CT - [0:0]
:DOCKER-FORWARD - [0:0]
:DOCKER-USER - [0:0]
-A FORWARD -j DOCKER-USER
-A FORWARD -j DOCKER-FORWARD
-A DOCKER -d 192.0.2.2/32 ! -i bridge1 -o bridge1 -p tcp -m tcp --dport 80 -j ACCEPT
-A DOCKER ! -i bridge1 -o bridge1 -j DROP
-A DOCKER-BRIDGE -o bridge1 -j DOCKER
-A DOCKER-CT -o bridge1 -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT
-A DOCKER-FORWARD -j DOCKER-CT
-A DOCKER-FORWARD -j DOCKER-BRIDGE
-A DOCKER-FORWARD -i bridge1 -j ACCEPT
COMMIT
"""
"""Docker's rules for ``iptables-restore``. The policy of FORWARD is ``DROP``, as Docker sets it when Docker itself enables
forwarding."""

PORTMAP = """\
*nat
:CNI-DN-0123456789abcdef01234 - [0:0]
:CNI-HOSTPORT-DNAT - [0:0]
:CNI-HOSTPORT-MASQ - [0:0]
:CNI-HOSTPORT-SETMARK - [0:0]
-A PREROUTING -m addrtype --dst-type LOCAL -j CNI-HOSTPORT-DNAT
-A OUTPUT -m addrtype --dst-type LOCAL -j CNI-HOSTPORT-DNAT
-A POSTROUTING -m comment --comment "CNI portfwd requiring masquerade" -j CNI-HOSTPORT-MASQ
-A CNI-DN-0123456789abcdef01234 -p tcp -m tcp --dport 80 -j DNAT --to-destination 10.244.0.12:8080
-A CNI-HOSTPORT-DNAT -p tcp -m multiport --dports 80 -j CNI-DN-0123456789abcdef01234
-A CNI-HOSTPORT-MASQ -m mark --mark 0x2000/0x2000 -j MASQUERADE
-A CNI-HOSTPORT-SETMARK -m comment --comment "CNI portfwd masquerade mark" -j MARK --set-xmark 0x2000/0x2000
COMMIT
"""
"""Portmap's rules for ``iptables-restore``: the lab's pod ``p2`` has the host port 80."""

PORTMAP_NFTABLES = """\
table ip cni_hostport {
        comment "CNI portmap plugin"
        chain hostports { tcp dport 80 dnat to 10.244.0.12:8080; }
        chain hostip_hostports { }
        chain prerouting {
                type nat hook prerouting priority dstnat; policy accept;
                jump hostip_hostports
                jump hostports
        }
        chain output {
                type nat hook output priority -100; policy accept;
                jump hostip_hostports
                fib daddr type local jump hostports
        }
}
"""
"""Portmap's rules for the host port 80, as input of ``nft -f``."""

DOCKER_NFTABLES = """\
table ip docker-bridges {
        map filter-forward-in-jumps { type ifname : verdict; elements = { "bridge1" : jump filter-forward-in__bridge1 }; }
        map filter-forward-out-jumps { type ifname : verdict; elements = { "bridge1" : jump filter-forward-out__bridge1 }; }
        map nat-postrouting-out-jumps { type ifname : verdict; elements = { "bridge1" : jump nat-postrouting-out__bridge1 }; }
        chain filter-forward-in__bridge1 {
                ct state established,related counter accept
                iifname "bridge1" counter accept comment "ICC"
                ip daddr 192.0.2.2 tcp dport 80 counter accept
                counter drop comment "UNPUBLISHED PORT DROP"
        }
        chain filter-forward-out__bridge1 {
                ct state established,related counter accept
                counter accept comment "OUTGOING"
        }
        chain nat-postrouting-out__bridge1 { oifname != "bridge1" ip saddr 192.0.2.0/24 counter masquerade comment "MASQUERADE"; }
        chain nat-prerouting-and-output { iifname != "bridge1" tcp dport 8080 counter dnat to 192.0.2.2:80 comment "DNAT"; }
        chain filter-FORWARD {
                type filter hook forward priority filter; policy accept;
                oifname vmap @filter-forward-in-jumps
                iifname vmap @filter-forward-out-jumps
        }
        chain nat-OUTPUT {
                type nat hook output priority -100; policy accept;
                ip daddr != 127.0.0.0/8 fib daddr type local counter jump nat-prerouting-and-output
        }
        chain nat-POSTROUTING {
                type nat hook postrouting priority srcnat; policy accept;
                iifname vmap @nat-postrouting-out-jumps
        }
        chain nat-PREROUTING {
                type nat hook prerouting priority dstnat; policy accept;
                fib daddr type local counter jump nat-prerouting-and-output
        }
        chain raw-PREROUTING {
                type filter hook prerouting priority raw; policy accept;
                ip daddr 192.0.2.2 iifname != "bridge1" counter drop comment "DROP DIRECT ACCESS"
        }
}
"""
"""For ``nft -f``."""

_FLANNEL = """\
table {ip} flannel-{label} {{
        comment "rules for flannel-{label}"
        chain postrtg {{
                comment "chain to manage traffic masquerading by flannel"
                type nat hook postrouting priority srcnat; policy accept;
                meta mark 0x00004000 return
                {ip} saddr {node} {ip} daddr {pods} return
                {ip} saddr {pods} {ip} daddr {node} return
                {ip} saddr != {node} {ip} daddr {pods} return
                {ip} saddr {pods} {ip} daddr != {multicast} masquerade fully-random
                {ip} saddr != {pods} {ip} daddr {pods} masquerade fully-random
        }}
        chain forward {{
                comment "chain to accept flannel traffic"
                type filter hook forward priority filter; policy accept;
                {ip} saddr {pods} accept
                {ip} daddr {pods} accept
        }}
}}
"""
FLANNEL = _FLANNEL.format(
    ip="ip", label="ipv4", node="10.244.0.0/24", pods="10.244.0.0/16", multicast="224.0.0.0/4"
) + _FLANNEL.format(ip="ip6", label="ipv6", node="fd00:10:244::/64", pods="fd00:10:244::/56", multicast="ff00::/8")
"""Flannel's rules for ``nft -f``, with the ranges of the lab's pods."""

KINDNET = """\
table inet kindnet-ipmasq {
        set noMasqV4 { type ipv4_addr; flags interval; auto-merge; elements = { 10.244.0.0/16 }; }
        set noMasqV6 { type ipv6_addr; flags interval; auto-merge; elements = { fd00:10:244::/56 }; }
        chain postrouting {
                type nat hook postrouting priority srcnat - 10; policy accept;
                ct state established,related accept
                fib daddr type local accept
                ip daddr @noMasqV4 accept
                ip6 daddr @noMasqV6 accept
                counter masquerade
        }
}
"""
"""Kindnet's rules for ``nft -f``. The chain of kindnet runs before our chains."""

CALICO = """\
*raw
:cali-PREROUTING - [0:0]
-I PREROUTING -j cali-PREROUTING
-A cali-PREROUTING -j MARK --set-xmark 0x0/0xf0000
-A cali-PREROUTING -i cni+ -j MARK --set-xmark 0x40000/0x40000
COMMIT
*nat
:cali-POSTROUTING - [0:0]
-I POSTROUTING -j cali-POSTROUTING
-A cali-POSTROUTING -s 10.244.0.0/16 ! -d 10.244.0.0/16 -j MASQUERADE
COMMIT
*filter
:cali-INPUT - [0:0]
:cali-OUTPUT - [0:0]
-I INPUT -j cali-INPUT
-I OUTPUT -j cali-OUTPUT
-A cali-INPUT -j MARK --set-xmark 0x0/0xfff00000
-A cali-INPUT -m conntrack --ctstate RELATED,ESTABLISHED -j RETURN
-A cali-INPUT -i cni+ -j MARK --set-xmark 0x5f500000/0xfff00000
-A cali-INPUT ! -i cni+ -j MARK --set-xmark 0x100000/0xfff00000
-A cali-OUTPUT -m mark --mark 0x0/0xfff00000 -j RETURN
-A cali-OUTPUT -m mark --mark 0x5f500000/0xfff00000 -j MARK --set-xmark 0x10000/0x10000
-A cali-OUTPUT -j MARK --set-xmark 0x0/0xfff00000
-A cali-OUTPUT -m mark --mark 0x10000/0x10000 -j ACCEPT
COMMIT
"""
"""Calico's rules for ``iptables-restore``. A mark says on which interface a packet has arrived; a packet to IPVS keeps this mark
from INPUT to OUTPUT."""
