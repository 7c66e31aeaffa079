"""Prefill and decode in bidirectional mode: clients get no transfer fields.

`told` refuses an answer with such fields, and `pd` checks at its end that no request is in flight.
"""

from __future__ import annotations

import asyncio

import pytest

from lmetric.engines import vllm
from lmetric_lab.emulated import EngineOptions
from pd_world import Pd, nixl, pd
from split_world import CHAT, COMPLETIONS, alone, asked, body_of, equal

PATHS = [CHAT, COMPLETIONS]


def engines(**changes: object) -> list[EngineOptions]:
    given = {"kv_bidirectional": True, "kv_load_failure_policy": "recompute"} | changes
    return [nixl(role, **given) for role in ("prefill", "decode", "decode")]


async def identified(w: Pd) -> None:
    """Waits until the router knows the engines' mode."""
    model = w.server.fleet.models[0]
    await w.until(lambda: all(engine.identified for engine in model.engines.values()))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("known", [True, False])
async def test_the_answer_is_one_engines(
    path: str, stream: bool, known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the mode is not known: vLLM reports it only in development mode."""
    if not known:
        read = vllm._handover
        monkeypatch.setattr(vllm, "_handover", lambda config, nixl: read(None, nixl))
    roles = {"p0": "prefill", "d0": "decode", "d1": "decode"}
    body = body_of(path, stream=stream, return_token_ids=True)
    async with pd(*engines(), roles=roles) as w:
        await identified(w)
        for _ in range(2):
            said = await asked(w, path, body)
            equal(said, await alone(w, path, body))
            assert said["headers"]["x-lmetric-prefill"] == "p0"
            assert said["headers"]["x-lmetric-instance"].startswith("d")
            assert said["record"]["outcome"] == "finished"
        assert w.outcomes == {"transferred": 2}


@pytest.mark.parametrize("policy", ["fail", "recompute"])
async def test_a_transfer_that_breaks_costs_no_answer(policy: str) -> None:
    body = body_of(COMPLETIONS)
    async with pd(*engines(kv_load_failure_policy=policy)) as w:
        await identified(w)
        await w.engines["p0"]._api._nixl.channel.stop()  # type: ignore[union-attr]
        equal(await asked(w, COMPLETIONS, body), await alone(w, COMPLETIONS, body))
        assert w.outcomes == {"transferred": 1} | ({"broken": 1} if policy == "fail" else {})


async def test_a_decode_engine_that_dies_and_one_that_refuses() -> None:
    body = body_of(COMPLETIONS, max_tokens=200)
    async with pd(*engines(clock_speed=0.5)) as w:
        await identified(w)
        expected = await alone(w, COMPLETIONS, body)
        task = asyncio.create_task(asked(w, COMPLETIONS, body))
        await w.until(lambda: w.busy("d0") + w.busy("d1"))
        await w.kill("d0" if w.busy("d0") else "d1")
        equal(await task, expected)
        assert w.outcomes == {"transferred": 1, "spent": 1}
    async with pd(*engines(max_model_len=400)) as w:
        await identified(w)
        status, _, said = await w.post(body | {"max_tokens": 401})
        assert (status, said["error"]["type"]) == (400, "BadRequestError")


async def test_a_client_that_leaves() -> None:
    async with pd(*engines(clock_speed=0.5)) as w:
        await identified(w)
        task = asyncio.create_task(asked(w, CHAT, body_of(CHAT, max_tokens=500)))
        await w.until(lambda: w.busy("d0") + w.busy("d1"))
        w.slow_down()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await w.until(lambda: not w.busy("d0") + w.busy("d1"))
        await w.until(lambda: not w.in_flight())
        assert w.server.fleet.models[0].router.stats()["failed"]["cancelled"] == 1
