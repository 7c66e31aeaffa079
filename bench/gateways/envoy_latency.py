"""Measures the picker's time to a decision, and what a gateway adds to a request.

python bench/gateways/envoy_latency.py: writes envoy_decision.csv and envoy_overhead.csv.

Decision: the time from the end of a request's body to the pick, seen from the gateway's gRPC
stream. Prompts have 100,000 tokens; ten emulated engines; a request begins every 0.1 s, unless the
last one takes longer. Match: tokens (the picker tokenizes) or text. Prompts: new texts, or turns of
one chat, each with a new message of about 500 tokens. No request goes to an engine, so the index
learns from the picks.

Overhead: the time of whole requests to one engine that answers at once, direct, through `serve`,
and through Envoy with and without the picker. The arms take turns.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import http.client
import random
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import orjson
from envoy_policies import ROOT, commit, example, start_arm, write
from tokenizers import Tokenizer

from epp_world import Exchange, exchange, request_body, request_head
from lmetric_lab.ports import free_ports
from server_world import FakeEngine

HERE = Path(__file__).parent
PART_BYTES = 16_384  # as Envoy sends a body over HTTP/1.1
TOKENS_PER_PROMPT = 100_000
TOKENS_PER_TURN = 500
PERIOD_SECONDS = 0.1
TOKENIZER = ROOT / "python" / "lmetric_lab" / "emulated" / "tokenizer.json"
ARMS = ("direct", "serve lmetric", "envoy ROUND_ROBIN", "envoy, picker lmetric")


class Texts:
    """Texts of words that are one token each."""

    def __init__(self, seed: int) -> None:
        self._draw = random.Random(seed)
        known = Tokenizer.from_file(str(TOKENIZER)).get_vocab()
        self._words = [" " + word[1:] for word in sorted(known) if word[0] == "Ġ" and word[1:].isalpha()]

    def text(self, tokens: int) -> str:
        """Returns a new text."""
        return "".join(self._draw.choices(self._words, k=tokens))


def bodies(kind: str, number: int, seed: int) -> Iterator[tuple[str, bytes]]:
    """Yields path and body of requests. ``kind``: texts or chat."""
    texts = Texts(seed)
    common = {"model": "emulated", "max_tokens": 1, "stream": True}
    messages = []
    while kind == "chat" and len(messages) * TOKENS_PER_TURN < TOKENS_PER_PROMPT:
        role = "assistant" if len(messages) % 2 else "user"
        messages.append({"role": role, "content": texts.text(TOKENS_PER_TURN)})
    for _ in range(number):
        if kind == "texts":
            yield "/v1/completions", orjson.dumps({**common, "prompt": texts.text(TOKENS_PER_PROMPT)})
            continue
        messages.append({"role": "user", "content": texts.text(TOKENS_PER_TURN)})
        yield "/v1/chat/completions", orjson.dumps({**common, "messages": messages})
        messages.append({"role": "assistant", "content": texts.text(20)})


async def decide(stream: Exchange, path: str, body: bytes) -> float:
    """Returns the seconds from the end of a body to its pick."""
    parts = [body[start : start + PART_BYTES] for start in range(0, len(body), PART_BYTES)]
    await stream.send(request_head(path), *(request_body(part, False) for part in parts[:-1]))
    await asyncio.sleep(PERIOD_SECONDS)  # a gateway sends the body while the client does
    begin = time.perf_counter()
    await stream.send(request_body(parts[-1], True))
    answer = await stream.call.read()
    seconds = time.perf_counter() - begin
    assert answer.HasField("request_headers"), answer
    while not (await stream.call.read()).request_body.response.body_mutation.streamed_response.end_of_stream:
        pass
    return seconds


async def decisions(target: str, asked: list[tuple[str, bytes]]) -> list[float]:
    seconds = []
    for path, body in asked:
        async with exchange(target) as stream:
            seconds.append(await decide(stream, path, body))
    return seconds


def measure_decisions(number: int) -> list[dict[str, Any]]:
    """Returns the rows of envoy_decision.csv."""
    rows = []
    for match in ("tokens", "text"):
        for kind in ("texts", "chat"):
            with ExitStack() as stack:
                urls = example.emulated_engines(stack, 10)
                ports = free_ports(2)
                words = ["--policy", "lmetric", "--log-json"]
                words += [] if match == "tokens" else ["--set", "tokenizer=off"]
                example.start_router(stack, "epp", urls, ports, *words)
                # The first requests find no cache, neither ours nor the processor's.
                asked = list(bodies(kind, number + 2, seed=1))
                taken = asyncio.run(decisions(f"127.0.0.1:{ports[1]}", asked))[2:]
            prompts = "turns of a chat" if kind == "chat" else "new texts"
            rows.append({"match": match, "prompts": prompts} | shown(taken))
            print(rows[-1], file=sys.stderr, flush=True)
    return rows


def shown(seconds: list[float]) -> dict[str, Any]:
    """Returns the columns of a sample."""
    cuts = statistics.quantiles(seconds, n=20, method="inclusive")
    found = {"requests": len(seconds), "p50_ms": 1e3 * statistics.median(seconds), "p95_ms": 1e3 * cuts[-1]}
    return {name: round(value, 3) for name, value in found.items()} | {"commit": commit()}


def ask(connection: http.client.HTTPConnection, body: bytes) -> float:
    """Returns the seconds of one request."""
    begin = time.perf_counter()
    connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
    answer = connection.getresponse()
    answer.read()
    seconds = time.perf_counter() - begin
    assert answer.status == 200, answer.status
    return seconds


def measure_overhead(number: int) -> list[dict[str, Any]]:
    """Returns the rows of envoy_overhead.csv."""
    rows = []
    with ExitStack() as stack:
        engine = example.started(stack, [sys.executable, __file__, "--engine"], stdout=-1)
        assert engine.stdout is not None
        url = engine.stdout.readline().strip()
        connections = {}
        for arm in ARMS:
            place = urlsplit(url if arm == "direct" else start_arm(stack, arm, [url]))
            connections[arm] = http.client.HTTPConnection(place.hostname or "", place.port)
            stack.callback(connections[arm].close)
        for tokens in (100, TOKENS_PER_PROMPT):
            texts = Texts(tokens)
            taken: dict[str, list[float]] = {arm: [] for arm in ARMS}
            for turn in range(number + 5):
                for arm, connection in connections.items():
                    body = orjson.dumps({"model": "tiny", "max_tokens": 1, "prompt": texts.text(tokens)})
                    seconds = ask(connection, body)
                    if turn >= 5:
                        taken[arm].append(seconds)
            rows += [{"arm": arm, "prompt_tokens": tokens} | shown(taken[arm]) for arm in ARMS]
    return rows


async def serve_engine() -> None:
    """Runs an engine that answers at once. Prints its URL."""
    engine = FakeEngine()
    await engine.start()
    print(engine.url, flush=True)
    while True:
        await asyncio.sleep(1)
        engine.requests.clear()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--decisions", type=int, default=100)
    parser.add_argument("--overhead", type=int, default=200, help="requests of each arm and length")
    parser.add_argument("--engine", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.engine:
        with contextlib.suppress(KeyboardInterrupt):
            asyncio.run(serve_engine())
        return
    if given.overhead:
        write(HERE / "envoy_overhead.csv", measure_overhead(given.overhead))
    if given.decisions:
        write(HERE / "envoy_decision.csv", measure_decisions(given.decisions))


if __name__ == "__main__":
    main()
