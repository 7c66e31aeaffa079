"""Synthetic agent programs: long sessions with tool calls, forks into subagents, and chats beside
them.

The defaults follow published figures of coding agents (vLLM issue 57103): a median of 43 turns,
some 140,000 tokens at the end, and 450 output tokens a turn. Over 96% of the input tokens are
repeated. The other figures are assumptions of this project.
`lmetric_lab/data/coding_agents.yaml` has other values, fitted to recorded sessions
(docs/research/agent_workload.md).
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from lmetric_lab.sim.distributions import (
    Described,
    Distribution,
    Floats,
    Ints,
    LogNormal,
    Quantiles,
    SyntheticError,
    check_shares,
    draw,
    draw_whole,
)
from lmetric_lab.sim.traces.trace import FINISH, Trace

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
    person: bool = False  # a person sends the next turn
    number: int = -1  # in the trace


@dataclass(slots=True)
class _Course:
    """Changes to the plain growth of an agent's context. The arrays have a value for each turn."""

    first_tokens: int | None = None  # of the first prompt
    by_person: NDArray[np.bool_] | None = None  # a person sends the turn, not a tool
    person_gaps: Floats | None = None
    ratios: Floats | None = None  # of a rewritten prompt to the previous prompt; 0: not rewritten
    compact_ratios: Floats | None = None
    kept_tokens: Ints | None = None  # of a rewritten or compacted context
    compact_at: float = float("inf")


class SessionKind(Described):
    """A share of the sessions with separate first prompts and numbers of turns."""

    share: float = Field(gt=0, le=1, description="Of all sessions.")
    first_tokens: Distribution = Field(description="Tokens of the first prompt after the system prompt.")
    turns: Distribution = Field(description="Turns of the main agent, at least 1.")


class People(Described):
    """Answers of the main agent after which a person, not a tool, sends the next turn."""

    share: Distribution = Field(description="Share of such answers, drawn for each session; 1 at most.")
    gap_seconds: Distribution = Field(description="Time from such an answer to the next turn.")
    gap_sigma: float = Field(
        default=0.0, ge=0, le=5, description="Sigma of a log-normal factor of a session's gaps, median 1."
    )
    rewrite_share: float = Field(
        default=0.0, ge=0, le=1, description="Share of the next turns with a rewritten context."
    )

    @model_validator(mode="after")
    def _has_a_share(self) -> People:
        most = self.share
        if isinstance(most, Quantiles):
            most = max(most.quantiles.values())
        elif isinstance(most, LogNormal):
            most = float("inf") if most.max is None else most.max
        if most > 1:
            raise ValueError(f"share must be 1 at most, got {most:g}")
        return self


