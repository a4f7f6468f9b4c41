"""Covers which objects the store knows, which Services must be translated again, and which reports are made only once.

Services, EndpointSlices, Nodes and invalid objects are tested. The tests also cover which lists are accepted at once, and which
lists need confirmation by another list.
"""

import itertools

import msgspec
import pytest

from ipvsproxy.model.annotations import Annotation, ServiceAnnotations
from ipvsproxy.model.net import Family
from ipvsproxy.model.service import (
    ApiObject,
    ApiServersFound,
    EndpointSlice,
    EndpointSliceName,
    Event,
    Gone,
    Listed,
    ListStarted,
    Node,
    ObjectKind,
    Rejected,
    ServiceName,
    Skipped,
)
from ipvsproxy.model.steps import ITEMS_AT_ONCE, at_once
from ipvsproxy.store.guard import CONFIRMED_AFTER_S, LEAST, Guard
from ipvsproxy.store.objects import Changes, Complaint, Store
from tests.support import builders, memory_node

WEB = builders.service("web")
SLICE = builders.endpoint_slice(builders.endpoint("10.244.0.5"))
NODE = builders.node()
OTHER = msgspec.structs.replace(builders.node("192.168.0.11", name=builders.OTHER_NODE), takes_direct_return=True)
STARTED_S = 1_700_000_000.0
BAD = ServiceName("default", "bad")


@pytest.fixture
def store() -> Store:
    """A store that knows one Service, the EndpointSlice of this Service, and the Node object of this node.

    All changes have already been taken from the store.
    """
    store = Store(STARTED_S, here=NODE.name)
    deliver(store, WEB, SLICE, NODE)
    store.take()
    return store


def deliver(store: Store, *objects: ApiObject, now: float = 1) -> None:
    store.deliver([memory_node.put(item) for item in objects], now)


def listed(*items: ApiObject, kind: ObjectKind = ObjectKind.SERVICE) -> Event:
    return memory_node.listed(kind, items)


def gone(item: ApiObject) -> Event:
    return Gone(memory_node.KINDS[type(item)], memory_node.key_of(item))


def with_service(item: EndpointSlice, name: str | None) -> EndpointSlice:
    return msgspec.structs.replace(item, service=ServiceName("default", name) if name else None)


def test_the_store_keeps_known_api_servers_when_a_source_finds_others(store: Store) -> None:
    one, two = (frozenset([builders.backend(address, 6443)]) for address in ("192.0.2.1", "192.0.2.2"))
    for found in (one, two):
        store.deliver([ApiServersFound(found)], 1)
    assert store.api_servers == one | two


def test_the_store_contains_all_delivered_objects() -> None:
    store = Store(STARTED_S)
    deliver(store, WEB, SLICE, NODE, now=7)
    assert dict(store.services) == {WEB.name: WEB}
    assert list(store.slices_of(WEB.name)) == [SLICE]
    assert store.node(NODE.name) == NODE
    assert store.take() == Changes(services={WEB.name: 7}, counts=dict.fromkeys(ObjectKind, 1))


@pytest.mark.parametrize("item", [WEB, SLICE, NODE], ids=lambda item: type(item).__name__)
def test_a_delivered_object_that_equals_the_known_object_changes_nothing(store: Store, item: ApiObject) -> None:
    deliver(store, msgspec.structs.replace(item))
    assert store.take() == Changes()


def test_take_returns_each_change_only_once(store: Store) -> None:
    deliver(store, builders.service("web", cluster=("10.96.0.11",)))
    first = store.take()
    assert first.services
    assert store.take() == Changes()
    assert first.services, "what was taken stays with the taker"


def test_a_service_that_changes_several_times_is_reported_with_the_time_of_its_first_change(store: Store) -> None:
    deliver(store, builders.service("web", cluster=("10.96.0.11",)), now=5)
    deliver(store, builders.service("web", cluster=("10.96.0.12",)), now=6)
    deliver(store, builders.endpoint_slice(), now=8)
    changes = store.take()
    assert changes.services == {WEB.name: 5}
    assert changes.counts == {ObjectKind.SERVICE: 2, ObjectKind.ENDPOINT_SLICE: 1}


