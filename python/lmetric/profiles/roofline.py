"""Profiles from a model's shape and a GPU's data sheet, if there is no measurement.

``python -m lmetric.profiles.roofline --model qwen3-32b --gpu a100 --gpus 2`` prints one as YAML;
`SHIPPED` lists those in this directory, which ``scripts/make_reference profiles`` writes.

F is the FLOP/s and W the bytes/s that are reached: data sheet x `MFU` or `EXPERTS_MFU`, and x
`MBU`. The tables in docs/research/profiles.md chose both. The method:

* prefill: 2 FLOP x parameters that a token passes / F a token; 4 FLOP x query heads x head
  dimension x layers / F an attention pair (scores and values).
* decode: a token of context costs its KV bytes / W, or its attention FLOP / F if that is more. A
  step of B sequences costs ``OVERHEAD_SECONDS + max(weights read / W, 2 FLOP x parameters x B /
  F)``. A mixture of experts reads the experts that B sequences touch, 1 - (1 - chosen / experts)^B
  of them if tokens choose evenly. The engine model is linear in B: `fixed_seconds` and
  `decode_seconds_per_sequence` are the line that lies closest, in relative squares, over
  `FITTED_BATCHES`.
* several GPUs (tensor parallel) add up in F, W and memory; each layer adds two all-reduces.
* the cache is what is left of `MEMORY_SHARE` of the memory beside the weights (vLLM's default
  share); activations are not taken off.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import numpy as np
import yaml

from lmetric.profiles import Profile

MFU = 0.75  # of the dense BF16 FLOP/s, in prefill of some thousand tokens by a dense model
EXPERTS_MFU = 0.6  # by a mixture of experts
MBU = 0.8  # of the memory's bytes/s
OVERHEAD_SECONDS = 0.002  # a step's scheduling, launches and sampling that nothing hides
ALL_REDUCE_SECONDS = 1e-5  # latency of one
MEMORY_SHARE = 0.9  # vLLM's gpu_memory_utilization
FITTED_BATCHES = (8, 16, 32, 64, 128, 256)
BLOCK_TOKENS = 16  # vLLM's default
# The limits of all rooflines: vLLM's defaults on an A100. On larger GPUs, its defaults are larger
# (`vllm_limits`).
MAX_BATCH_TOKENS = 2048
MAX_SEQUENCES = 256
_BYTES = 2  # BF16, weights and KV alike


@dataclass(frozen=True, slots=True)
class Model:
    """A decoder's shape, as in its ``config.json``; embedding and head are not tied."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int  # of the MLP, or of one expert
    vocabulary: int
    experts: int = 1
    experts_per_token: int = 1

    @property
    def expert_parameters(self) -> int:
        """Those of all MLPs."""
        return self.layers * self.experts * 3 * self.hidden * self.intermediate

    @property
    def head_parameters(self) -> int:
        """Those of the output layer; the embedding has as many."""
        return self.vocabulary * self.hidden

    @property
    def shared_parameters(self) -> int:
        """Those of attention and of the experts' router: every token passes them in every layer."""
        attention = 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)
        return self.layers * (attention + (self.hidden * self.experts if self.experts > 1 else 0))

    @property
    def parameters(self) -> int:
        """All, but for norms and biases (below 0.1%)."""
        return self.shared_parameters + self.expert_parameters + 2 * self.head_parameters

    @property
    def passed_parameters(self) -> float:
        """Those that one prompt token passes: no embedding, and no head (only the last needs
        it)."""
        return self.shared_parameters + self.expert_parameters * self.experts_per_token / self.experts

    @property
    def mfu(self) -> float:
        """The share of a GPU's FLOP/s that its prefill reaches."""
        return MFU if self.experts == 1 else EXPERTS_MFU

    @property
    def kv_bytes_per_token(self) -> int:
        return self.layers * 2 * self.kv_heads * self.head_dim * _BYTES

    @property
    def attention_flop_per_pair(self) -> int:
        return 4 * self.heads * self.head_dim * self.layers

    def read_bytes(self, batch: float) -> float:
        """Weights that a step of `batch` sequences reads."""
        touched = 1.0 - float((1 - self.experts_per_token / self.experts) ** batch)
        return _BYTES * (self.shared_parameters + self.head_parameters + self.expert_parameters * touched)


