"""After any sequence of writes, removals by other programs, audits and polls, the next audit reports exactly the kernel's table.

The IPVS driver reads an in-memory table: IPv4 through ``getsockopt``, and IPv6 through netlink. Other kinds of kernel objects are
not tested here, because they are always read completely in one part.
"""

import contextlib
import errno
import socket
import struct
from collections.abc import Iterator

import hypothesis
from hypothesis import stateful
from hypothesis import strategies as st

from ipvsproxy.kernel.base import message, netlink
from ipvsproxy.kernel.base.errors import KernelError
from ipvsproxy.kernel.ipvs.ipvs_driver import IpvsDriver
from ipvsproxy.model.net import Family
from ipvsproxy.model.plan import Operation, Outcome, Verb
from ipvsproxy.model.real_servers import RealServerKey
from ipvsproxy.model.state import Observation
from ipvsproxy.model.steps import at_once
from ipvsproxy.model.virtual_servers import VirtualServer, VirtualServerKey, VirtualServerSettings
from ipvsproxy.reconcile.reconciler import Policy, Reconciler
from tests.kernel.ipvs.test_readings import Table
from tests.support import builders, fake_netlink

KEYS = tuple(builders.frontend(address, 80) for address in ("10.96.0.1", "10.96.0.2", "fd00:96::1", "fd00:96::2"))
SETTINGS = VirtualServerSettings("rr")
NUMBER = 33
GET_SERVICE, GET_DESTINATIONS = 4, 8
keys = st.sampled_from(KEYS)


def nested(kind: int, *fields: tuple[int, bytes]) -> bytes:
    """A netlink attribute that contains other netlink attributes."""
    return fake_netlink.attribute(kind, b"".join(fake_netlink.attribute(*field) for field in fields))


class Kernel:
    """A fake kernel that shows one IPVS table through both ``getsockopt`` and netlink.

    A reading fails for each family in ``failing``.
    """

    def __init__(self) -> None:
        self.older = Table()
        self.newer: dict[VirtualServerKey, dict[RealServerKey, tuple[int, int]]] = {}
        self.failing: set[Family] = set()

    def put(self, key: VirtualServerKey, weight: int) -> None:
        pod = builders.backend("10.244.0.1" if key.address.family is Family.IPV4 else "fd00:244::1")
        if key.address.family is Family.IPV4:
            self.older.content[key] = SETTINGS, {pod: (0, weight)}
        else:
            self.newer[key] = {pod: (0, weight)}

    def remove(self, key: VirtualServerKey) -> None:
        self.older.content.pop(key, None)
        self.newer.pop(key, None)

    @property
    def content(self) -> dict[VirtualServerKey, dict[RealServerKey, int]]:
        servers = {key: servers for key, (_, servers) in self.older.content.items()} | self.newer
        return {key: {one: weight for one, (_, weight) in of_key.items()} for key, of_key in servers.items()}

    def ask(self, asking: socket.socket, level: int, option: int, question: bytearray, action: str) -> int:
        if Family.IPV4 in self.failing:
            raise KernelError(action=action, errno=errno.ENOMEM)
        return self.older._ask(asking, level, option, question, action)

    def answer(self, sent: bytes) -> Iterator[bytes]:
        ((_, kind, flags, sequence, payload),) = fake_netlink.split(sent)
        if kind != NUMBER:  # this query asks for the number of the IPVS netlink family
            yield fake_netlink.message(sequence, bytes(4) + fake_netlink.attribute(1, struct.pack("=H", NUMBER)))
        elif Family.IPV6 in self.failing:
            yield fake_netlink.error(sequence, errno.ENOMEM)
        else:
            assert flags & netlink.DUMP
            parts = self._services() if payload[0] == GET_SERVICE else self._destinations(payload)
            for part in parts:
                yield fake_netlink.message(sequence, bytes(4) + part, kind=NUMBER)
            yield fake_netlink.done(sequence)

    def _services(self) -> Iterator[bytes]:
        for key in (*self.older.content, *self.newer):
            family = key.address.family
            yield nested(
                1,
                (1, struct.pack("=H", family)),
                (2, struct.pack("=H", key.protocol)),
                (3, bytes(key.address).ljust(16, b"\0")),
                (4, key.port.to_bytes(2, "big")),
                (6, b"rr\0"),
                (7, bytes(8)),
                (8, bytes(4)),
                (9, struct.pack("=I", 128) if family is Family.IPV6 else b"\xff" * 4),
            )

    def _destinations(self, payload: bytes) -> Iterator[bytes]:
        service = message.attributes(payload, *message.attributes(payload, 4, len(payload))[1])
        address = payload[slice(*service[3])]
        for key, servers in self.newer.items():
            if key.address == address:
                for server, (method, weight) in servers.items():
                    numbers = ((3, method), (4, weight), (5, 0), (6, 0), (7, 0), (8, 0))
                    yield nested(
                        2,
                        (11, struct.pack("=H", Family.IPV6)),
                        (1, bytes(server.address)),
                        (2, server.port.to_bytes(2, "big")),
                        *((number, struct.pack("=I", value)) for number, value in numbers),
                    )


