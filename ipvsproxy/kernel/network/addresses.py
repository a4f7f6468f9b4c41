"""The address driver: manages the dummy device and its service addresses, and reads the addresses of all other interfaces."""

import errno
import functools
import itertools
import struct
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, NamedTuple, cast

from pyroute2.netlink import NETLINK_ROUTE
from pyroute2.netlink.rtnl import RTM_DELADDR, RTM_DELLINK, RTM_GETADDR, RTM_GETLINK, RTM_NEWADDR, RTM_NEWLINK
from pyroute2.netlink.rtnl.ifaddrmsg import ifaddrmsg
from pyroute2.netlink.rtnl.ifinfmsg import ifinfmsg

from ipvsproxy.kernel.base import message, netlink
from ipvsproxy.kernel.base.errors import KernelError, Tolerated
from ipvsproxy.model.kernel import DEVICE, Device, InterfaceAddress
from ipvsproxy.model.net import Address, Family
from ipvsproxy.model.plan import Operation, Outcome, Verb, one_by_one, outcomes

BATCH_SIZE = 200
"""The number of addresses in one ``send``.

For each change of an address, the kernel walks all addresses of the device while it holds the lock that guards all network
configuration.
"""
MANY_REMOVALS = 500
"""If at least this many addresses are to be removed, the device itself is removed with all its addresses, and then created again.

Removing one IPv6 address takes milliseconds, and removing 10,000 addresses takes half a minute. Removing the device with all
addresses takes 0.3 s.
"""
KIND = "dummy"
"""The kind of the device that carries the service addresses."""

