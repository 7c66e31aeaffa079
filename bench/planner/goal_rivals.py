"""All rivals of the planner. They are every policy of the router with usual parameter values,
prefix fetches, fixed roles, splits, moves, and engines with other queue orders. A family is tuned
as one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

from goal_world import FIXED, LMETRIC, PULLING, Rival

# Values around each default, or as swept by the papers. The engines prefill up to 10,000 tokens a
# second.
KNOBS: dict[str, Mapping[str, Sequence[float]]] = {
    "lmetric": {"bs_offset": (0, 1)},
    "lmetric_pull": {"bs_offset": (0, 1), "by_batch": (0, 1)},
    "round_robin": {},
    "random": {},
    "least_requests": {},
    "power_of_two": {},
    "session_affinity": {},
    "vllm": {},
    "linear": {"lam": (0.3, 0.55, 0.7, 0.85)},
    "filter": {"range": (2, 4, 8, 16)},
    "aibrix_prefix": {"imbalance": (4, 8, 16), "sigmas": (1, 2)},
    "dynamo_linear": {"w": (0.3, 0.5, 0.7, 0.9)},
    "dynamo_reference": {},
    "dynamo": {"w": (0.25, 0.5, 1, 2), "overlap_credit": (1, 2)},
    "dynamo_two_tier": {"imbalance": (8, 32), "overlap": (0.3, 0.5)},
    "simulation": {},
    "llmd_scorers": {"queue": (2, 4), "prefix": (1, 3)},
    "llmd_affinity": {"peak_prefill_tokens_per_second": (10_000,), "max_ttft_seconds": (2, 6, 18)},
    "cache_aware": {"balance_abs": (8, 32, 64), "cache_threshold": (0.3, 0.5)},
    "prefix_spill": {"margin": (4, 16, 64)},
    "ray_prefix": {"imbalance": (4, 10, 20)},
    "preble": {"rebalance": (1.1, 1.5, 2)},
    "least_prefill": {},
    "least_tokens": {},
    "star_dispatch": {},
    "ils": {},
    "ils_requests": {},
}
# Policies that read handoffs, are the planner itself, must lose, or came after the study.
LEFT_OUT = (
    "sibyl", "sibyl_plus", "sibyl_parts", "sibyl_known", "planner",
    "always_worst", "lmetric_seconds", "total_delay",
)  # fmt: skip
# Without known lengths, star_dispatch equals least_tokens. sibyl builds on ils. llumnix moves
# nothing unless memory is short.
DECODES = ("least_requests", "sibyl", "sibyl_plus", "least_tokens")
# Policies without given lengths.
ORDERS = ("spf", "las", "slo", "distboost", "uniboost", "gittins")
# The gain that a split must have; below 0: every balance is a cut, as printed.
GAINS = (-1.0, 0.05, 0.3)


def knobbed(policy: str) -> list[Rival]:
    """Returns a policy with each combination of its parameters' values."""
    swept = KNOBS[policy]
    made = []
    for values in product(*swept.values()):
        knobs = dict(zip(swept, values, strict=True))
        inner = ", ".join(f"{name}={value:g}" for name, value in knobs.items())
        made.append(Rival(f"{policy}({inner})" if inner else policy, policy, knobs))
    return made


def also(rival: Rival, what: str, **settings: Any) -> Rival:
    """Returns the rival with further settings of the simulator."""
    return replace(rival, label=f"{rival.label}, {what}", settings={**rival.settings, **settings})


def pulling(policy: str, roles: Rival) -> Rival:
    """Returns fixed roles under a policy, with prefix fetches."""
    return replace(also(roles, f"{policy}, pulls", prefix_fetch="on"), policy=policy)


# Roles outside these do not keep up under any load of note.
LIKELY = [rival for rival in FIXED if int(rival.label.split("P")[0]) >= 8]
LIKELY_ROLES = [*LIKELY, *(pulling("lmetric_pull", rival) for rival in LIKELY)]


def families() -> dict[str, list[Rival]]:
    """Returns all rivals by family."""
    made = {policy: knobbed(policy) for policy in KNOBS}
    made["lmetric"].append(also(LMETRIC, "guard", guard=True))
    made["lmetric_pull"] = [also(rival, "pulls", prefix_fetch="on") for rival in made["lmetric_pull"]]
    made["other policies that pull"] = [
        also(Rival(policy, policy), "pulls", prefix_fetch="on")
        for policy in ("vllm", "least_requests", "simulation", "least_prefill")
    ]
    made["other orders"] = [
        also(rival, order, local_order=order) for rival in (LMETRIC, PULLING) for order in ORDERS
    ]
    made["moves"] = [also(Rival(policy, policy), "star", rebalance="star") for policy in ("lmetric", "vllm")]
    made["libra"] = [
        also(Rival(policy, policy), f"libra, {order}, gain {gain:g}", local_order=order,
             split={"kind": "libra", "min_gain": gain})
        for policy, order, gain in product(("lmetric", "least_requests"), ("fcfs", "slo"), GAINS)
    ]  # fmt: skip
    made["fixed roles"] = FIXED
    made["fixed roles that pull"] = [
        variant
        for rival in [pulling("lmetric_pull", rival) for rival in LIKELY]
        for variant in [
            *(also(rival, decodes, decode_policy=decodes) for decodes in DECODES),
            also(rival, "star", decode_policy="least_tokens", rebalance="star"),
            also(rival, "uniboost", local_order="uniboost"),
        ]
    ]
    return made
