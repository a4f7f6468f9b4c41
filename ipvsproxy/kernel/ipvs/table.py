"""Repeated readings of ``/proc/net/ip_vs``, in parts: a virtual server whose text has not changed is not returned again.

The file may leave out virtual servers that exist. Each ``read`` continues at a position that counts the virtual servers of all
network namespaces, but looks this position up among those of its own (net/netfilter/ipvs/ip_vs_ctl.c, ``ip_vs_info_seq_next`` and
``ip_vs_info_array``, Linux 6.1). So the file skips some of ours if another namespace of the kernel has virtual servers, or if an
earlier one is removed between two reads. Therefore absence from the file proves nothing: a virtual server that the last reading
showed, or that was added since, is read by netlink before it counts as gone.

Other calls may write between two parts. So each part only describes what it has read itself, at its own moment.
"""

import contextlib
import errno
import itertools
import pathlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final

from ipvsproxy.kernel.base.errors import KernelError
from ipvsproxy.kernel.ipvs import listing as ipvs_listing
from ipvsproxy.model.real_servers import RealServerKey
from ipvsproxy.model.virtual_servers import (
    HAS_THRESHOLDS,
    PERSISTENT,
    Connections,
    ObservedVirtualServer,
    VirtualServerKey,
    VirtualServerSettings,
)

PART_BYTES = 48 << 10
"""The most bytes of a part: a few milliseconds of work if all of them are new."""
PART_S = 0.003
"""The longest time of a part: the later a page of the file is, the longer the kernel takes to find it."""
ASKED_AT_ONCE = 200
"""The most skipped virtual servers that a poll reads by netlink, as long as all of them exist: 20 ms. They take turns."""

_UNKNOWN: Final = None
_WRITTEN: Final = -1
"""Stands for the hash of a text: the virtual server was written since it was last returned."""
_SHORT: Final = (1 << 60) - 1
"""The bits of a hash that are kept, so that it is never negative. A number with one bit more takes a third piece of memory."""

Settings = Mapping[VirtualServerKey, VirtualServerSettings]
Reading = dict[VirtualServerKey, ObservedVirtualServer | None]
"""Virtual servers that were read; None for one that does not exist."""


