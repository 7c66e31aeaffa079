"""Training samples of predictors: rows of features, and the remaining tokens."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lmetric.lengths.files import array_in, names_in, read_arrays, write_arrays
from lmetric.lengths.predictor import LengthsError, checked_features

SHARES = (0.70, 0.15, 0.15)
"""Shares of requests for training, validation and test (STAR, section 4.4)."""

MAX_SAMPLE_BYTES = 8 << 30
"""A samples file that says it holds more is not read; the paper's 100,000 hidden states take 1.4
GB."""


@dataclass(frozen=True, slots=True)
class Samples:
    """States of requests, one row per sample. Raises `LengthsError` for inconsistent columns.

    Features are columns from a trace, or the hidden state of the last token (STAR, section 4.2).
    Columns of a hidden state have the names ``h0``, ``h1``, ...
    """

    features: NDArray[np.float32]  # shape (n, d), finite
    remaining: NDArray[np.float32]  # shape (n,), remaining tokens, at least 0
    request_ids: NDArray[np.int64]  # shape (n,), equal for samples of one request
    feature_names: tuple[str, ...]
    source: str = ""  # origin, for people

    def __post_init__(self) -> None:
        n = len(self.features)
        checked_features(self.features, self.feature_names)
        for name, column in (("remaining", self.remaining), ("request_ids", self.request_ids)):
            if column.shape != (n,):
                raise LengthsError(f"{name} must have the shape ({n},) of features' rows, got {column.shape}")
        bad = ~(np.isfinite(self.remaining) & (self.remaining >= 0))
        if bad.any():
            row = int(np.flatnonzero(bad)[0])
            raise LengthsError(f"remaining: row {row}: {self.remaining[row]:g} is not a finite number from 0")

    def __len__(self) -> int:
        return len(self.features)

    def at(self, rows: NDArray[np.int64]) -> Samples:
        """The samples in these rows."""
        return Samples(
            self.features[rows], self.remaining[rows], self.request_ids[rows], self.feature_names, self.source
        )

    def column(self, name: str) -> NDArray[np.float32]:
        """The feature of this name, shape (n,). Raises `LengthsError` if it is missing."""
        if name not in self.feature_names:
            raise LengthsError(f"no feature {name!r}; there are: {', '.join(self.feature_names[:16])}")
        return self.features[:, self.feature_names.index(name)]


class Split(NamedTuple):
    """Row numbers of the three parts; no request is in two of them."""

    train: NDArray[np.int64]
    validation: NDArray[np.int64]
    test: NDArray[np.int64]


def split_by_request(request_ids: NDArray[np.int64], seed: int) -> Split:
    """A random 70/15/15 split of *requests* (STAR, section 4.4); the same seed gives the same
    parts.

    Raises `LengthsError` if a part would have no request.
    """
    requests = np.unique(request_ids)
    first, second = (round(share * len(requests)) for share in (SHARES[0], SHARES[0] + SHARES[1]))
    if not 0 < first < second < len(requests):
        raise LengthsError(
            f"samples of {len(requests)} requests: a split into 70%, 15% and 15% wants at least 4 requests"
        )
    mixed = np.random.default_rng(seed).permutation(requests)
    parts = (mixed[:first], mixed[first:second], mixed[second:])
    return Split(*(np.flatnonzero(np.isin(request_ids, part)) for part in parts))


def load_samples(path: str | Path) -> Samples:
    """Samples from an ``.npz`` with the arrays features, remaining, request_ids, feature_names (and
    source).

    Raises `LengthsError` for other files, `OSError` if the file cannot be read.
    """
    path = Path(path)
    arrays = read_arrays(path, MAX_SAMPLE_BYTES)
    source = arrays.get("source")
    try:
        return Samples(
            _numbers(path, arrays, "features", np.float32),
            _numbers(path, arrays, "remaining", np.float32),
            _numbers(path, arrays, "request_ids", np.int64),
            names_in(path, arrays),
            path.name if source is None else str(source),
        )
    except LengthsError as error:
        raise error if str(error).startswith(str(path)) else LengthsError(f"{path}: {error}") from None


def save_samples(samples: Samples, path: str | Path) -> None:
    """Write `samples` as an ``.npz`` for `load_samples`: whole, or not at all."""
    write_arrays(
        Path(path),
        {
            "features": samples.features,
            "remaining": samples.remaining,
            "request_ids": samples.request_ids,
            "feature_names": np.array(samples.feature_names),
            "source": np.array(samples.source),
        },
    )


def _numbers(path: Path, arrays: dict[str, NDArray[Any]], name: str, kind: type) -> NDArray[Any]:
    array = array_in(path, arrays, name)
    wanted = "iu" if kind is np.int64 else "fiu"
    if array.dtype.kind not in wanted:
        raise LengthsError(
            f"{path}: {name} must be {'whole' if wanted == 'iu' else 'real'} numbers, got {array.dtype}"
        )
    with np.errstate(over="ignore"):  # what is too large becomes infinite, and is refused as such
        return array.astype(kind)
