"""Asks this kernel which features of ``model.features`` it has. Nothing is changed, but the kernel may load modules to answer."""

import contextlib
import pathlib
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

from pyroute2.netlink import NETLINK_NETFILTER, NETLINK_ROUTE

from ipvsproxy.kernel import host
from ipvsproxy.kernel.base import modules, netlink
from ipvsproxy.kernel.base.errors import KernelError
from ipvsproxy.kernel.base.modules import ModuleState
from ipvsproxy.kernel.ipset import message as ipset_message
from ipvsproxy.kernel.ipset import types as ipset_types
from ipvsproxy.kernel.iptables.driver import Refusal
from ipvsproxy.kernel.network import conntrack, routes
from ipvsproxy.model import basic_features, features
from ipvsproxy.model.feature import Feature
from ipvsproxy.model.net import Family
from ipvsproxy.model.sets import SetType

FAMILY_ALIAS = "net-pf-16-proto-16-family-IPVS"
"""The name under which the kernel asks for the module of IPVS's netlink family (MODULE_ALIAS_GENL_FAMILY)."""
_DIRECTORIES: Mapping[Feature, str] = {
    basic_features.IPVS_CONNECTION_TRACKING: "proc/sys/net/ipv4/vs",
    basic_features.REUSE_MODE: "proc/sys/net/ipv4/vs",
    basic_features.EXPIRY_SETTINGS: "proc/sys/net/ipv4/vs",
    basic_features.HOST_SETTINGS: "proc/sys/net/netfilter",
}
"""The features that are settings, and the directory that is there while their module is."""


_OF_NF_TABLES = (
    features.NAT_IN_INET,
    basic_features.NF_TABLES,
    basic_features.NF_TABLES_ATTRIBUTES,
    basic_features.ORIGINAL_ADDRESSES,
)


class Answer(NamedTuple):
    """Whether the kernel has a feature; None if it did not say, or was not asked. ``remark`` is for people, mostly empty."""

    has: bool | None
    remark: str = ""


Answers = Mapping[Feature, Answer]


def ask(connect: Callable[[int], socket.socket] = netlink.open_socket, proc: pathlib.Path = pathlib.Path("/proc")) -> Answers:
    """The answers that a start needs to tell which fall-backs are in use: one socket option and two messages."""
    listings = conntrack.ask(connect)
    return {
        features.FILTERED_ROUTES: Answer(_filters_routes(connect)),
        features.FILTERED_CONNECTIONS: Answer(listings.are_filtered),
        basic_features.TRACKED_FLOWS: Answer(listings.is_there),
        **{feature: _by_version(feature, proc) for feature in (features.ARRIVAL_BEHIND_IPVS, features.PROMPT_REUSE)},
    }


def _by_version(feature: Feature, proc: pathlib.Path) -> Answer:
    """The answer for a feature that nothing in the kernel shows."""
    remark = "by its version"
    try:
        return Answer(host.kernel_version(proc) >= feature.since, remark)
    except KernelError:
        return Answer(None, remark)


def lacking(answers: Answers) -> list[Feature]:
    """The features that the kernel certainly lacks, as the table has them."""
    return [feature for feature in features.FEATURES if feature in answers and answers[feature].has is False]


def _filters_routes(connect: Callable[[int], socket.socket]) -> bool | None:
    try:
        with contextlib.closing(connect(NETLINK_ROUTE)) as opened:
            return routes.ask_to_filter(opened)
    except OSError:
        return None


def of_modules(root: pathlib.Path = pathlib.Path("/")) -> Answers:
    """The features that are modules, as the files of this host show them. Nothing is loaded."""
    has_ipvs = (root / "proc/thread-self/net/ip_vs").exists()
    return {
        basic_features.IPVS: Answer(has=True) if has_ipvs else _in_modules(("ip_vs",), root),
        features.SCHEDULER_TWOS: _in_modules(("ip_vs_twos",), root),
        basic_features.SCHEDULER_MH: _in_modules(("ip_vs_mh",), root),
        basic_features.DUMMY_DEVICE: _in_modules(("dummy",), root),
        basic_features.RULE_MATCHES: _in_modules(("xt_set", "xt_ipvs", "xt_physdev"), root),
        features.ONE_CONNECTION_MODULE: Answer(_has_one_connection_module(root)),
        features.SELF_LOADING: Answer(modules.is_loaded_by(FAMILY_ALIAS, "ip_vs", root)),
    }


