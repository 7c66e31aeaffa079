"""Bodies of requests that aiohttp reads: their limits, their time, and their encoding."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, TypeGuard

from aiohttp import web

from lmetric.server.api.errors import ApiError, bad
from lmetric.server.api.request import LARGE_BODY, BodyParts
from lmetric.server.http.connection import SMALL_BODY, ClientConnection
from lmetric.server.http.incoming import NoRoomError
from lmetric.server.http.protocol import content_coding, in_short, late_body, no_room_error
from lmetric.server.http.running import RunningRequests
from lmetric.server.http.waiting import WorkThreads

if TYPE_CHECKING:
    from lmetric.server.http.unpacking import Unpacking


class Bodies:
    """Reads and unpacks bodies."""

    def __init__(self, running: RunningRequests, threads: WorkThreads) -> None:
        self._running = running
        self._threads = threads
        self._unpacking: Unpacking | None = None  # from the first compressed body on

    def close(self) -> None:
        """Stops unpacking."""
        if self._unpacking is not None:
            self._unpacking.close()

    async def read(self, request: web.BaseRequest, limit: int) -> bytes:
        """Returns the body of a request whose head aiohttp has read.

        The caller has checked the request's credential: before, no byte is unpacked.

        Raises ApiError: 400 if the body is malformed, 408 if it takes longer than timeouts.body,
        413 above ``limit`` bytes, 503 at a limit on body bytes.
        """
        client = request.protocol
        assert isinstance(client, ClientConnection)  # as `Frontend.handle` made sure
        body = await self._receive(request, limit)
        if body and (coding := content_coding(request.headers)) is not None:
            if self._unpacking is None:
                from lmetric.server.http.unpacking import Unpacking

                self._unpacking = Unpacking()
            unpacked = await self._unpacking.unpack(coding, body, limit, client=client)
            if unpacked is None:
                raise no_room_error()
            body = unpacked
            if len(body) > limit:
                raise _too_long(limit)
            client.keep_body(min(len(body), client.body_size))
        if client.body_size <= SMALL_BODY:
            client.release_body()
        return body

    async def _receive(self, request: web.BaseRequest, limit: int) -> bytes:
        """Returns the body as the client sent it. Raises ApiError."""
        content = request.content
        if content.is_eof() and content.exception() is None:
            body = content.read_nowait()
            if len(body) > limit:
                raise _too_long(limit)
            return body
        headers = request.headers
        try:
            length = int(headers.get("content-length", 0))
        except ValueError:
            length = 0
        if length > limit:
            raise _too_long(limit)
        transport = request.transport
        expects = headers.get("expect", "").lower() == "100-continue" and request.version >= (1, 1)
        if expects and _writable(transport):
            transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        received = BodyParts()
        try:
            async with asyncio.timeout(self._running.rules.timeouts.body):
                while not content.at_eof():
                    received.add(await content.readany())
                    if received.size > limit:
                        raise _too_long(limit)
        except TimeoutError:
            raise late_body(content.total_raw_bytes, length, self._running.rules.timeouts.body) from None
        except NoRoomError:
            raise no_room_error() from None
        except ApiError:
            raise
        except Exception as error:
            # aiohttp has many exceptions for a broken body (bad chunk, client gone).
            raise bad(f"the body could not be read: {in_short(error)}") from None
        if received.size > LARGE_BODY:
            return await self._threads.begin(received.joined)
        return received.joined()


def _writable(transport: asyncio.Transport | None) -> TypeGuard[asyncio.Transport]:
    return transport is not None and not transport.is_closing()


def _too_long(limit: int) -> ApiError:
    return ApiError(413, f"the body is longer than {limit} bytes", code="body_too_large")