_LINK_HEADER, _ADDRESS_HEADER = 16, 8
_LINK_NAME, _LINK_INFO, _LINK_KIND = 3, 18, 1
_IFA_ADDRESS, _IFA_LOCAL = 1, 2
_SKIP_STATISTICS = 8  # RTEXT_FILTER_SKIP_STATS
_LINK = struct.Struct("=4xi")
_ADDRESS = struct.Struct("=BBxxI")
_SIZES: Mapping[int, int] = {family: family.bits // 8 for family in Family}
_pack_index = struct.Struct("=I").pack


_EXPECTED: Mapping[Verb, Collection[int]] = {
    Verb.ADD: (errno.EEXIST,),
    Verb.REMOVE: (errno.EADDRNOTAVAIL, errno.ENXIO, errno.ENODEV),
}
"""The error numbers that mean that an address to add is already present, or that an address to remove is already gone."""


class ObservedAddresses(NamedTuple):
    """Whether our device exists, the addresses on our device, and the addresses on all other interfaces, including loopback."""

    device: bool
    addresses: AbstractSet[Address]
    interface_addresses: tuple[InterfaceAddress, ...]


class _Link(NamedTuple):
    number: int
    name: str
    kind: str


class AddressDriver:
    """Reads and writes addresses in the network namespace of the thread that creates this object.

    Only the thread that creates this object may use it.

    The dummy device is never brought up, because a device loses its IPv6 addresses when it goes down. The addresses of the device
    are local to this host even while the device is down.
    """

    def __init__(self, connect: Callable[[int], netlink.Socket] = netlink.open_socket, device: str = DEVICE) -> None:
        self._device = device
        self._channel = netlink.Channel(NETLINK_ROUTE, connect)
        self._template = functools.cache(_address_template)
        self._digest = b""
        """The digest of the last reading by ``observe_changed``; empty if the next call must return everything."""

    def close(self) -> None:
        """Close the socket."""
        self._channel.close()

    def observe(self) -> ObservedAddresses:
        """Read all addresses of this host with one dump of addresses and one dump of interfaces.

        Raises:
            KernelError: a dump failed, or an interface that is not a dummy has the device's name.
        """
        self._digest = b""  # the next call of ``observe_changed`` must return all addresses
        return self._read(*self._dump())

    def observe_changed(self) -> ObservedAddresses | None:
        """Reads all addresses; None means that no address has changed since the last call of this method.

        After a call of ``observe`` or ``apply``, all addresses count as changed.

        Raises:
            KernelError: a dump failed, or an interface that is not a dummy has the device's name.
        """
        replies, links = self._dump()
        digest = netlink.digest(replies, beside=sorted(links.values()))
        if digest == self._digest:
            return None
        observed = self._read(replies, links)
        self._digest = digest
        return observed

    def _dump(self) -> tuple[list[netlink.Reply], dict[int, _Link]]:
        # Addresses are dumped before interfaces. If an interface is removed between the two dumps, its addresses are left out. An
        # interface that is added between the two dumps had no addresses during the first dump.
        query = message.encode(ifaddrmsg(), RTM_GETADDR, netlink.REQUEST | netlink.DUMP)
        replies = self._channel.dump(query, "list the addresses")
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
                attributes = message.attributes(data, start + _ADDRESS_HEADER, end)
                at = attributes.get(_IFA_LOCAL) or attributes.get(_IFA_ADDRESS)
                if at is None or index not in links or at[1] - at[0] != _SIZES.get(family):
                    continue
                address = Address(data[at[0] : at[1]])
                if own is not None and index == own.number:
                    ours[address] = None
                else:
                    others.append(InterfaceAddress(links[index].name, address, prefix_length))
        return ObservedAddresses(own is not None, ours.keys(), tuple(others))

    def apply(self, operations: Sequence[Operation]) -> list[Outcome]:
        """Add and remove the dummy device and its addresses, in the given order. Repeating an operation causes no error.

        The outcomes have the same order as the operations.
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
                number = self._channel.do(_link_message(RTM_DELLINK, self._device, 0)) if present else errno.ENODEV
                expected = errno.ENODEV
            else:
                creation = _link_message(RTM_NEWLINK, self._device, netlink.CREATE | netlink.EXCLUSIVE)
                number = errno.EEXIST if present else self._channel.do(creation)
                expected = errno.EEXIST
        except KernelError as error:
            return Outcome(operation, f"{operation}: {error.detail}", error.errno)
        is_unknown = number == errno.EOPNOTSUPP
        reason = "this kernel has no dummy devices: the module dummy is missing or cannot be loaded" if is_unknown else ""
        return netlink.outcome(operation, number, (expected,), reason)

    def _apply_addresses(self, operations: Sequence[Operation]) -> Mapping[Operation, Outcome]:
        """Add and remove addresses.

        Returns the outcomes of operations that failed, or whose address was unexpectedly present or absent.
        """
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
        index = _pack_index(link.number)
        failed = self._channel.run_all([self._encode(one, index) for one in operations], BATCH_SIZE)
        return {
            one: netlink.outcome(one, number, _EXPECTED[one.verb])
            for place, number in failed.items()
            for one in [operations[place]]
        }

    def _empty_device(self, operations: Sequence[Operation], observed: AbstractSet[Address]) -> Mapping[Operation, Outcome]:
        """Remove all addresses of the device; ``observed`` are the present addresses of the device.

        Returns the same outcomes as if ``_apply_addresses`` had removed the addresses one by one.
        """
        device = Device(self._device)
        for verb in (Verb.REMOVE, Verb.ADD):
            outcome = self._apply_device(Operation(verb, device))
            if outcome.error:  # at the next attempt, either the addresses are removed one by one, or the device is gone
                return {operation: Outcome(operation, outcome.error, outcome.errno) for operation in operations}
        absent = (operation for operation in operations if operation.item.key not in observed)
        return {operation: Outcome(operation, surprise=True) for operation in absent}

    def _encode(self, operation: Operation, index: bytes) -> bytes:
        address = cast("Address", operation.item.key)
        return self._template(operation.verb, len(address))((index, address, address))

    def _find(self) -> _Link | None:
        with Tolerated(errno.ENODEV):
            link = _parse_link(self._channel.ask(_link_message(RTM_GETLINK, self._device, 0), f"find {self._device}"))
            self._require_dummy(link)
            return link
        return None

    def _links(self) -> list[_Link]:
        query = ifinfmsg()
        query["attrs"] = [["IFLA_EXT_MASK", _SKIP_STATISTICS]]
        request = message.encode(query, RTM_GETLINK, netlink.REQUEST | netlink.DUMP)
        return [_parse_link(reply) for reply in self._channel.dump(request, "list the interfaces")]

    def _require_dummy(self, link: _Link) -> None:
        if link.kind != KIND:
            what = f"a {link.kind} device" if link.kind else "a device of another kind"
            detail = f"{link.name} is {what}, not a {KIND}: remove or rename it"
            raise KernelError(action=f"find {link.name}", errno=errno.EEXIST, detail=detail)


def _parse_link(reply: netlink.Reply) -> _Link:
    data, start, end = reply
    with netlink.parsing("read an interface"):
        (number,) = _LINK.unpack_from(data, start)
    found = message.Attributes(data, start + _LINK_HEADER, end)
    return _Link(number, found.text(_LINK_NAME, ""), found.inside(_LINK_INFO).text(_LINK_KIND, ""))


def _link_message(command: int, name: str, flags: int) -> bytes:
    link = ifinfmsg()
    attributes: list[Any] = [["IFLA_IFNAME", name]]
    if command == RTM_NEWLINK:
        attributes.append(["IFLA_LINKINFO", {"attrs": [["IFLA_INFO_KIND", KIND]]}])
    link["attrs"] = attributes
    return message.encode(link, command, netlink.REQUEST | flags)


def _address_template(verb: Verb, size: int) -> message.Encode:
    """The template of a message about an address of ``size`` bytes.

    Both address attributes of the message contain the address, and the message has no flags, label or scope, as in kube-proxy.
    """
    family = next(family for family in Family if _SIZES[family] == size)

    def build(index: int, local: str, address: str) -> bytes:
        request = ifaddrmsg()
        request["family"] = int(family)
        request["prefixlen"] = family.bits
        request["index"] = index
        request["attrs"] = [["IFA_LOCAL", local], ["IFA_ADDRESS", address]]
        if verb is Verb.REMOVE:
            return message.encode(request, RTM_DELADDR, netlink.REQUEST)
        return message.encode(request, RTM_NEWADDR, netlink.REQUEST | netlink.CREATE | netlink.EXCLUSIVE)

    return message.template(
        build, {"index": (0, 0xFFFFFFFF), "local": message.ADDRESSES[family], "address": message.ADDRESSES[family]}
    )
