"""Covers the choice of the iptables variant, for each criterion alone and with real rules of both variants."""

import pathlib

import pytest

from ipvsproxy.kernel.base.errors import KernelError
from ipvsproxy.kernel.iptables import iptables_driver as iptables
from ipvsproxy.kernel.iptables import iptables_tables
from ipvsproxy.kernel.iptables import variant as iptables_variant
from ipvsproxy.kernel.iptables.variant import Evidence, Variant
from ipvsproxy.model.net import Family
from ipvsproxy.model.rules import ChainKey
from tests.support.left_rules import run
from tests.support.programs import make_program

CHAINS = (ChainKey("nat", "KUBE-SERVICES"), ChainKey("filter", "KUBE-IPVS-FILTER"))
NFT, LEGACY = Variant.NF_TABLES, Variant.LEGACY
NOTHING = Evidence()
PROGRAMS = tuple(f"{command}-{kind}" for command in ("iptables", "ip6tables") for kind in ("nft", "legacy"))


@pytest.mark.parametrize(
    ("nft", "legacy", "variant", "reason"),
    [
        (Evidence(hint="KUBE-IPTABLES-HINT"), Evidence(others=9), NFT, "the kubelet's chain KUBE-IPTABLES-HINT is in it"),
        (Evidence(others=9), Evidence(hint="KUBE-KUBELET-CANARY"), LEGACY, "the kubelet's chain KUBE-KUBELET-CANARY is in it"),
        (Evidence(hint="KUBE-KUBELET-CANARY"), Evidence(hint="KUBE-KUBELET-CANARY"), NFT, "the kubelet's chain"),
        (Evidence(others=3), Evidence(others=1), NFT, "most rules are in it (3 of 4)"),
        (Evidence(others=1), Evidence(others=3, ours=9), LEGACY, "most rules are in it (3 of 4)"),
        (Evidence(ours=1), NOTHING, NFT, "our rules are already in it"),
        (Evidence(others=2), Evidence(others=2, ours=1), LEGACY, "our rules are already in it"),
    ],
)
def test_the_variant_that_already_has_rules_on_the_node_is_chosen(
    nft: Evidence, legacy: Evidence, variant: Variant, reason: str
) -> None:
    for default in Variant:
        choice = iptables_variant.decide({NFT: nft, LEGACY: legacy}, default)
        assert choice.variant is variant
        assert choice.reason.startswith(reason)
        assert choice.commands == iptables_variant.commands(variant)


@pytest.mark.parametrize("both", [NOTHING, Evidence(others=2), Evidence(ours=2)])
def test_the_variant_of_iptables_in_path_is_chosen_if_both_variants_have_equally_many_rules(both: Evidence) -> None:
    for default in Variant:
        choice = iptables_variant.decide({NFT: both, LEGACY: both}, default)
        assert (choice.variant, choice.reason, choice.commands) == (default, "it is the variant in PATH", iptables.COMMANDS)


@pytest.mark.parametrize("hinted", Variant)
def test_our_rules_in_the_other_variant_are_reported(hinted: Variant) -> None:
    found = {variant: Evidence(hint="KUBE-IPTABLES-HINT" if variant is hinted else "", ours=1) for variant in Variant}
    (other,) = set(Variant) - {hinted}
    assert iptables_variant.decide(found, NFT).left_behind is other
    assert iptables_variant.decide({hinted: found[hinted], other: NOTHING}, NFT).left_behind is None
    assert iptables_variant.decide(dict.fromkeys(Variant, Evidence(ours=1)), hinted).left_behind is other


def test_rules_in_our_chains_and_jumps_to_our_chains_count_as_our_rules() -> None:
    text = """\
*nat
:PREROUTING ACCEPT [0:0]
:KUBE-SERVICES - [0:0]
-A PREROUTING -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
-A KUBE-SERVICES -s 127.0.0.0/8 -j RETURN
-A POSTROUTING -j MASQUERADE
COMMIT
*mangle
:KUBE-KUBELET-CANARY - [0:0]
COMMIT
*filter
:KUBE-SERVICES - [0:0]
-A KUBE-SERVICES -j DROP
COMMIT
"""
    assert iptables_variant.count(text, CHAINS) == Evidence("KUBE-KUBELET-CANARY", ours=2, others=2)


