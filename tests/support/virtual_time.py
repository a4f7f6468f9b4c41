"""An event loop whose clock jumps: if nothing is ready to run, the clock advances to the next timer at once.

Because the clock jumps, tests never really wait.
"""

import asyncio
import functools
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec

P = ParamSpec("P")

BEGIN_S = 1000.0
_LEAST_S = 1e-6
"""The smallest step of the clock: a smaller step may leave the time unchanged."""


class _Jump(selectors.SelectSelector):
    """A selector that advances the clock instead of waiting."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = BEGIN_S

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready and timeout is None:
            raise AssertionError("everything waits for something that will never happen")
        if not ready and timeout:
            self.now_s += max(timeout, _LEAST_S)
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock starts at ``BEGIN_S`` seconds, and jumps ahead instead of waiting."""

    def __init__(self) -> None:
        self._jump = _Jump()
        super().__init__(self._jump)

    def time(self) -> float:
        return self._jump.now_s

    def pass_time(self, seconds: float) -> None:
        """Advance the clock as if the current work took this long."""
        self._jump.now_s += seconds


def loop() -> VirtualLoop:
    """The event loop that runs the current test."""
    running = asyncio.get_running_loop()
    assert isinstance(running, VirtualLoop)
    return running


def in_virtual_time(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """Make a test function that runs this coroutine on a new ``VirtualLoop``."""

    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            runner.run(test(*args, **kwargs))

    return run
