"""Requests split at any token through the server: the client gets the answer of one engine."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lmetric.options import SplitAt
from lmetric_lab.emulated import EngineOptions
from split_world import CHAT, COMPLETIONS, PROMPTS, alone, asked, body_of, both, equal, split
from waiting import PATIENCE_SECONDS

PATHS = [CHAT, COMPLETIONS]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("at", [0.3, 0.9, 0.97])
async def test_the_answer_is_one_engines(path: str, stream: bool, at: float) -> None:
    more: dict[str, Any] = {"stream_options": {"include_usage": True}} if stream else {}
    body = body_of(path, stream=stream, return_token_ids=True, **more)
    async with split(at=at) as w:
        expected = await alone(w, path, body)
        for _ in range(2):
            said = await asked(w, path, body)
            equal(said, expected)
            record = said["record"]
            assert record["cuts"] == [math.ceil(at * (expected["usage"]["prompt_tokens"] + 24))]
            assert (record["split_reason"], record["outcome"]) == (None, "finished")
            assert said["headers"]["x-lmetric-prefill"] != said["headers"]["x-lmetric-instance"]
        assert w.outcomes == {"transferred": 2}
        if stream:  # without streaming, the router gets no tokens before the end
            assert w.server.fleet.models[0].router.stats()["output_tokens"] == 48
        page = (await (await w.client.get(f"{w.url}/metrics")).text()).splitlines()
        assert 'lmetric_split_requests_total{model="emulated"} 2.0' in page


async def test_any_request_cut_anywhere() -> None:
    cases = st.fixed_dictionaries(
        {
            "path": st.sampled_from(PATHS),
            "prompt": PROMPTS,
            "max_tokens": st.integers(1, 40),
            "at": st.floats(0.01, 0.99),
            "stream": st.booleans(),
            "ids": st.booleans(),
            "usage": st.sampled_from([None, {"include_usage": True}]),
            "continuous": st.booleans(),
        }
    )
    loop = asyncio.get_running_loop()
    async with split() as w:
        model = w.server.fleet.models[0]
        cuts: list[int] = []

        async def tried(case: dict[str, Any]) -> None:
            model.router.configure(split=SplitAt(fraction=case["at"]))
            usage = case["usage"] and case["usage"] | {"continuous_usage_stats": case["continuous"]}
            more = {"stream_options": usage} if case["stream"] else {}
            body = body_of(
                case["path"],
                case["prompt"],
                max_tokens=case["max_tokens"],
                stream=case["stream"],
                return_token_ids=case["ids"],
                **more,
            )
            said = await asked(w, case["path"], body)
            equal(said, await alone(w, case["path"], body))
            cuts.extend(said["record"]["cuts"])
            assert said["record"]["cuts"] or said["record"]["split_reason"]

        @settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
        @given(cases)
        def check(case: dict[str, Any]) -> None:
            asyncio.run_coroutine_threadsafe(tried(case), loop).result(PATIENCE_SECONDS)

        await asyncio.to_thread(check)
        assert len(cuts) > 10
        assert set(w.outcomes) == {"transferred"}


async def test_many_at_once() -> None:
    async with split(at=0.93) as w:
        bodies = [
            (
                PATHS[n % 2],
                body_of(PATHS[n % 2], f"{n} quiet rivers ran to the sea", max_tokens=40, stream=n % 3 > 0),
            )
            for n in range(40)
        ]
        said = await asyncio.gather(*(asked(w, path, body) for path, body in bodies))
        for (path, body), heard in list(zip(bodies, said, strict=True))[::5]:
            equal(heard, await alone(w, path, body))
        assert w.outcomes == {"transferred": 40}


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"n": 1, "seed": 3}, "(seed)"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "(tools)"),
        ({"max_tokens": 1}, "fewer than two tokens"),
    ],
)
async def test_what_stays_whole_says_why(fields: dict[str, Any], why: str) -> None:
    async with split() as w:
        body = body_of(CHAT, **fields)
        said = await asked(w, CHAT, body)
        equal(said, await alone(w, CHAT, body))
        assert said["record"]["cuts"] == []
        assert why in said["record"]["split_reason"]
        assert "x-lmetric-prefill" not in said["headers"]


async def test_without_a_tokenizer_nothing_is_cut() -> None:
    async with split(tokenizer="off") as w:
        said = await asked(w, COMPLETIONS, body_of(COMPLETIONS))
        assert said["record"]["split_reason"] == "its prompt is not known as token ids"
        said = await asked(w, COMPLETIONS, body_of(COMPLETIONS) | {"prompt": [7] * 30})
        assert "tokenizer is not known" in said["record"]["split_reason"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", PATHS)
async def test_an_answer_that_ends_before_its_cut(path: str, stream: bool) -> None:
    usage: dict[str, Any] = {"stream_options": {"include_usage": True}} if stream else {}
    body = body_of(path, max_tokens=40, stream=stream, return_token_ids=True, **usage)
    async with split(at=0.99) as w:
        whole = await alone(w, path, body)
        stop = next(token for n, token in enumerate(whole["ids"]) if n > 8 and token not in whole["ids"][:n])
        prompt = whole["usage"]["prompt_tokens"]
        stopping = body | {"stop_token_ids": [stop]}
        for _ in range(2):
            said = await asked(w, path, stopping)
            equal(said, await alone(w, path, stopping))
            assert (said["finish"], said["stop"]) == ("stop", stop)
            assert said["record"]["outcome"] == "finished"
            assert said["record"]["cuts"]
            # The first engine produced all of it, whichever engine was to continue.
            assert said["headers"]["x-lmetric-instance"] == said["record"]["instance"]
        assert w.outcomes == {}
        # After the split it ends like on one engine, too.
        w.server.fleet.models[0].router.configure(split=SplitAt(fraction=(prompt + 4) / (prompt + 40)))
        said = await asked(w, path, stopping)
        equal(said, await alone(w, path, stopping))
        assert w.outcomes == {"transferred": 1}


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("at", [0.4, 0.9])  # 0.4: in the prompt, so it is split at its end
async def test_engines_without_a_connector(recompute: bool, at: float) -> None:
    plain = EngineOptions(port=0, clock_speed=20.0)
    async with split(plain, plain, at=at, split_recompute=recompute) as w:
        for stream in (False, True):
            for path in PATHS:
                body = body_of(path, stream=stream)
                said = await asked(w, path, body)
                equal(said, await alone(w, path, body))
                if recompute:
                    assert said["record"]["cuts"]
                else:
                    assert said["record"]["split_reason"] == "its instance cannot transfer KV"
        assert w.outcomes == ({"no_connector": 4} if recompute else {})


async def test_only_the_output_is_cut_without_the_bidirectional_mode() -> None:
    one_way = both(kv_bidirectional=False)
    async with split(one_way, one_way, at=0.3) as w:
        body = body_of(COMPLETIONS)
        said = await asked(w, COMPLETIONS, body)
        expected = await alone(w, COMPLETIONS, body)
        equal(said, expected)
        assert said["record"]["cuts"] == [expected["usage"]["prompt_tokens"]]
        w.server.fleet.models[0].router.configure(split=SplitAt(fraction=0.95))
        equal(await asked(w, COMPLETIONS, body), expected)
        assert w.outcomes == {"transferred": 2}


async def test_what_is_late_is_computed_again() -> None:
    async with split(handover_seconds=1e-9) as w:
        for path in PATHS:
            body = body_of(path, stream=True)
            equal(await asked(w, path, body), await alone(w, path, body))
        assert w.outcomes == {"late": 2}


async def test_clients_of_http_1_0() -> None:
    async with split() as w:
        body = b'{"model": "emulated", "prompt": "a quiet river ran", "max_tokens": 60, "stream": true}'
        reader, writer = await asyncio.open_connection("127.0.0.1", w.server.port)
        head = b"POST /v1/completions HTTP/1.0\r\ncontent-length: %d\r\n\r\n" % len(body)
        writer.write(head + body)
        raw = await asyncio.wait_for(reader.read(), PATIENCE_SECONDS)
        head, _, said = raw.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200")
        assert b"connection: close" in head
        assert b"transfer-encoding" not in head
        assert said.endswith(b"data: [DONE]\n\n")
        writer.close()
        assert w.outcomes == {"transferred": 1}
