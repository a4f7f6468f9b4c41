"""What objects of several kinds have in common: how addresses, networks and times are read, and how skipped parts are told.

What reads a list of values takes the field's name and appends a ``Skipped`` for each that is wrong: it costs itself only.
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
"""So many ports of an object are looked up as a whole, as most objects have the ports of others; more would fill the caches."""
MOST_SKIPPED = 20
"""How many unusable parts of one object are told one by one: a log has other readers too."""

_SHOWN = 64
"""How much of a bad value is repeated in a reason, in characters: reasons end in log lines."""
_LONGEST_TIME = 35
"""Of a time as the API writes it, to the nanosecond. An annotation may hold any text: longer ones would fill the cache."""

T = TypeVar("T")


def addresses(field: str, texts: Iterable[str], skipped: list[Skipped]) -> tuple[Address, ...]:
    """Each address once, in order; blank texts are passed over, as the API allows them."""
    return _parsed(field, texts, parse_address, skipped)


def networks(field: str, texts: Iterable[str], skipped: list[Skipped]) -> tuple[Network, ...]:
    """As ``addresses``, for CIDR ranges."""
    return _parsed(field, texts, parse_network, skipped)


def _parsed(field: str, texts: Iterable[str], read: Callable[[str], T], skipped: list[Skipped]) -> tuple[T, ...]:
    found: dict[T, None] = {}
    for text in texts:
        bare = text.strip()
        if bare:
            try:
                found[read(bare)] = None
            except ValueError as error:
                skipped.append(Skipped(field, str(error)))
    return tuple(found)


def shown(text: str | None) -> str:
    """A bad value as a reason repeats it: in quotation marks, and cut where it is long."""
    return repr(str(text)[:_SHOWN])


def told(skipped: list[Skipped]) -> tuple[Skipped, ...]:
    """The first ``MOST_SKIPPED`` one by one, and one more for the others: their number, and invalid if one of them is."""
    rest = skipped[MOST_SKIPPED:]
    if not rest:
        return tuple(skipped)
    more = Skipped(rest[0].field, f"{rest[0].reason}; {len(rest)} such parts from here on", any(one.invalid for one in rest))
    return (*skipped[:MOST_SKIPPED], more)


def seconds(text: str | None) -> float:
    """An RFC 3339 time as seconds since the epoch; 0 where there is none, none that can be read, or an earlier one."""
    if not text:
        return 0
    return _shared_seconds(text) if len(text) <= _LONGEST_TIME else _read_seconds(text)


@functools.lru_cache(maxsize=1024)
def _shared_seconds(text: str) -> float:
    """One number for all that was made, or began, in the same second."""
    return _read_seconds(text)


def _read_seconds(text: str) -> float:
    try:
        return max(0, dt.datetime.fromisoformat(text).timestamp())
    except ValueError:
        return 0
