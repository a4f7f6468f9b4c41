"""Churn for a long time: a cluster that never rests, and what the process uses meanwhile."""

import random
import statistics
from collections.abc import Iterator, Sequence

from scripts.benchmark import workload
from tests.chaos.usage import Usage
from tests.chaos.world import Key, Object, key_of

FIRST_NUMBER = 2000
"""Of the Services: the addresses below belong to those of ``world``."""
PODS = 20_000
GOES = 0.02
"""The share of changes by which a Service goes."""
GROWN_MB = 4.0
"""Resident memory may be so much more in the last third than in the second: what fragments does not repeat itself exactly."""
FLAT = ("descriptors", "sockets", "threads", "tasks")


class Churn:
    """Services, each with one slice of endpoints that are replaced one by one; now and then one goes, and comes again."""

    def __init__(self, dice: random.Random, services: int, endpoints: int) -> None:
        self._dice = dice
        self._endpoints = endpoints
        self._pods = {number: [self._pod() for _ in range(endpoints)] for number in range(services)}
        self._numbers = range(services)

    def objects(self) -> Iterator[Object]:
        """All that there is at the beginning."""
        for number in self._pods:
            yield _service(number)
            yield self._slice(number)

    def change(self) -> tuple[list[Object], list[Key]]:
        """What is to be put, and what is to be deleted."""
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
    """The API server of the tests knows one namespace and sets the version."""
    versions = {"Service": "v1", "EndpointSlice": "discovery.k8s.io/v1"}
    metadata = item["metadata"] | {"namespace": "default"}
    return item | {"apiVersion": versions[kind], "kind": kind, "metadata": metadata}


def growth(samples: Sequence[Usage]) -> list[str]:
    """A sentence for each thing of which there is more in the last third of the samples than in the second.

    The first third is left out: until everything has happened once, memory grows. What listens is not judged here: it follows the
    Services.
    """
    third = len(samples) // 3
    second, last = samples[third : 2 * third], samples[2 * third :]
    if not second:
        return ["there are too few samples to tell"]
    before, after = (statistics.median(one.resident_mb for one in some) for some in (second, last))
    found = [f"resident memory grew from {before:.1f} MB to {after:.1f} MB"] if after > before + GROWN_MB else []
    for name in FLAT:
        first, final = (statistics.median(getattr(one, name) for one in some) for some in (second, last))
        if final > first:
            found.append(f"{name} grew from {first:g} to {final:g}")
    return found
