"""vLLM's request bodies, and what its answers look like."""

from __future__ import annotations

import time
from array import array
from typing import Annotated, Any, Literal, Self

import orjson
from pydantic import BaseModel, ConfigDict, Field, PlainValidator, model_validator

from lmetric_lab.emulated.errors import EngineError

Kind = Literal["cmpl", "chatcmpl", "generate-tokens"]  # begins the ids of the answers

_PRIORITY = 2**63

# Asked for anything but these, such a field would change the answer in a way that this engine
# cannot. Sampling parameters (temperature, top_p, seed, ...) and tools are accepted and change
# nothing: the text is what it is. Only `stop` and `stop_token_ids` end it early.
_ONLY: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "prompt_logprobs": (),
    "use_beam_search": (False,),
    "prompt_embeds": (),
    "structured_outputs": (),
    "response_format": ({"type": "text"},),
}


class StreamOptions(BaseModel):
    """`stream_options` of a request."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


def _stop_strings(value: Any) -> list[str]:
    strings = [value] if isinstance(value, str) else [] if value is None else value
    if not isinstance(strings, list) or not all(isinstance(each, str) for each in strings):
        raise ValueError("should be a string or a list of strings")
    if "" in strings:
        raise ValueError("stop cannot contain an empty string.")
    return strings


class Body(BaseModel):
    """The fields that all bodies of generated answers have."""

    model_config = ConfigDict(extra="allow")

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(default=None, ge=1, le=2**31)
    priority: int = Field(default=0, ge=-_PRIORITY, lt=_PRIORITY)
    cache_salt: str | None = Field(default=None, min_length=1)
    return_token_ids: bool | None = None
    stop: Annotated[list[str], PlainValidator(_stop_strings)] = []
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    min_tokens: int | None = Field(default=None, ge=0)
    vllm_xargs: dict[str, Any] | None = None
    kv_transfer_params: dict[str, Any] | None = None
    bootstrap_host: str | None = None
    bootstrap_port: int | None = None
    bootstrap_room: int | None = None

    @property
    def limit(self) -> tuple[str, int | None]:
        """The field that limits the answer, and its value, tokens."""
        return "max_tokens", self.max_tokens

    def refuse_unsupported(self) -> None:
        """400 for what the engine cannot do."""
        for name, allowed in _ONLY.items():
            value = (self.model_extra or {}).get(name)
            if value is not None and value not in allowed:
                raise EngineError(400, f"{name} is not supported by the emulated engine", name)


def _one_prompt(prompt: Any) -> str | list[int]:
    """The prompt of a completion; a list of one prompt is unpacked."""
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        if len(prompt) > 1:
            raise ValueError(f"{len(prompt)} prompts; the emulated engine takes one a request")
        prompt = prompt[0]
    if isinstance(prompt, str) or (isinstance(prompt, list) and all(type(token) is int for token in prompt)):
        return prompt
    raise ValueError("should be a string or a list of token ids")


class CompletionBody(Body):
    """A body of /v1/completions."""

    prompt: Annotated[str | list[int], PlainValidator(_one_prompt)]


class SamplingParameters(BaseModel):
    """`sampling_params` of a body of /inference/v1/generate."""

    model_config = ConfigDict(extra="allow")

    max_tokens: int | None = Field(default=None, ge=1, le=2**31)
    min_tokens: int | None = Field(default=None, ge=0)
    stop: Annotated[list[str], PlainValidator(_stop_strings)] = []
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    extra_args: dict[str, Any] | None = None


class GenerateBody(Body):
    """A body of /inference/v1/generate."""

    token_ids: list[int] = Field(min_length=1)
    sampling_params: SamplingParameters

    @model_validator(mode="after")
    def _flatten(self) -> Self:
        """Makes the sampling parameters fields of the body, as in other bodies."""
        given = self.sampling_params
        self.max_tokens, self.min_tokens = given.max_tokens, given.min_tokens
        self.stop, self.stop_token_ids = given.stop, given.stop_token_ids
        self.include_stop_str_in_output = given.include_stop_str_in_output
        self.vllm_xargs = given.extra_args
        return self

    def refuse_unsupported(self) -> None:
        """400 for what the engine cannot do."""
        for name, allowed in {**_ONLY, "output_mode": ("tokens",)}.items():
            for extra in (self.model_extra, self.sampling_params.model_extra):
                value = (extra or {}).get(name)
                if value is not None and value not in allowed:
                    raise EngineError(400, f"{name} is not supported by the emulated engine", name)


def _plain_content(content: Any) -> str:
    """A message's content: text, or parts of text."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise ValueError("should be a string or a list of parts")
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise ValueError('parts should be {"type": "text", "text": "..."}; nothing else is supported')
    return "\n".join(part["text"] for part in content if part["text"])


class Message(BaseModel):
    """A message of a conversation."""

    role: str
    content: Annotated[str, PlainValidator(_plain_content)] = ""