@dataclass(frozen=True, slots=True)
class Gpu:
    """A data sheet."""

    name: str
    label: str
    flops: float  # dense BF16
    bytes_per_second: float
    memory_bytes: int  # as its driver reports it
    link_bytes_per_second: float  # to the other GPUs, each way


MODELS = {
    model.name: model
    for model in (
        Model("qwen3-30b-a3b", 48, 2048, 32, 4, 128, 768, 151_936, experts=128, experts_per_token=8),
        Model("qwen3-32b", 64, 5120, 64, 8, 128, 25_600, 151_936),
        Model("qwen2-7b", 28, 3584, 28, 4, 128, 18_944, 152_064),
        Model("qwen2.5-14b", 48, 5120, 40, 8, 128, 13_824, 152_064),
        Model("qwen2.5-32b", 64, 5120, 40, 8, 128, 27_648, 152_064),
        Model("llama-3.1-8b", 32, 4096, 32, 8, 128, 14_336, 128_256),
        Model("llama-3.1-70b", 80, 8192, 64, 8, 128, 28_672, 128_256),
    )
}
GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("h20", "H20 (96 GB)", 148e12, 4.0e12, 97_871 * 2**20, 450e9),
        Gpu("a100", "A100 (80 GB, SXM)", 312e12, 2.039e12, 81_920 * 2**20, 300e9),
        Gpu("h100", "H100 (80 GB, SXM)", 989e12, 3.35e12, 81_559 * 2**20, 450e9),
        Gpu("h200", "H200 (141 GB)", 989e12, 4.8e12, 143_771 * 2**20, 450e9),
        Gpu("b200", "B200 (180 GB, HGX)", 2_250e12, 8.0e12, 183_359 * 2**20, 900e9),
        Gpu("l40s", "L40S (48 GB, PCIe)", 362e12, 0.864e12, 46_068 * 2**20, 32e9),
    )
}
SHIPPED = (
    ("qwen3-30b-a3b", "h20", 1),
    ("qwen2-7b", "h20", 1),
    ("qwen3-32b", "h20", 1),
    ("qwen3-32b", "h20", 2),
    ("llama-3.1-8b", "a100", 1),
    ("qwen2.5-14b", "a100", 1),
    ("qwen2.5-32b", "a100", 1),
    ("qwen2.5-32b", "a100", 2),
    ("llama-3.1-8b", "h100", 1),
    ("llama-3.1-8b", "h200", 1),
    ("llama-3.1-8b", "b200", 1),
    ("llama-3.1-8b", "l40s", 1),
    ("llama-3.1-70b", "h100", 4),
    ("llama-3.1-70b", "h200", 2),
    ("llama-3.1-70b", "b200", 1),
    ("llama-3.1-70b", "l40s", 8),
    ("qwen3-30b-a3b", "h100", 1),
    ("qwen3-30b-a3b", "h200", 1),
    ("qwen3-30b-a3b", "b200", 1),
    ("qwen3-30b-a3b", "l40s", 2),
)


def profile_name(model: str, gpu: str, gpus: int) -> str:
    """``qwen3-32b-h20``, ``qwen3-32b-2xh20``."""
    return f"{model}-{gpu}" if gpus == 1 else f"{model}-{gpus}x{gpu}"


def decode_seconds(model: Model, gpu: Gpu, gpus: int, batch: float) -> float:
    """A decode step of `batch` sequences without their context: the roofline that the line is
    fitted to."""
    flops, bandwidth = gpus * gpu.flops * model.mfu, gpus * gpu.bytes_per_second * MBU
    flop = 2 * batch * (model.passed_parameters + model.head_parameters)
    fixed = OVERHEAD_SECONDS + (2 * model.layers * ALL_REDUCE_SECONDS if gpus > 1 else 0)
    return fixed + max(model.read_bytes(batch) / bandwidth, flop / flops)


def all_reduce_seconds(model: Model, gpu: Gpu, gpus: int) -> float:
    """Seconds per token of the all-reduces between GPUs."""
    # A ring moves 2 (n - 1) / n of a token's activations, twice a layer.
    moved = 2 * model.layers * 2 * (gpus - 1) / gpus * model.hidden * _BYTES
    return moved / (gpu.link_bytes_per_second * MBU)