class AnyHistory(stateful.RuleBasedStateMachine):
    """Other programs, and the program itself, may write between two parts of a reading."""

    @stateful.initialize()
    def start(self) -> None:
        self.kernel = Kernel()
        self.driver = IpvsDriver(lambda _: fake_netlink.FakeSocket(self.kernel.answer), ask=self.kernel.ask)
        self.reconciler = Reconciler(Policy())
        at_once(self.reconciler.observer.observing(Observation(virtual_servers=self.driver.observe()), 0))

    @stateful.rule(key=keys, weight=st.integers(0, 2))
    def others_write(self, key: VirtualServerKey, weight: int) -> None:
        self.kernel.put(key, weight)

    @stateful.rule(key=keys)
    def others_remove(self, key: VirtualServerKey) -> None:
        self.kernel.remove(key)

    @stateful.rule(key=keys, verb=st.sampled_from([Verb.ADD, Verb.REMOVE]), error=st.sampled_from(["", "", "refused"]))
    def the_program_writes(self, key: VirtualServerKey, verb: Verb, error: str) -> None:
        if not error and verb is Verb.REMOVE:
            self.kernel.remove(key)
        elif not error and key not in self.kernel.content:
            self.kernel.put(key, 1)
        self.driver._note(key, is_there=verb is Verb.ADD or bool(error))
        operation = Operation(verb, VirtualServer(key, SETTINGS))
        at_once(self.reconciler.settling([Outcome(operation, error, errno.EIO if error else 0)], 0))

    @stateful.rule(whole=st.booleans(), data=st.data())
    def poll(self, data: st.DataObject, *, whole: bool) -> None:
        for reading in self.driver.observe_changed(tuple(Family), whole=whole):
            at_once(self.reconciler.observer.observing(Observation(some_virtual_servers=reading), 0))
            self._disturb(data)

    @stateful.rule(data=st.data(), failing=st.sets(st.sampled_from(Family)))
    def failed_reading(self, data: st.DataObject, failing: set[Family]) -> None:
        self.kernel.failing = failing
        before = set(self.reconciler._tables.virtual_servers.observed)
        with contextlib.suppress(KernelError):
            self._audit(data)
            failing = set()
        self.kernel.failing = set()
        unread = {key for key in before if key.address.family in failing}
        assert unread <= set(self.reconciler._tables.virtual_servers.observed), "what could not be read is not gone"

    @stateful.rule(data=st.data())
    def disturbed_audit(self, data: st.DataObject) -> None:
        self._audit(data)

    @stateful.rule()
    def audit(self) -> None:
        self._audit(None)
        observed = self.reconciler._tables.virtual_servers.observed
        assert {key: dict(one.real_servers) for key, one in observed.items()} == self.kernel.content

    def _audit(self, data: st.DataObject | None) -> None:
        self.reconciler.observer.begin_audit()
        for reading in self.driver.observe_in_parts(tuple(Family)):
            at_once(self.reconciler.observer.observing(Observation(some_virtual_servers=reading), 0))
            if data is not None:
                self._disturb(data)
        at_once(self.reconciler.observer.observing(Observation(has_shown_virtual_servers=True), 0))

    def _disturb(self, data: st.DataObject) -> None:
        match data.draw(st.sampled_from(["", "", "others", "gone", "write"])):
            case "others":
                self.others_write(data.draw(keys), data.draw(st.integers(0, 2)))
            case "gone":
                self.others_remove(data.draw(keys))
            case "write":
                self.the_program_writes(data.draw(keys), data.draw(st.sampled_from([Verb.ADD, Verb.REMOVE])), "")

    def teardown(self) -> None:
        if hasattr(self, "driver"):
            self.audit()
            self.driver.close()


AnyHistory.TestCase.settings = hypothesis.settings(max_examples=100, stateful_step_count=20, deadline=None)
test_any_history = AnyHistory.TestCase
