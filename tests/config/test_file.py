"""Covers how the configuration file is read: wrong fields are refused with their lines, and unknown fields are ignored.

``test_validate.py`` tests the meaning of values.

A configuration that is written to a file and read again must be equal to the original.
"""

import dataclasses
import json

import pytest
import yaml
from hypothesis import given, strategies

from ipvsproxy.config import catalogue, file
from ipvsproxy.config.option import Kind, Option
from ipvsproxy.config.settings import Config
from ipvsproxy.model.kernel import Timeouts
from tests.config.loading import EXAMPLES, HEAD, PATH, from_file, from_flags, load_with, problems_of_file
from tests.fuzz import configuration

_OPTIONS = [option for option in catalogue.BY_KEY.values() if option.field]
_WRONG: dict[Kind, str] = {
    Kind.TEXT: "12",
    Kind.BOOLEAN: "'true'",
    Kind.INTEGER: "'12'",
    Kind.NUMBER: "'2.5'",
    Kind.DURATION: "30",
    Kind.LIST: "10.0.0.0/8",
    Kind.GATES: "[A]",
    Kind.PATTERNS: "[{filePattern: a}]",
    Kind.QUANTITY: "much",
}


def nested(option: Option, value: str) -> str:
    """A configuration file whose last line sets the field of the option to ``value``."""
    *sections, name = option.field.split(".")
    lines = [f"{'  ' * depth}{section}:" for depth, section in enumerate(sections)]
    return HEAD.replace("mode: ipvs\n", "") + "\n".join((*lines, f"{'  ' * len(sections)}{name}: {value}"))


@pytest.mark.parametrize("option", _OPTIONS, ids=[option.field for option in _OPTIONS])
def test_every_field_is_read_with_its_line_number(option: Option) -> None:
    value = EXAMPLES[option.kind]
    content = nested(option, json.dumps(file._plain(option, value)))
    read = file.read(content.encode(), "f")
    assert (read.problems, read.notices) == ([], [])
    assert {key: given.value for key, given in read.given.items()} == {option.key: value}
    assert str(read.given[option.key].source) == f"f:{len(content.splitlines())}: {option.field}"


@pytest.mark.parametrize("option", _OPTIONS, ids=[option.field for option in _OPTIONS])
def test_every_field_of_the_wrong_type_is_refused_with_its_line_number(option: Option) -> None:
    content = nested(option, "-1e3x" if option.nanoseconds else _WRONG[option.kind])
    read = file.read(content.encode(), "f")
    assert read.given == {}
    assert len(read.problems) == 1
    assert str(read.problems[0]).startswith(f"f:{len(content.splitlines())}: {option.field}: ")
    assert " must be " in read.problems[0].text


@pytest.mark.parametrize("option", _OPTIONS, ids=[option.field for option in _OPTIONS])
def test_every_field_of_the_file_may_be_null(option: Option) -> None:
    read = file.read(nested(option, "null").encode(), "f")
    assert (read.given, read.problems, read.notices) == ({}, [], [])


def test_a_json_file_is_accepted_as_yaml() -> None:
    text = b'{"apiVersion": "kubeproxy.config.k8s.io/v1alpha1", "kind": "KubeProxyConfiguration", "ipvs": {"scheduler": "lc"}}'
    assert file.read(text, "f").given["ipvs.scheduler"].value == "lc"


def test_all_wrong_fields_are_reported_with_path_and_line() -> None:
    text = """
        ipvs:
          syncPeriod: 30
          strictARP: "yes"
        oomScoreAdj: 1.5
        bindAddress: [a]
        iptables: 14
        conntrack:
          min: 9999999999
        nodePortAddresses: [10.0.0.0/8, 10]
        logging: {flushFrequency: soon, vmodule: [{filePattern: a}]}
    """
    assert problems_of_file(text) == [
        "6: ipvs.syncPeriod: 30 must be a duration such as 30s, 1m30s or 1h",
        "7: ipvs.strictARP: 'yes' must be true or false",
        "8: oomScoreAdj: 1.5 must be a whole number",
        "9: bindAddress: a list must be a string",
        "10: iptables: 14 must be a mapping",
        "12: conntrack.min: 9999999999 must be a whole number in -2147483648..2147483647",
        "13: nodePortAddresses: a list must be a string, in quotes",
        "14: logging.flushFrequency: 'soon' must be a duration such as 30s, 1m30s or 1h",
        (
            "14: logging.vmodule: a list must be a list of mappings with filePattern and verbosity, "
            "where no filePattern is empty or has a comma or equals sign"
        ),
    ]


@pytest.mark.parametrize("pattern", ["''", "'a,b'", "a=b"])
def test_a_file_pattern_is_refused_if_the_flag_vmodule_cannot_express_it(pattern: str) -> None:
    text = f"logging: {{vmodule: [{{filePattern: {pattern}, verbosity: 1}}]}}"
    assert problems_of_file(text)[0].endswith("where no filePattern is empty or has a comma or equals sign")


