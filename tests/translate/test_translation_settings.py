"""Which kernel settings are needed, depending on kernel version, operator's choice and number of processors."""

import pytest

from ipvsproxy.model.kernel import parse_record, render_record
from ipvsproxy.model.net import Family
from ipvsproxy.translate.translation_settings import (
    ConntrackChoices,
    conntrack_sysctls,
    direct_return_sysctls,
    ipvs_sysctls,
)

MODERN = (6, 1)


def _values(kernel_version: tuple[int, int] = MODERN, *, strict_arp: bool = False) -> dict[str, str]:
    return {item.path: item.value for item in ipvs_sysctls(kernel_version, strict_arp=strict_arp)}


def test_the_needed_kernel_settings_turn_on_conntrack_and_forwarding_and_immediate_expiry() -> None:
    assert _values() == {
        "net/ipv4/vs/conntrack": "1",
        "net/ipv4/vs/expire_nodest_conn": "1",
        "net/ipv4/vs/expire_quiescent_template": "1",
        "net/ipv4/ip_forward": "1",
    }


@pytest.mark.parametrize(
    ("kernel_version", "value"), [((4, 0), None), ((4, 1), "0"), ((5, 8), "0"), ((5, 9), None), ((5, 10), None), (MODERN, None)]
)
def test_connection_reuse_is_turned_off_on_kernels_where_it_delays_a_connection_by_a_second(
    kernel_version: tuple[int, int], value: str | None
) -> None:
    assert _values(kernel_version).get("net/ipv4/vs/conn_reuse_mode") == value


def test_an_interface_answers_arp_requests_only_for_its_own_addresses_if_strict_arp_is_on() -> None:
    added = _values(strict_arp=True).items() - _values().items()
    assert added == {("net/ipv4/conf/all/arp_ignore", "1"), ("net/ipv4/conf/all/arp_announce", "2")}


@pytest.mark.checklist(103)
@pytest.mark.parametrize(
    ("per_core", "minimum", "processors", "maximum"),
    [
        (0, 131072, 8, 0),
        (32768, 131072, 8, 262144),
        (32768, 131072, 2, 131072),
        (32768, 131072, 64, 1048576),
        (32768, 131072, 32, 1048576),
        (32768, 2000000, 32, 2000000),
        (65536, 2000000, 64, 1048576),
    ],
)
def test_the_conntrack_maximum_grows_with_the_number_of_processors_between_a_minimum_and_a_ceiling(
    per_core: int, minimum: int, processors: int, maximum: int
) -> None:
    settings = conntrack_sysctls(ConntrackChoices(max_per_core=per_core, minimum=minimum), processors)
    assert next((int(item.value) for item in settings), 0) == maximum


def test_only_the_conntrack_settings_that_the_operator_chose_are_set() -> None:
    choices = ConntrackChoices(
        max_per_core=32768,
        minimum=131072,
        tcp_established_timeout_s=86400,
        tcp_close_wait_timeout_s=3600,
        tcp_be_liberal=True,
        udp_timeout_s=30,
        udp_stream_timeout_s=180,
    )
    assert {item.path.removeprefix("net/netfilter/"): item.value for item in conntrack_sysctls(choices, 8)} == {
        "nf_conntrack_max": "262144",
        "/sys/module/nf_conntrack/parameters/hashsize": "65536",
        "nf_conntrack_tcp_timeout_established": "86400",
        "nf_conntrack_tcp_timeout_close_wait": "3600",
        "nf_conntrack_tcp_be_liberal": "1",
        "nf_conntrack_udp_timeout": "30",
        "nf_conntrack_udp_timeout_stream": "180",
    }
    assert list(conntrack_sysctls(ConntrackChoices(), 8)) == []


@pytest.mark.parametrize(("current", "suffices"), [("262143", False), ("262144", True), ("1000000", True)])
def test_a_conntrack_maximum_above_the_desired_value_is_not_changed(current: str, suffices: bool) -> None:  # noqa: FBT001 - the arguments come from a table
    maximum, buckets = conntrack_sysctls(ConntrackChoices(max_per_core=32768), 8)
    assert maximum.is_met_by(current) is suffices
    assert buckets.is_met_by("65536")
    assert buckets.is_met_by("131072")
    assert not buckets.is_met_by("65535")


def test_direct_return_brings_up_one_tunnel_per_family_and_disables_reverse_path_filtering() -> None:
    found = {item.path: item.value for item in direct_return_sysctls(frozenset(Family))}
    assert found == {
        "/sys/class/net/tunl0/flags": "0x81",
        "/sys/class/net/ip6tnl0/flags": "0x81",
        "net/ipv4/conf/all/rp_filter": "0",
        "net/ipv4/conf/tunl0/rp_filter": "0",
        "net/ipv4/vs/sloppy_tcp": "1",
        "net/ipv4/vs/sloppy_sctp": "1",
    }
    assert {item.path for item in direct_return_sysctls(frozenset({Family.IPV6}))} == {
        "/sys/class/net/ip6tnl0/flags",
        "net/ipv4/vs/sloppy_tcp",
        "net/ipv4/vs/sloppy_sctp",
    }
    assert all(item.for_tunnels for item in direct_return_sysctls(frozenset(Family))), "only behind the rules"


def test_the_record_of_all_settings_of_direct_return_fits_into_the_alias_of_a_device() -> None:
    former = {one.path: "0x1081" for one in direct_return_sysctls(frozenset(Family))}
    assert len(render_record(former)) < 256
    assert parse_record(render_record(former)) == former
