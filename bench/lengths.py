"""Measures how well remaining lengths are predicted from a trace's facts, and the time of the
paper's network.

    python bench/lengths.py TRACE ... --train-python PYTHON [--seeds 3] [--hidden 256,64,16]
    [--docs]

Samples of each trace (every 20 generated tokens, at most 16 of a request) are split by request.
PYTHON, an interpreter with PyTorch, trains the network on 70% of the requests and stops by 15%.
NumPy's inference compares it with the baselines on the other 15%. The seed decides samples, split,
first weights and order. Method and figures: docs/research/lengths.md.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common import ROOT, about, write_result
from lmetric.lengths import (
    PAPER_FEATURES,
    PAPER_HIDDEN,
    ErrorTable,
    MlpPredictor,
    load_npz,
    load_onnx,
    write_onnx,
)
from lmetric.lengths.network import layer_shapes
from lmetric_lab.sim.traces import load_trace
from train_lengths.baselines import baselines
from train_lengths.from_trace import samples_from_trace
from train_lengths.samples import Samples, save_samples, split_by_request

GENERATED = (0, 1, 100, 200, 400, 800)
"""Edges of the buckets of generated tokens, as in the paper's Figure 7."""


def main() -> None:
    """Measures the requested parts."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("traces", nargs="*", type=Path)
    parser.add_argument("--train-python", type=Path, required=True, help="an interpreter with PyTorch")
    parser.add_argument("--seeds", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--hidden", default="256,64,16", help="default: %(default)s")
    parser.add_argument("--no-biases", action="store_true", help="as Eq. 2 has it; default: with biases")
    parser.add_argument("--at-most", type=int, default=16, help="samples of a request; default: %(default)s")
    parser.add_argument("--docs", action="store_true", help="put the tables into docs/research/lengths.md")
    parser.add_argument("--out", type=Path, help="default: bench/results/DATE-lengths.json")
    arguments = parser.parse_args()
    result: dict[str, Any] = {"about": about(None, []) | {"load_average": os.getloadavg()}}
    result["latency"] = latency()
    result["network"] = {"hidden": arguments.hidden, "biases": not arguments.no_biases}
    result["traces"] = {
        path.name.split(".")[0]: [_one(path, seed, arguments) for seed in range(arguments.seeds)]
        for path in arguments.traces
    }
    tables = render(result)
    print("\n\n".join(tables.values()))
    print("written:", write_result(result, "lengths", arguments.out), file=sys.stderr)
    if arguments.docs:
        _write_into(ROOT / "docs" / "research" / "lengths.md", tables, result["about"])


def _one(path: Path, seed: int, arguments: argparse.Namespace) -> dict[str, Any]:
    samples = samples_from_trace(load_trace(path), at_most=arguments.at_most, seed=seed)
    split = split_by_request(samples.request_ids, seed)
    train, test = samples.at(split.train), samples.at(split.test)
    with tempfile.TemporaryDirectory() as folder:
        file, out = Path(folder) / "samples.npz", Path(folder) / "predictor.npz"
        save_samples(samples, file)
        argv = [arguments.train_python, "-m", "train_lengths.train", file, "--out", out, "--json"]
        argv += ["--seed", seed, "--hidden", arguments.hidden, *([] if arguments.no_biases else ["--biases"])]
        started = time.monotonic()
        done = subprocess.run(
            [str(word) for word in argv],
            # More threads only wait for each other in a network as small as a trace's.
            env=os.environ | {"PYTHONPATH": f"{ROOT / 'python'}:{ROOT / 'bench'}", "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        training = json.loads(done.stdout) | {"seconds": time.monotonic() - started}
        remaining, sigma = load_npz(out).predict(test.features)
    return {
        "seed": seed,
        "requests": len(np.unique(samples.request_ids)),
        "samples": len(samples),
        "training": training,
        "mae_tokens": _errors(baselines(train, test) | {"network": remaining.astype(np.float64)}, test),
        "sigma": _uncertainty(np.abs(remaining - test.remaining), sigma),
    }


def _errors(predictions: dict[str, NDArray[np.float64]], test: Samples) -> dict[str, dict[str, float]]:
    """Returns the mean absolute error over all test samples and over each bucket of generated
    tokens."""
    bucket = np.searchsorted(GENERATED, np.rint(np.expm1(test.column("log_generated_tokens"))), side="right")
    found = {}
    for name, predicted in predictions.items():
        off = np.abs(predicted - test.remaining)
        found[name] = {"all": float(off.mean())} | {
            _bucket(index): float(off[bucket == index + 1].mean())
            for index in range(len(GENERATED))
            if (bucket == index + 1).any()
        }
    return found


def _bucket(index: int) -> str:
    if index == 0:
        return "0"
    low = GENERATED[index]
    return f"{low}-{GENERATED[index + 1] - 1}" if index + 1 < len(GENERATED) else f"{low}-"


def _uncertainty(errors: NDArray[np.float32], sigma: NDArray[np.float32]) -> dict[str, Any]:
    """Returns the mean sigma and the mean error, for all samples and for quarters from most to
    least certain."""
    order = np.argsort(sigma, kind="stable")
    return {
        "mean_sigma": float(sigma.mean()),
        "mean_error": float(errors.mean()),
        "quarters": [
            {"mean_sigma": float(sigma[rows].mean()), "mean_error": float(errors[rows].mean())}
            for rows in np.array_split(order, 4)
        ],
    }


def latency(repeats: int = 200) -> dict[str, Any]:
    """Returns medians in ms of one call of `predict` at the paper's dimensions, by batch; weights
    are random."""
    random = np.random.default_rng(0)
    shapes = layer_shapes(PAPER_FEATURES, PAPER_HIDDEN)
    edges = np.empty(0, np.float32)
    predictor = MlpPredictor(
        tuple(f"h{index}" for index in range(PAPER_FEATURES)),
        np.zeros(PAPER_FEATURES, np.float32),
        np.ones(PAPER_FEATURES, np.float32),
        1000.0,
        tuple((random.standard_normal(shape) / shape[1] ** 0.5).astype(np.float32) for shape in shapes),
        (),
        ErrorTable(edges, -1, edges, np.ones((1, 1), np.float32)),
        "random weights",
    )
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "paper.onnx"
        write_onnx(predictor, file)
        by_onnx = load_onnx(file)
    found: dict[str, Any] = {"parameters": predictor.parameters}
    for batch in (1, 10):
        features = random.standard_normal((batch, PAPER_FEATURES)).astype(np.float32)
        found[f"batch_{batch}"] = {
            "numpy_ms": _milliseconds(lambda given=features: predictor.predict(given), repeats),
            "onnxruntime_ms": _milliseconds(lambda given=features: by_onnx.predict(given), repeats),
        }
    return found


def _milliseconds(call: Callable[[], object], repeats: int) -> dict[str, float]:
    taken = []
    for _ in range(repeats + 10):  # the first ten warm up
        started = time.perf_counter()
        call()
        taken.append((time.perf_counter() - started) * 1e3)
    taken = sorted(taken[10:])
    return {"median": median(taken), "p10": taken[repeats // 10], "p90": taken[repeats * 9 // 10]}


def render(result: dict[str, Any]) -> dict[str, str]:
    """Returns the tables as Markdown, by their place in the page."""
    lines = ["| batch | NumPy, ms | onnxruntime, ms |", "| --- | --- | --- |"]
    for batch in (1, 10):
        cells = [
            "{median:.2f} ({p10:.2f} to {p90:.2f})".format(**result["latency"][f"batch_{batch}"][name])
            for name in ("numpy_ms", "onnxruntime_ms")
        ]
        lines.append(f"| {batch} | {' | '.join(cells)} |")
    tables = {"latency": "\n".join(lines)}
    if not result["traces"]:
        return tables
    columns = ["all", *(_bucket(index) for index in (0, 3, 5))]
    lines = [
        "| trace | predictor | all | " + " | ".join(columns[1:]) + " |",
        "| --- " * (len(columns) + 2) + "|",
    ]
    sigmas = ["| trace | | all | " + " | ".join(("surest quarter", "2nd", "3rd", "least sure")) + " |"]
    sigmas.append("| --- " * 7 + "|")
    for trace, runs in result["traces"].items():
        for name in runs[0]["mae_tokens"]:
            by_seed = [run["mae_tokens"][name] for run in runs]
            every = [each["all"] for each in by_seed]
            cells = [f"{mean(each[at] for each in by_seed if at in each):.1f}" for at in columns[1:]]
            lines.append(f"| {trace} | {name} | {mean(every):.1f} | {' | '.join(cells)} |")
        for key, label in (("mean_sigma", "sigma"), ("mean_error", "error")):
            parts = [mean(run["sigma"][key] for run in runs)]
            parts += [mean(run["sigma"]["quarters"][at][key] for run in runs) for at in range(4)]
            sigmas.append(f"| {trace} | {label} | {' | '.join(f'{part:.1f}' for part in parts)} |")
    return tables | {"accuracy": "\n".join(lines), "sigma": "\n".join(sigmas)}


def _write_into(page: Path, tables: dict[str, str], about: dict[str, Any]) -> None:
    machine = about["machine"]
    stamp = f"{about['date'][:10]}, commit {about['commit']}, {machine['cpu']}, {machine['cores']} cores"
    stamp += f", load average {about['load_average'][0]:.1f} before"
    text = page.read_text()
    for name, table in tables.items():
        begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
        before, _, rest = text.partition(begin)
        text = f"{before}{begin}\n\n{table}\n\n({stamp})\n\n{end}{rest.partition(end)[2]}"
    page.write_text(text)


if __name__ == "__main__":
    main()
