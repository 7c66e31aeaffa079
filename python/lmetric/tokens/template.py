"""Chat templates: Jinja with the settings of Hugging Face's `apply_chat_template`."""

from __future__ import annotations

import copy
import json
from datetime import datetime
from functools import cached_property, lru_cache
from typing import Any, Literal, NoReturn

import jinja2
from jinja2 import meta, nodes, pass_context
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

ContentFormat = Literal["string", "openai"]

# Marks where a final message that is to be continued ends; as Hugging Face does it, space and all.
_CONTINUE = "CONTINUE_FINAL_MESSAGE_TAG "


# `tojson(indent=4)` writes spaces before each value, by its depth: some tools of 64 KB would become
# 23 MB. Tools of coding agents have a mean depth of 4 to 8, and some thousand values.
MAX_INDENTED_VALUES = 100_000  # 0.3 s: with an indent, Python's own code writes the JSON
MAX_MEAN_INDENT = 64  # spaces per value


# Characters and items that a template may write into its namespaces: up to two seconds. A template
# that adds each message to a text copies the text each time. DeepSeek's does so with system
# messages: 60,000 of 200 bytes took minutes in one of the few threads.
MAX_WRITTEN = 1 << 29


class TemplateError(Exception):
    """A template is invalid, or refuses a conversation."""


class _Generation(Extension):
    """`{% generation %}`: marks an assistant's text for training; here it is its body."""

    tags = {"generation"}  # noqa: RUF012 (as the base class declares it)

    def parse(self, parser: Parser) -> nodes.Node:
        """The body, with a scope of its own."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.exceptions.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    if indent:
        _check_indent(value, len(indent) if isinstance(indent, str) else indent)
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _check_indent(value: Any, indent: int) -> None:
    """Raises TemplateError for a value that indents would make many times longer."""
    level, depth, values, spaces = [value], 0, 0, 0
    while level:
        values += len(level)
        spaces += len(level) * depth * indent
        if values > MAX_INDENTED_VALUES:
            raise TemplateError(f"tojson with an indent writes more than {MAX_INDENTED_VALUES:,} values")
        if spaces > MAX_MEAN_INDENT * values:
            raise TemplateError(f"tojson indents its values by more than {MAX_MEAN_INDENT} on average")
        below: list[Any] = []
        for each in level:
            if isinstance(each, dict):
                below += each.values()
            elif isinstance(each, list | tuple):
                below += each
        level, depth = below, depth + 1


class _Context(Context):
    """The variables of one rendering."""

    written = 0  # characters and items that the template has written into its namespaces


class _Namespace(Namespace):
    """A namespace that counts what is written into it: only by a namespace, loops build a text."""

    def __setitem__(self, name: str, value: Any) -> None:
        if isinstance(value, str | list | tuple):
            context = object.__getattribute__(self, "context")
            context.written += len(value)
            if context.written > MAX_WRITTEN:
                raise TemplateError(f"it copies more than {MAX_WRITTEN:,} characters while it joins texts")
        super().__setitem__(name, value)


@pass_context
def _namespace(context: _Context, *args: Any, **values: Any) -> _Namespace:
    made = _Namespace(*args, **values)
    object.__setattr__(made, "context", context)
    return made


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.globals["namespace"] = _namespace
    environment.context_class = _Context
    return environment


_ENVIRONMENT = _environment()


class ChatTemplate:
    """One compiled template. Raises TemplateError for an invalid template."""

    def __init__(self, source: str, name: str) -> None:
        self.name = name
        self._source = source
        try:
            tree = _ENVIRONMENT.parse(source)
            self._template = _ENVIRONMENT.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise TemplateError(f"{name}: line {error.lineno}: {error.message}") from None
        self.indents = "indent" in source  # it may be slow: 2 us per value of indented JSON
        self.variables: frozenset[str] = frozenset(meta.find_undeclared_variables(tree))
        self.knows_developer = "'developer'" in source or '"developer"' in source
        self.content_format: ContentFormat = "openai" if _loops_over_parts(tree) else "string"

    @cached_property
    def system_first(self) -> bool:
        """Whether the template refuses a system message behind other messages.

        vLLM finds out like this, once, for /v1/messages: without the functions and filters that a
        template has otherwise, and a missing one is a refusal. Raises TemplateError if vLLM's check
        fails.
        """
        messages = [{"role": role, "content": "t"} for role in ("system", "user", "system", "user")]
        bare = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        try:
            bare.from_string(self._source).render(messages=messages, add_generation_prompt=False)
        except jinja2.TemplateError:
            return True
        except Exception as error:  # a template may fail in any way that Python can
            raise TemplateError(f"{self.name}: {type(error).__name__}: {error}") from None
        return False

    def render(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: Any = None,
        documents: Any = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: dict[str, Any],
    ) -> str:
        """The conversation's text. Raises TemplateError if the template fails or refuses it."""
        last = ""
        if continue_final_message:
            messages, last = _tagged(messages)
        try:
            text = self._template.render(
                messages=messages,
                tools=tools,
                documents=documents,
                add_generation_prompt=add_generation_prompt,
                **variables,
            )
        except Exception as error:  # a template may fail in any way that Python can
            raise TemplateError(f"{self.name}: {type(error).__name__}: {error}") from None
        return _continued(text, last) if continue_final_message else text


