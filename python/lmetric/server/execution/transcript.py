"""The answer of a request that was cut: its legs' bodies, and one answer made of what they say.

Legs tell token ids; the text is made of them here, over the whole answer. So it is exact at every seam, where
an engine that goes on behind half a character would say what came before again. A first leg's own text must
be the same; where it is not, something between tokens and text is not known here (a parser of tool calls or
reasoning, another tokenizer), and the request is not joined.

A leg that ends at token s of a request whose prompt has P tokens makes s - P + 1 tokens: the last has no KV
cache, so it is made again by the next leg and counts there (vLLM, `docs/engines.md`). A bounded leg makes
s - P: all of them count.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson
from numpy.typing import ArrayLike

from lmetric._core import ResponseReader, TokenEncoder, TokenizeError
from lmetric.engines.handover import CHAT, COMPLETIONS
from lmetric.server.api.eligibility import max_tokens
from lmetric.tokens import Detokeniser, Tokens

JSON = Mapping[str, Any]

# What a leg that is sent token ids gets of the client's request, besides prompt, lengths and stream.
_KEPT = (
    *("model", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "logit_bias"),
    *("allowed_token_ids", "ignore_eos", "stop_token_ids", "include_stop_str_in_output"),
    *("skip_special_tokens", "spaces_between_special_tokens", "return_tokens_as_token_ids"),
    *("priority", "cache_salt", "user", "session_id"),
)

# What only the first leg of a request is sent as it came.
_PROMPT_FIELDS = frozenset({"prompt", "messages", "documents"})

# Tokens of an answer whose request says no length: it is neither cut nor moves, and no leg is sized by it.
UNBOUNDED = 1 << 31


class MergeError(Exception):
    """A leg's answer cannot be joined with what follows; says why. `failed`: that is the fault of this leg,
    and another may do better."""

    def __init__(self, why: str, *, failed: bool = False) -> None:
        super().__init__(why)
        self.failed = failed


@dataclass(frozen=True, slots=True)
class Made:
    """What a leg added to the answer; `finish` None: the answer goes on."""

    ids: list[int]
    text: str
    finish: str | None = None
    stop: Any = None  # stop_reason
    logprobs: JSON | None = None


class Transcript:
    """One request's answer so far. `prompt`: its token ids; `encoder`: of the model's tokenizer."""

    def __init__(self, path: str, request: JSON, prompt: ArrayLike, encoder: TokenEncoder) -> None:
        most = max_tokens(path, request)
        self.path = path
        self.request = request
        self.prompt: Tokens = np.asarray(prompt, dtype=np.uint32)
        self.made: list[int] = []
        self.over = False  # it has a finish_reason
        self.first_token_at: float | None = None  # seconds on the monotonic clock
        self.cached: JSON | None = None  # prompt_tokens_details of the leg that computed the prompt's end
        self._most = most if most is not None else UNBOUNDED
        self._chat = path == CHAT
        self._skip = request.get("skip_special_tokens") is not False
        self._stop_shown = request.get("include_stop_str_in_output") is True
        self._encoder = encoder
        self._text: Detokeniser | None = None
        self._said = ""
        self._read = 0  # of `made`, what is in `_said`
        self._heard: list[str] = []  # of a stream that is passed on: what the engine made of its tokens
        self._logprobs: dict[str, Any] | None = None
        self._frame: dict[str, Any] = {}  # of the first leg that made tokens, without its choices
        self._choice: dict[str, Any] = {}  # of it
        self._options = request.get("stream_options") or {}

    @property
    def begun(self) -> bool:
        """Whether some of the answer is known."""
        return bool(self._frame)

    # Its usage, by the names that `ResponseReader` has for one engine's answer.

    @property
    def output_tokens(self) -> int:
        """Of all engines."""
        return len(self.made)

    @property
    def prompt_tokens(self) -> int:
        """Of the client's prompt."""
        return len(self.prompt)

    @property
    def cached_tokens(self) -> int | None:
        """Of the prompt, as the engine that computed its end counted them."""
        found = self.cached.get("cached_tokens") if isinstance(self.cached, dict) else None
        return found if isinstance(found, int) else None

    # What legs are sent.

    def leg(self, to_token: int) -> tuple[str, dict[str, Any]]:
        """Path and body of a leg that nobody but the router hears, up to this token."""
        count = len(self.prompt)
        if self.begun or to_token < count:
            return COMPLETIONS, self._by_ids(to_token)
        leg = {k: v for k, v in self.request.items() if k not in ("stream_options", "max_completion_tokens")}
        leg |= {"stream": False, "max_tokens": min(to_token - count + 1, self._most)}
        if self._chat:
            leg["max_completion_tokens"] = leg["max_tokens"]
        if to_token > count:
            leg["return_token_ids"] = True
        return self.path, self._at_least(leg)

    def bounded(self, tokens: int) -> tuple[str, dict[str, Any]]:
        """Path and body of a leg of at most so many further tokens, all of which count."""
        target, leg = self.leg(len(self.prompt) + len(self.made) + tokens - 1)
        return target, leg | {"return_token_ids": True}

    def last(self) -> tuple[str, dict[str, Any]]:
        """Path and body of the last leg, whose answer is joined with what is known."""
        leg = self._by_ids(len(self.prompt) + self._most - 1)
        if self.request.get("stream"):
            leg |= {"stream": True, "stream_options": {"include_usage": True}}
        return COMPLETIONS, leg

    def tokens(self, count: int) -> Tokens:
        """The first tokens of prompt and answer so far. Those of the prompt are not copied."""
        made = self.made[: max(count - len(self.prompt), 0)]
        if not made:
            return self.prompt[: max(count, 0)]
        return np.concatenate([self.prompt, np.asarray(made, dtype=np.uint32)])

    def _by_ids(self, to_token: int) -> dict[str, Any]:
        count = len(self.prompt)
        leg = _kept(self.request)
        if self.request.get("logprobs") is not None and not self._chat:
            leg["logprobs"] = self.request["logprobs"]
        leg["prompt"] = self.tokens(to_token)
        left = self._most - len(self.made)
        leg["max_tokens"] = max(1, min(to_token - count - len(self.made) + 1, left))
        leg["stream"] = False
        if to_token > count:
            leg["return_token_ids"] = True
        return self._at_least(leg)

    def _at_least(self, leg: dict[str, Any]) -> dict[str, Any]:
        """`min_tokens` of the whole answer, as far as it is this leg's."""
        least = self.request.get("min_tokens")
        if isinstance(least, int):
            leg["min_tokens"] = min(max(0, least - len(self.made)), leg["max_tokens"])
        return leg

    # What they answer.

    def take(self, answer: JSON, asked: int, *, whole: bool = False) -> Made:
        """Takes a leg's answer, not streamed, of at most `asked` tokens. The last is made again by the next
        leg, unless `whole`. Raises MergeError."""
        choice = _choice(answer)
        finish = choice.get("finish_reason")
        if finish in ("abort", "error"):
            raise MergeError(f"it ended with finish_reason {finish}", failed=True)
        ids = _ids(choice)
        if not self.begun:
            self._first(answer, choice, ids)
        over = finish != "length" or len(ids) < asked or len(self.made) + len(ids) >= self._most
        kept = ids if over or whole else ids[:-1]
        return self._add(kept, finish if over else None, choice.get("stop_reason"), choice.get("logprobs"))

    def more(self, choice: JSON) -> Made:
        """Takes a chunk's choice of the last leg, as it is streamed. Raises MergeError."""
        logprobs, stop = choice.get("logprobs"), choice.get("stop_reason")
        return self._add(_ids(choice), choice.get("finish_reason"), stop, logprobs)

    def observe(self, reader: ResponseReader) -> None:
        """Takes what was seen of a stream that its client got as it came: all of the answer so far. Raises
        MergeError."""
        if reader.unseen is not None:
            raise MergeError(reader.unseen)
        prompt, ids, text, frame = reader.observed()
        if not self.begun and frame:
            if prompt is not None:
                self.prompt = prompt
            self._frame = frame
        self._heard = [text]
        self.made = ids.tolist()
        self.over |= reader.observed_over

    def forget_prompt(self) -> None:
        """Drops what only first legs are sent: later ones are sent token ids."""
        self.request = {name: value for name, value in self.request.items() if name not in _PROMPT_FIELDS}

    def catch_up(self) -> None:
        """Makes text of the tokens that were only noted, which must be the text that the client has. Raises
        MergeError."""
        if self._text is None:
            self._text = Detokeniser(self._encoder, self.prompt, skip_special_tokens=self._skip)
        elif self._read == len(self.made) and not self._heard:
            return
        try:
            self._said += self._text.more(self.made[self._read :])
        except TokenizeError as error:
            raise MergeError(str(error)) from None
        self._read = len(self.made)
        heard = "".join(self._heard)
        if heard != self._said:
            raise MergeError("the engine's text is not that of its tokens")
        self._heard = [heard]

    def _first(self, answer: JSON, choice: JSON, ids: list[int]) -> None:
        """Takes the frame of the first leg that made tokens, and holds its text against ours."""
        frame = answer if self._chat else choice
        prompt = frame.get("prompt_token_ids")
        if isinstance(prompt, list) and prompt:
            self.prompt = _array(prompt)
        message = choice.get("message") or {}
        if self._chat and any(message.get(name) for name in ("tool_calls", "reasoning", "reasoning_content")):
            raise MergeError("the engine parses its answers into more than a text")
        told = message.get("content") if self._chat else choice.get("text")
        stopped = choice.get("finish_reason") == "stop" and not self._stop_shown
        try:
            text = Detokeniser(self._encoder, self.prompt, skip_special_tokens=self._skip).more(
                ids[:-1] if stopped else ids
            )
            self._text = Detokeniser(self._encoder, self.prompt, skip_special_tokens=self._skip)
        except TokenizeError as error:
            raise MergeError(str(error)) from None
        if (told or "") != text:
            raise MergeError("the engine's text is not that of its tokens")
        self._frame = {k: v for k, v in answer.items() if k not in ("choices", "usage", "prompt_token_ids")}
        if "kv_transfer_params" in self._frame:
            self._frame["kv_transfer_params"] = None
        self._choice = dict(choice)
        self.forget_prompt()

    def _add(self, ids: list[int], finish: Any, stop: Any, logprobs: Any) -> Made:
        assert self._text is not None
        stopped = finish == "stop" and not self._stop_shown
        try:
            text = self._text.more(ids[:-1] if stopped else ids)
        except TokenizeError as error:
            raise MergeError(str(error)) from None
        shifted = _shifted(logprobs, len(ids), self._offset()) if isinstance(logprobs, dict) else None
        if shifted is not None:
            before = self._logprobs or {}
            for name, values in shifted.items():
                said = before.get(name)
                before[name] = (
                    said + values if isinstance(said, list) and isinstance(values, list) else values
                )
            self._logprobs = before
        self.made += ids
        self.over |= finish is not None
        self._read = len(self.made)
        self._said += text
        self._heard.clear()
        return Made(ids, text, finish, stop, shifted)

    def _offset(self) -> int:
        """At which `text_offset` the next leg's log probabilities begin. vLLM begins a chunk where the text
        so far ends; in an answer that is not streamed it adds up its tokens' texts, which may be longer."""
        before = self._logprobs or {}
        if self.request.get("stream") or not (before.get("text_offset") and before.get("tokens")):
            return len(self._said)
        return int(before["text_offset"][-1]) + len(before["tokens"][-1])

    # What the client gets.

    def opening(self) -> bytes:
        """What a stream begins with, ahead of its first tokens."""
        if not self._chat:
            return b""
        choice = {"index": 0, "delta": {"role": "assistant", "content": ""}}
        chunk = self._chunk([choice | {"logprobs": None, "finish_reason": None}], 0)
        chunk["prompt_token_ids"] = self.prompt if self.request.get("return_token_ids") else None
        return _event(chunk)

    def chunk(self, made: Made) -> bytes:
        """The chunk of what a leg added."""
        choice: dict[str, Any] = {"index": 0}
        choice |= {"delta": {"content": made.text}} if self._chat else {"text": made.text}
        choice |= {"logprobs": made.logprobs, "finish_reason": made.finish}
        if made.finish or not self._chat:
            choice["stop_reason"] = made.stop
        asked = self.request.get("return_token_ids")
        if not self._chat:
            first = len(self.made) == len(made.ids)
            choice["prompt_token_ids"] = self.prompt if asked and first else None
        choice["token_ids"] = made.ids if asked else None
        return _event(self._chunk([choice], len(self.made)))

    def closing(self) -> bytes:
        """What a stream ends with."""
        end = b"data: [DONE]\n\n"
        if not self._options.get("include_usage"):
            return end
        return _event(self._chunk([]) | {"usage": self._usage(len(self.made), last=True)}) + end

    def answer(self, made: Made) -> bytes:
        """The answer that is not streamed, after what the last leg added."""
        choice = self._choice | {"finish_reason": made.finish, "stop_reason": made.stop}
        choice["logprobs"] = self._logprobs
        frame = dict(self._frame)
        if self._chat:
            choice["message"] = {**(choice.get("message") or {}), "content": self._said}
        else:
            choice["text"] = self._said
        asked = self.request.get("return_token_ids")  # else they are null, as in vLLM's answers
        choice["token_ids"] = self.made if asked else None
        (frame if self._chat else choice)["prompt_token_ids"] = self.prompt if asked else None
        return dumps({**frame, "choices": [choice], "usage": self._usage(len(self.made), last=True)})

    def _chunk(self, choices: list[dict[str, Any]], made: int | None = None) -> dict[str, Any]:
        """A chunk; `made`: output tokens so far, for clients that want usage in each chunk."""
        kind = "chat.completion.chunk" if self._chat else "text_completion"
        created, model = self._frame.get("created"), self._frame.get("model")
        chunk = {"id": self._frame.get("id"), "object": kind, "created": created, "model": model}
        chunk["choices"] = choices
        each = self._options.get("include_usage") and self._options.get("continuous_usage_stats")
        if each and made is not None:
            chunk["usage"] = self._usage(made)
        return chunk

    def _usage(self, made: int, *, last: bool = False) -> dict[str, Any]:
        count = len(self.prompt)
        usage = {"prompt_tokens": count, "total_tokens": count + made, "completion_tokens": made}
        return usage | {"prompt_tokens_details": self.cached} if last else usage


