"""Compares the order of policies in the simulator and over live engines behind the real router.

Every policy plays the scene live, `repeats` times with other ties and other prompts, and simulated
with `seeds` seeds in two settings. One is the simulator's default (it knows everything at once).
The other is the live router's view (an approximate index, loads read once a second). The order is
by mean TTFT, from the time at which the trace wants a request sent, and by mean TPOT.

The control is a policy that must lose: LMETRIC's score with the highest score taken. It sends
everything to one engine, so it plays only the first `control_requests`, and is compared with the
same requests of the others.
"""

from __future__ import annotations

import sys
from itertools import combinations
from typing import Any

import numpy as np
from live import Engines, Scene, engines, play, router
from numpy.typing import NDArray
from resample import draws

from lmetric_lab.sim.run import simulate
from lmetric_lab.sim.traces import Trace
from lmetric_lab.sim.workload import Workload, prepare

POLICIES = ("round_robin", "random", "vllm", "filter", "linear", "dynamo", "lmetric")
CONTROL = "always_worst"
# Servers do not offer the control, which is for studies. They play it as an expression.
_SERVED = {CONTROL: "0 - p_token * (bs + 1)"}
QUANTITIES = ("ttft_seconds", "tpot_seconds")
_READ_SECONDS = 1.0  # interval at which the router reads the engines' loads, by the wall's clock
Floats = NDArray[np.float64]  # runs of a policy: shape (runs, QUANTITIES, requests)


async def rank_agreement(
    scene: Scene, policies: list[str], *, repeats: int, seeds: int, control_requests: int
) -> dict[str, Any]:
    """Returns the means of each policy, Kendall's tau between the sides with its interval, every
    pair, and the control."""
    trace = scene.trace()
    short = trace.first(control_requests)
    workload, short_workload = (prepare(each, scene.resolved_profile()) for each in (trace, short))
    settings = {
        "as_default": {},
        "as_live": {
            "signals": "delayed",
            "index": "approximate",
            "report_period_seconds": _READ_SECONDS * scene.clock_speed,
        },
    }

    def simulated(policy: str, workload: Workload, setting: dict[str, Any]) -> Floats:
        return np.stack([_simulate(scene, workload, policy, seed, setting) for seed in range(seeds)])

    sim = {name: {p: simulated(p, workload, s) for p in policies} for name, s in settings.items()}
    control = {name: simulated(CONTROL, short_workload, s) for name, s in settings.items()}
    live: dict[str, list[Floats]] = {policy: [] for policy in policies}
    async with engines(scene) as fleet:
        # Repeats are the outer loop, policies the inner loop, so that the machine's other work
        # affects all policies alike.
        for repeat in range(repeats):
            for policy in policies:
                live[policy].append(await _live(scene, fleet, trace, policy, repeat))
        live_control = (await _live(scene, fleet, short, CONTROL, 0))[None]
    seen = {policy: np.stack(rows) for policy, rows in live.items()}
    return {
        "requests": len(trace),
        **{
            quantity: {
                "policies": {
                    policy: {
                        "live": _mean(seen[policy][:, row]),
                        "live_repeats": [_mean(values[row]) for values in seen[policy]],
                        **{name: _mean(sim[name][policy][:, row]) for name in settings},
                    }
                    for policy in policies
                },
                "agreement": {name: agreement(_rows(sim[name], row), _rows(seen, row)) for name in settings},
            }
            for row, quantity in enumerate(QUANTITIES)
        },
        "control": {
            "policy": CONTROL,
            "requests": len(short),
            "live": _against(live_control, seen),
            **{name: _against(control[name], sim[name]) for name in settings},
        },
    }


