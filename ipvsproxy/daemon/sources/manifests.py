"""Makes events from files of manifests.

Rule 1: while any part of a file cannot be read, all known objects of this file stay.
Rule 2: an object in two files is taken from the file whose name comes first.
"""

import json
import pathlib
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

import yaml

from ipvsproxy.model.service import Event, Gone, Listed, ObjectKey, ObjectKind, Put, Rejected
from ipvsproxy.translate.api import decode

SUFFIXES = frozenset({".yaml", ".yml", ".json"})

DEEPEST = 100
"""The most levels of nesting in a document; a Service has six."""

# The labels of objects that the selectors of a watch leave out.
NOT_OURS: Mapping[str, str] = {
    "Service": "service.kubernetes.io/service-proxy-name",
    "EndpointSlice": "service.kubernetes.io/headless",
}


class Identity(NamedTuple):
    """The identity of an object among all kinds."""

    kind: ObjectKind
    key: ObjectKey


class FileContent(NamedTuple):
    """The objects of a file, and its parts that could not be read."""

    objects: Mapping[Identity, Put]
    rejected: tuple[Rejected, ...]


class _Loader(yaml.CSafeLoader):
    """YAML with the types of the API's JSON: a timestamp is a string. Nesting has a bound.

    libyaml's composer recurses in C: without the bound, some thousand brackets overflow the stack and end the process.
    """

    _depth = 0

    def descend_resolver(self, current_node: Any, current_index: Any) -> None:  # noqa: ARG002  # of the base class
        """Count a level. The composer calls this at the beginning of each node; the base class does nothing that is needed."""
        self._depth += 1
        if self._depth > DEEPEST:
            raise yaml.YAMLError(f"is nested more than {DEEPEST} levels deep")

    def ascend_resolver(self) -> None:
        """Leave a level. The composer calls this at the end of each node."""
        self._depth -= 1


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in yaml.CSafeLoader.yaml_implicit_resolvers.items()
}


def is_manifest(name: str) -> bool:
    """Whether a file of this name is read: it has the suffix of a manifest, and is not hidden."""
    return not name.startswith(".") and pathlib.PurePath(name).suffix in SUFFIXES


def read_file(path: pathlib.Path) -> FileContent:
    """All manifests of a file: its documents, and the items of its Lists. Other kinds are skipped.

    Raises:
        OSError: the file could not be read now.
    """
    objects: dict[Identity, Put] = {}
    rejected: list[Rejected] = []
    try:
        for where, document in _documents(path):
            if not _is_ours(document):
                continue
            event = decode.decode_document(document, where)
            if isinstance(event, Rejected):
                rejected.append(event)
            elif event and Identity(event.kind, event.key) in objects:
                rejected.append(Rejected(event.kind, event.key, where, "stands in this file twice; the first one is used"))
            elif event:
                objects[Identity(event.kind, event.key)] = event
    except yaml.MarkedYAMLError as error:
        line = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        rejected.append(_unread(path, f"{line}{error.problem or error.context}"))
    except (yaml.YAMLError, ValueError) as error:
        rejected.append(_unread(path, " ".join(str(error).split())))
    except RecursionError:
        rejected.append(_unread(path, f"is nested more than {DEEPEST} levels deep"))
    return FileContent(objects, tuple(rejected))


def documents(path: pathlib.Path) -> list[Any]:
    """The documents of a file, and the items of its Lists, as they stand there; none of a file that cannot be read."""
    try:
        return [document for _, document in _documents(path)]
    except (OSError, yaml.YAMLError, ValueError, RecursionError):  # ``read_file`` reports it
        return []


def _unread(path: pathlib.Path, reason: str) -> Rejected:
    # The kind is unknown; Service, because a reader misses Services first.
    return Rejected(ObjectKind.SERVICE, None, path.name, reason)


def _documents(path: pathlib.Path) -> Iterator[tuple[str, Any]]:
    text = path.read_bytes()
    documents = [json.loads(text)] if path.suffix == ".json" else yaml.load_all(text, Loader=_Loader)
    for number, document in enumerate(documents, 1):
        where = f"{path.name}, document {number}"
        if isinstance(document, dict) and str(document.get("kind")).endswith("List") and isinstance(document.get("items"), list):
            for place, item in enumerate(document["items"], 1):
                yield f"{where}, item {place}", item
        elif document is not None:
            yield where, document


def _is_ours(document: Any) -> bool:
    try:
        return NOT_OURS.get(document["kind"]) not in document["metadata"]["labels"]
    except (TypeError, KeyError):
        return True


class Manifests:
    """The merged objects of all files, as last delivered."""

    def __init__(self) -> None:
        self._files: dict[str, Mapping[Identity, Put]] = {}
        self._delivered: dict[Identity, Put] = {}
        self._conflicts: set[Rejected] = set()

    def update(self, read: Mapping[str, FileContent], present: Collection[str]) -> list[Event]:
        """The changes. ``read`` has the content of new and changed files by name; ``present`` has the names of all files."""
        events: list[Event] = []
        for name in set(self._files) - set(present):
            del self._files[name]
        for name, content in sorted(read.items()):
            events += content.rejected
            kept = self._files.get(name, {}) if content.rejected else {}
            self._files[name] = {**kept, **content.objects}
        merged, conflicts = self._merge()
        events += sorted(conflicts - self._conflicts)
        events += [put for identity, put in merged.items() if self._delivered.get(identity) != put]
        events += [Gone(identity.kind, identity.key) for identity in self._delivered.keys() - merged.keys()]
        self._delivered, self._conflicts = merged, conflicts
        return events

    def listed(self, events: Collection[Event]) -> list[Event]:
        """The ends of all lists after the first delivery, which had these events."""
        rejected = {Identity(event.kind, event.key) for event in events if isinstance(event, Rejected) and event.key}
        present = self._delivered.keys() | rejected
        return [Listed(kind, frozenset(one.key for one in present if one.kind is kind)) for kind in ObjectKind]

    def _merge(self) -> tuple[dict[Identity, Put], set[Rejected]]:
        merged: dict[Identity, Put] = {}
        source: dict[Identity, str] = {}
        conflicts: set[Rejected] = set()
        for name, objects in sorted(self._files.items()):
            for identity, put in objects.items():
                if identity in merged:
                    reason = f"stands in {source[identity]} too, which comes first and is used"
                    conflicts.add(Rejected(identity.kind, identity.key, name, reason))
                else:
                    merged[identity], source[identity] = put, name
        return merged, conflicts
