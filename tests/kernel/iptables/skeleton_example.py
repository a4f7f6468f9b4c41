"""A small skeleton of rules, with the text of each rule."""

from ipvsproxy.kernel.iptables import syntax as iptables_syntax
from ipvsproxy.model.net import Family
from ipvsproxy.model.rules import ChainKey, Jump, JumpTo, Rule, SetMark, SetMatch, Side, Skeleton, render

SERVICES = ChainKey("nat", "KUBE-SERVICES")
MARK = ChainKey("nat", "KUBE-MARK-MASQ")
FILTER = ChainKey("filter", "KUBE-IPVS-FILTER")
OUTPUT = Jump("nat", "OUTPUT", "KUBE-SERVICES", "kubernetes service portals")
PREROUTING = Jump("nat", "PREROUTING", "KUBE-SERVICES", "kubernetes service portals")
INPUT = Jump("filter", "INPUT", "KUBE-IPVS-FILTER", "kubernetes ipvs access filter")
SKELETON = Skeleton(
    family=Family.IPV4,
    chains={
        SERVICES: (Rule(set=SetMatch("KUBE-CLUSTER-IP", (Side.DESTINATION, Side.DESTINATION)), target=JumpTo("KUBE-MARK-MASQ")),),
        MARK: (Rule(target=SetMark(0x4000)),),
        FILTER: (),
    },
    jumps=(OUTPUT, PREROUTING, INPUT),
)
NOTHING = iptables_syntax.Listing(chains={}, jumps={}, foreign_jumps={})
CHAINS = {key: tuple(render(rule, Family.IPV4) for rule in rules) for key, rules in SKELETON.chains.items()}
