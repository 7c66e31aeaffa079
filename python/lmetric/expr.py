"""Score expressions in Python: ``lm.P_TOKEN * (lm.BS + 1)`` has the same text as in YAML.

An expression contains only its text, with all brackets. The core parses and checks the text when a
policy uses it. Sources: LMETRIC Figures 6, 13 and 17. Function names follow numpy.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lmetric import _core

Operand: TypeAlias = "Expr | float"
"""An operand: an expression, or a finite number (Python or numpy)."""


class Expr:
    """An expression with one number or one truth value per instance.

    Build expressions from symbols (`BS`, `P_TOKEN`, ...) or from text. Numbers combine with ``+ - *
    / **``. Comparisons give truth values, which combine with ``& | ~``. Python's ``and``, ``or``,
    ``not`` and chained comparisons do not work. ``==`` also builds an expression, so a dictionary
    finds only the same object. Texts of the request are compared with texts: ``lm.TENANT ==
    "acme"``.

    Raises:
        TypeError: an operand is not a number.
        BadValueError: an operand is not finite.
        ExpressionError: another error, with the position, when a policy uses the expression.
    """

    __slots__ = ("_atom", "_text")
    __array_ufunc__ = None  # numpy numbers then use the operators of this class

    def __init__(self, text: str) -> None:
        self._text = text
        self._atom = False

    def __str__(self) -> str:
        """The text, as in YAML."""
        return self._text

    def __repr__(self) -> str:
        return f"Expr({self._text!r})"

    def __hash__(self) -> int:
        return hash(self._text)

    def __bool__(self) -> bool:
        raise TypeError(
            f"`{self._text}` has one truth value per instance, not a single one. Write `&`, `|`, `~` for "
            "and, or, not; `(a < b) & (b < c)` for `a < b < c`; `lm.where(condition, a, b)` for a choice"
        )

    def __add__(self, other: Operand) -> "Expr":
        return _infix(self, "+", other)

    def __radd__(self, other: Operand) -> "Expr":
        return _infix(other, "+", self)

    def __sub__(self, other: Operand) -> "Expr":
        return _infix(self, "-", other)

    def __rsub__(self, other: Operand) -> "Expr":
        return _infix(other, "-", self)

    def __mul__(self, other: Operand) -> "Expr":
        return _infix(self, "*", other)

    def __rmul__(self, other: Operand) -> "Expr":
        return _infix(other, "*", self)

    def __truediv__(self, other: Operand) -> "Expr":
        return _infix(self, "/", other)

    def __rtruediv__(self, other: Operand) -> "Expr":
        return _infix(other, "/", self)

    def __pow__(self, other: Operand) -> "Expr":
        return _infix(self, "**", other)

    def __rpow__(self, other: Operand) -> "Expr":
        return _infix(other, "**", self)

    def __lt__(self, other: Operand) -> "Expr":
        return _infix(self, "<", other)

    def __le__(self, other: Operand) -> "Expr":
        return _infix(self, "<=", other)

    def __gt__(self, other: Operand) -> "Expr":
        return _infix(self, ">", other)

    def __ge__(self, other: Operand) -> "Expr":
        return _infix(self, ">=", other)

    def __eq__(self, other: "Operand | str") -> "Expr":  # type: ignore[override]
        return _infix(self, "==", _literal(other) if isinstance(other, str) else other)

    def __ne__(self, other: "Operand | str") -> "Expr":  # type: ignore[override]
        return _infix(self, "!=", _literal(other) if isinstance(other, str) else other)

    def __and__(self, other: "Expr") -> "Expr":
        return _infix(self, "&", other)

    def __or__(self, other: "Expr") -> "Expr":
        return _infix(self, "|", other)

    def __invert__(self) -> "Expr":
        return _checked(f"~{_operand(self)}")

    def __neg__(self) -> "Expr":
        return _checked(f"-{_operand(self)}")

    def __abs__(self) -> "Expr":
        return abs(self)


def _checked(text: str, *, atom: bool = False) -> Expr:
    """An expression with this text. Raises ExpressionError above the length limit."""
    if len(text) > _core.MAX_EXPRESSION_LENGTH:
        limit = _core.MAX_EXPRESSION_LENGTH
        raise _core.ExpressionError(
            f"the expression has {len(text)} characters; expected at most {limit}: {text[:60]}…"
        )
    expr = Expr(text)
    expr._atom = atom
    return expr


def _operand(value: Operand) -> str:
    """The text of an operand, in brackets unless it is a single word."""
    text = _text(value)
    atom = value._atom if isinstance(value, Expr) else not text.startswith("-")
    return text if atom else f"({text})"


def _text(value: Operand) -> str:
    if isinstance(value, Expr):
        return value._text
    if isinstance(value, bool | np.bool_) or not isinstance(value, int | float | np.integer | np.floating):
        raise TypeError(f"{value!r} is not valid in an expression; expected an expression or a number")
    try:
        number = float(value)
    except OverflowError:
        number = float("inf")
    if number - number != 0.0:
        raise _core.BadValueError(f"number in an expression: {value} is not valid; expected a finite number")
    return str(int(value)) if isinstance(value, int | np.integer) else repr(number)


def _literal(text: str) -> Expr:
    """A text literal, in quotes."""
    quote = "'" if '"' in text else '"'
    if quote in text or not text.isprintable():
        raise _core.BadValueError(
            f"text in an expression: {text!r} is not valid; "
            "expected printable characters, and one kind of quotes"
        )
    return _checked(f"{quote}{text}{quote}", atom=True)


def _infix(left: Operand, sign: str, right: Operand) -> Expr:
    return _checked(f"{_operand(left)} {sign} {_operand(right)}")


def _call(name: str, *arguments: Operand) -> Expr:
    return _checked(f"{name}({', '.join(_text(a) for a in arguments)})", atom=True)


def where(condition: Expr, then: Operand, otherwise: Operand) -> Expr:
    """``then`` for instances with a true ``condition``, else ``otherwise``."""
    return _call("where", condition, then, otherwise)


def minimum(a: Operand, b: Operand) -> Expr:
    """The smaller operand per instance; NaN if an operand is NaN."""
    return _call("minimum", a, b)


def maximum(a: Operand, b: Operand) -> Expr:
    """The larger operand per instance; NaN if an operand is NaN."""
    return _call("maximum", a, b)


def clip(x: Operand, low: Operand, high: Operand) -> Expr:
    """``x``, limited to the range ``low`` to ``high``."""
    return _call("clip", x, low, high)


def log(x: Operand) -> Expr:
    """Natural logarithm. Instances with ``x <= 0`` are excluded from the decision."""
    return _call("log", x)


def exp(x: Operand) -> Expr:
    """e to the power of ``x``."""
    return _call("exp", x)


def sqrt(x: Operand) -> Expr:
    """Square root. Instances with ``x < 0`` are excluded from the decision."""
    return _call("sqrt", x)


def abs(x: Operand) -> Expr:
    """The absolute value of ``x``."""
    return _call("abs", x)


def min(x: Expr) -> Expr:
    """The minimum of ``x`` over all eligible instances with a value."""
    return _call("min", x)


def max(x: Expr) -> Expr:
    """The maximum of ``x`` over all eligible instances with a value."""
    return _call("max", x)


def mean(x: Expr) -> Expr:
    """The mean of ``x`` over all eligible instances with a value."""
    return _call("mean", x)


def std(x: Expr) -> Expr:
    """The population standard deviation of ``x`` over all eligible instances with a value."""
    return _call("std", x)


def norm(x: Expr) -> Expr:
    """``x / max(x)``, or 0 if ``x`` is 0 (LMETRIC Figure 6)."""
    return _call("norm", x)


def group_min(x: Expr) -> Expr:
    """The minimum of ``x`` over all instances with a value in the instance's group, eligible or
    not."""
    return _call("group_min", x)


def group_max(x: Expr) -> Expr:
    """The maximum of ``x`` over all instances with a value in the instance's group, eligible or
    not."""
    return _call("group_max", x)


def group_sum(x: Expr) -> Expr:
    """The sum of ``x`` over all instances with a value in the instance's group, eligible or not."""
    return _call("group_sum", x)


