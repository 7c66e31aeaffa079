"""STAR's predictor of remaining lengths: a small network on one vector of features, run by
NumPy."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lmetric.lengths.predictor import LengthsError, checked_features

PAPER_FEATURES = 3584
"""Width of the hidden states of DeepSeek-R1-Distill-Qwen-7B (STAR, section 4.2)."""

PAPER_HIDDEN = (2048, 512, 64)
"""Intermediate dimensions m1, m2, m3 of the paper's network (section 4.2)."""


@dataclass(frozen=True, slots=True)
class ErrorTable:
    """Mean absolute error of held-out requests, tokens, by predicted remaining tokens and by one
    feature.

    `sigma` has the shape (len(predicted_edges) + 1, len(feature_edges) + 1); a value equal to an
    edge belongs to the bucket above. `feature` is a column's index, or -1 if the table has only one
    column. The form is
    ours: the paper has no uncertainty.
    """

    predicted_edges: NDArray[np.float32]  # tokens, rising
    feature: int
    feature_edges: NDArray[np.float32]  # in the feature's unit, rising
    sigma: NDArray[np.float32]  # tokens

    def check(self, features: int) -> None:
        """Raise `LengthsError` if the parts are inconsistent, also with a network of `features`
        columns."""
        shape = (len(self.predicted_edges) + 1, len(self.feature_edges) + 1)
        if self.sigma.shape != shape:
            raise LengthsError(
                f"sigma must have the shape {shape} that its edges ask for, got {self.sigma.shape}"
            )
        if not (np.isfinite(self.sigma).all() and (self.sigma >= 0).all()):
            raise LengthsError("sigma must be finite and at least 0")
        for name, edges in (("predicted_edges", self.predicted_edges), ("feature_edges", self.feature_edges)):
            if not (np.isfinite(edges).all() and (np.diff(edges) > 0).all()):
                raise LengthsError(f"{name} must be finite and rise")
        if not -1 <= self.feature < features or (self.feature < 0 < len(self.feature_edges)):
            raise LengthsError(
                f"sigma_feature must be a column below {features}, or -1 without edges, got {self.feature}"
            )

    def of(self, remaining: NDArray[np.float32], features: NDArray[np.float32]) -> NDArray[np.float32]:
        """Sigma, shape (n,), of predictions `remaining`, shape (n,), made from `features`, shape
        (n, d)."""
        rows = np.searchsorted(self.predicted_edges, remaining, side="right")
        columns = (
            0 if self.feature < 0 else np.searchsorted(self.feature_edges, features[:, self.feature], "right")
        )
        sigma: NDArray[np.float32] = self.sigma[rows, columns]
        return sigma


def error_table(
    remaining: NDArray[np.float32],
    errors: NDArray[np.float32],
    features: NDArray[np.float32],
    *,
    feature: int = -1,
    rows: int = 8,
    columns: int = 4,
    at_least: int = 50,
) -> ErrorTable:
    """The table of absolute `errors`, shape (n,), tokens, that predictions `remaining` had.

    Edges are quantiles, so that buckets hold about as many samples each. A bucket with fewer than
    `at_least` samples has the error of its row, or of all samples if the row has too few, too.
    """
    edges = _quantile_edges(remaining, rows)
    feature_edges = np.empty(0, np.float32) if feature < 0 else _quantile_edges(features[:, feature], columns)
    row = np.searchsorted(edges, remaining, side="right")
    column = (
        np.zeros(len(row), np.int64)
        if feature < 0
        else np.searchsorted(feature_edges, features[:, feature], side="right")
    )
    sigma = np.full((len(edges) + 1, len(feature_edges) + 1), np.mean(errors), dtype=np.float32)
    for r in range(sigma.shape[0]):
        in_row = row == r
        if np.count_nonzero(in_row) >= at_least:
            sigma[r] = np.mean(errors[in_row])
        for c in range(sigma.shape[1]):
            here = in_row & (column == c)
            if np.count_nonzero(here) >= at_least:
                sigma[r, c] = np.mean(errors[here])
    return ErrorTable(edges, feature, feature_edges, sigma)


def _quantile_edges(values: NDArray[np.float32], buckets: int) -> NDArray[np.float32]:
    return np.unique(np.quantile(values, np.arange(1, buckets) / buckets).astype(np.float32))


