"""``ipvsproxy top`` as a person sees it: the program runs on a pseudo-terminal, and reads its data from a running node.

The node has an in-memory kernel. ``test_top_screen.py`` tests each key and each size.
"""

import asyncio
import os
import sys
from collections.abc import Callable, Mapping

import pytest

from tests.support import builders, patience
from tests.support.builders import OTHER_NODE, endpoint
from tests.support.page_node import PageNode
from tests.support.terminal import Terminal

WEB = builders.service("web", builders.service_port(80, name="http"))
SLICE = builders.endpoint_slice(
    endpoint("10.244.0.1"),
    endpoint("10.244.1.1", OTHER_NODE),
    endpoint("10.244.0.9", ready=False),
    ports=[builders.endpoint_port(8080, name="http")],
)


@pytest.fixture
def node() -> PageNode:
    one = PageNode()
    one.begin_with(builders.node(), WEB, SLICE)
    return one


def _top(columns: int, lines: int, *arguments: str, environment: Mapping[str, str] | None = None) -> Terminal:
    command = (sys.executable, "-m", "ipvsproxy", "top", "--interval=500ms", *arguments)
    return Terminal(command, columns, lines, {"PYTHONPATH": os.pathsep.join(sys.path), **(environment or {})})


async def _at(node: PageNode, act: Callable[[int], None]) -> None:
    """Call ``act`` in a thread, with the port of the node's page as the argument."""
    async with node.showing() as port:
        await asyncio.to_thread(act, port)


async def test_top_opens_a_service_after_the_enter_key_and_ends_after_the_key_q(node: PageNode) -> None:
    def act(port: int) -> None:
        with _top(80, 24, f"--server=http://127.0.0.1:{port}", "--sort=name", "--filter=10.244.1.") as terminal:
            terminal.until("node-a: in force", "default/web", "Conn/s", "q quit", "by name: 1")
            terminal.type("\r")
            terminal.until("10.244.0.1:8080", "10.244.1.1:8080", "OUT: it is not ready", "esc back")
            assert all(len(line) <= 80 for line in terminal.lines)
            terminal.type("\x1b")
            terminal.until("by name: 1")
            terminal.type("q")
            assert terminal.end() == 0

    await _at(node, act)


async def test_control_c_ends_top_and_restores_the_terminal(node: PageNode) -> None:
    def act(port: int) -> None:
        with _top(80, 24, f"--server=http://127.0.0.1:{port}") as terminal:
            before = terminal.settings
            terminal.until("default/web")
            assert terminal.settings != before, "keys come one by one"
            terminal.type("\x03")
            assert terminal.end() == 0
            assert terminal.settings == before

    await _at(node, act)


@pytest.mark.parametrize(
    ("environment", "name"),
    [
        ({"TERM": ""}, "default/w\N{LATIN SMALL LETTER E WITH ACUTE}b"),
        ({"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}, r"default/w\xe9b"),
    ],
    ids=["no TERM", "no UTF-8"],
)
async def test_top_runs_on_a_terminal_without_colours(node: PageNode, environment: dict[str, str], name: str) -> None:
    node.put(builders.service("w\N{LATIN SMALL LETTER E WITH ACUTE}b", cluster=["10.96.0.67"]))

    def act(port: int) -> None:
        with _top(80, 24, f"--server=http://127.0.0.1:{port}", environment=environment) as terminal:
            terminal.until("node-a: in force", name)
            terminal.type("q")
            assert terminal.end() == 0

    await _at(node, act)


@pytest.mark.parametrize(("columns", "lines"), [(10, 3), *([(300, 4)] if patience.IS_THOROUGH else [])])
async def test_top_does_not_fail_on_a_terminal_that_is_too_small(node: PageNode, columns: int, lines: int) -> None:
    def act(port: int) -> None:
        with _top(columns, lines, f"--server=http://127.0.0.1:{port}") as terminal:
            terminal.until("node-a")
            terminal.type("nq")
            assert terminal.end() == 0

    await _at(node, act)


async def test_top_refuses_a_terminal_that_cannot_show_a_screen(node: PageNode) -> None:
    def act(port: int) -> None:
        with _top(80, 24, f"--server=http://127.0.0.1:{port}", environment={"TERM": "dumb"}) as terminal:
            assert terminal.end() == 2
            assert "is not a terminal for a screen" in terminal.text

    await _at(node, act)
