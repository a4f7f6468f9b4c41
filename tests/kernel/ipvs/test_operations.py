"""How a scheduler is replaced: which virtual servers are prepared, with how many others. With packets: tests/packets."""

import pytest

from ipvsproxy.kernel.ipvs import operations as ipvs_operations
from ipvsproxy.model.net import Family
from ipvsproxy.model.plan import Operation, Verb
from ipvsproxy.model.virtual_servers import (
    PERSISTENT,
    SCHEDULER_PORT,
    FirewallMark,
    RealServers,
    VirtualServer,
    VirtualServerKey,
    VirtualServerSettings,
)
from tests.support import builders

KEY = builders.frontend("10.96.0.1", 80)
POD = builders.backend("10.244.0.1")
WRR = VirtualServer(KEY, VirtualServerSettings("wrr"))


def test_a_virtual_server_with_another_scheduler_gets_session_affinity_by_halves_first() -> None:
    present = VirtualServerSettings("mh", SCHEDULER_PORT)
    operation = ipvs_operations.prepared(WRR, present)
    assert operation is not None
    assert isinstance(operation.item, VirtualServer)
    assert (operation.verb, operation.item.key) == (Verb.SET, KEY)
    assert operation.item.settings == VirtualServerSettings("mh", SCHEDULER_PORT | PERSISTENT, ipvs_operations._TIMEOUT_S, 1)


@pytest.mark.parametrize(
    "present",
    [
        VirtualServerSettings("wrr", SCHEDULER_PORT),  # the kernel changes flags alone
        VirtualServerSettings("rr", PERSISTENT, 600),  # known clients are served, and must stay where they are
        VirtualServerSettings("none"),  # nobody is served
        VirtualServerSettings(""),
    ],
)
def test_others_are_not_prepared(present: VirtualServerSettings) -> None:
    assert ipvs_operations.prepared(WRR, present) is None


def test_only_settings_of_virtual_servers_by_address_are_looked_at() -> None:
    mark = VirtualServer(FirewallMark.of(Family.IPV4, 7), VirtualServerSettings("wrr"))
    operations = [
        Operation(Verb.ADD, WRR),
        Operation(Verb.REMOVE, WRR),
        Operation(Verb.SET, mark),
        Operation(Verb.SET, RealServers.of(KEY, POD)),
    ]
    assert not [one for one in operations if ipvs_operations.may_change_scheduler(one)]
    assert ipvs_operations.may_change_scheduler(Operation(Verb.SET, WRR))
    assert list(ipvs_operations.segments(operations)) == [(0, 4)]


def test_few_wait_for_each_other() -> None:
    keys = [VirtualServerKey(KEY.protocol, KEY.address, port) for port in range(1, 2 * ipvs_operations.AT_ONCE + 2)]
    operations = [Operation(Verb.SET, VirtualServer(key, WRR.settings)) for key in keys]
    operations.insert(0, Operation(Verb.SET, RealServers.of(KEY, POD)))
    runs = list(ipvs_operations.segments(operations))
    assert runs == [(0, 21), (21, 41), (41, 42)]
    assert list(ipvs_operations.segments([])) == [(0, 0)]
