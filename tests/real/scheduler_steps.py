"""Runs in an environment with vLLM: the schedulers of lmetric-vllm plan steps, and no model runs.

python scheduler_steps.py MODEL_FOLDER: prints one JSON line. Steps get made-up tokens back, and the
KV of another engine arrives when a case says so. The rest is vLLM's own, with NIXL's connector.
"""

from __future__ import annotations

import itertools
import json
import random
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from vllm import SamplingParams
from vllm.config import ECTransferConfig, KVTransferConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import StructuredOutputsParams
from vllm.utils.hashing import sha256
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from lmetric.engines.xargs import HANDICAP, TOKEN_SLO
from lmetric_vllm import SloScheduler, UniBoostScheduler
from lmetric_vllm.boost import BoostQueue
from lmetric_vllm.checks import NotSupportedError

BLOCK, BLOCKS = 32, 256
SETTINGS: dict[Any, dict[str, Any]] = {
    SloScheduler: {"token_slo_ms": 50},
    UniBoostScheduler: {"bin_tokens": 32, "hysteresis_seconds": 0.01},
}
ENCODER_CACHE = "vllm.v1.core.encoder_cache_manager.EncoderCacheManager"
IMAGE = 64  # tokens of an image, one embedding each
FIRM = 60  # steps until a request may go back: from 100 tokens of its prompt to more than 128
LEADS = {HANDICAP: -1000.0}
REMOTE = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [[1, 2]],
    "remote_engine_id": "prefill",
    "remote_request_id": "prefill-remote",
    "remote_host": "127.0.0.1",
    "remote_port": 1,
    "tp_size": 1,
}


def words(name: str, count: int) -> list[int]:
    """A prompt that begins like no prompt of another name."""
    return [(sum(map(ord, name)) * 7919 + at) % 997 for at in range(count)]


