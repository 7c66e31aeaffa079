"""Sessions of AIPerf: its ``mooncake_trace`` lines with ``session_id`` and ``delay`` (ms).

Sources: ``src/aiperf/dataset/loader/models.py`` (`MooncakeTrace`), ``mooncake_trace.py`` beside it,
and ``docs/reference/conversation-context-mode.md`` of github.com/ai-dynamo/aiperf::

    {"session_id": "abc", "timestamp": 0, "input_length": 300, "output_length": 40}
    {"session_id": "abc", "delay": 2000, "input_length": 150, "output_length": 20}

A line has the new tokens of a turn. The turn's prompt is the previous prompt, its answer, and these
tokens, unless ``context_mode`` says otherwise. Lines with text have no token counts.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from itertools import count
from typing import Any, NamedTuple

from lmetric_lab.sim.traces.calls import Growing
from lmetric_lab.sim.traces.fields import Parser, Row, blocks, json_object, number, whole

# Whether a later turn's prompt begins with the previous prompt, and with its answer.
_CONTEXT_MODES = {
    "deltas_without_responses": (True, True),
    "deltas_with_responses": (True, False),
    "message_array_with_responses": (False, False),
}
TEXT = frozenset({"text_input", "messages", "payload", "turns"})
"""Keys of lines with text."""
_NEW_IDS = 2**63  # IDs from here on are of answers and later turns


class _Turn(NamedTuple):
    """The last turn of a session."""

    number: int
    arrival_seconds: float
    from_start: bool
    context_tokens: int  # prompt and answer
    input_tokens: int
    prompt: Growing


class AiPerf(Parser):
    """Reads sessions, whose turns wait for each other, and single requests."""

    def __init__(self, block_tokens: int) -> None:
        super().__init__(block_tokens)
        self._last: dict[str, _Turn] = {}
        self._sessions: dict[str, int] = {}
        self._ids = count(_NEW_IDS)

    def read(self, line_number: int, line: bytes) -> Iterable[Row]:
        row = json_object(line)
        if "input_length" not in row and (text := sorted(TEXT.intersection(row))):
            raise ValueError(
                f"input_length must be a whole number of at least 1, got None: {text[0]} has no token count"
            )
        tokens, output = whole(row, "input_length", 1), whole(row, "output_length", 0)
        ids = row.get("hash_ids")
        own = None if ids is None else blocks(ids, tokens, self.block_tokens, below=_NEW_IDS)
        session = row.get("session_id")
        if session is None:
            at = _timestamp(row)
            return [Row(at or 0.0, tokens, output, array("Q") if own is None else own, from_start=at is None)]
        if not isinstance(session, str):
            raise ValueError(f"session_id must be a string, got {session!r}")
        return [self._turn(session, row, tokens, output, own)]

    def _turn(
        self, session: str, row: dict[str, Any], tokens: int, output: int, own: array[int] | None
    ) -> Row:
        mode = row.get("context_mode", "deltas_without_responses")
        if not isinstance(mode, str) or mode not in _CONTEXT_MODES:
            raise ValueError(f"context_mode must be one of {', '.join(_CONTEXT_MODES)}, got {mode!r}")
        grows, with_answer = _CONTEXT_MODES[mode]
        at, delay = _timestamp(row), number(row, "delay") * 1e-3 if row.get("delay") is not None else 0.0
        last = self._last.get(session)
        shared = 0
        if last is not None and grows:
            shared = last.context_tokens if with_answer else last.input_tokens
            tokens += shared
            if tokens >= 2**31:
                raise ValueError(
                    f"input_length makes the prompt of session {session!r} too long: {tokens} tokens"
                )
        if own is None or shared:
            prompt = Growing(self.block_tokens, self._ids) if last is None else last.prompt
            ids = prompt.extend(tokens, shared)
        else:
            ids = own
            prompt = Growing(self.block_tokens, self._ids, own[: tokens // self.block_tokens])
        arrival, from_start = at or 0.0, at is None
        if last is not None and at is None:
            arrival, from_start = last.arrival_seconds + delay, last.from_start
        turn = 0 if last is None else last.number + 1
        self._last[session] = _Turn(turn, arrival, from_start, tokens + output, tokens, prompt)
        return Row(
            arrival,
            tokens,
            output,
            ids,
            key=(session, turn),
            parent=None if last is None else (session, last.number),
            session=self._sessions.setdefault(session, len(self._sessions)),
            think_seconds=0.0 if last is None else delay,
            waits=True,
            gap_known=last is not None and at is None,
            from_start=from_start,
        )


def _timestamp(row: dict[str, Any]) -> float | None:
    return None if row.get("timestamp") is None else number(row, "timestamp") * 1e-3
