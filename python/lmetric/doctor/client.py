"""The doctor's client for one engine: requests, and streams that it can cancel."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import orjson

from lmetric.engines.http import PATIENCE_SECONDS, PLAIN, Answer, EngineClient, Unanswered


class StreamingClient(EngineClient):
    """An EngineClient with streams."""

    @contextlib.asynccontextmanager
    async def stream(self, body: dict[str, Any], *, queues: bool = False) -> AsyncIterator[Stream]:
        """Starts a streamed completion and waits for its first event.

        Leaving the context early closes the connection. Raises Unanswered.

        Args:
            queues: the request may wait in the engine's queue, so its events have no time limit.
        """
        patience = None if queues else PATIENCE_SECONDS
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=PATIENCE_SECONDS, sock_read=patience)
        try:
            response = await self._session.post(
                self._base + "/v1/completions",
                json=body | {"stream": True},
                headers={**PLAIN, **self._headers},
                server_hostname=self._server_name,
                timeout=timeout,
                allow_redirects=False,
                auto_decompress=False,
            )
        except (aiohttp.ClientError, OSError) as error:
            raise Unanswered(f"POST /v1/completions: {error or type(error).__name__}") from None
        stream = Stream(response)
        reader = asyncio.create_task(stream.read())
        try:
            if response.status != 200:
                # An error page that never ends is no reason to wait longer.
                await asyncio.wait([reader], timeout=PATIENCE_SECONDS)
                raise Unanswered(Answer(response.status, response.headers, bytes(stream.seen)).error())
            async with asyncio.timeout(patience):
                await stream.begun.wait()
            yield stream
        except TimeoutError:
            raise Unanswered(f"no event of a stream within {PATIENCE_SECONDS:g} s") from None
        finally:
            response.close()
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)


class Stream:
    """An open stream of an engine."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._response = response
        self.seen = bytearray()
        """The last received data."""
        self.begun = asyncio.Event()
        self.ended = False

    @property
    def error(self) -> bytes | None:
        """The data of the first event with an error; None: no error so far."""
        for line in bytes(self.seen).splitlines():
            name, _, data = line.partition(b":")
            if name == b"data" and b'"error"' in data:
                with contextlib.suppress(orjson.JSONDecodeError):
                    said = orjson.loads(data)
                    if isinstance(said, dict) and said.get("error"):
                        return data.strip()
        return None

    async def read(self) -> None:
        """Reads to the end of the stream."""
        with contextlib.suppress(aiohttp.ClientError, OSError):
            async for piece in self._response.content.iter_any():
                self.seen = (self.seen + piece)[-65536:]
                self.begun.set()
        self.ended = True
        self.begun.set()
