"""What the kernel says about the tables of iptables: a plain answer counts, and each doubt is left to the program."""

import errno
import pathlib
import shutil
import subprocess
from collections.abc import Callable

import pytest

from ipvsproxy.kernel.base import netlink, nft_message, sockopt
from ipvsproxy.kernel.base.errors import KernelError
from ipvsproxy.kernel.iptables import driver as iptables
from ipvsproxy.kernel.iptables import legacy_tables
from ipvsproxy.kernel.iptables import tables as iptables_tables
from ipvsproxy.kernel.iptables.variant import Variant, commands
from ipvsproxy.model.net import Family
from ipvsproxy.model.rules import ChainKey

CASES = [(variant, family) for variant in Variant for family in Family]
IDS = [f"{variant}-{family.label}" for variant, family in CASES]


@pytest.fixture(params=CASES, ids=IDS)
def place(request: pytest.FixtureRequest) -> tuple[Variant, Family]:
    """A variant and family that this kernel and host have, in a fresh namespace, with all tables of iptables."""
    variant, family = request.param
    request.getfixturevalue("fresh_namespace")
    command = commands(variant)[family]
    if shutil.which(command) is None:
        pytest.skip(f"{command} is not installed")
    trial = subprocess.run(["unshare", "--net", command, "-t", "nat", "-N", "TRIED"], capture_output=True, text=True, check=False)
    if trial.returncode:
        pytest.skip(f"this kernel has no tables of {command}: {trial.stderr.strip()}")
    return variant, family


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


def listed(variant: Variant, family: Family) -> list[str]:
    """What stands in the tables, except policies and comments."""
    text = subprocess.run([f"{commands(variant)[family]}-save"], check=True, capture_output=True, text=True).stdout
    return [line for line in text.splitlines() if line[:1] not in ("#", "*", "") and " ACCEPT [" not in line and line != "COMMIT"]


def test_a_fresh_namespace_holds_nothing_and_takes_rules_of_which_nothing_remains(place: tuple[Variant, Family]) -> None:
    variant, family = place
    assert iptables_tables.hold_nothing(family, variant)
    assert iptables_tables.take_rules(family, variant)
    assert iptables_tables.hold_nothing(family, variant), "the trial has left nothing"
    assert listed(variant, family) == []


@pytest.mark.parametrize("change", [("-N", "STRANGE"), ("-A", "OUTPUT", "-j", "ACCEPT")], ids=["chain", "rule"])
@pytest.mark.parametrize("table", ["nat", "filter", "mangle", "raw"])
def test_a_chain_or_a_rule_of_anybody_in_any_table_is_something(
    place: tuple[Variant, Family], table: str, change: tuple[str, ...]
) -> None:
    variant, family = place
    command = commands(variant)[family]
    tried = subprocess.run([command, "-t", table, *change], capture_output=True, text=True, check=False)
    if tried.returncode:
        pytest.skip(f"this kernel does not do it: {tried.stderr.strip()}")
    assert not iptables_tables.hold_nothing(family, variant)


def test_the_answer_agrees_with_the_trial_of_the_program(place: tuple[Variant, Family]) -> None:
    variant, family = place
    driver = iptables.IptablesDriver(chains=(), jumps=(), commands=commands(variant))
    assert driver.try_writing(family) is None
    assert iptables_tables.take_rules(family, variant)


def test_a_trial_beside_rules_of_others_leaves_them(place: tuple[Variant, Family]) -> None:
    variant, family = place
    run(commands(variant)[family], "-t", "nat", "-A", "OUTPUT", "-j", "ACCEPT")
    before = listed(variant, family)
    assert iptables_tables.take_rules(family, variant)
    assert listed(variant, family) == before


def refuse(number: int) -> Callable[..., object]:
    def refusing(*_: object) -> object:
        raise KernelError(action="ask", errno=number)

    return refusing


@pytest.mark.parametrize("family", Family)
@pytest.mark.parametrize("number", [errno.ENOENT, errno.EINVAL, errno.ENOBUFS, errno.EPERM])
def test_a_refused_question_is_a_doubt(monkeypatch: pytest.MonkeyPatch, family: Family, number: int) -> None:
    monkeypatch.setattr(legacy_tables, "names", lambda *_: ("nat",))
    monkeypatch.setattr(legacy_tables, "is_bare", refuse(number))
    monkeypatch.setattr(netlink.Channel, "dump", refuse(number))
    monkeypatch.setattr(nft_message, "run", refuse(number))
    for variant in Variant:
        assert not iptables_tables.hold_nothing(family, variant)
        assert not iptables_tables.take_rules(family, variant)


def test_an_answer_that_is_cut_off_is_a_doubt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(legacy_tables, "names", lambda *_: ("nat",))
    monkeypatch.setattr(sockopt, "ask", lambda *_: b"nat\0")
    with pytest.raises(KernelError, match="the answer is incomplete"):
        legacy_tables.is_bare(Family.IPV4, "nat")
    assert not iptables_tables.hold_nothing(Family.IPV4, Variant.LEGACY)
    assert not iptables_tables.take_rules(Family.IPV4, Variant.LEGACY)


@pytest.mark.parametrize(
    "failed",
    [
        {},
        {0: errno.EOPNOTSUPP},
        {2: errno.EPERM},
        {-1: errno.ENOENT},
        {0: errno.ENOENT, 2: errno.ENOENT},
        {2: netlink.UNANSWERED},
    ],
)
def test_a_trial_counts_only_if_the_kernel_refuses_its_end_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, failed: dict[int, int]
) -> None:
    monkeypatch.setattr(nft_message, "run", lambda *_: failed)
    assert not iptables_tables.take_rules(Family.IPV4, Variant.NF_TABLES)
    monkeypatch.setattr(nft_message, "run", lambda *_: {2: errno.ENOENT})
    assert iptables_tables.take_rules(Family.IPV4, Variant.NF_TABLES)


def test_names_of_tables_that_cannot_be_read_are_a_doubt_and_no_tables_are_none(tmp_path: pathlib.Path) -> None:
    names = tmp_path / "thread-self/net/ip_tables_names"
    names.mkdir(parents=True)
    assert not iptables_tables.hold_nothing(Family.IPV4, Variant.LEGACY, tmp_path)
    assert iptables_tables.hold_nothing(Family.IPV6, Variant.LEGACY, tmp_path)


def test_only_chains_of_the_family_in_question_count(place: tuple[Variant, Family]) -> None:
    variant, family = place
    if variant is not Variant.NF_TABLES:
        pytest.skip("only nf_tables has one dump for all families")
    run(commands(variant)[family], "-t", "nat", "-N", "STRANGE")
    other = Family.IPV6 if family is Family.IPV4 else Family.IPV4
    strange = ChainKey("nat", "STRANGE")
    assert iptables_tables.has_chain(family, lambda key: key == strange)
    assert not iptables_tables.has_chain(family, lambda key: key == ChainKey("filter", "STRANGE"))
    assert not iptables_tables.has_chain(other, lambda _: True)
