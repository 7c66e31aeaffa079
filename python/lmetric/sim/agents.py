"""Synthetic agent programs: long sessions with tool calls, forks into subagents, and chats beside
them.

The defaults follow published figures of coding agents (vLLM issue 57103): a median of 43 turns,
some 140,000 tokens at the end, and 450 output tokens a turn. Over 96% of the input tokens are
repeated. The other figures are assumptions of this project.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from pydantic import Field

from lmetric.sim.distributions import (
    Described,
    Distribution,
    Floats,
    Ints,
    LogNormal,
    Quantiles,
    SyntheticError,
    draw,
    draw_whole,
)
from lmetric.sim.traces import FINISH, Trace

_STOP, _TOOL_CALLS = FINISH.index("stop"), FINISH.index("tool_calls")
_MOST_PROGRAMS = 200_000


def _evenly(least: int, most: int) -> Quantiles:
    """Whole numbers from `least` to `most`, all equally likely once rounded."""
    return Quantiles(quantiles={0: least - 0.49, 1: most + 0.49})


@dataclass(slots=True)
class _Request:
    """A request before the trace is sorted."""

    earliest: float  # arrival with immediate answers
    prompt: int
    output: int
    ids: list[int]  # of whole blocks
    session: int
    program: int  # -1: a chat
    think: float = 0.0
    previous: _Request | None = None
    joins: list[_Request] = field(default_factory=list)
    last: bool = True  # of its agent
    number: int = -1  # in the trace


class AgentsTrace(Described):
    """Agent programs that fork, and chats. A turn waits for the previous answer and then for its
    tools.

    A program's prompt grows from turn to turn: it is the previous prompt, its answer, and new
    tokens. A fork starts subagents with the whole context so far. The agent's next turn waits for
    all of them.
    """

    synthetic: Literal["agents"] = "agents"
    seed: int = Field(default=0, ge=0)
    instances: int = Field(default=8, gt=0, le=10_000, description="Rates are for each of so many instances.")
    rate: float = Field(default=0.006, gt=0, description="Sessions per second and instance (Poisson).")
    duration_seconds: float = Field(
        default=5400.0, gt=0, description="Sessions and chats begin in this time."
    )
    system_prompts: tuple[int, ...] = Field(
        default=(15_000, 17_500, 20_000), min_length=1, description="Tokens of the shared system prompts."
    )
    turns: Distribution = Field(
        default_factory=lambda: LogNormal(p50=43, p90=81.6), description="Turns of an agent, at least 1."
    )
    input_tokens: Distribution = Field(
        default_factory=lambda: LogNormal(p50=2000, mean=2500), description="New prompt tokens of a turn."
    )
    output_tokens: Distribution = Field(
        default_factory=lambda: LogNormal(p50=300, mean=450), description="Tokens of an answer."
    )
    gap_seconds: Distribution = Field(
        default_factory=lambda: LogNormal(p50=2, p99=51.95), description="Time that a turn's tools take."
    )
    gap_sigma: float = Field(
        default=0.5, ge=0, le=5, description="Sigma of a log-normal factor of a program's gaps, median 1."
    )
    max_context_tokens: int = Field(
        default=180_000, gt=0, le=2**30, description="An agent ends before its context exceeds this."
    )
    fork_share: float = Field(default=0.44, ge=0, le=1, description="Share of the sessions that fork.")
    forks: Distribution = Field(
        default_factory=lambda: _evenly(1, 3), description="Forks of such a session, each after another turn."
    )
    subagents: Distribution = Field(default_factory=lambda: _evenly(1, 3), description="Subagents of a fork.")
    subagent_turns: Distribution = Field(
        default_factory=lambda: _evenly(1, 6), description="Turns of a subagent."
    )
    chat_rate: float = Field(
        default=0.022, ge=0, description="Chats per second and instance (Poisson): some 0.1 turns per second."
    )
    chat_turns: Distribution = Field(default_factory=lambda: _evenly(1, 8), description="Turns of a chat.")
    chat_input_tokens: Distribution = Field(
        default_factory=lambda: LogNormal(p50=300, mean=600),
        description="New prompt tokens of a chat's turn.",
    )
    chat_gap_seconds: Distribution = Field(
        default_factory=lambda: LogNormal(p50=10, p90=60, max=600),
        description="Time from an answer to a chat's next turn.",
    )
    finish_accuracy: float = Field(
        default=0.97, ge=0, le=1, description="Share of the answers whose reason to end tells what follows."
    )
    block_tokens: int = Field(default=512, gt=0, le=2**20, description="Prompt tokens per hash ID.")

    def make(self) -> Trace:
        """Makes the trace. `arrival_seconds` of later turns assumes immediate answers.

        Raises `SyntheticError` if no session begins.
        """
        starts = self._starts("sessions", self.rate)
        if not len(starts):
            raise SyntheticError(
                f"no session in {self.duration_seconds:g} s with seed {self.seed}: increase rate or "
                "duration_seconds"
            )
        chats = self._starts("chats", self.chat_rate)
        if len(starts) + len(chats) > _MOST_PROGRAMS:
            raise SyntheticError(
                f"{len(starts) + len(chats):,} sessions and chats: at most {_MOST_PROGRAMS:,}"
            )
        ids = _Ids()
        shared = [ids.new(tokens // self.block_tokens) for tokens in self.system_prompts]
        requests: list[_Request] = []
        for number, start in enumerate(starts.tolist()):
            requests += self._session(number, start, shared, ids)
        for number, start in enumerate(chats.tolist(), start=len(starts)):
            requests += self._chat(number, start, ids)
        return self._trace(requests, ids)

    def _rng(self, purpose: str) -> np.random.Generator:
        return np.random.default_rng([self.seed, zlib.crc32(purpose.encode())])

    def _starts(self, purpose: str, rate: float) -> Floats:
        """Arrivals of a Poisson process in [0, duration_seconds), sorted."""
        rng = self._rng(purpose)
        count = rng.poisson(rate * self.instances * self.duration_seconds)
        return np.sort(rng.random(count) * self.duration_seconds)

    def _session(self, number: int, start: float, shared: list[list[int]], ids: _Ids) -> Iterator[_Request]:
        """The requests of a session, each behind those that it waits for."""
        rng = self._rng(f"session {number}")
        which = int(rng.integers(len(shared)))
        pace = float(np.exp(self.gap_sigma * rng.standard_normal()))
        turns = int(draw_whole(self.turns, 1, rng, least=1)[0])
        forks: set[int] = set()
        if rng.random() < self.fork_share and turns > 1:
            count = min(int(draw_whole(self.forks, 1, rng, least=1)[0]), turns - 1)
            forks = set(rng.choice(turns - 1, count, replace=False).tolist())
        stream = list(shared[which])
        agent = self._agent(
            number, number, rng, turns, pace, (self.system_prompts[which], stream), start, None, ids
        )
        children: list[_Request] = []
        for turn, request in enumerate(agent):
            if children:
                request.joins = children
                request.earliest = max(child.earliest for child in children) + request.think
                children = []
            yield request
            if turn in forks:
                request.last = False
                for _ in range(int(draw_whole(self.subagents, 1, rng, least=1)[0])):
                    length = int(draw_whole(self.subagent_turns, 1, rng, least=1)[0])
                    context = request.prompt + request.output, list(stream)
                    child = list(
                        self._agent(
                            number, number, rng, length, pace, context, request.earliest, request, ids
                        )
                    )
                    yield from child
                    children += child[-1:]

    def _agent(
        self,
        session: int,
        program: int,
        rng: np.random.Generator,
        turns: int,
        pace: float,
        context: tuple[int, list[int]],
        start: float,
        parent: _Request | None,
        ids: _Ids,
    ) -> Iterator[_Request]:
        """The turns of an agent or subagent. `context` has the tokens that it begins with and the
        ids of their whole blocks, which grow from turn to turn."""
        own = draw_whole(self.input_tokens, turns, rng, least=1)
        output = draw_whole(self.output_tokens, turns, rng, least=1)
        gaps = draw(self.gap_seconds, turns, rng) * pace
        tokens, stream = context
        previous, at = parent, start
        made: _Request | None = None
        for turn in range(turns):
            total = tokens + int(own[turn]) + int(output[turn])
            if (turn > 0 or parent is not None) and total > self.max_context_tokens:
                break
            prompt = min(tokens + int(own[turn]), self.max_context_tokens - 1)
            answer = min(int(output[turn]), self.max_context_tokens - prompt)
            if made is not None:
                made.last = False
            think = float(gaps[turn]) if turn > 0 else 0.0
            stream += ids.new((prompt // self.block_tokens) - len(stream))
            at = (at if previous is None else previous.earliest) + think
            blocks = stream[: prompt // self.block_tokens]
            made = _Request(at, prompt, answer, blocks, session, program, think, previous)
            tokens, previous = prompt + answer, made
            # The answer's whole blocks are part of the context that a fork shares.
            stream += ids.new(tokens // self.block_tokens - len(stream))
            yield made

    def _chat(self, number: int, start: float, ids: _Ids) -> Iterator[_Request]:
        rng = self._rng(f"chat {number}")
        turns = int(draw_whole(self.chat_turns, 1, rng, least=1)[0])
        own = draw_whole(self.chat_input_tokens, turns, rng, least=1)
        output = draw_whole(self.output_tokens, turns, rng, least=1)
        gaps = draw(self.chat_gap_seconds, turns, rng)
        stream: list[int] = []
        tokens, previous, at = 0, None, start
        for turn in range(turns):
            prompt = tokens + int(own[turn])
            if prompt + int(output[turn]) > self.max_context_tokens:
                break
            at += float(gaps[turn]) if turn else 0.0
            tokens = prompt + int(output[turn])
            stream += ids.new(tokens // self.block_tokens - len(stream))
            blocks = stream[: prompt // self.block_tokens]
            think = float(gaps[turn]) if turn else 0.0
            previous = _Request(at, prompt, int(output[turn]), blocks, number, -1, think, previous)
            yield previous

    def _trace(self, requests: list[_Request], ids: _Ids) -> Trace:
        """The trace of all requests, in order of arrival."""
        order = sorted(requests, key=lambda request: request.earliest)
        for number, request in enumerate(order):
            request.number = number
        blocks = [request.ids + ids.new(int(request.prompt % self.block_tokens > 0)) for request in order]
        offsets = np.concatenate(([0], np.cumsum([len(each) for each in blocks])))
        rng = self._rng("finish")
        right = rng.random(len(order)) < self.finish_accuracy
        follows = np.array([request.program >= 0 and not request.last for request in order])
        joins = [(request.number, each.number) for request in order for each in request.joins]

        def column(values: Iterator[int]) -> Ints:
            return np.fromiter(values, np.int64, len(order))

        return Trace(
            name=f"agents-{self.seed}",
            arrival_seconds=np.array([request.earliest for request in order]),
            input_tokens=column(request.prompt for request in order),
            output_tokens=column(request.output for request in order),
            hash_offsets=offsets.astype(np.int64),
            hash_ids=np.concatenate([np.array(each, np.uint64) for each in blocks]),
            block_tokens=self.block_tokens,
            sessions=column(request.session for request in order),
            previous=column(-1 if r.previous is None else r.previous.number for r in order),
            think_seconds=np.array([request.think for request in order]),
            joins=np.array(joins, np.int64).reshape(-1, 2),
            programs=column(request.program for request in order),
            finish=np.where(follows == right, _TOOL_CALLS, _STOP).astype(np.int64),
        )


class _Ids:
    """Hash IDs, each given once."""

    def __init__(self) -> None:
        self._next = 0

    def new(self, count: int) -> list[int]:
        """`count` new ids; none if `count` is below 0."""
        first = self._next
        self._next += max(0, count)
        return list(range(first, self._next))
