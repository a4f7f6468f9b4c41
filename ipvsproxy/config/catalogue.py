"""The table of all options.

The flags, the configuration file, ``--help``, completion, ``Config`` and the documentation are derived from this table. Flags,
defaults and bounds are the same as in kube-proxy 1.36 (cmd/kube-proxy/app/options.go and pkg/proxy/apis/config in
kubernetes/kubernetes). The options are listed in the order in which their fields are written to a file.
"""

from collections.abc import Mapping

from ipvsproxy.config.option import Kind, Likeness, Option
from ipvsproxy.config.settings import Format, Sort
from ipvsproxy.model.kernel import ROUTE_PROTOCOL
from ipvsproxy.model.rules import Backend
from ipvsproxy.translate.translation_settings import Binding, DirectReturn, LocalMode, TrafficScopes

ANY_ADDRESS = "0.0.0.0"  # noqa: S104 - no server listens on this address
LOWEST_ROUTE_PROTOCOL = 5
"""The kernel and administrators use lower protocol numbers (include/uapi/linux/rtnetlink.h)."""

CONFIGURATION = (
    Option("config", "", Kind.TEXT, "", "FILE").explained(
        "Read a KubeProxyConfiguration (v1alpha1). Most flags are then ignored."
    ),
    Option("write-config-to", "", Kind.TEXT, "", "FILE", to="write_config_to", overrides_file=True).explained(
        "Write the resulting configuration to this file and exit."
    ),
    Option("cleanup", "", Kind.BOOLEAN, "false", to="cleanup", overrides_file=True).explained(
        "Remove everything that ipvsproxy or kube-proxy has left in the kernel and exit."
    ),
    Option("init-only", "", Kind.BOOLEAN, "false", to="init_only", overrides_file=True).explained(
        "Do only what needs full root (sysctls, modules) and exit; CAP_NET_ADMIN alone is then enough to run."
    ),
    Option("version", "", Kind.TEXT, "false", "BOOL", overrides_file=True, implied="true").explained(
        "Print the version and exit."
    ),
    Option("help", "", Kind.BOOLEAN, "false", overrides_file=True).explained("Print this help and exit; also -h."),
    Option(
        "feature-gates", "featureGates", Kind.GATES, "", to="translation.external_addresses", status=Likeness.EXTENDED
    ).explained("AllowServiceExternalIPs=false ignores externalIPs. Any other gate is accepted without effect."),
    Option("proxy-mode", "mode", Kind.TEXT, "", "MODE").explained("Must be ipvs. Without a mode, kube-proxy would use iptables."),
)

SOURCE = (
    Option("kubeconfig", "clientConnection.kubeconfig", Kind.TEXT, "", "FILE", to="source.kubeconfig").explained(
        "The file with address and credentials of the API server. Without it and --master: the pod's service account."
    ),
    Option("master", "", Kind.TEXT, "", "URL", to="source.api_server", overrides_file=True).explained(
        "URL of the API server; replaces the one in the kubeconfig."
    ),
)

