"""Budgets of a tenant: how many requests and tokens it may use in a period."""

from typing import Annotated, Literal, Self
from zoneinfo import ZoneInfo

from pydantic import AfterValidator, Field, model_validator

from lmetric.config.kinds import Strict


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
        Field(
            description="what the window counts: requests, input_tokens, uncached_input_tokens, "
            "output_tokens or total_tokens. A request reserves its prompt and max_tokens, and settles "
            "by the engine's usage",
            json_schema_extra={"when": "you add a budget"},
        )
    )
    limit: int = Field(
        ge=1,
        le=10**12,
        description="most that the tenant may use in a period; further requests get a 429",
        json_schema_extra={"when": "you add a budget"},
    )
    per: Literal["second", "minute", "hour", "day", "month"] = Field(
        description="length of the period: second, minute, hour, day or month; a rolling month has 30 days",
        json_schema_extra={"when": "you add a budget"},
    )
    time_zone: Annotated[str, AfterValidator(_zone)] | None = Field(
        None,
        description="time zone of calendar periods, e.g. Europe/Berlin; null: a rolling period, which ends "
        "now",
        json_schema_extra={"when": "the budget begins anew each day or month"},
    )
    cached_weight: float = Field(
        1.0,
        ge=0,
        le=1,
        description="weight of cached tokens; only with input_tokens and total_tokens",
        json_schema_extra={"when": "cached input is cheaper for the tenant"},
    )
    per_model: bool = Field(
        False,
        description="count each model for itself; false: all models together",
        json_schema_extra={"when": "the limit is for each model"},
    )
    per_key: bool = Field(
        False,
        description="count each API key for itself; false: all keys of the tenant together",
        json_schema_extra={"when": "a tenant has several keys"},
    )
    slo_class: str | None = Field(
        None,
        description="count only requests of this class (`admission.classes`), e.g. batch: with a lower limit "
        "than another budget, it leaves a part to other classes; null: all requests",
        json_schema_extra={"when": "batch must not take all of a budget"},
    )
    shadow: bool = Field(
        False,
        description="count, and refuse nothing; lmetric_tenant_budget_exceeded_total has the requests that a "
        "limit would refuse",
        json_schema_extra={"when": "you try a limit on real traffic"},
    )
    name: Annotated[str, Field(pattern="^[ -~]{1,64}$")] | None = Field(
        None,
        description="name in errors and metrics; default: such as `requests per minute`. A renamed budget "
        "begins at 0",
        json_schema_extra={"when": "two budgets of a tenant count the same"},
    )

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
