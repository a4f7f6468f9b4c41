"""Reads and restores the kernel's state in the current namespace; the state has the form of the recordings.

``read_state`` returns the state as operators see it (ipvsadm, ipset, iptables-save, ip) in the form of ``tests/golden/expected``.
``restore_state`` puts a recorded state into the kernel, as if kube-proxy had left it. Both functions use the operators' tools,
never ipvsproxy's drivers, so that a bug in ipvsproxy cannot affect both sides of a comparison.
"""

import json
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ipvsproxy.model.kernel import ROUTE_PROTOCOL
from ipvsproxy.model.net import Family
from ipvsproxy.model.rules import Backend
from tests.support import golden_fixtures, nft_state, scope_rows
from tests.support.commands import run

State = dict[str, Any]

KERNEL_SECTIONS = ("virtual_servers", "real_servers", "ipsets", "iptables", "addresses", "sysctls")
TIMEOUTS = "ipvs timeouts tcp/tcpfin/udp"
HOST_CONNTRACK_MAX = "net.netfilter.nf_conntrack_max"

_PROTOCOL_OPTIONS = {"-t": "TCP", "-u": "UDP", "--sctp-service": "SCTP"}
_PROTOCOL_OF = {name: option for option, name in _PROTOCOL_OPTIONS.items()}
# The kernel itself chooses the values of these options, and the values differ at every boot.
_SET_OPTIONS_OF_THE_KERNEL = frozenset({"hashsize", "bucketsize", "initval"})
_BUILT_IN_TABLES = ("nat", "filter", "mangle")


def read_state(sections: Collection[str] = KERNEL_SECTIONS, backend: Backend = Backend.IPTABLES) -> State:
    """Read these sections from the kernel, in the form of a recording; ``virtual_servers`` includes ``real_servers``.

    The sets and rules are read from ``backend``.
    """
    state: State = {}
    if "virtual_servers" in sections:
        state["virtual_servers"], state["real_servers"] = parse_ipvs(run("ipvsadm", "--save", "--numeric"))
    if backend is Backend.NFTABLES:
        objects = nft_state.listing()
        state |= {"ipsets": nft_state.read_sets(objects)} if "ipsets" in sections else {}
        state |= {"iptables": nft_state.read_rules(objects)} if "iptables" in sections else {}
    elif "ipsets" in sections:
        state["ipsets"] = parse_sets(run("ipset", "save"))
    if "iptables" in sections and backend is not Backend.NFTABLES:
        state["iptables"] = {}
        for label in ("v4", "v6"):
            state["iptables"] |= parse_rules(label, _saved_rules(label))
    if "addresses" in sections:
        state["addresses"] = _read_addresses()
    if "sysctls" in sections:
        state["sysctls"] = _read_sysctls()
    return state


def _saved_rules(label: str) -> str:
    """The rules of the iptables variant that has rules in this namespace.

    A legacy table that was once used exists even without rules, so its existence does not show that the legacy variant has rules.
    """
    program, listing = ("iptables", "ip_tables_names") if label == "v4" else ("ip6tables", "ip6_tables_names")
    path = Path("/proc/net") / listing
    if path.exists() and path.read_text():
        saved = run(f"{program}-legacy-save")
        if not Path("/sys/module/nf_tables").exists() or re.search(r"^(-A|:.* - )", saved, re.MULTILINE):
            return saved
    return run(f"{program}-nft-save")


def parse_ipvs(text: str) -> tuple[State, State]:
    """Virtual and real servers from the output of ``ipvsadm --save --numeric``."""
    virtual_servers: State = {}
    real_servers: State = {}
    for line in text.splitlines():
        verb, protocol, address, *rest = line.split()
        if protocol == "-f":  # the row has a decimal firewall mark instead of an address
            key = scope_rows.server_row(int(address), Family.IPV6 if rest[:1] == ["-6"] else Family.IPV4)
            rest = rest[1:] if rest[:1] == ["-6"] else rest
        else:
            key = f"{_PROTOCOL_OPTIONS[protocol]} {address}"
        options = dict(zip(rest[0::2], rest[1::2], strict=False))
        if verb == "-A":
            virtual_servers[key] = {
                "scheduler": options["-s"],
                "persistent": int(options.get("-p", 0)),
                "netmask": options.get("-M", "default"),
                "flags": options.get("-b", ""),
            }
        else:
            forward = {"-m": "masq", "-g": "route", "-i": "tunnel"}[rest[2]]
            real_servers[f"{key} -> {options['-r']}"] = {"forward": forward, "weight": int(rest[rest.index("-w") + 1])}
    return virtual_servers, real_servers


