"""Computes the desired state of the kernel for the objects of a world, reads the observed state, and compares both.

The desired state is translated from the present objects alone, without the program's loop and without earlier events. The
observed state is read with the operators' tools. Both the desired and the observed state are computed without our drivers.
"""

import dataclasses
import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ipvsproxy.model.kernel import DEVICE, InterfaceAddress
from ipvsproxy.model.net import parse_address
from ipvsproxy.model.rules import Backend
from ipvsproxy.model.service import EndpointSlice, Node, Put, Service, ServiceName
from ipvsproxy.translate.api import decode
from ipvsproxy.translate.translation_settings import Binding, Settings, TrafficScopes
from ipvsproxy.translate.view import view_node
from tests.chaos import foreign
from tests.chaos.world import NODE, Object
from tests.support import builders, golden_state, golden_translation, scope_rows
from tests.support.commands import run

SETTINGS = Settings(cluster_networks=builders.networks("10.244.0.0/16", "fd00:10:244::/56"), scopes=TrafficScopes.API)
SECTIONS = golden_state.KERNEL_SECTIONS
SYSCTLS: Mapping[str, str] = {
    "net.ipv4.ip_forward": "1",
    "net.ipv4.vs.conntrack": "1",
    "net.ipv4.vs.expire_nodest_conn": "1",
    "net.ipv4.vs.expire_quiescent_template": "1",
}

TUNNELS = ("tunl0", "ip6tnl0")
SYSCTLS_OF_TUNNELS: Mapping[str, str] = {
    "net/ipv4/vs/sloppy_tcp": "1",
    "net/ipv4/vs/sloppy_sctp": "1",
    "net/ipv4/conf/all/rp_filter": "0",
    "net/ipv4/conf/tunl0/rp_filter": "0",
}
"""The sysctls of direct return, with their values while direct return is on. All settings are 0 before direct return is turned
on (``tests.support.lab``), and after a start without direct return."""
OTHER_BACKEND = {Backend.IPTABLES: Backend.NFTABLES, Backend.NFTABLES: Backend.IPTABLES}

State = dict[str, Any]


def desired(
    objects: Iterable[Object],
    scheduler: str = SETTINGS.scheduler,
    binding: Binding = Binding.ADDRESSES,
    backend: Backend = Backend.IPTABLES,
    *,
    direct_return: bool = False,
) -> State:
    """The desired state in the form that ``observed`` returns, including the objects of other programs."""
    chosen: dict[str, Any] = {"scheduler": scheduler, "binding": binding, "backend": backend, "direct_return": direct_return}
    settings = dataclasses.replace(SETTINGS, **chosen)
    events = [decode.decode_document(item, "chaos") for item in objects]
    parsed = [event.object for event in events if isinstance(event, Put)]
    slices: dict[ServiceName, list[EndpointSlice]] = {}
    for item in parsed:
        if isinstance(item, EndpointSlice) and item.service:
            slices.setdefault(item.service, []).append(item)
    api_servers = builders.api_servers(slices.get(ServiceName("default", "kubernetes"), ()))
    nodes = {item.name: item for item in parsed if isinstance(item, Node)}
    others = [item for item in nodes.values() if item.name != NODE and direct_return]
    ends = {item.name: item.addresses for item in others if item.takes_direct_return}
    view = view_node(settings, NODE, nodes[NODE], list(_interface_addresses()), api_servers, tunnel_ends=ends)
    services = [item for item in parsed if isinstance(item, Service)]
    states = [builders.translate(item, slices.get(item.name, ()), view, settings) for item in services]
    sources = [address for item in others for address in item.addresses]
    rendered = golden_translation.render(sorted(states, key=lambda one: one.owner), settings, view, sources)
    rendered["virtual_servers"] |= foreign.VIRTUAL_SERVERS
    rendered["real_servers"] |= foreign.REAL_SERVERS
    devices = dict.fromkeys(TUNNELS, "up" if direct_return else "down")
    values = {name: value if direct_return else "0" for name, value in SYSCTLS_OF_TUNNELS.items()}
    return _normal(rendered | {"sysctls": {**SYSCTLS, **devices, **values}})


def _interface_addresses() -> Iterable[InterfaceAddress]:
    for link in json.loads(run("ip", "-json", "address")):
        for address in link.get("addr_info", ()) if link.get("ifname") != DEVICE else ():
            yield InterfaceAddress(link["ifname"], parse_address(address["local"]), address["prefixlen"])


def observed(sections: Collection[str] = SECTIONS, backend: Backend = Backend.IPTABLES) -> State:
    """The observed state, limited to these sections.

    Objects of the other backend are in separate rows.
    """
    # ``without_marks`` needs the sets to find the address of each mark
    needs_sets = "virtual_servers" in sections and "ipsets" not in sections
    state = scope_rows.without_marks(golden_state.read_state((*sections, "ipsets") if needs_sets else sections, backend))
    if needs_sets:
        del state["ipsets"]
    if "addresses" in sections:
        state["addresses"] |= golden_state.read_routes()
    if "sysctls" in sections:
        state["sysctls"] |= dict(read_tunnels())
    other = OTHER_BACKEND[backend]
    for section, rows in golden_state.read_state([one for one in ("ipsets", "iptables") if one in sections], other).items():
        if section in state:
            state[section] |= {f"in {other}: {name}": value for name, value in rows.items()}
    return _normal(state)


def read_tunnels() -> Iterator[tuple[str, str]]:
    """The state of each device of direct return, and the value of each setting of direct return."""
    for device in TUNNELS:
        flags = Path("/sys/class/net", device, "flags")
        yield device, "up" if flags.exists() and int(flags.read_text(), 16) & 1 else "down"
    for name in SYSCTLS_OF_TUNNELS:
        path = Path("/proc/sys", name)
        yield name, path.read_text().strip() if path.exists() else "0"  # the setting of tunl0 exists only if the device exists


def _normal(state: State) -> State:
    """The state without empty chains, and with our jumps in a fixed order."""
    normal = dict(state)
    if "iptables" in state:
        tables = state["iptables"].items()
        normal["iptables"] = {chain: lines if "/KUBE-" in chain else sorted(lines) for chain, lines in tables if lines}
    if "sysctls" in state:
        normal["sysctls"] = {name: state["sysctls"].get(name) for name in (*SYSCTLS, *TUNNELS, *SYSCTLS_OF_TUNNELS)}
    return normal


def differences(expected: Mapping[str, Any], actual: Mapping[str, Any]) -> list[str]:
    """One line for each row that differs between ``expected`` and ``actual``, in the sections that ``actual`` has.

    Draining real servers of TCP do not count as a difference.
    """
    differing = golden_state.differences(expected, actual, actual.keys())
    return [
        f"{section}: {row} is {kind}: desired {old}, observed {new}"
        for section, rows in differing.items()
        for row, kind, old, new in rows
        if not (section == "real_servers" and kind == "extra" and is_draining(row, new, expected["virtual_servers"]))
    ]


def is_draining(row: str, real_server: Mapping[str, Any], virtual_servers: Collection[str]) -> bool:
    """Whether a real server is draining: the real server is no longer desired, and stays until its connections have ended."""
    return row.startswith("TCP ") and real_server["weight"] == 0 and row.partition(" -> ")[0] in virtual_servers
