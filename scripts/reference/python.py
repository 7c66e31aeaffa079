"""docs/reference/python.md: the public names of `lmetric`, from docstrings and type stubs.

griffe reads the signatures from the sources and from `_core.pyi`. Docstrings of the compiled core
come from the extension itself.
"""

from __future__ import annotations

import inspect
import logging
import re
from itertools import chain
from pathlib import Path
from typing import Any

import griffe

import lmetric as lm
from lmetric import options

LONG_WORDS = 12  # a sentence with more is cut at its colon
SOURCES = Path(__file__).parent.parent.parent / "python"
HEAD = """\
# Python

`lmetric` is also a library: route requests in your own gateway, test a policy, or simulate a fleet. It opens no connection unless you use
`Relay` or `EventFeed`. `scripts/make_reference python` generates the lists from docstrings; `help(lmetric.Router.route)` prints all
arguments with units. Times are seconds, lengths are tokens.

```python
import lmetric as lm

router = lm.Router("lmetric", block_size=16)
for name in ("gpu-0", "gpu-1"):
    router.add_instance(name, cache_blocks=4_000)

request = lm.Request([101, 2023, 2003], max_tokens=200, session="chat-7")
decision, ticket = router.route(request)
print(decision.instance, decision.predicted_cached_tokens)

with ticket:
    ticket.sent()  # the request is on its way
    ticket.first_token()
    ticket.tokens(199)  # further output tokens, as they come
    ticket.done(prompt_tokens=3, output_tokens=200)
```

The router counts the request as soon as `route` returns. Report each event with the ticket. Leaving the block closes the ticket, also
after an exception. Call `router.tick()` about once a second. `examples/gateway.py` is a complete gateway.

Threads may share a router. `route_many` routes a batch in one call and decides without the interpreter lock. Its list has the decision and
the ticket of each request, or the error that `route` would raise. A forked process has a copy of the router, and starts its own `EventFeed`.

A policy is a registered name, an expression, a `Policy`, or a function whose parameters name [indicators](policies.md#indicators). A function
gets arrays with one entry per eligible instance. It returns one score per instance, and the lowest wins:

```python
import lmetric as lm


def mine(p_token, bs):
    return p_token * (bs + 1)


assert str(lm.P_TOKEN * (lm.BS + 1)) == "p_token * (bs + 1)"
for policy in ("vllm", lm.P_TOKEN * (lm.BS + 1), mine):
    run = lm.simulate("slice", policy=policy, instances=8)
    print(run.summary().ttft_seconds.p99)
```

A prompt is one of: `token_ids` (any sequence or array of integers), `text` (counted as 4 bytes per token), `block_hashes`, or
`prompt_tokens` alone if no prefix can match. By default the index assumes that an instance caches the prompts that you route to it. With
`kv_source="exact"` it follows the engines' KV events, from an `EventFeed` or from `blocks_stored` and the methods beside it.
"""
# Names with their members, then functions; a name of `lmetric.__all__` outside is an error.
GROUPS = {
    "Route": ("Router", "Request", "Decision", "Ticket", "Arrival"),
    "Serve": ("Relay", "EngineTarget", "EventFeed", "Board", "LoadMessage", "encode_load"),
    "Schedule engines": ("StepTable", "EngineBoost"),
    "Policies": (
        "Policy",
        "PolicyFunction",
        "policy_function",
        "policy_table",
        "indicator",
        "indicator_table",
        "knob",
    ),
    "Expressions": ("Expr", "check_expression", "evaluate"),
    "Simulate": (
        "simulate",
        "compare",
        "Scenario",
        "Run",
        "Comparison",
        "Trace",
        "load_trace",
        "FleetChange",
        "forecast_function",
    ),
}
OPTIONS = """
## Options

Arguments of `Router`, `Router.configure`, `Router.set_admission` and `simulate`. None turns an option off. Files and command lines accept the
same fields: `{"kind": "libra", "probes": 8}`.

"""


def text(value: str) -> str:
    """Returns a docstring's first sentence as Markdown, cut at its colon if it is long."""
    value = re.sub(r"(?<!`)``([^`]+)``(?!`)", r"`\1`", inspect.cleandoc(value))
    sentence = re.split(r"\.\s", " ".join(value.partition("\n\n")[0].split()) + " ")[0].rstrip(". ")
    sentence = sentence.partition("; ")[0]
    head = sentence.partition(": ")[0]
    return head if len(sentence.split()) > LONG_WORDS and len(head.split()) > 4 else sentence


