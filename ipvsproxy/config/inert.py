"""Options of kube-proxy that have no effect here. They are read, checked as kube-proxy checks them, and kept.

A configuration written by ``--write-config-to`` keeps them, so that it still means the same to kube-proxy.
"""

from ipvsproxy.config.option import Kind, Option, Status


def _inert(
    flag: str,
    field: str,
    kind: Kind,
    default: str,
    reason: str,
    *,
    minimum: float | None = None,
    above: float | None = None,
    zero_is_unset: bool = False,
    overrides_file: bool = False,
    nanoseconds: bool = False,
) -> Option:
    """An option without effect; ``reason`` says why it has none."""
    return Option(
        flag,
        field,
        kind,
        default,
        reason,
        status=Status.WITHOUT_EFFECT,
        minimum=minimum,
        above=above,
        zero_is_unset=zero_is_unset,
        overrides_file=overrides_file,
        nanoseconds=nanoseconds,
    )


_API = "Requests to the API server ask for JSON."
_CALLS = "Three watches need no rate limit; events have their own."
_IPTABLES = "For kube-proxy's iptables mode only."
_NFTABLES = "For kube-proxy's nftables mode only."
_WINDOWS = "For Windows only."
_STREAM = "All log lines go to one stream, without a buffer."

OPTIONS = (
    _inert("", "clientConnection.acceptContentTypes", Kind.TEXT, "", _API),
    _inert(
        "kube-api-content-type",
        "clientConnection.contentType",
        Kind.TEXT,
        "application/vnd.kubernetes.protobuf",
        _API,
        zero_is_unset=True,
    ),
    _inert("kube-api-qps", "clientConnection.qps", Kind.NUMBER, "5", _CALLS, zero_is_unset=True),
    _inert("kube-api-burst", "clientConnection.burst", Kind.INTEGER, "10", _CALLS, minimum=0, zero_is_unset=True),
    _inert(
        "config-sync-period",
        "configSyncPeriod",
        Kind.DURATION,
        "15m0s",
        "Known objects need no refresh; the watches report each change.",
        above=0,
        zero_is_unset=True,
    ),
    _inert(
        "show-hidden-metrics-for-version",
        "showHiddenMetricsForVersion",
        Kind.TEXT,
        "",
        "No metric is hidden. Takes MAJOR.MINOR of any version.",
    ),
    _inert(
        "iptables-localhost-nodeports",
        "iptables.localhostNodePorts",
        Kind.BOOLEAN,
        "true",
        "IPVS never serves node ports on localhost.",
    ),
    _inert("iptables-sync-period", "iptables.syncPeriod", Kind.DURATION, "30s", _IPTABLES, zero_is_unset=True),
    _inert("iptables-min-sync-period", "iptables.minSyncPeriod", Kind.DURATION, "1s", _IPTABLES, zero_is_unset=True),
    _inert("", "nftables.masqueradeBit", Kind.INTEGER, "14", _NFTABLES),
    _inert("", "nftables.masqueradeAll", Kind.BOOLEAN, "false", _NFTABLES),
    _inert("", "nftables.syncPeriod", Kind.DURATION, "30s", _NFTABLES, zero_is_unset=True),
    _inert("", "nftables.minSyncPeriod", Kind.DURATION, "1s", _NFTABLES, zero_is_unset=True),
    _inert("", "winkernel.networkName", Kind.TEXT, "", _WINDOWS),
    _inert("", "winkernel.sourceVip", Kind.TEXT, "", _WINDOWS),
    _inert("", "winkernel.enableDSR", Kind.BOOLEAN, "false", _WINDOWS),
    _inert("", "winkernel.rootHnsEndpointName", Kind.TEXT, "", _WINDOWS),
    _inert("", "winkernel.forwardHealthCheckVip", Kind.BOOLEAN, "false", _WINDOWS),
    _inert("", "windowsRunAsService", Kind.BOOLEAN, "false", _WINDOWS),
    _inert("", "portRange", Kind.TEXT, "", "For the userspace mode, which kube-proxy no longer has."),
    _inert(
        "vmodule",
        "logging.vmodule",
        Kind.PATTERNS,
        "",
        "Levels by source file refer to kube-proxy's files.",
        overrides_file=True,
    ),
    _inert(
        "log-flush-frequency",
        "logging.flushFrequency",
        Kind.DURATION,
        "5s",
        "Log lines are not buffered.",
        zero_is_unset=True,
        overrides_file=True,
        nanoseconds=True,
    ),
    _inert("log-text-split-stream", "logging.options.text.splitStream", Kind.BOOLEAN, "false", _STREAM, overrides_file=True),
    _inert("log-text-info-buffer-size", "logging.options.text.infoBufferSize", Kind.QUANTITY, "0", _STREAM, overrides_file=True),
    _inert("log-json-split-stream", "logging.options.json.splitStream", Kind.BOOLEAN, "false", _STREAM, overrides_file=True),
    _inert("log-json-info-buffer-size", "logging.options.json.infoBufferSize", Kind.QUANTITY, "0", _STREAM, overrides_file=True),
    _inert("boot-id-file", "", Kind.TEXT, "", "kube-proxy does not use it either.", overrides_file=True),
    _inert("machine-id-file", "", Kind.TEXT, "", "kube-proxy does not use it either.", overrides_file=True),
)
"""All options without effect; the help of each says why it has none."""
