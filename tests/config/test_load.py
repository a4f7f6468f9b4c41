"""Precedence of flags and file; every problem is reported."""

import pytest
from hypothesis import given, strategies

from ipvsproxy.config import catalogue
from ipvsproxy.config.option import ConfigError
from ipvsproxy.config.settings import Command, Format
from tests.config.loading import HEAD, PATH, from_file, load_with, problems_of_file, problems_of_flags


def test_file_replaces_the_flags_with_a_notice() -> None:
    config = from_file("oomScoreAdj: -5", "--oom-score-adj=-7", "--ipvs-scheduler=lc")
    assert (config.oom_score_adj, config.translation.scheduler) == (-5, "rr")
    assert [str(notice) for notice in config.notices] == [
        "--oom-score-adj: not used, because --config is given",
        "--ipvs-scheduler: not used, because --config is given",
    ]


def test_flags_that_override_the_file() -> None:
    text = "hostnameOverride: a\nlogging: {verbosity: 2, format: text, vmodule: [{filePattern: x, verbosity: 1}]}\n"
    flags = ["--hostname-override=b", "-v=5", "--logging-format=json", "--vmodule=y=2", "--master=https://m", "--init-only"]
    config = from_file(text, *flags)
    assert config.node_name == "b"
    assert (config.logging.verbosity, config.logging.format) == (5, Format.JSON)
    assert config.values["logging.vmodule"] == ("y=2", "x=1")
    assert config.source.api_server == "https://m"
    assert config.command is Command.INIT_ONLY
    assert config.notices == ()


def test_logging_options_of_the_file_apply_where_no_flag_sets_them() -> None:
    config = from_file("logging: {verbosity: 2, format: json}", "-v=5")
    assert (config.logging.verbosity, config.logging.format) == (5, Format.JSON)


def test_manifests_flag_overrides_the_directory_of_the_file() -> None:
    assert from_file("ipvsproxy: {manifests: /a}", "--manifests=/b").source.manifests == "/b"


def test_empty_hostname_flag_keeps_the_name_of_the_file() -> None:
    assert from_file("hostnameOverride: a", "--hostname-override=").node_name == "a"


def test_empty_config_flag_means_no_file() -> None:
    assert load_with(["--config=", "--proxy-mode=ipvs"]).config_file == ""


def test_unreadable_file_is_the_only_problem() -> None:
    assert problems_of_flags("--config=/nowhere") == ["--config: '/nowhere' cannot be read: No such file or directory"]


def test_problems_of_flags_file_and_rules_are_reported_together() -> None:
    assert problems_of_file("ipvs: {strictARP: 1}\noomScoreAdj: 5000\n", "--nope") == [
        "'--nope': unknown flag",
        "4: ipvs.strictARP: 1 must be true or false",
        "5: oomScoreAdj: 5000 must be -1000..1000",
    ]


def test_file_of_another_kind_is_not_checked_further() -> None:
    with pytest.raises(ConfigError) as raised:
        load_with(["--config", PATH], b"kind: Pod\napiVersion: v1\n")
    assert [problem.source.name for problem in raised.value.problems] == ["apiVersion", "kind"]


_FLAGS = strategies.sampled_from(sorted(catalogue.BY_FLAG.keys() - {"config"}))
_ODD = strategies.sampled_from(["0", "-1", "1s", "true", "::", "[::]:1", "10.0.0.0/8,", "A=true"])
_ARGUMENTS = strategies.builds(lambda flag, value: f"--{flag}={value}", _FLAGS, _ODD | strategies.text())
_CONTENTS = strategies.text().map(lambda text: (HEAD + text).encode("utf-8", "surrogatepass"))


@given(arguments=strategies.lists(_ARGUMENTS, max_size=4), content=strategies.none() | _CONTENTS)
def test_junk_gives_a_configuration_or_problems(arguments: list[str], content: bytes | None) -> None:
    try:
        load_with(arguments if content is None else ["--config", PATH, *arguments], content or b"")
    except ConfigError as error:
        assert all(str(problem).strip() for problem in error.problems)  # noqa: PT017 - either outcome is right
        assert error.problems  # noqa: PT017
