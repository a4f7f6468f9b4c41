"""Drift: changes that people and other programs make to a node's kernel state with their own tools.

Each function gets the present state and a source of random numbers, and returns a description of its drift.
"""

import random
import re
from collections.abc import Callable, Mapping
from typing import Any

from ipvsproxy.kernel.network.routes import METRIC
from ipvsproxy.model.kernel import ROUTE_PROTOCOL
from tests.chaos import foreign, kernel_state
from tests.support import commands, golden_state

State = Mapping[str, Any]
Drift = Callable[[State, random.Random], str]

_OUR_ROUTES = ("dev", "lo", "table", "local", "protocol", str(ROUTE_PROTOCOL), "metric", str(METRIC))
_OPTIONS = {"TCP": "-t", "UDP": "-u", "SCTP": "--sctp-service"}


def run(*argv: str, stdin: str | None = None, check: bool = True) -> str:
    """Run a program, and return its command line. Raises RuntimeError if the program fails, unless ``check`` is false."""
    commands.run(*argv, stdin=stdin, check=check)
    return " ".join(argv)


def _pick_server(state: State, dice: random.Random) -> tuple[str, ...]:
    name = dice.choice(sorted(row for row in state["virtual_servers"] if row not in foreign.VIRTUAL_SERVERS))
    return _option(name)


def _option(server: str) -> tuple[str, ...]:
    protocol, address, *family = server.split()
    if protocol == "FWM":
        return ("-f", address, *(("-6",) if family == ["IPv6"] else ()))
    return _OPTIONS[protocol], address


def _pick_real_server(state: State, dice: random.Random) -> tuple[str, ...]:
    rows = sorted(row for row, value in state["real_servers"].items() if row not in foreign.REAL_SERVERS and value["weight"])
    server, _, address = dice.choice(rows).partition(" -> ")
    return (*_option(server), "-r", address)


def clear_ipvs(_state: State, _dice: random.Random) -> str:
    """Clear the whole IPVS table, then add the virtual servers of the simulated other program again."""
    done = run("ipvsadm", "-C")
    foreign.add(virtual_servers_only=True)
    return done


def remove_virtual_server(state: State, dice: random.Random) -> str:
    """Delete a virtual server."""
    return run("ipvsadm", "-D", *_pick_server(state, dice))


def remove_ipv6_servers(state: State, _dice: random.Random) -> str:
    """Delete all virtual servers of IPv6."""
    names = [name for name in state["virtual_servers"] if "[" in name or name.endswith(" IPv6")]
    run("ipvsadm", "--restore", stdin="".join(f"-D {' '.join(_option(name))}\n" for name in names))
    return f"delete {len(names)} virtual servers of IPv6"


def remove_real_server(state: State, dice: random.Random) -> str:
    """Delete a real server."""
    return run("ipvsadm", "-d", *_pick_real_server(state, dice))


def change_weight(state: State, dice: random.Random) -> str:
    """Give a real server another weight."""
    return run("ipvsadm", "-e", *_pick_real_server(state, dice), "-m", "-w", dice.choice(["0", "5"]))


def change_method(state: State, dice: random.Random) -> str:
    """Change the forwarding method of a real server, or add an extra real server.

    With ``-g`` and ``-i``, ipvsadm uses the virtual server's port for the real server, whatever port ``-r`` names. If the two
    ports differ, ipvsadm does not edit the real server, but adds another real server.
    """
    *server, _, real_server = _pick_real_server(state, dice)
    is_same_port = server[1].rpartition(":")[2] == real_server.rpartition(":")[2]
    return run("ipvsadm", "-e" if is_same_port else "-a", *server, "-r", real_server, dice.choice(["-g", "-i"]))


def change_scheduler(state: State, dice: random.Random) -> str:
    """Give a virtual server another scheduler."""
    return run("ipvsadm", "-E", *_pick_server(state, dice), "-s", "wlc")


def add_virtual_server_on_ours(_state: State, _dice: random.Random) -> str:
    """Add a virtual server on a Service address of our device; the address makes the virtual server count as ours."""
    return run("ipvsadm", "-A", "-t", "10.96.0.10:4444", "-s", "rr")


