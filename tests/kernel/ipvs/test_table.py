"""The cost and the result of a second reading of ``/proc/net/ip_vs``. The format is in test_ipvs_listing.py."""

import errno
import pathlib
from collections.abc import Iterator, Mapping

import msgspec
import pytest

from ipvsproxy.kernel.base.errors import KernelError
from ipvsproxy.kernel.ipvs import listing as ipvs_listing
from ipvsproxy.kernel.ipvs import table as ipvs_table
from ipvsproxy.model.net import Protocol, parse_address
from ipvsproxy.model.real_servers import RealServerKey
from ipvsproxy.model.virtual_servers import (
    HAS_THRESHOLDS,
    PERSISTENT,
    Connections,
    ObservedVirtualServer,
    VirtualServerKey,
    VirtualServerSettings,
)

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

Shown = dict[VirtualServerKey, dict[RealServerKey, int] | None]


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

    def poll(self) -> ipvs_table.Reading:
        """The virtual servers of a whole poll."""
        return {key: observed for reading in self.reader.read() for key, observed in reading.items()}

    def read_with(self, settings: ipvs_table.Settings) -> ipvs_table.Reading:
        """The virtual servers of a whole reading with these settings."""
        return {key: observed for reading in self.reader.read_with(settings) for key, observed in reading.items()}

    def shown(self) -> Shown:
        """The real servers of a whole poll; None for a virtual server that is gone."""
        return weights_of(self.poll())


def weights_of(reading: Mapping[VirtualServerKey, ObservedVirtualServer | None]) -> Shown:
    return {key: dict(observed.real_servers) if observed else None for key, observed in reading.items()}


@pytest.fixture
def table(tmp_path: pathlib.Path) -> Table:
    return Table(tmp_path, {WEB: VirtualServerSettings("rr", PERSISTENT, 10)})


def test_connections_that_come_and_go_are_no_change(table: Table) -> None:
    table.write(WEB_TEXT, real(), DNS_TEXT, real6())
    assert table.shown() == {WEB: {POD: 1}, DNS: {POD6: 1}}
    table.write(WEB_TEXT, real(active=1234567, inactive=4294967295), DNS_TEXT, real6(active=4294967295))
    assert table.poll() == {}


@pytest.mark.parametrize("weight", [0, 2, 100000])
def test_a_changed_weight_is_returned_and_the_neighbour_is_not(table: Table, weight: int) -> None:
    table.write(WEB_TEXT, real(), DNS_TEXT, real6())
    table.poll()
    table.write(WEB_TEXT, real(weight=weight), DNS_TEXT, real6())
    assert table.shown() == {WEB: {POD: weight}}
    table.write(WEB_TEXT, real(), DNS_TEXT, real6(weight=weight))
    assert table.shown() == {WEB: {POD: 1}, DNS: {POD6: weight}}


def test_a_vanished_virtual_server_is_returned_once(table: Table) -> None:
    table.write(WEB_TEXT, real(), DNS_TEXT)
    assert table.shown() == {WEB: {POD: 1}, DNS: {}}
    table.settings = {WEB: RR}
    table.write(WEB_TEXT)
    assert table.shown() == {WEB: {}, DNS: None}
    table.settings = {}
    table.write()
    assert table.shown() == {WEB: None}
    assert table.poll() == {}


def test_scheduler_flags_come_with_settings_alone(table: Table) -> None:
    flagged = VirtualServerSettings("mh", 0x10, 0)
    table.write("TCP  0A600001:0050 mh \n", real())
    (observed,) = table.poll().values()
    assert observed is not None
    assert (observed.settings, observed.flags_known) == (VirtualServerSettings("mh", 0, 0), False)
    (known,) = table.read_with({WEB: flagged}).values()
    assert known is not None
    assert (known.settings, known.real_servers, known.flags_known) == (flagged, {POD: 1}, True)
    assert table.poll() == {}, "the text is what it was"


def test_virtual_servers_with_thresholds_are_asked_for_them(table: Table) -> None:
    table.write(WEB_TEXT, real(), DNS_TEXT, real6())
    limited = VirtualServerSettings("rr", HAS_THRESHOLDS)
    table.settings = {WEB: limited, DNS: RR}
    table.real_servers = {WEB: {POD: 7}}
    assert weights_of(table.read_with(table.settings)) == {WEB: {POD: 7}, DNS: {POD6: 1}}
    assert table.questions == [WEB]
    table.settings = {}
    assert weights_of(table.read_with({WEB: limited, DNS: RR}))[WEB] == {POD: 1}, "gone meanwhile: as the file has it"