class Engine:
    """A scheduler and its requests, with made-up answers."""

    def __init__(
        self,
        kind: Any,
        *,
        layers: str = "full",
        diffusion: bool = False,
        asynchronous: bool = False,
        blocks: int = BLOCKS,
        **flags: Any,
    ) -> None:
        fixed = {
            "max_model_len": 2048,
            "max_num_batched_tokens": 2048,
            "block_size": BLOCK,
            "additional_config": {"lmetric": next(SETTINGS[each] for each in kind.mro() if each in SETTINGS)},
        }
        config = EngineArgs(model=sys.argv[1], **(fixed | flags)).create_engine_config()
        # As on GPUs. On CPUs, vLLM turns it off.
        config.scheduler_config.async_scheduling = asynchronous
        config.cache_config.num_gpu_blocks = blocks
        if diffusion:
            config.model_config.is_diffusion = True
        shape: dict[str, Any] = {"num_kv_heads": 1, "head_size": 32, "dtype": torch.float32}
        specs: dict[str, Any] = {
            "full": FullAttentionSpec(block_size=BLOCK, **shape),
            "window": SlidingWindowSpec(block_size=BLOCK, sliding_window=64, **shape),
            "mamba": MambaSpec(
                block_size=BLOCK, shapes=((2048,),), dtypes=(torch.float32,), mamba_cache_mode="align"
            ),
        }
        groups = [KVCacheGroupSpec([name], specs[name]) for name in layers.split()]
        if "mamba" in layers:
            config.cache_config.mamba_cache_mode = "align"
        self.scheduler = kind(
            vllm_config=config,
            kv_cache_config=KVCacheConfig(blocks, [], groups),
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK,
            log_stats=True,
        )
        self.depth = 1 if asynchronous else 0  # steps in flight
        self.in_flight: list[tuple[Any, ModelRunnerOutput]] = []
        self.hasher = get_request_block_hasher(BLOCK, sha256)
        self.tokens: Counter[str] = Counter()  # generated, by request
        self.arrived: set[str] = set()  # requests whose KV arrives with the next step
        self.sent: set[str] = set()  # requests whose KV is sent with the next step

    def add(
        self,
        name: str,
        *,
        extra: dict[str, Any] | None = None,
        adapter: int = 0,
        is_bound: bool = False,
        prompt: list[int] | None = None,
        output: int = 200,
        images: Sequence[tuple[str, int]] = (),
        arrival: float | None = None,
    ) -> Request:
        """Adds a request. `is_bound`: to a grammar. `output`: the tokens of its answer. `images`:
        their names and first tokens. `arrival`: its time, by default the present one."""
        prompt = prompt or words(name, 100)
        parameters = SamplingParams(max_tokens=output, ignore_eos=True, extra_args=extra)
        if is_bound:
            parameters.structured_outputs = StructuredOutputsParams(regex="red|green")
            parameters.structured_outputs._backend = "xgrammar"
        parameters.update_from_generation_config({}, 0)
        lora = LoRARequest(f"adapter {adapter}", adapter, "/nowhere") if adapter else None
        features = [
            MultiModalFeatureSpec(None, "image", image, PlaceholderRange(begin, IMAGE))
            for image, begin in images
        ]
        request = Request(
            name,
            prompt,
            parameters,
            None,
            arrival_time=arrival,
            lora_request=lora,
            mm_features=features,
            block_hasher=self.hasher,
        )
        self.scheduler.add_request(request)
        return request

    def step(self, count: int = 1) -> dict[str, Any]:
        """Plans steps. Returns the requests of the last one, and how often requests went back."""
        for _ in range(count):
            output = self.scheduler.schedule()
            names, requests = list(output.num_scheduled_tokens), self.scheduler.requests
            answer = ModelRunnerOutput(
                req_ids=names,
                req_id_to_index={name: at for at, name in enumerate(names)},
                sampled_token_ids=[[] if requests[name].is_prefill_chunk else [7] for name in names],
            )
            if self.arrived or self.sent:
                answer.kv_connector_output = KVConnectorOutput(self.sent, self.arrived)
                self.arrived, self.sent = set(), set()
            back = sum(request.num_preemptions for request in requests.values())
            self.in_flight.append((output, answer))
            if len(self.in_flight) > self.depth:
                for outputs in self.scheduler.update_from_output(*self.in_flight.pop(0)).values():
                    for each in outputs.outputs:
                        self.tokens[each.request_id] += len(each.new_token_ids)
        return {"planned": sorted(names), "back": back}


def sending() -> dict[str, Any]:
    """A request leads that needs the memory of all, and of a request whose KV is not sent yet."""
    transfer = KVTransferConfig(kv_connector="NixlConnector", kv_role="kv_producer", kv_buffer_device="cpu")
    engine = Engine(UniBoostScheduler, max_num_seqs=2, blocks=17, kv_transfer_config=transfer)
    engine.add("first")
    engine.step(FIRM)
    sent = {"kv_transfer_params": {"do_remote_prefill": False, "do_remote_decode": True}}
    engine.add("sent", extra=sent, output=1)
    engine.step()
    engine.add("leads", prompt=words("leads", 400), extra=LEADS)
    found = {"full": engine.step(3)}
    engine.sent = {"sent"}
    engine.step()
    return found | {"sent": engine.step()}


def decoding(*, asynchronous: bool = False, **flags: Any) -> Engine:
    """An engine, of one slot by default, that gets KV from other engines."""
    transfer = KVTransferConfig(kv_connector="NixlConnector", kv_role="kv_consumer", kv_buffer_device="cpu")
    flags = {"max_num_seqs": 1} | flags
    return Engine(UniBoostScheduler, asynchronous=asynchronous, kv_transfer_config=transfer, **flags)


def order() -> dict[str, Any]:
    """The KV of two requests arrives at once: of the first one, and of a request that leads."""
    engine = decoding()
    engine.add("first", extra={"kv_transfer_params": dict(REMOTE)})
    engine.step()
    engine.add("leads", extra=LEADS | {"kv_transfer_params": dict(REMOTE)})
    found = {"fetching": engine.step()}
    engine.arrived = {"first", "leads"}
    engine.step()
    return found | {"arrived": engine.step()}


