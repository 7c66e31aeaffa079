"""Converts requests to the engine's token IDs, with a model's tokenizer and chat template."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import orjson
from numpy.typing import NDArray

from lmetric._core import BadValueError, TokenEncoder, TokenizeError
from lmetric.tokens.agents import chat_of_messages, chat_of_responses
from lmetric.tokens.chat import flags_of, messages_of, tools_of, variables_of, without_developer
from lmetric.tokens.errors import NotPredictable, TokenizerError
from lmetric.tokens.files import ModelFiles, read_folder
from lmetric.tokens.images import Image, ImagePrompt, KnownImages
from lmetric.tokens.template import TemplateError

Tokens = NDArray[np.uint32]
CACHE_BYTES = 256 << 20
# Text size that the library tokenizes in about half a millisecond.
_AT_ONCE_BYTES, _AT_ONCE_BYTES_FAST = 2 << 10, 64 << 10
# Larger bodies are rendered in a thread: a template may take microseconds for each message.
RENDERED_BYTES = 64 << 10
# With templates that indent JSON: 1 us per byte.
_INDENTED_BYTES = 32 << 10
_CHAT_FLAGS = {
    "add_generation_prompt": True,
    "continue_final_message": False,
    "add_special_tokens": False,
}


class Text(NamedTuple):
    """A prompt for the tokenizer."""

    text: str
    add_special_tokens: bool
    scope: int = 0  # texts of different scopes share nothing in the tokenizer's cache
    images: tuple[Image, ...] = ()  # in the order of their placeholders in the text


class PromptTokenizer:
    """Tokenizes prompts like a model's engines. Create it with `load`; it is thread-safe.

    Rendering follows vLLM; ``verify`` (in this package) compares with a running engine. Tokens of
    text between two special tokens are kept (at most ``cache_bytes``): a conversation pays for its
    new turn only.
    """

    def __init__(self, files: ModelFiles, cache_bytes: int = CACHE_BYTES) -> None:
        self.folder = files.folder
        self._files = files
        added = orjson.dumps(files.added_tokens)
        try:
            self.encoder = TokenEncoder(
                files.tokenizer, added_tokens=added, around=files.around, cache_bytes=cache_bytes
            )
        except BadValueError as error:
            raise TokenizerError(f"{files.folder / 'tokenizer.json'}: {error}") from None
        files.tokenizer = b""
        self.images = KnownImages()
        # Maximum size of new text that can be tokenized in the event loop.
        self.at_once_bytes = _AT_ONCE_BYTES_FAST if self.encoder.fast else _AT_ONCE_BYTES
        templates = (files.template, files.tool_template)
        indents = any(each is not None and each.indents for each in templates)  # JSON, perhaps
        # Maximum size of a body that the event loop may render.
        self.rendered_bytes = _INDENTED_BYTES if indents else RENDERED_BYTES

    @classmethod
    def load(
        cls,
        folder: str | os.PathLike[str],
        *,
        chat_template: str | None = None,
        cache_bytes: int = CACHE_BYTES,
    ) -> PromptTokenizer:
        """Reads a model's folder. Large vocabularies take about a second.

        ``chat_template``: a file that replaces the folder's (vLLM's ``--chat-template``). Raises
        TokenizerError.
        """
        return cls(read_folder(folder, chat_template), cache_bytes)

    @property
    def no_chat(self) -> str | None:
        """The reason why chats cannot be rendered; None if they can."""
        return self._files.no_chat

    @property
    def exported_with(self) -> str | None:
        """The library that has exported the tokenizer, with its version; None: the model's own
        files."""
        return self._files.exported_with

    @property
    def notes(self) -> list[str]:
        """Notes for operators."""
        whole = self.encoder.whole_because
        said = [f"every prompt is tokenized as a whole: {whole}"] if whole else []
        if self.no_chat:
            said.append(f"chats are matched as text: {self.no_chat}")
        return said

    def messages_text(self, request: Mapping[str, Any]) -> Text:
        """The rendered text of a body of /v1/messages. Raises NotPredictable."""
        return self.chat_text(
            chat_of_messages(request, lambda: self._merges_system, lambda: self._disabled_effort)
        )

    def responses_text(self, request: Mapping[str, Any]) -> Text:
        """The rendered text of a body of /v1/responses. Raises NotPredictable."""
        return self.chat_text(chat_of_responses(request), name_first=True)

    @cached_property
    def _merges_system(self) -> bool:
        """Whether engines merge all system messages of /v1/messages into the first."""
        templates = (self._files.template, self._files.tool_template)
        try:
            return any(template is None or template.system_first for template in templates)
        except TemplateError as error:
            raise NotPredictable("template", str(error)) from None

    @cached_property
    def _disabled_effort(self) -> str:
        """The reasoning effort by which engines disable thinking for /v1/messages.

        It is "low" if the template refuses "none", or renders it as it renders another effort.
        """

        def rendered(effort: str) -> str | None:
            messages = [{"role": "user", "content": "Hi"}]
            try:
                return self.chat_text({"messages": messages, "reasoning_effort": effort}).text
            except NotPredictable:
                return None

        none = rendered("none")
        others = (rendered(effort) for effort in ("low", "medium", "high", "xhigh", "max"))
        return "low" if none is None or none in others else "none"

    def chat_text(self, request: Mapping[str, Any], *, name_first: bool = False) -> Text:
        """The rendered text of a body of /v1/chat/completions. Raises NotPredictable.

        ``name_first``: in a call of a tool, the name precedes the arguments.
        """
        files = self._files
        if files.no_chat is not None:
            raise NotPredictable("no_template", files.no_chat)
        variables = {**files.special, **variables_of(request)}
        tools = variables.pop("tools", None)
        if tools is None and request.get("tools") is not None:
            tools = tools_of(request["tools"])
        template = files.template if tools is None else files.tool_template
        if template is None:
            raise NotPredictable("no_template", f"{files.folder}: no chat template for this kind of request")
        documents = request.get("documents")
        messages, images = messages_of(request, template.content_format, name_first=name_first)
        if not template.knows_developer and any(message["role"] == "developer" for message in messages):
            messages = without_developer(messages)
        generates, continues, special = flags_of(request, _CHAT_FLAGS)
        try:
            text = template.render(
                messages,
                tools=tools,
                documents=variables.pop("documents", None) if documents is None else documents,
                add_generation_prompt=generates,
                continue_final_message=continues,
                variables=variables,
            )
        except TemplateError as error:
            raise NotPredictable("template", str(error)) from None
        return Text(text, special, images=tuple(images))

    def completion_text(self, request: Mapping[str, Any], prompt: str) -> Text:
        """The text of a body of /v1/completions with this prompt. Raises NotPredictable."""
        if request.get("truncate_prompt_tokens") is not None:
            raise NotPredictable("truncation", "truncate_prompt_tokens")
        return Text(prompt, flags_of(request, {"add_special_tokens": True})[0])

    def encode(self, text: Text, at_most: int | None = None) -> Tokens | None:
        """Token IDs; None if more than ``at_most`` bytes of the text are new.

        Without ``at_most``, the call releases the interpreter lock, for use in a thread. Raises
        NotPredictable.
        """
        try:
            return self.encoder.encode(
                text.text, add_special_tokens=text.add_special_tokens, at_most=at_most, scope=text.scope
            )
        except (TokenizeError, UnicodeEncodeError) as error:
            raise NotPredictable("tokenizer", str(error)) from None

    def expand(self, text: Text, tokens: Tokens) -> Tokens | ImagePrompt:
        """The prompt of a text's tokens: with its images if it has some."""
        return self.images.expand(tokens, list(text.images)) if text.images else tokens

    def chat(self, request: Mapping[str, Any]) -> Tokens:
        """Token ids of a body of /v1/chat/completions. Raises NotPredictable."""
        return self._all(self.chat_text(request))

    def messages(self, request: Mapping[str, Any]) -> Tokens:
        """Token ids of a body of /v1/messages. Raises NotPredictable."""
        return self._all(self.messages_text(request))

    def responses(self, request: Mapping[str, Any]) -> Tokens:
        """Token ids of a body of /v1/responses. Raises NotPredictable."""
        return self._all(self.responses_text(request))

    def completion(self, prompt: str, *, add_special_tokens: bool = True) -> Tokens:
        """Token ids of a completion's prompt. Raises NotPredictable."""
        return self._all(Text(prompt, add_special_tokens))

    def _all(self, text: Text) -> Tokens:
        if text.images:
            raise NotPredictable("media", "only an engine knows the tokens of an image")
        tokens = self.encode(text)
        assert tokens is not None  # without a limit the result is never None
        return tokens
