"""Custom policies: expressions (`Policy`) and Python functions over columns (`policy_function`)."""

import functools
import inspect
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Literal, TypeAlias, final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lmetric import _core, plugins
from lmetric.defaults import DEFAULT_POLICY
from lmetric.expr import Expr

End: TypeAlias = Literal["min", "max"]
TieBreak: TypeAlias = "Expr | str | tuple[Expr | str, End]"
Columns: TypeAlias = Mapping[str, NDArray[np.float64] | float]
PolicyLike: TypeAlias = "str | Expr | Policy | PolicyFunction | Callable[..., ArrayLike]"

_KEYS = ("name", "score", "filter", "prefer", "then", "knobs", "guard")


@final
class Policy:
    """A policy of expressions, checked at its creation.

    Instances whose score is NaN or infinite (an absent indicator, a division by zero) are excluded
    from the decision. If no instance has a score, the instance with the fewest requests is chosen.

    Args:
        score: one number per instance.
        prefer: whether the lowest or the highest score wins.
        filter: one truth value per instance. Only instances with a true value are scored. If no
            eligible instance has a true value, the decision ignores the filter.
        then: tie-breaks in order: expressions (the lowest wins) or pairs such as ``(lm.KV_HIT,
            "max")``. Remaining ties are broken at random.
        `knobs`: values of the parameters in the expressions.
        name: name in logs, metrics and decision records; no built-in policy has it.
        guard: whether the hot-spot guard filters candidates (docs/explanation/default_policy.md).

    Raises:
        ExpressionError: an invalid expression, with the position and ``part`` (``score``,
            ``filter``, ``then[0]``).
        BadValueError: another invalid argument.

    >>> Policy("p_token * (bs + 1)", filter="bs - min(bs) <= 8", then=["bs"])
    Policy('p_token * (bs + 1)', filter='bs - min(bs) <= 8', then=[('bs', 'min')])
    """

    __slots__ = ("filter", "guard", "knobs", "name", "prefer", "reads", "score", "then")

    name: str | None
    score: str
    filter: str | None
    prefer: End
    then: list[tuple[str, End]]
    knobs: dict[str, float]
    guard: bool | None
    reads: list[str]
    """Names of the indicators that the policy reads, in the order of the indicator table."""

    def __init__(
        self,
        score: Expr | str,
        *,
        filter: Expr | str | None = None,
        prefer: End = "min",
        then: Sequence[TieBreak] | Expr | str = (),
        knobs: Mapping[str, float] | None = None,
        name: str | None = None,
        guard: bool | None = None,
    ) -> None:
        if name is not None and not (isinstance(name, str) and name.strip()):
            raise _bad("name of a policy", name, "a non-empty text")
        _check_own(name)
        self.name = name
        self.guard = _guard(guard)
        self.knobs = _knobs(knobs)
        self.score = _source("score", score)
        self.filter = None if filter is None else _source("filter", filter)
        self.prefer = _end("prefer", prefer)
        breaks = [then] if isinstance(then, Expr | str) else then
        if not isinstance(breaks, Sequence):
            raise _bad("then", then, "a list of expressions")
        self.then = [_tie_break(f"then[{i}]", tie_break) for i, tie_break in enumerate(breaks)]
        reads = self._check("score", "score", self.score)
        if self.filter is not None:
            reads |= self._check("filter", "filter", self.filter)
        for i, (text, _) in enumerate(self.then):
            reads |= self._check(f"then[{i}]", "then", text)
        self.reads = [row["name"] for row in _core.indicator_table() if row["name"] in reads]

    def _check(self, part: str, kind: str, text: str) -> set[str]:
        try:
            return set(_core.check_expression(text, kind, self.knobs))
        except _core.ExpressionError as error:
            shown = _core.ExpressionError(f"{part}: {error}")
            shown.__dict__.update(error.__dict__, part=part)
            raise shown from None

    def __repr__(self) -> str:
        shown = [repr(self.score)]
        shown += [f"filter={self.filter!r}"] if self.filter is not None else []
        shown += [f"prefer={self.prefer!r}"] if self.prefer != "min" else []
        shown += [f"then={self.then!r}"] if self.then else []
        shown += [f"knobs={self.knobs!r}"] if self.knobs else []
        shown += [f"name={self.name!r}"] if self.name is not None else []
        shown += [f"guard={self.guard}"] if self.guard is not None else []
        return f"Policy({', '.join(shown)})"

    @classmethod
    def from_config(
        cls,
        value: str | Mapping[str, Any],
        *,
        knobs: Mapping[str, float] | None = None,
        policies: Collection[str] | None = None,
        references: bool = True,
    ) -> "Policy | PolicyFunction | str":
        """Reads a policy from a configuration or ``--policy``.

        Args:
            value: the name of a registered policy (returned unchanged), a score expression, a
                Python object (``file.py:name``, ``package.module:name``, or an entry point in the
                group ``lmetric.policies``), or a mapping. A mapping has ``score`` and optionally
                ``filter``, ``prefer``, ``then``, ``knobs``, ``name``, ``guard``. Entries of
                ``then`` are texts or ``{max: text}``.
            `knobs`: values of parameters. Values in the mapping override them.
            policies: registered names; None: the names in `lmetric.policy_table`.
            references: whether to accept Python objects, which runs their code.

        Raises:
            UnknownNameError: a word that is neither a policy nor an indicator, or an unknown key,
                with the nearest known name.
            ExpressionError: an invalid expression.
            BadValueError: another invalid value.
        """
        if isinstance(value, str):
            return cls._from_text(value, knobs, policies, references)
        if not isinstance(value, Mapping):
            raise _bad("policy", value, "a name, a score expression, or a mapping with `score`")
        for key in value:
            if key not in _KEYS:
                raise _core.UnknownNameError(f"unknown key {key!r} of a policy{_hint(str(key), _KEYS)}")
        if "score" not in value:
            raise _bad("policy", dict(value), "a mapping with the key `score`")
        then: Any = value.get("then")
        then = () if then is None else [then] if isinstance(then, Mapping) else then
        return cls(
            value["score"],
            filter=value.get("filter"),
            prefer=value.get("prefer", "min"),
            then=then,
            knobs={**_knobs(knobs), **_knobs(value.get("knobs"))},
            name=value.get("name"),
            guard=value.get("guard"),
        )

    @classmethod
    def _from_text(
        cls,
        text: str,
        knobs: Mapping[str, float] | None,
        policies: Collection[str] | None,
        references: bool,
    ) -> "Policy | PolicyFunction | str":
        word = text.strip()
        if policies is None:
            policies = [row["name"] for row in _core.policy_table()]
        if word in policies:
            return word
        if not references and plugins.is_reference(word):
            raise _bad(
                "policy", word, "the name of a policy or an expression; Python objects are not accepted here"
            )
        if references and (found := referenced(word)) is not None:
            if knobs:
                raise _bad("knobs", dict(knobs), "none for a Python policy")
            return found
        indicators = [row["name"] for row in _core.indicator_table()]
        known = [*indicators, *(knobs or {})]
        if re.fullmatch(r"[A-Za-z_][\w-]*", word, re.ASCII) and word.lower() not in known:
            hints = [
                f"the {what} {near!r}"
                for what, known in (("policy", sorted(policies)), ("indicator", indicators))
                if (near := _core.nearest_name(word, known)) is not None
            ]
            hint = (
                f"; did you mean {' or '.join(hints)}?"
                if hints
                else "; `lmetric-router policies` and `lmetric-router indicators` list them"
            )
            raise _core.UnknownNameError(f"{word!r} is neither a policy nor an indicator{hint}")
        return cls(text, knobs=knobs)


