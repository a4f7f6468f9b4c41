"""Which leftover rules are removed, which rules stay, and how long removals wait if a program writes the rules again."""

import pytest

from ipvsproxy.model.rules import ChainKey, Jump, LeftRules, Reference, Removal
from ipvsproxy.reconcile.removal import leftovers
from ipvsproxy.reconcile.removal.leftovers import CALM_S, PATIENCE_S, Returns
from ipvsproxy.translate import nat, skeleton

SERVICE, ENDPOINT = ChainKey("nat", "KUBE-SVC-ABCDEFGHIJKLMNOP"), ChainKey("nat", "KUBE-SEP-234567ABCDEFGHIJ")
THEIR_SERVICES = ChainKey("filter", "KUBE-SERVICES")
OURS = ChainKey("nat", "KUBE-SERVICES")
OUR_FIREWALL = ChainKey("filter", "KUBE-PROXY-FIREWALL")
OUR_JUMP = Jump("nat", "OUTPUT", OURS.chain, "kubernetes service portals")
USED = leftovers.scope((OURS, OUR_FIREWALL), (OUR_JUMP,), is_used=True)
UNUSED = leftovers.scope((OURS, OUR_FIREWALL), (OUR_JUMP,), is_used=False)


def reference(source: ChainKey, target: ChainKey, comment: str = "", match: str = "") -> Reference:
    words = (match, f'-m comment --comment "{comment}"' if comment else "", f"-j {target.chain}")
    return Reference(source, " ".join(filter(None, words)), target)


INPUT, FORWARD, OUTPUT = (ChainKey("filter", name) for name in ("INPUT", "FORWARD", "OUTPUT"))
THEIR_REFERENCE = reference(FORWARD, THEIR_SERVICES, "kubernetes service portals", "-m conntrack --ctstate NEW")


@pytest.mark.parametrize(
    "key",
    [
        ("filter", "KUBE-SERVICES"),
        ("filter", "KUBE-EXTERNAL-SERVICES"),
        ("filter", "KUBE-NODEPORTS"),
        ("nat", "KUBE-NODEPORTS"),
        ("mangle", "KUBE-PROXY-CANARY"),
        ("nat", "KUBE-PROXY-CANARY"),
        ("filter", "KUBE-PROXY-CANARY"),
        *(("nat", f"KUBE-{kind}-ABCDEFGHIJKLMNOP") for kind in ("SVC", "SVL", "SEP", "EXT", "FW", "XLB")),
    ],
)
def test_a_chain_that_only_the_iptables_mode_has_is_recognised_by_its_table_and_its_name(key: tuple[str, str]) -> None:
    assert leftovers.is_of_iptables_mode(ChainKey(*key))


@pytest.mark.parametrize(
    "key",
    [
        ("nat", "KUBE-SERVICES"),
        ("nat", "KUBE-POSTROUTING"),
        ("nat", "KUBE-MARK-MASQ"),
        ("nat", "KUBE-MARK-DROP"),
        ("filter", "KUBE-FORWARD"),
        ("filter", "KUBE-FIREWALL"),
        ("filter", "KUBE-PROXY-FIREWALL"),
        ("mangle", "KUBE-KUBELET-CANARY"),
        ("mangle", "KUBE-IPTABLES-HINT"),
        ("filter", "KUBE-SVC-ABCDEFGHIJKLMNOP"),
        ("nat", "KUBE-SVC-WEB"),
        ("nat", "KUBE-SVC-ABCDEFGHIJKLMNOPQ"),
        ("filter", "KUBE-POD-FW-ABCDEFGHIJKLMNOP"),
        ("filter", "KUBE-NWPLCY-ABCDEFGHIJKLMNOP"),
        ("filter", "KUBE-ROUTER-INPUT"),
        ("nat", "cali-PREROUTING"),
    ],
)
def test_chains_of_ipvsproxy_or_other_programs_do_not_count_as_chains_of_the_iptables_mode(
    key: tuple[str, str],
) -> None:
    assert not leftovers.is_of_iptables_mode(ChainKey(*key))


def test_our_own_chains_in_the_unused_iptables_variant_are_removed_too() -> None:
    ours = reference(ChainKey("nat", "OUTPUT"), OURS, "kubernetes service portals")
    rules = LeftRules(chains={OURS: 4, SERVICE: 1}, references=(ours,))
    assert leftovers.removal(rules, UNUSED) == Removal(references=(ours,), emptied=(OURS, SERVICE), deleted=(OURS, SERVICE))
    assert UNUSED.concerns(OURS)
    assert not USED.concerns(OURS)


def test_only_jumps_of_the_iptables_mode_to_a_shared_chain_are_removed_in_the_used_variant() -> None:
    foreign = reference(OUTPUT, OUR_FIREWALL, "kubernetes load balancer firewall", "-m conntrack --ctstate NEW")
    ours = reference(INPUT, OUR_FIREWALL, "kube-proxy firewall rules")
    rules = LeftRules(chains={OUR_FIREWALL: 1}, references=(foreign, ours))
    assert USED.concerns(OUR_FIREWALL)
    assert leftovers.removal(rules, USED) == Removal(references=(foreign,))


