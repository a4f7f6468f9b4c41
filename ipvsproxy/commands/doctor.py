"""``ipvsproxy doctor``: checks everything that ipvsproxy needs on this node. Each check reports one finding, with its remedy."""

import asyncio
import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence

from ipvsproxy.commands import inspection, service_checks
from ipvsproxy.commands.inspection import CommandAnswer, Document
from ipvsproxy.commands.service_checks import Finding, Level, fail, note, ok, warn
from ipvsproxy.config.settings import Config
from ipvsproxy.daemon.base.cannot_start import CannotStartError
from ipvsproxy.daemon.sources import source as sources
from ipvsproxy.kernel import backends, host, rivals
from ipvsproxy.kernel.base.modules import ModuleState
from ipvsproxy.kernel.facts import Facts, gather
from ipvsproxy.kernel.iptables.iptables_tables import HOST_PORTS_REMEDY
from ipvsproxy.model.kernel import PROMPT_REUSE, Sysctl
from ipvsproxy.model.kind import counted
from ipvsproxy.model.net import Family
from ipvsproxy.model.rules import Backend
from ipvsproxy.model.virtual_servers import FirewallMark
from ipvsproxy.reconcile.removal import leftovers
from ipvsproxy.reconcile.virtual_servers import ownership
from ipvsproxy.store.objects import Store
from ipvsproxy.translate import skeleton, view
from ipvsproxy.translate.translation_settings import Binding, TrafficScopes

FEW = 3
"""The largest number of names that a sentence lists."""

_FORWARDING = "net/ipv6/conf/all/forwarding"
_LOOPBACK_IPV6 = "net/ipv6/conf/lo/disable_ipv6"
_BRIDGES = "net/bridge/bridge-nf-call-iptables"
_BRIDGES_IPV6 = "net/bridge/bridge-nf-call-ip6tables"
_UNCUT = "net/ipv4/ip_no_pmtu_disc"
_OF_IPVS = "net/ipv4/vs/"
_REUSE = "net/ipv4/vs/conn_reuse_mode"
_TRACKED_TCP = "net/netfilter/nf_conntrack_tcp_timeout_established"
_NO_ANSWER = "pods that reach a pod of their own node through a Service get no answer where they are on a Linux bridge"
_BAD: Mapping[str, tuple[str, str]] = {
    "net/ipv4/conf/all/rp_filter": (
        "1",
        "set it to 2 or 0: answers that come back by another interface than the kernel expects are dropped",
    ),
    _BRIDGES: ("0", f"set it to 1: {_NO_ANSWER}"),
    _REUSE: ("0", "set it to 1: with 0, new connections from reused source ports go to real servers that are being removed"),
}
"""Sysctls that ipvsproxy does not write; each path is mapped to the value that stops traffic, and to the remedy."""
OLDEST = (4, 18)
"""The oldest kernel in docs/compatibility.md: the kernel of RHEL 8."""


def judge(facts: Facts, desired: Iterable[Sysctl], config: Config) -> Iterator[Finding]:
    """All findings about a host; ``desired`` are the sysctls that ``run`` would set."""
    yield from _kernel(facts)
    yield from _modules(facts, config)
    yield from _sysctls(facts, desired)
    yield from _advice(facts, config)
    yield from _large_datagrams(facts, config)
    for text in config.warnings([family for family in Family if family not in facts.unserved]):
        yield warn("configuration", text, "change the field, unless this is intended")
    yield from _other_backend(facts, config)
    yield from _iptables(facts, config)
    yield from _kube_proxy(facts)
    yield from service_checks.judge_firewalls(facts)
    yield from _virtual_servers(facts, config)
    yield from _binding(facts, config)
    yield from _marks(facts, config)
    yield from _ports(facts, config)
    yield from _timeouts(facts)


