"""The dry run: it reads and reports, does not change the kernel, and does not listen on kube-proxy's ports."""

import asyncio
from collections.abc import Mapping

import pytest
import structlog

from ipvsproxy.commands import dry_run
from ipvsproxy.commands.dry_run import DryRun
from ipvsproxy.commands.inspection import Inspected
from ipvsproxy.config.settings import ListenAddress
from ipvsproxy.daemon.http.health import Status
from ipvsproxy.daemon.metrics.metrics import Metrics
from ipvsproxy.model.net import Family, parse_address
from tests.support import builders, http_client, memory_node
from tests.support.fake_kernel import FakeKernel
from tests.support.inspected_node import WEB, inspected, synced_kernel

CLUSTER, THERE = builders.frontend(builders.CLUSTER_IP, 80), builders.backend("10.244.1.1")


class Shadowed:
    """A dry run on an in-memory kernel, and the metrics that the dry run exports."""

    def __init__(self, kernel: FakeKernel) -> None:
        self.node: Inspected = inspected(kernel, *WEB)
        self.metrics = Metrics()
        self.status = Status(families=tuple(Family), sync_period_s=30, clock=lambda: 0.0, wall_clock=lambda: 0.0)
        self.dry_run = DryRun(self.node, self.status, self.metrics)

    async def differences(self) -> Mapping[str, float]:
        """The exported number of differences of each kind."""
        lines = http_client.whole(await self.metrics.expose()).decode().splitlines()
        found = [line for line in lines if line.startswith("ipvsproxy_dry_run_differences{")]
        return {line.split('"')[1]: float(line.rpartition(" ")[2]) for line in found}


async def test_a_dry_run_finds_no_differences_on_a_node_in_the_desired_state() -> None:
    compared = Shadowed(await synced_kernel(*WEB))
    assert await compared.differences() == {}, "before the first look nobody knows"
    await compared.dry_run.compare()
    found = await compared.differences()
    assert set(found.values()) == {0.0}
    assert {"virtual_server", "real_server", "set_entry", "rules", "address", "sysctl"} <= found.keys()
    assert compared.status.is_healthy


async def test_each_difference_is_logged_once_but_counted_in_the_metric_until_it_ends() -> None:
    kernel = await synced_kernel(*WEB)
    del kernel.virtual_servers[CLUSTER].real_servers[THERE]
    compared = Shadowed(kernel)
    with structlog.testing.capture_logs() as logs:
        await compared.dry_run.compare()
        await compared.dry_run.compare()
    assert [line["object"] for line in logs if line["event"] == "differs"] == [f"{CLUSTER} -> {THERE}"]
    assert (await compared.differences())["real_server"] == 1
    kernel.virtual_servers[CLUSTER].real_servers[THERE] = 1
    await compared.dry_run.compare()
    assert (await compared.differences())["real_server"] == 0
    assert kernel.applied == []


async def test_a_change_that_the_other_proxy_has_not_programmed_is_reported_as_a_difference() -> None:
    compared = Shadowed(await synced_kernel(*WEB))
    await compared.dry_run.compare()
    compared.node.store.deliver([memory_node.put(builders.endpoint_slice(builders.endpoint("10.244.0.1")))], 0)
    await compared.dry_run.compare()
    assert (await compared.differences())["real_server"] == 2, "at the cluster IP and at the node port"


async def test_the_dry_run_keeps_its_last_counts_while_the_kernel_cannot_be_read() -> None:
    kernel = await synced_kernel(*WEB)
    compared = Shadowed(kernel)
    await compared.dry_run.compare()
    kernel.unreadable.add("virtual_servers")
    kernel.virtual_servers.clear()
    with structlog.testing.capture_logs() as logs:
        await compared.dry_run.compare()
    assert [line["event"] for line in logs] == ["kernel_unreadable"]
    assert set((await compared.differences()).values()) == {0.0}


async def test_the_dry_run_compares_a_change_only_after_the_other_proxy_had_time_to_program_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dry_run, "PATIENCE_S", 0.01)
    compared = Shadowed(await synced_kernel(*WEB))
    looks = asyncio.Semaphore(0)
    compare = compared.dry_run.compare

    async def counted() -> None:
        await compare()
        looks.release()

    monkeypatch.setattr(compared.dry_run, "compare", counted)
    running = asyncio.create_task(compared.dry_run.run())
    await asyncio.wait_for(looks.acquire(), 60)
    compared.dry_run.changed()
    await asyncio.wait_for(looks.acquire(), 60)  # a change starts the next comparison early
    running.cancel()
    assert compared.status.node == WEB[0]


@pytest.mark.parametrize(("port", "other"), [(10256, 10356), (10249, 10349), (9000, 9000)])
def test_the_dry_run_does_not_use_kube_proxys_default_ports(port: int, other: int) -> None:
    address = parse_address("127.0.0.1")
    assert dry_run.beside_kube_proxy(ListenAddress(address, port)) == ListenAddress(address, other)
