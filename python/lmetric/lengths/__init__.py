"""Predictors of the remaining tokens of running requests (STAR, section 4)."""

from lmetric.lengths.files import load_npz, load_predictor, save_predictor
from lmetric.lengths.forecast import ForecastFunction, forecast_function, resolve_forecast
from lmetric.lengths.network import PAPER_FEATURES, PAPER_HIDDEN, ErrorTable, MlpPredictor, error_table
from lmetric.lengths.onnx_file import OnnxPredictor, load_onnx, write_onnx
from lmetric.lengths.predictor import LengthPredictor, LengthsError
from lmetric.lengths.samples import Samples, Split, load_samples, save_samples, split_by_request

__all__ = [
    "PAPER_FEATURES",
    "PAPER_HIDDEN",
    "ErrorTable",
    "ForecastFunction",
    "LengthPredictor",
    "LengthsError",
    "MlpPredictor",
    "OnnxPredictor",
    "Samples",
    "Split",
    "error_table",
    "forecast_function",
    "load_npz",
    "load_onnx",
    "load_predictor",
    "load_samples",
    "resolve_forecast",
    "save_predictor",
    "save_samples",
    "split_by_request",
    "write_onnx",
]