def _kernel(facts: Facts) -> Iterator[Finding]:
    yield from (fail("privileges", one.what, one.remedy) for one in facts.privileges)
    if not facts.privileges:
        yield ok("privileges", "this process may change the network")
    if facts.version < OLDEST:
        remedy = "use a newer kernel: it is not known what this one lacks"
        yield warn("kernel", f"Linux {facts.release} is older than {'.'.join(map(str, OLDEST))}", remedy)
    else:
        yield ok("kernel", f"Linux {facts.release}")
    for name, without in facts.lacks:
        yield warn("kernel", f"it lacks {name}, so {without}", "use a newer kernel if that matters to you")
    if not facts.features:
        yield ok("ipvs", "the kernel has IPVS with connection tracking")
    elif facts.modules.get("ip_vs") is ModuleState.LOADABLE:
        yield ok("ipvs", "the kernel has no IPVS yet; run and --init-only load the module ip_vs")
    else:
        yield from (fail("ipvs", one.what, one.remedy) for one in facts.features)
    if facts.unreadable and not facts.privileges and not facts.features:
        yield fail("ipvs", f"the kernel cannot be read: {facts.unreadable}", "remove the cause that the message names")


def _modules(facts: Facts, config: Config) -> Iterator[Finding]:
    scheduler = f"ip_vs_{config.translation.scheduler}"
    asked = dict(facts.modules)
    servers = (facts.observation.virtual_servers or {}).values()
    if any(one.settings.scheduler == config.translation.scheduler for one in servers):
        asked.pop(scheduler, None)
    by_state = {state: [name for name, one in asked.items() if one is state] for state in ModuleState}
    install = "install the kernel's modules package, or use a kernel that has them"
    mount = "mount the host's /lib/modules, or run modprobe there"
    for state, make, text, remedy in (
        (ModuleState.MISSING, fail, "this kernel lacks", install),
        (ModuleState.UNKNOWN, warn, "it is unknown whether this kernel has", mount),
        (ModuleState.LOADABLE, ok, "run loads", ""),
    ):
        if names := by_state[state]:
            yield make("modules", f"{text} {counted(len(names), 'module')} ({_some(names, ', ')})", remedy)
    there = len(by_state[ModuleState.LOADED]) + len(by_state[ModuleState.BUILT_IN])
    yield ok("modules", f"{counted(there, 'module')} loaded or built in")


def _sysctls(facts: Facts, desired: Iterable[Sysctl]) -> Iterator[Finding]:
    shared = view.shared_tunnel(facts.observation.interface_addresses or ())
    written = (item for item in desired if not (item.for_tunnels and shared))
    settings = {item.path: item for item in written if not (facts.features and item.path.startswith(_OF_IPVS))}
    observed = {path: facts.sysctls[path] for path in settings if path in facts.sysctls}
    differing = [
        f"{path} is {value}, desired {settings[path].value}"
        for path, value in observed.items()
        if not settings[path].is_met_by(value)
    ]
    if absent := [path for path in settings if path not in observed]:
        yield note(
            "sysctl",
            f"there is no {', '.join(absent)}",
            "run goes on without; a module that is not loaded may have it, or a newer kernel",
        )
    if differing and facts.sysctls_writable:
        yield note("sysctl", _some(differing), "run sets this" + ("; plan names all" if differing[FEW:] else ""))
    elif differing:
        remedy = "mount /proc/sys writable (privileged: true), or set them on the host"
        yield fail("sysctl", f"{'; '.join(differing)}; this process cannot write them", remedy)
    yield ok("sysctl", f"{counted(len(observed) - len(differing), 'kernel setting')} as desired")


def _has_ipv6(facts: Facts) -> bool:
    """Whether this host has IPv6 addresses that ipvsproxy can serve."""
    addresses = facts.observation.interface_addresses or ()
    return Family.IPV6 not in facts.unserved and any(
        one.address.family is Family.IPV6 and not one.address.is_loopback and not one.address.is_link_local_v6
        for one in addresses
    )


