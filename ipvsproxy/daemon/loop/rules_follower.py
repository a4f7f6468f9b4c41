"""Has the loop read rules and sets when another program changes our table of nftables. iptables has no notifications."""

import asyncio

import structlog

from ipvsproxy.daemon.loop.engine import Engine
from ipvsproxy.kernel.nftables.changes import NftChanges

log: structlog.typing.FilteringBoundLogger = structlog.get_logger()


async def follow(engine: Engine, changes: NftChanges | None) -> None:
    """Follows these changes until their socket is lost."""
    if changes is None:
        return
    loop = asyncio.get_running_loop()
    changed = asyncio.Event()
    while (watched := changes.fileno()) is not None:
        loop.add_reader(watched, changed.set)
        try:
            await changed.wait()
        finally:
            loop.remove_reader(watched)
        changed.clear()
        if changes.read():
            engine.rules_changed()
    log.warning("nftables_notifications_lost", error=changes.reason, hint="polls compare the generation of nf_tables instead")
