"""The lab: a node with pods, a remote node with pods, and clients outside, all on one machine.

The *node* is the namespace of the caller. ipvsproxy and the tests program the kernel state of this namespace. Everything else is
in namespaces of the agent process (:mod:`tests.support.lab_agent`) and vanishes with it.

::

    client 172.18.0.50 172.18.1.51 ─┐                     ┌─ cni0 10.244.0.1/24 ─┬─ p1 10.244.0.11
           fc00:f853:ccd::50 ::51   ├─ eth0 172.18.0.2 ─ node   fd00:10:244::1/64 └─ p2 10.244.0.12
    remote 172.18.0.3 ──────────────┘  fc00:f853:ccd::2
      └─ pods 10.244.1.11, 10.244.1.12, fd00:10:244:1::11, ::12

On each of its addresses, each pod answers on port 8080 of TCP and SCTP, and on port 8053 of UDP. An answer contains the
answering address and the observed source address. The node itself answers on TCP port 22 of ``0.0.0.0`` and ``::``. This port
belongs to the host, and no virtual server may expose it.
"""

import contextlib
import dataclasses
import itertools
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

from tests.support import patience

POD_PORTS = (("TCP", 8080), ("SCTP", 8080), ("UDP", 8053))
COMMAND_WITHIN_S = patience.seconds(240.0)
"""The longest time for a command in a namespace. This time is shorter than the time limit of a test, so that an error names a
command that hangs."""

# In the lab, answers may take a shorter path, and the node would send ICMP redirects to pods on one link. The first settings
# accept such answers, and turn off the redirects.
_EVERYWHERE = {
    "net/ipv4/conf/all/rp_filter": "0",
    "net/ipv4/conf/default/rp_filter": "0",
    "net/ipv4/conf/all/send_redirects": "0",
    "net/ipv4/conf/default/send_redirects": "0",
    "net/ipv4/icmp_ratelimit": "0",  # a rate limit would drop the later of two refusals in one second, which looks like a timeout
    "net/ipv6/icmp/ratelimit": "0",
    "net/ipv4/icmp_ratemask": "0",  # exempts every ICMP type from the kernel's second limit, which is for the whole host
    "net/ipv6/icmp/ratemask": "\n",
    "net/ipv6/conf/default/accept_dad": "0",  # without duplicate address detection, an address can be used at once
    "net/ipv6/conf/all/disable_ipv6": "0",
    "net/ipv6/conf/default/disable_ipv6": "0",
}
_NODE = _EVERYWHERE | {
    "net/ipv4/ip_forward": "1",
    "net/ipv6/conf/all/forwarding": "1",
    "net/bridge/bridge-nf-call-iptables": "1",
    "net/bridge/bridge-nf-call-ip6tables": "1",
    # Direct return sets these to 1, and a program that ends leaves them so.
    "net/ipv4/vs/sloppy_tcp": "0",
    "net/ipv4/vs/sloppy_sctp": "0",
}

_AGENT = "import sys; sys.path.append(sys.argv.pop(1)); import asyncio, lab_agent; asyncio.run(lab_agent.main())"
"""Runs the agent by an import, because Python would compile a script again at each start."""


class LabError(Exception):
    """The lab could not carry out a request."""


@dataclasses.dataclass(frozen=True, slots=True)
class Probe:
    """A request.

    ``count`` copies of the request are sent at the same time. ``src`` is the source address; None lets the kernel choose it.
    """

    from_: str
    protocol: str
    to: str
    port: int
    src: str | None = None
    count: int = 1
    timeout_s: float = 1.5


class Result(NamedTuple):
    """The result of all attempts of one probe.

    ``outcome`` is ``ok``, ``refused``, ``timeout``, ``unreachable``, ``reset`` or ``error-`` and an errno; different outcomes of
    attempts are joined by ``+`` in alphabetical order.
    """

    outcome: str
    backends: tuple[str, ...]
    sources: tuple[str, ...]


class Load(NamedTuple):
    """The result of a load: the number of answers by outcome and by backend, the slowest answer, and all failures.

    A failure consists of the outcome and the time of the request. The time comes from ``time.monotonic``, a clock that all
    processes of a kernel share.
    """

    outcomes: Mapping[str, int]
    backends: Mapping[str, int]
    slowest_s: float
    failures: Sequence[tuple[float, str]] = ()

    @property
    def failed(self) -> int:
        """The number of requests that were not answered."""
        return sum(count for outcome, count in self.outcomes.items() if outcome != "ok")


