"""The counters of IPVS, from dumps of virtual and of real servers: connections, packets and bytes, in 64 bits."""

import contextlib
import pathlib
import time
from collections.abc import Callable, Collection, Container, Iterator
from typing import NamedTuple

from ipvsproxy.kernel.base import netlink
from ipvsproxy.kernel.base.errors import KernelError
from ipvsproxy.kernel.ipvs import message as ipvs_message
from ipvsproxy.kernel.ipvs import rows as ipvs_rows
from ipvsproxy.model.real_servers import RealServerKey
from ipvsproxy.model.virtual_servers import Connections, Counters, VirtualServerKey

COUNTED_AT_ONCE = 400
"""The virtual servers of one part: a few milliseconds, during which programming may have to wait."""
PART_S = 0.004
"""The longest time of a part: for each 32 kB the kernel walks its table from the beginning, which takes 8 ms with 100,000 virtual
servers.
"""

_TOTALS_LINE = 2


class EndpointTraffic(NamedTuple):
    """One real server: its open connections, and its counters."""

    connections: Connections
    counters: Counters


class TrafficReader:
    """Reads counters in the network namespace of the calling thread.

    Each reading has a socket of its own, so that other requests may come between its parts. ``connect`` opens a socket.
    """

    def __init__(
        self,
        connect: Callable[[int], netlink.Socket],
        clock: Callable[[], float] = time.monotonic,
        totals: pathlib.Path = pathlib.Path("/proc/thread-self/net/ip_vs_stats"),
    ) -> None:
        self._connect = connect
        self._totals = totals
        self._clock = clock

    def totals(self) -> Counters:
        """The counters of the whole network namespace, also of virtual servers that are gone.

        Raises:
            KernelError: they could not be read.
        """
        try:
            return read_totals(self._totals.read_text())
        except (OSError, ValueError) as error:
            raise KernelError(action="read the counters of IPVS", detail=str(error)) from error

    def services(self, always: Container[VirtualServerKey]) -> Iterator[dict[VirtualServerKey, Counters]]:
        """Read the counters of virtual servers, part by part.

        Virtual servers that have counted nothing are left out, except those in ``always``. If virtual servers come and go
        meanwhile, others may be missing.

        Raises:
            KernelError: a part could not be read. The parts before it are valid.
        """
        with contextlib.closing(ipvs_rows.NetlinkTable(self._connect)) as table:
            counted: dict[VirtualServerKey, Counters] = {}
            met, began_s = 0, self._clock()
            for replies in table.channel.dumping(table.encoder.all_services(), "read the counters of virtual servers"):
                services = map(ipvs_rows.counted_service, map(ipvs_message.attributes, replies))
                counted |= {key: one for key, one in services if key is not None and (any(one) or key in always)}
                met += len(replies)
                if met >= COUNTED_AT_ONCE or self._clock() - began_s >= PART_S:
                    yield counted
                    counted, met, began_s = {}, 0, self._clock()
        yield counted

    def endpoints(self, keys: Collection[VirtualServerKey]) -> dict[VirtualServerKey, dict[RealServerKey, EndpointTraffic]]:
        """The counters of each real server of these virtual servers; empty for a virtual server that does not exist.

        Raises:
            KernelError: the counters could not be read.
        """
        with contextlib.closing(ipvs_rows.NetlinkTable(self._connect)) as table:
            return {
                key: {row.key: EndpointTraffic(row.connections, counters) for row, counters in table.counted_real_servers(key)}
                for key in keys
            }


def read_totals(text: str) -> Counters:
    """The counters in ``/proc/net/ip_vs_stats``: hexadecimal numbers in its third line, behind two of titles.

    Raises:
        ValueError: the text is something else.
    """
    words = "".join(text.splitlines()[_TOTALS_LINE : _TOTALS_LINE + 1]).split()
    if len(words) != len(Counters._fields):
        raise ValueError("unknown format of /proc/net/ip_vs_stats")
    return Counters._make(int(word, 16) for word in words)
