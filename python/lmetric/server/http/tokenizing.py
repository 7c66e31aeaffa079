"""Renders and tokenizes prompts before routing: short ones at once, long ones in a thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import structlog

from lmetric.server.api.errors import ApiError
from lmetric.server.api.request import ParsedRequest
from lmetric.server.execution.exchange import ClientRequest, InFlightRequest
from lmetric.server.fleet.pool import Pool
from lmetric.tokens import NotPredictable, PromptTokenizer, Text, Tokens

# Tokenization keeps a core busy, and the event loop needs one.
THREADS = 2
# Larger bodies are rendered in a thread: a template may take microseconds for each message.
LARGE_BODY = 64 << 10

log = structlog.get_logger("lmetric.tokens")


def prompt_text(tokenizer: PromptTokenizer, call: ParsedRequest) -> Text:
    """Returns the text that the engine will tokenize. Raises NotPredictable."""
    request, reader = call.request, call.path.prompt
    if reader == "chat":
        text = tokenizer.chat_text(request)
    elif reader == "chat_batch":
        text = tokenizer.chat_text({**request, "messages": request["messages"][0]})
    else:
        assert call.text is not None
        text = tokenizer.completion_text(request, call.text.decode())
    return text._replace(scope=call.scope) if call.scope else text


def count_text_prompt(pool: Pool, why: NotPredictable) -> None:
    """Counts a prompt that is matched as text although its pool matches tokens."""
    pool.text_prompts[why.reason] += 1
    log.debug("a prompt is matched as text", model=pool.name, reason=why.reason, why=str(why))


def read_prompt(tokenizer: PromptTokenizer, call: ParsedRequest) -> Tokens | None:
    """Returns a prompt's tokens. Raises NotPredictable."""
    return tokenizer.encode(prompt_text(tokenizer, call))


class PendingTokenization(InFlightRequest):
    """A request whose prompt is tokenized in a thread. A `RequestRunner` replaces it after routing.

    ``then`` is called once with the tokens, or with the reason why there are none. If the request
    ends before, ``ended`` is called instead, once, with the client's error. ``limit_seconds``:
    longest duration of the request; None: no limit.
    """

    def __init__(
        self,
        client_request: ClientRequest,
        work: asyncio.Future[Tokens | None],
        then: Callable[[Tokens | NotPredictable | None], None],
        ended: Callable[[ClientRequest, InFlightRequest, ApiError | None], None],
        limit_seconds: float | None,
    ) -> None:
        self._client_request = client_request
        self._work = work
        self._then = then
        self._ended = ended
        self._limit_seconds = limit_seconds
        self._over = False
        work.add_done_callback(self._done)

    def _done(self, work: asyncio.Future[Tokens | None]) -> None:
        if self._over or work.cancelled():
            return
        self._over = True
        error = work.exception()
        if error is None:
            self._then(work.result())
        elif isinstance(error, NotPredictable):
            self._then(error)
        else:
            log.error("cannot tokenize a prompt", exc_info=error)
            self._then(NotPredictable("tokenizer", str(error)))

    def check(self, now: float) -> None:
        """Called periodically: ends the request at its longest duration."""
        if reason := self._client_request.overdue(self._limit_seconds, now):
            self._leave(reason, ApiError(504, reason, code="timeout"))

    def _leave(self, reason: str, error: ApiError | None = None) -> None:
        """Ends the request. The result of a running thread is ignored."""
        if self._over:
            return
        self._over = True
        self._work.cancel()
        self.reason = reason
        self.close_client = error is None
        self._ended(self._client_request, self, error)


class TokenizerThreads:
    """The tokenizer threads."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(THREADS, "tokenise")

    def begin(self, work: Callable[[], Tokens | None]) -> asyncio.Future[Tokens | None]:
        """Runs `work` in a thread. If it is canceled in the queue, it never starts."""
        return asyncio.get_running_loop().run_in_executor(self._threads, work)

    def close(self) -> None:
        """Stops the threads, without waiting for their running work."""
        self._threads.shutdown(wait=False, cancel_futures=True)
