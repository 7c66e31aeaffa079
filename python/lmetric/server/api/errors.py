"""Errors for clients, in the format of OpenAI's API."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, NamedTuple

import orjson

from lmetric._core import NoInstanceError
from lmetric.engines.errors import error_text
from lmetric.server.api.paths import MESSAGES, RESPONSES

if TYPE_CHECKING:
    from pydantic import ValidationError

# Statuses by type.
ERROR_TYPES: Mapping[str, str] = {
    "invalid_request_error": "400, 405, 413, 415, 426, 431",
    "authentication_error": "401",
    "permission_error": "403",
    "not_found_error": "404",
    "rate_limit_error": "429",
    "overloaded_error": "503",
    "server_error": "other statuses",
}
_TYPES = {
    int(each): kind for kind, statuses in ERROR_TYPES.items() for each in re.findall("[0-9]+", statuses)
}
_PHRASES = {status.value: status.phrase for status in HTTPStatus}


class ApiError(Exception):
    """An error for the client: an HTTP status and an OpenAI error object.

    ``engines``: details with engine names. They follow the message unless they are hidden from
    clients. ``more``: further fields of the body, beside ``error``. ``words``: an engine's own
    words, which follow the message. They may repeat the prompt, so no log has them.
    """

    words = ""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        engines: str | None = None,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
        more: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.engines = engines
        self.param = param
        self.code = code
        self.headers = dict(headers or {})
        self.more = dict(more or {})

    def first_lines(self) -> bytes:
        """Returns the status line and the content type of its answer."""
        phrase = _PHRASES.get(self.status, "")
        return f"HTTP/1.1 {self.status} {phrase}\r\ncontent-type: application/json\r\n".encode()

    def body(self, show_engines: bool = True) -> bytes:
        """Returns the error object as JSON."""
        kind = _TYPES.get(self.status, "server_error")
        shown = f" ({self.engines})" if self.engines and show_engines else ""
        message = f"{self.message}{self.words}{shown}"
        error = {"message": message, "type": kind, "param": self.param, "code": self.code}
        return orjson.dumps({"error": error, **self.more})


def last_events(path: str, body: bytes) -> bytes:
    """Returns an error as the last events of a stream, in the format of the path's API.

    ``body``: the error as JSON, ours or an engine's. The events of Anthropic's messages and
    OpenAI's responses have names, and a stream of these ends without ``[DONE]``.
    """
    if path.startswith(f"{RESPONSES}/"):  # a stored response
        path = RESPONSES
    body = body.replace(b"\r", b" ").replace(b"\n", b" ")  # an engine's own error may have lines
    if path not in (MESSAGES, RESPONSES):
        return b"data: %b\n\ndata: [DONE]\n\n" % body
    told = orjson.loads(body)
    error = told.get("error")
    error = error if isinstance(error, dict) else told
    if not isinstance(error.get("message"), str):
        error = {**error, "message": error_text(body)}
    if path == MESSAGES:
        kind = error.get("type")
        named = {
            "type": "api_error" if kind in (None, "server_error") else kind,
            "message": error.get("message"),
        }
        data: dict[str, Any] = {"type": "error", "error": named}
    else:
        # The router reads no numbers of events. Some clients look for `error`.
        data = {"type": "error", "sequence_number": 0, "error": error}
        data |= {name: error.get(name) for name in ("code", "message", "param")}
    return b"event: error\ndata: %b\n\n" % orjson.dumps(data)


def whole_answer(
    error: ApiError,
    request_id: str | None,
    keep_alive: bool = False,
    *,
    show_engines: bool = True,
    more_fields: bytes = b"",
) -> bytes:
    """Returns an error as the bytes of an HTTP response.

    `more_fields`: further lines of its head.
    """
    body = error.body(show_engines)
    fields = {"content-length": str(len(body))}
    if request_id is not None:
        fields["x-request-id"] = request_id
    fields |= error.headers
    if not keep_alive:
        fields["connection"] = "close"
    lines = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    return b"%b%b%b\r\n%b" % (error.first_lines(), lines.encode("latin-1"), more_fields, body)


class Unusable(NamedTuple):
    """The reasons why no engine gets new requests.

    ``summary``: counts of engines by cause, without names and addresses. ``details``: the reason of
    each engine, with its name.
    """

    summary: str
    details: str


def no_engine_error(model: str | None, error: NoInstanceError | None, unusable: Unusable | None) -> ApiError:
    """Returns the 503 for a model without an engine that can accept a request now.

    ``model``: None if no engine has reported its model. ``error``: of the core router; None: it was
    not called. ``unusable``: the reasons if no engine is usable, else None.
    """
    if unusable is None:
        why, details = "no usable engine" if error is None else str(error), None
    else:
        why, details = f"no usable engine: {unusable.summary}", unusable.details
    message = why if model is None else f"{model}: {why}"
    return ApiError(503, message, engines=details, code="no_engine", headers={"retry-after": "2"})


def unserved_alias(alias: str, models: Sequence[str]) -> ApiError:
    """Returns the 404 for an alias of models that no engine serves."""
    message = f"model {alias!r} is an alias of {', '.join(map(repr, models))}, and no engine serves it"
    return ApiError(404, message, param="model", code="model_not_found")


def bad(message: str, param: str | None = None) -> ApiError:
    """Returns a 400 for an invalid request."""
    return ApiError(400, message, param=param)


def not_valid(error: ValidationError) -> ApiError:
    """Returns a 400 with the first problem that pydantic found in a body."""
    from lmetric.validation import expected

    first = error.errors(include_url=False, include_input=False)[0]
    return bad(f"{'.'.join(map(str, first['loc']))}: {expected(first)}")