def parse_sets(text: str) -> State:
    """Parses the output of ``ipset save``, and keeps only the sets whose name begins with ``KUBE-``."""
    sets: State = {}
    for line in text.splitlines():
        verb, name, *rest = line.split()
        if not name.startswith("KUBE-"):
            continue
        if verb == "create":
            has_marks = rest[-1] == "skbinfo"  # ``skbinfo`` is the only option without a value
            pairs = zip(rest[1::2], rest[2::2], strict=not has_marks)
            options = " ".join(f"{option} {value}" for option, value in pairs if option not in _SET_OPTIONS_OF_THE_KERNEL)
            options += " skbinfo" if has_marks else ""
            sets[name] = {"type": rest[0], "options": options, "members": []}
        else:
            sets[name]["members"].append(" ".join(rest))
    for content in sets.values():
        content["members"].sort()
    return sets


def parse_rules(label: str, text: str) -> dict[str, list[str]]:
    """All rules of chains whose name begins with ``KUBE-``, and the jumps to them, from the output of iptables-save."""
    chains: dict[str, list[str]] = {}
    table = ""
    for line in text.splitlines():
        if line.startswith("*"):
            table = line[1:]
        elif line.startswith(":KUBE-"):
            chains[f"{label}/{table}/{line[1:].split()[0]}"] = []
        elif line.startswith("-A "):
            chain = line.split()[1]
            if chain.startswith("KUBE-") or " -j KUBE-" in line:
                chains.setdefault(f"{label}/{table}/{chain}", []).append(line)
    return chains


def _read_addresses() -> State:
    listing = run("ip", "-details", "-json", "address", "show", "dev", "kube-ipvs0", check=False)
    if not listing:
        return {}
    (device,) = json.loads(listing)
    addresses: State = {
        "(device)": {"flags": ",".join(device["flags"]), "kind": device["linkinfo"]["info_kind"], "mtu": str(device["mtu"])}
    }
    for address in device["addr_info"]:
        addresses[f"{address['local']}/{address['prefixlen']}"] = {"scope": address["scope"]}
    return addresses


def read_routes() -> State:
    """Our local routes, formatted as rows such as ``route 10.96.0.1/32``."""
    rows: State = {}
    for option, bits in (("-4", 32), ("-6", 128)):
        listing = run("ip", option, "route", "show", "table", "local", "protocol", str(ROUTE_PROTOCOL))
        rows |= {f"route {line.split()[1]}/{bits}": {} for line in listing.splitlines()}
    return rows


def _sysctl_path(name: str) -> Path:
    return Path("/proc/sys") / name.replace(".", "/")


def _sysctls() -> list[str]:
    """The names of the recorded kernel settings."""
    return [name for name in golden_fixtures.recording("default", "P0")["sysctls"] if name != TIMEOUTS]


def _read_sysctls() -> State:
    values: State = {name: _sysctl_path(name).read_text().strip() for name in _sysctls() if _sysctl_path(name).exists()}
    values[TIMEOUTS] = run("ipvsadm", "-L", "--timeout").partition(":")[2].strip()
    return values


def restore_state(expected: Mapping[str, Any]) -> None:
    """Put a recorded state into the kernel, after clearing the tables of our namespace.

    Raises:
        RuntimeError: a tool refused the state.
    """
    clear_state()
    run("ipvsadm", "--restore", stdin="".join(_server_lines(expected["virtual_servers"], expected["real_servers"])))
    restore_rules(expected)
    commands = ["link add kube-ipvs0 type dummy"]
    commands += [f"address add {address} dev kube-ipvs0" for address in expected["addresses"] if address != "(device)"]
    run("ip", "-batch", "-", stdin="\n".join(commands) + "\n")
    sysctls = dict(expected["sysctls"])
    run("ipvsadm", "--set", *sysctls.pop(TIMEOUTS).split())
    _write_sysctls(sysctls)


def restore_rules(expected: Mapping[str, Any]) -> None:
    """Put the sets and rules of a recorded state into a kernel that has no ipsets and no rules of iptables.

    Raises:
        RuntimeError: a tool refused the state.
    """
    run("ipset", "restore", stdin="".join(_set_lines(expected["ipsets"])))
    for label, program in (("v4", "iptables-restore"), ("v6", "ip6tables-restore")):
        run(program, "--noflush", stdin=_rule_text(label, expected["iptables"]))


def unprepare_sysctls() -> None:
    """Give the sysctls the values that they have on a node without a proxy.

    A test then notices each sysctl that the program does not set.
    """
    values = {name: "0" for name in _sysctls() if name.startswith(("net.ipv4.vs.", "net.ipv4.conf."))}
    values |= {
        "net.ipv4.vs.conn_reuse_mode": "1",
        "net.ipv4.ip_forward": "0",
        "net.netfilter.nf_conntrack_tcp_timeout_established": "432000",
    }
    values |= {"net.netfilter.nf_conntrack_tcp_timeout_close_wait": "60", HOST_CONNTRACK_MAX: "65536"}
    _write_sysctls(values)
    run("ipvsadm", "--set", "900", "120", "300")


