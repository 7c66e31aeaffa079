"""The state of a running request. The executor writes it, and planners read it.

Planners may also create its KV transfer and its merged answer, and use the transfer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from lmetric._core import Decision, Ticket, TokenEncoder
from lmetric.engines.handover import CHAT, FirstSegment
from lmetric.server.api.request import ParsedRequest
from lmetric.server.execution.exchange import ClientRequest, Rules
from lmetric.server.execution.transcript import Transcript
from lmetric.server.execution.transfer import KvTransfer
from lmetric.server.fleet.engine import Engine
from lmetric.server.fleet.pool import Pool
from lmetric.server.fleet.rebalancer import Rebalancer
from lmetric.tokens import Tokens


class Progress:
    """One request: the client's request, its ticket, and the answers of its engines so far.

    Values that are equal for most requests are class attributes, which saves setting them for each
    request.
    """

    rules: Rules
    client_request: ClientRequest
    pool: Pool
    decision: Decision
    ticket: Ticket
    body: bytes  # as the client sent it, until the executor commits to an answer
    stream: bool
    first: FirstSegment | None  # the body for a prefill, once it is known
    # Set if it may be split, move, or get a prefix fetch; until a transcript has its tokens.
    call: ParsedRequest | None
    encoder: TokenEncoder | None = None  # of the model's tokenizer
    mover: Rebalancer | None  # set if it may move
    resumes: bool = False  # after a failure, another engine may continue the answer
    kv: KvTransfer | None  # for the next step
    transcript: Transcript | None = None  # set if several engines may give its answer
    unmergeable: bool = False  # its first answer could not be merged: one engine answers it
    has_tokens: bool = False  # the open segment has produced a token
    prefill_engine: Engine | None  # computes the prompt for another engine
    paired_body: bytes | None  # the body of both steps that run at once
    tried_engines: tuple[str, ...] = ()  # engines with an attempt, once it is hedged

    @property
    def observed(self) -> bool:
        """Whether the tokens of its stream must be recorded while they pass."""
        return self.resumes and self.stream and not self.unmergeable

    def continues_at(self, engine: Engine) -> bool:
        """Returns whether an engine reports token ids, so that its answer can be continued.

        With a rebalancer, engines of unknown type are asked for them, too.
        """
        return engine.capabilities.token_ids or self.mover is not None

    @property
    def limit_seconds(self) -> float:
        """The time limit of its client's answer: of a stream to its first byte, else to its end."""
        limits = self.rules.timeouts
        return limits.first_byte if self.stream else limits.answer

    @property
    def begun(self) -> bool:
        """Whether some of its answer is known as tokens."""
        return self.transcript is not None and self.transcript.begun

    @property
    def chat(self) -> bool:
        """Whether it is a chat. Engines render its prompt themselves."""
        return self.client_request.path == CHAT

    @property
    def request(self) -> Mapping[str, Any]:
        """The client's request; without the prompt once that is no longer needed."""
        if self.transcript is not None:
            return self.transcript.request
        assert self.call is not None  # set for all requests that use this
        return self.call.request

    @property
    def prompt(self) -> Tokens:
        """The tokens of the prompt."""
        if self.transcript is not None:
            return self.transcript.prompt
        assert self.call is not None
        return np.asarray(self.call.tokens, dtype=np.uint32)

    @property
    def total(self) -> int:
        """The number of tokens in the prompt and the answer so far; 0: not known."""
        if self.transcript is not None:
            return len(self.transcript.prompt) + len(self.transcript.output_ids)
        return len(self.call.tokens) if self.call is not None and self.call.tokens is not None else 0

    @property
    def inside(self) -> bool:
        """Whether the next step's KV transfer covers only a part of the prompt.

        Then its prompt must have the same tokens.
        """
        transferred = self.kv.tokens if self.kv is not None else 0
        return 0 < transferred < self.total and not self.begun

    def transfer(self) -> KvTransfer:
        """Returns the KV transfer to the next step; creates it on first use."""
        if self.kv is None:
            self.kv = KvTransfer(self.pool)
        return self.kv

    def merged(self) -> Transcript:
        """Returns the merged answer; creates it on first use."""
        if self.transcript is None:
            call = self.call
            assert call is not None  # the request may be split or moved
            assert call.tokens is not None
            assert self.encoder is not None
            self.transcript = Transcript(self.client_request.path, call.request, call.tokens, self.encoder)
            self.call = None
        return self.transcript
