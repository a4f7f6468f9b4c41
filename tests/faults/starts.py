"""Starts of the real program on a node that an earlier start has programmed.

In each start, some interactions with the system fail (see ``acts.py``).

Before each start, the tests remove one virtual server, one of our set entries, one of our addresses and one of our rules, so that
the start must also write to the kernel. All other objects must stay while the program runs.
"""

import contextlib
import json
import os
import re
import time
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, Self

from tests.faults import acts
from tests.support import cluster, golden_state, patience
from tests.support.commands import run
from tests.support.forked import Forked
from tests.support.golden_http import fetch

SYNC_PERIOD_S = 1
WITHIN_S = patience.seconds(90.0)
"""The longest wait in seconds until everything is in force, if each failing act fails only once. The wait includes a start, the
end of a hanging process, and two attempts."""
SHOWN_WITHIN_S = patience.seconds(120.0)
"""The longest wait, in seconds, for the report of a fault, or for the end of a start whose attempts all fail."""
TOLD_WITHIN_S = 1.0
"""The pause in seconds before the test looks for reports of a permanent failure. The test makes this pause only if everything is
in force in spite of the failure."""
TRIES = 3
"""The number of times that a failed step of the start is repeated in these tests, with pauses of 0.7 s in total. A usual start
repeats the step for 21 s."""
POLL_S = 0.1
SECTIONS = ("virtual_servers", "ipsets", "iptables", "addresses")
FLAGS = (
    "--proxy-mode=ipvs",
    "--hostname-override=node-a",
    "--cluster-cidr=10.244.0.0/16,fd00:10:244::/56",
    "--conntrack-max-per-core=0",
    f"--ipvs-sync-period={SYNC_PERIOD_S}s",
)
TAKEN = "TCP 10.96.0.12:80"
"""The virtual server that is removed before each start."""
FOREIGN = "TCP 192.0.2.200:80"
CANNOT_START = 2
SHARED = "iptables "
"""The prefix of the names of rules in ``Ending.lacking``. If a rule is missing, the node must be unhealthy, because all Services
need the rules."""
LISTING = "-save"
"""The suffix of the names of acts that list rules."""
RECORD = "file /sys/class/net/tunl0/ifalias"
"""The act that reads ipvsproxy's record of the settings that direct return has changed. If this act fails, rules guard the tunnel
device until the next start."""
SHOWING = re.compile(r"^(ipvsproxy_(?:pending|unreadable_parts)\b\S*) (?!0(?:\.0)?$)", re.MULTILINE)
"""Matches each metric that is not 0 and therefore reports that something is not in force or cannot be read."""


class Ending(NamedTuple):
    """The result of one start.

    ``status`` is the exit status of a process that has ended; None means that the process is running. ``missing`` are virtual
    servers that the start removed. ``removing`` are the acts that removed something from IPVS. ``lacking`` are the objects that
    are not programmed at the end. ``shown`` are the metrics that report unreadable objects, or objects that are not programmed.
    ``warnings`` are the log lines at the levels warning and error.
    """

    acts: Sequence[acts.Act]
    status: int | None
    missing: Sequence[str]
    removing: Sequence[str]
    lacking: Sequence[str]
    is_healthy: bool
    shown: Sequence[str]
    warnings: Sequence[str]
    log: str
    duration_s: float

    @property
    def failed(self) -> frozenset[str]:
        """The names of the acts that have failed because a test ordered the failure."""
        return frozenset(act.name for act in self.acts if act.failed)


