"""Tables that kube-proxy's nftables mode has left behind, to be removed once our rules are in force.

Names and comment are those of pkg/proxy/nftables/proxier.go (kubernetes/kubernetes). These chains and maps are in each version
from 1.29 on, among others. ``kube-proxy --cleanup`` removes the table by its name alone.

Rule 1: a table is kube-proxy's if it has the family, the name, and all of these chains and maps, each base chain at its hook. A
comment must be kube-proxy's; versions of nft before 0.9.7 write none.
Rule 2: any other table of that name is left alone.
"""

from collections.abc import Mapping

from ipvsproxy.model.rules import ChainKey, NftTable, Removal

NAME = "kube-proxy"
COMMENT = "rules for kube-proxy"

_BASE_CHAINS: Mapping[str, tuple[str, str]] = {
    "nat-prerouting": ("nat", "prerouting"),
    "nat-output": ("nat", "output"),
    "nat-postrouting": ("nat", "postrouting"),
}
_CHAINS = ("services", "masquerading")
_MAPS = ("service-ips", "service-nodeports")


def removal(table: NftTable | None) -> Removal:
    """The removal of a table with all of its chains, if the table is kube-proxy's; otherwise an empty removal."""
    if table is None or why_foreign(table):
        return Removal()
    chains = tuple(ChainKey(table.name, name) for name in table.chains)
    return Removal(emptied=chains, deleted=chains)


def why_foreign(table: NftTable) -> str:
    """Why a table with kube-proxy's name is not kube-proxy's; empty if it is kube-proxy's."""
    if table.comment not in ("", COMMENT):
        return f"its comment is {table.comment!r}"
    for name, (kind, hook) in _BASE_CHAINS.items():
        place = table.chains.get(name)
        if place is None or (place.kind, place.hook) != (kind, hook):
            return f"it has no chain {name} of type {kind} at the hook {hook}"
    for name in _CHAINS:
        if name not in table.chains:
            return f"it has no chain {name}"
    for name in _MAPS:
        if name not in table.maps:
            return f"it has no map {name}"
    return ""
