"""What annotations mean on a node: settings of virtual servers, weights, and the reasons why annotations are not used."""

from typing import Any

import msgspec
import pytest

from ipvsproxy.model.annotations import ALL_ANNOTATIONS, Annotation, ServiceAnnotations, WeightRules
from ipvsproxy.model.net import Family
from ipvsproxy.model.real_servers import EvenWeights, Thresholds, UnevenWeights
from ipvsproxy.model.service import Endpoint, EndpointSlice, Service, ServiceType
from ipvsproxy.model.state import ServiceState
from ipvsproxy.model.virtual_servers import (
    PERSISTENT,
    SCHEDULER_FALLBACK,
    SCHEDULER_PORT,
    VirtualServer,
    VirtualServerSettings,
)
from ipvsproxy.translate.translation_settings import Settings, TrafficScopes
from tests.support import builders
from tests.support.builders import OTHER_NODE, endpoint, endpoint_slice
from tests.translate.reading import frontends, state_of

NEAR, FAR = "10.244.0.5", "10.244.1.5"
BALANCER = "192.0.2.80"
_FIELD_OF = {
    "weights": Annotation.WEIGHTS,
    "scheduler": Annotation.SCHEDULER,
    "scheduler_flags": Annotation.SCHEDULER_FLAGS,
    "slow_start_s": Annotation.SLOW_START,
    "thresholds": Annotation.MAX_CONNECTIONS,
    "drain_deadline_s": Annotation.DRAIN_DEADLINE,
    "prefix_lengths": Annotation.AFFINITY_NETMASK,
    "skips_load_balancer_ips": Annotation.SKIP_LOAD_BALANCER_IPS,
    "direct_return": Annotation.DIRECT_RETURN,
}


def annotated(service: Service | None = None, **values: Any) -> Service:
    """A Service with these annotations."""
    given = frozenset(_FIELD_OF[name] for name in values)
    return builders.with_options(service or builders.service(), annotations=ServiceAnnotations(given=given, **values))


def placed(address: str, node: str, zone: str) -> Endpoint:
    one = endpoint(address, node)
    return one._replace(conditions=msgspec.structs.replace(one.conditions, zone=zone))


def weighty(item: EndpointSlice, weight: int) -> EndpointSlice:
    """An EndpointSlice with the weight annotation."""
    return msgspec.structs.replace(item, conditions=tuple(msgspec.structs.replace(one, weight=weight) for one in item.conditions))


SLICE = endpoint_slice(placed(NEAR, builders.THIS_NODE, "zone-a"), placed(FAR, OTHER_NODE, "zone-b"))


def server(state: ServiceState) -> VirtualServer:
    return state.virtual_servers[builders.frontend(builders.CLUSTER_IP, 80)]


def weights(state: ServiceState) -> dict[str, int]:
    return {str(key.address): weight for key, weight in server(state).weights.items()}


def reasons(state: ServiceState) -> list[str]:
    return [str(one) for one in state.rare.skipped]


def test_services_without_annotations_share_one_object_for_weights_and_settings() -> None:
    one, other = (server(state_of(builders.service(name), SLICE)) for name in ("one", "two"))
    assert isinstance(one.weights, EvenWeights)
    assert one.settings is other.settings


@pytest.mark.parametrize(
    ("values", "default", "settings"),
    [
        ({"scheduler": "wrr"}, "rr", VirtualServerSettings("wrr")),
        ({"scheduler": "mh"}, "mh", VirtualServerSettings("mh", SCHEDULER_FALLBACK)),
        ({"scheduler": "mh"}, "rr", VirtualServerSettings("mh", SCHEDULER_FALLBACK)),
        ({"scheduler": "mh", "scheduler_flags": SCHEDULER_PORT}, "rr", VirtualServerSettings("mh", SCHEDULER_PORT)),
        ({"scheduler": "sh"}, "rr", VirtualServerSettings("sh")),
        ({"scheduler": "sh", "scheduler_flags": SCHEDULER_FALLBACK}, "rr", VirtualServerSettings("sh", SCHEDULER_FALLBACK)),
        ({"scheduler_flags": 0}, "mh", VirtualServerSettings("mh")),
        ({"weights": WeightRules()}, "mh", VirtualServerSettings("mh", SCHEDULER_PORT | SCHEDULER_FALLBACK)),
        ({"thresholds": Thresholds(5)}, "rr", VirtualServerSettings("rr")),
    ],
)
def test_an_annotation_overrides_the_settings_of_the_node(
    values: dict[str, Any], default: str, settings: VirtualServerSettings
) -> None:
    state = state_of(annotated(**values), SLICE, settings=Settings(scheduler=default))
    assert server(state).settings == settings
    assert reasons(state) == []


