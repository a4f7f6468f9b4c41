"""Virtual servers, real servers and operations on them, used by several tests of the IPVS driver."""

import errno
import functools
import socket
from collections.abc import Mapping

from ipvsproxy.kernel.base.errors import KernelError
from ipvsproxy.kernel.ipvs import ipvs_driver as ipvs
from ipvsproxy.model.net import Family, Protocol, parse_address
from ipvsproxy.model.real_servers import RealServerKey
from ipvsproxy.model.virtual_servers import (
    ObservedVirtualServer,
    RealServers,
    VirtualServer,
    VirtualServerKey,
    VirtualServerSettings,
)
from tests.kernel.drivers import run

ipvsadm = functools.partial(run, "ipvsadm")


def server(
    address: str, port: int = 80, *, protocol: Protocol = Protocol.TCP, scheduler: str = "rr", flags: int = 0, timeout_s: int = 0
) -> VirtualServer:
    key = VirtualServerKey(protocol, parse_address(address), port)
    return VirtualServer(key, VirtualServerSettings(scheduler, flags, timeout_s))


def real(virtual_server: VirtualServer, address: str, port: int = 8080, weight: int = 1) -> RealServers:
    return RealServers.of(virtual_server.key, RealServerKey.of(parse_address(address), port), weight)


def changes(driver: ipvs.IpvsDriver, *, whole: bool = True) -> Mapping[VirtualServerKey, ObservedVirtualServer | None]:
    """The result of ``observe_changed`` for both IP families, with all of its parts in one dictionary."""
    return {key: observed for reading in driver.observe_changed(tuple(Family), whole=whole) for key, observed in reading.items()}


def refuse(_asking: socket.socket, _level: int, _option: int, _question: bytearray, action: str) -> int:
    """Raises the error of a kernel without the interface ``getsockopt``."""
    raise KernelError(action=action, errno=errno.ENOPROTOOPT)
