"""Starts ipvsproxy many times, and lets a different operation of the start fail each time; started by ``scripts/faults``.

The exit status is 1 if a start broke a rule of ``starts.judge``.
"""

import argparse
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests.faults import starts


def main() -> int:
    """Start ipvsproxy once for each chosen failure, and print one line for each start."""
    arguments = _parse()
    verdicts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as name, starts.Node(Path(name)) as node:
        chosen = [order for order in starts.orders(node.start().acts) if arguments.only in order.name]
        print(f"{len(chosen)} starts", flush=True)
        for order in chosen[arguments.first :: arguments.every]:
            began_s = time.monotonic()
            ending = node.start(order)
            wrong = starts.judge([order], ending)
            verdict = "wrong" if wrong else "not reached" if not ending.failed else "ended" if ending.status is not None else "ok"
            verdicts[verdict] += 1
            when = f"time {order.time}" if order.time else "each time"
            print(f"{verdict:12} {time.monotonic() - began_s:5.1f} s  {order.name}: {order.failure}, {when}", flush=True)
            for sentence in wrong:
                print(f"    {sentence}", flush=True)
            if verdict == "ended" or arguments.log:
                print(
                    *(f"    {line}" for line in (ending.log.splitlines() if arguments.log else ending.warnings)),
                    sep="\n",
                    flush=True,
                )
    print(", ".join(f"{verdict}: {count}" for verdict, count in verdicts.items()))
    return 1 if verdicts["wrong"] else 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/faults",
        description="Fail each act of a start, on a serving node. An act is an interaction with the system.",
    )
    parser.add_argument("--only", default="", metavar="TEXT", help="only acts whose name contains this text")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="only every Nth start (default: %(default)s)")
    parser.add_argument("--first", type=int, default=0, metavar="N", help="skip the first N starts")
    parser.add_argument("--log", action="store_true", help="print the log of each start")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
