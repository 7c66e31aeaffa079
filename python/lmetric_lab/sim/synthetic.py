"""Synthetic traces from a description: arrivals, lengths, shared prefixes, conversations, hot
spots.

Use a description in a study's YAML, or `SyntheticTrace.make` in Python. Equal descriptions give
identical traces::

    {synthetic: sessions, seed: 1, rate: 0.5, duration_seconds: 600, arrivals: {cv: 2},
     input_tokens: {p50: 200, mean: 400}, output_tokens: {quantiles: {0: 1, 0.5: 200, 1: 2000}},
     turns: {quantiles: {0: 1, 1: 8}}, think_seconds: {p50: 10, p90: 60},
     prefixes: {count: 20, zipf: 1.0, tokens: 1000}}

``{synthetic: agents, seed: 1}`` makes agent programs (`lmetric_lab.sim.agents`), with defaults
for all keys.

`lengths: sharegpt-like` sets both lengths (`lmetric_lab.sim.distributions.LENGTHS`).

Each purpose (arrivals, lengths, prefixes, ...) has its own random stream, so a change of one leaves
the others unchanged. For example, a hot spot changes only the prompts of hot requests (and block
numbers), but not the arrivals, answers and families of a trace.
"""

from __future__ import annotations

import zlib
from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, TypeVar, get_args

import numpy as np
from numpy.typing import NDArray
from pydantic import Discriminator, Field, Tag, TypeAdapter, ValidationError, model_validator

from lmetric.validation import expected
from lmetric_lab.defaults import no_trace, trace_path
from lmetric_lab.sim.agents import AgentsTrace
from lmetric_lab.sim.distributions import (
    LENGTHS,
    Described,
    Distribution,
    Floats,
    Ints,
    Kind,
    LogNormal,
    Quantiles,
    SyntheticError,
    check_shares,
    draw,
    draw_whole,
)
from lmetric_lab.sim.traces.trace import Trace

Number = TypeVar("Number", np.float64, np.int64)

_MOST_REQUESTS = 5_000_000
_MOST_BLOCKS = 200_000_000


class Gamma(Described):
    """Gamma-distributed gaps: bursty above a coefficient of variation of 1, regular below."""

    cv: float = Field(gt=0, le=100, description="Standard deviation of the gaps over their mean; 1: Poisson.")


class OnOff(Described):
    """Poisson arrivals with exponential busy and quiet times. `rate` is the mean over both."""

    on_seconds: float = Field(gt=0, description="Mean length of a busy period.")
    off_seconds: float = Field(gt=0, description="Mean length of a quiet period.")
    off_share: float = Field(
        default=0, ge=0, lt=1, description="Rate in quiet periods relative to busy ones."
    )


def _arrivals_kind(value: Any) -> str:
    if isinstance(value, OnOff) or (
        isinstance(value, Mapping) and {"on_seconds", "off_seconds"} & set(value)
    ):
        return "on-off"
    return "gamma" if isinstance(value, Gamma | Mapping) else "poisson"


Arrivals = Annotated[
    Annotated[Literal["poisson"], Tag("poisson")]
    | Annotated[Gamma, Tag("gamma")]
    | Annotated[OnOff, Tag("on-off")],
    Discriminator(_arrivals_kind),
]


class Prefixes(Described):
    """Families of requests with a common prefix: system prompts, tools, documents."""

    count: int = Field(gt=0, le=1_000_000, description="Number of families.")
    tokens: Distribution = Field(description="Length of each family's prefix.")
    zipf: float = Field(default=1.0, ge=0, description="Family k has a weight of 1 / k^zipf; 0: all equal.")
    share: float = Field(default=1.0, ge=0, le=1, description="Share of the requests with a prefix.")


