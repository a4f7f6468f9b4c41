"""Rules to remove once ours are in force: kube-proxy's of its iptables mode, and ours in the other variant of iptables.

Names and comments are those of pkg/proxy/iptables/proxier.go and cleanup.go (kubernetes/kubernetes).

Rule 1: a chain goes if its name belongs to the iptables mode alone, or if it is one of ours in the variant that is not used.
Rule 2: a rule of a built-in chain goes if it leads to the chain that kube-proxy's, or ours, of that comment leads to.
Rule 3: a chain that a rule of anybody else leads to is emptied, and stays. The one that marks packets to masquerade stays as it
is: the port mapping of network plug-ins leads there, and our rules masquerade what it marks, in either variant.
Rule 4: nothing goes while a chain of ours that is used leads to one that is to go: then ours are not in force.
Rule 5: what returned ``FREE_RETURNS`` times is written by somebody who runs: it is removed every ``PATIENCE_S`` from then on.
"""

import dataclasses
import math
import re
from collections.abc import Collection, Hashable
from typing import NamedTuple

from ipvsproxy.model.leftovers import LeftRules, Removal
from ipvsproxy.model.rules import ChainKey, Jump

FREE_RETURNS = 2
PATIENCE_S = 600.0
CALM_S = 900.0
"""What did not return for so long after its removal is gone. A kube-proxy looks at its rules once in a sync period (30 s)."""

TABLES = frozenset({"nat", "filter"})
"""Those that packets of Services meet. In ``mangle`` kube-proxy has a chain without rules only."""

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
"""Of a Service port or an endpoint; what follows the prefix is the beginning of a hash, in base 32."""
_COMMENTS = (
    ("KUBE-EXTERNAL-SERVICES", ("INPUT", "FORWARD"), "kubernetes externally-visible service portals"),
    ("KUBE-NODEPORTS", ("INPUT",), "kubernetes health check service ports"),
    ("KUBE-SERVICES", ("INPUT", "FORWARD", "OUTPUT"), "kubernetes service portals"),
    ("KUBE-PROXY-FIREWALL", ("INPUT", "FORWARD", "OUTPUT"), "kubernetes load balancer firewall"),
)
JUMPS = tuple(Jump("filter", source, target, comment) for target, sources, comment in _COMMENTS for source in sources)
"""The ways into the rules of the iptables mode, but for those that are ours, too.

The last chain is one of ours as well. Through these jumps of its own, the iptables mode has it refuse the host's connections.
"""


def is_of_iptables_mode(key: ChainKey) -> bool:
    """Whether a chain belongs to kube-proxy's iptables mode alone: the kubelet, network plug-ins and IPVS mode have none such."""
    return key in _CHAINS or (key.table == "nat" and _CHAIN_OF_SERVICE.fullmatch(key.chain) is not None)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """What is looked for in the rules of one family in one variant of iptables.

    ``used`` are our chains if this variant is used, ``unused`` if it is not; the other one is empty. ``own_jumps`` lead to them.
    """

    used: frozenset[ChainKey] = frozenset()
    unused: frozenset[ChainKey] = frozenset()
    own_jumps: tuple[Jump, ...] = ()

    def concerns(self, key: ChainKey) -> bool:
        """Whether ``removal`` has to know of this chain, and of the rules that lead to it."""
        return self.is_left(key) or any(key == (jump.table, jump.target) for jump in JUMPS)

    def is_left(self, key: ChainKey) -> bool:
        """Whether this chain is to go."""
        return key in self.unused or is_of_iptables_mode(key)


def scope(chains: Collection[ChainKey], jumps: tuple[Jump, ...], *, is_used: bool) -> Scope:
    """What is looked for in a variant of iptables that is used, or is not; ``chains`` and ``jumps`` are ours."""
    return Scope(used=frozenset(chains)) if is_used else Scope(unused=frozenset(chains), own_jumps=jumps)


def removal(observed: LeftRules, scope: Scope) -> Removal:
    """What of it is to be removed. Chains that are empty and have to stay are left as they are."""
    known: dict[tuple[ChainKey, ChainKey], list[str]] = {}  # to a chain that both have, each comes with a comment of its own
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
    """How often something was removed, always within ``CALM_S`` of the last time, and when that was."""

    times: int
    last_s: float


class Returns:
    """What was removed, and whether it came back. ``place`` says where: any value that tells one from another."""

    def __init__(self) -> None:
        self._removed: dict[Hashable, _Removed] = {}

    def remove(self, place: Hashable, now: float) -> None:
        """It was removed."""
        last = self._removed.get(place)
        again = last is not None and now - last.last_s <= CALM_S
        self._removed[place] = _Removed(last.times + 1 if last is not None and again else 1, now)

    def due_s(self, place: Hashable) -> float:
        """From when on it may be removed if it is found now."""
        last = self._removed.get(place)
        return last.last_s + PATIENCE_S if last is not None and last.times >= FREE_RETURNS else -math.inf

    def comes_back(self, place: Hashable, now: float) -> bool:
        """Whether it was removed so often lately that somebody who runs writes it, if it is found now."""
        last = self._removed.get(place)
        return last is not None and last.times >= FREE_RETURNS and now - last.last_s <= CALM_S