class TableReader:
    """Reads the table in the network namespace of the thread that uses this object.

    ``foreign`` is the number of virtual servers that the last reading left out: those of another protocol.
    """

    def __init__(
        self,
        path: pathlib.Path,
        read_settings: Callable[[], Settings],
        read_one: Callable[[VirtualServerKey], ObservedVirtualServer | None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``read_settings`` reads all virtual servers by netlink, which shows their timeouts in seconds.

        ``read_one`` reads one virtual server by netlink; None if it does not exist.
        """
        self.foreign = 0
        self._path = path
        self._read_settings = read_settings
        self._read_one = read_one
        self._clock = clock
        self._ticks_per_second = 0.0
        self._written: dict[VirtualServerKey, bool] = {}
        """The virtual servers that were written since the last part, and whether they exist."""
        self._texts: dict[bytes, int | None] = {}
        """The hash of the text of each virtual server when it was last returned, by its name in the file."""
        self._remaining: dict[bytes, int | None] = {}
        """As ``_texts``, for virtual servers that the present reading, or an unfinished one, has not reached yet."""

    @property
    def size(self) -> int:
        """The known number of virtual servers."""
        return max(len(self._texts) + len(self._remaining), len(self._written))

    def note(self, key: VirtualServerKey, *, is_there: bool) -> None:
        """Note that a virtual server, or one of its real servers, has perhaps been written; or that it was removed."""
        self._written[key] = is_there

    def forget(self) -> None:
        """Make the next reading return every virtual server."""
        self._begin()
        self._remaining = dict.fromkeys(self._remaining, _UNKNOWN)

    def read(self) -> Iterator[Reading]:
        """Read, part by part, the virtual servers that have changed since they were last returned, or were written meanwhile.

        Scheduler flags are unknown. Of many virtual servers that the file skips, each call reads some by netlink, and does not
        return the others.

        Raises:
            KernelError: the file, or a skipped virtual server, could not be read. The parts before it are valid.
        """
        self._begin()
        yield from self._listed(None)
        self._note_written()
        has_gone = False
        # Virtual servers that were written come first: no reading has returned them yet.
        for names in _batches(sorted(self._remaining, key=lambda name: self._remaining[name] != _WRITTEN)):
            reading = self._ask(names)
            yield reading
            has_gone |= None in reading.values()
            if not has_gone:
                break
        if self._remaining:
            # Virtual servers that were not read go before the others, so that the next reading reads them first.
            self._texts = self._remaining | self._texts
        self._remaining = {}  # an emptied dictionary would keep its memory, 5 MB for 100,000

    def read_with(self, settings: Settings) -> Iterator[Reading]:
        """Read all virtual servers, part by part, with these settings, which were read just before.

        A known virtual server, or one with settings, that is not in the file is read by netlink. A dump of settings, too, skips
        some if another namespace removes others. The next reading returns virtual servers that were written or added after the
        settings were read.

        Raises:
            KernelError: the file, or a skipped virtual server, could not be read. The parts before it are valid.
        """
        self.forget()
        self._remaining |= dict.fromkeys(map(ipvs_listing.name_of, settings), _UNKNOWN)
        yield from self._listed(settings)
        self._note_written()
        for names in _batches(self._remaining):
            yield self._ask(names)
        self._remaining = {}  # as above

    def _begin(self) -> None:
        self._note_written()
        self._remaining = self._remaining | self._texts if self._remaining else self._texts
        self._texts = {}

    def _listed(self, settings: Settings | None) -> Iterator[Reading]:
        foreign = 0
        with self._reading():
            for part in self._parts():
                self._note_written()
                reading: Reading = {}
                texts: dict[bytes, int] = {}
                for block in ipvs_listing.blocks(part):
                    name, text = block.name, hash(ipvs_listing.without_connections(block)) & _SHORT
                    if not name:
                        continue  # the file does not show its family, so it is asked for like one that the file skips
                    before = self._remaining.get(name, _UNKNOWN)
                    if text != before:
                        heading = ipvs_listing.heading(block)
                        if heading is None:
                            foreign += 1
                            continue
                        if settings is None or (before is _UNKNOWN and self._are_current(heading, settings)):
                            reading[heading.key] = self._interpret(heading, block, settings)
                        else:
                            text = _WRITTEN
                    texts[name] = text
                for name in texts:
                    self._remaining.pop(name, None)
                self._texts |= texts
                yield reading
        self.foreign = foreign

    def _are_current(self, heading: ipvs_listing.Heading, settings: Settings) -> bool:
        """Whether these settings match the text. They are older, and may have been changed since."""
        value = settings.get(heading.key)
        if value is None or value.scheduler != heading.scheduler or bool(value.flags & PERSISTENT) != bool(heading.timeout_ticks):
            return False
        return not self._ticks_per_second or round(heading.timeout_ticks / self._ticks_per_second) in (0, value.timeout_s)

    def _note_written(self) -> None:
        """Take in the writes between two parts: the reading has these virtual servers, if at all, as they were before."""
        for key, is_there in self._written.items():
            name = ipvs_listing.name_of(key)
            if not is_there:
                self._texts.pop(name, None)
                self._remaining.pop(name, None)
            elif name in self._remaining:
                self._remaining[name] = _WRITTEN
            else:
                self._texts[name] = _WRITTEN
        self._written.clear()

    def _parts(self) -> Iterator[bytes]:
        pieces: list[bytes] = []
        size, began_s = 0, self._clock()
        for piece in ipvs_listing.pieces(self._path):
            pieces.append(piece)
            size += len(piece)
            if size >= PART_BYTES or self._clock() - began_s >= PART_S:
                yield b"".join(pieces)
                pieces, size, began_s = [], 0, self._clock()
        if pieces:
            yield b"".join(pieces)

    def _ask(self, names: Iterable[bytes]) -> Reading:
        """Ask for those of these virtual servers that the reading has not reached yet."""
        self._note_written()
        asked = [name for name in names if name in self._remaining]
        keys = list(map(ipvs_listing.key_of, asked))
        reading = {key: self._read_one(key) for key in keys}
        for name, key in zip(asked, keys, strict=True):
            del self._remaining[name]
            if reading[key] is not None:
                self._texts[name] = _UNKNOWN
        return reading

    def connections(self) -> Mapping[VirtualServerKey, Mapping[RealServerKey, Connections]]:
        """The connections of the real servers of all virtual servers that the file does not skip.

        Raises:
            KernelError: the file could not be read.
        """
        by_virtual_server: dict[VirtualServerKey, Mapping[RealServerKey, Connections]] = {}
        with self._reading():
            for piece in ipvs_listing.pieces(self._path):
                for block in ipvs_listing.blocks(piece):
                    heading = ipvs_listing.heading(block)
                    if heading is not None:
                        by_virtual_server[heading.key] = ipvs_listing.connections(block.real_servers)
        return by_virtual_server

    def _interpret(
        self, heading: ipvs_listing.Heading, block: ipvs_listing.Block, settings: Settings | None
    ) -> ObservedVirtualServer:
        if settings is not None and settings[heading.key].flags & HAS_THRESHOLDS:
            asked = self._read_one(heading.key)  # the file does not show thresholds
            if asked is not None:
                return asked
        ticks = heading.timeout_ticks
        if ticks and not self._ticks_per_second:
            self._ticks_per_second = self._rate(heading.key, ticks, settings)
        weights = ipvs_listing.weights(block.real_servers)
        if settings is not None:
            return ObservedVirtualServer(settings[heading.key], weights)
        flags = (PERSISTENT if ticks else 0) | (ipvs_listing.ONE_PACKET if heading.one_packet else 0)
        timeout_s = round(ticks / (self._ticks_per_second or 1))
        shown = VirtualServerSettings(heading.scheduler, flags, timeout_s, heading.prefix_length)
        return ObservedVirtualServer(shown, weights, flags_known=False)

    def _rate(self, key: VirtualServerKey, ticks: int, settings: Settings | None) -> float:
        """The ticks per second, computed from a persistent virtual server; 0 if they are not needed yet.

        Raises:
            KernelError: they cannot be computed, because the table has changed meanwhile.
        """
        shown = (self._read_settings() if settings is None else settings).get(key)
        if shown is not None and shown.timeout_s:
            return ticks / shown.timeout_s
        if settings is None:
            raise KernelError(action=f"read {self._path}", errno=errno.EAGAIN, detail="it changed while it was read")
        return 0.0

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        action = f"read {self._path}"
        try:
            yield
        except OSError as error:
            raise KernelError(action=action, errno=error.errno or 0) from error
        except ValueError as error:
            raise KernelError(action=action, detail=str(error)) from error


def _batches(names: Iterable[bytes]) -> Iterator[Sequence[bytes]]:
    remaining = iter(list(names))
    while batch := list(itertools.islice(remaining, ASKED_AT_ONCE)):
        yield batch