def test_a_scheduler_that_the_kernel_does_not_have_is_replaced_by_the_scheduler_of_the_node() -> None:
    settings = Settings(scheduler="lc", missing_schedulers={"fo": "the kernel has no scheduler 'fo'; it has rr, lc"})
    state = state_of(annotated(scheduler="fo"), SLICE, settings=settings)
    assert server(state).settings.scheduler == "lc"
    assert reasons(state) == [
        "metadata.annotations[ipvsproxy.io/scheduler]: the kernel has no scheduler 'fo'; it has rr, lc; lc is used"
    ]


def test_only_hash_schedulers_get_the_flags_of_an_annotation() -> None:
    state = state_of(annotated(scheduler="wlc", scheduler_flags=SCHEDULER_PORT), SLICE)
    assert server(state).settings == VirtualServerSettings("wlc")
    assert reasons(state) == [
        "metadata.annotations[ipvsproxy.io/scheduler-flags]: the scheduler wlc has no flags; sh and mh have them"
    ]


def test_weights_by_node_and_zone_leave_the_order_of_real_servers_unchanged() -> None:
    state = state_of(annotated(scheduler="wrr", weights=WeightRules({OTHER_NODE: 0}, {"zone-a": 10}, 5)), SLICE)
    assert weights(state) == {NEAR: 10, FAR: 0}
    assert list(server(state).weights) == list(server(state_of(builders.service(), SLICE)).weights)


def test_weights_are_stored_in_packed_form_if_the_weight_of_every_endpoint_is_one() -> None:
    state = state_of(annotated(scheduler="wrr", weights=WeightRules()), SLICE)
    assert isinstance(server(state).weights, EvenWeights)


def test_a_scheduler_that_ignores_weights_gets_only_the_weights_zero_and_one() -> None:
    rules = WeightRules({OTHER_NODE: 0}, {}, 1)
    state = state_of(annotated(weights=rules), SLICE)
    assert (weights(state), reasons(state)) == ({NEAR: 1, FAR: 0}, [])
    state = state_of(annotated(weights=WeightRules({OTHER_NODE: 3}, {}, 1)), SLICE)
    assert weights(state) == {NEAR: 1, FAR: 1}
    assert reasons(state) == [
        "metadata.annotations[ipvsproxy.io/weights]: the scheduler rr takes only weights 0 and 1; wrr and wlc take others"
    ]


def test_the_weight_of_an_endpoint_slice_applies_whether_or_not_the_service_has_weight_rules() -> None:
    canary = weighty(endpoint_slice(endpoint("10.244.2.9", OTHER_NODE), suffix="canary"), 2)
    state = state_of(builders.service(), SLICE, canary, settings=Settings(scheduler="wrr"))
    assert weights(state) == {NEAR: 1, FAR: 1, "10.244.2.9": 2}
    state = state_of(annotated(scheduler="wrr", weights=WeightRules({}, {}, 7)), SLICE, canary)
    assert weights(state) == {NEAR: 7, FAR: 7, "10.244.2.9": 2}
    state = state_of(builders.service(), SLICE, canary)
    assert reasons(state)[0].startswith("metadata.annotations[ipvsproxy.io/weight]: the scheduler rr takes only weights")


def test_the_weights_of_endpoint_slices_are_used_if_all_slices_of_the_service_have_a_weight() -> None:
    assert weights(state_of(builders.service(), weighty(SLICE, 0))) == {NEAR: 0, FAR: 0}
    assert weights(state_of(builders.service(), weighty(SLICE, 3), settings=Settings(scheduler="wlc"))) == {NEAR: 3, FAR: 3}


def test_weights_of_endpoint_slices_are_ignored_if_the_operator_does_not_allow_them() -> None:
    for allowed in (frozenset(), frozenset({Annotation.WEIGHTS})):
        state = state_of(builders.service(), weighty(SLICE, 0), settings=Settings(annotations=allowed))
        assert weights(state) == {NEAR: 1, FAR: 1}
    state = state_of(builders.service(), weighty(SLICE, 0), settings=Settings(annotations=frozenset({Annotation.WEIGHT})))
    assert weights(state) == {NEAR: 0, FAR: 0}


