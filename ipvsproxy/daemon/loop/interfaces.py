"""Notifies the loop of addresses, interfaces and local routes that other programs change."""

import asyncio
from collections.abc import Collection, Iterable
from typing import assert_never

from ipvsproxy.daemon.loop.engine import Engine
from ipvsproxy.kernel.base.errors import KernelError
from ipvsproxy.kernel.network import notify
from ipvsproxy.model.kernel import DEVICE


async def follow(engine: Engine, own_ports: Collection[int], route_protocol: int) -> None:
    """Have the engine read the kernel when another program changes addresses, interfaces or local routes of ours.

    ``own_ports`` are the port ids of the sockets by which this process changes addresses and routes; it may grow meanwhile.
    ``route_protocol`` is the protocol number of our routes.

    Raises:
        KernelError: the kernel sends no notifications, or has stopped sending them.
    """
    loop = asyncio.get_running_loop()
    broken: asyncio.Future[None] = loop.create_future()

    with notify.ChangeListener(own_ports=own_ports, route_protocol=route_protocol) as listener:

        def read() -> None:
            try:
                changes = listener.read()
            except KernelError as error:
                loop.remove_reader(listener.fileno())  # else it would be called again at once
                broken.set_exception(error)
            else:
                _pass_on(engine, changes)

        loop.add_reader(listener.fileno(), read)
        try:
            await broken
        finally:
            loop.remove_reader(listener.fileno())


def _pass_on(engine: Engine, changes: Iterable[notify.Change]) -> None:
    for change in changes:
        match change:
            case notify.AddressAppeared(address=item) | notify.AddressVanished(address=item):
                if item.interface == DEVICE:
                    engine.kernel_changed()
                else:
                    engine.interfaces_changed()
            case notify.DeviceVanished() | notify.RoutesChanged() | notify.Overrun():
                engine.kernel_changed()
            case never:
                assert_never(never)
