"""The parts of a client's request that routing needs.

Rust reads the body once, and the engine gets its bytes unchanged, but for fields that the router
adds, such as `return_token_ids` of a stream that may continue elsewhere. Of a body in UTF-16, in
UTF-32 or with a byte order mark, the engine gets plain UTF-8. Python parses the body only for a
chat template, or to look at many of its fields.

Reading a large body takes up to 20 ns for each byte, so a thread does it (`http/waiting.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import orjson
from msgspec import Struct

from lmetric._core import BadRequestError, check_object, edit_object, join_parts, read_request, short_members
from lmetric.engines.handover import FirstSegment
from lmetric.server.api.errors import bad
from lmetric.server.api.paths import RelayedPath

if TYPE_CHECKING:
    from lmetric.tokens.images import ImagePrompt
    from lmetric.tokens.media import Media
    from lmetric.tokens.prompt import Tokens

JSON = Mapping[str, Any]

# Larger bodies are read and changed in a thread: together with other work, a turn of the event loop
# would take too long.
LARGE_BODY = 256 << 10
# Longer values are not in `ParsedRequest.brief`.
_BRIEF_VALUE = 4096


# Shorter pieces are joined as they come: an object for each would take more memory than it counts.
SMALL_PIECE = 1024


class BodyParts(Struct, eq=False, gc=False):
    """A body in pieces, as it was received. ``skip``: bytes before it, in the first parts."""

    parts: list[bytes | bytearray] = []
    skip: int = 0
    size: int = 0

    def __len__(self) -> int:
        return self.size

    def add(self, data: bytes) -> None:
        """Adds a piece."""
        add_piece(self.parts, data)
        self.size += len(data)

    def joined(self) -> bytes:
        """Returns the body, and drops its parts. For a large body, call it in a thread."""
        parts, self.parts = self.parts, []
        return join_parts(parts, self.skip)


def add_piece(parts: list[bytes | bytearray], data: bytes) -> None:
    """Adds a piece to the others."""
    if len(data) >= SMALL_PIECE:
        parts.append(data)
    elif parts and isinstance(parts[-1], bytearray):
        parts[-1] += data
    else:
        parts.append(bytearray(data))


class ParsedRequest(Struct, eq=False, gc=False):
    """The fields of a request's body that routing needs."""

    path: RelayedPath
    body: bytes  # as the client sent it, until `replace`
    model: str | None
    stream: bool
    session: str | None = None  # from `vllm_xargs.session_id` or `user`
    session_id: str | None = None
    salt: str | None = None
    max_tokens: int | None = None
    # The prompt as UTF-8 text or as tokens. The tokenizer of its model may turn the text into
    # tokens.
    text: bytes | None = None
    tokens: Tokens | None = None
    # Sizes of the request's further prompts. They count as load and are not matched.
    more_bytes: int = 0
    more_tokens: int = 0
    priority: float | None = None  # NaN: the field `priority` is not a number
    # The tokenizer cache partition of the prompt. 0: the partition that tenants share.
    scope: int = 0
    images: ImagePrompt | None = None  # the prompt if it has images; `tokens` is None
    media: Media | None = None  # to encode before its engine gets it; None: nothing
    first: FirstSegment | None = None  # of a large body, if its model may split it
    _fields: JSON | None = None
    _brief: JSON | None = None
    # Place of the model's name in a form's body; None: the body is JSON.
    model_at: tuple[int, int] | None = None
    has_xargs: bool = False  # a form with the field `vllm_xargs`
    changes: bool = False  # whether `apply_changes` has work to do
    _removed: tuple[str, ...] = ()
    _added: JSON = {}

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

    @property
    def brief(self) -> JSON:
        """The fields with short values. Of fields with one name, it may lack the last.

        They are parsed on first use: for a large body, call `read_brief` before, in a thread.
        """
        if self._brief is None:
            self.read_brief()
        assert self._brief is not None
        return self._brief

    def read_brief(self) -> None:
        """Parses the fields with short values."""
        self._brief = orjson.loads(short_members(self.body, _BRIEF_VALUE))

    def change(self, remove: tuple[str, ...] = (), add: Mapping[str, Any] | None = None) -> None:
        """Removes and adds fields of the body. It has no field of `add` but those in `remove`.

        A large body changes at the next `apply_changes`, which a thread calls.
        """
        self._removed += remove
        self._added = {**self._added, **(add or {})}
        self.changes = True
        if len(self.body) <= LARGE_BODY:
            self.apply_changes()

    def rename(self, model: str) -> None:
        """Replaces the model's name, in the body too."""
        self.model = model
        if self.model_at is None:
            self.change(remove=("model",), add={"model": model})
        else:
            start, end = self.model_at
            name = model.encode("utf-8", "surrogateescape")
            self.body = b"".join((self.body[:start], name, self.body[end:]))
            self.model_at = start, start + len(name)

    def apply_changes(self) -> None:
        """Writes the changes into the body."""
        removed, added = self._removed, self._added
        self.changes, self._removed, self._added = False, (), {}
        self.body = edit_object(self.body, removed, orjson.dumps(added)[1:-1])
        if self._fields is not None:
            kept = {name: value for name, value in self._fields.items() if name not in removed}
            self._fields = {**added, **kept}


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
