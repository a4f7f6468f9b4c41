"""Owners of kernel objects: Services, and the node itself."""

import msgspec

from ipvsproxy.model.service import ServiceName

REMEMBERED_S = 2.0**40
"""Seconds since the epoch, later than the creation of any Service. A float of this size still has parts of a millisecond."""


class Owner(msgspec.Struct, frozen=True, order=True, gc=False):
    """The Service, or the node, that desires a kernel object. The order of owners is that of their Services' creation.

    If several owners of one rank desire one key, the lowest owner gets it. A remembered Service is one that the newest list lacks
    while this list is doubted. It comes after all listed Services: its ``created_s`` is larger by ``REMEMBERED_S``. A field
    for this would take memory.
    """

    created_s: float
    service: ServiceName

    @property
    def is_remembered(self) -> bool:
        """Whether the Service is only remembered: the newest list lacks it."""
        return self.created_s >= REMEMBERED_S

    @property
    def remembered(self) -> "Owner":
        """The same owner while the newest list lacks the Service."""
        return Owner(self.created_s + REMEMBERED_S, self.service)

    def __str__(self) -> str:
        return str(self.service) if self.service.namespace else self.service.name


NODE_OWNER = Owner(-1, ServiceName("", "(node)"))
"""The owner of objects that the node needs with any Services: device, sets, rules, settings."""
