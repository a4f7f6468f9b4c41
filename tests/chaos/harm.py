"""Harm: drift that the program may miss, because it is stopped or reads other parts of the kernel when the drift happens."""

import enum
from typing import NamedTuple

from tests.chaos import drift
from tests.support import patience

STOPPED_S = patience.seconds(35.0)
"""The time for which the program is stopped. This time is longer than a sync period, so the next reading of the kernel is an
audit."""


class When(enum.Enum):
    """The moments."""

    STOPPED = "while the program is stopped"
    FIRST_IPV6 = "before the first IPv6 Service is added"
    LAST_IPV6 = "before the last IPv6 Service is deleted"


class Harm(NamedTuple):
    """A kind of drift, and the moment at which a test causes the drift."""

    when: When
    drift: drift.Drift


HARMS = (
    Harm(When.STOPPED, drift.clear_ipvs),
    Harm(When.FIRST_IPV6, drift.remove_virtual_server),
    Harm(When.STOPPED, drift.flush_all_sets),
    Harm(When.LAST_IPV6, drift.remove_virtual_server),
    Harm(When.STOPPED, drift.remove_address),
    Harm(When.FIRST_IPV6, drift.clear_ipvs),
    Harm(When.STOPPED, drift.remove_ipv6_servers),
    Harm(When.LAST_IPV6, drift.clear_ipvs),
)
