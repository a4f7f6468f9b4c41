"""Covers how the configuration becomes the settings of each part of the program: each option sets its attribute."""

from collections.abc import Collection, Mapping

import pytest

from ipvsproxy.config.settings import Choices, EngineSettings
from ipvsproxy.model.kernel import Sysctl, Timeouts
from ipvsproxy.model.net import Family, parse_address
from ipvsproxy.model.rules import Backend
from ipvsproxy.reconcile.reconciler import Policy
from ipvsproxy.translate import view
from ipvsproxy.translate.translation_settings import Binding, LocalMode, Settings
from tests.config import loading
from tests.support import builders

BOTH = {Family.IPV4: True, Family.IPV6: False}


def choices(
    *flags: str,
    families: Mapping[Family, bool] = BOTH,
    scheduler: str = "",
    kernel_version: tuple[int, int] = (6, 1),
    processors: int = 4,
) -> Choices:
    config = loading.from_flags(*flags)
    scheduler = scheduler or config.translation.scheduler
    return config.on_host(families, scheduler, Backend.IPTABLES, config.sysctls(kernel_version, processors))


def translation(*flags: str) -> Settings:
    return choices(*flags).translation


def engine(*flags: str, kernel_version: tuple[int, int] = (6, 1), processors: int = 4) -> EngineSettings:
    return choices(*flags, kernel_version=kernel_version, processors=processors).settings


def values_by_path(settings: EngineSettings) -> dict[str, str]:
    return {setting.path: setting.value for setting in settings.sysctls}


def test_without_flags_the_settings_of_translation_have_their_defaults() -> None:
    assert translation() == Settings(random_fully=BOTH, bind_address=parse_address("0.0.0.0"), external_addresses=True)


def test_only_families_whose_iptables_program_works_are_served() -> None:
    settings = choices(families={Family.IPV6: True}).translation
    assert settings.families == {Family.IPV6}


def test_the_scheduler_of_translation_is_the_scheduler_that_the_kernel_has() -> None:
    assert choices("--ipvs-scheduler=nosuch", scheduler="rr").translation.scheduler == "rr"


def test_options_reach_the_settings_of_translation() -> None:
    settings = translation(
        "--ipvs-scheduler=mh",
        "--masquerade-all",
        "--iptables-masquerade-bit=9",
        "--cluster-cidr=10.244.0.0/16,fd00:10:244::/56",
        "--nodeport-addresses=10.0.0.0/8",
        "--bind-address=10.1.2.3",
        "--feature-gates=AllowServiceExternalIPs=false",
        "--ipvs-vip-binding=routes",
    )
    assert settings == Settings(
        scheduler="mh",
        masquerade_all=True,
        masquerade_bit=9,
        scope_bits=0x3DFF,
        random_fully=BOTH,
        cluster_networks=builders.networks("10.244.0.0/16", "fd00:10:244::/56"),
        node_port_networks=builders.networks("10.0.0.0/8"),
        bind_address=parse_address("10.1.2.3"),
        external_addresses=False,
        binding=Binding.ROUTES,
    )


def test_primary_node_port_addresses_reach_the_settings_of_translation() -> None:
    assert translation("--nodeport-addresses=primary").node_port_primary


@pytest.mark.parametrize(
    ("flags", "mode", "interface"),
    [
        (["--detect-local-mode=NodeCIDR"], LocalMode.NODE_CIDR, ""),
        (["--detect-local-mode=BridgeInterface", "--pod-bridge-interface=cni0"], LocalMode.BRIDGE_INTERFACE, "cni0"),
        (
            ["--detect-local-mode=InterfaceNamePrefix", "--pod-interface-name-prefix=cali"],
            LocalMode.INTERFACE_NAME_PREFIX,
            "cali",
        ),
    ],
)
def test_the_local_pod_detection_mode_reaches_translation(flags: list[str], mode: LocalMode, interface: str) -> None:
    settings = translation(*flags)
    assert (settings.detect_local, settings.local_interface) == (mode, interface)


def test_excluded_ranges_and_the_drain_deadline_reach_the_reconciler() -> None:
    flags = ("--ipvs-exclude-cidrs=198.51.100.0/24", "--ipvs-drain-deadline=90s")
    excluded = builders.networks("198.51.100.0/24")
    assert choices(*flags, families={Family.IPV6: True}).policy == Policy(
        drain_deadline_s=90, excluded=excluded, families=frozenset({Family.IPV6})
    )


