"""What this node should hold, next to what it holds. Nothing is ever changed.

Rule: everything is decided by the modules that decide for ``run``; here they are only asked, and nobody applies an operation.
"""

import asyncio
import time
from collections.abc import Callable, Collection

from ipvsproxy.daemon.engine import EngineSettings
from ipvsproxy.daemon.store import Changes, Store
from ipvsproxy.kernel import iptables_rule
from ipvsproxy.kernel.errors import KernelError
from ipvsproxy.kernel.node import NodeKernel
from ipvsproxy.kernel.thread import KernelThread
from ipvsproxy.model.kernel import InterfaceAddress
from ipvsproxy.model.service import ServiceName
from ipvsproxy.reconcile import compare
from ipvsproxy.reconcile.compare import Difference
from ipvsproxy.reconcile.reconciler import Policy, Reconciler
from ipvsproxy.translate import skeleton, state
from ipvsproxy.translate import view as views

_SERVICES_AT_ONCE = 100
"""How many Services are translated without a pause for others in the loop: a few milliseconds."""


class CannotLookError(Exception):
    """The kernel could not be read; one sentence for each part that could not."""

    def __init__(self, *reasons: object) -> None:
        self.reasons = tuple(map(str, reasons))
        super().__init__("; ".join(self.reasons))


class Shadow:
    """The desired and the observed side of this node, as of the last ``look``."""

    def __init__(
        self,
        *,
        settings: EngineSettings,
        translation: views.Settings,
        policy: Policy,
        store: Store,
        kernel: KernelThread[NodeKernel],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.settings = settings
        self.translation = translation
        self.store = store
        self.kernel = kernel
        self.reconciler = Reconciler(policy)
        self.view = views.view_node(translation, settings.node_name, None, ())
        self._clock = clock
        self.reconciler.claims.put_node(translation.families, settings.sysctls, settings.timeouts)

    async def look(self) -> Changes:
        """Read the kernel, and take up what has changed in the store; returns the latter.

        Raises:
            CannotLookError: a part of the kernel could not be read, so nothing can be said.
        """
        claims, target = self.reconciler.claims, self.kernel.target
        names = [ip_set.name for ip_set in claims.sets.desired]
        seen = await self.kernel.call(target.observe, names, self.translation.families, list(claims.sysctls.desired))
        if seen.errors:
            raise CannotLookError(*seen.errors)
        try:
            timeouts = await self.kernel.call(target.read_timeouts)
        except KernelError as error:
            raise CannotLookError(error) from error
        view = self._update_view(seen.interface_addresses or ())
        changes = self.store.take()
        await self._translate(changes.services, view)
        refused = claims.refused()
        for family in self.translation.families:
            occupied = compare.occupied_in_the_end(claims, family)
            claims.put_skeleton(skeleton.build_skeleton(family, self.translation, view, occupied, refused))
        self.reconciler.observer.observe(seen, self._clock())
        compare.note_timeouts(claims, timeouts)
        return changes

    def differences(self) -> list[Difference]:
        """What differed when the kernel was last read."""
        return list(compare.compare(self.reconciler, iptables_rule.render))

    def _update_view(self, addresses: Collection[InterfaceAddress]) -> views.NodeView:
        node = self.store.node(self.settings.node_name)
        seen = views.view_node(self.translation, self.settings.node_name, node, addresses)
        if seen != self.view:
            self.view = seen
            self.store.touch_all(self._clock())
        return seen

    async def _translate(self, names: Collection[ServiceName], view: views.NodeView) -> None:
        for number, name in enumerate(names, 1):
            service = self.store.services.get(name)
            slices = self.store.slices_of(name)
            self.reconciler.put(name, state.translate(service, slices, view, self.translation) if service else None)
            if number % _SERVICES_AT_ONCE == 0:
                await asyncio.sleep(0)