class Connection:
    """A connection that stays open."""

    def __init__(self, lab: "Lab", number: int, first: Mapping[str, str]) -> None:
        self._lab = lab
        self._number = number
        self.backend = first["backend"]
        self.source = first["source"]

    def ask(self, timeout_s: float = 1.5) -> str:
        """Send another request; return the answering address.

        Raises:
            LabError: the connection is broken, or no answer comes.
        """
        answer: str = self._lab.call("ask", number=self._number, timeout_s=patience.seconds(timeout_s))["backend"]
        return answer

    def close(self) -> None:
        """Close the connection."""
        self._lab.call("release", number=self._number, abort=False)

    def abort(self) -> None:
        """Reset the connection: neither side then waits for late packets, and IPVS deletes it within seconds."""
        self._lab.call("release", number=self._number, abort=True)


class Lab:
    """A context manager that builds the lab at the beginning, and removes the lab at the end. Needs root."""

    _clients = 0
    """The number of clients that all labs of this process have had. Each client uses a different port."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._pods: list[str] = []
        self._paths: dict[str, str] = {}
        self._clean_up = contextlib.ExitStack()

    def __enter__(self) -> Self:
        agent = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _AGENT, str(Path(__file__).parent), str(Lab._clients)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._agent = agent
        with contextlib.ExitStack() as building:
            building.callback(agent.wait)
            building.enter_context(agent)
            building.callback(self._count_clients)
            building.callback(self._restore_node, self.call("sysctl", namespace="node", values=_NODE))
            self._build(building)
            self._clean_up = building.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._clean_up.close()

    def _count_clients(self) -> None:
        Lab._clients = self.call("clients")

    def _restore_node(self, before: Mapping[str, str]) -> None:
        self.call("sysctl", namespace="node", values=before)

    def _unlink(self) -> None:
        # The devices would also vanish with the agent, but not at once. The build may have failed before there were any devices.
        text = "".join(f"link delete {device}\n" for device in ("eth0", "cni0", *self._pods))
        self.call("run", namespace="node", argv=["ip", "-force", "-batch", "-"], stdin=text, within_s=COMMAND_WITHIN_S)

    def call(self, operation: str, **arguments: Any) -> Any:
        """Send one request to the agent.

        Raises:
            LabError: the agent failed.
        """
        return self._gather([(operation, arguments)])[0]

    def _gather(self, requests: Iterable[tuple[str, Mapping[str, Any]]]) -> list[Any]:
        assert self._agent.stdin is not None
        assert self._agent.stdout is not None
        waiting: dict[int, int] = {}
        for operation, arguments in requests:
            number = next(self._numbers)
            waiting[number] = len(waiting)
            self._agent.stdin.write(json.dumps({"id": number, "operation": operation, "arguments": arguments}) + "\n")
        self._agent.stdin.flush()
        results = [None] * len(waiting)
        errors = []
        for _ in waiting:
            line = self._agent.stdout.readline()
            if not line:
                raise LabError("the lab's agent has ended")
            reply = json.loads(line)
            errors += [reply["error"]] if "error" in reply else []
            results[waiting[reply["id"]]] = reply.get("result")
        if errors:
            raise LabError("; ".join(errors))
        return results

    def run(self, namespace: str, *argv: str, stdin: str | None = None) -> str:
        """Run a command in a namespace; return its output.

        Raises:
            LabError: the command failed (the message is its error text), or did not end within ``COMMAND_WITHIN_S``.
        """
        status, output, error = self.call("run", namespace=namespace, argv=argv, stdin=stdin, within_s=COMMAND_WITHIN_S)
        if status != 0:
            raise LabError(f"{' '.join(argv)} in {namespace}: status {status}: {error.strip()}")
        text: str = output
        return text

    def ip(self, namespace: str, *commands: str) -> None:
        """Run several commands of iproute2 in one process."""
        self.run(namespace, "ip", "-batch", "-", stdin="\n".join(commands) + "\n")

    def _namespace(self, name: str) -> str:
        path: str = self.call("create", namespace=name)
        self.call("sysctl", namespace=name, values=_EVERYWHERE)
        self._paths[name] = path
        return path

    def path(self, namespace: str) -> str:
        """The path by which another process enters a namespace, while the lab runs."""
        return self._paths[namespace]

    def add_node(self, name: str, number: str) -> str:
        """Add a node without pods, with the addresses 172.18.0.<number> and fc00:f853:ccd::<number>; return its path."""
        path = self._namespace(name)
        self.ip("client", f"link add {name} type veth peer name eth0 netns {path}", f"link set {name} master lan up")
        self._connect(name, f"172.18.0.{number}/16", f"fc00:f853:ccd::{number}/64")
        self.ip(
            name,
            "route add 10.244.0.0/24 via 172.18.0.2",
            "route add 10.244.1.0/24 via 172.18.0.3",
            "route add fd00:10:244::/64 via fc00:f853:ccd::2",
            "route add fd00:10:244:1::/64 via fc00:f853:ccd::3",
        )
        return path

    def _connect(self, namespace: str, *addresses: str, routers: Iterable[str] = ()) -> None:
        """Give these addresses to eth0 of a namespace; the namespace gets default routes through these routers."""
        self.ip(
            namespace,
            "link set lo up",
            *(f"address add {address} dev eth0{' nodad' if ':' in address else ''}" for address in addresses),
            "link set eth0 up",
            *(f"route add default via {router}" for router in routers),
        )

    def _build(self, building: contextlib.ExitStack) -> None:
        client, remote = self._namespace("client"), self._namespace("remote")
        building.callback(self._unlink)
        # A program under test does not remove its virtual servers when it ends. If a virtual server remained, IPVS would keep the
        # connections of an earlier lab. Because of such a connection, IPVS would translate a pod's answer to a new client that
        # has the address and port of the earlier client.
        self.run("node", "ipvsadm", "--clear")
        self.ip(
            "node",
            "link set lo up",
            f"link add eth0 type veth peer name node netns {client}",
            "address add 172.18.0.2/16 dev eth0",
            "address add fc00:f853:ccd::2/64 dev eth0 nodad",
            "link set eth0 up",
            "link add cni0 type bridge",
            "address add 10.244.0.1/24 dev cni0",
            "address add fd00:10:244::1/64 dev cni0 nodad",
            "link set cni0 up",
            "route add 10.244.1.0/24 via 172.18.0.3",
            "route add fd00:10:244:1::/64 via fc00:f853:ccd::3",
        )
        self.ip(
            "client",
            "link set lo up",
            "link add lan type bridge",
            f"link add remote type veth peer name eth0 netns {remote}",
            "link set node master lan up",
            "link set remote master lan up",
            *(f"address add {address}/16 dev lan" for address in ("172.18.0.50", "172.18.1.51")),
            *(f"address add fc00:f853:ccd::{number}/64 dev lan nodad" for number in ("50", "51")),
            "link set lan up",
            "route add default via 172.18.0.2",
            "route add default via fc00:f853:ccd::2",
        )
        self._connect("remote", "172.18.0.3/16", "fc00:f853:ccd::3/64", routers=("172.18.0.2", "fc00:f853:ccd::2"))
        for number in ("11", "12"):
            self.ip("remote", f"address add 10.244.1.{number}/32 dev lo", f"address add fd00:10:244:1::{number}/128 dev lo nodad")
            self._serve_pod("remote", f"10.244.1.{number}", f"fd00:10:244:1::{number}")
        for address in ("0.0.0.0", "::"):
            self.serve("node", "TCP", address, 22)
        self.add_pod("p1", "11")
        self.add_pod("p2", "12")
        self._wait_until_reachable()

    def _wait_until_reachable(self) -> None:
        """Wait until packets pass: a new device transmits only after a moment, and first resolves the neighbour's address."""
        probes = [Probe("host", "TCP", f"10.244.{node}.{pod}", 8080) for node, pod in itertools.product((0, 1), (11, 12))]
        probes += [Probe("host", "TCP", f"fd00:10:244:{node}::{pod}", 8080) for node, pod in itertools.product((0, 1), (11, 12))]
        probes += [Probe("client", "TCP", address, 22) for address in ("172.18.0.2", "fc00:f853:ccd::2")]
        deadline = time.monotonic() + patience.seconds(60)
        while any(result.outcome != "ok" for result in self.probe_all(probes)):
            if time.monotonic() > deadline:
                raise LabError(f"the lab is not connected: {list(zip(probes, self.probe_all(probes), strict=True))}")

    def add_pod(self, name: str, number: str) -> None:
        """Start a pod on the node. The pod has the addresses 10.244.0.<number> and fd00:10:244::<number>."""
        path = self._namespace(name)
        self._pods.append(name)
        # Hairpin mode is on, as with hairpinMode of the bridge CNI plugin: if a pod sends packets to itself through a Service,
        # the packets leave the bridge by the port on which they arrived.
        self.ip(
            "node",
            f"link add {name} type veth peer name eth0 netns {path}",
            f"link set {name} master cni0 up",
            f"link set {name} type bridge_slave hairpin on",
        )
        routers = ("10.244.0.1", "fd00:10:244::1")
        self._connect(name, f"10.244.0.{number}/24", f"fd00:10:244::{number}/64", routers=routers)
        self._serve_pod(name, f"10.244.0.{number}", f"fd00:10:244::{number}")

    def _serve_pod(self, namespace: str, *addresses: str) -> None:
        for address, (protocol, port) in itertools.product(addresses, POD_PORTS):
            if protocol == "SCTP" and not Path("/proc/sys/net/sctp").exists():
                continue
            self.serve(namespace, protocol, address, port)

    def serve(self, namespace: str, protocol: str, address: str, port: int) -> None:
        """Start a server on an address of a namespace."""
        self.call("serve", namespace=namespace, protocol=protocol, address=address, port=port)

    def hush(self, namespace: str, protocol: str, address: str, port: int) -> None:
        """Stop the server on an address."""
        self.call("hush", namespace=namespace, protocol=protocol, address=address, port=port)

    def probe(self, from_: str, protocol: str, to: str, port: int, **options: Any) -> Result:
        """Run one probe; :class:`Probe` describes the options."""
        return self.probe_all([Probe(from_, protocol, to, port, **options)])[0]

    def probe_all(self, probes: Iterable[Probe]) -> list[Result]:
        """Run several probes at the same time; return the results in the order of the probes."""
        results = self._gather(
            (
                "probe",
                {
                    "target": _target(probe.from_, probe.protocol, probe.to, probe.port, probe.src),
                    "count": probe.count,
                    "timeout_s": patience.seconds(probe.timeout_s),
                },
            )
            for probe in probes
        )
        return [Result(one["outcome"], tuple(one["backends"]), tuple(one["sources"])) for one in results]

    def open(
        self, from_: str, protocol: str, to: str, port: int, *, src: str | None = None, timeout_s: float = 1.5
    ) -> Connection:
        """Open a connection, and leave it open until the caller closes it.

        ``src`` is an address, and may end with a port, as in ``10.244.0.12#40000``.

        Raises:
            LabError: no answer.
        """
        number, first = self.call("hold", target=_target(from_, protocol, to, port, src), timeout_s=patience.seconds(timeout_s))
        return Connection(self, number, first)

    def repeat(self, from_: str, protocol: str, to: str, port: int, *, count: int) -> Load:
        """Send this many requests one after the other, each on a new connection."""
        target = _target(from_, protocol, to, port, None)
        return Load(**self.call("repeat", target=target, count=count, timeout_s=patience.seconds(5.0)))

    @contextlib.contextmanager
    def load(
        self,
        from_: str,
        protocol: str,
        to: str,
        port: int,
        *,
        src: str | None = None,
        interval_s: float = 0.01,
        timeout_s: float = 5.0,
    ) -> Iterator[list[Load]]:
        """Send requests while the ``with`` block runs. After the block, the yielded list contains the result."""
        target = _target(from_, protocol, to, port, src)
        number = self.call("start_load", target=target, interval_s=interval_s, timeout_s=timeout_s)
        results: list[Load] = []
        try:
            yield results
        finally:
            results.append(Load(**self.call("stop_load", number=number)))

    def mute(self, namespace: str, address: str, port: int) -> None:
        """Make the UDP server on an address stop answering; the server still counts the datagrams that arrive."""
        self.call("mute", namespace=namespace, address=address, port=port)

    def heard(self, namespace: str, address: str, port: int) -> tuple[int, str]:
        """How many datagrams have arrived at the UDP server on an address, and the source of the last datagram."""
        count, source = self.call("heard", namespace=namespace, address=address, port=port)
        return count, source

    @contextlib.contextmanager
    def sending(self, from_: str, to: str, port: int, *, size: int = 4) -> Iterator[Callable[[], Mapping[str, int]]]:
        """Send datagrams of ``size`` bytes from one socket while the block runs, without waiting for answers.

        Yields a function that returns two numbers: how many datagrams were sent, and how many the kernel refused because
        an earlier datagram caused an error.
        """
        number = self.call("start_sender", target=_target(from_, "UDP", to, port, None), size=size)
        try:
            yield lambda: dict(self.call("sent", number=number))
        finally:
            self.call("stop_sender", number=number)


def _target(from_: str, protocol: str, to: str, port: int, src: str | None) -> list[Any]:
    return ["node" if from_ == "host" else from_, protocol, to, port, src]
