"""Rules that kube-proxy in iptables mode leaves on a node, and rules of other programs: as text, and in an in-memory kernel."""

import itertools
import shutil
import subprocess
from collections.abc import Callable

import pytest

from ipvsproxy.kernel.base.errors import KernelError
from ipvsproxy.kernel.iptables.leftover_rules import LeftoverRules, RulesPlace
from ipvsproxy.kernel.iptables.variant import Variant
from ipvsproxy.model.net import Family
from ipvsproxy.model.rules import ChainKey, LeftRules, Removal

USED, OTHER = RulesPlace(Variant.NF_TABLES, Family.IPV4, is_used=True), RulesPlace(Variant.LEGACY, Family.IPV4, is_used=False)
USED_V6 = RulesPlace(Variant.NF_TABLES, Family.IPV6, is_used=True)
PLACES = (USED, OTHER, USED_V6)
CHAIN = ChainKey("filter", "KUBE-SERVICES")
LEFT = LeftRules(chains={CHAIN: 1})

SERVICE, ENDPOINT = "KUBE-SVC-ERIFXISQEP7F7OF4", "KUBE-SEP-IT2ZTR26TO4XFPTO"
OF_OTHERS = frozenset(
    {
        ":KUBE-FIREWALL -",
        ":KUBE-MARK-DROP -",
        ":KUBE-KUBELET-CANARY -",
        ":KUBE-IPTABLES-HINT -",
        ":cali-INPUT -",
        "-A INPUT -j KUBE-FIREWALL",
        "-A INPUT -j cali-INPUT",
        "-A KUBE-FIREWALL -m mark --mark 0x8000/0x8000 -j DROP",
        "-A KUBE-MARK-DROP -j MARK --set-xmark 0x8000/0x8000",
    }
)
"""The rules and chains of the kubelet and of a network plug-in, which must stay."""
_CANARIES = ":KUBE-PROXY-CANARY - [0:0]"
_NEW = "-m conntrack --ctstate NEW -m comment --comment"


def iptables_mode(family: Family) -> str:
    """Rules of a Service without endpoints (REJECT), rules of a Service with an endpoint, and rules of other programs."""
    v4 = family is Family.IPV4
    refused, served = ("10.96.0.1/32", "10.96.0.11/32") if v4 else ("fd00:96::1/128", "fd00:96::11/128")
    reject = "icmp-port-unreachable" if v4 else "icmp6-port-unreachable"
    return f"""\
*mangle
{_CANARIES}
:KUBE-KUBELET-CANARY - [0:0]
:KUBE-IPTABLES-HINT - [0:0]
COMMIT
*filter
{_CANARIES}
:KUBE-SERVICES - [0:0]
:KUBE-EXTERNAL-SERVICES - [0:0]
:KUBE-NODEPORTS - [0:0]
:KUBE-FIREWALL - [0:0]
:cali-INPUT - [0:0]
-A INPUT -m comment --comment "kubernetes health check service ports" -j KUBE-NODEPORTS
-A INPUT {_NEW} "kubernetes externally-visible service portals" -j KUBE-EXTERNAL-SERVICES
-A INPUT -j KUBE-FIREWALL
-A INPUT -j cali-INPUT
-A FORWARD {_NEW} "kubernetes service portals" -j KUBE-SERVICES
-A FORWARD {_NEW} "kubernetes externally-visible service portals" -j KUBE-EXTERNAL-SERVICES
-A OUTPUT {_NEW} "kubernetes service portals" -j KUBE-SERVICES
-A KUBE-SERVICES -d {refused} -p tcp -m comment --comment "no endpoints" -m tcp --dport 80 -j REJECT --reject-with {reject}
-A KUBE-FIREWALL -m mark --mark 0x8000/0x8000 -j DROP
COMMIT
*nat
{_CANARIES}
:KUBE-NODEPORTS - [0:0]
:KUBE-MARK-DROP - [0:0]
:{SERVICE} - [0:0]
:{ENDPOINT} - [0:0]
-A KUBE-MARK-DROP -j MARK --set-xmark 0x8000/0x8000
-A KUBE-NODEPORTS -p tcp -m tcp --dport 30080 -j {SERVICE}
-A {SERVICE} -d {served} -j {ENDPOINT}
-A {ENDPOINT} -j RETURN
COMMIT
"""


class Tables(LeftoverRules):
    """A fake that holds the leftover rules of all iptables variants and families in memory.

    Each change of rules changes their fingerprint. ``reads`` has the variant and family of each reading.
    """

    def __init__(self) -> None:
        self.held: dict[RulesPlace, LeftRules] = {}
        self.failing: set[tuple[str, RulesPlace]] = set()
        self.has_marks = True
        self.reads: list[RulesPlace] = []
        self.writes: list[RulesPlace] = []
        self._marks = itertools.count()
        self._mark = dict.fromkeys(PLACES, -1)
        self.on_removed: Callable[[], object] = lambda: None

    def places(self, _: object) -> tuple[RulesPlace, ...]:
        return PLACES

    def put(self, place: RulesPlace, rules: LeftRules) -> None:
        """Change the rules of one variant and family, as another program would."""
        self.held[place] = rules
        self._mark[place] = next(self._marks)

    def fingerprint(self, place: RulesPlace) -> object:
        return self._mark[place] if self.has_marks else None

    def read(self, place: RulesPlace, concerns: Callable[[ChainKey], bool]) -> LeftRules:
        self.reads.append(place)
        self._fail("read", place)
        rules = self.held.get(place, LeftRules())
        return LeftRules(
            chains={key: count for key, count in rules.chains.items() if concerns(key)},
            references=rules.references,
            hidden=rules.hidden,
        )

    def remove(self, place: RulesPlace, removal: Removal) -> None:
        self.writes.append(place)
        self._fail("remove", place)
        rest = {key: count for key, count in self.held[place].chains.items() if key not in removal.deleted}
        self.put(place, LeftRules(chains=rest, hidden=self.held[place].hidden))
        self.on_removed()

    def _fail(self, what: str, place: RulesPlace) -> None:
        if (what, place) in self.failing:
            raise KernelError(action=f"iptables-{what}", detail="the lock is held")


def run(program: str, *arguments: str, stdin: str = "") -> str:
    if shutil.which(program) is None:
        pytest.skip(f"{program} is not installed")
    done = subprocess.run([program, *arguments], input=stdin, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"{program} cannot be used on this kernel: {done.stderr.strip()}")
    return done.stdout


def listed(program: str) -> set[str]:
    """All rules, and all chains except built-in chains, that ``PROGRAM-save`` prints."""
    lines = run(f"{program}-save").splitlines()
    return {line.removesuffix(" [0:0]") for line in lines if line.startswith("-A") or " - [" in line}
