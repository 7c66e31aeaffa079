"""Predictors as ``.onnx`` files, for other runtimes and other models than an MLP.

Needs the extra ``onnx``. The graph has the input ``features``, float32 of shape (n,
d), which it normalizes itself. The output is ``remaining``, float32 of shape (n,), tokens. The
metadata key `METADATA` has names and errors as JSON.
"""

from __future__ import annotations

import json
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lmetric.extras import install
from lmetric.file_errors import naming
from lmetric.lengths.network import ErrorTable, MlpPredictor
from lmetric.lengths.predictor import LengthsError, check_names, checked_features

METADATA = "lmetric_lengths"
VERSION = 1
_OPSET = 17


class OnnxPredictor:
    """A `LengthPredictor` that onnxruntime runs."""

    def __init__(self, session: Any, feature_names: tuple[str, ...], errors: ErrorTable, source: str) -> None:
        self._session = session
        self.feature_names = feature_names
        self.errors = errors
        self.source = source

    def predict(self, features: NDArray[Any]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """See `LengthPredictor.predict`."""
        values = checked_features(features, self.feature_names)
        (out,) = self._session.run(["remaining"], {"features": values})
        if out.shape != (len(values),):
            raise LengthsError(
                f"the graph's 'remaining' must have the shape ({len(values)},), got {out.shape}"
            )
        remaining: NDArray[np.float32] = np.maximum(np.asarray(out, dtype=np.float32), 0)
        return remaining, self.errors.of(remaining, values)


def load_onnx(
    path: str | Path, *, feature_names: tuple[str, ...] | None = None, threads: int = 0
) -> OnnxPredictor:
    """The predictor of an ``.onnx`` with our metadata; `threads` 0: default of onnxruntime.

    Raises `LengthsError` if onnxruntime is missing or the file is invalid, `OSError` if it cannot
    be read.
    """
    if find_spec("onnxruntime") is None:
        raise LengthsError(f"{path}: needs onnxruntime; run: {install('onnx')}, or use the .npz")
    import onnxruntime

    with Path(path).open("rb"):
        pass  # onnxruntime's own error does not tell a missing file from a bad one
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 4
    try:
        session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime's errors share no base of their own
        raise LengthsError(f"{path}: onnxruntime cannot use it: {' '.join(str(error).split())}") from None
    names, errors, source = _metadata(path, session.get_modelmeta().custom_metadata_map)
    _check_ports(path, session, len(names))
    check_names(str(path), names, feature_names)
    return OnnxPredictor(session, names, errors, source)


def _metadata(path: str | Path, found: dict[str, str]) -> tuple[tuple[str, ...], ErrorTable, str]:
    if METADATA not in found:
        raise LengthsError(
            f"{path}: no metadata {METADATA!r} in it; write it with lmetric.lengths.write_onnx"
        )
    try:
        said = json.loads(found[METADATA])
        if said["version"] != VERSION:
            raise LengthsError(f"{path}: version {said['version']}; this program reads version {VERSION}")
        names = tuple(str(name) for name in said["feature_names"])
        errors = ErrorTable(
            np.array(said["predicted_edges"], np.float32),
            int(said["sigma_feature"]),
            np.array(said["feature_edges"], np.float32),
            np.array(said["sigma"], np.float32),
        )
        source = str(said["source"])
    except (KeyError, TypeError, ValueError) as error:
        raise LengthsError(f"{path}: metadata {METADATA!r}: {type(error).__name__}: {error}") from None
    try:
        errors.check(len(names))
    except LengthsError as error:
        raise LengthsError(f"{path}: {error}") from None
    return names, errors, source


def _check_ports(path: str | Path, session: Any, features: int) -> None:
    inputs = {port.name: port for port in session.get_inputs()}
    outputs = [port.name for port in session.get_outputs()]
    if list(inputs) != ["features"] or "remaining" not in outputs:
        raise LengthsError(
            f"{path}: the graph must take 'features' and give 'remaining', "
            f"it takes {list(inputs)} and gives {outputs}"
        )
    shape, kind = inputs["features"].shape, inputs["features"].type
    if kind != "tensor(float)" or len(shape) != 2 or (isinstance(shape[1], int) and shape[1] != features):
        raise LengthsError(
            f"{path}: 'features' must be tensor(float) of shape (n, {features}), got {kind} {shape}"
        )


def need_onnx() -> None:
    """Raises `LengthsError` if ``.onnx`` files cannot be written, before a training."""
    if find_spec("onnx") is None:
        raise LengthsError(f"writing .onnx needs the package onnx; run: {install('onnx')}")


def write_onnx(predictor: MlpPredictor, path: str | Path) -> None:
    """Write `predictor` as an ``.onnx`` that `load_onnx` reads; `LengthsError` where onnx is
    missing."""
    need_onnx()
    from onnx import TensorProto, checker, helper, numpy_helper

    constants = {
        "mean": predictor.feature_mean,
        "scale": predictor.feature_scale,
        "target_scale": np.array(predictor.target_scale, np.float32),
        "zero": np.array(0, np.float32),
        "flat": np.array([-1], np.int64),
    }
    nodes = [
        helper.make_node("Sub", ["features", "mean"], ["centred"]),
        helper.make_node("Div", ["centred", "scale"], ["hidden_0"]),
    ]
    for index, weights in enumerate(predictor.weights):
        value = f"hidden_{index}"
        if index:
            nodes.append(helper.make_node("Relu", [value], [f"relu_{index}"]))
            value = f"relu_{index}"
        constants[f"weights_{index}"] = weights
        inputs = [value, f"weights_{index}"]
        if predictor.biases:
            constants[f"biases_{index}"] = predictor.biases[index]
            inputs.append(f"biases_{index}")
        nodes.append(helper.make_node("Gemm", inputs, [f"hidden_{index + 1}"], transB=1))
    nodes += [
        helper.make_node("Mul", [f"hidden_{len(predictor.weights)}", "target_scale"], ["tokens"]),
        helper.make_node("Max", ["tokens", "zero"], ["bounded"]),
        helper.make_node("Reshape", ["bounded", "flat"], ["remaining"]),
    ]
    graph = helper.make_graph(
        nodes,
        "remaining_tokens",
        [helper.make_tensor_value_info("features", TensorProto.FLOAT, ["n", len(predictor.feature_names)])],
        [helper.make_tensor_value_info("remaining", TensorProto.FLOAT, ["n"])],
        [numpy_helper.from_array(np.ascontiguousarray(value), name) for name, value in constants.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", _OPSET)], ir_version=8)
    errors = predictor.errors
    metadata = {
        "version": VERSION,
        "feature_names": predictor.feature_names,
        "predicted_edges": errors.predicted_edges.tolist(),
        "sigma_feature": errors.feature,
        "feature_edges": errors.feature_edges.tolist(),
        "sigma": errors.sigma.tolist(),
        "source": predictor.source,
    }
    helper.set_model_props(model, {METADATA: json.dumps(metadata)})
    checker.check_model(model)
    path = Path(path)
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with naming(path):
            beside.write_bytes(model.SerializeToString())
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