@pytest.mark.parametrize("written", ["1e+06", "1e6", "1000000", "1.0e+6"])
def test_a_number_may_be_written_in_the_syntax_of_go(written: str) -> None:
    assert from_file(f"clientConnection: {{qps: {written}}}").values["clientConnection.qps"] == 1e6
    (problem,) = problems_of_file(f'clientConnection: {{qps: "{written}"}}')
    assert problem.endswith("must be a number")


def test_an_unknown_field_is_ignored_with_a_notice() -> None:
    config = from_file("ipvs:\n  shceduler: lc\nfuture:\n  a: [1]\n")
    assert config.translation.scheduler == "rr"
    assert [str(notice) for notice in config.notices] == [
        "/etc/kube-proxy.conf:5: ipvs.shceduler: unknown field, not used; did you mean scheduler?",
        "/etc/kube-proxy.conf:6: future: unknown field, not used",
    ]


@pytest.mark.parametrize(
    ("key", "shown"), [("a\\nb", r"'ipvs.a\nb'"), ("a" * 76, f"'ipvs.{'a' * 72}...'"), ("a" * 75, f"ipvs.{'a' * 75}")]
)
def test_a_notice_shows_the_name_of_an_unknown_field_on_one_line(key: str, shown: str) -> None:
    config = from_file(f'ipvs:\n  "{key}": 1\n  "{key}": 2\n')
    assert [str(notice) for notice in config.notices] == [
        f"/etc/kube-proxy.conf:6: {shown}: is repeated here; the earlier value is not used",
        f"/etc/kube-proxy.conf:6: {shown}: unknown field, not used",
    ]


def test_a_notice_says_that_an_earlier_value_of_a_repeated_field_is_not_used() -> None:
    config = from_file("oomScoreAdj: 1\noomScoreAdj: 2\n")
    assert config.oom_score_adj == 2
    assert str(config.notices[0]) == "/etc/kube-proxy.conf:5: oomScoreAdj: is repeated here; the earlier value is not used"


def test_an_unknown_field_of_our_own_section_is_refused() -> None:
    assert problems_of_file("ipvsproxy:\n  manifest: /m\n") == ["5: ipvsproxy.manifest: unknown field; did you mean manifests?"]


def test_yaml_anchors_are_accepted_and_merge_keys_are_refused() -> None:
    assert from_file("ipvs:\n  syncPeriod: &p 40s\n  tcpTimeout: *p\n").engine.timeouts == Timeouts(40, 0, 0)
    assert problems_of_file("ipvs: &i {scheduler: lc}\niptables:\n  <<: *i\n") == [
        "6: iptables: every key must be the name of a field"
    ]


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "f:1: must hold a KubeProxyConfiguration, which is a mapping"),
        (b"- a\n", "f:1: must hold a KubeProxyConfiguration, which is a mapping"),
        (b"a: 1\nb: [\n", "f:3: is not YAML: expected the node content, but found '<stream end>'"),
        (b"a: b: c\n", "f:1: is not YAML: mapping values are not allowed here"),
        (b"kind: KubeProxyConfiguration\n", "f:1: apiVersion: is missing; it must be kubeproxy.config.k8s.io/v1alpha1"),
        (
            b"\napiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeletConfiguration\n",
            "f:3: kind: 'KubeletConfiguration' must be KubeProxyConfiguration",
        ),
        (
            b"kind: KubeProxyConfiguration\napiVersion: kubeproxy.config.k8s.io/v1\n",
            "f:2: apiVersion: 'kubeproxy.config.k8s.io/v1' must be kubeproxy.config.k8s.io/v1alpha1",
        ),
    ],
)
def test_a_file_of_another_format_or_kind_is_refused_in_one_sentence(content: bytes, problem: str) -> None:
    assert [str(one) for one in file.read(content, "f").problems] == [problem]


@pytest.mark.parametrize(
    "content",
    [
        b"\xff\xfe\xfa",
        b"a: \x00",
        b"[" * 500,
        b'a: "\\UFFFFFFFF"',
        b'a: "\\U00110000"',
        b"? [a]\n: b",
        b"&a {a: *a}",
        b"%YAML 9.9\n---\na",
    ],
)
def test_a_file_that_exhausts_or_crashes_parsers_is_refused(content: bytes) -> None:
    assert file.read(content, "f").problems


def test_a_known_setting_is_refused_if_a_key_in_its_value_is_a_list_or_a_map() -> None:
    text = "featureGates: {[a]: true}\nlogging: {vmodule: [{[a]: b}]}\nipvs: {? {a: b} : c}\n"
    assert [problem.partition(": must")[0][:2] for problem in problems_of_file(text)] == ["4:", "5:", "6:"]