def test_what_was_added_after_the_settings_were_read_is_left_to_the_next_reading(table: Table) -> None:
    table.write(WEB_TEXT, real(), DNS_TEXT)
    assert table.read_with({WEB: RR}).keys() == {WEB}
    assert table.shown() == {DNS: {}}


def test_what_went_after_the_settings_were_read_is_gone(table: Table) -> None:
    table.settings = {}
    table.write()
    assert table.read_with({WEB: RR}) == {WEB: None}


def test_all_virtual_servers_are_returned_with_settings_whatever_was_returned_before(table: Table) -> None:
    table.write(WEB_TEXT, real(), DNS_TEXT)
    settings = {WEB: RR, DNS: RR}
    table.poll()
    for _ in range(2):
        assert weights_of(table.read_with(settings)) == {WEB: {POD: 1}, DNS: {}}


def test_what_the_table_skips_is_asked_for(table: Table) -> None:
    table.settings = {WEB: RR, DNS: RR}
    table.real_servers = {DNS: {POD6: 3}}
    table.write(WEB_TEXT, real())
    assert weights_of(table.read_with(table.settings)) == {WEB: {POD: 1}, DNS: {POD6: 3}}
    table.real_servers = {DNS: {}}
    assert weights_of(table.read_with(table.settings)) == {WEB: {POD: 1}, DNS: {}}
    assert table.questions == [DNS, DNS]


def test_what_was_listed_before_is_asked_for_before_it_counts_as_gone(table: Table) -> None:
    table.settings = {WEB: RR, DNS: RR}
    table.real_servers = {DNS: {POD6: 1}}
    table.write(WEB_TEXT, real(), DNS_TEXT, real6())
    table.poll()
    assert table.questions == []
    table.write(WEB_TEXT, real())
    for _ in range(2):
        assert table.shown() == {DNS: {POD6: 1}}
    assert table.questions == [DNS, DNS]
    table.write(WEB_TEXT, real(), DNS_TEXT, real6(weight=2))
    assert table.shown() == {DNS: {POD6: 2}}
    table.settings = {WEB: RR}
    table.write(WEB_TEXT, real())
    assert table.shown() == {DNS: None}
    assert table.poll() == {}
    assert table.questions == [DNS, DNS, DNS]


@pytest.mark.parametrize("with_settings", [False, True])
def test_what_was_added_since_is_asked_for_and_what_was_removed_is_not(table: Table, *, with_settings: bool) -> None:
    def shown() -> Shown:
        if with_settings:
            settings = dict.fromkeys(table.settings.keys() - {DNS}, RR)
            return weights_of(table.read_with(settings))
        return {WEB: {POD: 1}} | table.shown()

    table.settings = {WEB: RR}
    table.write(WEB_TEXT, real())
    shown()
    table.settings = {WEB: RR, DNS: RR}
    table.real_servers = {DNS: {POD6: 1}}
    table.reader.note(DNS, is_there=True)
    for _ in range(2):
        assert shown() == {WEB: {POD: 1}, DNS: {POD6: 1}}
    assert table.questions == [DNS, DNS]
    table.reader.note(DNS, is_there=False)
    table.settings = {WEB: RR}
    assert shown() == {WEB: {POD: 1}}
    table.reader.note(DNS, is_there=True)  # and was refused
    assert shown() == {WEB: {POD: 1}, DNS: None}
    assert shown() == {WEB: {POD: 1}}
    assert table.questions == [DNS, DNS, DNS]


def test_a_written_virtual_server_is_returned_even_with_the_text_that_it_had(table: Table) -> None:
    table.write(WEB_TEXT, real(), DNS_TEXT)
    table.poll()
    table.reader.note(WEB, is_there=True)
    assert table.shown() == {WEB: {POD: 1}}
    assert table.poll() == {}


def parts_of(
    table: Table, monkeypatch: pytest.MonkeyPatch, settings: ipvs_table.Settings | None = None
) -> Iterator[ipvs_table.Reading]:
    """A reading that pauses after each virtual server."""
    monkeypatch.setattr(ipvs_table, "PART_BYTES", 1)
    text = table._path.read_bytes().removeprefix(HEADING.encode())
    blocks = [block.heading + b"\n" + block.real_servers.replace(b"\0", b"  -> ") for block in ipvs_listing.blocks(text)]
    monkeypatch.setattr(ipvs_listing, "pieces", lambda _path: iter(blocks))
    return table.reader.read() if settings is None else table.reader.read_with(settings)