OWN = (
    Option("manifests", "manifests", Kind.TEXT, "", "DIR", to="source.manifests", empty_is_unset=True).explained(
        "Read Services, EndpointSlices and Nodes from this directory instead of an API server."
    ),
    Option("ipvs-drain-deadline", "drainDeadline", Kind.DURATION, "0s", to="policy.drain_deadline_s", minimum=0).explained(
        "How long TCP connections to a removed endpoint may last; 0 means until they end by themselves."
    ),
    Option(
        "ipvs-drift-check-interval", "driftCheckInterval", Kind.DURATION, "5s", to="engine.drift_check_interval_s", minimum=1
    ).explained(
        "How often all real servers are compared with the desired ones; other drift is checked for every 3s or more often."
    ),
    Option("ipvs-sysctls", "ipvsSysctls", Kind.LIST, "", "NAME=VALUE,...", to="ipvs_sysctls").explained(
        "Values below net.ipv4.vs: sloppy_sctp, sloppy_tcp (0 or 1), conn_lfactor, svc_lfactor (-8 to 8, on Linux 7.1). "
        "Others stay as they are."
    ),
    Option(
        "ipvs-allow-service-addresses", "allowServiceAddresses", Kind.LIST, "", "CIDR,...", to="translation.allowed_addresses"
    ).explained("Serve Service addresses in these ranges even if they belong to the API server, this node or a range of pods."),
    Option(
        "ipvs-refuse-node-addresses", "refuseNodeAddresses", Kind.BOOLEAN, "false", to="translation.refuses_node_addresses"
    ).explained("Refuse external and load-balancer addresses of Services that are known to be addresses of other nodes."),
    Option(
        "ipvs-traffic-scopes", "trafficScopes", Kind.TEXT, "kube-proxy", to="translation.scopes", choices=tuple(TrafficScopes)
    ).explained(
        "With externalTrafficPolicy Local, clients of this node reach endpoints of this node (kube-proxy) or of all nodes (api)."
    ),
    Option("ipvs-scope-mark-bits", "scopeMarkBits", Kind.TEXT, "0x3fff", "MASK", to="translation.scope_bits").explained(
        "The bits of packet marks for traffic scopes; no other program may write them. 14 bits suffice for 16383 Service ports."
    ),
    Option(
        "ipvs-direct-return", "directReturn", Kind.TEXT, "off", to="drivers.direct_return", choices=tuple(DirectReturn)
    ).explained(
        "Whether the annotation ipvsproxy.io/direct-return has its effect: endpoints of all nodes answer clients directly (on)."
    ),
    Option(
        "service-annotations", "serviceAnnotations", Kind.TEXT, "all", "all|none|NAME,...", to="translation.annotations"
    ).explained("Which annotations of Services apply: all, none, or names without ipvsproxy.io/, such as scheduler,weights."),
    Option("rules-backend", "rulesBackend", Kind.TEXT, "iptables", to="drivers.rules_backend", choices=tuple(Backend)).explained(
        "What holds rules and sets: iptables with ipset, or nftables. auto takes nftables if iptables or ipset is missing."
    ),
    Option("ipvs-vip-binding", "vipBinding", Kind.TEXT, "addresses", to="translation.binding", choices=tuple(Binding)).explained(
        "How Service addresses become local: by addresses on kube-ipvs0, or by local routes on lo, which is faster (routes)."
    ),
    Option(
        "ipvs-route-protocol",
        "routeProtocol",
        Kind.INTEGER,
        str(ROUTE_PROTOCOL),
        "NUMBER",
        to="drivers.route_protocol",
        minimum=LOWEST_ROUTE_PROTOCOL,
        maximum=255,
    ).explained("The protocol number of local routes to Service addresses; no other program may use it."),
    Option(
        "mass-deletion-guard",
        "massDeletionGuardPercent",
        Kind.INTEGER,
        "50",
        "PERCENT",
        to="source.mass_deletion_percent",
        minimum=0,
        maximum=100,
    ).explained(
        "If a list lacks more than this percentage of all Services or endpoints (with direct return, Nodes too), wait a minute "
        "for a second list; 0: never."
    ),
    Option("stale-watch-timeout", "staleWatchTimeout", Kind.DURATION, "15m0s", to="servers.stale_watch_s", minimum=0).explained(
        "How long the API server may be silent before log, metrics and /healthz report a stale watch; 0: never."
    ),
    Option("stale-watch-unhealthy", "staleWatchUnhealthy", Kind.BOOLEAN, "false", to="servers.stale_watch_unhealthy").explained(
        "Answer load balancers with 503 on /healthz and health-check node ports while a watch is stale."
    ),
    Option(
        "service-metrics-limit", "serviceMetricsLimit", Kind.INTEGER, "20000", to="servers.service_metrics_limit", minimum=0
    ).explained("How many Service ports, and how many endpoints, have their own traffic metrics; 0 turns these metrics off."),
    Option("endpoint-metrics", "endpointMetrics", Kind.BOOLEAN, "false", to="servers.endpoint_metrics").explained(
        "Export traffic metrics for each endpoint, too, not only for each Service port."
    ),
    Option("ui", "ui", Kind.BOOLEAN, "true", to="servers.ui").explained(
        "Show this node as a page at /ui/ of the metrics server, which ipvsproxy top needs as well."
    ),
)
"""Options that kube-proxy does not have.

In a file, the fields of these options stand under ``ipvsproxy:``; flags override them.
"""

