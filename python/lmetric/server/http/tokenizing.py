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
from lmetric.server.http.waiting import WaitingRequest
from lmetric.server.observe.request_log import request_ids
from lmetric.tokens import NotPredictable, PromptTokenizer, Text, Tokens

# Tokenization keeps a core busy, and the event loop needs one.
THREADS = 2
# Larger bodies are rendered in a thread: a template may take microseconds for each message.
LARGE_BODY = 64 << 10

log = structlog.get_logger("lmetric.tokens")


def prompt_text(tokenizer: PromptTokenizer, call: ParsedRequest) -> Text:
    """Returns the text that the engine will tokenize. Raises NotPredictable."""
    reader = call.path.prompt
    try:
        request = call.request
    except ValueError as error:  # the reader in Rust allows more
        raise NotPredictable("shape", f"the body cannot be parsed: {error}") from None
    if reader == "chat":
        text = tokenizer.chat_text(request)
    elif reader == "messages":
        text = tokenizer.messages_text(request)
    elif reader == "responses":
        text = tokenizer.responses_text(request)
    elif reader == "chat_batch":
        conversations = request.get("messages")
        first = conversations[0] if isinstance(conversations, list) and conversations else None
        text = tokenizer.chat_text({**request, "messages": first})
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


class PendingTokenization(WaitingRequest):
    """A request whose prompt is tokenized in a thread.

    ``then`` is called once with the tokens, or with the reason why there are none, unless the
    request ends before.
    """

    def __init__(
        self,
        client_request: ClientRequest,
        work: asyncio.Future[Tokens | None],
        then: Callable[[Tokens | NotPredictable | None, PendingTokenization], None],
        ended: Callable[[ClientRequest, InFlightRequest, ApiError | None], None],
        limit_seconds: float | None,
    ) -> None:
        super().__init__(client_request, ended, limit_seconds)
        self._work = work
        self._then = then
        work.add_done_callback(self._done)

    def _done(self, work: asyncio.Future[Tokens | None]) -> None:
        if work.cancelled() or not self._goes_on():
            return
        error = work.exception()
        if error is None:
            self._then(work.result(), self)
        elif isinstance(error, NotPredictable):
            self._then(error, self)
        else:
            log.error("cannot tokenize a prompt", exc_info=error, **request_ids(self._client_request))
            self._then(NotPredictable("tokenizer", str(error)), self)

    def _abandon(self) -> None:
        """Cancels the work. The result of a running thread is ignored."""
        self._work.cancel()


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
