"""The roofline profiles of python/lmetric/profiles, and docs/research/profiles.md.

Everything is computed from the shapes and data sheets in python/lmetric/profiles/roofline.py.
"""

from __future__ import annotations

from collections.abc import Iterator

from lmetric.profiles import Profile, load_profile, shipped_profiles
from lmetric.profiles.roofline import (
    FITTED_BATCHES,
    GPUS,
    MODELS,
    SHIPPED,
    Model,
    as_yaml,
    decode_seconds,
    profile_name,
    roofline,
)

HEAD = """\
# Profiles

Choose, make or fit the profile of an engine for simulations and predictions. `scripts/make_reference profiles` generates this
page and the roofline profiles from `scripts/reference/profiles.py` and `python/lmetric/profiles/roofline.py`. Edit those files.

A profile contains the cost of a model on a GPU: the time of one step of continuous batching, and the KV cache's size in tokens.
`--profile` takes a name below or a path.

    step seconds = fixed_seconds
                 + decode_seconds_per_sequence x decoding sequences + decode_seconds_per_context_token x their context
                 + prefill_seconds_per_token x prompt tokens + prefill_seconds_per_attention_pair x their pairs

- A chunk of g tokens after n tokens of context has g x (n + g / 2) pairs.
- `max_batch_tokens` bounds the tokens of a step, `max_sequences` the running sequences.
- `cache_blocks` blocks of `block_tokens` tokens are the KV memory. `Profile.in_blocks_of(512)` divides this memory into other
  blocks, such as a trace's.
- `kv_bytes_per_token` is the size of a token's KV cache in a transfer.
- With `decode_throughput`, the decodes of n sequences take n / (alpha n^2 + beta n + gamma) seconds in place of the first three terms.
  With `hold_peak` the curve stays at its peak beyond it.
"""

# Profiles of real engines.
MEASURED = {"qwen2.5-3b-h100": (Model("qwen2.5-3b", 36, 2048, 16, 2, 128, 11_008, 2_688), "h100")}
# Profiles made by hand.
HAND = {
    "independent-sim",
    "independent-pd",
    "sibyl-eq15-held",
    "sibyl-eq15-as-printed",
    "star-qwen-7b-4090d",
    "star-qwen3-14b-h800",
}

METHOD = """
`independent-sim` was set by hand, for comparisons with an independent simulator. Its note gives the difference from real
GPUs. The demo and the emulated engines run on it. `independent-pd` is the matching profile for decode pools.

- **`sibyl-eq15-...`**: decodes follow Eq. (15) of the SIBYL paper, for any context (`decode_throughput`, 1,177 tokens/s at its peak of 53
  sequences). As printed, it falls below 0 past 105, and an engine past that point stops forever.
- **`star-...`**: made of the STAR paper's figures of its clusters (one step time and one tail) and of data sheets; `source` has the arithmetic.
- **`qwen2.5-3b-h100`** is the only measurement: `calibrate` on vLLM 0.26.0 (`bench/gpu/run.py`).
- **All others** are rooflines, not measurements: a model's shape and a GPU's data sheet. They assume an MFU of 0.75 (a mixture of experts:
  0.6), an MBU of 0.8, 2 ms of overhead per step, BF16 weights and KV, and 0.9 of the memory. The docstring of `roofline.py` has the method;
  `source` in each file has the command that prints it. `2x` means two GPUs per instance.

## Accuracy

Decode steps are not linear in the batch: a mixture of experts reads more experts with more sequences, and a dense model
reaches its compute limit. The profile is the best linear fit over batches of {batches}. The five profiles with the
largest errors against the roofline itself, without context:

| profile | {heads} |
| --- |{rule}
{lines}
Times at very small batches of a mixture of experts are too long: do not use these profiles for TPOT on an idle fleet.

Comparison with public tables, in ms: aiconfigurator-core 0.12 for vLLM, one GPU, BF16. These are predictions from measured
kernels. MFU and MBU were fitted to them:

| step | {tables} |
| --- |{tables_rule}
{check}
Comparison with one H100, in ms: `qwen2.5-3b-h100`, a profile that `calibrate` fitted to vLLM 0.26.0 (18 probes, 1.4% off in the
median and 26% at most), and the roofline of its shape. Nothing of the roofline was fitted to it:

| step | measured | roofline |
| --- | --- | --- |
{measured}
There is no such table for the H20: its profiles use these MFU and MBU, too.

If a conclusion may depend on the constants, repeat the study with a second profile. Prompts longer than the cache do not fit: `qwen3-32b-h20` and
`qwen2.5-32b-a100` cannot serve the longest prompts of public traces. Use the `2x` profiles for these.

## Make a profile

```python
from lmetric.profiles.roofline import GPUS, Model, as_yaml, roofline

shape = Model(
    "mistral-7b",
    layers=32,
    hidden=4096,
    heads=32,
    kv_heads=8,
    head_dim=128,
    intermediate=14336,
    vocabulary=32768,
)
print(as_yaml(roofline(shape, GPUS["a100"])))
```

```console
$ python -m lmetric.profiles.roofline --model qwen3-32b --gpu h20 --gpus 2
```

A fit to your own engine is more accurate:

## Calibrating

```console
$ lmetric-router calibrate http://10.0.0.1:8000 --out mine.yaml
$ lmetric-router simulate --trace slice --profile mine.yaml
$ lmetric-router serve --engine http://10.0.0.1:8000 --profile mine.yaml
```

It needs `scipy` (`pip install scipy`) and an engine without other load. It refuses a busy engine, and stops if other
requests arrive (`--force` continues). It first prints its cost: tokens within `--tokens-budget` (200,000), requests at once within `--max-batch` (32).

- **Probes**: prompts of many lengths, new tokens after cached tokens, batches of several sizes with short and long contexts, and a long
  prompt beside decodes. Prompts are random token ids. Each probe runs twice, and the lower quartile counts.
- **Fit**: least squares of relative errors with a loss that reduces the weight of outliers. The fixed time of each request (HTTP, network) is
  left out of the profile. On an emulated engine with `llama-3.1-8b-a100`, 18 probes have a median error of 0.1% (decode) to 3.1% (cached).
- **Sizes**: `block_tokens` and `cache_blocks` come from vLLM's `/metrics`. Other sizes are assumed, with a note; flags override them.
- **Limits**: the output and the profile's `note` name constants that the probes cannot separate. Increase the budget and `--max-batch` to
  separate more.

Decode steps of real GPUs are not linear in the batch ([accuracy](#accuracy)); the fit is the line through the probed batches.

## Learned while serving

Without a profile, the router learns both times of each instance from its own traffic: `prefill_tokens_per_second` from first tokens, and
`step_seconds` from streams ([indicators](../reference/policies.md#indicators)). `Router.stats()` (`predicted_ttft_source`) shows the source of
`predicted_ttft_seconds`: `profile`, `learned_step_time`, `learned_rate`, `pool_rate` (the other instances' mean), or `prior` (8,000 tokens/s).
"""

