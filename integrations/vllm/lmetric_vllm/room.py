"""Room in a step for waiting requests: sequence slots, tokens, KV blocks and encoder inputs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vllm.multimodal.utils import get_mm_features_in_window

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import Request


class EncoderRoom:
    """Room in a step for encoder inputs, as images: vLLM bounds what a step encodes and what the
    encoder's cache holds, both in embeddings."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._cache = scheduler.encoder_cache_manager
        self._computed = scheduler.max_num_encoder_input_tokens
        self._cached = self._cache.num_freeable_slots
        self._taken: set[str] = set()  # inputs of the step

    def take(self, request: Request, begin: int, tokens: int) -> bool:
        """Takes the room of the inputs of these tokens of a request.

        Returns whether vLLM computes any of the tokens: it stops before an input without room.
        """
        if not request.has_encoder_inputs:
            return True
        low, high = get_mm_features_in_window(request.mm_features, start=begin, end=begin + tokens)
        for at in range(low, high):
            feature, embeds = request.mm_features[at], request.get_num_encoder_embeds(at)
            if feature.identifier in self._taken:
                continue
            is_cached = self._cache.get_cached_num_encoder_embeds(request, at) is not None
            if not is_cached and embeds > min(self._computed, self._cached):
                return bool(begin < feature.mm_position.offset)
            self._taken.add(feature.identifier)
            # A cached input that no request uses is among the free places until one does.
            if not is_cached or not self._cache.cached[feature.identifier]:
                self._cached -= embeds
            if not is_cached:
                self._computed -= embeds
        return True


@dataclass(slots=True)
class Room:
    """Room in a step for waiting requests, less the shares of those that it admits."""

    slots: int
    tokens: int  # vLLM gives running requests theirs first
    blocks: int
    encoder: EncoderRoom
    adapters: set[int] = field(default_factory=set)  # LoRA adapters of the requests that it admits
    hits: set[int] = field(default_factory=set)  # IDs of the cached blocks that they find
