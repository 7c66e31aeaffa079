"""Arrival of a request with its body: its fields, its model and its prompt are read."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import structlog

from lmetric.config import ServerConfig
from lmetric.engines.handover import FirstSegment
from lmetric.server.api.conversation import beginning
from lmetric.server.api.errors import ApiError, bad, unserved_alias
from lmetric.server.api.isolation import Isolation, not_isolated
from lmetric.server.api.paths import CONFIGURED_PATH, RELAYED, TOKENIZED, RelayedPath
from lmetric.server.api.request import LARGE_BODY, BodyParts, ParsedRequest, parse
from lmetric.server.execution import request_log
from lmetric.server.execution.exchange import FAILED, ClientRequest, Intent
from lmetric.server.fleet.fleet import Fleet
from lmetric.server.fleet.model import Model
from lmetric.server.http.admission import Admission
from lmetric.server.http.place import Placement
from lmetric.server.http.stored import StoredRequests
from lmetric.server.http.waiting import PendingWork, WorkThreads
from lmetric.tokens.errors import NotPredictable, unpredictable

if TYPE_CHECKING:
    from lmetric.server.http.falling_back import FallingBack
    from lmetric.tokens.images import ImagePrompt
    from lmetric.tokens.prompt import PromptTokenizer, Tokens

    Prompt = Tokens | ImagePrompt
    Read = Callable[[], Prompt | None]  # work of a thread

log = structlog.get_logger("lmetric.access")


class Arrivals:
    """Reads admitted requests, and has them placed."""

    def __init__(
        self,
        config: ServerConfig,
        fleet: Fleet,
        *,
        isolation: Isolation,
        admission: Admission,
        stored: StoredRequests,
        placement: Placement,
        threads: WorkThreads,
    ) -> None:
        self._fleet = fleet
        self.admission = admission
        self._running = admission.running
        self._stored = stored
        self._place = placement.place  # of a request whose prompt was read; raises ApiError
        self._threads = threads
        self._falling_back: FallingBack | None = None
        # `tokenizing.begin`, once a model has a tokenizer. A cached property would make each read
        # of this object's attributes slower, as it gives the object a dict.
        self._tokenize: Callable[[Model, PromptTokenizer, ParsedRequest], Read | None] | None = None
        self.configure(config, isolation)

    def configure(self, config: ServerConfig, isolation: Isolation) -> None:
        """Applies settings to new requests."""
        self.paths = {**dict.fromkeys(config.paths, CONFIGURED_PATH), **RELAYED}
        self.isolation = isolation
        if config.fallbacks and self._falling_back is None:
            from lmetric.server.http.falling_back import FallingBack

            names, running, threads = self._fleet.names, self._running, self._threads
            self._falling_back = FallingBack(
                names, running, threads, serve=self._serve_model, place=self._place
            )
            self._place = self._falling_back.place

    def serve(self, client_request: ClientRequest, body: bytes | BodyParts) -> None:
        """Starts the request. `RunningRequests.ended` is called at its end."""
        if client_request.trace is not None and request_log.current.request is not client_request:
            request_log.in_request(client_request, self.serve, client_request, body)
            return
        self._running.count(client_request)
        try:
            path: RelayedPath = client_request.head.relayed
            if len(body) > LARGE_BODY or isinstance(body, BodyParts):
                self._read_in_thread(client_request, path, body)
                return
            call = self._read(client_request, path, body)
            self._serve_model(client_request, call, client_request.started)
        except ApiError as error:
            self._running.ended(client_request, None, error)
        except Exception:
            log.exception("a request failed with an internal error", path=client_request.head.path)
            self._running.ended(client_request, None, ApiError(500, FAILED))

    def _read(self, client_request: ClientRequest, path: RelayedPath, body: bytes) -> ParsedRequest:
        """Reads a body. Raises ApiError."""
        if path.prompt == "form":
            from lmetric.server.api.form import parse_form  # few servers get forms

            call = parse_form(path, client_request.head.field(b"content-type"), body)
        else:
            call = parse(path, body)
        if (model := client_request.gateway_model) is not None and model != call.model:
            if path.prompt == "form" and call.model is None:
                raise bad("the gateway replaces the field model, and the form has none; add it", "model")
            call.rename(model)
        if (tenant := client_request.tenant) and tenant in self.isolation.tenants:
            self.isolation.apply(tenant, client_request.head.path, call)
        if (name := call.model) is not None:
            catalog = self._fleet.catalog
            if not catalog.allows(client_request.caller, name):
                raise catalog.unknown(name, client_request.caller)
            if name in catalog.aliases.names:
                self._replace_alias(client_request, call, name)
            if self._falling_back is not None:
                self._falling_back.add(client_request, call, catalog)
        return call

    def _replace_alias(self, client_request: ClientRequest, call: ParsedRequest, alias: str) -> None:
        """Puts the model's name in the place of its alias."""
        names, aliases = self._fleet.names, self._fleet.catalog.aliases
        if alias in names:
            return

        def key() -> bytes:
            session = call.session_id or client_request.head.session or call.session
            own = beginning(call) if session is None else session.encode("utf-8", "surrogateescape")
            return b"%s\0%s" % (client_request.tenant.encode("utf-8", "surrogateescape"), own)

        client_request.alias = alias
        call.rename(aliases.choose(alias, names, key))

    def _read_large(
        self, client_request: ClientRequest, path: RelayedPath, body: bytes | BodyParts
    ) -> ParsedRequest:
        """Reads a large body, with all work that the event loop must not do. Raises ApiError."""
        if isinstance(body, BodyParts):
            body = body.joined()
        call = self._read(client_request, path, body)
        if call.changes:
            call.apply_changes()
        if path.stores:
            call.read_brief()
        return call

    def _read_in_thread(
        self, client_request: ClientRequest, path: RelayedPath, body: bytes | BodyParts
    ) -> None:
        """Reads a large body in a thread. Then its request goes on."""

        def then(read: asyncio.Future[ParsedRequest], now: float) -> None:
            self._serve_model(client_request, read.result(), now)

        work = self._threads.begin(partial(self._read_large, client_request, path, body))
        PendingWork(client_request, self._running, work, then=then)

    def _serve_model(
        self,
        client_request: ClientRequest,
        call: ParsedRequest,
        now: float,
        *,
        sought: bool = False,
        searched: bool = False,
    ) -> None:
        """Finds the model of a request whose body was read, reads its prompt, and places it.

        ``sought``: the engines were asked for the model. ``searched``: other routers were asked for
        the response that it continues. Raises ApiError.
        """
        catalog, caller = self._fleet.catalog, client_request.caller
        served = self._fleet.names.get(call.model or "")
        if served is None:
            if not sought and client_request.fallback is None and self._search(client_request, call):
                return
            if client_request.alias is not None:
                targets = catalog.aliases.targets(client_request.alias)
                raise unserved_alias(client_request.alias, targets)
        if served is None or not catalog.allows(caller, call.model or ""):
            served = catalog.find(call.model, caller)
        model, adapter = served
        client_request.model, client_request.model_name = model, call.model
        if call.scope and call.path.isolated_by == "salt_by_kind" and not model.salts_messages:
            raise not_isolated(client_request.tenant, client_request.head.path)
        if call.path.stores:
            if not searched and self._search_response(client_request, call):
                return
            self._stored.follow(client_request, call, model)
        if model.priority is not None or self.admission.identity.on:
            # Otherwise clients could delay the requests of others.
            client_request.drops_priority = True
            if call.has_xargs and any(engine.boosts for engine in model.engines.values()):
                # The router changes no form, and clients must not set the values of this field.
                raise bad(
                    "the form has the field vllm_xargs; this model accepts it in JSON bodies only",
                    "vllm_xargs",
                )
            if call.priority is not None:
                call.change(("priority",))
        tokenizer, in_thread = model.tokenizers.current, None
        if tokenizer is not None and call.text is not None and call.path.prompt in TOKENIZED:
            tokenize = self._tokenize
            if tokenize is None:
                from lmetric.server.http.tokenizing import begin

                tokenize = self._tokenize = begin
            in_thread = tokenize(model, tokenizer, call)  # long work, for a thread
        if model.encoders:
            from lmetric.server.http.tokenizing import may_have_media, read_media
            from lmetric.tokens.prompt import RENDERED_BYTES

            if may_have_media(call):
                if in_thread is None and len(call.body) <= RENDERED_BYTES:
                    read_media(call)
                else:
                    in_thread = partial(_read_media, call, in_thread)
        splits = len(call.body) > LARGE_BODY and model.cuts
        intent = Intent(client_request, call, model, adapter=adapter)
        if in_thread is None and not call.changes and not splits:
            self._place(intent, now)
        else:
            if splits:
                in_thread = partial(_read_first, intent, in_thread)
            self._prepare_in_thread(intent, in_thread)

    def _search_response(self, client_request: ClientRequest, call: ParsedRequest) -> bool:
        """Asks other routers for the response that a request continues, if it is not known here.

        Returns whether the request waits for their answers.
        """
        search = self._stored.continued(client_request.tenant, call)
        if search is None:
            return False

        then = partial(self._serve_model, client_request, call, sought=True, searched=True)
        self._stored.wait(client_request, search, then)
        return True

    def _search(self, client_request: ClientRequest, call: ParsedRequest) -> bool:
        """Asks the engines for an unknown model: one may have loaded it a moment ago.

        Returns whether the request waits for their answers.
        """
        found = self._fleet.seek(call.model)
        if found is None:
            return False

        def then(_: asyncio.Future[None], now: float) -> None:
            self._serve_model(client_request, call, now, sought=True)

        why = "; the engines were asked for its model"
        PendingWork(client_request, self._running, found, then=then, why=why)
        return True

    def _prepare_in_thread(self, intent: Intent, read: Read | None) -> None:
        """Changes the body in a thread, and renders or tokenizes its prompt; then places it.

        It is not placed if it has ended by then.
        """
        call, model = intent.call, intent.model

        def then(work: asyncio.Future[Prompt | None], now: float) -> None:
            try:
                prompt = work.result()
            except NotPredictable as error:
                model.tokenizers.count_text(error)
            else:
                if prompt is not None:
                    from lmetric.server.http.tokenizing import take_prompt

                    take_prompt(model, call, prompt)
            self._place(intent, now)

        work = self._threads.begin(partial(_prepare, call, read))
        PendingWork(intent.client_request, self._running, work, then=then)


def _prepare(call: ParsedRequest, read: Read | None) -> Prompt | None:
    """Changes a body, and returns its prompt's tokens. Raises NotPredictable."""
    if call.changes:
        call.apply_changes()
    try:
        return None if read is None else read()
    except Exception as error:
        raise unpredictable(error) from None


def _read_media(call: ParsedRequest, read: Read | None) -> Prompt | None:
    """Reads the media, and returns the prompt's tokens. Raises NotPredictable."""
    from lmetric.server.http.tokenizing import read_media

    read_media(call)
    return None if read is None else read()


def _read_first(intent: Intent, read: Read | None) -> Prompt | None:
    """Prepares the body for a prefill, and returns the prompt's tokens. Raises NotPredictable."""
    call = intent.call
    call.first = FirstSegment(intent.client_request.head.path, call.body)
    if intent.model.prefills_apart and not call.first.why_whole:  # the prefill has a body of its own
        call.first.for_one_token()
    return None if read is None else read()