# A step: prompt tokens, cached tokens before them, decoding sequences, context of each.
STEPS = {
    "prefill of 512": (512, 0, 0, 0),
    "prefill of 2,048": (2048, 0, 0, 0),
    "prefill of 8,192": (8192, 0, 0, 0),
    "prefill of 32,768": (32768, 0, 0, 0),
    "prefill of 8,192 with 6,144 cached": (2048, 6144, 0, 0),
    "1 decode at 4,096": (0, 0, 1, 4096),
    "8 decodes at 4,096": (0, 0, 8, 4096),
    "16 decodes at 4,096": (0, 0, 16, 4096),
    "32 decodes at 4,096": (0, 0, 32, 4096),
    "64 decodes at 4,096": (0, 0, 64, 4096),
    "128 decodes at 4,096": (0, 0, 128, 4096),
    "256 decodes at 4,096": (0, 0, 256, 4096),
    "prefill of 2,048 and 32 decodes at 4,096": (2048, 0, 32, 4096),
}
# Times of these steps in aiconfigurator-core (Apache-2.0), ms.
PUBLIC = {
    ("qwen3-30b-a3b", "h200"): [
        22.78, 40.43, 138.43, 1015.58, 55.31, 4.15, 8.99, 11.65, 18.0, 21.92, 29.41, 43.93, 46.1
    ],
    ("qwen3-32b", "h200"): [
        47.75, 184.47, 864.27, 4624.47, 225.31, 18.44, 21.1, 24.44, 28.02, 36.27, 52.73, 91.34, 208.65
    ],
    ("llama-3.1-8b", "a100"): [
        35.99, 125.19, 556.95, 3430.12, 160.13, 12.16, 14.71, 17.49, 25.07, 33.51, 56.43, 105.76, 145.86
    ],
    ("qwen3-32b", "a100"): [
        138.19, 501.18, 2254.88, 13736.35, 644.81, 45.33, 49.73, 56.68, 71.11, 93.48, 138.97, 235.77, 556.72
    ],
}  # fmt: skip

PROBED_TOKENS, PROBED_SEQUENCES = 24_000, 32  # the largest probes of measured profiles


