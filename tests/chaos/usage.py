"""Measures the resources that a process could leak: memory, file descriptors, sockets, threads and tasks."""

import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import NamedTuple

_MEBIBYTE = 1 << 20


_LISTENING = "0A"  # TCP_LISTEN in /proc/net/tcp


class Usage(NamedTuple):
    """``resident_mb`` is in units of 2**20 bytes; ``processor_s`` is the processor time since the start of the process.

    ``tasks`` is -1 if their number is unknown.

    ``descriptors`` and ``sockets`` do not include ``listening`` sockets, because the number of listening sockets depends on the
    number of Services with a health-check port.
    """

    resident_mb: float
    descriptors: int
    sockets: int
    listening: int
    threads: int
    tasks: int
    processor_s: float


def read(process_id: int, tasks: Path) -> Usage:
    """Read the current resource usage of a process; the file ``tasks`` has the number of its asyncio tasks.

    Raises:
        OSError: the process has ended.
    """
    process = Path(f"/proc/{process_id}")
    targets = _targets(process)
    listening = len(_listening(process, targets))
    # The list begins with the third field (see proc(5)), because the second field is the process name, which may contain blanks
    # and brackets.
    fields = (process / "stat").read_text().rpartition(")")[2].split()
    return Usage(
        resident_mb=round(int(fields[21]) * os.sysconf("SC_PAGE_SIZE") / _MEBIBYTE, 2),
        descriptors=len(targets) - listening,
        sockets=sum(target.startswith("socket:") for target in targets) - listening,
        listening=listening,
        threads=int(fields[17]),
        tasks=int(tasks.read_text() or -1) if tasks.exists() else -1,
        processor_s=(int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"),
    )


def listening_ports(process_id: int) -> frozenset[int]:
    """The TCP ports that a process listens on, in its network namespace.

    Raises:
        OSError: the process has ended.
    """
    process = Path(f"/proc/{process_id}")
    return frozenset(_listening(process, _targets(process)).values())


def _listening(process: Path, targets: Collection[str]) -> Mapping[str, int]:
    """The TCP port of each listening socket among ``targets``, which are the targets of the process's descriptors."""
    # Fields: slot, local address and port, remote, state, queues, timer, retransmits, user, timeout, inode; see proc(5).
    lines = (line.split() for table in ("tcp", "tcp6") for line in (process / "net" / table).read_text().splitlines()[1:])
    ports = {f"socket:[{fields[9]}]": int(fields[1].rpartition(":")[2], 16) for fields in lines if fields[3] == _LISTENING}
    return {target: ports[target] for target in targets if target in ports}


def _targets(process: Path) -> list[str]:
    """The targets of the links in ``/proc/PID/fd``, one for each open descriptor of the process."""
    return [_target(link) for link in (process / "fd").iterdir()]


def _target(link: Path) -> str:
    try:
        return str(link.readlink())
    except FileNotFoundError:  # closed meanwhile
        return ""
