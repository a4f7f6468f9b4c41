"""Rules of other programs that write packet marks, in the output of ``iptables-save``."""

import re
from collections.abc import Iterator
from typing import NamedTuple

ALL_BITS = 0xFFFFFFFF
_AFTER_IPVS = frozenset({"FORWARD", "POSTROUTING"})
"""Built-in chains that no packet passes between its arrival and IPVS."""
_OURS = re.compile(r"KUBE-(IPVSPROXY-|MARK-|POSTROUTING$)")
"""Chains of ours, and the kubelet's: the bits that they write have a meaning of their own, or are written after IPVS."""
_MARK = re.compile(r"-j (?:MARK --set-xmark|TPROXY .*--tproxy-mark) (0x[0-9a-f]+)/(0x[0-9a-f]+)")
_RESTORED = re.compile(r"-j CONNMARK --restore-mark(?: --nfmask (0x[0-9a-f]+))?")
_MAPPED = re.compile(r"-j SET --map-set \S+ \S+ .*--map-mark")


class MarkRule(NamedTuple):
    """A rule, as a command would add it, and the bits of the mark that it writes."""

    text: str
    bits: int


def mark_rules(saved: str) -> Iterator[MarkRule]:
    """The rules that may change a packet's mark before IPVS sees the packet, without those of ours.

    Whether packets reach a chain that is not built in is not followed.
    """
    table = ""
    for line in saved.splitlines():
        if line.startswith("*"):
            table = line[1:]
        if not line.startswith("-A "):
            continue
        chain = line.split(" ", 2)[1]
        bits = _bits_written(line)
        if bits and chain not in _AFTER_IPVS and not _OURS.match(chain):
            yield MarkRule(f"-t {table} {line}", bits)


def _bits_written(rule: str) -> int:
    if found := _MARK.search(rule):
        return int(found[1], 16) | int(found[2], 16)
    if found := _RESTORED.search(rule):
        return int(found[1], 16) if found[1] else ALL_BITS
    return ALL_BITS if _MAPPED.search(rule) else 0
