"""The table of all options.

The flags, the configuration file, ``--help``, completion, ``Config`` and the documentation are derived from this table. Flags,
defaults and bounds are the same as in kube-proxy 1.36 (cmd/kube-proxy/app/options.go and pkg/proxy/apis/config in
kubernetes/kubernetes). The options are listed in the order in which their fields are written to a file.
"""

import functools
from collections.abc import Mapping

from ipvsproxy.config.option import Kind, Likeness, Option
from ipvsproxy.config.settings import Format, Sort
from ipvsproxy.model.kernel import ROUTE_PROTOCOL
from ipvsproxy.model.rules import Backend
from ipvsproxy.translate.translation_settings import Binding, DirectReturn, LocalMode, TrafficScopes

ANY_ADDRESS = "0.0.0.0"  # noqa: S104 - no server listens on this address
PROTOCOL, LOWEST_FREE = str(ROUTE_PROTOCOL), 5
"""The protocol number of ipvsproxy's local routes, and the lowest number for daemons (include/uapi/linux/rtnetlink.h).

The kernel and administrators use lower protocol numbers.
"""

FORMATS, MODES = tuple(Format), tuple(LocalMode)
PROTOBUF = "application/vnd.kubernetes.protobuf"

text = functools.partial(Option, Kind.TEXT)
boolean = functools.partial(Option, Kind.BOOLEAN, default="false")
integer = functools.partial(Option, Kind.INTEGER)
duration = functools.partial(Option, Kind.DURATION)
several = functools.partial(Option, Kind.LIST)
quantity = functools.partial(Option, Kind.QUANTITY, default="0")

CONFIGURATION = (
    text("config", "", placeholder="FILE").explained("Read a KubeProxyConfiguration (v1alpha1). Most flags are then ignored."),
    text("write-config-to", "", "write_config_to", placeholder="FILE", overrides_file=True).explained(
        "Write the resulting configuration to this file and exit."
    ),
    boolean("cleanup", "", "cleanup", overrides_file=True).explained(
        "Remove everything that ipvsproxy or kube-proxy has left in the kernel and exit."
    ),
    boolean("init-only", "", "init_only", overrides_file=True).explained(
        "Do only what needs full root (sysctls, modules) and exit; CAP_NET_ADMIN alone is then enough to run."
    ),
    text("version", "", default="false", placeholder="BOOL", overrides_file=True, implied="true").explained(
        "Print the version and exit."
    ),
    boolean("help", overrides_file=True).explained("Print this help and exit; also -h."),
    Option(Kind.GATES, "feature-gates", "featureGates", "translation.external_addresses", status=Likeness.EXTENDED).explained(
        "AllowServiceExternalIPs=false ignores externalIPs. Any other gate is accepted without effect."
    ),
    text("proxy-mode", "mode", placeholder="MODE").explained("Must be ipvs. Without a mode, kube-proxy would use iptables."),
)

SOURCE = (
    text("kubeconfig", "clientConnection.kubeconfig", "source.kubeconfig", placeholder="FILE").explained(
        "The file with address and credentials of the API server. Without it and --master: the pod's service account."
    ),
    text("master", "", "source.api_server", placeholder="URL", overrides_file=True).explained(
        "URL of the API server; replaces the one in the kubeconfig."
    ),
)

