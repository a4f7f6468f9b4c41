"""Tests the syntax of command lines, and which flags take precedence over the configuration file.

Also tests that every problem is reported.

``test_validate.py`` tests values.
"""

import pytest

from ipvsproxy.config import catalogue, load
from ipvsproxy.config.option import ConfigError, Option, Value
from ipvsproxy.config.settings import Format
from ipvsproxy.translate.translation_settings import Binding, TrafficScopes
from tests.config.loading import EXAMPLES, PATH, from_file, load_with, problems_of_file, problems_of_flags


def test_most_flags_are_ignored_with_a_notice_if_a_configuration_file_is_given() -> None:
    config = from_file("oomScoreAdj: -5", "--oom-score-adj=-7", "--ipvs-scheduler=lc")
    assert (config.oom_score_adj, config.translation.scheduler) == (-5, "rr")
    assert [str(notice) for notice in config.notices] == [
        "--oom-score-adj: not used, because --config is given",
        "--ipvs-scheduler: not used, because --config is given",
    ]


def test_some_flags_of_kube_proxy_override_the_configuration_file() -> None:
    text = "hostnameOverride: a\nlogging: {verbosity: 2, format: text, vmodule: [{filePattern: x, verbosity: 1}]}\n"
    flags = ["--hostname-override=b", "-v=5", "--logging-format=json", "--vmodule=y=2", "--master=https://m", "--init-only"]
    config = from_file(text, *flags)
    assert config.node_name == "b"
    assert (config.logging.verbosity, config.logging.format) == (5, Format.JSON)
    assert config.values["logging.vmodule"] == ("y=2", "x=1")
    assert config.source.api_server == "https://m"
    assert config.init_only
    assert config.notices == ()


def test_flags_that_kube_proxy_does_not_have_override_the_configuration_file() -> None:
    text = "ipvsproxy: {manifests: /a, trafficScopes: api, allowServiceAddresses: [10.0.0.0/8]}"
    flags = ["--manifests=/b", "--ipvs-traffic-scopes=kube-proxy", "--ipvs-vip-binding=routes", "--ipvs-allow-service-addresses="]
    config = from_file(text, *flags, "--ipvs-scheduler=lc")
    assert config.source.manifests == "/b"
    translation = config.translation
    assert (translation.scopes, translation.binding) == (TrafficScopes.KUBE_PROXY, Binding.ROUTES)
    assert translation.allowed_addresses == (), "a list replaces that of the file"
    assert [str(notice) for notice in config.notices] == ["--ipvs-scheduler: not used, because --config is given"]


@pytest.mark.parametrize("option", catalogue.OPTIONS["ipvsproxy's own options"], ids=lambda one: one.flag)
def test_flags_unknown_to_kube_proxy_cause_no_notice_if_a_configuration_file_is_given(option: Option) -> None:
    assert not from_file("", f"--{option.flag}={option.default}").notices


def test_an_empty_config_flag_means_that_there_is_no_file() -> None:
    assert load_with(["--config=", "--proxy-mode=ipvs"]).config_file == ""


def test_an_unreadable_file_is_reported_as_the_only_problem() -> None:
    assert problems_of_flags("--config=/nowhere") == ["--config: '/nowhere' cannot be read: No such file or directory"]


def test_values_out_of_range_are_reported_together_with_problems_of_the_flags_and_of_the_file() -> None:
    assert problems_of_file("ipvs: {strictARP: 1}\noomScoreAdj: 5000\n", "--nope") == [
        "'--nope': unknown flag",
        "4: ipvs.strictARP: 1 must be true or false",
        "5: oomScoreAdj: 5000 must be -1000..1000",
    ]


def test_no_other_problem_is_reported_if_a_file_has_the_wrong_api_version_and_kind() -> None:
    with pytest.raises(ConfigError) as raised:
        load_with(["--config", PATH], b"kind: Pod\napiVersion: v1\n")
    assert [problem.source.name for problem in raised.value.problems] == ["apiVersion", "kind"]


_OPTIONS = list(catalogue.BY_FLAG.values())


def values(*arguments: str, command: str = "run") -> dict[str, Value]:
    parsed = load.parse(arguments, command)
    assert parsed.problems == []
    return {key: value.value for key, value in parsed.given.items()}


def problem(*arguments: str) -> str:
    (problem,) = load.parse(arguments).problems
    return str(problem)


