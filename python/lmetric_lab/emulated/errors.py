"""Errors of the emulated engine, in vLLM's shape."""

from __future__ import annotations

import http

import orjson
from aiohttp import web
from pydantic import ValidationError

_TYPES = {400: "BadRequestError", 404: "NotFoundError", 503: "ServiceUnavailableError"}


class EngineError(Exception):
    """An error answer of the engine: status, message, and the invalid parameter."""

    def __init__(self, status: int, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.param = param

    def body(self) -> bytes:
        """The JSON object of vLLM's errors."""
        kind = _TYPES.get(self.status) or http.HTTPStatus(self.status).phrase.replace(" ", "")
        error = {"message": str(self), "type": kind, "param": self.param, "code": self.status}
        return orjson.dumps({"error": error})

    def response(self) -> web.Response:
        """The answer that carries it."""
        return web.Response(status=self.status, body=self.body(), content_type="application/json")


def invalid_body(error: ValidationError) -> EngineError:
    """400 for a body that does not fit: every problem with its place."""
    problems, param = [], None
    for problem in error.errors(include_url=False, include_input=False, include_context=False):
        place = ".".join(map(str, problem["loc"]))
        message = problem["msg"].removeprefix("Value error, ")
        problems.append(f"{place}: {message}" if place else message)
        param = param or (str(problem["loc"][0]) if problem["loc"] else None)
    return EngineError(400, "; ".join(problems), param)
