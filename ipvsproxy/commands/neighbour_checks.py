"""Judges what rules of other programs do to packets of Services: kube-proxy's other modes, firewalls, redirected host ports.

Firewalls win wherever they refuse a packet: to accept one counts only in the table that does it (nf_tables), or in the same
variant of iptables. Which packets a firewall accepts is not followed, so all that refuse what they do not know are named.
"""

from collections.abc import Iterator

from ipvsproxy.commands.finding import Finding, ok, warn
from ipvsproxy.kernel.facts import Facts
from ipvsproxy.kernel.iptables.variant import Variant
from ipvsproxy.model.net import Protocol
from ipvsproxy.model.nft_table import NftTable, Redirect
from ipvsproxy.model.rules import Backend
from ipvsproxy.reconcile.removal import leftover_tables, leftovers

_REFUSED = {
    "input": "connections to Services, from pods and from outside,",
    "forward": "what pods send, and the answers of Services,",
    "output": "what IPVS sends to endpoints, and the connections of this host,",
}
"""The packets of Services that a hook meets."""
_OF_IPTABLES_NFT = frozenset({"ip", "ip6"})
_SHOWN = 5


def judge(facts: Facts) -> Iterator[Finding]:
    """All findings about other programs' rules. None says that there are none while some could not be read."""
    if facts.unread_tables and not facts.privileges:
        text = f"it is unknown what some rules do to packets of Services: {'; '.join(facts.unread_tables)}"
        yield warn("firewall", text, "run doctor again, or look at nft list ruleset and iptables-save")
    yield from _kube_proxy(facts)
    yield from _firewalls(facts)
    yield from _redirects(facts)


def _kube_proxy(facts: Facts) -> Iterator[Finding]:
    chains = sum(map(leftovers.is_of_iptables_mode, facts.chains))
    named = [table for table in facts.tables if table.name == leftover_tables.NAME]
    tables = [table for table in named if not leftover_tables.why_foreign(table)]
    stop = "stop that kube-proxy: run then removes them, once its own rules are in force; so does ipvsproxy cleanup"
    if chains:
        yield warn("kube-proxy", f"there are rules of its iptables mode ({chains} chains)", stop)
    if tables:
        yield warn("kube-proxy", f"there are tables of its nftables mode ({', '.join(map(str, tables))})", stop)
    for table in named:
        if why := leftover_tables.why_foreign(table):
            remedy = "it is left alone; if no program needs it, remove it with nft delete table"
            yield warn("kube-proxy", f"the table {table} has its name only: {why}", remedy)
    if not chains and not named and not facts.unread_tables:
        yield ok("kube-proxy", "no rules of another mode")


def _firewalls(facts: Facts) -> Iterator[Finding]:
    """The chains that refuse what they do not know."""
    closed = [(table, chain) for table in facts.tables if not _is_kube_proxys(table) for chain in table.closed]
    found = False
    for table, chain in closed:
        place = table.chains[chain]
        if place is None or place.hook not in _REFUSED or _is_overruled(facts, table, place.hook):
            continue
        found = True
        what = f"the chain {chain} of the table {table} (hook {place.hook})"
        text = f"{what} refuses {_REFUSED[place.hook]} unless a rule there accepts them"
        remedy = f"accept them there, such as all of the pods' interfaces, and clients' connections to Services{_hint(table)}"
        yield warn("firewall", text, remedy)
    if not found and not facts.unread_tables:
        yield ok("firewall", "no chain of another program refuses what it does not know")


def _is_kube_proxys(table: NftTable) -> bool:
    return table.name == leftover_tables.NAME and not leftover_tables.why_foreign(table)


def _is_overruled(facts: Facts, table: NftTable, hook: str) -> bool:
    """Whether a rule of ours accepts the packets before: KUBE-FORWARD does, in the variant of iptables that we use."""
    choice = facts.iptables_choice
    if choice is None or hook != "forward" or table.name != "filter" or _backend(facts) is Backend.NFTABLES:
        return False
    return (choice.variant is Variant.NF_TABLES) == (table.family in _OF_IPTABLES_NFT)


def _hint(table: NftTable) -> str:
    return " (by a zone of firewalld whose target is ACCEPT)" if table.name == "firewalld" else ""


def _redirects(facts: Facts) -> Iterator[Finding]:
    """Host ports that other programs send elsewhere, which is no fault: who wins, if a Service has the same port?"""
    found = {
        _describe(redirect): f"{table} {redirect.chain}"
        for table in facts.tables
        if not _is_kube_proxys(table)
        for redirect in table.redirects
        if not redirect.chain.startswith("KUBE-")
    }
    if not found:
        return
    shown = ", ".join(f"{ports} (chain {chain})" for ports, chain in list(found.items())[:_SHOWN])
    more = ", ..." if len(found) > _SHOWN else ""
    wins = (
        "a Service that has one of them at an address of this node wins"
        if _backend(facts) is Backend.NFTABLES
        else "they win over a Service that has one of them at an address of this node: give it another node port"
    )
    yield ok("redirects", f"other programs redirect {shown}{more}; {wins}")


def _describe(redirect: Redirect) -> str:
    names = {one.value: one.name for one in Protocol}
    if not redirect.port:
        return f"what reaches {redirect.chain}"
    return f"{names.get(redirect.protocol, 'port')} {redirect.port}"


def _backend(facts: Facts) -> Backend:
    return facts.backend.backend if facts.backend else Backend.IPTABLES
