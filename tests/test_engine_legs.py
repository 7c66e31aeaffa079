"""Emulated engines run segments cut anywhere, like vLLM's NIXL in bidirectional mode."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import ValidationError

from lmetric_lab.emulated import EngineOptions, EngineServer
from test_engine_handover import BODY, PROMPT, counted, get, options, post, source, streamed, until

ASK = {"do_remote_decode": True, "do_remote_prefill": False}
FRONT = {"do_remote_prefill": False, "do_remote_decode": True}
LAST = {"do_remote_prefill": True, "do_remote_decode": False}
TOKENS = 40


def both(**changes: Any) -> EngineOptions:
    return options(kv_bidirectional=True, **changes)


async def leg(
    engine: EngineServer, prompt: list[int], tokens: int, params: dict[str, Any] | None = None, **more: Any
) -> tuple[list[int], dict[str, Any]]:
    """The token ids of a segment, and its KV transfer parameters for the next segment."""
    body = {"prompt": prompt, "max_tokens": tokens, "return_token_ids": True, **more}
    status, answer = await post(engine, body | {"kv_transfer_params": params})
    assert status == 200, answer
    return answer["choices"][0]["token_ids"], answer["kv_transfer_params"]


async def alone(engine: EngineServer) -> list[int]:
    return (await leg(engine, PROMPT, TOKENS))[0]


@pytest.mark.parametrize("n", [1, 2, 9, 25, 26, TOKENS])
@pytest.mark.parametrize("bidirectional", [False, True])
async def test_a_leg_of_several_tokens(n: int, bidirectional: bool) -> None:
    kind = options(kv_bidirectional=bidirectional)
    async with EngineServer(kind) as first, EngineServer(kind) as second:
        whole = await alone(first)
        said, params = await leg(first, PROMPT, n, ASK)
        # The last token made has no KV cache: it is made again.
        assert (said, params["remote_num_tokens"]) == (whole[:n], 200 + n - 1)
        rest, left = await leg(second, PROMPT + said[:-1], TOKENS - n + 1, params | LAST)
        assert said[:-1] + rest == whole
        # In bidirectional mode the second leaves its cache, too, whether or not anybody wants it.
        assert (left is not None) == bidirectional
        assert await counted(second, "vllm:nixl_num_kv_expired_reqs_total") == 0
        pulled, computed = (
            await source(second, "external_kv_transfer"),
            await source(second, "local_compute"),
        )
        assert (pulled, computed) == (pytest.approx(200 + n - 1, abs=1), pytest.approx(0, abs=1))


@pytest.mark.parametrize("m", [1, 96, 100, 160, 199, 200])
async def test_a_cut_inside_the_prompt(m: int) -> None:
    async with EngineServer(both()) as first, EngineServer(both()) as second:
        whole = await alone(first)
        _, params = await leg(first, PROMPT[:m], 1, ASK)
        assert params["remote_num_tokens"] == m
        assert (await leg(second, PROMPT, TOKENS, params | FRONT))[0] == whole
        pulled, computed = (
            await source(second, "external_kv_transfer"),
            await source(second, "local_compute"),
        )
        assert (pulled, computed) == (pytest.approx(m, abs=1), pytest.approx(200 - m, abs=1))


@pytest.mark.parametrize("cuts", [(100, 220), (210, 230), (200, 201), (50, 150), (1, 239)])
async def test_there_and_back(cuts: tuple[int, int]) -> None:
    async with EngineServer(both()) as first, EngineServer(both()) as second:
        whole = await alone(first)
        tokens = PROMPT + whole
        params: dict[str, Any] = {}
        for engine, a, b in ((first, 0, cuts[0]), (second, cuts[0], cuts[1])):
            made, params = await leg(
                engine, tokens[: max(a, min(b, 200))], max(1, b - max(a, 200) + 1), {**params, **FRONT}
            )
            if b >= 200:
                assert made == tokens[max(a, 200) :][: len(made)]
            assert params["remote_num_tokens"] == b
        if cuts[1] < 200:
            rest, _ = await leg(first, PROMPT, TOKENS, params | FRONT)
            assert rest == whole
        else:
            rest, _ = await leg(first, tokens[: cuts[1]], 240 - cuts[1], params | LAST)
            assert rest == tokens[cuts[1] :]


@pytest.mark.parametrize("more", [1, 8, -1, -50])
async def test_a_prompt_that_is_not_what_was_computed(more: int) -> None:
    async with EngineServer(both()) as first, EngineServer(both()) as second:
        _, params = await leg(first, PROMPT, 1, ASK)
        prompt = PROMPT + [5] * more if more > 0 else PROMPT[:more]
        status, said = await post(second, BODY | {"prompt": prompt, "kv_transfer_params": params | LAST})
        assert (status, said["error"]["param"]) == (500, "kv_transfer_params")
        assert f"the prompt has {200 + more} tokens, and remote_num_tokens is 200" in said["error"]["message"]
        body = BODY | {"prompt": PROMPT[:-1], "kv_transfer_params": params | FRONT}
        assert (await post(second, body))[0] == 500
        assert (await post(second, BODY))[0] == 200  # it lives


async def test_what_nobody_fetches_is_let_go() -> None:
    # The lease is long enough to fetch on a busy machine.
    short = both(kv_lease_seconds=5, kv_decoder_ttl_seconds=0.2)
    async with EngineServer(short) as first, EngineServer(short) as second:
        whole = await alone(first)
        _, params = await leg(first, PROMPT, 5, ASK)
        _, left = await leg(second, (PROMPT + whole)[:204], 10, params | LAST)
        assert left["remote_num_tokens"] == 213

        async def gone() -> bool:
            return await counted(second, "vllm:nixl_num_kv_expired_reqs_total") == 1

        await until(gone)
        assert await counted(first, "vllm:nixl_num_kv_expired_reqs_total") == 0  # it was fetched
        # Late: wrong, and nothing says so.
        rest, _ = await leg(first, (PROMPT + whole)[:213], 27, left | LAST)
        assert rest != whole[13:]
        config = json.loads((await get(first, "/server_info?config_format=json"))[1])
        told = config["vllm_config"]["kv_transfer_config"]["kv_connector_extra_config"]
        assert told == {
            "kv_lease_duration": 5,
            "decoder_kv_blocks_ttl": 0.2,
            "bidirectional_kv_xfer": True,
            "kv_recompute_threshold": 0,
        }


async def test_stop_token_ids_end_an_answer() -> None:
    async with EngineServer(options()) as first, EngineServer(options()) as second:
        whole = await alone(first)
        n = next(i for i, token in enumerate(whole) if i > 9 and token not in whole[:i])
        body = BODY | {"max_tokens": TOKENS, "return_token_ids": True, "stop_token_ids": [whole[n]]}
        status, answer = await post(first, body)
        choice = answer["choices"][0]
        assert (status, choice["token_ids"], answer["usage"]["completion_tokens"]) == (
            200,
            whole[: n + 1],
            n + 1,
        )
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", whole[n])
        # The token that ends it is no text.
        _, shorter = await post(first, BODY | {"max_tokens": n})
        assert choice["text"] == shorter["choices"][0]["text"] == await streamed(first, body)
        # A first segment that ends with a stop token transfers its computed blocks.
        said, params = await leg(first, PROMPT, TOKENS, ASK, stop_token_ids=[whole[n]])
        assert (len(said), params["remote_num_tokens"]) == (n + 1, 200 + n)
        rest, _ = await leg(second, PROMPT + said[:-1], 5, params | LAST)
        assert rest == whole[n : n + 5]
        by_stop = 'vllm:request_success_total{engine="0",finished_reason="stop"'
        assert await counted(first, by_stop) == 3
        assert await counted(first, "vllm:num_requests_running") == 0


async def test_a_leg_that_a_stop_string_ends_hands_nothing_over() -> None:
    """UX, section 3, stop: vLLM finds stop strings outside its engine core and aborts requests."""
    async with EngineServer(options()) as first:
        _, whole = await post(first, BODY | {"max_tokens": TOKENS})
        word = whole["choices"][0]["text"].split()[9]
        said, params = await leg(first, PROMPT, TOKENS, ASK, stop=f" {word}")
        assert (len(said) <= 10, params) == (True, None)
        assert await counted(first, "vllm:num_requests_running") == 0


def test_bidirectional_needs_a_connector() -> None:
    with pytest.raises(ValidationError, match="needs kv_connector nixl"):
        options(kv_connector="none", kv_bidirectional=True)
