"""API objects of a hostile author: the fields that the program reads have valid values, odd values, or values of another type.

The shapes of objects come from ``translate.api.schema``, so new fields are fuzzed automatically.
"""

import functools
import types
import typing
from typing import Any

import msgspec

from ipvsproxy.model.service import ObjectKind
from ipvsproxy.translate.api import schema
from tests.fuzz.chooser import Chooser
from tests.translate.strategies import NAMES

MOST_ITEMS = 3
SHAPES: dict[ObjectKind, type[schema.Schema]] = {
    ObjectKind.SERVICE: schema.ServiceJson,
    ObjectKind.ENDPOINT_SLICE: schema.EndpointSliceJson,
    ObjectKind.NODE: schema.NodeJson,
}
_ADDRESSES = ("10.96.0.1", "10.244.0.9", "192.168.0.10", "fd00::1", "::ffff:10.0.0.1", "010.0.0.1", "0.0.0.0", "::", "127.0.0.1")
_NETWORKS = (
    "10.0.0.0/8",
    "0.0.0.0/0",
    "fd00::/8",
    "::/0",
    "192.168.0.10/32",
    "10.1.2.3/33",
    "::ffff:10.0.0.0/104",
    " 10.0.0.0/8 ",
)
_POLICIES = ("Local", "Cluster")
_USUAL = {
    "name": ("web", "dns", "node-a", "10-96"),
    "namespace": ("default", "kube-system"),
    "uid": ("1",),
    "resourceVersion": ("1", "2"),
    "creationTimestamp": ("2024-01-01T00:00:00Z", "0001-01-01T00:00:00Z", "9999-12-31T23:59:59Z", "2024-01-01"),
    "endpoints.kubernetes.io/last-change-trigger-time": ("2024-01-01T00:00:00.123456789Z", "2024-01-01T00:00:00+99:99"),
    "kubernetes.io/service-name": ("web", "dns"),
    "protocol": ("TCP", "UDP", "SCTP"),
    "clusterIP": (*_ADDRESSES, "None"),
    "clusterIPs": _ADDRESSES,
    "externalIPs": _ADDRESSES,
    "addresses": _ADDRESSES,
    "address": _ADDRESSES,
    "ip": _ADDRESSES,
    "ipMode": ("VIP", "Proxy"),
    "loadBalancerSourceRanges": _NETWORKS,
    "podCIDR": _NETWORKS,
    "podCIDRs": _NETWORKS,
    "sessionAffinity": ("ClientIP", "None"),
    "internalTrafficPolicy": _POLICIES,
    "externalTrafficPolicy": _POLICIES,
    "type": ("ClusterIP", "NodePort", "LoadBalancer", "ExternalName", "InternalIP", "ExternalIP"),
    "addressType": ("IPv4", "IPv6", "FQDN"),
    "nodeName": ("node-a", "node-b"),
}
_NUMBERS = (80, 443, 8080, 30080, 30443, 65535, 0, 1, -1, 65536, 2**31, 2**63, 10**30)
_OTHER_TYPES: tuple[Any, ...] = (None, 1, "x", [], {}, True, 1.5)
_SELDOM = frozenset(("service.kubernetes.io/service-proxy-name", "service.kubernetes.io/headless", "deletionTimestamp"))


def document(chooser: Chooser, kind: ObjectKind) -> dict[str, Any]:
    """An object of this kind, built of JSON types."""
    return _struct(chooser, SHAPES[kind])


@functools.cache
def _fields(shape: type[msgspec.Struct]) -> list[tuple[str, Any]]:
    """The name of each field in JSON, with the type of the field."""
    hints = typing.get_type_hints(shape)
    return [(field.encode_name, hints[field.name]) for field in msgspec.structs.fields(shape)]


def _struct(chooser: Chooser, shape: type[msgspec.Struct]) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for name, hint in _fields(shape):
        if chooser.chance(16) or (name in _SELDOM and not chooser.chance(8)):
            continue
        made[name] = chooser.one(_OTHER_TYPES) if chooser.chance(32) else _value(chooser, hint, name)
    return made


def _value(chooser: Chooser, hint: Any, name: str) -> Any:
    (type_,) = [one for one in typing.get_args(hint) or (hint,) if one is not types.NoneType]
    if typing.get_origin(type_) in (list, tuple):
        inner = typing.get_args(type_)[0]  # the type of the elements of a list, or of a tuple of any length
        return [_value(chooser, inner, name) for _ in range(chooser.integer(0, MOST_ITEMS))]
    if typing.get_origin(type_) is dict:  # labels or annotations
        inner = typing.get_args(type_)[1]
        return {
            one: _value(chooser, inner, one)
            for one in NAMES
            if not (chooser.chance(16) or (one in _SELDOM and not chooser.chance(8)))
        }
    if type_ is bool:
        return chooser.chance(2)
    if type_ is int:
        return chooser.one(_NUMBERS)
    if type_ is str:
        return chooser.text(_USUAL.get(name, ()))
    return _struct(chooser, type_)
