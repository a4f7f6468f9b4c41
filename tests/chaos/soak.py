"""The parts of a long soak test: constant changes of a cluster, and a search for resources whose usage grows."""

import random
import statistics
from collections.abc import Iterator, Sequence

from scripts.benchmark import workload
from tests.chaos.usage import Usage
from tests.chaos.world import Key, Object, key_of

FIRST_NUMBER = 2000
"""The number of the first Service. ``workload`` makes the Service's name and address from this number; ``world`` uses lower
numbers."""
PODS = 20_000
GOES = 0.02
"""The share of changes that delete a Service."""
GROWN_MB = 4.0
"""The allowed growth of resident memory from the second third of the samples to the last third. Some growth is allowed because
fragmentation varies."""
FLAT = ("descriptors", "sockets", "threads", "tasks")


class Churn:
    """Services with one EndpointSlice each, whose endpoints are replaced one by one.

    Sometimes a Service is deleted and added again.
    """

    def __init__(self, dice: random.Random, services: int, endpoints: int) -> None:
        self._dice = dice
        self._endpoints = endpoints
        self._pods = {number: [self._pod() for _ in range(endpoints)] for number in range(services)}
        self._numbers = range(services)

    def objects(self) -> Iterator[Object]:
        """All objects of the cluster at the beginning."""
        for number in self._pods:
            yield _service(number)
            yield self._slice(number)

    def change(self) -> tuple[list[Object], list[Key]]:
        """The next change: objects to put, and keys to delete."""
        number = self._dice.choice(self._numbers)
        if number not in self._pods:
            self._pods[number] = [self._pod() for _ in range(self._endpoints)]
            return [_service(number), self._slice(number)], []
        if self._dice.random() < GOES:
            gone = [key_of(_service(number)), key_of(self._slice(number))]
            del self._pods[number]
            return [], gone
        self._pods[number][self._dice.randrange(self._endpoints)] = self._pod()
        return [self._slice(number)], []

    def _pod(self) -> int:
        return self._dice.randrange(PODS)

    def _slice(self, number: int) -> Object:
        pods = sorted(set(self._pods[number]))
        return _ours("EndpointSlice", workload.endpoint_slice(FIRST_NUMBER + number, 0, pods))


def _service(number: int) -> Object:
    return _ours("Service", workload.service(FIRST_NUMBER + number))


def _ours(kind: str, item: Object) -> Object:
    """Adapt an object to the tests' API server, which has one namespace and sets the version."""
    versions = {"Service": "v1", "EndpointSlice": "discovery.k8s.io/v1"}
    metadata = item["metadata"] | {"namespace": "default"}
    return item | {"apiVersion": versions[kind], "kind": kind, "metadata": metadata}


def growth(samples: Sequence[Usage]) -> list[str]:
    """A sentence for each resource whose usage grew from the second third of the samples to the last third.

    The first third is ignored, because memory grows until each kind of change has happened once. Listening sockets are ignored,
    because their number follows the number of Services.
    """
    third = len(samples) // 3
    second, last = samples[third : 2 * third], samples[2 * third :]
    if not second:
        return ["there are too few samples to tell"]
    before, after = (statistics.median(one.resident_mb for one in some) for some in (second, last))
    grown = [f"resident memory grew from {before:.1f} MB to {after:.1f} MB"] if after > before + GROWN_MB else []
    for name in FLAT:
        first, final = (statistics.median(getattr(one, name) for one in some) for some in (second, last))
        if final > first:
            grown.append(f"{name} grew from {first:g} to {final:g}")
    return grown
