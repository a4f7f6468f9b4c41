"""The iptables driver, with shell scripts in place of the iptables programs.

Tests with the real iptables programs are in test_programs.py.
"""

import pathlib

import pytest

from ipvsproxy.kernel.base.errors import KernelError
from ipvsproxy.kernel.iptables import iptables_driver as iptables
from ipvsproxy.kernel.iptables import process as iptables_process
from ipvsproxy.kernel.iptables import syntax as iptables_syntax
from ipvsproxy.kernel.iptables.iptables_driver import Refusal
from ipvsproxy.model.net import Family
from ipvsproxy.model.plan import Operation, Outcome, Verb
from ipvsproxy.model.rules import render_jump
from tests.kernel.iptables.skeleton_example import CHAINS, NOTHING, SKELETON
from tests.support.programs import make_program


@pytest.mark.parametrize(
    ("text", "version", "variant", "random_fully"),
    [
        ("iptables v1.8.9 (nf_tables)\n", (1, 8, 9), "nf_tables", True),
        ("ip6tables v1.8.11 (legacy)\n", (1, 8, 11), "legacy", True),
        ("iptables v1.6.2\n", (1, 6, 2), "legacy", True),
        ("iptables v1.6.1\n", (1, 6, 1), "legacy", False),
    ],
)
def test_the_iptables_variant_and_features_are_derived_from_the_version_that_the_program_prints(
    text: str,
    version: tuple[int, ...],
    variant: str,
    random_fully: bool,  # noqa: FBT001 - pytest passes the boolean by name
) -> None:
    program = iptables.parse_version(text)
    assert (program.version, program.variant, program.random_fully) == (version, variant, random_fully)


def test_a_program_that_prints_no_version_is_an_error() -> None:
    with pytest.raises(KernelError, match="contains no version"):
        iptables.parse_version("usage: foo\n")


@pytest.mark.parametrize(
    ("printed", "reported"),
    [
        (
            "iptables v1.8.9 (legacy): Set NOPE doesn't exist.\n\nError occurred at line: 3\nTry `iptables -h' or 'more'.\n",
            "iptables v1.8.9 (legacy): Set NOPE doesn't exist.; Error occurred at line: 3 (-A K -m set --match-set NOPE dst)",
        ),
        ("Another app is currently holding the xtables lock.\n", "Another app is currently holding the xtables lock."),
        ("failed at line: 0", "failed at line: 0"),
        ("failed at line: 1", "failed at line: 1 (*nat)"),
        ("failed at line: 4", "failed at line: 4 (COMMIT)"),
        ("failed at line: 5", "failed at line: 5"),
    ],
)
def test_a_failed_write_gives_a_one_line_error_with_the_line_whose_number_iptables_printed(printed: str, reported: str) -> None:
    assert iptables_process.describe_failure(printed, "*nat\n:K - [0:0]\n-A K -m set --match-set NOPE dst\nCOMMIT\n") == reported


