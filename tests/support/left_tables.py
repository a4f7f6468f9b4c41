"""The table that kube-proxy in nftables mode leaves on a node: as text for nft, and in an in-memory kernel.

The chains, maps, hooks, priorities and comments come from setupNFTables and syncProxyRules in pkg/proxy/nftables/proxier.go
(kubernetes/kubernetes 1.31).
"""

from collections.abc import Callable, Mapping

from ipvsproxy.kernel.base.errors import KernelError
from ipvsproxy.kernel.nftables.nft_tables import LeftoverTables, TablePlace
from ipvsproxy.model.net import Family
from ipvsproxy.model.rules import BaseChain, NftTable
from ipvsproxy.reconcile.removal.leftovers import TABLE_COMMENT, TABLE_NAME

IPV4, IPV6 = (TablePlace(family, TABLE_NAME) for family in Family)

CHAINS: Mapping[str, BaseChain | None] = {
    "filter-input": BaseChain("filter", "input", -110),
    "nat-prerouting": BaseChain("nat", "prerouting", -100),
    "nat-output": BaseChain("nat", "output", -100),
    "nat-postrouting": BaseChain("nat", "postrouting", 100),
    "services": None,
    "masquerading": None,
    "service-ULMVA6XW-ns1/svc1/tcp/p80": None,
}
MAPS = frozenset({"service-ips", "service-nodeports", "no-endpoint-services"})
LEFT = NftTable(family="ip", name=TABLE_NAME, comment=TABLE_COMMENT, chains=CHAINS, maps=MAPS)


def nftables_mode(family: Family, *, served: Mapping[tuple[str, int], tuple[str, int]], refused: Mapping[str, int] = {}) -> str:
    """The table of kube-proxy's nftables mode, as input of ``nft -f``.

    All ports are TCP ports; those in ``served`` have an endpoint, and those in ``refused`` have none.
    """
    v4 = family is Family.IPV4
    ip, kind, loopback = ("ip", "ipv4_addr", "127.0.0.0/8") if v4 else ("ip6", "ipv6_addr", "::1")
    service = f"type {kind} . inet_proto . inet_service : verdict"

    def elements(entries: list[str]) -> str:
        return f"elements = {{ {', '.join(entries)} }}" if entries else ""

    def target(number: int) -> str:
        return f"ABCDEFG{number}-ns/web/tcp/http"

    clusters = elements([address for address, _ in served])
    goto = elements([f"{address} . tcp . {port} : goto service-{target(n)}" for n, (address, port) in enumerate(served)])
    reject = elements([f"{address} . tcp . {port} : goto reject-chain" for address, port in refused.items()])
    chains = "\n".join(
        f"""
        chain endpoint-{target(n)}__pod {{
                {ip} saddr {pod} jump mark-for-masquerade
                meta l4proto tcp dnat to {pod if v4 else f"[{pod}]"}:{pod_port}
        }}
        chain service-{target(n)} {{
                numgen random mod 1 vmap {{ 0 : goto endpoint-{target(n)}__pod }}
        }}"""
        for n, (pod, pod_port) in enumerate(served.values())
    )
    return f"""\
table {ip} {TABLE_NAME} {{
        comment "{TABLE_COMMENT}"
        set cluster-ips {{ type {kind}; comment "Active ClusterIPs"; {clusters} }}
        map firewall-ips {{ {service}; comment "destinations that are subject to LoadBalancerSourceRanges"; }}
        map no-endpoint-services {{ {service}; comment "vmap to drop or reject packets to services with no endpoints"; {reject} }}
        map no-endpoint-nodeports {{ type inet_proto . inet_service : verdict; }}
        map service-ips {{ {service}; comment "ClusterIP, ExternalIP and LoadBalancer IP traffic"; {goto} }}
        map service-nodeports {{ type inet_proto . inet_service : verdict; comment "NodePort traffic"; }}
        chain mark-for-masquerade {{ meta mark set meta mark | 0x4000; }}
        chain masquerading {{
                meta mark & 0x4000 == 0 return
                meta mark set meta mark ^ 0x4000
                masquerade fully-random
        }}
        chain reject-chain {{ reject; }}
        chain service-endpoints-check {{ {ip} daddr . meta l4proto . th dport vmap @no-endpoint-services; }}
        chain nodeport-endpoints-check {{
                fib daddr type local {ip} daddr != {loopback} meta l4proto . th dport vmap @no-endpoint-nodeports
        }}
        chain firewall-check {{ {ip} daddr . meta l4proto . th dport vmap @firewall-ips; }}
        {chains}
        chain services {{
                {ip} daddr . meta l4proto . th dport vmap @service-ips
                fib daddr type local {ip} daddr != {loopback} meta l4proto . th dport vmap @service-nodeports
        }}
        chain filter-prerouting {{ type filter hook prerouting priority -110; ct state new jump firewall-check; }}
        chain filter-input {{
                type filter hook input priority -110
                ct state new jump nodeport-endpoints-check
                ct state new jump service-endpoints-check
        }}
        chain filter-forward {{ type filter hook forward priority -110; ct state new jump service-endpoints-check; }}
        chain filter-output {{
                type filter hook output priority -110
                ct state new jump service-endpoints-check
                ct state new jump firewall-check
        }}
        chain nat-prerouting {{ type nat hook prerouting priority -100; jump services; }}
        chain nat-output {{ type nat hook output priority -100; jump services; }}
        chain nat-postrouting {{ type nat hook postrouting priority 100; jump masquerading; }}
}}
"""


class MemoryTables(LeftoverTables):
    """The tables of both families; ``reads`` are the families that were read."""

    def __init__(self, held: Mapping[TablePlace, NftTable] = {}) -> None:
        self.held = dict(held)
        self.failing: set[tuple[str, TablePlace]] = set()
        self.reads: list[TablePlace] = []

    def put(self, place: TablePlace, table: NftTable) -> None:
        """Create a table, as another program would."""
        self.held[place] = table

    def read(self, place: TablePlace) -> NftTable | None:
        self.reads.append(place)
        self._fail("read", place)
        return self.held.get(place)

    def remove(self, place: TablePlace, is_left: Callable[[NftTable], bool]) -> None:
        self._fail("remove", place)
        if is_left(self.held[place]):
            del self.held[place]

    def _fail(self, what: str, place: TablePlace) -> None:
        if (what, place) in self.failing:
            raise KernelError(action=f"{what} the table", detail="no memory")
