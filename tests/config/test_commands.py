"""Covers shell completion, and command-line options that are not settings of the configuration.

``tests/test_cli.py`` covers the errors for invalid values of the options.

Each shell accepts its completion script, and bash completes the words that an operator types.
"""

import shutil
import subprocess

import pytest

from ipvsproxy import cli
from ipvsproxy.config import catalogue, commands
from ipvsproxy.config.settings import Sort, TopOptions
from tests.config import loading

COMMANDS = (*commands.COMMANDS, "completion")
READING = {"bash": ("-n",), "zsh": ("-n",), "fish": ("--no-execute",)}


def _complete(*words: str) -> list[str]:
    """The completions that bash offers for the last word of a command line."""
    typed = " ".join(f"'{word}'" for word in words)
    ask = f"COMP_WORDS=({typed}); COMP_CWORD={len(words) - 1}; _ipvsproxy; printf '%s\\n' \"${{COMPREPLY[@]}}\""
    script = commands.render_completion("bash") + ask
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True, timeout=120)
    return done.stdout.split()


@pytest.mark.parametrize("shell", commands.SHELLS)
def test_each_shell_accepts_its_completion_script(shell: str) -> None:
    program = shutil.which(shell)
    if not program:
        pytest.skip(f"{shell} is not installed")
    done = subprocess.run(
        [program, *READING[shell]],
        input=commands.render_completion(shell),
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("shell", commands.SHELLS)
def test_every_flag_and_command_is_in_every_completion_script(shell: str) -> None:
    text = commands.render_completion(shell)
    assert [flag for flag in catalogue.BY_FLAG if flag not in text] == []
    assert [command for command in COMMANDS if command not in text] == []


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (("ipvsproxy", "ver"), ["verify"]),
        (("ipvsproxy", "--ipvs-st"), ["--ipvs-strict-arp"]),
        (
            ("ipvsproxy", "--ipvs-s"),
            [f"--ipvs-{one}" for one in ("sysctls", "scope-mark-bits", "scheduler", "sync-period", "strict-arp")],
        ),
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
def test_bash_completion_offers_exactly_the_words_that_can_come_next(words: tuple[str, ...], offered: list[str]) -> None:
    assert _complete(*words) == offered


@pytest.mark.parametrize(
    ("arguments", "status", "text"),
    [
        (["bash"], 0, "run plan verify"),
        (["--help"], 0, "source <(ipvsproxy completion zsh)"),
        *((arguments, 2, "ipvsproxy completion bash|zsh|fish") for arguments in ([], ["tcsh"], ["bash", "zsh"])),
    ],
)
def test_completion_prints_its_usage_unless_the_only_argument_is_a_known_shell(
    arguments: list[str], status: int, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["completion", *arguments]) == status
    assert text in (capsys.readouterr().err if status else capsys.readouterr().out)


@pytest.mark.parametrize(
    ("arguments", "choices"),
    [
        ([], (False, False)),
        (["--dry-run", "--v=4"], (True, False)),
        (["--dry-run=true", "--output=json"], (True, True)),
        (["--kubeconfig", "--dry-run", "--dry_run=0"], (False, False)),
        (["--output=json", "--"], (False, True)),
        (["-ojson"], (False, True)),
        (["--dry-run", "--dry-run=false", "--output", "json", "-o=text"], (False, False)),
    ],
)
def test_the_flags_dry_run_and_output_may_be_spelled_in_several_ways_and_their_last_value_counts(
    arguments: list[str], choices: tuple[bool, bool]
) -> None:
    config = loading.from_flags(*arguments)
    assert (config.dry_run, config.as_json) == choices


def test_a_wrong_value_of_an_enumeration_is_reported_with_the_most_similar_value() -> None:
    (problem,) = loading.problems_of_flags("--detect-local-mode=nodecidr")
    assert problem.endswith(", InterfaceNamePrefix; did you mean NodeCIDR?")
    (problem,) = loading.problems_of_flags("--only=owm", command="cleanup")
    assert problem == "--only: 'owm' must be own"


def test_the_output_flag_and_the_dry_run_flag_take_effect_even_with_a_configuration_file() -> None:
    config = loading.from_file("", "-o", "json", "--dry-run")
    assert (config.dry_run, config.as_json, config.notices) == (True, True, ())


def test_only_top_accepts_the_options_of_top() -> None:
    assert loading.problems_of_flags("--once", command="verify") == ["'--once': unknown flag"]
    assert loading.problems_of_flags("--interval=3s") == ["'--interval': unknown flag"]


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        (["--kubeconfig", "x", "-v=2"], TopOptions()),
        (["--once"], TopOptions(once=True)),
        (["--once=false"], TopOptions()),
        (["--interval", "500ms"], TopOptions(interval_s=0.5)),
        (["--interval=1h"], TopOptions(interval_s=3600)),
        (["--sort=name"], TopOptions(sort=Sort.NAME)),
        (["--filter", "demo/web"], TopOptions(filter="demo/web")),
        (["--filter="], TopOptions()),
        (["--server=http://127.0.0.1:10249/"], TopOptions(server="http://127.0.0.1:10249")),
        (["--server", "http://[::1]:10249"], TopOptions(server="http://[::1]:10249")),
    ],
)
def test_the_command_top_takes_each_of_its_options_from_the_command_line(arguments: list[str], options: TopOptions) -> None:
    assert loading.load_with(["--proxy-mode=ipvs", *arguments], command="top").top == options


@pytest.mark.parametrize(
    ("argument", "problem"),
    [
        ("--once=x", "--once: 'x' must be true or false"),
        ("--interval=0.4s", "--interval: 400ms must be 0.5s..1h"),
        ("--interval=2h", "--interval: 2h0m0s must be 0.5s..1h"),
        ("--interval=", "--interval: '' must be a duration such as 30s, 1m30s or 1h"),
        ("--sort=size", "--sort: 'size' must be one of name, connections, packets, bytes, problems"),
        ("--server=", "--server: '' must be a URL such as http://127.0.0.1:10249"),
        ("--server=https://node", "--server: 'https://node' must be a URL such as http://127.0.0.1:10249"),
        ("--server=node:10249", "--server: 'node:10249' must be a URL such as http://127.0.0.1:10249"),
        ("--server=http://node:x", "--server: 'http://node:x' must be a URL such as http://127.0.0.1:10249"),
        ("--server=http://node/metrics", "--server: 'http://node/metrics' must be a URL such as http://127.0.0.1:10249"),
        ("--server=http://[::1", "--server: 'http://[::1' must be a URL such as http://127.0.0.1:10249"),
    ],
)
def test_invalid_values_of_the_options_of_the_command_top_are_reported(argument: str, problem: str) -> None:
    assert loading.problems_of_flags(argument, command="top") == [problem]
