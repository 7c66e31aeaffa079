"""How many requests must end until the router's gamma fits a new tail."""

from __future__ import annotations

import math

import numpy as np

import lmetric as lm

BEFORE = 6000  # ends after which gamma fits the first tail
MOST = 20_000


def ends_until_learned(before: float, after: float, seed: int) -> int:
    """Returns the ends after which gamma is within a third of `after` (1/s). End-to-end times are
    longer than t with probability e^-(rate t), with rate `before` at first."""
    router = lm.Router(policy="least_requests")
    router.add_instance("a")
    router.configure(priority=lm.UniBoost(gamma=1.0))
    rng = np.random.default_rng(seed)
    now = 0.0
    for end in range(BEFORE + MOST):
        now += 1.0
        _, ticket = router.route(lm.Request(prompt_tokens=100), now=now)
        seconds = float(rng.exponential(1 / (before if end < BEFORE else after)))
        ticket.first_token(now=now)
        ticket.segment_done(now=now + seconds)
        gamma = router.learned()["gamma"]
        if end >= BEFORE and abs(math.log(gamma / after)) < math.log(4 / 3):
            return end - BEFORE + 1
    raise RuntimeError(f"gamma is {gamma:.3g} after {MOST} ends of rate {after}")