NODE = (
    Option(
        "hostname-override", "hostnameOverride", Kind.TEXT, "", "NAME", to="node_name", empty_is_unset=True, overrides_file=True
    ).explained("Name of this node's Node object; by default the host's name."),
    Option(
        "bind-address", "bindAddress", Kind.TEXT, ANY_ADDRESS, "IP", to="translation.bind_address", empty_is_unset=True
    ).explained("The node's primary IP. No server listens on it; 0.0.0.0 and :: leave the choice to the Node object."),
    Option("oom-score-adj", "oomScoreAdj", Kind.INTEGER, "-999", to="oom_score_adj", minimum=-1000, maximum=1000).explained(
        "When memory runs out, the kernel kills processes with a low score last."
    ),
)

IPVS = (
    Option("ipvs-scheduler", "scheduler", Kind.TEXT, "", "NAME", to="translation.scheduler").explained(
        "Scheduler of every virtual server; empty means rr."
    ),
    Option(
        "ipvs-sync-period", "syncPeriod", Kind.DURATION, "30s", to="engine.audit_interval_s", above=0, empty_is_unset=True
    ).explained("Time between two audits, which compare the whole kernel state with the desired state."),
    Option(
        "ipvs-min-sync-period", "minSyncPeriod", Kind.DURATION, "1s", to="engine.min_interval_s", minimum=0, file_default="0s"
    ).explained("Minimum time between two syncs; 0 programs every change at once."),
    Option("ipvs-exclude-cidrs", "excludeCIDRs", Kind.LIST, "", "CIDR,...", to="policy.excluded").explained(
        "Never remove virtual servers with an address in these ranges."
    ),
    Option("ipvs-strict-arp", "strictARP", Kind.BOOLEAN, "false", to="strict_arp").explained(
        "Answer ARP requests only for addresses of the interface that receives them (arp_ignore 1, arp_announce 2); false leaves "
        "both as they are."
    ),
    Option("ipvs-tcp-timeout", "tcpTimeout", Kind.DURATION, "0s", to="timeouts.tcp_s", minimum=0).explained(
        "Timeout of idle TCP connections; 0 keeps the kernel's."
    ),
    Option("ipvs-tcpfin-timeout", "tcpFinTimeout", Kind.DURATION, "0s", to="timeouts.tcp_fin_s", minimum=0).explained(
        "Timeout of TCP connections after a FIN; 0 keeps the kernel's."
    ),
    Option("ipvs-udp-timeout", "udpTimeout", Kind.DURATION, "0s", to="timeouts.udp_s", minimum=0).explained(
        "Timeout of idle UDP flows; 0 keeps the kernel's."
    ),
)

TRAFFIC = (
    Option("masquerade-all", "iptables.masqueradeAll", Kind.BOOLEAN, "false", to="translation.masquerade_all").explained(
        "Masquerade all traffic to cluster IPs."
    ),
    Option(
        "iptables-masquerade-bit",
        "iptables.masqueradeBit",
        Kind.INTEGER,
        "14",
        to="translation.masquerade_bit",
        minimum=0,
        maximum=31,
    ).explained("Bit of the packet mark that requests masquerading."),
    Option(
        "detect-local-mode",
        "detectLocalMode",
        Kind.TEXT,
        "ClusterCIDR",
        "MODE",
        to="translation.detect_local",
        choices=tuple(LocalMode),
        empty_is_unset=True,
    ).explained("How traffic of local pods is recognised; other traffic to cluster IPs is masqueraded."),
    Option(
        "cluster-cidr", "clusterCIDR", Kind.TEXT, "", "CIDR[,CIDR]", to="translation.cluster_networks", empty_is_unset=True
    ).explained("Pod addresses, for --detect-local-mode=ClusterCIDR: one range, or one of each IP family."),
    Option("pod-bridge-interface", "detectLocal.bridgeInterface", Kind.TEXT, "", "NAME").explained(
        "Bridge that the pods are on, for --detect-local-mode=BridgeInterface."
    ),
    Option("pod-interface-name-prefix", "detectLocal.interfaceNamePrefix", Kind.TEXT, "", "PREFIX").explained(
        "Prefix of the names of pod interfaces, for --detect-local-mode=InterfaceNamePrefix."
    ),
    Option("nodeport-addresses", "nodePortAddresses", Kind.LIST, "", "CIDR,...", to="translation.node_port_networks").explained(
        "Node addresses that serve node ports: CIDR ranges, and the words primary (the node's own addresses), localhost (none "
        "in IPVS mode) and all, in any mix. Empty means all."
    ),
)

