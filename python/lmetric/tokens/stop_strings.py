"""Stop strings of a continued stream.

A stop string may begin before the failure of an engine and end after it. So the engine that
continues gets no stop strings: the router looks for them itself, like vLLM 0.32
(`v1/engine/detokenizer.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class StopStrings:
    """The stop strings of a request, and the text of its answer up to the first of them."""

    def __init__(self, strings: list[str], *, shown: bool, min_tokens: int) -> None:
        self.text = ""  # of all tokens so far
        self._strings = strings
        self._shown = shown  # the client gets the stop string, too
        self._min_tokens = min_tokens
        # A stream holds back this number of characters: they may be the beginning of a stop string.
        self._held = 0 if shown else max(map(len, strings)) - 1
        self._sent = 0  # characters that the client has

    @classmethod
    def of(cls, request: Mapping[str, Any]) -> StopStrings | None:
        """Returns the stop strings of a request; None: it has none."""
        given = request.get("stop")
        strings = [given] if isinstance(given, str) else given
        if not isinstance(strings, list) or not all(isinstance(each, str) and each for each in strings):
            return None
        least = request.get("min_tokens")
        shown = request.get("include_stop_str_in_output") is True
        return (
            cls(strings, shown=shown, min_tokens=least if isinstance(least, int) else 0) if strings else None
        )

    def resume(self, text: str) -> str:
        """Takes the text of an engine's tokens. Returns the part that the engine has sent."""
        self.text, self._sent = text, max(len(text) - self._held, 0)
        return text[: self._sent]

    def add(self, text: str, tokens: int) -> str | None:
        """Adds the text of a token. Returns the stop string that ends the answer, if one does.

        `tokens`: the tokens of the answer, with this token.
        """
        begin = len(self.text)
        self.text += text
        if tokens <= self._min_tokens:
            return None
        ends = {
            string: at + len(string)
            for string in self._strings
            if (at := self.text.find(string, max(0, begin + 1 - len(string)))) >= 0
        }
        if not ends:
            return None
        first = min(ends, key=lambda string: ends[string])
        self.text = self.text[: ends[first] if self._shown else ends[first] - len(first)]
        return first

    def due(self, *, over: bool) -> str:
        """Returns the text that the client may get now. `over`: the answer is complete."""
        begin, end = self._sent, len(self.text) - (0 if over else self._held)
        self._sent = max(begin, end)
        return self.text[begin:end]
