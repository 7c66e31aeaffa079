"""The answer of a split request: the bodies of its segments, and one answer merged from theirs.

Engines report token IDs. The text is decoded here, over the whole answer, so it is exact at every
segment boundary, even inside a character. The text of the first segment must equal the engine's. If
it does not, the engine does something unknown between tokens and text (it parses tool calls or
reasoning, or has another tokenizer), and the answers are not merged.

A segment that ends at token s of a request with P prompt tokens produces s - P + 1 tokens. The last
one has no KV cache, so the next segment produces it again, and it counts there (vLLM,
`docs/reference/engines.md`). If the next engine can compute its cache, one token less is produced,
and all of them count.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson
from numpy.typing import ArrayLike

from lmetric._core import ResponseReader, TokenEncoder, TokenizeError
from lmetric.engines.handover import CHAT, COMPLETIONS, dumps, for_token_ids
from lmetric.server.api.eligibility import PARSED, max_tokens
from lmetric.server.api.parts import Parts, PartsDiffer
from lmetric.server.execution.exchange import TokenUsage
from lmetric.server.execution.plan import MergeError
from lmetric.tokens.detokenise import Detokeniser, tokens_of_text
from lmetric.tokens.stop_strings import StopStrings

if TYPE_CHECKING:
    from lmetric.tokens.prompt import Tokens

JSON = Mapping[str, Any]

# Fields that only the first segment is sent.
_PROMPT_FIELDS = frozenset({"prompt", "messages", "documents"})

# Tokens of an answer without a length limit. It sizes no segment: such a request is neither split
# nor migrated.
UNBOUNDED = 1 << 31


@dataclass(frozen=True, slots=True)
class Delta:
    """The part of the answer that one segment added. `finish`: None: the answer continues."""

    ids: list[int]
    text: str
    finish: str | None = None
    stop: Any = None  # stop_reason
    logprobs: JSON | None = None


class Transcript:
    """One request's answer so far.

    `prompt`: the token ids of its prompt. `encoder`: the encoder of the model's tokenizer.
    """

    def __init__(self, path: str, request: JSON, prompt: ArrayLike, encoder: TokenEncoder) -> None:
        most = max_tokens(path, request)
        self.path = path
        self.request = request
        self.prompt: Tokens = np.asarray(prompt, dtype=np.uint32)
        self.output_ids: list[int] = []
        self.over = False  # it has a finish_reason
        self.finish: str | None = None  # the finish_reason, if the router wrote it
        self.stopped = False  # the router found a stop string; the engine does not know it
        self.first_token_at: float | None = None  # seconds on the monotonic clock
        # prompt_tokens_details of the segment that computed the prompt's end.
        self.cached: JSON | None = None
        # The parts that the client has of an answer that engines parse; None: it is only text.
        self.parts: Parts | None = None
        self.pieces: list[int] = []  # numbers of tokens that came together, in a parsed answer
        self.chat = b""  # the client's chat, which an engine reads again to parse; empty: not kept
        self._most = most if most is not None else UNBOUNDED
        self._chat = path == CHAT
        self._skip = request.get("skip_special_tokens") is not False
        self._stop_shown = request.get("include_stop_str_in_output") is True
        self._stop = StopStrings.of(request)
        self._encoder = encoder
        self._text: Detokeniser | None = None
        self._decoded = ""
        self._decoded_ids = 0  # number of `output_ids` in `_decoded`
        self._engine_text: list[str] = []  # the engine's own text of a forwarded stream
        self._logprobs: dict[str, Any] | None = None
        # The answer of the first segment with tokens, without its choices, and its choice.
        self._frame: dict[str, Any] = {}
        self._choice: dict[str, Any] = {}
        self._options = request.get("stream_options") or {}

    @property
    def begun(self) -> bool:
        """Whether a part of the answer is known."""
        return bool(self._frame)

    @property
    def usage(self) -> TokenUsage:
        """The client's prompt and the output of all engines.

        The engine that computed the prompt's end counts the cached tokens.
        """
        found = self.cached.get("cached_tokens") if isinstance(self.cached, dict) else None
        cached_tokens = found if isinstance(found, int) else None
        return TokenUsage(len(self.prompt), cached_tokens, len(self.output_ids), self.first_token_at)

    def limit(self, context_tokens: int | None) -> bool:
        """Limits an answer without a length limit to the engine's context.

        Returns whether the answer has a limit now. `context_tokens`: the engine's maximum tokens of
        prompt and answer; None: not known.
        """
        if self._most == UNBOUNDED and context_tokens is not None:
            self._most = max(context_tokens - len(self.prompt), 1)
        return self._most != UNBOUNDED

    # The requests of segments.

    def segment(self, to_token: int) -> tuple[str, dict[str, Any]]:
        """Returns path and body of an internal segment that ends at this token."""
        count = len(self.prompt)
        if self.begun or to_token < count:
            return COMPLETIONS, self._by_ids(to_token)
        body = {k: v for k, v in self.request.items() if k not in ("stream_options", "max_completion_tokens")}
        body |= {"stream": False, "max_tokens": min(to_token - count + 1, self._most)}
        if self._chat:
            body["max_completion_tokens"] = body["max_tokens"]
        if to_token > count:
            body["return_token_ids"] = True
        return self.path, self._at_least(body)

    def last(self) -> tuple[str, dict[str, Any]]:
        """Returns path and body of the last segment. Its answer is merged with the earlier ones."""
        body = self._by_ids(len(self.prompt) + self._most - 1)
        if self.request.get("stream"):
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        return COMPLETIONS, body

    def tokens(self, count: int) -> Tokens:
        """Returns the first tokens of prompt and answer so far.

        A prefix of the prompt is not copied.
        """
        output = self.output_ids[: max(count - len(self.prompt), 0)]
        if not output:
            return self.prompt[: max(count, 0)]
        return np.concatenate([self.prompt, np.asarray(output, dtype=np.uint32)])

    def _by_ids(self, to_token: int) -> dict[str, Any]:
        count = len(self.prompt)
        body = for_token_ids(self.request)
        if self.request.get("logprobs") is not None and not self._chat:
            body["logprobs"] = self.request["logprobs"]
        body["prompt"] = self.tokens(to_token)
        left = self._most - len(self.output_ids)
        body["max_tokens"] = max(1, min(to_token - count - len(self.output_ids) + 1, left))
        body["stream"] = False
        if to_token > count:
            body["return_token_ids"] = True
        return self._at_least(body)

    def _at_least(self, body: dict[str, Any]) -> dict[str, Any]:
        """Sets this segment's part of the request's `min_tokens`."""
        least = self.request.get("min_tokens")
        if isinstance(least, int):
            body["min_tokens"] = min(max(0, least - len(self.output_ids)), body["max_tokens"])
        return body

    # The answers of segments.

    def take(self, answer: JSON, max_tokens: int, *, whole: bool = False, aborts: bool = False) -> Delta:
        """Adds a segment's answer of at most `max_tokens` tokens, not streamed. Raises MergeError.

        Unless `whole`, the next segment produces the last token again. `aborts`: it may be aborted.
        """
        choices = answer.get("choices")
        if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
            raise MergeError("the segment's answer does not have exactly one choice")
        choice: JSON = choices[0]
        finish = choice.get("finish_reason")
        if finish == "error" or (finish == "abort" and not aborts):
            raise MergeError(f"it ended with finish_reason {finish}", failed=True)
        ids = token_ids(choice)
        if not self.begun:
            self._first(answer, choice, ids)
        over = finish != "length" or len(ids) < max_tokens or len(self.output_ids) + len(ids) >= self._most
        kept = ids if over or whole else ids[:-1]
        return self._add(kept, choice, finish=finish if over else None)

    def more(self, choice: JSON) -> Delta:
        """Adds the choice of a chunk of the last segment's stream. Raises MergeError."""
        return self._add(token_ids(choice), choice, finish=choice.get("finish_reason"))

    def observe(self, reader: ResponseReader) -> None:
        """Adds the recorded tokens of a forwarded stream: the whole answer so far.

        Raises MergeError.
        """
        if reader.unseen is not None:
            raise MergeError(reader.unseen)
        prompt, ids, text, frame = reader.observed()
        if not self.begun and frame:
            if prompt is not None:
                self.prompt = prompt
            self._frame = frame
        self._engine_text = [text]
        self.output_ids = ids.tolist()
        self.over |= reader.observed_over
        if self.chat:
            self.pieces = reader.observed_pieces()
        if (parsed := reader.observed_parsed()) is not None:
            self.parts = Parts(parsed[0], text)
            try:
                self.parts.add_calls(map(orjson.loads, parsed[1]))
            except (PartsDiffer, TypeError, AttributeError, orjson.JSONDecodeError) as error:
                raise MergeError(f"the engine's tool calls cannot be read: {error}") from None

    @property
    def needs_parser(self) -> bool:
        """Whether the answer is more than text."""
        return self.parts is not None or bool(self.request.get("tools"))

    @property
    def has_text(self) -> bool:
        """Whether the client has some text. Before, a parser may have held back a tag."""
        return any(self._engine_text) or bool(self._decoded)

    def parse(self) -> None:
        """From now on, an engine parses the answer."""
        if self.parts is None:
            self.parts = Parts(content="".join(self._engine_text))

    def forget_prompt(self) -> None:
        """Drops the fields that only the first segment gets. Later segments get token ids."""
        self.request = {name: value for name, value in self.request.items() if name not in _PROMPT_FIELDS}

    def catch_up(self) -> None:
        """Decodes the recorded tokens. Raises MergeError unless the client has the same text."""
        if self.parts is not None:
            raise MergeError(PARSED)
        if self._text is None:
            self._text = self._new_text()
        elif self._decoded_ids == len(self.output_ids) and not self._engine_text:
            return
        whole = self._decoded if self._stop is None else self._stop.text
        try:
            whole += self._text.more(self.output_ids[self._decoded_ids :])
        except TokenizeError as error:
            raise MergeError(str(error)) from None
        self._decoded = whole if self._stop is None else self._stop.resume(whole)
        self._decoded_ids = len(self.output_ids)
        engine_text = "".join(self._engine_text)
        if engine_text != self._decoded:
            raise MergeError("the engine's text differs from the text of its tokens")
        self._engine_text = [engine_text]

    def _new_text(self) -> Detokeniser:
        return Detokeniser(self._encoder, self.prompt, skip_special_tokens=self._skip)

    def _first(self, answer: JSON, choice: JSON, ids: list[int]) -> None:
        """Stores the frame of the first segment with tokens, and checks its text."""
        frame = answer if self._chat else choice
        prompt = frame.get("prompt_token_ids")
        if isinstance(prompt, list) and prompt:
            try:
                self.prompt = np.asarray(prompt, dtype=np.uint32)
            except (TypeError, ValueError, OverflowError):
                raise MergeError("the engine reports invalid token ids") from None
        message = choice.get("message") or {}
        if not isinstance(message, dict):
            raise MergeError("the message of the segment's answer is not a JSON object")
        if self._chat and any(message.get(name) for name in ("tool_calls", "reasoning", "reasoning_content")):
            raise MergeError(PARSED)
        engine_text = message.get("content") if self._chat else choice.get("text")
        stopped = choice.get("finish_reason") == "stop" and not self._stop_shown
        try:
            text = self._new_text().more(ids[:-1] if stopped else ids)
            self._text = self._new_text()
        except TokenizeError as error:
            raise MergeError(str(error)) from None
        if (engine_text or "") != text:
            raise MergeError("the engine's text differs from the text of its tokens")
        self._frame = {k: v for k, v in answer.items() if k not in ("choices", "usage", "prompt_token_ids")}
        if "kv_transfer_params" in self._frame:
            self._frame["kv_transfer_params"] = None
        self._choice = dict(choice)
        self.forget_prompt()

    def _add(self, ids: list[int], choice: JSON, *, finish: Any) -> Delta:
        logprobs, stop = choice.get("logprobs"), choice.get("stop_reason")
        offset = self._offset() if isinstance(logprobs, dict) else 0  # before the text grows
        try:
            text, ids, found = self._text_of(ids, finish)
        except TokenizeError as error:
            raise MergeError(str(error)) from None
        if found is not None:
            finish, stop = "stop", found
            self.stopped = True
        shifted = _shifted(logprobs, len(ids), offset) if isinstance(logprobs, dict) else None
        if shifted is not None:
            merged = self._logprobs = self._logprobs or {}
            for name, values in shifted.items():
                if isinstance(values, list) and isinstance(known := merged.get(name), list):
                    known.extend(values)
                else:
                    merged[name] = list(values) if isinstance(values, list) else values
        self.output_ids += ids
        self.over |= finish is not None
        self.finish = finish if isinstance(finish, str) else self.finish
        self._decoded_ids = len(self.output_ids)
        self._decoded += text
        self._engine_text.clear()
        return Delta(ids, text, finish, stop=stop, logprobs=shifted)

    def _text_of(self, ids: list[int], finish: Any) -> tuple[str, list[int], str | None]:
        """Returns the text that tokens add, the tokens up to a stop string, and the stop string.

        `finish`: the engine's finish_reason.
        """
        assert self._text is not None
        seen = ids[:-1] if finish == "stop" and not self._stop_shown else ids
        if self._stop is None:
            return self._text.more(seen), ids, None
        found = None
        for count, token in enumerate(seen, 1):
            found = self._stop.add(self._text.more([token]), len(self.output_ids) + count)
            if found is not None:
                ids = ids[:count]
                break
        return self._stop.due(over=finish is not None or found is not None), ids, found

    def _offset(self) -> int:
        """Returns the `text_offset` at which the next log probabilities begin.

        vLLM adds up the texts of the tokens. They may be longer than the text, as special tokens
        have one. Those of a forwarded stream are not recorded.
        """
        before = self._logprobs or {}
        if before.get("text_offset") and before.get("tokens"):
            return int(before["text_offset"][-1]) + len(before["tokens"][-1])
        if self.request.get("return_tokens_as_token_ids"):
            return sum(len(f"token_id:{token}") for token in self.output_ids)
        return len(self._decoded if self._stop is None else self._stop.text)

    # The client's answer.

    def opening(self) -> bytes:
        """Returns the start of a stream, before its first tokens."""
        if not self._chat:
            return b""
        choice = {"index": 0, "delta": {"role": "assistant", "content": ""}}
        prompt = self.prompt if self.request.get("return_token_ids") else None
        choice |= {"logprobs": None, "finish_reason": None}
        return self._chunk([choice], 0, prompt_token_ids=prompt)

    def chunk(self, delta: Delta) -> bytes:
        """Returns the chunk with the part that a segment added."""
        choice: dict[str, Any] = {"index": 0}
        choice |= {"delta": {"content": delta.text}} if self._chat else {"text": delta.text}
        choice |= {"logprobs": delta.logprobs, "finish_reason": delta.finish}
        if delta.finish or not self._chat:
            choice["stop_reason"] = delta.stop
        returns_ids = self.request.get("return_token_ids")
        if not self._chat:
            first = len(self.output_ids) == len(delta.ids)
            choice["prompt_token_ids"] = self.prompt if returns_ids and first else None
        choice["token_ids"] = delta.ids if returns_ids else None
        return self._chunk([choice], len(self.output_ids))

    def parsed_chunk(self, whole: Parts, ids: list[int], *, finish: str | None, stop: Any) -> bytes:
        """Returns the chunk that these tokens add, which a parser has read; empty: they add none.

        `whole`: all parts of the answer up to them. Raises MergeError if the client has others.
        """
        assert self.parts is not None
        try:
            delta = self.parts.news(whole)
        except PartsDiffer as error:
            raise MergeError(str(error)) from None
        self.parts.add(delta)
        self.output_ids += ids
        self.pieces += [len(ids)] if ids else []
        self.over |= finish is not None
        self.finish = self.finish if finish is None else finish
        returns_ids = self.request.get("return_token_ids")
        if not delta and not finish and not (returns_ids and ids):
            return b""
        choice: dict[str, Any] = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
        if finish:
            choice["stop_reason"] = stop
        choice["token_ids"] = ids if returns_ids else None
        return self._chunk([choice], len(self.output_ids))

    def closing(self, *, usage: bool = True) -> bytes:
        """Returns the end of a stream, with the usage if the client wants it.

        `usage`: False: the client has the usage.
        """
        end = b"data: [DONE]\n\n"
        if not (usage and self._options.get("include_usage")):
            return end
        return self._chunk([], usage=self._usage(len(self.output_ids), last=True)) + end

    def answer(self, delta: Delta) -> bytes:
        """Returns the whole answer without streaming.

        `delta`: the part that the last segment added.
        """
        choice = self._choice | {"finish_reason": delta.finish, "stop_reason": delta.stop}
        choice["logprobs"] = self._logprobs
        frame = dict(self._frame)
        if self._chat:
            choice["message"] = {**(choice.get("message") or {}), "content": self._decoded}
        else:
            choice["text"] = self._decoded
        returns_ids = self.request.get("return_token_ids")  # otherwise null, as in vLLM's answers
        choice["token_ids"] = self.output_ids if returns_ids else None
        (frame if self._chat else choice)["prompt_token_ids"] = self.prompt if returns_ids else None
        return dumps({**frame, "choices": [choice], "usage": self._usage(len(self.output_ids), last=True)})

    def _chunk(
        self, choices: list[dict[str, Any]], output_tokens: int | None = None, **further: Any
    ) -> bytes:
        """Returns an event with a chunk. `further`: its fields after the choices.

        `output_tokens`: the count so far, for clients that want usage in each chunk.
        """
        kind = "chat.completion.chunk" if self._chat else "text_completion"
        created, model = self._frame.get("created"), self._frame.get("model")
        chunk = {"id": self._frame.get("id"), "object": kind, "created": created, "model": model}
        chunk["choices"] = choices
        each = self._options.get("include_usage") and self._options.get("continuous_usage_stats")
        if each and output_tokens is not None:
            chunk["usage"] = self._usage(output_tokens)
        return b"data: %b\n\n" % dumps(chunk | further)

    def _usage(self, output_tokens: int, *, last: bool = False) -> dict[str, Any]:
        count = len(self.prompt)
        usage: dict[str, Any] = {"prompt_tokens": count, "total_tokens": count + output_tokens}
        usage["completion_tokens"] = output_tokens
        if not last:
            return usage
        reasoning = "" if self.parts is None else self.parts.reasoning
        if reasoning and (found := tokens_of_text(self._encoder, self.output_ids, reasoning)):
            usage["completion_tokens_details"] = {"reasoning_tokens": found}
        return usage | {"prompt_tokens_details": self.cached}


