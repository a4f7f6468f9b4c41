"""The rules that turn the given values into a ``Config``, or into a list of all problems.

The rules are the same as in kube-proxy (pkg/proxy/apis/config/validation in kubernetes/kubernetes). Like kube-proxy, ipvsproxy
checks only options that have an effect in IPVS mode.
"""

import collections
import contextlib
import dataclasses
import enum
import re
import urllib.parse
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

from ipvsproxy.config import catalogue
from ipvsproxy.config.option import ConfigError, Given, Likeness, Problem, Value, ValuePlace, quoted, render_duration, suggestion
from ipvsproxy.config.settings import Config, ListenAddress
from ipvsproxy.model.annotations import ALL_ANNOTATIONS, PREFIX, Annotation
from ipvsproxy.model.kernel import Sysctl, Timeouts
from ipvsproxy.model.net import Address, Family, Network, parse_address, parse_host_port, parse_network
from ipvsproxy.translate.translation_settings import LocalMode

HEALTH_PORT = 10256
METRICS_PORT = 10249
_OTHER_MODES = ("iptables", "nftables")
_PRIMARY = "primary"
_ALL = "all"
_NODE_PORT_RANGES = {"localhost": ("127.0.0.0/8", "::1/128"), _ALL: ("0.0.0.0/0", "::/0")}
"""For each word that ``nodePortAddresses`` may contain, except ``primary``: the address ranges that the word means
(cmd/kube-proxy/app/server.go since 1.37)."""
_SCHEDULER = re.compile(r"[A-Za-z0-9_-]{1,15}", re.ASCII)  # The kernel's limit IP_VS_SCHEDNAME_MAXLEN is 16 bytes with the NUL.
_INTERFACE = re.compile(r"[^\s/:\"'\\+]+")  # Neither rules nor names of interfaces may contain the excluded characters.
_MARK_DROP = 0x8000  # The mark bit of the kubelet's chain KUBE-MARK-DROP.
_MOST_SCOPE_BITS = 16
_INTERFACE_NAMES: Mapping[LocalMode, tuple[str, int]] = {
    LocalMode.BRIDGE_INTERFACE: ("detectLocal.bridgeInterface", 15),  # The kernel's limit IFNAMSIZ is 16 with the NUL.
    # A rule appends a plus sign to the prefix, and the plus sign counts towards iptables' limit.
    LocalMode.INTERFACE_NAME_PREFIX: ("detectLocal.interfaceNamePrefix", 14),
}
"""For each mode that recognises local pods by their interface: the option that names the interfaces, and the length in bytes of
the longest accepted name."""
_VERSION = re.compile(r"[0-9]{1,4}\.[0-9]{1,4}", re.ASCII)
_EXTERNAL_IPS_GATE = "AllowServiceExternalIPs"
IPVS_SYSCTLS = {"sloppy_sctp": range(2), "sloppy_tcp": range(2), "conn_lfactor": range(-8, 9), "svc_lfactor": range(-8, 9)}
"""The sysctls of IPVS that an operator may set, with the allowed values of each sysctl.

All other sysctls of IPVS are either chosen by ipvsproxy or not changed.
"""
_LOCKED_GATES = frozenset(("PreferSameTrafficDistribution", "MultiCIDRServiceAllocator"))


@dataclasses.dataclass(eq=False)
class Values:
    """The parsed parts of a command line or a file: values by ``Option.key``, problems, and notices for the operator.

    An option with a problem gets its default value. ``config_file`` is empty if there is no configuration file. ``words`` are the
    arguments that are not flags; a word may appear anywhere among the flags.
    """

    config_file: str = ""
    given: dict[str, Given] = dataclasses.field(default_factory=dict)
    problems: list[Problem] = dataclasses.field(default_factory=list)
    notices: list[str] = dataclasses.field(default_factory=list)
    words: list[str] = dataclasses.field(default_factory=list)

    def get(self, key: str) -> Any:
        """The value of an option, or its default."""
        if key in self.given and self.known(key):
            return self.given[key].value
        option = catalogue.BY_KEY[key]
        return option.parse(option.default_in(file=bool(self.config_file)))

    def source(self, key: str) -> ValuePlace:
        """The place where the user gave, or could have given, the option's value."""
        if key in self.given:
            return self.given[key].source
        option = catalogue.BY_KEY[key]
        return ValuePlace(option.field, self.config_file) if self.config_file and option.field else ValuePlace(f"--{option.flag}")

    def refuse(self, key: str, text: str, source: ValuePlace | None = None) -> None:
        """Record a problem with an option; if only a part of the value is wrong, ``source`` is the place of this part."""
        self.problems.append(Problem(source or self.source(key), text, key))

    def known(self, *keys: str) -> bool:
        """Whether none of the given options has a problem; only then can the values of the options be compared."""
        return not any(problem.key in keys for problem in self.problems)


