"""The options of commands that are no settings. ``tests/test_cli.py`` tests their refusal on a command line."""

import pytest

from ipvsproxy.config.settings import Sort, TopOptions
from tests.config import loading


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
def test_every_command_takes_them_and_the_last_value_counts(arguments: list[str], choices: tuple[bool, bool]) -> None:
    config = loading.from_flags(*arguments)
    assert (config.dry_run, config.as_json) == choices


def test_wrong_values_are_reported() -> None:
    assert loading.problems_of_flags("--dry-run=", "--output") == [
        "--dry-run: '' must be true or false",
        "--output: needs a value, such as --output=text",
    ]
    assert loading.problems_of_flags("-o", "xml") == ["--output: 'xml' must be one of text, json"]


def test_they_count_beside_a_file() -> None:
    config = loading.from_file("", "-o", "json", "--dry-run")
    assert (config.dry_run, config.as_json, config.notices) == (True, True, ())


def test_only_top_takes_the_options_of_top() -> None:
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
def test_each_option_is_read(arguments: list[str], options: TopOptions) -> None:
    assert loading.load_with(["--proxy-mode=ipvs", *arguments], command="top").top == options


@pytest.mark.parametrize(
    ("argument", "problem"),
    [
        ("--once=x", "--once: 'x' must be true or false"),
        ("--interval=0.4s", "--interval: 400ms must be 0.5s..3600s"),
        ("--interval=2h", "--interval: 2h0m0s must be 0.5s..3600s"),
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
def test_a_wrong_value_is_named(argument: str, problem: str) -> None:
    assert loading.problems_of_flags(argument, command="top") == [problem]