OWN = (
    text("manifests", "manifests", "source.manifests", placeholder="DIR", empty_is_unset=True).explained(
        "Read Services, EndpointSlices and Nodes from this directory instead of an API server."
    ),
    duration("ipvs-drain-deadline", "drainDeadline", "policy.drain_deadline_s", "0s", minimum=0).explained(
        "How long TCP connections to a removed endpoint may last; 0 means until they end by themselves."
    ),
    duration("ipvs-drift-check-interval", "driftCheckInterval", "engine.drift_check_interval_s", "5s", minimum=1).explained(
        "How often all real servers are compared with the desired ones; a check for other drift runs every 3s or more often."
    ),
    several("ipvs-sysctls", "ipvsSysctls", "ipvs_sysctls", placeholder="NAME=VALUE,...").explained(
        "Sysctls under net.ipv4.vs: sloppy_sctp, sloppy_tcp (0 or 1), conn_lfactor, svc_lfactor (-8 to 8, on Linux 7.1). "
        "Settings that are not given stay unchanged."
    ),
    several(
        "ipvs-allow-service-addresses", "allowServiceAddresses", "translation.allowed_addresses", placeholder="CIDR,..."
    ).explained("Serve Service addresses in these ranges even if they belong to the API server, this node or a range of pods."),
    boolean("ipvs-refuse-node-addresses", "refuseNodeAddresses", "translation.refuses_node_addresses").explained(
        "Refuse a Service's external and load-balancer addresses that are known to be addresses of other nodes."
    ),
    text("ipvs-traffic-scopes", "trafficScopes", "translation.scopes", "kube-proxy", choices=tuple(TrafficScopes)).explained(
        "With externalTrafficPolicy Local, clients of this node reach endpoints of this node (kube-proxy) or of all nodes (api)."
    ),
    text("ipvs-scope-mark-bits", "scopeMarkBits", "translation.scope_bits", "0x3fff", "MASK").explained(
        "The bits of packet marks for traffic scopes; no other program may write them. 14 bits suffice for 16383 Service ports."
    ),
    text("ipvs-direct-return", "directReturn", "drivers.direct_return", "off", choices=tuple(DirectReturn)).explained(
        "If on, the annotation ipvsproxy.io/direct-return takes effect: endpoints of all nodes answer clients directly."
    ),
    text("service-annotations", "serviceAnnotations", "translation.annotations", "all", "all|none|NAME,...").explained(
        "Which annotations of Services apply: all, none, or names without ipvsproxy.io/, such as scheduler,weights."
    ),
    text("rules-backend", "rulesBackend", "drivers.rules_backend", "iptables", choices=tuple(Backend)).explained(
        "What holds rules and sets: iptables with ipset, or nftables. auto takes nftables if iptables or ipset is missing."
    ),
    text("ipvs-vip-binding", "vipBinding", "translation.binding", "addresses", choices=tuple(Binding)).explained(
        "How Service addresses become local: by addresses on kube-ipvs0 (addresses), or, faster, by local routes on lo (routes)."
    ),
    integer(
        "ipvs-route-protocol", "routeProtocol", "drivers.route_protocol", PROTOCOL, "NUMBER", minimum=LOWEST_FREE, maximum=255
    ).explained("The protocol number of local routes to Service addresses; no other program may use it."),
    integer(
        "mass-deletion-guard", "massDeletionGuardPercent", "source.mass_deletion_percent", "50", "PERCENT", minimum=0, maximum=100
    ).explained(
        "If a list lacks more than this percentage of all Services or endpoints (with direct return, Nodes too), wait a minute "
        "for a second list; 0: never."
    ),
    duration("stale-watch-timeout", "staleWatchTimeout", "servers.stale_watch_s", "15m0s", minimum=0).explained(
        "How long the API server may be silent before log, metrics and /healthz report a stale watch; 0: never."
    ),
    boolean("stale-watch-unhealthy", "staleWatchUnhealthy", "servers.stale_watch_unhealthy").explained(
        "Answer load balancers with 503 on /healthz and health-check node ports while a watch is stale."
    ),
    integer("service-metrics-limit", "serviceMetricsLimit", "servers.service_metrics_limit", "20000", minimum=0).explained(
        "How many Service ports, and how many endpoints, have their own traffic metrics; 0 turns these metrics off."
    ),
    boolean("endpoint-metrics", "endpointMetrics", "servers.endpoint_metrics").explained(
        "Export traffic metrics for each endpoint, too, not only for each Service port."
    ),
    boolean("ui", "ui", "servers.ui", default="true").explained(
        "Show this node as a page at /ui/ of the metrics server; ipvsproxy top needs this option, too."
    ),
)
"""Options that kube-proxy does not have.

In a file, the fields of these options are in the section ``ipvsproxy:``. A flag overrides the field of the same option.
"""

NODE = (
    text(
        "hostname-override", "hostnameOverride", "node_name", placeholder="NAME", empty_is_unset=True, overrides_file=True
    ).explained("Name of this node's Node object; by default the host's name."),
    text("bind-address", "bindAddress", "translation.bind_address", ANY_ADDRESS, "IP", empty_is_unset=True).explained(
        "The node's primary IP. No server listens on it; 0.0.0.0 and :: leave the choice to the Node object."
    ),
    integer("oom-score-adj", "oomScoreAdj", "oom_score_adj", "-999", minimum=-1000, maximum=1000).explained(
        "When memory runs out, the kernel kills processes with a low score last."
    ),
)

