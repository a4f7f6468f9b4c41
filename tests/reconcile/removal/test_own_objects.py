"""The removals of a cleanup, and their order. ``tests/commands/test_cleanup.py`` shows that the cleanup works on a kernel."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest

from ipvsproxy.model.kernel import DEVICE, BoundAddresses, Device, LocalRoutes
from ipvsproxy.model.net import Family, Protocol
from ipvsproxy.model.plan import Operation, Verb
from ipvsproxy.model.rules import Jump, ObservedSkeleton, Skeleton
from ipvsproxy.model.sets import SET_COPY, ForeignElement, IpSet, SetEntries, SetEntry, SetKind, mark_entry
from ipvsproxy.model.state import Observation
from ipvsproxy.model.virtual_servers import FirewallMark, ObservedVirtualServer, VirtualServer
from ipvsproxy.reconcile.removal import own_objects
from tests.reconcile import examples
from tests.support import builders

KEY = builders.frontend("10.96.0.1", 80)
FOREIGN = builders.frontend("192.0.2.1", 80)
JUMPS = (Jump("nat", "OUTPUT", "KUBE-SERVICES", "kubernetes service portals"),)
OURS = {family: Skeleton(family=family, chains={}, jumps=JUMPS) for family in Family}
CLUSTER_IPS = IpSet(SetKind.CLUSTER_IP, Family.IPV4)
EMPTY = Observation(virtual_servers={}, sets={}, device=False, addresses=frozenset(), routes=frozenset(), interface_addresses=())


def kernel_with(
    *, device: bool = True, entries: frozenset[SetEntry] = frozenset(), jumps: tuple[Jump, ...] = JUMPS
) -> Observation:
    """A kernel with one of our virtual servers and one virtual server of another program."""
    settings = {key: ObservedVirtualServer(examples.ROUND_ROBIN, {}) for key in (KEY, FOREIGN)}
    image = ObservedSkeleton(family=Family.IPV4, chains={}, jumps=frozenset(jumps))
    return Observation(
        virtual_servers=settings,
        sets={CLUSTER_IPS.name: entries},
        device=device,
        addresses=frozenset({KEY.address}) if device else frozenset(),
        interface_addresses=(),
        skeletons={Family.IPV4: image},
    )


def remove(item: object) -> Operation:
    return Operation(Verb.REMOVE, item)  # type: ignore[arg-type]  # an item of any kind


def test_a_cleanup_removes_virtual_servers_first_and_the_device_last() -> None:
    todo = own_objects.plan(kernel_with(), OURS, ())
    assert list(todo.operations) == [
        remove(VirtualServer(KEY, examples.ROUND_ROBIN)),
        remove(OURS[Family.IPV4]),
        remove(CLUSTER_IPS),
        remove(Device(DEVICE)),
    ]


def test_a_cleanup_keeps_virtual_servers_in_excluded_ranges() -> None:
    todo = own_objects.plan(kernel_with(), OURS, builders.networks("10.96.0.0/16"))
    assert todo.virtual_servers == ()
    assert len(todo.witnesses) == 2


def test_a_cleanup_of_a_kernel_without_our_objects_removes_nothing() -> None:
    assert own_objects.plan(EMPTY, OURS, ()).operations == ()
    assert own_objects.plan(Observation(), OURS, ()).operations == ()


def test_a_cleanup_removes_no_rules_in_an_ip_family_that_has_none_of_our_rules() -> None:
    assert own_objects.plan(kernel_with(jumps=()), OURS, ()).rules == ()


def test_witnesses_may_be_removed_only_if_the_virtual_servers_and_all_witnesses_were_read() -> None:
    assert own_objects.may_remove_witnesses(EMPTY)
    for lacking in ("virtual_servers", "sets", "addresses", "routes", "interface_addresses"):
        assert not own_objects.may_remove_witnesses(dataclasses.replace(EMPTY, **{lacking: None}))  # type: ignore[arg-type]  # the keys are names of fields


def test_a_cleanup_removes_a_leftover_copy_of_a_set() -> None:
    todo = own_objects.plan(dataclasses.replace(EMPTY, set_copy=True), OURS, ())
    assert todo.operations == (remove(SET_COPY),)


def test_a_cleanup_removes_our_local_routes_and_the_virtual_servers_at_their_addresses() -> None:
    observed = dataclasses.replace(kernel_with(device=False), sets={}, addresses=frozenset(), routes=frozenset({KEY.address}))
    todo = own_objects.plan(observed, OURS, ())
    assert [operation.item.key for operation in todo.virtual_servers] == [KEY]
    assert todo.witnesses == (remove(LocalRoutes.of(KEY.address)),)


API_SERVER = builders.backend("192.0.2.99", 6443)
AT_API_SERVER = builders.frontend("192.0.2.99", 6443)
SETS_AT_API_SERVER = (
    SetEntry(IpSet(SetKind.EXTERNAL_IP, Family.IPV4).name, AT_API_SERVER.address, Protocol.TCP, 6443),
    SetEntry(IpSet(SetKind.LOAD_BALANCER_FIREWALL, Family.IPV4).name, AT_API_SERVER.address, Protocol.TCP, 6443),
)


def hiding(*entries: SetEntry, routed: bool = False) -> Observation:
    """A kernel in which some of our objects hide the API server.

    Some other objects have the API server's address but do not hide the API server; all remaining objects have other addresses.
    """
    near = builders.frontend("192.0.2.99", 80)
    local = frozenset({AT_API_SERVER.address, KEY.address})
    sets: dict[str, frozenset[SetEntry]] = {CLUSTER_IPS.name: frozenset()}
    for entry in entries:
        sets[entry.set] = sets.get(entry.set, frozenset()) | {entry}
    return dataclasses.replace(
        EMPTY,
        virtual_servers={key: ObservedVirtualServer(examples.ROUND_ROBIN, {}) for key in (KEY, near, AT_API_SERVER, FOREIGN)},
        sets=sets,
        device=True,
        addresses=frozenset() if routed else local,
        routes=local if routed else frozenset(),
    )


@pytest.mark.parametrize("routed", [False, True])
def test_only_objects_that_intercept_connections_to_an_api_server_are_removed(*, routed: bool) -> None:
    others = SetEntry(SETS_AT_API_SERVER[0].set, AT_API_SERVER.address, Protocol.TCP, 80)
    todo = own_objects.give_up(hiding(*SETS_AT_API_SERVER, others, routed=routed), (), [API_SERVER], ())
    assert todo.virtual_servers == (remove(VirtualServer(AT_API_SERVER, examples.ROUND_ROBIN)),)
    kind = LocalRoutes if routed else BoundAddresses
    assert todo.witnesses == (*(remove(SetEntries.of(one)) for one in SETS_AT_API_SERVER), remove(kind.of(API_SERVER.address)))


def test_a_virtual_server_that_may_lead_to_an_api_server_is_removed_only_if_its_address_is_external() -> None:
    observed = hiding()
    server = ObservedVirtualServer(examples.ROUND_ROBIN, {builders.backend("10.244.0.9", 6443): 1})
    assert observed.virtual_servers is not None
    led = dataclasses.replace(observed, virtual_servers={**observed.virtual_servers, AT_API_SERVER: server})
    foreign = ForeignElement(SETS_AT_API_SERVER[0].set, raw=b"1")
    assert own_objects.give_up(led, [foreign], [API_SERVER], ()).operations == ()
    for entry in SETS_AT_API_SERVER:
        todo = own_objects.give_up(led, [entry], [API_SERVER], ())
        assert todo.virtual_servers == (remove(VirtualServer(AT_API_SERVER, examples.ROUND_ROBIN)),)


CLUSTER_IP = SetEntry(CLUSTER_IPS.name, AT_API_SERVER.address, Protocol.TCP, 6443)


@pytest.mark.parametrize(
    ("observed", "former", "allowed"),
    [
        pytest.param(hiding(CLUSTER_IP), (), (), id="a cluster IP"),
        pytest.param(hiding(), [CLUSTER_IP], (), id="a cluster IP in the sets of the other backend"),
        pytest.param(hiding(), (), ["192.0.2.0/24"], id="allowed"),
        pytest.param(dataclasses.replace(hiding(), sets=None), (), (), id="sets not read"),
        pytest.param(dataclasses.replace(hiding(), virtual_servers=None), (), (), id="virtual servers not read"),
        pytest.param(dataclasses.replace(hiding(), addresses=frozenset({KEY.address})), (), (), id="of another program"),
    ],
)
def test_foreign_objects_and_objects_that_may_lead_to_the_api_server_are_kept(
    observed: Observation, former: Sequence[SetEntry], allowed: Sequence[str]
) -> None:
    assert own_objects.give_up(observed, former, [API_SERVER], builders.networks(*allowed)).operations == ()


MARK = FirewallMark.of(Family.IPV4, 0x3FFF)
MARKS = IpSet(SetKind.MARKS, Family.IPV4)


def with_own_objects(**changed: Any) -> Observation:
    """A kernel with a Service that has two virtual servers: one for its address, and one for a firewall mark.

    A local route leads to the Service's address, and another local route is stale.
    """
    server = ObservedVirtualServer(examples.ROUND_ROBIN, {})
    observed = Observation(
        virtual_servers={KEY: server, MARK: server, FirewallMark.of(Family.IPV4, 7): server},
        sets={CLUSTER_IPS.name: frozenset(), MARKS.name: frozenset({mark_entry(MARK)})},
        set_copy=True,
        device=True,
        addresses=frozenset(),
        routes=frozenset({KEY.address, FOREIGN.address}),
        interface_addresses=(),
        skeletons={Family.IPV4: ObservedSkeleton(family=Family.IPV4, chains={}, jumps=frozenset(JUMPS))},
    )
    return dataclasses.replace(observed, **changed)


def only_own(observed: Observation, *kinds: SetKind) -> own_objects.Cleanup:
    return own_objects.only_own(own_objects.plan(observed, OURS, ()), observed, kinds)


def test_a_partial_cleanup_removes_only_objects_that_kube_proxy_does_not_know() -> None:
    observed = with_own_objects()
    assert list(only_own(observed, SetKind.MARKS).operations) == [
        Operation(Verb.ADD, BoundAddresses((KEY.address,))),
        remove(VirtualServer(MARK, examples.ROUND_ROBIN)),
        remove(OURS[Family.IPV4]),
        remove(MARKS),
        remove(SET_COPY),
        remove(LocalRoutes(tuple(sorted((KEY.address, FOREIGN.address))))),
    ]
    assert remove(CLUSTER_IPS) in only_own(observed, *SetKind).operations


def test_a_partial_cleanup_binds_only_unbound_addresses_that_have_a_virtual_server() -> None:
    assert only_own(with_own_objects(addresses=frozenset({KEY.address}))).additions == ()
    assert only_own(with_own_objects(virtual_servers={})).additions == ()
    device, bound = only_own(with_own_objects(device=False)).additions
    assert (device, bound.item) == (Operation(Verb.ADD, Device(DEVICE)), BoundAddresses((KEY.address,)))
