"""The desired state of a node in the form of the recordings, to compare it with a kernel's state."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from ipvsproxy.kernel import iptables_rule
from ipvsproxy.model.kernel import (
    IP_SETS,
    PERSISTENT,
    SCHEDULER_PORT,
    SCOPE_KINDS,
    IpSet,
    SetKind,
    SetType,
    VirtualServer,
    VirtualServerKey,
)
from ipvsproxy.model.net import Family, host_port
from ipvsproxy.model.rules import Skeleton
from ipvsproxy.model.state import ServiceState
from ipvsproxy.translate.skeleton import build_skeleton
from ipvsproxy.translate.view import NodeView, Settings

DEVICE_ROW = {"flags": "BROADCAST,NOARP", "kind": "dummy", "mtu": "1500"}

State = dict[str, Any]


def render(states: Sequence[ServiceState], settings: Settings, view: NodeView) -> State:
    """The kernel's sections. ``states`` are in the order of their owners: the first that desires a virtual server has it."""
    virtual_servers: dict[VirtualServerKey, VirtualServer] = {}
    for state in states:
        for key, server in state.virtual_servers.items():
            virtual_servers.setdefault(key, server)
    sets: dict[str, set[str]] = {
        IpSet(kind, family).name: set() for family in settings.families for kind in SetKind if kind not in SCOPE_KINDS
    }
    for entry in (entry for state in states for entry in state.entries):
        sets[entry.set].add(str(entry))
    return {
        "virtual_servers": {_name(key): _settings_row(server) for key, server in virtual_servers.items()},
        "real_servers": {
            f"{_name(key)} -> {real_server}": {"forward": "masq", "weight": 1}
            for key, server in virtual_servers.items()
            for real_server in server.real_servers
        },
        "ipsets": {name: _set_row(IP_SETS[name], members) for name, members in sets.items()},
        "iptables": dict(_rule_rows(states, sets, settings, view)),
        "addresses": {"(device)": DEVICE_ROW}
        | {f"{address}/{address.family.bits}": {"scope": "global"} for state in states for address in state.addresses},
    }


def _name(key: VirtualServerKey) -> str:
    return f"{key.protocol.name} {host_port(key.address, key.port)}"


def _settings_row(server: VirtualServer) -> State:
    scheduler, flags, timeout_s = server.settings
    assert bool(flags & PERSISTENT) == bool(timeout_s)
    text = "mh-port" if flags & SCHEDULER_PORT else ""
    return {"flags": text, "netmask": "default", "persistent": timeout_s, "scheduler": scheduler}


def _set_row(ip_set: IpSet, members: Iterable[str]) -> State:
    family = "inet" if ip_set.family is Family.IPV4 else "inet6"
    options = "range 0-65535" if ip_set.type is SetType.PORT else f"family {family} maxelem 65536"
    return {"type": ip_set.type.value, "options": options, "members": sorted(members)}


def _rule_rows(
    states: Sequence[ServiceState], sets: Mapping[str, set[str]], settings: Settings, view: NodeView
) -> Iterator[tuple[str, list[str]]]:
    for family in settings.families:
        occupied = {kind for kind in SetKind if kind not in SCOPE_KINDS and sets[IpSet(kind, family).name]}
        refused = [key for state in states for key in state.rare.refused]
        yield from _skeleton_rows(build_skeleton(family, settings, view, occupied, refused))


def _skeleton_rows(skeleton: Skeleton) -> Iterator[tuple[str, list[str]]]:
    label = "v4" if skeleton.family is Family.IPV4 else "v6"
    for key, rules in skeleton.in_force.chains.items():
        texts = [f"-A {key.chain} {iptables_rule.render(rule, skeleton.family)}" for rule in rules]
        if texts:
            yield f"{label}/{key.table}/{key.chain}", texts
    jumps: dict[str, list[str]] = {}
    for jump in skeleton.jumps:
        jumps.setdefault(f"{label}/{jump.table}/{jump.source}", []).insert(
            0, f"-A {jump.source} {iptables_rule.render_jump(jump)}"
        )
    yield from jumps.items()