IPVS = (
    text("ipvs-scheduler", "scheduler", "translation.scheduler", placeholder="NAME").explained(
        "Scheduler of every virtual server; empty means rr."
    ),
    duration("ipvs-sync-period", "syncPeriod", "engine.audit_interval_s", "30s", above=0, empty_is_unset=True).explained(
        "Time between two audits, which compare the whole kernel state with the desired state."
    ),
    duration("ipvs-min-sync-period", "minSyncPeriod", "engine.min_interval_s", "1s", minimum=0, file_default="0s").explained(
        "Minimum time between two syncs; 0 programs every change at once."
    ),
    several("ipvs-exclude-cidrs", "excludeCIDRs", "policy.excluded", placeholder="CIDR,...").explained(
        "Never remove virtual servers with an address in these ranges."
    ),
    boolean("ipvs-strict-arp", "strictARP", "strict_arp").explained(
        "Answer ARP requests only for addresses of the interface that receives them (arp_ignore 1, arp_announce 2); false leaves "
        "both as they are."
    ),
    duration("ipvs-tcp-timeout", "tcpTimeout", "timeouts.tcp_s", "0s", minimum=0).explained(
        "Timeout of idle TCP connections; 0 keeps the kernel's."
    ),
    duration("ipvs-tcpfin-timeout", "tcpFinTimeout", "timeouts.tcp_fin_s", "0s", minimum=0).explained(
        "Timeout of TCP connections after a FIN; 0 keeps the kernel's."
    ),
    duration("ipvs-udp-timeout", "udpTimeout", "timeouts.udp_s", "0s", minimum=0).explained(
        "Timeout of idle UDP flows; 0 keeps the kernel's."
    ),
)

TRAFFIC = (
    boolean("masquerade-all", "iptables.masqueradeAll", "translation.masquerade_all").explained(
        "Masquerade all traffic to cluster IPs."
    ),
    integer(
        "iptables-masquerade-bit", "iptables.masqueradeBit", "translation.masquerade_bit", "14", minimum=0, maximum=31
    ).explained("Bit of the packet mark that requests masquerading."),
    text(
        "detect-local-mode", "detectLocalMode", "translation.detect_local", "ClusterCIDR", choices=MODES, empty_is_unset=True
    ).explained("How traffic of local pods is recognised; other traffic to cluster IPs is masqueraded."),
    text("cluster-cidr", "clusterCIDR", "translation.cluster_networks", placeholder="CIDR[,CIDR]", empty_is_unset=True).explained(
        "Pod addresses, for --detect-local-mode=ClusterCIDR: one range, or one of each IP family."
    ),
    text("pod-bridge-interface", "detectLocal.bridgeInterface", placeholder="NAME").explained(
        "Bridge that the pods are on, for --detect-local-mode=BridgeInterface."
    ),
    text("pod-interface-name-prefix", "detectLocal.interfaceNamePrefix", placeholder="PREFIX").explained(
        "Prefix of the names of pod interfaces, for --detect-local-mode=InterfaceNamePrefix."
    ),
    several("nodeport-addresses", "nodePortAddresses", "translation.node_port_networks", placeholder="CIDR,...").explained(
        "Node addresses that serve node ports: CIDR ranges, and the words primary (the node's own addresses), localhost (none "
        "in IPVS mode) and all, in any mix. Empty means all."
    ),
)

