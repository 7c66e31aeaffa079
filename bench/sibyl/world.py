"""The scenarios of the SIBYL study: decode pools, lengths, loads and rivals, and the figures of a
run.

A load is a share of the rate that a decode pool can sustain. Under Eq. (15), that rate is the
curve's peak over an answer's mean length. Under the step-time model with unbounded batches, it is
one request per ``mean answer x (seconds a sequence + seconds a context token x mean context)``;
with bounded batches, the rate of the largest batch.

A *life* is the time, at that load, of the answer to which a randomly drawn token belongs: ``E[L^2]
/ E[L]`` tokens. So a few long answers with most of the tokens count in full. Runs last `LIVES`
lives; the first `WARM_UP` and the last `TAIL` lives do not count.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from itertools import product
from typing import Any

import numpy as np

from lmetric.profiles import Profile, load_profile
from lmetric.profiles.roofline import MODELS, Gpu, roofline
from lmetric_lab.sim.result import Run
from lmetric_lab.sim.run import simulate
from lmetric_lab.sim.setups import PolicyChoice
from lmetric_lab.sim.synthetic import check_synthetic
from lmetric_lab.sim.traces import Trace, load_trace
from lmetric_lab.sim.workload import Workload, prepare
from rerun import Pool, traces

LENGTHS = ("sibyl-random", "sharegpt-like", "zeta-like")
ENGINES = {
    "Eq. 15, held": "sibyl-eq15-held",
    "step time": "independent-pd",
    "Eq. 15, as printed": "sibyl-eq15-as-printed",
    "256 sequences": "independent-pd",
}
MOST_SEQUENCES = {"256 sequences": 256}  # vLLM's default; else unbounded
# The paper's testbeds (section 5, Table 4, Appendix F). They use 0.8 of the memory, `roofline`
# takes 0.9.
_H20 = Gpu("h20", "H20 (141 GB)", 148e12, 4.0e12, int(141e9 * 0.8 / 0.9), 450e9)
_A100 = Gpu("a100", "A100 (40 GB)", 312e12, 1.89e12, int(40e9 * 0.8 / 0.9), 300e9)
TESTBEDS = {
    "Qwen3-32B on H20": (MODELS["qwen3-32b"], _H20),
    "Qwen2.5-7B on A100": (MODELS["qwen2-7b"], _A100),
    "Llama3-8B on A100": (MODELS["llama-3.1-8b"], _A100),
}
# Lengths without a name: Appendix G's, uniform.
OWN_LENGTHS: dict[str, dict[str, Any]] = {
    "uniform to 1,024 and 4,096": {
        "input_tokens": {"quantiles": {0: 0.5, 1: 1024.5}},
        "output_tokens": {"quantiles": {0: 0.5, 1: 4096.5}},
    }
}
WARM_UP, TAIL, LIVES = 2.0, 1.1, 5.1
TRACES = {
    "azure-conversation": ("azure_conv_2023.csv.gz", "azure"),
    "mooncake-conversation": ("mooncake_conversation.jsonl.gz", "mooncake"),
}
# SIBYL's Algorithm 2: prompts take their own time and do not queue, and their KV is there at once.
ALGORITHM_2: dict[str, Any] = {"prefill": "unlimited", "transfer": None}


@dataclass(frozen=True)
class Rival:
    """A decode policy with the settings of its run."""

    label: str
    policy: str
    settings: Mapping[str, Any] = field(default_factory=dict, hash=False)
    seeds: int | None = None  # the most


SIBYL = Rival("SIBYL", "sibyl")
ROUND_ROBIN = Rival("round robin", "round_robin")
LEAST_REQUESTS = Rival("least requests, bound ones too (REQLEVEL)", "least_requests")
LEAST_TOKENS = Rival("least tokens, bound ones too", "least_tokens")
ILS = Rival("ILS, tokens", "ils")
POWER_OF_TWO = Rival("power of two", "power_of_two")
MAIN = [ROUND_ROBIN, ILS, LEAST_REQUESTS, SIBYL]
RIVALS = [
    ROUND_ROBIN,
    Rival("random", "random"),
    POWER_OF_TWO,
    ILS,
    Rival("ILS, requests", "ils_requests"),
    LEAST_REQUESTS,
    LEAST_TOKENS,
    SIBYL,
]
ABLATIONS = [
    SIBYL,
    Rival("prob @ 1", "sibyl_parts(survival=0)"),
    Rival("no type 1", "sibyl_parts(type1=0)"),
    Rival("no type 2", "sibyl_parts(type2=0)"),
    Rival("no type 3", "sibyl_parts(type3=0)"),
    LEAST_REQUESTS,
]
PLUS = Rival("sibyl_plus", "sibyl_plus")
ORACLE = Rival("sibyl_plus that knows lengths", "sibyl_known")
BEYOND = [PLUS, ORACLE]
LATE = [
    Rival(f"{rival.label}, late", rival.policy, {"binding": "late"})
    for rival in (ILS, LEAST_REQUESTS, SIBYL, PLUS)
]


# Engines of a testbed: prompts queue, KV moves layer by layer, decodes that find no memory go back.
REAL_ENGINES: dict[str, Any] = {"prefill": "queues", "transfer": "50,layers", "admission": "vllm"}


@dataclass(frozen=True)
class Stage:
    """Decode instances under a load."""

    lengths: str
    engine: str
    decodes: int
    load: float | None  # None: `rate`
    rate: float = 0.0
    arrivals: str = "poisson"  # or a coefficient of variation; of a trace its own
    lives: float = LIVES
    # Times in a life at which the router learns how far answers are; None: each token, which makes
    # long runs of policies that read tokens ten times as slow.
    told: int | None = None

    @property
    def label(self) -> str:
        if self.lengths in TRACES:
            return f"{self.lengths}, its own arrivals, {self.decodes} decode instances, load {self.load:g}"
        told = f"{self.rate:g}/s" if self.load is None else f"load {self.load:g}"
        bursts = "" if self.arrivals == "poisson" else f", bursts (cv {self.arrivals})"
        return f"{self.lengths}, {self.engine}, {self.decodes} decode instances, {told}{bursts}"


@cache
def recorded(name: str) -> Trace:
    """Reads a trace from its file."""
    return load_trace(traces() / TRACES[name][0]).open_loop()


@cache
def sample(lengths: str) -> Trace:
    """Returns some requests, for their means."""
    if lengths in TRACES:
        return recorded(lengths)
    told = {"synthetic": "requests", "rate": 1000, "duration_seconds": 100, "seed": 0, **described(lengths)}
    return check_synthetic(told | {"block_tokens": 512}, lengths).make()


def described(lengths: str) -> dict[str, Any]:
    """Returns lengths as a description of a synthetic trace has them."""
    return OWN_LENGTHS.get(lengths, {"lengths": lengths})


@cache
def profile_of(engine: str) -> Profile:
    """Returns the engine model of a scenario."""
    if engine in TESTBEDS:
        return roofline(*TESTBEDS[engine])
    profile = load_profile(ENGINES[engine])
    if (most := MOST_SEQUENCES.get(engine)) is None:
        return profile
    return profile.model_copy(update={"max_sequences": most})


def most_sequences(engine: str, lengths: str) -> float:
    """Returns the largest batch of an engine: on a testbed, the number that its memory holds, in
    the mean over a run's tokens."""
    if engine not in TESTBEDS:
        return MOST_SEQUENCES.get(engine, np.inf)
    profile = profile_of(engine)
    return min(profile.max_sequences, profile.cache_blocks * profile.block_tokens / mean_context(lengths))