CONNTRACK = (
    Option("conntrack-max-per-core", "maxPerCore", Kind.INTEGER, "32768", to="max_per_core").explained(
        "Limit of tracked connections per CPU core; 0 keeps the kernel's."
    ),
    Option("conntrack-min", "min", Kind.INTEGER, "131072", to="minimum").explained(
        "Minimum of that limit, whatever the number of cores."
    ),
    Option(
        "conntrack-tcp-timeout-established", "tcpEstablishedTimeout", Kind.DURATION, "24h0m0s", to="tcp_established_timeout_s"
    ).explained("Timeout of idle established TCP connections; 0 keeps the kernel's."),
    Option(
        "conntrack-tcp-timeout-close-wait", "tcpCloseWaitTimeout", Kind.DURATION, "1h0m0s", to="tcp_close_wait_timeout_s"
    ).explained("Timeout of TCP connections in CLOSE_WAIT; 0 keeps the kernel's."),
    Option("conntrack-tcp-be-liberal", "tcpBeLiberal", Kind.BOOLEAN, "false", to="tcp_be_liberal").explained(
        "Do not mark packets outside of the TCP window as invalid."
    ),
    Option("conntrack-udp-timeout", "udpTimeout", Kind.DURATION, "0s", to="udp_timeout_s").explained(
        "Timeout of UDP flows without a reply; 0 keeps the kernel's."
    ),
    Option("conntrack-udp-timeout-stream", "udpStreamTimeout", Kind.DURATION, "0s", to="udp_stream_timeout_s").explained(
        "Timeout of UDP flows with replies; 0 keeps the kernel's."
    ),
)

SERVERS = (
    Option(
        "healthz-bind-address",
        "healthzBindAddress",
        Kind.TEXT,
        "0.0.0.0:10256",
        "IP[:PORT]",
        to="servers.health",
        empty_is_unset=True,
    ).explained("Address of /healthz and /livez. In a file with an IPv6 bindAddress the default is [::]:10256."),
    Option(
        "healthz-port", "", Kind.INTEGER, "10256", minimum=0, maximum=65535, deprecated="use --healthz-bind-address"
    ).explained("Deprecated. 0 turns the health server off; any other number is the port if --healthz-bind-address has none."),
    Option(
        "metrics-bind-address",
        "metricsBindAddress",
        Kind.TEXT,
        "127.0.0.1:10249",
        "IP[:PORT]",
        to="servers.metrics",
        empty_is_unset=True,
    ).explained("Address of /metrics. In a file with an IPv6 bindAddress the default is [::1]:10249."),
    Option(
        "metrics-port",
        "",
        Kind.INTEGER,
        "10249",
        minimum=0,
        maximum=65535,
        status=Likeness.EXTENDED,
        deprecated="use --metrics-bind-address",
    ).explained("Deprecated. 0 turns the metrics server off; any other number is the port if --metrics-bind-address has none."),
    Option("bind-address-hard-fail", "bindAddressHardFail", Kind.BOOLEAN, "false", to="servers.bind_hard_fail").explained(
        "Exit if the address of the health or metrics server cannot be bound."
    ),
    Option("profiling", "enableProfiling", Kind.BOOLEAN, "false", to="logging.profiling", status=Likeness.PARTIAL).explained(
        "Let PUT /debug/flags/v of the metrics server change -v at run time. There is no Go profiler."
    ),
)

