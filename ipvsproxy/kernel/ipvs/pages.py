"""Which virtual servers certainly have the same real servers as before, by pages of ``/proc/net/ip_vs`` that have not changed.

The kernel prints a page (4 kB) in one system call, where ``getsockopt`` needs one for each virtual server: most Services have few
endpoints, and a page has up to fifty of them. A page that is printed as before need not be parsed. So the file spares questions.
A virtual server that it skips (see ``table``), or whose page has changed, is asked for; and so is one with thresholds, which
the file does not show.

Rule 1: the pages are read before the virtual servers are asked for. So a change after both shows in the next pages.
Rule 2: only names of IPv4 count. One of IPv6 is cut off, and may then be that of a virtual server of IPv4.
Rule 3: pages count only if that reading came to its end. Otherwise the next one spares no question.
"""

import pathlib
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import NamedTuple

from ipvsproxy.kernel.ipvs import listing as ipvs_listing
from ipvsproxy.model.net import Family
from ipvsproxy.model.virtual_servers import VirtualServerKey

MOST_VIRTUAL_SERVERS = 12_000
"""The largest table whose pages are read. The kernel walks its table from the beginning for each page: on the test kernel,
virtual servers of one real server take 2 µs each if there are 10,000, 5 if there are 20,000, and 60 if there are 50,000. A
question takes 20.
"""
QUESTIONS_PER_PAGE = 8
"""So many questions take the time of a page on a busy test kernel, 4 on a quiet one."""
_PAGE, _VIRTUAL_SERVER, _REAL_SERVER = 4096, 30, 56
"""The bytes of a page, and of the usual lines for IPv4."""


def are_cheaper(virtual_servers: int, real_servers: int) -> bool:
    """Whether the pages of a table of this size are read sooner than all of its virtual servers are asked for."""
    pages = (virtual_servers * _VIRTUAL_SERVER + real_servers * _REAL_SERVER) / _PAGE
    return virtual_servers <= MOST_VIRTUAL_SERVERS and pages * QUESTIONS_PER_PAGE < virtual_servers


class _Known(NamedTuple):
    """A reading: the virtual servers of each page, by a hash of its text; and the name of each, by a hash without connections."""

    pages: dict[int, Mapping[int, bytes]]
    names: dict[int, bytes]


class PageReader:
    """Reads the pages of the file ``path``, again and again. ``name_of`` names virtual servers."""

    def __init__(self, path: pathlib.Path, name_of: Callable[[VirtualServerKey], bytes]) -> None:
        self._path = path
        self._name_of = name_of
        self._known = _Known({}, {})
        """The last reading, if it came to its end."""
        self._now = _Known({}, {})
        """The reading under way."""

    def read(self) -> Iterator[Collection[bytes]]:
        """The names of the virtual servers of each page that are printed as before. An unreadable file has no pages."""
        before, self._known, self._now = self._known, _Known({}, {}), _Known({}, {})
        try:
            for text in ipvs_listing.pieces(self._path):
                yield self._spared(text, before)
        except (OSError, ValueError):
            return

    def _spared(self, text: bytes, before: _Known) -> Collection[bytes]:
        """Most pages are wholly as before. In others, connections have changed, or something has moved from page to page."""
        whole = hash(text)
        page = before.pages.get(whole)
        if page is None:
            page = dict(self._named(text, before.names))
            spared = [name for lasting, name in page.items() if lasting in before.names]
        else:
            spared = list(page.values())
        self._now.pages[whole] = page
        self._now.names.update(page)
        return spared

    def _named(self, text: bytes, known: Mapping[int, bytes]) -> Iterator[tuple[int, bytes]]:
        for block in ipvs_listing.blocks(text):
            lasting = hash(ipvs_listing.without_connections(block))
            if (name := known.get(lasting)) is not None:
                yield lasting, name
            elif (heading := ipvs_listing.heading(block)) is not None and heading.key.address.family is Family.IPV4:
                yield lasting, self._name_of(heading.key)

    def keep(self) -> None:
        """The reading came to its end: all virtual servers that it did not spare were asked for."""
        self._known, self._now = self._now, _Known({}, {})

    def forget(self) -> None:
        """Spare nothing in the next reading."""
        self._known, self._now = _Known({}, {}), _Known({}, {})
