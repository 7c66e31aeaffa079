"""The emulated engine over real sockets: vLLM's HTTP API."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from lmetric_lab.emulated import EngineOptions, EngineServer
from lmetric_lab.emulated.text import shared_text
from waiting import PATIENCE_SECONDS

FAST = 100.0
WORDS = " ".join(["the history of the quiet river"] * 30)


def options(**changes: Any) -> EngineOptions:
    return EngineOptions(**({"port": 0, "clock_speed": FAST, "max_model_len": 4096} | changes))


@pytest.fixture
async def engine() -> AsyncIterator[EngineServer]:
    async with EngineServer(options()) as server:
        yield server


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


async def post(http: aiohttp.ClientSession, url: str, body: Any, **headers: str) -> tuple[int, Any]:
    data = body if isinstance(body, bytes) else json.dumps(body)
    async with http.post(url, data=data, headers=headers) as response:
        return response.status, await response.json()


async def complete(http: aiohttp.ClientSession, server: EngineServer, **body: Any) -> dict[str, Any]:
    status, answer = await post(http, f"{server.url}/v1/completions", body)
    assert status == 200, answer
    return dict(answer)


def events(raw: str) -> list[dict[str, Any]]:
    """The events of a stream that ends as it should."""
    *chunks, done, rest = raw.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return [json.loads(chunk.removeprefix("data: ")) for chunk in chunks]


async def stream(http: aiohttp.ClientSession, url: str, **body: Any) -> list[dict[str, Any]]:
    async with http.post(url, json={**body, "stream": True}) as response:
        assert response.headers["Content-Type"].startswith("text/event-stream")
        return events(await response.text())


async def metrics(http: aiohttp.ClientSession, server: EngineServer) -> dict[str, float]:
    async with http.get(f"{server.url}/metrics") as response:
        lines = [line for line in (await response.text()).splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


def labelled(name: str, more: str = "") -> str:
    return f'vllm:{name}{{engine="0"{more},model_name="emulated"}}'


async def shown(
    http: aiohttp.ClientSession, server: EngineServer, name: str, value: float
) -> dict[str, float]:
    """The metrics, as soon as the metric `name` has the value `value`."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while (seen := await metrics(http, server))[labelled(name)] != value:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
    return seen


# -- answers


async def test_openai_client_gets_plain_and_streamed_answers(engine: EngineServer) -> None:
    import openai

    async with openai.AsyncOpenAI(base_url=f"{engine.url}/v1", api_key="none") as client:
        assert [model.id async for model in client.models.list()] == ["emulated"]
        messages: Any = [{"role": "user", "content": "Tell me of the river."}]
        whole = await client.chat.completions.create(
            model="emulated", messages=messages, max_completion_tokens=12
        )
        assert whole.choices[0].finish_reason == "length"
        assert whole.usage is not None
        assert whole.usage.completion_tokens == 12
        text = whole.choices[0].message.content
        assert text
        assert len(text.split()) == 12

        chunks = await client.chat.completions.create(
            model="emulated",
            messages=messages,
            max_tokens=12,
            stream=True,
            stream_options={"include_usage": True},
        )
        seen = [chunk async for chunk in chunks]
        assert seen[0].choices[0].delta.role == "assistant"
        assert "".join(chunk.choices[0].delta.content or "" for chunk in seen if chunk.choices) == text
        assert seen[-2].choices[0].finish_reason == "length"
        assert seen[-1].usage is not None
        assert seen[-1].usage.completion_tokens == 12

        plain = await client.completions.create(model="emulated", prompt="Once upon", max_tokens=5)
        streamed = await client.completions.create(
            model="emulated", prompt="Once upon", max_tokens=5, stream=True
        )
        assert "".join([chunk.choices[0].text async for chunk in streamed]) == plain.choices[0].text


async def test_defaults_of_length(engine: EngineServer, http: aiohttp.ClientSession) -> None:
    assert (await complete(http, engine, prompt="a"))["usage"]["completion_tokens"] == 16
    chat = {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]}
    _, answer = await post(http, f"{engine.url}/v1/chat/completions", chat)
    assert answer["usage"]["completion_tokens"] == 128