_ODD_VALUES = """1|''|null|true|30s|a|0x1|1:30|2001-01-01|[]|{}|[[a]]|{? [a] : b}|~|1e3|-"""
_LINES = strategies.builds(
    lambda option, value: nested(option, value).removeprefix(HEAD.replace("mode: ipvs\n", "")),
    strategies.sampled_from(_OPTIONS),
    strategies.sampled_from(_ODD_VALUES.split("|")) | strategies.text(max_size=6) | strategies.text(max_size=6).map(json.dumps),
)
_ARGUMENTS = strategies.builds(
    "--{}={}".format,
    strategies.sampled_from(sorted(catalogue.BY_FLAG.keys() - {"config"})),
    strategies.sampled_from(["0", "-1", "1s", "true", "::", "[::]:1", "10.0.0.0/8,", "A=true"]) | strategies.text(max_size=40),
)


@given(
    arguments=strategies.lists(_ARGUMENTS, max_size=4),
    lines=strategies.none() | strategies.lists(_LINES | strategies.text(max_size=40), max_size=4),
)
def test_loading_arbitrary_flags_and_files_gives_either_a_configuration_or_problems(
    arguments: list[str], lines: list[str] | None
) -> None:
    content = "" if lines is None else f"\n\n{HEAD}" + "\n".join(lines)
    configuration.config(("\n".join(arguments) + content).encode("utf-8", "surrogatepass"))


@pytest.mark.parametrize("opening", ["[", "{a: ", "- "])
def test_the_depth_of_nesting_is_limited(opening: str) -> None:
    (problem,) = file.read((HEAD + "x: \n  " + opening * 500).encode(), "f").problems
    assert str(problem) == "f: is nested too deeply"


def read_back(config: Config) -> Config:
    again = load_with(["--config", PATH], file.render(config).encode())
    assert again.notices == ()
    return dataclasses.replace(again, config_file=config.config_file)


@pytest.mark.parametrize(
    "flags",
    [
        [],
        ["--bind-address=fd00::1", "--hostname-override=Node-7"],
        ["--nodeport-addresses=primary,localhost,all,10.0.0.0/8"],
        ["--nodeport-addresses=primary", "--cluster-cidr=10.0.0.0/8,fd00::/8"],
        ["--ipvs-exclude-cidrs=10.0.0.0/8", "--ipvs-strict-arp", "--ipvs-tcp-timeout=1500ms", "--masquerade-all"],
        ["--healthz-bind-address=::1", "--metrics-bind-address=1.2.3.4:5", "--conntrack-max-per-core=0"],
        ["--feature-gates=AllowServiceExternalIPs=false,Other=true", "--vmodule=a=1,b*=2", "-v=3", "--logging-format=json"],
        ["--manifests=/m", "--log-json-info-buffer-size=2Ki", "--profiling"],
        ["--detect-local-mode=InterfaceNamePrefix", "--pod-interface-name-prefix=cali"],
    ],
)
def test_a_configuration_is_unchanged_after_it_is_written_and_read_again(flags: list[str]) -> None:
    config = from_flags(*flags)
    again = read_back(config)
    assert again == config
    assert again.values == config.values
    assert file.render(again) == file.render(config)


def test_the_section_ipvsproxy_is_written_only_if_an_option_in_it_differs_from_the_default() -> None:
    assert "ipvsproxy" not in file.document(from_flags())
    assert file.document(from_flags("--manifests=/m"))["ipvsproxy"] == {"manifests": "/m"}


def test_the_file_contains_no_host_name_because_other_hosts_may_use_the_file() -> None:
    assert file.document(from_flags())["hostnameOverride"] == ""


def test_options_that_only_kube_proxy_uses_are_written_to_the_file() -> None:
    config = from_file("nftables: {masqueradeBit: 9}\nportRange: 1-2\nlogging: {vmodule: [{filePattern: a, verbosity: 1}]}\n")
    document = yaml.safe_load(file.render(config))
    assert document["nftables"]["masqueradeBit"] == 9
    assert document["portRange"] == "1-2"
    assert document["logging"]["vmodule"] == [{"filePattern": "a", "verbosity": 1}]


def test_a_written_file_has_the_same_header_and_value_formats_as_a_file_of_kube_proxy() -> None:
    document = yaml.safe_load(file.render(from_flags()))
    assert (document["apiVersion"], document["kind"]) == ("kubeproxy.config.k8s.io/v1alpha1", "KubeProxyConfiguration")
    assert document["mode"] == "ipvs"
    assert document["conntrack"]["tcpEstablishedTimeout"] == "24h0m0s"
    assert document["ipvs"]["minSyncPeriod"] == "1s"
    assert document["configSyncPeriod"] == "15m0s"


def test_the_digest_of_the_configuration_is_equal_on_nodes_that_differ_only_in_name_and_address() -> None:
    digest = file.digest(from_flags("--hostname-override=n1", "--bind-address=192.0.2.1"))
    assert digest == file.digest(from_flags("--hostname-override=n2", "--bind-address=192.0.2.2"))
    assert len(digest) == 12
    assert digest not in {file.digest(from_flags(f"--{one}")) for one in ("ipvs-scheduler=wrr", "ui=false", "manifests=/m")}
