"""The program as a separate process on a real kernel with an API server: it starts, stops, and starts again.

If the program cannot start, it ends with status 2 and a sentence, and the kernel has none of our objects.
"""

import asyncio
import contextlib
import dataclasses
import fcntl
import functools
import json
import pathlib
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest

from ipvsproxy.model.net import Family
from tests.support import api_server, golden_state, lab_agent, left_rules, mains, patience
from tests.support.api_server import ApiServer
from tests.support.api_store import ENDPOINT_SLICES, NODES, SERVICES, Object
from tests.support.program import Program, python_environment, run_in_turn

pytestmark = [pytest.mark.kernel, pytest.mark.usefixtures("network_namespace")]

SYNCED_WITHIN_S = patience.seconds(60.0)
ANSWERED_WITHIN_S = patience.seconds(5.0)
ENDED_WITHIN_S = patience.seconds(60.0)
LARGE = 20_000
"""The external IPs of a very large Service."""
FLAGS = (
    "--hostname-override=node-a",
    "--cluster-cidr=10.244.0.0/16,fd00:244::/64",
    "--conntrack-max-per-core=0",  # this limit is writable only in the host's own network namespace
)
XTABLES_LOCK = pathlib.Path("/run/xtables.lock")
BETWEEN_LOOKS_S = 0.5
BETWEEN_LINES_S = 0.05
IPVS = "--proxy-mode=ipvs"

State = Mapping[str, Any]


@dataclasses.dataclass
class Running:
    """A running program, its log, and the number of log lines that have been read."""

    process: Program
    path: pathlib.Path
    read: int = 0

    @property
    def log(self) -> list[str]:
        """The log lines so far."""
        return self.path.read_text().splitlines()

    async def read_until(self, text: str) -> str:
        """The next log line that contains this text."""
        async with asyncio.timeout(SYNCED_WITHIN_S):
            while True:
                is_alive, lines = self.process.is_alive, self.log
                found = next((number for number in range(self.read, len(lines)) if text in lines[number]), None)
                if found is not None:
                    self.read = found + 1
                    return lines[found]
                assert is_alive, f"ended without {text!r}:\n{self.process.log_tail()}"
                await asyncio.sleep(BETWEEN_LINES_S)

    async def read_until_changed(self) -> None:
        """Wait for a sync with an operation. An API server's address that is found late causes a sync without an operation."""
        while " operations=0 " in await self.read_until("event=synced"):
            pass

    async def stop(self) -> int:
        """Stop the program within the time limit; returns its exit status."""
        await asyncio.to_thread(self.process.__exit__, None, None, None)
        assert self.process.status is not None
        return self.process.status


@contextlib.asynccontextmanager
async def running(*flags: str) -> AsyncIterator[Running]:
    with tempfile.TemporaryDirectory() as directory:
        path = pathlib.Path(directory, "log")
        started = Program(None, path, *FLAGS, *flags).__enter__()
        try:
            yield Running(started, path)
        finally:
            started.kill()