async def test_a_stream_counts_and_names_its_tokens(
    engine: EngineServer, http: aiohttp.ClientSession
) -> None:
    whole = await complete(http, engine, prompt="Once upon", max_tokens=4, return_token_ids=True)
    choice = whole["choices"][0]
    usage = {"include_usage": True, "continuous_usage_stats": True}
    url = f"{engine.url}/v1/completions"
    chunks = await stream(
        http, url, prompt="Once upon", max_tokens=4, return_token_ids=True, stream_options=usage
    )
    assert [chunk["choices"][0]["token_ids"] for chunk in chunks[:-1]] == [[t] for t in choice["token_ids"]]
    assert chunks[0]["choices"][0]["prompt_token_ids"] == choice["prompt_token_ids"]
    assert chunks[1]["choices"][0]["prompt_token_ids"] is None
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [1, 2, 3, 4, 4]
    assert all("prompt_tokens_details" not in chunk["usage"] for chunk in chunks[:-1])
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks[:-1]] == [None, None, None, "length"]
    without = await stream(http, url, prompt="Once upon", max_tokens=4)
    assert len(without) == 4
    assert all("usage" not in chunk for chunk in without)

    url = f"{engine.url}/v1/chat/completions"
    messages = [{"role": "user", "content": "Hi"}]
    chunks = await stream(http, url, messages=messages, max_tokens=2, return_token_ids=True)
    rendered = shared_text().encode(shared_text().render_chat(messages)).tolist()
    assert chunks[0]["prompt_token_ids"] == rendered
    assert len([chunk["choices"][0]["token_ids"][0] for chunk in chunks[1:]]) == 2