def test_a_deleted_service_must_be_translated_again_and_its_endpoint_slices_stay_known(store: Store) -> None:
    store.deliver([gone(WEB)], 3)
    assert dict(store.services) == {}
    assert list(store.slices_of(WEB.name)) == [SLICE]
    assert store.take().services == {WEB.name: 3}
    store.deliver([gone(WEB)], 4)
    assert store.take() == Changes(), "deleting it again changes nothing"


@pytest.mark.parametrize(("before", "after"), list(itertools.permutations(["web", "shop", None], 2)))
def test_both_services_must_be_translated_again_if_an_endpoint_slice_moves_from_one_to_the_other(
    before: str | None, after: str | None
) -> None:
    store = Store(STARTED_S)
    deliver(store, with_service(SLICE, before))
    store.take()
    deliver(store, with_service(SLICE, after))
    expected = {name for name in (before, after) if name}
    assert {name.name for name in store.take().services} == expected
    for name in ("web", "shop"):
        assert len(store.slices_of(ServiceName("default", name))) == (name == after)
    store.deliver([gone(SLICE)], 1)
    assert {name.name for name in store.take().services} == ({after} if after else set())


def test_endpoint_slices_with_equal_names_in_two_namespaces_are_different_objects(store: Store) -> None:
    other = builders.endpoint_slice(builders.endpoint("10.244.0.6"), namespace="other")
    deliver(store, other)
    assert list(store.slices_of(WEB.name)) == [SLICE]
    assert list(store.slices_of(ServiceName("other", "web"))) == [other]


def test_a_changed_or_deleted_endpoint_slice_does_not_affect_other_slices_of_its_service(store: Store) -> None:
    slices = [builders.endpoint_slice(builders.endpoint(f"10.244.0.{number}"), suffix=str(number)) for number in (1, 2, 3)]
    deliver(store, *slices)
    changed = msgspec.structs.replace(slices[0], ports=())
    deliver(store, changed)
    rest = [changed, *slices[1:]]
    while rest:
        assert sorted(store.slices_of(WEB.name), key=lambda item: item.name) == rest
        store.deliver([gone(rest.pop())], 1)
    assert store.slices_of(WEB.name) == ()


def test_a_complete_list_replaces_all_known_objects_of_its_kind(store: Store) -> None:
    shop = builders.service("shop")
    deliver(store, shop)
    store.take()
    store.deliver([Listed(ObjectKind.SERVICE, frozenset({ServiceName("default", "shop")}))], 9)
    assert store.services.keys() == {shop.name}
    assert store.take().services == {WEB.name: 9}
    store.deliver([Listed(ObjectKind.ENDPOINT_SLICE, frozenset())], 9)
    assert list(store.slices_of(WEB.name)) == []
    assert store.node(NODE.name) == NODE, "each kind has a list of its own"


@pytest.mark.parametrize("order", list(itertools.permutations(ObjectKind)), ids="-".join)
def test_the_store_is_complete_as_soon_as_every_kind_of_object_has_been_listed(order: tuple[ObjectKind, ...]) -> None:
    store = Store(STARTED_S)
    for number, kind in enumerate(order):
        assert not store.is_complete
        assert set(store.missing) == set(order[number:])
        store.deliver([Listed(kind, frozenset())], 1)
    assert store.is_complete
    assert list(store.missing) == []


@pytest.mark.parametrize("event", [gone(NODE), Listed(ObjectKind.NODE, frozenset())], ids=["deleted", "not listed"])
def test_a_deleted_node_is_marked_as_leaving_and_keeps_its_addresses(store: Store, event: Event) -> None:
    store.deliver([event], 1)
    assert store.node(NODE.name) == msgspec.structs.replace(NODE, leaving=True)
    changes = store.take()
    assert changes.counts[ObjectKind.NODE] == 1
    assert changes.services == {}
    store.deliver([event], 2)
    assert store.take() == Changes(), "that it is gone is no news"
    deliver(store, NODE)
    assert store.node(NODE.name) == NODE
    assert store.take().counts[ObjectKind.NODE] == 1


