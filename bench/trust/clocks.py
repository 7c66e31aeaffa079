"""The same placements under two clocks: the simulator's figures of each request, and its client's.

`lmetric.simulate` plays the scene. Then every request is sent, in real time and at its arrival
time, straight to the emulated engine on which the simulator placed it. Both sides run the same
engine model with the same constants and admission. Only real time differs: sockets, parsing,
timers, and other work on the machine.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from live import Live, Scene, engines, placed, play
from numpy.typing import NDArray
from resample import interval

from lmetric_lab.sim.result import Run
from lmetric_lab.sim.run import simulate

QUANTITIES = ("ttft_seconds", "tpot_seconds", "e2e_seconds")
GOAL = 0.03
_OF: dict[str, Callable[[NDArray[np.float64]], Any]] = {
    "mean": np.nanmean,
    "p50": np.nanmedian,
    "p99": lambda values: np.nanpercentile(values, 99),
}


async def two_clocks(scene: Scene, policy: str) -> dict[str, Any]:
    """Returns the figures of both sides, and their ratios."""
    trace = scene.trace()
    run = simulate(
        trace, policy=policy, instances=scene.engines, profile=scene.resolved_profile(), admission="vllm"
    )
    async with engines(scene) as fleet, placed(fleet.urls, run.instance) as sender:
        live = await play(trace, sender, scene.clock_speed)
        engine_means = await fleet.means()
    return compare(run, live, engine_means)


def compare(run: Run, live: Live, engine_means: dict[str, float]) -> dict[str, Any]:
    """Returns live over simulated: ratios of means and percentiles with their 95% intervals, and
    the figures that are equal."""
    done = ~np.isnan(live.e2e_seconds)
    n = int(done.sum())
    result: dict[str, Any] = {
        "requests": len(run),
        "failures": live.failures[:5],
        "preemptions": int(run.preemptions.sum()),
        "tokens_equal": bool(
            (live.prompt_tokens == run.input_tokens)[done].all()
            and (live.output_tokens == run.output_tokens)[done].all()
        ),
        "requests_with_equal_hits": int((live.hit_tokens == run.hit_tokens)[done].sum()),
        "hit_ratio": {
            "simulated": _ratio(run.hit_tokens, run.input_tokens),
            "live": _ratio(live.hit_tokens[done], run.input_tokens[done]),
        },
        "late_wall_seconds": {
            "mean": float(live.late_seconds.mean()),
            "p99": float(np.percentile(live.late_seconds, 99)),
            "max": float(live.late_seconds.max()),
        },
    }
    hit = result["hit_ratio"]
    hit["ratio"] = hit["live"] / hit["simulated"] if hit["simulated"] else None
    for name in QUANTITIES:
        simulated, seen = getattr(run, name)[done], getattr(live, name)[done]
        result[name] = {
            "by_figure": {figure: _compared(of, simulated, seen, n) for figure, of in _OF.items()},
            "engines_mean": engine_means[name],
            "engines_ratio": engine_means[name] / float(np.nanmean(simulated)),
            "difference_ms": {figure: 1e3 * float(of(seen - simulated)) for figure, of in _OF.items()},
        }
    ttft, wanted = live.ttft_seconds[done].mean(), run.ttft_seconds[done].mean()
    late, engines_own = live.late_seconds.mean(), engine_means["ttft_seconds"]
    result["ttft_excess_ms"] = {
        "sent_late": 1e3 * float(late),
        "sockets_parsing_timers": 1e3 * float(ttft - late - engines_own),
        "in_the_engines": 1e3 * float(engines_own - wanted),
    }
    result["within_goal"] = not live.failures and all(
        abs(ratio - 1) <= GOAL
        for ratio in [
            hit["ratio"] or 1.0,
            *(result[name]["by_figure"]["mean"]["ratio"] for name in QUANTITIES),
        ]
    )
    return result


def _compared(of: Any, simulated: NDArray[np.float64], live: NDArray[np.float64], n: int) -> dict[str, Any]:
    return {
        "simulated": float(of(simulated)),
        "live": float(of(live)),
        "ratio": float(of(live) / of(simulated)),
        "interval": interval(lambda drawn: float(of(live[drawn]) / of(simulated[drawn])), n),
    }


def _ratio(part: NDArray[np.int64], whole: NDArray[np.int64]) -> float:
    return int(part.sum()) / int(whole.sum())
