"""Several requests share counters that were read only once.

``test_traffic.py`` covers what happens if reading the counters takes too long, fails, or is continued later.
"""

import asyncio

from ipvsproxy.daemon.metrics.figures import FRESH_S, Sampler
from ipvsproxy.kernel.thread import KernelThread
from ipvsproxy.model.virtual_servers import Counters
from tests.daemon.metrics.test_traffic import CLUSTER, EXTERNAL, Ipvs
from tests.support.memory_node import InlineExecutor
from tests.support.summaries import Clock


async def test_the_counters_are_read_only_once_for_all_requests_within_a_short_time() -> None:
    clock, kernel = Clock(), Ipvs()
    kernel.counters = {CLUSTER: Counters(1), EXTERNAL: Counters(2)}
    sampler = Sampler(KernelThread(InlineExecutor(), kernel), clock)
    one, other = await asyncio.gather(sampler.read(), sampler.read())
    assert one is other
    assert one.counters == kernel.counters
    clock.now += FRESH_S / 2
    assert await sampler.read() is one
    assert kernel.readings == 1
    clock.now += FRESH_S / 2
    assert await sampler.read() is not one
    assert kernel.readings == 2


async def test_the_sampler_reads_a_virtual_server_with_zero_counters_only_if_requested() -> None:
    kernel = Ipvs()
    kernel.counters = {CLUSTER: Counters(), EXTERNAL: Counters()}
    sampler = Sampler(KernelThread(InlineExecutor(), kernel), Clock())
    sampler.always = {CLUSTER}
    assert (await sampler.read()).counters == {CLUSTER: Counters()}
