"""Predictor files: an ``.npz`` of plain arrays. Reading it runs no code from the file."""

from __future__ import annotations

import lzma
import os
import struct
import tokenize
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lmetric.file_errors import naming
from lmetric.lengths.network import ErrorTable, MlpPredictor
from lmetric.lengths.predictor import LengthPredictor, LengthsError, check_names

FORMAT = "lmetric-lengths-predictor"
VERSION = 1
STATES_FORMAT = "lmetric-hidden-states"
"""Of files that `lmetric_vllm.HiddenStatesConnector` writes and `train_lengths.collect` reads."""
MAX_BYTES = 1 << 30
"""A file that says it holds more is not read: 30 times the paper's network."""

_LAYERS = 64  # more in one file is a mistake
# The errors of zipfile and numpy for damaged files.
_DAMAGES = (
    zipfile.BadZipFile,
    zlib.error,
    lzma.LZMAError,
    struct.error,
    tokenize.TokenError,
    SyntaxError,
    RuntimeError,
    ValueError,
    TypeError,
    EOFError,
    LookupError,
    OverflowError,
    MemoryError,
)


def load_predictor(path: str | Path, *, feature_names: tuple[str, ...] | None = None) -> LengthPredictor:
    """A predictor from the ``.npz`` of `save_predictor` or the ``.onnx`` of
    `lmetric.lengths.onnx_file`.

    Args:
        feature_names: features of the caller; None: the features of its training.

    Raises:
        LengthsError: the file is invalid, or was trained on other features.
        OSError: the file cannot be read.
    """
    path = Path(path)
    if path.suffix == ".onnx":
        from lmetric.lengths.onnx_file import load_onnx

        return load_onnx(path, feature_names=feature_names)
    return load_npz(path, feature_names=feature_names)


def load_npz(path: str | Path, *, feature_names: tuple[str, ...] | None = None) -> MlpPredictor:
    """The predictor of an ``.npz``; see `load_predictor`."""
    path = Path(path)
    arrays = read_arrays(path)
    form = _text(path, arrays, "format")
    if form != FORMAT:
        raise LengthsError(f"{path}: format is {form!r}, wanted {FORMAT!r}")
    version = _number(path, arrays, "version")
    if version != VERSION:
        raise LengthsError(f"{path}: version {version:g}; this program reads version {VERSION}")
    names = names_in(path, arrays)
    try:
        made = MlpPredictor(
            feature_names=names,
            feature_mean=_floats(path, arrays, "feature_mean"),
            feature_scale=_floats(path, arrays, "feature_scale"),
            target_scale=_number(path, arrays, "target_scale"),
            weights=_layers(path, arrays, "weights"),
            biases=_layers(path, arrays, "biases"),
            errors=ErrorTable(
                _floats(path, arrays, "predicted_edges"),
                int(_number(path, arrays, "sigma_feature")),
                _floats(path, arrays, "feature_edges"),
                _floats(path, arrays, "sigma"),
            ),
            source=_text(path, arrays, "source"),
        )
    except LengthsError as error:
        raise error if str(error).startswith(str(path)) else LengthsError(f"{path}: {error}") from None
    check_names(str(path), names, feature_names)
    return made


def save_predictor(predictor: MlpPredictor, path: str | Path) -> None:
    """Write `predictor` as an ``.npz``: whole, or not at all."""
    write_arrays(
        Path(path),
        {
            "format": np.array(FORMAT),
            "version": np.array(VERSION),
            "source": np.array(predictor.source),
            "feature_names": np.array(predictor.feature_names),
            "feature_mean": predictor.feature_mean,
            "feature_scale": predictor.feature_scale,
            "target_scale": np.array(predictor.target_scale),
            "predicted_edges": predictor.errors.predicted_edges,
            "sigma_feature": np.array(predictor.errors.feature),
            "feature_edges": predictor.errors.feature_edges,
            "sigma": predictor.errors.sigma,
            **{f"weights_{index}": layer for index, layer in enumerate(predictor.weights)},
            **{f"biases_{index}": layer for index, layer in enumerate(predictor.biases)},
        },
    )


def read_arrays(path: Path, max_bytes: int = MAX_BYTES) -> dict[str, NDArray[Any]]:
    """All arrays of an ``.npz``. Raises `LengthsError` if it is invalid or larger than
    `max_bytes`."""
    try:
        with zipfile.ZipFile(path) as members:
            size = sum(member.file_size for member in members.infolist())
        if size > max_bytes:
            raise LengthsError(f"{path}: holds {size:,} bytes, at most {max_bytes:,} are read")
        with np.load(path, allow_pickle=False) as arrays:
            return {name: arrays[name] for name in arrays.files}
    except OSError as error:
        if error.filename is not None:  # of the file itself, not of an offset in it
            raise
        raise LengthsError(f"{path}: not an .npz of plain arrays: {error}") from None
    except _DAMAGES as error:
        raise LengthsError(f"{path}: not an .npz of plain arrays: {error}") from None


def write_arrays(path: Path, arrays: dict[str, NDArray[Any]]) -> None:
    """`arrays` as an ``.npz``, by way of a file beside it: a reader never sees half of one."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with naming(path), beside.open("wb") as file:
            np.savez(file, **arrays)  # type: ignore[arg-type]
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def array_in(path: Path, arrays: dict[str, NDArray[Any]], name: str) -> NDArray[Any]:
    """The array `name`. Raises `LengthsError` if it is missing."""
    if name not in arrays:
        raise LengthsError(
            f"{path}: the array {name!r} is missing; there are: {', '.join(sorted(arrays)) or 'none'}"
        )
    return arrays[name]


def names_in(path: Path, arrays: dict[str, NDArray[Any]]) -> tuple[str, ...]:
    """The feature names of a samples or predictor file."""
    names = array_in(path, arrays, "feature_names")
    if names.ndim != 1 or names.dtype.kind != "U":
        raise LengthsError(
            f"{path}: feature_names must be strings of shape (d,), got {names.dtype} {names.shape}"
        )
    return tuple(str(name) for name in names)


def _floats(path: Path, arrays: dict[str, NDArray[Any]], name: str) -> NDArray[np.float32]:
    array = array_in(path, arrays, name)
    if array.dtype.kind not in "fiu":
        raise LengthsError(f"{path}: {name} must be real numbers, got {array.dtype}")
    with np.errstate(over="ignore"):  # what is too large becomes infinite, and is refused as such
        return array.astype(np.float32)


def _layers(path: Path, arrays: dict[str, NDArray[Any]], name: str) -> tuple[NDArray[np.float32], ...]:
    count = sum(1 for index in range(_LAYERS) if f"{name}_{index}" in arrays)
    return tuple(_floats(path, arrays, f"{name}_{index}") for index in range(count))


def _number(path: Path, arrays: dict[str, NDArray[Any]], name: str) -> float:
    array = array_in(path, arrays, name)
    if array.shape != () or array.dtype.kind not in "fiu":
        raise LengthsError(f"{path}: {name} must be one number, got {array.dtype} of shape {array.shape}")
    return float(array)


def _text(path: Path, arrays: dict[str, NDArray[Any]], name: str) -> str:
    array = array_in(path, arrays, name)
    if array.shape != () or array.dtype.kind != "U":
        raise LengthsError(f"{path}: {name} must be one string, got {array.dtype} of shape {array.shape}")
    return str(array)
