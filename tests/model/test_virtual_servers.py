"""Covers virtual servers that packets reach by a firewall mark."""

from ipvsproxy.model.net import Family
from ipvsproxy.model.virtual_servers import FirewallMark, VirtualServerKey


def test_the_virtual_server_of_a_mark_never_equals_the_virtual_server_of_an_address() -> None:
    mark = FirewallMark.of(Family.IPV4, 80)
    assert mark != VirtualServerKey(mark.protocol, mark.address, mark.port)
    assert str(mark) == "mark 0x50 (IPv4)"
