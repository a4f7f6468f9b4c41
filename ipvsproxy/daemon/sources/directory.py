"""The source that reads Services, EndpointSlices and Nodes from the manifest files in a directory, without an API server.

The best method to replace a file is to rename a complete new file to the old name, as ConfigMaps and careful editors do. The
directory is read only when it has not changed for a moment; by then, a file that is overwritten in place is usually complete.

Rule 1: while a part of a file cannot be read, all known objects from the file are kept. A file with an unreadable part is read
again, after growing pauses.
Rule 2: if two files contain the same object, the object is taken from the file whose name sorts first.
Rule 3: the first complete list is delivered only when every part of every file can be read, because the list removes all objects
that it lacks. ``problem`` describes the part that cannot be read. An unreadable part does not delay the list if the object in the
part can be identified; the list then includes the object's key.
"""

import asyncio
import contextlib
import json
import os
import pathlib
import random
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

import yaml

from ipvsproxy.daemon.base import inotify
from ipvsproxy.daemon.base.log import log
from ipvsproxy.daemon.base.timing import Backoff, comes_within
from ipvsproxy.daemon.sources.source import Deliver, Source
from ipvsproxy.model.service import Event, Gone, Listed, ObjectKey, ObjectKind, Put, Rejected, ServiceName
from ipvsproxy.translate.api import decode, targets
from ipvsproxy.translate.api.targets import Targets

SUFFIXES = frozenset({".yaml", ".yml", ".json"})

DEEPEST = 100
"""The largest number of levels of nesting in a document; a Service has six levels."""

Identity = tuple[ObjectKind, ObjectKey]
"""The identity of an object among the objects of all kinds."""


class FileContent(NamedTuple):
    """The objects in a file, and the parts of the file that could not be read."""

    objects: Mapping[Identity, Put]
    rejected: tuple[Rejected, ...]


class _ManifestLoader(yaml.CSafeLoader):
    """A YAML loader that returns the types of the API's JSON: it reads a timestamp or a lone ``=`` as a string.

    The loader limits nesting, because libyaml's composer is recursive C code: several thousand nested brackets would overflow the
    stack and end the process.
    """

    _depth = 0

    def descend_resolver(self, current_node: Any, current_index: Any) -> None:  # noqa: ARG002 - as in the base class
        """Enter a level of nesting.

        The composer calls this method at the beginning of each YAML node. The method of the base class is not called, because
        manifests do not need its effects.
        """
        self._depth += 1
        if self._depth > DEEPEST:
            raise yaml.YAMLError(f"is nested more than {DEEPEST} levels deep")

    def ascend_resolver(self) -> None:
        """Leave a level of nesting. The composer calls this method at the end of each YAML node."""
        self._depth -= 1


_STRINGS = ("tag:yaml.org,2002:timestamp", "tag:yaml.org,2002:value")
_ManifestLoader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag not in _STRINGS]
    for first, resolvers in yaml.CSafeLoader.yaml_implicit_resolvers.items()
}


def is_manifest(name: str) -> bool:
    """Whether the source reads a file with the given name: the file is not hidden, and the name has the suffix of a manifest."""
    return not name.startswith(".") and pathlib.PurePath(name).suffix in SUFFIXES


def read_file(path: pathlib.Path) -> FileContent:
    """All manifests in a file: its YAML documents, and the items of its List objects.

    Objects of kinds that ipvsproxy does not watch are skipped.

    Raises:
        OSError: the file could not be read at the moment.
    """
    objects: dict[Identity, Put] = {}
    rejected: list[Rejected] = []
    try:
        for where, document in _documents(path):
            event = decode.decode_document(document, where)
            if isinstance(event, Rejected):
                rejected.append(event)
            elif event and (event.kind, event.key) in objects:
                rejected.append(Rejected(event.kind, event.key, where, "is in this file twice; the first one is used"))
            elif event:
                objects[(event.kind, event.key)] = event
    except yaml.MarkedYAMLError as error:
        line = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        rejected.append(_unread(path, f"{line}{error.problem or error.context}"))
    except (yaml.YAMLError, ValueError) as error:
        rejected.append(_unread(path, " ".join(str(error).split())))
    except RecursionError:
        rejected.append(_unread(path, f"is nested more than {DEEPEST} levels deep"))
    return FileContent(objects, tuple(rejected))