async def run(*command: str) -> tuple[int, str, str]:
    """Run a command to its end; returns its exit status, its standard output and its standard error."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        *command, stdin=asyncio.subprocess.DEVNULL, stdout=pipe, stderr=pipe, env=python_environment()
    )
    output, error = await asyncio.wait_for(process.communicate(), SYNCED_WITHIN_S)
    assert process.returncode is not None
    return process.returncode, output.decode(), error.decode()


def service(name: str, number: int) -> Object:
    addresses = [f"10.96.0.{number}", f"fd00:96::{number}"]
    ports = [{"name": "http", "port": 80, "nodePort": 30000 + number}, {"name": "dns", "port": 53, "protocol": "UDP"}]
    return {
        "metadata": {"name": name},
        "spec": {"type": "NodePort", "clusterIP": addresses[0], "clusterIPs": addresses, "ports": ports},
    }


def without_udp(item: Object) -> Object:
    return item | {"spec": item["spec"] | {"ports": item["spec"]["ports"][:1]}}


def endpoint_slice(name: str, *addresses: str) -> Object:
    return {
        "metadata": {"name": f"{name}-1", "labels": {"kubernetes.io/service-name": name}},
        "addressType": "IPv4",
        "endpoints": [{"addresses": [address], "nodeName": "node-a"} for address in addresses],
        "ports": [{"name": "http", "port": 8080}, {"name": "dns", "port": 5353, "protocol": "UDP"}],
    }


NODE: Object = {"metadata": {"name": "node-a"}, "status": {"addresses": [{"type": "InternalIP", "address": "127.0.0.1"}]}}


@pytest.fixture
async def server() -> AsyncIterator[ApiServer]:
    """An API server that has the Node and three Services."""
    async with ApiServer() as server:
        server.put(NODES, NODE)
        for number in range(1, 4):
            server.put(SERVICES, service(f"web-{number}", number))
            server.put(ENDPOINT_SLICES, endpoint_slice(f"web-{number}", f"10.244.0.{number}", f"10.244.1.{number}"))
        yield server


@pytest.fixture
def kubeconfig(server: ApiServer, tmp_path: pathlib.Path) -> str:
    """The flag that names the kubeconfig of the API server."""
    return f"--kubeconfig={api_server.write_kubeconfig(tmp_path / 'kubeconfig', server.url)}"


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
    """The objects of the API server as manifest files, for tests that work with any source.

    With manifest files, the program starts faster than with an API server, because it loads no client library.
    """
    folder = tmp_path / "manifests"
    folder.mkdir()
    show(folder, "v1", "Node", NODE)
    for number in range(1, 4):
        show(folder, "v1", "Service", service(f"web-{number}", number))
        slices = endpoint_slice(f"web-{number}", f"10.244.0.{number}", f"10.244.1.{number}")
        show(folder, "discovery.k8s.io/v1", "EndpointSlice", slices)
    return folder


def show(folder: pathlib.Path, version: str, kind: str, item: Object) -> None:
    (folder / f"{kind}-{item['metadata']['name']}.json").write_text(json.dumps({"apiVersion": version, "kind": kind} | item))


def read_state() -> State:
    return golden_state.read_state()


def virtual_servers() -> State:
    """Read only the virtual servers, because other sections need more external programs, which are slow on user-mode Linux."""
    rows: State = golden_state.read_state(("virtual_servers",))["virtual_servers"]
    return rows


def rules() -> State:
    chains: State = golden_state.read_state(("iptables",))["iptables"]
    return chains


@pytest.mark.distribution
async def test_the_program_applies_changes_of_the_api_server_and_a_restart_keeps_all_kernel_objects_without_an_operation(
    server: ApiServer, kubeconfig: str
) -> None:
    # Only the Service that is deleted has a UDP port, because each start reads the conntrack flows of UDP ports.
    for number in (2, 3):
        server.put(SERVICES, without_udp(service(f"web-{number}", number)))
    async with running(kubeconfig) as program:
        await program.read_until("event=synced")
        first = golden_state.read_state(("virtual_servers",))
        assert {row for row in first["virtual_servers"] if "10.96.0." in row} == {
            *(f"TCP 10.96.0.{number}:80" for number in (1, 2, 3)),
            "UDP 10.96.0.1:53",
        }
        assert len(first["real_servers"]) == (3 + 1) * 2
        server.put(SERVICES, without_udp(service("new", 9)))
        await program.read_until_changed()
        server.delete(SERVICES, "web-1")
        await program.read_until_changed()
        held = read_state()
        assert {row for row in held["virtual_servers"] if "10.96.0." in row} == {
            f"TCP 10.96.0.{number}:80" for number in (2, 3, 9)
        }
        assert await program.stop() == 0
        assert "the kernel stays as it is" in program.log[-1]
    assert read_state() == held
    server.delete(ENDPOINT_SLICES, "web-1-1")
    async with running(kubeconfig) as program:
        line = await program.read_until("event=synced")
        assert " services=3 operations=0 failed=0 pending=0 " in line
        assert await program.stop() == 0
    assert read_state() == held


@contextlib.asynccontextmanager
async def elsewhere(server: ApiServer, address: str) -> AsyncIterator[str]:
    """Serve the API server at this address of another host; returns the server's URL.

    Only packets that leave this host reach the server.
    """
    namespaces = lab_agent.Namespaces()
    other = namespaces.create("other")
    ip("link", "add", "uplink", "type", "veth", "peer", "name", "uplink", "netns", other)
    ip("address", "add", "192.0.2.1/24", "dev", "uplink")
    ip("link", "set", "uplink", "up")
    with namespaces.inside("other"):
        ip("address", "add", f"{address}/24", "dev", "uplink")
        ip("link", "set", "uplink", "up")
    listening = namespaces.socket("other", "TCP", address)
    listening.bind((address, 6443))
    port = int(server.url.rpartition(":")[2])
    forwarding = await asyncio.start_server(functools.partial(forward, port), sock=listening)
    try:
        yield f"http://{address}:6443"
    finally:
        forwarding.close()


def ip(*arguments: str) -> None:
    subprocess.run(("ip", *arguments), check=True)


async def forward(port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Forward all bytes to a port of this host, and all bytes of its answers back."""
    back, to = await asyncio.open_connection("127.0.0.1", port)

    async def copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await source.read(1 << 16):
                target.write(data)
                await target.drain()
        target.close()

    await asyncio.gather(copy(reader, to), copy(back, writer))


