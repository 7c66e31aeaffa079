"""The declaration of the router's own pages: path, access, and each method's schema and handler.

`server/http/pages` declares the pages. The server answers them, the page at / lists them, and
`server/api/openapi.py` describes them, all from the same table.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Literal, TypeVar

from msgspec import Struct

JSON = dict[str, Any]
Handler = TypeVar("Handler", bound=Callable[..., Awaitable[Any]])

ADMIN, KEY, REPLICA, OPEN = "adminToken", "apiKey", "replicaToken", None

# The readers of a page. "record": an administrator, or the tenant of the decision. "viewer": an
# administrator, or with API keys a tenant, who sees less. "metrics": anyone, unless
# `admin.protect_metrics` is set.
Access = Literal["open", "metrics", "tenant", "admin", "record", "viewer", "replica"]
CREDENTIALS: Mapping[Access, tuple[str | None, ...]] = {
    "open": (OPEN,),
    "metrics": (OPEN, ADMIN),
    "tenant": (KEY, OPEN),
    "admin": (ADMIN, OPEN),
    "record": (KEY, ADMIN, OPEN),
    "viewer": (KEY, ADMIN, OPEN),
    "replica": (REPLICA, OPEN),
}

OBJECT: JSON = {"type": "object"}
ARRAY: JSON = {"type": "array", "items": OBJECT}
TEXT: JSON = {"type": "string"}


def schema(name: str) -> JSON:
    """A reference to a schema of the OpenAPI document."""
    return {"$ref": f"#/components/schemas/{name}"}


def answer(description: str, shape: JSON | None = None, media: str = "application/json") -> JSON:
    """An answer, with the JSON schema of its body."""
    if shape is None:
        return {"description": description}
    return {"description": description, "content": {media: {"schema": shape}}}


def in_path(name: str, description: str) -> JSON:
    """A parameter in the path."""
    return {"name": name, "in": "path", "required": True, "description": description, "schema": TEXT}


def in_query(name: str, description: str, shape: JSON) -> JSON:
    """A parameter in the query."""
    return {"name": name, "in": "query", "description": description, "schema": shape}


class Operation(Struct, frozen=True, eq=False, gc=False):
    """A method of a page.

    Attributes:
        errors: statuses of its errors.
        handler: takes the call (`server/http/pages`) and returns the response.
        body: JSON schema of the request's body; None: no body.
        media: content type of the request's body.
        status: status of the answer.
    """

    summary: str
    answer: JSON
    errors: tuple[int, ...]
    handler: Callable[..., Awaitable[Any]]
    body: JSON | None
    parameters: tuple[JSON, ...]
    media: str
    status: int


class OwnPage(Struct, frozen=True, eq=False):
    """A page, with its operations by method.

    Attributes:
        path: the path; ``{name}`` stands for a part of it.
        tag: the page's section of the OpenAPI document.
        link: the text of the link on the page at / or at /debug; "": no link.
        more: credentials that show more on an open page.
    """

    path: str
    tag: str
    access: Access
    link: str
    more: tuple[str, ...]
    operations: dict[str, Operation]

    def on(
        self,
        method: str,
        summary: str,
        answer: JSON,
        *errors: int,
        body: JSON | None = None,
        parameters: tuple[JSON, ...] = (),
        media: str = "application/json",
        status: int = 200,
    ) -> Callable[[Handler], Handler]:
        """Returns a decorator that makes a function the handler of a method."""

        def declared(handler: Handler) -> Handler:
            self.operations[method] = Operation(
                summary, answer, errors, handler, body, parameters, media, status
            )
            return handler

        return declared

    @property
    def credentials(self) -> tuple[str | None, ...]:
        """The credentials of the page; `OPEN`: none, if no credential is configured."""
        return (*CREDENTIALS[self.access], *self.more)

    @property
    def allowed(self) -> tuple[str, ...]:
        """The methods for the error 405 and its header `allow`, changes first."""
        if "GET" not in self.operations:
            return tuple(self.operations)
        changes = tuple(method for method in self.operations if method != "GET")
        return (*changes, "GET") if changes else ("GET", "HEAD")

    def handler(self, method: str) -> Callable[..., Awaitable[Any]]:
        """The handler of an allowed method."""
        return self.operations["GET" if method == "HEAD" else method].handler


class Pages(dict[str, OwnPage]):
    """Pages by path, in the order of the OpenAPI document."""

    def page(
        self, path: str, tag: str, access: Access, link: str = "", more: tuple[str, ...] = ()
    ) -> OwnPage:
        """Declares a page."""
        assert path not in self, path
        self[path] = made = OwnPage(path, tag, access, link, more, {})
        return made
