"""Measures two workers beside one: CPU time of requests and streamed chunks, lock waits, speed.

    python bench/http/workers.py [--rounds 3] [--seconds 2] [--out FILE]

Engines and load are on core 0. Each number of workers runs on core 1, in which figures are CPU time
of all its processes. It also runs on both cores; then its speed by the clock is reported with the
cores that engines and load took. Cells: `request`, a closed loop of 32 connections with bodies of
1 KB; `chunk`, 200 streams with a token each 5 ms.

A lock wait is time in which the thread of an event loop waits for a lock in the kernel (`futex`),
by 500 looks a second. Waits for the process's own other threads count, too; locks that spin are
not seen.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import threading
import time
from pathlib import Path
from typing import Any

import proc
import run
from subjects import HERE, SUBJECTS, ours

sys.path.insert(0, str(HERE.parent))
from common import about, median_range, write_result

WORKERS = {"one worker": ours("lmetric"), "two workers": ours("lmetric", "--workers", "2")}
CELLS = {"request": ["closed", 32, 1024], "chunk": ["streams", 200]}
PLACES = {"core 1": "1", "both cores": "0,1"}
LOOK_SECONDS = 0.002
LOCK_CALL = {"x86_64": b"202", "aarch64": b"98"}[platform.machine()]  # Linux's number of futex


class LockWaits(threading.Thread):
    """Looks what the event loops' threads wait for, until it is stopped."""

    def __init__(self, pids: list[int]) -> None:
        super().__init__(daemon=True)
        self._files = [Path(f"/proc/{pid}/task/{pid}/syscall") for pid in pids]
        self._over, self._looks, self._waits = threading.Event(), 0, 0
        self._began = time.monotonic()
        self.start()

    def run(self) -> None:
        """Looks."""
        while not self._over.wait(LOOK_SECONDS):
            self._looks += 1
            for file in self._files:
                self._waits += file.read_bytes().split(b" ", 1)[0] == LOCK_CALL

    def stop(self) -> float:
        """Ends it. Returns the seconds that the threads have waited, together."""
        self._over.set()
        self.join()
        return self._waits / max(self._looks, 1) * (time.monotonic() - self._began)


class Bench(run.Bench):
    """Runs the cells of this comparison."""

    place = "core 1"

    def at(self, place: str) -> None:
        """Sets the cores of the next routers."""
        self.place, self.router_cores = place, PLACES[place]

    def _wrk(self, port: int, *_: Any) -> dict[str, Any]:
        return self._load(["closed", port, 32, 1024, 1, self._nonce(), "-"])  # the warm-up

    def _cell(self, name: str, cell: str, port: int, pids: list[int], round_: int) -> dict[str, Any]:
        kind, *numbers = CELLS[cell]
        # The supervisor decides nothing; a router without workers is one process.
        loops = [pid for pid in pids if pid != pids[0]] or pids
        busy, used = proc.machine_busy_seconds(), proc.cpu_seconds(pids)
        waits, began = LockWaits(loops), time.monotonic()
        figures = self._load([kind, port, *numbers, self.seconds, self._nonce(), ",".join(map(str, pids))])
        waited, took = waits.stop(), time.monotonic() - began
        used = proc.cpu_seconds(pids) - used
        others = proc.machine_busy_seconds() - busy - used
        return {
            "subject": name,
            "cell": cell,
            "place": self.place,
            "round": round_,
            **figures,
            "lock_wait_share": waited / used,
            "router_cores": used / took,
            "other_cores": others / took,
        }


def summary(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns a row per place, cell and number of workers. `ratio`: work per CPU-second, over that
    of one worker in the same round; `speed`: the same by the clock."""
    rows = []
    for place in PLACES:
        for cell in CELLS:
            of = {
                name: sorted(
                    (
                        each
                        for each in runs
                        if (each["place"], each["cell"], each["subject"]) == (place, cell, name)
                    ),
                    key=lambda each: int(each["round"]),
                )
                for name in WORKERS
            }
            for name, found in of.items():
                pairs = list(zip(of["one worker"], found, strict=True))
                per_second = f"{cell}s_per_second"
                rows.append(
                    {
                        "place": place,
                        "cell": cell,
                        "workers": name,
                        "ratio": median_range([one["cpu_us"] / each["cpu_us"] for one, each in pairs]),
                        "speed": median_range([each[per_second] / one[per_second] for one, each in pairs]),
                        "per_second": median_range([each[per_second] for each in found]),
                        **{
                            key: median_range([each[key] for each in found])
                            for key in ("cpu_us", "lock_wait_share", "router_cores", "other_cores")
                        },
                    }
                )
    return rows


def main() -> None:
    """Runs the rounds, prints, writes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=int, default=2, help="of each cell")
    parser.add_argument("--out", type=Path, help="default: bench/results/DATE-workers.json")
    options = parser.parse_args()
    SUBJECTS.update(WORKERS)
    load = [os.getloadavg()]
    bench = Bench(Path(sys.prefix), options.seconds)
    runs: list[dict[str, Any]] = []
    try:
        for round_ in range(options.rounds):
            order = list(WORKERS) if round_ % 2 == 0 else list(reversed(WORKERS))
            for place in PLACES:
                bench.at(place)
                for name in order:
                    runs += bench.subject(name, list(CELLS), round_)
    finally:
        bench.close()
    if failed := [each for each in runs if each["errors"]]:
        sys.exit(f"workers.py: requests failed: {failed}")
    rows = summary(runs)
    for row in rows:
        shown = {key: f"{value[0]:.3g}" for key, value in row.items() if isinstance(value, list)}
        print(row["place"], row["cell"], row["workers"], shown)
    result = {
        **about(None, []),
        "load_average": [*load, os.getloadavg()],
        "setting": {"rounds": options.rounds, "seconds": options.seconds, "engines": run.ENGINES},
        "summary": rows,
        "runs": runs,
    }
    print(write_result(result, "workers", options.out))


if __name__ == "__main__":
    main()
