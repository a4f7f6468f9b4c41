"""The store of the tests' API server: objects, revisions, a window of history, and snapshots for paged lists.

No HTTP here. The rules come from the page "Kubernetes API Concepts" of the Kubernetes documentation.
"""

import base64
import binascii
import copy
import datetime as dt
import json
import re
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

Object = dict[str, Any]
_MICRO_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z")
Matches = Callable[[Object], bool]


class Resource(NamedTuple):
    """A resource type: the API version and kind in its objects, and the path of its objects."""

    api_version: str
    kind: str
    path: str


SERVICES = Resource("v1", "Service", "/api/v1/services")
ENDPOINT_SLICES = Resource("discovery.k8s.io/v1", "EndpointSlice", "/apis/discovery.k8s.io/v1/endpointslices")
NODES = Resource("v1", "Node", "/api/v1/nodes")
RESOURCES = (SERVICES, ENDPOINT_SLICES, NODES)


class StatusError(Exception):
    """An answer of kind Status: the API's HTTP code, reason and message, and the header Retry-After unless it is empty."""

    def __init__(self, code: int, reason: str, message: str, retry_after: str = "") -> None:
        super().__init__(message)
        self.code = code
        self.headers = {"Retry-After": retry_after} if retry_after else {}
        self.body: Object = {
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": {},
            "status": "Failure",
            "message": message,
            "reason": reason,
            "code": code,
        }


class Change(NamedTuple):
    """One revision: the object before the change (None if it was created) and after the change (None if it was deleted)."""

    revision: int
    resource: Resource
    old: Object | None
    new: Object | None

    def event(self, matches: Matches) -> Object | None:
        """The event for a watch with a selector. None means that the change does not concern the watch.

        If an object begins to match the selector, the event is ADDED. If the object no longer matches, the event is DELETED.
        """
        was = self.old is not None and matches(self.old)
        if self.new is not None and matches(self.new):
            return {"type": "MODIFIED" if was else "ADDED", "object": self.new}
        if was and self.old is not None:
            metadata = {**self.old["metadata"], "resourceVersion": str(self.revision)}
            return {"type": "DELETED", "object": {**self.old, "metadata": metadata}}
        return None


def _key(item: Object) -> tuple[str, str]:
    return item["metadata"].get("namespace", ""), item["metadata"]["name"]


