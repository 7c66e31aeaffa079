"""The work and the measured time of an engine's steps, and what its cache saves."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import Request

# Steps whose output never came, as after an error, are forgotten.
MOST_PENDING = 64


@dataclass(slots=True)
class Step:
    """The work of one step."""

    decodes: int  # sequences that decode a token each
    context_tokens: int  # of these sequences together
    prefill_tokens: int
    prefill_pairs: float  # attention pairs of these tokens
    encodes: bool  # whether it encodes images or other inputs, beside these tokens


def step_of(output: SchedulerOutput, requests: Mapping[str, Request]) -> Step:
    """The work of a scheduled step. The requests count its tokens as computed already."""
    scheduled = output.num_scheduled_tokens
    total = output.total_num_scheduled_tokens
    # The output has the counts before the step: no look at each decode.
    context = total + sum(output.scheduled_cached_reqs.num_computed_tokens)
    context += sum([new.num_computed_tokens for new in output.scheduled_new_reqs])
    prompts: list[tuple[Request, int]] = []
    if total > len(scheduled):
        prompts = [(requests[each], tokens) for each, tokens in scheduled.items() if tokens != 1]
        context -= sum([request.num_computed_tokens for request, _ in prompts])
    decodes = len(scheduled) - len(prompts)
    prefill = total - decodes
    # g tokens behind n: g (n + g / 2)
    pairs = sum([tokens * (request.num_computed_tokens - 0.5 * tokens) for request, tokens in prompts], 0.0)
    return Step(decodes, context, prefill, pairs, bool(output.scheduled_encoder_inputs))


def cached_blocks(scheduler: Scheduler, request: Request) -> tuple[tuple[Sequence[KVCacheBlock], ...], int]:
    """The blocks of a waiting request that the cache holds now, by group of layers, and their
    tokens.

    vLLM's own `get_computed_blocks` would also report the blocks as events again, for a request
    with `kv_cache_report_mode: full`.
    """
    manager = scheduler.kv_cache_manager
    if not manager.prefix_cache_lookup_enabled(request):
        return manager.empty_kv_cache_blocks.blocks, 0
    blocks, tokens, _ = manager.coordinator.find_longest_cache_hit(
        request.block_hashes, request.num_tokens - 1
    )
    return blocks, int(tokens)


def cached_tokens(scheduler: Scheduler, request: Request) -> int:
    """The tokens of a waiting request that the cache holds now."""
    return cached_blocks(scheduler, request)[1]


def fetched_tokens(scheduler: Scheduler, request: Request, cached: int) -> int:
    """The tokens of a waiting request that come from another engine, beside `cached` ones."""
    if scheduler.connector is None or request.skip_reading_prefix_cache:
        return 0
    # vLLM, too, offers the connector whole blocks only.
    whole = cached - cached % scheduler.block_size
    fetched, _ = scheduler.connector.get_num_new_matched_tokens(request, whole)
    return max(0, int(whole + (fetched or 0) - cached))


class StepClock:
    """Measures steps: from the end of the step before, or the step's own scheduling if that is
    later, until its output."""

    def __init__(self) -> None:
        self._pending: dict[int, tuple[SchedulerOutput, Step, float]] = {}
        self._ended = 0.0

    def scheduled(self, output: SchedulerOutput, step: Step) -> None:
        """Notes that the engine begins a step."""
        if len(self._pending) >= MOST_PENDING:
            self._pending.clear()
        self._pending[id(output)] = output, step, time.monotonic()

    def ended(self, output: SchedulerOutput) -> tuple[Step, float] | None:
        """The step whose output came, and its seconds; None for a step without work."""
        now = time.monotonic()
        begun, self._ended = self._ended, now
        pending = self._pending.pop(id(output), None)
        if pending is None:
            return None
        _, step, scheduled = pending
        return step, now - max(scheduled, begun)
