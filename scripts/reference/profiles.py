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
- **All others** are rooflines, not measurements: a model's shape and a GPU's data sheet. They assume an MFU of 0.75 (a mixture of experts:
  0.6), an MBU of 0.8, 2 ms of overhead per step, BF16 weights and KV, and 0.9 of the memory. The docstring of `roofline.py` has the method;
  `source` in each file has the command that prints it. `2x` means two GPUs per instance.

## Accuracy

Decode steps are not linear in the batch: a mixture of experts reads more experts with more sequences, and a dense model
reaches its compute limit. The profile is the best linear fit over batches of {batches}. Its errors against the roofline
itself, without context:

| profile | {heads} |
| --- |{rule}
{lines}
Times at very small batches of a mixture of experts are too long: do not use these profiles for TPOT on an idle fleet.

Comparison with public tables, in ms: aiconfigurator-core 0.12 for vLLM, one GPU, BF16. These are predictions from measured
kernels. MFU and MBU were fitted to them:

| step | {tables} |
| --- |{tables_rule}
{check}
There is no such table for the H20: its profiles use these MFU and MBU, too.

The tables also differ from measurements (the tool's issues report factors of 1.5 to 3 for mixed steps). If a conclusion may
depend on the constants, repeat the study with a second profile. Prompts longer than the cache do not fit: `qwen3-32b-h20` and
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

It needs `scipy` (`pip install lmetric-router[calibrate]`) and an engine without other load. It refuses a busy engine, and stops
when other requests arrive (`--force` continues; their work then counts as the probes'). It first prints its cost: prompt and output
tokens within `--tokens-budget` (200,000), requests at once within `--max-batch` (32). Ctrl-C ends the requests and writes
nothing. An example on a busy machine, with an emulated engine and the profile `llama-3.1-8b-a100`:

```text
vllm 0.32.0+lmetric.0.1.0, model emulated: 18 probes, 2 times each, with at most 127,030 tokens (200,000 with repetitions), 32 requests at once, prompts of up to 9,811 tokens
A prefill's time to first token, a decode step, or all steps beside a prompt
 kind      probe                                     measured, ms   predicted, ms   off by   measurements apart
 ──────────────────────────────────────────────────────────────────────────────────────────────────────────────
 prefill   prompt of 74                                     20.07           19.21    -4.3%                34.0%
 prefill   prompt of 148                                    23.30           23.67    +1.6%                43.3%
 prefill   prompt of 297                                    30.86           32.69    +5.9%                 7.3%
 prefill   prompt of 595                                    51.64           50.90    -1.4%                 7.0%
 prefill   prompt of 1,190                                  87.10           87.88    +0.9%                11.1%
 prefill   prompt of 2,380                                 176.17          174.67    -0.8%                 5.5%
 prefill   prompt of 4,760                                 349.84          347.98    -0.5%                 2.5%
 prefill   prompt of 9,520                                 733.96          734.73    +0.1%                 0.1%
 cached    398 behind 1,999 cached                          42.94           41.69    -2.9%                 1.4%
 cached    1,332 behind 1,999 cached                       107.43          104.10    -3.1%                 3.8%
 decode    1 decoding at 32                                 10.35           10.35    -0.0%                 0.2%
 decode    1 decoding at 535                                10.39           10.38    -0.1%                 0.4%
 decode    4 decoding at 32                                 10.45           10.42    -0.3%                 0.1%
 decode    16 decoding at 32                                10.72           10.74    +0.2%                 0.2%
 decode    32 decoding at 32                                11.18           11.17    -0.1%                 0.9%
 decode    32 decoding at 535                               12.26           12.26    +0.0%                 2.2%
 mixed     prompt of 3,172 beside 2 decoding at 32         259.79          264.58    +1.8%                 1.6%
 mixed     prompt of 9,811 beside 2 decoding at 32         774.16          785.79    +1.5%                 0.4%
 kind      probes   median error   worst
 ───────────────────────────────────────
 prefill        8           1.4%    5.9%
 cached         2           3.1%    3.1%
 decode         6           0.1%    0.3%
 mixed          2           1.8%    1.8%
131,698 tokens used
 constant                               seconds   standard error
 ───────────────────────────────────────────────────────────────
 fixed_seconds                          0.01032          6.5e-05
 decode_seconds_per_sequence          2.315e-05          5.1e-06
 decode_seconds_per_context_token     6.752e-08          1.5e-08
 prefill_seconds_per_token            6.005e-05            7e-07
 prefill_seconds_per_attention_pair   2.363e-09            2e-10
 (each request, not in the profile)    0.004438
note: max_sequences: the engine does not say; 256 is vLLM's default
note: max_batch_tokens: the engine does not say; 2,048 is by the pieces that long prompts came in, 1,560 to 2,232 tokens
written: mine.yaml; use it with simulate --profile mine.yaml or serve --profile mine.yaml
```

- **Probes.** Prompts of many lengths alone, and new tokens after cached tokens: time to first token. Batches of several sizes
  with short and long contexts: time between tokens. A long prompt beside decodes: both together, and the pieces of the
  prompt. Prompts are random token ids, so they hit no cache. Each probe runs twice; probes with different
  measurements run again within the budget. Disturbances only add time, so the lower quartile counts.
- **Fit.** Least squares of relative errors with a loss that reduces the weight of outliers (`scipy.optimize.least_squares`,
  `soft_l1`), no constant below 0; probes with different measurements weigh less. The fixed time of each request (HTTP, network)
  is fitted beside the constants and left out of the profile.
- **Sizes.** `block_tokens` and `cache_blocks` come from vLLM's `/metrics`. The development pages of vLLM or SGLang, if they are
  on, return all four sizes; otherwise `max_batch_tokens` comes from the pieces. Other sizes are assumed, with a note; flags override them.
- **Limits.** The output and the profile's `note` name constants that the probes cannot separate, with a bound. If two
  constants always occur together, only their sum is known, and predictions are good for loads like the probes'. Increase the
  budget and `--max-batch` to separate more.

Decode steps of real GPUs are not linear in the batch ([accuracy](#accuracy)); the fit is the line through the probed batches.

## Learned while serving

Without a profile the router learns both times from its own traffic, for each instance:

| indicator | learned from |
| --- | --- |
| `prefill_tokens_per_second` | first tokens |
| `step_seconds` | streams: one stream's tokens count an instance's steps. The time between two of them is regressed on the decoded and prefilled tokens in between |
| `prefill_relative_error`, `step_relative_error` | errors of the last twenty predictions, each before the router learned from it |

All four are [indicators](../reference/indicators.md) and in `/metrics`, absent until known. The code is `rust/core/src/estimate/step_watch.rs` and
`step_fit.rs`: some hundred operations per eight steps, none for decisions that do not read them. Answers that are not streamed do not
count for steps. Load from other sources makes steps appear longer. A step is assumed to hold 2,048 tokens until long prompts show more.

`Router.stats()` (`predicted_ttft_source`) and `/metrics` (`lmetric_instance_predicted_ttft_source`) show the source of
`predicted_ttft_seconds`:

| source | used |
| --- | --- |
| `profile` | if a profile is set |
| `learned_step_time` | if the model learned on the instance includes prefills and is off by less than a third |
| `learned_rate` | the instance's prefill rate |
| `pool_rate` | the other instances' mean |
| `prior` | an assumed 8,000 tokens/s |
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
            "hand" if name in HAND else "roofline",
        ]
        yield f"| {' | '.join(cells)} |\n"


def lines() -> Iterator[str]:
    """The deviation of each fitted line from the roofline, batch by batch."""
    for model, gpu, gpus in SHIPPED:
        p = roofline(MODELS[model], GPUS[gpu], gpus)
        cells = []
        for batch in (1, *FITTED_BATCHES):
            line = p.fixed_seconds + p.decode_seconds_per_sequence * batch
            cells.append(f"{line / decode_seconds(MODELS[model], GPUS[gpu], gpus, batch) - 1:+.0%}")
        yield f"| `{profile_name(model, gpu, gpus)}` | {' | '.join(cells)} |\n"


def check() -> Iterator[str]:
    """The method against the public tables."""
    for row, (step, work) in enumerate(STEPS.items()):
        cells = []
        for (model, gpu), public in PUBLIC.items():
            ours = step_seconds(roofline(MODELS[model], GPUS[gpu]), *work) * 1e3
            cells.append(f"{_ms(public[row])}: {_ms(ours)} ({ours / public[row] - 1:+.0%})")
        yield f"| {step} | {' | '.join(cells)} |\n"


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
    )
    return HEAD + "\n" + "".join(table()) + method


def files() -> dict[str, str]:
    """Returns the profiles and the page."""
    made = {f"python/lmetric/profiles/{name}.yaml": text for name, text in profiles().items()}
    return {**made, "docs/research/profiles.md": page()}