def _write_sysctls(values: Mapping[str, str]) -> None:
    for name, value in values.items():
        # In other network namespaces than the host's own, this setting is read-only, because it applies to the whole host.
        if name != HOST_CONNTRACK_MAX or _sysctl_path(name).stat().st_mode & 0o200:
            _sysctl_path(name).write_text(value)


def clear_state() -> None:
    """Remove all that a proxy programs in this namespace: virtual servers, legacy and nft rules, sets, kube-ipvs0, routes."""
    run("ipvsadm", "--clear")
    for program, listing in (("iptables-legacy-restore", "ip_tables_names"), ("ip6tables-legacy-restore", "ip6_tables_names")):
        path = Path("/proc/net") / listing
        present = path.read_text().split() if path.exists() else ()
        if tables := [name for name in _BUILT_IN_TABLES if name in present]:
            run(program, stdin="".join(f"*{name}\nCOMMIT\n" for name in tables))
    if Path("/sys/module/nf_tables").exists():
        run("nft", "flush", "ruleset")
    run("ipset", "destroy")
    flush = f"route flush table local protocol {ROUTE_PROTOCOL}\n"
    run("ip", "-4", "-force", "-batch", "-", stdin=f"link delete kube-ipvs0\n{flush}", check=False)
    run("ip", "-6", "-force", "-batch", "-", stdin=flush, check=False)


def _set_lines(sets: Mapping[str, Any]) -> Iterable[str]:
    for name, content in sets.items():
        yield f"create {name} {content['type']} {content['options']}\n"
        for member in content["members"]:
            yield f"add {name} {member}\n"


def _server_lines(virtual_servers: Mapping[str, Any], real_servers: Mapping[str, Any]) -> Iterable[str]:
    for key, server in virtual_servers.items():
        protocol, address = key.split()
        line = f"-A {_PROTOCOL_OF[protocol]} {address} -s {server['scheduler']}"
        line += f" -p {server['persistent']}" if server["persistent"] else ""
        line += f" -b {server['flags']}" if server["flags"] else ""
        yield line + "\n"
    for key, server in real_servers.items():
        virtual, _, address = key.partition(" -> ")
        protocol, virtual_address = virtual.split()
        yield f"-a {_PROTOCOL_OF[protocol]} {virtual_address} -r {address} -m -w {server['weight']}\n"


def _rule_text(label: str, iptables: Mapping[str, list[str]]) -> str:
    lines: list[str] = []
    for table in _BUILT_IN_TABLES:
        chains = {key.split("/")[2]: rules for key, rules in iptables.items() if key.startswith(f"{label}/{table}/")}
        lines += [f"*{table}", *(f":{chain} - [0:0]" for chain in chains if chain.startswith("KUBE-"))]
        for rules in chains.values():
            lines += rules
        lines.append("COMMIT")
    return "\n".join(lines) + "\n"


def differences(
    expected: Mapping[str, Any], actual: Mapping[str, Any], sections: Iterable[str]
) -> dict[str, list[tuple[str, str, Any, Any]]]:
    """The rows that differ, by section; each difference is a tuple (row, kind, expected, actual).

    Each set and each chain is a section.
    """
    chosen = tuple(sections)
    first, second = (_rows({name: state[name] for name in chosen if name in state}) for state in (expected, actual))
    differing = {name: list(_different(first.get(name, {}), second.get(name, {}))) for name in sorted({*first, *second})}
    return {name: rows for name, rows in differing.items() if rows}


_ORDER = "(order)"


def _rows(state: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The rows of each section.

    A chain has a row for the chain itself, a row for each rule with the number of its occurrences, and a row for the order of its
    rules.
    """
    found: dict[str, dict[str, Any]] = {}
    for section, value in state.items():
        if section == "ipsets":
            for name, one in value.items():
                found[f"ipset {name}"] = dict.fromkeys(one["members"], True) | {"(set)": f"{one['type']} {one['options']}"}
        elif section == "iptables":
            for chain, rules in value.items():
                found[f"iptables {chain}"] = {"(chain)": True, **Counter(rules), _ORDER: rules}
        else:
            found[section] = value
    return found


def _different(expected: Mapping[str, Any], actual: Mapping[str, Any]) -> Iterator[tuple[str, str, Any, Any]]:
    for row in sorted({*expected, *actual}):
        one, other = expected.get(row), actual.get(row)
        if row == _ORDER:
            if one and other and one != other and sorted(one) == sorted(other):
                yield row, "different", one, other
        elif row not in actual:
            yield row, "missing", one, None
        elif row not in expected:
            yield row, "extra", None, other
        elif one != other:
            yield row, "different", one, other
