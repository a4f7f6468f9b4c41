"""Replaces the marks of second scopes by addresses, in states that have the form of the recordings.

Any free number can become a mark, so two states that are otherwise equal may have different marks. Therefore this module replaces
each mark by the first address that has the mark.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from ipvsproxy.model.net import Family, parse_address
from ipvsproxy.model.sets import IpSet, SetKind
from ipvsproxy.model.state import Clients
from ipvsproxy.model.virtual_servers import FirewallMark

State = dict[str, Any]

VIRTUAL_SERVER = re.compile(r"FWM (?P<mark>\d+) (?P<family>IPv[46])")
_OURS = "-IPVSPROXY-"
_MARKED = re.compile(r"(?P<address>\S+) skbmark (?P<mark>0x[0-9a-f]+)(?P<mask>/0x[0-9a-f]+)?")


def server_row(mark: int, family: Family) -> str:
    """The name of a firewall-mark virtual server."""
    return f"FWM {mark} {family.label}"


def named_server(first: str, kind: SetKind = SetKind.SCOPE) -> str:
    """The name of a second scope's virtual server, in a form that does not contain the mark.

    ``first`` is the scope's first address and port in the set of this kind, such as ``203.0.113.12,tcp:80``.
    """
    return f"FWM of {first}" if kind is SetKind.SCOPE else f"FWM of {first} in {kind.value}"


def without_marks(state: Mapping[str, Any]) -> State:
    """The state in which each mark is replaced by its address. A mark without an address keeps its number."""
    normal = dict(state)
    names = _names(state.get("ipsets", {}))
    if "virtual_servers" in state:
        normal["virtual_servers"] = {_server(row, names): value for row, value in state["virtual_servers"].items()}
        normal["real_servers"] = {_real_server(row, names): value for row, value in state["real_servers"].items()}
    if "ipsets" in state:
        normal["ipsets"] = {name: _set(name, content, names) for name, content in state["ipsets"].items()}
    return normal


def without_scopes(state: Mapping[str, Any]) -> State:
    """A copy of the state without second scopes, and without the sets, chains and jumps of second scopes."""
    normal = dict(state)
    for section in ("virtual_servers", "real_servers"):
        normal[section] = {row: value for row, value in state[section].items() if not row.startswith("FWM ")}
    normal["ipsets"] = {name: content for name, content in state["ipsets"].items() if _OURS not in name}
    rules = {chain: [line for line in lines if _OURS not in line] for chain, lines in state["iptables"].items()}
    normal["iptables"] = {chain: lines for chain, lines in rules.items() if _OURS not in chain and (lines or "/KUBE-" in chain)}
    return normal


def marks_of(sets: Mapping[str, Any], family: Family, kind: SetKind = SetKind.SCOPE) -> Mapping[int, list[str]]:
    """For each mark in the set of this kind, the sorted addresses and ports that have the mark."""
    found: dict[int, list[str]] = {}
    for member in sets.get(IpSet(kind, family).name, {}).get("members", ()):
        match = _MARKED.fullmatch(member)
        assert match, member
        found.setdefault(int(match["mark"], 16), []).append(match["address"])
    return {mark: sorted(addresses) for mark, addresses in found.items()}


def _names(sets: Mapping[str, Any]) -> Mapping[FirewallMark, str]:
    return {
        FirewallMark.of(family, mark): named_server(addresses[0], clients.value)
        for family in Family
        for clients in Clients
        for mark, addresses in marks_of(sets, family, clients.value).items()
    }


def _server(row: str, names: Mapping[FirewallMark, str]) -> str:
    match = VIRTUAL_SERVER.fullmatch(row)
    if not match:
        return row
    family = next(one for one in Family if one.label == match["family"])
    name = names.get(FirewallMark.of(family, int(match["mark"])))
    return name or row


def _real_server(row: str, names: Mapping[FirewallMark, str]) -> str:
    server, arrow, rest = row.partition(" -> ")
    return f"{_server(server, names)}{arrow}{rest}"


def _set(name: str, content: Mapping[str, Any], names: Mapping[FirewallMark, str]) -> State:
    members: Iterable[str] = content["members"]
    for family in Family:
        if name in {IpSet(clients.value, family).name for clients in Clients}:
            members = [_MARKED.sub(lambda match: f"{match['address']} skbmark{match['mask'] or ''}", one) for one in members]
        elif name == IpSet(SetKind.MARKS, family).name:
            members = [_mark_member(one, family, names) for one in members]
    return {**content, "members": sorted(members)}


def _mark_member(member: str, family: Family, names: Mapping[FirewallMark, str]) -> str:
    key = FirewallMark.of(family, int.from_bytes(parse_address(member), "big"))
    return names.get(key, member)
