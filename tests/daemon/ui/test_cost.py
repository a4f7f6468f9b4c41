"""Tests that the cost of the page depends on the size of a change, not on the number of Services.

The cost is the number of Python calls and lines that are executed.
"""

import gc
import time
import tracemalloc

import pytest

from ipvsproxy.daemon.base.timing import in_slices
from ipvsproxy.daemon.ui import board, counters
from ipvsproxy.daemon.ui.board import Board, Selection, Troubles
from ipvsproxy.daemon.ui.counters import REMEMBERED
from ipvsproxy.model.service import ServiceName
from ipvsproxy.model.steps import ITEMS_AT_ONCE, at_once
from ipvsproxy.translate.services import explanations
from tests.support import builders
from tests.support.builders import endpoint
from tests.support.memory_node import AUDIT_INTERVAL_S
from tests.support.page_node import PageNode
from tests.support.steps import counted
from tests.support.virtual_time import in_virtual_time

FEW, MANY = 300, 3000


def _node(count: int) -> PageNode:
    node = PageNode()
    services = [builders.service(f"s{number}", cluster=[f"10.98.{number // 250}.{number % 250}"]) for number in range(count)]
    node.begin_with(builders.node(), *services)
    return node


def _table(node: PageNode) -> Board:
    return Board(node.store, node.engine.survey, node.pages._counters, Troubles(node.engine.survey))


async def _asked(count: int, **query: str) -> int:
    """The number of Python steps that one answer takes after a change of one Service. The node has ``count`` Services."""
    node = _node(count)
    async with node.reading():
        await node.quiet(1)
        await node.ask("services", **query)
        node.put(builders.endpoint_slice(endpoint("10.244.0.1"), service="s7"))
        await node.quiet(0.1)
        with counted() as steps:
            again = await node.ask("services", **query)
        assert again["services"]
        return steps.here


@pytest.mark.parametrize("query", [{}, {"page": "3", "size": "20"}], ids=["first page", "third page"])
@in_virtual_time
async def test_the_cost_of_an_answer_after_a_change_does_not_depend_on_the_number_of_services(query: dict[str, str]) -> None:
    assert await _asked(MANY, **query) < 1.2 * await _asked(FEW, **query)


@in_virtual_time
async def test_without_viewers_the_cost_of_the_page_is_independent_of_the_number_of_services() -> None:
    costs = []
    for count in (FEW, MANY):
        node = _node(count)
        async with node.reading():
            await node.quiet(1)
            summary = node.watcher.summaries[-1]
            with counted() as steps:
                node.pages.synced(summary)
            costs.append(steps.here)
    assert costs[1] < 1.2 * costs[0]
    assert costs[1] < 500


@in_virtual_time
async def test_the_page_yields_to_other_tasks_while_it_refreshes_or_sorts_or_searches_its_table() -> None:
    node = _node(MANY)
    async with node.reading():
        await node.quiet(1)
        table = _table(node)
        assert len(list(table.refreshing())) >= MANY // ITEMS_AT_ONCE
        assert len(list(table.finding(Selection(sort="endpoints", descending=True)))) >= MANY // board.SORTED_AT_ONCE
        assert len(list(table.finding(Selection(query=board.parse_query("s12"))))) >= MANY // ITEMS_AT_ONCE
        assert len(await in_slices(table.finding(Selection(query=board.parse_query("s12"))), time.monotonic)) == 111
        with counted() as steps:  # the result of this search has been kept
            list(table.finding(Selection(query=board.parse_query("s12"))))
        assert steps.here < 60


def test_a_request_continues_the_table_that_an_earlier_request_left_unfinished() -> None:
    table = _table(_node(FEW))
    unfinished = table.refreshing()
    while len(table._rows) == 0:
        next(unfinished)
    unfinished.close()
    assert len(table._rows) < FEW
    list(table.refreshing())
    assert len(table._rows) == FEW
    for number in range(3 * board.SEARCHES):
        list(table.finding(Selection(query=board.parse_query(f"s{number}"))))
    assert len(table._sorted) <= board.SEARCHES


@in_virtual_time
async def test_a_service_with_many_endpoints_is_described_in_steps_so_that_other_tasks_run_in_between() -> None:
    node, count = PageNode(), 1000
    node.begin_with(
        builders.node(),
        builders.service("web"),
        builders.endpoint_slice(*(endpoint(f"10.244.{number // 250}.{number % 250 + 1}") for number in range(count))),
    )
    async with node.reading():
        await node.quiet(1)
        name = ServiceName("default", "web")
        pauses = len(list(node.describing(name)))
        # Three lists are described in steps: the reasons, the real servers and the endpoints.
        assert pauses >= 3 * count // explanations.ENDPOINTS_AT_ONCE
        assert len(at_once(node.describing(name))["ports"][0]["endpoints"]) == count


@in_virtual_time
async def test_a_viewer_uses_less_than_a_kilobyte_of_memory_for_each_service() -> None:
    """With a kilobyte for each Service, a viewer of the page costs 10 MB of memory on a node with ten thousand busy Services."""
    node = _node(FEW)
    async with node.reading():
        await node.quiet(1)
        for key in node.kernel.virtual_servers:
            node.traffic.per_second[key] = 7.0
        gc.collect()
        tracemalloc.start()
        try:
            taken = []
            for _ in range(2):
                for _ in range(4):  # during four rounds the counters are read at least ``REMEMBERED`` times
                    await node.ask("services", sort="bytes")
                    await node.ask("node")
                    await node.quiet(REMEMBERED * counters.SAMPLE_S / 4)
                gc.collect()
                taken.append(tracemalloc.get_traced_memory()[0])
            await node.quiet(counters.IDLE_S + 2 * AUDIT_INTERVAL_S)
            gc.collect()
            taken.append(tracemalloc.get_traced_memory()[0])
        finally:
            tracemalloc.stop()
    assert node.pages._counters.rates.readings == 0
    assert taken[1] - taken[2] < 1000 * FEW + 100_000, "and an answer"
    assert taken[1] < 1.1 * taken[0], "it does not grow"
    assert taken[2] < 250_000, "what any number of Services takes"
