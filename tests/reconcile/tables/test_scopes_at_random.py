"""Checks second scopes (``docs/scopes.md``) during random changes, restarts, kills and refused operations.

Most of the time, there are fewer marks than Services.
"""

import dataclasses
import random

import pytest

from ipvsproxy.model.net import Family
from ipvsproxy.model.plan import Operation, Verb
from ipvsproxy.model.service import ServiceName, ServiceType
from ipvsproxy.model.sets import IP_SETS, MarkedEntry, SetEntries, mark_entry
from ipvsproxy.model.virtual_servers import ConnectionCounts, FirewallMark, RealServers, VirtualServer, VirtualServerSettings
from tests.reconcile import simulation
from tests.reconcile.tables.test_scopes import node_with, plan_additions
from tests.support import builders, patience

SERVICES = 6
STEPS = 40
SHARED = "192.0.2.99"
"""An address that several Services desire; the oldest Service gets the address."""
_MARK = FirewallMark.of(Family.IPV4, 0x1)
THEIRS = VirtualServer(_MARK, VirtualServerSettings("wlc"))
CHANGES = ("put", "put", "put", "remove", "restart", "only additions", "kill", "observe", "connect", "refuse", "other bits")


class KilledError(Exception):
    """Raised to end the process in the middle of a plan."""