def group_mean(x: Expr) -> Expr:
    """The mean of ``x`` over all instances with a value in the instance's group, eligible or
    not."""
    return _call("group_mean", x)


def knob(name: str) -> Expr:
    """A policy parameter. Set its value in the policy: ``knobs={"lam": 0.7}``."""
    if not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII):
        raise _core.BadValueError(
            f"name of a parameter: {name!r} is not valid; expected letters, digits and `_`"
        )
    return _checked(name, atom=True)


def indicator(
    name: str, *, unit: str = "", default: float | None = None, max_age_seconds: float | None = None
) -> Expr:
    """Declares an indicator, one number per instance. Returns its symbol, which is then also
    ``lm.NAME``.

    ``Router.report_load(instance, extra={name: value})`` reports the values. A declaration applies
    to the whole process. A repeated declaration returns the same indicator.

    Args:
        name: lower-case letters, digits and ``_``.
        unit: unit for display.
        default: value of instances without a report; None: absent (NaN).
        max_age_seconds: maximum age of reported values; None: no limit.

    Raises:
        BadValueError: the name is invalid or taken by an indicator, policy, parameter or function,
            or the attributes differ from an earlier declaration.

    >>> board_power = indicator("board_power", unit="W")
    >>> str(board_power * (BS + 1))
    'board_power * (bs + 1)'
    """
    _core.declare_indicator(name, unit, default, max_age_seconds)
    return _indicator(name)


def declared(symbol: str) -> Expr | None:
    """The symbol of a declared indicator by its upper-case name; None if there is no such
    indicator."""
    names = (row["name"] for row in _core.indicator_table() if row["owner"] == "declared")
    return next((_indicator(name) for name in names if name.upper() == symbol), None)