@pytest.mark.parametrize(("tokens", "cached"), [(64, 48), (65, 64), (15, 0)])
async def test_a_repeated_prompt_is_cached(
    engine: EngineServer, http: aiohttp.ClientSession, tokens: int, cached: int
) -> None:
    prompt = [50 + i % 7 for i in range(tokens)]
    for expected in (0, cached):
        usage = (await complete(http, engine, prompt=prompt, max_tokens=1))["usage"]
        assert usage["prompt_tokens"] == tokens
        assert usage["prompt_tokens_details"] == {"cached_tokens": expected}
    seen = await metrics(http, engine)
    assert seen[labelled("prefix_cache_queries_total")] == 2 * tokens
    assert seen[labelled("prefix_cache_hits_total")] == cached
    salted = await complete(http, engine, prompt=prompt, max_tokens=1, cache_salt="tenant")
    assert salted["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}


async def test_the_next_turn_hits_the_answer_too(engine: EngineServer, http: aiohttp.ClientSession) -> None:
    prompt = [50 + i % 7 for i in range(40)]
    answer = await complete(http, engine, prompt=prompt, max_tokens=30, return_token_ids=True)
    turn = prompt + answer["choices"][0]["token_ids"] + [60, 61]
    usage = (await complete(http, engine, prompt=turn, max_tokens=1))["usage"]
    # 69 of the 70 tokens were computed.
    assert usage["prompt_tokens_details"] == {"cached_tokens": 64}


async def test_another_engine_continues_from_text_and_from_ids(http: aiohttp.ClientSession) -> None:
    # The second is short of blocks and slow of budget: that must not show in the text.
    other = options(cache_blocks=20, max_model_len=320, max_batch_tokens=8, max_sequences=4)
    async with EngineServer(options()) as a, EngineServer(other) as b:
        whole = await complete(http, a, prompt=WORDS, max_tokens=40, return_token_ids=True)
        text, ids = whole["choices"][0]["text"], whole["choices"][0]["token_ids"]
        prompt_ids = whole["choices"][0]["prompt_token_ids"]
        for cut in (1, 17, 39):
            from_ids = await complete(http, b, prompt=prompt_ids + ids[:cut], max_tokens=40 - cut)
            so_far = shared_text().decode(ids[:cut])
            from_text = await complete(http, b, prompt=WORDS + so_far, max_tokens=40 - cut)
            assert so_far + from_ids["choices"][0]["text"] == text
            assert from_text["choices"][0]["text"] == from_ids["choices"][0]["text"]

        # And a conversation, through continue_final_message.
        messages = [{"role": "user", "content": "Hi"}]
        _, chat = await post(http, f"{a.url}/v1/chat/completions", {"messages": messages, "max_tokens": 9})
        said = chat["choices"][0]["message"]["content"]
        begun = [*messages, {"role": "assistant", "content": said[: said.index(" ", 12)]}]
        more = {"add_generation_prompt": False, "continue_final_message": True, "max_tokens": 9}
        _, rest = await post(http, f"{b.url}/v1/chat/completions", {"messages": begun, **more})
        assert (begun[-1]["content"] + rest["choices"][0]["message"]["content"]).startswith(said)


# -- time and load


async def test_time_is_the_models_and_does_not_drift(http: aiohttp.ClientSession) -> None:
    async with EngineServer(options(clock_speed=10.0)) as engine:
        began = time.perf_counter()
        await complete(http, engine, prompt=[50] * 100, max_tokens=101)
        took = time.perf_counter() - began
        seen = await metrics(http, engine)
    prefill = 0.009 + 100 * 1e-4 + 100 * 50 * 1.3e-9
    decodes = sum(0.009 + 6e-5 + 3e-8 * (101 + i) for i in range(100))
    # Real wake-ups are late by a random bit each; on the engine's clock nothing of it may be left.
    assert seen[labelled("e2e_request_latency_seconds_sum")] == pytest.approx(prefill + decodes, abs=1e-9)
    assert seen[labelled("time_to_first_token_seconds_sum")] == pytest.approx(prefill, abs=1e-9)
    assert seen[labelled("inter_token_latency_seconds_count")] == 100
    assert (prefill + decodes) / 10 <= took <= (prefill + decodes) / 10 + 0.5


async def test_metrics_have_vllms_names(engine: EngineServer, http: aiohttp.ClientSession) -> None:
    await complete(http, engine, prompt=[50] * 40, max_tokens=3)
    await complete(http, engine, prompt=[50] * 40, max_tokens=3)
    seen = await metrics(http, engine)
    for name, value in {
        "num_requests_running": 0,
        "num_requests_waiting": 0,
        "kv_cache_usage_perc": 0,
        "prompt_tokens_total": 80,
        "generation_tokens_total": 6,
        "num_preemptions_total": 0,
        "request_prompt_tokens_sum": 80,
        "request_generation_tokens_count": 2,
        "request_queue_time_seconds_count": 2,
        "request_prefill_time_seconds_count": 2,
        "request_decode_time_seconds_count": 2,
        "request_inference_time_seconds_count": 2,
        "request_time_per_output_token_seconds_count": 2,
        "iteration_tokens_total_sum": 40 + 2 + 8 + 2,
    }.items():
        assert seen[labelled(name)] == value, name
    assert (
        seen['vllm:prompt_tokens_by_source_total{engine="0",model_name="emulated",source="local_cache_hit"}']
        == 32
    )
    assert seen['vllm:request_success_total{engine="0",finished_reason="length",model_name="emulated"}'] == 2
    assert any(name.startswith("vllm:cache_config_info") and 'block_size="16"' in name for name in seen)
    assert not any("_created" in name for name in seen)


@pytest.mark.parametrize("streaming", [True, False])
async def test_a_client_that_leaves_frees_its_slot(http: aiohttp.ClientSession, streaming: bool) -> None:
    async with EngineServer(options(max_sequences=1, clock_speed=0.1)) as engine:
        url = f"{engine.url}/v1/completions"
        long = asyncio.create_task(
            http.post(url, json={"prompt": "a", "max_tokens": 3000, "stream": streaming})
        )
        await shown(http, engine, "num_requests_running", 1)
        next_one = asyncio.create_task(complete(http, engine, prompt="b", max_tokens=2))
        seen = await shown(http, engine, "num_requests_waiting", 1)
        assert seen[labelled("num_requests_running")] == 1
        assert seen[labelled("num_requests_waiting_by_reason", "")[:-1] + ',reason="capacity"}'] == 1
        async with http.get(f"{engine.url}/load") as response:
            assert await response.json() == {"server_load": 2}
        if streaming:
            (await long).close()
        else:
            long.cancel()
        answer = await asyncio.wait_for(next_one, PATIENCE_SECONDS)
        assert answer["usage"]["completion_tokens"] == 2
        seen = await metrics(http, engine)
        assert seen[labelled("num_requests_running")] == 0
        async with http.get(f"{engine.url}/load") as response:
            assert await response.json() == {"server_load": 0}


async def test_priority_reorders_the_queue(http: aiohttp.ClientSession) -> None:
    async with EngineServer(options(max_sequences=1, order="priority", clock_speed=5.0)) as engine:
        finished: list[str] = []
        url = f"{engine.url}/v1/completions"

        async def ask(name: str, body: dict[str, Any], **headers: str) -> None:
            status, _ = await post(http, url, {"prompt": name, **body}, **headers)
            assert status == 200
            finished.append(name)

        tasks = []
        async with http.post(url, json={"prompt": "a", "max_tokens": 3000, "stream": True}) as first:
            await first.content.readline()
            for name, body, headers in [
                ("late", {"priority": 5}, {}),
                ("soon", {"priority": -5}, {}),
                ("sooner", {"priority": 9}, {"X-Vllm-Priority": "-9"}),  # the header beats the body
            ]:
                tasks.append(asyncio.create_task(ask(name, body, **headers)))
                await shown(http, engine, "num_requests_waiting", len(tasks))
            first.close()
        await asyncio.gather(*tasks)
        assert finished == ["sooner", "soon", "late"]


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        ("fcfs", ["long", "short"]),
        ("sjf", ["short", "long"]),
        ("srpt", ["short", "long"]),
        ("uniboost(gamma=0.5)", ["long", "short"]),  # it sees only the prompts, which are alike
    ],
)
async def test_local_orders_know_how_long_answers_get(
    http: aiohttp.ClientSession, order: str, expected: list[str]
) -> None:
    async with EngineServer(options(max_sequences=1, order=order, clock_speed=5.0)) as engine:
        finished: list[str] = []
        url = f"{engine.url}/v1/completions"

        async def ask(name: str, max_tokens: int) -> None:
            status, answer = await post(http, url, {"prompt": name, "max_tokens": max_tokens})
            assert status == 200
            assert answer["usage"]["completion_tokens"] == max_tokens
            finished.append(name)

        # The first has still less to do than the others when they come, so that it keeps its place.
        async with http.post(url, json={"prompt": "a", "max_tokens": 30, "stream": True}) as first:
            await first.content.readline()
            tasks = [asyncio.create_task(ask(*each)) for each in (("long", 300), ("short", 100))]
            await asyncio.gather(*tasks)
        assert finished == expected