def _advice(facts: Facts, config: Config) -> Iterator[Finding]:
    forwarding = facts.sysctls.get(_FORWARDING)
    if _has_ipv6(facts) and forwarding == "0":
        needs_it = any(network.family is Family.IPV6 for network in config.translation.cluster_networks)
        yield (fail if needs_it else warn)(
            "sysctl",
            f"{_FORWARDING} is 0, and this host has IPv6 addresses",
            "set it to 1 if the cluster uses IPv6: otherwise no IPv6 Service leads to another node or to a pod",
        )
    elif forwarding is not None:
        yield ok("sysctl", f"{_FORWARDING} is {forwarding}")
    if _BRIDGES not in facts.sysctls and facts.bridges:
        names = ", ".join(facts.bridges)
        remedy = f"run modprobe br_netfilter on the host and set {_BRIDGES} to 1: {_NO_ANSWER}"
        yield warn("sysctl", f"this host has bridges ({names}), and br_netfilter is not loaded", remedy)
    for path, (bad, remedy) in _BAD.items():
        value = facts.sysctls.get(path)
        if value is not None and (path != _REUSE or facts.version >= PROMPT_REUSE):
            yield warn("sysctl", f"{path} is {value}", remedy) if value == bad else ok("sysctl", f"{path} is {value}")


def _large_datagrams(facts: Facts, config: Config) -> Iterator[Finding]:
    """Whether the kernel drops UDP datagrams that are larger than the MTU; docs/running.md has the measurement."""
    remedy = "let the programs send smaller datagrams, or use TCP"
    if _has_ipv6(facts) and facts.bridges and facts.sysctls.get(_BRIDGES_IPV6) == "1":
        text = f"UDP datagrams over the MTU from pods on bridges ({', '.join(facts.bridges)}) do not reach IPv6 Services: "
        yield warn("mtu", f"{text}{_BRIDGES_IPV6} is 1", f"{remedy}; with 0 they arrive, but {_NO_ANSWER}")
    first = "all of a socket" if config.translation.binding is Binding.ADDRESSES else "the first"
    lost = [f"{first} to an IPv4 Service ({_UNCUT} is 0)"] if facts.sysctls.get(_UNCUT) == "0" else []
    if lost := [*lost, *(["all to IPv6 Services"] if _has_ipv6(facts) else [])]:
        yield note("mtu", f"of UDP datagrams over the MTU, this host's own programs may lose {' and '.join(lost)}", remedy)


def _other_backend(facts: Facts, config: Config) -> Iterator[Finding]:
    """Finds objects of ipvsproxy in the backend that this command's configuration does not choose.

    ``ipvsproxy run`` may have another configuration, which chooses that backend.
    """
    if facts.unread_backend and not facts.privileges:
        text = f"it is unknown whether another backend still holds rules or sets of ours: {facts.unread_backend}"
        yield warn("rules", text, "run doctor again; ipvsproxy run looks for them by itself")
    if not (facts.backend and facts.other_backend):
        return
    yield warn(
        "rules",
        f"{facts.other_backend}, though {_choice(facts.backend, config)}",
        "if run has another --rules-backend, give that to doctor, too; else run removes this once its own rules are in force, "
        "and looks again after each audit; a set that a rule of another program uses stays",
    )


def _choice(choice: backends.BackendChoice, config: Config) -> str:
    """The backend that this command's configuration chooses, and why.

    ``ipvsproxy run`` may have another configuration, which chooses the other backend.
    """
    asked = config.drivers.rules_backend
    rests_on = f"--rules-backend={asked}" + (f": {choice.reason}" if asked is Backend.AUTO else "")
    return f"the configuration of this command chooses {choice.backend} ({rests_on})"


