"""The planner's parts, each switched off, alone and together, and the result with a feature
missing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from goal_world import LMETRIC, PLANNER, PULLING, Rival

from lmetric._core import policy_table

Settings = Mapping[str, Any]


@dataclass(frozen=True)
class Part:
    """A part of the planner that LMETRIC does not have, and how to switch it off."""

    label: str
    knobs: Mapping[str, float] = field(default_factory=dict, hash=False)
    settings: Settings = field(default_factory=dict, hash=False)  # settings of the simulator
    split_settings: Settings = field(default_factory=dict, hash=False)
    of: str = ""  # the part without which it does nothing


PARTS = [
    Part("weight", knobs={"weight": 1.0}),
    Part("pulls", settings={"prefix_fetch": "none"}),
    Part("apart", settings={"split": "none"}),
    Part("early first tokens", split_settings={"max_stall_seconds": 0.0}, of="apart"),
]


def without(label: str, off: Sequence[Part]) -> Rival:
    """Returns the planner with parts switched off."""
    knobs = {name: value for part in off for name, value in part.knobs.items()}
    settings = {name: value for part in off for name, value in part.settings.items()}
    cut = {name: value for part in off for name, value in part.split_settings.items()}
    if cut and "split" not in settings:
        settings["split"] = {"kind": "apart", **cut}
    return Rival(label, PLANNER.policy, knobs, settings)


def ablations() -> list[Rival]:
    """Returns all parts, none, each alone, and all but each."""
    alone = [
        without(f"{part.label} alone", [each for each in PARTS if each is not part])
        for part in PARTS
        if not part.of
    ]
    rest = [
        without(f"without {part.label}", [each for each in PARTS if each is part or each.of == part.label])
        for part in PARTS
    ]
    return [PLANNER, without("no part", PARTS), *alone, *rest]


# A prompt without known tokens is matched as text, by past placements; it is neither split nor gets
# a prefix fetch. Engines without KV transfer leave the weight alone.
WHOLE: Settings = {"prefix_fetch": "none", "split": "none"}
BY_PLACED: Settings = {"index": "approximate"}
BLIND = "queued_prefill_tokens + prompt_tokens"  # p_token of a router without any known prefix
(WEIGHT,) = (row["knobs"][0]["default"] for row in policy_table() if row["name"] == PLANNER.policy)
KEPT = [
    Rival("no tokens: planner", PLANNER.policy, settings={**WHOLE, **BY_PLACED}),
    Rival("no tokens: lmetric", LMETRIC.policy, settings=BY_PLACED),
    Rival("no KV events: planner", PLANNER.policy, settings=BY_PLACED),
    Rival("no KV events: lmetric_pull", PULLING.policy, settings={**PULLING.settings, **BY_PLACED}),
    Rival("no prefix known: planner", f"({BLIND}) * (1 + {WEIGHT} * bs)", settings={"split": "apart"}),
    Rival("no prefix known: lmetric", f"({BLIND}) * (bs + 1)"),
]
