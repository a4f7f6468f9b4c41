"""The rules that turn the given values into a ``Config``, or into every problem.

They are those of pkg/proxy/apis/config/validation in kubernetes/kubernetes. kube-proxy does not check options without effect in
its IPVS mode; these are not checked here either.
"""

import re
from collections.abc import Collection, Iterable, Mapping

from ipvsproxy.config import catalogue, settings, syntax
from ipvsproxy.config.given import Given, Notice, Problem, Value, quoted
from ipvsproxy.config.option import Status
from ipvsproxy.config.settings import Command, Config, ListenAddress, LogFormat
from ipvsproxy.config.values import Values
from ipvsproxy.model.annotations import ALL_ANNOTATIONS, PREFIX, Annotation
from ipvsproxy.model.net import Address, Family, Network, parse_address, parse_network
from ipvsproxy.model.rules import Backend
from ipvsproxy.translate.settings import Binding, LocalMode, TrafficScopes

HEALTH_PORT = 10256
METRICS_PORT = 10249
_OTHER_MODES = ("iptables", "nftables")
_PRIMARY = "primary"
_SCHEDULER = re.compile(r"[A-Za-z0-9_-]{1,15}", re.ASCII)  # IP_VS_SCHEDNAME_MAXLEN is 16 with the NUL
_INTERFACE = re.compile(r"[^\s/:\"'\\+]+")  # the excluded characters cannot stand in a rule or a name
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

    ``given`` and ``broken`` (options whose value cannot be parsed) hold ``Option.key``s. The ``Config`` is valid only if
    there are no problems: defaults replace wrong values.
    """
    values = Values(given, broken, config_file)
    _check_bounds(values)
    command = _command(values)
    _check_mode(values, command)
    bind_address = _bind_address(values)
    servers = settings.Servers(
        health=_listen(values, "healthzBindAddress", bind_address, ("0.0.0.0", "::"), HEALTH_PORT),  # noqa: S104 - as kube-proxy
        metrics=_listen(values, "metricsBindAddress", bind_address, ("127.0.0.1", "::1"), METRICS_PORT),
        bind_hard_fail=values.switch("bindAddressHardFail"),
        stale_watch_s=values.seconds("ipvsproxy.staleWatchTimeout"),
        stale_watch_unhealthy=values.switch("ipvsproxy.staleWatchUnhealthy"),
        profiling=values.switch("enableProfiling"),
        ui=values.switch("ipvsproxy.ui"),
    )
    _check_writable(values, command, servers)
    node_name = _node_name(values, hostname)
    config = Config(
        node_name=node_name,
        servers=servers,
        bind_address=bind_address,
        command=command,
        config_file=config_file,
        write_config_to=values.text("write-config-to"),
        source=_service_source(values),
        ipvs=_ipvs(values),
        masquerade=settings.Masquerade(
            bit=values.number("iptables.masqueradeBit"), everything=values.switch("iptables.masqueradeAll")
        ),
        detect_local=_detect_local(values),
        node_ports=_node_ports(values),
        conntrack=_conntrack(values),
        oom_score_adj=values.number("oomScoreAdj"),
        traffic_metrics=settings.TrafficMetrics(
            limit=values.number("ipvsproxy.serviceMetricsLimit"), of_endpoints=values.switch("ipvsproxy.endpointMetrics")
        ),
        logging=settings.Logging(
            format=LogFormat(values.text("logging.format") or LogFormat.TEXT), verbosity=values.number("logging.verbosity")
        ),
        external_addresses_served=_gates(values),
        without_effect=tuple(_without_effect(given)),
        notices=tuple(values.notices),
        values=_file_values(values, bind_address, servers),
    )
    return config, tuple(values.problems)


def _check_bounds(values: Values) -> None:
    for key, (value, _) in values.given.items():
        option = catalogue.BY_KEY[key]
        shown = syntax.render(option.kind, value)
        if (option.choices and value and value not in option.choices) or (
            isinstance(value, int | float) and not isinstance(value, bool) and not option.allows(value)
        ):
            values.refuse(key, f"{shown} must be {option.allowed}")
        if option.deprecated:
            values.notices.append(Notice(values.source(key), f"deprecated; {option.deprecated}"))
    version = values.text("showHiddenMetricsForVersion")
    if version and not _VERSION.fullmatch(version):
        values.refuse("showHiddenMetricsForVersion", f"{quoted(version)} must be MAJOR.MINOR, such as 1.35")


def _command(values: Values) -> Command:
    if values.text("write-config-to"):
        return Command.WRITE_CONFIG
    if values.switch("cleanup"):
        return Command.CLEANUP
    return Command.INIT_ONLY if values.switch("init-only") else Command.RUN


def _check_mode(values: Values, command: Command) -> None:
    mode = values.text("mode")
    if mode == "ipvs" or not values.known("mode"):
        return
    known = not mode or mode in _OTHER_MODES
    if command is Command.CLEANUP and known:
        return
    remedy = "set mode: ipvs in the file" if values.config_file else "set --proxy-mode=ipvs"
    if not mode:
        values.refuse("mode", f"is not set, and ipvs is the only mode that ipvsproxy supports; {remedy}")
    elif known:
        values.refuse("mode", f"{quoted(mode)} is a mode that ipvsproxy does not support; {remedy}")
    else:
        values.refuse("mode", f"{quoted(mode)} is no mode; {remedy}")


def _bind_address(values: Values) -> Address:
    text = values.text("bindAddress")
    try:
        return parse_address(text)
    except ValueError:
        values.refuse("bindAddress", f"{quoted(text)} must be an IP address")
        return parse_address(values.text("bindAddress"))


def _listen(
    values: Values, key: str, bind_address: Address, default_hosts: tuple[str, str], default_port: int
) -> ListenAddress | None:
    """A server's address and port, merged from the address and the deprecated port flag as in kube-proxy; None: off."""
    port_key = "healthz-port" if default_port == HEALTH_PORT else "metrics-port"
    port_given = port_key in values.given and values.known(port_key)
    port = values.number(port_key)
    if port_given and not port:
        return None
    if key not in values.given and values.config_file:
        return ListenAddress(parse_address(default_hosts[bind_address.family is Family.IPV6]), default_port)
    text = values.text(key)
    try:
        listen = _parse_listen(text, port)
    except ValueError as error:
        values.refuse(key, f"{quoted(text)} must be {error}")
        return None
    if port_given and listen.port != port:
        reason = f"--{catalogue.BY_KEY[key].flag} has a port" if key in values.given else f"the default address {text} has a port"
        values.notices.append(Notice(values.source(port_key), f"{port} has no effect, because {reason}"))
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


