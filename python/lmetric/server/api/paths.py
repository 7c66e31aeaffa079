"""The relayed paths of engines, and how the router treats requests for each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal
from urllib.parse import unquote

from msgspec import Struct

from lmetric.engines.handover import CHAT, COMPLETIONS

# The way to read the prompt in a body, by its name in `rust/wire/src/api.rs`. "messages" and
# "responses": the APIs of coding agents. "input": prompts of another API. "nothing": the engine
# computes no prompt. "form": a multipart form with a file, which `form.py` reads.
PromptReader = Literal[
    "chat", "chat_batch", "completion", "token_ids", "messages", "responses", "input", "nothing", "form"
]
# How a tenant's cached prefixes are isolated. "salt": by the field `cache_salt`. "salt_by_kind": by
# this field if all engines of the model are of a kind that reads it on this path, else as
# "refused". "no_cache": the engine caches nothing. "refused": engines accept no salt, so isolated
# tenants get a 403.
IsolatedBy = Literal["salt", "salt_by_kind", "no_cache", "refused"]

# Prompts as text whose tokens a tokenizer can predict.
TOKENIZED = frozenset({"chat", "chat_batch", "completion", "messages", "responses"})
_STREAMED = frozenset({"messages", "responses"})
MAX_NAME_LENGTH = 4096  # with percent-encoding: to decode 64 kB takes 50 ms


class RelayedPath(Struct, frozen=True, eq=False, gc=False):
    """A path that accepts a JSON object, or a multipart form, by POST."""

    prompt: PromptReader
    isolated_by: IsolatedBy
    # The engine may store its answer. A later request that names the answer goes to this engine.
    stores: bool = False
    generates: bool = False  # each answer has choices with a finish_reason

    @property
    def streams(self) -> bool:
        """Whether an answer may be an event stream."""
        return self.generates or self.prompt in _STREAMED


_SALTED_INPUT = RelayedPath("input", "salt")
_NO_PROMPT = RelayedPath("nothing", "no_cache")
RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"
AUDIO = ("/v1/audio/transcriptions", "/v1/audio/translations")
# WebSocket: the router answers 501.
REALTIME = "/v1/realtime"

# Salts were tested on vLLM 0.32. SGLang 0.5.23 reads them on chats, completions and responses.
RELAYED: Mapping[str, RelayedPath] = {
    CHAT: RelayedPath("chat", "salt", generates=True),
    "/v1/chat/completions/batch": RelayedPath("chat_batch", "salt", generates=True),
    COMPLETIONS: RelayedPath("completion", "salt", generates=True),
    "/inference/v1/generate": RelayedPath("token_ids", "salt", generates=True),
    RESPONSES: RelayedPath("responses", "salt", stores=True),
    MESSAGES: RelayedPath("messages", "salt_by_kind"),
    **dict.fromkeys(("/v1/embeddings", "/pooling", "/classify"), _SALTED_INPUT),
    **dict.fromkeys(("/v1/score", "/score", "/v1/rerank", "/v2/rerank", "/rerank"), _SALTED_INPUT),
    **dict.fromkeys(("/tokenize", "/detokenize", "/v1/messages/count_tokens"), _NO_PROMPT),
    **dict.fromkeys((f"{CHAT}/render", f"{COMPLETIONS}/render"), _NO_PROMPT),
    **dict.fromkeys(("/v1/messages/render", f"{RESPONSES}/render"), _NO_PROMPT),
    **dict.fromkeys((f"{CHAT}/derender", f"{COMPLETIONS}/derender"), _NO_PROMPT),
    **dict.fromkeys(AUDIO, RelayedPath("form", "refused")),
}
# Paths whose streams are incomplete without a finish_reason.
GENERATING = frozenset(path for path, relayed in RELAYED.items() if relayed.generates)
# A path of the configuration's `paths`.
CONFIGURED_PATH = RelayedPath("input", "refused")


class StoredResponsePath(Struct, frozen=True, gc=False):
    """A path of one stored response. ``methods``: its HTTP methods."""

    response_id: str
    methods: tuple[str, ...]


def route(path: str) -> str:
    """Returns a path with a placeholder for the ID of a stored response. It has few values."""
    stored = stored_response(path)
    if stored is None:
        return path
    action = path.removeprefix(f"{RESPONSES}/").partition("/")[2]
    return f"{RESPONSES}/{{response_id}}" + (f"/{action}" if action else "")


def stored_response(path: str) -> StoredResponsePath | None:
    """Returns the stored response that a path names; None: it names none."""
    if not path.startswith(f"{RESPONSES}/") or path in RELAYED:
        return None
    name, _, action = path.removeprefix(f"{RESPONSES}/").partition("/")
    methods = {"": ("GET", "DELETE"), "cancel": ("POST",)}.get(action)
    return StoredResponsePath(decoded(name), methods) if name and methods else None


def decoded(name: str) -> str:
    """Returns a name in a path without its percent-encoding, unless it is too long for a name."""
    return unquote(name) if len(name) <= MAX_NAME_LENGTH else name
