"""The running requests of a step by rank, and how they change from step to step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.request import Request

# Steps after which a batch is made anew. Costs of computing requests again count anew then: in a
# third of a second of usual steps, the mean time per token changes little.
MOST_STEPS = 16

# Requests that come or leave in a step and get their places by a search each. For more, sorting all
# of 256 takes no longer.
MOST_CHANGES = 16

_rank_of = attrgetter("rank")
_request_of = attrgetter("request")


@dataclass(slots=True, eq=False)
class Known:
    """Work and rank of a request."""

    request: Request
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

    Requests that compute prompts come last: vLLM takes the last one back if memory lacks.

    The order is kept from step to step. Only requests that come, leave, compute prompts, or change
    their rank take time. Ranks change when the work of a request doubles, and a decode adds a token
    per step, so the steps of the next changes are known.

    Args:
        running: the running requests. They are sorted, too.
        known: work and rank of all requests, by ID.
        refresh: ranks a request by its present work.
        token_seconds: mean seconds that computing a token again takes.
    """

    def __init__(
        self,
        running: list[Request],
        *,
        known: Mapping[str, Known],
        refresh: Callable[[Known], None],
        token_seconds: float,
    ) -> None:
        self._known, self._refresh, self._token_seconds = known, refresh, token_seconds
        # Waiting requests for which none goes back while the batch is as it is, by ID, and whether
        # others come after them.
        self.vain: dict[str, bool] = {}
        self._free_blocks = 0  # when they were found
        self._steps = 0
        self._due: dict[int, list[Known]] = {}  # decodes whose ranks change, by step
        self._firm: list[Known] | None = None
        self._firm_tokens = 0
        self._last = float("-inf")  # at least the rank of each request that may go back
        self._adapters: Counter[int] | None = None
        self._decodes = 0  # the first ones of those that run
        self.ranked: list[Known] = []
        self.requests: list[Request] = []  # in the same order
        self._place([], [known[request.request_id] for request in running], running)

    def goes_on(self, running: list[Request]) -> bool:
        """Takes over who runs in the next step, and sorts them.

        Returns whether the batch serves the step; else it needs a new batch.
        """
        self._steps += 1
        if self._steps == MOST_STEPS:
            return False
        due = self._due.pop(self._steps, [])
        if running == self.requests and not due and self._decodes == len(self.ranked):
            return True
        self.vain.clear()
        self._adapters = None
        # vLLM keeps the order, and appends requests that it admits.
        left = set(self.requests).difference(running)
        come = running[len(self.requests) - len(left) :]
        if len(left) + len(come) > MOST_CHANGES:
            return False
        for request in left:
            self._leave(request)
        if running != self.requests + come:
            return False
        due = [known for known in due if known in self.ranked]
        moved = self.ranked[self._decodes :]  # prompts may be computed now
        self._place(due, moved + [self._known[request.request_id] for request in come], running)
        return True

    def _place(self, due: list[Known], moved: list[Known], running: list[Request]) -> None:
        """Sorts the decodes of the step before, and the requests that are behind them.

        `due`: the decodes whose ranks may change.
        """
        for known in due + moved:
            computed = known.request.num_computed_tokens
            if computed >= known.change:
                self._refresh(known)
            if computed >= known.firm:
                self._firm = None
            step = self._steps + known.change - computed
            if step < MOST_STEPS:
                self._due.setdefault(step, []).append(known)
        prompts = [known for known in moved if known.request.is_prefill_chunk]
        decodes = [known for known in moved if not known.request.is_prefill_chunk]
        if due or moved:
            self.ranked[self._decodes :] = decodes
            self.ranked.sort(key=_rank_of)  # takes little time: most are sorted
            self._decodes = len(self.ranked)
            self.ranked += sorted(prompts, key=_rank_of)
            self.requests = list(map(_request_of, self.ranked))
            running[:] = self.requests

    def _leave(self, request: Request) -> None:
        at = self.requests.index(request)
        del self.requests[at]
        known = self.ranked.pop(at)
        self._decodes -= at < self._decodes
        if self._firm is not None and known in self._firm:
            self._firm.remove(known)

    def take(self, known: Known) -> None:
        """Takes a request out that goes back."""
        self._leave(known.request)
        self.vain.clear()
        self._adapters = None

    def look(self, free_blocks: int) -> None:
        """Lets requests be tried again if more KV blocks are free: other requests held them."""
        if free_blocks > self._free_blocks:
            self.vain.clear()
        self._free_blocks = free_blocks

    def _look_for_firm(self) -> list[Known]:
        """The requests that may go back, in the order in which they go.

        The last by rank goes first, less the seconds that computing it again takes.
        """
        if self._firm is None:
            seconds = self._token_seconds
            # The last of equals first.
            self._firm = [
                known for known in reversed(self.ranked) if known.request.num_computed_tokens >= known.firm
            ]
            self._firm.sort(
                key=lambda known: known.rank - known.request.num_computed_tokens * seconds, reverse=True
            )
            self._firm_tokens = sum([known.request.num_computed_tokens for known in self._firm])
            self._last = max(map(_rank_of, self._firm), default=float("-inf"))
        return self._firm

    def yielding(self, lead: float) -> list[Known]:
        """The requests that may go back for a waiting request with this lead, in the order in which
        they go."""
        last = (*self.ranked[self._decodes - 1 : self._decodes], *self.ranked[-1:])
        if max(map(_rank_of, last), default=lead) <= lead:
            return []
        firm = self._look_for_firm()
        return [known for known in firm if known.rank > lead] if self._last > lead else []

    @property
    def firm_tokens(self) -> int:
        """Tokens that are computed of all requests that may go back, at most."""
        firm = self._look_for_firm()
        return self._firm_tokens + MOST_STEPS * len(firm)

    def adapters_without(self, going: Collection[Known]) -> set[int]:
        """The LoRA adapters of all requests but these."""
        if self._adapters is None:
            loras = [request.lora_request for request in self.requests]
            self._adapters = Counter([lora.lora_int_id for lora in loras if lora is not None])
        left = self._adapters.copy()
        loras = [known.request.lora_request for known in going]
        left.subtract([lora.lora_int_id for lora in loras if lora is not None])
        return {adapter for adapter, requests in left.items() if requests > 0}
