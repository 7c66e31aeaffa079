"""CPU time and memory of a process with all its threads and children, from /proc."""

from __future__ import annotations

import os
from pathlib import Path

TICKS = os.sysconf("SC_CLK_TCK")


def tree(pid: int) -> list[int]:
    """The process and its descendants."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (fields := _stat(int(entry.name))):
            parents.setdefault(int(fields[1]), []).append(int(entry.name))
    found, queue = [], [pid]
    while queue:
        found.append(queue.pop())
        queue += parents.get(found[-1], [])
    return found


def cpu_seconds(pids: list[int]) -> float:
    """User and system time of these processes, ended threads included."""
    stats = (_stat(pid) for pid in pids)
    return sum((int(fields[11]) + int(fields[12])) / TICKS for fields in stats if fields)


def rss_mib(pids: list[int]) -> float:
    """Resident memory of these processes, MiB."""
    pages = sum(int(fields[21]) for pid in pids if (fields := _stat(pid)))
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def machine_busy_seconds() -> float:
    """Returns the CPU time that the whole machine did not spend idle, all cores together."""
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(
        int, Path("/proc/stat").read_text().splitlines()[0].split()[1:9]
    )
    return (user + nice + system + irq + softirq + steal) / TICKS


def _stat(pid: int) -> list[str] | None:
    """Returns the fields of /proc/PID/stat after the name; None if the process is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
