"""Compares HTTP routers: engines and load on core 0, the router alone on core 1, interleaved in
rounds.

    python bench/http/run.py --rivals DIR [--rounds 3] [--seconds 2] [--only NAME...] [--out FILE]

The cost of a request is the router's CPU time (all threads and children, /proc) over requests
answered, so it does not depend on the load of core 0. Cells: `c32_1k`, `c32_32k`, `c256_1k` closed
loops (connections, bytes of body) by wrk; `o500_1k`, `o500_32k` Poisson arrivals at 500/s; `s200`
200 streams with a token each 5 ms. Every prompt is new; half of it is one of 16 shared beginnings.
Each run notes the CPU time of other processes. The table takes the quiet runs if there are any.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import Any

import proc
from subjects import HERE, SUBJECTS

sys.path.insert(0, str(HERE.parent))
from common import about, median_range, write_result

ENGINES, ENGINE_PORT, ROUTER_PORT = 4, 18100, 18200
QUIET = 0.3  # of a core, used by others
BODY = b'{"model":"mock","max_tokens":1,"messages":[{"role":"user","content":"hello"}]}'
CLOSED = {"c32_1k": (32, 1024), "c32_32k": (32, 32768), "c256_1k": (256, 1024)}
OPEN = {"o500_1k": 1024, "o500_32k": 32768}
CELLS = [*CLOSED, *OPEN, "s200"]


class Bench:
    """One series: the engines that stay up, and the runs over them."""

    def __init__(self, rivals: Path, seconds: int) -> None:
        self.rivals, self.seconds = rivals / "bin" / "python", seconds
        self.router_cores = "1"
        self.runs = 0
        ports = [ENGINE_PORT + i for i in range(ENGINES)]
        for port in [*ports, ROUTER_PORT]:
            with socket.socket() as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                try:
                    probe.bind(("127.0.0.1", port))
                except OSError:
                    sys.exit(f"run.py: port {port} is in use; it is needed for the engines and the router")
        self.urls = [f"http://127.0.0.1:{port}" for port in ports]
        self.mock = self._start([str(self.rivals), str(HERE / "mock.py"), *map(str, ports)], "0")
        self._answers(ports[0], self.mock)

    def close(self) -> None:
        """Ends the engines."""
        _stop(self.mock)

    def subject(self, name: str, cells: list[str], round_: int) -> list[dict[str, Any]]:
        """Runs all cells of one subject, in one life of its process."""
        command = SUBJECTS[name]
        with tempfile.TemporaryDirectory() as scratch:
            if command is None:
                return [self._cell(name, cell, ENGINE_PORT, [], round_) for cell in cells]
            log = Path(scratch) / "log"
            with log.open("wb") as out:
                argv = command(self.rivals, ROUTER_PORT, self.urls, Path(scratch))
                router = self._start(argv, self.router_cores, out=out)
                try:
                    self._answers(ROUTER_PORT, router)
                    time.sleep(1.0)  # the rest of its engines
                    self._wrk(ROUTER_PORT, 32, 1024, 1)  # warm
                    pids = proc.tree(router.pid)
                    return [self._cell(name, cell, ROUTER_PORT, pids, round_) for cell in cells]
                except Exception:
                    sys.stderr.write(f"--- log of {name}\n{log.read_text(errors='replace')[-3000:]}\n")
                    raise
                finally:
                    _stop(router)

    def _cell(self, name: str, cell: str, port: int, pids: list[int], round_: int) -> dict[str, Any]:
        ours = [*proc.tree(os.getpid())]
        busy, own, used = proc.machine_busy_seconds(), proc.cpu_seconds(ours), proc.cpu_seconds(pids)
        children, began = os.times(), time.monotonic()
        if cell in CLOSED:
            connections, size = CLOSED[cell]
            figures = self._wrk(port, connections, size, self.seconds)
            if pids:
                figures["cpu_us"] = (proc.cpu_seconds(pids) - used) / max(figures["requests"], 1) * 1e6
        else:
            what = ["open", port, OPEN[cell], 500] if cell in OPEN else ["streams", port, 200]
            seconds = self.seconds + (cell in OPEN)
            figures = self._load([*what, seconds, self._nonce(), ",".join(map(str, pids)) or "-"])
        took, after = time.monotonic() - began, os.times()
        waited = (
            after.children_user + after.children_system - children.children_user - children.children_system
        )
        foreign = (proc.machine_busy_seconds() - busy - (proc.cpu_seconds(ours) - own) - waited) / took
        return {
            "subject": name,
            "cell": cell,
            "round": round_,
            **figures,
            "router_rss_mib": round(proc.rss_mib(pids), 1) if pids else None,
            "foreign_cores": round(max(foreign, 0.0), 3),
        }

    def _wrk(self, port: int, connections: int, size: int, seconds: int) -> dict[str, Any]:
        flags = ["-t1", f"-c{connections}", f"-d{seconds}s", "--latency", "-s", str(HERE / "closed.lua")]
        argv = [
            "taskset",
            "-c",
            "0",
            "wrk",
            *flags,
            f"http://127.0.0.1:{port}",
            "--",
            str(size),
            self._nonce(),
        ]
        return self._json(argv, seconds + 30)

    def _load(self, arguments: list[Any]) -> dict[str, Any]:
        argv = ["taskset", "-c", "0", str(self.rivals), str(HERE / "load.py"), *map(str, arguments)]
        return self._json(argv, 60)

    def _json(self, argv: list[str], timeout: float) -> dict[str, Any]:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=timeout)
        lines = [line for line in done.stdout.splitlines() if "{" in line]
        if done.returncode or not lines:
            raise RuntimeError(f"{' '.join(argv)}: exit status {done.returncode}\n{done.stdout}{done.stderr}")
        answer: dict[str, Any] = json.loads(lines[-1].removeprefix("JSON "))
        return answer

    def _nonce(self) -> str:
        self.runs += 1
        return f"{os.getpid()}.{self.runs}"

    def _start(self, argv: list[str], cores: str, out: Any = subprocess.DEVNULL) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            ["taskset", "-c", cores, *argv], stdout=out, stderr=out, start_new_session=True
        )

    def _answers(self, port: int, process: subprocess.Popen[bytes]) -> None:
        """Waits for the first good answer to a chat request."""
        request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/chat/completions", BODY)
        request.add_header("content-type", "application/json")
        last: object = None
        for _ in range(150):
            if process.poll() is not None:
                raise RuntimeError(f"ended with {process.returncode} before it answered")
            try:
                with urllib.request.urlopen(request, timeout=2) as answer:
                    if answer.status == 200:
                        return
            except OSError as error:
                last = error
            time.sleep(0.2)
        raise RuntimeError(f"no answer on port {port} within 30 s: {last}")


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Ends the process and its children; it leads a session of its own."""
    process.send_signal(signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        process.wait(5)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def summary(runs: list[dict[str, Any]]) -> dict[str, dict[str, dict[str, list[float]]]]:
    """Returns subject -> cell -> figure -> [median, least, greatest, runs], of quiet runs if there
    are any.

    Latencies of open loops and streams are also given as added over the median of direct.
    """
    table: dict[str, dict[str, dict[str, list[float]]]] = {}
    for name in SUBJECTS:
        for cell in CELLS:
            mine = [run for run in runs if run["subject"] == name and run["cell"] == cell]
            quiet = [run for run in mine if run["foreign_cores"] <= QUIET] or mine
            if not quiet:
                continue
            figures = {
                key: median_range([run[key] for run in quiet])
                for key in ("cpu_us", "p50_us", "p99_us")
                if all(run.get(key) is not None for run in quiet)
            }
            base = table.get("direct", {}).get(cell)
            if base and name != "direct" and cell not in CLOSED:
                for key in {"p50_us", "p99_us"} & figures.keys():
                    figures[f"added_{key}"] = median_range([run[key] - base[key][0] for run in quiet])
            table.setdefault(name, {})[cell] = figures
    return table


def show(table: dict[str, dict[str, dict[str, list[float]]]]) -> str:
    """Returns the table in Markdown."""

    def cell(name: str, where: str, key: str) -> str:
        figure = table[name].get(where, {}).get(key)
        if figure is None:
            return "-"
        middle, low, high, count = figure
        return f"{middle:.1f} [{low:.1f}-{high:.1f}]" if count > 1 else f"{middle:.1f} (1)"

    columns = [(c, "cpu_us") for c in CLOSED] + [(c, "cpu_us") for c in (*OPEN, "s200")]
    columns += [(c, f"added_{p}_us") for c in (*OPEN, "s200") for p in ("p50", "p99")]
    head = (
        "| | " + " | ".join(f"{c} {k.removesuffix('_us').replace('added_', '+')}" for c, k in columns) + " |"
    )
    rows = [f"| {name} | " + " | ".join(cell(name, c, k) for c, k in columns) + " |" for name in table]
    return "\n".join([head, "|---" * (len(columns) + 1) + "|", *rows])


def main() -> None:
    """Runs the series."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rivals", type=Path, default=HERE.parent / "rivals" / ".venv", help="made by install.sh"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=int, default=2, help="of a run; open loops take 1 more")
    parser.add_argument("--only", nargs="+", choices=[*SUBJECTS], default=[*SUBJECTS])
    parser.add_argument("--cells", nargs="+", choices=CELLS, default=CELLS)
    parser.add_argument("--out", type=Path, help="default: bench/results/DATE-http.json")
    options = parser.parse_args()
    if len(os.sched_getaffinity(0)) < 2:
        sys.exit("run.py: needs two cores: one for engines and load, one for the router")
    bench = Bench(options.rivals, options.seconds)
    runs: list[dict[str, Any]] = []
    failed: dict[str, str] = {}
    loads = [os.getloadavg()]
    try:
        for round_ in range(options.rounds):
            turn = round_ % len(options.only)
            for name in options.only[turn:] + options.only[:turn]:
                try:
                    runs += bench.subject(name, options.cells, round_)
                except (RuntimeError, subprocess.TimeoutExpired) as error:
                    failed[name] = str(error)
                    print(f"round {round_ + 1}: {name} FAILED: {error}", file=sys.stderr)
                    continue
                errors = sum(
                    run["errors"] for run in runs if run["subject"] == name and run["round"] == round_
                )
                print(
                    f"round {round_ + 1}: {name}" + (f", {errors} ERRORS" if errors else ""), file=sys.stderr
                )
            loads.append(os.getloadavg())
    finally:
        bench.close()
    table = summary(runs)
    result = {
        **about(bench.rivals, ["nginx", "wrk"]),
        "load_average": loads,
        "setting": {
            "rounds": options.rounds,
            "seconds": options.seconds,
            "engines": ENGINES,
            "quiet_cores": QUIET,
        },
        "failed": failed,
        "summary": table,
        "runs": runs,
    }
    path = write_result(result, "http", options.out)
    print(show(table))
    print(f"\nraw figures: {path}")


if __name__ == "__main__":
    main()
