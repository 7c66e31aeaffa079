"""Errors of tokenizers."""

import traceback

from lmetric._core import LmetricError


class TokenizerError(LmetricError):
    """A model's folder is invalid. The message has the file and the reason."""


class NotPredictable(Exception):
    """The engine's tokens for a request cannot be predicted.

    ``reason`` is a label for counters: ``media``, ``no_template``, ``template`` (it failed, or came
    with the request), ``shape``, ``truncation``, ``history`` (only the engine has it), ``length``
    (too long to tokenize), ``tokenizer``.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


def unpredictable(error: Exception) -> NotPredictable:
    """Returns the reason why reading a prompt failed.

    A malformed request may fail the reader or a template in any way. The engine judges it.
    """
    return error if isinstance(error, NotPredictable) else NotPredictable("tokenizer", kind_and_place(error))


def kind_and_place(error: Exception) -> str:
    """Returns the kind and the place of an error. Its message may have a part of a prompt."""
    (frame,) = traceback.extract_tb(error.__traceback__, limit=-1)
    return f"{type(error).__name__} in {frame.name}, {frame.filename}:{frame.lineno}"


class NotAligned(Exception):
    """An engine's prompt is not the template's prompt with an image's tokens in its place."""