class HotSpot(Described):
    """A hot spot: for some time, a share of the arrivals begins with one new prefix.

    Source: LMETRIC, section 5.2 (KV hotspots).
    """

    start_seconds: float = Field(ge=0)
    seconds: float = Field(gt=0, description="Duration.")
    share: float = Field(gt=0, le=1, description="Share of the arrivals in that time.")
    tokens: int = Field(gt=0, le=10_000_000, description="Length of the hot prefix.")


class _Synthetic(Described):
    seed: int = Field(default=0, ge=0)
    rate: float = Field(gt=0, description="Mean arrivals per second, of requests or of sessions.")
    duration_seconds: float = Field(gt=0, description="Arrivals lie in [0, duration_seconds).")
    arrivals: Arrivals = Field(
        default="poisson", description="poisson, {cv: ...} or {on_seconds: ..., off_seconds: ...}."
    )
    input_tokens: Distribution = Field(description="New prompt tokens of a request, without shared ones.")
    output_tokens: Distribution = Field(description="Tokens of an answer; at least 1.")
    kinds: tuple[Kind, ...] = Field(
        default=(), description="Shares of the requests (or sessions) with separate lengths."
    )
    prefixes: Prefixes | None = None
    hot_spot: HotSpot | None = None
    block_tokens: int = Field(default=16, gt=0, le=2**20, description="Prompt tokens per hash ID.")
    max_prompt_tokens: int = Field(
        default=131_072,
        gt=0,
        le=2**30,
        description="Longer prompts are cut; a session ends before a longer turn.",
    )

    @model_validator(mode="before")
    @classmethod
    def _named_lengths(cls, content: Any) -> Any:
        """Expands `lengths: sharegpt-like` to the input_tokens, output_tokens and kinds of that
        name."""
        if not isinstance(content, Mapping) or "lengths" not in content:
            return content
        rest = {key: value for key, value in content.items() if key != "lengths"}
        if twice := sorted({"input_tokens", "output_tokens", "kinds"} & set(rest)):
            raise ValueError(f"set lengths or {twice[0]}, not both")
        named = LENGTHS.get(str(content["lengths"]))
        if named is None:
            raise ValueError(f"lengths must be one of {', '.join(LENGTHS)}, got {content['lengths']!r}")
        return {**rest, **dict(named)}

    @model_validator(mode="after")
    def _is_of_a_size(self) -> _Synthetic:
        check_shares(kind.share for kind in self.kinds)
        if self.rate * self.duration_seconds > _MOST_REQUESTS:
            raise ValueError(
                f"rate x duration_seconds must be at most {_MOST_REQUESTS:,}, got "
                f"{self.rate * self.duration_seconds:,.0f}"
            )
        return self

    @abstractmethod
    def make(self) -> Trace:
        """Makes the trace. Raises `SyntheticError` if no request arrives."""

    def _rng(self, purpose: str) -> np.random.Generator:
        return np.random.default_rng([self.seed, zlib.crc32(purpose.encode())])

    def _starts(self) -> Floats:
        """Arrivals in [0, duration_seconds), sorted, at least one."""
        rng, end, mean = self._rng("arrivals"), self.duration_seconds, 1 / self.rate
        if isinstance(self.arrivals, OnOff):
            starts = _on_off(self.arrivals, self.rate, end, rng)
        elif isinstance(self.arrivals, Gamma):
            shape = self.arrivals.cv**-2
            starts = _until(end, lambda n: rng.gamma(shape, mean / shape, n), round(end / mean))
        else:
            starts = _until(end, lambda n: rng.exponential(mean, n), round(end / mean))
        if not len(starts):
            raise SyntheticError(
                f"no arrival in {end:g} s with seed {self.seed}: increase rate or duration_seconds"
            )
        return starts

    def _kinds(self, n: int) -> Ints:
        """The index in `kinds` of each of `n` requests or sessions; -1: none."""
        ends = np.cumsum([kind.share for kind in self.kinds])
        kind = np.searchsorted(ends, self._rng("kinds").random(n), side="right")
        return np.where(kind < len(self.kinds), kind, -1)

    def _lengths(self, kinds: Ints) -> tuple[Ints, Ints]:
        """New prompt tokens and answer tokens of requests of these kinds."""
        n = len(kinds)
        own = draw_whole(self.input_tokens, n, self._rng("input"), least=1)
        output = draw_whole(self.output_tokens, n, self._rng("output"), least=1)
        for number, kind in enumerate(self.kinds):
            of_it = np.flatnonzero(kinds == number)
            own[of_it] = draw_whole(
                kind.input_tokens, len(of_it), self._rng(f"input of kind {number}"), least=1
            )
            output[of_it] = draw_whole(
                kind.output_tokens, len(of_it), self._rng(f"output of kind {number}"), least=1
            )
        return own, output

    def _families(self, starts: Floats) -> tuple[Ints, Ints]:
        """Each arrival's family (-1: none), and each family's prefix tokens; the hot family is
        last."""
        n = len(starts)
        family, tokens = np.full(n, -1, dtype=np.int64), np.zeros(0, dtype=np.int64)
        if (shared := self.prefixes) is not None:
            weights = np.cumsum(np.arange(1, shared.count + 1, dtype=np.float64) ** -shared.zipf)
            rng = self._rng("prefixes")
            drawn = np.searchsorted(weights, rng.random(n) * weights[-1], side="right")
            family = np.where(rng.random(n) < shared.share, np.minimum(drawn, shared.count - 1), -1)
            tokens = draw_whole(shared.tokens, shared.count, self._rng("prefix tokens"), least=0)
        if (hot := self.hot_spot) is not None:
            inside = (starts >= hot.start_seconds) & (starts < hot.start_seconds + hot.seconds)
            family = np.where(inside & (self._rng("hot spot").random(n) < hot.share), len(tokens), family)
            tokens = np.append(tokens, hot.tokens)
        return family, tokens

    def _trace(
        self,
        arrivals: Floats,
        prompt: Ints,
        output: Ints,
        *,
        family: Ints,
        family_tokens: Ints,
        stream: Ints,
        **chains: Any,
    ) -> Trace:
        """The trace of requests, sorted by arrival, with block IDs for shared prefixes.

        The prompt of request i is the first ``prompt[i]`` tokens of stream ``stream[i]``. A stream
        is an unlimited text (numbered from 0) that begins with its family's prefix. Only whole
        blocks have common
        IDs: a partial last block of a prompt has its own ID.
        """
        size = self.block_tokens
        shared = np.where(family >= 0, np.append(family_tokens, 0)[family], 0) // size
        whole = prompt // size
        shared = np.minimum(shared, whole)
        # IDs: first the families' blocks, then the streams' blocks after the prefix, then partial
        # blocks.
        family_base = np.concatenate(([0], np.cumsum(family_tokens // size)))
        lengths = np.zeros(int(stream.max()) + 1, dtype=np.int64)
        np.maximum.at(lengths, stream, whole - shared)
        stream_base = family_base[-1] + np.concatenate(([0], np.cumsum(lengths)))
        partial = prompt % size > 0
        partial_id = stream_base[-1] + np.cumsum(partial) - 1
        counts = whole + partial
        if counts.sum() > _MOST_BLOCKS:
            raise SyntheticError(f"{counts.sum():,} blocks, at most {_MOST_BLOCKS:,}: increase block_tokens")
        offsets = np.concatenate(([0], np.cumsum(counts))).astype(np.int64)

        def each(column: Ints) -> Ints:
            return np.repeat(column, counts)

        position = np.arange(offsets[-1]) - each(offsets[:-1])
        ids = np.where(
            position < each(shared),
            each(family_base[np.maximum(family, 0)]) + position,
            np.where(
                position < each(whole),
                each(stream_base[stream]) + position - each(shared),
                each(partial_id),
            ),
        )
        return Trace(
            name=f"{type(self).__name__.removesuffix('Trace').lower()}-{self.seed}",
            arrival_seconds=arrivals,
            input_tokens=prompt,
            output_tokens=output,
            hash_offsets=offsets,
            hash_ids=ids.astype(np.uint64),
            block_tokens=size,
            **chains,
        )


class RequestsTrace(_Synthetic):
    """Independent requests, with shared prefixes."""

    synthetic: Literal["requests"] = "requests"

    def make(self) -> Trace:
        """Makes the trace: open loop, no sessions. Raises `SyntheticError` if no request
        arrives."""
        arrivals = self._starts()
        n = len(arrivals)
        family, family_tokens = self._families(arrivals)
        own, output = self._lengths(self._kinds(n))
        prompt = np.where(family >= 0, np.append(family_tokens, 0)[family], 0) + own
        return self._trace(
            arrivals,
            np.minimum(prompt, self.max_prompt_tokens),
            output,
            family=family,
            family_tokens=family_tokens,
            stream=np.arange(n),
        )


class SessionsTrace(_Synthetic):
    """Conversations. The prompt of turn t + 1 is turn t's prompt, its answer, and new tokens of the
    user.

    A turn waits for the previous answer and then for the user's think time.
    """

    synthetic: Literal["sessions"] = "sessions"
    turns: Distribution = Field(
        default_factory=lambda: Quantiles(quantiles={0: 1, 0.5: 3, 0.9: 8, 1: 20}),
        description="Turns of a session, at least 1.",
    )
    think_seconds: Distribution = Field(
        default_factory=lambda: LogNormal(p50=10, p90=60, max=600),
        description="Time from an answer to the next turn.",
    )

    def make(self) -> Trace:
        """Makes the trace. `arrival_seconds` of later turns assumes immediate answers.

        Raises `SyntheticError` if no session begins.
        """
        starts = self._starts()
        n = len(starts)
        family, family_tokens = self._families(starts)
        turns = draw_whole(self.turns, n, self._rng("turns"), least=1)
        total = int(turns.sum())
        if total > _MOST_REQUESTS:
            raise SyntheticError(f"{total:,} turns: at most {_MOST_REQUESTS:,}")
        session = np.repeat(np.arange(n), turns)
        first = np.concatenate(([0], np.cumsum(turns)[:-1]))
        turn = np.arange(total) - np.repeat(first, turns)
        own, output = self._lengths(np.repeat(self._kinds(n), turns))
        think = np.where(turn > 0, draw(self.think_seconds, total, self._rng("think")), 0.0)
        prefix = np.where(family >= 0, np.append(family_tokens, 0)[family], 0)

        # Running sums within a session: all earlier prompts and answers, and all think times so
        # far.
        def within(column: NDArray[Number]) -> NDArray[Number]:
            sums: NDArray[Number] = np.cumsum(column)
            below: NDArray[Number] = np.repeat(sums[first] - column[first], turns)
            return sums - below

        prompt = prefix[session] + within(own) + within(output) - output
        arrivals = starts[session] + within(think)
        fits = prompt <= self.max_prompt_tokens
        # Prompts only grow, so the limit removes the end of a session. The first turn always stays.
        prompt = np.where(turn == 0, np.minimum(prompt, self.max_prompt_tokens), prompt)
        kept = np.flatnonzero(fits | (turn == 0))
        kept = kept[np.argsort(arrivals[kept], kind="stable")]
        number = np.full(total, -1, dtype=np.int64)
        number[kept] = np.arange(len(kept))
        return self._trace(
            arrivals[kept],
            prompt[kept],
            output[kept],
            family=family[session[kept]],
            family_tokens=family_tokens,
            stream=session[kept],
            sessions=session[kept],
            previous=np.where(turn[kept] > 0, number[kept - 1], -1),
            think_seconds=think[kept],
        )


AnySynthetic = RequestsTrace | SessionsTrace | AgentsTrace
SyntheticTrace = Annotated[AnySynthetic, Field(discriminator="synthetic")]
_ADAPTER: TypeAdapter[AnySynthetic] = TypeAdapter(SyntheticTrace)


def read_synthetic(
    description: str,
    *,
    seed: int | None = None,
    session_rate: float | None = None,
    block_tokens: int | None = None,
) -> AnySynthetic:
    """Reads the path of a YAML file, YAML text that begins with a brace, or ``coding-agents``.

    Args:
        seed: replaces the seed of the description.
        session_rate: replaces the rate: sessions per second, of all instances together.
        block_tokens: replaces the prompt tokens per hash ID.

    Raises:
        SyntheticError: an invalid description, or `session_rate` for requests without sessions.
        OSError: the file cannot be read.
    """
    import yaml

    inline = description.lstrip().startswith("{")
    where = "on the command line" if inline else description
    try:
        content = yaml.safe_load(description if inline else trace_path(description).read_text("utf-8"))
    except FileNotFoundError:
        raise no_trace(trace_path(description)) from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise SyntheticError(f"synthetic trace {where}: not YAML: {' '.join(str(error).split())}") from None
    described = check_synthetic(content, where)
    changed: dict[str, float | None] = {"seed": seed, "block_tokens": block_tokens}
    if session_rate is not None:
        if isinstance(described, RequestsTrace):
            raise SyntheticError(
                f"synthetic trace {where}: session_rate needs sessions or agents, got requests"
            )
        instances = described.instances if isinstance(described, AgentsTrace) else 1
        changed["rate"] = session_rate / instances
    changed = {key: value for key, value in changed.items() if value is not None}
    return check_synthetic({**content, **changed}, where) if changed else described


def check_synthetic(content: Any, where: str) -> AnySynthetic:
    """Checks a description. Raises `SyntheticError` with `where` and every invalid field."""
    kinds = [kind.model_fields["synthetic"].default for kind in get_args(AnySynthetic)]
    if not isinstance(content, Mapping) or content.get("synthetic") not in kinds:
        known = f"{', '.join(kinds[:-1])} or {kinds[-1]}"
        raise SyntheticError(f"synthetic trace {where}: expected a mapping with synthetic: {known}")
    try:
        return _ADAPTER.validate_python(content)
    except ValidationError as error:
        problems = "; ".join(
            f"{'.'.join(map(str, problem['loc'][1:]))}: {expected(problem)}".removeprefix(": ")
            for problem in error.errors()
        )
        raise SyntheticError(f"synthetic trace {where}: {problems}") from None


def _until(end: float, gaps: Callable[[int], Floats], expected: int) -> Floats:
    """Arrivals before `end`: the sums of ``gaps(n)``."""
    parts: list[Floats] = []
    last = 0.0
    while last < end:
        parts.append(last + np.cumsum(gaps(max(64, expected // 4))))
        last = float(parts[-1][-1])
    arrivals: Floats = np.concatenate(parts)
    return arrivals[arrivals < end]


def _on_off(shape: OnOff, rate: float, end: float, rng: np.random.Generator) -> Floats:
    """A Poisson process of rate 1, on a clock that runs at the current rate."""
    times, clock = [0.0], [0.0]
    period = shape.on_seconds + shape.off_seconds
    busy_rate = rate * period / (shape.on_seconds + shape.off_share * shape.off_seconds)
    # The process starts in a busy period with this probability; exponential times have no memory.
    on = bool(rng.random() < shape.on_seconds / period)
    while times[-1] < end:
        length = rng.exponential(shape.on_seconds if on else shape.off_seconds)
        times.append(times[-1] + length)
        clock.append(clock[-1] + length * busy_rate * (1.0 if on else shape.off_share))
        on = not on
    ticks = (
        _until(clock[-1], lambda n: rng.exponential(1.0, n), round(clock[-1]))
        if clock[-1] > 0
        else np.empty(0)
    )
    arrivals: Floats = np.interp(ticks, clock, times)
    return arrivals[arrivals < end]
