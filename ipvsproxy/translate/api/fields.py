"""Parsers that several kinds share: addresses, networks and times; and the list of skipped parts of an object.

A parser of a list takes the field's name, and appends a ``Skipped`` for each invalid value. The other values are used.
"""

import datetime as dt
import functools
from collections.abc import Callable, Iterable
from typing import TypeVar

from ipvsproxy.model.net import Address, Network, Protocol, parse_address, parse_network
from ipvsproxy.model.service import Skipped

HIGHEST_PORT = 65535
PROTOCOLS = {protocol.name: protocol for protocol in Protocol}
FEW_PORTS = 8
"""Objects with at most this many ports share them with others by a cache; more ports would fill the cache."""
MOST_SKIPPED = 20
"""The most skipped parts of one object that are reported one by one."""

_SHOWN = 64
"""The most characters of an invalid value that a reason repeats: reasons end in log lines."""
_LONGEST_TIME = 35
"""The most characters of a time, to the nanosecond. An annotation may hold any text, and longer text would fill the cache."""

T = TypeVar("T")


def addresses(field: str, texts: Iterable[str], skipped: list[Skipped]) -> tuple[Address, ...]:
    """Each address once, in order. Blank texts are ignored: the API allows them."""
    return _parsed(field, texts, parse_address, skipped)


def networks(field: str, texts: Iterable[str], skipped: list[Skipped]) -> tuple[Network, ...]:
    """As ``addresses``, for CIDR ranges."""
    return _parsed(field, texts, parse_network, skipped)


def _parsed(field: str, texts: Iterable[str], read: Callable[[str], T], skipped: list[Skipped]) -> tuple[T, ...]:
    values: dict[T, None] = {}
    for text in texts:
        bare = text.strip()
        if bare:
            try:
                values[read(bare)] = None
            except ValueError as error:
                skipped.append(Skipped(field, str(error)))
    return tuple(values)


def shown(text: str | None) -> str:
    """An invalid value as a reason repeats it: in quotation marks, and cut to ``_SHOWN`` characters."""
    return repr(str(text)[:_SHOWN])


def bounded(skipped: list[Skipped]) -> tuple[Skipped, ...]:
    """The first ``MOST_SKIPPED`` skipped parts, and one more for the number of others, invalid if one of these is."""
    rest = skipped[MOST_SKIPPED:]
    if not rest:
        return tuple(skipped)
    more = Skipped(rest[0].field, f"{rest[0].reason}; {len(rest)} such parts from here on", any(one.invalid for one in rest))
    return (*skipped[:MOST_SKIPPED], more)


def seconds(text: str | None) -> float:
    """An RFC 3339 time as seconds since the epoch; 0 if it is absent, unreadable, or before the epoch."""
    if not text:
        return 0
    return _shared_seconds(text) if len(text) <= _LONGEST_TIME else _read_seconds(text)


@functools.lru_cache(maxsize=1024)
def _shared_seconds(text: str) -> float:
    """One object for all equal times."""
    return _read_seconds(text)


def _read_seconds(text: str) -> float:
    try:
        return max(0, dt.datetime.fromisoformat(text).timestamp())
    except ValueError:
        return 0
