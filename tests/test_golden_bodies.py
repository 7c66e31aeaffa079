"""Requests to engines, compared with a file, for each way to run a request.

The file is `data/golden_bodies.json`. `GOLDEN=write python -m pytest tests/test_golden_bodies.py`
(without `-n`) writes it. The engines here answer by a fixed rule and wait for tests, so the file
does not depend on time. `Golden.note` leaves out or replaces:

- `host`, `content-length` and `x-forwarded-*`, which are checked here, and fields of the tests'
  HTTP client;
- `bootstrap_room`, which is random, and must be equal in both segments: ROOM replaces it.

The order of a body's fields is not compared. `bytes` records whether a body contains the client's
own bytes.
"""

from __future__ import annotations

import asyncio
import contextlib
import difflib
import functools
import json
import math
import os
import time
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from lmetric.options import SplitAt
from lmetric.server.fleet.kv_backfill import KvBackfill
from lmetric.server.fleet.model import Model
from lmetric.server.fleet.rebalancer import Rebalancer
from lmetric_lab.emulated.protocol import Shape, StreamOptions
from lmetric_lab.emulated.text import TOKENIZER_PATH, shared_text
from server_world import STREAM_HEAD, Behaviour, FakeEngine, Request, World, chunk, plain, reset, world
from split_world import CHAT, COMPLETIONS, heard, told

FILE = Path(__file__).parent / "data" / "golden_bodies.json"
WRITES = os.environ.get("GOLDEN") == "write"

PROMPT = "the history of the quiet river and of all who lived by it " * 3
ANSWER_TOKENS = 12
BLOCK_TOKENS = 16
HELD_AT = 5  # the engine pauses its stream after this token
# Header fields of the tests' HTTP client.
OF_THE_CLIENT = ("user-agent", "accept", "accept-encoding")


# -- engines with set capabilities, which answer by a fixed rule
# -------------------------------------


def said(position: int) -> int:
    """Returns the token that every engine produces at this position of prompt and answer."""
    words = shared_text().words
    return words[37 * position % len(words)]


def tokens_of(body: dict[str, Any]) -> array[int]:
    """Returns the prompt of a request as an engine sees it."""
    if "messages" in body:
        return shared_text().encode(shared_text().render_chat(body["messages"]))
    prompt = body["prompt"]
    return shared_text().encode(prompt) if isinstance(prompt, str) else array("I", prompt)


async def answers(engine: FakeEngine, request: Request, writer: asyncio.StreamWriter) -> bool:
    """Answers like vLLM: each token, its id if requested, and the KV transfer fields."""
    assert isinstance(engine, Engine)
    body, prompt = request.json, tokens_of(request.json)
    options = body.get("stream_options")
    shape = Shape(
        chat="messages" in body,
        request_id="cmpl-1",
        model=engine.model,
        prompt=prompt,
        pieces=shared_text().pieces,
        token_ids=bool(body.get("return_token_ids")),
        stream_options=StreamOptions(**options) if options else None,
    )
    count = body.get("max_completion_tokens") or body["max_tokens"]
    made = [said(len(prompt) + n) for n in range(count)]
    if not body.get("stream"):
        held = engine.holds_back(body, len(prompt) + len(made) - 1)
        writer.write(plain(200, shape.whole(made, "length", None, 0, held)))
        return True
    writer.write(STREAM_HEAD + (chunk(opening) if (opening := shape.opening()) else b""))
    for number, each in enumerate(made, 1):
        writer.write(chunk(shape.token(each, number, "length" if number == count else None)))
        if number == engine.held_at:
            await engine.until_left(writer)
            return False
    writer.write(chunk(shape.closing(count, 0)) + b"0\r\n\r\n")
    return True


