"""The scenarios of the Libra study: workloads, systems and fleets, the figures of a run, and the
definition of capacity.

All arrivals are Poisson, and no prompt shares a prefix with another. A run lasts `SECONDS` of
arrivals, and then until all requests have ended. Requests that arrive in its first quarter do not
count.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

import lmetric as lm
from lmetric.profiles import Profile, load_profile
from lmetric.profiles.roofline import GPUS, MODELS, Model, roofline
from lmetric_lab.sim.distributions import Distribution, LogNormal, draw_whole
from lmetric_lab.sim.result import Run
from lmetric_lab.sim.run import simulate
from lmetric_lab.sim.traces import Trace, load_trace
from rerun import Pool, traces

FITTED = Path(__file__).parent / "profiles"
SECONDS, WARM_UP = 300.0, 75.0
SLO = 0.1  # section 6.1: seconds from a token to the next
TUNING_SEED = 1000  # seeds from here on choose settings; no result uses them
CHUNKS = (256, 512, 1024, 2048)  # section 6.1

AZURE_CONVERSATION = "azure_conv_2023.csv.gz"
# Prompt and answer tokens. Fixed: Table 1, section 4.1. Azure Code: published medians (Splitwise,
# section 3), means of that trace. arXiv: Sarathi-Serve, Table 2. Assumed: the spread of Mini
# Reasoning (means in Table 1) and BurstGPT's prompts. BurstGPT's mean answer follows from Table 3:
# goodput over capacity is 64 to 69 tokens per request, with half of the requests from Azure Code.
WORKLOADS: dict[str, tuple[Distribution, Distribution]] = {
    "8192/32": (8192, 32),
    "2048/512": (2048, 512),
    "219/1467": (219, 1467),
    "1024/1024": (1024, 1024),
    "azure-code": (
        LogNormal(p50=1500, mean=2048, min=16, max=8192),
        LogNormal(p50=13, mean=28, min=1, max=1024),
    ),
    "burstgpt": (
        LogNormal(p50=400, mean=620, min=16, max=8192),
        LogNormal(p50=70, mean=106, min=1, max=1024),
    ),
    "arxiv": (
        LogNormal(p50=7059, p90=12985, min=256, max=16384),
        LogNormal(p50=208, p90=371, min=16, max=1024),
    ),
    "mini-reasoning": (
        LogNormal(p50=180, mean=219, min=16, max=2048),
        LogNormal(p50=1250, mean=1467, min=64, max=8192),
    ),
}
# Mini Reasoning with the reasoning share of each answer, drawn evenly: assumed.
WORKLOADS["thinking"] = WORKLOADS["mini-reasoning"]
THOUGHT = {"thinking": (0.7, 0.9)}
MIXED = {"hybrid": ("burstgpt", "azure-code"), "half-and-half": ("azure-code", "mini-reasoning")}
NAMED = ("azure-code", "burstgpt", "arxiv", "mini-reasoning", "azure-conversation")


@dataclass(frozen=True)
class System:
    """How a fleet serves requests."""

    label: str
    roles: str | None = None  # pools in place of instances that do all
    chunk: int | None = 2048  # tokens of a step; None: tuned
    slo: bool = False  # Algorithm 2 on each engine
    split: bool = False
    fixed_pair: bool = False  # the first part on instance 0, the second on instance 1, as in section 6.1
    least_gain: float = -1.0  # below 0: every balance is a cut, as printed
    known: bool = True  # lengths of answers
    transfer: str = "50,chunks"
    forced: float | None = None  # every request is cut at this fraction
    stages: bool = False  # Algorithm 2 uses the SLO of reasoning tokens when the engine makes nothing else
    parts: int = 2  # most parts of a request with reasoning
    bounded: bool = False  # the predictor's batch has at most the number of requests that run at once


LIBRA = System("Libra as printed", slo=True, split=True, fixed_pair=True)
BY_LOAD = replace(LIBRA, label="Libra, pair by load", fixed_pair=False)
GAINFUL = replace(BY_LOAD, label="ours: cut where it gains", least_gain=0.05)
LIBRA_ESTIMATED = replace(LIBRA, label="Libra as printed, lengths estimated", known=False)
BY_LOAD_ESTIMATED = replace(BY_LOAD, label="Libra, pair by load, lengths estimated", known=False)
ESTIMATED = replace(GAINFUL, label="ours, lengths estimated", known=False)
TUNED = System("colocated, chunk tuned", chunk=None)
DEFAULT = System("colocated, chunk 2048")
COMPOSED = System("colocated, Algorithm 2", slo=True)
STAGED = replace(COMPOSED, label="colocated, Algorithm 2 by stage", stages=True)
LIBRA_STAGED = replace(LIBRA, label="Libra, two parts, Algorithm 2 by stage", stages=True)
LIBRA_THREE = replace(LIBRA_STAGED, label="Libra, three parts", parts=3)
THREE_BY_LOAD = replace(LIBRA_THREE, label="Libra, three parts, pair by load", fixed_pair=False)
BOUNDED = [
    replace(system, label=f"{system.label}, N_max", bounded=True) for system in (LIBRA, BY_LOAD, GAINFUL)
]
DISAGGREGATED = System("1P1D", roles="1P1D")
ALL = [TUNED, COMPOSED, DISAGGREGATED, LIBRA, BY_LOAD, GAINFUL]


@dataclass(frozen=True)
class Fleet:
    """Engines of one profile, their number, and the SLO of each token."""

    profile: str = "qwen2.5-14b-a100"
    instances: int = 2
    slo: float = SLO
    think_slo: float | None = None  # SLO of reasoning tokens; None: as of other tokens
    parallel: tuple[int, int] = (1, 1)  # GPUs of each instance by tensor parallelism: prefill, decode

    @property
    def gpus(self) -> int:
        """GPUs of all instances; by tensor parallelism there are two."""
        return self.instances if self.parallel == (1, 1) else sum(self.parallel)


STEP_CONSTANTS = (
    "fixed_seconds", "decode_seconds_per_sequence", "decode_seconds_per_context_token",
    "prefill_seconds_per_token", "prefill_seconds_per_attention_pair",
)  # fmt: skip
QWEN_72B = Model(
    "qwen2.5-72b", layers=80, hidden=8192, heads=64, kv_heads=8, head_dim=128, intermediate=29568,
    vocabulary=152064,
)  # fmt: skip


@cache
def profile_of(name: str) -> Profile:
    """Returns our profile from Table 1 and Figure 5, or a roofline: shipped, or the 72B model on
    four A100."""
    if (path := FITTED / f"{name}.yaml").exists():
        return load_profile(str(path))
    return roofline(QWEN_72B, GPUS["a100"], 4) if name == "qwen2.5-72b-4xa100" else load_profile(name)


@cache
def parallel(name: str, gpus: int) -> Profile:
    """Returns the profile of a Qwen2.5-14B by tensor parallelism: each constant times the ratio of
    the rooflines of this number of A100s and one A100."""
    one, many = (roofline(MODELS["qwen2.5-14b"], GPUS["a100"], n) for n in (1, gpus))
    profile = profile_of(name)
    names = (*STEP_CONSTANTS, "cache_blocks")
    scaled = {name: getattr(profile, name) * getattr(many, name) / getattr(one, name) for name in names}
    return profile.model_copy(update=scaled | {"cache_blocks": int(scaled["cache_blocks"])})


@cache
def recorded() -> Trace:
    """Returns Azure's hour of conversations, of which only the lengths are used."""
    return load_trace(traces() / AZURE_CONVERSATION).open_loop()