@pytest.mark.parametrize(("order", "interleaved"), [("fcfs", False), ("slo", True)])
async def test_a_token_slo_lets_answers_go_on_beside_a_long_prompt(
    http: aiohttp.ClientSession, order: str, interleaved: bool
) -> None:
    # At 9 ms a step and 0.1 ms a prompt token, 20 ms hold 109 tokens: 4,000 take 37 steps, not 1.
    told = options(order=order, order_slo=0.02, clock_speed=1.0)
    prompt = [i % 500 for i in range(4000)]
    async with EngineServer(told) as engine:
        url = f"{engine.url}/v1/completions"
        tokens = 0

        async def read(answer: aiohttp.ClientResponse) -> None:
            nonlocal tokens
            async for line in answer.content:
                tokens += line.startswith(b"data:")

        async with http.post(url, json={"prompt": "a", "max_tokens": 3000, "stream": True}) as running:
            await running.content.readline()
            reading = asyncio.create_task(read(running))
            status, _ = await post(http, url, {"prompt": prompt, "max_tokens": 1})
            assert (status, tokens >= 30) == (200, interleaved), tokens
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)


async def test_a_full_queue_is_refused_as_vllm_does(http: aiohttp.ClientSession) -> None:
    async with EngineServer(options(max_sequences=1, max_queued_requests=0, clock_speed=1.0)) as engine:
        url = f"{engine.url}/v1/completions"
        async with http.post(url, json={"prompt": "a", "max_tokens": 2000, "stream": True}) as running:
            await running.content.readline()
            status, answer = await post(http, url, {"prompt": "b"})
            assert (status, answer["error"]["code"]) == (503, 503)
            (event,) = await stream(http, url, prompt="b")
            assert event["error"]["code"] == 503
            running.close()


# -- headers and small paths


