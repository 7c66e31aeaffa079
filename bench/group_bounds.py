"""Counts the groups of 64 instances that bounds of indicators could leave out of LMETRIC's choice.

    python bench/group_bounds.py [--instances 1024] [--seconds 12] [--new]

A fleet is played event by event: conversations grow (`--new`: every request starts one), instances
compute one prompt at a time, and answers end. In the second half, for 200 decisions, a group's
lower bound is the score of its least queued tokens, its longest cached prefix and its smallest
batch. The choice must score the groups whose bound is not above the best score; the decision record
must know those that may have one of the 8 best. The figures depend on no machine.
"""

from __future__ import annotations

import argparse
import heapq
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

import lmetric as lm

GROUP = 64
KEPT = 8  # instances that a decision record keeps
SAMPLES = 200
RATE = 2.0  # requests per second and instance: about 10 run on each
PREFILL_TOKENS_PER_SECOND = 8_000.0
STEP_SECONDS = 0.03
LONGEST_PROMPT = 8_000
Tokens = NDArray[np.uint32]


@dataclass
class Prompts:
    """Prompts of conversations, each under one of 20 system prompts."""

    rng: np.random.Generator
    most: int
    new: bool
    open: list[Tokens] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.systems = [self._tokens(2_000) for _ in range(20)]

    def _tokens(self, count: int) -> Tokens:
        return self.rng.integers(0, 1 << 30, count, dtype=np.uint32)

    def next(self) -> Tokens:
        """Returns a prompt: six of ten continue a conversation by 500 tokens."""
        if self.open and not self.new and self.rng.random() < 0.6:
            which = int(self.rng.integers(len(self.open)))
            prompt = np.concatenate((self.open[which], self._tokens(500)))
            self.open[which] = prompt
            if len(prompt) > LONGEST_PROMPT:
                self.open.pop(which)
            return prompt
        own = min(int(self.rng.lognormal(7.3, 0.8)) + 50, LONGEST_PROMPT)
        prompt = np.concatenate((self.systems[self.rng.integers(20)], self._tokens(own)))
        if len(self.open) < self.most:
            self.open.append(prompt)
        else:
            self.open[self.rng.integers(self.most)] = prompt
        return prompt


def needed(router: lm.Router, prompt: Tokens, now: float) -> tuple[int, int, int]:
    """Returns the groups that the choice needs, those that the record needs, and those that hold
    its instances."""
    columns = router.indicators(now, names=["bs", "queued_prefill_tokens"])
    batch, queued = columns["bs"], columns["queued_prefill_tokens"]
    hits = router.cached_tokens(lm.Request(prompt)).astype(float)
    scores = np.maximum(queued + len(prompt) - hits, 1) * (batch + 1)
    least = np.maximum(by_group(queued).min(1) + len(prompt) - by_group(hits).max(1), 1)
    bounds = least * (by_group(batch).min(1) + 1)
    best = np.sort(scores)[:KEPT]
    holding = (by_group(scores).min(1) <= best[-1]).sum()
    return int((bounds <= best[0]).sum()), int((bounds <= best[-1]).sum()), int(holding)


def by_group(column: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns a row per group."""
    return column.reshape(-1, GROUP)


def play(instances: int, seconds: float, new: bool) -> NDArray[np.int64]:
    """Returns the counts of `needed` for each sampled decision."""
    rng = np.random.default_rng(3)
    router = lm.Router("lmetric", seed=1, index_bytes=1 << 30)
    slots = {f"e{number}": number for number in range(instances)}
    for name in slots:
        router.add_instance(name, cache_blocks=20_000)
    prompts, free, now = Prompts(rng, 8 * instances, new), np.zeros(instances), 0.0
    ends: list[tuple[float, int, int]] = []  # time, decision, output tokens; 0: the first token
    tickets: dict[int, lm.Ticket] = {}
    requests, counts = int(instances * RATE * seconds), []
    for number in range(requests):
        now += rng.exponential(1 / (instances * RATE))
        while ends and ends[0][0] <= now:
            at, decided, tokens = heapq.heappop(ends)
            if tokens:
                tickets.pop(decided).done(output_tokens=tokens, now=at)
            else:
                tickets[decided].first_token(now=at)
        prompt = prompts.next()
        if number >= requests // 2 and number % max(requests // 2 // SAMPLES, 1) == 0:
            counts.append(needed(router, prompt, now))
        decision, ticket = router.route(lm.Request(prompt), now=now)
        ticket.sent(now=now)
        slot, new_tokens = slots[decision.instance], len(prompt) - decision.predicted_cached_tokens
        free[slot] = max(now, free[slot]) + new_tokens / PREFILL_TOKENS_PER_SECOND
        tickets[decision.id], output = ticket, int(rng.lognormal(5, 0.7)) + 1
        heapq.heappush(ends, (free[slot], decision.id, 0))
        heapq.heappush(ends, (free[slot] + output * STEP_SECONDS, decision.id, output))
    return np.array(counts)


def main() -> None:
    """Plays a fleet and prints the means."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--instances", type=int, default=1_024, help="a multiple of 64")
    parser.add_argument("--seconds", type=float, default=12.0)
    parser.add_argument("--new", action="store_true", help="no request continues a conversation")
    options = parser.parse_args()
    choice, record, holding = play(options.instances, options.seconds, options.new).mean(0)
    print(
        f"{options.instances} instances, {options.instances // GROUP} groups: the choice needs {choice:.1f}, "
        f"the record {record:.1f}; the record's instances are in {holding:.1f}"
    )


if __name__ == "__main__":
    main()
