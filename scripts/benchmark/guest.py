"""Runs measurements on the present kernel, each in a new network namespace, and prints each result.

    scripts/kernel .venv/bin/python -m scripts.benchmark.guest '[["cold", {"pages": [10000, 10]}], …]'

Each measurement is a list of a name (a key of ``MEASUREMENTS`` in measure.py) and the arguments. The argument ``pages`` is the
number of Services, the number of endpoints of each Service, and optionally the number of nodes; ``recording`` is the name of a
file. The measurement ``restart`` gets no new namespace: it runs in the namespace of the previous measurement, and begins with the
state that is left there. A measurement that takes longer than ``limit_s`` is stopped. After a measurement was stopped, later
measurements with the same size and flags, or with the same ``recording``, are not started. Each line of output is a JSON object.
The object holds a result, or only ``error`` (a text), or only ``stopped_s`` (the number of seconds after which the measurement
was stopped).
"""

import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from typing import Any

from scripts.benchmark import cases

NAMESPACE = "benchmark"
IDLE_SHARE = 0.9
LONGEST_REST_S = 30.0


def main() -> None:
    """Run the measurements that the first command-line argument lists as JSON."""
    with tempfile.TemporaryDirectory() as directory:
        run(pathlib.Path(directory))


def run(directory: pathlib.Path) -> None:
    """Does the work of ``main``, with a given directory for intermediate files."""
    quiet("ip", "link", "set", "lo", "up")
    stopped: dict[str, dict[str, Any]] = {}
    for what, arguments in json.loads(sys.argv[1]):
        names = same_names(arguments)
        if before := next((stopped[name] for name in names if name in stopped), None):
            print_result(before)
            continue
        if what not in ("restart", *cases.WITHOUT_KERNEL):
            quiet("ip", "netns", "del", NAMESPACE)
            rest()
            quiet("ip", "netns", "add", NAMESPACE)
            quiet("ip", "-n", NAMESPACE, "link", "set", "lo", "up")
        given = dict(arguments)
        inner = given["arguments"] if what == "own" else given
        if "pages" in inner:
            inner["pages"] = str(pages(directory, *inner["pages"]))
        if "recording" in given:
            given["recording"] = str(directory / given["recording"])
        result = measure(what, given, directory)
        if "stopped_s" in result:
            stopped |= dict.fromkeys(names, result)
        print_result(result)


def same_names(arguments: Mapping[str, Any]) -> list[str]:
    """Returns at most two names for a measurement: one for its size and flags, and one for the recording that it uses.

    If a measurement was stopped, measurements that share a name with it are not run, because they would be similarly slow.
    """
    alike = [json.dumps([arguments["pages"], arguments.get("flags")])] if "pages" in arguments else []
    return alike + ([arguments["recording"]] if "recording" in arguments else [])


def print_result(result: Mapping[str, Any]) -> None:
    """Print a result as one line of JSON, and flush the output at once."""
    sys.stdout.write(json.dumps(result) + "\n")
    sys.stdout.flush()


def measure(what: str, arguments: dict[str, Any], directory: pathlib.Path) -> dict[str, Any]:
    """Run one measurement in the namespace."""
    log = directory / "log"
    limit_s = arguments.pop("limit_s", None)
    # Measurements that send nothing to the kernel need no new namespace, because they leave no objects in the namespace of this
    # process.
    inside = [] if what in cases.WITHOUT_KERNEL else ["ip", "netns", "exec", NAMESPACE]
    command = [*inside, sys.executable, "-m", "scripts.benchmark.measure", what, json.dumps(arguments)]
    if profile := os.environ.get("IPVSPROXY_PROFILE"):
        command[len(inside) + 1 : len(inside) + 2] = ["-m", "cProfile", "-o", profile, "-m"]
    with log.open("w") as opened:
        try:
            done = subprocess.run(command, stdout=subprocess.PIPE, stderr=opened, text=True, check=False, timeout=limit_s)
        except subprocess.TimeoutExpired:
            return {"stopped_s": limit_s}
    if done.returncode:
        return {"error": f"ended with status {done.returncode}: {log.read_text()[-4000:]}"}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def pages(directory: pathlib.Path, *size: int) -> pathlib.Path:
    """Returns the directory with the API server's list pages for a cluster of this size.

    Makes the pages if the directory does not exist.
    """
    numbers = list(map(str, size))
    folder = directory / "-".join(["pages", *numbers])
    if not folder.exists():
        folder.mkdir()
        command = [sys.executable, "-m", "scripts.benchmark.workload", str(folder), *numbers]
        subprocess.run(command, check=True)
    return folder


def quiet(*command: str) -> None:
    """Run a command, and ignore its result."""
    subprocess.run(command, check=False, capture_output=True)


def rest() -> None:
    """Wait until the kernel's threads have cleaned up the previous namespace."""
    deadline_s = time.monotonic() + LONGEST_REST_S
    calm = 0
    while calm < 2 and time.monotonic() < deadline_s:  # noqa: PLR2004 - one idle interval may be a coincidence
        before = processor_times()
        time.sleep(0.3)
        spent = [after - then for after, then in zip(processor_times(), before, strict=True)]
        calm = calm + 1 if spent[3] >= IDLE_SHARE * sum(spent) else 0


def processor_times() -> list[int]:
    """Returns the processor times (user, nice, system, idle, and so on) in ticks, summed over all processors."""
    return [int(word) for word in pathlib.Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:8]]


if __name__ == "__main__":
    main()