def test_sync_periods_and_connection_timeouts_reach_the_loop() -> None:
    settings = engine(
        "--hostname-override=node-a",
        "--ipvs-sync-period=20s",
        "--ipvs-min-sync-period=3s",
        "--ipvs-tcp-timeout=15m",
        "--ipvs-udp-timeout=5m",
    )
    assert (settings.node_name, settings.audit_interval_s, settings.min_interval_s) == ("node-a", 20, 3)
    assert settings.timeouts == Timeouts(900, 0, 300)


def test_the_kernels_connection_timeouts_stay_unless_a_timeout_is_configured() -> None:
    assert engine().timeouts is None
    assert engine("--ipvs-tcpfin-timeout=2m").timeouts == Timeouts(0, 120, 0)


def test_the_kernel_settings_that_ipvs_needs_are_written() -> None:
    settings = engine()
    assert Sysctl("net/ipv4/vs/conntrack", "1") in settings.sysctls
    assert Sysctl("net/ipv4/ip_forward", "1") in settings.sysctls
    assert "net/ipv4/conf/all/arp_ignore" not in values_by_path(settings)
    assert "net/ipv4/vs/conn_reuse_mode" not in values_by_path(settings)
    assert values_by_path(engine(kernel_version=(5, 4)))["net/ipv4/vs/conn_reuse_mode"] == "0"
    assert values_by_path(engine("--ipvs-strict-arp"))["net/ipv4/conf/all/arp_ignore"] == "1"


def test_connection_tracking_limits_depend_on_options_and_the_size_of_the_host() -> None:
    settings = values_by_path(
        engine(
            "--conntrack-max-per-core=50000",
            "--conntrack-min=1000",
            "--conntrack-tcp-timeout-established=10m",
            "--conntrack-tcp-timeout-close-wait=20s",
            "--conntrack-tcp-be-liberal",
            "--conntrack-udp-timeout=30s",
            "--conntrack-udp-timeout-stream=40s",
        )
    )
    tracking = {
        path.removeprefix("net/netfilter/nf_conntrack_"): value for path, value in settings.items() if "nf_conntrack_" in path
    }
    assert tracking == {
        "max": "200000",
        "tcp_timeout_established": "600",
        "tcp_timeout_close_wait": "20",
        "tcp_be_liberal": "1",
        "udp_timeout": "30",
        "udp_timeout_stream": "40",
    }


def test_the_connection_tracking_table_has_a_minimum_size_on_a_small_host() -> None:
    settings = values_by_path(engine(processors=2))
    assert settings["net/netfilter/nf_conntrack_max"] == "131072"
    assert settings["/sys/module/nf_conntrack/parameters/hashsize"] == "32768"


@pytest.mark.parametrize(
    ("flags", "percent"), [([], 50), (["--mass-deletion-guard=20"], 20), (["--manifests=/x", "--mass-deletion-guard=20"], 0)]
)
def test_first_lists_of_an_api_server_can_be_doubted_and_first_lists_of_a_directory_cannot_be_doubted(
    flags: list[str], percent: int
) -> None:
    assert loading.from_flags(*flags).guard_percent == percent


@pytest.mark.parametrize(
    ("flags", "ranges"),
    [
        ([], ["0.0.0.0/0", "::/0"]),
        (["--nodeport-addresses=172.18.0.0/16"], ["172.18.0.0/16", "::/0"]),
        (["--nodeport-addresses=primary"], []),
        (["--nodeport-addresses=primary,10.0.0.0/8"], []),
        (["--nodeport-addresses=primary,all"], ["0.0.0.0/0", "::/0"]),
        (["--nodeport-addresses=localhost"], ["127.0.0.0/8", "::1/128"]),
        (["--nodeport-addresses=primary", "--bind-address=172.18.0.2"], ["172.18.0.2/32", "::/0"]),
    ],
)
def test_without_an_api_server_the_address_ranges_of_node_ports_come_from_flags_alone(
    flags: list[str], ranges: list[str]
) -> None:
    assert view.known_node_port_ranges(loading.from_flags(*flags).translation) == builders.networks(*ranges)