def signature(name: str, function: Any) -> str:
    """Returns a signature without types."""
    shown, keyword = [], False
    for each in function.parameters:
        if each.name in ("self", "cls"):
            continue
        kind = each.kind.value if each.kind else ""
        if kind == "keyword-only" and not keyword:
            shown.append("*")
            keyword = True
        keyword = keyword or kind == "variadic positional"
        stars = {"variadic positional": "*", "variadic keyword": "**"}.get(kind, "")
        default = "" if each.default is None or stars else f"={each.default}"
        shown.append(f"{stars}{each.name}{default}")
    return f"{name}({', '.join(shown)})"


def option(name: str) -> str:
    """Returns an option class with its fields and their defaults."""
    cls = getattr(options, name)
    fields = [
        name if field.is_required() else f"{name}={field.default!r}"
        for name, field in cls.model_fields.items()
    ]
    shown = name if name in lm.__all__ else f"options.{name}"
    return f"- `{shown}({', '.join(fields)})`: {text(cls.__doc__ or '')}\n"


def class_of(name: str, declared: Any, runtime: Any) -> str:
    """Returns a class with its members: a list, or names alone if it belongs to simulations."""
    shown, rows = name, []
    for each in declared.members.values():
        if each.is_alias or not (each.is_function or each.is_attribute):
            continue
        if each.name in ("__new__", "__init__"):
            shown = signature(name, each)
        docstring = inspect.getdoc(getattr(runtime, each.name, None)) or ""
        if each.name.startswith("_") or not docstring or isinstance(getattr(runtime, each.name), int):
            continue
        row = each.name if each.is_attribute else signature(each.name, each)
        if name in GROUPS["Simulate"]:
            rows.append(f"`{each.name}`")
        elif not docstring.startswith("Called by"):
            rows.append(f"- `{row}`: {text(docstring)}\n")
    if name == "Request":
        shown = name  # its fields follow
    about = f"\n### `{name}`\n\n`{shown}`: {text(inspect.getdoc(runtime) or '')}.\n"
    if name in GROUPS["Simulate"]:
        return about + (f"\nMembers: {', '.join(rows)}.\n" if rows else "")
    return about + ("\n" + "".join(rows) if rows else "")


def is_option(name: str) -> bool:
    """Whether a name is of a public class in `lmetric.options`."""
    cls = getattr(options, name)
    return (
        getattr(cls, "__module__", "") == options.__name__ and hasattr(cls, "model_fields") and name[0] != "_"
    )


def files() -> dict[str, str]:
    """Returns the page."""
    logging.getLogger("griffe").setLevel(logging.ERROR)  # docstrings of the core are Markdown
    loader = griffe.GriffeLoader(search_paths=[str(SOURCES)], allow_inspection=False)
    loader.load("lmetric_lab")
    package = loader.load("lmetric")
    loader.resolve_aliases()
    names = [name for name in lm.__all__ if not isinstance(getattr(lm, name), lm.Expr)]
    functions = [name for name in names if getattr(getattr(lm, name), "__module__", "") == "lmetric.expr"]
    optional = [name for name in sorted(vars(options)) if is_option(name)]
    errors = [
        name
        for name in names
        if inspect.isclass(getattr(lm, name)) and issubclass(getattr(lm, name), Exception)
    ]
    constants = [name for name in names if isinstance(getattr(lm, name), str | tuple | list)]
    functions = [name for name in functions if name not in {*chain(*GROUPS.values())}]
    known = {*chain(*GROUPS.values()), *functions, *optional, *errors, *constants}
    assert set(names) <= known, f"lmetric.{min(set(names) - known)}: no group on the page"
    page = HEAD
    for title, members in GROUPS.items():
        classes = singles = ""
        for name in members:
            runtime, declared = getattr(lm, name), package[name]
            declared = declared.final_target if declared.is_alias else declared
            if inspect.isclass(runtime):
                classes += class_of(name, declared, runtime)
            else:
                singles += f"- `{signature(name, declared)}`: {text(inspect.getdoc(runtime) or '')}\n"
        page += f"\n## {title}\n" + (f"\n{singles}" if singles else "") + classes
        if title == "Expressions":
            page += f"\n[Policies](policies.md#expressions) describes the functions: {', '.join(f'`{name}`' for name in functions)}.\n"
    page += OPTIONS + "".join(map(option, optional))
    page += "\n## Errors\n\n" + "".join(
        f"- `{name}`: {text(getattr(lm, name).__doc__ or '')}\n" for name in errors
    )
    page += f"\n## Constants\n\n{', '.join(f'`{name}`' for name in constants)}, and each indicator as an expression: `P_TOKEN`.\n"
    return {"docs/reference/python.md": page}