def _has_one_connection_module(root: pathlib.Path) -> bool | None:
    with contextlib.suppress(KernelError):
        if host.kernel_version(root / "proc") >= features.ONE_CONNECTION_MODULE.since:
            return True  # no distribution takes a feature away
    states = {modules.module_state(name, root) for name in host.MODULES_BY_FAMILY}
    return None if ModuleState.UNKNOWN in states else states == {ModuleState.MISSING}


def _in_modules(names: Iterable[str], root: pathlib.Path) -> Answer:
    states = {name: modules.module_state(name, root) for name in names}
    missing = [name for name, state in states.items() if state is ModuleState.MISSING]
    if missing:
        return Answer(has=False, remark=f"{', '.join(missing)} is missing")
    return Answer(None if ModuleState.UNKNOWN in states.values() else True)


def of_settings(root: pathlib.Path = pathlib.Path("/")) -> Answers:
    """The features that are settings. Those of a module only exist while it is loaded."""
    answers: dict[Feature, Answer] = {}
    for feature, directory in _DIRECTORIES.items():
        if (root / directory).exists():
            settings = [part for part in feature.parts if part.startswith(("net.", "/sys/"))]
            missing = [setting for setting in settings if not (root / _path(setting)).exists()]
            answers[feature] = Answer(not missing, f"{', '.join(missing)} is missing" if missing else "")
    return answers


def _path(setting: str) -> str:
    return setting.lstrip("/") if setting.startswith("/") else f"proc/sys/{setting.replace('.', '/')}"


def of_ipset(connect: Callable[[int], netlink.Socket] = netlink.open_socket) -> Answers:
    """The features of ipset."""
    try:
        missing = host.missing_set_types(connect)
        if missing:
            return {basic_features.SETS: Answer(has=False, remark=missing[0].what)}
        return {basic_features.SETS: Answer(has=True), **dict(_of_revisions(connect))}
    except KernelError as error:
        return {basic_features.SETS: Answer(None, str(error))}


def _of_revisions(connect: Callable[[int], netlink.Socket]) -> Iterator[tuple[Feature, Answer]]:
    with contextlib.closing(netlink.Channel(NETLINK_NETFILTER, connect)) as channel:
        newest = {
            set_type: known.newest
            for set_type in SetType
            if (known := ipset_types.revisions(channel, set_type, Family.IPV4)) is not None
        }
    sufficient = ipset_message.SUFFICIENT_REVISIONS
    yield basic_features.SETS_WITH_SCTP, Answer(all(newest.get(one, 0) >= lowest for one, lowest in sufficient.items()))
    marked = newest.get(SetType.ADDRESS_PORT, 0)
    yield basic_features.SETS_WITH_MARKS, Answer(marked >= ipset_message.MARK_REVISION, f"revision {marked} is the newest")


def of_nf_tables(refusal: Refusal | None) -> Answers:
    """The features of nf_tables. ``refusal`` is the result of a trial, None if the kernel takes our rules."""
    if refusal is None:
        return dict.fromkeys(_OF_NF_TABLES, Answer(has=True))
    return {features.NAT_IN_INET: Answer(False if refusal.is_certain else None, refusal.reason)}


def of_unused_nf_tables(try_writing: Callable[[], Refusal | None], root: pathlib.Path = pathlib.Path("/")) -> Answers:
    """The features of nf_tables, of a node whose rules are in iptables. Nothing is asked that would load nf_tables."""
    if modules.module_state("nf_tables", root) not in (ModuleState.LOADED, ModuleState.BUILT_IN):
        return dict.fromkeys(_OF_NF_TABLES, Answer(None, "give --rules-backend=nftables to ask, which loads nf_tables"))
    try:
        return of_nf_tables(try_writing())
    except KernelError as error:
        return dict.fromkeys(_OF_NF_TABLES, Answer(None, str(error)))