def documents(path: pathlib.Path) -> list[Any]:
    """The YAML documents in a file, and the items of its List objects, as plain YAML values; empty if the file cannot be read."""
    try:
        return [document for _, document in _documents(path)]
    except (OSError, yaml.YAMLError, ValueError, RecursionError):  # ``read_file`` reports the error
        return []


def _unread(path: pathlib.Path, reason: str) -> Rejected:
    # The kind of the object is unknown; the kind Service is reported, because users notice missing Services first.
    return Rejected(ObjectKind.SERVICE, None, path.name, reason)


def _documents(path: pathlib.Path) -> Iterator[tuple[str, Any]]:
    text = path.read_bytes()
    documents = [json.loads(text)] if path.suffix == ".json" else yaml.load_all(text, Loader=_ManifestLoader)
    for number, document in enumerate(documents, 1):
        where = f"{path.name}, document {number}"
        if isinstance(document, dict) and str(document.get("kind")).endswith("List") and isinstance(document.get("items"), list):
            for place, item in enumerate(document["items"], 1):
                yield f"{where}, item {place}", item
        elif document is not None:
            yield where, document


class Manifests:
    """The objects of all files, merged, as they were last delivered to the store."""

    def __init__(self) -> None:
        self._files: dict[str, FileContent] = {}
        self._delivered: dict[Identity, Put] = {}
        self._conflicts: set[Rejected] = set()

    def update(self, read: Mapping[str, FileContent], present: Collection[str]) -> list[Event]:
        """The changes. ``read`` has the content of new and changed files by file name; ``present`` has the names of all files."""
        events: list[Event] = []
        for name in set(self._files) - set(present):
            del self._files[name]
        for name, content in sorted(read.items()):
            kept = self._files[name].objects if content.rejected and name in self._files else {}
            self._files[name] = FileContent({**kept, **content.objects}, content.rejected)
        merged, source, conflicts = self._merge()
        for name, content in sorted(read.items()):
            for event in content.rejected:
                other = source.get((event.kind, event.key), name) if event.key else name
                reason = event.reason if other == name else f"{event.reason}; the {event.kind} in {other} is used"
                events.append(event._replace(reason=reason))
        events += sorted(conflicts - self._conflicts)
        events += [put for identity, put in merged.items() if self._delivered.get(identity) != put]
        events += [Gone(*identity) for identity in self._delivered.keys() - merged.keys()]
        self._delivered, self._conflicts = merged, conflicts
        return events

    def unknown(self) -> list[str]:
        """One text for each unreadable part whose object cannot be identified: the place and the reason."""
        return [f"{event.where}: {event.reason}" for event in self._rejected() if event.key is None]

    def listed(self) -> list[Event]:
        """The ``Listed`` events, one for each kind of object. Each event ends the list of its kind.

        The lists also contain each object whose manifest was rejected, if its kind and name are known.
        """
        rejected = {(event.kind, event.key) for event in self._rejected() if event.key}
        present = self._delivered.keys() | rejected
        return [Listed(kind, frozenset(key for one, key in present if one is kind)) for kind in ObjectKind]

    def _rejected(self) -> Iterator[Rejected]:
        return (event for content in self._files.values() for event in content.rejected)

    def _merge(self) -> tuple[dict[Identity, Put], dict[Identity, str], set[Rejected]]:
        """The objects of all files, the file from which each object is taken, and the objects that more than one file has."""
        merged: dict[Identity, Put] = {}
        source: dict[Identity, str] = {}
        conflicts: set[Rejected] = set()
        for name, content in sorted(self._files.items()):
            for identity, put in content.objects.items():
                if identity in merged:
                    reason = f"is also in {source[identity]}, which comes first and is used"
                    conflicts.add(Rejected(*identity, name, reason))
                else:
                    merged[identity], source[identity] = put, name
        return merged, source, conflicts


SETTLE_S = 0.03
LONGEST_SETTLE_S = 1.0
POLL_S = 1.0
FIRST_RETRY_S = 0.2
LONGEST_RETRY_S = 10.0


