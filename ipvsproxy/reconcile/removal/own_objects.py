"""Plans a ``--cleanup``: the removal of exactly those kernel objects that belong to ipvsproxy.

A cleanup may also be limited to the objects that kube-proxy does not know, or to the objects that hide the API server.

Rule 1: virtual servers are removed first, so that no packet meets an incomplete set of rules. After the virtual servers, the
rules are removed, then the sets that the rules name, then the device, and then local routes. The rules that drop tunnel packets
of unknown senders are removed only after the settings that admit tunnel packets have been restored.
Rule 2: a witness (see ``ownership``) stays as long as its virtual server exists. Without the witness, no later run would
recognise that the virtual server belongs to ipvsproxy.
"""

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import NamedTuple

from ipvsproxy.model.kernel import DEVICE, BoundAddresses, Device, LocalRoutes
from ipvsproxy.model.net import Address, Family, Network, Protocol
from ipvsproxy.model.plan import Operation, Verb
from ipvsproxy.model.real_servers import RealServerKey
from ipvsproxy.model.rules import Skeleton
from ipvsproxy.model.sets import IP_SETS, SET_COPY, ForeignElement, IpSet, SetEntries, SetEntry, SetKind
from ipvsproxy.model.state import Observation
from ipvsproxy.model.virtual_servers import FirewallMark, VirtualServer, VirtualServerKey
from ipvsproxy.reconcile.virtual_servers import ownership

EXTERNAL = ("KUBE-EXTERNAL-IP", "KUBE-LOAD-BALANCER")
"""The prefixes of the names of sets that hold external IPs and IPs of load balancers."""


class Cleanup(NamedTuple):
    """The operations of a cleanup. ``witnesses`` must not be removed before all virtual servers of ipvsproxy have been removed.

    ``additions`` come first: if an address stays in use, but only a route makes the address local, the address is added to
    ``kube-ipvs0``. ``witnesses`` must not be removed before ``additions`` have been made. ``rules`` and ``witnesses`` must not be
    removed before ``settings`` have been restored.
    """

    virtual_servers: tuple[Operation, ...]
    rules: tuple[Operation, ...]
    witnesses: tuple[Operation, ...]
    additions: tuple[Operation, ...] = ()
    settings: tuple[Operation, ...] = ()

    @property
    def operations(self) -> tuple[Operation, ...]:
        """All operations."""
        return (*self.additions, *self.virtual_servers, *self.settings, *self.rules, *self.witnesses)


def plan(
    observed: Observation,
    skeletons: Mapping[Family, Skeleton],
    excluded: Collection[Network],
    node_port_ranges: Collection[Network] = ownership.EVERYWHERE,
) -> Cleanup:
    """The removals of all observed objects that belong to ipvsproxy.

    ``skeletons`` shows which chains and jumps belong to ipvsproxy. Virtual servers in ``excluded`` ranges are kept.
    ``node_port_ranges`` has the same meaning as in the module ``ownership``.
    """
    return Cleanup(
        virtual_servers=tuple(_virtual_servers(observed, excluded, node_port_ranges)),
        rules=rules(observed, skeletons),
        witnesses=tuple(_witnesses(observed)),
    )


def only_own(todo: Cleanup, observed: Observation, kinds: Collection[SetKind]) -> Cleanup:
    """The part of a cleanup that removes only objects that kube-proxy does not know.

    The objects that kube-proxy knows, and their connections, are left to kube-proxy. kube-proxy knows ``kube-ipvs0``, all virtual
    servers with an address, and all sets except the sets whose kind is in ``kinds``. The result has all removals of rules in
    ``todo``, because the skeletons that the caller passed to ``plan`` already limit these removals. If a service address is local
    only because of a local route, the cleanup also adds the address to ``kube-ipvs0``.
    """

    def goes(operation: Operation) -> bool:
        item = operation.item
        return item.kind in kinds if isinstance(item, IpSet) else not isinstance(item, Device)

    served = {key.address for key in observed.virtual_servers or ()}
    bound = tuple(sorted(served & (observed.routes or frozenset()) - (observed.addresses or frozenset())))
    device = () if observed.device else (Operation(Verb.ADD, Device(DEVICE)),)
    return todo._replace(
        virtual_servers=tuple(one for one in todo.virtual_servers if isinstance(one.item.key, FirewallMark)),
        witnesses=tuple(filter(goes, todo.witnesses)),
        additions=(*device, Operation(Verb.ADD, BoundAddresses(bound))) if bound else (),
    )