@pytest.mark.parametrize("event", [gone(OTHER), listed(NODE, kind=ObjectKind.NODE)], ids=["deleted", "not listed"])
@pytest.mark.parametrize("leaving", [False, True])
def test_a_deleted_node_other_than_this_node_is_removed_from_the_store(store: Store, event: Event, *, leaving: bool) -> None:
    deliver(store, msgspec.structs.replace(OTHER, leaving=leaving))
    assert store.tunnels[0] == {OTHER.name: OTHER.addresses}
    store.take()
    store.deliver([event], 2)
    assert (store.node(OTHER.name), store.node(NODE.name), store.tunnels[0]) == (None, NODE, {})
    assert store.take().counts == {ObjectKind.NODE: 1}


def test_all_services_can_be_marked_for_translation(store: Store) -> None:
    deliver(store, builders.service("shop"), now=3)
    store.touch_all(5)
    assert store.take().services == {WEB.name: 5, ServiceName("default", "shop"): 3}


def slice_triggered(at_s: float, address: str) -> EndpointSlice:
    return msgspec.structs.replace(builders.endpoint_slice(builders.endpoint(address)), trigger_s=at_s)


def test_trigger_times_of_changes_are_kept_if_they_are_later_than_the_start_of_this_process(store: Store) -> None:
    deliver(store, slice_triggered(STARTED_S - 1, "10.244.0.6"))
    deliver(store, slice_triggered(STARTED_S + 1, "10.244.0.7"))
    deliver(store, slice_triggered(STARTED_S + 2, "fd00::7"))
    deliver(store, slice_triggered(STARTED_S + 3, "fd00::7"))  # not a change
    deliver(store, slice_triggered(0, "10.244.0.9"))
    assert store.take().triggers == ((Family.IPV4, STARTED_S + 1), (Family.IPV6, STARTED_S + 2))
    assert store.take().triggers == ()


def test_a_trigger_time_is_forgotten_if_its_slice_is_deleted_before_the_slice_is_programmed(store: Store) -> None:
    gone, other = slice_triggered(STARTED_S + 1, "10.244.0.7"), slice_triggered(STARTED_S + 2, "fd00::7")
    other = msgspec.structs.replace(other, name=EndpointSliceName("default", "web-v6"))
    deliver(store, gone, other)
    store.deliver([Gone(ObjectKind.ENDPOINT_SLICE, gone.name)], 0)
    assert store.take().triggers == ((Family.IPV6, STARTED_S + 2),)


def test_the_trigger_time_of_an_endpoint_slice_without_a_service_is_ignored(store: Store) -> None:
    deliver(store, msgspec.structs.replace(slice_triggered(STARTED_S + 1, "10.244.0.7"), service=None))
    assert store.take().triggers == ()


def test_deleting_an_endpoint_slice_without_an_address_family_marks_its_service_for_translation(store: Store) -> None:
    strange = msgspec.structs.replace(builders.endpoint_slice(suffix="strange"), family=None)
    deliver(store, strange)
    store.take()
    store.deliver([gone(strange)], 2)
    assert list(store.take().services) == [strange.service]


def test_the_store_changes_nothing_when_a_list_of_services_starts(store: Store) -> None:
    store.take()
    store.deliver([ListStarted(ObjectKind.SERVICE)], 2)
    assert store.take() == Changes(services={})


def test_changes_are_counted_until_the_loop_takes_them(store: Store) -> None:
    deliver(store, builders.endpoint_slice(), builders.service("shop"))
    assert store.untaken == {ObjectKind.ENDPOINT_SLICE: 1, ObjectKind.SERVICE: 1}
    store.take()
    assert store.untaken == {}


def test_unused_parts_of_an_object_are_reported_when_they_change(store: Store) -> None:
    skipped = (Skipped("spec.ports[0]", "no protocol"),)
    deliver(store, builders.with_options(WEB, skipped=skipped))
    assert store.take().complaints == (Complaint(ObjectKind.SERVICE, "default/web", skipped),)
    deliver(store, builders.with_options(WEB, skipped=skipped, affinity_timeout_s=5))
    assert store.take().complaints == ()
    deliver(store, WEB)
    assert store.take().complaints == ()
    deliver(store, builders.with_options(WEB, skipped=skipped))
    assert store.take().complaints == (Complaint(ObjectKind.SERVICE, "default/web", skipped),)


