"""lmetric: the request router for fleets of LLM engines.

The names below are imported when first used, so that `lmetric-router --help` does not wait for them.
"""

from difflib import get_close_matches
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lmetric._core import (
        BadValueError,
        Decision,
        ExpressionError,
        LmetricError,
        NoInstanceError,
        PolicyError,
        Router,
        Ticket,
        TicketError,
        UnknownNameError,
        check_expression,
        indicator_table,
        policy_table,
    )
    from lmetric.expr import (
        BOUND_BS,
        BOUND_TOKENS,
        BS,
        CACHE_FREE_TOKENS,
        DECODE_BS,
        DECODE_PRESSURE,
        DECODE_PRESSURE_KNOWN,
        DECODE_TOKENS,
        DECODE_TOKENS_PER_SECOND,
        EXPECTED_OUTPUT_TOKENS,
        HANDOFF_ARRIVED_TOKENS,
        HANDOFF_ARRIVED_TOKENS_FOR_CERTAIN,
        HANDOFF_COMING_TOKENS,
        HANDOFF_RUNNING_TOKENS,
        HANDOFF_SECONDS,
        HIT_TOKENS,
        INDEX_BLOCKS,
        INSTANCES,
        KV_HIT,
        KV_USAGE,
        NEW_TOKENS,
        P_TOKEN,
        PREDICTED_TPOT_SECONDS,
        PREDICTED_TTFT_SECONDS,
        PREFILL_RELATIVE_ERROR,
        PREFILL_TOKENS_PER_SECOND,
        PROMPT_TOKENS,
        PULL_COST_TOKENS,
        PULL_TOKENS,
        PULLS,
        Q_BS,
        QUEUED_PREFILL_TOKENS,
        R_BS,
        REMAINING_TOKENS,
        REPORT_AGE_SECONDS,
        REPORTED_RUNNING,
        REPORTED_WAITING,
        STEP_RELATIVE_ERROR,
        STEP_SECONDS,
        TOKENS,
        WINDOW_OUTPUT_TOKENS,
        WINDOW_PREFILL_TOKENS,
        Expr,
        abs,
        clip,
        evaluate,
        exp,
        knob,
        log,
        max,
        maximum,
        mean,
        min,
        minimum,
        norm,
        sqrt,
        std,
        where,
    )
    from lmetric.policies import Policy, PolicyFunction, policy_function
    from lmetric.sim.run import Run, simulate

__all__ = [
    "BOUND_BS",
    "BOUND_TOKENS",
    "BS",
    "CACHE_FREE_TOKENS",
    "DECODE_BS",
    "DECODE_PRESSURE",
    "DECODE_PRESSURE_KNOWN",
    "DECODE_TOKENS",
    "DECODE_TOKENS_PER_SECOND",
    "EXPECTED_OUTPUT_TOKENS",
    "HANDOFF_ARRIVED_TOKENS",
    "HANDOFF_ARRIVED_TOKENS_FOR_CERTAIN",
    "HANDOFF_COMING_TOKENS",
    "HANDOFF_RUNNING_TOKENS",
    "HANDOFF_SECONDS",
    "HIT_TOKENS",
    "INDEX_BLOCKS",
    "INSTANCES",
    "KV_HIT",
    "KV_USAGE",
    "NEW_TOKENS",
    "PREDICTED_TPOT_SECONDS",
    "PREDICTED_TTFT_SECONDS",
    "PREFILL_RELATIVE_ERROR",
    "PREFILL_TOKENS_PER_SECOND",
    "PROMPT_TOKENS",
    "PULLS",
    "PULL_COST_TOKENS",
    "PULL_TOKENS",
    "P_TOKEN",
    "QUEUED_PREFILL_TOKENS",
    "Q_BS",
    "REMAINING_TOKENS",
    "REPORTED_RUNNING",
    "REPORTED_WAITING",
    "REPORT_AGE_SECONDS",
    "R_BS",
    "STEP_RELATIVE_ERROR",
    "STEP_SECONDS",
    "TOKENS",
    "WINDOW_OUTPUT_TOKENS",
    "WINDOW_PREFILL_TOKENS",
    "BadValueError",
    "Decision",
    "Expr",
    "ExpressionError",
    "LmetricError",
    "NoInstanceError",
    "Policy",
    "PolicyError",
    "PolicyFunction",
    "Router",
    "Run",
    "Ticket",
    "TicketError",
    "UnknownNameError",
    "abs",
    "check_expression",
    "clip",
    "evaluate",
    "exp",
    "indicator_table",
    "knob",
    "log",
    "max",
    "maximum",
    "mean",
    "min",
    "minimum",
    "norm",
    "policy_function",
    "policy_table",
    "simulate",
    "sqrt",
    "std",
    "where",
]


def __getattr__(name: str) -> Any:
    if name in ("expr", "policies"):
        return import_module(f"lmetric.{name}")
    if name in __all__:
        simulator = name in ("Run", "simulate")
        for home in (
            ("lmetric.sim.run",) if simulator else ("lmetric._core", "lmetric.expr", "lmetric.policies")
        ):
            if (found := getattr(import_module(home), name, None)) is not None:
                globals()[name] = found
                return found
    near = get_close_matches(name, __all__, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise AttributeError(f"module 'lmetric' has no attribute {name!r}{hint}")


def __dir__() -> list[str]:
    return [*__all__, "expr", "policies"]
