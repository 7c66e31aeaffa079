"""The token budget of an engine's steps for a time between tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from lmetric._core import StepTable
from lmetric.profiles import Profile

# Answers of chats and agents follow prompts of some thousand tokens. The last tokens of a prompt
# cost the most: they attend to all tokens before them.
CONTEXT_TOKENS = 4_000


@dataclass(frozen=True, slots=True)
class Budget:
    """The largest budget with which a step beside some decodes takes at most the time."""

    decodes: int  # sequences that decode, each behind `CONTEXT_TOKENS` tokens, as the prompt's part
    batch_tokens: int | None  # --max-num-batched-tokens; None: no budget is small enough
    step_seconds: float  # a step with this budget, or of the decodes alone
    prompt_tokens_per_second: float
    full_step_seconds: float  # a step with the engine's present budget
    full_prompt_tokens_per_second: float


def budgets(profile: Profile, token_seconds: float) -> Iterator[Budget]:
    """The budgets for a quarter of the engine's sequences, for half of them, and for all."""
    table = StepTable(profile.constants())
    for decodes in sorted({max(1, profile.max_sequences * share // 4) for share in (1, 2, 4)}):
        most = profile.max_batch_tokens - decodes
        tokens = table.prefill_within(
            token_seconds,
            decodes=decodes,
            context_tokens=decodes * CONTEXT_TOKENS,
            before=CONTEXT_TOKENS,
            most=most,
        )
        assert tokens is not None  # a profile answers always
        steps = [_step(table, decodes, each, CONTEXT_TOKENS + each / 2) for each in (tokens, most)]
        # In a whole prompt, a token attends to half of the others on average, whatever its pieces.
        whole = [_step(table, decodes, each, CONTEXT_TOKENS / 2) for each in (tokens, most)]
        rates = [
            prefill / step if step > 0 else 0.0 for prefill, step in zip((tokens, most), whole, strict=True)
        ]
        # vLLM refuses a budget below its sequences.
        budget = tokens + decodes
        fits = tokens > 0 and budget >= profile.max_sequences
        yield Budget(decodes, budget if fits else None, steps[0], rates[0], steps[1], rates[1])


def _step(table: StepTable, decodes: int, prefill: int, attended: float) -> float:
    """Seconds of a step. ``attended``: context of a prompt token, on average."""
    seconds = table.seconds(
        decodes=decodes,
        context_tokens=decodes * CONTEXT_TOKENS,
        prefill_tokens=prefill,
        prefill_pairs=prefill * attended,
    )
    assert seconds is not None
    return seconds
