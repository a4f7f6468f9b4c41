"""How annotations of Services change kernel objects.

When an annotation changes, the kernel object is changed in place. Drift from annotated values is repaired. An annotated weight of
0 does not begin a drain.
"""

from typing import Any

import pytest

from ipvsproxy.model.annotations import ALL_ANNOTATIONS, ServiceAnnotations, WeightRules
from ipvsproxy.model.plan import Verb
from ipvsproxy.model.real_servers import Thresholds
from ipvsproxy.model.service import EndpointSlice, Service, ServiceType
from ipvsproxy.model.virtual_servers import SCHEDULER_FALLBACK, ConnectionCounts, RealServers, VirtualServer
from ipvsproxy.translate.translation_settings import TrafficScopes
from tests.reconcile.simulation import SimulatedNode
from tests.support import builders
from tests.support.builders import OTHER_NODE

KEY = builders.frontend(builders.CLUSTER_IP, 80)
ONE, TWO = builders.backend("10.244.0.1"), builders.backend("10.244.1.2")
BUSY = ConnectionCounts(1, 0)


def web(service: Service | None = None, **values: Any) -> Service:
    chosen = ServiceAnnotations(given=ALL_ANNOTATIONS, **values)
    return builders.with_options(service or builders.service(), annotations=chosen)


def pods(*, far: bool = True) -> EndpointSlice:
    each = [builders.endpoint("10.244.0.1")] + [builders.endpoint("10.244.1.2", OTHER_NODE)] * far
    return builders.endpoint_slice(*each)


def running(service: Service, **options: Any) -> SimulatedNode:
    node = SimulatedNode(**options)
    node.put(service, pods())
    node.sync()
    return node


FAR_ZERO = WeightRules({OTHER_NODE: 0}, {}, 1)


@pytest.mark.parametrize(
    "values",
    [
        {"scheduler": "wlc"},
        {"scheduler": "mh", "scheduler_flags": SCHEDULER_FALLBACK},
        {"scheduler": "wrr", "weights": WeightRules({OTHER_NODE: 7}, {}, 2)},
        {"weights": FAR_ZERO},
        {"thresholds": Thresholds(10, 5)},
        {"prefix_lengths": (24, 0)},
        {"drain_deadline_s": 60},
        {"scheduler": "sed", "slow_start_s": 30},
    ],
    ids=str,
)
def test_changing_or_removing_an_annotation_edits_kernel_objects_in_place(values: dict[str, Any]) -> None:
    plain = builders.service(affinity_timeout_s=600)
    node = running(plain)
    before = dict(node.kernel.virtual_servers[KEY].real_servers), node.kernel.virtual_servers[KEY].settings
    for service in (web(plain, **values), plain):
        node.put(service, pods())
        edits = [one for one in node.sync() if isinstance(one.item, VirtualServer | RealServers)]
        assert {one.verb for one in edits} <= {Verb.SET}
        node.observe()
        assert node.sync() == [], "what was written is what is read"
    after = node.kernel.virtual_servers[KEY]
    assert (after.real_servers, after.settings) == before
    assert not after.thresholds


def test_an_endpoint_without_connections_is_kept_after_an_annotation_sets_its_weight_to_zero() -> None:
    node = running(builders.service())
    node.put(web(weights=FAR_ZERO), pods())
    assert not any(one.item.drains for one in node.plan() if isinstance(one.item, RealServers))
    for _ in range(2):
        node.sync(after_s=3600)
        assert node.kernel.virtual_servers[KEY].real_servers == {ONE: 1, TWO: 0}
        assert node.reconciler.survey.draining == 0
        node.restart()


def test_an_endpoint_with_a_chosen_weight_of_zero_is_drained_when_it_is_removed() -> None:
    node = running(web(weights=FAR_ZERO))
    node.kernel.connection_counts[KEY, TWO] = BUSY
    node.put(web(weights=FAR_ZERO), pods(far=False))
    node.sync()
    assert node.kernel.virtual_servers[KEY].real_servers == {ONE: 1, TWO: 0}
    assert node.reconciler.survey.draining == 1
    node.kernel.connection_counts[KEY, TWO] = ConnectionCounts(0, 0)
    node.sync(after_s=60)
    node.sync(after_s=60)
    assert node.kernel.virtual_servers[KEY].real_servers == {ONE: 1}


