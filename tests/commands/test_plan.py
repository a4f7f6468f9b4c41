"""The command ``plan`` prints what the loop would do, and changes nothing."""

import asyncio

import msgspec
import pytest

from ipvsproxy.commands import plan
from ipvsproxy.commands.inspection import Document, UnknownStateError
from ipvsproxy.model.annotations import ALL_ANNOTATIONS, ServiceAnnotations, WeightRules
from ipvsproxy.model.real_servers import Thresholds
from ipvsproxy.model.service import ServiceType
from ipvsproxy.model.virtual_servers import ConnectionCounts
from ipvsproxy.translate.translation_settings import Settings
from tests.support import builders, memory_node
from tests.support.fake_kernel import FakeKernel
from tests.support.inspected_node import WEB, inspected, synced_kernel


async def _plan(kernel: FakeKernel, *objects: object) -> Document:
    node = inspected(kernel, *objects)  # type: ignore[arg-type]  # API objects of three kinds
    return plan.describe(builders.THIS_NODE, *await plan.plan(node))


def _lines(document: Document) -> list[str]:
    return [f"{one['verb']} {one['kind']} {one['object']}" for one in document["operations"]]


async def test_the_command_plan_lists_the_operations_of_the_next_sync_in_order_without_executing_them() -> None:
    kernel = memory_node.new_kernel()
    planned = _lines(await _plan(kernel, *WEB))
    assert kernel.applied == []
    node = memory_node.MemoryNode()
    node.begin_with(*WEB)
    async with node.running():
        await asyncio.wait_for(node.watcher.until(lambda: bool(node.watcher.summaries)), 60)
    assert planned == node.done


async def test_plan_shows_which_service_needs_each_operation() -> None:
    document = await _plan(memory_node.new_kernel(), *WEB)
    services = {(one["kind"], one["service"]) for one in document["operations"]}
    assert {kind for kind, service in services if service == "default/web"} == {
        "virtual_server",
        "real_server",
        "set_entry",
        "address",
    }
    assert ("sysctl", None) in services


@pytest.mark.parametrize(("active", "verbs"), [(0, ["set", "remove"]), (3, ["set"])])
async def test_plan_sets_weight_0_for_a_real_server_with_connections_and_does_not_remove_it(
    active: int, verbs: list[str]
) -> None:
    kernel = await synced_kernel(*WEB)
    cluster, gone = builders.frontend(builders.CLUSTER_IP, 80), builders.backend("10.244.1.1")
    kernel.connection_counts[cluster, gone] = ConnectionCounts(active, 0)
    document = await _plan(kernel, *WEB[:2], builders.endpoint_slice(builders.endpoint("10.244.0.1")))
    about = [one for one in document["operations"] if one["object"] == f"{cluster} -> {gone}"]
    assert [one["verb"] for one in about] == verbs
    assert about[0]["weight"] == 0


async def test_plan_fails_if_the_kernel_cannot_be_read_completely() -> None:
    kernel = memory_node.new_kernel()
    kernel.unreadable.add("sets")
    with pytest.raises(UnknownStateError, match="sets cannot be read"):
        await _plan(kernel, *WEB)


async def test_the_text_of_a_plan_counts_operations_and_lists_real_servers_below_their_virtual_server() -> None:
    document = await _plan(memory_node.new_kernel(), *WEB)
    lines = list(plan.render(document))
    assert lines[0].startswith(f"node-a: {len(document['operations'])} operations (")
    at = lines.index("     + TCP 10.96.0.10:80 rr  [default/web]")
    assert {lines[at + 1], lines[at + 2]} == {
        "     +   -> 10.244.0.1:8080  [default/web]",
        "     +   -> 10.244.1.1:8080  [default/web]",
    }
    assert lines[at - 1].endswith(". add 2 virtual servers, add 4 real servers")
    assert lines[-1] == "Nothing was changed."
    assert "     and 14 more; --output=json shows all" in lines


async def test_an_empty_plan_is_one_line() -> None:
    assert list(plan.render({"node": "n", "operations": [], "summary": {"total": 0}})) == [
        "n: nothing to do, the kernel is in its desired state"
    ]


async def test_plan_shows_the_settings_that_a_service_chooses_by_annotations() -> None:
    kernel = await synced_kernel(*WEB)
    rules = WeightRules({builders.OTHER_NODE: 0}, {}, 5)
    given = ServiceAnnotations(given=ALL_ANNOTATIONS, scheduler="wrr", weights=rules, thresholds=Thresholds(10, 5))
    chosen = (WEB[0], builders.with_options(WEB[1], annotations=given), WEB[2])
    lines = list(plan.render(await _plan(kernel, *chosen)))
    assert "     ~ TCP 10.96.0.10:80 wrr  [default/web]" in lines
    limits = "connections at most 10, again below 5"
    assert f"     ~   -> 10.244.0.1:8080 weight 5, {limits}  [default/web]" in lines
    assert any(f"weight 0 (keeps its connections, gets no new ones), {limits}" in line for line in lines)
    assert not [line for line in lines if line.startswith("     - ")]
    added = list(plan.render(await _plan(memory_node.new_kernel(), *chosen)))
    assert any(f"-> 10.244.0.1:8080 weight 5, {limits}" in line for line in added)


async def test_the_plan_shows_which_real_servers_get_their_packets_by_tunnel() -> None:
    asking = ServiceAnnotations(given=ALL_ANNOTATIONS, direct_return=True)
    shop = builders.service("shop", kind=ServiceType.LOAD_BALANCER, load_balancer=["192.0.2.80"])
    slices = builders.endpoint_slice(builders.endpoint("10.244.1.1", builders.OTHER_NODE), service="shop")
    far = msgspec.structs.replace(builders.node("172.18.0.3", name=builders.OTHER_NODE), takes_direct_return=True)
    objects = (builders.node(), builders.with_options(shop, annotations=asking), slices)
    settings = Settings(direct_return=True, cluster_networks=builders.networks("10.244.0.0/16"))
    kernel = await synced_kernel(*objects, far, translation=settings)
    operations, _ = await plan.plan(inspected(kernel, *objects, far, translation=settings))
    assert not operations
    new = inspected(memory_node.new_kernel(), *objects, far, translation=settings)
    lines = list(plan.render(plan.describe(builders.THIS_NODE, *await plan.plan(new))))
    assert any("-> 172.18.0.3:80 weight 1 by tunnel  [default/shop]" in line for line in lines)