def give_up(
    observed: Observation,
    former: Iterable[SetEntry],
    api_servers: Iterable[RealServerKey],
    allowed: Collection[Network],
) -> Cleanup:
    """The removals of all objects that prevent this node from reaching the given API servers.

    The address of each API server is removed from ``kube-ipvs0`` and from the local routes. The virtual server that has this
    address and the API server's port is also removed, together with its set entries. ``allowed`` addresses stay. If one kind of
    object could not be read, all objects stay. A cluster IP stays, because the cluster IP may lead to the API servers. The set
    entries of this backend, or the ``former`` set entries of the other backend, show which address is a cluster IP. A virtual
    server with real servers also stays, unless a set entry shows that its address is an external address. Without such a set
    entry, the address may be a cluster IP whose set entry was lost.
    """
    kinds: dict[Address, set[SetKind]] = {}
    for entry in itertools.chain(*(observed.sets or {}).values(), former):
        if entry.address:
            kinds.setdefault(entry.address, set()).add(IP_SETS[entry.set].kind)

    def hides(place: VirtualServerKey) -> bool:
        there = kinds.get(place.address, set())
        if SetKind.CLUSTER_IP in there or any(net.contains(place.address) for net in allowed):
            return False
        server = (observed.virtual_servers or {}).get(place)
        return not (server and server.real_servers) or any(kind.startswith(EXTERNAL) for kind in there)

    servers = sorted(api_servers) if may_remove_witnesses(observed) else []
    places = dict.fromkeys(filter(hides, (VirtualServerKey(Protocol.TCP, one.address, one.port) for one in servers)))
    return Cleanup(
        virtual_servers=tuple(one for one in _virtual_servers(observed, (), ()) if one.item.key in places),
        rules=(),
        witnesses=tuple(_witnesses_of(observed, places)),
    )


def _witnesses_of(observed: Observation, places: Collection[VirtualServerKey]) -> Iterator[Operation]:
    for name, entries in (observed.sets or {}).items():
        here = [one for one in entries if not isinstance(one, ForeignElement) and ownership.virtual_server_of(one) in places]
        if here:
            yield Operation(Verb.REMOVE, SetEntries(name, tuple(sorted(here))))
    addresses: Collection[Address] = dict.fromkeys(place.address for place in places)
    if bound := tuple(one for one in addresses if one in (observed.addresses or ())):
        yield Operation(Verb.REMOVE, BoundAddresses(bound))
    if routed := tuple(one for one in addresses if one in (observed.routes or ())):
        yield Operation(Verb.REMOVE, LocalRoutes(routed))


def may_remove_witnesses(observed: Observation) -> bool:
    """Whether a reading has all kinds of objects that show which virtual servers belong to ipvsproxy."""
    return None not in (
        observed.virtual_servers,
        observed.sets,
        observed.addresses,
        observed.routes,
        observed.interface_addresses,
    )


def rules(observed: Observation, skeletons: Mapping[Family, Skeleton]) -> tuple[Operation, ...]:
    """The removals of ipvsproxy's rules, one for each family that has such rules."""
    return tuple(
        Operation(Verb.REMOVE, skeletons[family])
        for family, image in sorted(observed.skeletons.items())
        if image.chains or image.jumps
    )


def _virtual_servers(
    observed: Observation, excluded: Collection[Network], node_port_ranges: Collection[Network]
) -> Iterator[Operation]:
    host = {item.address for item in observed.interface_addresses or ()}
    virtual_servers = observed.virtual_servers or {}
    is_ours = ownership.owned_virtual_servers(observed.sets or {}, observed.local, host, virtual_servers, node_port_ranges)
    for key, server in virtual_servers.items():
        if is_ours(key) and not ownership.lies_in(key, excluded):
            yield Operation(Verb.REMOVE, VirtualServer(key, server.settings))


def _witnesses(observed: Observation) -> Iterator[Operation]:
    for name in observed.sets or ():
        yield Operation(Verb.REMOVE, IP_SETS[name])
    if observed.set_copy:
        yield Operation(Verb.REMOVE, SET_COPY)
    if observed.device:
        yield Operation(Verb.REMOVE, Device(DEVICE))
    if observed.routes:
        yield Operation(Verb.REMOVE, LocalRoutes(tuple(sorted(observed.routes))))
