"""Reading ``/proc/net/ip_vs`` again and again: what stands there as it stood the last time is not parsed again.

The file may leave out virtual servers that are there. Each ``read`` of it goes on at a position that counts those of all network
namespaces, and looks the position up among those of its own (net/netfilter/ipvs/ip_vs_ctl.c, ``ip_vs_info_seq_next`` and
``ip_vs_info_array``, Linux 6.1). So where another namespace of the kernel has virtual servers, some of ours are skipped; and so
they are when one that stands before them is removed between two reads. Therefore absence from the file means nothing: what the
last reading showed, or was added since, is asked for by netlink before it counts as gone.
"""

import contextlib
import errno
import pathlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from ipvsproxy.kernel import ipvs_listing
from ipvsproxy.kernel.errors import KernelError
from ipvsproxy.model.kernel import PERSISTENT, Connections, ObservedVirtualServer, VirtualServerKey, VirtualServerSettings
from ipvsproxy.model.real_servers import RealServerKey

ASKED_AT_ONCE = 200
"""Most virtual servers that ``read`` asks for in turn because the file skips them, as long as none of them has gone: 20 ms."""

Settings = Mapping[VirtualServerKey, VirtualServerSettings]
_Known = tuple[VirtualServerKey, ObservedVirtualServer] | None


class _Parsed(NamedTuple):
    """What the file shows: by the text of a virtual server, None for one that is never ours; and by its key."""

    known: dict[str, _Known]
    listed: dict[VirtualServerKey, ObservedVirtualServer]


