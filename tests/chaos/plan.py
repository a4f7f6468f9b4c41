"""Chooses the steps of a history at random; the history's number and a seed determine the choice.

The order of the steps is random. But the kinds of drift follow each other in a fixed cycle. So do the kinds of faults, of
troubles, of harms, and of bad moments (see ``moments``).

The sequence of kinds continues from one history to the next. Therefore, it is known after how many histories of equal length all
kinds have occurred.
"""

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeVar

from ipvsproxy.model.rules import Backend
from tests.chaos import drift, harm
from tests.chaos.cluster import Trouble
from tests.chaos.faults import Kind
from tests.chaos.moments import Moment

T = TypeVar("T")

STEPS: Mapping[str, int] = {"change": 3, "kill": 4, "lock": 2}
"""The weights with which the remaining steps of a history are chosen from these kinds. The remaining steps are all steps except
drift, faults, troubles, moments, harms and moves (below)."""
DRIFT_SHARE = 0.4
FAULT_SHARE = 0.2
TROUBLE_SHARE = 0.15
MOMENT_SHARE = 0.15
"""The shares of drift, faults, troubles and moments (``Moment``) among the steps. Each history has at least one step of each of
these kinds."""
HARM_SHARE = 0.1
"""The share of harms (see ``harm.py``) among the steps. Histories of fewer than 10 steps contain no harms."""
DIRECTORY_EVERY = 4
"""In each group of this many successive histories, the last history gives ipvsproxy a directory of manifests. All other
histories give ipvsproxy an API server."""
DIRECTORY_TROUBLES = [Trouble.GARBAGE_FILE, Trouble.UNREADABLE_FILES]
SERVER_TROUBLES = [kind for kind in Trouble if kind not in DIRECTORY_TROUBLES]
MOMENTS: Mapping[Backend, Sequence[Moment]] = {
    Backend.IPTABLES: [kind for kind in Moment if kind is not Moment.LOCKED_MOVE],
    Backend.NFTABLES: [kind for kind in Moment if kind is not Moment.NATIVE_RULE],
}
"""The kinds of bad moments (see ``moments``) that histories with each backend may contain. ``LOCKED_MOVE`` needs nf_tables, which
the kernel may lack in tests of iptables. ``NATIVE_RULE`` hides only a table of iptables, so it does not affect the nftables
backend."""
MOVES = 2
"""How many times a history that begins with nftables moves rules and sets between the backends."""


class Plan(NamedTuple):
    """The steps in their order, and the kinds of these steps.

    ``drifts`` holds the kind of drift of each drift step, in the order of these steps. In the same way, ``harms`` and ``faults``
    hold the kinds of harms and of kernel faults. ``troubles`` holds the kinds of faults between the cluster and the program, and
    ``moments`` the kinds of temporary conditions on the node.
    """

    steps: list[str]
    has_server: bool
    drifts: Sequence[drift.Drift] = ()
    harms: Sequence[harm.Harm] = ()
    faults: Sequence[Kind] = ()
    troubles: Sequence[Trouble] = ()
    moments: Sequence[Moment] = ()


Special = Moment | harm.Harm | Trouble
KINDS: dict[str, Special] = {kind.name.lower().replace("_", "-"): kind for kind in (*Moment, *Trouble)}
KINDS |= {f"{one.when.name}-{one.drift.__name__}".lower().replace("_", "-"): one for one in harm.HARMS}
"""Bad moments, troubles and harms by their names on the command line."""


def name_of(kind: Special) -> str:
    """The name of this kind on the command line."""
    return next(name for name, one in KINDS.items() if one is kind)


def only(*kinds: Special) -> Plan:
    """A plan with one step for each of the given kinds, and no other steps."""
    return Plan(
        ["moment" if isinstance(kind, Moment) else "trouble" if isinstance(kind, Trouble) else "harm" for kind in kinds],
        has_server=not any(kind in DIRECTORY_TROUBLES for kind in kinds),
        moments=[kind for kind in kinds if isinstance(kind, Moment)],
        harms=[kind for kind in kinds if isinstance(kind, harm.Harm)],
        troubles=[kind for kind in kinds if isinstance(kind, Trouble)],
    )


def draw(seed: int, number: int, length: int, backend: Backend = Backend.IPTABLES) -> Plan:
    """The plan of the history with this number and length.

    ``backend`` is the backend that holds the rules and sets at the start of the history.
    """
    moves = MOVES if backend is Backend.NFTABLES else 0
    shares = (DRIFT_SHARE, FAULT_SHARE, TROUBLE_SHARE, MOMENT_SHARE)
    drifts, faults, troubles, moments = (max(1, int(length * share)) for share in shares)
    harms = int(length * HARM_SHARE)
    dice = random.Random(f"{seed}:{number}:plan")
    special = {"drift": drifts, "harm": harms, "fault": faults, "trouble": troubles, "moment": moments}
    others = dice.choices(list(STEPS), list(STEPS.values()), k=max(0, length - moves - sum(special.values())))
    steps = [*["move"] * moves, *others, *Counter(special).elements()][:length]
    dice.shuffle(steps)
    has_server = number % DIRECTORY_EVERY < DIRECTORY_EVERY - 1
    with_directory = number // DIRECTORY_EVERY
    of_source = number - with_directory if has_server else with_directory
    return Plan(
        steps,
        has_server,
        _in_turn(seed, number, drift.DRIFTS, drifts),
        _in_turn(seed, number, harm.HARMS, harms),
        _in_turn(seed, number, list(Kind), faults),
        _in_turn(seed, of_source, SERVER_TROUBLES if has_server else DIRECTORY_TROUBLES, troubles),
        _in_turn(seed, of_source, [kind for kind in MOMENTS[backend] if has_server or kind is not Moment.SILENT_PROXY], moments),
    )


def _in_turn(seed: int, number: int, kinds: Sequence[T], count: int) -> list[T]:
    order = random.Random(f"{seed}:order").sample(kinds, len(kinds))
    return [order[place % len(order)] for place in range(number * count, (number + 1) * count)]
