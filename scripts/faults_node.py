"""Each act of a start fails, one start for each; started by ``scripts/faults``. Exit status 1 when anything was wrong."""

import argparse
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests.faults import starts


def main() -> int:
    """Run the starts, and print a line for each."""
    arguments = _parse()
    verdicts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as name, starts.Node(Path(name)) as node:
        chosen = [order for order in starts.orders(node.start(None).acts) if arguments.only in order.name]
        print(f"{len(chosen)} starts", flush=True)
        for order in chosen[arguments.first :: arguments.every]:
            began_s = time.monotonic()
            ending = node.start(order)
            wrong = starts.judge(order, ending)
            what = (
                "wrong" if wrong else "not met with" if not ending.has_failed else "ended" if ending.status is not None else "ok"
            )
            verdicts[what] += 1
            when = f"time {order.time}" if order.time else "each time"
            print(f"{what:12} {time.monotonic() - began_s:5.1f} s  {order.name}: {order.failure}, {when}", flush=True)
            for sentence in wrong:
                print(f"    {sentence}", flush=True)
            if what == "ended" or arguments.log:
                print(
                    *(f"    {line}" for line in (ending.log.splitlines() if arguments.log else ending.warnings)),
                    sep="\n",
                    flush=True,
                )
    print(", ".join(f"{what}: {count}" for what, count in verdicts.items()))
    return 1 if verdicts["wrong"] else 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/faults", description="Let each act of a start fail, on a node that serves.")
    parser.add_argument("--only", default="", metavar="TEXT", help="acts whose name holds this text")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="each Nth start only (default: %(default)s)")
    parser.add_argument("--first", type=int, default=0, metavar="N", help="leave out so many at the beginning")
    parser.add_argument("--log", action="store_true", help="print the log of each start")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
