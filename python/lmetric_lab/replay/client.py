"""A streaming client for OpenAI-compatible completions servers, which records the times of a
request.

Its cost is the cost of aiohttp's client: 25 us of CPU time per streamed token at
1,600 tokens/s. The report contains the delay of the load generator.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import aiohttp
import orjson

from lmetric._core import LmetricError
from lmetric.engines.adapter import MOST_COUNT
from lmetric.engines.errors import error_text
from lmetric.engines.http import EngineClient, Unanswered

_ENDS = {"stop", "length", "tool_calls"}  # other finish reasons mean an incomplete answer
_TEXTS = ("content", "reasoning", "reasoning_content", "tool_calls")  # of a delta with tokens
_CONNECT_SECONDS = 10.0


class ReplayError(LmetricError):
    """The server cannot be used for a replay."""


@dataclass(slots=True)
class Record:
    """Times and result of one request. Times are wall seconds since the start of the run; None: no
    event."""

    index: int  # in the trace
    due: float  # time in the trace
    sent: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    prompt_tokens: int | None = None  # count of the server; None: not reported
    cached_tokens: int | None = None  # cached prompt tokens; None: not reported
    output_tokens: int = 0  # count of the server, or else the number of chunks with text
    ended: bool = False  # the answer had the finish reason of a complete answer
    error: str | None = (
        None  # connect, reset, timeout, truncated, http_N, stream_error, malformed, aborted, empty
    )
    detail: str = ""
    token_times: list[float] | None = None  # arrival of each token, if the caller sets a list

    @property
    def completed(self) -> bool:
        return self.ended and self.error is None

    def fail(self, kind: str, detail: object) -> None:
        self.error, self.detail = kind, str(detail)[:300]


class Client:
    """Connections to one server. Use it as an async context manager."""

    def __init__(
        self,
        base_url: str,
        *,
        model: str | None = None,
        chat: bool = False,
        api_key: str | None = None,
        ignore_eos: bool = True,
        timeout_seconds: float = 300.0,
    ) -> None:
        root = base_url.rstrip("/").removesuffix("/v1")
        if not root.startswith(("http://", "https://")):
            raise ReplayError(f"the target must be an http:// or https:// address, got {base_url!r}")
        self.base_url = root
        self.model = model or ""
        self._url = f"{root}/v1/{'chat/completions' if chat else 'completions'}"
        self._chat = chat
        self._ignore_eos = ignore_eos
        self._headers = {"content-type": "application/json"}
        if api_key:
            self._headers["authorization"] = f"Bearer {api_key}"
        # The time limit applies between two reads, not to the whole answer.
        self._timeout = aiohttp.ClientTimeout(
            total=None, sock_connect=_CONNECT_SECONDS, sock_read=timeout_seconds
        )

    async def __aenter__(self) -> Client:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), timeout=self._timeout, headers=self._headers
        )
        try:
            if not self.model:
                self.model = await self._only_model()
        except BaseException:
            await self._session.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        await self._session.close()

    async def _only_model(self) -> str:
        """The server's only model. Raises ReplayError if the request fails, or for no or several
        models."""
        try:
            answer = await EngineClient(self._session, self.base_url).get("/v1/models")
        except Unanswered as error:
            raise ReplayError(f"cannot reach {self.base_url}: {error}") from None
        if answer.status != 200:
            raise ReplayError(f"{self.base_url}/v1/models: {answer.error()}")
        try:
            names = [str(model["id"]) for model in answer.json["data"]]
        except (KeyError, TypeError):
            raise ReplayError(
                f"{self.base_url}/v1/models is not a list of models: {answer.body[:80]!r}"
            ) from None
        if len(names) != 1:
            raise ReplayError(
                f"{self.base_url} serves {', '.join(names) or 'no model'}; choose one with --model"
            )
        return names[0]

    @property
    def session(self) -> aiohttp.ClientSession:
        """The session, for other requests to the same server."""
        return self._session

    def body(self, prompt: str | orjson.Fragment, output_tokens: int, **fields: Any) -> bytes:
        """The body of a request for `output_tokens` (at least 1) tokens, with additional `fields`.

        `prompt` is text, or the JSON of token IDs (not for `chat`).
        """
        request: dict[str, Any] = {
            "model": self.model,
            "max_tokens": max(1, output_tokens),
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self._ignore_eos:
            request["ignore_eos"] = True
        if self._chat:
            request["messages"] = [{"role": "user", "content": prompt}]
        else:
            request["prompt"] = prompt
        return orjson.dumps(request | fields)

    async def send(self, body: bytes, record: Record, start: float) -> None:
        """Send `body` now and fill in `record`; `start` is the run's start
        (``time.monotonic()``)."""
        record.sent = time.monotonic() - start
        try:
            async with self._session.post(self._url, data=body) as answer:
                if answer.status != 200:
                    record.fail(f"http_{answer.status}", error_text(await answer.read()))
                    return
                await self._read_stream(answer.content, record, start)
        except aiohttp.ClientConnectorError as error:
            record.fail("connect", error)
        except TimeoutError as error:  # before ClientError: aiohttp's timeouts are both
            record.fail("timeout", error or "no answer within the time limit")
        except aiohttp.ClientPayloadError as error:
            record.fail("truncated", error)
        except (aiohttp.ClientError, OSError) as error:
            record.fail("reset", error or type(error).__name__)
        except UnicodeError as error:  # of a host name with an empty or too long label
            record.fail("connect", error)

    async def _read_stream(self, content: aiohttp.StreamReader, record: Record, start: float) -> None:
        rest = b""
        async for piece in content.iter_any():
            now = time.monotonic() - start
            *lines, rest = (rest + piece).split(b"\n")
            for line in lines:
                if not line.startswith(b"data:"):  # blank lines, comments, other fields
                    continue
                data = line[5:].strip()
                if data != b"[DONE]" and not self._event(data, record, now):
                    return
        if not record.ended:
            record.fail("truncated", "the stream ended without a finish reason")
        elif record.first_token is None:
            record.fail("empty", "the answer has no text and no tool call")

    def _event(self, data: bytes, record: Record, now: float) -> bool:
        """Handle one event. Returns False to ignore all further events."""
        try:
            event = orjson.loads(data)
            if "error" in event:
                record.fail("stream_error", error_text(data))
                return False
            for choice in event["choices"]:
                delta = choice["delta"] if self._chat else None
                text = choice["text"] if delta is None else any(delta.get(name) for name in _TEXTS)
                if text or choice.get("token_ids"):
                    if record.first_token is None:
                        record.first_token = now
                    record.last_token = now
                    record.output_tokens += 1
                    if record.token_times is not None:
                        record.token_times += [now] * len(choice.get("token_ids") or (1,))
                reason = choice.get("finish_reason")
                if reason in _ENDS:
                    record.ended = True
                elif reason is not None:
                    record.fail("aborted", f"finish reason {reason}")
                    return False
            if usage := event.get("usage"):
                details = usage.get("prompt_tokens_details") or {}
                record.prompt_tokens = _count(usage["prompt_tokens"])
                record.cached_tokens = _count(details.get("cached_tokens"))
                if (output := _count(usage["completion_tokens"])) is not None:
                    record.output_tokens = output
        except (orjson.JSONDecodeError, KeyError, TypeError, ValueError, AttributeError) as error:
            record.fail("malformed", f"{type(error).__name__} {error} in {data[:120]!r}")
            return False
        return True


def _count(value: object) -> int | None:
    """A count of tokens; None: not reported. Raises ValueError for another value."""
    if value is None:
        return None
    if type(value) is not int or not 0 <= value <= MOST_COUNT:
        raise ValueError(f"{value!r} is no count of tokens")
    return value