CONNTRACK = (
    integer("conntrack-max-per-core", "maxPerCore", "max_per_core", "32768").explained(
        "Limit of tracked connections per CPU core; 0 keeps the kernel's."
    ),
    integer("conntrack-min", "min", "minimum", "131072").explained("Minimum of that limit, whatever the number of cores."),
    duration("conntrack-tcp-timeout-established", "tcpEstablishedTimeout", "tcp_established_timeout_s", "24h0m0s").explained(
        "Timeout of idle established TCP connections; 0 keeps the kernel's."
    ),
    duration("conntrack-tcp-timeout-close-wait", "tcpCloseWaitTimeout", "tcp_close_wait_timeout_s", "1h0m0s").explained(
        "Timeout of TCP connections in CLOSE_WAIT; 0 keeps the kernel's."
    ),
    boolean("conntrack-tcp-be-liberal", "tcpBeLiberal", "tcp_be_liberal").explained(
        "Do not mark packets outside of the TCP window as invalid."
    ),
    duration("conntrack-udp-timeout", "udpTimeout", "udp_timeout_s", "0s").explained(
        "Timeout of UDP flows without a reply; 0 keeps the kernel's."
    ),
    duration("conntrack-udp-timeout-stream", "udpStreamTimeout", "udp_stream_timeout_s", "0s").explained(
        "Timeout of UDP flows with replies; 0 keeps the kernel's."
    ),
)

SERVERS = (
    text(
        "healthz-bind-address", "healthzBindAddress", "servers.health", "0.0.0.0:10256", "IP[:PORT]", empty_is_unset=True
    ).explained("Address of /healthz and /livez. In a file with an IPv6 bindAddress the default is [::]:10256."),
    integer("healthz-port", "", "", "10256", minimum=0, maximum=65535, deprecated="--healthz-bind-address").explained(
        "Deprecated. 0 turns the health server off; any other number is the port if --healthz-bind-address has none."
    ),
    text(
        "metrics-bind-address", "metricsBindAddress", "servers.metrics", "127.0.0.1:10249", "IP[:PORT]", empty_is_unset=True
    ).explained("Address of /metrics. In a file with an IPv6 bindAddress the default is [::1]:10249."),
    integer(
        "metrics-port", "", "", "10249", minimum=0, maximum=65535, status=Likeness.EXTENDED, deprecated="--metrics-bind-address"
    ).explained("Deprecated. 0 turns the metrics server off; a higher number is the port if --metrics-bind-address has no port."),
    boolean("bind-address-hard-fail", "bindAddressHardFail", "servers.bind_hard_fail").explained(
        "Exit if the address of the health or metrics server cannot be bound."
    ),
    boolean("profiling", "enableProfiling", "logging.profiling", status=Likeness.PARTIAL).explained(
        "Let PUT /debug/flags/v of the metrics server change -v at run time. There is no Go profiler."
    ),
)

LOGGING = (
    text(
        "logging-format", "logging.format", "logging.format", "text", choices=FORMATS, empty_is_unset=True, overrides_file=True
    ).explained("Log lines as text for people, or as JSON for programs."),
    integer("v", "logging.verbosity", "logging.verbosity", "0", "LEVEL", minimum=0, overrides_file=True).explained(
        "Verbosity of the log; also --v LEVEL."
    ),
)

