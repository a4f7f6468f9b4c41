"""The address driver: the dummy device with the service addresses on it, and the addresses of all other interfaces."""

import errno
import itertools
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import NamedTuple

from ipvsproxy.kernel.base import message, netlink
from ipvsproxy.kernel.base.errors import KernelError
from ipvsproxy.model.kernel import DEVICE, BoundAddresses, Device, InterfaceAddress
from ipvsproxy.model.net import Address, Family
from ipvsproxy.model.plan import Operation, Outcome, Verb, one_by_one, outcomes

BATCH_SIZE = 200
"""The number of addresses in one ``send``.

For each change the kernel walks all addresses of the device while it holds the lock of all network configuration.
"""
MANY_REMOVALS = 500
"""From so many on, all addresses of the device are removed with the device itself, which is then made anew.

One by one, each IPv6 address takes milliseconds: 10,000 take half a minute, the device 0.3 s.
"""
KIND = "dummy"
"""The kind of the device that carries the service addresses."""

_NEW_LINK, _REMOVE_LINK, _GET_LINK, _NEW_ADDRESS, _REMOVE_ADDRESS, _GET_ADDRESS = 16, 17, 18, 20, 21, 22
"""Types of messages (RTM_*)."""
IFLA_IFNAME, IFLA_LINKINFO, IFLA_INFO_KIND, IFLA_EXT_MASK = 3, 18, 1, 29
IFA_ADDRESS, IFA_LOCAL = 1, 2
_SKIP_STATISTICS = 8  # RTEXT_FILTER_SKIP_STATS
_LINK = struct.Struct("=4xi8x")  # ifinfomsg: index
_ADDRESS = struct.Struct("=BBxxI")  # ifaddrmsg: family, prefix length, index
_SIZES: Mapping[int, int] = {family: family.bits // 8 for family in Family}


class ObservedAddresses(NamedTuple):
    """Whether the device is there, the addresses on it, and those of every other interface, loopback included."""

    device: bool
    addresses: AbstractSet[Address]
    others: tuple[InterfaceAddress, ...]


class _Link(NamedTuple):
    number: int
    name: str
    kind: str


class AddressDriver:
    """Reads and writes addresses in the network namespace of the thread that makes this object. Only that thread may use it.

    The device stays down: its addresses are local even so, and a device that goes down loses its IPv6 addresses.
    """

    def __init__(self, connect: Callable[[int], netlink.Socket] = netlink.open_socket, device: str = DEVICE) -> None:
        self._device = device
        self._channel = netlink.Channel(netlink.ROUTE, connect)
        self._digest = b""
        """The digest of the last reading by ``observe_changed``; empty if the next one must return everything."""

    def close(self) -> None:
        """Close the socket."""
        self._channel.close()

    def observe(self) -> ObservedAddresses:
        """Read all addresses of this host, by one dump of addresses and one of interfaces.

        Raises:
            KernelError: a dump failed, or an interface that is not a dummy has the device's name.
        """
        self._digest = b""  # the next ``observe_changed`` must return everything
        return self._read(*self._dump())

    def observe_changed(self) -> ObservedAddresses | None:
        """As ``observe``, but None if nothing has changed since the last call, and nothing was written or observed meanwhile.

        Raises:
            KernelError: as for ``observe``.
        """
        replies, links = self._dump()
        digest = netlink.digest(replies, beside=sorted(links.values()))
        if digest == self._digest:
            return None
        observed = self._read(replies, links)
        self._digest = digest
        return observed

    def _dump(self) -> tuple[list[netlink.Reply], dict[int, _Link]]:
        # Addresses first: an interface that vanishes in between takes its addresses along, and a new one had none yet.
        replies = self._channel.dump(_ADDRESS_QUERY, "list the addresses")
        return replies, {link.number: link for link in self._links()}

    def _read(self, replies: Iterable[netlink.Reply], links: Mapping[int, _Link]) -> ObservedAddresses:
        own = next((link for link in links.values() if link.name == self._device), None)
        if own is not None:
            self._require_dummy(own)
        ours: dict[Address, None] = {}
        others: list[InterfaceAddress] = []
        with netlink.parsing("list the addresses"):
            for data, start, end in replies:
                family, prefix_length, index = _ADDRESS.unpack_from(data, start)
                attributes = message.attributes(data, start + _ADDRESS.size, end)
                at = attributes.get(IFA_LOCAL) or attributes.get(IFA_ADDRESS)
                if at is None or index not in links or at[1] - at[0] != _SIZES.get(family):
                    continue
                address = Address(data[at[0] : at[1]])
                if own is not None and index == own.number:
                    ours[address] = None
                else:
                    others.append(InterfaceAddress(links[index].name, address, prefix_length))
        return ObservedAddresses(own is not None, ours.keys(), tuple(others))

    def apply(self, operations: Sequence[Operation]) -> list[Outcome]:
        """Add and remove the device and its addresses, in the given order. Repeating an operation is no error.

        Outcomes have the order of the operations.
        """
        self._digest = b""
        results: list[Outcome] = []
        for is_device, group in itertools.groupby(operations, lambda operation: isinstance(operation.item, Device)):
            run = list(group)
            if is_device:
                results += map(self._apply_device, run)
            else:
                results += outcomes(run, self._apply_addresses(list(one_by_one(run))))
        return results

    def _apply_device(self, operation: Operation) -> Outcome:
        try:
            present = self._find() is not None
            if operation.verb is Verb.REMOVE:
                number = self._channel.do(_link_message(_REMOVE_LINK, self._device, 0)) if present else errno.ENODEV
                expected = errno.ENODEV
            else:
                creation = _link_message(_NEW_LINK, self._device, netlink.CREATE | netlink.EXCLUSIVE)
                number = errno.EEXIST if present else self._channel.do(creation)
                expected = errno.EEXIST
        except KernelError as error:
            return Outcome(operation, f"{operation}: {error.detail}", error.errno)
        if number in (0, expected):
            return Outcome(operation, surprise=number == expected)
        reason = netlink.explain(number)
        if number == errno.EOPNOTSUPP:
            reason = "this kernel has no dummy devices: the module dummy is missing or cannot be loaded"
        return Outcome(operation, f"{operation}: {reason}", max(number, 0))

    def _apply_addresses(self, operations: Sequence[Operation]) -> Mapping[Operation, Outcome]:
        """Add and remove addresses. Returns the outcomes of operations that failed or were a surprise."""
        try:
            link = self._find()
            failure = KernelError(action="", errno=errno.ENODEV, detail=f"the device {self._device} is missing")
        except KernelError as error:
            link, failure = None, error
        if link is None:
            return {
                operation: Outcome(operation, surprise=True)
                if operation.verb is Verb.REMOVE and failure.errno == errno.ENODEV
                else Outcome(operation, f"{operation}: {failure.detail}", failure.errno)
                for operation in operations
            }
        if len(operations) >= MANY_REMOVALS and all(operation.verb is Verb.REMOVE for operation in operations):
            observed = self._read(*self._dump()).addresses
            if observed <= {operation.item.key for operation in operations}:
                return self._empty_device(operations, observed)
        reported: dict[Operation, Outcome] = {}
        step = min(BATCH_SIZE, self._channel.limit)
        for first in range(0, len(operations), step):
            chunk = operations[first : first + step]
            for place, number in self._channel.run(self._encode(chunk, link.number)).items():
                reported[chunk[place]] = _outcome(chunk[place], number)
        return reported

    def _empty_device(self, operations: Sequence[Operation], observed: AbstractSet[Address]) -> Mapping[Operation, Outcome]:
        """Remove all addresses of the device. Returns as ``_apply_addresses``; ``observed`` are those that the device has."""
        device = Device(self._device)
        for verb in (Verb.REMOVE, Verb.ADD):
            outcome = self._apply_device(Operation(verb, device))
            if outcome.error:  # repeated one by one, or found missing with the device
                return {operation: Outcome(operation, outcome.error, outcome.errno) for operation in operations}
        absent = (operation for operation in operations if operation.item.key not in observed)
        return {operation: Outcome(operation, surprise=True) for operation in absent}

    def _encode(self, chunk: Sequence[Operation], index: int) -> list[bytes]:
        messages: list[bytes] = []
        for (verb, item), sequence in zip(chunk, self._channel.reserve(len(chunk)), strict=True):
            if not isinstance(item, BoundAddresses):
                raise TypeError(f"not a device or an address: {item}")
            messages.append(_address_message(verb, item.key, index, sequence))
        return messages

    def _find(self) -> _Link | None:
        try:
            reply = self._channel.ask(_link_message(_GET_LINK, self._device, 0), f"find {self._device}")
        except KernelError as error:
            if error.errno == errno.ENODEV:
                return None
            raise
        link = _parse_link(reply)
        self._require_dummy(link)
        return link

    def _links(self) -> list[_Link]:
        mask = message.attribute(IFLA_EXT_MASK, struct.pack("=I", _SKIP_STATISTICS))
        request = message.whole(_GET_LINK, netlink.REQUEST | netlink.DUMP, _LINK.pack(0) + mask)
        return [_parse_link(reply) for reply in self._channel.dump(request, "list the interfaces")]

    def _require_dummy(self, link: _Link) -> None:
        if link.kind != KIND:
            what = f"a {link.kind} device" if link.kind else "a device of another kind"
            detail = f"{link.name} is {what}, not a {KIND}: remove or rename it"
            raise KernelError(action=f"find {link.name}", errno=errno.EEXIST, detail=detail)


def _outcome(operation: Operation, number: int) -> Outcome:
    if operation.verb is Verb.REMOVE:
        surprise = number in (errno.EADDRNOTAVAIL, errno.ENXIO, errno.ENODEV)
    else:
        surprise = number == errno.EEXIST
    if surprise:
        return Outcome(operation, surprise=True)
    return Outcome(operation, f"{operation}: {netlink.explain(number)}", max(number, 0))


def _parse_link(reply: netlink.Reply) -> _Link:
    data, start, end = reply
    with netlink.parsing("read an interface"):
        (number,) = _LINK.unpack_from(data, start)
    found = message.Attributes(data, start + _LINK.size, end)
    return _Link(number, found.text(IFLA_IFNAME, ""), found.inside(IFLA_LINKINFO).text(IFLA_INFO_KIND, ""))


def _link_message(command: int, name: str, flags: int) -> bytes:
    attributes = message.string(IFLA_IFNAME, name)
    if command == _NEW_LINK:
        attributes += message.attribute(IFLA_LINKINFO, message.string(IFLA_INFO_KIND, KIND))
    return message.whole(command, netlink.REQUEST | flags, _LINK.pack(0) + attributes)


_ADDRESS_QUERY = message.whole(_GET_ADDRESS, netlink.REQUEST | netlink.DUMP, bytes(_ADDRESS.size))


def _address_message(verb: Verb, address: Address, index: int, sequence: int) -> bytes:
    """A message about an address. As in kube-proxy, both attributes hold it; no flags, label or scope."""
    family = address.family
    payload = _ADDRESS.pack(family, family.bits, index) + b"".join(
        message.attribute(one, address) for one in (IFA_LOCAL, IFA_ADDRESS)
    )
    if verb is Verb.REMOVE:
        return message.whole(_REMOVE_ADDRESS, netlink.REQUEST, payload, sequence)
    return message.whole(_NEW_ADDRESS, netlink.REQUEST | netlink.CREATE | netlink.EXCLUSIVE, payload, sequence)