def _iptables(facts: Facts, config: Config) -> Iterator[Finding]:
    topic, choice = "iptables", facts.iptables_choice
    if facts.backend and facts.backend.backend is not Backend.IPTABLES:
        topic, choice = "rules", None
        yield ok(topic, _choice(facts.backend, config))
    elif choice is None:
        remedy = "install the package iptables, and ipset's modules; or use --rules-backend=nftables"
        yield fail(topic, "there is no iptables in PATH", remedy)
        return
    else:
        yield ok(topic, f"{choice.variant} is used: {choice.reason}")
    if choice and choice.left_behind:
        remedy = "run removes them once the rules of the used variant are in force; so does ipvsproxy cleanup"
        yield note("iptables", f"the unused variant {choice.left_behind} has rules of ours, too", remedy)
    if choice and facts.host_ports:
        text = f"hostPort rules ({', '.join(facts.host_ports)}) take their ports from all Services, the API server's too"
        yield warn("iptables", text, HOST_PORTS_REMEDY)
    for family, reason in facts.unserved.items():
        yield warn(topic, f"{family.label} cannot be served: {reason}", "nothing, if the cluster does not use it")


def _virtual_servers(facts: Facts, config: Config) -> Iterator[Finding]:
    """Findings about virtual servers of other programs."""
    observed = facts.observation
    if observed.virtual_servers is None:
        return
    host = {one.address for one in observed.interface_addresses or ()}
    ranges = view.known_node_port_ranges(config.translation)
    is_ours = ownership.owned_virtual_servers(observed.sets or {}, observed.local, host, observed.virtual_servers, ranges)
    foreign = [key for key in observed.virtual_servers if not is_ours(key)]
    ports = {ownership.node_port_of(entry) for entries in (observed.sets or {}).values() for entry in entries}
    doubtful = [str(key) for key in foreign if not isinstance(key, FirewallMark) and ownership.node_port(key) in ports]
    if doubtful:
        text = f"{', '.join(doubtful)}: the port is one of our node ports, but no node port is served at this address"
        remedy = "if no other program, such as keepalived, has added it, a proxy has left it behind: remove it with ipvsadm -D"
        yield warn("ipvs", text, remedy)
    names = list(map(str, foreign))
    if names or observed.foreign_virtual_servers:
        named = f": {_some(names, ', ')}" if names else ""
        count = len(names) + observed.foreign_virtual_servers
        remedy = "they are left alone; make sure that no Service has their addresses, or name them with --ipvs-exclude-cidrs"
        yield warn("ipvs", f"{counted(count, 'virtual server')} of other programs (keepalived, docker swarm, ...){named}", remedy)
    else:
        yield ok("ipvs", f"{counted(len(observed.virtual_servers), 'virtual server')}, none of other programs")


def _binding(facts: Facts, config: Config) -> Iterator[Finding]:
    """Findings about local routes that were left behind, cannot be added, or may be removed by systemd-networkd."""
    if config.translation.binding is not Binding.ROUTES:
        if left := facts.observation.routes or ():
            text = f"{counted(len(left), 'local route')} of an earlier run, but Service addresses are to be on kube-ipvs0"
            remedy = "run removes them when the addresses are bound; kube-proxy would leave them"
            yield note("binding", text, remedy)
        return
    if not facts.loopback.is_up:
        yield fail("binding", "lo is down, so IPv6 has no local routes", "set it up with ip link set lo up")
    if facts.sysctls.get(_LOOPBACK_IPV6, "0") != "0":
        yield warn("binding", f"{_LOOPBACK_IPV6} is not 0, so IPv6 has no local routes", f"run sysctl -w {_LOOPBACK_IPV6}=0")
    if facts.loopback.networkd not in ("", "unmanaged"):
        text = "systemd-networkd manages lo, and may remove local routes that it does not know"
        yield warn("binding", text, "leave lo unmanaged, or set ManageForeignRoutes=no in networkd.conf")
    elif facts.loopback.is_up:
        yield ok("binding", "lo is up, and no other program manages it, so local routes stay")


def _marks(facts: Facts, config: Config) -> Iterator[Finding]:
    """Findings about other programs' rules that write packet marks; second scopes need packet marks, too."""
    if config.translation.scopes is not TrafficScopes.API and not config.takes_direct_return:
        return
    bits = config.translation.scope_bits
    if same := [rule.text for rule in facts.mark_rules if rule.bits & bits]:
        text = f"rules of other programs write the bits {bits:#x} of packet marks, so packets may reach the wrong Service: "
        remedy = "choose bits that no other program writes, with --ipvs-scope-mark-bits"
        yield fail("marks", text + _some(same), remedy)
    if others := [rule.text for rule in facts.mark_rules if not rule.bits & bits]:
        text = "rules of other programs write other bits of packet marks before IPVS: "
        remedy = "clients of this node whose packets match them are served as in kube-proxy's IPVS mode"
        yield warn("marks", text + _some(others), remedy)
    if not facts.mark_rules:
        yield ok("marks", f"no rule of another program writes packet marks before IPVS; the bits {bits:#x} are ours")


