"""Converts token IDs of an answer to text, like the streams of engines."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from copy import copy
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from lmetric._core import TokenEncoder

_CUT = "\ufffd"  # a character that is not whole yet
# Number of last prompt tokens that determine the text at its end. A character has at most four
# bytes, and tokenizers look no further than a word.
_SUFFIX_LEAST, _SUFFIX_MOST = 4, 64


# Tokens that are decoded together if their text is whole. One by one, the 20,000 tokens of a long
# answer would hold the event loop for 200 ms.
_BLOCK = 64


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
        self._decode = partial(encoder.decode, skip_special_tokens=skip_special_tokens)
        # The shortest end of the prompt that is whole, or as much as will be looked at.
        size = len(prompt)
        for count in range(_SUFFIX_LEAST, _SUFFIX_MOST):
            self._ids = list(map(int, prompt[max(0, size - count) :]))
            if count >= size or _CUT not in self._decode(self._ids):
                break
        self._read = len(self._ids)  # of them, what is in `_prefix`
        self._prefix = self._decode(self._ids)

    def more(self, ids: Sequence[int]) -> str:
        """The text that these tokens add."""
        return "".join([self._step(block) for block in _blocks(ids)])

    def _step(self, tokens: Sequence[int]) -> str:
        ids = [*self._ids, *tokens]
        text = self._decode(ids)
        whole = len(text) > len(self._prefix) and not text.endswith(_CUT)
        if len(tokens) > 1 and not (whole and text.startswith(self._prefix)):
            return "".join([self._step([token]) for token in tokens])
        self._ids = ids
        if not whole:
            return ""
        if not text.startswith(self._prefix):
            # The earlier text has changed: like vLLM, start again with this token.
            self._ids, self._read = list(tokens), 0
            text, self._prefix = self._decode(self._ids), ""
            if not text or text.endswith(_CUT):
                return ""
        new = text[len(self._prefix) :]
        rest = len(self._ids) - self._read
        self._ids = self._ids[self._read :]
        self._prefix = self._decode(self._ids)
        self._read = rest
        return new


def tokens_of_text(encoder: TokenEncoder, ids: Sequence[int], text: str) -> int:
    """Returns how many of an answer's tokens have the first occurrence of a text; 0: none.

    Tokens that begin a character count from the token on that completes it. Special tokens are
    text. Raises `TokenizeError`.
    """
    stream = Detokeniser(encoder, (), skip_special_tokens=False)
    streams, texts = [], []  # before each block, and the text that the block adds
    for block in _blocks(ids):
        streams.append(copy(stream))
        texts.append(stream.more(block))
    start = "".join(texts).find(text)
    if start < 0:
        return 0
    ends = list(accumulate(map(len, texts), initial=0))

    def tokens(size: int) -> int:
        """The fewest tokens with the first `size` characters."""
        at = bisect_left(ends, size)
        if at == 0:
            return 0
        before = (at - 1) * _BLOCK
        block = ids[before : before + _BLOCK]
        more = range(len(block) + 1)
        rest = size - ends[at - 1]
        return before + bisect_left(more, rest, key=lambda n: len(copy(streams[at - 1]).more(block[:n])))

    return tokens(start + len(text)) - tokens(start)


def _blocks(ids: Sequence[int]) -> list[Sequence[int]]:
    return [ids[start : start + _BLOCK] for start in range(0, len(ids), _BLOCK)]
