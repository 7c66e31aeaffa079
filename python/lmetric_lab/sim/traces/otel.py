"""OpenTelemetry GenAI spans in OTLP JSON: one object per line, or one document.

Sources: ``docs/gen-ai/gen-ai-spans.md`` and ``gen-ai-agent-spans.md`` of
github.com/open-telemetry/semantic-conventions-genai; ``docs/specification.md`` (JSON Protobuf
Encoding) of github.com/open-telemetry/opentelemetry-proto::

    {"resourceSpans": [{"scopeSpans": [{"spans": [
      {"traceId": "5b8e...", "spanId": "eee1...", "parentSpanId": "eee0...",
       "startTimeUnixNano": "1544712660000000000", "endTimeUnixNano": "1544712661000000000",
       "attributes": [{"key": "gen_ai.operation.name", "value": {"stringValue": "chat"}},
                      {"key": "gen_ai.usage.input_tokens", "value": {"intValue": "1200"}}]}]}]}]}

Spans have token counts but no hash IDs. So a prompt is modeled as the last prompt of its agent,
the answer, and new tokens, as far as its length allows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import count
from typing import Any, NamedTuple

from lmetric_lab.sim.traces.calls import MOST_NESTED, Agent, Call, Growing, program_rows
from lmetric_lab.sim.traces.fields import Parser, Row, json_object
from lmetric_lab.sim.traces.trace import FINISH

_INFERENCE = ("chat", "generate_content", "text_completion")
_AGENT, _TOOL = "invoke_agent", "execute_tool"
_FINISH = {
    "stop": FINISH.index("stop"),
    "end_turn": FINISH.index("stop"),
    "tool_call": FINISH.index("tool_calls"),
    "tool_calls": FINISH.index("tool_calls"),
    "tool_use": FINISH.index("tool_calls"),
    "length": FINISH.index("length"),
    "max_tokens": FINISH.index("length"),
}
_MOST_ANCESTORS = 1000


class _Span(NamedTuple):
    """The part of a span that requests below it need."""

    parent: bytes | None
    operation: str | None
    conversation: str | None
    agent: str | None  # its id or name
    start: float


class _Call(NamedTuple):
    row: Row  # without IDs
    end: float | None


class _Place(NamedTuple):
    """Where a call belongs."""

    program: str
    agents: list[bytes]  # the runs around it, outermost first
    stream: object  # equal for the calls whose prompts extend each other


class Otel(Parser):
    """Reads spans. A child span can stand before its parent, so requests follow at the end."""

    def __init__(self, block_tokens: int) -> None:
        super().__init__(block_tokens)
        self._spans: dict[bytes, _Span] = {}
        self._calls: dict[bytes, _Call] = {}

    def read(self, line_number: int, line: bytes) -> Iterator[ValueError]:
        export = json_object(line)
        for resource in _listed(export, "resourceSpans"):
            for scope in _listed(resource, "scopeSpans"):
                for span in _listed(scope, "spans"):
                    try:
                        self._span(span, line_number)
                    except ValueError as error:
                        yield ValueError(f"span {span.get('spanId')!r}: {error}")

    def _span(self, span: dict[str, Any], line_number: int) -> None:
        trace = _hex(span, "traceId", 16)
        key = trace + _hex(span, "spanId", 8)
        if key in self._calls:
            return  # exporters may send a span twice
        values = _attributes(span)
        operation = values.get("gen_ai.operation.name")
        start = _nanoseconds(span, "startTimeUnixNano") * 1e-9
        parent = trace + _hex(span, "parentSpanId", 8) if span.get("parentSpanId") else None
        agent = _text(values, "gen_ai.agent.id") or _text(values, "gen_ai.agent.name")
        self._spans[key] = _Span(parent, operation, _text(values, "gen_ai.conversation.id"), agent, start)
        if operation in _INFERENCE:
            self._calls[key] = _call(span, values, start, line_number)

    def end(self) -> Iterator[Row]:
        programs: dict[str, Agent] = {}
        runs: dict[tuple[str, bytes], Agent] = {}
        prompts: dict[object, tuple[Growing, Row]] = {}
        ids = count()
        for key, call in sorted(self._calls.items(), key=lambda each: each[1].row.arrival_seconds):
            place = self._place(key)
            if place is None:
                continue
            around = programs.setdefault(place.program, Agent())
            for run in place.agents:
                inner = runs.get((place.program, run))
                if inner is None:
                    inner = runs[place.program, run] = Agent(start=self._spans[run].start)
                    around.items.append(inner)
                around = inner
            prompt, last = prompts.get(place.stream) or (Growing(self.block_tokens, ids), None)
            blocks = prompt.extend(call.row.input_tokens, 0 if last is None else _shared(last, call.row))
            prompts[place.stream] = prompt, call.row
            around.items.append(Call(call.row._replace(blocks=blocks), call.end))
        for session, agent in enumerate(programs.values()):
            yield from program_rows(agent, session)

    def _place(self, key: bytes) -> _Place | None:
        """Where a call belongs; None if a span around it is the same call, recorded twice."""
        conversation, agents, inside = None, [], False
        at: bytes | None = key
        for _ in range(_MOST_ANCESTORS):
            span = None if at is None else self._spans.get(at)
            if at is None or span is None:
                break
            if at in self._calls and at != key and not inside:
                return None
            inside |= span.operation in (_AGENT, _TOOL)
            if span.operation == _AGENT:
                agents.append(at)
            conversation = span.conversation or conversation
            at = span.parent
        agents.reverse()
        program = conversation or key[:16].hex()
        # The outermost agent goes on with its next run. A subagent begins anew with each run.
        stream = agents[-1] if len(agents) > 1 else self._spans[agents[0]].agent if agents else None
        return _Place(program, agents[:MOST_NESTED], (program, stream))


def _call(span: dict[str, Any], values: dict[str, Any], start: float, line_number: int) -> _Call:
    end = _nanoseconds(span, "endTimeUnixNano") * 1e-9 if span.get("endTimeUnixNano") else None
    if end is not None and end < start:
        raise ValueError(
            f"endTimeUnixNano must be at least startTimeUnixNano, got {span['endTimeUnixNano']!r}"
        )
    output = _tokens(values, "gen_ai.usage.output_tokens", 0)
    thoughts = 0
    if "gen_ai.usage.reasoning.output_tokens" in values:
        thoughts = _tokens(values, "gen_ai.usage.reasoning.output_tokens", 0)
        if thoughts > output:
            raise ValueError(f"gen_ai.usage.reasoning.output_tokens is {thoughts}, of {output} output tokens")
    reasons = values.get("gen_ai.response.finish_reasons")
    reason = reasons[0] if isinstance(reasons, list) and reasons else ""
    row = Row(
        start,
        _tokens(values, "gen_ai.usage.input_tokens", 1),
        output,
        None,
        think_tokens=thoughts,
        finish=_FINISH.get(reason, -1) if isinstance(reason, str) else -1,
        line=line_number,
    )
    return _Call(row, end)


def _shared(last: Row, row: Row) -> int:
    """The tokens at the start of a prompt that it has in common with the agent's last prompt and
    answer. Reasoning tokens are not part of later prompts, and a shorter prompt begins anew."""
    if row.input_tokens < last.input_tokens:
        return 0
    answer = 0 if last.think_tokens else last.output_tokens
    return min(row.input_tokens, last.input_tokens + answer)


def _listed(holder: dict[str, Any], key: str) -> Iterable[dict[str, Any]]:
    values = holder.get(key, [])
    if not isinstance(values, list) or not all(isinstance(each, dict) for each in values):
        raise ValueError(f"{key} must be a list of objects, got {str(values)[:60]}")
    return values


def _hex(span: dict[str, Any], key: str, size: int) -> bytes:
    value = span.get(key)
    try:
        found = bytes.fromhex(value if isinstance(value, str) else "")
    except ValueError:
        found = b""
    if len(found) != size:
        raise ValueError(f"{key} must be {2 * size} hexadecimal digits, got {value!r}")
    return found


def _nanoseconds(span: dict[str, Any], key: str) -> int:
    value = _int(span.get(key))
    if value is None or not 1 <= value < 2**64:
        raise ValueError(f"{key} must be nanoseconds since 1970, got {str(span.get(key))[:40]!r}")
    return value


def _tokens(values: dict[str, Any], key: str, least: int) -> int:
    value = values.get(key)
    if type(value) is not int or not least <= value < 2**31:
        failed = f" (the call failed: error.type is {error!r})" if (error := values.get("error.type")) else ""
        raise ValueError(f"{key} must be a whole number of at least {least}, got {value!r}{failed}")
    return value


def _text(values: dict[str, Any], key: str) -> str | None:
    value = values.get(key)
    if value is not None and not isinstance(value, str):
        raise ValueError(f"{key} must be a string, got {value!r}")
    return value


def _int(value: Any) -> int | None:
    """64-bit integers are numbers or decimal strings."""
    if isinstance(value, str) and value.isascii() and value.removeprefix("-").isdecimal():
        return int(value)
    return value if type(value) is int else None


def _attributes(span: dict[str, Any]) -> dict[str, Any]:
    """The attributes that this reader uses: no prompts and no answers."""
    found = {}
    for each in _listed(span, "attributes"):
        key, value = each.get("key"), each.get("value")
        if key in _USED and isinstance(value, dict):
            found[key] = _value(value)
    return found


def _value(value: dict[str, Any]) -> Any:
    if "intValue" in value:
        number = _int(value["intValue"])
        return value["intValue"] if number is None else number
    if isinstance(value.get("arrayValue"), dict):
        return [_value(each) for each in _listed(value["arrayValue"], "values")]
    return value.get("stringValue", value.get("doubleValue"))


_USED = frozenset(
    {
        "gen_ai.operation.name",
        "gen_ai.conversation.id",
        "gen_ai.agent.id",
        "gen_ai.agent.name",
        "gen_ai.usage.input_tokens",
        "gen_ai.usage.output_tokens",
        "gen_ai.usage.reasoning.output_tokens",
        "gen_ai.response.finish_reasons",
        "error.type",
    }
)
