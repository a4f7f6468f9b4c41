"""Addresses that this host has lost a moment ago, on which node ports are still served.

Rule 1: most addresses that go come back: ``netplan apply``, a DHCP client or a keepalived take them away for a moment. A virtual
server that went with its address would take its connections with it (``expire_nodest_conn``), so it stays for a grace.
Rule 2: an address is only given up by somebody who has just seen that it is not there.
"""

import dataclasses
from collections.abc import Collection, Iterable, Mapping

from ipvsproxy.model.net import Address

GRACE_S = 8.0
"""How long node ports outlive their address: a DHCP client that is restarted takes some seconds."""


@dataclasses.dataclass(frozen=True, slots=True)
class Lingering:
    """``present`` are the addresses that were seen last, ``until_s`` tells for others how long they are still counted."""

    present: frozenset[Address] = frozenset()
    until_s: Mapping[Address, float] = dataclasses.field(default_factory=dict)

    @property
    def addresses(self) -> Collection[Address]:
        """Those that are not there now."""
        return self.until_s.keys()

    @property
    def next_s(self) -> float | None:
        """When the first grace ends; None without any."""
        return min(self.until_s.values(), default=None)

    def is_due(self, now: float) -> bool:
        """Whether a grace has ended: then the addresses have to be read."""
        return any(until_s <= now for until_s in self.until_s.values())

    def after(self, addresses: Iterable[Address], now: float) -> "Lingering":
        """What is known when these addresses, and no others, have just been seen."""
        present = frozenset(addresses)
        staying = {one: until_s for one, until_s in self.until_s.items() if one not in present and now < until_s}
        return Lingering(present, staying | dict.fromkeys(sorted(self.present - present), now + GRACE_S))

    def postponed(self, now: float) -> "Lingering":
        """What is known when the addresses could not be read: nothing new, so each has its whole grace again."""
        return Lingering(self.present, dict.fromkeys(self.until_s, now + GRACE_S))
