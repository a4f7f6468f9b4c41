"""The command line as a user sees it: output, output stream and exit status.

Other test modules cover flags and the configuration file. Stand-ins replace the functions that run tasks and commands.
"""

import os
import pathlib
import re
import subprocess
import sys
import types
from typing import Any, NamedTuple

import pytest

from ipvsproxy import cli
from ipvsproxy.config import catalogue, commands, load
from ipvsproxy.config.settings import Config
from ipvsproxy.kernel import instance
from ipvsproxy.kernel.instance import Running


@pytest.fixture(autouse=True)
def _no_end_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps the test process alive: a tested command would end the process if a thread of an earlier test were still running."""
    monkeypatch.setattr(cli, "_end", int)


class Call(NamedTuple):
    """One call of the function that runs a task or a command; ``name`` is the name of the module of this function."""

    name: str
    config: Config
    subject: tuple[str, ...] = ()


STATUSES = {"daemon.app": 7, "daemon.process.requirements": 6, "commands.dry_run": 5, "commands.cleanup": 1}
"""The exit status that the stand-in for each of these modules returns; the stand-ins for all other modules return 3."""


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Call]:
    """The calls of the functions that run tasks and commands; stand-ins replace these functions and return at once."""
    made: list[Call] = []

    def load_module(name: str) -> types.SimpleNamespace:
        short = name.removeprefix("ipvsproxy.")

        def run(config: Config, *rest: Any) -> int:
            made.append(Call(short, config, () if short == "daemon.app" else rest))
            assert short != "daemon.app" or rest[0]() == config, "the configuration can be read again"
            return STATUSES.get(short, 3)

        return types.SimpleNamespace(run=run, init_only=run, parse_subject=str)

    monkeypatch.setattr(cli, "load_module", load_module)
    return made


@pytest.mark.parametrize("command", [[], ["run"]])
def test_the_daemon_starts_if_the_command_line_names_the_command_run_or_no_command(calls: list[Call], command: list[str]) -> None:
    assert cli.main([*command, "--proxy-mode=ipvs", "--ipvs-scheduler=lc"]) == 7
    assert [(call.name, call.config.translation.scheduler) for call in calls] == [("daemon.app", "lc")]


@pytest.mark.parametrize(
    ("arguments", "excluded", "is_dry", "as_json"),
    [
        (["--cleanup"], (), False, False),
        (["--cleanup", "--ipvs-exclude-cidrs=10.0.0.0/8"], ("10.0.0.0/8",), False, False),
        (["--cleanup", "--dry-run"], (), True, False),
        (["cleanup"], (), False, False),
        (["cleanup", "--dry-run", "--output=json"], (), True, True),
        (["cleanup", "--dry-run=false", "-o", "text", "--proxy-mode=ipvs"], (), False, False),
    ],
)
def test_the_cleanup_flag_and_the_cleanup_command_both_start_the_clean_up(
    calls: list[Call], arguments: list[str], excluded: tuple[str, ...], *, is_dry: bool, as_json: bool
) -> None:
    assert cli.main(arguments) == 1
    ((name, config, _),) = calls
    assert (name, tuple(map(str, config.policy.excluded))) == ("commands.cleanup", excluded)
    assert (config.dry_run, config.as_json) == (is_dry, as_json)


def test_cleanup_with_wrong_flags_reports_every_wrong_flag_and_removes_nothing(
    calls: list[Call], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["cleanup", "--output=yaml", "--dry-run=perhaps", "--nope"]) == 2
    assert calls == []
    assert capsys.readouterr().err.splitlines()[:3] == [
        "ipvsproxy: --dry-run: 'perhaps' must be true or false",
        "ipvsproxy: '--nope': unknown flag",
        "ipvsproxy: --output: 'yaml' must be one of text, json",
    ]
    assert cli.main(["cleanup", "--output"]) == 2
    assert cli.main(["cleanup", "--only=theirs"]) == 2
    assert cli.main(["cleanup", "--only="]) == 2, "an unset variable of a shell must not remove everything"
    assert calls == []


def test_wrong_flags_end_with_status_2_and_one_sentence_for_each_wrong_flag(
    calls: list[Call], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["--nope", "--oom-score-adj=5000"]) == 2
    assert calls == []
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines() == [
        "ipvsproxy: '--nope': unknown flag",
        "ipvsproxy: --oom-score-adj: 5000 must be -1000..1000",
        "ipvsproxy: --proxy-mode: is not set, and ipvs is the only mode that ipvsproxy supports; set --proxy-mode=ipvs",
        "ipvsproxy: nothing was changed; ipvsproxy --help lists every flag and field",
    ]


@pytest.mark.parametrize(
    ("word", "hint"), [("frobnicate", ""), ("verfy", "; did you mean verify?"), ("Doctor", "; did you mean doctor?")]
)
def test_the_refusal_of_an_unknown_command_suggests_the_most_similar_command(
    word: str, hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([word]) == 2
    first, last = capsys.readouterr().err.splitlines()
    assert first == f"ipvsproxy: {word!r}: is not a command{hint}"
    assert last.startswith("ipvsproxy: nothing was changed")


@pytest.mark.parametrize("arguments", [["--help"], ["-h"], ["run", "--help"], ["--nope", "--help"]])
def test_help_is_printed_even_if_other_arguments_are_wrong(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(arguments) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith("ipvsproxy [run] [flags]\n")
    assert captured.err == ""


@pytest.mark.parametrize("flag", ["--version", "--version=true", "--version=raw"])
def test_the_version_is_printed_in_one_line(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([flag]) == 0
    name, version = capsys.readouterr().out.split()
    assert name == "ipvsproxy"
    assert version[0].isdecimal()


def test_a_written_configuration_can_be_loaded(
    calls: list[Call], tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "written.yaml"
    assert cli.main(["--proxy-mode=ipvs", "--ipvs-scheduler=lc", "--healthz-port=1", f"--write-config-to={path}"]) == 0
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "ipvsproxy: --healthz-port: deprecated; use --healthz-bind-address\n" in captured.err
    assert captured.err.endswith(f"\nWrote configuration to {path}\n")
    assert cli.main([f"--config={path}"]) == 7
    assert [call.config.translation.scheduler for call in calls] == ["lc"]


def test_an_unwritable_path_for_the_configuration_is_reported_in_one_sentence(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["--proxy-mode=ipvs", f"--write-config-to={tmp_path}"]) == 2
    assert f"ipvsproxy: --write-config-to: '{tmp_path}' cannot be written: Is a directory\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "status"),
    [
        ([], 7),
        (["--dry-run"], 5),
        (["--init-only", "--dry-run"], 6),
        (["--init-only", "--cleanup"], 1),
        (["--cleanup", "--write-config-to={path}"], 0),
        (["--cleanup=false", "--dry-run=false"], 7),
    ],
)
def test_the_flag_init_only_yields_to_cleanup_and_cleanup_yields_to_write_config_to(
    calls: list[Call], tmp_path: pathlib.Path, flags: list[str], status: int
) -> None:
    arguments = [flag.format(path=tmp_path / "written.yaml") for flag in flags]
    assert cli.main(["--proxy-mode=ipvs", *arguments]) == status
    assert [STATUSES[call.name] for call in calls] == [status] * bool(status)


@pytest.fixture
def entered() -> list[str]:
    """The directories that commands have passed to ``os.chdir``."""
    return []


@pytest.fixture(autouse=True)
def running(monkeypatch: pytest.MonkeyPatch, entered: list[str]) -> list[Running]:
    """The ipvsproxy processes that run on this host: none, unless a test appends one."""
    found: list[Running] = []
    monkeypatch.setattr(instance, "running", lambda: next(iter(found), None))
    monkeypatch.setattr(os, "chdir", entered.append)
    return found


@pytest.mark.parametrize(
    ("arguments", "call"),
    [
        (["plan"], ("plan", "", False)),
        (["plan", "--output=json", "--proxy-mode=ipvs"], ("plan", "", True)),
        (["verify", "-o", "json"], ("verify", "", True)),
        (["list", "--output=json"], ("list", "", True)),
        (["explain", "demo/web", "--ipvs-scheduler=lc"], ("explain", "demo/web", False)),
        (["explain", "[fd00::1]:80", "--output", "text"], ("explain", "[fd00::1]:80", False)),
        (["explain", "--output", "json", "--hostname-override", "default/web", "10.0.0.1"], ("explain", "10.0.0.1", True)),
        (["verify", "--kubeconfig", "x", "-o", "json", "--"], ("verify", "", True)),
        (["doctor"], ("doctor", "", False)),
    ],
)
def test_commands_that_inspect_a_node_accept_the_flags_of_ipvsproxy_run(
    calls: list[Call], arguments: list[str], call: tuple[str, str, bool]
) -> None:
    assert cli.main(arguments) == 3
    assert [(f"commands.{call[0]}", tuple(filter(None, call[1:2])), call[2])] == [
        (made.name, made.subject, made.config.as_json) for made in calls
    ]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["plan", "--output=xml"], "--output: 'xml' must be one of text, json"),
        (["explain"], "explain: needs [namespace/]name | address[:port]\n"),
        (["explain", "--kubeconfig", "default/web"], "explain: needs [namespace/]name | address[:port]\n"),
        (
            ["explain", "default/web", "--v=2", "default/dns"],
            "explain: takes one [namespace/]name | address[:port], not 2: 'default/web', 'default/dns'\n",
        ),
        (["explain", "default/web", "--", "--v=2"], "explain: takes one [namespace/]name | address[:port], not 2"),
        (["verify", "demo/web"], "'demo/web': is neither a flag nor a command"),
    ],
)
def test_commands_that_inspect_a_node_refuse_unknown_arguments(
    calls: list[Call], arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(arguments) == 2
    assert calls == []
    assert f"ipvsproxy: {sentence}" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["list"], ["explain", "demo/web"], ["list", "-o", "json"], ["explain", "--", "demo/web"]])
def test_a_command_without_flags_uses_the_flags_of_the_ipvsproxy_that_runs_on_this_node(
    calls: list[Call], running: list[Running], entered: list[str], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments in (["--proxy-mode=ipvs", "--manifests=/a"], ["run", "--proxy-mode=ipvs", "--manifests=/a"]):
        running[:] = [Running(7, arguments)]
        assert cli.main(words) == 3
        assert capsys.readouterr().err == "ipvsproxy: with the flags of the ipvsproxy that runs here (process 7)\n"
    assert cli.main([*words[:1], "--manifests=/b", *words[1:]]) == 3
    assert [call.config.source.manifests for call in calls] == ["/a", "/a", "/b"]
    assert entered == ["/proc/7/cwd"] * 2, "the flags may name files from there"


def test_fleet_never_uses_the_kubeconfig_of_the_ipvsproxy_that_runs_on_this_node(
    calls: list[Call], running: list[Running]
) -> None:
    running.append(Running(7, ["--proxy-mode=ipvs", "--kubeconfig=/of-the-node"]))
    assert cli.main(["fleet"]) == 3
    assert [call.config.source.kubeconfig for call in calls] == [""]


def test_unusable_flags_of_a_running_ipvsproxy_are_never_printed(
    calls: list[Call], running: list[Running], capsys: pytest.CaptureFixture[str]
) -> None:
    running.append(Running(7, ["--proxy-mode=ipvs", "--future=secret", "--config=/absent/secret"]))
    assert cli.main(["list"]) == 3
    sentence = "the flags of the ipvsproxy that runs here (process 7) cannot be used: give them to this command"
    assert capsys.readouterr().err == f"ipvsproxy: {sentence}\n"
    assert [call.name for call in calls] == ["commands.list"]


@pytest.mark.parametrize(("process", "which"), [(7, "process 7"), (0, "in another container")])
def test_a_command_says_where_to_run_it_if_ipvsproxy_runs_in_a_container(
    calls: list[Call], running: list[Running], process: int, which: str, capsys: pytest.CaptureFixture[str]
) -> None:
    running.append(Running(process, None))
    assert cli.main(["list"]) == 3
    assert f"ipvsproxy runs in a container ({which}): give its flags and files, or run" in capsys.readouterr().err
    assert cli.main(["top"]) == 3
    assert capsys.readouterr().err == ""
    assert len(calls) == 2


@pytest.mark.parametrize("subject", ["a/b/c", ""])
def test_explain_refuses_an_argument_in_a_wrong_form(subject: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", "--v=1", subject]) == 2
    assert f"ipvsproxy: explain: {subject!r} is not namespace/name, name, address:port" in capsys.readouterr().err


@pytest.mark.parametrize("command", [name for name in commands.COMMANDS if name != "run"])
def test_each_command_has_a_help_text(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([command, "--help"]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"ipvsproxy {command} ")
    assert "Exit status: 0" in text
    assert "only --metrics-bind-address matters" in text or command != "top"
    assert max(map(len, text.splitlines())) <= 115


@pytest.mark.parametrize("command", commands.COMMANDS)
def test_each_example_in_a_help_text_is_an_accepted_command_line(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([command, "--help"]) == 0
    examples = re.findall(r"^  ipvsproxy (.*)$", capsys.readouterr().out.partition("Examples:")[2], re.MULTILINE)
    assert len(examples) > 1
    for example in examples:
        words = example.split()
        arguments = words if command == "run" else words[1:]
        assert command in ("run", words[0])
        assert load.parse(arguments, command, takes_words=command == "explain").problems == []


def test_help_shows_the_allowed_values_of_each_enumeration() -> None:
    texts = {name: command.help or commands.render_help() for name, command in commands.COMMANDS.items()}
    for option in filter(lambda one: one.choices, catalogue.BY_FLAG.values()):
        assert (
            f"--{option.flag} {'|'.join(option.choices)}"
            in texts[option.command or ("top" if option.flag == "output" else "run")]
        )


def test_a_command_does_not_fail_if_the_reader_of_its_output_closes_the_pipe() -> None:
    program = "import sys; from ipvsproxy import cli; sys.modules['ipvsproxy.commands.list'] = "
    program += "type('', (), {'run': lambda _: [print('x' * 99) for _ in range(9999)]}); cli.main(['list'])"
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == b""


def test_a_start_imports_only_the_modules_that_it_needs() -> None:
    """Rich and all of urllib3 are installed for the tests; a start must import neither Rich nor ``urllib3.util``."""
    program = (
        "import sys; from ipvsproxy import cli; cli.load_module('ipvsproxy.daemon.app'); "
        "cli.load_module('ipvsproxy.daemon.sources.watch'); print(*(name for name, module in sys.modules.items() if module))"
    )
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True, timeout=300)
    loaded = set(done.stdout.split())
    assert {"ipvsproxy.daemon.sources.watch", "aiohttp.client", "structlog"} <= loaded
    assert {"rich", "urllib3.util", "ipvsproxy.daemon.sources.directory"}.isdisjoint(loaded)