def lengths(workload: str, n: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns prompts and answers of `n` requests, in tokens; the first values are the same for any
    `n`."""
    prompts, answers, parts = (np.random.default_rng((seed, i)) for i in (1, 2, 3))
    if workload == "azure-conversation":
        trace = recorded()
        chosen = parts.integers(len(trace), size=n)
        return trace.input_tokens[chosen], np.maximum(trace.output_tokens[chosen], 1)
    if workload in MIXED:
        both = [lengths(part, n, seed + 10_000 * i) for i, part in enumerate(MIXED[workload])]
        first = parts.random(n) < 0.5
        return np.where(first, both[0][0], both[1][0]), np.where(first, both[0][1], both[1][1])
    prompt, answer = WORKLOADS[workload]
    return draw_whole(prompt, n, prompts, least=1), draw_whole(answer, n, answers, least=1)


@lru_cache(maxsize=4)
def made(workload: str, rate: float, seed: int, spread: tuple[str, float] | None = None) -> Trace:
    """Returns the arriving requests: at another rate the same requests, closer together. `spread`
    replaces the workload's answers with normal or log-normal values about them, by a deviation in
    tokens or of the logarithm."""
    gaps = np.random.default_rng((seed, 0)).exponential(1.0, int(rate * SECONDS * 1.5 + 200))
    arrivals = np.cumsum(gaps) / rate
    arrivals = arrivals[arrivals < SECONDS]
    prompts, answers = lengths(workload, len(arrivals), seed)
    if spread is not None:
        kind, width = spread
        noise = np.random.default_rng((seed, 4)).standard_normal(len(arrivals)) * width
        # Log-normal with the same mean.
        drawn = answers + noise if kind == "normal" else answers * np.exp(noise - width**2 / 2)
        answers = np.maximum(np.rint(drawn), 1).astype(np.int64)
    thoughts = None
    if workload in THOUGHT:
        share = np.random.default_rng((seed, 5)).uniform(*THOUGHT[workload], len(arrivals))
        thoughts = np.rint(answers * share).astype(np.int64)
    return Trace(
        name=workload, arrival_seconds=arrivals, input_tokens=prompts, output_tokens=answers,
        think_tokens=thoughts, hash_offsets=np.zeros(len(arrivals) + 1, np.int64),
        hash_ids=np.zeros(0, np.uint64), block_tokens=16,
    )  # fmt: skip


def _by_number(sign: float) -> Any:
    return lm.policy_function(
        lambda columns: sign * np.arange(len(np.atleast_1d(columns["bs"])), dtype=np.float64),
        reads=["bs"],
        name="first" if sign > 0 else "last",
    )


def run(
    workload: str,
    rate: float,
    system: System,
    fleet: Fleet,
    seed: int,
    spread: tuple[str, float] | None = None,
) -> Run:
    """Runs one simulation to its end."""
    if system.chunk is None:
        raise RuntimeError(f"{system.label}: its chunk is to be tuned first")
    first, second = (
        (profile_of(fleet.profile) if gpus == 1 else parallel(fleet.profile, gpus)).model_copy(
            update={"max_batch_tokens": system.chunk}
        )
        for gpus in fleet.parallel
    )
    told: dict[str, Any] = {"policy": "least_requests"}
    if fleet.parallel != (1, 1):
        told["decode_profile"] = second
    told |= {"roles": system.roles} if system.roles else {"instances": fleet.instances}
    if system.slo:
        told |= {"local_order": "slo", "order_slo_seconds": fleet.slo}
        told |= {"order_think_slo_seconds": fleet.think_slo} if system.stages else {}
    if system.split or system.roles or system.forced is not None:
        told |= {"decode_policy": "least_requests", "transfer": system.transfer}
    if system.split:
        split = lm.LibraSplit(
            min_gain=system.least_gain,
            lengths_given=system.known,
            parts=system.parts,
            bounded_batch=system.bounded,
        )
        told |= {"split": split, "output_known": system.known}
    if system.forced is not None:
        told |= {"split": lm.SplitAt(fraction=system.forced)}
    if system.fixed_pair:
        told |= {"policy": _by_number(1.0), "decode_policy": _by_number(-1.0)}
    return simulate(
        made(workload, rate, seed, spread), profile=first, seed=seed, admission="vllm",
        programs="none",
        token_slo_seconds=fleet.slo, think_slo_seconds=fleet.think_slo, **told,
    )  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    """Figures of a run. Rates count requests that ended from warm-up to the last arrival; all other
    figures count requests that arrived then."""

    rate: float  # requests/s that were sent
    requests: float  # requests that ended, per second
    goodput: float  # output tokens per second within the SLO, of requests that ended, all instances together
    p50: float  # seconds between tokens, of the whole run
    p99: float
    slow: float  # share of gaps that are longer than the SLO
    ttft: float  # mean, seconds
    ttft_p99: float
    # Seconds per second by which the wait to the first token plus the worst gap grow, from the
    # first third to the last. Arrivals at x times the served rate make it 1 - 1 / x.
    delay_growth: float
    cut: float  # share of requests
    cut_at: float  # mean tokens
    preemptions: float  # per request


def outcome(played: Run) -> Outcome:
    """Returns the figures of a run."""
    arrived = played.arrival_seconds
    counts, last = arrived >= WARM_UP, float(arrived[-1])
    ended = (played.finished_seconds >= WARM_UP) & (played.finished_seconds < last)
    good = played.output_tokens - played.slow_tokens
    gaps = int((played.output_tokens[counts] - 1).sum())
    # A backlog shows before the first token, or at the segment boundary, before the second part.
    delay = played.ttft_seconds + played.worst_gap_seconds
    third = (last - WARM_UP) / 3
    first = float(delay[counts & (arrived < WARM_UP + third)].mean())
    end = float(delay[arrived >= last - third].mean())
    cut = played.cut_tokens >= 0
    return Outcome(
        rate=len(arrived) / last,
        requests=float(ended.sum() / (last - WARM_UP)),
        goodput=float(good[ended].sum() / (last - WARM_UP)),
        p50=played.gap_seconds(0.5) or 0.0,
        p99=played.gap_seconds(0.99) or 0.0,
        slow=float(played.slow_tokens[counts].sum() / max(gaps, 1)),
        ttft=float(played.ttft_seconds[counts].mean()),
        ttft_p99=float(np.percentile(played.ttft_seconds[counts], 99)),
        delay_growth=(end - first) / (2 * third),
        cut=float(cut[counts].mean()),
        cut_at=float(played.cut_tokens[counts & cut].mean()) if (counts & cut).any() else float("nan"),
        preemptions=float(played.preemptions[counts].mean()),
    )


def keeps_up(found: Outcome) -> bool:
    """Returns whether P99 TBT is within the SLO, and the backlog grows less than with 3% too many
    requests."""
    return found.slow <= 0.01 and found.delay_growth < 0.03


def play(workload: str, rate: float, system: System, fleet: Fleet, seed: int) -> Outcome:
    """Runs one simulation. Returns its figures."""
    return outcome(run(workload, rate, system, fleet, seed))


@cache
def most(workload: str, fleet: Fleet) -> float:
    """Returns the requests/s that would keep all instances busy if prompts had no fixed part of a
    step and decodes ran in batches as large as memory holds."""
    profile = profile_of(fleet.profile)
    prompts, answers = (column.astype(np.float64) for column in lengths(workload, 4000, TUNING_SEED))
    context = prompts + answers / 2
    batch = profile.cache_blocks * profile.block_tokens / ((answers * context).sum() / answers.sum())
    each = profile.decode_seconds_per_sequence + profile.fixed_seconds / min(batch, profile.max_sequences)
    seconds = profile.prefill_seconds_per_token * prompts
    seconds += profile.prefill_seconds_per_attention_pair * prompts**2 / 2
    seconds += answers * (each + profile.decode_seconds_per_context_token * context)
    return float(fleet.gpus / seconds.mean())


HALVINGS = 7


def capacity(workload: str, system: System, fleet: Fleet, seed: int) -> Outcome:
    """Runs at the highest rate at which `system` keeps up, to 1.5%: bisection of the rate's
    logarithm between a fifth and 1.2 times `most`. If it keeps up at no rate, rates are 0."""
    low, high, best = 0.2 * most(workload, fleet), 1.2 * most(workload, fleet), None
    for _ in range(HALVINGS):
        middle = float(np.sqrt(low * high))
        if keeps_up(found := play(workload, middle, system, fleet, seed)):
            low, best = middle, found
        else:
            high = middle
    return replace(found, rate=0.0, requests=0.0, goodput=0.0) if best is None else best


class World(Pool):
    """Runs systems."""

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__(options)
        self._chunks: dict[tuple[str, Fleet], int] = {}

    def some(self, names: Sequence[str]) -> Sequence[str]:
        """Returns the workloads: all, or one."""
        return names[:1] if self.quick else names

    def tuned(self, system: System, workload: str, fleet: Fleet) -> System:
        """Returns the system with the chunk of the highest capacity under this workload, by seeds
        that no result uses."""
        if system.chunk is not None:
            return system
        if (workload, fleet) not in self._chunks:
            seeds = range(TUNING_SEED, TUNING_SEED + (1 if self.quick else 2))
            jobs = {
                chunk: [
                    self.submit(capacity, workload, replace(system, chunk=chunk), fleet, seed)
                    for seed in seeds
                ]
                for chunk in CHUNKS
            }
            rates = {chunk: np.mean([job.result().rate for job in each]) for chunk, each in jobs.items()}
            self._chunks[workload, fleet] = max(rates, key=lambda chunk: rates[chunk])
        return replace(system, chunk=self._chunks[workload, fleet])

    def capacities(
        self, workloads: Sequence[str], systems: Sequence[System], fleet: Fleet
    ) -> Iterator[tuple[str, System, list[Outcome]]]:
        """Returns every system's capacity under every workload: one outcome per seed."""
        cases = [
            (workload, self.tuned(system, workload, fleet), fleet)
            for workload, system in product(workloads, systems)
        ]
        for (workload, system, _), found in self.each(capacity, cases):
            yield workload, system, found

    def plays(
        self, workload: str, rates: Sequence[float], systems: Sequence[System], fleet: Fleet
    ) -> Iterator[tuple[float, System, list[Outcome]]]:
        """Runs every system at every rate."""
        tuned = [self.tuned(system, workload, fleet) for system in systems]
        cases = [(workload, rate, system, fleet) for rate, system in product(rates, tuned)]
        for (_, rate, system, _), found in self.each(play, cases):
            yield rate, system, found
