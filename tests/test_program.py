"""The program as a separate process on a real kernel with an API server: it starts, stops, and starts again.

If the program cannot start, it prints one sentence, ends with status 2, and programs no object.
"""

import asyncio
import contextlib
import dataclasses
import json
import pathlib
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import pytest

from tests.support import api_server, golden_state, http_client, lab_agent, mains, patience
from tests.support.api_server import ApiServer
from tests.support.api_store import ENDPOINT_SLICES, NODES, SERVICES, Object, Resource
from tests.support.program import Program, run_in_turn

pytestmark = [pytest.mark.kernel, pytest.mark.usefixtures("network_namespace")]

SYNCED_WITHIN_S = patience.seconds(60.0)
ANSWERED_WITHIN_S = patience.seconds(5.0)
LARGE = 20_000
"""The number of external IPs of a very large Service."""
FLAGS = (
    "--hostname-override=node-a",
    "--cluster-cidr=10.244.0.0/16,fd00:244::/64",
    "--conntrack-max-per-core=0",  # 0 leaves the limit alone, which is writable only in the host's own network namespace
)
BETWEEN_LINES_S = 0.05

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
        """Wait for a sync that has operations. A sync without operations comes first if an API server's address is found late."""
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


def run(*command: str) -> str:
    """Run a command, which must succeed; returns its standard output."""
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


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
OBJECTS = [
    (NODES, NODE),
    *((SERVICES, service(f"web-{number}", number)) for number in (1, 2, 3)),
    *((ENDPOINT_SLICES, endpoint_slice(f"web-{number}", f"10.244.0.{number}", f"10.244.1.{number}")) for number in (1, 2, 3)),
]
"""The Node, and three Services with their EndpointSlices."""


@pytest.fixture
async def server() -> AsyncIterator[ApiServer]:
    """An API server that has ``OBJECTS``."""
    async with ApiServer() as server:
        for one in OBJECTS:
            server.put(*one)
        yield server


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
    """A folder that has ``OBJECTS`` as manifest files, for tests that do not need an API server.

    With manifest files, the program starts faster than with an API server, because it loads no client library.
    """
    folder = tmp_path / "manifests"
    folder.mkdir()
    show(folder, *OBJECTS)
    return folder


def show(folder: pathlib.Path, *objects: tuple[Resource, Object]) -> None:
    """Write objects to manifest files."""
    for (version, kind, _), item in objects:
        text = json.dumps({"apiVersion": version, "kind": kind} | item)
        (folder / f"{kind}-{item['metadata']['name']}.json").write_text(text)


def virtual_servers() -> State:
    """Read only the virtual servers, because reading other objects starts more programs, which is slow on user-mode Linux."""
    rows: State = golden_state.read_state(("virtual_servers",))["virtual_servers"]
    return rows


@pytest.mark.distribution
async def test_a_restart_changes_no_kernel_object_after_changes_from_the_api_server_were_applied(
    server: ApiServer, tmp_path: pathlib.Path
) -> None:
    # Only the Service that the test deletes has a UDP port, so that the restarted program need not read conntrack flows of UDP
    # ports.
    for number in (2, 3):
        server.put(SERVICES, without_udp(service(f"web-{number}", number)))
    kubeconfig = f"--kubeconfig={api_server.write_kubeconfig(tmp_path / 'kubeconfig', server.url)}"
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
        held = golden_state.read_state()
        assert {row for row in held["virtual_servers"] if "10.96.0." in row} == {
            f"TCP 10.96.0.{number}:80" for number in (2, 3, 9)
        }
        assert await program.stop() == 0
        assert "the kernel stays as it is" in program.log[-1]
    assert golden_state.read_state() == held
    server.delete(ENDPOINT_SLICES, "web-1-1")
    async with running(kubeconfig) as program:
        line = await program.read_until("event=synced")
        assert " services=3 operations=0 failed=0 pending=0 " in line
        assert await program.stop() == 0
    assert golden_state.read_state() == held


@contextlib.asynccontextmanager
async def elsewhere(server: ApiServer, address: str) -> AsyncIterator[str]:
    """Serve the API server at this address of another host; returns the server's URL.

    Only packets that leave this host reach the server.
    """
    namespaces = lab_agent.Namespaces()
    other = namespaces.create("other")
    run("ip", "link", "add", "uplink", "type", "veth", "peer", "name", "uplink", "netns", other)
    run("ip", "address", "add", "192.0.2.1/24", "dev", "uplink")
    run("ip", "link", "set", "uplink", "up")
    with namespaces.inside("other"):
        run("ip", "address", "add", f"{address}/24", "dev", "uplink")
        run("ip", "link", "set", "uplink", "up")
    listening = namespaces.socket("other", "TCP", address)
    listening.bind((address, 6443))
    await server.listen_on(listening)
    yield f"http://{address}:6443"