@dataclass
class Engine(FakeEngine):
    """An engine with vLLM's pages, in one role, with or without NIXL.

    `sglang`: with SGLang's pages.
    """

    behave: Behaviour = answers
    role: str = "both"
    nixl: bool = True
    bidirectional: bool = False
    sglang: bool = False
    honours_priority: bool = True
    held_at: int | None = None
    golden: Golden | None = None
    kept: int = 0  # number of requests whose cache it holds

    def holds_back(self, body: dict[str, Any], tokens: int) -> dict[str, Any] | None:
        """Returns the `kv_transfer_params` of an answer, equal in each run."""
        asked = body.get("kv_transfer_params") or {}
        holds = asked.get("do_remote_decode") or (asked.get("do_remote_prefill") and self.bidirectional)
        if not self.nixl or not holds:
            return None
        self.kept += 1
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [list(range(1, 1 + -(-tokens // BLOCK_TOKENS)))],
            "remote_engine_id": f"engine-{self.name}",
            "remote_request_id": f"held-{self.name}-{self.kept}",
            "remote_host": "127.0.0.1",
            "remote_port": 1,
            "tp_size": 1,
            "remote_num_tokens": tokens,
            "transfer_mode": "pull",
        }

    def pages(self) -> dict[str, Any]:
        """Returns its pages."""
        root, owner = str(TOKENIZER_PATH.parent), "sglang" if self.sglang else "vllm"
        card = {"id": self.model, "owned_by": owner, "root": root, "parent": None}
        pages: dict[str, Any] = {"/v1/models": {"data": [card]}}
        if self.sglang:
            mode = "null" if self.role == "both" else self.role
            flags = {"page_size": BLOCK_TOKENS, "enable_priority_scheduling": self.honours_priority}
            modes = {"disaggregation_mode": mode, "disaggregation_bootstrap_port": 9001}
            return pages | {"/server_info": {"version": "0.5.23", **flags, **modes}}
        cache = f'block_size="{BLOCK_TOKENS}",num_gpu_blocks="1000",enable_prefix_caching="True"'
        metrics = f"vllm:cache_config_info{{{cache}}} 1.0\n"
        config: dict[str, Any] = {
            "scheduler_config": {"policy": "priority" if self.honours_priority else "fcfs"}
        }
        if self.nixl:
            metrics += 'vllm:nixl_num_failed_transfers_total{engine="0"} 0.0\n'
            config["kv_transfer_config"] = {
                "kv_role": {"both": "kv_both", "prefill": "kv_producer", "decode": "kv_consumer"}[self.role],
                "kv_load_failure_policy": "fail",
                "kv_connector_extra_config": {"bidirectional_kv_xfer": self.bidirectional},
            }
        pages["/metrics"] = metrics.encode()
        pages["/version"] = {"version": "0.32.0"}
        return pages | {"/server_info?config_format=json": {"vllm_config": config}}

    async def _answer(self, request: Request, writer: asyncio.StreamWriter) -> bool:
        if request.method == "GET" and (page := self.pages().get(request.path)) is not None:
            writer.write(plain(200, page))
            return "close" not in request.headers.get("connection", "")
        if request.path == "/tokenize":  # the router compares tokenizers
            writer.write(plain(404, {}))
            return False
        if self.golden is not None and request.method != "GET":
            self.golden.note(self, request)
        return await super()._answer(request, writer)


def refuses(status: int) -> Behaviour:
    """Answers once with this status, then normally."""

    async def behave(engine: FakeEngine, _: Request, writer: asyncio.StreamWriter) -> bool:
        engine.behave = answers
        writer.write(plain(status, {"error": {"message": "not now", "code": status}}))
        return True

    return behave


def prefill(**changes: Any) -> Engine:
    return Engine(role="prefill", **changes)


def decode(**changes: Any) -> Engine:
    return Engine(role="decode", **changes)


# -- one request and the requests to engines
# ---------------------------------------------------------


@dataclass
class Golden:
    """A scenario's request, and the resulting requests to engines, in their order."""

    path: str
    stream: bool
    folder: Path  # for its files
    raw: bytes = b""  # as the client sent it
    headers: dict[str, str] = field(default_factory=lambda: {"x-request-id": "golden"})
    sent: list[dict[str, Any]] = field(default_factory=list)
    engines: dict[str, Engine] = field(default_factory=dict)
    rooms: set[int] = field(default_factory=set)

    @property
    def auth(self) -> dict[str, str]:
        """Returns an `auth` section: the key of a tenant, and the secret for salts."""
        keys = self.folder / "keys.yaml"
        keys.write_text("sk-alice: alice\n")
        return {"keys_file": str(keys), "salt_secret": "golden"}

    def note(self, engine: Engine, request: Request) -> None:
        """Records a request to an engine, without random values and fields of the tests' client."""
        headers = {name: value for name, value in request.headers.items() if name not in OF_THE_CLIENT}
        assert headers.pop("host") == f"{engine.host}:{engine.port}"
        assert int(headers.pop("content-length")) == len(request.body)
        assert headers.pop("x-forwarded-for") == "127.0.0.1"
        assert headers.pop("x-forwarded-proto") == "http"
        assert headers.pop("x-forwarded-host").startswith("127.0.0.1:")
        body: dict[str, Any] = json.loads(request.body, object_pairs_hook=unique)
        if "bootstrap_room" in body:
            self.rooms.add(body["bootstrap_room"])
            body["bootstrap_room"] = "ROOM"
        if request.body == self.raw:
            made = "the client's own"
        elif request.body.endswith(self.raw[1:]):
            made = "fields ahead of the client's own"
        else:
            made = "the router's"
        role = "" if engine.role == "both" else f" ({engine.role})"
        self.sent.append(
            {
                "engine": engine.name + role,
                "request": f"{request.method} {request.path}",
                "headers": dict(sorted(headers.items())),
                "bytes": made,
                "body": body,
            }
        )

    def forget(self) -> None:
        """Drops the recorded requests."""
        self.sent.clear()

    def body(self, **changes: Any) -> dict[str, Any]:
        """Returns a request with many fields that may still be split and moved."""
        asked: dict[str, Any] = {"prompt": PROMPT, "max_tokens": ANSWER_TOKENS, "logprobs": 1}
        if self.path == CHAT:
            messages = [{"role": "user", "content": PROMPT}]
            asked = {"messages": messages, "max_completion_tokens": ANSWER_TOKENS, "logprobs": False}
        asked |= {"model": "tiny", "temperature": 0.5, "top_p": 0.9, "min_tokens": 3, "ignore_eos": True}
        asked |= {"stop_token_ids": [1], "user": "somebody"}
        if self.stream:
            asked |= {"stream": True, "stream_options": {"include_usage": True}}
        return asked | changes

    @contextlib.asynccontextmanager
    async def router(self, *engines: Engine, **config: Any) -> AsyncIterator[World]:
        """Starts a router before these engines, named by their roles: p0, d0, e0, …"""
        given: list[dict[str, Any]] = []
        keys = config.pop("keys", {})
        async with contextlib.AsyncExitStack() as stack:
            for engine in engines:
                letter = "e" if engine.role == "both" else engine.role[0]
                engine.name = f"{letter}{sum(name.startswith(letter) for name in self.engines)}"
                self.engines[engine.name] = engine
                await engine.start()
                stack.push_async_callback(engine.stop)
                given.append({"url": engine.url, "name": engine.name, **keys})
            settings = {"policy": "round_robin", "decode_policy": "round_robin", "model": "tiny"}
            # Only `return_token_ids` would be added to streams: test_server_failover.py.
            settings |= {"stream_failover": False, **config}
            w = await stack.enter_async_context(world([], engines=given, **settings))
            of = model(w)
            await w.until(lambda: all(each.identified for each in of.engines.values()))
            assert {name: each.role for name, each in of.engines.items()} == {
                name: engine.role for name, engine in self.engines.items()
            }
            assert of.tokenizers.current is not None or config.get("tokenizer") == "off"
            for engine in engines:
                engine.golden = self
            yield w

    async def ask(self, w: World, **changes: Any) -> dict[str, Any]:
        """Sends the request, and checks that the answer is that of one engine.

        Returns the decision record.
        """
        asked = self.body(**changes)
        self.raw = json.dumps(asked).encode()  # with spaces, which the router's own JSON never has
        status, headers, answer = await w.post(self.raw, self.path, self.headers)
        assert status == 200, answer
        count = asked.get("max_completion_tokens") or asked["max_tokens"]
        prompt = len(tokens_of(asked))
        pieces = shared_text().pieces
        expected = b"".join(pieces[said(prompt + n)] for n in range(count)).decode()
        assert (heard(answer) if self.stream else told(answer))["text"] == expected
        record = model(w).router.explain(int(headers["x-lmetric-decision"].split("-")[-2]))
        assert record is not None
        return {**record, "answered": headers["x-lmetric-instance"], "count": prompt}


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Parses a JSON object and checks that no field is repeated."""
    assert len({name for name, _ in pairs}) == len(pairs), [name for name, _ in pairs]
    return dict(pairs)


def model(w: World) -> Model:
    return w.server.fleet.models[0]


def handovers(w: World) -> dict[str, int]:
    return dict(model(w).kv_transfers)


def mover(w: World) -> Rebalancer:
    found = model(w).mover
    assert found is not None
    return found


async def at_token(w: World, count: int) -> int:
    """Waits until the only movable request has this many known tokens. Returns its ticket."""

    def counts() -> dict[int, int]:
        running: dict[int, Any] = dict(mover(w).running)
        return {ticket: request.known_tokens for ticket, request in running.items()}

    await w.until(lambda: list(counts().values()) == [count])
    (ticket,) = counts()
    return ticket


def begin_move(w: World, ticket: int, target: str) -> None:
    mover(w).begin(ticket, target, time.monotonic())
    assert mover(w).moves


MOVES: dict[str, Any] = {
    "rebalance": {"kind": "star", "period_seconds": 3600.0},  # only the test's moves
    "migration_by": "recompute",
    "migration_max_gap_seconds": 60.0,
}
BOTH_WAYS: dict[str, Any] = {"bidirectional": True}


# -- scenarios
# ---------------------------------------------------------------------------------------

Scenario = Callable[[Golden], Awaitable[None]]
SCENARIOS: dict[str, tuple[Scenario, tuple[bool, ...]]] = {}


def scenario(name: str, *, streams: tuple[bool, ...] = (False, True)) -> Callable[[Scenario], Scenario]:
    """Declares a scenario with this name, for answers with or without streaming."""

    def kept(run: Scenario) -> Scenario:
        assert name not in SCENARIOS
        SCENARIOS[name] = (run, streams)
        return run

    return kept


@scenario("plain")
async def _(g: Golden) -> None:
    async with g.router(Engine()) as w:
        await g.ask(w)
        assert len(g.sent) == 1


@scenario("plain, fields that nobody knows")
async def _(g: Golden) -> None:
    async with g.router(Engine()) as w:
        await g.ask(w, seed=3, stop=["zzz"], odd={"a": [1.50, None]})


@scenario("plain, the engine's own key")
async def _(g: Golden) -> None:
    async with g.router(Engine(), keys={"api_key": "sk-of-the-engine"}) as w:
        await g.ask(w)


# Prefill and decode, in pools whose requests may move or not. The file shows their requests side by
# side.

PD_WAYS: dict[str, dict[str, Any]] = {
    "pool without rescheduling": {},
    "pool with rescheduling": MOVES,
}


def pd_scenarios(way: str, config: dict[str, Any]) -> None:
    """Declares the scenarios of one way."""

    def name(what: str) -> str:
        return f"prefill/decode, {way}{what and ', '}{what}"

    def chained(g: Golden) -> bool:
        """Returns whether the request may move."""
        return bool(config) and g.stream

    def followed(g: Golden) -> bool:
        """Returns whether the router requested token ids, as for a movable request."""
        return any(each["body"].get("return_token_ids") for each in g.sent)

    @scenario(name(""))
    async def _(g: Golden) -> None:
        async with g.router(prefill(), decode(), **config) as w:
            record = await g.ask(w)
            assert (record["answered"], handovers(w)) == ("d0", {"transferred": 1})
            assert [each["engine"] for each in g.sent][:2] == ["p0 (prefill)", "d0 (decode)"]
            assert followed(g) is chained(g)

    @scenario(name("bidirectional engines"))
    async def _(g: Golden) -> None:
        async with g.router(prefill(**BOTH_WAYS), decode(**BOTH_WAYS), **config) as w:
            await g.ask(w)
            assert handovers(w) == {"transferred": 1}

    @scenario(name("fields that keep it from moving"))
    async def _(g: Golden) -> None:
        async with g.router(prefill(), decode(), **config) as w:
            tools = {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "none"}
            more = {"n": 1, "seed": 3, "stop": ["zzz"], **(tools if g.path == CHAT else {"echo": False})}
            await g.ask(w, **more)
            assert handovers(w) == {"transferred": 1}
            assert not followed(g)

    @scenario(name("fields that shape the answer"))
    async def _(g: Golden) -> None:
        more: dict[str, Any] = {"return_token_ids": True, "return_tokens_as_token_ids": False}
        more |= {"max_tokens": 9, "top_logprobs": 0} if g.path == CHAT else {"echo": False}
        if g.stream:
            more["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
        async with g.router(prefill(), decode(), **config) as w:
            await g.ask(w, **more)
            assert handovers(w) == {"transferred": 1}

    @scenario(name("the decode engine cannot fetch"))
    async def _(g: Golden) -> None:
        async with g.router(prefill(), decode(behave=refuses(500)), **config) as w:
            await g.ask(w)
            assert handovers(w) == {"transferred": 1, "broken": 1}

    @scenario(name("the decode engine refuses"))
    async def _(g: Golden) -> None:
        async with g.router(prefill(), decode(behave=refuses(503)), decode(), **config) as w:
            record = await g.ask(w)
            assert (record["answered"], handovers(w)["transferred"]) == ("d1", 1)
            assert handovers(w)["spent"] == 1

    @scenario(name("the prefill engine dies"))
    async def _(g: Golden) -> None:
        async with g.router(prefill(behave=reset), prefill(), decode(), **config) as w:
            await g.ask(w)
            assert [each["engine"][:2] for each in g.sent][:3] == ["p0", "p1", "d0"]

    @scenario(name("nothing is handed over"))
    async def _(g: Golden) -> None:
        async with g.router(prefill(), decode(), handover_seconds=1e-9, **config) as w:
            await g.ask(w)
            assert handovers(w) == {"late": 1}

    @scenario(name("priority, salt, key and backfill"))
    async def _(g: Golden) -> None:
        async with with_all(g, prefill(), decode(), **config) as w:
            await g.ask(w, priority=5)
            assert handovers(w) == {"transferred": 1}


for _way, _config in PD_WAYS.items():
    pd_scenarios(_way, _config)


@contextlib.asynccontextmanager
async def with_all(g: Golden, *engines: Engine, **config: Any) -> AsyncIterator[World]:
    """Starts a router with priorities, salts for an isolated tenant, and backfill."""
    given: dict[str, Any] = {"auth": g.auth, "tenants": {"alice": {"isolate": True}}, "priority": "vtc"}
    g.headers |= {"authorization": "Bearer sk-alice", "x-vllm-priority": "5"}
    async with g.router(*engines, keys={"api_key": "sk-of-the-engine"}, **given, **config) as w:
        if engines[0].sglang and len(engines) == 2:
            answered_first(w, *engines)
        await priority_is_not_nothing(g, w)
        for engine in model(w).engines.values():
            engine.refill = KvBackfill({"vllm_xargs": {"kv_cache_report_mode": "full"}}, BLOCK_TOKENS, 1e12)
        yield w


async def priority_is_not_nothing(g: Golden, w: World) -> None:
    """Sends another request first, because the first priority is 0.

    Resets the records and counts.
    """
    short: dict[str, Any] = {"prompt": "a"}
    if g.path == CHAT:
        short = {"messages": [{"role": "user", "content": "a"}]}
    await g.ask(w, **short)
    model(w).kv_transfers.clear()
    g.forget()


def sglang_scenario(name: str, *, decode_first: bool) -> None:
    """Declares a scenario with both segments at once, and the order of the engines' answers."""

    @scenario(f"prefill/decode, SGLang: {name}")
    async def _(g: Golden) -> None:
        first, second = prefill(sglang=True, nixl=False), decode(sglang=True, nixl=False)
        async with g.router(first, second) as w:
            answered_first(w, *((second, first) if decode_first else (first, second)))
            record = await g.ask(w)
            assert record["answered"] == "d0"
            assert (len(g.sent), len(g.rooms)) == (2, 1)
            g.sent.sort(key=lambda each: str(each["engine"]))  # their order is random


sglang_scenario("both legs at once", decode_first=False)
sglang_scenario("the decode engine answers first", decode_first=True)


@scenario("prefill/decode, SGLang: priority, salt, key and backfill")
async def _(g: Golden) -> None:
    first, second = prefill(sglang=True, nixl=False), decode(sglang=True, nixl=False)
    async with with_all(g, first, second) as w:
        await g.ask(w, priority=5)
        g.sent.sort(key=lambda each: str(each["engine"]))


def answered_first(w: World, first: Engine, second: Engine) -> None:
    """Lets one engine answer after the router has the other's answer.

    SGLang's decode engines start after the transfer from the prefill engine, whose answer may come
    later.
    """

    async def behave(it: FakeEngine, request: Request, writer: asyncio.StreamWriter) -> bool:
        await first.asked(len(it.requests))
        await w.until(lambda: not model(w).engines[first.name].upstream.in_use)
        return await answers(it, request, writer)

    second.behave = behave


# Libra: split at a token.


def split_config(at: float, **more: Any) -> dict[str, Any]:
    return {"split": SplitAt(fraction=at), **more}


def split_scenarios(what: str, at: float) -> None:
    """Declares the scenarios of a split at this fraction of prompt and answer."""

    def cut_well(record: dict[str, Any]) -> None:
        (cut,) = record["cuts"]
        assert cut == math.ceil(at * (record["count"] + ANSWER_TOKENS))
        assert (cut < record["count"]) is (what == "inside the prompt")

    @scenario(f"split, {what}")
    async def _(g: Golden) -> None:
        async with g.router(Engine(**BOTH_WAYS), Engine(**BOTH_WAYS), **split_config(at)) as w:
            cut_well(await g.ask(w))
            assert handovers(w) == {"transferred": 1}

    @scenario(f"split, {what}, the second engine cannot fetch")
    async def _(g: Golden) -> None:
        second = Engine(behave=refuses(500), **BOTH_WAYS)
        async with g.router(Engine(**BOTH_WAYS), second, **split_config(at)) as w:
            cut_well(await g.ask(w))
            assert handovers(w) == {"transferred": 1, "broken": 1}

    @scenario(f"split, {what}, priority, salt, key and backfill")
    async def _(g: Golden) -> None:
        engines = [Engine(**BOTH_WAYS), Engine(**BOTH_WAYS)]
        async with with_all(g, *engines, **split_config(at)) as w:
            cut_well(await g.ask(w, priority=5))
            assert handovers(w) == {"transferred": 1}


split_scenarios("inside the prompt", 0.5)
split_scenarios("behind the prompt", 0.9)


@scenario("split, at the prompt's end without the bidirectional mode")
async def _(g: Golden) -> None:
    async with g.router(Engine(), Engine(), **split_config(0.5)) as w:
        record = await g.ask(w)
        assert record["cuts"] == [record["count"]]
        assert handovers(w) == {"transferred": 1}


@scenario("split, behind the prompt without the bidirectional mode")
async def _(g: Golden) -> None:
    async with g.router(Engine(), Engine(), **split_config(0.9)) as w:
        record = await g.ask(w)
        assert record["cuts"][0] > record["count"]
        assert handovers(w) == {"transferred": 1}


@scenario("split, behind the prompt without a connector")
async def _(g: Golden) -> None:
    config = split_config(0.9, split_recompute=True)
    async with g.router(Engine(nixl=False), Engine(nixl=False), **config) as w:
        record = await g.ask(w)
        assert record["cuts"][0] > record["count"]
        assert handovers(w) == {"no_connector": 1}


# Migration and failover of running requests.


def move_scenarios(by: str) -> None:
    """Declares the scenarios of a stream that moves at a token."""

    async def moves(g: Golden, w: World, source: str, target: str, **changes: Any) -> None:
        asking = asyncio.create_task(g.ask(w, **changes))
        begin_move(w, await at_token(w, HELD_AT), target)
        record = await asking
        assert record["migrations"] == [(record["count"] + HELD_AT, target)]
        assert record["answered"] == source
        assert mover(w).outcomes == {"migrated": 1}

    config = MOVES | {"migration_by": by}

    @scenario(f"a stream moves ({by})", streams=(True,))
    async def _(g: Golden) -> None:
        async with g.router(Engine(held_at=HELD_AT), Engine(), **config) as w:
            await moves(g, w, "e0", "e1")
            assert handovers(w) == ({"transferred": 1} if by == "fetch" else {})

    @scenario(f"a stream moves ({by}), priority, salt, key and backfill", streams=(True,))
    async def _(g: Golden) -> None:
        async with with_all(g, Engine(), Engine(), **config) as w:
            g.engines["e1"].held_at = HELD_AT  # used for the second request
            await moves(g, w, "e1", "e0", priority=5)

    @scenario(f"a decode moves ({by})", streams=(True,))
    async def _(g: Golden) -> None:
        async with g.router(prefill(), decode(held_at=HELD_AT), decode(), **config) as w:
            await moves(g, w, "d0", "d1")
            assert handovers(w) == {"transferred": 2 if by == "fetch" else 1}


for _by in ("recompute", "fetch"):
    move_scenarios(_by)


@scenario("an engine dies in mid-stream, and the stream goes on elsewhere", streams=(True,))
async def _(g: Golden) -> None:
    async with g.router(Engine(held_at=HELD_AT), Engine(), **MOVES) as w:
        asking = asyncio.create_task(g.ask(w))
        await at_token(w, HELD_AT)
        await g.engines["e0"].stop()
        record = await asking
        assert record["migrations"] == [(record["count"] + HELD_AT, "e1")]
        assert mover(w).outcomes == {"source_failed": 1}


# Failover.


@scenario("an engine dies before it answers")
async def _(g: Golden) -> None:
    async with g.router(Engine(behave=reset), Engine()) as w:
        assert (await g.ask(w))["answered"] == "e1"
        assert [each["engine"] for each in g.sent] == ["e0", "e1"]


@scenario("an engine is too busy")
async def _(g: Golden) -> None:
    async with g.router(Engine(behave=refuses(503)), Engine()) as w:
        assert (await g.ask(w))["answered"] == "e1"
        assert [each["engine"] for each in g.sent] == ["e0", "e1"]


# Prefix fetch.

PULLS: dict[str, Any] = {
    "prefix_fetch": {"seconds_per_token": 0.0, "fixed_seconds": 0.0, "min_tokens": BLOCK_TOKENS},
    "prefix_fetch_timeout_seconds": 60.0,
}


async def pulls(g: Golden, w: World, **outcomes: int) -> None:
    """Lets one engine compute the prompt, then sends the request to another."""
    first = await g.ask(w)
    g.forget()
    record = await g.ask(w)
    assert (first["answered"], record["answered"], record["fetch_instance"]) == ("e0", "e1", "e0")
    assert model(w).fetch_outcomes == outcomes
    assert [each["engine"] for each in g.sent][:2] == ["e0", "e1"]
    blocks = record["count"] // BLOCK_TOKENS if "fetched" in outcomes else 0
    assert record["fetched_tokens"] == blocks * BLOCK_TOKENS


@scenario("the prompt's front is fetched")
async def _(g: Golden) -> None:
    async with g.router(Engine(**BOTH_WAYS), Engine(**BOTH_WAYS), **PULLS) as w:
        await pulls(g, w, fetched=1)
        assert handovers(w) == {"transferred": 1}


@scenario("the prompt's front is fetched, and the request may move")
async def _(g: Golden) -> None:
    async with g.router(Engine(**BOTH_WAYS), Engine(**BOTH_WAYS), **PULLS, **MOVES) as w:
        await pulls(g, w, fetched=1)
        assert handovers(w) == {"transferred": 1}


@scenario("the prompt's front is not there any more")
async def _(g: Golden) -> None:
    async with g.router(Engine(**BOTH_WAYS), Engine(**BOTH_WAYS), **PULLS) as w:
        first = g.engines["e0"]

        async def behave(it: FakeEngine, request: Request, writer: asyncio.StreamWriter) -> bool:
            return await (refuses(404) if len(it.requests) == 2 else answers)(it, request, writer)

        first.behave = behave
        await pulls(g, w, refused=1)
        assert handovers(w) == {}


# Fields that the router adds to any request.


@scenario("priority in a header")
async def _(g: Golden) -> None:
    async with g.router(Engine(), priority="vtc") as w:
        await priority_is_not_nothing(g, w)
        g.headers |= {"x-vllm-priority": "5"}
        assert (await g.ask(w, priority=5))["priority"] > 0


@scenario("priority in the body")
async def _(g: Golden) -> None:
    async with g.router(Engine(sglang=True, nixl=False), priority="vtc") as w:
        await priority_is_not_nothing(g, w)
        g.headers |= {"x-vllm-priority": "5"}
        assert (await g.ask(w, priority=5))["priority"] > 0


@scenario("no priority for a queue that is not ordered by it")
async def _(g: Golden) -> None:
    async with g.router(Engine(honours_priority=False), priority="vtc") as w:
        await priority_is_not_nothing(g, w)
        await g.ask(w)


@scenario("the client's own priority, where the router gives none")
async def _(g: Golden) -> None:
    g.headers |= {"x-vllm-priority": "5"}
    async with g.router(Engine()) as w:
        await g.ask(w, priority=5)


@scenario("priority, salt, key and backfill")
async def _(g: Golden) -> None:
    async with with_all(g, Engine()) as w:
        await g.ask(w, priority=5, cache_salt="own")


@scenario("an isolated tenant's salt")
async def _(g: Golden) -> None:
    g.headers |= {"authorization": "Bearer sk-alice"}
    async with g.router(Engine(), auth=g.auth, tenants={"alice": {"isolate": True}}) as w:
        await g.ask(w)


@scenario("backfill")
async def _(g: Golden) -> None:
    async with g.router(Engine()) as w:
        (engine,) = model(w).engines.values()
        engine.refill = KvBackfill({"vllm_xargs": {"kv_cache_report_mode": "full"}}, BLOCK_TOKENS, 1e12)
        await g.ask(w)


# -- the file --------------------------------------------------------------------------------------

CASES = [
    pytest.param(name, path, stream, id=f"{name}: {kind}{', streamed' if stream else ''}")
    for name, (_, streams) in SCENARIOS.items()
    for path, kind in ((CHAT, "chat"), (COMPLETIONS, "completion"))
    for stream in streams
]
EXPANDED = {"body"}  # parts of a request with one line for each field


def line_of(name: str, value: Any) -> str:
    return f"{json.dumps(name)}: {json.dumps(value, ensure_ascii=False, sort_keys=True)}"


def shown(request: dict[str, Any]) -> list[str]:
    """Returns the lines of a request's JSON, with one line for each field of its body."""
    parts = []
    for name, value in request.items():
        if name in EXPANDED:
            fields = ",\n".join("   " + line_of(each, value[each]) for each in sorted(value))
            parts.append(f'  "{name}": {{\n{fields}\n  }}')
        else:
            parts.append("  " + line_of(name, value))
    return [" {", *",\n".join(parts).split("\n"), " }"]


@functools.cache
def stored() -> dict[str, list[dict[str, Any]]]:
    """Returns the content of the file, by case."""
    return dict(json.loads(FILE.read_text())) if FILE.exists() else {}


def store(cases: dict[str, list[dict[str, Any]]]) -> None:
    """Writes the file: cases by name, one line for each request."""
    texts = []
    for case in sorted(cases):
        requests = ",\n".join(
            " " + json.dumps(request, ensure_ascii=False, sort_keys=True) for request in cases[case]
        )
        texts.append(f"{json.dumps(case)}: [\n{requests}\n]")
    FILE.write_text("{\n" + ",\n".join(texts) + "\n}\n")
    stored.cache_clear()


def difference(case: str, expected: list[dict[str, Any]], sent: list[dict[str, Any]]) -> str:
    """Describes the differences between the requests to engines, request by request."""
    lines = [f"{case}: engines are sent something else (GOLDEN=write takes it as it is)"]
    if len(expected) != len(sent):
        lines.append(f"{len(expected)} requests expected, {len(sent)} sent")
    for number in range(max(len(expected), len(sent))):
        before, after = (requests[number : number + 1] for requests in (expected, sent))
        if before != after:
            engine = (after or before)[0]["engine"]
            lines.append(f"request {number + 1}, to {engine}:")
            old, new = (shown(requests[0]) if requests else [] for requests in (before, after))
            lines += difflib.unified_diff(old, new, "expected", "sent", lineterm="", n=2)
    return "\n".join(lines)


@pytest.mark.parametrize(("name", "path", "stream"), CASES)
async def test_engines_are_sent_what_they_were(
    name: str, path: str, stream: bool, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    golden = Golden(path, stream, tmp_path)
    run, _ = SCENARIOS[name]
    await run(golden)
    assert golden.sent
    case = request.node.callspec.id
    cases = stored()
    if WRITES:
        store(cases | {case: golden.sent})
    elif cases.get(case) != golden.sent:
        pytest.fail(difference(case, cases.get(case, []), golden.sent), pytrace=False)


def test_the_file_has_these_cases_and_no_others() -> None:
    known = {str(case.id) for case in CASES}
    if WRITES:
        store({case: sent for case, sent in stored().items() if case in known})
    assert set(stored()) == known
