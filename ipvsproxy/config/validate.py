"""The rules: from what was given to a ``Config``, or to every reason why not.

They are those of pkg/proxy/apis/config/validation in kubernetes/kubernetes. What kube-proxy does not check because it has no
effect in its IPVS mode is not checked here either.
"""

import re
from collections.abc import Collection, Iterable, Mapping

from ipvsproxy.config import catalogue, settings, syntax
from ipvsproxy.config.given import Given, Notice, Problem, Value, quoted
from ipvsproxy.config.option import Status
from ipvsproxy.config.settings import Command, Config, ListenAddress, LogFormat
from ipvsproxy.config.values import Answers
from ipvsproxy.model.net import Address, Family, Network, parse_address, parse_network
from ipvsproxy.translate.view import LocalMode, TrafficScopes

HEALTH_PORT = 10256
METRICS_PORT = 10249
_OTHER_MODES = ("iptables", "nftables")
_PRIMARY = "primary"
_SCHEDULER = re.compile(r"[A-Za-z0-9_-]{1,15}", re.ASCII)  # IP_VS_SCHEDNAME_MAXLEN is 16 with the NUL
_INTERFACE = re.compile(r"[^\s/:\"'\\+]+")  # what else cannot stand in a rule, or in a name
_MARK_DROP = 0x8000  # the kubelet's KUBE-MARK-DROP
_MOST_SCOPE_BITS = 16
_INTERFACE_LIMIT = 15  # bytes; IFNAMSIZ is 16 with the NUL
_VERSION = re.compile(r"[0-9]{1,4}\.[0-9]{1,4}", re.ASCII)
_EXTERNAL_IPS_GATE = "AllowServiceExternalIPs"
_LOCKED_GATES = frozenset(("PreferSameTrafficDistribution", "MultiCIDRServiceAllocator"))


def resolve(
    given: Mapping[str, Given], broken: Collection[str], *, hostname: str, config_file: str
) -> tuple[Config, tuple[Problem, ...]]:
    """Apply defaults and rules.

    ``given`` and ``broken`` (options whose value could not be read) go by ``Option.key``. The ``Config`` is of use only
    when no problem comes with it: defaults stand where values are wrong.
    """
    answers = Answers(given, broken, config_file)
    _check_bounds(answers)
    command = _command(answers)
    _check_mode(answers, command)
    bind_address = _bind_address(answers)
    servers = settings.Servers(
        health=_listen(answers, "healthzBindAddress", bind_address, ("0.0.0.0", "::"), HEALTH_PORT),  # noqa: S104 - as kube-proxy
        metrics=_listen(answers, "metricsBindAddress", bind_address, ("127.0.0.1", "::1"), METRICS_PORT),
        bind_hard_fail=answers.switch("bindAddressHardFail"),
        stale_watch_s=answers.seconds("ipvsproxy.staleWatchTimeout"),
        stale_watch_unhealthy=answers.switch("ipvsproxy.staleWatchUnhealthy"),
        profiling=answers.switch("enableProfiling"),
    )
    _check_writable(answers, command, servers)
    node_name = _node_name(answers, hostname)
    config = Config(
        node_name=node_name,
        servers=servers,
        bind_address=bind_address,
        command=command,
        config_file=config_file,
        write_config_to=answers.text("write-config-to"),
        source=_service_source(answers),
        ipvs=_ipvs(answers),
        masquerade=settings.Masquerade(
            bit=answers.number("iptables.masqueradeBit"), everything=answers.switch("iptables.masqueradeAll")
        ),
        detect_local=_detect_local(answers),
        node_ports=_node_ports(answers),
        conntrack=_conntrack(answers),
        oom_score_adj=answers.number("oomScoreAdj"),
        traffic_metrics=settings.TrafficMetrics(
            limit=answers.number("ipvsproxy.serviceMetricsLimit"), of_endpoints=answers.switch("ipvsproxy.endpointMetrics")
        ),
        logging=settings.Logging(
            format=LogFormat(answers.text("logging.format") or LogFormat.TEXT), verbosity=answers.number("logging.verbosity")
        ),
        external_addresses_served=_gates(answers),
        without_effect=tuple(_without_effect(given)),
        notices=tuple(answers.notices),
        values=_values(answers, bind_address, servers),
    )
    return config, tuple(answers.problems)


