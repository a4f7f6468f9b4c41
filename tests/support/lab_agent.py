"""The agent process of the lab: it owns the network namespaces, runs servers in them and sends requests from them.

One process suffices, because a socket stays in the namespace in which it was created. The agent enters a namespace to create a
socket or to start a command, and waits for all sockets and commands in one event loop. A namespace exists as long as its
descriptor is open, so nothing is left when this process ends for any reason. The agent reads one JSON request per line from
standard input, and writes answers to standard output in the order of completion. The agent needs only the standard library.
"""

import asyncio
import contextlib
import ctypes
import dataclasses
import errno
import json
import math
import os
import socket
import struct
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, NamedTuple, cast

CLONE_NEWNET = 0x40000000
CLIENT_PORTS = range(44000, 65000)
"""The ports from which the agent chooses if a test chooses no client port. Tests that choose a client port use lower ports."""
_SCTP_SOCKOPT_BINDX_ADD = 100  # include/uapi/linux/sctp.h
BETWEEN_DATAGRAMS_S = 0.02
TURN_S = 0.1
"""The duration of one iteration of the event loop. Timeouts are measured in such iterations."""
PROTOCOLS = {
    "TCP": (socket.SOCK_STREAM, socket.IPPROTO_TCP),
    "UDP": (socket.SOCK_DGRAM, socket.IPPROTO_UDP),
    "SCTP": (socket.SOCK_STREAM, socket.IPPROTO_SCTP),
}
OUTCOMES = {
    errno.ECONNREFUSED: "refused",
    errno.ECONNRESET: "reset",
    errno.EHOSTUNREACH: "unreachable",
    errno.ENETUNREACH: "unreachable",
    errno.ETIMEDOUT: "timeout",
}


class Target(NamedTuple):
    """The target of a connection, and the network namespace of its client.

    ``src`` is the source address; None lets the kernel choose it, and ``address#port`` also sets the port.

    With SCTP, ``src`` may be several IPv4 addresses separated by commas; the client then uses all of them.
    """

    namespace: str
    protocol: str
    to: str
    port: int
    src: str | None


@dataclasses.dataclass
class Counts:
    """The requests of a load so far: the number of answers by outcome and by backend, the slowest answer, and all failures.

    Each failure has its time and its outcome.
    """

    outcomes: dict[str, int] = dataclasses.field(default_factory=dict)
    backends: dict[str, int] = dataclasses.field(default_factory=dict)
    slowest_s: float = 0.0
    failures: list[tuple[float, str]] = dataclasses.field(default_factory=list)


_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


class Namespaces:
    """The namespaces by name; ``node`` is the namespace in which this process was started."""

    def __init__(self) -> None:
        self._home = os.open("/proc/self/ns/net", os.O_RDONLY)
        self._descriptors: dict[str, int] = {"node": self._home}

    def create(self, name: str) -> str:
        """Create a namespace with its loopback device down; return a path that `ip link … netns` accepts."""
        _check(_libc.unshare(CLONE_NEWNET))
        try:
            self._descriptors[name] = os.open("/proc/self/ns/net", os.O_RDONLY)
        finally:
            _check(_libc.setns(self._home, CLONE_NEWNET))
        return f"/proc/{os.getpid()}/fd/{self._descriptors[name]}"

    @contextlib.contextmanager
    def inside(self, name: str) -> Iterator[None]:
        """Enter a namespace while the ``with`` block runs; the block must not await."""
        if name == "node":
            yield
            return
        _check(_libc.setns(self._descriptors[name], CLONE_NEWNET))
        try:
            yield
        finally:
            _check(_libc.setns(self._home, CLONE_NEWNET))

    def socket(self, name: str, protocol: str, address: str) -> socket.socket:
        """A non-blocking socket in this namespace."""
        kind, number = PROTOCOLS[protocol]
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with self.inside(name):
            made = socket.socket(family, kind, number)
        made.setblocking(False)
        return made


