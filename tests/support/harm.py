"""Commands of ipset, iptables and nft that cause drift of sets and rules. Each has the same effect in both backends."""

from ipvsproxy.model.rules import Backend
from tests.support import cluster, nft_state

_TABLE = ("inet", "ipvsproxy")


def flush_set(name: str, backend: Backend = cluster.BACKEND) -> tuple[str, ...]:
    """The command that empties a set."""
    if backend is Backend.NFTABLES:
        return ("nft", "flush", "map" if name.endswith("-SCOPE") else "set", *_TABLE, name)
    return ("ipset", "flush", name)


def remove_entry(name: str, entry: str, backend: Backend = cluster.BACKEND) -> tuple[str, ...]:
    """The command that removes an entry of a set.

    ``entry`` is written as ipset prints it, but without the packet mark (``skbmark``).
    """
    if backend is Backend.NFTABLES:
        return ("nft", "delete", "element", *_TABLE, name, f"{{ {entry.replace(',', ' . ').replace(':', ' . ')} }}")
    return ("ipset", "del", name, entry)


def flush_chain(table: str, chain: str, backend: Backend = cluster.BACKEND) -> tuple[str, ...]:
    """The command that empties an IPv4 chain."""
    if backend is Backend.NFTABLES:
        return ("nft", "flush", "chain", *_TABLE, nft_state.chain_name("v4", table, chain))
    return ("iptables", "-t", table, "-F", chain)
