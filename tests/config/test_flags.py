"""The syntax of command lines. ``test_validate.py`` tests the meaning of values."""

import pytest
from hypothesis import given, strategies

from ipvsproxy.config import catalogue, flags
from ipvsproxy.config.option import Kind, Option, Value

_EXAMPLES: dict[Kind, tuple[str, Value]] = {
    Kind.TEXT: ("some text", "some text"),
    Kind.BOOLEAN: ("true", True),
    Kind.INTEGER: ("12", 12),
    Kind.NUMBER: ("2.5", 2.5),
    Kind.LEVEL: ("4", 4),
    Kind.DURATION: ("1m30s", 90.0),
    Kind.LIST: ("10.0.0.0/8,fd00::/8", ("10.0.0.0/8", "fd00::/8")),
    Kind.GATES: ("A=true,B=false", {"A": True, "B": False}),
    Kind.PATTERNS: ("a=1,b=2", ("a=1", "b=2")),
    Kind.QUANTITY: ("2Ki", "2Ki"),
}
_OPTIONS = list(catalogue.BY_FLAG.values())


def values(*arguments: str, command: str = "run") -> dict[str, Value]:
    given, problems = flags.parse(arguments, command)
    assert problems == ()
    return {key: value.value for key, value in given.items()}


def problem(*arguments: str) -> str:
    _, problems = flags.parse(arguments)
    assert len(problems) == 1
    return str(problems[0])


@pytest.mark.parametrize("option", _OPTIONS, ids=[option.flag for option in _OPTIONS])
def test_every_flag_takes_its_value_in_every_spelling(option: Option) -> None:
    text, value = _EXAMPLES[option.kind]
    underscored, command = option.flag.replace("-", "_"), option.command or "run"
    assert values(f"--{option.flag}={text}", command=command) == {option.key: value}
    assert values(f"--{underscored}={text}", command=command) == {option.key: value}
    if option.implied_value:
        assert option.key in values(f"--{option.flag}", command=command)
    else:
        assert values(f"--{option.flag}", text, command=command) == {option.key: value}


@pytest.mark.parametrize("arguments", [["-v=4"], ["-v", "4"], ["-v4"], ["--v=4"], ["--v", "4"]])
def test_verbosity_takes_its_value_in_every_spelling(arguments: list[str]) -> None:
    assert values(*arguments) == {"logging.verbosity": 4}


def test_help_has_a_short_flag() -> None:
    assert values("-h") == values("--help") == {"help": True}


@pytest.mark.parametrize("form", ["--masquerade-all", "--masquerade-all=true", "--masquerade_all=1", "--masquerade-all=T"])
def test_switch_is_on(form: str) -> None:
    assert values(form) == {"iptables.masqueradeAll": True}


def test_switch_does_not_take_the_next_word() -> None:
    assert problem("--cleanup", "false") == "--cleanup: takes its value after an equals sign: --cleanup=false"


def test_value_may_begin_with_a_dash_or_be_empty() -> None:
    assert values("--oom-score-adj", "-998", "--kubeconfig=") == {"oomScoreAdj": -998, "clientConnection.kubeconfig": ""}
    assert values("--kubeconfig", "--config") == {"clientConnection.kubeconfig": "--config"}


def test_value_may_hold_equals_signs() -> None:
    assert values("--master=https://a/?b=c") == {"master": "https://a/?b=c"}


def test_last_of_several_values_counts() -> None:
    assert values("--ipvs-scheduler=rr", "--ipvs-scheduler", "lc") == {"ipvs.scheduler": "lc"}


def test_repeated_lists_are_joined() -> None:
    joined = ("10.0.0.0/8", "11.0.0.0/8", "12.0.0.0/8")
    assert values("--ipvs-exclude-cidrs=10.0.0.0/8,11.0.0.0/8", "--ipvs-exclude-cidrs=12.0.0.0/8") == {
        "ipvs.excludeCIDRs": joined
    }
    assert values("--feature-gates=A=true,B=true", "--feature-gates=B=false") == {"featureGates": {"A": True, "B": False}}
    assert values("--vmodule=a=1", "--vmodule=b=2") == {"logging.vmodule": ("a=1", "b=2")}


@pytest.mark.parametrize(
    "flag", ["bind-address", "healthz-bind-address", "metrics-bind-address", "cluster-cidr", "hostname-override"]
)
def test_empty_value_of_an_address_or_name_changes_nothing(flag: str) -> None:
    assert values(f"--{flag}=") == {}


def test_unknown_flag_comes_with_the_nearest_known_one() -> None:
    assert problem("--ipvs-shceduler=rr") == "'--ipvs-shceduler': unknown flag; did you mean --ipvs-scheduler?"
    assert problem("--zzzzzzzz") == "'--zzzzzzzz': unknown flag"


def test_refused_long_flag_with_one_dash_names_the_flag_with_two() -> None:
    assert problem("-config=x") == "'-config': unknown flag; write --config"


def test_flag_without_its_value_is_refused_with_an_example() -> None:
    assert problem("--config") == "--config: needs a value, such as --config=FILE"
    assert problem("--ipvs-sync-period") == "--ipvs-sync-period: needs a value, such as --ipvs-sync-period=30s"


def test_stray_words_are_refused() -> None:
    assert problem("frobnicate") == "'frobnicate': is neither a flag nor a command"
    assert problem("--", "--config") == "'--config': is neither a flag nor a command"


@pytest.mark.parametrize(
    ("arguments", "words", "others"),
    [
        ([], [], []),
        (["web", "--config", "x"], ["web"], ["--config", "x"]),
        (["--config", "x", "web"], ["web"], ["--config", "x"]),
        (["--config=x", "web", "-v", "4"], ["web"], ["--config=x", "-v", "4"]),
        (["--masquerade-all", "web", "-v4", "dns"], ["web", "dns"], ["--masquerade-all", "-v4"]),
        (["-", "--config"], ["-"], ["--config"]),
        (["-v=4", "--", "--config", "web"], ["--config", "web"], ["-v=4"]),
        (["--cleanup", "true", "web"], ["web"], ["--cleanup", "true"]),
        (["--cleanup", "--", "true"], ["true"], ["--cleanup"]),
        (["--nope", "web"], ["web"], ["--nope"]),
    ],
)
def test_words_may_stand_anywhere_among_the_flags(arguments: list[str], words: list[str], others: list[str]) -> None:
    assert flags.take_words(arguments) == (words, others)


def test_value_of_the_wrong_kind_names_flag_value_and_rule() -> None:
    assert problem("--ipvs-sync-period=30") == "--ipvs-sync-period: '30' must be a duration such as 30s, 1m30s or 1h"
    assert problem("--masquerade-all=yes") == "--masquerade-all: 'yes' must be true or false"
    assert problem("-v=-1") == "--v: '-1' must be a whole number in 0..2147483647"


def test_every_problem_is_reported_not_only_the_first() -> None:
    given, problems = flags.parse(["--foo", "--oom-score-adj=x", "-v=2", "word", "--config"])
    assert [str(problem).partition(":")[0] for problem in problems] == ["'--foo'", "--oom-score-adj", "'word'", "--config"]
    assert given["logging.verbosity"].value == 2


@given(
    strategies.lists(
        strategies.one_of(strategies.text(), strategies.sampled_from(_OPTIONS).map(lambda option: f"--{option.flag}"))
    )
)
def test_any_command_line_ends_in_values_and_problems(arguments: list[str]) -> None:
    given, problems = flags.parse(arguments)
    assert len(given) + len(problems) <= len(arguments)
