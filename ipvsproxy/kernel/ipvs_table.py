"""Reading ``/proc/net/ip_vs`` again and again, in parts: what stands there as it stood the last time is not told again.

The file may leave out virtual servers that are there. Each ``read`` of it goes on at a position that counts those of all network
namespaces, and looks the position up among those of its own (net/netfilter/ipvs/ip_vs_ctl.c, ``ip_vs_info_seq_next`` and
``ip_vs_info_array``, Linux 6.1). So where another namespace of the kernel has virtual servers, some of ours are skipped; and so
they are when one that stands before them is removed between two reads. Therefore absence from the file means nothing: what the
last reading showed, or was added since, is asked for by netlink before it counts as gone.

Between two parts others may write. So each part tells only of what it has read itself, at its own moment.
"""

import contextlib
import errno
import itertools
import pathlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final

from ipvsproxy.kernel import ipvs_listing
from ipvsproxy.kernel.errors import KernelError
from ipvsproxy.model.kernel import PERSISTENT, Connections, ObservedVirtualServer, VirtualServerKey, VirtualServerSettings
from ipvsproxy.model.real_servers import RealServerKey

PART_BYTES = 48 << 10
"""A part of the file ends when so much of it has been read: a few milliseconds of work if all of it is new."""
PART_S = 0.003
"""Or when that has taken so long: the further a page is behind, the longer the kernel takes to find it."""
ASKED_AT_ONCE = 200
"""Most virtual servers that a look asks for in turn because the file skips them, as long as none of them has gone: 20 ms."""

_UNKNOWN: Final = None
_WRITTEN: Final = -1
"""In the place of the hash of a text: it was written since it was told."""
_SHORT: Final = (1 << 60) - 1
"""So much of a hash is kept, which is never below 0 then: a number of one bit more takes a third piece of memory."""

Settings = Mapping[VirtualServerKey, VirtualServerSettings]
Told = dict[VirtualServerKey, ObservedVirtualServer | None]
"""Virtual servers that were read; None for one that does not exist."""


