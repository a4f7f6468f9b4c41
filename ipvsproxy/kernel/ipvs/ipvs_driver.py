"""The IPVS driver: manages virtual servers, real servers and timeouts, and finds out whether the kernel has a given scheduler.

The kernel loads the module of a scheduler when a virtual server with this scheduler is added, so only an attempt to add a virtual
server shows whether the scheduler exists. The driver attempts to add an invalid virtual server: the kernel looks up the scheduler
before it refuses the virtual server (``ip_vs_add_service`` in net/netfilter/ipvs/ip_vs_ctl.c). Because the kernel refuses the
virtual server, a process that is killed during the attempt leaves no virtual server behind. The attempt uses a virtual server
with an invalid IPv6 prefix length. If IPVS in this kernel has no IPv6, the driver looks for the scheduler in the files of kernel
modules instead.
"""

import errno
import struct
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from ipvsproxy.kernel.base import message, netlink, sockets
from ipvsproxy.kernel.base.errors import KernelError
from ipvsproxy.kernel.base.modules import ModuleState, module_state
from ipvsproxy.kernel.ipvs import ipvs_message
from ipvsproxy.kernel.ipvs import operations as ipvs_operations
from ipvsproxy.kernel.ipvs import readings as ipvs_readings
from ipvsproxy.kernel.ipvs import rows as ipvs_rows
from ipvsproxy.model.kernel import Timeouts
from ipvsproxy.model.net import Family
from ipvsproxy.model.plan import Operation, Outcome, Verb, count_objects, one_by_one
from ipvsproxy.model.real_servers import RealServerKey
from ipvsproxy.model.virtual_servers import (
    NO_CONNECTIONS,
    ConnectionCounts,
    ObservedVirtualServer,
    RealServers,
    VirtualServer,
    VirtualServerKey,
)

_FIND_SCHEDULERS = "find the schedulers of this kernel"

_TIMEOUTS = message.Layout([((kind,), "I") for kind in (4, 5, 6)])


