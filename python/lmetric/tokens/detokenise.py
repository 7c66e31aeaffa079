"""Converts token IDs of an answer to text, like the streams of engines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from lmetric._core import TokenEncoder

_CUT = "\ufffd"  # a character that is not whole yet
# Number of last prompt tokens that determine the text at its end. A character has at most four
# bytes, and tokenizers look no further than a word.
_SUFFIX_LEAST, _SUFFIX_MOST = 4, 64


class Detokeniser:
    """The text of an answer, token by token.

    Incomplete characters and pending spaces are held back until they are known, and sent once. The
    algorithm is Hugging Face's `DecodeStream`, which vLLM uses (`v1/engine/detokenizer.py`,
    0.32.0), with one difference. After a prompt that ends inside a character, `DecodeStream`
    returns the whole prompt again; this class does not.

    Raises `TokenizeError` for ids that have no text.
    """

    def __init__(
        self,
        encoder: TokenEncoder,
        prompt: Sequence[int] | NDArray[np.uint32],
        *,
        skip_special_tokens: bool = True,
    ) -> None:
        self._encoder = encoder
        self._skip = skip_special_tokens
        self._ids = self._suffix(prompt)
        self._read = len(self._ids)  # of them, what is in `_prefix`
        self._prefix = self._decode(self._ids)

    def more(self, ids: Sequence[int]) -> str:
        """The text that these tokens add."""
        return "".join([self._step(token) for token in ids])

    def _step(self, token: int) -> str:
        self._ids.append(token)
        text = self._decode(self._ids)
        if len(text) <= len(self._prefix) or text.endswith(_CUT):
            return ""
        if not text.startswith(self._prefix):
            # The earlier text has changed: like vLLM, start again with this token.
            self._ids, self._read = [token], 0
            text, self._prefix = self._decode(self._ids), ""
            if not text or text.endswith(_CUT):
                return ""
        new = text[len(self._prefix) :]
        rest = len(self._ids) - self._read
        self._ids = self._ids[self._read :]
        self._prefix = self._decode(self._ids)
        self._read = rest
        return new

    def _suffix(self, prompt: Sequence[int] | NDArray[np.uint32]) -> list[int]:
        """The shortest end of the prompt that is whole, or as much as will be looked at."""
        size = len(prompt)
        for count in range(_SUFFIX_LEAST, _SUFFIX_MOST):
            end = list(map(int, prompt[max(0, size - count) :]))
            if count >= size or _CUT not in self._decode(end):
                break
        return end

    def _decode(self, ids: list[int]) -> str:
        return self._encoder.decode(ids, skip_special_tokens=self._skip)