async def test_request_id_and_load_header(engine: EngineServer, http: aiohttp.ClientSession) -> None:
    url = f"{engine.url}/v1/completions"
    for kind, pattern in [
        ("TEXT", r"TEXT named_metrics\.num_requests_waiting=0\.0, named_metrics\.kv_cache_usage_perc=0\.0"),
        ("json", r'JSON \{"named_metrics":\{"num_requests_waiting":0\.0,"kv_cache_usage_perc":0\.0\}\}'),
    ]:
        headers = {"X-Request-Id": "rid-1", "endpoint-load-metrics-format": kind}
        async with http.post(url, json={"prompt": "a", "max_tokens": 1}, headers=headers) as response:
            assert response.headers["X-Request-Id"] == "rid-1"
            assert re.fullmatch(pattern, response.headers["endpoint-load-metrics"])
            assert (await response.json())["id"] == "cmpl-rid-1"
    async with http.post(
        url, json={"prompt": "a", "max_tokens": 1, "stream": True}, headers=headers
    ) as response:
        assert response.headers["X-Request-Id"] == "rid-1"
        assert "endpoint-load-metrics" not in response.headers
        assert events(await response.text())[0]["id"] == "cmpl-rid-1"
    async with http.post(url, json={"prompt": 5}, headers=headers) as response:
        assert (response.status, response.headers["X-Request-Id"]) == (400, "rid-1")


async def test_small_paths(engine: EngineServer, http: aiohttp.ClientSession) -> None:
    async with http.get(f"{engine.url}/health") as response:
        assert (response.status, await response.read()) == (200, b"")
    async with http.get(f"{engine.url}/version") as response:
        assert "version" in await response.json()
    async with http.get(f"{engine.url}/v1/models") as response:
        model = (await response.json())["data"][0]
        assert (model["id"], model["max_model_len"]) == ("emulated", 4096)
    async with http.get(f"{engine.url}/kv_event_sources") as response:
        assert await response.json() == {}
    text = "Grüße <|im_end|> of the river"
    _, answer = await post(http, f"{engine.url}/tokenize", {"prompt": text, "return_token_strs": True})
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
    assert answer["max_model_len"] == 4096
    _, back = await post(http, f"{engine.url}/detokenize", {"tokens": answer["tokens"]})
    assert back["prompt"] == text.replace("<|im_end|>", "")
    messages = [{"role": "user", "content": "Hi"}]
    _, answer = await post(http, f"{engine.url}/tokenize", {"messages": messages})
    assert answer["tokens"] == shared_text().encode(shared_text().render_chat(messages)).tolist()


