"""Covers the events for manifest files with lists, errors, duplicate objects, or several documents.

``test_decode`` covers the content of a manifest.
"""

import json
import pathlib
from typing import Any

import pytest
import yaml

from ipvsproxy.daemon.sources import directory
from ipvsproxy.daemon.sources.directory import Manifests
from ipvsproxy.model.service import (
    ApiServersFound,
    Event,
    Gone,
    Listed,
    ListStarted,
    ObjectKind,
    Put,
    Rejected,
    Service,
    ServiceName,
)

Json = dict[str, Any]


def service(name: str, address: str = "10.0.0.1", **metadata: Any) -> Json:
    spec = {"clusterIP": address, "ports": [{"port": 80}]}
    return {"apiVersion": "v1", "kind": "Service", "metadata": {"name": name, **metadata}, "spec": spec}


def text(*documents: Json) -> str:
    return yaml.safe_dump_all(documents)


class World:
    """Manifest files, which a test reads with the functions of the directory source."""

    def __init__(self, directory: pathlib.Path) -> None:
        self.directory = directory
        self.manifests = Manifests()
        self.files: set[str] = set()

    def write(self, **files: str) -> list[Event]:
        read = {}
        for stem, content in files.items():
            path = self.directory / f"{stem}.yaml"
            path.write_text(content)
            read[path.name] = directory.read_file(path)
        self.files |= set(read)
        return self.manifests.update(read, self.files)

    def remove(self, stem: str) -> list[Event]:
        self.files.remove(f"{stem}.yaml")
        return self.manifests.update({}, self.files)


@pytest.fixture
def world(tmp_path: pathlib.Path) -> World:
    return World(tmp_path)


def described(events: list[Event]) -> list[str]:
    return [
        f"{type(event).__name__} {event.key}" for event in events if not isinstance(event, ListStarted | Listed | ApiServersFound)
    ]


def address(event: Event) -> str:
    assert isinstance(event, Put)
    assert isinstance(event.object, Service)
    return str(event.object.cluster_addresses[0])


# Files


@pytest.mark.parametrize(
    ("name", "is_one"), [("a.yaml", 1), ("a.yml", 1), ("a.json", 1), ("a.yaml~", 0), (".a.yaml", 0), ("a", 0)]
)
def test_a_file_is_a_manifest_if_it_has_a_known_suffix_and_is_not_hidden(name: str, is_one: int) -> None:
    assert directory.is_manifest(name) == bool(is_one)


def test_documents_of_other_kinds_are_ignored_in_a_file_with_several_documents(world: World) -> None:
    deployment = {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "web"}}
    slice_of_web = {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {"name": "web-1", "labels": {"kubernetes.io/service-name": "web"}},
        "addressType": "IPv4",
        "ports": [{"port": 8080}],
        "endpoints": [{"addresses": ["10.1.0.1"]}],
    }
    node = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": "n1"}}
    events = world.write(all=text(service("web"), deployment, slice_of_web, node) + "---\n")
    assert described(events) == ["Put default/web", "Put default/web-1", "Put n1"]


def test_each_item_of_a_list_document_is_read_as_an_object(world: World) -> None:
    items = [service("a"), service("b", namespace="other")]
    assert described(world.write(all=text({"apiVersion": "v1", "kind": "List", "items": items}))) == [
        "Put default/a",
        "Put other/b",
    ]
    assert described(world.write(more=text({"apiVersion": "v1", "kind": "ServiceList", "items": [service("c")]}))) == [
        "Put default/c"
    ]


def test_a_manifest_in_json_is_read(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "web.json"
    path.write_text(json.dumps(service("web")))
    assert list(directory.read_file(path).objects) == [(ObjectKind.SERVICE, ServiceName("default", "web"))]


def test_json_with_too_deep_nesting_is_rejected(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "deep.json"
    path.write_text("[" * 100_000)
    (rejected,) = directory.read_file(path).rejected
    assert rejected.reason == "is nested more than 100 levels deep"


def test_an_unquoted_timestamp_is_read_in_the_format_of_the_api(world: World) -> None:
    (event,) = world.write(web=text(service("web")).replace("name: web", "name: web\n  creationTimestamp: 2026-01-02T03:04:05Z"))
    assert isinstance(event, Put)
    assert isinstance(event.object, Service)
    assert event.object.created_s == 1767323045


def test_an_unquoted_equals_sign_in_a_custom_resource_definition_is_read_as_a_string(world: World) -> None:
    """controller-gen does not quote equals signs, for example in prometheus-operator's alertmanagerconfigs (pyyaml#89)."""
    resource = "kind: CustomResourceDefinition\nspec:\n  enum:\n  - '!='\n  - =\n  - =~\n---\n"
    assert described(world.write(all=resource + text(service("web")))) == ["Put default/web"]
    assert directory.documents(world.directory / "all.yaml")[0]["spec"]["enum"] == ["!=", "=", "=~"]


def test_objects_that_a_watch_would_not_select_are_not_served(world: World) -> None:
    foreign = service("foreign", labels={"service.kubernetes.io/service-proxy-name": "other"})
    headless = {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {"name": "s", "labels": {"service.kubernetes.io/headless": ""}},
        "addressType": "IPv4",
        "endpoints": [],
    }
    read = [event.object for event in world.write(all=text(foreign, headless)) if isinstance(event, Put)]
    reasons = [one.not_served if isinstance(one, Service) else one.skipped[0] for one in read]
    assert [(reason and reason.field, reason and reason.invalid) for reason in reasons] == [("metadata.labels", False)] * 2


# Errors


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("a: b: c", "line 1: mapping values are not allowed"),
        ("a: [", "line 2: did not find"),
        ("a: \x00", "unacceptable character"),
        ("[" * 100_000, "nest"),  # the text comes from libyaml if libyaml limits nesting, otherwise from directory.py
        ("- " * 100_000, "nested more than 100 levels deep"),
        ("!!python/object:os.system {}", "line 1: could not determine a constructor"),
    ],
)
def test_a_file_that_is_not_yaml_causes_one_rejection_with_the_name_of_the_file(world: World, content: str, reason: str) -> None:
    (event,) = world.write(broken=content)
    assert isinstance(event, Rejected)
    assert (event.where, event.key) == ("broken.yaml", None)
    assert reason in event.reason
    assert "\n" not in event.reason


