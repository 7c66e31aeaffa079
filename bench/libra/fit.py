"""Derives the engine profiles from Table 1 and Figure 5 of the Libra paper.

    python bench/libra/fit.py            # writes profiles/*.yaml; --check compares

The paper prints no step times. Table 1 is of Qwen2.5-14B on A100, with one prefill and one decode
GPU and prompts and answers of fixed lengths. It has the rate at saturation, the median time between
tokens and the share of the KV memory in use. Without interference, these determine nearly all
constants of our step-time model (docs/research/profiles.md). The other half of the table,
colocation, gives one constant; the rest of it checks the profile.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import yaml

FOLDER = Path(__file__).parent / "profiles"
# Table 1: prompt, answer; disaggregated: requests/s, median TBT in s, KV in use on the decode GPU.
PREFILL_HEAVY, BALANCED, DECODE_HEAVY = (8192, 32, 0.83, 0.0227, None), (2048, 512, 2.56, 0.047, 0.9483), (
    219, 1467, 1.68, 0.05063, 0.9627,
)  # fmt: skip
# Colocated, 8192/32: requests/s of two GPUs, P99 TBT in s (a prompt's last chunk beside the
# decodes).
COLOCATED_RATE, COLOCATED_P99 = 1.49, 0.35293
CHUNK = 2048  # vLLM's default, section 2.4
KV_BYTES = 2 * 48 * 8 * 128 * 2  # K and V, layers, KV heads, width of a head, bytes of BF16
BLOCK = 16


def decoding(prompt: int, answer: int, rate: float, gap: float) -> tuple[float, float]:
    """Returns the decoding sequences and their context tokens, by Little's law; at least one."""
    sequences = max(1.0, rate * answer * gap)
    return sequences, sequences * (prompt + answer / 2)


def qwen_14b() -> dict[str, float]:
    """Returns the constants of Qwen2.5-14B on an A100 from Table 1."""
    shapes = (PREFILL_HEAVY, BALANCED, DECODE_HEAVY)
    batches = [decoding(*shape[:4]) for shape in shapes]
    fixed, sequence, context = np.linalg.solve(
        [[1.0, *batch] for batch in batches], [shape[3] for shape in shapes]
    )
    # The prefill GPU computes only a prompt in four chunks in a request's time. The second line is
    # the last chunk, colocated, beside the decodes of one of the two GPUs, by Little's law.
    prompt, answer = PREFILL_HEAVY[:2]
    chunks = prompt / CHUNK
    beside = COLOCATED_RATE / 2 * answer * COLOCATED_P99
    decodes = beside * (sequence + context * (prompt + answer / 2))
    token, pair = np.linalg.solve(
        [[prompt, prompt**2 / 2], [CHUNK, CHUNK * (prompt - CHUNK / 2)]],
        [1 / PREFILL_HEAVY[2] - chunks * fixed, COLOCATED_P99 - fixed - decodes],
    )
    held = [decoding(*shape[:4])[1] / shape[4] for shape in (BALANCED, DECODE_HEAVY) if shape[4] is not None]
    return {
        "fixed_seconds": fixed,
        "decode_seconds_per_sequence": sequence,
        "decode_seconds_per_context_token": context,
        "prefill_seconds_per_token": token,
        "prefill_seconds_per_attention_pair": pair,
        "cache_tokens": float(np.mean(held)),
    }


def on_h100(a100: dict[str, float]) -> dict[str, float]:
    """Returns the same model on an H100 (SXM) at the same shares of its data sheet: 989 TFLOPS
    against 312, 3.35 TB/s against 2.039. The minimum of a step counts as reading weights. The
    memory is as large."""
    computing, reading = 312 / 989, 2.039 / 3.35
    return {
        name: value * (1 if name == "cache_tokens" else computing if name.startswith("prefill") else reading)
        for name, value in a100.items()
    }


# Figure 5, Qwen2.5-32B, 1,024 + 1,024 tokens: requests/s of the prefill side, of the decode side,
# and of both with the cut at 1358.
PREFILLS, DECODES, BALANCE, BALANCED_RATE = 5.6, 1.7, 1358, 2.5
STEP = 0.02  # the minimum of a step: the figure only has sums


def figure_5() -> dict[str, float]:
    """Returns the constants that fit Figure 5's rates: no cost per sequence, one batch size on the
    second side."""
    answer = 1024
    left = 2 * answer - BALANCE
    # The cost of a decode, its share of a step and its context on the second side, cut at 1024 and
    # at 1358.
    share, context = np.linalg.solve(
        [[answer, answer * (1024 + answer / 2)], [left, left * (BALANCE + left / 2)]],
        [1 / DECODES, 1 / BALANCED_RATE],
    )
    batch = STEP / share
    return {
        "fixed_seconds": STEP,
        "decode_seconds_per_sequence": 0.0,
        "decode_seconds_per_context_token": context,
        "prefill_seconds_per_token": 1 / PREFILLS / 1024 - STEP / CHUNK,
        "prefill_seconds_per_attention_pair": 0.0,
        "max_sequences": round(batch),
        "cache_tokens": round(batch) * 2 * answer,  # never the bound
    }


def profile(
    constants: dict[str, float], kv_bytes: int, source: str, note: str
) -> dict[str, float | int | str]:
    """Formats a profile as in docs/research/profiles.md, to four digits."""
    rounded = {name: float(f"{value:.4g}") for name, value in constants.items() if name.count("_second")}
    return {
        **rounded,
        "max_batch_tokens": CHUNK,
        "max_sequences": int(constants.get("max_sequences", 256)),
        "block_tokens": BLOCK,
        "cache_blocks": round(constants["cache_tokens"] / BLOCK),
        "kv_bytes_per_token": kv_bytes,
        "source": source,
        "note": note,
    }


def profiles() -> dict[str, dict[str, float | int | str]]:
    """Returns all profiles by their file names."""
    a100 = qwen_14b()
    how = "python bench/libra/fit.py; the arithmetic is in that file."
    return {
        "qwen2.5-14b-a100": profile(
            a100, KV_BYTES, f"Table 1 of the Libra paper (NSDI 2026): {how}",
            "Not a measurement of ours. The KV memory is what the saturated decode GPU of Table 1 held, by "
            "Little's law: less than 80 GB leave beside the weights.",
        ),
        "qwen2.5-14b-h100": profile(
            on_h100(a100), KV_BYTES, f"qwen2.5-14b-a100, by the two data sheets: {how}",
            "Not a measurement: the paper gives no step times of its H100 runs.",
        ),
        "qwen2.5-32b-figure-5": profile(
            figure_5(), 2 * 64 * 8 * 128 * 2, f"Figure 5 of the Libra paper (NSDI 2026): {how}",
            "Reproduces the figure's rates, not an engine: no A100 reads 65 GB of weights in 20 ms. "
            "Only a bound on the batch gives its rates: else the decoding side serves what comes.",
        ),
    }  # fmt: skip


def main() -> None:
    for name, told in profiles().items():
        path = FOLDER / f"{name}.yaml"
        text = yaml.safe_dump(told, sort_keys=False, width=118)
        if "--check" not in sys.argv:
            path.write_text(text)
        elif path.read_text() != text:
            sys.exit(f"fit.py: {path} is stale: run it without --check")


if __name__ == "__main__":
    main()