def object_of(body: bytes | bytearray) -> dict[str, Any]:
    """Parses an engine's answer. Raises MergeError."""
    try:
        answer = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise MergeError(f"the segment's answer is not JSON: {error}") from None
    if not isinstance(answer, dict):
        raise MergeError("the segment's answer is not a JSON object")
    return answer


def token_ids(choice: JSON) -> list[int]:
    """Returns the tokens of a choice. Raises MergeError."""
    ids = choice.get("token_ids")
    if not isinstance(ids, list):
        raise MergeError("the engine does not tell token ids (return_token_ids)")
    if not all(type(token) is int and 0 <= token < 1 << 32 for token in ids):
        raise MergeError("the engine reports invalid token ids")
    return ids


def _shifted(logprobs: JSON, count: int, offset: int) -> dict[str, Any]:
    """Returns the log probabilities of the first `count` tokens of a segment, or of its next chunk.

    `offset`: their first `text_offset`. An engine counts from the start of its segment. Raises
    MergeError.
    """
    shifted = {k: v[:count] if isinstance(v, list) else v for k, v in logprobs.items()}
    offsets, tokens = shifted.get("text_offset") or [], shifted.get("tokens") or []
    if not (_are(offsets, int) and _are(tokens, str)):
        raise MergeError("the engine reports invalid log probabilities")
    if offsets:
        shifted["text_offset"] = [at - offsets[0] + offset for at in offsets]
    return shifted


def _are(values: Any, kind: type) -> bool:
    return isinstance(values, list) and all(type(value) is kind for value in values)
