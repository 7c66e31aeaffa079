"""`calibrate` on real vLLM: its reports, sane constants, prompts that were no probes."""

from __future__ import annotations

import random
from collections.abc import Callable
from math import ceil, isfinite
from pathlib import Path

import numpy as np
import orjson
import pytest

from lmetric.profiles import load_profile
from lmetric.profiles.roofline import as_yaml
from lmetric_lab.calibrate import Calibrator
from lmetric_lab.calibrate.fit import CONSTANTS
from lmetric_lab.calibrate.plan import KINDS
from lmetric_lab.replay import Client, Record
from vllm_process import VllmEngine

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]


async def time_to_first_token(url: str, prompt_tokens: int) -> float:
    """Seconds to the first token of an answer to a new prompt."""
    prompt = [random.randrange(100, 2_000) for _ in range(prompt_tokens)]
    async with Client(url) as client:
        record = Record(0, 0.0, token_times=[])  # a token may have no text
        body = client.body(orjson.Fragment(orjson.dumps(prompt)), 1, return_token_ids=True)
        await client.send(body, record, 0.0)
    assert record.sent is not None
    assert record.first_token is not None, (record.error, record.detail)
    return record.first_token - record.sent


async def test_a_real_engine_gets_a_profile_that_foretells(
    vllm_engines: Callable[..., list[VllmEngine]], tmp_path: Path
) -> None:
    (engine,) = vllm_engines(1)
    async with Calibrator(engine.url, budget_tokens=80_000, max_batch=8) as calibrator:
        made = await calibrator.run()
    held_out = {
        length: min([await time_to_first_token(engine.url, length) for _ in range(5)])
        for length in (300, 1_100, 2_300)
    }
    profile, facts = made.profile, made.facts
    assert facts.engine.startswith("vllm 0.")
    assert (profile.block_tokens, profile.cache_blocks) == (32, 512)
    assert (facts.max_batch_tokens, facts.max_sequences) == (512, 32), "the development pages tell"
    assert made.tokens_used <= 80_000
    assert {residual.kind for residual in made.fit.residuals} == set(KINDS)
    assert all(isfinite(residual.relative_error) for residual in made.fit.residuals)
    costs = [getattr(profile, name) for name in CONSTANTS]
    assert all(isfinite(cost) and cost >= 0 for cost in costs)
    assert profile.prefill_seconds_per_token + profile.prefill_seconds_per_attention_pair > 0
    # A tiny model on a few shared cores: the sockets take a large part of each step of a few ms.
    for length, seconds in held_out.items():
        steps = ceil(length / profile.max_batch_tokens)
        work = (steps, 0, 0, length, length * length / 2)
        foretold = made.fit.request_seconds + float(np.dot(costs, work))
        assert 0.5 < foretold / seconds < 2, (length, foretold, seconds, profile)
    path = tmp_path / "mine.yaml"
    path.write_text(as_yaml(profile))
    assert load_profile(str(path)) == profile