@pytest.mark.parametrize("binding", ["addresses", pytest.param("routes", marks=patience.THOROUGH)])
async def test_a_start_removes_a_service_address_that_hides_the_api_server(
    server: ApiServer, folder: pathlib.Path, tmp_path: pathlib.Path, binding: str
) -> None:
    address, flag = "192.0.2.99", f"--ipvs-vip-binding={binding}"
    greedy = service("greedy", 9)
    greedy["spec"] |= {"externalIPs": [address, "203.0.113.9"], "ports": [{"name": "http", "port": 6443}]}
    show(folder, "v1", "Service", greedy)
    show(folder, "discovery.k8s.io/v1", "EndpointSlice", endpoint_slice("greedy", "10.244.0.9"))
    async with elsewhere(server, address) as url:
        async with running(f"--manifests={folder}", flag) as program:
            await program.read_until("event=synced")
            assert await program.stop() == 0
        held = virtual_servers()
        assert {f"TCP {address}:6443", "TCP 203.0.113.9:6443"} <= set(held)
        server.put(SERVICES, greedy)
        server.put(ENDPOINT_SLICES, endpoint_slice("greedy", "10.244.0.9"))
        kubeconfig = api_server.write_kubeconfig(tmp_path / "elsewhere", url)
        async with running(f"--kubeconfig={kubeconfig}", flag) as program:
            line = await program.read_until("event=api_server_address_given_up")
            assert f"TCP {address}:6443" in line
            await program.read_until("event=synced")
            assert set(virtual_servers()) == set(held) - {f"TCP {address}:6443"}
            await until(lambda: any(event.get("reason") == "ApiServerHidden" for event in server.events))
            assert await program.stop() == 0


def has_no_lock() -> bool:
    """Whether the iptables variant of this kernel needs no lock, because it uses transactions of the kernel."""
    program = shutil.which("iptables")
    return (
        program is not None
        and "nf_tables" in subprocess.run((program, "--version"), capture_output=True, text=True, check=True).stdout
    )


LOCKS = pytest.mark.skipif(has_no_lock(), reason="iptables-nft takes no lock")


@contextlib.contextmanager
def locked_tables() -> Iterator[Callable[[], None]]:
    """Hold the iptables lock, as another program would, until the returned function is called."""
    with XTABLES_LOCK.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield lambda: fcntl.flock(file, fcntl.LOCK_UN)


async def until(condition: Callable[[], bool]) -> None:
    """Wait until the condition holds."""
    async with asyncio.timeout(SYNCED_WITHIN_S):
        while not condition():  # noqa: ASYNC110 - the kernel has no event for this
            await asyncio.sleep(BETWEEN_LOOKS_S)


