"""Connects to Services as soon as they accept connections, in a separate process whose work does not count as ipvsproxy's work.

    python -m scripts.benchmark.connections

The command reads one address per line from its standard input. For each address, it prints the time at which the connection was
made, and the duration of the last attempt, both in seconds. All pods of the workload share one separate namespace, where one
socket listens on every pod address. The namespace of the pods exists as long as this process.
"""

import asyncio
import contextlib
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from typing import NamedTuple

from scripts.benchmark import program, workload
from tests.support import lab_agent

PAUSE_S = 0.001
"""The pause in seconds between two attempts to connect. A measured time can be too long by up to this pause."""
SERVICE_PORT, POD_PORT = 80, 8080
NODE, PODS = "10.64.0.1", "10.64.0.2"
MOST = 4096
"""The backlog of the pods' listening socket: the kernel completes up to this many connections, although no process accepts them.
The kernel's usual limit for a backlog (``somaxconn``) has the same value."""
_IP = ("ip", "-batch", "-")


class Connected(NamedTuple):
    """``at_s`` is a time of ``time.perf_counter``, which all processes share."""

    at_s: float
    took_s: float


class Client(NamedTuple):
    """The other process."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def connect(self, address: str) -> Connected:
        """Have the other process connect to this address; the process tries again until an attempt succeeds.

        Raises:
            RuntimeError: the process has ended.
        """
        self.writer.write(f"{address}\n".encode())
        return Connected(*map(float, await self.answer()))

    async def answer(self) -> list[bytes]:
        """The words of the next line from the process.

        Raises:
            RuntimeError: the process has ended.
        """
        words = (await self.reader.readline()).split()
        if not words:
            raise RuntimeError("the process that connects to Services has ended")
        return words


@contextlib.asynccontextmanager
async def client() -> AsyncIterator[Client]:
    """Start the process, which is ready when the block begins, and end it after the block."""
    ours, theirs = socket.socketpair()
    with theirs:
        command = (sys.executable, "-m", __name__)
        process = await asyncio.create_subprocess_exec(*command, stdin=theirs.fileno(), stdout=theirs.fileno())
    reader, writer = await asyncio.open_connection(sock=ours)
    try:
        started = Client(reader, writer)
        await started.answer()
        yield started
    finally:
        writer.close()
        process.kill()
        await process.wait()


def main() -> None:
    """Make the namespace of the pods, then connect to each address that is read from standard input."""
    pods, (network, *_) = lab_agent.Namespaces(), program.CLUSTER_CIDR.split(",")
    ip(
        f"link add pods type veth peer name eth0 netns {pods.create('pods')}",
        f"address add {NODE}/30 dev pods",
        "link set pods up",
        f"route add {network} via {PODS}",
    )
    with pods.inside("pods"):
        ip("link set lo up", f"address add {PODS}/30 dev eth0", "link set eth0 up", f"route add local {network} dev lo")
        listening = socket.create_server(("", POD_PORT), backlog=MOST)
    with listening:
        # The first connection takes longer than later connections, because a new device transmits only after a moment, and
        # because the kernel must resolve the neighbour's address.
        connect(workload.pod_address(0), POD_PORT)
        print("ready", flush=True)
        for line in sys.stdin:
            print(*connect(line.strip(), SERVICE_PORT), flush=True)


def connect(address: str, port: int) -> Connected:
    """Try until this address accepts a connection."""
    while True:
        began_s = time.perf_counter()
        with contextlib.suppress(OSError), socket.socket() as trying:
            trying.connect((address, port))
            now_s = time.perf_counter()
            return Connected(now_s, now_s - began_s)
        time.sleep(PAUSE_S)


def ip(*commands: str) -> None:
    """Run commands of ``ip`` in the namespace of this thread."""
    subprocess.run(_IP, input="\n".join(commands), text=True, check=True)


if __name__ == "__main__":
    main()
