"""What is known of a request while it runs. The executor writes it. Planners read it; they may begin its KV
transfer and its merged answer, and use the transfer up.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from lmetric._core import Decision, Ticket, TokenEncoder
from lmetric.engines.handover import CHAT
from lmetric.server.api.request import ParsedRequest
from lmetric.server.execution.exchange import ClientRequest, Rules
from lmetric.server.execution.transcript import Transcript
from lmetric.server.execution.transfer import KvTransfer
from lmetric.server.fleet.engine import Engine
from lmetric.server.fleet.pool import Pool
from lmetric.server.fleet.rebalancer import Rebalancer
from lmetric.tokens import Tokens


class Progress:
    """One request: what its client asked for, its ticket, and what its engines have said so far.

    What most requests leave as it is stands at the class: it is not set for each of them.
    """

    rules: Rules
    asked: ClientRequest
    pool: Pool
    decision: Decision
    ticket: Ticket
    body: bytes  # as the client sent it, until an answer is committed to
    stream: bool
    # Where it may be cut, move, or fetch its prompt's front; until a transcript has its tokens.
    call: ParsedRequest | None
    encoder: TokenEncoder | None = None  # of its tokens' tokenizer
    mover: Rebalancer | None  # where it may move
    kv: KvTransfer | None  # for the next step
    transcript: Transcript | None = None  # where its answer comes from several engines, or may
    unmergeable: bool = False  # its first answer could not be merged: it is answered whole
    has_tokens: bool = False  # the open segment has told a token
    prefill_engine: Engine | None  # that computes the prompt, where another decodes
    paired_body: bytes | None  # the body of both steps, where these run at once
    # Of sliced decoding.
    in_slices: bool = False
    slice_tokens: int = 0  # of the slice that runs
    slice_rate: float = 0.0  # seconds a token, of the last slice
    last_slice_at: float = 0.0  # its end, seconds on the monotonic clock
    slice_fetches: bool = False  # what was there then, with the first slice elsewhere

    @property
    def sliced(self) -> bool:
        """Whether it runs in slices, where its engine lets it."""
        return self.mover is not None and self.mover.by == "legs"

    @property
    def observed(self) -> bool:
        """Whether the tokens of its stream are to be known while they pass."""
        return self.mover is not None and self.stream and not self.unmergeable

    @property
    def limit_seconds(self) -> float:
        """That its client's answer is waited for: to its first byte, or to its end."""
        limits = self.rules.timeouts
        return limits.first_byte if self.stream else limits.answer

    @property
    def begun(self) -> bool:
        """Whether some of its answer is known as tokens."""
        return self.transcript is not None and self.transcript.begun

    @property
    def chat(self) -> bool:
        """Whether it is a chat, whose prompt engines render themselves."""
        return self.asked.path == CHAT

    @property
    def request(self) -> Mapping[str, Any]:
        """The client's request, without its prompt once that is no longer sent."""
        if self.transcript is not None:
            return self.transcript.request
        assert self.call is not None  # else nobody looks at it
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
        """Tokens of the prompt and of the answer so far; 0: they are not known."""
        if self.transcript is not None:
            return len(self.transcript.prompt) + len(self.transcript.output_ids)
        return len(self.call.tokens) if self.call is not None and self.call.tokens is not None else 0

    @property
    def inside(self) -> bool:
        """Whether the next step is handed the cache of the prompt's front alone: it needs the very tokens."""
        handed = self.kv.tokens if self.kv is not None else 0
        return 0 < handed < self.total and not self.begun

    def transfer(self) -> KvTransfer:
        """What is handed over to the next step."""
        if self.kv is None:
            self.kv = KvTransfer(self.pool)
        return self.kv

    def merged(self) -> Transcript:
        """The answer of several engines, from now on."""
        if self.transcript is None:
            call = self.call
            assert call is not None  # else it is neither cut between equals nor moved
            assert call.tokens is not None
            assert self.encoder is not None
            self.transcript = Transcript(self.asked.path, call.request, call.tokens, self.encoder)
            self.call = None
        return self.transcript