def resolve(values: Values, hostname: str) -> Config:
    """Apply the defaults, check the values, and return the configuration.

    Raises:
        ConfigError: the values have problems, including problems that the parser has found.
    """
    _check_bounds(values)
    fields = _fields(values)
    _check_mode(values)
    bind_address = _bind_address(values)
    fields["servers"] |= {
        "health": _listen(values, "healthzBindAddress", bind_address, ("0.0.0.0", "::"), HEALTH_PORT),  # noqa: S104 - the same default as in kube-proxy
        "metrics": _listen(values, "metricsBindAddress", bind_address, ("127.0.0.1", "::1"), METRICS_PORT),
    }
    _check_writable(values, fields["servers"])
    fields[""]["node_name"] = _node_name(values, hostname)
    fields[""]["ipvs_sysctls"] = _ipvs_sysctls(values)
    _check_source(values)
    _check_periods(values)
    bits = _scope_bits(values)
    fields["policy"] |= {"excluded": _networks(values, "ipvs.excludeCIDRs"), "scope_bits": bits}
    fields["translation"] |= {
        "bind_address": bind_address,
        "scheduler": _scheduler(values),
        "allowed_addresses": _networks(values, "ipvsproxy.allowServiceAddresses"),
        "scope_bits": bits,
        "annotations": _annotations(values),
        **_detect_local(values),
        **_node_ports(values),
        "external_addresses": _gates(values),
    }
    fields["top"]["server"] = _top_server(values)
    timeouts = Timeouts(**{name: int(value) for name, value in fields["timeouts"].items()})
    fields["engine"]["timeouts"] = timeouts if any(timeouts) else None
    if values.problems:
        raise ConfigError(values.problems)
    classes: dict[str, Any] = {one.name: one.type for one in dataclasses.fields(Config)}
    sections = {name: classes[name](**fields[name]) for name in classes.keys() & fields}
    return Config(
        **fields[""],
        **sections,
        config_file=values.config_file,
        without_effect=tuple(_without_effect(values.given)),
        notices=tuple(values.notices),
        values=_file_values(values, bind_address, fields["servers"]),
    )


def _fields(values: Values) -> dict[str, dict[str, Any]]:
    """The value of each option that has an attribute of ``Config`` (``Option.to``), grouped by section and then by name.

    An option with a fixed set of values has a member of an enumeration as its value. The value of any other option keeps its
    type, so an address is still text.
    """
    fields: dict[str, dict[str, Any]] = collections.defaultdict(dict)
    for key, option in catalogue.BY_KEY.items():
        section, _, name = option.to.rpartition(".")
        if name:
            value = values.get(key)
            choice = next(iter(option.choices), None)
            fields[section][name] = type(choice)(value or option.default) if isinstance(choice, enum.Enum) else value
    return fields


def _check_bounds(values: Values) -> None:
    for key, (value, _) in values.given.items():
        option = catalogue.BY_KEY[key]
        if (option.choices and (value or option.command) and value not in option.choices) or (
            isinstance(value, int | float) and not isinstance(value, bool) and not option.allows(value)
        ):
            hint = suggestion(value, option.choices) if isinstance(value, str) and len(option.choices) > 1 else ""
            given = quoted(value) if isinstance(value, str) else option.written(value)
            values.refuse(key, f"{given} must be {option.allowed}{hint}")
        if option.deprecated:
            values.notices.append(f"{values.source(key)}: deprecated; use {option.deprecated}")
    version = values.get("showHiddenMetricsForVersion")
    if version and not _VERSION.fullmatch(version):
        values.refuse("showHiddenMetricsForVersion", f"{quoted(version)} must be MAJOR.MINOR, such as 1.35")


def _check_mode(values: Values) -> None:
    mode = values.get("mode")
    known = not mode or mode in _OTHER_MODES
    cleans = values.get("cleanup") and not values.get("write-config-to")
    if mode == "ipvs" or not values.known("mode") or (cleans and known):
        return
    reason = f"{quoted(mode)} is " + ("a mode that ipvsproxy does not support" if known else "no mode")
    if not mode:
        reason = "is not set, and ipvs is the only mode that ipvsproxy supports"
    values.refuse("mode", f"{reason}; set " + ("mode: ipvs in the file" if values.config_file else "--proxy-mode=ipvs"))


