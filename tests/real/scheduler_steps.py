"""Runs in an environment with vLLM: makes schedulers of lmetric-vllm, and no model runs.

python scheduler_steps.py MODEL_FOLDER: prints one JSON line.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, MambaSpec
from vllm.v1.structured_output import StructuredOutputManager

from lmetric_vllm import SloScheduler
from lmetric_vllm.checks import NotSupportedError

BLOCK, BLOCKS = 32, 256
SETTINGS: dict[Any, dict[str, Any]] = {
    SloScheduler: {"token_slo_ms": 50},
}


class Engine:
    """A scheduler."""

    def __init__(self, kind: Any, *, hybrid: bool = False, **flags: Any) -> None:
        fixed = {
            "max_model_len": 2048,
            "max_num_batched_tokens": 2048,
            "block_size": BLOCK,
            "additional_config": {"lmetric": SETTINGS[kind]},
        }
        config = EngineArgs(model=sys.argv[1], **(fixed | flags)).create_engine_config()
        config.cache_config.num_gpu_blocks = BLOCKS
        attention = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=32, dtype=torch.float32)
        groups = [KVCacheGroupSpec(["attention"], attention)]
        if hybrid:
            config.cache_config.mamba_cache_mode = "align"
            state = MambaSpec(
                block_size=BLOCK, shapes=((2048,),), dtypes=(torch.float32,), mamba_cache_mode="align"
            )
            groups.append(KVCacheGroupSpec(["state"], state))
        self.scheduler = kind(
            vllm_config=config,
            kv_cache_config=KVCacheConfig(BLOCKS, [], groups),
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK,
            log_stats=True,
        )


def refused(**flags: Any) -> str | None:
    """The reason why `SloScheduler` does not start."""
    try:
        Engine(SloScheduler, **flags)
    except NotSupportedError as error:
        return str(error)
    return None


def main() -> None:
    found = {
        "refused": [
            refused(enable_chunked_prefill=False),
            refused(disable_chunked_mm_input=True),
            refused(hybrid=True),
            refused(),
        ],
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
