"""A client's request, as far as routing needs it. Rust reads the body once, and it is passed on as it came.
Python parses it only to change it, or for a chat template.
"""

from collections.abc import Mapping
from typing import Any

import orjson
from msgspec import Struct

from lmetric._core import BadRequestError, check_object, read_request
from lmetric.server.api.errors import bad
from lmetric.tokens import Tokens

JSON = Mapping[str, Any]

# Further paths of which an engine may know one or the other; each takes a JSON object by POST.
PASSED_PATHS = (
    "/v1/responses",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/embeddings",
    "/v1/rerank",
    "/v2/rerank",
    "/v1/score",
    "/rerank",
    "/score",
    "/pooling",
    "/classify",
    "/tokenize",
    "/detokenize",
)


class ParsedRequest(Struct, eq=False, gc=False):
    """What a request's body asks for, as far as routing goes."""

    body: bytes  # as the client sent it, until it is changed
    chat: bool
    generates: bool  # it is a chat or a completion
    model: str | None
    stream: bool
    session: str | None
    salt: str | None
    max_tokens: int | None
    # The prompt, as text in UTF-8 or as tokens: a chat or a text may become tokens when its model is known.
    text: bytes | None
    tokens: Tokens | None
    # Further prompts of the same request, which count as load and are not matched.
    more_bytes: int
    more_tokens: int
    priority: float | None  # NaN: there is a field `priority` that is no number
    # The part of the tokenizer's cache that its prompt shares; 0: the part of all other tenants.
    scope: int = 0
    _fields: JSON | None = None

    @property
    def request(self) -> JSON:
        """The body's fields."""
        if self._fields is None:
            self._fields = orjson.loads(self.body)
        return self._fields

    def replace(self, body: bytes, fields: JSON) -> None:
        """Takes another body, whose fields these are."""
        self.body, self._fields = body, fields


def parse(path: str, body: bytes) -> ParsedRequest:
    """Reads a body. Raises ApiError (400), which names the place."""
    try:
        return ParsedRequest(*read_request(path, body))
    except BadRequestError as error:
        raise bad(*error.args) from None


def read_object(body: bytes) -> dict[str, Any]:
    """The fields of a request to the router itself. Raises ApiError (400), which names the place."""
    try:
        check_object(body)
    except BadRequestError as error:
        raise bad(*error.args) from None
    fields: dict[str, Any] = orjson.loads(body)
    return fields
