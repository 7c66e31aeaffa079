"""Measures whether hidden states predict remaining lengths better than counting, and their cost.

    python bench/hidden_states.py --venv VLLM_ENVIRONMENT [--seeds 3] [--requests 800] [--at end]

A real vLLM on CPU with random weights answers requests whose lengths are *made*: one word of the
prompt sets the mean, and noise comes on top. So a gain shows that states carry a fact of the prompt
through the whole path: engine, files, collector, training. It shows nothing about real lengths.
Each seed has its own requests, split and first weights.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import aiohttp
import numpy as np
from numpy.typing import NDArray

from common import ROOT, about, write_result
from lmetric.lengths import LengthPredictor, load_npz
from train_lengths.baselines import Survival, baselines
from train_lengths.collect import collect
from train_lengths.samples import Samples, load_samples, save_samples, split_by_request

sys.path += [str(ROOT / "tests" / "real"), str(ROOT / "integrations" / "vllm")]

from lmetric_vllm.folder import EVERY
from make_model import HIDDEN, LAYERS
from vllm_process import MODEL, VllmEngine, hidden_states, model

FLAGS: dict[str, Any] = {
    "kv_events_config": None,
    "scheduling_policy": "fcfs",
    "num_gpu_blocks_override": 2048,
}
WORDS = ["tree", "river", "stone", "cloud", "light", "paper", "music", "table", "green", "seven"]
KINDS = ["list", "sketch", "note", "letter", "story", "essay", "report", "novel"]
"""The word that sets an answer's length: the first 20 tokens on average, the last 160."""
NOISE = 0.2  # of the logarithm of lengths
EDGES = (0, 1, 60, 120)  # of the buckets of generated tokens
COST_REQUESTS = 300
ANSWER_SECONDS = 3600  # vLLM 0.32 that gets SIGTERM never answers requests in flight


class Asked(NamedTuple):
    """A request of the workload."""

    kind: int
    prompt: str
    tokens: int


def workload(seed: int, count: int, at: str) -> list[Asked]:
    """Requests with the word that matters at the end of the prompt, or anywhere in it."""
    rng = random.Random(seed)
    asked = []
    for number in range(count):
        kind = rng.randrange(len(KINDS))
        words = [rng.choice(WORDS) for _ in range(rng.randint(5, 40))]
        words.insert(len(words) if at == "end" else rng.randint(0, len(words)), KINDS[kind])
        tokens = round(20 * (kind + 1) * rng.lognormvariate(0, NOISE))
        asked.append(Asked(kind, f"{number} {' '.join(words)}", max(1, tokens)))
    return asked


async def play(url: str, asked: list[Asked]) -> float:
    """Answer tokens per second, with all requests at once."""
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=ANSWER_SECONDS, sock_connect=None)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:

        async def one(each: Asked) -> None:
            body = {"model": MODEL, "prompt": each.prompt, "max_tokens": each.tokens, "ignore_eos": True}
            async with session.post(f"{url}/v1/completions", json=body | {"temperature": 0}) as answer:
                text = await answer.text()
                if answer.status != 200:
                    raise RuntimeError(f"the engine answered {answer.status}: {text}")

        begun = time.monotonic()
        await asyncio.gather(*map(one, asked))
        return sum(each.tokens for each in asked) / (time.monotonic() - begun)


@contextmanager
def running(venv: Path, folder: Path, share: float | None) -> Iterator[VllmEngine]:
    """An engine that writes this share; None: vLLM without the connector. Errors get the cause in
    its log."""
    flags = dict(FLAGS)
    if share is not None:
        flags |= hidden_states(folder, [LAYERS], share=share)
    engine = VllmEngine(venv, model(venv), folder.parent, flags, flags.pop("environ", {}))
    engine.start()
    try:
        engine.wait()
        yield engine
    except Exception as error:
        error.add_note(f"The engine's first error:\n{engine.first_error()}\nIts log:\n{engine.said()}")
        raise
    finally:
        engine.stop()