def _check_bounds(answers: Answers) -> None:
    for key, (value, _) in answers.given.items():
        option = catalogue.BY_KEY[key]
        shown = syntax.render(option.kind, value)
        if (option.choices and value and value not in option.choices) or (
            isinstance(value, int | float) and not isinstance(value, bool) and not option.allows(value)
        ):
            answers.refuse(key, f"{shown} must be {option.allowed}")
        if option.deprecated:
            answers.notices.append(Notice(answers.source(key), f"deprecated; {option.deprecated}"))
    version = answers.text("showHiddenMetricsForVersion")
    if version and not _VERSION.fullmatch(version):
        answers.refuse("showHiddenMetricsForVersion", f"{quoted(version)} must be MAJOR.MINOR, such as 1.35")


def _command(answers: Answers) -> Command:
    if answers.text("write-config-to"):
        return Command.WRITE_CONFIG
    if answers.switch("cleanup"):
        return Command.CLEANUP
    return Command.INIT_ONLY if answers.switch("init-only") else Command.RUN


def _check_mode(answers: Answers, command: Command) -> None:
    mode = answers.text("mode")
    if mode == "ipvs" or not answers.known("mode"):
        return
    known = not mode or mode in _OTHER_MODES
    if command is Command.CLEANUP and known:
        return
    wanted = "set mode: ipvs in the file" if answers.config_file else "set --proxy-mode=ipvs"
    if not mode:
        answers.refuse("mode", f"is not set, and ipvs is the only mode that ipvsproxy does; {wanted}")
    elif known:
        answers.refuse("mode", f"{quoted(mode)} is a mode that ipvsproxy does not do; {wanted}")
    else:
        answers.refuse("mode", f"{quoted(mode)} is no mode; {wanted}")


def _bind_address(answers: Answers) -> Address:
    text = answers.text("bindAddress")
    try:
        return parse_address(text)
    except ValueError:
        answers.refuse("bindAddress", f"{quoted(text)} must be an IP address")
        return parse_address(answers.text("bindAddress"))


def _listen(
    answers: Answers, key: str, bind_address: Address, default_hosts: tuple[str, str], default_port: int
) -> ListenAddress | None:
    """Where a server listens, as kube-proxy merges the address and the deprecated port flag; None: it is off."""
    port_key = "healthz-port" if default_port == HEALTH_PORT else "metrics-port"
    port_given = port_key in answers.given and answers.known(port_key)
    port = answers.number(port_key)
    if port_given and not port:
        return None
    if key not in answers.given and answers.config_file:
        return ListenAddress(parse_address(default_hosts[bind_address.family is Family.IPV6]), default_port)
    text = answers.text(key)
    try:
        listen = _parse_listen(text, port)
    except ValueError as error:
        answers.refuse(key, f"{quoted(text)} must be {error}")
        return None
    if port_given and listen.port != port:
        said_by = (
            f"--{catalogue.BY_KEY[key].flag} has a port" if key in answers.given else f"the default address {text} has a port"
        )
        answers.notices.append(Notice(answers.source(port_key), f"{port} has no effect, because {said_by}"))
    return listen


def _parse_listen(text: str, default_port: int) -> ListenAddress:
    rule = "IP or IP:port with a port in 1..65535"
    if text.startswith("["):
        host, _, rest = text[1:].partition("]")
        colon, port = rest[:1], rest[1:]
    elif text.count(":") == 1:
        host, colon, port = text.partition(":")
    else:
        host, colon, port = text, ":", str(default_port)
    if colon != ":" or not (port.isascii() and port.isdecimal() and len(port) < 6 and 1 <= int(port) <= 65535):  # noqa: PLR2004 - a port
        raise ValueError(rule)
    try:
        return ListenAddress(parse_address(host), int(port))
    except ValueError as error:
        raise ValueError(rule) from error


def _check_writable(answers: Answers, command: Command, servers: settings.Servers) -> None:
    if command is Command.WRITE_CONFIG:
        for key, server in (("healthz-port", servers.health), ("metrics-port", servers.metrics)):
            if server is None and key in answers.given:
                answers.refuse(key, "0 cannot be written to a file: v1alpha1 has no way to say that a server is off")