@pytest.mark.parametrize("item", [SLICE, NODE], ids=lambda item: type(item).__name__)
def test_unused_parts_of_a_new_object_are_reported(item: EndpointSlice) -> None:
    store = Store(STARTED_S)
    skipped = (Skipped("x", "wrong"),)
    deliver(store, msgspec.structs.replace(item, skipped=skipped))
    assert store.take().complaints == (Complaint(memory_node.KINDS[type(item)], str(item.name), skipped),)


def test_the_known_version_of_an_object_stays_valid_if_a_new_version_cannot_be_parsed(store: Store) -> None:
    key = ServiceName("default", "web")
    store.deliver([Rejected(ObjectKind.SERVICE, key, "", "bad"), Listed(ObjectKind.SERVICE, frozenset({key}))], 1)
    assert dict(store.services) == {WEB.name: WEB}
    assert store.take() == Changes(complaints=(Complaint(ObjectKind.SERVICE, "default/web", (Skipped("", "bad"),)),))


def test_an_object_that_cannot_be_parsed_is_reported_only_once_until_it_changes(store: Store) -> None:
    rejected = Rejected(ObjectKind.SERVICE, BAD, "", "no port")
    listed = Listed(ObjectKind.SERVICE, frozenset({BAD, ServiceName("default", "web")}))

    def complaints(*events: Event) -> list[str]:
        store.deliver(events, 1)
        return [one.skipped[0].reason for one in store.take().complaints]

    assert complaints(rejected, listed) == ["no port"]
    assert complaints(rejected, listed) == []
    assert complaints(rejected._replace(reason="no name")) == ["no name"]
    assert complaints(rejected._replace(kind=ObjectKind.ENDPOINT_SLICE)) == ["no port"], "of another kind it is another object"
    assert complaints(memory_node.put(builders.service("bad")), rejected._replace(reason="no name")) == ["no name"]
    assert complaints(Gone(ObjectKind.SERVICE, BAD), rejected._replace(reason="no name")) == ["no name"]
    without_bad = Listed(ObjectKind.SERVICE, frozenset({ServiceName("default", "web")}))
    assert complaints(without_bad, rejected._replace(reason="no name")) == ["no name"]


def test_errors_in_a_file_are_reported_each_time_the_file_is_read(store: Store) -> None:
    rejected = Rejected(ObjectKind.SERVICE, BAD, "web.yaml, document 2", "no port")
    nameless = Rejected(ObjectKind.SERVICE, None, "web.yaml", "line 3: not YAML")
    store.deliver([rejected, nameless], 1)
    store.deliver([rejected, nameless], 1)
    reported = [(one.name, one.where) for one in store.take().complaints]
    assert reported == [("default/bad", "web.yaml, document 2"), ("", "web.yaml")] * 2


def guarded_store(count: int) -> tuple[Store, list[ApiObject]]:
    """Returns a store that checks each list.

    If a list lacks more than half of the known objects, the store removes no object until a second list confirms the loss.

    Also returns the Services that the store knows.
    """
    services: list[ApiObject] = [builders.service(f"web-{number}") for number in range(count)]
    slices = [
        builders.endpoint_slice(builders.endpoint(f"10.244.0.{number}"), service=f"web-{number}") for number in range(count)
    ]
    store = Store(STARTED_S, Guard(50))
    deliver(store, *services, *slices)
    store.deliver([listed(*services), listed(*slices, kind=ObjectKind.ENDPOINT_SLICE)], 2)
    store.take()
    return store, services