def _kept(request: JSON) -> dict[str, Any]:
    return {name: request[name] for name in _KEPT if request.get(name) is not None}


def ahead(request: JSON, prompt: Tokens) -> dict[str, Any]:
    """A request to /v1/completions that has an engine compute these tokens, or look them up in its cache,
    and say next to nothing."""
    return _kept(request) | {"prompt": prompt, "max_tokens": 1, "stream": False}


def object_of(body: bytes) -> dict[str, Any]:
    """An engine's answer. Raises MergeError."""
    try:
        answer = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise MergeError(f"the leg's answer is not JSON: {error}") from None
    if not isinstance(answer, dict):
        raise MergeError("the leg's answer is not a JSON object")
    return answer


def cached_of(answer: JSON) -> Any:
    """The `prompt_tokens_details` of an answer."""
    return (answer.get("usage") or {}).get("prompt_tokens_details")


def dumps(leg: JSON) -> bytes:
    """A leg's body; its prompt is an array of token ids."""
    return orjson.dumps(leg, option=orjson.OPT_SERIALIZE_NUMPY)


def other_tokens(prompt: Tokens, told: Any) -> str | None:
    """Why a chat is not the prompt whose KV cache its engine has fetched; `told`: token IDs in its answer."""
    if not isinstance(told, list | np.ndarray) or len(told) == 0:
        return "it does not tell a chat's token ids"
    return None if np.array_equal(prompt, told) else "it makes other tokens of a chat"


def _event(value: JSON) -> bytes:
    return b"data: %b\n\n" % dumps(value)


def _choice(answer: JSON) -> JSON:
    choices = answer.get("choices")
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
        raise MergeError("the leg's answer has not one choice")
    choice: JSON = choices[0]
    return choice


def _array(ids: list[Any]) -> Tokens:
    try:
        return np.asarray(ids, dtype=np.uint32)
    except (TypeError, ValueError, OverflowError):
        raise MergeError("the engine tells token ids that are none") from None


def _ids(choice: JSON) -> list[int]:
    ids = choice.get("token_ids")
    if not isinstance(ids, list):
        raise MergeError("the engine does not tell token ids (return_token_ids)")
    return ids


def _shifted(logprobs: JSON, count: int, offset: int) -> dict[str, Any]:
    """The log probabilities of the first `count` tokens of a leg that began `offset` characters into the
    answer."""
    shifted = {k: v[:count] if isinstance(v, list) else v for k, v in logprobs.items()}
    if isinstance(shifted.get("text_offset"), list):
        shifted["text_offset"] = [at + offset for at in shifted["text_offset"]]
    return shifted
