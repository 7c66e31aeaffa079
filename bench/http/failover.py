"""Measures the cost of recording streams for failover (`stream_failover`), in interleaved pairs.

    python bench/http/failover.py [--rounds 9] [--seconds 2] [--out FILE]

Both sides are this checkout: one with `stream_failover: false` (plain streams), one with the
default. The engines are mocks (`mock.py`) that send token ids on request, as vLLM does. Both
routers know a tokenizer, because without one no stream is recorded. Each round runs both, and the
next round begins with the other one. A ratio is recorded divided by plain, of one round. CPU time
is the router's own, from /proc. Cells: `chunk`: one token of 200 running streams; `stream_1k`,
`stream_8k`: a whole stream of 100 tokens with its request, for bodies of this size.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import sys
import urllib.request
from pathlib import Path
from typing import Any

import run
from subjects import HERE, SUBJECTS, Command

sys.path.insert(0, str(HERE.parent))
from common import about, write_result

SIDES = {"plain": "false", "recorded": "true"}
CELLS = {"chunk": ["streams", 200], "stream_1k": ["answers", 200, 1024], "stream_8k": ["answers", 200, 8192]}
TOKENS = 100
FIGURES = ("cpu_us", "p50_us", "p99_us")
TOKENIZER = HERE.parent.parent / "python" / "lmetric_lab" / "emulated"


def router(recorded: str) -> Command:
    """Returns the router of this checkout with a tokenizer."""

    def command(python: Path, port: int, engines: list[str], scratch: Path) -> list[str]:
        lines = [f"port: {port}", "engines:", *(f"  - url: {engine}" for engine in engines)]
        lines += [f"tokenizer: {TOKENIZER}", f"stream_failover: {recorded}"]
        config = scratch / "router.yaml"
        config.write_text("\n".join(lines) + "\n")
        program = "from lmetric.cli import main; main()"
        place = f"PYTHONPATH={HERE.parent.parent / 'python'}"
        return ["env", place, sys.executable, "-c", program, "serve", "--config", str(config)]

    return command


class Bench(run.Bench):
    """Runs the cells of this comparison."""

    def _wrk(self, port: int, *_: Any) -> dict[str, Any]:
        # The warm-up. It also shows that the side does what its name says.
        warm = self._load(["answers", port, 100, 1024, TOKENS, self._nonce(), "-"])
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as page:
            unrecorded = re.findall(rb"^lmetric_not_resumable_total.*", page.read(), re.M)
        if unrecorded or warm["errors"]:
            sys.exit(f"failover.py: {unrecorded}, {warm}")
        return warm

    def _cell(self, name: str, cell: str, port: int, pids: list[int], round_: int) -> dict[str, Any]:
        kind, *numbers = CELLS[cell]
        more = [self.seconds] if kind == "streams" else [TOKENS]
        before = run.proc.machine_busy_seconds(), os.times(), run.proc.cpu_seconds(pids)
        own = run.proc.cpu_seconds(run.proc.tree(self.mock.pid))
        figures = self._load([kind, port, *numbers, *more, self._nonce(), ",".join(map(str, pids))])
        after = os.times()
        took = after.elapsed - before[1].elapsed
        ours = run.proc.cpu_seconds(pids) - before[2]
        ours += run.proc.cpu_seconds(run.proc.tree(self.mock.pid)) - own
        ours += sum(after[:4]) - sum(before[1][:4])
        foreign = (run.proc.machine_busy_seconds() - before[0] - ours) / took
        return {"subject": name, "cell": cell, "round": round_, **figures, "foreign_cores": round(foreign, 3)}


def pairs(runs: list[dict[str, Any]], cell: str, figure: str, most: float) -> list[tuple[float, float]]:
    """Returns the pairs (plain, recorded) of one figure, a pair per round."""
    found = []
    for round_ in sorted({each["round"] for each in runs}):
        values = {
            each["subject"]: each[figure]
            for each in runs
            if each["cell"] == cell and each["round"] == round_ and each["foreign_cores"] <= most
        }
        if len(values) == len(SIDES):
            found.append((values["plain"], values["recorded"]))
    return found


def show(runs: list[dict[str, Any]], most: float) -> str:
    """Returns the table in Markdown. `most`: cores that other processes may use in a run."""
    lines = ["| cell | figure | plain | recorded | ratio, median | range | pairs |", "|---" * 7 + "|"]
    for cell in CELLS:
        for figure in FIGURES:
            if not (found := pairs(runs, cell, figure, most)):
                continue
            ratios = [recorded / plain for plain, recorded in found]
            plain, recorded = (statistics.median(side) for side in zip(*found, strict=True))
            lines.append(
                f"| {cell} | {figure} | {plain:.1f} | {recorded:.1f} | {statistics.median(ratios):.3f} "
                f"| {min(ratios):.3f} to {max(ratios):.3f} | {len(ratios)} |"
            )
    return "\n".join(lines)


def main() -> None:
    """Runs the pairs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=int, default=2, help="of the cell `chunk`")
    parser.add_argument("--foreign-cores", type=float, default=0.1, help="leave out busier runs")
    parser.add_argument("--out", type=Path, help="default: bench/results/DATE-failover.json")
    options = parser.parse_args()
    for name, recorded in SIDES.items():
        SUBJECTS[name] = router(recorded)
    bench = Bench(Path(sys.prefix), options.seconds)
    runs: list[dict[str, Any]] = []
    try:
        for round_ in range(options.rounds):
            order = list(SIDES) if round_ % 2 == 0 else list(reversed(SIDES))
            for name in order:
                runs += bench.subject(name, list(CELLS), round_)
            print(f"round {round_ + 1} of {options.rounds}, load {os.getloadavg()[0]:.1f}", file=sys.stderr)
    finally:
        bench.close()
    setting = {"rounds": options.rounds, "seconds": options.seconds, "tokens": TOKENS, "engines": run.ENGINES}
    result = {**about(None, []), "setting": setting, "runs": runs}
    path = write_result(result, "failover", options.out)
    print(show(runs, options.foreign_cores))
    print(f"\nraw figures: {path}")


if __name__ == "__main__":
    main()
