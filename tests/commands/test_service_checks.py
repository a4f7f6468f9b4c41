"""Checks of Services by ``doctor``: what is wrong on this node although each Service is served as it should be."""

import pytest

from ipvsproxy.commands import service_checks
from ipvsproxy.commands.finding import Level
from ipvsproxy.translate.settings import LocalMode, Settings
from tests.support import builders

SERVICES = (
    builders.service("api", cluster=["10.244.0.1", "fd00:96::1"]),
    builders.service("web", cluster=["10.244.0.80"]),
    builders.service("headless", cluster=[]),
)


def _settings(*cluster_cidr: str, masquerade_all: bool = False, mode: LocalMode = LocalMode.CLUSTER_CIDR) -> Settings:
    return Settings(cluster_networks=builders.networks(*cluster_cidr), masquerade_all=masquerade_all, detect_local=mode)


def test_a_service_range_inside_the_cluster_cidr_is_named() -> None:
    (found,) = service_checks.judge(SERVICES, _settings("10.244.0.0/16", "fd00:244::/56"))
    assert (found.level, found.topic) == (Level.WARN, "cluster-cidr")
    assert found.text.startswith(
        "2 cluster IPs lie in 10.244.0.0/16 of --cluster-cidr, such as 10.244.0.1 of default/api: this host"
    )


@pytest.mark.parametrize("ranges", [("10.245.0.0/16", "fd00:244::/56"), ("192.168.0.0/16",)])
def test_a_cluster_cidr_of_pods_alone_is_fine(ranges: tuple[str, ...]) -> None:
    (found,) = service_checks.judge(SERVICES, _settings(*ranges))
    assert found.level is Level.OK


def test_where_packets_are_masqueraded_anyway_the_range_does_not_matter() -> None:
    assert not list(service_checks.judge(SERVICES, _settings("10.244.0.0/16", masquerade_all=True)))
    assert not list(service_checks.judge(SERVICES, _settings("10.244.0.0/16", mode=LocalMode.NODE_CIDR)))
    assert not list(service_checks.judge(SERVICES, _settings()))
