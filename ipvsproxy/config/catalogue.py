"""Every option, with those of ``own`` and ``inert``: the one table behind flags, file, ``--help`` and documentation.

Flags, defaults and bounds are those of kube-proxy 1.36 (cmd/kube-proxy/app/options.go and pkg/proxy/apis/config in
kubernetes/kubernetes), in the order in which they are written to a file.
"""

from collections.abc import Mapping

from ipvsproxy.config import inert, own
from ipvsproxy.config.option import Group, Kind, Option, Status
from ipvsproxy.translate.settings import LocalMode

CONFIGURATION = (
    Option("config", "", Kind.TEXT, "", "Read a KubeProxyConfiguration (v1alpha1). Most flags are then ignored.", "FILE"),
    Option(
        "write-config-to",
        "",
        Kind.TEXT,
        "",
        "Write the resulting configuration to this file and exit.",
        "FILE",
        overrides_file=True,
    ),
    Option(
        "cleanup",
        "",
        Kind.BOOLEAN,
        "false",
        "Remove everything that ipvsproxy or kube-proxy has left in the kernel and exit.",
        overrides_file=True,
    ),
    Option(
        "init-only",
        "",
        Kind.BOOLEAN,
        "false",
        "Do only what needs full root (sysctls, modules) and exit; CAP_NET_ADMIN alone is then enough to run.",
        overrides_file=True,
    ),
    Option("version", "", Kind.TEXT, "false", "Print the version and exit.", "BOOL", overrides_file=True, implied="true"),
    Option("help", "", Kind.BOOLEAN, "false", "Print this help and exit; also -h.", overrides_file=True),
    Option(
        "feature-gates",
        "featureGates",
        Kind.GATES,
        "",
        "AllowServiceExternalIPs=false ignores externalIPs. Any other gate is accepted without effect.",
        status=Status.EXTENDED,
    ),
    Option(
        "proxy-mode",
        "mode",
        Kind.TEXT,
        "",
        "Must be ipvs; kube-proxy would take an absent mode for iptables.",
        "MODE",
    ),
)

SOURCE = (
    Option(
        "kubeconfig",
        "clientConnection.kubeconfig",
        Kind.TEXT,
        "",
        "How to reach the API server. Without this flag and --master: the pod's service account.",
        "FILE",
    ),
    Option("master", "", Kind.TEXT, "", "URL of the API server; replaces the one in the kubeconfig.", "URL", overrides_file=True),
)

NODE = (
    Option(
        "hostname-override",
        "hostnameOverride",
        Kind.TEXT,
        "",
        "Name of this node's Node object; by default the host's name.",
        "NAME",
        empty_is_unset=True,
        overrides_file=True,
    ),
    Option(
        "bind-address",
        "bindAddress",
        Kind.TEXT,
        "0.0.0.0",  # noqa: S104 - no server listens on it
        "The node's primary IP. No server listens on it; 0.0.0.0 and :: leave the choice to the Node object.",
        "IP",
        zero_is_unset=True,
        empty_is_unset=True,
    ),
    Option(
        "oom-score-adj",
        "oomScoreAdj",
        Kind.INTEGER,
        "-999",
        "When memory runs out, the kernel kills processes with a low score last.",
        minimum=-1000,
        maximum=1000,
    ),
)

