"""Moves with failures: no token is lost or sent twice, and all counts end at zero.

`pd` checks at its end that no request is in flight, `moving` that no move is.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from tokenizers.decoders import DecodeStream

from lmetric.server.execution.runner import Runner
from lmetric_lab.emulated.text import TOKENIZER_PATH
from moves_world import LONG, at_token, begins, move, mover, moving, place, plain
from pd_world import STANDSTILL, Pd
from server_world import STREAM_HEAD, FakeEngine, Request, World, chunk, decision_id, event, world
from split_world import CHAT, COMPLETIONS, alone, asked, body_of, equal, heard
from test_server_split_faults import FRAME, NIXL_PAGE, START, STORY, STORY_TEXT, TOKENIZER, Behaviour, tells

PATHS = [CHAT, COMPLETIONS]
SLOW = [plain(clock_speed=0.3) for _ in range(3)]


def stream_of(path: str, **changes: Any) -> dict[str, Any]:
    given = {"stream": True, "max_tokens": 100, "stream_options": {"include_usage": True}}
    return body_of(path, LONG * 2, **(given | changes))


async def on_its_way(w: Pd, path: str, **changes: Any) -> tuple[dict[str, Any], asyncio.Task[Any], str, str]:
    """Starts a move of a stream and waits until its target works on it. Both engines stop then.

    Returns the answer of one engine, the request's task, the source and the target.
    """
    body = stream_of(path, **changes)
    expected = await alone(w, path, body)
    task = asyncio.create_task(asked(w, path, body))
    source = place(await at_token(w, 5))
    target = next(name for name in w.engines if name != source)
    for name in (source, target):
        w.pace(name, STANDSTILL)
    assert await move(w, 5, target)
    await w.until(lambda: w.busy(target))
    assert len(mover(w).moves) == 1
    return expected, task, source, target


@pytest.mark.parametrize("path", PATHS)
async def test_the_target_dies_while_it_computes_ahead(path: str) -> None:
    async with moving(*SLOW) as w:
        expected, task, source, target = await on_its_way(w, path)
        await w.kill(target)
        await w.until(lambda: mover(w).outcomes == {"target_failed": 1})
        w.pace(source, 0.1)
        # It may move elsewhere then.
        third = next(name for name in w.engines if name not in (source, target))
        assert await move(w, 12, third)
        said = await task
        equal(said, expected)
        assert [to for _, to in said["record"]["migrations"]] == [third]


@pytest.mark.parametrize("path", PATHS)
async def test_the_source_dies_while_the_target_computes_ahead(path: str) -> None:
    async with moving(*SLOW) as w:
        expected, task, source, target = await on_its_way(w, path)
        await w.kill(source)
        w.resume()
        said = await task
        equal(said, expected)
        assert [to for _, to in said["record"]["migrations"]] == [target]
        assert mover(w).outcomes == {"source_failed": 1}


@pytest.mark.parametrize("path", PATHS)
async def test_source_and_target_die(path: str) -> None:
    async with moving(*SLOW) as w:
        expected, task, source, target = await on_its_way(w, path)
        await w.kill(source)
        await w.until(lambda: mover(w).outcomes == {"source_failed": 1})
        await w.kill(target)
        said = await task
        equal(said, expected)
        assert said["record"]["outcome"] == "finished"
        assert w.server.fleet.models[0].router.stats()["migrated"] == 1


@pytest.mark.parametrize("path", PATHS)
async def test_the_target_dies_in_the_gap(path: str) -> None:
    # Without a prefix cache the stream switches at once, and the target computes all tokens.
    async with moving(*SLOW, cache=False, migration_max_gap_seconds=60) as w:
        body = stream_of(path)
        expected = await alone(w, path, body)
        task = asyncio.create_task(asked(w, path, body))
        source = place(await at_token(w, 5))
        target = next(name for name in w.engines if name != source)
        w.pace(target, STANDSTILL)
        assert await move(w, 5, target)
        await w.until(lambda: w.busy(target) and not w.busy(source))
        await w.kill(target)
        said = await task
        equal(said, expected)
        # The source has taken over again.
        assert [to for _, to in said["record"]["migrations"]] == [source]
        assert w.server.fleet.models[0].router.stats()["retries"] == 1


@pytest.mark.parametrize("when", ["ahead", "gap", "behind"])
async def test_a_client_that_leaves(when: str) -> None:
    async with moving(*SLOW, cache=when != "gap", migration_max_gap_seconds=60) as w:
        if when == "ahead":
            _, task, *_ = await on_its_way(w, CHAT, max_tokens=1000)
        else:
            task = asyncio.create_task(asked(w, CHAT, stream_of(CHAT, max_tokens=1000)))
            await move(w, 5)
            if when == "behind":
                await at_token(w, 40)
                assert mover(w).outcomes == {"migrated": 1}
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        w.slow_down()
        await w.until(lambda: not any(w.busy(name) for name in w.engines))
        await w.until(lambda: w.in_flight() == 0)
        assert w.server.fleet.models[0].router.stats()["failed"]["cancelled"] == 1


@pytest.mark.parametrize("cache", [True, False])
async def test_a_target_that_is_full(cache: bool) -> None:
    # One request runs and none may wait: the engine refuses others meanwhile.
    tight = plain(max_sequences=1, max_queued_requests=0, clock_speed=0.3)
    async with moving(tight, tight, cache=cache, migration_max_gap_seconds=60) as w:
        body = stream_of(COMPLETIONS)
        expected = await alone(w, COMPLETIONS, body)
        tasks = [asyncio.create_task(asked(w, COMPLETIONS, body)) for _ in range(2)]
        await w.until(lambda: len(mover(w).running) == 2)
        one, other = list[Any](mover(w).running.values())
        await w.until(lambda: one.known_tokens > 3)
        assert begins(mover(w), one.ticket.id, place(other))
        for said in await asyncio.gather(*tasks):
            equal(said, expected)
        stats = w.server.fleet.models[0].router.stats()
        if cache:
            assert mover(w).outcomes == {"target_refused": 1}
            assert stats["migrated"] == 0
        else:  # it has returned to its first engine
            assert mover(w).outcomes == {"migrated": 1}
            assert (stats["migrated"], stats["retries"]) == (1, 1)


async def test_a_stream_that_ends_while_its_target_computes_ahead() -> None:
    async with moving(plain(), plain()) as w:
        body = stream_of(COMPLETIONS, max_tokens=400)
        expected = await alone(w, COMPLETIONS, body)
        task = asyncio.create_task(asked(w, COMPLETIONS, body))
        source = place(await at_token(w, 3))
        target = next(name for name in w.engines if name != source)
        w.pace(target, STANDSTILL)
        assert await move(w, 3, target)
        said = await task
        w.resume()
        equal(said, expected)
        assert said["record"]["migrations"] == []
        assert mover(w).outcomes == {"ended": 1}


async def test_the_server_stops_in_the_middle() -> None:
    async with moving(*SLOW) as w:
        _, task, *_ = await on_its_way(w, CHAT)
        for relay in list(w.server.front.relays):
            relay.stop()
        said = await task
        w.resume()
        assert said["error"]["code"] == "shutting_down"
        assert said["text"]


# Engines that send a story token by token, with faults.


def tale(*, ids: bool = True, text: str | None = None, lingers: float = 0.0) -> Behaviour:
    """A healthy engine with one fault: no token ids, other text, or a late end of its stream.

    `lingers`: seconds that the stream stays open.
    """

    async def behave(_: FakeEngine, request: Request, writer: asyncio.StreamWriter) -> bool:
        if request.path == "/tokenize" or not request.json.get("stream"):
            return await tells(_, request, writer)
        prompt = request.json["prompt"]
        done = len(prompt) - len(START)
        words = DecodeStream(ids=prompt, skip_special_tokens=True)
        writer.write(STREAM_HEAD)
        for n, token in enumerate(STORY[done:]):
            said = words.step(TOKENIZER, token) or ""
            choice = {"index": 0, "text": said if text is None else text, "logprobs": None}
            choice |= {"finish_reason": "length" if done + n + 1 == len(STORY) else None}
            choice |= {"token_ids": [token]} if ids else {}
            writer.write(chunk(event({**FRAME, "choices": [choice]})))
            await writer.drain()
            await asyncio.sleep(0.002)
        await asyncio.sleep(lingers)
        writer.write(chunk(event(b"[DONE]")) + b"0\r\n\r\n")
        return True

    return behave


@contextlib.asynccontextmanager
async def tellers(behave: Behaviour, metrics: bytes = b"", **config: Any) -> AsyncIterator[World]:
    star = {"kind": "star", "period_seconds": 3600.0}
    given: dict[str, Any] = {"rebalance": star, "migration_by": "recompute", "model": "tiny"}
    fakes = [FakeEngine(behave=behave, metrics=metrics) for _ in range(2)]
    async with world(fakes, tokenizer=str(TOKENIZER_PATH.parent), **(given | config)) as w:
        yield w
        assert not w.server.fleet.models[0].router.in_flight()


async def told_in_two(w: World, count: int) -> tuple[bool, Any, dict[str, Any]]:
    """Moves a story after this many tokens.

    Returns whether the move started, the client's answer, and the decision record.
    """
    model = w.server.fleet.models[0]
    moves = model.mover
    assert moves is not None
    body = {"model": "tiny", "prompt": START, "max_tokens": len(STORY), "stream": True}
    task = asyncio.create_task(w.post(body))
    began = False
    while not task.done():
        for ticket, chain in list(moves.running.items()):
            if chain.known_tokens >= count and not (began or moves.outcomes):
                target = next(name for name in model.engines if name != place(chain))
                began = begins(moves, ticket, target)
        await asyncio.sleep(0.001)
    status, headers, raw = await task
    moves.outcomes.clear()
    assert status == 200
    record = model.router.explain(decision_id(headers))
    assert record is not None
    return began, heard(raw), record


async def test_a_seam_inside_a_character() -> None:
    async with tellers(tale()) as w:
        tokens = []
        for count in range(1, 36, 2):
            began, said, record = await told_in_two(w, count)
            assert began
            assert (said["text"], said["finish"]) == (STORY_TEXT, "length")
            tokens += [token - len(START) for token, _ in record["migrations"]]
        halves = [n for n in tokens if TOKENIZER.decode(STORY[:n]).endswith("\N{REPLACEMENT CHARACTER}")]
        assert len(tokens) > 9
        assert halves


async def test_a_stream_that_has_said_its_last_token_stays() -> None:
    async with tellers(tale(lingers=0.1)) as w:
        began, said, record = await told_in_two(w, len(STORY))
        assert not began
        assert (said["text"], said["finish"], record["migrations"]) == (STORY_TEXT, "length", [])


@pytest.mark.parametrize(
    ("behave", "why"),
    [
        (tale(text="something else"), "the engine's text differs from the text of its tokens"),
        (tale(ids=False), "does not tell token ids"),
    ],
)
async def test_what_cannot_be_joined_stays(behave: Behaviour, why: str) -> None:
    async with tellers(behave) as w:
        began, said, record = await told_in_two(w, 5)
        assert (began, said["finish"], record["migrations"]) == (False, "length", [])
        assert said["text"] == (STORY_TEXT if why.startswith("does") else "something else" * len(STORY))
        # From now on, such requests are forwarded unchanged, with the reason in their decision
        # records.
        body = {"model": "tiny", "prompt": START, "max_tokens": len(STORY), "stream": True}
        _, headers, _ = await w.post(body)
        record = w.server.fleet.models[0].router.explain(decision_id(headers)) or {}
        assert why in record["split_reason"]
        last = [fake.requests[-1].json for fake in w.engines if fake.requests]
        assert any("return_token_ids" not in asked for asked in last)


@pytest.mark.parametrize("others", [1, 2])
async def test_the_target_is_removed_and_then_the_source_dies(others: int) -> None:
    """Server 7.3: the stream continues on a third engine.

    If there is none, it ends with an error.

    It once stayed open forever, with its requests counted as running.
    """
    async with moving(*SLOW[: 1 + others], admin=True) as w:
        expected, task, source, target = await on_its_way(w, COMPLETIONS)
        async with w.client.delete(f"{w.url}/admin/engines/{target}") as response:
            assert response.status == 200
        await w.kill(source)
        w.stopped.add(target)  # the router no longer has it
        if others == 2:
            equal(await task, expected)
            assert mover(w).outcomes["target_gone"] == 1
        else:
            said = await task
            assert said["error"]["code"] == "reset"
            assert expected["text"].startswith(said["text"])
        await w.until(lambda: w.in_flight() == 0)


async def test_an_exception_while_an_engine_dies_ends_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Server 7.3: an exception in failure handling ends the request with an error."""

    def fails(*_: object) -> None:
        raise RuntimeError("a bug")

    async with moving(*SLOW) as w:
        task = asyncio.create_task(raw(w, stream_of(COMPLETIONS)))
        source = place(await at_token(w, 5))
        monkeypatch.setattr("lmetric.server.execution.failures._resume", fails)
        await w.kill(source)
        await task  # the connection closes in the middle of the stream
        await w.until(lambda: w.in_flight() == 0 and not w.server.front.relays)


