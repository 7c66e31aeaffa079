"""The emulated engines' tokenizer, their chat template, and the words they answer with."""

from __future__ import annotations

import functools
import re
from array import array
from pathlib import Path
from typing import Any

import orjson
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

# Clients of an engine can load this folder, too: /v1/models reports it as root.
TOKENIZER_PATH = Path(__file__).parent / "tokenizer.json"
CHAT_TEMPLATE_PATH = TOKENIZER_PATH.with_name("chat_template.jinja")


class Text:
    """Tokenizer, template and vocabulary; one for the whole process, see `shared_text`."""

    def __init__(self, path: Path = TOKENIZER_PATH) -> None:
        self._tokenizer = Tokenizer.from_file(str(path))
        self._tokenizer.encode_special_tokens = False
        template = CHAT_TEMPLATE_PATH.read_text(encoding="utf-8")
        self._template = ImmutableSandboxedEnvironment().from_string(template)
        self.vocabulary = self._tokenizer.get_vocab_size()
        names = {token: name for name, token in self._tokenizer.get_vocab().items()}
        candidates = [token for token, name in sorted(names.items()) if re.fullmatch("Ġ[a-z]{2,}", name)]
        # Only words that tokenize back to themselves; then so does any text of these words.
        self.words = array("I", [t for t in candidates if self.encode(" " + names[t][1:]).tolist() == [t]])
        # The text of each token, escaped for a JSON string.
        decoded = (self._tokenizer.decode([token]) for token in range(self.vocabulary))
        self.pieces: list[bytes] = [orjson.dumps(piece)[1:-1] for piece in decoded]

    def encode(self, text: str) -> array[int]:
        """Token ids of a text. The interpreter lock is free meanwhile, so a thread may do it."""
        return array("I", self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids)

    def decode(self, tokens: list[int]) -> str:
        """The text of token ids, special tokens left out."""
        return str(self._tokenizer.decode(tokens))

    def token_strings(self, tokens: list[int]) -> list[str]:
        """The vocabulary's name of each token."""
        return [str(self._tokenizer.id_to_token(token)) for token in tokens]

    def render_chat(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> str:
        """The prompt of a conversation: messages with `role` and text `content`."""
        return self._template.render(
            messages=messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
        )


@functools.cache
def shared_text() -> Text:
    """The process's `Text`."""
    return Text()
