"""Tests of engine features with real requests: the verdicts of ``lmetric-router doctor``."""

from lmetric.doctor.run import Examination, examine
from lmetric.doctor.subject import Target
from lmetric.doctor.verdict import CHECKS, Level, Outcome, Verdict

__all__ = ["CHECKS", "Examination", "Level", "Outcome", "Target", "Verdict", "examine"]