class _Messages(BaseModel):
    messages: list[Message] = Field(min_length=1)
    add_generation_prompt: bool = True
    continue_final_message: bool = False

    def check_template(self) -> None:
        """400 where the last message shall both be continued and be answered."""
        if self.continue_final_message and self.add_generation_prompt:
            message = "continue_final_message needs add_generation_prompt: false"
            raise EngineError(400, message, "continue_final_message")


class ChatBody(Body, _Messages):
    """A body of /v1/chat/completions."""

    max_completion_tokens: int | None = Field(default=None, ge=1, le=2**31)

    @property
    def limit(self) -> tuple[str, int | None]:
        """The field that limits the answer, and its value, tokens."""
        if self.max_completion_tokens is None:
            return super().limit
        return "max_completion_tokens", self.max_completion_tokens


class TokenizePrompt(BaseModel):
    """A body of /tokenize with a prompt."""

    prompt: str
    return_token_strs: bool = False


class TokenizeChat(_Messages):
    """A body of /tokenize with messages."""

    return_token_strs: bool = False


class DetokenizeBody(BaseModel):
    """A body of /detokenize."""

    tokens: list[int]


def usage(prompt_tokens: int, output_tokens: int, cached_tokens: int | None = None) -> dict[str, Any]:
    """The usage object; `cached_tokens` None: prompt_tokens_details is null, as where vLLM was not
    told to fill it."""
    details = None if cached_tokens is None else {"cached_tokens": cached_tokens}
    return {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + output_tokens,
        "completion_tokens": output_tokens,
        "prompt_tokens_details": details,
    }


class Shape:
    """How the answers of one request look: its id, model and kind, and what was asked to be in
    them."""

    def __init__(
        self,
        *,
        chat: bool,
        request_id: str,
        model: str,
        prompt: array[int],
        pieces: list[bytes],
        token_ids: bool = False,
        stream_options: StreamOptions | None = None,
    ) -> None:
        self.chat = chat
        self.request_id = request_id
        self.prompt = prompt
        self.token_ids = token_ids
        self.include_usage = bool(stream_options and stream_options.include_usage)
        self.continuous_usage = bool(
            stream_options and stream_options.continuous_usage_stats and self.include_usage
        )
        self._pieces = pieces
        self._base: dict[str, Any] = {
            "id": request_id,
            "object": "chat.completion.chunk" if chat else "text_completion",
            "created": int(time.time()),
            "model": model,
        }
        # A chunk is rendered once, with marks where text and token id go; a token then costs one
        # concatenation.
        self._head, self._middle, self._tail = self._template(None)
        self._last = self._template("length")

    def _template(
        self, finish_reason: str | None, stop_reason: int | str | None = None
    ) -> tuple[bytes, bytes, bytes]:
        choice: dict[str, Any] = {"index": 0}
        choice |= {"delta": {"content": "\x00"}} if self.chat else {"text": "\x00"}
        choice |= {"logprobs": None, "finish_reason": finish_reason}
        if finish_reason or not self.chat:
            choice["stop_reason"] = stop_reason
        # vLLM names them where nobody asked, too, as null.
        if not self.chat:
            choice["prompt_token_ids"] = None
        choice["token_ids"] = ["\x00"] if self.token_ids else None
        data = b"data: " + orjson.dumps({**self._base, "choices": [choice]})
        head, _, rest = data.partition(b"\\u0000")
        middle, _, tail = rest.partition(b'"\\u0000"') if self.token_ids else (rest[:-3], b"", b"}]}")
        # The end of the object stays open: usage may follow.
        return head, middle, tail[:-1]

    def opening(self) -> bytes:
        """The start of a stream before the first token: the role, for chats."""
        if not self.chat:
            return b""
        choice: dict[str, Any] = {"index": 0, "delta": {"role": "assistant", "content": ""}}
        chunk = {**self._base, "choices": [choice | {"logprobs": None, "finish_reason": None}]}
        chunk["prompt_token_ids"] = self.prompt.tolist() if self.token_ids else None
        if self.continuous_usage:
            chunk["usage"] = self._stream_usage(0)
        return b"data: %b\n\n" % orjson.dumps(chunk)

    def text_of(self, token: int) -> str:
        """The text of one token."""
        return str(orjson.loads(b'"%b"' % self._pieces[token]))

    def token(
        self,
        token: int,
        produced: int,
        finish_reason: str | None,
        stop_reason: int | str | None = None,
        text: str | None = None,
    ) -> bytes:
        """The chunk of one token, the `produced`-th. `text`: what the client gets with it; None:
        its own."""
        piece = self._pieces[token] if text is None else orjson.dumps(text)[1:-1]
        if finish_reason == "stop":
            head, middle, tail = self._template("stop", stop_reason)
        else:
            head, middle, tail = self._last if finish_reason else (self._head, self._middle, self._tail)
        if self.token_ids:
            if produced == 1 and not self.chat:
                ids = orjson.dumps(self.prompt.tolist())
                middle = middle.replace(b'"prompt_token_ids":null', b'"prompt_token_ids":' + ids)
            middle = middle + b"%d" % token
        if self.continuous_usage:
            tail = tail + b',"usage":' + orjson.dumps(self._stream_usage(produced))
        return head + piece + middle + tail + b"}\n\n"

    def aborted(self) -> bytes:
        """The last chunk of a stream that the engine ends."""
        choice: dict[str, Any] = {"index": 0, "delta": {}} if self.chat else {"index": 0, "text": ""}
        choice |= {"logprobs": None, "finish_reason": "abort", "stop_reason": None}
        return b"data: %b\n\n" % orjson.dumps({**self._base, "choices": [choice]})

    def closing(self, produced: int, cached_tokens: int | None) -> bytes:
        """The end of a stream: the usage, if requested, and the end mark."""
        end = b"data: [DONE]\n\n"
        if not self.include_usage:
            return end
        chunk = self._usage_chunk(usage(len(self.prompt), produced, cached_tokens))
        return b"data: %b\n\n" % orjson.dumps(chunk) + end

    def _usage_chunk(self, told: dict[str, Any]) -> dict[str, Any]:
        return {**self._base, "choices": [], "usage": told}

    def whole(
        self,
        tokens: list[int],
        finish_reason: str,
        stop_reason: int | str | None,
        cached_tokens: int | None,
        kv_transfer_params: dict[str, Any] | None = None,
        text: str | None = None,
    ) -> bytes:
        """The answer that is not streamed. `text`: of the answer; None: the text of its tokens."""
        if text is None:
            text = str(orjson.loads(b'"%b"' % b"".join([self._pieces[token] for token in tokens])))
        choice: dict[str, Any] = {"index": 0}
        if self.chat:
            choice["message"] = {"role": "assistant", "content": text, "refusal": None, "tool_calls": []}
        else:
            choice["text"] = text
        choice |= {"logprobs": None, "finish_reason": finish_reason, "stop_reason": stop_reason}
        answer = {
            **self._base,
            "object": "chat.completion" if self.chat else "text_completion",
            "choices": [choice],
        }
        answer["usage"] = usage(len(self.prompt), len(tokens), cached_tokens)
        answer["kv_transfer_params"] = kv_transfer_params
        choice["token_ids"] = tokens if self.token_ids else None
        prompt = self.prompt.tolist() if self.token_ids else None
        (answer if self.chat else choice)["prompt_token_ids"] = prompt
        return orjson.dumps(answer)

    def _stream_usage(self, produced: int) -> dict[str, int]:
        prompt = len(self.prompt)
        return {"prompt_tokens": prompt, "total_tokens": prompt + produced, "completion_tokens": produced}