class IpvsDriver:
    """Reads and writes the IPVS table in the network namespace of the thread that creates this object.

    Only the thread that creates this object may use it.

    ``traffic`` reads the counters of IPVS.

    Raises:
        KernelError: the kernel has no IPVS.
    """

    def __init__(
        self,
        connect: Callable[[int], netlink.Socket] = netlink.open_socket,
        ask: ipvs_readings.Ask = sockets.ask_in,
    ) -> None:
        """``ask`` has the same arguments and result as ``sockets.ask_in``."""
        self.traffic = ipvs_rows.TrafficReader(connect, open_connections=self._open_connections)
        self._table = ipvs_rows.NetlinkTable(connect)
        self._channel = self._table.channel
        self._older_interface = ipvs_readings.SockoptReader(self._table.virtual_server, ask)
        by_netlink = frozenset(Family) - ({Family.IPV4} if self._older_interface.is_there() else set())
        netlink_reader = ipvs_readings.NetlinkReader(by_netlink, self._table)
        self._readers: Mapping[Family, ipvs_readings.FamilyReader[Any]] = {
            family: netlink_reader if family in by_netlink else self._older_interface for family in Family
        }

    def close(self) -> None:
        """Close the sockets."""
        self._table.close()
        self._older_interface.close()

    @property
    def foreign(self) -> int:
        """The number of virtual servers that were left out at the last read, because no Service can have their protocol."""
        return sum(reader.foreign for reader in dict.fromkeys(self._readers.values()))

    def observe(self, families: Iterable[Family] = tuple(Family)) -> dict[VirtualServerKey, ObservedVirtualServer]:
        """All virtual servers of the given IP families, by key.

        Raises:
            KernelError: a part of the table could not be read.
        """
        try:
            parts = self.observe_in_parts(families)
            return {key: observed for part in parts for key, observed in part.items() if observed is not None}
        except KernelError:
            for reader in self._readers.values():  # the caller has received nothing, so the next read must return everything
                reader.forget()
            raise

    def observe_in_parts(self, families: Iterable[Family]) -> Iterator[ipvs_readings.Reading]:
        """Reads the whole IPVS table in parts; other methods may be called between two parts.

        If another method writes a virtual server between two parts, the next poll reads the virtual server again. A part has None
        for a virtual server that no longer exists. If the IPVS module has been loaded again, its netlink family has a new number,
        and later operations use this number.

        Raises:
            KernelError: a part of the table could not be read. The parts of the table that were returned before the error are
                valid.
        """
        self._table.renew()
        for reader in self._readers_of(families):
            reader.forget()
            yield from reader.read(whole=True)

    def observe_changed(self, families: Iterable[Family], *, whole: bool) -> Iterator[ipvs_readings.Reading]:
        """Yields, in parts, the virtual servers that changed, or that this driver wrote, since they were last returned.

        If ``whole`` is false, this method misses changed weights, replaced real servers, changes of IPv6 real servers, and this
        driver's own writes.

        Raises:
            KernelError: a part of the table could not be read. The parts of the table that were returned before the error are
                valid.
        """
        for reader in self._readers_of(families):
            yield from reader.read(whole=whole)

    def _readers_of(self, families: Iterable[Family]) -> Iterable[ipvs_readings.FamilyReader[Any]]:
        return dict.fromkeys(self._readers[family] for family in families if family in self._readers)

    def _note(self, key: VirtualServerKey, *, is_there: bool) -> None:
        """Record that a virtual server was written, so that it is read again next time."""
        self._readers[key.address.family].note(key, is_there=is_there)

    def refusal_with(self, scheduler: str) -> int:
        """The error number with which the kernel refuses an invalid virtual server with the given scheduler.

        The kernel looks up the scheduler before it refuses the virtual server. ENOENT means that the scheduler does not exist.
        EINVAL means that the scheduler exists, and that its module is loaded now. A number other than ENOENT and EINVAL means
        that the kernel did not look up the scheduler.

        Raises:
            KernelError: the kernel did not answer.
        """
        number = self._channel.do(self._table.encoder.unacceptable_service(scheduler))
        if number == errno.ENOENT:  # the kernel also answers ENOENT if the IPVS module was loaded again
            self._table.renew()
            number = self._channel.do(self._table.encoder.unacceptable_service(scheduler))
        return number

    def why_unusable(self, scheduler: str) -> str:
        """The reason, in one readable line, why no virtual server can use the scheduler; empty if the scheduler is usable.

        Raises:
            KernelError: the kernel did not look up the scheduler.
        """
        missing = ipvs_operations.describe_missing(scheduler)
        if len(scheduler) > ipvs_message.SCHEDULER_NAME_LIMIT:
            return missing
        match self.refusal_with(scheduler):
            case errno.EINVAL:
                return ""
            case errno.ENOENT:
                return missing
            case errno.EAFNOSUPPORT:
                return missing if module_state(f"ip_vs_{scheduler}") is ModuleState.MISSING else ""
            case other:
                raise KernelError(action=_FIND_SCHEDULERS, errno=max(other, 0), detail=netlink.explain(other))

    def has_ipv6(self) -> bool:
        """Whether IPVS in this kernel has IPv6 (CONFIG_IP_VS_IPV6). If the kernel's answer is lost, the result is true."""
        return self._channel.do(self._table.encoder.unacceptable_service("rr")) != errno.EAFNOSUPPORT

    def connections(self, keys: Collection[VirtualServerKey]) -> dict[VirtualServerKey, Mapping[RealServerKey, ConnectionCounts]]:
        """The connections of the real servers of each given virtual server; empty for a virtual server that does not exist.

        Raises:
            KernelError: the connections could not be read.
        """
        return {key: self._readers[key.address.family].connections(key) for key in keys}

    def _open_connections(self, *, is_wanted: bool) -> ConnectionCounts | None:
        found = None
        for reader in dict.fromkeys(self._readers.values()):
            reader.adds_connections = is_wanted
            if reader.connections_of_all is not None:
                found = reader.connections_of_all.plus(found or NO_CONNECTIONS)
        return found

    def read_timeouts(self) -> Timeouts:
        """The connection timeouts.

        Raises:
            KernelError: the timeouts could not be read.
        """
        action = "read the IPVS timeouts"
        data, start, end = self._channel.ask(self._table.encoder.configuration(), action)
        values = _TIMEOUTS.read(data, start + ipvs_message.GENERIC_HEADER, end)
        if values is None:
            raise KernelError(action=action, detail="the answer is incomplete")
        return Timeouts(*values)

    def apply(self, operations: Sequence[Operation]) -> list[Outcome]:
        """Add, set and remove virtual servers and real servers, and set timeouts.

        No two operations may be about the same object.

        Operations take effect in the given order, except those that are repeated at the end. If an object to add is present, the
        operation is repeated at the end as a change; if an object to change is absent, the operation is repeated at the end as an
        addition. If a virtual server with a firewall mark is already present, its addition fails (EEXIST). The outcomes have the
        same order as the operations. If some real servers of an operation could not be added, or were already present, each of
        these real servers has a separate outcome.
        """
        for _, item in operations:
            # Each written virtual server is read again later, even if the operation fails. A virtual server counts as removed
            # only after netlink has shown that it is absent.
            if isinstance(item, VirtualServer):
                self._note(item.key, is_there=True)
            elif isinstance(item, RealServers):
                self._note(item.virtual_server, is_there=True)
        failed = self._run(*ipvs_operations.as_sent(operations))
        if not failed:
            self._note_removed(operations)
            return list(map(Outcome, operations))
        singles = list(one_by_one(operations))
        reported: dict[int, Outcome] = {}
        again: dict[int, Operation] = {}
        for number in sorted(failed):
            operation = singles[number]
            verb = ipvs_operations.opposite(operation, failed[number].number)
            if verb is not None:
                again[number] = Operation(verb, operation.item)
                reported[number] = Outcome(operation, surprise=True)
                del failed[number]
        failed |= self._run(list(again.values()), list(again))
        for number, failure in failed.items():
            operation = singles[number]
            if operation.verb is Verb.REMOVE and ipvs_operations.is_absent(operation, failure.number):
                reported[number] = Outcome(operation, surprise=True)
            else:
                reason = ipvs_operations.explain(operation, failure)
                reported[number] = Outcome(operation, f"{operation}: {reason}", max(failure.number, 0))
        results = ipvs_operations.outcomes(operations, reported)
        self._note_removed(one.operation for one in results if not one.error)
        return results

    def _note_removed(self, operations: Iterable[Operation]) -> None:
        for verb, item in operations:
            if isinstance(item, VirtualServer) and verb is Verb.REMOVE:
                self._note(item.key, is_there=False)

    def _run(self, operations: Sequence[Operation], firsts: Sequence[int]) -> dict[int, ipvs_operations.Failure]:
        """Send operations to the kernel.

        Messages are encoded shortly before they are sent, so that memory never holds the messages of all operations.

        Returns the first failure of each object that failed, by the object's number. ``firsts`` has, for each operation, the
        number of its first object.
        """
        failed: dict[int, ipvs_operations.Failure] = {}
        limit = self._channel.limit
        messages: list[bytes] = []
        numbers: list[int] = []
        """For each message, the number of the object that the message is about."""
        for operation, first in zip(operations, firsts, strict=True):
            objects = range(first, first + count_objects(operation.item))
            try:
                encoded = self._table.encoder.encode([operation])
            except (ValueError, struct.error) as error:
                failed |= dict.fromkeys(objects, ipvs_operations.Failure(errno.EINVAL, str(error)))
                continue
            if len(messages) + len(encoded) > limit:
                self._send(messages, numbers, failed)
                messages, numbers = [], []
            messages += encoded
            numbers += objects
        self._send(messages, numbers, failed)
        return failed

    def _send(self, messages: Sequence[bytes], numbers: Sequence[int], failed: dict[int, ipvs_operations.Failure]) -> None:
        """Send the messages, and record each failure in ``failed``.

        ``numbers`` has, for each message, the number of the object that the message is about.
        """
        for index, number in sorted(self._channel.run_all(messages).items()):
            failed.setdefault(numbers[index], ipvs_operations.Failure(number))


class AbsentIpvs(IpvsDriver):
    """The IPVS driver for a kernel without IPVS: the driver has no objects, and refuses every operation."""

    def __init__(self) -> None:
        """Open nothing."""
        self._readers = {}

    def close(self) -> None:
        """Close nothing."""

    def observe_in_parts(self, _families: Iterable[Family]) -> Iterator[ipvs_readings.Reading]:
        """Yields nothing, because a kernel without IPVS has no virtual servers."""
        return iter(())

    def apply(self, operations: Sequence[Operation]) -> list[Outcome]:
        """Refuse every operation."""
        return [Outcome(operation, f"{operation}: this kernel has no IPVS", errno.ENOENT) for operation in operations]
