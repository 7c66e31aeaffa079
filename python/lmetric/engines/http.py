"""An HTTP client for one engine, one request at a time, for commands other than the server."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp
import orjson

from lmetric.connection_errors import reason_of
from lmetric.engines.errors import error_text

PATIENCE_SECONDS = 30.0
"""Time limit of an answer, seconds: enough for a short request on a busy engine."""


class Unanswered(Exception):
    """There is no answer; the message has the reason."""


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

    def error(self) -> str:
        """One line about a failed answer: its status and message."""
        said = error_text(self.body)
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
            self._headers["x-data-parallel-rank"] = str(rank)

    async def get(self, path: str, seconds: float = PATIENCE_SECONDS) -> Answer:
        """The answer to GET of a path with its query."""
        return await self._ask("GET", path, None, {}, seconds)

    async def post(self, path: str, body: Any, headers: Mapping[str, str] | None = None) -> Answer:
        """The answer to a POST of JSON."""
        return await self._ask("POST", path, body, headers or {}, PATIENCE_SECONDS)

    async def page(self, path: str) -> tuple[int, bytes]:
        """Status and body of GET, for `lmetric.engines.identify`."""
        answer = await self.get(path)
        return answer.status, answer.body

    async def _ask(
        self, method: str, path: str, body: Any, headers: Mapping[str, str], seconds: float
    ) -> Answer:
        try:
            async with self._session.request(
                method,
                self._base + path,
                json=body,
                headers={**self._headers, **headers},
                server_hostname=self._server_name,
                timeout=aiohttp.ClientTimeout(total=seconds),
            ) as response:
                return Answer(response.status, dict(response.headers), await response.read())
        except TimeoutError:
            raise TimedOut(f"{method} {path}: no answer within {seconds:g} s") from None
        except aiohttp.ClientConnectorError as error:
            raise Unanswered(f"no connection: {reason_of(error)}") from None
        except (aiohttp.ClientError, OSError) as error:
            raise Unanswered(f"{method} {path}: {error or type(error).__name__}") from None
