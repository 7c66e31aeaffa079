"""docs/reference/expressions.md: the expression language. Every example is evaluated."""

from __future__ import annotations

import inspect

import numpy as np

from lmetric import _core, evaluate, expr

# Four instances in two groups, and a request of the tenant "acme" with 1,000 prompt tokens.
FLEET = {
    "bs": [0, 2, 4, 9],
    "q_bs": [0, 0, 1, 5],
    "p_token": [1000, 1000, 400, 40],
    "kv_hit": [0.0, 0.0, 0.6, 0.96],
    "kv_usage": [0.1, 0.5, 0.4, 0.9],
    "report_age_seconds": [0.1, 0.1, np.nan, 0.2],
}
REQUEST = {"prompt_tokens": 1000}
GROUPS = ["node-1", "node-1", "node-2", "node-2"]

OPERATORS = [
    ("a + b", "a - b", "sum, difference", "p_token + 100 * bs"),
    ("a * b", "a / b", "product, quotient", "p_token * (bs + 1)"),
    ("a ** b", "", "power; right-associative: `2 ** 3 ** 2` is 512", "(bs + 1) ** 2"),
    ("-a", "", "negative", "-bs"),
    ("a < b", "a <= b", "comparison of numbers", "bs <= 4"),
    ("a > b", "a >= b", "comparison of numbers", "kv_hit > 0.5"),
    ("a == b", "a != b", "comparison of numbers or of texts", "bs == 2"),
    ("a & b", "a | b", "and, or, of truth values", "bs < 8 & kv_hit > 0.5"),
    ("~a", "", "not, of a truth value", "~(bs > 2)"),
]
FUNCTIONS = {
    "where": "where(kv_hit > 0.9, bs, p_token * (bs + 1))",
    "minimum": "minimum(bs, 4)",
    "maximum": "maximum(bs, 1)",
    "clip": "clip(kv_usage, 0.2, 0.8)",
    "log": "log(bs + 1)",
    "exp": "exp(-bs)",
    "sqrt": "sqrt(bs)",
    "abs": "abs(bs - 4)",
    "min": "bs - min(bs)",
    "max": "max(bs) - bs",
    "mean": "bs / mean(bs)",
    "std": "bs <= mean(bs) + std(bs)",
    "norm": "0.7 * (1 - kv_hit) + 0.3 * norm(bs)",
    "group_min": "group_min(bs)",
    "group_max": "group_max(bs)",
    "group_sum": "bs + 0.1 * group_sum(bs)",
    "group_mean": "group_mean(kv_usage)",
}
ABSENT = [
    ("report_age_seconds", "an absent indicator is NaN"),
    ("report_age_seconds < 1", "a comparison with NaN is false"),
    ("minimum(report_age_seconds, 1)", "`minimum` and `maximum` propagate NaN"),
    ("max(report_age_seconds)", "reductions skip NaN"),
    ("p_token / bs", "a division by zero gives infinity or NaN"),
]
ERRORS = [
    ("p_tokne * (bs + 1)", "score"),
    ("p_token * bs <= 8", "score"),
    ("bs and q_bs", "score"),
    ("1 < bs < 3", "filter"),
    ("min(bs, 2)", "score"),
    ("bs / 0", "score"),
]

HEAD = """\
# Expressions

`scripts/make_reference expressions` generates this page and evaluates its examples. A score expression gives each instance a number; the
router picks the instance with the lowest one. Use an expression as `--policy` of `serve`, `simulate` and `study`, as `policy` in the
configuration, and in [Python](python.md):

```sh
lmetric-router simulate --trace slice --policy lmetric,'p_token * (bs + 1)'
```

```yaml
policy:
  filter: bs - min(bs) <= 8
  score: 0.7 * (1 - kv_hit) + 0.3 * norm(bs)
  prefer: min
  then: [bs]
```

| key | type | meaning |
| --- | --- | --- |
| `score` | number | value of an instance. An instance whose score is NaN or infinite is left out of the decision |
| `prefer` | `min` or `max` | whether the lowest (default) or the highest score wins |
| `filter` | truth value | only instances with a true value are scored. If no instance passes, the router ignores the filter for this decision |
| `then` | list of numbers | tie-breaks, in order: the lowest wins; `{max: kv_hit}`: the highest wins. Ties that remain are drawn at random |

## Values

- **Indicators** by name, in any case: `p_token` or `P_TOKEN`. [Indicators](indicators.md) lists them with their units.
- **Parameters**: your own named constants, `--knob lam=0.7` or `knobs: {lam: 0.7}`. A name cannot be an indicator.
- **Numbers**: `8`, `0.5`, `1e-3`.
- **Texts**: `"acme"` or `'acme'`. They compare with the request's texts `lora_name`, `tenant` and `length_class` by `==` and `!=`.

A value is a number, a truth value or a text per instance. A value of the request, such as `prompt_tokens`, is the same for all instances.
"""


