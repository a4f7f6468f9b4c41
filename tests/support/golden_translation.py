"""Converts the desired state of a node to the format of the recordings, for comparison with a kernel's state."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from ipvsproxy.model.net import Address, Family, host_port
from ipvsproxy.model.real_servers import TUNNELLED, without_method
from ipvsproxy.model.rules import Backend, Skeleton, render_jump
from ipvsproxy.model.sets import DIRECT_KINDS, IP_SETS, SCOPE_KINDS, IpSet, SetEntry, SetKind, SetType
from ipvsproxy.model.state import Clients, ClusterScope, ServiceState
from ipvsproxy.model.virtual_servers import (
    PERSISTENT,
    SCHEDULER_FALLBACK,
    SCHEDULER_PORT,
    VirtualServer,
    VirtualServerKey,
    VirtualServerSettings,
)
from ipvsproxy.translate.skeleton import build_skeleton
from ipvsproxy.translate.translation_settings import Settings
from ipvsproxy.translate.view import NodeView
from tests.support import scope_rows

DEVICE_ROW = {"flags": "BROADCAST,NOARP", "kind": "dummy", "mtu": "1500"}

State = dict[str, Any]


def render(states: Sequence[ServiceState], settings: Settings, view: NodeView, other_nodes: Iterable[Address] = ()) -> State:
    """The desired state of these Services, in the format of a recording. Only the sections that describe the kernel are present.

    The result has the same format as a state that ``scope_rows.without_marks`` returns.

    ``states`` are in the order of their Services; if several Services desire the same virtual server, the first of these Services
    gets it. ``other_nodes`` are the addresses from which tunnels are accepted.
    """
    virtual_servers: dict[VirtualServerKey, VirtualServer] = {}
    for state in states:
        for key, server in state.virtual_servers.items():
            virtual_servers.setdefault(key, server)
    scopes = list(_scopes(states, virtual_servers))
    sets: dict[str, set[str]] = {
        IpSet(kind, family).name: set()
        for family in settings.families
        for kind in SetKind
        if kind not in SCOPE_KINDS or kind in _second_sets(family, scopes, other_nodes)
    }
    for entry in (entry for state in states for entry in state.entries):
        sets[entry.set].add(str(entry))
    for address in other_nodes:
        sets[IpSet(SetKind.NODES, address.family).name].add(str(address))
    for first, scope in scopes:
        sets[IpSet(SetKind.MARKS, scope.family).name].add(first)
        members = {f"{one} skbmark/{settings.scope_bits:#x}" for one in _members(scope)}
        sets[IpSet(scope.clients.value, scope.family).name] |= members
    return {
        "virtual_servers": {_name(key): _settings_row(server.settings) for key, server in virtual_servers.items()}
        | {first: _settings_row(scope.settings) for first, scope in scopes},
        "real_servers": {
            f"{_name(key)} -> {real_server}": {"forward": "masq", "weight": 1}
            for key, server in virtual_servers.items()
            for real_server in server.real_servers
        }
        | {
            f"{first} -> {real_server}": {
                "forward": "tunnel" if weight >= TUNNELLED else "masq",
                "weight": without_method(weight),
            }
            for first, scope in scopes
            for real_server, weight in scope.weights.items()
        },
        "ipsets": {name: _set_row(IP_SETS[name], members) for name, members in sets.items()},
        "iptables": dict(_rule_rows(states, sets, settings, view)),
        "addresses": {"(device)": DEVICE_ROW}
        | {f"{address}/{address.family.bits}": {"scope": "global"} for state in states for address in state.addresses}
        | {f"route {address}/{address.family.bits}": {} for state in states for address in state.routes},
    }


def _name(key: VirtualServerKey) -> str:
    return f"{key.protocol.name} {host_port(key.address, key.port)}"


def _scopes(
    states: Sequence[ServiceState], virtual_servers: Mapping[VirtualServerKey, VirtualServer]
) -> Iterator[tuple[str, ClusterScope]]:
    """Each scope that has a virtual server by firewall mark, together with a name.

    The name contains the first address of the scope instead of the mark.
    """
    for state in states:
        for scope in state.rare.scopes:
            assert all(virtual_servers[key].owner == state.owner for key in scope.virtual_servers)
            yield scope_rows.named_server(min(_members(scope)), scope.clients.value), scope


def _second_sets(family: Family, scopes: Iterable[tuple[str, ClusterScope]], other_nodes: Iterable[Address]) -> set[SetKind]:
    """The sets that exist only while a second scope needs them, or while other nodes may take part in direct return."""
    clients = {scope.clients for _, scope in scopes if scope.family is family}
    local = {SetKind.SCOPE, SetKind.NO_LOCAL, SetKind.MARKS} if Clients.OF_NODE in clients else set()
    has_direct_return = clients - {Clients.OF_NODE} or any(address.family is family for address in other_nodes)
    return local | {*DIRECT_KINDS, SetKind.MARKS} if has_direct_return else local


def _members(scope: ClusterScope) -> list[str]:
    name = IpSet(scope.clients.value, scope.family).name
    return [str(SetEntry(name, key.address, key.protocol, key.port)) for key in scope.virtual_servers]


def _settings_row(settings: VirtualServerSettings) -> State:
    scheduler, flags, timeout_s, _ = settings
    assert bool(flags & PERSISTENT) == bool(timeout_s)
    names = {SCHEDULER_FALLBACK: "mh-fallback", SCHEDULER_PORT: "mh-port"}
    text = ",".join(name for flag, name in names.items() if flags & flag)
    return {"flags": text, "netmask": "default", "persistent": timeout_s, "scheduler": scheduler}


def _set_row(ip_set: IpSet, members: Iterable[str]) -> State:
    family = "inet" if ip_set.family is Family.IPV4 else "inet6"
    options = "range 0-65535" if ip_set.type is SetType.PORT else f"family {family} maxelem 65536"
    options += " skbinfo" if ip_set.gives_marks else ""
    return {"type": ip_set.type.value, "options": options, "members": sorted(members)}


def _rule_rows(
    states: Sequence[ServiceState], sets: Mapping[str, set[str]], settings: Settings, view: NodeView
) -> Iterator[tuple[str, list[str]]]:
    for family in settings.families:
        occupied = {kind for kind in SetKind if sets.get(IpSet(kind, family).name)}
        refused = [key for state in states for key in state.rare.refused]
        routed = frozenset(key for state in states for key in state.rare.refused if key.address in state.routes)
        skeleton = build_skeleton(family, settings, view, occupied, refused, routed=routed)
        yield from _skeleton_rows(skeleton, settings.backend)


def _skeleton_rows(skeleton: Skeleton, backend: Backend) -> Iterator[tuple[str, list[str]]]:
    label = "v4" if skeleton.family is Family.IPV4 else "v6"
    for key, rules in skeleton.in_force.chains.items():
        texts = [f"-A {key.chain} {rule}" for rule in rules]
        if texts:
            yield f"{label}/{key.table}/{key.chain}", texts
    jumps: dict[str, list[str]] = {}
    for jump in skeleton.jumps:
        text = f"-j {jump.target}" if backend is Backend.NFTABLES else render_jump(jump)
        jumps.setdefault(f"{label}/{jump.table}/{jump.source}", []).insert(0, f"-A {jump.source} {text}")
    yield from jumps.items()
