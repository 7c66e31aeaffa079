"""One request of a gateway: the messages of its gRPC stream, as a client and an engine."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from lmetric.server.api.errors import ApiError
from lmetric.server.epp import messages, request_fields
from lmetric.server.epp.engine_link import EngineLink
from lmetric.server.epp.ext_proc_pb2 import BodySendMode, HttpHeaders, ProcessingRequest, ProcessingResponse
from lmetric.server.epp.shared import Shared
from lmetric.server.epp.subset import subset_of
from lmetric.server.execution.exchange import ClientRequest, InFlightRequest
from lmetric.server.execution.plan import Step
from lmetric.server.execution.runner import Runner
from lmetric.server.fleet.engine import Engine
from lmetric.server.http.protocol import no_room_error

# The modes that show the router a request, and each part of an answer.
_MODES = (
    ("request_body_mode", BodySendMode.FULL_DUPLEX_STREAMED, BodySendMode.BUFFERED),
    ("response_body_mode", BodySendMode.FULL_DUPLEX_STREAMED, BodySendMode.STREAMED),
)
IDLE_SECONDS = 10.0  # until a stream's first message, and from the end of its request to its own


class GatewayStream:
    """One request, from its head to the end of its answer.

    The frontend sees its client: `transport` turns the router's own answers into messages. The
    request sees its engine's connection (`connection`): the request that it writes there becomes
    the pick, and the gateway's messages about the answer become the engine's bytes.
    """

    writing_paused = False
    relay: InFlightRequest | None = None

    def __init__(self, shared: Shared, context: Any) -> None:
        self._shared = shared
        self._front = shared.front
        self._context = context
        self.peer = shared.peer(context.peer())
        self.transport = _Client(self)
        self.body_size = 0
        self.request: ClientRequest | None = None
        self.payer = shared.front.clients.begin(self.peer.address)  # its gateway
        self.payer.is_gateway = True
        self._task = asyncio.current_task()
        self._out: deque[ProcessingResponse] = deque()
        self._decided: asyncio.Future[None] | None = None
        self._broken: str | None = None  # why the router ends the stream
        self._modes = [BodySendMode.FULL_DUPLEX_STREAMED, BodySendMode.FULL_DUPLEX_STREAMED]
        self._parts: list[bytes] = []
        self._size = 0
        self._fields: request_fields.RequestFields
        self._has_body = False
        self._body = b""  # as the client sent it
        self._has_trailers = False
        self._deadline: asyncio.TimerHandle | None = None  # for the gateway's next step
        self._routed = False  # the request is whole: the execution has it, or it was refused
        self._prefill: str | None = None  # address of the engine that computes the prompt
        self._link: EngineLink | None = None
        self._picks: dict[str, Engine] = {}  # by IP:PORT, best first
        self._received_at = 0.0  # end of the request; seconds on the monotonic clock
        self.answer_ended = False

    # -- the stream --------------------------------------------------------------------------------

    async def serve(self) -> None:
        """Reads the gateway's messages and answers them, until one side ends the stream."""
        context, out = self._context, self._out
        self._await_step(IDLE_SECONDS, f"no request_headers within {IDLE_SECONDS:g} s")
        try:
            while (data := await context.read()) is not grpc.aio.EOF:
                try:
                    message = ProcessingRequest.FromString(data)
                except DecodeError:  # gRPC would log it with the bytes
                    await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "this is not a ProcessingRequest")
                self._receive(message)
                if (request := self.request) is not None and request.unknown_key is not None:
                    await self._await_key(request, message.request_headers)
                if self._decided is not None:
                    await self._decided
                    self._decided = None
                try:
                    while out:
                        await context.write(out.popleft())
                finally:
                    if message.HasField("response_body"):
                        # After the write, so that the client does not wait for the router's counts.
                        # The gateway may end the stream during the write of the last part.
                        self._answer_part(message.response_body.body, message.response_body.end_of_stream)
        except asyncio.CancelledError:
            if self._task is not None:
                self._task.uncancel()
            if self._broken is None:
                return  # the gateway has ended the stream; gRPC logs exceptions
            # Other answers are of no use any more: the gateway gets the refusal, or an error.
            refusals = [answer for answer in out if answer.HasField("immediate_response")]
            if refusals:
                await context.write(refusals[0])
            else:
                await context.abort(grpc.StatusCode.ABORTED, self._broken)
        finally:
            self._left()

    def _receive(self, message: ProcessingRequest) -> None:
        kind = message.WhichOneof("request")
        if kind == "response_body":
            if self._modes[1] == BodySendMode.FULL_DUPLEX_STREAMED:
                part = message.response_body
                self._out.append(messages.response_part(part.body, ends=part.end_of_stream))
            else:
                self._out.append(messages.CONTINUE_RESPONSE_BODY)
        elif kind == "request_body":
            self._request_part(message.request_body.body, message.request_body.end_of_stream)
        elif kind == "request_headers":
            if self.request is None:
                self._begin(message)
            else:
                self._abort("a stream has one request: request_headers came twice")
        elif kind == "response_headers":
            self._answer_head(message)
        elif kind == "request_trailers":
            if self._picks:  # they follow a buffered body
                self._out.append(messages.CONTINUE_REQUEST_TRAILERS)
            else:
                self._has_trailers = True
                self._complete()
        elif kind == "response_trailers":
            self._out.append(messages.CONTINUE_RESPONSE_TRAILERS)
            self._answer_ended()

    def _left(self) -> None:
        """Ends what is open: the gateway has ended the stream."""
        self._await_step()
        self.transport.has_left = True
        relay, self._link = self.relay, None
        if relay is not None:
            relay.client_gone()
        if self.body_size:
            self.release_body()
        self._front.clients.end(self.payer)

    def end(self, reason: str) -> None:
        """Ends the stream with an error: the router no longer follows its answer."""
        if not self.answer_ended:
            self._abort(reason)

    def _abort(self, reason: str) -> None:
        if self._broken is None and self._task is not None:
            self._broken = reason
            self._task.cancel()

    def _await_step(self, seconds: float | None = None, reason: str = "") -> None:
        """Ends the stream after these seconds, unless it is called again. None: no time limit."""
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        if seconds is not None:
            self._deadline = asyncio.get_running_loop().call_later(seconds, self._abort, reason)

    def _await_end(self) -> None:
        self._await_step(IDLE_SECONDS, "the request has ended")

    # -- the request -------------------------------------------------------------------------------

    def _begin(self, message: ProcessingRequest) -> None:
        self._await_step()
        if message.HasField("protocol_config"):
            config = message.protocol_config
            self._modes = [config.request_body_mode, config.response_body_mode]
        headers = message.request_headers
        fields = self._fields = self._shared.read_fields(headers.headers, self.peer.address)
        front = self._front
        head = front.entrance.requests.sort(fields.target, fields.for_router)
        clients, sender = (
            front.clients,
            front.entrance.forwarding.client(self.peer.address, head.forwarded_for),
        )
        if sender != self.payer.address:
            clients.end(self.payer)
            self.payer = clients.begin(sender)
        client: Any = self  # with what the frontend reads of a connection
        request = self.request = ClientRequest(client, self.transport, head)
        request.keep_alive = True
        request.gateway = self.connection
        request.subset = subset_of(message.metadata_context)
        if front.admission.admits(request):
            self._admitted(request, headers)

    async def _await_key(self, request: ClientRequest, headers: HttpHeaders) -> None:
        """Waits until the keys of the request's issuer are read. No message is read until then."""
        assert request.unknown_key is not None  # as the caller made sure
        await asyncio.wait([request.unknown_key.read])
        if self._front.admission.admits_late(request):
            self._admitted(request, headers)

    def _admitted(self, request: ClientRequest, headers: HttpHeaders) -> None:
        """Goes on with a request whose credential is valid."""
        front = self._front
        if (error := self._why_not(self._fields, headers)) is not None:
            front.running.ended(request, None, error)
        elif not headers.end_of_stream:
            self._has_body = True
            seconds = front.config.timeouts.body
            self._deadline = asyncio.get_running_loop().call_later(seconds, self._body_late, seconds)
            if self._modes[0] == BodySendMode.BUFFERED:
                self._out.append(messages.CONTINUE_REQUEST)
        else:
            self._complete()

    def _why_not(self, fields: request_fields.RequestFields, headers: HttpHeaders) -> ApiError | None:
        """Returns the error of a request that the picker does not serve."""
        for mode, (name, *usable) in zip(self._modes, _MODES, strict=True):
            has_no_body = name == "request_body_mode" and headers.end_of_stream
            if mode not in usable and not has_no_body:
                names = " or ".join(map(BodySendMode.Name, usable))
                text = f"{name} is {BodySendMode.Name(mode)}; set {names} in the gateway's ext_proc"
                return ApiError(500, text, code="gateway_configuration")
        return self._shared.path_error(fields.method, fields.path)

    def _request_part(self, part: bytes, ends: bool) -> None:
        if self.request is None or self._routed or self.transport.refused:
            return  # the rest of a refused request, or parts after its end
        self._size += len(part)
        limit = self._front.config.limits.max_body_bytes
        if self._size > limit:
            error = ApiError(413, f"the body is longer than {limit} bytes", code="body_too_large")
            self._front.running.ended(self.request, None, error)
        elif not self._hold(len(part)):
            self._front.running.ended(self.request, None, no_room_error())
        else:
            self._parts.append(part)
            # A buffered body is one message, which is not the end if trailers follow.
            if ends or self._modes[0] == BodySendMode.BUFFERED:
                self._complete()

    def _hold(self, size: int) -> bool:
        if not self.payer.hold(size):
            return False
        self.body_size += size
        return True

    def _body_late(self, seconds: float) -> None:
        if self.request is not None and not self._routed and not self.transport.refused:
            text = f"the body is incomplete after {seconds:g} s: {self._size} bytes received"
            self._front.running.ended(self.request, None, ApiError(408, text))
            self.end(text)

    def _complete(self) -> None:
        """Routes the whole request. The pick or the refusal may come later."""
        request = self.request
        if request is None or self._routed or self.transport.refused:
            return
        self._routed = True
        self._await_step()
        self._received_at = time.monotonic()
        body = self._body = b"".join(self._parts)
        self._parts.clear()
        before = len(self._out)
        self._shared.route(request, body, self._fields)
        if len(self._out) == before and not self.transport.refused:
            self._decided = asyncio.get_running_loop().create_future()

    # -- the pick (called by an attempt) ---------------------------------------------------------

    def connection(self, step: Step) -> EngineLink:
        """Returns the connection to a step's engine, which the gateway has."""
        if step.side:
            self._prefill = self._shared.address(step.engine)
            return EngineLink(step.engine, None, None)
        first = not self._picks
        link = EngineLink(
            step.engine, self._pick if first else None, lambda: self.end("the router ended the request")
        )
        self._link = link
        return link

    def _pick(self, head: bytes, body: bytes) -> None:
        """Sends the pick to the gateway: engines, changed fields, and the body."""
        link, relay, request = self._link, self.relay, self.request
        assert link is not None
        assert request is not None
        self._picks = self._shared.endpoints(link.engine, relay)
        endpoints = ",".join(self._picks)
        streamed = self._modes[0] == BodySendMode.FULL_DUPLEX_STREAMED
        same = body == self._body
        fields, removed = self._fields.changes(head, with_length=self._has_body and not same)
        fields.append((messages.DESTINATION, endpoints.encode()))
        if self._prefill is not None:  # gateways remove the client's field before they set this one
            fields.append((messages.PREFILLER, self._prefill.encode()))
        change = messages.mutation(fields, removed)
        if streamed or not self._has_body:
            self._out.append(messages.picked_at_headers(change, endpoints))
            if self._has_body:
                self._out.extend(messages.request_parts(body, ends=not self._has_trailers))
        else:
            self._out.append(messages.picked_at_body(change, endpoints, None if same else body))
        if self._has_trailers:
            self._out.append(messages.CONTINUE_REQUEST_TRAILERS)
        self._body = b""
        self._decide("picked")

    def respond(self, answer: bytes) -> None:
        """Sends the router's own answer to the client, if the gateway can still take it."""
        if not self._picks and not self.transport.refused:
            self.transport.refused = True
            self._parts.clear()
            self._out.append(messages.immediate(answer))
            self._decide("refused")

    def _decide(self, outcome: str) -> None:
        self._shared.counts[outcome] += 1
        if self._received_at:
            self._shared.decision_seconds.observe(time.monotonic() - self._received_at)
        if self._decided is not None and not self._decided.done():
            self._decided.set_result(None)

    # -- the answer --------------------------------------------------------------------------------

    def _answer_head(self, message: ProcessingRequest) -> None:
        headers = message.response_headers
        status, fields = request_fields.of_answer(headers.headers)
        self._follow(request_fields.answering_engine(message))
        link, relay, own = self._link, self.relay, b""
        if isinstance(relay, Runner) and relay.decision is not None and link is not None:
            own = relay.head_lines(link.engine.name)
        lines = messages.fields_of(own.splitlines())
        self._out.append(messages.response_head(lines) if own else messages.CONTINUE_RESPONSE)
        if link is not None:
            link.head(status, fields)
        if headers.end_of_stream:
            self._answer_ended()

    def _follow(self, answering: request_fields.AnsweringEngine | None) -> None:
        """Moves the request to the engine that answers, if that is not the first pick."""
        link = self._link
        if answering is None or link is None or not self._picks:
            return
        other = self._shared.count_answer(answering, self._picks)
        if other is None or other.engine is link.engine:
            return
        link.leave(other)
        if self._link is link:  # the router's ledger cannot count the request at that engine
            self._link = None

    def _answer_part(self, part: bytes, ends: bool) -> None:
        link = self._link
        if link is not None and part:
            link.data_received(part)
        if ends:
            self._answer_ended()

    def _answer_ended(self) -> None:
        self.answer_ended = True
        link, self._link = self._link, None
        if link is not None:
            link.end()
        if self.relay is None:  # perhaps since its last bytes
            self._await_end()

    # -- the client's connection (called by the frontend and the runner) ---------------------------

    @property
    def sender(self) -> str:
        """The address of the gateway's client."""
        return self.payer.address

    def release_body(self) -> None:
        """Releases the counted bytes of the body."""
        self.payer.release(self.body_size)
        self.body_size = 0

    def answered(self, _: bool) -> None:
        """Called at the end of the request."""
        self.relay = None
        if self.answer_ended or not self._picks:  # else the gateway still forwards its answer
            self._await_end()
        if self.body_size:
            self.release_body()


class _Client(asyncio.Transport):
    """Receives the bytes that the router would send to the client."""

    def __init__(self, stream: GatewayStream) -> None:
        super().__init__()
        self._stream = stream
        self.refused = False  # the client got an answer of the router
        self.has_left = False  # the gateway has ended the stream

    def write(self, data: Any) -> None:
        """Receives the router's own answer. The gateway itself has the engine's answer."""
        if not self._stream.answer_ended:
            self._stream.respond(data)

    def is_closing(self) -> bool:
        """Returns whether the gateway has ended the stream, as it does when a client leaves."""
        return self.has_left

    def abort(self) -> None:
        """Ends the stream."""
        self._stream.end("the router ended the request")

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """Returns the address of the gateway's client as `peername`."""
        return (self._stream.sender, 0) if name == "peername" else default