def shown(value: float | bool) -> str:
    if isinstance(value, bool | np.bool_):
        return str(bool(value)).lower()
    return f"{value + 0.0:.4g}"


def result(text: str) -> str:
    """Evaluates an example over the fleet of the page."""
    reads = _core.check_expression(text, "any")
    columns = {name: values for name, values in {**FLEET, **REQUEST}.items() if name in reads}
    with np.errstate(all="ignore"):
        values = np.broadcast_to(evaluate(text, columns, groups=GROUPS), (4,))
    return ", ".join(map(shown, values.tolist()))


def example(text: str) -> str:
    return f"`{text}`".replace("|", "\\|") + f" | {result(text)} |\n"


def error(text: str, kind: str) -> str:
    try:
        _core.check_expression(text, kind)
    except _core.ExpressionError as problem:
        return str(problem)
    raise AssertionError(f"{text}: expected an error")


def files() -> dict[str, str]:
    """Returns the page."""
    page = HEAD
    page += "\n## The fleet of the examples\n\nFour instances in two groups. The results below list the four values.\n\n"
    page += "| | a | b | c | d |\n| --- | --- | --- | --- | --- |\n"
    for name, values in FLEET.items():
        page += (
            f"| `{name}` | {' | '.join('absent' if value != value else shown(value) for value in values)} |\n"
        )
    page += f"| group | {' | '.join(GROUPS)} |\n"
    page += "\n## Operators\n\nFrom tight to loose: `**`, unary `-`, `* /`, `+ -`, comparisons, `~`, `&`, `|`. Comparisons do not chain.\n"
    page += "Unlike in Python, comparisons bind tighter than `& | ~`, so they need no brackets.\n\n"
    page += "| operator | meaning | example | result |\n| --- | --- | --- | --- |\n"
    for one, other, meaning, text in OPERATORS:
        signs = ", ".join(f"`{each}`" for each in (one, other) if each).replace("|", "\\|")
        page += f"| {signs} | {meaning} | {example(text)}"
    page += "\n## Functions\n\n"
    page += "Reductions (`min` to `norm`) run over the eligible instances, also over instances that the filter removes. Group reductions run over\n"
    page += "all instances of an instance's group. In `serve`, the data-parallel ranks of one URL are a group; `engines.group` names others.\n\n"
    page += "| function | meaning | example | result |\n| --- | --- | --- | --- |\n"
    for name, text in FUNCTIONS.items():
        function = getattr(expr, name)
        arguments = ", ".join(inspect.signature(function).parameters)
        meaning = " ".join((function.__doc__ or "").split()).replace("``", "`")
        page += f"| `{name}({arguments})` | {meaning} | {example(text)}"
    page += "\n## Absent values\n\n| example | result | rule |\n| --- | --- | --- |\n"
    for text, rule in ABSENT:
        page += f"| {example(text)[:-1]} {rule} |\n"
    page += "\nA score that is NaN or infinite leaves its instance out of the decision. If no instance has a score, the router picks the instance\n"
    page += "with the fewest requests and counts the decision in `lmetric_unscored_total`.\n"
    page += "\n## Errors\n\n`serve`, `simulate` and `config` refuse a wrong expression and point at the position:\n\n```text\n"
    page += "\n\n".join(error(text, kind) for text, kind in ERRORS) + "\n```\n"
    page += f"\nAn expression has at most {_core.MAX_EXPRESSION_LENGTH:,} characters and 256 levels of brackets.\n"
    page += "\n## In Python\n\nThe same language as operators and functions of `lmetric`. `lm.evaluate` computes an expression over your own columns:\n\n"
    page += '```python\nimport lmetric as lm\n\nscore = lm.where(lm.KV_HIT > 0.9, lm.BS, lm.P_TOKEN * (lm.BS + 1))\nassert str(score) == "where(kv_hit > 0.9, bs, p_token * (bs + 1))"\nassert lm.evaluate("p_token * (bs + 1)", {"p_token": [100, 40], "bs": [0, 4]}).tolist() == [100.0, 200.0]\n```\n'
    return {"docs/reference/expressions.md": page}