@pytest.fixture
def programs(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """An empty folder at the head of PATH, for scripts that replace the iptables programs and record their arguments."""
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return tmp_path


def new_driver(programs: pathlib.Path, *, save: str = "true", restore: str, version: str = "1.8.9") -> iptables.IptablesDriver:
    """An iptables driver that runs these scripts as its iptables programs."""
    make_program(programs, "iptables", f"echo iptables v{version}")
    make_program(programs, "iptables-save", save)
    make_program(programs, "iptables-restore", restore)
    return iptables.IptablesDriver(chains=SKELETON.chains, jumps=SKELETON.jumps)


@pytest.mark.parametrize(("version", "arguments"), [("1.6.1", "--noflush"), ("1.8.9", "-w 5 --noflush")])
def test_iptables_restore_is_started_with_an_option_to_wait_if_its_version_has_this_option(
    programs: pathlib.Path, version: str, arguments: str
) -> None:
    restore = f'echo "$@" > {programs}/arguments; cat > {programs}/stdin'
    driver = new_driver(programs, restore=restore, version=version)
    operation = Operation(Verb.SET, SKELETON)
    assert [outcome.error for outcome in driver.apply([operation])] == [""]
    assert (programs / "arguments").read_text().strip() == arguments
    assert (programs / "stdin").read_text() == iptables_syntax.render_restore(SKELETON, NOTHING)


def test_rules_are_written_even_when_the_tables_cannot_be_read(programs: pathlib.Path) -> None:
    driver = new_driver(programs, save="echo '*nat'", restore=f"cat >> {programs}/written")
    assert driver.apply([Operation(Verb.SET, SKELETON)]) == [Outcome(Operation(Verb.SET, SKELETON))]
    assert (programs / "written").read_text() == iptables_syntax.render_restore(SKELETON, NOTHING)
    with pytest.raises(KernelError, match="its output ends in the middle of table nat"):
        driver.observe(Family.IPV4)
    (programs / "written").unlink()
    driver.apply([Operation(Verb.SET, SKELETON)])
    assert "-I " not in (programs / "written").read_text(), "the jumps that it wrote itself are not written again"


def test_our_rules_in_a_table_count_as_unchanged_if_iptables_cannot_show_the_table(programs: pathlib.Path) -> None:
    driver = new_driver(programs, save=f"cat {programs}/saved", restore=f"cat > {programs}/written")
    (programs / "saved").touch()
    driver.apply([Operation(Verb.SET, SKELETON)])
    (programs / "saved").write_text("# Table `nat' is incompatible, use 'nft' tool.\n")
    observed = driver.observe(Family.IPV4)
    assert observed.chains == {key: rules for key, rules in CHAINS.items() if key.table == "nat"}
    assert observed.jumps == {jump for jump in SKELETON.jumps if jump.table == "nat"}
    driver.apply([Operation(Verb.SET, SKELETON)])
    inserted = [line for line in (programs / "written").read_text().splitlines() if line.startswith("-I ")]
    assert inserted == [f"-I {jump.source} {render_jump(jump)}" for jump in SKELETON.jumps if jump.table != "nat"]


def test_a_duplicate_jump_is_reported_as_drift_and_the_surplus_jump_is_removed(programs: pathlib.Path) -> None:
    first, *rest = (f"-A {jump.source} {render_jump(jump)}" for jump in SKELETON.jumps if jump.table == "nat")
    (programs / "saved").write_text("\n".join(["*nat", first, first, *rest, "COMMIT", ""]))
    driver = new_driver(programs, save=f"cat {programs}/saved", restore=f"cat >> {programs}/written")
    (twice,) = (jump for jump in SKELETON.jumps if first == f"-A {jump.source} {render_jump(jump)}")
    assert twice not in driver.observe(Family.IPV4).jumps
    driver.apply([Operation(Verb.SET, SKELETON)])
    written = (programs / "written").read_text().splitlines()
    assert written.count(first.replace("-A", "-D", 1)) == 1
    assert first.replace("-A", "-I", 1) not in written


def test_rules_are_listed_before_each_write_and_each_removal(programs: pathlib.Path) -> None:
    """Another program may have changed the rules since the last listing."""
    log, stdin = programs / "log", programs / "stdin"
    shown = f"echo listed >> {log}; printf '*nat\n:KUBE-MARK-MASQ - [0:0]\nCOMMIT\n'"
    driver = new_driver(programs, save=shown, restore=f"echo written >> {log}; cat > {stdin}")
    for verb in (Verb.ADD, Verb.SET):
        (outcome,) = driver.apply([Operation(verb, SKELETON)])
        assert outcome.error == ""
        assert "-I " in stdin.read_text(), "the jumps are not there"
    driver.apply([Operation(Verb.REMOVE, SKELETON)])
    assert stdin.read_text() == "*nat\n:KUBE-MARK-MASQ - [0:0]\n-X KUBE-MARK-MASQ\nCOMMIT\n"
    assert log.read_text().split() == ["listed", "written"] * 3


def test_the_listing_of_rules_fails_if_its_program_does_not_end_within_the_time_limit(
    programs: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_program(programs, "iptables-save", "exec sleep 600")
    monkeypatch.setattr(iptables_process, "TIMEOUT_S", 0.05)
    with pytest.raises(KernelError, match="did not end within"):
        iptables.IptablesDriver(chains=(), jumps=()).observe(Family.IPV4)


def test_the_error_says_what_to_install_if_an_iptables_program_is_missing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    expected = Refusal("iptables is not in PATH; install the package iptables", is_certain=True)
    assert iptables.IptablesDriver(chains=(), jumps=()).usable(Family.IPV4) == expected


def make_proc(folder: pathlib.Path, *, disabled: str) -> pathlib.Path:
    (folder / "thread-self/net").mkdir(parents=True)
    (folder / "thread-self/net/if_inet6").touch()
    (folder / "sys/net/ipv6/conf/all").mkdir(parents=True)
    (folder / "sys/net/ipv6/conf/all/disable_ipv6").write_text(f"{disabled}\n")
    return folder


def test_a_family_is_usable_if_both_its_iptables_program_and_the_kernel_support_it(
    programs: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    make_program(programs, "ip6tables", f'echo "$@" >> {programs}/arguments; echo ip6tables v1.8.9')
    driver = iptables.IptablesDriver(chains=(), jumps=(), proc=make_proc(tmp_path / "proc", disabled="0"))
    assert driver.usable(Family.IPV6) is None
    assert (programs / "arguments").read_text() == "--version\n-w 5 -t nat -S POSTROUTING\n"


def test_ipv6_is_not_usable_if_it_is_disabled_or_missing(tmp_path: pathlib.Path) -> None:
    disabled = iptables.IptablesDriver(chains=(), jumps=(), proc=make_proc(tmp_path / "proc", disabled="1"))
    assert disabled.usable(Family.IPV6) == Refusal("IPv6 is disabled by net.ipv6.conf.all.disable_ipv6 = 1", is_certain=True)
    (tmp_path / "proc/thread-self/net/if_inet6").unlink()
    for attempt in (disabled.usable, disabled.try_writing):
        assert attempt(Family.IPV6) == Refusal("the kernel has no IPv6", is_certain=True)


def test_a_family_is_not_usable_if_its_iptables_program_fails(programs: pathlib.Path) -> None:
    make_program(programs, "iptables", '[ "$1" = --version ] && echo iptables v1.8.9 || { echo "no table nat" >&2; exit 3; }')
    assert iptables.IptablesDriver(chains=(), jumps=()).usable(Family.IPV4) == Refusal("no table nat", is_certain=False)


def test_a_program_is_asked_for_its_version_only_once_if_it_serves_both_families(programs: pathlib.Path) -> None:
    make_program(programs, "xtables-multi", f"echo asked >> {programs}/log; echo iptables v1.8.9")
    for command in ("iptables", "ip6tables"):
        (programs / command).symlink_to(programs / "xtables-multi")
    driver = iptables.IptablesDriver(chains=(), jumps=())
    assert [driver.program(family).version for family in Family] == [(1, 8, 9)] * 2
    assert (programs / "log").read_text().split() == ["asked"]


@pytest.mark.parametrize("variant", ["nf_tables", "legacy"])
def test_an_iptables_program_is_not_run_if_its_file_name_shows_the_variant(programs: pathlib.Path, variant: str) -> None:
    name = f"xtables-{'nft' if variant == 'nf_tables' else variant}-multi"
    make_program(programs, name, f"echo asked >> {programs}/log")
    (programs / "iptables").symlink_to(programs / name)
    program = iptables.IptablesDriver(chains=(), jumps=()).program(Family.IPV4)
    assert (program.variant, program.random_fully) == (variant, True)
    assert not (programs / "log").exists()


@pytest.mark.parametrize(
    ("messages", "is_certain"),
    [
        ("iptables-restore v1.8.9 (legacy): iptables-restore: unable to initialize table 'nat'", False),
        ("can't initialize iptables table `nat': Table does not exist (do you need to insmod?)", True),
        ("can't initialize iptables table `nat': Memory allocation problem", False),
        ("Another app is currently holding the xtables lock; still 4s 0us time ahead", False),
        ("iptables-restore v1.8.9 (nf_tables): TABLE_ADD failed (Operation not supported): table nat", True),
        ("iptables-restore: Failed to initialize nft: Protocol not supported", True),
        ("iptables-restore v1.8.9 (nf_tables): Could not fetch rule set generation id: No buffer space available", False),
        ("", False),
    ],
)
def test_a_family_counts_as_certainly_unusable_only_if_the_kernel_does_not_support_it(
    programs: pathlib.Path, messages: str, *, is_certain: bool
) -> None:
    (programs / "said").write_text(messages)
    refusal = new_driver(programs, restore=f"cat {programs}/said >&2; exit 4").try_writing(Family.IPV4)
    assert refusal is not None
    assert messages.rpartition(": ")[2] in refusal.reason
    assert refusal.is_certain is is_certain


def test_a_family_does_not_count_as_certainly_unusable_if_its_iptables_program_hangs(
    programs: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = new_driver(programs, restore="exec sleep 600")
    driver.program(Family.IPV4)
    monkeypatch.setattr(iptables_process, "TIMEOUT_S", 0.05)
    assert driver.try_writing(Family.IPV4) == Refusal("it was killed because it did not end within 0.05 s", is_certain=False)
