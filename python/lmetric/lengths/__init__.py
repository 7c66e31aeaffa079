"""Predictors of the remaining tokens of running requests (STAR, section 4)."""

from lmetric.lengths.files import load_npz, load_predictor, save_predictor
from lmetric.lengths.forecast import ForecastFunction, forecast_function, resolve_forecast
from lmetric.lengths.network import PAPER_FEATURES, PAPER_HIDDEN, ErrorTable, MlpPredictor, error_table
from lmetric.lengths.onnx_file import OnnxPredictor, load_onnx, write_onnx
from lmetric.lengths.predictor import LengthPredictor, LengthsError

__all__ = [
    "PAPER_FEATURES",
    "PAPER_HIDDEN",
    "ErrorTable",
    "ForecastFunction",
    "LengthPredictor",
    "LengthsError",
    "MlpPredictor",
    "OnnxPredictor",
    "error_table",
    "forecast_function",
    "load_npz",
    "load_onnx",
    "load_predictor",
    "resolve_forecast",
    "save_predictor",
    "write_onnx",
]