def test_slow_start_gives_endpoints_the_weight_100_unless_a_slice_has_an_explicit_weight() -> None:
    state = state_of(annotated(scheduler="wlc", slow_start_s=30), SLICE)
    assert (weights(state), state.rare.slow_start_s) == ({NEAR: 100, FAR: 100}, 30)
    canary = weighty(endpoint_slice(endpoint("10.244.2.9", OTHER_NODE), suffix="canary"), 2)
    assert weights(state_of(annotated(scheduler="wlc", slow_start_s=30), SLICE, canary)) == {NEAR: 1, FAR: 1, "10.244.2.9": 2}


@pytest.mark.parametrize("scheduler", ["rr", "lc", "dh", "sh", "mh", "fo", "ovf"])
def test_slow_start_needs_a_scheduler_that_sends_less_traffic_to_a_lower_weight(scheduler: str) -> None:
    state = state_of(annotated(scheduler=scheduler, slow_start_s=30), SLICE)
    assert state.rare.slow_start_s == 0
    assert isinstance(server(state).weights, EvenWeights)
    (reason,) = reasons(state)
    assert f"slow-start]: the scheduler {scheduler} gives no small share to a low weight" in reason
    assert reason.endswith("; one of lblc, lblcr, nq, sed, wlc, wrr does")


def test_the_netmask_annotation_extends_session_affinity_to_the_network_of_the_client() -> None:
    dual = builders.service(cluster=[builders.CLUSTER_IP, "fd00:10:96::10"], affinity_timeout_s=600)
    state = state_of(annotated(dual, prefix_lengths=(24, 64)), SLICE)
    by_family = {key.address.family: one.settings for key, one in state.virtual_servers.items()}
    assert by_family == {
        Family.IPV4: VirtualServerSettings("rr", PERSISTENT, 600, 24),
        Family.IPV6: VirtualServerSettings("rr", PERSISTENT, 600, 64),
    }
    state = state_of(annotated(prefix_lengths=(24, 0)), SLICE)
    assert server(state).settings == VirtualServerSettings("rr")
    assert reasons(state) == [
        "metadata.annotations[ipvsproxy.io/affinity-netmask]: the Service has no session affinity (sessionAffinity: ClientIP)"
    ]


def test_load_balancer_addresses_are_not_served_if_an_annotation_leaves_them_to_the_load_balancer() -> None:
    balanced = builders.service(kind=ServiceType.LOAD_BALANCER, load_balancer=[BALANCER])
    state = state_of(annotated(balanced, skips_load_balancer_ips=True), SLICE)
    assert frontends(state) == {"TCP 10.96.0.10:80"}
    assert state.addresses == builders.addresses(builders.CLUSTER_IP)
    assert len(frontends(state_of(annotated(balanced, skips_load_balancer_ips=False), SLICE))) == 2


def test_an_annotation_sets_the_drain_deadline_of_its_service() -> None:
    assert state_of(annotated(drain_deadline_s=60), SLICE).rare.drain_deadline_s == 60
    assert state_of(builders.service(), SLICE).rare.drain_deadline_s == 0


@pytest.mark.parametrize("forbidden", [one for one in Annotation if one is not Annotation.WEIGHT])
def test_the_operator_chooses_which_annotations_have_an_effect(forbidden: Annotation) -> None:
    every = {
        "scheduler": "sh",
        "scheduler_flags": SCHEDULER_FALLBACK,
        "weights": WeightRules({}, {}, 3),
        "drain_deadline_s": 60,
        "thresholds": Thresholds(5, 3),
        "prefix_lengths": (24, 0),
        "skips_load_balancer_ips": True,
    }
    if forbidden is Annotation.SLOW_START:
        every |= {"scheduler": "wlc", "scheduler_flags": None, "slow_start_s": 30}
    if forbidden is Annotation.DIRECT_RETURN:
        every |= {"direct_return": True, "skips_load_balancer_ips": False}
    balanced = builders.service(kind=ServiceType.LOAD_BALANCER, load_balancer=[BALANCER], affinity_timeout_s=600)
    service = annotated(balanced, **every)
    chosen = msgspec.structs.replace(service.options.annotations, given=ALL_ANNOTATIONS - {Annotation.WEIGHT})
    service = builders.with_options(service, annotations=chosen)
    usual = state_of(service, SLICE, settings=Settings(direct_return=True))
    assert reasons(usual) == []
    state = state_of(service, SLICE, settings=Settings(direct_return=True, annotations=ALL_ANNOTATIONS - {forbidden}))
    assert reasons(state)[0] == (
        f"metadata.annotations[ipvsproxy.io/{forbidden}]: --service-annotations (ipvsproxy.serviceAnnotations) of this node "
        "does not allow it"
    )
    assert (state.served, state.rare.drain_deadline_s, state.rare.slow_start_s, state.rare.scopes) != (
        usual.served,
        usual.rare.drain_deadline_s,
        usual.rare.slow_start_s,
        usual.rare.scopes,
    )


