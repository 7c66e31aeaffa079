"""Token ids of an answer to its text, as engines stream it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from lmetric._core import TokenEncoder

_CUT = "\ufffd"  # a character that is not whole yet
# Of the prompt, so many tokens are enough to know what its end looks like: a character has at most four
# bytes, and a tokenizer looks no further than a word.
_SUFFIX_LEAST, _SUFFIX_MOST = 4, 64


class Detokeniser:
    """The text of an answer, token by token: what engines hold back (a character that is not whole, a space
    that only the next word shows) comes when it is known, and never twice.

    Hugging Face's `DecodeStream`, which vLLM uses (`v1/engine/detokenizer.py`, 0.32.0), with one difference:
    after a prompt that ends inside a character, that one says the whole prompt again. A stream over the whole
    answer is not stopped there by a cut, as a second engine would be.

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
            # What came before looks different by now: vLLM, too, begins anew with this token.
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
