"""Replays records of real requests in the simulator, to compare policies.

`recording_of` makes a trace of records, `fit_engine` fits a profile to them, `check_fit` simulates
the policy that really ran and compares the results, and `compare` simulates other policies.
"""

from lmetric_lab.whatif.check import FitCheck, Limits, check_fit
from lmetric_lab.whatif.compare import Place, compare, places
from lmetric_lab.whatif.fit import EngineFit, fit_engine
from lmetric_lab.whatif.recording import Recording, WhatIfError, recording_of

__all__ = [
    "EngineFit",
    "FitCheck",
    "Limits",
    "Place",
    "Recording",
    "WhatIfError",
    "check_fit",
    "compare",
    "fit_engine",
    "places",
    "recording_of",
]
