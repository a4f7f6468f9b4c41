"""A node that has ten thousand Services and runs in a thread, and a browser that shows the node's page.

The browser is Debian's Chromium. If Chromium is not installed, these tests are skipped. If ``IPVSPROXY_BROWSER_REQUIRED`` is also
set, they fail; ``scripts/test`` sets this variable.
"""

import asyncio
import concurrent.futures
import contextlib
import math
import os
import shutil
import threading
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, Literal, TypeVar

import pytest
from playwright import sync_api
from playwright.sync_api import Browser, ConsoleMessage, Page, Playwright, Request

from ipvsproxy.daemon.ui import counters
from ipvsproxy.model.service import ApiObject
from ipvsproxy.translate.translation_settings import Settings, TrafficScopes
from tests.support import page_scene
from tests.support.page_node import PageNode

SERVICES = 10_000
PATIENCE_MS = 100_000
"""The longest wait until the page shows an expected text, on a busy machine."""
T = TypeVar("T")


class Running:
    """A node that runs in a separate thread. ``url`` is the URL of the node's page."""

    def __init__(self, count: int, port: int) -> None:
        self._count = count
        self._loop = asyncio.new_event_loop()
        self._ready = concurrent.futures.Future[None]()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="node")
        self.node: PageNode
        self.port = port

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/ui/"

    def start(self) -> None:
        self._thread.start()
        self._ready.result(120)

    def stop(self) -> None:
        """Stop the node, so that the page gets no more answers."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(60)

    def do(self, work: Callable[[PageNode], T]) -> T:
        """Run a function in the node's thread."""

        async def doing() -> T:
            return work(self.node)

        return self.wait(doing())

    def put(self, *objects: ApiObject) -> None:
        """Put objects into the node's store, and wait until they are programmed."""

        async def putting() -> None:
            syncs = len(self.node.watcher.summaries)
            self.node.put(*objects)
            await self.node.watcher.until(lambda: len(self.node.watcher.summaries) > syncs and not self.node.store.untaken)

        self.wait(putting())

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(60)

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        except BaseException as error:  # noqa: BLE001 - the test reports the error
            self._ready.set_exception(error)
        finally:
            self._loop.close()

    async def _serve(self) -> None:
        executor = concurrent.futures.ThreadPoolExecutor(1)
        self.node = PageNode(executor=executor, settings=Settings(scopes=TrafficScopes.API))
        page_scene.begin(self.node, self._count)
        async with self.node.showing(self.port) as self.port:
            await self.node.watcher.until(lambda: bool(self.node.watcher.summaries))
            # After the counters were read once, they are read again only when a viewer requests them.
            page_scene.add_traffic(self.node)
            while self.node.pages.node.history.last is None:  # noqa: ASYNC110 - no event signals that the counters were read
                await asyncio.sleep(0.01)
            page_scene.add_past(self.node)
            self._ready.set_result(None)
            await self._stop.wait()
        executor.shutdown(wait=False)


@contextlib.contextmanager
def running(count: int, port: int = 0) -> Iterator[Running]:
    """A node with ``count`` Services, which runs until the end of the ``with`` block."""
    node = Running(count, port)
    node.start()
    try:
        yield node
    finally:
        node.stop()


@pytest.fixture(scope="module")
def node() -> Iterator[Running]:
    """The node for all tests that do not change a node permanently.

    Although this node has many Services, its counters are read as often as on a small node.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(counters, "READ_PER_S", math.inf)
        with running(SERVICES) as one:
            yield one


@pytest.fixture(scope="module")
def playwright() -> Iterator[Playwright]:
    """Playwright, which runs until the end of the module.

    While Playwright runs, Playwright's event loop counts as the running event loop of this thread, so that no test can run
    another event loop.
    """
    with sync_api.sync_playwright() as one:
        yield one


@pytest.fixture(scope="module")
def browser(playwright: Playwright) -> Iterator[Browser]:
    path = shutil.which("chromium")
    if path is None:
        if os.environ.get("IPVSPROXY_BROWSER_REQUIRED"):
            pytest.fail("chromium is not installed; scripts/setup installs it")
        pytest.skip("chromium is not installed (Debian: apt-get install chromium)")
    sync_api.expect.set_options(timeout=PATIENCE_MS)
    one = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])  # root needs this flag for Chromium
    yield one
    one.close()


def _note_faults(page: Page, url: str, complaints: list[str]) -> None:
    """Add warnings of the browser's console, errors of scripts, and requests to other hosts to ``complaints``."""

    def hear(message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            complaints.append(message.text)

    def see(request: Request) -> None:
        if not request.url.startswith(url):
            complaints.append(f"asked for {request.url}")

    page.on("console", hear)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", see)


@pytest.fixture
def looking(browser: Browser, node: Running) -> Iterator[Callable[..., Page]]:
    """A function that opens a view of the page; at the end of the test, the fixture checks that the browser reported no fault."""
    complaints: list[str] = []
    with contextlib.ExitStack() as contexts:

        def look(
            part: str,
            *,
            theme: Literal["light", "dark"] = "light",
            width: int = 1280,
            height: int = 900,
            at: Running = node,
            **more: Any,
        ) -> Page:
            context = browser.new_context(
                viewport={"width": width, "height": height},
                color_scheme=theme,
                locale="en-GB",
                timezone_id="UTC",
                **more,
            )
            contexts.callback(context.close)
            page = context.new_page()
            # An answer that a test alters may still be pending when the test ends; if the page were closed while the answer is
            # pending, the next test would fail.
            contexts.callback(page.unroute_all, behavior="wait")
            page.set_default_timeout(PATIENCE_MS)
            _note_faults(page, at.url, complaints)
            page.goto(at.url + part)
            return page

        yield look
    assert complaints == []