def evaluate(
    expr: Expr | str,
    columns: Mapping[str, ArrayLike],
    *,
    eligible: ArrayLike | None = None,
    groups: Sequence[str | int] | None = None,
    knobs: Mapping[str, float] | None = None,
) -> NDArray[np.float64] | NDArray[np.bool_]:
    """Evaluates ``expr`` over columns like the router, for studies and tests.

    Large inputs run without the interpreter lock.

    Args:
        expr: the expression.
        columns: values by indicator name (any case), of shape ``(instances,)`` for one request or
            ``(requests, instances)`` for a batch. Indicators of the request have shape ``()`` or
            ``(requests,)``. NaN: absent.
        eligible: instances that can serve the request, of the same shapes; None: all. Reductions
            use only these.
        groups: group of each instance, for ``group_max`` and similar functions; None: each instance
            is its own group.

    Returns:
        One float64 or bool per instance, of shape ``(instances,)``, or ``(requests, instances)`` if
        a column has requests.

    Raises:
        ExpressionError: the expression is invalid, with the position.
        UnknownNameError: a column is not an indicator.
        BadValueError: shapes do not match, or a column is missing.
    """
    program = _core.Program(str(expr), "any", None if knobs is None else dict(knobs))
    arrays = {str(name): np.require(values, np.float64, "C") for name, values in columns.items()}
    mask = None if eligible is None else np.require(eligible, np.bool_, "C")
    places = None
    if groups is not None:
        first: dict[str | int, int] = {}
        places = [first.setdefault(group, place) for place, group in enumerate(groups)]
    return program.evaluate(arrays, mask, places)


def _indicator(name: str) -> Expr:
    return _checked(name, atom=True)


# One symbol per indicator, in the order of the core's table (a test compares them).
BS: Final = _indicator("bs")
Q_BS: Final = _indicator("q_bs")
R_BS: Final = _indicator("r_bs")
DECODE_BS: Final = _indicator("decode_bs")
BOUND_BS: Final = _indicator("bound_bs")
QUEUED_PREFILL_TOKENS: Final = _indicator("queued_prefill_tokens")
TOKENS: Final = _indicator("tokens")
DECODE_TOKENS: Final = _indicator("decode_tokens")
BOUND_TOKENS: Final = _indicator("bound_tokens")
REMAINING_TOKENS: Final = _indicator("remaining_tokens")
INDEX_BLOCKS: Final = _indicator("index_blocks")
FETCHES: Final = _indicator("fetches")
CACHE_FREE_TOKENS: Final = _indicator("cache_free_tokens")
PREFILL_TOKENS_PER_SECOND: Final = _indicator("prefill_tokens_per_second")
PREFILL_RELATIVE_ERROR: Final = _indicator("prefill_relative_error")
STEP_SECONDS: Final = _indicator("step_seconds")
STEP_RELATIVE_ERROR: Final = _indicator("step_relative_error")
WINDOW_PREFILL_TOKENS: Final = _indicator("window_prefill_tokens")
WINDOW_OUTPUT_TOKENS: Final = _indicator("window_output_tokens")
KV_USAGE: Final = _indicator("kv_usage")
REPORTED_WAITING: Final = _indicator("reported_waiting")
REPORTED_RUNNING: Final = _indicator("reported_running")
REPORT_AGE_SECONDS: Final = _indicator("report_age_seconds")
HIT_TOKENS: Final = _indicator("hit_tokens")
TIER_HIT_TOKENS: Final = _indicator("tier_hit_tokens")
KV_HIT: Final = _indicator("kv_hit")
NEW_TOKENS: Final = _indicator("new_tokens")
P_TOKEN: Final = _indicator("p_token")
P_SECONDS: Final = _indicator("p_seconds")
FETCH_TOKENS: Final = _indicator("fetch_tokens")
FETCH_COST_TOKENS: Final = _indicator("fetch_cost_tokens")
PREDICTED_TTFT_SECONDS: Final = _indicator("predicted_ttft_seconds")
PREDICTED_TPOT_SECONDS: Final = _indicator("predicted_tpot_seconds")
DECODE_TOKENS_PER_SECOND: Final = _indicator("decode_tokens_per_second")
HANDOFF_RUNNING_TOKENS: Final = _indicator("handoff_running_tokens")
HANDOFF_ARRIVED_TOKENS: Final = _indicator("handoff_arrived_tokens")
HANDOFF_COMING_TOKENS: Final = _indicator("handoff_coming_tokens")
DECODE_PRESSURE: Final = _indicator("decode_pressure")
LORA_BS: Final = _indicator("lora_bs")
LORA_LOADED: Final = _indicator("lora_loaded")
TENANT_BS: Final = _indicator("tenant_bs")
HANDOFF_SECONDS: Final = _indicator("handoff_seconds")
PROMPT_TOKENS: Final = _indicator("prompt_tokens")
EXPECTED_OUTPUT_TOKENS: Final = _indicator("expected_output_tokens")
INSTANCES: Final = _indicator("instances")
RECOMPUTE_RATIO: Final = _indicator("recompute_ratio")
LORA_NAME: Final = _indicator("lora_name")
TENANT: Final = _indicator("tenant")
LENGTH_CLASS: Final = _indicator("length_class")
PRIORITY: Final = _indicator("priority")
