"""docs/reference/policies.md: policies, the expression language and the indicators."""

from __future__ import annotations

import inspect
import re
from typing import Any

from lmetric import _core, expr, indicator_table, policy_table

OPERATORS = [
    ("a + b", "a - b", "sum, difference", "p_token + 100 * bs"),
    ("a * b", "a / b", "product, quotient", "p_token * (bs + 1)"),
    ("a ** b", "", "power; right-associative: `2 ** 3 ** 2` is 512", "(bs + 1) ** 2"),
    ("-a", "", "negative", "-bs"),
    ("a < b", "a <= b", "comparison of numbers", "bs <= 4"),
    ("a > b", "a >= b", "comparison of numbers", "kv_hit > 0.5"),
    ("a == b", "a != b", "comparison of numbers or of texts", 'tenant == "acme"'),
    ("a & b", "a | b", "and, or, of truth values", "bs < 8 & kv_hit > 0.5"),
    ("~a", "", "not, of a truth value", "~(bs > 2)"),
]
# In the order of the core.
FUNCTIONS = (
    "where", "minimum", "maximum", "clip", "log", "exp", "sqrt", "abs", "min", "max", "mean", "std", "norm",
    "group_min", "group_max", "group_sum", "group_mean",
)  # fmt: skip

HEAD = """\
# Policies

`scripts/make_reference policies` generates this page. A policy gives each instance a score, and the best score gets the request. Ties
are drawn at random. Names in rules are [indicators](#indicators) and parameters.

```yaml
policy: linear
knobs: {lam: 0.6}
```

`lmetric-router policies NAME` prints a policy with the range and the meaning of each parameter.
"""
ABOUT = {
    "stable": ("Stable", "`serve` accepts them."),
    "experimental": (
        "Experimental",
        "They work, but studies do not recommend them for all traffic, or real engines have not tested them. "
        "`serve` accepts them with `experimental: true`.",
    ),
    "study": (
        "For studies",
        "Oracles, ablations, negative controls, and rules that gain nothing. Simulations accept them, `serve` never does.",
    ),
}
EXPRESSIONS = f"""
## Expressions

Write a policy of your own as an expression: a score, whose lowest value wins, or a mapping.

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

| key | value | meaning |
| --- | --- | --- |
| `score` | number | score of an instance |
| `prefer` | `min` or `max` | whether the lowest score (the default) or the highest wins |
| `filter` | truth value | only instances with a true value are scored; if none has one, the router ignores the filter for this decision |
| `then` | list of numbers | tie-breaks in order: the lowest wins, with `{{max: kv_hit}}` the highest |

- Names are indicators, in any case, or parameters of your own: `knobs: {{lam: 0.7}}`.
- Numbers are `8`, `0.5` or `1e-3`. Texts are `"acme"` or `'acme'`.
- An absent indicator is NaN. A comparison with NaN is false, and functions of all instances skip it.
- An instance whose score is NaN or infinite is left out of the decision. If no instance has a score, the instance with the fewest requests
  gets the request, and `lmetric_unscored_total` counts it.
- `serve` and `config` refuse a wrong expression and show the position of the error.
- An expression has at most {_core.MAX_EXPRESSION_LENGTH:,} characters and 256 levels of brackets.

From tight to loose: `**`, unary `-`, `* /`, `+ -`, comparisons, `~`, `&`, `|`. Comparisons do not chain, and bind tighter than `& | ~`.

"""
REDUCTIONS = """
`min` to `norm` with one argument run over the eligible instances, also those that the filter removes. Group functions run over all
instances of a group: the data-parallel ranks of one URL, or the engines with one `group`.

"""
SCOPES = {
    "instance": "one value for each instance",
    "pair": "one value for each instance and request",
    "request": "one value for each request",
}
INDICATORS = """
## Indicators

Python's symbols are the same names in capitals: `lm.P_TOKEN`. `GET /debug/indicators` shows the values of each engine.
`lmetric-router indicators --json` also prints when each indicator is absent and how fresh it is. Counts of this router's requests exclude those that other routers sent.
"""


def cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def number(value: float) -> str:
    """Returns a number in a short form, such as 1e9."""
    if value != value:
        return "none"
    plain, scientific = f"{value:g}", f"{value:.0e}".replace("e+0", "e").replace("e-0", "e-")
    return (
        scientific
        if float(scientific) == value and len(scientific) + 1 < len(f"{value:f}".rstrip("0."))
        else plain
    )


def first_sentence(text: str) -> str:
    """Returns the first sentence, without its full stop."""
    return re.split(r"(?<!Eq)\. ", text)[0].removesuffix(".")


def parameter(knob: dict[str, Any]) -> str:
    """Returns a parameter with its default."""
    default = str(knob["default"] == 1.0).lower() if knob["type"] == "bool" else number(knob["default"])
    return f"`{knob['name']}` {default}"


def policies() -> str:
    """Returns the tables of policies."""
    page = ""
    for maturity, (title, about) in ABOUT.items():
        page += f"\n## {title}\n\n{about}\n\n| policy | rule | source | parameters and defaults |\n| --- | --- | --- | --- |\n"
        for policy in policy_table():
            if policy["maturity"] == maturity:
                rule = "<br>".join(f"`{part.replace('`', '')}`" for part in policy["formula"].split("; "))
                knobs = ", ".join(parameter(knob) for knob in policy["knobs"])
                source = policy["source"].partition(";")[0]
                page += f"| `{policy['name']}` | {cell(rule)} | {cell(source)} | {knobs} |\n"
    return page


def expressions() -> str:
    """Returns the language. Raises `ExpressionError` if an example is wrong."""
    page = EXPRESSIONS + "| operator | meaning | example |\n| --- | --- | --- |\n"
    for one, other, meaning, text in OPERATORS:
        _core.check_expression(text, "any")
        signs = ", ".join(f"`{each}`" for each in (one, other) if each)
        page += f"| {cell(signs)} | {meaning} | `{cell(text)}` |\n"
    page += REDUCTIONS + "| function | meaning |\n| --- | --- |\n"
    for name in FUNCTIONS:
        function = getattr(expr, name)
        arguments = ", ".join(inspect.signature(function).parameters)
        meaning = cell((function.__doc__ or "").replace("``", "`"))
        page += f"| `{name}({arguments})` | {first_sentence(meaning)} |\n"
    return page


def indicators() -> str:
    """Returns the tables of indicators."""
    page = INDICATORS
    for scope, title in SCOPES.items():
        page += f"\n**{title[0].upper() + title[1:]}:**\n\n| name | unit | meaning |\n| --- | --- | --- |\n"
        for row in indicator_table():
            # Not what a program that makes this page declares.
            if row["scope"] == scope and row["owner"] != "declared":
                meaning = cell(first_sentence(row["about"]))
                page += f"| `{row['name']}` | {cell(row['unit'])} | {meaning} |\n"
    return page


def files() -> dict[str, str]:
    """Returns the page."""
    return {"docs/reference/policies.md": HEAD + policies() + expressions() + indicators()}
