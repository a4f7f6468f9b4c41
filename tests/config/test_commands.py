"""The options of commands that are no settings. ``tests/test_cli.py`` tests their refusal on a command line."""

import pytest

from ipvsproxy.config import commands
from ipvsproxy.config.commands import Sort, TopOptions


@pytest.mark.parametrize(
    ("arguments", "dry_run", "as_json", "rest"),
    [
        ([], False, False, []),
        (["--dry-run", "--v=4"], True, False, ["--v=4"]),
        (["--dry-run=true", "--output=json"], True, True, []),
        (["--config", "--dry-run", "--dry_run=0"], False, False, ["--config", "--dry-run"]),
        (["--output=json", "--", "--output=text", "-o"], False, True, ["--", "--output=text", "-o"]),
        (["--dry-run", "--dry-run=false", "--output", "json", "-o=text", "x"], False, False, ["x"]),
    ],
)
def test_options_are_split_from_the_rest_and_the_last_value_counts(
    arguments: list[str],
    dry_run: bool,  # noqa: FBT001 - a table
    as_json: bool,  # noqa: FBT001 - a table
    rest: list[str],
) -> None:
    assert commands.take_output(arguments) == (commands.Output(dry_run, as_json), rest)


def test_wrong_values_are_reported() -> None:
    own, _ = commands.take_output(["--dry-run=", "--output"])
    assert [str(problem) for problem in own.problems] == [
        "--dry-run: '' must be true or false",
        "--output: '' must be one of text, json",
    ]


def test_without_options_the_defaults_count_and_other_arguments_stay() -> None:
    assert commands.take_top_options(["--kubeconfig", "x", "word", "-v=2"]) == (
        TopOptions(),
        ["--kubeconfig", "x", "word", "-v=2"],
        (),
    )


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
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
def test_each_option_is_read(arguments: list[str], options: TopOptions) -> None:
    assert commands.take_top_options(arguments) == (options, [], ())


@pytest.mark.parametrize(
    ("argument", "problem"),
    [
        ("--once=x", "--once: 'x' must be true or false"),
        ("--interval=0.4s", "--interval: '0.4s' must be 0.5s to 1h"),
        ("--interval=2h", "--interval: '2h' must be 0.5s to 1h"),
        ("--interval=", "--interval: '' must be a duration such as 30s, 1m30s or 1h"),
        ("--sort=size", "--sort: 'size' must be one of name, connections, packets, bytes, problems"),
        ("--server=https://node", "--server: 'https://node' must be a URL such as http://127.0.0.1:10249"),
        ("--server=node:10249", "--server: 'node:10249' must be a URL such as http://127.0.0.1:10249"),
        ("--server=http://node:x", "--server: 'http://node:x' must be a URL such as http://127.0.0.1:10249"),
        ("--server=http://node/metrics", "--server: 'http://node/metrics' must be a URL such as http://127.0.0.1:10249"),
        ("--server=http://[::1", "--server: 'http://[::1' must be a URL such as http://127.0.0.1:10249"),
    ],
)
def test_a_wrong_value_is_named(argument: str, problem: str) -> None:
    taken = commands.take_top_options([argument, "--v=2"])
    assert [str(one) for one in taken.problems] == [problem]
    assert taken.others == ["--v=2"]
    assert taken.options == TopOptions()
