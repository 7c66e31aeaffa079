"""The doctor's own requests to one engine."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp
import orjson

PATIENCE_SECONDS = 30.0
"""For one answer: an engine that is busy must have time for a short request."""


class Unanswered(Exception):
    """No answer came; says why."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer of an engine."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        """The body, or None where it is no JSON."""
        try:
            return orjson.loads(self.body)
        except orjson.JSONDecodeError:
            return None

    def error(self) -> str:
        """One line about an answer that is no good: its status, and what it says."""
        said = self.json
        if isinstance(said, dict):
            inner = said.get("error")
            said = inner.get("message") if isinstance(inner, dict) else said.get("message", inner)
        text = said if isinstance(said, str) else self.body.decode(errors="replace")
        return f"status {self.status}" + (f": {' '.join(text.split())[:200]}" if text.strip() else "")

    def usage(self, *path: str) -> int | None:
        """A number in the answer's `usage`; None where it is not told."""
        told: Any = self.json
        for key in ("usage", *path):
            told = told.get(key) if isinstance(told, dict) else None
        return told if isinstance(told, int) else None


class EngineClient:
    """HTTP to one engine."""

    def __init__(self, session: aiohttp.ClientSession, url: str, api_key: str | None) -> None:
        self.url = url.rstrip("/")
        self._session = session
        self._headers = {"authorization": f"Bearer {api_key}"} if api_key else {}

    async def get(self, path: str, seconds: float = PATIENCE_SECONDS) -> Answer:
        """Raises Unanswered."""
        return await self._ask("GET", path, None, seconds)

    async def post(self, path: str, body: Any, headers: Mapping[str, str] | None = None) -> Answer:
        """Raises Unanswered."""
        return await self._ask("POST", path, body, PATIENCE_SECONDS, headers)

    async def _ask(
        self, method: str, path: str, body: Any, seconds: float, headers: Mapping[str, str] | None = None
    ) -> Answer:
        timeout = aiohttp.ClientTimeout(total=seconds)
        try:
            async with self._session.request(
                method,
                self.url + path,
                json=body,
                headers={**self._headers, **(headers or {})},
                timeout=timeout,
            ) as response:
                return Answer(response.status, dict(response.headers), await response.read())
        except TimeoutError:
            raise Unanswered(f"{method} {path}: no answer within {seconds:g} s") from None
        except aiohttp.ClientConnectorError as error:
            raise Unanswered(f"no connection: {error.os_error.strerror or error.os_error}") from None
        except (aiohttp.ClientError, OSError) as error:
            raise Unanswered(f"{method} {path}: {error or type(error).__name__}") from None

    @contextlib.asynccontextmanager
    async def stream(self, body: dict[str, Any]) -> AsyncIterator[Stream]:
        """A streamed completion, begun: its first event has come. Left early, its connection is closed.

        Raises Unanswered.
        """
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=5, sock_read=PATIENCE_SECONDS)
        try:
            response = await self._session.post(
                self.url + "/v1/completions",
                json=body | {"stream": True},
                headers=self._headers,
                timeout=timeout,
            )
        except (aiohttp.ClientError, OSError) as error:
            raise Unanswered(f"POST /v1/completions: {error or type(error).__name__}") from None
        stream = Stream(response)
        reader = asyncio.create_task(stream.read())
        try:
            if response.status != 200:
                await reader
                raise Unanswered(Answer(response.status, {}, bytes(stream.seen)).error())
            async with asyncio.timeout(PATIENCE_SECONDS):
                await stream.begun.wait()
            yield stream
        except TimeoutError:
            raise Unanswered(f"a stream brought nothing within {PATIENCE_SECONDS:g} s") from None
        finally:
            response.close()
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)


class Stream:
    """A stream of an engine while it is read."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._response = response
        self.seen = bytearray()
        """The last of what came."""
        self.begun = asyncio.Event()
        self.ended = False

    async def read(self) -> None:
        """Reads until the end."""
        with contextlib.suppress(aiohttp.ClientError, OSError):
            async for piece in self._response.content.iter_any():
                self.seen = (self.seen + piece)[-65536:]
                self.begun.set()
        self.ended = True
        self.begun.set()
