"""Finds out which variant of iptables (nf_tables or legacy) holds the rules of a node with both variants.

The kernel applies the rules of both variants, but neither variant shows the other variant's rules. If a node has rules in both
variants, the rules of two programs may be applied in the wrong order. To keep all rules in one variant, our rules are written to
the variant that the kubelet and the CNI plugin use. This module considers the same evidence as kubernetes-sigs/iptables-wrappers,
in the same order.
"""

import enum
import shutil
import time
from collections.abc import Collection, Mapping
from typing import NamedTuple

from ipvsproxy.kernel.base.errors import KernelError
from ipvsproxy.kernel.iptables import iptables_driver as iptables
from ipvsproxy.kernel.iptables import iptables_tables
from ipvsproxy.kernel.iptables import process as iptables_process
from ipvsproxy.kernel.iptables.syntax import rules
from ipvsproxy.model.net import Family
from ipvsproxy.model.rules import ChainKey

HINTS = ("KUBE-IPTABLES-HINT", "KUBE-KUBELET-CANARY")
"""Chains that the kubelet creates. The first of these chains exists only to show which variant the kubelet uses."""

DELAYS_S = (0.1, 0.4)
"""The pauses between attempts to list the rules of a variant, in seconds. An attempt may fail because memory is short for a
moment, or because no process can be started at the moment."""


class Variant(enum.StrEnum):
    """The variants of iptables, by their names in the output of ``iptables --version``."""

    NF_TABLES = "nf_tables"
    LEGACY = "legacy"


_INFIXES: Mapping[Variant, str] = {Variant.NF_TABLES: "nft", Variant.LEGACY: "legacy"}


class Evidence(NamedTuple):
    """What a variant has in both families: a chain of ``HINTS`` (if any), and the numbers of our rules and other rules."""

    hint: str = ""
    ours: int = 0
    others: int = 0


class VariantChoice(NamedTuple):
    """The iptables programs to use, their variant, and the reason for choosing this variant.

    ``left_behind`` is the other variant, if it has some of our rules.
    """

    commands: Mapping[Family, str]
    variant: Variant
    reason: str
    left_behind: Variant | None = None


def commands(variant: Variant) -> Mapping[Family, str]:
    """The programs whose name contains the variant, such as ``iptables-nft`` and ``ip6tables-legacy``."""
    return {family: f"{command}-{_INFIXES[variant]}" for family, command in iptables.COMMANDS.items()}


def installed() -> tuple[Variant, ...]:
    """The variants whose programs are in PATH under names such as ``iptables-nft`` and ``iptables-legacy``.

    Distributions that have only one variant often have no programs whose names contain the variant.
    """
    return tuple(
        variant
        for variant in Variant
        if all(shutil.which(f"{commands(variant)[Family.IPV4]}{ending}") for ending in ("", "-save", "-restore"))
    )


def choose(chains: Collection[ChainKey]) -> VariantChoice:
    """Choose a variant of iptables by the rules in this network namespace. ``chains`` are the chains that belong to ipvsproxy.

    This function starts a few programs, and changes nothing.

    Without any evidence, the choice is the variant of the program in PATH, except if the kernel accepts rules only in the other
    variant.

    Raises:
        KernelError: no iptables program exists, or iptables prints no version.
    """
    variants = installed()
    if len(variants) < len(Variant):
        return VariantChoice(iptables.COMMANDS, _default(), "it is the variant in PATH")
    evidence = {variant: count("\n".join(map(_save, commands(variant).values())), chains) for variant in variants}
    choice = decide(evidence, _default())
    other = other_than(choice.variant)
    if choice.commands == iptables.COMMANDS and not _takes_rules(choice.variant) and _takes_rules(other):
        reason = f"this kernel takes no rules of {choice.variant}, the variant in PATH"
        return VariantChoice(commands(other), other, reason)
    return choice


def decide(evidence: Mapping[Variant, Evidence], default: Variant) -> VariantChoice:
    """Choose a variant by the contents of the tables of both variants; ``default`` is the variant of ``iptables`` in PATH."""
    nf_tables, legacy = evidence[Variant.NF_TABLES], evidence[Variant.LEGACY]
    hinted = [variant for variant in Variant if evidence[variant].hint]
    if hinted:
        variant, reason = hinted[0], f"the kubelet's chain {evidence[hinted[0]].hint} is in it"
    elif nf_tables.others != legacy.others:
        variant = Variant.NF_TABLES if nf_tables.others > legacy.others else Variant.LEGACY
        reason = f"most rules are in it ({evidence[variant].others} of {nf_tables.others + legacy.others})"
    elif bool(nf_tables.ours) is not bool(legacy.ours):
        variant = Variant.NF_TABLES if nf_tables.ours else Variant.LEGACY
        reason = "our rules are already in it"
    else:
        return VariantChoice(
            iptables.COMMANDS,
            default,
            "it is the variant in PATH",
            other_than(default) if all(one.ours for one in evidence.values()) else None,
        )
    other = other_than(variant)
    return VariantChoice(commands(variant), variant, reason, other if evidence[other].ours else None)


def count(text: str, chains: Collection[ChainKey]) -> Evidence:
    """Count ipvsproxy's rules and other rules in the output of an iptables-save program.

    A rule belongs to ipvsproxy if the rule is in one of ``chains``, or jumps to one of ``chains``.
    """
    hint, ours, others = "", 0, 0
    for key, rule in rules(text, may_be_cut=True):
        if rule is None:
            hint = hint or (key.chain if key.chain in HINTS else "")
        elif key in chains or ChainKey(key.table, rule.rpartition(" ")[2]) in chains:
            ours += 1
        else:
            others += 1
    return Evidence(hint, ours, others)


def _save(command: str) -> str:
    """The output of iptables-save; empty if every attempt failed, or if the kernel does not have the tables.

    The function makes several attempts, because one failure during a restart must not move the rules to the other variant.
    """
    for delay_s in (*DELAYS_S, None):
        try:
            return iptables_process.run(f"{command}-save")
        except KernelError as error:
            if iptables.lacks_tables(error):
                return ""
            if delay_s is not None:
                time.sleep(delay_s)
    return ""


def _takes_rules(variant: Variant) -> bool:
    """Whether the kernel accepts rules of the given variant.

    A program of iptables is run only if the kernel's answer is uncertain. Running iptables-nft leaves a table behind, and some
    commands of ipvsproxy must not change anything.
    """
    if iptables_tables.take_rules(Family.IPV4, variant):
        return True
    driver = iptables.IptablesDriver(chains=(), jumps=(), commands=commands(variant))
    refusal = driver.try_writing(Family.IPV4)
    return refusal is None or not refusal.is_certain


def _default() -> Variant:
    return Variant(iptables.IptablesDriver(chains=(), jumps=()).program(Family.IPV4).variant)


def other_than(variant: Variant) -> Variant:
    """The other variant."""
    return Variant.LEGACY if variant is Variant.NF_TABLES else Variant.NF_TABLES
