"""The scenarios of the UniBoost study: engines, mixtures of lengths, orders, and the figures of a
run.

Load is given as rho: arrivals over the rate that the engine carries under FCFS with a queue that is
never empty (`carried`). In a run, requests that arrive between its first tenth and its last count.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lmetric.profiles import Profile
from lmetric.profiles.roofline import GPUS, MODELS, Gpu, Model, roofline
from lmetric_lab.sim.distributions import LENGTHS, Distribution, Quantiles, draw_whole
from lmetric_lab.sim.result import Run
from lmetric_lab.sim.run import simulate
from lmetric_lab.sim.traces import Trace, load_trace
from lmetric_lab.sim.workload import Workload, prepare
from rerun import traces

AZURE = "azure_conv_2023.csv.gz"
REQUESTS = 10_000  # section 4
COUNTED = (0.1, 0.9)  # share of them, by arrival
CHUNK_TOKENS = 1024  # of a step, Figure 6

CODELLAMA = Model("codellama-34b", 48, 8192, 64, 8, 128, 22_016, 32_016)
QWEN_72B = Model("qwen2-72b", 80, 8192, 64, 8, 128, 29_568, 152_064)
H100 = Gpu("h100", "H100 (80 GB, SXM)", 989e12, 3.35e12, 81_559 * 2**20, 450e9)
ENGINES: dict[str, tuple[Model, Gpu, int]] = {
    "Llama-8B, A100": (MODELS["llama-3.1-8b"], GPUS["a100"], 1),
    "Llama-8B, H100": (MODELS["llama-3.1-8b"], H100, 1),
    "CodeLlama-34B, A100": (CODELLAMA, GPUS["a100"], 1),
    "Qwen-72B, 4 A100": (QWEN_72B, GPUS["a100"], 4),
}


def pair(prompts: Mapping[float, float], answers: Mapping[float, float]) -> tuple[Quantiles, Quantiles]:
    """Returns lengths by their quantiles."""
    return Quantiles(quantiles=dict(prompts)), Quantiles(quantiles=dict(answers))


def shipped(name: str) -> tuple[float, tuple[Distribution, Distribution], None]:
    """Returns the share of s1k among Azure's requests, and its lengths, of a shipped mixture."""
    (long,) = LENGTHS[name].kinds
    return long.share, (long.input_tokens, long.output_tokens), None


S1K = shipped("mix-1")[1]
# Table 3: short and long requests, each with the named length.
SHORT = pair({0: 125, 1: 125}, {0: 100, 1: 100})
LONG = pair({0: 2000, 1: 2000}, {0: 6000, 1: 6000})
# A tenant with documents to summarize.
BULK = pair({0: 4000, 0.5: 8000, 1: 16000}, {0: 100, 0.5: 300, 1: 800})
Pair = tuple[Distribution, Distribution]
# By name: the share of long requests, their lengths, and all others' (None: Azure's, as recorded).
MIXTURES: dict[str, tuple[float, Pair, Pair | None]] = {
    "mix-1": shipped("mix-1"),
    "mix-2": shipped("mix-2"),
    "reasoning": (1.0, S1K, None),
    "azure": (0.0, S1K, None),
    "short and long": (0.1, LONG, SHORT),
    "chat and bulk": (0.3, BULK, None),
}


@dataclass(frozen=True)
class Stage:
    """An engine, or several behind a policy, under a load."""

    engine: str
    mixture: str
    rho: float
    instances: int = 1
    policy: str = "random"
    cv: float = 1.0  # coefficient of variation of the gaps between arrivals; 1: Poisson
    requests: int = REQUESTS  # requests per instance
    chunk_tokens: int = CHUNK_TOKENS
    most_sequences: int = 256

    @property
    def label(self) -> str:
        many = "" if self.instances == 1 else f", {self.instances} under {self.policy}"
        places = "" if self.most_sequences == 256 else f", {self.most_sequences} places"
        bursts = "" if self.cv == 1 else f", bursts (cv {self.cv:g})"
        chunk = "" if self.chunk_tokens == CHUNK_TOKENS else f", {self.chunk_tokens} tokens a step"
        return f"{self.engine}, {self.mixture}, rho {self.rho:g}{bursts}{places}{chunk}{many}"


@dataclass(frozen=True)
class Order:
    """An engine's order."""

    label: str
    local: str
    priority: str = "none"
    settings: Mapping[str, float] = field(default_factory=dict, hash=False)


SARATHI = Order("Sarathi", "fcfs")
TRAIL = Order("TRAIL+", "trail")
SJF = Order("SJF (LTR+)", "ltr")
LAS = Order("LAS (MLFQ+)", "las")
DIST = Order("DistBoost", "distboost")
BASE = Order("+ unified", "uniboost_base")
GUARDED = Order("+ MEMGUARD", "uniboost_memguard")
BASE_WAITS = Order("+ unified, decodes wait", "uniboost_base(decodes_wait=1)")
UNIBOOST = Order("UniBoost", "uniboost")
UNIBOOST_WAITS = Order("UniBoost, decodes wait", "uniboost(decodes_wait=1)")
GUARDED_STEPS = Order("+ MEMGUARD, whole steps", "uniboost_memguard(whole_steps=1)")
UNIBOOST_STEPS = Order("UniBoost, whole steps", "uniboost(whole_steps=1)")
SUBMITTED = Order("submit-time UniBoost", "priority", "uniboost")
VTC = Order("VTC", "priority", "vtc")
GITTINS = Order("Gittins", "gittins")
SRPT = Order("SRPT", "srpt")


