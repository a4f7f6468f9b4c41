"""What a second reading of ``/proc/net/ip_vs`` costs and shows. What is in the file stands in test_ipvs_listing.py."""

import errno
import pathlib
from collections.abc import Mapping

import pytest

from ipvsproxy.kernel import ipvs_listing, ipvs_table
from ipvsproxy.kernel.errors import KernelError
from ipvsproxy.model.kernel import PERSISTENT, Connections, ObservedVirtualServer, VirtualServerKey, VirtualServerSettings
from ipvsproxy.model.net import Protocol, parse_address
from ipvsproxy.model.real_servers import RealServerKey

HEADING = """IP Virtual Server version 1.2.1 (size=4096)
Prot LocalAddress:Port Scheduler Flags
  -> RemoteAddress:Port Forward Weight ActiveConn InActConn
"""
WEB = VirtualServerKey(Protocol.TCP, parse_address("10.96.0.1"), 80)
DNS = VirtualServerKey(Protocol.UDP, parse_address("fd00::1"), 53)
POD = RealServerKey.of(parse_address("10.244.0.9"), 8080)
POD6 = RealServerKey.of(parse_address("fd00:244::9"), 8080)
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
        self.questions: list[VirtualServerKey] = []
        self.is_broken = False
        self.real_servers: dict[VirtualServerKey, dict[RealServerKey, int]] = {}
        self.reader = ipvs_table.TableReader(self._path, self._ask, self._ask_for_one)

    def _ask(self) -> ipvs_table.Settings:
        self.asked += 1
        return self.settings

    def _ask_for_one(self, key: VirtualServerKey) -> ObservedVirtualServer | None:
        if self.is_broken:
            raise KernelError(action="ask", errno=errno.ENOBUFS)
        self.questions.append(key)
        settings = self.settings.get(key)
        return settings and ObservedVirtualServer(settings, dict(self.real_servers.get(key, {})))

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


def test_what_went_after_the_settings_were_read_is_gone(table: Table) -> None:
    table.settings = {}
    table.write()
    assert table.reader.read_with({WEB: RR}) == {}


def shown(seen: Mapping[VirtualServerKey, ObservedVirtualServer]) -> dict[VirtualServerKey, dict[RealServerKey, int]]:
    return {key: dict(server.real_servers) for key, server in seen.items()}


def test_what_the_table_skips_is_asked_for(table: Table) -> None:
    table.settings = {WEB: RR, DNS: RR}
    table.real_servers = {DNS: {POD6: 3}}
    table.write(WEB_TEXT, real())
    first = table.reader.read_with(table.settings)
    assert shown(first) == {WEB: {POD: 1}, DNS: {POD6: 3}}
    second = table.reader.read_with(table.settings)
    assert [second[key] is first[key] for key in (WEB, DNS)] == [True, True]
    table.real_servers = {DNS: {}}
    assert shown(table.reader.read_with(table.settings))[DNS] == {}


def test_what_was_listed_before_is_asked_for_before_it_counts_as_gone(table: Table) -> None:
    table.settings = {WEB: RR, DNS: RR}
    table.real_servers = {DNS: {POD6: 1}}
    table.write(WEB_TEXT, real(), DNS_TEXT, real6())
    table.reader.read()
    assert table.questions == []
    table.write(WEB_TEXT, real())
    skipped = table.reader.read()
    assert shown(skipped) == {WEB: {POD: 1}, DNS: {POD6: 1}}
    assert table.reader.read()[DNS] is skipped[DNS]
    assert table.questions == [DNS, DNS]
    table.write(WEB_TEXT, real(), DNS_TEXT, real6(weight=2))
    assert shown(table.reader.read())[DNS] == {POD6: 2}
    table.settings = {WEB: RR}
    table.write(WEB_TEXT, real())
    assert table.reader.read().keys() == {WEB}
    assert table.reader.read().keys() == {WEB}
    assert table.questions == [DNS, DNS, DNS]