# Models often share a template, and a reload reads the same ones: compiling takes 10 ms.
@lru_cache(maxsize=32)
def compiled(source: str, name: str) -> ChatTemplate:
    """The template, compiled once for equal arguments. Raises TemplateError."""
    return ChatTemplate(source, name)


def _tagged(messages: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], str]:
    """The messages with a mark after the last text, and that text."""
    final = copy.deepcopy(messages[-1])
    content = final.get("content")
    if isinstance(content, str):
        final["content"] = content + _CONTINUE
        return [*messages[:-1], final], content
    for part in reversed(content or []):
        if "text" in part:
            text: str = part["text"]
            part["text"] = text + _CONTINUE
            return [*messages[:-1], final], text
    raise TemplateError("continue_final_message: the last message has no text to continue")


def _continued(text: str, last: str) -> str:
    """The text up to the end of the message to continue."""
    mark = _CONTINUE.strip()
    if last.strip() not in text or mark not in text:
        raise TemplateError("continue_final_message: the template drops the last message")
    at = text.rindex(mark)
    kept = text[:at]
    # If the template strips messages, also strip the text that the mark has protected.
    return kept if text.startswith(_CONTINUE, at) else kept.rstrip()


# How vLLM finds out in which form a template wants a message's content
# (`--chat-template-content-format auto`): as parts where it loops over them, else as text.


def _loops_over_parts(tree: nodes.Template) -> bool:
    conversations = {"messages"}
    while True:
        more = {
            assign.target.name
            for assign in tree.find_all(nodes.Assign)
            if isinstance(assign.target, nodes.Name)
            and any(_reads(assign.node, name) for name in conversations)
        }
        if more <= conversations:
            break
        conversations |= more
    messages = {
        loop.target.name
        for loop in tree.find_all(nodes.For)
        if isinstance(loop.target, nodes.Name) and any(_reads(loop.iter, name) for name in conversations)
    }

    def is_content(node: nodes.Node) -> bool:
        return any(_reads(node, name, "content") for name in messages)

    # Loops over a variable that holds a content: `content` itself, or what a macro is given one as.
    in_macros: dict[int, set[str]] = {}
    for macro in tree.find_all(nodes.Macro):
        calls = [
            call
            for call in tree.find_all(nodes.Call)
            if isinstance(call.node, nodes.Name) and call.node.name == macro.name
        ]
        names = [parameter.name for parameter in macro.args]
        held = {
            name for call in calls for name, value in zip(names, call.args, strict=False) if is_content(value)
        }
        held |= {
            keyword.key
            for call in calls
            for keyword in call.kwargs
            if keyword.key in names and is_content(keyword.value)
        }
        for loop in macro.find_all(nodes.For):
            in_macros[id(loop)] = held
    return any(
        is_content(loop.iter)
        or (isinstance(loop.iter, nodes.Name) and loop.iter.name in in_macros.get(id(loop), {"content"}))
        for loop in tree.find_all(nodes.For)
    )


def _reads(node: nodes.Node | None, name: str, key: str | None = None) -> bool:
    """Whether an expression is a variable (or its attribute `key`), filtered, tested or sliced."""
    while True:
        if isinstance(node, nodes.Filter | nodes.Test) or (
            isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice)
        ):
            node = node.node
        elif key is None:
            return node is not None and _plain(node, name)
        elif isinstance(node, nodes.Getitem):
            return isinstance(node.arg, nodes.Const) and node.arg.value == key and _plain(node.node, name)
        else:
            return isinstance(node, nodes.Getattr) and node.attr == key and _plain(node.node, name)


def _plain(node: nodes.Node, name: str) -> bool:
    return isinstance(node, nodes.Name) and node.ctx == "load" and node.name == name