def _check_writable(values: Values, command: Command, servers: settings.Servers) -> None:
    if command is Command.WRITE_CONFIG:
        for key, server in (("healthz-port", servers.health), ("metrics-port", servers.metrics)):
            if server is None and key in values.given:
                values.refuse(key, "0 cannot be written to a file: v1alpha1 has no way to say that a server is off")


def _node_name(values: Values, hostname: str) -> str:
    override = values.text("hostnameOverride")
    name = (override or hostname).strip().lower()
    if not name and override:
        values.refuse("hostnameOverride", "must not be blank")
    elif not name:
        values.refuse("hostnameOverride", "must be set, because this host has no name")
    return name


def _service_source(values: Values) -> settings.ServiceSource:
    source = settings.ServiceSource(
        manifests=values.text("ipvsproxy.manifests"),
        kubeconfig=values.text("clientConnection.kubeconfig"),
        api_server=values.text("master"),
        mass_deletion_percent=values.number("ipvsproxy.massDeletionGuardPercent"),
    )
    for key, value in (("clientConnection.kubeconfig", source.kubeconfig), ("master", source.api_server)):
        if source.manifests and value:
            values.refuse(key, f"{quoted(value)} and {values.source('ipvsproxy.manifests')} exclude each other; drop one")
    return source


