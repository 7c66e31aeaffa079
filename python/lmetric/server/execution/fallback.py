"""Fallbacks: other models that may serve a request in place of its own (`fallbacks`)."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from lmetric.server.api.request import ParsedRequest

if TYPE_CHECKING:
    from lmetric.server.execution.trace import RequestTrace

CONTEXT = "context_length_exceeded"  # the code of OpenAI's error, and the reason of a fallback
# The messages of vLLM and SGLang for a prompt, an answer, or both, beyond `max_model_len`.
_TOO_LONG = re.compile(
    r"(maximum|model's) (context|model) length|(than|the) max_model_len|context_length_exceeded"
    r"|max_tokens must be at least 1, got 0"  # a prompt that leaves no room for an answer
)


class FallbackStep(NamedTuple):
    """A change to another model. ``reason``: why the model before did not serve the request."""

    model: str
    to: str
    reason: str


class Fallback:
    """The models that may serve a request, in order, and the changes so far.

    ``call``: the request. It is sent again with the name of the next model. ``trace``: of its
    attempts at the models before; None: it was sent to no engine, or has no trace.
    """

    __slots__ = ("call", "models", "steps", "trace")
    too_long = CONTEXT  # the code of an engine's error for which `is_too_long` is true

    def __init__(self, call: ParsedRequest, models: list[str]) -> None:
        self.call = call
        self.models = models
        self.steps: list[FallbackStep] = []
        self.trace: RequestTrace | None = None

    @staticmethod
    def is_too_long(words: str) -> bool:
        """Returns whether an engine's message says that a request is too long for its model."""
        return _TOO_LONG.search(words) is not None