WITHOUT_EFFECT: Mapping[str, tuple[Option, ...]] = {
    "Requests to the API server ask for JSON.": (
        text("", "clientConnection.acceptContentTypes"),
        text("kube-api-content-type", "clientConnection.contentType", "", PROTOBUF, empty_is_unset=True),
    ),
    "The three watches need no rate limit; events have a rate limit of their own.": (
        Option(Kind.NUMBER, "kube-api-qps", "clientConnection.qps", default="5", empty_is_unset=True),
        integer("kube-api-burst", "clientConnection.burst", default="10", minimum=0, empty_is_unset=True),
    ),
    "Known objects need no refresh; the watches report each change.": (
        duration("config-sync-period", "configSyncPeriod", default="15m0s", above=0, empty_is_unset=True),
    ),
    "No metric is hidden. The value has the form MAJOR.MINOR; every version is accepted.": (
        text("show-hidden-metrics-for-version", "showHiddenMetricsForVersion"),
    ),
    "IPVS never serves node ports on localhost.": (
        boolean("iptables-localhost-nodeports", "iptables.localhostNodePorts", default="true"),
    ),
    "For kube-proxy's iptables mode only.": (
        duration("iptables-sync-period", "iptables.syncPeriod", default="30s", empty_is_unset=True),
        duration("iptables-min-sync-period", "iptables.minSyncPeriod", default="1s", empty_is_unset=True),
    ),
    "For kube-proxy's nftables mode only.": (
        integer("", "nftables.masqueradeBit", default="14"),
        boolean("", "nftables.masqueradeAll"),
        duration("", "nftables.syncPeriod", default="30s", empty_is_unset=True),
        duration("", "nftables.minSyncPeriod", default="1s", empty_is_unset=True),
    ),
    "For Windows only.": (
        text("", "winkernel.networkName"),
        text("", "winkernel.sourceVip"),
        boolean("", "winkernel.enableDSR"),
        text("", "winkernel.rootHnsEndpointName"),
        boolean("", "winkernel.forwardHealthCheckVip"),
        boolean("", "windowsRunAsService"),
    ),
    "For the userspace mode, which kube-proxy no longer has.": (text("", "portRange"),),
    "Levels by source file refer to kube-proxy's files.": (
        Option(Kind.PATTERNS, "vmodule", "logging.vmodule", overrides_file=True),
    ),
    "Log lines are not buffered.": (
        duration(
            "log-flush-frequency", "logging.flushFrequency", "", "5s", empty_is_unset=True, overrides_file=True, nanoseconds=True
        ),
    ),
    "All log lines go to one stream, without a buffer.": (
        boolean("log-text-split-stream", "logging.options.text.splitStream", overrides_file=True),
        quantity("log-text-info-buffer-size", "logging.options.text.infoBufferSize", overrides_file=True),
        boolean("log-json-split-stream", "logging.options.json.splitStream", overrides_file=True),
        quantity("log-json-info-buffer-size", "logging.options.json.infoBufferSize", overrides_file=True),
    ),
    "kube-proxy does not use it either.": (
        text("boot-id-file", overrides_file=True),
        text("machine-id-file", overrides_file=True),
    ),
}
"""Options of kube-proxy that have no effect in ipvsproxy. The options are grouped by the reason why they have no effect. This
reason is also the help text of each option in the group.

These options are read and kept, and are checked as in kube-proxy. Therefore, a configuration that ``--write-config-to`` has
written still has the same meaning for kube-proxy.
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
"""The options of ``run`` by section of ``--help``, in the order of ``--help``."""

OF_COMMANDS = tuple(
    option._replace(status=Likeness.OWN, overrides_file=True)
    for option in (
        text("output", "", "output", "text", choices=FORMATS).explained(
            "Text for people, or one JSON document with a field version. Also -o."
        ),
        boolean("dry-run", "", "dry_run").explained("Only report what would be done."),
        text("only", "", "only", choices=("own",), command="cleanup").explained(
            "Remove only what kube-proxy does not know, so that connections go on: the way back to it."
        ),
        boolean("once", "", "top.once", command="top").explained("Print one picture as plain text, and end."),
        duration("interval", "", "top.interval_s", "2s", minimum=0.5, maximum=3600, command="top").explained(
            "Time between two pictures."
        ),
        text("sort", "", "top.sort", "connections", choices=tuple(Sort), command="top").explained("The order of Services."),
        text("filter", "", "top.filter", command="top list").explained(
            "Only Services with this name, address or port; also namespace:demo type:nodeport node:a problems:only."
        ),
        text("server", "", "top.server", placeholder="URL", command="top").explained(
            "The metrics server of an ipvsproxy, in place of the configured address."
        ),
        text("namespace", "", "fleet.namespace", "kube-system", "NAME", command="fleet").explained(
            "The namespace of the pods. Also -n."
        ),
        text("selector", "", "fleet.selector", "app.kubernetes.io/name=ipvsproxy", "LABELS", command="fleet").explained(
            "The labels of the pods."
        ),
        several("pods", "", "fleet.pods", placeholder="NAME,...", command="fleet").explained(
            "The pods to ask instead of those with the labels. Then the right to get pods/proxy suffices."
        ),
    )
)
"""Options that are not settings of ``run``, so a file cannot contain these options."""

BY_KEY: Mapping[str, Option] = {option.key: option for options in (*OPTIONS.values(), OF_COMMANDS) for option in options}
"""All options by their ``Option.key``: first the options in ``OPTIONS``, then the options in ``OF_COMMANDS``."""

BY_FLAG: Mapping[str, Option] = {option.flag: option for option in BY_KEY.values() if option.flag}
"""All options that are flags; the key is the flag's name without leading dashes."""
