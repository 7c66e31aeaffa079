"""Records KV events of vLLM's own KV cache manager for hybrid models, without a model.

Run it with the Python of `install_vllm`: `python tests/real/record_groups.py OUT`. For a version
that has no CPU build, unpack its wheel and add its folder to PYTHONPATH. Each file is one
MessagePack array per kind of model: `[name, block_size, steps]`. A step is `[prompt, hit, batch]`:
a prompt's token ids, the tokens of it that vLLM finds in its cache, and the events of computing it
as vLLM publishes them. `rust/feed/tests/groups.rs` and `tests/test_samples.py` replay the steps.
"""

from __future__ import annotations

import random
import sys
from inspect import signature
from pathlib import Path

import msgspec
import torch
from vllm.distributed.kv_events import KVEventBatch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256_cbor
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.request import Request

STEPS = 40
CHUNK = 256


def full(size: int) -> KVCacheSpec:
    return FullAttentionSpec(block_size=size, num_kv_heads=1, head_size=8, dtype=torch.float32)


def window(size: int, tokens: int) -> KVCacheSpec:
    return SlidingWindowSpec(
        block_size=size, num_kv_heads=1, head_size=8, dtype=torch.float32, sliding_window=tokens
    )


def state(size: int) -> KVCacheSpec:
    return MambaSpec(block_size=size, shapes=((8, 8),), dtypes=(torch.float32,), mamba_cache_mode="all")


# name, groups, tokens per block of the index, blocks of the pool
MODELS = [
    ("full attention", [full(16)], 16, 40),
    ("two windows and full attention", [window(16, 64), window(16, 64), full(16)], 16, 90),
    ("full attention and a window of other blocks", [full(16), window(32, 80)], 16, 60),
    ("full attention and a state", [full(16), state(16)], 16, 60),
    ("window, state and full attention", [full(16), window(16, 48), state(16)], 16, 90),
    ("a window only", [window(16, 64)], 16, 40),
]
LOOKAHEAD = "num_hash_lookahead_tokens"  # since 0.33, for drafters: a hash covers tokens behind its block
NEW_MODELS = [
    ("full attention", [full(16)], 16, 40),
    ("full attention and a drafter", [full(16)], 16, 40, 1),
]


def record(
    name: str, groups: list[KVCacheSpec], size: int, blocks: int, lookahead: int = 0, *, seed: int
) -> list:
    more = {LOOKAHEAD: lookahead} if lookahead else {}
    config = KVCacheConfig(
        num_blocks=blocks,
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec([f"layer{i}"], spec) for i, spec in enumerate(groups)],
    )
    sizes = [spec.block_size for spec in groups]
    manager = KVCacheManager(
        config,
        max_model_len=4096,
        scheduler_block_size=max(sizes),
        hash_block_size=min(sizes),
        max_in_flight_tokens=CHUNK,
        enable_kv_cache_events=True,
        **more,
    )
    hasher = get_request_block_hasher(min(sizes), sha256_cbor, **more)
    draw = random.Random(seed)
    bases = [[draw.randrange(100) for _ in range(320)] for _ in range(4)]
    encoder = msgspec.msgpack.Encoder()
    steps = []
    for at in range(STEPS):
        base = draw.choice(bases)[: draw.choice([40, 64, 72, 128, 130, 160, 200, 256, 320])]
        prompt = base + [draw.randrange(100) for _ in range(draw.choice([0, 1, 16, 32, 50]))]
        request = Request(
            request_id=f"r{at}",
            prompt_token_ids=prompt,
            sampling_params=SamplingParams(max_tokens=1),
            pooling_params=None,
            block_hasher=hasher,
        )
        computed, hit, boundary = manager.get_computed_blocks(request)
        request.shared_prefix_boundary = boundary
        done = hit
        while done < len(prompt):
            chunk = min(CHUNK, len(prompt) - done)
            first = done == hit
            manager.new_step_starts()
            got = manager.allocate_slots(request, chunk, hit if first else 0, computed if first else None)
            if got is None:
                raise SystemExit(f"{name}: {blocks} blocks are too few")
            done += chunk
            request.num_computed_tokens = done
        manager.free(request)
        batch = KVEventBatch(ts=float(at), events=manager.take_events(), data_parallel_rank=0)
        steps.append([prompt, hit, encoder.encode(batch)])
    return [name, size, steps]


def main(out: Path, seed: int = 7) -> None:
    init_none_hash(sha256_cbor)
    models = NEW_MODELS if LOOKAHEAD in signature(KVCacheManager).parameters else MODELS
    runs = [record(*model, seed=seed + at) for at, model in enumerate(models)]
    out.write_bytes(msgspec.msgpack.encode(runs))
    for name, _, steps in runs:
        print(name, sum(hit for _, hit, _ in steps), "hit tokens of", sum(len(p) for p, _, _ in steps))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
