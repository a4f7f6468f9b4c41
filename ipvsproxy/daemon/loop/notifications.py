"""Notifies the event loop when other programs change addresses, interfaces, local routes or our nftables table."""

import asyncio
from collections.abc import Collection

import structlog

from ipvsproxy.daemon.loop.engine import Engine
from ipvsproxy.kernel.base.errors import KernelError
from ipvsproxy.kernel.network import notify
from ipvsproxy.kernel.nftables.changes import NftChanges


async def follow_interfaces(engine: Engine, own_ports: Collection[int], route_protocol: int) -> None:
    """Make the engine read the kernel when another program changes addresses, interfaces or our local routes.

    ``own_ports`` are the netlink port ids of the sockets with which this process changes addresses and routes; more ports may be
    added while this function runs. ``route_protocol`` is the protocol number of our local routes.

    Raises:
        KernelError: the kernel does not send notifications, or has stopped sending notifications.
    """
    loop = asyncio.get_running_loop()
    broken: asyncio.Future[None] = loop.create_future()

    with notify.ChangeListener(own_ports=own_ports, route_protocol=route_protocol) as listener:

        def read() -> None:
            try:
                for change in listener.read():
                    (engine.kernel_changed if change is notify.Change.OURS else engine.interfaces_changed)()
            except KernelError as error:
                loop.remove_reader(listener.fileno())  # otherwise the event loop would call this function again at once
                broken.set_exception(error)

        loop.add_reader(listener.fileno(), read)
        try:
            await broken
        finally:
            loop.remove_reader(listener.fileno())


log: structlog.typing.FilteringBoundLogger = structlog.get_logger()


async def follow_rules(engine: Engine, changes: NftChanges | None) -> None:
    """Makes the engine read rules and sets when another program changes our nftables table.

    Ends when the notification socket is lost.
    """
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
