"""The names of our chains, and the jumps that lead to them from the built-in ones.

Both are those of pkg/proxy/ipvs/proxier.go (kubernetes/kubernetes), except for the chains of traffic scopes.
"""

from ipvsproxy.model.rules import ChainKey, Jump

SERVICES = "KUBE-SERVICES"
POSTROUTING = "KUBE-POSTROUTING"
NODE_PORT = "KUBE-NODE-PORT"
LOAD_BALANCER = "KUBE-LOAD-BALANCER"
MARK_MASQUERADE = "KUBE-MARK-MASQ"
FORWARD = "KUBE-FORWARD"
PROXY_FIREWALL = "KUBE-PROXY-FIREWALL"
SOURCE_RANGES_FIREWALL = "KUBE-SOURCE-RANGES-FIREWALL"
IPVS_FILTER = "KUBE-IPVS-FILTER"
IPVS_OUT_FILTER = "KUBE-IPVS-OUT-FILTER"
SCOPE_ARRIVAL = "KUBE-IPVSPROXY-ARRIVAL"
SCOPE_MARK = "KUBE-IPVSPROXY-MARK"
SCOPE_MASQUERADE = "KUBE-IPVSPROXY-MASQ"

KUBE_PROXY_CHAINS: tuple[ChainKey, ...] = (
    *(ChainKey("nat", chain) for chain in (SERVICES, POSTROUTING, NODE_PORT, LOAD_BALANCER, MARK_MASQUERADE)),
    *(
        ChainKey("filter", chain)
        for chain in (FORWARD, NODE_PORT, PROXY_FIREWALL, SOURCE_RANGES_FIREWALL, IPVS_FILTER, IPVS_OUT_FILTER)
    ),
)
"""The chains that kube-proxy has, too, in the order of their declaration."""
SCOPE_CHAINS: tuple[ChainKey, ...] = (
    ChainKey("mangle", SCOPE_ARRIVAL),
    ChainKey("mangle", SCOPE_MARK),
    ChainKey("nat", SCOPE_MASQUERADE),
)
"""The chains that exist only while an external address has two scopes."""
CHAINS: tuple[ChainKey, ...] = (*KUBE_PROXY_CHAINS, *SCOPE_CHAINS)
"""Our chains."""

KUBE_PROXY_JUMPS: tuple[Jump, ...] = (
    Jump("nat", "OUTPUT", SERVICES, "kubernetes service portals"),
    Jump("nat", "PREROUTING", SERVICES, "kubernetes service portals"),
    Jump("nat", "POSTROUTING", POSTROUTING, "kubernetes postrouting rules"),
    Jump("filter", "FORWARD", FORWARD, "kubernetes forwarding rules"),
    Jump("filter", "INPUT", NODE_PORT, "kubernetes health check rules"),
    Jump("filter", "INPUT", PROXY_FIREWALL, "kube-proxy firewall rules"),
    Jump("filter", "FORWARD", PROXY_FIREWALL, "kube-proxy firewall rules"),
    Jump("filter", "INPUT", IPVS_FILTER, "kubernetes ipvs access filter"),
    Jump("filter", "OUTPUT", IPVS_OUT_FILTER, "kubernetes ipvs access filter"),
)
"""The jumps to the chains that kube-proxy has, too."""
SCOPE_JUMPS: tuple[Jump, ...] = (
    Jump("mangle", "PREROUTING", SCOPE_ARRIVAL, "ipvsproxy traffic scopes"),
    Jump("mangle", "OUTPUT", SCOPE_MARK, "ipvsproxy traffic scopes"),
    Jump("nat", "POSTROUTING", SCOPE_MASQUERADE, "ipvsproxy traffic scopes"),
)
JUMPS: tuple[Jump, ...] = (*KUBE_PROXY_JUMPS, *SCOPE_JUMPS)
"""The jumps to our chains. An absent jump is inserted at the head of its chain, in this order."""