@final
class PolicyFunction:
    """A Python function as a policy, created by `policy_function`. The router calls ``fn``."""

    __slots__ = ("fallback", "fn", "guard", "name", "reads", "time_limit_seconds")

    fn: Callable[[Columns], ArrayLike]
    reads: list[str]
    name: str
    guard: bool | None
    fallback: Policy | str | None
    time_limit_seconds: float | None

    def __init__(
        self,
        fn: Callable[[Columns], ArrayLike],
        reads: list[str],
        name: str,
        guard: bool | None = None,
        fallback: Policy | str | None = None,
        time_limit_seconds: float | None = None,
    ) -> None:
        self.fn, self.reads, self.name, self.guard = fn, reads, name, guard
        self.fallback, self.time_limit_seconds = fallback, time_limit_seconds

    def with_fallback(self, fallback: Policy | str, time_limit_seconds: float | None) -> "PolicyFunction":
        """A copy with these values for a missing fallback or time limit."""
        limit = self.time_limit_seconds
        return PolicyFunction(
            self.fn,
            self.reads,
            self.name,
            self.guard,
            fallback if self.fallback is None else self.fallback,
            time_limit_seconds if limit is None else limit,
        )

    def __repr__(self) -> str:
        return f"policy_function({self.name}, reads={self.reads!r})"


