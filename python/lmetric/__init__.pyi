"""The types of the names in `lmetric`."""

from typing import Any

from lmetric._core import (
    Arrival as Arrival,
)
from lmetric._core import (
    BadValueError as BadValueError,
)
from lmetric._core import (
    Board as Board,
)
from lmetric._core import (
    Decision as Decision,
)
from lmetric._core import (
    EngineBoost as EngineBoost,
)
from lmetric._core import (
    EventFeed as EventFeed,
)
from lmetric._core import (
    ExpressionError as ExpressionError,
)
from lmetric._core import (
    LmetricError as LmetricError,
)
from lmetric._core import (
    LoadFormatError as LoadFormatError,
)
from lmetric._core import (
    LoadMessage as LoadMessage,
)
from lmetric._core import (
    NoInstanceError as NoInstanceError,
)
from lmetric._core import (
    PolicyError as PolicyError,
)
from lmetric._core import (
    Request as Request,
)
from lmetric._core import (
    Router as Router,
)
from lmetric._core import (
    StepTable as StepTable,
)
from lmetric._core import (
    Ticket as Ticket,
)
from lmetric._core import (
    TicketError as TicketError,
)
from lmetric._core import (
    UnknownNameError as UnknownNameError,
)
from lmetric._core import (
    __version__ as __version__,
)
from lmetric._core import (
    check_expression as check_expression,
)
from lmetric._core import (
    encode_load as encode_load,
)
from lmetric._core import (
    indicator_table as indicator_table,
)
from lmetric._core import (
    policy_table as policy_table,
)
from lmetric.expr import (
    BOUND_BS as BOUND_BS,
)
from lmetric.expr import (
    BOUND_TOKENS as BOUND_TOKENS,
)
from lmetric.expr import (
    BS as BS,
)
from lmetric.expr import (
    CACHE_FREE_TOKENS as CACHE_FREE_TOKENS,
)
from lmetric.expr import (
    DECODE_BS as DECODE_BS,
)
from lmetric.expr import (
    DECODE_PRESSURE as DECODE_PRESSURE,
)
from lmetric.expr import (
    DECODE_TOKENS as DECODE_TOKENS,
)
from lmetric.expr import (
    DECODE_TOKENS_PER_SECOND as DECODE_TOKENS_PER_SECOND,
)
from lmetric.expr import (
    EXPECTED_OUTPUT_TOKENS as EXPECTED_OUTPUT_TOKENS,
)
from lmetric.expr import (
    FETCH_COST_TOKENS as FETCH_COST_TOKENS,
)
from lmetric.expr import (
    FETCH_TOKENS as FETCH_TOKENS,
)
from lmetric.expr import (
    FETCHES as FETCHES,
)
from lmetric.expr import (
    HANDOFF_ARRIVED_TOKENS as HANDOFF_ARRIVED_TOKENS,
)
from lmetric.expr import (
    HANDOFF_COMING_TOKENS as HANDOFF_COMING_TOKENS,
)
from lmetric.expr import (
    HANDOFF_RUNNING_TOKENS as HANDOFF_RUNNING_TOKENS,
)
from lmetric.expr import (
    HANDOFF_SECONDS as HANDOFF_SECONDS,
)
from lmetric.expr import (
    HIT_TOKENS as HIT_TOKENS,
)
from lmetric.expr import (
    INDEX_BLOCKS as INDEX_BLOCKS,
)
from lmetric.expr import (
    INSTANCES as INSTANCES,
)
from lmetric.expr import (
    KV_HIT as KV_HIT,
)
from lmetric.expr import (
    KV_USAGE as KV_USAGE,
)
from lmetric.expr import (
    LENGTH_CLASS as LENGTH_CLASS,
)
from lmetric.expr import (
    LORA_BS as LORA_BS,
)
from lmetric.expr import (
    LORA_LOADED as LORA_LOADED,
)
from lmetric.expr import (
    LORA_NAME as LORA_NAME,
)
from lmetric.expr import (
    NEW_TOKENS as NEW_TOKENS,
)
from lmetric.expr import (
    P_SECONDS as P_SECONDS,
)
from lmetric.expr import (
    P_TOKEN as P_TOKEN,
)
from lmetric.expr import (
    PREDICTED_TPOT_SECONDS as PREDICTED_TPOT_SECONDS,
)
from lmetric.expr import (
    PREDICTED_TTFT_SECONDS as PREDICTED_TTFT_SECONDS,
)
from lmetric.expr import (
    PREFILL_RELATIVE_ERROR as PREFILL_RELATIVE_ERROR,
)
from lmetric.expr import (
    PREFILL_TOKENS_PER_SECOND as PREFILL_TOKENS_PER_SECOND,
)
from lmetric.expr import (
    PRIORITY as PRIORITY,
)
from lmetric.expr import (
    PROMPT_TOKENS as PROMPT_TOKENS,
)
from lmetric.expr import (
    Q_BS as Q_BS,
)
from lmetric.expr import (
    QUEUED_PREFILL_TOKENS as QUEUED_PREFILL_TOKENS,
)
from lmetric.expr import (
    R_BS as R_BS,
)
from lmetric.expr import (
    RECOMPUTE_RATIO as RECOMPUTE_RATIO,
)
from lmetric.expr import (
    REMAINING_TOKENS as REMAINING_TOKENS,
)
from lmetric.expr import (
    REPORT_AGE_SECONDS as REPORT_AGE_SECONDS,
)
from lmetric.expr import (
    REPORTED_RUNNING as REPORTED_RUNNING,
)
from lmetric.expr import (
    REPORTED_WAITING as REPORTED_WAITING,
)
from lmetric.expr import (
    STEP_RELATIVE_ERROR as STEP_RELATIVE_ERROR,
)
from lmetric.expr import (
    STEP_SECONDS as STEP_SECONDS,
)
from lmetric.expr import (
    TENANT as TENANT,
)
from lmetric.expr import (
    TENANT_BS as TENANT_BS,
)
from lmetric.expr import (
    TIER_HIT_TOKENS as TIER_HIT_TOKENS,
)
from lmetric.expr import (
    TOKENS as TOKENS,
)
from lmetric.expr import (
    WINDOW_OUTPUT_TOKENS as WINDOW_OUTPUT_TOKENS,
)
from lmetric.expr import (
    WINDOW_PREFILL_TOKENS as WINDOW_PREFILL_TOKENS,
)
from lmetric.expr import (
    Expr as Expr,
)
from lmetric.expr import (
    abs as abs,
)
from lmetric.expr import (
    clip as clip,
)
from lmetric.expr import (
    evaluate as evaluate,
)
from lmetric.expr import (
    exp as exp,
)
from lmetric.expr import (
    group_max as group_max,
)
from lmetric.expr import (
    group_mean as group_mean,
)
from lmetric.expr import (
    group_min as group_min,
)
from lmetric.expr import (
    group_sum as group_sum,
)
from lmetric.expr import (
    indicator as indicator,
)
from lmetric.expr import (
    knob as knob,
)
from lmetric.expr import (
    log as log,
)
from lmetric.expr import (
    max as max,
)
from lmetric.expr import (
    maximum as maximum,
)
from lmetric.expr import (
    mean as mean,
)
from lmetric.expr import (
    min as min,
)
from lmetric.expr import (
    minimum as minimum,
)
from lmetric.expr import (
    norm as norm,
)
from lmetric.expr import (
    sqrt as sqrt,
)
from lmetric.expr import (
    std as std,
)
from lmetric.expr import (
    where as where,
)
from lmetric.lengths.forecast import forecast_function as forecast_function
from lmetric.options import (
    DecodePlacement as DecodePlacement,
)
from lmetric.options import (
    FairShares as FairShares,
)
from lmetric.options import (
    Guard as Guard,
)
from lmetric.options import (
    LibraSplit as LibraSplit,
)
from lmetric.options import (
    Llumnix as Llumnix,
)
from lmetric.options import (
    PrefixFetch as PrefixFetch,
)
from lmetric.options import (
    ProgramAdmission as ProgramAdmission,
)
from lmetric.options import (
    ProgramAuto as ProgramAuto,
)
from lmetric.options import (
    ProgramObservation as ProgramObservation,
)
from lmetric.options import (
    SplitAt as SplitAt,
)
from lmetric.options import (
    SplitBy as SplitBy,
)
from lmetric.options import (
    Star as Star,
)
from lmetric.options import (
    ThunderAgent as ThunderAgent,
)
from lmetric.options import (
    UniBoost as UniBoost,
)
from lmetric.options import (
    WarmChanges as WarmChanges,
)
from lmetric.policies import (
    Policy as Policy,
)
from lmetric.policies import (
    PolicyFunction as PolicyFunction,
)
from lmetric.policies import (
    policy_function as policy_function,
)
from lmetric.relay import (
    EngineTarget as EngineTarget,
)
from lmetric.relay import (
    Relay as Relay,
)
from lmetric.relay import (
    RelayError as RelayError,
)
from lmetric_lab.sim.churn import FleetChange as FleetChange
from lmetric_lab.sim.comparison import Comparison as Comparison
from lmetric_lab.sim.comparison import compare as compare
from lmetric_lab.sim.result import Run as Run
from lmetric_lab.sim.run import simulate as simulate
from lmetric_lab.sim.scenario import Scenario as Scenario
from lmetric_lab.sim.traces import Trace as Trace
from lmetric_lab.sim.traces import load_trace as load_trace

