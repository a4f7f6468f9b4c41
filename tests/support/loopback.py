"""A loopback address and free ports, for servers whose port must be known before they listen."""

import contextlib
import os
import socket

HOST = f"127.{64 + (os.getpid() >> 16)}.{os.getpid() >> 8 & 255}.{os.getpid() & 255}"
"""Only this process listens on this address or connects from it, so a port that was found free stays free until it is used.

The address contains the process ID, which has at most 22 bits.
"""


def free_ports(count: int) -> list[int]:
    """``count`` free ports of ``HOST``, all different."""
    with contextlib.ExitStack() as held:
        probes = [held.enter_context(socket.create_server((HOST, 0))) for _ in range(count)]
        return [int(probe.getsockname()[1]) for probe in probes]