def agreement(sim: dict[str, Floats], live: dict[str, Floats]) -> dict[str, Any]:
    """Returns Kendall's tau of the means of two sides, each policy's values of shape (runs,
    requests), NaN: none.

    The interval is the middle 95% over draws of runs and of blocks of requests, the same for all
    policies. A pair is decided on a side if its difference keeps its sign in 95% of the draws. It
    is *close* if it is not decided on both sides.
    """
    names = list(sim)
    pairs = list(combinations(range(len(names)), 2))

    def signs(means: Floats) -> Floats:
        return np.array([np.sign(means[a] - means[b]) for a, b in pairs])

    sides = [np.stack([side[name] for name in names]) for side in (sim, live)]
    rng = np.random.default_rng(0)
    drawn = []
    for requests in draws(sides[0].shape[2]):
        rows = []
        for side in sides:
            runs = rng.integers(0, side.shape[1], side.shape[1])
            rows.append(signs(np.nanmean(side[:, runs][:, :, requests], axis=(1, 2))))
        drawn.append(rows)
    sim_drawn, live_drawn = np.array(drawn).swapaxes(0, 1)
    sim_sign, live_sign = (signs(np.nanmean(side, axis=(1, 2))) for side in sides)
    taus = (sim_drawn * live_drawn).mean(axis=1)
    keeps = [
        (side_drawn == sign).mean(axis=0)
        for side_drawn, sign in ((sim_drawn, sim_sign), (live_drawn, live_sign))
    ]
    decided = (keeps[0] >= 0.95) & (keeps[1] >= 0.95)
    same = sim_sign == live_sign
    name_of = [f"{names[a]}, {names[b]}" for a, b in pairs]
    return {
        "tau": float((sim_sign * live_sign).mean()),
        "interval": [float(each) for each in np.percentile(taus, (2.5, 97.5))],
        "pairs": len(pairs),
        "same_order": int(same.sum()),
        "decided": int(decided.sum()),
        "decided_same_order": int((decided & same).sum()),
        "close": [name for name, clear in zip(name_of, decided, strict=True) if not clear],
        "contradictions": [name for name, bad in zip(name_of, decided & ~same, strict=True) if bad],
    }


async def _live(scene: Scene, fleet: Engines, trace: Trace, policy: str, repeat: int) -> Floats:
    await fleet.fresh()
    async with router(_SERVED.get(policy, policy), fleet.urls, scene) as client:
        live = await play(trace, client, scene.clock_speed, seed=repeat)
    if live.failures:
        raise SystemExit(f"{policy}: {len(live.failures)} requests failed, the first: {live.failures[0]}")
    late = 1e3 * np.percentile(live.late_seconds, 99)
    mean = live.ttft_seconds.mean()
    print(f"live {policy} {repeat + 1}: mean TTFT {mean:.3f} s, sent late p99 {late:.0f} ms", file=sys.stderr)
    return np.stack([getattr(live, quantity) for quantity in QUANTITIES])


def _simulate(scene: Scene, workload: Workload, policy: str, seed: int, setting: dict[str, Any]) -> Floats:
    run = simulate(
        workload,
        programs="none",
        policy=policy,
        instances=scene.engines,
        profile=scene.resolved_profile(),
        admission="vllm",
        guard=False,
        seed=seed,
        **setting,
    )
    return np.stack([getattr(run, quantity) for quantity in QUANTITIES])


def _rows(sides: dict[str, Floats], row: int) -> dict[str, Floats]:
    return {policy: values[:, row] for policy, values in sides.items()}


def _mean(values: Floats) -> float:
    return float(np.nanmean(values))


def _against(control: Floats, others: dict[str, Floats]) -> dict[str, Any]:
    """Returns the control's mean TTFT and the worst of the others' over the same requests."""
    ttft, n = control[:, 0], control.shape[2]
    means = {policy: _mean(values[:, 0, :n]) for policy, values in others.items()}
    worst = max(means, key=means.__getitem__)
    return {
        "mean": _mean(ttft),
        "worst_other": worst,
        "worst_other_mean": means[worst],
        "loses": _mean(ttft) > means[worst],
    }
