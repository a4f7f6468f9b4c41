"""What a process uses that could grow: memory, file descriptors, sockets, threads and tasks."""

import os
from pathlib import Path
from typing import NamedTuple

_MEBIBYTE = 1 << 20


class Usage(NamedTuple):
    """``resident_mb`` in units of 2**20 bytes; ``processor_s`` since the process began; ``tasks`` -1 where nobody tells."""

    resident_mb: float
    descriptors: int
    sockets: int
    threads: int
    tasks: int
    processor_s: float


def read(process_id: int, tasks: Path) -> Usage:
    """Of a process, now; ``tasks`` is the file that it counts its tasks in.

    Raises:
        OSError: there is no such process any more.
    """
    process = Path(f"/proc/{process_id}")
    targets = [_target(link) for link in (process / "fd").iterdir()]
    # Behind the name, which may hold blanks and brackets: fields from the third on, see proc(5).
    fields = (process / "stat").read_text().rpartition(")")[2].split()
    return Usage(
        resident_mb=round(int(fields[21]) * os.sysconf("SC_PAGE_SIZE") / _MEBIBYTE, 2),
        descriptors=len(targets),
        sockets=sum(target.startswith("socket:") for target in targets),
        threads=int(fields[17]),
        tasks=int(tasks.read_text() or -1) if tasks.exists() else -1,
        processor_s=(int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"),
    )


def _target(link: Path) -> str:
    try:
        return str(link.readlink())
    except FileNotFoundError:  # closed meanwhile
        return ""