@LOCKS
async def test_a_new_service_is_served_while_the_iptables_lock_is_held_and_its_rules_are_written_afterwards(
    folder: pathlib.Path,
) -> None:
    new = service("new", 9)
    new["spec"]["externalIPs"] = ["198.51.100.9"]  # one rule depends on the first external IP
    async with running(f"--manifests={folder}") as program:
        await program.read_until("event=synced")
        with locked_tables() as free:
            show(folder, "v1", "Service", new)
            await until(lambda: "TCP 198.51.100.9:80" in virtual_servers())
            await until(lambda: "198.51.100.9" in str(golden_state.read_state(("addresses",))))
            assert "KUBE-EXTERNAL-IP" not in str(rules()["v4/nat/KUBE-SERVICES"]), "the lock is held"
            await until(lambda: any("still running" in line for line in program.log))
            free()
        await until(lambda: "KUBE-EXTERNAL-IP" in str(rules()["v4/nat/KUBE-SERVICES"]))


async def test_a_restart_removes_node_ports_on_a_lost_address_but_no_foreign_virtual_servers(
    folder: pathlib.Path,
) -> None:
    gone, kept = "203.0.113.9", "192.0.2.1"
    addresses = [f"address add {address}/24 dev wide" for address in (gone, kept)]
    for words in ("link add wide type dummy", *addresses, "link set wide up"):
        assert (await run("ip", *words.split()))[0] == 0
    others = ("TCP 203.0.113.8:30001", "TCP 203.0.113.7:30001")
    async with running(f"--manifests={folder}") as program:
        await program.read_until("event=synced")
        program.process.kill()
    ports = {f"TCP {gone}:3000{number}" for number in range(1, 4)} | {f"UDP {gone}:3000{number}" for number in range(1, 4)}
    assert ports & set(virtual_servers())
    assert (await run("ip", "address", "del", f"{gone}/24", "dev", "wide"))[0] == 0
    for row, real_server in zip(others, ("10.9.9.9:80", "192.0.2.7:30001"), strict=True):
        address = row.partition(" ")[2]
        assert (await run("ipvsadm", "-A", "-t", address, "-s", "rr"))[0] == 0
        assert (await run("ipvsadm", "-a", "-t", address, "-r", real_server, "-m"))[0] == 0
    async with running(f"--manifests={folder}") as program:
        await program.read_until("event=synced")
        rows = set(virtual_servers())
        assert not ports & rows
        assert set(others) <= rows
        assert any(row.startswith(f"TCP {kept}:30001") for row in rows)
        assert await program.stop() == 0
    (doctor,) = run_in_turn(("doctor",), within_s=SYNCED_WITHIN_S)
    assert all(row.partition(" ")[2] in doctor.output for row in others), doctor
    assert "but no node port is served at this address" in doctor.output


def leave_iptables_mode() -> None:
    """Write the rules of both families that a kube-proxy in iptables mode leaves behind."""
    jump = f"*nat\n:KUBE-SERVICES - [0:0]\n-A KUBE-SERVICES -j {left_rules.SERVICE}\nCOMMIT\n"
    for family, name in ((Family.IPV4, "iptables"), (Family.IPV6, "ip6tables")):
        for text in (left_rules.iptables_mode(family), jump):
            subprocess.run((f"{name}-restore", "--noflush"), input=text, text=True, check=True)


async def test_leftover_rules_of_the_iptables_mode_refuse_no_service_and_rules_of_other_programs_stay(
    folder: pathlib.Path,
) -> None:
    leave_iptables_mode()
    async with running(f"--manifests={folder}", "--ipvs-sync-period=1h") as program:
        for _ in range(2):
            await program.read_until("event=leftover_rules_removed")
        for name in ("iptables", "ip6tables"):
            _, saved, _ = await run(f"{name}-save")
            assert {line.removesuffix(" [0:0]") for line in saved.splitlines()} >= left_rules.OF_OTHERS
            assert not [line for line in saved.splitlines() if left_rules.SERVICE in line or "no endpoints" in line], saved
            assert ":KUBE-PROXY-CANARY" not in saved
            assert '-A OUTPUT -m comment --comment "kubernetes service portals" -j KUBE-SERVICES' in saved, "our jump stays"
        assert await program.stop() == 0


