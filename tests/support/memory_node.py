"""A node with an in-memory kernel. Store, loop and kernel thread are those of the real program; events come from the test.

``from_scratch`` computes the desired state of such a node independently, without a loop and without earlier events.
"""

import asyncio
import concurrent.futures
import contextlib
import copy
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping
from typing import Any, Self

from ipvsproxy.config.settings import Choices, EngineSettings
from ipvsproxy.daemon.loop import summary as summaries
from ipvsproxy.daemon.loop.engine import Engine
from ipvsproxy.daemon.loop.reader import POLL_INTERVAL_S
from ipvsproxy.daemon.loop.summary import SyncSummary
from ipvsproxy.kernel.thread import KernelThread
from ipvsproxy.model.kernel import Sysctl, Timeouts
from ipvsproxy.model.service import (
    ApiObject,
    EndpointSlice,
    Event,
    Gone,
    Listed,
    Node,
    ObjectKey,
    ObjectKind,
    Put,
    Service,
    ServiceName,
)
from ipvsproxy.model.steps import at_once
from ipvsproxy.reconcile.reconciler import Policy, Reconciler
from ipvsproxy.store.guard import Guard
from ipvsproxy.store.objects import Store
from ipvsproxy.translate import skeleton, view
from ipvsproxy.translate.translation_settings import Settings
from tests.support import builders
from tests.support.fake_kernel import FakeKernel

NODE_ADDRESS_V6 = "fd00:168::10"
SYSCTLS = (Sysctl("net/ipv4/vs/conntrack", "1"), Sysctl("net/ipv4/ip_forward", "1"))
TIMEOUTS = Timeouts(600, 0, 0)
AUDIT_INTERVAL_S = 30.0
DRIFT_CHECK_INTERVAL_S = POLL_INTERVAL_S
"""The interval of drift checks equals the interval of polls, so that every poll reads the whole kernel state."""
QUIET_S = 0.001
"""The virtual time within which the loop carries out all operations that are possible now."""

KINDS: Mapping[type, ObjectKind] = {
    Service: ObjectKind.SERVICE,
    EndpointSlice: ObjectKind.ENDPOINT_SLICE,
    Node: ObjectKind.NODE,
}


class InlineExecutor(concurrent.futures.Executor):
    """Runs a call immediately and without a thread, so that the duration of the call is not random.

    Like the result of a thread, the result arrives in a later iteration of the event loop.
    """

    def submit(self, function: Callable[..., Any], /, *arguments: Any, **named: Any) -> concurrent.futures.Future[Any]:
        future = concurrent.futures.Future[Any]()
        try:
            future.set_result(function(*arguments, **named))
        except BaseException as error:  # noqa: BLE001 - the caller gets the error
            future.set_exception(error)
        return future


class Watcher(summaries.Watcher):
    """Records the notifications of the event loop.

    ``queued_s`` and ``syncing_s`` are the times at which the loop called ``queued`` and ``syncing``.
    """

    def __init__(self) -> None:
        self.queued_s: list[float] = []
        self.syncing_s: list[float] = []
        self.summaries: list[SyncSummary] = []
        self._synced = asyncio.Event()

    def queued(self, now: float) -> None:
        self.queued_s.append(now)

    def syncing(self, now: float) -> None:
        self.syncing_s.append(now)

    def synced(self, summary: SyncSummary) -> None:
        self.summaries.append(summary)
        self._synced.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until the condition holds. The condition is checked at once, and again after each sync."""
        while not condition():
            self._synced.clear()
            await self._synced.wait()


class MemoryNode:
    """One process with an in-memory kernel. By default, ``executor`` runs calls without a thread."""

    def __init__(
        self,
        kernel: FakeKernel | None = None,
        *,
        settings: Settings | None = None,
        min_interval_s: float = 0,
        audit_interval_s: float = AUDIT_INTERVAL_S,
        drift_check_interval_s: float = DRIFT_CHECK_INTERVAL_S,
        drain_deadline_s: float = 0,
        guard_percent: int = 0,
        sysctls: tuple[Sysctl, ...] = (),
        executor: concurrent.futures.Executor | None = None,
        watcher: Watcher | None = None,
    ) -> None:
        self.kernel = kernel or new_kernel()
        self.settings = settings or Settings()
        self.store = Store(started_s=0, guard=Guard(guard_percent), here=builders.THIS_NODE)
        self.watcher = watcher or Watcher()
        self.executor = executor or InlineExecutor()
        thread = KernelThread(self.executor, self.kernel)
        self.engine = Engine(
            choices=Choices(
                EngineSettings(
                    node_name=builders.THIS_NODE,
                    min_interval_s=min_interval_s,
                    audit_interval_s=audit_interval_s,
                    drift_check_interval_s=drift_check_interval_s,
                    sysctls=(*SYSCTLS, *sysctls),
                    timeouts=TIMEOUTS,
                ),
                self.settings,
                Policy(drain_deadline_s=drain_deadline_s, families=self.settings.families),
            ),
            store=self.store,
            kernel=thread,
            watcher=self.watcher,
            clock=self._now,
            processor_clock=self._now,
        )

    def _now(self) -> float:
        try:
            return asyncio.get_running_loop().time()
        except RuntimeError:  # no event loop runs yet, because a node may be created before its test starts
            return 0.0

    def deliver(self, events: Iterable[Event]) -> None:
        """Deliver events in the same way as a source."""
        now = self._now()
        self.store.deliver(events, now)
        self.engine.changed(now)

    def put(self, *objects: ApiObject) -> None:
        """Add or change objects."""
        self.deliver([put(item) for item in objects])

    def remove(self, *objects: ApiObject) -> None:
        """Delete objects."""
        self.deliver([Gone(KINDS[type(item)], key_of(item)) for item in objects])

    def begin_with(self, *objects: ApiObject) -> None:
        """Deliver the first list of each kind; together, the lists contain these objects."""
        self.deliver([put(item) for item in objects])
        self.deliver([listed(kind, objects) for kind in ObjectKind])

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run the loop while the block runs; if an error ended the loop, the error is raised at the end of the block."""
        task = asyncio.create_task(self.engine.run())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait([task])
        if not task.cancelled():
            task.result()

    @contextlib.asynccontextmanager
    async def serving(self, *objects: ApiObject, after_s: float = 0) -> AsyncIterator[Self]:
        """Run the loop while the ``with`` block runs.

        The block begins when the first lists have been programmed and ``after_s`` seconds have passed.

        The lists have these objects and, if there is no Node among them, this node's Node.
        """
        async with self.running():
            self.begin_with(*objects, *(() if any(isinstance(item, Node) for item in objects) else (builders.node(),)))
            await self.quiet(after_s)
            yield self

    async def quiet(self, after_s: float = 0) -> None:
        """Let this time pass, then wait until nothing remains to be done."""
        await asyncio.sleep(after_s + QUIET_S)

    @property
    def done(self) -> list[str]:
        """The operations since the kernel's record was last cleared, one line each."""
        return list(map(str, self.kernel.applied))