def remote(*, asynchronous: bool) -> dict[str, Any]:
    """One slot, and a request that leads and whose KV comes from another engine."""
    engine = decoding(asynchronous=asynchronous)
    engine.add("first")
    engine.step(FIRM)
    engine.add("remote", extra=LEADS | {"kv_transfer_params": dict(REMOTE)})
    found = {"full": engine.step(3)}
    engine.scheduler.finish_requests("first", RequestStatus.FINISHED_ABORTED)
    engine.add("second")
    found["fetching"] = engine.step(FIRM)
    engine.arrived = {"remote"}
    found["arrived"] = engine.step(3)
    for _ in range(1000):
        if not engine.scheduler.requests:
            break
        engine.step()
    return found | {"tokens": {name: engine.tokens[name] for name in ("remote", "second")}}


def fetch(blocks: int) -> dict[str, Any]:
    """A request leads whose KV comes from another engine, in the last step of a prompt.

    With 14 blocks, its fetch needs the memory of another request; with 18, it needs no more.
    """
    engine = decoding(max_num_seqs=3, max_num_batched_tokens=128, blocks=blocks)
    engine.add("first")
    engine.step(FIRM)
    engine.add("prompt", prompt=words("prompt", 200))
    engine.step()
    request = engine.add("remote", extra=LEADS | {"kv_transfer_params": dict(REMOTE)})
    step = engine.step()
    return step | {"fetches": request.status == RequestStatus.WAITING_FOR_REMOTE_KVS}


def paused() -> dict[str, Any]:
    """A request that leads comes during a pause, and the pause ends."""
    engine = Engine(UniBoostScheduler, max_num_seqs=1)
    engine.add("first")
    engine.step(FIRM)
    engine.scheduler.set_pause_state(PauseState.PAUSED_NEW)
    engine.add("leads", extra=LEADS)
    found = {"paused": engine.step(3)}
    engine.scheduler.set_pause_state(PauseState.UNPAUSED)
    return found | {"resumed": engine.step()}


def adapters() -> dict[str, Any]:
    """A request leads whose adapter cannot be loaded, then also a request of the loaded adapter."""
    engine = Engine(UniBoostScheduler, max_num_seqs=2, enable_lora=True, max_loras=1, max_lora_rank=8)
    for name in ("first", "second"):
        engine.add(name, adapter=1)
    engine.step(FIRM)
    engine.add("other", adapter=2, extra={HANDICAP: -2000.0})
    found = {"other": engine.step(3)}
    engine.add("loaded", adapter=1, extra=LEADS)
    return found | {"loaded": engine.step()}


def grammar() -> dict[str, Any]:
    """A request that leads waits for its grammar, and the grammar is ready."""
    engine = Engine(UniBoostScheduler, max_num_seqs=1)
    engine.add("first")
    engine.step(FIRM)
    request = engine.add("leads", extra=LEADS, is_bound=True)
    found = {"compiling": engine.step(3)}
    engine.scheduler.structured_output_manager.grammar_init(request)
    structured = request.structured_output_request
    for _ in range(3000):
        if structured is not None and structured.grammar is not None:
            break
        time.sleep(0.01)
    return found | {"ready": engine.step()}


def two() -> dict[str, Any]:
    """Two requests lead two running requests."""
    engine = Engine(UniBoostScheduler, max_num_seqs=2)
    for name in ("first", "second"):
        engine.add(name)
    engine.step(FIRM)
    for name in ("third", "fourth"):
        engine.add(name, extra=LEADS)
    return engine.step()


def waits() -> dict[str, int]:
    """A request leads from the first step of the running request on: steps until it comes, and
    steps until the other may go back."""
    engine = Engine(UniBoostScheduler, max_num_seqs=1)
    first = engine.add("first")
    engine.step()
    engine.add("leads", extra=LEADS)
    due = engine.scheduler._known["first"].firm - first.num_computed_tokens
    steps = 0
    while engine.step()["back"] == 0 and steps < FIRM:
        steps += 1
    return {"steps": steps, "due": due}


