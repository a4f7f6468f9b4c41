"""Notifies the loop of changes of our table of nftables by other programs."""

import asyncio

import structlog

from ipvsproxy.daemon.loop.engine import Engine
from ipvsproxy.kernel.nftables.changes import NftChanges

log: structlog.typing.FilteringBoundLogger = structlog.get_logger()


class RulesFollower:
    """Has the engine read rules and sets when another program changes our table. Rules of iptables have no notifications."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._watched: int | None = None

    def follow(self, changes: NftChanges | None) -> None:
        """Follow these changes from now on, and those of a former call no longer. Call it with None before they are closed."""
        loop = asyncio.get_running_loop()
        if self._watched is not None:
            loop.remove_reader(self._watched)
        self._watched = None if changes is None else changes.fileno()
        if changes is not None and self._watched is None:
            self._log_lost(changes)
        elif changes is not None and self._watched is not None:
            loop.add_reader(self._watched, self._read, changes)

    def _read(self, changes: NftChanges) -> None:
        watched = self._watched
        is_changed = changes.read()
        if changes.fileno() is None and watched is not None:
            asyncio.get_running_loop().remove_reader(watched)
            self._watched = None
            self._log_lost(changes)
        if is_changed:
            self._engine.rules_changed()

    def _log_lost(self, changes: NftChanges) -> None:
        log.warning("nftables_notifications_lost", error=changes.reason, hint="polls compare the generation of nf_tables instead")
