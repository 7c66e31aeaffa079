"""The interface of predictors of remaining output lengths, and their error."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from lmetric._core import LmetricError


class LengthsError(LmetricError):
    """Invalid samples or predictor. The message has the place, the problem and what was
    expected."""


class LengthPredictor(Protocol):
    """Predicts the remaining tokens of running requests (STAR, section 4.2, Eq. 1).

    Predictions are repeated while a request runs (section 4.3), every 20 generated tokens in Table
    4.
    """

    @property
    def feature_names(self) -> tuple[str, ...]:
        """The columns that `predict` expects, in their order."""
        ...

    def predict(self, features: NDArray[Any]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Remaining tokens of n requests, and how far off that may be.

        Args:
            features: shape (n, d), one row a request, one column for each of `feature_names`;
                finite.

        Returns:
            ``remaining``, shape (n,), tokens, at least 0; ``sigma``, shape (n,), tokens: the mean
            absolute error that requests held out of the training had where the prediction was
            alike.

        Raises:
            LengthsError: `features` has another shape, or holds what is not a finite number.
        """
        ...


def checked_features(features: NDArray[Any], names: tuple[str, ...]) -> NDArray[np.float32]:
    """`features` as float32 of shape (n, d) with d names. Raises `LengthsError` for other
    shapes."""
    try:
        values = np.asarray(features, dtype=np.float32)
    except (TypeError, ValueError) as error:
        raise LengthsError(f"features must be numbers of shape (n, {len(names)}): {error}") from None
    if values.ndim != 2 or values.shape[1] != len(names):
        raise LengthsError(
            f"features must have the shape (n, {len(names)}), got {values.shape}; columns: {some(names)}"
        )
    finite = np.isfinite(values)
    if not finite.all():
        row, column = (int(index) for index in np.argwhere(~finite)[0])
        raise LengthsError(f"features: row {row}, {names[column]}: not a finite number (in 32 bits)")
    return values


def check_names(path: str, found: tuple[str, ...], wanted: tuple[str, ...] | None) -> None:
    """`LengthsError` where a file was trained on other features than `wanted` (None: any will
    do)."""
    if wanted is None or found == wanted:
        return
    if len(found) != len(wanted):
        raise LengthsError(f"{path}: trained on {len(found)} features, wanted {len(wanted)}: {some(wanted)}")
    at = next(index for index, (a, b) in enumerate(zip(found, wanted, strict=True)) if a != b)
    raise LengthsError(f"{path}: feature {at} is {found[at]!r}, wanted {wanted[at]!r}")


def some(names: tuple[str, ...], most: int = 8) -> str:
    """The first names; hidden states have thousands."""
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown}, ... ({len(names)} in all)"
