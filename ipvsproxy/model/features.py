"""What ipvsproxy uses of the kernel: each feature, the version of Linux that brought it, and what happens without it.

docs/compatibility.md is made of this table, and ``ipvsproxy doctor`` prints which features this kernel has. Distributions take
younger features into older kernels, and leave others out. So the answer of the kernel counts, never its version, unless nothing
in the kernel shows the feature.
"""

import enum
from collections.abc import Iterator, Sequence
from typing import NamedTuple

Version = tuple[int, ...]
"""A version of Linux: (4, 18), or (2, 6, 39)."""

OLDEST: Version = (4, 18)
"""The oldest kernel for which this table was made: that of RHEL 8."""


class Without(enum.StrEnum):
    """What a kernel that lacks a feature means."""

    FALL_BACK = "fall-back"
    REFUSED = "refused"


class Feature(NamedTuple):
    """One feature of the kernel.

    ``since`` is the first version with it. ``source`` is the file of the kernel's source that has it, and the commit that brought
    it; ``is_dated`` is whether the version was looked up in the kernel's history or manuals. Otherwise it is the one that is
    commonly documented, and only the presence of the feature in the source of Linux 5.10, 6.1 and 6.12 was looked up. ``asked``
    is how and when this kernel is asked for it, and ``sentence`` what happens on a kernel without it: another way to the same
    (FALL_BACK), or which part is refused, and with which words.
    """

    name: str
    words: str
    use: str
    since: Version
    source: str
    asked: str
    without: Without
    sentence: str
    is_dated: bool = True

    @property
    def is_young(self) -> bool:
        """Whether a kernel that this table is for may be older than the feature."""
        return self.since > OLDEST


