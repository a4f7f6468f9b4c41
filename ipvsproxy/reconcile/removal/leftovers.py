"""Leftover rules: rules of kube-proxy's iptables and nftables modes, and rules of ipvsproxy in the unused variant of iptables.

Leftover rules are removed as soon as the desired rules are in the kernel. The names and comments of kube-proxy's chains, rules
and tables come from pkg/proxy/iptables/proxier.go, cleanup.go, and pkg/proxy/nftables/proxier.go in kubernetes/kubernetes. This
module lists chains and maps of kube-proxy's nftables mode. Every version of kube-proxy from 1.29 on has at least these chains and
maps. ``kube-proxy --cleanup`` itself identifies its table only by the name of the table.

Rule 1: a chain is removed if its name is used only by kube-proxy's iptables mode, or if it is ipvsproxy's chain in the unused
variant.
Rule 2: a rule of a built-in chain is removed if kube-proxy or ipvsproxy writes rules with the same target and comment into the
chain.
Rule 3: a chain to which a rule of another program refers is emptied but not deleted. One such chain is not even emptied: the
chain that marks packets for masquerading, because port mappings of network plug-ins lead to this chain. In either variant of
iptables, ipvsproxy masquerades the marked packets.
Rule 4: no chain is removed while a used chain of ipvsproxy leads to a leftover chain, because the desired rules are then not in
the kernel.
Rule 5: rules that have come back ``FREE_RETURNS`` times count as rules of a running program. From then on, the rules are removed
only once every ``PATIENCE_S`` seconds.
Rule 6: a table belongs to kube-proxy if it has the family and name of kube-proxy's table, and all chains and maps that this
module lists. The base chains must be at the listed hooks. If the table has a comment, the comment must be kube-proxy's; versions
of nft before 0.9.7 write no comment. A table that has only its name in common with kube-proxy's table is not touched.
"""

import dataclasses
import math
import re
from collections.abc import Collection, Hashable, Mapping
from typing import NamedTuple

from ipvsproxy.model.rules import ChainKey, Jump, LeftRules, NftTable, Removal

FREE_RETURNS = 2
PATIENCE_S = 600.0
CALM_S = 900.0
"""If removed rules have not come back within this many seconds, they count as gone. kube-proxy checks its rules once in a sync
period (30 s)."""

TABLES = frozenset({"nat", "filter"})
"""The tables that affect packets of Services. In ``mangle``, kube-proxy only has a chain without rules."""

_MARKS = ChainKey("nat", "KUBE-MARK-MASQ")
_CANARY = "KUBE-PROXY-CANARY"
_CHAINS = frozenset(
    {
        ChainKey("filter", "KUBE-SERVICES"),
        ChainKey("filter", "KUBE-EXTERNAL-SERVICES"),
        ChainKey("filter", "KUBE-NODEPORTS"),
        ChainKey("nat", "KUBE-NODEPORTS"),
        *(ChainKey(table, _CANARY) for table in ("mangle", "nat", "filter")),
    }
)
_CHAIN_OF_SERVICE = re.compile(r"KUBE-(?:SVC|SVL|SEP|EXT|FW|XLB)-[A-Z2-7]{16}")
"""The name of the chain of a Service port or an endpoint: a prefix, and the first digits of a hash in base 32."""
_COMMENTS = (
    ("KUBE-EXTERNAL-SERVICES", ("INPUT", "FORWARD"), "kubernetes externally-visible service portals"),
    ("KUBE-NODEPORTS", ("INPUT",), "kubernetes health check service ports"),
    ("KUBE-SERVICES", ("INPUT", "FORWARD", "OUTPUT"), "kubernetes service portals"),
    ("KUBE-PROXY-FIREWALL", ("INPUT", "FORWARD", "OUTPUT"), "kubernetes load balancer firewall"),
)
JUMPS = tuple(Jump("filter", source, target, comment) for target, sources, comment in _COMMENTS for source in sources)
"""The jumps that kube-proxy writes in iptables mode, except the jumps that ipvsproxy writes as well.

The target of the last three jumps, ``KUBE-PROXY-FIREWALL``, is also a chain of ipvsproxy. In iptables mode, a jump from
``OUTPUT`` leads connections of the host to this chain, which can refuse them.
"""


def is_of_iptables_mode(key: ChainKey) -> bool:
    """Whether kube-proxy's iptables mode uses this chain, unlike IPVS mode, the kubelet and network plug-ins."""
    return key in _CHAINS or (key.table == "nat" and _CHAIN_OF_SERVICE.fullmatch(key.chain) is not None)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LeftoverScope:
    """The definition of leftover rules in one family and one variant of iptables.

    The chains of ipvsproxy are in ``used`` if the variant is in use, and otherwise in ``unused``; the other field is empty.
    ``own_jumps`` are the jumps to the chains in ``unused``.
    """

    used: frozenset[ChainKey] = frozenset()
    unused: frozenset[ChainKey] = frozenset()
    own_jumps: tuple[Jump, ...] = ()

    def concerns(self, key: ChainKey) -> bool:
        """Whether ``removal`` needs to know a chain and the references to the chain."""
        return self.is_left(key) or any(key == (jump.table, jump.target) for jump in JUMPS)

    def is_left(self, key: ChainKey) -> bool:
        """Whether a chain belongs to kube-proxy's iptables mode, or to ipvsproxy in an unused variant of iptables."""
        return key in self.unused or is_of_iptables_mode(key)


