"""An HTTP client for one engine, one request at a time, for commands other than the server."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp
import orjson

from lmetric.connection_errors import reason_of
from lmetric.engines.adapter import MAX_BODY_BYTES, MODELS
from lmetric.engines.errors import error_text

PATIENCE_SECONDS = 30.0
"""Time limit of an answer, seconds: enough for a short request on a busy engine."""
PLAIN = {"accept-encoding": "identity"}
"""The header that asks for a body without compression: the server unpacks none, either."""


class Unanswered(Exception):
    """There is no answer; the message has the reason."""


class NoConnection(Unanswered):
    """Nothing accepts connections at the address."""


class TimedOut(Unanswered):
    """There is no answer within the time limit."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer of an engine."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        """The body, or None if it is not JSON."""
        try:
            return orjson.loads(self.body)
        except orjson.JSONDecodeError:
            return None

    @property
    def redirect(self) -> str | None:
        """The URL to which the answer redirects; None: it does not. The server follows none."""
        return self.headers.get("Location") if 300 <= self.status < 400 else None

    def error(self) -> str:
        """One line about a failed answer: its status and message."""
        to = self.redirect
        said = error_text(self.body) if to is None else f"redirects to {to[:200]}: use that URL"
        return f"status {self.status}" + (f": {said}" if said else "")

    def usage(self, *path: str) -> int | None:
        """A number in the answer's `usage`; None if it is missing."""
        told: Any = self.json
        for key in ("usage", *path):
            told = told.get(key) if isinstance(told, dict) else None
        return told if isinstance(told, int) else None


class EngineClient:
    """A client for one engine, or for a data-parallel ``rank`` of it. All methods raise
    Unanswered.

    ``server_name``: the name in its certificate; None: the host of the URL. For the URL of a unix
    socket, the session needs a connector of this socket.
    """

    def __init__(
        self,
        session: aiohttp.ClientSession,
        url: str,
        api_key: str | None = None,
        rank: int | None = None,
        server_name: str | None = None,
    ) -> None:
        self.url = url.rstrip("/")
        self._base = "http://localhost" if self.url.startswith("unix:") else self.url
        self._server_name = server_name
        self._session = session
        self._headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        if rank is not None:
            self.set_rank(str(rank))

    def set_rank(self, header: str) -> None:
        """Sets `X-data-parallel-rank` for all requests."""
        self._headers["x-data-parallel-rank"] = header

    async def get(self, path: str, seconds: float = PATIENCE_SECONDS) -> Answer:
        """The answer to GET of a path with its query."""
        return await self._ask("GET", path, None, {}, seconds)

    async def post(self, path: str, body: Any, headers: Mapping[str, str] | None = None) -> Answer:
        """The answer to a POST of JSON."""
        return await self._ask("POST", path, body, headers or {}, PATIENCE_SECONDS)

    async def page(self, path: str) -> tuple[int, bytes]:
        """Status and body of GET, for `lmetric.engines.identify`.

        A redirect of the list of models counts as no answer. Other pages are optional.
        """
        answer = await self.get(path)
        if path == MODELS and answer.redirect is not None:
            raise Unanswered(f"GET {path}: {answer.error()}")
        return answer.status, answer.body

    async def _ask(
        self, method: str, path: str, body: Any, headers: Mapping[str, str], seconds: float
    ) -> Answer:
        try:
            async with self._session.request(
                method,
                self._base + path,
                json=body,
                headers={**PLAIN, **self._headers, **headers},
                server_hostname=self._server_name,
                timeout=aiohttp.ClientTimeout(total=seconds),
                allow_redirects=False,
                auto_decompress=False,
            ) as response:
                return Answer(response.status, response.headers, await _body(response, f"{method} {path}"))
        except TimeoutError:
            raise TimedOut(f"{method} {path}: no answer within {seconds:g} s") from None
        except aiohttp.ClientConnectorError as error:
            refused = isinstance(error.os_error, ConnectionRefusedError)
            raise (NoConnection if refused else Unanswered)(f"no connection: {reason_of(error)}") from None
        except UnicodeError as error:  # a label of the host name is empty or too long
            raise Unanswered(f"cannot look up the host of {self.url}: {error}") from None
        except (aiohttp.ClientError, OSError) as error:
            raise Unanswered(f"{method} {path}: {error or type(error).__name__}") from None


async def _body(response: aiohttp.ClientResponse, what: str) -> bytes:
    """The body of an answer. Raises Unanswered if it is compressed or too large."""
    coding = response.headers.get("Content-Encoding", "identity")
    if coding.lower() not in ("", "identity"):
        raise Unanswered(
            f"{what}: a compressed body ({coding[:40]}), although the request accepts none; turn compression "
            "off in the proxy before the engine"
        )
    body = bytearray()
    async for piece in response.content.iter_any():
        body += piece
        if len(body) > MAX_BODY_BYTES:
            raise Unanswered(f"{what}: a body of more than {MAX_BODY_BYTES >> 20} MiB")
    return bytes(body)
