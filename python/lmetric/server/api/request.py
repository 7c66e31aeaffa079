"""The parts of a client's request that routing needs.

Rust reads the body once, and the engine gets its bytes unchanged, except a body in UTF-16, in
UTF-32 or with a byte order mark: the engine gets plain UTF-8. Python parses the body only to change
it, or for a chat template.
"""

from collections.abc import Mapping
from typing import Any

import orjson
from msgspec import Struct

from lmetric._core import BadRequestError, check_object, read_request
from lmetric.server.api.errors import bad
from lmetric.server.api.paths import RelayedPath
from lmetric.tokens import Tokens

JSON = Mapping[str, Any]


class ParsedRequest(Struct, eq=False, gc=False):
    """The fields of a request's body that routing needs."""

    path: RelayedPath
    body: bytes  # as the client sent it, until `replace`
    model: str | None
    stream: bool
    session: str | None  # from `vllm_xargs.session_id` or `user`
    session_id: str | None
    salt: str | None
    max_tokens: int | None
    # The prompt as UTF-8 text or as tokens. The tokenizer of its model may turn the text into
    # tokens.
    text: bytes | None
    tokens: Tokens | None
    # Sizes of the request's further prompts. They count as load and are not matched.
    more_bytes: int
    more_tokens: int
    priority: float | None  # NaN: the field `priority` is not a number
    # The tokenizer cache partition of the prompt. 0: the partition that tenants share.
    scope: int = 0
    _fields: JSON | None = None

    @property
    def request(self) -> JSON:
        """The fields of the body, parsed on first use."""
        if self._fields is None:
            self._fields = orjson.loads(self.body)
        return self._fields

    @property
    def parsed(self) -> bool:
        """Whether `request` needs no parser any more."""
        return self._fields is not None

    def replace(self, body: bytes, fields: JSON) -> None:
        """Replaces the body. ``fields``: the parsed fields of the new body."""
        self.body, self._fields = body, fields


def parse(path: RelayedPath, body: bytes) -> ParsedRequest:
    """Reads the body of a request. Raises ApiError (400), which names the position of the fault."""
    try:
        return ParsedRequest(path, *read_request(path.prompt, body))
    except BadRequestError as error:
        raise bad(*error.args) from None


def read_object(body: bytes) -> dict[str, Any]:
    """Returns the fields of a request to the router itself.

    Raises ApiError (400), which names the position of the fault.
    """
    try:
        check_object(body)
    except BadRequestError as error:
        raise bad(*error.args) from None
    fields: dict[str, Any] = orjson.loads(body)
    return fields
