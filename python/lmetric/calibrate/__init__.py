"""Fits the step-time model to a running engine, with probes within a token budget."""

from lmetric.calibrate.ask import EngineFacts
from lmetric.calibrate.fit import Fit, Residual
from lmetric.calibrate.plan import CalibrationError, Limits, Plan, make_plan
from lmetric.calibrate.run import Calibration, Calibrator

__all__ = [
    "Calibration",
    "CalibrationError",
    "Calibrator",
    "EngineFacts",
    "Fit",
    "Limits",
    "Plan",
    "Residual",
    "make_plan",
]
