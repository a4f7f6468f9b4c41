"""The desired state of this node, and its observed state. Nothing is ever changed.

Rule: as in ``run``, the ``Translator`` makes the desired state, and the reconciler's tables have the differences. No operation is
applied.
"""

import functools
import time
from collections.abc import Callable

from ipvsproxy.config.settings import EngineSettings
from ipvsproxy.daemon.base.timing import in_slices
from ipvsproxy.daemon.loop.kernel import ReadableKernel
from ipvsproxy.daemon.loop.translator import Translator
from ipvsproxy.kernel.base.errors import KernelError
from ipvsproxy.kernel.iptables import rule as iptables_rule
from ipvsproxy.kernel.thread import KernelThread
from ipvsproxy.model.net import Address
from ipvsproxy.reconcile.kinds.kind import Difference
from ipvsproxy.reconcile.reconciler import Policy, Reconciler
from ipvsproxy.store.objects import Changes, Store
from ipvsproxy.translate import view as views
from ipvsproxy.translate.settings import Settings


def _why_missing(scheduler: str, kernel: ReadableKernel) -> str:
    return kernel.why_missing(scheduler)


class UnknownStateError(Exception):
    """Desired or observed state is unknown; ``reasons`` has a sentence for each unknown part."""

    def __init__(self, *reasons: object) -> None:
        self.reasons = tuple(map(str, reasons))
        super().__init__("; ".join(self.reasons))


class Comparison:
    """The desired and the observed state of this node at the last ``read``. ``view`` exists after the first one."""

    view: views.NodeView

    def __init__(
        self,
        *,
        settings: EngineSettings,
        translation: Settings,
        policy: Policy,
        store: Store,
        kernel: KernelThread[ReadableKernel],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.settings = settings
        self.store = store
        self.kernel = kernel
        self._reconciler = Reconciler(policy)
        self.survey = self._reconciler.survey
        self._clock = clock
        self._translator = Translator(
            node_name=settings.node_name,
            settings=translation,
            sysctls=settings.sysctls,
            timeouts=settings.timeouts,
            store=store,
            reconciler=self._reconciler,
        )
        self._translator.put_node()
        self._carried: frozenset[Address] = frozenset()

    @property
    def translation(self) -> Settings:
        """The operator's choices for Services, and what the kernel has for them."""
        return self._translator.settings

    async def read(self) -> Changes:
        """Read the kernel, and take the changes out of the store; returns the changes.

        Raises:
            UnknownStateError: a part of the kernel could not be read, or a first list is doubted.
        """
        if self.store.may_lack_all:
            raise UnknownStateError("a first list of the API server is empty; it does not count before a second list confirms it")
        sets, sysctls = self._reconciler.subjects()
        observed = await self.kernel.call(lambda kernel: kernel.observe(sets, self.translation.families, sysctls))
        if observed.errors:
            raise UnknownStateError(*observed.errors)
        try:
            timeouts = await self.kernel.call(lambda kernel: kernel.read_timeouts())
        except KernelError as error:
            raise UnknownStateError(error) from error
        now = self._clock()
        self._carried = observed.local.union(one.address for one in observed.interface_addresses or ())
        self.view = self._translator.update_view(observed.interface_addresses or (), now)
        for name in sorted(self._translator.unknown_schedulers):
            reason = await self.kernel.call(functools.partial(_why_missing, name))
            self._translator.note_scheduler(name, reason, now)
        changes = self.store.take()
        await in_slices(self._translator.putting(changes.services), self._clock)
        self._reconciler.observe(observed, self._clock())
        self._reconciler.tend(self._clock())
        self._translator.put_skeletons(settled=True)
        self._reconciler.note_timeouts(timeouts)
        return self._translator.with_refusals(changes)

    def is_carried(self, address: Address) -> bool:
        """Whether an interface of this node had this address at the last ``read``."""
        return address in self._carried

    @property
    def may_linger(self) -> bool:
        """Whether a stale virtual server has an address that this node lacks.

        ``run`` keeps the node ports of a lost address for a while.
        """
        return not all(self.is_carried(key.address) for key in self.survey.stale())

    def differences(self) -> list[Difference]:
        """The differences at the last ``read``."""
        return list(self.survey.differences(iptables_rule.render))
