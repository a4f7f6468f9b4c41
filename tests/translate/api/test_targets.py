"""Tests that the pods behind endpoints are found in the pages of a list and in manifests. An invalid object yields no pods."""

import json
from typing import Any

import pytest

from ipvsproxy.model.service import ServiceName
from ipvsproxy.translate.api import targets
from ipvsproxy.translate.api.decode import UndecodableError
from ipvsproxy.translate.api.targets import Target
from tests.support import builders

WEB = ServiceName("demo", "web")
HERE = builders.backend("10.244.0.1", 8080)


def _slice(*endpoints: object, ports: object = ({"port": 8080},), **metadata: object) -> dict[str, Any]:
    usual = {"name": "web-1", "namespace": "demo", "labels": {"kubernetes.io/service-name": "web"}}
    return {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": usual | metadata,
        "ports": ports,
        "endpoints": endpoints,
    }


def _endpoint(address: object = "10.244.0.1", node: str | None = "node-a", **reference: str) -> dict[str, object]:
    return {"addresses": [address], "nodeName": node, "targetRef": reference or None}


POD = _endpoint(kind="Pod", namespace="demo", name="web-abc")


def test_a_list_of_slices_gives_the_pod_and_the_node_for_each_endpoint_and_port() -> None:
    item = _slice(POD, ports=[{"name": "a", "port": 8080}, {"name": "b", "port": 9090}])
    found = targets.of_list(json.dumps({"metadata": {}, "items": [item]}).encode())
    expected = Target("demo/web-abc", "node-a")
    assert found == {(WEB, HERE): expected, (WEB, builders.backend("10.244.0.1", 9090)): expected}


def test_a_list_may_have_no_items() -> None:
    assert targets.of_list(b'{"metadata": {}, "items": null}') == {}


@pytest.mark.parametrize("body", [b"", b"[]", b'{"items": []}', b"\xff"])
def test_a_body_that_is_not_a_list_of_slices_is_rejected(body: bytes) -> None:
    with pytest.raises(UndecodableError, match="list of EndpointSlices"):
        targets.of_list(body)


def test_invalid_endpoint_slices_in_a_list_are_ignored() -> None:
    broken = _slice({"addresses": "10.0.0.1"})
    assert set(targets.of_list(json.dumps({"metadata": {}, "items": [broken, _slice(POD)]}).encode())) == {(WEB, HERE)}


@pytest.mark.parametrize(
    ("endpoint", "target"),
    [
        (_endpoint(name="web-abc"), Target("demo/web-abc", "node-a")),
        (_endpoint(kind="VirtualMachine", namespace="vms", name="one"), Target("VirtualMachine vms/one", "node-a")),
        (_endpoint(), Target("", "node-a")),
        (_endpoint(node=None, kind="Pod", name="web-abc"), Target("demo/web-abc", "")),
        (_endpoint(node=None), None),
        (_endpoint("nonsense", name="web-abc"), None),
        ({"addresses": [], "nodeName": "node-a"}, None),
    ],
)
def test_a_target_contains_the_object_and_the_node_that_the_endpoint_names(endpoint: object, target: Target | None) -> None:
    assert targets.of_documents([_slice(endpoint)]).get((WEB, HERE)) == target


@pytest.mark.parametrize(
    ("port", "is_valid"), [({}, False), *(({"port": number}, 0 < number < 65536) for number in (0, 1, 65535, 65536))]
)
def test_a_port_without_a_valid_number_yields_no_pods(port: dict[str, int], *, is_valid: bool) -> None:
    found = targets.of_documents([_slice(POD, ports=[port])])
    assert list(found) == ([(WEB, builders.backend("10.244.0.1", port["port"]))] if is_valid else [])


@pytest.mark.parametrize(
    "document",
    [
        {"kind": "Service", "metadata": {"name": "web"}},
        [],
        {"kind": "EndpointSlice"},
        _slice(POD, labels={}),
        _slice(POD, labels=None),
        _slice({"addresses": 7}),
        {**_slice(), "endpoints": None},
    ],
)
def test_a_document_yields_no_pods_if_it_has_no_valid_endpoint_that_belongs_to_a_service(document: object) -> None:
    assert targets.of_documents([document]) == {}


def test_a_manifest_without_a_namespace_belongs_to_the_default_namespace() -> None:
    found = targets.of_documents([_slice(_endpoint(kind="Pod", name="web-abc"), namespace=None)])
    assert found == {(ServiceName("default", "web"), HERE): Target("default/web-abc", "node-a")}