def _ipvs(values: Values) -> settings.Ipvs:
    period_s, least_s = values.seconds("ipvs.syncPeriod"), values.seconds("ipvs.minSyncPeriod")
    if least_s > period_s and values.known("ipvs.syncPeriod", "ipvs.minSyncPeriod"):
        period = f"{values.source('ipvs.syncPeriod').name} ({syntax.render_duration(period_s)})"
        values.refuse("ipvs.minSyncPeriod", f"{syntax.render_duration(least_s)} must not be longer than {period}")
    scheduler = values.text("ipvs.scheduler") or "rr"
    if not _SCHEDULER.fullmatch(scheduler):
        values.refuse("ipvs.scheduler", f"{quoted(scheduler)} must be the name of an IPVS scheduler, such as rr, lc, sh or mh")
    return settings.Ipvs(
        scheduler=scheduler,
        sync_period_s=period_s,
        min_sync_period_s=least_s,
        excluded_networks=_networks(values, "ipvs.excludeCIDRs", values.items("ipvs.excludeCIDRs")),
        strict_arp=values.switch("ipvs.strictARP"),
        tcp_timeout_s=values.seconds("ipvs.tcpTimeout"),
        tcp_fin_timeout_s=values.seconds("ipvs.tcpFinTimeout"),
        udp_timeout_s=values.seconds("ipvs.udpTimeout"),
        drain_deadline_s=values.seconds("ipvsproxy.drainDeadline"),
        drift_check_interval_s=values.seconds("ipvsproxy.driftCheckInterval"),
        allowed_service_addresses=_networks(
            values, "ipvsproxy.allowServiceAddresses", values.items("ipvsproxy.allowServiceAddresses")
        ),
        traffic_scopes=TrafficScopes(values.text("ipvsproxy.trafficScopes") or TrafficScopes.API),
        scope_bits=_scope_bits(values),
        annotations=_annotations(values),
        binding=Binding(values.text("ipvsproxy.vipBinding") or Binding.ADDRESSES),
        route_protocol=values.number("ipvsproxy.routeProtocol"),
        rules_backend=Backend(values.text("ipvsproxy.rulesBackend") or Backend.IPTABLES),
    )


def _annotations(values: Values) -> frozenset[Annotation]:
    """The annotations that count: all, none, or those named with or without their prefix."""
    key = "ipvsproxy.serviceAnnotations"
    names = [name.strip().removeprefix(PREFIX) for name in (values.text(key) or "all").split(",")]
    if names == ["all"]:
        return ALL_ANNOTATIONS
    if names == ["none"]:
        return frozenset()
    known = {annotation.value for annotation in Annotation}
    for name in names:
        if name not in known:
            values.refuse(key, f"{quoted(name)} must be all, none, or some of {', '.join(sorted(known))}")
    return frozenset(annotation for annotation in Annotation if annotation.value in names)


def _scope_bits(values: Values) -> int:
    key = "ipvsproxy.scopeMarkBits"
    text = values.text(key)
    try:
        bits = int(text, 0)
    except ValueError:
        bits = 0
    taken = _MARK_DROP | 1 << values.number("iptables.masqueradeBit")
    if not 0 < bits < 1 << 32 or bits.bit_count() > _MOST_SCOPE_BITS:
        values.refuse(key, f"{quoted(text)} must be a number such as 0x3fff, with 1 to {_MOST_SCOPE_BITS} of 32 bits set")
    elif text == catalogue.BY_KEY[key].default:
        bits &= ~taken
    elif bits & taken:
        reason = f"{quoted(text)} must not have the bits {taken:#x}, by which Kubernetes asks to masquerade and to drop a packet"
        values.refuse(key, reason)
    return bits


def _networks(values: Values, key: str, texts: Iterable[str]) -> tuple[Network, ...]:
    networks = []
    source = values.source(key)
    for index, text in enumerate(texts):
        try:
            networks.append(parse_network(text))
        except ValueError as error:
            values.refuse(key, str(error), source.element(index))
    return tuple(networks)