def _bind_address(values: Values) -> Address:
    text = values.get("bindAddress")
    try:
        return parse_address(text)
    except ValueError:
        values.refuse("bindAddress", f"{quoted(text)} must be an IP address")
        return parse_address(values.get("bindAddress"))


def _listen(
    values: Values, key: str, bind_address: Address, default_hosts: tuple[str, str], default_port: int
) -> ListenAddress | None:
    """The address and port of a server, from its address option and its deprecated port flag, as in kube-proxy.

    None means that the server is turned off.
    """
    port_key = "healthz-port" if default_port == HEALTH_PORT else "metrics-port"
    port_given = port_key in values.given and values.known(port_key)
    port = values.get(port_key)
    if port_given and not port:
        return None
    if key not in values.given and values.config_file:
        return ListenAddress(parse_address(default_hosts[bind_address.family is Family.IPV6]), default_port)
    text = values.get(key)
    try:
        listen = _parse_listen(text, port)
    except ValueError as error:
        values.refuse(key, f"{quoted(text)} must be {error}")
        return None
    if port_given and listen.port != port:
        reason = f"--{catalogue.BY_KEY[key].flag} has a port" if key in values.given else f"the default address {text} has a port"
        values.notices.append(f"{values.source(port_key)}: {port} has no effect, because {reason}")
    return listen


def _parse_listen(text: str, default_port: int) -> ListenAddress:
    with contextlib.suppress(ValueError):
        listen = ListenAddress(*parse_host_port(text, default_port))
        if 1 <= listen.port <= 65535:  # noqa: PLR2004 - the range of port numbers
            return listen
    raise ValueError("IP or IP:port with a port in 1..65535")


def _check_writable(values: Values, servers: Mapping[str, Any]) -> None:
    if values.get("write-config-to"):
        for key, server in (("healthz-port", servers["health"]), ("metrics-port", servers["metrics"])):
            if server is None and key in values.given:
                values.refuse(key, "0 cannot be written to a file: v1alpha1 has no way to say that a server is off")


def _node_name(values: Values, hostname: str) -> str:
    override = values.get("hostnameOverride")
    name = (override or hostname).strip().lower()
    if not name:
        values.refuse("hostnameOverride", "must not be blank" if override else "must be set, because this host has no name")
    return name


def _check_source(values: Values) -> None:
    for key in ("clientConnection.kubeconfig", "master"):
        if values.get("ipvsproxy.manifests") and values.get(key):
            reason = f"{quoted(values.get(key))} and {values.source('ipvsproxy.manifests')} exclude each other; remove one"
            values.refuse(key, reason)


def _check_periods(values: Values) -> None:
    period_s, least_s = values.get("ipvs.syncPeriod"), values.get("ipvs.minSyncPeriod")
    if least_s > period_s and values.known("ipvs.syncPeriod", "ipvs.minSyncPeriod"):
        period = f"{values.source('ipvs.syncPeriod').name} ({render_duration(period_s)})"
        values.refuse("ipvs.minSyncPeriod", f"{render_duration(least_s)} must not be longer than {period}")


def _top_server(values: Values) -> str:
    text: str = values.get("server")
    try:
        url = urllib.parse.urlsplit(text)
        is_url = url.scheme == "http" and bool(url.hostname) and (url.port or 1) > 0 and url.path in ("", "/")
    except ValueError:
        is_url = False
    if "server" in values.given and not is_url:
        values.refuse("server", f"{quoted(text)} must be a URL such as http://127.0.0.1:10249")
    return text.rstrip("/")


def _scheduler(values: Values) -> str:
    scheduler = values.get("ipvs.scheduler") or "rr"
    if not _SCHEDULER.fullmatch(scheduler):
        values.refuse("ipvs.scheduler", f"{quoted(scheduler)} must be the name of an IPVS scheduler, such as rr, lc, sh or mh")
    return scheduler


def _annotations(values: Values) -> frozenset[Annotation]:
    """The annotations that this node obeys: all, none, or the annotations that the option names.

    The option may omit the prefix of an annotation.
    """
    key = "ipvsproxy.serviceAnnotations"
    names = [name.strip().removeprefix(PREFIX) for name in (values.get(key) or "all").split(",")]
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
    text = values.get(key)
    try:
        bits = int(text, 0)
    except ValueError:
        bits = 0
    taken = _MARK_DROP | 1 << values.get("iptables.masqueradeBit")
    if not 0 < bits < 1 << 32 or bits.bit_count() > _MOST_SCOPE_BITS:
        values.refuse(key, f"{quoted(text)} must be a number such as 0x3fff, with 1 to {_MOST_SCOPE_BITS} of 32 bits set")
    elif text == catalogue.BY_KEY[key].default:
        bits &= ~taken
    elif bits & taken:
        reason = f"{quoted(text)} must not have the bits {taken:#x}, by which Kubernetes asks to masquerade and to drop a packet"
        values.refuse(key, reason)
    return bits


