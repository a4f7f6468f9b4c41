"""Writing the configuration; reading it back gives an equal one."""

import dataclasses

import pytest
import yaml
from hypothesis import given, strategies

from ipvsproxy.config import write
from ipvsproxy.config.settings import Config
from tests.config.loading import PATH, from_file, from_flags, load_with


def read_back(config: Config) -> Config:
    again = load_with(["--config", PATH], write.render(config).encode())
    assert again.notices == ()
    return dataclasses.replace(again, config_file=config.config_file)


@pytest.mark.parametrize(
    "flags",
    [
        [],
        ["--bind-address=fd00::1", "--hostname-override=Node-7"],
        ["--nodeport-addresses=primary", "--cluster-cidr=10.0.0.0/8,fd00::/8"],
        ["--ipvs-exclude-cidrs=10.0.0.0/8", "--ipvs-strict-arp", "--ipvs-tcp-timeout=1500ms", "--masquerade-all"],
        ["--healthz-bind-address=::1", "--metrics-bind-address=1.2.3.4:5", "--conntrack-max-per-core=0"],
        ["--feature-gates=AllowServiceExternalIPs=false,Other=true", "--vmodule=a=1,b*=2", "-v=3", "--logging-format=json"],
        ["--manifests=/m", "--log-json-info-buffer-size=2Ki", "--profiling"],
        ["--detect-local-mode=InterfaceNamePrefix", "--pod-interface-name-prefix=cali"],
    ],
)
def test_configuration_read_back_is_the_same(flags: list[str]) -> None:
    config = from_flags(*flags)
    again = read_back(config)
    assert again == config
    assert again.values == config.values
    assert write.render(again) == write.render(config)


_SECONDS = strategies.integers(0, 10**15).map(lambda nanoseconds: f"{nanoseconds}ns")


@given(
    timeouts=strategies.tuples(_SECONDS, _SECONDS, _SECONDS),
    bit=strategies.integers(0, 31),
    score=strategies.integers(-1000, 1000),
    cores=strategies.integers(0, 2**31 - 1),
    health=strategies.tuples(strategies.ip_addresses(), strategies.integers(1, 65535)),
    excluded=strategies.lists(strategies.ip_addresses().map(lambda address: f"{address}/{104 if address.version == 6 else 7}")),
    path=strategies.text(strategies.characters(exclude_categories=["Cs"])),
)
def test_any_configuration_read_back_is_the_same(
    *,
    timeouts: tuple[str, str, str],
    bit: int,
    score: int,
    cores: int,
    health: tuple[object, int],
    excluded: list[str],
    path: str,
) -> None:
    config = from_flags(
        f"--ipvs-tcp-timeout={timeouts[0]}",
        f"--ipvs-udp-timeout={timeouts[1]}",
        f"--conntrack-tcp-timeout-established={timeouts[2]}",
        f"--iptables-masquerade-bit={bit}",
        f"--oom-score-adj={score}",
        f"--conntrack-max-per-core={cores}",
        f"--healthz-bind-address={health[0]}" if ":" in str(health[0]) else f"--healthz-bind-address={health[0]}:{health[1]}",
        f"--ipvs-exclude-cidrs={','.join(excluded)}",
        f"--kubeconfig={path}",
    )
    assert read_back(config) == config


def test_our_own_section_is_written_only_if_it_differs_from_the_defaults() -> None:
    assert "ipvsproxy" not in write.document(from_flags())
    assert write.document(from_flags("--manifests=/m"))["ipvsproxy"] == {"manifests": "/m"}


def test_host_name_is_not_written_because_other_hosts_may_read_the_file() -> None:
    assert write.document(from_flags())["hostnameOverride"] == ""


def test_options_without_effect_are_kept_for_kube_proxy() -> None:
    config = from_file("nftables: {masqueradeBit: 9}\nportRange: 1-2\nlogging: {vmodule: [{filePattern: a, verbosity: 1}]}\n")
    document = yaml.safe_load(write.render(config))
    assert document["nftables"]["masqueradeBit"] == 9
    assert document["portRange"] == "1-2"
    assert document["logging"]["vmodule"] == [{"filePattern": "a", "verbosity": 1}]


def test_head_and_a_few_values_are_as_kube_proxy_writes_them() -> None:
    document = yaml.safe_load(write.render(from_flags()))
    assert (document["apiVersion"], document["kind"]) == ("kubeproxy.config.k8s.io/v1alpha1", "KubeProxyConfiguration")
    assert document["mode"] == "ipvs"
    assert document["conntrack"]["tcpEstablishedTimeout"] == "24h0m0s"
    assert document["ipvs"]["minSyncPeriod"] == "1s"
    assert document["configSyncPeriod"] == "15m0s"