def _detect_local(values: Values) -> settings.DetectLocal:
    mode = LocalMode(values.text("detectLocalMode") or LocalMode.CLUSTER_CIDR)
    text = values.text("clusterCIDR") if mode is LocalMode.CLUSTER_CIDR else ""
    networks = _networks(values, "clusterCIDR", text.split(",") if text else ())
    if len(networks) != len({network.family for network in networks}) and values.known("clusterCIDR"):
        values.refuse("clusterCIDR", f"{quoted(text)} must be one CIDR range, or one IPv4 and one IPv6 range")
    names = {}
    for of_mode, key, longest in (
        (LocalMode.BRIDGE_INTERFACE, "detectLocal.bridgeInterface", _INTERFACE_LIMIT),
        # A rule appends a plus sign, which counts towards iptables' limit.
        (LocalMode.INTERFACE_NAME_PREFIX, "detectLocal.interfaceNamePrefix", _INTERFACE_LIMIT - 1),
    ):
        name = names[of_mode] = values.text(key)
        if mode is of_mode and not name:
            values.refuse(key, f"is required with {values.source('detectLocalMode').name} {mode}")
        elif mode is of_mode and not _is_interface(name, longest):
            values.refuse(key, f"{quoted(name)} must be a name of 1 to {longest} characters that an interface can have")
    return settings.DetectLocal(
        mode=mode,
        cluster_networks=networks,
        bridge_interface=names[LocalMode.BRIDGE_INTERFACE],
        interface_name_prefix=names[LocalMode.INTERFACE_NAME_PREFIX],
    )


def _is_interface(name: str, longest: int) -> bool:
    return name.isprintable() and len(name.encode()) <= longest and bool(_INTERFACE.fullmatch(name))


def _node_ports(values: Values) -> settings.NodePorts:
    texts = values.items("nodePortAddresses")
    if texts == (_PRIMARY,):
        return settings.NodePorts(primary_only=True)
    if _PRIMARY in texts:
        source = values.source("nodePortAddresses").element(texts.index(_PRIMARY))
        values.refuse("nodePortAddresses", "'primary' must stand alone, without CIDR ranges beside it", source)
    return settings.NodePorts(networks=_networks(values, "nodePortAddresses", [text for text in texts if text != _PRIMARY]))


def _conntrack(values: Values) -> settings.Conntrack:
    return settings.Conntrack(
        max_per_core=values.number("conntrack.maxPerCore"),
        minimum=values.number("conntrack.min"),
        tcp_established_timeout_s=values.seconds("conntrack.tcpEstablishedTimeout"),
        tcp_close_wait_timeout_s=values.seconds("conntrack.tcpCloseWaitTimeout"),
        tcp_be_liberal=values.switch("conntrack.tcpBeLiberal"),
        udp_timeout_s=values.seconds("conntrack.udpTimeout"),
        udp_stream_timeout_s=values.seconds("conntrack.udpStreamTimeout"),
    )


def _gates(values: Values) -> bool:
    gates = values.gates()
    for name in _LOCKED_GATES:
        if gates.get(name, True) is False:
            values.refuse("featureGates", f"{name} must be true; it can no longer be turned off")
    return gates.get(_EXTERNAL_IPS_GATE, True)


def _without_effect(given: Mapping[str, Given]) -> Iterable[str]:
    """Options without effect that are set. Empty values and defaults are not named, because ready-made files hold many."""
    for key, (value, source) in given.items():
        option = catalogue.BY_KEY[key]
        if isinstance(value, Mapping):
            yield from (f"{source.name} {name}" for name in value if name != _EXTERNAL_IPS_GATE)
        elif option.status is Status.WITHOUT_EFFECT and value and value != syntax.parse(option.kind, option.default):
            yield source.name


def _file_values(values: Values, bind_address: Address, servers: settings.Servers) -> Mapping[str, Value]:
    written = {key: values.value(key) for key, option in catalogue.BY_KEY.items() if option.field}
    written["bindAddress"] = str(bind_address)
    written["healthzBindAddress"] = str(servers.health or "")
    written["metricsBindAddress"] = str(servers.metrics or "")
    written["hostnameOverride"] = values.text("hostnameOverride").strip().lower()
    return written