ONE_CONNECTION_MODULE = Feature(
    "one-connection-module",
    "one module for connection tracking of both families",
    "connection tracking of what IPVS forwards, and its settings",
    (4, 19),
    "net/netfilter/nf_conntrack_proto.c, a0ae2562c6c4",
    "at the start, by the files of modules",
    Without.FALL_BACK,
    "`nf_conntrack_ipv4` and `nf_conntrack_ipv6` are loaded as well, by the same call of modprobe",
)
FILTERED_ROUTES = Feature(
    "filtered-routes",
    "route dumps that the kernel filters (`NETLINK_GET_STRICT_CHK`)",
    "reading our local routes",
    (4, 20),
    "include/uapi/linux/netlink.h, 89d35528d17d",
    "at the start, by `setsockopt`",
    Without.FALL_BACK,
    "the kernel dumps all routes of the host at each poll, and ipvsproxy picks its own",
)
NAT_IN_INET = Feature(
    "nat-in-inet",
    "chains of the type `nat` in a table of the family `inet`",
    "`--rules-backend=nftables`",
    (5, 2),
    "net/netfilter/nft_chain_nat.c, d164385ec572",
    "at the start with that backend, by a transaction that is refused at its end",
    Without.REFUSED,
    "the start ends, names them, and asks for `--rules-backend=iptables`",
)
FILTERED_CONNECTIONS = Feature(
    "filtered-connections",
    "listings of tracked connections that the kernel filters (`CTA_FILTER`)",
    "deleting connections to endpoints that are gone",
    (5, 8),
    "net/netfilter/nf_conntrack_netlink.c, cb8aa9a3affb",
    "at the start, by a listing with an impossible filter",
    Without.FALL_BACK,
    "the kernel ignores the filter and lists all connections of a family, and ipvsproxy picks those to delete",
)
PROMPT_REUSE = Feature(
    "prompt-reuse",
    "`net.ipv4.vs.conn_reuse_mode` 1 without a lost first packet",
    "a new connection from a source port that was used a moment ago",
    (5, 9),
    "net/netfilter/ipvs/ip_vs_core.c, f0a5e4d7a594",
    "by the version of the kernel, as kube-proxy does: nothing in the kernel shows it",
    Without.FALL_BACK,
    "`conn_reuse_mode` is set to 0, because each such connection would wait a second: it goes to the endpoint of the former one, "
    "also while that one drains",
)
SCHEDULER_TWOS = Feature(
    "scheduler-twos",
    "the scheduler `twos`",
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
    "a module that somebody has unloaded while ipvsproxy runs",
    (5, 16),
    "net/netfilter/ipvs/ip_vs_ctl.c, 2199f562730d",
    "not at all: the start has `ip_vs` loaded by modprobe, on every kernel",
    Without.FALL_BACK,
    "modprobe at the next start; where there is none, the start ends and asks for `modprobe ip_vs` on the host",
)
IPVS = Feature(
    "ipvs",
    "IPVS with its netlink interface",
    "everything",
    (2, 6, 28),
    "net/netfilter/ipvs/ip_vs_ctl.c (`CONFIG_IP_VS`)",
    "at the start, by `/proc/net/ip_vs` and the netlink family",
    Without.REFUSED,
    "the start ends, and asks for `modprobe ip_vs` on the host or another kernel",
    is_dated=False,
)
IPVS_CONNECTION_TRACKING = Feature(
    "ipvs-connection-tracking",
    "connection tracking of what IPVS forwards (`net.ipv4.vs.conntrack`)",
    "masquerading",
    (2, 6, 37),
    "net/netfilter/ipvs/ip_vs_nfct.c (`CONFIG_IP_VS_NFCT`)",
    "at the start, by the setting",
    Without.REFUSED,
    "the start ends, and asks for a kernel with it",
    is_dated=False,
)
IPVS_IPV6 = Feature(
    "ipvs-ipv6",
    "IPVS for IPv6",
    "IPv6 Services",
    (2, 6, 28),
    "net/netfilter/ipvs/ip_vs_ctl.c (`CONFIG_IP_VS_IPV6`)",
    "at the start, by a virtual server that the kernel must refuse",
    Without.REFUSED,
    "IPv6 is not served, with the log line `family_not_served`; IPv4 is",
    is_dated=False,
)
IPVS_SCTP = Feature(
    "ipvs-sctp",
    "IPVS for SCTP",
    "SCTP Services",
    (2, 6, 34),
    "net/netfilter/ipvs/ip_vs_proto_sctp.c (`CONFIG_IP_VS_PROTO_SCTP`)",
    "not at all: a kernel without it takes such virtual servers all the same",
    Without.REFUSED,
    "SCTP Services get no answer; nothing else does",
    is_dated=False,
)
ADDRESS_FAMILIES = Feature(
    "address-families",
    "the address family of each real server (`IPVS_DEST_ATTR_ADDR_FAMILY`)",
    "reading real servers by netlink",
    (3, 18),
    "include/uapi/linux/ip_vs.h",
    "with each reading",
    Without.REFUSED,
    "the virtual server counts as unreadable, so that nothing of it is removed; log line `kernel_unreadable`",
    is_dated=False,
)
WIDE_COUNTERS = Feature(
    "wide-counters",
    "counters of 64 bits (`IPVS_SVC_ATTR_STATS64`, `IPVS_DEST_ATTR_STATS64`)",
    "traffic metrics, the page of the node, `top`",
    (4, 1),
    "include/uapi/linux/ip_vs.h",
    "with each reading",
    Without.REFUSED,
    "there are no traffic metrics, and a log line says why; serving does not need them",
    is_dated=False,
)
OLDER_INTERFACE = Feature(
    "older-interface",
    "questions to IPVS by `getsockopt` (`IP_VS_SO_GET_*`)",
    "cheap readings of IPv4 virtual servers and of connections",
    (2, 6),
    "include/uapi/linux/ip_vs.h",
    "with the first reading",
    Without.FALL_BACK,
    "virtual servers are read from `/proc/net/ip_vs`, and connections by netlink",
    is_dated=False,
)
SCHEDULER_MH = Feature(
    "scheduler-mh",
    "the scheduler `mh` and its flags",
    "`--ipvs-scheduler=mh`, the annotation `scheduler`",
    (4, 18),
    "net/netfilter/ipvs/ip_vs_mh.c",
    "at the start if it is configured; for an annotation, by the files of modules",
    Without.FALL_BACK,
    "`rr` serves in its place, or the scheduler of the node in that of an annotation, with a log line and an event",
    is_dated=False,
)
REUSE_MODE = Feature(
    "reuse-mode",
    "the setting `net.ipv4.vs.conn_reuse_mode`",
    "see `prompt-reuse`",
    (4, 1),
    "net/netfilter/ipvs/ip_vs_ctl.c",
    "when it is written",
    Without.FALL_BACK,
    "it is left alone; one warning, and `/healthz` lists it",
    is_dated=False,
)
EXPIRY_SETTINGS = Feature(
    "expiry-settings",
    "the settings `net.ipv4.vs.expire_nodest_conn` and `expire_quiescent_template`",
    "connections and affinity to endpoints that are gone",
    (2, 6),
    "net/netfilter/ipvs/ip_vs_ctl.c",
    "when they are written",
    Without.FALL_BACK,
    "they are left alone; one warning, and `/healthz` lists them",
    is_dated=False,
)
SETS = Feature(
    "sets",
    "ipset, protocol 6, with `hash:ip`, `hash:ip,port`, `hash:ip,port,ip`, `hash:ip,port,net` and `bitmap:port`",
    "`--rules-backend=iptables`",
    (2, 6, 39),
    "include/uapi/linux/netfilter/ipset/ip_set.h, net/netfilter/ipset/ip_set_hash_*.c",
    "at the start, by a question for the protocol and for each type",
    Without.REFUSED,
    "the start ends and names the type; `--rules-backend=auto` takes nftables instead",
    is_dated=False,
)
SETS_WITH_SCTP = Feature(
    "sets-with-sctp",
    "revision 1 of `hash:ip,port`, `hash:ip,port,ip` and `hash:ip,port,net`",
    "entries with the protocol SCTP",
    (2, 6, 39),
    "net/netfilter/ipset/ip_set_hash_ipport.c (`IPSET_TYPE_REV_MAX`)",
    "at the start, by the same questions: a set has the lowest revision that is enough",
    Without.FALL_BACK,
    "the set has the nearest revision that there is; entries of SCTP Services are refused one by one",
    is_dated=False,
)
SETS_WITH_MARKS = Feature(
    "sets-with-marks",
    "revision 5 of `hash:ip,port`, whose entries carry a mark",
    "a second scope of external addresses (`--ipvs-traffic-scopes=api`)",
    (3, 18),
    "net/netfilter/ipset/ip_set_hash_ipport.c (`IPSET_TYPE_REV_MAX`)",
    "at the start, by the same questions",
    Without.REFUSED,
    "the set is refused in a sentence that asks for `--ipvs-traffic-scopes=kube-proxy`; all else is served",
    is_dated=False,
)
RULE_MATCHES = Feature(
    "rule-matches",
    "the matches `set`, `comment`, `mark`, `addrtype`, `conntrack`, `physdev` and `ipvs`, and `MASQUERADE --random-fully`",
    "`--rules-backend=iptables`",
    (3, 14),
    "net/netfilter/xt_set.c, xt_ipvs.c, xt_physdev.c",
    "their modules are loaded at the start; `doctor` names missing ones",
    Without.REFUSED,
    "iptables-restore refuses the rules: they are tried again, and log and metrics show it",
    is_dated=False,
)
TRACKED_FLOWS = Feature(
    "tracked-flows",
    "netlink for connection tracking (`nf_conntrack_netlink`)",
    "deleting connections to endpoints that are gone",
    (2, 6, 14),
    "net/netfilter/nf_conntrack_netlink.c (`CONFIG_NF_CT_NETLINK`)",
    "at the start, by a question for its statistics",
    Without.REFUSED,
    "UDP and SCTP clients of such an endpoint wait until their connection expires; log and metrics show it",
    is_dated=False,
)
DUMMY_DEVICE = Feature(
    "dummy-device",
    "devices of the kind `dummy`",
    "addresses on `kube-ipvs0`",
    (2, 6, 24),
    "drivers/net/dummy.c (`CONFIG_DUMMY`)",
    "when the device is made",
    Without.REFUSED,
    "the device is refused in a sentence that names the module, and no address is bound",
    is_dated=False,
)
SHORT_ANSWERS = Feature(
    "short-answers",
    "error answers that do not repeat the message (`NETLINK_CAP_ACK`)",
    "every netlink socket",
    (4, 3),
    "include/uapi/linux/netlink.h, netlink(7)",
    "at the start, by `setsockopt`",
    Without.REFUSED,
    "the start ends: no netlink socket can be opened",
)
ORIGINAL_ADDRESSES = Feature(
    "original-addresses",
    "the original destination of a connection in tables of the family `inet` (`NFT_CT_DST_IP`, `NFT_CT_DST_IP6`)",
    "`--rules-backend=nftables`",
    (4, 17),
    "net/netfilter/nft_ct.c",
    "as `nat-in-inet`",
    Without.REFUSED,
    "as for `nat-in-inet`",
    is_dated=False,
)
GENERATIONS = Feature(
    "generations",
    "transactions of nf_tables that name a generation (`NFNL_BATCH_GENID`)",
    "`--rules-backend=nftables`",
    (4, 11),
    "net/netfilter/nfnetlink.c",
    "not at all: a kernel without it ignores the number",
    Without.FALL_BACK,
    "a transaction is not refused where another program has changed the table since it was read; the next poll repairs",
    is_dated=False,
)

