"""Plans probes that separate the constants, within a token budget.

* ``prefill``: lone prompts of many lengths (time to first token): cost of a prompt token, and of an
  attention pair, whose number grows with the square.
* ``cached``: the longest of them again with new tokens behind: many pairs to few tokens.
* ``decode``: batches of several sizes, with short and with long contexts (time between tokens): the
  fixed part, the cost of a sequence and of a token of context.
* ``mixed``: a long prompt beside decoding ones: whether the parts add up, and, in the times between
  the others' tokens, in how many pieces it was computed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil
from typing import Literal

from lmetric._core import LmetricError

Kind = Literal["prefill", "cached", "decode", "mixed"]
KINDS: tuple[Kind, ...] = ("prefill", "cached", "decode", "mixed")
SHARES: dict[Kind, float] = {"prefill": 0.3, "cached": 0.1, "decode": 0.4, "mixed": 0.2}
WARM_UP_TOKENS = 64
WINDOW_STEPS = 32  # measured of a decode batch
ROUNDS = 2  # of all probes, so that a drift does not look like a cost
_SMALLEST_CHUNK = 512  # prompt tokens a step, where the engine does not say
_MIXED_BATCH = 2
_SPARE_STEPS = 24  # for requests that do not arrive at once
_TWO_MIXED_TOKENS = 2000  # from here on two lengths fit
_LEAST_OF_A_KIND = 3  # prefills, and decodes, in a round
_SPARE_ROUNDS = 1.0  # kept back, to repeat probes whose measurements disagree


class CalibrationError(LmetricError):
    """The engine cannot be calibrated: not reachable, busy, budget too small, or too few
    answers."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of all probes."""

    budget_tokens: int  # prompt tokens sent and output tokens made, all probes together
    max_batch: int  # requests at once
    max_prompt_tokens: int
    cache_tokens: int | None = None
    chunk_tokens: int | None = None  # prompt tokens per step; None: unknown


@dataclass(frozen=True, slots=True)
class Probe:
    """One experiment."""

    kind: Kind
    batch: int  # requests that decode (0: none)
    context_tokens: int  # prompt of each
    prompt_tokens: int = 0  # new tokens of the prompt measured
    cached_tokens: int = 0  # its tokens that an earlier prompt holds
    output_tokens: int = 1  # most, of each decoding request

    @property
    def most_tokens(self) -> int:
        """Maximum cost of the probe, tokens."""
        lone = self.prompt_tokens + self.cached_tokens + 1 if self.prompt_tokens else 0
        return self.batch * (self.context_tokens + self.output_tokens) + lone

    @property
    def label(self) -> str:
        """Description of the probe."""
        batch = f"{self.batch} decoding at {self.context_tokens:,}"
        if self.kind == "prefill":
            return f"prompt of {self.prompt_tokens:,}"
        if self.kind == "cached":
            return f"{self.prompt_tokens:,} behind {self.cached_tokens:,} cached"
        return batch if self.kind == "decode" else f"prompt of {self.prompt_tokens:,} beside {batch}"


@dataclass(frozen=True, slots=True)
class Plan:
    """The probes of one round, in order."""

    probes: tuple[Probe, ...]

    @property
    def most_tokens(self) -> int:
        """Maximum cost of all rounds without repetitions, tokens."""
        return WARM_UP_TOKENS + ROUNDS * sum(probe.most_tokens for probe in self.probes)

    @property
    def longest_prompt(self) -> int:
        return max(max(p.prompt_tokens + p.cached_tokens, p.context_tokens) for p in self.probes)

    @property
    def largest_batch(self) -> int:
        return max(1, *(probe.batch + (probe.prompt_tokens > 0) for probe in self.probes))


def make_plan(limits: Limits) -> Plan:
    """The probes within these limits.

    Raises:
        CalibrationError: the limits on budget, batch or prompts are too small.
    """
    makers: dict[Kind, Callable[[Limits, float], list[Probe]]] = {
        "prefill": _prefills,
        "cached": _cached,
        "decode": _decodes,
        "mixed": _mixed,
    }
    one_round: list[Probe] = []
    for kind, make in makers.items():
        one_round += make(limits, _share(limits, kind))
    plan = Plan(tuple(one_round))
    kinds = [probe.kind for probe in one_round]
    if min(kinds.count("prefill"), kinds.count("decode")) < _LEAST_OF_A_KIND:
        raise CalibrationError(
            f"too little to calibrate with: a budget of {limits.budget_tokens:,} tokens, batches of "
            f"{limits.max_batch}, prompts of {limits.max_prompt_tokens:,} tokens, a cache of "
            f"{limits.cache_tokens or 'unknown'} (the least are about 10,000, 2, 256 and 1,000)"
        )
    return plan