def policy_function(
    fn: Callable[..., ArrayLike],
    reads: Iterable[Expr | str] | None = None,
    *,
    name: str | None = None,
    guard: bool | None = None,
    fallback: Policy | Expr | str | None = None,
    time_limit_seconds: float | None = None,
) -> PolicyFunction:
    """A policy that calls a Python function for each decision, for scores that expressions cannot
    express.

    ``fn`` gets the indicators by lower-case name: a float64 array with one entry per eligible
    instance (NaN: absent), or a float for an indicator of the request. It returns one score per
    eligible instance, and the lowest wins. NaN or infinity excludes an instance. ``fn`` must not
    keep the arrays. Every decision runs the Python interpreter, so it is slower than an expression.

    Args:
        fn: the function.
        reads: indicators that ``fn`` gets as one mapping (``[lm.P_TOKEN, lm.BS]`` or their names).
            None: the parameters of ``fn`` name the indicators.
        guard: whether the hot-spot guard filters candidates (docs/explanation/default_policy.md).
        fallback: policy (a name, an expression or a `Policy`) that decides if ``fn`` raises or
            exceeds the time limit. After three consecutive failures it decides for one second.
            `Router.policy_fallbacks` counts the failures. Without a fallback, failures raise
            `lmetric.PolicyError`.
        time_limit_seconds: time limit per decision; no effect in simulations.

    Raises:
        TypeError: ``fn`` is not callable.
        UnknownNameError: a name is not an indicator.
        BadValueError: an invalid time limit, or the name of a built-in policy.

    Examples:

    >>> policy_function(lambda c: c["p_token"] * c["bs"], reads=["p_token", "bs"], name="mine")
    policy_function(mine, reads=['p_token', 'bs'])
    >>> def score(p_token, bs):
    ...     return p_token * (bs + 1)
    >>> policy_function(score)
    policy_function(score, reads=['p_token', 'bs'])
    """
    if not callable(fn):
        raise TypeError(
            f"{fn!r} is no policy; expected a name, an expression, an lmetric.Policy, or a function of "
            "indicators"
        )
    if time_limit_seconds is not None and not 0 < time_limit_seconds <= 60:
        raise _bad("time_limit_seconds", time_limit_seconds, "more than 0, at most 60")
    name = name or str(getattr(fn, "__name__", type(fn).__name__))
    _check_own(name)
    if reads is None:
        fn, reads = _by_parameters(fn, name)
    known = [row["name"] for row in _core.indicator_table()]
    names = [str(symbol).lower() for symbol in ([reads] if isinstance(reads, Expr | str) else reads)]
    for one in names:
        if one not in known:
            raise _core.UnknownNameError(f"unknown indicator {one!r}{_hint(one, known)}")
    if isinstance(fallback, Expr):
        fallback = Policy(fallback)
    return PolicyFunction(fn, names, name, _guard(guard), fallback, time_limit_seconds)


def referenced(text: str) -> Policy | PolicyFunction | str | None:
    """Loads the policy of a reference or entry point; None for a policy name or an expression.

    The core calls this function, too. The object can be a `Policy`, a `PolicyFunction`, an `Expr`,
    the text of a score, or a function whose parameters are indicators.

    Raises:
        BadValueError: the object cannot be loaded, or is not a policy.
    """
    if plugins.lacks_name(text):
        raise _core.BadValueError(f"policy {text!r}: a file needs a name: {text.strip().rstrip(':')}:NAME")
    if plugins.is_reference(text):
        found = plugins.load_object(text)
    else:
        found = plugins.entry_point(text.strip()) if _unregistered(text.strip()) else None
    if found is None or isinstance(found, Policy | PolicyFunction):
        return found
    if isinstance(found, Expr | str):
        return Policy(found)
    expected = "a function, an lmetric.Policy or an expression"
    if isinstance(found, type):
        raise _core.BadValueError(f"policy {text}: it is a class; expected {expected}")
    if callable(found):
        return policy_function(found, name=text.strip())
    raise _bad(f"policy {text}", found, expected)