async def test_http_1_0_and_long_texts(engine: EngineServer, http: aiohttp.ClientSession) -> None:
    long = "the river " * 2000  # long enough for a thread
    usage = (await complete(http, engine, prompt=long, max_tokens=1))["usage"]
    assert usage["prompt_tokens"] == len(shared_text().encode(long))
    host, _, port = engine.url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    body = b'{"prompt": "a", "max_tokens": 3, "stream": true}'
    writer.write(b"POST /v1/completions HTTP/1.0\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
    head, _, raw = (await reader.read()).partition(b"\r\n\r\n")
    assert b"chunked" not in head
    assert len(events(raw.decode())) == 3
    writer.close()


# -- flags that take features away, and ways to fail


@pytest.mark.parametrize(
    "flag", ["cached_tokens", "stream_usage", "token_ids", "load_header", "metrics", "tokenize"]
)
async def test_features_can_be_taken_away(http: aiohttp.ClientSession, flag: str) -> None:
    async with EngineServer(options(**{flag: False})) as engine:
        url = f"{engine.url}/v1/completions"
        for _ in range(2):
            body = {"prompt": "a " * 40, "max_tokens": 2, "return_token_ids": True}
            headers = {"endpoint-load-metrics-format": "TEXT"}
            async with http.post(url, json=body, headers=headers) as response:
                assert ("endpoint-load-metrics" in response.headers) == (flag != "load_header")
                answer = await response.json()
        details = answer["usage"]["prompt_tokens_details"]
        assert (details is None) == (flag == "cached_tokens")
        assert details is None or details["cached_tokens"] > 0
        assert (answer["choices"][0]["token_ids"] is not None) == (flag != "token_ids")
        chunks = await stream(http, url, **body, stream_options={"include_usage": True})
        assert ("usage" in chunks[-1]) == (flag != "stream_usage")
        assert (await post(http, url, {"prompt": [50]}))[0] == (400 if flag == "token_ids" else 200)
        assert (await post(http, f"{engine.url}/tokenize", {"prompt": "a"}))[0] == (
            404 if flag == "tokenize" else 200
        )
        async with http.get(f"{engine.url}/metrics") as response:
            assert response.status == (404 if flag == "metrics" else 200)


async def test_no_kv_events_even_with_an_endpoint(http: aiohttp.ClientSession) -> None:
    async with EngineServer(options(kv_events=False, kv_events_endpoint="tcp://*:0")) as engine:
        assert engine.description()["kv_events_endpoint"] is None
        async with http.get(f"{engine.url}/kv_event_sources") as response:
            assert await response.json() == {}


async def test_server_load_can_be_untracked(http: aiohttp.ClientSession) -> None:
    async with (
        EngineServer(options(server_load=False, clock_speed=1.0)) as engine,
        http.post(f"{engine.url}/v1/completions", json={"prompt": "a", "max_tokens": 999, "stream": True}),
        http.get(f"{engine.url}/load") as response,
    ):
        assert await response.json() == {"server_load": 0}


@pytest.mark.parametrize("after", [0, 3])
async def test_an_answer_breaks_off(http: aiohttp.ClientSession, after: int) -> None:
    async with EngineServer(options(fail_after_tokens=after)) as engine:
        url = f"{engine.url}/v1/completions"
        async with http.post(url, json={"prompt": "a", "max_tokens": 9, "stream": True}) as response:
            assert response.status == 200
            got = b""
            try:
                async for piece in response.content.iter_any():
                    got += piece
                pytest.fail("the answer ended as if nothing had happened")
            except aiohttp.ClientPayloadError:
                assert got.count(b"data: {") == after
        with pytest.raises(aiohttp.ClientError):
            await post(http, url, {"prompt": "a", "max_tokens": 9})
        seen = await metrics(http, engine)
        assert seen[labelled("num_requests_running")] == 0


async def test_an_answer_ends_in_an_error_event_or_stalls(http: aiohttp.ClientSession) -> None:
    async with EngineServer(options(fail_after_tokens=2, fail_with="event")) as engine:
        *tokens, error = await stream(http, f"{engine.url}/v1/completions", prompt="a", max_tokens=9)
        assert (len(tokens), error["error"]["code"]) == (2, 500)
        status, answer = await post(http, f"{engine.url}/v1/completions", {"prompt": "a", "max_tokens": 9})
        assert (status, answer["error"]["code"]) == (500, 500)
    async with EngineServer(options(fail_after_tokens=2, fail_with="stall")) as engine:
        url = f"{engine.url}/v1/completions"
        async with http.post(url, json={"prompt": "a", "max_tokens": 9, "stream": True}) as response:
            for _ in range(4):
                await response.content.readline()
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(response.content.readline(), 0.2)


async def test_refusals(http: aiohttp.ClientSession) -> None:
    async with EngineServer(options(fail_status=500)) as engine:
        assert (await post(http, f"{engine.url}/v1/completions", {"prompt": "a"}))[0] == 500
        async with http.get(f"{engine.url}/health") as response:
            assert response.status == 200
    async with EngineServer(options(refuse=True)) as engine:
        with pytest.raises(aiohttp.ClientError):
            await post(http, f"{engine.url}/v1/completions", {"prompt": "a"})


# -- bad input

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
GENERATE = "/inference/v1/generate"


@pytest.mark.parametrize(
    ("path", "body", "status", "kind", "message"),
    [
        (COMPLETIONS, b'{"prompt": "a",', 400, "BadRequestError", "Invalid JSON"),
        (COMPLETIONS, b"[]", 400, "BadRequestError", "object"),
        (COMPLETIONS, {}, 400, "BadRequestError", "prompt: Field required"),
        (
            COMPLETIONS,
            {"prompt": {"a": 1}},
            400,
            "BadRequestError",
            "prompt: should be a string or a list of token",
        ),
        (
            COMPLETIONS,
            {"prompt": [1, "a"]},
            400,
            "BadRequestError",
            "prompt: should be a string or a list of token",
        ),
        (COMPLETIONS, {"prompt": ["a", "b"]}, 400, "BadRequestError", "2 prompts"),
        (
            COMPLETIONS,
            {"prompt": [1, 10**9]},
            400,
            "BadRequestError",
            "token id 1000000000 is out of vocabulary",
        ),
        (COMPLETIONS, {"prompt": [-1]}, 400, "BadRequestError", "token id -1"),
        (COMPLETIONS, {"prompt": ""}, 400, "BadRequestError", "at least one token"),
        (COMPLETIONS, {"prompt": "a", "max_tokens": 0}, 400, "BadRequestError", "max_tokens"),
        (
            COMPLETIONS,
            {"prompt": "a", "max_tokens": 9999},
            400,
            "BadRequestError",
            "max_tokens=9999 cannot be greater than max_model_len=4096. Please request fewer output tokens.",
        ),
        (
            CHAT,
            {"messages": [{"role": "user", "content": "a"}], "max_completion_tokens": 9999},
            400,
            "BadRequestError",
            "max_completion_tokens=9999 cannot be greater than max_model_len=4096.",
        ),
        (
            COMPLETIONS,
            {"prompt": [50] * 4096},
            400,
            "BadRequestError",
            "max_tokens must be at least 1, got 0.",
        ),
        (
            COMPLETIONS,
            {"prompt": [50] * 4080, "max_tokens": 40, "min_tokens": 40},
            400,
            "BadRequestError",
            "min_tokens must be less than or equal to max_tokens=16, got 40.",
        ),
        (
            GENERATE,
            {"token_ids": [50], "sampling_params": {"min_tokens": 17}},
            400,
            "BadRequestError",
            "min_tokens must be less than or equal to max_tokens=16, got 17.",
        ),
        *(
            (
                COMPLETIONS,
                {"prompt": prompt},
                400,
                "BadRequestError",
                f"maximum context length is 4096 tokens. However, your prompt contains {count} input tokens, "
                "which exceeds this limit even without any output tokens. Please reduce the length of the "
                "input prompt.",
            )
            for prompt, count in (
                ([50] * 5000, "5000"),
                ([50] * 4097, "at least 4097"),
                (" river" * 5000, "at least 4097"),
            )
        ),
        (
            COMPLETIONS,
            {"prompt": "a", "model": "gpt"},
            404,
            "NotFoundError",
            "The model `gpt` does not exist.",
        ),
        (COMPLETIONS, {"prompt": "a", "n": 2}, 400, "BadRequestError", "n is not supported"),
        (COMPLETIONS, {"prompt": "a", "logprobs": 1}, 400, "BadRequestError", "logprobs is not supported"),
        (COMPLETIONS, {"prompt": "a", "priority": 2**63}, 400, "BadRequestError", "priority"),
        (CHAT, {"messages": []}, 400, "BadRequestError", "messages"),
        (CHAT, {"messages": [{"content": "a"}]}, 400, "BadRequestError", "messages.0.role: Field required"),
        (
            CHAT,
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            400,
            "BadRequestError",
            "parts",
        ),
        ("/v1/nothing", {}, 404, "NotFoundError", "POST /v1/nothing"),
        ("/health", {}, 405, "MethodNotAllowed", "POST /health"),
        ("/detokenize", {"tokens": [10**9]}, 400, "BadRequestError", "tokens: token id 1000000000"),
    ],
)
async def test_bad_input_gets_vllms_error_object(
    engine: EngineServer,
    http: aiohttp.ClientSession,
    path: str,
    body: Any,
    status: int,
    kind: str,
    message: str,
) -> None:
    got, answer = await post(http, engine.url + path, body)
    assert got == status, answer
    error = answer["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["code"], error["type"]) == (status, kind)
    assert message in error["message"]
    # The engine still works.
    assert (await complete(http, engine, prompt="a", max_tokens=1))["choices"][0]["text"]


COMPLETION = {"prompt": WORDS, "max_tokens": 12}


def text_of(chunks: list[dict[str, Any]]) -> list[str]:
    choices = [chunk["choices"][0] for chunk in chunks]
    return [c["text"] if "text" in c else c["delta"].get("content", "") for c in choices]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, {"prompt": [50] * 4080, "max_tokens": 40}),
        (COMPLETIONS, {"prompt": [50] * 4080, "max_tokens": 4096}),
        (GENERATE, {"token_ids": [50] * 4080, "sampling_params": {"max_tokens": 9999}}),
    ],
)
async def test_an_answer_ends_at_the_models_length(
    engine: EngineServer, http: aiohttp.ClientSession, path: str, body: Any
) -> None:
    """vLLM 0.32 refuses no prompt because the prompt and max_tokens together are too long."""
    status, answer = await post(http, engine.url + path, body)
    assert status == 200, answer
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 16