def mean_context(lengths: str) -> float:
    """Returns the context tokens of a token, over all made."""
    trace = sample(lengths)
    output = trace.output_tokens.astype(np.float64)
    return float(trace.input_tokens.mean() + (output**2).mean() / (2 * output.mean()))


def limit(profile: Profile, lengths: str, most: float = np.inf) -> float:
    """Returns the requests per second that a decode instance can sustain with a batch of `most`, or
    at its peak."""
    trace = sample(lengths)
    output = trace.output_tokens.astype(np.float64)
    if (curve := profile.decode_throughput) is not None:
        peak = curve.gamma - curve.beta**2 / (4 * curve.alpha)
        return float(peak / output.mean())
    context = profile.decode_seconds_per_context_token * mean_context(lengths)
    each = profile.decode_seconds_per_sequence + context
    return float(1 / (output.mean() * (each + profile.fixed_seconds / most)))


def life_tokens(lengths: str) -> float:
    """Returns the tokens of the answer to which a randomly drawn token belongs."""
    output = sample(lengths).output_tokens.astype(np.float64)
    return float((output**2).mean() / output.mean())


def life(profile: Profile, lengths: str, load: float) -> float:
    """Returns the seconds of a life if the load is spread evenly. `load`: of the limit with an
    unbounded batch."""
    output = life_tokens(lengths)
    if (curve := profile.decode_throughput) is not None:
        # The smaller batch that makes `load` of the peak: alpha n^2 + beta n + gamma = load x peak.
        made = load * (curve.gamma - curve.beta**2 / (4 * curve.alpha))
        root = curve.beta**2 - 4 * curve.alpha * (curve.gamma - made)
        batch = (-curve.beta + root**0.5) / (2 * curve.alpha)
        return output * batch / made
    return output * profile.fixed_seconds / (1 - load)


