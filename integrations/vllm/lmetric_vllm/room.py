"""Room in a step for waiting requests: sequence slots, tokens and KV blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import KVCacheBlock

# Blocks of running requests that are counted for one waiting request: 2 ms.
MOST_COUNTED = 16_384


@dataclass(slots=True)
class Room:
    """Room in a step for waiting requests, less the shares of those that it admits."""

    slots: int
    tokens: int  # vLLM gives running requests theirs first
    blocks: int
    adapters: set[int] = field(default_factory=set)  # LoRA adapters of the requests that it admits


class Returned:
    """The KV blocks of requests that go back.

    Args:
        hits: IDs of the blocks that the request in their place finds in the cache.
    """

    def __init__(self, hits: set[int]) -> None:
        self._counted = 0
        self._hits = hits
        self._holders: dict[int, int] = {}  # requests that still hold a block

    @property
    def is_long(self) -> bool:
        """Whether counting more blocks would take too much of a step."""
        return self._counted > MOST_COUNTED

    def add(self, blocks: Sequence[KVCacheBlock]) -> int:
        """Returns how many more blocks are free when a request with these blocks goes back."""
        free, holders = 0, self._holders
        for block in reversed(blocks):
            self._counted += 1
            if block.block_id in self._hits:
                break  # and all before it
            left = holders[block.block_id] = holders.get(block.block_id, block.ref_cnt) - 1
            free += left == 0 and not block.is_null
        return free
