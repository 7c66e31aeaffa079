"""The scenarios of the study of fleet changes: conversations, an instance that joins or leaves, and
the figures of a run."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from common import conversations
from lmetric.profiles import load_profile
from lmetric_lab.sim.run import simulate
from lmetric_lab.sim.workload import Workload

CHANGE_SECONDS = 900.0  # the first change
AFTER_SECONDS = 600.0  # measured from each change on
RESTART_SECONDS = 60.0  # from the end of an engine to its return
NEXT_SECONDS = 180.0  # between two restarts
ENGINES = 8  # of the smaller fleet
PROFILE = "qwen3-30b-a3b-h20"


@dataclass(frozen=True)
class Stage:
    """The changes of the fleet, and the load."""

    change: str  # join, leave or restart
    rate: float = 0.8  # conversations per second
    gigabytes: float = 25.0  # per second, of the link
    engine: str = PROFILE

    @property
    def label(self) -> str:
        what = {
            "join": f"{ENGINES} engines, one more joins",
            "leave": f"{ENGINES + 1} engines, one leaves",
            "restart": f"{ENGINES + 1} engines, three restart one after another",
        }[self.change]
        return f"{what}; {self.rate:g} conversations/s, {self.gigabytes:g} GB/s"

    @property
    def ends(self) -> float:
        """The end of the measured time."""
        last = CHANGE_SECONDS + (2 * NEXT_SECONDS if self.change == "restart" else 0.0)
        return last + AFTER_SECONDS

    @property
    def changes(self) -> str:
        """The changes, as `simulate` reads them."""
        if self.change == "join":
            return f"{CHANGE_SECONDS:g} join {ENGINES}"
        if self.change == "leave":
            return f"{CHANGE_SECONDS:g} leave 0"
        begins = [CHANGE_SECONDS + NEXT_SECONDS * engine for engine in range(3)]
        return ", ".join(
            f"{at:g} leave {engine}, {at + RESTART_SECONDS:g} join {engine}"
            for engine, at in enumerate(begins)
        )

    @property
    def steady_engines(self) -> int:
        """Engines of the fleet that never changes: as many as after the change."""
        return ENGINES if self.change == "leave" else ENGINES + 1


@dataclass(frozen=True)
class Rival:
    """How the fleet changes."""

    label: str
    warm: bool = False
    fetch: str = "none"  # prefix fetches of single requests
    steady: bool = False
    policy: str = "lmetric"


STEADY = Rival("no change", steady=True)
COLD = Rival("cold")
WARM = Rival("warm", warm=True)


@dataclass(frozen=True)
class Outcome:
    """Figures of the requests that arrive in the measured time."""

    requests: float
    ttft: float  # mean, s
    ttft_p50: float
    ttft_p99: float
    first_p99: float  # P99 of TTFT in the first minute, s
    tpot_p99: float  # ms
    found: float  # share of the prompt tokens found in the cache, or fetched
    tokens: float  # fetched for the changes, thousands
    seconds: float  # longest change: until a newcomer takes requests, or an engine is gone
    moves: float  # running requests that moved


@lru_cache(maxsize=2)
def made(stage: Stage, seed: int) -> Workload:
    """The conversations of a seed."""
    return conversations(seed, stage.rate, stage.ends, load_profile(stage.engine))


def play(stage: Stage, rival: Rival, seed: int) -> Outcome:
    """Runs one simulation with a live server's signals."""
    changes: dict[str, Any] = {"instances": ENGINES + (stage.change != "join" or not rival.steady)}
    if rival.steady:
        changes["instances"] = stage.steady_engines
    else:
        changes |= {"changes": stage.changes, "fleet_changes": "warm" if rival.warm else "none"}
    run = simulate(
        made(stage, seed),
        programs="none",
        policy=rival.policy,
        profile=load_profile(stage.engine),
        seed=seed,
        signals="delayed",
        admission="vllm",
        cached_answers=True,
        output_known=False,
        prefix_fetch=rival.fetch,
        transfer=f"{stage.gigabytes:g}",
        **changes,
    )
    at = run.arrival_seconds
    inside = (at >= CHANGE_SECONDS) & (at < stage.ends)
    first = (at >= CHANGE_SECONDS) & (at < CHANGE_SECONDS + 60.0)
    ttft = run.ttft_seconds
    found = run.hit_tokens + run.fetched_tokens
    lasts = [each.done_seconds - each.change.at_seconds for each in run.changes]
    return Outcome(
        requests=float(inside.sum()),
        ttft=float(ttft[inside].mean()),
        ttft_p50=float(np.percentile(ttft[inside], 50)),
        ttft_p99=float(np.percentile(ttft[inside], 99)),
        first_p99=float(np.percentile(ttft[first], 99)),
        tpot_p99=float(np.nanpercentile(run.tpot_seconds[inside], 99) * 1e3),
        found=float(found[inside].sum() / run.input_tokens[inside].sum()),
        tokens=sum(each.fetched_tokens for each in run.changes) / 1e3,
        seconds=max(lasts, default=0.0),
        moves=float(sum(each.moves for each in run.changes)),
    )
