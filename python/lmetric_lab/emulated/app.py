"""The emulated engine's HTTP face: vLLM's paths, bodies, headers and errors."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
import uuid
from array import array
from collections.abc import Awaitable, Callable, Sequence
from email.utils import formatdate
from importlib.metadata import version
from typing import Any, TypeVar, cast

import orjson
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel, ValidationError

from lmetric._core import check_local_order
from lmetric.engines.xargs import own_token_slo
from lmetric_lab.emulated.errors import EngineError, invalid_body
from lmetric_lab.emulated.generation import Generation, StopText, Stream
from lmetric_lab.emulated.handover import Nixl, PeerError, WrongCount, WrongParams
from lmetric_lab.emulated.options import EngineOptions
from lmetric_lab.emulated.protocol import (
    Body,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    GenerateBody,
    Kind,
    Shape,
    TokenizeChat,
    TokenizePrompt,
    TokensShape,
)
from lmetric_lab.emulated.ranks import MetricsPage, Rank, chosen
from lmetric_lab.emulated.text import TOKENIZER_PATH, Text

_BODY = TypeVar("_BODY", bound=BaseModel)
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

VLLM = "0.32.0"  # whose API this is
_COMPLETION_MAX_TOKENS = 16  # OpenAI's and vLLM's default of /v1/completions
_MAX_BODY_BYTES = 256 * 2**20
_THREAD_FROM_CHARACTERS = 16_384  # longer texts are tokenized in a thread (some ms)
_BUSY = "The engine is currently busy: its queue is full. Please retry later."
_DIED = "EngineCore encountered an issue. See stack trace (above) for the root cause."

_log = logging.getLogger("lmetric.engine")


class Api:
    """The handlers of one engine, with vLLM's pages."""

    _full_reports = True  # vllm_xargs.kv_cache_report_mode: "full" is supported
    _echoes_ids = True

    def __init__(
        self,
        options: EngineOptions,
        *,
        ranks: Sequence[Rank],
        text: Text,
        max_model_len: int,
        kv_bytes_per_token: int,
    ) -> None:
        self._options = options
        self._ranks = ranks
        self._metrics = MetricsPage([rank.metrics for rank in ranks])
        self._text = text
        self._max_model_len = max_model_len
        self._kv_bytes_per_token = kv_bytes_per_token
        self._reads_slo = options.api == "vllm" and check_local_order(options.order) == "slo"
        self._nixl: Nixl | None = None
        self._dead = False
        self._in_progress = 0
        self._requests = 0  # that named no data-parallel rank
        self._created = int(time.time())
        self._metrics_page = b""
        self._metrics_at = -math.inf

    async def start(self) -> None:
        """Opens what other engines need. Raises EngineStartError."""
        options = self._options
        if options.kv_connector == "nixl":
            metrics = self._ranks[0].metrics  # there is one, with a connector
            self._nixl = Nixl(
                int(metrics.cache_config["block_size"]),
                options.kv_lease_seconds,
                bidirectional=options.kv_bidirectional,
                decoder_ttl=options.kv_decoder_ttl_seconds,
            )
            metrics.nixl = self._nixl
            await self._nixl.channel.start(options.host, options.kv_port)

    async def stop(self) -> None:
        """Closes it."""
        if self._nixl is not None:
            await self._nixl.channel.stop()

    def application(self) -> web.Application:
        """The routes."""
        app = web.Application(client_max_size=_MAX_BODY_BYTES, middlewares=[self._around])
        app.router.add_post("/v1/completions", self._completions)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/health", self._health)
        if self._options.metrics:
            app.router.add_get("/metrics", self._show_metrics)
        self._add_own(app.router)
        return app

    def _add_own(self, router: web.UrlDispatcher) -> None:
        """The pages that only this kind of engine has."""
        router.add_post("/inference/v1/generate", self._generate_tokens)
        router.add_get("/version", self._version)
        router.add_get("/load", self._load)
        router.add_get("/kv_event_sources", self._kv_event_sources)
        router.add_post("/reset_prefix_cache", self._reset_prefix_cache)
        if self._options.kv_connector != "none":
            router.add_get("/server_info", self._server_info)
        if self._options.tokenize:
            router.add_post("/tokenize", self._tokenize)
            router.add_post("/detokenize", self._detokenize)

    @web.middleware
    async def _around(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        """Errors become JSON objects; the request's id comes back."""
        if self._options.refuse:
            if request.transport is not None:
                request.transport.abort()
            raise asyncio.CancelledError
        try:
            response = await handler(request)
        except EngineError as error:
            response = self._refusal(error)
        except web.HTTPException as error:
            response = self._refusal(
                EngineError(error.status, f"{request.method} {request.path}: {error.reason}")
            )
        except Exception:
            _log.exception("%s %s failed", request.method, request.path)
            response = self._refusal(EngineError(500, "Internal server error"))
        request_id = request.headers.get("X-Request-Id")
        if self._echoes_ids and request_id and not response.prepared:
            response.headers["X-Request-Id"] = request_id
        if (ahead := self._options.clock_ahead_seconds) and not response.prepared:
            response.headers["Date"] = formatdate(time.time() + ahead, usegmt=True)
        return response

    def _refusal(self, error: EngineError) -> web.Response:
        return error.response()

    # -- generation

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        body = await self._read(request, CompletionBody)
        prompt = body.prompt
        if isinstance(prompt, str):
            tokens = await self._encode(prompt)
        elif not self._options.token_ids:
            raise EngineError(400, "prompt: this engine takes text only", "prompt")
        else:
            tokens = self._check_ids(prompt, "prompt")
        return await self._generate(request, body, tokens, "cmpl")

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = await self._read(request, ChatBody)
        tokens = await self._encode(self._render(body))
        return await self._generate(request, body, tokens, "chatcmpl")

    async def _generate_tokens(self, request: web.Request) -> web.StreamResponse:
        body = await self._read(request, GenerateBody)
        tokens = self._check_ids(body.token_ids, "token_ids")
        return await self._generate(request, body, tokens, "generate-tokens")

    async def _generate(
        self,
        request: web.Request,
        body: Body,
        prompt: array[int],
        kind: Kind,
    ) -> web.StreamResponse:
        options = self._options
        if options.fail_status is not None:
            raise EngineError(options.fail_status, "This engine is set to fail.")
        if self._dead:
            raise EngineError(500, _DIED)
        body.refuse_unsupported()
        if body.model not in (None, "", options.model):
            raise EngineError(404, f"The model `{body.model}` does not exist.", "model")
        max_tokens = self._answer_limit(len(prompt), body, kind)
        rank = self._rank_of(request.headers.get("X-data-parallel-rank"), body)
        rejected = self._queue_is_full(rank)
        if rejected and not body.stream:
            raise EngineError(503, _BUSY)
        request_id = request.headers.get("X-Request-Id") or uuid.uuid4().hex
        shape = (TokensShape if kind == "generate-tokens" else Shape)(
            chat=kind == "chatcmpl",
            request_id=f"{kind}-{request_id}",
            model=options.model,
            prompt=prompt,
            pieces=self._text.pieces,
            token_ids=bool(body.return_token_ids) and options.token_ids,
            stream_options=body.stream_options if options.stream_usage else None,
        )
        priority = self._priority(request, body.priority)
        self._token_slo(body)  # an error comes before the headers of a stream
        stops = frozenset(body.stop_token_ids or ())
        stop_text = (
            StopText(body.stop, shown=body.include_stop_str_in_output, min_tokens=body.min_tokens or 0)
            if body.stop or stops
            else None
        )
        self._in_progress += 1
        try:
            if not body.stream:
                generation = Generation(
                    shape,
                    max_tokens,
                    break_after=options.fail_after_tokens,
                    stops=stops,
                    stop_text=stop_text,
                )
                return await self._answer_whole(request, generation, rank, priority, body)
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
            if self._echoes_ids and request.headers.get("X-Request-Id"):
                response.headers["X-Request-Id"] = request_id
            chunked = request.version >= (1, 1)
            if chunked:
                response.enable_chunked_encoding()
            await response.prepare(request)
            stream = Stream(
                shape,
                max_tokens,
                break_after=options.fail_after_tokens,
                stops=stops,
                stop_text=stop_text,
                transport=cast(asyncio.WriteTransport, request.transport),
                chunked=chunked,
                cached_tokens_reported=options.cached_tokens,
            )
            if rejected:
                stream.write(_event_error(_BUSY, 503))
            else:
                try:
                    await self._run(stream, rank, priority, body)
                except EngineError as error:
                    stream.write(_event_error(str(error), error.status))
                else:
                    if stream.broken:
                        await self._break(request, stream)
            await response.write_eof()
            return response
        finally:
            self._in_progress -= 1

    def _rank_of(self, header: str | None, _body: Body) -> Rank:
        """The data-parallel rank that serves a request. Raises EngineError."""
        if header is None:  # vLLM 0.32 begins its search one rank later each time
            self._requests += 1
        return chosen(self._ranks, header, self._requests - 1)

    async def _answer_whole(
        self,
        request: web.Request,
        generation: Generation,
        rank: Rank,
        priority: int,
        body: Body,
    ) -> web.Response:
        await self._run(generation, rank, priority, body)
        if generation.broken:
            if self._dead or self._options.fail_with == "event":
                raise EngineError(500, _DIED)
            await self._break(request, None)
        cached = generation.cached_tokens if self._options.cached_tokens else None
        answer = generation.shape.whole(
            generation.tokens,
            generation.finish_reason or "length",
            generation.stop_reason,
            cached,
            generation.kv_transfer_params,
            generation.stop_text.text if generation.stop_text is not None else None,
        )
        response = web.Response(body=answer, content_type="application/json")
        if self._options.load_header:
            self._add_load_header(request, response, rank)
        return response

    async def _run(self, generation: Generation, rank: Rank, priority: int, body: Body) -> None:
        """Waits until the engine is done with it. A client that leaves cancels this. Raises
        EngineError."""
        if generation.broken:
            return
        params = (body.kv_transfer_params or {}) if self._nixl is not None else {}
        if params:
            await self._pull(generation, rank, params)
        full = self._full_reports and (body.vllm_xargs or {}).get("kv_cache_report_mode") == "full"
        rank.driver.submit(
            generation,
            priority=priority,
            salt=body.cache_salt,
            report_cached=full,
            token_slo_seconds=self._token_slo(body),
        )
        try:
            await generation.over
        finally:
            rank.driver.drop(generation)
        # If the answer is streamed, no client learns of held blocks. vLLM finds stop strings
        # outside its engine core and aborts the request there: no blocks are held.
        by_string = isinstance(generation.stop_reason, str)
        if self._nixl is not None and generation.finish_reason in ("length", "stop") and not by_string:
            computed = generation.shape.prompt + array("I", generation.tokens[:-1])
            request_id = generation.shape.request_id
            generation.kv_transfer_params = self._nixl.after(params, request_id, computed)

    async def _pull(self, generation: Generation, rank: Rank, params: dict[str, Any]) -> None:
        """Fetches the prompt's KV cache like vLLM in pull mode. Raises EngineError."""
        assert self._nixl is not None
        prompt = generation.shape.prompt
        try:
            count = self._nixl.pulls(params, prompt)
            if count is None:
                await asyncio.Event().wait()
            if not count:
                return
            same = await self._nixl.pull(params, prompt, count)
        except WrongCount as error:
            raise EngineError(500, f"kv_transfer_params: {error}", "kv_transfer_params") from None
        except WrongParams as error:
            if self._options.kv_wrong_params == "refuse":
                raise EngineError(400, f"kv_transfer_params: {error}", "kv_transfer_params") from None
            _log.error("the engine dies of kv_transfer_params: %s", error)
            self._dead = True
            rank.driver.die()
            raise EngineError(500, _DIED) from None
        except PeerError as error:
            _log.warning("no KV cache: %s", error)
            rank.metrics.failed_transfers += 1
            if self._options.kv_load_failure_policy == "fail":
                raise EngineError(500, "Internal server error") from None
            return
        generation.fetched_tokens = count
        generation.garbage = None if same else self._text.words
        await self._transfer(rank, count)

    async def _transfer(self, rank: Rank, tokens: int) -> None:
        """Waits for the transfer time of this number of tokens."""
        options, clock = self._options, rank.driver.clock
        bandwidth = options.kv_transfer_gigabytes_per_second * 1e9
        size = tokens * self._kv_bytes_per_token
        seconds = options.kv_transfer_seconds + size / bandwidth
        rank.metrics.transfers += 1
        try:
            await asyncio.sleep(clock.real_seconds_until(clock.now() + seconds))
        finally:
            rank.metrics.transfers -= 1
        rank.metrics.transferred(seconds, size)

    async def _break(self, request: web.Request, stream: Stream | None) -> None:
        """Fails as configured."""
        if (self._dead or self._options.fail_with == "event") and stream is not None:
            stream.write(_event_error(_DIED, 500))
        elif self._options.fail_with == "stall":
            await asyncio.Event().wait()  # until the client has had enough
        else:
            if request.transport is not None:
                request.transport.abort()
            raise asyncio.CancelledError

    def _queue_is_full(self, rank: Rank) -> bool:
        limit, load = self._options.max_queued_requests, rank.driver.engine.load()
        # A request that would run at once does not queue.
        full = limit is not None and load["waiting"] >= limit and load["running"] > 0
        rank.metrics.rejected += full
        return full

    def _answer_limit(self, prompt_tokens: int, body: Body, kind: Kind) -> int:
        """The largest answer: at most the rest of the model's length, as in vLLM 0.32.

        Raises EngineError for a prompt, or a limit of the answer, that alone is too long, and for a
        `min_tokens` above the limit.
        """
        model, (name, wanted) = self._max_model_len, body.limit
        if kind != "generate-tokens" and wanted is not None and wanted > model:
            raise EngineError(
                400,
                f"{name}={wanted} cannot be greater than max_model_len={model}. Please request fewer output "
                "tokens.",
                name,
            )
        if prompt_tokens == 0:
            raise EngineError(400, "prompt: at least one token is needed", "prompt")
        if prompt_tokens >= model:
            raise self._no_room(prompt_tokens, body, kind)
        defaults = {"cmpl": _COMPLETION_MAX_TOKENS, "chatcmpl": self._options.default_max_tokens}
        limit = min(wanted or defaults.get(kind, model), model - prompt_tokens)
        # /inference/v1/generate checks parameters before the prompt, with 16 as their default.
        most = limit if kind != "generate-tokens" else wanted or _COMPLETION_MAX_TOKENS
        if body.min_tokens is not None and body.min_tokens > most:
            raise EngineError(
                400, f"min_tokens must be less than or equal to max_tokens={most}, got {body.min_tokens}."
            )
        return limit

    def _no_room(self, prompt_tokens: int, body: Body, kind: Kind) -> EngineError:
        """The error of vLLM 0.32 for a prompt that leaves no room for an answer."""
        model = self._max_model_len
        if kind == "generate-tokens":
            more = (
                "plus the number of requested output tokens (at least 1) " if prompt_tokens == model else ""
            )
            return EngineError(
                400,
                f"The decoder prompt (length {prompt_tokens}) {more}is longer than the maximum model length "
                f"of {model}.",
            )
        if prompt_tokens == model:
            return EngineError(400, "max_tokens must be at least 1, got 0.", "max_tokens")
        if not (isinstance(body, CompletionBody) and isinstance(body.prompt, list)):
            prompt_tokens = model + 1  # of a text, no further tokens are made
        count = f"at least {prompt_tokens}" if prompt_tokens == model + 1 else f"{prompt_tokens}"
        return EngineError(
            400,
            f"This model's maximum context length is {model} tokens. However, your prompt contains {count} "
            "input tokens, which exceeds this limit even without any output tokens. Please reduce the length "
            "of the input prompt.",
            "input_tokens",
        )

    def _check_ids(self, tokens: list[int], param: str) -> array[int]:
        vocabulary = self._text.vocabulary
        if tokens and (min(tokens) < 0 or max(tokens) >= vocabulary):
            bad = next(token for token in tokens if not 0 <= token < vocabulary)
            raise EngineError(
                400, f"{param}: token id {bad} is out of vocabulary (0 to {vocabulary - 1})", param
            )
        return array("I", tokens)

    def _token_slo(self, body: Body) -> float | None:
        """The request's own time between tokens, in seconds, if the scheduler reads it. Raises
        EngineError."""
        if not self._reads_slo:
            return None
        try:
            return own_token_slo(body.vllm_xargs, self._options.order_slo)
        except ValueError as error:
            raise EngineError(400, str(error), "vllm_xargs") from None

    @staticmethod
    def _priority(request: web.Request, priority: int) -> int:
        header = request.headers.get("X-Vllm-Priority")
        if header is None:
            return priority
        with contextlib.suppress(ValueError):
            if -(2**63) <= int(header) < 2**63:
                return int(header)
        raise EngineError(
            400, f"header X-Vllm-Priority: {header!r} is not a signed 64-bit integer", "priority"
        )

    @staticmethod
    def _add_load_header(request: web.Request, response: web.Response, rank: Rank) -> None:
        kind = request.headers.get("endpoint-load-metrics-format", "").upper()
        if kind not in ("TEXT", "JSON"):
            return
        load = rank.driver.engine.load()
        named = {
            "num_requests_waiting": float(load["waiting"]),
            "kv_cache_usage_perc": float(load["kv_usage"]),
        }
        if kind == "JSON":
            value = orjson.dumps({"named_metrics": named}).decode()
        else:
            value = ", ".join(f"named_metrics.{name}={number}" for name, number in named.items())
        response.headers["endpoint-load-metrics"] = f"{kind} {value}"

    # -- the rest

    async def _models(self, _request: web.Request) -> web.Response:
        model = {
            "id": self._options.model,
            "object": "model",
            "created": self._created,
            "owned_by": "vllm",
            "root": str(TOKENIZER_PATH.parent),
            "parent": None,
            "max_model_len": self._max_model_len,
        }
        return web.json_response({"object": "list", "data": [model]})

    async def _health(self, _request: web.Request) -> web.Response:
        return web.Response(status=503 if self._dead else 200)

    async def _server_info(self, _request: web.Request) -> web.Response:
        """vLLM's report in development mode, with its queue and KV transfer settings."""
        options = self._options
        roles = {"both": "kv_both", "prefill": "kv_producer", "decode": "kv_consumer"}
        transfer = {
            "kv_connector": "NixlConnector",
            "kv_role": roles[options.role],
            "kv_connector_extra_config": {
                "kv_lease_duration": options.kv_lease_seconds,
                "decoder_kv_blocks_ttl": options.kv_decoder_ttl_seconds,
                "bidirectional_kv_xfer": options.kv_bidirectional,
                "kv_recompute_threshold": 0,
            },
            "kv_load_failure_policy": options.kv_load_failure_policy,
        }
        scheduler = {"policy": "priority" if options.order == "priority" else "fcfs"}
        config = {
            "scheduler_config": scheduler,
            "kv_transfer_config": transfer,
            "model_config": {"revision": options.revision},
        }
        return web.json_response({"vllm_config": config})

    async def _version(self, _request: web.Request) -> web.Response:
        return web.json_response({"version": f"{VLLM}+lmetric.{version('lmetric-router')}"})

    async def _load(self, _request: web.Request) -> web.Response:
        return web.json_response({"server_load": self._in_progress if self._options.server_load else 0})

    async def _show_metrics(self, _request: web.Request) -> web.Response:
        if time.monotonic() - self._metrics_at >= (self._options.metrics_every_seconds or 0.0):
            self._metrics_page, self._metrics_at = self._metrics.render(), time.monotonic()
        return web.Response(body=self._metrics_page, headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def _kv_event_sources(self, _request: web.Request) -> web.Response:
        sources = {
            str(number): {
                "publisher": "zmq",
                "endpoint": rank.kv_feed.endpoint,
                "replay_endpoint": rank.kv_feed.replay_endpoint,
                "topic": self._options.kv_events_topic,
            }
            for number, rank in enumerate(self._ranks)
            if rank.kv_feed is not None
        }
        return web.json_response(sources)

    async def _reset_prefix_cache(self, _request: web.Request) -> web.Response:
        done = [rank.driver.engine.reset_cache() for rank in self._ranks]
        if not all(done):
            raise EngineError(503, "Requests are running: the prefix cache is in use.")
        return web.Response()

    async def _tokenize(self, request: web.Request) -> web.Response:
        raw = await request.read()
        body: TokenizeChat | TokenizePrompt
        if b'"messages"' in raw and b'"prompt"' not in raw:
            body = _parse(TokenizeChat, raw)
            text = self._render(body)
        else:
            body = _parse(TokenizePrompt, raw)
            text = body.prompt
        tokens = (await self._encode(text)).tolist()
        answer: dict[str, Any] = {
            "count": len(tokens),
            "max_model_len": self._max_model_len,
            "tokens": tokens,
        }
        answer["token_strs"] = self._text.token_strings(tokens) if body.return_token_strs else None
        return web.Response(body=orjson.dumps(answer), content_type="application/json")

    async def _detokenize(self, request: web.Request) -> web.Response:
        body = await self._read(request, DetokenizeBody)
        tokens = self._check_ids(body.tokens, "tokens").tolist()
        return web.json_response({"prompt": self._text.decode(tokens)})

    # -- bodies

    async def _read(self, request: web.Request, kind: type[_BODY]) -> _BODY:
        return _parse(kind, await request.read())

    def _render(self, body: ChatBody | TokenizeChat) -> str:
        body.check_template()
        return self._text.render_chat(
            [message.model_dump() for message in body.messages],
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
        )

    async def _encode(self, text: str) -> array[int]:
        if len(text) < _THREAD_FROM_CHARACTERS:
            return self._text.encode(text)
        return await asyncio.to_thread(self._text.encode, text)


def _parse(kind: type[_BODY], raw: bytes) -> _BODY:
    try:
        return kind.model_validate_json(raw)
    except ValidationError as error:
        raise invalid_body(error) from None


def _event_error(message: str, code: int) -> bytes:
    return b"data: %b\n\ndata: [DONE]\n\n" % orjson.dumps({"error": {"message": message, "code": code}})
