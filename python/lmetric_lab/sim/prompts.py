"""Creates prompts from a trace's block IDs. Equal IDs give equal text, so that prefix caches
hit."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lmetric_lab.sim.traces import Trace

_TOKENIZER = Path(__file__).parent.parent / "emulated" / "tokenizer.json"
_CACHED_BLOCKS = 8192  # 25 MB with 512 tokens of about 6 bytes


class PromptWriter:
    """Writes prompts of words that are one token each with the shipped tokenizer.

    The text has ``input_tokens`` words. A block ID gives the same words in every place and trace,
    except for the length. Tokens beyond a request's IDs are unique. A different `seed` gives
    different words, to avoid hits in caches that have seen the first words. With other tokenizers,
    a word can be several tokens.
    """

    def __init__(self, words: Sequence[str] | None = None, *, seed: int = 0) -> None:
        self._words = shipped_words() if words is None else list(words)
        self._seed = np.uint64(seed)
        self._cache: OrderedDict[tuple[int, int], str] = OrderedDict()

    def prompt(self, trace: Trace, index: int) -> str:
        """The prompt of the trace's request `index`."""
        left, size = int(trace.input_tokens[index]), trace.block_tokens
        blocks = trace.blocks(index).tolist()
        whole = left // size
        texts = self._texts(blocks[:whole], size, False) + self._texts(blocks[whole:], left % size, False)
        rest = left - min(left, len(blocks) * size)
        return "".join(texts + self._texts([index] if rest else [], rest, True))

    def _texts(self, blocks: list[int], tokens: int, private: bool) -> list[str]:
        """The first `tokens` tokens of each block. Draws all blocks outside the cache together."""
        texts: dict[int, str] = {}
        for block in blocks:
            if not private and (text := self._cache.get((block, tokens))) is not None:
                self._cache.move_to_end((block, tokens))
                texts[block] = text
        missing = [block for block in dict.fromkeys(blocks) if block not in texts]
        drawn = _draw(np.array(missing, dtype=np.uint64), tokens, self._seed, private)
        for block, words in zip(missing, (drawn % np.uint64(len(self._words))).tolist(), strict=True):
            texts[block] = "".join(map(self._words.__getitem__, words))
            if private:
                continue  # no other request has it, and it may be as long as the prompt
            self._cache[block, tokens] = texts[block]
            if len(self._cache) > _CACHED_BLOCKS:
                self._cache.popitem(last=False)
        return [texts[block] for block in blocks]


def shipped_words() -> list[str]:
    """All words, with a leading space, that are one token in the shipped tokenizer."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(_TOKENIZER))
    # Byte-level vocabularies write a space as U+0120. Some pieces do not result from their own
    # text.
    pieces = sorted(piece[1:] for piece in tokenizer.get_vocab() if piece[:1] == "\u0120")
    words = [f" {piece}" for piece in pieces if piece.isascii() and piece.isalpha() and len(piece) > 1]
    return [word for word in words if len(tokenizer.encode(word).ids) == 1]


def _draw(blocks: NDArray[np.uint64], tokens: int, seed: np.uint64, private: bool) -> NDArray[np.uint64]:
    """Draws `tokens` uniform 64-bit numbers per block (rows), which depend only on the block
    (SplitMix64)."""
    golden = np.uint64(0x9E3779B97F4A7C15)
    with np.errstate(over="ignore"):
        begin = _mix(blocks ^ _mix(seed * np.uint64(2) + np.uint64(private)))
        return _mix(begin[:, None] + np.arange(tokens, dtype=np.uint64) * golden)


def _mix(x: NDArray[np.uint64] | np.uint64) -> NDArray[np.uint64]:
    with np.errstate(over="ignore"):
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return np.asarray(x ^ (x >> np.uint64(31)))