def _node_name(answers: Answers, hostname: str) -> str:
    override = answers.text("hostnameOverride")
    name = (override or hostname).strip().lower()
    if not name and override:
        answers.refuse("hostnameOverride", "must not be blank")
    elif not name:
        answers.refuse("hostnameOverride", "must be set, for this host has no name")
    return name


def _service_source(answers: Answers) -> settings.ServiceSource:
    source = settings.ServiceSource(
        manifests=answers.text("ipvsproxy.manifests"),
        kubeconfig=answers.text("clientConnection.kubeconfig"),
        api_server=answers.text("master"),
        mass_deletion_percent=answers.number("ipvsproxy.massDeletionGuardPercent"),
    )
    for key, value in (("clientConnection.kubeconfig", source.kubeconfig), ("master", source.api_server)):
        if source.manifests and value:
            answers.refuse(key, f"{quoted(value)} and {answers.source('ipvsproxy.manifests')} exclude each other; drop one")
    return source


def _ipvs(answers: Answers) -> settings.Ipvs:
    period_s, least_s = answers.seconds("ipvs.syncPeriod"), answers.seconds("ipvs.minSyncPeriod")
    if least_s > period_s and answers.known("ipvs.syncPeriod", "ipvs.minSyncPeriod"):
        period = f"{answers.source('ipvs.syncPeriod').name} ({syntax.render_duration(period_s)})"
        answers.refuse("ipvs.minSyncPeriod", f"{syntax.render_duration(least_s)} must not be longer than {period}")
    scheduler = answers.text("ipvs.scheduler") or "rr"
    if not _SCHEDULER.fullmatch(scheduler):
        answers.refuse("ipvs.scheduler", f"{quoted(scheduler)} must be the name of an IPVS scheduler, such as rr, lc, sh or mh")
    return settings.Ipvs(
        scheduler=scheduler,
        sync_period_s=period_s,
        min_sync_period_s=least_s,
        excluded_networks=_networks(answers, "ipvs.excludeCIDRs", answers.items("ipvs.excludeCIDRs")),
        strict_arp=answers.switch("ipvs.strictARP"),
        tcp_timeout_s=answers.seconds("ipvs.tcpTimeout"),
        tcp_fin_timeout_s=answers.seconds("ipvs.tcpFinTimeout"),
        udp_timeout_s=answers.seconds("ipvs.udpTimeout"),
        drain_deadline_s=answers.seconds("ipvsproxy.drainDeadline"),
        allowed_service_addresses=_networks(
            answers, "ipvsproxy.allowServiceAddresses", answers.items("ipvsproxy.allowServiceAddresses")
        ),
        traffic_scopes=TrafficScopes(answers.text("ipvsproxy.trafficScopes") or TrafficScopes.KUBE_PROXY),
        scope_bits=_scope_bits(answers),
    )


def _scope_bits(answers: Answers) -> int:
    key = "ipvsproxy.scopeMarkBits"
    text = answers.text(key)
    try:
        bits = int(text, 0)
    except ValueError:
        bits = 0
    taken = _MARK_DROP | 1 << answers.number("iptables.masqueradeBit")
    if not 0 < bits < 1 << 32 or bits.bit_count() > _MOST_SCOPE_BITS:
        answers.refuse(key, f"{quoted(text)} must be a number such as 0x3fff, with 1 to {_MOST_SCOPE_BITS} of 32 bits set")
    elif text == catalogue.BY_KEY[key].default:
        bits &= ~taken
    elif bits & taken:
        reason = f"{quoted(text)} must not have the bits {taken:#x}, by which Kubernetes asks to masquerade and to drop a packet"
        answers.refuse(key, reason)
    return bits


def _networks(answers: Answers, key: str, texts: Iterable[str]) -> tuple[Network, ...]:
    networks = []
    source = answers.source(key)
    for index, text in enumerate(texts):
        try:
            networks.append(parse_network(text))
        except ValueError as error:
            answers.refuse(key, str(error), source.element(index))
    return tuple(networks)


