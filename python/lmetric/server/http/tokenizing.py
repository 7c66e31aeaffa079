"""Renders and tokenizes prompts before routing: short ones at once, long ones in a thread.

The first request of a model with a tokenizer loads this module.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import structlog

from lmetric.server.api.request import ParsedRequest
from lmetric.server.fleet.model import Model
from lmetric.tokens.errors import NotPredictable, kind_and_place, unpredictable

if TYPE_CHECKING:
    from lmetric.tokens.images import ImagePrompt
    from lmetric.tokens.prompt import PromptTokenizer, Text, Tokens

# Longer texts, in bytes, are matched as text: a prompt of a million tokens has 4 MB.
MOST_TEXT_BYTES = 4 << 20
# Only one thread at a time tokenizes a longer text than this, in bytes.
LARGE_TEXT_BYTES = 1 << 20
# Memory that the library takes for a byte of text.
TOKENIZED_BYTES = 183
_LARGE = threading.Lock()
# Readers of prompts whose media an engine may encode in advance.
ENCODED_APIS = ("chat", "messages", "responses")

log = structlog.get_logger("lmetric.tokens")


def begin(
    model: Model, tokenizer: PromptTokenizer, call: ParsedRequest
) -> Callable[[], Tokens | ImagePrompt] | None:
    """Tokenizes the prompt of a request. Returns long work as a function, for a thread."""
    if len(call.body) > tokenizer.rendered_bytes:
        return partial(read_prompt, tokenizer, call)
    try:
        text = prompt_text(tokenizer, call)
        tokens = tokenizer.encode(text, tokenizer.at_once_bytes)
        prompt = tokenizer.expand(text, tokens) if text.images and tokens is not None else None
    except Exception as error:
        model.tokenizers.count_text(unpredictable(error))
        return None
    if tokens is None:
        return partial(encode_all, tokenizer, text)
    if prompt is None:
        call.tokens = tokens
    else:
        take_prompt(model, call, prompt)
    return None


def prompt_text(tokenizer: PromptTokenizer, call: ParsedRequest) -> Text:
    """Returns the text that the engine will tokenize. Raises NotPredictable."""
    reader = call.path.prompt
    try:
        request = call.request
    except ValueError as error:  # the reader in Rust allows more
        raise NotPredictable("shape", f"the body cannot be parsed: {error}") from None
    if reader == "chat":
        text = tokenizer.chat_text(request)
    elif reader == "messages":
        text = tokenizer.messages_text(request)
    elif reader == "responses":
        text = tokenizer.responses_text(request)
    elif reader == "chat_batch":
        conversations = request.get("messages")
        first = conversations[0] if isinstance(conversations, list) and conversations else None
        text = tokenizer.chat_text({**request, "messages": first})
    else:
        assert call.text is not None
        text = tokenizer.completion_text(request, call.text.decode())
    return text._replace(scope=call.scope) if call.scope else text


def may_have_media(call: ParsedRequest) -> bool:
    """Whether a request may have media that an engine encodes in advance."""
    if call.path.prompt not in ENCODED_APIS:
        return False
    from lmetric.tokens.media import has_media

    return has_media(call.body)


def read_media(call: ParsedRequest) -> None:
    """Reads the media of a request. For a large body, call it in a thread."""
    from lmetric.tokens.media import media_of

    try:
        call.media = media_of(call.path.prompt, call.request)
    except Exception as error:  # of a malformed request, which the engine judges
        log.debug("the media of a request are unknown", reason=kind_and_place(error))


def take_prompt(model: Model, call: ParsedRequest, prompt: Tokens | ImagePrompt) -> None:
    """Gives a request its prompt, and has unknown images of it learned."""
    if isinstance(prompt, np.ndarray):
        call.tokens = prompt
        return
    call.images = prompt
    if prompt.unknown:
        model.learn_images(prompt.unknown, call)
    if prompt.tokens is None:
        model.tokenizers.count_text(NotPredictable("media", "no engine has rendered an image yet"))
    elif len(prompt.images) < prompt.image_count:
        model.tokenizers.text_prompts["image"] += 1


def read_prompt(tokenizer: PromptTokenizer, call: ParsedRequest) -> Tokens | ImagePrompt:
    """Returns a prompt's tokens. Raises NotPredictable."""
    return encode_all(tokenizer, prompt_text(tokenizer, call))


def encode_all(tokenizer: PromptTokenizer, text: Text) -> Tokens | ImagePrompt:
    """Returns the tokens of a text of any length. Raises NotPredictable."""
    size = len(text.text)
    if not text.text.isascii():
        size = len(text.text.encode("utf-8", "surrogatepass"))
    if size > MOST_TEXT_BYTES:
        raise NotPredictable("length", f"{size} bytes; at most {MOST_TEXT_BYTES} are tokenized")
    with _LARGE if size > LARGE_TEXT_BYTES else contextlib.nullcontext():
        tokens = tokenizer.encode(text)
    assert tokens is not None  # without a limit the result is never None
    return tokenizer.expand(text, tokens)
