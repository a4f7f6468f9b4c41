"""The fields of a Node that are used, and the reasons why other fields are not used. Services: ``test_parse.py``."""

from typing import Any

import hypothesis
import msgspec
import pytest

from ipvsproxy.model.service import Node
from ipvsproxy.translate.api import parse, schema
from tests.support import builders
from tests.translate import strategies


def _node(document: dict[str, Any]) -> Node:
    return parse.parse_node(msgspec.convert(document, schema.NodeJson), "node-a")


def test_the_addresses_of_a_node_begin_with_the_internal_addresses_and_include_no_host_names() -> None:
    addresses = [
        {"type": "Hostname", "address": "node-a"},
        {"type": "ExternalIP", "address": "203.0.113.5"},
        {"type": "InternalIP", "address": "192.168.0.10"},
        {"type": "InternalIP", "address": "fd00::10"},
    ]
    assert _node({"status": {"addresses": addresses}}).addresses == builders.addresses("192.168.0.10", "fd00::10", "203.0.113.5")


def test_an_invalid_node_address_does_not_affect_the_other_addresses() -> None:
    addresses = [
        {"type": "InternalIP", "address": "node-a"},
        {"type": "InternalIP"},
        {"type": "InternalIP", "address": "10.0.0.1"},
    ]
    node = _node({"status": {"addresses": addresses}})
    assert node.addresses == builders.addresses("10.0.0.1")
    assert [str(skipped) for skipped in node.skipped] == ["status.addresses: 'node-a' is not an IP address"]


@pytest.mark.parametrize(
    ("spec", "networks"),
    [
        ({"podCIDR": "10.244.0.0/24", "podCIDRs": ["10.244.0.0/24", "fd00::/64"]}, ["10.244.0.0/24", "fd00::/64"]),
        ({"podCIDR": "10.244.0.0/24"}, ["10.244.0.0/24"]),
        ({}, []),
        (None, []),
    ],
)
def test_the_pod_ranges_of_a_node_come_from_pod_cidrs_or_from_pod_cidr_if_pod_cidrs_is_absent(
    spec: dict[str, Any] | None, networks: list[str]
) -> None:
    assert _node({"spec": spec}).pod_networks == builders.networks(*networks)


@pytest.mark.parametrize(
    ("document", "leaving"),
    [
        ({}, False),
        ({"spec": {"taints": [{"key": "node.kubernetes.io/unschedulable"}]}}, False),
        ({"spec": {"taints": [{"key": "x"}, {"key": "ToBeDeletedByClusterAutoscaler"}]}}, True),
        ({"metadata": {"deletionTimestamp": "2026-01-02T03:04:05Z"}}, True),
    ],
)
def test_a_node_counts_as_leaving_if_it_is_being_deleted_or_has_the_taint_for_deletion(
    document: dict[str, Any], *, leaving: bool
) -> None:
    assert _node(document).leaving is leaving


def test_a_parsed_node_has_its_uid_and_the_zone_from_its_label() -> None:
    node = _node({"metadata": {"uid": "u-1", "labels": {"topology.kubernetes.io/zone": "zone-a"}}})
    assert (node.zone, node.uid) == ("zone-a", "u-1")
    node = _node({"metadata": {"labels": {}}})
    assert (node.zone, node.uid) == ("", "")


@hypothesis.given(strategies.documents(schema.NodeJson))
def test_any_node_document_is_parsed_without_an_error(document: dict[str, Any]) -> None:
    node = _node(document)
    assert len(set(node.addresses)) == len(node.addresses)
