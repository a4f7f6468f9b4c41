"""Reading ``/proc/net/ip_vs`` again and again: what stands there as it stood the last time is not parsed again.

The file may leave out virtual servers that are there. Each ``read`` of it goes on at a position that counts those of all network
namespaces, and looks the position up among those of its own (net/netfilter/ipvs/ip_vs_ctl.c, ``ip_vs_info_seq_next`` and
``ip_vs_info_array``, up to Linux 6.18 at least). So where another namespace of the kernel has virtual servers, some of ours are
skipped; and so they are when one that stands before them is removed between two reads. Therefore absence from the file means
nothing: what was there the last time is asked for by netlink before it counts as gone.
"""

import contextlib
import errno
import pathlib
from collections.abc import Callable, Iterable, Iterator, Mapping

from ipvsproxy.kernel import ipvs_listing
from ipvsproxy.kernel.errors import KernelError
from ipvsproxy.model.kernel import (
    PERSISTENT,
    Connections,
    ObservedVirtualServer,
    RealServerKey,
    VirtualServerKey,
    VirtualServerSettings,
)

Settings = Mapping[VirtualServerKey, VirtualServerSettings]
_Known = tuple[VirtualServerKey, ObservedVirtualServer] | None


class TableReader:
    """Reads the table of the network namespace of the thread that uses it.

    ``foreign`` is how many virtual servers the last reading left out: those by firewall mark or of another protocol.
    """

    def __init__(
        self,
        path: pathlib.Path,
        read_settings: Callable[[], Settings],
        read_real_servers: Callable[[VirtualServerKey], dict[RealServerKey, int]],
    ) -> None:
        """``read_settings`` shows all virtual servers by another way, ``read_real_servers`` the weights of what one has."""
        self.foreign = 0
        self._path = path
        self._read_settings = read_settings
        self._read_real_servers = read_real_servers
        self._ticks_per_second = 0.0
        self._known: dict[str, _Known] = {}
        """By the text of a virtual server; None for one that is never ours."""
        self._skipped: dict[VirtualServerKey, ObservedVirtualServer] = {}
        """What the last reading had to ask for, because the table lacked it."""

    def read(self) -> dict[VirtualServerKey, ObservedVirtualServer]:
        """What the table shows; what is as it was at the last reading is the same object.

        Scheduler flags are not among it: those that ``read_with`` was given last stand.

        Raises:
            KernelError: it, or what it lacks, could not be read.
        """
        before = self._known
        listed = self._read(None)
        if self._skipped.keys() <= listed.keys() and all(known[0] in listed for known in before.values() if known):
            self._skipped = {}
            return listed
        return {**listed, **self._complete(listed, self._read_settings())}

    def read_with(self, settings: Settings) -> dict[VirtualServerKey, ObservedVirtualServer]:
        """The virtual servers that have these settings, which were read just before, with the real servers of the table.

        Raises:
            KernelError: it, or what it lacks, could not be read.
        """
        found = self._complete(self._read(settings), settings)
        # What came after the settings had been read is to be understood by the next reading, with others.
        self._known = {
            text: known and (known[0], found[known[0]])
            for text, known in self._known.items()
            if known is None or known[0] in found
        }
        return found

    def _complete(
        self, listed: Mapping[VirtualServerKey, ObservedVirtualServer], settings: Settings
    ) -> dict[VirtualServerKey, ObservedVirtualServer]:
        """What has these settings: as listed, or as the kernel says when it is asked for the one that the table skipped."""
        found: dict[VirtualServerKey, ObservedVirtualServer] = {}
        skipped: dict[VirtualServerKey, ObservedVirtualServer] = {}
        for key, value in settings.items():
            seen = listed.get(key)
            if seen is None:
                seen = ObservedVirtualServer(settings=value, real_servers=self._read_real_servers(key))
                if seen == self._skipped.get(key):
                    seen = self._skipped[key]
                skipped[key] = seen
            elif seen.settings != value or not seen.flags_known:
                seen = ObservedVirtualServer(settings=value, real_servers=seen.real_servers)
            found[key] = seen
        self._skipped = skipped
        return found

    def connections(self) -> Mapping[VirtualServerKey, Mapping[RealServerKey, Connections]]:
        """The connections of the real servers of all virtual servers that the table does not skip.

        Raises:
            KernelError: they could not be read.
        """
        with self._reading() as file:
            return {key: server.connections for key, server in ipvs_listing.parse(file).virtual_servers.items()}

    def _read(self, settings: Settings | None) -> dict[VirtualServerKey, ObservedVirtualServer]:
        known: dict[str, _Known] = {}
        with self._reading() as file:
            for text, lines in ipvs_listing.blocks(file):
                known[text] = self._known[text] if text in self._known else self._understand(lines, settings)
        self._known = known
        found = dict(filter(None, known.values()))
        self.foreign = len(known) - len(found)
        return found

    def _understand(self, lines: Iterable[str], settings: Settings | None) -> _Known:
        for key, server in ipvs_listing.parse_block(lines).virtual_servers.items():
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
