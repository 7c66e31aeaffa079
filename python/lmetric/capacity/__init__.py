"""Advises how many engines a fleet needs, from recent records of its requests.

`Twin` keeps a fitted simulator. Each round it checks the fit on the last minutes of records,
forecasts the demand, and plays fleets of several sizes. The result is an `Advice`.
"""

from lmetric.capacity.advice import Advice, Candidate, Cheapest, Wanted, advise
from lmetric.capacity.budget import ErrorBudget
from lmetric.capacity.demand import Forecast, forecast
from lmetric.capacity.goals import EngineType, Question
from lmetric.capacity.removal import Removal, removals
from lmetric.capacity.twin import Twin
from lmetric.slo import Goal, Objective

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
