"""Covers the search for leftover rules in the tables of iptables, and their removal.

In some tests, scripts replace the iptables programs.
"""

import errno
import pathlib
from collections.abc import Callable
from unittest.mock import Mock

import pytest

from ipvsproxy.kernel.base import modules
from ipvsproxy.kernel.base.errors import KernelError
from ipvsproxy.kernel.base.modules import ModuleState
from ipvsproxy.kernel.iptables import iptables_driver as iptables
from ipvsproxy.kernel.iptables import variant as iptables_variant
from ipvsproxy.kernel.iptables.iptables_driver import Program
from ipvsproxy.kernel.iptables.iptables_tables import RuleChanges
from ipvsproxy.kernel.iptables.leftover_rules import NO_SUBSYSTEM, LeftoverRules, RulesPlace
from ipvsproxy.kernel.iptables.variant import Variant
from ipvsproxy.model.net import Family
from ipvsproxy.model.rules import Backend, ChainKey, LeftRules, Reference, Removal
from tests.support import left_rules
from tests.support.left_rules import listed, run
from tests.support.programs import make_program

NFT = RulesPlace(Variant.NF_TABLES, Family.IPV4, is_used=True)
LEGACY = RulesPlace(Variant.LEGACY, Family.IPV4, is_used=False)
NAMES = "thread-self/net/ip_tables_names"
CHAIN = ChainKey("filter", "KUBE-SERVICES")
SAVED = "*filter\n:INPUT ACCEPT [0:0]\n:KUBE-SERVICES - [0:0]\n-A INPUT -j KUBE-SERVICES\n-A KUBE-SERVICES -j DROP\nCOMMIT\n"
SHOW_SAVED = f"cat <<END\n{SAVED}END"


def concerns(key: ChainKey) -> bool:
    return key == CHAIN