async def test_a_chat_without_max_tokens_gets_what_is_left(http: aiohttp.ClientSession) -> None:
    async with EngineServer(options(max_model_len=300)) as engine:
        messages = [{"role": "user", "content": "a " * 250}]
        status, answer = await post(http, engine.url + CHAT, {"messages": messages})
        assert status == 200, answer
        prompt = answer["usage"]["prompt_tokens"]
        assert 300 - 128 < prompt < 300
        assert answer["usage"]["completion_tokens"] == 300 - prompt
        status, answer = await post(
            http, engine.url + GENERATE, {"token_ids": [50] * 300, "sampling_params": {}}
        )
        assert status == 400
        assert "plus the number of requested output tokens (at least 1)" in answer["error"]["message"]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_stop_strings_end_an_answer_as_vllm_ends_it(
    engine: EngineServer, http: aiohttp.ClientSession, path: str
) -> None:
    """UX, section 3, stop: the emulated engine accepted stop strings and ignored them."""
    body: dict[str, Any] = {"max_tokens": 12, "return_token_ids": True}
    body |= {"prompt": WORDS} if path == COMPLETIONS else {"messages": [{"role": "user", "content": WORDS}]}

    async def asked(**more: Any) -> tuple[str, Any, Any, int]:
        status, answer = await post(http, engine.url + path, body | more)
        assert status == 200, answer
        choice = answer["choices"][0]
        text = choice["text"] if path == COMPLETIONS else choice["message"]["content"]
        tokens = answer["usage"]["completion_tokens"]
        assert len(choice["token_ids"]) == tokens
        chunks = await stream(http, engine.url + path, **body, **more)
        assert "".join(text_of(chunks)) == text
        last = chunks[-1]["choices"][0]
        assert (last["finish_reason"], last["stop_reason"]) == (
            choice["finish_reason"],
            choice["stop_reason"],
        )
        return text, choice["finish_reason"], choice["stop_reason"], tokens

    whole, *_ = await asked()
    words = whole.split()
    # The end of word 4 and the beginning of word 5: the text lies across two tokens and two chunks.
    across = f"{words[3][-2:]} {words[4][:2]}"
    at = whole.index(across)
    assert await asked(stop=across) == (whole[:at], "stop", across, 5)
    assert await asked(stop=["no such", across]) == (whole[:at], "stop", across, 5)
    shown = whole[: at + len(across)]
    assert await asked(stop=across, include_stop_str_in_output=True) == (shown, "stop", across, 5)
    assert (await asked(stop=["no such", "nor this", "n\u00f6", '"', "\\"]))[:3] == (whole, "length", None)
    assert await asked(stop=[]) == await asked(stop=None) == (whole, "length", None, 12)
    # In the last token: the string wins over the length.
    assert await asked(stop=words[-1]) == (whole[: whole.rindex(words[-1])], "stop", words[-1], 12)
    # Behind min_tokens tokens only.
    assert (await asked(stop=across, min_tokens=5))[1] == "length"