IPVS = (
    Option("ipvs-scheduler", "ipvs.scheduler", Kind.TEXT, "", "Scheduler of every virtual server; empty means rr.", "NAME"),
    Option(
        "ipvs-sync-period",
        "ipvs.syncPeriod",
        Kind.DURATION,
        "30s",
        "Time between two audits, which compare the whole kernel state with the desired state.",
        above=0,
        zero_is_unset=True,
    ),
    Option(
        "ipvs-min-sync-period",
        "ipvs.minSyncPeriod",
        Kind.DURATION,
        "1s",
        "Minimum time between two syncs; 0 programs every change at once.",
        minimum=0,
        file_default="0s",
    ),
    Option(
        "ipvs-exclude-cidrs",
        "ipvs.excludeCIDRs",
        Kind.LIST,
        "",
        "Never remove virtual servers with an address in these ranges.",
        "CIDR,...",
    ),
    Option(
        "ipvs-strict-arp",
        "ipvs.strictARP",
        Kind.BOOLEAN,
        "false",
        "Answer ARP requests only for addresses of the interface that receives them (arp_ignore 1, arp_announce 2).",
    ),
    Option(
        "ipvs-tcp-timeout",
        "ipvs.tcpTimeout",
        Kind.DURATION,
        "0s",
        "Timeout of idle TCP connections; 0 keeps the kernel's.",
        minimum=0,
    ),
    Option(
        "ipvs-tcpfin-timeout",
        "ipvs.tcpFinTimeout",
        Kind.DURATION,
        "0s",
        "Timeout of TCP connections after a FIN; 0 keeps the kernel's.",
        minimum=0,
    ),
    Option(
        "ipvs-udp-timeout",
        "ipvs.udpTimeout",
        Kind.DURATION,
        "0s",
        "Timeout of idle UDP flows; 0 keeps the kernel's.",
        minimum=0,
    ),
)

TRAFFIC = (
    Option(
        "masquerade-all",
        "iptables.masqueradeAll",
        Kind.BOOLEAN,
        "false",
        "Masquerade all traffic to cluster IPs.",
    ),
    Option(
        "iptables-masquerade-bit",
        "iptables.masqueradeBit",
        Kind.INTEGER,
        "14",
        "Bit of the packet mark that requests masquerading.",
        minimum=0,
        maximum=31,
    ),
    Option(
        "detect-local-mode",
        "detectLocalMode",
        Kind.TEXT,
        "ClusterCIDR",
        "How traffic of local pods is recognised; other traffic to cluster IPs is masqueraded.",
        "MODE",
        choices=tuple(LocalMode),
        zero_is_unset=True,
        empty_is_unset=True,
    ),
    Option(
        "cluster-cidr",
        "clusterCIDR",
        Kind.TEXT,
        "",
        "Pod addresses, for --detect-local-mode=ClusterCIDR: one range, or one of each IP family.",
        "CIDR[,CIDR]",
        empty_is_unset=True,
    ),
    Option(
        "pod-bridge-interface",
        "detectLocal.bridgeInterface",
        Kind.TEXT,
        "",
        "Bridge that the pods are on, for --detect-local-mode=BridgeInterface.",
        "NAME",
    ),
    Option(
        "pod-interface-name-prefix",
        "detectLocal.interfaceNamePrefix",
        Kind.TEXT,
        "",
        "Prefix of the names of pod interfaces, for --detect-local-mode=InterfaceNamePrefix.",
        "PREFIX",
    ),
    Option(
        "nodeport-addresses",
        "nodePortAddresses",
        Kind.LIST,
        "",
        "Node addresses that serve node ports: CIDR ranges, or the word primary. Empty means all node addresses.",
        "CIDR,...",
    ),
)

CONNTRACK = (
    Option(
        "conntrack-max-per-core",
        "conntrack.maxPerCore",
        Kind.INTEGER,
        "32768",
        "Limit of tracked connections per CPU core; 0 keeps the kernel's.",
        minimum=0,
    ),
    Option(
        "conntrack-min",
        "conntrack.min",
        Kind.INTEGER,
        "131072",
        "Minimum of that limit, whatever the number of cores.",
        minimum=0,
    ),
    Option(
        "conntrack-tcp-timeout-established",
        "conntrack.tcpEstablishedTimeout",
        Kind.DURATION,
        "24h0m0s",
        "Timeout of idle established TCP connections; 0 keeps the kernel's.",
        minimum=0,
    ),
    Option(
        "conntrack-tcp-timeout-close-wait",
        "conntrack.tcpCloseWaitTimeout",
        Kind.DURATION,
        "1h0m0s",
        "Timeout of TCP connections in CLOSE_WAIT; 0 keeps the kernel's.",
        minimum=0,
    ),
    Option(
        "conntrack-tcp-be-liberal",
        "conntrack.tcpBeLiberal",
        Kind.BOOLEAN,
        "false",
        "Do not mark packets outside of the TCP window as invalid.",
    ),
    Option(
        "conntrack-udp-timeout",
        "conntrack.udpTimeout",
        Kind.DURATION,
        "0s",
        "Timeout of UDP flows without a reply; 0 keeps the kernel's.",
        minimum=0,
    ),
    Option(
        "conntrack-udp-timeout-stream",
        "conntrack.udpStreamTimeout",
        Kind.DURATION,
        "0s",
        "Timeout of UDP flows with replies; 0 keeps the kernel's.",
        minimum=0,
    ),
)

