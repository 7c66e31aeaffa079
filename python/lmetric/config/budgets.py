"""Budgets of a tenant: how many requests and tokens it may use in a period."""

from typing import Annotated, Literal, Self
from zoneinfo import ZoneInfo

from pydantic import AfterValidator, Field, model_validator

from lmetric.config.kinds import Strict, setting


def _zone(name: str) -> str:
    try:
        ZoneInfo(name)
    except (ValueError, OSError, KeyError):  # ZoneInfoNotFoundError is a KeyError
        raise ValueError(
            f"unknown time zone {name!r}; expected a name such as Europe/Berlin or UTC"
        ) from None
    return name


class BudgetConfig(Strict):
    """A window in which a tenant may use a number of requests or tokens."""

    counts: Literal["requests", "input_tokens", "output_tokens", "total_tokens", "uncached_input_tokens"] = (
        setting(when="you add a budget")
    )
    """what the window counts: requests, input_tokens, uncached_input_tokens, output_tokens or
    total_tokens. A request reserves its prompt and max_tokens, and settles by the engine's usage"""
    limit: int = setting(ge=1, le=10**12, when="you add a budget")
    """most that the tenant may use in a period; further requests get a 429"""
    per: Literal["second", "minute", "hour", "day", "month"] = setting(when="you add a budget")
    """length of the period: second, minute, hour, day or month; a rolling month has 30 days"""
    time_zone: Annotated[str, AfterValidator(_zone)] | None = setting(
        None, when="the budget begins anew each day or month"
    )
    """time zone of calendar periods, e.g. Europe/Berlin; null: a rolling period, which ends now"""
    cached_weight: float = setting(1.0, ge=0, le=1, when="cached input is cheaper for the tenant")
    """weight of cached tokens; only with input_tokens and total_tokens"""
    per_model: bool = setting(False, when="the limit is for each model")
    """count each model for itself; false: all models together"""
    per_key: bool = setting(False, when="a tenant has several keys")
    """count each API key for itself; false: all keys of the tenant together"""
    slo_class: str | None = setting(None, when="batch must not take all of a budget")
    """count only requests of this class (`admission.classes`), e.g. batch: with a lower limit than
    another budget, it leaves a part to other classes; null: all requests"""
    shadow: bool = setting(False, when="you try a limit on real traffic")
    """count, and refuse nothing; lmetric_tenant_budget_exceeded_total has the requests that a limit
    would refuse"""
    name: Annotated[str, Field(pattern="^[ -~]{1,64}$")] | None = setting(
        None, when="two budgets of a tenant count the same"
    )
    """name in errors and metrics; default: such as `requests per minute`. A renamed budget begins
    at 0"""

    @property
    def label(self) -> str:
        """The name of the window."""
        only = "" if self.slo_class is None else f" ({self.slo_class})"
        return self.name or f"{self.counts} per {self.per}{only}"

    @model_validator(mode="after")
    def _weighted(self) -> Self:
        if self.cached_weight != 1 and self.counts not in ("input_tokens", "total_tokens"):
            raise ValueError(
                f"cached_weight: {self.counts} has no weight; expected counts: input_tokens or total_tokens"
            )
        return self


def distinct(budgets: list[BudgetConfig]) -> list[BudgetConfig]:
    """Returns the budgets of a tenant. Raises ValueError if two have one name."""
    names: set[str] = set()
    for budget in budgets:
        if budget.label in names:
            raise ValueError(f"two budgets are named {budget.label!r}; give one of them another `name`")
        names.add(budget.label)
    return budgets
