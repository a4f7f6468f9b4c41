"""Rules of iptables as data: what ours say, and what is there of them."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ipvsproxy.model.kernel import VirtualServerKey
from ipvsproxy.model.net import Family, Network, Protocol


class SetMatch(NamedTuple):
    """A match on a set: its name, and which sides of the packet are looked up (``dst,dst,src``)."""

    set: str
    sides: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One rule of a chain, as data: what it matches, and where it leads (a chain, or a target with its options).

    What keeps its default is not matched. ``not_source``, ``not_interface`` and ``not_mark`` match everything else.
    ``interface`` is that of arrival; a trailing ``+`` stands for any ending. ``connection_states`` is a comma-separated list.
    """

    target: str
    source: Network | None = None
    not_source: Network | None = None
    not_interface: str = ""
    protocol: Protocol | None = None
    comment: str = ""
    mark: int | None = None
    not_mark: int | None = None
    connection_states: str = ""
    set: SetMatch | None = None
    not_from_bridge_port: bool = False
    from_elsewhere: bool = False
    to_this_host: bool = False
    virtual_server: VirtualServerKey | None = None

    @property
    def text(self) -> str:
        """The rule as ``iptables-save`` prints it, without ``-A CHAIN``; ``iptables-restore`` takes the same."""
        comment = self.comment.replace("'", "\\'")
        parts = (
            self.source and f"-s {self.source}",
            self.not_source and f"! -s {self.not_source}",
            self.not_interface and f"! -i {self.not_interface}",
            self.protocol and f"-p {self.protocol.label}",
            self.comment and f'-m comment --comment "{comment}"',
            self.mark is not None and f"-m mark --mark {self.mark:#x}/{self.mark:#x}",
            self.not_mark is not None and f"-m mark ! --mark {self.not_mark:#x}/{self.not_mark:#x}",
            self.connection_states and f"-m conntrack --ctstate {self.connection_states}",
            self.set and f"-m set --match-set {self.set.set} {self.set.sides}",
            self.not_from_bridge_port and "-m physdev ! --physdev-is-in",
            self.from_elsewhere and "-m addrtype ! --src-type LOCAL",
            self.to_this_host and "-m addrtype --dst-type LOCAL",
            self.virtual_server
            and f"-m ipvs --vproto {self.virtual_server.protocol:d} --vaddr {self.virtual_server.address}"
            f" --vport {self.virtual_server.port}",
            f"-j {self.target}",
        )
        return " ".join(part for part in parts if part)

    def __str__(self) -> str:
        return self.text


class ChainKey(NamedTuple):
    """A chain of a table: ``nat`` or ``filter``."""

    table: str
    chain: str

    def __str__(self) -> str:
        return f"{self.table}/{self.chain}"


class Jump(NamedTuple):
    """A rule of a built-in chain that leads to one of ours; it is put first in its chain when absent."""

    table: str
    source: str
    target: str
    comment: str

    @property
    def text(self) -> str:
        """The rule as ``iptables-save`` prints it, without ``-A CHAIN``."""
        return f'-m comment --comment "{self.comment}" -j {self.target}'

    def __str__(self) -> str:
        return f"{self.table}/{self.source} -> {self.target}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Skeleton:
    """All rules of one family: the whole content of each of our chains, and the jumps that lead into them.

    Chains and jumps keep the order in which they are written.
    """

    family: Family
    chains: Mapping[ChainKey, tuple[Rule, ...]]
    jumps: tuple[Jump, ...]

    @property
    def image(self) -> "SkeletonImage":
        """What ``iptables-save`` shows once this skeleton is in force."""
        return SkeletonImage(
            family=self.family,
            chains={key: tuple(rule.text for rule in rules) for key, rules in self.chains.items()},
            jumps=frozenset(self.jumps),
        )

    def __str__(self) -> str:
        return f"{self.family.label} rules"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SkeletonImage:
    """What is there of a skeleton: the text of each rule of each chain that exists, and the jumps that are present.

    Only chains and jumps that we know count; everything else in the tables is somebody else's. Rules of a chain that does nothing
    but drop stand in the order of their text, whatever theirs is in the kernel: it means nothing, and kube-proxy's is random.
    """

    family: Family
    chains: Mapping[ChainKey, tuple[str, ...]]
    jumps: frozenset[Jump]

    def __post_init__(self) -> None:
        chains = {key: tuple(sorted(rules)) if _only_drops(rules) else rules for key, rules in self.chains.items()}
        object.__setattr__(self, "chains", chains)


def _only_drops(rules: Sequence[str]) -> bool:
    return len(rules) > 1 and all(rule.endswith("-j DROP") for rule in rules)
