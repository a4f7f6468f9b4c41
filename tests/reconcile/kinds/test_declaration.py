"""The order of operations on kernel objects of different kinds. ``test_preconditions`` shows why this order is needed."""

import pytest

from ipvsproxy.model.kernel import DEVICE, BoundAddresses, Device, FlowCleaning, Sysctl, Timeouts
from ipvsproxy.model.kind import KINDS
from ipvsproxy.model.net import Family
from ipvsproxy.model.plan import Operation, Verb
from ipvsproxy.model.rules import Skeleton
from ipvsproxy.model.sets import IpSet, SetEntries, SetKind
from ipvsproxy.model.virtual_servers import RealServers, VirtualServer
from ipvsproxy.reconcile.kinds.declaration import Stage
from ipvsproxy.reconcile.kinds.node_tables import NodeTables
from ipvsproxy.reconcile.virtual_servers.drain import Drains
from tests.reconcile import examples
from tests.support import builders

STAGE_OF = NodeTables(Drains()).stage
KEY = builders.frontend("192.0.2.10", 80)
SERVER = VirtualServer(KEY, examples.ROUND_ROBIN)
REAL = builders.backend("10.244.0.1")
FIREWALL = SetEntries.of(examples.entry(SetKind.LOAD_BALANCER_FIREWALL, KEY))
SOURCE_RANGE = SetEntries.of(examples.range_entry(KEY, "10.0.0.0/8"))
SOURCE_ADDRESS = SetEntries.of(examples.entry(SetKind.LOAD_BALANCER_SOURCE_IP, KEY, "192.0.2.10"))
PLAIN = SetEntries.of(examples.entry(SetKind.LOAD_BALANCER, KEY))
RULES = Skeleton(family=Family.IPV4, chains={}, jumps=())
FLOW = FlowCleaning(examples.flow("192.0.2.10"), frozenset())

IN_ORDER: tuple[tuple[Operation, ...], ...] = (
    (Operation(Verb.SET, Sysctl("net/ipv4/ip_forward", "1")),),
    (Operation(Verb.SET, Timeouts(1, 2, 3)),),
    (Operation(Verb.ADD, Device(DEVICE)),),
    (Operation(Verb.ADD, IpSet(SetKind.CLUSTER_IP, Family.IPV4)),),
    (Operation(Verb.ADD, SOURCE_RANGE), Operation(Verb.ADD, SOURCE_ADDRESS)),
    (Operation(Verb.ADD, PLAIN),),
    (Operation(Verb.SET, RULES),),
    (Operation(Verb.ADD, FIREWALL),),
    (
        Operation(Verb.ADD, SERVER),
        Operation(Verb.SET, SERVER),
        Operation(Verb.ADD, RealServers.of(KEY, REAL)),
        Operation(Verb.SET, RealServers.of(KEY, REAL)),
    ),
    (Operation(Verb.ADD, BoundAddresses.of(KEY.address)),),
    (Operation(Verb.SET, RealServers.of(KEY, REAL, 0)), Operation(Verb.REMOVE, RealServers.of(KEY, REAL, 0))),
    (Operation(Verb.REMOVE, SERVER),),
    (Operation(Verb.REMOVE, FIREWALL),),
    (
        Operation(Verb.REMOVE, SOURCE_RANGE),
        Operation(Verb.REMOVE, SOURCE_ADDRESS),
        Operation(Verb.REMOVE, PLAIN),
    ),
    (Operation(Verb.REMOVE, BoundAddresses.of(KEY.address)),),
    (Operation(Verb.REMOVE, FLOW),),
)


def test_operations_of_all_kinds_are_planned_in_a_fixed_order() -> None:
    everything = [operation for equal in IN_ORDER for operation in equal]
    backwards = everything[::-1]
    assert sorted(backwards, key=STAGE_OF) == [operation for equal in IN_ORDER for operation in reversed(equal)]
    assert len({STAGE_OF(operation) for operation in everything}) == len(IN_ORDER)


def test_an_operation_that_is_never_planned_has_no_stage() -> None:
    with pytest.raises(KeyError):
        STAGE_OF(Operation(Verb.REMOVE, Device(DEVICE)))


def test_every_kind_is_listed_once_and_every_stage_belongs_to_a_kind() -> None:
    kinds = NodeTables(Drains()).kinds
    assert sorted(one.__name__ for kind in kinds for one in kind.classes) == sorted(one.__name__ for one in KINDS)
    by_set = {Stage.SOURCE_RANGES, Stage.FIREWALL_ENTRIES, Stage.FIREWALL_REMOVALS, Stage.MARKS, Stage.MARK_REMOVALS}
    of_real_servers = {Stage.REAL_SERVER_REMOVALS}
    assert {stage for kind in kinds for stage in kind.stages.values()} == set(Stage) - by_set - of_real_servers
