"""What the kernel must hold for the objects of a world, what it holds, and in what the two differ.

The one side is translation from scratch, without a loop or a history; the other is read with the operator's own tools. Neither
goes through our drivers.
"""

import dataclasses
import json
import subprocess
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from ipvsproxy.model.kernel import DEVICE, InterfaceAddress
from ipvsproxy.model.net import Address, parse_address
from ipvsproxy.model.service import EndpointSlice, Node, Put, Service, ServiceName
from ipvsproxy.translate import decode, state
from ipvsproxy.translate.view import Settings, view_node
from tests.chaos import foreign
from tests.chaos.world import NODE, Object
from tests.support import builders, golden_state, golden_translation

SETTINGS = Settings(cluster_networks=builders.networks("10.244.0.0/16", "fd00:10:244::/56"))
SECTIONS = ("virtual_servers", "real_servers", "ipsets", "iptables", "addresses", "sysctls")
SYSCTLS: Mapping[str, str] = {
    "net.ipv4.ip_forward": "1",
    "net.ipv4.vs.conntrack": "1",
    "net.ipv4.vs.expire_nodest_conn": "1",
    "net.ipv4.vs.expire_quiescent_template": "1",
}

State = dict[str, Any]


def wanted(objects: Iterable[Object], scheduler: str = SETTINGS.scheduler) -> State:
    """What the kernel must hold, in the form of the recordings, with what is not ours."""
    settings = dataclasses.replace(SETTINGS, scheduler=scheduler)
    events = [decode.decode_document(item, "chaos") for item in objects]
    parsed = [event.object for event in events if isinstance(event, Put)]
    slices: dict[ServiceName, list[EndpointSlice]] = {}
    for item in parsed:
        if isinstance(item, EndpointSlice) and item.service:
            slices.setdefault(item.service, []).append(item)
    api_servers = builders.api_servers(slices.get(ServiceName("default", "kubernetes"), ()))
    node = next(item for item in parsed if isinstance(item, Node))
    view = view_node(settings, NODE, node, list(_interface_addresses()), api_servers)
    services = [item for item in parsed if isinstance(item, Service)]
    states = [state.translate(item, slices.get(item.name, ()), view, settings) for item in services]
    rendered = golden_translation.render(sorted(states, key=lambda one: one.owner), settings, view)
    rendered["virtual_servers"] |= foreign.VIRTUAL_SERVERS
    rendered["real_servers"] |= foreign.REAL_SERVERS
    return _normal(rendered | {"sysctls": dict(SYSCTLS)})


def _interface_addresses() -> Iterable[InterfaceAddress]:
    done = subprocess.run(["ip", "-json", "address"], capture_output=True, text=True, check=True)
    for link in json.loads(done.stdout):
        for address in link.get("addr_info", ()) if link.get("ifname") != DEVICE else ():
            yield InterfaceAddress(link["ifname"], _parse(address["local"]), address["prefixlen"])


def _parse(text: str) -> Address:
    return parse_address(text)


def held(sections: Collection[str] = SECTIONS) -> State:
    """These sections of what the kernel holds."""
    return _normal(golden_state.read_state(sections))


def _normal(found: State) -> State:
    """Without what does not count: chains without rules, and the order of our jumps among each other."""
    normal = dict(found)
    if "iptables" in found:
        tables = found["iptables"].items()
        normal["iptables"] = {chain: lines if "/KUBE-" in chain else sorted(lines) for chain, lines in tables if lines}
    if "sysctls" in found:
        normal["sysctls"] = {name: found["sysctls"].get(name) for name in SYSCTLS}
    return normal


def differences(expected: Mapping[str, Any], actual: Mapping[str, Any]) -> list[str]:
    """One line for each row of the sections in ``actual`` that differs and must not.

    Real servers of TCP that are being drained may still be there.
    """
    found = golden_state.differences(expected, actual, actual.keys())
    return [
        f"{section}: {row} is {kind}: wanted {old}, found {new}"
        for section, rows in found.items()
        for row, kind, old, new in rows
        if not (section == "real_servers" and kind == "extra" and is_draining(row, new, expected["virtual_servers"]))
    ]


def is_draining(row: str, found: Mapping[str, Any], virtual_servers: Collection[str]) -> bool:
    """Whether a real server that is not wanted is one that waits for the end of its connections."""
    return row.startswith("TCP ") and found["weight"] == 0 and row.partition(" -> ")[0] in virtual_servers
