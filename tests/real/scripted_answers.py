"""Makes vLLM's model say given answers: `--logits-processors scripted_answers:Scripted`.

The variable ANSWERS holds JSON: pairs of a text and a list of answers. A prompt that contains the
text gets answer n after n earlier answers; later ones get the last. A prompt that ends inside an
answer gets the rest of it, as after a failover.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

ANSWER_STARTS = "<|im_start|>assistant\n"
ANSWER_ENDS = "<|im_end|>"


class Scripted(AdapterLogitsProcessor):
    """Gives all but the next token of the answer no chance."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        super().__init__(vllm_config, device, is_pin_memory)
        self._tokens = Tokenizer.from_file(str(Path(vllm_config.model_config.tokenizer) / "tokenizer.json"))
        self._answers: list[tuple[str, list[str]]] = json.loads(os.environ["ANSWERS"])

    def is_argmax_invariant(self) -> bool:
        """Greedy requests need it, too."""
        return False

    def new_req_logits_processor(self, params: Any) -> Callable[..., torch.Tensor]:
        """Returns the processor of a request, which reads the prompt at its first token."""
        rest: list[int] = []

        def say(prompt: list[int], output: list[int], logits: torch.Tensor) -> torch.Tensor:
            if not rest:
                rest.extend(self._rest(prompt))
            token = rest[min(len(output), len(rest) - 1)]
            only = torch.full_like(logits, -torch.inf)
            only[token] = 0
            return only

        return say

    def _rest(self, prompt: list[int]) -> list[int]:
        """Returns the tokens that a prompt's answer still needs."""
        text, begin = self._tokens.decode(prompt, skip_special_tokens=False), self._ids(ANSWER_STARTS)
        answers = next(answers for marker, answers in self._answers if marker in text)
        before = text.split(ANSWER_STARTS)
        answer = answers[min(len(before) - 2, len(answers) - 1)]
        starts = (at for at in range(len(prompt), 0, -1) if prompt[at - len(begin) : at] == begin)
        return self._ids(answer + ANSWER_ENDS)[len(prompt) - next(starts) :]

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self._tokens.encode(text, add_special_tokens=False).ids
        return ids