def put(item: ApiObject) -> Put:
    """The event that reports an object as new or changed."""
    return Put(KINDS[type(item)], key_of(item), item)


def listed(kind: ObjectKind, objects: Collection[ApiObject]) -> Listed:
    """The event that ends a list of objects of this kind. The event has the keys of those ``objects`` that are of this kind."""
    return Listed(kind, frozenset(key_of(item) for item in objects if KINDS[type(item)] is kind))


def key_of(item: ApiObject) -> ObjectKey:
    """The key of an object."""
    return ObjectKey("", item.name) if isinstance(item, Node) else item.name


def new_kernel() -> FakeKernel:
    """The kernel of a node whose eth0 has an address of each family."""
    kernel = FakeKernel()
    kernel.host_addresses = [
        builders.interface_address("lo", "127.0.0.1"),
        builders.interface_address("eth0", builders.NODE_ADDRESS),
        builders.interface_address("eth0", NODE_ADDRESS_V6),
    ]
    kernel.sysctls = {setting.path: "0" for setting in SYSCTLS}
    return kernel


def contents(kernel: FakeKernel) -> Mapping[str, object]:
    """A copy of all kernel objects that may belong to ipvsproxy."""
    return {
        "virtual_servers": {key: (one.settings, dict(one.real_servers)) for key, one in kernel.virtual_servers.items()},
        "sets": {name: (present.type, present.family, frozenset(present.entries)) for name, present in kernel.sets.items()},
        "chains": {family: dict(chains) for family, chains in kernel.chains.items()},
        "jumps": {family: frozenset(jumps) for family, jumps in kernel.jumps.items()},
        **{name: copy.copy(getattr(kernel, name)) for name in ("device", "addresses", "routes", "sysctls", "timeouts")},
    }


def from_scratch(store: Store, settings: Settings, like: FakeKernel) -> Mapping[str, object]:
    """The desired kernel contents for the objects of a store, on a node with the interface addresses of the kernel ``like``."""
    kernel = new_kernel()
    kernel.host_addresses = list(like.host_addresses)
    api_servers = builders.api_servers(store.slices_of(ServiceName("default", "kubernetes")))
    node_view = view.view_node(settings, builders.THIS_NODE, store.node(builders.THIS_NODE), kernel.host_addresses, api_servers)
    reconciler = Reconciler(Policy())
    reconciler.put_node(settings.families, SYSCTLS, TIMEOUTS)
    at_once(reconciler.observer.observing(kernel.observe(), 0))
    for name, service in store.services.items():
        at_once(reconciler.putting(name, builders.translate(service, store.slices_of(name), node_view, settings)))
    while True:
        for family in settings.families:
            refused = reconciler.survey.refused()
            occupied, routed = reconciler.survey.occupied(family), reconciler.survey.routed(refused)
            rules = skeleton.build_skeleton(family, settings, node_view, occupied, refused, routed=routed)
            reconciler.put_skeleton(rules)
        operations = at_once(reconciler.planning(0))
        if not operations:
            assert reconciler.pending == 0
            return contents(kernel)
        report = at_once(reconciler.settling(kernel.apply(operations), 0))
        assert not report.failed, report
