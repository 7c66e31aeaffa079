"""An answer that an engine parses into more than text: its reasoning, content and tool calls.

`Parts` adds up the deltas of chunks. A parser may send a part earlier or later than another run of
the same parser, which got its tokens in other pieces. So the parts of two runs are equal if one is
the beginning of the other, field by field.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

JSON = Mapping[str, Any]

# Texts of an answer, in the order in which models write them.
TEXTS = ("reasoning", "content")


class PartsDiffer(Exception):
    """Another run of the parser gives other parts. The message names the first one."""


@dataclass(slots=True)
class Call:
    """A tool call. Empty: not known yet."""

    id: str = ""
    name: str = ""
    arguments: str = ""


@dataclass(slots=True)
class Parts:
    """The parts of an answer so far."""

    reasoning: str = ""
    content: str = ""
    calls: list[Call] = field(default_factory=list)

    def add(self, delta: JSON) -> None:
        """Adds a chunk's delta. Raises PartsDiffer if its calls have no order."""
        self.reasoning += delta.get("reasoning") or delta.get("reasoning_content") or ""
        self.content += delta.get("content") or ""
        if calls := delta.get("tool_calls"):
            self.add_calls([calls])

    def add_calls(self, deltas: Iterable[Iterable[JSON]]) -> None:
        """Adds the `tool_calls` of chunks. Raises PartsDiffer if the calls have no order.

        A call may have many thousand fragments, so each text is joined once.
        """
        names: defaultdict[int, list[str]] = defaultdict(list)
        arguments: defaultdict[int, list[str]] = defaultdict(list)
        for each in chain.from_iterable(deltas):
            index = each.get("index")
            if type(index) is not int or not 0 <= index <= len(self.calls):
                raise PartsDiffer("its tool calls have no order")
            if index == len(self.calls):
                self.calls.append(Call())
            call, function = self.calls[index], each.get("function") or {}
            call.id = call.id or each.get("id") or ""
            names[index].append(function.get("name") or "")
            arguments[index].append(function.get("arguments") or "")
        for index, texts in names.items():
            self.calls[index].name += "".join(texts)
            self.calls[index].arguments += "".join(arguments[index])

    def news(self, whole: Parts) -> dict[str, Any]:
        """Returns the delta from these parts to the parts of another run; empty: it has no more.

        Raises PartsDiffer unless one is the beginning of the other.
        """
        delta: dict[str, Any] = {}
        for name in TEXTS:
            if text := _more(name, getattr(self, name), getattr(whole, name)):
                delta[name] = text
        calls = []
        for index, call in enumerate(whole.calls):
            if index >= len(self.calls):
                function = {"name": call.name, "arguments": call.arguments}
                calls.append({"id": call.id, "type": "function", "index": index, "function": function})
                continue
            known = self.calls[index]
            function = {
                name: text
                for name in ("name", "arguments")
                if (text := _more(f"tool call {index}", getattr(known, name), getattr(call, name)))
            }
            if function:
                calls.append({"index": index, "function": function})
        if calls:
            delta["tool_calls"] = calls
        return delta

    def ends_with(self, delta: JSON) -> bool:
        """Whether these parts end with the parts of a delta."""
        if not all(getattr(self, name).endswith(delta.get(name) or "") for name in TEXTS):
            return False
        for each in delta.get("tool_calls") or ():
            if each["index"] >= len(self.calls):
                return False
            call, function = self.calls[each["index"]], each.get("function") or {}
            if not call.arguments.endswith(function.get("arguments") or ""):
                return False
            if function.get("name") not in (None, call.name):
                return False
        return True


def _more(what: str, known: str, whole: str) -> str:
    """Returns the part of a text that is not known. Raises PartsDiffer."""
    if whole.startswith(known):
        return whole[len(known) :]
    if known.startswith(whole):
        return ""
    raise PartsDiffer(f"the answer's {what} differs from the text that the client has")
