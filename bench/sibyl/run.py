"""Reruns the SIBYL paper's simulations, under three engine models, with its rivals and
ablations."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from survival import errors
from tables import rendered
from world import (
    ABLATIONS,
    BEYOND,
    ILS,
    LATE,
    LEAST_REQUESTS,
    LEAST_TOKENS,
    LENGTHS,
    MAIN,
    ORACLE,
    OWN_LENGTHS,
    PLUS,
    POWER_OF_TWO,
    REAL_ENGINES,
    RIVALS,
    ROUND_ROBIN,
    SIBYL,
    TRACES,
    Rival,
    Stage,
    World,
)

from rerun import Rerun, columns

Row = dict[str, Any]
RERUN = Rerun(Path(__file__).parent, "sibyl.md", rendered)
figure = RERUN.figure


def rows(world: World, stages: Sequence[Stage], rivals: Sequence[Rival], **settings: Any) -> Row:
    made = []
    for stage, rival, found in world.all(stages, rivals, **settings):
        made.append({"stage": stage.label, "policy": rival.label, **columns(found, digits=5)})
        print(f"{stage.label}: {rival.label}: p99 {made[-1]['p99']}", file=sys.stderr, flush=True)
    return {"rows": made}


@figure("independent", "The stage of the independent simulation (12 requests/s)")
def independent(world: World) -> Row:
    (decodes,) = world.sizes(64)
    stage = Stage("sharegpt-like", "step time", decodes, None, rate=12 * decodes / 64)
    return rows(world, [stage], [*RIVALS, *LATE, *BEYOND])


@figure("9", "Figure 9 and Table 1: 64 decode instances")
def figure_9(world: World) -> Row:
    # Under the step-time model 0.4 is a batch of 45, about the memory of an H20.
    loads = {"Eq. 15, held": (0.4, 0.8), "step time": (0.2, 0.4)}
    stages = [
        Stage(lengths, engine, decodes, load)
        for decodes in world.sizes(64)
        for engine in loads
        for lengths in LENGTHS
        for load in (loads[engine][-1:] if world.quick else loads[engine])
    ]
    return rows(world, stages, [*MAIN, *BEYOND])


CURVE_DECODES = 16  # nine settings, several seeds: a small pool
LIVES_OF_MANY = 4.1  # pools of hundreds are slow to simulate, and have more requests to count


@figure("15", "Figure 15 and Table 6: 128 and 256 decode instances")
def figure_15(world: World) -> Row:
    stages = [
        Stage(lengths, "Eq. 15, held", decodes, 0.4, lives=LIVES_OF_MANY)
        for lengths in ("sharegpt-like", "zeta-like")
        for decodes in world.sizes(128, 256)
    ]
    return rows(world, stages, [*MAIN, *BEYOND])


@figure("8", "Figure 8: ablations")
def figure_8(world: World) -> Row:
    stages = [
        Stage("sharegpt-like", engine, decodes, 0.4)
        for decodes in world.sizes(64)
        for engine in ("Eq. 15, held", "step time")
    ]
    return rows(world, stages, ABLATIONS)


@figure("curve", "SIBYL's length curve: its memory (alpha) and the width of its buckets")
def curve(world: World) -> Row:
    stages = [
        Stage("sharegpt-like", engine, decodes, 0.4)
        for decodes in world.sizes(CURVE_DECODES)
        for engine in ("Eq. 15, held", "step time")
    ]
    rivals = [
        Rival(f"SIBYL, alpha {alpha:g}, {tokens} tokens", f"sibyl(alpha={alpha:g}, bucket_tokens={tokens})")
        for alpha in (0.99, 0.999, 0.9999)
        for tokens in (16, 64, 256)
    ]
    return rows(world, stages, [LEAST_REQUESTS, *rivals])


@figure("printed", "Eq. (15) as printed: engines past 105 requests stand still")
def as_printed(world: World) -> Row:
    stages = [
        Stage("sharegpt-like", "Eq. 15, as printed", decodes, load)
        for decodes in world.sizes(64)
        for load in (0.4, 0.8)
    ]
    return rows(world, stages, MAIN)


@figure("light", "A load so light that most instances are idle: where Table 1's ratios can come from")
def light(world: World) -> Row:
    stages = [
        Stage("sharegpt-like", "Eq. 15, held", decodes, load)
        for decodes in world.sizes(64)
        for load in ((0.02,) if world.quick else (0.005, 0.02, 0.1))
    ]
    return rows(world, stages, MAIN)


@figure("queues", "Real prefill queues under LMETRIC, KV at 50 GB/s, Poisson and bursty arrivals")
def queues(world: World) -> Row:
    (decodes,) = world.sizes(64)
    stages = [
        Stage("zeta-like", "step time", decodes, 0.4, arrivals=arrivals) for arrivals in ("poisson", "3")
    ]
    real = {
        "policy": "lmetric", "roles": {"prefill": decodes // 8, "decode": decodes},
        "prefill": "queues", "transfer": "50",
    }  # fmt: skip
    return rows(world, stages, [*MAIN, *LATE, *BEYOND], **real)


def testbed(
    world: World, engine: str, lengths: Sequence[str], prefills: int, loads: Sequence[float]
) -> list[Row]:
    """Returns one of the paper's clusters: its prefill instances by round robin, four decode
    instances."""
    stages = [
        Stage(each, engine, 4, load) for each in lengths for load in (loads[-1:] if world.quick else loads)
    ]
    roles = {"roles": {"prefill": prefills, "decode": 4}}
    made: list[Row] = rows(world, stages, [*MAIN, PLUS], **REAL_ENGINES, **roles)["rows"]
    return [each | {"stage": each["stage"].replace("4 decode instances", f"{prefills}P4D")} for each in made]


TESTBED_LOADS = (0.5, 0.7, 0.9)


@figure("6", "Figure 6: the paper's eight H20, simulated")
def figure_6(world: World) -> Row:
    h20 = "Qwen3-32B on H20"
    random = testbed(world, h20, ("sibyl-random",), 2, TESTBED_LOADS)
    return {"rows": random + testbed(world, h20, ("sharegpt-like", "zeta-like"), 4, TESTBED_LOADS)}


@figure("12", "Figure 12: the paper's six A100, simulated")
def figure_12(world: World) -> Row:
    engines = ("Qwen2.5-7B on A100", "Llama3-8B on A100")
    return {
        "rows": [row for each in engines for row in testbed(world, each, [*OWN_LENGTHS], 2, TESTBED_LOADS)]
    }


# -- beyond: sibyl_plus

# Lengths that were not looked at before sibyl_plus was complete, and lengths that were.
HELD_OUT = ("completion", "long-form", "extraction", "thinking-to-a-cap", "three-tenants")
SEEN = (
    "short-chat", "reasoning", "summaries", "two-sizes", "agents", "heavy-tails", "chat-and-documents",
    "ask-or-think", *LENGTHS,
)  # fmt: skip
LOADS = (0.4, 0.7, 0.95)
TOLD = 100  # sibyl_plus does not change by it; tails of rivals that read tokens are up to 5% longer
SEEDS_OF_THE_FAR = 3  # for rivals that are slow to simulate and not close


def judged(
    world: World, lengths: Sequence[str], loads: Sequence[float], decodes: int, *, oracle: bool = True
) -> Row:
    """Runs sibyl_plus against the rivals that it must beat."""
    near = [LEAST_REQUESTS, PLUS, ROUND_ROBIN, POWER_OF_TWO]
    slow = [ILS, LEAST_TOKENS, SIBYL, *([ORACLE] if oracle else [])]
    far = [replace(rival, seeds=SEEDS_OF_THE_FAR) for rival in slow]
    stages = [
        Stage(name, "256 sequences", decodes, load, lives=LIVES_OF_MANY, told=TOLD)
        for name in (lengths[:1] if world.quick else lengths)
        for load in (loads[:1] if world.quick else loads)
    ]
    return {"compare": PLUS.label, **rows(world, stages, [*near, *far])}


@figure("fresh", "sibyl_plus on lengths that it was not made with")
def fresh(world: World) -> Row:
    return judged(world, HELD_OUT, LOADS, *world.sizes(64))


@figure("fresh_128", "The same on 128 decode instances")
def fresh_128(world: World) -> Row:
    return judged(world, ("long-form", "extraction"), (0.4, 0.9), *world.sizes(128), oracle=False)


@figure("fresh_256", "The same on 256 decode instances")
def fresh_256(world: World) -> Row:
    return judged(world, ("extraction",), (0.4, 0.9), *world.sizes(256), oracle=False)


@figure("seen", "The same on lengths that were looked at while it was made")
def seen(world: World) -> Row:
    return judged(world, SEEN, (0.9,), *world.sizes(64))


@figure("traces", "The same on recorded traces")
def traces(world: World) -> Row:
    if world.quick:
        return {"compare": PLUS.label, "rows": []}  # the package has no whole trace
    # Few instances, so that an hour lasts some lives.
    return judged(world, list(TRACES), (0.4, 0.7, 0.9), 8)


@figure("7", "Figure 7: how far the learned chance to go on is off")
def figure_7(world: World) -> Row:
    found: Row = {"rows": [], "surfaces": []}
    for lengths in LENGTHS:
        for seeds in zip(*(errors(lengths, seed) for seed in world.seeds), strict=True):
            key = {"lengths": lengths, "seen": str(seeds[0]["seen"]), "curve": seeds[0]["curve"]}
            figures = {name: [one[name] for one in seeds] for name in ("mean", "p95", "largest")}
            found["rows"].append(key | figures)
            for g, parts in enumerate(zip(*(one["surface"] for one in seeds), strict=True), 1):
                by_m = {f"m {m}": list(cells) for m, cells in enumerate(zip(*parts, strict=True), 1)}
                found["surfaces"].append({**key, "g": str(g), **by_m})
    return found


if __name__ == "__main__":
    files = "mooncake_conversation.jsonl.gz and azure_conv_2023.csv.gz"
    RERUN.main_of_pool(__doc__, World, seeds=2, traces=files)