FEATURES: Sequence[Feature] = (
    ONE_CONNECTION_MODULE,
    FILTERED_ROUTES,
    NAT_IN_INET,
    FILTERED_CONNECTIONS,
    PROMPT_REUSE,
    SCHEDULER_TWOS,
    SELF_LOADING,
    SCHEDULER_MH,
    IPVS,
    IPVS_CONNECTION_TRACKING,
    IPVS_IPV6,
    IPVS_SCTP,
    ADDRESS_FAMILIES,
    WIDE_COUNTERS,
    OLDER_INTERFACE,
    REUSE_MODE,
    EXPIRY_SETTINGS,
    SETS,
    SETS_WITH_SCTP,
    SETS_WITH_MARKS,
    RULE_MATCHES,
    TRACKED_FLOWS,
    DUMMY_DEVICE,
    SHORT_ANSWERS,
    ORIGINAL_ADDRESSES,
    GENERATIONS,
)
"""All features: the young ones first, by age."""


class Row(NamedTuple):
    """A kernel that people run: its version before all that its distributions have added, and their names."""

    version: Version
    distributions: tuple[str, ...]

    def __str__(self) -> str:
        return f"{dotted(self.version)} ({', '.join(self.distributions)})"


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


def young() -> Iterator[Feature]:
    """The features that some kernel of the table is too old for."""
    return (feature for feature in FEATURES if feature.is_young)


def dotted(version: Version) -> str:
    """A version as people write it."""
    return ".".join(map(str, version))