def test_iptables_commands_without_a_variant_suffix_are_used_if_the_host_has_no_commands_with_a_suffix(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_program(tmp_path, "iptables", "echo 'iptables v1.8.9 (nf_tables)'")
    monkeypatch.setenv("PATH", f"{tmp_path}")
    assert iptables_variant.installed() == ()
    choice = iptables_variant.choose(CHAINS)
    assert (choice.commands, choice.variant, choice.reason) == (iptables.COMMANDS, NFT, "it is the variant in PATH")


def test_the_error_says_what_to_install_if_the_host_has_no_iptables(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(KernelError, match="install the package iptables"):
        iptables_variant.choose(CHAINS)


@pytest.fixture
def programs(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """An empty folder at the head of PATH, for scripts that replace the programs of both variants."""
    monkeypatch.setattr(iptables_variant, "DELAYS_S", (0.0, 0.0))
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return tmp_path


def make_variants(folder: pathlib.Path, *, nft: str = "exit 0", legacy: str = "exit 0", in_path: str) -> None:
    """Write scripts that replace the programs of both variants; the scripts that list rules print nothing.

    ``nft`` and ``legacy`` are the scripts that restore rules.
    """
    for command in ("iptables", "ip6tables"):
        for name, kind, restore in ((f"{command}-nft", "nf_tables", nft), (f"{command}-legacy", "legacy", legacy)):
            make_program(folder, name, f"echo '{command} v1.8.9 ({kind})'")
            make_program(folder, f"{name}-save")
            make_program(folder, f"{name}-restore", restore)
    (folder / "iptables").symlink_to(folder / f"iptables-{in_path}")


HAS_NONE = "echo 'TABLE_ADD failed (Operation not supported): table nat' >&2; exit 4"


@pytest.mark.parametrize(
    ("nft", "legacy", "variant"),
    [("exit 0", "exit 0", NFT), (HAS_NONE, "exit 0", LEGACY), (HAS_NONE, HAS_NONE, NFT), ("exit 4", "exit 0", NFT)],
)
def test_legacy_is_chosen_only_if_the_kernel_takes_rules_of_legacy_but_not_of_nf_tables(
    programs: pathlib.Path, monkeypatch: pytest.MonkeyPatch, nft: str, legacy: str, variant: Variant
) -> None:
    monkeypatch.setattr(iptables_tables, "take_rules", lambda *_: False)  # so the choice depends on the programs alone
    make_variants(programs, nft=nft, legacy=legacy, in_path="nft")
    choice = iptables_variant.choose(CHAINS)
    assert choice.variant == variant
    assert (choice.commands == iptables.COMMANDS) is (variant == NFT)
    assert ("takes no rules" in choice.reason) is (variant == LEGACY)


KUBELETS = "printf '*mangle\\n:KUBE-IPTABLES-HINT - [0:0]\\nCOMMIT\\n'"
FAILS_ONCE = "[ -e {0} ] || { touch {0}; echo 'fork: Cannot allocate memory' >&2; exit 4; }"


@pytest.mark.parametrize(("failure", "reason"), [("", "kubelet's chain"), (FAILS_ONCE, "kubelet's chain"), ("exit 4", "in PATH")])
def test_a_single_failed_listing_does_not_change_the_chosen_variant(programs: pathlib.Path, failure: str, reason: str) -> None:
    make_variants(programs, in_path="legacy")
    script = failure.replace("{0}", str(programs / "failed"))
    (programs / "iptables-nft-save").write_text(f"#!/bin/sh\n{script}\n{KUBELETS}\n")
    choice = iptables_variant.choose(CHAINS)
    assert reason in choice.reason
    assert choice.variant is (LEGACY if failure == "exit 4" else NFT)


def test_a_listing_is_not_repeated_if_the_kernel_does_not_support_the_variant(programs: pathlib.Path) -> None:
    make_variants(programs, in_path="legacy")
    none = "Could not fetch rule set generation id: Operation not supported"
    (programs / "iptables-nft-save").write_text(f"#!/bin/sh\necho asked >> {programs}/log\necho '{none}' >&2; exit 1\n")
    assert iptables_variant.choose(CHAINS).variant is LEGACY
    assert (programs / "log").read_text().split() == ["asked"]


@pytest.fixture
def both_variants(network_namespace: None) -> None:
    """The programs of both variants work, and the tables of both variants are empty."""
    for program in PROGRAMS:
        for action in ("-N", "-X"):
            run(program, action, "TRIED")  # skips the test if this host or this kernel does not have the program


@pytest.mark.usefixtures("both_variants")
@pytest.mark.parametrize(("variant", "kind"), [(NFT, "nft"), (LEGACY, "legacy")])
def test_the_variant_that_the_kubelet_uses_is_chosen_even_if_the_other_variant_has_more_rules(
    variant: Variant, kind: str
) -> None:
    other = "legacy" if kind == "nft" else "nft"
    run(f"iptables-{other}", "-A", "INPUT", "-j", "ACCEPT")
    assert iptables_variant.choose(CHAINS).commands[Family.IPV4] == f"iptables-{other}"
    run(f"ip6tables-{kind}", "-t", "mangle", "-N", "KUBE-IPTABLES-HINT")
    choice = iptables_variant.choose(CHAINS)
    assert (choice.variant, choice.left_behind) == (variant, None)
    assert choice.commands == {Family.IPV4: f"iptables-{kind}", Family.IPV6: f"ip6tables-{kind}"}
    run(f"iptables-{other}", "-N", "KUBE-IPVS-FILTER")
    run(f"iptables-{other}", "-A", "KUBE-IPVS-FILTER", "-j", "ACCEPT")
    assert iptables_variant.choose(CHAINS).left_behind == ({*Variant} - {variant}).pop()