class Node:
    """A node whose kernel has all objects of its Services.

    As a context manager, this class programs the node, and removes everything at the end.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._manifests = directory / "manifests"
        self._cleaning = contextlib.ExitStack()
        self._numbers = iter(range(1, 1 << 30))

    def __enter__(self) -> Self:
        golden_state.clear_state()
        self._cleaning.callback(golden_state.clear_state)
        self._cleaning.callback(golden_state.unprepare_sysctls)  # restores sysctls that new network namespaces inherit
        _ip(
            "link add eth0 type dummy",
            "address add 172.18.0.2/16 dev eth0",
            "address add fc00:f853:ccd::2/64 dev eth0 nodad",
            "link set eth0 up",
        )
        self._cleaning.callback(_ip, "link delete eth0")
        run("ipvsadm", "-A", "-t", "192.0.2.200:80", "-s", "rr")
        self._manifests.mkdir()
        for number, item in enumerate(_objects()):
            (self._manifests / f"{number}.json").write_text(json.dumps(item))
        self.start(spoiled=False, within_s=300)
        self.desired = golden_state.read_state(SECTIONS)
        assert {TAKEN, FOREIGN} <= self.desired["virtual_servers"].keys(), self.desired["virtual_servers"]
        self._spoil()
        self._kept = cluster.ipvs_table().keys()
        return self

    def __exit__(self, *_: object) -> None:
        self._cleaning.close()

    def start(self, *orders: acts.Order, spoiled: bool = True, within_s: float = WITHIN_S) -> Ending:
        """Start the program, and let the acts in ``orders`` fail.

        End the program as soon as everything is programmed or a fault is reported.
        """
        if spoiled:
            if self._missing():  # the previous start has removed objects
                self.start(spoiled=False)
            self._spoil()
        number = next(self._numbers)
        log, written = (self._directory / f"{name}-{number}" for name in ("log", "acts"))
        began_s = time.monotonic()
        flags = [*FLAGS, f"--manifests={self._manifests}"]
        with log.open("wb") as output:
            process = Forked(_program, flags, str(written), orders, output=output.fileno(), environment=os.environ)
        lacking: Sequence[str] = ["anything"]
        is_permanent = any(order.time == 0 for order in orders)
        missing: set[str] = set()
        deadline_s = began_s + (SHOWN_WITHIN_S if is_permanent else within_s)
        is_healthy = False
        try:
            while process.poll() is None and time.monotonic() < deadline_s:
                time.sleep(POLL_S)
                missing |= self._missing() if spoiled else frozenset()
                if b"event=synced" not in log.read_bytes():
                    continue
                if not (lacking := self._lacking(orders) if spoiled else []):
                    break
                if is_permanent and not silent_signs(lacking, _health(), _shown(), _warnings(log.read_text())):
                    break
            if is_permanent and process.poll() is None and not lacking:
                time.sleep(TOLD_WITHIN_S)
            is_healthy = process.poll() is None and _health()
            shown = _shown() if process.poll() is None else []
        finally:
            status = process.poll()
            process.kill()
            process.wait()
        if spoiled:
            lacking = lacking and self._lacking(orders)
            missing |= self._missing()
        done = acts.read(written)
        text = log.read_text()
        removing = [act.name for act in done if act.removes]
        return Ending(
            done, status, sorted(missing), removing, lacking, is_healthy, shown, _warnings(text), text, time.monotonic() - began_s
        )

    def _spoil(self) -> None:
        run("ipvsadm", "--restore", stdin=f"-D -t {TAKEN.split()[1]}\n", check=False)
        run("ipset", "restore", stdin="del KUBE-CLUSTER-IP 10.96.0.12,tcp:80\n", check=False)
        run("ip", "address", "del", "10.96.0.12/32", "dev", "kube-ipvs0", check=False)
        for program in ("iptables", "ip6tables"):
            run(f"{program}-restore", "--noflush", stdin="*nat\n-F KUBE-POSTROUTING\nCOMMIT\n", check=False)

    def _missing(self) -> frozenset[str]:
        return frozenset(f"{protocol} {address}:{port}" for protocol, address, port in self._kept - cluster.ipvs_table().keys())

    def _lacking(self, orders: Collection[acts.Order]) -> list[str]:
        """The names of objects that still differ from the desired state after a start with these failures.

        Differences that such failures may cause are left out.

        If rules can never be listed, a jump may exist twice; the second jump does not change how packets are treated. If the
        record of direct return cannot be read, additional chains and rules may guard a tunnel device.
        """
        hides_rules = any(order.time == 0 and order.name.endswith(LISTING) for order in orders)
        guards_tunnels = any(order.name == RECORD for order in orders)
        differing = golden_state.differences(self.desired, golden_state.read_state(SECTIONS), SECTIONS)
        return [
            f"{section}: {row}"
            for section, rows in differing.items()
            for row, kind, desired, observed in rows
            if not (hides_rules and section.startswith("iptables ") and (desired, observed) == (1, 2))
            if not (guards_tunnels and section.startswith("iptables ") and kind == "extra")
        ]


def judge(orders: Collection[acts.Order], ending: Ending) -> list[str]:
    """A sentence for each of these rules that the start has broken.

    Rule 1: no object of an existing Service is removed, and nothing is removed from IPVS, whatever fails, however often.
    Rule 2: if acts fail only once, all objects are programmed in the end, and the process continues.
    Rule 3: while an act always fails, a metric and at least one log line report the objects that are not programmed.
    Rule 4: if an object that all Services need is not programmed, ``/healthz`` reports the fault too. A missing object of one
    Service does not make the node unhealthy, because taking the node out of load balancers would hurt all other Services.
    Rule 5: a process may end if it cannot start because an act always fails. It must log the reason, and must have
    programmed nothing. The kernel continues to serve, and anyone can see that the process has ended.
    """
    is_permanent = any(order.time == 0 for order in orders)
    wrong = []
    if ending.missing:
        wrong.append(f"virtual servers have gone: {', '.join(ending.missing)}")
    if ending.removing:
        wrong.append(f"something was taken out of IPVS: {', '.join(ending.removing)}")
    if ending.status is not None:
        is_clear = ending.status == CANNOT_START and any("nothing was programmed" in line for line in ending.warnings)
        if not is_permanent or not is_clear:
            wrong.append(f"the process has ended with status {ending.status}: {' | '.join(ending.warnings)[-600:]}")
        return wrong
    if ending.lacking and not is_permanent:
        wrong.append(f"not in force within {WITHIN_S:.0f} s: {'; '.join(ending.lacking[:3])}")
    if ending.lacking and is_permanent:
        silent = silent_signs(ending.lacking, ending.is_healthy, ending.shown, ending.warnings)
        if silent:
            wrong.append(f"not in force, and {', '.join(silent)} does not show it: {'; '.join(ending.lacking[:3])}")
    return wrong


def silent_signs(lacking: Sequence[str], is_healthy: bool, shown: Sequence[str], warnings: Sequence[str]) -> list[str]:  # noqa: FBT001 - the arguments are the fields of ``Ending``
    """The signs (a metric, the log, /healthz) that should report the ``lacking`` objects as a fault, but do not."""
    signs = {"a metric": bool(shown), "the log": bool(warnings)}
    if any(item.startswith(SHARED) for item in lacking):  # a missing object of one Service does not make the node unhealthy
        signs["/healthz"] = not is_healthy
    return [name for name, tells in signs.items() if not tells]


def orders(done: Sequence[acts.Act]) -> Iterator[acts.Order]:
    """All failures to try, for a start that performs these acts.

    Each failure makes one act fail at its first occurrence, at its last occurrence, or at every occurrence.
    """
    times = Counter(act.name for act in done)
    for name, last in times.items():
        for failure in acts.failures(name):
            for time_ in sorted({0, 1, last}):
                yield acts.Order(name, failure, time_)


def _program(flags: Sequence[str], written: str, orders: Sequence[acts.Order]) -> int:
    acts.install(acts.Acts(Path(written), orders))
    from ipvsproxy import cli  # noqa: PLC0415 - imported only in the process that needs it
    from ipvsproxy.daemon.process import requirements  # noqa: PLC0415 - imported only in the process that needs it

    requirements.DELAYS_S = requirements.DELAYS_S[:TRIES]
    return cli.main(flags)


def _health() -> bool:
    return bool(fetch("127.0.0.1:10256/healthz")["code"] == 200)


def _shown() -> list[str]:
    return SHOWING.findall(fetch("127.0.0.1:10249/metrics").get("body", ""))


def _warnings(text: str) -> list[str]:
    levels = ("level=warning", "level=error")
    return [line for line in text.splitlines() if line.startswith("ipvsproxy: ") or any(level in line for level in levels)]


def _ip(*commands: str) -> None:
    run("ip", "-batch", "-", stdin="".join(f"{command}\n" for command in commands))


def _objects() -> Iterator[cluster.Manifest]:
    yield cluster.node()
    yield from cluster.service("web", 10, "r1", protocols=["TCP"], node_port=30010)
    ranges = ["198.18.0.0/15"]
    yield from cluster.service(
        "balanced", 11, "r1", protocols=["TCP"], node_port=30011, balancer=True, loadBalancerSourceRanges=ranges
    )
    yield from cluster.service("later", 12, "r1", protocols=["TCP"])
