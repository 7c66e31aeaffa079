"""`UniBoostScheduler`: boosted arrivals order the queue and the batch (UniBoost, section 3)."""

from __future__ import annotations

import time
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger
from vllm.v1.core.sched.request_queue import RequestQueue, SchedulingPolicy
from vllm.v1.request import RequestStatus

from lmetric import EngineBoost
from lmetric.engines.xargs import GAMMA, HANDICAP
from lmetric_vllm.checks import NotSupportedError
from lmetric_vllm.measured import MeasuredScheduler
from lmetric_vllm.settings import BoostSettings, SettingsError, number_of, read_settings
from lmetric_vllm.steps import Step, cached_tokens, fetched_tokens

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

logger = init_logger("vllm.lmetric")

# Waiting requests for which one step may take running ones back.
MOST_EXCHANGES = 4


@dataclass(slots=True)
class Known:
    """Work and rank of a request."""

    cached_tokens: int  # of its prompt, when it came
    hit_tokens: int  # with those that come from another engine
    arrival: float  # time of its arrival and its handicap, s
    attained_tokens: int = 0  # tokens computed for it, prompt and answer, each once
    rank: float = 0.0  # its boosted arrival
    change: int = 0  # work at which its rank changes
    firm: int = 0  # work before which it is not taken back


class BoostQueue(RequestQueue):
    """Waiting requests by rank, and by arrival in the queue among equals."""

    def __init__(self) -> None:
        self._order: list[tuple[float, int, Request]] = []
        self._keys: dict[str, tuple[float, int]] = {}
        self._added = 0
        self.ranked: Any = None  # the scheduler's ranks

    def add_request(self, request: Request) -> None:
        self._added += 1
        key = self.ranked(request), self._added
        self._keys[request.request_id] = key
        insort(self._order, (*key, request))

    def pop_request(self) -> Request:
        _, _, request = self._order.pop(0)
        del self._keys[request.request_id]
        return request

    def peek_request(self) -> Request:
        return self._order[0][2]

    def prepend_request(self, request: Request) -> None:
        self.add_request(request)

    def prepend_requests(self, requests: Iterable[Request]) -> None:
        for request in requests:
            self.add_request(request)

    def remove_request(self, request: Request) -> None:
        key = self._keys.pop(request.request_id)
        del self._order[bisect_left(self._order, key, key=lambda entry: entry[:2])]

    def remove_requests(self, requests: Iterable[Request]) -> None:
        for request in requests:
            if request.request_id in self._keys:
                self.remove_request(request)

    def rank_again(self) -> None:
        """Orders all requests by their present ranks."""
        self._order = sorted((self.ranked(request), added, request) for _, added, request in self._order)
        self._keys = {request.request_id: (rank, added) for rank, added, request in self._order}

    def __bool__(self) -> bool:
        return bool(self._order)

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[Request]:
        return (request for _, _, request in list(self._order))