@pytest.fixture
def programs(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """A folder at the head of PATH, for scripts that replace the iptables programs.

    The code under test also reads this folder in place of /proc.

    A file in the folder holds the list of legacy tables, which names only the table ``filter``. The state of every kernel module
    is unknown.
    """
    monkeypatch.setattr(modules, "module_state", lambda *_: ModuleState.UNKNOWN)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    make_program(tmp_path, "iptables", "echo 'iptables v1.8.9 (nf_tables)'")
    names = tmp_path / NAMES
    names.parent.mkdir(parents=True)
    names.write_text("filter\n")
    return tmp_path


def rules(programs: pathlib.Path) -> LeftoverRules:
    """A reader of leftover rules. The scripts in the folder ``programs`` replace the iptables programs that the reader starts.

    The scripts run even for nf_tables, because ``has_chain`` is always true.
    """
    return LeftoverRules(iptables.COMMANDS, programs, has_chain=lambda *_: True)


def test_only_our_chains_and_the_rules_that_jump_to_them_are_read(programs: pathlib.Path) -> None:
    make_program(programs, "iptables-save", f"echo \"# Table \\`nat' is incompatible, use 'nft' tool.\"\n{SHOW_SAVED}")
    reference = Reference(ChainKey("filter", "INPUT"), "-j KUBE-SERVICES", CHAIN)
    assert rules(programs).read(NFT, concerns) == LeftRules(chains={CHAIN: 1}, references=(reference,), hidden=frozenset({"nat"}))


@pytest.mark.parametrize(("place", "program"), [(NFT, "iptables-save"), (LEGACY, "iptables-legacy-save")])
@pytest.mark.parametrize("failure", ["echo 'Memory allocation problem' >&2; exit 4", "printf '*nat\\n'"])
def test_a_table_that_cannot_be_read_is_an_error_and_does_not_count_as_clean(
    programs: pathlib.Path, place: RulesPlace, program: str, failure: str
) -> None:
    with pytest.raises(KernelError, match=f"{program} is not in PATH"):
        rules(programs).read(place, concerns)
    make_program(programs, program, failure)
    with pytest.raises(KernelError, match=r"Memory allocation problem|in the middle of table nat"):
        rules(programs).read(place, concerns)


def test_a_table_that_the_kernel_certainly_does_not_have_counts_as_clean(programs: pathlib.Path) -> None:
    make_program(programs, "iptables-save", "echo 'Could not fetch rule set generation id: Operation not supported' >&2; exit 1")
    assert rules(programs).read(NFT, concerns) == LeftRules()


def test_no_iptables_program_is_started_if_nf_tables_contains_none_of_our_chains(programs: pathlib.Path) -> None:
    make_program(programs, "iptables-save", f"touch {programs}/started; exit 1")
    asked: list[ChainKey] = []

    def has_chain(family: Family, wanted: Callable[[ChainKey], bool]) -> bool:
        asked.extend(key for key in (CHAIN, ChainKey("nat", CHAIN.chain)) if wanted(key))
        return family is not Family.IPV4

    assert LeftoverRules(iptables.COMMANDS, programs, has_chain=has_chain).read(NFT, concerns) == LeftRules()
    assert asked == [CHAIN]
    assert not (programs / "started").exists()


def test_an_iptables_program_lists_the_chains_if_they_cannot_be_read_from_the_kernel(programs: pathlib.Path) -> None:
    make_program(programs, "iptables-save", SHOW_SAVED)
    has_chain = Mock(side_effect=KernelError(action="read the chains of IPv4", errno=errno.ENOBUFS))
    assert LeftoverRules(iptables.COMMANDS, programs, has_chain=has_chain).read(NFT, concerns).chains == {CHAIN: 1}
    with pytest.raises(KernelError, match="read the chains"):
        LeftoverRules(iptables.COMMANDS, programs, backend=Backend.NFTABLES, has_chain=has_chain).read(NFT, concerns)


@pytest.mark.parametrize("is_there", [True, False])
def test_no_iptables_program_is_started_and_no_module_is_loaded_if_there_are_no_legacy_tables(
    programs: pathlib.Path, *, is_there: bool
) -> None:
    names = programs / NAMES
    names.write_text("") if is_there else names.unlink()
    make_program(programs, "iptables-legacy-save", f"touch {programs}/started; exit 1")
    assert rules(programs).read(LEGACY, concerns) == LeftRules()
    assert rules(programs).fingerprint(LEGACY) == ((), ())
    assert not (programs / "started").exists()


def test_leftover_rules_and_their_fingerprint_are_unknown_if_the_table_names_cannot_be_read(
    programs: pathlib.Path,
) -> None:
    names = programs / NAMES
    names.unlink()
    names.mkdir()
    with pytest.raises(KernelError, match="ip_tables_names"):
        rules(programs).read(LEGACY, concerns)
    assert rules(programs).fingerprint(LEGACY) is None


@pytest.mark.parametrize(("number", "fingerprint"), [(errno.EINVAL, NO_SUBSYSTEM), (errno.ENOMEM, None)])
def test_a_failed_read_of_nf_tables_gives_a_fingerprint_only_if_the_kernel_has_no_nf_tables(
    programs: pathlib.Path, monkeypatch: pytest.MonkeyPatch, number: int, fingerprint: object
) -> None:
    refused = KernelError(action="read the generation of nf_tables", errno=number)
    monkeypatch.setattr(RuleChanges, "fingerprint", Mock(side_effect=refused))
    assert rules(programs).fingerprint(NFT) == fingerprint
    assert rules(programs).fingerprint(LEGACY) is None


def test_an_audit_does_not_query_nf_tables_again_after_the_kernel_has_refused_a_query(
    programs: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse = Mock(side_effect=KernelError(action="read the generation of nf_tables", errno=errno.EINVAL))
    monkeypatch.setattr(RuleChanges, "fingerprint", refuse)
    subject = rules(programs)
    assert [subject.fingerprint(NFT) for _audit in range(3)] == [NO_SUBSYSTEM] * 3
    assert refuse.call_count == 1
    assert subject.read(NFT, concerns) == LeftRules()


@pytest.mark.parametrize("place", [LEGACY, NFT])
def test_leftover_rules_are_neither_read_nor_removed_after_the_variant_of_iptables_has_changed(
    programs: pathlib.Path, place: RulesPlace
) -> None:
    """Otherwise, our own rules would count as leftovers of the other variant and would be removed."""
    for name in ("iptables-save", "iptables-legacy-save"):
        make_program(programs, name, SHOW_SAVED)
    for name in ("iptables-restore", "iptables-legacy-restore"):
        make_program(programs, name, f"touch {programs}/removed")
    subject = rules(programs)
    assert subject.read(place, concerns).chains == {CHAIN: 1}
    make_program(programs, "legacy-multi", "echo 'iptables v1.8.9 (legacy)'")
    (programs / "iptables").unlink()
    (programs / "iptables").symlink_to("legacy-multi")
    with pytest.raises(KernelError, match="iptables in PATH has become that of legacy"):
        subject.read(place, concerns)
    with pytest.raises(KernelError, match="iptables in PATH has become that of legacy"):
        subject.remove(place, Removal(emptied=(CHAIN,), deleted=(CHAIN,)))
    assert not (programs / "removed").exists()


def test_a_failed_removal_is_an_error(programs: pathlib.Path) -> None:
    make_program(programs, "iptables-restore", "echo 'Another app is currently holding the xtables lock.' >&2; exit 4")
    with pytest.raises(KernelError, match="holding the xtables lock"):
        rules(programs).remove(NFT, Removal(emptied=(CHAIN,), deleted=(CHAIN,)))


@pytest.mark.parametrize("installed", [(), tuple(Variant)])
def test_leftover_rules_of_the_other_variant_are_read_if_its_programs_are_installed(
    monkeypatch: pytest.MonkeyPatch, programs: pathlib.Path, installed: tuple[Variant, ...]
) -> None:
    monkeypatch.setattr(iptables_variant, "installed", lambda: installed)
    leftovers = rules(programs).places({Family.IPV4: Program((1, 8, 9), "nf_tables")})
    assert leftovers == ((NFT, LEGACY) if installed else (NFT,))


# The real programs.


@pytest.fixture(
    params=[(variant, family) for variant in Variant for family in Family], ids=lambda one: f"{one[0]}-{one[1].label}"
)
def place(request: pytest.FixtureRequest, network_namespace: None) -> RulesPlace:
    """A variant of iptables and an IP family whose tables contain rules of kube-proxy's iptables mode and of other programs."""
    variant, family = request.param
    run(f"{iptables_variant.commands(variant)[family]}-restore", "--noflush", stdin=left_rules.iptables_mode(family))
    return RulesPlace(variant, family, is_used=False)


def test_leftover_rules_are_removed_and_rules_of_other_programs_stay(place: RulesPlace) -> None:
    subject = LeftoverRules(iptables_variant.commands(iptables_variant.other_than(place.variant)))
    program = iptables_variant.commands(place.variant)[place.family]
    nodeports = ChainKey("filter", "KUBE-NODEPORTS")
    before = listed(program)
    leftovers = subject.read(place, lambda key: key in (CHAIN, nodeports))
    assert leftovers.chains == {CHAIN: 1, nodeports: 0}
    assert len(leftovers.references) == 3
    ours = tuple(leftovers.chains)
    subject.remove(place, Removal(references=leftovers.references, emptied=ours, deleted=ours))
    gone = before - listed(program)
    assert {
        ":KUBE-SERVICES -",
        '-A OUTPUT -m conntrack --ctstate NEW -m comment --comment "kubernetes service portals" -j KUBE-SERVICES',
    } < gone
    assert len(gone) == 5, "two chains with the same name stand in nat: the one of the filter table went"
    assert subject.read(place, lambda key: key in (CHAIN, nodeports)) == LeftRules()


@pytest.mark.usefixtures("network_namespace")
def test_the_nftables_backend_runs_iptables_only_if_nf_tables_has_a_chain_of_kube_proxy(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nft = RulesPlace(Variant.NF_TABLES, Family.IPV4, is_used=False)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/sbin:/usr/bin:/sbin:/bin")
    make_program(tmp_path, "iptables-nft-save", f"touch {tmp_path}/started\n{SHOW_SAVED}")
    subject = LeftoverRules(iptables.COMMANDS, tmp_path, backend=Backend.NFTABLES)
    assert subject.read(nft, concerns) == LeftRules()
    assert not (tmp_path / "started").exists()
    run("nft", "add", "table", "ip", "filter")
    run("nft", "add", "chain", "ip", "filter", "KUBE-SERVICES")
    assert subject.read(nft, concerns).chains == {CHAIN: 1}


@pytest.mark.usefixtures("network_namespace")
def test_all_our_rules_in_iptables_are_leftovers_if_the_backend_is_nftables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(iptables_variant, "installed", lambda: tuple(Variant))
    subject = LeftoverRules(iptables.COMMANDS, backend=Backend.NFTABLES)
    places = subject.places({Family.IPV6: Program((6, 1), "nftables")})
    assert places == tuple(RulesPlace(variant, Family.IPV6, is_used=False) for variant in Variant)


def test_the_nftables_backend_uses_the_installed_iptables_to_remove_leftover_rules(
    programs: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{programs}:/bin")
    monkeypatch.setattr(iptables_variant, "installed", lambda: ())
    make_program(programs, "iptables", "echo 'iptables v1.8.4 (legacy)'")
    make_program(programs, "iptables-save", SHOW_SAVED)
    make_program(programs, "iptables-restore", f"cat > {programs}/restored")
    subject = LeftoverRules(iptables.COMMANDS, programs, backend=Backend.NFTABLES)
    (place,) = subject.places({Family.IPV4: Program((6, 1), "nftables")})
    assert place == LEGACY
    left = subject.read(place, concerns)
    assert left.chains == {CHAIN: 1}
    subject.remove(place, Removal(emptied=(CHAIN,), deleted=(CHAIN,)))
    assert "-X KUBE-SERVICES" in (programs / "restored").read_text()
