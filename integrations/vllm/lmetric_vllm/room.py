"""Room in a step for waiting requests: sequence slots, tokens, KV blocks and encoder inputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vllm.multimodal.utils import get_mm_features_in_window

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import Request

# Blocks of running requests that are counted for one waiting request: 2 ms.
MOST_COUNTED = 16_384


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


class Returned:
    """The KV blocks of requests that go back.

    Requests that hold a block hold the blocks before it, too. So counting ends at a block that
    another request holds, and goes on from there when the last of its holders goes back.

    Args:
        hits: IDs of the blocks that the request in their place finds in the cache.
    """

    def __init__(self, hits: set[int]) -> None:
        self.counted = 0
        self._hits = hits
        self._holders: dict[int, int] = {}  # requests that still hold a block
        self._stopped: dict[int, int] = {}  # requests whose counting ended at a block

    @property
    def is_long(self) -> bool:
        """Whether counting more blocks would take too much of a step."""
        return self.counted > MOST_COUNTED

    def add(self, blocks: Sequence[KVCacheBlock]) -> int:
        """Returns how many more blocks are free when a request with these blocks goes back."""
        free, requests = 0, 1
        for block in reversed(blocks):
            self.counted += 1
            if block.block_id in self._hits:
                break  # and all before it
            left = self._holders.get(block.block_id, block.ref_cnt) - requests
            self._holders[block.block_id] = left
            if left > 0:
                self._stopped[block.block_id] = self._stopped.get(block.block_id, 0) + requests
                break
            free += not block.is_null
            requests += self._stopped.pop(block.block_id, 0)
        return free
