"""What ipvsproxy uses of the kernel: each feature, the version of Linux that brought it, and what happens without it.

docs/compatibility.md is made of this table, and ``ipvsproxy doctor`` prints which features this kernel has. Distributions take
younger features into older kernels, and leave others out. So the answer of the kernel counts, never its version, unless nothing
in the kernel shows the feature.

Here are the features that a kernel may be too old for. ``basic_features`` has those of all kernels of the table.
"""

from collections.abc import Sequence

from ipvsproxy.model import basic_features
from ipvsproxy.model.feature import Feature, Row, Version, Without

ONE_CONNECTION_MODULE = Feature(
    "one-connection-module",
    "one module for connection tracking of both families",
    ("nf_conntrack",),
    "connection tracking of what IPVS forwards, and its settings",
    (4, 19),
    "net/netfilter/nf_conntrack_proto.c, a0ae2562c6c4",
    "at the start, by the files of modules",
    Without.FALL_BACK,
    "`nf_conntrack_ipv4` and `nf_conntrack_ipv6` are loaded as well, by the same call of modprobe",
)
FILTERED_ROUTES = Feature(
    "filtered-routes",
    "route dumps that the kernel filters",
    ("NETLINK_GET_STRICT_CHK",),
    "reading our local routes",
    (4, 20),
    "include/uapi/linux/netlink.h, 89d35528d17d",
    "at the start, by `setsockopt`",
    Without.FALL_BACK,
    "the kernel dumps all routes of the host at each poll, and ipvsproxy picks its own",
)
NAT_IN_INET = Feature(
    "nat-in-inet",
    "chains of the type nat, and masquerading, in a table of the family inet",
    ("nft_chain_nat", "nft_masq", "nft_nat"),
    "`--rules-backend=nftables`",
    (5, 2),
    "net/netfilter/nft_chain_nat.c, d164385ec572",
    "at the start with that backend, by a transaction that is refused at its end",
    Without.REFUSED,
    "the start ends, names them, and asks for `--rules-backend=iptables`",
)
ARRIVAL_BEHIND_IPVS = Feature(
    "arrival-behind-ipvs",
    "matches on the interface of arrival at the hook postrouting",
    ("NFT_META_IIFNAME",),
    "`--rules-backend=nftables` with `--detect-local-mode=BridgeInterface` or `InterfaceNamePrefix`",
    (5, 5),
    "net/ipv4/ip_output.c, 28f8bfd1ac94",
    "by the version of the kernel: nothing in the kernel shows it",
    Without.FALL_BACK,
    "connections of this node's pods to cluster IPs are masqueraded as well",
)
FILTERED_CONNECTIONS = Feature(
    "filtered-connections",
    "listings of tracked connections that the kernel filters",
    ("CTA_FILTER", "CTA_FILTER_ORIG_FLAGS"),
    "deleting connections to endpoints that are gone",
    (5, 8),
    "net/netfilter/nf_conntrack_netlink.c, cb8aa9a3affb",
    "at the start, by a listing with an impossible filter",
    Without.FALL_BACK,
    "the kernel ignores the filter and lists all connections of a family, and ipvsproxy picks those to delete",
)
TABLE_COMMENTS = Feature(
    "table-comments",
    "comments of tables of nf_tables",
    ("NFTA_TABLE_USERDATA",),
    "telling tables of kube-proxy's nftables mode from others of the same name",
    (5, 10),
    "include/uapi/linux/netfilter/nf_tables.h, in review on 2020-08-21",
    "with each reading",
    Without.FALL_BACK,
    "such a table counts as another program's, and stays; kube-proxy's nftables mode needs a younger kernel",
)
PROMPT_REUSE = Feature(
    "prompt-reuse",
    "the value 1 of `net.ipv4.vs.conn_reuse_mode` without a lost first packet",
    ("net.ipv4.vs.conn_reuse_mode",),
    "a new connection from a source port that was used a moment ago",
    (5, 9),
    "net/netfilter/ipvs/ip_vs_core.c, f0a5e4d7a594",
    "by the version of the kernel, as kube-proxy does: nothing in the kernel shows it",
    Without.FALL_BACK,
    "the setting is 0, because each such connection would wait a second: it goes to the endpoint of the former one, also while "
    "that one drains",
)
SCHEDULER_TWOS = Feature(
    "scheduler-twos",
    "the scheduler `twos`",
    ("ip_vs_twos",),
    "`--ipvs-scheduler=twos`",
    (5, 12),
    "net/netfilter/ipvs/ip_vs_twos.c, 012da53d1afb",
    "at the start if it is configured, by a virtual server that the kernel must refuse",
    Without.FALL_BACK,
    "`rr` serves in its place, with the log line `scheduler_not_used` and an event on the Node",
)
SELF_LOADING = Feature(
    "self-loading",
    "loading of the module `ip_vs` by a question for its netlink family",
    ("MODULE_ALIAS_GENL_FAMILY",),
    "a module that somebody has unloaded while ipvsproxy runs",
    (5, 16),
    "net/netfilter/ipvs/ip_vs_ctl.c, 2199f562730d",
    "not at all: the start has `ip_vs` loaded by modprobe, on every kernel",
    Without.FALL_BACK,
    "modprobe at the next start; where there is none, the start ends and asks for `modprobe ip_vs` on the host",
)

YOUNG: Sequence[Feature] = (
    ONE_CONNECTION_MODULE,
    FILTERED_ROUTES,
    NAT_IN_INET,
    ARRIVAL_BEHIND_IPVS,
    FILTERED_CONNECTIONS,
    PROMPT_REUSE,
    TABLE_COMMENTS,
    SCHEDULER_TWOS,
    SELF_LOADING,
)
"""The features that some kernel of the table is too old for, by age."""
FEATURES: Sequence[Feature] = (*YOUNG, *basic_features.BASIC)
"""All features."""

ROWS: Sequence[Row] = (
    Row((4, 18), ("RHEL 8",)),
    Row((5, 4), ("Ubuntu 20.04",)),
    Row((5, 10), ("Debian 11",)),
    Row((5, 14), ("RHEL 9",)),
    Row((5, 15), ("Ubuntu 22.04",)),
    Row((6, 1), ("Debian 12",)),
    Row((6, 8), ("Ubuntu 24.04",)),
    Row((6, 12), ("Debian 13", "RHEL 10")),
)
"""The kernels of the table, from the oldest to the newest."""


def row_of(version: Version) -> Row | None:
    """The row that a kernel of this version belongs to: the newest that is not younger; None before the first row."""
    return next((row for row in reversed(ROWS) if row.version <= version), None)