def scope(chains: Collection[ChainKey], jumps: tuple[Jump, ...], *, is_used: bool) -> LeftoverScope:
    """The definition of leftover rules for a used or an unused variant of iptables.

    ``chains`` and ``jumps`` are the chains and jumps of ipvsproxy.
    """
    return LeftoverScope(used=frozenset(chains)) if is_used else LeftoverScope(unused=frozenset(chains), own_jumps=jumps)


def removal(observed: LeftRules, scope: LeftoverScope) -> Removal:
    """The removal of all observed leftover rules. The removal leaves out empty chains that must stay."""
    # ipvsproxy and kube-proxy's iptables mode have jumps to some of the same chains, but with different comments
    known: dict[tuple[ChainKey, ChainKey], list[str]] = {}
    for jump in (*JUMPS, *scope.own_jumps):
        ends = ChainKey(jump.table, jump.source), ChainKey(jump.table, jump.target)
        known.setdefault(ends, []).append(f'--comment "{jump.comment}"')
    going = tuple(one for one in observed.references if any(text in one.text for text in known.get((one.source, one.target), ())))
    staying = [one for one in observed.references if one not in going and scope.is_left(one.target)]
    for one in staying:
        if one.source in scope.used:
            return Removal(held_back=f"{one.source} is not as it should be: it holds {one.text!r}")
    kept = {one.target for one in staying}
    left = [(key, count) for key, count in observed.chains.items() if scope.is_left(key) and (key != _MARKS or key not in kept)]
    return Removal(
        references=going,
        emptied=tuple(key for key, count in left if count or key not in kept),
        deleted=tuple(key for key, _ in left if key not in kept),
        staying=tuple(staying),
    )


class _Removed(NamedTuple):
    """A series of removals at one place, each at most ``CALM_S`` seconds after the previous one."""

    times: int
    last_s: float


class Returns:
    """Records the removals of leftover rules at each place, and shows whether removed rules come back.

    A place is any hashable value that identifies where the rules are.
    """

    def __init__(self) -> None:
        self._removed: dict[Hashable, _Removed] = {}

    def remove(self, place: Hashable, now: float) -> None:
        """Record a removal."""
        last = self._removed.get(place)
        self._removed[place] = _Removed(last.times + 1 if last and now - last.last_s <= CALM_S else 1, now)

    def due_s(self, place: Hashable) -> float:
        """The time until which rules at a place must not be removed, because the rules came back after earlier removals."""
        last = self._removed.get(place)
        return last.last_s + PATIENCE_S if last is not None and last.times >= FREE_RETURNS else -math.inf

    def comes_back(self, place: Hashable, now: float) -> bool:
        """Whether rules at this place were removed at least ``FREE_RETURNS`` times, the last time at most ``CALM_S`` ago.

        A running program must then be writing them again.
        """
        last = self._removed.get(place)
        return last is not None and last.times >= FREE_RETURNS and now - last.last_s <= CALM_S


TABLE_NAME = "kube-proxy"
TABLE_COMMENT = "rules for kube-proxy"

_BASE_CHAINS: Mapping[str, tuple[str, str]] = {
    "nat-prerouting": ("nat", "prerouting"),
    "nat-output": ("nat", "output"),
    "nat-postrouting": ("nat", "postrouting"),
}
_TABLE_CHAINS = ("services", "masquerading")
_TABLE_MAPS = ("service-ips", "service-nodeports")


def removal_of_table(table: NftTable | None) -> Removal:
    """The removal of a table with all of its chains if the table is kube-proxy's; otherwise a removal that removes nothing."""
    if table is None or why_foreign(table):
        return Removal()
    chains = tuple(ChainKey(table.name, name) for name in table.chains)
    return Removal(emptied=chains, deleted=chains)


def why_foreign(table: NftTable) -> str:
    """The reason why a table is not kube-proxy's although it has the same name; empty if the table is kube-proxy's."""
    if table.comment not in ("", TABLE_COMMENT):
        return f"its comment is {table.comment!r}"
    for name, (kind, hook) in _BASE_CHAINS.items():
        place = table.chains.get(name)
        if place is None or (place.kind, place.hook) != (kind, hook):
            return f"it has no chain {name} of type {kind} at the hook {hook}"
    for name in _TABLE_CHAINS:
        if name not in table.chains:
            return f"it has no chain {name}"
    for name in _TABLE_MAPS:
        if name not in table.maps:
            return f"it has no map {name}"
    return ""
