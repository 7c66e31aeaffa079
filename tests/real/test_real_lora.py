"""LoRA adapters on real vLLM: each has a cache of its own, which the router predicts exactly."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from router_world import served
from test_real_doctor import doctor, green
from vllm_process import BLOCK, MODEL, VllmEngine, environment, model

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(600)]

RANK = 8
ADAPTERS = {"poet": 1, "clerk": 2}  # by name, the seed of its weights
PROMPTS = {
    "/v1/completions": lambda turn: {"prompt": "The rules of the house are these. " * 12 * (turn + 1)},
    "/v1/chat/completions": lambda turn: {
        "messages": [
            {
                "role": "user" if n % 2 == 0 else "assistant",
                "content": f"Part {n}: one router, many engines. " * 9,
            }
            for n in range(2 * turn + 1)
        ]
    },
}


def safetensors(tensors: dict[str, np.ndarray[Any, np.dtype[np.float32]]]) -> bytes:
    """The file that holds them: the length of a JSON header, the header, the data."""
    header, data = {}, b""
    for name, tensor in tensors.items():
        raw = tensor.astype("<f4").tobytes()
        span = [len(data), len(data) + len(raw)]
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": span}
        data += raw
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    return len(head).to_bytes(8, "little") + head + data


def write_adapter(folder: Path, base: Path, seed: int) -> Path:
    """Writes an adapter of `base` in PEFT's layout. It changes the answers. Returns `folder`."""
    shape = json.loads((base / "config.json").read_text())
    hidden, heads = shape["hidden_size"], shape["num_attention_heads"]
    outputs = {"q_proj": hidden, "v_proj": hidden // heads * shape["num_key_value_heads"]}
    random = np.random.default_rng(seed)
    tensors = {}
    for layer in range(shape["num_hidden_layers"]):
        for module, width in outputs.items():
            at = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            for part, size in (("lora_A", (RANK, hidden)), ("lora_B", (width, RANK))):
                tensors[f"{at}.{part}.weight"] = random.normal(0, 0.3, size).astype(np.float32)
    folder.mkdir(parents=True)
    (folder / "adapter_model.safetensors").write_bytes(safetensors(tensors))
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base),
        "r": RANK,
        "lora_alpha": 2 * RANK,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": list(outputs),
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


async def test_adapters_have_caches_of_their_own_and_each_is_predicted(
    vllm_engines: Callable[..., list[VllmEngine]], tmp_path: Path
) -> None:
    base = model(environment())
    folders = {name: write_adapter(tmp_path / name, base, seed) for name, seed in ADAPTERS.items()}
    (engine,) = vllm_engines(
        1,
        enable_lora=True,
        max_lora_rank=RANK,
        max_loras=len(ADAPTERS),
        lora_modules=[f"{name}={folder}" for name, folder in folders.items()],
    )
    async with served([engine], "--set", f"block_size={BLOCK}") as w:
        shown = (await w.engines())[engine.name]
        assert shown["mode"] == "exact", shown
        names = {card["id"]: card["parent"] for card in (await w.page("/v1/models"))["data"]}
        assert names == {MODEL: None, "poet": MODEL, "clerk": MODEL}

        async def ask(path: str, body: dict[str, Any]) -> tuple[int, str]:
            """The reported cached tokens, equal to the prediction, and the answer's text."""
            async with w.session.post(
                w.url + path, json=body | {"max_tokens": 6, "temperature": 0}
            ) as response:
                answer = await response.json()
                assert response.status == 200, answer
                record = await w.record(response.headers)
            usage = answer["usage"]
            real = (usage["prompt_tokens_details"] or {}).get("cached_tokens") or 0
            assert record["prompt_tokens"] == usage["prompt_tokens"]
            # The engine computes at least one token of every prompt.
            predicted = min(record["predicted_cached_tokens"], (usage["prompt_tokens"] - 1) // BLOCK * BLOCK)
            feed = (await w.engines())[engine.name]["kv_events"]
            assert predicted == real, (path, body["model"], record, usage, feed)
            await asyncio.sleep(0.05)  # events of its last blocks are on their way
            choice = answer["choices"][0]
            return real, choice["text"] if "text" in choice else choice["message"]["content"]

        for path, prompt in PROMPTS.items():
            for salt in ({}, {"cache_salt": "tenant"}):
                before: dict[str, int] = {}
                for turn in range(4):
                    said = []
                    for name in (MODEL, *ADAPTERS):
                        cached, text = await ask(path, {"model": name, **prompt(turn), **salt})
                        said.append(text)
                        # The prompts are equal; each model finds only blocks of its own requests.
                        assert (cached > before[name]) if turn else (cached == 0), (path, name, turn, cached)
                        before[name] = cached
                    assert len(set(said)) == len(said), "the adapters are applied"
                assert len(set(before.values())) == 1
                assert before[MODEL] > 3 * BLOCK
    _, report = await doctor(engine.url)
    (found,) = report["engines"]
    assert green(found), "an engine with adapters is examined as any other"
