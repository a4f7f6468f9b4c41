"""Runs histories of random steps, one after the other, in one network lab; started by ``scripts/chaos``.

The exit status is 1 after a violation.
"""

import argparse
import itertools
import json
import sys
import tempfile
import time
from pathlib import Path

from ipvsproxy.model.rules import Backend
from tests.chaos import plan
from tests.chaos.figures import Figures
from tests.chaos.history import History, Violation
from tests.support import lab
from tests.support.program import ProgramError

DIRECT_RETURN_EVERY = 3
"""In each group of this many successive histories, only the last history has direct return."""


def main() -> int:
    """Run the histories, and print the figures of all histories."""
    arguments = _parse()
    figures = Figures()
    deadline_s = time.monotonic() + (arguments.seconds or float("inf"))
    numbers = itertools.count(arguments.first)
    with lab.Lab() as node:
        for number in itertools.islice(numbers, 1 if arguments.only else arguments.histories):
            if time.monotonic() > deadline_s:
                break
            _run(f"{arguments.seed}:{number}", number, node, figures, arguments)
            if arguments.json:  # the figures are written after each history, so that an interrupted run has figures, too
                arguments.json.write_text(json.dumps(figures.report(), indent=2) + "\n")
    print(*figures.lines(), sep="\n")
    return 1 if figures.violations else 0


def _run(seed: str, number: int, node: lab.Lab, figures: Figures, arguments: argparse.Namespace) -> None:
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        drawn = plan.draw(arguments.seed, number, arguments.steps, arguments.rules_backend)
        if arguments.only:
            drawn = plan.only(arguments.only)
        direct_return = arguments.direct_return or number % DIRECT_RETURN_EVERY == DIRECT_RETURN_EVERY - 1
        history = History(
            drawn,
            seed,
            node,
            Path(name),
            figures,
            quick=arguments.quick,
            backend=arguments.rules_backend,
            direct_return=direct_return,
        )
        try:
            history.run()
            verdict = "ok"
        except (Violation, ProgramError) as violation:
            again = f"scripts/chaos --seed {arguments.seed} --first {number} --histories 1 --steps {arguments.steps}"
            again += f" --rules-backend={arguments.rules_backend}"
            again += " --direct-return" if direct_return else ""
            again += f" --only={plan.name_of(arguments.only)}" if arguments.only else ""
            figures.violations.append(str(violation))
            verdict = f"VIOLATION: {violation}\n  repeat it: {again}"
    figures.histories += 1
    print(f"history {number}: {len(history.diary)} events, {time.monotonic() - began_s:.0f} s, {verdict}", flush=True)
    if arguments.diary:
        print(*history.diary, sep="\n", flush=True)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/chaos", description="Run random histories on a real kernel.")
    parser.add_argument("--seed", type=int, default=1, help="determines the histories (default: %(default)s)")
    parser.add_argument("--histories", type=int, default=5, help="number of histories (default: %(default)s)")
    parser.add_argument("--first", type=int, default=0, help="number of the first history, to repeat a later one")
    parser.add_argument("--steps", type=int, default=15, help="steps of each history (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=0, help="begin no further history after this time (default: no limit)")
    parser.add_argument(
        "--rules-backend",
        type=Backend,
        choices=(Backend.IPTABLES, Backend.NFTABLES),
        default=Backend.IPTABLES,
        help="what holds rules and sets at first (default: %(default)s); with nftables, reloads move them there and back",
    )
    parser.add_argument(
        "--only",
        type=plan.KINDS.__getitem__,
        metavar="KIND",
        help="instead of drawn steps, run this bad moment, trouble or harm alone: " + ", ".join(plan.KINDS),
    )
    parser.add_argument("--direct-return", action="store_true", help="turn direct return on (default: in some of the histories)")
    parser.add_argument("--quick", action="store_true", help="run verify only at the end of each history")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to this file, after each history")
    parser.add_argument("--diary", action="store_true", help="print the events of each history")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
