"""Advises how many engines a fleet needs, from recent records of its requests.

`Twin` keeps a fitted simulator. Each round it checks the fit on the last minutes of records,
forecasts the demand, and plays fleets of several sizes. The result is an `Advice`. `watch` does so
at an interval, and serves the results.
"""

from lmetric_lab.capacity.advice import Advice, Candidate, Cheapest, Wanted, advise
from lmetric_lab.capacity.budget import ErrorBudget
from lmetric_lab.capacity.demand import Forecast, forecast
from lmetric_lab.capacity.goals import EngineType, Question
from lmetric_lab.capacity.removal import Removal, removals
from lmetric_lab.capacity.twin import Twin
from lmetric_lab.slo import Goal, Objective

__all__ = [
    "Advice",
    "Candidate",
    "Cheapest",
    "EngineType",
    "ErrorBudget",
    "Forecast",
    "Goal",
    "Objective",
    "Question",
    "Removal",
    "Twin",
    "Wanted",
    "advise",
    "forecast",
    "removals",
]
