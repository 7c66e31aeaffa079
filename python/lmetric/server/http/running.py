"""The requests in flight: how they begin, wait, go on and end."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from enum import IntEnum
from typing import TYPE_CHECKING

import structlog

from lmetric.config import ServerConfig
from lmetric.server.api.errors import ApiError, whole_answer
from lmetric.server.execution import request_log
from lmetric.server.execution.exchange import FAILED, ClientRequest, InFlightRequest, Rules
from lmetric.server.execution.observers import Observers, failed, guarded
from lmetric.server.execution.runner import Runner
from lmetric.server.observe.refusals import Refusals

if TYPE_CHECKING:
    from lmetric.server.observe.access_log import AccessLog
    from lmetric.server.observe.tracing.export import Tracing

log = structlog.get_logger("lmetric.access")


class Phase(IntEnum):
    """A phase of the server's life, in the order of its end."""

    SERVING = 0
    REPLACED = 1  # the next process accepts new connections; answers close the others
    DRAINING = 2  # /ready fails, so that load balancers send no more requests; answers close
    REFUSING = 3  # as DRAINING, and new requests get a 503


SERVING, REPLACED, DRAINING, REFUSING = Phase


class RunningRequests:
    """The requests in flight, their counts and their observers."""

    rules: Rules

    def __init__(self, config: ServerConfig) -> None:
        self.relays: set[InFlightRequest] = set()
        self.phase = SERVING
        self.tenants: Counter[str] = Counter()  # running requests by tenant
        self.observers = Observers()
        self.tracing: Tracing | None = None  # set by the server
        # Returns whether a request goes on with another model. Set by `FallingBack`.
        self.fall_back: Callable[[ClientRequest, InFlightRequest | None, ApiError], bool]
        self._access_log: AccessLog | None = None
        self.refusals = Refusals()
        self._idle = asyncio.Event()
        self.configure(config)

    def configure(self, config: ServerConfig) -> None:
        """Applies settings to new requests."""
        self.rules = Rules.of(config)
        if config.log.access:
            if self._access_log is None:
                from lmetric.server.observe.access_log import AccessLog

                self._access_log = AccessLog()
            self.observers.add(self._access_log)
        elif self._access_log is not None:
            self.observers.remove(self._access_log)

    async def idle_or(self, hurry: asyncio.Event) -> None:
        """Waits until no request is in flight, or ``hurry`` is set."""
        self._idle.clear()
        if self.relays:
            waits = [asyncio.ensure_future(event.wait()) for event in (self._idle, hurry)]
            try:
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for wait in waits:
                    wait.cancel()

    def check(self, now: float) -> None:
        """Called periodically: ends requests at their time limits."""
        for relay in list(self.relays):
            try:
                relay.check(now)
            except Exception:
                relay.fail()

    def count(self, client_request: ClientRequest) -> None:
        """Counts a request for its client and its tenant, until `ended`."""
        payer = client_request.payer = client_request.client.payer
        if payer is not None:
            payer.running += 1
            if client_request.tenant:
                self.tenants[client_request.tenant] += 1

    def add(self, client_request: ClientRequest, relay: InFlightRequest) -> None:
        """Adds a request that waits before routing."""
        client_request.client.relay = relay
        self.relays.add(relay)

    def start(self, client_request: ClientRequest, relay: Runner, now: float) -> None:
        """Sends a request to its first engine.

        ``now``: time of its decision, seconds on the monotonic clock.
        """
        relay.on_end = self.ended
        client_request.keep_alive &= self.phase is SERVING
        client_request.client.relay = relay
        self.relays.add(relay)
        try:
            if client_request.client.writing_paused:
                relay.client_slow(True)
            for placed in self.observers.placed:
                try:  # `guarded`, inline because each request runs it
                    placed(client_request, relay)
                except Exception:
                    failed(placed)
            relay.start(now)
            # A request about a stored response has no decision.
            for sent in self.observers.sent if relay.decision is not None else ():
                try:
                    sent(client_request, relay)
                except Exception:
                    failed(sent)
        except Exception:
            relay.fail()

    def go_on(
        self,
        client_request: ClientRequest,
        waiting: InFlightRequest,
        then: Callable[[float], None],
        now: float,
    ) -> None:
        """Continues a request that waited before routing; `then` replaces `waiting`."""
        if client_request.trace is not None and request_log.current.request is not client_request:
            request_log.in_request(client_request, self.go_on, client_request, waiting, then, now)
            return
        try:
            then(now)
        except ApiError as error:
            self.ended(client_request, waiting, error)
        except Exception:
            log.exception("a request failed with an internal error", path=client_request.head.path)
            self.ended(client_request, waiting, ApiError(500, FAILED))
        else:
            self.relays.discard(waiting)

    def ended(
        self, client_request: ClientRequest, relay: InFlightRequest | None, error: ApiError | None
    ) -> None:
        """Ends the request: sends ``error``, if any, to its client, and reports the end."""
        if self.tracing is not None and request_log.current.request is not client_request:
            if client_request.trace is None:
                guarded(self.tracing.context, client_request)
            request_log.in_request(client_request, self.ended, client_request, relay, error)
            return
        refused_because: str | None = None
        if error is not None:
            refused_because, client_request.refused_because = client_request.refused_because, None
            if client_request.fallback is not None and self.fall_back(client_request, relay, error):
                return
        # The head of the answer may have kept the connection open. Closing it would then lose the
        # client's next request.
        goes_on = client_request.keep_alive
        payer = client_request.payer
        if payer is not None:
            client_request.payer = None
            payer.running -= 1
            if client_request.tenant:
                self.tenants[client_request.tenant] -= 1
                if not self.tenants[client_request.tenant]:
                    del self.tenants[client_request.tenant]  # tokens may name any number of tenants
        if relay is not None:
            client_request.client.relay = None
            self.relays.discard(relay)
            if self.phase is not SERVING and not self.relays:
                self._idle.set()
            goes_on = goes_on and not relay.close_client
            if relay.committed:
                client_request.status = relay.status
            usage = relay.usage
            if usage is not None and client_request.prompt_bytes and client_request.model is not None:
                prompt_tokens = usage.prompt_tokens
                if prompt_tokens:
                    client_request.model.ratio.learn(client_request.prompt_bytes, prompt_tokens)
        client_request.ended_at = time.monotonic()
        if error is not None:
            # Frames of the traceback hold the request, which would be in a cycle.
            error.__traceback__ = error.__cause__ = error.__context__ = None
            client_request.error, client_request.status = error, error.status
            if refused_because is not None and client_request.model is not None:
                client_request.model.held.count_refused(client_request.tenant, refused_because)
            goes_on = goes_on and client_request.http11 and self.phase is SERVING
            if client_request.transport.is_closing():
                client_request.status = 499  # the client left before the router refused its request
            elif client_request.opened:
                client_request.break_off(error.body(self.rules.show_engines))
            else:
                client_request.transport.write(
                    whole_answer(
                        error,
                        client_request.head.request_id,
                        goes_on,
                        show_engines=self.rules.show_engines,
                        more_fields=client_request.cors,
                    )
                )
            self.refusals.add(client_request, error)
        for hook in self.observers.ended:
            try:  # `guarded`, inline because each request runs it
                hook(client_request, relay)
            except Exception:
                failed(hook)
        done = client_request.done or client_request.client.answered
        done(goes_on)