def cost(venv: Path, rounds: int) -> dict[str, list[dict[str, float]]]:
    """The cost of an answer token in each configuration, by round; the order alternates.

    `cpu_us` is the time that all processes of the engine compute, so it depends less on others.
    """
    shares = {"without": None, "share 0": 0.0, "share 1": 1.0}
    found: dict[str, list[dict[str, float]]] = {name: [] for name in shares}
    for number in range(rounds):
        asked = workload(number, COST_REQUESTS, "end")
        for name in list(shares)[:: 1 if number % 2 else -1]:
            with TemporaryDirectory() as top:
                (folder := Path(top) / "states").mkdir()
                with running(venv, folder, shares[name]) as engine:
                    asyncio.run(play(engine.url, workload(1000, 60, "end")))
                    before = cpu_seconds(engine)
                    per_second = asyncio.run(play(engine.url, asked))
                    used = (cpu_seconds(engine) - before) / sum(each.tokens for each in asked)
            found[name].append({"cpu_us": 1e6 * used, "us": 1e6 / per_second})
            print(f"{name}: {found[name][-1]}", file=sys.stderr, flush=True)
    return found


def cpu_seconds(engine: VllmEngine) -> float:
    """The time that the processes of an engine have computed since their start."""
    ticks = 0
    for pid in engine.processes():
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def collected(venv: Path, folder: Path, workloads: list[list[Asked]]) -> list[Samples]:
    """The samples of each workload, by way of one engine and the collector."""
    (states := folder / "states").mkdir()
    found = []
    with running(venv, states, 1.0) as engine:
        for seed, asked in enumerate(workloads):
            asyncio.run(play(engine.url, asked))
            skipped: list[str] = []
            out, count, deadline = folder / f"{seed}.npz", 0, time.monotonic() + 120
            while count < len(asked):  # the last files come after the answers
                if time.monotonic() > deadline:
                    raise RuntimeError(f"states of {count} requests, expected {len(asked)}")
                count += collect(states, out, skipped, hidden_size=HIDDEN)
            assert not skipped, skipped
            found.append(load_samples(out))
    return found