def _share(limits: Limits, kind: Kind) -> float:
    """Tokens for one round of a kind."""
    return (limits.budget_tokens - WARM_UP_TOKENS) * SHARES[kind] / (ROUNDS + _SPARE_ROUNDS)


def _longest(limits: Limits, tokens: float) -> int:
    """The longest lone prompt; with all its halves it takes `tokens`."""
    return min(int(tokens / 2.1), limits.max_prompt_tokens - 1, _cache(limits) // 2)


def _cache(limits: Limits) -> int:
    """Maximum tokens in the cache."""
    return int(0.8 * limits.cache_tokens) if limits.cache_tokens else 1 << 30


def _prefills(limits: Limits, tokens: float) -> list[Probe]:
    longest = _longest(limits, tokens)
    lengths = [longest >> halving for halving in range(longest.bit_length())]
    return [Probe("prefill", 0, 0, length) for length in lengths if length >= 32][:8]


def _cached(limits: Limits, tokens: float) -> list[Probe]:
    longest = _longest(limits, _share(limits, "prefill"))
    probes = []
    for share in (1.0, 0.3):
        # A cached token costs next to nothing, but it is sent, so it counts.
        held = int(min(longest // 2, 0.6 * tokens / 2))
        new = int(min(share * (tokens / 2 - held), longest // 2, limits.max_prompt_tokens - 1 - held))
        if new >= 32 and held >= 64:
            probes.append(Probe("cached", 0, 0, new - 1, held))
    return probes


def _decodes(limits: Limits, tokens: float) -> list[Probe]:
    short, largest = 32, limits.max_batch

    def cost(batch: int, context: int) -> int:
        return batch * (context + _output(limits, batch, context))

    def batches() -> list[int]:
        return sorted({1, max(1, largest // 8), max(1, largest // 2), largest})

    def left() -> float:
        return tokens - sum(cost(batch, short) for batch in batches())

    # Long contexts, at least four times the short ones, need room as well.
    while largest >= 2 and (
        left() < cost(1, 4 * short) + cost(largest, 4 * short) or cost(largest, 4 * short) > _cache(limits)
    ):
        largest = largest * 3 // 4
    if largest < 2:
        return []
    probes = [Probe("decode", b, short, output_tokens=_output(limits, b, short)) for b in batches()]
    wide = (1, largest)
    context = min(int(left() / sum(wide)), limits.max_prompt_tokens)
    while context >= 4 * short:
        longest = context + _output(limits, largest, context)
        fits = longest <= limits.max_prompt_tokens and largest * longest <= _cache(limits)
        if fits and sum(cost(batch, context) for batch in wide) <= left():
            return probes + [
                Probe("decode", b, context, output_tokens=_output(limits, b, context)) for b in wide
            ]
        context = context * 9 // 10
    return probes


def _output(limits: Limits, batch: int, context: int) -> int:
    """Tokens of each sequence until the last one's prefill is over, and then those measured."""
    chunk = max(1, (limits.chunk_tokens or _SMALLEST_CHUNK) - batch)
    return ceil(batch * context / chunk) + WINDOW_STEPS + _SPARE_STEPS


def _mixed(limits: Limits, tokens: float) -> list[Probe]:
    batch, short = min(_MIXED_BATCH, limits.max_batch - 1), 32
    if batch < 1:
        return []
    chunk = max(1, (limits.chunk_tokens or _SMALLEST_CHUNK) - batch)
    probes = []
    # The others outlast the prompt: a token for each of its pieces, and those before and after.
    spare = 16 + _SPARE_STEPS
    for share in (0.75, 0.25) if tokens > _TWO_MIXED_TOKENS else (1.0,):
        prompt = int((tokens * share - batch * (short + spare + 1) - 1) / (1 + batch / chunk))
        prompt = min(prompt, limits.max_prompt_tokens - 1, _cache(limits) // 2)
        if prompt >= 128:
            output = ceil(prompt / chunk) + spare
            probes.append(Probe("mixed", batch, short, prompt, output_tokens=output))
    return probes