LOGGING = (
    Option(
        "logging-format",
        "logging.format",
        Kind.TEXT,
        "text",
        "FORMAT",
        to="logging.format",
        choices=tuple(Format),
        empty_is_unset=True,
        overrides_file=True,
    ).explained("Log lines as text for people, or as JSON for programs."),
    Option(
        "v", "logging.verbosity", Kind.INTEGER, "0", "LEVEL", minimum=0, to="logging.verbosity", overrides_file=True
    ).explained("Verbosity of the log; also --v LEVEL."),
)

WITHOUT_EFFECT: Mapping[str, tuple[Option, ...]] = {
    "Requests to the API server ask for JSON.": (
        Option("", "clientConnection.acceptContentTypes", Kind.TEXT, ""),
        Option(
            "kube-api-content-type",
            "clientConnection.contentType",
            Kind.TEXT,
            "application/vnd.kubernetes.protobuf",
            empty_is_unset=True,
        ),
    ),
    "Three watches need no rate limit; events have their own.": (
        Option("kube-api-qps", "clientConnection.qps", Kind.NUMBER, "5", empty_is_unset=True),
        Option("kube-api-burst", "clientConnection.burst", Kind.INTEGER, "10", minimum=0, empty_is_unset=True),
    ),
    "Known objects need no refresh; the watches report each change.": (
        Option("config-sync-period", "configSyncPeriod", Kind.DURATION, "15m0s", above=0, empty_is_unset=True),
    ),
    "No metric is hidden. Takes MAJOR.MINOR of any version.": (
        Option("show-hidden-metrics-for-version", "showHiddenMetricsForVersion", Kind.TEXT, ""),
    ),
    "IPVS never serves node ports on localhost.": (
        Option("iptables-localhost-nodeports", "iptables.localhostNodePorts", Kind.BOOLEAN, "true"),
    ),
    "For kube-proxy's iptables mode only.": (
        Option("iptables-sync-period", "iptables.syncPeriod", Kind.DURATION, "30s", empty_is_unset=True),
        Option("iptables-min-sync-period", "iptables.minSyncPeriod", Kind.DURATION, "1s", empty_is_unset=True),
    ),
    "For kube-proxy's nftables mode only.": (
        Option("", "nftables.masqueradeBit", Kind.INTEGER, "14"),
        Option("", "nftables.masqueradeAll", Kind.BOOLEAN, "false"),
        Option("", "nftables.syncPeriod", Kind.DURATION, "30s", empty_is_unset=True),
        Option("", "nftables.minSyncPeriod", Kind.DURATION, "1s", empty_is_unset=True),
    ),
    "For Windows only.": (
        Option("", "winkernel.networkName", Kind.TEXT, ""),
        Option("", "winkernel.sourceVip", Kind.TEXT, ""),
        Option("", "winkernel.enableDSR", Kind.BOOLEAN, "false"),
        Option("", "winkernel.rootHnsEndpointName", Kind.TEXT, ""),
        Option("", "winkernel.forwardHealthCheckVip", Kind.BOOLEAN, "false"),
        Option("", "windowsRunAsService", Kind.BOOLEAN, "false"),
    ),
    "For the userspace mode, which kube-proxy no longer has.": (Option("", "portRange", Kind.TEXT, ""),),
    "Levels by source file refer to kube-proxy's files.": (
        Option("vmodule", "logging.vmodule", Kind.PATTERNS, "", overrides_file=True),
    ),
    "Log lines are not buffered.": (
        Option(
            "log-flush-frequency",
            "logging.flushFrequency",
            Kind.DURATION,
            "5s",
            empty_is_unset=True,
            overrides_file=True,
            nanoseconds=True,
        ),
    ),
    "All log lines go to one stream, without a buffer.": (
        Option("log-text-split-stream", "logging.options.text.splitStream", Kind.BOOLEAN, "false", overrides_file=True),
        Option("log-text-info-buffer-size", "logging.options.text.infoBufferSize", Kind.QUANTITY, "0", overrides_file=True),
        Option("log-json-split-stream", "logging.options.json.splitStream", Kind.BOOLEAN, "false", overrides_file=True),
        Option("log-json-info-buffer-size", "logging.options.json.infoBufferSize", Kind.QUANTITY, "0", overrides_file=True),
    ),
    "kube-proxy does not use it either.": (
        Option("boot-id-file", "", Kind.TEXT, "", overrides_file=True),
        Option("machine-id-file", "", Kind.TEXT, "", overrides_file=True),
    ),
}
"""Options of kube-proxy that have no effect here, by the reason, which is also their help text.

These options are read, checked as kube-proxy checks them, and kept: a configuration written by ``--write-config-to`` still means
the same to kube-proxy.
"""

