"""Fits the step-time model to a running engine, with probes within a token budget."""

from lmetric_lab.calibrate.ask import EngineFacts
from lmetric_lab.calibrate.fit import Fit, Residual
from lmetric_lab.calibrate.plan import CalibrationError, Limits, Plan, make_plan
from lmetric_lab.calibrate.run import Calibration, Calibrator

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