class UniBoostScheduler(MeasuredScheduler):
    """vLLM's scheduler with the order of boosted arrivals.

    The request with the least boosted arrival is admitted first. A waiting request replaces a
    running request if its boosted arrival leads by the hysteresis. The running request must have
    reached its next bin of work since it was admitted (MEMGUARD). Among several, the last by
    boosted arrival goes back, less the seconds that computing it again takes.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.policy != SchedulingPolicy.FCFS:
            raise NotSupportedError(
                "lmetric_vllm.UniBoostScheduler has an order of its own: start the engine with "
                f"--scheduling-policy fcfs, not {self.policy.value}"
            )
        self.settings = read_settings(BoostSettings, self.vllm_config.additional_config)
        self.boost = EngineBoost(self.settings.model_dump(exclude_none=True))
        self._known: dict[str, Known] = {}
        self.waiting = BoostQueue()
        self.waiting.ranked = self._rank
        logger.info("UniBoostScheduler: gamma %g per second", self.boost.gamma)

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        if self.waiting:
            self._exchange()
        output = super().schedule(*args, **kwargs)
        for request_id in (
            *(new.req_id for new in output.scheduled_new_reqs),
            *output.scheduled_cached_reqs.resumed_req_ids,
        ):
            self._admitted(self.requests[request_id])
        return output

    def measured(self, step: Step, seconds: float) -> None:
        self.boost.stepped(seconds, step.decodes + step.prefill_tokens)
        if self.boost.look():
            for request_id, known in self._known.items():
                self._refresh(self.requests[request_id], known)
            self.waiting.rank_again()

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        if self._known.pop(request.request_id, None) and request.status != RequestStatus.FINISHED_ABORTED:
            self.boost.ended(time.time() - request.arrival_time)
        return super()._free_request(request, *args, **kwargs)

    def _preempt_request(self, request: Request, *args: Any, **kwargs: Any) -> None:
        self._note_work(request)
        super()._preempt_request(request, *args, **kwargs)

    def _rank(self, request: Request) -> float:
        known = self._known.get(request.request_id)
        if known is None:
            cached = cached_tokens(self, request)
            hit = cached + fetched_tokens(self, request, cached)
            known = self._known[request.request_id] = Known(cached, hit, self._arrival(request))
            self._refresh(request, known)
        return known.rank

    def _arrival(self, request: Request) -> float:
        """The request's arrival and the handicap of its class. Takes the router's gamma, too."""
        extra = request.sampling_params.extra_args if request.sampling_params is not None else None
        arrival: float = request.arrival_time
        try:
            gamma = number_of(extra, GAMMA, 1e-6, 1e6)
            if gamma is not None:
                logger.info_once("UniBoostScheduler: the router sends gamma")
                self.boost.give(gamma)
            arrival += number_of(extra, HANDICAP, -1e6, 1e6) or 0.0
        except SettingsError as error:
            logger.warning("request %s: %s; it is ignored", request.request_id, error)
        return arrival

    def _refresh(self, request: Request, known: Known) -> None:
        """Ranks a request by its work."""
        known.rank = self.boost.rank(
            known.arrival,
            prompt_tokens=request.num_prompt_tokens,
            hit_tokens=known.hit_tokens,
            attained_tokens=known.attained_tokens,
        )
        known.change = self._next(request, known)

    def _next(self, request: Request, known: Known) -> int:
        return self.boost.next_change(
            prompt_tokens=request.num_prompt_tokens,
            hit_tokens=known.hit_tokens,
            attained_tokens=known.attained_tokens,
        )

    def _note_work(self, request: Request) -> Known:
        """Counts the tokens computed for a running request."""
        known = self._known[request.request_id]
        computed = request.num_computed_tokens - known.hit_tokens
        if computed > known.attained_tokens:
            known.attained_tokens = computed
            if computed >= known.change:
                self._refresh(request, known)
        return known

    def _admitted(self, request: Request) -> None:
        known = self._known[request.request_id]
        known.firm = self._next(request, known)

    def _exchange(self) -> None:
        """Takes running requests back for waiting requests that lead, and sorts the others.

        Requests that compute prompts come last: vLLM takes the last one back if memory lacks.
        """
        ranked = [(self._note_work(request), request) for request in self.running]
        waiting = list(self.waiting)[:MOST_EXCHANGES]
        for request in waiting:
            if self._is_blocked_waiting_status(request.status) or not self._make_room(request, ranked):
                break
        ranked.sort(key=_order)
        self.running[:] = [request for _, request in ranked]

    def _make_room(self, request: Request, ranked: list[tuple[Known, Request]]) -> bool:
        """Takes running requests back, out of `ranked`, so that a waiting request can be admitted.

        Returns whether it can.
        """
        needed = self._blocks_of(request.num_tokens - self._known[request.request_id].cached_tokens)
        free = self.kv_cache_manager.block_pool.get_num_free_blocks()
        slots = self.max_num_active_reqs - len(ranked)
        if slots > 0 and needed <= free:
            return True
        rank = self._rank(request) + self.boost.hysteresis_seconds
        token_seconds = self.boost.token_seconds
        yielding = sorted(
            (
                (known.rank - running.num_computed_tokens * token_seconds, at)
                for at, (known, running) in enumerate(ranked)
                if known.rank > rank and known.attained_tokens >= known.firm
            ),
            reverse=True,
        )
        taken: list[int] = []
        for _, at in yielding:
            if not self._request_blocks_can_be_freed(ranked[at][1]):
                continue
            taken.append(at)
            slots += 1
            free += self._blocks_of(ranked[at][1].num_computed_tokens)
            if needed <= free:
                break
        if slots <= 0 or needed > free or not taken:
            return False
        now = time.monotonic()
        for at in sorted(taken, reverse=True):
            _, running = ranked.pop(at)
            self.running.remove(running)
            self._preempt_request(running, now, drop_stale_output=self.requires_kv_delivery)
        return True

    def _blocks_of(self, tokens: int) -> int:
        return -(-max(tokens, 0) // int(self.block_size))


def _order(entry: tuple[Known, Request]) -> tuple[bool, float]:
    known, request = entry
    return bool(request.is_prefill_chunk), known.rank