class TableReader:
    """Reads the table of the network namespace of the thread that uses it.

    ``foreign`` is how many virtual servers the last reading left out: those by firewall mark or of another protocol.
    """

    def __init__(
        self,
        path: pathlib.Path,
        read_settings: Callable[[], Settings],
        read_one: Callable[[VirtualServerKey], ObservedVirtualServer | None],
    ) -> None:
        """``read_settings`` shows all virtual servers by another way, which knows their timeouts in seconds.

        ``read_one`` shows one by that way, or that it does not exist.
        """
        self.foreign = 0
        self._path = path
        self._read_settings = read_settings
        self._read_one = read_one
        self._ticks_per_second = 0.0
        # What follows changes only when a reading has come to its end.
        self._known: dict[str, _Known] = {}
        self._found: Mapping[VirtualServerKey, ObservedVirtualServer] = {}
        self._turn = 0
        self._changed: dict[VirtualServerKey, bool] = {}
        """Since the last reading: true for what was added, or perhaps was, false for what was removed."""

    def note(self, key: VirtualServerKey, *, is_there: bool) -> None:
        """A virtual server has been added, or perhaps has, or it has been removed."""
        self._changed[key] = is_there

    def read(self) -> dict[VirtualServerKey, ObservedVirtualServer]:
        """What the table shows, and what it skips; what is as it was at the last reading is the same object.

        Scheduler flags are not among it: those that ``read_with`` was given last stand. Of many that it skips, a part is asked
        for each time, and the others count as they were.

        Raises:
            KernelError: it, or what it lacks, could not be read.
        """
        parsed = self._parse(None)
        lacking = [key for key in self._expected() if key not in parsed.listed]
        found = parsed.listed | self._ask_for(lacking) if lacking else parsed.listed
        self._finish(parsed.known, found)
        return found

    def read_with(self, settings: Settings) -> dict[VirtualServerKey, ObservedVirtualServer]:
        """The virtual servers that have these settings, which were read just before, with the real servers of the table.

        What is expected and in neither is asked for: that listing, too, skips some when another namespace removes others.

        Raises:
            KernelError: it, or what it lacks, could not be read.
        """
        parsed = self._parse(settings)
        found: dict[VirtualServerKey, ObservedVirtualServer] = {}
        for key, value in settings.items():
            seen = parsed.listed.get(key)
            if seen is None:
                seen = self._ask(key)
            elif seen.settings != value or not seen.flags_known:
                seen = ObservedVirtualServer(settings=value, real_servers=seen.real_servers)
            if seen is not None:
                found[key] = seen
        for key in self._expected():
            if key not in settings and (seen := self._ask(key)) is not None:
                found[key] = seen
        # What came after the settings had been read is to be understood by the next reading, with others.
        known = {
            text: known and (known[0], found[known[0]])
            for text, known in parsed.known.items()
            if known is None or known[0] in found
        }
        self._finish(known, found)
        return found

    def _expected(self) -> Iterator[VirtualServerKey]:
        """What is there if nobody else has removed it."""
        for key in self._found:
            if self._changed.get(key) is not False:
                yield key
        for key, is_there in self._changed.items():
            if is_there and key not in self._found:
                yield key

    def _ask_for(self, keys: Sequence[VirtualServerKey]) -> dict[VirtualServerKey, ObservedVirtualServer]:
        """Those of them that exist."""
        familiar = [key for key in keys if key in self._found]
        first = self._turn % len(familiar) if familiar else 0
        in_turn = [*familiar[first:], *familiar[:first]][:ASKED_AT_ONCE]
        self._turn = first + len(in_turn)
        unread = [key for key in keys if key not in self._found]
        seen = {key: self._ask(key) for key in (*in_turn, *unread)}
        is_whole = all(seen.values())
        for key in familiar:
            if key not in seen:
                seen[key] = self._found[key] if is_whole else self._ask(key)
        return {key: value for key, value in seen.items() if value is not None}

    def _ask(self, key: VirtualServerKey) -> ObservedVirtualServer | None:
        seen, before = self._read_one(key), self._found.get(key)
        return before if before == seen else seen

    def _finish(self, known: dict[str, _Known], found: Mapping[VirtualServerKey, ObservedVirtualServer]) -> None:
        self._known, self._found, self._changed = known, found, {}
        self.foreign = sum(one is None for one in known.values())

    @property
    def size(self) -> int:
        """How many virtual servers there are, as far as is known: found by the last reading, added or removed since."""
        return len(self._found) + len(self._changed)

    def connections(self) -> Mapping[VirtualServerKey, Mapping[RealServerKey, Connections]]:
        """The connections of the real servers of all virtual servers that the table does not skip.

        Raises:
            KernelError: they could not be read.
        """
        with self._reading() as file:
            return {key: server.connections for key, server in ipvs_listing.parse(file).virtual_servers.items()}

    def _parse(self, settings: Settings | None) -> _Parsed:
        known: dict[str, _Known] = {}
        with self._reading() as file:
            for text, lines in ipvs_listing.blocks(file):
                known[text] = self._known[text] if text in self._known else self._understand(lines, settings)
        return _Parsed(known, dict(filter(None, known.values())))

    def _understand(self, lines: Iterable[str], settings: Settings | None) -> _Known:
        for key, server in ipvs_listing.parse_block(lines, only_weights=True).virtual_servers.items():
            persistent = PERSISTENT if server.timeout_ticks else 0
            value = VirtualServerSettings(
                server.scheduler,
                persistent | (ipvs_listing.ONE_PACKET if server.one_packet else 0),
                self._seconds(key, server.timeout_ticks, settings),
            )
            return key, ObservedVirtualServer(settings=value, real_servers=server.weights, flags_known=False)
        return None

    def _seconds(self, key: VirtualServerKey, ticks: int, settings: Settings | None) -> int:
        """A timeout, by the rate that the first persistent virtual server tells.

        Raises:
            KernelError: nothing tells the rate.
        """
        if ticks and not self._ticks_per_second:
            shown = (self._read_settings() if settings is None else settings).get(key)
            if shown is not None and shown.timeout_s:
                self._ticks_per_second = ticks / shown.timeout_s
            elif settings is None:
                raise KernelError(action=f"read {self._path}", errno=errno.EAGAIN, detail="it changed while it was read")
        return round(ticks / (self._ticks_per_second or 1))

    @contextlib.contextmanager
    def _reading(self) -> Iterator[Iterable[str]]:
        action = f"read {self._path}"
        try:
            with self._path.open(encoding="ascii", errors="replace") as file:
                yield file
        except OSError as error:
            raise KernelError(action=action, errno=error.errno or 0) from error
        except ValueError as error:
            raise KernelError(action=action, detail=str(error)) from error
