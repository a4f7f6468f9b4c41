"""Covers how the settings of each part of the program are made from the configuration and from properties of the host.

``test_validate.py`` covers which attribute each option sets.
"""

from collections.abc import Collection

import pytest

from ipvsproxy.model.kernel import Sysctl
from ipvsproxy.model.net import Family, parse_address
from ipvsproxy.model.rules import Backend
from ipvsproxy.translate import view
from ipvsproxy.translate.translation_settings import Settings
from tests.config import loading
from tests.support import builders


def test_the_settings_contain_no_family_or_scheduler_that_the_host_does_not_support() -> None:
    config = loading.from_flags("--hostname-override=node-a", "--ipvs-scheduler=nosuch")
    chosen = config.on_host({Family.IPV6: True}, "rr", Backend.IPTABLES, (Sysctl("a", "1"),))
    assert chosen.translation == Settings(
        families=frozenset({Family.IPV6}), random_fully={Family.IPV6: True}, bind_address=parse_address("0.0.0.0"), scheduler="rr"
    )
    assert chosen.policy.families == {Family.IPV6}
    assert (chosen.settings.node_name, chosen.settings.sysctls) == ("node-a", (Sysctl("a", "1"),))


def test_the_kernel_settings_depend_on_the_kernel_version_the_processor_count_and_the_options() -> None:
    config = loading.from_flags("--ipvs-strict-arp", "--ipvs-sysctls=sloppy_sctp=1")
    found = {one.path: one.value for one in config.sysctls((5, 4), processors=8)}
    assert found["net/ipv4/conf/all/arp_ignore"] == found["net/ipv4/vs/sloppy_sctp"] == "1"
    assert (found["net/ipv4/vs/conn_reuse_mode"], found["net/netfilter/nf_conntrack_max"]) == ("0", "262144")


@pytest.mark.parametrize(
    ("flags", "percent"), [([], 50), (["--mass-deletion-guard=20"], 20), (["--manifests=/x", "--mass-deletion-guard=20"], 0)]
)
def test_the_guard_against_incomplete_lists_is_off_for_a_directory_of_manifests(flags: list[str], percent: int) -> None:
    assert loading.from_flags(*flags).guard_percent == percent


_OWN = ("10.2.0.5", "2001:db8::5")
_ALL = ("10.1.0.5", "10.2.0.5", "2001:db8::5", "2001:db8::6")


@pytest.mark.parametrize(
    ("texts", "node_addresses", "expected"),
    [
        ("primary", _OWN, _OWN),
        ("localhost", _OWN, ()),
        ("all", _OWN, _ALL),
        ("primary,localhost", _OWN, _OWN),
        ("primary,all", _OWN, _ALL),
        ("localhost,all", _OWN, _ALL),
        ("primary,10.1.0.0/16", _OWN, ("10.1.0.5", *_OWN)),
        ("primary,2001:db8::6/128", _OWN, (*_OWN, "2001:db8::6")),
        ("localhost,10.1.0.0/16", _OWN, ("10.1.0.5",)),
        ("all,10.1.0.0/16", _OWN, _ALL),
        ("primary,localhost,10.1.0.0/16", _OWN, ("10.1.0.5", *_OWN)),
        ("primary,localhost,all,10.1.0.0/16", _OWN, _ALL),
        # In a family without any range, node ports use every address, because the Node may have no address of this family
        # (NewNodePortAddresses).
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
    settings = loading.from_flags(f"--nodeport-addresses={texts}").translation
    node = builders.node(*node_addresses) if node_addresses else None
    carried = [builders.interface_address(name, one) for name, some in interfaces.items() for one in some]
    answering = view.view_node(settings, "node-a", node, carried, ()).node_port_addresses
    assert {str(address) for some in answering.values() for address in some} == set(expected)


@pytest.mark.parametrize(
    ("flags", "families", "expected"),
    [
        ((), Family, []),
        (("--nodeport-addresses=primary,10.0.0.0/8",), Family, []),
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
def test_each_configuration_field_that_does_not_fit_the_served_families_causes_a_warning(
    flags: tuple[str, ...], families: Collection[Family], expected: list[str]
) -> None:
    config = loading.from_flags("--hostname-override=node-a", *flags)
    assert list(config.warnings(list(families))) == expected