@pytest.mark.parametrize("option", _OPTIONS, ids=[option.flag for option in _OPTIONS])
def test_every_flag_and_its_value_can_be_written_in_every_form(option: Option) -> None:
    value = EXAMPLES[option.kind]
    text = option.written(value)
    underscored, command = option.flag.replace("-", "_"), (option.command or "run").split()[0]
    assert values(f"--{option.flag}={text}", command=command) == {option.key: value}
    assert values(f"--{underscored}={text}", command=command) == {option.key: value}
    if option.implied_value:
        assert option.key in values(f"--{option.flag}", command=command)
    else:
        assert values(f"--{option.flag}", text, command=command) == {option.key: value}


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        *((form, {"logging.verbosity": 4}) for form in ("-v=4", "-v 4", "-v4", "--v=4", "--v 4")),
        *((form, {"help": True}) for form in ("-h", "--help")),
        *((f"--masquerade{form}", {"iptables.masqueradeAll": True}) for form in ("-all", "-all=true", "_all=1", "-all=T")),
        ("--oom-score-adj -998 --kubeconfig=", {"oomScoreAdj": -998, "clientConnection.kubeconfig": ""}),
        ("--kubeconfig --config", {"clientConnection.kubeconfig": "--config"}),
        ("--master=https://a/?b=c", {"master": "https://a/?b=c"}),
        ("--ipvs-scheduler=rr --ipvs-scheduler lc", {"ipvs.scheduler": "lc"}),
        *((f"--{name}-bind-address=", {}) for name in ("healthz", "metrics")),
        *((f"--{name}=", {}) for name in ("bind-address", "cluster-cidr", "hostname-override")),
        (
            "--ipvs-exclude-cidrs=10.0.0.0/8,11.0.0.0/8 --ipvs-exclude-cidrs=12.0.0.0/8",
            {"ipvs.excludeCIDRs": ("10.0.0.0/8", "11.0.0.0/8", "12.0.0.0/8")},
        ),
        ("--feature-gates=A=true,B=true --feature-gates=B=false", {"featureGates": {"A": True, "B": False}}),
        ("--vmodule=a=1 --vmodule=b=2", {"logging.vmodule": ("a=1", "b=2")}),
    ],
)
def test_a_command_line_has_the_same_meaning_as_in_kube_proxy(line: str, expected: dict[str, Value]) -> None:
    """The cases are short forms, booleans, odd values and repeated values.

    A flag for an address or a name has no effect if its value is empty. Repeated lists are joined.
    """
    assert values(*line.split()) == expected


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("--cleanup false", "--cleanup: takes its value after an equals sign: --cleanup=false"),
        ("--cleanup true", "--cleanup: takes its value after an equals sign: --cleanup=true"),
        ("--ipvs-shceduler=rr", "'--ipvs-shceduler': unknown flag; did you mean --ipvs-scheduler?"),
        ("--zzzzzzzz", "'--zzzzzzzz': unknown flag"),
        ("-config=x", "'-config': unknown flag; write --config"),
        ("--config", "--config: needs a value, such as --config=FILE"),
        ("--ipvs-sync-period", "--ipvs-sync-period: needs a value, such as --ipvs-sync-period=30s"),
        ("frobnicate", "'frobnicate': is neither a flag nor a command"),
        ("-- --config", "'--config': is neither a flag nor a command"),
        ("--ipvs-sync-period=30", "--ipvs-sync-period: '30' must be a duration such as 30s, 1m30s or 1h"),
        ("--masquerade-all=yes", "--masquerade-all: 'yes' must be true or false"),
    ],
)
def test_a_wrong_command_line_is_refused_in_one_sentence_with_the_remedy(line: str, expected: str) -> None:
    assert problem(*line.split()) == expected


@pytest.mark.parametrize(
    ("arguments", "words", "keys"),
    [
        ([], (), []),
        (["web", "--config", "x"], ("web",), ["config"]),
        (["--config", "x", "web"], ("web",), ["config"]),
        (["--config=x", "web", "-v", "4"], ("web",), ["config", "logging.verbosity"]),
        (["--cleanup", "web", "-v4", "dns"], ("web", "dns"), ["cleanup", "logging.verbosity"]),
        (["-", "--config", "x"], ("-",), ["config"]),
        (["-v=4", "--", "--config", "web"], ("--config", "web"), ["logging.verbosity"]),
        (["--cleanup", "--", "true"], ("true",), ["cleanup"]),
    ],
)
def test_positional_words_may_be_anywhere_among_the_flags(arguments: list[str], words: tuple[str, ...], keys: list[str]) -> None:
    parsed = load.parse(arguments, takes_words=True)
    assert (parsed.words, list(parsed.given), parsed.problems) == (list(words), keys, [])