@cache
def profile_of(engine: str, chunk_tokens: int, most_sequences: int) -> Profile:
    """Returns the engine model."""
    model, gpu, gpus = ENGINES[engine]
    made = roofline(model, gpu, gpus)
    return made.model_copy(update={"max_batch_tokens": chunk_tokens, "max_sequences": most_sequences})


@cache
def azure() -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Returns prompts and answers of the recorded trace, pair by pair."""
    trace = load_trace(traces() / AZURE)
    return np.maximum(trace.input_tokens, 1), np.maximum(trace.output_tokens, 1)


def mixed(mixture: str, n: int, rng: np.random.Generator) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Returns prompts, answers, and a mask of the long requests."""
    share, long, others = MIXTURES[mixture]
    is_long = rng.random(n) < share
    columns = []
    rows = rng.integers(0, len(azure()[0]), n)
    for part in range(2):
        rest = azure()[part][rows] if others is None else draw_whole(others[part], n, rng, least=1)
        columns.append(np.where(is_long, draw_whole(long[part], n, rng, least=1), rest))
    return columns[0], columns[1], is_long


def requests(
    mixture: str, arrivals: NDArray[np.float64], rng: np.random.Generator
) -> tuple[Trace, NDArray[Any]]:
    """Returns a trace, and a mask of its long requests."""
    n = len(arrivals)
    prompts, answers, is_long = mixed(mixture, n, rng)
    trace = Trace(
        name=mixture, arrival_seconds=arrivals, input_tokens=prompts, output_tokens=answers,
        hash_offsets=np.zeros(n + 1, np.int64), hash_ids=np.zeros(0, np.uint64), block_tokens=16,
        sessions=is_long.astype(np.int64),  # The router sees these as tenants.
    )  # fmt: skip
    return trace, is_long


@cache
def carried(engine: str, mixture: str, chunk_tokens: int, most_sequences: int) -> float:
    """Returns the requests per second of one engine whose queue is never empty, under FCFS."""
    n = 4000
    profile = profile_of(engine, chunk_tokens, most_sequences)
    trace, _ = requests(mixture, np.zeros(n), np.random.default_rng(12345))
    ends = np.sort(play(prepare(trace, profile), profile, SARATHI, "random", 1, 0).finished_seconds)
    return float(0.6 * n / (ends[int(0.8 * n)] - ends[int(0.2 * n)]))


def play(workload: Workload, profile: Profile, order: Order, policy: str, instances: int, seed: int) -> Run:
    """Runs one simulation."""
    return simulate(
        workload,
        programs="none",
        policy=policy,
        instances=instances,
        profile=profile,
        seed=seed,
        admission="vllm",
        local_order=order.local,
        priority={"kind": order.priority, **(order.settings or {})},
        preempt="swap",
        guard=None,
        token_stride=20,
        output_known=False,
        predictor=None,
    )


@lru_cache(maxsize=6)
def arriving(stage: Stage, seed: int) -> tuple[Workload, NDArray[Any]]:
    """Returns the requests that arrive, and a mask of the long ones."""
    rng = np.random.default_rng(seed)
    n = stage.requests * stage.instances
    rate = (
        stage.instances
        * stage.rho
        * carried(stage.engine, stage.mixture, stage.chunk_tokens, stage.most_sequences)
    )
    shape = 1 / stage.cv**2
    arrivals = np.cumsum(rng.gamma(shape, 1 / (shape * rate), n))
    trace, is_long = requests(stage.mixture, arrivals, rng)
    return prepare(trace, profile_of(stage.engine, stage.chunk_tokens, stage.most_sequences)), is_long


def outcome(stage: Stage, order: Order, seed: int) -> dict[str, float]:
    """Returns the figures of a run."""
    workload, is_long = arriving(stage, seed)
    profile = profile_of(stage.engine, stage.chunk_tokens, stage.most_sequences)
    run = play(workload, profile, order, stage.policy, stage.instances, seed)
    return figures(run, is_long)


def figures(run: Run, is_long: NDArray[Any]) -> dict[str, float]:
    """Returns the seconds of all counted requests, and of short and long requests separately."""
    n = len(run)
    counts = np.zeros(n, bool)
    counts[int(COUNTED[0] * n) : int(COUNTED[1] * n)] = True
    found: dict[str, float] = {}
    for name, kept in {"": counts, "short ": counts & ~is_long, "long ": counts & is_long}.items():
        if not kept.any():
            continue
        for what, column in (
            ("e2e", run.e2e_seconds),
            ("ttft", run.ttft_seconds),
            ("tpot", run.tpot_seconds),
        ):
            values = column[kept]
            values = values[~np.isnan(values)]
            found[f"{name}{what} mean"] = float(values.mean())
            for q in (50, 90, 95, 99, 99.9):
                found[f"{name}{what} p{q:g}"] = float(np.percentile(values, q))
    if is_long.any():
        late = counts & is_long
        found["long e2e max"] = float(run.e2e_seconds[late].max())
        # Steps take less than a second: a longer gap is a stay in the queue.
        found["long pause p99"] = float(np.percentile(run.worst_gap_seconds[late], 99))
        found["slope, s a request"] = float(np.polyfit(np.flatnonzero(late), run.e2e_seconds[late], 1)[0])
    found |= {f"gap p{q}": float(run.gap_seconds(q / 100) or 0) for q in (95, 99)}
    found["preempted"] = float(run.preemptions[counts].sum() / counts.sum())
    busy = run.finished_seconds.max() - run.arrival_seconds[0]
    found["tokens a second"] = float((run.output_tokens.sum() + run.input_tokens.sum()) / busy)
    found["oom"] = float(run.oom)
    return found


def attained(scales: Sequence[float]) -> str:
    """Returns how many times as strict an SLO can be, by seed."""
    return f"{np.mean(scales):.2f} ({min(scales):.2f} to {max(scales):.2f})"