def test_a_part_ends_when_it_has_taken_its_time(table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    table.write(WEB_TEXT, DNS_TEXT)
    parts = parts_of(table, monkeypatch)
    monkeypatch.setattr(ipvs_table, "PART_BYTES", 1 << 20)
    assert list(map(weights_of, parts)) == [{WEB: {}, DNS: {}}]
    times = iter([0.0, ipvs_table.PART_S, 0.0, 0.0])
    monkeypatch.setattr(table.reader, "_clock", lambda: next(times))
    table.reader.forget()
    assert list(map(weights_of, table.reader.read())) == [{WEB: {}}, {DNS: {}}]


def test_what_is_written_between_parts_of_a_reading_with_settings_is_left_to_the_next_one(
    table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    table.write(WEB_TEXT, DNS_TEXT)
    parts = parts_of(table, monkeypatch, {WEB: RR, DNS: RR})
    assert weights_of(next(parts)) == {WEB: {}}
    table.reader.note(DNS, is_there=True)
    assert list(parts) == [{}]
    assert table.shown() == {DNS: {}}


LASTING = VirtualServerSettings("rr", PERSISTENT, 20)


@pytest.mark.parametrize(
    ("line", "older"),
    [
        ("TCP  0A600001:0050 sh \n", RR),
        ("TCP  0A600001:0050 rr persistent 1000 FFFFFFFF\n", RR),
        ("TCP  0A600001:0050 rr \n", LASTING),
        ("TCP  0A600001:0050 rr persistent 3000 FFFFFFFF\n", LASTING),
    ],
)
def test_settings_that_are_older_than_the_text_are_not_returned(table: Table, line: str, older: VirtualServerSettings) -> None:
    table.write("TCP  0A600001:0050 rr persistent 2000 FFFFFFFF\n")
    assert table.read_with({WEB: LASTING}).keys() == {WEB}, "the rate of ticks is known now"
    table.write(line)
    assert table.read_with({WEB: older}) == {}
    assert table.poll().keys() == {WEB}, "the next look tells"


def test_of_many_that_are_skipped_what_was_written_is_asked_for_first(table: Table) -> None:
    keys = many(5 * ipvs_table.ASKED_AT_ONCE // 2)
    table.settings = dict.fromkeys(keys, RR)
    table.write()
    table.read_with(table.settings)
    table.questions.clear()
    table.reader.note(keys[-1], is_there=True)
    table.poll()
    assert table.questions[0] == keys[-1]


def test_a_poll_returns_each_part_by_itself(table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    table.write(WEB_TEXT, DNS_TEXT)
    assert list(map(weights_of, parts_of(table, monkeypatch))) == [{WEB: {}}, {DNS: {}}]


def test_a_virtual_server_written_before_a_poll_reaches_it_is_returned_by_this_poll(
    table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    table.write(WEB_TEXT, DNS_TEXT)
    table.poll()
    parts = parts_of(table, monkeypatch)
    assert next(parts) == {}
    table.reader.note(DNS, is_there=True)
    assert weights_of(next(parts)) == {DNS: {}}
    assert list(parts) == []
    assert table.poll() == {}


def test_a_virtual_server_written_after_a_poll_has_passed_it_is_returned_by_the_next_one(
    table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    table.write(WEB_TEXT, DNS_TEXT)
    table.poll()
    parts = parts_of(table, monkeypatch)
    next(parts)
    table.reader.note(WEB, is_there=True)
    assert list(map(weights_of, parts)) == [{}]
    assert table.shown() == {WEB: {}}


def test_a_virtual_server_added_during_a_poll_is_not_gone(table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    table.write(WEB_TEXT)
    parts = parts_of(table, monkeypatch)
    next(parts)
    table.reader.note(DNS, is_there=True)
    assert list(parts) == []
    table.settings = {WEB: RR, DNS: RR}
    assert table.shown() == {DNS: {}}
    assert table.questions == [DNS]


def test_a_virtual_server_removed_during_a_poll_is_not_read_by_netlink(table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    table.write(WEB_TEXT, DNS_TEXT)
    table.poll()
    table.write(WEB_TEXT)
    parts = parts_of(table, monkeypatch)
    next(parts)
    table.reader.note(DNS, is_there=False)
    assert list(parts) == []
    assert table.questions == []


def test_a_poll_that_is_abandoned_loses_nothing(table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    table.write(WEB_TEXT, DNS_TEXT)
    table.poll()
    next(parts_of(table, monkeypatch))
    monkeypatch.undo()
    table.settings = {}
    table.write()
    assert table.shown() == {WEB: None, DNS: None}


def many(count: int) -> list[VirtualServerKey]:
    return [msgspec.structs.replace(WEB, port=port) for port in range(1, count + 1)]


def test_of_many_that_are_skipped_a_part_is_asked_for_each_time_in_turn(table: Table) -> None:
    keys = many(5 * ipvs_table.ASKED_AT_ONCE // 2)
    table.settings = dict.fromkeys(keys, RR)
    table.write()
    assert table.read_with(table.settings).keys() == set(keys)
    table.questions.clear()
    table.real_servers = {keys[-1]: {POD: 1}}
    observed: Shown = {}
    for _ in range(3):
        reading = table.shown()
        assert None not in reading.values()
        observed |= reading
    assert len(table.questions) == 3 * ipvs_table.ASKED_AT_ONCE
    assert set(table.questions) == set(keys)
    assert observed[keys[-1]] == {POD: 1}


def test_when_one_of_those_asked_for_has_gone_all_are_asked_for(table: Table) -> None:
    keys = many(5 * ipvs_table.ASKED_AT_ONCE // 2)
    table.settings = dict.fromkeys(keys, RR)
    table.write()
    table.read_with(table.settings)
    table.settings = {keys[-1]: RR}
    assert table.shown() == {key: {} if key is keys[-1] else None for key in keys}
    assert table.shown() == {keys[-1]: {}}


@pytest.mark.parametrize("with_settings", [False, True])
def test_a_reading_that_fails_in_the_middle_loses_and_invents_nothing(table: Table, *, with_settings: bool) -> None:
    table.settings = {WEB: RR, DNS: VirtualServerSettings("rr", PERSISTENT, 10800)}
    lasting = "UDP  [fd00:0000:0000:0000:0000:0000:0000:0001]:0035 rr persistent 1080000 FFFFFFFF\n"
    table.write(WEB_TEXT, real(), lasting)
    table.read_with(table.settings)
    new = msgspec.structs.replace(WEB, address=parse_address("10.96.0.7"))
    table.write(lasting, "TCP  0A600007:0050 rr persistent 1080000 FFFFFFFF\n")
    table.is_broken = True
    reading: Shown = {}

    def read() -> None:
        if with_settings:
            table.read_with(table.settings)
        for part in table.reader.read():
            reading.update(weights_of(part))

    for _ in range(2):
        with pytest.raises(KernelError):
            read()
    assert None not in reading.values()
    table.is_broken = False
    table.settings = {DNS: table.settings[DNS]}
    table.write(lasting)
    assert {DNS: {}} | table.shown() == {WEB: None, DNS: {}, new: None}


def test_a_part_that_cannot_be_parsed_is_returned_once_it_can(table: Table) -> None:
    table.write(WEB_TEXT, real(), "TCP  rubbish\n")
    for _ in range(2):
        with pytest.raises(KernelError, match="rubbish"):
            table.poll()
    table.write(WEB_TEXT, real())
    assert table.shown() == {WEB: {POD: 1}}


def test_a_virtual_server_that_came_while_others_were_skipped_is_returned(table: Table) -> None:
    table.settings = {DNS: RR}
    table.write(DNS_TEXT)
    table.poll()
    table.write(WEB_TEXT, real())
    assert table.shown() == {WEB: {POD: 1}, DNS: {}}


def test_the_rate_of_ticks_is_asked_for_once(table: Table) -> None:
    for ticks in (1000, 2000):
        table.write(f"TCP  0A600001:0050 rr persistent {ticks} FFFFFFFF\n")
        (observed,) = table.poll().values()
        assert observed is not None
        assert observed.settings == VirtualServerSettings("rr", PERSISTENT, ticks // 100)
    assert table.asked == 1


def test_a_timeout_that_no_settings_explain_is_an_error_unless_they_are_what_counts(table: Table) -> None:
    table.write("TCP  0A600002:0050 rr persistent 1000 FFFFFFFF\n")
    assert table.read_with({}) == {}
    assert table.asked == 0
    with pytest.raises(KernelError, match="it changed while it was read"):
        table.poll()


def test_other_protocols_are_counted_at_each_reading(table: Table) -> None:
    table.write("ESP  0A000001:0000 wlc \n", real(), WEB_TEXT)
    for _ in range(2):
        table.poll()
        assert table.reader.foreign == 1


def test_a_firewall_mark_is_read_with_the_family_of_its_real_servers(table: Table) -> None:
    table.write("FWM  00000064 wlc \n", real(), "FWM  00000064 rr \n", real6())
    found = {str(key): value.settings.scheduler for key, value in table.poll().items() if value}
    assert found == {"mark 0x64 (IPv4)": "wlc", "mark 0x64 (IPv6)": "rr"}
    assert table.poll() == {}


def test_connections_are_shown_for_each_real_server(table: Table) -> None:
    table.write(WEB_TEXT, real(active=3, inactive=12), DNS_TEXT)
    assert table.reader.connections() == {WEB: {POD: Connections(3, 12)}, DNS: {}}