@pytest.mark.parametrize("binding", ["addresses", pytest.param("routes", marks=patience.THOROUGH)])
async def test_a_starting_program_removes_a_service_address_that_hides_the_api_server(
    server: ApiServer, folder: pathlib.Path, tmp_path: pathlib.Path, binding: str
) -> None:
    address, flag = "192.0.2.99", f"--ipvs-vip-binding={binding}"
    greedy = service("greedy", 9)
    greedy["spec"] |= {"externalIPs": [address, "203.0.113.9"], "ports": [{"name": "http", "port": 6443}]}
    objects = [(SERVICES, greedy), (ENDPOINT_SLICES, endpoint_slice("greedy", "10.244.0.9"))]
    show(folder, *objects)
    async with elsewhere(server, address) as url:
        async with running(f"--manifests={folder}", flag) as program:
            await program.read_until("event=synced")
            assert await program.stop() == 0
        held = virtual_servers()
        assert {f"TCP {address}:6443", "TCP 203.0.113.9:6443"} <= set(held)
        for one in objects:
            server.put(*one)
        kubeconfig = api_server.write_kubeconfig(tmp_path / "elsewhere", url)
        async with running(f"--kubeconfig={kubeconfig}", flag) as program:
            line = await program.read_until("event=api_server_address_given_up")
            assert f"TCP {address}:6443" in line
            await program.read_until("event=synced")
            assert set(virtual_servers()) == set(held) - {f"TCP {address}:6443"}
            async with asyncio.timeout(SYNCED_WITHIN_S):
                while all(event.get("reason") != "ApiServerHidden" for event in server.events):  # noqa: ASYNC110 - it has no event
                    await asyncio.sleep(BETWEEN_LINES_S)
            assert await program.stop() == 0


async def livez_took_s() -> float:
    """How long a request for /livez takes."""
    began_s = time.monotonic()
    assert (await asyncio.wait_for(http_client.ask(10256, "/livez"), SYNCED_WITHIN_S)).status == 200
    return time.monotonic() - began_s


def has_virtual_server_at(address: str) -> bool:
    # /proc/net/ip_vs may omit virtual servers of a large table (see ``cluster.ipvs_table``)
    return subprocess.run(("ipvsadm", "-Ln", "-t", f"{address}:80"), capture_output=True, check=False).returncode == 0


async def test_the_process_answers_livez_and_stops_on_a_signal_while_it_programs_a_very_large_service(
    folder: pathlib.Path,
) -> None:
    large = service("large", 40)
    large["spec"]["externalIPs"] = [f"11.0.{number >> 8}.{number & 255}" for number in range(LARGE)]
    async with running(f"--manifests={folder}") as program:
        await program.read_until("synced")
        await livez_took_s()  # the first connection makes the program load its HTTP server
        show(folder, (SERVICES, large), (ENDPOINT_SLICES, endpoint_slice("large", "10.244.0.9")))
        shown_s, took_s = time.monotonic(), [await livez_took_s()]
        while not has_virtual_server_at("11.0.0.1"):
            took_s.append(await livez_took_s())
            await asyncio.sleep(0.02)
        programmed_s = time.monotonic() - shown_s
        took_s += [await livez_took_s() for _ in range(20)]
        assert max(took_s) < max(ANSWERED_WITHIN_S, programmed_s / 3), (programmed_s, took_s)
        assert await program.stop() == 0


WRONG: Sequence[tuple[Sequence[str], str]] = (
    (["--proxy-mode=ipvs", *FLAGS, "--manifests=/missing"], "--manifests: /missing is not a directory"),
    (["--proxy-mode=ipvs", *FLAGS, "--kubeconfig=/missing"], "kubeconfig /missing: /missing: No such file or directory"),
    (["--proxy-mode=ipvs", *FLAGS, "--config=/missing"], "--config: '/missing'"),
)


def test_a_program_that_cannot_start_prints_one_sentence_and_programs_nothing(folder: pathlib.Path) -> None:
    before = golden_state.read_state()
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
    assert golden_state.read_state() == before