@pytest.mark.parametrize("with_settings", [False, True])
def test_what_was_added_since_is_asked_for_and_what_was_removed_is_not(table: Table, *, with_settings: bool) -> None:
    def read() -> dict[VirtualServerKey, ObservedVirtualServer]:
        return table.reader.read_with(dict.fromkeys(table.settings.keys() - {DNS}, RR)) if with_settings else table.reader.read()

    table.settings = {WEB: RR}
    table.write(WEB_TEXT, real())
    read()
    table.settings = {WEB: RR, DNS: RR}
    table.real_servers = {DNS: {POD6: 1}}
    table.reader.note(DNS, is_there=True)
    for _ in range(2):
        assert shown(read()) == {WEB: {POD: 1}, DNS: {POD6: 1}}
    assert table.questions == [DNS, DNS]
    table.reader.note(DNS, is_there=False)
    table.settings = {WEB: RR}
    assert read().keys() == {WEB}
    table.reader.note(DNS, is_there=True)  # and was refused
    assert read().keys() == {WEB}
    assert read().keys() == {WEB}
    assert table.questions == [DNS, DNS, DNS]


def many(count: int) -> list[VirtualServerKey]:
    return [WEB._replace(port=port) for port in range(1, count + 1)]


def test_of_many_that_are_skipped_a_part_is_asked_for_each_time_in_turn(table: Table) -> None:
    keys = many(5 * ipvs_table.ASKED_AT_ONCE // 2)
    table.settings = dict.fromkeys(keys, RR)
    table.write()
    first = table.reader.read_with(table.settings)
    assert first.keys() == set(keys)
    table.questions.clear()
    table.real_servers = {keys[-1]: {POD: 1}}
    seen = first
    for _ in range(3):
        seen = table.reader.read()
        assert seen.keys() == set(keys)
    assert len(table.questions) == 3 * ipvs_table.ASKED_AT_ONCE
    assert set(table.questions) == set(keys)
    assert seen[keys[-1]].real_servers == {POD: 1}
    assert all(seen[key] is first[key] for key in keys[:-1])


def test_when_one_of_those_asked_for_has_gone_all_are_asked_for(table: Table) -> None:
    keys = many(5 * ipvs_table.ASKED_AT_ONCE // 2)
    table.settings = dict.fromkeys(keys, RR)
    table.write()
    table.reader.read_with(table.settings)
    table.settings = {keys[-1]: RR}
    assert table.reader.read().keys() == {keys[-1]}


@pytest.mark.parametrize("with_settings", [False, True])
def test_a_reading_that_fails_in_the_middle_loses_and_invents_nothing(table: Table, *, with_settings: bool) -> None:
    table.settings = {WEB: RR, DNS: VirtualServerSettings("rr", PERSISTENT, 10800)}
    lasting = "UDP  [fd00:0000:0000:0000:0000:0000:0000:0001]:0035 rr persistent 1080000 FFFFFFFF\n"
    table.write(WEB_TEXT, real(), lasting)
    before = table.reader.read_with(table.settings)
    table.write(lasting, "TCP  0A600007:0050 rr persistent 1080000 FFFFFFFF\n")
    table.is_broken = True
    for _ in range(2):
        with pytest.raises(KernelError):
            table.reader.read_with(table.settings) if with_settings else table.reader.read()
    table.is_broken = False
    table.write(lasting)
    table.real_servers = {WEB: {POD: 1}}
    after = table.reader.read()
    assert after == before
    assert all(after[key] is before[key] for key in before)


def test_what_came_while_something_was_skipped_is_shown(table: Table) -> None:
    table.settings = {DNS: RR}
    table.write(DNS_TEXT)
    table.reader.read()
    table.write(WEB_TEXT, real())
    assert shown(table.reader.read()) == {WEB: {POD: 1}, DNS: {}}


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