def full_steps() -> dict[str, Any]:
    """A request leads while a long prompt takes all tokens of 23 steps."""
    engine = Engine(UniBoostScheduler, max_num_seqs=2, max_num_batched_tokens=64)
    engine.add("first")
    engine.step(FIRM)
    engine.add("long", prompt=words("long", 1500))
    engine.step()
    engine.add("leads", extra=LEADS)
    found = {"full": engine.step(22)}
    return found | {"room": engine.step()}


def encoding(engine: Engine, *, computed: int, cached: int) -> Engine:
    """The engine as with a model that reads images: what a step encodes, and the encoder's cache,
    both in embeddings."""
    engine.scheduler.max_num_encoder_input_tokens = computed
    engine.scheduler.encoder_cache_manager = EncoderCacheManager(cached)
    return engine


def images(begin: int, *, computed: int, cached: int, photo: str = "photo") -> dict[str, Any]:
    """A request leads whose prompt begins with an image, in the last step of a prompt with an image
    from the token `begin`: the step before ends at token 127."""
    engine = Engine(UniBoostScheduler, max_num_seqs=2, max_num_batched_tokens=128)
    encoding(engine, computed=computed, cached=cached)
    engine.add("first")
    engine.step(FIRM)
    engine.add("prompt", prompt=words("prompt", 200), images=[("page", begin)])
    engine.step()
    engine.add("leads", extra=LEADS, images=[(photo, 0)])
    return {"last": engine.step(), "next": engine.step()}


def encoded_steps() -> list[int]:
    """Steps that the table of `SloScheduler` has after a step without and one with an image."""
    engine = encoding(Engine(SloScheduler), computed=IMAGE, cached=IMAGE)
    found = []
    for name, pictures in (("text", []), ("picture", [("photo", 0)])):
        engine.add(name, images=pictures, output=1)
        engine.step()
        found.append(engine.scheduler.table.recorded)
    return found