@pytest.mark.parametrize("scheduler", ["sh", "mh", "dh"])
def test_the_order_of_real_servers_is_the_same_on_all_nodes_for_a_hash_scheduler(scheduler: str) -> None:
    addresses = [f"10.244.3.{number}" for number in (9, 3, 7, 5)]
    item = endpoint_slice(*map(endpoint, addresses))
    views = [builders.node_view(node_object=builders.node(name=name)) for name in ("node-a", "node-b", "node-c")]
    for service, settings in ((annotated(scheduler=scheduler), Settings()), (builders.service(), Settings(scheduler=scheduler))):
        orders = {tuple(server(state_of(service, item, settings=settings, view=view)).weights) for view in views}
        assert orders == {tuple(builders.backend(address) for address in sorted(addresses))}


def test_virtual_servers_of_one_service_with_equal_weights_share_one_weights_object() -> None:
    balanced = builders.service(kind=ServiceType.LOAD_BALANCER, load_balancer=[BALANCER])
    one, other = state_of(annotated(balanced, scheduler="wrr", weights=WeightRules({}, {}, 3)), SLICE).served
    assert isinstance(one.weights, UnevenWeights)
    assert one.weights is other.weights


SCOPED = Settings(scopes=TrafficScopes.API)


def scoped(**values: Any) -> Service:
    service = builders.service(
        kind=ServiceType.LOAD_BALANCER,
        load_balancer=[BALANCER],
        external_local=True,
        affinity_timeout_s=values.pop("affinity_s", 0),
    )
    return annotated(service, **values)


def test_the_scheduler_and_weights_and_thresholds_of_a_service_also_apply_to_clients_on_the_node() -> None:
    values = {"scheduler": "wrr", "weights": WeightRules({}, {"zone-b": 0}, 3), "thresholds": Thresholds(5)}
    state = state_of(scoped(**values), SLICE, settings=SCOPED)
    (scope,) = state.rare.scopes
    assert {str(key.address): weight for key, weight in scope.weights.items()} == {NEAR: 3, FAR: 0}
    assert (scope.settings, scope.thresholds) == (VirtualServerSettings("wrr"), Thresholds(5))


@pytest.mark.parametrize(
    ("values", "settings"),
    [
        ({"scheduler": "wrr"}, VirtualServerSettings("mh", SCHEDULER_FALLBACK)),
        ({"scheduler": "wrr", "thresholds": Thresholds(5)}, VirtualServerSettings("mh", SCHEDULER_FALLBACK)),
        (
            {"scheduler": "sh", "scheduler_flags": SCHEDULER_PORT | SCHEDULER_FALLBACK, "prefix_lengths": (24, 0)},
            VirtualServerSettings("sh", SCHEDULER_FALLBACK),
        ),
    ],
)
def test_the_second_scope_chooses_endpoints_by_client_address_if_the_service_has_session_affinity(
    values: dict[str, Any], settings: VirtualServerSettings
) -> None:
    (scope,) = state_of(scoped(affinity_s=600, **values), SLICE, settings=SCOPED).rare.scopes
    assert scope.settings == settings


def test_an_invalid_setting_of_a_dual_stack_service_is_reported_only_once() -> None:
    dual = builders.service(cluster=[builders.CLUSTER_IP, "fd00:10:96::10"])
    of_ipv6 = endpoint_slice(endpoint("fd00:244::5"), endpoint("fd00:244::6", OTHER_NODE), suffix="6")
    state = state_of(annotated(dual, weights=WeightRules({OTHER_NODE: 3}, {}, 1)), SLICE, of_ipv6)
    assert len(state.rare.skipped) == 1