def vllm_limits(gpu: Gpu) -> tuple[int, int]:
    """The defaults of a server of vLLM 0.32 on this GPU: tokens per step and sequence slots."""
    if gpu.memory_bytes >= 160 * 2**30:
        return 16_384, 1_024
    return (8_192, 1_024) if gpu.memory_bytes >= 70 * 2**30 and gpu.name != "a100" else (2_048, 256)


def roofline(model: Model, gpu: Gpu, gpus: int = 1) -> Profile:
    """The profile of `model` on `gpus` GPUs, every figure to 4 digits.

    Raises:
        ValueError: the weights do not fit.
    """
    if gpus < 1:
        raise ValueError(f"gpus must be at least 1, got {gpus}")
    flops, bandwidth = gpus * gpu.flops * model.mfu, gpus * gpu.bytes_per_second * MBU
    batches = np.array(FITTED_BATCHES, dtype=np.float64)
    seconds = np.array([decode_seconds(model, gpu, gpus, batch) for batch in batches])
    slope, fixed = np.polyfit(batches, seconds, 1, w=1 / seconds)
    reduce_seconds = all_reduce_seconds(model, gpu, gpus)
    free = gpus * gpu.memory_bytes * MEMORY_SHARE - _BYTES * model.parameters
    cache_blocks = int(free // (model.kv_bytes_per_token * BLOCK_TOKENS))
    tokens, sequences = vllm_limits(gpu)
    if cache_blocks < 1:
        raise ValueError(f"{model.name} does not fit on {gpus} x {gpu.label}")
    return Profile(
        fixed_seconds=_digits(fixed),
        # Rounding can make a slope of 0 negative.
        decode_seconds_per_sequence=_digits(max(slope, 0.0) + reduce_seconds),
        decode_seconds_per_context_token=_digits(
            max(model.kv_bytes_per_token / bandwidth, model.attention_flop_per_pair / flops)
        ),
        prefill_seconds_per_token=_digits(2 * model.passed_parameters / flops + reduce_seconds),
        prefill_seconds_per_attention_pair=_digits(model.attention_flop_per_pair / flops),
        max_batch_tokens=MAX_BATCH_TOKENS,
        max_sequences=MAX_SEQUENCES,
        block_tokens=BLOCK_TOKENS,
        cache_blocks=cache_blocks,
        kv_bytes_per_token=model.kv_bytes_per_token,
        source=(
            f"Roofline from the model's shape and the GPU's data sheet ({gpus} x {gpu.label}: "
            f"{gpu.flops / 1e12:g} dense BF16 TFLOPS, {gpu.bytes_per_second / 1e12:g} TB/s) "
            f"at MFU {model.mfu:g} and MBU {MBU:g}: python -m lmetric.profiles.roofline "
            f"--model {model.name} --gpu {gpu.name} --gpus {gpus}."
        ),
        note=(
            f"Not a measurement; method and deviations: docs/research/profiles.md. The cache holds "
            f"{cache_blocks * BLOCK_TOKENS} tokens (BF16, {model.kv_bytes_per_token} bytes each, beside "
            f"{_BYTES * model.parameters / 1e9:.1f} GB of weights). max_batch_tokens, max_sequences and "
            "block_tokens are settings, the same in all rooflines; vLLM 0.32's defaults on this GPU are "
            f"{tokens:,}, {sequences:,} and {BLOCK_TOKENS}."
        ),
    )


def as_yaml(profile: Profile) -> str:
    """The profile as the text of a profile file."""
    return yaml.safe_dump(profile.model_dump(exclude_none=True), sort_keys=False, width=110)


def _digits(value: float) -> float:
    return float(f"{value:.4g}")


def main() -> None:
    """Print a profile."""
    parser = argparse.ArgumentParser(prog="python -m lmetric.profiles.roofline", description=main.__doc__)
    parser.add_argument("--model", required=True, choices=sorted(MODELS))
    parser.add_argument("--gpu", required=True, choices=sorted(GPUS))
    parser.add_argument("--gpus", type=int, default=1, help="GPUs of one instance (tensor parallel)")
    options = parser.parse_args()
    try:
        print(as_yaml(roofline(MODELS[options.model], GPUS[options.gpu], options.gpus)), end="")
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
