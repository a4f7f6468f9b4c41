"""What happens in a history, from its number and a seed: the steps by chance, the kinds of drift and of faults in turn.

Kinds go round from one history to the next, so that all have come up after a known number of histories of the same length.
"""

import random
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeVar

from tests.chaos import drift
from tests.chaos.faults import Kind

T = TypeVar("T")

STEPS: Mapping[str, int] = {"change": 4, "kill": 4, "trouble": 2, "lock": 1}
"""What a history is made of besides drift and kernel faults, with weights."""
DRIFT_SHARE = 0.4
FAULT_SHARE = 0.2
"""Of all steps, but at least one."""


class Plan(NamedTuple):
    """``steps`` in their order; ``drifts`` and ``faults`` are the kinds of those among them."""

    steps: list[str]
    drifts: list[drift.Drift]
    faults: list[Kind]


def draw(seed: int, number: int, length: int) -> Plan:
    """The plan of the history of this number that has so many steps."""
    drifts, faults = (max(1, round(length * share)) for share in (DRIFT_SHARE, FAULT_SHARE))
    dice = random.Random(f"{seed}:{number}:plan")
    others = dice.choices(list(STEPS), list(STEPS.values()), k=max(0, length - drifts - faults))
    steps = [*others, *["drift"] * drifts, *["fault"] * faults][:length]
    dice.shuffle(steps)
    return Plan(steps, _in_turn(seed, number, drift.DRIFTS, drifts), _in_turn(seed, number, list(Kind), faults))


def _in_turn(seed: int, number: int, kinds: Sequence[T], count: int) -> list[T]:
    order = random.Random(f"{seed}:order").sample(kinds, len(kinds))
    return [order[place % len(order)] for place in range(number * count, (number + 1) * count)]
