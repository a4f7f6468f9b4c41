"""``ipvsproxy --dry-run`` runs as a shadow of kube-proxy, compares desired and observed state, and never changes the kernel.

Rule 1: a shadow applies no operation, loads no module and opens no health-check port, because kube-proxy does these things.
Rule 2: kube-proxy needs time to program a change, so the shadow waits for ``PATIENCE_S`` after a change before it reads the
kernel.
Rule 3: the shadow does not listen on kube-proxy's ports, so that the shadow and kube-proxy can use the same configuration.
"""

import asyncio
import dataclasses
import functools
import time
from collections import Counter

from ipvsproxy.commands import inspection
from ipvsproxy.config.settings import Config, ListenAddress
from ipvsproxy.daemon.base.cannot_start import CannotStartError
from ipvsproxy.daemon.base.log import log
from ipvsproxy.daemon.base.timing import comes_within
from ipvsproxy.daemon.http import paths
from ipvsproxy.daemon.http.health import Status
from ipvsproxy.daemon.loop.summary import SyncSummary
from ipvsproxy.daemon.metrics.figures import Sources
from ipvsproxy.daemon.metrics.metrics import Metrics
from ipvsproxy.daemon.process import lifecycle
from ipvsproxy.daemon.sources import source as sources
from ipvsproxy.kernel.base.errors import KernelError
from ipvsproxy.reconcile import survey
from ipvsproxy.store.objects import Changes

PATIENCE_S = 5.0
"""The pause in seconds before a comparison; the pause begins when objects change, or when the audit interval ends."""
OTHER_PORTS = {10256: 10356, 10249: 10349}
"""Maps each default port of kube-proxy to the port that replaces it in a dry run. Any other port is the operator's choice, and is
not replaced."""
SHOWN = 5
"""The largest number of new differences that a comparison logs, each in a separate line."""


@dataclasses.dataclass(eq=False)
class DryRun:
    """Repeatedly compares desired and observed state, and reports differences in the log, in metrics and in the health status."""

    node: inspection.Inspected
    status: Status
    metrics: Metrics

    def __post_init__(self) -> None:
        self.comparison = inspection.Comparison(self.node)
        self._changed = asyncio.Event()
        self._known: frozenset[tuple[str, str]] = frozenset()

    def changed(self) -> None:
        """The source calls this method after it has changed objects in the store."""
        self.status.node = self.comparison.store.node(self.node.config.node_name)
        self._changed.set()

    async def run(self) -> None:
        """Compare for ever."""
        while True:
            await self.compare()
            await comes_within(self.node.config.engine.audit_interval_s, self._changed.wait())
            await asyncio.sleep(PATIENCE_S)

    async def compare(self) -> None:
        """Compare once.

        If the kernel cannot be read, or if the first list of a kind of API objects is in doubt, the method logs the problem and
        keeps the previous figures.
        """
        self._changed.clear()
        if self.comparison.store.may_lack_all:
            log.warning("first_list_not_believed", hint="the list is empty; nothing is compared before a second list confirms it")
            return
        began_s = time.monotonic()
        self.status.syncing(began_s)
        try:
            changes = await self.comparison.read()
        except (inspection.UnknownStateError, KernelError) as error:
            log.error("kernel_unreadable", error=str(error))
            return
        self._report(changes, time.monotonic() - began_s)

    def _report(self, changes: Changes, duration_s: float) -> None:
        differences = self.comparison.differences()
        counts = Counter(one.kind for one in differences)
        new = [one for one in differences if (one.kind, one.name) not in self._known]
        for one in new[:SHOWN]:
            owner = str(one.owner) if one.owner else ""
            log.warning("differs", kind=one.kind, object=one.name, service=owner, desired=one.desired, observed=one.observed)
        self._known = frozenset((one.kind, one.name) for one in differences)
        log.info(
            "dry_run_looked",
            services=len(changes.services),
            differences=len(differences),
            new=len(new),
            duration_s=round(duration_s, 4),
            **counts,
        )
        self.metrics.would_differ({kind: counts[kind] for kind in survey.COMPARED_KINDS})
        states, view = self.comparison.survey.states, self.comparison.view
        self.status.synced(SyncSummary(changes=changes, states=states, view=view, observed_s=duration_s))


def run(config: Config) -> int:
    """Run as a shadow of kube-proxy until a signal stops the process; returns the exit status."""
    return lifecycle.run(config, functools.partial(_serve, config))


async def _serve(config: Config, signals: lifecycle.Signals) -> int:
    metrics = Metrics()
    source = await sources.make(config, metrics.requested)
    try:
        async with inspection.readable_kernel(config) as kernel:
            node = await inspection.inspect(config, kernel, source)
            await _serve_on(node, metrics, signals)
    except KernelError as error:
        raise CannotStartError(error) from error
    log.info("stopped", hint="nothing was programmed")
    return 0


async def _serve_on(node: inspection.Inspected, metrics: Metrics, signals: lifecycle.Signals) -> None:
    config, source = node.config, node.source
    status = Status(
        families=node.choices.translation.families,
        sync_period_s=config.engine.audit_interval_s + PATIENCE_S,
        missing=lambda: node.store.missing,
    )
    dry_run = DryRun(node, status, metrics)
    survey = dry_run.comparison.survey
    metrics.show(Sources(survey=survey, store=node.store, status=status, watches=lambda: source.statuses))
    log.info("dry_run_starting", node=config.node_name, hint="nothing will be programmed")

    async def follow() -> None:
        async with inspection.following(source, node.store, dry_run.changed, sources.log_silence) as following:
            status.listed(time.monotonic())
            await asyncio.gather(following, dry_run.run())

    listen = dataclasses.replace(
        config.servers, health=beside_kube_proxy(config.servers.health), metrics=beside_kube_proxy(config.servers.metrics)
    )
    for name, address in (("health", listen.health), ("metrics", listen.metrics)):
        if address:
            log.info("serves", name=name, address=str(address))
    health = paths.health_server(lambda: config, status, metrics.health_answered)
    servers = paths.servers(listen, health, paths.MetricsPaths(lambda: config, metrics.expose).answer)
    await lifecycle.until_stopped(signals.stopping, status, [follow()], servers)


def beside_kube_proxy(address: ListenAddress | None) -> ListenAddress | None:
    """The address at which a server listens in a dry run."""
    return address and address._replace(port=OTHER_PORTS.get(address.port, address.port))
