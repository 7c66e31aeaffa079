"""Errors of tokenizers."""

from lmetric._core import LmetricError


class TokenizerError(LmetricError):
    """A model's folder is invalid. The message has the file and the reason."""


class NotPredictable(Exception):
    """The engine's tokens for a request cannot be predicted.

    ``reason`` is a label for counters: ``media``, ``no_template``, ``template`` (it failed, or came
    with the request), ``shape``, ``truncation``, ``history`` (only the engine has it),
    ``tokenizer``.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class NotAligned(Exception):
    """An engine's prompt is not the template's prompt with an image's tokens in its place."""