@dataclass(frozen=True, slots=True)
class MlpPredictor:
    """y = w4 relu(W3 relu(W2 relu(W1 h))) (STAR, Eq. 2), for any number of layers; see
    `LengthPredictor`.

    h is ``(features - feature_mean) / feature_scale``, and tokens are ``y * target_scale``, never
    below 0; the paper does not mention scaling. `weights[i]` has the shape (outputs, inputs) as the
    paper writes W, the last one (1, m). `biases` is empty, as in Eq. 2, or has one vector of shape
    (outputs,) a layer. Without biases the network is homogeneous: it returns 0 at the mean of the
    training's features. Raises `LengthsError` for inconsistent arrays.
    """

    feature_names: tuple[str, ...]
    feature_mean: NDArray[np.float32]  # shape (d,)
    feature_scale: NDArray[np.float32]  # shape (d,), above 0
    target_scale: float  # tokens
    weights: tuple[NDArray[np.float32], ...]
    biases: tuple[NDArray[np.float32], ...]
    errors: ErrorTable
    source: str  # what it was trained on, for people

    def __post_init__(self) -> None:
        d = len(self.feature_names)
        if not d or len(set(self.feature_names)) != d:
            raise LengthsError("feature_names must be at least one name, none twice")
        for name, column in (("feature_mean", self.feature_mean), ("feature_scale", self.feature_scale)):
            if column.shape != (d,):
                raise LengthsError(f"{name} must have the shape ({d},) of feature_names, got {column.shape}")
            if not np.isfinite(column).all():
                raise LengthsError(f"{name} must be finite")
        if not (self.feature_scale > 0).all():
            raise LengthsError("feature_scale must be above 0")
        if not (np.isfinite(self.target_scale) and self.target_scale > 0):
            raise LengthsError(f"target_scale must be above 0, got {self.target_scale:g}")
        self._check_layers(d)
        self.errors.check(d)

    def _check_layers(self, inputs: int) -> None:
        if not self.weights:
            raise LengthsError("there must be at least one layer: weights_0 is missing")
        if len(self.biases) not in (0, len(self.weights)):
            raise LengthsError(
                f"{len(self.weights)} layers need as many biases, or none, got {len(self.biases)}"
            )
        for index, weights in enumerate(self.weights):
            outputs = f"1, {inputs}" if index == len(self.weights) - 1 else f"any, {inputs}"
            last = index == len(self.weights) - 1
            if weights.ndim != 2 or weights.shape[1] != inputs or (last and weights.shape[0] != 1):
                raise LengthsError(f"weights_{index} must have the shape ({outputs}), got {weights.shape}")
            inputs = weights.shape[0]
            if self.biases and self.biases[index].shape != (inputs,):
                raise LengthsError(
                    f"biases_{index} must have the shape ({inputs},), got {self.biases[index].shape}"
                )
        for name, layers in (("weights", self.weights), ("biases", self.biases)):
            for index, layer in enumerate(layers):
                if not np.isfinite(layer).all():
                    raise LengthsError(f"{name}_{index} must be finite")

    @property
    def parameters(self) -> int:
        """Trained numbers: 8.4 million at the paper's dimensions (Table 1)."""
        return sum(layer.size for layer in (*self.weights, *self.biases))

    def predict(self, features: NDArray[Any]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """See `LengthPredictor.predict`."""
        values = checked_features(features, self.feature_names)
        remaining = self._remaining(values)
        return remaining, self.errors.of(remaining, values)

    def _remaining(self, values: NDArray[np.float32]) -> NDArray[np.float32]:
        hidden = (values - self.feature_mean) / self.feature_scale
        for index, weights in enumerate(self.weights):
            if index:
                hidden = np.maximum(hidden, 0)
            hidden = hidden @ weights.T
            if self.biases:
                hidden = hidden + self.biases[index]
        tokens: NDArray[np.float32] = np.maximum(hidden[:, 0] * np.float32(self.target_scale), 0)
        return tokens


def layer_shapes(features: int, hidden: tuple[int, ...]) -> list[tuple[int, int]]:
    """Shapes (outputs, inputs) of the layers of a network d - hidden - 1."""
    return [(outputs, inputs) for inputs, outputs in pairwise((features, *hidden, 1))]