def pick_set(state: State, dice: random.Random) -> tuple[str, list[str]]:
    """A random non-empty set, and the entries of this set."""
    name, content = dice.choice(sorted((name, one) for name, one in state["ipsets"].items() if one["members"]))
    return name, content["members"]


def flush_set(state: State, dice: random.Random) -> str:
    """Flush a set."""
    return run("ipset", "flush", pick_set(state, dice)[0])


def flush_all_sets(_state: State, _dice: random.Random) -> str:
    """Flush all of our sets."""
    names = [line for line in commands.run("ipset", "list", "-n").split() if line.startswith("KUBE-")]
    run("ipset", "restore", stdin="".join(f"flush {name}\n" for name in names))
    return "ipset flush of each KUBE set"


def remove_entry(state: State, dice: random.Random) -> str:
    """Remove an entry from a set."""
    name, members = pick_set(state, dice)
    return run("ipset", "del", name, dice.choice(members))


def add_entry(_state: State, dice: random.Random) -> str:
    """Add a wrong entry to a set."""
    return run("ipset", "add", "KUBE-CLUSTER-IP", f"10.96.9.{dice.randrange(200)},tcp:80")


def destroy_sets(_state: State, _dice: random.Random) -> str:
    """Destroy our sets, and the rules that refer to them."""
    for program in ("iptables", "ip6tables"):
        for table in ("nat", "filter"):
            run(program, "-t", table, "-F")
            run(program, "-t", table, "-X", check=False)
    names = [line for line in commands.run("ipset", "list", "-n").split() if line.startswith("KUBE-")]
    # If the program has already written its rules again, sets in use by these rules cannot be destroyed.
    run("ipset", "restore", stdin="".join(f"destroy {name}\n" for name in names), check=False)
    _put_foreign_rules_back()
    return "iptables -F, -X; ipset destroy of each KUBE set"


def _put_foreign_rules_back() -> None:
    run("iptables-restore", "--noflush", stdin=foreign.RULES)


def _pick_chain(state: State, dice: random.Random) -> list[str]:
    chains: list[str] = sorted(name for name, rules in state["iptables"].items() if rules and "/KUBE-" in name)
    return dice.choice(chains).split("/")


def flush_chain(state: State, dice: random.Random) -> str:
    """Flush a chain."""
    label, table, chain = _pick_chain(state, dice)
    return run(_program(label), "-t", table, "-F", chain)


def remove_rule(state: State, dice: random.Random) -> str:
    """Remove a rule of a chain."""
    label, table, chain = _pick_chain(state, dice)
    return run(_program(label), "-t", table, "-D", chain, "1")


def add_rule(_state: State, _dice: random.Random) -> str:
    """Add a surplus rule to one of our chains."""
    return run("iptables", "-t", "nat", "-I", "KUBE-SERVICES", "-d", "192.0.2.99", "-j", "RETURN")


def _pick_jump(state: State, dice: random.Random) -> tuple[str, str, str]:
    label, table, source = dice.choice(sorted(name for name in state["iptables"] if "/KUBE-" not in name)).split("/")
    return label, table, dice.choice(state["iptables"][f"{label}/{table}/{source}"])


def remove_jump(state: State, dice: random.Random) -> str:
    """Remove a jump to our chains."""
    label, table, rule = _pick_jump(state, dice)
    run(f"{_program(label)}-restore", "--noflush", stdin=f"*{table}\n{rule.replace('-A', '-D', 1)}\nCOMMIT\n")
    return f"{_program(label)} -t {table} {rule.replace('-A', '-D', 1)}"


def move_jump(_state: State, _dice: random.Random) -> str:
    """Move a jump behind a rule of another program."""
    text = commands.run("iptables-save", "-t", "nat")
    rule = next((line for line in text.splitlines() if line.startswith("-A OUTPUT ") and "KUBE-" in line), "")
    run("iptables-restore", "--noflush", stdin=f"*nat\n{rule.replace('-A', '-D', 1)}\n{rule}\nCOMMIT\n")
    return "a jump of nat/OUTPUT is moved to the end"


