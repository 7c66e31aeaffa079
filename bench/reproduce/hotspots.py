"""Figure 20 and section 5.2: when multiplication may fail, on traces as recorded and on a synthetic
hot spot."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
from book import Claim, Made, Ours, Row, figure, rounded
from comparisons import against
from numpy.typing import NDArray
from world import DEFAULT, HALF, INSTANCES, LMETRIC, VLLM, Choice, Stage, World, values

from hot_spot import HOT, surge
from lmetric.policies import Columns, policy_function
from lmetric_lab.sim.result import Run
from lmetric_lab.sim.synthetic import check_synthetic
from lmetric_lab.sim.traces import Trace
from lmetric_lab.sim.workload import prepare

WINDOW_SECONDS = 60.0  # as in the paper
TRACKED = 10  # classes with the most hits in a window ("samples the classes with the highest KV$ hits")
GUARD_LEAST = 16  # requests of a class below which our guard never suspects it

UNGUARDED = Choice("lmetric", label="guard off", settings={"guard": False})

Masks = NDArray[np.int64]


@dataclass
class Seen:
    """A class in a window: how often x / not x was above |M| / |not M|, and by how much."""

    requests: int
    share: float
    holders: int

    @property
    def factor(self) -> float:
        """Returns (x / (1 - x)) / (|M| / |not M|). Above 1, Equation 2 is broken. 0 if all
        instances hold the prefix: the load cannot move."""
        if self.holders in (0, INSTANCES) or self.share == 1:
            return 0.0
        return (self.share / (1 - self.share)) / (self.holders / (INSTANCES - self.holders))


def watch(world: World, stage: Stage, seed: int) -> tuple[Run, Masks]:
    """Runs LMETRIC's score without the guard. Returns the run and the blocks that each instance
    holds of each prompt at its placement: shape (requests, instances)."""
    held: list[np.ndarray] = []
    block = stage.profile.block_tokens

    def scored(columns: Columns) -> np.ndarray:
        held.append((np.asarray(columns["hit_tokens"]) / block).astype(np.int64))
        return np.asarray(columns["p_token"]) * (np.asarray(columns["bs"]) + 1)

    policy = policy_function(scored, ["hit_tokens", "p_token", "bs"])
    run = world.play(stage, stage.part(seed), Choice(policy), seed, HALF)
    by_request = np.empty((len(run), INSTANCES), np.int64)
    by_request[np.argsort(run.arrival_seconds, kind="stable")] = held
    return run, by_request


def classes(trace: Trace, run: Run, held: Masks) -> Iterator[list[Seen]]:
    """Returns, for each whole window, its `TRACKED` classes with the most tokens found cached. As
    in the guard, classes are prefixes at power-of-two depths of the cached part. Trace blocks are
    engine blocks here."""
    window = (run.arrival_seconds / WINDOW_SECONDS).astype(np.int64)
    for number in range(int(window.max())):
        inside = np.flatnonzero(window == number)
        requests: dict[bytes, int] = defaultdict(int)
        hits: dict[bytes, int] = defaultdict(int)
        holders: dict[bytes, int] = {}
        for request in inside:
            ids, own = trace.blocks(int(request)), held[request]
            depth, deepest = 1, int(own.max())
            while depth <= min(deepest, len(ids)):
                key = ids[:depth].tobytes()
                requests[key] += 1
                hits[key] += int(run.hit_blocks[request])
                holders[key] = int((own >= depth).sum())  # of the window's last request
                depth *= 2
        best = sorted(hits, key=hits.__getitem__, reverse=True)
        # Nested prefixes of the same requests and holders are one class: the shallowest.
        found: dict[tuple[int, int, int], Seen] = {}
        for key in best:
            told = (hits[key], requests[key], holders[key])
            found.setdefault(told, Seen(requests[key], requests[key] / len(inside), holders[key]))
            if len(found) == TRACKED:
                break
        yield list(found.values())


@figure("20", "Figure 20: x / (1 - x) against |M| / |not M|")
def figure_20(world: World) -> Made:
    broken, heavy, largest, alarms, filters = [], [], [], [], []
    for stage in world.sharing:
        shares: list[tuple[float, float, float]] = []
        for seed in world.seeds:
            run, held = watch(world, stage, seed)
            seen = [each for window in classes(stage.part(seed).workload.trace, run, held) for each in window]
            counted = [each for each in seen if each.requests >= GUARD_LEAST]
            shares.append((
                float(np.mean([each.factor > 1 for each in seen])) if seen else 0.0,
                float(np.mean([each.factor > 1 for each in counted])) if counted else 0.0,
                max((each.factor for each in counted), default=0.0),
            ))  # fmt: skip
        for at, found in enumerate((broken, heavy, largest)):
            found.append(Ours(stage.label, [each[at] for each in shares]))
        runs = world.runs(stage, LMETRIC)
        alarms.append(Ours(stage.label, values(runs, "guard_alarms")))
        filters.append(Ours(stage.label, values(runs, "guard_filters")))
    return Made(
        [
            Claim("x / (1 - x) > |M| / |not M|, share of classes and minutes (5.2)", "never on its traces",
                  "about 0", broken, "share"),
            Claim(f"the same, of classes with {GUARD_LEAST} requests or more", "never", "about 0",
                  heavy, "share"),
            Claim("the largest (x / (1 - x)) / (|M| / |not M|) among those", "below 1", "", largest, "ratio"),
            Claim("alarms of our guard's phase 1 in a run", "0", "", alarms, "ratio"),
            Claim("filters of its phase 2 in a run", "0", "", filters, "ratio"),
            Claim("mean TTFT with the guard against without it", "no figure", "about 0",
                  against(world, world.sharing, LMETRIC, UNGUARDED, "ttft_mean")),
            Claim("mean TPOT with the guard against without it", "no figure", "about 0",
                  against(world, world.sharing, LMETRIC, UNGUARDED, "tpot_mean")),
        ]
    )  # fmt: skip


SHARES, PREFIXES = (0.1, 0.2, 0.4), (8000, 16000)
FRACTION = 0.3
# Columns of the table of runs: figure of a run and factor to the column's unit.
HOT_COLUMNS = {
    "ttft_mean_s": ("ttft", 1.0),
    "prefix_ttft_mean_s": ("prefix_ttft", 1.0),
    "tpot_mean_ms": ("tpot", 1e3),
    "e2e_mean_s": ("e2e", 1.0),
    "others_tpot_mean_ms": ("others", 1e3),
    "all_ttft_mean_s": ("all_ttft", 1.0),
    "all_tpot_mean_ms": ("all_tpot", 1e3),
    "first_copies": ("copies", 1.0),
    "filters": ("filters", 1.0),
}
GUARDED = Choice("lmetric", label="guard on", settings={"guard": True})
CONTENDERS = {"off": UNGUARDED, "on": GUARDED, "default": DEFAULT, "vllm": VLLM}
# Claims about the default policy, which turns the guard on: what is compared, and its figure.
OF_DEFAULT = {
    "their TTFT": "ttft",
    "their E2E": "e2e",
    "their TPOT": "tpot",
    "TTFT of all requests with the prefix": "prefix_ttft",
    "TTFT of all requests": "all_ttft",
    "TPOT of all requests": "all_tpot",
}


@figure("guard", "Section 5.2: a made hot spot, the guard on and off")
def guard(world: World) -> Made:
    profile = world.profile("qwen3-30b-a3b-h20", 64)
    quiet = check_synthetic({**HOT, "seed": 0}, "hot").make()
    stage = Stage("hot spot", profile, part := world.part(quiet, profile), (part,))

    @cache
    def played(known: bool, share: float, tokens: int, name: str) -> list[dict[str, float]]:
        """Returns the outcome of each seed."""

        def each(seed: int) -> dict[str, float]:
            trace, hot, with_prefix = surge(seed, share, tokens, known=known)
            made = replace(stage.tune, workload=prepare(trace, stage.profile))
            # Engines that share blocks among running requests: reserving would count the prefix
            # for each.
            run = world.play(stage, made, CONTENDERS[name], seed, FRACTION, admission="vllm")
            return {
                "ttft": float(run.ttft_seconds[hot].mean()),
                "prefix_ttft": float(run.ttft_seconds[with_prefix].mean()),
                "e2e": float(run.e2e_seconds[hot].mean()),
                "tpot": float(np.nanmean(run.tpot_seconds[hot])),
                "others": float(np.nanmean(run.tpot_seconds[~hot])),
                "all_ttft": float(run.ttft_seconds.mean()),
                "all_tpot": float(np.nanmean(run.tpot_seconds)),
                # Hot requests that compute the prefix, or most of it.
                "copies": float((run.hit_tokens[hot] < tokens / 2).sum()),
                "filters": float(run.guard_filters),
            }

        return world.each_seed(each)

    shares, prefixes = (SHARES[-1:], PREFIXES[-1:]) if world.quick else (SHARES, PREFIXES)
    cases = [(known, share, tokens) for known in (True, False) for share in shares for tokens in prefixes]
    rows: list[Row] = []
    for at in cases:
        key = {"prefix": "known" if at[0] else "new", "share": f"{at[1]:.0%}", "tokens": f"{at[2]:,}"}
        for name in CONTENDERS:
            figures = {
                column: rounded(each[quantity] * factor for each in played(*at, name))
                for column, (quantity, factor) in HOT_COLUMNS.items()
            }
            rows.append({**key, "guard": name, **figures})

    def ratio(ours: str, theirs: str, quantity: str) -> list[Ours]:
        return [
            Ours(
                f"{'known' if at[0] else 'new'} prefix, {at[1]:.0%}, {at[2]:,} tokens",
                [
                    a[quantity] / b[quantity] - 1
                    for a, b in zip(played(*at, ours), played(*at, theirs), strict=True)
                ],
            )
            for at in cases
        ]

    return Made(
        [
            Claim("a hot spot breaks the score: TPOT of the hot requests, guard off, against "
                  "vLLM's", "fails, no figure", "more", ratio("off", "vllm", "tpot")),
            Claim("the guard mends it: their TPOT, on against off", "mends, no figure", "less",
                  ratio("on", "off", "tpot")),
            Claim("their E2E, on against off", "no figure", "less", ratio("on", "off", "e2e")),
            Claim("their TTFT, on against off", "no figure", "less", ratio("on", "off", "ttft")),
            Claim("their TPOT, guard on against vLLM's", "no figure", "",
                  ratio("on", "vllm", "tpot")),
            Claim("their E2E, guard on against vLLM's", "no figure", "", ratio("on", "vllm", "e2e")),
            Claim("their TTFT, guard on against vLLM's", "no figure", "",
                  ratio("on", "vllm", "ttft")),
            Claim("TTFT of all requests with the prefix, guard on against vLLM's", "no figure", "",
                  ratio("on", "vllm", "prefix_ttft")),
            Claim("TPOT of all requests, guard on against vLLM's", "no figure", "",
                  ratio("on", "vllm", "all_tpot")),
            Claim("TTFT of all requests, guard on against vLLM's", "no figure", "",
                  ratio("on", "vllm", "all_ttft")),
            Claim("the others' TPOT, on against off", "no figure", "", ratio("on", "off", "others")),
            *(
                Claim(f"the default policy against vLLM's: {what}", "no figure", "",
                      ratio("default", "vllm", quantity))
                for what, quantity in OF_DEFAULT.items()
            ),
        ],
        {"runs": rows},
    )  # fmt: skip
