"""Reads our table of nftables, and returns it as sets of ipset and rules of iptables.

The result has the same form as the recorded states of kube-proxy.

The table is read with the program ``nft``, never with ipvsproxy's drivers. The text of a rule is its comment or, if nft prints no
comment, its expressions as JSON. Packet tests check that the expressions of a rule do what its text says, and ``Expressions``
checks that the expressions do not change.
"""

import json
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ipvsproxy.model.net import Family

State = dict[str, Any]

TABLE = ("inet", "ipvsproxy")
_ABSENT = ("No such file or directory", "not supported")
_TYPES = ("hash:ip", "bitmap:port", "", "hash:ip,port", "hash:ip,port,ip", "hash:ip,port,net")
"""The types of ipset. The first type is for sets of addresses, and the second type for sets of ports. For all other sets, the
number of fields is the index of the type."""


def listing(table: tuple[str, str] = TABLE) -> list[tuple[str, State]]:
    """The objects of a table, each with its kind; none if the table does not exist."""
    if not Path("/sys/module/nf_tables").exists():
        return []
    done = subprocess.run(("nft", "--json", "list", "table", *table), capture_output=True, text=True, check=False)
    if done.returncode != 0:
        if any(text in done.stderr for text in _ABSENT):
            return []
        raise RuntimeError(f"nft list table: status {done.returncode}: {done.stderr.strip()}")
    return [pair for one in json.loads(done.stdout)["nftables"] for pair in one.items()]


def read_sets(objects: Iterable[tuple[str, State]] | None = None) -> State:
    """The sets, in the form that ``golden_state.parse_sets`` returns."""
    sets: State = {}
    for kind, one in listing() if objects is None else objects:
        if kind not in ("set", "map"):
            continue
        fields = [one["type"]] if isinstance(one["type"], str) else one["type"]
        is_of_ports = fields == ["inet_service"]
        family = "inet6" if "ipv6_addr" in fields else "inet"
        options = "range 0-65535" if is_of_ports else f"family {family} maxelem 65536"
        sets[one["name"]] = {
            "type": _TYPES[1] if is_of_ports else _TYPES[len(fields) if len(fields) > 1 else 0],
            "options": options + (" skbinfo" if kind == "map" else ""),
            "members": sorted(_member(element) for element in one.get("elem", ())),
        }
    return sets


def _member(element: Any) -> str:
    """An element in the form in which ipset prints the same entry."""
    if isinstance(element, list):
        key, mark = element
        commented = key.get("elem", {"val": key, "comment": "mask 0x0"})
        return f"{_member(commented['val'])} skbmark {mark:#x}/{commented['comment'].removeprefix('mask ')}"
    if not isinstance(element, dict):
        return str(element)
    address, protocol, port, *other = element["concat"]
    text = f"{address},{protocol}:{port}"
    if not other:
        return text
    is_whole = len(other) == 1 or other[1] == (128 if ":" in other[0] else 32)
    return f"{text},{other[0]}" if is_whole else f"{text},{other[0]}/{other[1]}"


def read_rules(objects: Iterable[tuple[str, State]] | None = None) -> dict[str, list[str]]:
    """The rules of our chains and the jumps to them, in the form that ``golden_state.parse_rules`` returns.

    A rule that is translated to several successive rules of nf_tables counts as one rule.
    """
    chains: dict[str, list[str]] = {}
    for kind, one in listing() if objects is None else objects:
        if kind == "chain" and "hook" not in one:
            chains[_chain(one["name"])] = []
        elif kind == "rule":
            name = _chain(one["chain"])
            text = f"-A {name.split('/')[2]} {one.get('comment', json.dumps(one['expr']))}"
            rules = chains.setdefault(name, [])
            rules += [text] if rules[-1:] != [text] else []
    return chains


def _chain(name: str) -> str:
    """``v4/nat/KUBE-SERVICES`` for ``IPv4-nat-KUBE-SERVICES``."""
    label, table, chain = name.split("-", 2)
    return f"{label.replace('IP', '', 1)}/{table}/{chain}"


def chain_name(label: str, table: str, chain: str) -> str:
    """Returns ``IPv4-nat-KUBE-SERVICES`` for ``v4``, ``nat`` and ``KUBE-SERVICES``."""
    return f"{next(family.label for family in Family if family.label.endswith(label))}-{table}-{chain}"


class Expressions:
    """The expressions that each rule and each base chain had when it was first seen.

    The expressions are recorded because the text of a rule does not show them.
    """

    def __init__(self) -> None:
        self._first: dict[str, list[str]] = {}

    def changed(self, objects: Iterable[tuple[str, State]]) -> list[str]:
        """The rules and base chains that have changed since they were first seen, one line each."""
        seen: dict[str, list[str]] = {}
        for kind, one in objects:
            if kind == "rule":
                seen.setdefault(f"{one['chain']} {one.get('comment')}", []).append(json.dumps(one["expr"]))
            elif kind == "chain":
                seen[f"chain {one['name']}"] = [json.dumps({**one, "handle": 0})]
        return [
            f"{name} is {seen[name]}, and was {first}"
            for name in seen
            if (first := self._first.setdefault(name, seen[name])) != seen[name]
        ]
