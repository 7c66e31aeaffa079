"""The rest of a chat whose answer engines parse into reasoning, content and tool calls.

The engines answer with fixed tokens. Their parser gives the same parts however the tokens are cut,
but holds back the beginning of a tag, like the parsers of vLLM.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from typing import Any
from unittest import mock

import orjson
import pytest

from execution_world import (
    LIMITS,
    STREAM_END,
    STREAM_HEAD,
    Answer,
    Ask,
    Clock,
    Driver,
    Engine,
    Engines,
    Setup,
    Slot,
    chunk,
    http,
    limits,
    read_answer,
)
from lmetric.server.api.parts import Parts
from lmetric.server.execution import attempt as attempt_module
from lmetric.server.fleet.parsing import DERENDER, GENERATE, RENDER
from split_world import CHAT

MAIN, SIDE = Slot.MAIN, Slot.SIDE
TEXT = (
    "<think>First the note – then the answer.</think>I read it now. <tool_call>"
    '{"name": "read", "arguments": {"file": "note.txt", "lines": [1, 2]}}</tool_call>\n<tool_call>'
    '{"name": "write", "arguments": {"text": "a \\"b\\" <c> é"}}</tool_call>'
)
WORDS = re.split(r"(\s+|(?<=[>{:,]))", TEXT)
PIECES = [piece for word in WORDS for piece in re.findall(".{1,7}", word, re.DOTALL)]
IDS = [1000 + n for n in range(len(PIECES))]
END = 7  # the token that ends the answer
ALL = [*IDS, END]
TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>")


@pytest.fixture(autouse=True)
def clock() -> Iterator[Clock]:
    clock = Clock()
    with limits(), mock.patch.object(attempt_module, "time", clock):
        yield clock


class Parser:
    """Parses text in pieces."""

    def __init__(self) -> None:
        self.text = ""
        self.sent = Parts()

    def feed(self, text: str, *, finished: bool = False) -> dict[str, Any]:
        """Returns the delta that a piece of the text adds."""
        self.text += text
        held = max((n for tag in TAGS for n in range(1, len(tag)) if self.text.endswith(tag[:n])), default=0)
        known = self.text if finished or not held else self.text[:-held]
        thought, _, rest = known.removeprefix("<think>").partition("</think>")
        content, *calls = rest.split("<tool_call>")
        parts = Parts(thought, content)
        for call in calls:
            found = re.match(r'{"name": "(\w+)", "arguments": ?(.*?)(}</tool_call>\s*|}?$)', call, re.S)
            if found is None:
                break
            parts.add(
                {
                    "tool_calls": [
                        {
                            "index": len(parts.calls),
                            "id": f"call-{random.random()}",
                            "function": {"name": found[1], "arguments": found[2]},
                        }
                    ]
                }
            )
        delta = self.sent.news(parts)
        self.sent.add(delta)
        return delta


class Fussy(Parser):
    """A parser that does not find the first tag in a piece with more than it, like deepseek_r1."""

    def feed(self, text: str, *, finished: bool = False) -> dict[str, Any]:
        if "<think>" in text and text != "<think>":
            text = text.replace("<think>", "<think> ")
        return super().feed(text, finished=finished)


def text_of(ids: list[int]) -> str:
    return "".join("<end>" if each == END else PIECES[each - 1000] for each in ids)


class Parsing(Setup):
    """Engines that parse the tokens of each other."""

    def engine(self, name: str) -> Engine:
        engine = super().engine(name)
        engine.parses = True
        return engine


class Tools(Ask):
    """A chat with tools."""

    def body(self) -> bytes:
        body = orjson.loads(super().body()) | {"temperature": 0}
        if self.path == CHAT:
            body["tools"] = [{"type": "function", "function": {"name": "read"}}]
        return orjson.dumps(body)


class Thinks(Ask):
    """A chat without tools."""


class Stops(Ask):
    """A chat with a stop string."""

    def body(self) -> bytes:
        return orjson.dumps(orjson.loads(super().body()) | {"stop": ["never"]})


class ParsingEngines(Engines):
    """Engines whose answer is `TEXT`."""

    grammar: Any = None
    fussy = False  # the parser needs the pieces of the engine
    other_text = False  # another engine's parser gives other parts
    refuses: str | None = None  # a path
    aborts = False  # an engine that continues aborts after two tokens
    ids_optional = False  # the router may not ask for token ids
    seen: list[tuple[str, dict[str, Any]]]

    def answer(self, engine: str, request: bytes, for_client: bool, now: float) -> Answer:
        head, _, raw = request.partition(b"\r\n\r\n")
        path = head.split()[1].decode()
        if path == "/is_paused":
            return super().answer(engine, request, for_client, now)
        body = orjson.loads(raw)
        self.__dict__.setdefault("seen", []).append((path, body))
        if path == self.refuses:
            answer = orjson.dumps({"error": {"message": "Restart vllm serve with --enable-scale-out"}})
            return Answer([http(403, answer)], False, body=body)
        most = self.ask.tokens
        if path == RENDER:
            sampling = {"max_tokens": most, "min_tokens": 3, "seed": 5, "structured_outputs": self.grammar}
            made = {"token_ids": list(self.prompt), "sampling_params": sampling, "stream": True}
            return Answer([http(200, orjson.dumps(made | {"model": "tiny"}))], False, body=body)
        if path == DERENDER:
            return Answer([http(200, orjson.dumps(self._derendered(body)))], False, body=body)
        if path == GENERATE:
            ids = body["token_ids"]
            assert ids[: len(self.prompt)] == list(self.prompt)
            begun = len(ids) - len(self.prompt)
            assert ids[len(self.prompt) :] == ALL[:begun]
            sampling = body["sampling_params"]
            assert (sampling["max_tokens"], sampling["seed"]) == (most - begun, None)
            assert sampling["min_tokens"] == max(0, 3 - begun)
            return Answer([STREAM_HEAD, *self._generated(begun, most), STREAM_END], True, body=body)
        assert path == CHAT
        assert body.get("return_token_ids") or self.ids_optional
        return Answer([STREAM_HEAD, *self._chat(most), STREAM_END], True, body=body)

    def _steps(self, begun: int, most: int) -> Iterator[tuple[list[int], str | None]]:
        """Returns the tokens of each step of an engine, and the finish_reason."""
        ids = ALL[begun:most]
        for n, each in enumerate(ids):
            last = n + 1 == len(ids)
            yield [each], None if not last else ("stop" if each == END else "length")

    def _chat(self, most: int) -> Iterator[bytes]:
        frame = {"id": "chatcmpl-1", "created": 5, "model": "tiny", "object": "chat.completion.chunk"}
        opening = {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
        yield event(frame | {"choices": [opening], "prompt_token_ids": list(self.prompt)})
        parser, count = Parser(), 0
        for ids, finish in self._steps(0, most):
            count += len(ids)
            delta = parser.feed(text_of(ids[:-1] if finish == "stop" else ids), finished=finish is not None)
            ended = "tool_calls" if finish == "stop" and parser.sent.calls else finish
            choice = {"index": 0, "delta": delta, "finish_reason": ended, "token_ids": ids}
            yield event(frame | {"choices": [choice]})
        if self.ask.usage:
            usage = {"prompt_tokens": len(self.prompt), "completion_tokens": count}
            yield event(frame | {"choices": [], "usage": usage})
        yield chunk(b"data: [DONE]\n\n")

    def _generated(self, begun: int, most: int) -> Iterator[bytes]:
        for n, (ids, finish) in enumerate(self._steps(begun, most)):
            if self.aborts and n == 2:
                ids, finish = [], "abort"
            choice = {"index": 0, "token_ids": ids, "finish_reason": finish, "stop_reason": None}
            yield event({"request_id": "g", "usage": None, "choices": [choice]})
        yield chunk(b"data: [DONE]\n\n")

    def _derendered(self, body: dict[str, Any]) -> dict[str, Any]:
        """Replays all earlier tokens in their pieces, like vLLM."""
        assert body["stream"] is True
        assert body["prompt_token_ids"] == list(self.prompt)
        assert body["chat_request"] == orjson.loads(self.ask.body())
        state = body["stream_state"] or {"output_token_ids": [], "output_chunk_lens": []}
        parser, ids = (Fussy if self.fussy else Parser)(), list(state["output_token_ids"])
        assert sum(state["output_chunk_lens"]) == len(ids)
        for length in state["output_chunk_lens"]:
            parser.feed(text_of(ids[:length]))
            del ids[:length]
        (choice,) = body["generate_chunk"]["choices"]
        new = choice["token_ids"]
        assert END not in new, "vLLM would show the end token as text"
        delta = parser.feed(text_of(new), finished=choice["finish_reason"] is not None)
        if self.other_text and "reasoning" in delta:
            delta["reasoning"] = delta["reasoning"].upper()
        lengths = state["output_chunk_lens"] + [len(new)]
        state = {"output_token_ids": state["output_token_ids"] + new, "output_chunk_lens": lengths}
        role = None if body["stream_state"] else "assistant"
        choice = {"index": 0, "delta": {"role": role, "content": None, "tool_calls": [], **delta}}
        return {"chunk": {"choices": [choice]}, "stream_state": state}


def event(value: dict[str, Any]) -> bytes:
    return chunk(b"data: %b\n\n" % orjson.dumps(value))


class ParsedDriver(Driver):
    """A driver whose client gets parts."""

    def check_answer(self) -> None:
        assert self.execution.committed

    def parts(self) -> tuple[Parts, dict[str, Any]]:
        """Returns the parts that the client has, and the other contents of its answer."""
        _, found = read_answer(self.client.written, self.ask)
        body = self.client.written.partition(b"\r\n\r\n")[2]
        parts = Parts()
        for line in body.splitlines():
            if line.startswith(b"data: {"):
                for choice in orjson.loads(line[6:]).get("choices", ()):
                    assert {"delta", "finish_reason", "index"} <= choice.keys()
                    parts.add(choice["delta"])
        return parts, found


def start(clock: Clock, ask: Ask, setup: Setup | None = None, **changes: Any) -> ParsedDriver:
    setup = setup or Parsing(fails_over=True)
    engines = ParsingEngines(ask, setup)
    for name, value in changes.items():
        setattr(engines, name, value)
    return ParsedDriver(setup.model(), setup, ask, clock, engines)


def tools(**changes: Any) -> Ask:
    return Tools(**({"path": CHAT, "tokens": len(ALL) + 9} | changes))


def expected(most: int = len(ALL)) -> Parts:
    parser = Parser()
    parser.feed(text_of(IDS[:most]), finished=True)
    return parser.sent


def same(parts: Parts, wanted: Parts) -> None:
    assert (parts.reasoning, parts.content) == (wanted.reasoning, wanted.content)
    assert [(c.name, c.arguments) for c in parts.calls] == [(c.name, c.arguments) for c in wanted.calls]
    assert len({call.id for call in parts.calls}) == len(parts.calls)


def run(it: ParsedDriver, chance: random.Random) -> None:
    """Lets all engines answer, in any order."""
    for _ in range(3000):
        if it.done:
            return
        slots = list(it.open)
        it.say(it.open[chance.choice(slots)], chance.choice([1, 1, 2, 5]))
        it.check()
    raise AssertionError("it does not end")


def lose(it: ParsedDriver) -> None:
    """Fails the engine of the open segment."""
    found = it.open[MAIN]
    it.lose(found)
    if it.open.get(MAIN) is found:
        it.lose(found)


def test_the_pieces_are_the_text() -> None:
    assert text_of(IDS) == TEXT
    whole = expected()
    assert (len(whole.calls), whole.content) == (2, "I read it now. ")
    assert orjson.loads(whole.calls[1].arguments) == {"text": 'a "b" <c> é'}


@pytest.mark.parametrize("shows_ids", [False, True])
@pytest.mark.parametrize("at", range(1, len(ALL)))
def test_a_chat_continues_at_any_token(clock: Clock, at: int, shows_ids: bool) -> None:
    """The client gets the parts of the uninterrupted answer, wherever its engine fails."""
    chance = random.Random(at)
    it = start(clock, tools(shows_ids=shows_ids))
    it.say(it.open[MAIN], 2 + at)
    first = it.open[MAIN].step.engine.name
    lose(it)
    assert it.open[MAIN].step.engine.name != first
    run(it, chance)
    parts, found = it.parts()
    same(parts, expected())
    assert (found["finish"], found["whole"], found["error"]) == ("tool_calls", True, None)
    assert found["usage"]["completion_tokens"] == len(ALL)
    assert found["usage"]["prompt_tokens"] == len(it.engines.prompt)
    assert found["ids"] == (ALL if shows_ids else [])
    assert it.model.failovers == {"continued": 1}
    assert not it.model.not_resumable


@pytest.mark.parametrize("seed", range(40))
def test_a_chat_continues_after_several_failures(clock: Clock, seed: int) -> None:
    chance = random.Random(seed)
    it = start(clock, tools(shows_ids=True), Parsing(fails_over=True, attempts=6))
    it.say(it.open[MAIN], 2 + chance.randrange(1, len(ALL) - 1))
    known = it.execution.known_tokens
    lose(it)
    for _ in range(chance.randrange(2, 60)):
        if it.done:
            break
        it.say(it.open[chance.choice(list(it.open))], 1)
        it.check()
    # Two failures at the same token would end it: perhaps the request is the cause.
    if MAIN in it.open and it.execution.known_tokens > known:
        lose(it)
    if not it.done:
        run(it, chance)
    parts, found = it.parts()
    assert found["error"] is None
    same(parts, expected())
    assert found["ids"] == ALL


@pytest.mark.parametrize("at", [1, 3])
def test_reasoning_without_tools_continues(clock: Clock, at: int) -> None:
    """Also if only the tag has come, which the client does not get."""
    it = start(clock, Thinks(path=CHAT, tokens=len(ALL)))
    it.say(it.open[MAIN], 2 + at)
    lose(it)
    run(it, random.Random(1))
    same(it.parts()[0], expected())


def test_the_length_ends_a_chat(clock: Clock) -> None:
    """Inside a tool call the finish_reason stays `length`."""
    most = len(IDS) - 3
    it = start(clock, tools(tokens=most))
    it.say(it.open[MAIN], 5)
    lose(it)
    run(it, random.Random(1))
    parts, found = it.parts()
    same(parts, expected(most))
    assert (found["finish"], found["usage"]["completion_tokens"]) == ("length", most)


def test_tokens_that_come_during_a_call_wait_for_the_next_one(clock: Clock) -> None:
    it = start(clock, tools())
    it.say(it.open[MAIN], 5)
    lose(it)
    it.say(it.open[MAIN], 1)  # rendered
    it.say(it.open[MAIN], 3)
    it.say(it.open[MAIN], 1000)
    it.say(it.open[SIDE], 1)
    it.say(it.open[SIDE], 1)
    assert it.done
    calls = [body for path, body in it.engines.seen if path == DERENDER]
    assert len(calls) == 2
    same(it.parts()[0], expected())


@pytest.mark.parametrize("calls", [0, 1])
def test_an_abort_by_order_ends_the_answer_with_all_its_tokens(clock: Clock, calls: int) -> None:
    """Also if the parser still works when the engine aborts."""
    it = start(clock, tools(shows_ids=True), Parsing(fails_over=True, pauses=True), aborts=True)
    it.say(it.open[MAIN], 6)
    known = it.execution.known_tokens
    lose(it)
    it.say(it.open[MAIN], 1)  # rendered
    it.say(it.open[MAIN], 2)
    for _ in range(calls):
        it.say(it.open[SIDE], 1)
    it.say(it.open[MAIN], 2)
    run(it, random.Random(1))
    parts, found = it.parts()
    same(parts, expected(known + 2))
    assert (found["finish"], found["whole"], found["error"]) == ("abort", True, None)
    assert found["ids"] == ALL[: known + 2]


def test_another_engine_continues_after_other_aborts(clock: Clock) -> None:
    it = start(clock, tools(), Parsing(fails_over=True, attempts=6), aborts=True)
    it.say(it.open[MAIN], 6)
    lose(it)
    it.say(it.open[MAIN], 1)
    it.say(it.open[MAIN], 3)
    for _ in range(2):  # with a token more, the request is not the cause
        it.say(it.open[SIDE], 1)
    it.say(it.open[MAIN], 1)
    it.engines.aborts = False
    run(it, random.Random(1))
    same(it.parts()[0], expected())
    assert it.parts()[1]["finish"] == "tool_calls"


def test_other_parts_are_not_merged(clock: Clock) -> None:
    it = start(clock, tools(), other_text=True)
    it.say(it.open[MAIN], 6)
    lose(it)
    run(it, random.Random(1))
    error = it.parts()[1]["error"]
    assert "no other engine can continue it: " in error["message"]
    assert "the answer's parts differ from those that the client has" in error["message"]
    assert it.model.failovers == {"not_mergeable": 1}
    assert it.model.not_resumable == {"not_mergeable": 1}


@pytest.mark.parametrize("at", range(2, len(ALL), 3))
def test_a_parser_that_needs_the_pieces_of_the_engine_gets_them(clock: Clock, at: int) -> None:
    it = start(clock, tools(shows_ids=True), fussy=True)
    it.say(it.open[MAIN], 2 + at)
    lose(it)
    run(it, random.Random(at))
    parts, found = it.parts()
    same(parts, expected())
    assert (found["ids"], found["error"]) == (ALL, None)
    assert it.model.failovers == {"continued": 1}


def test_a_grammar_is_named(clock: Clock) -> None:
    it = start(clock, tools(), grammar={"structural_tag": "{}"})
    it.say(it.open[MAIN], 6)
    lose(it)
    run(it, random.Random(1))
    assert "the state of a grammar cannot be transferred" in it.parts()[1]["error"]["message"]
    assert it.model.not_resumable == {"grammar": 1}


def test_stop_strings_before_a_parser_are_named(clock: Clock) -> None:
    it = start(clock, Stops(path=CHAT, tokens=99))
    it.say(it.open[MAIN], 6)
    lose(it)
    assert (
        "a stop string may cross the segment boundary, before a parser" in it.parts()[1]["error"]["message"]
    )
    assert it.model.failovers == {"not_resumable": 1}
    assert it.model.not_resumable == {"stop": 1}


@pytest.mark.parametrize("path", [RENDER, DERENDER])
def test_an_engine_that_refuses_to_parse_is_named(clock: Clock, path: str) -> None:
    it = start(clock, tools(), refuses=path)
    it.say(it.open[MAIN], 6)
    lose(it)
    run(it, random.Random(1))
    message = it.parts()[1]["error"]["message"]
    assert f"{path}: status 403: Restart vllm serve with --enable-scale-out" in message
    assert it.model.not_resumable == {"parser": 1}


@pytest.mark.parametrize(("ask", "reason"), [(tools(), "tools"), (Thinks(path=CHAT, tokens=99), "parser")])
def test_without_an_engine_that_parses_the_flag_is_named(clock: Clock, ask: Ask, reason: str) -> None:
    """Recording ends at the first part that is not text, and later requests are not recorded."""
    setup = Setup(fails_over=True)
    engines = ParsingEngines(ask, setup)
    model = setup.model()
    with mock.patch.object(ParsingEngines, "answer", _without_ids):
        for _ in range(2):
            it = ParsedDriver(model, setup, ask, clock, engines)
            it.say(it.open[MAIN], 6)
            lose(it)
            assert it.done
    assert it.model.not_resumable == {reason: 2}
    why = model.failover_reason(CHAT, _call(ask))
    assert why is not None
    assert "--enable-scale-out" in why.why


def _without_ids(self: ParsingEngines, engine: str, request: bytes, for_client: bool, now: float) -> Answer:
    return Answer([STREAM_HEAD, *self._chat(99), STREAM_END], True, body={})


def _call(ask: Ask) -> Any:
    from execution_world import RELAYED, parse, prompt_text, tokenizer

    call = parse(RELAYED[ask.path], ask.body())
    call.tokens = tokenizer().encode(prompt_text(tokenizer(), call))
    return call


def test_a_hanging_parser_is_an_engine_that_fails(clock: Clock) -> None:
    it = start(clock, tools())
    it.say(it.open[MAIN], 6)
    lose(it)
    it.say(it.open[MAIN], 1)
    it.say(it.open[MAIN], 3)
    it.say(it.open[SIDE], 1)
    it.say(it.open[SIDE], 1)
    it.say(it.open[MAIN], 1000)
    second = it.open[SIDE].step.engine.name
    it.pass_time(LIMITS["first_byte"] + 1)
    assert it.open[MAIN].step.engine.name != second
    run(it, random.Random(1))
    same(it.parts()[0], expected())
