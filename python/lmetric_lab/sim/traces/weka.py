"""Agentic coding traces of WEKA: one JSON object per conversation, with requests and subagents.

Sources: ``docs/TRACE_FORMAT.md`` of github.com/callanjfox/agentic-coding-analysis, and
``src/aiperf/dataset/loader/weka_trace_models.py`` of github.com/ai-dynamo/aiperf::

    {"id": "8712b46f", "block_size": 64, "hash_id_scope": "local", "requests": [
      {"t": 0.0, "type": "s", "in": 200, "out": 30, "hash_ids": [1, 2, 3], "stop": "tool_use",
       "api_time": 4.87},
      {"t": 6.0, "type": "subagent", "agent_id": "a1", "requests": [...]}]}

``t`` and ``api_time`` are in seconds. Times of a subagent's requests count from its start if the
first one is below its ``t``, else from the conversation's start, as in AIPerf.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lmetric import _core
from lmetric_lab.sim.traces.calls import MOST_NESTED, Agent, Call, program_rows
from lmetric_lab.sim.traces.fields import (
    Parser,
    Row,
    blocks,
    check_number,
    greatest_id,
    json_object,
    number,
    whole,
)
from lmetric_lab.sim.traces.trace import FINISH

_SCOPES = ("local", "global")
_FINISH = {
    "tool_use": FINISH.index("tool_calls"),
    "end_turn": FINISH.index("stop"),
    "max_tokens": FINISH.index("length"),
}
_ID_LIMIT = 2**40  # local IDs of many conversations fit into 64 bits


class Weka(Parser):
    """Reads conversations. Local IDs are moved, so that conversations share no prefix."""

    def __init__(self, block_tokens: int) -> None:
        super().__init__(block_tokens)
        self._session = 0
        self._scope: str | None = None
        self._base = 0  # added to the IDs of this conversation
        self._above = 0  # above all IDs so far
        self._lists: _Lists | None = None  # of this line, if they were read apart

    def read(self, line_number: int, line: bytes) -> Iterable[Row]:
        if (found := _core.read_hash_ids(line)) is not None:
            rest, ids, ends = found
            self._lists = _Lists(ids, ends)
            # The parser without lists raises errors, too: they show the line's own values.
            with suppress(ValueError):
                return self._rows(json_object(rest))
        self._lists = None
        return self._rows(json_object(line))

    def _rows(self, conversation: dict[str, Any]) -> Iterable[Row]:
        if (size := whole(conversation, "block_size", 1)) != self.block_tokens:
            raise ValueError(f"block_size is {size}, read with blocks of {self.block_tokens} tokens")
        scope = conversation.get("hash_id_scope", "local")
        if scope not in _SCOPES or scope != (self._scope or scope):
            wanted = self._scope or " or ".join(_SCOPES)
            raise ValueError(f"hash_id_scope must be {wanted}, got {scope!r}")
        self._base = self._above if scope == "local" else 0
        if self._lists is not None:
            self._lists.move(self._base)
        agent = self._agent(conversation, 0.0, "")
        rows = list(program_rows(agent, self._session))
        if not rows:
            raise ValueError("requests has no request")
        self._session += 1
        self._scope = scope
        return rows

    def _agent(self, run: dict[str, Any], start: float, at: str) -> Agent:
        """A conversation, or a subagent that begins `start` seconds after the conversation."""
        if at.count(".") > MOST_NESTED:
            raise ValueError(f"{at}requests: subagents nest more than {MOST_NESTED} deep")
        requests = run.get("requests")
        if not isinstance(requests, list):
            raise ValueError(f"{at}requests must be a list, got {str(requests)[:60]}")
        agent = Agent(start=start)
        offset: float | None = None
        latest = 0.0
        for index, each in enumerate(requests):
            place = f"{at}requests[{index}]."
            if not isinstance(each, dict):
                raise ValueError(f"{place[:-1]} must be an object, got {str(each)[:60]}")
            t = number(each, "t", place)
            if t < latest:
                raise ValueError(f"{place}t is {t:g}, below {latest:g} of the request before it")
            latest = t
            if offset is None:
                offset = start if t < start else 0.0
            kind = each.get("type")
            if kind == "subagent":
                agent.items.append(self._agent(each, offset + t, place))
            elif kind in ("n", "s"):
                agent.items.append(self._call(each, offset + t, place))
            else:
                raise ValueError(f"{place}type must be n, s or subagent, got {kind!r}")
        return agent

    def _call(self, request: dict[str, Any], start: float, at: str) -> Call:
        tokens = whole(request, "in", 1, at)
        ids = self._ids(request.get("hash_ids", []), tokens, at)
        self._above = max(self._above, greatest_id(ids) + 1)
        row = Row(
            start,
            tokens,
            whole(request, "out", 0, at),
            ids,
            finish=_FINISH.get(str(request.get("stop")), -1),
            from_start=True,
        )
        seconds = number(request, "api_time", at) if request.get("api_time") is not None else None
        return Call(row, None if seconds is None else start + seconds)

    def _ids(self, given: Any, tokens: int, at: str) -> array[int] | NDArray[np.uint64]:
        """The hash IDs of a prompt, moved. `given`: a list, or the number of a list."""
        if self._lists is not None and type(given) is int:
            ids = self._lists[given]
            check_number(len(ids), tokens, self.block_tokens, at)
            return ids
        found = blocks(given, tokens, self.block_tokens, at, _ID_LIMIT)
        if self._base:
            return array("Q", (np.frombuffer(found, np.uint64) + np.uint64(self._base)).tobytes())
        return found


class _Lists:
    """The lists of hash IDs of a line."""

    def __init__(self, ids: NDArray[np.uint64], ends: list[int]) -> None:
        self._ids = ids
        self._ends = ends

    def move(self, base: int) -> None:
        """Adds `base` to all IDs. Raises `ValueError` for an ID that is out of range."""
        if greatest_id(self._ids) >= _ID_LIMIT:
            raise ValueError
        self._ids += np.uint64(base)

    def __getitem__(self, number: int) -> NDArray[np.uint64]:
        return self._ids[self._ends[number - 1] if number else 0 : self._ends[number]]
