"""Addresses that this host lost a moment ago, on which node ports are still served.

Rule 1: most lost addresses come back: ``netplan apply``, a DHCP client or keepalived remove an address for a moment. Removing its
virtual servers would end their connections (``expire_nodest_conn``), so they stay for a grace period.
Rule 2: only a successful reading without the address ends its grace period.
"""

import dataclasses
from collections.abc import Collection, Iterable, Mapping

from ipvsproxy.model.net import Address

GRACE_S = 8.0
"""The grace period: node ports outlive their address for so long. A DHCP client takes some seconds to restart."""


@dataclasses.dataclass(frozen=True, slots=True)
class Lingering:
    """``present`` are the addresses of the last reading; ``until_s`` has the end of the grace period of each lost address."""

    present: frozenset[Address] = frozenset()
    until_s: Mapping[Address, float] = dataclasses.field(default_factory=dict)

    @property
    def addresses(self) -> Collection[Address]:
        """The lost addresses in their grace period."""
        return self.until_s.keys()

    @property
    def next_s(self) -> float | None:
        """When the first grace period ends; None without one."""
        return min(self.until_s.values(), default=None)

    def is_due(self, now: float) -> bool:
        """Whether a grace period has ended, so that the addresses must be read."""
        return any(until_s <= now for until_s in self.until_s.values())

    def after(self, addresses: Iterable[Address], now: float) -> "Lingering":
        """The next value, after a reading with exactly these addresses."""
        present = frozenset(addresses)
        staying = {one: until_s for one, until_s in self.until_s.items() if one not in present and now < until_s}
        return Lingering(present, staying | dict.fromkeys(sorted(self.present - present), now + GRACE_S))

    def postponed(self, now: float) -> "Lingering":
        """The next value, after a reading that failed: each grace period begins anew."""
        return Lingering(self.present, dict.fromkeys(self.until_s, now + GRACE_S))
