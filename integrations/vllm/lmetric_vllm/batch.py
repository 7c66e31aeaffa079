"""The running requests of a step by rank, and what stays the same in the next steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.request import Request

# Steps after which the costs of computing requests again count anew: a third of a second of usual
# steps, in which the mean time per token changes little.
MOST_STEPS = 16


@dataclass(slots=True)
class Known:
    """Work and rank of a request."""

    cached_tokens: int  # of its prompt, when it came
    hit_tokens: int  # with those that come from another engine
    arrival: float  # time of its arrival and its handicap, s
    attained_tokens: int = 0  # tokens computed for it, prompt and answer, each once
    rank: float = 0.0  # its boosted arrival
    change: int = 0  # computed tokens at which its rank changes
    firm: int = 0  # computed tokens before which it is not taken back
    mixed_blocks: int = 0  # its first blocks that do not count if it goes back: others hold some


class Batch:
    """Running requests in the order of their ranks.

    Ranks change when the work of a request doubles, and a decode adds a token per step. So a batch
    serves several steps, until a request comes, goes, or changes its rank. While prompts are
    computed, it serves one step.

    Args:
        ranked: the requests in the order of their ranks, those that compute prompts last.
        token_seconds: mean seconds that computing a token again takes.
    """

    def __init__(self, ranked: list[tuple[Known, Request]], token_seconds: float) -> None:
        self.ranked = ranked
        # Waiting requests for which none goes back while the batch serves, by ID, and whether
        # others come after them.
        self.vain: dict[str, bool] = {}
        self._free_blocks = 0  # when they were found
        self._token_seconds = token_seconds
        self._running = [request for _, request in ranked]
        changes = [known.change - request.num_computed_tokens for known, request in ranked]
        # Requests that compute prompts are the last.
        is_mixed = bool(ranked) and ranked[-1][1].is_prefill_chunk
        self._left = 0 if is_mixed else min(changes, default=0)
        self._left = min(self._left, MOST_STEPS)

    def goes_on(self, running: list[Request]) -> bool:
        """Whether the batch serves the next step, with these running requests."""
        self._left -= 1
        return self._left > 0 and running == self._running

    def look(self, free_blocks: int) -> None:
        """Lets requests be tried again if more KV blocks are free: other requests held them."""
        if free_blocks > self._free_blocks:
            self.vain.clear()
        self._free_blocks = free_blocks

    @cached_property
    def _firm(self) -> list[tuple[float, int, float]]:
        """Costs, indices and ranks of the requests that may go back, in the order in which they go.

        The last by rank goes first, less the seconds that computing it again takes.
        """
        seconds = self._token_seconds
        firm = [
            (known.rank - request.num_computed_tokens * seconds, at, known.rank)
            for at, (known, request) in enumerate(self.ranked)
            if request.num_computed_tokens >= known.firm
        ]
        firm.sort(reverse=True)  # the last of equals first
        return firm

    @cached_property
    def _last(self) -> float:
        """The last rank of a request that may go back."""
        return max([rank for _, _, rank in self._firm], default=float("-inf"))

    def yielding(self, lead: float) -> list[int]:
        """Indices of the requests that may go back for a waiting request with this lead, in the
        order in which they go."""
        if self._last <= lead:
            return []
        return [at for _, at, rank in self._firm if rank > lead]

    @property
    def firm_tokens(self) -> int:
        """Tokens that are computed of all requests that may go back, at most."""
        return self._firm_tokens + MOST_STEPS * len(self._firm)

    @cached_property
    def _firm_tokens(self) -> int:
        return sum([self.ranked[at][1].num_computed_tokens for _, at, _ in self._firm])

    @cached_property
    def _adapters(self) -> Counter[int]:
        """Requests by LoRA adapter."""
        loras = [request.lora_request for request in self._running]
        return Counter([lora.lora_int_id for lora in loras if lora is not None])

    def adapters_without(self, going: Collection[int]) -> set[int]:
        """The LoRA adapters of all requests but those with these indices."""
        left = self._adapters.copy()
        loras = [self.ranked[at][1].lora_request for at in going]
        left.subtract([lora.lora_int_id for lora in loras if lora is not None])
        return {adapter for adapter, requests in left.items() if requests > 0}
