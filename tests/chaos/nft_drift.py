"""Drift of rules and sets in nftables, caused with ``nft``: an equivalent of each kind of drift in iptables and ipset.

The argument ``state`` is the present kernel state in the form of kube-proxy's recorded state, as in ``drift``.
"""

import json
import random
from collections.abc import Mapping

from tests.chaos import drift, foreign
from tests.support import nft_state

TABLE = nft_state.TABLE


def _nft(*words: str, check: bool = True) -> str:
    return drift.run("nft", *words, check=check)


def flush_set(state: drift.State, dice: random.Random) -> str:
    """Flush a set."""
    name = drift.pick_set(state, dice)[0]
    return _nft("flush", _kind(state, name), *TABLE, name)


def _kind(state: drift.State, name: str) -> str:
    return "map" if "skbinfo" in state["ipsets"][name]["options"] else "set"


def flush_all_sets(state: drift.State, _dice: random.Random) -> str:
    """Flush all of our sets."""
    for name in state["ipsets"]:
        _nft("flush", _kind(state, name), *TABLE, name, check=False)
    return "nft flush of each set"


def remove_entry(state: drift.State, dice: random.Random) -> str:
    """Remove an entry from a set."""
    objects = [one for kind, one in nft_state.listing() if kind == "set" and one.get("elem")]
    one = dice.choice(sorted(objects, key=lambda item: str(item["name"])))
    element = min(one["elem"], key=json.dumps)
    fields = element["concat"] if isinstance(element, dict) else [element]
    return _nft("delete", "element", *TABLE, one["name"], f"{{ {' . '.join(map(str, fields))} }}")


def add_entry(_state: drift.State, dice: random.Random) -> str:
    """Add a wrong entry to a set."""
    return _nft("add", "element", *TABLE, "KUBE-CLUSTER-IP", f"{{ 10.96.9.{dice.randrange(200)} . tcp . 80 }}")


def delete_table(_state: drift.State, _dice: random.Random) -> str:
    """Delete our table."""
    return _nft("delete", "table", *TABLE)


def _pick_chain(state: drift.State, dice: random.Random, *, is_ours: bool) -> str:
    chains = sorted(name for name, rules in state["iptables"].items() if rules and ("/KUBE-" in name) is is_ours)
    return nft_state.chain_name(*dice.choice(chains).split("/"))


def flush_chain(state: drift.State, dice: random.Random) -> str:
    """Flush a chain."""
    return _nft("flush", "chain", *TABLE, _pick_chain(state, dice, is_ours=True))


def _remove_first_rule(chain: str) -> str:
    handle = next(one["handle"] for kind, one in nft_state.listing() if kind == "rule" and one["chain"] == chain)
    return _nft("delete", "rule", *TABLE, chain, "handle", str(handle))


def remove_rule(state: drift.State, dice: random.Random) -> str:
    """Remove a rule of a chain."""
    return _remove_first_rule(_pick_chain(state, dice, is_ours=True))


def add_rule(_state: drift.State, _dice: random.Random) -> str:
    """Add a surplus rule to one of our chains."""
    return _nft("insert", "rule", *TABLE, "IPv4-nat-KUBE-SERVICES", "ip", "daddr", "192.0.2.99", "return")


def remove_jump(state: drift.State, dice: random.Random) -> str:
    """Remove a jump to our chains."""
    return _remove_first_rule(_pick_chain(state, dice, is_ours=False))


def change_rule(_state: drift.State, _dice: random.Random) -> str:
    """Replace a rule by a rule that does something else but has the same comment."""
    chain = "IPv4-nat-KUBE-SERVICES"
    rule = next(one for kind, one in nft_state.listing() if kind == "rule" and one["chain"] == chain)
    text = json.dumps(rule["comment"])
    return _nft(
        "replace", "rule", *TABLE, chain, "handle", str(rule["handle"]), "ip", "daddr", "192.0.2.98", "accept", "comment", text
    )


def flush_ruleset(_state: drift.State, _dice: random.Random) -> str:
    """Flush all tables, as the reload of a firewall does; after the flush, write the tables of the other programs again."""
    done = _nft("flush", "ruleset")
    foreign.put_back_after_flush()
    return done


TWINS: Mapping[drift.Drift, drift.Drift] = {
    drift.flush_set: flush_set,
    drift.flush_all_sets: flush_all_sets,
    drift.remove_entry: remove_entry,
    drift.add_entry: add_entry,
    drift.destroy_sets: delete_table,
    drift.flush_chain: flush_chain,
    drift.remove_rule: remove_rule,
    drift.add_rule: add_rule,
    drift.remove_jump: remove_jump,
    drift.move_jump: change_rule,
    drift.reload_firewall: flush_ruleset,
}
"""Maps each kind of drift in iptables or ipset to its equivalent in nftables. If the backend is nftables, the chaos suite makes
the equivalent."""
