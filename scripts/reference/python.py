"""docs/reference/api.md: the public names of `lmetric`, from docstrings and type stubs.

griffe reads the signatures from the sources and from `_core.pyi`. Docstrings of the compiled core
come from the extension itself.
"""

from __future__ import annotations

import dataclasses
import inspect
import logging
import re
from pathlib import Path
from typing import Any, get_args

import griffe

import lmetric as lm
from lmetric import options

SOURCES = Path(__file__).parent.parent.parent / "python"
HEAD = """\
# Python API

`scripts/make_reference python` generates this page from docstrings and type stubs. [Python](python.md) explains the library with examples.
All names are in `lmetric`. Each [indicator](indicators.md) is also a symbol of an expression: `lm.P_TOKEN`. Times are seconds, lengths are tokens.
"""
WIDTH = 96


def escape(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def text(value: str) -> str:
    """Returns a docstring's text as Markdown: doctests become code blocks."""
    value = re.sub(r"(?<!`)``([^`]+)``(?!`)", r"`\1`", value)
    blocks = []
    for block in value.split("\n\n"):
        fence = "```pycon\n" + block + "\n```" if block.lstrip().startswith(">>>") else block
        blocks.append(fence)
    return "\n\n".join(blocks)


def documented(docstring: str) -> str:
    """Returns a docstring as Markdown, with its sections as lists."""
    made = []
    for section in griffe.Docstring(inspect.cleandoc(docstring)).parse("google"):
        kind, value = section.kind.value, section.value
        if kind == "text":
            made.append(text(value))
        elif kind == "examples":
            made.append(
                "\n\n".join(
                    f"```pycon\n{code}\n```" if "example" in str(what) else text(code) for what, code in value
                )
            )
        else:
            rows = []
            for item in value:
                name = getattr(item, "name", "") or getattr(item, "annotation", "") or ""
                rows.append(f"- {f'`{name}`: ' if name else ''}{text(' '.join(item.description.split()))}")
            made.append(f"**{kind.capitalize()}**\n\n" + "\n".join(rows))
    return "\n\n".join(made) + "\n" if made else ""


def signature(name: str, function: Any) -> str:
    """Returns a signature as code, one parameter a line if it is long."""
    parameters = [each for each in function.parameters if each.name not in ("self", "cls")]
    shown, keyword = [], False
    for each in parameters:
        kind = each.kind.value if each.kind else ""
        if kind == "keyword-only" and not keyword:
            shown.append("*")
            keyword = True
        keyword = keyword or kind == "variadic positional"
        stars = {"variadic positional": "*", "variadic keyword": "**"}.get(kind, "")
        annotation = f": {each.annotation}" if each.annotation is not None else ""
        default = "" if each.default is None or stars else f" = {each.default}"
        shown.append(f"{stars}{each.name}{annotation}{default}")
    returns = f" -> {function.returns}" if function.returns is not None else ""
    line = f"{name}({', '.join(shown)}){returns}"
    if len(line) > WIDTH:
        line = f"{name}(\n" + "".join(f"    {each},\n" for each in shown) + f"){returns}"
    return f"```py\n{line}\n```\n"


def tidy(declared: Any) -> bool:
    """Whether a member is public."""
    return not declared.name.startswith("_") or declared.name in ("__new__", "__init__")


def option(name: str, cls: Any) -> str:
    """Returns an option class as a table of its fields."""
    docs = options.field_docs(cls)
    page = f"\n### `{name}`\n\n{documented(cls.__doc__ or '')}"
    rows = dataclasses.fields(cls)
    if rows:
        page += "\n| field | default | meaning |\n| --- | --- | --- |\n"
    for each in rows:
        default = "" if each.default is dataclasses.MISSING else f"`{each.default!r}`"
        page += f"| `{each.name}` | {default} | {escape(docs[each.name])} |\n"
    return page


def method(owner: str, declared: Any, runtime: Any) -> str:
    if declared.is_attribute and isinstance(runtime, int):
        return f"\n#### `{owner}.{declared.name}`\n\n`int`, a constant: {runtime:,}.\n"
    docstring = inspect.getdoc(runtime) or ""
    if declared.name in ("__new__", "__init__"):
        return signature(owner, declared)
    if not docstring:
        return ""
    if declared.is_attribute:
        return f"\n#### `{owner}.{declared.name}`\n\n`{declared.annotation}`. {documented(docstring)}"
    return (
        f"\n#### `{owner}.{declared.name}`\n\n{signature(declared.name, declared)}\n{documented(docstring)}"
    )


def described(name: str, declared: Any, runtime: Any) -> str:
    """Returns a class with its members, or a function."""
    docstring = inspect.getdoc(runtime) or ""
    if declared.is_function:
        return f"\n### `{name}`\n\n{signature(name, declared)}\n{documented(docstring)}"
    members = [each for each in declared.members.values() if tidy(each) and not each.is_alias]
    page = f"\n### `{name}`\n\n"
    made = {
        each.name: method(name, each, getattr(runtime, each.name, None))
        for each in members
        if each.is_function or each.is_attribute
    }
    first = made.pop("__new__", "") or made.pop("__init__", "")
    made.pop("__init__", "")
    return page + (first + "\n" if first else "") + documented(docstring) + "".join(made.values())


def files() -> dict[str, str]:
    """Returns the page."""
    logging.getLogger("griffe").setLevel(logging.ERROR)  # docstrings of the core are Markdown
    package = griffe.load(
        "lmetric", search_paths=[str(SOURCES)], allow_inspection=False, resolve_aliases=True
    )
    used = {
        cls: f"{parameter}="
        for parameter, union in (
            ("split", options.SplitOption), ("priority", options.PriorityOption), ("rebalance", options.RebalanceOption)
        )
        for cls in get_args(union)
    }  # fmt: skip
    parts: dict[str, list[str]] = {
        "Classes": [],
        "Options": [],
        "Functions": [],
        "Errors": [],
        "Constants": [],
    }
    for name in lm.__all__:
        runtime = getattr(lm, name)
        if isinstance(runtime, lm.Expr):
            continue
        if inspect.isclass(runtime) and issubclass(runtime, Exception):
            parts["Errors"].append(f"- `{name}`: {' '.join(documented(runtime.__doc__ or '').split())}\n")
        elif (
            inspect.isclass(runtime)
            and dataclasses.is_dataclass(runtime)
            and runtime.__module__ == options.__name__
        ):
            parts["Options"].append(option(name, runtime))
        elif inspect.isclass(runtime) or callable(runtime):
            declared = package[name]
            declared = declared.final_target if declared.is_alias else declared
            parts["Classes" if inspect.isclass(runtime) else "Functions"].append(
                described(name, declared, runtime)
            )
        else:
            parts["Constants"].append(f"- `{name}`: `{type(runtime).__name__}`\n")
    for further in (options.SimulatedFetch, options.Routing):
        parts["Options"].append(option(f"options.{further.__name__}", further))
    page = HEAD
    for title, found in parts.items():
        page += f"\n## {title}\n" + ("" if found[0].startswith("\n") else "\n")
        if title == "Options":
            names = ", ".join(f"`{cls.__name__}` (`{parameter}`)" for cls, parameter in used.items())
            page += f"\nArguments of `Router`, `Router.configure` and `simulate`: {names},\n`PrefixFetch` (`prefix_fetch=`) and `Guard` (`guard=`). None turns an option off.\n"
        page += "".join(found)
    return {"docs/reference/api.md": page}