OPTIONS: Mapping[str, tuple[Option, ...]] = {
    "Configuration and commands": CONFIGURATION,
    "Where Services come from": SOURCE,
    "ipvsproxy's own options": tuple(
        option._replace(field=f"ipvsproxy.{option.field}", status=Likeness.OWN, overrides_file=True) for option in OWN
    ),
    "This node": NODE,
    "IPVS": tuple(option._replace(field=f"ipvs.{option.field}") for option in IPVS),
    "Masquerading and node ports": TRAFFIC,
    "Connection tracking, set once at the start": tuple(
        option._replace(field=f"conntrack.{option.field}", to=f"conntrack.{option.to}", minimum=0) for option in CONNTRACK
    ),
    "Health and metrics": SERVERS,
    "Logging": LOGGING,
    "Accepted without effect, so that existing command lines work": tuple(
        option._replace(help=why, status=Likeness.WITHOUT_EFFECT) for why, options in WITHOUT_EFFECT.items() for option in options
    ),
}
"""The options of ``run`` by section of ``--help``, in its order."""

OF_COMMANDS = tuple(
    option._replace(status=Likeness.OWN, overrides_file=True)
    for option in (
        Option("output", "", Kind.TEXT, "text", "text|json", to="output", choices=tuple(Format)).explained(
            "Text for people, or one JSON document with a field version. Also -o."
        ),
        Option("dry-run", "", Kind.BOOLEAN, "false", to="dry_run").explained("Only report what would be done."),
        Option("only", "", Kind.TEXT, "", "own", to="only", choices=("own",), command="cleanup").explained(
            "Remove only what kube-proxy does not know, so that connections go on: the way back to it."
        ),
        Option("once", "", Kind.BOOLEAN, "false", to="top.once", command="top").explained(
            "Print one picture as plain text, and end."
        ),
        Option("interval", "", Kind.DURATION, "2s", to="top.interval_s", minimum=0.5, maximum=3600, command="top").explained(
            "Time between two pictures."
        ),
        Option("sort", "", Kind.TEXT, "connections", "BY", to="top.sort", choices=tuple(Sort), command="top").explained(
            "The order of Services."
        ),
        Option("filter", "", Kind.TEXT, "", to="top.filter", command="top list").explained(
            "Only Services with this name, address or port; also namespace:demo type:nodeport node:a problems:only."
        ),
        Option("server", "", Kind.TEXT, "", "URL", to="top.server", command="top").explained(
            "The metrics server of an ipvsproxy, in place of the configured address."
        ),
        Option("namespace", "", Kind.TEXT, "kube-system", "NAME", to="fleet.namespace", command="fleet").explained(
            "The namespace of the pods. Also -n."
        ),
        Option(
            "selector", "", Kind.TEXT, "app.kubernetes.io/name=ipvsproxy", "LABELS", to="fleet.selector", command="fleet"
        ).explained("The labels of the pods."),
        Option("pods", "", Kind.LIST, "", "NAME,...", to="fleet.pods", command="fleet").explained(
            "The pods to ask instead of those with the labels. Then the right to get pods/proxy suffices."
        ),
    )
)
"""Options that are no settings of ``run``, so that no file has them."""

BY_KEY: Mapping[str, Option] = {option.key: option for options in (*OPTIONS.values(), OF_COMMANDS) for option in options}
"""All options by ``Option.key``, in the table's order."""

BY_FLAG: Mapping[str, Option] = {option.flag: option for option in BY_KEY.values() if option.flag}
"""All options that are flags, by the flag's name without leading dashes."""
