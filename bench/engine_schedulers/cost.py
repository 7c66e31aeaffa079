"""Measures what the schedulers of `lmetric-vllm` add to a step of vLLM, in microseconds.

    VLLM_ENVIRONMENT/bin/python bench/engine_schedulers/cost.py [--running 256] [--rounds 90]

No model runs: each scheduler plans steps and gets made-up tokens back. The schedulers take turns of
ten steps, so that a busy machine slows all of them. Printed: the median time of `schedule` and of
`update_from_output`, and what each adds to vLLM's own in the same round: the median of the rounds,
with the quartiles. `least`: the same of the shortest steps of all rounds, on which a busy machine
weighs least.

- `decodes`: all requests decode.
- `mixed`: one prompt more, of which each step computes a part.
- `queued`: all places are taken, and as many requests wait.
- `turnover`: the same, and each step one request ends, and one more comes.
- `leading`: all places are taken, and a request leads that no step can admit: its LoRA adapter does
  not fit.
- `shared`: the same, and all prompts begin with the same 4,096 tokens, and the request that leads
  also needs the memory of many.
- `several`: the same with four requests that lead, which is the most that a step considers.
- `short`: one request leads, and the memory of all is not enough for it.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "python"), str(ROOT / "integrations" / "vllm"), str(ROOT / "tests" / "real")]

import torch  # noqa: E402
from vllm import SamplingParams  # noqa: E402
from vllm.engine.arg_utils import EngineArgs  # noqa: E402
from vllm.lora.request import LoRARequest  # noqa: E402
from vllm.utils.gc_utils import freeze_gc_heap  # noqa: E402
from vllm.utils.hashing import sha256  # noqa: E402
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash  # noqa: E402
from vllm.v1.core.sched.async_scheduler import AsyncScheduler  # noqa: E402
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec  # noqa: E402
from vllm.v1.outputs import ModelRunnerOutput  # noqa: E402
from vllm.v1.request import Request, RequestStatus  # noqa: E402
from vllm.v1.structured_output import StructuredOutputManager  # noqa: E402

from lmetric.engines.xargs import HANDICAP  # noqa: E402
from lmetric_vllm import SloScheduler, UniBoostScheduler  # noqa: E402
from vllm_process import model  # noqa: E402

BLOCK = 16
BLOCKS = 65_536
STEPS = 10  # per round
PROMPT = 256  # tokens of a request
SHARED = 4096  # common tokens of the prompts
LONG = 7900  # tokens of a request that needs the memory of many
TOO_LONG = 400_000  # more than the cache has room for beside the common tokens
CONTEXT = 1 << 19
FREE_BLOCKS = 300  # less than a prompt of `LONG` tokens needs
# Requests that lead, and their tokens.
LEADING = {"leading": (1, PROMPT), "shared": (1, LONG), "several": (4, LONG), "short": (1, TOO_LONG)}
CASES = ("decodes", "mixed", "queued", "turnover", *LEADING)
SETTINGS: dict[type[AsyncScheduler], dict[str, Any]] = {
    AsyncScheduler: {},
    SloScheduler: {"lmetric": {"token_slo_ms": 50}},
    UniBoostScheduler: {"lmetric": {}},
}


class Engine:
    """A scheduler and its requests, with made-up answers."""

    def __init__(self, kind: type[AsyncScheduler], folder: Path, running: int, case: str) -> None:
        self.case, self.made = case, 0
        places = running if case in ("queued", "turnover", *LEADING) else running + 1
        adapters = {"enable_lora": True, "max_loras": 1, "max_lora_rank": 8} if case in LEADING else {}
        config = EngineArgs(
            model=str(folder),
            max_num_seqs=places,
            max_num_batched_tokens=max(2048, 2 * running),
            max_model_len=CONTEXT,
            hf_overrides={"max_position_embeddings": CONTEXT},
            block_size=BLOCK,
            async_scheduling=True,
            additional_config=SETTINGS[kind],
            **adapters,
        ).create_engine_config()
        config.cache_config.num_gpu_blocks = BLOCKS
        attention = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=32, dtype=torch.float32)
        self.scheduler = kind(
            vllm_config=config,
            kv_cache_config=KVCacheConfig(BLOCKS, [], [KVCacheGroupSpec(["layer"], attention)]),
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK,
            log_stats=True,
        )
        self.hasher = get_request_block_hasher(BLOCK, sha256)
        self.kept: list[Any] = []  # blocks that no request gets
        self.leads = False  # a request that needs much memory
        for _ in range(running):
            self.add(PROMPT)
            if self.is_shared:
                self.compute()
        self.compute()
        if case in ("queued", "turnover"):
            for _ in range(running):
                self.add(PROMPT)
        if case in LEADING:
            leading, tokens = LEADING[case]
            for _ in range(leading):
                self.add(tokens, adapter=2)
            self.leads = self.is_shared
            # Until running requests may go back.
            for _ in range(PROMPT):
                self.step()

    @property
    def is_shared(self) -> bool:
        """Whether prompts begin with the same tokens."""
        return LEADING.get(self.case, (0, PROMPT))[1] > PROMPT

    def compute(self) -> None:
        """Computes all prompts."""
        while self.scheduler.waiting or any(each.is_prefill_chunk for each in self.scheduler.running):
            self.step()

    def add(self, tokens: int, adapter: int = 1) -> None:
        self.made += 1
        prompt = [(self.made * 7919 + at) % 997 for at in range(tokens)]
        if self.is_shared and adapter == 1:
            prompt = [at % 997 for at in range(SHARED)] + prompt
        extra = {HANDICAP: -1000.0} if adapter == 2 else None
        parameters = SamplingParams(max_tokens=max(1, 8000 - len(prompt)), ignore_eos=True, extra_args=extra)
        parameters.update_from_generation_config({}, 0)
        name = f"r{self.made}"
        lora = LoRARequest(str(adapter), adapter, "/nowhere") if self.case in LEADING else None
        request = Request(name, prompt, parameters, None, lora_request=lora, block_hasher=self.hasher)
        self.scheduler.add_request(request)

    def step(self) -> tuple[float, float]:
        """Returns the seconds of `schedule` and of `update_from_output`."""
        if self.leads:
            self.leave_blocks()
        begun = time.thread_time()
        output = self.scheduler.schedule()
        planned = time.thread_time()
        names = list(output.num_scheduled_tokens)
        requests = self.scheduler.requests
        answer = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: at for at, name in enumerate(names)},
            sampled_token_ids=[[] if requests[name].is_prefill_chunk else [7] for name in names],
        )
        computed = time.thread_time()
        self.scheduler.update_from_output(output, answer)
        return planned - begun, time.thread_time() - computed

    def leave_blocks(self) -> None:
        """Leaves `FREE_BLOCKS` to the scheduler, also after running requests took some."""
        pool = self.scheduler.kv_cache_manager.block_pool
        more = pool.get_num_free_blocks() - FREE_BLOCKS
        if more > 0:
            self.kept += pool.get_new_blocks(more)
        elif more < 0:
            pool.free_blocks(self.kept[more:])
            del self.kept[more:]

    def round(self) -> list[tuple[float, float]]:
        """Returns the median and the least seconds of some steps, of `schedule` and of
        `update_from_output`."""
        times = []
        for _ in range(STEPS):
            if self.case == "mixed" and not any(each.is_prefill_chunk for each in self.scheduler.running):
                self.finish_last()
                self.add(6000)
                self.step()
            if self.case == "turnover":
                self.finish_first()
                self.add(PROMPT)
            times.append(self.step())
        return [(statistics.median(each), min(each)) for each in zip(*times, strict=True)]

    def finish_first(self) -> None:
        """Ends the first running request."""
        self.scheduler.finish_requests(
            self.scheduler.running[0].request_id, RequestStatus.FINISHED_LENGTH_CAPPED
        )

    def finish_last(self) -> None:
        """Ends the request whose long prompt is computed."""
        for request in list(self.scheduler.running):
            if request.num_prompt_tokens > PROMPT:
                self.scheduler.finish_requests(request.request_id, RequestStatus.FINISHED_ABORTED)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--running", type=int, default=256, metavar="N")
    parser.add_argument("--rounds", type=int, default=90, metavar="N")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=CASES, metavar="CASE")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    init_none_hash(sha256)
    folder = model(Path(sys.prefix))
    for case in options.cases:
        engines = {kind: Engine(kind, folder, options.running, case) for kind in SETTINGS}
        freeze_gc_heap()  # as vLLM's engine does when it has started
        rounds = []
        for number in range(options.rounds):
            order = list(engines) if number % 2 == 0 else list(reversed(engines))
            rounds.append({kind: engines[kind].round() for kind in order})
        least = {kind: [1e6 * min(one[kind][at][1] for one in rounds) for at in range(2)] for kind in engines}
        for kind in engines:
            told = []
            for at, name in enumerate(("schedule", "update_from_output")):
                each = [1e6 * one[kind][at][0] for one in rounds]
                more = [1e6 * (one[kind][at][0] - one[AsyncScheduler][at][0]) for one in rounds]
                text = f"{name} {statistics.median(each):.0f} us, least {least[kind][at]:.0f}"
                if kind is not AsyncScheduler:
                    low, middle, high = statistics.quantiles(more, n=4)
                    text += f" ({middle:+.0f} [{low:+.0f}, {high:+.0f}]"
                    text += f", least {least[kind][at] - least[AsyncScheduler][at]:+.0f})"
                told.append(text)
            print(f"{case}, {options.running} running, {kind.__name__}: {'; '.join(told)}", flush=True)


if __name__ == "__main__":
    main()