_OWN = ("10.2.0.5", "2001:db8::5")
_ALL = ("10.1.0.5", "10.2.0.5", "2001:db8::5", "2001:db8::6")


@pytest.mark.parametrize(
    ("texts", "node_addresses", "expected"),
    [
        ("primary", _OWN, _OWN),
        ("localhost", _OWN, ()),
        ("all", _OWN, _ALL),
        ("primary,localhost", _OWN, _OWN),
        ("localhost,primary", _OWN, _OWN),
        ("primary,all", _OWN, _ALL),
        ("localhost,all", _OWN, _ALL),
        ("primary,localhost,all", _OWN, _ALL),
        ("primary,primary", _OWN, _OWN),
        ("primary,10.1.0.0/16", _OWN, ("10.1.0.5", *_OWN)),
        ("primary,2001:db8::6/128", _OWN, (*_OWN, "2001:db8::6")),
        ("localhost,10.1.0.0/16", _OWN, ("10.1.0.5",)),
        ("all,10.1.0.0/16", _OWN, _ALL),
        ("primary,localhost,10.1.0.0/16", _OWN, ("10.1.0.5", *_OWN)),
        ("primary,localhost,all,10.1.0.0/16", _OWN, _ALL),
        # In a family without any range, node ports use every address (NewNodePortAddresses), because the Node may have no address
        # of this family.
        ("primary", ("10.2.0.5",), ("10.2.0.5", "2001:db8::5", "2001:db8::6")),
        ("primary,10.1.0.0/16", ("10.2.0.5",), _ALL),
        ("primary,localhost", ("10.2.0.5",), ("10.2.0.5",)),
        ("primary,localhost", (), ()),
    ],
)
def test_keywords_and_ranges_may_be_mixed_in_node_port_addresses(
    texts: str, node_addresses: tuple[str, ...], expected: tuple[str, ...]
) -> None:
    interfaces = {"eth0": ["10.1.0.5", "2001:db8::6"], "eth1": ["10.2.0.5", "2001:db8::5"], "lo": ["127.0.0.1", "::1"]}
    settings = translation(f"--nodeport-addresses={texts}")
    node = builders.node(*node_addresses) if node_addresses else None
    carried = [builders.interface_address(name, one) for name, some in interfaces.items() for one in some]
    answering = view.view_node(settings, "node-a", node, carried, ()).node_port_addresses
    assert {str(address) for some in answering.values() for address in some} == set(expected)


@pytest.mark.parametrize(
    ("flags", "families", "expected"),
    [
        ((), Family, []),
        (("--nodeport-addresses=primary,10.0.0.0/8",), Family, []),
        (("--nodeport-addresses=all",), Family, []),
        (("--nodeport-addresses=primary,localhost",), Family, []),
        (
            ("--nodeport-addresses=localhost,10.0.0.0/8",),
            Family,
            ["nodePortAddresses has only loopback addresses of IPv6, where IPVS serves no node ports"],
        ),
        (("--nodeport-addresses=primary",), Family, []),
        (("--nodeport-addresses=10.0.0.0/8,fd00::/8",), Family, []),
        (("--nodeport-addresses=10.0.0.0/8",), [Family.IPV4], []),
        (("--nodeport-addresses=10.0.0.0/8",), Family, ["nodePortAddresses has no range of IPv6, which this node serves"]),
        (("--nodeport-addresses=primary", "--ipvs-exclude-cidrs=10.0.0.0/8"), Family, []),
        (
            ("--nodeport-addresses=primary", "--ipvs-exclude-cidrs=10.0.0.0/8"),
            [Family.IPV6],
            ["ipvs.excludeCIDRs has no range of IPv6, which this node serves"],
        ),
        (
            ("--nodeport-addresses=primary", "--healthz-bind-address=[fd00::1]:10256", "--metrics-bind-address=192.0.2.1"),
            [Family.IPV4],
            ["healthzBindAddress is an address of IPv6, which this node does not serve"],
        ),
    ],
)
def test_each_field_whose_addresses_do_not_cover_a_served_family_causes_a_warning(
    flags: tuple[str, ...], families: Collection[Family], expected: list[str]
) -> None:
    config = loading.from_flags("--hostname-override=node-a", *flags)
    assert list(config.warnings(list(families))) == expected