class Store:
    """All objects of a cluster, with one revision counter for all resources."""

    def __init__(self) -> None:
        self.revision = 1000
        self._objects: dict[Resource, dict[tuple[str, str], Object]] = {resource: {} for resource in RESOURCES}
        self._changes: list[Change] = []
        self._oldest = self.revision
        self._snapshots: dict[tuple[Resource, int], Sequence[Object]] = {}

    def put(self, resource: Resource, item: Object) -> Change:
        """Create or update a copy of the object; the copy gets uid, creationTimestamp and resourceVersion."""
        new = copy.deepcopy(item)
        metadata = new["metadata"]
        if resource is not NODES:
            metadata.setdefault("namespace", "default")
        old = self._objects[resource].get(_key(new))
        kept = old["metadata"] if old else {}
        self.revision += 1
        metadata["resourceVersion"] = str(self.revision)
        metadata["uid"] = kept.get("uid") or str(uuid.UUID(int=self.revision))
        metadata["creationTimestamp"] = kept.get("creationTimestamp") or dt.datetime.now(dt.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        new = {"apiVersion": resource.api_version, "kind": resource.kind} | new
        self._objects[resource][_key(new)] = new
        return self._commit(Change(self.revision, resource, old, new))

    def delete(self, resource: Resource, name: str, namespace: str = "default") -> Change:
        """Delete an object; raises KeyError if the object does not exist."""
        old = self._objects[resource].pop(("" if resource is NODES else namespace, name))
        self.revision += 1
        return self._commit(Change(self.revision, resource, old, None))

    def _commit(self, change: Change) -> Change:
        self._changes.append(change)
        return change

    def objects(self, resource: Resource) -> list[Object]:
        """All objects, in the order of their keys, as etcd returns them."""
        return [item for _, item in sorted(self._objects[resource].items())]

    def forget_history(self) -> None:
        """Compact the history: no watch can start before the present revision, and all ``continue`` tokens expire."""
        self._changes.clear()
        self._oldest = self.revision
        self._snapshots.clear()

    def changes_since(self, resource: Resource, revision: int) -> list[Change]:
        """The changes to a resource after this revision.

        Raises:
            StatusError: 410 if the history does not reach back to this revision.
        """
        if revision < self._oldest:
            raise StatusError(410, "Expired", f"too old resource version: {revision} ({self._oldest})")
        return [change for change in self._changes if change.resource is resource and change.revision > revision]

    def page(self, resource: Resource, matches: Matches, *, limit: int = 0, continue_token: str = "") -> Object:
        """The whole list, or one page of the list.

        Every page shows the list at the revision of the first page. ``limit`` 0 means no limit.

        Raises:
            StatusError: 410 for an expired token, 400 for an invalid token.
        """
        revision, after = _read_token(continue_token) if continue_token else (self.revision, None)
        if continue_token and (resource, revision) not in self._snapshots:
            message = "The provided continue parameter is too old to display a consistent list result."
            raise StatusError(410, "Expired", message)
        items = self._snapshots[resource, revision] if continue_token else self.objects(resource)
        rest = [item for item in items if matches(item) and (after is None or _key(item) > after)]
        page = rest[:limit] if limit else rest
        metadata: Object = {"resourceVersion": str(revision)}
        if len(page) < len(rest):
            self._snapshots[resource, revision] = items
            metadata["continue"] = _token(revision, _key(page[-1]))
            metadata["remainingItemCount"] = len(rest) - len(page)
        return {"kind": f"{resource.kind}List", "apiVersion": resource.api_version, "metadata": metadata, "items": page}


def _token(revision: int, after: tuple[str, str]) -> str:
    return base64.urlsafe_b64encode(json.dumps([revision, *after]).encode()).decode()


def _read_token(text: str) -> tuple[int, tuple[str, str]]:
    try:
        revision, namespace, name = json.loads(base64.urlsafe_b64decode(text))
    except (binascii.Error, ValueError) as error:
        raise StatusError(400, "BadRequest", "continue key is not valid") from error
    return revision, (namespace, name)


def selector(query: Mapping[str, str]) -> Matches:
    """The predicate for ``labelSelector`` and ``fieldSelector`` of a query.

    Only the operators that the program uses are supported.

    Raises:
        StatusError: 400 for a selector that the resource or this server does not know.
    """
    tests = [_label_test(term) for term in _terms(query, "labelSelector")]
    tests += [_field_test(term) for term in _terms(query, "fieldSelector")]
    return lambda item: all(test(item) for test in tests)


def _terms(query: Mapping[str, str], name: str) -> list[str]:
    return [term for term in query.get(name, "").split(",") if term]


def _label_test(term: str) -> Matches:
    name, equals, value = term.partition("=")
    if equals:
        return lambda item: item["metadata"].get("labels", {}).get(name) == value
    is_required, label = not term.startswith("!"), term.removeprefix("!")
    return lambda item: (label in item["metadata"].get("labels", {})) is is_required


_FIELDS: Mapping[str, Callable[[Object], str]] = {
    "metadata.name": lambda item: str(item["metadata"]["name"]),
    "metadata.namespace": lambda item: str(item["metadata"].get("namespace", "")),
    "spec.clusterIP": lambda item: str(item.get("spec", {}).get("clusterIP", "")),
}


def _field_test(term: str) -> Matches:
    field, operator, value = term.partition("!=")
    if not operator:
        field, _, value = term.partition("=")
    read = _FIELDS.get(field)
    if read is None:
        raise StatusError(400, "BadRequest", f"field label not supported: {field}")
    return lambda item: (read(item) == value) is (not operator)


def check_event(event: Object, namespace: str, present: Iterable[Object]) -> None:
    """Refuse an Event (events.k8s.io/v1) that breaks a rule of pkg/apis/core/validation/events.go in kubernetes/kubernetes."""
    metadata, regarding = event.get("metadata", {}), event.get("regarding", {})
    series = event.get("series")
    rules = {
        "apiVersion": event.get("apiVersion") == "events.k8s.io/v1" and event.get("kind") == "Event",
        "metadata.namespace": metadata.get("namespace") == namespace,
        "metadata.name": bool(re.fullmatch(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?", metadata.get("name", ""))),
        "regarding.namespace": regarding.get("namespace", "default") == namespace,
        "eventTime": bool(_MICRO_TIME.fullmatch(event.get("eventTime", ""))),
        "reportingController": bool(re.fullmatch(r"[A-Za-z0-9]([\w./-]*[A-Za-z0-9])?", event.get("reportingController", ""))),
        **{name: 0 < len(event.get(name, "").encode()) <= 128 for name in ("reportingInstance", "action", "reason")},
        "note": len(event.get("note", "").encode()) <= 1024,
        "type": event.get("type") in {"Normal", "Warning"},
        "series": series is None or (series["count"] > 0 and bool(_MICRO_TIME.fullmatch(series["lastObservedTime"]))),
    }
    broken = [name for name, holds in rules.items() if not holds]
    if broken:
        raise StatusError(422, "Invalid", f"Event is invalid: {', '.join(broken)}")
    if any((other["metadata"]["namespace"], other["metadata"]["name"]) == (namespace, metadata["name"]) for other in present):
        raise StatusError(409, "AlreadyExists", f'events.events.k8s.io "{metadata["name"]}" already exists')