SERVERS = (
    Option(
        "healthz-bind-address",
        "healthzBindAddress",
        Kind.TEXT,
        "0.0.0.0:10256",
        "Address of /healthz and /livez. In a file with an IPv6 bindAddress the default is [::]:10256.",
        "IP[:PORT]",
        zero_is_unset=True,
        empty_is_unset=True,
    ),
    Option(
        "healthz-port",
        "",
        Kind.INTEGER,
        "10256",
        "Deprecated. 0 turns the health server off; any other number is the port if --healthz-bind-address has none.",
        minimum=0,
        maximum=65535,
        deprecated="use --healthz-bind-address",
    ),
    Option(
        "metrics-bind-address",
        "metricsBindAddress",
        Kind.TEXT,
        "127.0.0.1:10249",
        "Address of /metrics. In a file with an IPv6 bindAddress the default is [::1]:10249.",
        "IP[:PORT]",
        zero_is_unset=True,
        empty_is_unset=True,
    ),
    Option(
        "metrics-port",
        "",
        Kind.INTEGER,
        "10249",
        "Deprecated. 0 turns the metrics server off; any other number is the port if --metrics-bind-address has none.",
        minimum=0,
        maximum=65535,
        status=Status.EXTENDED,
        deprecated="use --metrics-bind-address",
    ),
    Option(
        "bind-address-hard-fail",
        "bindAddressHardFail",
        Kind.BOOLEAN,
        "false",
        "Exit if one of these addresses cannot be bound.",
    ),
    Option(
        "profiling",
        "enableProfiling",
        Kind.BOOLEAN,
        "false",
        "Let PUT /debug/flags/v of the metrics server change -v at run time. There is no Go profiler.",
        status=Status.PARTIAL,
    ),
)

LOGGING = (
    Option(
        "logging-format",
        "logging.format",
        Kind.TEXT,
        "text",
        "Log lines as text for people, or as JSON for programs.",
        "FORMAT",
        choices=("text", "json"),
        zero_is_unset=True,
        overrides_file=True,
    ),
    Option("v", "logging.verbosity", Kind.LEVEL, "0", "Verbosity of the log; also --v LEVEL.", overrides_file=True),
)

OPTIONS: Mapping[Group, tuple[Option, ...]] = {
    Group.CONFIGURATION: CONFIGURATION,
    Group.SOURCE: SOURCE,
    Group.OWN: own.OPTIONS,
    Group.NODE: NODE,
    Group.IPVS: IPVS,
    Group.TRAFFIC: TRAFFIC,
    Group.CONNTRACK: CONNTRACK,
    Group.SERVERS: SERVERS,
    Group.LOGGING: LOGGING,
    Group.WITHOUT_EFFECT: inert.OPTIONS,
}
"""All options by section."""

BY_KEY: Mapping[str, Option] = {option.key: option for options in OPTIONS.values() for option in options}
"""All options by ``Option.key``, in the table's order."""

BY_FLAG: Mapping[str, Option] = {option.flag: option for option in BY_KEY.values() if option.flag}
"""All options that are flags, by the flag's name without leading dashes."""