def test_a_service_uses_the_deadline_of_the_node_again_after_its_deadline_annotation_is_removed() -> None:
    node = running(web(drain_deadline_s=60), drain_deadline_s=600)
    node.kernel.connection_counts[KEY, TWO] = BUSY
    node.put(builders.service(), pods(far=False))
    node.sync()
    node.sync(after_s=599)
    assert TWO in node.kernel.virtual_servers[KEY].real_servers
    node.sync(after_s=1)
    assert TWO not in node.kernel.virtual_servers[KEY].real_servers
    node.put(web(drain_deadline_s=60), pods())
    node.remove("web")
    node.sync()
    assert KEY not in node.kernel.virtual_servers


def test_drift_of_flags_and_weights_and_thresholds_is_repaired() -> None:
    rules = WeightRules({}, {}, 3)
    node = running(web(scheduler="mh", scheduler_flags=SCHEDULER_FALLBACK, weights=rules, thresholds=Thresholds(10)))
    server = node.kernel.virtual_servers[KEY]
    assert server.settings.flags == SCHEDULER_FALLBACK
    assert server.thresholds == {ONE: Thresholds(10), TWO: Thresholds(10)}
    server.settings = server.settings._replace(flags=0)
    server.real_servers[ONE] = 9
    server.thresholds = {TWO: Thresholds(99)}
    node.observe()
    assert node.reconciler.take_drift_news().drifted == {"virtual_server": 1}
    node.sync()
    repaired = node.kernel.virtual_servers[KEY]
    assert repaired.settings.flags == SCHEDULER_FALLBACK
    assert repaired.real_servers == {ONE: 3, TWO: 3}
    assert repaired.thresholds == {ONE: Thresholds(10), TWO: Thresholds(10)}


def test_thresholds_of_a_removed_real_server_are_forgotten() -> None:
    node = running(web(thresholds=Thresholds(10)))
    node.put(web(thresholds=Thresholds(10)), pods(far=False))
    node.sync()
    node.sync(after_s=60)
    assert node.kernel.virtual_servers[KEY].thresholds == {ONE: Thresholds(10)}
    node.put(web(thresholds=Thresholds(10)), pods())
    node.sync()
    node.observe()
    assert node.sync() == []


def test_annotations_of_a_service_also_apply_to_its_second_scope() -> None:
    balanced = builders.service(kind=ServiceType.LOAD_BALANCER, load_balancer=["192.0.2.80"], external_local=True)
    rules = WeightRules({OTHER_NODE: 7}, {}, 2)
    service = web(balanced, scheduler="wrr", weights=rules, thresholds=Thresholds(10))
    node = running(service, scopes=TrafficScopes.API)
    (scope,) = (one for key, one in node.kernel.virtual_servers.items() if str(key).startswith("mark"))
    assert scope.settings.scheduler == "wrr"
    assert scope.real_servers == {ONE: 2, TWO: 7}
    assert scope.thresholds == {ONE: Thresholds(10), TWO: Thresholds(10)}
    node.put(balanced, pods())
    edits = [one for one in node.sync() if isinstance(one.item, VirtualServer | RealServers)]
    assert {one.verb for one in edits} == {Verb.SET}


def test_a_changed_deadline_annotation_applies_at_once_to_drains_that_have_already_begun() -> None:
    node = running(web(drain_deadline_s=600))
    node.kernel.connection_counts[KEY, TWO] = BUSY
    node.put(web(drain_deadline_s=600), pods(far=False))
    node.sync()
    node.sync(after_s=200)
    node.put(web(drain_deadline_s=201), pods(far=False))
    node.sync()
    assert node.reconciler.next_s() == node.now + 1
    node.put(web(drain_deadline_s=100), pods(far=False))
    node.sync()
    assert TWO not in node.kernel.virtual_servers[KEY].real_servers


def test_the_winning_service_sets_the_drain_deadline_of_a_contested_virtual_server() -> None:
    young = web(builders.service("young", created_s=builders.CREATED_S + 1), drain_deadline_s=30)
    node = running(web(drain_deadline_s=60))
    node.put(young, builders.endpoint_slice(builders.endpoint("10.244.0.1"), service="young"))
    node.kernel.connection_counts[KEY, TWO] = BUSY
    node.put(web(drain_deadline_s=60), pods(far=False))
    node.sync()
    node.put(young)
    node.sync(after_s=59)
    assert TWO in node.kernel.virtual_servers[KEY].real_servers, "the other one must wait"
    node.put(builders.service())
    node.sync(after_s=1)
    assert TWO in node.kernel.virtual_servers[KEY].real_servers, "there is no deadline any more"
    node.remove("web")
    node.sync()
    assert TWO not in node.kernel.virtual_servers[KEY].real_servers, "the heir's is over"