class TableReader:
    """Reads the table of the network namespace of the thread that uses it.

    ``foreign`` is how many virtual servers the last reading left out: those by firewall mark or of another protocol.
    """

    def __init__(
        self,
        path: pathlib.Path,
        read_settings: Callable[[], Settings],
        read_one: Callable[[VirtualServerKey], ObservedVirtualServer | None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``read_settings`` shows all virtual servers by another way, which knows their timeouts in seconds.

        ``read_one`` shows one by that way, or that it does not exist.
        """
        self.foreign = 0
        self._path = path
        self._read_settings = read_settings
        self._read_one = read_one
        self._clock = clock
        self._ticks_per_second = 0.0
        self._written: dict[VirtualServerKey, bool] = {}
        """Since the last part: whether they are there."""
        self._texts: dict[bytes, int | None] = {}
        """Of what is there, by its name in the file, the hash of the text that was told last."""
        self._to_come: dict[bytes, int | None] = {}
        """As ``_texts``, but what the running reading, or one that was left in the middle, has not come by yet."""

    @property
    def size(self) -> int:
        """How many virtual servers there are, as far as is known."""
        return max(len(self._texts) + len(self._to_come), len(self._written))

    def note(self, key: VirtualServerKey, *, is_there: bool) -> None:
        """A virtual server, or something in it, has been written, or perhaps has; or it has been removed."""
        self._written[key] = is_there

    def forget(self) -> None:
        """Have the next reading tell of each virtual server, whatever was told until now."""
        self._begin()
        self._to_come = dict.fromkeys(self._to_come, _UNKNOWN)

    def read(self) -> Iterator[Told]:
        """Part by part, the virtual servers that are not as they were when they were told last, or were written since.

        Scheduler flags are not known. Of many that the table skips, a part is asked for each time; nothing is told of the others.

        Raises:
            KernelError: it, or what it lacks, could not be read. What was told until then counts.
        """
        self._begin()
        yield from self._listed(None)
        self._note_written()
        has_gone = False
        # What was written comes first: nothing has told of it yet.
        for names in _batches(sorted(self._to_come, key=lambda name: self._to_come[name] != _WRITTEN)):
            told = self._ask(names)
            yield told
            has_gone |= None in told.values()
            if not has_gone:
                break
        if self._to_come:
            # Those that were not asked for stand before the others now, and so they do at the next reading.
            self._texts = self._to_come | self._texts
        self._to_come = {}  # one that was emptied keeps its room, 5 MB for 100,000

    def read_with(self, settings: Settings) -> Iterator[Told]:
        """Part by part, all virtual servers; settings are those given, which were read just before.

        What is expected, or has settings, and is not in the table is asked for: listings of settings, too, skip some when
        another namespace removes others. What was written or came after the settings had been read is left to the next reading.

        Raises:
            KernelError: it, or what it lacks, could not be read. What was told until then counts.
        """
        self.forget()
        self._to_come |= dict.fromkeys(map(ipvs_listing.name_of, settings), _UNKNOWN)
        yield from self._listed(settings)
        self._note_written()
        for names in _batches(self._to_come):
            yield self._ask(names)
        self._to_come = {}  # as above

    def _begin(self) -> None:
        self._note_written()
        self._to_come = self._to_come | self._texts if self._to_come else self._texts
        self._texts = {}

    def _listed(self, settings: Settings | None) -> Iterator[Told]:
        foreign = 0
        with self._reading():
            for part in self._parts():
                self._note_written()
                told: Told = {}
                texts: dict[bytes, int] = {}
                for block in ipvs_listing.blocks(part):
                    name, text = block.name, hash(ipvs_listing.steady(block)) & _SHORT
                    before = self._to_come.get(name, _UNKNOWN)
                    if text != before:
                        heading = ipvs_listing.heading(block.heading)
                        if heading is None:
                            foreign += 1
                            continue
                        if settings is None or (before is _UNKNOWN and self._agree(heading, settings)):
                            told[heading.key] = self._understand(heading, block, settings)
                        else:
                            text = _WRITTEN
                    texts[name] = text
                for name in texts:
                    self._to_come.pop(name, None)
                self._texts |= texts
                yield told
        self.foreign = foreign

    def _agree(self, heading: ipvs_listing.Heading, settings: Settings) -> bool:
        """Whether these settings are those of the text; they are older, and somebody may have changed them since."""
        value = settings.get(heading.key)
        if value is None or value.scheduler != heading.scheduler or bool(value.flags & PERSISTENT) != bool(heading.timeout_ticks):
            return False
        return not self._ticks_per_second or round(heading.timeout_ticks / self._ticks_per_second) in (0, value.timeout_s)

    def _note_written(self) -> None:
        """What was written between two parts has come by, if it has, as it was before."""
        for key, is_there in self._written.items():
            name = ipvs_listing.name_of(key)
            if not is_there:
                self._texts.pop(name, None)
                self._to_come.pop(name, None)
            elif name in self._to_come:
                self._to_come[name] = _WRITTEN
            else:
                self._texts[name] = _WRITTEN
        self._written.clear()

    def _parts(self) -> Iterator[bytes]:
        found: list[bytes] = []
        size, began_s = 0, self._clock()
        for piece in ipvs_listing.pieces(self._path):
            found.append(piece)
            size += len(piece)
            if size >= PART_BYTES or self._clock() - began_s >= PART_S:
                yield b"".join(found)
                found, size, began_s = [], 0, self._clock()
        if found:
            yield b"".join(found)

    def _ask(self, names: Iterable[bytes]) -> Told:
        """Ask for those of them that the reading has not come by yet: then it has."""
        self._note_written()
        asked = [name for name in names if name in self._to_come]
        keys = list(map(ipvs_listing.key_of, asked))
        told = {key: self._read_one(key) for key in keys}
        for name, key in zip(asked, keys, strict=True):
            del self._to_come[name]
            if told[key] is not None:
                self._texts[name] = _UNKNOWN
        return told

    def connections(self) -> Mapping[VirtualServerKey, Mapping[RealServerKey, Connections]]:
        """The connections of the real servers of all virtual servers that the table does not skip.

        Raises:
            KernelError: they could not be read.
        """
        found: dict[VirtualServerKey, Mapping[RealServerKey, Connections]] = {}
        with self._reading():
            for piece in ipvs_listing.pieces(self._path):
                for block in ipvs_listing.blocks(piece):
                    heading = ipvs_listing.heading(block.heading)
                    if heading is not None:
                        found[heading.key] = ipvs_listing.connections(block.real_servers)
        return found

    def _understand(
        self, heading: ipvs_listing.Heading, block: ipvs_listing.Block, settings: Settings | None
    ) -> ObservedVirtualServer:
        ticks = heading.timeout_ticks
        if ticks and not self._ticks_per_second:
            self._ticks_per_second = self._rate(heading.key, ticks, settings)
        weights = ipvs_listing.weights(block.real_servers)
        if settings is not None:
            return ObservedVirtualServer(settings[heading.key], weights)
        flags = (PERSISTENT if ticks else 0) | (ipvs_listing.ONE_PACKET if heading.one_packet else 0)
        timeout_s = round(ticks / (self._ticks_per_second or 1))
        return ObservedVirtualServer(VirtualServerSettings(heading.scheduler, flags, timeout_s), weights, flags_known=False)

    def _rate(self, key: VirtualServerKey, ticks: int, settings: Settings | None) -> float:
        """How many ticks a second has, as a persistent virtual server tells; 0 where that can wait.

        Raises:
            KernelError: nothing tells it.
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
