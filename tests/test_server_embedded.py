"""`serve --embedded`: the official client against emulated engines, through the router."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import orjson
import pytest

from cli_world import call
from lmetric_lab.defaults import DEFAULT_PROFILE
from test_server_process import RUN, RUN_FORCED, RUN_TUNED, router
from waiting import PATIENCE_SECONDS

if TYPE_CHECKING:
    import openai


async def check_hits(client: openai.AsyncOpenAI, url: str) -> None:
    """Checks that both engines are exact, and every hit of a conversation is as predicted."""
    engines = orjson.loads(await client.get(f"{url}/debug/engines", cast_to=str))
    assert [(e["mode"], e["mode_reason"]) for e in engines] == [("exact", "KV events")] * 2
    assert all(e["tokenizer"]["folder"] for e in engines)
    model = (await client.models.list()).data[0].id
    messages: Any = [{"role": "system", "content": "You tell of routers at length. " * 20}]

    async def indexed() -> int:
        """Returns the number of blocks in the index, over both engines."""
        page = await client.get(f"{url}/metrics", cast_to=str)
        lines = [line for line in page.splitlines() if line.startswith("lmetric_instance_index_blocks{")]
        return round(sum(float(line.rpartition(" ")[2]) for line in lines))

    for turn in range(6):
        blocks = await indexed()
        messages.append({"role": "user", "content": f"Turn {turn}: go on, please. " * 8})
        answer = await client.chat.completions.with_raw_response.create(
            model=model, messages=messages, max_tokens=40
        )
        chat = answer.parse()
        messages.append({"role": "assistant", "content": chat.choices[0].message.content})
        decision = answer.headers["x-lmetric-decision"]
        record = orjson.loads(await client.get(f"{url}/debug/decisions/{decision}", cast_to=str))
        assert chat.usage is not None
        assert chat.usage.prompt_tokens_details is not None
        cached = chat.usage.prompt_tokens_details.cached_tokens
        # Known to the block, with the answer's own tokens, which no estimate from sent
        # requests has.
        assert record["prompt_tokens"] == chat.usage.prompt_tokens
        assert record["predicted_cached_tokens"] == record["cached_tokens"] == cached
        assert (cached or 0) >= 16 * ((chat.usage.prompt_tokens - 200) // 16) or turn == 0
        # Events come after the answer. The last token is not in the cache.
        whole = (chat.usage.prompt_tokens + chat.usage.completion_tokens - 1) // 16
        expected = blocks + whole - (cached or 0) // 16
        async with asyncio.timeout(PATIENCE_SECONDS):
            while await indexed() != expected:  # noqa: ASYNC110 - another process
                await asyncio.sleep(0.02)


async def test_the_official_client_gets_answers_of_exact_engines() -> None:
    import openai

    async with router("--embedded", "2", "--policy", "lmetric") as r:
        await r.listening()
        async with openai.AsyncOpenAI(base_url=r.url + "/v1", api_key="none", max_retries=0) as client:
            model = (await client.models.list()).data[0].id
            messages = [{"role": "user", "content": "Tell me of routers. " * 40}]
            chat = await client.chat.completions.create(model=model, messages=messages, max_tokens=8)
            assert chat.usage is not None
            assert chat.usage.completion_tokens == 8
            stream = await client.chat.completions.create(
                model=model,
                messages=messages,
                max_tokens=8,
                stream=True,
                stream_options={"include_usage": True},
            )
            chunks = [chunk async for chunk in stream]
            text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
            assert text == chat.choices[0].message.content
            assert chunks[-1].usage is not None
            assert chunks[-1].usage.completion_tokens == 8
            plain = await client.completions.with_raw_response.create(
                model=model, prompt=[5, 6, 7], max_tokens=3
            )
            assert plain.headers["x-lmetric-instance"].startswith("embedded-")
            decision = plain.headers["x-lmetric-decision"]
            record = await client.get(f"{r.url}/debug/decisions/{decision}", cast_to=str)
            record = orjson.loads(record)
            assert (record["outcome"], record["output_tokens"], record["prompt_tokens"]) == (
                "finished",
                3,
                3,
            )
            with pytest.raises(openai.NotFoundError, match=model):
                await client.chat.completions.create(model="nope", messages=messages)
            await check_hits(client, r.url)
        r.process.terminate()
        assert await r.ended() == 0


async def test_embedded_engines_that_prefill_and_decode() -> None:
    import openai

    async with router("--embedded", "1P2D", "--experimental", "--decode-policy", "sibyl") as r:
        await r.listening()
        async with openai.AsyncOpenAI(base_url=r.url + "/v1", api_key="none", max_retries=0) as client:
            engines = orjson.loads(await client.get(f"{r.url}/debug/engines", cast_to=str))
            assert {(e["name"], e["role"], e["mode"]) for e in engines} == {
                ("embedded-0", "prefill", "exact"),
                ("embedded-1", "decode", "exact"),
                ("embedded-2", "decode", "exact"),
            }
            model = (await client.models.list()).data[0].id
            messages: Any = [{"role": "user", "content": "Tell me of routers. " * 40}]
            said = []
            for _ in range(2):
                answer = await client.chat.completions.with_raw_response.create(
                    model=model, messages=messages, max_tokens=8
                )
                assert answer.headers["x-lmetric-prefill"] == "embedded-0"
                assert answer.headers["x-lmetric-instance"] in ("embedded-1", "embedded-2")
                said.append(answer.parse().choices[0].message.content)
                await asyncio.sleep(0.1)
            stream = await client.chat.completions.create(
                model=model, messages=messages, max_tokens=8, stream=True
            )
            streamed = "".join([c.choices[0].delta.content or "" async for c in stream if c.choices])
            assert said == [streamed] * 2
        r.process.terminate()
        assert await r.ended() == 0


@pytest.mark.parametrize("wrong", ["0", "2P", "P4D", "0P4D", "2000", "2D4P"])
def test_embedded_engines_that_make_no_sense(wrong: str) -> None:
    done = call("serve", "--port", "0", "--embedded", wrong)
    assert done.returncode == 2, done.stderr
    assert "2P4D" in done.stderr


async def streamed(
    counter: str,
    prompts: list[str],
    *flags: str,
    max_tokens: int = 60,
    session: str = "one",
    run: str = RUN,
) -> tuple[list[tuple[str, str]], list[Any], float]:
    """Sends concurrent chats to four engines.

    Returns ends, decision records, and a counter of /metrics.
    """
    import openai

    async with router("--embedded", "4", "--profile", DEFAULT_PROFILE, *flags, run=run) as r:
        await r.listening()
        async with openai.AsyncOpenAI(base_url=r.url + "/v1", api_key="none", max_retries=0) as client:

            async def chat(prompt: str) -> tuple[str, str, str]:
                chunks = await client.chat.completions.with_raw_response.create(
                    model="emulated",
                    messages=[{"role": "user", "content": prompt}],
                    max_tokens=max_tokens,
                    stream=True,
                    extra_headers={"x-session-id": session},
                )
                got = [chunk async for chunk in chunks.parse()]
                text = "".join(chunk.choices[0].delta.content or "" for chunk in got)
                return text, str(got[-1].choices[0].finish_reason), chunks.headers["x-lmetric-decision"]

            got = await asyncio.gather(*(chat(prompt) for prompt in prompts))
            records = [
                orjson.loads(await client.get(f"{r.url}/debug/decisions/{decision}?full=1", cast_to=str))
                for *_, decision in got
            ]
            page = await client.get(f"{r.url}/metrics", cast_to=str)
        r.process.terminate()
        assert await r.ended() == 0
    (line,) = (line for line in page.splitlines() if line.startswith(counter))
    name, _, count = line.rpartition(" ")
    assert name == counter + '{model="emulated"}'
    return [(text, end) for text, end, _ in got], records, float(count)


@pytest.mark.nightly
async def test_cut_requests_say_what_whole_ones_say() -> None:
    prompts = ["Of the river, its banks and its bridges. " * n for n in (5, 60, 150, 300, 20, 90)]
    counter = "lmetric_split_requests_total"
    whole, records, counted = await streamed(counter, prompts)
    assert all(not record["cuts"] for record in records)
    assert counted == 0
    forced = ("--split", "force", "--split-settings", "fraction=0.6", "--experimental")
    cut, records, counted = await streamed(counter, prompts, *forced, run=RUN_FORCED)
    assert cut == whole
    assert counted == sum(bool(record["cuts"]) for record in records) > 0
    assert all(record["split_reason"] for record in records if not record["cuts"])


@pytest.mark.nightly
async def test_planner_cuts_embedded_engines_requests_out_of_the_box() -> None:
    prompts = [f"Of river {n}, its banks and its bridges. " * (1 + n % 40) for n in range(48)]
    counter = "lmetric_split_requests_total"
    whole, _, counted = await streamed(counter, prompts)
    assert counted == 0
    # In such a short burst, gains are small.
    gains = ["--experimental", "--split", "apart", "--set", "split.min_gain_seconds"]
    flags = ["--policy", "planner", *gains[:4], f"{gains[4]}=0"]
    planned, records, counted = await streamed(counter, prompts, *flags, run=RUN_TUNED)
    assert planned == whole
    assert counted == sum(bool(record["cuts"]) for record in records) > 0
    for record in records:
        stay, apart = record["stay_seconds"], record["decode_placement_seconds"]
        assert (apart < stay) == bool(record["cuts"]) == (record["split_reason"] is None)
    for flags in (["--experimental", "--split", "none"], [*gains[:4], f"{gains[4]}=1e5"]):
        _, records, counted = await streamed(
            counter, prompts[:8], "--policy", "planner", *flags, run=RUN_TUNED
        )
        assert (counted, [record["cuts"] for record in records]) == (0, [[]] * 8)


@pytest.mark.nightly
async def test_moved_requests_say_what_others_say() -> None:
    # One session, so they all begin on one engine.
    prompts = [f"Of river {n}, its banks and its bridges. " * (1 + n) for n in range(12)]
    counter = "lmetric_migrated_requests_total"
    flags = ["--policy", "session_affinity"]
    whole, _, counted = await streamed(counter, prompts, *flags, max_tokens=400, session="rivers")
    assert counted == 0
    flags += ["--rebalance", "star", "--rebalance-settings", "period_seconds=0.1"]
    moved, records, counted = await streamed(
        counter, prompts, *flags, max_tokens=400, session="rivers", run=RUN_TUNED
    )
    assert moved == whole
    assert counted == sum(len(record["migrations"]) for record in records) > 0
    assert len({record["instance"] for record in records}) == 1
    assert len({target for record in records for _, target in record["migrations"]}) > 1