def test_a_list_without_most_services_removes_none_of_them_until_another_list_confirms_the_loss() -> None:
    store, services = guarded_store(20)
    store.deliver([listed(*services[:5])], 10)
    assert len(store.services) == 20
    assert store.take().counts == {}
    assert (store.doubts[ObjectKind.SERVICE].missing, store.doubts[ObjectKind.SERVICE].known) == (15, 20)
    store.deliver([listed(*services[:5])], 10 + CONFIRMED_AFTER_S)
    assert len(store.services) == 5
    assert len(store.take().services) == 15
    assert not store.doubts


def test_a_deletion_event_of_the_watch_removes_a_service_while_an_empty_list_is_unconfirmed() -> None:
    store, services = guarded_store(20)
    store.deliver([listed()], 10)
    store.deliver([gone(services[0]), gone(services[1])], 11)
    assert len(store.services) == 18


def names_of(services: list[ApiObject]) -> set[object]:
    return {item.name for item in services}


def test_a_service_that_an_unconfirmed_list_lacks_is_remembered_until_delivery_or_deletion() -> None:
    store, services = guarded_store(20)

    def remembered() -> set[object]:
        return set(store.remembered)

    assert remembered() == set()
    store.deliver([listed(*services[:5])], 10)
    assert remembered() == names_of(services[5:]) == store.take().services.keys()
    deliver(store, services[5])
    store.deliver([gone(services[6])], 11)
    assert remembered() == names_of(services[7:])
    assert store.take().services.keys() == names_of(services[5:7])
    store.deliver([listed(*services[:3], *services[7:9])], 12)
    assert remembered() == names_of([*services[3:6], *services[9:]])
    assert store.take().services.keys() == names_of([*services[3:6], *services[7:9]])
    store.deliver([listed(*services)], 13)
    assert remembered() == set()
    store.deliver([listed()], 14)
    store.deliver([listed()], 14 + CONFIRMED_AFTER_S)
    assert (remembered(), len(store.services)) == (set(), 0)


def emptied(count: int) -> list[ApiObject]:
    """One EndpointSlice without endpoints for each of ``count`` Services."""
    return [builders.endpoint_slice(service=f"web-{number}") for number in range(count)]


def deliver_list(store: Store, *slices: ApiObject, now: float) -> None:
    store.deliver([ListStarted(ObjectKind.ENDPOINT_SLICE)], now)
    deliver(store, *slices)
    store.deliver([listed(*slices, kind=ObjectKind.ENDPOINT_SLICE)], now)


def test_a_list_in_which_all_endpoint_slices_have_become_empty_needs_confirmation_by_another_list() -> None:
    store, services = guarded_store(20)
    deliver_list(store, *emptied(20), now=10)
    assert store.take() == Changes()
    assert (store.doubts[ObjectKind.ENDPOINT_SLICE].missing, store.doubts[ObjectKind.ENDPOINT_SLICE].known) == (20, 20)
    deliver_list(store, *emptied(20), now=10 + CONFIRMED_AFTER_S)
    assert not store.doubts
    assert store.take().services.keys() == {item.name for item in services}
    assert not any(item.endpoints for name in store.services for item in store.slices_of(name))


def test_a_list_that_ends_before_it_is_complete_does_not_affect_the_next_list() -> None:
    store, _ = guarded_store(20)
    store.deliver([ListStarted(ObjectKind.ENDPOINT_SLICE)], 10)
    deliver(store, *emptied(20))
    slices = [item for name in store.services for item in store.slices_of(name)]
    deliver_list(store, *slices, now=11)
    assert (store.take(), dict(store.doubts)) == (Changes(), {})


def test_emptied_endpoint_slices_need_confirmation_only_if_a_list_empties_many_of_them() -> None:
    store, _ = guarded_store(20)
    rest = [item for name in store.services for item in store.slices_of(name)][5:]
    deliver_list(store, *emptied(5), *rest, now=10)
    assert len(store.take().services) == 5
    deliver(store, *emptied(20))
    assert (len(store.take().services), dict(store.doubts)) == (15, {})


def store_with_nodes(others: int) -> tuple[Store, list[Node]]:
    """Make a store that waits for a second list if a list lacks most nodes.

    Also return all nodes in the store except ``NODE``.
    """
    store = Store(STARTED_S, Guard(50, all_nodes=True), here=NODE.name)
    nodes = [msgspec.structs.replace(OTHER, name=f"node-{number}") for number in range(others)]
    deliver(store, NODE, *nodes)
    store.deliver([listed(NODE, *nodes, kind=ObjectKind.NODE)], 2)
    return store, nodes


