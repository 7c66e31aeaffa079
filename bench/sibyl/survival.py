"""Figure 7 of the SIBYL paper: the error of the learned chance that a request continues.

The router sees answers as it does live: they begin, continue, and end. After a number of answers
its two curves (Eq. 4, and the product-limit estimator of sibyl_plus) are compared with answers that
it has not seen. The chance that an answer with g tokens makes m more is compared over a grid of
both, for all g that one in a hundred reaches.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

import lmetric as lm
from lmetric_lab.sim.synthetic import check_synthetic

STEP = 64.0  # tokens between two points of the learned curve
GRID = 256
SEEN = (64, 256, 1024, 4096)
AT_ONCE = 64  # answers that run beside each other
LEAST = 0.01
SURFACE = 6


def outputs(lengths: str, count: int, seed: int) -> NDArray[np.int64]:
    """Returns lengths of answers."""
    told = {"synthetic": "requests", "rate": 100, "duration_seconds": count / 50, "seed": seed}
    told |= {"lengths": lengths, "block_tokens": 512}
    made = check_synthetic(told, lengths).make().output_tokens
    return np.asarray(made[:count])


def errors(lengths: str, seed: int) -> list[dict[str, Any]]:
    """Returns errors after each number of answers (`seen`), for both curves."""
    told: list[dict[str, Any]] = []
    test = np.sort(outputs(lengths, 50_000, seed + 1000))
    router = lm.Router("round_robin", decode_policy="sibyl")
    router.add_instance("p", role="prefill")
    router.add_instance("d", role="decode")
    open_: list[tuple[lm.Ticket, int, int]] = []
    ended, now = 0, 0.0
    waiting = outputs(lengths, SEEN[-1] + AT_ONCE, seed).tolist()
    while ended < SEEN[-1]:
        now += 1.0
        while len(open_) < AT_ONCE and waiting:
            _, ticket = router.route(lm.Request(prompt_tokens=100), now=now)
            ticket.segment_done(prompt_tokens=100, now=now)
            ticket.first_token(now)
            open_.append((ticket, 1, waiting.pop()))
        going = []
        for ticket, made, length in open_:
            more = min(int(STEP), length - made)
            if more:
                ticket.tokens(more, now)
            if made + more < length:
                going.append((ticket, made + more, length))
                continue
            ticket.segment_done(output_tokens=length, now=now)
            ended += 1
            if ended in SEEN:
                learned = router.learned()
                for curve, name in (
                    ("eq4", "length_survival"),
                    ("product_limit", "length_survival_product_limit"),
                ):
                    told.append({"seen": ended, "curve": curve, **held_against(learned[name], test)})
        open_ = going
    return told


def held_against(curve: NDArray[np.float64], test: NDArray[np.int64]) -> dict[str, Any]:
    """Returns the mean, 95th percentile and largest error on the grid, and its means in `SURFACE`
    parts of both axes (by g, then by m). NaN if fewer than one answer in a hundred reaches g."""
    step = max(STEP, test[-1] / GRID)
    places = np.arange(0.0, test[-1], step)
    true = 1 - np.searchsorted(test, np.add.outer(places, places), side="right") / len(test)
    at = np.interp(np.add.outer(places, places), STEP * np.arange(len(curve)), curve)
    reached = true[:, 0] >= LEAST
    off = np.abs(at / at[:, :1] - true / np.maximum(true[:, :1], 1e-12))
    parts = np.array_split(np.arange(len(places)), SURFACE)
    surface = [
        [float(off[g[reached[g]]][:, m].mean()) if reached[g].any() else np.nan for m in parts] for g in parts
    ]
    off = off[reached]
    told = {"mean": float(off.mean()), "p95": float(np.percentile(off, 95)), "largest": float(off.max())}
    return told | {"surface": surface}
