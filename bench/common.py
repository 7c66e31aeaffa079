"""Shared parts of the benchmarks: the machine's description, medians with their spread, raw result
files."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).parent.parent
VERSION = re.compile(r"\d+\.\d+(\.\d+)?")
WIDTH = 240
RIVALS = ("ai-dynamo-runtime", "sglang-router", "smg", "vllm-router", "aiohttp", "uvloop")


def commit() -> str:
    """Returns the commit, with `-dirty` if the code was changed since and the commit does not name
    what ran."""

    def git(*argv: str) -> str:
        return subprocess.run(["git", *argv], cwd=ROOT, capture_output=True, text=True, check=True).stdout

    code = ["rust", "python", "bench", ":!bench/*results/*"]
    dirty = git("status", "--porcelain", "--", *code)
    return git("rev-parse", "--short", "HEAD").strip() + ("-dirty" if dirty else "")


def about(rivals_python: Path | None, programs: list[str]) -> dict[str, Any]:
    """Returns the time, the machine, and the versions of everything measured."""
    from lmetric_lab.machine import machine

    versions = {}
    if rivals_python is not None:
        code = "import json, sys; from importlib.metadata import version; "
        code += "print(json.dumps({name: version(name) for name in sys.argv[1:]}))"
        argv = [str(rivals_python), "-c", code, *RIVALS]
        versions = json.loads(subprocess.run(argv, capture_output=True, text=True, check=True).stdout)
    for program in programs:
        told = subprocess.run([program, "-V" if program == "rustc" else "-v"], capture_output=True, text=True)
        found = VERSION.search(told.stdout + told.stderr)
        versions[program] = found[0] if found else "unknown"
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {**machine(), "kernel": platform.release(), "cores_total": os.cpu_count()},
        "commit": commit(),
        "versions": versions,
    }


def conversations(seed: int, rate: float, seconds: float, profile: Any) -> Any:
    """Returns a workload of synthetic conversations with shared system prompts.

    ``rate``: conversations per second. ``profile``: of the engines, as `load_profile` returns it.
    """
    from lmetric_lab.sim.synthetic import SessionsTrace
    from lmetric_lab.sim.workload import prepare

    described = {
        "seed": seed,
        "rate": rate,
        "duration_seconds": seconds,
        "input_tokens": {"p50": 400, "mean": 600, "max": 4000},
        "output_tokens": {"p50": 100, "mean": 150, "max": 1000},
        "turns": {"quantiles": {0: 1, 0.5: 12, 0.9: 30, 1: 40}},
        "think_seconds": {"p50": 3, "p90": 15, "max": 120},
        "prefixes": {"count": 20, "zipf": 1.0, "tokens": 6000},
        "max_prompt_tokens": 40_000,
    }
    return prepare(SessionsTrace.model_validate(described).make(), profile)


def median_range(values: list[float]) -> list[float]:
    """[median, least, greatest, how many]."""
    return [median(values), min(values), max(values), len(values)]


def percentile(ordered: list[float], share: float) -> float:
    """The value below which ``share`` of the ordered values lie."""
    return ordered[min(int(len(ordered) * share), len(ordered) - 1)]


def compact(value: Any, indent: int = 0) -> str:
    """Returns JSON in which each part that fits into `WIDTH` characters is on one line."""
    text = json.dumps(value)
    if len(text) + indent <= WIDTH or not isinstance(value, dict | list) or not value:
        return text
    inner = indent + 1
    if isinstance(value, dict):
        parts = [f"{json.dumps(name)}: {compact(each, inner)}" for name, each in value.items()]
        opening, closing = "{}"
    else:
        parts = [compact(each, inner) for each in value]
        opening, closing = "[]"
    lines = ",\n".join(" " * inner + part for part in parts)
    return f"{opening}\n{lines}\n{' ' * indent}{closing}"


def write_result(result: dict[str, Any], what: str, path: Path | None = None) -> Path:
    """Writes a report as JSON, to ``bench/results/DATE-what.json`` if no path is given.

    Machine reports stay JSON: each has a structure of its own, and none is a table.
    """
    if path is None:
        path = ROOT / "bench" / "results" / f"{datetime.now(UTC):%Y-%m-%d}-{what}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(compact(result) + "\n")
    return path.relative_to(ROOT) if path.is_relative_to(ROOT) else path