class Exchanges(UniBoostScheduler):
    """Counts the requests for which others went back, and lists those that a step did not admit."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.made = 0
        self.last: list[str] = []

    def _make_room(self, request: Request, *args: Any) -> bool:
        before = len(self.running)
        going_on = super()._make_room(request, *args)
        if len(self.running) < before:
            self.last.append(request.request_id)
        return going_on

    def missed(self, planned: list[str]) -> list[str]:
        self.made += len(self.last)
        missed, self.last = [name for name in self.last if name not in planned], []
        return missed


def ticking(seed: int) -> Callable[[], float]:
    """A clock that is some 20 us later at each look, as on a fast machine."""
    rng = random.Random(seed)
    times = itertools.accumulate(rng.expovariate(1 / 20e-6) for _ in itertools.count())
    return lambda: 1e9 + next(times)


def memory(**flags: Any) -> dict[str, Any]:
    """Requests with common beginnings, handicaps, and memory for about three of them."""
    clock = ticking(1)
    with mock.patch.object(time, "time", clock), mock.patch.object(time, "monotonic", clock):
        return exchanges(**flags)


def exchanges(**flags: Any) -> dict[str, Any]:
    """How many exchanges were made, and how many missed, with requests as `memory` describes."""
    rng = random.Random(11)
    engine = Engine(Exchanges, max_num_seqs=6, blocks=40, **flags)
    found = []
    for number in range(400):
        family = rng.choice(["red", "green", "blue"])
        begin = words(family, 32 * rng.choice([0, 0, 3, 6]))
        prompt = begin + words(f"{family} {number}", rng.randrange(1, 200))
        extra = {HANDICAP: rng.choice([0.0, 0.0, -1000.0, -2000.0])}
        engine.add(f"r{number}", prompt=prompt, output=rng.choice([1, 20, 150]), extra=extra)
        for _ in range(rng.choice([1, 5, 40])):
            found += engine.scheduler.missed(engine.step()["planned"])
    return {"made": engine.scheduler.made, "missed": len(found)}


class Steady(UniBoostScheduler):
    """Learns nothing from times, so that two of them plan the same."""

    def measured(self, step: Any, seconds: float) -> None:
        pass


class Anew(Steady):
    """Sorts all running requests in each step."""

    def _exchange(self) -> None:
        self._batch = None
        super()._exchange()


def kept(**flags: Any) -> dict[str, Any]:
    """Steps in which the kept order of the running requests is another than if all are sorted.

    Many requests arrive at the same time, so ranks are equal.
    """
    rng = random.Random(3)
    engines = [Engine(kind, max_num_seqs=12, blocks=150, **flags) for kind in (Steady, Anew)]
    steps = differ = goes_on = 0
    for number in range(250):
        request = {
            "prompt": words(f"{number}", rng.randrange(1, 200)),
            "output": rng.choice([1, 20, 150, 400]),
            "extra": {HANDICAP: rng.choice([0.0, 0.0, -20.0])},
            "arrival": float(number // 3),
        }
        ends = rng.random() < 0.05
        for engine in engines:
            engine.add(f"r{number}", **request)
            if ends and engine.scheduler.running:
                running = engine.scheduler.running[0].request_id
                engine.scheduler.finish_requests(running, RequestStatus.FINISHED_ABORTED)
        for _ in range(rng.choice([0, 0, 1, 2, 5, 20])):
            before = engines[0].scheduler._batch
            plans = [
                (engine.step(), [each.request_id for each in engine.scheduler.running]) for engine in engines
            ]
            steps += 1
            differ += plans[0] != plans[1]
            goes_on += before is not None and engines[0].scheduler._batch is before
    return {"steps": steps, "kept": goes_on, "differ": differ, "back": plans[0][0]["back"]}


def large() -> dict[str, Any]:
    """A request leads that needs the memory of two."""
    engine = Engine(UniBoostScheduler, max_num_seqs=3, blocks=15)
    for name in ("first", "second"):
        engine.add(name)
    engine.step(FIRM)
    engine.add("leads", prompt=words("leads", 300), extra=LEADS)
    return engine.step()


def mixed(tokens: int) -> dict[str, Any]:
    """A request leads, and a request that it leads shares blocks with two others, but not those
    between them.

    `first` and `same` compute the same prompt, `same` three blocks ahead: so vLLM has duplicates.
    `same` ends, and `fills` takes the last of its blocks. `mixed` gets the others, and behind them
    the blocks of `first`. `tokens`: of the prompt that leads.
    """
    flags = {"max_num_batched_tokens": 192, "long_prefill_token_threshold": 96}
    engine = Engine(UniBoostScheduler, max_num_seqs=5, blocks=51, **flags)
    prompt, ahead = words("prompt", 500), {HANDICAP: -2000.0}
    engine.add("first", prompt=prompt)
    engine.step()
    engine.add("same", prompt=prompt, output=1)
    engine.step(7)
    engine.add("brief", prompt=words("brief", 200), output=30)  # its blocks are evicted last
    engine.step(4)
    engine.add("fills", prompt=words("fills", 640), extra=ahead)
    engine.step(50)
    engine.add("mixed", prompt=prompt, extra=ahead)
    engine.step(5)
    (blocks,) = engine.scheduler.kv_cache_manager.get_blocks("first").blocks
    engine.add("leads", prompt=words("leads", tokens), extra=LEADS)
    return {"holders": [block.ref_cnt for block in blocks], "steps": [engine.step() for _ in range(3)]}


def skipped() -> list[str]:
    """Requests of equal rank after a step that admits none of them."""
    queue = BoostQueue(lambda _: 0.0)
    for name in ("first", "second", "third", "fourth"):
        queue.add_request(SimpleNamespace(request_id=name))
    passed_over: deque[Any] = deque()
    for _ in range(3):
        passed_over.appendleft(queue.pop_request())  # as vLLM does
    queue.prepend_requests(passed_over)
    return [request.request_id for request in queue]


def own_times() -> dict[str, float]:
    """Seconds between tokens that requests ask for, on an engine of 50 ms."""
    engine = Engine(SloScheduler)
    found = {}
    for millis in (0.001, 20, "x" * 1000):
        engine.add(f"own {millis}", extra={TOKEN_SLO: millis})
        engine.step(3)
        found[str(millis)[:9]] = engine.scheduler._seconds()
        engine.scheduler.finish_requests(f"own {millis}", RequestStatus.FINISHED_ABORTED)
    return found


def refused(kind: Any = SloScheduler, **flags: Any) -> str | None:
    """The reason why a scheduler does not start."""
    try:
        Engine(kind, **flags)
    except NotSupportedError as error:
        return str(error)
    return None


def sharing() -> list[dict[str, Any]]:
    """A request leads that needs the memory of another. A request that is admitted first shares
    blocks with the other."""
    engine = Engine(UniBoostScheduler, max_num_seqs=4, blocks=15)
    begin = words("begin", 192)
    engine.add("first", prompt=begin + words("first", 8))
    engine.step(FIRM)
    engine.add("shares", prompt=begin + words("shares", 30), extra={HANDICAP: -2000.0})
    engine.add("leads", prompt=words("leads", 300), extra=LEADS)
    return [engine.step() for _ in range(2)]


def main() -> None:
    init_none_hash(sha256)
    found = {
        "remote": remote(asynchronous=False),
        "remote, asynchronous": remote(asynchronous=True),
        "order": order(),
        "sending": sending(),
        "fetch": [fetch(14), fetch(18)],
        "paused": paused(),
        "adapters": adapters(),
        "grammar": grammar(),
        "two": two(),
        "refused": [
            refused(enable_chunked_prefill=False),
            refused(disable_chunked_mm_input=True),
            refused(layers="full mamba"),
            refused(),
        ],
        "refused, boosts": [
            refused(UniBoostScheduler, layers="full mamba"),
            refused(UniBoostScheduler, layers="window"),
            refused(UniBoostScheduler, layers="full window"),
            refused(UniBoostScheduler, diffusion=True),
            refused(UniBoostScheduler, enable_chunked_prefill=False),
            refused(UniBoostScheduler, disable_chunked_mm_input=True),
            refused(UniBoostScheduler),
        ],
        "refused, encoders": [
            refused(
                ec_transfer_config=ECTransferConfig(
                    ec_connector="ECExampleConnector",
                    ec_role="ec_consumer",
                    ec_connector_extra_config={"shared_storage_path": "/nowhere"},
                )
            ),
            refused(ec_manager_config={"encoder_cache_manager_cls": ENCODER_CACHE}),
        ],
        "kept": {
            "plain": kept(),
            "asynchronous": kept(asynchronous=True),
            "small steps": kept(max_num_batched_tokens=64, long_prefill_token_threshold=32),
        },
        "large": large(),
        "sharing": sharing(),
        "waits": waits(),
        "mixed": [mixed(448), mixed(256)],
        "skipped": skipped(),
        "own times": own_times(),
        "full steps": full_steps(),
        "images": {
            "room": images(100, computed=2 * IMAGE, cached=2 * IMAGE),
            "step used up": images(130, computed=IMAGE, cached=2 * IMAGE),
            "cache full": images(100, computed=2 * IMAGE, cached=IMAGE),
            "in the cache": images(100, computed=IMAGE, cached=IMAGE, photo="page"),
        },
        "encoded steps": encoded_steps(),
        "memory": {
            "plain": memory(),
            "asynchronous": memory(asynchronous=True),
            "watermark": memory(watermark=0.1),
            "first chunks": memory(scheduler_reserve_full_isl=False, max_num_batched_tokens=64),
            "small steps": memory(max_num_batched_tokens=64, long_prefill_token_threshold=32),
        },
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