def _networks(
    values: Values, key: str, words: Mapping[str, tuple[str, ...]] = MappingProxyType({}), *, texts: Iterable[str] | None = None
) -> tuple[Network, ...]:
    """The address ranges in the value of an option, or in ``texts`` if this argument is given.

    ``words`` maps each word to the address ranges that it means.
    """
    networks: list[Network] = []
    source = values.source(key)
    for index, text in enumerate(values.get(key) if texts is None else texts):
        try:
            networks += map(parse_network, words.get(text, (text,)))
        except ValueError as error:
            values.refuse(key, f"{error}, nor one of {', '.join(words)}" if words else str(error), source.element(index))
    return tuple(networks)


def _detect_local(values: Values) -> dict[str, object]:
    mode = LocalMode(values.get("detectLocalMode") or LocalMode.CLUSTER_CIDR)
    text = values.get("clusterCIDR") if mode is LocalMode.CLUSTER_CIDR else ""
    networks = _networks(values, "clusterCIDR", texts=text.split(",") if text else ())
    if len(networks) != len({network.family for network in networks}) and values.known("clusterCIDR"):
        values.refuse("clusterCIDR", f"{quoted(text)} must be one CIDR range, or one IPv4 and one IPv6 range")
    key, longest = _INTERFACE_NAMES.get(mode, ("", 0))
    name = values.get(key) if key else ""
    if key and not name:
        values.refuse(key, f"is required with {values.source('detectLocalMode').name} {mode}")
    elif key and not (name.isprintable() and len(name.encode()) <= longest and _INTERFACE.fullmatch(name)):
        values.refuse(key, f"{quoted(name)} must be a name of 1 to {longest} characters that an interface can have")
    return {"cluster_networks": networks, "local_interface": name}


def _node_ports(values: Values) -> dict[str, object]:
    texts = values.get("nodePortAddresses")
    networks = _networks(values, "nodePortAddresses", _NODE_PORT_RANGES | {_PRIMARY: ()})
    return {"node_port_networks": networks, "node_port_primary": _PRIMARY in texts and _ALL not in texts}


def _ipvs_sysctls(values: Values) -> tuple[Sysctl, ...]:
    key = "ipvsproxy.ipvsSysctls"
    chosen: dict[str, Sysctl] = {}
    for index, text in enumerate(values.get(key)):
        name, _, value = text.partition("=")
        if value not in map(str, IPVS_SYSCTLS.get(name, ())):
            allowed = ", ".join(f"{one}={numbers[0]}..{numbers[-1]}" for one, numbers in IPVS_SYSCTLS.items())
            values.refuse(key, f"{quoted(text)} is none of {allowed}", values.source(key).element(index))
        chosen[name] = Sysctl(f"net/ipv4/vs/{name}", value)
    return tuple(chosen.values())


def _gates(values: Values) -> bool:
    gates = values.get("featureGates")
    for name in _LOCKED_GATES:
        if gates.get(name, True) is False:
            values.refuse("featureGates", f"{name} must be true; it can no longer be turned off")
    return bool(gates.get(_EXTERNAL_IPS_GATE, True))


def _without_effect(given: Mapping[str, Given]) -> Iterable[str]:
    """Options that are set but have no effect.

    Options with an empty or default value are not reported, because ready-made files contain many of them.
    """
    for key, (value, source) in given.items():
        option = catalogue.BY_KEY[key]
        if isinstance(value, Mapping):
            yield from (f"{source.name} {name}" for name in value if name != _EXTERNAL_IPS_GATE)
        elif option.status is Likeness.WITHOUT_EFFECT and value and value != option.parse(option.default):
            yield source.name


def _file_values(values: Values, bind_address: Address, servers: Mapping[str, Any]) -> Mapping[str, Value]:
    written = {key: values.get(key) for key, option in catalogue.BY_KEY.items() if option.field}
    written["bindAddress"] = str(bind_address)
    written["healthzBindAddress"] = str(servers["health"] or "")
    written["metricsBindAddress"] = str(servers["metrics"] or "")
    written["hostnameOverride"] = values.get("hostnameOverride").strip().lower()
    return written
