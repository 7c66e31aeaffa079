"""Forecasts of remaining lengths for rebalancing: a trained predictor from a file, or a Python
function."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any, final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lmetric import plugins
from lmetric._core import BadValueError
from lmetric.lengths.predictor import LengthsError

SUFFIXES = (".npz", ".onnx")
"""Extensions of predictor files."""


@final
class ForecastFunction:
    """A Python function as a `LengthPredictor`, created by `forecast_function`."""

    __slots__ = ("feature_names", "fn", "name")

    def __init__(self, fn: Callable[..., Any], feature_names: tuple[str, ...], name: str) -> None:
        self.fn, self.feature_names, self.name = fn, feature_names, name

    def predict(self, features: NDArray[Any]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """See `LengthPredictor.predict`. The router checks the numbers."""
        told = self.fn(*np.asarray(features, np.float64).T)
        remaining, sigma = told if isinstance(told, tuple) else (told, 0.0)
        n = len(features)
        return (np.asarray(remaining, np.float64), np.broadcast_to(np.asarray(sigma, np.float64), n))

    def __repr__(self) -> str:
        return f"forecast_function({self.name}, features={list(self.feature_names)!r})"


def forecast_function(
    fn: Callable[..., ArrayLike | tuple[ArrayLike, ArrayLike]],
    features: Iterable[str] | None = None,
    *,
    name: str | None = None,
) -> ForecastFunction:
    """A forecast from a function that predicts the remaining tokens of running requests.

    The function gets one float64 array of shape (n,) per feature, in order. It returns the
    remaining tokens, shape (n,), or a pair of these and their mean absolute errors. It is called
    once per ``repredict_tokens`` generated tokens of a request. It must not keep the arrays.

    Args:
        features: feature names (docs/how-to/deploying.md lists them); None: names of the function's
            parameters.

    Raises:
        BadValueError: the function has no parameters with names of features.

    >>> forecast_function(lambda generated_tokens: 500 - generated_tokens, name="half_a_page")
    forecast_function(half_a_page, features=['generated_tokens'])
    """
    name = str(name or getattr(fn, "__name__", "forecast"))
    if features is None:
        parameters = inspect.signature(fn).parameters.values()
        features = [each.name for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD]
    names = tuple(features)
    if not names:
        raise BadValueError(f"forecast {name}: no features; expected names, or parameters named as features")
    return ForecastFunction(fn, names, name)


def resolve_forecast(forecast: object) -> object:
    """Converts a forecast to a name or predictor for the router.

    Accepts names, predictors, paths of predictor files, references (``file.py:name``,
    ``package.module:name``) and functions.

    Raises:
        BadValueError: an invalid reference, with the reason.
        LengthsError: an invalid file, with the reason.
    """
    if isinstance(forecast, str):
        if forecast.endswith(SUFFIXES):
            return _loaded(forecast)
        if not plugins.is_reference(forecast):
            return forecast
        forecast = plugins.load_object(forecast)
    return forecast_function(forecast) if inspect.isroutine(forecast) else forecast


def _loaded(path: str) -> object:
    from lmetric.lengths.files import load_predictor

    try:
        return load_predictor(path)
    except OSError as error:
        raise LengthsError(f"forecast: {path} cannot be read: {error.strerror or error}") from None