def test_jumps_of_both_proxy_modes_to_a_shared_chain_are_removed_in_the_unused_iptables_variant() -> None:
    foreign = reference(INPUT, OUR_FIREWALL, "kubernetes load balancer firewall", "-m conntrack --ctstate NEW")
    ours = reference(INPUT, OUR_FIREWALL, "kube-proxy firewall rules")
    rules = LeftRules(chains={OUR_FIREWALL: 1}, references=(foreign, ours))
    scope = leftovers.scope(skeleton.CHAINS, skeleton.JUMPS, is_used=False)
    assert leftovers.removal(rules, scope) == Removal(
        references=(foreign, ours), emptied=(OUR_FIREWALL,), deleted=(OUR_FIREWALL,)
    )


@pytest.mark.parametrize(
    "other_reference",
    [
        reference(INPUT, THEIR_SERVICES),
        reference(INPUT, THEIR_SERVICES, "of somebody else"),
        reference(ChainKey("filter", "MINE"), THEIR_SERVICES, "kubernetes service portals"),
    ],
)
def test_a_leftover_chain_used_by_a_rule_of_another_program_is_emptied_once_and_not_deleted(
    other_reference: Reference,
) -> None:
    rules = LeftRules(chains={THEIR_SERVICES: 2, SERVICE: 1}, references=(THEIR_REFERENCE, other_reference))
    removal = leftovers.removal(rules, USED)
    assert removal == Removal(
        references=(THEIR_REFERENCE,), emptied=(THEIR_SERVICES, SERVICE), deleted=(SERVICE,), staying=(other_reference,)
    )
    done = leftovers.removal(LeftRules(chains={THEIR_SERVICES: 0}, references=(other_reference,)), USED)
    assert (done.is_needed, done.staying) == (False, (other_reference,))


def test_kube_mark_masq_keeps_its_rules_while_a_chain_of_a_network_plug_in_jumps_to_it() -> None:
    marks = ChainKey("nat", nat.MARK_MASQUERADE)
    hairpin = reference(
        ChainKey("nat", "CNI-DN-0123456789abcdef01234"), marks, match="-s 10.244.1.0/24 -p tcp -m tcp --dport 8080"
    )
    scope = leftovers.scope(skeleton.CHAINS, skeleton.JUMPS, is_used=False)
    rules = LeftRules(chains={OURS: 2, marks: 1}, references=(hairpin,))
    assert leftovers.removal(rules, scope) == Removal(emptied=(OURS,), deleted=(OURS,), staying=(hairpin,))
    assert leftovers.removal(LeftRules(chains={marks: 1}), scope) == Removal(emptied=(marks,), deleted=(marks,))


def test_no_leftover_chain_is_removed_while_one_of_our_chains_jumps_to_a_leftover_chain() -> None:
    rules = LeftRules(chains={THEIR_SERVICES: 2, SERVICE: 1}, references=(THEIR_REFERENCE, reference(OURS, SERVICE)))
    removal = leftovers.removal(rules, USED)
    assert (removal.references, removal.emptied, removal.deleted) == ((), (), ())
    assert removal.is_needed
    assert "nat/KUBE-SERVICES is not as it should be: it holds '-j KUBE-SVC-ABCDEFGHIJKLMNOP'" in removal.held_back


def test_no_removal_is_needed_if_there_are_no_leftover_rules() -> None:
    assert not leftovers.removal(LeftRules(), USED).is_needed
    assert not leftovers.removal(LeftRules(hidden=frozenset({"nat"})), UNUSED).is_needed


def test_rules_that_came_back_twice_are_removed_again_only_after_a_waiting_time() -> None:
    returns, now = Returns(), 1_000_000.0
    for _ in range(2):
        assert returns.due_s("here") <= now
        assert not returns.comes_back("here", now)
        returns.remove("here", now)
        now += 30
    assert returns.comes_back("here", now)
    assert returns.due_s("here") == now - 30 + PATIENCE_S
    now = returns.due_s("here")
    returns.remove("here", now)
    assert returns.due_s("here") == now + PATIENCE_S
    assert not returns.comes_back("elsewhere", now)


def test_rules_that_come_back_after_a_long_time_are_removed_at_once() -> None:
    returns = Returns()
    for now in (0.0, 30.0):
        returns.remove("here", now)
    assert returns.comes_back("here", 30 + CALM_S)
    assert not returns.comes_back("here", 31 + CALM_S)
    assert returns.due_s("here") <= 31 + CALM_S
    returns.remove("here", 31 + CALM_S)
    assert not returns.comes_back("here", 31 + CALM_S)
