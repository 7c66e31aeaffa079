"""Requests that were cut between equals (Libra, section 3): one leg after the other, one answer made of all.

Legs but the last are silent: a stream never tells what its engine would hand over, so the client gets a
leg's tokens when it ends. Where the cut lies in the prompt or at its end, the last leg answers as if alone
and its bytes pass; behind that, the answer is joined (`joined`, `rest`).

An engine hands over with a token whose KV it has not computed. It counts where the next leg's engine can
fetch the front of its prompt and compute the rest (bidirectional mode); else it is made again there.

A leg that begins at the prompt's start, the only one or the first of several, may fetch the prompt's front
from an engine that holds it (`pulling`): it is sent what that one hands over, as a later leg is sent what the
leg before it did.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import orjson
import structlog

from lmetric._core import NoInstanceError, Ticket, TicketError, TokenEncoder
from lmetric.engines.handover import CHAT, COMPLETIONS, HandoverError, with_fields
from lmetric.server.api.errors import ApiError
from lmetric.server.api.request import ParsedRequest
from lmetric.server.execution.followed import Followed
from lmetric.server.execution.moving import Move
from lmetric.server.execution.pulling import Pull
from lmetric.server.execution.rest import Passed, Rest
from lmetric.server.execution.segments import Segments
from lmetric.server.execution.silent import Hearer, Silent, usage_of
from lmetric.server.execution.transcript import Made, MergeError, Transcript, dumps, other_tokens
from lmetric.server.execution.transfer import KvTransfer
from lmetric.server.fleet.engine import Engine
from lmetric.server.fleet.pool import Pool

if TYPE_CHECKING:
    from lmetric.server.execution.exchange import ClientRequest, Rules
    from lmetric.server.execution.relay import Relay
    from lmetric.server.fleet.rebalancer import Rebalancer

log = structlog.get_logger("lmetric.chain")


class Chain(Segments):
    """What a relay keeps of a request that was cut between equals, or may move."""

    bounded = False  # it runs in silent legs, of which another may follow anywhere
    _plain_moves = False  # an answer that is not streamed may move, too

    def __init__(
        self,
        relay: Relay,
        rules: Rules,
        asked: ClientRequest,
        pool: Pool,
        ticket: Ticket,
        call: ParsedRequest,
        encoder: TokenEncoder,
        mover: Rebalancer | None,
    ) -> None:
        assert call.tokens is not None  # else it must not be cut
        super().__init__(relay, rules, asked, pool, ticket)
        self._stream = call.stream
        self.joined = Transcript(asked.path, call.request, call.tokens, encoder)
        self._asked_tokens = 0  # of the silent leg that was sent last
        self._ends_at = 0  # and the token at which it ends
        self._from_token = 0  # up to here the next leg need not compute: that is, or was, handed over
        self._keeps = False  # its last token counts
        self._checks = False  # a silent leg has to tell the tokens that it makes of a chat
        self._unjoined = False  # its first answer could not be joined: it is answered whole
        self._head_told = False
        self._mover = mover if call.stream or self._plain_moves else None
        self.move: Move | None = None  # to another engine, that has begun
        self._pull: Pull | None = None  # of the prompt's front, before the open leg

    # What the relay calls.

    def begin(self, engine: Engine, now: float) -> None:
        """Sends the open segment, which another follows, to its engine."""
        if self._unjoined:
            self._go_on(None, None)
            return
        to_token = self.ticket.to_token
        assert to_token is not None
        target, leg = self.joined.leg(to_token)
        self._keeps = to_token > len(self.joined.prompt) and self._front_is_enough(engine)
        if self._keeps:
            target, leg = self.joined.bounded(to_token - len(self.joined.prompt) - len(self.joined.made))
        fields = self._asks(engine, now, goes_on=True)
        self._asked_tokens, self._ends_at = leg["max_tokens"], to_token
        fetches_front = self._inside and self._handed.used
        self._checks = fetches_front and target == CHAT
        if self._checks:
            leg["return_token_ids"] = True
        elif fetches_front and not self.joined.begun and to_token >= len(self.joined.prompt):
            leg["prompt"] = self.joined.prompt  # the very tokens whose cache it fetches
        silent = Silent(self, self._asked, dumps(leg | fields), now, target.encode())
        self._silent = silent
        silent.go(engine, now)

    def _front_is_enough(self, engine: Engine) -> bool:
        """Whether who goes on behind this engine's leg can compute the last token's KV cache: then the token
        counts that an engine makes when it hands over, which has none yet."""
        following = self._pool.engines.get(self.ticket.next_instance or "")
        return (
            following is not None
            and following.connector is engine.connector
            and all(of.handover is not None and of.handover.bidirectional for of in (engine, following))
        )

    def fetches(self, engine: Engine, now: float) -> bool:
        """Has what the open segment is to fetch held for it; False: nothing comes of that, and its leg is to
        be sent. Either way `pulled` is called, and `begins` where it took a while."""
        self._pull = Pull(self._pool, self, engine)
        return self._pull.begin(now)

    def pulled(self, handed: KvTransfer | None, tokens: int) -> None:
        """That is over: what the open leg fetches, the cache of so many tokens; None: nothing."""
        self._pull = None
        self._handed, self._from_token = handed or KvTransfer(self._pool), tokens

    def begins(self, engine: Engine) -> None:
        """It is sent there now, unless that engine is gone by now."""
        if engine.pool is self._pool:
            self._relay.segment(engine.name, time.monotonic())
        else:
            self._relay.move(engine, "refused", "it was taken out")

    def last(self, engine: Engine, now: float) -> bool:
        """Sends the last segment to its engine; False: the relay itself has to, with `body`."""
        if not self.joined.begun:
            return self._passed(engine, now)
        target, leg = self.joined.last()
        fields = self._asks(engine, now, goes_on=False) if self._from_token else {}
        body = dumps(leg | fields)
        self._send(Rest(self, self._asked, body, self._stream, target.encode(), now), engine, now)
        return True

    def _passed(self, engine: Engine, now: float) -> bool:
        """Sends a whole request that fetches the cache of its prompt, or of the front of it, where its answer
        cannot just pass. A chat that goes on inside its prompt is rendered anew, and must become the very
        tokens whose cache is fetched: nobody else would see that it does not. And an answer that is not
        streamed tells where this engine holds what it computed, which is no client's business."""
        inside, chat = self._inside, self._asked.path == CHAT
        follows = self._mover is not None and self._stream and not self._unjoined
        if not follows and (
            self._unjoined or not self._from_token or not ((chat and inside) or not self._stream)
        ):
            return False
        fields = self._asks(engine, now, goes_on=False) if self._from_token else {}
        if not fields and not follows:
            self._from_token = 0  # nothing is handed over: asked again, it would be counted again
            return False
        # What is handed over is of the very tokens that the first leg had.
        request = self.joined.whole() if inside or (follows and fields) else dict(self.joined.request)
        checks = chat and inside and bool(fields)
        body = dumps(request | fields | ({"return_token_ids": True} if checks or follows else {}))
        self._passes = True
        kind = Followed if follows else Passed
        rest = kind(self, self._asked, body, self._stream, self._asked.path.encode(), now)
        rest.checks = checks
        rest.hides_ids = not self.joined.request.get("return_token_ids")
        self._send(rest, engine, now)
        return True

    @property
    def _inside(self) -> bool:
        """Whether the next leg is handed the cache of the prompt's front alone: it needs the very tokens."""
        return not self.joined.begun and 0 < self._from_token < len(self.joined.prompt)

    def _send(self, rest: Rest, engine: Engine, now: float) -> None:
        self._rest = rest
        if self._mover is not None and self._stream:
            self._mover.running[self.ticket.id] = self
        if self._relay.stalled:
            rest.pause(True)
        rest.go(engine, now)

    def body(self, engine: Engine, now: float) -> bytes:
        """The last leg's body, where its bytes pass."""
        body = self._relay.body  # as the client sent it
        if self._unjoined:
            return body
        fields = self._asks(engine, now, goes_on=False)
        if self._inside:
            body = dumps(self.joined.whole())
        return with_fields(body, fields) if fields else body

    @property
    def speaks(self) -> bool:
        """Whether the client's answer is written here, not passed on by the relay."""
        return self.joined.begun or self._passes

    @property
    def output_tokens(self) -> int:
        """Of the answer, as far as the client has it."""
        return len(self.joined.made) or self._passed_tokens

    @property
    def cached_tokens(self) -> int | None:
        """Of the prompt, as the engine that computed its end counted them."""
        details = self.joined.cached
        found = details.get("cached_tokens") if isinstance(details, dict) else None
        return found if isinstance(found, int) else self._passed_cached

    @property
    def prompt_tokens(self) -> int:
        """Of the prompt."""
        return len(self.joined.prompt)

    @property
    def header(self) -> bytes:
        """A line of the answer's head: who computed the first tokens."""
        first = self._handed.source
        return b"x-lmetric-prefill: %s\r\n" % first.name.encode() if first else b""

    def drop(self) -> None:
        """Gives up what is on its way."""
        if self._mover is not None:
            self._mover.running.pop(self.ticket.id, None)
        if self.move is not None:
            self.move.drop()
        if self._pull is not None:
            self._pull.drop()
            self._pull = None
        self._drop_silent()
        self._drop_rest()

    @property
    def attempt_open(self) -> bool:
        """Whether an engine works on the request, or is asked to prepare it."""
        preparing = self._pull is not None or (self.move is not None and self.move.attempt_open)
        return preparing or super().attempt_open

    def check(self, now: float) -> None:
        """Ends a leg that takes too long."""
        silent, limits = self._silent, self._rules.timeouts
        if silent is not None and not silent.ended and now - silent.started > limits.answer:
            silent.settle("timeout", f"no answer within {limits.answer:g} s")
        elif self._rest is not None:
            self._rest.check(now, limits)
        if self.move is not None:
            self.move.check(now, limits.first_byte)

    # What the silent leg calls.

    def resends(self, silent: Silent) -> bool:
        """Sends a silent leg again without the KV transfer that its first try may have used."""
        if not self._handed.spend():
            return False
        self._silent = None
        self.begin(silent.engine, time.monotonic())
        return True

    def sent(self, now: float) -> None:
        """A leg is on its way."""
        self.ticket.sent(now)

    def answered(self, silent: Silent, status: int, body: bytes) -> None:
        """A silent leg answered."""
        engine, self._silent = silent.engine, None
        if status != 200:
            if not self.busy(status) and self._handed.broke(status, None):
                self.begin(engine, time.monotonic())
            else:
                self.refused(engine, status, body)
            return
        engine.failures = 0
        joined = self.joined
        if self._checks and (why := self._other_prompt(body)):
            self._other_tokens(engine, why)
            self.begin(engine, time.monotonic())
            return
        prompt, cached = usage_of(body)
        made: Made | None = None
        self._handed.begin(engine)
        self._from_token = self._ends_at - self._keeps
        if self._ends_at > len(joined.prompt):
            try:
                answer = object_of(body)
                joined.cached = (answer.get("usage") or {}).get("prompt_tokens_details") or joined.cached
                made = joined.take(answer, self._asked_tokens, whole=self._keeps)
            except MergeError as error:
                if not self._asked_anew(engine, error):
                    return
        if made is not None and made.finish is not None:
            self._end(made, ended=True)
            return
        if engine.connector is not None and not self._unjoined:
            # Of a prompt that the engine made tokens of itself, it knows the number.
            counted = self._ends_at != len(joined.prompt)
            tokens = min(self._ends_at, len(joined.prompt) + len(joined.made)) - self._keeps
            self._handed.accept(engine, body, tokens if counted else None)
        if made is not None:
            self.tell(made)
            if len(made.ids) == len(joined.made) == 1:
                self.ticket.first_token(time.monotonic())
        self._go_on(prompt, cached)

    def _other_prompt(self, body: bytes) -> str | None:
        """Why a silent leg's chat is not the prompt whose front it has fetched."""
        try:
            return other_tokens(self.joined.prompt, object_of(body))
        except MergeError as error:
            return str(error)

    def _asked_anew(self, engine: Engine, error: MergeError) -> bool:
        """The answer so far cannot be joined with what would follow: whether all of it is to be asked for
        anew, where the next leg was to go. It cannot be where somebody has seen some of it."""
        if self._relay.committed:
            self.broken(engine, "reset", str(error))
        elif error.failed:
            self._relay.move(engine, "reset", str(error))
        else:
            self._unjoined = True
            self._pool.not_joinable(self._asked.path, f"{engine.name}: {error}")
        return self._unjoined

    def failed(self, silent: Silent, kind: str, reason: str) -> None:
        """A silent leg failed."""
        self._silent = None
        self._relay.move(silent.engine, kind, reason)

    # What the last leg calls.

    def again(self, rest: Rest) -> None:
        """The last leg could not fetch what was handed over: once more, without."""
        self._rest = None
        self._anew(rest.engine)

    def differs(self, rest: Rest, why: str) -> None:
        """The last leg's prompt is not that of the cache it has fetched: what it says is of no use."""
        self._rest = None
        self._other_tokens(rest.engine, why)
        self._anew(rest.engine)

    def _other_tokens(self, engine: Engine, why: str) -> None:
        """What a leg was handed is the cache of another prompt: to be sent once more, without."""
        self._pool.not_joinable(self._asked.path, f"{engine.name}: {why}")
        self._handed.useless("other_tokens", why)
        self._from_token = 0

    def _anew(self, engine: Engine) -> None:
        now = time.monotonic()
        if not self.last(engine, now):
            self._passes = False
            self._relay.go(engine, now)

    def tell(self, made: Made) -> None:
        """Gives the client what a leg added, where it streams."""
        if not self._stream:
            return
        opening = b"" if self._head_told else self.joined.opening()
        self._commit_stream()
        if made.ids and self.first_token_at is None:
            self.first_token_at = time.monotonic()
        self._relay.say(opening + self.joined.chunk(made))

    def _commit_stream(self) -> None:
        if not self._head_told:
            self._head_told = True
            self._relay.commit_joined(b"text/event-stream; charset=utf-8", None)

    def pass_on(self, data: bytes) -> None:
        """Gives the client an event of the last leg."""
        self._commit_stream()
        if self.first_token_at is None and self.joined.made:
            self.first_token_at = time.monotonic()
        self._relay.say(data)

    def whole(self, body: bytes) -> None:
        """The last leg's answer, not streamed."""
        assert self._rest is not None
        try:
            made = self.joined.take(object_of(body), 1 << 31)
        except MergeError as error:
            self.moved(self._rest, "reset", str(error))
        else:
            self._end(made, ended=False)

    def done(self) -> None:
        """The last leg's stream ended well."""
        self._end(None, ended=False)

    def broken(self, engine: Engine, kind: str, reason: str) -> None:
        """The last leg broke off in the middle."""
        self._rest = None
        self.breaks(engine, kind, reason)

    def breaks(self, engine: Engine, kind: str, reason: str) -> None:
        """An engine failed that had told some of the answer. Where its tokens are known and the request may
        move, another goes on: the target of a move that has begun, or whom the router chooses."""
        mover, move = self._mover, self.move
        may_move = mover is not None and self.ticket.id in mover.running
        if self._relay.tries(engine, "reset" if kind == "engine_error" else kind, reason) and may_move:
            assert mover is not None
            other = self._pool.engines.get(self._elsewhere() or "")
            if move is not None and move.at_once():
                return
            if other is not None and Move(mover, self._pool, self, other).at_once():
                return
        self._relay.gives_up(engine, kind, reason)

    def _elsewhere(self) -> str | None:
        try:
            return self.ticket.elsewhere()
        except (NoInstanceError, TicketError):
            return None

    # What a move calls, and who begins it.

    def move_to(self, target: Engine, now: float) -> bool:
        """Begins to move what runs to another engine; whether it did."""
        assert self._mover is not None  # who asks for it
        return Move(self._mover, self._pool, self, target).begin(now)

    @property
    def path(self) -> str:
        """Of the client's request."""
        return self._asked.path

    def goes_on_here(self, engine: Engine) -> None:
        """The move that was to go on between two legs does not: the next leg, where the last was."""
        raise NotImplementedError

    def silent(self, hearer: Hearer, body: bytes, now: float) -> Silent:
        """A leg that the client does not hear, to be sent."""
        return Silent(hearer, self._asked, body, now, COMPLETIONS.encode())

    def stays(self, rest: Rest, why: str) -> None:
        """What the last leg says cannot be joined with what another would: it stays where it is."""
        self._pool.not_joinable(self._asked.path, f"{rest.engine.name}: {why}")
        if self._mover is not None:
            self._mover.running.pop(self.ticket.id, None)

    def lost(self, error: ApiError) -> None:
        """Nobody goes on with it."""
        self._relay.end_with(error)

    def goes_on_elsewhere(self, handed: KvTransfer | None = None) -> None:
        """What runs is closed where it is, and what is left of it goes to the engine that a move has booked,
        with what was handed over of all that there is. Raises MergeError, and leaves all as it is;
        NoInstanceError: the request has failed."""
        self.joined.catch_up()
        self._drop_silent()
        self._drop_rest()
        self._from_token = 0
        if handed is not None:
            self._handed, self._from_token = handed, len(self.joined.prompt) + len(self.joined.made)
        self._relay.segment(self.ticket.moved(), time.monotonic())

    # Both.

    def _end(self, made: Made | None, *, ended: bool) -> None:
        joined = self.joined
        if self._stream:
            if made is not None:
                self.tell(made)
            self._relay.say(joined.closing(), last=True)
        else:
            assert made is not None
            answer = joined.answer(made)
            self._relay.commit_joined(b"application/json", len(answer))
            self._relay.say(answer, last=True)
        end = self.ticket.ended if ended else self.ticket.finished
        end(prompt_tokens=len(joined.prompt), output_tokens=len(joined.made))
        self._rest = None
        self._relay.joined_end()

    def _asks(self, engine: Engine, now: float, *, goes_on: bool) -> Any:
        """What a leg's body says of handing over."""
        connector, told = engine.connector, engine.handover
        # What was handed over is all of this leg's prompt, or the front of it.
        whole = self._from_token >= len(self.joined.prompt) + len(self.joined.made)
        if (goes_on or not whole) and not (told is not None and told.bidirectional):
            self._handed.forget("not_cut", f"{engine.name} is not known to be in bidirectional mode")
        fields = self._handed.fields(engine, now)
        if connector is None:
            if not goes_on and self._from_token:
                self._handed.recompute("no_connector", f"{engine.name} hands nothing over")
            return {}
        try:
            return connector.asks(fields, goes_on=goes_on, whole=whole)
        except HandoverError as error:
            self._handed.recompute("not_cut", str(error))
            return {}


def object_of(body: bytes) -> dict[str, Any]:
    """A leg's answer. Raises MergeError."""
    try:
        answer = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise MergeError(f"the leg's answer is not JSON: {error}") from None
    if not isinstance(answer, dict):
        raise MergeError("the leg's answer is not a JSON object")
    return answer