def step_seconds(profile: Profile, tokens: int, cached: int, sequences: int, context: int) -> float:
    """The time of one step; the prompt's tokens in one chunk."""
    return (
        profile.fixed_seconds
        + profile.decode_seconds_per_sequence * sequences
        + profile.decode_seconds_per_context_token * sequences * context
        + profile.prefill_seconds_per_token * tokens
        + profile.prefill_seconds_per_attention_pair * tokens * (cached + tokens / 2)
    )


def profiles() -> dict[str, str]:
    """The text of each roofline profile, by its name."""
    return {
        profile_name(model, gpu, gpus): as_yaml(roofline(MODELS[model], GPUS[gpu], gpus))
        for model, gpu, gpus in SHIPPED
    }


def table() -> Iterator[str]:
    """One row for each shipped profile."""
    heads = ["profile", "fixed, ms", "sequence, us", "context token, ns", "prompt token, us", "pair, ns"]
    heads += ["step tokens", "sequences", "block", "cache, tokens", "from"]
    yield f"| {' | '.join(heads)} |\n|{' --- |' * len(heads)}\n"
    for name in shipped_profiles():
        p = load_profile(name)
        cells = [
            f"`{name}`",
            f"{p.fixed_seconds * 1e3:.4g}",
            f"{p.decode_seconds_per_sequence * 1e6:.4g}",
            f"{p.decode_seconds_per_context_token * 1e9:.4g}",
            f"{p.prefill_seconds_per_token * 1e6:.4g}",
            f"{p.prefill_seconds_per_attention_pair * 1e9:.4g}",
            f"{p.max_batch_tokens:,}",
            f"{p.max_sequences:,}",
            f"{p.block_tokens:,}",
            f"{p.cache_blocks * p.block_tokens:,}",
            "hand" if name in HAND else "measured" if name in MEASURED else "roofline",
        ]
        yield f"| {' | '.join(cells)} |\n"


def lines() -> Iterator[str]:
    """The deviation of a fitted line from the roofline by batch, of the five profiles with the
    largest deviations."""
    found = []
    for model, gpu, gpus in SHIPPED:
        p = roofline(MODELS[model], GPUS[gpu], gpus)
        errors = []
        for batch in (1, *FITTED_BATCHES):
            line = p.fixed_seconds + p.decode_seconds_per_sequence * batch
            errors.append(line / decode_seconds(MODELS[model], GPUS[gpu], gpus, batch) - 1)
        found.append((max(map(abs, errors)), profile_name(model, gpu, gpus), errors))
    for _, name, errors in sorted(found, reverse=True)[:5]:
        yield f"| `{name}` | {' | '.join(f'{error:+.0%}' for error in errors)} |\n"


def check() -> Iterator[str]:
    """The method against the public tables."""
    for row, (step, work) in enumerate(STEPS.items()):
        cells = []
        for (model, gpu), public in PUBLIC.items():
            ours = step_seconds(roofline(MODELS[model], GPUS[gpu]), *work) * 1e3
            cells.append(f"{_ms(public[row])}: {_ms(ours)} ({ours / public[row] - 1:+.0%})")
        yield f"| {step} | {' | '.join(cells)} |\n"


def measured() -> Iterator[str]:
    """The method against measured profiles, within the range of their probes."""
    for name, (model, gpu) in MEASURED.items():
        probed, line = load_profile(name), roofline(model, GPUS[gpu])
        for step, work in STEPS.items():
            tokens, cached, sequences, _ = work
            if tokens + cached <= PROBED_TOKENS and sequences <= PROBED_SEQUENCES:
                real, ours = (step_seconds(each, *work) * 1e3 for each in (probed, line))
                yield f"| {step} | {_ms(real)} | {_ms(ours)} ({ours / real - 1:+.0%}) |\n"


def _ms(value: float) -> str:
    return f"{value:.3g}" if value < 100 else f"{value:,.0f}"


def page() -> str:
    """docs/research/profiles.md."""
    batches = [f"batch {batch}" for batch in (1, *FITTED_BATCHES)]
    method = METHOD.format(
        batches=f"{FITTED_BATCHES[0]} to {FITTED_BATCHES[-1]}",
        heads=" | ".join(batches),
        rule=" --- |" * len(batches),
        lines="".join(lines()),
        tables=" | ".join(f"{model}, {gpu}: table, roofline" for model, gpu in PUBLIC),
        tables_rule=" --- |" * len(PUBLIC),
        check="".join(check()),
        measured="".join(measured()),
    )
    return HEAD + "\n" + "".join(table()) + method


def files() -> dict[str, str]:
    """Returns the profiles and the page."""
    made = {f"python/lmetric/profiles/{name}.yaml": text for name, text in profiles().items()}
    return {**made, "docs/research/profiles.md": page()}
