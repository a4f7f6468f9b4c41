"""Covers the removal of what the other backend of the rules holds of ours: when, how often, and what the log says."""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Collection, Iterable

import structlog.testing

from ipvsproxy.daemon.loop.leftovers import OtherBackend
from ipvsproxy.daemon.loop.summary import SyncSummary
from ipvsproxy.kernel.base.errors import KernelError
from ipvsproxy.model.net import Family
from tests.support.summaries import summary
from tests.support.virtual_time import in_virtual_time

AUDIT_S = 30.0


class Scene:
    """A running removal. ``answers`` are those of the next attempts; the last one is that of all others, too.

    ``times`` has the time of each attempt. While ``may_end`` is not set, an attempt does not end.
    """

    def __init__(self, answers: Iterable[Collection[str] | KernelError]) -> None:
        self.subject = OtherBackend()
        self.times: list[float] = []
        self.ended = 0
        self.may_end = asyncio.Event()
        self.may_end.set()
        self._answers = list(answers)

    async def remove(self) -> Collection[str]:
        self.times.append(asyncio.get_running_loop().time())
        await self.may_end.wait()
        self.ended += 1
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        if isinstance(answer, KernelError):
            raise answer
        return answer

    @property
    def reasons(self) -> list[str]:
        return list(self.subject.reasons)

    async def sync(self, one: SyncSummary, then_s: float = 1) -> None:
        """Let a sync end, and time pass."""
        self.subject.synced(one)
        await asyncio.sleep(then_s)


@contextlib.asynccontextmanager
async def scene(*answers: Collection[str] | KernelError) -> AsyncIterator[Scene]:
    one = Scene(answers or ((),))
    running = asyncio.create_task(one.subject.run(one.remove))
    yield one
    assert not running.done()
    running.cancel()


@in_virtual_time
async def test_it_goes_once_ours_is_in_force_and_a_failure_is_repeated() -> None:
    with structlog.testing.capture_logs() as logs:
        async with scene(KernelError(action="remove", detail="busy"), ("KUBE-CLUSTER-IP",), ()) as node:
            for one in (summary(lacking=[Family.IPV4]), summary(unserved=[Family.IPV6]), summary(incomplete=[Family.IPV4])):
                await node.sync(one)
            assert node.times == []
            assert node.reasons == []
            await node.sync(summary(), 0.1)
            assert node.reasons == ["what the other backend holds of ours stays: remove: busy"]
            for _ in range(20):
                await node.sync(summary(), 0.01)
            assert len(node.times) == 1, "syncs do not shorten the pause"
            await asyncio.sleep(AUDIT_S)
            assert node.reasons == []
            pauses = [round(later - earlier) for earlier, later in itertools.pairwise(node.times)]
            assert pauses == [1, 2], "without another sync"
    assert [line["event"] for line in logs] == ["other_backend_not_removed"]


@in_virtual_time
async def test_sets_that_stay_in_use_are_told_once() -> None:
    used = "a rule still uses A, B, C and 2 other sets"
    with structlog.testing.capture_logs() as logs:
        async with scene(("A", "B", "C", "D", "E")) as node:
            for _ in range(20):
                await node.sync(summary(), AUDIT_S)
            assert node.reasons == [f"what the other backend holds of ours stays: {used}"]
    assert [(line["event"], line["error"]) for line in logs] == [("other_backend_not_removed", used)]


@in_virtual_time
async def test_what_comes_back_is_removed_after_the_next_audit_in_force() -> None:
    removals: list[int] = []
    async with scene() as node:
        for one in (
            summary(),
            summary(),
            summary(is_audit=True),
            summary(),
            summary(is_audit=True, lacking=[Family.IPV6]),
            summary(),
            summary(),
        ):
            await node.sync(one)
            removals.append(len(node.times))
    assert removals == [1, 1, 2, 2, 2, 3, 3], "after an audit that found rules missing, once they are in force"
