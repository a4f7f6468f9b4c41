"""The ipsets of the fake kernel."""

import dataclasses
import errno
import os

from ipvsproxy.model.net import Family
from ipvsproxy.model.plan import Verb
from ipvsproxy.model.sets import IpSet, MarkedEntry, SetEntry, SetType

SET_BUSY = 4100
"""IPSET_ERR_BUSY: a rule uses the set."""
INVALID_PREFIX = 4104
"""IPSET_ERR_INVALID_CIDR: the prefix length of an entry is 0, or longer than an address."""


class Refusal(Exception):  # noqa: N818 - an answer of the kernel, not an error of a test
    """Raised when the kernel refuses an operation."""

    def __init__(self, number: int, detail: str = "") -> None:
        super().__init__(detail or os.strerror(number))
        self.number = number


@dataclasses.dataclass(slots=True)
class KernelSet:
    """An ipset: its type, its family (which has no meaning for a bitmap), and its entries."""

    type: SetType
    family: Family
    entries: set[SetEntry] = dataclasses.field(default_factory=set)

    def differs_from(self, ip_set: IpSet) -> bool:
        """Whether the parameters of this set differ from the parameters that ipvsproxy gives to the set with this name.

        If the parameters differ, the entries of the set are ignored.
        """
        return self.type is not ip_set.type or (self.type is not SetType.PORT and self.family is not ip_set.family)


def change_set(sets: dict[str, KernelSet], verb: Verb, item: IpSet, *, referenced: bool) -> bool:
    """Create or remove a set; return True if a set to create already exists, or a set to remove is absent.

    Raises Refusal.
    """
    there = sets.get(item.name)
    if verb is Verb.REMOVE:
        if referenced:
            raise Refusal(SET_BUSY, "a rule refers to the set")
        sets.pop(item.name, None)
        return there is None
    if there is None:
        sets[item.name] = KernelSet(item.type, item.family)
    elif there.differs_from(item):
        raise Refusal(errno.EEXIST, f"there is a set of this name with type {there.type}")
    return there is not None


def change_entry(sets: dict[str, KernelSet], verb: Verb, item: SetEntry) -> bool:
    """Add or remove an entry; return True if the set itself is absent. Raises Refusal.

    Entries are sent to the kernel in bulk, and the kernel does not report which entries already existed.
    """
    held = sets.get(item.set)
    if isinstance(item, MarkedEntry) and held is not None:  # the kernel's key of an entry does not include the mark
        place = (item.address, item.protocol, item.port)
        held.entries -= {one for one in held.entries if (one.address, one.protocol, one.port) == place}
    if verb is Verb.REMOVE:
        if held is not None:
            held.entries.discard(item)
        return held is None
    if held is None:
        raise Refusal(errno.ENOENT, "the set does not exist")
    _check_entry(item, held)
    held.entries.add(item)
    return False


def _check_entry(entry: SetEntry, held: KernelSet) -> None:
    """Raise Refusal unless an entry has exactly the fields of its set's type, in the set's family."""
    required = {
        SetType.ADDRESS: (True, False, False),
        SetType.ADDRESS_PORT: (True, True, False),
        SetType.ADDRESS_PORT_ADDRESS: (True, True, True),
        SetType.ADDRESS_PORT_NETWORK: (True, True, True),
        SetType.PORT: (False, False, False),
    }[held.type]
    if (entry.address is not None, entry.protocol is not None, entry.other is not None) != required:
        raise Refusal(errno.EINVAL, f"not an entry of type {held.type}")
    if any(address is not None and address.family is not held.family for address in (entry.address, entry.other)):
        raise Refusal(errno.EINVAL, f"the set is for {held.family.label}")
    if not 0 <= entry.port < 1 << 16:
        raise Refusal(errno.EINVAL, "not a port")
    if held.type is SetType.ADDRESS_PORT_NETWORK and not 0 < entry.prefix_length <= held.family.bits:
        raise Refusal(INVALID_PREFIX, "not a prefix length that a set can hold")