class DirectorySource(Source):
    """A directory of manifests: files ending in .yaml, .yml or .json, without hidden files and subdirectories.

    Every list of a directory is trusted, even if many known objects are missing, because an object without a manifest has
    certainly been deleted.

    After a change, the source waits until the directory has not changed for ``settle_s`` seconds, but at most
    ``LONGEST_SETTLE_S`` seconds. Then the source reads the directory.
    """

    def __init__(self, directory: str, *, settle_s: float = SETTLE_S, poll_s: float = POLL_S) -> None:
        self._directory = directory
        self._settle_s = settle_s
        self._poll_s = poll_s
        self._stamps: dict[str, tuple[int, ...]] = {}
        self._manifests = Manifests()
        self._is_listed = False
        self._backoff = Backoff(first_s=FIRST_RETRY_S, longest_s=LONGEST_RETRY_S, dice=random.Random())  # noqa: S311 - for random delays

    def describe(self) -> str:
        """The path of the directory and, if the directory or a file cannot be read, the problem."""
        return f"directory {self._directory}" + (f": {self.problem}" if self.problem else "")

    async def targets(self, service: ServiceName | None = None) -> Targets:
        """As ``Source``. If the directory cannot be read, the result is empty."""
        found = await asyncio.to_thread(self._targets)
        return {key: target for key, target in found.items() if service in (None, key[0])}

    def _targets(self) -> Targets:
        try:
            paths = self._paths()
        except OSError:
            return {}
        return targets.of_documents(document for path in paths for document in documents(path))

    async def run(self, deliver: Deliver) -> None:
        """Deliver events until this task is cancelled: first all objects, then differences.

        As soon as every file is readable, the reader reports that the first lists are complete.
        """
        with inotify.DirectoryChanges(self._directory, self._poll_s) as changes:
            await self.read(deliver)
            while True:
                await self._wait(changes, self._backoff.next_s() if self.problem else None)
                await self.read(deliver)

    async def read(self, deliver: Deliver) -> None:
        """Read the new and changed files, and deliver the differences.

        If the directory cannot be read, no differences are delivered.
        """
        try:
            # The files are read in a thread, because reading thousands of manifests takes seconds.
            read, present, unread = await asyncio.to_thread(self._read_changed)
        except OSError as error:
            self._note(error.strerror or str(error))
            return
        events = self._manifests.update(read, present)
        problems = [f"{name}: {reason}" for name, reason in unread.items()]
        if not self._is_listed:
            problems += self._manifests.unknown()
        self._note("; ".join(sorted(problems)))
        if not self._is_listed and not problems:
            self._is_listed = True
            log.info("listed", directory=self._directory, files=len(present), events=len(events))
            events += self._manifests.listed()
        if events:
            deliver(events)

    def _note(self, problem: str) -> None:
        """Log a problem if it differs from the last problem.

        If there is no problem, the growing pauses start again with the shortest pause.
        """
        if problem and problem != self.problem:
            at_start = "nothing is programmed before every file can be read; what is in force stays"
            hint = "known Services stay served" if self._is_listed else at_start
            log.error("manifests_unreadable", directory=self._directory, error=problem, hint=hint)
        if not problem:
            self._backoff.reset()
        self.problem = problem

    def _read_changed(self) -> tuple[Mapping[str, FileContent], Collection[str], Mapping[str, str]]:
        """The new and changed files, the names of all files, and the reasons why some new or changed files could not be read.

        Raises:
            OSError: the files in the directory cannot be listed.
        """
        paths = self._paths()
        stamps = {path.name: _stamp(path) for path in paths}
        read: dict[str, FileContent] = {}
        unread: dict[str, str] = {}
        for path in paths:
            if self._stamps.get(path.name) != stamps[path.name]:
                try:
                    read[path.name] = read_file(path)
                except OSError as error:
                    unread[path.name] = error.strerror or str(error)
        self._stamps = {name: stamp for name, stamp in stamps.items() if name not in unread}
        return read, stamps.keys(), unread

    def _paths(self) -> list[pathlib.Path]:
        """The paths of the manifest files. Raises OSError if the directory cannot be listed."""
        with os.scandir(self._directory) as entries:
            return [pathlib.Path(entry) for entry in entries if is_manifest(entry.name) and not entry.is_dir()]

    async def _wait(self, changes: inotify.DirectoryChanges, within_s: float | None) -> None:
        """Wait at most ``within_s`` seconds for a change, and then until the directory no longer changes."""
        await comes_within(within_s, changes.wait())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LONGEST_SETTLE_S):
                while await comes_within(self._settle_s, changes.wait()):
                    pass


def _stamp(path: pathlib.Path) -> tuple[int, ...]:
    """The file's times, size and inode, which show whether the file has changed; empty if the file does not exist."""
    try:
        status = path.stat()
    except OSError:  # a symbolic link to a missing file; ``read_file`` reports the link
        return ()
    return status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_ino
