"""Clients that check each answer: it must end once, with the text of an undisturbed engine."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import aiohttp
import orjson

Kind = Literal["stream", "plain", "chat"]
# "right": a whole answer with the right text. "wrong": a whole answer with another text. "error":
# an error status or an error event. "broken": an end in the middle. "late": no end in time.
Outcome = Literal["right", "wrong", "error", "broken", "late"]

MODEL = "chaos"
LIMIT_SECONDS = 30.0  # after it, a client leaves
JUDGED_AT_ONCE = 128  # requests of an engine, to judge the answers of an hour in minutes
WORDS = ["river", "stone", "cloud", "garden", "letter", "silver", "winter", "engine"]


@dataclass
class Asked:
    """A request and what its client saw."""

    number: int
    kind: Kind
    began: float  # seconds on the monotonic clock
    ended: float = 0.0
    outcome: Outcome = "late"
    text: str = ""
    note: str = ""
    first_token_seconds: float | None = None
    url: str = ""  # of the last try
    tries: int = 0


class NoAnswerError(Exception):
    """No byte of an answer came."""


@dataclass
class Traffic:
    """Requests at random times from a seed.

    ``urls``: the routers' addresses, which requests use in turn. A client that gets no byte of an
    answer tries the next address, once each, as clients of several addresses do.
    """

    urls: Sequence[str]
    seed: int
    rate: float  # requests per second
    streams: float = 0.7  # share of requests that stream
    asked: list[Asked] = field(default_factory=list)

    def body(self, number: int, kind: Kind) -> dict[str, Any]:
        """The request of a number."""
        rng = random.Random(f"{self.seed} {number}")
        shared = " ".join(random.Random(number % 5).choices(WORDS, k=60))
        text = f"{shared} {number} " + " ".join(rng.choices(WORDS, k=rng.randrange(5, 60)))
        given: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_tokens": rng.randrange(20, 200)}
        if kind == "chat":
            return given | {"messages": [{"role": "user", "content": text}], "stream": True}
        return given | {"prompt": text, "stream": kind == "stream"}

    def kind(self, number: int) -> Kind:
        """The kind of a request."""
        rng = random.Random(f"kind {self.seed} {number}")
        if rng.random() >= self.streams:
            return "plain"
        return "chat" if rng.random() < 0.3 else "stream"

    async def run(self, seconds: float, session: aiohttp.ClientSession) -> None:
        """Sends requests for a time, and waits for their ends."""
        rng = random.Random(self.seed)
        until = time.monotonic() + seconds
        async with asyncio.TaskGroup() as tasks:
            while (now := time.monotonic()) < until:
                number = len(self.asked)
                asked = Asked(number, self.kind(number), now)
                self.asked.append(asked)
                tasks.create_task(self._ask(asked, session))
                await asyncio.sleep(rng.expovariate(self.rate))

    async def _ask(self, asked: Asked, session: aiohttp.ClientSession) -> None:
        try:
            async with asyncio.timeout(LIMIT_SECONDS):
                asked.outcome, asked.text, asked.note = await self._tried(asked, session)
        except TimeoutError:
            asked.outcome, asked.note = "late", f"no end within {LIMIT_SECONDS:g} s"
        except (
            NoAnswerError,
            aiohttp.ClientError,
            ConnectionError,
            orjson.JSONDecodeError,
            KeyError,
        ) as error:
            asked.outcome, asked.note = "broken", f"{type(error).__name__}: {error}"
        asked.ended = time.monotonic()

    async def _tried(self, asked: Asked, session: aiohttp.ClientSession) -> tuple[Outcome, str, str]:
        while True:
            asked.url = self.urls[(asked.number + asked.tries) % len(self.urls)]
            asked.tries += 1
            try:
                return await self.answer(asked, asked.url, session, asked.number)
            except NoAnswerError:
                if asked.tries == len(self.urls):
                    raise

    async def answer(
        self, asked: Asked, url: str, session: aiohttp.ClientSession, number: int
    ) -> tuple[Outcome, str, str]:
        """Returns the outcome, the text and a note of one request."""
        path = "/v1/chat/completions" if asked.kind == "chat" else "/v1/completions"
        try:
            response = await session.post(url + path, json=self.body(number, asked.kind))
        except (aiohttp.ClientError, ConnectionError) as error:
            raise NoAnswerError(f"{type(error).__name__}: {error}") from error
        async with response:
            if response.status != 200:
                return "error", "", f"status {response.status}: {(await response.text())[:200]}"
            if asked.kind == "plain":
                told = orjson.loads(await response.read())
                return "right", told["choices"][0]["text"], ""
            return await _stream(asked, response)

    async def judge(self, urls: Sequence[str], session: aiohttp.ClientSession) -> None:
        """Compares whole answers with those of undisturbed engines."""
        gate = asyncio.Semaphore(JUDGED_AT_ONCE * len(urls))

        async def compare(asked: Asked) -> None:
            if asked.outcome != "right":
                return
            async with gate:
                _, text, note = await self.answer(
                    Asked(asked.number, asked.kind, 0.0),
                    urls[asked.number % len(urls)],
                    session,
                    asked.number,
                )
            if text != asked.text or note:
                asked.outcome, asked.note = "wrong", f"{asked.text!r} is not {text!r} {note}"

        await asyncio.gather(*map(compare, self.asked))

    def outcomes(self) -> Counter[str]:
        """The number of requests by outcome."""
        return Counter(asked.outcome for asked in self.asked)


async def _stream(asked: Asked, response: aiohttp.ClientResponse) -> tuple[Outcome, str, str]:
    parts: list[str] = []
    finished = False
    async for line in response.content:
        data = line.strip()
        if not data.startswith(b"data: "):
            continue
        data = data.removeprefix(b"data: ")
        if data == b"[DONE]":
            if not finished:
                return "broken", "".join(parts), "[DONE] without a finish_reason"
            if more := (await response.content.read()).strip():
                return "wrong", "".join(parts), f"after [DONE]: {more[:100]!r}"
            return "right", "".join(parts), ""
        told = orjson.loads(data)
        if "error" in told:
            return "error", "".join(parts), str(told["error"])[:200]
        for choice in told["choices"]:
            text = choice["delta"].get("content") if asked.kind == "chat" else choice["text"]
            if text and asked.first_token_seconds is None:
                asked.first_token_seconds = time.monotonic() - asked.began
            parts.append(text or "")
            finished |= choice["finish_reason"] is not None
    return "broken", "".join(parts), "the stream ended without [DONE]"