def test_a_document_that_cannot_be_read_is_rejected_with_its_position_and_field(world: World) -> None:
    odd = service("odd") | {"spec": {"clusterIP": "10.0.0.9", "ports": [{"port": "http"}]}}
    rejected, put = world.write(all=text(service("web"), odd))
    assert isinstance(rejected, Rejected)
    assert (rejected.where, rejected.key) == ("all.yaml, document 2", ServiceName("default", "odd"))
    assert rejected.field.startswith("spec.ports[")
    assert described([put]) == ["Put default/web"]


def test_the_position_of_a_rejected_list_item_contains_the_number_of_the_item(world: World) -> None:
    (event,) = world.write(all=text({"kind": "List", "items": [{"apiVersion": "v1", "kind": "Service"}]}))
    assert isinstance(event, Rejected)
    assert event.where == "all.yaml, document 1, item 1"


# Objects that stay


def test_objects_stay_when_their_file_becomes_invalid(world: World) -> None:
    world.write(all=text(service("a"), service("b")), other=text(service("c")))
    assert described(world.write(all="a: [")) == ["Rejected None"]
    assert described(world.write(all=text(service("b", "10.0.0.2")))) == ["Put default/b", "Gone default/a"]


def test_an_object_whose_document_becomes_invalid_stays_and_other_objects_are_updated(world: World) -> None:
    world.write(all=text(service("a"), service("b")))
    broken = service("a") | {"spec": "none"}
    rejected, put = world.write(all=text(broken, service("b", "10.0.0.2")))
    assert described([rejected, put]) == ["Rejected default/a", "Put default/b"]
    assert isinstance(rejected, Rejected)
    assert "is used" not in rejected.reason, "the object before the error is of this file"
    assert described(world.remove("all")) in (["Gone default/a", "Gone default/b"], ["Gone default/b", "Gone default/a"])


def test_documents_before_a_syntax_error_are_used(world: World) -> None:
    assert described(world.write(all=text(service("a")) + "---\na: [")) == ["Rejected None", "Put default/a"]


def test_an_unchanged_object_is_delivered_only_once(world: World) -> None:
    world.write(all=text(service("a")))
    assert world.write(all="# only a comment\n" + text(service("a"))) == []


# Conflicts


def test_if_two_files_have_the_same_object_the_file_with_the_later_name_is_rejected_only_once(
    world: World,
) -> None:
    rejected, put = world.write(b=text(service("web", "10.0.0.2")), a=text(service("web", "10.0.0.1")))
    assert address(put) == "10.0.0.1"
    assert isinstance(rejected, Rejected)
    assert (rejected.where, rejected.reason) == ("b.yaml", "is also in a.yaml, which comes first and is used")
    assert described(world.write(c=text(service("other")))) == ["Put default/other"]


def test_the_alphabetically_first_of_two_files_with_the_same_object_is_used_until_its_removal(
    world: World,
) -> None:
    world.write(b=text(service("web", "10.0.0.2")))
    _, put = world.write(a=text(service("web", "10.0.0.1")))
    assert address(put) == "10.0.0.1"
    (event,) = world.remove("a")
    assert address(event) == "10.0.0.2"


@pytest.mark.parametrize("allotted", ["a", "z"])
def test_a_manifest_with_a_cluster_ip_is_used_even_if_another_manifest_of_the_service_has_none(
    world: World, allotted: str
) -> None:
    """For example, one file belongs to an add-on, and the other file has the Service as a copy from the API server."""
    bare = service("web")
    del bare["spec"]["clusterIP"]
    rejected, put = world.write(addon=text(bare), **{allotted: text(service("web"))})
    assert isinstance(rejected, Rejected)
    assert (rejected.where, rejected.field) == ("addon.yaml, document 1", "spec.clusterIP")
    assert rejected.reason == f"is missing, and only an API server allots one; the Service in {allotted}.yaml is used"
    assert address(put) == "10.0.0.1"
    assert described(world.write(addon="# a comment\n" + text(bare))) == ["Rejected default/web"]
    assert world.remove(allotted) == [Gone(ObjectKind.SERVICE, ServiceName("default", "web"))]


def test_the_first_document_of_a_file_is_used_if_two_documents_define_the_same_object(world: World) -> None:
    rejected, put = world.write(all=text(service("web", "10.0.0.1"), service("web", "10.0.0.2")))
    assert address(put) == "10.0.0.1"
    assert isinstance(rejected, Rejected)
    assert (rejected.where, rejected.reason) == ("all.yaml, document 2", "is in this file twice; the first one is used")


# The first delivery


def test_the_lists_at_the_end_of_the_first_delivery_include_rejected_objects(world: World) -> None:
    world.write(all=text(service("web"), service("odd") | {"spec": "none"}))
    assert world.manifests.unknown() == []
    assert world.manifests.listed() == [
        Listed(ObjectKind.SERVICE, frozenset({ServiceName("default", "web"), ServiceName("default", "odd")})),
        Listed(ObjectKind.ENDPOINT_SLICE, frozenset()),
        Listed(ObjectKind.NODE, frozenset()),
    ]