def _detect_local(answers: Answers) -> settings.DetectLocal:
    mode = LocalMode(answers.text("detectLocalMode") or LocalMode.CLUSTER_CIDR)
    text = answers.text("clusterCIDR") if mode is LocalMode.CLUSTER_CIDR else ""
    networks = _networks(answers, "clusterCIDR", text.split(",") if text else ())
    if len(networks) != len({network.family for network in networks}) and answers.known("clusterCIDR"):
        answers.refuse("clusterCIDR", f"{quoted(text)} must be one CIDR range, or one IPv4 and one IPv6 range")
    names = {}
    for of_mode, key, longest in (
        (LocalMode.BRIDGE_INTERFACE, "detectLocal.bridgeInterface", _INTERFACE_LIMIT),
        # In a rule a plus sign comes behind it, which iptables counts.
        (LocalMode.INTERFACE_NAME_PREFIX, "detectLocal.interfaceNamePrefix", _INTERFACE_LIMIT - 1),
    ):
        name = names[of_mode] = answers.text(key)
        if mode is of_mode and not name:
            answers.refuse(key, f"is required with {answers.source('detectLocalMode').name} {mode}")
        elif mode is of_mode and not _is_interface(name, longest):
            answers.refuse(key, f"{quoted(name)} must be a name of 1 to {longest} characters that an interface can have")
    return settings.DetectLocal(
        mode=mode,
        cluster_networks=networks,
        bridge_interface=names[LocalMode.BRIDGE_INTERFACE],
        interface_name_prefix=names[LocalMode.INTERFACE_NAME_PREFIX],
    )


def _is_interface(name: str, longest: int) -> bool:
    return name.isprintable() and len(name.encode()) <= longest and bool(_INTERFACE.fullmatch(name))


def _node_ports(answers: Answers) -> settings.NodePorts:
    texts = answers.items("nodePortAddresses")
    if texts == (_PRIMARY,):
        return settings.NodePorts(primary_only=True)
    if _PRIMARY in texts:
        source = answers.source("nodePortAddresses").element(texts.index(_PRIMARY))
        answers.refuse("nodePortAddresses", "'primary' must stand alone, without CIDR ranges beside it", source)
    return settings.NodePorts(networks=_networks(answers, "nodePortAddresses", [text for text in texts if text != _PRIMARY]))


def _conntrack(answers: Answers) -> settings.Conntrack:
    return settings.Conntrack(
        max_per_core=answers.number("conntrack.maxPerCore"),
        minimum=answers.number("conntrack.min"),
        tcp_established_timeout_s=answers.seconds("conntrack.tcpEstablishedTimeout"),
        tcp_close_wait_timeout_s=answers.seconds("conntrack.tcpCloseWaitTimeout"),
        tcp_be_liberal=answers.switch("conntrack.tcpBeLiberal"),
        udp_timeout_s=answers.seconds("conntrack.udpTimeout"),
        udp_stream_timeout_s=answers.seconds("conntrack.udpStreamTimeout"),
    )


def _gates(answers: Answers) -> bool:
    gates = answers.gates()
    for name in _LOCKED_GATES:
        if gates.get(name, True) is False:
            answers.refuse("featureGates", f"{name} must be true, it can no longer be turned off")
    return gates.get(_EXTERNAL_IPS_GATE, True)


def _without_effect(given: Mapping[str, Given]) -> Iterable[str]:
    """What was set to something else than its default, or nothing, and has no effect. Ready-made files set a lot to that."""
    for key, (value, source) in given.items():
        option = catalogue.BY_KEY[key]
        if isinstance(value, Mapping):
            yield from (f"{source.name} {name}" for name in value if name != _EXTERNAL_IPS_GATE)
        elif option.status is Status.WITHOUT_EFFECT and value and value != syntax.parse(option.kind, option.default):
            yield source.name


def _values(answers: Answers, bind_address: Address, servers: settings.Servers) -> Mapping[str, Value]:
    values = {key: answers.value(key) for key, option in catalogue.BY_KEY.items() if option.field}
    values["bindAddress"] = str(bind_address)
    values["healthzBindAddress"] = str(servers.health or "")
    values["metricsBindAddress"] = str(servers.metrics or "")
    values["hostnameOverride"] = answers.text("hostnameOverride").strip().lower()
    return values
