"""Functions that apply operations to a driver and return the outcomes, and a function that runs a program."""

import subprocess
from collections.abc import Sequence
from typing import Protocol

from ipvsproxy.model.plan import Item, Operation, Outcome, Verb
from ipvsproxy.model.sets import SetEntries, SetEntry


class Driver(Protocol):
    """A driver of one kind of objects, or a ``NodeKernel`` or ``FakeKernel``, which applies operations on all kinds."""

    def apply(self, operations: Sequence[Operation]) -> list[Outcome]: ...


def operations(verb: Verb, *items: Item | SetEntry) -> list[Operation]:
    return [Operation(verb, SetEntries.of(item) if isinstance(item, SetEntry) else item) for item in items]


def apply(driver: Driver, verb: Verb, *items: Item | SetEntry) -> list[Outcome]:
    return driver.apply(operations(verb, *items))


def result(driver: Driver, verb: Verb, item: Item | SetEntry) -> tuple[str, bool]:
    """The error of one operation, and whether the object was unexpectedly present or absent."""
    (outcome,) = apply(driver, verb, item)
    return outcome.error, outcome.surprise


def clean(outcomes: Sequence[Outcome]) -> bool:
    return not any(outcome.error or outcome.surprise for outcome in outcomes)


def run(*command: str, stdin: str = "") -> str:
    """Run a program, and return its output."""
    return subprocess.run(command, input=stdin, check=True, capture_output=True, text=True).stdout
