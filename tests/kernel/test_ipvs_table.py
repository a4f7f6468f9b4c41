"""What a second reading of ``/proc/net/ip_vs`` costs and shows. What is in the file stands in test_ipvs_listing.py."""

import pathlib

import pytest

from ipvsproxy.kernel import ipvs_listing, ipvs_table
from ipvsproxy.kernel.errors import KernelError
from ipvsproxy.model.kernel import PERSISTENT, Connections, RealServerKey, VirtualServerKey, VirtualServerSettings
from ipvsproxy.model.net import Protocol, parse_address

HEADING = """IP Virtual Server version 1.2.1 (size=4096)
Prot LocalAddress:Port Scheduler Flags
  -> RemoteAddress:Port Forward Weight ActiveConn InActConn
"""
WEB = VirtualServerKey(Protocol.TCP, parse_address("10.96.0.1"), 80)
DNS = VirtualServerKey(Protocol.UDP, parse_address("fd00::1"), 53)
POD = RealServerKey(parse_address("10.244.0.9"), 8080)
POD6 = RealServerKey(parse_address("fd00:244::9"), 8080)
RR = VirtualServerSettings("rr", 0, 0)


def real(active: int = 0, inactive: int = 0, weight: int = 1) -> str:
    return f"  -> 0AF40009:1F90      {'Masq':7} {weight:<6} {active:<10} {inactive:<10}\n"


def real6(active: int = 0, weight: int = 1) -> str:
    return f"  -> [fd00:0244:0000:0000:0000:0000:0000:0009]:1F90      {'Masq':7} {weight:<6} {active:<10} {0:<10}\n"


WEB_TEXT = "TCP  0A600001:0050 rr \n"
DNS_TEXT = "UDP  [fd00:0000:0000:0000:0000:0000:0000:0001]:0035 rr \n"


class Table:
    """The file, a reader of it, and how often its settings were asked for."""

    def __init__(self, folder: pathlib.Path, settings: ipvs_table.Settings) -> None:
        self._path = folder / "ip_vs"
        self.settings = settings
        self.asked = 0
        self.real_servers: dict[VirtualServerKey, dict[RealServerKey, int]] = {}
        self.reader = ipvs_table.TableReader(self._path, self._ask, lambda key: self.real_servers.get(key, {}))

    def _ask(self) -> ipvs_table.Settings:
        self.asked += 1
        return self.settings

    def write(self, *lines: str) -> None:
        self._path.write_text(HEADING + "".join(lines))


@pytest.fixture
def table(tmp_path: pathlib.Path) -> Table:
    return Table(tmp_path, {WEB: VirtualServerSettings("rr", PERSISTENT, 10)})