class Rewrites(Described):
    """Turns of the main agent whose prompt keeps only the beginning of the context."""

    share: float = Field(
        default=0.0, ge=0, le=1, description="Share of the turns after tools with a rewritten context."
    )
    kept_tokens: Distribution = Field(description="First tokens of the context that stay.")
    ratio: Distribution = Field(description="Tokens of a rewritten prompt per token of the previous prompt.")
    compact_at_tokens: Distribution | None = Field(
        default=None,
        description="Prompts longer than this are compacted; drawn for each session. A session with a "
        "longer first prompt is never compacted. None: no session is.",
    )
    compact_ratio: Distribution = Field(
        default=0.2, description="Tokens of a compacted prompt per token of the previous prompt."
    )


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
    sessions: int | None = Field(
        default=None,
        gt=0,
        le=_MOST_PROGRAMS,
        description="Number of sessions. None: as many as begin in duration_seconds.",
    )
    system_prompts: tuple[int, ...] = Field(
        default=(15_000, 17_500, 20_000), min_length=1, description="Tokens of the shared system prompts."
    )
    first_tokens: Distribution | None = Field(
        default=None,
        description="Tokens of the first prompt after the system prompt. None: as input_tokens.",
    )
    kinds: tuple[SessionKind, ...] = Field(
        default=(), description="Shares of the sessions with separate first prompts and turns."
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
    input_sigma: float = Field(
        default=0.0, ge=0, le=5, description="Sigma of a log-normal factor of a session's input_tokens."
    )
    people: People | None = Field(default=None, description="None: tools send all turns after the first.")
    rewrites: Rewrites | None = Field(default=None, description="None: contexts only grow.")
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
    subagent_first_tokens: Distribution | None = Field(
        default=None,
        description="Tokens of a subagent's first prompt, which shares nothing. None: the agent's context "
        "and a turn's input_tokens.",
    )
    subagent_input_tokens: Distribution | None = Field(
        default=None, description="New prompt tokens of a subagent's turn. None: as input_tokens."
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

    @model_validator(mode="after")
    def _has_valid_shares(self) -> AgentsTrace:
        check_shares(kind.share for kind in self.kinds)
        return self

    def make(self) -> Trace:
        """Makes the trace. `arrival_seconds` of later turns assumes immediate answers.

        Raises `SyntheticError` if no session begins.
        """
        starts = self._session_starts()
        if not len(starts):
            raise SyntheticError(
                f"no session in {self.duration_seconds:g} s with seed {self.seed}: increase rate or "
                "duration_seconds"
            )
        end = self.duration_seconds if self.sessions is None else float(starts[-1])
        chats = self._starts("chats", self.chat_rate, end)
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

    def _session_starts(self) -> Floats:
        """Arrivals of the sessions, sorted."""
        if self.sessions is None:
            return self._starts("sessions", self.rate, self.duration_seconds)
        mean = 1 / (self.rate * self.instances)
        return np.cumsum(self._rng("sessions").exponential(mean, self.sessions))

    def _starts(self, purpose: str, rate: float, end: float) -> Floats:
        """Arrivals of a Poisson process in [0, end), sorted."""
        rng = self._rng(purpose)
        count = rng.poisson(rate * self.instances * end)
        return np.sort(rng.random(count) * end)

    def _kind(self, rng: np.random.Generator) -> tuple[Distribution | None, Distribution]:
        """First prompt and turns of a session of a random kind."""
        ends = np.cumsum([kind.share for kind in self.kinds])
        which = int(np.searchsorted(ends, rng.random(), side="right"))
        if which < len(self.kinds):
            return self.kinds[which].first_tokens, self.kinds[which].turns
        return self.first_tokens, self.turns

    def _course(
        self, first: Distribution | None, system: int, turns: int, forks: set[int], rng: np.random.Generator
    ) -> _Course:
        """The first prompt, people and rewrites of a session's main agent."""
        course = _Course()
        if first is not None:
            course.first_tokens = system + int(draw_whole(first, 1, rng, least=1)[0])
        share = np.full(turns, 0.0 if self.rewrites is None else self.rewrites.share)
        if self.people is not None:
            factor = np.exp(self.people.gap_sigma * rng.standard_normal())
            course.by_person = rng.random(turns) < draw(self.people.share, 1, rng)[0]
            course.by_person[[0, *(fork + 1 for fork in forks)]] = False  # subagents come back as tools
            course.person_gaps = draw(self.people.gap_seconds, turns, rng) * factor
            share = np.where(course.by_person, self.people.rewrite_share, share)
        if (rewrites := self.rewrites) is not None:
            rewritten = rng.random(turns) < share
            course.ratios = np.where(rewritten, draw(rewrites.ratio, turns, rng), 0.0)
            course.kept_tokens = draw_whole(rewrites.kept_tokens, turns, rng, least=0)
            course.compact_ratios = draw(rewrites.compact_ratio, turns, rng)
            if rewrites.compact_at_tokens is not None:
                course.compact_at = float(draw(rewrites.compact_at_tokens, 1, rng)[0])
        return course

    def _session(self, number: int, start: float, shared: list[list[int]], ids: _Ids) -> Iterator[_Request]:
        """The requests of a session, each behind those that it waits for."""
        rng = self._rng(f"session {number}")
        # Optional fields draw from their own stream, so that they do not change the other draws.
        optional = self._rng(f"course of session {number}")
        which = int(rng.integers(len(shared)))
        pace = float(np.exp(self.gap_sigma * rng.standard_normal()))
        first, of_kind = self._kind(optional)
        turns = int(draw_whole(of_kind, 1, rng, least=1)[0])
        forks: set[int] = set()
        if rng.random() < self.fork_share and turns > 1:
            count = min(int(draw_whole(self.forks, 1, rng, least=1)[0]), turns - 1)
            forks = set(rng.choice(turns - 1, count, replace=False).tolist())
        stream = list(shared[which])
        growth = float(np.exp(self.input_sigma * optional.standard_normal()))
        course = self._course(first, self.system_prompts[which], turns, forks, optional)
        agent = self._agent(
            number, rng, turns, pace, growth, (self.system_prompts[which], stream), start, None, course, ids
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
                    context, alone = (request.prompt + request.output, list(stream)), _Course()
                    if (fresh := self.subagent_first_tokens) is not None:
                        context = 0, []
                        alone.first_tokens = int(draw_whole(fresh, 1, optional, least=1)[0])
                    child = list(
                        self._agent(
                            number, rng, length, pace, growth, context, request.earliest, request, alone, ids
                        )
                    )
                    yield from child
                    children += child[-1:]

    def _agent(
        self,
        session: int,
        rng: np.random.Generator,
        turns: int,
        pace: float,
        growth: float,
        context: tuple[int, list[int]],
        start: float,
        parent: _Request | None,
        course: _Course,
        ids: _Ids,
    ) -> Iterator[_Request]:
        """The turns of an agent or subagent. `context` has the tokens that it begins with and the
        ids of their whole blocks, which grow from turn to turn. `pace` and `growth` are the
        session's factors of gaps and new tokens."""
        inputs = self.input_tokens
        if parent is not None and self.subagent_input_tokens is not None:
            inputs = self.subagent_input_tokens
        own = np.maximum(1, np.rint(draw_whole(inputs, turns, rng, least=1) * growth)).astype(np.int64)
        output = draw_whole(self.output_tokens, turns, rng, least=1)
        gaps = draw(self.gap_seconds, turns, rng) * pace
        if course.by_person is not None and course.person_gaps is not None:
            gaps = np.where(course.by_person, course.person_gaps, gaps)
        tokens, stream = context
        previous, at = parent, start
        made: _Request | None = None
        for turn in range(turns):
            prompt = tokens + int(own[turn])
            if turn == 0 and course.first_tokens is not None:
                prompt = course.first_tokens
            elif made is not None:
                prompt = self._rewritten(prompt, made, turn, course, stream)
            total = prompt + int(output[turn])
            if (turn > 0 or parent is not None) and total > self.max_context_tokens:
                break
            prompt = min(prompt, self.max_context_tokens - 1)
            answer = min(int(output[turn]), self.max_context_tokens - prompt)
            if made is not None:
                made.last = False
                made.person = course.by_person is not None and bool(course.by_person[turn])
            think = float(gaps[turn]) if turn > 0 else 0.0
            stream += ids.new((prompt // self.block_tokens) - len(stream))
            at = (at if previous is None else previous.earliest) + think
            blocks = stream[: prompt // self.block_tokens]
            made = _Request(at, prompt, answer, blocks, session, session, think, previous)
            tokens, previous = prompt + answer, made
            # The answer's whole blocks are part of the context that a fork shares.
            stream += ids.new(tokens // self.block_tokens - len(stream))
            if prompt > course.compact_at and turn == 0:
                course.compact_at = float("inf")
            yield made

    def _rewritten(self, prompt: int, before: _Request, turn: int, course: _Course, stream: list[int]) -> int:
        """The tokens of a prompt that would have `prompt` tokens if its context only grew.

        A rewritten context loses the ids behind its kept tokens.
        """
        if course.ratios is None or course.compact_ratios is None or course.kept_tokens is None:
            return prompt
        ratio = float(course.ratios[turn])
        if prompt > course.compact_at:
            ratio = float(course.compact_ratios[turn])
        if ratio == 0:
            return prompt
        kept = min(int(course.kept_tokens[turn]), before.prompt)
        del stream[kept // self.block_tokens :]
        return max(kept + 1, round(before.prompt * ratio))

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
        follows = np.array([r.program >= 0 and not r.last and not r.person for r in order])
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
