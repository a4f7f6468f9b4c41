"""The schema of the API's JSON, applied to objects in the form in which the API reference writes them."""

import msgspec
import pytest

from ipvsproxy.translate.api import schema

SERVICE = b"""{
 "apiVersion": "v1", "kind": "Service",
 "metadata": {"name": "web", "namespace": "shop", "uid": "u-1", "resourceVersion": "77", "generation": 3,
   "creationTimestamp": "2026-01-02T03:04:05Z", "deletionTimestamp": "2026-01-02T03:05:00Z",
   "labels": {"service.kubernetes.io/headless": "", "app": "web"},
   "annotations": {"ipvsproxy.io/scheduler": "wrr", "other": null},
   "managedFields": [{"manager": "kubectl"}]},
 "spec": {"type": "LoadBalancer", "clusterIP": "10.96.0.10", "clusterIPs": ["10.96.0.10", "fd00::10"],
   "externalIPs": ["192.0.2.1"], "loadBalancerSourceRanges": ["10.0.0.0/8"], "sessionAffinity": "ClientIP",
   "sessionAffinityConfig": {"clientIP": {"timeoutSeconds": 600}}, "internalTrafficPolicy": "Local",
   "externalTrafficPolicy": "Local", "healthCheckNodePort": 30000, "ipFamilyPolicy": "PreferDualStack",
   "ports": [{"name": "http", "protocol": "TCP", "port": 80, "targetPort": "web", "nodePort": 30080, "appProtocol": "http"}]},
 "status": {"conditions": [], "loadBalancer": {"ingress": [{"ip": "198.51.100.1", "ipMode": "VIP"}, {"hostname": "lb.example"}]}}
}"""
ENDPOINT_SLICE = b"""{
 "metadata": {"name": "web-1"},
 "addressType": "IPv4",
 "ports": [{"name": "", "protocol": "UDP", "port": 53}],
 "endpoints": [{"addresses": ["10.244.0.5"], "conditions": {"ready": false, "serving": true, "terminating": true},
   "nodeName": "node-a", "zone": "zone-a", "targetRef": {"kind": "Pod"},
   "hints": {"forZones": [{"name": "zone-a"}], "forNodes": [{"name": "node-a"}]}}]
}"""
NODE = b"""{
 "metadata": {"name": "node-a"},
 "spec": {"podCIDR": "10.244.0.0/24", "podCIDRs": ["10.244.0.0/24"], "taints": [{"key": "k", "effect": "NoSchedule"}]},
 "status": {"addresses": [{"type": "InternalIP", "address": "192.168.0.10"}]}
}"""


def test_every_field_of_a_service_that_is_used_is_read_by_its_name_in_the_api() -> None:
    raw = msgspec.json.decode(SERVICE, type=schema.ServiceJson)
    assert raw.metadata == schema.ObjectMetadata(
        name="web",
        namespace="shop",
        uid="u-1",
        resource_version="77",
        creation_timestamp="2026-01-02T03:04:05Z",
        deletion_timestamp="2026-01-02T03:05:00Z",
        labels={"service.kubernetes.io/headless": "", "app": "web"},
        annotations={"ipvsproxy.io/scheduler": "wrr", "other": None},
    )
    assert raw.spec == schema.ServiceSpec(
        type="LoadBalancer",
        cluster_ip="10.96.0.10",
        cluster_ips=["10.96.0.10", "fd00::10"],
        external_ips=["192.0.2.1"],
        load_balancer_source_ranges=["10.0.0.0/8"],
        ports=(schema.ServicePortJson(name="http", protocol="TCP", port=80, node_port=30080),),
        session_affinity="ClientIP",
        session_affinity_config=schema.SessionAffinityConfig(client_ip=schema.ClientIPConfig(timeout_seconds=600)),
        internal_traffic_policy="Local",
        external_traffic_policy="Local",
        health_check_node_port=30000,
    )
    ingress = [schema.LoadBalancerIngress(ip="198.51.100.1", ip_mode="VIP"), schema.LoadBalancerIngress()]
    assert raw.status == schema.ServiceStatus(load_balancer=schema.LoadBalancerStatus(ingress=ingress))


def test_every_field_of_an_endpoint_slice_that_is_used_is_read_by_its_name_in_the_api() -> None:
    raw = msgspec.json.decode(ENDPOINT_SLICE, type=schema.EndpointSliceJson)
    assert raw.address_type == "IPv4"
    assert raw.ports == (schema.EndpointPortJson(name="", protocol="UDP", port=53),)
    assert raw.endpoints == (
        schema.EndpointJson(
            addresses=["10.244.0.5"],
            conditions=schema.EndpointConditions(ready=False, serving=True, terminating=True),
            node_name="node-a",
            hints=schema.EndpointHints(for_zones=(schema.Hint(name="zone-a"),), for_nodes=(schema.Hint(name="node-a"),)),
            zone="zone-a",
        ),
    )


def test_every_field_of_a_node_that_is_used_is_read_by_its_name_in_the_api() -> None:
    raw = msgspec.json.decode(NODE, type=schema.NodeJson)
    assert raw.spec == schema.NodeSpec(pod_cidr="10.244.0.0/24", pod_cidrs=["10.244.0.0/24"], taints=[schema.Taint(key="k")])
    assert raw.status == schema.NodeStatus(addresses=[schema.NodeAddress(type="InternalIP", address="192.168.0.10")])


@pytest.mark.parametrize(
    "shape",
    [schema.ServiceJson, schema.EndpointSliceJson, schema.NodeJson, schema.StatusJson, schema.AnyObject],
)
def test_a_null_field_counts_as_absent(shape: type[schema.Schema]) -> None:
    names = [field.encode_name for field in msgspec.structs.fields(shape)]
    assert msgspec.json.decode(msgspec.json.encode(dict.fromkeys(names)), type=shape) == shape()


def test_a_status_object_has_a_code_a_reason_and_a_message() -> None:
    raw = msgspec.json.decode(b'{"kind":"Status","code":410,"reason":"Expired","message":"too old"}', type=schema.StatusJson)
    assert raw == schema.StatusJson(code=410, reason="Expired", message="too old")