async def test_a_stop_signal_early_during_a_start_ends_the_program_cleanly(server: ApiServer, kubeconfig: str) -> None:
    server.lists_open.clear()
    async with running(kubeconfig) as program:
        await program.read_until("waiting_for_first_lists")
        before = read_state()
        assert await program.stop() == 0
    assert read_state() == before


async def livez_took_s() -> float:
    """How long a request for /livez takes."""
    began_s = time.monotonic()
    reader, writer = await asyncio.open_connection("127.0.0.1", 10256)
    try:
        writer.write(b"GET /livez HTTP/1.0\r\n\r\n")
        assert b" 200 " in await asyncio.wait_for(reader.readline(), SYNCED_WITHIN_S)
    finally:
        writer.close()
    return time.monotonic() - began_s


def has_virtual_server_at(address: str) -> bool:
    return f" {socket.inet_aton(address).hex().upper()}:" in pathlib.Path("/proc/net/ip_vs").read_text()


async def test_the_process_answers_and_stops_on_a_signal_while_it_programs_a_very_large_service(folder: pathlib.Path) -> None:
    large = service("large", 40)
    large["spec"]["externalIPs"] = [f"11.0.{number >> 8}.{number & 255}" for number in range(LARGE)]
    async with running(f"--manifests={folder}") as program:
        await program.read_until("synced")
        await livez_took_s()  # the first connection makes the program load its HTTP server
        show(folder, "v1", "Service", large)
        show(folder, "discovery.k8s.io/v1", "EndpointSlice", endpoint_slice("large", "10.244.0.9"))
        shown_s, took_s = time.monotonic(), [await livez_took_s()]
        while not has_virtual_server_at("11.0.0.1"):
            took_s.append(await livez_took_s())
            await asyncio.sleep(0.02)
        programmed_s = time.monotonic() - shown_s
        took_s += [await livez_took_s() for _ in range(20)]
        assert max(took_s) < max(ANSWERED_WITHIN_S, programmed_s / 3), (programmed_s, took_s)
        began_s = time.monotonic()
        assert await program.stop() == 0
        assert time.monotonic() - began_s < ENDED_WITHIN_S


WRONG: Sequence[tuple[Sequence[str], str]] = (
    ([IPVS, "--nope"], "'--nope': unknown flag"),
    (["--manifests=."], "--proxy-mode: is not set, and ipvs is the only mode that ipvsproxy supports"),
    ([IPVS, *FLAGS, "--manifests=/missing"], "--manifests: /missing is not a directory"),
    ([IPVS, *FLAGS, "--kubeconfig=/missing"], "kubeconfig /missing: /missing: No such file or directory"),
    ([IPVS, *FLAGS, "--config=/missing"], "--config: '/missing'"),
)


def test_errors_at_the_start_are_reported_in_a_sentence_and_nothing_is_programmed(folder: pathlib.Path) -> None:
    before = read_state()
    answers = run_in_turn(*(arguments for arguments, _ in WRONG), within_s=SYNCED_WITHIN_S)
    for answer, (_, sentence) in zip(answers, WRONG, strict=True):
        assert answer.status == 2
        first, *_, last = answer.error.splitlines()
        assert first.startswith(f"ipvsproxy: {sentence}"), answer.error
        assert "nothing was" in last
    with Program(folder, folder.parent / "log", *FLAGS, main=mains.without_net_admin) as program:
        program.wait_for_end(SYNCED_WITHIN_S)
    assert program.status == 2
    assert "it has no CAP_NET_ADMIN" in (folder.parent / "log").read_text().splitlines()[-2]
    assert read_state() == before