class TokensShape(Shape):
    """Answers of /inference/v1/generate: token ids without text. Fields that vLLM leaves null are
    left out."""

    def token(
        self,
        token: int,
        produced: int,
        finish_reason: str | None,
        stop_reason: int | str | None = None,
        text: str | None = None,
    ) -> bytes:
        """The chunk of one token, the `produced`-th."""
        return self._chunk([token], finish_reason, stop_reason, produced)

    def aborted(self) -> bytes:
        """The last chunk of a stream that the engine ends."""
        return self._chunk([], "abort", None, 0)

    def _usage_chunk(self, told: dict[str, Any]) -> dict[str, Any]:
        return self._event([], told)

    def whole(
        self,
        tokens: list[int],
        finish_reason: str,
        stop_reason: int | str | None,
        cached_tokens: int | None,
        kv_transfer_params: dict[str, Any] | None = None,
        text: str | None = None,
    ) -> bytes:
        """The answer that is not streamed."""
        told = usage(len(self.prompt), len(tokens), cached_tokens)
        answer = self._event([self._choice(tokens, finish_reason, stop_reason)], told)
        answer |= {"model": self._base["model"], "created": self._base["created"]}
        return orjson.dumps(answer | {"kv_transfer_params": kv_transfer_params, "ec_transfer_params": None})

    def _chunk(
        self, tokens: list[int], finish_reason: str | None, stop_reason: int | str | None, produced: int
    ) -> bytes:
        told = self._stream_usage(produced) if self.continuous_usage else None
        event = self._event([self._choice(tokens, finish_reason, stop_reason)], told)
        if produced > 1:
            event["prompt_token_ids"] = None
        return b"data: %b\n\n" % orjson.dumps(event)

    def _event(self, choices: list[dict[str, Any]], told: dict[str, Any] | None) -> dict[str, Any]:
        return {
            "request_id": self.request_id,
            "usage": told,
            "prompt_token_ids": self.prompt.tolist() if self.token_ids and choices else None,
            "output_mode": "tokens",
            "choices": choices,
        }

    @staticmethod
    def _choice(
        tokens: list[int], finish_reason: str | None, stop_reason: int | str | None
    ) -> dict[str, Any]:
        return {
            "index": 0,
            "finish_reason": finish_reason,
            "stop_reason": stop_reason,
            "token_ids": tokens,
            "logprobs": None,
        }
