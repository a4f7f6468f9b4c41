"""A node with an in-memory kernel, for tests of the inspecting commands."""

import asyncio

from ipvsproxy.commands.inspection import Inspected
from ipvsproxy.config.settings import Choices, EngineSettings
from ipvsproxy.daemon.sources.directory import DirectorySource
from ipvsproxy.kernel.thread import KernelThread
from ipvsproxy.model.service import ApiObject, ObjectKind
from ipvsproxy.reconcile.reconciler import Policy
from ipvsproxy.store.objects import Store
from ipvsproxy.translate.translation_settings import Settings
from tests.config import loading
from tests.support import builders, memory_node
from tests.support.fake_kernel import FakeKernel

WEB = (
    builders.node(),
    builders.service("web", builders.service_port(80, node_port=30080)),
    builders.endpoint_slice(builders.endpoint("10.244.0.1"), builders.endpoint("10.244.1.1", builders.OTHER_NODE)),
)
"""A node, and a Service with a cluster IP and a node port. The Service has one endpoint on this node, and one endpoint on another
node."""


def inspected(kernel: FakeKernel, *objects: ApiObject, translation: Settings | None = None) -> Inspected:
    """The node after its source has listed these objects."""
    store = Store(started_s=0, here=builders.THIS_NODE)
    store.deliver([memory_node.put(item) for item in objects], 0)
    store.deliver([memory_node.listed(kind, objects) for kind in ObjectKind], 0)
    return Inspected(
        source=DirectorySource("/nowhere"),
        config=loading.from_flags(f"--hostname-override={builders.THIS_NODE}"),
        store=store,
        kernel=KernelThread(memory_node.InlineExecutor(), kernel),
        choices=Choices(
            EngineSettings(
                node_name=builders.THIS_NODE,
                min_interval_s=0,
                audit_interval_s=memory_node.AUDIT_INTERVAL_S,
                drift_check_interval_s=memory_node.DRIFT_CHECK_INTERVAL_S,
                sysctls=memory_node.SYSCTLS,
                timeouts=memory_node.TIMEOUTS,
            ),
            translation or Settings(),
            Policy(),
        ),
    )


async def synced_kernel(*objects: ApiObject, translation: Settings | None = None) -> FakeKernel:
    """A kernel in which all of these objects have been programmed."""
    node = memory_node.MemoryNode(settings=translation)
    node.begin_with(*objects)
    async with node.running():
        await asyncio.wait_for(node.watcher.until(lambda: bool(node.watcher.summaries)), 60)
    node.kernel.forget()
    return node.kernel
