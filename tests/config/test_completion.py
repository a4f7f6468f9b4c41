"""Completion: each shell accepts its script, and bash completes the words that an operator types."""

import shutil
import subprocess

import pytest

from ipvsproxy import cli
from ipvsproxy.config import catalogue, commands, completion

COMMANDS = (*commands.COMMANDS, "completion")
READING = {"bash": ("-n",), "zsh": ("-n",), "fish": ("--no-execute",)}


def _complete(*words: str) -> list[str]:
    """The completions that bash offers for the last word."""
    typed = " ".join(f"'{word}'" for word in words)
    ask = f"COMP_WORDS=({typed}); COMP_CWORD={len(words) - 1}; _ipvsproxy; printf '%s\\n' \"${{COMPREPLY[@]}}\""
    script = completion.render("bash") + ask
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True, timeout=20)
    return done.stdout.split()


@pytest.mark.parametrize("shell", completion.SHELLS)
def test_shell_accepts_its_script(shell: str) -> None:
    program = shutil.which(shell)
    if not program:
        pytest.skip(f"{shell} is not installed")
    done = subprocess.run(
        [program, *READING[shell]],
        input=completion.render(shell),
        capture_output=True,
        text=True,
        check=False,
        timeout=20,
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("shell", completion.SHELLS)
def test_every_flag_and_command_is_in_every_script(shell: str) -> None:
    text = completion.render(shell)
    assert [flag for flag in catalogue.BY_FLAG if flag not in text] == []
    assert [command for command in COMMANDS if command not in text] == []


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (("ipvsproxy", "ver"), ["verify"]),
        (("ipvsproxy", "--ipvs-s"), ["--ipvs-scope-mark-bits", "--ipvs-scheduler", "--ipvs-sync-period", "--ipvs-strict-arp"]),
        (("ipvsproxy", "run", "ver"), []),
        (("ipvsproxy", "--d"), ["--detect-local-mode", "--dry-run"]),
        (("ipvsproxy", "run", "--dr"), ["--dry-run"]),
        (("ipvsproxy", "cleanup", "--dr"), ["--dry-run"]),
        (("ipvsproxy", "verify", "--o"), ["--oom-score-adj", "--output"]),
        (("ipvsproxy", "verify", "-o", ""), ["text", "json"]),
        (("ipvsproxy", "completion", ""), ["bash", "zsh", "fish"]),
        (("ipvsproxy", "run", "--logging-format", "j"), ["json"]),
        (("ipvsproxy", "run", "--detect-local-mode", "=", "Inter"), ["InterfaceNamePrefix"]),
        (("ipvsproxy", "run", "--detect-local-mode", "="), ["ClusterCIDR", "NodeCIDR", "BridgeInterface", "InterfaceNamePrefix"]),
        (("ipvsproxy", "run", "--manifests", "/et"), ["/etc"]),
    ],
)
def test_bash_offers_the_words_that_can_follow(words: tuple[str, ...], offered: list[str]) -> None:
    assert _complete(*words) == offered


def test_command_prints_a_script_with_all_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["completion", "bash"]) == 0
    assert "run plan verify" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [[], ["tcsh"], ["bash", "zsh"]])
def test_other_arguments_are_refused_with_the_names_of_the_shells(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["completion", *arguments]) == 2
    assert "bash|zsh|fish" in capsys.readouterr().err


def test_command_has_its_own_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["completion", "--help"]) == 0
    assert "source <(ipvsproxy completion zsh)" in capsys.readouterr().out