def _some(texts: Sequence[str], separator: str = "; ") -> str:
    """A text that consists of the first ``FEW`` texts and the number of the remaining texts."""
    return separator.join([*texts[:FEW], *([f"{len(texts) - FEW} more"] if texts[FEW:] else [])])


def _ports(facts: Facts, config: Config) -> Iterator[Finding]:
    for name, address in (("health", config.servers.health), ("metrics", config.servers.metrics)):
        if address is None:
            continue
        holder = facts.listeners.get(address.port, "")
        text = f"{name} port {address.port} is " + (f"held by {holder}" if holder else "free")
        if not holder or holder.startswith("ipvsproxy"):
            yield ok("ports", text)
        elif holder.startswith("kube-proxy"):
            yield warn("ports", text, "stop kube-proxy before run; --dry-run uses other ports")
        else:
            yield fail("ports", text, f"stop it, or choose another address for {name}")


def _timeouts(facts: Facts) -> Iterator[Finding]:
    tracked = facts.sysctls.get(_TRACKED_TCP, "")
    if facts.timeouts is None or not tracked.isdecimal():
        return
    tcp_s = facts.timeouts.tcp_s
    if tcp_s > int(tracked):
        text = f"IPVS keeps idle TCP connections for {tcp_s} s, connection tracking only for {tracked} s"
        yield warn("timeouts", text, "raise --conntrack-tcp-timeout-established or lower --ipvs-tcp-timeout")
    else:
        text = f"idle TCP connections are kept for {tcp_s} s by IPVS and {tracked} s by connection tracking"
        yield ok("timeouts", f"{text}: clients must send keepalives more often than every {tcp_s} s")


def _kube_proxy(facts: Facts) -> Iterator[Finding]:
    """Findings about rules that a kube-proxy in another mode has left behind.

    While some rules cannot be read, the checks of leftover rules and of the firewall do not report ok.
    """
    if facts.unread_tables and not facts.privileges:
        text = f"it is unknown what some rules do to packets of Services: {'; '.join(facts.unread_tables)}"
        yield warn("firewall", text, "run doctor again, or look at nft list ruleset and iptables-save")
    chains = sum(map(leftovers.is_of_iptables_mode, facts.chains))
    named = [table for table in facts.tables if table.name == leftovers.TABLE_NAME]
    tables = list(filter(service_checks.is_of_kube_proxy, named))
    stop = "stop that kube-proxy: run then removes them, once its own rules are in force; so does ipvsproxy cleanup"
    if chains:
        yield warn("kube-proxy", f"there are rules of its iptables mode ({counted(chains, 'chain')})", stop)
    if tables:
        yield warn("kube-proxy", f"there are tables of its nftables mode ({', '.join(map(str, tables))})", stop)
    for table in named:
        if why := leftovers.why_foreign(table):
            remedy = "it is left alone; if no program needs it, remove it with nft delete table"
            yield warn("kube-proxy", f"the table {table} only has the name of kube-proxy's: {why}", remedy)
    if not chains and not named and not facts.unread_tables:
        yield ok("kube-proxy", "no rules of another mode of kube-proxy")


