"""lmetric: route requests over a fleet of LLM engines.

>>> import lmetric as lm
>>> router = lm.Router("lmetric", block_size=16)
>>> for name in ("gpu-0", "gpu-1"):
...     _ = router.add_instance(name, cache_blocks=4_000)
>>> decision, ticket = router.route(lm.Request(range(64), max_tokens=20))
>>> with ticket:  # leaving the block closes the ticket, also after an exception
...     ticket.sent()
...     ticket.first_token()
...     ticket.done(output_tokens=20)
>>> router.in_flight()
0

Simulate a trace and look at the result:

>>> run = lm.simulate("trace.jsonl", policy="lmetric", instances=8)  # doctest: +SKIP
>>> run.summary().ttft_seconds.p99  # doctest: +SKIP
1.3

A policy is a registered name (`policy_table`), an expression such as ``lm.P_TOKEN * (lm.BS + 1)``,
a `Policy` or a `policy_function`. Guide and reference: docs/reference/python.md.

Names are imported on first use, so ``import lmetric`` is fast.
"""

from difflib import get_close_matches
from importlib import import_module
from typing import Any

# `lm.min`, `lm.max` and `lm.abs` are not in `__all__`, so `from lmetric import *` keeps the
# builtins.
_SHADOWS = ("abs", "max", "min")
_MODULES = ("expr", "options", "policies")
# By module, its names here. `__init__.pyi` has the same names for type checkers.
# The laboratory's names are one of the three doors to it.
_HOMES = {
    "lmetric._core": (
        "Arrival BadValueError Board Decision EngineBoost EventFeed ExpressionError LmetricError "
        "LoadFormatError LoadMessage NoInstanceError PolicyError Request Router StepTable Ticket "
        "TicketError UnknownNameError check_expression encode_load indicator_table policy_table "
        "__version__"
    ),
    "lmetric.expr": (
        "BOUND_BS BOUND_TOKENS BS CACHE_FREE_TOKENS DECODE_BS DECODE_PRESSURE DECODE_TOKENS "
        "DECODE_TOKENS_PER_SECOND EXPECTED_OUTPUT_TOKENS FETCH_COST_TOKENS FETCH_TOKENS FETCHES "
        "HANDOFF_ARRIVED_TOKENS HANDOFF_COMING_TOKENS HANDOFF_RUNNING_TOKENS HANDOFF_SECONDS HIT_TOKENS "
        "INDEX_BLOCKS INSTANCES KV_HIT KV_USAGE LENGTH_CLASS LORA_BS LORA_LOADED LORA_NAME NEW_TOKENS "
        "P_SECONDS P_TOKEN PREDICTED_TPOT_SECONDS PREDICTED_TTFT_SECONDS PREFILL_RELATIVE_ERROR "
        "PREFILL_TOKENS_PER_SECOND PRIORITY PROMPT_TOKENS Q_BS QUEUED_PREFILL_TOKENS R_BS RECOMPUTE_RATIO "
        "REMAINING_TOKENS REPORT_AGE_SECONDS REPORTED_RUNNING REPORTED_WAITING STEP_RELATIVE_ERROR "
        "STEP_SECONDS TENANT TENANT_BS TIER_HIT_TOKENS TOKENS WINDOW_OUTPUT_TOKENS WINDOW_PREFILL_TOKENS "
        "Expr clip evaluate exp group_max group_mean group_min group_sum indicator knob log maximum mean "
        "minimum norm sqrt std where"
    ),
    "lmetric.lengths.forecast": "forecast_function",
    "lmetric.options": (
        "DecodePlacement FairShares Guard LibraSplit Llumnix PrefixFetch ProgramAdmission ProgramAuto "
        "ProgramObservation SplitAt SplitBy Star ThunderAgent UniBoost WarmChanges"
    ),
    "lmetric.policies": "Policy PolicyFunction policy_function",
    "lmetric.relay": "EngineTarget Relay RelayError",
    "lmetric_lab.sim.churn": "FleetChange",
    "lmetric_lab.sim.comparison": "Comparison compare",
    "lmetric_lab.sim.result": "Run",
    "lmetric_lab.sim.run": "simulate",
    "lmetric_lab.sim.scenario": "Scenario",
    "lmetric_lab.sim.traces": "Trace load_trace",
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names.split()}
__all__ = sorted(_HOME_OF, key=lambda name: (not name.isupper(), not name[0].isupper(), name))


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"lmetric.{name}")
    home = "lmetric.expr" if name in _SHADOWS else _HOME_OF.get(name)
    if home is not None:
        found = globals()[name] = getattr(import_module(home), name)
        return found
    if name.isupper() and (symbol := import_module("lmetric.expr").declared(name)) is not None:
        return symbol
    near = get_close_matches(name, __all__, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise AttributeError(f"module 'lmetric' has no attribute {name!r}{hint}")


def __dir__() -> list[str]:
    return [*__all__, *_SHADOWS, *_MODULES]
