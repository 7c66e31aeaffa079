"""Records KV events of SGLang's own radix cache, without a model or a GPU.

SGLang has no CPU build on PyPI. Its Python code runs beside the libraries of `install_vllm`:

    pip download --no-deps sglang==0.5.23 && unzip -q sglang-*.whl -d SGLANG
    pip install --no-deps --target SGLANG orjson ipython traitlets gguf torchvision==0.28.0
    PYTHONPATH=SGLANG VENV/bin/python tests/real/record_radix.py OUT

The file is one MessagePack array `[page_size, steps]`. A step is `[prompt, cache_salt, hit,
frames]`: token ids, salt, the tokens that SGLang finds in its cache, and the frames that its
publisher then sends over ZMQ (topic, sequence, payload).
`tests/test_samples.py` replays them.
"""

from __future__ import annotations

import random
import sys
import time
from array import array
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
import torch
import zmq
from sglang.srt.disaggregation.kv_events import KVEventBatch, ZmqEventPublisher
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey

STEPS = 40
PAGE = 16
MOST_TOKENS = 1000


class Allocator:
    """The pool of tokens, as far as evictions call it."""

    device = torch.device("cpu")

    def free_segment(self, indices: torch.Tensor, *, start_pos: int) -> None:
        assert len(indices) % PAGE == start_pos == 0


def main(out: Path) -> None:
    cache = RadixCache.create_simulated(
        mock_allocator=Allocator(), page_size=PAGE, enable_kv_cache_events=True
    )
    draw = random.Random(7)
    bases = [[draw.randrange(100) for _ in range(320)] for _ in range(4)]
    steps = []
    with TemporaryDirectory() as scratch, zmq.Context() as context:
        endpoint = f"ipc://{scratch}/kv"
        publisher = ZmqEventPublisher(0, endpoint, topic="kv")
        socket = context.socket(zmq.SUB)
        socket.subscribe("")
        socket.connect(endpoint)
        time.sleep(0.5)  # the subscription arrives
        for _ in range(STEPS):
            base = draw.choice(bases)[: draw.choice([40, 64, 72, 128, 130, 160, 200, 256, 320])]
            prompt = base + [draw.randrange(100) for _ in range(draw.choice([0, 1, 16, 32, 50]))]
            salt = draw.choice([None, None, "tenant"])
            key = RadixKey(array("q", prompt), cache_salt=salt)
            # SGLang computes at least one token: `init_next_round_input` looks for one token less.
            short = RadixKey(array("q", prompt), cache_salt=salt, limit=len(prompt) - 1)
            hit = cache.match_prefix(MatchPrefixParams(key=short)).device_prefix_len
            cache.insert(InsertParams(key=key))
            if (above := cache.evictable_size() - MOST_TOKENS) > 0:
                cache.evict(EvictParams(num_tokens=above))
            frames = []
            if events := cache.take_events():
                publisher.publish(KVEventBatch(ts=time.time(), events=events))
                assert socket.poll(10_000)
                frames = socket.recv_multipart()
            steps.append([prompt, salt, hit, frames])
        socket.close()
        publisher.shutdown()
    out.write_bytes(msgspec.msgpack.encode([PAGE, steps]))
    print(sum(step[2] for step in steps), "hit tokens of", sum(len(step[0]) for step in steps))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
