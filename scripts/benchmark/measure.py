"""The measurements. Each measurement runs in a separate process and network namespace, and prints one line of JSON.

python -m scripts.benchmark.measure WHAT '{"argument": …}'
"""

import asyncio
import gc
import json
import pathlib
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ipvsproxy.daemon.base import log as logs
from scripts.benchmark import api, beside, meter, pretence, program, steady, viewer, workload
from scripts.benchmark import flows as tracked
from scripts.benchmark import recording as recordings
from scripts.benchmark.figures import by_part

Figures = dict[str, Any]
FEW_FLOWS = 10_000


def cold(pages: str, recording: str = "", *, times: bool = True, flags: Sequence[str] = ()) -> Figures:
    """Measures the time from the first byte of the lists until everything is programmed.

    ``recording`` and ``times`` each cost a tenth of a second. ``flags`` are additional flags of the program.
    """
    measured = meter.Meter()
    measured.times = times
    if recording:
        measured.recording = recordings.Recording(pathlib.Path(recording))
    before_mb = meter.resident_mb()
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt

    async def run() -> Figures:
        began_cpu_s = time.process_time()
        async with program.running(api.MemoryApi(pathlib.Path(pages)), *flags) as running:
            first = running.watching.syncs[0]
            gone_s = first.ended_s - running.api.first_byte_s
            return {
                "wall_s": gone_s,
                "cpu_s": time.process_time() - began_cpu_s,
                "operations": sum(first.summary.report.done.values()),
                "failed": sum(first.summary.report.failed.values()),
                "pending": first.summary.report.pending,
                "imported_mb": before_mb,
                "resident_mb": meter.resident_mb(),
                "peak_mb": meter.resident_mb("VmHWM"),
                "collections": [one["collections"] for one in gc.get_stats()],
                "page_faults": resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults,
            }

    figures = asyncio.run(run())
    if measured.recording:
        measured.recording.close()
    return figures | measured.figures()


def restart(pages: str, flags: Sequence[str] = ()) -> Figures:
    """Measures the same as ``cold``, on a kernel that already has all objects."""
    return cold(pages, flags=flags)


def own(what: str, arguments: Figures) -> Figures:
    """Runs the measurement ``what`` without a kernel, to get the program's own time."""
    with pretence.kernel():
        found: Figures = MEASUREMENTS[what](**arguments)
    return found


def replay(recording: str) -> Figures:
    """Measures the time that the kernel alone takes for recorded messages and rules.

    A minimal loop sends recorded messages from a file, and runs one iptables-restore. ``parts`` has the times of the recording's
    steps.
    """
    chunks, rules = recordings.read(pathlib.Path(recording))
    sockets = {}
    for protocol in sorted({protocol for protocol, _, _ in chunks}):
        sockets[protocol] = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, protocol)
        sockets[protocol].setsockopt(socket.SOL_SOCKET, 32, 4 << 20)  # SO_SNDBUFFORCE
        sockets[protocol].setsockopt(socket.SOL_SOCKET, 33, 4 << 20)  # SO_RCVBUFFORCE
        sockets[protocol].bind((0, 0))
    spent = dict.fromkeys(sockets, 0.0)
    steps = dict.fromkeys((step for _, _, step in chunks), 0.0)
    buffer = bytearray(65536)
    began = time.perf_counter()
    for protocol, data, step in chunks:
        one = sockets[protocol]
        at = time.perf_counter()
        one.send(data)
        one.recv_into(buffer)
        took_s = time.perf_counter() - at
        spent[protocol] += took_s
        steps[step] += took_s
    netlink_s = time.perf_counter() - began
    at = time.perf_counter()
    for command, *arguments, text in rules[:1]:
        subprocess.run([command, *arguments], input=text, text=True, check=True, capture_output=True)
    return {
        "wall_s": time.perf_counter() - began,
        "netlink_s": netlink_s,
        "rules_s": time.perf_counter() - at,
        **{meter.PROTOCOLS[protocol]: seconds for protocol, seconds in spent.items()},
        "sends": len(chunks),
        "bytes": sum(len(data) for _, data, _ in chunks),
        "parts": by_part(steps),
    }


def tools(services: int, endpoints: int) -> Figures:
    """Measures ``ipvsadm -R`` and ``ipset restore`` with the same virtual servers, real servers and set entries."""
    rules, entries = [], ["create KUBE-CLUSTER-IP hash:ip,port family inet hashsize 1024 maxelem 65536"]
    for number in range(services):
        address = workload.cluster_address(number)
        rules.append(f"-A -t {address}:80 -s rr")
        rules += [
            f"-a -t {address}:80 -r {workload.pod_address(number * endpoints + pod)}:8080 -m -w 1" for pod in range(endpoints)
        ]
        entries.append(f"add KUBE-CLUSTER-IP {address},tcp:80")
    found = {}
    for name, command, lines in (("ipvsadm_s", ("ipvsadm", "-R"), rules), ("ipset_s", ("ipset", "restore"), entries)):
        began_s = time.perf_counter()
        subprocess.run(command, input="\n".join(lines) + "\n", text=True, check=True, capture_output=True)
        found[name] = time.perf_counter() - began_s
    return found


def flows(flows: int) -> Figures:
    """Measures the deletion of one endpoint's flows, first among ``flows`` / 10 tracked flows, then among ``flows``.

    The figure ``grown_mb`` is the growth of the process's largest resident memory during the clean-up.
    """
    tracked.clean(FEW_FLOWS)
    first_mb = meter.resident_mb("VmHWM")
    tenth = tracked.clean(flows // 10)
    then_mb = meter.resident_mb("VmHWM")
    everything = tracked.clean(flows)
    return {
        "tenth": tenth | {"grown_mb": then_mb - first_mb},
        "all": everything | {"grown_mb": meter.resident_mb("VmHWM") - then_mb},
    }


MEASUREMENTS: Mapping[str, Callable[..., Figures]] = {
    "cold": cold,
    "restart": restart,
    "own": own,
    "replay": replay,
    "steady": steady.measure,
    "tools": tools,
    "beside": beside.run,
    "launch": beside.launch,
    "viewer": viewer.measure,
    "flows": flows,
}


if __name__ == "__main__":
    logs.set_up(json=False, verbosity=2)
    sys.stdout.write(json.dumps(MEASUREMENTS[sys.argv[1]](**json.loads(sys.argv[2]))) + "\n")