def is_jump_in_place() -> bool:
    """Whether our jump precedes the jump of another program in nat/OUTPUT."""
    text = commands.run("iptables-save", "-t", "nat")
    rules = [line for line in text.splitlines() if line.startswith("-A OUTPUT ")]
    ours = [place for place, line in enumerate(rules) if "KUBE-" in line]
    theirs = [place for place, line in enumerate(rules) if line.endswith(foreign.JUMP)]
    return not theirs or (bool(ours) and max(ours) < min(theirs))


def reload_firewall(_state: State, _dice: random.Random) -> str:
    """Flush all tables, and write only the rules of other programs again."""
    for program in ("iptables", "ip6tables"):
        for table in ("nat", "filter"):
            run(f"{program}-restore", stdin=f"*{table}\nCOMMIT\n")
    _put_foreign_rules_back()
    return "iptables-restore of tables without our chains"


def remove_address(state: State, dice: random.Random) -> str:
    """Remove a Service address from our device, or the local route of the address."""
    routes = sorted(golden_state.read_routes())
    if routes:
        return run("ip", "route", "del", "local", dice.choice(routes).split()[1], *_OUR_ROUTES)
    address = dice.choice(sorted(row for row in state["addresses"] if row != "(device)"))
    return run("ip", "address", "del", address, "dev", "kube-ipvs0")


def add_address(_state: State, dice: random.Random) -> str:
    """Add a surplus address to our device."""
    return run("ip", "address", "add", f"10.96.9.{dice.randrange(1, 200)}/32", "dev", "kube-ipvs0")


def add_route(_state: State, dice: random.Random) -> str:
    """Add a surplus local route that looks like one of our routes."""
    return run("ip", "route", "replace", "local", f"10.96.9.{dice.randrange(1, 200)}", *_OUR_ROUTES)


def lose_routes(_state: State, _dice: random.Random) -> str:
    """Make the kernel remove all IPv4 routes on lo, including our routes; the kernel sends no notification."""
    run("ip", "address", "del", "127.0.0.1/8", "dev", "lo")
    return run("ip", "address", "add", "127.0.0.1/8", "dev", "lo", "scope", "host")


def remove_device(_state: State, _dice: random.Random) -> str:
    """Remove our device."""
    return run("ip", "link", "del", "kube-ipvs0")


def change_sysctl(_state: State, dice: random.Random) -> str:
    """Change a kernel setting; a setting of direct return is changed only while direct return is on."""
    paths = ["net/ipv4/vs/conntrack", "net/ipv4/vs/expire_nodest_conn", "net/ipv4/vs/expire_quiescent_template"]
    if ("tunl0", "up") in kernel_state.read_tunnels():
        paths += kernel_state.SYSCTLS_OF_TUNNELS
    path = dice.choice(paths)
    with open(f"/proc/sys/{path}", "r+") as file:  # noqa: PTH123 - one call of open for reading and writing
        value = "1" if file.read().strip() == "0" else "0"
        file.seek(0)
        file.write(value)
    return f"sysctl {path}={value}"


SPOILED: Mapping[Drift, tuple[str, ...]] = {
    **dict.fromkeys(
        (
            clear_ipvs,
            remove_virtual_server,
            remove_ipv6_servers,
            remove_real_server,
            change_weight,
            change_method,
            change_scheduler,
            add_virtual_server_on_ours,
        ),
        ("virtual_servers",),
    ),
    **dict.fromkeys((flush_set, flush_all_sets, remove_entry, add_entry), ("ipsets",)),
    destroy_sets: ("ipsets", "iptables"),
    **dict.fromkeys((flush_chain, remove_rule, add_rule, remove_jump, move_jump, reload_firewall), ("iptables",)),
    **dict.fromkeys((remove_address, add_address, add_route, lose_routes, remove_device), ("addresses",)),
    change_sysctl: ("sysctls",),
}
"""The sections of the state that each drift affects."""
DRIFTS = tuple(SPOILED)


def _program(label: str) -> str:
    return re.sub("v4|v6", lambda match: {"v4": "iptables", "v6": "ip6tables"}[match[0]], label)
