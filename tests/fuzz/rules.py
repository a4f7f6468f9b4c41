"""Fuzz target ``rules``: translates configuration and API objects to rules, set entries and virtual servers.

For any objects, each line for ``iptables-restore`` has a known shape. A set entry is unchanged after it has been encoded and
decoded. Each virtual server and each real server can be encoded.
"""

import dataclasses
import itertools
import json

from ipvsproxy.config import load
from ipvsproxy.config.option import ConfigError
from ipvsproxy.config.settings import Config
from ipvsproxy.kernel.ipset import ipset_message
from ipvsproxy.kernel.iptables import syntax as iptables_syntax
from ipvsproxy.kernel.ipvs import ipvs_message
from ipvsproxy.model.kernel import InterfaceAddress
from ipvsproxy.model.net import Family
from ipvsproxy.model.plan import Operation, Verb
from ipvsproxy.model.rules import Backend
from ipvsproxy.model.service import EndpointSlice, Node, ObjectKind, Put, Service
from ipvsproxy.model.sets import SetKind
from ipvsproxy.model.state import ServiceState
from ipvsproxy.model.steps import at_once
from ipvsproxy.model.virtual_servers import RealServers
from ipvsproxy.reconcile.reconciler import Policy, Reconciler
from ipvsproxy.translate import skeleton, view
from ipvsproxy.translate.api import decode
from tests.fuzz import documents, restore_text
from tests.fuzz.chooser import Chooser
from tests.support import builders

_MODES = ("ClusterCIDR", "NodeCIDR", "BridgeInterface", "InterfaceNamePrefix")
_ENCODER = ipvs_message.Encoder(33)
_CARRIED = builders.addresses("192.168.0.10", "fe80::1", "fd00::10", "127.0.0.1")
_ALL_THERE = iptables_syntax.Listing(
    chains=dict.fromkeys(skeleton.CHAINS, ()), jumps=dict.fromkeys(skeleton.JUMPS, 2), foreign_jumps={skeleton.CHAINS[0]: "-A X"}
)
_NOTHING_THERE = iptables_syntax.Listing(chains={}, jumps={}, foreign_jumps={})


def rules(data: bytes) -> None:
    """Covers every step from parsing the configuration and the objects to writing the bytes for the kernel."""
    chooser = Chooser(data)
    config = _config(chooser)
    if config is None:
        return
    random_fully = {family: chooser.chance(2) for family in Family}
    settings = config.on_host(random_fully, config.translation.scheduler, Backend.IPTABLES, ()).translation
    node = _read(chooser, ObjectKind.NODE)
    carried = [InterfaceAddress(chooser.text(("eth0",)), address, address.family.bits) for address in _CARRIED]
    node_view = view.view_node(settings, "node-a", node if isinstance(node, Node) else None, carried, api_servers=())
    services = [item for _ in range(chooser.integer(1, 3)) if isinstance(item := _read(chooser, ObjectKind.SERVICE), Service)]
    slices = [item for _ in range(3) if isinstance(item := _read(chooser, ObjectKind.ENDPOINT_SLICE), EndpointSlice)]
    reconciler = Reconciler(Policy())
    for service in services:
        translated = builders.translate(service, [one for one in slices if one.service == service.name], node_view, settings)
        at_once(reconciler.putting(service.name, translated))
        _check_encoding(translated)
    for family, supported in ((Family.IPV4, _ALL_THERE), (Family.IPV6, _NOTHING_THERE)):
        built = skeleton.build_skeleton(
            family, settings, node_view, reconciler.survey.occupied(family), reconciler.survey.refused()
        )
        restore_text.check(iptables_syntax.render_restore(built, supported))
        restore_text.check(iptables_syntax.render_removal(built, supported))
        native = dataclasses.replace(settings, backend=Backend.NFTABLES)
        written = skeleton.build_skeleton(family, native, node_view, frozenset(SetKind), reconciler.survey.refused())
        # The nftables driver tells rules apart by their texts.
        assert all(one != other for rules in written.chains.values() for one, other in itertools.pairwise(rules))


def _config(chooser: Chooser) -> Config | None:
    arguments = [
        "--proxy-mode=ipvs",
        f"--detect-local-mode={chooser.one(_MODES)}",
        f"--pod-bridge-interface={chooser.text(('cni0', 'docker0'))}",
        f"--pod-interface-name-prefix={chooser.text(('veth', 'cali'))}",
        f"--cluster-cidr={chooser.text(('10.244.0.0/16', 'fd00::/64', '10.0.0.0/8,fd00::/8'))}",
        f"--nodeport-addresses={chooser.text(('', 'primary', 'primary,localhost', '192.168.0.0/16', '0.0.0.0/0,::/0'))}",
        f"--iptables-masquerade-bit={chooser.integer(0, 40)}",
        f"--masquerade-all={chooser.one(('false', 'true'))}",
        f"--ipvs-scheduler={chooser.text(('', 'rr', 'mh', 'sh'))}",
    ]
    try:
        return load.load(arguments, hostname="node-a", read_file=lambda _: b"")
    except ConfigError:
        return None


def _read(chooser: Chooser, kind: ObjectKind) -> object:
    line = json.dumps({"type": "ADDED", "object": documents.document(chooser, kind)}).encode()
    event = decode.decode_watch_line(kind, line).event
    return event.object if isinstance(event, Put) else None


def _check_encoding(desired: ServiceState) -> None:
    for entry in desired.entries:
        codec = ipset_message.codec(entry.set)
        data = codec.encode(entry)
        assert codec.decode(data, 4, len(data)) == entry  # the value follows the header of the attribute
    for server in desired.virtual_servers.values():
        operations = [Operation(Verb.ADD, server), Operation(Verb.REMOVE, server)]
        operations += [Operation(Verb.ADD, RealServers.of(server.key, key)) for key in server.real_servers]
        assert len(_ENCODER.encode(operations)) == len(operations)
