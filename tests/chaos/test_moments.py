"""Tests that each bad moment takes effect, and that the program survives it.

Also tests that the suite detects a program from which a fix was removed.
"""

import asyncio
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from ipvsproxy.model.rules import Backend
from tests.chaos import bad_moments, broken, moments, plan
from tests.chaos.cluster import Trouble
from tests.chaos.configuration import SCHEDULERS, Configuration
from tests.chaos.figures import Figures
from tests.chaos.harm import HARMS, Harm
from tests.chaos.history import History, Violation
from tests.chaos.moments import Moment
from tests.chaos.silent_proxy import SilentProxy
from tests.support import lab, patience
from tests.support.cluster import BACKEND
from tests.support.program import ProgramError

SEED = "1:0"
SAVED = "*nat\n:OUTPUT ACCEPT [0:0]\nCOMMIT\n*filter\n:INPUT ACCEPT [0:0]\n-A INPUT -j ACCEPT\nCOMMIT\n*mangle\nCOMMIT\n"
FOUND: dict[Moment, str] = {
    Moment.LOCKED_RESTART: "ended with status 2|has ended|differs from the model|unanswered",
    Moment.NATIVE_RULE: "not within 60 s: all but rules",
    Moment.BLINKING_ADDRESS: "its virtual server was gone",
    Moment.SILENT_PROXY: "differs from the model after 60 s",
    Moment.FULL_RELOAD: "the program has ended",
}
"""A regular expression for each ``Moment`` whose fix the tests can remove from the program. If the fix is removed, the suite must
report a violation that matches the regular expression."""
SLOWLY_FOUND = set(FOUND) - {Moment.FULL_RELOAD}
"""The suite needs half a minute or more to notice that the program lacks its fix for one of these bad moments.
Until then, the test waits for a state that the program never reaches without the fix."""


@pytest.fixture(scope="module", name="node")
def _node() -> Iterator[lab.Lab]:
    with lab.Lab() as node:
        yield node


def live_through(node: lab.Lab, directory: Path, *kinds: plan.Special, without: Moment | None = None) -> Figures:
    figures = Figures()
    History(plan.only(*kinds), SEED, node, directory, figures, quick=True, without=without, backend=BACKEND).run()
    return figures


def test_each_bad_moment_has_a_function_and_a_violation_is_expected_for_each_fix_to_be_removed() -> None:
    assert set(bad_moments.ACTS) == set(Moment)
    assert set(broken.WITHOUT_MEND) == set(FOUND)


def test_each_bad_moment_each_trouble_and_each_harm_has_a_name_on_the_command_line() -> None:
    assert set(plan.KINDS.values()) == {*Moment, *Trouble, *HARMS}
    assert plan.name_of(plan.KINDS["stopped-clear-ipvs"]) == "stopped-clear-ipvs"
    assert plan.only(Moment.STALLED_LOG, HARMS[0]).steps == ["moment", "harm"]