@contextlib.asynccontextmanager
async def _timeout(seconds: float) -> AsyncIterator[None]:
    """Like ``asyncio.timeout``, but counts iterations of the event loop instead of measuring time.

    While the machine runs other programs, the timeout advances by at most one iteration.
    """
    loop = asyncio.get_running_loop()

    async def end() -> None:
        for _ in range(math.ceil(seconds / TURN_S)):
            await asyncio.sleep(TURN_S)
        limit.reschedule(loop.time())

    async with asyncio.timeout(None) as limit:
        ending = loop.create_task(end())
        try:
            yield
        finally:
            ending.cancel()


def _answer(address: str, peer: str) -> bytes:
    return json.dumps({"backend": address, "source": peer}).encode() + b"\n"


class StreamServer(asyncio.Protocol):
    """Answers each line with the server's address and the peer's address, and keeps the connection open."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        assert self._transport is not None
        peer = self._transport.get_extra_info("peername")[0]
        self._transport.write(_answer(self._address, peer) * data.count(b"\n"))


class DatagramServer(asyncio.DatagramProtocol):
    """Answers each datagram with the server's address and the sender's address.

    A mute server counts datagrams and answers none.
    """

    def __init__(self, address: str) -> None:
        self._address = address
        self.is_mute = False
        self.heard = 0
        self.last_source = ""
        self._transport: asyncio.DatagramTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.DatagramTransport", transport)  # in Python 3.11, transport is no instance of this class

    def datagram_received(self, _data: bytes, addr: tuple[str | Any, int]) -> None:
        self.heard += 1
        self.last_source = addr[0]
        if self.is_mute:
            return
        assert self._transport is not None
        self._transport.sendto(_answer(self._address, addr[0]), addr)


class Agent:
    """Answers the requests of tests. Each public method implements the request of the same name.

    Each client gets the next port number; ``clients`` counts the clients of earlier agents on this kernel. If ports were random,
    IPVS or connection tracking might still know an old connection from the same port. An old connection would lead the client to
    an old endpoint, or would translate an answer that comes directly from a pod.
    """

    def __init__(self, clients: int) -> None:
        self._clients = clients
        self._namespaces = Namespaces()
        self._servers: dict[tuple[str, str, str, int], asyncio.BaseTransport | asyncio.Server] = {}
        self._datagram_servers: dict[tuple[str, str, int], DatagramServer] = {}
        self._held: dict[int, socket.socket] = {}
        self._senders: dict[int, tuple[asyncio.Task[None], socket.socket]] = {}
        self._sent: dict[int, dict[str, int]] = {}
        self._loads: list[tuple[asyncio.Task[dict[str, Any]], asyncio.Event]] = []

    async def create(self, namespace: str) -> str:
        """Create a namespace; return its path."""
        return self._namespaces.create(namespace)

    async def run(self, namespace: str, argv: list[str], stdin: str | None, within_s: float) -> list[Any]:
        """Run a command and wait for its end; return its status, output and error text."""
        with self._namespaces.inside(namespace):
            done = subprocess.run(  # noqa: ASYNC221 - see inside()
                argv, input=stdin, capture_output=True, text=True, check=False, timeout=within_s
            )
        return [done.returncode, done.stdout, done.stderr]

    async def sysctl(self, namespace: str, values: dict[str, str]) -> dict[str, str]:
        """Write existing kernel settings; return the values that the settings had before."""
        before = {}
        with self._namespaces.inside(namespace):
            for name, value in values.items():
                path = Path("/proc/sys") / name
                if path.exists():
                    before[name] = path.read_text().strip()
                    path.write_text(value)
        return before

    async def serve(self, namespace: str, protocol: str, address: str, port: int) -> None:
        """Serve on this address until :meth:`hush`."""
        loop = asyncio.get_running_loop()
        listening = self._namespaces.socket(namespace, protocol, address)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if listening.family == socket.AF_INET6:
            listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listening.bind((address, port))
        server: asyncio.BaseTransport | asyncio.Server
        if protocol == "UDP":
            server, datagrams = await loop.create_datagram_endpoint(lambda: DatagramServer(address), sock=listening)
            self._datagram_servers[namespace, address, port] = datagrams
        else:
            server = await loop.create_server(lambda: StreamServer(address), sock=listening, backlog=1024)
        self._servers[namespace, protocol, address, port] = server

    async def hush(self, namespace: str, protocol: str, address: str, port: int) -> None:
        """Stop serving new clients on this address, but keep open connections."""
        self._servers.pop((namespace, protocol, address, port)).close()

    async def mute(self, namespace: str, address: str, port: int) -> None:
        """Make the UDP server on an address stop answering."""
        self._datagram_servers[namespace, address, port].is_mute = True

    async def heard(self, namespace: str, address: str, port: int) -> list[Any]:
        """Return the number of datagrams that have arrived at this address, and the source of the last datagram."""
        server = self._datagram_servers[namespace, address, port]
        return [server.heard, server.last_source]

    async def start_sender(self, target: list[Any], size: int) -> int:
        """Send datagrams of this size from one socket, and wait for no answer.

        Returns the number that identifies this sender in :meth:`sent` and :meth:`stop_sender`.
        """
        client = await self._connect(Target(*target))
        self._senders[client.fileno()] = (asyncio.create_task(self._send(client, size)), client)
        self._sent[client.fileno()] = {}
        return client.fileno()

    async def _send(self, client: socket.socket, size: int) -> None:
        sent = self._sent[client.fileno()]
        while True:
            try:
                client.send(b"who\n".ljust(size))
                outcome = "sent"
            except OSError as error:
                outcome = OUTCOMES.get(error.errno or 0, f"error-{error.errno}")
            sent[outcome] = sent.get(outcome, 0) + 1
            await asyncio.sleep(BETWEEN_DATAGRAMS_S)

    async def sent(self, number: int) -> dict[str, int]:
        """Return how many datagrams a sender has sent (key ``sent``), and how many were refused with each error."""
        return self._sent[number]

    async def stop_sender(self, number: int) -> None:
        """Stop a sender."""
        task, client = self._senders.pop(number)
        task.cancel()
        client.close()

    async def clients(self) -> int:
        """Return how many client ports this agent and earlier agents have tried so far."""
        return self._clients

    def _bind(self, client: socket.socket, address: str) -> None:
        while True:
            port = CLIENT_PORTS[self._clients % len(CLIENT_PORTS)]
            self._clients += 1
            try:
                client.bind((address, port))
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
            else:
                return

    async def _connect(self, target: Target) -> socket.socket:
        client = self._namespaces.socket(target.namespace, target.protocol, target.to)
        try:
            first, *others = (target.src or "").split(",")
            address, _, own_port = first.partition("#")
            if own_port:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                client.bind((address, int(own_port)))
            else:
                self._bind(client, address)
            for other in others:
                port = client.getsockname()[1]
                name = struct.pack("=H", socket.AF_INET) + struct.pack("!H4s8x", port, socket.inet_aton(other))
                client.setsockopt(socket.IPPROTO_SCTP, _SCTP_SOCKOPT_BINDX_ADD, name)
            await asyncio.get_running_loop().sock_connect(client, (target.to, target.port))
        except BaseException:
            client.close()
            raise
        return client

    async def _ask(self, client: socket.socket) -> dict[str, str]:
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(client, b"who\n")
        line = await loop.sock_recv(client, 4096)
        if not line:
            raise ConnectionResetError(errno.ECONNRESET, "closed by the peer")
        answer: dict[str, str] = json.loads(line)
        return answer

    async def _attempt(self, target: Target, timeout_s: float) -> tuple[str, dict[str, str] | None]:
        try:
            async with _timeout(timeout_s):
                client = await self._connect(target)
                with contextlib.closing(client):
                    return "ok", await self._ask(client)
        except TimeoutError:
            return "timeout", None
        except OSError as error:
            return OUTCOMES.get(error.errno or 0, f"error-{error.errno}"), None

    async def probe(self, target: list[Any], count: int, timeout_s: float) -> dict[str, Any]:
        """Send this many requests at once, each from a new port; return the sorted outcomes, backends and sources."""
        attempts = await asyncio.gather(*(self._attempt(Target(*target), timeout_s) for _ in range(count)))
        answers = [answer for _, answer in attempts if answer is not None]
        return {
            "outcome": "+".join(sorted({outcome for outcome, _ in attempts})),
            "backends": sorted({answer["backend"] for answer in answers}),
            "sources": sorted({answer["source"] for answer in answers}),
        }

    async def hold(self, target: list[Any], timeout_s: float) -> list[Any]:
        """Open a connection and keep it; return its number and the first answer."""
        async with _timeout(timeout_s):
            client = await self._connect(Target(*target))
            self._held[client.fileno()] = client
            return [client.fileno(), await self._ask(client)]

    async def ask(self, number: int, timeout_s: float) -> dict[str, str]:
        """Send a request through an open connection."""
        async with _timeout(timeout_s):
            return await self._ask(self._held[number])

    async def release(self, number: int, *, abort: bool) -> None:
        """Close an open connection; if ``abort`` is true, reset the connection instead."""
        client = self._held.pop(number)
        if abort:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.close()

    async def start_load(self, target: list[Any], interval_s: float, timeout_s: float = 5.0) -> int:
        """Start to send requests, each on a new connection; return a number that identifies the load for :meth:`stop_load`."""
        stopping = asyncio.Event()
        self._loads.append((asyncio.create_task(self._load(Target(*target), interval_s, timeout_s, stopping)), stopping))
        return len(self._loads) - 1

    async def _load(self, target: Target, interval_s: float, timeout_s: float, stopping: asyncio.Event) -> dict[str, Any]:
        counts = Counts()
        while not stopping.is_set():
            await self._count(counts, target, timeout_s)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(interval_s):
                    await stopping.wait()
        return dataclasses.asdict(counts)

    async def _count(self, counts: Counts, target: Target, timeout_s: float) -> None:
        begin = time.monotonic()
        outcome, answer = await self._attempt(target, timeout_s)
        counts.slowest_s = max(counts.slowest_s, time.monotonic() - begin)
        counts.outcomes[outcome] = counts.outcomes.get(outcome, 0) + 1
        if answer is None:
            counts.failures.append((begin, outcome))
        else:
            counts.backends[answer["backend"]] = counts.backends.get(answer["backend"], 0) + 1

    async def repeat(self, target: list[Any], count: int, timeout_s: float) -> dict[str, Any]:
        """Send this many requests one after the other, each on a new connection; return the same as :meth:`stop_load`."""
        counts = Counts()
        for _ in range(count):
            await self._count(counts, Target(*target), timeout_s)
        return dataclasses.asdict(counts)

    async def stop_load(self, number: int) -> dict[str, Any]:
        """End a load after its last answer; return the number of answers by outcome and by backend, and the slowest answer."""
        task, stopping = self._loads[number]
        stopping.set()
        return await task


async def main() -> None:
    """Answer requests until standard input ends."""
    agent = Agent(int(sys.argv[1]))
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=1 << 24)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin.buffer)

    async def handle(number: int, operation: str, arguments: dict[str, Any]) -> None:
        try:
            reply = {"id": number, "result": await getattr(agent, operation)(**arguments)}
        except Exception as error:  # noqa: BLE001 - the caller gets the error
            reply = {"id": number, "error": f"{operation}: {type(error).__name__}: {error}"}
        sys.stdout.write(json.dumps(reply) + "\n")
        sys.stdout.flush()

    running: set[asyncio.Task[None]] = set()
    while line := await reader.readline():
        request = json.loads(line)
        task = asyncio.create_task(handle(request["id"], request["operation"], request["arguments"]))
        running.add(task)
        task.add_done_callback(running.discard)
