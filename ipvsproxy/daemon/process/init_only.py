"""``--init-only``: what needs a privileged container, so that the one that serves needs CAP_NET_ADMIN alone."""

import asyncio
import os

import structlog

from ipvsproxy.config.settings import Config
from ipvsproxy.daemon import wiring
from ipvsproxy.daemon.process import lifecycle, requirements
from ipvsproxy.daemon.process.signals import Signals
from ipvsproxy.model.plan import Operation, Verb

log: structlog.typing.FilteringBoundLogger = structlog.get_logger()


def run(config: Config) -> int:
    """Prepare this node; returns the exit status. Who is stopped before the end has failed: the node is not prepared."""
    signals = Signals(end=lambda _: os._exit(lifecycle.FAILED))
    try:
        return lifecycle.run(config, _prepare_until_stopped(config, signals))
    finally:
        signals.close()


async def _prepare_until_stopped(config: Config, signals: Signals) -> int:
    lifecycle.begin(config, signals)
    preparing, stopping = asyncio.create_task(_prepare(config)), asyncio.create_task(signals.stopping.wait())
    await asyncio.wait((preparing, stopping), return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if preparing.done():
        return preparing.result()
    preparing.cancel()
    log.error("stopped", hint="not all was prepared")
    return lifecycle.FAILED


async def _prepare(config: Config) -> int:
    """Load modules, see whether all is there, and write the kernel settings that are not as they should be."""
    async with requirements.running_kernel() as kernel:
        programs = await requirements.demand_usable_node(kernel)
        name, _ = await requirements.until_answered(
            lambda: kernel.call(lambda node: requirements.usable_scheduler(node, config.ipvs.scheduler))
        )
        wanted = wiring.choices(config, programs, name).settings.sysctls
        seen = await kernel.call(lambda node: node.observe((), (), [item.path for item in wanted]))
        values = seen.sysctls or {}
        missing = [item for item in wanted if not item.is_met_by(values.get(item.path, ""))]
        outcomes = await kernel.call(lambda node: node.apply([Operation(Verb.SET, item) for item in missing]))
    for item, outcome in zip(missing, outcomes, strict=True):
        if outcome.error:
            log.error("kernel_setting_not_written", error=outcome.error)
        else:
            log.info("kernel_setting_written", path=item.path, value=item.value, before=values.get(item.path, ""))
    failed = sum(bool(outcome.error) for outcome in outcomes)
    log.info("node_prepared", settings=len(wanted), written=len(outcomes) - failed, failed=failed)
    return lifecycle.FAILED if failed else 0
