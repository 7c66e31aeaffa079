"""Measures the router's CPU time per turn: chats with an image of 1 MB, and sessions with tools.

    python bench/images.py [--rounds 9] [--out FILE]

Five kinds of turns, one after the other in each round:

- `chat`: a system message of 1,000 tokens, which all share, and a new question of 200 tokens.
- `image`: the same with an image that the router has learned.
- `new_image`: the same with an image that it meets for the first time, its `/render` included.
- `tools`: the 30 turns of a session with 12 tools. Each adds a call and its result of 500 tokens.
- `talk`: the 30 turns of a conversation with the same texts and no tools.

The ratios are `image` and `new_image` to `chat`, and `tools` to `talk`, each of the same round. The
router runs in this process, the engine and the client in processes of their own. The time is the
CPU time of this process with all its threads, so other work on the machine does not count.
`stop_ms` is the longest time between two turns of a task that is always ready, on the event loop.
Answers are not streamed and have one token; the engine matches prefixes without KV events.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import gc
import http.client
import json
import logging
import os
import random
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import structlog
import uvloop

import tokens as texts
from common import ROOT, about, median_range, write_result
from lmetric.engines.handover import CHAT
from lmetric.tokens.prompt import PromptTokenizer

PORT, ENGINE_PORT = 24899, 24898
IMAGE_BYTES, IMAGE_TOKENS = 1_000_000, 1_000
KNOWN_IMAGES = 4
CHATS = 20  # of a kind in a round
TURNS, TOOLS, RESULT_TOKENS = 30, 12, 500
SYSTEM_TOKENS, QUESTION_TOKENS = 1_000, 200
TICK_SECONDS = 0.001
MARK = "<|image|>"
RATIOS = {"image": "chat", "new_image": "chat", "tools": "talk"}
KINDS = ("chat", "image", "new_image", "tools", "talk")
TEMPLATE = """\
{%- if tools %}
    {{- '<|im_start|>system\\n# Tools\\n<tools>' }}
    {%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
    {{- '\\n</tools><|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.content is string %}
        {{- message.content }}
    {%- else %}
        {%- for part in message.content %}
            {%- if part.type == 'image' %}{{- '<|image|>' }}{%- else %}{{- part.text }}{%- endif %}
        {%- endfor %}
    {%- endif %}
    {%- for call in message.tool_calls or [] %}
        {{- '\\n<tool_call>\\n' }}{{- call.function | tojson }}{{- '\\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""


def model_folder() -> Path:
    """Returns the folder of the tokenizer with a token for images, made on first use."""
    folder = ROOT / ".cache" / "bench-vision"
    source = texts.model_folder()
    folder.mkdir(parents=True, exist_ok=True)
    found = json.loads((source / "tokenizer.json").read_text())
    number = max(found["model"]["vocab"].values()) + 1
    more = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False, "special": True}
    found["added_tokens"].append({"id": number, "content": MARK, **more})
    (folder / "tokenizer.json").write_text(json.dumps(found))
    shutil.copy(source / "tokenizer_config.json", folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


# -- the engine ------------------------------------------------------------------------------------


def engine() -> None:
    """Answers as vLLM does: chats with one token, and `/render`."""
    from aiohttp import web

    tokenizer = PromptTokenizer.load(model_folder())
    place = int(tokenizer.completion(MARK, add_special_tokens=False)[0])

    async def render(request: web.Request) -> web.Response:
        body = await request.json()
        chat = tokenizer.encode(tokenizer.chat_text(body))
        assert chat is not None
        at = chat.tolist().index(place)
        token_ids = [*chat[:at].tolist(), *[place] * IMAGE_TOKENS, *chat[at + 1 :].tolist()]
        features = {
            "mm_hashes": {"image": [str(hash(body["messages"][0]["content"][0]["image_url"]["url"]))]},
            "mm_placeholders": {"image": [{"offset": at, "length": IMAGE_TOKENS}]},
        }
        return web.json_response({"token_ids": token_ids, "features": features})

    async def chat(request: web.Request) -> web.Response:
        await request.read()
        message = {"role": "assistant", "content": "ok"}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        return web.json_response({"object": "chat.completion", "choices": [choice], "usage": usage})

    async def models(request: web.Request) -> web.Response:
        card = {"id": "mock", "object": "model", "max_model_len": 131_072}
        return web.json_response({"object": "list", "data": [card]})

    async def metrics(request: web.Request) -> web.Response:
        return web.Response(text='vllm:cache_config_info{engine="0",block_size="16"} 1\n')

    async def health(request: web.Request) -> web.Response:
        return web.Response()

    app = web.Application(client_max_size=64 << 20)
    app.router.add_post(CHAT, chat)
    app.router.add_post(CHAT + "/render", render)
    app.router.add_get("/v1/models", models)
    app.router.add_get("/metrics", metrics)
    app.router.add_get("/health", health)
    web.run_app(app, host="127.0.0.1", port=ENGINE_PORT, print=None)


# -- the client ------------------------------------------------------------------------------------


class Bodies:
    """The bodies of each kind of turns."""

    def __init__(self, folder: Path) -> None:
        self._talk = texts.Talk(PromptTokenizer.load(folder))
        self._random = random.Random(2)
        self._known = [self._image() for _ in range(KNOWN_IMAGES)]
        self._system = {"role": "system", "content": self._talk.text(SYSTEM_TOKENS)}
        names = {"path": {"type": "string"}, "lines": {"type": "integer"}}
        schema = {"type": "object", "properties": names, "required": ["path"]}
        self._tools = [
            {
                "type": "function",
                "function": {"name": f"t{n}", "description": self._talk.text(60), "parameters": schema},
            }
            for n in range(TOOLS)
        ]

    def of(self, kind: str) -> list[bytes]:
        """Returns the bodies of a round."""
        made = self._chats(kind) if kind in ("chat", "image", "new_image") else self._turns(kind == "tools")
        return [json.dumps({"model": "mock", "max_tokens": 1, **body}).encode() for body in made]

    def _image(self) -> dict[str, Any]:
        data = base64.b64encode(self._random.randbytes(IMAGE_BYTES)).decode()
        return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}

    def _chats(self, kind: str) -> Iterator[dict[str, Any]]:
        for number in range(CHATS):
            parts: list[dict[str, Any]] = [{"type": "text", "text": self._talk.text(QUESTION_TOKENS)}]
            if kind == "image":
                parts.insert(0, self._known[number % KNOWN_IMAGES])
            elif kind == "new_image":
                parts.insert(0, self._image())
            yield {"messages": [self._system, {"role": "user", "content": parts}]}

    def _turns(self, tools: bool) -> Iterator[dict[str, Any]]:
        first = {"role": "user", "content": self._talk.text(QUESTION_TOKENS)}
        messages: list[dict[str, Any]] = [self._system, first]
        for number in range(TURNS):
            yield {"messages": list(messages), **({"tools": self._tools} if tools else {})}
            given = json.dumps({"path": f"src/part_{number}.py", "lines": number})
            seen = self._talk.text(RESULT_TOKENS)
            if tools:
                call = {"name": f"t{number % TOOLS}", "arguments": given}
                calls = [{"id": f"c{number}", "type": "function", "function": call}]
                messages.append({"role": "assistant", "content": "", "tool_calls": calls})
                messages.append({"role": "tool", "tool_call_id": f"c{number}", "content": seen})
            else:
                messages.append({"role": "assistant", "content": given})
                messages.append({"role": "user", "content": seen})


def client() -> None:
    """Makes the bodies of the kind in each line of the input, and sends them after a second
    line."""
    bodies = Bodies(model_folder())
    connection = http.client.HTTPConnection("127.0.0.1", PORT, timeout=60)
    for line in sys.stdin:
        made = bodies.of(line.strip())
        print(len(made), flush=True)
        sys.stdin.readline()
        for body in made:
            connection.request("POST", CHAT, body, {"content-type": "application/json"})
            answer = connection.getresponse()
            said = answer.read()
            if answer.status != 200:
                sys.exit(f"images.py: status {answer.status}: {said[:300]!r}")
        print(sum(map(len, made)), flush=True)


# -- the router ------------------------------------------------------------------------------------


async def measured(rounds: int) -> list[dict[str, dict[str, float]]]:
    """Returns the figures of each kind in each round."""
    from lmetric.config import ServerConfig
    from lmetric.server.app import Server

    run, pipe = asyncio.create_subprocess_exec, asyncio.subprocess.PIPE
    serving = await run(sys.executable, __file__, "--engine")
    sender = await run(sys.executable, __file__, "--client", stdin=pipe, stdout=pipe)
    quiet = {"load": {"interval": 60}, "health": {"interval": 60}}
    entry = {"url": f"http://127.0.0.1:{ENGINE_PORT}", "name": "e0"}
    config = {"port": PORT, "model": "mock", "engines": [entry], "tokenizer": str(model_folder())}
    server = Server(ServerConfig.model_validate(config | quiet))
    gc.collect()
    await until(lambda: listens(ENGINE_PORT))
    await server.start(gc.freeze)  # as `lmetric-router serve`
    model = server.fleet.models[0]
    await until(lambda: all(each.identified for each in model.engines.values()))
    assert sender.stdin is not None
    assert sender.stdout is not None
    result = []
    try:
        for number in range(rounds + 1):
            row = {}
            for kind in KINDS:
                sender.stdin.write(f"{kind}\n".encode())
                count = int(await sender.stdout.readline())
                stop = longest_stop()
                began = time.process_time()
                sender.stdin.write(b"go\n")
                size = int(await sender.stdout.readline())
                await until(lambda: not model.images.waiting)
                used = time.process_time() - began
                row[kind] = {"cpu_ms": used / count * 1e3, "stop_ms": stop() * 1e3, "bytes": size / count}
            if number:  # the first round warms up, and its images are learned
                result.append(row)
        shown = dict(model.tokenizers.text_prompts)
        expected = {"media": 1, "image": KNOWN_IMAGES - 1 + (rounds + 1) * CHATS}
        if shown.keys() - expected.keys() or shown.get("image", 0) > expected["image"]:
            sys.exit(f"images.py: prompts were matched as text: {shown}")
    finally:
        await server.stop()
        for process in (sender, serving):
            with suppress(ProcessLookupError):
                process.terminate()
            await process.wait()
    return result


async def until(true: Callable[[], bool]) -> None:
    """Waits until a condition holds."""
    while not true():  # noqa: ASYNC110 - another process is asked
        await asyncio.sleep(TICK_SECONDS)


def listens(port: int) -> bool:
    """Returns whether a process accepts connections on a port."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def longest_stop() -> Callable[[], float]:
    """Watches the event loop; the returned function ends that, and returns the longest stop in
    seconds of CPU time of this thread."""
    longest, last = 0.0, time.thread_time()

    async def turn() -> None:
        nonlocal longest, last
        while True:
            await asyncio.sleep(0)
            now = time.thread_time()
            longest, last = max(longest, now - last), now
            await asyncio.sleep(TICK_SECONDS)

    turning = asyncio.create_task(turn())

    def end() -> float:
        turning.cancel()
        return longest

    return end


def main() -> None:
    """Measures, prints, writes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=Path, help="default: bench/results/DATE-images.json")
    parser.add_argument("--engine", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--client", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.engine or given.client:
        engine() if given.engine else client()
        return
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    model_folder()
    before = os.getloadavg()
    rounds = uvloop.run(measured(given.rounds))
    cells = {
        kind: {key: median_range([row[kind][key] for row in rounds]) for key in rounds[0][kind]}
        for kind in KINDS
    }
    ratios = {
        f"{kind}/{base}": median_range([row[kind]["cpu_ms"] / row[base]["cpu_ms"] for row in rounds])
        for kind, base in RATIOS.items()
    }
    for name, cell in [*cells.items(), ("ratios", ratios)]:
        shown = (f"{key} {m:.4g} ({low:.4g} to {high:.4g})" for key, (m, low, high, _) in cell.items())
        print(f"{name}: {', '.join(shown)}")
    result = {
        **about(None, []),
        "load_average": [before, os.getloadavg()],
        "unit": "median, least, greatest, rounds; per turn",
        "cells": cells,
        "ratios": ratios,
    }
    print(write_result(result, "images", given.out))


if __name__ == "__main__":
    main()