@dataclass(frozen=True)
class Outcome:
    """Figures of the requests that count: TPOT in ms, and shares."""

    mean: float
    p50: float
    p99: float
    p999: float
    least_loaded: float  # handoffs to the instance with the least context tokens: Table 1
    without_end: float  # requests that never ended, on engines that stand still
    batch: float  # mean of the decode instances
    requests: int


def play(stage: Stage, rival: Rival, settings: Mapping[str, Any], seed: int) -> Outcome:
    """Runs one simulation in steady state."""
    workload, begin, end = made(stage, seed)
    (choice,) = PolicyChoice.parse(rival.policy)
    told: dict[str, Any] = {"policy": "round_robin", "roles": {"prefill": 1, "decode": stage.decodes}}
    told |= ALGORITHM_2
    told |= {"decode_policy": choice.build(), "decode_knobs": dict(choice.knobs) or None}
    if stage.told is not None:
        told["token_stride"] = max(1, round(life_tokens(stage.lengths) / stage.told))
    run = simulate(
        workload,
        programs="none",
        profile=profile_of(stage.engine),
        seed=seed,
        **{**told, **rival.settings, **settings},
    )
    return outcome(run, begin, end)


@lru_cache(maxsize=2)
def made(stage: Stage, seed: int) -> tuple[Workload, float, float]:
    """Returns the requests, and the seconds between which they count."""
    profile = profile_of(stage.engine)
    per_instance = limit(profile, stage.lengths, most_sequences(stage.engine, stage.lengths))
    rate = stage.rate if stage.load is None else stage.load * per_instance * stage.decodes
    seconds = life(profile, stage.lengths, rate / (limit(profile, stage.lengths) * stage.decodes))
    if stage.lengths in TRACES:
        trace = sample(stage.lengths)
        played = trace.faster(rate * trace.duration_seconds / len(trace))
        return prepare(played, profile), WARM_UP * seconds, played.duration_seconds - seconds
    arrivals = "poisson" if stage.arrivals == "poisson" else {"cv": float(stage.arrivals)}
    told = {
        "synthetic": "requests", "rate": rate, "duration_seconds": seconds * stage.lives, "seed": seed,
        "arrivals": arrivals, "block_tokens": 512, **described(stage.lengths),
    }  # fmt: skip
    workload = prepare(check_synthetic(told, stage.label).make(), profile)
    return workload, WARM_UP * seconds, (stage.lives - TAIL) * seconds


class World(Pool):
    """Runs rivals in scenarios."""

    def sizes(self, *decodes: int) -> tuple[int, ...]:
        """Returns decode instances: all of them, or one small pool."""
        return (8,) if self.quick else decodes

    def all(
        self,
        stages: Sequence[Stage],
        rivals: Sequence[Rival],
        **settings: Any,
    ) -> Iterator[tuple[Stage, Rival, list[Outcome]]]:
        """Runs every rival in every scenario: one outcome per seed."""
        cases = product(stages, rivals, [settings])
        for (stage, rival, _), found in self.each(play, cases, lambda _, rival, __: rival.seeds):
            yield stage, rival, found


def outcome(run: Run, begin: float, end: float) -> Outcome:
    """Returns the figures of the requests that arrived between `begin` and `end`."""
    counts = (run.arrival_seconds >= begin) & (run.arrival_seconds < end)
    ended = counts & np.isfinite(run.finished_seconds)
    tpot = run.tpot_seconds[ended] * 1e3
    known = tpot[~np.isnan(tpot)]
    p50, p99, p999 = (float(p) for p in np.percentile(known, (50, 99, 99.9))) if len(known) else (np.nan,) * 3
    buckets = slice(*(int(at / run.timeline.bucket_seconds) for at in (begin, end)))
    decodes = [role == "decode" for role in (run.roles.each() if run.roles else [])]
    return Outcome(
        mean=float(known.mean()) if len(known) else np.nan,
        p50=p50,
        p99=p99,
        p999=p999,
        least_loaded=float(run.handoff_least_loaded[counts].mean()),
        without_end=1 - float(ended.sum() / counts.sum()),
        batch=float(run.timeline.running[decodes, buckets].mean()),
        requests=int(counts.sum()),
    )