def is_code(policy: object) -> bool:
    """Whether a policy of a configuration is a reference or an entry point. Loads nothing.

    Building such a policy runs its code. Data files, such as records, must not cause that.
    """
    if not isinstance(policy, str):
        return False
    word = policy.strip()
    return plugins.is_reference(word) or (_unregistered(word) and plugins.has_entry_point(word))


def _unregistered(word: str) -> bool:
    """Whether the word is a name, but of no policy and no indicator."""
    if not re.fullmatch(r"[A-Za-z_][\w-]*", word, re.ASCII):
        return False
    names = _registered()
    return word not in names and word.lower() not in names


@functools.cache
def _registered() -> frozenset[str]:
    """Returns the names of all policies and indicators, which never change."""
    return frozenset(row["name"] for row in (*_core.policy_table(), *_core.indicator_table()))


def _check_own(name: str | None) -> None:
    """Raises BadValueError for the name of a built-in policy, whose decisions have other scores."""
    if name in (row["name"] for row in _core.policy_table()):
        raise _bad("name of a policy", name, "a name of its own: a built-in policy has this name")


def _by_parameters(
    fn: Callable[..., ArrayLike], name: str
) -> tuple[Callable[[Columns], ArrayLike], list[str]]:
    """Converts a function of indicators to a function of columns. Returns it and the indicator
    names."""
    known = [row["name"] for row in _core.indicator_table()]
    reads = list(inspect.signature(fn).parameters)
    for parameter in reads:
        if parameter not in known:
            raise _core.UnknownNameError(
                f"policy {name}: parameter {parameter!r} is not an indicator{_hint(parameter, known)}; "
                "a function of columns needs lmetric.policy_function(..., reads=[...])"
            )
    if not reads:
        raise _bad(f"policy {name}", "a function without parameters", "one parameter per indicator")

    @functools.wraps(fn)
    def of_columns(columns: Columns) -> ArrayLike:
        return fn(*(columns[each] for each in reads))

    return of_columns, reads


def _bad(what: str, got: object, expected: str) -> Exception:
    return _core.BadValueError(f"{what}: {got!r} is not valid; expected {expected}")


def _guard(value: object) -> bool | None:
    if value is None or isinstance(value, bool):
        return value
    if value == "on" or value == "off":
        return value == "on"
    raise _bad("guard", value, "on or off (True or False)")


def _hint(name: str, known: Iterable[str]) -> str:
    near = _core.nearest_name(name, list(known))
    return "" if near is None else f"; did you mean {near!r}?"


def _source(part: str, value: object) -> str:
    if not isinstance(value, Expr | str):
        raise _bad(part, value, "an expression or its text")
    return str(value)


def _end(part: str, value: object) -> End:
    if value == "min" or value == "max":
        return value
    raise _bad(part, value, "'min' or 'max'")


def _tie_break(part: str, value: object) -> tuple[str, End]:
    match value:
        case Expr() | str():
            return str(value), "min"
        case (Expr() | str() as text, end):
            return str(text), _end(part, end)
        case Mapping() if len(value) == 1:
            ((end, text),) = value.items()
            return _source(part, text), _end(part, end)
    raise _bad(part, value, "an expression, or a pair such as (expression, 'max')")


def _knobs(knobs: Mapping[str, float] | None) -> dict[str, float]:
    if knobs is None:
        return {}
    if not isinstance(knobs, Mapping):
        raise _bad("knobs", knobs, "a mapping from names to numbers")
    for name, value in knobs.items():
        if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII):
            raise _bad("name of a parameter", name, "letters, digits and `_`")
        if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
            raise _bad(f"parameter {name}", value, "a number")
    return {name: float(value) for name, value in knobs.items()}


def policy_name(policy: "PolicyLike | None") -> str:
    """The name of a policy in results: its name, or the text of its expression."""
    if policy is None:
        return DEFAULT_POLICY
    if isinstance(policy, str | Expr):
        return str(policy)
    if isinstance(policy, Policy):
        return policy.name or policy.score
    if isinstance(policy, PolicyFunction):
        return policy.name
    return policy_function(policy).name
