"""Turns found by the prefixes of prompts, compared with the definition on random traces."""

from __future__ import annotations

import random

import numpy as np
import pytest

from lmetric_lab.sim.traces import Trace
from lmetric_lab.sim.traces.turns import SHARED_AFTER, previous_by_prefix

BLOCK_TOKENS = 4


def random_trace(draw: random.Random) -> Trace:
    """Prompts that often continue a prefix of an earlier prompt; last blocks may be partial."""
    distinct = draw.choice([1, 3, 2 * SHARED_AFTER])  # the more, the sooner a prefix is a system prompt
    prompts: list[list[int]] = []
    tokens: list[int] = []
    for _ in range(60):
        prompt: list[int] = []
        if prompts and draw.random() < 0.8:
            base = draw.choice(prompts[: draw.choice([2, 60])])  # of the first ones, or of all
            prompt = base[: draw.choice([len(base), draw.randint(0, len(base))])]
        prompt = prompt + [draw.randrange(distinct) for _ in range(draw.randint(1, 6))]
        prompts.append(prompt)
        tokens.append(BLOCK_TOKENS * len(prompt) - draw.choice([0, 1, 3]))
    return Trace(
        name="random",
        arrival_seconds=np.arange(60.0),
        input_tokens=np.array(tokens),
        output_tokens=np.ones(60, np.int64),
        hash_ids=np.array([block for prompt in prompts for block in prompt], np.uint64),
        hash_offsets=np.cumsum([0, *map(len, prompts)]),
        block_tokens=BLOCK_TOKENS,
    )


def by_definition(trace: Trace) -> list[int]:
    """The latest request that ends at the longest prefix with few continuations, in whole
    blocks."""
    found: list[int] = []
    ends: dict[tuple[int, ...], int] = {}
    following: dict[tuple[int, ...], set[int]] = {}
    for index in range(len(trace)):
        blocks = tuple(trace.blocks(index).tolist())
        for place, block in enumerate(blocks):
            following.setdefault(blocks[:place], set()).add(block)
        whole = int(trace.input_tokens[index]) // trace.block_tokens
        prefixes = [blocks[:length] for length in range(whole, 0, -1)]
        few = [each for each in prefixes if len(following.get(each, ())) < SHARED_AFTER]
        found.append(next((ends[each] for each in few if each in ends), -1))
        if whole:
            ends[blocks[:whole]] = index
    return found


@pytest.mark.parametrize("seed", range(20))
def test_previous_turns_are_those_of_the_definition(seed: int) -> None:
    trace = random_trace(random.Random(seed))
    expected = by_definition(trace)
    assert previous_by_prefix(trace).tolist() == expected
    assert max(expected) >= 0