def test_connections_that_come_and_go_are_no_change(table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    table.write(WEB_TEXT, real(), DNS_TEXT, real6())
    first = table.reader.read()
    monkeypatch.setattr(ipvs_listing, "parse_block", None)  # it is not needed any more
    table.write(WEB_TEXT, real(active=1234567, inactive=4294967295), DNS_TEXT, real6(active=4294967295))
    second = table.reader.read()
    assert first == second
    assert first[WEB] is second[WEB]
    assert first[DNS] is second[DNS]
    assert first[DNS].real_servers == {POD6: 1}


@pytest.mark.parametrize("weight", [0, 2, 100000])
def test_a_weight_that_changes_is_seen_and_the_neighbour_is_the_same_object(table: Table, weight: int) -> None:
    table.write(WEB_TEXT, real(), DNS_TEXT, real6())
    first = table.reader.read()
    table.write(WEB_TEXT, real(weight=weight), DNS_TEXT, real6())
    second = table.reader.read()
    assert second[WEB].real_servers == {POD: weight}
    assert first[WEB].real_servers == {POD: 1}
    assert first[DNS] is second[DNS]
    table.write(WEB_TEXT, real(), DNS_TEXT, real6(weight=weight))
    assert table.reader.read()[DNS].real_servers == {POD6: weight}


def test_what_vanishes_is_not_shown_any_more(table: Table) -> None:
    table.write(WEB_TEXT, real(), DNS_TEXT)
    assert table.reader.read().keys() == {WEB, DNS}
    table.settings = {WEB: RR}
    table.write(WEB_TEXT)
    assert {key: server.real_servers for key, server in table.reader.read().items()} == {WEB: {}}
    table.settings = {}
    table.write()
    assert table.reader.read() == {}


def test_scheduler_flags_stand_until_they_are_read_again(table: Table) -> None:
    flagged = VirtualServerSettings("mh", 0x10, 0)
    table.write("TCP  0A600001:0050 mh \n", real())
    assert not table.reader.read()[WEB].flags_known
    (known,) = table.reader.read_with({WEB: flagged}).values()
    assert (known.settings, known.real_servers, known.flags_known) == (flagged, {POD: 1}, True)
    assert table.reader.read()[WEB] is known
    assert table.reader.read_with({WEB: flagged})[WEB] is known
    other = VirtualServerSettings("mh", 0x8, 0)
    assert table.reader.read_with({WEB: other})[WEB].settings == other
    assert table.reader.read()[WEB].settings == other


def test_what_was_added_after_the_settings_were_read_is_left_to_the_next_reading(table: Table) -> None:
    table.write(WEB_TEXT, real(), DNS_TEXT)
    assert table.reader.read_with({WEB: RR}).keys() == {WEB}
    assert table.reader.read().keys() == {WEB, DNS}


def test_what_went_after_the_settings_were_read_has_no_real_servers(table: Table) -> None:
    table.write()
    assert [server.real_servers for server in table.reader.read_with({WEB: RR}).values()] == [{}]


def test_what_the_table_skips_is_asked_for(table: Table) -> None:
    table.write(WEB_TEXT, real())
    table.real_servers = {DNS: {POD6: 3}}
    first = table.reader.read_with({WEB: RR, DNS: RR})
    assert {key: server.real_servers for key, server in first.items()} == {WEB: {POD: 1}, DNS: {POD6: 3}}
    second = table.reader.read_with({WEB: RR, DNS: RR})
    assert [second[key] is first[key] for key in (WEB, DNS)] == [True, True]
    table.real_servers = {DNS: {}}
    assert table.reader.read_with({WEB: RR, DNS: RR})[DNS].real_servers == {}


def test_what_was_listed_before_is_asked_for_before_it_counts_as_gone(table: Table) -> None:
    table.settings = {WEB: RR, DNS: RR}
    table.write(WEB_TEXT, real(), DNS_TEXT, real6())
    table.reader.read()
    assert table.asked == 0
    table.write(WEB_TEXT, real())
    table.real_servers = {DNS: {POD6: 1}}
    skipped = table.reader.read()
    assert {key: server.real_servers for key, server in skipped.items()} == {WEB: {POD: 1}, DNS: {POD6: 1}}
    assert table.reader.read()[DNS] is skipped[DNS]
    assert table.asked == 2
    table.write(WEB_TEXT, real(), DNS_TEXT, real6(weight=2))
    assert table.reader.read()[DNS].real_servers == {POD6: 2}
    assert table.asked == 2
    table.settings = {WEB: RR}
    table.write(WEB_TEXT, real())
    assert table.reader.read().keys() == {WEB}
    assert table.reader.read().keys() == {WEB}
    assert table.asked == 3


def test_what_came_while_something_was_skipped_is_shown(table: Table) -> None:
    table.settings = {DNS: RR}
    table.write(DNS_TEXT)
    table.reader.read()
    table.write(WEB_TEXT, real())
    assert {key: server.real_servers for key, server in table.reader.read().items()} == {WEB: {POD: 1}, DNS: {}}


def test_the_rate_of_ticks_is_asked_for_once(table: Table) -> None:
    for ticks in (1000, 2000):
        table.write(f"TCP  0A600001:0050 rr persistent {ticks} FFFFFFFF\n")
        assert table.reader.read()[WEB].settings == VirtualServerSettings("rr", PERSISTENT, ticks // 100)
    assert table.asked == 1


def test_a_timeout_that_no_settings_explain_is_an_error_unless_they_are_what_counts(table: Table) -> None:
    table.write("TCP  0A600002:0050 rr persistent 1000 FFFFFFFF\n")
    assert table.reader.read_with({}) == {}
    assert table.asked == 0
    with pytest.raises(KernelError, match="it changed while it was read"):
        table.reader.read()


def test_firewall_marks_are_counted_at_each_reading(table: Table) -> None:
    table.write("FWM  00000064 wlc \n", real(), WEB_TEXT)
    for _ in range(2):
        assert table.reader.read().keys() == {WEB}
        assert table.reader.foreign == 1


def test_connections_are_shown_for_each_real_server(table: Table) -> None:
    table.write(WEB_TEXT, real(active=3, inactive=12), DNS_TEXT)
    assert table.reader.connections() == {WEB: {POD: Connections(3, 12)}, DNS: {}}