@pytest.mark.parametrize("others", [2, 20])
def test_nodes_are_removed_only_after_a_second_list_confirms_that_most_nodes_are_missing(others: int) -> None:
    store, _ = store_with_nodes(others)
    store.take()
    for items in ([], [NODE]):
        store.deliver([listed(*items, kind=ObjectKind.NODE)], 10)
        assert (len(store.tunnels[0]), store.node(NODE.name)) == (others, NODE)
        assert (store.take(), store.may_lack_all) == (Changes(), False)
    store.deliver([listed(NODE, kind=ObjectKind.NODE)], 10 + CONFIRMED_AFTER_S)
    assert (store.tunnels[0], store.node(NODE.name), dict(store.doubts)) == ({}, NODE, {})


def test_a_node_is_removed_at_once_if_at_least_half_of_the_nodes_remain_or_a_watch_reports_its_deletion() -> None:
    store, nodes = store_with_nodes(3)
    store.deliver([listed(NODE, nodes[0], kind=ObjectKind.NODE)], 2)
    assert store.tunnels[0].keys() == {"node-0"}
    store.deliver([gone(nodes[0])], 3)
    assert (store.tunnels[0], dict(store.doubts)) == ({}, {})


def test_a_list_without_this_node_needs_no_confirmation_if_no_other_node_is_watched() -> None:
    store = Store(STARTED_S, Guard(50), here=NODE.name)
    store.deliver([listed(kind=ObjectKind.NODE)], 1)
    assert not store.doubts
    deliver(store, NODE)
    store.deliver([listed(kind=ObjectKind.NODE)], 2)
    assert (store.node(NODE.name), dict(store.doubts)) == (msgspec.structs.replace(NODE, leaving=True), {})


@pytest.mark.parametrize("kind", list(ObjectKind))
def test_an_empty_first_list_is_not_accepted_until_another_list_confirms_it(kind: ObjectKind) -> None:
    store = Store(STARTED_S, Guard(50, all_nodes=True))
    store.deliver([Listed(kind, frozenset())], 1)
    assert kind not in store.missing
    assert store.may_lack_all
    store.deliver([Listed(kind, frozenset())], CONFIRMED_AFTER_S)
    assert store.may_lack_all
    store.deliver([Listed(kind, frozenset())], 1 + CONFIRMED_AFTER_S)
    assert not store.may_lack_all


@pytest.mark.parametrize("guard", [Guard(0), Guard(50)])
def test_a_first_list_is_accepted_if_it_has_objects_or_the_guard_against_incomplete_lists_is_off(guard: Guard) -> None:
    store, web = Store(STARTED_S, guard), builders.service("web")
    store.deliver([listed(*[web] * (guard.percent > 0))], 1)
    store.deliver([Listed(ObjectKind.NODE, frozenset())], 1)
    assert not store.may_lack_all


def test_a_list_with_objects_needs_no_confirmation_after_an_empty_first_list() -> None:
    store = Store(STARTED_S, Guard(50))
    store.deliver([listed()], 1)
    store.deliver([listed(builders.service("web"))], 2)
    assert not store.may_lack_all


def test_the_store_remembers_the_schedulers_that_annotations_name() -> None:
    store = Store(started_s=0)
    assert store.schedulers == set()
    for name, scheduler in (("one", "wlc"), ("two", "wlc"), ("three", "")):
        chosen = ServiceAnnotations(scheduler=scheduler)
        deliver(store, builders.with_options(builders.service(name), annotations=chosen))
    assert store.schedulers == {"wlc"}


KIND = ObjectKind.SERVICE