def trained(python: Path, samples: Samples, seed: int, hidden: str) -> LengthPredictor:
    """The predictor that `train_lengths.train` fits."""
    with TemporaryDirectory() as folder:
        file, out = Path(folder) / "samples.npz", Path(folder) / "predictor.npz"
        save_samples(samples, file)
        argv = [python, "-m", "train_lengths.train", file, "--out", out, "--biases"]
        subprocess.run(
            [*map(str, argv), "--seed", str(seed), "--hidden", hidden],
            env=os.environ | {"PYTHONPATH": f"{ROOT / 'python'}:{ROOT / 'bench'}", "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=True,
        )
        return load_npz(out)


def compared(
    samples: Samples, asked: list[Asked], seed: int, arguments: argparse.Namespace
) -> dict[str, Any]:
    """Errors and ranks of counting, and of networks with lengths alone, also with the state of the
    last token, and with the state of the prompt's last token."""
    order = np.argsort(samples.request_ids, kind="stable")
    samples = samples.at(order)
    split = split_by_request(samples.request_ids, seed)
    train, test = samples.at(split.train), samples.at(split.test)
    predicted = baselines(train, test)
    width = len(samples.feature_names) - 2
    first = np.searchsorted(samples.request_ids, samples.request_ids)  # each request's first row
    of_prompts = samples.features.copy()
    of_prompts[:, :width] = samples.features[first, :width]
    for name, features, begin in (
        ("network, lengths", samples.features, width),
        ("network, states", samples.features, 0),
        ("network, prompts' states", of_prompts, 0),
    ):
        part = replace(samples, features=features[:, begin:], feature_names=samples.feature_names[begin:])
        predictor = trained(arguments.venv / "bin" / "python", part, seed, arguments.hidden)
        predicted[name] = predictor.predict(part.at(split.test).features)[0].astype(np.float64)
    generated = np.rint(np.expm1(test.column("log_generated_tokens")))
    return {
        "requests": len(asked),
        "samples": len(samples),
        "floor": floor(asked),
        "predictors": {name: scores(values, test.remaining, generated) for name, values in predicted.items()},
    }


def floor(asked: list[Asked]) -> float:
    """The mean absolute error of counting that knows the word: what noise leaves to nobody."""
    off = []
    for kind in range(len(KINDS)):
        lengths = np.array([each.tokens for each in asked if each.kind == kind], np.float64)
        for length in lengths:
            generated = np.arange(0, length, EVERY, dtype=np.float64)
            off += np.abs(Survival(lengths).median(generated) - (length - generated)).tolist()
    return mean(off)


def scores(
    predicted: NDArray[np.float64], remaining: NDArray[np.float32], generated: NDArray[np.float32]
) -> dict[str, float]:
    """Mean absolute errors, tokens, by generated tokens, and the shares of pairs in the right
    order."""
    bucket = np.searchsorted(EDGES, generated, side="right") - 1
    off = np.abs(predicted - remaining)
    found = {"all": float(off.mean())}
    found |= {str(EDGES[at]): float(off[bucket == at].mean()) for at in range(len(EDGES))}
    new = bucket == 0
    return found | {
        "pairs": in_order(predicted, remaining),
        "pairs at 0": in_order(predicted[new], remaining[new]),
    }


def in_order(predicted: NDArray[np.float64], remaining: NDArray[np.float32]) -> float:
    """The share of pairs that a prediction orders as their lengths; equal predictions are half
    right."""
    wanted = np.sign(remaining[:, None] - remaining[None, :])
    given = np.sign(predicted[:, None] - predicted[None, :])
    pairs = wanted != 0
    return float(((wanted * given)[pairs] + 1).mean() / 2)


def table(runs: list[dict[str, Any]]) -> str:
    """The means of the seeds, and the lowest and highest total, as Markdown."""
    names = ["all", *map(str, EDGES), "pairs", "pairs at 0"]
    lines = ["| predictor | " + " | ".join(names) + " |", "| --- " * (len(names) + 1) + "|"]
    for predictor in runs[0]["predictors"]:
        by_seed = [run["predictors"][predictor] for run in runs]
        cells = [f"{mean(each[name] for each in by_seed):.{2 if 'pairs' in name else 1}f}" for name in names]
        low, high = (extreme(each["all"] for each in by_seed) for extreme in (min, max))
        cells[0] += f" ({low:.1f} to {high:.1f})"
        lines.append(f"| {predictor} | {' | '.join(cells)} |")
    return "\n".join([*lines, f"floor: {mean(run['floor'] for run in runs):.1f} tokens"])


def main() -> None:
    """Measures the errors and the cost."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--venv", type=Path, required=True, help="an environment with vLLM")
    parser.add_argument("--seeds", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--requests", type=int, default=800, help="of a seed; default: %(default)s")
    parser.add_argument("--at", nargs="*", choices=("end", "anywhere"), default=["end", "anywhere"])
    parser.add_argument("--hidden", default="256,64,16", help="widths; default: %(default)s")
    parser.add_argument("--rounds", type=int, default=3, help="of the cost, 0: none; default: %(default)s")
    parser.add_argument("--out", type=Path, help="default: bench/results/DATE-hidden_states.json")
    arguments = parser.parse_args()
    result: dict[str, Any] = {"about": about(None, []) | {"load_average": os.getloadavg()}}
    for at in arguments.at:
        asked = [workload(seed, arguments.requests, at) for seed in range(arguments.seeds)]
        with TemporaryDirectory() as folder:
            samples = collected(arguments.venv, Path(folder), asked)
        result[at] = [compared(each, asked[seed], seed, arguments) for seed, each in enumerate(samples)]
        print("the word at the end" if at == "end" else f"the word {at}", table(result[at]), sep="\n\n")
        write_result(result, "hidden_states", arguments.out)
    if arguments.rounds:
        result["cost"] = cost(arguments.venv, arguments.rounds)
        print(json.dumps(result["cost"]))
    print("written:", write_result(result, "hidden_states", arguments.out), file=sys.stderr)


if __name__ == "__main__":
    main()
