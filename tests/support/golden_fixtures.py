"""The golden scenarios as directories of manifests, phase by phase.

Each recording of kube-proxy began with the objects of those YAML documents that name no phase. The documents of each phase were
then applied through a real API server. Like a real API server, this module adds the Service ``default/kubernetes``. If a *put*
lacks a field that only the server or the status subresource may change, the field keeps its value.
"""

import dataclasses
import fnmatch
import functools
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

GOLDEN = Path(__file__).parents[1] / "golden"
INITIAL = "P0"

Manifest = dict[str, Any]
ObjectKey = tuple[str, str, str]

_MAGLEV = {"mh-port": "mh-fallback,mh-port"}
_PHASE = re.compile(r"^# phase: (?P<phase>P\d) (?P<verb>put|create|delete)$", re.MULTILINE)
_KUBERNETES: Manifest = {
    "apiVersion": "v1",
    "kind": "Service",
    "metadata": {"name": "kubernetes", "namespace": "default"},
    "spec": {
        "clusterIP": "10.96.0.1",
        "clusterIPs": ["10.96.0.1"],
        "ipFamilies": ["IPv4"],
        "ports": [{"name": "https", "protocol": "TCP", "port": 443, "targetPort": 6443}],
    },
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """A YAML document of a scenario: an object, with its phase and its verb."""

    scenario: str
    phase: str
    verb: str
    manifest: Manifest

    @property
    def key(self) -> ObjectKey:
        """The kind, the namespace and the name of an object."""
        metadata = self.manifest["metadata"]
        return self.manifest["kind"], metadata.get("namespace", ""), metadata["name"]


@functools.cache
def documents() -> tuple[Document, ...]:
    """All documents of all scenarios. The documents of one phase are in the order in which they must be applied."""
    found = [Document(scenario="00-blog", phase=INITIAL, verb="create", manifest=_KUBERNETES)]
    for path in sorted((GOLDEN / "fixtures").glob("*.yaml")):
        for text in re.split(r"^---\n", path.read_text(), flags=re.MULTILINE):
            match = _PHASE.search(text)
            phase, verb = (match["phase"], match["verb"]) if match else (INITIAL, "create")
            manifest = yaml.load(text, Loader=yaml.CSafeLoader)
            found.append(Document(scenario=path.stem, phase=phase, verb=verb, manifest=manifest))
    return tuple(found)


@functools.cache
def profiles() -> Mapping[str, Mapping[str, Any]]:
    """The recorded profiles by name.

    Each profile has ``flags``, and also has ``no_ip6tables`` if the recorded node has no IPv6.
    """
    content: dict[str, dict[str, Any]] = json.loads((GOLDEN / "profiles.json").read_text())
    return content


@functools.cache
def recording(profile: str, name: str) -> Mapping[str, Any]:
    """One file of a profile: a phase, or ``probes``."""
    content: dict[str, Any] = json.loads((GOLDEN / "expected" / profile / f"{name}.json").read_text())
    return content


def desired(profile: str, phase: str) -> Mapping[str, Any]:
    """The recording of a phase, with ``mh-fallback`` added to the flags of virtual servers that have ``mh-port``.

    Number 70 in docs/differences.md gives the reason.
    """
    recorded = recording(profile, phase)
    rows = {
        row: value | {"flags": _MAGLEV.get(value["flags"], value["flags"])} for row, value in recorded["virtual_servers"].items()
    }
    return {**recorded, "virtual_servers": rows}


class World:
    """The API server's objects, and the directory of manifests from which the proxy reads the objects.

    The objects of each scenario are in one file of the directory.

    If ``node_has_ipv6`` is false, the IPv6 addresses of the Node are removed.
    """

    def __init__(self, directory: Path, *, node_has_ipv6: bool = True) -> None:
        self._directory = directory
        self._node_has_ipv6 = node_has_ipv6
        self._objects: dict[ObjectKey, Manifest] = {}
        self._scenario_of: dict[ObjectKey, str] = {}

    def services(self) -> list[Manifest]:
        """The Services in their present state."""
        return [manifest for (kind, _, _), manifest in self._objects.items() if kind == "Service"]

    def apply(self, phase: str) -> None:
        """Apply the documents of a phase and write the result. Each file is replaced atomically."""
        changed = set()
        for document in documents():
            if document.phase == phase:
                self._apply(document)
                changed.add(document.scenario)
        for scenario in sorted(changed):
            self._show(scenario)

    def _apply(self, document: Document) -> None:
        if document.verb == "delete":
            del self._objects[document.key]
            return
        manifest = dict(document.manifest)
        known = self._objects.get(document.key, {})
        if "status" in known:
            manifest.setdefault("status", known["status"])
        if manifest["kind"] == "Node" and not self._node_has_ipv6:
            addresses = [entry for entry in manifest["status"]["addresses"] if ":" not in entry["address"]]
            manifest["status"] = manifest["status"] | {"addresses": addresses}
        self._objects[document.key] = manifest
        self._scenario_of[document.key] = document.scenario

    def _show(self, scenario: str) -> None:
        manifests = [manifest for key, manifest in self._objects.items() if self._scenario_of[key] == scenario]
        draft = self._directory / f".{scenario}"
        draft.write_text("---\n".join(json.dumps(manifest, indent=1) + "\n" for manifest in manifests))
        draft.rename(self._directory / f"{scenario}.yaml")


@functools.cache
def _accepted() -> list[list[str]]:
    lines = (GOLDEN / "accepted.txt").read_text().splitlines()
    entries = [[part.strip() for part in line.split(" | ")] for line in lines if line.strip() and not line.startswith("#")]
    assert all(len(entry) == 4 and entry[3] for entry in entries), "accepted.txt: file | section | row | reason"
    return entries


def is_accepted(file: str, section: str, row: str) -> bool:
    """Whether ``golden/accepted.txt`` gives a reason why a row of a recording may differ from the row of ipvsproxy."""
    place = (file, section, row)
    return any(
        all(pattern == text or fnmatch.fnmatchcase(text, pattern) for pattern, text in zip(patterns, place, strict=True))
        for *patterns, _ in _accepted()
    )


def unaccepted(differences: Mapping[str, Iterable[tuple[Any, ...]]], phase: str = INITIAL) -> list[tuple[Any, ...]]:
    """The rows of ``golden_state.differences`` that ``accepted.txt`` does not allow.

    Each result has the section, the key of the row, the kind of difference, the recorded value and the observed value.
    """
    return [(part, *row) for part, rows in differences.items() for row in rows if not is_accepted(phase, part, row[0])]
