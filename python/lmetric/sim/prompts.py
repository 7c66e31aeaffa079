"""Prompts rebuilt from a trace's block ids: equal ids become equal text, so that prefix caches hit."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lmetric.sim.traces import Trace

_TOKENIZER = Path(__file__).parent.parent / "engines" / "emulated" / "tokenizer.json"
_CACHED_BLOCKS = 8192  # 512 tokens of some 6 bytes each: 25 MB


class PromptWriter:
    """Writes each request's prompt as words that are one token each under the shipped tokenizer.

    The text is ``input_tokens`` words long. Block ``id`` reads the same wherever it stands and, but for its
    length, in every trace; tokens past a request's ids are its own. Another `seed` writes other words for the
    same ids, for a server whose caches have seen the first ones. Under other tokenizers a word may be several
    tokens.
    """

    def __init__(self, words: Sequence[str] | None = None, *, seed: int = 0) -> None:
        self._words = shipped_words() if words is None else list(words)
        self._seed = np.uint64(seed)
        self._cache: OrderedDict[tuple[int, int, bool], str] = OrderedDict()

    def prompt(self, trace: Trace, index: int) -> str:
        """The prompt of the trace's request `index`."""
        left = int(trace.input_tokens[index])
        parts = []
        for block in trace.blocks(index).tolist():
            parts.append(self._block(block, min(left, trace.block_tokens), False))
            left -= min(left, trace.block_tokens)
        if left:
            parts.append(self._block(index, left, True))
        return "".join(parts)

    def _block(self, block: int, tokens: int, private: bool) -> str:
        key = (block, tokens, private)
        text = self._cache.get(key)
        if text is None:
            chosen = _draw(block, tokens, self._seed, private) % np.uint64(len(self._words))
            text = "".join(map(self._words.__getitem__, chosen.tolist()))
            self._cache[key] = text
            if len(self._cache) > _CACHED_BLOCKS:
                self._cache.popitem(last=False)
        else:
            self._cache.move_to_end(key)
        return text


def shipped_words() -> list[str]:
    """The words, each with the space before it, that the shipped tokenizer keeps as one token."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(_TOKENIZER))
    # Byte-level vocabularies write a space as U+0120. Not every such piece is reached from its own text.
    pieces = sorted(piece[1:] for piece in tokenizer.get_vocab() if piece[:1] == "\u0120")
    words = [f" {piece}" for piece in pieces if piece.isascii() and piece.isalpha() and len(piece) > 1]
    return [word for word in words if len(tokenizer.encode(word).ids) == 1]


def _draw(block: int, tokens: int, seed: np.uint64, private: bool) -> NDArray[np.uint64]:
    """`tokens` even draws from 64 bits that depend on the block and on nothing else (SplitMix64)."""
    golden = np.uint64(0x9E3779B97F4A7C15)
    with np.errstate(over="ignore"):
        begin = _mix(np.uint64(block) ^ _mix(seed * np.uint64(2) + np.uint64(private)))
        return _mix(begin + np.arange(tokens, dtype=np.uint64) * golden)


def _mix(x: NDArray[np.uint64] | np.uint64) -> NDArray[np.uint64]:
    with np.errstate(over="ignore"):
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return np.asarray(x ^ (x >> np.uint64(31)))
