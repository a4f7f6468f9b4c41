"""``--init-only`` does the work that needs a privileged container, so that the serving container needs only CAP_NET_ADMIN."""

import asyncio
import os

import structlog

from ipvsproxy.config.settings import Config
from ipvsproxy.daemon.process import lifecycle, requirements
from ipvsproxy.daemon.process.lifecycle import Signals
from ipvsproxy.kernel import host
from ipvsproxy.model.plan import Operation, Verb

log: structlog.typing.FilteringBoundLogger = structlog.get_logger()


def run(config: Config) -> int:
    """Prepare this node; returns the exit status. A stop before the end is a failure: the node is not prepared."""
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
    log.error("stopped", hint="the node is not fully prepared")
    return lifecycle.FAILED


async def _prepare(config: Config) -> int:
    """Load modules, check all requirements, and write the kernel settings that differ from the desired ones."""
    async with requirements.running_kernel(config.drivers) as kernel:
        await requirements.demand_usable_node(kernel, config.translation.detect_local)
        await requirements.until_answered(
            lambda: kernel.call(lambda node: requirements.usable_scheduler(node, config.translation.scheduler))
        )
        desired = config.sysctls(host.kernel_version(), host.processor_count())
        observation = await kernel.call(lambda node: node.observe((), (), [item.path for item in desired]))
        values = observation.sysctls or {}
        pending = [item for item in desired if not item.is_met_by(values.get(item.path, ""))]
        outcomes = await kernel.call(lambda node: node.apply([Operation(Verb.SET, item) for item in pending]))
    for item, outcome in zip(pending, outcomes, strict=True):
        if outcome.error:
            log.error("kernel_setting_not_written", error=outcome.error)
        else:
            log.info("kernel_setting_written", path=item.path, value=item.value, before=values.get(item.path, ""))
    failed = sum(bool(outcome.error) for outcome in outcomes)
    log.info("node_prepared", settings=len(desired), written=len(outcomes) - failed, failed=failed)
    return lifecycle.FAILED if failed else 0