async def test_streams_hold_back_what_may_become_a_stop_string(
    engine: EngineServer, http: aiohttp.ClientSession
) -> None:
    """UX, section 3, stop: no part of a stop string reaches the client of a stream."""
    whole = (await complete(http, engine, **COMPLETION))["choices"][0]["text"]
    words = whole.split(" ")[1:]
    stop = f"{words[2]} {words[3]} {words[4]}"
    pieces = text_of(await stream(http, engine.url + COMPLETIONS, **COMPLETION, stop=stop))
    assert "".join(pieces) == whole[: whole.index(stop)]
    assert len(pieces) == 5
    never = text_of(await stream(http, engine.url + COMPLETIONS, **COMPLETION, stop="x" * 1000))
    assert never == [""] * 11 + [whole]


@pytest.mark.parametrize(
    "wrong",
    [
        {"stop": 3},
        {"stop": ["a", 3]},
        {"stop": {"a": 1}},
        {"stop": [""]},
        {"stop": ""},
        {"include_stop_str_in_output": "perhaps", "stop": "a"},
        {"min_tokens": -1, "stop": "a"},
    ],
    ids=str,
)
async def test_stop_of_a_wrong_type_is_refused(
    engine: EngineServer, http: aiohttp.ClientSession, wrong: dict[str, Any]
) -> None:
    """UX, section 3, stop: wrong types are answered with 400."""
    status, answer = await post(http, engine.url + COMPLETIONS, COMPLETION | wrong)
    assert (status, answer["error"]["param"]) == (400, next(iter(wrong))), answer


async def test_a_bad_priority_header(engine: EngineServer, http: aiohttp.ClientSession) -> None:
    url = engine.url + COMPLETIONS
    status, answer = await post(http, url, {"prompt": "a"}, **{"X-Vllm-Priority": "high"})
    assert (status, answer["error"]["param"]) == (400, "priority")
