"""`UniBoostScheduler`: boosted arrivals order the queue and the batch (UniBoost, section 3)."""

from __future__ import annotations

import time
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.request_queue import RequestQueue, SchedulingPolicy
from vllm.v1.request import RequestStatus

from lmetric import EngineBoost
from lmetric.engines.xargs import GAMMA, HANDICAP
from lmetric_vllm.batch import Batch, Known
from lmetric_vllm.checks import NotSupportedError, check_blocks, check_cuts
from lmetric_vllm.measured import MeasuredScheduler
from lmetric_vllm.returned import Returned
from lmetric_vllm.room import EncoderRoom, Room
from lmetric_vllm.settings import BoostSettings, SettingsError, number_of, read_settings
from lmetric_vllm.steps import Step, cached_blocks, cached_tokens, fetched_tokens

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

logger = init_logger("vllm.lmetric")

# Waiting requests for which one step may take running ones back.
MOST_EXCHANGES = 4


class BoostQueue(RequestQueue):
    """Waiting requests by rank, and by arrival in the queue among equals.

    Args:
        ranked: returns the rank of a request.
    """

    def __init__(self, ranked: Callable[[Request], float]) -> None:
        self._order: list[tuple[float, int, Request]] = []
        self._keys: dict[str, tuple[float, int]] = {}
        self._last = self._first = 0  # numbers of equals
        self.ranked = ranked

    def add_request(self, request: Request) -> None:
        self._last += 1
        self._insert(request, self._last)

    def _insert(self, request: Request, number: int) -> None:
        key = self.ranked(request), number
        self._keys[request.request_id] = key
        insort(self._order, (*key, request))

    def pop_request(self) -> Request:
        _, _, request = self._order.pop(0)
        del self._keys[request.request_id]
        return request

    def peek_request(self) -> Request:
        return self._order[0][2]

    def prepend_request(self, request: Request) -> None:
        self._first -= 1
        self._insert(request, self._first)

    def prepend_requests(self, requests: Iterable[Request]) -> None:
        """Puts each before its equals, so the last of them comes first: vLLM reverses the requests
        that a step skips."""
        for request in requests:
            self.prepend_request(request)

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
        check_blocks(type(self).__name__, self)
        check_cuts(type(self).__name__, self)
        if self.policy != SchedulingPolicy.FCFS:
            raise NotSupportedError(
                "lmetric_vllm.UniBoostScheduler has an order of its own: start the engine with "
                f"--scheduling-policy fcfs, not {self.policy.value}"
            )
        self.settings = read_settings(BoostSettings, self.vllm_config.additional_config)
        self.boost = EngineBoost(self.settings.model_dump(exclude_none=True))
        self._known: dict[str, Known] = {}
        self._batch: Batch | None = None  # of the step before
        self.waiting = BoostQueue(self._rank)
        self.kv_holding_waiting = BoostQueue(self._rank)
        logger.info("UniBoostScheduler: gamma %g per second", self.boost.gamma)

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        # In a pause, vLLM ends running requests, and would not end those that went back.
        if self.pause_state == PauseState.UNPAUSED and (self.waiting or self.kv_holding_waiting):
            self._exchange()
        else:
            self._batch = None  # it counts steps
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
            for known in self._known.values():
                self._refresh(known)
            self._batch = None
            self.waiting.rank_again()
            self.kv_holding_waiting.rank_again()

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        if self._known.pop(request.request_id, None) and request.status != RequestStatus.FINISHED_ABORTED:
            self.boost.ended(time.time() - request.arrival_time)
        return super()._free_request(request, *args, **kwargs)

    def _preempt_request(self, request: Request, *args: Any, **kwargs: Any) -> None:
        self._refresh(self._known[request.request_id])
        super()._preempt_request(request, *args, **kwargs)

    def _rank(self, request: Request) -> float:
        known = self._known.get(request.request_id)
        if known is None:
            cached = cached_tokens(self, request)
            hit = cached + fetched_tokens(self, request, cached)
            known = self._known[request.request_id] = Known(request, cached, hit, self._arrival(request))
            self._refresh(known)
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

    def _refresh(self, known: Known) -> None:
        """Counts the tokens computed for a request, and ranks it by its work."""
        request = known.request
        known.attained_tokens = max(known.attained_tokens, request.num_computed_tokens - known.hit_tokens)
        known.rank = self.boost.rank(
            known.arrival,
            prompt_tokens=request.num_prompt_tokens,
            hit_tokens=known.hit_tokens,
            attained_tokens=known.attained_tokens,
        )
        if request.num_computed_tokens >= known.change:
            known.change = self._next(known)

    def _next(self, known: Known) -> int:
        """Computed tokens of a request at which its next bin of work begins."""
        return known.hit_tokens + self.boost.next_change(
            prompt_tokens=known.request.num_prompt_tokens,
            hit_tokens=known.hit_tokens,
            attained_tokens=known.attained_tokens,
        )

    def _admitted(self, request: Request) -> None:
        known = self._known[request.request_id]
        known.firm = self._next(known)
        known.mixed_blocks = 0

    def _exchange(self) -> None:
        """Sorts the running requests, and takes some back for waiting requests that lead."""
        batch = self._batch
        if batch is None or not batch.goes_on(self.running):
            batch = Batch(
                self.running,
                known=self._known,
                refresh=self._refresh,
                token_seconds=self.boost.token_seconds,
            )
        batch.look(self.kv_cache_manager.block_pool.get_num_free_blocks())
        room = None
        # vLLM admits requests that hold blocks before all others.
        ready = filter(self._is_ready, chain(self.kv_holding_waiting, self.waiting))
        for request in list(islice(ready, MOST_EXCHANGES)):
            goes_on = batch.vain.get(request.request_id)
            if goes_on is None:
                yielding = batch.yielding(self._rank(request) + self.boost.hysteresis_seconds)
                if not yielding and request.num_computed_tokens == 0:
                    break  # those behind it lead no more
                room = room or self._room()
                goes_on = self._make_room(request, batch, yielding, room)
            if not goes_on:
                break
        self._batch = batch

    def _is_ready(self, request: Request) -> bool:
        """Whether vLLM can admit a waiting request, or fetch its KV, in this step."""
        if request.status == RequestStatus.WAITING_FOR_REMOTE_KVS:
            return request.request_id in self.finished_recving_kv_req_ids
        if request.status == RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR:
            structured = request.structured_output_request
            grammar = structured.grammar if structured is not None else None
            return grammar is not None and not isinstance(grammar, Exception)
        if request.status == RequestStatus.WAITING_FOR_STREAMING_REQ:
            return False
        # Else output that it had in flight when it went back is still to come.
        return request.num_stale_output_tokens == 0 or bool(request.drop_stale_output)

    def _room(self) -> Room:
        """Room that running requests leave in a step."""
        running = self.running
        room = Room(
            self.max_num_active_reqs - len(running) - self.num_waiting_for_streaming_input,
            self.max_num_scheduled_tokens,
            self.kv_cache_manager.block_pool.get_num_free_blocks(),
            EncoderRoom(self),
        )
        if running:
            room.blocks -= self.kv_cache_manager.watermark_blocks
        # As `_use`, in less time for many decodes.
        size = int(self.block_size)
        decodes = [request.num_computed_tokens for request in running if not request.is_prefill_chunk]
        room.tokens -= len(decodes)
        room.blocks -= sum([computed % size == 0 for computed in decodes])
        for request in [request for request in running if request.is_prefill_chunk]:
            tokens, blocks = self._use(request)
            room.tokens -= tokens
            room.blocks -= blocks
            room.encoder.take(request, request.num_computed_tokens, tokens)
        return room

    def _use(self, request: Request) -> tuple[int, int]:
        """Tokens that a running request computes in a step, and blocks that they add."""
        computed, tokens = request.num_computed_tokens, 1
        if request.is_prefill_chunk:
            tokens = self._capped(request.num_tokens + request.num_output_placeholders - computed)
        return tokens, self._blocks_of(computed + tokens) - self._blocks_of(computed)

    def _capped(self, tokens: int) -> int:
        """Tokens that a step computes of a request with this number to compute."""
        longest = self.scheduler_config.long_prefill_token_threshold
        if longest > 0 and self.adaptive_long_prefill_threshold:
            requests = sum(self.get_request_counts())
            longest = max(longest, self.scheduler_config.max_num_batched_tokens // requests)
        return min(tokens, longest) if longest > 0 else tokens

    def _make_room(self, request: Request, batch: Batch, yielding: list[Known], room: Room) -> bool:
        """Takes running requests back, out of the batch, so that a waiting request can be admitted.

        `yielding`: those that may go back. None goes back if the request could not be admitted in
        this step.

        A request whose KV is still to be fetched needs blocks and no slot. vLLM starts a fetch only
        in a step with a free slot. None is made for it: it would go to another request.

        Returns whether the step comes to the requests behind it.
        """
        # Prompts take the whole step. They do not go back: their work begins at their whole prompt.
        if room.tokens + len(yielding) <= 0:
            return False
        manager = self.kv_cache_manager
        done = request.num_computed_tokens or self._known[request.request_id].cached_tokens
        is_fetch = request.num_computed_tokens == 0 and fetched_tokens(self, request, done) > 0
        reserved = self._reserved() if is_fetch else 0
        begin, needed_tokens, needed, hits = self._needed(request, is_fetch)
        hits |= room.hits
        slots, tokens, blocks = room.slots, room.tokens, room.blocks - needed - reserved
        size, defers = int(self.block_size), self.defer_block_free
        if blocks < 0:
            most = batch.firm_tokens // size
            if blocks + most + 2 * len(yielding) < 0:  # a part of a block each, and the next block
                return False
        taken: list[Known] = []
        returned, tables = Returned(hits), manager.coordinator.single_type_managers[0].req_to_blocks
        for known in yielding if slots > 0 or not is_fetch else ():
            if slots > 0 and tokens > 0 and blocks >= 0:
                break
            running = known.request
            can_be_freed = not defers or self._request_blocks_can_be_freed(running)
            if slots > 0 and tokens > 0 and not can_be_freed:
                continue  # its blocks are free after the step in flight
            taken.append(known)
            slots += 1
            unused_tokens, unused_blocks = 1, int(running.num_computed_tokens % size == 0)
            if running.is_prefill_chunk:
                unused_tokens, unused_blocks = self._use(running)
            tokens += unused_tokens
            blocks += unused_blocks
            if can_be_freed:
                blocks += returned.add(tables[running.request_id], known.mixed_blocks)
        if tokens <= 0 or blocks < 0 or (slots <= 0 and not is_fetch):
            if blocks < 0 and not (defers or is_fetch):  # the memory of all is not enough
                batch.vain[request.request_id] = False
            return False
        if not self._can_load(request, batch, room, taken):
            batch.vain[request.request_id] = True
            return True
        if mixed := returned.mixed():  # counted anew in the next step
            for known in taken:
                first = mixed.get(id(tables[known.request.request_id]), 0)
                known.mixed_blocks = max(known.mixed_blocks, first)
            return False
        if not is_fetch and not room.encoder.take(request, begin, min(needed_tokens, tokens)):
            return False
        now = time.monotonic()
        for known in sorted(taken, key=batch.ranked.index, reverse=True):
            batch.take(known)
            self.running.remove(known.request)
            self._preempt_request(known.request, now, drop_stale_output=self.requires_kv_delivery)
        room.slots, room.tokens, room.blocks = slots - (not is_fetch), tokens, blocks + reserved
        room.hits = hits
        if not is_fetch:
            room.tokens -= needed_tokens
            if request.lora_request is not None:
                room.adapters.add(request.lora_request.lora_int_id)
        return True

    def _reserved(self) -> int:
        """Blocks that vLLM leaves to prompts in flight before it starts a fetch. Those of this step
        are already taken off the room."""
        prompts = [request for request in self.running if request.is_prefill_chunk]
        taken = sum(self._use(request)[1] for request in prompts if request in self._inflight_prefills)
        return max(0, int(self._inflight_prefill_reserved_blocks()) - taken)

    def _needed(self, request: Request, is_fetch: bool) -> tuple[int, int, int, set[int]]:
        """Computed tokens of a waiting request, tokens and free blocks with which vLLM admits it,
        and the IDs of the cached blocks that it finds. Those that no request holds are among the
        free blocks."""
        manager = self.kv_cache_manager
        found, cached = manager.empty_kv_cache_blocks.blocks, 0
        # A request whose transfer failed may hold blocks with nothing computed.
        if request.num_computed_tokens == 0 and not manager.get_blocks(request.request_id).blocks[0]:
            found, cached = cached_blocks(self, request)
        done = request.num_computed_tokens + cached
        tokens = self._capped(max(1, request.num_tokens - done))
        length = request.num_tokens
        if not (is_fetch or self.scheduler_reserve_full_isl):
            length = done + min(tokens, self.max_num_scheduled_tokens)
        blocks = manager.coordinator.get_num_blocks_to_allocate(
            request_id=request.request_id,
            num_tokens=min(length, self.max_model_len),
            new_computed_blocks=found,
            num_encoder_tokens=0,
            total_computed_tokens=done,
            num_local_computed_tokens=done,
            num_tokens_main_model=length,
        )
        return done, tokens, blocks, {block.block_id for block in found[0]}

    def _can_load(self, request: Request, batch: Batch, room: Room, taken: list[Known]) -> bool:
        """Whether the engine can load the request's LoRA adapter if requests go back."""
        if self.lora_config is None or request.lora_request is None:
            return True
        adapters = room.adapters | batch.adapters_without(taken)
        return request.lora_request.lora_int_id in adapters or len(adapters) < self.lora_config.max_loras

    def _blocks_of(self, tokens: int) -> int:
        return -(-max(tokens, 0) // int(self.block_size))