def __getattr__(name: str) -> Any: ...

# Without those that shadow builtins.
__all__ = [
    "BOUND_BS",
    "BOUND_TOKENS",
    "BS",
    "CACHE_FREE_TOKENS",
    "DECODE_BS",
    "DECODE_PRESSURE",
    "DECODE_TOKENS",
    "DECODE_TOKENS_PER_SECOND",
    "EXPECTED_OUTPUT_TOKENS",
    "FETCHES",
    "FETCH_COST_TOKENS",
    "FETCH_TOKENS",
    "HANDOFF_ARRIVED_TOKENS",
    "HANDOFF_COMING_TOKENS",
    "HANDOFF_RUNNING_TOKENS",
    "HANDOFF_SECONDS",
    "HIT_TOKENS",
    "INDEX_BLOCKS",
    "INSTANCES",
    "KV_HIT",
    "KV_USAGE",
    "LENGTH_CLASS",
    "LORA_BS",
    "LORA_LOADED",
    "LORA_NAME",
    "NEW_TOKENS",
    "PREDICTED_TPOT_SECONDS",
    "PREDICTED_TTFT_SECONDS",
    "PREFILL_RELATIVE_ERROR",
    "PREFILL_TOKENS_PER_SECOND",
    "PRIORITY",
    "PROMPT_TOKENS",
    "P_SECONDS",
    "P_TOKEN",
    "QUEUED_PREFILL_TOKENS",
    "Q_BS",
    "RECOMPUTE_RATIO",
    "REMAINING_TOKENS",
    "REPORTED_RUNNING",
    "REPORTED_WAITING",
    "REPORT_AGE_SECONDS",
    "R_BS",
    "STEP_RELATIVE_ERROR",
    "STEP_SECONDS",
    "TENANT",
    "TENANT_BS",
    "TIER_HIT_TOKENS",
    "TOKENS",
    "WINDOW_OUTPUT_TOKENS",
    "WINDOW_PREFILL_TOKENS",
    "Arrival",
    "BadValueError",
    "Board",
    "Comparison",
    "Decision",
    "DecodePlacement",
    "EngineBoost",
    "EngineTarget",
    "EventFeed",
    "Expr",
    "ExpressionError",
    "FairShares",
    "FleetChange",
    "Guard",
    "LibraSplit",
    "Llumnix",
    "LmetricError",
    "LoadFormatError",
    "LoadMessage",
    "NoInstanceError",
    "Policy",
    "PolicyError",
    "PolicyFunction",
    "PrefixFetch",
    "ProgramAdmission",
    "ProgramAuto",
    "ProgramObservation",
    "Relay",
    "RelayError",
    "Request",
    "Router",
    "Run",
    "Scenario",
    "SplitAt",
    "SplitBy",
    "Star",
    "StepTable",
    "ThunderAgent",
    "Ticket",
    "TicketError",
    "Trace",
    "UniBoost",
    "UnknownNameError",
    "WarmChanges",
    "__version__",
    "check_expression",
    "clip",
    "compare",
    "encode_load",
    "evaluate",
    "exp",
    "forecast_function",
    "group_max",
    "group_mean",
    "group_min",
    "group_sum",
    "indicator",
    "indicator_table",
    "knob",
    "load_trace",
    "log",
    "maximum",
    "mean",
    "minimum",
    "norm",
    "policy_function",
    "policy_table",
    "simulate",
    "sqrt",
    "std",
    "where",
]
