"""Renders and tokenizes prompts before routing: short ones at once, long ones in a thread."""

from __future__ import annotations

import traceback
from typing import TYPE_CHECKING

import numpy as np
import structlog

from lmetric.server.api.request import ParsedRequest
from lmetric.server.fleet.model import Model
from lmetric.tokens.errors import NotPredictable

if TYPE_CHECKING:
    from lmetric.tokens.images import ImagePrompt
    from lmetric.tokens.prompt import PromptTokenizer, Text, Tokens

# Larger bodies are rendered in a thread: a template may take microseconds for each message.
RENDERED_BYTES = 64 << 10
# With templates that indent JSON: 1 us per byte.
INDENTED_BYTES = 32 << 10
# Readers of prompts whose media an engine may encode in advance.
ENCODED_APIS = ("chat", "messages", "responses")

log = structlog.get_logger("lmetric.tokens")


def unpredictable(error: Exception) -> NotPredictable:
    """Returns the reason why reading a prompt failed.

    A malformed request may fail the reader or a template in any way. The engine judges it.
    """
    return error if isinstance(error, NotPredictable) else NotPredictable("tokenizer", _shown(error))


def _shown(error: Exception) -> str:
    """Returns the kind and the place of an error. Its message may have a part of a prompt."""
    (frame,) = traceback.extract_tb(error.__traceback__, limit=-1)
    return f"{type(error).__name__} in {frame.name}, {frame.filename}:{frame.lineno}"


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


def may_have_media(model: Model, call: ParsedRequest) -> bool:
    """Whether engines of a model encode media, and a request may have some."""
    if not model.encoders or call.path.prompt not in ENCODED_APIS:
        return False
    from lmetric.tokens.media import has_media

    return has_media(call.body)


def read_media(call: ParsedRequest) -> None:
    """Reads the media of a request. For a large body, call it in a thread."""
    from lmetric.tokens.media import media_of

    try:
        call.media = media_of(call.path.prompt, call.request)
    except Exception as error:  # of a malformed request, which the engine judges
        log.debug("the media of a request are unknown", reason=_shown(error))


def take_prompt(model: Model, call: ParsedRequest, prompt: Tokens | ImagePrompt) -> None:
    """Gives a request its prompt, and has unknown images of it learned."""
    if isinstance(prompt, np.ndarray):
        call.tokens = prompt
        return
    call.images = prompt
    if prompt.unknown:
        model.learn_images(prompt.unknown, call)
    if prompt.tokens is None:
        count_text_prompt(model, NotPredictable("media", "no engine has rendered an image yet"))
    elif len(prompt.images) < prompt.image_count:
        model.tokenizers.text_prompts["image"] += 1


def count_text_prompt(model: Model, why: NotPredictable) -> None:
    """Counts a prompt that is matched as text although its model matches tokens."""
    model.tokenizers.text_prompts[why.reason] += 1
    log.debug("a prompt is matched as text", model=model.name, reason=why.reason, why=str(why))


def renders_at_once(tokenizer: PromptTokenizer, call: ParsedRequest) -> bool:
    """Whether the event loop may render a request's prompt."""
    return len(call.body) <= (INDENTED_BYTES if tokenizer.indents else RENDERED_BYTES)


def read_prompt(tokenizer: PromptTokenizer, call: ParsedRequest) -> Tokens | ImagePrompt:
    """Returns a prompt's tokens. Raises NotPredictable."""
    return encode_all(tokenizer, prompt_text(tokenizer, call))


def encode_all(tokenizer: PromptTokenizer, text: Text) -> Tokens | ImagePrompt:
    """Returns the tokens of a text of any length. Raises NotPredictable."""
    tokens = tokenizer.encode(text)
    assert tokens is not None  # without a limit the result is never None
    return tokenizer.expand(text, tokens)