async def examine(config: Config) -> Sequence[Finding]:
    """Make all checks.

    Raises:
        KernelError: the version of the kernel cannot be read.
    """
    sysctls = config.sysctls(host.kernel_version(), host.processor_count())
    found = await asyncio.to_thread(
        gather,
        scheduler=config.translation.scheduler,
        sysctls=(*(item.path for item in sysctls), *_BAD, _FORWARDING, _LOOPBACK_IPV6, _TRACKED_TCP, _BRIDGES_IPV6, _UNCUT),
        ports=[address.port for address in (config.servers.health, config.servers.metrics) if address],
        chains=skeleton.CHAINS,
        jumps=skeleton.JUMPS,
        route_protocol=config.drivers.route_protocol,
        backend=config.drivers.rules_backend,
        by_interface=config.translation.detect_local.is_by_interface,
    )
    source, store = await _source(config)
    return [*judge(found, sysctls, config), *await asyncio.to_thread(_judge_services, found, store, config), source]


def _judge_services(found: Facts, store: Store, config: Config) -> Sequence[Finding]:
    addresses = found.observation.interface_addresses or ()
    settings = dataclasses.replace(config.translation, direct_return=config.takes_direct_return)
    if found.backend:
        settings = dataclasses.replace(settings, backend=found.backend.backend)
    name, others = config.node_name, store.other_nodes
    node, ends = store.node(name), store.tunnels[0]
    seen = view.view_node(settings, name, node, addresses, (), other_nodes=others, tunnel_ends=ends)
    services = store.services.values()
    read = rivals.read(service_checks.ports_of(services))
    collisions = service_checks.collisions(services, seen, addresses, read, settings)
    scopes = service_checks.judge_scopes(settings, seen) if found.observation.interface_addresses is not None else ()
    direct_return = service_checks.judge_direct_return(settings, seen, node, service_checks.mtu_of(seen, addresses))
    return [*scopes, *direct_return, *service_checks.judge(services, settings, collisions, read.unknown or found.unreadable)]


async def _source(config: Config) -> tuple[Finding, Store]:
    """Check the source of Services; also returns the objects that the source has."""
    store = Store(started_s=0, here=config.node_name)
    try:
        source = await sources.make(config)
        async with inspection.following(source, store):
            node = store.node(config.node_name)
    except CannotStartError as error:
        remedy = "check address, credentials and permissions (ClusterRole system:node-proxier)"
        return fail("source", str(error), remedy), store
    if node is None:
        text = f"{source.describe()} answers, but has no Node {config.node_name!r}"
        return fail("source", text, "name this node's Node object with --hostname-override"), store
    return ok("source", f"{source.describe()} answers: {counted(len(store.services), 'Service')}"), store


def describe(node_name: str, findings: Sequence[Finding]) -> Document:
    """The result as a JSON document."""
    return {
        **inspection.head("doctor", node_name),
        "findings": [one._asdict() for one in findings],
        "summary": {level.value: sum(one.level is level for one in findings) for level in Level},
    }


def render(document: Document) -> Iterator[str]:
    """The result as text: the findings that need attention, the worst first, each with its remedy.

    One line lists the names of all topics that need no attention.
    """
    findings = document["findings"]
    for level in (Level.FAIL, Level.WARN, Level.NOTE):
        for one in [one for one in findings if one["level"] == level]:
            yield f"{level:<4}  {one['topic']}: {one['text']}"
            if one["remedy"]:
                yield f"      {one['remedy']}"
    told = {one["topic"] for one in findings if one["level"] != Level.OK}
    fine = ", ".join(dict.fromkeys(one["topic"] for one in findings if one["topic"] not in told))
    yield f"ok    {fine or 'nothing else'}"
    summary = document["summary"]
    counts = (counted(summary["fail"], "failure"), counted(summary["warn"], "warning"), counted(summary["note"], "note"))
    yield f"{document['node']}: {', '.join(counts)}; --output=json shows every check"


def run(config: Config) -> int:
    """Run ``ipvsproxy doctor``; returns the exit status."""
    return inspection.execute(config, _answer(config), render, "not all checks could be made", failed=inspection.NOT_WELL)


async def _answer(config: Config) -> CommandAnswer:
    findings = await examine(config)
    has_failed = any(one.level is Level.FAIL for one in findings)
    return CommandAnswer(describe(config.node_name, findings), inspection.NOT_WELL if has_failed else inspection.WELL)