def test_the_wrapper_around_iptables_save_hides_a_table_only_while_the_table_has_a_native_rule(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = tmp_path / "real"
    real.mkdir()
    for name, text in (("iptables-save", f"printf '{SAVED}'"), ("iptables", 'echo "$@" >> "$0.log"')):
        (real / name).write_text(f"#!/bin/sh\n{text}\n".replace("\n*", "\\n*"))
        (real / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{real}:/usr/bin:/bin")
    rules = moments.NativeRules(tmp_path)

    def listed() -> str:
        return subprocess.run([rules.path / "iptables-save"], capture_output=True, text=True, check=True).stdout

    assert listed() == SAVED
    with rules.added():
        nat, mangle = SAVED.split("*filter", maxsplit=1)[0], "*mangle\nCOMMIT\n"
        assert listed() == f"{nat}# Table `filter' is incompatible, use 'nft' tool.\n{mangle}"
    assert listed() == SAVED
    assert [line.split()[0] for line in (real / "iptables.log").read_text().splitlines()] == ["-A", "-D"]


async def test_a_silent_proxy_keeps_its_connections_open_and_serves_new_connections() -> None:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            writer.write(line)
        writer.close()

    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    proxy = SilentProxy()
    await proxy.open(server.sockets[0].getsockname()[1])
    reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
    writer.write(b"before\n")
    assert await reader.readline() == b"before\n"
    assert proxy.hush() == 1
    writer.write(b"hushed\n")
    later_reader, later_writer = await asyncio.open_connection("127.0.0.1", proxy.port)
    later_writer.write(b"later\n")
    assert await later_reader.readline() == b"later\n"
    silence = asyncio.create_task(reader.read())
    later_writer.write(b"and again\n")
    assert await later_reader.readline() == b"and again\n"
    assert not silence.done(), "neither a line nor an end arrives"
    silence.cancel()
    writer.close()
    later_writer.close()
    await proxy.close()
    server.close()


def test_the_configuration_file_still_names_the_kubeconfig_after_a_change_of_the_scheduler(tmp_path: Path) -> None:
    from_server = Configuration(tmp_path, "--kubeconfig=/k")
    from_server.write(SCHEDULERS[1])
    assert from_server.flags == (f"--config={tmp_path / 'config.json'}", "--hostname-override=node-a")
    assert '"kubeconfig": "/k"' in (tmp_path / "config.json").read_text()
    assert '"scheduler": "lc"' in (tmp_path / "config.json").read_text()
    assert Configuration(tmp_path, "--manifests=/m").flags[-1] == "--manifests=/m"


@pytest.mark.kernel
# The usual run skips this test, because it takes long. Other tests produce the same situations: test_chaos.py, tests/limits,
# test_node_addresses.py, test_native_rules.py.
@patience.THOROUGH
def test_the_program_survives_each_bad_moment(node: lab.Lab, tmp_path: Path) -> None:
    kinds = [kind for kind in plan.MOMENTS[BACKEND] if kind is not Moment.LOCKED_MOVE]
    figures = live_through(node, tmp_path, *kinds)
    assert figures.moments == {kind.value: 1 for kind in kinds}
    assert figures.injected["ENOBUFS"] > 0
    assert (figures.lost, figures.broken) == (0, 0)


@pytest.mark.kernel
@pytest.mark.skipif(BACKEND is not Backend.NFTABLES, reason="needs nf_tables")
def test_old_iptables_rules_have_no_effect_if_a_start_with_nftables_cannot_take_the_xtables_lock(
    node: lab.Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (f"{program}{ending}" for program in ("iptables", "ip6tables") for ending in ("", "-save", "-restore")):
        (tmp_path / name).symlink_to("/usr/sbin/xtables-legacy-multi")  # the nft variant of iptables takes no lock
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert live_through(node, tmp_path, Moment.LOCKED_MOVE).lost == 0


@pytest.mark.kernel
@patience.THOROUGH
@pytest.mark.parametrize("harm", [pytest.param(one, id=plan.name_of(one)) for one in HARMS])
def test_the_node_recovers_from_each_kind_of_harm(node: lab.Lab, tmp_path: Path, harm: Harm) -> None:
    assert live_through(node, tmp_path, harm).harms.total() == 1


@pytest.mark.kernel
@pytest.mark.skipif(BACKEND is Backend.NFTABLES, reason="some of these moments have no effect there; found with iptables")
@pytest.mark.parametrize("kind", [pytest.param(kind, marks=[patience.THOROUGH] * (kind in SLOWLY_FOUND)) for kind in FOUND])
def test_the_suite_detects_a_program_from_which_a_fix_was_removed(
    node: lab.Lab, tmp_path: Path, kind: Moment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bad_moments, "REACHED_WITHIN_S", 60.0)  # shorter, because the awaited state is never reached
    with pytest.raises((Violation, ProgramError), match=FOUND[kind]):
        live_through(node, tmp_path, kind, without=kind)