class Shops:
    """A node whose Services change at random.

    The number of a Service is part of the addresses of its load balancer and of its endpoints.
    """

    def __init__(self, seed: int, *, has_theirs: bool) -> None:
        self.random = random.Random(seed)
        self.operations_left: int | None = None
        self.has_theirs = has_theirs
        self.node = node_with(0x3)
        self.node.kernel.schedulers |= {"mh", "wlc"}
        if has_theirs:
            self.node.kernel.apply([Operation(Verb.ADD, THEIRS)])
        self.node.observe()
        self.node.after_each = self.examine

    def examine(self, operation: Operation) -> None:
        """Check that the kernel satisfies the conditions that must hold at any time."""
        kernel = self.node.kernel
        marked = {key: server for key, server in kernel.virtual_servers.items() if isinstance(key, FirewallMark)}
        if self.has_theirs:
            server = marked.pop(_MARK)
            assert (server.settings, server.real_servers) == (THEIRS.settings, {}), f"theirs was changed: {operation}"
        for entry in self.entries():
            if str(entry.address) == SHARED:
                continue  # the mark of a shared address may have been given to another Service a moment ago
            server = marked[FirewallMark.of(Family.IPV4, entry.mark)]
            used = [one for one, weight in server.real_servers.items() if weight]
            strangers = [one for one in used if one.address[3] // 10 != number_of(entry)]
            assert not strangers, f"{entry} leads to {strangers}: {operation}"
        for key in marked:
            assert mark_entry(key) in kernel.sets[mark_entry(key).set].entries, f"{key} would not be known as ours: {operation}"
        if self.operations_left is not None:
            self.operations_left -= 1
            if self.operations_left < 0:
                raise KilledError

    def entries(self) -> list[MarkedEntry]:
        """The set entries that mark packets."""
        sets = [held for name, held in self.node.kernel.sets.items() if IP_SETS[name].gives_marks]
        return [entry for held in sets for entry in held.entries if isinstance(entry, MarkedEntry)]

    def put(self) -> None:
        """Change a Service."""
        chance, number = self.random.random, self.random.randrange(SERVICES)
        service = builders.service(
            f"s{number}",
            builders.service_port(80),
            cluster=[f"10.96.1.{20 + number}"],
            load_balancer=[f"192.0.2.{20 + number}", *([SHARED] if chance() < 0.4 else [])],
            kind=ServiceType.LOAD_BALANCER,
            external_local=chance() < 0.8,
            created_s=float(self.random.choice([number, number, 100 - number])),
            affinity_timeout_s=self.random.choice([0, 0, 600]),
        )
        endpoints = [
            builders.endpoint(f"10.244.{node}.{10 * number + one}", builders.OTHER_NODE if node else builders.THIS_NODE)
            for node in (0, 1)
            for one in range(3)
            if chance() < 0.5
        ]
        self.node.put(service, builders.endpoint_slice(*endpoints, service=f"s{number}"), remembered=chance() < 0.1)

    def restart(self) -> None:
        """Start a new process, which gets the desired states of the Services in random order."""
        listed = list(self.node.states.items())
        self.random.shuffle(listed)
        self.node.states = dict(listed)
        self.node.restart()

    def change(self, what: str) -> None:
        """Let the event ``what`` happen, with random details. A sync may follow the event."""
        node, chance = self.node, self.random.random
        match what:
            case "put" | "only additions" | "kill" | "refuse":
                self.put()
            case "remove":
                node.remove(f"s{self.random.randrange(SERVICES)}")
            case "restart":
                self.restart()
            case "observe":
                node.observe()
            case "connect":
                marked = {key: one for key, one in node.kernel.virtual_servers.items() if isinstance(key, FirewallMark)}
                held = [(key, one) for key, server in marked.items() for one in server.real_servers if chance() < 0.3]
                node.kernel.connection_counts = dict.fromkeys(held, ConnectionCounts(1, 0))
            case _:
                bits = self.random.choice([0x3, 0x6, 0x7])
                node._policy = dataclasses.replace(node._policy, scope_bits=bits)
                node.reconciler.adopt(node._policy) if chance() < 0.5 else self.restart()
        if what == "only additions":
            plan_additions(node)
            return
        if what == "refuse":
            node.kernel.fail(lambda _: chance() < 0.2, times=3)
        if what == "kill":
            self.operations_left = self.random.randrange(30)
        if chance() < 0.7:
            node.sync(after_s=self.random.choice([0, 0, 60]))
        self.operations_left = None


def number_of(entry: MarkedEntry) -> int:
    assert entry.address is not None
    return entry.address[3] - 20


@pytest.mark.untraced
@pytest.mark.parametrize("seed", range(30 if patience.IS_THOROUGH else 12))
def test_each_service_has_a_mark_of_its_own_as_long_as_marks_are_free(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    # if there are few marks, a sync needs many plans, because each mark passes from one Service to the next
    monkeypatch.setattr(simulation, "MOST_ROUNDS", 60)
    shops = Shops(seed, has_theirs=bool(seed % 3))
    node = shops.node
    for _ in range(STEPS):
        try:
            shops.change(shops.random.choice(CHANGES))
        except KilledError:
            shops.operations_left = None
            shops.restart()
    node.kernel._failures.clear()
    node.kernel.connection_counts.clear()
    node.observe()
    for _ in range(8):
        node.sync(after_s=400)
    bits = node._policy.scope_bits
    is_given = shops.has_theirs and not _MARK.mark & ~bits
    desired = {name for name, state in node.states.items() if state.rare.scopes}
    own = [entry for entry in shops.entries() if str(entry.address) != SHARED]
    marks = {ServiceName(builders.NAMESPACE, f"s{number_of(entry)}"): entry.mark for entry in own}
    assert len(marks) == min(len(desired), (1 << bits.bit_count()) - 1 - is_given)
    assert marks.keys() <= desired
    for entry in shops.entries():
        owner = node.reconciler.survey.owner_of(SetEntries.of(entry))
        assert owner is not None
        assert marks[owner.service] == entry.mark
    marked = {key.mark for key in node.kernel.virtual_servers if isinstance(key, FirewallMark)}
    assert marked == set(marks.values()) | ({_MARK.mark} if shops.has_theirs else set())
    assert len(set(marks.values())) == len(marks)
    shops.restart()
    assert [one for one in node.sync() if isinstance(one.item, VirtualServer | RealServers | SetEntries)] == []
