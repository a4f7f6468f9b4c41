"""Compares the translation with recordings of kube-proxy for the same objects and the same node, row by row and without a kernel.

Results that need the kernel (sysctls, draining real servers, packets) are tested in ``tests/test_golden.py``, which runs the
program. Rows that are listed in ``golden/accepted.txt`` may differ.
"""

import dataclasses
import functools
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from ipvsproxy.model.kernel import DEVICE
from ipvsproxy.model.net import Family
from ipvsproxy.model.service import EndpointSlice, Node, Put, Service, ServiceName
from ipvsproxy.model.state import ServiceState
from ipvsproxy.translate.api.decode import decode_document
from ipvsproxy.translate.translation_settings import Settings, TrafficScopes
from ipvsproxy.translate.view import view_node
from tests.support import builders, golden_fixtures, golden_state, golden_translation

NODE = "node-a"
INTERFACES = {
    "lo": ("127.0.0.1", "::1"),
    "eth0": ("172.18.0.2", "fc00:f853:ccd::2", "fe80::1"),
    "cni0": ("10.244.0.1", "fd00:10:244::1", "fe80::2"),
    DEVICE: ("10.96.0.1",),
}
DEFAULT = Settings(cluster_networks=builders.networks("10.244.0.0/16"), scopes=TrafficScopes.KUBE_PROXY)
PROFILES: Mapping[str, Settings] = {
    "default": DEFAULT,
    "masquerade-all": dataclasses.replace(
        DEFAULT, cluster_networks=builders.networks("10.244.0.0/16", "fd00:10:244::/56"), masquerade_all=True
    ),
    "masquerade-bit": dataclasses.replace(DEFAULT, masquerade_bit=15),
    "nodeport-cidr": dataclasses.replace(DEFAULT, node_port_networks=builders.networks("172.18.0.0/16")),
    "nodeport-primary": dataclasses.replace(DEFAULT, node_port_primary=True),
    "scheduler-mh": dataclasses.replace(DEFAULT, scheduler="mh"),
    "scheduler-wrr": dataclasses.replace(DEFAULT, scheduler="wrr"),
    "single-v4": dataclasses.replace(DEFAULT, families=frozenset({Family.IPV4})),
    # the flags of this profile change sysctls, timeouts and which objects are kept, but not the translation
    "strict-exclude": DEFAULT,
}
PHASES = ("P0", "P1", "P2")
CASES = [
    (profile, phase, section)
    for profile in PROFILES
    for phase in (PHASES if profile == "default" else PHASES[:1])
    for section in ("virtual_servers", "real_servers", "ipsets", "iptables", "addresses", "health_check_node_ports")
]

State = dict[str, Any]


@pytest.fixture(scope="module", name="directory")
def _directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("golden")


@functools.cache
def _objects(directory: Path, phase: str, *, has_ipv6: bool) -> tuple[Put, ...]:
    """All objects after a phase of the recording, as the program reads them."""
    manifests = directory / f"{phase}-{has_ipv6}"
    manifests.mkdir()
    world = golden_fixtures.World(manifests, node_has_ipv6=has_ipv6)
    for name in PHASES[: PHASES.index(phase) + 1]:
        world.apply(name)
    events = [
        decode_document(json.loads(text), path.stem)
        for path in sorted(manifests.glob("*.yaml"))
        for text in path.read_text().split("---\n")
        if text.strip()
    ]
    assert not [event for event in events if event and not isinstance(event, Put)]
    return tuple(event for event in events if isinstance(event, Put))


@functools.cache
def _state(directory: Path, profile: str, phase: str) -> State:
    """The desired state of the node after a phase, in the format of a recording."""
    settings = PROFILES[profile]
    has_ipv6 = Family.IPV6 in settings.families
    objects = [put.object for put in _objects(directory, phase, has_ipv6=has_ipv6)]
    node = next(item for item in objects if isinstance(item, Node))
    carried = [
        builders.interface_address(interface, text)
        for interface, texts in INTERFACES.items()
        for text in texts
        if has_ipv6 or ":" not in text
    ]
    view = view_node(settings, NODE, node, carried, api_servers=())
    slices: dict[ServiceName, list[EndpointSlice]] = {}
    for item in objects:
        if isinstance(item, EndpointSlice) and item.service:
            slices.setdefault(item.service, []).append(item)
    services = [item for item in objects if isinstance(item, Service)]
    states = [builders.translate(item, slices.get(item.name, ()), view, settings) for item in services]
    states.sort(key=lambda state: state.owner)
    health = {"health_check_node_ports": dict(_health_rows(states, settings))}
    return golden_translation.render(states, settings, view) | health


def _health_rows(states: list[ServiceState], settings: Settings) -> Iterator[tuple[str, State]]:
    is_restricted = bool(settings.node_port_networks or settings.node_port_primary)
    asked = {Family.IPV4: ["172.18.0.2"] if is_restricted else ["172.18.0.2", "127.0.0.1"], Family.IPV6: ["fc00:f853:ccd::2"]}
    counts = {port: (state.owner.service, count) for state in states for port, count in state.rare.local_endpoints.items()}
    for port, (service, count) in counts.items():
        body = {
            "localEndpoints": count,
            "service": {"name": service.name, "namespace": service.namespace},
            "serviceProxyHealthy": True,
        }
        for address in asked[port.family]:
            headers = {
                "Content-Type": "application/json",
                "X-Content-Type-Options": "nosniff",
                "X-Load-Balancing-Endpoint-Weight": str(count),
            }
            row = {"body": body, "code": 200 if count else 503, "headers": headers}
            yield f"{address} port {port.port}", row


def _without_what_no_translation_shows(recorded: Mapping[str, Any]) -> State:
    """A recording without draining real servers, and without the ports that were closed at the time of the recording."""
    shown = dict(recorded)
    shown["real_servers"] = {row: value for row, value in recorded["real_servers"].items() if value["weight"]}
    listening = {row: value for row, value in recorded["health_check_node_ports"].items() if value["code"] != "refused"}
    return shown | {"health_check_node_ports": listening}


@pytest.mark.checklist(45, 57)
@pytest.mark.parametrize(("profile", "phase", "section"), CASES)
def test_the_desired_state_equals_kube_proxys_recorded_state_except_for_accepted_differences(
    directory: Path, profile: str, phase: str, section: str
) -> None:
    recorded = _without_what_no_translation_shows(golden_fixtures.desired(profile, phase))
    differences = golden_state.differences(recorded, _state(directory, profile, phase), [section])
    report = [
        f"{part} | {row} | {kind}\n    recorded {old}\n    wanted   {new}"
        for part, row, kind, old, new in golden_fixtures.unaccepted(differences, phase)
    ]
    assert not report, f"{len(report)} rows differ\n" + "\n".join(report)