@pytest.mark.parametrize(
    ("percent", "missing", "known", "accepted"),
    [
        (50, 51, 100, False),
        (50, 50, 100, True),
        (50, LEAST - 1, LEAST - 1, True),
        (50, LEAST, LEAST, False),
        (0, 1000, 1000, True),
        (100, 1000, 1000, True),
        (99, 1000, 1000, False),
    ],
)
def test_a_list_that_lacks_too_many_objects_needs_confirmation(percent: int, missing: int, known: int, accepted: bool) -> None:  # noqa: FBT001
    assert Guard(percent).accepts(KIND, missing=missing, known=known, now=0) is accepted


def test_a_complete_list_does_not_confirm_the_incomplete_list_before_it() -> None:
    guard = Guard(50)
    assert not guard.accepts(KIND, missing=100, known=100, now=0)
    assert guard.accepts(KIND, missing=0, known=100, now=30)
    assert not guard.accepts(KIND, missing=100, known=100, now=CONFIRMED_AFTER_S + 1), "a new doubt, not a confirmation"


def test_lists_of_different_kinds_are_confirmed_independently() -> None:
    guard = Guard(50)
    assert not guard.accepts(KIND, missing=100, known=100, now=0)
    assert not guard.accepts(ObjectKind.ENDPOINT_SLICE, missing=100, known=100, now=CONFIRMED_AFTER_S)
    assert guard.accepts(KIND, missing=100, known=100, now=CONFIRMED_AFTER_S)


def test_packets_from_the_tunnel_of_a_leaving_node_are_accepted_only_if_that_node_takes_part_in_direct_return(
    store: Store,
) -> None:
    apart = msgspec.structs.replace(builders.node("192.168.0.12", name="apart"))
    for node in (NODE, OTHER, apart):
        deliver(store, node)
    assert store.tunnels[1] == {*OTHER.addresses, *apart.addresses}
    for node in (OTHER, apart):
        deliver(store, msgspec.structs.replace(node, leaving=True))
    assert store.tunnels[1] == {*OTHER.addresses}


def test_a_changed_tunnel_touches_only_direct_return_services_with_an_endpoint_on_its_node(store: Store) -> None:
    asking = ServiceAnnotations(given=frozenset({Annotation.DIRECT_RETURN}), direct_return=True)

    def touched(*nodes: str) -> set[str]:
        store.take()
        at_once(store.touching_direct_return(nodes, 7))
        return {name.name for name in store.take().services}

    for name in ("shop", "web"):
        deliver(store, builders.endpoint_slice(builders.endpoint("10.244.1.5", OTHER.name), service=name))
    deliver(store, builders.with_options(builders.service("shop"), annotations=asking), builders.service("web"))
    assert (touched(OTHER.name), touched("node-c")) == ({"shop"}, set())
    deliver(store, builders.service("shop"), builders.with_options(builders.service("web"), annotations=asking))
    assert touched(OTHER.name) == {"web"}
    store.deliver([gone(builders.service("web"))], 9)
    assert touched(OTHER.name) == set()


def test_direct_return_services_are_marked_in_steps_for_translation_while_services_come_and_go(store: Store) -> None:
    asking = ServiceAnnotations(given=frozenset({Annotation.DIRECT_RETURN}), direct_return=True)

    def put(number: int) -> None:
        deliver(store, builders.endpoint_slice(builders.endpoint("10.244.1.5", OTHER.name), service=f"s{number}"))
        deliver(store, builders.with_options(builders.service(f"s{number}"), annotations=asking))

    for number in range(2 * ITEMS_AT_ONCE):
        put(number)
    store.take()
    for step, _ in enumerate(store.touching_direct_return([OTHER.name], 7), 1):
        assert len(store.take().services) == ITEMS_AT_ONCE
        put(2 * ITEMS_AT_ONCE + step)
        store.deliver([gone(builders.service(f"s{step}"))], 8)
        assert len(store.take().services) == 2
    assert step == 2


def test_the_ends_and_sources_of_tunnels_are_computed_again_only_after_a_node_changes(store: Store) -> None:
    deliver(store, NODE, OTHER)
    before = store.tunnels
    deliver(store, builders.service("shop"), OTHER)
    assert store.tunnels is before
    store.deliver([gone(OTHER)], 1)
    assert store.tunnels == ({}, frozenset())
