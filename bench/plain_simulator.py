"""The rules of the independent simulator (`independent_sim.py`) in plain Python, to decide between
two results.

Nothing is shared with `rust/sim`: engines are lists, the cache is an ordered dictionary of blocks,
policies are written out, one loop goes over the requests. It is slow (some ten seconds per policy
on the conversation trace) and short, so readers can check it against the rules. Its times must
equal ours except for rounding.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

import numpy as np
from numpy.typing import NDArray

BATCH_TOKENS = 4096
MAX_RUNNING = 256


@dataclass(slots=True, eq=False)
class Request:
    """One request; times in seconds."""

    arrival: float
    prompt: int
    output: int
    blocks: Sequence[int]
    hit_blocks: int = 0
    context: int = 0  # Tokens of it that the engine holds.
    to_prefill: int = 0
    generated: int = 0
    first: float = 0.0
    last: float = 0.0


@dataclass(slots=True)
class Engine:
    """One instance: running requests in order, queued requests, its cache (least recently used
    block first)."""

    cache_blocks: int
    block_tokens: int
    clock: float = 0.0
    running: list[Request] = field(default_factory=list)
    waiting: list[Request] = field(default_factory=list)
    cache: OrderedDict[int, None] = field(default_factory=OrderedDict)

    def hit(self, request: Request) -> int:
        """Returns the tokens of the longest cached prefix, at most prompt - 1."""
        blocks = sum(1 for _ in takewhile(self.cache.__contains__, request.blocks))
        return min(blocks * self.block_tokens, request.prompt - 1)

    def batch_size(self) -> int:
        """Returns the running and queued requests."""
        return len(self.running) + len(self.waiting)

    def queued_prefill(self) -> int:
        """Returns the tokens still to prefill, of queued requests by the current cache."""
        return sum(r.to_prefill for r in self.running) + sum(r.prompt - self.hit(r) for r in self.waiting)

    def advance(self, now: float) -> None:
        """Runs past `now`, to the end of the step then running."""
        while (self.running or self.waiting) and self.clock <= now:
            self.step()
        if not self.running and not self.waiting:
            self.clock = max(self.clock, now)

    def step(self) -> None:
        """Admits requests, gives every decoding sequence a token, prefills with the rest of the
        budget."""
        while self.waiting and len(self.running) < MAX_RUNNING:
            new = self.waiting[0]
            held = sum(r.context + r.to_prefill for r in self.running)
            if self.running and held + new.prompt > self.cache_blocks * self.block_tokens:
                break
            self.running.append(self.waiting.pop(0))
            new.hit_blocks = sum(1 for _ in takewhile(self.cache.__contains__, new.blocks))
            new.context = self.hit(new)
            new.to_prefill = new.prompt - new.context
            for block in reversed(new.blocks[: new.hit_blocks]):
                self.cache.move_to_end(block)
        decoding = [r for r in self.running if not r.to_prefill]
        context = sum(r.context for r in decoding)
        budget = BATCH_TOKENS - len(decoding)
        tokens, pairs = 0, 0.0
        prefilled = []
        for request in self.running:
            chunk = min(budget, request.to_prefill)
            if chunk:
                pairs += chunk * (request.context + chunk / 2)
                tokens += chunk
                budget -= chunk
                request.context += chunk
                request.to_prefill -= chunk
                if not request.to_prefill:
                    prefilled.append(request)
        self.clock += 0.009 + 6e-5 * len(decoding) + 3e-8 * context + 1e-4 * tokens + 1.3e-9 * pairs
        for request in decoding + prefilled:
            request.context += 1
            request.generated += 1
            if request.generated == request.output:
                request.last = self.clock
                self.running.remove(request)
        for request in prefilled:
            request.first = self.clock
            for block in reversed(request.blocks):
                self.cache[block] = None
                self.cache.move_to_end(block)
            while len(self.cache) > self.cache_blocks:
                self.cache.popitem(last=False)


Score = Callable[[Sequence[Engine], Request], list[float] | list[tuple[float, float]]]


def _filter(limit: int) -> Score:
    def score(engines: Sequence[Engine], request: Request) -> list[tuple[float, float]]:
        sizes = [engine.batch_size() for engine in engines]
        if max(sizes) - min(sizes) > limit:
            return [(size, 0.0) for size in sizes]
        return [(-engine.hit(request), size) for engine, size in zip(engines, sizes, strict=True)]

    return score


def _linear(weight: float) -> Score:
    def score(engines: Sequence[Engine], request: Request) -> list[float]:
        sizes = [engine.batch_size() for engine in engines]
        most = max(1, *sizes)
        return [
            weight * (1 - engine.hit(request) / request.prompt) + round(1 - weight, 1) * size / most
            for engine, size in zip(engines, sizes, strict=True)
        ]

    return score


def _prefill(engine: Engine, request: Request) -> float:
    return engine.queued_prefill() + request.prompt - engine.hit(request)


def _tokens(engine: Engine) -> int:
    running = sum(r.context + r.to_prefill for r in engine.running)
    return running + sum(r.prompt for r in engine.waiting)


POLICIES: dict[str, Score] = {
    "rr": lambda engines, _: [0.0] * len(engines),
    "vllm": lambda engines, _: [4 * len(e.waiting) + len(e.running) for e in engines],
    "filter4": _filter(4),
    "filter16": _filter(16),
    "lin0.4": _linear(0.4),
    "lin0.7": _linear(0.7),
    "lin0.9": _linear(0.9),
    "dynamo": lambda engines, r: [(_prefill(e, r) + _tokens(e)) / 512 for e in engines],
    "lmetric": lambda engines, r: [_prefill(e, r) * (e.batch_size() + 1) for e in engines],
    "lmetric, BS alone": lambda engines, r: [_prefill(e, r) * e.batch_size() for e in engines],
}


def play(requests: Sequence[Request], policy: str, engines: Sequence[Engine]) -> NDArray[np.float64]:
    """Returns (n, 4): arrival, first and last token in seconds, and blocks hit, of requests in
    order of arrival.

    Equal scores go to the first engine in order from the request's number on.
    """
    for number, request in enumerate(requests):
        for engine in engines:
            engine.advance(request.arrival)
        scores = POLICIES[policy](engines, request)
        order = [(number + i) % len(engines) for i in range(len(engines))]
        engines[min(order, key=scores.__getitem__)].waiting.append(request)
    for engine in engines:
        while engine.running or engine.waiting:
            engine.step()
    return np.array([(r.arrival, r.first, r.last, r.hit_blocks) for r in requests])