async def test_a_stream_that_no_engine_works_on_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Server 7.3: if a request has no engine left, the next check ends it."""
    async with moving(*SLOW) as w:
        task = asyncio.create_task(raw(w, stream_of(COMPLETIONS)))
        source = place(await at_token(w, 5))
        monkeypatch.setattr("lmetric.server.execution.progress.Progress.send", lambda *_: None)
        await w.kill(source)
        said = await task
        assert b"internal error of the router; see its log for the reason" in said
        assert said.endswith(b"data: [DONE]\n\n")
        await w.until(lambda: w.in_flight() == 0)


async def raw(w: Pd, body: dict[str, Any]) -> bytes:
    """Returns the bytes that a client gets until the end or a close."""
    got = b""
    async with w.client.post(w.url + COMPLETIONS, json=body) as response:
        with contextlib.suppress(aiohttp.ClientPayloadError):
            async for data in response.content.iter_any():
                got += data
    return got


async def test_a_move_does_not_send_a_kv_transfer_twice_on_a_stale_connection() -> None:
    """Server 7.7: a stream moves, and the target closes the reused connection of the fetch.

    The target gets the request again, without the transfer.
    """
    used: dict[int, set[int]] = {}
    fetches: list[bool] = []

    async def closes_kept(engine: FakeEngine, request: Request, writer: asyncio.StreamWriter) -> bool:
        connections = used.setdefault(id(engine), set())
        kept = request.connection in connections
        connections.add(request.connection)
        if (request.json.get("kv_transfer_params") or {}).get("do_remote_prefill"):
            fetches.append(kept)
            if kept:
                writer.transport.abort()
                return False
        return await tale()(engine, request, writer)

    async with tellers(closes_kept, metrics=NIXL_PAGE, migration_by="fetch") as w:
        await w.until(lambda: all(e.connector for e in w.server.fleet.models[0].engines.values()))
        for _ in range(4):
            began, said, _ = await told_in_two(w, 10)
            assert (began, said["text"]) == (True, STORY_TEXT)
        assert True in fetches
        outcomes = w.server.fleet.models[0].kv_transfers
        assert (outcomes["transferred"], outcomes["spent"]) == (len(fetches), fetches.count(True))


async def test_a_stream_that_may_move_keeps_four_bytes_a_token() -> None:
    """Server 7.4: movable streams keep 4 bytes per prompt token.

    They once kept a Python list (36 bytes per token), and the request's body and JSON, until they
    ended.
    """
    async with tellers(tale(lingers=0.2)) as w:
        moves = w.server.fleet.models[0].mover
        assert moves is not None
        body = {"model": "tiny", "prompt": START, "max_tokens": len(STORY), "stream": True}
        task = asyncio.create_task(w.post(body))
        await w.until(lambda: any(request.known_tokens for request in moves.running.values()))
        (request,) = w.server.front.relays
        assert isinstance(request, Runner)
        transcript = request.transcript
        assert transcript is not None
        assert (transcript.prompt.nbytes, transcript.prompt.tolist()) == (4 * len(START), START)
        assert "prompt" not in transcript.request
        assert (request.body, request.call) == (b"", None)
        slots = [name for kind in type(request).__mro__ for name in getattr(kind, "__slots__", ())]
        held = [*(getattr(request, name, None) for name in slots), *vars(transcript).values()]
        assert not [value for value in held if isinstance(value, bytes) and b"prompt" in value]
        await task


async def test_a_stream_that_may_move_ends_at_its_longest_duration() -> None:
    """Reliability M7: the longest duration also holds if the router writes the answer itself."""
    async with tellers(tale(lingers=60.0), timeouts={"request": 1.0}) as w:
        status, _, got = await w.post(
            {"model": "tiny", "prompt": START, "max_tokens": len(STORY), "stream": True}
        )
        said = heard(got)
        assert (status, said["error"]["code"]) == (200, "timeout")
        assert STORY_TEXT.startswith(said["text"])
        await w.settled()
        assert w.server.fleet.models[0].router.stats()["failed"]["timeout"] == 1
