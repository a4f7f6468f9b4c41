"""The parser of /proc/net/ip_vs, on what a kernel 6.1 printed."""

import pytest

from ipvsproxy.kernel import ipvs_listing
from ipvsproxy.model.kernel import Connections, VirtualServerKey
from ipvsproxy.model.net import Protocol, parse_address
from ipvsproxy.model.real_servers import RealServerKey

HEADING = """\
IP Virtual Server version 1.2.1 (size=4096)
Prot LocalAddress:Port Scheduler Flags
  -> RemoteAddress:Port Forward Weight ActiveConn InActConn
"""
TABLE = (
    HEADING
    + """\
SCTP  0A000001:0035 wrr \n\
TCP  [fd00:0000:0000:0000:0000:0000:0000:0001]:0050 mh \n\
  -> [fd01:0000:0000:0000:0000:0000:0000:0001]:1F90      Masq    1      0          0         \n\
TCP  0A000001:0050 rr  persistent 60000 FFFFFFFF
  -> 0A010002:0050      Tunnel  1      0          0         \n\
  -> 0A010001:1F90      Masq    0      3          12        \n\
UDP  0A000001:0035 rr ops \n\
FWM  00000064 wlc \n\
  -> 0A010009:0000      Route   1      0          0         \n\
FWM  00000065 wlc persistent 30000 80000000
"""
)


def key(protocol: Protocol, address: str, port: int) -> VirtualServerKey:
    return VirtualServerKey(protocol, parse_address(address), port)


def test_every_kind_of_line_is_read() -> None:
    found, foreign = ipvs_listing.parse(TABLE.splitlines())
    assert foreign == 2
    assert {key: (server.scheduler, server.one_packet, server.timeout_ticks) for key, server in found.items()} == {
        key(Protocol.SCTP, "10.0.0.1", 53): ("wrr", False, 0),
        key(Protocol.TCP, "fd00::1", 80): ("mh", False, 0),
        key(Protocol.TCP, "10.0.0.1", 80): ("rr", False, 60000),
        key(Protocol.UDP, "10.0.0.1", 53): ("rr", True, 0),
    }
    server = found[key(Protocol.TCP, "10.0.0.1", 80)]
    assert server.weights == {
        RealServerKey.of(parse_address("10.1.0.2"), 80): 1,
        RealServerKey.of(parse_address("10.1.0.1"), 8080): 0,
    }
    assert server.connections[RealServerKey.of(parse_address("10.1.0.1"), 8080)] == Connections(3, 12)
    assert found[key(Protocol.TCP, "fd00::1", 80)].weights == {RealServerKey.of(parse_address("fd01::1"), 8080): 1}


def test_real_servers_of_a_firewall_mark_belong_to_nobody_else() -> None:
    found, _ = ipvs_listing.parse(TABLE.splitlines())
    assert found[key(Protocol.UDP, "10.0.0.1", 53)].weights == {}


def test_weights_alone_are_read_of_whole_lines_alone() -> None:
    lines = ["TCP  0A000001:0050 rr", "  -> 0A010001:1F90      Masq    7      3          12"]
    (server,) = ipvs_listing.parse_block(lines, only_weights=True).virtual_servers.values()
    assert server.weights == {RealServerKey.of(parse_address("10.1.0.1"), 8080): 7}
    assert server.connections == {}
    with pytest.raises(ValueError, match="is not understood"):
        ipvs_listing.parse_block([lines[0], lines[1][:40]], only_weights=True)


def test_an_empty_table_is_empty() -> None:
    assert ipvs_listing.parse(HEADING.splitlines()) == ({}, 0)


@pytest.mark.parametrize("content", ["", "IP Virtual Server version 1.2.1 (size=4096)\n", "nonsense\n" * 5])
def test_a_listing_without_its_heading_is_refused(content: str) -> None:
    with pytest.raises(ValueError, match="heading"):
        ipvs_listing.parse(content.splitlines())


@pytest.mark.parametrize(
    "line",
    [
        "TCP  0A0001:0050 rr",
        "TCP  0A000001:0050",
        "TCP  0A000001:50 rr",
        "TCP  0A000001 rr",
        "TCP  0A000001:0050 rr persistent",
        "  -> 0A010002:0050      Masq",
        "  -> 0A0100:0050      Masq 1 0 0",
        "  -> 0A01             Masq 1 0 0",
        "  -> [fd01:0000:0000:0000:0000:0000:0001]:1F90 Masq 1 0 0",
        "  -> 0A010002:0050      Masq    x      0          0",
        "",
    ],
)
def test_a_line_that_is_not_understood_is_named(line: str) -> None:
    with pytest.raises(ValueError, match="is not understood") as caught:
        ipvs_listing.parse([*HEADING.splitlines(), "TCP  0A000001:0050 rr", line])
    assert repr(line) in str(caught.value)
